"""Layers with a window keep what running sequences still see and no more: the same bits as with all
pages kept, pages given back, and a plan that is what the engine allocates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from core_runs import (
    LARGE,
    Request,
    alone,
    assert_same,
    covering,
    mixed_requests,
    open_engine,
    run,
    run_row,
)
from qkv import _core, pools

N_REQUESTS = 12
GPT_OSS_20B = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip

#: Every other layer, two of three, every layer.
ARCHS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 3},
    "mistral": {"num_hidden_layers": 2},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "arch": tuple(ARCHS),
    "window": (1, 5, 16, 24, 33),  # less than a page, a page, no multiples of one
    "chunk_tokens": (3, 16, 64, 512),
    "prefix_cache": (True, False),
    "kv_tokens": (LARGE, 192),
    "max_running": (2, 16),
    "order": ("given", "shuffled"),
    "arrive": (0, 2),
}

Made = Callable[[str, int], tuple[Path, list[Request], dict[int, _core.Result]]]


@pytest.fixture(scope="module")
def made(tiny: Callable[..., Path]) -> Made:
    """A model, requests, and what each gives alone in one chunk."""
    known: dict[tuple[str, int], tuple[Path, list[Request], dict[int, _core.Result]]] = {}

    def make(arch: str, window: int) -> tuple[Path, list[Request], dict[int, _core.Result]]:
        if (arch, window) not in known:
            path = tiny(arch, sliding_window=window, **ARCHS[arch])
            requests = mixed_requests(N_REQUESTS, 512, seed=window)
            known[arch, window] = path, requests, alone(path, requests)
        return known[arch, window]

    return make


@pytest.mark.parametrize("row", list(covering(FACTORS)), ids=str)
def test_same_bits(made: Made, row: dict[str, Any]) -> None:
    """Whatever is freed, found again or computed again."""
    options = dict(row)
    path, requests, expected = made(options.pop("arch"), options.pop("window"))
    results, _ = run_row(path, requests, {"n": N_REQUESTS, "threads": 2, **options})
    assert_same(expected, results, row)


@pytest.mark.parametrize("arch", ARCHS)
def test_prefixes_are_found_and_give_the_same_bits(made: Made, arch: str) -> None:
    path, requests, expected = made(arch, 24)
    engine = open_engine(path, kv_tokens=LARGE, chunk_tokens=32, threads=1)
    assert_same(expected, run(engine, requests), "the first time")
    before = engine.counts()["n_reused_tokens"]
    assert_same(expected, run(engine, requests), "again")
    assert engine.counts()["n_reused_tokens"] > before + 200
    engine.close()


def test_guard_and_chunks(made: Made) -> None:
    """Nothing above the backend touches device memory for it."""
    path, requests, expected = made("gpt_oss", 16)
    engine = open_engine(path, kv_tokens=256, chunk_tokens=40, threads=1, device="guard")
    assert_same(expected, run(engine, requests[:6]), "guard")
    engine.close()


def test_pages_behind_the_window_are_freed(tiny: Callable[..., Path]) -> None:
    """A long sequence never holds more than a window and a chunk of the layers with windows."""
    path = tiny("gpt_oss", num_hidden_layers=2, sliding_window=32)
    engine = open_engine(
        path, kv_tokens=1024, chunk_tokens=64, max_running=4, threads=1, prefix_cache=False
    )
    tokens = np.arange(600, dtype=np.int32) % 500
    ident = engine.add(tokens, max_tokens=200, temperature=0.0, ignore_eos=True)
    most = 0
    while not engine.step().finished:
        counts = engine.counts()
        most = max(most, counts["n_window_pages"] - counts["n_free_window_pages"])
    assert len(engine.take(ident).token_ids) == 200
    counts = engine.counts()
    assert most <= 3  # 32 tokens touch three pages of 16
    assert counts["most_used_window_pages"] <= 3 + 64 // 16
    assert counts["most_used_pages"] == 800 // 16
    assert counts["n_free_window_pages"] == counts["n_window_pages"]
    engine.close()


def test_lanes_in_lockstep(tiny: Callable[..., Path]) -> None:
    """A document much longer than the window pool has the same figures as in a large one."""
    path = tiny("mistral", num_hidden_layers=2, sliding_window=24)
    tokens = (np.arange(500, dtype=np.int32) * 7) % 500
    lanes = [[("bf16", "bf16")] * 2, [("bf16", "bf16"), ("fp8_e4m3", "bf16")]]
    found = []
    for chunk, running in ((16, 2), (512, 64)):
        engine = open_engine(
            path, kv_tokens=512, lanes=lanes, chunk_tokens=chunk, max_running=running, threads=1
        )
        found.append(engine.score_lanes(tokens))
        assert (engine.info["kv_window_tokens"] < 200) == (chunk == 16)
        engine.close()
    for name in ("logprobs", "kl", "top1"):
        assert np.array_equal(getattr(found[0], name), getattr(found[1], name))


def test_models_without_windows_have_one_pool(tiny: Callable[..., Path]) -> None:
    engine = open_engine(tiny("llama"), kv_tokens=64, threads=1)
    assert engine.info["kv_window_tokens"] == 0 and engine.memory()["kv_windows"] == 0
    assert engine.counts()["n_window_pages"] == 0
    engine.close()


# Planning.


def test_pool_sizes() -> None:
    """Five quarters of the running sequences' windows, one more, a chunk, the blank page."""
    n_pages = (8 + 2 + 1) * (128 // 16 + 1) + 512 // 16 + 1 + 1
    assert _core.window_tokens(128, 1 << 20, 8, 512) == n_pages * 16
    assert _core.window_tokens(128, 320, 8, 512) == 320 + 16  # never more than the others hold
    assert _core.window_tokens(1, 1 << 20, 1, 1) == (2 * 1 + 1 + 1) * 16
    assert _core.window_tokens(17, 1 << 20, 1, 16) == (2 * 2 + 2 + 1) * 16
    with pytest.raises(ValueError, match="window"):
        _core.window_tokens(0, 320, 8, 512)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv", ["bf16", "nvfp4"])
def test_plan_is_what_the_engine_allocates(tiny: Callable[..., Path], arch: str, kv: str) -> None:
    path = tiny(arch, **ARCHS[arch])
    budget = 4 << 20
    found = qkv.plan(
        path, memory_gib=budget / 2**30, weights_gib=0.0, mem_fraction=1.0, kv_cache_dtypes=[kv],
        input_tokens=400, output_tokens=100, chunk_tokens=64,
    )  # fmt: skip
    options: dict[str, Any] = {"kv_cache_dtype": kv, "chunk_tokens": 64, "threads": 1}
    with qkv.Engine(
        path, kv_tokens=found.tokens[kv], max_running=found.requests[kv], **options
    ) as engine:
        held, info = engine.memory(), engine.info
    assert held["kv"] == found.pool_gib(kv) * 2**30 <= budget
    assert info["kv_window_tokens"] == found.window_tokens[kv] - 16
    assert found.tokens[kv] >= found.requests[kv] * 512 - 12


def test_capacity() -> None:
    """Requests of 4,096 tokens of gpt-oss-20b in 8 GiB of bf16 cache: 42 if every page is kept."""
    found = qkv.plan(
        GPT_OSS_20B, memory_gib=8, weights_gib=0.0, mem_fraction=1.0, kv_cache_dtypes=["bf16"],
        input_tokens=3072, output_tokens=1024,
    )  # fmt: skip
    assert found.bytes_per_token["bf16"] == 2 * found.bytes_beyond_window["bf16"] == 49152
    assert (8 << 30) // (49152 * 4096) == 42
    assert found.requests["bf16"] == 81
    assert found.pool_gib("bf16") <= 8


def test_a_model_of_windows_alone(tiny: Callable[..., Path]) -> None:
    """Its memory is bounded by the windows, however long the sequences are."""
    pool = pools.Pool(token_bytes=0, window_bytes=100, window=64, max_running=3, chunk_tokens=64)
    assert pool.n_bytes(1 << 20) == pool.n_bytes(1 << 30) == 100 * pool.window_tokens(1 << 20)
    path = tiny("mistral", num_hidden_layers=2, sliding_window=24)
    with qkv.Engine(path, max_running=2, max_model_len=512, threads=1, chunk_tokens=16) as engine:
        assert engine.info["kv_tokens"] == 2 * (512 + 16)
        assert engine.memory()["kv"] == engine.memory()["kv_windows"]
        assert engine.info["kv_window_tokens"] < 200
        (output,) = engine.generate(
            [list(range(1, 400))], qkv.SamplingParams(max_tokens=64, ignore_eos=True)
        )
    assert len(output.token_ids) == 64
