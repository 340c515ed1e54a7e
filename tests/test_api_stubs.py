"""The C module is what _core.pyi says; the package is typed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import qkv

ROOT = Path(__file__).resolve().parents[1]


def has(module: str) -> bool:
    return (
        subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode
        == 0
    )


def test_stub_agrees_with_the_module() -> None:
    if not has("mypy.stubtest"):
        pytest.skip("mypy is not installed (make check installs it)")
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "qkv._core"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


def test_package_says_that_it_is_typed() -> None:
    folder = Path(qkv.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_core.pyi").exists()


# Names, order and defaults that users' code relies on.
ENGINE_OPTIONS = {
    "kv_cache_dtype": "auto",
    "quantization": None,
    "prefill_quantization": None,
    "quantization_param_path": None,
    "fp8_gemm_backend": "auto",
    "fp4_gemm_backend": "auto",
    "activation_quant": "checkpoint",
    "compute_dtype": "bf16",
    "query_dtype": "bf16",
    "mla_prefill": "absorbed",
    "device": "auto",
    "threads": None,
    "mem_fraction": None,
    "kv_tokens": None,
    "max_running": None,
    "chunk_tokens": 512,
    "max_model_len": None,
    "prefix_cache": True,
    "schedule": "offline",
    "tokenizer": None,
    "seed": None,
}
PARAMS = {
    "max_tokens": 128,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "n": 1,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "bad_words": (),
    "skip_special_tokens": True,
    "structured_outputs": None,
}


@pytest.mark.parametrize(
    ("function", "options"),
    [(qkv.Engine, ENGINE_OPTIONS), (qkv.SamplingParams, PARAMS)],
    ids=["Engine", "SamplingParams"],
)
def test_options_and_defaults(function: type, options: dict[str, object]) -> None:
    found = inspect.signature(function).parameters
    keywords = {k: p.default for k, p in found.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == options


def test_public_names() -> None:
    for name in (
        "Engine SamplingParams RequestOutput Completion Metrics Score inspect plan calibrate Error"
        " CheckpointError UnsupportedError OutOfPages"
    ).split():
        assert name in qkv.__all__ and hasattr(qkv, name), name
    for kind in (qkv.CheckpointError, qkv.UnsupportedError, qkv.OutOfPages):
        assert issubclass(kind, qkv.Error)
    for method in "generate stream chat score kv_scales memory close tokenizer info".split():
        assert hasattr(qkv.Engine, method), method


def test_import_is_light() -> None:
    """No torch, no transformers, no plotting, no hub client at import time."""
    code = (
        "import sys, qkv, qkv.cli\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pandas', 'huggingface_hub', 'scipy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
