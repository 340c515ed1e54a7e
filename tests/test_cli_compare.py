"""qkv compare on the command line: options, output, exit codes. Runs themselves are tested in
test_comparison_runs.py."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import cli

ROWS = [
    {"prompt": f"The capital of country {i} is", "choices": ["Lima", "Quito"], "answer": i % 2}
    for i in range(6)
]
SMALL = ["--threads", "1", "--kv-tokens", "1024", "--rerun-items", "2", "--no-progress"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "capitals.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), "utf-8")
    return path


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches qkv.compare, which then says that Ctrl-C was pressed."""
    calls: list[Any] = []

    def compare(*args: Any, **options: Any) -> None:
        calls.append((args, options))
        raise KeyboardInterrupt

    monkeypatch.setattr(qkv, "compare", compare)
    return calls


def test_verdict_page_and_report(
    tiny: Callable[..., Path], tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    args = ["compare", str(tiny("llama")), "--task-file", str(rows), *SMALL]
    assert cli.main([*args, "--resume", str(journal), "--html", str(page)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("fp8_e4m3  ") and "capitals (n = 6 of 6)" in captured.out
    assert lines[-1] == f"page: {page}"
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")

    show = ["compare", "--report", str(journal)]
    assert cli.main(show) == 0
    assert capsys.readouterr().out.splitlines() == lines[:-2]
    assert cli.main([*show, "--json", "--html", str(page)]) == 0
    captured = capsys.readouterr()
    findings = json.loads(captured.out)
    assert findings["tasks"]["capitals"]["n"] == 6 and findings["margin"] == 0.01
    assert captured.err == f"\npage: {page}\n"
    verdict = findings["verdicts"]["fp8_e4m3"]["kind"].lower().replace(" ", "-")
    others = {"not-safe", "not-enough-data", "uninformative"} - {verdict}
    assert cli.main([*show, "--fail-on", verdict]) == 3
    assert cli.main([*show, *(f"--fail-on={other}" for other in others)]) == 0


def test_report_of_what_is_not_finished(
    tiny: Callable[..., Path], tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "run.jsonl"
    args = ["compare", str(tiny("llama")), "--task-file", str(rows), *SMALL]
    assert cli.main([*args, "--resume", str(journal)]) == 0
    capsys.readouterr()
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join(lines[:8]) + b'\n{"torn')
    before = journal.read_bytes()
    assert cli.main(["compare", "--report", str(journal)]) == 0
    assert "not finished" in capsys.readouterr().out
    assert journal.read_bytes() == before


def test_what_reaches_compare(
    taken: list[Any], rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that are not given are left to Python's defaults: the journals of both are alike."""
    assert cli.main(["compare", "a", "b"]) == 130
    (models, dtypes, tasks), options = taken[-1]
    assert (models, dtypes) == (["a", "b"], ["bf16", "fp8_e4m3"])
    assert [task.name for task in tasks] == ["gsm8k"]
    assert options == {
        "limit": None, "margin": 0.01, "control": True, "grid": True, "chat": False,
        "by_layer": False, "kl_bound": None, "resume": None, "progress": True,
    }  # fmt: skip
    assert "nothing is kept" in capsys.readouterr().err

    mix = {"default": "fp8_e4m3", "v": "nvfp4"}
    args = ["compare", "a", "--tasks", "gsm8k, mmlu", "--task-file", str(rows), "--chat"]
    args += ["--limit", "gsm8k=20,mmlu=57", "--margin", "0.5", "--max-tokens", "64", "--by-layer"]
    args += ["--kl-bound", "0.01", "--no-control", "--no-grid", "--resume", "run.jsonl"]
    args += ["--kv-cache-dtype", json.dumps(["bf16", mix]), "--threads", "2", "--rerun-items", "8"]
    assert cli.main(args) == 130
    (_, dtypes, tasks), options = taken[-1]
    assert dtypes == ["bf16", mix]
    assert [(task.name, task.max_tokens) for task in tasks] == [
        ("gsm8k", 64), ("mmlu", 0), ("capitals", 0)
    ]  # fmt: skip
    assert options["limit"] == {"gsm8k": 20, "mmlu": 57} and options["margin"] == 0.005
    assert options["chat"] and options["by_layer"] and options["kl_bound"] == 0.01
    assert not options["control"] and not options["grid"]
    assert options["threads"] == 2 and options["rerun_items"] == 8
    assert "run.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([], 2, "give a MODEL"),
        (["demo", "--report", "x.jsonl"], 2, "one of them"),
        (["--report", "/nowhere.jsonl"], 1, "/nowhere.jsonl"),
        (["/nowhere"], 1, "/nowhere"),
        (["TINY", "--tasks", "gsm9k"], 2, "gsm9k"),
        (["TINY", "--task-file", "/nowhere.jsonl"], 1, "/nowhere.jsonl"),
        (["TINY", "--limit", "many"], 2, "--limit many"),
        (["TINY", "--limit", "gsm8k=,mmlu=3"], 2, "--limit"),
        (["TINY", "--limit", "0"], 2, "limit of gsm8k"),
        (["TINY", "--limit", "mmlu=3"], 2, "mmlu"),
        (["TINY", "--max-tokens", "mmlu=3", "--tasks", "mmlu"], 2, "mmlu"),
        (["TINY", "--max-tokens", "0"], 2, "--max-tokens 0"),
        (["TINY", "--margin", "0"], 2, "margin"),
        (["TINY", "--kv-cache-dtype", "bf16"], 2, "one lane alone"),
        (["TINY", "--kv-cache-dtype", "bf16,fp7"], 2, "fp7"),
        (["TINY", "TINY"], 2, "twice"),
        (["TINY", "--html", "/no/such/page.html"], 2, "--html"),
    ],
)
def test_errors_come_before_a_model_is_loaded(
    args: list[str],
    code: int,
    words: str,
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QKV_DEBUG", raising=False)
    monkeypatch.setattr("qkv.comparison.runner.Engine", None)
    args = [str(tiny("llama")) if arg == "TINY" else arg for arg in args]
    assert cli.main(["compare", *args]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("qkv: ") and captured.err.count("\n") == 1
    assert words in captured.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "  qkv compare" in text and "exit code" in text and "percentage points" in text
    assert "(default: bf16,fp8_e4m3)" in " ".join(text.split())  # not the engine's


def test_make_demo_runs_a_comparison(taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make demo` asks for is there: tasks, limits, formats."""
    root = Path(__file__).resolve().parents[1]
    monkeypatch.chdir(root)
    (root / "build").mkdir(exist_ok=True)
    makefile = (root / "Makefile").read_text().replace("\\\n", " ")
    line = next(line for line in makefile.splitlines() if line.startswith("DEMO := "))
    assert "qkv compare demo $(DEMO)" in makefile
    assert cli.main(["compare", "demo", *shlex.split(line.removeprefix("DEMO := "))]) == 130
    (_, dtypes, tasks), options = taken[-1]
    assert dtypes == ["bf16", "fp8_e4m3"]
    assert {"gsm8k", "mmlu"} <= {task.name for task in tasks} == set(options["limit"])
