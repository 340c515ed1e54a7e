"""How far each fixture's log-probabilities lie from the values that came with it: the table of
FORMATS.md.

    python tests/tools/format_distances.py FIXTURES [NAME ...]

bf16: the engine's bf16 arithmetic against the float32 reference, without quantized activations.
activations: what they change in the reference of the tool itself, and how far the engine, with
activations (and the KV cache) as the checkpoint prescribes, is from that reference in float32 and
in bf16."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qkv

Values = NDArray[np.float64]
ACTIVATIONS = ("expected_actquant.npz", "expected_fakequant_bf16.npz")


def recorded(path: Path, n_prompts: int) -> Values:
    stored = np.load(path)
    parts = [stored[f"p{i}_prompt_logprobs"].astype(np.float64) for i in range(n_prompts)]
    return np.concatenate(parts)


def prompts_of(folder: Path) -> list[list[int]]:
    return [row["ids"] for row in json.loads((folder / "prompts.json").read_text())]


def tool_values(folder: Path) -> Path | None:
    """What the tool itself gives with quantized activations, if that was recorded."""
    return next((folder / name for name in ACTIVATIONS if (folder / name).exists()), None)


def measured(path: Path, prompts: list[list[int]], **options: Any) -> Values:
    sizes: dict[str, Any] = {"threads": 1, "kv_tokens": 4096, "max_model_len": 512}
    with qkv.Engine(path, **sizes, **{"kv_cache_dtype": "bf16", **options}) as engine:
        scores = engine.score(prompts, progress=False)
    return np.concatenate([score.token_logprobs.astype(np.float64) for score in scores])


def as_prescribed(folder: Path, compute_dtype: str) -> Values:
    """Of the engine, with activations and cache as the checkpoint has them. Where it declares no
    format for the cache the tool had none: a cache in bf16 moves enough codes to hide the rest."""
    declared = qkv.inspect(folder).kv_auto
    return measured(
        folder,
        prompts_of(folder),
        activation_quant="checkpoint",
        kv_cache_dtype="auto" if declared == "bf16" else declared,
        compute_dtype=compute_dtype,
    )


def distance(a: Values, b: Values) -> str:
    off = np.abs(a - b)
    return f"{off.max():.4f} ({off.mean():.4f})"


def rows(fixtures: Path, names: list[str]) -> Iterator[tuple[str, ...]]:
    """Of the fixtures of these names, or of all."""
    for folder in sorted(fixtures.iterdir()):
        model = next(folder.glob("*.gguf"), folder)
        wanted = not names or folder.name in names
        if not wanted or not (folder / "expected.npz").exists():
            continue
        prompts = prompts_of(folder)
        try:
            bf16 = measured(model, prompts, activation_quant="off")
        except qkv.UnsupportedError:
            continue
        exact = recorded(folder / "expected.npz", len(prompts))
        row = [folder.name, distance(bf16, exact)]
        noise = folder / "expected_bf16.npz"
        row.append(distance(recorded(noise, len(prompts)), exact) if noise.exists() else "")
        tool = tool_values(folder)
        if tool is None:
            yield (*row, "", "", "")
            continue
        target = recorded(tool, len(prompts))
        row.append(distance(target, exact))
        row += [distance(as_prescribed(folder, dtype), target) for dtype in ("float32", "bf16")]
        yield tuple(row)


def main() -> None:
    print("| checkpoint | bf16 | transformers' bf16 | activations | float32, so | bf16, so |")
    print("|---|---|---|---|---|---|")
    for row in rows(Path(sys.argv[1]), sys.argv[2:]):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
