"""A fact hidden in a long text and asked for at its end, by length and depth: what a damaged cache
loses first. The text is WikiText-2's test set; all else is drawn from a seeded generator, so that
the same arguments give the same prompts."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain, cycle, islice
from random import Random

from ..params import integer
from .extraction import last_number
from .items import Encode, Form, Question, Task, read_text

LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = (0, 25, 50, 75, 100)
REPEATS = 5
MAX_TOKENS = 32

_CITIES = (
    "Accra", "Athens", "Baku", "Bergen", "Bogota", "Cairo", "Cardiff", "Cusco", "Dakar", "Delhi",
    "Dublin", "Geneva", "Hanoi", "Havana", "Helsinki", "Jakarta", "Kyoto", "Lagos", "Lima",
    "Lisbon", "Madrid", "Manila", "Nairobi", "Oslo", "Ottawa", "Porto", "Prague", "Quito", "Riga",
    "Rome", "Seoul", "Sofia", "Tallinn", "Tunis", "Turin", "Vienna", "Warsaw", "Zagreb",
)  # fmt: skip


def needle(
    *,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    repeats: int = REPEATS,
    encode: Encode | None = None,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
) -> Task:
    """Finding a seven-digit number in a text of each of `lengths`, hidden at each of `depths`
    (percent of the text before it), `repeats` times with other texts and numbers.

    A length is that of the whole plain prompt, which is shorter by less than one sentence; a chat
    template adds its own. It is in tokens of `encode` (`engine.tokenizer.encode`); without one it
    is in words, of which an English token is about three quarters: 1024 words are some 1400 tokens.
    `Question.length` and `Item.length` have it, strata are "length/depth". A text that is longer
    than the data set goes on at its start. An answer is right if the number is in it.

        task = qkv.tasks.needle(lengths=(2048, 16384), encode=engine.tokenizer.encode)
    """
    questions = _questions(lengths, depths, repeats, seed)
    integer("max_tokens", max_tokens, 1)

    def total(prompt: str) -> int:
        return len(prompt.split()) if encode is None else len(encode(prompt))

    for question in questions:
        least = total(_prompt((), 0, question))
        if least > question.length:
            raise ValueError(f"length {question.length}: must be at least {least}")

    @cache
    def sentences(length: int, repeat: str) -> tuple[str, ...]:
        """As many as fit. The same for all depths, so that prompts share what is in front."""
        text = _text(Random(f"{seed} text {repeat}").random(), length)
        question = next(entry for entry in questions if entry.length == length)
        fit = bisect_right(
            range(len(text) + 1), length, lo=1, key=lambda n: total(_prompt(text[:n], n, question))
        )
        return text[: fit - 1]

    def form(place: int) -> Form:
        question = questions[place]
        depth, repeat = question.key.split("-")[2:]
        text = sentences(question.length, repeat)
        while True:  # another place or number may take a token more
            prompt = _prompt(text, _place(text, float(depth) / 100), question)
            if not text or total(prompt) <= question.length:
                return Form(prompt)
            text = text[:-1]

    return Task(
        name="needle",
        kind="generate",
        questions=questions,
        form=form,
        max_tokens=max_tokens,
        stops=lambda question: ("Question:",),
        extract=_extract,
    )


def _questions(
    lengths: Sequence[int], depths: Sequence[float], repeats: int, seed: int
) -> tuple[Question, ...]:
    for name, given, low, high in (("lengths", lengths, 1, 10**7), ("depths", depths, 0, 100)):
        wrong = [value for value in given if not low <= value <= high]
        shown = {f"{value:g}" for value in given}  # as they stand in the keys
        if wrong or not given or len(shown) != len(given):
            raise ValueError(f"{name} {list(given)}: different numbers of {low} to {high}")
    for length in lengths:
        integer("length", length, 1)
    integer("repeats", repeats, 1)
    made = []
    for length in lengths:
        for depth in depths:
            for repeat in range(repeats):
                draw = Random(f"{seed} fact {length} {depth:g} {repeat}").random
                city = _CITIES[int(draw() * len(_CITIES))]
                number = str(1_000_000 + int(draw() * 9_000_000))
                made.append(
                    Question(
                        key=f"needle-{length}-{depth:g}-{repeat}",
                        question=f"What is the magic number of {city}?",
                        answer=f"The magic number of {city} is {number}.",
                        gold=number,
                        stratum=f"{length}/{depth:g}",
                        length=length,
                    )
                )
    return tuple(made)


def _place(text: Sequence[str], share: float) -> int:
    """How many sentences make up this share of the text's words, or come closest."""
    words = [0, *accumulate(len(sentence.split()) for sentence in text)]
    return min(range(len(words)), key=lambda place: abs(words[place] - share * words[-1]))


def _prompt(text: Sequence[str], before: int, question: Question) -> str:
    hidden = " ".join([*text[:before], question.answer, *text[before:]])
    return (
        "Somewhere in the following text stands the magic number of a city. Remember it.\n\n"
        f"{hidden}\n\n"
        f"Question: {question.question} Answer with the number alone.\nAnswer:"
    )


def _text(start: float, n_words: int) -> tuple[str, ...]:
    """Sentences of so many words together, from a place (0 to 1) of the data set on. A word is a
    token at least, so no fewer fill so many tokens."""
    whole, words = _sentences()
    first = int(start * len(whole))
    order = list(islice(cycle(chain(range(first, len(whole)), range(first))), n_words))
    n = bisect_right(list(accumulate(words[place] for place in order)), n_words)
    return tuple(whole[place] for place in order[:n])


@cache
def _sentences() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Of WikiText-2's paragraphs, with the usual spacing, and their words. Headings are left out,
    and so is what would not end where a sentence does."""
    found = []
    for line in read_text("wikitext2_test.txt.gz").split("\n"):
        if not line.strip() or line.startswith(" ="):
            continue
        plain = re.sub(r" @(.)@ ", r"\1", line.strip())
        plain = re.sub(r" ([.,;:!?%)\]]|'s\b|n't\b)", r"\1", plain)
        plain = re.sub(r"([(\[]) ", r"\1", plain)
        found += re.split(r"(?<=[a-z0-9)][.!?]) (?=[A-Z])", plain)
    return tuple(found), tuple(len(sentence.split()) for sentence in found)


def _extract(question: Question, text: str) -> str | None:
    """The number that was asked for if it is there, else the last one that is."""
    digits = re.sub(r"(?<=\d),(?=\d)", "", text)
    if re.search(rf"(?<!\d){question.gold}(?!\d)", digits):
        return question.gold
    return last_number(digits)
