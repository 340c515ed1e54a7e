"""Reading a configuration that somebody else wrote: every complaint names the file and the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import _core

_MAX_FILE_BYTES = 64 << 20


def read_json(path: Path) -> Mapping[str, Any] | None:
    """The object in a file; None if there is no such file."""
    try:
        if not path.is_file() and path.exists():
            raise _core.CheckpointError(f"{path}: no regular file")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise _core.CheckpointError(f"{path}: over {_MAX_FILE_BYTES >> 20} MiB")
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    return json_object(text, str(path))


def json_object(text: bytes, name: str) -> Mapping[str, Any]:
    """The object that a JSON text is; errors begin with `name`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _core.CheckpointError(f"{name}: not JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise _core.CheckpointError(f"{name}: must hold an object")
    return content


class Section:
    """An object of a configuration, with its place for messages."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def fail(self, text: str) -> _core.CheckpointError:
        return _core.CheckpointError(f"{self.where}: {text}")

    def refuse(self, text: str) -> _core.UnsupportedError:
        return _core.UnsupportedError(f"{self.where}: {text}")

    def _wrong(self, key: str, wanted: str) -> _core.CheckpointError:
        return self.fail(f"{key} is {self.data[key]!r:.60}, {wanted} is wanted")

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def text(self, key: str) -> str | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def integer(self, key: str) -> int | None:
        value = self.data.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._wrong(key, "an integer")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """The strings of the lists under these keys; of an object, its keys."""
        found: list[str] = []
        for key in keys:
            value = self.data.get(key)
            if isinstance(value, Mapping):
                value = list(value)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self._wrong(key, "a list of names")
            found += value
        return tuple(found)

    def integers(self, key: str) -> tuple[int, ...] | None:
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(key, "a list of integers")
        return tuple(value)

    def section(self, key: str) -> "Section":
        """The object under a key; an empty one if there is none."""
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Section(value, f"{self.where}.{key}")

    def sections(self) -> dict[str, "Section"]:
        """All members, each of which must be an object."""
        return {key: self.section(key) for key in self.data}

    def over(self, other: "Section") -> "Section":
        """This section's values, and the other's where this has none."""
        return Section({**other.data, **self.data}, self.where)
