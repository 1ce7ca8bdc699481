"""Write files atomically, and name the file in errors of the operating system."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

PACKED: Final = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ\x00": ("xz", "unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}


def packed_as(path: str | Path, start: bytes) -> str:
    """Return how a file with these first bytes is compressed, and how to unpack it; "" if it is not."""
    for magic, (name, command) in PACKED.items():
        if start.startswith(magic):
            return f"{path} is compressed with {name}. Unpack it first: {command} {shlex.quote(str(path))}"
    return ""


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in every OSError of this block: the error of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename == str(path):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces the one at a path once it is completely on the disk.

    If the block raises or the disk is full, the file at the path is unchanged. A path that is not a regular
    file, such as /dev/stdout, is written directly.

    Raises:
        OSError: naming the path.
    """
    target = Path(os.path.realpath(path))  # a symbolic link stays, and its target is replaced
    if target.exists() and not target.is_file():
        with naming(path), target.open("wb") as file:
            yield file
        return
    unfinished = target.with_name(f".{target.name[:200]}.{os.getpid()}.unfinished")
    try:
        with naming(path):
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                shutil.copymode(target, unfinished)
            os.replace(unfinished, target)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
