"""What a checkpoint's weights become in the backend: forms, bytes, and a summary for people."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .. import _core, tables
from .detection import Detected
from .tensors import FLOATS
from .wire import to_core

Forms = Mapping[str, Mapping[str, Any]]  # weight -> as _core.Checkpoint.forms has it
Tensors = Iterable[tuple[str, str, tuple[int, ...], int]]

#: A weight whose groups fit no form of the GEMM is dequantized to this.
FALLBACK = "2 bf16"


def forms(
    checkpoint: _core.Checkpoint, found: Detected, *, float32: bool = False, int8: bool = False
) -> Forms:
    """Of the described weights; int8: for activations in int8."""
    matrices, arrays = to_core(found.matrices)
    return checkpoint.forms(found.shapes, matrices, arrays, float32, int8)


def form_text(form: Mapping[str, Any]) -> str:
    """{"code": "i4", "group": 32, "scale": "f16", ...} -> "i4, scales f16 by 32"."""
    parts = [str(form["code"])]
    if form["group"]:
        parts.append(f"scales {form['scale']} by {form['group']}")
        if form["min"] != "none":
            parts.append("zero points" if form["min"] == "zero point" else f"minima {form['min']}")
    if form["row_scale"]:
        parts.append("a scale by row")
    return ", ".join(parts)


def counted_forms(found: Forms) -> dict[str, int]:
    return dict(Counter(form_text(form) for form in found.values()).most_common())


def gguf_quantized(tensors: Tensors) -> dict[str, int]:
    """Types of a GGUF file's quantized tensors, with how many there are."""
    return dict(Counter(dtype for _, dtype, _, _ in tensors if dtype not in FLOATS).most_common())


def summary(found: Detected, packed: Forms, tensors: Tensors) -> dict[str, Any]:
    """For Engine.info: the method and where it stands, how many matrices in which forms, how many
    want their input quantized, what is excluded, what fell back, and what a user should know."""
    kinds = gguf_quantized(tensors) if found.method == "gguf" else counted_forms(packed)
    inputs = Counter(m["input"]["quant"] for m in found.matrices.values() if "input" in m)
    return {
        "method": found.method,
        "source": found.source,
        "matrices": sum(kinds.values()),
        "forms": kinds,
        "inputs": dict(inputs),
        "ignored": dict(found.ignored),
        "fallbacks": fallbacks(packed),
        "notes": notes(found, packed),
    }


def fallbacks(packed: Forms) -> list[str]:
    return [name for name, form in packed.items() if form["code"] == FALLBACK]


def notes(found: Detected, packed: Forms) -> list[str]:
    """Those of the detection, and of what the backend makes of it."""
    fell_back = fallbacks(packed)
    if not fell_back:
        return list(found.notes)
    return [
        *found.notes,
        f"{len(fell_back)} matrices fit no form of the GEMM and are dequantized to two bf16 terms, "
        f"4 bytes a weight: {tables.first(fell_back)}",
    ]
