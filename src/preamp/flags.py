"""Which precisions and which rules for the scale the flags of a command ask for.

This room refuses flags that contradict each other. It refuses to know how flags are read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict, get_args, get_type_hints

from preamp.config import Settings, load
from preamp.dialect import Dialect
from preamp.dialects import ALL
from preamp.errors import PreampError
from preamp.lab import Precision
from preamp.policy import Dynamic, Policy
from preamp.policy.saved import OURS
from preamp.words import kebab

__all__ = ["Given", "find_dialect", "find_rule", "policy_of", "precisions_and_rule", "rules"]

# In a run of a few thousand steps the usual interval would hardly see the scale move.
SHORT_INTERVAL = 100


class Given(TypedDict, total=False):
    """The settings that flags can give, of all our rules. Its keys are made below, from the rules."""


def _kinds_with(setting: str) -> list[str]:
    return [name for name, kind in OURS.items() if setting in kind.__dataclass_fields__]


def _described(kind: type[Policy[Any]]) -> dict[str, str]:
    """Return what the docstrings of a rule say of its settings."""
    said: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = (base.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
        said |= {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}
    return said


def _setting(name: str) -> tuple[Any, str]:
    """Return the type of a setting, and how it is described: where rules differ, by each."""
    kinds = {rule: OURS[rule] for rule in _kinds_with(name)}
    first = next(iter(kinds.values()))
    texts = _by_rule({rule: _described(kind).get(name, "") for rule, kind in kinds.items()})
    defaults = _by_rule(
        {rule: _shown(kind.__dataclass_fields__[name].default) for rule, kind in kinds.items()}
    )
    if len(texts) > 1 or len(kinds) <= 2:
        meaning = " ".join(f"Of {', '.join(rules)}: {text}" for text, rules in texts.items())
    else:
        meaning = next(iter(texts))
    default = "; ".join(
        value if len(defaults) == 1 else f"{value} of {', '.join(rules)}" for value, rules in defaults.items()
    )
    return get_type_hints(first)[name], f"{meaning} Default: {default}."


def _by_rule(values: dict[str, str]) -> dict[str, list[str]]:
    """Return values, and of which rules each is."""
    same: dict[str, list[str]] = {}
    for rule, value in values.items():
        same.setdefault(value, []).append(rule)
    return same


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _complete(given: type[Given]) -> None:
    """Give the type a key for every setting, which the command line makes into a flag."""
    names = dict.fromkeys(field.name for kind in OURS.values() for field in fields(kind))
    settings = {name: _setting(name) for name in names}
    given.__annotations__ = {name: kind for name, (kind, _) in settings.items()}
    described = "".join(f"    {name}: {text}\n" for name, (_, text) in settings.items())
    given.__doc__ = f"The settings of a rule.\n\nArgs:\n{described}"


_ENTRY = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)
_complete(Given)


def policy_of(rule: str | None, given: Given | None, short: bool = False) -> Policy[Any]:
    """Return the policy that `--rule` and `--policy.*` ask for.

    Args:
        rule: the name of one of our rules; None: the first that has the settings.
        given: the settings.
        short: whether intervals are to suit runs of a few thousand steps, where nothing else is said.

    Raises:
        PreampError: for an unknown rule, and for settings that the rule, or every rule, lacks.
    """
    settings: dict[str, Any] = {**(given or {})}
    name = _rule_with(settings) if rule is None else find_rule(rule)
    lacking = [setting for setting in settings if name not in _kinds_with(setting)]
    if lacking:
        raise PreampError(
            f"{_flag(lacking[0])} is no setting of {name}. Leave it out, or write "
            f"--rule {kebab(_kinds_with(lacking[0])[0])}."
        )
    kind = OURS[name]
    if short and getattr(kind, "growth_interval", None) == Dynamic.growth_interval:
        settings = {"growth_interval": SHORT_INTERVAL, **settings}
    return kind(**settings)


def _rule_with(settings: Collection[str]) -> str:
    """Return the first of our rules that has some settings."""
    for name in OURS:
        if all(name in _kinds_with(setting) for setting in settings):
            return name
    whose = [f"{_flag(setting)} (of {', '.join(_kinds_with(setting))})" for setting in settings]
    raise PreampError(f"No rule has both {' and '.join(whose)}. Write the flags of one of them.")


def find_rule(name: str) -> str:
    """Return the class name of one of our rules, given in any spelling."""
    known = {kind.lower(): kind for kind in OURS}
    key = re.sub("[-_]", "", name).lower()
    if key not in known:
        near = [known[one] for one in difflib.get_close_matches(key, known, n=3)] or OURS
        raise PreampError(f"--rule {name} is unknown. Write one of {', '.join(map(kebab, near))}.")
    return known[key]


def _flag(setting: str) -> str:
    return f"--policy.{setting.replace('_', '-')}"


def precisions_and_rule(
    given: Sequence[str], rule: str | None, policy: Given | None, dialect: str | None, config: Path | None
) -> tuple[list[Precision], Policy[Any]]:
    """Return what the flags of `train` ask for: the precisions to train in, and the rule for float16."""
    ours = {f"--rule {rule}": rule} if rule else {"--policy": policy}
    flags = {**ours, f"--dialect {dialect}": dialect, f"--config {config}": config}
    both = [flag for flag, value in flags.items() if value]
    if len(both) > 1:
        raise PreampError(f"{' and '.join(both)} are both given. Write one of them.")
    if config is None:
        chosen = find_dialect("dialect", dialect) if dialect else policy_of(rule, policy, short=True)
        return _precisions(given or ("float32", "float16")), chosen
    settings = load(config, skip_blanks=True)
    precisions = _precisions(given or ("float32", settings.precision))
    return precisions, _scaling(config, settings) if "float16" in precisions else Dynamic()


def _precisions(given: Sequence[str]) -> list[Precision]:
    return [name for name in get_args(Precision) if name in given or "all" in given]


def _scaling(path: Path, settings: Settings) -> Policy[Any]:
    if settings.policy is None:
        raise PreampError(f'{path} does not scale the loss. Write "fp16": {{"enabled": true}} in it.')
    return settings.policy


def rules(
    ours: Sequence[str], policy: Given | None, names: Sequence[str], configs: Sequence[Path]
) -> dict[str, Policy[Any]]:
    """Return the rules that the flags of `simulate` ask for, by name."""
    asked = [find_dialect("dialect", name) for name in names if name != "all"]
    chosen = ALL.values() if "all" in names else asked
    read = {str(path): _scaling(path, load(path, skip_blanks=True)) for path in configs}
    return {
        **_own(ours, policy, is_alone=not (chosen or read)),
        **read,
        **{rule.name.lower(): rule for rule in chosen},
    }


def _own(names: Sequence[str], policy: Given | None, is_alone: bool) -> dict[str, Policy[Any]]:
    kinds = list(OURS) if "all" in names else [find_rule(name) for name in names]
    if policy is not None and len(kinds) > 1:
        raise PreampError(
            "--policy.* with several rules says not whose settings these are. Write one --rule."
        )
    if kinds:
        return {kebab(kind): policy_of(kind, policy) for kind in kinds}
    return {"preamp": policy_of(None, policy)} if policy is not None or is_alone else {}


def find_dialect(flag: str, name: str) -> Dialect[...]:
    """Return the dialect that a flag names, in any spelling of `preamp dialects`."""
    key = name.upper().replace("-", "_")
    if key not in ALL:
        near = difflib.get_close_matches(key, ALL, n=3) or list(ALL)
        raise PreampError(f"--{flag} {name} is unknown. Write one of {', '.join(near).lower()}.")
    return ALL[key]
