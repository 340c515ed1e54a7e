"""What the bits of a result depend on, as digests and plain values, and how two sets of these
differ: what a file of results is begun with, and must be gone on with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from . import _core
from ._core import Error

if TYPE_CHECKING:
    from .engine import Engine
    from .options import Lane
    from .tokenizer import Tokenizer

_SAMPLE, _STRIDE = 2**16, 2**24
#: A tokenizer of the caller's own is known by what it makes of this.
_PROBE = "The 3 quick brown foxes\n\tjump over 1,234 lazy dogs: \u00e9\u00df\u4e2d\U0001f600"


def of_files(files: Sequence[Path]) -> str:
    """Of names, sizes and 64 KiB out of every 16 MiB; files of up to 16 MiB count whole."""
    digest = hashlib.blake2b(digest_size=12)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            places = range(0, size, _SAMPLE if size <= _STRIDE else _STRIDE)
            for place in [*places, max(size - _SAMPLE, 0)]:
                file.seek(place)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def of_model(checkpoint: _core.Checkpoint) -> str:
    """Of its files and of config.json, where there is one."""
    files = [Path(file) for file in checkpoint.files]
    config = Path(checkpoint.folder) / "config.json"
    return of_files([*files, config] if checkpoint.folder and config.is_file() else files)


def of_path(path: str) -> str:
    checkpoint = _core.Checkpoint(path)
    try:
        return of_model(checkpoint)
    finally:
        checkpoint.close()


def of_text(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def of_tokenizer(tokenizer: Tokenizer) -> str:
    """Of all that makes token ids of a text or a conversation."""
    backend = getattr(tokenizer, "_backend", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return of_text(type(tokenizer).__name__, repr(tokenizer.encode(_PROBE)))
    extra = (tokenizer.special_tokens, tokenizer.templates, tokenizer._add_bos)
    return of_text(backend.to_str(), *map(repr, extra))


def environment(models: Mapping[str, str]) -> dict[str, Any]:
    """What a result's bits depend on beside the settings. models: digests by label."""
    from . import __version__  # noqa: PLC0415 - the package imports this module

    isa = os.environ.get("QKV_ISA") or next(name for name, usable in _core.isas() if usable)
    build = of_files([Path(_core.__file__)])
    return {"version": __version__, "build": build, "isa": isa, "models": dict(models)}


def of_engine(engine: Engine) -> dict[str, Any]:
    """Settings and environment of an engine: what the outputs' bits depend on, and nothing that may
    change from run to run (threads, sizes of the pool and of a step)."""
    info = engine.info
    names = ("compute_dtype", "activation_quant", "query_dtype", "device", "max_model_len")
    settings = {name: info[name] for name in names} | _weights(info)
    models = {"model": of_path(info["model"])}
    prefill = info["prefill"]
    settings["prefill"] = None if prefill is None else _weights(prefill)
    if prefill is not None:
        models["prefill"] = of_path(prefill["model"])
    tokenizer = engine._text_tokenizer
    settings["tokenizer"] = None if tokenizer is None else of_tokenizer(tokenizer)
    settings["kv_cache"] = [
        {"name": lane.name, "formats": _formats(lane), "scales": _of_bytes(scales.tobytes())}
        for lane, scales in zip(engine._lanes, engine._scales.values, strict=True)
    ]
    settings["random_seed"] = engine._seed
    return {"settings": settings, "environment": environment(models)}


def _weights(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of Engine.info: which arithmetic a set of weights goes through."""
    return {
        "quantization": facts["quantization"]["method"],
        "online_quantization": facts["online_quantization"],
        "fp8_gemm_backend": facts["fp8_gemm_backend"]["taken"],
        "fp4_gemm_backend": facts["fp4_gemm_backend"]["taken"],
    }


def _formats(lane: Lane) -> list[str]:
    """One entry if all layers are alike."""
    formats = [f"{k}/{v}" for k, v in lane.layers]
    return formats[:1] if len(set(formats)) == 1 else formats


def _of_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], part: str
) -> Iterator[tuple[str, str, str]]:
    """Path and values of whatever is not the same in this part of two headers."""
    stack = [(part, old.get(part), new.get(part))]
    while stack:
        path, a, b = stack.pop()
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            stack += [(f"{path}.{k}", a.get(k), b.get(k)) for k in sorted({*a, *b}, reverse=True)]
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            stack += [(f"{path}[{i}]", a[i], b[i]) for i in reversed(range(len(a)))]
        else:
            yield path, f"{a!r:.80}", f"{b!r:.80}"


def check_same(
    path: str | os.PathLike[str],
    stored: Mapping[str, Any],
    wanted: Mapping[str, Any],
    parts: Sequence[str],
    way_out: str,
) -> None:
    """Error if the file was begun with other settings, models or another build."""
    wanted = json.loads(json.dumps(wanted))  # tuples are lists in the file
    for part in parts:
        found = [f"{k}: {a} there, {b} now" for k, a, b in differences(stored, wanted, part)]
        if found:
            more = f", and {len(found) - 3} more" if len(found) > 3 else ""
            raise Error(
                f"{os.fspath(path)}: was begun with other {part} ({'; '.join(found[:3])}{more}): "
                f"{way_out}"
            )
