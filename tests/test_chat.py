"""Chat templates: rendered as transformers renders them, in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import chat_template
from qkv.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return chat_template.render(source, messages, {"bos_token": "<s>"}, **options)


def test_blocks_are_trimmed() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "Hi\n"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_helpers_and_extensions() -> None:
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render(
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{i}}{% endfor %}"
    ) == ("01")
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}") == "<s>"


def test_template_can_refuse() -> None:
    with pytest.raises(qkv.Error, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_sandbox() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ bos_token.__init__.__globals__ }}",
    ):
        with pytest.raises(qkv.Error, match="chat template"):
            render(source)


def test_broken_template() -> None:
    with pytest.raises(qkv.Error, match="chat template"):
        render("{% if %}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 2.0 ** 100000 }}", "OverflowError"),
        ("{% for i in range(10 ** 9) %}a{% endfor %}", "Range too big"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
        ("{{ '%c' | format(-1) }}", "OverflowError"),
        # A few characters that would take all memory.
        ("{{ 'a' * 10 ** 10 }}", "10000000000 elements"),
        ("{{ 10 ** 10 * 'a' }}", "10000000000 elements"),
        ("{{ messages * 9999999 }}", "9999999 elements"),
        ("{{ 10 ** 100000000 }}", "400000000 elements"),
        ("{{ lipsum(n=10 ** 8) }}", "lipsum"),
    ],
)
def test_a_template_that_fails_is_an_error_of_ours(source: str, words: str) -> None:
    with pytest.raises(qkv.Error, match=words):
        render(source)


def test_templates_may_calculate() -> None:
    text = render("{{ 2 ** 10 * 3 }} {{ '-' * 5 }} {{ 2 ** -1 }} {{ 1.5 * 2 }}")
    assert text == "3072 ----- 0.5 3.0"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("Hi", "list of"),
        ([{"content": "Hi"}], "message 0 has no 'role'"),
        ([{"role": "user", "content": "a"}, "b"], "message 1"),
    ],
)
def test_bad_conversation(messages: Any, words: str) -> None:
    with pytest.raises((qkv.Error, ValueError), match=words):
        render("x", messages)


def test_fixture_template(fixtures_dir: Path) -> None:
    tokenizer = Tokenizer.from_folder(fixtures_dir / "base-llama31-rope-tiny")
    text = tokenizer.apply_chat_template(USER)
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert not tokenizer.apply_chat_template(USER, add_generation_prompt=False).endswith("\n\n")
    # The template wrote BOS itself: encoding adds no second one.
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_id) == 1  # type: ignore[arg-type]


def test_named_templates_and_files(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "base-qwen3-s-tiny/tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    config = (
        '{"chat_template": [{"name": "default", "template": "plain"},'
        '{"name": "tool_use", "template": "{{ tools | length }} tools"}]}'
    )
    (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(USER) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=[{}, {}]) == "2 tools"
    (tmp_path / "chat_template.jinja").write_text("from the file, {{ mood }}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(USER, mood="fine") == "from the file, fine"


def test_no_template(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "base-qwen3-s-tiny/tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(qkv.Error, match="no chat template"):
        tokenizer.apply_chat_template(USER)
    assert tokenizer.apply_chat_template(USER, chat_template="own") == "own"
