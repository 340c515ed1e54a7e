"""Blocks of every GGUF type, the same on every machine: for tests, and for what records them."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

# Bytes of a block, and where its f16 scales lie.
LAYOUTS: dict[str, tuple[int, list[int]]] = {
    "Q8_0": (34, [0]),
    "Q4_0": (18, [0]),
    "Q4_1": (20, [0, 2]),
    "Q5_0": (22, [0]),
    "Q5_1": (24, [0, 2]),
    "Q2_K": (84, [80, 82]),
    "Q3_K": (110, [108]),
    "Q4_K": (144, [0, 2]),
    "Q5_K": (176, [0, 2]),
    "Q6_K": (210, [208]),
    "IQ1_S": (50, [0]),
    "IQ1_M": (56, [54]),  # the upper bits of its exponent are in the last byte
    "IQ2_XXS": (66, [0]),
    "IQ2_XS": (74, [0]),
    "IQ2_S": (82, [0]),
    "IQ3_XXS": (98, [0]),
    "IQ3_S": (110, [0]),
    "IQ4_NL": (18, [0]),
    "IQ4_XS": (136, [0]),
    "TQ1_0": (54, [52]),
    "TQ2_0": (66, [64]),
    "MXFP4": (17, []),
    "NVFP4": (36, []),
}


def hashed_blocks(name: str, n: int) -> NDArray[np.uint8]:
    """[n, bytes], with scales that are finite numbers of both signs. 1,024 blocks of a type have
    every entry of its grid in them."""
    n_bytes, f16_at = LAYOUTS[name]
    digest = hashlib.shake_256(name.encode()).digest(n * n_bytes)
    blocks: NDArray[np.uint8] = np.frombuffer(digest, np.uint8).reshape(n, n_bytes).copy()
    for at in f16_at:
        blocks[:, at + 1] &= 0xBF
    if name == "MXFP4":
        blocks[:, 0] %= 255  # 255 is NaN here, 2^128 in gguf-py
    if name == "NVFP4":
        blocks[:, :4] &= 0x7F  # the scales have no sign
    return blocks


def digest_of(values: NDArray[np.float32]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()
