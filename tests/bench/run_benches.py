"""All benches, their ratios, and how those compare with baseline.csv: what `make bench` runs.

    run_benches.py [NAME ...] [--record]    run_benches.py linear kv --record: these rows

Every bench prints CSV with its own header. Columns of ratios (RATIOS) are to limits, or to another
way of doing the same, measured in the same run, so that they carry from machine to machine better
than times. The comparison reports and never fails: a ratio that moved by more than a tenth is
listed. A bench whose model is absent is left out, and says which command brings it."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from qkv import models

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).with_name("baseline.csv")
RATIOS = (
    "of_peak", "of_int8_peak", "of_bf16_peak", "of_bf16", "int8_to_bf16", "of_read", "relative",
    "of_sum", "of_first", "of_limit", "of_copy", "of_held", "of_smallest",
)  # fmt: skip
FIELDS = ("bench", "row", "ratio", "value")
MOVED = 0.1

DEMO = ("SmolLM2-135M-Instruct.Q4_1.gguf", "qkv demo-model")
QWEN = ("qwen2.5-coder-0.5b.gguf", "make soak-models")


class Bench(NamedTuple):
    n_keys: int  # columns from the left that say which row it is
    options: tuple[str, ...] = ()
    models: tuple[tuple[str, str], ...] = ()  # a run for each: file, what brings it


C_BENCHES = {
    "limits": Bench(2),
    "linear": Bench(4),
    "int8": Bench(4),
    "forms": Bench(1),
    "attention": Bench(6),
    "scheduler": Bench(2),
    "moe": Bench(2),
}
PY_BENCHES = {
    "lanes": Bench(4),
    "decode": Bench(2, (), (DEMO, QWEN)),
    "batch": Bench(3, ("--int8",), (DEMO,)),
    "kv": Bench(3, (), (DEMO,)),
    "load": Bench(1, (), (DEMO, QWEN)),
    "experts": Bench(1),
}

Ratios = dict[tuple[str, str, str], float]  # (bench, row, column of ratios)


def lines_of(command: list[str]) -> Iterator[str]:
    """Of what it prints, shown while it runs."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            yield line
    if process.returncode:
        print(f"# exit {process.returncode}: {' '.join(command)}", flush=True)


def ratios_of(name: str, bench: Bench, command: list[str]) -> Ratios:
    found: Ratios = {}
    head: list[str] = []
    for cells in csv.reader(line for line in lines_of(command) if not line.startswith("#")):
        if not head:
            head = cells
        elif len(cells) == len(head):
            row = " ".join(cells[: bench.n_keys])
            for column, cell in zip(head, cells, strict=True):
                if column in RATIOS and cell:
                    found[name, row, column] = float(cell)
    return found


def commands(name: str) -> Iterator[list[str]]:
    """One per model that is there; a bench without models has one."""
    if name in C_BENCHES:
        yield [sys.executable, "tests/tools/ctests.py", "--bench", name]
        return
    bench = PY_BENCHES[name]
    script = [sys.executable, f"tests/bench/bench_{name}.py"]
    if not bench.models:
        yield [*script, *bench.options]
    for file, brings in bench.models:
        path = models.cache_folder() / file
        if path.exists():
            yield [*script, str(path), *bench.options]
        else:
            print(f"# bench_{name}: left out, {path} is not there; `{brings}` brings it")


def read_baseline() -> Ratios:
    if not BASELINE.exists():
        return {}
    with BASELINE.open(newline="") as file:
        return {(r["bench"], r["row"], r["ratio"]): float(r["value"]) for r in csv.DictReader(file)}


def write_baseline(rows: Ratios) -> None:
    with BASELINE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows((*key, f"{value:g}") for key, value in sorted(rows.items()))


def compare(found: Ratios, baseline: Ratios) -> None:
    both = [key for key in found if key in baseline]
    moved = [key for key in both if abs(found[key] - baseline[key]) > MOVED * abs(baseline[key])]
    share = f"{len(moved)} of them moved by more than {MOVED:.0%}"
    print(f"\n# {len(both)} ratios are in {BASELINE.name}, {share}")
    if moved:
        print("bench,row,ratio,baseline,now")
    for key in moved:
        bench, row, column = key
        print(f'{bench},"{row}",{column},{baseline[key]:g},{found[key]:g}')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = {**C_BENCHES, **PY_BENCHES}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in every]
    if unknown:
        parser.error(f"no bench {unknown[0]!r}; there are: {', '.join(every)}")
    found: Ratios = {}
    for name in args.names or every:
        for command in commands(name):
            print(f"\n# {' '.join(command[1:])}", flush=True)
            found |= ratios_of(name, every[name], command)
    baseline = read_baseline()
    compare(found, baseline)
    if args.record:
        benches = {key[0] for key in found}
        kept = {key: value for key, value in baseline.items() if key[0] not in benches}
        write_baseline(kept | found)


if __name__ == "__main__":
    main()
