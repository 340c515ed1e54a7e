"""Data sets: the index of ids, in memory and beyond."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import qkv
from qkv.dataset import keys


def test_index() -> None:
    index, wanted = keys.Index(), {}
    for number in range(5000):
        id_key, bits = keys.of_id(f"r{number % 4000}"), keys.row_bits(f"{number:032x}")
        state = 1 + number % 3
        index.put(id_key, state, bits)
        wanted[id_key] = (state, bits)
    assert len(index) == 4000
    assert all(index.get(id_key) == value for id_key, value in wanted.items())
    assert index.get(keys.of_id("another")) is None
    # Ids of which parts are alike stay apart.
    for id_key in (bytes(16), bytes(15) + b"\1", b"\1" + bytes(15)):
        assert index.get(id_key) is None
        index.put(id_key, keys.DONE, 0)
        assert index.get(id_key) == (keys.DONE, 0)
    assert keys.of_id(1) != keys.of_id("1")
    assert keys.of_row(b"a", {"x": 1, "y": 2}) == keys.of_row(b"a", {"y": 2, "x": 1})
    assert keys.of_row(b"a", {"x": 1}) != keys.of_row(b"b", {"x": 1})


def test_an_index_beyond_what_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes into a file without a name. A disk that has no room for it ends the run."""
    monkeypatch.setattr(keys, "CACHE_KIB", 64)
    index = keys.Index()
    for number in range(5000):
        index.put(keys.of_id(number), keys.SEEN, number)
    assert all(index.get(keys.of_id(number)) == (keys.SEEN, number) for number in range(5000))
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            found.append(os.fstat(int(name)))
    assert any(file.st_nlink == 0 and file.st_size > 100_000 for file in found)
    index._do("PRAGMA max_page_count = 80")
    with pytest.raises(qkv.Error, match="the index of ids, a temporary file.*is full"):
        for number in range(5000, 20_000):
            index.put(keys.of_id(number), keys.SEEN, number)


def test_a_python_without_sqlite(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    out = tmp_path / "out.jsonl"
    with pytest.raises(qkv.Error, match="needs Python's module sqlite3"):
        qkv.run_dataset(tiny("llama"), ["a"], out, progress=False, kv_tokens=1024, threads=1)
