"""What lanes cost, as CSV: N lanes together against each lane alone, over the same weights.

    bench_lanes.py [--model MODEL] [--lanes bf16,fp8_e4m3,nvfp4] [--batches 1,2,8,32] ...

Without --model: random bf16 weights in the shape of Qwen2.5-0.5B, with a smaller vocabulary. All
runs are taken in turn in one process, so that what else the machine does meets them all; figures
are medians over the rounds. `of_sum` is the time of the lanes together over the sum of each alone;
`of_first` over the first lane alone. Decoding reads the weights once a step for all lanes."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

import qkv
from qkv.comparison.runner import timed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ref import make_tiny  # noqa: E402

SHAPE: dict[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 16384,
}  # fmt: skip


def seconds(
    engine: qkv.Engine, lanes: Sequence[int], batch: int, context: int, n_out: int
) -> tuple[float, float]:
    """Of prefill and of decoding: `batch` sequences in each of these lanes, all at once."""
    engine._core.flush()
    stream = np.random.default_rng(batch)
    prompts = stream.integers(0, engine._vocab, (batch, context)).astype(np.int32)
    sequences = [(prompt, lane) for prompt in prompts for lane in lanes]
    prefill, decode = timed(engine, sequences, n_out)[0]
    return prefill, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--lanes", default="bf16,fp8_e4m3,nvfp4")
    parser.add_argument("--batches", default="1,2,8,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16, help="decoded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    lanes = args.lanes.split(",")
    batches = [int(batch) for batch in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_tiny.write(folder, "qwen2", tokenizer=False, **SHAPE)
        per_sequence = -(-(args.context + args.tokens) // 16) * 16
        with qkv.Engine(
            args.model or folder, kv_cache_dtype=lanes, threads=args.threads,
            kv_tokens=max(batches) * per_sequence, max_running=max(batches) * len(lanes),
        ) as engine:  # fmt: skip
            report(engine, lanes, batches, args)


def report(
    engine: qkv.Engine, lanes: Sequence[str], batches: Sequence[int], args: argparse.Namespace
) -> None:
    print("phase,lanes,batch,context,first_ms,sum_ms,together_ms,of_sum,of_first", flush=True)
    # Each lane alone, then the first two together, the first three, ...
    alone = [[lane] for lane in range(len(lanes))]
    together = [*accumulate(alone, lambda a, b: a + b)][1:]
    for batch in batches:
        taken: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        for turn in range(args.rounds + 1):  # the first warms up
            for group in [*alone, *together]:
                spent = seconds(engine, group, batch, args.context, args.tokens)
                if turn:
                    taken.setdefault(tuple(group), []).append(spent)
        for phase, name in enumerate(("prefill", "decode")):
            median = {
                group: 1e3 * statistics.median(entry[phase] for entry in entries)
                for group, entries in taken.items()
            }
            for group in together:
                first, whole = median[(0,)], median[tuple(group)]
                total = sum(median[(lane,)] for lane in group)
                print(
                    f"{name},{'+'.join(lanes[lane] for lane in group)},{batch},{args.context},"
                    f"{first:.1f},{total:.1f},{whole:.1f},{whole / total:.3f},{whole / first:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
