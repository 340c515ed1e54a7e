"""The tensors of a checkpoint by the modules that they belong to, and the small ones' values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .matrix import F32

FLOATS = ("F32", "F16", "BF16")

#: What a module's tensors are called, after its name and a dot.
PARTS = (
    "weight",
    "bias",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "biases",
    "global_scale",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_zp",
    "input_scale",
    "input_scale_2",
    "input_scale_inv",
    "input_scale_ub",
    "input_global_scale",
    "input_zero_point",
    "activation_scale",
    "pre_quant_scale",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4",
    "weight.quant_state.bitsandbytes__fp4",
    "weight_format",
    "SCB",
)
_PLAIN = ("weight", "bias")


@dataclass(frozen=True)
class Module:
    """A module and its tensors: part -> tensor's name."""

    name: str
    parts: Mapping[str, str]

    @property
    def weight(self) -> str:
        """The name by which a model knows its matrix."""
        return self.name if "blocks" in self.parts else f"{self.name}.weight"

    def has(self, part: str) -> bool:
        return part in self.parts

    def need(self, part: str, why: str) -> str:
        """The tensor's name, or an error that names it."""
        if part not in self.parts:
            raise _core.CheckpointError(f"{self.name}.{part} is missing: {why}")
        return self.parts[part]

    def first(self, *parts: str, why: str) -> str:
        """The first of these that is there, by tensor's name; the error names parts[0]."""
        return next(iter(self.some(*parts)), "") or self.need(parts[0], why)

    def some(self, *parts: str) -> tuple[str, ...]:
        return tuple(self.parts[part] for part in parts if part in self.parts)


def shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(str(n) for n in shape)}]"


class Tensors:
    """Names, dtypes and shapes, and values where a reader needs them."""

    def __init__(self, checkpoint: _core.Checkpoint) -> None:
        self._checkpoint = checkpoint
        rows = checkpoint.tensors()
        self._entries = {name: (dtype, shape) for name, dtype, shape, _ in rows}

    def names(self) -> list[str]:
        return list(self._entries)

    def dtype(self, name: str) -> str:
        return self._entries[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def describe(self, name: str) -> str:
        return f"{name} is {self.dtype(name)} {shape_text(self.shape(name))}"

    @cached_property
    def modules(self) -> list[Module]:
        """Every module that has a part of PARTS, or gpt-oss' blocks, in the order of the files."""
        found: dict[str, dict[str, str]] = {}
        for name in self._entries:
            module, part = self._split(name)
            if part:
                found.setdefault(module, {})[part] = name
        return [Module(module, parts) for module, parts in found.items()]

    def _split(self, name: str) -> tuple[str, str]:
        for ending in ("_blocks", "_scales"):
            module = name.removesuffix(ending)
            if module != name and f"{module}_blocks" in self._entries:
                return module, ending[1:]
        at = name.find(".weight.")
        module, part = (name[:at], name[at + 1 :]) if at > 0 else name.rpartition(".")[::2]
        return (module, part) if part in PARTS and module else ("", "")

    def is_plain(self, module: Module) -> bool:
        """A weight in floats and nothing that says otherwise, or no weight at all."""
        if any(part not in _PLAIN for part in module.parts):
            return False
        return not module.has("weight") or self.dtype(module.parts["weight"]) in FLOATS

    def expect(
        self, name: str, dtypes: Sequence[str], shape: Sequence[int] | None, why: str
    ) -> tuple[int, ...]:
        """The shape, or an error with what is there, what is wanted, and why."""
        found = self.shape(name)
        if self.dtype(name) not in dtypes or (shape is not None and found != tuple(shape)):
            wanted = " or ".join(dtypes) + ("" if shape is None else f" {shape_text(shape)}")
            raise _core.CheckpointError(f"{self.describe(name)}, {wanted} is wanted: {why}")
        return found

    def matrix_shape(self, name: str, dtypes: Sequence[str], why: str) -> tuple[int, int]:
        shape = self.expect(name, dtypes, None, why)
        if len(shape) != 2 or min(shape) < 1:
            raise _core.CheckpointError(f"{self.describe(name)}, two dimensions are wanted: {why}")
        return shape[0], shape[1]

    def stack_shape(self, name: str, dtypes: Sequence[str], why: str) -> tuple[int, ...]:
        """The same where matrices of all experts may lie one behind the other: [.., rows, cols]."""
        shape = self.expect(name, dtypes, None, why)
        if len(shape) not in (2, 3) or min(shape) < 1:
            raise _core.CheckpointError(
                f"{self.describe(name)}, two dimensions are wanted, or three: {why}"
            )
        return shape

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes as they lie in the file."""
        return self._checkpoint.bytes(name)

    def words(self, name: str) -> NDArray[np.int64]:
        """The values of an integer tensor, in its shape."""
        kinds = {"I32": "<i4", "U32": "<u4", "I64": "<i8", "I8": "i1", "U8": "u1", "I16": "<i2"}
        if self.dtype(name) not in kinds:
            raise _core.CheckpointError(f"{self.describe(name)}, integers are wanted")
        values = self.raw(name).view(kinds[self.dtype(name)])
        return values.astype(np.int64).reshape(self.shape(name))

    def floats(self, name: str) -> F32:
        """The values of a float tensor, in its shape."""
        if self.dtype(name) not in FLOATS:
            raise _core.CheckpointError(f"{self.describe(name)}, {' or '.join(FLOATS)} is wanted")
        return self._checkpoint.dequantize(name)

    def scalar(self, name: str, why: str) -> float:
        """The one value of a scale: positive and finite."""
        values = self.floats(name).reshape(-1)
        if values.size == 0 or (values != values[0]).any():
            raise _core.CheckpointError(f"{self.describe(name)}, one value is wanted: {why}")
        if not 0.0 < values[0] < np.inf:
            raise _core.CheckpointError(
                f"{name}: {values[0]:g}, a scale is positive and finite: {why}"
            )
        return float(values[0])

    def check_finite(self, name: str, fmt: str | None) -> None:
        """Every scale is a number. One that is not would make its outputs NaN, all of them."""
        fmt = fmt or self.dtype(name)
        if fmt == "F8_E8M0":
            bad = self.raw(name) == 0xFF
        elif fmt == "F8_E4M3":
            bad = (self.raw(name) & 0x7F) == 0x7F
        else:
            bad = ~np.isfinite(self.floats(name).reshape(-1))
        if bad.any():
            at = int(bad.argmax())
            raise _core.CheckpointError(
                f"{name}: element {at} is not a finite number ({int(bad.sum())} of {bad.size} are "
                "not): the file is damaged, or the tool that wrote it overflowed"
            )
