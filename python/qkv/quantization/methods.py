"""The names that `quantization=` takes, those of SGLang 0.5.22, and what each does here; and the
names that checkpoints carry."""

from collections.abc import Mapping
from dataclasses import dataclass

from .. import tables


@dataclass(frozen=True, kw_only=True)
class Method:
    name: str
    does: str  # in qkv
    reads: bool = False  # checkpoints of this method are loaded, without a flag
    makes: bool = False  # quantizes a 16-bit checkpoint while loading
    alias: tuple[str, ...] = ()  # of the methods that it names, too
    refused: str = ""  # why, and what to do instead

    @property
    def kind(self) -> str:
        if self.refused:
            return "refused"
        if self.reads:
            return "native, online" if self.makes else "native"
        if self.alias:
            return "alias, online" if self.makes else "alias"
        return "online"


_LIST = (
    Method(name="awq", reads=True, does="reads AWQ (gemm), any input dtype"),
    Method(
        name="fp8", reads=True, makes=True, does="reads FP8 by tensor, row or block; or makes it"
    ),
    Method(name="mxfp8", reads=True, makes=True, does="reads MXFP8; or makes it"),
    Method(name="gptq", reads=True, does="reads GPTQ: 2, 3, 4, 8 bits, desc_act, both versions"),
    Method(name="gptq_marlin", alias=("gptq",), does="reads GPTQ: one format, whatever the kernel"),
    Method(name="awq_marlin", alias=("awq",), does="reads AWQ: one format, whatever the kernel"),
    Method(name="bitsandbytes", reads=True, makes=True, does="reads nf4, fp4, int8; or makes nf4"),
    Method(name="gguf", reads=True, does="reads GGUF files"),
    Method(
        name="modelopt",
        reads=True,
        alias=("modelopt_fp8", "modelopt_fp4", "modelopt_mixed"),
        does="reads ModelOpt, as its quant_algo says",
    ),
    Method(name="modelopt_fp8", reads=True, makes=True, does="reads ModelOpt's FP8; or makes FP8"),
    Method(
        name="modelopt_fp4",
        reads=True,
        makes=True,
        does="reads ModelOpt's NVFP4; or makes NVFP4, from FP8 too",
    ),
    Method(name="nvfp4_online", makes=True, does="makes NVFP4 from 16 bits or FP8"),
    Method(name="modelopt_mixed", reads=True, does="reads ModelOpt's MIXED_PRECISION"),
    Method(
        name="petit_nvfp4",
        alias=("modelopt_fp4",),
        does="reads ModelOpt's NVFP4 with inputs in 16 bits",
    ),
    Method(name="w8a8_int8", reads=True, makes=True, does="reads int8 W8A8; or makes it"),
    Method(name="w8a8_fp8", reads=True, makes=True, does="reads FP8 W8A8; or makes it by row"),
    Method(name="moe_wna16", alias=("gptq", "awq"), does="reads GPTQ or AWQ"),
    Method(name="w4afp8", reads=True, does="reads int4 experts and FP8 blocks"),
    Method(name="mxfp4", reads=True, makes=True, does="reads gpt-oss' MXFP4; or makes MXFP4"),
    Method(name="auto-round", reads=True, does="reads AutoRound, all packings"),
    Method(name="auto-round-int8", alias=("w8a8_int8",), does="reads int8 W8A8"),
    Method(name="compressed-tensors", reads=True, does="reads compressed-tensors by its groups"),
    Method(
        name="modelslim",
        does="",
        refused="Ascend's own layout: use the 16-bit checkpoint, with quantization='w8a8_int8' if "
        "it shall be small",
    ),
    Method(name="mxfp_w4a8", makes=True, does="makes MXFP4 weights for MXFP8 inputs"),
    Method(name="quark", reads=True, does="reads Quark: FP8, int8, int4, MXFP4, NVFP4"),
    Method(name="quark_int4fp8_moe", makes=True, does="makes int4 weights for FP8 inputs"),
    Method(name="quark_mxfp4", makes=True, does="makes MXFP4, from FP8 and NVFP4 too"),
    Method(name="mlx_q4", makes=True, alias=("mlx",), does="reads MLX in 4 bits; or makes it"),
    Method(name="mlx_q8", makes=True, alias=("mlx",), does="reads MLX in 8 bits; or makes it"),
    Method(name="unquant", does="as None; and nothing is quantized while loading", alias=("",)),
    Method(
        name="humming",
        alias=("awq", "gptq", "fp8", "w4afp8", "compressed-tensors", "auto-round"),
        does="reads what the checkpoint is; there are no kernels of that name",
    ),
)

#: By name, in the order of SGLang's list.
METHODS: Mapping[str, Method] = {method.name: method for method in _LIST}

#: `quant_method` in a checkpoint -> the method; what is not here has its own name.
ON_DISK: Mapping[str, str] = {
    "auto_round": "auto-round",
    "autoround": "auto-round",
    "intel/auto-round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "fbgemm_fp8": "fp8",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
    "gptq_v2": "gptq",
    "modelopt_fp8": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "auto-round-int8": "w8a8_int8",
    "gpt_oss_mxfp4": "mxfp4",
    "bnb": "bitsandbytes",
}

_REQUANTIZE = "take the 16-bit checkpoint, or one in awq, gptq, compressed-tensors or GGUF"

#: Formats of checkpoints that are not read, and what to do instead.
REFUSED: Mapping[str, str] = {
    "hqq": f"HQQ keeps its codes in pickled or axis-0 layouts; {_REQUANTIZE}",
    "torchao": f"torchao keeps tensor subclasses, not tensors; {_REQUANTIZE}",
    "modelslim": METHODS["modelslim"].refused,
    "aqlm": f"additive codebooks; {_REQUANTIZE}",
    "vptq": f"vector codebooks; {_REQUANTIZE}",
    "quip": f"lattice codebooks; {_REQUANTIZE}",
    "exl2": f"ExLlamaV2's layout; {_REQUANTIZE}",
    "exl3": f"ExLlamaV3's layout; {_REQUANTIZE}",
    "higgs": f"grid codebooks; {_REQUANTIZE}",
    "spqr": f"sparse outliers; {_REQUANTIZE}",
    "eetq": f"weights are interleaved for one GPU kernel; {_REQUANTIZE}",
    "quanto": f"quanto keeps tensor subclasses, not tensors; {_REQUANTIZE}",
    "marlin": f"weights are permuted for one GPU kernel; {_REQUANTIZE}",
    "qqq": f"weights are permuted for one GPU kernel; {_REQUANTIZE}",
    "fp_quant": f"weights are rotated; {_REQUANTIZE}",
    "bitnet": "1.58-bit weights are read from GGUF files (TQ1_0, TQ2_0)",
}


def table() -> str:
    """Every name with what it does here."""
    rows = [(m.name, m.kind, m.refused or m.does) for m in METHODS.values()]
    return tables.text(("quantization", "kind", "what it does"), rows, left=3)
