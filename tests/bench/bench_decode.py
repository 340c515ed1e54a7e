"""Decoding one sequence, against reading the weights once per token, as CSV.

    bench_decode.py [MODEL ...] [--threads 2] [--tokens 64] [--rounds 5]

`of_limit` is the time that reading a model's bytes takes at the bandwidth that bench_limits
measures with huge pages and as many threads, over the time of a step. A step reads every tensor of
the files but an embedding that is not also the head, of which it reads one row. `fixed` is a model
with the demo's layers, heads and vocabulary, but hidden and intermediate size of 64: what a step
costs without weights. The limit is measured again before each model in each round, as a machine's
bandwidth may change between two of them; figures are medians over the rounds, of the ratios too."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import qkv
from qkv import _core
from qkv.comparison.runner import timed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ref import make_tiny  # noqa: E402

HERE = Path(__file__).resolve().parent
EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight")
HEADS = ("output.weight", "lm_head.weight")
PROMPT_TOKENS = 16
FIXED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 30, "head_dim": 64,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
}  # fmt: skip


def bytes_per_token(model: str) -> int:
    checkpoint = _core.Checkpoint(model)
    sizes = {name: n_bytes for name, _, _, n_bytes in checkpoint.tensors()}
    checkpoint.close()
    has_head = any(name in sizes for name in HEADS)
    return sum(n for name, n in sizes.items() if not (has_head and name in EMBEDDINGS))


def build_limits(folder: str) -> str:
    program = os.path.join(folder, "bench_limits")
    source = str(HERE / "bench_limits.c")
    subprocess.run(["cc", "-O3", "-D_GNU_SOURCE", "-pthread", source, "-o", program], check=True)
    return program


def read_bandwidth(program: str, threads: int) -> float:
    """In bytes per second."""
    command = [program, str(threads), "read, huge pages"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return 1e9 * float(out.splitlines()[1].split(",")[-2])


def step_seconds(engine: qkv.Engine, n_tokens: int) -> float:
    engine._core.flush()
    stream = np.random.default_rng(0)
    prompt = stream.integers(0, engine._vocab, PROMPT_TOKENS).astype(np.int32)
    seconds, rows = timed(engine, [(prompt, 0)], n_tokens)
    return seconds[1] / rows[1]


def measure(models: Sequence[str], program: str, args: argparse.Namespace) -> None:
    # (bandwidth, time of a step) of each round
    taken: dict[str, list[tuple[float, float]]] = {model: [] for model in models}
    with ExitStack() as stack:
        engines = {
            model: stack.enter_context(qkv.Engine(model, threads=args.threads, max_running=1))
            for model in models
        }
        for turn in range(args.rounds):
            for model, engine in engines.items():
                if turn == 0:
                    step_seconds(engine, args.tokens)
                limit = read_bandwidth(program, args.threads)
                taken[model].append((limit, step_seconds(engine, args.tokens)))
    print("model,threads,mbytes,read_gbytes_per_s,step_ms,tokens_per_s,of_limit")
    for model, rounds in taken.items():
        n_bytes = bytes_per_token(model)
        limit = statistics.median(limit for limit, _ in rounds)
        step = statistics.median(step for _, step in rounds)
        ratio = statistics.median(n_bytes / limit / step for limit, step in rounds)
        print(
            f"{Path(model).name},{args.threads},{1e-6 * n_bytes:.1f},{1e-9 * limit:.1f},"
            f"{1e3 * step:.3f},{1 / step:.1f},{ratio:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="decoded per round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fixed = os.path.join(folder, "fixed")
        make_tiny.write(fixed, "llama", tokenizer=False, **FIXED)
        measure([*args.models, fixed], build_limits(folder), args)


if __name__ == "__main__":
    main()
