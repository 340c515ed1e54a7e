"""Memory that must not grow with tokens times vocabulary."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
