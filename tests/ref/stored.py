"""The formula of csrc/quant/matrix.h in NumPy, element by element and without a shared line: what
a description of qkv.quantization makes of the tensors in a file. And files with any tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref import make_tiny

F32 = NDArray[np.float32]
Array = NDArray[Any]
Tensor = tuple[str, Array]  # dtype as safetensors has it, and the bits

_BITS = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U32": "<u4",
    "I8": "i1",
    "U8": "u1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file with tensors of any dtype, given as their bits."""
    header: dict[str, Any] = {}
    body = bytearray()
    for name, (dtype, values) in tensors.items():
        data = np.ascontiguousarray(values, _BITS[dtype]).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(np.shape(values)),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(body))


def as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the bits as a file has them, whatever integers they were given in."""
    return {
        name: (dtype, np.ascontiguousarray(bits, _BITS[dtype]).reshape(np.shape(bits)))
        for name, (dtype, bits) in tensors.items()
    }


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor's dtype and bits."""
    data = path.read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (8 + n + at for at in entry["data_offsets"])
        bits = np.frombuffer(data[begin:end], _BITS[entry["dtype"]])
        found[name] = (entry["dtype"], bits.reshape(entry["shape"]))
    return found


def small_float(codes: Array, exponent_bits: int, bias: int) -> F32:
    """Sign, exponent, mantissa; the special codes of E4M3 and E5M2 become NaN."""
    mantissa_bits = 7 - exponent_bits
    exponent = (codes.astype(np.int64) >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - bias),
        np.ldexp(1 + fraction, exponent.astype(np.int32) - bias),
    )
    special = (codes & 0x7F) == 0x7F if exponent_bits == 4 else exponent == 31
    return np.where(special, np.nan, np.where(codes & 0x80, -value, value)).astype(np.float32)


def floats(dtype: str, bits: Array) -> F32:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E8M0":
        value = np.ldexp(np.float32(1), bits.astype(np.int32) - 127)
        return np.where(bits == 255, np.nan, value).astype(np.float32)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return small_float(bits, *((4, 7) if dtype == "F8_E4M3" else (5, 15)))
    assert dtype in ("F32", "F16"), dtype
    return bits.astype(np.float32)


def _stream(rows: NDArray[np.uint8], n: int, bits: int) -> NDArray[np.int64]:
    """[.., bytes] -> [.., n]: codes one after the other, the least significant bit first."""
    all_bits = np.unpackbits(rows, axis=-1, bitorder="little")[..., : n * bits]
    split = all_bits.reshape(*rows.shape[:-1], n, bits).astype(np.int64)
    found: NDArray[np.int64] = (split << np.arange(bits)).sum(axis=-1)
    return found


def codes_of(spec: Mapping[str, Any], tensors: Mapping[str, Tensor], n: int, k: int) -> Array:
    """[n, k] values of an array of codes, before scales."""
    bits, order = spec["bits"], spec["order"]
    if spec.get("transposed"):
        n, k = k, n
    data = np.ascontiguousarray(tensors[spec["tensor"]][1]).view(np.uint8).reshape(-1)
    if order == "rows":
        u = _stream(data.reshape(n, -1), k, bits)
    elif order == "rows_high":
        u = _stream(data.reshape(n, -1), k, 4).reshape(n, -1, 2)[:, :, ::-1].reshape(n, k)
    elif order == "columns":
        words = data.view("<u4").reshape(-1, n)
        u = _stream(np.ascontiguousarray(words.T).view(np.uint8), k, bits)
    elif order == "interleaved":
        nibbles = _stream(data.reshape(k, -1), n, 4).reshape(k, n // 8, 8)
        u = np.empty((n, k), np.int64)
        for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            u[column::8] = nibbles[:, :, i].T
    else:
        assert order == "row_pairs", order
        pairs = data.reshape(n // 2, k)
        u = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(n, k).astype(np.int64)
    if spec.get("transposed"):
        u = u.T
    found: Array = (u + spec.get("add", 0)) % (1 << bits)
    return found


def meaning_of(spec: Mapping[str, Any], u: Array, table: list[float] | None) -> F32:
    bits, meaning = spec["bits"], spec["meaning"]
    if meaning == "table":
        values: F32 = np.asarray(table, np.float32)[u]
        return values
    if meaning == "e4m3":
        return small_float(u, 4, 7)
    if meaning == "e5m2":
        return small_float(u, 5, 15)
    if meaning == "offset":
        u = u - (1 << (bits - 1))
    if meaning == "signed":
        u = np.where(u >= 1 << (bits - 1), u - (1 << bits), u)
    integers: F32 = u.astype(np.float32)
    return integers


def array_of(spec: Mapping[str, Any], tensors: Mapping[str, Tensor], n: int, n_groups: int) -> F32:
    """[n, n_groups]"""
    if "values" in spec:
        values = np.asarray(spec["values"])
        assert values.dtype == np.float32
    else:
        dtype, bits = tensors[spec["tensor"]]
        values = floats(spec.get("format", dtype), bits)
    rows_per = spec.get("rows_per", 1)
    n_rows = -(-n // rows_per)
    assert values.size == n_rows * n_groups, (values.shape, n_rows, n_groups)
    values = values.reshape(n_groups, n_rows).T if spec.get("transposed") else values
    return np.repeat(values.reshape(n_rows, n_groups), rows_per, axis=0)[:n]


def evaluate(description: Mapping[str, Any], tensors: Mapping[str, Tensor], n: int, k: int) -> F32:
    """[n, k] float32: factor * (scale * (code - zero) + min), in this order, then rounded."""
    group = description.get("group", 0)
    n_groups = -(-k // group) if group else 1
    of_k = np.arange(k) // (group or k)
    if "k_group" in description:
        of_k = tensors[description["k_group"]][1]
    codes = description["codes"]
    w = meaning_of(codes, codes_of(codes, tensors, n, k), description.get("table"))
    if "zero" in description:
        zero = description["zero"]
        w = w - meaning_of(zero, codes_of(zero, tensors, n, n_groups), None)[:, of_k]
    if "scale" in description:
        w = array_of(description["scale"], tensors, n, n_groups)[:, of_k] * w
    if "min" in description:
        w = w + array_of(description["min"], tensors, n, n_groups)[:, of_k]
    if "factor" in description:
        factor = array_of(description["factor"], tensors, n, 1)
        w = w / factor if description.get("inverted") else factor * w
    return rounded(w.astype(np.float32), description.get("round"))


def rounded(values: F32, dtype: str | None) -> F32:
    """To the nearest value of a narrower float, ties to even."""
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        return make_tiny.bf16_values(make_tiny.bf16_bits(values))
    return values
