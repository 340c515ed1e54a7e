"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import qkv
from qkv import cli
from ref import make_tiny

SMALL = ["--kv-tokens", "1024", "--threads", "1", "--max-tokens", "5", "--temperature", "0"]
SMALL += ["--ignore-eos"]


def rows_of(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_generate_text(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "--model", str(tiny("llama")), *SMALL, "The fox", "The dog"]
    assert cli.main(args) == 0
    out = capsys.readouterr().out
    assert out.index("The fox") < out.index("The dog")
    assert out.count(">>> ") == 2 and out.count("[cut after 5 tokens]") == 2


def test_generate_json(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "--model", str(tiny("llama")), *SMALL, "--json", "The fox", "The dog"]
    assert cli.main(args) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["prompt"] for row in rows] == ["The fox", "The dog"]
    assert "token_ids" not in rows[0]["outputs"][0]  # type: ignore[index]
    assert cli.main([*args, "--arrays", "--logprobs", "2", "--n", "2"]) == 0
    rows = rows_of(capsys.readouterr().out)
    samples = rows[0]["outputs"]
    assert isinstance(samples, list) and len(samples) == 2
    assert len(samples[0]["token_ids"]) == len(samples[0]["top_ids"]) == 5


def test_generate_jsonl_to_jsonl(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given = [
        {"prompt": "The fox", "id": "a", "params": {"max_tokens": 3}},
        {"prompt_token_ids": [1, 2, 3], "key": 7},
        {"messages": [{"role": "user", "content": "Hi"}], "custom_id": "c"},
        {"text": "no prompt in it"},
        [4, 5, 6],
        "just text",
    ]
    source.write_text("\n".join(json.dumps(row) for row in given) + "\n\n")
    args = ["generate", "--model", str(tiny("llama")), *SMALL]
    code = cli.main([*args, "--input", str(source), "--output", str(target)])
    assert code == 1  # one row has an error
    assert "1 rows have an error" in capsys.readouterr().err
    rows = sorted(rows_of(target.read_text()), key=lambda row: int(str(row["index"])))
    assert [row["key"] for row in rows] == ["a", 7, "c", None, None, None]
    assert ["error" in row for row in rows] == [False, False, False, True, False, False]


def test_text_file_and_standard_input(
    tiny: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.txt").write_text("The fox\n\nThe dog\nThe cat\n")
    args = ["generate", "--model", str(tiny("llama")), *SMALL, "--json", "--limit", "2"]
    assert cli.main([*args, "--input", str(tmp_path / "in.txt")]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["prompt"] for row in rows] == ["The fox", "The dog"]
    monkeypatch.setattr("sys.stdin", io.StringIO("The fox\n"))
    assert cli.main([*args, "--input", "-"]) == 0
    assert rows_of(capsys.readouterr().out)[0]["outputs"] == rows[0]["outputs"]


def test_dataset(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "--model", str(tiny("llama")), *SMALL, "--dataset", "gsm8k", "--limit", "2"]
    assert cli.main([*args, "--json"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [(row["key"], row["gold"]) for row in rows] == [("gsm8k-0", "18"), ("gsm8k-1", "3")]
    # A model with a chat template is asked through it.
    assert str(rows[0]["prompt"]).startswith("<|bos|><|user|>Janet")
    assert cli.main([*args, "--no-chat"]) == 0
    assert "right answer: 18" in capsys.readouterr().out


def test_chat(
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = ["chat", "--model", str(tiny("llama")), *SMALL]
    assert cli.main([*args, "--json", "Hi", "there"]) == 0
    row = rows_of(capsys.readouterr().out)[0]
    assert row["prompt"] == "<|bos|><|user|>Hi there<|eos|><|assistant|>"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi there\nMore\n/new\nHi there\n/quit\nnever\n"))
    assert cli.main([*args, "--json"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == 3
    assert rows[0]["outputs"] == rows[2]["outputs"] == row["outputs"]
    assert str(rows[1]["prompt"]).startswith(str(row["prompt"]))


def test_inspect(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny("llama"))
    assert cli.main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM" in text and "chat template  yes" in text
    assert cli.main(["inspect", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["arch"] == "LlamaForCausalLM" and found["problem"] is None
    assert found["n_bytes"] == sum(entry["bytes"] for entry in found["formats"].values())
    assert "<table>" in qkv.inspect(path)._repr_html_()


def test_inspect_what_cannot_run(fixtures_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(fixtures_dir / "base-glm4-tiny")]) == 0
    assert "Glm4ForCausalLM" in capsys.readouterr().out


def test_inspect_without_a_codec(tmp_path: Path) -> None:
    kind, codec = {r"attn_k\.": "Q8_K"}, make_tiny.ZeroBlocks()
    make_tiny.write_gguf(tmp_path / "m.gguf", "llama", types=kind, codec=codec, hidden_size=256)
    assert qkv.inspect(tmp_path / "m.gguf").problem == "no codec for Q8_K"


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert "scalar" in text and "bf16" in text and "Q4_K" in text
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["instruction_sets"]["scalar"] is True and facts["threads"] >= 1


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["generate", "--model", "/nowhere", "x"], 1, "/nowhere"),
        (["generate", "--model", "TINY", "--top-p", "7", "x"], 2, "top_p=7.0"),
        (["generate", "--model", "TINY"], 2, "--input"),
        (["generate", "--model", "TINY", "x", "--dataset", "gsm8k"], 2, "one of them"),
        (["generate", "--model", "TINY", "--input", "/nowhere.txt"], 2, "/nowhere.txt"),
        (["generate", "--model", "TINY", "--kv-cache-dtype", "fp7", "x"], 2, "fp7"),
        (["generate", "--model", "TINY", "--kv-cache-dtype", "{", "x"], 2, "JSON"),
        (["generate", "--model", "TINY", "--limit", "0", "x"], 2, "--limit"),
        (["inspect", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_errors_are_one_line(
    args: list[str],
    code: int,
    words: str,
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QKV_DEBUG", raising=False)
    args = [str(tiny("llama")) if arg == "TINY" else arg for arg in args]
    assert cli.main(args) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("qkv: ") and captured.err.count("\n") == 1
    assert words in captured.err


def test_broken_jsonl_is_the_error_of_its_line(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows around it are answered; a mark of the byte order and CRLF are no part of a row."""
    lines = ['{"prompt": "a"}', '{"prompt": ', "[" * 100_000, '{"prompt": "b"}']
    (tmp_path / "in.jsonl").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    args = ["generate", "--model", str(tiny("llama")), *SMALL, "--json"]
    assert cli.main([*args, "--input", str(tmp_path / "in.jsonl")]) == 1
    captured = capsys.readouterr()
    rows = rows_of(captured.out)
    assert [row["prompt"] for row in rows] == ["a", None, None, "b"]
    assert "2 rows have an error" in captured.err
    for row, number in ((rows[1], 2), (rows[2], 3)):
        assert f"in.jsonl, line {number}: not valid JSON" in str(row["error"])


def test_byte_order_mark_of_text(
    tiny: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.txt").write_bytes("The fox\r\nThe dog\r\n".encode("utf-8-sig"))
    args = ["generate", "--model", str(tiny("llama")), *SMALL, "--json", "--input"]
    assert cli.main([*args, str(tmp_path / "in.txt")]) == 0
    assert [row["prompt"] for row in rows_of(capsys.readouterr().out)] == ["The fox", "The dog"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffThe fox\n"))
    assert cli.main([*args, "-"]) == 0
    assert [row["prompt"] for row in rows_of(capsys.readouterr().out)] == ["The fox"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.txt", None])
def test_what_no_encoding_holds_is_escaped(
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    encoding: str,
) -> None:
    """Half a surrogate pair is its row's error, and that row is written like the others."""
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "\\ud83d"}\n{"prompt": "\u00e9\U0001f600", "key": "\\udcff"}\n',
        encoding="utf-8",
    )
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
    args = ["generate", "--model", str(tiny("llama")), *SMALL]
    args += ["--json"] if name is None else ["--output", str(tmp_path / name)]
    assert cli.main([*args, "--input", str(tmp_path / "in.jsonl")]) == 1
    if name is None:
        sys.stdout.flush()
        text = raw.getvalue().decode(encoding)
    else:
        text = (tmp_path / name).read_text(encoding="utf-8")
    if name == "out.txt":
        assert "\\ud83d\n[error]" in text and "(\\udcff)\n\u00e9\U0001f600\n>>> " in text
        return
    rows = sorted(rows_of(text), key=lambda row: int(str(row["index"])))
    assert [row["prompt"] for row in rows] == ["\ud83d", "\u00e9\U0001f600"]
    assert rows[1]["key"] == "\udcff"
    assert "U+D83D" in str(rows[0]["error"]) and "error" not in rows[1]


def test_input_and_output_are_one_file(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Opening the output would empty the input before it is read."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    (tmp_path / "link.jsonl").symlink_to(source)
    args = ["generate", "--model", str(tiny("llama")), *SMALL, "--input", str(source)]
    for target in (source, tmp_path / "link.jsonl"):
        assert cli.main([*args, "--output", str(target)]) == 2
        assert "the same file as --input" in capsys.readouterr().err
    assert source.read_text() == '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("stream", "verb", "words"),
    [
        ("stdin", ["generate", "--input", "-"], "standard input is closed"),
        ("stdin", ["chat"], "standard input is closed"),
        ("stdout", ["generate", "a"], "standard output is closed"),
        ("stdout", ["chat", "a"], "standard output is closed"),
    ],
)
def test_closed_streams(
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stream: str,
    verb: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(f"sys.{stream}", None)
    assert cli.main([*verb, "--model", str(tiny("llama")), *SMALL]) == 2
    assert words in capsys.readouterr().err


def test_a_message_without_an_answer_does_not_end_the_chat(
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "word " * 3000
    monkeypatch.setattr("sys.stdin", io.StringIO(f"Hello\n{long}\nHello again\n"))
    assert cli.main(["chat", "--model", str(tiny("llama")), *SMALL, "--json"]) == 1
    captured = capsys.readouterr()
    rows = rows_of(captured.out)
    assert [list(row) == ["error"] for row in rows] == [False, True, False]
    assert "max_model_len is 1024" in captured.err
    assert long not in str(rows[2]["prompt"]) and "Hello again" in str(rows[2]["prompt"])


@pytest.mark.parametrize("verb", ["generate", "chat", "inspect", "info", "demo-model"])
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"  qkv {verb}" in text and "--json" in text


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["gnerate"])
    assert caught.value.code == 2
    assert "generate" in capsys.readouterr().err


def test_log_of_the_loading(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    args = ["generate", "--model", str(tiny("llama")), *SMALL, "--log-level", "info"]
    args += ["--kv-cache-dtype", "bf16,fp8_e5m2", "--query-dtype", "fp8_e4m3", "The fox"]
    with caplog.at_level("INFO", "qkv"):
        assert cli.main(args) == 0
    text = caplog.text
    assert "LlamaForCausalLM" in text and "mem usage" in text and "K size" in text
    assert "lane fp8_e5m2" in text and "scale 1.0" in text
