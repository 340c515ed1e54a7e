"""Makes `lm_eval --model qkv` work: lm-evaluation-harness has no way to find models of other
packages, so this adds one to its list when it has read its own.

qkv_lm_eval.pth imports this file at every start of Python. So it imports nothing that is not there
already, and costs nothing until somebody imports lm_eval.models. Of an editable install there is no
.pth file; `qkv-lm-eval` does the same without.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from collections.abc import Sequence

_MODULE = "lm_eval.models"
_MODEL = "qkv.integrations.lm_eval:QkvLM"


class _Finder:
    """Finds lm_eval.models as Python does, and nothing else."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    registry = getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)
    # Before 0.4.10 a model cannot be named without being imported.
    if registry is not None and "qkv" not in registry:
        registry.register("qkv", target=_MODEL)


sys.meta_path.insert(0, _Finder)
