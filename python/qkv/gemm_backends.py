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
        "cublaslt": "on GPUs from sm_89 on: where weights and inputs are both in e4m3, cuBLASLt "
        "multiplies the codes: with scales by tensor or row, on sm_90 by 128 and block of 128, "
        "from sm_100 on MXFP8; other weights decode",
    },
    "fp4_gemm_backend": {
        "decode": "4-bit codes become bf16 in registers by a table of 16, sums are in fp32, scales "
        "are applied to partial sums; inputs are quantized as the checkpoint prescribes",
        "cublaslt": "on GPUs from sm_100 on: where weights and inputs are both NVFP4, cuBLASLt "
        "multiplies the codes with their scales; other weights decode",
    },
}


@dataclass(frozen=True, kw_only=True)
class Generation:
    """GPUs that compute alike, and why "auto" takes what it takes there."""

    archs: Sequence[str]  # as Engine.info["isa"] has them
    cards: str
    auto: Mapping[str, tuple[str, str]]  # by option: the name that is taken, and why


def _generation(archs: str, cards: str, fp8: str, fp4: str) -> Generation:
    auto = {"fp8_gemm_backend": ("decode", fp8), "fp4_gemm_backend": ("decode", fp4)}
    return Generation(archs=archs.split(), cards=cards, auto=auto)


_NO_FP4 = "its tensor cores have no FP4: codes quarter what is read, bf16 is what is multiplied"
_UNMEASURED = (
    'its FP8 units were not measured; in bf16 products of codes are exact; "cublaslt" asks for them'
)
_FP4_UNMEASURED = (
    "its FP4 units were not measured; codes quarter what is read, in bf16 their products are "
    'exact; "cublaslt" asks for the units'
)

#: For `qkv info`, and the reasons in Engine.info.
GENERATIONS: Sequence[Generation] = (
    _generation(
        "sm_80 sm_86 sm_87",
        "A100, A10, RTX 30",
        "its tensor cores have no FP8: codes halve what is read, bf16 is what is multiplied",
        _NO_FP4,
    ),
    _generation("sm_89", "L4, L40, RTX 40", _UNMEASURED, _NO_FP4),
    _generation(
        "sm_90",
        "H100, H200",
        "its FP8 units add up with fewer bits than fp32 has; in bf16 products of codes are exact; "
        '"cublaslt" asks for them',
        _NO_FP4,
    ),
    _generation("sm_100 sm_103 sm_110", "B200, B300", _UNMEASURED, _FP4_UNMEASURED),
    _generation("sm_120 sm_121", "RTX 50, GB10", _UNMEASURED, _FP4_UNMEASURED),
)

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
    products: Mapping[str, int]  # the core's: matrices by how they are multiplied
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

    def as_codes(self, option: str) -> int:
        """Of these, those whose codes cuBLASLt multiplies as they are."""
        paths = _KINDS[option].paths
        return sum(n for name, n in self.products.items() if name in paths)


@dataclass(frozen=True)
class _Kind:
    name: str
    codes: tuple[str, ...]  # of forms, and GGUF types
    targets: tuple[str, ...]  # how names of csrc/quant/quantize.h begin
    paths: tuple[str, ...]  # weight_path of backend.h


_KINDS = {
    "fp8_gemm_backend": _Kind(
        "FP8",
        ("e4m3",),
        ("fp8", "mxfp8"),
        ("cublaslt fp8", "cublaslt fp8 by 128", "cublaslt mxfp8"),
    ),
    "fp4_gemm_backend": _Kind(
        "FP4", ("table of 16", "MXFP4", "NVFP4"), ("mxfp4", "nvfp4"), ("cublaslt nvfp4",)
    ),
}


def check(option: str, value: Any, device: str) -> None:
    """UnsupportedError for a kernel of another engine or device, ValueError for what is none at
    all. Which GPU it is the engine knows when it is open."""
    here = ("auto", *BACKENDS[option])
    if value == "cublaslt" and value in here and not device.startswith("cuda"):
        raise _core.UnsupportedError(
            f"{option}={value!r}: of GPUs, with device={device!r} there is decode: pass that, or "
            "'auto'"
        )
    if value in here:
        return
    if value in ELSEWHERE[option]:
        raise _core.UnsupportedError(
            f"{option}={value!r}: those kernels are not in this build, which has "
            f"{', '.join(BACKENDS[option])}: pass that, or 'auto'"
        )
    raise ValueError(f"{option}={value!r}: must be one of {', '.join(here)}")


def _auto(option: str, isa: str) -> tuple[str, str]:
    """What "auto" takes on a device, and why."""
    for generation in GENERATIONS:
        if isa in generation.archs:
            name, why = generation.auto[option]
            return name, f"auto on {isa}: {why}"
    return "decode", "the one that this device has"


def chosen(option: str, asked: str, weights: Weights, isa: str) -> dict[str, Any]:
    """What is taken and why, for Engine.info. isa: of the device, as info has it."""
    count = weights.count(option)
    taken: str | None = None
    if count == 0:
        why = f"no weight is in {_KINDS[option].name}"
    elif weights.dequantized:
        why = "compute_dtype float32: weights are dequantized when they are loaded"
    else:
        taken, why = _auto(option, isa) if asked == "auto" else (asked, "asked for")
        why += f": {BACKENDS[option][taken]}"
    as_codes = weights.as_codes(option)
    if taken == "cublaslt" and as_codes < count:
        why += (
            "; some decode: experts, inputs in other codes, or kinds that this GPU and library "
            "have no product of"
        )
    return {"asked": asked, "taken": taken, "why": why, "matrices": count, "as_codes": as_codes}


def table() -> str:
    """What "auto" takes by generation of GPUs, for people."""
    lines = ['What "auto" takes on a GPU (built and emulated, not yet run on one):']
    for g in GENERATIONS:
        lines.append(f"  {', '.join(g.archs)} ({g.cards})")
        lines += [f"    {option}: {name}, {why}" for option, (name, why) in g.auto.items()]
    return "\n".join(lines)
