"""The progress bars: rows done and tokens per second, also where there is no terminal; bytes while
a model is loaded."""

import logging
import sys
import time
import warnings
from typing import Any

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm says so and shows a text bar.
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm

_LINE_SECONDS = 10.0
_QUIET_SECONDS = 2.0  # without a terminal, what is done within this needs no line


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def _takes_bar() -> bool:
    return sys.stderr is not None and (sys.stderr.isatty() or _in_notebook())


class Progress:
    """Rows done of a total (None: not known), tokens computed (prompt and output)."""

    def __init__(self, show: bool, total: int | None, what: str = "rows") -> None:
        self._total = total
        self._what = what
        self._rows = 0
        self._given = 0  # of the rows: done before this began
        self._tokens = 0
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        self._lines = show and sys.stderr is not None and not _takes_bar()
        if show and _takes_bar():
            self._bar = tqdm(total=total, unit="row", desc=what, dynamic_ncols=True)

    def _speed(self, now: float) -> str:
        return f"{self._tokens / max(now - self._start, 1e-9):,.0f} tokens/s"

    def step(self, tokens: int) -> None:
        """After each step of the engine."""
        self._tokens += tokens
        if self._bar is None and not self._lines:
            return
        now = time.monotonic()
        if self._bar is not None:
            if now - self._last > 0.5:
                self._last = now
                self._bar.set_postfix_str(self._speed(now), refresh=True)
        elif now - self._last > _LINE_SECONDS:
            self._last = now
            self._line(now)

    def rows(self, count: int = 1) -> None:
        self._rows += count
        if self._bar is not None:
            self._bar.update(count)

    def before(self, count: int) -> None:
        """Rows that were done by an earlier run: they say nothing of how fast this one is."""
        self._given += count
        self._rows += count
        if self._bar is not None:
            self._bar.initial = self._bar.n = self._bar.last_print_n = self._rows
            self._bar.refresh()

    def seconds_left(self, now: float) -> float | None:
        """None where that is not known."""
        done = self._rows - self._given
        if self._total is None or done <= 0 or self._rows > self._total:
            return None
        return (now - self._start) / done * (self._total - self._rows)

    def _line(self, now: float) -> None:
        of = "" if self._total is None else f"/{self._total}"
        text = f"{self._what}: {self._rows}{of}, {now - self._start:.0f} s, {self._speed(now)}"
        left = self.seconds_left(now)
        if left:
            text += f", {left:.0f} s left"
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(self._speed(now), refresh=True)
            self._bar.close()
        elif self._lines and now - self._start > _QUIET_SECONDS:
            self._line(now)
        self._bar, self._lines = None, False


class Loading:
    """Bytes of a checkpoint that are in place and bytes per second; says nothing of what takes less
    than two seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._total = self._done = 0
        self._bar: Any = None
        self._shows_bar = _takes_bar()

    def __call__(self, done: int, total: int) -> None:
        """After each tensor; a second set of weights begins again from 0."""
        now = time.monotonic()
        if total != self._total or done < self._done:
            self.close()
            self._start = self._last = now
            self._total = total
        if self._shows_bar and self._bar is None:
            self._bar = tqdm(
                total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="loading",
                delay=_QUIET_SECONDS, dynamic_ncols=True, leave=False,
            )  # fmt: skip
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif sys.stderr is not None and now - self._last > _LINE_SECONDS:
            self._last = now
            rate = done / max(now - self._start, 1e-9)
            text = (
                f"loading: {done / 2**30:.1f} of {total / 2**30:.1f} GiB, {rate / 2**30:.2f} GiB/s"
            )
            print(text, file=sys.stderr, flush=True)
        self._done = done

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._done = None, 0


def write_log(level: int, line: str) -> None:
    """A line of the core's."""
    levels = (logging.DEBUG, logging.INFO, logging.WARNING)
    logging.getLogger("qkv").log(levels[min(max(level, 0), 2)], line)
