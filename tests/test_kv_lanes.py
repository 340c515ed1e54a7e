"""Lanes through qkv._core: promise 1 for every KV format and for mixed ones, a lane's rows are
those of an engine with that lane alone, and the comparison of lanes is what their logits say."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from core_runs import Request, difference, mixed_requests, run
from qkv import _core

N_LAYERS = 2
Lane = list[tuple[str, str]]
# fp8_ds_mla is of latent attention alone: test_same_bits_kv.py.
FORMATS = [name for name, _ in _core.kv_formats() if name not in ("float32", "fp8_ds_mla")]
LANES: dict[str, Lane] = {name: [(name, name)] * N_LAYERS for name in FORMATS} | {
    "mixed": [("bf16", "fp8_e4m3"), ("nvfp4", "fp8_e5m2")],
    "mixed 4 and 8": [("mxfp8", "nvfp4"), ("fp8_e4m3", "fp4_mx_block16")],
}
LARGE, SMALL = 8192, 192
SCALES = np.array([[[0.02, 0.03], [0.05, 0.01]], [[0.04, 0.02], [0.03, 0.02]]], np.float32)


def open_lanes(path: Path, lanes: list[Lane], **options: Any) -> _core.Engine:
    defaults: dict[str, Any] = {"threads": 1, "kv_tokens": LARGE, "kv_scales": SCALES}
    return _core.Engine(str(path), kv_formats=lanes, **defaults | options)


def model(tiny: Callable[..., Path], arch: str = "llama") -> Path:
    return tiny(arch, num_hidden_layers=N_LAYERS)


def alone(path: Path, lane: Lane, requests: list[Request]) -> dict[int, _core.Result]:
    engine = open_lanes(path, [lane], prefix_cache=False)
    results = {i: run(engine, requests, [i])[i] for i in range(len(requests))}
    engine.close()
    return results


@pytest.mark.parametrize("lane", LANES)
def test_same_bits_whatever_the_batch(tiny: Callable[..., Path], lane: str) -> None:
    """Mistral's window makes keys fall out of sight."""
    path, n = model(tiny, "mistral"), 16
    requests = mixed_requests(n, 512, seed=3)
    reference = alone(path, LANES[lane], requests)
    n_retractions = n_reused = 0
    for chunk, pool, threads in ((512, LARGE, 2), (16, SMALL, 1), (37, SMALL, 2)):
        engine = open_lanes(
            path, [LANES[lane]], kv_tokens=pool, chunk_tokens=chunk, threads=threads
        )
        for order in (range(n), reversed(range(n))):
            for i, result in run(engine, requests, order).items():
                found = difference(reference[i], result)
                assert not found, f"request {i}, chunk {chunk}, pool {pool}: {found}"
        counts = engine.counts()
        n_retractions += counts["n_retractions"]
        n_reused += counts["n_reused_tokens"]
        engine.close()
    assert n_retractions > 0 and n_reused > 0


@pytest.mark.parametrize("pool", [LARGE, SMALL])
def test_lanes_are_engines_of_their_own(tiny: Callable[..., Path], pool: int) -> None:
    """All lanes at once, each with all requests: generated tokens and scored prompts."""
    path = model(tiny)
    requests = mixed_requests(8, 512, seed=4)
    for request in requests[4:]:
        request.options.update(max_tokens=0, min_tokens=0, logprob_start=1)
    engine = open_lanes(path, list(LANES.values()), kv_tokens=pool, chunk_tokens=48, threads=2)
    index_of = {
        engine.add(request.tokens, lane=lane, **request.options): (lane, i)
        for i, request in enumerate(requests)
        for lane in range(len(LANES))
    }
    results: dict[tuple[int, int], _core.Result] = {}
    while len(results) < len(index_of):
        for ident in engine.step().finished:
            results[index_of[ident]] = engine.take(ident)
    assert (engine.counts()["n_retractions"] > 0) == (pool == SMALL)
    engine.close()
    texts = set()
    for number, (name, lane) in enumerate(LANES.items()):
        reference = alone(path, lane, requests)
        for i in range(len(requests)):
            found = difference(reference[i], results[number, i])
            assert not found, f"lane {name}, request {i}: {found}"
        texts.add(reference[0].logprobs.tobytes())
    assert len(texts) == len(LANES), "two formats gave the same: nothing was told apart"


# ---- comparison -----------------------------------------------------------------------------

N_VOCAB = 256  # as many as can be reported as most likely


def score_group(
    engine: _core.Engine, tokens: NDArray[np.int32], n_lanes: int, group: int = 1, start: int = 1
) -> list[int]:
    return [
        engine.add(
            tokens,
            lane=lane,
            max_tokens=0,
            logprob_start=start,
            prompt_n_top=N_VOCAB,
            group=group,
            group_size=n_lanes,
        )
        for lane in range(n_lanes)
    ]


def run_dry(engine: _core.Engine) -> list[int]:
    finished: list[int] = []
    while True:
        step = engine.step()
        finished += step.finished
        if step.n_rows == 0:
            return finished


def logprobs(result: _core.Result) -> NDArray[np.float64]:
    out = np.full((len(result.prompt_logprobs), N_VOCAB), np.nan)
    ids = result.prompt_top_ids.astype(np.int64)
    np.put_along_axis(out, ids, result.prompt_top_logprobs.astype(np.float64), 1)
    return out


def test_comparison_is_what_the_logits_say(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", vocab_size=N_VOCAB, tokenizer=False)
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, N_VOCAB, n, dtype=np.int32) for n in (2, 33, 90)]
    lanes = list(LANES.values())
    engine = open_lanes(path, lanes, chunk_tokens=40)
    groups = [score_group(engine, tokens, len(lanes), i + 5) for i, tokens in enumerate(prompts)]
    assert sorted(run_dry(engine)) == sorted(i for group in groups for i in group)
    for tokens, group in zip(prompts, groups, strict=True):
        first, *others = (engine.take(ident) for ident in group)
        assert first.comparison == "complete" and len(first.kl) == len(first.top1) == 0
        p = logprobs(first)
        for result in others:
            q = logprobs(result)
            assert result.comparison == "complete"
            assert result.kl.dtype == result.kl_reverse.dtype == np.float32
            assert result.top1.dtype == np.bool_
            assert len(result.kl) == len(result.prompt_logprobs) == len(tokens) - 1
            kl, reverse = (np.exp(p) * (p - q)).sum(1), (np.exp(q) * (q - p)).sum(1)
            np.testing.assert_allclose(result.kl, kl, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(result.kl_reverse, reverse, rtol=1e-5, atol=1e-6)
            assert (result.top1 == (p.argmax(1) == q.argmax(1))).all()
    memory = engine.memory()
    assert memory["hidden"] == 0 and 0 < memory["kv_resident"] <= memory["kv"]
    assert sum(memory["kv_lanes"]) == memory["kv"]
    engine.close()


def test_what_was_compared_is_what_engines_alone_say(tiny: Callable[..., Path]) -> None:
    """Two engines, one lane each, give the numbers that a group gives, whatever else runs."""
    path = tiny("llama", vocab_size=N_VOCAB, tokenizer=False)
    tokens = np.random.default_rng(9).integers(0, N_VOCAB, 100, dtype=np.int32)
    names = ("bf16", "nvfp4")
    separate = []
    for name in names:
        engine = open_lanes(path, [LANES[name]])
        ident = engine.add(tokens, max_tokens=0, logprob_start=1, prompt_n_top=N_VOCAB)
        run_dry(engine)
        separate.append(engine.take(ident))
        engine.close()
    p, q = logprobs(separate[0]), logprobs(separate[1])
    engine = open_lanes(path, [LANES[name] for name in names], kv_tokens=224, chunk_tokens=1)
    for lane in range(2):
        engine.add(tokens[:9], lane=lane, max_tokens=200, ignore_eos=True)
    group = score_group(engine, tokens, 2)
    run_dry(engine)
    assert engine.counts()["n_retractions"] > 0
    results = [engine.take(ident) for ident in group]
    for one, other in zip(results, separate, strict=True):
        assert (one.prompt_logprobs == other.prompt_logprobs).all()
        assert (one.prompt_ranks == other.prompt_ranks).all()
    kl = (np.exp(p) * (p - q)).sum(1)
    np.testing.assert_allclose(results[1].kl, kl, rtol=1e-5, atol=1e-6)
    engine.close()


def test_equal_lanes_do_not_differ_by_a_bit(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", vocab_size=N_VOCAB, tokenizer=False)
    tokens = np.random.default_rng(10).integers(0, N_VOCAB, 80, dtype=np.int32)
    for name in LANES:
        engine = open_lanes(path, [LANES[name]] * 3, chunk_tokens=50)
        group = score_group(engine, tokens, 3, start=40)
        run_dry(engine)
        for ident in group[1:]:
            result = engine.take(ident)
            assert len(result.kl) == 40
            assert not result.kl.any() and not result.kl_reverse.any() and result.top1.all()
        engine.close()


@pytest.mark.parametrize("way", ["abort", "finish"])
def test_a_lost_member_ends_the_others(tiny: Callable[..., Path], way: str) -> None:
    path = tiny("llama", vocab_size=N_VOCAB, tokenizer=False)
    tokens = np.random.default_rng(11).integers(0, N_VOCAB, 80, dtype=np.int32)
    engine = open_lanes(path, [LANES["bf16"], LANES["nvfp4"]], chunk_tokens=30, offline=False)
    group, other = score_group(engine, tokens, 2), score_group(engine, tokens[::-1].copy(), 2, 2)
    for _ in range(3):
        assert engine.step().finished == []
    with pytest.raises(_core.Error, match="has not finished"):
        engine.take(group[0])
    if way == "abort":
        engine.abort(group[0])
    else:
        engine.finish(group[0], 0)
        lost = engine.take(group[0])
        assert lost.finish_reason == "stop" and lost.comparison == "broken"
    step = engine.step()
    assert step.finished[-1] == group[1]
    result = engine.take(group[1])
    assert result.finish_reason == "abort" and result.comparison == "broken"
    assert len(result.kl) <= len(result.prompt_logprobs) < len(tokens) - 1
    assert set(run_dry(engine)) | set(step.finished[:-1]) == set(other)
    assert all(engine.take(ident).comparison == "complete" for ident in other)
    assert engine.memory()["hidden"] == 0
    engine.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lane": 0}, "lane: 0 is in group 3 already"),
        ({"group_size": 3}, "group_size: 3, must be 2 to 2"),
        ({"group_size": 0}, "group_size: 0"),
        ({"max_tokens": 4}, "max_tokens: 4, must be 0"),
        ({"logprob_start": 2}, "logprob_start: 2, in group 3 it is 1"),
        ({"logprob_start": -1}, "logprob_start: -1, must be 1 to 8"),
        ({"tokens": np.arange(9, dtype=np.int32)}, "tokens: not those of group 3"),
        ({"group": 2**63}, "group: 9223372036854775808"),
        ({"group_size": -1}, "group_size: -1"),
    ],
)
def test_what_does_not_fit_a_group(
    tiny: Callable[..., Path], options: dict[str, Any], match: str
) -> None:
    engine = open_lanes(model(tiny), [LANES["bf16"], LANES["fp8_e4m3"]])
    sound: dict[str, Any] = {"max_tokens": 0, "logprob_start": 1, "group": 3, "group_size": 2}
    tokens = np.arange(1, 10, dtype=np.int32)
    first = engine.add(tokens, lane=0, **sound)
    given: dict[str, Any] = {"lane": 1, "tokens": tokens} | sound | options
    with pytest.raises(ValueError, match=match):
        engine.add(given.pop("tokens"), **given)
    assert run_dry(engine) == []  # the group still lacks a member
    with pytest.raises(_core.Error, match="group 3, of whose 2 members 1 were added"):
        engine.take(first)
    second = engine.add(tokens, lane=1, **sound)
    assert sorted(run_dry(engine)) == [first, second]
    engine.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(os.environ.get("QKV_SANITIZED") == "1", reason="freed memory is kept back")
def test_no_leak(tiny: Callable[..., Path]) -> None:
    """Groups that are complete, broken, waiting for a member and closed; what pools say."""
    path = tiny("llama", vocab_size=N_VOCAB, tokenizer=False)
    tokens = np.random.default_rng(13).integers(0, N_VOCAB, 60, dtype=np.int32)

    def cycle() -> None:
        lanes = [LANES["bf16"], LANES["nvfp4"], LANES["mixed"]]
        engine = open_lanes(path, lanes, kv_tokens=512, chunk_tokens=32)
        engine.kv_observe(1, True)
        complete = score_group(engine, tokens, 3, 1)
        run_dry(engine)
        for ident in complete:
            engine.take(ident)
        broken = score_group(engine, tokens[::-1].copy(), 3, 2)
        engine.step()
        engine.abort(broken[1])
        score_group(engine, tokens[:50], 3, 3)
        engine.add(tokens, max_tokens=0, logprob_start=2, group=4, group_size=2)
        for _ in range(4):
            engine.step()
        with pytest.raises(ValueError, match="lane: 0 is in group 4"):
            engine.add(tokens, max_tokens=0, logprob_start=2, group=4, group_size=2)
        for lane in range(3):
            engine.kv_counts(lane)
            engine.kv_scales(lane)
        engine.kv_histogram(1)
        engine.memory()
        engine.close()
        checkpoint = _core.Checkpoint(str(path))
        checkpoint.kv_scales()
        checkpoint.close()

    for _ in range(30):
        cycle()
    gc.collect()
    before = resident_bytes()
    for _ in range(90):
        cycle()
    gc.collect()
    assert resident_bytes() - before < 3 << 20


@pytest.mark.soak
def test_memory_of_a_long_scored_prompt(qwen_model: Path) -> None:
    """4,096 tokens, a 0.5B model, two lanes: at most 100 MiB above weights and pools."""
    checkpoint = _core.Checkpoint(str(qwen_model))
    n_layers = checkpoint.model_config()["n_layers"]
    checkpoint.close()
    tokens = np.random.default_rng(12).integers(0, 30_000, 4096, dtype=np.int32)
    lanes = [[(name, name)] * n_layers for name in ("bf16", "fp8_e4m3")]
    engine = _core.Engine(str(qwen_model), kv_formats=lanes, kv_tokens=4096 + 16)
    for lane in range(2):
        engine.add(
            tokens, lane=lane, max_tokens=0, logprob_start=1, prompt_n_top=5, group=1, group_size=2
        )
    most = 0
    while engine.step().n_rows:
        memory = engine.memory()
        most = max(most, memory["activations"] + memory["hidden"] + memory["scratch"])
    assert most < 100 * 2**20, most / 2**20
    engine.close()
