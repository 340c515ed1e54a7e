"""Batches of requests through qkv._core.Engine, for the tests that compare runs bit for bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv import _core


@dataclass(frozen=True)
class Request:
    tokens: NDArray[np.int32]
    options: dict[str, Any] = field(default_factory=dict)


#: Formats of K and V in each layer.
Lane = Sequence[tuple[str, str]]

LARGE = 8192  # tokens of a pool that never runs out


def open_engine(
    path: Path,
    *,
    kv_tokens: int | Callable[[int, int], int],
    n_lanes: int = 1,
    lanes: Sequence[Lane] | None = None,
    **options: Any,
) -> _core.Engine:
    """An engine with a cache in its compute format, or with the given lanes."""
    if lanes is not None:
        return _core.Engine(str(path), kv_formats=lanes, kv_tokens=kv_tokens, **options)
    checkpoint = _core.Checkpoint(str(path))
    n_layers = checkpoint.model_config()["n_layers"]
    checkpoint.close()
    kv = "float32" if options.get("compute_dtype") == "float32" else "bf16"
    lane = [(kv, kv)] * n_layers
    return _core.Engine(str(path), kv_formats=[lane] * n_lanes, kv_tokens=kv_tokens, **options)


def scored(path: Path) -> _core.Result:
    """Log-probabilities of a prompt and four greedy tokens."""
    engine = open_engine(path, kv_tokens=256, threads=1)
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4, "logprob_start": 1}
    (result,) = run(engine, [Request(np.arange(7, 47, dtype=np.int32), options)]).values()
    engine.close()
    return result


def run(
    engine: _core.Engine,
    requests: Sequence[Request],
    order: Iterable[int] | None = None,
    *,
    arrive: int = 0,
    lane: int = 0,
) -> dict[int, _core.Result]:
    """Results by index into `requests`. `arrive`: so many are added before each step, 0: all at
    once."""
    todo = list(order if order is not None else range(len(requests)))
    index_of: dict[int, int] = {}
    results: dict[int, _core.Result] = {}
    while todo or len(results) < len(index_of):
        for _ in range(arrive or len(todo)):
            if todo:
                index = todo.pop(0)
                request = requests[index]
                index_of[engine.add(request.tokens, lane=lane, **request.options)] = index
        step = engine.step()
        for ident in step.finished:
            results[index_of[ident]] = engine.take(ident)
        assert step.n_rows > 0 or step.finished or todo, "the engine stands still"
    return results


TIMES = ("queue_time", "time_to_first_token", "total_time", "cached_tokens", "retractions")


def difference(a: _core.Result, b: _core.Result) -> str:
    """The first field in which two results differ, and how; empty if they are the same bits."""
    for name in a._fields:
        x: Any = getattr(a, name)
        y: Any = getattr(b, name)
        if name in TIMES:
            continue
        if not isinstance(x, np.ndarray):
            if x != y:
                return f"{name}: {x} and {y}"
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name}: {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
        bits = f"u{x.itemsize}"
        unequal = np.flatnonzero(x.reshape(-1).view(bits) != y.reshape(-1).view(bits))
        if unequal.size:
            at = int(unequal[0])
            return (
                f"{name}: {unequal.size} of {x.size} differ, first at {at}: "
                f"{x.reshape(-1)[at]!r} and {y.reshape(-1)[at]!r}"
            )
    return ""


def mixed_requests(n: int, vocab: int, seed: int, *, longest: int = 100) -> list[Request]:
    """Requests that share prefixes in part (none, inside a page, pages, nearly all), greedy and
    sampled, some with penalties, alternatives or log-probabilities of the prompt.

    The scheduler keeps room for 64 tokens of growth, so only longer outputs run it out of pages:
    the first four requests have short prompts, which follow each other in every order that sorts
    by tokens, and 80 to 95 tokens of output. Two of them want more than 192 tokens of cache."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, vocab, longest, dtype=np.int32) for _ in range(max(n // 8, 1))]
    out = []
    for i in range(n):
        n_shared = [0, 5, 16, 17, 33, 48, 64, longest - 8][i % 8]
        n_own = int(rng.integers(1, max(longest - n_shared, 2)))
        own = rng.integers(0, vocab, min(n_own, 40), dtype=np.int32)
        tokens = np.concatenate([stems[(i // 2) % len(stems)][:n_shared], own]).astype(np.int32)
        options: dict[str, Any] = {"max_tokens": int(rng.integers(1, 21)), "ignore_eos": i % 3 != 0}
        if i < 4:
            tokens = np.concatenate([[0], rng.integers(0, vocab, 16 + i)]).astype(np.int32)
            options = {"max_tokens": 80 + 5 * i, "ignore_eos": True}
        if i % 2:
            options |= {"temperature": 0.9, "seed": 1000 + i, "top_p": 0.9, "top_k": 40}
        else:
            options |= {"temperature": 0.0}
        if i % 5 == 1:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "min_p": 0.02}
        if i % 4 == 0:
            options |= {"n_top": 3}
        if i % 4 == 3:
            options |= {"logprob_start": 1, "prompt_n_top": 2}
        out.append(Request(tokens, options))
    return out


def vocab_of(path: Path) -> int:
    return int(json.loads((path / "config.json").read_text())["vocab_size"])


def ordered(n: int, order: str) -> list[int]:
    indices = list(range(n))
    if order == "reversed":
        indices.reverse()
    elif order == "shuffled":
        np.random.default_rng(n).shuffle(indices)
    return indices


def alone(path: Path, requests: list[Request], **options: Any) -> dict[int, _core.Result]:
    options = {"threads": 1, "chunk_tokens": 512, "prefix_cache": False} | options
    engine = open_engine(path, kv_tokens=LARGE, **options)
    out = {}
    for i in range(len(requests)):
        out[i] = run(engine, requests, [i])[i]
    engine.close()
    return out


def assert_same(
    reference: dict[int, _core.Result], results: dict[int, _core.Result], what: object
) -> None:
    for i, result in results.items():
        found = difference(reference[i], result)
        assert not found, f"request {i} of {what}: {found}"


def covering(factors: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Few rows in which every pair of values of every two factors occurs (greedy choice)."""
    names = list(factors)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    every = [dict(zip(names, row, strict=True)) for row in itertools.product(*factors.values())]

    def gain(row: dict[str, Any]) -> int:
        return sum(p in open_pairs for p in itertools.combinations(row.items(), 2))

    while open_pairs:
        best = max(every, key=gain)
        open_pairs -= set(itertools.combinations(best.items(), 2))
        yield best


def run_row(
    path: Path, requests: list[Request], row: dict[str, Any], **more: Any
) -> tuple[dict[int, _core.Result], dict[str, int]]:
    options = dict(row)
    n, order, arrive = (options.pop(k) for k in ("n", "order", "arrive"))
    engine = open_engine(path, **options, **more)
    results = run(engine, requests[:n], ordered(n, order), arrive=arrive)
    counts = engine.counts()
    engine.close()
    return results, counts
