"""Reading an answer out of a text, as lm-evaluation-harness does (its `regex` and `take_first`
filters and its `exact_match`, commit 4e7e0d47), quirks included: another reading would give
another accuracy than the published ones."""

from __future__ import annotations

import re
import string

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
