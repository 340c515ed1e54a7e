"""What each KV format costs or gains in the whole engine, relative to bf16, as CSV.

    bench_kv.py MODEL [--formats fp8_e4m3,nvfp4] [--sequences 1,4] [--context 4096] ...

One engine holds a lane per format. They take turns, so that what else the machine does meets all of
them; figures are medians over the rounds. Prefill is the time of a whole prompt of `context`
tokens; decoding goes on from there, with the prompts of the round before found as prefixes."""

from __future__ import annotations

import argparse
import statistics

import numpy as np

import qkv
from qkv.comparison.runner import timed


def seconds(
    engine: qkv.Engine, lane: int, n_sequences: int, args: argparse.Namespace
) -> tuple[float, float]:
    """Of the steps with prompt tokens, and of a step that only decodes."""
    stream = np.random.default_rng(7)
    prompts = stream.integers(0, engine._vocab, (n_sequences, args.context)).astype(np.int32)
    spent, rows = timed(engine, [(prompt, lane) for prompt in prompts], args.tokens)
    return spent[0], spent[1] * n_sequences / rows[1]


def report(phase: str, n_sequences: int, formats: list[str], taken: list[list[float]]) -> None:
    median = [statistics.median(times) for times in taken]
    for name, time in zip(formats, median, strict=True):
        print(f"{phase},{n_sequences},{name},{1e3 * time:.2f},{median[0] / time:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--formats", default="fp8_e4m3,mxfp8,nvfp4,fp4_mx_block16")
    parser.add_argument("--sequences", default="1")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=9, help="decoded")
    parser.add_argument("--rounds", type=int, default=7, help="of decoding")
    parser.add_argument("--prefills", type=int, default=3, help="rounds of prefill")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    formats = ["bf16", *args.formats.split(",")]
    lanes = range(len(formats))
    counts = [int(count) for count in args.sequences.split(",")]
    per_sequence = -(-(args.context + args.tokens) // 16) * 16
    with qkv.Engine(
        args.model, kv_cache_dtype=formats, threads=args.threads,
        kv_tokens=max(counts) * per_sequence, max_running=max(counts),
    ) as engine:  # fmt: skip
        print("phase,sequences,format,ms,relative", flush=True)
        for n in counts:
            prefill: list[list[float]] = [[] for _ in lanes]
            for _ in range(args.prefills):
                engine._core.flush()
                for lane in lanes:
                    prefill[lane].append(seconds(engine, lane, n, args)[0])
            report("prefill", n, formats, prefill)
            rounds = [
                [seconds(engine, lane, n, args)[1] for lane in lanes] for _ in range(args.rounds)
            ]
            report("decode", n, formats, [list(times) for times in zip(*rounds, strict=True)])


if __name__ == "__main__":
    main()
