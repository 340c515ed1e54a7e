"""Experts in NumPy, for the tests: what tiny models with them have, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = Mapping[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

#: What the tiny models say besides what the dense ones do.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "qwen3_moe": {
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "head_dim": 32,
        "attention_bias": False,
        "use_sliding_window": False,
        "num_hidden_layers": 3,
    },
    "glm4_moe": {
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "head_dim": 16,
        "attention_bias": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
    },
}
_ALL_SPARSE = ("MixtralForCausalLM", "GptOssForCausalLM")
_SIGMOID = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
_DEEPSEEK = (*_SIGMOID, "DeepseekV2ForCausalLM")


def name_of(config: Config) -> str:
    return str(config["architectures"][0])


def is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer has experts instead of one MLP."""
    if name_of(config) in _ALL_SPARSE:
        return True
    if name_of(config) in _DEEPSEEK:
        if "mlp_layer_types" in config:
            return bool(config["mlp_layer_types"][layer] == "sparse")
        return layer >= int(config["first_k_dense_replace"])
    if name_of(config) not in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        return False
    step = config.get("decoder_sparse_step", 1)
    return layer not in config.get("mlp_only_layers", ()) and (layer + 1) % step == 0


def n_experts(config: Config) -> int:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((config[key] for key in keys if config.get(key)), 0))


def shapes(config: Config, layer: int) -> Shapes:
    """Names and shapes of a sparse layer's tensors."""
    p, hidden = f"model.layers.{layer}.", config["hidden_size"]
    if name_of(config) == "GptOssForCausalLM":
        n, ffn = n_experts(config), config["intermediate_size"]
        yield p + "mlp.router.weight", (n, hidden)
        yield p + "mlp.router.bias", (n,)
        yield p + "mlp.experts.gate_up_proj", (n, hidden, 2 * ffn)
        yield p + "mlp.experts.gate_up_proj_bias", (n, 2 * ffn)
        yield p + "mlp.experts.down_proj", (n, ffn, hidden)
        yield p + "mlp.experts.down_proj_bias", (n, hidden)
        return
    mixtral = name_of(config) == "MixtralForCausalLM"
    ffn = config["intermediate_size"] if mixtral else config["moe_intermediate_size"]
    block = p + ("block_sparse_moe." if mixtral else "mlp.")
    yield block + "gate.weight", (n_experts(config), hidden)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for e in range(n_experts(config)):
        yield f"{block}experts.{e}.{gate}.weight", (ffn, hidden)
        yield f"{block}experts.{e}.{up}.weight", (ffn, hidden)
        yield f"{block}experts.{e}.{down}.weight", (hidden, ffn)
    if name_of(config) in _DEEPSEEK:
        shared = config["n_shared_experts"] * ffn
        if name_of(config) in _SIGMOID:
            yield block + "gate.e_score_correction_bias", (n_experts(config),)
        yield block + "shared_experts.gate_proj.weight", (shared, hidden)
        yield block + "shared_experts.up_proj.weight", (shared, hidden)
        yield block + "shared_experts.down_proj.weight", (hidden, shared)
    if "shared_expert_intermediate_size" in config:
        shared = config["shared_expert_intermediate_size"]
        yield block + "shared_expert.gate_proj.weight", (shared, hidden)
        yield block + "shared_expert.up_proj.weight", (shared, hidden)
        yield block + "shared_expert.down_proj.weight", (hidden, shared)
        yield block + "shared_expert_gate.weight", (1, hidden)


def split(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """gpt-oss' tensors as MLX and GGUF have them: gate and up apart, [experts, out, in]."""
    found: dict[str, Array] = {}
    for name, values in tensors.items():
        stem, _, part = name.rpartition(".")
        kind = "bias" if part.endswith("_bias") else "weight"
        rows = values.swapaxes(1, 2) if kind == "weight" and values.ndim == 3 else values
        if part.startswith("gate_up_proj"):
            found[f"{stem}.gate_proj.{kind}"] = np.ascontiguousarray(rows[:, ::2])
            found[f"{stem}.up_proj.{kind}"] = np.ascontiguousarray(rows[:, 1::2])
        elif part.startswith("down_proj"):
            found[f"{stem}.down_proj.{kind}"] = np.ascontiguousarray(rows)
        else:
            found[name] = values
    return found


def expanded(config: Config, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """A tensor for each expert, whatever layout gpt-oss' are in."""
    if name_of(config) != "GptOssForCausalLM":
        return dict(tensors)
    found: dict[str, Array] = {}
    for name, values in split(tensors).items():
        block, is_expert, part = name.partition("mlp.experts.")
        for e in range(n_experts(config)) if is_expert else ():
            found[f"{block}mlp.experts.{e}.{part}"] = values[e]
        if not is_expert:
            found[name] = values
    return found


GGUF_NAMES = {
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "shared_experts.gate_proj": "ffn_gate_shexp",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp",
}


def gguf_name(name: str) -> str:
    """Of what lies in a sparse layer's block; all experts' have one name."""
    inner = name.partition(".")[2]
    if inner in GGUF_NAMES:
        return GGUF_NAMES[inner]
    part = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}
    return f"ffn_{part.get(inner.rpartition('.')[2], 'down')}_exps"


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Keys without the architecture."""
    if not n_experts(config):
        return {}
    found = {
        "expert_count": n_experts(config),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if name_of(config) in _DEEPSEEK:
        found |= {
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_gating_func": 2 if name_of(config) in _SIGMOID else 1,
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
            "leading_dense_block_count": config.get("first_k_dense_replace"),
        }
    return {key: value for key, value in found.items() if value is not None}


Entry = tuple[str, tuple[int, ...], str, bytes]


def stacked(entries: list[Entry]) -> list[Entry]:
    """Tensors of one name become one, [how many, *shape]."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry[0], []).append(entry)
    out = []
    for name, rows in found.items():
        _, shape, kind, _ = rows[0]
        whole = (len(rows), *shape) if "_exps." in name and len(rows) > 1 else shape
        out.append((name, whole, kind, b"".join(data for *_, data in rows)))
    return out


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def route(config: Config, scores: Array, bias: Array | None) -> Array:
    """Each row's weight of each expert, 0 where it is not chosen, [n, n_experts]."""
    k = config["num_experts_per_tok"]
    if name_of(config) == "GptOssForCausalLM":
        chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
        weights = np.zeros_like(scores)
        of_chosen = softmax(np.take_along_axis(scores, chosen, -1))
        np.put_along_axis(weights, chosen, of_chosen, -1)
        return weights
    probabilities = softmax(scores) if bias is None else sigmoid(scores)
    by = probabilities + (0.0 if bias is None else bias)
    if config.get("n_group", 1) > 1 and config.get("topk_method") != "greedy":
        groups = by.reshape(len(by), config["n_group"], -1)
        n_best = 1 if bias is None else 2
        best = np.sort(groups, axis=-1)[..., -n_best:].sum(axis=-1)
        worst = np.argsort(-best, axis=-1, kind="stable")[:, config["topk_group"] :]
        for i in range(len(by)):
            groups[i, worst[i]] = -np.inf
    chosen = np.argsort(-by, axis=-1, kind="stable")[:, :k]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, np.take_along_axis(probabilities, chosen, -1), -1)
    if config.get("norm_topk_prob", True):
        weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights * config.get("routed_scaling_factor", 1.0))


def clamped(gate: Array, up: Array) -> Array:
    """gpt-oss' gated activation."""
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return np.asarray((up + 1) * gate * sigmoid(1.702 * gate))


def block(
    config: Config,
    layer: int,
    x: Array,
    project: Callable[[str, Array], Array],
    act: Any,
    bias: Array | None,
) -> Array:
    """Output of a sparse layer's experts for x [n, hidden]; `bias`: e_score_correction_bias."""
    p = f"model.layers.{layer}."
    mixtral = name_of(config) == "MixtralForCausalLM"
    gpt_oss = name_of(config) == "GptOssForCausalLM"
    p += "block_sparse_moe." if mixtral else "mlp."
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")

    def expert(name: str, gate: str, up: str, down: str, x: Array) -> Array:
        g, u = project(f"{name}.{gate}", x), project(f"{name}.{up}", x)
        return project(f"{name}.{down}", clamped(g, u) if gpt_oss else act(g) * u)

    weights = route(config, project(p + ("router" if gpt_oss else "gate"), x), bias)
    out = np.zeros_like(x)
    for e in range(n_experts(config)):
        rows = np.flatnonzero(weights[:, e])
        if rows.size:
            y = expert(f"{p}experts.{e}", gate, up, down, x[rows])
            out[rows] += weights[rows, e, None] * y
    if name_of(config) in _DEEPSEEK:
        out += expert(p + "shared_experts", "gate_proj", "up_proj", "down_proj", x)
    if "shared_expert_intermediate_size" in config:
        y = expert(p + "shared_expert", "gate_proj", "up_proj", "down_proj", x)
        out += sigmoid(project(p + "shared_expert_gate", x)) * y
    return out
