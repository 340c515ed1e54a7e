"""Proves who may include whom, and that no line is too long (clang-format leaves comments alone).
Prints every breach; exit status 1 if there is one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)
# A folder may include itself and what stands here.
MAY_INCLUDE = {
    "base": set(),
    "quant": {"base"},
    "kv": {"base"},
    "io": {"base", "quant"},
    "backend": {"base", "quant", "kv"},
    "model": {"base", "quant", "kv", "io", "backend"},
    "engine": {"base", "quant", "kv", "io", "backend", "model"},
    "py": {"base", "quant", "kv", "io", "backend", "model", "engine"},
}
MAX_COLUMNS = 100
KERNELS_MAY = re.compile(
    r"(backend/(backend|contract|terms)|base/(status|mem|half|threads|log|philox)|quant/\w+|kv/kv_\w+)\.\w+$"
)
# No input or output, no clock, no generator of their own: what they need is handed to them.
PURE = re.compile(r"csrc/(kv/|engine/(scheduler\w*|request|waiting|batch|simulate)\.)")
IMPURE = re.compile(r"^(stdio|time|sys/.*|unistd|fcntl|base/os|base/threads)\.h$")
INTRINSIC = re.compile(r"\b(_mm(256|512)?_\w+|_tile_\w+|__m(128|256|512)[id]?)\b")
ISA_ONLY = re.compile(r"(vec_(avx|amx)\w*\.h|special_\w+\.inc)$")
DEFINITION = re.compile(
    r"^(?!static|typedef|extern|enum|struct \w+ \{)[a-z][\w *]*\([^;]*\)\s*\n\{", re.MULTILINE
)


def files() -> Iterator[Path]:
    for folder in ("csrc", "kernels"):
        yield from sorted(
            p
            for p in (ROOT / folder).rglob("*")
            if p.suffix in (".c", ".h", ".inc", ".def", ".cu", ".cuh")
        )


def includes(path: Path) -> list[tuple[str, bool]]:
    """(what is included, in angle brackets)."""
    return [(name, mark == "<") for mark, name in INCLUDE.findall(path.read_text())]


def breaches_of_file(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT).as_posix()
    folder = name.split("/")[1]
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if len(line) > MAX_COLUMNS and path.suffix != ".def":
            yield f"{name}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"
        if INTRINSIC.search(line) and not ISA_ONLY.search(name):
            yield f"{name}:{number}: intrinsics are for vec_*.h and special_*.inc only"
    for target, is_system in includes(path):
        where = f"{name} includes {target}: "
        if name.startswith("csrc/") and not is_system:
            layer = target.split("/")[0]
            if layer not in MAY_INCLUDE:
                yield where + "not a path under csrc/"
            elif layer != folder and layer not in MAY_INCLUDE[folder]:
                yield where + f"{folder} may include {sorted(MAY_INCLUDE[folder])} only"
        if name.startswith("kernels/") and "/" in target and not is_system:
            if not KERNELS_MAY.match(target):
                yield where + "kernels see the headers of backend, base, quant, KV formats only"
        if target.startswith(("Python.h", "numpy/")) and not name.startswith("csrc/py/"):
            yield where + "Python and NumPy are for csrc/py only"
        if target.startswith(("cuda", "cublas")) and not name.startswith("kernels/cuda/"):
            yield where + "CUDA is for kernels/cuda only"
        if target == "immintrin.h" and not ISA_ONLY.search(name):
            yield where + "intrinsics are for vec_*.h and special_*.inc only"
        if ISA_ONLY.search(target) and not re.search(
            r"/(isa_\w+\.c|vec_(avx|amx)\w*\.h|special_\w+\.inc)$", name
        ):
            yield where + "only isa_*.c may include it"
        if PURE.match(name) and IMPURE.match(target):
            yield where + "scheduling and page bookkeeping do no I/O and hold no clock"


def isa_reachable() -> set[Path]:
    """Headers that any isa_*.c reaches."""
    seen: set[Path] = set()
    todo = sorted((ROOT / "kernels/cpu").glob("isa_*.c"))
    while todo:
        path = todo.pop()
        for target, _ in includes(path):
            for folder in (path.parent, ROOT / "csrc", ROOT / "kernels/cpu"):
                found = folder / target
                if found.is_file() and found.resolve() not in seen:
                    seen.add(found.resolve())
                    todo.append(found.resolve())
    return seen


def breaches() -> Iterator[str]:
    names: dict[str, str] = {}
    for path in files():
        yield from breaches_of_file(path)
        name = path.relative_to(ROOT).as_posix()
        if path.name in names:
            yield f"{name}: its file name is taken by {names[path.name]}"
        names[path.name] = name
    for path in sorted(isa_reachable()):
        for match in DEFINITION.finditer(path.read_text()):
            line = match.group(0).splitlines()[0]
            name = path.relative_to(ROOT).as_posix()
            yield f"{name}: `{line}` is not static; the AVX-512 copy could be linked for all"


if __name__ == "__main__":
    found = list(breaches())
    print("\n".join(found) or "layers: no breach")
    sys.exit(1 if found else 0)
