"""How products with weights in FP8 and FP4 are computed: what there is, and what is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _core

#: What this build has, by option: name -> what it does.
BACKENDS: Mapping[str, Mapping[str, str]] = {
    "fp8_gemm_backend": {
        "decode": "e4m3 codes become bf16 in registers, sums are in fp32, scales are applied to "
        "partial sums; inputs are quantized as the checkpoint prescribes",
    },
    "fp4_gemm_backend": {
        "decode": "4-bit codes become bf16 in registers by a table of 16, sums are in fp32, scales "
        "are applied to partial sums; inputs are quantized as the checkpoint prescribes",
    },
}

#: SGLang's names of kernels that are not here.
ELSEWHERE: Mapping[str, Sequence[str]] = {
    "fp8_gemm_backend": (
        "deep_gemm", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_deepgemm",
        "flashinfer_cutedsl", "cutlass", "triton", "aiter",
    ),
    "fp4_gemm_backend": (
        "flashinfer_cudnn", "flashinfer_cutedsl", "flashinfer_cutlass", "flashinfer_trtllm",
        "marlin",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a loaded model's matrices are."""

    codes: Sequence[str]  # of the forms of described matrices
    gguf_types: Sequence[str]  # of the tensors of a GGUF file
    target: str  # what matrices were quantized to while loading, "" if they were not
    n_online: int  # how many of them were
    dequantized: bool  # compute_dtype float32

    def count(self, option: str) -> int:
        """Matrices in FP8, or in FP4."""
        kinds = _KINDS[option]
        if self.target:  # the others stay in 16 bits
            return self.n_online if self.target.startswith(kinds.targets) else 0
        found = [*self.codes, *self.gguf_types]
        return sum(name in kinds.codes for name in found)


@dataclass(frozen=True)
class _Kind:
    name: str
    codes: tuple[str, ...]  # of forms, and GGUF types
    targets: tuple[str, ...]  # how names of csrc/quant/quantize.h begin


_KINDS = {
    "fp8_gemm_backend": _Kind("FP8", ("e4m3",), ("fp8", "mxfp8")),
    "fp4_gemm_backend": _Kind("FP4", ("table of 16", "MXFP4", "NVFP4"), ("mxfp4", "nvfp4")),
}


def check(option: str, value: Any) -> None:
    """UnsupportedError for a kernel of a GPU, ValueError for what is none at all."""
    here = ("auto", *BACKENDS[option])
    if value in here:
        return
    if value in ELSEWHERE[option]:
        raise _core.UnsupportedError(
            f"{option}={value!r}: those kernels are for GPUs and not in this build, which has "
            f"{', '.join(BACKENDS[option])}: pass that, or 'auto'"
        )
    raise ValueError(f"{option}={value!r}: must be one of {', '.join(here)}")


def chosen(option: str, asked: str, weights: Weights) -> dict[str, Any]:
    """What is taken and why, for Engine.info."""
    count = weights.count(option)
    (name,) = BACKENDS[option]
    taken: str | None = None
    if count == 0:
        why = f"no weight is in {_KINDS[option].name}"
    elif weights.dequantized:
        why = "compute_dtype float32: weights are dequantized when they are loaded"
    else:
        taken = name
        why = "asked for" if asked == name else "the one that this build has"
        why += f": {BACKENDS[option][name]}"
    return {"asked": asked, "taken": taken, "why": why, "matrices": count}
