"""MGSM: 250 problems of GSM8K in eleven languages, asked in the language without examples (the
harness's mgsm_native_cot)."""

from __future__ import annotations

from typing import NamedTuple

from .extraction import first_number, last_number, no_punctuation
from .items import DEFAULT_MAX_TOKENS, Extraction, Form, Question, Task, read_rows


class _Words(NamedTuple):
    asks: str  # what stands before the question
    stop: str
    answers: str  # what stands before the answer
    strict: str


_NUMBER = r"(\-?[0-9\.\,]+)"

# As the harness has them, the missing space in Russian and English's pattern for Bengali included.
_WORDS = {
    "bn": _Words("প্রশ্ন: ", "প্রশ্ন:", "ধাপে ধাপে উত্তর:", f"The answer is {_NUMBER}"),
    "de": _Words(
        "Frage: ", "Frage:", "Schritt-für-Schritt-Antwort:", f"Die Antwort lautet {_NUMBER}"
    ),
    "en": _Words("Question: ", "Question:", "Step-by-Step Answer:", f"The answer is {_NUMBER}"),
    "es": _Words("Pregunta: ", "Pregunta:", "Respuesta paso a paso:", f"La respuesta es {_NUMBER}"),
    "fr": _Words(
        "Question : ", "Question :", "Réponse étape par étape :", f"La réponse est {_NUMBER}"
    ),
    "ja": _Words("問題： ", "問題：", "ステップごとの答え:", f"答えは{_NUMBER}です。"),
    "ru": _Words("Задача: ", "Задача:", "Пошаговоерешение:", f"Ответ — {_NUMBER}"),
    "sw": _Words("Swali: ", "Swali:", "Jibu la Hatua kwa Hatua:", f"Jibu ni {_NUMBER}"),
    "te": _Words("ప్రశ్న: ", "ప్రశ్న:", "దశలవారీగా సమాధానం:", f"సమాధానం {_NUMBER}"),
    "th": _Words("โจทย์: ", "โจทย์:", "คำตอบทีละขั้นตอน:", f"คำตอบคือ {_NUMBER}"),
    "zh": _Words("问题： ", "问题：", "逐步解答:", f"答案是 {_NUMBER}。"),
}


def _words(question: Question) -> _Words:
    return _WORDS[str(question.stratum)]


def mgsm(extraction: Extraction) -> Task:
    questions = tuple(
        Question(
            # 250 a language, one after the other: the same number is the same problem.
            key=f"mgsm-{row['lang']}-{place % 250}",
            question=row["question"],
            answer=row["answer"],
            gold=row["answer"],
            stratum=row["lang"],
        )
        for place, row in enumerate(read_rows("mgsm_test.jsonl.gz"))
    )

    def form(place: int) -> Form:
        words = _words(questions[place])
        return Form(f"{words.asks}{questions[place].question}\n{words.answers}")

    def extract(question: Question, text: str) -> str | None:
        if extraction == "flexible":
            return last_number(text)
        return first_number(_words(question).strict, text)

    return Task(
        name="mgsm",
        kind="generate",
        questions=questions,
        form=form,
        max_tokens=DEFAULT_MAX_TOKENS,
        stops=lambda question: (_words(question).stop, "</s>", "<|im_end|>"),
        extract=extract,
        normal=no_punctuation,
    )
