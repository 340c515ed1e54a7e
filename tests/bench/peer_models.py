"""One GGUF model in the forms that the engines of peers.py read. The weights are what the file
holds, rounded to bf16, and from there quantized anew where a form asks for it: speed does not
depend on their values."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ref import make_tiny  # noqa: E402
from tools import bf16_gguf  # noqa: E402

F32 = NDArray[np.float32]
ARCHS = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
GROUP = 64  # elements that share a scale in W4A16
_TYPES = {"uint16": "BF16", "int8": "I8", "int32": "I32", "int64": "I64"}


def gguf(source: Path, target: Path, matrices: str) -> None:
    """llama.cpp takes vectors in float32 only."""
    bf16_gguf.write(source, target, matrices, "F32")


def _config(checkpoint: _core.Checkpoint) -> dict[str, Any]:
    have = checkpoint.model_config()
    return make_tiny.make_config(
        ARCHS[have["arch"]],
        vocab_size=have["vocab"],
        hidden_size=have["hidden"],
        intermediate_size=have["ffn"],
        num_hidden_layers=have["n_layers"],
        num_attention_heads=have["n_heads"],
        num_key_value_heads=have["n_kv_heads"],
        max_position_embeddings=have["max_positions"],
        rms_norm_eps=have["norm_eps"],
        rope_theta=have["ropes"][0]["theta"],
        tie_word_embeddings=have["tied"],
        bos_token_id=have["bos_id"],
        eos_token_id=have["eos_ids"][0],
    )


def _tensor(checkpoint: _core.Checkpoint, name: str) -> F32:
    """By its name on the hub, where a head of q and k is two halves and not pairs."""
    values = checkpoint.dequantize(make_tiny.gguf_name(name, "llama"))
    which = re.search(r"[.]self_attn[.]([qk])_proj[.]", name)
    config = checkpoint.model_config()
    if which is None or not config["gguf_qk_permuted"]:
        return values
    n_heads = config["n_heads" if which[1] == "q" else "n_kv_heads"]
    pairs = values.reshape(n_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _safetensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """uint16 stands for bf16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": _TYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(values.tobytes())


def _w8a8(values: F32) -> dict[str, NDArray[Any]]:
    scale = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-8) / 127
    codes = np.rint(values / scale).astype(np.int8)
    return {"weight": codes, "weight_scale": make_tiny.bf16_bits(scale)}


def _w4a16(values: F32) -> dict[str, NDArray[Any]]:
    """Eight codes + 8 in an int32, the first in its lowest bits."""
    groups = values.reshape(len(values), -1, GROUP)
    scale = np.maximum(np.abs(groups).max(axis=2), 1e-8) / 7
    codes = np.rint(groups / scale[:, :, None]).clip(-8, 7).astype(np.int32) + 8
    packed = np.zeros((len(values), values.shape[1] // 8), np.int32)
    for i, part in enumerate(np.moveaxis(codes.reshape(len(values), -1, 8), 2, 0)):
        packed |= part << (4 * i)
    return {
        "weight_packed": packed,
        "weight_scale": make_tiny.bf16_bits(scale),
        "weight_shape": np.array(values.shape, np.int64),
    }


def _scheme(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, **more}


# Of compressed-tensors: how a matrix is written, the format's name, its scheme.
_QUANTIZED = {
    "W8A8": (
        _w8a8, "int-quantized",
        {
            "weights": _scheme(8, strategy="channel", dynamic=False),
            "input_activations": _scheme(8, strategy="token", dynamic=True),
        },
    ),
    "W4A16": (
        _w4a16, "pack-quantized",
        {"weights": _scheme(4, strategy="group", group_size=GROUP, dynamic=False)},
    ),
}  # fmt: skip


def safetensors(source: Path, folder: Path, kind: str) -> None:
    """A folder as the hub has it, without tokenizer: BF16, or a kind of _QUANTIZED."""
    checkpoint = _core.Checkpoint(str(source))
    config = _config(checkpoint)
    tensors: dict[str, NDArray[Any]] = {}
    for name, _ in make_tiny.tensor_shapes(config):
        values = _tensor(checkpoint, name)
        stem = name.removesuffix("weight")
        if kind in _QUANTIZED and name.endswith("_proj.weight"):
            tensors |= {stem + part: array for part, array in _QUANTIZED[kind][0](values).items()}
        else:
            tensors[name] = make_tiny.bf16_bits(values)
    if kind in _QUANTIZED:
        _, layout, scheme = _QUANTIZED[kind]
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
        }
    folder.mkdir(parents=True, exist_ok=True)
    _safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    checkpoint.close()
