"""qkv convert: a checkpoint with quantized weights, for this engine and for others."""

import argparse
from dataclasses import asdict
from typing import Any

from .. import tables
from ..inspection import size
from ..quantization import convert
from .arguments import FORMATTER, MODEL_HELP
from .rows import json_option, show


def add(verbs: Any) -> None:
    parser = verbs.add_parser(
        "convert",
        help="write a checkpoint with quantized weights",
        description="Quantizes the weights of a checkpoint and writes them as compressed-tensors\n"
        "(which vLLM, SGLang and transformers read), mlx_q4 and mlx_q8 as MLX. lm_head and the\n"
        "embedding stay as they are, but for MLX. The folder appears whole or not at all.",
        epilog="example:\n  qkv convert demo smollm2-int4 --quantization int4 --group-size 64",
        formatter_class=FORMATTER,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("out", metavar="OUT", help="the folder to write; must not be there")
    parser.add_argument(
        "--quantization",
        required=True,
        metavar="NAME",
        help=f"one of {', '.join(convert.names())} (qkv info says what they are)",
    )
    parser.add_argument("--group-size", type=int, metavar="N", help="of int4 (128) and MLX (64)")
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="modules that stay as they are: names, globs, or re: and an expression",
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="default: all")
    json_option(parser)
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> int:
    done = convert.convert(
        args.model,
        args.out,
        args.quantization,
        group_size=args.group_size,
        ignore=args.ignore,
        threads=args.threads,
    )
    lines = [
        f"{done.folder}: {done.n_quantized} matrices in {done.quantization}, {size(done.n_bytes)}"
    ]
    if done.left:
        shown = tables.first(done.left)
        lines.append(f"{len(done.left)} stay as they are, their rows do not divide: {shown}")
    lines += [f"note: {note}" for note in done.notes]
    return show(args, lambda: asdict(done), "\n".join(lines))
