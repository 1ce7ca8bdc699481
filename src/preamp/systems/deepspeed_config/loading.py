"""Read settings from a configuration: JSON as people write it, with comments and "auto" values.

Errors in a file give line and column. A key that is given twice is an error.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from preamp.errors import ConfigError
from preamp.policy import Policy
from preamp.systems.deepspeed_config.fp16_section import policy_of
from preamp.systems.deepspeed_config.keys import SECTIONS, TOP, by_name, line_for, read_section
from preamp.systems.deepspeed_config.settings import AS_READ, SKIP_ONLY, Precision, Settings
from preamp.systems.dialects import TORCH

Place: TypeAlias = tuple[str, ...]
# A string or comment without an end matches too: otherwise the search would start again at every character.
TEXT = r'("(?:\\.|[^"\\\n])*"?)'
COMMENT = re.compile(TEXT + r"|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
LAST_COMMA = re.compile(TEXT + r"|(?<=[\"}\]\w])\s*,(?=\s*[}\]])")


def load(config: str | os.PathLike[str] | Mapping[str, Any], *, skip_blanks: bool = False) -> Settings:
    """Read a DeepSpeed configuration.

    `fp16` gives a policy of `dialects.DEEPSPEED`, or `Static` for a `loss_scale` other than 0. `bf16` skips
    steps that overflow unless `check_grad_overflow` is false. `torch_autocast` in float16 scales as
    `torch.amp.GradScaler` does, or as `fp16` says if that is enabled too. Without `gradient_clipping` the
    norm is clipped to 1.0, as in DeepSpeed 0.19.8 (0.16.5 did not clip).

    Args:
        config: a JSON file, in which comments are allowed, or its content.
        skip_blanks: whether "auto", which Hugging Face's Trainer fills in, counts as not given. For precision
            and loss scale it is always refused.

    Raises:
        ConfigError: for a key that is unknown or given twice, an invalid value, and a file that is not JSON.
        OSError: for a file that cannot be read.
    """
    if isinstance(config, Mapping):
        return _settings(config, skip_blanks)
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config={config!r} is neither a file nor a mapping. Write load('ds_config.json').")
    try:
        return _settings(_read_json(Path(config)), skip_blanks)
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(config)}: {error}") from None


def _settings(config: Any, skip_blanks: bool) -> Settings:
    if isinstance(config, Mapping):
        config = _without_blanks(config, skip_blanks)
    top = read_section("", config, TOP)
    read = {name: read_section(name, top[name], keys) for name, keys in SECTIONS.items()}
    precision = _precision(read)
    return Settings(
        precision=precision,
        policy=_policy(read, precision),
        max_norm=top["gradient_clipping"] or None,
        autocast=read["torch_autocast"]["enabled"],
        cast_inputs=read["fp16"]["enabled"] and read["fp16"]["auto_cast"],
        **{name: copy.deepcopy(top[name]) for name in AS_READ},
        ignored=copy.deepcopy(_ignored(config, top)),
    )


def _ignored(config: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known keys that have no counterpart in preamp, by name."""
    sections = {"": (config, TOP)} | {f"{name}.": (top[name], keys) for name, keys in SECTIONS.items()}
    return {
        f"{prefix}{name}": value
        for prefix, (given, keys) in sections.items()
        for name, value in given.items()
        if name in keys and keys[name].ignored
    }


def _precision(read: Mapping[str, Mapping[str, Any]]) -> Precision:
    autocast = read["torch_autocast"]["dtype"]
    dtypes: dict[str, Precision] = {"fp16": "float16", "bf16": "bfloat16", "torch_autocast": autocast}
    enabled = [name for name in dtypes if read[name]["enabled"]]
    if "torch_autocast" in enabled and not autocast:
        raise ConfigError('torch_autocast: the dtype is not given. Write "dtype": "bfloat16" in it.')
    if len({dtypes[name] for name in enabled}) > 1:
        both = " and ".join(f"{name} ({dtypes[name]})" for name in enabled)
        raise ConfigError(f'{both} are both enabled. Write "enabled": true in one of them only.')
    return dtypes[enabled[0]] if enabled else "float32"


def _policy(read: Mapping[str, Mapping[str, Any]], precision: Precision) -> Policy[Any] | None:
    if read["fp16"]["enabled"]:
        return policy_of(read["fp16"])
    if read["bf16"]["enabled"]:
        return SKIP_ONLY if read["bf16"]["check_grad_overflow"] else None
    return TORCH() if precision == "float16" else None


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file. Comments are `//`, `#` and `/* */`, as DeepSpeed allows them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        for pattern in (COMMENT, LAST_COMMA):
            text = pattern.sub(_blank, text)
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{place}: {error.msg}. Write JSON, with comments if you like.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8 text. Write the file in UTF-8.") from None
    except RecursionError:
        raise ConfigError("sections are nested too deep to be a configuration. Write fewer levels.") from None
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"a number cannot be read: {error}. Write a shorter one.") from None


def _blank(match: re.Match[str]) -> str:
    """Return strings unchanged and anything else as spaces, so that positions stay right."""
    endless = match[0].startswith("/*") and (len(match[0]) < len("/**/") or not match[0].endswith("*/"))
    return match[0] if match[1] or endless else re.sub(r"[^\n]", " ", match[0])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        values = ", then ".join(json.dumps(value) for name, value in pairs if name == twice)
        raise ConfigError(f'"{twice}" is given twice: {values}. Write it once.')
    return section


def _without_blanks(config: Mapping[str, Any], skip: bool) -> Mapping[str, Any]:
    """Return a configuration without "auto" in any key that is read; refuse the blanks that are left.

    Args:
        config: the top level, unchecked.
        skip: remove the blanks that do not concern precision and loss scale.
    """
    names = by_name(TOP)
    places = list(_places(config, names))
    left = [place for place in places if not (skip and names[place[0]] not in SECTIONS)]
    if left:
        listed = ", ".join(".".join(map(str, place)) for place in left)
        more = " and so on" if left[1:] else ""
        raise ConfigError(
            f'{listed}: "auto" is a blank for Hugging Face\'s Trainer to fill in. '
            f"Write {_line(left[0], names)}{more}."
        )
    return _without(config, places) if places else config


def _places(config: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[Place]:
    for name, value in config.items():
        if name not in names or TOP[names[name]].ignored:
            continue
        if _is_blank(value):
            yield (name,)
        elif isinstance(value, Mapping):
            yield from ((name, *place) for place in _places_in(names[name], value))


def _places_in(section: str, given: Mapping[str, Any]) -> Iterator[Place]:
    if section in SECTIONS:
        known = by_name(SECTIONS[section])
        yield from ((name,) for name, value in given.items() if name in known and _is_blank(value))
    elif section == "optimizer" and isinstance(given.get("params"), Mapping):
        yield from (("params", name) for name, value in given["params"].items() if _is_blank(value))


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _line(place: Place, names: Mapping[str, str]) -> str:
    section = SECTIONS.get(names[place[0]])
    if section is None or len(place) == 1:
        return line_for(place[0], TOP[names[place[0]]])
    return line_for(place[1], section[by_name(section)[place[1]]])


def _without(config: Mapping[str, Any], places: list[Place]) -> Mapping[str, Any]:
    changed = copy.deepcopy(dict(config))
    for *outer, name in places:
        section = changed
        for one in outer:
            section = section[one]
        del section[name]
    return changed
