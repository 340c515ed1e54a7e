"""Evaluation sets that come with the package."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Question:
    """One item: what is asked and the right answer."""

    key: str
    question: str
    answer: str  # worked out, as the data set has it
    gold: str  # the final answer alone


def _gsm8k() -> list[Question]:
    """GSM8K's 1,319 test questions (MIT, data/LICENSE.gsm8k). The gold answer follows "####"."""
    with gzip.open(_DATA / "gsm8k_test.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Question(
            key=f"gsm8k-{place}",
            question=row["question"],
            answer=row["answer"],
            gold=row["answer"].rsplit("####", 1)[1].strip().replace(",", ""),
        )
        for place, row in enumerate(rows)
    ]


_SETS = {"gsm8k": _gsm8k}


def names() -> list[str]:
    return list(_SETS)


def load(name: str) -> list[Question]:
    """All items of a set, in its order."""
    if name not in _SETS:
        raise ValueError(f"data set {name!r}: must be one of {', '.join(_SETS)}")
    return _SETS[name]()
