"""qkv.quantization: what is found in a checkpoint, and that its descriptions give the values that
the formats' own tools give."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv import _core
from qkv.quantization import Detected, detect
from ref import make_tiny, stored

QUANTIZED = {
    "autoround-int4-g128-sym-qwen3-s": "auto-round",
    "awq-gemm-g128-llama-tiny": "awq",
    "bnb-nf4-llama-g": "bitsandbytes",
    "ct-fp8-dynamic-qwen3-s": "compressed-tensors",
    "ct-fp8-static-kv-llama-g": "compressed-tensors",
    "ct-mxfp4-llama-g": "compressed-tensors",
    "ct-nvfp4-qwen3-s": "compressed-tensors",
    "ct-w4a16-qwen3moe": "compressed-tensors",
    "ct-w8a8-int8-qwen3-s": "compressed-tensors",
    "fp8-block-deepseekv3": "fp8",
    "fp8-static-autofp8-llama-g": "fp8",
    "gptoss-mxfp4": "mxfp4",
    "gptq-int4-g32-descact-asym-qwen3-s": "gptq",
    "gptq-v2-int4-g64-asym-llama-g": "gptq",
    "mlx-4bit-g64-llama-tiny": "mlx",
    "modelopt-fp8-llama-g": "modelopt_fp8",
    "modelopt-nvfp4-qwen3-s": "modelopt_fp4",
    "quark-fp8-kv8-llama-g": "quark",
}


def found_in(folder: Path, quantization: str | None = None) -> Detected:
    return detect(_core.Checkpoint(str(folder)), quantization)


def all_tensors(folder: Path) -> dict[str, stored.Tensor]:
    found: dict[str, stored.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= stored.read(path)
    return found


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_of_every_tool(fixtures_dir: Path, name: str) -> None:
    """Bit for bit what the tool's own code gives."""
    folder = fixtures_dir / name
    found = found_in(folder)
    assert found.method == QUANTIZED[name]
    assert found.notes == [] and found.online is None
    tensors = all_tensors(folder)
    expected = np.load(folder / "dequant.npz")
    weights = [key.removesuffix("|shape") for key in expected.files if key.endswith("|shape")]
    assert len(weights) >= 2
    for weight in weights:
        shape = tuple(int(n) for n in expected[f"{weight}|shape"])
        values = evaluated(found, tensors, weight, shape)
        check_values(name, expected, weight, values)


def evaluated(
    found: Detected, tensors: dict[str, stored.Tensor], weight: str, shape: tuple[int, ...]
) -> stored.F32:
    """The hub's [experts, in, out] of gpt-oss is the transpose of what is stored."""
    if len(shape) == 3:
        n_experts, k_in, n_out = shape
        values = stored.evaluate(found.matrices[weight], tensors, n_experts * n_out, k_in)
        return np.ascontiguousarray(values.reshape(n_experts, n_out, k_in).transpose(0, 2, 1))
    return stored.evaluate(found.matrices[weight], tensors, *shape)


# The reference's order of operations is another, or it ends in bf16:
#   NVFP4: code * (scale * factor), which rounds twice; factor * (scale * code) rounds once.
#   bitsandbytes gives values in the dtype that quant_state has: here bf16.
ULPS = {"ct-nvfp4-qwen3-s": 2, "modelopt-nvfp4-qwen3-s": 1}
IN_BF16 = ("bnb-nf4-llama-g",)


def same(name: str, values: stored.F32, wanted: stored.F32) -> bool:
    if name in IN_BF16:
        values = make_tiny.bf16_values(make_tiny.bf16_bits(values))
    if name in ULPS:
        steps = np.abs(values - wanted) / np.spacing(np.abs(wanted))
        return bool(steps.max() <= ULPS[name])
    return np.array_equal(values, wanted)


def check_values(name: str, expected: Any, weight: str, values: stored.F32) -> None:
    rows = values.reshape(-1, values.shape[-1])
    for key, part in ((weight, rows), ("rows_first64", rows[:64]), ("rows_last16", rows[-16:])):
        key = key if key == weight else f"{weight}|{key}"
        if key in expected.files:
            assert same(name, part, expected[key].reshape(part.shape)), key
    if name in ULPS:
        sums = rows.astype(np.float64).sum(axis=1)
        assert np.abs(sums - expected[f"{weight}|rowsum_f64"]).max() <= 1e-5
        return
    if name in IN_BF16:
        values = make_tiny.bf16_values(make_tiny.bf16_bits(values))
    digest = hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()
    assert digest == str(expected[f"{weight}|sha256"]), weight
