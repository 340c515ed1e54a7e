"""What stands on a page beside the figures: how to read them, what was run, how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .. import stats, tasks
from .analysis import ROUNDING_STEPS
from .blocks import Block, Code, Section, Show, Table, as_code, clean
from .content import run_lines
from .results import Findings

# ---- how to read it --------------------------------------------------------------------------

_READ = (
    (
        "Loss and margin",
        "Every lane gets the same items as the baseline, so only items whose answer changed sides "
        "count: lost ones (right before, wrong now) less gained ones, as a share of all. The "
        "interval around it is Tango's, at 95 %. The margin, {margin:g} {unit} here, is the "
        "largest loss that would be accepted; it was declared before the run.",
    ),
    (
        "SAFE",
        "Even the upper end of the interval is a smaller loss than the margin, and there is no KL "
        "alarm.",
    ),
    (
        "NOT SAFE",
        "Even the lower end of the interval is a larger loss than the margin, or there is a KL "
        "alarm. A loss that is proven, but not to be larger than the margin, is called just that.",
    ),
    (
        "NOT ENOUGH DATA",
        "The interval holds the margin: with so few items, or so many flips, nobody can tell. The "
        "reason says how many more items it takes, or that this task has too few.",
    ),
    (
        "UNINFORMATIVE",
        "The baseline is not shown to beat chance by three margins. A model that cannot do the "
        "task has nothing to lose in it. KL still speaks.",
    ),
    (
        "p values",
        "How often flips would be this lopsided if they went either way equally often (McNemar's "
        "exact test); Holm's adjusts for there being several tasks. A large p value clears "
        "nothing: it may only mean few items. The detectable loss says what this number of items "
        "could have shown.",
    ),
    (
        "KL",
        "How far a lane's predictions of the next token are from the baseline's on the same given "
        "text, in nats. It sees damage that a task with few items misses, and damage that grows "
        "with the position. Its intervals resample whole stretches of text, because neighbouring "
        "tokens are alike.",
    ),
    (
        "Control lane",
        "bf16 once more, with its rounding drawn at random: what any change at all does to this "
        "model, however harmless. Flips and KL of that size are no fault of a format.",
    ),
    (
        "KL alarm",
        "The lower end of a lane's mean KL exceeds what rounding to its format explains: "
        "{e4m3:.0f} times the control lane's for e4m3, {e5m2:.0f} for e5m2, {fp4:.0f} for 4 bits, "
        "and {bf16:.0f} for what is as fine as bf16; or some prediction is not a number. Sound "
        "caches were measured at about a third of it. Beyond it something is wrong or does not "
        "fit the model (a scale, say), whatever the accuracy says.",
    ),
    (
        "Rerun check",
        "Before the main run some items are run again in another order and batch size, and every "
        "bit must agree. So what differs between two lanes is the doing of their formats.",
    ),
    (
        "Reach",
        "A verdict is about this model, this build, these settings and tasks. Damage tends to grow "
        "with the length of text: short answers do not speak for long ones.",
    ),
)


def how_to_read(findings: Findings) -> list[tuple[str, str]]:
    """Terms and what they mean."""
    figures: dict[str, Any] = {
        "margin": 100 * findings.margin,
        "unit": "point" if findings.margin == 0.01 else "points",
    }
    kinds = {"bf16": "bf16", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "fp4": "nvfp4"}
    figures |= {kind: stats.kl_allowance(ROUNDING_STEPS[name]) for kind, name in kinds.items()}
    return [(term, said.format(**figures)) for term, said in _READ]


# ---- what was run ----------------------------------------------------------------------------


def run_section(findings: Findings, show: Show) -> Section:
    lanes = tuple(
        (
            show(lane.name),
            show(lane.model),
            as_code(lane.kv_cache_dtype),
            "baseline" if place == 0 else "control" if lane.control else "",
        )
        for place, lane in enumerate(findings.lanes)
    )
    blocks: list[Block] = [
        *run_lines(findings, show),
        Table(("lane", "model", "kv_cache_dtype", "role"), lanes, left=4, title="Lanes"),
        *_mapping("Settings", findings.settings),
        *_mapping("Environment", findings.environment),
        Code(repeat(findings), "To run it again"),
    ]
    return Section("run", "What was run", tuple(blocks))


def _mapping(title: str, values: Mapping[str, Any]) -> Iterator[Block]:
    """A table of keys and values, and one for each list of like mappings in it."""
    rows, lists = [], []
    for key, value in _flat(values):
        likes = isinstance(value, (list, tuple)) and value and all(
            isinstance(entry, Mapping) and list(entry) == list(value[0]) for entry in value
        )  # fmt: skip
        if likes:
            lists.append((key, value))
        else:
            rows.append((clean(key), _plain(value)))
    if rows:
        yield Table(("name", "value"), tuple(rows), left=2, title=title)
    for key, entries in lists:
        head = tuple(map(clean, entries[0]))
        cells = tuple(tuple(map(_plain, entry.values())) for entry in entries)
        yield Table(head, cells, left=1, title=f"{title}: {clean(key)}")


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _plain(value: Any) -> str:
    return clean(value) if isinstance(value, str) else as_code(value)


# ---- how to repeat it ------------------------------------------------------------------------

#: Settings that are no argument of compare, or are written in their own way.
_NOT_OPTIONS = ("models", "tasks", "margin", "rerun_items", "quantization_param_digest")


def repeat(findings: Findings) -> str:
    """The call of qkv.compare with these settings."""
    settings = findings.settings
    given = settings.get("models") or list(dict.fromkeys(lane.model for lane in findings.lanes))
    models = [given] if isinstance(given, str) else list(given)
    asked = [task for task in settings.get("tasks", ()) if isinstance(task, Mapping)]
    names = [str(task.get("task")) for task in asked] or list(findings.tasks)
    kv, grid = _formats(findings, len(models))
    lengths = {str(task.get("task")): task.get("max_tokens") for task in asked}
    given_tasks = ", ".join(_task(name, lengths.get(name)) for name in names)
    arguments = [
        as_code(models[0] if len(models) == 1 else models),
        as_code(kv),
        f"[{given_tasks}]",
    ]
    limits = {str(task["task"]): task["limit"] for task in asked if task.get("limit") is not None}
    if limits:
        arguments.append(f"limit={as_code(limits)}")
    arguments.append(f"margin={as_code(findings.margin)}")
    arguments.append(f"control={any(lane.control for lane in findings.lanes)}")
    if not grid:
        arguments.append("grid=False")
    if any(task.get("chat") for task in asked):
        arguments.append("chat=True")
    if "rerun_items" in settings:
        arguments.append(f"rerun_items={as_code(settings['rerun_items'])}")
    for found in list(findings.sensitivity.values())[:1]:  # asked alike for every lane
        arguments.append(f"by_layer={as_code(found.by_layer) if found.by_layer else True}")
        if found.kl_bound is not None:
            arguments.append(f"kl_bound={found.kl_bound!r}")
    arguments += [
        f"{name}={as_code(value)}"
        for name, value in settings.items()
        if name not in _NOT_OPTIONS and str(name).isidentifier()
    ]
    own = [clean(name) for name in names if name not in tasks.names()]
    lines = ["import qkv", ""]
    lines += [f"# {name} is a task of your own: pass the qkv.tasks.Task itself" for name in own]
    lines += ["qkv.compare(", *(f"    {argument}," for argument in arguments), ")"]
    return "\n".join(lines)


def _task(name: str, max_tokens: Any) -> str:
    """Its name where that says all, else the call that makes it."""
    if name not in tasks.names() or not max_tokens or tasks.task(name).max_tokens == max_tokens:
        return as_code(name)
    return f"qkv.tasks.task({as_code(name)}, max_tokens={as_code(max_tokens)})"


def _formats(findings: Findings, n_models: int) -> tuple[list[Any], bool]:
    """kv_cache_dtypes, and whether each model ran each of them."""
    by_model: dict[str, list[Any]] = {}
    for lane in findings.lanes:
        if not lane.control:
            by_model.setdefault(lane.model, []).append(lane.kv_cache_dtype)
    found = list(by_model.values())
    if not found or all(own == found[0] for own in found) or len(found) != n_models:
        return (found[0] if found else []), True
    return [own[0] for own in found], False
