"""The engine's options: which values there are, and what this version makes of them."""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from . import _core, gemm_backends, models
from .quantization import METHODS
from .quantization.packed import Forms

PAGE_TOKENS = 16
_CHANNEL_STEP = 16  # the pool pads the channels of a head with zeros to a multiple of it
DEFAULT_MAX_RUNNING = 64

KvLayers = list[tuple[str, str]]


@dataclass(frozen=True)
class Lane:
    """A KV pool: its name, the formats of K and V in each layer, and where its scales come from
    if not from where the engine's do: a side file, or 1.0 whatever the checkpoint has."""

    name: str
    layers: KvLayers
    scales: str | float | None = None


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """The value, or ValueError with the list."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(known)}")
    return value


def check_device(device: str) -> None:
    """The engine parses a fault itself: "guard", "fault:..." and "cuda-emulated" are for tests."""
    if not isinstance(device, str) or not re.fullmatch(r"fault:.*|cuda:[0-9]{1,2}", device):
        one_of("device", device, ("auto", "cpu", "cuda:0", "cuda-emulated", "guard"))


def backends() -> list[str]:
    """The devices of this installation."""
    gpu = Path(_core.__file__).with_name("_qkv_cuda.so").is_file()
    return ["cpu", *(["cuda:0"] if gpu else [])]


def device_library(device: str) -> str | None:
    """The backend that `device` names, a file beside the core module; None: it is in the module.
    "auto" is the CPU. UnsupportedError if this installation has no such file."""
    if not device.startswith("cuda"):
        return None
    name = "_qkv_cuda_emulated.so" if device == "cuda-emulated" else "_qkv_cuda.so"
    path = Path(_core.__file__).with_name(name)
    if not path.is_file():
        raise _core.UnsupportedError(
            f"device={device!r}: this installation has no {name}: QKV_CUDA=1 pip install builds it "
            "where nvcc is; device='cpu' does without"
        )
    return str(path)


def check_quantization(
    quantization: str | None, prefill_quantization: str | os.PathLike[str] | None
) -> None:
    """The names alone; quantization.detect holds them against the checkpoint."""
    if quantization is not None:
        one_of("quantization", quantization, tuple(METHODS))
    given = prefill_quantization
    if given is None or isinstance(given, os.PathLike):
        return
    if not isinstance(given, str) or not (given in METHODS or models.may_be(given)):
        raise ValueError(
            f"prefill_quantization={given!r:.100}: must be one of {', '.join(METHODS)}, or another "
            "checkpoint of the model"
        )


def check_arithmetic(
    *,
    device: str,
    fp8_gemm_backend: str,
    fp4_gemm_backend: str,
    activation_quant: str,
    query_dtype: str,
    compute_dtype: str,
) -> None:
    """How products are computed."""
    gemm_backends.check("fp8_gemm_backend", fp8_gemm_backend, device)
    gemm_backends.check("fp4_gemm_backend", fp4_gemm_backend, device)
    one_of("activation_quant", activation_quant, ("checkpoint", "off", "int8"))
    if activation_quant == "int8" and compute_dtype == "float32":
        raise ValueError(
            "activation_quant='int8' and compute_dtype='float32': the reference arithmetic "
            "quantizes nothing"
        )
    one_of("query_dtype", query_dtype, ("bf16", "fp8_e4m3"))


def check_latent(mla_prefill: str) -> None:
    """How latent attention computes prompts. The other way is known elsewhere, and refused."""
    if mla_prefill == "expanded":
        raise _core.UnsupportedError(
            "mla_prefill='expanded': keys and values of each head would be computed anew for a "
            "chunk's own tokens, but not for those in the cache, so results would depend on "
            "chunks, prefix hits and retractions; this version has mla_prefill='absorbed' alone"
        )
    one_of("mla_prefill", mla_prefill, ("absorbed",))


def check_scales_file(
    path: str | os.PathLike[str] | None, name: str = "quantization_param_path"
) -> None:
    """Before the model is opened; what stands in the file is checked against the model."""
    if path is None:
        return
    if Path(path).is_dir():
        raise ValueError(f"{name}={os.fspath(path)!r}: a folder, not a file")
    if not Path(path).is_file():
        raise ValueError(f"{name}={os.fspath(path)!r}: no such file")


def kv_names() -> list[str]:
    """The KV formats that can be asked for."""
    return [name for name, _ in _core.kv_formats() if name != "float32"]


def _kv_name(where: str, value: Any) -> str:
    if value == "bfloat16":
        return "bf16"
    return one_of(where, value, kv_names())


def _layer_range(key: Any, n_layers: int) -> range:
    """ "5" or "0-3" (both ends count)."""
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", str(key))
    if found is None:
        raise ValueError(f"kv_cache_dtype layers {key!r}: a layer or a range as '0-3'")
    low, high = int(found[1]), int(found[2] or found[1])
    if not 0 <= low <= high < n_layers:
        raise ValueError(f"kv_cache_dtype layers {key!r}: the model has layers 0 to {n_layers - 1}")
    return range(low, high + 1)


def _pair(where: str, value: Any, base: tuple[str, str]) -> tuple[str, str]:
    """K and V formats by a name or {"k": ..., "v": ...}; what is not said stays."""
    if not isinstance(value, Mapping):
        name = _kv_name(where, value)
        return name, name
    for key in value:
        one_of(f"{where} key", key, ("k", "v"))
    k = _kv_name(f"{where} k", value["k"]) if "k" in value else base[0]
    v = _kv_name(f"{where} v", value["v"]) if "v" in value else base[1]
    return k, v


def _lane(given: Any, n_layers: int, auto: str) -> Lane:
    if given == "auto":
        return Lane(auto, [(auto, auto)] * n_layers)
    if not isinstance(given, Mapping):
        name = _kv_name("kv_cache_dtype", given)
        return Lane(name, [(name, name)] * n_layers)
    for key in given:
        one_of("kv_cache_dtype key", key, ("default", "k", "v", "layers", "scales", "name"))
    default = given.get("default", "auto")
    base = auto if default == "auto" else _kv_name("kv_cache_dtype default", default)
    halves = {key: given[key] for key in ("k", "v") if key in given}
    pair = _pair("kv_cache_dtype", halves, (base, base))
    layers = [pair] * n_layers
    by_layer = given.get("layers", {})
    if not isinstance(by_layer, Mapping):
        raise TypeError(f"kv_cache_dtype layers={by_layer!r}: a mapping is needed")
    for key, value in by_layer.items():
        for layer in _layer_range(key, n_layers):
            layers[layer] = _pair(f"kv_cache_dtype layers {key!r}", value, layers[layer])
    scales = _lane_scales(given.get("scales"))
    name = given.get("name", _lane_name(pair, layers))
    if not isinstance(name, str) or not name:
        raise TypeError(f"kv_cache_dtype name={name!r:.60}: text is needed")
    return Lane(name, layers, scales)


def _lane_scales(given: Any) -> str | float | None:
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        check_scales_file(given, "kv_cache_dtype scales")
        return os.fspath(given)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given != 1:
        raise ValueError(f"kv_cache_dtype scales={given!r:.60}: a side file, or 1.0")
    return 1.0


def _lane_name(pair: tuple[str, str], layers: KvLayers) -> str:
    name = pair[0] if pair[0] == pair[1] else f"k={pair[0]},v={pair[1]}"
    return name if all(layer == pair for layer in layers) else f"{name},mixed"


def spelled(lane: Lane) -> dict[str, Any]:
    """The lane as kv_cache_dtype says it: the format that most K and V have as "default", layers
    in ranges. The name is left out."""
    names = [name for pair in lane.layers for name in pair]
    # float32 cannot be asked for by name; it is what "auto" is where it can be.
    base = "float32" if "float32" in names else max(names, key=names.count)
    found: dict[str, Any] = {"default": "auto" if base == "float32" else base}
    layers: dict[str, Any] = {}
    first = 0
    for (k, v), group in groupby(lane.layers):
        last = first + len(list(group)) - 1
        if (k, v) != (base, base):
            halves = {part: name for part, name in (("k", k), ("v", v)) if name != base}
            layers[f"{first}-{last}" if last > first else str(first)] = k if k == v else halves
        first = last + 1
    if layers:
        found["layers"] = layers
    if lane.scales is not None:
        found["scales"] = lane.scales
    return found


def auto_format(compute_dtype: str, declared: str) -> str:
    """What the checkpoint declares, else bf16; the reference arithmetic's cache is float32."""
    return "float32" if compute_dtype == "float32" else declared or "bf16"


def asks_for_auto(given: Any) -> bool:
    """Whether some layer's format is left to us."""
    if isinstance(given, (list, tuple)):
        return any(asks_for_auto(entry) for entry in given)
    return bool((given.get("default", "auto") if isinstance(given, Mapping) else given) == "auto")


def lanes(given: Any, n_layers: int, *, compute_dtype: str, declared: str) -> list[Lane]:
    """kv_cache_dtype as lanes; "auto" is auto_format()."""
    auto = auto_format(compute_dtype, declared)
    entries = list(given) if isinstance(given, (list, tuple)) else [given]
    if not entries:
        raise ValueError("kv_cache_dtype=[]: at least one lane is needed")
    found: list[Lane] = []
    for entry in entries:
        lane = _lane(entry, n_layers, auto)
        taken = [other.name for other in found]
        name, count = lane.name, 1
        while name in taken:
            count += 1
            name = f"{lane.name}#{count}"
        found.append(replace(lane, name=name))
    return found


def row_bytes(kv_format: str, dim: int) -> int:
    """One token of one head of K or V in the pool: block scales and padding included."""
    return _core.kv_row_bytes(kv_format, -(-dim // _CHANNEL_STEP) * _CHANNEL_STEP)


def token_bytes(config: Mapping[str, Any], lanes_: Sequence[Lane]) -> int:
    """Bytes of one token over all layers and lanes (design of the pool: no gaps)."""
    dim = config["head_dim"]
    rows = {name: row_bytes(name, dim) for name, _ in _core.kv_formats()}
    is_latent = bool(config.get("kv_rank"))  # then K's row is V's, too
    values = {name: 0 if is_latent else n_bytes for name, n_bytes in rows.items()}
    per_head = sum(rows[k] + values[v] for lane in lanes_ for k, v in lane.layers)
    return int(config["n_kv_heads"]) * per_head


def window_of(config: Mapping[str, Any]) -> int:
    """The largest window of a layer, 0 if none has one."""
    return max(int(layer["window"]) for layer in config["layers"])


def split_token_bytes(config: Mapping[str, Any], lanes_: Sequence[Lane]) -> tuple[int, int]:
    """token_bytes() of the layers that see everything, and of those with a window."""
    has_window = [layer["window"] > 0 for layer in config["layers"]]
    chosen = [
        [pair for pair, windowed in zip(lane.layers, has_window, strict=True) if windowed]
        for lane in lanes_
    ]
    parts = [replace(lane, layers=c) for lane, c in zip(lanes_, chosen, strict=True)]
    in_windows = token_bytes(config, parts)
    return token_bytes(config, lanes_) - in_windows, in_windows


def packed_bytes(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    *,
    compute_dtype: str,
    int8: bool = False,
    forms: Forms | None = None,
    taken: Collection[str] = (),
    target: str = "",
    shapes: Mapping[str, tuple[int, int]] | None = None,
    heads: tuple[int, int, int] | None = None,
) -> int:
    """Bytes of a checkpoint's tensors in the CPU backend; as in the file where it has no such
    weight (which loading then refuses). int8: for activations in int8. `forms`: of the described
    weights (for that arithmetic), `shapes` theirs, and `taken` the tensors that they are made of.
    `target`: what matrices are quantized to while loading, as _core.Engine's `online` says it.
    `heads`: of latent attention, their number, channels of their keys that are not rotated, and of
    their values."""
    arithmetic = (compute_dtype == "float32", int8)
    total = 0
    for weight, form in (forms or {}).items():
        shape = (shapes or {}).get(weight)
        if heads and shape and _is_by_head(weight):
            total += _by_head("F32", shape, heads, arithmetic)
            continue
        made = None if shape is None else _made(weight, target, shape, arithmetic)
        total += int(form["bytes"]) if made is None else made
    for tensor, fmt, dims, n_bytes in tensors:
        if tensor in taken:
            continue
        if tensor.endswith("bias"):  # those of experts have two dimensions
            total += 4 * math.prod(dims)
            continue
        if heads and _is_by_head(tensor):
            total += _by_head("BF16" if fmt == "BF16" else "F32", dims, heads, arithmetic)
            continue
        made = _made(tensor, target, dims, arithmetic)
        try:
            total += _packed(fmt, dims, arithmetic) if made is None else made
        except ValueError:
            total += n_bytes
    return total


def _is_by_head(weight: str) -> bool:
    """Of latent attention, what is packed from values, a matrix for each head."""
    parts = (["kv_b_proj"], ["attn_kv_b"], ["attn_k_b"], ["attn_v_b"])
    return weight.split(".")[-2:-1] in parts


def _by_head(
    fmt: str, shape: tuple[int, ...], heads: tuple[int, int, int], arithmetic: tuple[bool, bool]
) -> int:
    n_heads, nope, v_dim = heads
    if len(shape) != 2:  # as GGUF has them, or what loading refuses
        return _packed(fmt, shape, arithmetic)
    rank = shape[-1]
    by_key = _packed(fmt, (rank, nope), arithmetic)
    return n_heads * (by_key + _packed(fmt, (v_dim, rank), arithmetic))


def is_end(weight: str) -> bool:
    """Whether it is the embedding or the head, by its name in safetensors or GGUF."""
    return weight.split(".")[-2:-1] in (["embed_tokens"], ["lm_head"], ["token_embd"], ["output"])


def _made(
    weight: str, target: str, shape: tuple[int, ...], arithmetic: tuple[bool, bool]
) -> int | None:
    """Bytes of what is made of a weight while loading; None where it stays as it is: embedding and
    head (but for MLX's targets), and rows that the target's groups do not divide."""
    if not target or len(shape) < 2 or (is_end(weight) and not target.startswith("mlx")):
        return None
    try:
        return _packed(target, shape, arithmetic)
    except ValueError:
        return None


def _packed(fmt: str, shape: tuple[int, ...], arithmetic: tuple[bool, bool]) -> int:
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return math.prod(shape[:-2]) * _core.packed_bytes(fmt, shape[-2], shape[-1], *arithmetic)


def _limit(path: Path, name: str) -> int | None:
    try:
        text = (path / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_free() -> int | None:
    """Bytes left under the tightest memory limit of this process's cgroups, if there is one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    free: list[int] = []
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / inner.lstrip("/")
        for level in (folder, *folder.parents):
            if root not in (level, *level.parents):
                break
            limit, used = _limit(level, names[0]), _limit(level, names[1])
            if limit is not None and used is not None:
                free.append(max(limit - used + _reclaimable(level), 0))
    return min(free, default=None)


def _reclaimable(folder: Path) -> int:
    """File pages that count as used and are given back on demand."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(stat.get("inactive_file", 0))


def free_memory() -> int:
    """Bytes that this process may still use."""
    free = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    inside = _cgroup_free()
    return free if inside is None else min(free, inside)
