"""The plot of a bench. Needs matplotlib (the `report` extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Bench, Cell

#: A panel: figure, title, scale of the values.
_PANELS = (
    ("output_tokens_per_s", "output, tokens/s", 1.0),
    ("ttft_mean", "time to the first token, s", 1.0),
    ("tpot_mean", "time per token after it, ms", 1000.0),
    ("goodput", "goodput, requests/s", 1.0),
    ("most_running", "requests running, at most (dotted: waiting)", 1.0),
    ("token_usage", "usage of the pool, at most", 1.0),
)
_PREFIX_PANELS = (
    ("hit_rate", "share of prompts from the prefix cache", 1.0),
    ("prefill_ratio", "times that prompts are computed", 1.0),
)
_MARKERS = "osD^vPX*"


def draw(found: Bench) -> Any:
    """A panel per figure, a line per arm, bars of one standard deviation. ImportError without
    matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (optional, slow to import)
    except ImportError as error:
        raise ImportError("Bench.plot() needs matplotlib: pip install 'qkv[report]'") from error
    alone = found.sweep == "concurrency"
    panels = _PANELS if alone else _PANELS + _PREFIX_PANELS
    figure = Figure(figsize=(11, 2.9 * ((len(panels) + 1) // 2) + 0.6), layout="constrained")
    grid = figure.subplots((len(panels) + 1) // 2, 2, squeeze=False)
    for axes, (name, title, scale) in zip(grid.flat, panels, strict=False):
        for place, (label, cells) in enumerate(found.series().items()):
            _line(axes, cells, name, scale, label, place, alone)
        _style(axes, title, name, alone)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False)
    return figure


def _line(
    axes: Any, cells: list[Cell], name: str, scale: float, label: str, place: int, alone: bool
) -> None:
    sound = [cell for cell in cells if cell.error is None]
    x = [cell.users if alone else cell.shared_tokens for cell in sound]
    colour = f"C{place % 10}"
    axes.errorbar(
        x,
        [scale * cell.mean(name) for cell in sound],
        yerr=[scale * cell.sd(name) for cell in sound],
        label=label,
        color=colour,
        marker=_MARKERS[place % len(_MARKERS)],
        markersize=4,
        linewidth=1.4,
    )
    if name == "most_running":
        waiting = [cell.mean("most_waiting") for cell in sound]
        axes.plot(x, waiting, color=colour, linestyle=":", linewidth=1.4)


def _style(axes: Any, title: str, name: str, alone: bool) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("users" if alone else "shared tokens", fontsize=8)
    if alone:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if name == "ttft_mean":
        axes.set_yscale("log", nonpositive="clip")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(True, linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
