"""bitsandbytes: nf4 and fp4 (flat, the first of two codes in the high nibble, a scale for each 64
of the flat array, which may be quantized itself) and int8 (a scale per row, over 127)."""

import math

import numpy as np

from .. import _core
from .matrix import Array, Codes, Matrix
from .names import by_substring, with_fused
from .reader import Reader, cdiv
from .section import Section, json_object
from .tensors import Module, Tensors

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
#: bitsandbytes rounds what it dequantizes to the dtype that the state names.
_ROUND = {"bfloat16": "BF16", "float16": "F16"}
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


class BitsandbytesReader(Reader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        storage = section.text("bnb_4bit_quant_storage")
        if storage not in (None, "uint8"):
            raise section.refuse(
                f"bnb_4bit_quant_storage {storage!r:.40}: only uint8 is supported. Save the "
                "checkpoint again with bnb_4bit_quant_storage='uint8'"
            )
        self._excluding = with_fused(by_substring(section.names("llm_int8_skip_modules")))

    def excluded(self, module: str) -> str | None:
        return self._excluding(module)

    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight"):
            return None
        dtype = self.tensors.dtype(module.parts["weight"])
        if dtype == "I8":
            self._says(module, "load_in_8bit", "load_in_4bit", "int8")
            return self._int8(module)
        if dtype != "U8":
            return None
        self._says(module, "load_in_4bit", "load_in_8bit", "4 bits")
        return self._four_bits(module)

    def _says(self, module: Module, wanted: str, other: str, what: str) -> None:
        if self.section.flag(other) is True and self.section.flag(wanted) is not True:
            weight = self.tensors.describe(module.parts["weight"])
            raise self.contradiction(
                module, f"{other} is true, but {weight}, which is {what}: set {wanted} if it is"
            )

    def _int8(self, module: Module) -> Matrix:
        """Outliers among the inputs, which LLM.int8() takes out, need no care: inputs stay in 16
        bits."""
        why = "bitsandbytes int8"
        weight, scb = module.parts["weight"], module.need("SCB", why)
        n_out, k_in = self.tensors.matrix_shape(weight, ("I8",), why)
        self.tensors.expect(scb, ("F32",), (n_out,), why)
        self.tensors.check_finite(scb, None)
        if module.has("weight_format") and self.tensors.raw(module.parts["weight_format"]).any():
            raise _core.UnsupportedError(
                f"{module.parts['weight_format']}: only the row-major format (0) is supported"
            )
        return Matrix(
            shape=(n_out, k_in),
            codes=Codes(tensor=weight, bits=8, meaning="signed"),
            factor=Array(values=self.tensors.floats(scb) / np.float32(127)),
            also=(scb, *module.some("weight_format")),
        )

    def _four_bits(self, module: Module) -> Matrix:
        weight, why = module.parts["weight"], "bitsandbytes 4 bits"
        states = module.some(*_STATES)
        if len(states) != 1:
            module.need(_STATES[0], why)
        kind = self.section.text("bnb_4bit_quant_type")
        if kind is not None and not states[0].endswith(f"__{kind}"):
            raise self.contradiction(
                module, f"bnb_4bit_quant_type is {kind}, but there is {states[0]}"
            )
        state = self._state(states[0])
        n_out, k_in = self._shape(state, weight, states[0])
        block = state.integer("blocksize")
        if block is None or block < 1:
            raise state.fail(f"blocksize is {block}, a positive number is wanted")
        table = self.tensors.floats(module.need("weight.quant_map", why)).reshape(-1)
        if table.shape != (16,) or not np.isfinite(table).all():
            raise _core.CheckpointError(
                f"{self.tensors.describe(module.parts['weight.quant_map'])}, 16 numbers are wanted"
            )
        scale, group = self._scale(module, state, (n_out, k_in), block)
        also = {
            states[0],
            module.parts["weight.quant_map"],
            *module.some("weight.absmax", *_NESTED),
        }
        return Matrix(
            shape=(n_out, k_in),
            codes=Codes(tensor=weight, bits=4, order="rows_high", meaning="table"),
            table=tuple(float(value) for value in table),
            group=group,
            scale=scale,
            also=tuple(sorted(also - {scale.tensor})),
            round=_ROUND.get(str(state.text("dtype"))),
        )

    def _state(self, name: str) -> Section:
        return Section(json_object(self.tensors.raw(name).tobytes(), name), name)

    def _shape(self, state: Section, weight: str, name: str) -> tuple[int, int]:
        shape = state.integers("shape")
        if shape is None or len(shape) != 2 or min(shape) < 1:
            raise state.fail(f"shape is {shape!r:.60}, two sizes are wanted")
        n_bytes = math.prod(self.tensors.shape(weight))
        if shape[1] % 2 or shape[0] * shape[1] != 2 * n_bytes:
            raise _core.CheckpointError(
                f"{self.tensors.describe(weight)}: {2 * n_bytes} codes, {name} says {list(shape)}"
            )
        return shape[0], shape[1]

    def _scale(
        self, module: Module, state: Section, shape: tuple[int, int], block: int
    ) -> tuple[Array, int]:
        """Scales by row, and how many elements share one. Blocks run on from row to row: where rows
        are no whole blocks, scales are given for the largest pieces that are."""
        n_out, k_in = shape
        absmax = module.need("weight.absmax", "bitsandbytes 4 bits")
        n_blocks = cdiv(n_out * k_in, block)
        self.tensors.expect(absmax, ("F32", "U8"), (n_blocks,), f"blocks of {block}")
        nested = self.tensors.dtype(absmax) == "U8"
        if not nested and k_in % block == 0:
            return Array(tensor=absmax), block
        values = self._nested(module, state, absmax) if nested else self.tensors.floats(absmax)
        group = math.gcd(k_in, block)
        each = values[np.arange(0, n_out * k_in, group) // block]
        return Array(values=np.ascontiguousarray(each.reshape(n_out, -1), np.float32)), group

    def _nested(
        self, module: Module, state: Section, absmax: str
    ) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """absmax = map[code] * nested_absmax[block] + offset, in float32."""
        why = "absmax is in 8 bits"
        codes = self.tensors.raw(absmax)
        table = self.tensors.floats(module.need(_NESTED[1], why)).reshape(-1)
        scales = self.tensors.floats(module.need(_NESTED[0], why)).reshape(-1)
        block, offset = state.integer("nested_blocksize"), state.data.get("nested_offset")
        if block is None or block < 1 or not isinstance(offset, int | float) or abs(offset) > 1e30:
            raise state.fail("nested_blocksize and nested_offset are wanted: " + why)
        if table.shape != (256,) or scales.shape != (cdiv(codes.size, block),):
            raise _core.CheckpointError(
                f"{absmax}: {codes.size} scales in blocks of {block}: nested_quant_map has "
                f"{table.size} values (256 are wanted), nested_absmax {scales.size}"
            )
        values = table[codes] * scales[np.arange(codes.size) // block]
        found: np.ndarray[tuple[int], np.dtype[np.float32]] = values + np.float32(offset)
        if not np.isfinite(found).all():
            raise _core.CheckpointError(f"{absmax}: a scale is not a finite number")
        return found
