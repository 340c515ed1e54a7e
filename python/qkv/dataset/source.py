"""Rows come in, one at a time, from files or from any iterable.

What is no row is given out in its place, as a Bad one with the reason: whoever reads decides what
becomes of it. Memory holds one row (of Parquet: one batch)."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .._core import Error
from ..incoming import is_ids
from . import parquet

#: A longer line is an error of its row and is not kept in memory.
MAX_ROW_BYTES = 64 << 20
_BLOCK = 1 << 20
INPUTS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".txt")


@dataclass(frozen=True)
class Bad:
    """What stands in the place of a row that cannot be read."""

    reason: str


Row = Mapping[str, Any] | Bad


@dataclass(frozen=True)
class Source:
    name: str
    rows: Callable[[], Iterator[Row]]  # from the first on
    count: Callable[[], int | None]  # how many there are, if that is quickly known
    again: bool  # whether the rows can be read more than once


def open_source(given: Any) -> Source:
    """A path by its ending: .jsonl (.ndjson, .json) has an object in each line, .csv a header and a
    record for each row, .parquet a table; of .txt each line is a prompt. "-" is JSON lines of
    standard input. Else an iterable of mappings, texts, conversations or token ids; a pandas data
    frame's rows. Error and OSError for a path that cannot be read."""
    if isinstance(given, str) and given == "-":
        return Source("-", lambda: parsed(standard_input()), lambda: None, again=False)
    if isinstance(given, (str, os.PathLike)):
        return _file(Path(given))
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        given = given.to_dict("records")
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"rows={given!r:.100}: a path, or an iterable of rows, is needed")
    size = len(given) if isinstance(given, Sized) else None
    return Source(
        name=type(given).__name__,
        rows=lambda: (_wrapped(row) for row in given),
        count=lambda: size,
        again=size is not None,
    )


def _file(path: Path) -> Source:
    if path.is_dir():
        raise Error(f"{path}: a folder, not a file")
    path.stat()  # OSError now and not in the middle
    if path.is_file():  # a pipe can be opened only once
        with open(path, "rb"):
            pass
    kind = path.suffix.lower()
    readers: dict[str, tuple[Callable[[Path], Iterator[Row]], Callable[[Path], int | None]]] = {
        ".jsonl": (_of_lines(json.loads), _count_lines),
        ".ndjson": (_of_lines(json.loads), _count_lines),
        ".json": (_of_lines(json.loads), _count_lines),
        ".txt": (_of_lines(text_line), _count_lines),
        ".csv": (_csv_rows, _count_records),
        ".parquet": (lambda path: map(_wrapped, parquet.rows(path)), parquet.count),
    }
    if kind not in INPUTS:
        raise Error(f"{path}: the name must end with one of {', '.join(INPUTS)}")
    read, count = readers[kind]
    return Source(str(path), lambda: read(path), lambda: count(path), path.is_file())


def _wrapped(row: Any) -> Row:
    """What a row may be beside a mapping: a prompt by itself."""
    if isinstance(row, Mapping):
        return row
    if isinstance(row, ValueError):
        return Bad(str(row))
    if isinstance(row, str):
        return {"prompt": row}
    if is_ids(row):
        return {"prompt_token_ids": row}
    if isinstance(row, (list, tuple)) and row and isinstance(row[0], Mapping):
        return {"messages": row}
    return Bad(f"{type(row).__name__} {row!r:.60} is no row: an object with columns is needed")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers from 1 on; None for one that is too long."""
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(_BLOCK)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line


def _too_long() -> Bad:
    return Bad(f"longer than {MAX_ROW_BYTES} bytes")


def _of_lines(parse: Callable[[str], Any]) -> Callable[[Path], Iterator[Row]]:
    def read(path: Path) -> Iterator[Row]:
        with open(path, "rb") as file:
            yield from parsed(file, parse)

    return read


def standard_input() -> BinaryIO:
    """Its bytes, also where a program put a stream of text in its place. Error if it is closed."""
    if sys.stdin is None:
        raise Error("standard input is closed")
    found: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    return io.BytesIO(sys.stdin.read().encode("utf-8")) if found is None else found


def parsed(file: BinaryIO, parse: Callable[[str], Any] = json.loads) -> Iterator[Row]:
    """The row of each line that is not blank: what `parse` makes of it."""
    for number, line in _lines(file):
        row: Row
        try:
            row = _too_long() if line is None else _wrapped(parse(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            row = Bad(f"not valid UTF-8: {error.reason} at byte {error.start}")
        except (ValueError, RecursionError) as error:
            row = Bad(f"not valid JSON: {error}")
        yield Bad(f"line {number}: {row.reason}") if isinstance(row, Bad) else row


def text_line(line: str) -> str:
    return line.rstrip("\r\n")


def _csv_rows(path: Path) -> Iterator[Row]:
    """Bytes that are not UTF-8 become lone surrogates, which are their row's error later on."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, None)
        except csv.Error as error:
            raise Error(f"{path}: the header is not valid CSV: {error}") from None
        if header is None:
            return
        if len(set(header)) < len(header):
            raise Error(f"{path}: a column stands twice in the header: {', '.join(header)}")
        while True:
            start = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Bad(f"line {start}: not valid CSV: {error}")
                continue
            if not fields:  # a blank line
                continue
            if len(fields) != len(header):
                yield Bad(f"line {start}: {len(fields)} fields, the header has {len(header)}")
            else:
                yield dict(zip(header, fields, strict=True))


def _count_records(path: Path) -> int | None:
    if not path.is_file():
        return None
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            return max(sum(1 for fields in csv.reader(file) if fields) - 1, 0)
        except csv.Error:
            return None


def _count_lines(path: Path) -> int | None:
    """Without blank ones at most: a bound for the progress bar. None for what is no regular
    file."""
    if not path.is_file():
        return None
    lines, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")
