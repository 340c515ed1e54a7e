"""qkv: batch offline inference of large language models, with a choice of KV-cache formats.

import qkv
with qkv.Engine("demo") as engine:
    for output in engine.generate(["The sky is", "Two and two make"]):
        print(output.text)
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ._core import CheckpointError, Error, OutOfPages, UnsupportedError
from .calibration import Scales, calibrate
from .engine import Engine
from .inspection import Inspection, inspect
from .kv_scales import KvScale, KvScaleTable
from .outputs import Completion, Metrics, RequestOutput, Score
from .params import SamplingParams
from .planner import Plan, plan
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from . import hooks, stats, tasks

try:
    __version__ = version("qkv")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "CheckpointError",
    "Completion",
    "Engine",
    "Error",
    "Inspection",
    "KvScale",
    "KvScaleTable",
    "Metrics",
    "OutOfPages",
    "Plan",
    "RequestOutput",
    "SamplingParams",
    "Scales",
    "Score",
    "Tokenizer",
    "UnsupportedError",
    "__version__",
    "calibrate",
    "hooks",
    "inspect",
    "plan",
    "stats",
    "tasks",
]


def __getattr__(name: str) -> Any:
    """qkv.stats, which brings scipy, and what few need are imported when they are asked for."""
    if name in ("hooks", "stats", "tasks"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
