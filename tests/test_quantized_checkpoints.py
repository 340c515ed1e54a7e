"""Checkpoints that the formats' own tools wrote: the same dequantized values, the same
log-probabilities, without a flag."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import _core
from qkv.quantization import detect
from qkv.quantization.wire import to_core
from ref import forward, stored
from test_models import Expected
from tools import format_distances

# The tool's reference computes these in another order, so that values differ by one fp32 rounding.
ONE_ROUNDING = ("ct-nvfp4-qwen3-s", "modelopt-nvfp4-qwen3-s")  # code * (scale * global scale)
NAMES = (
    "autoround-int4-g128-sym-qwen3-s",
    "awq-gemm-g128-llama-tiny",
    "bnb-nf4-llama-g",
    "ct-fp8-dynamic-qwen3-s",
    "ct-fp8-static-kv-llama-g",
    "ct-mxfp4-llama-g",
    "ct-nvfp4-qwen3-s",
    "ct-w4a16-qwen3moe",
    "ct-w8a8-int8-qwen3-s",
    "fp8-block-deepseekv3",
    "fp8-static-autofp8-llama-g",
    "gptq-int4-g32-descact-asym-qwen3-s",
    "gptq-v2-int4-g64-asym-llama-g",
    "mlx-4bit-g64-llama-tiny",
    "modelopt-fp8-llama-g",
    "modelopt-nvfp4-qwen3-s",
    "quark-fp8-kv8-llama-g",
)
FLOAT32_BOUND = 1e-3
# Rounding gives a row of it to another expert, as test_models.py says of a base model: its largest
# differences are compared without the last 1 %. Their mean is a quarter of the noise's.
ONE_FLIP = ("fp8-block-deepseekv3",)
EXPERTS = ("ct-w4a16-qwen3moe", "fp8-block-deepseekv3", "gptoss-mxfp4")


def expected_parts(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(tensor's name, what dequant.npz says of it)."""
    stored = dict(np.load(folder / "dequant.npz"))
    for name in sorted({key.split("|")[0] for key in stored}):
        yield name, {key: value for key, value in stored.items() if key.split("|")[0] == name}


def check_values(name: str, values: np.ndarray[Any, Any], wanted: dict[str, Any], ulp: int) -> None:
    def equal(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
        if ulp == 0:
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), err_msg=name)
        else:
            np.testing.assert_array_almost_equal_nulp(got, want, nulp=ulp)

    assert tuple(wanted[f"{name}|shape"]) == values.shape
    if name in wanted:
        equal(values, wanted[name])
    else:
        equal(values[:64], wanted[f"{name}|rows_first64"])
        equal(values[-16:], wanted[f"{name}|rows_last16"])
    if ulp == 0:
        digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
        assert digest == str(wanted[f"{name}|sha256"])


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_values(fixtures_dir: Path, name: str) -> None:
    folder = fixtures_dir / name
    checkpoint = _core.Checkpoint(str(folder))
    detected = detect(checkpoint)
    matrices, arrays = to_core(detected.matrices)
    checked = 0
    for tensor, wanted in expected_parts(folder):
        shape = wanted[f"{tensor}|shape"]
        if tensor not in detected.matrices:
            continue
        values = checkpoint.matrix(tensor, (int(shape[0]), int(shape[1])), matrices, arrays)
        check_values(tensor, values, wanted, 1 if name in ONE_ROUNDING else 0)
        checked += 1
    checkpoint.close()
    assert checked


def prompt_logprobs(folder: Path, prompts: list[Any], **options: Any) -> list[Any]:
    sizes: dict[str, Any] = {"threads": 1, "kv_tokens": 4096, "max_model_len": 512}
    sizes["kv_cache_dtype"] = "bf16"
    with qkv.Engine(folder, **(sizes | options)) as engine:
        return [score.token_logprobs for score in engine.score(prompts, progress=False)]


# The values of gpt-oss' tensors are in test_quantization_detect.py.
RUN = [*NAMES, "gptoss-mxfp4"]


@pytest.mark.parametrize("name", RUN)
def test_float32_log_probabilities(fixtures_dir: Path, name: str) -> None:
    expected = Expected(fixtures_dir / name)
    options = {"compute_dtype": "float32", "activation_quant": "off", "kv_cache_dtype": "auto"}
    got = prompt_logprobs(fixtures_dir / name, expected.prompts, **options)
    assert expected.differences(got).max() <= FLOAT32_BOUND


@pytest.mark.parametrize("name", ["ct-w4a16-qwen3moe", "gptoss-mxfp4"])
def test_greedy_tokens(fixtures_dir: Path, name: str) -> None:
    expected = Expected(fixtures_dir / name)
    params = qkv.SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"compute_dtype": "float32", "activation_quant": "off"}
    with qkv.Engine(fixtures_dir / name, threads=1, kv_tokens=2048, **options) as engine:
        outputs = engine.generate(expected.prompts, params, progress=False)
    expected.check_greedy([output.outputs[0] for output in outputs], FLOAT32_BOUND)


@pytest.mark.parametrize("name", RUN)
def test_bf16_log_probabilities(fixtures_dir: Path, name: str) -> None:
    """No further off than transformers in bfloat16 is on a model of this kind: the one that most of
    them come from, or one with experts, where rounding gives rows to another expert."""
    kind = "base-qwen3moe-b-tiny" if name in EXPERTS else "base-qwen3-s-tiny"
    base = Expected(fixtures_dir / kind)
    expected = Expected(fixtures_dir / name)
    got = prompt_logprobs(fixtures_dir / name, expected.prompts, activation_quant="off")
    off = expected.differences(got)
    n = int(off.size * (0.99 if name in ONE_FLIP else 1))
    assert np.sort(off.ravel())[:n].max() <= base.bf16_noise().max()
    assert off.mean() <= base.bf16_noise().mean()


@pytest.mark.parametrize("activation_quant", ["off", "checkpoint"])
@pytest.mark.parametrize("name", RUN)
def test_same_bits_for_any_batch(fixtures_dir: Path, name: str, activation_quant: str) -> None:
    prompts = Expected(fixtures_dir / name).prompts[1:]
    folder = fixtures_dir / name
    together = prompt_logprobs(folder, prompts, activation_quant=activation_quant)
    for options in ({"threads": 2, "chunk_tokens": 16}, {"max_running": 1}):
        alone = prompt_logprobs(folder, prompts, activation_quant=activation_quant, **options)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a, b)


# compressed-tensors' own runs in float32. ModelOpt and Quark ran in bf16 (FORMATS.md).
ACTIVATIONS = (
    "ct-fp8-dynamic-qwen3-s",
    "ct-fp8-static-kv-llama-g",
    "ct-mxfp4-llama-g",
    "ct-nvfp4-qwen3-s",
    "ct-w8a8-int8-qwen3-s",
)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantized_activations(fixtures_dir: Path, name: str) -> None:
    """Nearer to the tool's own result than half of what quantizing activations changes in it. What
    is left are codes on the other side of a bound; FORMATS.md has the figures."""
    folder = fixtures_dir / name
    tool = format_distances.tool_values(folder)
    assert tool is not None
    n_prompts = len(format_distances.prompts_of(folder))
    wanted = format_distances.recorded(tool, n_prompts)
    exact = format_distances.recorded(folder / "expected.npz", n_prompts)
    got = format_distances.as_prescribed(folder, "float32")
    assert np.abs(got - wanted).mean() <= np.abs(wanted - exact).mean() / 2


E4M3 = np.unique(stored.small_float(np.arange(0x7F, dtype=np.uint8), 4, 7)).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def nearest(grid: Any, x: Any) -> Any:
    """Ties to the even code, which is an even place in the table; beyond the largest, that one."""
    x_abs = np.minimum(np.abs(x), grid[-1])
    above = np.clip(np.searchsorted(grid, x_abs), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    to_low, to_high = x_abs - low, high - x_abs
    goes_up = (to_high < to_low) | ((to_high == to_low) & (above % 2 == 0))
    return np.where(goes_up, high, low) * np.sign(x)


def quantized_blocks(spec: dict[str, Any], x: Any) -> Any:
    """MXFP4: the exponent of the block's largest, of the next power of two from 7/4 of one on.
    NVFP4: the block's scale in e4m3, over one for all, or for the row."""
    size = 16 if spec["quant"] == "nvfp4" else 32
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    if spec["quant"] == "mxfp4":
        fraction, exponent = np.frexp(amax)  # in [1/2, 1)
        scale = np.ldexp(np.float32(1), exponent - 3 + (fraction >= np.float32(0.875)))
    else:
        of_row = np.abs(x).max(axis=-1, keepdims=True)[..., None] / np.float32(6 * 448)
        whole = np.float32(spec["scale"]) if "scale" in spec else of_row
        scale = nearest(E4M3, amax / np.float32(6) / whole) * whole
    codes = nearest(E2M1, blocks / np.where(scale == 0, np.float32(1), scale))
    return (codes * scale).reshape(x.shape)


def quantized_input(spec: dict[str, Any], x: Any) -> Any:
    """What kernels/cpu/body_input.inc says, a row at a time."""
    if spec["quant"] in ("mxfp4", "nvfp4"):
        return quantized_blocks(spec, x)
    largest = np.float32(spec.get("steps", 127) if spec["quant"] == "int8" else 448)
    amax = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.float32(spec["scale"]) if "scale" in spec else amax / largest
    if spec["quant"] == "int8":
        return np.clip(np.rint(x / scale), -128, 127) * scale
    return nearest(E4M3, x / scale) * scale


REFERENCE = (
    "ct-w8a8-int8-qwen3-s", "ct-fp8-dynamic-qwen3-s", "ct-mxfp4-llama-g", "ct-nvfp4-qwen3-s",
    "modelopt-fp8-llama-g", "modelopt-nvfp4-qwen3-s",
)  # fmt: skip


@pytest.mark.parametrize("name", (*REFERENCE, "quark-fp8-kv8-llama-g"))
def test_quantized_activations_against_numpy(fixtures_dir: Path, name: str) -> None:
    """The same rule in NumPy and float32: a thousandth of the effect at the typical position.

    Sums in another order (NumPy's BLAS has one for each processor) make a code differ now and then,
    and with it all positions that see it, so the median counts."""
    folder = fixtures_dir / name
    checkpoint = _core.Checkpoint(str(folder))
    found = detect(checkpoint)
    packed = to_core(found.matrices)
    weights = {
        tensor: checkpoint.dequantize(tensor)
        for tensor, *_ in checkpoint.tensors()
        if tensor not in found.taken and tensor.endswith(("weight", "bias"))
    } | {key: checkpoint.matrix(key, shape, *packed) for key, shape in found.shapes.items()}
    checkpoint.close()
    config = json.loads((folder / "config.json").read_text())
    config = {"rope_theta": config.get("rope_parameters", {}).get("rope_theta"), **config}
    inputs = {key: matrix["input"] for key, matrix in found.matrices.items()}

    def quantize(weight: str, x: Any) -> Any:
        return quantized_input(inputs[weight], x) if weight in inputs else x

    prompts = format_distances.prompts_of(folder)[1:3]
    exact: dict[str, Any] = {"compute_dtype": "float32", "kv_cache_dtype": "auto"}
    got = prompt_logprobs(folder, prompts, **exact)
    plain = prompt_logprobs(folder, prompts, activation_quant="off", **exact)
    wanted = [forward.prompt_logprobs(config, weights, p, np.float32, quantize) for p in prompts]
    distance = np.abs(np.concatenate(got) - np.concatenate(wanted))
    effect = np.abs(np.concatenate(plain) - np.concatenate(wanted))
    assert np.median(distance) <= np.median(effect) / 1000


@pytest.mark.parametrize("key", ("intermediate_size", "num_attention_heads", "head_dim"))
def test_sizes_of_the_config_that_are_not_the_tensors(
    fixtures_dir: Path, tmp_path: Path, key: str
) -> None:
    """Half of it once loaded the first half of the bytes: one scale for a matrix fits any size."""
    folder = tmp_path / "model"
    shutil.copytree(fixtures_dir / "fp8-static-autofp8-llama-g", folder)
    config = json.loads((folder / "config.json").read_text())
    config[key] //= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(qkv.CheckpointError, match="the config says"):
        qkv.Engine(folder)


def test_shape_of_as_many_bytes(fixtures_dir: Path, tmp_path: Path) -> None:
    """[64, 256] stored as [256, 64] once loaded without a word."""
    folder = tmp_path / "model"
    shutil.copytree(fixtures_dir / "quark-fp8-kv8-llama-g", folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    changed = re.sub(rb'(k_proj\.weight":\{[^}]*)\[64, ?256\]', rb"\1[256,64]", content, count=1)
    path.write_bytes(changed.ljust(len(content)))
    assert len(changed) == len(content) and changed != content
    with pytest.raises(qkv.CheckpointError, match="256 rows, the config says 64"):
        qkv.Engine(folder)


def test_descriptions_that_are_wrong(fixtures_dir: Path) -> None:
    """Steps that are no number of steps once gave scales of 0 and below."""
    folder = fixtures_dir / "ct-w8a8-int8-qwen3-s"
    checkpoint = _core.Checkpoint(str(folder))
    found = detect(checkpoint)
    weight, shape = next(iter(found.shapes.items()))
    for steps in (-1, 1e39):
        changed = {**found.matrices[weight], "input": {"quant": "int8", "steps": steps}}
        with pytest.raises(qkv.CheckpointError, match="steps of the input"):
            checkpoint.matrix(weight, shape, *to_core({weight: changed}))
    with pytest.raises(TypeError, match="matrices: int, must be a str"):
        checkpoint.matrix(weight, shape, 1)  # type: ignore[arg-type]
