"""The ready-made hooks: how texts are judged, and references scored, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import Completion, RequestOutput, SamplingParams, hooks, tasks
from qkv.comparison.compare import compare
from qkv.run import Hook

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = {"threads": 1, "kv_tokens": 4096, "max_running": 4}


def output(text: str, index: int = 0, key: str | int | None = None) -> RequestOutput:
    return RequestOutput(index=index, key=key, outputs=[Completion(text=text)])


def scores(hook: Hook, text: str, **more: Any) -> Any:
    return hook(output(text, **more))


# References.


def test_by_key_or_by_place() -> None:
    by_key = hooks.exact_match({"a": "x", 7: "y"})
    assert scores(by_key, "x", index=5, key="a") == {"exact_match": True}
    assert scores(by_key, "x", key=7) == {"exact_match": False}
    for key in ("b", "7", None):
        with pytest.raises(ValueError, match=f"no reference for the key {key!r}"):
            scores(by_key, "x", key=key)
    by_place = hooks.exact_match(["x", "y"])
    assert scores(by_place, "y", index=1, key="a") == {"exact_match": True}
    with pytest.raises(ValueError, match="no reference for the index 2"):
        scores(by_place, "y", index=2)
    for bad in ("xy", 5, {"x", "y"}):
        with pytest.raises(TypeError, match="a mapping by key or a list is needed"):
            hooks.exact_match(bad)  # type: ignore[arg-type]


def test_bad_references_are_named_before_a_run() -> None:
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: hooks.numeric({"a": 1, "b": "two"}), r"references\['b'\]='two': there is no num"),
        (lambda: hooks.numeric([True]), r"references\[0\]=True: there is no number"),
        (lambda: hooks.choice(["A", "E"]), r"references\[1\]='E': it is not one of ABCD"),
        (lambda: hooks.choice(["AB"]), r"references\[0\]='AB': it is not one"),
        (lambda: hooks.choice([4]), r"references\[0\]=4: there are 4 letters"),
        (lambda: hooks.choice([None]), r"references\[0\]=None"),  # type: ignore[list-item]
        (lambda: hooks.choice(["A"], letters="ABA"), "letters 'ABA': different letters"),
        (lambda: hooks.exact_match([5]), r"references\[0\]=5"),  # type: ignore[list-item]
        (lambda: hooks.reference_logprob([""]), r"references\[0\]='': it is empty"),
        (lambda: hooks.reference_logprob([5]), r"references\[0\]=5"),  # type: ignore[list-item]
    ]
    for make, message in bad:
        with pytest.raises(ValueError, match=message):
            make()


# Judging a text.


def test_exact_match() -> None:
    assert scores(hooks.exact_match([" Lima "]), "Lima\n") == {"exact_match": True}
    assert scores(hooks.exact_match(["Lima"]), "lima") == {"exact_match": False}
    assert scores(hooks.exact_match(["Lima"], normal=str.lower), "lima") == {"exact_match": True}
    assert scores(hooks.exact_match(["Lima"], normal=str.lower), "lima ") == {"exact_match": False}


@pytest.mark.parametrize(
    ("reference", "text", "number", "right"),
    [
        (18, "She makes $18.", "$18.", True),
        (18, "18.00", "18.00", True),
        (18, "18 or 19", "19", False),
        (18, "no idea...", None, False),
        (18, "1.8.", "1.8.", False),
        (1200, "1,200", "1,200", True),
        ("3 * 400 = 1200\n#### 1,200", "1200", "1200", True),
        ("$0.5", "It is -0.5", "-0.5", False),
        (0.1, "0.10", "0.10", True),
        (np.float64(0.1), "0.1", "0.1", True),
    ],
)
def test_numeric(reference: Any, text: str, number: str | None, right: bool) -> None:
    assert scores(hooks.numeric([reference]), text) == {"numeric": right, "number": number}


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" B\nbecause", "B"),
        ("(B) since A is not", "B"),
        ("B. A robe", "B"),
        ("A robe takes two. The answer is (B).", "B"),
        ("Answer: **B**", "B"),
        ("A is wrong; the correct Answer is B", "B"),
        ("the answer is B and not: the answer is C", "B"),
        ("A robe", None),
        ("the answer is Both", None),
        ("E", None),
        ("b", None),
        ("", None),
    ],
)
def test_choice(text: str, letter: str | None) -> None:
    for reference, right in (("B", letter == "B"), (1, letter == "B"), ("A", False), (0, False)):
        found = scores(hooks.choice([reference]), text)
        assert found == {"choice": right, "letter": letter}
    assert scores(hooks.choice(["J"], letters="ABCDEFGHIJ"), "The answer is J")["choice"]
    assert scores(hooks.choice(["]"], letters="^]-"), "answer: ]")["choice"]


def test_combine() -> None:
    both = hooks.combine(hooks.exact_match(["18"]), hooks.numeric(["18"]), lambda given: None)
    assert scores(both, "It is 18") == {"exact_match": False, "numeric": True, "number": "18"}
    with pytest.raises(ValueError, match="two hooks give the score 'numeric'"):
        scores(hooks.combine(hooks.numeric([1]), hooks.numeric([2])), "1")
    with pytest.raises(TypeError, match="combine: 'print' is not a hook"):
        hooks.combine(both, "print")  # type: ignore[arg-type]
    assert not hasattr(both, "finish")


def test_combine_keeps_what_the_others_found() -> None:
    def broken(given: RequestOutput) -> dict[str, Any]:
        raise RuntimeError("no")

    found = scores(hooks.combine(broken, hooks.numeric([18]), hooks.choice({})), "18")
    assert found.pop("error") == "RuntimeError: no; ValueError: no reference for the key None"
    assert found == {"numeric": True, "number": "18"}


def test_per_lane() -> None:
    given = output("18", key="q")
    given.lanes = {"bf16": output("18", key="q"), "fp8": output("19", key="q")}
    hook = hooks.combine(
        hooks.per_lane(hooks.numeric({"q": 18})), hooks.per_lane(hooks.exact_match({"q": "18"}))
    )
    expected = {
        "bf16": {"numeric": True, "number": "18", "exact_match": True},
        "fp8": {"numeric": False, "number": "19", "exact_match": False},
    }
    assert hook(given) == {"lanes": expected}
    assert {name: lane.scores for name, lane in given.lanes.items()} == expected
    assert scores(hooks.per_lane(hooks.numeric([18])), "18") == {"numeric": True, "number": "18"}

    def odd(lane: RequestOutput) -> dict[str, Any]:
        return {"left": 1 / (19 - int(lane.text))}

    found: Any = hooks.per_lane(odd)(given)
    assert found["lanes"]["bf16"] == {"left": 1.0}
    assert found["lanes"]["fp8"]["error"].startswith("ZeroDivisionError")
    for deferred in (hooks.reference_logprob([]), hooks.combine(hooks.reference_logprob([]))):
        with pytest.raises(TypeError, match="sees to the lanes itself"):
            hooks.per_lane(deferred)


# With an engine.


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[qkv.Engine]:
    with qkv.Engine(model, **SMALL) as one:
        yield one


@pytest.fixture(scope="module")
def laned(model: Path) -> Iterator[qkv.Engine]:
    with qkv.Engine(model, kv_cache_dtype=["bf16", "nvfp4"], **SMALL) as one:
        yield one


PROMPTS = [
    "The quick brown fox", "jumps over", "the lazy dog and ", "then", "it sleeps", "on and on",
]  # fmt: skip
REFERENCES = [" jumped", " the", "more words", " it", " for a while", " again"]


def expected(engine: qkv.Engine, prompts: Any, references: Any) -> list[dict[str, Any]]:
    found = engine.score(prompts, references, progress=False)
    assert all(score.error is None for score in found)
    return [
        {
            "reference_logprob": score.total,
            "reference_tokens": len(score.token_logprobs),
            "reference_greedy": score.greedy,
        }
        for score in found
    ]


def test_reference_logprob(engine: qkv.Engine) -> None:
    """What score() gives for the pair of texts, and the outputs of a run without the hook."""
    plain = engine.generate(PROMPTS, GREEDY, progress=False)
    hook = hooks.reference_logprob(REFERENCES)
    outputs = engine.generate(PROMPTS, GREEDY, on_finish=hook, progress=False)
    assert [one.scores for one in outputs] == expected(engine, PROMPTS, REFERENCES)
    for one, other in zip(plain, outputs, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.logprobs, other.logprobs)
    assert not engine._seqs
    hook.finish(engine)  # nothing is left to score
    assert [one.scores for one in outputs] == expected(engine, PROMPTS, REFERENCES)


def test_greedy_reference(engine: qkv.Engine) -> None:
    """What the model itself writes has the log-probability with which it wrote it."""
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    written = engine.generate(ids, GREEDY, progress=False)
    hook = hooks.reference_logprob([one.token_ids for one in written])
    for one in engine.generate(ids, GREEDY, on_finish=hook, progress=False):
        assert one.scores["reference_greedy"] and one.scores["reference_tokens"] == 6
        assert one.scores["reference_logprob"] == float(one.logprobs.sum(dtype=np.float64))


class WithBos:
    """A tokenizer of letters that puts 1 before a text, unless told not to."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [10 + ord(letter) % 80 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(index) for index in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return f"<{messages[0]['content']}>"


def test_reference_after_a_conversation(model: Path) -> None:
    """A template's text has its special tokens: another BOS would be one too many."""
    tokenizer = WithBos()
    talk = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    hook = hooks.reference_logprob(REFERENCES)
    with qkv.Engine(model, tokenizer=tokenizer, **SMALL) as own:
        outputs = own.chat(talk, GREEDY, on_finish=hook, progress=False)
        ids = [tokenizer.encode(f"<{prompt}>", False) for prompt in PROMPTS]
        tails = [tokenizer.encode(reference, False) for reference in REFERENCES]
        assert [one.scores for one in outputs] == expected(own, ids, tails)


def test_stream_is_filled_in_at_its_end(engine: qkv.Engine) -> None:
    keys = [f"q{place}" for place in range(len(PROMPTS))]
    rows = [{"key": key, "prompt": text} for key, text in zip(keys, PROMPTS, strict=True)]
    hook = hooks.reference_logprob(dict(zip(keys, REFERENCES, strict=True)))
    kept = []
    for one in engine.stream(rows, GREEDY, on_finish=hook):
        assert one.scores == {}
        kept.append(one)
        if len(kept) == 2:  # in the middle of the run
            hook.finish(engine)
            assert all("reference_logprob" in entry.scores for entry in kept)
    kept.sort(key=lambda one: one.index)
    assert [one.scores for one in kept] == expected(engine, PROMPTS, REFERENCES)


def test_rows_that_cannot_be_scored(engine: qkv.Engine) -> None:
    """Of a row with an error, without a reference, with a bad one: the others are not touched."""
    rows: list[Any] = [
        {"key": "a", "prompt": "The fox"},
        {"key": "b", "prompt_token_ids": []},
        {"key": "c", "prompt": "The fox"},
        {"key": "d", "prompt": "The fox"},
    ]
    hook = hooks.reference_logprob({"a": " jumps", "b": " x", "d": [1, -1]})
    outputs = engine.generate(rows, GREEDY, on_finish=hook, progress=False)
    assert [outputs[0].scores] == expected(engine, ["The fox"], [" jumps"])
    assert outputs[1].error is not None and outputs[1].scores == {}
    assert outputs[2].scores == {"error": "ValueError: no reference for the key 'c'"}
    assert "token id -1" in outputs[3].scores["error"] and len(outputs[3].scores) == 1


def test_interrupt_while_references_are_scored(
    engine: qkv.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every output is kept, and scored when the hook is asked again."""
    hook = hooks.reference_logprob(REFERENCES)
    scorer = engine.score

    def interrupted(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(engine, "score", scorer)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "score", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(PROMPTS, GREEDY, on_finish=hook, progress=False)
    kept = engine.interrupted
    assert caught.value.outputs is kept and len(kept) == len(PROMPTS)  # type: ignore[attr-defined]
    hook.finish(engine)
    assert [one.scores for one in kept] == expected(engine, PROMPTS, REFERENCES)


def test_lanes(laned: qkv.Engine) -> None:
    hook = hooks.combine(
        hooks.per_lane(lambda one: {"first": int(one.token_ids[0])}),
        hooks.reference_logprob(REFERENCES),
    )
    outputs = laned.generate(PROMPTS, GREEDY, on_finish=hook, progress=False)
    found = laned.score(PROMPTS, REFERENCES, progress=False)
    for one, score in zip(outputs, found, strict=True):
        assert one.scores["reference_logprob"] == score.total
        for name, lane in one.lanes.items():
            assert one.scores["lanes"][name] == lane.scores
            assert lane.scores["first"] == lane.token_ids[0]
            assert lane.scores["reference_logprob"] == score.lanes[name].total
        assert one.lanes["bf16"].scores["reference_logprob"] == score.total
    assert any(
        one.lanes["bf16"].scores["reference_logprob"]
        != one.lanes["nvfp4"].scores["reference_logprob"]
        for one in outputs
    )


def test_engine_calls_hooks(engine: qkv.Engine) -> None:
    """A list of references goes by the row's place, whatever the order in which rows finish."""
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (6, 1, 4)]
    outputs = engine.generate(PROMPTS[:3], params, progress=False)
    gold = [one.text for one in outputs]
    again = engine.generate(PROMPTS[:3], params, on_finish=hooks.exact_match(gold), progress=False)
    assert [one.scores for one in again] == [{"exact_match": True}] * 3
    moved: Mapping[Any, str] = {place: gold[place - 1] for place in range(3)}
    again = engine.generate(
        [{"key": place, "prompt": text} for place, text in enumerate(PROMPTS[:3])],
        params, on_finish=hooks.exact_match(moved), progress=False,
    )  # fmt: skip
    assert [one.scores["exact_match"] for one in again] == [False] * 3


def test_compare_stores_what_hooks_found(model: Path) -> None:
    """Those that come after the last row, too; keys name the rows, which run in parts."""
    rows = [
        {"prompt": text, "answer": gold} for text, gold in zip(PROMPTS, REFERENCES, strict=True)
    ]
    task = tasks.custom(rows * 4, name="mine", max_tokens=3)
    gold = {question.key: question.gold for question in task.questions}
    hook = hooks.combine(hooks.per_lane(hooks.exact_match(gold)), hooks.reference_logprob(gold))
    records = compare(
        model, ("bf16", "nvfp4"), tasks=(task,), on_finish=hook, control=False, rerun_items=0,
        progress=False, **SMALL,
    ).rows("mine")  # fmt: skip
    found = [record for record in records if record["kind"] == "answer"]
    assert len(found) == 24 > 4 * SMALL["max_running"]
    for name in ("bf16", "nvfp4"):
        with qkv.Engine(model, kv_cache_dtype=name, **SMALL) as alone:
            ids = [alone.tokenizer.encode(prompt) for prompt in PROMPTS]
            single = expected(alone, ids, REFERENCES)
        for row in found:
            stored = row["scores"]["lanes"][name]
            assert stored.pop("exact_match") is False
            assert stored == single[row["place"] % len(PROMPTS)]
