"""Tables as text and as HTML."""

import html
from collections.abc import Iterable, Sequence


def text(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Columns in line, the first `left` of them flush left."""
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def first(names: Sequence[str], n: int = 3) -> str:
    """ "a, b, c", or "a, b, c, ..." where there are more than n."""
    return ", ".join(names[:n]) + (", ..." if len(names) > n else "")


def as_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A <table>, everything escaped."""

    def line(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table>{line('th', head)}{body}</table>"
