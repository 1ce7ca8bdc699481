"""The values in a configuration that Hugging Face's Trainer fills in: "auto"."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from preamp.errors import ConfigError
from preamp.systems.deepspeed_config.keys import SECTIONS, TOP, by_name, line_for

Place: TypeAlias = tuple[str, ...]


def without_blanks(config: Mapping[str, Any], skip: bool) -> Mapping[str, Any]:
    """Return a configuration in which nothing that is read is "auto".

    Args:
        config: the top level, unchecked.
        skip: remove the blanks that do not concern precision and loss scale.

    Raises:
        ConfigError: naming all blanks that are left.
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
    elif section in ("optimizer", "scheduler") and isinstance(given.get("params"), Mapping):
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
