"""qkv generate IN OUT, and qkv merge."""

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import dataset
from ..dataset.sink import OUTPUTS
from ..dataset.source import INPUTS
from ..run import Hook, described
from .arguments import FORMATTER, Problem, engine_arguments, kv_cache_dtype, sampling
from .rows import json_option, print_json

EPILOG = """
  qkv generate --model demo questions.jsonl answers.jsonl
  qkv generate --model demo reviews.csv labels.parquet --temperature 0 --max-tokens 8 \\
      --template "Review: {{ text }}\\nIs it positive? Answer yes or no." --system "Be brief."
  qkv generate --model demo big.jsonl part0.jsonl --shard 0/4      (then 1/4, 2/4, 3/4, and)
  qkv merge all.jsonl part0.jsonl part1.jsonl part2.jsonl part3.jsonl"""


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "data sets (qkv generate IN OUT)",
        "The same command, given again after a crash, goes on where it was. OUT.qkv beside OUT\n"
        "has the settings, which must be the same then.",
    )
    add = group.add_argument
    add("--prompt-column", metavar="NAME",
        help="text, token ids or messages (default: prompt, prompt_token_ids or messages)"
        )  # fmt: skip
    add("--template", metavar="TEXT", help="Jinja over the row's columns; \\n is a new line")
    add("--template-file", metavar="FILE", help="the same, in a file")
    add("--system", metavar="TEXT", help="a system message; prompts then go through the template")
    add("--id-column", metavar="NAME",
        help="the rows' names (default: id, key or custom_id, else their place)")  # fmt: skip
    add("--params-column", metavar="NAME",
        help="sampling parameters of each row (default: params)")  # fmt: skip
    add("--columns", metavar="A,B", help="input columns that are kept (default: all; '': none)")
    add("--token-ids", action="store_true", help="write token ids, too")
    add("--on-finish", metavar="MODULE:NAME",
        help="a function of the output, in a module of this folder or an installed one; what it "
        "returns, a mapping, becomes columns score_...")  # fmt: skip
    add("--on-bad-row", choices=("error", "skip", "stop"), default="error",
        help="a line that is no row becomes a row with an error, is left out, or stops before any "
        "work (default: error)")  # fmt: skip
    add("--retry-errors", action="store_true", help="do rows again that have an error in OUT")
    add("--restart", action="store_true", help="begin a new OUT; the old one is kept as OUT.1")
    add("--shard", metavar="I/N", help="only part I (from 0) of N, by the rows' ids")
    add("--log-json", action="store_true",
        help="JSON lines of what happens instead of the bar, on standard error")  # fmt: skip


#: What only a data set has: the options above, with their defaults.
_OWN = ("prompt_column", "template", "template_file", "system", "id_column", "params_column",
        "columns", "token_ids", "on_finish", "retry_errors", "restart", "shard",
        "log_json")  # fmt: skip


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the two arguments are files, by their names' ends."""
    if len(args.prompts) != 2:
        return False
    source, target = (Path(name).suffix.lower() for name in args.prompts)
    given = source in INPUTS or args.prompts[0] == "-"
    if given and target not in OUTPUTS and Path(args.prompts[0]).is_file():
        raise Problem(f"OUT {args.prompts[1]!r:.60}: must end with one of {', '.join(OUTPUTS)}")
    return given and target in OUTPUTS


def check_unused(args: argparse.Namespace) -> None:
    """Options of data sets are for these."""
    for name in _OWN:
        if getattr(args, name) not in (None, False):
            flag = "--" + name.replace("_", "-")
            raise Problem(
                f"{flag} goes with qkv generate IN OUT: IN ends with {', '.join(INPUTS)}, "
                f"OUT with {', '.join(OUTPUTS)}"
            )


def run(args: argparse.Namespace) -> int:
    for name in ("input", "output", "dataset"):
        if getattr(args, name) is not None:
            raise Problem(f"--{name} {getattr(args, name)}: IN and OUT are given already")
    source, target = args.prompts
    try:
        summary = dataset.run_dataset(
            args.model,
            source,
            target,
            sampling(args),
            options=_rows(args),
            on_finish=_hook(args.on_finish),
            on_bad_row=args.on_bad_row,
            retry_errors=args.retry_errors,
            restart=args.restart,
            shard=_shard(args.shard),
            limit=args.limit,
            progress=not args.no_progress,
            log_json=args.log_json,
            kv_cache_dtype=kv_cache_dtype(args.kv_cache_dtype),
            tokenizer=args.tokenizer_path,
            **engine_arguments(args),
        )
    except OSError as error:
        raise Problem(f"{error.filename or source}: {error.strerror}") from error
    if args.json:
        print_json(summary.to_dict())
    elif not args.log_json:
        print(summary, file=sys.stderr)
    return 1 if summary.failed else 0


def _rows(args: argparse.Namespace) -> dataset.Rows:
    template = args.template
    if template is not None:
        template = template.replace("\\n", "\n")
    if args.template_file is not None:
        if template is not None:
            raise Problem("--template and --template-file: one of them")
        try:
            template = Path(args.template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Problem(f"--template-file {args.template_file}: {error}") from error
    columns = None
    if args.columns is not None:
        columns = [name.strip() for name in args.columns.split(",") if name.strip()]
    return dataset.Rows(
        prompt=args.prompt_column,
        template=template,
        system=args.system,
        chat=args.chat,
        id=args.id_column,
        params=args.params_column,
        columns=columns,
        token_ids=args.token_ids,
    )


def _hook(given: str | None) -> Hook | None:
    if given is None:
        return None
    module, _, name = given.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Hook = getattr(import_module(module), name)
    except Exception as error:  # of the caller's own code
        raise Problem(f"--on-finish {given}: {described(error)}") from error
    finally:
        sys.path.pop(0)
    return found


def _shard(given: str | None) -> tuple[int, int] | None:
    if given is None:
        return None
    try:
        place, n = (int(part) for part in given.split("/"))
    except ValueError:
        raise Problem(f"--shard {given}: I/N is needed, as 0/4") from None
    return place, n


def add_merge(verbs: Any) -> None:
    parser = verbs.add_parser(
        "merge",
        help="join what the shards of a data set wrote",
        description="Joins the outputs of all shards of a data set. They must be of one input,\n"
        "made with the same settings, and finished; no row may be lost or there twice.",
        epilog="examples:\n  qkv merge all.jsonl part0.jsonl part1.jsonl part2.jsonl\n"
        "  qkv merge all.parquet part*.parquet",
        formatter_class=FORMATTER,
    )
    parser.add_argument("out", metavar="OUT", help="the new output")
    parser.add_argument("parts", metavar="PART", nargs="+", help="the shards' outputs")
    json_option(parser)
    parser.set_defaults(run=_merge)


def _merge(args: argparse.Namespace) -> int:
    try:
        rows = dataset.merge(args.parts, args.out)
    except OSError as error:
        raise Problem(f"{error.filename}: {error.strerror}") from error
    if args.json:
        print_json({"out": args.out, "rows": rows})
    else:
        print(f"{args.out}: {rows} rows of {len(args.parts)} parts")
    return 0
