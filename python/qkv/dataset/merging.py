"""The outputs of a data set's shards become one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .. import digests
from .._core import Error
from . import keys
from .sink import Sink, encode, read_rows


def merge(parts: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> int:
    """Joins the outputs of all shards of a data set, in any order, into `out`, which then is as if
    there had been no shards: run_dataset can go on with it. How many rows it has.

    Error, and no output: a part is missing, came twice or was not finished; parts were made with
    other settings or of another input; a row is lost or stands in two parts."""
    if not parts:
        raise ValueError("merge: no parts")
    with ExitStack() as stack:
        sinks: list[Sink] = []
        for part in parts:
            sinks.append(_existing(part, sinks))
            stack.callback(sinks[-1].close)
        headers = [_finished(sink) for sink in sinks]
        _check_together(sinks, headers)
        target = Sink(out)
        stack.callback(target.close)
        first = headers[0][0]
        settings = {**first["settings"], "shard": [0, 1]}
        total = sum(int(done["rows"]) for _, done in headers)
        target.adopt({**first, "settings": settings}, _joined(sinks, total))
        target.finish({**headers[0][1], "rows": total, "summary": None})
        return total


def _existing(given: str | os.PathLike[str], others: Sequence[Sink]) -> Sink:
    """Error for what is no part, and for one that was given before, by whatever name: its lock
    would say that another process writes to it."""
    path = Path(given)
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    about = Path(f"{path}.qkv")
    if not about.is_file():
        raise Error(f"{os.fspath(given)}: there is no {about.name} beside it: no part")
    for other in others:
        if about.samefile(other.about_path):
            raise Error(f"{os.fspath(given)}: the same part twice, as {other.path} before")
    return Sink(path)


def _finished(sink: Sink) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header, and how its last run ended."""
    records = sink.about()
    if not records or records[-1].get("kind") != "done":
        raise Error(f"{sink.path}: was not finished; run the same command again first")
    if not sink.rows_path.is_file():
        raise Error(f"{sink.rows_path}: is not there any more; its rows are those of this part")
    header, done = records[0], records[-1]
    try:
        _, n = header["settings"]["shard"]
        sound = n >= 1 and {"rows", "input_rows", "input"} <= {*done}
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise Error(f"{sink.about_path}: not what a run of this version wrote: damaged")
    return header, done


def _check_together(
    sinks: Sequence[Sink], headers: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    first, done = headers[0]
    n = first["settings"]["shard"][1]
    seen: dict[int, Path] = {}
    for sink, (header, own) in zip(sinks, headers, strict=True):
        shard = header["settings"]["shard"]
        other = {**header, "settings": {**header["settings"], "shard": [0, shard[1]]}}
        same = {**first, "settings": {**first["settings"], "shard": [0, n]}}
        way_out = f"it is no part of what {sinks[0].path} is a part of"
        digests.check_same(sink.path, other, same, ("settings", "environment"), way_out)
        if (own["input_rows"], own["input"]) != (done["input_rows"], done["input"]):
            raise Error(
                f"{sink.path}: is of another input: {own['input_rows']} rows, {sinks[0].path} is "
                f"of {done['input_rows']}, or their contents differ"
            )
        if shard[0] in seen:
            raise Error(f"{sink.path}: is shard {shard[0]}/{n}, and so is {seen[shard[0]]}")
        seen[shard[0]] = sink.path
    missing = [str(i) for i in range(n) if i not in seen]
    if missing:
        raise Error(f"shards {', '.join(missing)} of {n} are missing")


def _joined(sinks: Sequence[Sink], total: int) -> Iterator[bytes]:
    index = keys.Index()
    for sink in sinks:
        for row in read_rows(sink.rows_path):
            id_key = keys.of_id(row["id"])
            if index.get(id_key) is not None:
                raise Error(f"{sink.path}: the row {row['id']!r:.80} is in another part, too")
            index.put(id_key, keys.SEEN, 0)
            yield encode(row)
    if len(index) != total:
        raise Error(f"the parts have {len(index)} rows and were finished with {total}")
