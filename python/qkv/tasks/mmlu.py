"""MMLU: 14,042 questions of 57 subjects, four choices each, by the log-likelihood of the letter."""

from __future__ import annotations

from typing import Any

from .items import Form, Question, Shot, Task, lettered, read_rows

SHOTS = 5  # the first of the subject in the dev set, which has five
_LETTERS = ("A", "B", "C", "D")


def _asked(row: dict[str, Any]) -> str:
    return f"{row['question'].strip()}\n{lettered(row['choices'])}"


def mmlu() -> Task:
    questions = tuple(
        Question(
            key=f"mmlu-{place}",
            question=_asked(row),
            answer=row["choices"][row["answer"]],
            gold=_LETTERS[row["answer"]],
            stratum=row["subject"],
        )
        for place, row in enumerate(read_rows("mmlu_test.jsonl.gz"))
    )
    shots: dict[str | None, list[Shot]] = {}
    for row in read_rows("mmlu_dev.jsonl.gz"):
        shot = Shot(f"{_asked(row)}\nAnswer:", _LETTERS[row["answer"]])
        shots.setdefault(row["subject"], []).append(shot)

    def form(place: int) -> Form:
        question = questions[place]
        subject = str(question.stratum).replace("_", " ")
        return Form(
            asked=f"{question.question}\nAnswer:",
            shots=tuple(shots[question.stratum][:SHOTS]),
            system="The following are multiple choice questions (with answers) about "
            f"{subject}.\n\n",
        )

    return Task(
        name="mmlu",
        kind="choice",
        questions=questions,
        form=form,
        chance=0.25,
        letters=_LETTERS,
    )
