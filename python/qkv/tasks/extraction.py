"""Reading an answer out of a text, as lm-evaluation-harness does (its `regex` and `take_first`
filters and its `exact_match`, commit 4e7e0d47), quirks included: another reading would give
another accuracy than the published ones."""

from __future__ import annotations

import re
import string
from decimal import Decimal, InvalidOperation

# The last match counts. A single digit is the second form; "..." is a match without a number.
_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def last_number(text: str) -> str | None:
    """Flexible extraction: the last thing that looks like a number. Where that has no digit
    ("...") there is no answer (the harness counts it as a wrong one)."""
    matches = _NUMBER.findall(text)
    return _with_digit(next(group for group in matches[-1] if group)) if matches else None


def first_number(pattern: str, text: str) -> str | None:
    """Strict extraction: the number in the first match of the pattern's only group."""
    match = re.search(pattern, text)
    return _with_digit(match.group(1)) if match else None


def _with_digit(found: str) -> str | None:
    return found.strip() if re.search("[0-9]", found) else None


def plain_number(text: str) -> str:
    """For comparing in GSM8K: without commas, "$", everything up to "#### ", and a final dot.
    "18.00" and "18" stay different."""
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(ignored, "", text)
    return text


def no_punctuation(text: str) -> str:
    """For comparing in MGSM: without ASCII punctuation, which the sign and the decimal point are
    too: "-18" and "1.8" pass for "18"."""
    return text.translate(_NO_PUNCTUATION)


def as_number(text: str) -> Decimal | None:
    """The value of a text that is a number and nothing else, "$1,234.50" and "18." among them;
    None if it is none. The harness compares texts: by value "18.00" is "18"."""
    try:
        value = Decimal(re.sub(r"[$,]|\.$", "", text.strip()))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def same_number(left: str | None, right: str | None) -> bool:
    """By value; False if one of them is no number."""
    values = [None if text is None else as_number(text) for text in (left, right)]
    return None not in values and values[0] == values[1]
