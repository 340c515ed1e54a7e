"""qkv bench: how fast, how late, who waits, and where the cliff is."""

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qkv  # what brings scipy is taken from it when the verb runs

from ..engine import Engine
from .arguments import FORMATTER, MODEL_HELP, Problem, engine_arguments, engine_options
from .arguments import kv_cache_dtype as parsed_dtypes
from .rows import json_option, show

_SWEEPS = ("concurrency", "shared-prefix")


def add(verbs: Any) -> None:
    parser = verbs.add_parser(
        "bench",
        help="speed, waiting and cliffs by users, shared prefixes, weight and KV formats",
        description="Runs a load on this machine; or with --simulate the engine's scheduler\n"
        "against a cost model of a device that is not here, with its pool, in seconds, from a\n"
        "config.json. concurrency: distinct prompts from 1 to 64 users. shared-prefix: groups of\n"
        "prompts with a common beginning, of growing length.",
        epilog="examples:\n"
        "  qkv bench demo --users 1,4,16 --input-tokens 128 --output-tokens 32 --seeds 2\n"
        "  qkv bench demo --sweep shared-prefix --pool 2048 --schedule fcfs --plot cliff.png\n"
        "  qkv bench ./Qwen3-8B --simulate --memory-gib 22 --bandwidth 300 --tflops 60 \\\n"
        "      --quantization none,fp8 --kv-cache-dtype bf16,fp8_e4m3\n"
        "  qkv bench demo --json > here.json; qkv bench demo --simulate --cost here.json \\\n"
        "      --pool 1024,4096     the pools that this machine does not have\n"
        "times are in seconds; goodput counts the requests per second whose time to the first\n"
        "token and mean time per token after it are both within their targets",
        formatter_class=FORMATTER,
    )
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}; with --simulate a config")
    _load_options(parser)
    _machine_options(parser)
    engine_options(parser, one_model=False, kv_cache_dtypes="bf16,fp8_e4m3")
    add = parser.add_argument
    add("--plot", metavar="FILE", help="write a plot here (needs qkv[report])")
    add("--no-progress", action="store_true", help="do not say what is being done")
    json_option(parser)
    parser.set_defaults(run=_bench)


def _load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load (with commas: several)")
    add = group.add_argument
    add("--sweep", choices=_SWEEPS, default="concurrency", help="default: concurrency")
    add("--users", metavar="N,N", help="who each send one request after the other (default: 1 to "
        "64; shared-prefix: 8)")  # fmt: skip
    add("--groups", metavar="N,N", help="of prompts with a common beginning (default: 4)")
    add("--shared-tokens", metavar="N,N", help="length of that (default: 0 to 4096)")
    add("--pool", metavar="N,N",
        help="tokens of the KV cache; or by format: bf16=24094,fp8_e4m3=142369 (default: what the "
        "engine takes, or what fits)")  # fmt: skip
    add("--requests", type=int, metavar="N",
        help="of a run (default: 4 for each user, at least 16; shared-prefix: 64)")  # fmt: skip
    add("--input-tokens", "--random-input-len", type=int, metavar="N",
        help="of a prompt, not shared (default: 512; shared-prefix: 128)")  # fmt: skip
    add("--output-tokens", "--random-output-len", type=int, default=128, metavar="N",
        help="default: 128")  # fmt: skip
    add("--spread", type=float, default=0.0, metavar="F",
        help="lengths vary by this share, 0 to 1 (default: 0)")  # fmt: skip
    add("--seeds", type=int, default=3, metavar="N", help="runs of each point (default: 3)")
    add("--ttft-target", type=float, default=1.0, metavar="S",
        help="for goodput: first token within (default: 1)")  # fmt: skip
    add("--tpot-target", type=float, default=0.1, metavar="S",
        help="for goodput: time per token after it (default: 0.1)")  # fmt: skip


def _machine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a device that is not here")
    add = group.add_argument
    add("--simulate", action="store_true", help="load nothing; the scheduler on a virtual clock")
    add("--memory-gib", type=float, metavar="GIB", help="free there before the weights load")
    add("--weights-gib", metavar="GIB",
        help="or by weight format: none=15.28,fp8=8.81 (default: counted)")  # fmt: skip
    add("--bandwidth", type=float, metavar="GB/S", help="of its memory")
    add("--tflops", type=float, metavar="T", help="that its GEMMs reach")
    add("--cost", metavar="FILE",
        help="instead of these two: a cost model, or what qkv bench --json said there")  # fmt: skip


def _bench(args: argparse.Namespace) -> int:
    found = qkv.bench(args.model, args.sweep, **_arguments(args))
    code = show(args, found.to_dict, found)  # first: a plot that cannot be written loses nothing
    if args.plot is not None:
        try:
            found.plot().savefig(args.plot)
        except (OSError, ValueError) as error:
            raise Problem(f"--plot {args.plot}: {error}") from error
    return code


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    if args.max_running_requests is not None:
        raise Problem("--max-running-requests: --users says how many run")
    if args.pool is not None and args.max_total_tokens is not None:
        raise Problem("give --pool or --max-total-tokens (one of them)")
    defaults = inspect.signature(Engine).parameters
    engine = engine_arguments(args)
    for name in ("quantization", "max_running", "kv_tokens"):
        del engine[name]
    if args.simulate:
        del engine["mem_fraction"]
    engine = {name: value for name, value in engine.items() if value != defaults[name].default}
    kinds = (args.quantization or "none").split(",")
    return engine | {
        "kv_cache_dtypes": parsed_dtypes(args.kv_cache_dtype),
        "quantizations": [None if kind.strip() == "none" else kind.strip() for kind in kinds],
        "users": _numbers("--users", args.users),
        "groups": _numbers("--groups", args.groups),
        "shared_tokens": _numbers("--shared-tokens", args.shared_tokens),
        "pool_tokens": args.max_total_tokens if args.pool is None else _pools(args.pool),
        "requests": args.requests,
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
        "spread": args.spread,
        "seeds": args.seeds,
        "targets": qkv.Targets(ttft=args.ttft_target, tpot=args.tpot_target),
        "machine": _machine(args),
        "progress": not args.no_progress,
    }


def _numbers(option: str, given: str | None) -> list[int] | None:
    if given is None:
        return None
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise Problem(f"{option} {given}: numbers with commas are needed") from None


def _named(option: str, given: str, number: Callable[[str], Any]) -> dict[str, Any]:
    """ "a=1,b=2"."""
    pairs = [part.partition("=") for part in given.split(",")]
    try:
        return {name.strip(): number(value) for name, _, value in pairs}
    except ValueError:
        raise Problem(f"{option} {given}: NAME=NUMBER with commas is needed") from None


def _pools(given: str) -> Any:
    return _named("--pool", given, int) if "=" in given else _numbers("--pool", given)


def _machine(args: argparse.Namespace) -> Any:
    named = {
        "--memory-gib": args.memory_gib,
        "--weights-gib": args.weights_gib,
        "--bandwidth": args.bandwidth,
        "--tflops": args.tflops,
        "--cost": args.cost,
    }
    if not args.simulate:
        for option, value in named.items():
            if value is not None:
                raise Problem(f"{option} describes a device that is not here: add --simulate")
        return None
    weights: Any = args.weights_gib
    if weights is not None:
        try:
            weights = float(weights)
        except ValueError:
            weights = _named("--weights-gib", weights, float)
    fraction = (
        {} if args.mem_fraction_static is None else {"mem_fraction": args.mem_fraction_static}
    )
    return qkv.Machine(
        memory_gib=args.memory_gib,
        weights_gib=weights,
        gb_per_s=args.bandwidth,
        tflops=args.tflops,
        cost=None if args.cost is None else _costs(args.cost),
        **fraction,
    )


def _costs(path: str) -> Any:
    """A cost model, or those of a bench by the names of its arms."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Problem(f"--cost {path}: {error}") from error
    try:
        if isinstance(found, dict) and "cost_models" in found:
            return {
                name: qkv.CostModel.from_mapping(
                    {k: v for k, v in model.items() if k.endswith("_seconds")}
                )
                for name, model in found["cost_models"].items()
            }
        return qkv.CostModel.from_mapping(found)
    except (ValueError, TypeError, AttributeError) as error:
        raise Problem(f"--cost {path}: {error}") from error
