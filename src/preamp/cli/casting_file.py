"""Reads an operator table from a configuration file: JSON, TOML or YAML."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from preamp.autocasting.tables import Casting
from preamp.errors import CastingError, MissingExtra

_FORMATS = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}


def read_casting(path: Path) -> Casting:
    """Return the table in a file that has what `Casting.from_dict` takes, in the format of the file's ending.

    Raises:
        CastingError: for a file that cannot be read or has something else, with the file's name.
        MissingExtra: for YAML without PyYAML.
    """
    kind = _FORMATS.get(path.suffix.lower())
    if kind is None:
        raise CastingError(f"{path} has none of the endings {', '.join(_FORMATS)}. Name it table.json.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CastingError(f"{path} cannot be read: {error.strerror}. Write the path of a file.") from error
    except UnicodeDecodeError as error:
        raise CastingError(f"{path} is not text in UTF-8. Save it as UTF-8.") from error
    values = _parsed(path, kind, text)
    try:
        return Casting.from_dict(values)
    except CastingError as error:
        raise CastingError(f"{path}: {error}") from error


def _parsed(path: Path, kind: str, text: str) -> Any:
    """Return what a text says."""
    if kind == "YAML":
        try:
            import yaml  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingExtra.of(error, "pyyaml") from error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise CastingError(f"{path} is not YAML: {_one_line(error)}.") from error
    try:
        return json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except ValueError as error:
        raise CastingError(f"{path} is not {kind}: {_one_line(error)}.") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
