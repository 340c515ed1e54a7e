"""Records what gguf-py makes of blocks, for tests/test_codec.py.

  pip install gguf==0.19.0 numpy && python tests/tools/record_codec.py

Writes tests/data/codec_digests.json: per type the sha256 of the values, little-endian float32, of
N_BLOCKS blocks of tests/codec_blocks.py. Adds to tests/data/codec_blocks.npz the blocks and values
of types that it does not have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from codec_blocks import LAYOUTS, digest_of, hashed_blocks  # noqa: E402

N_BLOCKS = 1024
N_KEPT = 4


def main() -> None:
    data = ROOT / "tests/data"
    with np.load(data / "codec_blocks.npz") as archive:
        kept = dict(archive)
    digests: dict[str, object] = {"n_blocks": N_BLOCKS}
    for name in LAYOUTS:
        blocks = hashed_blocks(name, N_BLOCKS)
        values = quants.dequantize(blocks, GGMLQuantizationType[name]).astype(np.float32)
        digests[name] = digest_of(values)
        if f"{name}_blocks" not in kept:
            kept[f"{name}_blocks"] = blocks[:N_KEPT]
            kept[f"{name}_values"] = values.reshape(N_BLOCKS, -1)[:N_KEPT].reshape(-1)
    np.savez_compressed(data / "codec_blocks.npz", **kept)
    (data / "codec_digests.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
