"""The command line. Each verb has a function that adds its options and one that runs it."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from .. import __version__
from . import bench, compare, convert, dataset, facts, generate, kv
from .arguments import FORMATTER, Problem


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qkv",
        description="Batch offline inference of large language models on this machine.",
        epilog="first steps:\n"
        "  qkv demo-model                                      bring a small model\n"
        '  qkv generate --model demo "The capital of France is"\n'
        '  qkv chat --model demo "What is a prime number?"\n'
        "  qkv compare demo --tasks mmlu --limit 57            is FP8 KV safe for it?\n"
        "  qkv COMMAND --help                                  more about a command",
        formatter_class=FORMATTER,
    )
    parser.add_argument("--version", action="version", version=f"qkv {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    generate.add_generate(verbs)
    generate.add_chat(verbs)
    dataset.add_merge(verbs)
    compare.add(verbs)
    kv.add_calibrate(verbs)
    kv.add_plan(verbs)
    bench.add(verbs)
    convert.add(verbs)
    facts.add(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 1 if it failed, 2 for wrong use."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # rather escapes than lose a row
    try:
        if sys.stdout is None and getattr(args, "output", None) in (None, "-"):
            raise Problem("standard output is closed")
        code: int = args.run(args)
        return code
    except KeyboardInterrupt:
        print("qkv: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("QKV_DEBUG") == "1":
            raise
        wrong_use = isinstance(error, (Problem, ValueError, TypeError))
        text = str(error) or type(error).__name__
        print(f"qkv: {text}", file=sys.stderr)
        return 2 if wrong_use else 1
