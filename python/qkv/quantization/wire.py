"""Descriptions of quantized weights as the C core takes them: JSON, and arrays beside it."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_core(
    matrices: Mapping[str, Mapping[str, Any]],
) -> tuple[str, dict[str, NDArray[np.float32]]]:
    """The text for `_core.Engine(matrices=)` and the arrays for `arrays=`: arrays that stand in
    the descriptions are replaced by names."""
    arrays: dict[str, NDArray[np.float32]] = {}

    def replace(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"array {len(arrays)}"
            arrays[name] = np.ascontiguousarray(value, np.float32)
            return name
        if isinstance(value, Mapping):
            return {key: replace(item) for key, item in value.items()}
        return value

    return json.dumps({name: replace(matrix) for name, matrix in matrices.items()}), arrays
