"""Kills a run over a data set again and again, until it is through, and compares what it wrote with
what a run that nobody disturbed writes: byte for byte, after sorting.

    python tests/tools/kill_runs.py FOLDER [--kills 10000] [--rows 20000] [--seed 1] [--parquet]

makes a tiny model in FOLDER. The process that is killed is a fork of this one, which has imported
everything and opened no engine: so a life costs milliseconds. Some are killed after so many rows,
some after so long: while the output is looked through, the header written, the model loaded."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow.parquet  # noqa: E402, F401 - once, and not in each life

import qkv  # noqa: E402
from qkv.dataset import parquet  # noqa: E402
from ref import make_tiny  # noqa: E402

WORDS = "the quick brown fox jumps over a lazy dog while seven grey cats look on".split()


def write_rows(path: Path, n_rows: int, seed: int) -> None:
    """Short prompts of several lengths, some with parameters of their own, some bad."""
    draw = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(n_rows):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
            row = {"id": f"r{number}", "prompt": prompt, "n": number}
            row["params"] = {"max_tokens": draw.randint(1, 12)}
            line = json.dumps(row)
            if draw.random() < 0.02:
                line = draw.choice(['{"broken', '{"id": "r1", "prompt": "again"}', '{"prompt": 5}'])
            file.write(line + "\n")


def run(model: Path, source: Path, out: Path) -> None:
    qkv.run_dataset(
        model,
        source,
        out,
        qkv.SamplingParams(temperature=0.8, logprobs=0),
        options=qkv.dataset.Rows(token_ids=True),
        progress=False,
        kv_tokens=1024,
        max_running=8,
        threads=1,
    )


def start(work: Callable[[], None]) -> int:
    """In a fork: its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def live(pid: int, path: Path, bytes_more: int, seconds: float) -> int | None:
    """Until the file has grown by so much or the time is over, then SIGKILL. The exit code if it
    ended before."""
    size = path.stat().st_size if path.exists() else 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if path.exists() and path.stat().st_size >= size + bytes_more:
            break
        time.sleep(0.0003)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == -signal.SIGKILL else code


def kill_until_done(model: Path, source: Path, out: Path, kills: int, seed: int, size: int) -> int:
    """Lives of random lengths, as many as are asked for at least; size: of the whole output. How
    often it was killed."""
    draw = random.Random(seed)
    killed = 0
    lines = lines_of(out)
    while True:
        there = lines.stat().st_size if lines.exists() else 0
        left = max(kills - killed, 0)
        share = (size - there) / (1.2 * left + 1)
        if left == 0:
            bytes_more, seconds = 2 * size, 600.0
        elif draw.random() < 0.2:
            bytes_more, seconds = 2 * size, draw.uniform(0.0, 0.05)
        else:
            bytes_more, seconds = int(draw.uniform(0.0, 2.0 * share)), 600.0
        code = live(start(lambda: run(model, source, out)), lines, bytes_more, seconds)
        if code == 0:
            return killed
        if code is not None:
            raise SystemExit(f"a run ended by itself with the exit code {code}")
        killed += 1


def lines_of(out: Path) -> Path:
    return out if out.suffix == ".jsonl" else Path(f"{out}.jsonl")


def is_table_of(table: Path, lines: list[bytes]) -> bool:
    """Whether the table has the rows of these lines."""
    found = [json.dumps(row, sort_keys=True) for row in parquet.rows(table)]
    wanted = [json.loads(line) for line in lines]
    names = {name for row in wanted for name in row}
    for row in wanted:  # of bad rows these are numbers among texts
        row |= {name: str(row[name]) for name in ("id", "prompt") if name in row}
    full = [json.dumps(dict.fromkeys(names) | row, sort_keys=True) for row in wanted]
    return sorted(found) == sorted(full)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parquet", action="store_true")
    args = parser.parse_args()
    model, source = args.folder / "model", args.folder / "in.jsonl"
    model.mkdir(parents=True, exist_ok=True)
    make_tiny.write(model, "llama")
    write_rows(source, args.rows, args.seed)
    ending = "parquet" if args.parquet else "jsonl"
    whole, out = args.folder / "whole.jsonl", args.folder / f"killed.{ending}"
    if live(start(lambda: run(model, source, whole)), whole, sys.maxsize, 3600.0) != 0:
        raise SystemExit("the undisturbed run failed")
    wanted = whole.read_bytes()
    begun = time.monotonic()
    killed = kill_until_done(model, source, out, args.kills, args.seed, len(wanted))
    found = lines_of(out).read_bytes().splitlines()
    same = sorted(found) == sorted(wanted.splitlines())
    same = same and (not args.parquet or is_table_of(out, found))
    facts = {"kills": killed, "rows": len(found), "same": same,
             "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip
    print(json.dumps(facts))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
