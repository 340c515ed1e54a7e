"""What the tests share: fixture checkpoints, tiny models, real models where they are."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from ref import make_tiny  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run what takes long")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and so would every test of Ctrl-C be."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    skip = pytest.mark.skip(reason="only with --soak (make soak)")
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(skip)


def find_fixtures() -> Path | None:
    """QKV_FIXTURES (a folder or the archive), else the archive beside the checkout."""
    given = os.environ.get("QKV_FIXTURES")
    path = Path(given) if given else ROOT.parent / "shared/fixtures/fixtures.tar.xz"
    if given and not path.exists():
        raise pytest.UsageError(f"QKV_FIXTURES={given}: not there")
    return path if path.exists() else None


@pytest.fixture(scope="session")
def fixtures_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that other projects' tools wrote, with expected values. The archive is unpacked
    once into build/, and again only when another archive lies there."""
    path = find_fixtures()
    if path is None:
        pytest.skip("no fixtures: neither QKV_FIXTURES nor ../shared/fixtures/fixtures.tar.xz")
    if path.is_dir():
        return path
    out = ROOT / "build" / f"fixtures-{path.stat().st_size}"
    if not out.exists():
        fresh = out.with_name(f"{out.name}.{os.getpid()}")
        fresh.mkdir(parents=True)
        with tarfile.open(path) as archive:
            archive.extractall(fresh, filter="data")
        try:
            fresh.rename(out)
        except OSError:  # another run was faster
            shutil.rmtree(fresh)
    return next(p.parent for p in sorted(out.rglob("MANIFEST.json")))


@pytest.fixture(scope="session")
def cuda_emulated() -> str:
    """The path of the CUDA backend whose kernels run on the processor; built if it is not new."""
    if shutil.which("g++") is None:
        pytest.skip("no g++, which builds the emulated CUDA backend")
    tool = ROOT / "tests/tools/cuda_build.py"
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build/cuda_emulated.lock", "w") as lock:  # other workers want it, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([sys.executable, tool, "--emulated"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(ROOT / "python/qkv/_qkv_cuda_emulated.so")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny("llama", seed=1, num_hidden_layers=1): the folder of a random model, made once."""
    made: dict[str, Path] = {}

    def make(arch: str, **options: Any) -> Path:
        key = repr((arch, sorted(options.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(arch)
            make_tiny.write(made[key], arch, **options)
        return made[key]

    return make


@pytest.fixture
def edited(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """edited(edit, dtype): the folder of tiny("llama"), its tensors as edit() leaves them."""

    def make(edit: Callable[[dict[str, Any]], None], dtype: str = "BF16") -> Path:
        folder = tmp_path / "model"
        shutil.copytree(tiny("llama"), folder)
        tensors = make_tiny.make_tensors(json.loads((folder / "config.json").read_text()), 0)
        edit(tensors)
        make_tiny.write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder

    return make


def real_model(file_name: str, how: str) -> Path:
    """A model file in QKV_MODELS or in the user's cache folder; a skip that says how to get it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qkv"
    folders = [Path(p) for p in os.environ.get("QKV_MODELS", "").split(os.pathsep) if p]
    for folder in [*folders, cache]:
        found = sorted(folder.rglob(file_name)) if folder.is_dir() else []
        if found:
            return found[0]
    pytest.skip(f"{file_name} is not there: {how}")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return real_model("SmolLM2-135M-Instruct.Q4_1.gguf", "`qkv demo-model` brings it")


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    return real_model("gemma-3-270m-q4_k_m.gguf", "`make soak-models` brings it")


@pytest.fixture(scope="session")
def qwen_model() -> Path:
    return real_model("qwen2.5-coder-0.5b.gguf", "`make soak-models` brings it")


@pytest.fixture(scope="session")
def coder_model() -> Path:
    return real_model("qwen2.5-coder-1.5b.gguf", "`make soak-models` brings it")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test may reach a hub: what it would have loaded from there is an error at once."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
