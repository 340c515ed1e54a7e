"""Promise 1 for every format of the KV cache: the same bits whatever the batch, the chunk, the
pages, the prefix cache, retraction and threads; and a lane's are those of an engine with that lane
alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from core_runs import (
    LARGE,
    Lane,
    Request,
    alone,
    assert_same,
    covering,
    difference,
    mixed_requests,
    open_engine,
    run_row,
)
from qkv import _core
from ref import latent, tiny_cases

SMALL = 192
N_REQUESTS = 20
SCALED = ("fp8_e4m3", "fp8_e5m2", "nvfp4")
FORMATS = ("bf16", "bf16_stochastic", *SCALED, "mxfp8", "fp4_mx_block16")


class Cache(NamedTuple):
    """A cache by layer, and how queries meet it."""

    arch: str
    lane: Lane
    query_dtype: str = "bf16"
    isa: str | None = None
    config: tuple[tuple[str, Any], ...] = ()


LONGROPE = tuple({**tiny_cases.LONGROPE, "original_max_position_embeddings": 64}.items())


def everywhere(k: str, v: str, n_layers: int = 2) -> Lane:
    return [(k, v)] * n_layers


# Mistral has windows of 24 tokens; Gemma 3 has them in two layers of three, and heads of 32.
CACHES = {
    "fp8_e4m3": Cache("llama", everywhere("fp8_e4m3", "fp8_e4m3")),
    "fp8_e5m2": Cache("mistral", everywhere("fp8_e5m2", "fp8_e5m2")),
    "mxfp8": Cache("qwen3", everywhere("mxfp8", "mxfp8")),
    "nvfp4": Cache("llama", everywhere("nvfp4", "nvfp4")),
    "fp4_mx_block16": Cache("mistral", everywhere("fp4_mx_block16", "fp4_mx_block16")),
    "bf16_stochastic": Cache("llama", everywhere("bf16_stochastic", "bf16_stochastic")),
    "K and V apart": Cache("qwen3", everywhere("bf16", "nvfp4")),
    "by layer": Cache(
        "gemma3", [("bf16", "fp8_e4m3"), ("fp4_mx_block16", "mxfp8"), ("nvfp4", "fp8_e5m2")]
    ),
    "phi3 by layer": Cache(
        "phi3", [("fp8_e4m3", "mxfp8"), ("fp4_mx_block16", "bf16_stochastic")], config=LONGROPE
    ),
    "glm4 by layer": Cache("glm4", [("nvfp4", "fp8_e5m2"), ("bf16", "fp8_e4m3")]),
    "gemma2 by layer": Cache(
        "gemma2", [("fp8_e5m2", "nvfp4"), ("mxfp8", "fp4_mx_block16"), ("fp8_e4m3", "bf16")]
    ),
    "gpt-oss by layer": Cache("gpt_oss", [("fp8_e4m3", "nvfp4"), ("mxfp8", "fp4_mx_block16")]),
    "experts by layer": Cache("glm4_moe", [("fp8_e5m2", "bf16"), ("nvfp4", "bf16_stochastic")]),
    "latent fp8_e4m3": Cache("deepseek_v3", everywhere("fp8_e4m3", "fp8_e4m3")),
    "latent by layer": Cache("deepseek_v2", [("nvfp4", "nvfp4"), ("bf16", "bf16")]),
    "latent fp4": Cache(
        "deepseek_v3", [("fp4_mx_block16", "fp4_mx_block16"), ("bf16_stochastic",) * 2]
    ),
    "latent fp8_ds_mla": Cache(
        "deepseek_v3",
        everywhere("fp8_ds_mla", "fp8_ds_mla"),
        config=(("kv_lora_rank", 144), ("qk_rope_head_dim", 64)),
    ),
    "fp8 queries": Cache("llama", everywhere("fp8_e4m3", "mxfp8"), "fp8_e4m3"),
    "fp8 queries, by layer": Cache(
        "mistral", [("nvfp4", "bf16"), ("bf16", "fp4_mx_block16")], "fp8_e4m3"
    ),
} | {
    f"by layer, {isa}": Cache(
        "qwen3", [("nvfp4", "fp8_e4m3"), ("mxfp8", "bf16_stochastic")], isa=isa
    )
    for isa, usable in _core.isas()
    if usable
}
LAYERS = {"gemma2": 3, "gemma3": 3}

FACTORS: dict[str, tuple[Any, ...]] = {
    "cache": tuple(CACHES),
    "n": (1, 7, N_REQUESTS),
    "chunk_tokens": (16, 64, 512),
    "prefix_cache": (True, False),
    "kv_tokens": (LARGE, SMALL),
    "threads": (1, 2),
    "order": ("given", "reversed", "shuffled"),
    "arrive": (0, 2),
}


def some_scales(n_layers: int, n_kv_heads: int = 2) -> NDArray[np.float32]:
    """No two the same, no powers of two, small enough that something is clipped."""
    n = n_layers * 2 * n_kv_heads
    values = 0.0035 * (1 + np.arange(n, dtype=np.float32) / 3)
    return values.reshape(n_layers, 2, n_kv_heads).astype(np.float32)


def engine_options(cache: Cache) -> dict[str, Any]:
    scales = some_scales(len(cache.lane))
    if cache.arch in latent.CONFIGS:  # one head, and one row for K and V
        scales = np.repeat(scales[:, :1, :1], 2, axis=1)
    options: dict[str, Any] = {
        "lanes": [cache.lane],
        "query_dtype": cache.query_dtype,
        "kv_scales": scales,
    }
    return options | ({"isa": cache.isa} if cache.isa else {})


References = Callable[[str], tuple[Path, list[Request], dict[int, _core.Result]]]


@pytest.fixture(scope="module")
def reference(tiny: Callable[..., Path]) -> References:
    """Model folder, requests, and what each of them gives alone."""
    made: dict[str, tuple[Path, list[Request], dict[int, _core.Result]]] = {}

    def make(name: str) -> tuple[Path, list[Request], dict[int, _core.Result]]:
        if name not in made:
            cache = CACHES[name]
            path = tiny(
                cache.arch, num_hidden_layers=LAYERS.get(cache.arch, 2), **dict(cache.config)
            )
            requests = mixed_requests(N_REQUESTS, 512, seed=21)
            made[name] = (path, requests, alone(path, requests, **engine_options(cache)))
        return made[name]

    return make


def test_formats_differ(reference: References) -> None:
    """Else the tests below would compare a format with itself under another name."""
    found = [reference(name)[2] for name, cache in CACHES.items() if cache.arch == "llama"]
    assert len(found) >= 3
    for i, left in enumerate(found):
        for right in found[:i]:
            assert any(difference(left[r], right[r]) for r in left)


def test_pairs_of_factors_in_every_format(reference: References) -> None:
    n_retractions: dict[str, int] = dict.fromkeys(CACHES, 0)
    n_reused = 0
    for row in covering(FACTORS):
        name = row.pop("cache")
        path, requests, expected = reference(name)
        results, counts = run_row(path, requests, row, **engine_options(CACHES[name]))
        assert len(results) == row["n"]
        assert_same(expected, results, (name, row))
        n_retractions[name] += counts["n_retractions"]
        n_reused += counts["n_reused_tokens"]
    assert sum(n > 0 for n in n_retractions.values()) >= len(CACHES) // 2, n_retractions
    assert n_reused > 0


@pytest.mark.parametrize("name", CACHES)
def test_retraction_and_reuse_in_every_format(reference: References, name: str) -> None:
    """The one row that must reach both."""
    path, requests, expected = reference(name)
    row: dict[str, Any] = {"n": N_REQUESTS, "chunk_tokens": 64, "prefix_cache": True}
    row |= {"kv_tokens": SMALL, "threads": 2, "order": "shuffled", "arrive": 0}
    results, counts = run_row(path, requests, row, **engine_options(CACHES[name]))
    assert_same(expected, results, name)
    assert counts["n_retractions"] > 0 and counts["n_reused_tokens"] > 0


def test_the_guard_backend_gives_the_same_bits(reference: References) -> None:
    """No code above backend.h reads a page itself, whatever its format: it would have faulted."""
    path, requests, expected = reference("by layer")
    row: dict[str, Any] = {"n": 8, "chunk_tokens": 16, "prefix_cache": True, "kv_tokens": SMALL}
    row |= {"threads": 1, "order": "given", "arrive": 0, "device": "guard"}
    results, counts = run_row(path, requests, row, **engine_options(CACHES["by layer"]))
    assert_same(expected, results, "the guard backend")
    assert counts["n_retractions"] > 0 and counts["n_reused_tokens"] > 0


@pytest.mark.parametrize("query_dtype", ["bf16", "fp8_e4m3"])
def test_a_lane_gives_what_it_gives_alone(tiny: Callable[..., Path], query_dtype: str) -> None:
    """All formats and mixtures of them as lanes of one engine, every request in each, short of
    pages."""
    path = tiny("llama", num_hidden_layers=2)
    requests = mixed_requests(10, 512, seed=22)
    lanes: list[Lane] = [everywhere(name, name) for name in FORMATS]
    lanes += [[("bf16", "nvfp4"), ("fp8_e5m2", "bf16")], [("mxfp8", "fp8_e4m3"), ("nvfp4", "bf16")]]
    scales = np.stack([some_scales(2) * np.float32(1 + i / 7) for i in range(len(lanes))])
    engine = open_engine(
        path, kv_tokens=SMALL, lanes=lanes, kv_scales=scales, query_dtype=query_dtype, threads=2,
        chunk_tokens=48,
    )  # fmt: skip
    assert engine.info["query_dtype"] == query_dtype
    places = {}
    for i, request in enumerate(requests):
        for lane in range(len(lanes)):
            places[engine.add(request.tokens, lane=lane, **request.options)] = (i, lane)
    results: dict[int, dict[int, _core.Result]] = {lane: {} for lane in range(len(lanes))}
    while places:
        for ident in engine.step().finished:
            i, lane = places.pop(ident)
            results[lane][i] = engine.take(ident)
    assert engine.counts()["n_retractions"] > 0
    engine.close()
    for lane, formats in enumerate(lanes):
        expected = alone(
            path, requests, lanes=[formats], kv_scales=scales[lane], query_dtype=query_dtype
        )
        assert_same(expected, results[lane], formats)
