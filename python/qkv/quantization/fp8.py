"""FP8 as models are released in it (`quant_method: fp8`: one scale, one per row, or blocks), MXFP8,
the flat W8A8 methods, and DeepSeek's W4AFP8."""

from .matrix import Array, Codes, Input, Matrix
from .names import FUSED, by_path, with_fused
from .reader import FP8, Reader, byte_codes, cdiv, fp8_blocks, mxfp8, row_factor
from .section import Section
from .tensors import FLOATS, Module, Tensors


class _ListReader(Reader):
    """With the list of dotted paths that all of these have."""

    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        listed = section.names("ignored_layers", "modules_to_not_convert", "ignore")
        mapping = section.section("packed_modules_mapping")
        fused = {name: mapping.names(name) for name in mapping.data}
        self._excluding = with_fused(
            by_path(listed), {**FUSED, **{name: shards for name, shards in fused.items() if shards}}
        )

    def excluded(self, module: str) -> str | None:
        return self._excluding(module)


def static_input(reader: Reader, module: Module, why: str) -> float:
    """The one scale of a statically quantized input; AutoFP8 once called it activation_scale."""
    return reader.tensors.scalar(module.first("input_scale", "activation_scale", why=why), why)


class Fp8Reader(_ListReader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        scheme = section.text("activation_scheme")
        if scheme not in (None, "static", "dynamic"):
            raise section.fail(f"activation_scheme is {scheme!r:.40}, static or dynamic is wanted")
        self._static = scheme == "static"
        block = section.integers("weight_block_size")
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise section.fail(f"weight_block_size is {list(block)}, two sizes are wanted")
        self._block = None if block is None else (block[0], block[1])
        self._powers = section.text("scale_fmt") == "ue8m0"

    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight") or self.tensors.dtype(module.parts["weight"]) not in FP8:
            return None
        if self._block is not None:
            return self._blocks(module, self._block)
        weight = module.parts["weight"]
        why = f"fp8, activation_scheme {'static' if self._static else 'dynamic'}"
        if not module.has("weight_scale") and module.has("weight_scale_inv"):
            raise self.contradiction(
                module,
                f"{self.tensors.describe(module.parts['weight_scale_inv'])} is a scale of blocks, "
                "but there is no weight_block_size",
            )
        scale = module.need("weight_scale", why)
        n_out, k_in = self.tensors.matrix_shape(weight, FP8, why)
        inp = Input(quant="fp8")
        if self._static:
            inp = Input(quant="fp8", scale=static_input(self, module, why))
        return Matrix(
            shape=(n_out, k_in),
            codes=byte_codes(self.tensors, weight),
            factor=row_factor(self.tensors, scale, n_out, why),
            input=inp,
            also=(
                *(module.some("input_scale", "activation_scale") if self._static else ()),
                *module.some("input_scale_ub"),
            ),
        )

    def _blocks(self, module: Module, block: tuple[int, int]) -> Matrix:
        why = f"fp8 with weight_block_size {list(block)}"
        if self._static:
            raise self.section.fail("weight_block_size is for dynamic activations, not static")
        scale = module.first("weight_scale_inv", "weight_scale", why=why)
        powers = self._powers or self.tensors.dtype(scale) in ("U8", "F8_E8M0")
        inp = Input(quant="fp8_group", group=block[1], power_of_two=powers)
        if block == (1, 32) and powers:
            inp = Input(quant="mxfp8")
        weight = module.parts["weight"]
        return fp8_blocks(self.tensors, weight, scale, block, why=why, inp=inp)


class Mxfp8Reader(_ListReader):
    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight") or self.tensors.dtype(module.parts["weight"]) not in FP8:
            return None
        why = "mxfp8: an exponent for 32 elements"
        scale = module.first("weight_scale_inv", "weight_scale", why=why)
        return mxfp8(self.tensors, module.parts["weight"], scale, why, Input(quant="mxfp8"))


class W8a8Reader(_ListReader):
    """w8a8_int8 and w8a8_fp8: a scale per row; activations per token. blockwise_int8 has blocks."""

    dtypes: tuple[str, ...] = ("I8",)
    quant = "int8"

    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight") or self.tensors.dtype(module.parts["weight"]) in FLOATS:
            return None
        weight = module.parts["weight"]
        why = f"W8A8 in {' or '.join(self.dtypes)} with a scale for each row"
        n_out, k_in = self.tensors.matrix_shape(weight, self.dtypes, why)
        scale = module.need("weight_scale", why)
        return Matrix(
            shape=(n_out, k_in),
            codes=byte_codes(self.tensors, weight),
            factor=row_factor(self.tensors, scale, n_out, why),
            input=Input(quant=self.quant),
        )


class W8a8Fp8Reader(W8a8Reader):
    dtypes = FP8
    quant = "fp8"


class BlockInt8Reader(_ListReader):
    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight") or self.tensors.dtype(module.parts["weight"]) in FLOATS:
            return None
        block = self.section.integers("weight_block_size")
        if block is None or len(block) != 2 or min(block) < 1:
            raise self.section.fail("blockwise_int8 wants a weight_block_size of two numbers")
        why = f"blockwise_int8 with weight_block_size {list(block)}"
        scale = module.first("weight_scale_inv", "weight_scale", why=why)
        self.note("blockwise_int8: activations stay in 16 bits")
        return fp8_blocks(
            self.tensors, module.parts["weight"], scale, (block[0], block[1]), why=why, inp=Input()
        )


class W4afp8Reader(Fp8Reader):
    """DeepSeek's W4AFP8: experts in int4 by 128, two codes a byte, the rest in FP8 blocks."""

    GROUP = 128

    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        if self._block is None:
            self._block = (128, 128)
        self._static = False

    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight") or self.tensors.dtype(module.parts["weight"]) != "I8":
            return super().matrix(module)
        why = f"w4afp8: int4 in groups of {self.GROUP}"
        weight = module.parts["weight"]
        n_out, half = self.tensors.matrix_shape(weight, ("I8",), why)
        scale = module.first("weight_scale_inv", "weight_scale", why=why)
        self.tensors.expect(scale, FLOATS, (n_out, cdiv(2 * half, self.GROUP)), why)
        inp = Input(quant="fp8")
        if module.has("input_scale"):
            value = self.tensors.scalar(module.parts["input_scale"], why)
            inp = Input(quant="fp8", scale=value)
        return Matrix(
            shape=(n_out, 2 * half),
            codes=Codes(tensor=weight, bits=4, meaning="signed"),
            group=self.GROUP,
            scale=Array(tensor=scale),
            input=inp,
            also=module.some("input_scale"),
        )
