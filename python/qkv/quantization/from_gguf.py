"""A GGUF file as the folder that other tools read: names of tensors, config.json, the tokenizer."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..tokenizer import Tokenizer

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Where the name depends on the model.
_FUSED = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
_GLM4_NORMS = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

ROPE_FACTORS = "rope_freqs.weight"

#: By class: transformers' model_type.
_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Glm4ForCausalLM": "glm4",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
}


def is_gemma(config: Mapping[str, Any]) -> bool:
    """Norms of other checkpoints hold one less than a GGUF file's, and have Gemma's names."""
    return str(config["arch"]).startswith("Gemma")


def hub_name(name: str, config: Mapping[str, Any]) -> str:
    """The name that transformers gives a tensor of a GGUF file."""
    module, _, part = name.rpartition(".")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{part}"
    found = _NAME.fullmatch(name)
    if found is None or found[2] not in _OF_LAYER:
        raise _core.UnsupportedError(
            f"{name}: other checkpoints have no such tensor: convert from the original checkpoint"
        )
    inner = _OF_LAYER[found[2]]
    if config["fused_gate_up"]:
        inner = _FUSED.get(found[2], inner)
    if is_gemma(config):
        inner = _GEMMA_NORMS.get(found[2], inner)
    elif config["post_norms"]:
        inner = _GLM4_NORMS.get(found[2], inner)
    return f"model.layers.{found[1]}.{inner}.{found[3]}"


def config_json(
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    rope_factors: NDArray[np.float32] | None = None,
) -> dict[str, Any]:
    """transformers' config of what Checkpoint.model_config() gives. `rope_factors`: the tensor
    ROPE_FACTORS, if there is one."""
    arch = config["arch"]
    if arch not in _TYPES:
        raise _core.UnsupportedError(f"{arch}: its config.json cannot be made of a GGUF file")
    act = "gelu_pytorch_tanh" if config["act"] == "gelu_tanh" else "silu"
    eos = list(config["eos_ids"])
    rope = config["ropes"][0]
    found: dict[str, Any] = {
        "architectures": [arch],
        "model_type": _TYPES[arch],
        "hidden_size": config["hidden"],
        "intermediate_size": config["ffn"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config["n_kv_heads"],
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab"],
        "max_position_embeddings": config["max_positions"],
        "rms_norm_eps": float(str(np.float32(config["norm_eps"]))),
        "tie_word_embeddings": config["tied"],
        "hidden_act": act,
        "rope_theta": rope["theta"],
        "rope_scaling": _scaling(rope)
        if rope_factors is None
        else _llama3(rope_factors, rope["theta"]),
        "attention_bias": config["qkv_bias"],
        "bos_token_id": None if config["bos_id"] < 0 else config["bos_id"],
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": "bfloat16",
    }
    windows = [layer["window"] for layer in config["layers"]]
    if arch == "LlamaForCausalLM":
        found["mlp_bias"] = config["mlp_bias"]
    if arch in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        found |= {"use_sliding_window": False}
    padding = metadata.get("tokenizer.ggml.padding_token_id")
    if arch in ("Phi3ForCausalLM", "Glm4ForCausalLM"):
        found |= {
            "partial_rotary_factor": config["rope_dim"] / config["head_dim"],
            "pad_token_id": padding,
        }
    if arch == "Phi3ForCausalLM":
        found |= {"sliding_window": max(windows) or None}
        found |= {"original_max_position_embeddings": config["max_positions"]}
    elif is_gemma(config):
        if arch == "Gemma2ForCausalLM":
            found |= {"attn_logit_softcapping": config["attn_softcap"] or None}
        else:
            found |= {"rope_local_base_freq": config["ropes"][1]["theta"]}
        found |= {
            "hidden_activation": act,
            "query_pre_attn_scalar": round(1.0 / config["attn_scale"] ** 2),
            "sliding_window": max(windows) or 4096,
            "layer_types": [
                "sliding_attention" if window else "full_attention" for window in windows
            ],
            "final_logit_softcapping": config["logit_softcap"] or None,
            "pad_token_id": padding,
        }
    elif any(windows):
        raise _core.UnsupportedError(f"{arch} with sliding windows: convert from the original")
    return found


def _llama3(factors: NDArray[np.float32], theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling, which a GGUF file has as a divisor per frequency: the published numbers,
    if they give these divisors."""
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    wave = 2 * np.pi * theta ** (np.arange(factors.size) / factors.size)
    smooth = np.clip((original / wave - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1.0 / ((1.0 - smooth) / factor + smooth), factors, rtol=1e-4):
        raise _core.UnsupportedError(
            f"{ROPE_FACTORS} has other numbers than Llama 3.1 to 3.3: convert from the original "
            "checkpoint"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    if rope["scaling"] == "none":
        return None
    if rope["scaling"] == "linear":
        return {"rope_type": "linear", "factor": rope["factor"]}
    if rope["scaling"] != "yarn":
        raise _core.UnsupportedError(f"rope scaling {rope['scaling']}: convert from the original")
    found = {
        "rope_type": "yarn",
        "factor": rope["factor"],
        "original_max_position_embeddings": rope["original_positions"],
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
    }
    return found | (
        {"attention_factor": rope["attention_factor"]} if rope["attention_factor"] else {}
    )


def qk_row(i: int, head_dim: int) -> int:
    """Row of a GGUF file's q or k, or of their bias, that holds row `i`."""
    in_head, half = i % head_dim, head_dim // 2
    return i - in_head + 2 * (in_head % half) + in_head // half


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, by name; none where there is no vocabulary."""
    if metadata.get("tokenizer.ggml.tokens") is None:
        return {}
    tokenizer = Tokenizer.from_gguf(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    if "default" in tokenizer.templates:
        config["chat_template"] = tokenizer.templates["default"]
    return {
        "tokenizer.json": tokenizer.to_json().encode(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
    }
