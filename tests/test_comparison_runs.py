"""Comparisons from end to end, on tiny models: same bits, kills and resumption, several models."""

from __future__ import annotations

import fcntl
import io
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import cli, tasks
from qkv.comparison import journal
from qkv.comparison.results import Findings

OPTIONS: dict[str, Any] = {"threads": 1, "kv_tokens": 4096, "progress": False}


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


def choices(n: int = 12, name: str = "capitals") -> tasks.Task:
    rows = [
        {"prompt": f"The capital of country {i} is", "choices": ["Lima", "Quito", "Oslo"],
         "answer": i % 3, "of": f"part {i % 2}"}
        for i in range(n)
    ]  # fmt: skip
    return tasks.custom(rows, name=name, stratum="of")


def sums(n: int = 10, max_tokens: int = 12) -> tasks.Task:
    rows = [{"prompt": f"{i} and {i + 1} make", "answer": str(2 * i + 1)} for i in range(n)]
    return tasks.custom(rows, name="sums", max_tokens=max_tokens)


def run(
    models: Any, dtypes: Any = ("bf16", "fp8_e4m3"), given: Any = None, **options: Any
) -> qkv.Comparison:
    chosen = [sums(), choices()] if given is None else given
    return qkv.compare(models, dtypes, chosen, **{**OPTIONS, "rerun_items": 8, **options})


def figures(found: qkv.Comparison | Mapping[str, Any]) -> dict[str, Any]:
    """All that a comparison says but speeds, which the clock decides."""
    plain = json.loads(found.to_json() if isinstance(found, qkv.Comparison) else json.dumps(found))
    for lane in plain["lanes"]:
        del lane["decode_speed"], lane["prefill_speed"]
    return dict(plain)


# ---- the same bits ---------------------------------------------------------------------------


def test_bf16_beside_bf16_differs_in_nothing(llama: Path) -> None:
    found = run(llama, ["bf16", "bf16"], [sums(), choices(), "wikitext2"],
                limit={"wikitext2": 2}, control=False)  # fmt: skip
    for task in found.tasks.values():
        other = task.lanes["bf16#2"]
        assert other.kl is not None and other.kl.n_tokens > 0
        assert other.kl.mean == other.kl.max == other.kl.mean_reverse == 0
        assert other.kl.top1 == 1 and other.kl.nll_change == 0 and not other.kl.alarm
        if task.kind != "text":
            assert other.pair is not None
            assert (other.pair.lost, other.pair.gained, other.pair.other_wrong) == (0, 0, 0)
        if task.kind == "generate":
            assert other.divergence is not None
            assert other.divergence.identical == other.divergence.n == task.n
    rerun = found.findings.rerun
    assert rerun is not None and rerun.identical and rerun.items == 8 and rerun.lanes == 2


def test_batch_order_threads_and_pool_change_nothing(llama: Path) -> None:
    usual = run(llama)
    other = run(llama, max_running=3, chunk_tokens=16, schedule="fcfs", prefix_cache=False,
                threads=2, kv_tokens=512)  # fmt: skip
    assert usual.rows("sums") == other.rows("sums")
    assert usual.rows("capitals") == other.rows("capitals")


def test_a_rerun_with_other_bits_ends_the_comparison(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is taken up again: the journal remembers."""
    path = tmp_path / "run.jsonl"
    add = journal.Journal.add

    def damaged(self: journal.Journal, record: Mapping[str, Any]) -> None:
        if record["kind"] == "answer" and record["key"] == "sums-1":
            ids = record["lanes"]["fp8_e4m3"]["token_ids"]
            ids[-1] = (ids[-1] + 1) % 100
        add(self, record)

    monkeypatch.setattr(journal.Journal, "add", damaged)
    with pytest.raises(qkv.Error, match="rerun check failed: sums, sums-1"):
        run(llama, resume=path)
    monkeypatch.undo()
    with pytest.raises(qkv.Error, match="rerun check failed: sums, sums-1"):
        run(llama, resume=path)


# ---- nothing lost ----------------------------------------------------------------------------


def test_a_journal_cut_anywhere_ends_in_the_same_report(llama: Path, tmp_path: Path) -> None:
    """Whatever a crash leaves is a beginning of the file, mostly with a torn last line."""
    path = tmp_path / "run.jsonl"
    first = run(llama, resume=path)
    expected, rows = figures(first), [first.rows(name) for name in first.tasks]
    whole = path.read_bytes()
    assert figures(qkv.Comparison.load(path)) == expected
    lines, label = whole.split(b"\n"), llama.name.encode()
    cuts = {0, 20, len(lines[0]), len(lines[0]) + 1, len(whole) - 1}
    stream = random.Random(5)
    cuts |= {stream.randrange(len(whole)) for _ in range(6)}
    # Between an item's answer and its predictions.
    cuts |= {
        whole.index(b"\n", whole.index(b'"answer","model":"%s","task":"capitals"' % label)) + 1
    }
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        again = run(llama, resume=path)
        assert figures(again) == expected, cut
        assert [again.rows(name) for name in again.tasks] == rows, cut
        assert path.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, cut) + 1])
    assert figures(run(llama, resume=path)) == expected  # nothing left to do


def test_no_model_is_loaded_when_all_is_done(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    given = {"given": [sums(), choices(), "wikitext2"], "limit": {"wikitext2": 2}}
    expected = figures(run(llama, resume=path, **given))

    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr("qkv.comparison.runner.Engine", refused)
    assert figures(run(llama, resume=path, **given)) == expected


def command(model: Path, folder: Path, *more: str, n: int) -> list[str]:
    """qkv compare over two files of rows."""
    for task in (sums(n), choices(n)):
        rows = [json.dumps(dict(question.row)) for question in task.questions]
        (folder / f"{task.name}.jsonl").write_text("\n".join(rows), "utf-8")
    return [
        sys.executable, "-m", "qkv", "compare", str(model),
        "--task-file", str(folder / "sums.jsonl"), "--task-file", str(folder / "capitals.jsonl"),
        "--max-tokens", "12", "--threads", "1", "--kv-tokens", "4096", "--rerun-items", "8",
        "--no-progress", "--json", *more,
    ]  # fmt: skip


def finished(args: list[str]) -> dict[str, Any]:
    """Runs to its end, in this process."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert cli.main(args[3:]) == 0
    return figures(json.loads(out.getvalue()))


def stop_after(args: list[str], path: Path, lines: int, number: int) -> subprocess.Popen[str]:
    """Starts a run and sends a signal once its journal has so many lines, or it ends before."""
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            process.send_signal(number)
            break
        time.sleep(0.002)
    process.wait()
    return process


def kill_and_go_on(model: Path, folder: Path, *, n: int, kills: int, seed: int) -> None:
    path = folder / "run.jsonl"
    args = command(model, folder, "--resume", str(path), n=n)
    expected = finished(args)
    total = path.read_bytes().count(b"\n")
    path.unlink()
    stream = random.Random(seed)
    moments = sorted(stream.randrange(1, total) for _ in range(kills))
    killed = 0
    for lines in moments:
        killed += stop_after(args, path, lines, signal.SIGKILL).returncode == -signal.SIGKILL
        assert killed == 0 or path.exists()
    assert killed > 0
    assert finished(args) == expected


def test_killed_and_started_again(llama: Path, tmp_path: Path) -> None:
    kill_and_go_on(llama, tmp_path, n=20, kills=3, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_killed_many_times(llama: Path, tmp_path: Path, seed: int) -> None:
    kill_and_go_on(llama, tmp_path, n=100, kills=20, seed=seed)


def test_ctrl_c_says_how_to_go_on(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    args = command(llama, tmp_path, "--resume", str(path), n=60)
    process = stop_after(args, path, 10, signal.SIGINT)
    assert process.returncode == 130
    out, err = process.communicate()
    last = err.splitlines()[-1]  # before it there may be the log's warnings
    assert out == "" and last.startswith("qkv: interrupted")
    assert f"the rows so far are in {path}" in last and "same command goes on" in last
    before = path.read_bytes()
    again = finished(args)
    assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert again["tasks"]["sums"]["n"] == 60


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"margin": 0.02}, r"settings\.margin: 0\.01 there, 0\.02 now"),
        ({"limit": 5}, r"settings\.tasks\[0\]\.limit: 6 there, 5 now"),
        ({"given": [choices()]}, "settings"),
        ({"given": [sums(max_tokens=9), choices()]}, r"tasks\[0\]\.max_tokens: 12 there, 9 now"),
        ({"given": [sums(), choices(11)]}, r"tasks\[1\]\.size: 12 there, 11 now"),
        ({"dtypes": ["bf16", "nvfp4"]}, r"lanes\[1\]\.\w+: .*fp8_e4m3.* there, .*nvfp4.* now"),
        ({"control": False}, "lanes"),
        ({"compute_dtype": "float32"}, "settings.compute_dtype: None there, 'float32' now"),
        ({"rerun_items": 9}, "rerun_items: 8 there, 9 now"),
        ({"model": "other"}, "other"),
    ],
)
def test_other_settings_are_refused_by_name(
    tiny: Callable[..., Path], llama: Path, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    """Nothing is touched, and nothing is computed."""
    path = tmp_path / "run.jsonl"
    options: dict[str, Any] = {"models": llama, "limit": 6, "resume": path}
    header = journal_of(path, **options)
    model = changed.pop("model", None)
    options["models"] = llama if model is None else tiny("llama", seed=5)
    with pytest.raises(qkv.Error, match=named) as caught:
        run(**{**options, **changed})
    assert "rows of two comparisons are not mixed" in str(caught.value)
    assert path.read_bytes() == header


def journal_of(path: Path, **options: Any) -> bytes:
    """Only the first line of what such a run writes."""
    if not path.exists():
        run(**options)
        path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    return path.read_bytes()


def test_other_rows_of_the_same_name_are_refused(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(llama, given=[choices()], resume=path)
    rows = [dict(question.row) for question in choices().questions]
    rows[3] = {**rows[3], "prompt": "Something else is"}
    other = tasks.custom(rows, name="capitals", stratum="of")
    with pytest.raises(qkv.Error, match=r"tasks\[0\]\.digest"):
        run(llama, given=[other], resume=path)


def test_a_second_writer_is_refused(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(qkv.Error, match="another process is writing"):
            run(llama, resume=path)
    assert path.read_bytes() == b""


def test_a_file_of_something_else_is_left_alone(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for text in ("my notes\n", '{"a": 1}\n', '{"kind": "header", "format": 99}\n', "[1]\n"):
        path.write_text(text)
        with pytest.raises(qkv.Error, match=r"run\.jsonl"):
            run(llama, resume=path)
        with pytest.raises(qkv.Error, match=r"run\.jsonl"):
            qkv.Comparison.load(path)
        assert path.read_text() == text


def test_a_full_disk_loses_nothing(llama: Path, tmp_path: Path) -> None:
    """The limit on a file's size stands for it: the write ends short, then fails."""
    path = tmp_path / "run.jsonl"
    args = command(llama, tmp_path, "--resume", str(path), n=10)
    expected = finished(args)
    size = path.stat().st_size
    path.unlink()
    limited = (
        "import resource, runpy, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2}))\n"
        "runpy.run_module('qkv', run_name='__main__')"
    )
    done = subprocess.run([args[0], "-c", limited, *args[3:]], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"qkv: {path}: File too large") and "goes on with them" in last
    assert 0 < path.stat().st_size <= size // 2
    assert finished(args) == expected


def test_what_is_no_file_is_refused(llama: Path, tmp_path: Path) -> None:
    for path in ("/dev/null", tmp_path):
        with pytest.raises(qkv.Error, match="not a regular file"):
            run(llama, resume=path)


# ---- what is stored for a row ----------------------------------------------------------------


def test_hooks(llama: Path, tmp_path: Path) -> None:
    def hook(output: qkv.RequestOutput) -> dict[str, Any]:
        if output.key == "sums-3":
            raise RuntimeError("no such thing")
        return {"length": len(output.text), "lanes": list(output.lanes)}

    path = tmp_path / "run.jsonl"
    found = run(llama, given=[sums(), choices()], on_finish=hook, resume=path)
    rows = {row["key"]: row for row in found.rows("sums") if row["kind"] == "answer"}
    assert len(rows) == 10
    assert rows["sums-3"]["scores"] == {"error": "RuntimeError: no such thing"}
    del rows["sums-3"]
    for row in rows.values():
        assert row["scores"]["length"] == len(row["lanes"]["bf16"]["text"])
        assert row["scores"]["lanes"] == ["bf16", "fp8_e4m3", "control"]
    assert qkv.Comparison.load(path).rows("sums") == found.rows("sums")
    assert figures(found) == figures(run(llama))  # a hook changes no figure


def test_truncated_and_unanswered_rows_are_counted(llama: Path) -> None:
    found = run(llama, given=[sums(max_tokens=2)])
    answers = [row for row in found.rows("sums") if row["kind"] == "answer"]
    for name, result in found.tasks["sums"].lanes.items():
        assert result.answers is not None
        own = [row["lanes"][name] for row in answers]
        assert result.answers.n == 10
        assert result.answers.truncated == sum(answer["truncated"] for answer in own) > 0
        assert result.answers.unanswered == sum(answer["answer"] is None for answer in own) > 0
        assert result.answers.mean_tokens == sum(len(a["token_ids"]) for a in own) / 10


def test_a_row_that_cannot_run_is_an_error_of_every_lane(llama: Path) -> None:
    rows = [{"prompt": "word " * n, "answer": "1"} for n in (3, 4000, 5)]
    found = run(llama, given=[tasks.custom(rows, name="long", max_tokens=4)])
    result = found.tasks["long"]
    for lane in result.lanes.values():
        assert lane.answers is not None
        assert lane.answers.n == 2 and lane.answers.errors == 1
    assert "max_model_len" in found.rows("long")[1]["lanes"]["bf16"]["error"]


# ---- several models --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("first", 1), ("second", 2)):
        (folder / name).symlink_to(tiny("llama", seed=seed))
    return [folder / "first", folder / "second"]


def test_models_are_paired_by_item(two: list[Path]) -> None:
    found = run(two)
    names = [lane.name for lane in found.findings.lanes]
    assert names == ["first / bf16", "first / fp8_e4m3", "first / control", "second / bf16",
                     "second / fp8_e4m3"]  # fmt: skip
    task = found.tasks["sums"]
    right = {name: {} for name in names}  # type: dict[str, dict[str, bool]]
    for row in found.rows("sums"):
        if row["kind"] == "answer":
            for name, answer in row["lanes"].items():
                right[name][row["key"]] = answer["correct"]
    base = right["first / bf16"]
    for name in names[1:]:
        pair = task.lanes[name].pair
        assert pair is not None and set(right[name]) == set(base)
        assert pair.lost == sum(base[key] and not right[name][key] for key in base)
        assert pair.gained == sum(right[name][key] and not base[key] for key in base)
    # KL is within a model: the second model's first lane has none.
    assert task.lanes["second / bf16"].kl is None
    kl = task.lanes["second / fp8_e4m3"].kl
    assert kl is not None and kl.against == "second / bf16"
    assert found.verdicts["second / bf16"].differs == ("weights",)
    assert found.verdicts["second / fp8_e4m3"].differs == ("weights", "KV cache")


def test_the_two_by_two(two: list[Path]) -> None:
    grid = run(two)
    assert {found.task for found in grid.findings.two_by_two} == {"sums", "capitals"}
    for found in grid.findings.two_by_two:
        whole = found.weights_loss + found.kv_loss + found.interaction
        assert found.both_loss == pytest.approx(whole)
    assert "2 x 2" in str(grid)
    paired = run(two, grid=False, control=False)
    assert [lane.name for lane in paired.findings.lanes] == ["first / bf16", "second / fp8_e4m3"]
    assert paired.findings.two_by_two == ()
    verdict = paired.verdicts["second / fp8_e4m3"]
    assert verdict.differs == ("weights", "KV cache") and "2 x 2" in str(paired)


def test_the_same_weights_twice_differ_in_nothing(tiny: Callable[..., Path], llama: Path,
                                                  tmp_path: Path) -> None:  # fmt: skip
    (tmp_path / "copy").symlink_to(llama)
    found = run([llama, tmp_path / "copy"], ["bf16"])
    for task in found.tasks.values():
        pair = task.lanes["copy / bf16"].pair
        assert pair is not None and (pair.lost, pair.gained, pair.other_wrong) == (0, 0, 0)


# ---- bad arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"given": "gsm9k"}, ValueError, "gsm9k"),
        ({"given": []}, ValueError, "no task"),
        ({"given": [3]}, TypeError, "qkv.tasks.Task"),
        ({"given": [sums(), sums(3)]}, ValueError, "twice"),
        ({"dtypes": ["bf16", "fp7"]}, ValueError, "fp7"),
        ({"dtypes": []}, ValueError, "at least one"),
        ({"dtypes": ["bf16"]}, ValueError, "one lane alone"),
        ({"dtypes": "bf16"}, ValueError, "one lane alone"),
        ({"dtypes": ["bf16", {"layers": {"9": "bf16"}}]}, ValueError, "9"),
        ({"dtypes": ["bf16"] * 3, "grid": False}, ValueError, "one format for each"),
        ({"models": []}, ValueError, "no model"),
        ({"models": "TWICE"}, ValueError, "twice"),
        ({"models": "/nowhere"}, (qkv.Error, OSError), "/nowhere"),
        ({"limit": 0}, ValueError, "limit of sums"),
        ({"limit": True}, TypeError, "limit of sums"),
        ({"limit": {"mmlu": 3}}, ValueError, "mmlu"),
        ({"margin": 0}, ValueError, "margin"),
        ({"margin": 1}, ValueError, "margin"),
        ({"margin": float("nan")}, ValueError, "margin"),
        ({"rerun_items": -1}, ValueError, "rerun_items"),
        ({"control": 1}, TypeError, "control"),
        ({"kl_bound": -1}, ValueError, "kl_bound"),
        ({"kv_cache_dtype": "bf16"}, TypeError, "kv_cache_dtypes"),
        ({"max_runing": 3}, TypeError, "max_runing"),
    ],
)
def test_bad_arguments(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    """Said before a model is loaded or a file is made."""

    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr("qkv.comparison.runner.Engine", refused)
    models = [llama, llama] if changed.get("models") == "TWICE" else changed.get("models", llama)
    path = tmp_path / "run.jsonl"
    with pytest.raises(error, match=words):
        run(**{"resume": path, **changed, "models": models})
    assert not path.exists()


def test_findings_are_plain_data(llama: Path) -> None:
    found = run(llama)
    assert isinstance(found.findings, Findings)
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict()))
