"""MXFP4 as gpt-oss has it: the experts of a layer in one tensor of blocks, [experts, rows, blocks,
16 bytes], the even element in the low nibble, and their exponents, [experts, rows, blocks]."""

import math

from .. import _core
from .matrix import E2M1, Array, Codes, Matrix
from .names import by_glob, with_fused
from .reader import Reader, scale_format
from .section import Section
from .tensors import Module, Tensors


class Mxfp4Reader(Reader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        self._excluding = with_fused(by_glob(section.names("modules_to_not_convert")))

    def excluded(self, module: str) -> str | None:
        return self._excluding(module)

    def matrix(self, module: Module) -> Matrix | None:
        """All experts, one below the other: [experts * rows, 32 * blocks]."""
        if not module.has("blocks"):
            return None
        blocks, why = module.parts["blocks"], "mxfp4 in blocks of 32"
        shape = self.tensors.expect(blocks, ("U8",), None, why)
        if len(shape) < 3 or shape[-1] != 16 or min(shape) < 1:
            raise _core.CheckpointError(
                f"{self.tensors.describe(blocks)}, [.., rows, blocks, 16] is wanted: {why}"
            )
        if not module.has("scales"):
            raise _core.CheckpointError(f"{module.name}_scales is missing: {why}")
        scales = module.parts["scales"]
        self.tensors.expect(scales, ("U8", "F8_E8M0"), shape[:-1], why)
        return Matrix(
            shape=(math.prod(shape[:-2]), 32 * shape[-2]),
            codes=Codes(tensor=blocks, bits=4, meaning="table"),
            table=E2M1,
            group=32,
            scale=Array(tensor=scales, format=scale_format(self.tensors, scales, "F8_E8M0")),
        )
