"""qkv compare: is a lower precision safe for this model and these tasks?"""

import argparse
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qkv  # what brings scipy is taken from it when the verb runs

from .. import tasks
from ..engine import Engine
from .arguments import (
    FORMATTER,
    MODEL_HELP,
    Problem,
    engine_arguments,
    engine_options,
    kv_cache_dtype,
)
from .rows import json_option, show

if TYPE_CHECKING:
    from ..comparison import Comparison

# Exit code of a comparison that ran and found what --fail-on names.
_FOUND = 3
_VERDICTS = ("not-safe", "not-enough-data", "uninformative")


def add(verbs: Any) -> None:
    parser = verbs.add_parser(
        "compare",
        help="is a lower precision safe for this model and these tasks?",
        description="Runs each KV format over the same weights and items, and says of each: SAFE,\n"
        "NOT SAFE, NOT ENOUGH DATA, or UNINFORMATIVE (a model that cannot do a task cannot\n"
        "lose it). The first model with the first format is the baseline. Several models\n"
        "are loaded in turn; each runs each format.",
        epilog="examples:\n"
        "  qkv compare demo --tasks gsm8k,mmlu --limit gsm8k=8,mmlu=57 --html page.html\n"
        "  qkv compare ./Qwen3-8B --kv-cache-dtype bf16,fp8_e4m3,nvfp4 --tasks mmlu,gsm8k \\\n"
        "      --resume run.jsonl\n"
        "  qkv compare ./Qwen3-8B ./Qwen3-8B-FP8 --kv-cache-dtype bf16 --tasks mmlu\n"
        "  qkv compare --report run.jsonl --html page.html\n"
        "exit code: 0 when it ran, whatever the verdict (3 if it is one of --fail-on);\n"
        "1 when it failed, 2 for wrong use, 130 after Ctrl-C",
        formatter_class=FORMATTER,
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=MODEL_HELP)
    _task_options(parser)
    _run_options(parser)
    engine_options(parser, one_model=False, kv_cache_dtypes="bf16,fp8_e4m3")
    parser.set_defaults(run=_compare)


def _task_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is asked")
    add = group.add_argument
    add("--tasks", metavar="NAMES",
        help=f"with commas, of {', '.join(tasks.names())} (default: gsm8k)")  # fmt: skip
    add("--task-file", action="append", default=[], metavar="FILE.jsonl",
        help='your own rows, as a task called like the file: each has "prompt" and "answer", and '
        'may have "choices"')  # fmt: skip
    add("--limit", metavar="N",
        help="items of each task, taken evenly from its subjects (of wikitext2: windows of 512 "
        "tokens); or by task: gsm8k=200,mmlu=500 (default: all)")  # fmt: skip
    add("--max-tokens", metavar="N",
        help="of an answer that is generated; or by task (default: the task's)")  # fmt: skip
    add("--chat", action="store_true", help="put prompts through the chat template")


def _run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is compared")
    add = group.add_argument
    add("--margin", type=float, default=1.0, metavar="POINTS",
        help="the largest loss of accuracy that would be accepted, in percentage points "
        "(default: 1)")  # fmt: skip
    add("--no-control", action="store_true",
        help="no lane of bf16 with stochastic rounding, which KL is judged against")  # fmt: skip
    add("--no-grid", action="store_true",
        help="the first model has the first format, the second the second")  # fmt: skip
    add("--by-layer", action="store_true",
        help="also each layer's K and V alone in the lower format; the cheapest mix")  # fmt: skip
    add("--kl-bound", type=float, metavar="NATS",
        help="mean KL that the mix stays under (default: half of the alarm's)")  # fmt: skip
    add("--rerun-items", type=int, metavar="N",
        help="items that run twice, in another order and batch; bits must be equal "
        "(default: 32)")  # fmt: skip
    add("--resume", metavar="FILE",
        help="keep the rows here as they are done; what is there is not run again")  # fmt: skip
    add("--report", metavar="FILE", help="show what such a file holds; compute nothing")
    add("--html", metavar="FILE", help="also write a page that needs nothing else")
    add("--fail-on", action="append", choices=_VERDICTS, default=[], metavar="VERDICT",
        help=f"exit code {_FOUND} if a lane gets it: {', '.join(_VERDICTS)}; may be given more "
        "than once")  # fmt: skip
    add("--no-progress", action="store_true", help="do not say what is being done")
    json_option(parser)


def _compare(args: argparse.Namespace) -> int:
    if (args.report is None) != bool(args.models):
        raise Problem("give a MODEL, or --report FILE (one of them)")
    if args.html is not None and not Path(args.html).absolute().parent.is_dir():
        raise Problem(f"--html {args.html}: no such folder")
    if args.report is not None:
        return _shown(args, qkv.Comparison.load(args.report))
    try:
        dtypes = kv_cache_dtype(args.kv_cache_dtype)
        found = qkv.compare(args.models, dtypes, _tasks(args), **_arguments(args))
    except KeyboardInterrupt:
        kept = "nothing is kept; with --resume FILE the rows are"
        if args.resume is not None:
            kept = f"the rows so far are in {args.resume}; the same command goes on with them"
        print(f"qkv: interrupted: {kept}", file=sys.stderr)
        return 130
    return _shown(args, found)


def _shown(args: argparse.Namespace, found: "Comparison") -> int:
    try:
        if args.html is not None:  # first: the reader of our output may go away
            found.to_html(args.html)
    finally:
        show(args, found.to_dict, found)
    if args.html is not None:
        print(f"\npage: {args.html}", file=sys.stderr if args.json else sys.stdout)
    kinds = {verdict.kind.lower().replace(" ", "-") for verdict in found.verdicts.values()}
    return _FOUND if kinds & set(args.fail_on) else 0


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Options that were not given are left out: a run that was begun in Python goes on here."""
    defaults = inspect.signature(Engine).parameters
    found = {
        name: value
        for name, value in engine_arguments(args).items()
        if value != defaults[name].default
    }
    if args.rerun_items is not None:
        found["rerun_items"] = args.rerun_items
    return found | {
        "limit": _by_task("--limit", args.limit),
        "margin": args.margin / 100,
        "control": not args.no_control,
        "grid": not args.no_grid,
        "chat": args.chat,
        "by_layer": args.by_layer,
        "kl_bound": args.kl_bound,
        "resume": args.resume,
        "progress": not args.no_progress,
    }


def _by_task(option: str, given: str | None) -> int | dict[str, int] | None:
    """ "200", or "gsm8k=200,mmlu=500"."""
    if given is None:
        return None
    try:
        if "=" not in given:
            return int(given)
        pairs = [part.partition("=") for part in given.split(",")]
        return {name.strip(): int(value) for name, _, value in pairs}
    except ValueError:
        raise Problem(f"{option} {given}: a number, or TASK=NUMBER with commas") from None


def _tasks(args: argparse.Namespace) -> list[tasks.Task]:
    named = args.tasks or ("" if args.task_file else "gsm8k")
    found = [tasks.task(name.strip()) for name in named.split(",") if name.strip()]
    for path in args.task_file:
        found.append(tasks.custom(path, name=Path(path).stem))
    given = _by_task("--max-tokens", args.max_tokens)
    if given is None:
        return found
    writing = {task.name for task in found if task.kind == "generate"}
    tokens = dict.fromkeys(writing, given) if isinstance(given, int) else given
    for name, value in tokens.items():
        if name not in writing:
            raise Problem(f"--max-tokens: no task that generates is called {name!r}")
        if value < 1:
            raise Problem(f"--max-tokens {value}: must be at least 1")
    return [replace(task, max_tokens=tokens.get(task.name, task.max_tokens)) for task in found]
