"""What a quantized weight is called and how it lies in the checkpoints that `qkv convert` writes:
compressed-tensors' formats, and MLX's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reader import cdiv

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Stored:
    """A tensor to write."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        n = _ELEMENT_BYTES[self.dtype]
        for size in self.shape:
            n *= size
        return n


_ELEMENT_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F64": 8, "BOOL": 1,
    "I8": 1, "U8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One target of csrc/quant/quantize.h. Tensors are named part -> (dtype, where the bytes come
    from: "codes", "scales", "mins", "factor" or "shape")."""

    parts: Mapping[str, tuple[str, str]]
    bits: int = 8
    group: int = 0  # elements along K that share a scale; 0: a row
    block: tuple[int, int] | None = None
    by_tensor: bool = False
    format: str = ""  # compressed-tensors' name; "": MLX
    kind: str = "float"
    scale_dtype: str = ""  # torch's name, where the config has it
    inputs: Mapping[str, Any] | None = None  # compressed-tensors' scheme for inputs
    takes_group: bool = False
    # Codes are kept with an offset that the file does not have, or the other way round.
    flip: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_mlx(self) -> bool:
        return self.format == ""

    def fits(self, k_in: int) -> bool:
        """Whether rows of `k_in` elements can be written: whole groups, and whole words."""
        word = max((32 // self.bits if d in ("I32", "U32") else 1) for d, _ in self.parts.values())
        whole = self.block is not None or self.group == 0 or k_in % self.group == 0
        return whole and k_in % word == 0 and k_in * self.bits % 8 == 0

    def tensors(self, module: str, n_out: int, k_in: int) -> list[Stored]:
        found = []
        for part, (dtype, what) in self.parts.items():
            found.append(Stored(f"{module}.{part}", dtype, self._shape(dtype, what, n_out, k_in)))
        return found

    def _shape(self, dtype: str, what: str, n_out: int, k_in: int) -> tuple[int, ...]:
        if what == "shape":
            return (2,)
        if what == "factor" or (what == "scales" and self.by_tensor):
            return (1,)
        if what == "codes":
            return (n_out, k_in * self.bits // (8 * _ELEMENT_BYTES[dtype]))
        if self.block is not None:
            return (cdiv(n_out, self.block[0]), cdiv(k_in, self.block[1]))
        return (n_out, cdiv(k_in, self.group) if self.group else 1)

    def arrays(self, found: Mapping[str, Bytes | None], n_out: int, k_in: int) -> list[Bytes]:
        """The bytes of `tensors`, from what Checkpoint.quantize gives."""
        arrays: list[Bytes] = []
        for _, what in self.parts.values():
            if what == "shape":
                arrays.append(np.array([n_out, k_in], "<i8").view(np.uint8))
                continue
            part = found[what]
            assert part is not None
            arrays.append(part ^ np.uint8(self.flip) if what == "codes" and self.flip else part)
        return arrays

    def with_group(self, group: int) -> "Layout":
        return Layout(**{**vars(self), "group": group})

    def config(self, ignored: list[str], kv_strategy: str = "") -> dict[str, Any]:
        """The section of config.json. kv_strategy: what the scales of a declared FP8 cache are
        for, "tensor" or "attn_head"."""
        if self.is_mlx:
            return {"group_size": self.group, "bits": self.bits}
        group = {
            "format": self.format,
            "targets": ["Linear"],
            "weights": self._weights(),
            "input_activations": None if self.inputs is None else dict(self.inputs),
            "output_activations": None,
        }
        scheme = {
            "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
            "strategy": kv_strategy,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": scheme if kv_strategy else None,
        }

    def _weights(self) -> dict[str, Any]:
        strategy = "group" if self.group else "tensor" if self.by_tensor else "channel"
        if self.block is not None:
            strategy = "block"
        elif self.format == "nvfp4-pack-quantized":
            strategy = "tensor_group"
        row: dict[str, Any] = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": True,
            "dynamic": False,
            "strategy": strategy,
            "group_size": self.group if self.group and self.block is None else None,
            "block_structure": None if self.block is None else list(self.block),
        }
        if self.scale_dtype:
            row |= {"scale_dtype": self.scale_dtype, "zp_dtype": self.scale_dtype}
        return row


def _inputs(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    row = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": strategy}
    return {**row, **more}


_FP8 = {"weight": ("F8_E4M3", "codes"), "weight_scale": ("F32", "scales")}
_PACKED = {
    "weight_packed": ("I32", "codes"),
    "weight_scale": ("BF16", "scales"),
    "weight_shape": ("I64", "shape"),
}
_MLX = {"weight": ("U32", "codes"), "scales": ("BF16", "scales"), "biases": ("BF16", "mins")}
_TOKEN = _inputs("float", "token")
_UINT8 = "torch.uint8"

#: By target, and after a colon the quantization of inputs.
LAYOUTS: Mapping[str, Layout] = {
    "fp8:fp8": Layout(parts=_FP8, by_tensor=True, format="float-quantized", inputs=_TOKEN),
    "fp8_channel:fp8": Layout(parts=_FP8, format="float-quantized", inputs=_TOKEN),
    "fp8_block:fp8_group": Layout(
        parts=_FP8,
        group=128,
        block=(128, 128),
        format="float-quantized",
        inputs=_inputs("float", "group", group_size=128),
    ),
    "mxfp8:mxfp8": Layout(
        parts={"weight": ("F8_E4M3", "codes"), "weight_scale": ("U8", "scales")},
        group=32,
        format="mxfp8-quantized",
        scale_dtype=_UINT8,
        inputs=_inputs("float", "group", group_size=32, scale_dtype=_UINT8, zp_dtype=_UINT8),
    ),
    "mxfp4": Layout(
        parts={"weight_packed": ("U8", "codes"), "weight_scale": ("U8", "scales")},
        bits=4,
        group=32,
        format="mxfp4-pack-quantized",
        scale_dtype=_UINT8,
    ),
    "nvfp4:nvfp4": Layout(
        parts={
            "weight_packed": ("U8", "codes"),
            "weight_scale": ("F8_E4M3", "scales"),
            "weight_global_scale": ("F32", "factor"),
        },
        bits=4,
        group=16,
        format="nvfp4-pack-quantized",
        scale_dtype="torch.float8_e4m3fn",
        notes=(
            "inputs stay in 16 bits: NVFP4 inputs need a global scale, which is found by "
            "calibration",
        ),
    ),
    "int8:int8": Layout(
        parts={"weight": ("I8", "codes"), "weight_scale": ("F32", "scales")},
        kind="int",
        format="int-quantized",
        inputs=_inputs("int", "token"),
    ),
    "int8": Layout(
        parts={**_PACKED, "weight_scale": ("F32", "scales")},
        kind="int",
        format="pack-quantized",
        flip=0x80,
    ),
    "int4": Layout(
        parts=_PACKED, bits=4, group=128, kind="int", format="pack-quantized", takes_group=True
    ),
    "mlx_q4": Layout(parts=_MLX, bits=4, group=64, takes_group=True),
    "mlx_q8": Layout(parts=_MLX, bits=8, group=64, takes_group=True),
}
