"""A cache that is known to be damaged is found, and the lanes beside it are not touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv

LANES = ["bf16", "bf16_stochastic", "fp8_e4m3"]
SMALL: dict[str, Any] = {"threads": 1, "kv_tokens": 512}
ROWS: list[Any] = [[1 + (i * i + 3 * j) % 97 for i in range(60)] for j in range(3)]


def scores_on(model: Path, device: str) -> list[qkv.Score]:
    with qkv.Engine(model, kv_cache_dtype=LANES, device=device, **SMALL) as engine:
        return engine.score(ROWS, progress=False)


def mean_kl(scores: list[qkv.Score], lane: str) -> float:
    kls = [score.lanes[lane].kl for score in scores]
    return float(np.mean([kl.mean() for kl in kls if kl is not None]))


@pytest.mark.parametrize("arch", ["llama", "qwen3"])  # qwen3 has a norm between key and rotation
@pytest.mark.parametrize("fault", ["layer=1,kind=v_zero", "layer=0,kind=k_rotate,head=1"])
def test_a_damaged_lane_is_far_from_a_sound_one(
    tiny: Callable[..., Path], arch: str, fault: str
) -> None:
    model = tiny(arch)
    sound, damaged = scores_on(model, "cpu"), scores_on(model, f"fault:{fault}")
    assert mean_kl(damaged, "fp8_e4m3") > 10 * mean_kl(sound, "fp8_e4m3") > 0
    for before, after in zip(sound, damaged, strict=True):
        assert np.array_equal(before.token_logprobs, after.token_logprobs)
        for lane in LANES[:2]:
            one, other = before.lanes[lane], after.lanes[lane]
            assert np.array_equal(one.token_logprobs, other.token_logprobs)
        one, other = before.lanes["bf16_stochastic"], after.lanes["bf16_stochastic"]
        assert one.kl is not None and other.kl is not None and np.array_equal(one.kl, other.kl)


def test_the_engine_says_that_it_is_damaged(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), device="fault:kind=v_zero,layer=1", **SMALL) as engine:
        assert engine.info["device"] == "cpu, damaged: v_zero in layer 1"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("fault", "device='fault': must be one of auto, cpu, .*guard"),
        ("fault:", "is not key=value"),
        ("fault:layer=1", "kind= is missing"),
        ("fault:layer=1,kind=v_nan", "v_nan"),
        ("fault:layer=99,kind=v_zero", "layer 99, the KV pool has 2"),
        ("fault:layer=1,kind=k_rotate,head=7", "head 7, layer 1 has 2 KV heads"),
    ],
)
def test_bad_specs(tiny: Callable[..., Path], device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qkv.Engine(tiny("llama", num_hidden_layers=2), device=device, **SMALL)
