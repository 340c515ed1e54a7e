"""Tasks beside the harness's: text in windows, needles in long texts, and the user's own rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv import tasks


class Letters:
    """A tokenizer: one token a character, and BOS or EOS where it has them."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        self.before, self.after = before, after
        self.encoded: list[int] = []  # lengths of what was asked for

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(len(text))
        ids = [ord(letter) + 10 for letter in text]
        return [*self.before, *ids, *self.after] if add_special_tokens else ids


# Text in windows.


@cache
def wikitext() -> tasks.Task:
    return tasks.task("wikitext2")


def test_wikitext_is_the_canonical_file() -> None:
    data = wikitext().text().encode()
    assert len(data) == 1290590
    assert hashlib.sha256(data).hexdigest() == (
        "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
    )


@pytest.mark.parametrize(("before", "after"), [([], []), ([1], []), ([1], [2]), ([], [2])])
def test_windows(before: list[int], after: list[int]) -> None:
    """Joined they are the text, BOS at the head of each; nothing is left out between two."""
    made, text = Letters(before, after), wikitext().text()[:12_500]
    task = replace(wikitext(), text=lambda: text)
    windows = task.windows(made.encode, length=1000)
    assert made.encoded.count(len(text)) == 1  # tokenized once, as a whole
    assert [key for key, _ in windows] == [f"wikitext2-1000-{place}" for place in range(12)]
    assert {len(ids) for _, ids in windows} == {1000}
    assert all(ids[: len(before)] == before for _, ids in windows)
    joined = "".join(chr(token - 10) for _, ids in windows for token in ids[len(before) :])
    assert text.startswith(joined)
    assert len(joined) == 12 * (1000 - len(before))
    assert task.windows(made.encode, length=1000, limit=3) == windows[:3]
    assert task.windows(made.encode, length=1000, limit=99) == windows


def test_windows_have_the_length_of_512() -> None:
    (key, ids), *rest = wikitext().windows(Letters([1], []).encode, limit=2)
    assert (key, len(ids), len(rest)) == ("wikitext2-512-0", 512, 1)


def test_windows_that_cannot_be() -> None:
    encode = Letters([1], []).encode
    with pytest.raises(ValueError, match="length 1: must be at least 2 tokens"):
        wikitext().windows(encode, length=1)
    with pytest.raises(ValueError, match="length 2000000: wikitext2 has 12[0-9]* tokens"):
        wikitext().windows(encode, length=2_000_000)
    with pytest.raises(ValueError, match="limit=0: must be within 1 and"):
        wikitext().windows(encode, limit=0)
    with pytest.raises(ValueError, match="gsm8k: has items, not windows"):
        tasks.task("gsm8k").windows(encode)


def test_text_has_no_questions() -> None:
    assert (wikitext().kind, len(wikitext()), list(wikitext().places(5))) == ("text", 0, [])
    with pytest.raises(ValueError, match="wikitext2.*a text, not questions"):
        tasks.load("wikitext2")
    with pytest.raises(ValueError, match="wikitext2 has no answers"):
        tasks.task("wikitext2", extraction="strict")
    with pytest.raises(ValueError, match="wikitext2 generates nothing"):
        tasks.task("wikitext2", max_tokens=9)


# A needle in a long text.


def lines(task: tasks.Task) -> list[tuple[tasks.Item, str]]:
    items = list(task.items())
    assert all(isinstance(item.prompt, str) for item in items)
    return [(item, str(item.prompt)) for item in items]


def test_needle_by_words() -> None:
    task = tasks.needle(lengths=(200, 700), depths=(0, 50, 100), repeats=2)
    assert (len(task), task.kind, task.chance) == (12, "generate", 0.0)
    assert [str(item.stratum) for item in task.items(6)] == [
        "200/0", "200/50", "200/100", "700/0", "700/50", "700/100",
    ]  # fmt: skip
    assert len({item.key for item in task.items()}) == len({q.gold for q in task.questions}) == 12
    for item, prompt in lines(task):
        assert prompt.count(item.question.answer) == 1 and prompt.count(item.reference) == 1
        assert prompt.endswith(f"{item.question.question} Answer with the number alone.\nAnswer:")
        assert item.length - 60 < len(prompt.split()) <= item.length
        depth = float(str(item.stratum).split("/")[1]) / 100
        text = prompt.split("\n\n")[1]
        place = text.index(item.question.answer) / (len(text) - len(item.question.answer))
        assert abs(place - depth) * item.length < 30 and (0.0 < place < 1.0) == (0 < depth < 1)
    assert (task.item(0).stop, task.item(0).max_tokens) == (("Question:",), 32)


def test_needle_by_tokens() -> None:
    """At most the length, whatever the tokenizer puts before and after a text."""
    encode = Letters([1], [2]).encode
    task = tasks.task("needle", encode=encode, max_tokens=9)
    assert len(task) == 100 and task.item(0).max_tokens == 9
    task = tasks.needle(lengths=(3000,), depths=(0, 33, 100), repeats=3, encode=encode)
    for item, prompt in lines(task):
        assert 3000 - 400 < len(encode(prompt)) <= 3000, item.key
    # The name of another city takes two tokens too many here, so that a sentence is dropped.
    tight = tasks.needle(lengths=(815,), depths=(50,), repeats=20, encode=encode)
    assert max(len(encode(prompt)) for _, prompt in lines(tight)) <= 815


def test_needle_is_the_same_each_time() -> None:
    first, second = (tasks.needle(lengths=(300,), repeats=2) for _ in range(2))
    assert lines(first) == lines(second)
    text = json.dumps([prompt for _, prompt in lines(first)]).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == "a996e99b244adc81"
    other = tasks.needle(lengths=(300,), repeats=2, seed=1)
    assert not {q.gold for q in other.questions} & {q.gold for q in first.questions}
    # One text for all depths of a repeat; another one for another repeat.
    texts = [prompt.replace(item.question.answer, "") for item, prompt in lines(first)]
    starts = [text[90:200] for text in texts]
    assert len(set(starts[2::2])) == len(set(starts[3::2])) == 1 and starts[2] != starts[3]


def test_needle_longer_than_the_data_set() -> None:
    ((item, prompt),) = lines(tasks.needle(lengths=(250_000,), depths=(50,), repeats=1))
    assert 249_900 < len(prompt.split()) <= 250_000 and item.length == 250_000


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        (" {}", "{}", True),
        (" It is {}, I think, and not 1234567.", "{}", True),
        (" {:,}.", "{}", True),
        (" 1{}", "1{}", False),
        (" I do not know", None, False),
    ],
)
def test_needle_answers(text: str, answer: str | None, correct: bool) -> None:
    task = tasks.needle(lengths=(300,), repeats=1)
    gold = int(task.questions[0].gold)
    expected = None if answer is None else answer.format(gold)
    assert task.grade(task.item(0), text.format(gold)) == {
        "correct": correct,
        "answer": expected,
        "answered": answer is not None,
    }


def test_needle_that_cannot_be() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"lengths": (20,)}, "length 20: must be at least"),
        ({"lengths": (1024, 1024)}, "lengths .*different numbers"),
        ({"lengths": ()}, "lengths .*different numbers"),
        ({"depths": (101,)}, "depths .*0 to 100"),
        ({"repeats": 0}, "repeats=0: must be within 1 and"),
        ({"max_tokens": 0}, "max_tokens=0: must be within 1 and"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            tasks.needle(**options)
    with pytest.raises(ValueError, match="extraction: needle has one way"):
        tasks.task("needle", extraction="strict")


# The user's own rows.

CAPITALS: list[dict[str, Any]] = [
    {"prompt": "The capital of Peru is", "choices": ["Lima", "Quito"], "answer": "Lima", "of": "a"},
    {"prompt": "Two and two:\n", "choices": ["3", "4", "5", " 6"], "answer": 1, "of": "b"},
    {"prompt": "The first number is", "choices": ["2", "1", "0"], "answer": "1", "of": "a"},
]
ANSWERS: list[dict[str, Any]] = [
    {"prompt": "6 x 7 =", "answer": 42},
    {"prompt": "Half of 3:", "answer": "$1.50"},
    {"prompt": "Say yes.", "answer": "yes"},
]


class Frame:
    """As much of a data frame as is asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.columns = list(rows[0])
        self._rows = rows

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self._rows


def test_choices() -> None:
    task = tasks.custom(CAPITALS, name="mine", stratum="of")
    assert (task.kind, len(task), task.max_tokens) == ("choice", 3, 0)
    assert task.chance == pytest.approx((1 / 2 + 1 / 4 + 1 / 3) / 3)
    assert [item.stratum for item in task.items()] == ["a", "b", "a"]
    assert [item.key for item in task.items(2)] == ["mine-0", "mine-1"]
    first, second, third = task.items()
    assert (first.prompt, first.choices) == ("The capital of Peru is", (" Lima", " Quito"))
    assert second.choices == ("3", "4", "5", " 6")  # the prompt ends in white space
    assert [item.reference for item in (first, second, third)] == ["Lima", "4", "1"]
    good = {"correct": True, "answer": "4", "answered": True}
    assert task.grade(second, [-2.0, -1.0, -3.0, -9.0]) == good
    assert task.grade(first, [-2.0, -1.0]) == good | {"correct": False, "answer": "Quito"}
    with pytest.raises(ValueError, match="mine-0: 4 log-likelihoods for 2 choices"):
        task.grade(first, [-1.0] * 4)
    chat = task.item(0, chat=True)
    assert chat.prompt == [{"role": "user", "content": "The capital of Peru is"}]
    assert chat.choices == ("Lima", "Quito")
    assert tasks.custom(CAPITALS, name="mine", chance=0.5).chance == 0.5


@pytest.mark.parametrize(
    ("place", "text", "answer", "correct"),
    [
        (0, "6 x 7 is 42.", "42.", True),
        (0, "42 or 43", "43", False),
        (0, "42.0", "42.0", True),
        (0, "none", None, False),
        (1, "That is 1.5", "1.5", True),
        (1, "1.50.1", "1.50.1", False),
        (2, " yes\n", "yes", True),
        (2, "Yes", "Yes", False),
        (2, " \n", None, False),
    ],
)
def test_answers(place: int, text: str, answer: str | None, correct: bool) -> None:
    task = tasks.custom(ANSWERS, name="mine", stop="\n\n", max_tokens=7)
    item = task.item(place)
    assert (item.kind, item.stop, item.max_tokens, item.choices) == ("generate", ("\n\n",), 7, ())
    expected = {"correct": correct, "answer": answer, "answered": answer is not None}
    assert task.grade(item, text) == expected


def test_grading_function() -> None:
    seen: list[Mapping[str, Any]] = []

    def grade(text: str, row: Mapping[str, Any]) -> Any:
        seen.append(row)
        return {"bool": True, "numpy": np.bool_(False), "odd": 1}.get(text) if text in (
            "bool", "numpy", "odd",
        ) else {"read": {"correct": True, "answer": 5}, "none": {"correct": False, "answer": None},
                "plain": {"correct": np.False_}, "bad": {}, "raise": None}[text]  # fmt: skip

    rows = [{"prompt": "x", "mine": object()}]  # no reference is needed
    task = tasks.custom(rows, name="mine", grade=grade)
    item = task.item(0)
    assert task.grade(item, "bool") == {"correct": True, "answer": "bool", "answered": True}
    assert seen[0] is rows[0]
    assert task.grade(item, "numpy") == {"correct": False, "answer": "numpy", "answered": True}
    assert task.grade(item, "read") == {"correct": True, "answer": "5", "answered": True}
    assert task.grade(item, "none") == {"correct": False, "answer": None, "answered": False}
    assert task.grade(item, "plain") == {"correct": False, "answer": "plain", "answered": True}
    unanswered = {"correct": False, "answer": None, "answered": False}
    for text, error in (
        ("odd", "TypeError: grade returned 1: a bool"),
        ("bad", "TypeError: grade returned {}: a bool"),
        ("what", "KeyError: 'what'"),
    ):
        found: dict[str, Any] = dict(task.grade(item, text))
        assert found.pop("grade_error").startswith(error)
        assert found == unanswered


def test_messages() -> None:
    said = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Yes?"}]
    task = tasks.custom([{"chat": said, "answer": "Yes"}], name="mine", prompt="chat")
    assert task.item(0).prompt == task.item(0, chat=True).prompt == said
    assert task.questions[0].question == "Yes?"
    rows = [{"prompt": said, "choices": ["Yes", "No"], "answer": 0}]
    assert tasks.custom(rows, name="mine").item(0).choices == ("Yes", "No")


def test_sources_of_rows(tmp_path: Path) -> None:
    """The same task out of a file, a list, a generator, a frame."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in CAPITALS) + "\n\n", "utf-8")
    of_arrays = [{**row, "choices": np.array(row["choices"])} for row in CAPITALS]
    expected = list(tasks.custom(CAPITALS, name="mine").items())
    for rows in (path, str(path), iter(CAPITALS), Frame(CAPITALS), Frame(of_arrays)):
        task = tasks.custom(rows, name="mine")  # type: ignore[arg-type]
        assert list(task.items()) == expected
        assert list(task.questions[1:]) == [item.question for item in expected[1:]]
        assert task.questions[-1] == expected[-1].question
    with pytest.raises(TypeError, match="a path, mappings, or a data frame"):
        tasks.custom(CAPITALS[0], name="mine")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        tasks.custom(tmp_path / "none.jsonl", name="mine")


def test_a_file_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ANSWERS), "utf-8")
    task = tasks.custom(path, name="mine")
    assert task.item(2).prompt == "Say yes."
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="rows.jsonl has changed since it was checked"):
        task.item(2)


BAD: list[tuple[Any, str]] = [
    ({"answer": "x"}, r"no field 'prompt' \(there are answer\)"),
    ({"prompt": "", "answer": "x"}, "the field 'prompt' is empty"),
    ({"prompt": 5, "answer": "x"}, "the field 'prompt': a conversation is a list"),
    ({"prompt": "a"}, "no field 'answer'"),
    ({"prompt": "a", "answer": float("nan")}, "the field 'answer' is empty"),
    ({"prompt": "a", "answer": None}, "the field 'answer' is empty"),
    ({"prompt": "a", "answer": ["x"]}, "the field 'answer': a text or a number.*not list"),
    ({"prompt": "a", "answer": True}, "the field 'answer': a text or a number.*not bool"),
]
BAD_CHOICES: list[tuple[Any, str]] = [
    ({"prompt": "a", "answer": 0}, "no field 'choices'"),
    ({"prompt": "a", "choices": ["x"], "answer": 0}, "'choices': a list of two texts or more"),
    ({"prompt": "a", "choices": "xy", "answer": 0}, "'choices': a list of two texts or more"),
    ({"prompt": "a", "choices": ["x", None], "answer": 0}, "'choices': None is not a text"),
    ({"prompt": "a", "choices": ["x", " "], "answer": 0}, "'choices': ' ' is not a text"),
    ({"prompt": "a", "choices": ["x", "y"], "answer": 2}, "'answer': 2 is neither.*0 to 1"),
    ({"prompt": "a", "choices": ["x", "y"], "answer": -1}, "'answer': -1 is neither"),
    ({"prompt": "a", "choices": ["x", "y"], "answer": True}, "'answer': True is neither"),
    ({"prompt": "a", "choices": ["x", "y"], "answer": "z"}, "'answer': 'z' is neither"),
]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [(ANSWERS[0], *entry) for entry in BAD] + [(CAPITALS[0], *entry) for entry in BAD_CHOICES],
)
def test_bad_rows(good: Any, bad: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^row 1: .*{message}"):
        tasks.custom([good, bad, good], name="mine")
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(bad)}\n", "utf-8")
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 3: .*{message}"):
        tasks.custom(path, name="mine")


def test_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": \n[1]\n{"prompt": "\xff"}\n{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ValueError) as caught:
        tasks.custom(path, name="mine")
    told = str(caught.value).split("\n")
    assert len(told) == 3 and all(f"line {n + 1}: " in line for n, line in enumerate(told))
    assert "not JSON" in told[0] and "an object with fields" in told[1] and "not JSON" in told[2]
    path.write_bytes(b"x\n" * 30)
    with pytest.raises(ValueError, match="line 10: not JSON.*\nand 20 more$"):
        tasks.custom(path, name="mine")
    with pytest.raises(ValueError, match="mine: there are no rows"):
        tasks.custom([], name="mine")
    with pytest.raises(ValueError, match="row 0: a mapping of fields is needed, not int"):
        tasks.custom([1], name="mine")  # type: ignore[list-item]


def test_keys() -> None:
    rows = [{"prompt": "a", "answer": "b", "id": name} for name in (7, "x")]
    task = tasks.custom(rows, name="mine", key="id", stratum="id")
    assert [(item.key, item.stratum) for item in task.items()] == [("7", "7"), ("x", "x")]
    with pytest.raises(ValueError, match="row 2: the key 'x' is that of row 1"):
        tasks.custom([*rows, rows[1]], name="mine", key="id")
    with pytest.raises(ValueError, match="row 0: no field 'of'"):
        tasks.custom(rows, name="mine", stratum="of")


def test_bad_arguments() -> None:
    for options, message in (
        ({"kind": "text"}, "kind 'text'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"chance": 1.0}, "chance 1.0"),
        ({"kind": "choice", "grade": print}, "grade: choices are judged"),
    ):
        with pytest.raises(ValueError, match=message):
            tasks.custom(ANSWERS, name="mine", **options)
    with pytest.raises(TypeError, match="stop ''"):
        tasks.custom(ANSWERS, name="mine", stop=("",))
    with pytest.raises(TypeError, match="grade=5"):
        tasks.custom(ANSWERS, name="mine", grade=5)  # type: ignore[arg-type]
