"""Runs each layer's K and V alone in the lower format, then mixes of formats by layer, over windows
of a text, and writes what they predicted into the journal, window by window. What is run, and what
it says, is decided in layers.py.

The cost. A lane that differs from the baseline from layer i on computes the layers from i on, the
others are the baseline's (score_lanes of the core): K and V of n layers alone are about n * n
layers instead of 2 * n * n, and logits in 2 * n + 3 lanes. The default, 4 windows of 512 tokens, is
for a model of 28 layers as much as 65 thousand tokens in one lane, and logits for 120 thousand;
the mixes add some 10 lanes, 20 thousand tokens. `parts` chooses: "kv" (both halves of a layer
together) costs half of "k" and "v", and all three half as much again; without "k" and "v" the mix
goes by whole layers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import kv_scales, options
from ..engine import Engine
from ..params import integer
from ..tasks import Window
from ..tasks import task as named_task
from ..tokenizer import load_tokenizer
from . import layers
from .journal import Journal, Record
from .results import Lane
from .settings import ModelLanes, Plan, Say

TASK = "wikitext2"
#: Lanes of an engine, the baseline among them (QKV_LANES_MAX of csrc/engine/engine.h).
_MOST_LANES = 256
#: Rows of a lane in one step, at least: fewer would leave the matrix products thin.
_STEP_ROWS = 16
#: Tokens that are scored to see how long it will take.
_PROBE = 64
#: What is chosen here, whatever the comparison's engines have.
_OWN_OPTIONS = ("mem_fraction", "kv_tokens", "max_running", "chunk_tokens", "prefix_cache")


@dataclass(frozen=True)
class Wanted:
    """How much of it."""

    windows: int = 4
    length: int = 512
    parts: tuple[layers.Part, ...] = ("k", "v")
    kl_bound: float | None = None


def wanted(by_layer: bool | Mapping[str, Any], kl_bound: float | None) -> Wanted | None:
    """compare()'s arguments, checked; None: nothing is wanted."""
    if kl_bound is not None:
        if isinstance(kl_bound, bool) or not isinstance(kl_bound, (int, float)):
            raise TypeError(f"kl_bound={kl_bound!r}: a number is needed")
        if not 0 < kl_bound < float("inf"):
            raise ValueError(f"kl_bound={kl_bound}: must be above 0 and finite")
    if by_layer is False:
        if kl_bound is not None:
            raise ValueError("kl_bound: bounds a mix of formats by layer; it needs by_layer")
        return None
    given = {} if by_layer is True else by_layer
    if not isinstance(given, Mapping):
        raise TypeError(f"by_layer={by_layer!r:.60}: True, False or a mapping")
    for key in given:
        options.one_of("by_layer key", key, ("windows", "length", "parts"))
    parts = given.get("parts", Wanted.parts)
    parts = (parts,) if isinstance(parts, str) else tuple(parts)
    for part in parts:
        options.one_of("by_layer parts", part, layers.PARTS)
    if not parts:
        raise ValueError(f"by_layer parts: at least one of {', '.join(layers.PARTS)}")
    return Wanted(
        windows=integer("by_layer windows", given.get("windows", Wanted.windows), 1),
        length=integer("by_layer length", given.get("length", Wanted.length), 2),
        parts=tuple(part for part in layers.PARTS if part in parts),
        kl_bound=None if kl_bound is None else float(kl_bound),
    )


def check(plan: Plan, asked: Wanted) -> None:
    """ValueError if there is nothing that could be run."""
    if not any(True for entry in plan.models for _ in _lower(entry)):
        raise ValueError(
            "by_layer: no model has two lanes, without the control lane, that store K or V of some "
            "layer in different formats"
        )
    for entry in plan.models:
        most = int(plan.engine_options.get("max_model_len") or entry.config["max_positions"])
        if asked.length > most:
            raise ValueError(
                f"by_layer length={asked.length}: {entry.label} takes at most {most} tokens"
            )


def _lower(entry: ModelLanes) -> Iterator[tuple[Lane, options.Lane]]:
    """The lanes that can be held against the model's first, layer by layer."""
    base = entry.formats[0]
    scaled = any(name in kv_scales.LIMITS for pair in base.layers for name in pair)
    for lane, own in zip(entry.lanes[1:], entry.formats[1:], strict=True):
        # A lane has one source of scales: a mix of lanes with two cannot be written down.
        mixable = not scaled or own.scales == base.scales
        if not lane.control and own.layers != base.layers and mixable:
            yield lane, own


def run(plan: Plan, entry: ModelLanes, journal: Journal, asked: Wanted, say: Say) -> None:
    """Everything of this model that the journal does not have."""
    found = list(_lower(entry))
    if not found:
        return
    task = named_task(TASK)
    encode = load_tokenizer(entry.path).encode
    windows = task.windows(encode, length=asked.length, limit=asked.windows)
    for lane, own in found:
        sweep = layers.Sweep(
            model=entry.label,
            lane=lane.name,
            base=entry.formats[0],
            low=own,
            parts=asked.parts,
            task=TASK,
            length=asked.length,
            keys=tuple(key for key, _ in windows),
            kl_bound=asked.kl_bound,
            n_kv_heads=int(entry.config["n_kv_heads"]),
            head_dim=int(entry.config["head_dim"]),
            kv_rank=int(entry.config["kv_rank"]),
        )
        _Measurement(plan, entry, sweep, windows, journal, say).run()


class _Measurement:
    """One lower format of one model."""

    def __init__(
        self,
        plan: Plan,
        entry: ModelLanes,
        sweep: layers.Sweep,
        windows: Sequence[Window],
        journal: Journal,
        say: Say,
    ) -> None:
        self._plan, self._entry, self._sweep = plan, entry, sweep
        self._windows, self._journal, self._say = windows, journal, say
        self._measured = layers.Measured(journal.records, entry.label)
        self._what = f"layers of {sweep.lane} ({entry.label})"
        self._rate = 0.0  # seconds of a row in a layer

    def run(self) -> None:
        asked = self._sweep.record()
        stored = [
            layers.Sweep.of(record)
            for record in self._journal.find("layers_asked", lane=self._sweep.lane)
        ]
        if not stored or stored[-1] != self._sweep:  # the last one counts
            self._journal.add(asked)
        self._measure(self._sweep.table(), "each K and V alone")
        while mixes := layers.trials(self._sweep, self._measured):
            self._measure(mixes, "mixes")

    def _measure(self, lanes: Sequence[options.Lane], what: str) -> None:
        keys = self._sweep.keys
        left = [lane for lane in lanes if not all(self._measured.has(lane, key) for key in keys)]
        if not left:
            return
        shared = self._sweep.computed([self._sweep.base, *left])
        self._say(
            f"{self._what}: {what}: {len(left) + 1} lanes over {len(keys)} x {self._sweep.length} "
            f"tokens, {self._sweep.asked_for([self._sweep.base, *left]):,} rows x layers; "
            f"{shared:,} with what is below a change computed once"
        )
        for batch in self._batches(left):
            windows = [
                window
                for window in self._windows
                if not all(self._measured.has(lane, window[0]) for lane in batch)
            ]
            if windows:
                self._score(batch, windows)

    def _score(self, batch: Sequence[options.Lane], windows: Sequence[Window]) -> None:
        names = [layers.name(lane) for lane in batch]
        row = self._sweep.computed([self._sweep.base, *batch]) / self._sweep.n_rows
        with self._open(batch) as engine:
            if not self._rate:
                self._probe(engine, windows[0][1][:_PROBE], row)
            for place, (key, ids) in enumerate(windows):
                seconds = self._rate * row * (self._sweep.length - 1) * (len(windows) - place)
                self._say(
                    f"{self._what}: {place} of {len(windows)} windows done, about "
                    f"{_duration(seconds)} to go"
                )
                begun = time.perf_counter()
                record = self._window(engine, names, key, ids)
                self._rate = (time.perf_counter() - begun) / row / (len(ids) - 1)
                self._journal.add(record)
                self._measured.add(record)

    def _probe(self, engine: Engine, ids: Sequence[int], row: float) -> None:
        _predictions(engine, ids[:2])  # what is touched for the first time costs more
        begun = time.perf_counter()
        _predictions(engine, ids)
        self._rate = (time.perf_counter() - begun) / row / (len(ids) - 1)

    def _window(self, engine: Engine, names: Sequence[str], key: str, ids: Sequence[int]) -> Record:
        found = _predictions(engine, ids)
        lanes = dict(zip(names, found[1:], strict=True))
        return {"kind": "layers", "model": self._entry.label, "key": key, "lanes": lanes}

    # Engines.

    def _batches(self, lanes: Sequence[options.Lane]) -> Iterator[Sequence[options.Lane]]:
        """As many lanes at a time as an engine takes and half of the free memory holds."""
        stored = next(self._journal.find("model", model=self._entry.label), None)
        weights = 0 if stored is None else int(stored["weights_bytes"])
        room = max(options.free_memory() - weights, 0) // 2
        largest = max(self._sweep.bytes_per_token(lane) for lane in [self._sweep.base, *lanes])
        fit = room // (largest * self._pool_tokens) - 1
        size = max(min(fit, _MOST_LANES - 1), 1)
        for start in range(0, len(lanes), size):
            yield lanes[start : start + size]

    @property
    def _pool_tokens(self) -> int:
        return -(-self._sweep.length // options.PAGE_TOKENS) * options.PAGE_TOKENS

    def _open(self, batch: Sequence[options.Lane]) -> Engine:
        given = {
            name: value
            for name, value in self._plan.engine_options.items()
            if name not in _OWN_OPTIONS
        }
        n_lanes = len(batch) + 1
        return Engine(
            self._entry.path,
            kv_cache_dtype=[options.spelled(lane) for lane in [self._sweep.base, *batch]],
            kv_tokens=self._pool_tokens,
            max_running=n_lanes,
            chunk_tokens=max(512, _STEP_ROWS * n_lanes),
            prefix_cache=False,
            **given,
        )


def _predictions(engine: Engine, ids: Sequence[int]) -> list[dict[str, Any]]:
    """By lane: KL against the first lane and whether the best token is its, per token."""
    with engine._exclusive():
        scores = engine._core.score_lanes(np.asarray(ids, np.int32))
    return [{"kl": kl, "top1": top1} for kl, top1 in zip(scores.kl, scores.top1, strict=True)]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
