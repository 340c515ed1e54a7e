"""Comparisons with rows, hooks, names and journals that nobody should have written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import tasks

OPTIONS: dict[str, Any] = {"threads": 1, "kv_tokens": 4096, "progress": False, "speed": False}
TEXT = {"prompt": "Three and four make", "answer": "7"}
CHOICE = {"prompt": "The capital of Peru is", "choices": ["Lima", "Quito"], "answer": 0}


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


def custom(*rows: Mapping[str, Any], name: str = "mine", **options: Any) -> tasks.Task:
    first = "choices" in rows[0]
    return tasks.custom(rows, name=name, **options if first else {"max_tokens": 3, **options})


def run(model: Path, *given: tasks.Task, **options: Any) -> qkv.Comparison:
    dtypes = options.pop("dtypes", ("bf16", "fp8_e4m3"))
    return qkv.compare(model, dtypes, given, **{**OPTIONS, "rerun_items": 8, **options})


def answers(found: qkv.Comparison, task: str = "mine") -> list[dict[str, Any]]:
    return [row for row in found.rows(task) if row["kind"] == "answer"]


# ---- rows ------------------------------------------------------------------------------------


def test_a_prompt_that_is_no_text_is_its_rows_error(llama: Path) -> None:
    bad = "a\ud800"
    message = [{"role": "user", "content": bad}]
    texts = custom(TEXT, {**TEXT, "prompt": bad}, {**TEXT, "prompt": message}, TEXT)
    chosen = custom(CHOICE, {**CHOICE, "prompt": bad}, {**CHOICE, "prompt": message},
                    {**CHOICE, "choices": ["Lima", bad]}, name="chosen")  # fmt: skip
    found = run(llama, texts, chosen)
    for task, n_bad in (("mine", 2), ("chosen", 3)):
        rows = answers(found, task)
        errors = [row["lanes"]["fp8_e4m3"].get("error", "") for row in rows]
        assert sum("lone surrogate" in error for error in errors) == n_bad, errors
        own = found.tasks[task].lanes["fp8_e4m3"].answers
        assert own is not None and (own.n, own.errors) == (len(rows) - n_bad, n_bad)


def test_choices_after_a_template_start_where_their_own_prompt_ends(llama: Path) -> None:
    """In whatever batch: the rerun has others."""
    rows = [{**CHOICE, "prompt": "word " * n + "is"} for n in (1, 30, 7, 60, 2, 15)]
    found = run(llama, custom(*rows), chat=True)
    assert found.findings.rerun is not None and found.findings.rerun.identical
    without = run(llama, custom(*rows), rerun_items=0)
    both = zip(found.rows("mine"), without.rows("mine"), strict=True)
    added = {chat["start"] - plain["start"] for chat, plain in both if chat["kind"] == "forced"}
    assert len(added) == 1  # what the template adds


# ---- the caller's functions ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "stored"),
    [
        ({"kl": "abc", "in": {"top1": "AAAA"}}, {"kl": "abc", "in": {"top1": "AAAA"}}),
        ({"logprobs": [0.1, "x"], "top1": [300]}, {"logprobs": [0.1, "x"], "top1": [300]}),
        ({"kl": [0.1]}, {"kl": [0.1]}),
        ({"a": {1, 2}}, {"error": "TypeError: Object of type set is not JSON serializable"}),
        ({5: {6: 7}}, {"5": {"6": 7}}),
    ],
)
def test_scores_of_a_hook_come_back_as_they_were(
    llama: Path, tmp_path: Path, scores: Any, stored: Any
) -> None:
    path = tmp_path / "run.jsonl"
    found = run(llama, custom(TEXT), on_finish=lambda output: scores, resume=path)
    assert answers(found)[0]["scores"] == stored
    assert answers(qkv.Comparison.load(path)) == answers(found)


def test_a_grading_function_that_changes_its_mind_is_not_taken_for_other_bits(llama: Path) -> None:
    count = itertools.count()

    def grade(text: str, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"correct": False, "answer": f"{next(count)}"}

    found = run(llama, custom(TEXT, grade=grade))
    assert found.findings.rerun is not None and found.findings.rerun.identical


def test_a_hook_that_is_no_function_is_refused_before_anything_runs(
    llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="on_finish=5"):
        run(llama, custom(CHOICE), on_finish=5, resume=tmp_path / "run.jsonl")
    assert not (tmp_path / "run.jsonl").exists()


# ---- names -----------------------------------------------------------------------------------


def test_a_lane_may_be_called_control(llama: Path) -> None:
    named = {"default": "nvfp4", "name": "control"}
    found = run(llama, custom(TEXT, TEXT), dtypes=["bf16", named])
    lanes = [(lane.name, lane.control) for lane in found.findings.lanes]
    assert lanes == [("bf16", False), ("control", False), ("control#2", True)]
    usual = run(llama, custom(TEXT, TEXT), dtypes=["bf16", "nvfp4"])
    assert found.tasks["mine"].lanes["control"].kl == usual.tasks["mine"].lanes["nvfp4"].kl


def test_needles_have_different_keys() -> None:
    with pytest.raises(ValueError, match="different numbers"):
        tasks.needle(lengths=(64,), depths=(50, 50.0000001))
    for given in ({"lengths": (64.5,)}, {"repeats": 1.5}, {"max_tokens": True}):
        with pytest.raises(TypeError, match="an integer is needed"):
            tasks.needle(**given)


# ---- journals --------------------------------------------------------------------------------


def test_options_that_cannot_run_leave_no_header(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="query_dtype"):
        run(llama, custom(TEXT), query_dtype="bf61", resume=path)
    assert run(llama, custom(TEXT), query_dtype="bf16", resume=path).tasks["mine"].n == 1


def test_a_line_of_notes_is_no_torn_header(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("my notes, without an end")
    with pytest.raises(qkv.Error, match=r"run\.jsonl: not a comparison"):
        run(llama, custom(TEXT), resume=path)
    assert path.read_text() == "my notes, without an end"


def _set(*place: Any) -> Callable[[Any], None]:
    """Puts the last of `place` where the others lead to."""

    def change(record: Any) -> None:
        *way, name, value = place
        for step in way:
            record = record[step]
        if value is KeyError:
            del record[name]
        else:
            record[name] = value

    return change


EDITS = [
    ("answer", "mine", _set("lanes", "fp8_e4m3", KeyError), "lane fp8_e4m3 is missing"),
    ("answer", "mine", _set("lanes", "fp7", {}), "there is no lane 'fp7'"),
    ("answer", "mine", _set("lanes", "bf16", "correct", KeyError), "lane bf16: no field 'correct'"),
    ("answer", "mine", _set("lanes", "bf16", "correct", 1), "'correct' cannot be 1"),
    ("answer", "mine", _set("lanes", "bf16", "token_ids", ["a"]), "'token_ids' cannot be"),
    ("answer", "mine", _set("lanes", "bf16", "error", 5), "'error' cannot be 5"),
    ("answer", "mine", _set("lanes", []), r"'lanes' cannot be \[\]"),
    ("answer", "mine", _set("place", "0"), "'place' cannot be '0'"),
    ("answer", "mine", _set("prompt_token_ids", KeyError), "no field 'prompt_token_ids'"),
    ("answer", "mine", _set("model", "other"), "there is no model 'other'"),
    ("answer", "mine", _set("task", "other"), "there is no task 'other'"),
    ("answer", "mine", _set("key", "mine-1"), "of 'mine-1': there is one before"),
    ("answer", "chosen", _set("lanes", "bf16", "choices", None), "'choices' cannot be None"),
    ("forced", "mine", _set("lanes", "fp8_e4m3", KeyError), "lane fp8_e4m3 is missing"),
    ("forced", "mine", _set("lanes", "bf16", KeyError), "lane bf16 is missing"),
    ("forced", "mine", _set("lanes", "control", "top1", "AA=="), "not 3 tokens everywhere"),
    ("forced", "mine", _set("lanes", "control", "kl", [1, "x"]), "'kl' cannot be"),
    ("forced", "mine", _set("lanes", "control", "kl", "x"), "is not JSON"),
    ("model", None, _set("lanes", "bf16", KeyError), "lane bf16 is missing"),
    ("model", None, _set("lanes", "bf16", "scales_digest", 5), "'scales_digest' cannot be 5"),
    ("rerun", None, _set("identical", "no"), "'identical' cannot be 'no'"),
    ("clips", None, _set("lanes", "bf16", "clipped", None), "'clipped' cannot be None"),
    ("header", None, _set("lanes", 0, "name", KeyError), "not a lane"),
    ("header", None, _set("lanes", []), "no lanes"),
    ("header", None, _set("lanes", 0, "bytes_per_token", "x"), "'bytes_per_token' cannot be 'x'"),
    ("header", None, _set("settings", "tasks", 0, "chance", 1), "'chance' cannot be 1"),
    ("clips", None, _set("kind", []), r"'kind' cannot be \[\]"),
    ("header", None, _set("settings", "margin", "1"), "'margin' cannot be '1'"),
    ("header", None, _set("settings", "tasks", 0, "kind", KeyError), "no field 'kind'"),
    ("header", None, _set("environment", None), "'environment' cannot be None"),
]  # fmt: skip


def test_an_edited_line_is_named(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    given = [custom(TEXT, TEXT), custom(CHOICE, name="chosen")]
    run(llama, *given, resume=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for kind, task, change, words in EDITS:
        edited = json.loads(json.dumps(lines))
        places = [i for i, record in enumerate(edited)
                  if record["kind"] == kind and record.get("task") == task]  # fmt: skip
        change(edited[places[0]])
        later = places[-1] if "one before" in words else places[0]
        path.write_text("".join(json.dumps(record) + "\n" for record in edited))
        before = path.read_bytes()
        named = rf"run\.jsonl: line {later + 1}\b.*{words}"
        with pytest.raises(qkv.Error, match=named):
            qkv.Comparison.load(path)
        with pytest.raises(qkv.Error, match=named):
            run(llama, *given, resume=path)
        assert path.read_bytes() == before


def test_every_beginning_of_a_journal_has_a_report(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    given = [custom(TEXT, {**TEXT, "prompt": "word " * 4000}), custom(CHOICE, name="chosen")]
    run(llama, *given, resume=path, by_layer={"windows": 1, "length": 16}, speed=True)
    lines = path.read_bytes().splitlines(keepends=True)
    for n in range(1, len(lines) + 1):
        path.write_bytes(b"".join(lines[:n]))
        found = qkv.Comparison.load(path)
        assert str(found) and found.to_html() and found.to_json()
