"""KV scales that other projects' tools wrote: exactly the values in the file are applied.

The weights of these checkpoints are FP8, which this version does not run, so each is copied with
its weights as plain bf16 ones; the scales, and the names they have, stay as the tools wrote them.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from qkv import _core
from ref import make_tiny

FIXTURES = {
    "ct-fp8-static-kv-llama-g": ("k_scale", "v_scale"),
    "fp8-static-autofp8-llama-g": ("k_proj.output_scale", "v_proj.output_scale"),
    "quark-fp8-kv8-llama-g": ("k_proj.output_scale", "v_proj.output_scale"),
}
SMALL: dict[str, Any] = {"threads": 1, "kv_tokens": 256, "max_running": 4}
F32 = NDArray[np.float32]


def e4m3(codes: NDArray[np.uint8]) -> F32:
    """OCP 8-bit floating point, 4 bits of exponent with bias 7."""
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(np.int32) - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), normal)
    return np.where(codes >> 7, -value, value).astype(np.float32)


def read(path: Path) -> dict[str, F32]:
    """Tensors as float32; FP8 ones as their codes' values."""
    data = path.read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    found: dict[str, F32] = {}
    for name, entry in header.items():
        begin, end = (8 + n + at for at in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            values = make_tiny.bf16_values(np.frombuffer(raw, "<u2"))
        elif entry["dtype"] == "F32":
            values = np.frombuffer(raw, "<f4")
        else:
            assert entry["dtype"] == "F8_E4M3", entry
            values = e4m3(np.frombuffer(raw, np.uint8))
        found[name] = values.reshape(entry["shape"])
    return found


def plain_copy(source: Path, target: Path) -> dict[str, float]:
    """Writes the model with bf16 weights and the cache's scales; returns the scales."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    tensors = read(source / "model.safetensors")
    kept, scales = {}, {}
    for name, values in tensors.items():
        if name.endswith((".input_scale", ".weight_scale")):
            continue
        if name.endswith(("k_scale", "v_scale", "output_scale")):
            scales[name] = float(values.reshape(-1)[0])
        weight_scale = tensors.get(f"{name}_scale")
        kept[name] = values if weight_scale is None else values * weight_scale.reshape(-1)[0]
    make_tiny.write_safetensors(
        target / "model.safetensors", kept, dict.fromkeys(scales, "F32")
    )  # float32 holds what bf16 says
    return scales


@pytest.mark.parametrize("name", FIXTURES)
def test_values_in_the_file_are_applied(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    scales = plain_copy(fixtures_dir / name, tmp_path / "m")
    names = [f"model.layers.{i}.self_attn.{end}" for i in range(2) for end in FIXTURES[name]]
    assert sorted(scales) == sorted(names) and len(set(scales.values())) > 1
    expected = np.array([scales[n] for n in names], np.float32).reshape(2, 2)
    checkpoint = _core.Checkpoint(str(fixtures_dir / name))
    listed = checkpoint.kv_scales()
    checkpoint.close()
    assert [(layer, kind, tensor) for layer, kind, tensor, _ in listed] == [
        (i // 2, "kv"[i % 2], n) for i, n in enumerate(names)
    ]
    assert np.array_equal(np.concatenate([values for *_, values in listed]), expected.reshape(-1))

    formats: list[Any] = ["bf16", "fp8_e4m3", {"default": "fp8_e4m3", "k": "bf16"}, "mxfp8"]
    with qkv.Engine(tmp_path / "m", kv_cache_dtype=formats, **SMALL) as engine:
        outputs = engine.score([[5, 6, 7, 8] * 8], progress=False)
        assert outputs[0].error is None
        table = engine.kv_scales()
        used = [engine._core.kv_scales(lane) for lane in range(4)]
    assert np.array_equal(used[1], np.broadcast_to(expected[..., None], used[1].shape))
    assert (used[0] == 1).all() and (used[3] == 1).all()
    assert (used[2][:, 0] == 1).all() and np.array_equal(used[2][:, 1, 0], expected[:, 1])
    reasons = {"bf16": "bf16 cache", "mxfp8": "block exponents only", "fp8_e4m3": ""}
    assert len(table) == 4 * 4
    for row in table:
        assert row.source in names and row.values == (scales[row.source],)
        assert row.reason == reasons[row.format] and row.applied == (row.format == "fp8_e4m3")


@pytest.mark.parametrize("name", FIXTURES)
def test_copies_without_a_scale_fail(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "m"
    scales = plain_copy(fixtures_dir / name, model)
    tensors = read(model / "model.safetensors")
    victim = f"model.layers.1.self_attn.{FIXTURES[name][0]}"
    value = tensors.pop(victim)
    changes: dict[str, dict[str, F32]] = {
        "none for K": {},
        "layers.2": {victim.replace("layers.1", "layers.2"): value},
        "mlp": {"model.layers.1.mlp.k_scale": value},
        "k_sacle": {"model.layers.1.self_attn.k_sacle": value},
    }
    for words, change in changes.items():
        if words == "k_sacle":  # and the others are whole
            change = {victim: value, **change}
        kinds = dict.fromkeys([*scales, *change], "F32")
        make_tiny.write_safetensors(model / "model.safetensors", tensors | change, kinds)
        for kv in ("fp8_e4m3", "bf16"):
            with pytest.raises(qkv.CheckpointError, match=words):
                qkv.Engine(model, kv_cache_dtype=kv, **SMALL)


def test_a_scale_in_a_gguf_file_is_an_error(tmp_path: Path) -> None:
    """The format has no names for them: whatever looks like one binds to nothing."""
    for name in ("blk.0.attn_k.k_scale", "model.layers.0.self_attn.k_scale"):
        spoilt = tmp_path / "s.gguf"
        add_gguf_tensor(spoilt, name)
        with pytest.raises(qkv.CheckpointError, match=name):
            qkv.Engine(spoilt, kv_cache_dtype="fp8_e4m3", **SMALL)


def add_gguf_tensor(path: Path, name: str) -> None:
    """The tiny llama with one more tensor."""
    write = make_tiny.write_gguf_file

    def and_one(
        path: Path, meta: Any, tensors: list[tuple[str, tuple[int, ...], str, bytes]]
    ) -> None:
        write(path, meta, [*tensors, (name, (1,), "F32", struct.pack("<f", 0.5))])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_tiny, "write_gguf_file", and_one)
        make_tiny.write_gguf(path, "llama", types="F16")
