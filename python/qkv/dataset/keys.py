"""What tells rows apart: an id within the output, and a key of all that a row's answer depends on.

The index of a run holds 16 bytes of each id that was read and 8 of its row: to find what is done
already, and an id that comes twice. It is all in a run that grows with the input, some 45 bytes a
row with what SQLite adds, and beyond a few MiB it is on the disk."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from .._core import Error
from ..outputs import json_ready
from ..run import described

#: A row's state in the index.
DONE, FAILED, SEEN = 1, 2, 3  # in the output, in it with an error, read in this run
#: Of the index, what is held in memory: that of 100,000 rows.
CACHE_KIB = 4096
#: Levels of lists and objects in a row. Python's own bound would be the caller's concern.
MAX_DEPTH = 128


def canonical(value: Any) -> bytes:
    """JSON that does not depend on the order of columns."""
    try:
        text = json.dumps(value, sort_keys=True, default=_plain)
    except TypeError:  # keys of several types have no order, others are none to JSON
        text = json.dumps(json_ready(value), sort_keys=True, default=_plain)
    return text.encode("ascii")


def check(value: Any) -> None:
    """ValueError for what cannot be written: nested deeper than MAX_DEPTH, in itself, or with
    something that has no text."""
    try:
        # Most have fewer brackets than that.
        written = canonical(value)
        deep = written.count(b"[") + written.count(b"{") > MAX_DEPTH and _is_deep(value)
    except RecursionError:
        deep = True
    except Exception as error:  # of its own methods, too
        raise ValueError(f"it cannot be written as JSON: {described(error)}") from None
    if deep:
        raise ValueError(f"it cannot be written: nested deeper than {MAX_DEPTH} levels")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for part in level for item in _parts(part)]
    return bool(level)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _plain(value: Any) -> Any:
    """Of what JSON does not know: NumPy's values as Python's, all else as its text."""
    ready = json_ready(value)
    return str(value) if ready is value else ready


def of_id(own: Any) -> bytes:
    """16 bytes of an id as it stands in the output: 1 and "1" are two."""
    return hashlib.blake2b(canonical(own), digest_size=16).digest()


def of_row(run: bytes, row: Mapping[str, Any] | str) -> str:
    """32 hexadecimal digits of the run's settings and the row's columns. The tokens of its prompt
    follow from these: the settings have the template's text and the tokenizer's digest. So a row
    that is done is found without tokenizing it again."""
    return hashlib.blake2b(canonical(row), key=run, digest_size=16).hexdigest()


def shard_of(id_key: bytes, n_shards: int) -> int:
    """By the id alone: the same in any order of rows, and one id's rows are in one shard."""
    return int.from_bytes(id_key[8:], "little") % n_shards


class Index:
    """Ids, each with 63 bits of its row's key and a state. A table of SQLite without a name: up to
    CACHE_KIB it is in memory, what is more goes into a temporary file that has no name either and
    is gone with the process, however that ends. Nothing in it is not in the output or the input."""

    def __init__(self) -> None:
        """Error where Python was built without SQLite."""
        try:
            import sqlite3  # noqa: PLC0415 (not all have it, and nothing else here needs it)
        except ImportError as error:
            raise Error(f"the index of ids needs Python's module sqlite3: {error}") from error
        self._failure = sqlite3.Error
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._db.close)
        # Nothing is ever rolled back, and one transaction for all: nothing is written for safety.
        self._do("PRAGMA journal_mode = OFF")
        self._do(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._do("CREATE TABLE rows (id BLOB PRIMARY KEY, state INTEGER, bits INTEGER)"
                 " WITHOUT ROWID")  # fmt: skip
        self._do("BEGIN")

    def _do(self, sql: str, values: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        try:
            found: tuple[Any, ...] | None = self._db.execute(sql, values).fetchone()
        except self._failure as error:
            raise Error(
                f"the index of ids, a temporary file where SQLITE_TMPDIR or TMPDIR says: {error}"
            ) from error
        return found

    def __len__(self) -> int:
        (n,) = self._do("SELECT count(*) FROM rows") or (0,)
        return int(n)

    def get(self, id_key: bytes) -> tuple[int, int] | None:
        """State, and the bits that row_bits() makes of the row's key."""
        return self._do("SELECT state, bits FROM rows WHERE id = ?", (id_key,))

    def put(self, id_key: bytes, state: int, bits: int) -> None:
        self._do("REPLACE INTO rows VALUES (?, ?, ?)", (id_key, state, bits))


def row_bits(row_key: str) -> int:
    """As many as an integer of SQLite takes."""
    return int(row_key[:16], 16) >> 1
