"""What tells rows apart: an id within the output, and a key of all that a row's answer depends on.

The index of a run holds 24 bytes for each row read: 16 of the id, 8 of the row, two bits of them
its state. Its table is between three eighths and three quarters full, so that it takes 32 to 64
bytes a row. That is all in a run that grows with the input, and it is needed: to find what is done
already, and an id that comes twice."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from ..outputs import json_ready
from ..run import described

#: A row's state in the index.
DONE, FAILED, SEEN = 1, 2, 3  # in the output, in it with an error, read in this run
_FLAGS = 3
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
    """Ids, each with 62 bits of its row's key and a state: an open hash table in three arrays."""

    def __init__(self) -> None:
        self._n = 0
        self._resize(1024)

    def __len__(self) -> int:
        return self._n

    def _resize(self, n_slots: int) -> None:
        self._mask = n_slots - 1
        self._low = array("Q", bytes(8 * n_slots))
        self._high = array("Q", bytes(8 * n_slots))
        self._value = array("Q", bytes(8 * n_slots))  # 0: the slot is free

    def _slot(self, low: int, high: int) -> int:
        """Where it is, or the free place where it belongs."""
        lows, highs, values, mask = self._low, self._high, self._value, self._mask
        at = low & mask
        while values[at] and (lows[at] != low or highs[at] != high):
            at = (at + 1) & mask
        return at

    def get(self, id_key: bytes) -> tuple[int, int] | None:
        """State, and the bits that row_bits() makes of the row's key."""
        value = self._value[self._slot(*_halves(id_key))]
        return (value & _FLAGS, value & ~_FLAGS) if value else None

    def put(self, id_key: bytes, state: int, bits: int) -> None:
        low, high = _halves(id_key)
        at = self._slot(low, high)
        if not self._value[at]:
            self._n += 1
            if 4 * self._n > 3 * (self._mask + 1):
                self._grow()
                at = self._slot(low, high)
        self._low[at], self._high[at], self._value[at] = low, high, bits | state

    def _grow(self) -> None:
        old = zip(self._low, self._high, self._value, strict=True)
        self._resize(2 * (self._mask + 1))
        for low, high, value in old:
            if value:
                at = self._slot(low, high)
                self._low[at], self._high[at], self._value[at] = low, high, value


def _halves(id_key: bytes) -> tuple[int, int]:
    return int.from_bytes(id_key[:8], "little"), int.from_bytes(id_key[8:], "little")


def row_bits(row_key: str) -> int:
    return int(row_key[:16], 16) & ~_FLAGS
