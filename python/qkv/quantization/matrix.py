"""A stored matrix, described: struct qkv_matrix of csrc/quant/matrix.h with tensors' names.

w[n, k] = factor[n] * (scale[n, g] * (code[n, k] - zero[n, g]) + min[n, g])
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

#: What the codes of a 4-bit float stand for; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Packed codes; `order` and `meaning` are matrix.h's, in lower case."""

    tensor: str
    bits: int
    # "row_pairs": bytes [n_out / 2, k_in], the low nibble of row 2i, the high one of row 2i + 1.
    order: str = "rows"
    meaning: str = "unsigned"
    transposed: bool = False
    add: int = 0

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "tensor": self.tensor,
            "order": self.order,
            "meaning": self.meaning,
            "bits": self.bits,
        }
        if self.transposed:
            row["transposed"] = True
        if self.add:
            row["add"] = self.add
        return row


@dataclass(frozen=True, kw_only=True)
class Array:
    """Scales or minima: a tensor, or values that stand in no tensor."""

    tensor: str | None = None
    values: F32 | None = None
    format: str | None = None  # of the tensor's bytes, where its dtype does not say (U8)
    rows_per: int = 1
    transposed: bool = False  # [groups, rows]

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if self.tensor is not None:
            row["tensor"] = self.tensor
        else:
            row["values"] = self.values
        if self.format is not None:
            row["format"] = self.format
        if self.rows_per != 1:
            row["rows_per"] = self.rows_per
        if self.transposed:
            row["transposed"] = True
        return row


@dataclass(frozen=True, kw_only=True)
class Input:
    """How the matrix wants its input quantized: matrix.h, struct qkv_input."""

    quant: str = "none"
    group: int = 0
    power_of_two: bool = False
    steps: float = 0.0  # of int8 by row: what the largest magnitude becomes; 0: 127
    scale: float = 0.0  # 0: dynamic

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"quant": self.quant}
        if self.group:
            row["group"] = self.group
        if self.power_of_two:
            row["power_of_two"] = True
        if self.steps:
            row["steps"] = self.steps
        if self.scale:
            row["scale"] = self.scale
        return row


@dataclass(frozen=True, kw_only=True)
class Matrix:
    shape: tuple[int, int]  # [n_out, k_in] as the tensors have it
    codes: Codes
    table: tuple[float, ...] | None = None
    group: int = 0
    scale: Array | None = None
    min: Array | None = None
    factor: Array | None = None
    inverted: bool = False  # divided by the factor, not multiplied
    zero: Codes | None = None
    k_group: str | None = None
    k_scale: Array | None = None
    input: Input = Input()
    round: str | None = None  # "BF16", "F16": what the tool's own reader rounds values to
    also: tuple[str, ...] = ()  # tensors that belong to it and say nothing more

    def tensors(self) -> Iterator[str]:
        """Every tensor that it takes."""
        for codes in (self.codes, self.zero):
            if codes is not None:
                yield codes.tensor
        for array in self.arrays():
            if array.tensor is not None:
                yield array.tensor
        if self.k_group is not None:
            yield self.k_group
        yield from self.also

    def arrays(self) -> Iterator[Array]:
        for array in (self.scale, self.min, self.factor, self.k_scale):
            if array is not None:
                yield array

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"codes": self.codes.to_dict()}
        if self.table is not None:
            row["table"] = list(self.table)
        if self.group:
            row["group"] = self.group
        for name in ("scale", "min", "factor", "zero", "k_scale"):
            part = getattr(self, name)
            if part is not None:
                row[name] = part.to_dict()
        if self.inverted:
            row["inverted"] = True
        if self.k_group is not None:
            row["k_group"] = self.k_group
        if self.input.quant != "none":
            row["input"] = self.input.to_dict()
        if self.round is not None:
            row["round"] = self.round
        if self.also:
            row["also"] = list(self.also)
        return row
