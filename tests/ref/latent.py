"""Multi-head latent attention in NumPy, for the tests: what tiny models with it have, and queries,
keys and values as DeepSeek-V2's paper (arXiv 2405.04434, 2.1) has them, expanded: nothing here
knows that one row is enough for all heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = Mapping[str, Any]

_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "attention_bias": False,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}

#: What the tiny models say besides what the dense ones do.
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_SIZES,
        "q_lora_rank": None,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
    },
    "deepseek_v3": {
        **_SIZES,
        "q_lora_rank": 24,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
    },
    "glm4_moe_lite": {
        **_SIZES,
        "q_lora_rank": 24,
        "rope_interleave": False,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": ["dense", "sparse"],
    },
}

#: Of the norms of what has one of the ranks, whatever rms_norm_eps says.
NORM_EPS = 1e-6


def is_latent(config: Config) -> bool:
    return "kv_lora_rank" in config


def width(config: Config) -> int:
    """Channels of all heads' values; 0: another kind of attention."""
    return int(config["num_attention_heads"] * config["v_head_dim"]) if is_latent(config) else 0


def shapes(config: Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a layer's attention, but for o_proj."""
    p, hidden = f"model.layers.{layer}.self_attn.", config["hidden_size"]
    n_heads, kv_rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v_dim = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    if q_rank := config["q_lora_rank"]:
        yield p + "q_a_proj.weight", (q_rank, hidden)
        yield p + "q_a_layernorm.weight", (q_rank,)
        yield p + "q_b_proj.weight", (n_heads * (nope + rope), q_rank)
    else:
        yield p + "q_proj.weight", (n_heads * (nope + rope), hidden)
    yield p + "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield p + "kv_a_layernorm.weight", (kv_rank,)
    yield p + "kv_b_proj.weight", (n_heads * (nope + v_dim), kv_rank)


def heads(
    config: Config,
    layer: int,
    x: Array,
    project: Callable[[str, Array], Array],
    norm: Callable[[str, Array, float], Array],
    turn: Callable[[Array], Array],
) -> tuple[Array, Array, Array]:
    """Queries and keys [n, n_heads, nope + rope], values [n, n_heads, v_dim] for x [n, hidden]."""
    p, n = f"model.layers.{layer}.self_attn.", len(x)
    n_heads, kv_rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope = config["qk_nope_head_dim"]
    if config["q_lora_rank"]:
        low = norm(p + "q_a_layernorm", project(p + "q_a_proj", x), NORM_EPS)
        q = project(p + "q_b_proj", low)
    else:
        q = project(p + "q_proj", x)
    q = q.reshape(n, n_heads, -1)
    row = project(p + "kv_a_proj_with_mqa", x)
    latent = norm(p + "kv_a_layernorm", row[:, :kv_rank], NORM_EPS)
    both = project(p + "kv_b_proj", latent).reshape(n, n_heads, -1)
    shared = np.repeat(turn(row[:, None, kv_rank:]), n_heads, axis=1)
    q = np.concatenate([q[..., :nope], turn(q[..., nope:])], axis=-1)
    return q, np.concatenate([both[..., :nope], shared], axis=-1), both[..., nope:]


def scale(config: Config) -> float:
    """Of attention's logits: mscale_all_dim is part of it (DeepSeek's own code)."""
    scaling = config.get("rope_scaling") or {}
    by, factor = scaling.get("mscale_all_dim", 0), scaling.get("factor", 1)
    mscale = 0.1 * by * np.log(factor) + 1.0 if factor > 1 else 1.0
    dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return float(dim**-0.5 * mscale**2)


#: gguf-py's names; newer files have two tensors for kv_b_proj (`split`).
GGUF_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Keys without the architecture, as llama.cpp's converter writes them: attention's lengths are
    those of the latent."""
    if not is_latent(config):
        return {}
    rope, kv_rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": kv_rank + rope,
        "attention.value_length": kv_rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": kv_rank,
        "rope.dimension_count": rope,
    }
    if config["q_lora_rank"]:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if scaling := config.get("rope_scaling"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return found


def split(config: Config, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """kv_b_proj as newer GGUF files have it: keys transposed, and values, [heads, out, in]."""
    found: dict[str, Array] = {}
    for name, values in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = values
            continue
        heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
        nope, stem = config["qk_nope_head_dim"], name.removesuffix("kv_b_proj.weight")
        keys = heads[:, :nope].swapaxes(1, 2)
        found[stem + "k_b_proj.weight"] = np.ascontiguousarray(keys)
        found[stem + "v_b_proj.weight"] = np.ascontiguousarray(heads[:, nope:])
    return found


def joined(config: Config, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The same back."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("k_b_proj.weight")]:
        stem = name.removesuffix("k_b_proj.weight")
        keys, values = found.pop(name), found.pop(stem + "v_b_proj.weight")
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        found[stem + "kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    return found
