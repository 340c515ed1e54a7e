"""An offline batch and a prefill, against the dot products that they need, as CSV.

    bench_batch.py MODEL.gguf ... [--int8] [--threads 2] [--rounds 3]
    bench_batch.py MODEL.gguf --profile prefill|decode|batch

`batch`: --requests prompts of --prompt random tokens through Engine.generate, --out tokens each,
greedy, text included. `prefill`: one prompt of --chunk tokens, and one token. `of_peak` is the time
that the multiply-adds of all matrices take at the peak of bf16 dot products, or of tiles where the
instruction set is amx (limits.h, as many threads, the best of the same run) over the time taken;
`of_kept` the same with the peak that is kept up for a second, the median of those before each case;
logits count where they are needed. With
--int8 each model is also run with activation_quant="int8"; `of_first` is the speed over that of the
first line. Runs are taken in turn; figures are medians over the rounds, of which the first also
pays for fresh memory.

--profile: where the first thread's time goes, in per cent of the run, by perf's samples."""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import qkv
from qkv import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bench_decode import build_limits  # noqa: E402

# Functions by what they do, the first that matches; all others are what a step costs besides:
# scheduling, Python and the binding. In a step only attention copies and clears rows.
PARTS = {
    "clearing": r"clear_page",
    "attention": r"att|^qk_|^pv_|rope|^kv_|^store|prepare_head|put_rows|combine|memmove|memset",
    "gemm": r"direct_|tile_|q8_|decode_|gemm|run_tiles|finish$|finish_cells|linear_thread",
    "activations": r"pack_|quantize_|prologue|norm_|activate",
    "sampling": r"sample|logits_|argmax|choose|top_tokens|sift",
    "waiting": r"gate_|barrier|futex|switch|spin",
}


DOT = "bf16 dot (vdpbf16ps)"
TILES = "bf16 tiles (tdpbf16ps)"


@dataclass
class Case:
    model: str
    int8: bool
    engine: qkv.Engine
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return Path(self.model).name.removesuffix(".gguf") + (",int8" if self.int8 else ",bf16")


def multiply_adds(model: str) -> tuple[int, int]:
    """Of one token: (in all layers, of the head)."""
    checkpoint = _core.Checkpoint(model)
    matrices = {name: math.prod(dims) for name, _, dims, _ in checkpoint.tensors() if len(dims) > 1}
    checkpoint.close()
    embedding = matrices.pop("token_embd.weight")
    head = matrices.pop("output.weight", embedding)
    return sum(matrices.values()), head


def dot_peak(program: str, threads: int, limit: str, *seconds: str) -> float:
    """Multiply-adds per second, at best or as the mean of some seconds."""
    command = [program, str(threads), limit, *seconds]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return 0.5e9 * float(out.splitlines()[1].split(",")[-2])


def run(engine: qkv.Engine, requests: int, n_in: int, n_out: int, seed: int) -> float:
    stream = np.random.default_rng(seed)
    prompts = stream.integers(0, engine._vocab, (requests, n_in)).astype(np.int32)
    params = qkv.SamplingParams(max_tokens=n_out, temperature=0.0, ignore_eos=True)
    engine._core.flush()
    begun = time.perf_counter()
    outputs = engine.generate(list(prompts), params, progress=False)
    seconds = time.perf_counter() - begun
    assert all(output.error is None for output in outputs)
    return seconds


def shape(phase: str, args: argparse.Namespace) -> tuple[int, int, int]:
    """Requests, prompt tokens and output tokens of each."""
    return {
        "batch": (args.requests, args.prompt, args.out),
        "prefill": (1, args.chunk, 1),
        "decode": (args.requests, 1, args.prompt + args.out),
    }[phase]


def open_engine(model: str, int8: bool, args: argparse.Namespace) -> qkv.Engine:
    per_sequence = -(-(args.prompt + args.out) // 16) * 16
    return qkv.Engine(
        model, threads=args.threads, kv_tokens=max(args.requests * per_sequence, 2 * args.chunk),
        max_running=args.requests, chunk_tokens=args.chunk,
        activation_quant="int8" if int8 else "off",
    )  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        program = build_limits(folder)
        cases = []
        for model in args.models:
            for int8 in (False, True) if args.int8 else (False,):
                with suppress(qkv.UnsupportedError):  # int8 where no weight is in integer codes
                    engine = stack.enter_context(open_engine(model, int8, args))
                    cases.append(Case(model, int8, engine))
        limit = TILES if cases[0].engine.info["isa"] == "amx" else DOT
        peaks = []
        kept = []
        for turn in range(args.rounds):
            for case in cases:
                if turn == 0:
                    run(case.engine, *shape("prefill", args), seed=99)
                peaks.append(dot_peak(program, args.threads, limit))
                kept.append(dot_peak(program, args.threads, limit, "1"))
                for phase in args.phases.split(","):
                    seconds = run(case.engine, *shape(phase, args), seed=turn)
                    case.seconds.setdefault(phase, []).append(seconds)
        peak, mean = max(peaks), statistics.median(kept)
        rates = f"{2e-9 * peak:.1f} GFLOP/s, kept up {2e-9 * mean:.1f}"
        print(f"# {args.threads} threads, {limit} {rates}")
        if limit != DOT:
            print(f"# {DOT} {2e-9 * dot_peak(program, args.threads, DOT):.1f} GFLOP/s")
        report(cases, peak, mean, args)


def report(cases: list[Case], peak: float, kept: float, args: argparse.Namespace) -> None:
    print("phase,model,activations,tokens,ms,tokens_per_s,of_peak,of_kept,of_first")
    for phase in args.phases.split(","):
        requests, n_in, n_out = shape(phase, args)
        first = statistics.median(cases[0].seconds[phase])
        for case in cases:
            layers, head = multiply_adds(case.model)
            # The last token of each request is not run through the model.
            work = requests * ((n_in + n_out - 1) * layers + n_out * head)
            seconds = statistics.median(case.seconds[phase])
            tokens = requests * (n_in + n_out)
            print(
                f"{phase},{case.name},{tokens},{1e3 * seconds:.1f},{tokens / seconds:.0f},"
                f"{work / peak / seconds:.3f},{work / kept / seconds:.3f},{first / seconds:.2f}"
            )


def run_for_profile(args: argparse.Namespace) -> None:
    """Prints begin and end of what is to be profiled."""
    with open_engine(args.models[0], args.int8, args) as engine:
        run(engine, *shape(args.profile, args), seed=99)
        begun = time.monotonic()
        turn = 0
        while turn == 0 or time.monotonic() < begun + 2:
            run(engine, *shape(args.profile, args), seed=turn)
            turn += 1
        print(begun, time.monotonic())


def profile(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/perf.data"
        command = ["perf", "record", "-q", "-k", "CLOCK_MONOTONIC", "-e", "cpu-clock", "-F", "1999"]
        command += ["-o", data, sys.executable, *sys.argv, "--child"]
        child = subprocess.run(command, check=True, capture_output=True, text=True)
        begun, ended = map(float, child.stdout.split()[-2:])
        command = ["perf", "script", "-i", data, "-F", "pid,tid,time,ip,sym"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts: Counter[str] = Counter()
    symbols: Counter[str] = Counter()
    for pid, tid, when, symbol in re.findall(r"(\d+)/(\d+)\s+([\d.]+):\s+[0-9a-f]+ (.*)", out):
        if pid == tid and begun <= float(when) <= ended:
            found = [part for part, names in PARTS.items() if re.search(names, symbol)]
            parts[found[0] if found else "rest"] += 1
            symbols[symbol] += 1
    total = sum(parts.values())
    print("part,per_cent")
    for part, count in parts.most_common():
        print(f"{part},{100 * count / total:.1f}")
    for symbol, count in symbols.most_common(args.symbols):
        print(f"# {100 * count / total:5.1f} {symbol}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phases", default="prefill,batch")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--out", type=int, default=64, help="tokens of an output")
    parser.add_argument("--chunk", type=int, default=512, help="rows of a prefill step")
    parser.add_argument("--profile", choices=["prefill", "decode", "batch"])
    parser.add_argument("--symbols", type=int, default=0, help="list the most frequent functions")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_for_profile(args)
    elif args.profile:
        profile(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
