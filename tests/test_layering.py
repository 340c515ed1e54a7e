"""The include order and the completeness of the .def files, and that the checks find breaches."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["check_layers.py", "check_defs.py"])
def test_tree_is_sound(name: str) -> None:
    done = run(ROOT / "tests/tools" / name)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources with their checks, to be broken."""
    for folder in ("csrc", "kernels", "tests/tools", "tests/ref"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("csrc/engine/scheduler.c", '#include "cpu_device.h"', "not a path under csrc/"),
        ("csrc/kv/kv_formats.c", '#include "io/weights.h"', "kv may include"),
        ("csrc/model/model.h", "#include <Python.h>", "csrc/py only"),
        ("csrc/engine/scheduler.c", "#include <time.h>", "hold no clock"),
        ("csrc/engine/waiting.c", '#include "base/os.h"', "hold no clock"),
        ("csrc/base/status.c", "#include <cuda.h>", "kernels/cuda only"),
        ("kernels/cpu/dispatch.c", "#include <immintrin.h>", "intrinsics are for"),
        ("kernels/cpu/dispatch.c", '#include "vec_avx2.h"', "only isa_*.c"),
        ("kernels/cpu/dispatch.c", '#include "engine/request.h"', "kernels see"),
        ("kernels/cpu/body_norm.inc", "static __m512 x;", "intrinsics are for"),
        ("csrc/kv/kv_formats.c", f"/* {'x' * 95} */", "101 columns, at most 100"),
        ("kernels/cpu/vec_scalar.h", "int f(int a)\n{\n    return a;\n}", "is not static"),
    ],
)
def test_a_breach_is_found(copy: Path, file: str, line: str, message: str) -> None:
    target = copy / file
    target.write_text(target.read_text() + "\n" + line + "\n")
    done = run(copy / "tests/tools/check_layers.py")
    assert done.returncode == 1
    assert message in done.stdout and file in done.stdout


def test_a_file_name_is_taken_once(copy: Path) -> None:
    shutil.copy(copy / "csrc/base/status.h", copy / "csrc/model/status.h")
    done = run(copy / "tests/tools/check_layers.py")
    assert done.returncode == 1 and "its file name is taken by" in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        (
            "csrc/quant/formats.def",
            'QKV_FORMAT(N, "N", 32, 18, 99, "", I4, 32, F16, NONE, 1)',
            "N has no case in csrc/quant/codec.c",
        ),
        (
            "csrc/quant/formats.def",
            'QKV_FORMAT(X, "X", 32, 18, 2, "", NONE, 0, NONE, NONE, 1)',
            "the GGUF id 2 stands twice",
        ),
        (
            "csrc/kv/kv_formats.def",
            'QKV_KV_FORMAT(OTHER, "bf16", 16, 0, 0)',
            "the name bf16 stands twice",
        ),
    ],
)
def test_an_incomplete_definition_is_found(copy: Path, file: str, line: str, message: str) -> None:
    target = copy / file
    target.write_text(line + "\n" + target.read_text())
    done = run(copy / "tests/tools/check_defs.py")
    assert done.returncode == 1 and message in done.stdout
