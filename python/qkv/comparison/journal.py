"""The records of a comparison, one JSON object a line, written as the rows are done: what was
finished before a crash is not computed again, and a report needs the file alone. Arrays of one
value per token are packed: base64 of little-endian float32 (of bytes for top1).

The first line is the header. A record is written whole or not at all: what a crash left of a last
line is cut off when the file is opened again. Records, by "kind":

  header   format, settings (all that a result depends on), environment, lanes (results.Lane)
  model    model, digest, weights_bytes, lanes {name: {"scales", "scales_digest", "pool_tokens"}}
  rerun    model, items, identical, first_difference
  answer   model, task, key, place, stratum, lanes {name: answer}
             answer: answer (str | None), correct, answered, truncated, n_tokens,
             text and token_ids (generate), choices (choice: log-likelihoods), or error
           generate: prompt_token_ids, and scores, what the hook on_finish gave, if anything
  forced   model, task, key, start (position of the first scored token), lanes {name: predictions}
             predictions: logprobs [n]; kl, kl_reverse, top1 [n] except for the model's first lane
           lanes is empty where there was nothing to score, or with the reason as error
  speed    model, lanes {name: {"decode": tokens/s, "prefill": tokens/s}}
  clips    model, lanes {name: {"clipped": share, "flushed": share}}
  layers_asked  model, lane, and what is to be found out of it (layers.Sweep): the last one counts
  layers   model, key (of a window), lanes {formats: {"kl" [n], "top1" [n]}}, formats being what
             kv_cache_dtype takes, as JSON: they are compared with the model's first lane
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from .. import digests, durable
from .._core import Error
from ..outputs import json_ready
from .records import Records

FORMAT = 1

Record = dict[str, Any]

_PACKED = {"logprobs": "<f4", "kl": "<f4", "kl_reverse": "<f4", "top1": "u1"}
#: The records that have them: in others these names are the user's own (a hook's scores).
_OF_TOKENS = ("forced", "layers")
_WAY_OUT = "rows of two comparisons are not mixed; use another file"
_BEGINNING = b'{"kind":"header"'


def _pack(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _pack(item, key) for key, item in value.items()}
    if isinstance(value, list) and name in _PACKED:
        return base64.b64encode(np.asarray(value, _PACKED[name]).tobytes()).decode("ascii")
    return value


def _unpack(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _unpack(item, key) for key, item in value.items()}
    if isinstance(value, str) and name in _PACKED:
        array = np.frombuffer(base64.b64decode(value, validate=True), _PACKED[name])
        return (array.astype(bool) if name == "top1" else array).tolist()
    return value


class Journal:
    """An open file of records. Two processes on one file are refused.

    path: None keeps the records in memory alone. `header` is compared with the file's: another
    setting is an Error that names it, and nothing is touched."""

    def __init__(self, path: str | os.PathLike[str] | None, header: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.header: Record = {"kind": "header", "format": FORMAT, **json_ready(header)}
        self.records: list[Record] = []
        self._file: IO[bytes] | None = None
        # The header is written with the first record: options that cannot run leave none.
        self._headed = False
        if self.path is None:
            return
        self._file = durable.open_locked(self.path)
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        assert self._file is not None and self.path is not None
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        lines = list(parse(data[:whole], self.path))
        if not lines:
            begun = data[: len(_BEGINNING)]  # of a header that a crash left unfinished
            if not _BEGINNING.startswith(begun):
                raise Error(f"{self.path}: not a comparison that this version can read")
            self._file.truncate(0)
            return
        stored, self.records = lines[0], lines[1:]
        digests.check_same(
            self.path, stored, self.header, ("settings", "environment", "lanes"), _WAY_OUT
        )
        self.header, self._headed = stored, True
        if whole < len(data):
            self._file.truncate(whole)

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        packed = _pack(record) if record["kind"] in _OF_TOKENS else record
        line = json.dumps(packed, ensure_ascii=False, separators=(",", ":"), allow_nan=True)
        data = line.encode("utf-8", "surrogatepass") + b"\n"
        try:
            durable.append(self._file, data)
            os.fsync(self._file.fileno())
        except OSError as error:
            raise Error(
                f"{self.path}: {error.strerror}; the rows before are in it, and the same call with "
                "the same file goes on with them"
            ) from error

    def add(self, record: Mapping[str, Any]) -> None:
        """Stores it for good before it returns."""
        ready: Record = json_ready(record)
        if not self._headed:
            self._write(self.header)
            self._headed = True
        self._write(ready)
        self.records.append(ready)

    def find(self, kind: str, **fields: Any) -> Iterator[Record]:
        for record in self.records:
            if record["kind"] == kind and all(record.get(k) == v for k, v in fields.items()):
                yield record

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def parse(data: bytes, path: Path) -> Iterator[Record]:
    """The records of whole lines; Error names the line that is none."""
    known: Records | None = None
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = json.loads(line.decode("utf-8", "surrogatepass"))
            if isinstance(record, dict) and record.get("kind") in _OF_TOKENS:
                record = _unpack(record)
        except (ValueError, RecursionError):
            raise Error(f"{path}: line {number} is not JSON") from None
        if not isinstance(record, dict) or "kind" not in record:
            raise Error(f"{path}: line {number} is not a record of a comparison")
        if number == 1 and (record["kind"] != "header" or record.get("format") != FORMAT):
            raise Error(f"{path}: not a comparison that this version can read")
        try:
            if known is None:
                known = Records(record)
            else:
                known.check(record)
        except ValueError as error:
            raise Error(f"{path}: line {number}: {error}") from None
        yield record


def read(path: str | os.PathLike[str]) -> tuple[Record, list[Record]]:
    """Header and records of a file, also while it is being written."""
    data = Path(path).read_bytes()
    lines = list(parse(data[: data.rfind(b"\n") + 1], Path(path)))
    if not lines:
        raise Error(f"{os.fspath(path)}: no comparison in it")
    return lines[0], lines[1:]
