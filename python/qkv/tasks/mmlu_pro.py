"""MMLU-Pro: 12,032 questions of 14 categories, up to ten choices each, answered in words after
five worked examples of the category."""

from __future__ import annotations

import re
from typing import Any

from .items import Form, Question, Shot, Task, lettered, read_rows

SHOTS = 5  # all that the validation set has of a category
_ANSWER = re.compile(r"answer is \(?([ABCDEFGHIJ])\)?")
_THINK = "Let's think step by step."


def _options(row: dict[str, Any]) -> str:
    options = lettered([option.strip() for option in row["options"]])
    return f"{row['question']}\nOptions:\n{options}"


def _asked(options: str) -> str:
    return f"Question:\n{options}\nAnswer: {_THINK}"


def _extract(question: Question, text: str) -> str | None:
    """The first letter that is called the answer."""
    match = _ANSWER.search(text)
    return match.group(1) if match else None


def mmlu_pro() -> Task:
    """The letter is the gold answer, as in the harness, not the index beside it: they disagree in
    one row (question_id 3983, letter C, index 1: a bond with the negative end last, which the
    question rules out)."""
    questions = tuple(
        Question(
            key=f"mmlu_pro-{row['question_id']}",
            question=_options(row),
            answer=row["options"]["ABCDEFGHIJ".index(row["answer"])],
            gold=row["answer"],
            stratum=row["category"],
        )
        for row in read_rows("mmlu_pro_test.jsonl.gz")
    )
    shots: dict[str | None, list[Shot]] = {}
    for row in read_rows("mmlu_pro_validation.jsonl.gz"):
        worked = row["cot_content"].replace(f"A: {_THINK} ", "")
        shots.setdefault(row["category"], []).append(Shot(_asked(_options(row)), worked))

    def form(place: int) -> Form:
        question = questions[place]
        return Form(
            asked=_asked(question.question),
            shots=tuple(shots[question.stratum][:SHOTS]),
            system="The following are multiple choice questions (with answers) about "
            f"{question.stratum}. Think step by step and then finish your answer with "
            '"the answer is (X)" where X is the correct letter choice.\n',
        )

    return Task(
        name="mmlu_pro",
        kind="generate",
        questions=questions,
        form=form,
        max_tokens=2048,
        stops=lambda question: ("Question:",),
        extract=_extract,
    )
