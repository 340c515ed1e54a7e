"""Evaluation tasks that come with the package, data included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..params import integer
from . import gsm8k, mgsm, mmlu, mmlu_pro, wikitext2
from .custom import custom
from .items import Encode, Extraction, Grade, Item, Kind, Prompt, Question, Task, Window
from .needle import needle

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
    "custom",
    "load",
    "names",
    "needle",
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
    return [*_NUMERIC, *_LETTERED, *(() if questions else (*_TEXTS, "needle"))]


def task(
    name: str,
    *,
    extraction: Extraction | None = None,
    max_tokens: int | None = None,
    encode: Encode | None = None,
) -> Task:
    """The task of that name.

    `extraction` says how a number is read out of a text: "flexible" takes the last one (the
    default), "strict" the one after the words that the examples show. `max_tokens` bounds what is
    generated; the default is the harness's. `encode` is what `needle` measures its texts with; the
    others have no use for it.
    """
    if name not in names():
        raise ValueError(f"data set {name!r}: must be one of {', '.join(names())}")
    if name in _NUMERIC:
        if extraction not in (None, "flexible", "strict"):
            raise ValueError(f'extraction {extraction!r}: must be "flexible" or "strict"')
        made = _NUMERIC[name](extraction or "flexible")
    elif extraction is not None:
        read = "no answers" if name in _TEXTS else "one way of reading an answer"
        raise ValueError(f"extraction: {name} has {read}")
    elif name == "needle":
        made = needle(encode=encode)
    else:
        made = {**_LETTERED, **_TEXTS}[name]()
    if max_tokens is None:
        return made
    if made.kind != "generate":
        raise ValueError(f"max_tokens {max_tokens}: {name} generates nothing")
    return replace(made, max_tokens=integer("max_tokens", max_tokens, 1))


def load(name: str) -> list[Question]:
    """All questions of a data set, in its order."""
    if name in _TEXTS:
        raise ValueError(f"data set {name!r}: a text, not questions; see Task.windows")
    return list(task(name).questions)
