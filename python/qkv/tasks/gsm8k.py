"""GSM8K: grade-school word problems, by worked examples from its training set or by the eight
fixed ones of Wei et al. 2022."""

from __future__ import annotations

import random
from collections.abc import Callable

from .extraction import first_number, last_number, plain_number
from .items import DEFAULT_MAX_TOKENS, Extraction, Form, Question, Shot, Task, read_rows

SHOTS = 5
# The harness seeds a task's sampler once (--seed 0,1234,1234,1234: the last is for the shots) and
# then draws for one item after the other, so an item's shots depend on its place. Nothing else is
# drawn from it in a run with one process and without --samples.
_SEED = 1234


def _questions(name: str) -> tuple[Question, ...]:
    """The 1,319 test questions. The gold answer follows "####"."""
    return tuple(
        Question(
            key=f"{name}-{place}",
            question=row["question"],
            answer=row["answer"],
            gold=row["answer"].rsplit("####", 1)[1].strip().replace(",", ""),
        )
        for place, row in enumerate(read_rows("gsm8k_test.jsonl.gz"))
    )


def draws(items: int, pool: int, shots: int = SHOTS) -> list[list[int]]:
    """Which rows of the pool are the shots of each item (api/samplers.py: Random(seed), then
    `sample` of the whole pool once for every item)."""
    generator = random.Random(_SEED)
    return [generator.sample(range(pool), shots) for _ in range(items)]


def gsm8k(extraction: Extraction) -> Task:
    questions = _questions("gsm8k")
    pool = [
        Shot(f"Question: {row['question']}\nAnswer:", row["answer"])
        for row in read_rows("gsm8k_train.jsonl.gz")
    ]
    drawn = draws(len(questions), len(pool))

    def form(place: int) -> Form:
        shots = tuple(pool[row] for row in drawn[place])
        return Form(f"Question: {questions[place].question}\nAnswer:", shots)

    return _task("gsm8k", questions, form, "Question:", r"#### (\-?[0-9\.\,]+)", extraction)


def gsm8k_cot(extraction: Extraction) -> Task:
    """Strict extraction needs a character after the number ("The answer is 18."): the harness's
    pattern ends in an unescaped dot, and "The answer is 18" at the end of a text reads as 1."""
    questions = _questions("gsm8k_cot")
    shots = tuple(
        Shot(f"Q: {row['question']}\nA:", row["target"])
        for row in read_rows("gsm8k_cot_shots.jsonl.gz")
    )

    def form(place: int) -> Form:
        return Form(f"Q: {questions[place].question}\nA:", shots)

    strict = r"The answer is (\-?[0-9\.\,]+)."
    return _task("gsm8k_cot", questions, form, "Q:", strict, extraction)


def _task(
    name: str,
    questions: tuple[Question, ...],
    form: Callable[[int], Form],
    asks: str,
    strict: str,
    extraction: Extraction,
) -> Task:
    def extract(question: Question, text: str) -> str | None:
        return last_number(text) if extraction == "flexible" else first_number(strict, text)

    return Task(
        name=name,
        kind="generate",
        questions=questions,
        form=form,
        max_tokens=DEFAULT_MAX_TOKENS,
        stops=lambda question: (asks, "</s>", "<|im_end|>"),
        extract=extract,
        normal=plain_number,
    )
