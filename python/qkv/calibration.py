"""Scales of the KV cache from the user's own prompts.

The prompts run with a bf16 cache while the engine counts |x| of every key and value in a histogram.
"amax" maps the largest magnitude to the largest code. "mse" takes the scale whose codes have the
least squared error, among 1.0 and those from the largest magnitude's down to 1/64 of it, where what
is clipped pays for what is not flushed to zero.

nvfp4 has a scale per block of 16 over one per layer or head, which is what is calibrated: the
largest magnitude over 6 * 448, so that the largest block's scale is the largest e4m3 number. SGLang
asserts the same of checkpoints, NVIDIA's ModelOpt writes the largest magnitude over 448. A scale is
applied as it stands in its file: the other convention costs range, never correctness.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kv_scales_file, options, tables
from .engine import Engine, Prompt
from .kv_scales import LIMITS
from .kv_scales_file import Values
from .params import SamplingParams

F64 = NDArray[np.float64]

# Mantissa bits and the exponent of the smallest normal number (OCP 8-bit floating point 1.0).
_FLOATS = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}

_BINS = 2048
_NOT_FINITE = 0x7F8  # the bin of infinity, those of NaN after it
_SUB = 16  # points in each bin: its centre alone would be a tie of e4m3 at every power of two
_STEPS = 8  # candidates per octave
_OCTAVES = 6


def _points() -> F64:
    """[bins, _SUB]: magnitudes spread over each bin of 1/8 of an octave."""
    pattern = np.arange(_BINS * _SUB, dtype=np.uint32).reshape(_BINS, _SUB)
    pattern = (pattern << np.uint32(16)) + np.uint32(1 << 15)
    with np.errstate(invalid="ignore"):  # the last bins are NaNs
        points: F64 = pattern.view(np.float32).astype(np.float64)
    points[0] = 0.0  # zero and what no format tells from it
    return points


@dataclass(frozen=True)
class _Loss:
    """What storing a histogram in a format does to it."""

    squared: float  # sum of (x - stored)^2
    clipped: float  # of so many values
    flushed: float


def _loss(kv_dtype: str, x: F64, weight: F64, scale: float) -> _Loss:
    """Round to nearest even, clamped, as the codec stores it."""
    mantissa, low = _FLOATS[kv_dtype]
    limit = LIMITS[kv_dtype]
    y = x / scale
    exponent = np.maximum(np.frexp(y)[1] - 1, low) - mantissa
    step = np.ldexp(1.0, exponent)
    code = np.rint(y / step) * step
    stored = np.minimum(code, limit)
    return _Loss(
        squared=float(weight @ np.square(x - stored * scale)),
        clipped=float(weight[code > limit].sum()),
        flushed=float(weight[(code == 0.0) & (x > 0.0)].sum()),
    )


@dataclass(frozen=True, kw_only=True)
class CalibratedRow:
    """K or V of a layer, before (at scale 1.0) and after. Shares and errors are of the histogram;
    None for nvfp4, whose block scales it does not show."""

    layer: int
    kind: str
    amax: float
    scale: tuple[float, ...]
    clipped: tuple[float, float] | None
    flushed: tuple[float, float] | None
    error: tuple[float, float] | None  # root mean square of the error over that of the values

    def cells(self) -> tuple[str, ...]:
        low, high = min(self.scale), max(self.scale)
        scale = f"{low:.6g}" if low == high else f"{low:.4g} .. {high:.4g}"

        def both(pair: tuple[float, float] | None) -> tuple[str, str]:
            return ("-", "-") if pair is None else (f"{pair[0]:.4%}", f"{pair[1]:.4%}")

        return (
            str(self.layer), self.kind, f"{self.amax:.6g}", scale,
            *both(self.clipped), *both(self.flushed), *both(self.error),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scales:
    """What calibrate() found. Prints as a table: at scale 1.0, and at the calibrated scale."""

    kv_cache_dtype: str
    model_type: str | None
    layers: tuple[tuple[Values, Values], ...]  # K and V: [1] or [n_kv_heads]
    calibration: Mapping[str, Any]  # method, per, prompts, tokens
    rows: tuple[CalibratedRow, ...]
    files: tuple[str, ...] = ()  # written

    _HEAD = (
        "layer", "kind", "largest", "scale", "clipped at 1.0", "after", "to zero at 1.0", "after",
        "error at 1.0", "after",
    )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The side file's content."""
        return kv_scales_file.file_content(
            self.kv_cache_dtype, self.layers, self.model_type, self.calibration
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "kv_cache_dtype": self.kv_cache_dtype,
            "scales": self.to_json(),
            "rows": [vars(row) for row in self.rows],
            "files": list(self.files),
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """The side file for quantization_param_path."""
        text = json.dumps(self.to_json(), indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def write_safetensors(self, path: str | os.PathLike[str]) -> None:
        """float32 tensors under the names that SGLang and vLLM read from a checkpoint."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        body = b""
        for layer, pair in enumerate(self.layers):
            for kind, values in zip("kv", pair, strict=True):
                data = values.astype("<f4").tobytes()
                name = f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"
                header[name] = {
                    "dtype": "F32",
                    "shape": [len(values)] if len(values) > 1 else [],
                    "data_offsets": [len(body), len(body) + len(data)],
                }
                body += data
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body)

    def _title(self) -> str:
        how = self.calibration
        return (
            f"{self.kv_cache_dtype}, {how['method']} per {how['per']}: {how['prompts']} prompts, "
            f"{how['tokens']} tokens"
        )

    def __str__(self) -> str:
        table = tables.text(self._HEAD, [row.cells() for row in self.rows], left=2)
        files = "".join(f"\nwritten: {name}" for name in self.files)
        return f"{self._title()}\n{table}{files}"

    def _repr_html_(self) -> str:
        table = tables.as_html(self._HEAD, [row.cells() for row in self.rows])
        return f"<p>{self._title()}</p>{table}"


def _best_scale(kv_dtype: str, method: str, amax: float, x: F64, weight: F64) -> float:
    if amax == 0.0:
        return 1.0
    whole = amax / LIMITS[kv_dtype]
    if method == "amax":
        return whole
    # With 1.0, so that calibration never makes it worse.
    candidates = np.append(whole * 2.0 ** (-np.arange(_OCTAVES * _STEPS + 1) / _STEPS), 1.0)
    losses = [_loss(kv_dtype, x, weight, float(scale)).squared for scale in candidates]
    return float(candidates[int(np.argmin(losses))])


def _occupied(histogram: NDArray[np.uint64], points: F64, amax: float) -> tuple[F64, F64]:
    """Magnitudes and how many values each stands for."""
    used = np.flatnonzero(histogram)
    x = np.minimum(points[used], amax)
    weight = np.repeat(histogram[used].astype(np.float64) / _SUB, _SUB)
    return x.reshape(-1), weight


def _row(
    kv_dtype: str,
    place: tuple[int, str],
    amax: F64,  # [n_heads]
    parts: Sequence[tuple[F64, F64]],  # of each head
    scale: Values,
) -> CalibratedRow:
    clipped = flushed = error = None
    if kv_dtype in _FLOATS:
        scales = np.broadcast_to(scale.astype(np.float64), len(parts))
        before = [_loss(kv_dtype, x, w, 1.0) for x, w in parts]
        after = [_loss(kv_dtype, x, w, float(s)) for (x, w), s in zip(parts, scales, strict=True)]
        count = max(sum(float(w.sum()) for _, w in parts), 1.0)
        energy = sum(float(w @ np.square(x)) for x, w in parts) or 1.0
        clipped, flushed, error = (
            (measure(before), measure(after))
            for measure in (
                lambda losses: sum(loss.clipped for loss in losses) / count,
                lambda losses: sum(loss.flushed for loss in losses) / count,
                lambda losses: float(np.sqrt(sum(loss.squared for loss in losses) / energy)),
            )
        )
    return CalibratedRow(
        layer=place[0],
        kind=place[1],
        amax=float(amax.max()),
        scale=tuple(float(s) for s in scale),
        clipped=clipped,
        flushed=flushed,
        error=error,
    )


def find_scales(
    histogram: NDArray[np.uint64],  # [n_layers, 2, n_kv_heads, bins]
    amax: NDArray[np.float32],  # [n_layers, 2, n_kv_heads]
    kv_dtype: str,
    *,
    per: str = "tensor",
    method: str = "amax",
    shared: bool = False,
) -> tuple[list[tuple[Values, Values]], list[CalibratedRow]]:
    """Scales of every layer and the table's rows. shared: one number for K and V, the larger."""
    points = _points()
    layers: list[tuple[Values, Values]] = []
    rows: list[CalibratedRow] = []
    for layer in range(len(amax)):
        found: list[Values] = []
        parts: list[list[tuple[F64, F64]]] = []
        for half in range(2):
            largest = amax[layer, half].astype(np.float64)
            # Largest magnitudes pass over NaN.
            if not np.isfinite(largest).all() or histogram[layer, half, :, _NOT_FINITE:].any():
                kind = "KV"[half]
                raise ValueError(f"layer {layer}: {kind} has values that are not finite")
            heads = [
                _occupied(one, points, float(top))
                for one, top in zip(histogram[layer, half], largest, strict=True)
            ]
            if per == "head":
                scales = [
                    _best_scale(kv_dtype, method, float(top), *head)
                    for top, head in zip(largest, heads, strict=True)
                ]
            else:
                x = np.concatenate([head[0] for head in heads])
                weight = np.concatenate([head[1] for head in heads])
                scales = [_best_scale(kv_dtype, method, float(largest.max()), x, weight)]
            found.append(np.array(scales, np.float32))
            parts.append(heads)
        if shared:
            found = [np.maximum(found[0], found[1])] * 2
        for half in range(2):
            largest = amax[layer, half].astype(np.float64)
            rows.append(_row(kv_dtype, (layer, "kv"[half]), largest, parts[half], found[half]))
        layers.append((found[0], found[1]))
    return layers, rows


def _check(kv_cache_dtype: str, per: str, method: str, plain: bool) -> None:
    options.one_of("per", per, ("tensor", "head"))
    options.one_of("method", method, ("amax", "mse"))
    options.one_of("kv_cache_dtype", kv_cache_dtype, options.kv_names())
    if kv_cache_dtype not in LIMITS:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} has no scale to calibrate, these have: "
            f"{', '.join(LIMITS)}"
        )
    if method == "mse" and kv_cache_dtype not in _FLOATS:
        raise ValueError(
            f"method='mse': {kv_cache_dtype}'s error is that of its block scales, its global scale "
            "only keeps these within range: 'amax'"
        )
    if plain and per != "tensor":
        raise ValueError("plain=True: SGLang's schema has one number per layer: per='tensor'")


@contextmanager
def _bf16_engine(model: Any, engine_options: Mapping[str, Any]) -> Iterator[tuple[Engine, int]]:
    """An engine and its lane whose cache is bf16 in all layers; one that is given stays open."""
    if isinstance(model, Engine):
        if engine_options:
            names = ", ".join(engine_options)
            raise TypeError(f"{names}: the engine is open already")
        for place, lane in enumerate(model._lanes):
            if all(pair == ("bf16", "bf16") for pair in lane.layers):
                yield model, place
                return
        raise ValueError("calibrate() needs an engine with a lane of kv_cache_dtype='bf16'")
    if "kv_cache_dtype" in engine_options:
        raise TypeError("kv_cache_dtype: what is calibrated; the prompts run with a bf16 cache")
    with Engine(model, kv_cache_dtype="bf16", **engine_options) as engine:
        yield engine, 0


def _paths(out: str | os.PathLike[str] | None) -> tuple[Path, Path] | None:
    if out is None:
        return None
    path = Path(out)
    if path.is_dir():
        path = path / "kv_scales.json"
    if path.suffix != ".json":
        raise ValueError(f"out={os.fspath(out)!r}: a folder, or a name that ends in .json")
    if not path.parent.is_dir():  # known now, not after the prompts have run
        raise ValueError(f"out={os.fspath(out)!r}: there is no folder {os.fspath(path.parent)!r}")
    return path, path.with_suffix(".safetensors")


def calibrate(
    model: str | os.PathLike[str] | Engine,
    prompts: Any,
    kv_cache_dtype: str,
    *,
    out: str | os.PathLike[str] | None,
    per: str = "tensor",
    method: str = "amax",
    plain: bool = False,
    max_tokens: int = 1,
    progress: bool = True,
    **engine_options: Any,
) -> Scales:
    """Finds the KV scales that fit the prompts (as Engine.generate takes them).

    model: as for Engine, with engine_options; or an open engine with a bf16 lane.
    kv_cache_dtype: fp8_e4m3, fp8_e5m2 or nvfp4.
    out: NAME.json or a folder (kv_scales.json in it). Written are this side file, for
        quantization_param_path, and NAME.safetensors with the names that SGLang and vLLM read.
        None: nothing is written.
    per: "tensor" or "head". method: "amax" or "mse".
    plain: one number per layer for K and V, the larger: what SGLang's schema can say.
    max_tokens: also let the model write so many tokens after each prompt, and count them.

    A prefix that prompts share is stored, and counted, once while it stays in the cache.
    A prompt that cannot be answered is a ValueError: the scales would not be those of the prompts.
    """
    _check(kv_cache_dtype, per, method, plain)
    paths = _paths(out)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with _bf16_engine(model, engine_options) as (engine, lane):
        histogram, counts, n_prompts = _observe(engine, lane, prompts, params, progress)
        model_type = engine._model_types[0] if engine._model_types else None
        config = engine.info["config"]
    if config["kv_rank"]:  # latent attention: K's row is V's, too
        histogram[:, 1], counts["amax"][:, 1] = histogram[:, 0], counts["amax"][:, 0]
    layers, rows = find_scales(
        histogram, counts["amax"], kv_cache_dtype, per=per, method=method, shared=plain
    )
    n_tokens = int(counts["n_values"][0, 0, 0]) // int(config["head_dim"])
    scales = Scales(
        kv_cache_dtype=kv_cache_dtype,
        model_type=model_type,
        layers=tuple(layers),
        calibration={"method": method, "per": per, "prompts": n_prompts, "tokens": n_tokens},
        rows=tuple(rows),
        files=tuple(str(path) for path in paths or ()),
    )
    if paths is not None:
        scales.write(paths[0])
        scales.write_safetensors(paths[1])
    return scales


def _observe(
    engine: Engine, lane: int, prompts: Sequence[Prompt], params: SamplingParams, progress: bool
) -> tuple[NDArray[np.uint64], Mapping[str, NDArray[Any]], int]:
    """Histogram, counts and number of prompts. A prefix that is still in the tree from before would
    not be stored again, so the tree is emptied first."""
    core = engine._core
    with engine._exclusive():
        core.flush()
        core.kv_counts_reset()
        core.kv_observe(lane, True)
    try:
        outputs = engine.generate(prompts, params, progress=progress)
        for output in outputs:
            if output.error is not None:
                raise ValueError(f"prompt {output.index}: {output.error}")
        if not outputs:
            raise ValueError("no prompts to calibrate on")
        return core.kv_histogram(lane), core.kv_counts(lane), len(outputs)
    finally:
        core.kv_observe(lane, False)
