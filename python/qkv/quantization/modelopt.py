"""NVIDIA ModelOpt: an algorithm for the model, or one for each layer (MIXED_PRECISION)."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from .fp8 import static_input
from .matrix import Array, Codes, Input, Matrix
from .names import FUSED, by_glob, with_fused
from .reader import FP8, Reader, byte_codes, cdiv, fp8_blocks, mxfp4, mxfp8, nvfp4, row_factor
from .section import Section
from .tensors import FLOATS, Module, Tensors

MIXED = "MIXED_PRECISION"


def layout(section: Section) -> Section:
    """The object that says it: hf_quant_config.json has it under `quantization`."""
    inner = section.data.get("quantization")
    return section.section("quantization") if isinstance(inner, Mapping) else section


def method_name(section: Section) -> str:
    """modelopt_fp8, modelopt_fp4, modelopt_mixed or mxfp8, as the algorithm has it, or modelopt."""
    algo = (layout(section).text("quant_algo") or "").upper()
    if algo == MIXED:
        return "modelopt_mixed"
    if "FP4" in algo and "MXFP4" not in algo:
        return "modelopt_fp4"
    if algo == "MXFP8":
        return "mxfp8"
    return "modelopt_fp8" if algo.startswith("FP8") else "modelopt"


class ModelOptReader(Reader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(layout(section), tensors, notes)
        section = self.section
        self._algo = section.text("quant_algo")
        self._layers = section.section("quantized_layers").sections()
        if self._algo is not None and self._algo.upper() == MIXED and not self._layers:
            raise section.fail(f"quant_algo {MIXED} wants quantized_layers, which is missing")
        self._excluding = with_fused(
            by_glob(section.names("exclude_modules", "ignore", "modules_to_not_convert"))
        )

    @property
    def claims(self) -> bool:
        return self._algo is not None

    def excluded(self, module: str) -> str | None:
        found = self._excluding(module)
        if found is None and self._is_mixed() and self._layer(module) is None:
            return "not in quantized_layers"
        return found

    def _is_mixed(self) -> bool:
        return self._algo is not None and self._algo.upper() == MIXED

    def _layer(self, module: str) -> Section | None:
        """A layer's entry: under its name, that of the projection it is fused into, or, of one that
        the file holds whole, that of its first shard."""
        parent, dot, last = module.rpartition(".")
        wholes = [whole for whole, shards in FUSED.items() if last in shards]
        for name in (last, *wholes, *FUSED.get(last, ())):
            if f"{parent}{dot}{name}" in self._layers:
                return self._layers[f"{parent}{dot}{name}"]
        return None

    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight") or self.tensors.dtype(module.parts["weight"]) in FLOATS:
            return None
        settings: Section | None = self.section
        if self._is_mixed():
            settings = self._layer(module.name)
        algo = None if settings is None else settings.text("quant_algo")
        if settings is None or algo is None:
            raise self.contradiction(
                module,
                f"{self.tensors.describe(module.parts['weight'])}, but no quant_algo is for it",
            )
        if algo.upper() not in _ALGORITHMS:
            raise settings.refuse(
                f"{module.name}: quant_algo {algo!r:.40} is not supported: "
                f"{', '.join(_ALGORITHMS)} are"
            )
        return _ALGORITHMS[algo.upper()](self, module, f"quant_algo {algo}", settings)


def _fp8(reader: ModelOptReader, module: Module, why: str, _: Section) -> Matrix:
    inp = Input(quant="fp8", scale=static_input(reader, module, why))
    return _rows(reader, module, why, FP8, inp, module.some("input_scale", "activation_scale"))


def _fp8_token(reader: ModelOptReader, module: Module, why: str, _: Section) -> Matrix:
    return _rows(reader, module, why, FP8, Input(quant="fp8"), ())


def _int8_weights(reader: ModelOptReader, module: Module, why: str, _: Section) -> Matrix:
    return _rows(reader, module, why, ("I8",), Input(), ())


def _int8_smooth(reader: ModelOptReader, module: Module, why: str, _: Section) -> Matrix:
    inp = Input(quant="int8", scale=static_input(reader, module, why))
    return _rows(reader, module, why, ("I8",), inp, module.some("input_scale"))


def _rows(
    reader: ModelOptReader,
    module: Module,
    why: str,
    dtypes: tuple[str, ...],
    inp: Input,
    also: tuple[str, ...],
) -> Matrix:
    tensors = reader.tensors
    weight, scale = module.need("weight", why), module.need("weight_scale", why)
    n_out, k_in = tensors.matrix_shape(weight, dtypes, why)
    return Matrix(
        shape=(n_out, k_in),
        codes=byte_codes(tensors, weight),
        factor=row_factor(tensors, scale, n_out, why),
        k_scale=_k_scale(tensors, module, k_in, why),
        input=inp,
        also=also,
    )


def _k_scale(tensors: Tensors, module: Module, k_in: int, why: str) -> Array | None:
    """AWQ's and SmoothQuant's factors of the input."""
    if not module.has("pre_quant_scale"):
        return None
    name = module.parts["pre_quant_scale"]
    tensors.expect(name, FLOATS, (k_in,), why)
    return Array(tensor=name)


def _fp8_blocks(reader: ModelOptReader, module: Module, why: str, settings: Section) -> Matrix:
    size = settings.integer("group_size") or 128
    if size < 1:
        raise settings.fail(f"group_size is {size}")
    scale = module.first("weight_scale", "weight_scale_inv", why=why)
    return fp8_blocks(
        reader.tensors, module.parts["weight"], scale, (size, size), why=why, inp=Input()
    )


def _nvfp4_of(
    inp_of: Callable[[ModelOptReader, Module, str], Input],
) -> Callable[[ModelOptReader, Module, str, Section], Matrix]:
    def read(reader: ModelOptReader, module: Module, why: str, settings: Section) -> Matrix:
        if settings.integer("group_size") not in (None, 0, 16):
            raise settings.fail(f"{module.name}: {why} has group_size 16")
        found = nvfp4(
            reader.tensors,
            module.parts["weight"],
            module.need("weight_scale", why),
            module.need("weight_scale_2", why),
            why=why,
            inp=inp_of(reader, module, why),
        )
        return replace(
            found,
            k_scale=_k_scale(reader.tensors, module, found.shape[1], why),
            also=module.some("input_scale"),
        )

    return read


def _nvfp4_input(reader: ModelOptReader, module: Module, why: str) -> Input:
    return Input(quant="nvfp4", group=16, scale=static_input(reader, module, why))


def _fp8_input(reader: ModelOptReader, module: Module, why: str) -> Input:
    if not module.has("input_scale"):
        return Input(quant="fp8")
    return Input(quant="fp8", scale=static_input(reader, module, why))


def _mxfp8(reader: ModelOptReader, module: Module, why: str, _: Section) -> Matrix:
    scale = module.first("weight_scale", "weight_scale_inv", why=why)
    return mxfp8(reader.tensors, module.parts["weight"], scale, why, Input(quant="mxfp8"))


def _mxfp4_of(inp: Input) -> Callable[[ModelOptReader, Module, str, Section], Matrix]:
    def read(reader: ModelOptReader, module: Module, why: str, _: Section) -> Matrix:
        scale = module.need("weight_scale", why)
        return mxfp4(reader.tensors, module.parts["weight"], scale, why, inp)

    return read


def _int4(reader: ModelOptReader, module: Module, why: str, settings: Section) -> Matrix:
    """Rows in pairs: a byte has the codes of two rows, the even one low; a scale by group."""
    tensors = reader.tensors
    weight, scale = module.need("weight", why), module.need("weight_scale", why)
    pairs, k_in = tensors.matrix_shape(weight, ("U8",), why)
    group = settings.integer("group_size") or 128
    if group < 1:
        raise settings.fail(f"{module.name}: group_size is {group}")
    tensors.expect(scale, FLOATS, (2 * pairs, cdiv(k_in, group)), why)
    return Matrix(
        shape=(2 * pairs, k_in),
        codes=Codes(tensor=weight, bits=4, order="row_pairs", meaning="signed"),
        group=group,
        scale=Array(tensor=scale),
        k_scale=_k_scale(tensors, module, k_in, why),
    )


def _int4_fp8(reader: ModelOptReader, module: Module, why: str, settings: Section) -> Matrix:
    """W4A8: the same values; weight_scale_2 is for casting them to FP8, which is not done here."""
    found = _int4(reader, module, why, settings)
    return replace(
        found,
        input=_fp8_input(reader, module, why),
        also=module.some("input_scale", "weight_scale_2"),
    )


_ALGORITHMS: Mapping[str, Callable[[ModelOptReader, Module, str, Section], Matrix]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_token,
    "FP8_PC_PT": _fp8_token,
    "FP8_PB_WO": _fp8_blocks,
    "FP8_PB_REAL": _fp8_blocks,
    "NVFP4": _nvfp4_of(_nvfp4_input),
    "NVFP4_AWQ": _nvfp4_of(_nvfp4_input),
    "W4A16_NVFP4": _nvfp4_of(lambda *_: Input()),
    "W4A8_NVFP4_FP8": _nvfp4_of(_fp8_input),
    "MXFP8": _mxfp8,
    "MXFP4": _mxfp4_of(Input(quant="mxfp4")),
    "W4A8_MXFP4_FP8": _mxfp4_of(Input(quant="fp8")),
    "INT4_AWQ": _int4,
    "W4A16_AWQ": _int4,
    "W4A8_AWQ": _int4_fp8,
    "W8A16": _int8_weights,
    "W8A8_SQ_PER_CHANNEL": _int8_smooth,
}
