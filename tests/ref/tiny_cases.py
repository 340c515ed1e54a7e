"""Tiny models whose values transformers has computed, one per thing that a config can say."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref import make_tiny

RECORDED = Path(__file__).parents[1] / "data" / "tiny_transformers.npz"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# Name -> (architecture, overrides of make_tiny.make_config).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-llama3": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {}),
    "mistral-full": ("mistral", {"sliding_window": None, "num_attention_heads": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen2-yarn": (
        "qwen2",
        {"rope_scaling": {**YARN, "truncate": False, "attention_factor": 1.3, "beta_fast": 16}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": (
        "qwen3",
        {"rope_scaling": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}, "attention_bias": True},
    ),
    "gemma3": ("gemma3", {}),
    "gemma3-scaled": (
        "gemma3",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "final_logit_softcapping": 6.0,
            "num_hidden_layers": 6,
            "sliding_window": 9,
        },
    ),
}


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def write(folder: Path, name: str) -> make_tiny.Tiny:
    arch, overrides = CASES[name]
    return make_tiny.write(folder, arch, seed=seed_of(name), **overrides)


def prompt(name: str) -> NDArray[np.int32]:
    """90 tokens, others for each case."""
    return np.random.RandomState(seed_of(name) ^ 1).randint(0, 512, 90).astype(np.int32)
