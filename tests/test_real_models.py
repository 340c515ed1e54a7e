"""Real models against what transformers computed from the same files (tests/tools/record_real.py),
and a recorded sample of our own answers. Skipped, with the reason, where a model is absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from core_runs import Request, open_engine, run

pytestmark = pytest.mark.slow
DATA = Path(__file__).parent / "data"
MODELS = ("smollm2", "gemma3_270m", "qwen25_coder")
FIXTURE = {"smollm2": "demo_model", "gemma3_270m": "gemma_model", "qwen25_coder": "qwen_model"}


def recorded(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DATA / f"real_{name}.json").read_text())
    return rows


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[str, Path]:
    return request.param, request.getfixturevalue(FIXTURE[request.param])


def score_and_continue(
    path: Path, rows: list[dict[str, Any]], n_output: int = 32, **options: Any
) -> list[Any]:
    engine = open_engine(path, kv_tokens=2048, **options)
    ask = {"max_tokens": n_output, "temperature": 0.0, "ignore_eos": True, "logprob_start": 1}
    results = run(engine, [Request(np.array(row["ids"], np.int32), ask) for row in rows])
    engine.close()
    return [results[i] for i in range(len(rows))]


def agreeing(row: dict[str, Any], noise: float) -> int:
    """Greedy tokens up to the first whose lead over the second is within the noise."""
    close = [i for i, margin in enumerate(row["greedy_margin"]) if margin <= noise]
    return close[0] if close else len(row["greedy"])


def test_float32_has_the_values_of_transformers(model: tuple[str, Path]) -> None:
    name, path = model
    rows = recorded(name)
    for row, got in zip(rows, score_and_continue(path, rows, compute_dtype="float32"), strict=True):
        np.testing.assert_allclose(got.prompt_logprobs, row["logprobs"], rtol=0, atol=1e-3)
        n = agreeing(row, 2e-3)
        assert n >= 24, "the recorded sample is too close to call"
        assert list(got.token_ids[:n]) == row["greedy"][:n]


def test_bf16_is_within_the_noise_of_transformers(model: tuple[str, Path]) -> None:
    """The noise: transformers in bfloat16 against transformers in float32, over all prompts of the
    model (in one of a dozen tokens the largest difference is chance)."""
    name, path = model
    rows = recorded(name)
    noise = max(row["bf16_noise_max"] for row in rows)
    n_tokens = sum(len(row["logprobs"]) for row in rows)
    mean = sum(row["bf16_noise_mean"] * len(row["logprobs"]) for row in rows) / n_tokens
    off = []
    for row, got in zip(rows, score_and_continue(path, rows), strict=True):
        off.append(np.abs(got.prompt_logprobs - np.array(row["logprobs"], np.float32)))
        n = agreeing(row, 2 * noise)
        assert list(got.token_ids[:n]) == row["greedy"][:n]
    every = np.concatenate(off)
    assert len(every) == n_tokens
    print(f"{name}: mean {every.mean():.4f} of {mean:.4f}, max {every.max():.4f} of {noise:.4f}")
    assert every.mean() <= mean
    assert every.max() <= noise


def test_the_guard_backend_gives_the_same_bits(demo_model: Path) -> None:
    """Nothing above backend.h touched device memory, on a real model; it would have faulted."""
    rows = recorded("smollm2")[:1]
    plain = score_and_continue(demo_model, rows, 3)
    guarded = score_and_continue(demo_model, rows, 3, device="guard")
    for a, b in zip(plain, guarded, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.logprobs.view(np.uint32), b.logprobs.view(np.uint32))


def test_recorded_answers(demo_model: Path) -> None:
    """Greedy answers of the demo model through the whole public path: chat template, tokenizer,
    scheduler, detokenizer. `noise` bounds what an instruction set may change in a logit; from a
    token whose recorded lead is smaller, the rest may differ."""
    record = json.loads((DATA / "demo_greedy.json").read_text())
    params = qkv.SamplingParams(max_tokens=record["max_tokens"], temperature=0)
    with qkv.Engine(demo_model, kv_tokens=8192) as engine:
        chats = [[{"role": "user", "content": row["question"]}] for row in record["rows"]]
        outputs = engine.chat(chats, params, progress=False)
    n_whole = 0
    for row, output in zip(record["rows"], outputs, strict=True):
        assert output.error is None
        assert list(output.prompt_token_ids) == row["prompt_token_ids"]
        close = [i for i, margin in enumerate(row["margins"]) if margin <= record["noise"]]
        n = close[0] if close else len(row["token_ids"])
        assert list(output.token_ids[:n]) == row["token_ids"][:n], row["question"]
        if list(output.token_ids) == row["token_ids"]:
            n_whole += 1
            assert output.text == row["text"]
            assert output.finish_reason == row["finish_reason"]
    assert n_whole > 0, "no answer was the recorded one to its end"
