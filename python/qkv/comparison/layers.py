"""Which layers need the higher format: what is measured for it, and what the measurements say.

No lane of a model is computed here: from records to results.Sensitivity, whatever the order in
which the records came. A lane is known by its formats (its `name`), so that what was measured is
found again for whatever it was measured.

The mix. A unit is one layer's K or V that the two lanes store differently. By an additive model the
KL of a mix is the sum of what its units in the lower format cost alone; so the units are ordered by
KL alone per byte that the lower format saves, and the first m of them stay as in the baseline. How
many must is not left to the model, which only guesses where to look: mixes are measured, some at a
time, until one meets the bound and the one that keeps a unit less does not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import options, stats
from .analysis import ROUNDING_STEPS
from .journal import Record
from .results import LayerSensitivity, Mix, Sensitivity
from .settings import CONTROL_FORMAT

Part = Literal["k", "v", "kv"]
PARTS: tuple[Part, ...] = ("k", "v", "kv")
#: The default bound of a mix, as a share of the KL that raises the alarm for its lower format
#: (stats.kl_allowance): sound caches lie at a third of that.
ALARM_SHARE = 0.5
#: The bootstrap's blocks hold 64 to 512 tokens of one window: as long as they can be with at least
#: so many blocks, for an interval from few blocks is too narrow.
_BLOCKS = 32
_BLOCK_TOKENS = (64, 512)
#: Mixes that are measured together, at most: two about the guess, and the others spread over the
#: gap, which shrinks to a fifth.
_TRIALS = 6


class Unit(NamedTuple):
    layer: int
    part: Part


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is to be found out of one lower format of one model; stored as a record."""

    model: str  # its label
    lane: str  # name of the lower format's lane
    base: options.Lane
    low: options.Lane
    parts: tuple[Part, ...]
    task: str
    length: int  # of a window
    keys: tuple[str, ...]  # of the windows
    kl_bound: float | None  # None: ALARM_SHARE of the KL that raises the alarm
    n_kv_heads: int
    head_dim: int
    kv_rank: int  # of latent attention, else 0

    def record(self) -> Record:
        return {"kind": "layers_asked", **asdict(self)}

    @classmethod
    def of(cls, record: Record) -> Sweep:
        given = {field.name: record[field.name] for field in fields(cls)}
        for name in ("base", "low"):
            pairs = [(k, v) for k, v in given[name]["layers"]]
            given[name] = options.Lane(given[name]["name"], pairs, given[name]["scales"])
        return cls(**given | {"parts": tuple(given["parts"]), "keys": tuple(given["keys"])})

    @property
    def n_layers(self) -> int:
        return len(self.base.layers)

    @property
    def n_rows(self) -> int:
        """Scored tokens, each computed from the one before it."""
        return len(self.keys) * (self.length - 1)

    def units(self, parts: Sequence[Part]) -> list[Unit]:
        """By layer. Where only one of K and V differs, "kv" is that one."""
        return [
            Unit(layer, part)
            for layer, pairs in enumerate(zip(self.base.layers, self.low.layers, strict=True))
            for part in parts
            if any(pairs[0]["kv".index(half)] != pairs[1]["kv".index(half)] for half in part)
        ]

    def lowered(self, units: Iterable[Unit]) -> options.Lane:
        """The baseline with these units in the lower format."""
        halves = {(unit.layer, half) for unit in units for half in unit.part}
        layers = [
            tuple((low if (layer, half) in halves else base)[place] for place, half in _HALVES)
            for layer, (base, low) in enumerate(zip(self.base.layers, self.low.layers, strict=True))
        ]
        return options.Lane("", [(k, v) for k, v in layers], self.low.scales)

    @property
    def full(self) -> options.Lane:
        return self.lowered(self.units(("kv",)))

    @property
    def control(self) -> options.Lane:
        return options.Lane("", [(CONTROL_FORMAT, CONTROL_FORMAT)] * self.n_layers)

    def table(self) -> list[options.Lane]:
        """The lanes that the table of layers needs, beside the baseline."""
        alone = [self.lowered([unit]) for unit in self.units(self.parts)]
        return _unique([self.full, self.control, *alone])

    def mixable(self) -> list[Unit]:
        """What a mix may choose; nothing if not all of K and V was asked for."""
        if {"k", "v"} <= set(self.parts):
            return self.units(("k", "v"))
        return self.units(("kv",)) if "kv" in self.parts else []

    def bytes_per_token(self, lane: options.Lane) -> int:
        shape = {
            "n_kv_heads": self.n_kv_heads, "head_dim": self.head_dim, "kv_rank": self.kv_rank,
        }  # fmt: skip
        return options.token_bytes(shape, [lane])

    def asked_for(self, lanes: Sequence[options.Lane]) -> int:
        """Rows times layers of these lanes."""
        return self.n_rows * self.n_layers * len(lanes)

    def computed(self, lanes: Sequence[options.Lane]) -> int:
        """Of these: the first lane's, and of the others those from the first layer on that is not
        the first lane's. (As score_lanes does, where all fit into one engine.)"""
        return self.n_rows * (self.n_layers + sum(map(self._above_fork, lanes[1:])))

    def _above_fork(self, lane: options.Lane) -> int:
        pairs = zip(self.base.layers, lane.layers, strict=True)
        fork = next((i for i, (base, own) in enumerate(pairs) if base != own), self.n_layers)
        return self.n_layers - fork


_HALVES = ((0, "k"), (1, "v"))


def name(lane: options.Lane) -> str:
    """A lane's name in the records: its formats as kv_cache_dtype says them."""
    return json.dumps(options.spelled(lane), sort_keys=True)


def _unique(lanes: Iterable[options.Lane]) -> list[options.Lane]:
    return list({name(lane): lane for lane in lanes}.values())


# ---- what was measured -----------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """A lane beside the baseline, over all windows: [n] each."""

    kl: NDArray[np.float64]
    top1: NDArray[np.bool_]
    blocks: NDArray[np.int64]  # the same number: drawn together by the bootstrap

    @property
    def mean(self) -> float:
        """inf if one token's KL is not a finite number: nothing is worse."""
        return float(self.kl.mean()) if np.isfinite(self.kl).all() else math.inf

    @property
    def interval(self) -> stats.Interval | None:
        if not math.isfinite(self.mean) or self.blocks.max(initial=0) < 1:
            return None
        return stats.block_bootstrap(self.kl, self.blocks.tolist())


class Measured:
    """The records of one model by lane and window."""

    def __init__(self, records: Iterable[Record], model: str) -> None:
        self._found: dict[tuple[str, str], Mapping[str, Any]] = {}
        for record in records:
            if record["kind"] == "layers" and record["model"] == model:
                self.add(record)

    def add(self, record: Record) -> None:
        for lane, figures in record["lanes"].items():
            self._found[lane, record["key"]] = figures

    def has(self, lane: options.Lane, key: str) -> bool:
        return (name(lane), key) in self._found

    def figures(self, lane: options.Lane, keys: Sequence[str]) -> Figures | None:
        """None unless all of these windows were measured."""
        own = [self._found.get((name(lane), key)) for key in keys]
        windows = [window for window in own if window is not None]
        if len(windows) < len(own) or not windows:
            return None
        kl = [np.asarray(window["kl"], np.float64) for window in windows]
        return Figures(
            np.concatenate(kl),
            np.concatenate([np.asarray(window["top1"], np.bool_) for window in windows]),
            _blocks([values.size for values in kl]),
        )


def _blocks(sizes: Sequence[int]) -> NDArray[np.int64]:
    """Each token's block, numbered over all windows: equal parts of a window."""
    least, most = _BLOCK_TOKENS
    labels, first = [], 0
    for size in sizes:
        count = max(-(-_BLOCKS // len(sizes)), -(-size // most))
        count = max(min(count, size // least), 1)
        labels.append(first + np.arange(size, dtype=np.int64) * count // size)
        first += count
    return np.concatenate(labels)


# ---- the mix ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Search:
    """How far it is. trials: mean KL by the number of units kept."""

    order: tuple[Unit, ...]  # kept first
    bound: float
    trials: Mapping[int, float]
    wanted: tuple[int, ...]  # what must be measured next; empty: found


def _search(sweep: Sweep, measured: Measured) -> _Search | None:
    """Played from its beginning with what is known, so that it does not depend on where a crash
    left it. None before the table is there."""
    units = sweep.mixable()
    figures = {unit: measured.figures(sweep.lowered([unit]), sweep.keys) for unit in units}
    alone = {unit: found.mean for unit, found in figures.items() if found is not None}
    full = measured.figures(sweep.full, sweep.keys)
    bound = _bound(sweep, measured)
    if not units or len(alone) < len(units) or full is None or bound is None:
        return None
    order = _order(sweep, alone)

    def mean_of(m: int) -> float | None:
        found = measured.figures(sweep.lowered(order[m:]), sweep.keys)
        return None if found is None else found.mean

    trials = {0: full.mean}
    guess = _predicted([alone[unit] for unit in order], bound)
    while points := _between(len(order), guess, trials, bound):
        found = {m: mean_of(m) for m in points}
        known = {m: kl for m, kl in found.items() if kl is not None}
        if len(known) < len(found):
            return _Search(order, bound, trials, tuple(points))
        trials |= known
    return _Search(order, bound, trials, ())


def _met(kl: float, bound: float) -> bool:
    return math.isfinite(kl) and kl <= bound


def _bound(sweep: Sweep, measured: Measured) -> float | None:
    if sweep.kl_bound is not None:
        return sweep.kl_bound
    control = measured.figures(sweep.control, sweep.keys)
    if control is None:
        return None
    step = max(ROUNDING_STEPS[name] for pair in sweep.low.layers for name in pair)
    return ALARM_SHARE * stats.kl_allowance(step) * control.mean


def _order(sweep: Sweep, alone: Mapping[Unit, float]) -> tuple[Unit, ...]:
    """By KL alone per byte that the lower format saves, the dearest first. A unit in which it
    saves nothing comes before all."""
    whole = sweep.bytes_per_token(sweep.base)

    def price(unit: Unit) -> float:
        saved = whole - sweep.bytes_per_token(sweep.lowered([unit]))
        return alone[unit] / saved if saved > 0 else math.inf

    return tuple(sorted(alone, key=lambda unit: -price(unit)))


def _predicted(alone: Sequence[float], bound: float) -> int:
    """How many must stay by the additive model. Any change at all moves predictions by the noise
    of bf16: the least KL alone is taken for that, and counts once."""
    floor = min(alone)
    rest = [kl - floor for kl in alone]
    return next((m for m in range(len(rest)) if floor + sum(rest[m:]) <= bound), len(rest))


def _between(n: int, guess: int, trials: Mapping[int, float], bound: float) -> list[int]:
    """Which m to measure next: spread over the gap between the largest that misses the bound and
    the smallest that meets it (n, all of them, is the baseline and would), and about the guess."""
    high = min((m for m, kl in trials.items() if _met(kl, bound)), default=n)
    low = max((m for m in trials if m < high), default=-1)
    if high == 0:
        return []
    spread = {low + (high - low) * i // (_TRIALS - 1) for i in range(1, _TRIALS - 1)}
    return sorted(m for m in spread | {guess - 1, guess} if low < m < high)


def trials(sweep: Sweep, measured: Measured) -> list[options.Lane]:
    """The mixes to measure next; empty: the search has ended, or cannot begin."""
    found = _search(sweep, measured)
    return [] if found is None else [sweep.lowered(found.order[m:]) for m in found.wanted]


def _mix(sweep: Sweep, measured: Measured) -> Mix | None:
    """None while the search goes on. Where every mix misses the bound, the best of them."""
    found = _search(sweep, measured)
    if found is None or found.wanted:
        return None
    met = [m for m, kl in found.trials.items() if _met(kl, found.bound)]
    chosen = min(met) if met else min(found.trials, key=lambda m: (found.trials[m], m))
    lane = sweep.lowered(found.order[chosen:])
    figures = measured.figures(lane, sweep.keys)
    assert figures is not None
    return Mix(
        kv_cache_dtype=options.spelled(lane),
        bytes_per_token=sweep.bytes_per_token(lane),
        kl=figures.mean,
        interval=figures.interval,
        bound=found.bound,
        met=bool(met),
        tried=tuple(
            (m, kl, sweep.bytes_per_token(sweep.lowered(found.order[m:])))
            for m, kl in sorted(found.trials.items())
        ),
    )


# ---- all of it -------------------------------------------------------------------------------


def findings(records: Sequence[Record]) -> dict[str, Sensitivity]:
    """By lane, as far as the records go: of the windows in which all of the table was measured."""
    asked = {record["lane"]: record for record in records if record["kind"] == "layers_asked"}
    found = {}
    for lane, record in asked.items():
        sweep = Sweep.of(record)
        result = _sensitivity(sweep, Measured(records, sweep.model))
        if result is not None:
            found[lane] = result
    return found


def _sensitivity(sweep: Sweep, measured: Measured) -> Sensitivity | None:
    table = sweep.table()
    keys = [key for key in sweep.keys if all(measured.has(lane, key) for lane in table)]
    done = replace(sweep, keys=tuple(keys))
    full, control = measured.figures(done.full, keys), measured.figures(done.control, keys)
    if full is None or control is None:
        return None
    computed = done.computed([done.base, *table])
    return Sensitivity(
        lane=done.lane,
        text=f"{done.task}, {len(keys)} x {done.length} tokens",
        n_tokens=full.kl.size,
        computed=computed,
        skipped=done.asked_for([done.base, *table]) - computed,
        layers=tuple(_layers(done, measured)),
        full=full.mean,
        control=control.mean,
        mix=_mix(sweep, measured),
        by_layer={"windows": len(sweep.keys), "length": sweep.length, "parts": list(sweep.parts)},
        kl_bound=sweep.kl_bound,
    )


def _layers(sweep: Sweep, measured: Measured) -> Iterator[LayerSensitivity]:
    for unit in sweep.units(sweep.parts):
        figures = measured.figures(sweep.lowered([unit]), sweep.keys)
        assert figures is not None
        yield LayerSensitivity(
            layer=unit.layer,
            part=unit.part,
            kl=figures.mean,
            interval=figures.interval,
            top1=float(figures.top1.mean()),
        )
