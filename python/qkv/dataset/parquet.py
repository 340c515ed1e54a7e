"""Parquet in and out, by pyarrow (the extra `parquet`), which is imported only here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._core import Error
from ..durable import replacing

_BATCH = 1024  # rows held at a time


def _pyarrow() -> Any:
    try:
        import pyarrow  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise Error("Parquet needs pyarrow: pip install 'qkv[parquet]'") from None
    return pyarrow


def _open(path: Path) -> Any:
    pyarrow = _pyarrow()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise Error(f"{path}: not a Parquet file that can be read: {error}") from error


def count(path: Path) -> int:
    with _open(path) as file:
        return int(file.metadata.num_rows)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with _open(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH):
            yield from batch.to_pylist()


def check(path: Path) -> None:
    """Error if pyarrow is not there: before the work and not after it."""
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def write(path: Path, read: Callable[[], Iterator[dict[str, Any]]]) -> None:
    """Rows into a new file that takes the place of `path` at once. `read` is called twice: first
    for the columns and their types. Where values have no type in common, those that are no text
    become the text of their JSON. Error if it cannot be written."""
    pyarrow = _pyarrow()
    schema, as_text = _schema(pyarrow, read())
    with replacing(path) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for batch in _batches(read()):
            columns = [_values(batch, name, name in as_text) for name in schema.names]
            arrays = [
                pyarrow.array(values, field.type)
                for values, field in zip(columns, schema, strict=True)
            ]
            writer.write_table(pyarrow.table(arrays, schema=schema))


def _batches(given: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in given:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _values(batch: list[dict[str, Any]], name: str, as_text: bool) -> list[Any]:
    values = [row.get(name) for row in batch]
    if not as_text:
        return values
    return [
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values
    ]


def _schema(pyarrow: Any, given: Iterator[dict[str, Any]]) -> tuple[Any, set[str]]:
    types: dict[str, Any] = {}
    as_text: set[str] = set()
    for batch in _batches(given):
        for name in dict.fromkeys(name for row in batch for name in row):
            if name in as_text:
                continue
            try:
                found = pyarrow.array([row.get(name) for row in batch]).type
                types[name] = _common(pyarrow, types.get(name), found)
            except (pyarrow.ArrowException, OverflowError, UnicodeError):
                as_text.add(name)
                types[name] = pyarrow.string()
    as_text |= {name for name, kind in types.items() if _has_no_members(pyarrow, kind)}
    # Nothing but nulls: most that are not there are texts (of our columns: the error).
    as_text |= {name for name, kind in types.items() if pyarrow.types.is_null(kind)}
    types |= dict.fromkeys(as_text, pyarrow.string())
    return pyarrow.schema(list(types.items())), as_text


def _common(pyarrow: Any, old: Any, new: Any) -> Any:
    """The type that holds both; ArrowException if there is none."""
    if old is None or old == new:
        return new
    fields = [pyarrow.schema([("x", kind)]) for kind in (old, new)]
    return pyarrow.unify_schemas(fields, promote_options="permissive").field(0).type


def _has_no_members(pyarrow: Any, kind: Any) -> bool:
    """Parquet has no such structs, wherever in a type they stand."""
    if pyarrow.types.is_struct(kind):
        parts = [kind.field(i).type for i in range(kind.num_fields)]
        return not parts or any(_has_no_members(pyarrow, part) for part in parts)
    return pyarrow.types.is_list(kind) and _has_no_members(pyarrow, kind.value_type)
