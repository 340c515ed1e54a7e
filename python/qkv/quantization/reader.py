"""What the readers of the families share: the layouts that several tools write."""

from abc import ABC, abstractmethod

import numpy as np

from .. import _core
from .matrix import E2M1, Array, Codes, Input, Matrix
from .section import Section
from .tensors import FLOATS, Module, Tensors

FP8 = ("F8_E4M3", "F8_E5M2")
_MEANING = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "I8": "signed"}


class Reader(ABC):
    """One family of formats: from a module's tensors to the description of its matrix."""

    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        self.section = section
        self.tensors = tensors
        self.notes = notes

    @property
    def claims(self) -> bool:
        """Whether the configuration says that weights are quantized (else: the KV cache alone)."""
        return True

    @abstractmethod
    def excluded(self, module: str) -> str | None:
        """What in the configuration says that the module is not quantized."""

    @abstractmethod
    def matrix(self, module: Module) -> Matrix | None:
        """The module's matrix; None if its weight is a plain tensor. Only modules that have more
        than that are asked for."""

    def contradiction(self, module: Module, text: str) -> _core.CheckpointError:
        return self.section.fail(f"{module.name}: {text}")

    def note(self, text: str) -> None:
        """Something a user should know, once."""
        if text not in self.notes:
            self.notes.append(text)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def row_factor(tensors: Tensors, name: str, n_out: int, why: str) -> Array:
    """One scale for the matrix ([], [1]) or one for each row ([N], [N, 1])."""
    shape = tensors.shape(name)
    n = int(np.prod(shape, dtype=np.int64))
    if tensors.dtype(name) not in FLOATS or n not in (1, n_out) or max(shape, default=1) != n:
        raise _core.CheckpointError(
            f"{tensors.describe(name)}, one float or [{n_out}] or [{n_out}, 1] is wanted: {why}"
        )
    return Array(tensor=name, rows_per=n_out if n == 1 else 1)


def scale_format(tensors: Tensors, name: str, fmt: str) -> str | None:
    """The format to give with a tensor of U8; its own dtype may say the same."""
    return fmt if tensors.dtype(name) == "U8" else None


def byte_codes(tensors: Tensors, name: str) -> Codes:
    """A byte each: FP8 or int8."""
    return Codes(tensor=name, bits=8, meaning=_MEANING[tensors.dtype(name)])


def fp8_blocks(
    tensors: Tensors, weight: str, scale: str, block: tuple[int, int], *, why: str, inp: Input
) -> Matrix:
    """A scale for each block of rows and columns; blocks at the edges are as large as is left.
    ModelOpt keeps dimensions of 1 between."""
    n_out, k_in = tensors.matrix_shape(weight, (*FP8, "I8"), why)
    rows, columns = block
    wanted = (cdiv(n_out, rows), cdiv(k_in, columns))
    shape = tensors.shape(scale)
    squeezed = tuple(n for n in shape if n != 1)
    if shape != wanted and squeezed != tuple(n for n in wanted if n != 1):
        tensors.expect(scale, (*FLOATS, "F8_E8M0", "U8"), wanted, why)
    tensors.expect(scale, (*FLOATS, "F8_E8M0", "U8"), None, why)
    return Matrix(
        shape=(n_out, k_in),
        codes=byte_codes(tensors, weight),
        group=columns,
        scale=Array(tensor=scale, rows_per=rows, format=scale_format(tensors, scale, "F8_E8M0")),
        input=inp,
    )


def mxfp8(tensors: Tensors, weight: str, scale: str, why: str, inp: Input) -> Matrix:
    n_out, k_in = tensors.matrix_shape(weight, ("F8_E4M3",), why)
    tensors.expect(scale, ("U8", "F8_E8M0"), (n_out, cdiv(k_in, 32)), why)
    return Matrix(
        shape=(n_out, k_in),
        codes=byte_codes(tensors, weight),
        group=32,
        scale=Array(tensor=scale, format=scale_format(tensors, scale, "F8_E8M0")),
        input=inp,
    )


def mxfp4(tensors: Tensors, weight: str, scale: str, why: str, inp: Input) -> Matrix:
    """Two codes a byte, the even one in the low nibble; an exponent for 32."""
    n_out, half = tensors.matrix_shape(weight, ("U8",), why)
    tensors.expect(scale, ("U8", "F8_E8M0"), (n_out, cdiv(2 * half, 32)), why)
    return Matrix(
        shape=(n_out, 2 * half),
        codes=Codes(tensor=weight, bits=4, meaning="table"),
        table=E2M1,
        group=32,
        scale=Array(tensor=scale, format=scale_format(tensors, scale, "F8_E8M0")),
        input=inp,
    )


def nvfp4(
    tensors: Tensors,
    weight: str,
    scale: str,
    factor: str | None,
    *,
    why: str,
    inp: Input,
    inverted: bool = False,
) -> Matrix:
    """As mxfp4, with an E4M3 scale for 16 and a float for the matrix."""
    n_out, half = tensors.matrix_shape(weight, ("U8",), why)
    tensors.expect(scale, ("F8_E4M3", "U8"), (n_out, cdiv(2 * half, 16)), why)
    if factor is not None:
        value = tensors.scalar(factor, why)
        if inverted:
            reciprocal(value, factor)
    return Matrix(
        shape=(n_out, 2 * half),
        codes=Codes(tensor=weight, bits=4, meaning="table"),
        table=E2M1,
        group=16,
        scale=Array(tensor=scale, format=scale_format(tensors, scale, "F8_E4M3")),
        factor=None if factor is None else Array(tensor=factor, rows_per=n_out),
        inverted=inverted,
        input=inp,
    )


def all_zero(tensors: Tensors, name: str) -> bool:
    """Whether every byte is zero, or a float's sign alone."""
    if tensors.dtype(name) in FLOATS:
        return not tensors.floats(name).any()
    return not tensors.raw(name).any()


def reciprocal(value: float, name: str) -> float:
    """1 / value in float32; an error that names the tensor if that is not finite."""
    with np.errstate(over="ignore", divide="ignore"):
        found = float(np.float32(1) / np.float32(value))
    if not np.isfinite(found):
        raise _core.CheckpointError(f"{name}: {value:g} has no reciprocal")
    return found
