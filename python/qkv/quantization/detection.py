"""From a checkpoint's folder to the descriptions of its matrices.

The configuration says what there is, and the tensors must agree: what one claims and the other
contradicts is an error that names both. Whether a module is quantized is decided by its tensors; an
ignore list that says otherwise is a note, since lists are often wrong and tensors cannot be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core, tables
from . import mlx, modelopt
from .auto_round import AutoRoundReader
from .awq import AwqReader
from .bitsandbytes import BitsandbytesReader
from .compressed_tensors import CompressedTensorsReader
from .fp8 import (
    BlockInt8Reader,
    Fp8Reader,
    Mxfp8Reader,
    W4afp8Reader,
    W8a8Fp8Reader,
    W8a8Reader,
)
from .gptq import GptqReader
from .matrix import Matrix
from .methods import METHODS, ON_DISK, REFUSED
from .mxfp4 import Mxfp4Reader
from .quark import QuarkReader
from .reader import Reader
from .section import Section, read_json
from .tensors import FLOATS, Module, Tensors

_READERS: Mapping[str, Callable[[Section, Tensors, list[str]], Reader]] = {
    "awq": AwqReader,
    "gptq": GptqReader,
    "fp8": Fp8Reader,
    "mxfp8": Mxfp8Reader,
    "w8a8_int8": W8a8Reader,
    "w8a8_fp8": W8a8Fp8Reader,
    "blockwise_int8": BlockInt8Reader,
    "w4afp8": W4afp8Reader,
    "mxfp4": Mxfp4Reader,
    "bitsandbytes": BitsandbytesReader,
    "mlx": mlx.MlxReader,
    "auto-round": AutoRoundReader,
    "compressed-tensors": CompressedTensorsReader,
    "modelopt": modelopt.ModelOptReader,
    "quark": QuarkReader,
}

#: Methods that need no configuration: the tensors say everything.
_BARE = ("fp8", "mxfp8", "w8a8_int8", "w8a8_fp8", "mxfp4", "bitsandbytes")

#: Names of files that hold the section where config.json has none, and the method they imply.
_SIDE_FILES = (
    ("hf_quant_config.json", "modelopt"),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
    ("quantization_config.json", ""),
)

_AGAIN = "the weights are rounded a second time: accuracy must be validated again"


@dataclass(frozen=True, kw_only=True)
class Detected:
    """What a checkpoint's weights are. `method` is "" where they are plain floats."""

    method: str
    source: str  # which file and key say so
    matrices: dict[str, dict[str, Any]] = field(default_factory=dict)  # weight -> description
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each of these
    taken: frozenset[str] = frozenset()  # the tensors that they are made of
    ignored: dict[str, str] = field(default_factory=dict)  # module -> what excludes it
    notes: list[str] = field(default_factory=list)  # what a user should know
    online: str | None = None  # the method to quantize with while loading


@dataclass(frozen=True)
class _Source:
    method: str  # a key of _READERS; "" if weights are plain
    name: str  # as `quantization=` has it
    section: Section
    where: str


def detect(checkpoint: _core.Checkpoint, quantization: str | None = None) -> Detected:
    """What the weights are, checked. `quantization`: a name of METHODS that must agree with it, or
    that of a method to quantize with.

    CheckpointError: configuration and tensors contradict each other, or a tensor is missing, left
    over, misshapen or no number. UnsupportedError: a format or a combination that is not supported;
    the message has the way out. ValueError: no such method."""
    if quantization is not None and quantization not in METHODS:
        raise ValueError(f"quantization={quantization!r}: must be one of {', '.join(METHODS)}")
    if quantization is not None and METHODS[quantization].kind == "refused":
        raise _core.UnsupportedError(f"quantization={quantization!r}: {METHODS[quantization].does}")
    if checkpoint.container == "gguf":
        return _gguf(checkpoint, quantization)
    tensors = Tensors(checkpoint)
    source = _find(Path(checkpoint.folder), tensors, quantization)
    if source is None:
        _refuse_leftovers(tensors, set(), "config.json says nothing of quantization")
        return _plain(quantization, "config.json has no quantization_config")
    found = _read(source, tensors)
    return _agree(found, source, quantization)


# Where it stands.


def _find(folder: Path, tensors: Tensors, quantization: str | None) -> _Source | None:
    if (folder / "quant_model_description.json").exists():
        raise _refusal("modelslim", "quant_model_description.json")
    config = read_json(folder / "config.json") or {}
    for outer in (config, config.get("text_config")):
        if not isinstance(outer, Mapping):
            continue
        for key in ("quantization_config", "compression_config", "quantization"):
            if outer.get(key) is not None:
                section = Section(outer, "config.json").section(key)
                if section.data:
                    return _source(section, f"config.json: {key}", _implied(section, key, tensors))
    for file_name, implied in _SIDE_FILES:
        content = read_json(folder / file_name)
        if content is not None:
            section = Section(content, file_name)
            return _source(section, file_name, _implied(section, "", tensors) or implied)
    return _by_tensors(tensors, quantization, config.get("hidden_size"))


def _implied(section: Section, key: str, tensors: Tensors) -> str:
    """The method of a section that does not name one."""
    data = modelopt.layout(section).data
    if "quant_algo" in data or "kv_cache_quant_algo" in data:
        return "modelopt"
    if "config_groups" in data or key == "compression_config":
        return "compressed-tensors"
    if "packing_format" in data:
        return "auto-round"
    if any(mlx.looks_like(tensors, module) for module in tensors.modules):
        return "mlx"
    return "mlx" if key == "quantization" else ""


def _source(section: Section, where: str, implied: str) -> _Source:
    named = section.text("quant_method")
    if named is None and section.has("quantization"):
        named = modelopt.layout(section).text("quant_method")
    if named is None and isinstance(section.data.get("producer"), Mapping):
        named = section.section("producer").text("name")
    method = ON_DISK.get((named or implied).lower(), (named or implied).lower())
    if not method:
        raise _core.CheckpointError(
            f"{where}: quant_method is missing, and nothing else says what it is"
        )
    if method not in _READERS:
        raise _refusal(method, where)
    name = modelopt.method_name(section) if method == "modelopt" else method
    return _Source(method, name, section, where)


def _refusal(method: str, where: str) -> _core.UnsupportedError:
    instead = REFUSED.get(method)
    if instead is None:
        instead = f"it is not known; known are {', '.join(_READERS)}"
    return _core.UnsupportedError(
        f"{where}: quant_method {method[:40]!r} is not supported: {instead}"
    )


def _by_tensors(tensors: Tensors, quantization: str | None, hidden: object) -> _Source | None:
    """Without a word in the configuration: MLX's tensors are nobody else's; and a name that the
    user gives, if tensors are quantized at all."""
    found = [module for module in tensors.modules if mlx.looks_like(tensors, module)]
    if found:
        section = Section(mlx.settings_of(tensors, found, hidden), "the tensors")
        return _Source("mlx", "mlx", section, f"the tensors ({found[0].weight})")
    if quantization in _BARE and not all(tensors.is_plain(module) for module in tensors.modules):
        section = Section({}, f"quantization={quantization!r}")
        return _Source(quantization, quantization, section, section.where)
    return None


# What it says, against the tensors.


def _read(source: _Source, tensors: Tensors) -> Detected:
    notes: list[str] = []
    reader = _READERS[source.method](source.section, tensors, notes)
    matrices: dict[str, dict[str, Any]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    ignored: dict[str, str] = {}
    used: set[str] = set()
    plain: list[str] = []
    stored_although: list[str] = []
    for module in tensors.modules:
        why = reader.excluded(module.name)
        found = None if tensors.is_plain(module) else reader.matrix(module)
        if found is None:
            if why is not None:
                ignored[module.name] = why
            elif _is_linear(tensors, module):
                plain.append(module.name)
            continue
        if why is not None:
            stored_although.append(module.name)
        _check(found, tensors)
        used.update(found.tensors())
        matrices[module.weight] = found.to_dict()
        shapes[module.weight] = found.shape
    if not matrices and plain and reader.claims:
        raise _core.CheckpointError(
            f"{source.where} says {source.name}, but no tensor is quantized: "
            f"{tensors.describe(plain[0] + '.weight')}. Remove the section if that is right"
        )
    _refuse_leftovers(tensors, used, f"{source.where} says {source.name}")
    _note_some(notes, plain, "not quantized although not excluded")
    _note_some(notes, stored_although, "quantized although excluded, and read so")
    return Detected(
        method=source.name if matrices or reader.claims else "",
        source=source.where,
        matrices=matrices,
        shapes=shapes,
        taken=frozenset(used),
        ignored=ignored,
        notes=notes,
    )


def _is_linear(tensors: Tensors, module: Module) -> bool:
    """A projection inside a layer. Embeddings, heads and routers are left alone without a word."""
    parts = module.name.split(".")
    return (
        module.has("weight")
        and len(tensors.shape(module.parts["weight"])) == 2
        and "layers" in parts
        and parts[-1] not in ("gate", "router", "embed_tokens", "lm_head")
    )


def _note_some(notes: list[str], modules: list[str], what: str) -> None:
    if modules:
        notes.append(f"{len(modules)} modules are {what}: {tables.first(modules)}")


def _check(matrix: Matrix, tensors: Tensors) -> None:
    """Every scale is a number."""
    for array in matrix.arrays():
        if array.tensor is not None:
            tensors.check_finite(array.tensor, array.format)
        elif array.values is not None and not np.isfinite(array.values).all():
            raise _core.CheckpointError(
                f"{matrix.codes.tensor}: a scale is not a finite number: the file is damaged"
            )


def _refuse_leftovers(tensors: Tensors, used: set[str], said: str) -> None:
    """A tensor of a quantized weight that no description has taken, and a weight that is not in
    floats: read as they are, they would be wrong."""
    for module in tensors.modules:
        for part, name in module.parts.items():
            if (
                name in used
                or part == "bias"
                or (part == "weight" and tensors.dtype(name) in FLOATS)
            ):
                continue
            if part == "weight":
                raise _core.CheckpointError(
                    f"{tensors.describe(name)}, but nothing says how to read it: {said}"
                )
            raise _core.CheckpointError(
                f"{tensors.describe(name)} is left over: {said}, which has no use for it beside "
                f"{_beside(tensors, module)}. Pass quantization= if the configuration is wrong"
            )


def _beside(tensors: Tensors, module: Module) -> str:
    for part in ("weight", "qweight", "weight_packed"):
        if module.has(part):
            return tensors.describe(module.parts[part])
    return "no weight at all"


# What the user says.


def _plain(quantization: str | None, source: str) -> Detected:
    if quantization in (None, "unquant"):
        return Detected(method="", source=source)
    if METHODS[quantization or ""].makes:
        return Detected(method="", source=source, online=quantization)
    makers = ", ".join(name for name, method in METHODS.items() if method.makes)
    raise _core.UnsupportedError(
        f"quantization={quantization!r}, but the weights are not quantized ({source}), and "
        f"{quantization} is only read, not made: leave it out, or take one of {makers}"
    )


def _gguf(checkpoint: _core.Checkpoint, quantization: str | None) -> Detected:
    source = "a GGUF file"
    if quantization in (None, "gguf", "unquant"):
        return Detected(method="gguf", source=source)
    if all(dtype in FLOATS for _, dtype, _, _ in checkpoint.tensors()):
        return _plain(quantization, f"{source} of floats")
    raise _mismatch(str(quantization), "gguf", source)


def _mismatch(quantization: str, name: str, where: str) -> _core.UnsupportedError:
    return _core.UnsupportedError(
        f"quantization={quantization!r}, but the checkpoint is {name} ({where}): leave "
        f"quantization out, or take a checkpoint in {quantization} or in 16 bits"
    )


def _agree(found: Detected, source: _Source, quantization: str | None) -> Detected:
    """The user's name against what was found."""
    name = source.name
    if quantization is None or quantization == name:
        return found
    if quantization == "unquant":
        note = f"unquant: the checkpoint is {name} and is read so; nothing more is quantized"
        return _with(found, notes=[*found.notes, note])
    if not found.method:  # the cache alone is quantized
        return _with(found, online=_plain(quantization, source.where).online)
    if quantization == "modelopt" and source.method == "modelopt":
        return found
    if quantization == "humming" and name != "mxfp4":
        note = "humming: there are no kernels of that name here; the checkpoint decides"
        return _with(found, notes=[*found.notes, note])
    if quantization == "petit_nvfp4" and name == "modelopt_fp4":
        matrices = {
            key: {k: v for k, v in m.items() if k != "input"} for key, m in found.matrices.items()
        }
        return _with(
            found, matrices=matrices, notes=[*found.notes, "petit_nvfp4: inputs in 16 bits"]
        )
    if name in METHODS[quantization].alias:
        return _aliased(found, source, quantization)
    if source.method == "compressed-tensors" and quantization in _CT_CODES:
        return _flat(found, source, quantization)
    if name in _REQUANTIZED.get(quantization, ()):
        note = f"{quantization} is made of the {name} checkpoint; {_AGAIN}"
        return _with(found, online=quantization, notes=[*found.notes, note])
    raise _mismatch(quantization, name, source.where)


#: What a flat method takes of compressed-tensors: the kinds of codes.
_CT_CODES: Mapping[str, tuple[str, ...]] = {
    "w8a8_int8": ("signed",),
    "auto-round-int8": ("signed",),
    "w8a8_fp8": ("e4m3", "e5m2"),
}

#: Methods that are made of checkpoints which are quantized already.
_REQUANTIZED: Mapping[str, tuple[str, ...]] = {
    "nvfp4_online": ("fp8", "modelopt_fp8"),
    "nvfp4": ("fp8", "modelopt_fp8"),
    "int4": ("fp8", "modelopt_fp8"),
    "modelopt_fp4": ("fp8",),
    "quark_mxfp4": ("fp8", "modelopt_fp8", "modelopt_fp4"),
}


def _with(found: Detected, **changes: Any) -> Detected:
    return Detected(**{**vars(found), **changes})


def _aliased(found: Detected, source: _Source, quantization: str) -> Detected:
    """mlx_q4 and mlx_q8 must be of that many bits; for the others the name is all."""
    bits = {"mlx_q4": 4, "mlx_q8": 8}.get(quantization)
    stored = {m["codes"]["bits"] for m in found.matrices.values()}
    if bits is not None and bits not in stored:
        have = " and ".join(str(n) for n in sorted(stored))
        raise _mismatch(quantization, f"{source.name} of {have} bits", source.where)
    return found


def _flat(found: Detected, source: _Source, quantization: str) -> Detected:
    for weight, matrix in found.matrices.items():
        if (
            matrix["codes"]["meaning"] not in _CT_CODES[quantization]
            or matrix["codes"]["bits"] != 8
        ):
            raise _mismatch(
                quantization,
                f"{source.name} with {weight} in {matrix['codes']['bits']}-bit codes "
                f"({matrix['codes']['meaning']})",
                source.where,
            )
    return found
