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
# 8 pairs of channels turn in phi3's heads.
LONGROPE = {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5],
        "long_factor": [1.1, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
    },
    "max_position_embeddings": 2048,
    "sliding_window": None,
}

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
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.75}),
    "phi3-longrope-short": ("phi3", {**LONGROPE, "original_max_position_embeddings": 96}),
    "phi3-longrope-long": ("phi3", {**LONGROPE, "original_max_position_embeddings": 89}),
    "glm4": ("glm4", {}),
    "glm4-no-bias": ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.25}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "glm4-moe": ("glm4_moe", {"num_hidden_layers": 3}),
    "glm4-moe-groups": (
        "glm4_moe",
        {
            "use_qk_norm": False,
            "attention_bias": False,
            "partial_rotary_factor": 0.25,
            "norm_topk_prob": False,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "gpt-oss": ("gpt_oss", {}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-greedy": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": 24, "rope_scaling": None},
    ),
    "deepseek-v3": ("deepseek_v3", {}),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_hidden_layers": 2},
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
