"""Which precisions and which rules for the scale the flags of a command ask for.

This room refuses flags that contradict each other. It refuses to know how flags are read.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from preamp.config import Settings, load
from preamp.dialect import Dialect
from preamp.dialects import ALL
from preamp.errors import PreampError
from preamp.lab import Precision
from preamp.policy import Dynamic, Policy, Tolerant

__all__ = ["ShortDynamic", "ShortTolerant", "find_dialect", "precisions_and_rule", "rules"]

# In a run of a few thousand steps the usual interval would hardly see the scale move.
SHORT_INTERVAL = 100


@dataclass(frozen=True, kw_only=True, repr=False)
class ShortDynamic(Dynamic):
    """`Dynamic` with another default."""

    growth_interval: int = SHORT_INTERVAL


@dataclass(frozen=True, kw_only=True, repr=False)
class ShortTolerant(Tolerant):
    """`Tolerant` with another default."""

    growth_interval: int = SHORT_INTERVAL


def precisions_and_rule(
    given: Sequence[str], policy: Policy[Any] | None, dialect: str | None, config: Path | None
) -> tuple[list[Precision], Policy[Any]]:
    """Return what the flags of `train` ask for: the precisions to train in, and the rule for float16."""
    flags = {"--policy": policy, f"--dialect {dialect}": dialect, f"--config {config}": config}
    both = [flag for flag, value in flags.items() if value]
    if len(both) > 1:
        raise PreampError(f"{' and '.join(both)} are both given. Write one of them.")
    if config is None:
        rule = find_dialect("dialect", dialect) if dialect else _plain(policy or ShortDynamic())
        return _precisions(given or ("float32", "float16")), rule
    settings = load(config, skip_blanks=True)
    precisions = _precisions(given or ("float32", settings.precision))
    return precisions, _scaling(config, settings) if "float16" in precisions else ShortDynamic()


def _precisions(given: Sequence[str]) -> list[Precision]:
    return [name for name in get_args(Precision) if name in given or "all" in given]


def _scaling(path: Path, settings: Settings) -> Policy[Any]:
    if settings.policy is None:
        raise PreampError(f'{path} does not scale the loss. Write "fp16": {{"enabled": true}} in it.')
    return settings.policy


def _plain(policy: Policy[Any]) -> Policy[Any]:
    """Return the same settings as one of our policies, which is what records should say."""
    for kind in (Dynamic, Tolerant):
        if isinstance(policy, kind):
            with warnings.catch_warnings(action="ignore"):  # the flags were warned of
                return kind(**{field.name: getattr(policy, field.name) for field in fields(kind)})
    return policy


def rules(
    policy: Policy[Any] | None, names: Sequence[str], configs: Sequence[Path]
) -> dict[str, Policy[Any]]:
    """Return the rules that the flags of `simulate` ask for, by name."""
    asked = [find_dialect("dialect", name) for name in names if name != "all"]
    chosen = ALL.values() if "all" in names else asked
    read = {str(path): _scaling(path, load(path, skip_blanks=True)) for path in configs}
    ours = {"preamp": policy or Dynamic()} if policy or not (chosen or read) else {}
    return {**ours, **read, **{rule.name.lower(): rule for rule in chosen}}


def find_dialect(flag: str, name: str) -> Dialect[...]:
    """Return the dialect that a flag names, in any spelling of `preamp dialects`."""
    key = name.upper().replace("-", "_")
    if key not in ALL:
        near = difflib.get_close_matches(key, ALL, n=3) or list(ALL)
        raise PreampError(f"--{flag} {name} is unknown. Write one of {', '.join(near).lower()}.")
    return ALL[key]
