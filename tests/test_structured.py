"""Outputs of a given form: whatever a random model says has it, the same in any batch, and a form
that cannot be is its row's error alone."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import SamplingParams

pytest.importorskip("llguidance", reason="llguidance (extra `structured`) is not installed")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
PROMPT = "the cat"


def params(kind: str, value: Any, **others: Any) -> SamplingParams:
    return SamplingParams(structured_outputs={kind: value}, **{"max_tokens": 200, **others})


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path]) -> Iterator[qkv.Engine]:
    with qkv.Engine(tiny("llama"), kv_tokens=4096, threads=1) as opened:
        yield opened


def answer(engine: qkv.Engine, given: SamplingParams) -> qkv.RequestOutput:
    (output,) = engine.generate([PROMPT], given, progress=False)
    assert output.error is None, output.error
    return output


LARGE = 10**400


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        ({"type": "integer", "minimum": 1e308}, "minimum is 1e.308"),
        (
            {"type": "integer", "minimum": 1e19, "maximum": 1e20},
            "maximum is 1e.20|minimum is 1e.19",
        ),
        ({"type": "integer", "exclusiveMaximum": -LARGE}, "exclusiveMaximum is -10+"),
        ({"properties": {"enum": {"anyOf": [{"minimum": 2**63}]}}}, f"minimum is {2**63}"),
    ],
)
def test_bounds_beyond_64_bits(schema: dict[str, Any], key: str) -> None:
    """llguidance cut them to 64 bits and then allowed a number below the minimum."""
    with pytest.raises(ValueError, match=f"({key}): bounds must be within 64 bits"):
        params("json", schema)


def test_data_and_names_are_no_bounds(engine: qkv.Engine) -> None:
    schema = {"type": "object", "properties": {"minimum": {"const": 7}}, "required": ["minimum"]}
    schema["default"] = {"minimum": 1e300}
    assert json.loads(answer(engine, params("json", schema)).text)["minimum"] == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_schema(engine: qkv.Engine, temperature: float) -> None:
    for seed in range(4):
        output = answer(engine, params("json", SCHEMA, temperature=temperature, seed=seed))
        found = json.loads(output.text)
        assert output.finish_reason == "stop" and output.token_ids[-1] in engine._eos_ids
        assert list(found) == ["name", "age", "ok"] and found["name"] in ("Ada", "Grace")
        assert isinstance(found["age"], int) and 0 <= found["age"] <= 99
        assert isinstance(found["ok"], bool)


def test_other_kinds(engine: qkv.Engine) -> None:
    for seed in range(4):
        text = answer(engine, params("regex", r"[a-c]{3}-[0-9]+x", temperature=2.0, seed=seed)).text
        assert re.fullmatch(r"[a-c]{3}-[0-9]+x", text)
        choices = ["yes", 'say "no"', "perhaps\nnot", "naïve | start"]
        assert answer(engine, params("choice", choices, temperature=9.0, seed=seed)).text in choices
        grammar = 'start: "(" (start | "x")* ")"'
        cut = answer(engine, params("grammar", grammar, temperature=1.0, seed=seed, max_tokens=40))
        if cut.finish_reason == "stop":
            assert re.sub(r"\(x*\)", "x", cut.text) != cut.text
        assert set(cut.text) <= set("(x)")
    found = answer(engine, params("json_object", True, temperature=0.5, seed=1, max_tokens=400))
    assert found.text.startswith("{")
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.text), dict)


def test_the_choice_is_the_likelier_one(engine: qkv.Engine) -> None:
    """Greedy among the allowed: of two tokens the one with the larger log-probability."""
    a, b = (engine.tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b"))
    assert len(a) == len(b) == 1
    (free,) = engine.generate(
        [PROMPT], SamplingParams(max_tokens=1, temperature=0.0, logprobs=256), progress=False
    )
    top = dict(
        zip(free.outputs[0].top_ids[0].tolist(), free.outputs[0].top_logprobs[0], strict=True)
    )
    found = answer(engine, params("choice", ["a", "b"], temperature=0.0))
    first = int(found.token_ids[0])
    assert found.text == ("a" if first == a[0] else "b")
    if a[0] in top and b[0] in top:
        assert first == max((a[0], b[0]), key=lambda token: top[token])
    # What is reported is the model's own log-probability.
    if first in top:
        assert found.logprobs[0] == np.float32(top[first])


@pytest.mark.slow
def test_same_in_any_batch(tiny: Callable[..., Path]) -> None:
    """Next to free rows, with retractions, several samples, other chunks."""
    rows: list[Any] = []
    for index in range(24):
        given = (
            params("json", SCHEMA, n=2, max_tokens=80)
            if index % 4 == 0
            else SamplingParams(max_tokens=80 + index, ignore_eos=True)
        )
        rows.append({"prompt": f"{PROMPT} {index % 5}", "key": index, "params": given})
    with qkv.Engine(tiny("llama"), kv_tokens=4096, threads=1) as engine:
        alone = [engine.generate([row], progress=False)[0] for row in rows]
    n_retractions = 0
    for kv_tokens in (128, 160, 208):
        with qkv.Engine(
            tiny("llama"), kv_tokens=kv_tokens, threads=2, chunk_tokens=16, prefix_cache=False
        ) as engine:
            together = engine.generate(rows[::-1], progress=False)[::-1]
        for one, other in zip(alone, together, strict=True):
            assert one.error is None and other.error is None
            n_retractions += other.metrics.retractions
            for x, y in zip(one.outputs, other.outputs, strict=True):
                assert x.text == y.text and x.finish_reason == y.finish_reason
                np.testing.assert_array_equal(x.token_ids, y.token_ids)
                np.testing.assert_array_equal(x.logprobs, y.logprobs)
    assert n_retractions > 0


def test_lanes_have_a_guide_each(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(
        tiny("llama"), kv_tokens=1024, threads=1, kv_cache_dtype=["bf16", "fp4_mx_block16"]
    ) as engine:
        (output,) = engine.generate([PROMPT], params("json", SCHEMA), progress=False)
    for lane in output.lanes.values():
        assert json.loads(lane.text)["name"] in ("Ada", "Grace")


BAD_FORMS = [
    ("json", {"type": "nonsense"}, "json"),
    ("json", {"$ref": "#/nowhere"}, "json"),
    ("regex", "a(b", "regex"),
    ("grammar", "start: missing", "grammar"),
    ("grammar", "begin: 'x'", "grammar"),
]


@pytest.mark.parametrize(("kind", "value", "words"), BAD_FORMS)
def test_a_bad_form_is_its_rows_error(
    engine: qkv.Engine, kind: str, value: Any, words: str
) -> None:
    free = SamplingParams(max_tokens=4)
    outputs = engine.generate(
        [PROMPT, PROMPT, PROMPT], [free, params(kind, value), free], progress=False
    )
    assert outputs[1].error is not None and f"structured_outputs['{words}']" in outputs[1].error
    assert outputs[0].error is None and outputs[0].text == outputs[2].text


def test_nothing_left_to_say(engine: qkv.Engine) -> None:
    """The form asks for a token that logit_bias forbids."""
    (a,) = engine.tokenizer.encode("a", add_special_tokens=False)
    given = params("choice", ["a"], logit_bias={a: -np.inf})
    output, other = engine.generate([PROMPT, PROMPT], [given, SamplingParams()], progress=False)
    assert output.error is not None and "structured output" in output.error
    assert other.error is None


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ValueError, "nothing"),
        ({"json": None}, ValueError, "nothing"),
        ({"json": {}, "regex": "a"}, ValueError, "one of json"),
        ({"xml": "a"}, ValueError, "'xml'"),
        ("json", TypeError, "a mapping"),
        ({"json": 3}, TypeError, "a schema"),
        ({"json": "{"}, ValueError, "no JSON"),
        ({"json": {"const": float("nan")}}, ValueError, "cannot be written"),
        ({"json": {"const": {1, 2}}}, ValueError, "cannot be written"),
        ({"json_object": 1}, TypeError, "True"),
        ({"regex": b"a"}, TypeError, "text"),
        ({"regex": ""}, ValueError, "empty"),
        ({"choice": "yes"}, TypeError, "a list of texts"),
        ({"choice": []}, ValueError, "empty"),
        ({"choice": ["a", 1]}, TypeError, "not text"),
        ({"choice": ["a", ""]}, ValueError, "empty choice"),
        ({"grammar": "x" * (2 << 20)}, ValueError, "at most 1048576"),
    ],
)
def test_bad_arguments(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        SamplingParams(structured_outputs=given)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_what_would_go_on_after_the_end(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ends where its form does"):
        params("regex", "a", **other)


def test_without_llguidance(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with qkv.Engine(tiny("llama"), kv_tokens=256, threads=1) as engine:
        outputs = engine.generate(
            [PROMPT, PROMPT], [params("regex", "a"), SamplingParams(max_tokens=2)], progress=False
        )
    assert outputs[0].error is not None and "pip install 'qkv[structured]'" in outputs[0].error
    assert outputs[1].error is None


def test_many_choices(engine: qkv.Engine) -> None:
    """More than a grammar may have alternatives; some twice, some the beginning of others."""
    choices = [f"c{i}" for i in range(5000)] * 2 + ["c", "c12345", "😀", "\x00\u2028\\"]
    seen = set()
    for seed in range(12):
        found = answer(engine, params("choice", choices, temperature=5.0, seed=seed))
        assert found.text in choices and found.finish_reason == "stop"
        seen.add(found.text)
    assert len(seen) > 4


@pytest.mark.slow
def test_a_lexer_that_others_used_up(engine: qkv.Engine) -> None:
    """Sequences of a form share the bounds of its lexer: none is to feel the others."""
    spec = {"regex": "(a{1000}){1000}"}  # the first step of one takes all that there is
    grammar = engine._guides.grammar(spec)
    first, second = grammar.guide(), grammar.guide()
    wanted, found = first.mask(), second.mask()
    assert first.error is None and second.error is None
    assert wanted.any() and np.array_equal(wanted, found)


def test_reasons(engine: qkv.Engine) -> None:
    for kind, value, words in (
        ("json", {"$ref": "#"}, "structured output: nothing satisfies it"),
        ("grammar", "start: start", "structured output: nothing satisfies it"),
        ("json", {"type": "bogus"}, "structured_outputs['json']: Invalid type: bogus"),
    ):
        for _ in range(2):  # what does not compile is known the second time
            (output,) = engine.generate([PROMPT], params(kind, value), progress=False)
            assert output.error == words
    refused: tuple[tuple[str, Any, str], ...] = (
        ("json", False, "nothing satisfies this schema"),
        ("choice", ["a", "\ud800"], "lone surrogate U\\+D800"),
        ("regex", "\ud800", "lone surrogate U\\+D800"),
    )
    for kind, given, words in refused:
        with pytest.raises(ValueError, match=words):
            params(kind, given)
    assert answer(engine, params("json", True, max_tokens=5)).text


def test_a_form_of_which_nothing_is_left(engine: qkv.Engine) -> None:
    given = params("regex", "[ab]c", temperature=1.0)
    barred = engine.tokenizer.encode("c", add_special_tokens=False)
    for more in ({"bad_words": [barred]}, {"logit_bias": {barred[0]: float("-inf")}}):
        (output,) = engine.generate([PROMPT], given.with_(**more), progress=False)
        assert output.error == (
            "structured output: logit_bias and bad_words forbid every token that may come next"
        )


def test_rows_pass_a_form_that_compiles(
    engine: qkv.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large form takes seconds, and all rows waited for it."""
    others_done = threading.Event()
    compile_now = engine._guides._compile

    def held(structured: Mapping[str, Any]) -> Any:
        if structured == {"regex": "the large one"}:
            others_done.wait(60.0)
        return compile_now(structured)

    monkeypatch.setattr(engine._guides, "_compile", held)
    large, small = params("regex", "the large one"), params("regex", "a small one")
    free = SamplingParams(max_tokens=4)
    given = [large, free, small, large, free]
    order = []
    for output in engine.stream([PROMPT] * len(given), given, progress=False):
        order.append(output.index)
        if len(order) == 3:
            others_done.set()
        assert output.error is None
    assert set(order[:3]) == {1, 2, 4} and set(order[3:]) == {0, 3}
    # Left in the middle, nothing stays behind.
    others_done.clear()
    engine._guides._grammars.clear()
    stream = engine.stream([PROMPT] * len(given), given, progress=False)
    assert next(stream).error is None
    del stream
    others_done.set()
    assert answer(engine, large).text == "the large one"


def test_a_form_that_is_too_large(engine: qkv.Engine) -> None:
    """It took 13 seconds to compile."""
    names = [f"field_{number}" for number in range(10_000)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    (output,) = engine.generate([PROMPT], params("json", schema), progress=False)
    assert output.error is not None
    assert output.error.startswith("structured_outputs['json']: grammar size")
    assert "20000" in output.error


def test_a_form_that_refers_deeply(engine: qkv.Engine) -> None:
    """It overflowed the stack of the thread that compiles, which was the end of the process."""
    names = [f"a{i}" for i in range(9_000)]
    rules = {
        name: {"anyOf": [{"properties": {"x": {"$ref": f"#/$defs/{after}"}}}, {"type": "null"}]}
        for name, after in zip(names, [*names[1:], names[0]], strict=True)
    }
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(50_000))
    given = [
        params("json", {"$ref": "#/$defs/a0", "$defs": rules}),
        params("grammar", f'start: r0\n{chain}\nr50000: "a"'),
    ]
    schema, grammar = engine.generate([PROMPT] * 2, given, progress=False)
    assert schema.error is not None and schema.error.startswith("structured_outputs['json']: ")
    assert grammar.text == "a"
