"""qkv.calibrate: the scales it finds, the table, and the files that it writes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from qkv import calibrate, calibration, cli, kv_scales_file
from qkv.calibration import find_scales

F32 = NDArray[np.float32]
E4M3 = 448.0


def histogram_of(x: F32) -> tuple[NDArray[np.uint64], F32]:
    """As the engine counts them: [layers, 2, heads, n] -> bins, largest magnitudes."""
    patterns = np.abs(x.astype(np.float32)).view(np.uint32) >> 20
    counts = np.zeros((*x.shape[:3], 2048), np.uint64)
    for place in np.ndindex(x.shape[:3]):
        counts[place] = np.bincount(patterns[place], minlength=2048)
    return counts, np.abs(x).max(-1).astype(np.float32)


def codes(low: int, n_mantissa: int, top: float) -> NDArray[np.float64]:
    """Every magnitude that a float with so many bits of mantissa has, up to `top`."""
    found = [0.0]
    for exponent in range(low, 20):
        for m in range(2**n_mantissa):
            found.append((1 + m / 2**n_mantissa) * 2.0**exponent)
    for m in range(2**n_mantissa):
        found.append(m / 2**n_mantissa * 2.0**low)
    grid = np.unique(np.array(found))
    return grid[grid <= top]


GRIDS = {"fp8_e4m3": codes(-6, 3, 448.0), "fp8_e5m2": codes(-14, 2, 57344.0)}
NEXT = {"fp8_e4m3": 464.0, "fp8_e5m2": 61440.0}  # halfway to the code after the last


def stored(kv: str, x: F32, scale: float) -> NDArray[np.float64]:
    """The nearest code, by looking at all of them."""
    grid = GRIDS[kv]
    y = np.minimum(np.abs(x.astype(np.float64)) / scale, grid[-1])
    place = np.clip(np.searchsorted(grid, y), 1, len(grid) - 1)
    below, above = grid[place - 1], grid[place]
    nearest: NDArray[np.float64] = np.where(y - below < above - y, below, above) * scale
    return nearest


@pytest.mark.parametrize("kv", sorted(GRIDS))
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0])
def test_loss_is_that_of_the_format(kv: str, scale: float) -> None:
    """The histogram's error, clipped and flushed shares are those of the values themselves."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((1, 2, 1, 40000)) * 400).astype(np.float32)
    x[0, 0] *= 200  # also beyond e5m2's range
    x[0, :, 0, :20000] *= 1e-5  # and what becomes zero
    points = calibration._points()
    for half in range(2):
        values = np.abs(x[0, half, 0])
        counts, amax = histogram_of(x)
        parts = calibration._occupied(counts[0, half, 0], points, float(amax[0, half, 0]))
        loss = calibration._loss(kv, *parts, scale)
        code = stored(kv, values, scale)
        error = np.square(values - code).sum()
        assert loss.squared == pytest.approx(error, rel=0.05)
        flushed = ((code == 0) & (values > 0)).sum()
        assert loss.flushed == pytest.approx(flushed, rel=0.1, abs=20)
        clipped = (values / scale > NEXT[kv]).sum()
        assert loss.clipped == pytest.approx(clipped, rel=0.05, abs=20)


def test_amax_maps_the_largest_to_the_largest_code() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2, 3, 1000)).astype(np.float32)
    x[1, 1] *= 100
    counts, amax = histogram_of(x)
    layers, _ = find_scales(counts, amax, "fp8_e4m3")
    for layer in range(2):
        for half in range(2):
            assert layers[layer][half] == pytest.approx(amax[layer, half].max() / E4M3)
    layers, rows = find_scales(counts, amax, "fp8_e4m3", per="head")
    for layer in range(2):
        for half in range(2):
            assert layers[layer][half] == pytest.approx(amax[layer, half] / E4M3)
    assert all(row.clipped is not None and row.clipped[1] == 0.0 for row in rows)
    layers, _ = find_scales(counts, amax, "nvfp4")
    assert layers[0][0] == pytest.approx(amax[0, 0].max() / (6 * 448))
    layers, _ = find_scales(counts, amax, "fp8_e5m2")
    assert layers[0][0] == pytest.approx(amax[0, 0].max() / 57344)


def test_least_squares_clips_what_is_rare() -> None:
    """A single outlier far beyond the rest: following it would flush the others to zero."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 2, 1, 20000)).astype(np.float32)
    x[0, 1, 0] *= 1e-4
    x[0, 1, 0, 0] = 40.0
    counts, amax = histogram_of(x)
    largest, _ = find_scales(counts, amax, "fp8_e4m3")
    least, rows = find_scales(counts, amax, "fp8_e4m3", method="mse")
    for half in range(2):
        grid = float(largest[0][half][0]) * 2.0 ** (-np.arange(49) / 8)
        values = np.abs(x[0, half, 0])
        exact = [np.square(values - stored("fp8_e4m3", values, float(s))).sum() for s in grid]
        chosen = float(least[0][half][0])
        error = np.square(values - stored("fp8_e4m3", values, chosen)).sum()
        assert error <= min(exact) * 1.03
        row = rows[half]
        assert row.error is not None and row.error[1] <= row.error[0]


def test_shared_scale_is_the_larger() -> None:
    x = np.ones((1, 2, 1, 8), np.float32)
    x[0, 1] = 5.0
    layers, rows = find_scales(*histogram_of(x), "fp8_e4m3", shared=True)
    assert layers[0][0] == layers[0][1] == pytest.approx(5 / E4M3)
    assert [row.scale for row in rows] == [rows[0].scale] * 2


def test_layer_of_zeros_and_of_infinities() -> None:
    x = np.zeros((1, 2, 1, 8), np.float32)
    layers, rows = find_scales(*histogram_of(x), "fp8_e4m3", method="mse")
    assert layers[0][0] == 1.0 and rows[0].error == (0.0, 0.0) and rows[0].flushed == (0.0, 0.0)
    x[0, 1, 0, 3] = np.inf
    with pytest.raises(ValueError, match="layer 0: V has values that are not finite"):
        find_scales(*histogram_of(x), "fp8_e4m3")
    x[0, 1, 0, 3] = np.nan  # was passed over
    counts, _ = histogram_of(x)
    with pytest.raises(ValueError, match="layer 0: V has values that are not finite"):
        find_scales(counts, np.zeros((1, 2, 1), np.float32), "fp8_e4m3")


# With an engine.

PROMPTS: list[Any] = ["The quick brown fox", "Natalia sold some clips", [1, 2, 3, 4, 5] * 20]
SMALL: dict[str, Any] = {"threads": 1, "kv_tokens": 1024}


def run(model: Any, kv: str = "fp8_e4m3", **options: Any) -> qkv.Scales:
    options = {"out": None, "progress": False} | options
    if not isinstance(model, qkv.Engine):
        options = SMALL | options
    return calibrate(model, PROMPTS, kv, **options)


def read_safetensors(path: Path) -> dict[str, F32]:
    """Tensors of a file; values are right where they are float32."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    return {
        name: np.frombuffer(data[8 + length :][slice(*entry["data_offsets"])], "<f4").reshape(
            entry["shape"] if entry["dtype"] == "F32" else -1
        )
        for name, entry in header.items()
    }


def test_scales_are_those_of_what_the_engine_stores(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), **SMALL) as engine:
        found = run(engine)
        counts = engine._core.kv_counts(0)
        n_layers = engine.info["config"]["n_layers"]
        outputs = engine.generate(PROMPTS, progress=False)
        tokens = sum([len(output.prompt_token_ids) for output in outputs])
    assert found.calibration["prompts"] == 3
    assert found.calibration["tokens"] == tokens
    for layer in range(n_layers):
        for half in range(2):
            expected = counts["amax"][layer, half].max() / E4M3
            assert found.layers[layer][half] == pytest.approx(expected)
    # A prefix that was computed before is not missing from a second run.
    with qkv.Engine(tiny("llama"), **SMALL) as engine:
        first, second = run(engine), run(engine)
    assert first.to_json() == second.to_json() == found.to_json()


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize(
    ("kv", "method"),
    [("fp8_e4m3", "amax"), ("fp8_e4m3", "mse"), ("fp8_e5m2", "amax"), ("nvfp4", "amax")],
)
def test_side_file_is_what_the_engine_then_uses(
    tiny: Callable[..., Path], tmp_path: Path, kv: str, method: str, per: str
) -> None:
    model = tiny("qwen3")
    path = tmp_path / "scales.json"
    found = run(model, kv, out=path, per=per, method=method)
    assert found.files == (str(path), str(tmp_path / "scales.safetensors"))
    with qkv.Engine(model, kv_cache_dtype=kv, quantization_param_path=path, **SMALL) as engine:
        table = engine.kv_scales()
        used = engine._core.kv_scales(0)
        outputs = engine.generate(PROMPTS, qkv.SamplingParams(max_tokens=2), progress=False)
        assert [output.error for output in outputs] == [None] * 3
        clipped = [row.clipped for row in engine.kv_scales()]
    if method == "amax":
        # The first layer's are the same keys and values again.
        assert clipped[:2] == [0.0, 0.0]
    assert {row.source for row in table} == {"calibrated, scales.json"}
    assert all(row.applied for row in table)
    for layer, pair in enumerate(found.layers):
        for half, values in enumerate(pair):
            assert np.array_equal(used[layer, half], np.broadcast_to(values, used.shape[2]))
    tensors = read_safetensors(tmp_path / "scales.safetensors")
    assert len(tensors) == 2 * len(found.layers)
    k = tensors["model.layers.1.self_attn.k_proj.k_scale"]
    assert k.shape == ((len(found.layers[1][0]),) if per == "head" else ())
    assert np.array_equal(k.reshape(-1), found.layers[1][0])


def test_schema_of_sglang_on_request(tiny: Callable[..., Path], tmp_path: Path) -> None:
    found = run(tiny("llama"), out=tmp_path, plain=True)
    content = json.loads((tmp_path / "kv_scales.json").read_text())
    assert content["model_type"] == "llama"
    assert content["kv_cache"]["dtype"] == "float8_e4m3fn"
    factors = content["kv_cache"]["scaling_factor"]["0"]
    assert list(factors) == ["0", "1"] and all(isinstance(v, float) for v in factors.values())
    assert kv_scales_file.read_side_file(
        tmp_path / "kv_scales.json", n_layers=2, n_kv_heads=2, model_types=["llama"]
    ).layers == tuple((k, v) for k, v in found.layers)


def test_written_checkpoint_names_are_read_back(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """As one more file of a checkpoint in parts."""
    source = tiny("llama")
    found = run(source, out=tmp_path / "kv.json")
    for file in source.iterdir():
        name = "weights.safetensors" if file.suffix == ".safetensors" else file.name
        (tmp_path / name).symlink_to(file)
    parts = {
        name: part
        for part in ("weights.safetensors", "kv.safetensors")
        for name in read_safetensors(tmp_path / part)
    }
    index = json.dumps({"metadata": {}, "weight_map": parts})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with qkv.Engine(tmp_path, kv_cache_dtype="fp8_e4m3", **SMALL) as engine:
        rows = list(engine.kv_scales())
    assert [row.source for row in rows[:2]] == [
        f"model.layers.0.self_attn.{kind}_proj.{kind}_scale" for kind in "kv"
    ]
    assert [row.values[0] for row in rows[:2]] == [float(v[0]) for v in found.layers[0]]


def test_prints(tiny: Callable[..., Path]) -> None:
    found = run(tiny("llama"))
    lines = str(found).splitlines()
    assert lines[0].startswith("fp8_e4m3, amax per tensor: 3 prompts")
    assert len(lines) == 2 + 4 and "%" in lines[2]
    assert found._repr_html_().count("<tr>") == 5
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["kind"] == "k"
    assert run(tiny("llama"), "nvfp4").rows[0].error is None


@pytest.mark.parametrize(
    ("kv", "options", "error", "words"),
    [
        ("bf16", {}, ValueError, "no scale to calibrate"),
        ("mxfp8", {}, ValueError, "no scale to calibrate.*fp8_e4m3"),
        ("fp7", {}, ValueError, "fp7"),
        ("nvfp4", {"method": "mse"}, ValueError, "block scales"),
        ("fp8_e4m3", {"method": "best"}, ValueError, "best.*amax"),
        ("fp8_e4m3", {"per": "layer"}, ValueError, "layer.*tensor"),
        ("fp8_e4m3", {"plain": True, "per": "head"}, ValueError, "one number per layer"),
        ("fp8_e4m3", {"out": "x.txt"}, ValueError, "x.txt.*json"),
        ("fp8_e4m3", {"out": "nowhere/x.json"}, ValueError, "no folder 'nowhere'"),
        ("fp8_e4m3", {"kv_cache_dtype": "bf16"}, TypeError, "bf16 cache|multiple values"),
    ],
)
def test_refuses(
    tiny: Callable[..., Path], kv: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(tiny("llama"), kv, **options)


def test_refuses_prompts_and_engines(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), kv_cache_dtype="fp8_e4m3", **SMALL) as engine:
        with pytest.raises(ValueError, match="lane of kv_cache_dtype='bf16'"):
            run(engine)
    with qkv.Engine(tiny("llama"), **SMALL) as engine:
        for prompts, words in (([], "no prompts"), ([[1], []], "prompt 1: the prompt is empty")):
            with pytest.raises(ValueError, match=words):
                calibrate(engine, prompts, "fp8_e4m3", out=None, progress=False)
        with pytest.raises(TypeError, match="threads: the engine is open"):
            run(engine, threads=1)


def test_command(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.json"
    args = ["calibrate", "--model", str(tiny("llama")), "--kv-tokens", "1024", "--threads", "1"]
    args += ["--no-progress", "--out", str(out), "The fox", "The dog"]
    assert cli.main(args) == 0
    text = capsys.readouterr().out
    assert "2 prompts" in text and f"written: {out}" in text
    assert cli.main([*args, "--per", "head", "--method", "mse", "--chat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"][0] == str(out)
    content = json.loads(out.read_text())
    assert len(content["kv_cache"]["scaling_factor"]["0"]["0"]["k"]) == 2
    assert cli.main([*args, "--kv-cache-dtype", "mxfp8"]) == 2
    assert "no scale" in capsys.readouterr().err


def test_command_reads_a_file(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """It failed on every --input, for want of generate's --output."""
    args = ["calibrate", "--model", str(tiny("llama")), "--kv-tokens", "1024", "--threads", "1"]
    args += ["--no-progress", "--out", str(tmp_path / "s.json"), "--input"]
    (tmp_path / "lines.txt").write_text("The fox\nThe dog\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "The fox"}\n{"prompt_token_ids": [1, 2]}\n')
    for name in ("lines.txt", "rows.jsonl"):
        (tmp_path / "s.json").unlink(missing_ok=True)
        assert cli.main([*args, str(tmp_path / name)]) == 0
        assert json.loads((tmp_path / "s.json").read_text())["calibration"]["prompts"] == 2
    (tmp_path / "s.jsonl").write_text("")
    assert cli.main([*args, str(tmp_path / "nowhere.txt")]) == 2
