"""Rows are written, whole or not at all, and found again by the next run.

OUT.jsonl has nothing but rows. Beside it OUT.jsonl.qkv says in its first line what made them (the
header), then when each run began and what it had done at its end; its lock keeps a second process
out and goes with the process. Rows of OUT.parquet are kept in OUT.parquet.jsonl, and the table is
written from there when all are done, at once.

A row is handed to the system when it is done, in one piece, so that a killed process loses none;
another thread has them put on the disk once a second, for the machine's sake. What a crash left of
a last line, and blocks that never reached the disk (they read as zeros), are taken out when the
output is opened again."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .. import digests, durable
from .._core import Error
from ..outputs import json_ready
from . import keys, parquet
from .keys import Index

FORMAT = 1
OUTPUTS = (".jsonl", ".ndjson", ".parquet")
SYNC_SECONDS = 1.0
#: States of rows that --retry-errors does again.
FAILURES = ("error", "too_long")
_KEY = re.compile("[0-9a-f]{32}")

_WAY_OUT = (
    "answers of two settings are not mixed; write to another file, or start this one anew "
    "(restart=True, --restart: what is there is kept under another name)"
)


def encode(row: Mapping[str, Any]) -> bytes:
    """One line. What JSON has no number for (NaN, infinity) is null."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(json_ready(row)), ensure_ascii=False, default=str)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair: only its escape can be written
        return json.dumps(json.loads(text)).encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


class Sink:
    """The output, for this process alone. open, begin(), write() ..., finish(), close()."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Takes the lock. Error, OSError: it cannot be written, or another process writes it."""
        self.path = Path(path)
        if self.path.is_symlink():  # a file takes the place of another here, never of a link to it
            self.path = Path(os.path.realpath(self.path))
        kind = self.path.suffix.lower()
        if kind not in OUTPUTS:
            raise Error(f"{self.path}: the output's name must end with one of {', '.join(OUTPUTS)}")
        parquet.check(self.path)
        if self.path.exists() and not self.path.is_file():
            raise Error(f"{self.path}: not a regular file")
        self.is_table = kind == ".parquet"
        #: The rows, as lines.
        self.rows_path = _beside(self.path, ".jsonl") if self.is_table else self.path
        self.about_path = _beside(self.path, ".qkv")
        self.damaged = 0  # rows that a lost machine damaged
        self._rows: IO[bytes] | None = None
        self._syncer: _Syncer | None = None
        self._changed = False  # since the run before ended
        self._about = durable.open_locked(self.about_path)

    # Beginning.

    def begin(
        self, header: Mapping[str, Any], *, restart: bool = False, retry_errors: bool = False
    ) -> Index:
        """Compares the header with the one that is there (Error says what differs), and returns
        what is done. retry_errors: rows with an error are taken out, to be done again."""
        wanted = json.loads(encode({"format": FORMAT, **header}))  # as it will be read again
        stored = self._header()
        if stored is not None and restart:
            self._move_away()
            stored = None
        if stored is None:
            self._announce(wanted)
        else:
            digests.check_same(self.path, stored, wanted, ("settings", "environment"), _WAY_OUT)
        self._record({"kind": "begun"})
        for path in (self.rows_path, self.path):
            durable.remove_unfinished(path)
        index = self._read(retry_errors)
        self._open_rows()
        return index

    def adopt(self, header: Mapping[str, Any], lines: Iterable[bytes]) -> None:
        """Begins a new output with rows that were made elsewhere, all of them or none. Error if
        there are some already."""
        if self.rows_path.exists() and self.rows_path.stat().st_size:
            raise Error(f"{self.path}: has rows already; write to another file")
        self._announce({"format": FORMAT, **header})
        try:
            with durable.replacing(self.rows_path) as file:
                file.writelines(lines)
        except BaseException:
            self._about.truncate(0)
            raise
        self._open_rows()
        self._changed = True

    def _announce(self, header: Mapping[str, Any]) -> None:
        self._check_unknown()
        self._about.truncate(0)
        self._record(header)
        durable.sync_folder(self.path)

    def _open_rows(self) -> None:
        self._rows = open(self.rows_path, "ab", buffering=0)  # noqa: SIM115 - kept open
        durable.sync_folder(self.path)
        self._syncer = _Syncer(self._rows)

    def about(self) -> list[dict[str, Any]]:
        """The header and what each run said; nothing if none has begun."""
        return _read_about(self._about, self.about_path)

    def _header(self) -> dict[str, Any] | None:
        return next(iter(self.about()), None)

    def _check_unknown(self) -> None:
        """Nothing is written into a file that somebody else made."""
        for path in {self.path, self.rows_path}:
            if path.exists() and path.stat().st_size:
                raise Error(
                    f"{path}: is there already, without {self.about_path.name}, which would say "
                    "what made it; move it away or write to another file"
                )

    def _move_away(self) -> None:
        number = 1
        while any(_beside(self.path, f".{number}{end}").exists() for end in ("", ".qkv", ".jsonl")):
            number += 1
        shutil.copyfile(self.about_path, _beside(self.path, f".{number}.qkv"))
        for path in {self.path, self.rows_path}:
            if path.exists():
                ending = path.name[len(self.path.name) :]
                path.rename(_beside(self.path, f".{number}{ending}"))
        durable.sync_folder(self.path)

    def _read(self, retry_errors: bool) -> Index:
        """What is done; repairs the file."""
        index = Index()
        clean = True
        end = 0
        if not self.rows_path.exists():
            return index
        for row, line in read_lines(self.rows_path):
            if row is None:
                self.damaged += line.endswith(b"\n")
                clean = clean and not line.endswith(b"\n")
                continue
            end += len(line)
            failed = row["state"] in FAILURES
            if failed and retry_errors:
                clean = False
                continue
            state = keys.FAILED if failed else keys.DONE
            id_key = keys.of_id(row["id"])
            if index.get(id_key) is not None:
                raise Error(f"{self.rows_path}: the id {row['id']!r:.80} is in it twice")
            index.put(id_key, state, keys.row_bits(row["qkv_key"]))
        if not clean:
            self._take_out(retry_errors)
        elif end < self.rows_path.stat().st_size:
            os.truncate(self.rows_path, end)
        return index

    def _take_out(self, failed: bool) -> None:
        self._changed = True
        with durable.replacing(self.rows_path) as file:
            for row, line in read_lines(self.rows_path):
                if row is not None and not (failed and row["state"] in FAILURES):
                    file.write(line)

    # Writing.

    def write(self, row: Mapping[str, Any]) -> None:
        """Error if it cannot be written; what was written before is kept."""
        assert self._rows is not None and self._syncer is not None
        try:
            self._syncer.check()
            durable.append(self._rows, encode(row))
        except OSError as error:
            raise self._failed(error) from error
        self._syncer.wake()
        self._changed = True

    def _failed(self, error: OSError) -> Error:
        return Error(
            f"{self.rows_path}: {error.strerror}; the rows before are in it, and the same command "
            "goes on with them"
        )

    def _record(self, record: Mapping[str, Any]) -> None:
        try:
            durable.append(self._about, encode(record))
            os.fsync(self._about.fileno())
        except OSError as error:
            raise Error(f"{self.about_path}: {error.strerror}") from error

    def finish(self, done: Mapping[str, Any]) -> None:
        """All rows are there: puts them on the disk, writes the table if one was asked for, and
        says so in the header's file."""
        assert self._syncer is not None
        try:
            self._syncer.close()
            if self.is_table and not self._is_written():
                parquet.write(self.path, lambda: read_rows(self.rows_path))
        except OSError as error:
            raise self._failed(error) from error
        self._record({"kind": "done", **done})

    def _is_written(self) -> bool:
        """Whether the table is that of the rows: the run before this one ended well, and this one
        had nothing to do."""
        return (
            self.path.exists()
            and not self._changed
            and [record.get("kind") for record in self.about()[-2:]] == ["done", "begun"]
        )

    def close(self) -> None:
        """Also after an error: what was written is put on the disk, the lock is given back."""
        try:
            if self._syncer is not None:
                self._syncer.close()
        except OSError as error:
            raise self._failed(error) from error
        finally:
            if self._rows is not None:
                self._rows.close()
            if os.fstat(self._about.fileno()).st_size == 0:  # nothing was begun
                self.about_path.unlink(missing_ok=True)
            self._about.close()


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _read_about(file: IO[bytes], path: Path) -> list[dict[str, Any]]:
    """The header and the records after it; nothing if no whole header is there. Cuts off what a
    crash left of a last line."""
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    try:
        records = [json.loads(line) for line in data[:whole].splitlines()]
        sound = all(isinstance(record, dict) for record in records)
    except (ValueError, RecursionError):
        sound = False
    if not sound or (records and records[0].get("format") != FORMAT):
        raise Error(f"{path}: not the header of an output that this version can read")
    if whole < len(data):
        file.truncate(whole)
    return records


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Each line of an output with its row; None for what a crash left: a line without an end, or
    one with zeros where a block never reached the disk. Error for a line that is something else."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") or b"\0" in line:
                yield None, line
                continue
            try:
                row = json.loads(line)
                sound = isinstance(row["state"], str) and "id" in row
                sound = sound and _KEY.fullmatch(row["qkv_key"]) is not None
            except (ValueError, KeyError, TypeError, RecursionError):
                sound = False
            if not sound:
                raise Error(f"{path}: line {number} is no row of an output of qkv")
            yield row, line


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    return (row for row, _ in read_lines(path) if row is not None)


class _Syncer:
    """Has the system put on the disk what was written, at most SYNC_SECONDS after it was."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: OSError | None = None
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qkv-sync", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._dirty.wait()
            # Cleared before it is asked whether this is the end, or the end that comes after the
            # question is never heard of; and that is asked before the disk is, as what is written
            # last is written before close().
            self._dirty.clear()
            closing = self._closing.wait(SYNC_SECONDS)
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._error = error
                return
            if closing:
                return

    def wake(self) -> None:
        if not self._dirty.is_set():
            self._dirty.set()

    def check(self) -> None:
        """OSError if the disk did not take it."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closing.set()
        self._dirty.set()
        self._thread.join()
        self.check()
