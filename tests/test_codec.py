"""The scalar codecs give gguf-py's values bit for bit: recorded blocks, and whole fixture files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from codec_blocks import LAYOUTS, digest_of, hashed_blocks
from qkv import _core

DATA = Path(__file__).parent / "data" / "codec_blocks.npz"
DIGESTS = json.loads((Path(__file__).parent / "data" / "codec_digests.json").read_text())
ENCODED = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
READ_ONLY = ["Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
READ_ONLY += ["IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]
FORMATS = [*ENCODED, *READ_ONLY]
GGUFS = ["gguf-mixed-llama-g", "gguf-q4_k_m-llama-g"]


def assert_same_bits(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert got.dtype == np.float32 and got.size == expected.size
    assert np.array_equal(got.reshape(-1).view(np.uint32), expected.reshape(-1).view(np.uint32))


def test_every_codec_is_recorded() -> None:
    assert sorted(name for name, has_codec in _core.formats() if has_codec) == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_recorded_blocks(name: str) -> None:
    with np.load(DATA) as recorded:
        blocks, values = recorded[f"{name}_blocks"], recorded[f"{name}_values"]
    assert_same_bits(_core.dequantize(name, np.ascontiguousarray(blocks).reshape(-1)), values)


@pytest.mark.parametrize("name", LAYOUTS)
def test_digests(name: str) -> None:
    """Enough blocks that every entry of a grid is in them."""
    blocks = hashed_blocks(name, DIGESTS["n_blocks"])
    assert digest_of(_core.dequantize(name, blocks.reshape(-1))) == DIGESTS[name]


@pytest.mark.parametrize("name", ENCODED)
def test_quantized_values_come_back(name: str) -> None:
    """The coarsest formats have 15 steps over a block's range of about 4.5: steps of 0.3, which put
    the numbers off by 0.3 / sqrt(12) = 0.087. What a narrow float holds is found again exactly."""
    with np.load(DATA) as recorded:
        blocks = np.ascontiguousarray(recorded[f"{name}_blocks"]).reshape(-1)
    rng = np.random.default_rng(3)
    x = rng.standard_normal(1024).astype(np.float32)
    once = _core.dequantize(name, _core.quantize(name, x))
    assert np.sqrt(np.mean((once - x) ** 2)) < 0.1
    if name in ("F32", "F16", "BF16"):
        assert np.array_equal(_core.quantize(name, _core.dequantize(name, blocks)), blocks)


def test_unknown_and_uncoded_formats_are_refused() -> None:
    for name, n_bytes in (("Q8_1", 36), ("Q8_K", 292)):
        with pytest.raises(_core.UnsupportedError, match=name):
            _core.dequantize(name, np.zeros(n_bytes, np.uint8))
    for name in READ_ONLY:
        with pytest.raises(_core.UnsupportedError, match=f"{name} has no encoder"):
            _core.quantize(name, np.zeros(256, np.float32))
    with pytest.raises(ValueError, match="Q9_9"):
        _core.dequantize("Q9_9", np.zeros(66, np.uint8))
    with pytest.raises(ValueError, match=r"Q4_0"):
        _core.dequantize("Q4_0", np.zeros(17, np.uint8))


def expected_views(
    name: str, values: NDArray[np.float32], recorded: dict[str, NDArray[np.generic]]
) -> int:
    """Checks a tensor against all that is recorded of it; returns how much that was."""
    rows = values.reshape(-1, values.shape[-1])
    n_checked = 0
    for key, got in ((name, values), (f"{name}|rows_first64", rows[:64])):
        if key in recorded:
            assert_same_bits(got, recorded[key].astype(np.float32))
            n_checked += 1
    if f"{name}|rows_last16" in recorded:
        assert_same_bits(rows[-16:], recorded[f"{name}|rows_last16"].astype(np.float32))
        n_checked += 1
    if f"{name}|sha256" in recorded:
        assert digest_of(values) == str(recorded[f"{name}|sha256"])
        n_checked += 1
    return n_checked


@pytest.mark.parametrize("case", GGUFS)
def test_fixture_file(fixtures_dir: Path, case: str) -> None:
    with np.load(fixtures_dir / case / "dequant.npz") as archive:
        recorded = dict(archive)
    checkpoint = _core.Checkpoint(str(fixtures_dir / case / f"{case}.gguf"))
    present, checked = set(), set()
    for name, format_name, shape, _ in checkpoint.tensors():
        values = checkpoint.dequantize(name)
        assert values.shape == shape
        present.add(format_name)
        if expected_views(name, values, recorded):
            checked.add(format_name)
    checkpoint.close()
    assert checked == present - {"F32"}


@pytest.mark.parametrize(
    ("name", "dim", "n_bytes"),
    [
        ("bf16", 128, 256),
        ("bfloat16", 0, 0),
        ("fp8_e4m3", 80, 80),
        ("fp8_e5m2", 128, 128),
        ("mxfp8", 128, 132),
        ("mxfp8", 33, 33 + 2),
        ("nvfp4", 128, 64 + 8),
        ("fp4_mx_block16", 576, 324),
        ("fp4_mx_block16", 17, 9 + 2),
    ],
)
def test_bytes_of_a_kv_row(name: str, dim: int, n_bytes: int) -> None:
    assert _core.kv_row_bytes(name, dim) == n_bytes


def test_bytes_of_no_kv_row() -> None:
    with pytest.raises(ValueError, match="fp7"):
        _core.kv_row_bytes("fp7", 1)
    with pytest.raises(ValueError, match="-1"):
        _core.kv_row_bytes("bf16", -1)


def test_packed_bytes() -> None:
    """Panels of 32 rows, codes of 4 bits for Q4_0 with a scale of 2 bytes for each 32 of them."""
    assert _core.packed_bytes("BF16", 64, 256) == 2 * 64 * 256
    assert _core.packed_bytes("BF16", 64, 256, True) == 4 * 64 * 256
    assert _core.packed_bytes("Q4_0", 64, 256) == 64 * (128 + 2 * 8)
    assert _core.packed_bytes("Q5_0", 64, 256) == 64 * (160 + 2 * 8)
    assert _core.packed_bytes("Q5_0", 64, 256, False, True) == 64 * (256 + 2 * 8)
    for name, n_out, k_in in (("fp7", 1, 32), ("Q4_0", 0, 32), ("Q4_0", 1, 33), ("Q8_K", 1, 256)):
        with pytest.raises(ValueError, match=name):
            _core.packed_bytes(name, n_out, k_in)
