"""Writes csrc/quant/iq_grids.h from the `gguf` package: which magnitudes the IQ types' codes mean.

  pip install gguf==0.19.0 && python tests/tools/make_grids.py > csrc/quant/iq_grids.h

The grids are facts of the file format. An entry is packed: the index of its value i in the type's
list of values has BITS bits from bit BITS * i on.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
from gguf import quants

GRIDS = {"IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 2, "IQ3_XXS": 3, "IQ3_S": 3, "IQ1_S": 2}
PER_LINE = 12


def entries(name: str, bits: int) -> list[int]:
    kind = getattr(quants, name)
    kind.init_grid()
    grid = kind.grid.reshape(kind.grid_shape)
    index = np.abs(grid[..., None] - np.array(kind.grid_map, np.float32)).argmin(axis=-1)
    shifts = bits * np.arange(grid.shape[1])
    return [int(entry) for entry in (index << shifts).sum(axis=1)]


def main() -> None:
    print(
        "/* Written by tests/tools/make_grids.py from gguf-py",
        version("gguf"),
        "(ggml's iq grids):",
    )
    print(
        " * not to be edited. Value i of an entry is number (entry >> BITS * i) & (2^BITS - 1) of"
    )
    print(" * the type's list of values; BITS is 2 and an entry has 8 values, of IQ3 3 and 4. */")
    print("#ifndef QKV_QUANT_IQ_GRIDS_H\n#define QKV_QUANT_IQ_GRIDS_H\n\n#include <stdint.h>")
    for name, bits in GRIDS.items():
        values = entries(name, bits)
        listed = ", ".join(str(int(v)) for v in getattr(quants, name).grid_map)
        print(f"\n/* {listed} */")
        print(f"static const uint16_t {name.lower()}_grid[{len(values)}] = {{")
        for at in range(0, len(values), PER_LINE):
            print("    " + ", ".join(f"0x{v:04x}" for v in values[at : at + PER_LINE]) + ",")
        print("};")
    print("\n#endif")


if __name__ == "__main__":
    main()
