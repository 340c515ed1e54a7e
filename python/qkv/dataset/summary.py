"""What is seen of a run: while it goes on, and at its end."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..outputs import RequestOutput
from ..progress import Progress
from .sink import FAILURES

if TYPE_CHECKING:
    from ..engine import Engine

_STATES = ("ok", "truncated", "too_long", "error")
_EVENT_SECONDS = 10.0
_KV_COUNTS = {"stored": "n_values", "clipped": "n_clipped", "flushed": "n_flushed"}


@dataclass(kw_only=True)
class Summary:
    """A run over a data set. Rows and tokens are this run's, not those of runs before it.

    rows: by state. before: rows that were there already. skipped: input that was left out
    (on_bad_row="skip"). prompt_tokens, output_tokens. seconds: from the first row to the last.
    prefix_hits: the share of prompt tokens that were found in the prefix cache.
    retractions: sequences that had to be computed again because the KV pool was full.
    kv_values: by lane, how many values were "stored" in the KV cache, and how many of these were
    "clipped" and "flushed" to zero. damaged: rows that were lost with a machine and done again.
    path: the output."""

    path: str
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STATES, 0))
    before: int = 0
    skipped: int = 0
    damaged: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    prefix_hits: float = 0.0
    retractions: int = 0
    kv_values: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(self.rows[state] for state in FAILURES)

    def count(self, output: RequestOutput) -> None:
        self.rows[output.state] += 1
        self.prompt_tokens += output.metrics.prompt_tokens
        self.output_tokens += output.metrics.output_tokens

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rate = self.output_tokens / self.seconds if self.seconds > 0 else 0.0
        states = ", ".join(f"{n:,} {state}" for state, n in self.rows.items() if n) or "none"
        lines = [("rows", f"{states}; {self.before:,} there before")]
        if self.skipped:
            lines.append(("skipped", f"{self.skipped:,} bad rows of the input"))
        if self.damaged:
            lines.append(("damaged", f"{self.damaged:,} rows of a lost machine, done again"))
        lines += [
            ("tokens", f"{self.prompt_tokens:,} in, {self.output_tokens:,} out"),
            ("time", f"{self.seconds:,.1f} s, {rate:,.1f} output tokens/s"),
            ("prefix cache", f"{self.prefix_hits:.1%} of the prompt tokens were found in it"),
            ("retractions", f"{self.retractions:,}"),
        ]
        for lane, counts in self.kv_values.items():
            text = "{clipped:,} clipped, {flushed:,} flushed to 0, of {stored:,} values"
            lines.append((f"KV {lane}", text.format(**counts)))
        lines.append(("output", self.path))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


class Counts:
    """The engine's counters since this was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._start = self._read()

    def _read(self) -> Counter[Any]:
        core = self._engine._core
        found: Counter[Any] = Counter(core.counts())
        for place, lane in enumerate(self._engine._lanes):
            counts = core.kv_counts(place)
            for name, what in _KV_COUNTS.items():
                found[lane.name, name] = int(counts[what].sum())
        return found

    def fill(self, summary: Summary) -> None:
        found = self._read()
        found.subtract(self._start)
        reused = found["n_reused_tokens"]
        summary.prefix_hits = reused / max(reused + found["n_prefill_rows"], 1)
        summary.retractions = found["n_retractions"]
        summary.kv_values = {
            lane.name: {name: found[lane.name, name] for name in _KV_COUNTS}
            for lane in self._engine._lanes
        }


class RowsProgress(Progress):
    """The bar with the rows' states; or, with `as_json`, a JSON object for each event on standard
    error: "start", "progress" (every ten seconds), "failed" (a row), "summary"."""

    def __init__(self, show: bool, total: int | None, as_json: bool = False) -> None:
        super().__init__(show and not as_json, total)
        self._as_json = as_json
        self._states: Counter[str] = Counter()
        self._reported = time.monotonic()

    def event(self, name: str, **facts: Any) -> None:
        if self._as_json and sys.stderr is not None:
            text = json.dumps({"event": name, "time": time.time(), **facts}, default=str)
            print(text, file=sys.stderr, flush=True)

    def _speed(self, now: float) -> str:
        states = "".join(f", {n} {state}" for state, n in self._states.items() if state != "ok")
        return super()._speed(now) + states

    def output(self, row: Mapping[str, Any]) -> None:
        state = row["state"]
        self._states[state] += 1
        if state in FAILURES:
            self.event("failed", id=row["id"], state=state, error=row["error"])

    def step(self, tokens: int) -> None:
        super().step(tokens)
        now = time.monotonic()
        if self._as_json and now - self._reported > _EVENT_SECONDS:
            self._reported = now
            self.event("progress", **self._facts(now))

    def _facts(self, now: float) -> dict[str, Any]:
        seconds = now - self._start
        return {
            "rows": self._rows,
            "total": self._total,
            "states": dict(self._states),
            "tokens_per_second": self._tokens / max(seconds, 1e-9),
            "seconds": seconds,
            "seconds_left": self.seconds_left(now),
        }
