"""compare() and what it returns."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..run import Hook
from . import analysis, layers, report, sensitivity
from .journal import Journal, Record, read
from .results import Findings, LaneVerdict, Sensitivity, TaskResult
from .runner import Runner
from .settings import RERUN_ITEMS, Plan, Say, plan


class Comparison:
    """What a comparison found. Prints as a table, in a notebook as HTML.

    verdicts: by lane, over all tasks. tasks: by name, with every lane's figures. sensitivity: by
    lane, where by_layer was asked for: each layer alone, and the mix.
    findings: all of it as plain data (qkv.comparison.results)."""

    def __init__(self, header: Record, records: Sequence[Record]) -> None:
        self._header, self._records = header, list(records)
        self.findings: Findings = analysis.findings(
            header, self._records, layers.findings(self._records)
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """Of a journal (the `resume` file), finished or not, without computing anything."""
        return cls(*read(path))

    @property
    def verdicts(self) -> Mapping[str, LaneVerdict]:
        return self.findings.verdicts

    @property
    def tasks(self) -> Mapping[str, TaskResult]:
        return self.findings.tasks

    @property
    def sensitivity(self) -> Mapping[str, Sensitivity]:
        return self.findings.sensitivity

    def rows(self, task: str) -> list[dict[str, Any]]:
        """The stored rows of a task, one per item and model, in the order of the data set: key,
        place, stratum, and by lane what was answered (kind "answer") or predicted ("forced")."""
        if task not in self.findings.tasks:
            raise ValueError(f"task {task!r}: must be one of {', '.join(self.findings.tasks)}")
        rows = [record for record in self._records if record.get("task") == task]
        return sorted(rows, key=lambda row: (row["kind"], row.get("place", 0), row["key"]))

    def to_dict(self) -> dict[str, Any]:
        return analysis.to_json(self.findings)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The findings as JSON; also into a file."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1)
        return _written(path, text)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page that needs nothing else: tables, plots, what was run. Also into a file."""
        return _written(path, report.page(self.findings))

    def to_pandas(self) -> Any:
        """Every figure, as data frames by name: "results" by task and lane, "lanes", "buckets",
        "strata", "layers" (needs pandas: pip install 'qkv[report]')."""
        return report.to_pandas(self.findings)

    def __str__(self) -> str:
        return report.text(self.findings)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return report.html(self.findings)


def _written(path: str | os.PathLike[str] | None, text: str) -> str:
    """Whole or not at all."""
    if path is not None:
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        part.write_text(text, encoding="utf-8", errors="surrogatepass")
        part.replace(target)
    return text


def compare(
    models: Any,
    kv_cache_dtypes: Sequence[Any] = ("bf16", "fp8_e4m3"),
    tasks: Any = ("gsm8k",),
    *,
    limit: int | Mapping[str, int] | None = None,
    margin: float = 0.01,
    control: bool = True,
    grid: bool = True,
    chat: bool = False,
    rerun_items: int = RERUN_ITEMS,
    speed: bool = True,
    by_layer: bool | Mapping[str, Any] = False,
    kl_bound: float | None = None,
    resume: str | os.PathLike[str] | None = None,
    on_finish: Hook | None = None,
    progress: bool = True,
    **engine_options: Any,
) -> Comparison:
    """Is a lower precision safe for this model and these tasks?

    models: one, or several, as Engine takes them; they are loaded in turn. The first model with
        the first KV format is the baseline.
    kv_cache_dtypes: formats, each as Engine takes one: lanes over the same weights. grid=False
        pairs the i-th model with the i-th format; by default each model runs each format.
    tasks: names (qkv.tasks.names()) or qkv.tasks.Task objects. limit: items of each task, or a
        mapping by name; None: all of them.
    margin: the largest loss of accuracy that would be accepted, declared beforehand, as a share.
    control: one lane more, bf16 with stochastic rounding: what any change at all would cause. KL
        is judged against it.
    chat: prompts through the model's chat template.
    rerun_items: so many items run again first, in another order and batch: bits must be equal, or
        Error.
    speed: time each lane's prompts and decoding, too, some 4,000 tokens a lane.
    by_layer: also each layer's K and V alone in each lower format, on WikiText-2, and the cheapest
        mix of formats by layer whose mean KL stays below kl_bound (default: half of what raises
        the alarm). True, or a mapping: "windows" (4) of "length" (512) tokens, "parts" (("k", "v"),
        or "kv" for both at once). What it costs is said before it starts.
    resume: a file for the rows. What is in it is not computed again; other settings are an Error.
    on_finish(output): once per generated row, as in Engine.generate; stored with the row.
    engine_options: Engine's.

    Errors: ValueError and TypeError before anything runs; Error for a rerun that differs."""
    planned = plan(
        models,
        kv_cache_dtypes,
        tasks,
        limit=limit,
        margin=margin,
        control=control,
        grid=grid,
        chat=chat,
        rerun_items=rerun_items,
        speed=speed,
        engine_options=engine_options,
    )
    if on_finish is not None and not callable(on_finish):
        raise TypeError(f"on_finish={on_finish!r:.100}: a function is needed")
    by_layer_ = sensitivity.wanted(by_layer, kl_bound)
    if by_layer_ is not None:
        sensitivity.check(planned, by_layer_)
    say: Say = _say if progress else _silent
    with Journal(resume, planned.header()) as journal:
        _run(planned, journal, on_finish, say)
        if by_layer_ is not None:
            for entry in planned.models:
                sensitivity.run(planned, entry, journal, by_layer_, say)
        return Comparison(journal.header, journal.records)


def _run(planned: Plan, journal: Journal, on_finish: Hook | None, say: Say) -> None:
    for entry in planned.models:
        runner = Runner(planned, entry, journal, on_finish=on_finish, say=say)
        try:
            runner.run()
        finally:
            runner.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    del line
