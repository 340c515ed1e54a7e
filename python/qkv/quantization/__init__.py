"""How a checkpoint's weights are stored: found from its files, without a flag."""

from .detection import Detected, detect
from .methods import METHODS, Method, table
from .packed import counted_forms, forms, notes, summary

__all__ = [
    "METHODS",
    "Detected",
    "Method",
    "counted_forms",
    "detect",
    "forms",
    "notes",
    "summary",
    "table",
]
