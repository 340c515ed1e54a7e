"""The side file with scales of the KV cache (quantization_param_path), read strictly and written.

The side file has SGLang's schema, {"model_type": ..., "kv_cache": {"dtype": "float8_e4m3fn",
"scaling_factor": {"0": {"0": 1.5, ...}}}}: one number per layer for both. Here a layer's value may
also be {"k": x, "v": y}, where x and y are a number or a list with one for each KV head.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core

Values = NDArray[np.float32]

# The side file's names of the formats: torch's, and our own for what torch has none.
_FILE_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "nvfp4": "nvfp4"}
_DTYPE_NAMES = {kv: name for name, kv in _FILE_DTYPES.items()}

# Far above any file's: a thousand layers of a thousand heads would take 48 MB.
_MAX_FILE_BYTES = 64 << 20

# As the engine takes scales: float32.
_SMALLEST, _LARGEST = (
    float(np.finfo(np.float32).smallest_subnormal),
    float(np.finfo(np.float32).max),
)


@dataclass(frozen=True, kw_only=True)
class SideFile:
    """Scales as they stand in a file."""

    name: str  # of the file, as messages give it
    kv_dtype: str
    model_type: str | None
    layers: tuple[tuple[Values, Values], ...]  # K and V: [1] or [n_kv_heads]
    calibration: Mapping[str, Any] = field(default_factory=dict)  # how calibrate() made it

    @property
    def source(self) -> str:
        return f"calibrated, {self.name}" if self.calibration else f"file {self.name}"

    def to_json(self) -> dict[str, Any]:
        """The file's content: SGLang's schema where K and V agree in every layer, else ours."""
        return file_content(self.kv_dtype, self.layers, self.model_type, self.calibration)


def file_content(
    kv_dtype: str,
    layers: Sequence[tuple[Values, Values]],
    model_type: str | None,
    calibration: Mapping[str, Any],
) -> dict[str, Any]:
    """A layer is one number where K and V have the same, else {"k": ..., "v": ...}."""

    def plain(values: Values) -> float | list[float]:
        return float(values[0]) if len(values) == 1 else [float(v) for v in values]

    factors: dict[str, Any] = {}
    for layer, (k, v) in enumerate(layers):
        shared = len(k) == len(v) == 1 and k[0] == v[0]
        factors[str(layer)] = plain(k) if shared else {"k": plain(k), "v": plain(v)}
    content: dict[str, Any] = {
        "model_type": model_type,
        "kv_cache": {"dtype": _DTYPE_NAMES[kv_dtype], "scaling_factor": {"0": factors}},
    }
    if calibration:
        content["calibration"] = dict(calibration)
    return content


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands there twice")
    return found


class _Reader:
    """Reads a side file strictly: each complaint names the file and the place."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path

    def fail(self, text: str) -> _core.CheckpointError:
        return _core.CheckpointError(f"{self._path}: {text}")

    def content(self) -> Mapping[str, Any]:
        try:
            n_bytes = self._path.stat().st_size
            if n_bytes > _MAX_FILE_BYTES:
                raise self.fail(f"{n_bytes} bytes, a file of scales has at most {_MAX_FILE_BYTES}")
            text = self._path.read_text(encoding="utf-8")
            content = json.loads(text, object_pairs_hook=_no_duplicates)
        except (OSError, ValueError, RecursionError) as error:
            raise self.fail(f"not readable as JSON: {error}") from error
        return self.mapping(content, "the file")

    def mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.fail(f"{where} is {type(value).__name__}, must be an object")
        return value

    def need(self, value: Mapping[str, Any], key: str, where: str) -> Any:
        if key not in value:
            raise self.fail(f"{where} has no {key!r}")
        return value[key]

    def only(self, value: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
        for key in value:
            if key not in keys:
                raise self.fail(f"{where} has {key!r}, known are {', '.join(keys)}")

    def number(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(f"{where} is {value!r:.40}, must be a number")
        if not _SMALLEST <= value <= _LARGEST:
            raise self.fail(f"{where} is {value!r:.40}, must be positive and finite in float32")
        return float(value)

    def values(self, value: Any, n_kv_heads: int, where: str) -> Values:
        if not isinstance(value, list):
            return np.array([self.number(value, where)], np.float32)
        if len(value) != n_kv_heads:
            raise self.fail(f"{where} has {len(value)} values, the model has {n_kv_heads} KV heads")
        numbers = [self.number(one, f"{where}, head {i}") for i, one in enumerate(value)]
        return np.array(numbers, np.float32)

    def layer(self, value: Any, n_kv_heads: int, where: str) -> tuple[Values, Values]:
        if not isinstance(value, Mapping):
            if isinstance(value, list):
                raise self.fail(f"{where} is a list: per head, it must be {{'k': ..., 'v': ...}}")
            both = self.values(value, n_kv_heads, where)
            return both, both
        self.only(value, ("k", "v"), where)
        k = self.values(self.need(value, "k", where), n_kv_heads, f"{where}, K")
        return k, self.values(self.need(value, "v", where), n_kv_heads, f"{where}, V")

    def layers(
        self, factors: Mapping[str, Any], n_layers: int, n_kv_heads: int
    ) -> tuple[tuple[Values, Values], ...]:
        known = {str(layer) for layer in range(n_layers)}
        for key in factors:
            if key not in known:
                raise self.fail(f"layer {key!r}: the model has layers 0 to {n_layers - 1}")
        for layer in range(n_layers):
            if str(layer) not in factors:
                raise self.fail(
                    f"layer {layer} is missing ({len(factors)} of {n_layers} are there)"
                )
        return tuple(self.layer(factors[str(i)], n_kv_heads, f"layer {i}") for i in range(n_layers))


def read_side_file(
    path: str | os.PathLike[str],
    *,
    n_layers: int,
    n_kv_heads: int,
    model_types: Sequence[str] = (),
) -> SideFile:
    """Reads and checks a side file; CheckpointError names what is wrong. `model_types`: the names
    of the model, one of which the file's must be (null fits any)."""
    reader = _Reader(Path(path))
    content = reader.content()
    model_type = reader.need(content, "model_type", "the file")
    if model_type is not None and (
        not isinstance(model_type, str) or model_type not in model_types
    ):
        names = " or ".join(repr(name) for name in model_types) or "not known"
        raise reader.fail(f"model_type is {model_type!r:.60}, the model's is {names}")
    cache = reader.mapping(reader.need(content, "kv_cache", "the file"), "kv_cache")
    reader.only(cache, ("dtype", "scaling_factor"), "kv_cache")
    dtype = reader.need(cache, "dtype", "kv_cache")
    if not isinstance(dtype, str) or dtype not in _FILE_DTYPES:
        raise reader.fail(f"kv_cache dtype is {dtype!r:.60}, known are {', '.join(_FILE_DTYPES)}")
    ranks = reader.need(cache, "scaling_factor", "kv_cache")
    ranks = reader.mapping(ranks, "scaling_factor")
    if list(ranks) != ["0"]:
        raise reader.fail(
            f"scaling_factor has the ranks {', '.join(ranks) or 'of none'}: one rank, '0', is used "
            "here (a file for tensor parallelism holds parts of layers)"
        )
    factors = reader.mapping(ranks["0"], "scaling_factor rank 0")
    calibration = content.get("calibration")
    return SideFile(
        name=reader.name,
        kv_dtype=_FILE_DTYPES[dtype],
        model_type=model_type,
        layers=reader.layers(factors, n_layers, n_kv_heads),
        calibration=calibration if isinstance(calibration, Mapping) else {},
    )
