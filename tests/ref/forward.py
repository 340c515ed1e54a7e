"""The forward pass in NumPy, for the tests: what the engine's log-probabilities are compared with.

Written to be read, not to be fast: one sequence, all positions at once, no cache. Takes config.json
in the form that transformers 4.x writes, and tensors under the hub's names (make_tiny.Tiny).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref import experts, latent

Array = NDArray[Any]
Config = Mapping[str, Any]


# By class: norms after attention, before the MLP, after the MLP; None: the block has none there.
Norms = tuple[str | None, str, str | None]
GEMMA_NORMS: Norms = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
NORMS: dict[str, Norms] = {
    "Gemma2ForCausalLM": GEMMA_NORMS,
    "Gemma3ForCausalLM": GEMMA_NORMS,
    "Glm4ForCausalLM": (
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
}


def is_gemma(config: Config) -> bool:
    return str(config["architectures"][0]).startswith("Gemma")


def rms_norm(x: Array, weight: Array, eps: float, plus_one: bool) -> Array:
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return np.asarray(x * scale * (1 + weight if plus_one else weight))


def activation(name: str, x: Array) -> Array:
    if name == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    assert name == "gelu_pytorch_tanh", name
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def inverse_frequencies(
    theta: float, scaling: Mapping[str, Any] | None, dim: int, max_positions: int, n_tokens: int
) -> tuple[NDArray[np.float64], float]:
    """Angle per position of each pair of channels, and the factor of cos and sin.

    Sources: transformers 5.24 modeling_rope_utils; YaRN, arXiv 2309.00071; Llama 3.1's scaling."""
    inv_freq = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    kind = scaling.get("rope_type", scaling.get("type")) if scaling else "default"
    if scaling is None or kind == "default":
        return inv_freq, 1.0
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        by = scaling["long_factor" if n_tokens > original else "short_factor"]
        longer = scaling.get("factor", max_positions / original)
        by_length = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
        return inv_freq / np.asarray(by), float(scaling.get("attention_factor", by_length))
    factor = float(scaling["factor"])
    if kind == "linear":
        return inv_freq / factor, 1.0
    original = scaling.get("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        rotations = original * inv_freq / (2 * np.pi)
        smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * inv_freq / factor + smooth * inv_freq, 1.0
    assert kind == "yarn", kind

    def correction(n_rotations: float) -> float:
        return dim * math.log(original / (n_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = correction(scaling.get("beta_fast", 32))
    high = correction(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)

    def mscale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        both = scaling.get("mscale") and scaling.get("mscale_all_dim")
        attention = (
            mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"]) if both else mscale(1.0)
        )
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), float(attention)


def windows_and_ropes(config: Config) -> list[tuple[int, float, Mapping[str, Any] | None]]:
    """(window, theta, scaling) of each layer; window 0 is full attention."""
    n_layers = config["num_hidden_layers"]
    window = config.get("sliding_window") or 0
    scaling = config.get("rope_scaling")
    if scaling and "original_max_position_embeddings" in config:
        key = "original_max_position_embeddings"
        scaling = {**scaling, key: config[key]}
    full = (0, config["rope_theta"], scaling)
    name = config["architectures"][0]
    if name == "Gemma2ForCausalLM":
        return [(0 if i % 2 else window, full[1], full[2]) for i in range(n_layers)]
    if name == "Gemma3ForCausalLM":
        pattern = config.get("sliding_window_pattern", 6)
        types = config.get("layer_types") or [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(n_layers)
        ]
        local = (window, config["rope_local_base_freq"], None)
        return [local if kind == "sliding_attention" else full for kind in types]
    if name == "GptOssForCausalLM":
        kinds = config["layer_types"]
        return [(window if t == "sliding_attention" else 0, full[1], full[2]) for t in kinds]
    if name in ("MistralForCausalLM", "Phi3ForCausalLM"):
        return [(window, full[1], full[2])] * n_layers
    if name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and config.get("use_sliding_window"):
        first = config.get("max_window_layers", 28)
        return [(window if i >= first else 0, full[1], full[2]) for i in range(n_layers)]
    return [full] * n_layers


def rotate(x: Array, cos: Array, sin: Array, neighbours: bool = False) -> Array:
    """x [n, heads, dim]; cos, sin [n, 1, pairs]: the first channels turn, their halves or their
    neighbours being the pairs."""
    n_rotated = 2 * cos.shape[-1]
    out = x.copy()
    if neighbours:
        first, second = slice(0, n_rotated, 2), slice(1, n_rotated, 2)
    else:
        first, second = slice(0, n_rotated // 2), slice(n_rotated // 2, n_rotated)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return np.asarray(out)


def attend(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    window: int,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """q [n, heads, dim], k and v [n, kv_heads, dim] -> [n, heads, dim]."""
    n, n_heads, _ = q.shape
    group = n_heads // k.shape[1]
    back = np.arange(n)[:, None] - np.arange(n)[None, :]
    hidden = (back < 0) | ((back >= window) if window else False)
    out = np.empty((n, n_heads, v.shape[2]), q.dtype)
    for head in range(n_heads):
        logits = q[:, head] @ k[:, head // group].T * q.dtype.type(scale)
        logits = cap * np.tanh(logits / cap) if cap else logits
        logits = np.where(hidden, -np.inf, logits)
        top = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=-1, keepdims=True)
        total = total if sinks is None else total + np.exp(sinks[head] - top)
        out[:, head] = weights / total @ v[:, head // group]
    return out


Quantize = Callable[[str, Array], Array]


def as_it_is(_: str, x: Array) -> Array:
    return x


def logits(
    config: Config,
    tensors: Mapping[str, NDArray[np.float32]],
    ids: Sequence[int] | NDArray[np.int32],
    dtype: type[np.floating[Any]] = np.float64,
    quantize: Quantize = as_it_is,
    prompt: tuple[int, Mapping[str, NDArray[np.float32]]] | None = None,
) -> Array:
    """Logits of every position, [len(ids), vocab]. `quantize`: the input of each linear. `prompt`:
    so many positions in front are computed with these tensors instead."""

    def cast(given: Mapping[str, NDArray[np.float32]]) -> dict[str, Array]:
        each = experts.expanded(config, given)
        return {name: np.asarray(values, dtype=dtype) for name, values in each.items()}

    w = cast(tensors)
    n_first, first = (0, w) if prompt is None else (prompt[0], cast(prompt[1]))

    def by_row(op: Callable[[Mapping[str, Array], Array], Array], x: Array) -> Array:
        return np.concatenate([op(first, x[:n_first]), op(w, x[n_first:])])

    gemma, eps = is_gemma(config), config["rms_norm_eps"]
    n, hidden = len(ids), config["hidden_size"]
    n_heads, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // n_heads
    scale = (config["query_pre_attn_scalar"] if gemma else dim) ** -0.5
    if latent.is_latent(config):
        dim, scale = config["qk_rope_head_dim"], latent.scale(config)
    act = str(config.get("hidden_activation") or config["hidden_act"])
    n_rotated = int(dim * config.get("partial_rotary_factor", 1.0))
    neighbours = config["architectures"][0] == "Glm4ForCausalLM"
    neighbours = neighbours or (latent.is_latent(config) and config.get("rope_interleave", True))
    after_attention, before_mlp, after_mlp = NORMS.get(
        config["architectures"][0], (None, "post_attention_layernorm", None)
    )

    def project(name: str, x: Array) -> Array:
        def op(w: Mapping[str, Array], x: Array) -> Array:
            y = quantize(name + ".weight", x) @ w[name + ".weight"].T
            return np.asarray(y + w[name + ".bias"] if name + ".bias" in w else y)

        return by_row(op, x)

    def norm(name: str, x: Array, eps: float = eps) -> Array:
        return by_row(lambda w, x: rms_norm(x, w[name + ".weight"], eps, gemma), x)

    x = by_row(lambda w, ids: w["model.embed_tokens.weight"][ids], np.asarray(ids))
    if gemma:
        x = x * dtype(math.sqrt(hidden))
    for i, (window, theta, scaling) in enumerate(windows_and_ropes(config)):
        p = f"model.layers.{i}."
        inv_freq, mscale = inverse_frequencies(
            theta, scaling, n_rotated, config["max_position_embeddings"], n
        )
        angles = np.arange(n)[:, None, None] * inv_freq
        cos, sin = (np.cos(angles) * mscale).astype(dtype), (np.sin(angles) * mscale).astype(dtype)
        h = norm(p + "input_layernorm", x)
        if latent.is_latent(config):
            turn = partial(rotate, cos=cos, sin=sin, neighbours=neighbours)
            q, k, v = latent.heads(config, i, h, project, norm, turn)
        elif p + "self_attn.qkv_proj.weight" in w:
            qkv = project(p + "self_attn.qkv_proj", h).reshape(n, n_heads + 2 * n_kv, dim)
            q, k, v = np.split(qkv, [n_heads, n_heads + n_kv], axis=1)
        else:
            q = project(p + "self_attn.q_proj", h).reshape(n, n_heads, dim)
            k = project(p + "self_attn.k_proj", h).reshape(n, n_kv, dim)
            v = project(p + "self_attn.v_proj", h).reshape(n, n_kv, dim)
        if p + "self_attn.q_norm.weight" in w:
            q, k = norm(p + "self_attn.q_norm", q), norm(p + "self_attn.k_norm", k)
        if not latent.is_latent(config):
            q, k = rotate(q, cos, sin, neighbours), rotate(k, cos, sin, neighbours)
        cap = config.get("attn_logit_softcapping") or 0.0
        h = attend(q, k, v, scale, window, cap, w.get(p + "self_attn.sinks"))
        h = project(p + "self_attn.o_proj", h.reshape(n, -1))
        x = x + (norm(p + after_attention, h) if after_attention else h)
        h = norm(p + before_mlp, x)
        if experts.is_sparse(config, i):
            bias = w.get(p + "mlp.gate.e_score_correction_bias")
            h = experts.block(config, i, h, project, lambda x: activation(act, x), bias)
        else:
            if p + "mlp.gate_up_proj.weight" in w:
                gate, up = np.split(project(p + "mlp.gate_up_proj", h), 2, axis=-1)
            else:
                gate, up = project(p + "mlp.gate_proj", h), project(p + "mlp.up_proj", h)
            h = project(p + "mlp.down_proj", activation(act, gate) * up)
        x = x + (norm(p + after_mlp, h) if after_mlp else h)

    def head(w: Mapping[str, Array], x: Array) -> Array:
        return np.asarray(x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T)

    out = by_row(head, norm("model.norm", x))
    cap = config.get("final_logit_softcapping")
    return np.asarray(cap * np.tanh(out / cap)) if cap else out


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def log_probs(
    config: Config,
    tensors: Mapping[str, NDArray[np.float32]],
    ids: Sequence[int] | NDArray[np.int32],
    dtype: type[np.floating[Any]] = np.float64,
    quantize: Quantize = as_it_is,
) -> Array:
    """Log-probabilities of every position, [len(ids), vocab]."""
    return log_softmax(logits(config, tensors, ids, dtype, quantize))


def prompt_logprobs(
    config: Config,
    tensors: Mapping[str, NDArray[np.float32]],
    ids: Sequence[int] | NDArray[np.int32],
    dtype: type[np.floating[Any]] = np.float64,
    quantize: Quantize = as_it_is,
) -> Array:
    """Entry t is log p(ids[t + 1] | ids[: t + 1]), [len(ids) - 1]."""
    table = log_probs(config, tensors, ids, dtype, quantize)
    return np.asarray(table[np.arange(len(ids) - 1), np.asarray(ids)[1:]])
