"""Writing a checkpoint: safetensors files of bounded size, one tensor in memory at a time, in a
folder that appears whole or not at all."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .layouts import Bytes, Stored

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8


@dataclass(frozen=True)
class Piece:
    """Tensors that are made together."""

    tensors: Sequence[Stored]
    make: Callable[[], Sequence[Bytes]]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


@contextmanager
def new_folder(out: Path, n_bytes: int) -> Iterator[Path]:
    """A folder to fill, which becomes `out` at the end; whatever happens, nothing else is left.
    OSError: `out` is there already and not empty, or the disk has no room for `n_bytes`."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise FileExistsError(
            errno.EEXIST, "it is there already, and is not an empty folder", str(out)
        )
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if n_bytes > free:
        raise OSError(errno.ENOSPC, f"{n_bytes} bytes are needed, {free} are free", str(out))
    part = parent / f".{out.name}.part-{os.getpid()}"
    part.mkdir()
    try:
        yield part
        _sync(part)
        os.rename(part, out)
        _sync(parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    write_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_shards(
    folder: Path, pieces: Sequence[Piece], *, mlx: bool, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """The files' names. With more than one, there is an index, too."""
    shards = _cut(pieces, shard_bytes)
    names = [
        "model.safetensors"
        if len(shards) == 1
        else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    for name, shard in zip(names, shards, strict=True):
        _write(folder / name, shard, mlx)
    if len(shards) > 1:
        weight_map = {
            tensor.name: name
            for name, shard in zip(names, shards, strict=True)
            for piece in shard
            for tensor in piece.tensors
        }
        total = sum(piece.n_bytes for piece in pieces)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return names


def _cut(pieces: Sequence[Piece], shard_bytes: int) -> list[list[Piece]]:
    shards: list[list[Piece]] = [[]]
    held = 0
    for piece in pieces:
        if shards[-1] and held + piece.n_bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(piece)
        held += piece.n_bytes
    return shards


def _write(path: Path, shard: Sequence[Piece], mlx: bool) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx" if mlx else "pt"}}
    at = 0
    for piece in shard:
        for tensor in piece.tensors:
            end = at + tensor.n_bytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in shard:
            for tensor, array in zip(piece.tensors, piece.make(), strict=True):
                if array.nbytes != tensor.n_bytes:
                    raise AssertionError(f"{tensor}: {array.nbytes} bytes")
                file.write(array.data)
        file.flush()
        os.fsync(file.fileno())
