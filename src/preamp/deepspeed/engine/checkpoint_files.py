"""The files of an engine's checkpoint.

They are where DeepSpeed puts them: `save_dir/latest` names a tag, and
`save_dir/tag/mp_rank_00_model_states.pt` holds everything. Each is written to a temporary file that is moved
into place when it is complete, so that a save that is killed leaves the previous one intact. Loading executes
no code.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from preamp.errors import CheckpointError

LATEST = "latest"
STATES = "mp_rank_00_model_states.pt"


def write(save_dir: Path, tag: str, state: dict[str, Any], save_latest: bool) -> None:
    """Write a checkpoint into its own folder, and then its tag as the latest."""
    path = save_dir / tag / STATES
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, lambda file: torch.save(state, file))
    if save_latest:
        _replace(save_dir / LATEST, lambda file: file.write(tag.encode()))


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file, and move it into place once it is on the disk."""
    beside = path.with_name(f"{path.name}.unfinished")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Flush the entries of a folder to the disk, where a folder can be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def latest(load_dir: Path) -> str | None:
    """Return the tag of the latest checkpoint, or None if there is none."""
    path = load_dir / LATEST
    try:
        return path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}. Write tag= with a name.") from error


def read(path: Path) -> dict[str, Any]:
    """Return what a file holds, on the CPU, without executing any of it."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        tags = sorted(one.parent.name for one in path.parents[1].glob(f"*/{STATES}"))
        raise CheckpointError(
            f"there is no checkpoint {str(path)!r}. Write tag= with one of {tags}."
        ) from None
    except Exception as error:  # a damaged file makes the reader raise anything
        raise CheckpointError(
            f"{str(path)!r} cannot be loaded: {first_line(error)}. Write tag= with another checkpoint."
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("module"), Mapping):
        raise CheckpointError(
            f"{str(path)!r} does not hold the state of an engine. Write tag= with another checkpoint."
        )
    return state


def check_loadable(state: dict[str, Any]) -> None:
    """Refuse values that could be saved but not loaded again without executing code. Tensors are fine."""
    for name, part in state.items():
        file = io.BytesIO()
        try:
            torch.save(_without_tensors(part), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{name} holds a value that cannot be loaded without executing code: {_cause(error)}. "
                "Use numbers, strings, tensors, lists and dicts."
            ) from error


def _without_tensors(part: object) -> object:
    # Of these types alone: a subclass may not be loadable.
    if isinstance(part, dict) and type(part) in (dict, OrderedDict):
        return {name: _without_tensors(value) for name, value in part.items()}
    if isinstance(part, list | tuple) and type(part) in (list, tuple):
        return [_without_tensors(value) for value in part]
    return None if isinstance(part, Tensor) else part


def _cause(error: Exception) -> str:
    named = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line]
    return named[0] if named else first_line(error)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its period."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
