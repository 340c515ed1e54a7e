"""What every evaluation task is made of: questions, their prompts, and how an answer is judged.

Prompts, shots, stops and answer extraction are those of lm-evaluation-harness (read at commit
4e7e0d47), so that its figures and ours are about the same text.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from ..params import integer

DATA = Path(__file__).parent / "data"

Kind = Literal["generate", "choice", "text"]
Extraction = Literal["flexible", "strict"]
Prompt = str | list[dict[str, Any]]
Window = tuple[str, list[int]]  # its key and its tokens

# What the harness generates where a task names no bound (its DEFAULT_MAX_GEN_TOKS).
DEFAULT_MAX_TOKENS = 256


class Encode(Protocol):
    """What `engine.tokenizer.encode` is."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class _Judged(TypedDict):
    correct: bool
    answer: str | None  # as it was read out of the text; None where there is none
    answered: bool


class Grade(_Judged, total=False):
    """How one answer was judged."""

    grade_error: str  # of a user's grading function; the row then counts as not answered


@dataclass(frozen=True)
class Question:
    """One item of a data set: what is asked and the right answer."""

    key: str
    question: str  # with its options, where there are any
    answer: str  # as the data set has it: worked out, or the text of the right option
    gold: str  # the final answer alone: a number or a letter
    stratum: str | None = None  # MMLU's subject, MMLU-Pro's category, MGSM's language
    choices: tuple[str, ...] = ()  # the item's own; () where the task's letters are the choices
    length: int = 0  # of a prompt made to measure, at most, in tokens; 0 elsewhere
    row: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # the user's


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

    def chat(self) -> list[dict[str, Any]]:
        """Each shot is a turn of its own, as in the harness when it applies a chat template."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for shot in self.shots:
            messages.append({"role": "user", "content": shot.asked})
            messages.append({"role": "assistant", "content": shot.answer})
        return [*messages, {"role": "user", "content": self.asked}]


@dataclass(frozen=True)
class Given:
    """A prompt that came whole. Messages stay messages."""

    prompt: Prompt

    def plain(self) -> Prompt:
        return self.prompt

    def chat(self) -> list[dict[str, Any]]:
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt


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

    @property
    def length(self) -> int:
        return self.question.length


@dataclass(frozen=True)
class Task:
    """A data set with its prompts and its grading.

    `form` gives the parts of an item's prompt, `stops` its stop strings. A "generate" task reads
    the answer out of the text with `extract` (None: there is none) and compares it with the gold
    answer after both went through `normal`, unless it has a `judge` of its own. A "choice" task
    takes the question's choice, or else the letter in `letters`, whose continuation is the most
    likely. A "text" task has no questions: its text is scored in windows.
    """

    name: str
    kind: Kind
    questions: Sequence[Question] = ()
    form: Callable[[int], Form | Given] = lambda place: Given("")
    chance: float = 0.0  # the accuracy of guessing
    max_tokens: int = 0
    stops: Callable[[Question], tuple[str, ...]] = lambda question: ()
    extract: Callable[[Question, str], str | None] = lambda question, text: None
    normal: Callable[[str], str] = str
    judge: Callable[[Question, str], Grade] | None = None
    letters: tuple[str, ...] = ()
    text: Callable[[], str] = lambda: ""

    def __len__(self) -> int:
        return len(self.questions)

    def item(self, place: int, *, chat: bool = False) -> Item:
        """The item at a place of the data set, as plain text or as messages for a template."""
        form, question = self.form(place), self.questions[place]
        prompt = form.chat() if chat else form.plain()
        return Item(
            question=question,
            kind=self.kind,
            prompt=prompt,
            stop=self.stops(question),
            max_tokens=self.max_tokens,
            choices=tuple(_continuation(prompt, label) for label in self._labels(question)),
        )

    def _labels(self, question: Question) -> tuple[str, ...]:
        """The names of the choices: what `grade` gives as the answer."""
        return question.choices or self.letters

    def items(self, limit: int | None = None, *, chat: bool = False) -> Iterator[Item]:
        """All items, or those at `places(limit)`; each is built when it is asked for."""
        for place in self.places(limit):
            yield self.item(place, chat=chat)

    def places(self, limit: int | None = None) -> Sequence[int]:
        """Which items a limit leaves: the first of every stratum, then the second of every
        stratum and so on, in the order of the data set. Without strata the first ones."""
        if limit is None:
            return range(len(self.questions))
        integer("limit", limit, 1)
        seen: dict[str | None, int] = {}
        turns = []
        for place, question in enumerate(self.questions):
            turn = seen.get(question.stratum, 0)
            seen[question.stratum] = turn + 1
            turns.append((turn, place))
        return sorted(place for _, place in sorted(turns)[:limit])

    def windows(
        self, encode: Encode, *, length: int = 512, limit: int | None = None
    ) -> list[Window]:
        """A text in windows of `length` tokens, at most `limit` of them; for KL and perplexity.

        The text is tokenized once, as a whole, with the model's own tokenizer
        (`engine.tokenizer.encode`). Windows follow each other without overlap; what is left at the
        end is dropped. Where the tokenizer starts a text with BOS, every window starts with it, and
        it counts as one of the `length` tokens. All tokens of a window but the first are meant to
        be scored, BOS being the first:

            ids = [ids for _, ids in tasks.task("wikitext2").windows(engine.tokenizer.encode)]
            nll = np.concatenate([-score.token_logprobs for score in engine.score(ids)])
            perplexity = np.exp(nll.mean(dtype=np.float64))

        This is the perplexity per token by window: figures of models with other tokenizers, other
        lengths and other tools are about something else. llama.cpp's `perplexity` (512 tokens too)
        scores the second half of each window and puts BOS in the place of a window's first token.
        The `wikitext` of lm-evaluation-harness takes page by page, detokenized, in windows as long
        as the model allows, and divides by words.
        """
        if self.kind != "text":
            raise ValueError(f"{self.name}: has items, not windows of a text")
        if limit is not None:
            integer("limit", limit, 1)
        first = leading_tokens(encode)
        new = length - len(first)
        if length < 2 or new < 1:
            raise ValueError(f"length {length}: must be at least {max(2, len(first) + 1)} tokens")
        ids = encode(self.text(), add_special_tokens=False)
        whole = len(ids) // new
        if whole == 0:
            raise ValueError(f"length {length}: {self.name} has {len(ids)} tokens")
        count = whole if limit is None else min(limit, whole)
        return [
            (f"{self.name}-{length}-{place}", first + ids[place * new : (place + 1) * new])
            for place in range(count)
        ]

    def grade(self, item: Item, result: str | Sequence[float]) -> Grade:
        """Judges a generated text, or the log-likelihoods of an item's `choices`."""
        if isinstance(result, str):
            return self._grade_text(item, result)
        return self._grade_choice(item, result)

    def _grade_text(self, item: Item, text: str) -> Grade:
        if self.kind != "generate":
            raise ValueError(f"{self.name}: takes the log-likelihoods of the choices, not a text")
        if self.judge is not None:
            return self.judge(item.question, text)
        answer = self.extract(item.question, text)
        if answer is None:
            return {"correct": False, "answer": None, "answered": False}
        correct = self.normal(answer) == self.normal(item.reference)
        return {"correct": correct, "answer": answer, "answered": True}

    def _grade_choice(self, item: Item, logprobs: Sequence[float]) -> Grade:
        if self.kind != "choice":
            raise ValueError(f"{self.name}: takes a generated text, not log-likelihoods")
        labels = self._labels(item.question)
        if len(logprobs) != len(labels):
            raise ValueError(
                f"{item.key}: {len(logprobs)} log-likelihoods for {len(labels)} choices"
            )
        if any(math.isnan(value) for value in logprobs):
            raise ValueError(f"{item.key}: a log-likelihood is not a number: {list(logprobs)}")
        # The first of equals, as numpy.argmax takes it in the harness.
        best = max(range(len(logprobs)), key=lambda place: logprobs[place])
        answer = labels[best]
        return {"correct": answer == item.reference, "answer": answer, "answered": True}


def _continuation(prompt: Prompt, label: str) -> str:
    """A choice as it follows the prompt. After a template's last token an answer starts without a
    space (the harness drops it)."""
    spaced = not isinstance(prompt, str) or prompt[-1:].isspace() or label[:1].isspace()
    return label if spaced else f" {label}"


def leading_tokens(encode: Encode) -> list[int]:
    """What the tokenizer puts before a text: BOS, or nothing."""
    plain, special = (encode("x", add_special_tokens=given) for given in (False, True))
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start]
    return []


def read_text(name: str) -> str:
    with gzip.open(DATA / name, "rt", encoding="utf-8", newline="") as file:
        return file.read()


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a data file. Plain JSON: a choice "None" is a string and stays one."""
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def lettered(options: Sequence[str]) -> str:
    """Options as the prompts list them, one a line."""
    return "\n".join(f"{'ABCDEFGHIJ'[place]}. {option}" for place, option in enumerate(options))
