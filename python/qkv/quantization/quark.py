"""AMD Quark: a scheme for the model, for kinds of layers, and for layers by pattern, of which
the last that there is counts most."""

import fnmatch
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .fp8 import static_input
from .matrix import Array, Codes, Input, Matrix
from .names import FUSED, by_glob, with_fused
from .reader import (
    FP8,
    Reader,
    all_zero,
    byte_codes,
    cdiv,
    fp8_blocks,
    mxfp4,
    nvfp4,
    row_factor,
)
from .section import Section
from .tensors import FLOATS, Module, Tensors

_SCHEMES = ("per_tensor", "per_channel", "per_group", "per_block")


class QuarkReader(Reader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        if not section.has("export"):
            raise section.fail("export is missing: it says how weights are packed")
        export = section.section("export")
        method = export.text("pack_method") or "reorder"
        if method not in ("reorder", "order"):
            raise export.refuse(f"pack_method {method!r:.40}: reorder and order are supported")
        self.reorder = method == "reorder"
        stored = export.text("weight_format")
        if stored not in (None, "real_quantized"):
            raise export.refuse(
                f"weight_format {stored!r:.40}: the weights are not stored quantized. Export with "
                "weight_format='real_quantized'"
            )
        self._excluding = with_fused(by_glob(section.names("exclude")))
        self._layers = section.section("layer_quant_config").sections()

    @property
    def claims(self) -> bool:
        return bool(self._layers) or self.section.section("global_quant_config").has("weight")

    def excluded(self, module: str) -> str | None:
        return self._excluding(module)

    def _scheme(self, module: str) -> Section:
        """The layer's by its pattern, else its type's, else the model's. A projection that the file
        holds whole has its first shard's."""
        parent, dot, last = module.rpartition(".")
        names = [module, *(f"{parent}{dot}{shard}" for shard in FUSED.get(last, ())[:1])]
        for pattern, scheme in self._layers.items():
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                return scheme
        types = self.section.section("layer_type_quant_config")
        for kind in ("nn.Linear", "Linear", "<class 'torch.nn.modules.linear.Linear'>"):
            if types.has(kind):
                return types.section(kind)
        return self.section.section("global_quant_config")

    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight") or self.tensors.dtype(module.parts["weight"]) in FLOATS:
            return None
        scheme = self._scheme(module.name)
        if not scheme.has("weight"):
            raise self.contradiction(
                module, f"{self.tensors.describe(module.parts['weight'])}, but no scheme is for it"
            )
        value = scheme.data["weight"]
        specs = [Section(s, f"{scheme.where}.weight") for s in _listed(scheme, value)]
        return _Layer(self, module, scheme, specs).matrix()


def _listed(scheme: Section, value: object) -> list[Mapping[str, Any]]:
    """One spec, or a list of them where the first one's scales are quantized, too."""
    specs: list[Any] = value if isinstance(value, list) else [value]
    if not specs or not all(isinstance(spec, Mapping) for spec in specs):
        raise scheme.fail(f"weight is {value!r:.60}, an object or a list of them is wanted")
    return specs


class _Layer:
    """A module under its scheme."""

    def __init__(
        self, reader: QuarkReader, module: Module, scheme: Section, specs: list[Section]
    ) -> None:
        self.reader = reader
        self.tensors = reader.tensors
        self.module = module
        self.scheme = scheme
        self.spec = specs[0]
        self.specs = specs
        self.dtype = self.spec.text("dtype") or ""
        self.by = self.spec.text("qscheme") or "per_tensor"
        self.why = f"quark {self.dtype} {self.by}"

    def matrix(self) -> Matrix:
        if self.by not in _SCHEMES:
            raise self._refuse()
        if self.dtype in ("fp8_e4m3", "fp8_e5m2"):
            return self._bytes(*FP8)
        if self.dtype == "int8" and self.by != "per_group":
            return self._bytes("I8")
        if self.dtype in ("int4", "uint4") and self.by == "per_group":
            return self._int4()
        if self.dtype == "fp4" and self.by == "per_group":
            return self._fp4()
        raise self._refuse()

    def _refuse(self) -> Exception:
        return self.scheme.refuse(
            f"{self.module.name}: {self.why} is not supported: fp8, int8 by tensor or channel, "
            "int4 and uint4 by group, and fp4 are"
        )

    def _need(self, part: str) -> str:
        return self.module.need(part, self.why)

    def _bytes(self, *dtypes: str) -> Matrix:
        weight, scale = self._need("weight"), self._need("weight_scale")
        inp, also = self._input()
        if self.by == "per_block":
            block = self.spec.integers("block_size")
            if block is None or len(block) != 2 or min(block) < 1:
                raise self.spec.fail("block_size: two sizes are wanted")
            found = fp8_blocks(
                self.tensors, weight, scale, (block[0], block[1]), why=self.why, inp=inp
            )
            return replace(found, also=also)
        if self.by == "per_group":
            raise self._refuse()
        n_out, k_in = self.tensors.matrix_shape(weight, dtypes, self.why)
        return Matrix(
            shape=(n_out, k_in),
            codes=byte_codes(self.tensors, weight),
            factor=row_factor(self.tensors, scale, n_out, self.why),
            input=inp,
            also=(*also, *self._zero_zeros()),
        )

    def _zero_zeros(self) -> tuple[str, ...]:
        """Zero points that are all zero, as the symmetric schemes write them."""
        found = self.module.some("weight_zero_point")
        for name in found:
            if not all_zero(self.tensors, name):
                raise self.reader.contradiction(
                    self.module, f"{self.why} is symmetric, but {name} is not zero"
                )
        return found

    def _int4(self) -> Matrix:
        """Transposed, [k_in, n_out / 8] words, in AWQ's order or plainly; so are scales."""
        weight, scale = self._need("weight"), self._need("weight_scale")
        k_in, n_words = self.tensors.matrix_shape(weight, ("I32",), self.why)
        group = self.spec.integer("group_size")
        if group is None or group < 1:
            raise self.spec.fail(f"group_size is {group}, a positive number is wanted")
        n_groups = cdiv(k_in, group)
        shape = self.tensors.expect(scale, FLOATS, None, self.why)
        if len(shape) != 2 or shape[0] != n_groups or not n_words * 8 - 8 < shape[1] <= n_words * 8:
            self.tensors.expect(scale, FLOATS, (n_groups, n_words * 8), self.why)
        zero, trivial = None, self._zero_zeros() if self.spec.flag("symmetric") is True else ()
        if self.spec.flag("symmetric") is not True:
            name = self._need("weight_zero_point")
            self.tensors.expect(name, ("I32",), (n_groups, n_words), self.why)
            zero = self._codes(name)
        inp, also = self._input()
        return Matrix(
            shape=(shape[1], k_in),
            codes=self._codes(weight),
            group=group,
            scale=Array(tensor=scale, transposed=True),
            zero=zero,
            input=inp,
            also=(*also, *trivial),
        )

    def _codes(self, name: str) -> Codes:
        meaning = "signed" if self.dtype == "int4" else "unsigned"
        if self.reader.reorder:
            return Codes(tensor=name, bits=4, order="interleaved", meaning=meaning)
        return Codes(tensor=name, bits=4, meaning=meaning, transposed=True)

    def _fp4(self) -> Matrix:
        weight, scale = self._need("weight"), self._need("weight_scale")
        inp, also = self._input()
        group = self.spec.integer("group_size")
        if group == 32 and len(self.specs) == 1:
            return replace(mxfp4(self.tensors, weight, scale, self.why, inp), also=also)
        if group == 16 and len(self.specs) == 2:
            factor = self._need("weight_scale_2")
            found = nvfp4(self.tensors, weight, scale, factor, why=self.why, inp=inp)
            return replace(found, also=also)
        raise self._refuse()

    def _input(self) -> tuple[Input, tuple[str, ...]]:
        """How inputs are quantized, and the tensors that say so."""
        value = self.scheme.data.get("input_tensors")
        if value is None:
            return Input(), ()
        specs = _listed(self.scheme, value)
        spec = Section(specs[0], f"{self.scheme.where}.input_tensors")
        dtype, by = spec.text("dtype") or "", spec.text("qscheme")
        dynamic = spec.flag("is_dynamic") is True
        if dtype == "fp4":
            return self._fp4_input(spec, len(specs))
        if dtype not in ("fp8_e4m3", "int8"):
            raise spec.refuse(f"inputs in {dtype!r:.40} are not supported: fp8_e4m3, int8, fp4 are")
        quant = "fp8" if dtype == "fp8_e4m3" else "int8"
        if by == "per_group" and quant == "fp8":
            return Input(quant="fp8_group", group=max(spec.integer("group_size") or 128, 1)), ()
        if dynamic:
            return Input(quant=quant), ()
        scale = static_input(self.reader, self.module, self.why)
        return Input(quant=quant, scale=scale), self.module.some("input_scale", "input_zero_point")

    def _fp4_input(self, spec: Section, n_specs: int) -> tuple[Input, tuple[str, ...]]:
        if spec.integer("group_size") == 32 and n_specs == 1:
            return Input(quant="mxfp4"), ()
        if not self.module.has("input_scale_2") and not self.module.has("input_scale"):
            return Input(quant="nvfp4", group=16), ()
        names = self.module.some("input_scale_2", "input_scale")
        scale = self.tensors.scalar(names[0], self.why)
        return Input(quant="nvfp4", group=16, scale=scale), names
