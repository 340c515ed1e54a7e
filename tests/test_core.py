"""qkv._core: what the binding promises, on tiny models. Values are tested elsewhere."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from core_runs import difference, open_engine
from qkv import _core

EOS = 508  # of the tiny models
PROMPT = np.arange(40, 59, dtype=np.int32)


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@pytest.fixture
def path(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


@pytest.fixture
def engine(path: Path) -> Iterator[_core.Engine]:
    made = open_engine(path, kv_tokens=1024, threads=1)
    yield made
    made.close()


def run_dry(engine: _core.Engine) -> list[_core.Step]:
    steps: list[_core.Step] = []
    while True:
        step = engine.step()
        if step.n_rows == 0:
            return steps
        steps.append(step)


def generate(engine: _core.Engine, tokens: NDArray[np.int32], **options: Any) -> _core.Result:
    options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | options
    ident = engine.add(tokens, **options)
    run_dry(engine)
    return engine.take(ident)


# ---- the module -----------------------------------------------------------------------------


def test_exceptions() -> None:
    for kind in (_core.CheckpointError, _core.UnsupportedError, _core.OutOfPages):
        assert issubclass(kind, _core.Error)
        assert kind.__module__ == "qkv" and getattr(qkv, kind.__name__) is kind
    assert not issubclass(_core.Error, OSError)


def test_types_cannot_be_changed_or_subclassed() -> None:
    kinds: tuple[Any, ...] = (_core.Engine, _core.Checkpoint)
    for kind in kinds:
        with pytest.raises(TypeError):
            kind.extra = 1
        with pytest.raises(TypeError):
            type("Child", (kind,), {})


def test_docstrings_have_signatures() -> None:
    objects: list[Any] = [_core.Engine, _core.Checkpoint, _core.dequantize, _core.quantize]
    objects += [_core.Engine.add, _core.Engine.step, _core.Engine.take, _core.Checkpoint.tensors]
    for thing in objects:
        assert thing.__doc__ and thing.__text_signature__


def test_lists() -> None:
    isas = _core.isas()
    assert isas[-1] == ("scalar", True)
    formats = dict(_core.formats())
    assert formats["BF16"] and formats["Q4_K"] and not formats["I32"]
    bits = dict(_core.kv_formats())
    assert bits["bf16"] == 16 and bits["float32"] == 32 and 4 < bits["nvfp4"] <= 4.5
    assert _core.threads_available() >= 1


ISA_OF_ENGINE = """
import os, qkv, sys
for _ in range(2):
    try:
        with qkv.Engine(sys.argv[1], kv_tokens=64, threads=1) as engine:
            print(engine.info["isa"])
    except qkv.UnsupportedError as error:
        print(error)
    os.environ["QKV_ISA"] = "amx"
"""
SMALL_SIGNAL_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
"""


def test_linux_decides_on_tiles(path: Path) -> None:
    """The signal stack of Python's faulthandler, which pytest has enabled, is large enough; where
    one is too small there is no amx, and info says what there is."""

    def isas(*command: str) -> list[str]:
        command = (sys.executable, *command, str(path))
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(
            "\n"
        )

    usable = [name for name, is_usable in _core.isas() if is_usable]
    plain = isas("-c", ISA_OF_ENGINE)
    assert plain[0] == usable[0]
    if usable[0] != "amx":
        pytest.skip("the processor or the system lacks AMX")
    assert isas("-X", "faulthandler", "-c", ISA_OF_ENGINE) == plain == ["amx", "amx", ""]
    refused = isas("-c", SMALL_SIGNAL_STACK + ISA_OF_ENGINE)
    assert refused[0] == usable[1]
    assert '"amx": this machine has ' + ", ".join(usable[1:]) in refused[1]


@pytest.mark.parametrize("name", [name for name, has_codec in _core.formats() if has_codec])
def test_codec_round_trip(name: str) -> None:
    values = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    try:
        blocks = _core.quantize(name, values)
    except _core.UnsupportedError:
        pytest.skip(f"{name} is only read")
    assert blocks.dtype == np.uint8 and blocks.ndim == 1 and blocks.flags.owndata
    again = _core.dequantize(name, blocks)
    assert again.dtype == np.float32 and again.shape == (512,)
    assert np.abs(again - values).max() < {"F32": 1e-9, "F16": 2e-3, "BF16": 2e-2}.get(name, 0.5)


def test_codec_arguments() -> None:
    blocks = np.zeros(34, np.uint8)
    assert _core.dequantize(format="Q8_0", blocks=blocks).shape == (32,)
    bad: list[tuple[str, Any, type[Exception], str]] = [
        ("Q8_9", blocks, ValueError, "Q8_9"),
        ("Q8_0", blocks[:33], ValueError, "33 bytes.*34"),
        ("Q8_0", blocks.astype(np.int8), TypeError, "int8.*uint8"),
        ("Q8_0", np.zeros((34, 2), np.uint8)[:, 0], ValueError, "contiguous"),
        ("Q8_0", b"\0" * 34, TypeError, "bytes"),
        ("I32", np.zeros(4, np.uint8), _core.UnsupportedError, "I32"),
    ]
    for name, array, kind, words in bad:
        with pytest.raises(kind, match=words):
            _core.dequantize(name, array)
    with pytest.raises(ValueError, match="33 elements.*32"):
        _core.quantize("Q8_0", np.zeros(33, np.float32))
    assert _core.dequantize("Q8_0", np.zeros(0, np.uint8)).shape == (0,)


# ---- checkpoints ----------------------------------------------------------------------------


def test_checkpoint(path: Path) -> None:
    checkpoint = _core.Checkpoint(str(path))
    assert checkpoint.container == "safetensors"
    assert checkpoint.folder == str(path)
    assert checkpoint.files == [str(path / "model.safetensors")]
    assert checkpoint.metadata() == {}
    tensors = {name: (fmt, shape, n) for name, fmt, shape, n in checkpoint.tensors()}
    assert tensors["model.embed_tokens.weight"] == ("BF16", (512, 64), 65536)
    values = checkpoint.dequantize("model.embed_tokens.weight")
    assert values.shape == (512, 64) and values.dtype == np.float32 and values.flags.owndata
    config = checkpoint.model_config()
    assert config["arch"] == "LlamaForCausalLM"
    assert config["n_layers"] == 2 and config["hidden"] == 64 and config["vocab"] == 512
    assert config["eos_ids"] == [EOS]
    assert config["layers"] == [{"window": 0, "rope": 0}] * 2
    assert config["ropes"][0]["theta"] == 10000.0
    with pytest.raises(KeyError, match="nothing.weight"):
        checkpoint.dequantize("nothing.weight")
    checkpoint.close()
    checkpoint.close()
    for use in (checkpoint.tensors, checkpoint.metadata, checkpoint.model_config):
        with pytest.raises(_core.Error, match="closed"):
            use()
    with pytest.raises(_core.Error, match="closed"):
        _ = checkpoint.folder
    assert values[3, 5] != 0  # it does not lie in the file that was closed


def test_layers_of_a_sliding_window_model(tiny: Callable[..., Path]) -> None:
    config = _core.Checkpoint(str(tiny("gemma3"))).model_config()
    assert [layer["window"] for layer in config["layers"]] == [24, 24, 0, 24]
    assert len({layer["rope"] for layer in config["layers"]}) == 2
    assert config["post_norms"] and config["qk_norm"] and config["act"] == "gelu_tanh"


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-model"):
        _core.Checkpoint(str(tmp_path / "no-such-model"))
    with pytest.raises(ValueError, match="null"):
        _core.Checkpoint("a\0b")
    with pytest.raises(TypeError):
        _core.Checkpoint(3)  # type: ignore[arg-type]


# ---- opening --------------------------------------------------------------------------------


def lanes(n_layers: int = 2, kv: str = "bf16") -> list[list[tuple[str, str]]]:
    return [[(kv, kv)] * n_layers]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"kv_formats": []}, ValueError, "kv_formats: 0 lanes"),
        ({"kv_formats": lanes(3)}, ValueError, "3 layers.*has 2"),
        ({"kv_formats": [*lanes(2), *lanes(1)]}, ValueError, "lane 1 has 1 layers, must be 2"),
        ({"kv_formats": lanes(2, "fp7")}, ValueError, "fp7"),
        ({"kv_formats": [[("bf16",)] * 2]}, ValueError, "layer 0 has 1 names"),
        ({"kv_formats": 5}, TypeError, "kv_formats"),
        ({"kv_formats": [[1, 2]]}, TypeError, "pair"),
        ({"kv_tokens": 15}, ValueError, "kv_tokens: 15, must be 16"),
        ({"kv_tokens": 2.5}, TypeError, "kv_tokens: float"),
        ({"kv_tokens": 1 << 70}, ValueError, "kv_tokens"),
        ({"threads": -1}, ValueError, "threads: -1"),
        ({"compute_dtype": "float16"}, ValueError, "compute_dtype: 'float16'"),
        ({"device": "tpu"}, _core.UnsupportedError, "tpu"),
        ({"isa": "sse9"}, _core.UnsupportedError, "sse9"),
        ({"max_running": 0}, ValueError, "max_running: 0"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens: 0"),
        ({"max_model_len": 1025}, ValueError, "max_model_len: 1025.*1024"),
        ({"progress": 3}, TypeError, "progress: int"),
        ({"log": "x"}, TypeError, "log: str"),
        ({"no_such_option": 1}, TypeError, "no_such_option"),
    ],
    ids=str,
)
def test_bad_options(
    path: Path, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {"kv_formats": lanes(), "kv_tokens": 64} | options
    with pytest.raises(kind, match=words):
        _core.Engine(str(path), **given)


def test_missing_options(path: Path) -> None:
    with pytest.raises(TypeError, match="kv_formats"):
        _core.Engine(str(path), kv_tokens=64)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="kv_tokens"):
        _core.Engine(str(path), kv_formats=lanes())  # type: ignore[call-arg]


def test_info_and_memory(path: Path) -> None:
    engine = open_engine(path, kv_tokens=100, threads=1, isa="scalar", max_model_len=200)
    info = engine.info
    assert info["device"] == "cpu" and info["isa"] == "scalar" and info["threads"] == 1
    assert info["kv_tokens"] == 96 and info["max_model_len"] == 200 and info["n_lanes"] == 1
    assert info["max_running"] == 64 and info["chunk_tokens"] == 512
    assert info["compute_dtype"] == info["query_dtype"] == "bf16"
    assert info["config"]["vocab"] == 512
    memory = engine.memory()
    assert set(memory) == set(
        "weights activations kv kv_windows kv_lanes kv_resident hidden scratch".split()
    )
    assert memory["kv_lanes"] == [memory["kv"]] and memory["kv_resident"] == 0
    assert memory["kv"] >= 96 * 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, channels, bytes
    assert memory["weights"] > 0 and memory["activations"] > 0
    engine.close()


def test_progress_and_log(path: Path) -> None:
    calls: list[tuple[int, int]] = []
    lines: list[tuple[int, str]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    engine = open_engine(
        path, kv_tokens=64, progress=progress, log=lambda level, line: lines.append((level, line))
    )
    engine.close()
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert (
        calls[-1][0]
        == calls[-1][1]
        == (path / "model.safetensors").stat().st_size
        - (8 + int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little"))
    )
    assert all(level in (0, 1, 2) and isinstance(line, str) for level, line in lines)


def test_progress_stops_loading(path: Path) -> None:
    seen = []

    def stop(done: int, total: int) -> bool:
        seen.append(done)
        return len(seen) < 3

    with pytest.raises(_core.Error, match="interrupted"):
        open_engine(path, kv_tokens=64, progress=stop)
    assert len(seen) == 3


def test_callbacks_raise(path: Path) -> None:
    def fail(*_: object) -> None:
        raise LookupError("from the callback")

    with pytest.raises(LookupError, match="from the callback"):
        open_engine(path, kv_tokens=64, progress=fail)

    def interrupt(done: int, total: int) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        open_engine(path, kv_tokens=64, progress=interrupt)


def test_log_raises(path: Path) -> None:
    lines: list[str] = []

    def fail(level: int, line: str) -> None:
        lines.append(line)
        raise LookupError(line)

    try:
        open_engine(path, kv_tokens=64, log=fail).close()
    except LookupError as error:
        assert [str(error)] == lines  # the first one, and no call after it
    else:
        assert not lines


def test_signals_stop_loading(tiny: Callable[..., Path]) -> None:
    """Without a progress callback too: the engine looks for signals itself."""
    path = tiny("llama", num_hidden_layers=64, hidden_size=128, intermediate_size=512)
    loaded = False

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, handler)
    n_layers = _core.Checkpoint(str(path)).model_config()["n_layers"]
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            _core.Engine(str(path), kv_formats=lanes(n_layers), kv_tokens=64, threads=1)
            loaded = True
            signal.pause()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not loaded


# ---- life -----------------------------------------------------------------------------------


def test_close(path: Path) -> None:
    engine = open_engine(path, kv_tokens=64)
    ident = engine.add(PROMPT, max_tokens=4)
    engine.step()
    engine.close()
    engine.close()
    uses: list[Callable[[], object]] = [
        engine.step,
        engine.memory,
        engine.counts,
        engine.flush,
        lambda: engine.info,
        lambda: engine.add(PROMPT),
        lambda: engine.take(ident),
        lambda: engine.finish(ident, 0),
        lambda: engine.abort(ident),
    ]
    for use in uses:
        with pytest.raises(_core.Error, match="closed"):
            use()


def test_two_engines(path: Path, tiny: Callable[..., Path]) -> None:
    a = open_engine(path, kv_tokens=128, threads=1)
    b = open_engine(tiny("qwen3"), kv_tokens=128, threads=2)
    alone_a, alone_b = generate(a, PROMPT), generate(b, PROMPT)
    in_a = a.add(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)
    in_b = b.add(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)
    while a.step().n_rows + b.step().n_rows:
        pass
    assert difference(a.take(in_a), alone_a) == ""
    a.close()
    assert difference(b.take(in_b), alone_b) == ""
    assert difference(generate(b, PROMPT), alone_b) == ""
    b.close()


def test_one_thread_at_a_time(tiny: Callable[..., Path]) -> None:
    """A second thread gets an error at once; it is not let in and it does not wait. That it runs at
    all meanwhile shows that a step is without the GIL."""
    path = tiny("llama", num_hidden_layers=16)
    engine = open_engine(path, kv_tokens=2048, threads=1, chunk_tokens=1024)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 500, 1000, dtype=np.int32) for _ in range(2)]
    for prompt in prompts:
        engine.add(prompt, max_tokens=8, temperature=0.0)
    steps: list[_core.Step] = []
    worker = threading.Thread(target=lambda: steps.extend(run_dry(engine)))
    refused = {"counts": 0, "close": 0, "step": 0}
    worker.start()
    while worker.is_alive() and min(refused.values()) == 0:
        try:
            engine.counts()
        except _core.Error as error:
            assert "busy" in str(error)
            refused["counts"] += 1
            for name in ("close", "step"):
                # If the step ends right here, the call is let in: look again.
                if engine_is_busy(engine):
                    try:
                        getattr(engine, name)()
                    except _core.Error as second:
                        refused[name] += "busy" in str(second)
    worker.join()
    assert min(refused.values()) > 0
    engine.close()


def engine_is_busy(engine: _core.Engine) -> bool:
    try:
        engine.memory()
    except _core.Error:
        return True
    return False


def test_fork(path: Path) -> None:
    engine = open_engine(path, kv_tokens=256, threads=2)
    ident = engine.add(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
    engine.step()
    child = os.fork()
    if child == 0:
        ok = 0
        for use in (engine.step, lambda: engine.add(PROMPT), lambda: engine.abort(ident)):
            try:
                use()
            except _core.Error as error:
                ok += "fork" in str(error)
        engine.close()
        os._exit(ok)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    run_dry(engine)
    assert len(engine.take(ident).token_ids) == 20
    engine.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(os.environ.get("QKV_SANITIZED") == "1", reason="freed memory is kept back")
def test_no_leak(path: Path) -> None:
    def fail(done: int, total: int) -> None:
        if 2 * done > total:
            raise LookupError

    def cycle() -> None:
        engine = open_engine(path, kv_tokens=256, threads=2, log=lambda level, line: None)
        for i in range(3):
            engine.add(
                PROMPT,
                max_tokens=8,
                n_top=4,
                logprob_start=1,
                prompt_n_top=4,
                repetition_penalty=1.1,
                stop_token_ids=ids(1, 2),
                bias_ids=ids(3),
                bias=np.ones(1, np.float32),
                bad_words=[ids(4, 5), ids(6)],
                sample=i,
                watch=True,
            )
        steps = run_dry(engine)
        engine.take(steps[-1].finished[0])
        engine.add(PROMPT)
        engine.step()
        with pytest.raises(ValueError, match="lane"):
            engine.add(PROMPT, lane=1, bad_words=[ids(4)])
        engine.close()
        with pytest.raises(LookupError):
            open_engine(path, kv_tokens=256, threads=1, progress=fail)

    for _ in range(50):
        cycle()
    gc.collect()
    before = resident_bytes()
    for _ in range(150):
        cycle()
    gc.collect()
    assert resident_bytes() - before < 3 << 20


# ---- requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"lane": 1}, ValueError, "lane: 1, must be 0 to 0"),
        ({"max_tokens": -1}, ValueError, "max_tokens: -1"),
        ({"max_tokens": 1.0}, TypeError, "max_tokens: float"),
        ({"max_tokens": 4, "min_tokens": 5}, ValueError, "min_tokens: 5, must be 0 to 4"),
        ({"temperature": -1.0}, ValueError, "temperature: -1"),
        ({"temperature": math.nan}, ValueError, "temperature: nan"),
        ({"temperature": "hot"}, TypeError, "temperature: str"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"top_p": 1.01}, ValueError, "top_p: 1.01"),
        ({"top_k": -1}, ValueError, "top_k: -1"),
        ({"min_p": -0.5}, ValueError, "min_p: -0.5"),
        ({"seed": -1}, ValueError, "seed: -1"),
        ({"seed": 1 << 64}, ValueError, "seed: 18446744073709551616"),
        ({"sample": 1 << 32}, ValueError, "sample: 4294967296"),
        ({"stop_token_ids": ids(512)}, ValueError, r"stop_token_ids\[0\]: token id 512"),
        ({"stop_token_ids": [1]}, TypeError, "stop_token_ids: list"),
        ({"n_top": 257}, ValueError, "n_top: 257, must be 0 to 256"),
        ({"prompt_n_top": -1}, ValueError, "prompt_n_top: -1"),
        ({"logprob_start": 0}, ValueError, "logprob_start: 0"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty: 0"),
        ({"presence_penalty": math.inf}, ValueError, "presence_penalty: inf"),
        ({"bias_ids": ids(1)}, ValueError, "bias: 0 elements, bias_ids has 1"),
        ({"bias_ids": ids(1), "bias": np.zeros(1)}, TypeError, "bias: dtype float64"),
        (
            {"bias_ids": ids(1, 1), "bias": np.zeros(2, np.float32)},
            ValueError,
            "id 1 stands there twice",
        ),
        (
            {"bias_ids": ids(1), "bias": np.full(1, np.nan, np.float32)},
            ValueError,
            r"bias\[0\]: nan",
        ),
        ({"bad_words": [ids()]}, ValueError, r"bad_words\[0\]: no tokens"),
        ({"bad_words": [ids(1), ids(2, 600)]}, ValueError, r"bad_words\[1\]\[1\]: token id 600"),
        ({"bad_words": [[1, 2]]}, TypeError, "bad_words: list"),
        ({"bad_words": 3}, TypeError, "bad_words"),
        ({"max_tokens": 200}, _core.OutOfPages, "219 tokens needed.*128"),
    ],
    ids=str,
)
def test_bad_requests(
    path: Path, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    engine = open_engine(path, kv_tokens=128, threads=1)
    with pytest.raises(kind, match=words):
        engine.add(PROMPT, **({"max_tokens": 8} | options))
    assert engine.counts()["n_waiting"] == 0
    assert engine.step() == (0, 0, 0, 0, [], [])
    assert len(generate(engine, PROMPT, max_tokens=3).token_ids) == 3
    engine.close()


def test_bad_prompts(engine: _core.Engine) -> None:
    bad: list[tuple[Any, type[Exception], str]] = [
        (ids(), ValueError, "empty"),
        (ids(3, 512), ValueError, r"tokens\[1\]: token id 512, must be 0 to 511"),
        (ids(-1), ValueError, "token id -1"),
        (PROMPT.astype(np.int64), TypeError, "tokens: dtype int64, must be int32"),
        (PROMPT.astype(">i4"), TypeError, "tokens"),
        (PROMPT.reshape(1, -1), ValueError, "2 dimensions, must have 1"),
        (PROMPT[::2], ValueError, "contiguous"),
        ([1, 2], TypeError, "list"),
        (None, TypeError, "NoneType"),
    ]
    for tokens, kind, words in bad:
        with pytest.raises(kind, match=words):
            engine.add(tokens)


def test_model_length(path: Path) -> None:
    engine = open_engine(path, kv_tokens=256, threads=1, max_model_len=32)
    result = generate(engine, np.arange(30, dtype=np.int32), max_tokens=1000)
    assert len(result.token_ids) == 2 and result.finish_reason == "length"
    with pytest.raises(ValueError, match="32 tokens.*no room.*max_model_len is 32"):
        engine.add(np.arange(32, dtype=np.int32))
    ident = engine.add(np.arange(32, dtype=np.int32), max_tokens=0, logprob_start=1)
    run_dry(engine)
    assert len(engine.take(ident).prompt_logprobs) == 31
    engine.close()


def test_unknown_ids(engine: _core.Engine) -> None:
    for use in (engine.take, engine.abort, lambda ident: engine.finish(ident, 0)):
        with pytest.raises(ValueError, match="id 77: there is no such sequence"):
            use(77)
        with pytest.raises(TypeError):
            use("77")  # type: ignore[arg-type]
    ident = engine.add(PROMPT, max_tokens=2)
    with pytest.raises(_core.Error, match="has not finished"):
        engine.take(ident)
    run_dry(engine)
    engine.take(ident)
    with pytest.raises(ValueError, match="no such sequence"):
        engine.take(ident)


def test_result(engine: _core.Engine) -> None:
    result = generate(engine, PROMPT, n_top=3)
    assert result.token_ids.shape == result.logprobs.shape == (12,)
    assert result.token_ids.dtype == np.int32 and result.logprobs.dtype == np.float32
    assert result.top_ids.shape == result.top_logprobs.shape == (12, 3)
    assert (result.top_ids[:, 0] == result.token_ids).all()
    assert (result.top_logprobs[:, 0] == result.logprobs).all()
    assert (np.diff(result.top_logprobs, axis=1) <= 0).all()
    assert (np.exp(result.top_logprobs).sum(axis=1) <= 1.0001).all()
    assert result.prompt_logprobs.shape == (0,) and result.prompt_top_ids.shape == (0, 0)
    assert result.finish_reason == "length" and result.stop_token == -1
    assert 0 <= result.queue_time <= result.time_to_first_token <= result.total_time < 60
    assert result.cached_tokens == 0 and result.retractions == 0
    for array in result[:8]:
        assert isinstance(array, np.ndarray) and array.flags.owndata and array.flags.writeable
    again = generate(engine, PROMPT, n_top=3)
    assert again.cached_tokens == 16
    assert difference(again, result) == ""


def test_steps_and_watch(engine: _core.Engine) -> None:
    watched = engine.add(PROMPT, max_tokens=5, temperature=0.0, ignore_eos=True, watch=True)
    other = engine.add(PROMPT[::-1].copy(), max_tokens=3, temperature=0.0, ignore_eos=True)
    steps = run_dry(engine)
    assert isinstance(steps[0], _core.Step)
    assert sum(step.n_prefill for step in steps) == 2 * len(PROMPT)
    assert sum(step.n_rows for step in steps) == 2 * len(PROMPT) + 4 + 2
    assert [ident for step in steps for ident in step.finished] == [other, watched]
    result = engine.take(watched)
    assert [pair for step in steps for pair in step.tokens] == [
        (watched, int(token)) for token in result.token_ids
    ]
    assert steps[-1].n_running == 0 and steps[-1].n_waiting == 0
    engine.take(other)


def test_stop_ids(engine: _core.Engine) -> None:
    plain = generate(engine, PROMPT).token_ids
    stop = int(plain[4])
    first = int(np.flatnonzero(plain == stop)[0])
    result = generate(engine, PROMPT, stop_token_ids=ids(stop))
    assert result.token_ids.tolist() == plain[: first + 1].tolist()
    assert result.finish_reason == "stop" and result.stop_token == stop
    later = generate(engine, PROMPT, stop_token_ids=ids(stop), min_tokens=9)
    assert stop not in later.token_ids[:9] and len(later.token_ids) >= 9


def test_eos(engine: _core.Engine) -> None:
    towards_eos = {"bias_ids": ids(EOS), "bias": np.full(1, 100, np.float32)}
    result = generate(engine, PROMPT, ignore_eos=False, **towards_eos)
    assert result.token_ids.tolist() == [EOS]
    assert result.finish_reason == "stop" and result.stop_token == EOS
    result = generate(engine, PROMPT, ignore_eos=False, min_tokens=3, **towards_eos)
    assert len(result.token_ids) == 4 and EOS not in result.token_ids[:3]
    result = generate(engine, PROMPT, ignore_eos=True, **towards_eos)
    assert result.token_ids.tolist() == [EOS] * 12 and result.finish_reason == "length"


def test_eos_of_generation_config(tiny: Callable[..., Path], tmp_path: Path) -> None:
    for file in tiny("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    engine = open_engine(tmp_path, kv_tokens=64, threads=1)
    token = int(generate(engine, PROMPT, max_tokens=1).token_ids[0])
    engine.close()
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {token}]}}')
    engine = open_engine(tmp_path, kv_tokens=64, threads=1)
    result = generate(engine, PROMPT, ignore_eos=False)
    assert result.token_ids.tolist() == [token] and result.finish_reason == "stop"
    engine.close()


def test_bad_words(engine: _core.Engine) -> None:
    plain = generate(engine, PROMPT).token_ids
    single = generate(engine, PROMPT, bad_words=[ids(int(plain[0]))])
    assert plain[0] not in single.token_ids
    pair = plain[2:4].copy()
    result = generate(engine, PROMPT, bad_words=[pair])
    assert result.token_ids[:3].tolist() == plain[:3].tolist()
    assert result.token_ids[3] != plain[3]
    windows = np.lib.stride_tricks.sliding_window_view(result.token_ids, 2)
    assert not (windows == pair).all(axis=1).any()


def test_bias_does_not_change_what_is_reported(engine: _core.Engine) -> None:
    token = 7
    forced = generate(
        engine, PROMPT, max_tokens=6, bias_ids=ids(token), bias=np.full(1, 1e4, np.float32)
    )
    assert forced.token_ids.tolist() == [token] * 6
    text = np.concatenate([PROMPT, forced.token_ids])
    scored = generate(engine, text, max_tokens=0, logprob_start=len(PROMPT))
    assert (scored.prompt_logprobs == forced.logprobs).all()
    forbidden = generate(
        engine, PROMPT, bias_ids=ids(token), bias=np.full(1, -np.inf, np.float32), temperature=2.0
    )
    assert token not in forbidden.token_ids


def test_penalties(engine: _core.Engine) -> None:
    prompt = ids(*[3] * 20)
    favour = {"bias_ids": ids(3, 4), "bias": np.array([300, 290], np.float32)}
    plain = generate(engine, prompt, **favour).token_ids
    assert set(plain.tolist()) == {3}
    for name in ("presence_penalty", "frequency_penalty"):
        # Output tokens alone count: 3 is taken once, then 4.
        result = generate(engine, prompt, max_tokens=2, **favour, **{name: 100.0})
        assert result.token_ids.tolist() == [3, 4]
    # Grows with every use; presence does not.
    frequency = generate(engine, prompt, max_tokens=8, frequency_penalty=6.0, **favour)
    assert sorted(frequency.token_ids.tolist()).count(4) > 1
    distinct = generate(engine, PROMPT, max_tokens=60, frequency_penalty=1000.0).token_ids
    assert len(set(distinct.tolist())) == 60
    # The prompt counts for the repetition penalty.
    fresh = generate(engine, PROMPT, max_tokens=40, repetition_penalty=1e5)
    assert (fresh.logprobs <= 0).all()
    assert len(set(fresh.token_ids.tolist()) | set(PROMPT.tolist())) >= 40


def test_seeds(engine: _core.Engine) -> None:
    def sample(**options: Any) -> list[int]:
        tokens: list[int] = generate(engine, PROMPT, temperature=1.0, **options).token_ids.tolist()
        return tokens

    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)
    assert sample(seed=1) != sample(seed=1, sample=1)
    assert sample(seed=(1 << 64) - 1) == sample(seed=(1 << 64) - 1)
    greedy = generate(engine, PROMPT).token_ids.tolist()
    assert sample(seed=5, top_k=1) == greedy
    assert sample(seed=5, min_p=1.0) == greedy
    assert sample(seed=5, top_p=1e-6) == greedy


def test_prompt_logprobs(engine: _core.Engine) -> None:
    """Scoring a text says of each generated token what generating it said, bit for bit."""
    written = generate(engine, PROMPT, max_tokens=30, temperature=1.0, seed=3, n_top=2)
    text = np.concatenate([PROMPT, written.token_ids])
    every = generate(engine, text, max_tokens=0, logprob_start=1, prompt_n_top=2)
    assert every.prompt_logprobs.shape == every.prompt_ranks.shape == (len(text) - 1,)
    assert every.prompt_top_ids.shape == (len(text) - 1, 2)
    assert (every.prompt_logprobs[len(PROMPT) - 1 :] == written.logprobs).all()
    assert (every.prompt_top_ids[len(PROMPT) - 1 :] == written.top_ids).all()
    assert every.token_ids.shape == (0,) and every.finish_reason == "length"
    best = every.prompt_ranks == 0
    assert (every.prompt_top_ids[best, 0] == text[1:][best]).all()
    assert (every.prompt_logprobs[~best] <= every.prompt_top_logprobs[~best, 0]).all()
    for start in (1, 16, 17, 18, 33, len(text) - 1):
        part = generate(engine, text, max_tokens=2, logprob_start=start)
        assert (part.prompt_logprobs == every.prompt_logprobs[start - 1 :]).all()
        assert part.cached_tokens <= start - 1
    none = generate(engine, text, max_tokens=0, logprob_start=len(text))
    assert none.prompt_logprobs.shape == (0,)


def test_logits_of_a_long_prompt_are_never_there_at_once(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", vocab_size=150_000, hidden_size=32, num_hidden_layers=1)
    engine = open_engine(path, kv_tokens=4112, threads=2, chunk_tokens=4096, max_model_len=1024)
    assert engine.info["max_logit_rows"] * 150_000 * 4 <= 32 << 20
    text = np.random.default_rng(0).integers(0, 150_000, 1000, dtype=np.int32)
    result = generate(engine, text, max_tokens=0, logprob_start=1)
    assert np.isfinite(result.prompt_logprobs).all() and len(result.prompt_logprobs) == 999
    memory = engine.memory()
    assert memory["activations"] + memory["scratch"] < 1000 * 150_000 * 4 / 4
    engine.close()


def test_abort_and_finish_in_every_state(path: Path) -> None:
    def options(n: int) -> dict[str, Any]:
        return {"max_tokens": n, "temperature": 0.0, "ignore_eos": True}

    engine = open_engine(
        path, kv_tokens=256, threads=1, max_running=1, chunk_tokens=8, offline=False
    )
    full = generate(engine, PROMPT, max_tokens=10)
    for how in ("abort", "finish"):
        engine.flush()
        prefill, waiting = (engine.add(PROMPT, **options(10)) for _ in range(2))
        engine.step()  # 8 of 19 prompt tokens
        with pytest.raises(ValueError, match="n_keep: 1"):
            engine.finish(prefill, 1)
        assert engine.counts()["n_running"] == engine.counts()["n_waiting"] == 1
        decoding = engine.add(PROMPT[::-1].copy(), **options(10))
        for ident in (waiting, prefill):
            if how == "abort":
                engine.abort(ident)
            else:
                engine.finish(ident, 0)
                empty = engine.take(ident)
                assert len(empty.token_ids) == 0 and empty.finish_reason == "stop"
        for _ in range(7):
            engine.step()  # 8 + 8 + 3, then five tokens
        assert engine.counts()["n_running"] == 1
        if how == "abort":
            engine.abort(decoding)
        else:
            engine.finish(decoding, 3)
            assert len(engine.take(decoding).token_ids) == 3
        done = engine.add(PROMPT, **options(10))
        run_dry(engine)
        if how == "abort":
            engine.abort(done)
        else:
            engine.finish(done, 4)
            result = engine.take(done)
            assert result.token_ids.tolist() == full.token_ids[:4].tolist()
            assert result.logprobs.tolist() == full.logprobs[:4].tolist()
            assert result.finish_reason == "stop" and result.stop_token == -1
        counts = engine.counts()
        assert counts["n_running"] == counts["n_waiting"] == 0
        assert counts["n_free_pages"] + counts["n_evictable_pages"] == counts["n_pages"]
    engine.flush()
    assert engine.counts()["n_evictable_pages"] == 0
    assert difference(generate(engine, PROMPT, max_tokens=10), full) == ""
    engine.close()
