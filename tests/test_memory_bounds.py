"""Memory that must not grow with tokens times vocabulary."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("QKV_SANITIZED") == "1", reason="the sanitizer's own memory counts too"
)
N_TOKENS, N_VOCAB = 4096, 150_000

SCRIPT = """
import sys
import numpy as np
import qkv

def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

n_tokens, n_vocab = int(sys.argv[2]), int(sys.argv[3])
engine = qkv.Engine(sys.argv[1], threads=2, kv_tokens=n_tokens + 64, max_model_len=n_tokens + 32)
prompt = np.random.default_rng(1).integers(0, n_vocab, n_tokens).tolist()
engine.score([prompt[:64]], progress=False)
before = peak_kib()
if sys.argv[4] == "score":
    scores = engine.score([prompt], top=5, progress=False)[0]
    logprobs = scores.token_logprobs
else:
    params = qkv.SamplingParams(max_tokens=1, prompt_logprobs=5, temperature=0)
    logprobs = engine.generate([prompt], params, progress=False)[0].prompt_logprobs
assert len(logprobs) == n_tokens - 1, len(logprobs)
assert np.isfinite(logprobs).all()
print(peak_kib() - before)
"""


@pytest.mark.parametrize("way", ["score", "generate"])
def test_scoring_never_holds_all_logits(tiny: Callable[..., Path], way: str) -> None:
    path = tiny(
        "llama",
        vocab_size=N_VOCAB,
        max_position_embeddings=8192,
        num_hidden_layers=1,
        tie_word_embeddings=True,
        tokenizer=False,
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(N_TOKENS), str(N_VOCAB), way],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown, whole = int(done.stdout) * 1024, N_TOKENS * N_VOCAB * 4
    assert grown < whole / 16, f"{grown / 2**20:.0f} MiB of {whole / 2**20:.0f} MiB"


GROWTH = """
import sys
import numpy as np
import qkv

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) << 10

n_tokens = int(sys.argv[2])
before = resident()
engine = qkv.Engine(
    sys.argv[1], kv_cache_dtype=["bf16", "fp8_e4m3"], threads=2, kv_tokens=n_tokens + 64,
    max_model_len=n_tokens + 32,
)
prompt = np.random.default_rng(1).integers(10, 40000, n_tokens).tolist()
score = engine.score([prompt], progress=False)[0]
assert score.error is None and len(score.lanes["fp8_e4m3"].kl) == n_tokens - 1
held = engine.memory()
parts = held["weights"] + held["activations"] + held["hidden"] + held["scratch"]
print(resident() - before, parts + held["kv_resident"], held["weights"] + held["kv"])
"""


def growth(model: Path, n_tokens: int) -> tuple[int, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(model), str(n_tokens)],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    grown, told, fixed = map(int, done.stdout.split())
    return grown, told, fixed


@pytest.mark.slow
def test_memory_says_what_the_process_grows_by(demo_model: Path) -> None:
    grown, told, _ = growth(demo_model, 512)
    assert abs(grown - told) < 0.05 * grown, f"grown by {grown}, memory() says {told}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_scoring_two_lanes_of_a_long_prompt(qwen_model: Path) -> None:
    """4,096 tokens of a 0.5B model: at most 100 MiB above weights and pools."""
    grown, told, fixed = growth(qwen_model, 4096)
    assert abs(grown - told) < 0.05 * grown, f"grown by {grown}, memory() says {told}"
    assert grown - fixed < 100 << 20, f"{(grown - fixed) / 2**20:.0f} MiB above weights and pools"


LANES_SCRIPT = """
import sys
import numpy as np
import qkv

def kib(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

n_tokens, lanes = int(sys.argv[3]), sys.argv[4].split(",")
# What the first engine of a process brings in, whatever the model: code, threads' stacks.
with qkv.Engine(sys.argv[1], threads=2, kv_tokens=64, kv_cache_dtype=lanes) as engine:
    engine.score([[1, 2, 3]], progress=False)
before = kib("VmRSS:")
engine = qkv.Engine(
    sys.argv[2], kv_cache_dtype=lanes, threads=2, kv_tokens=n_tokens, max_model_len=n_tokens + 16
)
n_vocab = engine.info["config"]["vocab"]
prompt = np.random.default_rng(1).integers(0, n_vocab, n_tokens).tolist()
score = engine.score([prompt], progress=False)[0]
assert score.error is None and len(score.lanes[lanes[1]].kl) == n_tokens - 1
memory = engine.memory()
held = memory["total"] - memory["kv"] + memory["kv_resident"]
pools = memory["weights"] + memory["kv_resident"]
print((kib("VmRSS:") - before) * 1024, held, (kib("VmHWM:") - before) * 1024 - pools)
"""


def test_memory_is_what_the_process_grew_by(tiny: Callable[..., Path]) -> None:
    """Two lanes and a large vocabulary: within 5 % of the resident memory (pages of the pool are
    taken as they are first used), and scoring holds at most 100 MiB beside weights and pools."""
    n_tokens, n_vocab = 768, N_VOCAB
    path = tiny(
        "llama",
        vocab_size=n_vocab,
        hidden_size=192,
        num_hidden_layers=1,
        tokenizer=False,
    )
    done = subprocess.run(
        [sys.executable, "-c", LANES_SCRIPT, str(tiny("llama")), str(path), str(n_tokens)]
        + ["bf16,fp8_e4m3"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown, held, beside = (int(word) for word in done.stdout.split())
    assert grown == pytest.approx(held, rel=0.05)
    assert beside < 100 << 20 < n_tokens * n_vocab * 4
