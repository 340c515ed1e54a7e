"""A lane's verdict over all tasks.

NOT SAFE    on one task at least: a loss beyond the margin, or a KL alarm (also of a text)
SAFE        on each task with answers, and no alarm
UNINFORMATIVE on each task with answers, and no alarm
NOT ENOUGH DATA otherwise: also where a task has no row yet, and where only a text was scored
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..stats import VerdictKind
from .results import Kl, Lane, LaneResult, LaneVerdict, TaskResult

_LEVEL = 0.05


def not_finite(kl: Kl) -> str:
    return f"KL alarm: no finite KL at {kl.not_finite} of {kl.n_tokens} tokens"


@dataclass(frozen=True)
class _OnTask:
    task: str
    kind: VerdictKind
    reason: str
    lower: float  # of the loss; -1 and 1 where there is no answer
    upper: float


def of_lanes(lanes: Sequence[Lane], results: Mapping[str, TaskResult]) -> dict[str, LaneVerdict]:
    """Of all lanes but the baseline and the control lanes."""
    return {lane.name: _of_lane(lane, lanes, results) for lane in lanes[1:] if not lane.control}


def _of_lane(lane: Lane, lanes: Sequence[Lane], results: Mapping[str, TaskResult]) -> LaneVerdict:
    n_pairs = sum(result.lanes[lane.name].pair is not None for result in results.values())
    found = [
        own
        for result in results.values()
        if (own := _on_task(result, result.lanes[lane.name], n_pairs)) is not None
    ]
    kind, reason = _together(found)
    if kind == "SAFE" and not _any_long(results):
        reason += "; shown for short outputs only: damage grows with length"
    differs = _differs(lanes[0], lane)
    if len(differs) > 1:
        reason = f"{_both_differ(lanes, lane)}; {reason}"
    return LaneVerdict(lane=lane.name, kind=kind, reason=reason, differs=differs)


def _on_task(result: TaskResult, own: LaneResult, n_pairs: int) -> _OnTask | None:
    """None for a text without an alarm: it neither clears nor holds against."""
    pair, kl = own.pair, own.kl
    if pair is not None and pair.verdict is not None:
        reason = pair.verdict.reason
        if pair.interval.lower > 0 and n_pairs > 1:
            reason += f" (p {pair.p_holm:.2g} by Holm over {n_pairs} tasks"
            reason += ")" if pair.p_holm < _LEVEL else ": of so many, one may look so by chance)"
        return _OnTask(result.task, pair.verdict.kind, reason, *pair.interval)
    if kl is not None and kl.alarm:
        return _OnTask(result.task, "NOT SAFE", _alarm(kl), -1.0, 1.0)
    if result.kind == "text":
        return None
    reason = "no item yet that every lane could run"
    return _OnTask(result.task, "NOT ENOUGH DATA", reason, -1.0, 1.0)


def _alarm(kl: Kl) -> str:
    if kl.not_finite or kl.interval is None:
        return not_finite(kl)
    return (
        f"KL alarm: mean KL {kl.mean:.3g} nats, at least {kl.interval.lower:.3g}, is more than the "
        "rounding of the format explains"
    )


def _together(found: Sequence[_OnTask]) -> tuple[VerdictKind, str]:
    if not found:
        return "NOT ENOUGH DATA", "no task with answers was run: KL alone clears nothing"
    kinds: dict[VerdictKind, list[_OnTask]] = {}
    for own in found:
        kinds.setdefault(own.kind, []).append(own)
    if "NOT SAFE" in kinds:
        worst_first = sorted(kinds["NOT SAFE"], key=lambda own: -own.lower)
        return "NOT SAFE", _named(worst_first, "NOT SAFE", kinds)
    if set(kinds) == {"SAFE"}:
        nearest = max(found, key=lambda own: own.upper)
        if len(found) == 1:
            return "SAFE", f"{nearest.task}: {nearest.reason}"
        return "SAFE", f"on each of {len(found)} tasks; the least sure, {nearest.task}: " + (
            nearest.reason
        )
    if set(kinds) == {"UNINFORMATIVE"}:
        return "UNINFORMATIVE", _named(found, "UNINFORMATIVE", {})
    open_ = kinds.get("NOT ENOUGH DATA") or kinds["UNINFORMATIVE"]
    return "NOT ENOUGH DATA", _named(open_, open_[0].kind, kinds)


def _named(
    deciding: Sequence[_OnTask], kind: VerdictKind, kinds: Mapping[VerdictKind, Sequence[_OnTask]]
) -> str:
    """The first deciding task with its reason, and what the others say."""
    first, *more = deciding
    said = f"{first.task}: {first.reason}"
    if kind == "UNINFORMATIVE" and kinds:
        said = f"{first.task} is UNINFORMATIVE: {first.reason}"
    if more:
        said += f"; {kind} on {', '.join(own.task for own in more)}, too"
    for other, tasks in kinds.items():
        if other != kind:
            said += f"; {other} on {', '.join(own.task for own in tasks)}"
    return said


def _any_long(results: Mapping[str, TaskResult]) -> bool:
    return any(result.kind == "generate" and not result.note for result in results.values())


def _differs(base: Lane, lane: Lane) -> tuple[str, ...]:
    weights = ("weights",) if lane.model != base.model else ()
    return weights if _same_kv(base, lane) else (*weights, "KV cache")


def _same_kv(a: Lane, b: Lane) -> bool:
    """By what a name stands for ("auto" is bf16 for one model; "bf16#2" is bf16 again), and else by
    what was given for layers, halves and scales, which no name says."""
    given = (a.kv_cache_dtype, b.kv_cache_dtype)
    if any(isinstance(dtype, Mapping) for dtype in given):
        return bool(given[0] == given[1])
    return a.kv_name.partition("#")[0] == b.kv_name.partition("#")[0]


def _both_differ(lanes: Sequence[Lane], lane: Lane) -> str:
    """Names the lanes of the 2 x 2 that are still to be run."""
    base, there = lanes[0], {(own.model, own.kv_name) for own in lanes if not own.control}
    corners = [(base.model, lane.kv_name), (lane.model, base.kv_name)]
    missing = [f"{model} / {kv}" for model, kv in corners if (model, kv) not in there]
    said = "two choices differ from the baseline, weights and KV cache"
    if missing:
        return f"{said}: run the 2 x 2 to tell them apart (add {' and '.join(missing)})"
    return f"{said}: the 2 x 2 tells them apart"
