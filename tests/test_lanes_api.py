"""Formats of the KV cache, their scales and lanes through qkv.Engine, on tiny models."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import SamplingParams, _core, kv_scales, options, pools
from qkv.planner import GIB, KV_DTYPES
from ref import make_tiny

SMALL: dict[str, Any] = {"threads": 1, "kv_tokens": 2048, "max_running": 8}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
MIXED = {"default": "fp8_e4m3", "k": "bf16", "layers": {"1": {"v": "nvfp4"}}}
TINY_VOCAB = 200


def prompts(vocab: int, seed: int = 0, n: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, vocab, 40).tolist()
    return [stem[: 7 * i] + rng.integers(0, vocab, 5 + 9 * i).tolist() for i in range(n)]


def same(left: Any, right: Any) -> None:
    """The same bits of what a model predicted."""
    for one, other in zip(left.outputs, right.outputs, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.logprobs, other.logprobs)
        assert np.array_equal(one.top_logprobs, other.top_logprobs)


# Lanes.


def test_a_lane_is_the_engine_with_that_format_alone(tiny: Callable[..., Path]) -> None:
    model = tiny("qwen3")
    formats: list[Any] = ["bf16", "fp8_e4m3", "nvfp4", MIXED]
    rows = prompts(512)
    with qkv.Engine(model, kv_cache_dtype=formats, **SMALL) as engine:
        names = engine.info["kv_cache_dtype"]
        together = engine.generate(rows, GREEDY, progress=False)
    assert names[:3] == ["bf16", "fp8_e4m3", "nvfp4"] and len(set(names)) == 4
    for name, kv in zip(names, formats, strict=True):
        with qkv.Engine(model, kv_cache_dtype=kv, **SMALL) as engine:
            alone = engine.generate(rows, GREEDY, progress=False)
        for output, other in zip(together, alone, strict=True):
            assert output.error is None and not other.lanes
            same(output.lanes[name], other)
    for output in together:
        same(output, output.lanes["bf16"])
    different = [
        not np.array_equal(output.lanes["bf16"].logprobs, output.lanes["nvfp4"].logprobs)
        for output in together
    ]
    assert any(different)


def test_scores_of_lanes(tiny: Callable[..., Path]) -> None:
    """KL and top-1 agreement are those of the whole distributions."""
    model = tiny("llama", vocab_size=TINY_VOCAB)
    rows = prompts(TINY_VOCAB)
    formats = ["bf16", "fp8_e5m2", "bf16", "fp4_mx_block16"]
    with qkv.Engine(model, kv_cache_dtype=formats, **SMALL) as engine:
        scores = engine.score(rows, top=TINY_VOCAB, progress=False)
        plain = engine.score(rows, progress=False)
    for row, score, again in zip(rows, scores, plain, strict=True):
        assert score.error is None and list(score.lanes) == [
            "bf16", "fp8_e5m2", "bf16#2", "fp4_mx_block16",
        ]  # fmt: skip
        first = score.lanes["bf16"]
        assert score.kl is None and first.kl is None and first.top1 is None
        p = distribution(first)
        for name in list(score.lanes)[1:]:
            lane = score.lanes[name]
            q = distribution(lane)
            n = len(row) - 1
            assert lane.kl is not None and lane.kl_reverse is not None and lane.top1 is not None
            assert lane.kl.shape == lane.kl_reverse.shape == lane.top1.shape == (n,)
            kl = (np.exp(p) * (p - q)).sum(1)
            reverse = (np.exp(q) * (q - p)).sum(1)
            assert lane.kl == pytest.approx(kl, rel=1e-3, abs=2e-6)
            assert lane.kl_reverse == pytest.approx(reverse, rel=1e-3, abs=2e-6)
            assert np.array_equal(lane.top1, lane.top_ids[:, 0] == first.top_ids[:, 0])
            other = again.lanes[name]
            assert other.kl is not None and np.array_equal(other.kl, lane.kl)
        same_format = score.lanes["bf16#2"]
        assert same_format.kl is not None and same_format.top1 is not None
        assert (same_format.kl == 0).all() and same_format.top1.all()
        coarse = score.lanes["fp4_mx_block16"]
        assert coarse.kl is not None and coarse.kl.mean() > 0
        assert "mean KL" in repr(coarse) and "lanes bf16" in repr(score)
        ready = json.loads(json.dumps(score.to_dict()))
        assert len(ready["lanes"]["fp8_e5m2"]["kl"]) == n and "kl" not in ready


def distribution(score: qkv.Score) -> Any:
    """[n, vocab] log-probabilities in order of the token."""
    order = np.argsort(score.top_ids, axis=1)
    return np.take_along_axis(score.top_logprobs, order, 1).astype(np.float64)


def test_scored_continuations_of_lanes(tiny: Callable[..., Path]) -> None:
    model = tiny("llama")
    with qkv.Engine(model, kv_cache_dtype=["bf16", "fp8_e4m3"], **SMALL) as engine:
        rows: list[Any] = ["The quick brown fox", "Natalia sold", [1, 2, 3]]
        scores = engine.score(rows, [" jumps over", " clips", [4, 5]], progress=False)
        whole = engine.score([list(score_ids(engine, rows[0], " jumps over"))], progress=False)[0]
    for score in scores:
        lane = score.lanes["fp8_e4m3"]
        n = len(score.token_ids)
        assert lane.kl is not None and len(lane.kl) == len(lane.token_logprobs) == n > 0
    n = len(scores[0].token_ids)
    tail = whole.lanes["fp8_e4m3"].kl
    own = scores[0].lanes["fp8_e4m3"].kl
    assert tail is not None and own is not None and np.array_equal(tail[-n:], own)


def test_the_control_lane_differs_from_bf16_and_little(tiny: Callable[..., Path]) -> None:
    """Less than fp8 does, and the same whatever else is in the batch."""
    lanes = ["bf16", "bf16_stochastic", "fp8_e5m2"]
    rows: list[Any] = [[1 + (i * i + j) % 97 for i in range(60)] for j in range(4)]
    with qkv.Engine(tiny("llama"), kv_cache_dtype=lanes, **SMALL) as engine:
        scores = engine.score(rows, progress=False)
        again = engine.score([rows[2]], progress=False)[0]
    means = {}
    for name in lanes[1:]:
        kls = [score.lanes[name].kl for score in scores]
        means[name] = np.mean([kl.mean() for kl in kls if kl is not None])
    assert 0 < means["bf16_stochastic"] < means["fp8_e5m2"] / 10
    one, other = (score.lanes["bf16_stochastic"] for score in (scores[2], again))
    assert one.kl is not None and other.kl is not None
    assert np.array_equal(one.kl, other.kl)
    assert np.array_equal(one.token_logprobs, other.token_logprobs)


def score_ids(engine: qkv.Engine, prompt: str, more: str) -> list[int]:
    return engine.tokenizer.encode(prompt + more)


def test_bad_rows_among_lanes(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), kv_cache_dtype=["bf16", "mxfp8"], **SMALL) as engine:
        scores = engine.score([[1, 2, 3], [], [5], [1] * 5000, [1, 2, 3]], progress=False)
        outputs = engine.generate([[1, 2, 3], [9**9], [1, 2]], GREEDY, progress=False)
    assert [score.error is None for score in scores] == [True, False, True, False, True]
    assert scores[2].token_logprobs.size == 0 and scores[2].lanes["mxfp8"].kl is None
    first, last = (scores[i].lanes["mxfp8"].token_logprobs for i in (0, 4))
    assert np.array_equal(first, last)
    assert [output.error is None for output in outputs] == [True, False, True]


def test_many_scored_rows_share_pages_and_slots(tiny: Callable[..., Path]) -> None:
    """More rows than can run at once, in a pool that holds few of them."""
    model = tiny("llama", vocab_size=TINY_VOCAB)
    rows = prompts(TINY_VOCAB, n=8) * 4
    small = SMALL | {"kv_tokens": 256, "max_running": 4, "chunk_tokens": 24}
    with qkv.Engine(model, kv_cache_dtype=["bf16", "nvfp4"], **small) as engine:
        scores = engine.score(rows, progress=False)
    with qkv.Engine(model, kv_cache_dtype=["bf16", "nvfp4"], **SMALL) as engine:
        wide = engine.score(rows, progress=False)
    for score, other in zip(scores, wide, strict=True):
        assert score.error is None
        for field in ("token_logprobs", "kl", "kl_reverse", "top1"):
            left, right = (getattr(s.lanes["nvfp4"], field) for s in (score, other))
            assert np.array_equal(left, right), field


def test_interrupted_comparison_leaves_nothing_behind(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SMALL | {"chunk_tokens": 16, "max_running": 4}
    with qkv.Engine(tiny("llama"), kv_cache_dtype=["bf16", "fp8_e4m3"], **small) as engine:
        rows = prompts(512)
        before = engine.score(rows, progress=False)
        for n_steps in (1, 2, 5):
            left = iter(range(n_steps))
            pump = engine._pump

            def stop(left: Any = left, pump: Any = pump) -> int:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                n_tokens: int = pump()
                return n_tokens

            monkeypatch.setattr(engine, "_pump", stop)
            with pytest.raises(KeyboardInterrupt):
                engine.score(rows[::-1], progress=False)
            monkeypatch.undo()
            assert not engine._seqs
            after = engine.score(rows, progress=False)
            for one, other in zip(before, after, strict=True):
                kl, again = (score.lanes["fp8_e4m3"].kl for score in (one, other))
                assert kl is not None and again is not None and np.array_equal(kl, again)


# Sizes.


def test_scoring_ids_reads_no_tokenizer(tiny: Callable[..., Path]) -> None:
    """A large vocabulary's objects would weigh more than what the scoring holds."""
    with qkv.Engine(tiny("llama"), kv_cache_dtype=["bf16", "fp8_e4m3"], **SMALL) as engine:
        assert engine.score([[1, 2, 3]], progress=False)[0].error is None
        assert engine._tokenizer is None


@pytest.mark.parametrize("head_dim", [16, 24])
def test_memory_is_what_the_plan_says(tiny: Callable[..., Path], head_dim: int) -> None:
    """Heads of 24 channels are padded to 32, which the plan left out."""
    model = tiny("llama", head_dim=head_dim)
    found = qkv.plan(model, memory_gib=1, page_tokens=options.PAGE_TOKENS)
    lanes = list(KV_DTYPES)
    with qkv.Engine(model, kv_cache_dtype=lanes, threads=1, kv_tokens=4096) as engine:
        memory = engine.memory()
    for name in lanes:
        planned = 4096 * found.bytes_per_token[name]
        assert memory["kv_lanes"][name] == planned, name
    assert memory["kv"] == sum(memory["kv_lanes"].values())
    assert memory["weights"] == found.weights_gib * GIB


@pytest.mark.parametrize(
    ("arch", "types"),
    [
        ("llama", "F16"),
        ("qwen3", "Q8_0"),
        ("qwen2", {"token_embd": "Q5_1", "": "Q4_0"}),
        ("gemma3", "F32"),
    ],
)
@pytest.mark.parametrize("compute_dtype", ["bf16", "float32"])
def test_weights_are_what_the_plan_says(
    tmp_path: Path, arch: str, types: Any, compute_dtype: str
) -> None:
    path = tmp_path / "m.gguf"
    make_tiny.write_gguf(path, arch, types=types, codec=_core)
    checkpoint = _core.Checkpoint(str(path))
    planned = options.packed_bytes(checkpoint.tensors(), compute_dtype=compute_dtype)
    checkpoint.close()
    with qkv.Engine(path, compute_dtype=compute_dtype, threads=1, kv_tokens=64) as engine:
        assert engine.memory()["weights"] == planned
    if compute_dtype == "bf16":
        assert qkv.plan(path, memory_gib=1).weights_gib * GIB == planned


def test_lanes_share_the_memory(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same capacity in tokens for each, all of them within the budget."""
    monkeypatch.setattr(pools, "free_memory", lambda: 8 << 20)
    model = tiny("llama")
    size: dict[str, Any] = {"threads": 1, "mem_fraction": 0.5}
    with qkv.Engine(model, kv_cache_dtype=["bf16", "fp8_e4m3"], **size) as engine:
        both, memory = engine.info["kv_tokens"], engine.memory()
    with qkv.Engine(model, kv_cache_dtype="bf16", **size) as engine:
        alone = engine.info["kv_tokens"]
    assert both == pytest.approx(alone * 2 / 3, abs=16)
    assert memory["kv"] <= 4 << 20


# Scales.


def with_scales(target: Path, tensors: dict[str, Any]) -> Path:
    """The tiny llama with more tensors in its file."""
    model = make_tiny.write(target, "llama")
    scales = {name: np.array(values, np.float32) for name, values in tensors.items()}
    make_tiny.write_safetensors(
        target / "model.safetensors", model.tensors | scales, dict.fromkeys(scales, "F32")
    )
    return target


NAMES = "model.layers.{}.self_attn.{}_proj.{}_scale"
CARRIED = {NAMES.format(i, k, k): 0.25 * (1 + i) for i in range(2) for k in "kv"}


def side_file(path: Path, factors: dict[str, Any], **more: Any) -> Path:
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}} | more
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    return path


def test_scales_of_the_checkpoint(tmp_path: Path) -> None:
    model = with_scales(tmp_path / "m", CARRIED)
    lanes = ["fp8_e4m3", "bf16", "nvfp4"]
    with qkv.Engine(model, kv_cache_dtype=lanes, **SMALL) as engine:
        before = engine.kv_scales()
        assert {row.amax for row in before} == {None}
        engine.generate(prompts(512), GREEDY, progress=False)
        table = engine.kv_scales()
        used = [engine._core.kv_scales(lane) for lane in range(3)]
    assert [[float(u[i, 0, 0]) for i in range(2)] for u in used] == [
        [0.25, 0.5],
        [1, 1],
        [0.25, 0.5],
    ]
    assert len(table) == 3 * 4
    for row in table:
        assert row.source == NAMES.format(row.layer, row.kind, row.kind)
        assert row.values == (0.25 * (1 + row.layer),)
        assert row.applied == (row.lane != "bf16")
        assert row.reason == ("" if row.applied else "bf16 cache")
        assert row.amax is not None and row.amax > 0 and row.clipped is not None
    assert "model.layers.1.self_attn.v_proj.v_scale" in str(table)


def test_scales_change_what_is_stored(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Far above the calibrated scale everything becomes zero, far below it is clipped."""
    model = tiny("llama")
    good = qkv.calibrate(
        model, prompts(512), "fp8_e4m3", out=tmp_path / "good.json", progress=False, **SMALL
    )
    found: dict[float, list[Any]] = {}
    for factor in (1.0, 2.0**20, 2.0**-10):
        factors = {
            str(i): {"k": float(k[0]) * factor, "v": float(v[0]) * factor}
            for i, (k, v) in enumerate(good.layers)
        }
        path = side_file(tmp_path / f"{factor}.json", factors)
        with qkv.Engine(
            model, kv_cache_dtype="fp8_e4m3", quantization_param_path=path, **SMALL
        ) as engine:
            engine.generate(prompts(512), GREEDY, progress=False)
            found[factor] = list(engine.kv_scales())
    assert all(row.clipped < 0.005 and row.flushed < 0.02 for row in found[1.0])
    assert all(row.flushed > 0.99 and row.clipped == 0 for row in found[2.0**20])
    assert all(row.clipped > 0.5 for row in found[2.0**-10])


@pytest.mark.parametrize("query_dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("scale", [1.5e-45, 1e-30, 3e38])
def test_scales_at_the_ends_of_float32(
    tiny: Callable[..., Path], tmp_path: Path, scale: float, query_dtype: str
) -> None:
    path = side_file(tmp_path / "s.json", {"0": scale, "1": scale})
    with qkv.Engine(
        tiny("llama"), kv_cache_dtype="fp8_e4m3", quantization_param_path=path,
        query_dtype=query_dtype, **SMALL,
    ) as engine:  # fmt: skip
        score = engine.score([[1, 2, 3, 4, 5] * 8], progress=False)[0]
    assert score.error is None and np.isfinite(score.token_logprobs).all()


@pytest.mark.parametrize("half", ["k", "v"])
def test_keys_and_values_beyond_every_format_are_no_nan(tmp_path: Path, half: str) -> None:
    model = make_tiny.write(tmp_path, "llama")
    name = f"model.layers.0.self_attn.{half}_proj.weight"
    huge = {name: model.tensors[name] * np.float32(1e30)}
    make_tiny.write_safetensors(tmp_path / "model.safetensors", model.tensors | huge)
    with qkv.Engine(tmp_path, kv_cache_dtype=list(KV_DTYPES), **SMALL) as engine:
        score = engine.score([[1, 2, 3, 4, 5] * 8], progress=False)[0]
        rows = [r for r in engine.kv_scales() if (r.layer, r.kind) == (0, half)]
    for row in rows:
        assert np.isfinite(score.lanes[row.lane].token_logprobs).all(), row.lane
        assert row.amax is not None and row.amax > 1e29
        clips = row.format in ("fp8_e4m3", "fp8_e5m2", "nvfp4")
        assert row.clipped == pytest.approx(1.0 if clips else 0.0, abs=0.01)


def test_file_overrides_the_checkpoint(tmp_path: Path) -> None:
    model = with_scales(tmp_path / "m", CARRIED)
    path = side_file(tmp_path / "s.json", {"0": 1.5, "1": {"k": [2.0, 3.0], "v": 4.0}})
    with qkv.Engine(
        model, kv_cache_dtype="fp8_e4m3", quantization_param_path=path, **SMALL
    ) as engine:
        table = engine.kv_scales()
        used = engine._core.kv_scales(0)
    assert used.tolist() == [[[1.5, 1.5], [1.5, 1.5]], [[2.0, 3.0], [4.0, 4.0]]]
    assert [row.applied for row in table] == [True, False] * 4
    assert {row.reason for row in table if not row.applied} == {"overridden by file s.json"}


@pytest.mark.parametrize(
    ("kv", "factors", "more", "words"),
    [
        ("fp8_e4m3", {"0": 1.0}, {}, "layer 1 is missing"),
        ("fp8_e4m3", {"0": 1.0, "1": 0.0}, {}, "layer 1 is 0.0"),
        ("bf16", {"0": 1.0}, {}, "layer 1 is missing"),
        ("fp8_e5m2", {"0": 1.0, "1": 1.0}, {}, "for fp8_e4m3, kv_cache_dtype is fp8_e5m2"),
        ("fp8_e4m3", {"0": 1.0, "1": 1.0}, {"dtype": "float8_e5m2"}, "for fp8_e5m2"),
    ],
)
def test_bad_files_are_never_a_silent_one(
    tiny: Callable[..., Path],
    tmp_path: Path,
    kv: str,
    factors: dict[str, Any],
    more: dict[str, Any],
    words: str,
) -> None:
    path = side_file(tmp_path / "s.json", factors, **more)
    with pytest.raises(qkv.CheckpointError, match=words):
        qkv.Engine(tiny("llama"), kv_cache_dtype=kv, quantization_param_path=path, **SMALL)
    with pytest.raises(qkv.CheckpointError, match="model_type is 'llama', the model's is 'qwen3'"):
        qkv.Engine(tiny("qwen3"), kv_cache_dtype=kv, quantization_param_path=path, **SMALL)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({NAMES.format(1, "v", "v"): None}, "layer"),  # dropped
        ({"model.layers.2.self_attn.k_proj.k_scale": 1.0}, "layers.2"),
        ({"model.layers.0.mlp.up_proj.k_scale": 1.0}, "mlp.up_proj.k_scale"),
        ({NAMES.format(0, "k", "k"): -2.0}, "k_scale"),
    ],
)
def test_scale_that_binds_to_nothing_is_an_error(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    tensors = {name: v for name, v in (CARRIED | change).items() if v is not None}
    model = with_scales(tmp_path / "m", tensors)
    with pytest.raises(qkv.CheckpointError, match=words):
        qkv.Engine(model, kv_cache_dtype="fp8_e4m3", **SMALL)


def test_default_scale_is_a_warning(
    tiny: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qkv")
    qkv.Engine(tiny("llama"), kv_cache_dtype="fp8_e4m3", **SMALL).close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "scale 1.0" in warnings[0]
    caplog.clear()
    qkv.Engine(tiny("llama"), kv_cache_dtype="mxfp8", **SMALL).close()
    assert [r for r in caplog.records if r.levelno == logging.WARNING] == []
    assert any("LlamaForCausalLM" in r.getMessage() for r in caplog.records)


def test_auto_says_what_it_took(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "qkv")
    model = with_scales(tmp_path / "m", CARRIED)
    # The checkpoints that declare a format have quantized weights, too; here only the cache's is.
    key = "quantization_config.kv_cache_scheme"
    monkeypatch.setattr(kv_scales, "declared", lambda folder: ("fp8_e4m3", key))
    with qkv.Engine(model, **SMALL) as engine:
        assert engine.info["kv_cache_dtype"] == ["fp8_e4m3"]
        auto = engine.info["kv_cache_dtype_auto"]
        assert auto["taken"] == "fp8_e4m3" and key in auto["why"]
        assert all(row.applied for row in engine.kv_scales())
    assert any("auto: fp8_e4m3 (the checkpoint declares" in r.getMessage() for r in caplog.records)
    monkeypatch.undo()
    with qkv.Engine(model, **SMALL) as engine:
        assert engine.info["kv_cache_dtype_auto"]["taken"] == "bf16"
        assert {row.reason for row in engine.kv_scales()} == {"bf16 cache"}
    with qkv.Engine(model, kv_cache_dtype="bf16", **SMALL) as engine:
        assert engine.info["kv_cache_dtype_auto"] is None


def test_quantized_queries(tiny: Callable[..., Path]) -> None:
    outputs = []
    for query in ("bf16", "fp8_e4m3"):
        with qkv.Engine(
            tiny("llama"), kv_cache_dtype="fp8_e4m3", query_dtype=query, **SMALL
        ) as engine:
            assert engine.info["query_dtype"] == query
            outputs.append(engine.score(prompts(512), progress=False))
    differ = [
        not np.array_equal(one.token_logprobs, other.token_logprobs)
        for one, other in zip(*outputs, strict=True)
    ]
    assert any(differ)
    for one, other in zip(*outputs, strict=True):
        assert math.isfinite(other.total) and abs(one.total - other.total) < 0.05 * abs(one.total)


def test_inspection_lists_scales(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = with_scales(tmp_path / "m", CARRIED)
    found = qkv.inspect(model)
    assert [entry[:3] for entry in found.kv_scales] == [
        (i, kind, NAMES.format(i, kind, kind)) for i in range(2) for kind in "kv"
    ]
    assert "4 in the files" in str(found) and found.kv_auto == "bf16"
    assert "layers.1.self_attn.v_proj.v_scale" in found.scales_table()
    assert json.loads(json.dumps(found.to_dict()))["kv_scales"][3]["values"] == [0.5]
    bad = with_scales(tmp_path / "b", {NAMES.format(0, "k", "k"): 1.0})
    assert qkv.inspect(bad).kv_scales_problem is not None
    assert qkv.inspect(tiny("llama")).kv_scales == []


@pytest.mark.parametrize(
    "name",
    ["ct-fp8-static-kv-llama-g", "quark-fp8-kv8-llama-g", "fp8-static-autofp8-llama-g"],
)
def test_inspection_of_other_tools_checkpoints(fixtures_dir: Path, name: str) -> None:
    """Also where this version cannot run the weights."""
    found = qkv.inspect(fixtures_dir / name)
    assert [entry[:2] for entry in found.kv_scales] == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]
    assert all(len(entry[3]) == 1 and entry[3][0] > 0 for entry in found.kv_scales)
