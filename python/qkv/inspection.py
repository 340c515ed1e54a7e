"""What a checkpoint holds, without loading it."""

import html
import os
from dataclasses import dataclass, field
from typing import Any

from . import _core, kv_scales, models, options, tables
from .quantization import Detected, counted_forms, detect, forms, notes
from .quantization.packed import Forms
from .tokenizer import load_tokenizer


def size(n_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(n_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024.0 or unit == "GiB":
            return f"{n_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024.0
    raise AssertionError("unreachable")


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint in numbers. `problem` says why this version cannot run it, None if it can."""

    path: str
    container: str
    files: list[str]
    n_tensors: int
    n_bytes: int
    left_out: tuple[int, str]  # tensors that are no part of the text model, and the first one
    further: tuple[int, str]  # of layers that predict tokens after the next one: not loaded either
    formats: dict[str, tuple[int, int]]  # weight format -> (tensors, bytes)
    quantization: str = ""  # the method; "" if the weights are plain floats
    quantization_source: str = ""  # which file and key say so
    n_quantized: int = 0  # matrices that are described
    quantized_forms: dict[str, int] = field(default_factory=dict)  # what they become when loaded
    quantization_ignored: dict[str, str] = field(default_factory=dict)  # module -> what excludes it
    quantization_notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)  # empty if there is a problem with it
    kv_bytes_per_token: int | None = None  # with a bf16 cache
    kv_auto: str = "bf16"  # what kv_cache_dtype="auto" takes, and why
    kv_auto_why: str = ""
    # Scales of the KV cache in the files: layer, kind, tensor, values.
    kv_scales: list[tuple[int, str, str, list[float]]] = field(default_factory=list)
    kv_scales_problem: str | None = None  # why loading would refuse them
    tokenizer: str | None = None  # how many tokens, or why there is none
    chat_template: bool = False
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        row = dict(vars(self))
        row["formats"] = {
            name: {"tensors": count, "bytes": n_bytes}
            for name, (count, n_bytes) in self.formats.items()
        }
        row["kv_scales"] = [
            {"layer": layer, "kind": kind, "tensor": tensor, "values": values}
            for layer, kind, tensor, values in self.kv_scales
        ]
        return row

    def _scale_rows(self) -> list[tuple[str, str]]:
        """A row per kind: how many, of which names, over which range."""
        if self.kv_scales_problem is not None:
            return [("KV scales", self.kv_scales_problem)]
        rows = []
        for kind in dict.fromkeys(entry[1] for entry in self.kv_scales):
            found = [entry for entry in self.kv_scales if entry[1] == kind]
            numbers = [value for entry in found for value in entry[3]]
            span = f"{min(numbers):.6g}"
            if min(numbers) != max(numbers):
                span += f" .. {max(numbers):.6g}"
            rows.append((f"  {kind}", f"{len(found)} ({found[0][2]}, ...), {span}"))
        return [("KV scales", f"{len(self.kv_scales)} in the files" if rows else "none"), *rows]

    def scales_table(self) -> str:
        """Every KV scale in the files, a line each; "" if there are none."""
        if not self.kv_scales:
            return ""
        cells = [
            (str(layer), kind, tensor, ", ".join(f"{value:.6g}" for value in values))
            for layer, kind, tensor, values in self.kv_scales
        ]
        return tables.text(("layer", "kind", "tensor", "scale"), cells, left=3)

    def _quantization_rows(self) -> list[tuple[str, str]]:
        if not self.quantization:
            return []
        matrices = f", {self.n_quantized} matrices" if self.n_quantized else ""
        rows = [("quantization", f"{self.quantization}{matrices} ({self.quantization_source})")]
        rows += [(f"  {count}", f"as {form}") for form, count in self.quantized_forms.items()]
        if self.quantization_ignored:
            shown = tables.first(list(self.quantization_ignored))
            rows.append(("  excluded", f"{len(self.quantization_ignored)} modules: {shown}"))
        return rows + [("  note", note) for note in self.quantization_notes]

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("model", self.path)]
        files = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        rows.append(("container", f"{self.container}, {os.path.basename(files)}"))
        if self.problem is not None:
            rows.append(("cannot run", self.problem))
        if self.config:
            config = self.config
            heads = f"{config['n_heads']} heads, {config['n_kv_heads']} for K and V"
            if config["kv_rank"]:
                heads = f"{config['n_heads']} heads, one latent row for K and V"
            rows += [
                ("architecture", str(config["arch"])),
                ("layers", f"{config['n_layers']}, hidden {config['hidden']}, ffn {config['ffn']}"),
                ("attention", f"{heads}, {config['head_dim']} each"),
                ("vocabulary", str(config["vocab"])),
                ("context", f"{config['max_positions']} tokens"),
            ]
        rows.append(("tensors", f"{self.n_tensors}, {size(self.n_bytes)}"))
        if self.left_out[0]:
            others = f"{self.left_out[0]} of other parts than text ({self.left_out[1]}, ...)"
            rows.append(("  not loaded", others))
        if self.further[0]:
            others = f"{self.further[0]} of layers for tokens after the next ({self.further[1]})"
            rows.append(("  not loaded", others))
        for name, (count, n_bytes) in self.formats.items():
            rows.append((f"  {name}", f"{count} tensors, {size(n_bytes)}"))
        rows += self._quantization_rows()
        if self.kv_bytes_per_token is not None:
            rows.append(("bf16 KV cache", f"{size(self.kv_bytes_per_token)} per token"))
        rows.append(("KV cache auto", f"{self.kv_auto}: {self.kv_auto_why}"))
        rows += self._scale_rows()
        rows.append(("tokenizer", self.tokenizer or "none"))
        rows.append(("chat template", "yes" if self.chat_template else "no"))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table>{cells}</table>"


def inspect(model: str | os.PathLike[str]) -> Inspection:
    """Reads the directory of a checkpoint: formats, sizes, architecture. Loads no weight."""
    path = models.resolve(model)
    checkpoint = _core.Checkpoint(path)
    try:
        container, files = checkpoint.container, list(checkpoint.files)
        tensors, left_out = checkpoint.tensors(), checkpoint.left_out
        further = checkpoint.further
        problem: str | None = None
        config: dict[str, Any] = {}
        try:
            config = checkpoint.model_config()
        except _core.Error as error:
            problem = str(error)
        found = Detected(method="", source="")
        packed: Forms = {}
        try:
            found = detect(checkpoint)
            packed = forms(checkpoint, found)
        except _core.Error as error:
            problem = problem or str(error)
        scales, scales_problem = _scales(checkpoint)
        folder = checkpoint.folder
    finally:
        checkpoint.close()
    formats: dict[str, tuple[int, int]] = {}
    for _, name, _, n_bytes in tensors:
        count, total = formats.get(name, (0, 0))
        formats[name] = (count + 1, total + n_bytes)
    if problem is None and not found.matrices:
        missing = sorted(set(formats) - {name for name, has in _core.formats() if has})
        if missing:
            problem = f"no codec for {', '.join(missing)}"
    words, template = _tokenizer(path)
    taken, key = kv_scales.declared(folder) if container != "gguf" else ("", "")
    auto = options.auto_format("bf16", taken)
    return Inspection(
        path=path,
        container=container,
        files=files,
        n_tensors=len(tensors),
        n_bytes=sum(entry[3] for entry in tensors),
        left_out=left_out,
        further=further,
        formats=dict(sorted(formats.items(), key=lambda entry: -entry[1][1])),
        quantization=found.method,
        quantization_source=found.source,
        n_quantized=len(found.matrices),
        quantized_forms=counted_forms(packed),
        quantization_ignored=found.ignored,
        quantization_notes=notes(found, packed),
        config=config,
        kv_bytes_per_token=_kv_bytes(config),
        kv_auto=auto,
        kv_auto_why=kv_scales.auto_reason(auto, key, "bf16"),
        kv_scales=scales,
        kv_scales_problem=scales_problem,
        tokenizer=words,
        chat_template=template,
        problem=problem,
    )


def _scales(
    checkpoint: _core.Checkpoint,
) -> tuple[list[tuple[int, str, str, list[float]]], str | None]:
    try:
        found = checkpoint.kv_scales()
    except _core.Error as error:
        return [], str(error)
    return [
        (layer, kind, tensor, [float(value) for value in values])
        for layer, kind, tensor, values in found
    ], None


def _kv_bytes(config: dict[str, Any]) -> int | None:
    if not config:
        return None
    lanes = options.lanes("bf16", config["n_layers"], compute_dtype="bf16", declared="")
    return options.token_bytes(config, lanes)


def _tokenizer(path: str) -> tuple[str, bool]:
    try:
        tokenizer = load_tokenizer(path)
    except _core.Error as error:
        return f"none: {error}", False
    return f"{tokenizer.vocab_size} tokens", tokenizer.has_chat_template
