"""compressed-tensors (llm-compressor): groups of modules, each with a scheme for weights and one
for inputs. Shards of a projection, and formats, may differ from group to group."""

import re
from dataclasses import dataclass, replace

import numpy as np

from .. import _core
from .gptq import check_k_group
from .matrix import Array, Codes, Input, Matrix
from .names import FUSED, by_target, compile_pattern, with_fused
from .reader import (
    FP8,
    Reader,
    all_zero,
    byte_codes,
    cdiv,
    fp8_blocks,
    mxfp4,
    mxfp8,
    nvfp4,
    reciprocal,
    row_factor,
)
from .section import Section
from .tensors import FLOATS, Module, Tensors

_REFUSED = {
    "mxfp6-pack-quantized": "6-bit floats",
    "marlin-24": "2:4 sparsity",
    "sparse-24-bitmask": "2:4 sparsity",
    "sparse-bitmask": "sparsity",
}
#: Of the weights that a format holds; what is not here holds either.
_TYPE_OF = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
    "nvfp4-pack-quantized": "float",
    "mxfp4-pack-quantized": "float",
    "mxfp8-quantized": "float",
}


@dataclass(frozen=True)
class _Group:
    name: str
    section: Section
    weights: Section
    inputs: Section
    format: str | None
    exact: frozenset[str]
    regexes: tuple["re.Pattern[str]", ...]


class CompressedTensorsReader(Reader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        self._refuse_extras()
        self._ignored = with_fused(by_target(section, section.names("ignore")))
        self._groups = [
            self._group(name, group)
            for name, group in section.section("config_groups").sections().items()
        ]

    def _refuse_extras(self) -> None:
        sparsity = self.section.section("sparsity_config").text("format")
        if sparsity not in (None, "", "dense"):
            raise self.section.refuse(
                f"sparsity_config: format {sparsity!r:.40}: sparse weights are not supported. Save "
                "the checkpoint again without sparsity compression"
            )
        transforms = self.section.section("transform_config").section("config_groups")
        for name, group in transforms.sections().items():
            applied = group.data.get("apply")
            for entry in applied if isinstance(applied, list) else []:
                place = entry.get("location") if isinstance(entry, dict) else None
                if place not in ("weight_input", "weight_output"):
                    raise self.section.refuse(
                        f"transform_config {name!r:.40}: a transform of {place!r:.40} while the "
                        "model runs is not supported; those fused into weights are"
                    )

    def _group(self, name: str, group: Section) -> _Group:
        targets = group.names("targets")
        regexes = [t for t in targets if t.startswith("re:")]
        fmt = group.text("format") or self.section.text("format")
        if fmt == "mixed-precision":
            fmt = None
        if fmt in _REFUSED:
            raise group.refuse(f"format {fmt}: {_REFUSED[fmt]} is not supported")
        kind = group.section("weights").text("type")
        if kind is not None and kind != _TYPE_OF.get(str(fmt), kind):
            raise group.fail(f"format {fmt} holds weights of type {_TYPE_OF[str(fmt)]}, not {kind}")
        return _Group(
            name=name,
            section=group,
            weights=group.section("weights"),
            inputs=group.section("input_activations"),
            format=fmt,
            exact=frozenset(t for t in targets if not t.startswith("re:")),
            regexes=tuple(compile_pattern(group, t[3:]) for t in regexes),
        )

    @property
    def claims(self) -> bool:
        return any(group.weights.data for group in self._groups)

    def excluded(self, module: str) -> str | None:
        found = self._ignored(module)
        if found is None and self._match(module) is None:
            return "no target"
        return found

    def _match(self, module: str) -> _Group | None:
        """By the exact name, else by expression, else by class; a fused projection by its first
        shard."""
        parent, dot, last = module.rpartition(".")
        names = [module, *(f"{parent}{dot}{shard}" for shard in FUSED.get(last, ())[:1])]
        kind = "embedding" if last == "embed_tokens" else "linear"
        for group in self._groups:
            if any(name in group.exact for name in names):
                return group
        for group in self._groups:
            if any(regex.match(name) for regex in group.regexes for name in names):
                return group
        for group in self._groups:
            if any(target.lower() in kind for target in group.exact if target):
                return group
        return None

    def matrix(self, module: Module) -> Matrix | None:
        weight = module.some("weight_packed", "weight")
        if not weight or self.tensors.dtype(weight[0]) in FLOATS:
            return None
        group = self._match(module.name)
        if group is None or not group.weights.data:
            raise self.contradiction(
                module,
                f"{self.tensors.describe(weight[0])}, but no group of config_groups means it",
            )
        return _Scheme(self, module, group).matrix()


class _Scheme:
    """A module under the scheme of its group."""

    def __init__(self, reader: CompressedTensorsReader, module: Module, group: _Group) -> None:
        self.reader = reader
        self.tensors = reader.tensors
        self.module = module
        self.group = group
        args = group.weights
        self.bits = args.integer("num_bits") or 0
        self.kind = args.text("type") or "int"
        self.strategy = args.text("strategy") or (
            "tensor" if args.integer("group_size") is None else "group"
        )
        self.group_size = args.integer("group_size") or 0
        self.why = (
            f"{group.name}: {group.format or 'packed'}, {self.kind} of {self.bits} bits by "
            f"{self.strategy}"
        )
        if self.group_size > 0:
            self.why += f" of {self.group_size}"

    def matrix(self) -> Matrix:
        packed = self.module.has("weight_packed")
        if self.kind == "float" and self.bits == 4:
            return self._fp4()
        if self.kind == "float" and self.bits == 8 and not packed:
            return self._fp8()
        if self.kind == "int" and packed:
            return self._packed()
        if self.kind == "int" and self.bits == 8:
            return self._bytes("I8")
        raise self.group.section.refuse(f"{self.module.name}: {self.why} is not supported")

    def _fp4(self) -> Matrix:
        weight, scale = self._need("weight_packed"), self._need("weight_scale")
        if self.group_size == 32:
            return mxfp4(self.tensors, weight, scale, self.why, self._input())
        if self.group_size not in (0, 16):
            raise self.group.section.refuse(f"{self.module.name}: {self.why}: groups are 16 or 32")
        inp = self._input()
        found = nvfp4(
            self.tensors,
            weight,
            scale,
            self._need("weight_global_scale"),
            why=self.why,
            inp=inp,
            inverted=True,
        )
        return self._with(found, "input_global_scale")

    def _fp8(self) -> Matrix:
        weight, scale = self._need("weight"), self._need("weight_scale")
        if self.strategy == "group" and self.tensors.dtype(scale) in ("U8", "F8_E8M0"):
            return mxfp8(self.tensors, weight, scale, self.why, self._input())
        if self.strategy == "block":
            found = fp8_blocks(
                self.tensors, weight, scale, self._block(), why=self.why, inp=self._input()
            )
            return self._with(found, "input_scale")
        return self._bytes(*FP8)

    def _block(self) -> tuple[int, int]:
        value = self.group.weights.data.get("block_structure")
        if isinstance(value, str):  # "128x128", as old releases wrote it
            value = [int(n) for n in value.split("x") if n.isdecimal() and len(n) < 10]
        if not isinstance(value, list) or len(value) != 2:
            value = [128, 128] if value is None else [0, 0]
        rows, columns = value
        if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
            raise self.group.weights.fail("block_structure: two sizes are wanted")
        return rows, columns

    def _bytes(self, *dtypes: str) -> Matrix:
        """A byte for each element: one scale, a scale per row, or per group."""
        weight, scale = self._need("weight"), self._need("weight_scale")
        n_out, k_in = self.tensors.matrix_shape(weight, dtypes, self.why)
        group = self._by_group(k_in)
        if group:
            self.tensors.expect(scale, FLOATS, (n_out, cdiv(k_in, group)), self.why)
        zero, also = self._zero(n_out, 1 if group == 0 else cdiv(k_in, group), packed=False)
        found = Matrix(
            shape=(n_out, k_in),
            codes=byte_codes(self.tensors, weight),
            group=group,
            scale=Array(tensor=scale) if group else None,
            factor=None if group else row_factor(self.tensors, scale, n_out, self.why),
            zero=zero,
            input=self._input(),
            also=also,
        )
        return self._with(found, "input_scale", "input_zero_point")

    def _packed(self) -> Matrix:
        """pack-quantized: codes plus 2^(bits - 1), a stream of bits along each row."""
        weight, scale = self._need("weight_packed"), self._need("weight_scale")
        if not 2 <= self.bits <= 8:
            raise self.group.section.refuse(f"{self.module.name}: {self.why} is not supported")
        n_out, k_in = self._stored_shape(weight)
        n_words = self.tensors.expect(weight, ("I32",), None, self.why)[1]
        if n_words != cdiv(k_in * self.bits, 32):
            padded = n_words == cdiv(k_in, 32 // self.bits)
            raise self.reader.contradiction(
                self.module,
                f"{self.tensors.describe(weight)}: rows of {k_in} codes of {self.bits} bits are "
                f"{cdiv(k_in * self.bits, 32)} words"
                + (" (padded as old releases did: save the checkpoint again)" if padded else ""),
            )
        group = self._by_group(k_in)
        n_groups = 1 if group == 0 else cdiv(k_in, group)
        if group:
            self.tensors.expect(scale, FLOATS, (n_out, n_groups), self.why)
        zero, also = self._zero(n_out, n_groups, packed=True)
        k_group, trivial = self._k_group(k_in, group, n_groups)
        found = Matrix(
            shape=(n_out, k_in),
            codes=Codes(tensor=weight, bits=self.bits, meaning="offset"),
            group=group,
            scale=Array(tensor=scale) if group else None,
            factor=None if group else row_factor(self.tensors, scale, n_out, self.why),
            zero=zero,
            k_group=k_group,
            input=self._input(),
            also=(*also, *trivial),
        )
        return self._with(found, "weight_shape", "input_scale", "input_zero_point")

    def _stored_shape(self, weight: str) -> tuple[int, int]:
        n_out, n_words = self.tensors.matrix_shape(weight, ("I32",), self.why)
        if not self.module.has("weight_shape"):
            return n_out, n_words * 32 // self.bits
        name = self.module.parts["weight_shape"]
        self.tensors.expect(name, ("I64", "I32"), (2,), self.why)
        rows, columns = (int(n) for n in self.tensors.words(name))
        if rows != n_out or not 0 < columns <= n_words * 32:
            raise self.reader.contradiction(
                self.module, f"{name} is [{rows}, {columns}], but {self.tensors.describe(weight)}"
            )
        return rows, columns

    def _by_group(self, k_in: int) -> int:
        if self.strategy in ("tensor", "channel"):
            return 0
        if self.strategy != "group" or self.group_size < -1 or self.group_size == 0:
            raise self.group.section.refuse(f"{self.module.name}: {self.why} is not supported")
        return 0 if self.group_size == -1 else self.group_size

    def _zero(
        self, n_out: int, n_groups: int, *, packed: bool
    ) -> tuple[Codes | None, tuple[str, ...]]:
        symmetric = self.group.weights.flag("symmetric") is not False
        if symmetric or self.kind == "float":
            found = self.module.some("weight_zero_point")
            for name in found:
                if not all_zero(self.tensors, name):
                    raise self.reader.contradiction(
                        self.module, f"symmetric is true, but {name} is not zero"
                    )
            return None, found
        name = self._need("weight_zero_point")
        if packed and self.tensors.dtype(name) == "I32":
            shape = (cdiv(n_out * self.bits, 32), n_groups)
            self.tensors.expect(name, ("I32",), shape, f"{self.why}, zero points along the rows")
            return Codes(
                tensor=name, bits=self.bits, order="columns", meaning="offset", transposed=True
            ), ()
        shape_found = self.tensors.shape(name)
        if int(np.prod(shape_found, dtype=np.int64)) != n_out * n_groups:
            self.tensors.expect(name, ("I8",), (n_out, n_groups), self.why)
        self.tensors.expect(name, ("I8",), None, self.why)
        return Codes(tensor=name, bits=8, meaning="signed"), ()

    def _k_group(self, k_in: int, group: int, n_groups: int) -> tuple[str | None, tuple[str, ...]]:
        if not self.module.has("weight_g_idx"):
            return None, ()
        name = self.module.parts["weight_g_idx"]
        return check_k_group(self.tensors, name, k_in, group, n_groups)

    def _input(self) -> Input:
        """How inputs are quantized. A dynamic scheme per tensor is done per token: else it would
        depend on the batch."""
        args = self.group.inputs
        if not args.data:
            return Input()
        kind, bits = args.text("type") or "int", args.integer("num_bits")
        group, dynamic = args.integer("group_size"), args.data.get("dynamic")
        if kind == "float" and bits == 4:
            if group == 32:
                return Input(quant="mxfp4")
            return Input(quant="nvfp4", group=16, scale=self._global_input())
        if bits != 8 or kind not in ("int", "float"):
            raise args.refuse(f"inputs in {kind!r:.20} of {bits} bits are not supported")
        if args.flag("symmetric") is False:
            self.reader.note(
                f"{self.group.name}: asymmetric inputs are not quantized; they stay in 16 bits"
            )
            return Input()
        quant = "int8" if kind == "int" else "fp8"
        if args.text("strategy") in ("group", "block"):
            return self._input_by_group(kind, group)
        if dynamic in (None, False):
            return Input(
                quant=quant, scale=self.tensors.scalar(self._need("input_scale"), self.why)
            )
        # Its scales are amax over half the range of codes, 255 / 2.
        return Input(quant=quant, steps=127.5 if kind == "int" else 0.0)

    def _input_by_group(self, kind: str, group: int | None) -> Input:
        if kind == "int":
            self.reader.note(f"{self.group.name}: inputs in int8 by group stay in 16 bits")
            return Input()
        scale = self.module.some("weight_scale")
        if group == 32 and scale and self.tensors.dtype(scale[0]) in ("U8", "F8_E8M0"):
            return Input(quant="mxfp8")
        return Input(quant="fp8_group", group=group if group is not None and group > 0 else 128)

    def _global_input(self) -> float:
        """1 / input_global_scale; 0, which is dynamic, if the scheme says so."""
        if self.group.inputs.data.get("dynamic") is True and not self.module.has(
            "input_global_scale"
        ):
            return 0.0
        name = self._need("input_global_scale")
        return reciprocal(self.tensors.scalar(name, self.why), name)

    def _need(self, part: str) -> str:
        return self.module.need(part, self.why)

    def _with(self, matrix: Matrix, *parts: str) -> Matrix:
        """The same with tensors that say no more, where the scheme has a use for them."""
        static = self.group.inputs.data.get("dynamic") is not True
        wanted = [
            part for part in parts if part == "weight_shape" or (self.group.inputs.data and static)
        ]
        for name in self.module.some("input_zero_point"):
            symmetric = self.group.inputs.flag("symmetric") is not False
            if symmetric and "input_zero_point" in wanted and not all_zero(self.tensors, name):
                raise _core.CheckpointError(f"{name}: not zero, but inputs are symmetric")
        return replace(matrix, also=(*matrix.also, *self.module.some(*wanted)))
