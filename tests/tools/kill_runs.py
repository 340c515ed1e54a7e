"""Kills a run over a data set again and again, until it is through, and compares what it wrote with
what a run that nobody disturbed writes: byte for byte, after sorting.

    python tests/tools/kill_runs.py FOLDER [--kills 50] [--rows 2000] [--rounds 1] [--seed 1]

makes a tiny model in FOLDER. Each round has rows of its own; every fourth writes a table. The
process that is killed is a fork of this one, which has imported everything and opened no engine: a
life costs milliseconds, so that 10,000 take minutes. Some are killed after so many more rows, some
after so much time, a processor's or a clock's, from the first instruction to the last: while the
settings are hashed and the header is written, the model loaded, the output looked through, rows
with an error taken out, the table written. `moments` of what is printed says where they were:
"replacing" is while a file is written that is to take the place of another."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
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


def run(model: Path, source: Path, out: Path, retry_errors: bool = False) -> None:
    qkv.run_dataset(
        model,
        source,
        out,
        qkv.SamplingParams(temperature=0.8, logprobs=0),
        options=qkv.dataset.Rows(token_ids=True),
        retry_errors=retry_errors,
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


def undisturbed(work: Callable[[], None]) -> None:
    _, status = os.waitpid(start(work), 0)
    if status != 0:
        raise SystemExit("a run that nobody disturbed failed")


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def live(pid: int, out: Path, bytes_more: int, worked: float, seconds: float) -> int | None:
    """Until the rows have grown by so much, the process has worked for so long, or so much time is
    over since it said that it begins, then SIGKILL. The exit code if it ended before."""
    path, about = lines_of(out), Path(f"{out}.qkv")
    size, said = size_of(path), size_of(about)
    work = Path(f"/proc/{pid}/schedstat")  # of its first thread, in nanoseconds
    end = math.inf
    while time.monotonic() < end:
        if end == math.inf and size_of(about) > said:
            end = time.monotonic() + seconds
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if size_of(path) >= size + bytes_more:
            break
        if int(work.read_text().split()[0]) >= 1e9 * worked:
            break
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == -signal.SIGKILL else code


def moment(out: Path, about: int, there: int, size: int) -> str:
    """Where a life was when it ended; about, there: how much the header's file and the rows had
    when it began."""
    if any(Path(f"{path}.tmp").exists() for path in (out, lines_of(out))):
        return "replacing"
    if size_of(Path(f"{out}.qkv")) <= about:
        return "starting"
    if there >= size or size_of(lines_of(out)) >= size:
        return "complete"
    return "writing" if size_of(lines_of(out)) > there else "reading"


def kill_until_done(
    model: Path, source: Path, out: Path, kills: int, draw: random.Random, size: int, longest: float
) -> Counter[str]:
    """Lives of random lengths, with as many kills, then one that comes to its end; size: of the
    whole output; longest: about what a life needs to find all rows there. The kills' moments."""
    moments: Counter[str] = Counter()
    while (left := kills - moments.total()) > 0:
        about, there = size_of(Path(f"{out}.qkv")), size_of(lines_of(out))
        bytes_more, worked, seconds = sys.maxsize, math.inf, math.inf
        kind, retry = draw.random(), draw.random() < 0.25
        if there < size and kind < 0.6:
            bytes_more = int(draw.uniform(1.0, 2.0 * (size - there) / (1.2 * left + 1) + 1.0))
        elif kind < 0.8:
            worked = draw.uniform(0.0, longest)
        else:  # also while it waits for the disk
            seconds = draw.uniform(0.0, longest)
        pid = start(partial(run, model, source, out, retry))
        code = live(pid, out, bytes_more, worked, seconds)
        if code is None:
            moments[moment(out, about, there, size)] += 1
        elif code != 0:
            raise SystemExit(f"a run ended by itself with the exit code {code}")
    undisturbed(lambda: run(model, source, out))
    return moments


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


def one_round(folder: Path, model: Path, n_rows: int, kills: int, seed: int) -> Counter[str]:
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
    folder.mkdir()
    source, whole = folder / "in.jsonl", folder / "whole.jsonl"
    out = folder / ("killed.parquet" if seed % 4 == 0 else "killed.jsonl")
    write_rows(source, n_rows, seed)
    undisturbed(lambda: run(model, source, whole))
    wanted = whole.read_bytes()
    longest = 0.03 + 1e-4 * n_rows
    draw = random.Random(seed)
    moments = kill_until_done(model, source, out, kills, draw, len(wanted), longest)
    found = lines_of(out).read_bytes().splitlines()
    if sorted(found) != sorted(wanted.splitlines()):
        raise SystemExit(f"{out}: not the rows of {whole}")
    # Its threads are not to be there when the next life is forked.
    if out != lines_of(out) and os.waitpid(start(lambda: check_table(out, found)), 0)[1] != 0:
        raise SystemExit(f"{out}: not the rows of {lines_of(out)}")
    return moments


def check_table(out: Path, lines: list[bytes]) -> None:
    if not is_table_of(out, lines):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    model = args.folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    make_tiny.write(model, "llama")
    begun = time.monotonic()
    moments: Counter[str] = Counter()
    for number in range(args.rounds):
        kills = math.ceil((args.kills - moments.total()) / (args.rounds - number))
        folder = args.folder / f"round{number}"
        moments += one_round(folder, model, args.rows, kills, args.seed + number)
        shutil.rmtree(folder)
        facts = {
            "rounds": number + 1,
            "kills": moments.total(),
            "rows": args.rows,
            "same": True,
            "moments": dict(moments),
            "seconds": round(time.monotonic() - begun, 1),
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
