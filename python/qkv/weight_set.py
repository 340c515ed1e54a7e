"""Sets of weights of one model: what stands in a checkpoint, and what loading makes of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import gemm_backends, models, options
from ._core import Checkpoint, Error
from .quantization import METHODS, Detected, detect, forms, summary
from .quantization.packed import Forms
from .quantization.wire import to_core

#: What the core counts of a set of weights.
_COUNTS = ("matrices", "int8_matrices", "quantized_inputs", "online_matrices", "online_left")

Tensors = Sequence[tuple[str, str, tuple[int, ...], int]]


@dataclass(frozen=True, kw_only=True)
class WeightSet:
    """A checkpoint's weights, found and checked."""

    path: str
    container: str
    detected: Detected
    tensors: Tensors
    forms: Forms  # of the described weights
    n_bytes: int  # in the backend
    summary: dict[str, Any]  # for Engine.info

    @property
    def target(self) -> str:
        """What matrices are quantized to while loading, a name of csrc/quant/quantize.h; "" if they
        are not."""
        return METHODS[self.detected.online].target if self.detected.online else ""

    def facts(
        self, counts: Mapping[str, Any], asked: Mapping[str, str], dequantized: bool, isa: str
    ) -> dict[str, Any]:
        """For Engine.info. counts: the core's. asked: gemm_backends' options."""
        loaded = gemm_backends.Weights(
            codes=[form["code"] for form in self.forms.values()],
            gguf_types=self.gguf_types,
            products=counts["products"],
            target=self.target,
            n_online=counts["online_matrices"],
            dequantized=dequantized,
        )
        return {
            "model": self.path,
            "quantization": self.summary,
            "online_quantization": self.detected.online,
            **{
                option: gemm_backends.chosen(option, name, loaded, isa)
                for option, name in asked.items()
            },
            **{name: counts[name] for name in _COUNTS},
        }

    @property
    def gguf_types(self) -> list[str]:
        """Of all tensors of a GGUF file."""
        return [fmt for _, fmt, _, _ in self.tensors] if self.container == "gguf" else []

    def to_core(self) -> tuple[str, str | None, dict[str, NDArray[np.float32]], str | None]:
        """Path, matrices, arrays and online as _core.Engine has them."""
        matrices, arrays = to_core(self.detected.matrices)
        described = None if self.container == "gguf" else matrices
        return self.path, described, arrays, self.target or None

    def same_as(self, other: "WeightSet") -> bool:
        """Whether loading makes the same of both."""
        mine, theirs = self.to_core(), other.to_core()
        return (mine[0], mine[1], mine[3]) == (theirs[0], theirs[1], theirs[3])


def read(
    checkpoint: Checkpoint,
    path: str,
    quantization: str | None,
    compute_dtype: str,
    int8: bool = False,
) -> WeightSet:
    """Of an open checkpoint; `quantization` as detect() takes it, which says what it raises. int8:
    for activations in int8."""
    detected = detect(checkpoint, quantization)
    tensors = checkpoint.tensors()
    packed = forms(checkpoint, detected, float32=compute_dtype == "float32", int8=int8)
    found = WeightSet(
        path=path,
        container=checkpoint.container,
        detected=detected,
        tensors=tensors,
        forms=packed,
        n_bytes=0,
        summary=summary(detected, packed, tensors),
    )
    n_bytes = options.packed_bytes(
        tensors,
        compute_dtype=compute_dtype,
        int8=int8,
        forms=packed,
        taken=detected.taken,
        target=found.target,
        shapes=detected.shapes,
        heads=_heads(checkpoint),
    )
    return replace(found, n_bytes=n_bytes)


def _heads(checkpoint: Checkpoint) -> tuple[int, int, int] | None:
    try:
        config = checkpoint.model_config()
    except Error:  # which loading says
        return None
    sizes = config["n_heads"], config["nope_dim"], config["value_dim"]
    return (int(sizes[0]), int(sizes[1]), int(sizes[2])) if config["kv_rank"] else None


def for_prompts(
    given: str | os.PathLike[str] | None,
    decode: WeightSet,
    compute_dtype: str,
    int8: bool = False,
) -> WeightSet | None:
    """What `prefill_quantization` asks for beside `decode`, the set for generated positions; None
    if that is the same weights. A name is read in decode's checkpoint, or made of it; a path is
    another one's of the same model (the core checks that it is)."""
    if given is None:
        return None
    name = given if isinstance(given, str) and given in METHODS else None
    where = f"prefill_quantization={os.fspath(given)!r}"
    try:
        path = decode.path if name is not None else models.resolve(given)
        if os.path.realpath(path) == os.path.realpath(decode.path):
            path = decode.path
        checkpoint = Checkpoint(path)
        try:
            found = read(checkpoint, path, name, compute_dtype, int8)
            carried = path != decode.path and bool(checkpoint.kv_scales())
        finally:
            checkpoint.close()
    except Error as error:
        raise type(error)(f"{where}: {error}") from error
    if found.same_as(decode):
        return None
    if carried:
        note = "its scales of the KV cache are not used: both phases use those of the model"
        found.summary["notes"].append(note)
    return replace(found, n_bytes=found.n_bytes - _shared_bytes(found, decode, compute_dtype, int8))


def _shared_bytes(found: WeightSet, decode: WeightSet, compute_dtype: str, int8: bool) -> int:
    """Of plain embeddings and heads of the same files, which the backend holds once."""
    targets = (found.target, decode.target)
    if found.path != decode.path or any(target.startswith("mlx") for target in targets):
        return 0
    ends = [
        entry
        for entry in found.tensors
        if options.is_end(entry[0]) and entry[0] not in found.detected.taken
    ]
    return options.packed_bytes(ends, compute_dtype=compute_dtype, int8=int8)
