"""Load as users cause it: how fast, how late, who waits, and where a cliff is."""

from .figures import Figures, Targets
from .report import Bench, Cell
from .simulate import CostModel, Machine
from .sweeps import bench

__all__ = ["Bench", "Cell", "CostModel", "Figures", "Machine", "Targets", "bench"]
