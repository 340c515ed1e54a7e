"""Engine.score_lanes: the bits of a group of the same lanes, each layer below a fork once, and an
engine that goes on whatever came between."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from core_runs import Lane, open_engine
from qkv import _core

FIGURES = ("logprobs", "kl", "kl_reverse", "top1")
LOWER = ("fp8_e4m3", "nvfp4", "mxfp8", "fp8_e5m2", "fp4_mx_block16")


def by_layer(n_layers: int, base: str = "bf16") -> list[Lane]:
    """The base, each layer's K and V alone in a lower format, one lane like the base, one lower
    throughout; not in order of their forks."""
    lanes = [[(base, base)] * n_layers]
    for i in reversed(range(2 * n_layers)):
        lane = [(base, base)] * n_layers
        low = LOWER[i % len(LOWER)]
        lane[i // 2] = (low, base) if i % 2 else (base, low)
        lanes.append(lane)
    return [*lanes, lanes[0], [("fp8_e4m3", "nvfp4")] * n_layers]


def document(n: int, seed: int = 5) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 512, n, dtype=np.int32)


def score_group(path: Path, tokens: NDArray[np.int32], start: int, **options: Any) -> list[Any]:
    """[lane][figure], by the scheduler, in chunks that lockstep never has."""
    engine = open_engine(path, kv_tokens=2048, threads=1, chunk_tokens=4096, **options)
    n_lanes = len(options["lanes"])
    ids = [
        engine.add(
            tokens, lane=lane, max_tokens=0, logprob_start=start, group=1, group_size=n_lanes
        )
        for lane in range(n_lanes)
    ]
    while engine.step().n_rows > 0:
        pass
    found = [engine.take(ident) for ident in ids]
    engine.close()
    m = len(tokens) - start
    zero, true = np.zeros(m, np.float32), np.ones(m, bool)
    rows: list[Any] = [[found[0].prompt_logprobs, zero, zero, true]]
    return rows + [[r.prompt_logprobs, r.kl, r.kl_reverse, r.top1] for r in found[1:]]


def assert_same(scores: _core.LaneScores, expected: list[Any], what: object) -> None:
    for i, name in enumerate(FIGURES):
        got = getattr(scores, name)
        want = np.stack([lane[i] for lane in expected])
        assert got.shape == want.shape and got.dtype == want.dtype, (name, what)
        bits = f"u{got.itemsize}"
        assert np.array_equal(got.view(bits), want.view(bits)), (name, what)


def work(lanes: list[Lane], n_tokens: int) -> tuple[int, int]:
    """Rows times layers to compute and to take over, where only formats differ."""
    n_layers = len(lanes[0])
    forks = [0] + [
        next((i for i in range(n_layers) if lane[i] != lanes[0][i]), n_layers) for lane in lanes[1:]
    ]
    skipped = sum(forks) * (n_tokens - 1)
    return len(lanes) * n_layers * (n_tokens - 1) - skipped, skipped


MODELS = {"llama": 2, "qwen3": 3, "gemma3": 4}  # Gemma 3: post norms, windows of 24


@pytest.mark.parametrize("compute_dtype", ["bf16", "float32"])
@pytest.mark.parametrize("arch", MODELS)
def test_same_bits_as_a_group(tiny: Callable[..., Path], arch: str, compute_dtype: str) -> None:
    path = tiny(arch, num_hidden_layers=MODELS[arch])
    lanes = by_layer(MODELS[arch], "float32" if compute_dtype == "float32" else "bf16")
    for n, start in ((2, 1), (33, 1), (107, 40)):
        tokens = document(n)
        expected = score_group(path, tokens, start, lanes=lanes, compute_dtype=compute_dtype)
        for chunk, running, threads in ((1, len(lanes), 1), (40, 8, 2), (512, 64, 1)):
            engine = open_engine(
                path, kv_tokens=112, lanes=lanes, compute_dtype=compute_dtype, threads=threads,
                chunk_tokens=chunk, max_running=running,
            )  # fmt: skip
            for _ in range(2):
                scores = engine.score_lanes(tokens, logprob_start=start)
                assert_same(scores, expected, (n, chunk, threads))
                assert (scores.computed, scores.skipped) == work(lanes, n)
            engine.close()
    alike = len(lanes) - 2
    assert (scores.kl[alike] == 0).all() and scores.top1[alike].all()
    assert all((scores.kl[i] != 0).any() for i in range(1, len(lanes)) if i != alike)


def test_a_scale_makes_a_fork_where_it_is_applied(tiny: Callable[..., Path]) -> None:
    path = tiny("qwen3", num_hidden_layers=3)
    lane: Lane = [("fp8_e4m3", "bf16"), ("nvfp4", "fp8_e5m2"), ("fp8_e4m3", "bf16")]
    scales = np.full((4, 3, 2, 2), 0.02, np.float32)
    scales[1, 2, 0, 1] = 0.05  # K of layer 2, the second head
    scales[2, 1, 1, 0] = 0.03  # V of layer 1
    scales[3, 0, 1, :] = 0.50  # V of layer 0 is bf16: not applied
    tokens = document(50)
    options: dict[str, Any] = {"lanes": [lane] * 4, "kv_scales": scales}
    engine = open_engine(path, kv_tokens=64, threads=2, **options)
    scores = engine.score_lanes(tokens)
    forks = [0, 2, 1, 3]
    assert scores.skipped == sum(forks) * 49 and scores.computed == (12 - sum(forks)) * 49
    assert_same(scores, score_group(path, tokens, 1, **options), "scales")
    for i, fork in enumerate(forks):
        stored = engine.kv_counts(i)["n_values"].sum(axis=(1, 2))
        assert [bool(n) for n in stored] == [layer >= fork for layer in range(3)]
    assert [bool(row.any()) for row in scores.kl] == [False, True, True, False]
    engine.close()


def test_the_guard_backend_gives_the_same_bits(tiny: Callable[..., Path]) -> None:
    """No code above backend.h touches a row or a page itself: it would have faulted."""
    path = tiny("gemma3", num_hidden_layers=4)
    lanes = by_layer(4)
    tokens = document(61)
    engine = open_engine(path, kv_tokens=64, lanes=lanes, threads=1, device="guard")
    assert_same(engine.score_lanes(tokens), score_group(path, tokens, 1, lanes=lanes), "guard")
    engine.close()


def test_one_lane(tiny: Callable[..., Path]) -> None:
    engine = open_engine(tiny("llama"), kv_tokens=64, threads=1)
    scores = engine.score_lanes(document(30), logprob_start=10)
    assert scores.logprobs.shape == (1, 20) and (scores.logprobs < 0).all()
    assert not scores.kl.any() and not scores.kl_reverse.any() and scores.top1.all()
    assert (scores.computed, scores.skipped) == (29 * 2, 0)
    engine.close()


def test_what_it_refuses(tiny: Callable[..., Path]) -> None:
    lanes = by_layer(2)  # 7 lanes, 6 of them computed
    options: dict[str, Any] = {"lanes": lanes, "threads": 1, "max_model_len": 100}
    engine = open_engine(tiny("llama"), kv_tokens=64, chunk_tokens=4, max_running=2, **options)
    ok = document(60)
    before = engine.score_lanes(ok)
    refused: list[tuple[Any, int, type[Exception], str]] = [
        (ok[:1], 1, ValueError, "tokens: 1, must be 2 to 100"),
        (document(101), 1, ValueError, "max_model_len"),
        (document(66), 1, qkv.OutOfPages, "66, the KV pools hold 64"),
        (ok, 60, ValueError, "logprob_start: 60, must be 1 to 59"),
        (ok, 0, ValueError, "logprob_start"),
        (np.array([1, 512], np.int32), 1, ValueError, "512 at 1"),
        (ok.astype(np.int64), 1, TypeError, "int32"),
        (ok[::2], 1, ValueError, "contiguous"),
        (ok[None], 1, ValueError, "dimensions"),
    ]
    for tokens, start, error, match in refused:
        with pytest.raises(error, match=match):
            engine.score_lanes(tokens, logprob_start=start)
    ident = engine.add(ok[:40], lane=3, max_tokens=4, ignore_eos=True)
    with pytest.raises(_core.Error, match="1 wait"):
        engine.score_lanes(ok)
    engine.step()
    with pytest.raises(_core.Error, match="1 sequences run"):
        engine.score_lanes(ok)
    while not engine.step().finished:
        pass
    assert_same(engine.score_lanes(ok), [list(x) for x in zip(*before[:4], strict=True)], "again")
    assert len(engine.take(ident).token_ids) == 4
    engine.close()
    with pytest.raises(_core.Error, match="closed"):
        engine.score_lanes(ok)
    engine = open_engine(tiny("llama"), kv_tokens=64, chunk_tokens=4, max_running=1, **options)
    with pytest.raises(ValueError, match="6 lanes to compute, a step of this engine has 5 rows"):
        engine.score_lanes(ok)
    engine.close()


def test_interrupt_between_chunks(tiny: Callable[..., Path]) -> None:
    """The engine is busy meanwhile, for signal handlers too, and goes on afterwards."""
    lanes = by_layer(2)
    engine = open_engine(
        tiny("llama"), kv_tokens=1024, lanes=lanes, threads=1, chunk_tokens=4, max_running=2
    )
    ok = document(40)
    before = engine.score_lanes(ok)
    seen: list[str] = []

    def interrupt() -> None:
        while not seen:
            try:
                engine.counts()
            except _core.Error as error:
                seen.append(str(error))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        engine.score_lanes(document(1000))
    thread.join()
    assert "busy" in seen[0]
    counts = engine.counts()
    assert counts["n_free_pages"] == counts["n_pages"]
    assert_same(engine.score_lanes(ok), [list(x) for x in zip(*before[:4], strict=True)], "after")
    engine.close()
