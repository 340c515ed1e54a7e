"""What a bench found: a table, JSON, a page in a notebook, a plot."""

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import tables
from .figures import NAMES, Figures
from .simulate import CostModel

#: Where prompts are computed so often that the prefix cache does not hold what is shared.
CLIFF = 2.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A point of a sweep in one arm: figures of each seed, or why there are none."""

    arm: str
    quantization: str | None
    kv_cache_dtype: str
    pool_tokens: int
    bytes_per_token: int
    users: int
    requests: int
    groups: int  # 0: nothing is shared
    shared_tokens: int
    fit_fully: int  # of the longest requests, at a time; one more waits, as qkv.plan has it
    figures: tuple[Figures, ...] = ()
    error: str | None = None

    def mean(self, name: str) -> float:
        """Of a figure over the seeds; nan without figures."""
        return _mean([getattr(run, name) for run in self.figures])

    def sd(self, name: str) -> float:
        """The standard deviation over the seeds; 0 with one."""
        values = [getattr(run, name) for run in self.figures]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every figure as mean, sd, min, max and the seeds' values; null where there are none."""
        found: dict[str, Any] = {
            key: value for key, value in vars(self).items() if key not in ("figures", "error")
        }
        if self.error is not None:
            return found | {"error": self.error}
        for name in NAMES:
            values = [getattr(run, name) for run in self.figures]
            found[name] = {
                "mean": self.mean(name),
                "sd": self.sd(name),
                "min": min(values),
                "max": max(values),
                "values": values,
            }
        return found


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A cost model of this machine, from the runs of an arm."""

    cost: CostModel
    largest_error: float  # of a run's time, relative
    runs: int


#: A column: head, figure, its format, whether the spread stands beside it.
_COLUMNS = (
    ("out tok/s", "output_tokens_per_s", ",.1f", True),
    ("TTFT s", "ttft_mean", ".3f", True),
    ("p99", "ttft_p99", ".3f", False),
    ("TPOT ms", "tpot_mean", ".1f", True),
    ("p99", "tpot_p99", ".1f", False),
    ("goodput/s", "goodput", ".2f", True),
    ("met", "goodput_share", ".0%", False),
    ("running", "most_running", ".0f", False),
    ("waiting", "most_waiting", ".0f", False),
    ("usage", "token_usage", ".2f", False),
)
_PREFIX_COLUMNS = (
    ("hit rate", "hit_rate", ".2f", False),
    ("computed", "prefill_ratio", ".2f", False),
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Cells in the order of the sweep. Prints as a table; `_repr_html_` in a notebook; plot().

    Columns: running and waiting are the most at a time (waiting: for pages); usage is the largest
    share of the pool that was in use; hit rate the prompts' share that the prefix cache had;
    computed says how often the prompts were computed, 1 being each shared prefix once."""

    sweep: str
    model: str
    simulated: bool
    settings: Mapping[str, Any]
    cells: tuple[Cell, ...]
    fitted: Mapping[str, Fitted] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sweep": self.sweep,
            "model": self.model,
            "simulated": self.simulated,
            "settings": dict(self.settings),
            "cells": [cell.to_dict() for cell in self.cells],
            "findings": self.findings(),
            "cost_models": {
                name: {
                    **found.cost.to_dict(),
                    "largest_error": found.largest_error,
                    "runs": found.runs,
                }
                for name, found in self.fitted.items()
            },
        }

    def series(self) -> dict[str, list[Cell]]:
        """Cells by what stays the same along the axis of the sweep, under a name."""
        found: dict[str, list[Cell]] = {}
        several = {
            what: len({getattr(cell, what) for cell in self.cells}) > 1
            for what in ("groups", "users")
        }
        for cell in self.cells:
            name = f"{cell.arm}, {cell.pool_tokens:,} tokens"
            if self.sweep == "shared-prefix":
                parts = [w for w in ("groups", "users") if several[w]]
                name = ", ".join([name, *(f"{getattr(cell, w)} {w}" for w in parts)])
            found.setdefault(name, []).append(cell)
        return found

    def findings(self) -> list[str]:
        """Who waits from where; where the cliff is."""
        find = _waiting if self.sweep == "concurrency" else _cliff
        return [f"{name}: {find(cells)}" for name, cells in self.series().items()]

    def _head(self) -> tuple[tuple[str, ...], tuple[tuple[str, str, str, bool], ...]]:
        if self.sweep == "concurrency":
            return ("KV cache", "pool", "users"), _COLUMNS
        return ("KV cache", "pool", "groups", "users", "shared"), _COLUMNS + _PREFIX_COLUMNS

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows, as text."""
        keys, columns = self._head()
        rows = []
        for cell in self.cells:
            row = [cell.arm, f"{cell.pool_tokens:,}"]
            if self.sweep != "concurrency":
                row.append(str(cell.groups))
            row.append(str(cell.users))
            if self.sweep != "concurrency":
                row.append(f"{cell.shared_tokens:,}")
            rows.append(row + [_shown(cell, *column[1:]) for column in columns])
        return [*keys, *(column[0] for column in columns)], rows

    def _title(self) -> str:
        s = self.settings
        how = "simulated" if self.simulated else "measured"
        lengths = f"{s['input_tokens']}+{s['output_tokens']} tokens"
        if s["spread"]:
            lengths += f" (± {s['spread']:.0%})"
        return (
            f"{self.model}, {self.sweep}, {how}: {lengths}, schedule {s['schedule']}, "
            f"{s['chunk_tokens']} prompt tokens per step, {len(s['seeds'])} seeds; goodput: first "
            f"token within {s['ttft_target']:g} s, then {1000 * s['tpot_target']:g} ms per token"
        )

    def _notes(self) -> list[str]:
        errors = [
            f"{cell.arm}, {cell.users} users, {cell.shared_tokens:,} shared: {cell.error}"
            for cell in self.cells
            if cell.error is not None
        ]
        costs = [
            f"{name}: a step takes {1e3 * f.cost.step_seconds:.3g} ms, and "
            f"{1e6 * f.cost.prefill_row_seconds:.3g} us per row of a prompt, "
            f"{1e6 * f.cost.decode_row_seconds:.3g} us per row of output, "
            f"{1e12 * f.cost.kv_byte_seconds:.3g} ps per byte of KV cache "
            f"(within {f.largest_error:.0%} of {f.runs} runs)"
            for name, f in self.fitted.items()
        ]
        return [*self.findings(), *errors, *costs]

    def __str__(self) -> str:
        return "\n".join([self._title(), tables.text(*self.table()), *self._notes()])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return f"<p>{html.escape(self._title())}</p>{tables.as_html(*self.table())}{notes}"

    def plot(self) -> Any:
        """The figures along the sweep, a line for each arm with the spread over seeds. Needs the
        `report` extra (matplotlib); returns the figure."""
        from .plots import draw  # noqa: PLC0415 (optional, slow to import)

        return draw(self)


def _shown(cell: Cell, name: str, form: str, with_spread: bool) -> str:
    if cell.error is not None:
        return "-"
    scale = 1000.0 if name.startswith("tpot") else 1.0
    text = format(scale * cell.mean(name), form)
    if with_spread and len(cell.figures) > 1:
        text += f" ± {format(scale * cell.sd(name), form)}"
    return text


def _waiting(cells: Sequence[Cell]) -> str:
    fits = cells[0].fit_fully
    text = f"{fits} requests fit at their full length, one waits from {fits + 1} users on"
    last = next((cell for cell in reversed(cells) if cell.error is None), None)
    if last is None:
        return f"{text}; nothing ran"
    running, waiting = (int(last.mean(what)) for what in ("most_running", "most_waiting"))
    ran = f"{last.users - waiting} to {running}" if last.users - waiting < running else f"{running}"
    rest = f"up to {waiting} wait for pages" if waiting else "none waits for pages"
    usage = last.mean("token_usage")
    return f"{text}; with {last.users} users {ran} run, {rest}, usage {usage:.2f}"


def cliff(cells: Sequence[Cell]) -> int | None:
    """The first shared length at which prompts are computed CLIFF times as often as needed, because
    the pool loses the prefixes; None if there is none."""
    for cell in cells:
        if cell.error is None and cell.mean("prefill_ratio") >= CLIFF:
            return cell.shared_tokens
    return None


def _cliff(cells: Sequence[Cell]) -> str:
    sound = [cell for cell in cells if cell.error is None]
    if not sound:
        return "nothing ran"
    at = cliff(sound)
    if at is None:
        most = max(cell.mean("prefill_ratio") for cell in sound)
        return f"no cliff (prompts are computed at most {most:.2f} times)"
    place = next(i for i, cell in enumerate(sound) if cell.shared_tokens == at)
    here, before = sound[place], sound[max(place - 1, 0)]
    return (
        f"cliff at {at:,} shared tokens: prompts are computed {here.mean('prefill_ratio'):.1f} "
        f"times; first token after {here.mean('ttft_mean'):.2f} s "
        f"({before.mean('ttft_mean'):.2f} s at {before.shared_tokens:,})"
    )
