"""AutoRound: GPTQ's or AWQ's packing, MLX's, or compressed-tensors' for floats; settings by layer
in `extra_config`."""

from .awq import read as read_awq
from .compressed_tensors import CompressedTensorsReader
from .fp8 import Fp8Reader
from .gptq import read as read_gptq
from .matrix import Matrix
from .mlx import MlxReader
from .names import compile_pattern
from .reader import Reader
from .section import Section
from .tensors import Module, Tensors

#: packing_format -> what is added to stored zero points. Without a suffix they are as they are.
_GPTQ = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_FP8 = ("auto_round:fp8_static", "auto_round:fp8")


class AutoRoundReader(Reader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        self._packing = section.text("packing_format") or "auto_round:auto_gptq"
        self._other: Reader | None = None
        if self._packing == "mlx":
            self._other = MlxReader(section, tensors, notes)
        elif self._packing in _FP8:
            self._other = Fp8Reader(section, tensors, notes)
        elif self._packing == "auto_round:llm_compressor":
            self._other = CompressedTensorsReader(_as_groups(section), tensors, notes)
        elif self._packing not in (*_GPTQ, *_AWQ):
            known = ", ".join((*_GPTQ, *_AWQ, *_FP8, "auto_round:llm_compressor", "mlx"))
            raise section.refuse(
                f"packing_format {self._packing!r:.60} is not supported ({known} are): export the "
                "model again in one of these"
            )
        extra = section.section("extra_config")
        self._extra = extra.sections()
        self._regexes = [(compile_pattern(extra, name), name) for name in self._extra]

    def _own(self, module: str) -> Section | None:
        """The entry of extra_config that means the module: its name, else an expression."""
        if module in self._extra:
            return self._extra[module]
        for regex, name in self._regexes:
            if regex.match(module):
                return self._extra[name]
        return None

    def excluded(self, module: str) -> str | None:
        own = self._own(module)
        bits = None if own is None else own.integer("bits")
        if own is not None and bits is not None and bits >= 16:
            return own.where
        return None if self._other is None else self._other.excluded(module)

    def matrix(self, module: Module) -> Matrix | None:
        if self._other is not None:
            return self._other.matrix(module)
        if not module.has("qweight"):
            return None
        own = self._own(module.name)
        settings = self.section if own is None else own.over(self.section)
        if self._packing in _GPTQ:
            return read_gptq(self, module, settings, _GPTQ[self._packing])
        return read_awq(self, module, settings)


def _as_groups(section: Section) -> Section:
    """AutoRound's flat settings as compressed-tensors has them."""
    if section.has("config_groups"):
        return section
    bits, group = section.integer("bits"), section.integer("group_size")
    data_type = section.text("data_type") or "int"
    kind = "int" if data_type.startswith("int") else "float"
    strategy = "channel" if group in (None, -1) else "group"
    if kind == "float" and group == 16:
        strategy = "tensor_group"
    inputs = None
    act_bits = section.integer("act_bits")
    if act_bits is not None and act_bits < 16:
        inputs = {
            "num_bits": act_bits,
            "type": kind,
            "strategy": "token" if group in (None, -1) else strategy,
            "group_size": section.integer("act_group_size") or group,
            "dynamic": "local" if strategy == "tensor_group" else True,
        }
    weights = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "group_size": group,
        "symmetric": section.flag("sym") is not False,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return Section(
        {"config_groups": groups, "ignore": list(section.names("ignore"))}, section.where
    )
