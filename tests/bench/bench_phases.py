"""Which format of weights belongs to which phase: prefill and decode of each, as CSV.

    bench_phases.py MODEL [--formats unquant,w8a8_int8,...] [--rows 1,8] [--threads 2] [--rounds 5]

MODEL holds weights in 16 bits; each format is made of them while loading (`quantization=`; unquant:
as they are), with `activation_quant="checkpoint"`. `prefill`: tokens per second of one prompt of
--chunk tokens. `decode_N`: of N sequences of one prompt token and --out output tokens, greedy.
`relative`: over the first format's in the same run. The last line is the pair that the figures
suggest, in one engine: the fastest prefill as `prefill_quantization=`, the fastest decode of the
first of --rows as `quantization=`. Runs are taken in turn; figures are medians over the rounds."""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import qkv

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bench_batch import run  # noqa: E402

FORMATS = "unquant,fp8_channel,w8a8_fp8,w8a8_int8,int8,mlx_q8,int4,mlx_q4,mxfp4,nvfp4"


@dataclass
class Case:
    name: str
    engine: qkv.Engine
    rates: dict[str, list[float]] = field(default_factory=dict)  # tokens/s by phase

    def rate(self, phase: str) -> float:
        return statistics.median(self.rates[phase])

    @property
    def mib(self) -> float:
        return float(self.engine.memory()["weights"]) / 2**20


def phases(args: argparse.Namespace) -> dict[str, tuple[int, int, int]]:
    """Requests, prompt tokens and output tokens of each, by its name."""
    rows = [int(n) for n in args.rows.split(",")]
    return {"prefill": (1, args.chunk, 1)} | {f"decode_{n}": (n, 1, args.out) for n in rows}


def open_case(
    stack: ExitStack, args: argparse.Namespace, decode: str, prefill: str | None = None
) -> Case:
    most = max(n * -(-(n_in + n_out) // 16) * 16 for n, n_in, n_out in phases(args).values())
    engine = qkv.Engine(
        args.model, quantization=decode, prefill_quantization=prefill, threads=args.threads,
        kv_tokens=most, chunk_tokens=args.chunk, max_running=64,
    )  # fmt: skip
    return Case(decode if prefill is None else f"{prefill} + {decode}", stack.enter_context(engine))


def measure(cases: list[Case], args: argparse.Namespace) -> None:
    """The first round pays for fresh memory and is not kept."""
    for turn in range(args.rounds + 1):
        for case in cases:
            for phase, (n, n_in, n_out) in phases(args).items():
                seconds = run(case.engine, n, n_in, n_out, seed=turn)
                if turn > 0:
                    tokens = n_in if phase == "prefill" else n * n_out
                    case.rates.setdefault(phase, []).append(tokens / seconds)


def show(cases: list[Case], first: Case, args: argparse.Namespace) -> None:
    for case in cases:
        cells = [case.name, f"{case.mib:.0f}"]
        for phase in phases(args):
            cells += [f"{case.rate(phase):.0f}", f"{case.rate(phase) / first.rate(phase):.2f}"]
        print(",".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--rows", default="1,8", help="sequences that decode at a time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--out", type=int, default=32, help="tokens of an output")
    args = parser.parse_args()
    with ExitStack() as stack:
        cases = [open_case(stack, args, name) for name in args.formats.split(",")]
        measure(cases, args)
        columns = [f"{phase},{phase}_relative" for phase in phases(args)]
        print(",".join(["weights", "mib", *columns]))
        show(cases, cases[0], args)
        decode = next(phase for phase in phases(args) if phase != "prefill")
        fastest = {phase: max(cases, key=lambda c: c.rate(phase)) for phase in ("prefill", decode)}
        if fastest["prefill"] is not fastest[decode]:
            pair = open_case(stack, args, fastest[decode].name, fastest["prefill"].name)
            again = cases[0]
            again.rates.clear()
            measure([again, pair], args)
            show([pair], again, args)


if __name__ == "__main__":
    main()
