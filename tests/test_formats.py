"""What users are told of a checkpoint's format: FORMATS.md, inspect, plan, Engine.info, and the
choice of a GEMM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import _core, gemm_backends
from qkv.planner import GIB
from qkv.quantization import detect
from qkv.quantization.wire import to_core
from ref import make_tiny, stored
from test_quantized_checkpoints import RUN
from tools import formats_doc

GGUFS = ("gguf-mixed-llama-g", "gguf-q4_k_m-llama-g")
SIZE: dict[str, Any] = {"threads": 1, "kv_tokens": 64, "max_model_len": 32}


def model_of(fixtures: Path, name: str) -> Path:
    return fixtures / name / f"{name}.gguf" if name in GGUFS else fixtures / name


@pytest.mark.parametrize("name", ["methods", "refused", "gguf"])
def test_tables_are_up_to_date(name: str) -> None:
    """Else: python tests/tools/formats_doc.py FIXTURES."""
    text = formats_doc.PATH.read_text()
    assert text == formats_doc.replaced(text, name, getattr(formats_doc, name)())


def test_what_the_fixtures_become(fixtures_dir: Path) -> None:
    text = formats_doc.PATH.read_text()
    assert text == formats_doc.replaced(text, "fixtures", formats_doc.fixtures(fixtures_dir))


def test_forms_are_checked(fixtures_dir: Path) -> None:
    """Shapes come from our own code; a mistake in it is an error all the same."""
    checkpoint = _core.Checkpoint(str(fixtures_dir / "ct-mxfp4-llama-g"))
    found = detect(checkpoint)
    matrices, arrays = to_core(found.matrices)
    name = next(iter(found.shapes))
    rows, cols = found.shapes[name]
    dequantized = checkpoint.forms(found.shapes, matrices, arrays, True)[name]["bytes"]
    assert dequantized >= 4 * rows * cols
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({}, KeyError, "no shape"),
        ({**found.shapes, name: [rows, cols]}, TypeError, "tuple"),
        ({**found.shapes, name: (rows,)}, TypeError, "argument"),
        ({**found.shapes, name: (2 * rows, cols)}, qkv.CheckpointError, "the config says"),
        ([], TypeError, "dict"),
    ]
    for shapes, kind, words in wrong:
        with pytest.raises(kind, match=words):
            checkpoint.forms(shapes, matrices, arrays)
    checkpoint.close()
    with pytest.raises(qkv.Error, match="closed"):
        checkpoint.forms(found.shapes, matrices, arrays)


@pytest.mark.parametrize("name", (*RUN, *GGUFS))
def test_a_plan_is_what_loading_takes(fixtures_dir: Path, name: str) -> None:
    model = model_of(fixtures_dir, name)
    with qkv.Engine(model, **SIZE) as engine:
        held = engine.memory()["weights"]
    planned = qkv.plan(model, memory_gib=1).weights_gib * GIB
    assert planned == pytest.approx(held, rel=1e-3)  # KV scales are counted, a few bytes each


@pytest.mark.parametrize("name", (*RUN, *GGUFS))
def test_inspection_of_what_runs(fixtures_dir: Path, name: str) -> None:
    found = qkv.inspect(model_of(fixtures_dir, name))
    assert found.problem is None and "cannot run" not in str(found)
    assert found.quantization and found.quantization in str(found)
    assert sum(found.quantized_forms.values()) == found.n_quantized
    assert not found.quantization_ignored or "  excluded" in str(found)
    for form in found.quantized_forms:
        assert f"as {form}" in str(found)


def test_info_of_a_quantized_model(fixtures_dir: Path) -> None:
    with qkv.Engine(fixtures_dir / "ct-fp8-dynamic-qwen3-s", **SIZE) as engine:
        info = engine.info
    found = info["quantization"]
    assert found["method"] == "compressed-tensors" and "config.json" in found["source"]
    assert found["forms"] == {"e4m3, a scale by row": found["matrices"]}
    assert found["inputs"] == {"fp8": found["matrices"]}
    assert found["ignored"] == {"lm_head": "lm_head"} or "lm_head" not in found["ignored"]
    assert found["notes"] == [] and found["fallbacks"] == []
    taken = info["fp8_gemm_backend"]
    assert (taken["asked"], taken["taken"]) == ("auto", "decode")
    assert taken["matrices"] == found["matrices"] and "registers" in taken["why"]
    assert info["fp4_gemm_backend"]["taken"] is None
    assert info["fp4_gemm_backend"]["why"] == "no weight is in FP4"


def test_info_of_a_gguf_file(fixtures_dir: Path) -> None:
    with qkv.Engine(model_of(fixtures_dir, "gguf-mixed-llama-g"), **SIZE) as engine:
        info = engine.info
    assert info["quantization"]["method"] == "gguf"
    assert info["quantization"]["forms"]["MXFP4"] == 1
    assert info["fp4_gemm_backend"]["matrices"] == 1


def test_info_of_a_plain_model(tiny: Any) -> None:
    with qkv.Engine(tiny("llama"), **SIZE) as engine:
        found = engine.info["quantization"]
    assert found["method"] == "" and found["matrices"] == 0 and found["forms"] == {}


def test_notes_stand_in_info(fixtures_dir: Path) -> None:
    with qkv.Engine(
        fixtures_dir / "ct-fp8-dynamic-qwen3-s", quantization="unquant", **SIZE
    ) as engine:
        (note,) = engine.info["quantization"]["notes"]
    assert "unquant" in note


def fallback_model(folder: Path) -> Path:
    """MLX affine with groups of 8, which no form has."""
    model = make_tiny.write(folder, "llama")
    tensors: dict[str, Any] = {
        name: ("F32", np.asarray(values, np.float32)) for name, values in model.tensors.items()
    }
    name = "model.layers.0.self_attn.q_proj"
    rows, cols = tensors[f"{name}.weight"][1].shape
    rng = np.random.default_rng(0)
    tensors[f"{name}.weight"] = ("U32", rng.integers(0, 2**32, (rows, cols // 8), np.uint32))
    tensors[f"{name}.scales"] = ("F32", np.full((rows, cols // 8), 0.01, np.float32))
    tensors[f"{name}.biases"] = ("F32", np.full((rows, cols // 8), -0.08, np.float32))
    stored.write(folder / "model.safetensors", tensors)
    return folder


def test_a_fallback_is_said(tmp_path: Path) -> None:
    folder = fallback_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    with qkv.Engine(folder, **SIZE) as engine:
        found, held = engine.info["quantization"], engine.memory()["weights"]
    assert found["fallbacks"] == ["model.layers.0.self_attn.q_proj.weight"]
    assert any("two bf16 terms" in note for note in found["notes"])
    assert qkv.plan(folder, memory_gib=1).weights_gib * GIB == held
    assert "two bf16 terms" in str(qkv.inspect(folder))


@pytest.mark.parametrize("option", gemm_backends.BACKENDS)
def test_the_choice_of_a_gemm(option: str, fixtures_dir: Path) -> None:
    model = fixtures_dir / "ct-mxfp4-llama-g"

    def opened(name: str, **more: Any) -> qkv.Engine:
        options: dict[str, Any] = {option: name, **SIZE, **more}
        return qkv.Engine(model, **options)

    for name in gemm_backends.ELSEWHERE[option]:
        with pytest.raises(qkv.UnsupportedError, match=f"{option}='{name}'.*decode.*auto"):
            opened(name)
    with pytest.raises(ValueError, match=f"{option}='fastest': must be one of auto, decode"):
        opened("fastest")
    if "cublaslt" in gemm_backends.BACKENDS[option]:
        with pytest.raises(qkv.UnsupportedError, match="of GPUs, with device='auto'.*decode"):
            opened("cublaslt")
    for compute_dtype, taken in (("bf16", "decode"), ("float32", None)):
        with opened("decode", compute_dtype=compute_dtype) as engine:
            assert engine.info["fp4_gemm_backend"]["taken"] == taken


def test_the_choice_by_generation() -> None:
    """Every GPU that the library is built for has one row, and its reason is the one in info."""
    archs = [arch for g in gemm_backends.GENERATIONS for arch in g.archs]
    assert len(set(archs)) == len(archs)
    assert {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} <= set(archs)
    loaded = gemm_backends.Weights(
        codes=["e4m3", "table of 16"], gguf_types=[], products={}, target="", n_online=0,
        dequantized=False,
    )  # fmt: skip
    for g in gemm_backends.GENERATIONS:
        for option, (name, why) in g.auto.items():
            assert name in gemm_backends.BACKENDS[option]
            for arch in g.archs:
                taken = gemm_backends.chosen(option, "auto", loaded, arch)
                assert taken["taken"] == name and f"auto on {arch}: {why}" in taken["why"]
            assert f"{option}: {name}, {why}" in gemm_backends.table()
    for isa in ("avx512bf16", "emulated, reference GEMM"):
        taken = gemm_backends.chosen("fp8_gemm_backend", "auto", loaded, isa)
        assert taken["taken"] == "decode" and taken["why"].startswith("the one that this device")


@pytest.mark.parametrize("name", RUN)
def test_a_plan_from_the_config_alone(fixtures_dir: Path, name: str) -> None:
    """An estimate: small matrices are padded, and tables may be quantized."""
    folder = fixtures_dir / name
    whole = qkv.plan(folder, memory_gib=1)
    alone = qkv.plan(folder / "config.json", memory_gib=1)
    assert (whole.weights_from, alone.weights_from) == ("files", "config")
    assert alone.weights_gib == pytest.approx(whole.weights_gib, rel=0.1)
