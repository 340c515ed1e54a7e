"""The names that `quantization=` takes, those of SGLang 0.5.22 and some for targets without a name
there, and what each does here; and the names that checkpoints carry."""

from collections.abc import Mapping
from dataclasses import dataclass

from .. import tables


@dataclass(frozen=True, kw_only=True)
class Method:
    name: str
    kind: str  # "native", "native, online", "alias", "alias, online", "online", "none", "refused"
    does: str  # in qkv; of a refused one: why, and what to do instead
    alias: tuple[str, ...] = ()  # of the methods that it names, too

    @property
    def makes(self) -> bool:
        """Whether it quantizes a 16-bit checkpoint while loading."""
        return "online" in self.kind

    @property
    def target(self) -> str:
        """What it quantizes to, a name of csrc/quant/quantize.h, and after a colon how products
        then quantize their input; "" if it makes nothing."""
        return _TARGETS.get(self.name, self.name) if self.makes else ""


_NATIVE, _BOTH, _ALIAS, _ONLINE = "native", "native, online", "alias", "online"

_LIST = (
    Method(name="awq", kind=_NATIVE, does="reads AWQ (gemm), any input dtype"),
    Method(name="fp8", kind=_BOTH, does="reads FP8 by tensor, row or block; or makes it"),
    Method(name="mxfp8", kind=_BOTH, does="reads MXFP8; or makes it"),
    Method(name="gptq", kind=_NATIVE, does="reads GPTQ: 2, 3, 4, 8 bits, desc_act, both versions"),
    Method(name="gptq_marlin", kind=_ALIAS, alias=("gptq",), does="reads GPTQ: one format here"),
    Method(name="awq_marlin", kind=_ALIAS, alias=("awq",), does="reads AWQ: one format here"),
    Method(name="bitsandbytes", kind=_BOTH, does="reads nf4, fp4, int8; or makes nf4"),
    Method(name="gguf", kind=_NATIVE, does="reads GGUF files"),
    Method(
        name="modelopt",
        kind=_NATIVE,
        alias=("modelopt_fp8", "modelopt_fp4", "modelopt_mixed"),
        does="reads ModelOpt, as its quant_algo says",
    ),
    Method(name="modelopt_fp8", kind=_BOTH, does="reads ModelOpt's FP8; or makes FP8"),
    Method(name="modelopt_fp4", kind=_BOTH, does="reads ModelOpt's NVFP4; or makes NVFP4"),
    Method(name="nvfp4_online", kind=_ONLINE, does="makes NVFP4 from 16 bits or FP8"),
    Method(name="modelopt_mixed", kind=_NATIVE, does="reads ModelOpt's MIXED_PRECISION"),
    Method(
        name="petit_nvfp4",
        kind=_ALIAS,
        alias=("modelopt_fp4",),
        does="reads ModelOpt's NVFP4, inputs in 16 bits",
    ),
    Method(name="w8a8_int8", kind=_BOTH, does="reads int8 W8A8; or makes it"),
    Method(name="w8a8_fp8", kind=_BOTH, does="reads FP8 W8A8; or makes it by row"),
    Method(name="moe_wna16", kind=_ALIAS, alias=("gptq", "awq"), does="reads GPTQ or AWQ"),
    Method(name="w4afp8", kind=_NATIVE, does="reads int4 experts and FP8 blocks"),
    Method(name="mxfp4", kind=_BOTH, does="reads gpt-oss' MXFP4; or makes MXFP4"),
    Method(name="auto-round", kind=_NATIVE, does="reads AutoRound, all packings"),
    Method(name="auto-round-int8", kind=_ALIAS, alias=("w8a8_int8",), does="reads int8 W8A8"),
    Method(name="compressed-tensors", kind=_NATIVE, does="reads compressed-tensors by its groups"),
    Method(
        name="modelslim",
        kind="refused",
        does="Ascend's own layout: use the 16-bit checkpoint, with quantization='w8a8_int8' if it "
        "shall be small",
    ),
    Method(name="mxfp_w4a8", kind=_ONLINE, does="makes MXFP4 weights for MXFP8 inputs"),
    Method(name="quark", kind=_NATIVE, does="reads Quark: FP8, int8, int4, MXFP4, NVFP4"),
    Method(name="quark_int4fp8_moe", kind=_ONLINE, does="makes int4 weights for FP8 inputs"),
    Method(name="quark_mxfp4", kind=_ONLINE, does="makes MXFP4, from FP8 and NVFP4 too"),
    Method(
        name="mlx_q4", kind="alias, online", alias=("mlx",), does="reads MLX of 4 bits; or makes it"
    ),
    Method(
        name="mlx_q8", kind="alias, online", alias=("mlx",), does="reads MLX of 8 bits; or makes it"
    ),
    Method(name="unquant", kind="none", does="as None; nothing is quantized while loading"),
    Method(
        name="humming",
        kind=_ALIAS,
        does="reads what the checkpoint is (but mxfp4); there are no kernels of that name",
    ),
)

_OWN = (
    Method(name="fp8_channel", kind=_ONLINE, does="makes FP8 by row, as w8a8_fp8"),
    Method(name="fp8_block", kind=_ONLINE, does="makes FP8 by blocks of 128 x 128"),
    Method(name="nvfp4", kind=_ONLINE, does="makes NVFP4, as nvfp4_online"),
    Method(name="int8", kind=_ONLINE, does="makes int8 by row; inputs stay in 16 bits"),
    Method(name="int4", kind=_ONLINE, does="makes int4 in groups of 128; inputs in 16 bits"),
)

# Where the name alone does not say it: mxfp4, int8, int4 and MLX leave inputs in 16 bits.
_TARGETS = {
    "fp8": "fp8:fp8",
    "fp8_channel": "fp8_channel:fp8",
    "fp8_block": "fp8_block:fp8_group",
    "mxfp8": "mxfp8:mxfp8",
    "modelopt_fp8": "fp8:fp8",
    "modelopt_fp4": "nvfp4:nvfp4",
    "nvfp4": "nvfp4:nvfp4",
    "nvfp4_online": "nvfp4:nvfp4",
    "w8a8_int8": "int8:int8",
    "w8a8_fp8": "fp8_channel:fp8",
    "mxfp_w4a8": "mxfp4:mxfp8",
    "quark_int4fp8_moe": "int4:fp8",
    "quark_mxfp4": "mxfp4:mxfp4",
    "bitsandbytes": "nf4",
}

#: By name, in the order of SGLang's list; then our own.
METHODS: Mapping[str, Method] = {method.name: method for method in (*_LIST, *_OWN)}

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
    "modelslim": METHODS["modelslim"].does,
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
    rows = [(m.name, m.kind, m.does) for m in METHODS.values()]
    return tables.text(("quantization", "kind", "what it does"), rows, left=3)
