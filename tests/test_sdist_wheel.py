"""What a user gets: the source archive holds every source and nothing built, and the wheel made
from it works in a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=1200, env=os.environ | env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked_files() -> list[str]:
    """Empty outside a git checkout (the tests of an unpacked source archive)."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    code = (
        "import sys, setuptools.build_meta as backend\n"
        "sys.argv = ['setup.py']\n"
        f"print(backend.build_sdist({str(out)!r}))"
    )
    run([sys.executable, "-c", code], ROOT)
    return next(out.glob("*.tar.gz"))


def test_sdist_holds_the_sources(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    built = [name for name in names if name.endswith((".so", ".o", ".a", ".pyc"))]
    assert not built
    for name in tracked_files():
        if name.startswith(("csrc/", "kernels/", "python/")) or name in ("setup.py", "LICENSE"):
            assert name in names, name


PIP = [sys.executable, "-m", "pip", "-q"]


def build_wheel(sdist: Path, at: Path, **env: str) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(at, filter="data")
    source = next(p for p in at.iterdir() if p.is_dir())
    flags = ["--no-deps", "--no-build-isolation"]
    run([*PIP, "wheel", *flags, "-w", str(at), str(source)], at, **env)
    return next(at.glob("*.whl"))


def install(wheel: Path, at: Path) -> str:
    """Code that takes qkv from the wheel alone; the dependencies are those of this environment."""
    target = at / "site"
    run([*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], at)
    return (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import qkv\n"
        f"assert qkv.__file__.startswith({str(target)!r}), qkv.__file__\n"
    )


GENERATE = """
engine = qkv.Engine(sys.argv[1], threads=1, kv_tokens=256)
params = qkv.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
print(engine.info["device"])
print(len(engine.generate([[1, 2, 3]], params, progress=False)[0].token_ids))
"""


@pytest.mark.slow
def test_wheel_works_in_a_clean_environment(
    sdist: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    wheel = build_wheel(sdist, tmp_path, QKV_CUDA="0")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"qkv/py.typed", "qkv/_core.pyi", "qkv/cli/__init__.py"} <= set(names)
    assert {"qkv_lm_eval_hook.py", "qkv_lm_eval.pth"} <= set(names)
    assert sum(name.endswith(".so") for name in names) == 1
    assert not [name for name in names if name.startswith(("csrc", "kernels", "tests"))]
    code = install(wheel, tmp_path) + GENERATE
    assert run([sys.executable, "-c", code, str(tiny("llama"))], tmp_path).split() == ["cpu", "3"]


@pytest.mark.soak
def test_wheel_with_cuda_where_no_gpu_is(
    sdist: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The library is in it, nothing needs it, and asking for the GPU that is not there is said. Two
    generations are built: what a release has beside them is more of the same code."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    wheel = build_wheel(sdist, tmp_path, QKV_CUDA="1", QKV_CUDA_ARCHS="80,90a")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "qkv/_qkv_cuda.so" in names
    assert sum(name.endswith(".so") for name in names) == 2
    code = install(wheel, tmp_path)
    asked = """
assert qkv.options.backends() == ["cpu", "cuda:0"]
try:
    qkv.Engine(sys.argv[1], device="cuda:0", kv_tokens=256)
except qkv.UnsupportedError as error:
    print(error)
"""
    model = str(tiny("llama"))
    assert run([sys.executable, "-c", code + GENERATE, model], tmp_path).split() == ["cpu", "3"]
    said = run([sys.executable, "-c", code + asked, model], tmp_path)
    assert said.startswith("device cuda:0: no GPU (")
    needed = ["objdump", "-p", str(tmp_path / "site/qkv/_qkv_cuda.so")]
    assert "cublas" not in run(needed, tmp_path) and "libcuda" not in run(needed, tmp_path)
