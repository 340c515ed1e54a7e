"""How a checkpoint's weights are stored: found from its files, without a flag."""

from .detection import Detected, detect
from .methods import METHODS, Method, table

__all__ = ["METHODS", "Detected", "Method", "detect", "table"]
