"""Read checkpoint files as trees of mappings. The first bytes of a file tell what kind it is.

Nothing in a file is executed. PyTorch's pickles go through its `weights_only` unpickler, which makes tensors
and plain containers. Objects of the few libraries that put their own into checkpoints become empty shells
that hold their attributes; any other name in a pickle is an error.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from preamp.arrays.load_order import before_tensorflow
from preamp.errors import CheckpointError, MissingExtra
from preamp.record.files import packed_as
from preamp.systems.variables import TRACKED_GUARD

SHELLS = ("argparse", "deepspeed", "megatron", "numpy", "omegaconf", "preamp")
OF_ENUMS = "builtins.getattr"  # how Python 3.11.0 to 3.11.3 saved members of enums
HDF5, ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
TRACE = b'{"preamp_trace"'
MOST_GROWTH, SMALL = 10, 2**26
PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
OF_GUARDS = "guard."  # how the names of a guard's variables begin, which may be vectors
WEIGHTS, CONFIG = "model.weights.h5", "config.json"  # in a .keras archive


def read(path: Path) -> Any:
    """Return the content of a checkpoint.

    Args:
        path: a file, the folder of a DeepSpeed checkpoint, or the prefix of a TensorFlow checkpoint.

    Raises:
        CheckpointError: for a file that cannot be read, or would execute code.
        MissingExtra: if the library that reads such files is absent.
        OSError: for a file that cannot be opened.
    """
    reader = _reader(path)
    try:
        return reader(path)
    except CheckpointError:
        raise
    except ImportError as error:
        raise MissingExtra.of(error) from error
    except pickle.UnpicklingError as error:  # its message advises to execute the file
        raise CheckpointError(f"{path} is broken, or has more than tensors and plain containers.") from error
    except Exception as error:  # a broken file: whatever its library raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from error


def _reader(path: Path) -> Callable[[Path], Any]:
    if path.is_dir():
        return _deepspeed_folder
    if not path.exists() and _index_of(path).exists():
        return _tensorflow
    prefix = path.with_name(re.sub(r"\.(index|data-\d+-of-\d+)$", "", path.name))
    if prefix != path and _index_of(prefix).exists():
        raise CheckpointError(f"{path} is a part of a TensorFlow checkpoint. Write its prefix: {prefix}")
    with path.open("rb") as file:
        start = file.read(len(BOM_UTF8 + TRACE))
    if not start:
        raise CheckpointError(f"{path} is empty.")
    if start.removeprefix(BOM_UTF8).startswith(TRACE):
        raise CheckpointError(
            f"{path} is the trace of a run, which holds no checkpoint. Write the checkpoint that was saved."
        )
    if packed := packed_as(path, start):
        raise CheckpointError(packed)
    if start.startswith(HDF5):
        return _keras_weights
    if start.startswith(ZIP):
        return _archive
    if start.startswith(PICKLES):
        return _torch
    return _json if start.removeprefix(BOM_UTF8).lstrip()[:1] in (b"{", b"[") else _msgpack


def _index_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")


def _archive(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > MOST_GROWTH * path.stat().st_size + SMALL:  # neither PyTorch nor Keras packs at all
            raise CheckpointError(f"{path} would be {unpacked:,} bytes unpacked, so it is not read.")
        if WEIGHTS not in archive.namelist():
            return _torch(path)
        config = json.loads(archive.read(CONFIG))
        with archive.open(WEIGHTS) as weights:
            return _keras_variables(path, weights, config)


def _torch(path: Path) -> Any:
    import torch

    archived = zipfile.is_zipfile(path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path)) if archived else []
    for name in names:
        if name.split(".")[0] not in SHELLS and name != OF_ENUMS:
            raise CheckpointError(
                f"{path} would call {name} when it is loaded, so it is not loaded. "
                "Write the scaler's state to a file of its own: torch.save(scaler.state_dict(), 'scaler.pt')."
            )
    shells: list[Any] = [(type("Shell", (_Shell,), {}), name) for name in names]
    with torch.serialization.safe_globals(shells), warnings.catch_warnings(action="ignore"):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=archived)


class _Shell:
    """Stands in for an object of a library, or for the function that makes one: attributes without code."""

    def __new__(cls, *_: object, **__: object) -> _Shell:
        return object.__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)


def _deepspeed_folder(path: Path) -> Any:
    latest = path / "latest"
    folder = path / latest.read_text(encoding="utf-8").strip() if latest.exists() else path
    if not folder.is_dir():
        raise CheckpointError(
            f"{latest} names a folder that does not exist: {folder}. Write the path of a file."
        )
    for pattern in ("*zero_pp_rank_0_mp_rank_*_optim_states.pt", "mp_rank_*_model_states.pt"):
        for file in sorted(folder.glob(pattern))[:1]:
            return _torch(file)
    prefixes = [str(index.with_suffix("")) for index in sorted(folder.glob("*.index"))]
    instead = f", or the prefix of a TensorFlow checkpoint: {prefixes[-1]}" if prefixes else "."
    raise CheckpointError(
        f"{path} is not the folder of a DeepSpeed checkpoint: neither latest nor *_states.pt is in it. "
        f"Write the path of a file{instead}"
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8-sig"))


def _msgpack(path: Path) -> Any:
    from flax import serialization

    try:
        return serialization.msgpack_restore(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of a supported kind, such as .pt or .json."
        ) from error


def _keras_weights(path: Path) -> Any:
    with path.open("rb") as file:
        return _keras_variables(path, file, {})


def _keras_variables(path: Path, file: object, config: dict[str, Any]) -> Any:
    """Return the optimizer's scalar variables and a guard's, and the arguments of its configuration."""
    import h5py  # type: ignore[import-untyped]

    with h5py.File(file, "r") as weights:
        found = weights.get("optimizer/vars", {})
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{path} is damaged: its optimizer/vars is not a group of variables.")
        for name, value in found.items():
            if not isinstance(value, h5py.Dataset):
                raise CheckpointError(f"{path} is damaged: its variable optimizer/vars/{name} is missing.")
        variables = {
            name: value[()]
            for name, value in found.items()
            if value.shape == () or name.startswith(OF_GUARDS)
        }
    arguments = {}
    with suppress(KeyError, TypeError, ValueError):  # of a configuration of another shape
        arguments = dict(config["compile_config"]["optimizer"]["config"])
    return {"optimizer": {**arguments, **variables}}


def _tensorflow(path: Path) -> Any:
    """Return the scalar variables and a guard's, by the parts of their names."""
    before_tensorflow()
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(path))
    tree: dict[str, Any] = {}
    kinds = reader.get_variable_to_dtype_map()
    for name, shape in reader.get_variable_to_shape_map().items():
        parts = name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").replace("..", ".").split("/")
        last = parts.pop()
        if (shape == [] or last.startswith(OF_GUARDS)) and kinds[name] != tf.string:
            node = tree
            for part in parts:
                if part.startswith(TRACKED_GUARD):
                    continue  # a guard's state belongs to the loss scale's
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise CheckpointError(f"{path} is damaged: {name} is inside a variable.")
            node.setdefault(last, reader.get_tensor(name))
    return tree
