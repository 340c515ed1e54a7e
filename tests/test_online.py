"""Quantizing while loading: every target, from every container, with the values that the rules of
csrc/quant/quantize.h give, and no more memory than one matrix takes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from core_runs import LARGE, alone, assert_same, mixed_requests, open_engine, ordered, run
from qkv import _core
from qkv.quantization import METHODS
from ref import make_tiny

SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
MAKERS = [name for name, method in METHODS.items() if method.target]
# Quantized inputs, by name of the method.
INPUTS = {name: METHODS[name].target.partition(":")[2] for name in MAKERS}
PROMPT = list(range(3, 35))


def logprobs(model: Path, **options: Any) -> np.ndarray[Any, Any]:
    with qkv.Engine(model, kv_tokens=256, threads=1, **options) as engine:
        (score,) = engine.score([PROMPT], progress=False)
    return np.array(score.token_logprobs[1:], np.float64)


@pytest.mark.parametrize("name", MAKERS)
def test_every_method(tiny: Callable[..., Path], name: str) -> None:
    model = tiny("llama", **SHAPE)
    with qkv.Engine(model, quantization=name, kv_tokens=256, threads=2) as engine:
        info = engine.info
        (score,) = engine.score([PROMPT], progress=False)
    n = 14 if not name.startswith("mlx") else 16  # MLX: the embedding and the head, too
    assert (info["online_matrices"], info["online_left"]) == (n, 0)
    assert info["online_quantization"] == name and info["quantization"]["method"] == ""
    assert info["activation_quant"] == "checkpoint"
    floats = {"fp8_gemm_backend": ("fp8", "mxfp8"), "fp4_gemm_backend": ("mxfp4", "nvfp4")}
    for option, targets in floats.items():
        n_floats = 14 if METHODS[name].target.startswith(targets) else 0
        assert info[option]["matrices"] == n_floats
    assert info["quantized_inputs"] == (14 if INPUTS[name] else 0)
    assert np.isfinite(score.token_logprobs[1:]).all()
    exact = logprobs(model, compute_dtype="float32")
    near = logprobs(model, quantization=name, compute_dtype="float32", activation_quant="off")
    # Random weights: every rounding is felt. Exact values are test_quantize.c's.
    assert 0 < np.abs(near - exact).mean() < 2.0
    with_inputs = logprobs(model, quantization=name, compute_dtype="float32")
    assert (np.abs(with_inputs - near).max() > 0) == bool(INPUTS[name])


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_containers_agree(tmp_path: Path, dtype: str) -> None:
    """The same floats in safetensors and in GGUF, where q and k lie in another order of rows."""
    folder = tmp_path / "folder"
    folder.mkdir()
    make_tiny.write(folder, "llama", seed=4, dtype=dtype, **SHAPE)
    file = tmp_path / "model.gguf"
    make_tiny.write_gguf(file, "llama", seed=4, types=dtype, codec=_core, **SHAPE)
    for name in ("w8a8_fp8", "nvfp4", "int4"):
        options: dict[str, Any] = {"quantization": name, "activation_quant": "off"}
        options["compute_dtype"] = "float32"
        off = np.abs(logprobs(folder, **options) - logprobs(file, **options)).max()
        assert off == 0 if dtype == "F32" else off < 0.2  # GGUF has norms in F32


def test_same_bits_whatever_the_batch(tiny: Callable[..., Path]) -> None:
    model = tiny("llama", **SHAPE)
    requests = mixed_requests(8, 512, seed=5)
    for target in ("int8:int8", "nvfp4:nvfp4", "fp8_block:fp8_group"):
        options: dict[str, Any] = {"online": target, "activation_quant": "checkpoint"}
        reference = alone(model, requests, **options)
        for threads, chunk in ((1, 16), (2, 64)):
            engine = open_engine(
                model, kv_tokens=LARGE, chunk_tokens=chunk, threads=threads, **options
            )
            assert_same(reference, run(engine, requests, ordered(8, "shuffled")), target)
            engine.close()


def test_rows_that_do_not_divide_stay(
    tiny: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    shape = {**SHAPE, "intermediate_size": 240}
    with (
        caplog.at_level(logging.WARNING, logger="qkv"),
        qkv.Engine(tiny("llama", **shape), quantization="mxfp4", kv_tokens=64) as engine,
    ):
        assert (engine.info["online_matrices"], engine.info["online_left"]) == (12, 2)
    (said,) = [r.message for r in caplog.records if "stay as they are" in r.message]
    assert said == (
        "2 of 14 matrices stay as they are (model.layers.0.mlp.down_proj.weight: rows of 240 "
        "elements cannot be quantized in groups of 32)"
    )


def test_fp8_checkpoints_are_quantized_again(
    fixtures_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fixtures_dir / "fp8-static-autofp8-llama-g"
    with (
        caplog.at_level(logging.WARNING, logger="qkv"),
        qkv.Engine(folder, quantization="quark_mxfp4", kv_tokens=64) as engine,
    ):
        assert engine.info["online_matrices"] > 0
        assert engine.info["online_quantization"] == "quark_mxfp4"
    assert any("accuracy must be validated again" in r.message for r in caplog.records)
    with pytest.raises(qkv.UnsupportedError, match="int8"):
        qkv.Engine(folder, quantization="w8a8_int8", kv_tokens=64)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    make_tiny.write(tmp_path, "llama", seed=4, dtype="F32", **SHAPE)
    file = next(tmp_path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    with qkv.Engine(tmp_path, kv_tokens=64):
        pass
    checkpoint = _core.Checkpoint(str(tmp_path))
    at = 0
    for name, _, _, n_bytes in checkpoint.tensors():
        if name.endswith("o_proj.weight"):
            break
        at += n_bytes
    checkpoint.close()
    content[start + at : start + at + 4] = np.float32(np.nan).tobytes()
    file.write_bytes(content)
    with pytest.raises(qkv.CheckpointError, match=r"\[0, 0\] is .*nan.*cannot be quantized"):
        qkv.Engine(tmp_path, quantization="fp8", kv_tokens=64)


PEAK = """
import sys
import qkv
options = {"quantization": sys.argv[2]} if sys.argv[2] else {}
with qkv.Engine(sys.argv[1], kv_tokens=64, threads=1, chunk_tokens=16, max_running=1, **options):
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            print(int(line.split()[1]))
"""


@pytest.mark.skipif(
    os.environ.get("QKV_SANITIZED") == "1", reason="the sanitizer's own memory counts too"
)
def test_one_matrix_at_a_time(tmp_path: Path) -> None:
    """Peak memory beside the weights is that of one matrix and a row of values, not of the model:
    quantized to 8 bits, 62 MB of bf16 load in less (85 MB) than as they are (115 MB)."""
    shape = {**SHAPE, "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 2048}
    make_tiny.write(tmp_path, "llama", seed=4, dtype="BF16", **shape)
    peaks = {
        name: 1024
        * int(
            subprocess.run(
                [sys.executable, "-c", PEAK, str(tmp_path), name],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for name in ("", "w8a8_int8")
    }
    assert peaks["w8a8_int8"] < peaks[""]


@pytest.mark.parametrize(
    ("name", "shape", "target", "options", "error"),
    [
        ("nothing", (128, 128), "fp8", {}, qkv.CheckpointError),
        ("model.layers.0.self_attn.q_proj.weight", (128, 64), "fp8", {}, qkv.CheckpointError),
        ("model.norm.weight", (1, 128), "fp8", {}, qkv.CheckpointError),
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), "fp9", {}, ValueError),
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), "fp8:int9", {}, ValueError),
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), "fp8", {"group": 32}, ValueError),
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), "int4", {"group": -8}, ValueError),
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), "int4", {"group": 48},
         qkv.UnsupportedError),
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), "int4", {"head_dim": 7}, ValueError),
        ("model.layers.0.self_attn.q_proj.weight", (2**40, 2**40), "int4", {}, ValueError),
        ("model.layers.0.self_attn.q_proj.weight", (-1, 128), "int4", {}, ValueError),
    ],
)  # fmt: skip
def test_one_matrix_with_wrong_arguments(
    tiny: Callable[..., Path], name: str, shape: tuple[int, int], target: str,
    options: dict[str, Any], error: type[Exception],
) -> None:  # fmt: skip
    checkpoint = _core.Checkpoint(str(tiny("llama", **SHAPE)))
    with pytest.raises(error):
        checkpoint.quantize(name, shape, target, **options)
    checkpoint.close()
    with pytest.raises(qkv.Error):
        checkpoint.quantize(name, (128, 128), "fp8")


def test_int8_matrices_of_quantized_inputs(tiny: Callable[..., Path]) -> None:
    """W8A8's products are in int8 as the checkpoint prescribes it, and nowhere else."""
    model = tiny("llama", **SHAPE)
    cases: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("w8a8_int8", {}, 14),
        ("w8a8_int8", {"activation_quant": "off"}, 0),
        ("w8a8_int8", {"compute_dtype": "float32"}, 0),
        ("int8", {}, 0),
        ("w8a8_fp8", {}, 0),
    )
    for name, options, n in cases:
        with qkv.Engine(model, quantization=name, kv_tokens=64, **options) as engine:
            assert engine.info["int8_matrices"] == n, (name, options)


@pytest.mark.parametrize(("name", "n"), [("int8", 14), ("int4", 14), ("mlx_q4", 15)])
def test_int8_activations_for_codes_made_while_loading(
    tiny: Callable[..., Path], name: str, n: int
) -> None:
    """activation_quant="int8" knows before anything is loaded what the codes will be. Of MLX's
    matrices the embedding is no product."""
    model = tiny("llama", **SHAPE)
    with qkv.Engine(model, quantization=name, activation_quant="int8", kv_tokens=64) as engine:
        assert engine.info["int8_matrices"] == n
    with pytest.raises(qkv.UnsupportedError, match="integer codes"):
        qkv.Engine(model, quantization="mxfp4", activation_quant="int8", kv_tokens=64)
