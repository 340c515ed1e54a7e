"""How much fits: KV bytes per token, pool tokens and requests, from a config alone.

`tokens = floor((available - free * (1 - f)) * 2**30 / bytes_per_token)`, rounded down to the page:
`free` is the memory before the weights load, `available` what is left after them, `f` the fraction
of `free` that weights and cache may take together (SGLang's mem_fraction_static, so that its users
can redo their arithmetic). A GiB is 2**30 bytes throughout.
"""

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from . import _core, models, options, tables, weight_set
from .options import PAGE_TOKENS
from .params import integer
from .pools import Pool, requests_in
from .quantization import METHODS
from .quantization.names import by_glob

GIB = 2**30
_MOST_GIB = 2**30

#: What a plan compares unless told otherwise: every format that a user can choose, but not
#: bf16_stochastic, which is the control of comparisons and counts as bf16.
KV_DTYPES = ("bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16")

#: FlashMLA's row: e4m3 codes, a float32 scale for each 128 of them, the rope part in bf16.
DS_MLA = "fp8_ds_mla"
_DS_MLA_ROPE = 64

#: Bytes per weight of a quantized linear layer, scales included, where the method's name says it.
#: Embeddings, lm_head and norms keep 2 bytes.
_WEIGHT_BYTES = {
    "fp8": 1.0, "fbgemm_fp8": 1.0, "modelopt_fp8": 1.0, "w8a8_fp8": 1.0, "w8a8_int8": 1.0,
    "mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32, "modelopt_fp4": 0.5 + 1 / 16, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip
_MODELOPT_ALGOS = {
    "FP8": "fp8", "FP8_PB_WO": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "MXFP8": "mxfp8",
    "NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4", "W4A16_NVFP4": "nvfp4",
}  # fmt: skip
#: Of Quark's `dtype`; int4 and uint4 are grouped.
_QUARK_DTYPES = {"fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int8": 1.0, "fp4": 0.5 + 1 / 32}


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """What one token keeps in the cache, layer by layer."""

    layers: tuple[tuple[int, int, int], ...]  # KV heads, channels of K, channels of V; 0: no cache
    rope_dim: int = 0  # MLA: channels of the rope part in the latent row, else 0
    windows: tuple[int, ...] = ()  # by layer, tokens that it attends to; 0: all. Empty: all 0

    @property
    def latent(self) -> bool:
        """MLA: one row per token and layer, read as K and as V."""
        return self.rope_dim > 0

    def row_bytes(self, layer: int, k_format: str, v_format: str) -> int:
        """Bytes of a token in a layer, scales stored with the codes included."""
        n_heads, k_dim, v_dim = self.layers[layer]
        if DS_MLA in (k_format, v_format):
            if self.rope_dim != _DS_MLA_ROPE:
                raise ValueError(
                    f"kv_cache_dtype {DS_MLA!r} is for models with MLA only, and for "
                    f"{_DS_MLA_ROPE} rotated channels"
                )
        return n_heads * (options.row_bytes(k_format, k_dim) + options.row_bytes(v_format, v_dim))

    def split_bytes(self, kv_dtype: str | options.KvLayers) -> tuple[int, int]:
        """Of a token, in the layers that see everything and in those with a window: of a format,
        or of formats (K, V) by layer."""
        formats = _by_layer(kv_dtype, len(self.layers))
        rows = [self.row_bytes(i, k, v) for i, (k, v) in enumerate(formats)]
        windows = self.windows or (0,) * len(rows)
        in_windows = sum(row for row, w in zip(rows, windows, strict=True) if w)
        return sum(rows) - in_windows, in_windows

    def bytes_per_token(self, kv_dtype: str | options.KvLayers) -> int:
        """Over all layers."""
        return sum(self.split_bytes(kv_dtype))

    @property
    def window(self) -> int:
        """The largest of a layer, 0 if none has one."""
        return max(self.windows, default=0)


def _by_layer(kv_dtype: str | options.KvLayers, n_layers: int) -> options.KvLayers:
    return [(kv_dtype, kv_dtype)] * n_layers if isinstance(kv_dtype, str) else kv_dtype


# Configs.

# No model's number is near it, and no product of some of them is beyond a float.
_LARGEST = 2**31 - 1
_MOST_LAYERS = 4096
_MOST_CHANNELS = 2**20


def _need(config: Mapping[str, Any], key: str, largest: int = _LARGEST) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise ValueError(
            f"config: {key} is {value!r:.60}, a plan needs a number of at least 1 "
            f"(and at most {largest})"
        )
    return value


def _maybe(config: Mapping[str, Any], key: str) -> int:
    """0 where the key is absent, null or 0."""
    value = config.get(key)
    return 0 if value is None or (value == 0 and value is not False) else _need(config, key)


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty where the key is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config: {key} is {value!r:.60}, must be an object")
    return value


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a multimodal config, else the config itself."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return {**config, **config[key]}
    return config


def _layer_kinds(config: Mapping[str, Any], n_layers: int) -> Sequence[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        return ["full_attention" if w == 0 else "sliding" for w in _old_windows(config, n_layers)]
    is_list = isinstance(kinds, (list, tuple)) and all(isinstance(kind, str) for kind in kinds)
    if not is_list or len(kinds) != n_layers:
        raise ValueError(f"config: layer_types {kinds!r:.60} for {n_layers} layers")
    return list(kinds)


def _old_windows(config: Mapping[str, Any], n_layers: int) -> list[int]:
    """Windows as configs without layer_types say them."""
    kind = str(config.get("model_type", ""))
    window = _maybe(config, "sliding_window")
    if not window or not config.get("use_sliding_window", not kind.startswith("qwen")):
        return [0] * n_layers
    pattern = _maybe(config, "sliding_window_pattern") or _maybe(config, "_sliding_window_pattern")
    pattern = pattern or {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}.get(kind, 0)
    if pattern:
        return [0 if (i + 1) % pattern == 0 else window for i in range(n_layers)]
    first = _maybe(config, "max_window_layers") if config.get("use_sliding_window") else 0
    return [0 if i < first else window for i in range(n_layers)]


def _layer_heads(config: Mapping[str, Any], n_layers: int, n_heads: int) -> list[int]:
    """KV heads by layer: a number, or a list of them (0: a layer without attention)."""
    given = config.get("num_key_value_heads")
    if isinstance(given, (list, tuple)):
        numbers = all(type(n) is int and 0 <= n <= _LARGEST for n in given)
        if len(given) != n_layers or not numbers:
            raise ValueError(f"config: num_key_value_heads {given!r:.60} for {n_layers} layers")
        return list(given)
    given_one = "num_key_value_heads" in config
    n_kv_heads = _maybe(config, "num_key_value_heads") if given_one else _class_kv_heads(config)
    return [n_kv_heads or n_heads] * n_layers


def _class_kv_heads(config: Mapping[str, Any]) -> int:
    """What the config's class takes where the key is absent, as the engine reads it; 0 where it
    reads no such config."""
    try:
        return int(_core.parse_config(json.dumps(dict(config)))["n_kv_heads"])
    except (_core.Error, TypeError, ValueError):
        return 0


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """Reads the numbers of a Hugging Face config.json (as a dictionary)."""
    config = _language_model(config)
    n_layers = _need(config, "num_hidden_layers", _MOST_LAYERS)
    kinds = _layer_kinds(config, n_layers)
    window = _maybe(config, "sliding_window")
    windows = tuple(window if "sliding" in kind else 0 for kind in kinds)
    has_cache = ["linear" not in kind and "mamba" not in kind for kind in kinds]
    if config.get("kv_lora_rank") or config.get("qk_rope_head_dim"):
        rope_dim = _need(config, "qk_rope_head_dim", _MOST_CHANNELS)
        latent = (1, _need(config, "kv_lora_rank", _MOST_CHANNELS) + rope_dim, 0)
        layers = tuple(latent if has else (0, 0, 0) for has in has_cache)
        return KvShape(layers=layers, rope_dim=rope_dim, windows=windows)
    n_heads = _need(config, "num_attention_heads")
    head_dim = _maybe(config, "head_dim") or _need(config, "hidden_size") // n_heads
    v_dim = _maybe(config, "v_head_dim") or head_dim
    if max(head_dim, v_dim) > _MOST_CHANNELS:
        raise ValueError(
            f"config: heads of {max(head_dim, v_dim)} channels, a plan takes at most "
            f"{_MOST_CHANNELS}"
        )
    layers = tuple(
        (n, head_dim, v_dim) if has and n else (0, 0, 0)
        for has, n in zip(has_cache, _layer_heads(config, n_layers, n_heads), strict=True)
    )
    return KvShape(layers=layers, windows=windows)


def _grouped(n_bits: Any, group: Any, per_group: float) -> float:
    """Bytes per weight of n_bits with so many bytes of scale and minimum for each group."""
    if type(n_bits) is not int or not 1 <= n_bits <= 16:
        raise ValueError(f"config: {n_bits!r} bits per weight, must be within 1 and 16")
    size = group if isinstance(group, int) and group > 0 else 0
    return n_bits / 8 + (per_group / size if size else 0.0)


def _bytes_per_weight(config: Mapping[str, Any]) -> float:
    """Of the linear layers, from the quantization that the config declares."""
    quantized = _section(config, "quantization_config") or _section(config, "quantization")
    method = str(quantized.get("quant_method", "")).lower()
    algo = _MODELOPT_ALGOS.get(str(quantized.get("quant_algo", "")).upper())
    known = _WEIGHT_BYTES.get(algo or method)
    if known is not None:
        return known
    if not quantized:
        return 2.0
    bits = quantized.get("bits", quantized.get("w_bit"))
    group = quantized.get("group_size", quantized.get("q_group_size"))
    if method in ("gptq", "awq", "auto-round"):
        return _grouped(bits, group, 2 + float(bits) / 8 if isinstance(bits, int) else 2)
    if not method and bits is not None:  # MLX: a bf16 scale and a bf16 bias
        return _grouped(bits, group, 4)
    if method == "bitsandbytes":
        return 0.5 + 4 / 64 if quantized.get("load_in_4bit") else 1.0
    groups = quantized.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping) and groups:
        weights = _section(_section(groups, next(iter(groups))), "weights")
        scale = 1 if weights.get("type") == "float" else 2
        return _grouped(weights.get("num_bits"), weights.get("group_size"), scale)
    if method == "quark":
        return _quark_bytes(_section(quantized, "global_quant_config").get("weight"))
    raise ValueError(
        f"weights in {method or quantized!r:.60}: their size cannot be told from a config alone; "
        "give weights_gib, or the checkpoint itself"
    )


def _quark_bytes(weight: Any) -> float:
    """Of a weight's spec; a list of two is NVFP4."""
    if isinstance(weight, (list, tuple)):
        return _WEIGHT_BYTES["nvfp4"]
    spec = weight if isinstance(weight, Mapping) else {}
    dtype = str(spec.get("dtype"))
    if dtype in ("int4", "uint4"):
        return _grouped(4, spec.get("group_size"), 2.5)
    if dtype not in _QUARK_DTYPES:
        raise ValueError(f"config: Quark's weights in {dtype!r:.60}; give weights_gib")
    return _QUARK_DTYPES[dtype]


def _attention_weights(config: Mapping[str, Any], shape: KvShape) -> int:
    """Weights of all attention blocks. A layer with a state of fixed size is taken to be as large
    as one with attention."""
    hidden, n_heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    sizes = []
    for n_kv_heads, k_dim, v_dim in shape.layers:
        if shape.latent and n_kv_heads:
            nope, v_out = _need(config, "qk_nope_head_dim"), _need(config, "v_head_dim")
            q_rank = _maybe(config, "q_lora_rank")
            q_out = n_heads * (nope + shape.rope_dim)
            q = q_rank * (hidden + q_out) if q_rank else hidden * q_out
            kv = hidden * k_dim + (k_dim - shape.rope_dim) * n_heads * (nope + v_out)
            sizes.append(q + kv + n_heads * v_out * hidden)
        elif n_kv_heads:
            sizes.append(hidden * (n_heads + n_kv_heads) * (k_dim + v_dim))
    average = sum(sizes) // max(len(sizes), 1)
    return sum(sizes) + average * (len(shape.layers) - len(sizes))


def _ffn_weights(config: Mapping[str, Any], n_layers: int) -> int:
    hidden, ffn = _need(config, "hidden_size"), _maybe(config, "intermediate_size")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    n_experts = next((_need(config, name) for name in names if config.get(name)), 0)
    if not n_experts:
        return n_layers * 3 * hidden * _need(config, "intermediate_size")
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)):
        raise ValueError(f"config: mlp_only_layers is {dense!r:.60}, must be a list")
    n_dense = _maybe(config, "first_k_dense_replace") or len(dense)
    if n_dense > n_layers:
        raise ValueError(f"config: {n_dense} layers without experts, of {n_layers} layers")
    expert = 3 * hidden * (_maybe(config, "moe_intermediate_size") or ffn)
    n_shared = _maybe(config, "n_shared_experts")
    sparse = expert * (n_experts + n_shared) + n_experts * hidden
    sparse += 3 * hidden * _maybe(config, "shared_expert_intermediate_size")
    return n_dense * 3 * hidden * ffn + (n_layers - n_dense) * sparse


def _target(quantization: str | None) -> str:
    return "" if quantization is None else METHODS[quantization].target


def _made_bytes(quantization: str | None) -> float | None:
    """Bytes per weight of what a name makes of 16 bits; None if it makes nothing."""
    target = _target(quantization)
    side = 4096  # all groups divide it
    return _core.packed_bytes(target, side, side) / side**2 if target else None


def _n_table_weights(config: Mapping[str, Any]) -> int:
    # transformers leaves the key out where it is the architecture's own default.
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = str(config.get("model_type", "")).startswith("gemma")
    return _need(config, "vocab_size") * _need(config, "hidden_size") * (1 if tied else 2)


def _attention_is_plain(quantized: Mapping[str, Any]) -> bool:
    """Whether the declared format leaves out the first layer's attention, as gpt-oss' does."""
    names = quantized.get("modules_to_not_convert")
    listed = names if isinstance(names, list) else []
    return by_glob(str(name) for name in listed)("model.layers.0.self_attn.q_proj") is not None


def weight_bytes(config: Mapping[str, Any], quantization: str | None = None) -> int:
    """Estimated from the config: linear layers in the declared format, or in what `quantization`
    makes of them, the tables in 2 bytes, but MLX's, which are quantized, too; in 2 bytes also the
    attention that the declared format leaves out."""
    config = _language_model(config)
    shape = kv_shape(config)
    n_layers = len(shape.layers)
    matrices, plain = _ffn_weights(config, n_layers), _n_table_weights(config)
    made = _made_bytes(quantization)
    n_bytes = _bytes_per_weight(config) if made is None else made
    quantized = _section(config, "quantization_config") or _section(config, "quantization")
    attention = _attention_weights(config, shape)
    if made is None and _attention_is_plain(quantized):
        plain += attention
    else:
        matrices += attention
    is_mlx = "bits" in quantized and not quantized.get("quant_method")
    is_mlx = is_mlx or _target(quantization).startswith("mlx")
    return int(matrices * n_bytes) + int(plain * (n_bytes if is_mlx else 2))


def row_weights(config: Mapping[str, Any]) -> int:
    """Weights of the layers that one token is multiplied with: of the experts, those that it is
    routed to."""
    config = _language_model(config)
    shape = kv_shape(config)
    n_taken = _maybe(config, "num_experts_per_tok")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    taken = {name: n_taken for name in names if n_taken and config.get(name)}
    return _attention_weights(config, shape) + _ffn_weights({**config, **taken}, len(shape.layers))


def _gguf_shape(metadata: Mapping[str, Any]) -> KvShape:
    """From the key-values of a GGUF file (gguf-py's constants), whatever its architecture."""
    arch = metadata.get("general.architecture")

    def get(name: str) -> Any:
        return metadata.get(f"{arch}.{name}")

    n_layers, n_further = get("block_count"), get("nextn_predict_layers")
    if isinstance(n_layers, int) and isinstance(n_further, int):
        n_layers -= n_further  # layers for tokens after the next one: not run
    config: dict[str, Any] = {
        "num_hidden_layers": n_layers,
        "hidden_size": get("embedding_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "v_head_dim": get("attention.value_length"),
        "sliding_window": get("attention.sliding_window"),
        "model_type": str(arch),
    }
    if arch == "deepseek2" or get("attention.kv_lora_rank"):
        config["kv_lora_rank"] = get("attention.kv_lora_rank")
        config["qk_rope_head_dim"] = get("rope.dimension_count")
    if isinstance(config["num_attention_heads"], (list, tuple)):
        config["num_attention_heads"] = max(config["num_attention_heads"], default=0)
    try:
        return kv_shape(config)
    except ValueError as error:
        raise ValueError(f"GGUF architecture {arch!r}: {error}") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{path}: not an object")
    return config


@dataclass(frozen=True)
class _Choice:
    """What is made of the weights: as Engine has it."""

    quantization: str | None = None
    prefill: str | os.PathLike[str] | None = None

    def __bool__(self) -> bool:
        return self.quantization is not None or self.prefill is not None


def _weights(checkpoint: _core.Checkpoint, path: str, choice: _Choice) -> tuple[int, list[str]]:
    """Bytes of the weights as the engine will hold them, and what is to be said of them: why that
    is only as in the files where it will not load them."""
    try:
        decode = weight_set.read(checkpoint, path, choice.quantization, "bf16")
        prefill = weight_set.for_prompts(choice.prefill, decode, "bf16")
    except _core.Error as error:
        if choice:
            raise
        n_bytes = sum(entry[3] for entry in checkpoint.tensors())
        return n_bytes, [f"weights as in the files: {error}"]
    if prefill is None:
        return decode.n_bytes, []
    return decode.n_bytes + prefill.n_bytes, [_both(decode.n_bytes, prefill.n_bytes)]


def _both(decode: int, prefill: int) -> str:
    return f"weights: {decode / GIB:.2f} GiB, and {prefill / GIB:.2f} GiB more for prompts"


def _estimated(config: Mapping[str, Any], choice: _Choice) -> tuple[int, list[str]]:
    """The same from a config alone."""
    prefill = choice.prefill
    if prefill is not None and prefill not in METHODS:
        raise ValueError(
            f"prefill_quantization={os.fspath(prefill)!r}: from a config alone only a name can be "
            "planned; give the checkpoint, or weights_gib"
        )
    decode = weight_bytes(config, choice.quantization)
    if prefill is None or _target(os.fspath(prefill)) == _target(choice.quantization):
        return decode, []
    second = weight_bytes(config, os.fspath(prefill))
    if not any(_target(n).startswith("mlx") for n in (choice.quantization, os.fspath(prefill))):
        second -= 2 * _n_table_weights(_language_model(config))  # there once
    return decode + second, [_both(decode, second)]


@dataclass(frozen=True)
class Source:
    """What is known of a model before it is loaded."""

    name: str
    shape: KvShape
    config: Mapping[str, Any] | None  # None: GGUF, whose weights are counted
    n_bytes: int  # of the weights in files; 0: there are none
    notes: tuple[str, ...] = ()  # what is to be said of n_bytes


_AS_STORED = _Choice()


def read_model(
    model: str | os.PathLike[str] | Mapping[str, Any], choice: _Choice = _AS_STORED
) -> Source:
    """A folder, a config.json or what is in it, a GGUF file, a hub name, "demo"."""
    if isinstance(model, Mapping):
        return Source(str(model.get("_name_or_path") or "config"), kv_shape(model), model, 0)
    path = Path(models.resolve(model))
    config_path = path / "config.json" if path.is_dir() else path
    if config_path.suffix == ".json" and config_path.is_file():
        config = _with_side_file(_read_json(config_path), config_path.parent)
        if not path.is_dir() or not any(path.glob("*.safetensors")):
            return Source(path.name, kv_shape(config), config, 0)
    else:
        config = None
    checkpoint = _core.Checkpoint(str(path))
    try:
        shape = kv_shape(config) if config else _gguf_shape(checkpoint.metadata())
        n_bytes, notes = _weights(checkpoint, str(path), choice)
        return Source(path.name, shape, config, n_bytes, tuple(notes))
    finally:
        checkpoint.close()


def check_weights(model: str | os.PathLike[str], quantization: str | None) -> None:
    """Error if loading would refuse to make these weights of the model."""
    read_model(model, _Choice(quantization))


def _with_side_file(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """ModelOpt says how weights are quantized in a file of its own."""
    beside = folder / "hf_quant_config.json"
    if "quantization_config" in config or not beside.is_file():
        return config
    return {**config, "quantization_config": _section(_read_json(beside), "quantization")}


# The plan.


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits, per KV format. Prints as a table; `_repr_html_` in a notebook; `plot()`.

    `tokens` are those of the pool, `requests` how many of input + output tokens fit at once when
    all have grown to their full length; one more has to wait (`waits_from`). Where layers have a
    window, `bytes_per_token` are kept of what the window sees, `bytes_beyond_window` of every
    token, and the pools are those of an engine whose max_running is `requests`."""

    model: str
    memory_gib: float  # free before the weights load
    weights_gib: float
    weights_from: str  # "files", "config" (an estimate), "given"
    mem_fraction: float
    input_tokens: int
    output_tokens: int
    page_tokens: int
    bytes_per_token: dict[str, int]
    bytes_beyond_window: dict[str, int]
    window_tokens: dict[str, int]  # of `tokens`, those that the layers with windows hold
    tokens: dict[str, int]
    requests: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def waits_from(self) -> dict[str, int]:
        """The concurrency from which on a request waits."""
        return {kv: n + 1 for kv, n in self.requests.items()}

    def pool_gib(self, kv_dtype: str) -> float:
        """Size of the pool, K and V together."""
        beyond, per_token = self.bytes_beyond_window[kv_dtype], self.bytes_per_token[kv_dtype]
        n_bytes = self.tokens[kv_dtype] * beyond
        return (n_bytes + self.window_tokens[kv_dtype] * (per_token - beyond)) / GIB

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {**vars(self), "waits_from": self.waits_from, "notes": list(self.notes)}

    def _rows(self) -> list[tuple[str, ...]]:
        first = next(iter(self.bytes_per_token.values()))
        return [
            (
                kv,
                f"{n_bytes:,}",
                f"{first / n_bytes:.2f} x",
                f"{self.tokens[kv]:,}",
                f"{self.pool_gib(kv):.2f}",
                f"{self.requests[kv]:,}",
                f"{self.requests[kv] + 1:,}",
            )
            for kv, n_bytes in self.bytes_per_token.items()
        ]

    def _head(self) -> tuple[str, ...]:
        shape = f"{self.input_tokens}+{self.output_tokens}"
        return (
            "KV cache", "bytes/token", "capacity", "pool tokens", "pool GiB",
            f"requests of {shape}", "waits from",
        )  # fmt: skip

    def _title(self) -> str:
        whence = {"config": " (estimated)", "files": " (files)"}.get(self.weights_from, "")
        return (
            f"{self.model}: {self.memory_gib:.2f} GiB free, weights {self.weights_gib:.2f} GiB"
            f"{whence}, fraction {self.mem_fraction:g}, pages of {self.page_tokens}"
        )

    def __str__(self) -> str:
        return "\n".join([self._title(), tables.text(self._head(), self._rows()), *self.notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        table = tables.as_html(self._head(), self._rows())
        return f"<p>{html.escape(self._title())}</p>{table}{notes}"

    def plot(self) -> Any:
        """A bar per format: pool tokens, with the requests that fit written on it. Needs the
        `report` extra (matplotlib); returns the figure."""
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 (optional, slow to import)
        except ImportError as error:
            raise ImportError("Plan.plot() needs matplotlib: pip install 'qkv[report]'") from error
        figure = Figure(figsize=(8, 0.6 * len(self.tokens) + 1.4), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(list(self.tokens), list(self.tokens.values()))
        axes.bar_label(bars, [f"{n:,} requests" for n in self.requests.values()], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_title(self._title(), fontsize="medium", wrap=True)
        axes.set_xlabel(f"tokens in the pool; requests of {self.input_tokens}+{self.output_tokens}")
        return figure


def _window_note(shape: KvShape, n_tokens: int) -> str:
    """What is kept of a request, and what an engine must be told so that the pools are such."""
    rows = [n * (k + v) for n, k, v in shape.layers]
    n_kept = min(n_tokens, shape.window + PAGE_TOKENS)
    used = sum(
        row * (n_kept if window else n_tokens)
        for row, window in zip(rows, shape.windows, strict=True)
    )
    n_windowed = sum(window > 0 for window in shape.windows)
    return (
        f"{n_windowed} of {len(rows)} layers attend to a window of {shape.window} tokens and keep "
        f"no more than that ({used / (sum(rows) * n_tokens):.0%} of a request of {n_tokens}); the "
        "pools are those of max_running = the requests that fit"
    )


def _notes(shape: KvShape, n_tokens: int) -> list[str]:
    notes = []
    n_stateful = sum(n_heads == 0 for n_heads, _, _ in shape.layers)
    if n_stateful:
        notes.append(
            f"{n_stateful} layers keep a state of fixed size per request, which is not counted"
        )
    if any(shape.windows):
        notes.append(_window_note(shape, n_tokens))
    return notes


def _lanes(kv_cache_dtypes: Any, shape: KvShape) -> dict[str, options.KvLayers]:
    """Formats by layer under the names of the lanes; what Engine takes."""
    n_layers = len(shape.layers)
    if isinstance(kv_cache_dtypes, (str, Mapping)):
        kv_cache_dtypes = [kv_cache_dtypes]
    if not isinstance(kv_cache_dtypes, (list, tuple)):
        raise TypeError(f"kv_cache_dtypes={kv_cache_dtypes!r:.60}: a list of formats is needed")
    found: dict[str, options.KvLayers] = {}
    for given in kv_cache_dtypes:
        if given == "auto":
            raise ValueError("kv_cache_dtypes: 'auto' names no format, a plan needs one")
        lane = options.lanes(given, n_layers, compute_dtype="bf16", declared="")[0]
        if shape.latent and any(k != v for k, v in lane.layers):
            raise ValueError(f"kv_cache_dtypes: {lane.name}, but with MLA K and V are one row")
        found[lane.name] = lane.layers
    if not found:
        raise ValueError("kv_cache_dtypes is empty: at least one is needed")
    return found


def kv_bytes(kv_cache_dtypes: Any, shape: KvShape) -> dict[str, int]:
    """Bytes per token by the names of the lanes. ValueError, TypeError for what is no format."""
    lanes = _lanes(kv_cache_dtypes, shape)
    found = {kv: shape.bytes_per_token(layers) for kv, layers in lanes.items()}
    if not all(found.values()):
        raise ValueError("config: no layer keeps keys and values, there is nothing to plan")
    return found


def pool_tokens(kv_cache_dtype: Any, shape: KvShape, n_bytes: float, users: int) -> int:
    """Of the pools in so many bytes of an engine with max_running = users."""
    (layers,) = _lanes([kv_cache_dtype], shape).values()
    beyond, in_windows = shape.split_bytes(layers)
    if not in_windows:
        return math.floor(n_bytes / beyond)
    pool = Pool(token_bytes=beyond, window_bytes=in_windows, window=shape.window, max_running=users)
    return pool.tokens_in(math.floor(n_bytes), 2**35 - PAGE_TOKENS if beyond else 2**24)


def requests_that_fit(pool_tokens: int, request_tokens: int, page_tokens: int) -> int:
    """At a time, all grown to request_tokens. One more has to wait: plan() and bench() say so."""
    return pool_tokens // page_tokens // math.ceil(request_tokens / page_tokens)


@dataclass(frozen=True)
class _Sizes:
    beyond: int  # bytes of a token in the layers that see everything
    tokens: int
    window_tokens: int
    requests: int


def _sizes(
    shape: KvShape,
    layers: options.KvLayers,
    n_bytes: float,
    request_tokens: int,
    page_tokens: int,
    chunk_tokens: int,
) -> _Sizes:
    """Of pools in so many bytes."""
    beyond, in_windows = shape.split_bytes(layers)
    if not in_windows:
        tokens = math.floor(n_bytes / beyond) // page_tokens * page_tokens
        fit = requests_that_fit(tokens, request_tokens, page_tokens)
        return _Sizes(beyond, tokens, 0, fit)
    fit, pool = requests_in(
        math.floor(n_bytes),
        request_tokens,
        token_bytes=beyond,
        window_bytes=in_windows,
        window=shape.window,
        chunk_tokens=chunk_tokens,
    )
    # Without layers that see everything, no number of tokens is too many: those of the requests.
    most = 2**31 - PAGE_TOKENS if beyond else fit * (request_tokens + PAGE_TOKENS)
    tokens = pool.tokens_in(math.floor(n_bytes), most)
    return _Sizes(beyond, tokens, pool.window_tokens(tokens) if tokens else 0, fit)


def room_gib(memory_gib: float, weights_gib: float, mem_fraction: float) -> float:
    """For the KV cache; ValueError if there is none."""
    room = memory_gib - weights_gib - memory_gib * (1.0 - mem_fraction)
    if room <= 0.0:
        low = weights_gib / memory_gib
        way_out = f"mem_fraction must be above {low:.3f}" if low < 1 else "they are larger than it"
        raise ValueError(
            f"no room for a KV cache: {memory_gib:.2f} GiB are free, weights take "
            f"{weights_gib:.2f} GiB, mem_fraction is {mem_fraction:g}: {way_out}"
        )
    return room


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r:.60}: a number is needed")
    return float(value)


def check_memory(memory_gib: float, weights_gib: float | None, mem_fraction: float) -> None:
    if not 0.0 < _number("memory_gib", memory_gib) <= _MOST_GIB:
        raise ValueError(f"memory_gib={memory_gib}: must be above 0 and at most {_MOST_GIB}")
    if weights_gib is not None and not 0.0 <= _number("weights_gib", weights_gib) <= _MOST_GIB:
        raise ValueError(f"weights_gib={weights_gib}: must be within 0 and {_MOST_GIB}")
    if not 0.0 < _number("mem_fraction", mem_fraction) <= 1.0:
        raise ValueError(f"mem_fraction={mem_fraction}: must be above 0 and at most 1")


def plan(
    model_or_config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    memory_gib: float,
    weights_gib: float | None = None,
    quantization: str | None = None,
    prefill_quantization: str | os.PathLike[str] | None = None,
    mem_fraction: float = 0.85,
    kv_cache_dtypes: Sequence[str | Mapping[str, Any]] = KV_DTYPES,
    input_tokens: int = 512,
    output_tokens: int = 128,
    page_tokens: int = 1,
    chunk_tokens: int = 512,
) -> Plan:
    """What fits into `memory_gib` (free before the weights load), before anything is loaded.

    model_or_config: a folder, a config.json, a .gguf file, or the config as a dictionary.
    weights_gib: what loading takes. By default counted from the files, as this engine packs them,
        else estimated from the config and the weight format that it declares.
    quantization, prefill_quantization: what is made of them while loading, and a second set for
        prompts, as Engine takes them.
    kv_cache_dtypes: names, or mappings as Engine takes them; "fp8_ds_mla" for models with MLA.
    page_tokens: of the engine that is planned for; layers with windows have pages of 16.
    chunk_tokens: rows of prompts in a step, whose keys layers with windows hold, too.

    ValueError for a config that does not say enough, or if the weights alone leave no room; of the
    two options, what Engine raises."""
    options.check_quantization(quantization, prefill_quantization)
    choice = _Choice(quantization, prefill_quantization)
    if weights_gib is not None and choice:
        raise ValueError("weights_gib says what loading takes, whatever it is made of: give one")
    check_memory(memory_gib, weights_gib, mem_fraction)
    integer("input_tokens", input_tokens, 1)
    integer("output_tokens", output_tokens, 0)
    integer("page_tokens", page_tokens, 1)
    integer("chunk_tokens", chunk_tokens, 1)
    source = read_model(model_or_config, choice)
    weights_from = "given" if weights_gib is not None else "files"
    weight_notes = [*source.notes]
    if weights_gib is None:
        n_bytes = source.n_bytes
        if not n_bytes and source.config is not None:
            n_bytes, weight_notes = _estimated(source.config, choice)
            weights_from = "config"
        weights_gib = n_bytes / GIB
    pool_gib = room_gib(memory_gib, weights_gib, mem_fraction)
    if kv_cache_dtypes is KV_DTYPES and source.shape.rope_dim == _DS_MLA_ROPE:
        kv_cache_dtypes = (*KV_DTYPES, DS_MLA)
    bytes_per_token = kv_bytes(kv_cache_dtypes, source.shape)
    n_tokens = input_tokens + output_tokens
    sizes = {
        kv: _sizes(source.shape, layers, pool_gib * GIB, n_tokens, page_tokens, chunk_tokens)
        for kv, layers in _lanes(kv_cache_dtypes, source.shape).items()
    }
    return Plan(
        model=source.name,
        memory_gib=memory_gib,
        weights_gib=weights_gib,
        weights_from=weights_from,
        mem_fraction=mem_fraction,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        page_tokens=page_tokens,
        bytes_per_token=bytes_per_token,
        bytes_beyond_window={kv: size.beyond for kv, size in sizes.items()},
        window_tokens={kv: size.window_tokens for kv, size in sizes.items()},
        tokens={kv: size.tokens for kv, size in sizes.items()},
        requests={kv: size.requests for kv, size in sizes.items()},
        notes=(*_notes(source.shape, n_tokens), *weight_notes),
    )
