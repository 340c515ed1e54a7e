"""What a report says of Findings, without how it looks. report.py prints it, page.py makes HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .blocks import (
    NONE,
    Block,
    Bullets,
    Code,
    Section,
    Show,
    Table,
    as_code,
    clean,
    kl_cell,
    number,
    p_value,
    percent,
    plural,
    points,
    signed,
    times,
    with_interval,
)
from .results import (
    Findings,
    Kl,
    Lane,
    LaneResult,
    Mix,
    Sensitivity,
    TaskResult,
    TwoByTwo,
    control_lane,
)

#: Characters of the longest bar in a table.
BAR = 20


# ---- who is who ------------------------------------------------------------------------------


def in_order(findings: Findings, task: TaskResult) -> Iterator[tuple[Lane, LaneResult]]:
    """A task's lanes in the order of the comparison's."""
    for lane in findings.lanes:
        if lane.name in task.lanes:
            yield lane, task.lanes[lane.name]


def times_control(findings: Findings, task: TaskResult, lane: Lane) -> float | None:
    """A lane's mean KL over the control lane's; None where there is nothing to divide by."""
    control = control_lane(findings.lanes, lane.model)
    result = None if control is None else task.lanes.get(control.name)
    own = task.lanes[lane.name].kl
    if result is None or result.kl is None or own is None or result.kl.mean <= 0 or lane.control:
        return None
    return own.mean / result.kl.mean


# ---- the verdict and what was run ------------------------------------------------------------


def verdict_rows(findings: Findings, show: Show) -> list[tuple[str, str, str]]:
    """Lane, verdict, reason in words."""
    rows: list[tuple[str, str, str]] = []
    for lane in findings.lanes:
        verdict = findings.verdicts.get(lane.name)
        if verdict is not None:
            rows.append((show(lane.name), verdict.kind, clean(verdict.reason)))
    return rows


def run_lines(findings: Findings, show: Show) -> tuple[str, str]:
    """The model, the yardstick; the tasks, the rerun check."""
    models = list(dict.fromkeys(show(lane.model) for lane in findings.lanes))
    controls = [show(lane.name) for lane in findings.lanes if lane.control]
    baseline = show(findings.lanes[0].name) if findings.lanes else NONE
    first = (
        f"{'Model' if len(models) == 1 else 'Models'} {', '.join(models) or NONE}; "
        f"baseline {baseline}; margin {100 * findings.margin:g} "
        f"{'point' if findings.margin == 0.01 else 'points'} of accuracy; "
        f"control lane: {', '.join(controls) or 'none'}."
    )
    tasks = ", ".join(f"{show(name)} ({_count(task)})" for name, task in findings.tasks.items())
    return first, f"Tasks: {tasks or 'none'}. {rerun_line(findings)}"


def _count(task: TaskResult) -> str:
    """Of a text nobody but the model's tokenizer knows how many windows it has."""
    if task.kind == "text":
        return f"n = {plural(task.n, 'window')}"
    return f"n = {task.n:,} of {task.size:,}"


def rerun_line(findings: Findings) -> str:
    rerun = findings.rerun
    if rerun is None:
        return "Rerun check: not run."
    what = f"{plural(rerun.items, 'item')} x {plural(rerun.lanes, 'lane')}"
    if rerun.identical:
        return f"Rerun check: {what} in another order and batch size, bit-identical."
    where = f" ({clean(rerun.first_difference)})" if rerun.first_difference else ""
    return f"Rerun check: FAILED, {what} in another order and batch size differ{where}."


# ---- tasks -----------------------------------------------------------------------------------

_KINDS = {
    "generate": "generated answers",
    "choice": "multiple choice",
    "text": "given text, whose figures are under KL",
}


def _task_line(task: TaskResult) -> str:
    line = f"{_KINDS.get(task.kind, clean(task.kind))}, n = {task.n:,}"
    if task.asked != task.n:
        line += f" of {task.asked:,} asked for"
    if task.kind != "text":
        line += f", the data set has {task.size:,}"
    if task.chance:
        line += f"; chance is {percent(task.chance, 1)} %"
    return line + (f"; {clean(task.note)}" if task.note else "")


def _answers_table(findings: Findings, task: TaskResult, show: Show) -> Table | None:
    rows = []
    for lane, result in in_order(findings, task):
        a = result.answers
        if a is None:
            continue
        rows.append((
            show(lane.name),
            f"{a.correct:,}/{a.n:,}",
            with_interval(percent(a.accuracy), a.interval, percent),
            f"{a.truncated:,}",
            f"{a.unanswered:,}",
            f"{a.errors:,}",
            number(a.mean_tokens) if a.mean_tokens else NONE,
        ))  # fmt: skip
    head = (
        "lane", "correct", "accuracy % [95 %]", "truncated", "unanswered", "errors", "tokens/row",
    )  # fmt: skip
    return Table(head, tuple(rows)) if rows else None


def _pairs_table(findings: Findings, task: TaskResult, show: Show) -> Table | None:
    rows = []
    for lane, result in in_order(findings, task):
        p = result.pair
        if p is None:
            continue
        detectable = points(p.detectable)[1:] if math.isfinite(p.detectable) else "none"
        kind = "(control)" if p.verdict is None else p.verdict.kind
        rows.append((
            show(lane.name),
            kind,
            f"{p.lost}/{p.gained}/{p.other_wrong}",
            with_interval(points(p.loss), p.interval, points),
            p_value(p.p_exact),
            p_value(p.p_holm),
            detectable,
        ))  # fmt: skip
    head = (
        "lane", "verdict", "lost/gained/other wrong", "loss, points [95 %]", "exact p", "Holm p",
        "detectable",
    )  # fmt: skip
    title = f"Beside {show(findings.lanes[0].name)}"
    return Table(head, tuple(rows), left=2, title=title) if rows else None


def _clustered_lines(findings: Findings, task: TaskResult, show: Show) -> list[str]:
    shown = [
        f"{show(lane.name)} "
        + with_interval(points(result.pair.loss), result.pair.clustered, points)
        for lane, result in in_order(findings, task)
        if result.pair is not None and result.pair.clustered is not None
    ]
    if not shown:
        return []
    return [
        "Loss with the interval that counts the task's strata as clusters (not used for the "
        f"verdict): {'; '.join(shown)}."
    ]


def _strata_table(findings: Findings, task: TaskResult, show: Show) -> Table | None:
    """Correct answers by stratum, those first where a lane lost most."""
    lanes = [(lane, result.strata) for lane, result in in_order(findings, task) if result.strata]
    if not lanes:
        return None
    first = lanes[0][1]

    def worst(stratum: str) -> float:
        base = first[stratum]
        losses = [
            base.accuracy - strata[stratum].accuracy for _, strata in lanes if stratum in strata
        ]
        return max(losses, default=0.0)

    rows = []
    for stratum in sorted(first, key=lambda name: -worst(name)):
        found = [strata.get(stratum) for _, strata in lanes]
        cells = (NONE if a is None else f"{a.correct:,}/{a.n:,}" for a in found)
        rows.append((show(stratum), *cells))
    head = ("stratum", *(show(lane.name) for lane, _ in lanes))
    title = "Correct by stratum, the largest loss first"
    return Table(head, tuple(rows), title=title, most=12, folded=True)


def task_sections(findings: Findings, show: Show) -> Iterator[Section]:
    for place, (name, task) in enumerate(findings.tasks.items()):
        found = [_answers_table(findings, task, show), _pairs_table(findings, task, show)]
        blocks: list[Block] = [_task_line(task)]
        blocks += [table for table in found if table is not None]
        blocks += _clustered_lines(findings, task, show)
        strata = _strata_table(findings, task, show)
        blocks += [] if strata is None else [strata]
        yield Section(f"task{place}", f"Task {show(name)}", tuple(blocks))


# ---- KL --------------------------------------------------------------------------------------


def _kl_row(findings: Findings, task: TaskResult, lane: Lane, show: Show) -> tuple[str, ...]:
    kl = task.lanes[lane.name].kl
    assert kl is not None
    ratio = times_control(findings, task, lane)
    x_control = "control" if lane.control else NONE if ratio is None else number(ratio)
    return (
        show(task.task),
        show(lane.name),
        f"{kl.n_tokens:,}",
        kl_cell(kl.mean, kl.interval),
        x_control + (" ALARM" if kl.alarm else ""),
        percent(kl.top1),
        signed(kl.nll_change),
        number(kl.median),
        number(kl.p99),
        number(kl.p999),
        number(kl.max),
        number(kl.mean_reverse),
        percent(kl.rms_p_change),
    )


def _kl_notes(findings: Findings, show: Show) -> Iterator[str]:
    """Tokens without a KL, and lanes that were not compared with the baseline."""
    first = findings.lanes[0].name if findings.lanes else ""
    against: dict[str, list[str]] = {}
    for name, task in findings.tasks.items():
        for lane, result in in_order(findings, task):
            kl = result.kl
            if kl is None:
                continue
            if kl.not_finite:
                yield (
                    f"NOT FINITE: {show(lane.name)} on {show(name)} gave NaN or infinity on "
                    f"{plural(kl.not_finite, 'token')} of {kl.n_tokens:,}; no figure has them."
                )
            lanes = against.setdefault(kl.against or first, [])
            if show(lane.name) not in lanes:
                lanes.append(show(lane.name))
    for other, lanes in against.items():
        if other != first:
            yield f"{', '.join(lanes)}: KL is against {show(other)}, which has the same weights."


def _perplexity_line(findings: Findings, show: Show) -> list[str]:
    lines = []
    for name, task in findings.tasks.items():
        shown = [
            f"{show(lane.name)} {result.perplexity:.4f}"
            for lane, result in in_order(findings, task)
            if result.perplexity is not None
        ]
        if shown:
            lines.append(f"Perplexity on {show(name)}: {', '.join(shown)}.")
    return lines


def spans_of(kls: Sequence[Kl]) -> list[tuple[int, int]]:
    """The positions of all buckets: low, high."""
    return sorted({(bucket.low, bucket.high) for kl in kls for bucket in kl.buckets})


def _bucket_table(findings: Findings, task: TaskResult, show: Show) -> Table | None:
    kls: list[tuple[Lane, Kl]] = [
        (lane, result.kl) for lane, result in in_order(findings, task) if result.kl is not None
    ]
    spans = spans_of([kl for _, kl in kls])
    if not spans:
        return None
    rows = []
    for lane, kl in kls:
        means = {(b.low, b.high): number(b.mean) for b in kl.buckets}
        rows.append((show(lane.name), *(means.get(span, NONE) for span in spans)))
    head = ("lane", *(f"{low}..{high - 1}" for low, high in spans))
    title = f"Mean KL by position, {show(task.task)}"
    return Table(head, tuple(rows), title=title, folded=True)


def kl_section(findings: Findings, show: Show) -> Section | None:
    rows = [
        _kl_row(findings, task, lane, show)
        for task in findings.tasks.values()
        for lane, result in in_order(findings, task)
        if result.kl is not None
    ]
    if not rows:
        return None
    head = (
        "task", "lane", "tokens", "mean [95 %]", "x control", "top-1 %", "NLL change",
        "median", "99 %", "99.9 %", "max", "reverse", "RMS dp %",
    )  # fmt: skip
    blocks: list[Block] = [
        "Both lanes predict the same given tokens; KL is in nats per token, 0 is no change at all.",
        Table(head, tuple(rows), keys=2, left=2),
        *_kl_notes(findings, show),
        *_perplexity_line(findings, show),
    ]
    for task in findings.tasks.values():
        table = _bucket_table(findings, task, show)
        if table is not None:
            blocks.append(table)
    return Section("kl", "KL: how far the predictions moved", tuple(blocks), "positions")


# ---- what was gained, where texts part -------------------------------------------------------


def gained_section(findings: Findings, show: Show) -> Section | None:
    if not findings.lanes:
        return None
    first = findings.lanes[0]
    rows = []
    for lane in findings.lanes:
        ratio = lane.pool_tokens / first.pool_tokens if first.pool_tokens else 0.0
        rows.append((
            show(lane.name),
            f"{lane.bytes_per_token:,}" if lane.bytes_per_token else NONE,
            f"{lane.pool_tokens:,} ({times(ratio)})" if lane.pool_tokens else NONE,
            times(lane.decode_speed),
            times(lane.prefill_speed),
            show(lane.scales) or NONE,
            percent(lane.clipped, 4),
            percent(lane.flushed, 4),
        ))  # fmt: skip
    head = (
        "lane", "bytes/token", "pool tokens", "decode", "prefill", "scales from", "clipped %",
        "flushed %",
    )  # fmt: skip
    note = (
        f"Speeds are relative to {show(first.name)}. Clipped values lay beyond the format's range; "
        "flushed ones were stored as zero."
    )
    return Section("gained", "What was gained", (Table(head, tuple(rows)), note), "memory")


def divergence_section(findings: Findings, show: Show) -> Section | None:
    rows = []
    for name, task in findings.tasks.items():
        for lane, result in in_order(findings, task):
            d = result.divergence
            if d is None:
                continue
            rows.append((
                show(name),
                show(lane.name),
                f"{d.identical:,}/{d.n:,} ({percent(d.identical / d.n, 1)} %)",
                NONE if d.median_first is None else f"{d.median_first:g}",
                # 1 - s^(1 / L) says nothing where no text is identical (s = 0).
                percent(d.hazard, 3) if d.identical else NONE,
                NONE if d.excess is None or not d.identical else points(d.excess, 3),
            ))  # fmt: skip
    if not rows:
        return None
    head = (
        "task", "lane", "identical outputs", "median first difference", "hazard %/token", "excess",
    )  # fmt: skip
    note = (
        "Hazard is the chance per token that a generated text parts from the baseline's; excess is "
        "the hazard less the control lane's; there is none where no text is identical. Texts that "
        "part are not yet wrong."
    )
    table = Table(head, tuple(rows), keys=2, left=2)
    return Section("divergence", "Where generated texts part", (table, note))


# ---- layers ----------------------------------------------------------------------------------


def _bar(value: float, largest: float) -> str:
    if not math.isfinite(value):
        return "#" * BAR
    return "#" * round(BAR * value / largest) if largest > 0 and value > 0 else ""


def _layers_table(found: Sensitivity) -> Table:
    by_kl = sorted(found.layers, key=lambda entry: -entry.kl)
    largest = max((entry.kl for entry in by_kl if math.isfinite(entry.kl)), default=0.0)
    rows = tuple(
        (
            str(entry.layer),
            entry.part.upper() if entry.part != "kv" else "K and V",
            _bar(entry.kl, largest).ljust(BAR),
            kl_cell(entry.kl, entry.interval),
            percent(entry.top1),
        )
        for entry in by_kl
    )
    head = ("layer", "part", "", "KL [95 %]", "top-1 %")
    title = "Layers, the largest KL first"
    return Table(head, rows, keys=2, left=3, title=title, most=24, folded=True)


def _mix_blocks(mix: Mix) -> Iterator[Block]:
    state = "stays under" if mix.met else "does NOT stay under"
    yield (
        f"The mix that was found and run: KL {kl_cell(mix.kl, mix.interval)} at "
        f"{mix.bytes_per_token:,} bytes per token; it {state} the bound of {number(mix.bound)}."
    )
    yield Code(f"kv_cache_dtype={as_code(mix.kv_cache_dtype)}", "The mix, as Engine takes it")
    if mix.tried:
        head = ("K and V kept as the baseline's", "KL", "bytes/token")
        rows = tuple((f"{n:,}", number(kl), f"{size:,}") for n, kl, size in mix.tried)
        yield Table(head, rows, title="Mixes tried")


def sensitivity_sections(findings: Findings, show: Show) -> Iterator[Section]:
    for place, (name, found) in enumerate(findings.sensitivity.items()):
        control = "" if found.control is None else f"; control {number(found.control)}"
        blocks: list[Block] = [
            f"One layer's K or V in {show(found.lane)}, all else as the baseline; scored on "
            f"{clean(found.text)} ({plural(found.n_tokens, 'token')}). Every layer at once: KL "
            f"{number(found.full)}{control}.",
            _layers_table(found),
        ]
        if found.mix is not None:
            blocks += _mix_blocks(found.mix)
        total = found.computed + found.skipped
        if total:
            blocks.append(
                f"Computed {found.computed:,} rows x layers; {found.skipped:,} "
                f"({percent(found.skipped / total, 0)} %) lay below the change and were shared."
            )
        yield Section(
            f"layers{place}", f"Which layers matter: {show(name)}", tuple(blocks), f"layers{place}"
        )


# ---- 2 x 2, warnings, all of it ---------------------------------------------------------------


def _two_by_two(found: TwoByTwo, show: Show) -> Iterator[Block]:
    rows = tuple(
        (show(model), *(percent(accuracy) for accuracy in row))
        for model, row in zip(found.models, found.accuracy, strict=True)
    )
    head = (f"accuracy %, {show(found.task)}", *map(show, found.kv))
    yield Table(head, rows)
    yield (
        f"Loss in points: weights alone {points(found.weights_loss)}, KV cache alone "
        f"{points(found.kv_loss)}, both {points(found.both_loss)}; beyond their sum "
        f"{points(found.interaction)}."
    )


def sections(findings: Findings, show: Show) -> list[Section]:
    """After the verdicts and what was run."""
    found: list[Section | None] = [
        *task_sections(findings, show),
        kl_section(findings, show),
        gained_section(findings, show),
        divergence_section(findings, show),
        *sensitivity_sections(findings, show),
    ]
    if findings.two_by_two:
        blocks = [block for entry in findings.two_by_two for block in _two_by_two(entry, show)]
        found.append(Section("two_by_two", "Weights and KV cache apart", tuple(blocks)))
    if findings.warnings:
        lines = Bullets(tuple(map(clean, findings.warnings)))
        found.append(Section("warnings", "Warnings", (lines,)))
    return [section for section in found if section is not None]
