"""Files that outlive a crash: one writer, whole lines, and replaced at once or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from ._core import Error


def open_locked(path: Path) -> IO[bytes]:
    """Opens (and makes) a file to read it and append to it, for this process alone: the lock goes
    with the process, however it ends. Error if another one has it. Unbuffered: what could not be
    written is not tried again when the file is closed."""
    if path.exists() and not path.is_file():
        raise Error(f"{path}: not a regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = open(path, "a+b", buffering=0)  # noqa: SIM115 - kept open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own = os.fstat(file.fileno())
            with suppress(FileNotFoundError):
                if os.path.samestat(own, path.stat()):
                    return file
        except OSError as error:
            file.close()
            busy = isinstance(error, BlockingIOError)
            reason = "another process is writing to it" if busy else f"no lock: {error.strerror}"
            raise Error(f"{path}: {reason}") from None
        file.close()  # another process took the file away before it was locked


def append(file: BinaryIO | IO[bytes], data: bytes) -> None:
    """Writes all of it at the end of an unbuffered file. What a full disk took of it is cut off
    again, so that lines stay whole; OSError then."""
    size = os.fstat(file.fileno()).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:  # of a signal, too
        with suppress(OSError):
            file.truncate(size)
        raise


def sync_folder(path: Path) -> None:
    """Makes what was created or renamed in the folder of `path` outlive the machine."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _fresh(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def remove_unfinished(path: Path) -> None:
    """What a killed process left of a file that was to take the place of `path`."""
    _fresh(path).unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, at once; if it ends with an
    exception the old one stays as it is. Error if it cannot be written."""
    fresh = _fresh(path)
    try:
        with open(fresh, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException as error:
        with suppress(OSError):
            fresh.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise Error(f"{path}: {reason}; what was there is as it was") from error
        raise
    sync_folder(path)
