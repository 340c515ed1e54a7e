"""qkv.Engine on tiny models: what goes in, what comes out, and whose row an error is."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import SamplingParams, _core, models, options, pools, progress
from qkv.run import derive_seed

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path]) -> Iterator[qkv.Engine]:
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=4096, max_running=8) as one:
        yield one


def generate(engine: qkv.Engine, prompts: Any, params: Any = GREEDY, **more: Any) -> Any:
    return engine.generate(prompts, params, progress=False, **more)


def same(left: qkv.RequestOutput, right: qkv.RequestOutput) -> None:
    for one, other in zip(left.outputs, right.outputs, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.logprobs, other.logprobs)
        assert one.text == other.text


# What a prompt may be.


def test_text_ids_and_arrays_are_the_same_prompt(engine: qkv.Engine) -> None:
    text = "The quick brown fox"
    ids = engine.tokenizer.encode(text)
    forms = [text, ids, np.array(ids), np.array(ids, np.int64), {"prompt": text}]
    forms += [{"prompt_token_ids": ids, "key": "k"}, tuple(ids)]
    outputs = generate(engine, forms)
    assert [output.index for output in outputs] == list(range(len(forms)))
    for output in outputs:
        assert output.error is None
        same(output, outputs[0])
        assert list(output.prompt_token_ids) == ids
    assert outputs[0].prompt == text and outputs[1].prompt is None
    assert [output.key for output in outputs] == [None] * 5 + ["k", None]


def test_one_prompt_alone(engine: qkv.Engine) -> None:
    for prompt in ("The fox", [1, 2, 3], np.array([1, 2, 3])):
        assert len(generate(engine, prompt)) == 1


def test_outputs_are_in_input_order(engine: qkv.Engine) -> None:
    prompts = [[1, 2, 3 + i] for i in range(30)]
    params = [GREEDY.with_(max_tokens=1 + (7 * i) % 13) for i in range(30)]
    outputs = generate(engine, prompts, params)
    assert [output.index for output in outputs] == list(range(30))
    assert [len(output.token_ids) for output in outputs] == [p.max_tokens for p in params]
    assert [output.finish_reason for output in outputs] == ["length"] * 30


def test_arrays_have_their_shapes(engine: qkv.Engine) -> None:
    params = GREEDY.with_(logprobs=3, prompt_logprobs=2, n=2)
    output = generate(engine, [[1, 2, 3, 4]], params)[0]
    assert len(output.outputs) == 2
    for sample in output.outputs:
        assert sample.token_ids.shape == (6,) and sample.token_ids.dtype == np.int32
        assert sample.logprobs.shape == (6,) and sample.logprobs.dtype == np.float32
        assert sample.top_ids.shape == sample.top_logprobs.shape == (6, 3)
        # Greedy: the chosen token is the best one.
        assert np.array_equal(sample.top_ids[:, 0], sample.token_ids)
        assert np.array_equal(sample.top_logprobs[:, 0], sample.logprobs)
    assert output.prompt_logprobs.shape == (3,)
    assert output.prompt_top_ids.shape == (3, 2)
    metrics = output.metrics
    assert (metrics.prompt_tokens, metrics.output_tokens) == (4, 12)
    assert 0 <= metrics.time_to_first_token <= metrics.total_time
    assert "RequestOutput(0" in repr(output) and "<table>" in output._repr_html_()


# Rows that cannot be answered.


def test_bad_rows_spoil_nothing_else(engine: qkv.Engine) -> None:
    good = generate(engine, [[1, 2, 3]])[0]
    vocab = engine.info["config"]["vocab"]
    rows: list[tuple[Any, str]] = [
        ([], "empty"),
        ("abc\ud800", r"U\+D800 at character 3"),
        ([1, vocab, 2], f"token id {vocab} at position 1: the vocabulary has {vocab}"),
        ([-1], "token id -1"),
        ([2**40], str(2**40)),
        (np.array([1.5]), "float64"),
        (np.zeros((2, 2), int), r"\(2, 2\)"),
        ([1] * 100_000, "100000"),
        ({"prompt": [1, 2], "params": {"top_p": 7}}, "top_p"),
        ({"prompt": [1, 2], "params": {"topp": 1}}, "topp"),
        ({"question": "?"}, "prompt"),
        (3.5, "float"),
        (None, "NoneType"),
    ]
    prompts: list[Any] = []
    for row, _ in rows:
        prompts += [[1, 2, 3], row]
    outputs = generate(engine, prompts)
    for place, (_, words) in enumerate(rows):
        same(outputs[2 * place], good)
        bad = outputs[2 * place + 1]
        assert bad.error is not None and bad.outputs == [] and bad.text == ""
        assert re.search(words, bad.error), bad.error
    assert not engine._seqs


def test_row_that_never_fits(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=64) as engine:
        outputs = generate(engine, [[1, 2], list(range(60)), [1, 2]], GREEDY.with_(max_tokens=40))
        assert outputs[0].error is None
        assert outputs[1].error is not None and "64" in outputs[1].error
        same(outputs[0], outputs[2])


def test_wrong_calls_raise_before_anything_runs(engine: qkv.Engine) -> None:
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        generate(engine, ["a"], [GREEDY, GREEDY])
    with pytest.raises(TypeError, match="params"):
        generate(engine, ["a"], {"top_p": 1})
    with pytest.raises(TypeError, match=r"params\[1\]"):
        generate(engine, ["a", "b"], [GREEDY, None])
    with pytest.raises(TypeError, match="prompts"):
        generate(engine, 5)
    with pytest.raises(TypeError, match="on_finish"):
        generate(engine, ["a"], on_finish="print")
    with pytest.raises(ValueError, match="params"):
        generate(engine, iter([[1], [2], [3]]), [GREEDY, GREEDY])


def test_broken_source_of_prompts(engine: qkv.Engine) -> None:
    """The error is the caller's own; the engine is as before."""

    def source() -> Iterator[list[int]]:
        yield [1, 2]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="disk"):
        generate(engine, source())
    assert len(generate(engine, [[1, 2]])) == 1


# Seeds and samples.


def test_seed_is_the_rows_own(engine: qkv.Engine) -> None:
    """The same row gives the same text wherever it stands; a key makes it another row."""
    alone = generate(engine, [[1, 2, 3]], SAMPLED)[0]
    among = generate(engine, [[5, 6], [1, 2, 3], [7]], SAMPLED)[1]
    same(alone, among)
    keyed = generate(engine, [{"prompt": [1, 2, 3], "key": i} for i in range(8)], SAMPLED)
    assert len({tuple(output.token_ids) for output in keyed}) > 4
    seeded = generate(engine, [[1, 2, 3]] * 2, [SAMPLED.with_(seed=1), SAMPLED.with_(seed=2)])
    assert not np.array_equal(seeded[0].token_ids, seeded[1].token_ids)


def test_engine_seed(tiny: Callable[..., Path]) -> None:
    texts = []
    for seed in (None, 0, 1):
        with qkv.Engine(tiny("llama"), threads=1, kv_tokens=512, seed=seed) as engine:
            texts.append(tuple(generate(engine, [[1, 2, 3]], SAMPLED)[0].token_ids))
    assert texts[0] == texts[1] != texts[2]


def test_derived_seed_is_fixed() -> None:
    """Recorded: a run must give the same text next year."""
    ids = np.array([1, 2, 3], np.int32)
    assert derive_seed(0, ids, None) == 4478476896425418294
    seeds = {derive_seed(s, ids, k) for s, k in itertools.product((0, 1), (None, 0, "0", "a"))}
    assert len(seeds) == 8


def test_samples_differ_and_repeat(engine: qkv.Engine) -> None:
    first = generate(engine, [[1, 2, 3]], SAMPLED.with_(n=5))[0]
    again = generate(engine, [[9], [1, 2, 3]], SAMPLED.with_(n=5))[1]
    same(first, again)
    assert len({tuple(sample.token_ids) for sample in first.outputs}) > 2
    greedy = generate(engine, [[1, 2, 3]], GREEDY.with_(n=3))[0]
    assert len({tuple(sample.token_ids) for sample in greedy.outputs}) == 1


# Where it ends.


def test_stop_string(engine: qkv.Engine) -> None:
    params = GREEDY.with_(max_tokens=40)
    whole = generate(engine, ["The quick brown fox"], params)[0]
    assert len(whole.text) > 10
    stop = whole.text[6:9]
    cut = generate(engine, ["The quick brown fox"], params.with_(stop=[stop]))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    # The tokens are those up to the one that completed the stop string.
    n = len(cut.token_ids)
    assert np.array_equal(cut.token_ids, whole.token_ids[:n])
    assert stop in engine.tokenizer.decode_output(whole.token_ids[:n])
    assert stop not in engine.tokenizer.decode_output(whole.token_ids[: n - 1])
    later = generate(engine, ["The quick brown fox"], params.with_(stop=[stop], min_tokens=n))[0]
    assert len(later.token_ids) > n


def test_stop_string_on_the_last_token(engine: qkv.Engine) -> None:
    whole = generate(engine, ["The quick"], GREEDY)[0]
    before = engine.tokenizer.decode_output(whole.token_ids[:-1])
    stop = whole.text[len(before) :]
    assert stop
    if stop not in before:
        cut = generate(engine, ["The quick"], GREEDY.with_(stop=stop))[0]
        assert (cut.finish_reason, cut.text) == ("stop", whole.text[: whole.text.index(stop)])


def test_stop_token(engine: qkv.Engine) -> None:
    whole = generate(engine, [[1, 2, 3]])[0]
    token = int(whole.token_ids[2])
    n = list(whole.token_ids).index(token) + 1
    cut = generate(engine, [[1, 2, 3]], GREEDY.with_(stop_token_ids=[token]))[0]
    assert list(cut.token_ids) == list(whole.token_ids[:n])
    assert (cut.finish_reason, cut.outputs[0].stop_reason) == ("stop", token)
    assert cut.text == engine.tokenizer.decode_output(whole.token_ids[: n - 1])


def test_banned_words_do_not_appear(engine: qkv.Engine) -> None:
    whole = generate(engine, [[1, 2, 3]])[0]
    banned = int(whole.token_ids[0])
    output = generate(engine, [[1, 2, 3]], GREEDY.with_(bad_words=[[banned]]))[0]
    assert banned not in output.token_ids
    biased = generate(engine, [[1, 2, 3]], GREEDY.with_(logit_bias={5: 1e4}))[0]
    assert list(biased.token_ids) == [5] * 6


# Streams, hooks, other threads.


def test_stream_takes_an_endless_input(engine: qkv.Engine) -> None:
    taken = 0

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield [1, 2, taken % 400]

    stream = engine.stream(endless(), GREEDY)
    outputs = list(itertools.islice(stream, 40))
    assert len({output.index for output in outputs}) == 40
    assert taken <= 40 + 4 * 8 + 8
    # Another run between two rows of a stream is fine.
    alone = generate(engine, [[1, 2, 1]])[0]
    first = next(output for output in outputs if output.index == 0)
    same(alone, first)
    assert next(stream).error is None
    stream.close()  # type: ignore[attr-defined]
    assert not engine._seqs


def test_engine_closed_under_a_stream(tiny: Callable[..., Path]) -> None:
    engine = qkv.Engine(tiny("llama"), threads=1, kv_tokens=512)
    stream = engine.stream(([1, 2, i % 100] for i in itertools.count()), GREEDY)
    assert next(stream).error is None
    engine.close()
    with pytest.raises(qkv.Error, match="closed"):
        list(stream)


def test_two_streams_at_once(engine: qkv.Engine) -> None:
    prompts = [[[1, 2, i] for i in range(20)], [[3, 4, i] for i in range(20)]]
    expected = [generate(engine, rows) for rows in prompts]
    streams = [engine.stream(rows, GREEDY) for rows in prompts]
    found: list[dict[int, qkv.RequestOutput]] = [{}, {}]
    for pair in zip(*streams, strict=True):
        for place, output in enumerate(pair):
            found[place][output.index] = output
    for place in (0, 1):
        for index, output in enumerate(expected[place]):
            same(found[place][index], output)


def test_hook(engine: qkv.Engine) -> None:
    seen: list[int] = []

    def hook(output: qkv.RequestOutput) -> dict[str, Any] | None:
        seen.append(output.index)
        if output.index == 1:
            raise RuntimeError("no answer in it")
        if output.index == 2:
            return None
        return {"length": len(output.text)}

    outputs = generate(engine, [[1], [2], [3], []], on_finish=hook)
    assert sorted(seen) == [0, 1, 2]  # not for a row with an error
    assert outputs[0].scores == {"length": len(outputs[0].text)}
    assert outputs[1].scores == {"error": "RuntimeError: no answer in it"}
    assert outputs[1].error is None and len(outputs[1].token_ids) == 6
    assert outputs[2].scores == {}


def test_interrupt_keeps_what_was_finished(engine: qkv.Engine) -> None:
    """Here it comes in the hook of the fourth row; that row is kept, too."""
    seen: list[int] = []

    def hook(output: qkv.RequestOutput) -> None:
        seen.append(output.index)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        generate(engine, [[1, i] for i in range(40)], on_finish=hook)
    kept = engine.interrupted
    assert caught.value.outputs is kept  # type: ignore[attr-defined]
    assert [output.index for output in kept] == sorted(output.index for output in kept)
    assert set(seen) <= {output.index for output in kept} and len(kept) < 40
    assert all(len(output.token_ids) == 6 for output in kept)
    assert not engine._seqs
    same(generate(engine, [[1, kept[0].index]])[0], kept[0])
    assert engine.interrupted == []


def test_hook_may_use_the_engine(engine: qkv.Engine) -> None:
    def hook(output: qkv.RequestOutput) -> dict[str, Any]:
        return {"again": generate(engine, [[1, 2]])[0].text}

    outputs = generate(engine, [[1], [2]], on_finish=hook)
    assert all("again" in output.scores for output in outputs)


def test_other_thread_gets_an_error(engine: qkv.Engine) -> None:
    found: list[BaseException] = []

    def other() -> None:
        try:
            generate(engine, [[1]])
        except qkv.Error as error:
            found.append(error)

    def hook(output: qkv.RequestOutput) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    generate(engine, [[1]], on_finish=hook)
    assert len(found) == 1 and "another thread" in str(found[0])


def test_progress_without_a_terminal(
    engine: qkv.Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.progress._LINE_SECONDS", 0.0)
    monkeypatch.setattr("qkv.progress._QUIET_SECONDS", 0.0)
    engine.generate([[1], [2]], GREEDY)
    lines = capsys.readouterr().err.splitlines()
    assert "2/2" in lines[-1] and "tokens/s" in lines[-1]
    engine.generate([[1], [2]], GREEDY, progress=False)
    assert capsys.readouterr().err == ""


# Chat and scores.


def test_chat(engine: qkv.Engine) -> None:
    conversation = [{"role": "user", "content": "How many apples?"}]
    outputs = engine.chat(conversation, GREEDY, progress=False)
    assert len(outputs) == 1
    text = engine.tokenizer.apply_chat_template(conversation)
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    assert list(outputs[0].prompt_token_ids) == ids
    assert ids.count(engine.tokenizer.bos_id) == 1  # type: ignore[arg-type]
    rows: list[Any] = [conversation, [], [{"content": "x"}], {"messages": conversation, "key": 7}]
    outputs = engine.chat(rows, GREEDY, progress=False)
    assert [output.error is None for output in outputs] == [True, False, False, True]
    assert outputs[3].key == 7
    same(outputs[0], outputs[3])


def test_score_agrees_with_generation(engine: qkv.Engine) -> None:
    output = generate(engine, [[1, 2, 3]])[0]
    score = engine.score([[1, 2, 3]], [output.token_ids], top=2, progress=False)[0]
    assert np.array_equal(score.token_ids, output.token_ids)
    assert np.array_equal(score.token_logprobs, output.logprobs)
    assert score.greedy and score.rank.tolist() == [0] * 6
    assert score.top_ids.shape == (6, 2)
    assert score.total == pytest.approx(float(output.logprobs.astype(np.float64).sum()))


def test_score_of_a_prompt(engine: qkv.Engine) -> None:
    ids = list(range(10, 40))
    whole = engine.score([ids], progress=False)[0]
    assert whole.token_logprobs.shape == whole.rank.shape == (29,)
    assert whole.token_ids.tolist() == ids[1:]
    tail = engine.score([ids[:20]], [ids[20:]], progress=False)[0]
    assert np.array_equal(tail.token_logprobs, whole.token_logprobs[19:])
    assert engine.score([[5]], progress=False)[0].token_logprobs.shape == (0,)


def test_score_of_text_is_tokenized_as_a_whole(engine: qkv.Engine) -> None:
    encode = engine.tokenizer.encode
    scores = engine.score(["The quick ", "The quick"], ["brown fox", " brown fox"], progress=False)
    line = engine.score(["The quick\n"], ["fox"], progress=False)[0]
    assert engine.tokenizer.decode_output(line.token_ids) == "\nfox"
    whole = encode("The quick brown fox")
    for score in scores:
        assert score.token_ids.tolist() == whole[len(encode("The quick")) :]
    assert np.array_equal(scores[0].token_logprobs, scores[1].token_logprobs)
    prompts: list[Any] = ["a", [], "b"]
    errors = engine.score(prompts, ["", [1], "\ud800"], progress=False)
    assert [score.error is None for score in errors] == [False, False, False]
    with pytest.raises(ValueError, match="1 continuations for 2 prompts"):
        engine.score(["a", "b"], ["c"])


# The engine itself.


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"kv_cache_dtype": "fp7"}, ValueError, ["fp7", "bf16", "nvfp4"]),
        ({"kv_cache_dtype": []}, ValueError, ["lane"]),
        ({"kv_cache_dtype": {"layer": {}}}, ValueError, ["layer", "layers"]),
        ({"kv_cache_dtype": {"layers": {"0-99": "bf16"}}}, ValueError, ["0-99", "layers 0 to"]),
        ({"kv_cache_dtype": {"layers": {"x": "bf16"}}}, ValueError, ["'x'"]),
        ({"quantization": "int3"}, ValueError, ["int3", "gptq_marlin"]),
        ({"quantization": "awq"}, qkv.UnsupportedError, ["awq", "not quantized"]),
        ({"prefill_quantization": "fp9"}, ValueError, ["fp9", "w8a8_fp8", "another checkpoint"]),
        ({"prefill_quantization": 8}, ValueError, ["prefill_quantization=8"]),
        ({"prefill_quantization": "awq"}, qkv.UnsupportedError, ["prefill_quantization='awq'"]),
        ({"quantization_param_path": "/nowhere.json"}, ValueError, ["/nowhere.json"]),
        ({"fp8_gemm_backend": "cutlass"}, qkv.UnsupportedError, ["fp8_gemm_backend", "cutlass"]),
        ({"activation_quant": "int4"}, ValueError, ["int4", "int8"]),
        ({"activation_quant": "int8"}, qkv.UnsupportedError, ["int8", "integer codes"]),
        ({"activation_quant": "int8", "compute_dtype": "float32"}, ValueError, ["int8", "float32"]),
        ({"compute_dtype": "float16"}, ValueError, ["float16", "float32"]),
        ({"query_dtype": "fp8"}, ValueError, ["query_dtype", "fp8_e4m3"]),
        ({"device": "tpu"}, ValueError, ["tpu", "cpu"]),
        ({"schedule": "lifo"}, ValueError, ["lifo", "fcfs"]),
        ({"threads": -1}, ValueError, ["threads", "-1"]),
        ({"max_running": 0}, ValueError, ["max_running", "0"]),
        ({"chunk_tokens": 0}, ValueError, ["chunk_tokens"]),
        ({"kv_tokens": 8}, ValueError, ["kv_tokens", "16"]),
        ({"mem_fraction": 1.5}, ValueError, ["mem_fraction", "1.5"]),
        ({"mem_fraction": 0.5, "kv_tokens": 64}, ValueError, ["kv_tokens", "mem_fraction"]),
        ({"prefix_cache": 1}, TypeError, ["prefix_cache"]),
        ({"seed": -1}, ValueError, ["seed"]),
        ({"tokenizer": 5}, TypeError, ["tokenizer"]),
        ({"max_tokens": 5}, TypeError, ["max_tokens"]),
    ],
)
def test_refused_options(
    tiny: Callable[..., Path], given: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    size = {} if "mem_fraction" in given else {"kv_tokens": 64}
    with pytest.raises(error) as caught:
        qkv.Engine(tiny("llama"), **size | given)
    for word in words:
        assert word in str(caught.value)


def test_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(qkv.CheckpointError, match=r"no such file.*"):
        qkv.Engine(tmp_path / "nothing.gguf")
    with pytest.raises(TypeError, match="model="):
        qkv.Engine(5)  # type: ignore[arg-type]
    with pytest.raises(qkv.CheckpointError, match="some-owner/some-model"):
        qkv.Engine("some-owner/some-model")


def test_lanes(tiny: Callable[..., Path]) -> None:
    """Two lanes of the same format: the same answers, each with its own name."""
    with qkv.Engine(
        tiny("llama"), threads=1, kv_tokens=512, kv_cache_dtype=["bf16", {"default": "bf16"}]
    ) as engine:
        output = generate(engine, [[1, 2, 3]], SAMPLED.with_(n=2))[0]
        assert list(output.lanes) == ["bf16", "bf16#2"]
        for lane in output.lanes.values():
            same(lane, output)
        score = engine.score([[1, 2, 3]], progress=False)[0]
        assert np.array_equal(score.lanes["bf16#2"].token_logprobs, score.token_logprobs)


def test_lane_names_and_layers() -> None:
    given = {"default": "bf16", "k": "fp8_e4m3", "layers": {"0-1": "bf16", 3: {"v": "nvfp4"}}}
    lane = options.lanes(given, 4, compute_dtype="bf16", declared="")[0]
    assert lane.layers == [
        ("bf16", "bf16"),
        ("bf16", "bf16"),
        ("fp8_e4m3", "bf16"),
        ("fp8_e4m3", "nvfp4"),
    ]
    auto = options.lanes("auto", 1, compute_dtype="bf16", declared="fp8_e4m3")[0]
    assert auto.layers == [("fp8_e4m3", "fp8_e4m3")]
    assert options.lanes("auto", 1, compute_dtype="float32", declared="")[0].name == "float32"


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("fp8_e4m3", {"default": "fp8_e4m3"}),
        (
            {"default": "auto", "k": "nvfp4", "v": "nvfp4", "scales": 1},
            {"default": "nvfp4", "scales": 1.0},
        ),
        (
            {"default": "fp8_e4m3", "layers": {"0": "bf16", "2-3": {"k": "bf16"}}},
            {"default": "fp8_e4m3", "layers": {"0": "bf16", "2-3": {"k": "bf16"}}},
        ),
        (
            {"default": "fp8_e4m3", "layers": {"0-1": "bf16", "2": "bf16", "4": {"v": "bf16"}}},
            {
                "default": "bf16",
                "layers": {"3": "fp8_e4m3", "4": {"k": "fp8_e4m3"}, "5": "fp8_e4m3"},
            },
        ),
    ],
)
def test_lane_is_read_as_it_is_spelled(given: Any, spelled: dict[str, Any]) -> None:
    (lane,) = options.lanes(given, 6, compute_dtype="bf16", declared="")
    assert options.spelled(lane) == spelled
    (again,) = options.lanes(spelled, 6, compute_dtype="bf16", declared="")
    assert (again.layers, again.scales) == (lane.layers, lane.scales)


def test_float32_lane_is_spelled_as_auto() -> None:
    given = {"default": "auto", "layers": {"0-2": "fp8_e4m3", "3": {"k": "bf16"}}}
    (lane,) = options.lanes(given, 4, compute_dtype="float32", declared="")
    assert options.spelled(lane) == given


def test_reference_arithmetic(tiny: Callable[..., Path], engine: qkv.Engine) -> None:
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=512, compute_dtype="float32") as exact:
        assert exact.info["compute_dtype"] == "float32"
        theirs = exact.score([[1, 2, 3, 4, 5]], progress=False)[0].token_logprobs
        ours = engine.score([[1, 2, 3, 4, 5]], progress=False)[0].token_logprobs
        assert not np.array_equal(theirs, ours)
        assert np.abs(theirs - ours).max() < 0.1


def test_own_tokenizer(tiny: Callable[..., Path]) -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int]) -> str:
            return "".join(f"<{index}>" for index in ids)

    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=512, tokenizer=Letters()) as engine:
        output = generate(engine, ["abc"])[0]
        assert output.prompt_token_ids.tolist() == [97, 98, 99]
        assert output.text == "".join(f"<{index}>" for index in output.token_ids)


def test_model_without_tokenizer(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama", tokenizer=False), threads=1, kv_tokens=512) as engine:
        output = generate(engine, [[1, 2, 3]])[0]
        assert len(output.token_ids) == 6 and output.text == ""
        with pytest.raises(qkv.CheckpointError, match=r"tokenizer\.json"):
            generate(engine, ["text"])


def test_info_memory_scales(engine: qkv.Engine) -> None:
    info = engine.info
    assert info["kv_cache_dtype"] == ["bf16"] and info["threads"] == 1
    assert info["kv_tokens"] == 4096
    memory = engine.memory()
    assert memory["weights"] > 0 and memory["kv"] > 0
    assert memory["kv_lanes"] == {"bf16": memory["kv"]}
    parts = ("weights", "kv", "activations", "hidden", "scratch")
    assert memory["total"] == sum(memory[part] for part in parts)
    scales = engine.kv_scales()
    assert len(scales) == 2 * info["config"]["n_layers"]
    assert {row.values for row in scales} == {(1.0,)} and not any(row.applied for row in scales)
    assert info["kv_cache_dtype_auto"]["taken"] == "bf16"
    assert "Engine(" in repr(engine)


def test_pool_is_what_the_batch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "free_memory", lambda: 1_000_000)
    size: dict[str, Any] = {"kv_tokens": None, "mem_fraction": None, "weights_bytes": 200_000}
    assert pools.sizing(pools.Pool(token_bytes=10), **size, needed=1000) == 992
    assert pools.sizing(pools.Pool(token_bytes=100), **size, needed=10**6) == 2000
    half = size | {"mem_fraction": 0.5}
    assert pools.sizing(pools.Pool(token_bytes=100), **half, needed=1) == 2992
    with pytest.raises(MemoryError, match="no room"):
        pools.sizing(pools.Pool(token_bytes=10**6), **size, needed=10**6)
    given = size | {"kv_tokens": 8000}
    assert pools.sizing(pools.Pool(token_bytes=100), **given, needed=1) == 8000
    with pytest.raises(MemoryError, match="kv_tokens=8000.* at most 7920 fit"):
        pools.sizing(pools.Pool(token_bytes=101), **given, needed=1)


def test_pool_of_a_gpu() -> None:
    """What the device says when the weights are there, whatever they took; by default 0.85 of what
    there was before, in whole pages, however few the batch needs."""
    pool = pools.Pool(token_bytes=100)
    size: dict[str, Any] = {"kv_tokens": None, "mem_fraction": None, "needed": 1}
    found = pools.sizing(pool, **size, weights_bytes=None)
    assert not isinstance(found, int) and found(1_000_000, 800_000) == 6496
    found = pools.sizing(pool, **size | {"mem_fraction": 0.5}, weights_bytes=None)
    assert not isinstance(found, int) and found(1_000_000, 800_000) == 2992
    with pytest.raises(MemoryError, match="no room .* a larger mem_fraction"):
        found(1_000_000, 500_000)


def test_free_memory_honours_the_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_cgroup_free", lambda: 12345)
    assert options.free_memory() == 12345
    monkeypatch.setattr(options, "_cgroup_free", lambda: None)
    assert options.free_memory() > 12345


def test_hub_name_is_tried_only_where_there_is_no_such_folder(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner/model").symlink_to(tiny("llama"))
    assert models.resolve("owner/model") == "owner/model"


def test_a_device_that_is_not_there(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing comes first, not what would be asked for if it were there."""
    monkeypatch.setattr(_core, "__file__", str(tmp_path / "_core.so"))
    with pytest.raises(qkv.UnsupportedError, match=r"this installation has no _qkv_cuda\.so"):
        qkv.Engine(tiny("llama"), device="cuda:0")
    (tmp_path / "_qkv_cuda.so").touch()
    with pytest.raises(qkv.UnsupportedError, match=r"backend library: .*_qkv_cuda\.so"):
        qkv.Engine(tiny("llama"), device="cuda:0")


def test_loading_says_how_many_bytes_and_how_fast(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each tensor here; else one in ten seconds, or a bar on a terminal."""
    monkeypatch.setattr(progress, "_LINE_SECONDS", -1.0)
    with qkv.Engine(tiny("qwen3_moe"), kv_tokens=64):
        lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 20
    assert all(re.fullmatch(r"loading: \d.* of \d.* GiB, \d.* GiB/s", line) for line in lines)


def test_the_bar_of_a_second_set_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[int, list[int]]] = []

    class Bar:
        n = 0

        def __init__(self, total: int, **_: object) -> None:
            bars.append((total, []))

        def update(self, more: int) -> None:
            self.n += more
            bars[-1][1].append(self.n)

        def close(self) -> None:
            pass

    monkeypatch.setattr(progress, "tqdm", Bar)
    monkeypatch.setattr(progress, "_in_notebook", lambda: True)
    loading = progress.Loading()
    for done, total in ((3, 10), (10, 10), (2, 10), (4, 4)):
        loading(done, total)
    loading.close()
    assert bars == [(10, [3, 10]), (10, [2]), (4, [4])]
