"""Data sets: what comes in, how it becomes prompts, and what stands in the output."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import cli, dataset
from qkv.dataset import Rows, sink, source

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

GREEDY = qkv.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path]) -> Iterator[qkv.Engine]:
    with qkv.Engine(tiny("llama"), kv_tokens=1024, threads=1, max_running=8) as opened:
        yield opened


def answers(
    engine: qkv.Engine, rows: Any, options: Rows | None = None, **more: Any
) -> list[dict[str, Any]]:
    """In the order of the rows, which have the ids 0, 1, 2, ..."""
    found = list(dataset.answers(engine, rows, options, GREEDY, **more))
    return sorted(found, key=lambda row: int(row["id"]))


# ---- rows in ---------------------------------------------------------------------------------


def rows_of(given: Any) -> list[Any]:
    return list(source.open_source(given).rows())


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    lines = ["\ufeffid,prompt", 'a,"two\nlines, ""quoted"""', "", "b", 'c,"x"y', "d,last"]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = rows_of(path)
    assert found[0] == {"id": "a", "prompt": 'two\nlines, "quoted"'}
    assert found[1] == source.Bad("line 5: 1 fields, the header has 2")
    assert isinstance(found[2], source.Bad) and found[2].reason.startswith("line 6: not valid CSV")
    assert found[3] == {"id": "d", "prompt": "last"}
    assert source.open_source(path).count() == 4
    path.write_text("a,a\n1,2\n")
    with pytest.raises(qkv.Error, match="stands twice in the header"):
        rows_of(path)
    path.write_text("")
    assert rows_of(path) == []


def test_bytes_of_no_encoding_are_the_error_of_their_row(
    engine: qkv.Engine, tmp_path: Path
) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b"prompt\ngood\nbad \xe9\n")
    found = answers(engine, path)
    assert found[0]["error"] is None and "not valid Unicode" in found[1]["error"]
    assert json.loads(sink.encode(found[1]))["prompt"] == "bad \udce9"


def test_text_lines_and_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\r\n\n two \n")
    assert rows_of(tmp_path / "in.txt") == [{"prompt": "one"}, {"prompt": " two "}]
    raw = io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{'))
    monkeypatch.setattr("sys.stdin", raw)
    first, second = rows_of("-")
    assert first == {"prompt": "a"} and second.reason.startswith("line 2: not valid JSON")


def test_iterables() -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    given = ["text", [1, 2], np.array([3]), conversation, {"prompt": "x"}, 5, None]
    found = rows_of(given)
    assert found[0] == {"prompt": "text"} and found[1] == {"prompt_token_ids": [1, 2]}
    assert found[3] == {"messages": conversation} and found[4] == {"prompt": "x"}
    assert all(isinstance(row, source.Bad) for row in found[5:])
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "n": [1, 2]})
    assert rows_of(frame) == [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    for wrong in (5, b"x", {"prompt": "x"}):
        with pytest.raises(TypeError, match="an iterable of rows"):
            source.open_source(wrong)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        source.open_source(tmp_path / "nowhere.jsonl")
    with pytest.raises(qkv.Error, match="a folder"):
        source.open_source(tmp_path)
    (tmp_path / "in.xml").write_text("")
    with pytest.raises(qkv.Error, match="must end with one of"):
        source.open_source(tmp_path / "in.xml")
    (tmp_path / "in.parquet").write_text("no table")
    with pytest.raises(qkv.Error, match="not a Parquet file"):
        rows_of(tmp_path / "in.parquet")


def test_a_pipe(engine: qkv.Engine, tmp_path: Path) -> None:
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('{"prompt": "a"}\n"b"\n'))
    writer.start()
    assert len(answers(engine, pipe)) == 2
    writer.join()


# ---- prompts ---------------------------------------------------------------------------------


def test_prompts_from_columns_and_templates(engine: qkv.Engine) -> None:
    def prompt_ids(row: dict[str, Any], **options: Any) -> Any:
        found = answers(engine, [row], Rows(token_ids=True, **options))[0]
        return found["error"] or found["prompt_token_ids"]

    def ids(text: str, special: bool = True) -> list[int]:
        return engine.tokenizer.encode(text, add_special_tokens=special)

    def chat(*messages: tuple[str, str]) -> list[int]:
        turns = [{"role": role, "content": content} for role, content in messages]
        return ids(engine.tokenizer.apply_chat_template(turns), special=False)

    row = {"q": "The fox", "n": [1, 2], "messages": [{"role": "user", "content": "Hi"}]}
    assert prompt_ids(row, prompt="q") == ids("The fox")
    assert prompt_ids(row, prompt="n") == [1, 2]
    assert prompt_ids(row) == chat(("user", "Hi"))
    assert prompt_ids({**row, "messages": json.dumps(row["messages"])}) == chat(("user", "Hi"))
    assert prompt_ids({"prompt_token_ids": "[3, 4]"}) == [3, 4]
    for text in ("3 4", "12", '"The fox"', "[" * 100_000):
        for name in ("prompt_token_ids", "messages"):
            assert f"the column '{name}' is " in prompt_ids({name: text})
    assert "'prompt_token_ids' is empty" in prompt_ids({"prompt_token_ids": ""})
    assert prompt_ids(row, prompt="q", chat=True) == chat(("user", "The fox"))
    brief = chat(("system", "Brief."), ("user", "The fox"))
    assert prompt_ids(row, prompt="q", system="Brief.") == brief
    assert prompt_ids(row, system="Brief.") == chat(("system", "Brief."), ("user", "Hi"))
    own = {"messages": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "x"}]}
    assert prompt_ids(own, system="Brief.") == chat(("system", "Mine."), ("user", "x"))
    template = "{% for x in n %}{{ x }}\n{% endfor %}{{ q|upper }}\n"
    assert prompt_ids(row, template=template) == ids("1\n2\nTHE FOX\n")
    assert "'w' is undefined" in prompt_ids(row, template="{{ w }}")
    assert "division by zero" in prompt_ids(row, template="{{ 1 / 0 }}")
    assert "template's text is empty" in prompt_ids(row, template="{{ '' }}")
    assert "no column 'w'; the row's columns: 'q', 'n'" in prompt_ids(row, prompt="w")
    assert "NoneType" in prompt_ids({"prompt": None, "p": 1}, prompt="prompt")
    with pytest.raises(qkv.Error, match="template: unexpected"):
        answers(engine, [], Rows(template="{{ q"))
    with pytest.raises(ValueError, match="one of them"):
        Rows(prompt="a", template="b")


def test_a_model_without_a_chat_template(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with qkv.Engine(tiny("llama"), kv_tokens=64, threads=1) as bare:
        bare.tokenizer.templates.clear()
        with pytest.raises(qkv.Error, match="chat template"):
            qkv.run_dataset(bare, ["x"], tmp_path / "o.jsonl", options=Rows(system="Brief."))


def test_sampling_parameters_of_a_row(engine: qkv.Engine) -> None:
    rows = [
        {"prompt": "The fox", "params": {"max_tokens": 2}},
        {"prompt": "The fox", "params": "a column of the user's own"},
        {"prompt": "The fox", "p": '{"max_tokens": 3, "seed": null}'},
        {"prompt": "The fox", "p": {"n": 2}},
        {"prompt": "The fox", "p": ""},
        {"prompt": "The fox", "p": "{"},
        {"prompt": "The fox", "p": "[1]"},
    ]
    found = answers(engine, rows)
    assert [row["output_tokens"] for row in found] == [2, 4, 4, 4, 4, 4, 4]
    found = answers(engine, rows, Rows(params="p"))
    assert [row["output_tokens"] for row in found] == [4, 4, 3, 8, 4, 0, 0]
    assert [sample["text"] for sample in found[3]["samples"]] == [found[0]["text"]] * 2
    assert "an object is needed" in found[6]["error"]


def test_columns_of_the_output(engine: qkv.Engine) -> None:
    row = {"prompt": "The fox", "text": "mine", "input_text": "too", "a": 1, "score_x": 2}
    found = answers(engine, [row], on_finish=lambda output: {"x": len(output.text)})[0]
    assert (found["input_text"], found["input_input_text"]) == ("mine", "too")
    assert found["score_x"] == len(found["text"]) and found["input_score_x"] == 2
    found = answers(engine, [row], Rows(columns=["a"]))[0]
    assert found["a"] == 1 and "prompt" not in found and "input_text" not in found
    with pytest.raises(TypeError, match="a list of names"):
        Rows(columns="a")

    def broken(output: qkv.RequestOutput) -> dict[str, Any]:
        raise RuntimeError("no")

    found = answers(engine, [row], on_finish=broken)[0]
    assert found["score_error"] == "RuntimeError: no" and found["state"] == "truncated"


def test_a_hook_that_scores_afterwards(engine: qkv.Engine, monkeypatch: Any) -> None:
    """Some rows at a time, before they are written."""
    monkeypatch.setattr("qkv.dataset.loop._HOOK_ROWS", 3)
    prompts: list[Any] = [f"The {word}" for word in "fox dog cat cow hen pig rat ant".split()]
    hook = qkv.hooks.reference_logprob([" runs"] * len(prompts))
    found = answers(engine, prompts, on_finish=hook)
    wanted = engine.score(list(prompts), [" runs"] * len(prompts), progress=False)
    assert [row["score_reference_logprob"] for row in found] == [one.total for one in wanted]


def test_logprobs_samples_and_lanes(tiny: Callable[..., Path]) -> None:
    params = qkv.SamplingParams(max_tokens=3, n=2, logprobs=2, prompt_logprobs=0)
    formats = ["bf16", "fp8_e4m3"]
    with qkv.Engine(tiny("llama"), kv_cache_dtype=formats, kv_tokens=512, threads=1) as two:
        found = list(dataset.answers(two, ["The fox"], Rows(token_ids=True), params))[0]
        wanted = two.generate(["The fox"], params, progress=False)[0]
    assert found["token_ids"] == wanted.token_ids.tolist()
    assert found["logprobs"] == [float(x) for x in wanted.logprobs]
    assert found["prompt_logprobs"] == [float(x) for x in wanted.prompt_logprobs]
    assert np.shape(found["top_ids"]) == (3, 2) and np.shape(found["top_logprobs"]) == (3, 2)
    assert [s["token_ids"] for s in found["samples"]] == [
        sample.token_ids.tolist() for sample in wanted.outputs
    ]
    assert list(found["lanes"]) == formats
    assert found["lanes"]["bf16"] == found["samples"]
    json.loads(sink.encode(found))


def test_lines_that_json_cannot_hold() -> None:
    row = {"id": 1, "x": [math.nan, -math.inf, 1.5], "y": np.float32("nan"), "z": {"a": math.inf}}
    plain = {**row, "y": float(row["y"])}
    assert json.loads(sink.encode(plain)) == {"id": 1, "x": [None, None, 1.5], "y": None,
                                              "z": {"a": None}}  # fmt: skip
    line = sink.encode({"id": "\ud800", "x": "\u00e9"})
    assert line == b'{"id": "\\ud800", "x": "\\u00e9"}\n'


# ---- Parquet ---------------------------------------------------------------------------------


def test_parquet_in_and_out(engine: qkv.Engine, tmp_path: Path) -> None:
    rows = [
        {"uid": i, "question": f"The {i}", "tags": ["a", "b"][: i % 3], "deep": {"x": i / 2}}
        for i in range(30)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    options = Rows(prompt="question", id="uid", token_ids=True)
    for before in (0, 30):
        summary = qkv.run_dataset(
            engine, tmp_path / "in.parquet", out, GREEDY, options=options, progress=False
        )
        assert summary.before == before
        stamp = out.stat().st_mtime_ns
    table = parquet.read_table(out)
    assert table.schema.field("error").type == pyarrow.string()
    found = {row["id"]: row for row in table.to_pylist()}
    journal = [json.loads(line) for line in (tmp_path / "out.parquet.jsonl").open()]
    assert found == {row["id"]: row for row in journal} and len(found) == 30
    assert found[4]["tags"] == ["a"] and found[4]["deep"] == {"x": 2.0}
    assert table.schema.field("token_ids").type == pyarrow.list_(pyarrow.int64())
    # Nothing was to be done the second time; a crash before the table's end makes it anew.
    out.unlink()
    qkv.run_dataset(engine, rows, out, GREEDY, options=options, progress=False)
    assert parquet.read_table(out).equals(table) and out.stat().st_mtime_ns > stamp


def test_columns_without_a_common_type(engine: qkv.Engine, tmp_path: Path) -> None:
    """Mixed within one batch, and from one batch to the next."""
    rows: list[Any] = [{"prompt": "a", "x": 1, "y": {}, "big": 2**70}, {"prompt": "b", "x": "s"}]
    rows += [{"prompt": "c", "z": 1}] * 2000 + [{"prompt": "d", "z": 1.5, "x": [1]}, {"z": "t"}]
    params = GREEDY.with_(max_tokens=1)
    out = tmp_path / "out.parquet"
    qkv.run_dataset(engine, rows, out, params, progress=False)
    table = parquet.read_table(out)
    found = {row["id"]: row for row in table.to_pylist()}
    assert len(found) == 2004
    assert [found[i]["x"] for i in (0, 1, 2, 2002)] == ["1", "s", None, "[1]"]
    assert [found[i]["z"] for i in (2, 2002, 2003)] == ["1", "1.5", "t"]
    assert found[0]["big"] == str(2**70) and found[0]["y"] == "{}"
    assert found[2003]["state"] == "error"


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(qkv.Error, match="pip install"):
        qkv.run_dataset("/nowhere", ["x"], tmp_path / "out.parquet")
    assert not list(tmp_path.iterdir())


def test_shards_into_one_table(engine: qkv.Engine, tmp_path: Path) -> None:
    prompts = [f"The {i}" for i in range(20)]
    parts = [tmp_path / f"part{i}.parquet" for i in range(2)]
    for i, part in enumerate(parts):
        qkv.run_dataset(engine, prompts, part, GREEDY, shard=(i, 2), progress=False)
    assert cli.main(["merge", str(tmp_path / "all.parquet"), *map(str, parts)]) == 0
    table = parquet.read_table(tmp_path / "all.parquet")
    assert sorted(table.column("id").to_pylist()) == list(range(20))


# ---- shards that do not belong together ------------------------------------------------------


def test_parts_that_do_not_fit(engine: qkv.Engine, tmp_path: Path) -> None:
    prompts = [f"The {i}" for i in range(12)]

    def part(name: str, i: int, n: int = 2, rows: Any = prompts, **more: Any) -> Path:
        path = tmp_path / f"{name}.jsonl"
        params = GREEDY.with_(**more)
        qkv.run_dataset(engine, rows, path, params, shard=(i, n), progress=False)
        return path

    zero, one = part("zero", 0), part("one", 1)
    (tmp_path / "link.jsonl").symlink_to(one)
    out = tmp_path / "all.jsonl"
    for parts, words in (
        ([zero], "shards 1 of 2 are missing"),
        ([zero, one, zero], "zero.jsonl: the same part twice, as"),
        ([zero, one, tmp_path / "link.jsonl"], "link.jsonl: the same part twice, as"),
        ([zero, part("again", 0)], "is shard 0/2, and so is"),
        ([zero, part("three", 1, 3)], "shard"),
        ([zero, part("hot", 1, temperature=0.5)], "settings.sampling.temperature"),
        ([zero, part("more", 1, rows=[*prompts, "x"])], "is of another input: 13 rows"),
        ([zero, part("less", 1, rows=["The 0 ", *prompts[1:]])], "or their contents differ"),
        ([zero, tmp_path / "none.jsonl"], "there is no none.jsonl.qkv"),
    ):
        with pytest.raises(qkv.Error, match=words.replace(".", r"\.")):
            dataset.merge(parts, out)
        assert not out.exists()
    lines = one.read_bytes().splitlines(keepends=True)
    one.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(qkv.Error, match="the parts have 11 rows and were finished with 12"):
        dataset.merge([zero, one], out)
    one.write_bytes(b"".join(lines) + zero.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(qkv.Error, match="is in another part, too"):
        dataset.merge([zero, one], out)
    one.write_bytes(b"".join(lines))
    with open(f"{one}.qkv", "a") as about:
        about.write('{"kind": "begun"}\n')
    with pytest.raises(qkv.Error, match="was not finished"):
        dataset.merge([zero, one], out)
    part("one", 1)
    assert dataset.merge([zero, tmp_path / "link.jsonl"], out) == 12
    with pytest.raises(qkv.Error, match="has rows already"):
        dataset.merge([zero, one], out)


def test_a_part_that_is_damaged(engine: qkv.Engine, tmp_path: Path) -> None:
    part, out = tmp_path / "part.jsonl", tmp_path / "all.jsonl"
    qkv.run_dataset(engine, ["a", "b"], part, GREEDY, progress=False)
    about = Path(f"{part}.qkv")
    whole = about.read_bytes()
    done = b'{"kind": "done", "rows": 2, "input_rows": 2, "input": ""}'
    headers: list[dict[str, Any]] = [
        {},
        {"settings": {}},
        {"settings": {"shard": 5}},
        {"settings": {"shard": [0]}},
    ]
    for header in headers:
        first = json.dumps({"format": sink.FORMAT, **header}).encode()
        about.write_bytes(first + b"\n" + done + b"\n")
        with pytest.raises(qkv.Error, match=r"part\.jsonl\.qkv: not"):
            dataset.merge([part], out)
    about.write_bytes(whole.splitlines(keepends=True)[0] + b'{"kind": "done"}\n')
    with pytest.raises(qkv.Error, match=r"part\.jsonl\.qkv: not what a run"):
        dataset.merge([part], out)
    about.write_bytes(whole)
    part.rename(tmp_path / "moved.jsonl")
    with pytest.raises(qkv.Error, match=r"part\.jsonl: is not there any more"):
        dataset.merge([part], out)
    assert not out.exists()


# ---- the command -----------------------------------------------------------------------------


def command(tiny: Callable[..., Path], *args: str) -> list[str]:
    small = ["--kv-tokens", "1024", "--threads", "1", "--max-tokens", "3", "--temperature", "0"]
    return ["generate", "--model", str(tiny("llama")), *small, *args]


def test_command(
    tiny: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QKV_DEBUG", raising=False)
    given, out = str(tmp_path / "in.csv"), str(tmp_path / "out.jsonl")
    with open(given, "w", newline="") as file:
        csv.writer(file).writerows([["uid", "q", "more"], ["a", "The fox", "x"], ["b", "", "y"]])
    args = command(tiny, given, out, "--template", r"{{ q }}\n", "--id-column", "uid")
    args += ["--columns", "q,uid", "--token-ids", "--no-progress"]
    assert cli.main(args) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "2 truncated; 0 there before" in captured.err
    row = next(row for row in map(json.loads, Path(out).open()) if row["id"] == "a")
    assert list(row)[:4] == ["id", "uid", "q", "text"] and len(row["token_ids"]) == 3
    assert cli.main([*args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["before"] == 2
    assert cli.main([*args, "--seed", "1"]) == 1
    assert "settings.sampling.seed: None there, 1 now" in capsys.readouterr().err
    assert cli.main([*args, "--seed", "1", "--restart", "--log-json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert [event["event"] for event in events] == ["start", "summary"]
    assert events[1]["rows"]["truncated"] == 2
    parts = [str(tmp_path / f"p{i}.jsonl") for i in range(2)]
    for i, part in enumerate(parts):
        assert cli.main(command(tiny, given, part, "--prompt-column", "q", "--no-progress",
                                "--shard", f"{i}/2")) in (0, 1)  # fmt: skip
    assert cli.main(["merge", str(tmp_path / "m.jsonl"), *parts, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2


def test_a_hook_of_the_command(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "def length(output):\n    return {'length': len(output.text)}\n"
    Path("a_grader.py").write_text(code)
    Path("in.txt").write_text("The fox\n")
    args = command(tiny, "in.txt", "out.jsonl", "--on-finish", "a_grader:length", "--no-progress")
    assert cli.main(args) == 0
    row = json.loads(Path("out.jsonl").read_text())
    assert row["score_length"] == len(row["text"])
    del sys.modules["a_grader"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["IN", "OUT.jsonl", "--shard", "2"], 2, "--shard 2: I/N"),
        (["IN", "OUT.jsonl", "--shard", "2/2"], 2, "shard's i=2"),
        (["IN", "OUT.jsonl", "--output", "x"], 2, "IN and OUT are given already"),
        (["IN", "OUT.json"], 2, "OUT"),
        (["/nowhere.jsonl", "OUT.jsonl"], 2, "/nowhere.jsonl: No such file"),
        (["IN", "IN/OUT.jsonl"], 2, "in.jsonl"),
        (["a prompt", "--system", "Brief."], 2, "--system goes with qkv generate IN OUT"),
        (["IN", "OUT.jsonl", "--template", "a", "--template-file", "b"], 2, "one of them"),
        (["IN", "OUT.jsonl", "--template-file", "/nowhere"], 2, "/nowhere"),
        (["IN", "OUT.jsonl", "--template", "{{"], 1, "template: "),
        (["IN", "OUT.jsonl", "--on-finish", "nowhere:x"], 2, "--on-finish nowhere:x: ModuleNot"),
        (["IN", "OUT.jsonl", "--on-finish", "json"], 2, "--on-finish json: AttributeError"),
        (["IN", "OUT.jsonl", "--on-bad-row", "stop"], 1, "line 2: not valid JSON"),
    ],
)
def test_errors_of_the_command(
    args: list[str],
    code: int,
    words: str,
    tiny: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QKV_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}\n{\n')
    given = [arg.replace("IN", "in.jsonl").replace("OUT", "out") for arg in args]
    assert cli.main(command(tiny, *given)) == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.startswith("qkv: ")
    assert captured.err.count("\n") == 1 and not Path("out.jsonl").exists()


# ---- seeing it run ---------------------------------------------------------------------------


def test_progress_and_summary(
    engine: qkv.Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qkv.progress._LINE_SECONDS", 0.0)
    monkeypatch.setattr("qkv.progress._QUIET_SECONDS", 0.0)
    monkeypatch.setattr("qkv.dataset.summary._EVENT_SECONDS", 0.0)
    prompts: list[Any] = ["The quick brown fox jumps over a lazy dog and more"] * 9 + [5]
    summary = qkv.run_dataset(engine, prompts, tmp_path / "out.jsonl", GREEDY)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("rows: 10/10, ") and "tokens/s" in lines[-1]
    assert "9 truncated" in lines[-1] and "1 error" in lines[-1]
    assert summary.prefix_hits > 0.2 and summary.retractions == 0
    assert summary.kv_values["bf16"]["clipped"] == 0 and summary.rows["error"] == 1
    for words in ("9 truncated, 1 error; 0 there before", "of the prompt tokens were found"):
        assert words in str(summary)
    # What was there before says nothing of the time that is left.
    more = [*prompts, "one more"]
    qkv.run_dataset(engine, more, tmp_path / "out.jsonl", GREEDY)
    assert capsys.readouterr().err.splitlines()[-1].startswith("rows: 11/11, ")
    qkv.run_dataset(engine, more, tmp_path / "log.jsonl", GREEDY, log_json=True)
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {event["event"] for event in events} == {"start", "progress", "failed", "summary"}
    failed = next(event for event in events if event["event"] == "failed")
    assert failed["id"] == 9 and failed["state"] == "error" and "int 5" in failed["error"]
    assert events[0]["settings"]["sampling"]["max_tokens"] == 4


def test_a_disk_that_does_not_take_it(
    engine: qkv.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system accepted and could not put on the disk is an error of the run."""

    def fails(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "out.jsonl":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(qkv.Error, match=r"out\.jsonl: Input/output error; the rows before"):
        qkv.run_dataset(engine, ["a"], tmp_path / "out.jsonl", GREEDY, progress=False)
    monkeypatch.undo()
    again = qkv.run_dataset(engine, ["a"], tmp_path / "out.jsonl", GREEDY, progress=False)
    assert again.before == 1


def test_an_end_just_after_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run hung at its end, once in 10,000 lives: close() came between the question whether it is
    the end and the next wait, and the thread that has rows put on the disk never heard of it."""
    with open(tmp_path / "rows", "ab", buffering=0) as file:
        syncer = sink._Syncer(file)

        def too_early(seconds: float | None = None) -> bool:
            monkeypatch.undo()
            syncer._closing.set()
            syncer._dirty.set()
            return False

        monkeypatch.setattr(syncer._closing, "wait", too_early)
        syncer.wake()
        syncer._thread.join(60.0)
        assert not syncer._thread.is_alive()


def test_tables_that_python_cannot_hold(engine: qkv.Engine, tmp_path: Path) -> None:
    """A value without one in Python is its row's error; a table that is damaged, the run's."""
    broken = pyarrow.array([b"\xff", b"a", b"b"]).buffers()
    table = pyarrow.table(
        {
            "prompt": pyarrow.array(["a", "b", "c"]),
            "when": pyarrow.array([0, 2**62, 0], pyarrow.timestamp("ms")),
            "text": pyarrow.Array.from_buffers(pyarrow.string(), 3, broken),
        }
    )
    source = tmp_path / "in.parquet"
    parquet.write_table(table, source)
    found = answers(engine, source)
    assert [row["state"] for row in found] == ["error", "error", "truncated"]
    assert "the column 'text' has no value of Python: UnicodeDecodeError" in found[0]["error"]
    assert "the column 'when' has no value of Python: OverflowError" in found[1]["error"]
    names = ["prompt", "x", "x"]
    parquet.write_table(pyarrow.table([["a"], [1], [2]], names=names), source)
    with pytest.raises(qkv.Error, match="a column stands twice: prompt, x, x"):
        answers(engine, source)
    parquet.write_table(pyarrow.table({"prompt": ["abc" * 99 + str(i) for i in range(9)]}), source)
    data = bytearray(source.read_bytes())
    data[40:120] = b"\xaa" * 80
    source.write_bytes(data)
    with pytest.raises(qkv.Error, match=r"in\.parquet: damaged"):
        answers(engine, source)


def test_half_pairs_in_a_table(engine: qkv.Engine, tmp_path: Path) -> None:
    rows = [{"id": "\ud800", "prompt": "a", "\udcff": ["\ud801"]}, {"id": 1, "prompt": "a"}]
    out = tmp_path / "out.parquet"
    qkv.run_dataset(engine, rows, out, GREEDY, progress=False)
    first, second = sorted(parquet.read_table(out).to_pylist(), key=lambda row: -len(row["id"]))
    assert first["id"] == "\\ud800" and json.loads(first["\\udcff"]) == ["\ud801"]
    assert second["id"] == "1" and second["\\udcff"] is None
