"""The user's own rows as a task. Every row is checked before anything runs."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ..chat_template import check_messages
from ..outputs import json_ready
from ..params import integer
from ..run import described
from .extraction import as_number, last_number, same_number
from .items import DEFAULT_MAX_TOKENS, Given, Grade, Kind, Prompt, Question, Task

Row = Mapping[str, Any]
GradeFunction = Callable[[str, Row], bool | Mapping[str, Any]]

# So many bad rows are named.
_SHOWN = 10


def custom(
    rows: str | os.PathLike[str] | Iterable[Row],
    *,
    name: str,
    kind: Kind | None = None,
    prompt: str = "prompt",
    reference: str = "answer",
    choices: str = "choices",
    grade: GradeFunction | None = None,
    stop: str | Sequence[str] = (),
    max_tokens: int = DEFAULT_MAX_TOKENS,
    chance: float | None = None,
    stratum: str | None = None,
    key: str | None = None,
) -> Task:
    """A task of the user's own rows.

    rows: the path of a file of JSON lines (read once to check it, and then a line when its turn
        comes), mappings, or a data frame of pandas or polars.
    name: what the task is called in results.
    prompt, reference, choices, stratum, key: the names of a row's fields. A prompt is a text, or
        messages for the chat template. Without `key` a row is "name-place", counted from 0.
    kind: "generate", or "choice"; None: "choice" if the first row has `choices`.

    A "choice" row has texts to choose from, two or more and as many as it likes; the one that is
    the most likely after the prompt is the answer. `reference` is the right one's text, or its
    place counted from 0. A text of the choices counts first. A space is put between the prompt and
    a choice unless one of them has it there.

    A "generate" row is judged by `grade(text, row)`, which returns whether the text is right, or
    {"correct": ..., "answer": ...} with the answer as it was read out of the text (None: there is
    none). An exception in it leaves that row unanswered, with the error in "grade_error", and
    touches nothing else. Without `grade`, where the reference is a number the last number of the
    text must have its value; otherwise the text must be the reference, white space at the ends
    aside.

    chance: the accuracy of guessing; by default 0, and for choices the mean of 1 / their number.

    ValueError names the rows and fields that are wrong, TypeError an argument.

        qkv.tasks.custom("mine.jsonl", name="mine")
        qkv.tasks.custom(frame, name="sql", reference="query",
                         grade=lambda text, row: same_result(text, row["query"]))
        qkv.tasks.custom([{"prompt": "The capital of Peru is", "choices": ["Lima", "Quito"],
                           "answer": "Lima"}], name="capitals")
    """
    found = _rows(rows)
    fields = _Fields(prompt, reference, choices, stratum, key)
    if kind is None:
        kind = fields.kind_of(found)
    if kind not in ("generate", "choice"):
        raise ValueError(f'kind {kind!r}: must be "generate" or "choice"')
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    _check(kind, grade, stops, max_tokens, chance)

    def build(place: int) -> Question:
        return fields.question(found[place], f"{name}-{place}", kind, grade is not None)

    guess = _check_rows(found, build, name)
    questions = _Questions(len(found), build)

    def form(place: int) -> Given:
        return Given(fields.prompt_of(found[place]))

    return Task(
        name=name,
        kind=kind,
        questions=questions,
        form=form,
        chance=(guess if kind == "choice" else 0.0) if chance is None else chance,
        max_tokens=max_tokens if kind == "generate" else 0,
        stops=lambda question: stops if kind == "generate" else (),
        judge=None if kind == "choice" else _judge(grade),
    )


def _check(
    kind: str,
    grade: GradeFunction | None,
    stops: tuple[str, ...],
    max_tokens: int,
    chance: float | None,
) -> None:
    if grade is not None and kind == "choice":
        raise ValueError("grade: choices are judged by their log-likelihoods")
    if grade is not None and not callable(grade):
        raise TypeError(f"grade={grade!r:.100}: a function is needed")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise TypeError(f"stop {text!r:.100}: a text that is not empty is needed")
    integer("max_tokens", max_tokens, 1)
    if chance is not None and not 0 <= chance < 1:
        raise ValueError(f"chance {chance}: must be at least 0 and below 1")


def _check_rows(found: _Rows, build: Callable[[int], Question], name: str) -> float:
    """ValueError about the rows that cannot be used. Returns the mean of 1 / number of choices."""
    wrong: list[str] = []
    seen: dict[str, int] = {}
    guess = 0.0
    for place in range(len(found)):
        try:
            question = build(place)
            if question.key in seen:
                other = found.where(seen[question.key])
                raise ValueError(f"the key {question.key!r} is that of {other}")
        except ValueError as error:
            wrong.append(f"{found.where(place)}: {error}")
            continue
        seen[question.key] = place
        guess += 1 / max(1, len(question.choices))
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ValueError("\n".join([*wrong[:_SHOWN], *more]))
    if not seen:
        raise ValueError(f"{name}: there are no rows")
    return guess / len(seen)


# Rows, wherever they are.


class _Rows:
    """Rows that lie in memory."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._held = rows

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, place: int) -> Row:
        row = self._held[place]
        if not isinstance(row, Mapping):
            raise ValueError(f"a mapping of fields is needed, not {type(row).__name__}")
        return row

    def where(self, place: int) -> str:
        return f"row {place}"


class _Lines(_Rows):
    """Rows of a file of JSON lines. Only where each line starts is kept."""

    def __init__(self, path: str) -> None:
        super().__init__(())
        self._path = path
        self._starts, self._numbers = array("q"), array("q")
        with open(path, "rb") as file:
            start = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)
        self._state = self._now()

    def _now(self) -> tuple[int, int]:
        stat = os.stat(self._path)
        return stat.st_size, stat.st_mtime_ns

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, place: int) -> Row:
        with open(self._path, "rb") as file:
            file.seek(self._starts[place])
            line = file.readline()
        if self._now() != self._state:
            raise ValueError(f"{self._path} has changed since it was checked")
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"an object with fields is needed, not {type(row).__name__}")
        return row

    def where(self, place: int) -> str:
        return f"{self._path}, line {self._numbers[place]}"


def _rows(given: Any) -> _Rows:
    if isinstance(given, (str, os.PathLike)):
        return _Lines(os.fspath(given))
    if hasattr(given, "to_dicts"):  # polars
        return _Rows(given.to_dicts())
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas
        return _Rows(given.to_dict("records"))
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"rows={given!r:.100}: a path, mappings, or a data frame")
    return _Rows(list(given))


class _Questions(Sequence[Question]):
    """Questions made from their rows when they are asked for."""

    def __init__(self, count: int, build: Callable[[int], Question]) -> None:
        self._places = range(count)
        self._build = build

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Question: ...
    @overload
    def __getitem__(self, place: slice) -> list[Question]: ...
    def __getitem__(self, place: int | slice) -> Question | list[Question]:
        if isinstance(place, slice):
            return [self._build(one) for one in self._places[place]]
        return self._build(self._places[place])

    def __iter__(self) -> Iterator[Question]:
        return map(self._build, self._places)


# What a row holds.


@dataclass(frozen=True)
class _Fields:
    """The names of the fields, and their values out of a row. ValueError says which is wrong."""

    prompt: str
    reference: str
    choices: str
    stratum: str | None
    key: str | None

    def kind_of(self, rows: _Rows) -> Kind:
        """What the first row looks like."""
        try:
            return "choice" if len(rows) and not _missing(rows[0].get(self.choices)) else "generate"
        except ValueError:  # not a row: the check names it
            return "generate"

    def _value(self, row: Row, name: str) -> Any:
        if name not in row:
            raise ValueError(f"no field {name!r} (there are {', '.join(map(str, row)) or 'none'})")
        if _missing(row[name]):
            raise ValueError(f"the field {name!r} is empty")
        return json_ready(row[name])

    def prompt_of(self, row: Row) -> Prompt:
        value = self._value(row, self.prompt)
        if isinstance(value, str):
            return value
        try:
            return check_messages(value)
        except ValueError as error:
            raise ValueError(f"the field {self.prompt!r}: {error}") from None

    def _text(self, row: Row, name: str) -> str:
        value = self._value(row, name)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            kind = type(value).__name__
            raise ValueError(f"the field {name!r}: a text or a number is needed, not {kind}")
        return str(value)

    def question(self, row: Row, key: str, kind: Kind, graded: bool) -> Question:
        asked = self.prompt_of(row)
        offered = self._choices(row) if kind == "choice" else ()
        if kind == "choice":
            gold = self._right(row, offered)
        elif graded:  # the function may do without one
            value = row.get(self.reference)
            gold = "" if _missing(value) else str(json_ready(value))
        else:
            gold = self._text(row, self.reference)
        return Question(
            key=key if self.key is None else self._text(row, self.key),
            question=asked if isinstance(asked, str) else str(asked[-1].get("content", "")),
            answer=gold,
            gold=gold,
            stratum=None if self.stratum is None else self._text(row, self.stratum),
            choices=offered,
            row=row,
        )

    def _choices(self, row: Row) -> tuple[str, ...]:
        value = self._value(row, self.choices)
        if not isinstance(value, list) or len(value) < 2:
            raise ValueError(f"the field {self.choices!r}: a list of two texts or more is needed")
        for text in value:
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"the field {self.choices!r}: {text!r:.40} is not a text to write")
        return tuple(value)

    def _right(self, row: Row, offered: tuple[str, ...]) -> str:
        value = self._value(row, self.reference)
        if isinstance(value, str) and value in offered:
            return value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(offered):
            return offered[value]
        raise ValueError(
            f"the field {self.reference!r}: {value!r:.40} is neither one of the {len(offered)} "
            f"choices nor the place of one (0 to {len(offered) - 1})"
        )


def _missing(value: Any) -> bool:
    """None, an empty text, or what stands for a missing value in a data frame."""
    if isinstance(value, (str, float)):
        return value == "" or value != value
    return value is None


# How an answer is judged.


def _judge(grade: GradeFunction | None) -> Callable[[Question, str], Grade]:
    if grade is None:
        return _default

    def judge(question: Question, text: str) -> Grade:
        try:
            return _graded(grade(text, question.row), text)
        except Exception as error:  # the user's code: it marks its row and nothing else
            return {
                "correct": False,
                "answer": None,
                "answered": False,
                "grade_error": described(error),
            }

    return judge


def _graded(given: Any, text: str) -> Grade:
    """What a grading function says. Where it reads no answer out, the text is the answer."""
    given = json_ready(given)
    if isinstance(given, bool):
        given = {"correct": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("correct"), bool):
        raise TypeError(f'grade returned {given!r:.100}: a bool, or a mapping with "correct"')
    answer = given.get("answer", text.strip() or None)
    return {
        "correct": given["correct"],
        "answer": None if answer is None else str(answer),
        "answered": given["correct"] or answer is not None,
    }


def _default(question: Question, text: str) -> Grade:
    if as_number(question.gold) is not None:
        answer = last_number(text)
        correct = same_number(answer, question.gold)
    else:
        answer = text.strip() or None
        correct = answer == question.gold.strip()
    return {"correct": correct, "answer": answer, "answered": answer is not None}
