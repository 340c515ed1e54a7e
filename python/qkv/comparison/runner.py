"""Runs the lanes over the tasks and writes what they did into the journal, row by row.

A row's result depends on the row alone (promise 1 of the design), so the order in which rows are
computed, what a crash left out and what is resumed make no difference."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._core import Error
from ..chat_template import check_messages
from ..engine import Engine
from ..options import PAGE_TOKENS
from ..outputs import RequestOutput, Score, json_ready
from ..params import SamplingParams
from ..run import Hook, described
from ..tasks import Item, Window
from .journal import Journal, Record
from .settings import Asked, ModelLanes, Plan, Say

# Items whose outputs are scored together, before the next ones are generated: their prompts are
# still in the prefix tree then.
_SCORED_AT_ONCE = 32
# The rerun goes backwards, so many items at a time.
_RERUN_BATCH = 5


class Runner:
    """One model: its engine and the rows that are still to be done."""

    def __init__(
        self,
        plan: Plan,
        entry: ModelLanes,
        journal: Journal,
        *,
        on_finish: Hook | None,
        say: Say,
    ) -> None:
        self.plan, self.entry, self.journal = plan, entry, journal
        self._on_finish, self._say = on_finish, say
        self.names = [lane.name for lane in entry.lanes]
        self._engine: Engine | None = None
        self._cut: dict[str, list[Window]] = {}

    @property
    def engine(self) -> Engine:
        """Opened when there is something to compute."""
        if self._engine is None:
            self._say(f"loading {self.entry.label}")
            self._engine = Engine(
                self.entry.path, kv_cache_dtype=list(self.entry.kv), **self.plan.engine_options
            )
            self._store_model()
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _find(self, kind: str, **fields: Any) -> Iterator[Record]:
        return self.journal.find(kind, model=self.entry.label, **fields)

    def _add(self, kind: str, **fields: Any) -> None:
        self.journal.add({"kind": kind, "model": self.entry.label, **fields})

    # What runs, and at what cost.

    def _store_model(self) -> None:
        engine = self.engine
        held = engine.memory()
        lanes = {}
        for name, lane, values, own in zip(
            self.names,
            self.entry.lanes,
            np.asarray(engine._scales.values),
            engine._lanes,
            strict=True,
        ):
            rows = [row for row in engine.kv_scales() if row.lane == own.name and row.applied]
            lanes[name] = {
                "scales": ", ".join(sorted({_source(row.source) for row in rows})) or "none needed",
                "scales_digest": hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest(),
                "pool_tokens": _pool_tokens(held["weights"], lane.bytes_per_token),
            }
        old = next(self._find("model"), None)
        if old is None:
            self._add("model", weights_bytes=held["weights"], lanes=lanes)
            return
        for name, found in lanes.items():
            if old["lanes"][name]["scales_digest"] != found["scales_digest"]:
                raise Error(
                    f"{self.journal.path}: lane {name} was begun with other KV scales; rows of "
                    "two comparisons are not mixed; use another file"
                )

    # The run.

    def run(self) -> None:
        """Everything of this model that the journal does not have."""
        if self.plan.rerun_items and next(self._find("rerun"), None) is None:
            first = {asked.task.name: self._first_places(asked) for asked in self.plan.tasks}
            for asked in self.plan.tasks:
                self._rows(asked, first[asked.task.name])
            self._rerun(first)
        for record in self._find("rerun"):
            if not record["identical"]:
                raise Error(
                    f"the rerun check failed: {record['first_difference']} has other bits in "
                    "another order and batch; nothing that is measured here could be trusted"
                )
        for asked in self.plan.tasks:
            self._rows(asked, None)
        if self.plan.speed and next(self._find("speed"), None) is None:
            self._add("speed", lanes=self._speed())

    def _first_places(self, asked: Asked) -> list[int]:
        """The items that are run twice: the first ones of each task, as many of each."""
        n_tasks = len(self.plan.tasks)
        share = -(-self.plan.rerun_items // n_tasks)
        return list(self._places(asked))[:share]

    def _places(self, asked: Asked) -> Sequence[int]:
        if asked.task.kind == "text":
            return range(len(self._windows(asked)))
        return asked.task.places(asked.limit)

    def _windows(self, asked: Asked) -> list[Window]:
        """Of the model's own tokens; cut once, as it takes seconds."""
        name = asked.task.name
        if name not in self._cut:
            encode = self.engine.tokenizer.encode
            self._cut[name] = asked.task.windows(encode, limit=asked.limit)
        return self._cut[name]

    def _rows(self, asked: Asked, places: Sequence[int] | None) -> None:
        """Computes and stores the rows at these places (None: all) that are not there yet."""
        name, kind = asked.task.name, asked.task.kind
        done = {record["key"] for record in self._find("forced", task=name)}
        answered = {record["key"] for record in self._find("answer", task=name)}
        if kind == "text":
            if asked.limit is not None and len(done) >= asked.limit:
                return  # without the model, whose tokens say how many windows there are
            windows = self._windows(asked)
            wanted = range(len(windows)) if places is None else places
            left = [windows[place] for place in wanted if windows[place][0] not in done]
            for part in self._parts(left, _SCORED_AT_ONCE, f"{name} ({self.entry.label})"):
                for record in self._score_windows(name, part):
                    self.journal.add(record)
            return
        wanted = self._places(asked) if places is None else places
        key_of = asked.task.questions
        left_places = [place for place in wanted if key_of[place].key not in done]
        size = self.engine._max_running * 4 if left_places else 1
        if kind == "choice":
            size = _SCORED_AT_ONCE
        for part in self._parts(left_places, size, f"{name} ({self.entry.label})"):
            items = [(place, asked.task.item(place, chat=asked.chat)) for place in part]
            if kind == "choice":
                for record in self._choose(asked, items):
                    if record["kind"] == "forced" or record["key"] not in answered:
                        self.journal.add(record)
            else:
                fresh = [entry for entry in items if entry[1].key not in answered]
                for record in self._generate(asked, fresh, self._on_finish):
                    self.journal.add(record)
                keys = {item.key for _, item in items}
                stored = [r for r in self._find("answer", task=name) if r["key"] in keys]
                for record in self._force(stored):
                    self.journal.add(record)

    def _parts(self, entries: Sequence[Any], size: int, what: str) -> Iterator[Sequence[Any]]:
        for start in range(0, len(entries), size):
            self._say(f"{what}: {start} of {len(entries)} rows done")
            yield entries[start : start + size]

    # Tasks of each kind. All give records and store nothing.

    def _record(self, kind: str, task: str, key: str, **fields: Any) -> Record:
        return {"kind": kind, "model": self.entry.label, "task": task, "key": key, **fields}

    def _prompt(self, item: Item) -> NDArray[np.int32] | ValueError:
        """The prompt's token ids, or why it has none: its row's error and no other's."""
        tokenizer = self.engine.tokenizer
        try:
            if isinstance(item.prompt, str):
                return np.asarray(tokenizer.encode(item.prompt), np.int32)
            text = tokenizer.apply_chat_template(check_messages(item.prompt))
            return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
        except (Error, ValueError) as error:
            if not isinstance(item.prompt, str) and not tokenizer.has_chat_template:
                raise
            return ValueError(str(error))

    def _generate(
        self, asked: Asked, items: Sequence[tuple[int, Item]], hook: Hook | None
    ) -> Iterator[Record]:
        rows: list[Any] = []
        for _, item in items:
            params = SamplingParams(max_tokens=item.max_tokens, temperature=0.0, stop=item.stop)
            prompt = self._prompt(item)
            row = {"prompt_token_ids": prompt, "key": item.key, "params": params}
            rows.append(prompt if isinstance(prompt, ValueError) else row)
        outputs: Iterable[RequestOutput] = self.engine.stream(rows, on_finish=hook, progress=False)
        if hasattr(hook, "finish"):
            outputs = list(outputs)  # some scores are there after the last row
        for output in outputs:
            place, item = items[output.index]
            record = self._record(
                "answer",
                asked.task.name,
                item.key,
                place=place,
                stratum=item.stratum,
                prompt_token_ids=output.prompt_token_ids,
                lanes={name: _answer(asked, item, lane) for name, lane in self._by_lane(output)},
            )
            if output.scores:
                record["scores"] = _storable(output.scores)
            yield record

    def _by_lane(self, output: Any) -> Iterator[tuple[str, Any]]:
        """Our lanes' names with the engine's answers or scores."""
        answers = list(output.lanes.values()) if output.lanes else [output]
        if output.error is not None and len(answers) != len(self.names):
            answers = [output] * len(self.names)
        return zip(self.names, answers, strict=True)

    def _force(self, answers: Iterable[Record]) -> Iterator[Record]:
        """Every lane's predictions of the text that the model's first lane wrote."""
        pending = []
        for record in answers:
            first = record["lanes"][self.names[0]]
            if "error" not in first and len(first["token_ids"]):
                pending.append((record, first["token_ids"]))
            else:
                yield self._record("forced", record["task"], record["key"], start=0, lanes={})
        for start in range(0, len(pending), _SCORED_AT_ONCE):
            part = pending[start : start + _SCORED_AT_ONCE]
            scores = self.engine.score(
                [record["prompt_token_ids"] for record, _ in part],
                [ids for _, ids in part],
                progress=False,
            )
            for (record, _), score in zip(part, scores, strict=True):
                yield self._forced(
                    record["task"], record["key"], len(record["prompt_token_ids"]), score
                )

    def _forced(self, task: str, key: str, start: int, score: Score) -> Record:
        if score.error is not None:
            return self._record("forced", task, key, start=start, lanes={}, error=score.error)
        return self._record(
            "forced", task, key, start=start,
            lanes={name: _predictions(lane) for name, lane in self._by_lane(score)},
        )  # fmt: skip

    def _choose(self, asked: Asked, items: Sequence[tuple[int, Item]]) -> Iterator[Record]:
        task = asked.task.name
        prompts = [self._prompt(item) for _, item in items]
        pairs: list[tuple[Any, str]] = []
        for (_, item), ids in zip(items, prompts, strict=True):
            if not isinstance(ids, ValueError):
                # A template's text ends in a special token: a choice is tokenized by itself.
                prompt = item.prompt if isinstance(item.prompt, str) else ids
                pairs += [(prompt, choice) for choice in item.choices]
        scores = iter(self.engine.score(*_unzipped(pairs), progress=False))
        for (place, item), ids in zip(items, prompts, strict=True):
            if isinstance(ids, ValueError):
                lanes: dict[str, Any] = dict.fromkeys(self.names, {"error": str(ids)})
                forced = self._record("forced", task, item.key, start=0, lanes={}, error=str(ids))
            else:
                own = list(islice(scores, len(item.choices)))
                by_lane = zip(*(dict(self._by_lane(score)).values() for score in own), strict=True)
                lanes = {
                    name: _choice(asked, item, found)
                    for name, found in zip(self.names, by_lane, strict=True)
                }
                # What follows the prompt is predicted by one distribution whatever the choice.
                forced = self._forced(task, item.key, len(ids), own[0])
            yield self._record(
                "answer", task, item.key, place=place, stratum=item.stratum, lanes=lanes
            )
            yield forced

    def _score_windows(self, task: str, windows: Sequence[Window]) -> Iterator[Record]:
        scores = self.engine.score([ids for _, ids in windows], progress=False)
        for (key, _), score in zip(windows, scores, strict=True):
            yield self._forced(task, key, 1, score)

    # The checks.

    def _rerun(self, first: Mapping[str, Sequence[int]]) -> None:
        """Some items again, last first and a few at a time, with nothing in the prefix tree: the
        same bits are promised. Counts what the formats clip on the way."""
        engine = self.engine
        items, difference = 0, ""
        engine._core.kv_counts_reset()
        for asked in self.plan.tasks:
            name = asked.task.name
            stored = {
                (record["kind"], record["key"]): record
                for kind in ("answer", "forced")
                for record in self._find(kind, task=name)
            }
            places = list(reversed(first[name]))
            for part in self._parts(places, _RERUN_BATCH, f"{name} (rerun check)"):
                engine._core.flush()
                items += len(part)
                for record in self._again(asked, part):
                    old = stored.get((record["kind"], record["key"]))
                    if not difference and not _same(old, record):
                        difference = f"{name}, {record['key']}: {record['kind']}"
        self._add("clips", lanes=self._clips())
        self._add(
            "rerun",
            items=items,
            identical=not difference,
            first_difference=difference,
        )

    def _again(self, asked: Asked, places: Sequence[int]) -> Iterator[Record]:
        if asked.task.kind == "text":
            windows = self._windows(asked)
            yield from self._score_windows(asked.task.name, [windows[place] for place in places])
            return
        items = [(place, asked.task.item(place, chat=asked.chat)) for place in places]
        if asked.task.kind == "choice":
            yield from self._choose(asked, items)
            return
        answers = list(self._generate(asked, items, None))
        yield from answers
        yield from self._force(answers)

    def _clips(self) -> dict[str, dict[str, float]]:
        shares = {}
        for place, name in enumerate(self.names):
            counts = self.engine._core.kv_counts(place)
            stored = max(int(counts["n_values"].sum()), 1)
            shares[name] = {
                "clipped": int(counts["n_clipped"].sum()) / stored,
                "flushed": int(counts["n_flushed"].sum()) / stored,
            }
        return shares

    def _speed(self) -> dict[str, dict[str, float]]:
        """Tokens per second of each lane alone, taken in turn so that what else the machine does
        meets them all: prompts of 512 tokens, then decoding at 4 sequences. The better of two."""
        engine, rounds, n_seqs = self.engine, 2, 4
        length = min(512, int(engine.info["max_model_len"]) - 64, engine._kv_tokens // n_seqs - 48)
        if length < PAGE_TOKENS:
            return {}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in self.names}
        self._say(f"speed of each lane ({self.entry.label})")
        for turn in range(rounds):
            for place, name in enumerate(self.names):
                times[name].append(self._time_lane(place, turn, n_seqs, length))
        engine._core.flush()
        return {
            name: {
                "prefill": max(entry[0] for entry in taken),
                "decode": max(entry[1] for entry in taken),
            }
            for name, taken in times.items()
        }

    def _time_lane(self, lane: int, turn: int, n_seqs: int, length: int) -> tuple[float, float]:
        """Prompt and output tokens per second of one lane."""
        engine = self.engine
        engine._core.flush()
        stream = np.random.default_rng(turn)
        prompts = [
            stream.integers(0, engine._vocab, length).astype(np.int32) for _ in range(n_seqs)
        ]
        with engine._exclusive():
            seconds, rows = timed(engine, [(prompt, lane) for prompt in prompts], 16)
        return rows[0] / max(seconds[0], 1e-9), rows[1] / max(seconds[1], 1e-9)


def timed(
    engine: Engine, sequences: Iterable[tuple[NDArray[np.int32], int]], n_out: int
) -> tuple[list[float], list[int]]:
    """Seconds and rows of the steps with prompt tokens and of those that only decode; sequences:
    (prompt, lane), all at once, each with `n_out` output tokens."""
    core = engine._core
    left = {
        core.add(prompt, lane=lane, max_tokens=n_out, temperature=0.0, ignore_eos=True)
        for prompt, lane in sequences
    }
    seconds, rows = [0.0, 0.0], [0, 0]
    while left:
        begun = time.perf_counter()
        step = core.step()
        decoding = step.n_prefill == 0
        seconds[decoding] += time.perf_counter() - begun
        rows[decoding] += step.n_rows
        for number in step.finished:
            core.take(number)
            left.discard(number)
    return seconds, rows


def _pool_tokens(weights_bytes: int, bytes_per_token: int) -> int:
    """Tokens that fit beside the weights in 0.85 of the machine's memory, were it the only lane."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = max(int(0.85 * memory) - weights_bytes, 0)
    return room // bytes_per_token // PAGE_TOKENS * PAGE_TOKENS


def _source(source: str) -> str:
    """Where a scale comes from, without the tensor's name."""
    known = source.startswith(("file ", "calibrated", "default", "asked"))
    return source if known else "checkpoint"


def _unzipped(pairs: Sequence[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    return [prompt for prompt, _ in pairs], [choice for _, choice in pairs]


def _storable(scores: Mapping[str, Any]) -> dict[str, Any]:
    """What a hook gave as the journal gives it back; else why it cannot be stored."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(json_ready(scores)))
        return found
    except (TypeError, ValueError, RecursionError) as error:
        return {"error": described(error)}


def _answer(asked: Asked, item: Item, output: RequestOutput) -> dict[str, Any]:
    if output.error is not None:
        return {"error": output.error}
    grade = asked.task.grade(item, output.text)
    return {
        **grade,
        "truncated": output.finish_reason == "length",
        "n_tokens": len(output.token_ids),
        "text": output.text,
        "token_ids": output.token_ids,
    }


def _choice(asked: Asked, item: Item, scores: Sequence[Score]) -> dict[str, Any]:
    errors = [score.error for score in scores if score.error is not None]
    if errors:
        return {"error": errors[0]}
    totals = [score.total for score in scores]
    try:
        grade = asked.task.grade(item, totals)
    except ValueError as error:  # a log-likelihood that is not a number
        return {"error": str(error)}
    return {**grade, "truncated": False, "n_tokens": 0, "choices": totals}


def _predictions(score: Score) -> dict[str, Any]:
    found: dict[str, Any] = {"logprobs": score.token_logprobs}
    if score.kl is not None:
        found |= {"kl": score.kl, "kl_reverse": score.kl_reverse, "top1": score.top1}
    return found


#: What the caller's code made of a row: it may say something else the next time.
_SAID = ("scores", "correct", "answer", "answered", "grade_error")


def _same(old: Record | None, new: Record) -> bool:
    """Equal in every bit that was computed; what a hook or a grading function says is left out."""
    if old is None:
        return False
    return bool(_bits(old) == _bits(new))


def _bits(value: Any) -> Any:
    """Comparable with ==, a NaN equal to itself."""
    if isinstance(value, Mapping):
        return {key: _bits(item) for key, item in value.items() if key not in _SAID}
    if isinstance(value, np.ndarray):
        return _bits(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_bits(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(value).hex()
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return value
