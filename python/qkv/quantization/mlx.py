"""MLX (mlx-lm, mlx-community): words along the input; w = scales * q + biases for the affine mode,
and the microscaled floats under the same names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _core
from .matrix import E2M1, Array, Codes, Input, Matrix
from .names import parents
from .reader import Reader, cdiv
from .section import Section
from .tensors import FLOATS, Module, Tensors

_BITS = (1, 2, 3, 4, 5, 6, 8)

#: mode -> bits, group, meaning, format of the scales. Affine ones are free in bits and group.
_MODES: Mapping[str, tuple[int, int, str, str]] = {
    "mxfp4": (4, 32, "table", "F8_E8M0"),
    "mxfp8": (8, 32, "e4m3", "F8_E8M0"),
    "nvfp4": (4, 16, "table", "F8_E4M3"),
}


class MlxReader(Reader):
    def _own(self, module: str) -> Section | None:
        """The settings that stand under the module's path; None if it is `false` there."""
        value = self.section.data.get(module)
        if value is None:
            return self.section
        if value is False:
            return None
        if value is True:
            return self.section
        return self.section.section(module).over(self.section)

    def excluded(self, module: str) -> str | None:
        return next((p for p in parents(module) if self.section.data.get(p) is False), None)

    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("weight") or self.tensors.dtype(module.parts["weight"]) != "U32":
            return None
        settings = self._own(module.name) or self.section
        mode = settings.text("mode") or "affine"
        if mode == "affine":
            return self._affine(module, settings)
        if mode not in _MODES:
            raise settings.refuse(f"{module.name}: mode {mode!r:.40}: affine, {', '.join(_MODES)}")
        return self._floats(module, settings, mode)

    def _affine(self, module: Module, settings: Section) -> Matrix:
        bits = 4 if settings.integer("bits") is None else settings.integer("bits")
        group = 64 if settings.integer("group_size") is None else settings.integer("group_size")
        if bits not in _BITS or group is None or group < 1:
            raise settings.fail(f"{module.name}: bits {bits}, group_size {group}: bits are {_BITS}")
        why = f"MLX affine with bits {bits}, group_size {group}"
        *lead, k_in = self._shape(module, bits, group, why)
        scales, biases = module.need("scales", why), module.need("biases", why)
        for name in (scales, biases):
            self.tensors.expect(name, FLOATS, (*lead, cdiv(k_in, group)), why)
        return Matrix(
            shape=(math.prod(lead), k_in),
            codes=Codes(tensor=module.parts["weight"], bits=bits),
            group=group,
            scale=Array(tensor=scales),
            min=Array(tensor=biases),
        )

    def _shape(self, module: Module, bits: int, group: int, why: str) -> tuple[int, ...]:
        """From the scales, if the words are as many as they call for; else the words tell. With
        three dimensions the first is the experts'."""
        weight = module.parts["weight"]
        *lead, n_words = self.tensors.stack_shape(weight, ("U32",), why)
        scales = self.tensors.shape(module.need("scales", why))
        k_in = group * scales[-1] if len(scales) == len(lead) + 1 else 0
        if cdiv(k_in * bits, 32) != n_words:
            raise _core.CheckpointError(
                f"{self.tensors.describe(weight)} beside "
                f"{self.tensors.describe(module.parts['scales'])}"
                f": {why} calls for {cdiv(k_in * bits, 32)} words a row"
            )
        return (*lead, k_in)

    def _floats(self, module: Module, settings: Section, mode: str) -> Matrix:
        bits, group, meaning, fmt = _MODES[mode]
        for key, wanted in (("bits", bits), ("group_size", group)):
            found = settings.integer(key)
            if found not in (None, wanted):
                raise settings.fail(f"{module.name}: mode {mode} has {key} {wanted}, not {found}")
        why = f"MLX {mode}"
        *lead, k_in = self._shape(module, bits, group, why)
        scales, n_out = module.parts["scales"], math.prod(lead)
        self.tensors.expect(scales, ("U8",), (*lead, k_in // group), why)
        factor = module.some("global_scale")
        if factor:
            self.tensors.scalar(factor[0], why)
        return Matrix(
            shape=(n_out, k_in),
            codes=Codes(tensor=module.parts["weight"], bits=bits, meaning=meaning),
            table=E2M1 if meaning == "table" else None,
            group=group,
            scale=Array(tensor=scales, format=fmt),
            factor=Array(tensor=factor[0], rows_per=n_out) if factor else None,
            input=Input(),
        )


def looks_like(tensors: Tensors, module: Module) -> bool:
    """Whether only MLX writes such tensors: words in U32 beside scales [rows, groups]."""
    if not (module.has("weight") and module.has("scales")):
        return False
    weight, scales = module.parts["weight"], module.parts["scales"]
    shapes = tensors.shape(weight), tensors.shape(scales)
    return (
        tensors.dtype(weight) == "U32"
        and len(shapes[0]) == len(shapes[1]) in (2, 3)
        and shapes[0][:-1] == shapes[1][:-1]
    )


#: Projections whose input is the model's hidden state.
_OF_HIDDEN = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")


def settings_of(tensors: Tensors, modules: Sequence[Module], hidden: object) -> dict[str, Any]:
    """The settings where no configuration has them. Words and groups alone leave bits and group
    size open (4 by 64 looks like 8 by 32), so one matrix must be known by its width."""
    for module in modules:
        if module.name.rpartition(".")[2] not in _OF_HIDDEN or type(hidden) is not int:
            continue
        n_words = tensors.shape(module.parts["weight"])[-1]
        n_groups = tensors.shape(module.parts["scales"])[-1]
        if hidden < 1 or n_groups < 1 or 32 * n_words % hidden or hidden % n_groups:
            continue
        bits, group = 32 * n_words // hidden, hidden // n_groups
        found: dict[str, Any] = {"bits": bits, "group_size": group}
        if tensors.dtype(module.parts["scales"]) == "U8":
            found["mode"] = "mxfp8" if bits == 8 else "nvfp4" if group == 16 else "mxfp4"
        return found
    raise _core.CheckpointError(
        f"{tensors.describe(modules[0].parts['weight'])} is MLX's, but bits and group_size stand "
        "nowhere: config.json needs quantization: {bits, group_size}"
    )
