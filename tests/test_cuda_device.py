"""Which GPU, its library and its memory: what is there, what an engine takes of it, what is said
where something is missing. On the emulated device, whose memory QKV_EMULATED_KIB sets."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from core_runs import Request, difference, open_engine, run
from qkv import _core, options

ROOT = Path(__file__).resolve().parents[1]
KIB = 1 << 10


def some_requests(n: int) -> list[Request]:
    rng = np.random.default_rng(n)
    greedy = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    return [Request(rng.integers(0, 512, 20 + 9 * i).astype(np.int32), greedy) for i in range(n)]


# The device's name, and its library.


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:100", "cuda:0 ", "CUDA:0", "gpu", "", 0]
)
def test_what_is_no_device(tiny: Callable[..., Path], device: Any) -> None:
    with pytest.raises(ValueError, match="must be one of auto, cpu, cuda:0"):
        qkv.Engine(tiny("llama"), device=device)


def test_a_gpu_that_is_not_there(tiny: Callable[..., Path], cuda_emulated: str) -> None:
    for device in ("cuda:2", "cuda:7", "cuda:99"):
        with pytest.raises(_core.UnsupportedError, match=f"{device}: there are 2 emulated GPUs"):
            open_engine(tiny("llama"), kv_tokens=64, device=device, device_library=cuda_emulated)


def test_an_installation_without_the_library(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "__file__", str(tmp_path / "_core.so"))
    assert options.backends() == ["cpu"]
    with pytest.raises(qkv.UnsupportedError, match=r"no _qkv_cuda\.so.*QKV_CUDA=1.*device='cpu'"):
        qkv.Engine(tiny("llama"), device="cuda:0")


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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("static const unsigned table[100] = {10, 304}; return table;",
         "built for backend version 10 of 304 bytes, .*: install the package again"),
        ("return 0;", "gives no table"),
    ],
)  # fmt: skip
def test_a_library_of_another_build(
    tiny: Callable[..., Path], tmp_path: Path, body: str, message: str
) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(f"const void *qkv_cuda_backend(void) {{ {body} }}")
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.raises(_core.UnsupportedError, match=message):
        open_engine(tiny("llama"), kv_tokens=64, device="cuda:0", device_library=library)


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


def test_refusals(tiny: Callable[..., Path], cuda_emulated: str) -> None:
    """What this backend does not do is said before a weight is loaded."""
    path = tiny("llama")
    device: dict[str, Any] = {"device": "cuda-emulated", "device_library": cuda_emulated}
    with pytest.raises(_core.UnsupportedError, match="none of the .* is in integer codes"):
        open_engine(path, kv_tokens=64, activation_quant="int8", **device)
    wide = tiny("llama", head_dim=640)
    with pytest.raises(_core.UnsupportedError, match="k_dim.*640"):
        open_engine(wide, kv_tokens=64, **device)
    with pytest.raises(ValueError, match="isa scalar: of the CPU backend"):
        open_engine(path, kv_tokens=64, isa="scalar", **device)
    lane = [("float32", "float32")] * 2
    with pytest.raises(_core.UnsupportedError, match="float32 is the reference arithmetic's"):
        open_engine(path, kv_tokens=64, lanes=[lane], **device)
    with pytest.raises(_core.UnsupportedError, match="activations in int8: not with .* float32"):
        open_engine(path, kv_tokens=64, activation_quant="int8", compute_dtype="float32", **device)


# Two of them.


def test_engines_on_two_gpus(tiny: Callable[..., Path], cuda_emulated: str) -> None:
    """Used by turns, and in other threads than the ones that opened them: CUDA has a current GPU
    for each thread, which was that of the engine opened last."""
    path, requests = tiny("llama"), some_requests(2)
    engines = [
        open_engine(path, kv_tokens=256, device=device, device_library=cuda_emulated)
        for device in ("cuda:0", "cuda:1")
    ]
    assert [engine.info["device"] for engine in engines] == ["cuda:0", "cuda:1"]
    found: list[dict[int, _core.Result]] = [run(engine, requests) for engine in engines]
    thread = threading.Thread(target=lambda: found.extend(run(e, requests) for e in engines[::-1]))
    thread.start()
    thread.join()
    for engine in engines:
        engine.close()
    assert len(found) == 4
    for results in found:
        assert all(difference(results[i], found[0][i]) == "" for i in results)


# Its memory.


def noted(seen: list[tuple[int, int]]) -> Callable[[int, int], int]:
    """A size for _core.Engine's kv_tokens that notes what it is told."""

    def size(before: int, now: int) -> int:
        seen.append((before, now))
        return 64

    return size


@pytest.fixture
def memory(cuda_emulated: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many KiB the device has. A core built elsewhere has no library beside it."""
    monkeypatch.setattr(options, "device_library", lambda device: cuda_emulated)
    return lambda kib: monkeypatch.setenv("QKV_EMULATED_KIB", str(kib))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("lanes", ["bf16", ["bf16", "fp8_e4m3"]])
def test_the_pool_is_what_the_weights_leave(
    tiny: Callable[..., Path], memory: Callable[[int], None], arch: str, lanes: Any
) -> None:
    """Of all that the device has, weights, activations and cache take 0.85, or what is asked for:
    the largest pool of whole pages, windows included."""
    memory(16 * KIB)
    for asked in (None, 0.5):
        with qkv.Engine(
            tiny(arch),
            device="cuda-emulated",
            kv_cache_dtype=lanes,
            max_running=4,
            mem_fraction=asked,
        ) as engine:
            held, info = engine.memory(), engine.info
            assert f"={info['kv_tokens']}" in repr(engine)
            page = 16 * (held["kv"] - held["kv_windows"]) / info["kv_tokens"]
            taken, most = held["weights"] + held["kv"], (asked or 0.85) * 16 * KIB * KIB
            other = held["activations"] + 64 * KIB  # and small arrays
            assert most - 1.1 * page - other < taken <= most
            output = engine.generate([[5, 6, 7]], qkv.SamplingParams(max_tokens=2), progress=False)
            assert len(output[0].token_ids) == 2


def test_what_the_device_has_no_room_for(
    tiny: Callable[..., Path], memory: Callable[[int], None]
) -> None:
    """What it is, how much there is, and the way out; and the next engine finds all of it free."""
    path = tiny("llama")
    gpu: dict[str, Any] = {"device": "cuda-emulated", "max_running": 4}
    memory(256)
    weights = r"no room for the weights \(quantization=.*\d+ bytes of device memory: .* are free"
    with pytest.raises(MemoryError, match=weights):
        qkv.Engine(path, **gpu)
    memory(4 * KIB)
    with pytest.raises(MemoryError, match=r"kv_tokens=1000000: .* at most \d+ fit"):
        qkv.Engine(path, kv_tokens=10**6, **gpu)
    with pytest.raises(MemoryError, match="no room for a KV pool.*larger mem_fraction"):
        qkv.Engine(path, mem_fraction=0.05, **gpu)
    with qkv.Engine(path, mem_fraction=1.0, **gpu) as engine:
        with pytest.raises(MemoryError, match=r"no room for a step \(chunk_tokens="):
            engine.generate([list(range(5, 200))], progress=False)
        memory(64 * KIB)  # another process went
        assert engine.generate([[5, 6, 7]], progress=False)[0].error is None
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        memory(64 * KIB)
        one = open_engine(
            path, kv_tokens=noted(seen), device="cuda-emulated",
            device_library=options.device_library("cuda-emulated"),
        )  # fmt: skip
        one.close()
    assert seen[0] == seen[1] and 64 * KIB * KIB >= seen[0][0] > seen[0][1] > 0


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (lambda before, now: 8, ValueError, "kv_tokens: 8"),
        (lambda before, now: -1, ValueError, "kv_tokens"),
        (lambda before, now: "64", TypeError, "kv_tokens"),
        (lambda before: 64, TypeError, "positional"),
        (lambda before, now: 1 // 0, ZeroDivisionError, "by zero"),
        (lambda before, now: 2**40, ValueError, "kv_tokens"),
        (lambda before, now: 2**28, MemoryError, r"no room for the KV pool \(kv_tokens="),
    ],
)
def test_sizes_that_are_none(
    tiny: Callable[..., Path], cuda_emulated: str, size: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_engine(
            tiny("llama"), kv_tokens=size, device="cuda-emulated", device_library=cuda_emulated
        )


def test_memory_of_a_host_is_not_the_devices(tiny: Callable[..., Path]) -> None:
    seen: list[tuple[int, int]] = []
    engine = open_engine(tiny("llama"), kv_tokens=noted(seen))
    assert engine.info["kv_tokens"] == 64 and seen == [(0, 0)]
    engine.close()


@pytest.mark.parametrize("compute_dtype", ["bf16", "float32"])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_weight_that_is_not_finite(
    edited: Callable[..., Path], cuda_emulated: str, dtype: str, compute_dtype: str
) -> None:
    """The CPU's error (test_bad_input.py)."""
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name][3, 5] = np.nan

    folder = edited(spoil, dtype)
    with pytest.raises(qkv.CheckpointError, match=re.escape(f"{name}: row 3, column 5 is nan")):
        open_engine(
            folder, kv_tokens=64, device="cuda-emulated", device_library=cuda_emulated,
            compute_dtype=compute_dtype,
        )  # fmt: skip
