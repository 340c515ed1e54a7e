"""From any checkpoint that the engine loads to one with quantized weights that others load, too."""

import difflib
import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core, kv_scales, models, tables
from . import from_gguf
from .detection import Detected, detect
from .layouts import LAYOUTS, Bytes, Layout, Stored
from .methods import METHODS
from .section import read_json
from .shards import SHARD_BYTES, Piece, new_folder, write_file, write_json, write_shards
from .tensors import FLOATS
from .wire import to_core

#: Files of a model's folder that say nothing of weights.
_SIDE_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "chat_template.jinja", "chat_template.json", "LICENSE", "LICENSE.txt",
)  # fmt: skip
_SECTIONS = ("quantization_config", "compression_config", "quantization")
_KV_SCALE = re.compile(
    r".*\.(?:[kvq]|kv|prob|output)_(?:scale|zero_point|bias)(?:_inv)?$|.*[kv]_proj\.output_scale$"
)
#: Matrices of all experts in one tensor, as gpt-oss and MLX have them.
_STACKED = re.compile(r".*\.(?:experts|switch_mlp)\.\w+?(?:\.weight)?")
_MAX_SIDE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written."""

    folder: str
    quantization: str
    files: list[str]
    n_bytes: int
    n_quantized: int
    left: list[str] = field(default_factory=list)  # linear modules that stay as they are
    notes: list[str] = field(default_factory=list)


def names() -> list[str]:
    """What `quantization` may be."""
    return [
        name
        for name, method in METHODS.items()
        if method.target in LAYOUTS and not name.startswith("modelopt")  # a layout of its own
    ]


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    quantization: str,
    *,
    group_size: int | None = None,
    ignore: Sequence[str] = (),
    threads: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Writes the folder `out`: a compressed-tensors checkpoint, or for mlx_q4 and mlx_q8 an MLX
    one. It appears whole or not at all.

    group_size: for int4 and MLX. ignore: modules that stay as they are, by name, glob or "re:" and
    an expression. lm_head and the embedding stay, but for MLX; so do modules whose rows do not
    divide into groups. ValueError, OSError, CheckpointError, UnsupportedError."""
    layout = _layout(quantization, group_size)
    checkpoint = _core.Checkpoint(models.resolve(model))
    try:
        if checkpoint.left_out[0]:
            raise _core.UnsupportedError(
                f"{model}: a multimodal checkpoint ({checkpoint.left_out[1]}, ...) of which only "
                "the text part is read: it cannot be converted"
            )
        source = _Source(checkpoint, layout, quantization, ignore, threads)
        pieces = list(source.pieces())
        n_bytes = sum(piece.n_bytes for piece in pieces)
        config, side_files = source.config_json(), source.side_files()
        with new_folder(Path(out), n_bytes) as folder:
            files = write_shards(folder, pieces, mlx=layout.is_mlx, shard_bytes=shard_bytes)
            write_json(folder / "config.json", config)
            for name, content in side_files.items():
                write_file(folder / name, content)
        return Converted(
            folder=os.fspath(out),
            quantization=quantization,
            files=files,
            n_bytes=n_bytes,
            n_quantized=source.n_quantized,
            left=source.left,
            notes=source.notes,
        )
    finally:
        checkpoint.close()


def _layout(quantization: str, group_size: int | None) -> Layout:
    if quantization not in names():
        raise ValueError(f"quantization={quantization!r}: must be one of {', '.join(names())}")
    layout = LAYOUTS[METHODS[quantization].target]
    if group_size is None:
        return layout
    sizes = (32, 64, 128) if layout.is_mlx else (16, 32, 64, 128, 256)
    if not layout.takes_group:
        raise ValueError(f"group_size={group_size}: {quantization} has groups of its own")
    if group_size not in sizes:
        raise ValueError(f"group_size={group_size}: must be one of {', '.join(map(str, sizes))}")
    return layout.with_group(group_size)


class _Ignore:
    """What the user wants to stay as it is. lm_head stays by itself and may be named where a tied
    checkpoint has none."""

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
            raise TypeError(f"ignore={patterns!r:.100}: a list of strings is needed")
        try:
            self._regexes = {
                p: re.compile(p[3:] if p.startswith("re:") else fnmatch.translate(p))
                for p in patterns
            }
        except re.error as error:
            raise ValueError(f"ignore: {error}") from error
        self._unused = {pattern for pattern in patterns if pattern != "lm_head"}
        self._modules: list[str] = []

    def matches(self, module: str) -> bool:
        """Whether a module of the checkpoint stays."""
        last = module.rpartition(".")[2]
        found = {p for p, r in self._regexes.items() if r.match(module) or r.match(last)}
        self._unused -= found
        self._modules.append(module)
        return bool(found)

    def check(self) -> None:
        """ValueError if a pattern was none of the modules that were asked for."""
        if not self._unused:
            return
        pattern = min(self._unused)
        lasts = [module.rpartition(".")[2] for module in self._modules]
        names = list(dict.fromkeys([*self._modules, *lasts]))
        near = difflib.get_close_matches(pattern.removeprefix("re:"), names, 3, 0.4) or names[:3]
        raise ValueError(f"ignore={pattern!r}: no module of this name; there is {', '.join(near)}")


class _Source:
    """A checkpoint, as the tensors to write."""

    def __init__(
        self,
        checkpoint: _core.Checkpoint,
        layout: Layout,
        quantization: str,
        ignore: Sequence[str],
        threads: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._layout = layout
        self._target = METHODS[quantization].target.partition(":")[0]
        self._ignore = _Ignore(ignore)
        self._threads = threads
        self._gguf = checkpoint.container == "gguf"
        self._detected: Detected = detect(checkpoint)
        self._config = checkpoint.model_config()
        self._matrices, self._arrays = to_core(self._detected.matrices)
        self._stacked: list[str] = []
        self._kv_strategy = ""  # of the scales that are written for a declared FP8 cache
        self.n_quantized = 0
        self.left: list[str] = []
        self.notes = [*layout.notes]
        if self._detected.matrices or (self._gguf and self._is_quantized_gguf()):
            what = "GGUF blocks" if self._gguf else self._detected.method
            self.notes.append(
                f"the weights are in {what} and are rounded a second time: accuracy must be "
                "validated again"
            )
        n_scaled = sum("k_scale" in matrix for matrix in self._detected.matrices.values())
        if n_scaled:
            self.notes.append(
                f"the inputs of {n_scaled} matrices are scaled first (pre_quant_scale), which the "
                "written formats cannot say: the weights are multiplied by it instead"
            )
        self._ignored = {"lm_head"} if not layout.is_mlx else set()

    def _is_quantized_gguf(self) -> bool:
        return any(
            dtype not in FLOATS and len(shape) == 2
            for _, dtype, shape, _ in self._checkpoint.tensors()
        )

    # The tensors.

    def pieces(self) -> Iterator[Piece]:
        used = set(_named(self._detected.matrices))
        for weight in self._detected.matrices:
            if _STACKED.fullmatch(weight):
                raise _core.UnsupportedError(
                    f"{weight}: quantized experts in one tensor cannot be converted, the written "
                    "formats have them one by one"
                )
            yield self._matrix(weight, weight, "", self._detected.shapes[weight])
        for name, dtype, shape, _ in self._checkpoint.tensors():
            if name in used or (self._gguf and name == from_gguf.ROPE_FACTORS):
                continue
            if not _KV_SCALE.fullmatch(name):
                yield self._tensor(name, dtype, shape)
        if self._stacked:
            self.notes.append(
                f"{len(self._stacked)} tensors hold all experts of a layer and stay as they are, "
                "the written formats have experts one by one: " + tables.first(self._stacked)
            )
        self._ignore.check()
        yield from self._kv_scales()

    def _kv_scales(self) -> Iterator[Piece]:
        """The scales of K and V, which every layer must have, under compressed-tensors' names."""
        carried = self._checkpoint.kv_scales()
        found = {(layer, kind): values for layer, kind, _, values in carried if kind in ("k", "v")}
        wanted = [(layer, kind) for layer in range(self._config["n_layers"]) for kind in "kv"]
        if self._layout.is_mlx or any(place not in found for place in wanted):
            wanted = []
        left = len(carried) - len(wanted)
        if left > 0:
            self.notes.append(f"{left} scales of the KV cache are left out")
        for layer, kind in wanted:
            name = f"model.layers.{layer}.self_attn.{kind}_scale"
            yield _array(name, found[layer, kind])
        if wanted and kv_scales.declared(self._checkpoint.folder)[0] == "fp8_e4m3":
            by_head = any(len(found[place]) > 1 for place in wanted)
            self._kv_strategy = "attn_head" if by_head else "tensor"

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Piece:
        hub = from_gguf.hub_name(name, self._config) if self._gguf else name
        if len(shape) == 2 and hub.endswith(".weight"):
            return self._matrix(hub, name, dtype, (shape[0], shape[1]))
        if len(shape) == 3 and _STACKED.fullmatch(hub):
            self._stacked.append(hub)
            module = hub.removesuffix(".weight")
            self._ignore.matches(module)  # stays in any case, and may be named
            self._ignored.add(module.rpartition(".")[0])
        return self._plain(hub, name, dtype, shape)

    def _matrix(self, hub: str, name: str, dtype: str, shape: tuple[int, int]) -> Piece:
        module = hub.removesuffix(".weight")
        if not self._wants(module):
            if not module.endswith("embed_tokens"):  # no Linear, which is what the config targets
                self._ignored.add(module)
        elif not self._layout.fits(shape[1]):
            self._ignored.add(module)
            self.left.append(module)
        else:
            self.n_quantized += 1
            return self._quantized(module, name, shape)
        if name in self._detected.matrices:
            return _values(hub, shape, lambda: self._described(name, shape))
        return self._plain(hub, name, dtype, shape)

    def _described(self, name: str, shape: tuple[int, int]) -> Any:
        values = self._checkpoint.matrix(name, shape, self._matrices, self._arrays)
        scale = self._detected.matrices[name].get("k_scale")
        return values if scale is None else values * self._checkpoint.dequantize(scale["tensor"])

    def _wants(self, module: str) -> bool:
        last = module.rpartition(".")[2]
        if self._ignore.matches(module):
            return False
        if last in ("embed_tokens", "lm_head"):
            return self._layout.is_mlx
        return ".layers." in f".{module}." and last not in ("gate", "router")

    def _quantized(self, module: str, name: str, shape: tuple[int, int]) -> Piece:
        layout = self._layout

        def make() -> Sequence[Bytes]:
            found = self._checkpoint.quantize(
                name,
                shape,
                self._target,
                self._matrices,
                self._arrays,
                group=layout.group if layout.takes_group else 0,
                head_dim=self._head_dim(module),
                threads=self._threads,
            )
            return layout.arrays(found, *shape)

        return Piece(layout.tensors(module, *shape), make)

    def _plain(self, hub: str, name: str, dtype: str, shape: tuple[int, ...]) -> Piece:
        """As it is; what GGUF alone can store, and its order of rows, is not kept."""
        head_dim = self._head_dim(hub.rpartition(".")[0])
        plus_one = self._gguf and from_gguf.is_gemma(self._config) and len(shape) == 1
        if dtype in FLOATS and not head_dim and not plus_one:
            return Piece([Stored(hub, dtype, shape)], lambda: [self._checkpoint.bytes(name)])
        if not self._gguf:
            raise _core.UnsupportedError(f"{name}: {dtype} cannot be converted")

        def make() -> Any:
            values = self._checkpoint.dequantize(name)
            if plus_one:
                values = values - np.float32(1)
            return values[_rows(shape[0], head_dim)] if head_dim else values

        if len(shape) == 1:
            return Piece([Stored(hub, "F32", shape)], lambda: [_bytes(make())])
        return _values(hub, shape, make)

    def _head_dim(self, module: str) -> int:
        """Not 0: the rows of this module are in GGUF's order."""
        permuted = self._gguf and self._config["gguf_qk_permuted"]
        is_qk = module.rpartition(".")[2] in ("q_proj", "k_proj")
        return int(self._config["head_dim"]) if permuted and is_qk else 0

    # What lies beside them.

    def config_json(self) -> dict[str, Any]:
        if self._gguf:
            has_factors = any(t[0] == from_gguf.ROPE_FACTORS for t in self._checkpoint.tensors())
            factors = self._checkpoint.dequantize(from_gguf.ROPE_FACTORS) if has_factors else None
            found = from_gguf.config_json(self._config, self._checkpoint.metadata(), factors)
        else:
            given = read_json(Path(self._checkpoint.folder) / "config.json") or {}
            found = {key: value for key, value in given.items() if key not in _SECTIONS}
            if isinstance(inner := found.get("text_config"), Mapping):
                found["text_config"] = {k: v for k, v in inner.items() if k not in _SECTIONS}
            if self._checkpoint.further[0]:
                found["num_nextn_predict_layers"] = 0
        section = self._layout.config(sorted(self._ignored), self._kv_strategy)
        if self._layout.is_mlx:
            found["quantization"] = section
        found["quantization_config"] = section
        return found

    def side_files(self) -> dict[str, bytes]:
        if self._gguf:
            return from_gguf.tokenizer_files(self._checkpoint.metadata())
        folder = Path(self._checkpoint.folder)
        return {
            name: (folder / name).read_bytes()
            for name in _SIDE_FILES
            if (folder / name).is_file() and (folder / name).stat().st_size <= _MAX_SIDE_BYTES
        }


def _named(value: Any) -> Iterator[str]:
    """Every tensor that descriptions name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in ("tensor", "k_group") and isinstance(item, str):
                yield item
            elif key == "also":
                yield from item
            else:
                yield from _named(item)


def _values(hub: str, shape: tuple[int, ...], make: Callable[[], Any]) -> Piece:
    """A matrix of floats, rounded to bf16."""
    return Piece([Stored(hub, "BF16", shape)], lambda: [_core.quantize("BF16", _f32(make()))])


def _array(name: str, values: Any) -> Piece:
    return Piece([Stored(name, "F32", values.shape)], lambda: [_bytes(values)])


def _f32(values: Any) -> Any:
    return np.ascontiguousarray(values, np.float32)


def _bytes(values: Any) -> Bytes:
    found: Bytes = _f32(values).reshape(-1).view(np.uint8)
    return found


def _rows(n: int, head_dim: int) -> Any:
    return np.array([from_gguf.qk_row(i, head_dim) for i in range(n)])
