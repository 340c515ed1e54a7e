"""How Findings are shown in a terminal, and as data frames. The page is page.py's."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import tables
from ..stats import Interval, Verdict
from .blocks import Block, Bullets, Code, Table, clean, plural, shortened
from .content import in_order, run_lines, sections, verdict_rows
from .page import html, page
from .results import Findings

__all__ = ["html", "page", "text", "to_pandas"]

#: A terminal's columns, and those of a lane's name in it.
WIDTH = 110
_NAME = 30
_LEGEND = (
    "Lost: right in the baseline, wrong here; gained: the other way round. Detectable: the "
    "smallest loss in points that so many items show with a power of 80 %. A page with plots, "
    "settings and what all this means: to_html(), --html FILE."
)


def text(findings: Findings) -> str:
    """Opens with the verdict of each lane. At most 110 columns, but for code to copy and for words
    that are longer than that."""
    names = shortened((lane.name for lane in findings.lanes), _NAME)

    def show(name: str) -> str:
        return names.get(name) or shortened([name], _NAME)[name]

    lines = list(_verdicts(verdict_rows(findings, show)))
    lines.append("")
    for line in run_lines(findings, show):
        lines += _wrapped(line)
    for name, short in names.items():
        if short != clean(name):
            lines += _wrapped(f"{short} is {clean(name)}")
    for section in sections(findings, show):
        lines += ["", section.title, "-" * min(len(section.title), WIDTH)]
        lines += _blocks(section.blocks)
    if any(result.pair for task in findings.tasks.values() for result in task.lanes.values()):
        lines += ["", *_wrapped(_LEGEND)]
    return "\n".join(lines)


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    """With an empty line around tables."""
    before: Block | None = None
    for block in blocks:
        if before is not None and (isinstance(block, Table) or isinstance(before, Table)):
            yield ""
        yield from _block(block)
        before = block


def _wrapped(line: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        line, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _verdicts(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    if not rows:
        yield "No verdict: there is no lane beside the baseline."
        return
    lane, kind = (max(len(row[i]) for row in rows) for i in (0, 1))
    for row in rows:
        yield from _wrapped(
            row[2], f"{row[0]:<{lane}}  {row[1]:<{kind}}  ", " " * (lane + kind + 4)
        )


def _block(block: Block) -> list[str]:
    if isinstance(block, str):
        return _wrapped(block)
    if isinstance(block, Bullets):
        return [line for entry in block.lines for line in _wrapped(entry, "- ", "  ")]
    if isinstance(block, Code):
        return [f"{block.title}:", *(f"    {line}" for line in block.text.splitlines())]
    lines = [f"{block.title}:"] if block.title else []
    rows = block.rows[: block.most]
    for place, columns in enumerate(_pieces(block)):
        head = [block.head[i] for i in columns]
        left = sum(i < block.left for i in columns)
        table = tables.text(head, [[row[i] for i in columns] for row in rows], left=left)
        lines += [""] * (place > 0) + table.split("\n")
    if len(rows) < len(block.rows):
        lines.append(f"... and {plural(len(block.rows) - len(rows), 'row')} more")
    return lines


def _pieces(table: Table) -> Iterator[list[int]]:
    """The columns of a table too wide for a terminal, in pieces that each begin with its keys."""
    widths = [
        max(len(cell) for cell in column) for column in zip(table.head, *table.rows, strict=True)
    ]
    keys = list(range(table.keys))
    piece = list(keys)
    for i in range(table.keys, len(widths)):
        if sum(widths[k] + 2 for k in [*piece, i]) - 2 > WIDTH and len(piece) > len(keys):
            yield piece
            piece = list(keys)
        piece.append(i)
    yield piece


# ---- data frames -----------------------------------------------------------------------------


def to_pandas(findings: Findings) -> dict[str, Any]:
    """Data frames of plain columns, all of them always there: "results" (a row per task and lane,
    every figure of results.LaneResult), "lanes", "buckets" (KL by position), "strata" (answers) and
    "layers" (sensitivity). Needs pandas, which is in the `report` extra."""
    try:
        import pandas  # noqa: PLC0415 (optional, slow to import)
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install 'qkv[report]'") from error
    return {name: pandas.DataFrame(rows) for name, rows in _frames(findings).items()}


def _frames(findings: Findings) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {
        "results": [],
        "lanes": [vars(lane) for lane in findings.lanes],
        "buckets": [],
        "strata": [],
        "layers": [
            {"lane": name, **_columns(entry)}
            for name, sensitivity in findings.sensitivity.items()
            for entry in sensitivity.layers
        ],
    }
    for name, task in findings.tasks.items():
        for lane, result in in_order(findings, task):
            keys = {"task": name, "lane": lane.name}
            row: dict[str, Any] = {
                **keys, "kind": task.kind, "chance": task.chance, "perplexity": result.perplexity,
            }  # fmt: skip
            for part in ("answers", "pair", "kl", "divergence"):
                value = getattr(result, part)
                row |= {} if value is None else _columns(value, f"{part}_")
            found["results"].append(row)
            kl = result.kl
            found["buckets"] += [
                {**keys, **_columns(bucket)} for bucket in (kl.buckets if kl else ())
            ]
            found["strata"] += [
                {**keys, "stratum": stratum, **_columns(value)}
                for stratum, value in result.strata.items()
            ]
    return found


def _columns(part: Any, before: str = "") -> dict[str, Any]:
    """The fields of a dataclass: intervals as two columns, verdicts as two, without sequences."""
    row: dict[str, Any] = {}
    for name, value in vars(part).items():
        if isinstance(value, Interval):
            row[f"{before}{name}_lower"], row[f"{before}{name}_upper"] = value
        elif isinstance(value, Verdict):
            row[f"{before}{name}"] = value.kind
            row[f"{before}needed"] = value.needed
        elif not isinstance(value, (tuple, Mapping)):
            row[f"{before}{name}"] = value
    return row
