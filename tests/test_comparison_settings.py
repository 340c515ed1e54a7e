"""What a comparison makes of its arguments before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkv import tasks
from qkv.comparison import settings


def planned(model: Path | str, **engine_options: Any) -> settings.Plan:
    return settings.plan(
        model, ("bf16", "fp8_e4m3"), "needle", limit=2, margin=0.01, control=True, grid=True,
        chat=False, rerun_items=0, engine_options=engine_options,
    )  # fmt: skip


def test_a_lane_that_is_called_control_is_not_the_control_lane(tiny: Callable[..., Path]) -> None:
    """Both had one name once, and one lane's answers took the place of the other's."""
    kv = ("bf16", {"default": "fp8_e4m3", "name": "control"})
    found = settings.plan(
        tiny("llama"), kv, tasks.custom([{"prompt": "a", "answer": "b"}], name="x"), limit=None,
        margin=0.01, control=True, grid=True, chat=False, rerun_items=0, engine_options={},
    )  # fmt: skip
    lanes = [(lane.name, lane.kv_name, lane.control) for lane in found.lanes]
    assert lanes[1:] == [("control", "control", False), ("control#2", "bf16_stochastic", True)]


def test_needles_are_as_long_as_every_model_takes(demo_model: Path) -> None:
    """Measured with the model's tokenizer; longer ones than the model or the pool are left out."""
    found = planned(demo_model, max_model_len=2200).tasks[0].task
    assert {question.length for question in found.questions} == {1024, 2048}
    by_words = tasks.task("needle")
    assert found.item(0).prompt != by_words.item(0).prompt
    assert {question.length for question in by_words.questions} > {1024, 2048}
    with pytest.raises(ValueError, match="does not fit into 512 tokens"):
        planned(demo_model, kv_tokens=512)
