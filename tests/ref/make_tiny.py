"""Writes tiny random models for the tests: a safetensors folder, or a GGUF file.

Needs NumPy only. The weights are random, the tokenizer is a real byte-level BPE (trained on the few
sentences below), so that text goes in and out. From the command line:
`python -m ref.make_tiny llama FOLDER`, in tests.

Layouts: safetensors (8-byte header length, JSON, bytes) and GGUF v3 as ggml's docs/gguf.md has it.
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ref import experts, latent

F32 = NDArray[np.float32]
Config = dict[str, Any]

ARCHS = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "glm4_moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
}
GGUF_TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "Q8_K": (15, 256, 292),
    "MXFP4": (39, 32, 17),
}  # id, elements and bytes of a block

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIALS = (BOS, EOS, PAD, "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = """\
The quick brown fox jumps over the lazy dog while the other animals are watching from the hill.
Natalia sold some clips to her friends in April and then she sold half as many in May. How many
clips did she sell altogether? There are fifteen trees in the grove, and the workers will plant
more trees there today. What is the answer to this question, and which of these numbers is the
largest one? We know that every one of them has been here for a long time, so they could not
have come later. Yesterday evening somebody brought eleven oranges, seven apples and a basket
of cherries into the kitchen, because everybody wanted pancakes for breakfast. Each customer
paid twenty dollars per ticket, although children under twelve received half the usual price."""


class Codec(Protocol):
    """What quantized GGUF types need: `qkv._core` has it."""

    def quantize(self, format: str, values: F32, /) -> NDArray[np.uint8]: ...
    def dequantize(self, format: str, blocks: NDArray[np.uint8], /) -> F32: ...


class ZeroBlocks:
    """A codec for types that have none: blocks of zeros."""

    def quantize(self, name: str, values: F32) -> NDArray[np.uint8]:
        _, elems, n_bytes = GGUF_TYPES[name]
        return np.zeros(values.size // elems * n_bytes, np.uint8)

    def dequantize(self, name: str, blocks: NDArray[np.uint8]) -> F32:
        _, elems, n_bytes = GGUF_TYPES[name]
        return np.zeros(blocks.size // n_bytes * elems, np.float32)


class Tiny(NamedTuple):
    config: Config  # in the form that transformers 4.x writes
    tensors: dict[str, F32]  # under the hub's names, with the values that the file stores


def make_config(arch: str, **overrides: Any) -> Config:
    """config.json of a tiny model; None is written as null."""
    name, model_type = ARCHS[arch]
    vocab = int(overrides.get("vocab_size", 512))
    config: Config = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": arch in ("qwen2", "gemma2", "gemma3"),
        "bos_token_id": vocab - len(SPECIALS),
        "eos_token_id": vocab - len(SPECIALS) + 1,
        "torch_dtype": "bfloat16",
    }
    if arch == "mistral":
        config |= {"sliding_window": 24, "head_dim": 16}
    elif arch == "qwen2":
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
    elif arch == "qwen3":
        config |= {"head_dim": 32, "attention_bias": False, "use_sliding_window": False}
    elif arch == "phi3":
        window = {"sliding_window": 24, "original_max_position_embeddings": 1024}
        config |= {**window, "partial_rotary_factor": 1.0, "pad_token_id": None}
    elif arch == "glm4":
        config |= {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}
        config |= {"pad_token_id": None}
    elif arch == "gemma2":
        del config["hidden_act"]
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 40,
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        }
    elif arch == "gemma3":
        del config["hidden_act"]
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 40,
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        }
    config |= experts.CONFIGS.get(arch, {}) | latent.CONFIGS.get(arch, {})
    config |= overrides
    return config


def to_v5(config: Config) -> Config:
    """The same config as transformers 5.x writes it."""
    out = dict(config)
    out["dtype"] = out.pop("torch_dtype")
    rope = dict(out.pop("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope["rope_theta"] = out.pop("rope_theta")
    if "partial_rotary_factor" in out:
        rope["partial_rotary_factor"] = out.pop("partial_rotary_factor")
    if "rope_local_base_freq" in out:
        local = {"rope_type": "default", "rope_theta": out.pop("rope_local_base_freq")}
        out["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    else:
        out["rope_parameters"] = rope
    return out


def is_gemma(config: Mapping[str, Any]) -> bool:
    return str(config["architectures"][0]).startswith("Gemma")


def rope_dim(config: Config) -> int:
    return int(head_dim(config) * config.get("partial_rotary_factor", 1.0))


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def tensor_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every tensor, in the order of the file."""
    name = config["architectures"][0]
    hidden, ffn, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    dim = head_dim(config)
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    qwen2 = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")
    qkv_bias = name in qwen2 or config.get("attention_bias", False)
    no_out_bias = (*qwen2, "Glm4ForCausalLM", "Glm4MoeForCausalLM")
    out_bias = name not in no_out_bias and config.get("attention_bias", False)
    parts = [("q", q), ("k", kv), ("v", kv)]
    mlp = [("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))]
    if name == "Phi3ForCausalLM":
        parts = [("qkv", q + 2 * kv)]
    if name in ("Phi3ForCausalLM", "Glm4ForCausalLM"):
        mlp = [("gate_up", (2 * ffn, hidden)), ("down", (hidden, ffn))]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (hidden,)
        if latent.is_latent(config):
            yield from latent.shapes(config, i)
        for proj, n in () if latent.is_latent(config) else parts:
            yield p + f"self_attn.{proj}_proj.weight", (n, hidden)
            if qkv_bias:
                yield p + f"self_attn.{proj}_proj.bias", (n,)
        qk_norm = name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM")
        if qk_norm or config.get("use_qk_norm"):
            yield p + "self_attn.q_norm.weight", (dim,)
            yield p + "self_attn.k_norm.weight", (dim,)
        if name == "GptOssForCausalLM":
            yield p + "self_attn.sinks", (config["num_attention_heads"],)
        yield p + "self_attn.o_proj.weight", (hidden, latent.width(config) or q)
        if out_bias:
            yield p + "self_attn.o_proj.bias", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
        if is_gemma(config):
            yield p + "pre_feedforward_layernorm.weight", (hidden,)
            yield p + "post_feedforward_layernorm.weight", (hidden,)
        if name == "Glm4ForCausalLM":
            yield p + "post_self_attn_layernorm.weight", (hidden,)
            yield p + "post_mlp_layernorm.weight", (hidden,)
        if experts.is_sparse(config, i):
            yield from experts.shapes(config, i)
            continue
        for proj, shape in mlp:
            yield p + f"mlp.{proj}_proj.weight", shape
            if config.get("mlp_bias", False):
                yield p + f"mlp.{proj}_proj.bias", (shape[0],)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def make_tensors(config: Config, seed: int) -> dict[str, F32]:
    """Random weights under which logits spread over a few units and attention is not flat. From
    RandomState, whose numbers NumPy never changes: expected values are recorded for them."""
    rng = np.random.RandomState(seed)
    centre = 0.0 if is_gemma(config) else 1.0
    out: dict[str, F32] = {}
    for name, shape in tensor_shapes(config):
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            values = values * 0.2 + (0.0 if name.endswith(".bias") else centre)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            values *= 2.5 / np.sqrt(shape[1])
        elif name.endswith("_bias"):  # of all experts: large enough to meet the clamps
            values *= 3.0
        else:
            values *= 1.5 / np.sqrt(shape[1])
        out[name] = values.astype(np.float32)
    return out


def bf16_bits(values: F32) -> NDArray[np.uint16]:
    """Round to nearest, ties to even. No NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values: F32, dtype: str) -> tuple[bytes, F32]:
    """The bytes of an unquantized dtype, and the values they hold."""
    if dtype == "BF16":
        bits = bf16_bits(values)
        return bits.tobytes(), bf16_values(bits)
    stored = values.astype({"F32": np.float32, "F16": np.float16}[dtype])
    return stored.tobytes(), stored.astype(np.float32)


def write_safetensors(
    path: Path, tensors: Mapping[str, F32], dtype: str | Mapping[str, str] = "BF16"
) -> dict[str, F32]:
    """Writes one file; returns the values as stored. `dtype` may be given per tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    stored: dict[str, F32] = {}
    for name, values in tensors.items():
        kind = dtype if isinstance(dtype, str) else dtype.get(name, "BF16")
        data, stored[name] = encode(values, kind)
        header[name] = {
            "dtype": kind,
            "shape": list(values.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(body))
    return stored


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte: 33..126, 161..172 and 174..255 stand for
    themselves, the others are moved to 256 and up in order."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(moved)) for b in range(256)]


def train_bpe(n_tokens: int) -> tuple[list[str], list[tuple[str, str]]]:
    """At most n_tokens tokens (bytes first) and the merges that make them."""
    alphabet = byte_alphabet()
    words = [
        [alphabet[b] for b in word.encode()] for word in re.findall(r" ?[A-Za-z]+|[^A-Za-z ]", TEXT)
    ]
    tokens, merges = list(alphabet), list[tuple[str, str]]()
    while len(tokens) < n_tokens:
        pairs = Counter(p for word in words for p in zip(word, word[1:], strict=False))
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        if "".join(best) not in tokens:
            tokens.append("".join(best))
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    return tokens, merges


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE, special tokens at the end."""
    tokens, merges = train_bpe(vocab_size - len(SPECIALS))
    first = vocab_size - len(SPECIALS)
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": first + i, "content": s, **special} for i, s in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(m) for m in merges],
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")


def write(
    path: str | Path,
    arch: str,
    seed: int = 0,
    dtype: str = "BF16",
    *,
    tokenizer: bool = True,
    **overrides: Any,
) -> Tiny:
    """Writes a folder with config.json, model.safetensors and (vocab_size >= 261) a tokenizer."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(arch, **overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    stored = write_safetensors(folder / "model.safetensors", make_tensors(config, seed), dtype)
    if tokenizer and config["vocab_size"] >= 256 + len(SPECIALS):
        write_tokenizer(folder, config["vocab_size"])
    return Tiny(config, stored)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_NAMES_POST = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
GGUF_NAMES_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


GGUF_NAMES_GLM4 = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, arch: str) -> str:
    names = GGUF_NAMES | (GGUF_NAMES_GLM4 if arch == "glm4" else {})
    names |= GGUF_NAMES_GEMMA if arch.startswith("gemma") else {}
    names |= latent.GGUF_NAMES if arch in latent.CONFIGS else {}
    names |= GGUF_NAMES_POST if arch in ("gpt_oss", "glm4_moe") else {}
    whole = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if whole is not None and whole[2] in names:
        return f"blk.{whole[1]}.{names[whole[2]]}"
    stem, kind = name.rsplit(".", 1)
    if stem in names:
        return f"{names[stem]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
    assert match is not None, name
    return f"blk.{match[1]}.{names.get(match[2]) or experts.gguf_name(match[2])}.{kind}"


def permute_rows(values: F32, n_heads: int) -> F32:
    """Rows of q and k as llama's GGUF has them: the two halves of a head interleaved."""
    halves = values.reshape(n_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def gguf_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: Any) -> bytes:
    """Type id and value: bool 7, u32 4, f32 6, string 8, array 9 (of u32, f32 or strings)."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    items = [gguf_value(v) for v in value]
    kind = items[0][:4]
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def llama3_factors(config: Config) -> F32:
    """The tensor rope_freqs.weight: what inv_freq is divided by (Llama 3.1's scaling)."""
    scaling, dim = config["rope_scaling"], head_dim(config)
    inv_freq = 1.0 / config["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    wavelength = 2 * np.pi / inv_freq
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    ratio = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((ratio - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1 - smooth) / scaling["factor"] + smooth), dtype=np.float32)


def gguf_metadata(arch: str, config: Config, with_tokenizer: bool) -> dict[str, Any]:
    a = "llama" if arch in ("mistral", "mixtral") else arch.replace("_moe", "moe")
    a = "gpt-oss" if arch == "gpt_oss" else "deepseek2" if arch in latent.CONFIGS else a
    meta: dict[str, Any] = {
        "general.architecture": a,
        "general.name": f"tiny {arch}",
        f"{a}.block_count": config["num_hidden_layers"],
        f"{a}.context_length": config["max_position_embeddings"],
        f"{a}.embedding_length": config["hidden_size"],
        f"{a}.feed_forward_length": config["intermediate_size"],
        f"{a}.attention.head_count": config["num_attention_heads"],
        f"{a}.attention.head_count_kv": config["num_key_value_heads"],
        f"{a}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{a}.attention.key_length": head_dim(config),
        f"{a}.attention.value_length": head_dim(config),
        f"{a}.rope.dimension_count": rope_dim(config),
        f"{a}.rope.freq_base": float(config["rope_theta"]),
    }
    if arch in ("gemma2", "gemma3", "phi3", "gpt_oss") and config["sliding_window"]:
        meta[f"{a}.attention.sliding_window"] = config["sliding_window"]
    if arch == "gemma2":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            meta[f"{a}.{key}"] = float(config[key])
    if further := config.get("num_nextn_predict_layers", 0):
        meta[f"{a}.nextn_predict_layers"] = further
        meta[f"{a}.block_count"] += further
    more = experts.gguf_metadata(config) | latent.gguf_metadata(config)
    meta |= {f"{a}.{key}": value for key, value in more.items()}
    scaling = config.get("rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type")) if scaling else None
    if scaling and kind == "longrope":
        original = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        meta[f"{a}.rope.scaling.original_context_length"] = original
        meta[f"{a}.rope.scaling.attn_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    elif scaling and kind in ("linear", "yarn"):
        meta[f"{a}.rope.scaling.type"] = kind
        meta[f"{a}.rope.scaling.factor"] = float(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            meta[f"{a}.rope.scaling.original_context_length"] = scaling[
                "original_max_position_embeddings"
            ]
    if with_tokenizer:
        tokens, merges = train_bpe(config["vocab_size"] - len(SPECIALS))
        first = config["vocab_size"] - len(SPECIALS)
        unused = [f"<|unused{i}|>" for i in range(len(tokens), first)]
        meta |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2" if arch.startswith("qwen") else "gpt-2",
            "tokenizer.ggml.tokens": [*tokens, *unused, *SPECIALS],
            "tokenizer.ggml.token_type": [1] * len(tokens)
            + [5] * len(unused)
            + [3] * len(SPECIALS),
            "tokenizer.ggml.merges": [" ".join(m) for m in merges],
            "tokenizer.ggml.bos_token_id": config["bos_token_id"],
            "tokenizer.ggml.eos_token_id": config["eos_token_id"],
            "tokenizer.ggml.padding_token_id": first + SPECIALS.index(PAD),
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHAT_TEMPLATE,
        }
    return meta


def write_gguf_file(
    path: Path, meta: Mapping[str, Any], tensors: list[tuple[str, tuple[int, ...], str, bytes]]
) -> None:
    """One GGUF v3 file of (name, shape outermost first, type, bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(meta))
    for key, value in meta.items():
        head += gguf_string(key) + gguf_value(value)
    body = bytearray()
    for name, shape, kind, data in tensors:
        body += bytes(-len(body) % 32)
        head += gguf_string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", GGUF_TYPES[kind][0], len(body))
        body += data
    head += bytes(-len(head) % 32)
    path.write_bytes(head + bytes(body) + bytes(-len(body) % 32))


def write_gguf(
    path: str | Path,
    arch: str,
    seed: int = 0,
    types: str | Mapping[str, str] = "F16",
    codec: Codec | None = None,
    *,
    tokenizer: bool = True,
    **overrides: Any,
) -> Tiny:
    """Writes one .gguf file. `types` gives the type of all matrices, or maps regular expressions
    (searched in the GGUF name, the first that matches) to types, F16 otherwise; vectors are F32.
    Quantized types need `codec` and rows that are multiples of their block."""
    config = make_config(arch, **overrides)
    gemma = is_gemma(config)
    stored: dict[str, F32] = {}
    entries: list[tuple[str, tuple[int, ...], str, bytes]] = []
    tensors = make_tensors(config, seed)
    tensors = experts.split(tensors) if arch == "gpt_oss" else tensors
    tensors = latent.split(config, tensors)
    for name, made in tensors.items():
        target = gguf_name(name, arch)
        values = made + 1 if gemma and made.ndim == 1 else made
        values = values[0] if target.endswith("ffn_gate_inp_shexp.weight") else values
        heads = 0
        if arch in ("llama", "mistral", "mixtral") and re.search(r"\.attn_[qk]\.", target):
            which = "num_attention_heads" if ".attn_q." in target else "num_key_value_heads"
            heads = config[which]
            values = permute_rows(values, heads)
        is_vector = values.ndim == 1 or target.endswith(".bias")
        kind = "F32" if is_vector else pick_type(types, target)
        if kind in ("F32", "F16", "BF16"):
            data, back = encode(values, kind)
        else:
            if codec is None:
                raise ValueError(f"{target}: {kind} needs a codec")
            blocks = codec.quantize(kind, values.reshape(-1))
            data, back = blocks.tobytes(), codec.dequantize(kind, blocks).reshape(values.shape)
        entries.append((target, values.shape, kind, data))
        if heads:
            pairs = back.reshape(heads, -1, 2, *back.shape[1:])
            back = np.ascontiguousarray(pairs.swapaxes(1, 2), dtype=np.float32).reshape(back.shape)
        stored[name] = (back - 1 if gemma and back.ndim == 1 else back).reshape(made.shape)
    scaling = config.get("rope_scaling")
    rope = scaling.get("rope_type", scaling.get("type")) if scaling else None
    for i in range(config.get("num_nextn_predict_layers", 0)):
        block = f"blk.{config['num_hidden_layers'] + i}."
        for stem in ("nextn.eh_proj", "nextn.enorm", "attn_norm"):
            ones = np.ones(64, np.float32).tobytes()
            entries.append((f"{block}{stem}.weight", (64,), "F32", ones))
    extra: dict[str, F32] = {}
    if rope == "llama3":
        extra["rope_freqs"] = llama3_factors(config)
    elif scaling and rope == "longrope":
        for length in ("short", "long"):
            extra[f"rope_factors_{length}"] = np.array(scaling[f"{length}_factor"], np.float32)
    for stem, factors in extra.items():
        entries.append((f"{stem}.weight", factors.shape, "F32", factors.tobytes()))
    with_tokenizer = tokenizer and config["vocab_size"] >= 256 + len(SPECIALS)
    meta = gguf_metadata(arch, config, with_tokenizer)
    write_gguf_file(Path(path), meta, experts.stacked(entries))
    return Tiny(config, latent.joined(config, stored))


def pick_type(types: str | Mapping[str, str], name: str) -> str:
    if isinstance(types, str):
        return types
    return next((kind for pattern, kind in types.items() if re.search(pattern, name)), "F16")


if __name__ == "__main__":
    write(sys.argv[2], sys.argv[1])
