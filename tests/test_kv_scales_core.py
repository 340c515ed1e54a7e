"""KV-cache scales of a checkpoint and of an engine, through qkv._core: which are found, what must
not load, what applying them does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qkv import _core
from ref import make_tiny

N_LAYERS, N_KV_HEADS = 2, 2
F32 = NDArray[np.float32]
TOKENS = np.random.default_rng(5).integers(0, 500, 70, dtype=np.int32)

# Names of K's and V's scale in a layer; the same one twice is a kv_scale.
SCHEMES = {
    "projection": ("k_proj.k_scale", "v_proj.v_scale"),
    "attention": ("k_scale", "v_scale"),
    "inner": ("attn.k_scale", "attn.v_scale"),
    "fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "output": ("k_proj.output_scale", "v_proj.output_scale"),
    "single": ("kv_scale", "kv_scale"),
}


def name(layer: int, suffix: str) -> str:
    return f"model.layers.{layer}.self_attn.{suffix}"


def scale(layer: int, kind: str, scheme: str) -> float:
    """Exact in bf16, different for every place."""
    return (0.5 if kind == "k" or scheme == "single" else 0.75) * 2.0**layer


def scales_of(scheme: str, shape: tuple[int, ...] = ()) -> dict[str, F32]:
    return {
        name(layer, suffix): np.full(shape, scale(layer, kind, scheme), np.float32)
        for layer in range(N_LAYERS)
        for kind, suffix in zip("kv", SCHEMES[scheme], strict=True)
    }


def write(source: Path, target: Path, scales: Mapping[str, F32], dtype: str = "F32") -> Path:
    """The tiny model in `source` with more tensors."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    tensors = make_tiny.make_tensors(config, 0) | dict(scales)
    kinds = dict.fromkeys(scales, dtype)
    make_tiny.write_safetensors(target / "model.safetensors", tensors, kinds)
    return target


def listed(path: Path) -> list[tuple[int, str, str, list[float]]]:
    checkpoint = _core.Checkpoint(str(path))
    try:
        rows = checkpoint.kv_scales()
    finally:
        checkpoint.close()
    return [(layer, kind, tensor, values.tolist()) for layer, kind, tensor, values in rows]


def open_engine(path: Path, *formats: str, **options: Any) -> _core.Engine:
    lanes = [[(f, f)] * N_LAYERS for f in formats]
    options = {"threads": 1, "kv_tokens": 512} | options
    return _core.Engine(str(path), kv_formats=lanes, **options)


def run(engine: _core.Engine, **options: Any) -> _core.Result:
    ident = engine.add(TOKENS, max_tokens=0, logprob_start=1, **options)
    while engine.step().n_rows:
        pass
    return engine.take(ident)


# ---- of a checkpoint ------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "shape"), [("F32", ()), ("BF16", (1,)), ("F16", (2, 1, 1))])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_naming_scheme(
    tiny: Callable[..., Path], tmp_path: Path, scheme: str, dtype: str, shape: tuple[int, ...]
) -> None:
    plain = tiny("llama")
    path = write(plain, tmp_path / "model", scales_of(scheme, shape), dtype)
    assert listed(path) == [
        (layer, kind, name(layer, suffix), [scale(layer, kind, scheme)] * int(np.prod(shape)))
        for layer in range(N_LAYERS)
        for kind, suffix in zip("kv", SCHEMES[scheme], strict=True)
    ]
    assert listed(plain) == []
    # They load, and nothing is applied that the caller did not ask for.
    with_scales, without = open_engine(path, "fp8_e4m3"), open_engine(plain, "fp8_e4m3")
    assert (with_scales.kv_scales(0) == 1).all()
    assert (run(with_scales).prompt_logprobs == run(without).prompt_logprobs).all()
    with_scales.close()
    without.close()


def broken() -> dict[str, tuple[dict[str, F32], list[str]]]:
    sound, one = scales_of("attention"), np.ones((), np.float32)
    k0, v0, v1 = name(0, "k_scale"), name(0, "v_scale"), name(1, "v_scale")

    def without(*gone: str) -> dict[str, F32]:
        return {k: v for k, v in sound.items() if k not in gone}

    def renamed(old: str, new: str) -> dict[str, F32]:
        return {new if k == old else k: v for k, v in sound.items()}

    def stored(value: F32) -> dict[str, F32]:
        return sound | {k0: value}

    return {
        "K dropped": (without(k0), [v0, "none for K"]),
        "V dropped": (without(v1), [name(1, "k_scale"), "none for V"]),
        "a layer dropped": (without(k0, v0), ["layer 0 has no KV-cache scales"]),
        "renamed to another layer": (
            renamed(k0, name(7, "k_scale")),
            [name(7, "k_scale"), "the model's last one is 1"],
        ),
        "misplaced": (
            renamed(k0, "model.layers.0.mlp.k_scale"),
            ["model.layers.0.mlp.k_scale", "binds to no layer"],
        ),
        "misplaced projection": (renamed(k0, name(0, "o_proj.k_scale")), ["o_proj.k_scale"]),
        "misspelt": (renamed(k0, name(0, "k_scales")), [v0, "none for K"]),
        "contradiction": (
            sound | {name(0, "kv_scale"): one},
            [k0, name(0, "kv_scale"), "is 0.5", "is 1"],
        ),
        "zero": (stored(one * 0), [k0, "is 0"]),
        "negative": (stored(-2 * one), [k0, "is -2"]),
        "NaN": (stored(one * np.float32("nan")), [k0, "nan"]),
        "infinite": (stored(one * np.float32("inf")), [k0, "inf"]),
        "too large": (stored(one * np.float32(3.3e38)), [k0, "at most 3e+38"]),
        "three heads": (stored(np.ones(3, np.float32)), [k0, "1 value or 2"]),
        "a matrix": (stored(np.ones((2, 2), np.float32)), [k0, "2 dimensions"]),
        "zero point": (sound | {name(0, "k_zero_point"): one}, ["k_zero_point", "asymmetric"]),
    }


@pytest.mark.parametrize("case", broken())
def test_nothing_passes_in_silence(tiny: Callable[..., Path], tmp_path: Path, case: str) -> None:
    scales, words = broken()[case]
    path = write(tiny("llama"), tmp_path / "model", scales)
    kind = _core.UnsupportedError if case == "zero point" else _core.CheckpointError
    with pytest.raises(kind) as of_engine:
        open_engine(path, "bf16").close()
    if case != "misspelt":  # which the list, unlike loading, does not know as a scale's name
        with pytest.raises(kind) as of_list:
            listed(path)
        assert str(of_list.value) == str(of_engine.value)
    for word in words:
        assert word in str(of_engine.value), of_engine.value


def test_only_listed(tiny: Callable[..., Path], tmp_path: Path) -> None:
    more = {
        name(0, "q_scale"): np.full(1, 2, np.float32),
        name(1, "q_proj.output_scale"): np.full((), 3, np.float32),
        name(0, "prob_output_scale"): np.full((), 4, np.float32),
        name(1, "v_zero_point"): np.zeros((), np.float32),
    }
    path = write(tiny("llama"), tmp_path / "model", scales_of("output") | more)
    found = {(layer, kind): values for layer, kind, _, values in listed(path) if kind not in "kv"}
    assert found == {
        (0, "q"): [2.0],
        (1, "q"): [3.0],
        (0, "prob"): [4.0],
        (1, "v_zero_point"): [0.0],
    }
    open_engine(path, "fp8_e4m3").close()


def raw_scales(folder: Path) -> dict[str, float]:
    """k_scale, v_scale and output_scale of the files, by a reader of its own."""
    found: dict[str, float] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        n = int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8 : 8 + n]).items():
            if re.search(r"self_attn\..*(k_scale|v_scale|output_scale)$", key):
                at, end = (8 + n + x for x in entry["data_offsets"])
                kind = {"BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
                value = np.frombuffer(data[at:end], kind)
                if kind is np.uint16:
                    value = make_tiny.bf16_values(value)
                found[key] = float(value[0])
    return found


@pytest.mark.parametrize(
    "fixture",
    ["ct-fp8-static-kv-llama-g", "fp8-static-autofp8-llama-g", "quark-fp8-kv8-llama-g"],
)
def test_checkpoints_of_other_tools(fixtures_dir: Path, fixture: str) -> None:
    """Their weights may not be supported yet; what scales they carry is known all the same."""
    expected = raw_scales(fixtures_dir / fixture)
    rows = listed(fixtures_dir / fixture)
    assert {tensor: values for _, _, tensor, values in rows} == {
        key: [value] for key, value in expected.items()
    }
    assert len(rows) == len(expected) > 0
    layers = {layer for layer, _, _, _ in rows}
    assert sorted((layer, kind) for layer, kind, _, _ in rows) == [
        (layer, kind) for layer in sorted(layers) for kind in "kv"
    ]


E4M3 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CT = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": E4M3}
FP8_ONLY: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("section", "sidecar", "declared"),
    [
        (CT | {"config_groups": {}}, None, "fp8_e4m3"),
        (CT | {"config_groups": None}, None, "fp8_e4m3"),
        (CT | {"kv_cache_scheme": E4M3 | {"num_bits": 4}}, None, ""),
        (CT | {"kv_cache_scheme": E4M3 | {"type": "int"}}, None, ""),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, FP8_ONLY, "fp8_e4m3"),
        (None, FP8_ONLY, "fp8_e4m3"),
        (None, FP8_ONLY | {"kv_cache_quant_algo": "NVFP4"}, ""),
    ],
)
def test_a_checkpoint_with_a_quantized_cache_only(
    tiny: Callable[..., Path],
    tmp_path: Path,
    section: dict[str, Any] | None,
    sidecar: dict[str, Any] | None,
    declared: str,
) -> None:
    """Weights that no tool quantized, beside scales of the cache: not a quantized checkpoint."""
    path = write(tiny("llama"), tmp_path / "model", scales_of("attention"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    if sidecar is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": sidecar}))
    checkpoint = _core.Checkpoint(str(path))
    assert checkpoint.model_config()["kv_declared"] == declared
    assert len(checkpoint.kv_scales()) == 2 * N_LAYERS
    checkpoint.close()
    open_engine(path, "fp8_e4m3").close()


@pytest.mark.parametrize(
    ("section", "sidecar"),
    [
        (CT | {"config_groups": {"group_0": {}}}, None),
        (CT | {"quant_method": "fp8"}, None),
        (CT | {"kv_cache_scheme": None}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, None),
        (None, FP8_ONLY | {"quant_algo": "FP8"}),
        (None, {"quant_algo": None, "kv_cache_quant_algo": None}),
    ],
)
def test_quantized_weights_stay_refused(
    tiny: Callable[..., Path],
    tmp_path: Path,
    section: dict[str, Any] | None,
    sidecar: dict[str, Any] | None,
) -> None:
    path = write(tiny("llama"), tmp_path / "model", scales_of("attention"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    if sidecar is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": sidecar}))
    with pytest.raises(_core.UnsupportedError, match="quantiz"):
        open_engine(path, "fp8_e4m3")


# ---- of an engine ---------------------------------------------------------------------------


def engine_scales(value: float) -> F32:
    """Different for every layer, K or V and head."""
    n = N_LAYERS * 2 * N_KV_HEADS
    steps = 1 + np.arange(n, dtype=np.float32) / n
    return (value * steps).reshape(N_LAYERS, 2, N_KV_HEADS).astype(np.float32)


def test_which_formats_apply_scales(tiny: Callable[..., Path]) -> None:
    formats = ("bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16")
    given = engine_scales(0.01)
    engine = open_engine(tiny("llama"), *formats, kv_scales=given)
    for lane, kv_format in enumerate(formats):
        applied = engine.kv_scales(lane)
        assert applied.dtype == np.float32 and applied.shape == given.shape
        takes = kv_format in ("fp8_e4m3", "fp8_e5m2", "nvfp4")
        assert (applied == (given if takes else 1)).all(), kv_format
    engine.close()


def test_scales_by_lane_and_by_half_of_a_layer(tiny: Callable[..., Path]) -> None:
    pairs = [[("fp8_e4m3", "bf16"), ("bf16", "fp8_e4m3")]] * 2
    given = np.stack([engine_scales(0.1), engine_scales(3)])
    engine = _core.Engine(
        str(tiny("llama")), kv_formats=pairs, kv_tokens=128, threads=1, kv_scales=given
    )
    for lane in range(2):
        expected = np.ones_like(given[lane])
        expected[0, 0], expected[1, 1] = given[lane, 0, 0], given[lane, 1, 1]
        assert (engine.kv_scales(lane) == expected).all()
    assert (
        run(engine, lane=0).prompt_logprobs.tolist() != run(engine, lane=1).prompt_logprobs.tolist()
    )
    engine.close()


def test_scales_clip_and_flush(tiny: Callable[..., Path]) -> None:
    """One scale that is far too small, one that fits, one that is far too large."""
    given = np.ones((3, N_LAYERS, 2, N_KV_HEADS), np.float32)
    given[0], given[2] = 1e-3, 1e3
    engine = open_engine(tiny("llama"), *["fp8_e4m3"] * 3, kv_scales=given)
    for lane in range(3):
        run(engine, lane=lane)
    small, fits, large = (engine.kv_counts(lane) for lane in range(3))
    head_dim = engine.info["config"]["head_dim"]
    for counts in (small, fits, large):
        assert set(counts) == {"n_values", "n_clipped", "n_flushed", "amax"}
        assert all(counts[key].dtype == np.int64 for key in ("n_values", "n_clipped", "n_flushed"))
        assert counts["amax"].dtype == np.float32
        assert all(a.shape == (N_LAYERS, 2, N_KV_HEADS) for a in counts.values())
        assert (counts["n_values"] == len(TOKENS) * head_dim).all()
        assert (counts["amax"] > 0).all()
    # The first layer sees the same numbers in every lane.
    assert (small["amax"][0] == fits["amax"][0]).all()
    assert (small["n_clipped"] > small["n_values"] // 4).all() and (fits["n_clipped"] == 0).all()
    assert (large["n_flushed"] > large["n_values"] // 4).all() and (large["n_clipped"] == 0).all()
    engine.kv_counts_reset()
    assert all(not a.any() for lane in range(3) for a in engine.kv_counts(lane).values())
    engine.close()


def test_histogram(tiny: Callable[..., Path]) -> None:
    engine = open_engine(tiny("llama"), "bf16", "fp8_e4m3", prefix_cache=False)
    with pytest.raises(_core.Error, match="never observed"):
        engine.kv_histogram(0)
    engine.kv_observe(0, True)
    run(engine, lane=0)
    run(engine, lane=1)
    histogram, counts = engine.kv_histogram(0), engine.kv_counts(0)
    assert histogram.dtype == np.uint64 and histogram.shape == (N_LAYERS, 2, N_KV_HEADS, 2048)
    assert (histogram.sum(-1) == counts["n_values"].astype(np.uint64)).all()
    highest = 2047 - (histogram[..., ::-1] > 0).argmax(-1)
    assert (highest == counts["amax"].view(np.uint32) >> 20).all()
    with pytest.raises(_core.Error, match="never observed"):
        engine.kv_histogram(1)
    engine.kv_observe(0, on=False)
    run(engine, lane=0)
    assert (engine.kv_histogram(0) == histogram).all()
    engine.kv_observe(0, True)
    assert not engine.kv_histogram(0).any()
    engine.close()


def test_observing_changes_nothing(tiny: Callable[..., Path]) -> None:
    engine = open_engine(tiny("llama"), "nvfp4", prefix_cache=False)
    before = run(engine).prompt_logprobs
    engine.kv_observe(0, True)
    assert (run(engine).prompt_logprobs == before).all()
    engine.close()


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (np.ones((2, 2, 2)), TypeError, "kv_scales.*float64.*float32"),
        ([1.0], TypeError, "kv_scales: list"),
        (np.ones((2, 2), np.float32), ValueError, r"\[2, 2, n_kv_heads\]"),
        (np.ones((3, 2, 2), np.float32), ValueError, r"kv_scales: must have the shape"),
        (np.ones((2, 2, 3), np.float32), ValueError, "kv_scales: 3 heads.*2 KV heads"),
        (np.ones((2, 2, 2, 2), np.float32), ValueError, r"\[1, 2, 2, n_kv_heads\]"),
        (np.zeros((2, 2, 2), np.float32), ValueError, "layer 0, K, head 0: 0"),
        (np.full((2, 2, 2), np.nan, np.float32), ValueError, "nan"),
        (np.full((2, 2, 2), np.inf, np.float32), ValueError, "inf"),
    ],
)
def test_bad_scales(
    tiny: Callable[..., Path], given: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        open_engine(tiny("llama"), "fp8_e4m3", kv_scales=given)


def test_bad_lanes(tiny: Callable[..., Path]) -> None:
    engine = open_engine(tiny("llama"), "bf16", "fp8_e4m3")
    for call in (engine.kv_scales, engine.kv_counts, engine.kv_histogram):
        for lane in (-1, 2):
            with pytest.raises(ValueError, match=f"lane: {lane}"):
                call(lane)
        with pytest.raises(TypeError, match="lane"):
            call("0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lane: 2"):
        engine.kv_observe(2, True)
    engine.close()
    with pytest.raises(_core.Error, match="closed"):
        engine.kv_counts(0)


def test_query_dtype(tiny: Callable[..., Path]) -> None:
    results = {}
    for dtype in ("bf16", "fp8_e4m3"):
        engine = open_engine(tiny("llama"), "bf16", query_dtype=dtype)
        assert engine.info["query_dtype"] == dtype
        results[dtype] = run(engine).prompt_logprobs
        engine.close()
    apart = np.abs(results["bf16"] - results["fp8_e4m3"])
    assert 0 < apart.mean() < 0.5
    with pytest.raises(ValueError, match="query_dtype: 'int8'"):
        open_engine(tiny("llama"), "bf16", query_dtype="int8")


def test_load_log(tiny: Callable[..., Path]) -> None:
    lines: list[tuple[int, str]] = []
    engine = open_engine(
        tiny("llama"), "bf16", "nvfp4", log=lambda level, line: lines.append((level, line))
    )
    engine.close()
    text = [line for level, line in lines if level == 1]
    patterns = [
        r"Checkpoint: safetensors, 1 file\(s\), 21 tensors; LlamaForCausalLM by config\.json",
        r"Weight format: none, by the types of the tensors: BF16 100\.0 %",
        r"Load weight begin\. avail mem=\d+\.\d+ GiB",
        r"Load weight end\. elapsed=\d+\.\d+ s, type=LlamaForCausalLM, quant=none, "
        r"avail mem=\d+\.\d+ GiB, mem usage=0\.00 GiB",
        r"KV cache of lane 0 is allocated\. dtype: K bf16, V bf16, #tokens: 512, K size: .*",
        r"KV cache of lane 1 is allocated\. dtype: K nvfp4, V nvfp4, #tokens: 512, .* GiB",
    ]
    for pattern, line in zip(patterns, text, strict=True):
        assert re.fullmatch(pattern, line), line
