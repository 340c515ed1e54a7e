"""Whether a line of a journal is the record that it says it is: files are edited, and merged, and a
report must not be made of what is not there. What the records hold is in journal.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from .results import Lane

Check = Callable[[Any], bool]


def _is(*types: type) -> Check:
    """Of one of these types; a bool is no number."""
    return lambda value: isinstance(value, types) and (type(value) is not bool or bool in types)


_text, _count, _number, _flag, _object = _is(str), _is(int), _is(int, float), _is(bool), _is(dict)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value < 1


_numbers, _ids = _list_of(_number), _list_of(_count)


def _formats(value: Any) -> bool:
    """options.Lane as it is stored."""
    pairs = value.get("layers") if isinstance(value, dict) else None
    whole = _list_of(_list_of(_text))(pairs) and all(len(pair) == 2 for pair in pairs or ())
    return whole and isinstance(value.get("name"), str) and "scales" in value


_RECORDS: dict[str, dict[str, Check]] = {
    "model": {"model": _text, "weights_bytes": _count, "lanes": _object},
    "rerun": {"model": _text, "items": _count, "identical": _flag, "first_difference": _text},
    "answer": {
        "model": _text, "task": _text, "key": _text, "place": _count, "stratum": _or_none(_text),
        "lanes": _object,
    },
    "forced": {"model": _text, "task": _text, "key": _text, "start": _count, "lanes": _object},
    "speed": {"model": _text, "lanes": _object},
    "clips": {"model": _text, "lanes": _object},
    "layers_asked": {
        "model": _text, "lane": _text, "base": _formats, "low": _formats,
        "parts": _list_of(_text), "task": _text, "length": _count, "keys": _list_of(_text),
        "kl_bound": _or_none(_number), "n_kv_heads": _count, "head_dim": _count,
        "kv_rank": _count,
    },
    "layers": {"model": _text, "key": _text, "lanes": _object},
}  # fmt: skip
_ANSWER: dict[str, Check] = {
    "answer": _or_none(_text), "correct": _flag, "answered": _flag, "truncated": _flag,
    "n_tokens": _count,
}  # fmt: skip
_LANE = {"name": _text, "model": _text, "kv_name": _text, "bytes_per_token": _count}
_LANES: dict[str, dict[str, Check]] = {
    "model": {"scales": _text, "scales_digest": _text, "pool_tokens": _count},
    "speed": {"decode": _number, "prefill": _number},
    "clips": {"clipped": _number, "flushed": _number},
    "layers": {"kl": _numbers, "top1": _list_of(_flag)},
}
_ANSWER_OF: dict[str, dict[str, Check]] = {
    "generate": {"text": _text, "token_ids": _ids},
    "choice": {"choices": _numbers},
}
_COMPARED = {"kl": _numbers, "kl_reverse": _numbers, "top1": _list_of(_flag)}


class Records:
    """Checks the lines of one file, in their order: ValueError says what is wrong with one."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        _fields(header, {"settings": _object, "environment": _object, "lanes": _list_of(_object)})
        settings = header["settings"]
        _fields(settings, {"margin": _number, "tasks": _list_of(_object)}, "settings")
        self._kinds: dict[str, str] = {}
        for task in settings["tasks"]:
            wanted = {"task": _text, "kind": _text, "asked": _count, "size": _count}
            _fields(task, {**wanted, "chance": _share}, "a task")
            self._kinds[task["task"]] = task["kind"]
        self._lanes: dict[str, list[str]] = {}  # by model
        for lane in header["lanes"]:
            known = {field.name: field for field in fields(Lane)}
            needed = {name for name, field in known.items() if field.default is MISSING}
            if not needed <= set(lane) <= set(known):
                raise ValueError(f"not a lane: {lane!r:.60}")
            _fields(lane, _LANE, "a lane")
            self._lanes.setdefault(lane["model"], []).append(lane["name"])
        if not self._lanes:
            raise ValueError("no lanes")
        self._seen: set[tuple[str, ...]] = set()

    def check(self, record: Mapping[str, Any]) -> None:
        """A kind that is not known is nobody's business."""
        kind = record["kind"]
        if not isinstance(kind, str):
            raise ValueError(f"'kind' cannot be {kind!r:.40}")
        if kind not in _RECORDS:
            return
        what = f"{kind} record" + (f" of {record['key']!r:.60}" if "key" in record else "")
        _fields(record, _RECORDS[kind], what)
        if record["model"] not in self._lanes:
            raise ValueError(f"{what}: there is no model {record['model']!r:.60}")
        if kind in ("answer", "forced"):
            self._once(record, what)
        if kind == "answer":
            self._answer(record, what)
        elif kind == "forced":
            self._forced(record, what)
        elif kind in _LANES:
            if kind != "layers" and not (kind == "speed" and not record["lanes"]):
                self._all_lanes(record, what)
            for name, lane in record["lanes"].items():
                _fields(lane, _LANES[kind], f"{what}: lane {name}")

    def _once(self, record: Mapping[str, Any], what: str) -> None:
        if record["task"] not in self._kinds:
            raise ValueError(f"{what}: there is no task {record['task']!r:.60}")
        place = (record["kind"], record["model"], record["task"], record["key"])
        if place in self._seen:
            raise ValueError(f"{what}: there is one before")
        self._seen.add(place)

    def _all_lanes(self, record: Mapping[str, Any], what: str) -> None:
        wanted, found = self._lanes[record["model"]], record["lanes"]
        for name in wanted:
            if name not in found:
                raise ValueError(f"{what}: lane {name} is missing")
        for name in found:
            if name not in wanted:
                raise ValueError(f"{what}: there is no lane {name!r:.60}")

    def _answer(self, record: Mapping[str, Any], what: str) -> None:
        self._all_lanes(record, what)
        kind = self._kinds[record["task"]]
        if kind == "generate":
            _fields(record, {"prompt_token_ids": _ids}, what)
        for name, lane in record["lanes"].items():
            if isinstance(lane, dict) and "error" in lane:
                _fields(lane, {"error": _text}, f"{what}: lane {name}")
            else:
                _fields(lane, {**_ANSWER, **_ANSWER_OF.get(kind, {})}, f"{what}: lane {name}")

    def _forced(self, record: Mapping[str, Any], what: str) -> None:
        if not record["lanes"]:
            return
        self._all_lanes(record, what)
        names = self._lanes[record["model"]]
        for name in names:
            compared = {} if name == names[0] else _COMPARED
            lane, wanted = record["lanes"][name], {"logprobs": _numbers, **compared}
            _fields(lane, wanted, f"{what}: lane {name}")
            size = len(record["lanes"][names[0]]["logprobs"])
            if any(len(lane[field]) != size for field in wanted):
                raise ValueError(f"{what}: lane {name}: not {size} tokens everywhere")


def _fields(given: Any, wanted: Mapping[str, Check], what: str = "header") -> None:
    """ValueError names the field that is missing or cannot be that."""
    if not isinstance(given, dict):
        raise ValueError(f"{what}: {given!r:.40} is no object")
    for name, check in wanted.items():
        if name not in given:
            raise ValueError(f"{what}: no field {name!r}")
        if not check(given[name]):
            raise ValueError(f"{what}: {name!r} cannot be {given[name]!r:.40}")
