"""What every evaluation task is made of: questions, their prompts, and how an answer is judged.

Prompts, shots, stops and answer extraction are those of lm-evaluation-harness (read at commit
4e7e0d47), so that its figures and ours are about the same text.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

DATA = Path(__file__).parent / "data"

Kind = Literal["generate", "choice"]
Extraction = Literal["flexible", "strict"]
Prompt = str | list[dict[str, str]]

# What the harness generates where a task names no bound (its DEFAULT_MAX_GEN_TOKS).
DEFAULT_MAX_TOKENS = 256


class Grade(TypedDict):
    """The verdict on one answer."""

    correct: bool
    answer: str | None  # as it was read out of the text; None where there is none
    answered: bool


@dataclass(frozen=True)
class Question:
    """One item of a data set: what is asked and the right answer."""

    key: str
    question: str  # with its options, where there are any
    answer: str  # as the data set has it: worked out, or the text of the right option
    gold: str  # the final answer alone: a number or a letter
    stratum: str | None = None  # MMLU's subject, MMLU-Pro's category, MGSM's language


@dataclass(frozen=True)
class Shot:
    """A worked example before the question."""

    asked: str
    answer: str


@dataclass(frozen=True)
class Form:
    """The parts a prompt is put together from, plain or as a conversation."""

    asked: str
    shots: tuple[Shot, ...] = ()
    system: str = ""

    def plain(self) -> str:
        shots = "".join(f"{shot.asked} {shot.answer}\n\n" for shot in self.shots)
        return self.system + shots + self.asked

    def chat(self) -> list[dict[str, str]]:
        """Each shot is a turn of its own, as in the harness when it applies a chat template."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for shot in self.shots:
            messages.append({"role": "user", "content": shot.asked})
            messages.append({"role": "assistant", "content": shot.answer})
        return [*messages, {"role": "user", "content": self.asked}]


@dataclass(frozen=True)
class Item:
    """One question as it is put to a model."""

    question: Question
    kind: Kind
    prompt: Prompt
    stop: tuple[str, ...] = ()
    max_tokens: int = 0  # 0 where nothing is generated
    choices: tuple[str, ...] = ()  # the continuations whose log-likelihoods are compared

    @property
    def key(self) -> str:
        return self.question.key

    @property
    def reference(self) -> str:
        return self.question.gold

    @property
    def stratum(self) -> str | None:
        return self.question.stratum


@dataclass(frozen=True)
class Task:
    """A data set with its prompts and its grading.

    `form` gives the parts of an item's prompt, `stops` its stop strings. A "generate" task reads
    the answer out of the text with `extract` (None: there is none) and compares it with the gold
    answer after both went through `normal`. A "choice" task takes the letter in `letters` whose
    continuation is the most likely.
    """

    name: str
    kind: Kind
    questions: tuple[Question, ...]
    form: Callable[[int], Form]
    chance: float = 0.0  # the accuracy of guessing
    max_tokens: int = 0
    stops: Callable[[Question], tuple[str, ...]] = lambda question: ()
    extract: Callable[[Question, str], str | None] = lambda question, text: None
    normal: Callable[[str], str] = str
    letters: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.questions)

    def item(self, place: int, *, chat: bool = False) -> Item:
        """The item at a place of the data set, as plain text or as messages for a template."""
        form = self.form(place)
        # After a template's last token an answer starts without a space (the harness drops it).
        lead = "" if chat else " "
        return Item(
            question=self.questions[place],
            kind=self.kind,
            prompt=form.chat() if chat else form.plain(),
            stop=self.stops(self.questions[place]),
            max_tokens=self.max_tokens,
            choices=tuple(lead + letter for letter in self.letters),
        )

    def items(self, limit: int | None = None, *, chat: bool = False) -> Iterator[Item]:
        """All items, or those at `places(limit)`; each is built when it is asked for."""
        for place in self.places(limit):
            yield self.item(place, chat=chat)

    def places(self, limit: int | None = None) -> Sequence[int]:
        """Which items a limit leaves: the first of every stratum, then the second of every
        stratum and so on, in the order of the data set. Without strata the first ones."""
        if limit is None:
            return range(len(self.questions))
        if limit < 1:
            raise ValueError(f"limit {limit}: must be at least 1")
        seen: dict[str | None, int] = {}
        turns = []
        for place, question in enumerate(self.questions):
            turn = seen.get(question.stratum, 0)
            seen[question.stratum] = turn + 1
            turns.append((turn, place))
        return sorted(place for _, place in sorted(turns)[:limit])

    def grade(self, item: Item, result: str | Sequence[float]) -> Grade:
        """Judges a generated text, or the log-likelihoods of an item's `choices`."""
        if isinstance(result, str):
            return self._grade_text(item, result)
        return self._grade_choice(item, result)

    def _grade_text(self, item: Item, text: str) -> Grade:
        if self.kind != "generate":
            raise ValueError(f"{self.name}: takes the log-likelihoods of the choices, not a text")
        answer = self.extract(item.question, text)
        if answer is None:
            return {"correct": False, "answer": None, "answered": False}
        correct = self.normal(answer) == self.normal(item.reference)
        return {"correct": correct, "answer": answer, "answered": True}

    def _grade_choice(self, item: Item, logprobs: Sequence[float]) -> Grade:
        if self.kind != "choice":
            raise ValueError(f"{self.name}: takes a generated text, not log-likelihoods")
        if len(logprobs) != len(self.letters):
            raise ValueError(
                f"{item.key}: {len(logprobs)} log-likelihoods for {len(self.letters)} choices"
            )
        if any(math.isnan(value) for value in logprobs):
            raise ValueError(f"{item.key}: a log-likelihood is not a number: {list(logprobs)}")
        # The first of equals, as numpy.argmax takes it in the harness.
        best = max(range(len(logprobs)), key=lambda place: logprobs[place])
        answer = self.letters[best]
        return {"correct": answer == item.reference, "answer": answer, "answered": True}


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a data file. Plain JSON: a choice "None" is a string and stays one."""
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def lettered(options: Sequence[str]) -> str:
    """Options as the prompts list them, one a line."""
    return "\n".join(f"{'ABCDEFGHIJ'[place]}. {option}" for place, option in enumerate(options))
