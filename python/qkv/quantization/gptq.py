"""GPTQ (AutoGPTQ, GPTQModel): codes packed along the input, zero points along the output.

Version 1 stores zero points less one, "gptq_v2" as they are.
"""

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .matrix import Array, Codes, Matrix
from .names import compile_pattern
from .reader import Reader, all_zero, cdiv
from .section import Section
from .tensors import FLOATS, Module, Tensors

_VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point
_BITS = (2, 3, 4, 8)


class GptqReader(Reader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        if section.flag("is_marlin_format"):
            raise self._other_layout("marlin")
        self._dynamic = [
            (
                p,
                p.startswith("-:"),
                compile_pattern(section, p.removeprefix("+:").removeprefix("-:")),
            )
            for p in section.names("dynamic")
        ]

    def _other_layout(self, name: str) -> Exception:
        return self.section.refuse(
            f"checkpoint_format {name!r:.40} is not supported: gptq and gptq_v2 are. Save the "
            "checkpoint again with GPTQModel in format gptq"
        )

    def _override(self, module: str) -> tuple[str, bool, Section] | None:
        """The first entry of `dynamic` that means the module: pattern, whether it skips, values."""
        for pattern, skips, regex in self._dynamic:
            if regex.match(module):
                return pattern, skips, self.section.section("dynamic").section(pattern)
        return None

    def excluded(self, module: str) -> str | None:
        override = self._override(module)
        if override is not None and override[1]:
            return f"dynamic {override[0]}"
        if module.rpartition(".")[2] == "lm_head" and self.section.flag("lm_head") is False:
            return "lm_head false"
        return None

    def settings(self, module: str) -> Section:
        override = self._override(module)
        return self.section if override is None else override[2].over(self.section)

    def version(self, settings: Section) -> int | None:
        """What is added to stored zero points; None if the configuration does not say."""
        name = settings.text("checkpoint_format") or settings.text("format")
        if name is None:
            return None
        if name not in _VERSIONS:
            raise self._other_layout(name)
        return _VERSIONS[name]

    def matrix(self, module: Module) -> Matrix | None:
        if not module.has("qweight"):
            return None
        settings = self.settings(module.name)
        return read(self, module, settings, self.version(settings))


def read(reader: Reader, module: Module, settings: Section, add: int | None) -> Matrix:
    """A GPTQ matrix. `add`: what makes zero points of stored ones, None if that is not known."""
    tensors = reader.tensors
    bits = settings.integer("bits")
    if bits not in _BITS:
        raise settings.fail(f"{module.name}: bits is {bits}, GPTQ has {_BITS}")
    why = f"GPTQ with bits {bits}, group_size {settings.integer('group_size')}"
    qweight = module.parts["qweight"]
    scales = module.need("scales", why)
    n_words, n_out = tensors.matrix_shape(qweight, ("I32", "U32"), why)
    if n_words * 32 % bits:
        raise reader.contradiction(
            module, f"{tensors.describe(qweight)}: {n_words} words hold no whole {bits}-bit codes"
        )
    k_in = n_words * 32 // bits
    group = group_size(reader, settings, module, k_in)
    n_groups = 1 if group == 0 else cdiv(k_in, group)
    if tensors.shape(scales)[-1:] == (8 * n_out,):
        raise other_packing(reader, module, "AWQ")
    tensors.expect(scales, FLOATS, (n_groups, n_out), why)
    zeros = _zeros(reader, module, settings, bits, (n_out, n_groups), add)
    k_group, also = _k_group(reader, module, settings, k_in, group, n_groups)
    scale = Array(tensor=scales, transposed=True)
    return Matrix(
        shape=(n_out, k_in),
        codes=Codes(
            tensor=qweight,
            bits=bits,
            order="columns",
            meaning="unsigned" if isinstance(zeros, Codes) else "offset",
        ),
        group=group,
        scale=scale if group else None,
        factor=None if group else Array(tensor=scales),
        zero=zeros if isinstance(zeros, Codes) else None,
        k_group=k_group,
        also=(*also, *((zeros,) if isinstance(zeros, str) else ()), *zero_bias(tensors, module)),
    )


def other_packing(reader: Reader, module: Module, name: str) -> _core.CheckpointError:
    tensors = reader.tensors
    return reader.contradiction(
        module,
        f"{tensors.describe(module.parts['qweight'])} beside "
        f"{tensors.describe(module.parts['scales'])}: {name} packs so. Correct quant_method",
    )


def group_size(reader: Reader, settings: Section, module: Module, k_in: int) -> int:
    """Elements along K that share a scale; 0: all of them."""
    group = settings.integer("group_size")
    if group is None:
        group = settings.integer("q_group_size")
    if group is None or (group < 1 and group != -1):
        raise settings.fail(
            f"{module.name}: group_size is {group}, a positive number or -1 is wanted"
        )
    return 0 if group == -1 or group >= k_in else group


def _zeros(
    reader: Reader,
    module: Module,
    settings: Section,
    bits: int,
    shape: tuple[int, int],
    add: int | None,
) -> Codes | str | None:
    """Zero points; the tensor's name if it says nothing that `sym` does not; None if there is
    none."""
    tensors, (n_out, n_groups) = reader.tensors, shape
    sym = settings.flag("sym")
    if not module.has("qzeros"):
        if sym is False:
            module.need("qzeros", "sym is false")
        return None
    qzeros = module.parts["qzeros"]
    why = f"zero points of {bits} bits for {n_out} outputs in {n_groups} groups"
    if n_out * bits % 32:
        raise reader.contradiction(
            module, f"{n_out} outputs of {bits} bits fill no whole words, so qzeros is unclear"
        )
    tensors.expect(qzeros, ("I32", "U32"), (n_groups, n_out * bits // 32), why)
    stored = codes_in(tensors, qzeros, bits)
    if sym:
        _check_symmetric(reader, module, qzeros, (bits, stored), add)
        return qzeros
    add = 1 if add is None else add
    if stored == {(1 << (bits - 1)) - add}:
        return qzeros
    return Codes(tensor=qzeros, bits=bits, transposed=True, add=add)


def codes_in(tensors: Tensors, name: str, bits: int) -> set[int]:
    """Which codes a stream of words holds."""
    stream = np.unpackbits(tensors.raw(name), bitorder="little").reshape(-1, bits)
    codes: NDArray[np.uint8] = np.packbits(stream, axis=1, bitorder="little")[:, 0]
    return {int(code) for code in np.unique(codes)}


def _check_symmetric(
    reader: Reader, module: Module, qzeros: str, codes: tuple[int, set[int]], add: int | None
) -> None:
    """A symmetric matrix has the middle as every zero point. The stored number tells the version:
    0x7777 is 8 in version 1, 0x8888 in gptq_v2."""
    bits, stored = codes
    middle = 1 << (bits - 1)
    told = next((version for version in (1, 0) if stored == {middle - version}), None)
    if told is not None and add in (told, None):
        if told == 0 and add is None:
            reader.note(
                "the config has no checkpoint_format; qzeros hold what gptq_v2 stores for "
                "symmetric weights, and are read so"
            )
        return
    names = {1: "gptq", 0: "gptq_v2"}
    if told is not None and add is not None:
        raise reader.contradiction(
            module,
            f"the config says checkpoint_format {names[add]}, {qzeros} holds what {names[told]} "
            f"stores for symmetric weights ({min(stored)}): set checkpoint_format to "
            f"{names[told]!r}",
        )
    raise reader.contradiction(
        module,
        f"sym is true, but {qzeros} holds {min(stored)} to {max(stored)} and not "
        f"{middle - (1 if add is None else add)} alone: set sym to false if they are meant",
    )


def _k_group(
    reader: Reader, module: Module, settings: Section, k_in: int, group: int, n_groups: int
) -> tuple[str | None, tuple[str, ...]]:
    """g_idx, if it says more than k / group; and the tensor, if it says no more."""
    if not module.has("g_idx"):
        if settings.flag("desc_act") and group not in (0, k_in):
            module.need("g_idx", "desc_act is true")
        return None, ()
    name = module.parts["g_idx"]
    return check_k_group(reader.tensors, name, k_in, group, n_groups)


def check_k_group(
    tensors: Tensors, name: str, k_in: int, group: int, n_groups: int
) -> tuple[str | None, tuple[str, ...]]:
    why = f"the group, 0 to {n_groups - 1}, of each of {k_in} inputs"
    tensors.expect(name, ("I32",), (k_in,), why)
    values = tensors.words(name)
    plain = np.arange(k_in) // (group or k_in)
    if not values.any() or (values == plain).all() or (values == -1).all():
        return None, (name,)
    bad = (values < 0) | (values >= n_groups)
    if bad.any():
        at = int(bad.argmax())
        raise _core.CheckpointError(f"{name}: element {at} is group {values[at]}, {why} is wanted")
    return name, ()


def zero_bias(tensors: Tensors, module: Module) -> tuple[str, ...]:
    """The bias that these tools write for layers that have none, if it is all zeros."""
    return tuple(name for name in module.some("bias") if all_zero(tensors, name))
