"""Log-likelihoods of MMLU's choices against lm-evaluation-harness's `hf` model, recorded from the
same items and the same weights, dequantized to bf16 (tests/tools/record_lm_eval.py). Skipped, with
the reason, where a model is absent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from qkv import tasks
from tools import bf16_gguf

DATA = Path(__file__).parent / "data"
FIXTURE = {"smollm2": "demo_model", "qwen25_coder_1.5b": "coder_model"}


def recorded(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((DATA / f"lm_eval_hf_{name}.json").read_text())
    return record


def columns(record: dict[str, Any], kind: str) -> NDArray[np.float64]:
    """[item, choice]"""
    return np.array([row[kind] for row in record["rows"]], np.float64)


def lead(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[item]: of the best choice over the second."""
    ordered = np.sort(values, axis=1)
    return ordered[:, -1] - ordered[:, -2]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("smollm2", marks=pytest.mark.slow),
        pytest.param("qwen25_coder_1.5b", marks=pytest.mark.soak),
    ],
)
def test_choices_agree_with_the_harness_hf_model(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Within the noise that `hf` itself has between float32 and bfloat16; and the same answer
    wherever float32 is not as close to call as that."""
    record = recorded(name)
    source: Path = request.getfixturevalue(FIXTURE[name])
    rounded = tmp_path / record["model"]
    bf16_gguf.write(source, rounded)

    mmlu = tasks.task("mmlu")
    places = {question.key: place for place, question in enumerate(mmlu.questions)}
    items = [mmlu.item(places[row["key"]]) for row in record["rows"]]
    pairs = [(item.prompt, choice) for item in items for choice in item.choices]
    with qkv.Engine(rounded, kv_cache_dtype="bf16", kv_tokens=4096) as engine:
        for item, row in zip(items, record["rows"], strict=True):
            assert isinstance(item.prompt, str)
            ids = np.array(engine.tokenizer.encode(item.prompt), "<i4")
            assert hashlib.sha256(ids.tobytes()).hexdigest()[:16] == row["ids"], item.key
        scores = engine.score(*map(list, zip(*pairs, strict=True)), progress=False)
    rounded.unlink()
    got = np.array([score.total for score in scores]).reshape(-1, 4)

    exact, noisy = columns(record, "float32"), columns(record, "bfloat16")
    off, noise = np.abs(got - exact), np.abs(noisy - exact)
    clear = lead(exact) > noise.max()
    print(
        f"{name}: max {off.max():.4f} of {noise.max():.4f}, mean {off.mean():.4f} of "
        f"{noise.mean():.4f}, {clear.sum()} of {len(items)} items clear"
    )
    assert off.max() <= noise.max()
    assert off.mean() <= noise.mean()
    assert clear.sum() >= len(items) / 2, "the recorded sample is too close to call"
    assert np.array_equal(got.argmax(1)[clear], exact.argmax(1)[clear])


def test_the_records_hold_what_they_say() -> None:
    for name in FIXTURE:
        record = recorded(name)
        noise = np.abs(columns(record, "float32") - columns(record, "bfloat16"))
        assert noise.shape == (len(record["rows"]), 4)
        assert record["noise"]["max"] == pytest.approx(noise.max(), abs=1e-4)
        assert len({row["ids"] for row in record["rows"]}) == len(record["rows"])
