"""What a data set costs beside the model: reading, filling in, tokenizing, scheduling, writing.

    python tests/bench/bench_dataset.py overhead [--model demo] [--rows 512]
    python tests/bench/bench_dataset.py many [--rows 1000000]

overhead: the share of the time of qkv.run_dataset that is not spent in the engine's steps, as the
median of some runs; rows of about 40 prompt tokens and 32 output tokens through a template. A step
holds the kernels and the scheduler in C; all else is Python's. many: memory and time while a tiny
model answers many short rows: resident memory after each tenth. `make soak` runs it with a million
and wants it flat from the first tenth on."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qkv  # noqa: E402
from ref import make_tiny  # noqa: E402

WORDS = "the quick brown fox jumps over a lazy dog while seven grey cats look on".split()
#: What memory may grow by from a tenth of the rows to all of them: pieces that the allocator keeps.
SLACK_BYTES = 8 << 20


class Timed:
    """The C engine, with the time that its steps take."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.seconds = 0.0

    def step(self) -> Any:
        start = time.perf_counter()
        try:
            return self._core.step()
        finally:
            self.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def write_rows(path: Path, n_rows: int, n_words: int) -> None:
    draw = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(n_rows):
            text = " ".join(draw.choices(WORDS, k=n_words))
            file.write(json.dumps({"id": number, "text": text}) + "\n")


def overhead(folder: Path, model: str, n_rows: int) -> None:
    source = folder / "in.jsonl"
    write_rows(source, n_rows, 30)
    params = qkv.SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    options = qkv.dataset.Rows(template="Review: {{ text }}\nIs it positive?")
    shares = []
    with qkv.Engine(model) as engine:
        core: Any = engine._core
        for turn in range(4):
            timed = Timed(core)
            engine._core = timed  # type: ignore[assignment]
            core.flush()
            start = time.perf_counter()
            qkv.run_dataset(engine, source, folder / f"{turn}.jsonl", params, options=options,
                            progress=False)  # fmt: skip
            whole = time.perf_counter() - start
            engine._core = core
            if turn:  # the first one warms up
                shares.append(1 - timed.seconds / whole)
                facts = {"rows": n_rows, "seconds": round(whole, 2),
                         "us_per_row": round(1e6 * (whole - timed.seconds) / n_rows),
                         "overhead": round(shares[-1], 4)}  # fmt: skip
                print(json.dumps(facts), flush=True)
    print(json.dumps({"overhead": round(statistics.median(shares), 4)}))


def resident() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmRSS:")[1].split()[0])


def many(folder: Path, n_rows: int) -> None:
    model, source = folder / "model", folder / "in.jsonl"
    model.mkdir()
    make_tiny.write(model, "llama", num_hidden_layers=1)
    write_rows(source, n_rows, 3)
    params = qkv.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    seen: list[int] = []
    start = time.monotonic()

    def rows() -> Iterator[dict[str, Any]]:
        with open(source, encoding="utf-8") as file:
            for number, line in enumerate(file):
                if number % (n_rows // 10) == 0:
                    seen.append(resident())
                    facts = {"rows": number, "mib": seen[-1] >> 20,
                             "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
                    print(json.dumps(facts), flush=True)
                yield json.loads(line)

    out = folder / "out.jsonl"
    options = qkv.dataset.Rows(prompt="text")
    with qkv.Engine(model, kv_tokens=4096, threads=1) as engine:
        for _ in range(2):  # the second run finds them all
            summary = qkv.run_dataset(engine, rows(), out, params, options=options, progress=False)
            seen.append(resident())
            facts = {"rows": n_rows, "there_before": summary.before, "mib": seen[-1] >> 20,
                     "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
            print(json.dumps(facts), flush=True)
    grown = max(seen) - seen[1]
    print(json.dumps({"grown_mib": grown / 2**20, "allowed_mib": SLACK_BYTES / 2**20}))
    if grown > SLACK_BYTES or summary.before != n_rows:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("overhead", "many"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "overhead":
            overhead(Path(folder), args.model, args.rows or 512)
        else:
            many(Path(folder), args.rows or 1_000_000)


if __name__ == "__main__":
    main()
