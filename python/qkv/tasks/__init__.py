"""Evaluation tasks that come with the package, data included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from . import gsm8k, mgsm, mmlu, mmlu_pro, wikitext2
from .items import Encode, Extraction, Grade, Item, Kind, Prompt, Question, Task, Window

__all__ = [
    "Encode",
    "Extraction",
    "Grade",
    "Item",
    "Kind",
    "Prompt",
    "Question",
    "Task",
    "Window",
    "load",
    "names",
    "task",
]

_NUMERIC: dict[str, Callable[[Extraction], Task]] = {
    "gsm8k": gsm8k.gsm8k,
    "gsm8k_cot": gsm8k.gsm8k_cot,
    "mgsm": mgsm.mgsm,
}
_LETTERED: dict[str, Callable[[], Task]] = {"mmlu": mmlu.mmlu, "mmlu_pro": mmlu_pro.mmlu_pro}
_TEXTS: dict[str, Callable[[], Task]] = {"wikitext2": wikitext2.wikitext2}


def names(*, questions: bool = False) -> list[str]:
    """All tasks, or those made of questions, which `load` takes."""
    return [*_NUMERIC, *_LETTERED, *(() if questions else _TEXTS)]


def task(name: str, *, extraction: Extraction | None = None, max_tokens: int | None = None) -> Task:
    """The task of that name.

    `extraction` says how a number is read out of a text: "flexible" takes the last one (the
    default), "strict" the one after the words that the examples show. `max_tokens` bounds what is
    generated; the default is the harness's.
    """
    if name in _NUMERIC:
        if extraction not in (None, "flexible", "strict"):
            raise ValueError(f'extraction {extraction!r}: must be "flexible" or "strict"')
        made = _NUMERIC[name](extraction or "flexible")
    elif name in _LETTERED:
        if extraction is not None:
            raise ValueError(f"extraction: {name} has one way of reading an answer")
        made = _LETTERED[name]()
    elif name in _TEXTS:
        if extraction is not None:
            raise ValueError(f"extraction: {name} has no answers")
        made = _TEXTS[name]()
    else:
        raise ValueError(f"data set {name!r}: must be one of {', '.join(names())}")
    if max_tokens is None:
        return made
    if made.kind != "generate":
        raise ValueError(f"max_tokens {max_tokens}: {name} generates nothing")
    if max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens}: must be at least 1")
    return replace(made, max_tokens=max_tokens)


def load(name: str) -> list[Question]:
    """All questions of a data set, in its order."""
    made = task(name)
    if made.kind == "text":
        raise ValueError(f"data set {name!r}: a text, not questions; see Task.windows")
    return list(made.questions)
