"""What reports are made of: sections of paragraphs, tables and code, and how numbers and names are
written in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..stats import Interval

#: As a cell: there is no such number.
NONE = "-"


@dataclass(frozen=True)
class Table:
    """Cells as text. The first `keys` columns say what a row is; the first `left` are words."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: int = 1
    left: int = 1
    title: str = ""
    #: Most rows to show in a terminal; they come most important first.
    most: int | None = None
    #: On the page, where there may be a plot of the same, it is there for those who want it.
    folded: bool = False


@dataclass(frozen=True)
class Code:
    """To be copied as it is."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Bullets:
    lines: tuple[str, ...]


Block = str | Table | Code | Bullets


@dataclass(frozen=True)
class Section:
    """key: unique, for anchors. plot: the name of the plot that belongs here, if any."""

    key: str
    title: str
    blocks: tuple[Block, ...]
    plot: str = ""


Show = Callable[[str], str]


# ---- words and numbers -----------------------------------------------------------------------


def clean(value: object) -> str:
    """On one line, and with nothing that a terminal or a browser would obey: names and notes come
    from files."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(value)
    )


def shortened(names: Iterable[str], most: int) -> dict[str, str]:
    """Each name cleaned and cut in the middle to at most about `most` characters, still unique."""
    found: dict[str, str] = {}
    for name in names:
        text = clean(name)
        if len(text) > most:
            text = f"{text[: most - most // 2 - 1]}…{text[len(text) - most // 2 :]}"
        taken, base, count = set(found.values()), text, 1
        while text in taken:
            count += 1
            text = f"{base}#{count}"
        found[name] = text
    return found


def number(value: float, digits: int = 3) -> str:
    """A few digits of a number that may be tiny or large: 0.000941, 12.3, 2.5e-07."""
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf" if value < 0 else "nan"
    if value == 0:
        return "0"
    if abs(value) < 1e-5 or abs(value) >= 1e6:
        return f"{value:.{digits - 1}e}"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{places}f}"


def signed(value: float, digits: int = 3) -> str:
    return ("+" if value > 0 else "") + number(value, digits)


def percent(share: float, places: int = 2) -> str:
    """0.6123 -> "61.23"; what is above 0 never reads as 0."""
    if share == 0:
        return "0"
    least = 10.0**-places
    if 0 < 100 * share < least / 2:
        return f"<{least:.{places}f}"
    return f"{100 * share:.{places}f}"


def points(loss: float, places: int = 2) -> str:
    """With its sign: a loss of 0.015 is "+1.50", a gain is below 0."""
    text = f"{100 * loss:+.{places}f}"
    return text if text.strip("+-0.") else text[1:]


def p_value(p: float) -> str:
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"


def times(ratio: float) -> str:
    return f"{ratio:.2f} x" if ratio else NONE


def with_interval(value: str, interval: Interval | None, form: Callable[[float], str]) -> str:
    if interval is None:
        return f"{value} [{NONE}]"
    return f"{value} [{form(interval.lower)}, {form(interval.upper)}]"


def kl_cell(mean: float, interval: Interval | None) -> str:
    return with_interval(number(mean), interval, lambda x: number(x, 2))


def plural(n: int, word: str) -> str:
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def as_code(value: Any) -> str:
    """A literal of Python: of plain values only, so that it can be pasted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_code(k)}: {as_code(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_code, value)) + "]"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    text = str(value)
    quoted = clean(text.replace("\\", "\\\\").replace('"', '\\"'))
    return f'"{quoted}"'
