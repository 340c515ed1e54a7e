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
}


def name_of(config: Config) -> str:
    return str(config["architectures"][0])


def is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer has experts instead of one MLP."""
    if name_of(config) == "MixtralForCausalLM":
        return True
    if name_of(config) not in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        return False
    step = config.get("decoder_sparse_step", 1)
    return layer not in config.get("mlp_only_layers", ()) and (layer + 1) % step == 0


def n_experts(config: Config) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])


def shapes(config: Config, layer: int) -> Shapes:
    """Names and shapes of a sparse layer's tensors."""
    p, hidden = f"model.layers.{layer}.", config["hidden_size"]
    mixtral = name_of(config) == "MixtralForCausalLM"
    ffn = config["intermediate_size"] if mixtral else config["moe_intermediate_size"]
    block = p + ("block_sparse_moe." if mixtral else "mlp.")
    yield block + "gate.weight", (n_experts(config), hidden)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for e in range(n_experts(config)):
        yield f"{block}experts.{e}.{gate}.weight", (ffn, hidden)
        yield f"{block}experts.{e}.{up}.weight", (ffn, hidden)
        yield f"{block}experts.{e}.{down}.weight", (hidden, ffn)
    if "shared_expert_intermediate_size" in config:
        shared = config["shared_expert_intermediate_size"]
        yield block + "shared_expert.gate_proj.weight", (shared, hidden)
        yield block + "shared_expert.up_proj.weight", (shared, hidden)
        yield block + "shared_expert.down_proj.weight", (hidden, shared)
        yield block + "shared_expert_gate.weight", (1, hidden)


GGUF_NAMES = {
    "gate": "ffn_gate_inp",
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
    if not (config.get("num_experts") or config.get("num_local_experts")):
        return {}
    found = {
        "expert_count": n_experts(config),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
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
        whole = (len(rows), *shape) if "_exps." in name else shape
        out.append((name, whole, kind, b"".join(data for *_, data in rows)))
    return out


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def route(config: Config, scores: Array) -> Array:
    """Each row's weight of each expert, 0 where it is not chosen, [n, n_experts]."""
    k = config["num_experts_per_tok"]
    probabilities = softmax(scores)
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, :k]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, np.take_along_axis(probabilities, chosen, -1), -1)
    if config.get("norm_topk_prob", True):
        weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def block(
    config: Config, layer: int, x: Array, project: Callable[[str, Array], Array], act: Any
) -> Array:
    """Output of a sparse layer's experts for x [n, hidden]."""
    p = f"model.layers.{layer}."
    mixtral = name_of(config) == "MixtralForCausalLM"
    p += "block_sparse_moe." if mixtral else "mlp."
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")

    def expert(name: str, gate: str, up: str, down: str, x: Array) -> Array:
        h = act(project(f"{name}.{gate}", x)) * project(f"{name}.{up}", x)
        return project(f"{name}.{down}", h)

    weights = route(config, project(p + "gate", x))
    out = np.zeros_like(x)
    for e in range(n_experts(config)):
        rows = np.flatnonzero(weights[:, e])
        if rows.size:
            y = expert(f"{p}experts.{e}", gate, up, down, x[rows])
            out[rows] += weights[rows, e, None] * y
    if "shared_expert_intermediate_size" in config:
        y = expert(p + "shared_expert", "gate_proj", "up_proj", "down_proj", x)
        out += sigmoid(project(p + "shared_expert_gate", x)) * y
    return out
