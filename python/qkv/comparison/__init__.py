"""qkv.compare: one model, or several, under several KV formats, on the same items."""

from .compare import Comparison, compare

__all__ = ["Comparison", "compare"]
