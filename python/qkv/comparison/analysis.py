"""From the journal's records to what they say: a pure function. The records may come in any order
and be those of a comparison that still runs.

Of the header it reads `lanes` (fields of results.Lane), and of `settings` the margin and `tasks`, a
list of {"task", "kind", "asked", "size", "chance"}. Formulas: qkv.stats. A lane's verdict over all
tasks is made in verdicts.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import stats
from .._core import Error
from ..outputs import json_ready
from . import forced, paired, verdicts
from .journal import Record
from .results import (
    Findings,
    Kl,
    Lane,
    LaneResult,
    Pair,
    Rerun,
    Sensitivity,
    TaskResult,
    TwoByTwo,
    control_lane,
)

#: Outputs of fewer tokens on average say little about long ones.
_SHORT_OUTPUT = 512
SHORT = "short generation only: damage grows with length"


@dataclass(frozen=True)
class _Study:
    """What was compared, and the records by what they are about."""

    lanes: tuple[Lane, ...]
    margin: float
    tasks: Mapping[str, Mapping[str, Any]]
    records: Mapping[tuple[str, str], Sequence[Record]]  # by kind and task; "" where there is none

    @property
    def names(self) -> list[str]:
        return [lane.name for lane in self.lanes]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(lane.model for lane in self.lanes))

    def of(self, kind: str, task: str = "") -> Sequence[Record]:
        return self.records.get((kind, task), ())

    def first(self, model: str) -> Lane:
        """The lane that the others over the same weights were scored against."""
        return next(lane for lane in self.lanes if lane.model == model)

    def control(self, model: str) -> Lane | None:
        return control_lane(self.lanes, model)


def findings(
    header: Mapping[str, Any],
    records: Iterable[Record],
    sensitivity: Mapping[str, Sensitivity] | None = None,
) -> Findings:
    """Error if a record is of a task or lane that the header does not have."""
    study = _study(header, records)
    warnings: list[str] = []
    results = {name: _task(study, name, warnings) for name in study.tasks}
    results = _adjusted(study, results)
    grids = tuple(two_by_two(study.lanes, results))
    rerun = _rerun(study)
    return Findings(
        settings=dict(header["settings"]),
        environment=dict(header["environment"]),
        lanes=tuple(_described(study)),
        margin=study.margin,
        tasks=results,
        verdicts=verdicts.of_lanes(study.lanes, results),
        rerun=rerun,
        sensitivity=dict(sensitivity or {}),
        two_by_two=grids,
        warnings=(*_warnings(study, rerun), *warnings),
    )


def to_json(found: Findings) -> dict[str, Any]:
    """As plain data for json.dumps: an interval is a list, a number that JSON does not have (NaN,
    infinity) is None."""
    plain: dict[str, Any] = _plain(found)
    return plain


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return json_ready(value)


def _study(header: Mapping[str, Any], records: Iterable[Record]) -> _Study:
    lanes = tuple(Lane(**lane) for lane in header["lanes"])
    settings = header["settings"]
    tasks = {task["task"]: task for task in settings["tasks"]}
    names = {lane.name for lane in lanes}
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        kind = record["kind"]
        if kind in ("answer", "forced"):
            if record["task"] not in tasks:
                raise Error(f"{kind} record of {record['task']!r}: no task of this comparison")
            unknown = sorted(set(record["lanes"]) - names)
            if unknown:
                raise Error(f"{kind} record of {unknown[0]!r}: no lane of this comparison")
            found.setdefault((kind, record["task"]), []).append(record)
        else:
            found.setdefault((kind, ""), []).append(record)
    return _Study(lanes, float(settings["margin"]), tasks, found)


# ---- one task --------------------------------------------------------------------------------


def _task(study: _Study, name: str, warnings: list[str]) -> TaskResult:
    """Without what needs the other tasks (Holm's adjustment)."""
    asked = study.tasks[name]
    done = paired.rows(study.of("answer", name), study.names)
    scored = {model: _scored(study, name, model) for model in study.models}
    kl = _kl(study, name, scored)
    common = set.intersection(*({row["key"] for row in found} for found in scored.values()))
    lanes = {}
    for lane in study.lanes:
        own = [row for row in scored[lane.model] if row["key"] in common]
        text = asked["kind"] == "text"
        lanes[lane.name] = LaneResult(
            lane=lane.name,
            answers=paired.answers(done, lane.name),
            pair=_pair(study, name, done, lane, kl.get(lane.name)),
            kl=kl.get(lane.name),
            perplexity=forced.perplexity(own, lane.name) if text else None,
            strata=paired.strata(done, lane.name),
        )
    if asked["kind"] == "generate":
        lanes = _with_divergence(study, done, lanes)
    n = len(common) if asked["kind"] == "text" else len(done)
    result = TaskResult(
        task=name,
        kind=asked["kind"],
        n=n,
        asked=max(int(asked["asked"]), n),
        size=max(int(asked["size"]), n),
        chance=float(asked["chance"]),
        note=_note(study, asked, lanes),
        lanes=lanes,
    )
    warnings += _task_warnings(study, result, done, scored)
    return result


def _scored(study: _Study, name: str, model: str) -> list[Record]:
    return forced.rows(row for row in study.of("forced", name) if row["model"] == model)


def _kl(study: _Study, name: str, scored: Mapping[str, Sequence[Record]]) -> dict[str, Kl]:
    """By lane. The control lanes come first: the others are held against them."""
    by_row = study.tasks[name]["kind"] != "text"
    found: dict[str, Kl] = {}
    for lane in sorted(study.lanes, key=lambda lane: not lane.control):
        against = study.first(lane.model).name
        tokens = forced.tokens(scored[lane.model], lane.name, against, by_row=by_row)
        if tokens is not None:
            control = None if lane.control else _control_mean(study, lane, found)
            found[lane.name] = forced.measure(
                tokens, control=control, against=against, step=rounding_step(lane)
            )
    return found


#: Relative rounding step of each format in steps of bf16, which has 8 significant bits.
ROUNDING_STEPS = {
    "float32": 1, "bf16": 1, "bf16_stochastic": 1, "fp8_e4m3": 16, "mxfp8": 16, "fp8_e5m2": 32,
    "nvfp4": 64, "fp4_mx_block16": 64, "fp8_ds_mla": 16,
}  # fmt: skip


def rounding_step(lane: Lane) -> int:
    """The coarsest of the formats that the lane has in some layer. What "auto" stood for is in its
    name alone ("fp8_e4m3#2", "k=fp8_e4m3,v=nvfp4", "fp8_e4m3,mixed"), unless the user named it."""
    given = lane.kv_cache_dtype
    names = [*_names(given)]
    if not (isinstance(given, Mapping) and "name" in given):
        names += re.findall(r"\w+", lane.kv_name)
    return max((ROUNDING_STEPS.get(name, 1) for name in names), default=1)


def _names(given: Any) -> Iterator[str]:
    """The names of formats in a kv_cache_dtype, "auto" among them."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for key, entry in given.items():
            if key not in ("name", "scales"):
                yield from _names(entry)


def _control_mean(study: _Study, lane: Lane, found: Mapping[str, Kl]) -> float | None:
    control = study.control(lane.model)
    own = found.get(control.name) if control else None
    # A mean of zeros may come out as less than zero by rounding.
    return max(own.mean, 0.0) if own and math.isfinite(own.mean) else None


def _pair(
    study: _Study, name: str, done: Sequence[paired.Row], lane: Lane, kl: Kl | None
) -> Pair | None:
    base = study.lanes[0]
    if lane is base:
        return None
    found = paired.pair(done, base.name, lane.name)
    before = paired.answers(done, base.name)
    if found is None or before is None or lane.control:
        return found
    asked = study.tasks[name]
    verdict = stats.verdict(
        found.lost,
        found.gained,
        before.n,
        before.correct,
        margin=study.margin,
        chance=float(asked["chance"]),
        kl_alarm=kl is not None and kl.alarm and not kl.not_finite,
        task_size=max(int(asked["size"]), before.n),
    )
    if kl is not None and kl.not_finite:
        reason = f"{verdicts.not_finite(kl)}; {verdict.reason}"
        verdict = stats.Verdict("NOT SAFE", reason, verdict.interval)
    return replace(found, verdict=verdict)


def _with_divergence(
    study: _Study, done: Sequence[paired.Row], lanes: Mapping[str, LaneResult]
) -> dict[str, LaneResult]:
    base = study.names[0]
    found = {name: paired.divergence(done, base, name) for name in study.names[1:]}
    changed = dict(lanes)
    for lane in study.lanes[1:]:
        own, control = found[lane.name], study.control(lane.model)
        beside = found[control.name] if control else None
        if own is not None and beside is not None:
            own = replace(own, excess=own.hazard - beside.hazard)
        changed[lane.name] = replace(lanes[lane.name], divergence=own)
    return changed


def _note(study: _Study, asked: Mapping[str, Any], lanes: Mapping[str, LaneResult]) -> str:
    answers = lanes[study.names[0]].answers
    if asked["kind"] != "generate" or answers is None or asked["task"] == "needle":
        return ""  # a needle's prompts are long
    return SHORT if answers.mean_tokens < _SHORT_OUTPUT else ""


# ---- over the tasks --------------------------------------------------------------------------


def _adjusted(study: _Study, results: Mapping[str, TaskResult]) -> dict[str, TaskResult]:
    """With each lane's p values adjusted for there being several tasks."""
    changed = {name: dict(result.lanes) for name, result in results.items()}
    for lane in study.names[1:]:
        pairs = {name: own for name in results if (own := results[name].lanes[lane].pair)}
        p_holm = stats.holm(own.p_exact for own in pairs.values())
        for (name, own), p in zip(pairs.items(), p_holm, strict=True):
            changed[name][lane] = replace(changed[name][lane], pair=replace(own, p_holm=p))
    return {name: replace(result, lanes=changed[name]) for name, result in results.items()}


def two_by_two(lanes: Sequence[Lane], results: Mapping[str, TaskResult]) -> Iterator[TwoByTwo]:
    """Every 2 x 2 that has the baseline in its corner, for every task with answers."""
    base = lanes[0]
    cells = {(lane.model, lane.kv_name): lane.name for lane in lanes if not lane.control}
    models = dict.fromkeys(model for model, _ in cells if model != base.model)
    formats = dict.fromkeys(kv for _, kv in cells if kv != base.kv_name)
    grids = [((base.model, model), (base.kv_name, kv)) for model in models for kv in formats]
    for result in results.values():
        found = {cell: result.lanes[name].answers for cell, name in cells.items()}
        share = {cell: own.accuracy for cell, own in found.items() if own is not None}
        for names, kv in grids:
            corners = [(model, dtype) for model in names for dtype in kv]
            if all(corner in share for corner in corners):
                a, b, c, d = (share[corner] for corner in corners)
                yield TwoByTwo(
                    task=result.task,
                    models=names,
                    kv=kv,
                    accuracy=((a, b), (c, d)),
                    weights_loss=a - c,
                    kv_loss=a - b,
                    both_loss=a - d,
                    interaction=(a - d) - (a - c) - (a - b),
                )


def _rerun(study: _Study) -> Rerun | None:
    """Over the models, in their order."""
    by_model = {record["model"]: record for record in study.of("rerun")}
    found = [by_model[model] for model in study.models if model in by_model]
    if not found:
        return None
    differences = [record["first_difference"] for record in found if not record["identical"]]
    return Rerun(
        items=sum(int(record["items"]) for record in found),
        lanes=sum(lane.model in by_model for lane in study.lanes),
        identical=not differences,
        first_difference=differences[0] if differences else "",
    )


def _described(study: _Study) -> Iterator[Lane]:
    """The lanes with what was found out about them while they ran."""
    own: dict[str, dict[str, Any]] = {name: {} for name in study.names}
    for kind in ("model", "clips", "speed"):
        for record in study.of(kind):
            for name, values in record["lanes"].items():
                own[name].update(values)
    base = own[study.names[0]]
    for lane in study.lanes:
        values = own[lane.name]
        yield replace(
            lane,
            scales=values.get("scales", lane.scales),
            pool_tokens=values.get("pool_tokens", lane.pool_tokens),
            clipped=values.get("clipped", lane.clipped),
            flushed=values.get("flushed", lane.flushed),
            decode_speed=_ratio(values.get("decode"), base.get("decode")),
            prefill_speed=_ratio(values.get("prefill"), base.get("prefill")),
        )


def _ratio(own: float | None, first: float | None) -> float:
    return own / first if own and first else 0.0


# ---- what the reader must know beside the figures --------------------------------------------


def _warnings(study: _Study, rerun: Rerun | None) -> Iterator[str]:
    if rerun is not None and not rerun.identical:
        yield f"the rerun check failed: not the same bits again ({rerun.first_difference})"
    if not any(lane.control for lane in study.lanes):
        yield "no control lane: what any change at all would cause is not known, no KL alarm"
        return
    for model in study.models:
        control = study.control(model)
        several = sum(lane.model == model for lane in study.lanes) > 1
        if control is not None and control.model != model and several:
            yield f"{model}: has no control lane; its KL is held against that of {control.name}"


def _task_warnings(
    study: _Study,
    result: TaskResult,
    done: Sequence[paired.Row],
    scored: Mapping[str, Sequence[Record]],
) -> Iterator[str]:
    name = result.task
    if result.n < result.asked:
        yield f"{name}: not finished, {result.n} of {result.asked} items"
    for lane in study.lanes:
        failed = sum("error" in row.lanes[lane.name] for row in done)
        if failed:
            yield f"{name}: {failed} items that {lane.name} could not run count for no lane"
    unscored = sum("error" in record for record in study.of("forced", name))
    if unscored:
        yield f"{name}: {unscored} rows could not be scored and have no KL"
    for model in study.models:
        lane = study.first(model)
        bad = forced.not_finite(scored[model], lane.name)
        if bad:
            yield f"{name}: {lane.name}: {bad} log-probabilities are not finite"
    yield from _kl_warnings(study, result)


def _kl_warnings(study: _Study, result: TaskResult) -> Iterator[str]:
    name = result.task
    found = {lane: own.kl for lane, own in result.lanes.items() if own.kl is not None}
    for lane in study.lanes:
        kl = found.get(lane.name)
        if kl is None:
            continue
        if kl.not_finite:
            yield f"{name}: {lane.name}: {verdicts.not_finite(kl)}; its figures leave them out"
        if kl.interval is None:
            yield f"{name}: {lane.name}: too few rows for an interval of KL, and so for an alarm"
        if lane.control and kl.mean <= 0:
            yield (
                f"{name}: the KL of {lane.name} is 0: its rounding changed nothing, and any KL at "
                "all is an alarm"
            )
    if any(lane.control for lane in study.lanes) and found:
        means = [
            found[lane.name].mean for lane in study.lanes if lane.control and lane.name in found
        ]
        if not any(math.isfinite(mean) for mean in means):
            yield f"{name}: the control lane has no KL, so there is no KL alarm"
