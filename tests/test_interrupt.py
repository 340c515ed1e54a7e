"""Ctrl-C, close() and fork."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from core_runs import open_engine

PARAMS = qkv.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = PARAMS.with_(max_tokens=900)


@pytest.fixture(autouse=True)
def no_callbacks() -> Iterator[None]:
    """Python drops what is raised in a callback of the garbage collector, and hypothesis has one:
    an interrupt that comes just then would be lost."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def interrupt_after(seconds: float) -> threading.Timer:
    """SIGINT to this process, as Ctrl-C and a notebook's stop button do."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_interrupt_returns_and_the_engine_goes_on(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), threads=2, kv_tokens=8192, max_running=4) as engine:
        alone = engine.generate([[7, 8, 9]], PARAMS, progress=False)[0]
        timer = interrupt_after(0.5)
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.generate([[1, 2, i] for i in range(400)], LONG, progress=False)
        timer.join()
        assert len(caught.value.outputs) < 400  # type: ignore[attr-defined]
        again = engine.generate([[7, 8, 9]], PARAMS, progress=False)[0]
        assert list(again.token_ids) == list(alone.token_ids)
        assert np.array_equal(again.logprobs, alone.logprobs)


def test_finished_rows_are_kept(tiny: Callable[..., Path]) -> None:
    """on_finish has seen every row that was finished before the interrupt; stream() has given
    them; the others are gone from the engine."""
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=8192, max_running=8) as engine:
        kept: list[int] = []

        def keep(output: qkv.RequestOutput) -> dict[str, float]:
            kept.append(output.index)
            if len(kept) == 6:
                signal.raise_signal(signal.SIGINT)
            return {}

        prompts = [[1, 2, 3 + i] for i in range(20)]
        params = [PARAMS if i < 10 else LONG for i in range(20)]
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, params, on_finish=keep, progress=False)
        assert len(kept) >= 6 and set(kept) <= set(range(10))
        assert len(engine.generate(prompts[:3], PARAMS, progress=False)) == 3


def test_a_dropped_stream_stops(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=4096, max_running=4) as engine:

        def endless() -> Iterator[list[int]]:
            i = 0
            while True:
                yield [1, 2, i % 400]
                i += 1

        stream = engine.stream(endless(), PARAMS)
        first = [next(stream) for _ in range(10)]
        assert len({o.index for o in first}) == 10
        stream.close()  # type: ignore[attr-defined]
        assert len(engine.generate([[5, 6]], PARAMS, progress=False)) == 1


@pytest.mark.skipif(os.environ.get("QKV_SANITIZED") == "1", reason="freed memory is kept back")
def test_close_gives_the_memory_back(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", vocab_size=8192, hidden_size=1024, intermediate_size=4096, tokenizer=False)

    def once() -> float:
        engine = open_engine(path, kv_tokens=65536, threads=2)
        engine.add(np.arange(500, dtype=np.int32), max_tokens=4, ignore_eos=True)
        for _ in range(4):
            engine.step()
        held = resident_mib()
        engine.close()
        return held

    once()
    gc.collect()
    before = resident_mib()
    held = once()
    after = resident_mib()
    assert held - before > 40, f"{before:.0f} -> {held:.0f} MiB: the test holds too little to tell"
    assert after - before < 0.15 * (held - before), f"{before:.0f}, {held:.0f}, {after:.0f} MiB"


def test_use_after_close(tiny: Callable[..., Path]) -> None:
    engine = qkv.Engine(tiny("llama"), threads=1, kv_tokens=256)
    engine.close()
    engine.close()
    with pytest.raises(qkv.Error, match="closed"):
        engine.generate([[1, 2]], PARAMS, progress=False)


def test_two_engines_in_one_process(tiny: Callable[..., Path]) -> None:
    with (
        qkv.Engine(tiny("llama"), threads=1, kv_tokens=512) as one,
        qkv.Engine(tiny("qwen3"), threads=2, kv_tokens=512) as two,
    ):
        expected = one.generate([[1, 2, 3]], PARAMS, progress=False)[0].token_ids
        results: dict[str, NDArray[np.int32]] = {}

        def work(name: str, engine: qkv.Engine) -> None:
            for _ in range(20):
                results[name] = engine.generate([[1, 2, 3]], PARAMS, progress=False)[0].token_ids

        threads = [
            threading.Thread(target=work, args=item) for item in {"one": one, "two": two}.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert np.array_equal(results["one"], expected)
        assert not np.array_equal(results["two"], expected)


def test_a_second_thread_in_one_engine_is_an_error(tiny: Callable[..., Path]) -> None:
    """It raises, or waits its turn at step granularity; it never hangs and never mixes results."""
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=2048) as engine:
        expected = list(engine.generate([[1, 2, 3]], LONG, progress=False)[0].token_ids)
        outcomes: list[object] = []

        def work() -> None:
            try:
                output = engine.generate([[1, 2, 3]], LONG, progress=False)[0]
                outcomes.append(list(output.token_ids))
            except qkv.Error as error:
                outcomes.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert expected in outcomes
        assert all(o == expected or isinstance(o, qkv.Error) for o in outcomes)


class InterruptedCore:
    """The C engine where a signal arrives in its n-th step: Python raises as the call returns."""

    def __init__(self, core: Any, n: int) -> None:
        self._core = core
        self._left = n

    def step(self) -> Any:
        step = self._core.step()
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_step_whose_outcome_the_interrupt_took(tiny: Callable[..., Path], n: int) -> None:
    """What finished in it is kept, and another stream over the same engine loses nothing."""
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=8192, max_running=32) as engine:
        prompts = [[5, 6, 7 + i] for i in range(8)]
        params = [PARAMS.with_(max_tokens=1 + i) for i in range(8)]
        params[5] = PARAMS.with_(stop="no such text")
        alone = engine.generate(prompts, params, progress=False)
        stream = engine.stream(prompts, params)
        outputs = [next(stream)]
        core = engine._core
        engine._core = InterruptedCore(core, n)  # type: ignore[assignment]
        rows = [[1, 2, 3 + i] for i in range(8)]
        lengths = [PARAMS.with_(max_tokens=1 + i) for i in range(8)]
        with pytest.raises(KeyboardInterrupt):
            engine.generate(rows, lengths, progress=False)
        engine._core = core
        kept = [output.index for output in engine.interrupted]
        assert kept == list(range(n))
        outputs += stream
        assert sorted(output.index for output in outputs) == list(range(8))
        for output in outputs:
            if output.index == 5 and output.error is not None:
                assert "interrupt" in output.error  # of its stop string a token was not seen
                continue
            assert output.text == alone[output.index].text
            assert np.array_equal(output.logprobs, alone[output.index].logprobs)


def in_a_hook(engine: qkv.Engine, act: Callable[[], object]) -> list[qkv.RequestOutput]:
    """Calls `act` while another thread is in the middle of a batch; the batch's outputs."""
    inside, go_on = threading.Event(), threading.Event()
    outputs: list[qkv.RequestOutput] = []

    def wait(output: qkv.RequestOutput) -> None:
        inside.set()
        assert go_on.wait(30)

    def work() -> None:
        rows = [[1, 2, 3 + i] for i in range(40)]
        outputs.extend(engine.generate(rows, PARAMS, on_finish=wait, progress=False))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(30)
        act()
    finally:
        go_on.set()
        thread.join(timeout=60)
    return outputs


def test_close_while_another_thread_computes(tiny: Callable[..., Path]) -> None:
    """It is refused, and the other thread's batch does not suffer."""
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=2048, max_running=4) as engine:

        def close() -> None:
            with pytest.raises(qkv.Error, match="another thread"):
                engine.close()

        outputs = in_a_hook(engine, close)
        assert [len(output.token_ids) for output in outputs] == [8] * 40


def test_a_stream_dropped_by_another_thread(tiny: Callable[..., Path]) -> None:
    """A generator may be collected anywhere: its sequences leave at the next step."""
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=8192, max_running=4) as engine:
        stream = engine.stream([[5, 6, 7 + i] for i in range(20)], LONG)
        first = engine.stream([[5, 6, 7]], PARAMS)
        assert next(first).error is None
        next(stream)

        def drop() -> None:
            nonlocal stream
            del stream
            gc.collect()

        outputs = in_a_hook(engine, drop)
        assert [len(output.token_ids) for output in outputs] == [8] * 40
        counts = engine._core.counts()
        assert (counts["n_waiting"], counts["n_running"]) == (0, 0)


FORK = """
import os, sys
import qkv
params = qkv.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
engine = qkv.Engine(sys.argv[1], threads=2, kv_tokens=256)
engine.generate([[1, 2, 3]], params, progress=False)
child = os.fork()
if child == 0:
    try:
        output = engine.generate([[1, 2, 3]], params, progress=False)[0]
        text = str(output.error)
    except qkv.Error as error:
        text = str(error)
    print("child:", text, flush=True)
    engine.close()
    fresh = qkv.Engine(sys.argv[1], threads=2, kv_tokens=256)
    n = len(fresh.generate([[1, 2, 3]], params, progress=False)[0].token_ids)
    print("fresh:", n, flush=True)
    os._exit(0)
print("exit:", os.waitpid(child, 0)[1], flush=True)
print("parent:", len(engine.generate([[1, 2, 3]], params, progress=False)[0].token_ids))
"""


def test_fork(tiny: Callable[..., Path]) -> None:
    """In the child the engine says so and does not hang; a new one works there."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tiny("llama"))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert "fork" in lines["child"]
    assert lines["fresh"] == "4" and lines["exit"] == "0" and lines["parent"] == "4"


COMMAND = """
import sys
import qkv
engine = qkv.Engine(sys.argv[1], threads=1, kv_tokens=4096, max_running=2)
params = qkv.SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
print("started", flush=True)
try:
    engine.generate([[1, 2, i] for i in range(400)], params, progress=False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
engine.close()
"""


def test_sigint_from_outside(tiny: Callable[..., Path]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tiny("llama"))], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(timeout=20) == 0
