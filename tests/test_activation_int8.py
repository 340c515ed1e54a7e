"""activation_quant="int8": rows of activations in int8 against weights in integer codes. The same
bits whatever the batch, as in every other mode, and close to what bf16 activations give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from core_runs import LARGE, alone, assert_same, mixed_requests, open_engine, ordered, run
from qkv import _core
from ref import make_tiny

# Q6_K has groups of 16, Q4_K and Q4_1 minima, attn_v in F16 keeps bf16 activations.
TYPES = {
    "token_embd": "Q5_1", r"^output\.": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q8_0",
    "attn_v": "F16", "attn_output": "Q4_0", "ffn_down": "Q5_K", "ffn": "Q4_1",
}  # fmt: skip
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "mixed.gguf"
    make_tiny.write_gguf(path, "llama", seed=3, types=TYPES, codec=_core, **SHAPE)
    return path


def test_same_bits_whatever_the_batch(mixed: Path) -> None:
    requests = mixed_requests(24, 512, seed=5)
    reference = alone(mixed, requests, activation_quant="int8")
    bf16 = alone(mixed, requests[:2])
    assert any(list(bf16[i].logprobs) != list(reference[i].logprobs) for i in bf16)
    for threads, chunk, pool, n in ((1, 16, 192, 24), (2, 64, 192, 24), (2, 512, LARGE, 7)):
        engine = open_engine(
            mixed, kv_tokens=pool, chunk_tokens=chunk, threads=threads, activation_quant="int8"
        )
        results = run(engine, requests[:n], ordered(n, "shuffled"))
        assert_same(reference, results, (threads, chunk, pool, n))
        engine.close()


def test_lanes_give_what_they_give_alone(mixed: Path) -> None:
    formats = ("bf16", "fp8_e4m3", "nvfp4")
    requests = mixed_requests(6, 512, seed=8)
    lanes = [[(name, name)] * 2 for name in formats]
    engine = open_engine(mixed, kv_tokens=LARGE, lanes=lanes, activation_quant="int8")
    for lane in range(len(formats)):
        results = run(engine, requests, lane=lane)
        reference = alone(mixed, requests, lanes=[lanes[lane]], activation_quant="int8")
        assert_same(reference, results, formats[lane])
    engine.close()


@pytest.mark.parametrize("device", ["cpu", "guard"])
def test_info_says_which_matrices(mixed: Path, device: str) -> None:
    with qkv.Engine(mixed, kv_tokens=64, activation_quant="int8", device=device) as engine:
        info = engine.info
        assert info["activation_quant"] == "int8"
        # 7 in each of 2 layers, and the head; attn_v is in F16.
        assert (info["matrices"], info["int8_matrices"]) == (15, 13)
    with qkv.Engine(mixed, kv_tokens=64, device=device) as engine:
        assert engine.info["activation_quant"] == "checkpoint"
        assert engine.info["int8_matrices"] == 0


def test_a_checkpoint_without_codes_is_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(qkv.UnsupportedError, match=r"none of the \d+ matrices is in integer codes"):
        qkv.Engine(tiny("llama"), kv_tokens=64, activation_quant="int8")
    with pytest.raises(ValueError, match="activation_quant: 'int4'"):
        open_engine(tiny("llama"), kv_tokens=64, activation_quant="int4")


def mean_kl(model: Path, texts: list[Any], top: int, **options: Any) -> float:
    """KL of the mode against bf16 activations per scored token, nats, over the `top` likeliest
    tokens of the latter and the rest as one outcome (a lower bound of the whole KL)."""
    found: list[float] = []
    scores = []
    for mode in ("off", "int8"):
        with qkv.Engine(model, kv_tokens=2048, activation_quant=mode, **options) as engine:
            scores.append(engine.score(texts, top=top, progress=False))
    for a, b in zip(*scores, strict=True):
        for ids_a, logs_a, ids_b, logs_b in zip(
            a.top_ids, a.top_logprobs, b.top_ids, b.top_logprobs, strict=True
        ):
            other = dict(zip(ids_b.tolist(), logs_b.tolist(), strict=True))
            both = [
                (log, other[i]) for i, log in zip(ids_a.tolist(), logs_a, strict=True) if i in other
            ]
            p, q = np.exp(np.array(both, np.float64)).T
            p, q = np.append(p, max(1 - p.sum(), 1e-9)), np.append(q, max(1 - q.sum(), 1e-9))
            found.append(float((p * np.log(p / q)).sum()))
    return float(np.mean(found))


def test_close_to_bf16_on_a_tiny_model(mixed: Path) -> None:
    """Recorded: 0.0054. Four times that would be noise of twice the size."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 512, 40).tolist() for _ in range(4)]
    assert 0 < mean_kl(mixed, texts, 256) < 0.02


TEXTS = [
    "The capital of France is Paris. It lies on the river Seine, and more than two million people "
    "live there.",
    "A prime number is a natural number greater than one that is not a product of two smaller "
    "natural numbers.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # prints 5\n",
]


def test_close_to_bf16_on_the_demo_model(demo_model: Path) -> None:
    """Recorded: 0.053, which is no small change. One scale for a whole row is what it costs: rows
    with a few very large values, as the first tokens have, leave few steps to the others."""
    assert 0 < mean_kl(demo_model, TEXTS, 64) < 0.2
