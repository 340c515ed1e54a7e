"""Scales of the KV cache: read, resolved by precedence, and listed with their source.

A scale is one number per layer for K and one for V, or one per head. It is taken from the side file
(quantization_param_path), else from the checkpoint, else it is 1.0, with a warning. Every scale
that was found and is not applied stands in the list with the reason.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from . import _core, options, tables
from .kv_scales_file import SideFile, Values

#: Formats with a scale per layer, and the largest magnitude that they hold at scale 1. nvfp4's is
#: its global scale: 6 (e2m1) times the largest block scale.
LIMITS = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "nvfp4": 6.0 * 448.0}

#: Why a cache in another format has none.
_UNSCALED = {
    "bf16": "bf16 cache",
    "bf16_stochastic": "bf16 cache",
    "float32": "float32 cache",
    "mxfp8": "block exponents only",
    "fp4_mx_block16": "block exponents only",
    "fp8_ds_mla": "block scales only",
}

_log = logging.getLogger("qkv")


# What the checkpoint says.

Carried = list[tuple[int, str, str, Values]]  # Checkpoint.kv_scales()


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _scheme(scheme: Any) -> str:
    """compressed-tensors' kv_cache_scheme as a format; "" if there is none such here."""
    if isinstance(scheme, Mapping) and scheme.get("type") == "float":
        return "fp8_e4m3" if scheme.get("num_bits") == 8 else ""
    return "fp8_e4m3" if scheme == "static" else ""


def _quark(entries: Mapping[str, Any]) -> str:
    dtypes = {_section(_section(entries, key), "output_tensors").get("dtype") for key in entries}
    return "fp8_e4m3" if dtypes == {"fp8_e4m3"} else ""


def declared(folder: str) -> tuple[str, str]:
    """The KV format that a checkpoint's configs declare, and which key says so. ("", key) if what
    it declares is not taken by itself (as in SGLang, nvfp4 is not), ("", "") if it declares none.
    """
    quantized = _section(_read_config(Path(folder) / "config.json"), "quantization_config")
    if quantized.get("kv_cache_scheme") is not None:
        scheme = quantized["kv_cache_scheme"]
        return _scheme(scheme), "quantization_config.kv_cache_scheme"
    own = _section(_read_config(Path(folder) / "hf_quant_config.json"), "quantization")
    for where, section in (("quantization_config", quantized), ("hf_quant_config.json", own)):
        algo = section.get("kv_cache_quant_algo")
        if algo is not None:
            kv = "fp8_e4m3" if str(algo).upper() == "FP8" else ""
            return kv, f"{where}: kv_cache_quant_algo {algo}"
    quark = _section(quantized, "kv_cache_quant_config")
    if quark:
        return _quark(quark), "quantization_config.kv_cache_quant_config"
    return "", ""


def auto_reason(taken: str, key: str, compute_dtype: str) -> str:
    """Why kv_cache_dtype="auto" took a format."""
    if compute_dtype == "float32":
        return "the reference arithmetic keeps its cache in float32"
    if taken != "bf16":
        return f"the checkpoint declares it ({key})"
    if key:
        return f"the model's dtype; what the checkpoint declares ({key}) is not taken by itself"
    return "the model's dtype; the checkpoint declares no format for the cache"


def model_types(checkpoint: _core.Checkpoint) -> list[str]:
    """The names by which a side file may call the model."""
    if checkpoint.container == "gguf":
        arch = checkpoint.metadata().get("general.architecture")
        return [str(arch)] if arch else []
    config = _read_config(Path(checkpoint.folder) / "config.json")
    found = [config.get("model_type"), _section(config, "text_config").get("model_type")]
    return [name for name in found if isinstance(name, str)]


# The table.


@dataclass(frozen=True, kw_only=True)
class KvScale:
    """A scale of one lane and layer. The shares and `amax` are of what the lane has stored so far,
    None where it has stored nothing or the row is not of K or V in use."""

    lane: str
    layer: int
    kind: str  # "k", "v"; listed only: "q", "prob", "k_zero_point", ...
    format: str  # of the cache
    values: tuple[float, ...]  # one, or one per KV head
    source: str  # "file NAME", "calibrated, NAME", the tensor's name, "default 1.0"
    applied: bool
    reason: str = ""  # why it is not
    clipped: float | None = None  # share of the values that were clipped
    flushed: float | None = None  # share of the values that are not zero and were stored as zero
    amax: float | None = None  # largest magnitude, before the scale

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "values": list(self.values)}

    @property
    def value(self) -> str:
        """The number, or the range over the heads."""
        low, high = min(self.values), max(self.values)
        if low == high:
            return f"{low:.6g}"
        return f"{low:.4g} .. {high:.4g} ({len(self.values)} heads)"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.4g} %"


class KvScaleTable(Sequence[KvScale]):
    """Rows by lane and layer. Prints as a table, also in a notebook; to_dict() for JSON."""

    _HEAD = (
        "lane", "layer", "kind", "scale", "source", "applied", "clipped", "to zero", "largest",
    )  # fmt: skip

    def __init__(self, rows: Sequence[KvScale]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, place: int) -> KvScale: ...
    @overload
    def __getitem__(self, place: slice) -> "KvScaleTable": ...
    def __getitem__(self, place: int | slice) -> "KvScale | KvScaleTable":
        found = self._rows[place]
        return KvScaleTable(found) if isinstance(found, list) else found

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[KvScale]:
        return iter(self._rows)

    def to_dict(self) -> list[dict[str, Any]]:
        return [row.to_dict() for row in self._rows]

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.lane,
                str(row.layer),
                row.kind,
                row.value,
                row.source,
                "yes" if row.applied else f"no: {row.reason}",
                _percent(row.clipped),
                _percent(row.flushed),
                "-" if row.amax is None else f"{row.amax:.6g}",
            )
            for row in self._rows
        ]

    def __str__(self) -> str:
        return tables.text(self._HEAD, self._cells(), left=6)

    def __repr__(self) -> str:
        return str(self) if self._rows else "KvScaleTable([])"

    def _repr_html_(self) -> str:
        return tables.as_html(self._HEAD, self._cells())


# Which scale is used.


@dataclass(frozen=True)
class Resolved:
    values: Values  # [n_lanes, n_layers, 2, n_kv_heads]
    rows: list[KvScale]
    file: str | None = None  # the side file's source, if there is one


_LISTED = {
    "q": "queries are kept in bf16",
    "prob": "attention probabilities are kept in bf16",
    "unset": "-1: the checkpoint says that there is none",
}


def _listed_reason(kind: str, query_dtype: str) -> str:
    if kind == "q" and query_dtype != "bf16":
        return "queries are quantized at a scale of their own"
    if kind.endswith(("zero_point", "bias")):
        return "zero: it changes nothing"
    return _LISTED.get(kind, "not used")


class _Resolver:
    """Of one lane."""

    def __init__(
        self,
        file: SideFile | None,
        carried: Carried,
        n_kv_heads: int,
        query_dtype: str,
        unit: bool,
        latent: bool,
    ) -> None:
        self._latent = latent
        self._file = file
        self._n_kv_heads = n_kv_heads
        self._query_dtype = query_dtype
        self._unit = unit
        self._carried: dict[int, Carried] = {}
        for entry in carried:
            self._carried.setdefault(entry[0], []).append(entry)

    def lane(self, lane: options.Lane) -> tuple[Values, list[KvScale]]:
        values = np.ones((len(lane.layers), 2, self._n_kv_heads), np.float32)
        rows: list[KvScale] = []
        for layer, pair in enumerate(lane.layers):
            halves = [self._half(lane.name, layer, kind, pair[i]) for i, kind in enumerate("kv")]
            if self._latent:
                halves[1] = [self._of_one_row(halves[0][0], halves[1][0]), *halves[1][1:]]
            for half, found in enumerate(halves):
                rows += found
                if found[0].applied:
                    values[layer, half] = found[0].values
            rows += self._listed(lane.name, layer, "/".join(dict.fromkeys(pair)))
        return values, rows

    @staticmethod
    def _of_one_row(k: KvScale, v: KvScale) -> KvScale:
        """V's row in latent attention, where K and V are one stored row."""
        if v.applied and v.source != "default 1.0" and v.values != k.values:
            raise _core.CheckpointError(
                f"layer {k.layer}: K and V are one row in latent attention, but their scales are "
                f"{k.value} ({k.source}) and {v.value} ({v.source})"
            )
        return replace(k, kind="v")

    def _half(self, lane: str, layer: int, kind: str, kv_format: str) -> list[KvScale]:
        """The row of K or V in use, then those that are not."""
        candidates: list[tuple[str, Values]] = []
        rest: list[KvScale] = []
        unscaled = _UNSCALED.get(kv_format, "")
        if self._unit:
            candidates.append(("asked for 1.0", np.ones(1, np.float32)))
        if self._file is not None:
            entry = self._file.source, self._file.layers[layer]["kv".index(kind)]
            if self._file.kv_dtype == kv_format:
                candidates.append(entry)
            else:
                reason = unscaled or f"the file is for {self._file.kv_dtype}"
                rest.append(self._row(lane, layer, kind, kv_format, entry, reason))
        for _, its_kind, tensor, values in self._carried.get(layer, []):
            if its_kind == kind:
                candidates.append((tensor, values))
        if not candidates and not (unscaled and rest):
            candidates.append(("default 1.0", np.ones(1, np.float32)))
        rows = []
        for place, entry in enumerate(candidates):
            reason = unscaled or (f"overridden by {candidates[0][0]}" if place else "")
            rows.append(self._row(lane, layer, kind, kv_format, entry, reason))
        return rows + rest

    def _listed(self, lane: str, layer: int, kv_format: str) -> list[KvScale]:
        return [
            self._row(
                lane, layer, kind, kv_format, (tensor, values),
                _listed_reason(kind, self._query_dtype),
            )
            for _, kind, tensor, values in self._carried.get(layer, [])
            if kind not in ("k", "v")
        ]  # fmt: skip

    @staticmethod
    def _row(
        lane: str, layer: int, kind: str, kv_format: str, entry: tuple[str, Values], reason: str
    ) -> KvScale:
        source, values = entry
        return KvScale(
            lane=lane,
            layer=layer,
            kind=kind,
            format=kv_format,
            values=tuple(float(value) for value in values),
            source=source,
            applied=not reason,
            reason=reason,
        )


def resolve(
    lanes: Sequence[options.Lane],
    *,
    n_kv_heads: int,
    file: SideFile | None,
    carried: Carried,
    query_dtype: str = "bf16",
    own: Mapping[str, SideFile] | None = None,
    latent: bool = False,
) -> Resolved:
    """Scales of every lane, by precedence: its own file or 1.0 (`Lane.scales`; `own`: by path),
    file, checkpoint, 1.0. CheckpointError if there is a file for another format than the lanes'
    with a scale; where they have none, the file's are listed as not applied. latent: K's are V's,
    too."""
    _check_file(file, [lane for lane in lanes if lane.scales is None])
    done = []
    for lane in lanes:
        lane_file = file if lane.scales is None else None
        if isinstance(lane.scales, str):
            lane_file = (own or {})[lane.scales]
            _check_file(lane_file, [lane])
        unit = lane.scales == 1.0
        done.append(_Resolver(lane_file, carried, n_kv_heads, query_dtype, unit, latent).lane(lane))
    rows = [row for _, lane_rows in done for row in lane_rows]
    return Resolved(
        np.stack([values for values, _ in done]), rows, None if file is None else file.source
    )


def _check_file(file: SideFile | None, lanes: Sequence[options.Lane]) -> None:
    asked = {name for lane in lanes for pair in lane.layers for name in pair}
    if file is not None and file.kv_dtype not in asked and not asked.isdisjoint(LIMITS):
        raise _core.CheckpointError(
            f"{file.name}: its scales are for {file.kv_dtype}, kv_cache_dtype is "
            f"{', '.join(sorted(asked))}"
        )


def write_log(resolved: Resolved) -> None:
    """Says what is used, once for all lanes of which the same is to be said, and warns of scales
    that are 1.0 for want of any."""
    if resolved.file is not None and not any(
        row.applied and row.source == resolved.file for row in resolved.rows
    ):
        _log.warning(
            "KV scales: no lane's format has a scale, none of %s is applied", resolved.file
        )
    by_lane: dict[str, list[KvScale]] = {}
    for row in resolved.rows:
        by_lane.setdefault(row.lane, []).append(row)
    lanes: dict[tuple[int, str], list[str]] = {}
    for lane, rows in by_lane.items():
        for line in _said_of(rows):
            lanes.setdefault(line, []).append(lane)
    for (level, text), names in lanes.items():
        some = "lane" if len(names) == 1 else "lanes"
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        _log.log(level, "KV scales of %s %s%s: %s", some, ", ".join(names[:4]), more, text)


def _said_of(rows: Sequence[KvScale]) -> Iterator[tuple[int, str]]:
    """Level and text, of one lane."""
    scaled = [row for row in rows if row.applied]
    missing = [row for row in scaled if row.source == "default 1.0"]
    found = [row for row in scaled if row.source != "default 1.0"]
    if found:
        yield logging.INFO, f"{len(found)} applied, from {_sources(found)}"
    if missing:
        formats = ", ".join(sorted({row.format for row in missing}))
        yield (
            logging.WARNING,
            f"none in a file or in the checkpoint for {len(missing)} of {len(scaled)} K and V "
            f"({formats}): they are stored at scale 1.0",
        )
    unused = [row for row in rows if not row.applied and row.source != "default 1.0"]
    for reason in sorted({row.reason for row in unused}):
        some = [row for row in unused if row.reason == reason]
        yield logging.INFO, f"{len(some)} not applied ({reason}), from {_sources(some)}"


def _sources(rows: Sequence[KvScale]) -> str:
    names = list(dict.fromkeys(row.source for row in rows))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def with_counts(
    rows: Sequence[KvScale], counts: Mapping[str, Mapping[str, NDArray[Any]]]
) -> KvScaleTable:
    """The rows with what each lane counted (Engine.kv_counts of the core, by lane's name)."""
    found = []
    seen: set[tuple[str, int, str]] = set()
    for row in rows:
        place = (row.lane, row.layer, row.kind)
        if row.kind not in ("k", "v") or place in seen:
            found.append(row)
            continue
        seen.add(place)
        found.append(_counted(row, counts[row.lane]))
    return KvScaleTable(found)


def _counted(row: KvScale, counts: Mapping[str, NDArray[Any]]) -> KvScale:
    at = (row.layer, "kv".index(row.kind))
    n_values = int(counts["n_values"][at].sum())
    if n_values == 0:
        return row
    return KvScale(
        **{
            **vars(row),
            "clipped": int(counts["n_clipped"][at].sum()) / n_values,
            "flushed": int(counts["n_flushed"][at].sum()) / n_values,
            "amax": float(counts["amax"][at].max()),
        }
    )
