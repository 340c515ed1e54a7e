"""qkv: batch offline inference of large language models, with a choice of KV-cache formats.

import qkv
with qkv.Engine("demo") as engine:
    for output in engine.generate(["The sky is", "Two and two make"]):
        print(output.text)
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from . import dataset
from ._core import CheckpointError, Error, OutOfPages, UnsupportedError
from .calibration import Scales, calibrate
from .dataset import run_dataset
from .engine import Engine
from .inspection import Inspection, inspect
from .kv_scales import KvScale, KvScaleTable
from .outputs import Completion, Metrics, RequestOutput, Score
from .params import SamplingParams
from .planner import Plan, plan
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from . import benchmark, comparison, hooks, stats, tasks
    from .benchmark import Bench, CostModel, Machine, Targets, bench
    from .comparison.compare import Comparison, compare

try:
    __version__ = version("qkv")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Bench",
    "CheckpointError",
    "Comparison",
    "Completion",
    "CostModel",
    "Engine",
    "Error",
    "Inspection",
    "KvScale",
    "KvScaleTable",
    "Machine",
    "Metrics",
    "OutOfPages",
    "Plan",
    "RequestOutput",
    "SamplingParams",
    "Scales",
    "Score",
    "Targets",
    "Tokenizer",
    "UnsupportedError",
    "__version__",
    "bench",
    "benchmark",
    "calibrate",
    "compare",
    "comparison",
    "dataset",
    "hooks",
    "inspect",
    "plan",
    "run_dataset",
    "stats",
    "tasks",
]


def __getattr__(name: str) -> Any:
    """What brings scipy is imported when it is asked for."""
    if name in ("benchmark", "comparison", "hooks", "stats", "tasks"):
        return import_module(f".{name}", __name__)
    if name in ("Comparison", "compare"):
        return getattr(import_module(".comparison", __name__), name)
    if name in ("Bench", "CostModel", "Machine", "Targets", "bench"):
        return getattr(import_module(".benchmark", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
