"""Whole engines on the CUDA backend, its kernels run by the emulation: the tokens of the CPU
backend wherever two were not almost equally likely, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_runs import LARGE, Request, difference, mixed_requests, open_engine, run
from qkv import _core
from qkv.quantization import METHODS


def first_fast(*names: str) -> list[Any]:
    """The others are slow: under sanitizers, which see nothing of the library, one is enough."""
    return [names[0], *(pytest.param(name, marks=pytest.mark.slow) for name in names[1:])]


ARCHS = first_fast("llama", "qwen2", "qwen3", "mistral", "gemma3")
EXPERTS = first_fast("qwen3_moe", "qwen2_moe")
LATENT = first_fast("fp8_e4m3", "bf16", "nvfp4", "fp4_mx_block16", "fp8_ds_mla")
METHODS_IN_CODES = first_fast("int4", "int8", "w8a8_fp8", "nvfp4", "mxfp4")
WINDOWED = [
    ("gpt_oss", 5),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in [("gpt_oss", 33), ("gpt_oss", 270), ("gemma2", 24), ("mistral", 16)]),
]  # fmt: skip
QUERIES = first_fast("fp8_e4m3", "bf16", "nvfp4")
OTHER_KV = first_fast("bf16_stochastic", "nvfp4", "fp8_e5m2", "mxfp8", "fp4_mx_block16")
# Two orders of additions differ by 1e-6 and mostly stay there. Where such a difference crosses the
# middle between two codes, it becomes a step of the code: a value of bf16 in the cache moves a tiny
# model's logits by a few hundredths, an input in e4m3 (steps of an eighth) by ten times that. Both
# are rare, so the median must be as small as the differences are without them.
MARGIN = 0.1
MARGIN_OF_E4M3 = 0.5
MEDIAN = 1e-4


@pytest.fixture(autouse=True)
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU adds in the same order on every machine: whether such a crossing happens, which is
    chance, is then the same, too. AVX2 has plain C's bits."""
    usable = dict(_core.isas())
    monkeypatch.setenv("QKV_ISA", "avx2" if usable.get("avx2") else "scalar")


def greedy(n: int, vocab: int, *, max_tokens: int, longest: int = 66) -> list[Request]:
    rng = np.random.default_rng(n)
    lengths = [5, 17, 40, longest, 16, 1][:n]
    return [
        Request(rng.integers(0, vocab, length).astype(np.int32),
                {"max_tokens": max_tokens, "ignore_eos": True, "n_top": 2, "logprob_start": 1,
                 "temperature": 0.0})
        for length in lengths
    ]  # fmt: skip


def assert_agrees(cpu: _core.Result, gpu: _core.Result, margin: float, what: Any) -> None:
    """The same tokens up to the first place where the CPU's two best were closer than the margin,
    and log-probabilities as close until there."""
    apart = np.abs(cpu.prompt_logprobs - gpu.prompt_logprobs)
    assert apart.max(initial=0) < margin, what
    for i, (a, b) in enumerate(zip(cpu.token_ids, gpu.token_ids, strict=True)):
        best, second = cpu.top_logprobs[i][:2]
        if a != b:
            assert best - second < margin, (what, i, a, b, best, second)
            return
        assert abs(cpu.logprobs[i] - gpu.logprobs[i]) < margin, (what, i)


def compare(
    path: Path,
    library: str,
    kv: str,
    *,
    margin: float = MARGIN,
    longest: int = 66,
    **options: Any,
) -> dict[str, int]:
    """Greedy continuations of a few prompts on the CPU and on the emulated device. How many of its
    matrices are multiplied in which way."""
    checkpoint = _core.Checkpoint(str(path))
    config = checkpoint.model_config()
    checkpoint.close()
    lane = [(kv, kv)] * config["n_layers"]
    requests = greedy(4, config["vocab"], max_tokens=8, longest=longest)
    results = {}
    for device, at in (("cpu", None), ("cuda-emulated", library)):
        engine = open_engine(
            path, kv_tokens=LARGE, lanes=[lane], device=device, device_library=at, **options
        )
        results[device] = run(engine, requests)
        info = engine.info
        engine.close()
    assert info["device"] == "cuda:0" and info["isa"] == "emulated, reference GEMM"
    cpu, gpu = results["cpu"], results["cuda-emulated"]
    apart = [np.abs(cpu[i].prompt_logprobs - gpu[i].prompt_logprobs) for i in range(len(requests))]
    assert np.median(np.concatenate(apart)) < MEDIAN, (kv, options)
    for i in range(len(requests)):
        assert_agrees(cpu[i], gpu[i], margin, (kv, options, i))
    products: dict[str, int] = info["products"]
    return products


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3"])
def test_tokens_of_the_cpu(
    tiny: Callable[..., Path], cuda_emulated: str, arch: str, kv: str
) -> None:
    compare(tiny(arch), cuda_emulated, kv)


@pytest.mark.parametrize("arch", EXPERTS)
def test_tokens_of_experts(tiny: Callable[..., Path], cuda_emulated: str, arch: str) -> None:
    """Routing and gathering on the device; the second has a shared expert with a gate."""
    compare(tiny(arch), cuda_emulated, "bf16")


@pytest.mark.parametrize("kv", LATENT)
def test_tokens_of_latent_attention(tiny: Callable[..., Path], cuda_emulated: str, kv: str) -> None:
    """DeepSeek-V3: a matrix for each head, one stored row that is K and V, grouped routing."""
    shape = {"kv_lora_rank": 144, "qk_rope_head_dim": 64} if kv == "fp8_ds_mla" else {}
    compare(tiny("deepseek_v3", **shape), cuda_emulated, kv)


@pytest.mark.parametrize("arch", first_fast("gemma3", "deepseek_v3", "qwen2_moe"))
def test_tokens_of_the_reference_arithmetic(
    tiny: Callable[..., Path], cuda_emulated: str, arch: str
) -> None:
    compare(tiny(arch), cuda_emulated, "float32", margin=1e-3, compute_dtype="float32")


@pytest.mark.parametrize("arch, window", WINDOWED)
def test_tokens_with_windows(
    tiny: Callable[..., Path], cuda_emulated: str, arch: str, window: int
) -> None:
    """gpt-oss has sinks and a window in every other layer, Gemma 2 caps logits of attention and of
    the head, of Mistral all layers have one: of less than a page, no whole pages, and more than a
    chunk of keys."""
    n_tokens = window + 40 if window > 100 else 66
    compare(tiny(arch, sliding_window=window), cuda_emulated, "bf16", longest=n_tokens)


@pytest.mark.parametrize("kv", QUERIES)
def test_tokens_with_quantized_queries(
    tiny: Callable[..., Path], cuda_emulated: str, kv: str
) -> None:
    compare(tiny("qwen3"), cuda_emulated, kv, margin=MARGIN_OF_E4M3, query_dtype="fp8_e4m3")


@pytest.mark.parametrize("kv", OTHER_KV)
def test_tokens_of_other_caches(tiny: Callable[..., Path], cuda_emulated: str, kv: str) -> None:
    """Of bf16_stochastic the generator is the CPU's, by layer, head, position and channel."""
    compare(tiny("llama"), cuda_emulated, kv, margin=MARGIN_OF_E4M3)


def test_lanes_are_compared_as_on_the_cpu(tiny: Callable[..., Path], cuda_emulated: str) -> None:
    """Log-probabilities, ranks and KL of lanes, that of rounding up or down at random among them:
    what the stored codes make of them, as far as the CPU's and this device's are the same."""
    kinds = ["bf16", "bf16_stochastic", "fp8_e4m3"]
    prompt = np.random.default_rng(5).integers(0, 512, 40).astype(np.int32)
    found = {}
    for device, at in (("cpu", None), ("cuda-emulated", cuda_emulated)):
        engine = open_engine(
            tiny("llama"), kv_tokens=LARGE, lanes=[[(kind, kind)] * 2 for kind in kinds],
            device=device, device_library=at,
        )  # fmt: skip
        found[device] = engine.score_lanes(prompt)
        engine.close()
    cpu, gpu = found["cpu"], found["cuda-emulated"]
    for lane, kind in enumerate(kinds):
        for name in ("logprobs", "kl", "kl_reverse"):
            apart = np.abs(getattr(cpu, name)[lane] - getattr(gpu, name)[lane])
            assert np.median(apart) < 1e-6 and apart.max() < MARGIN, (kind, name)
        assert np.mean(cpu.top1[lane] == gpu.top1[lane]) > 0.9, kind
    assert 0 < np.median(gpu.kl[1]) < np.median(gpu.kl[2]) / 10


@pytest.mark.parametrize("method", METHODS_IN_CODES)
def test_tokens_with_weights_in_codes(
    tiny: Callable[..., Path], cuda_emulated: str, method: str
) -> None:
    """Packed weights, and inputs quantized where the method has it."""
    path = tiny("llama", hidden_size=128, intermediate_size=256)
    target = METHODS[method].target
    margin = MARGIN_OF_E4M3 if target.endswith("fp8") else MARGIN
    options: dict[str, Any] = {"online": target, "activation_quant": "checkpoint"}
    compare(path, cuda_emulated, "bf16", margin=margin, **options)


def test_tokens_of_fp8_by_fp8(tiny: Callable[..., Path], cuda_emulated: str) -> None:
    """Codes of weights and inputs multiplied as they are, experts' decoded: the values are those
    that the CPU multiplies. So are those of the same device, which decodes."""
    target = METHODS["w8a8_fp8"].target
    options: dict[str, Any] = {"online": target, "activation_quant": "checkpoint"}
    for arch, as_codes in (("llama", 14), ("qwen3_moe", 18)):
        path = tiny(arch)
        products = compare(
            path, cuda_emulated, "bf16", margin=MARGIN_OF_E4M3, native_fp8=True, **options
        )
        assert products["cublaslt fp8"] == as_codes


@pytest.mark.parametrize("method", ["mxfp8", "nvfp4"])
def test_tokens_of_blocks_by_blocks(
    tiny: Callable[..., Path], cuda_emulated: str, method: str
) -> None:
    """Codes with scales by block on both sides, multiplied as they are."""
    path = tiny("llama", hidden_size=128, intermediate_size=256)
    products = compare(
        path, cuda_emulated, "bf16", margin=MARGIN_OF_E4M3, native_fp8=True, native_fp4=True,
        online=METHODS[method].target, activation_quant="checkpoint",
    )  # fmt: skip
    assert products == {f"cublaslt {method}": 14, "cublaslt bf16": 2}


def test_same_bits_of_blocks_of_128(tiny: Callable[..., Path], cuda_emulated: str) -> None:
    """Alone and together. Not the CPU's bits: there the inputs, fp8 codes times scales that are no
    powers of two, are rounded to bf16."""
    path = tiny("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    engine = open_engine(
        path, kv_tokens=LARGE, device="cuda-emulated", device_library=cuda_emulated,
        online=METHODS["fp8_block"].target, activation_quant="checkpoint", native_fp8=True,
        prefix_cache=False,
    )  # fmt: skip
    requests = greedy(2, 512, max_tokens=2)
    alone = [run(engine, [request])[0] for request in requests]
    together = run(engine, requests)
    assert engine.info["products"] == {"cublaslt fp8 by 128": 7, "cublaslt bf16": 2}
    engine.close()
    for i, result in enumerate(alone):
        assert difference(result, together[i]) == "", i


@pytest.mark.parametrize("method, path_of", [("int4", "int8"), ("int8", "cublaslt int8")])
def test_tokens_with_inputs_in_int8(
    tiny: Callable[..., Path], cuda_emulated: str, method: str, path_of: str
) -> None:
    """Groups by our kernel, rows by cuBLASLt, with the sums of the CPU."""
    path = tiny("llama", hidden_size=128, intermediate_size=256)
    products = compare(
        path, cuda_emulated, "bf16", online=METHODS[method].target, activation_quant="int8"
    )
    assert products[path_of] == 14


@pytest.mark.slow
def test_same_bits_in_any_batch(tiny: Callable[..., Path], cuda_emulated: str) -> None:
    """Together with others, cut into small chunks, out of a reused prefix: the same bits."""
    path = tiny("gemma3")
    requests = mixed_requests(6, 200, seed=3, longest=30)
    options: dict[str, Any] = {"device": "cuda-emulated", "device_library": cuda_emulated}
    alone = {}
    engine = open_engine(path, kv_tokens=LARGE, prefix_cache=False, **options)
    for i, request in enumerate(requests):
        alone[i] = run(engine, [request])[0]
    engine.close()
    engine = open_engine(path, kv_tokens=LARGE, chunk_tokens=13, **options)
    together = run(engine, requests, reversed(range(len(requests))), arrive=3)
    engine.close()
    for i in range(len(requests)):
        assert difference(alone[i], together[i]) == "", i
