"""A GGUF file with every tensor dequantized and rounded to bf16, as transformers' gguf_file= with
dtype=bfloat16 has the weights: bf16_gguf.py MODEL.gguf OUT.gguf [Q8_0]. With another format the
matrices are in that one, the vectors still in bf16. Metadata are copied as they are
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; little-endian, versions 2 and 3)."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import BinaryIO

from qkv import _core

ALIGNMENT = 32
# Type number, values and bytes of a block.
_FORMATS = {
    "F32": (0, 1, 4),
    "BF16": (30, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
}
# Bytes of a metadata value, by type; a string (8) and an array (9) say their own length.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0])


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_number(file, "Q"), 1)
    elif kind != _ARRAY:
        file.seek(_SIZES[kind], 1)
    else:
        inner, count = _number(file, "I"), _number(file, "Q")
        if inner in _SIZES:
            file.seek(count * _SIZES[inner], 1)
        else:
            for _ in range(count):
                _skip(file, inner)


def read_head(source: Path) -> tuple[bytes, list[tuple[str, tuple[int, ...]]]]:
    """(everything before the list of tensors, (name, dimensions) of each tensor)"""
    with source.open("rb") as file:
        if file.read(4) != b"GGUF" or _number(file, "I") not in (2, 3):
            raise ValueError(f"{source}: not a GGUF file of version 2 or 3")
        n_tensors, n_values = _number(file, "Q"), _number(file, "Q")
        for _ in range(n_values):
            name = file.read(_number(file, "Q"))
            kind = _number(file, "I")
            if name == b"general.alignment":
                raise ValueError(f"{source}: has an alignment of its own, not {ALIGNMENT}")
            _skip(file, kind)
        end = file.tell()
        tensors = []
        for _ in range(n_tensors):
            name = file.read(_number(file, "Q"))
            n_dims = _number(file, "I")
            tensors.append((name.decode(), struct.unpack(f"<{n_dims}Q", file.read(8 * n_dims))))
            file.seek(4 + 8, 1)  # type, offset
        file.seek(0)
        return file.read(end), tensors


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def write(source: Path, target: Path, matrices: str = "BF16", vectors: str = "BF16") -> None:
    head, tensors = read_head(source)
    formats = [vectors if len(shape) == 1 else matrices for _, shape in tensors]
    offset = 0
    for (name, shape), format_name in zip(tensors, formats, strict=True):
        number, block_values, block_bytes = _FORMATS[format_name]
        head += struct.pack("<Q", len(name.encode())) + name.encode()
        head += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)
        offset += _aligned(math.prod(shape) // block_values * block_bytes)
    checkpoint = _core.Checkpoint(str(source))
    with target.open("wb") as file:
        file.write(head.ljust(_aligned(len(head)), b"\0"))
        for (name, _), format_name in zip(tensors, formats, strict=True):
            codes = _core.quantize(format_name, checkpoint.dequantize(name).reshape(-1)).tobytes()
            file.write(codes.ljust(_aligned(len(codes)), b"\0"))
    checkpoint.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
