"""Data sets: rows in, rows with answers out, whatever happens in between."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import dataset
from qkv.dataset.sink import Sink
from qkv.dataset.source import open_source

ROOT = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {"kv_tokens": 1024, "threads": 1, "max_running": 8}
GREEDY = qkv.SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path]) -> Iterator[qkv.Engine]:
    with qkv.Engine(tiny("llama"), **OPTIONS) as opened:
        yield opened


def run(
    engine: qkv.Engine,
    rows: Any,
    out: Path,
    params: qkv.SamplingParams | None = GREEDY,
    **more: Any,
) -> qkv.dataset.Summary:
    return qkv.run_dataset(engine, rows, out, params, progress=False, **more)


def read(path: Path) -> dict[Any, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def some(n: int) -> list[dict[str, Any]]:
    draw = random.Random(3)
    words = "the quick brown fox jumps over a lazy dog".split()
    return [
        {"id": f"r{i}", "prompt": " ".join(draw.choices(words, k=draw.randint(1, 9))), "n": i}
        for i in range(n)
    ]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---- what a row becomes ----------------------------------------------------------------------


def test_states_and_columns(engine: qkv.Engine, tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "The fox", "text": "mine", "n": [1, {"x": None}]},
        {"id": "b", "prompt": "The fox", "params": {"max_tokens": 2}},
        {"key": 7, "prompt_token_ids": [1, 2, 3]},
        {"custom_id": "c", "messages": [{"role": "user", "content": "Hi"}]},
        {"id": "long", "prompt_token_ids": [5] * 2000},
        {"id": "none", "question": "?"},
        {"id": "params", "prompt": "x", "params": {"top_q": 1}},
        {"id": "empty", "prompt": ""},
        {"id": "type", "prompt": 5},
        {"id": 1.5, "prompt": "x"},
        "a text alone",
    ]
    out = tmp_path / "out.jsonl"
    summary = run(engine, write_jsonl(tmp_path / "in.jsonl", rows), out)
    found = read(out)
    assert list(found["a"]) == [
        "id", "prompt", "input_text", "n", "text", "finish_reason", "stop_reason", "state",
        "error", "prompt_tokens", "output_tokens", "qkv_key",
    ]  # fmt: skip
    alone = engine.generate(["The fox"], GREEDY, progress=False)[0]
    assert found["a"]["text"] == alone.text and found["a"]["n"] == [1, {"x": None}]
    assert found["a"]["prompt_tokens"] == len(alone.prompt_token_ids)
    assert (found["a"]["state"], found["b"]["state"]) == ("truncated", "truncated")
    assert (found["a"]["output_tokens"], found["b"]["output_tokens"]) == (5, 2)
    assert found[7]["state"] == found["c"]["state"] == found[10]["state"] == "truncated"
    assert found["long"]["state"] == "too_long" and "2000 tokens" in found["long"]["error"]
    reasons = {
        "none": "no column 'prompt' or", "params": "top_q", "empty": "'prompt' is empty",
        "type": "int 5: text, token ids or messages", 9: "id=1.5: an id is text or an integer",
    }  # fmt: skip
    for name, words in reasons.items():
        assert found[name]["state"] == "error" and words in found[name]["error"]
        assert found[name]["text"] is None and found[name]["output_tokens"] == 0
    assert summary.rows == {"ok": 0, "truncated": 5, "too_long": 1, "error": 5}
    assert summary.failed == 6 and summary.output_tokens == 22 and summary.before == 0
    assert "5 truncated, 1 too_long, 5 error" in str(summary)


def test_what_never_fits_into_the_pool(tiny: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"id": "big", "prompt": "x", "params": {"max_tokens": 300}}, {"id": 2, "prompt": "x"}]
    with qkv.Engine(tiny("llama"), kv_tokens=64, threads=1) as small:
        run(small, rows, tmp_path / "out.jsonl")
    found = read(tmp_path / "out.jsonl")
    assert [found[name]["state"] for name in ("big", 2)] == ["too_long", "truncated"]


def test_broken_lines_are_rows(engine: qkv.Engine, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": ', b"", b"[" * 100_000, b'{"p": "\xff"}']
    lines += [b"5", b'{"prompt": "\\ud800"}', b'{"prompt": "b"}']
    source.write_bytes(b"\r\n".join(lines))
    assert run(engine, source, out).failed == 5
    found = read(out)
    assert [found[i]["state"] for i in (0, 6)] == ["truncated", "truncated"]
    errors = [found[i]["error"] for i in (1, 2, 3, 4, 5)]
    places = ["line 2: not valid JSON", "line 4: not valid JSON", "line 5: not valid UTF-8"]
    for error, words in zip(errors, [*places, "line 6: int 5 is no row", "U+D800"], strict=True):
        assert words in error
    other = tmp_path / "skipped.jsonl"
    summary = run(engine, source, other, on_bad_row="skip")
    assert summary.skipped == 4 and set(read(other)) == {0, 5, 6}
    with pytest.raises(qkv.Error, match="line 2: not valid JSON.*nothing was done"):
        run(engine, source, tmp_path / "stopped.jsonl", on_bad_row="stop")
    assert not (tmp_path / "stopped.jsonl").exists()


def test_a_huge_row_is_an_error(
    engine: qkv.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.dataset.source.MAX_ROW_BYTES", 1000)
    monkeypatch.setattr("qkv.dataset.source._BLOCK", 64)
    rows = [{"prompt": "a"}, {"prompt": "x" * 5000}, {"prompt": "b"}, {"prompt": "y" * 5000}]
    run(engine, write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    found = read(tmp_path / "out.jsonl")
    assert [found[i]["error"] is None for i in range(4)] == [True, False, True, False]
    assert found[1]["error"] == "line 2: longer than 1000 bytes"


def test_an_id_twice(engine: qkv.Engine, tmp_path: Path) -> None:
    rows = [{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "a"}, {"id": 1, "prompt": "b"}]
    rows += [{"id": "1 (row 4)", "prompt": "a"}, {"id": 1, "prompt": "c"}]
    out = tmp_path / "out.jsonl"
    for _ in range(2):  # the second time all is there
        run(engine, write_jsonl(tmp_path / "in.jsonl", rows), out)
        found = read(out)
        twice = ["1 (row 2)", "1 (row 4) (row 4)"]
        assert set(found) == {1, "1", "1 (row 4)", *twice}
        assert "the id 1 was used before" in found["1 (row 2)"]["error"]
        assert {name for name in found if found[name]["state"] == "error"} == set(twice)


def test_a_broken_line_takes_no_other_rows_id(engine: qkv.Engine, tmp_path: Path) -> None:
    """It took its place: the row that has this integer for an id was refused when it came."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    whole = ['{"id": 3, "prompt": "a"}', '{"id": 2, "prompt": "b"}', '{"id": 1, "prompt": "c"}']
    for lines, broken in (
        (['{"id": ', *whole, '{"id": 0, "prompt": "d"}'], {-1}),
        ([*whole[:2], '{"id": 1.5, "prompt": "c"}', '{"prompt": "c"}', "5", whole[2]], {-3, -5}),
    ):
        source.write_text("\n".join(lines))
        run(engine, source, out, restart=True)
        found = read(out)
        assert {name for name in found if found[name]["state"] == "error"} == broken
        assert {1, 2, 3} < set(found) and len(found) == len(lines)
        assert run(engine, source, out).before == len(lines)
        rows = open_source(source).rows()
        again = {row["id"]: row for row in dataset.answers(engine, rows, params=GREEDY)}
        assert {name: row["state"] for name, row in again.items()} == {
            name: row["state"] for name, row in found.items()
        }


# ---- going on --------------------------------------------------------------------------------


class Stop(Exception):
    pass


def interrupted(rows: list[Any], after: int) -> Iterator[Any]:
    yield from rows[:after]
    raise Stop


def test_goes_on_where_it_was(engine: qkv.Engine, tmp_path: Path) -> None:
    rows, out, whole = some(60), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run(engine, rows, whole, qkv.SamplingParams(max_tokens=4))
    for after in (0, 40, 55):
        with pytest.raises(Stop):
            run(engine, interrupted(rows, after), out, qkv.SamplingParams(max_tokens=4))
    summary = run(engine, rows, out, qkv.SamplingParams(max_tokens=4))
    assert 0 < summary.before < 60 and summary.before + sum(summary.rows.values()) == 60
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_what_is_done_is_written_before_more_is_read(engine: qkv.Engine, tmp_path: Path) -> None:
    """It was not: rows that were done waited for as long as the input took for its next ones."""
    out, window = tmp_path / "out.jsonl", 4 * OPTIONS["max_running"]
    written: list[int] = []

    def rows() -> Iterator[str]:
        for number in range(100):
            written.append(out.read_bytes().count(b"\n"))
            assert written[-1] > number - window
            yield f"The {number}"

    run(engine, rows(), out)
    assert len(written) == 100


def test_a_hook_sees_the_place_in_the_input(engine: qkv.Engine, tmp_path: Path) -> None:
    """It once was the place among the rows that were still to be done: references that are a list
    would have gone to other rows after a crash."""
    prompts, out = [f"The {i}" for i in range(60)], tmp_path / "out.jsonl"
    wanted = [output.text for output in engine.generate(prompts, GREEDY, progress=False)]
    hook = qkv.hooks.exact_match(wanted)
    with pytest.raises(Stop):
        run(engine, interrupted(prompts, 50), out, on_finish=hook)
    assert run(engine, prompts, out, on_finish=hook).before > 0
    assert [row["score_exact_match"] for row in read(out).values()] == [True] * 60


def test_order_batch_and_shards_change_no_row(
    engine: qkv.Engine, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    rows, params = some(40), qkv.SamplingParams(max_tokens=6, n=2, logprobs=1)
    whole = tmp_path / "whole.jsonl"
    run(engine, rows, whole, params)
    wanted = sorted(whole.read_bytes().splitlines())
    shuffled = random.Random(1).sample(rows, len(rows))
    with qkv.Engine(tiny("llama"), kv_tokens=512, max_running=3, chunk_tokens=16) as other:
        run(other, shuffled, tmp_path / "other.jsonl", params)
    assert sorted((tmp_path / "other.jsonl").read_bytes().splitlines()) == wanted
    parts = [tmp_path / f"part{i}.jsonl" for i in range(3)]
    for i, part in enumerate(parts):
        run(engine, shuffled if i else rows, part, params, shard=(i, 3))
    sizes = [len(read(part)) for part in parts]
    assert sum(sizes) == 40 and min(sizes) > 3
    assert dataset.merge(parts[::-1], tmp_path / "merged.jsonl") == 40
    assert sorted((tmp_path / "merged.jsonl").read_bytes().splitlines()) == wanted
    # As if there had been no shards.
    assert run(engine, rows, tmp_path / "merged.jsonl", params).before == 40


def test_other_settings_are_refused(engine: qkv.Engine, tmp_path: Path) -> None:
    out, rows = tmp_path / "out.jsonl", some(5)
    run(engine, rows, out)
    before = out.read_bytes()
    hot = GREEDY.with_(temperature=0.5)
    with pytest.raises(qkv.Error, match=r"settings\.sampling\.temperature: 0\.0 there, 0\.5 now"):
        run(engine, rows, out, hot)
    with pytest.raises(qkv.Error, match=r"settings\.rows\.system: None there, 'Brief\.' now"):
        run(engine, rows, out, options=dataset.Rows(system="Brief."))
    with pytest.raises(qkv.Error, match="other columns: the input has changed"):
        run(engine, [{"id": "r3", "prompt": "another"}], out)
    assert out.read_bytes() == before
    assert run(engine, rows, out, hot, restart=True).before == 0
    assert (tmp_path / "out.jsonl.1").read_bytes() == before
    assert len(read(out)) == 5
    # What was put away can be taken up again under its new name's settings.
    assert json.loads((tmp_path / "out.jsonl.1.qkv").read_text().splitlines()[0])["run"]


def test_what_answers_depend_on(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Of the engine's options too: those that change bits are compared, the others are not."""
    model, out = str(tiny("llama")), tmp_path / "out.jsonl"
    qkv.run_dataset(model, some(3), out, GREEDY, progress=False, **OPTIONS)
    for options, words in (
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache"),
        ({"quantization": "int8"}, "online_quantization: None there, 'int8' now"),
        ({"prefill_quantization": "int8"}, "prefill"),
        ({"activation_quant": "off"}, "activation_quant"),
        ({"seed": 1}, "random_seed: 0 there, 1 now"),
        ({"max_model_len": 100}, "max_model_len: 1024 there, 100 now"),
        ({"compute_dtype": "float32"}, "compute_dtype"),
    ):
        with pytest.raises(qkv.Error, match=f"other settings.*{words}"):
            qkv.run_dataset(model, some(3), out, GREEDY, progress=False, **{**OPTIONS, **options})
    other = tiny("llama", seed=5)
    with pytest.raises(qkv.Error, match="environment.models.model"):
        qkv.run_dataset(other, some(3), out, GREEDY, progress=False, **OPTIONS)
    for options in ({"kv_tokens": 512}, {"threads": 2}, {"max_running": 2}, {"chunk_tokens": 16}):
        same = {**OPTIONS, "schedule": "fcfs", "prefix_cache": False, **options}
        assert qkv.run_dataset(model, some(3), out, GREEDY, progress=False, **same).before == 3


def test_failed_rows_alone_are_done_again(engine: qkv.Engine, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_jsonl(source, [{"prompt": "a"}, {"prompt": 5}, {"prompt": "b"}])
    assert run(engine, source, out).failed == 1
    write_jsonl(source, [{"prompt": "a"}, {"prompt": "mended"}, {"prompt": "b"}])
    with pytest.raises(qkv.Error, match="--retry-errors"):
        run(engine, source, out)
    summary = run(engine, source, out, retry_errors=True)
    assert (summary.before, sum(summary.rows.values()), summary.failed) == (2, 1, 0)
    whole = tmp_path / "whole.jsonl"
    run(engine, source, whole)
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


@pytest.mark.parametrize("damage", ["torn", "half a row", "zeros", "zeros inside"])
def test_what_a_crash_left_is_repaired(engine: qkv.Engine, tmp_path: Path, damage: str) -> None:
    rows, out, whole = some(20), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run(engine, rows, whole)
    run(engine, rows, out)
    data = out.read_bytes()
    lines = data.splitlines(keepends=True)
    out.write_bytes(
        {
            "torn": data[:-7],
            "half a row": b"".join(lines[:5]) + lines[6][:30],
            "zeros": b"".join(lines[:10]) + bytes(4096),
            "zeros inside": lines[0] + lines[1][:20] + bytes(100) + b"".join(lines[4:]),
        }[damage]
    )
    summary = run(engine, rows, out)
    assert summary.damaged == (damage == "zeros inside")
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_what_is_not_ours_is_not_touched(engine: qkv.Engine, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    with pytest.raises(qkv.Error, match=r"is there already, without out\.jsonl\.qkv"):
        run(engine, some(2), out)
    assert out.read_text() == "precious\n"
    out.unlink()
    run(engine, some(2), out)
    whole, key = out.read_text(), "f" * 15 + "_" + "f" * 16
    for state, bad in (('"ok"', key), ('"ok"', "-1"), ('{"x": 1}', "f" * 32)):
        out.write_text(whole + f'{{"id": "x", "state": {state}, "qkv_key": "{bad}"}}\n')
        with pytest.raises(qkv.Error, match="line 3 is no row"):
            run(engine, some(2), out)
    for line in ('{"hello": 1}', "[" * 100_000):
        out.write_text(whole + line + "\n")
        with pytest.raises(qkv.Error, match="line 3 is no row"):
            run(engine, some(2), out)
    about = Path(f"{out}.qkv")
    about.write_text("[" * 100_000 + "\n")
    with pytest.raises(qkv.Error, match=r"out\.jsonl\.qkv: not the header"):
        run(engine, some(2), out)
    source = write_jsonl(tmp_path / "in.jsonl", some(2))
    with pytest.raises(qkv.Error, match="the input cannot be the output"):
        run(engine, source, source)


def test_one_process_at_a_time(engine: qkv.Engine, tmp_path: Path) -> None:
    sink = Sink(tmp_path / "out.jsonl")
    with pytest.raises(qkv.Error, match="another process is writing to it"):
        run(engine, some(2), tmp_path / "out.jsonl")
    sink.close()
    run(engine, some(2), tmp_path / "out.jsonl")


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """As a disk that is full after so many bytes: part of a line is written, then none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(engine: qkv.Engine, tmp_path: Path) -> None:
    rows, out, whole = some(40), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run(engine, rows, whole)
    with largest_file(3000), pytest.raises(qkv.Error, match=r"out\.jsonl: File too large.*goes on"):
        run(engine, rows, out)
    data = out.read_bytes()
    assert 2000 < len(data) <= 3000 and data.endswith(b"\n")
    assert run(engine, rows, out).before == data.count(b"\n")
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_a_small_disk(engine: qkv.Engine, tmp_path: Path) -> None:
    """A file system of 24 KiB that really fills up, where one may be mounted."""
    disk, rows, whole = tmp_path / "disk", some(100), tmp_path / "whole.jsonl"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(disk)]
    allowed = shutil.which("mount") is not None
    if not allowed or subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        run(engine, rows, whole)
        with pytest.raises(qkv.Error, match="No space left on device.*goes on with them"):
            run(engine, rows, disk / "out.jsonl")
        data = (disk / "out.jsonl").read_bytes()
        assert 10 < data.count(b"\n") < 100 and data.endswith(b"\n")
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        assert run(engine, rows, disk / "out.jsonl").before == data.count(b"\n")
        found = (disk / "out.jsonl").read_bytes()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert sorted(found.splitlines()) == sorted(whole.read_bytes().splitlines())


def test_a_disk_without_room_for_the_header(engine: qkv.Engine, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with largest_file(100), pytest.raises(qkv.Error, match=r"out\.jsonl\.qkv: File too large"):
        run(engine, some(4), out)
    assert list(tmp_path.iterdir()) == []
    assert run(engine, some(4), out).before == 0 and len(read(out)) == 4


def test_no_room_for_the_new_file(
    engine: qkv.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file is to be replaced, the old one stays until the new one is whole."""
    out = tmp_path / "out.jsonl"
    rows: list[Any] = [*some(10), {"id": "bad", "prompt": 5}]
    run(engine, rows, out)
    before = out.read_bytes()
    with largest_file(len(before) // 2), pytest.raises(qkv.Error, match="File too large"):
        run(engine, rows, out, retry_errors=True)
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.qkv"}
    assert run(engine, rows, out, retry_errors=True).failed == 1


def test_an_interrupt_keeps_what_is_done(engine: qkv.Engine, tmp_path: Path) -> None:
    rows, out, whole = some(40), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    calls = []

    def hook(output: qkv.RequestOutput) -> None:
        calls.append(output.key)
        if len(calls) == 15:
            raise KeyboardInterrupt

    run(engine, rows, whole)
    with pytest.raises(KeyboardInterrupt):
        run(engine, rows, out, on_finish=hook)
    assert set(read(out)) == set(calls[:14])
    assert run(engine, rows, out).before == 14
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_a_model_that_cannot_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(qkv.Error, match="nowhere"):
        qkv.run_dataset(tmp_path / "nowhere", ["x"], tmp_path / "out.jsonl", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_arguments(engine: qkv.Engine, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for error, words, options in (
        (ValueError, "on_bad_row='ignore': must be one of", {"on_bad_row": "ignore"}),
        (ValueError, "limit=0", {"limit": 0}),
        (ValueError, "shard's i=3", {"shard": (3, 3)}),
        (TypeError, r"shard='0/3': \(i, n\) is needed", {"shard": "0/3"}),
        (TypeError, "on_finish=5", {"on_finish": 5}),
        (TypeError, "an Engine has its options already: threads", {"threads": 1}),
    ):
        with pytest.raises(error, match=words):
            run(engine, ["x"], out, **options)
    with pytest.raises(ValueError, match="can be read only once"):
        run(engine, iter(["x"]), out, on_bad_row="stop")
    assert run(engine, iter(["x", "y"]), out, limit=1).rows["truncated"] == 1
    assert run(engine, iter(["x", "y"]), out).before == 1


def test_output_that_cannot_be_written(engine: qkv.Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "out.jsonl", Path("/proc/out.jsonl")):
        with pytest.raises(OSError):
            run(engine, some(2), path)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(qkv.Error, match="not a regular file"):
        run(engine, some(2), tmp_path / "folder.jsonl")
    with pytest.raises(qkv.Error, match=r"must end with one of \.jsonl"):
        run(engine, some(2), tmp_path / "out.xml")


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """At least 50 times in one run over 2,000 rows; `make soak` does it 10,000 times."""
    script = ROOT / "tests" / "tools" / "kill_runs.py"
    command = [sys.executable, str(script), str(tmp_path), "--kills", "50", "--rows", "2000"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    facts = json.loads(done.stdout)
    assert facts["same"] and facts["kills"] >= 50 and facts["rows"] == 2000
    assert done.returncode == 0


# ---- hostile values --------------------------------------------------------------------------


def test_rows_that_cannot_be_written(engine: qkv.Engine, tmp_path: Path) -> None:
    """JSON reads what Python cannot walk through, and an iterable may hold anything."""
    around: list[Any] = []
    around.append(around)

    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    deep = json.loads("[" * 600 + "]" * 600)
    rows = [
        {"id": "deep", "prompt": "a", "x": deep},
        {"id": "around", "prompt": "a", "x": around},
        {"id": "silent", "prompt": "a", "x": Silent()},
        {"id": 10**5000, "prompt": "a"},
        {"id": np.arange(2), "prompt": "a"},
        {"id": True, "prompt": "a"},
        {"id": "keys", "prompt": "a", "x": {1: 2, "b": 3, (4, 5): 6}},
        {"id": "good", "prompt": "a"},
    ]
    out = tmp_path / "out.jsonl"
    assert run(engine, rows, out).rows == {"ok": 0, "truncated": 2, "too_long": 0, "error": 6}
    found = read(out)
    for name, words in (
        ("deep", "deeper than 128 levels"), ("around", "Circular"), ("silent", "no text"),
        (3, "4300 digits"), (4, "an id is text or an integer"), (5, "id=True: an id is text"),
    ):  # fmt: skip
        assert found[name]["state"] == "error" and words in found[name]["error"]
    assert found["keys"]["x"] == {"1": 2, "b": 3, "(4, 5)": 6} and found[5]["input_id"] is True
    assert run(engine, rows, out).before == 8 and read(out) == found
    deep = json.loads("[" * 126 + "]" * 126)
    run(engine, [{"prompt": "a", "x": deep}], tmp_path / "most.jsonl")
    assert read(tmp_path / "most.jsonl")[0]["x"] == deep


def test_a_hook_that_gives_what_cannot_be_written(engine: qkv.Engine, tmp_path: Path) -> None:
    around: list[Any] = []
    around.append(around)
    run(engine, some(2), tmp_path / "out.jsonl", on_finish=lambda output: {"x": around})
    for row in read(tmp_path / "out.jsonl").values():
        assert row["state"] == "truncated" and "Circular" in row["score_error"]


def test_odd_beginnings_of_files(engine: qkv.Engine, tmp_path: Path) -> None:
    for ending in ("jsonl", "txt", "csv"):
        source = tmp_path / f"in.{ending}"
        source.write_bytes(b"\xef\xbb\xbf\r\n\r\n" if ending != "csv" else b"\xef\xbb\xbf")
        run(engine, source, tmp_path / f"{ending}.jsonl")
        assert read(tmp_path / f"{ending}.jsonl") == {}
    for header in (b'"a"b,prompt\n1,2\n', b'prompt,"x\n1,2\n'):
        source.write_bytes(header)
        with pytest.raises(qkv.Error, match="the header is not valid CSV"):
            run(engine, source, tmp_path / "none.jsonl")


def test_an_output_that_is_a_link(engine: qkv.Engine, tmp_path: Path) -> None:
    """What is written anew at the end of a link takes the place of the file and not of the link."""
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "real.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(real)
    rows = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": ""}]
    run(engine, rows, link)
    run(engine, [rows[0], {"id": 2, "prompt": "b"}], link, retry_errors=True)
    assert link.is_symlink() and {row["state"] for row in read(real).values()} == {"truncated"}
    assert run(engine, [rows[0], {"id": 2, "prompt": "b"}], real).before == 2
