"""Write a loss scale to a file of its own, as its system would load it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from preamp.checks import to_float32
from preamp.errors import MissingExtra, UsageError
from preamp.record.files import replacing
from preamp.systems.definition import Dialect
from preamp.systems.dialects import MEGATRON


def check_name(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is read.

    Raises:
        UsageError: for a file that exists, a folder that does not, or a suffix that is not in `WRITERS`.
    """
    if path.suffix not in WRITERS:
        raise UsageError(
            f"{path} is not a kind of file that can be written. Write {path.with_suffix('.json')}, or "
            ".pt or .msgpack. Keras and TensorFlow save the loss scale with the model: assign the numbers "
            "in the .json to the optimizer, as docs/dialects.md shows."
        )
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder. Make it first.")
    if path.exists():
        raise UsageError(f"{path} exists and is not overwritten. Write another name, or delete it first.")


def write(path: Path, entries: dict[str, Any], dialect: Dialect[...]) -> None:
    """Write all entries, or nothing if that fails.

    Raises:
        MissingExtra: if the library that writes such files is absent.
        OSError: for a file that cannot be written.
    """
    try:
        content = WRITERS[path.suffix](entries, dialect)
    except ImportError as error:
        raise MissingExtra.of(error) from error
    with replacing(path) as file:
        file.write(content)


def _torch(entries: dict[str, Any], dialect: Dialect[...]) -> bytes:
    import torch

    if dialect is MEGATRON:  # it moves the scale to a device when it loads it
        entries = {**entries, "scale": torch.tensor([entries["scale"]])}
    file = io.BytesIO()
    torch.save(entries, file)
    return file.getvalue()


def _json(entries: dict[str, Any], dialect: Dialect[...]) -> bytes:
    return json.dumps(entries, indent=2).encode()


def _msgpack(entries: dict[str, Any], dialect: Dialect[...]) -> bytes:
    import numpy as np
    from flax import serialization

    def array(value: object) -> Any:  # as in training: with Python numbers, jit would compile again
        if type(value) is float:
            return np.float32(value) if to_float32(value) == value else np.float64(value)
        if type(value) is int:
            return np.int32(value) if abs(value) < 2**31 else np.int64(value)
        return value

    return bytes(serialization.msgpack_serialize({name: array(value) for name, value in entries.items()}))


WRITERS = {".pt": _torch, ".json": _json, ".msgpack": _msgpack}
