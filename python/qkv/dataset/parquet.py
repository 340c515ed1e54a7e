"""Parquet in and out, by pyarrow (the extra `parquet`), which is imported only here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._core import Error
from ..durable import replacing
from ..run import described

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


def rows(path: Path) -> Iterator[dict[str, Any] | ValueError]:
    """ValueError in the place of a row with a value that Python has none for, such as a date in
    the year 100,000. Error for a file that is damaged."""
    with _open(path) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise Error(f"{path}: a column stands twice: {', '.join(names)}")
        batches = file.iter_batches(batch_size=_BATCH)
        while (batch := _next(path, batches)) is not None:
            yield from plain(batch)


def _next(path: Path, batches: Iterator[Any]) -> Any:
    try:
        return next(batches, None)
    except (_pyarrow().ArrowException, OSError) as error:
        raise Error(f"{path}: damaged, it cannot be read any further: {error}") from error


def plain(table: Any) -> list[dict[str, Any] | ValueError]:
    """The rows of a batch or table of pyarrow; ValueError as rows() has it."""
    try:
        found: list[dict[str, Any] | ValueError] = table.to_pylist()
    except Exception:  # of some value; which ones pyarrow raises depends on its type
        found = [_row(table, place) for place in range(table.num_rows)]
    return found


def _row(batch: Any, place: int) -> dict[str, Any] | ValueError:
    row = {}
    for name in batch.schema.names:
        try:
            row[name] = batch.column(name)[place].as_py()
        except Exception as error:
            return ValueError(f"the column {name!r} has no value of Python: {described(error)}")
    return row


def check(path: Path) -> None:
    """Error if pyarrow is not there: before the work and not after it."""
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def write(path: Path, read: Callable[[], Iterator[dict[str, Any]]]) -> None:
    """Rows into a new file that takes the place of `path` at once. `read` is called twice: first
    for the columns and their types. Where values have no type in common, those that are no text
    become the text of their JSON. Error if it cannot be written."""
    pyarrow = _pyarrow()
    types, as_text = _types(pyarrow, read())
    schema = pyarrow.schema([(_valid(name), kind) for name, kind in types.items()])
    with replacing(path) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for batch in _batches(read()):
            columns = [_values(batch, name, name in as_text) for name in types]
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
        value
        if value is None
        else _valid(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for value in values
    ]


def _valid(text: str) -> str:
    """Half a surrogate pair as its escape: a table holds UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _types(pyarrow: Any, given: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Of each column, and which ones become text."""
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
    return types, as_text


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
