"""What a user gets: the source archive holds every source and nothing built, and the wheel made
from it works in a clean environment."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
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


@pytest.mark.slow
def test_wheel_works_in_a_clean_environment(
    sdist: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = next(p for p in tmp_path.iterdir() if p.is_dir())
    pip = [sys.executable, "-m", "pip", "-q"]
    flags = ["--no-deps", "--no-build-isolation"]
    run([*pip, "wheel", *flags, "-w", str(tmp_path), str(source)], tmp_path)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"qkv/py.typed", "qkv/_core.pyi", "qkv/cli/__init__.py"} <= set(names)
    assert {"qkv_lm_eval_hook.py", "qkv_lm_eval.pth"} <= set(names)
    assert sum(name.endswith(".so") for name in names) == 1
    assert not [name for name in names if name.startswith(("csrc", "kernels", "tests"))]

    # The dependencies are those of this environment; qkv itself comes from the wheel alone.
    target = tmp_path / "site"
    run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import qkv\n"
        f"assert qkv.__file__.startswith({str(target)!r}), qkv.__file__\n"
        "engine = qkv.Engine(sys.argv[1], threads=1, kv_tokens=256)\n"
        "params = qkv.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)\n"
        "print(len(engine.generate([[1, 2, 3]], params, progress=False)[0].token_ids))\n"
    )
    assert run([sys.executable, "-c", code, str(tiny("llama"))], tmp_path).strip() == "3"
