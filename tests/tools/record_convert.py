"""Records what the formats' own tools read in the checkpoints that `qkv convert` writes:
tests/data/convert.json.

  record_convert.py ct     needs torch, transformers, compressed-tensors; not needed by the tests
  record_convert.py mlx    needs mlx

For each case, a way to convert one tiny model: the digest of the file that qkv writes, of the
values that qkv reads in it, and how far the tool's values, computed in float32, are from those:
"same" bits, or units in the last place. Scales in bf16 are widened first, for the tools multiply in
the type of the scales. The tests then need the file and qkv's values alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
OUT = ROOT / "tests/data/convert.json"
# More than one block of 128 in every row: compressed-tensors guesses the strategy from the scales'
# shape, and takes [2, 1] for scales of rows.
SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512}
CASES = {
    "ct": (
        "fp8", "fp8_channel", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "w8a8_int8", "int8", "int4",
        "int4 32",
    ),
    "mlx": ("mlx_q4", "mlx_q8", "mlx_q4 32"),
}  # fmt: skip
Values = dict[str, "np.ndarray[Any, Any]"]


def write_source(folder: Path) -> None:
    from ref import make_tiny  # noqa: PLC0415

    make_tiny.write(folder, "llama", seed=12, **SHAPE)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def values_digest(values: Values) -> str:
    together = hashlib.sha256()
    for name in sorted(values):
        together.update(np.ascontiguousarray(values[name], "<f4").tobytes())
    return together.hexdigest()


def convert(folder: Path, out: Path, case: str) -> None:
    from qkv.quantization.convert import convert as run  # noqa: PLC0415

    name, _, group = case.partition(" ")
    run(folder, out, name, group_size=int(group) if group else None)


def read(folder: Path) -> Values:
    """What qkv reads: every quantized weight."""
    from qkv import _core  # noqa: PLC0415
    from qkv.quantization import detect  # noqa: PLC0415
    from qkv.quantization.wire import to_core  # noqa: PLC0415

    checkpoint = _core.Checkpoint(str(folder))
    described = detect(checkpoint).matrices
    matrices, arrays = to_core(described)
    hidden, ffn = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    shapes = {
        "k_proj": (hidden // 2, hidden), "v_proj": (hidden // 2, hidden),
        "gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn),
        "embed_tokens": (512, hidden), "lm_head": (512, hidden),
    }  # fmt: skip
    found = {}
    for weight in described:
        shape = shapes.get(weight.split(".")[-2], (hidden, hidden))
        found[weight] = checkpoint.matrix(weight, shape, matrices, arrays)
    checkpoint.close()
    return found


def read_ct(folder: Path) -> Values:
    import torch  # noqa: PLC0415
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415
    from compressed_tensors.compressors.nvfp4.helpers import (  # noqa: PLC0415
        unpack_fp4_from_uint8,
    )
    from compressed_tensors.quantization import QuantizationConfig  # noqa: PLC0415
    from compressed_tensors.quantization.lifecycle.forward import dequantize  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(3, 35)[None]).logits).all()
    config = QuantizationConfig.model_validate(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name in tensors:
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix("weight_scale")
        state = {
            key.removeprefix(module): value.float() if value.dtype == torch.bfloat16 else value
            for key, value in tensors.items()
            if key.startswith(module)
        }
        if "weight_global_scale" in state:  # the compressor would give bf16
            packed = state["weight_packed"]
            values = dequantize(
                unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1]).float(),
                state["weight_scale"].float(),
                global_scale=state["weight_global_scale"],
            )
        else:
            values = compressor.decompress(state, scheme)["weight"]
        found[f"{module}weight"] = values.float().numpy()
    return found


def read_mlx(folder: Path) -> Values:
    import mlx.core as mx  # noqa: PLC0415

    section = json.loads((folder / "config.json").read_text())["quantization"]
    tensors = mx.load(str(folder / "model.safetensors"))
    found = {}
    for name in tensors:
        if name.endswith(".scales"):
            module = name.removesuffix("scales")
            scales, biases = (
                tensors[module + part].astype(mx.float32) for part in ("scales", "biases")
            )
            values = mx.dequantize(
                tensors[f"{module}weight"], scales, biases, section["group_size"], section["bits"]
            )
            found[f"{module}weight"] = np.array(values)
    return found


def distance(ours: Values, theirs: Values) -> str:
    """In units of the last place, the most of all elements."""
    assert sorted(ours) == sorted(theirs)
    most = 0
    for name, a in ours.items():
        b = theirs[name]
        assert a.shape == b.shape and np.isfinite(b).all(), name
        same_sign = (np.signbit(a) == np.signbit(b)) | (a == b)
        assert same_sign.all(), name
        bits = np.abs(a).view(np.int32).astype(np.int64) - np.abs(b).view(np.int32)
        most = max(most, int(np.abs(bits).max()))
    return "same" if most == 0 else f"{most} ulp"


def main() -> None:
    kind = sys.argv[1]
    recorded = json.loads(OUT.read_text()) if OUT.exists() else {"tools": {}, "cases": {}}
    tools = {"ct": ("torch", "transformers", "compressed-tensors"), "mlx": ("mlx",)}[kind]
    from importlib.metadata import version  # noqa: PLC0415

    recorded["tools"] |= {name: version(name) for name in tools}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write_source(source)
        for i, case in enumerate(CASES[kind]):
            out = Path(folder) / str(i)
            convert(source, out, case)
            ours = read(out)
            theirs = read_ct(out) if kind == "ct" else read_mlx(out)
            recorded["cases"][case] = {
                "file": digest(out),
                "values": values_digest(ours),
                "tool": distance(ours, theirs),
            }
            print(case, recorded["cases"][case]["tool"], flush=True)
    OUT.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
