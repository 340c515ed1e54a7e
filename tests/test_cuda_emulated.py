"""Whole engines on the CUDA backend, its kernels run by the emulation: the tokens of the CPU
backend wherever two were not almost equally likely, and the same bits in any batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_runs import LARGE, Request, difference, mixed_requests, open_engine, run
from qkv import _core
from qkv.quantization import METHODS

ROOT = Path(__file__).resolve().parents[1]


def first_fast(*names: str) -> list[Any]:
    """The others are slow: under sanitizers, which see nothing of the library, one is enough."""
    return [names[0], *(pytest.param(name, marks=pytest.mark.slow) for name in names[1:])]


ARCHS = first_fast("llama", "qwen2", "qwen3", "mistral", "gemma3")
EXPERTS = first_fast("qwen3_moe", "qwen2_moe")
LATENT = first_fast("fp8_e4m3", "bf16", "nvfp4", "fp4_mx_block16", "fp8_ds_mla")
METHODS_IN_CODES = first_fast("int4", "int8", "w8a8_fp8", "nvfp4", "mxfp4")
# Two orders of additions differ by 1e-6 and mostly stay there. Where such a difference crosses the
# middle between two codes, it becomes a step of the code: a value of bf16 in the cache moves a tiny
# model's logits by a few hundredths, an input in e4m3 (steps of an eighth) by ten times that. Both
# are rare, so the median must be as small as the differences are without them.
MARGIN = 0.1
MARGIN_OF_E4M3 = 0.5
MEDIAN = 1e-4


def greedy(n: int, vocab: int, *, max_tokens: int) -> list[Request]:
    rng = np.random.default_rng(n)
    lengths = [5, 17, 40, 66, 16, 1][:n]
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
    path: Path, library: str, kv: str, *, margin: float = MARGIN, **options: Any
) -> dict[str, int]:
    """Greedy continuations of a few prompts on the CPU and on the emulated device. How many of its
    matrices are multiplied in which way."""
    checkpoint = _core.Checkpoint(str(path))
    config = checkpoint.model_config()
    checkpoint.close()
    lane = [(kv, kv)] * config["n_layers"]
    requests = greedy(4, config["vocab"], max_tokens=8)
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


def test_refusals(tiny: Callable[..., Path], cuda_emulated: str) -> None:
    """What this backend does not do is said before a weight is loaded."""
    path = tiny("llama")
    options: dict[str, Any] = {"device": "cuda-emulated", "device_library": cuda_emulated}
    with pytest.raises(_core.UnsupportedError, match="none of the .* is in integer codes"):
        open_engine(path, kv_tokens=64, activation_quant="int8", **options)
    wide = tiny("llama", head_dim=640)
    with pytest.raises(_core.UnsupportedError, match="k_dim.*640"):
        open_engine(wide, kv_tokens=64, **options)
    with pytest.raises(ValueError, match="isa scalar: of the CPU backend"):
        open_engine(path, kv_tokens=64, isa="scalar", **options)
    with pytest.raises(_core.UnsupportedError, match="one emulated GPU"):
        open_engine(path, kv_tokens=64, device="cuda:1", device_library=cuda_emulated)


def test_a_library_that_is_none(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    text = tmp_path / "text.so"
    text.write_text("no library")
    for library, message in ((text, "backend library"), (_core.__file__, "no symbol")):
        with pytest.raises(_core.UnsupportedError, match=message):
            open_engine(path, kv_tokens=64, device="cuda:0", device_library=library)
    with pytest.raises(ValueError, match='must be "cuda:0" to "cuda:99"'):
        open_engine(path, kv_tokens=64, device="cuda:x", device_library=text)
    with pytest.raises(_core.UnsupportedError, match="with a library"):
        open_engine(path, kv_tokens=64, device="cuda:0")


def test_the_library_where_no_gpu_is(tiny: Callable[..., Path]) -> None:
    """It opens without a driver and says what is missing."""
    library = ROOT / "build/cuda/_qkv_cuda.so"
    if not library.is_file():
        pytest.skip("`make cuda` has not built it")
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    with pytest.raises(_core.UnsupportedError, match="cuda:0: no GPU"):
        open_engine(tiny("llama"), kv_tokens=64, device="cuda:0", device_library=library)


def test_only_the_backend_is_exported(cuda_emulated: str) -> None:
    """Nothing in the library can be taken for the core module's, nor the other way round."""
    command = ["nm", "-D", "--defined-only", cuda_emulated]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["qkv_cuda_backend"]
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", str(_core.__file__)], capture_output=True, text=True
    )
    assert "cuda" not in done.stdout.lower() and sys.platform == "linux"
