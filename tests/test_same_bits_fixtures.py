"""Promise 1 on the checkpoints of every architecture beyond the first ones, in every format of the
cache that applies: the same bits alone, in chunks, with a second thread, out of pages, and after a
prefix hit. fp8_ds_mla wants 64 rotated channels, which no fixture has (test_same_bits_kv.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import qkv

NAMES = (
    "base-gemma2-tiny", "base-glm4-tiny", "base-phi3-tiny", "base-qwen3moe-b-tiny",
    "ct-w4a16-qwen3moe", "fp8-block-deepseekv3", "gptoss-mxfp4",
)  # fmt: skip
FORMATS = ("bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16", "bf16_stochastic")
#: Room is kept for 64 tokens of growth: only longer outputs run a pool out of pages.
MAX_TOKENS = (90, 90, 6, 6, 6)

#: What one request gave in one lane: prompt's log-probabilities, tokens, theirs.
Bits = tuple[bytes, bytes, bytes]


def bits(folder: Path, prompts: list[list[int]], **options: Any) -> dict[str, list[Bits]]:
    params = [
        qkv.SamplingParams(max_tokens=n, seed=5, ignore_eos=True, prompt_logprobs=0)
        for n in MAX_TOKENS
    ]
    given: dict[str, Any] = {"threads": 1, "kv_tokens": 2048, "max_model_len": 512, **options}
    found: dict[str, list[Bits]] = {name: [] for name in FORMATS}
    n_retractions = 0
    with qkv.Engine(folder, kv_cache_dtype=list(FORMATS), **given) as engine:
        for output in engine.generate(prompts, params, progress=False):
            assert output.error is None and output.metrics is not None
            n_retractions += output.metrics.retractions
            for name in FORMATS:
                lane = output.lanes[name]
                assert lane.prompt_logprobs is not None
                arrays = (lane.prompt_logprobs, lane.token_ids, lane.logprobs)
                found[name].append(tuple(array.tobytes() for array in arrays))  # type: ignore[arg-type]
    assert (n_retractions > 0) == (given["kv_tokens"] < 2048)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_in_every_format(fixtures_dir: Path, name: str) -> None:
    folder = fixtures_dir / name
    rows = [row["ids"] for row in json.loads((folder / "prompts.json").read_text())]
    prompts = [*rows[1:5], rows[4] + rows[2]]  # the last one continues the one before
    together = bits(folder, prompts)
    assert len({tuple(found) for found in together.values()}) == len(FORMATS)
    for options in (
        {"threads": 2, "chunk_tokens": 16},
        {"max_running": 1, "prefix_cache": False},
        {"kv_tokens": 176, "chunk_tokens": 48, "schedule": "fcfs"},
    ):
        assert bits(folder, prompts, **options) == together, options
