"""Promise 1: a request's tokens and log-probabilities are the same bits whatever else is in the
batch. The reference is every request alone, one after the other, on one thread, in one chunk,
without a prefix cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_runs import (
    LARGE,
    Request,
    alone,
    assert_same,
    covering,
    mixed_requests,
    open_engine,
    ordered,
    run,
    run_row,
)
from qkv import _core
from ref import tiny_cases

SMALL = 192
COUNTS = (1, 7, 64)
CHUNKS = (16, 64, 512)
ORDERS = ("given", "reversed", "shuffled")
# Gemma 3 and Mistral have windows of 24 tokens, Gemma 3 in two layers of three.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 3},
    # Sequences of more than 64 tokens turn by other angles than shorter ones.
    "phi3": {**tiny_cases.LONGROPE, "original_max_position_embeddings": 64, "sliding_window": 24},
    "glm4": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 2},
    "qwen3_moe": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 2},
}


@pytest.fixture(scope="module")
def batch(tiny: Callable[..., Path]) -> Callable[[str], tuple[Path, list[Request], Any]]:
    """Model folder, 64 requests and what each gives alone."""
    made: dict[str, tuple[Path, list[Request], Any]] = {}

    def make(arch: str) -> tuple[Path, list[Request], Any]:
        if arch not in made:
            path = tiny(arch, **MODELS[arch])
            requests = mixed_requests(64, 512, seed=7)
            made[arch] = (path, requests, alone(path, requests))
        return made[arch]

    return make


def test_the_reference_says_something(
    batch: Callable[[str], tuple[Path, list[Request], Any]],
) -> None:
    _, requests, reference = batch("llama")
    texts = {tuple(r.token_ids) for r in reference.values()}
    assert len(texts) > 48
    for request, result in zip(requests, reference.values(), strict=True):
        assert 1 <= len(result.token_ids) <= request.options["max_tokens"]
        assert np.isfinite(result.logprobs).all() and (result.logprobs <= 0).all()
        if "logprob_start" in request.options:
            assert len(result.prompt_logprobs) == len(request.tokens) - 1


def check_full_cross(
    path: Path, requests: list[Request], reference: dict[int, _core.Result], **options: Any
) -> None:
    n_retractions = n_reused = 0
    for chunk, cache, pool in itertools.product(CHUNKS, (True, False), (LARGE, SMALL)):
        engine = open_engine(
            path, kv_tokens=pool, chunk_tokens=chunk, prefix_cache=cache, **options
        )
        for n, order in itertools.product(COUNTS, ORDERS):
            if n == 1 and order != "given":
                continue  # one request has one order
            results = run(engine, requests[:n], ordered(n, order))
            assert len(results) == n
            assert_same(reference, results, (n, chunk, cache, pool, order, options))
            engine.flush()
        counts = engine.counts()
        n_retractions += counts["n_retractions"] if pool == SMALL else 0
        n_reused += counts["n_reused_tokens"]
        assert cache or counts["n_reused_tokens"] == 0
        assert counts["n_running"] == counts["n_waiting"] == 0
        assert counts["n_free_pages"] == counts["n_pages"]
        engine.close()
    assert n_retractions > 0, "no run was short of pages: the cross proves less than it says"
    assert n_reused > 0, "the prefix cache was never hit"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3"])
def test_full_cross(
    batch: Callable[[str], tuple[Path, list[Request], Any]], arch: str, threads: int
) -> None:
    check_full_cross(*batch(arch), threads=threads)


@pytest.mark.soak
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("compute_dtype", ["bf16", "float32"])
@pytest.mark.parametrize("isa", [name for name, usable in _core.isas() if usable])
def test_full_cross_of_every_arithmetic(
    tiny: Callable[..., Path], isa: str, compute_dtype: str, threads: int
) -> None:
    path = tiny("gemma3", **MODELS["gemma3"])
    requests = mixed_requests(64, 512, seed=10)
    arithmetic = {"isa": isa, "compute_dtype": compute_dtype}
    reference = alone(path, requests, **arithmetic)
    check_full_cross(path, requests, reference, threads=threads, **arithmetic)


def test_the_guard_backend_gives_the_same_bits(
    batch: Callable[[str], tuple[Path, list[Request], Any]],
) -> None:
    """Nothing above backend.h touches device memory, retraction and reuse included: it would have
    faulted."""
    path, requests, reference = batch("mistral")
    engine = open_engine(path, kv_tokens=SMALL, chunk_tokens=16, device="guard")
    assert_same(reference, run(engine, requests[:16]), "the guard backend")
    counts = engine.counts()
    assert counts["n_retractions"] > 0 and counts["n_reused_tokens"] > 0
    engine.close()


FACTORS: dict[str, tuple[Any, ...]] = {
    "n": COUNTS,
    "chunk_tokens": CHUNKS,
    "prefix_cache": (True, False),
    "kv_tokens": (LARGE, SMALL),
    "threads": (1, 2),
    "order": ORDERS,
    "offline": (True, False),
    "max_running": (3, 64),
    "arrive": (0, 2),
}


def other_settings() -> list[Any]:
    out: list[tuple[str, dict[str, Any]]] = [
        (arch, {}) for arch in ("gemma3", "phi3", "glm4", "gemma2", "qwen3_moe", "gpt_oss")
    ]
    out += [(arch, {"compute_dtype": "float32"}) for arch in ("llama", "gemma3")]
    usable = [name for name, is_usable in _core.isas() if is_usable]
    out += [("mistral", {"isa": name}) for name in usable[1:]]  # the best one is the default
    # Not under sanitizers: the code is that of the others, and they take their time.
    slow = {"scalar", "phi3", "glm4", "gemma2", "float32"}
    return [
        pytest.param(*row, marks=pytest.mark.slow if any(s in str(row) for s in slow) else ())
        for row in out
    ]


@pytest.mark.parametrize(("arch", "options"), other_settings(), ids=str)
def test_pairs_of_factors(tiny: Callable[..., Path], arch: str, options: dict[str, Any]) -> None:
    path = tiny(arch, **MODELS[arch])
    requests = mixed_requests(64, 512, seed=8)
    reference = alone(path, requests, **options)
    n_retractions = 0
    for row in covering(FACTORS):
        results, counts = run_row(path, requests, row, **options)
        assert_same(reference, results, (arch, row, options))
        n_retractions += counts["n_retractions"]
    assert n_retractions > 0


def test_lanes_do_not_touch_each_other(
    batch: Callable[[str], tuple[Path, list[Request], Any]],
) -> None:
    path, requests, reference = batch("llama")
    engine = open_engine(path, kv_tokens=SMALL, n_lanes=2)
    ids = {}
    for i, request in enumerate(requests):
        for lane in (0, 1):
            ids[engine.add(request.tokens, lane=lane, **request.options)] = i
    left = set(ids)
    while left:
        for ident in engine.step().finished:
            assert_same(reference, {ids[ident]: engine.take(ident)}, "two lanes")
            left.remove(ident)
    engine.close()


def test_aborted_neighbours_change_nothing(
    batch: Callable[[str], tuple[Path, list[Request], Any]],
) -> None:
    path, requests, reference = batch("mistral")
    engine = open_engine(path, kv_tokens=SMALL, chunk_tokens=16)
    ids = {engine.add(r.tokens, **r.options): i for i, r in enumerate(requests)}
    left, n_steps = set(ids), 0
    while left:
        step = engine.step()
        n_steps += 1
        for ident in step.finished:
            assert_same(reference, {ids[ident]: engine.take(ident)}, "neighbours aborted")
            left.remove(ident)
        if n_steps % 3 == 0 and len(left) > 20:  # waiting ones and running ones
            victim = sorted(left)[(n_steps * 7) % len(left)]
            engine.abort(victim)
            left.remove(victim)
    counts = engine.counts()
    assert counts["n_running"] == counts["n_waiting"] == 0
    engine.close()


def test_samples_of_one_prompt_differ_and_repeat(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", **MODELS["llama"])
    prompt = np.arange(30, dtype=np.int32)
    options = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    requests = [Request(prompt, options | {"seed": 3, "sample": s}) for s in range(8)]
    reference = alone(path, requests)
    assert len({tuple(r.token_ids) for r in reference.values()}) == 8
    engine = open_engine(path, kv_tokens=SMALL, chunk_tokens=16)
    assert_same(reference, run(engine, requests), "samples together")
    engine.close()


@pytest.mark.slow
def test_demo_model(demo_model: Path) -> None:
    """Factors that a real model's size could upset, every pair of them."""
    factors = {k: v for k, v in FACTORS.items() if k not in ("offline", "max_running", "arrive")}
    rows = list(covering(factors))
    assert len(rows) <= 24
    requests = mixed_requests(64, 49152, seed=9, longest=72)
    for i in range(4, 64):  # short, but for the first four: it is a real model
        options = requests[i].options | {"max_tokens": 1 + i % 6}
        requests[i] = Request(requests[i].tokens[-40:], options)
    reference = alone(demo_model, requests, threads=2)
    n_retractions = 0
    for row in rows:
        settings = {**row, "arrive": 0}
        results, counts = run_row(demo_model, requests, settings)
        assert_same(reference, results, ("demo", row))
        n_retractions += counts["n_retractions"]
    assert n_retractions > 0
