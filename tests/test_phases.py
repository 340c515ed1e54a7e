"""Two sets of weights over one KV cache: prompt positions use the prefill weights, generated ones
the decode weights, whatever the batch, and only pages of prompts are shared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from core_runs import (
    LARGE,
    Request,
    alone,
    assert_same,
    covering,
    difference,
    mixed_requests,
    open_engine,
    run,
    run_row,
)
from qkv import _core, digests
from qkv.comparison import settings
from ref import forward, make_tiny

SMALL = 192
PROMPT = list(range(5, 45))
SHAPE: dict[str, Any] = {"num_hidden_layers": 2}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path]) -> tuple[Path, Path]:
    """Prefill and decode: the same numbers in config.json, and nothing else in common."""
    return tiny("llama", seed=1, **SHAPE), tiny("llama", seed=2, **SHAPE)


def prefill(path: Path, online: str | None = None) -> dict[str, Any]:
    return {"prefill": (str(path), None, None, online)}


def bits(values: NDArray[np.float32]) -> list[int]:
    return [int(value) for value in values.view(np.uint32)]


# Which weights compute what.


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_against_the_reference(tiny: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    """Norms, biases and embeddings differ, too; every position's log-probabilities tell."""
    models = [
        make_tiny.write(tmp_path / name, arch, seed=seed) for name, seed in (("a", 3), ("b", 4))
    ]
    config, a, b = models[0].config, models[0].tensors, models[1].tensors
    engine = open_engine(
        tmp_path / "b", kv_tokens=256, compute_dtype="float32", **prefill(tmp_path / "a")
    )
    request = Request(
        np.array(PROMPT, np.int32), {**GREEDY, "max_tokens": 24, "logprob_start": 1, "n_top": 2}
    )
    result = run(engine, [request])[0]
    ids = [*PROMPT, *map(int, result.token_ids)]
    table = forward.log_softmax(forward.logits(config, b, ids[:-1], prompt=(len(PROMPT), a)))
    wanted = table[np.arange(len(ids) - 1), ids[1:]]
    n = len(PROMPT) - 1
    np.testing.assert_allclose(result.prompt_logprobs, wanted[:n], rtol=0, atol=1e-3)
    np.testing.assert_allclose(result.logprobs, wanted[n:], rtol=0, atol=1e-3)
    assert list(result.token_ids) == list(table[n:].argmax(axis=1))
    only_b = forward.prompt_logprobs(config, b, ids)
    assert np.abs(only_b[n + 1 :] - wanted[n + 1 :]).max() > 0.1  # the cache is A's
    engine.close()


def test_prompts_are_the_other_models_bit_for_bit(pair: tuple[Path, Path]) -> None:
    """The prompt's log-probabilities and the first token are those of the prefill model alone."""
    a, b = pair
    requests = mixed_requests(12, 512, seed=3)
    both = alone(b, requests, **prefill(a))
    first, second = alone(a, requests), alone(b, requests)
    for i in range(len(requests)):
        assert bits(both[i].prompt_logprobs) == bits(first[i].prompt_logprobs)
        assert both[i].token_ids[0] == first[i].token_ids[0]
        assert bits(both[i].logprobs[:1]) == bits(first[i].logprobs[:1])
    assert sum(difference(both[i], first[i]) != "" for i in both) > 6
    assert sum(difference(both[i], second[i]) != "" for i in both) == len(requests)


def test_scored_continuations_are_generated_positions(pair: tuple[Path, Path]) -> None:
    """score(prompt, continuation) gives the bits of generating that continuation."""
    a, b = pair
    with qkv.Engine(b, prefill_quantization=a, kv_tokens=1024) as engine:
        params = qkv.SamplingParams(max_tokens=20, **GREEDY)
        (output,) = engine.generate([PROMPT], params, progress=False)
        (score,) = engine.score([PROMPT], [output.token_ids], progress=False)
        (whole,) = engine.score([PROMPT], progress=False)
    assert bits(score.token_logprobs) == bits(output.logprobs)
    with qkv.Engine(a, kv_tokens=1024) as engine:
        (first,) = engine.score([PROMPT], progress=False)
    assert bits(whole.token_logprobs) == bits(first.token_logprobs)


@pytest.mark.parametrize("compute_dtype", ["bf16", "float32"])
def test_lanes_and_lockstep(pair: tuple[Path, Path], compute_dtype: str) -> None:
    a, b = pair
    lanes = [[("bf16", "bf16")] * 2, [("fp8_e4m3", "fp8_e4m3")] * 2, [("bf16", "nvfp4")] * 2]
    text = np.arange(7, 90, dtype=np.int32)
    start = 50

    def group(engine: _core.Engine, decode_start: int) -> list[_core.Result]:
        idents = [
            engine.add(
                text, lane=lane, max_tokens=0, logprob_start=1, group=1, group_size=3,
                decode_start=decode_start,
            )
            for lane in range(3)
        ]  # fmt: skip
        while engine.step().n_rows:
            pass
        return [engine.take(ident) for ident in idents]

    options: dict[str, Any] = {"lanes": lanes, "kv_tokens": 256, "compute_dtype": compute_dtype}
    engine = open_engine(b, **options, **prefill(a))
    found = group(engine, start)
    one = open_engine(b, **(options | {"lanes": lanes[:1]}), **prefill(a))
    request = Request(text, {"max_tokens": 0, "logprob_start": 1, "decode_start": start})
    assert bits(found[0].prompt_logprobs) == bits(run(one, [request])[0].prompt_logprobs)
    one.close()
    for chunk in (16, 512):
        other = open_engine(b, **options, chunk_tokens=chunk, **prefill(a))
        scores = other.score_lanes(text, decode_start=start)
        for lane, result in enumerate(found):
            assert bits(scores.logprobs[lane]) == bits(result.prompt_logprobs)
            if lane:
                assert bits(scores.kl[lane]) == bits(result.kl)
        for lane, result in enumerate(group(other, start)):
            assert difference(result, found[lane]) == ""
        other.close()
    plain = open_engine(a, **options)
    n = start - 1  # figures of tokens that only the prompt's positions predict, and one more
    assert bits(found[2].prompt_logprobs[: n + 1]) == bits(
        group(plain, 0)[2].prompt_logprobs[: n + 1]
    )
    with pytest.raises(ValueError, match="decode_start: 40, in group 2 it is 50"):
        for lane, decode_start in ((0, 50), (1, 40)):
            engine.add(text, lane=lane, max_tokens=0, logprob_start=1, group=2, group_size=2,
                       decode_start=decode_start)  # fmt: skip
    for bad in (-1, len(text) + 1):
        with pytest.raises(ValueError, match="decode_start"):
            engine.add(text, decode_start=bad)
    engine.close()
    plain.close()


# The same bits.


def test_equal_weights_change_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """From the same files, and from a copy of them."""
    _, b = pair
    requests = mixed_requests(16, 512, seed=5)
    reference = alone(b, requests)
    copy = Path(shutil.copytree(b, tmp_path / "copy"))
    for other in (b, copy):
        engine = open_engine(b, kv_tokens=SMALL, chunk_tokens=16, **prefill(other))
        assert_same(reference, run(engine, requests), other)
        assert engine.counts()["n_retractions"] > 0
        engine.close()


FACTORS: dict[str, tuple[Any, ...]] = {
    "n": (1, 7, 32),
    "chunk_tokens": (16, 64, 512),
    "prefix_cache": (True, False),
    "kv_tokens": (LARGE, SMALL),
    "order": ("given", "reversed", "shuffled"),
    "threads": (1, 2),
    "arrive": (0, 1),
    "offline": (True, False),
}


@pytest.mark.parametrize("arch", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_same_bits_whatever_the_batch(tiny: Callable[..., Path], arch: str) -> None:
    a, b = (tiny(arch, seed=seed) for seed in (1, 2))
    requests = mixed_requests(32, 512, seed=7)
    reference = alone(b, requests, **prefill(a))
    n_retractions = n_reused = 0
    for row in covering(FACTORS):
        results, counts = run_row(b, requests, row, **prefill(a))
        assert_same(reference, results, row)
        n_retractions += counts["n_retractions"]
        n_reused += counts["n_reused_tokens"]
    assert n_retractions > 0 and n_reused > 0


def test_the_guard_backend_gives_the_same_bits(pair: tuple[Path, Path]) -> None:
    a, b = pair
    requests = mixed_requests(12, 512, seed=7)
    reference = alone(b, requests, **prefill(a, "fp8:fp8"))
    engine = open_engine(
        b, kv_tokens=SMALL, chunk_tokens=16, device="guard", **prefill(a, "fp8:fp8")
    )
    assert_same(reference, run(engine, requests), "the guard backend")
    assert engine.counts()["n_retractions"] > 0
    engine.close()


def test_only_pages_of_prompts_are_shared(pair: tuple[Path, Path]) -> None:
    """A prompt that repeats another's output finds that one's prompt, and not its output."""
    a, b = pair
    engine = open_engine(b, kv_tokens=1024, **prefill(a))
    ask = {**GREEDY, "max_tokens": 40, "logprob_start": 60}
    first = run(engine, [Request(np.array(PROMPT, np.int32), ask)])[0]
    text = np.array([*PROMPT, *first.token_ids], np.int32)
    again = run(engine, [Request(text, ask)])[0]
    assert again.cached_tokens == len(PROMPT) // 16 * 16
    fresh = open_engine(b, kv_tokens=1024, prefix_cache=False, **prefill(a))
    assert difference(run(fresh, [Request(text, ask)])[0], again) == ""
    # All of that was a prompt: now it is found whole, but not by what says it is a continuation.
    assert run(engine, [Request(text, {**ask, "logprob_start": -1})])[0].cached_tokens == 64
    scored = {"max_tokens": 0, "logprob_start": 79, "decode_start": len(PROMPT)}
    assert run(engine, [Request(text, scored)])[0].cached_tokens == len(PROMPT) // 16 * 16
    engine.close()
    fresh.close()


def test_one_set_shares_output_as_ever(pair: tuple[Path, Path]) -> None:
    engine = open_engine(pair[1], kv_tokens=1024)
    ask = {**GREEDY, "max_tokens": 40}
    first = run(engine, [Request(np.array(PROMPT, np.int32), ask)])[0]
    text = np.array([*PROMPT, *first.token_ids], np.int32)
    assert run(engine, [Request(text, {**ask, "decode_start": 20})])[0].cached_tokens == 64
    engine.close()


# What is refused, and what is told.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "another model: 3 layers, not 2"),
        ({"vocab_size": 768}, "768 tokens in the vocabulary, not 512"),
        ({"num_key_value_heads": 1}, "1 KV heads, not 2"),
        ({"intermediate_size": 128}, "128 channels inside the MLP, not 96"),
        ({"rms_norm_eps": 1e-4}, "the epsilon of norms is 0.0001, not 1e-06"),
        ({"rope_theta": 5e5}, "the frequencies of its rotary embedding 0"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "another activation"),
    ],
)
def test_another_model_is_refused(
    tiny: Callable[..., Path], changes: dict[str, Any], words: str
) -> None:
    other = tiny("llama", **(SHAPE | changes))
    with pytest.raises(qkv.CheckpointError, match=words):
        qkv.Engine(tiny("llama", seed=2, **SHAPE), prefill_quantization=other, kv_tokens=64)


def test_another_architecture_is_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(qkv.CheckpointError, match="Qwen2ForCausalLM, not LlamaForCausalLM"):
        qkv.Engine(tiny("llama"), prefill_quantization=tiny("qwen2"), kv_tokens=64)


def test_a_window_of_another_size_is_refused(tiny: Callable[..., Path]) -> None:
    a, b = tiny("mistral", sliding_window=16), tiny("mistral")
    with pytest.raises(qkv.CheckpointError, match="layer 0 has a window of 16 .* not 24"):
        qkv.Engine(b, prefill_quantization=a, kv_tokens=64)


def test_a_checkpoint_that_is_not_there(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(qkv.CheckpointError, match="no such file or folder"):
        qkv.Engine(tiny("llama"), prefill_quantization=tmp_path / "nothing", kv_tokens=64)


def test_a_name_makes_a_second_set(tiny: Callable[..., Path]) -> None:
    """fp8 for prompts, int4 for the output; the embedding and the head are there once."""
    model = tiny("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    with qkv.Engine(model, quantization="int4", kv_tokens=256) as engine:
        alone = engine.memory()
        assert engine.info["prefill"] is None and "prefill_weights" not in alone
        planned = engine._weights.n_bytes
        assert planned == alone["weights"]
    options: dict[str, Any] = {"quantization": "int4", "prefill_quantization": "fp8"}
    with qkv.Engine(model, kv_tokens=256, **options) as engine:
        info, memory = engine.info, engine.memory()
        assert info["online_quantization"] == "int4" and info["online_matrices"] == 14
        second = info["prefill"]
        assert second["online_quantization"] == "fp8" and second["online_matrices"] == 14
        assert second["model"] == info["model"] == str(model)
        assert second["quantized_inputs"] == 14 and info["quantized_inputs"] == 0
        assert second["fp8_gemm_backend"]["matrices"] == 14
        assert info["fp8_gemm_backend"]["matrices"] == 0
        assert memory["weights"] == alone["weights"] + memory["prefill_weights"]
        assert engine._prefill is not None
        ends = 2 * _core.packed_bytes("BF16", 512, 128)
        assert memory["prefill_weights"] == engine._prefill.n_bytes
        with qkv.Engine(model, quantization="fp8", kv_tokens=256) as whole:
            assert memory["prefill_weights"] == whole.memory()["weights"] - ends
        # One more row of hidden states for each of a step's.
        assert memory["activations"] == alone["activations"] + (512 + 64) * 128 * 4
        (output,) = engine.generate([PROMPT], qkv.SamplingParams(max_tokens=8), progress=False)
        assert len(output.token_ids) == 8
    with qkv.Engine(
        model, kv_tokens=256, quantization="int4", prefill_quantization=model
    ) as engine:
        assert engine.info["prefill"]["online_quantization"] is None
    with qkv.Engine(model, kv_tokens=256, prefill_quantization="unquant") as engine:
        assert engine.info["prefill"] is None  # the same weights


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        (None, "fp8_block"),
        (None, "unquant"),
        ("fp8", "unquant"),
        ("nvfp4", None),
        ("mlx_q4", "w8a8_int8"),
        ("bitsandbytes", "mlx_q8"),
        ("mxfp4", "mxfp8"),
    ],
)
def test_the_plan_is_what_is_held(
    tiny: Callable[..., Path], name: str | None, prompts: str | None
) -> None:
    """From the files to the byte; from the config alone nearly."""
    model = tiny("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    options: dict[str, Any] = {"quantization": name, "prefill_quantization": prompts}
    with qkv.Engine(model, kv_tokens=64, **options) as engine:
        held = engine.memory()["weights"]
    planned = qkv.plan(model, memory_gib=1, **options)
    assert planned.weights_gib * 2**30 == held
    two = prompts is not None and (name, prompts) != (None, "unquant")
    assert any("more for prompts" in note for note in planned.notes) == two
    config = json.loads((model / "config.json").read_text())
    estimated = qkv.plan(config, memory_gib=1, **options).weights_gib * 2**30
    assert estimated == pytest.approx(held, rel=0.03)  # norms, and padding of narrow matrices


def test_what_cannot_be_planned(tiny: Callable[..., Path]) -> None:
    model = tiny("llama")
    config = json.loads((model / "config.json").read_text())
    with pytest.raises(ValueError, match="give the checkpoint, or weights_gib"):
        qkv.plan(config, memory_gib=1, prefill_quantization=model)
    with pytest.raises(ValueError, match="weights_gib says"):
        qkv.plan(config, memory_gib=1, weights_gib=0.1, quantization="int4")
    with pytest.raises(qkv.UnsupportedError, match="awq"):
        qkv.plan(model, memory_gib=1, quantization="awq")


def test_a_comparison_knows_the_weights_of_prompts(pair: tuple[Path, Path]) -> None:
    """By name, or by what stands in the other checkpoint."""
    a, b = pair
    for given, has_digest in ((a, True), ("int8", False)):
        plan = settings.plan(
            b, ("bf16", "fp8_e4m3"), ["gsm8k"], limit=1, margin=0.01, control=False, grid=True,
            chat=False, rerun_items=0, engine_options={"prefill_quantization": given},
        )  # fmt: skip
        header = json.loads(json.dumps(plan.header()))["settings"]
        assert header["prefill_quantization"] == str(given)
        assert (header.get("prefill_quantization_digest") == digests.of_path(str(a))) == has_digest


def test_int8_activations_need_integers_in_one_set(tiny: Callable[..., Path]) -> None:
    model = tiny("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    options: dict[str, Any] = {"kv_tokens": 64, "activation_quant": "int8"}
    with qkv.Engine(model, prefill_quantization="int8", **options) as engine:
        assert engine.info["prefill"]["int8_matrices"] == 14
        assert engine.info["int8_matrices"] == 0
    with pytest.raises(qkv.UnsupportedError, match="none of the"):
        qkv.Engine(model, prefill_quantization="fp8", **options)


def test_a_gguf_file_for_prompts(tmp_path: Path) -> None:
    """The same floats in another container: q and k are stored in another order there."""
    folder, file = tmp_path / "folder", tmp_path / "model.gguf"
    make_tiny.write(folder, "llama", seed=4, dtype="F32", **SHAPE)
    make_tiny.write_gguf(file, "llama", seed=4, types="F32", codec=_core, **SHAPE)
    reference = alone(folder, requests := mixed_requests(8, 512, seed=2))
    assert_same(reference, alone(folder, requests, **prefill(file)), "GGUF")
