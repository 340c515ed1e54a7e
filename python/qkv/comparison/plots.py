"""The plots of a report, as SVG to stand inside HTML. Needs matplotlib (the `report` extra).

Text stays text, and colours are variables of the page around it (page.py says what they are), so
that one drawing suits light and dark. The same findings give the same bytes."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import options
from ..stats import Interval
from .blocks import clean, number, shortened
from .content import in_order, spans_of
from .results import Findings, Kl, Lane, Sensitivity, TaskResult

#: Colours while matplotlib draws, each of which stands for one of the page's.
_INK, _MUTED, _GRID = "#010203", "#010204", "#010205"
_LANE_COLOURS = tuple(f"#0102{0x10 + i:02x}" for i in range(8))
_CSS = {
    _INK: "currentColor",
    _MUTED: "var(--qkv-muted)",
    _GRID: "var(--qkv-grid)",
    **{colour: f"var(--qkv-c{i})" for i, colour in enumerate(_LANE_COLOURS)},
}
_MARKERS = "osD^vPX*"
_WIDTH = 6.6  # inches
_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "qkv",
    "text.parse_math": False,  # a name may hold a dollar sign
    "axes.unicode_minus": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "errorbar.capsize": 0,
}


@dataclass(frozen=True)
class _Look:
    """How a lane is drawn in every plot."""

    name: str
    colour: str
    marker: str
    line: str


def draw(findings: Findings) -> dict[str, str]:
    """SVG elements by name: losses, positions, memory, and layers0, layers1, ... for the lanes of
    the sensitivity; without those that have nothing to show. ImportError without matplotlib."""
    try:
        import matplotlib  # noqa: F401, PLC0415 (optional, slow to import)
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'qkv[report]'") from error
    looks = _looks(findings)
    with _style():
        found = {
            "losses": _losses(findings, looks),
            "positions": _positions(findings, looks),
            "memory": _memory(findings, looks),
        }
        for place, sensitivity in enumerate(findings.sensitivity.values()):
            found[f"layers{place}"] = _layers(findings, sensitivity, f"qkv-layers{place}")
    return {name: svg for name, svg in found.items() if svg}


@contextmanager
def _style() -> Iterator[None]:
    """Only ours: a user's settings would change the page."""
    import matplotlib  # noqa: PLC0415 (optional, slow to import)

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the font lacks: the browser has them
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def _looks(findings: Findings) -> dict[str, _Look]:
    names = shortened((lane.name for lane in findings.lanes), 26)
    looks: dict[str, _Look] = {}
    n_coloured = 0
    for place, lane in enumerate(findings.lanes):
        if lane.control or place == 0:
            line = "--" if lane.control else "-"
            looks[lane.name] = _Look(names[lane.name], _MUTED, "o", line)
            continue
        colour = _LANE_COLOURS[n_coloured % len(_LANE_COLOURS)]
        marker = _MARKERS[n_coloured % len(_MARKERS)]
        looks[lane.name] = _Look(names[lane.name], colour, marker, "-")
        n_coloured += 1
    return looks


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, slow to import)

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _svg(figure: Any, name: str, label: str) -> str:
    """The figure as an element of a page, without prologue, metadata and style sheet."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(
        r"<!--.*?-->|<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.S
    )
    # Only within tags: what stands between them are names that may look like anything.
    svg = re.sub(r"<[^>]*>", lambda tag: _retouched(tag[0], name), svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    opening = f'<svg role="img" aria-label="{html.escape(label)}" {view[0]}>'
    return opening + svg[svg.index(">") + 1 :]


def _retouched(tag: str, name: str) -> str:
    """A tag with the page's colours and font, and with ids that no other plot has."""
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', tag)
    tag = tag.replace("url(#", f"url(#{name}-")
    tag = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", tag)
    return re.sub(r"#0102[0-9a-f]{2}", lambda found: _CSS.get(found[0], found[0]), tag)


def _log_axis(axis: Any, low: float, high: float) -> None:
    """Ticks as plain numbers: 1, 2, 5 per decade where there are few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415

    subs = (1.0, 2.0, 5.0) if high / low < 50 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 1)))
    axis.set_minor_locator(NullLocator())


def _log_limits(axes: Any, values: Sequence[float]) -> None:
    """Of values above 0."""
    low, high = min(values) / 1.6, max(values) * 1.6
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(low, high)
    _log_axis(axes.yaxis, low, high)


def _reach(mean: float, interval: Interval | None) -> list[list[float]]:
    """Distances from the mean to both ends, as errorbar takes them."""
    if interval is None:
        return [[0.0], [0.0]]
    return [[max(mean - interval.lower, 0.0)], [max(interval.upper - mean, 0.0)]]


# ---- (a) losses ------------------------------------------------------------------------------


def _losses(findings: Findings, looks: Mapping[str, _Look]) -> str:
    tasks = [
        (task, pairs)
        for task in findings.tasks.values()
        if (pairs := [(x, r.pair) for x, r in in_order(findings, task) if r.pair is not None])
    ]
    if not tasks:
        return ""
    n_rows = sum(len(pairs) + 1 for _, pairs in tasks)
    figure = _figure(0.24 * n_rows + 0.75)
    axes = figure.subplots()
    names: dict[float, str] = {}
    y = 0.0
    for task, pairs in tasks:
        axes.text(
            0.0, y, clean(task.task), transform=axes.get_yaxis_transform(), weight="bold",
            va="center", ha="left",
        )  # fmt: skip
        for lane, pair in pairs:
            y += 1
            look, reach = looks[lane.name], _reach(pair.loss, pair.interval)
            names[y] = look.name
            axes.errorbar(
                [100 * pair.loss], [y], xerr=[[100 * end for end in side] for side in reach],
                fmt=look.marker, color=look.colour, markersize=5, elinewidth=1.8,
            )[2][0].set_linestyle(look.line)  # fmt: skip
            kind = "" if pair.verdict is None else pair.verdict.kind
            axes.text(1.02, y, kind, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        y += 1.2
    axes.axvline(0, color=_MUTED, linewidth=0.8)
    axes.axvline(100 * findings.margin, color=_INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.annotate(
        f"margin {100 * findings.margin:g}", (100 * findings.margin, 1), xytext=(3, 2),
        xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8, va="bottom",
    )  # fmt: skip
    axes.set_yticks(list(names), list(names.values()))
    axes.set_ylim(y - 0.5, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.set_xlabel("loss of accuracy against the baseline, points, with its 95 % interval")
    return _svg(figure, "qkv-losses", "Loss of accuracy by task and lane with 95 % intervals")


# ---- (b) KL by position ----------------------------------------------------------------------


def _positions(findings: Findings, looks: Mapping[str, _Look]) -> str:
    panels = []
    for task in findings.tasks.values():
        kls = [(lane, r.kl) for lane, r in in_order(findings, task) if r.kl is not None]
        values = [b.mean for _, kl in kls for b in kl.buckets if 0 < b.mean < math.inf]
        if values:
            panels.append((task, kls, values))
    if not panels:
        return ""
    figure = _figure(1.75 * len(panels) + 0.5)
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for axes, (task, kls, values) in zip(all_axes, panels, strict=True):
        _position_panel(axes, task, kls, values, looks, handles)
    all_axes[-1].set_xlabel("position of the token in its text")
    figure.supylabel("mean KL, nats (log scale)", fontsize=9)
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper left", ncols=min(len(handles), 4)
    )
    return _svg(figure, "qkv-positions", "Mean KL by position in the text, by lane, log scale")


def _position_panel(
    axes: Any,
    task: TaskResult,
    kls: Sequence[tuple[Lane, Kl]],
    values: Sequence[float],
    looks: Mapping[str, _Look],
    handles: dict[str, Any],
) -> None:
    spans = spans_of([kl for _, kl in kls])
    place = {span: i for i, span in enumerate(spans)}
    _log_limits(axes, values)
    for i, (lane, kl) in enumerate(kls):
        look = looks[lane.name]
        shift = 0.06 * (i - (len(kls) - 1) / 2)
        drawn = [b for b in kl.buckets if 0 < b.mean < math.inf]
        if not drawn:
            continue
        x = [place[b.low, b.high] + shift for b in drawn]
        reach = [_reach(b.mean, b.interval) for b in drawn]
        handles[look.name] = axes.errorbar(
            x,
            [b.mean for b in drawn],
            yerr=[[ends[side][0] for ends in reach] for side in (0, 1)],
            color=look.colour,
            marker=look.marker,
            markersize=4,
            linestyle=look.line,
            linewidth=1.4,
        )
    axes.set_xticks(range(len(spans)), [f"{low}–{high - 1}" for low, high in spans])
    axes.set_xlim(-0.5, len(spans) - 0.5)
    axes.set_title(clean(task.task))
    axes.grid(axis="y")


# ---- (c) layers ------------------------------------------------------------------------------


def _formats_alone(given: Any) -> Any:
    """kv_cache_dtype without what need not be there any more: a file of scales."""
    if not isinstance(given, Mapping):
        return given
    return {key: value for key, value in given.items() if key != "scales"}


def _kept(findings: Findings, found: Sensitivity) -> set[tuple[int, str]]:
    """(layer, "k" or "v") where the mix has another format than the lane."""
    if found.mix is None or not found.layers:
        return set()
    lane = next((lane for lane in findings.lanes if lane.name == found.lane), None)
    low = found.lane if lane is None else lane.kv_cache_dtype
    n_layers = max(entry.layer for entry in found.layers) + 1
    both = [_formats_alone(low), _formats_alone(found.mix.kv_cache_dtype)]
    try:
        a, b = options.lanes(both, n_layers, compute_dtype="bf16", declared="")
    except (TypeError, ValueError):
        return set()
    return {
        (layer, part)
        for layer, (one, other) in enumerate(zip(a.layers, b.layers, strict=True))
        for part, x, y in zip("kv", one, other, strict=True)
        if x != y
    }


def _layers(findings: Findings, found: Sensitivity, name: str) -> str:
    if not found.layers:
        return ""
    kept = _kept(findings, found)
    parts = [part for part in ("k", "v", "kv") if any(e.part == part for e in found.layers)]
    width = 0.84 / len(parts)
    figure = _figure(2.9)
    axes = figure.subplots()
    marked: list[tuple[float, float]] = []
    for i, part in enumerate(parts):
        own = [entry for entry in found.layers if entry.part == part]
        x = [entry.layer + width * (i - (len(parts) - 1) / 2) for entry in own]
        heights = [entry.kl for entry in own]
        reach = [_reach(entry.kl, entry.interval) for entry in own]
        axes.bar(
            x, heights, width, color=_LANE_COLOURS[i], label=" and ".join(part.upper())
        )  # fmt: skip
        axes.errorbar(
            x, heights, yerr=[[ends[side][0] for ends in reach] for side in (0, 1)], fmt="none",
            ecolor=_MUTED, elinewidth=0.8,
        )  # fmt: skip
        for at, entry, ends in zip(x, own, reach, strict=True):
            if any((entry.layer, half) in kept for half in part):
                marked.append((at, entry.kl + ends[1][0]))
    top = max([entry.kl for entry in found.layers] + [height for _, height in marked])
    if marked:
        axes.scatter(
            [at for at, _ in marked], [height + 0.045 * top for _, height in marked], marker="v",
            s=18, color=_INK, label="in a higher format in the mix",
        )  # fmt: skip
    if found.control is not None:
        axes.axhline(
            found.control, color=_MUTED, linestyle="--", linewidth=1, label="control (all layers)"
        )
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.set_xlabel("layer")
    axes.set_ylabel("mean KL, nats")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y")
    handles, labels = axes.get_legend_handles_labels()
    order = [*range(len(handles) - len(parts), len(handles)), *range(len(handles) - len(parts))]
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="outside upper left", ncols=4
    )
    return _svg(figure, name, "KL by layer with K or V alone in the lower format")


# ---- (d) memory against KL -------------------------------------------------------------------


def _overall(findings: Findings, lane: Lane) -> tuple[float, float, float] | None:
    """Mean KL over every token of every task, and the least and largest of the tasks'."""
    kls = [
        result.kl
        for task in findings.tasks.values()
        if (result := task.lanes.get(lane.name)) is not None
        and result.kl is not None
        and 0 < result.kl.mean < math.inf
    ]
    n_tokens = sum(kl.n_tokens for kl in kls)
    if not n_tokens:
        return None
    means = [kl.mean for kl in kls]
    return sum(kl.mean * kl.n_tokens for kl in kls) / n_tokens, min(means), max(means)


def _memory(findings: Findings, looks: Mapping[str, _Look]) -> str:
    found = {
        lane.name: (lane, overall)
        for lane in findings.lanes
        if (overall := _overall(findings, lane)) is not None
    }
    if not any(not lane.control for lane, _ in found.values()):
        return ""
    figure = _figure(3.0)
    axes = figure.subplots()
    values: list[float] = []
    sizes: list[int] = []

    def point(size: int, kl: float, low: float, high: float, look: _Look, marker: str) -> None:
        values.extend((low, high))
        sizes.append(size)
        axes.errorbar(
            [size], [kl], yerr=[[kl - low], [high - kl]], fmt=marker, color=look.colour,
            markersize=7, elinewidth=1.4,
        )  # fmt: skip
        axes.annotate(look.name, (size, kl), xytext=(8, 0), textcoords="offset points", va="center")

    for lane, (kl, low, high) in found.values():
        look = looks[lane.name]
        if lane.control:
            values.append(kl)
            axes.axhline(kl, color=_MUTED, linestyle="--", linewidth=1)
            axes.annotate(
                look.name, (0.01, kl), xytext=(0, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", fontsize=8,
            )  # fmt: skip
        else:
            point(lane.bytes_per_token, kl, low, high, look, look.marker)
    for name, sensitivity in findings.sensitivity.items():
        mix = sensitivity.mix
        if mix is not None and 0 < mix.kl < math.inf:
            colour = looks[name].colour if name in looks else _INK
            low, high = mix.interval or (mix.kl, mix.kl)
            look = _Look(
                f"mix of {looks[name].name if name in looks else clean(name)}", colour, "", ""
            )
            point(mix.bytes_per_token, mix.kl, max(low, mix.kl / 100), high, look, "*")
    first = findings.lanes[0]
    if first.bytes_per_token:
        sizes.append(first.bytes_per_token)
        axes.axvline(first.bytes_per_token, color=_MUTED, linestyle=":", linewidth=1)
        axes.annotate(
            f"{looks[first.name].name} (baseline)", (first.bytes_per_token, 0.98), xytext=(-4, 0),
            xycoords=("data", "axes fraction"), textcoords="offset points", ha="right", va="top",
            fontsize=8,
        )  # fmt: skip
    _log_limits(axes, values)
    axes.set_xlim(0, 1.08 * max(sizes))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("bytes of KV cache per token")
    axes.set_ylabel("mean KL, nats (log scale)")
    axes.grid()
    return _svg(figure, "qkv-memory", "Bytes per token against mean KL by lane, log scale")
