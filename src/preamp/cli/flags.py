"""Which precisions and policies the flags of a command ask for. Flags that contradict each other raise."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args, get_type_hints

from preamp.cli.lab import Precision
from preamp.errors import PolicyError, PreampError
from preamp.guards import ALL as GUARD_DIALECTS
from preamp.guards import Guard, GuardDialect, NormLimit, SpikeGuard
from preamp.policy import Dynamic, Policy
from preamp.policy.registry import RULES
from preamp.record.formatting import kebab
from preamp.systems.deepspeed_config import Settings, load
from preamp.systems.dialects import ALL, Dialect

# In a run of a few thousand steps the scale would hardly move at the usual interval.
SHORT_INTERVAL = 100
COMMON = 3  # a setting that fewer policies have is listed under their names

T = TypeVar("T")
Given: TypeAlias = Mapping[str, object]  # settings by name
GUARDS: dict[str, type[Guard[Any]] | GuardDialect[...]] = {
    "spike": SpikeGuard,
    "norm-limit": NormLimit,
    **{dialect.name.lower().replace("_", "-"): dialect for dialect in GUARD_DIALECTS},
}


def _kinds_with(setting: str) -> list[str]:
    return [name for name, kind in RULES.items() if setting in _settings(kind)]


def _settings(kind: type[Policy[Any]]) -> dict[str, Field[Any]]:
    """Return the settings of a policy that are flags: all but `compat`."""
    return {field.name: field for field in fields(kind) if field.name != "compat"}


class SettingFlag(NamedTuple):
    """A setting of policies as a flag: its type, its help, and the heading it is listed under."""

    type: object
    help: str
    heading: str


def setting_flags() -> dict[str, SettingFlag]:
    """Return the settings of all our policies: those of several first, then policy by policy."""
    names = dict.fromkeys(name for kind in RULES.values() for name in _settings(kind))
    owners = {name: _kinds_with(name) for name in names}
    flags = {}
    for name in sorted(names, key=lambda name: (len(owners[name]) < COMMON, owners[name])):
        kinds = owners[name]
        whose = "several policies" if len(kinds) >= COMMON else ", ".join(map(kebab, kinds))
        help = _help({kebab(kind): _settings(RULES[kind])[name] for kind in kinds})
        flags[name] = SettingFlag(get_type_hints(RULES[kinds[0]])[name], help, f"Settings of {whose}")
    return flags


def _help(known: Mapping[str, Field[Any]]) -> str:
    """Return the first sentence of a description and the default, by policy where they differ."""
    texts = {
        rule: f"{field.metadata.get('help', '').partition('. ')[0].rstrip('.')}."
        for rule, field in known.items()
    }
    defaults = {rule: _shown(field.default) for rule, field in known.items()}
    usual, *_ = defaults.values()
    others = "".join(f"; {rule} {value}" for rule, value in defaults.items() if value != usual)
    if len(set(texts.values())) == 1:
        return f"{next(iter(texts.values()))} [{usual}{others}]"
    return " ".join(f"{rule}: {text} [{defaults[rule]}]" for rule, text in texts.items())


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def policy_of(name: str | None, given: Given | None, short: bool = False) -> Policy[Any]:
    """Return the policy that `--policy NAME` and `--policy.*` ask for.

    Args:
        name: one of our policies or a dialect; None for the first of our policies that has the settings.
        given: the settings.
        short: whether the default growth interval is to suit runs of a few thousand steps.
    """
    settings: dict[str, Any] = {**(given or {})}
    kind = RULES[_rule_with(settings)] if name is None else find_policy(name)
    if isinstance(kind, Dialect):
        if settings:
            raise PreampError(
                f"{_flag(next(iter(settings)))} cannot change the policy of {kind.name.lower()}: these "
                "are settings of preamp's own policies. Leave out one of the two."
            )
        return kind
    lacking = [setting for setting in settings if setting not in _settings(kind)]
    if lacking:
        raise PreampError(
            f"{_flag(lacking[0])} is not a setting of {kind.__name__}. Leave it out, or write "
            f"--policy {kebab(_kinds_with(lacking[0])[0])}."
        )
    if short and getattr(kind, "growth_interval", None) == Dynamic.growth_interval:
        settings = {"growth_interval": SHORT_INTERVAL, **settings}
    return _made(kind, settings, "policy", _settings(kind))


def _rule_with(settings: Collection[str]) -> str:
    """Return the first of our policies that has these settings."""
    for name in RULES:
        if all(name in _kinds_with(setting) for setting in settings):
            return name
    whose = [f"{_flag(setting)} (of {', '.join(_kinds_with(setting))})" for setting in settings]
    raise PreampError(f"No rule has both {' and '.join(whose)}. Write the flags of one of them.")


def find_policy(name: str) -> type[Policy[Any]] | Dialect[...]:
    """Return one of our policies, or a dialect, by its name in any spelling; refuse an unknown one."""
    known: dict[str, type[Policy[Any]] | Dialect[...]] = {
        **{_key(dialect): value for dialect, value in ALL.items()},
        **{_key(kind): value for kind, value in RULES.items()},
    }
    if _key(name) not in known:
        raise _unknown("policy", name, [*map(kebab, RULES), *map(str.lower, ALL)])
    return known[_key(name)]


def find_dialect(name: str) -> Dialect[...]:
    """Return a dialect by its name in any spelling; refuse an unknown one."""
    known = {_key(dialect): value for dialect, value in ALL.items()}
    if _key(name) not in known:
        raise _unknown("dialect", name, map(str.lower, ALL))
    return known[_key(name)]


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return all known names, those most like a misspelled one first.

    >>> nearest_first("torhc", ["keras", "apex", "torch"])[0]
    'torch'
    """
    return sorted(known, key=lambda one: -SequenceMatcher(None, _key(one), _key(name)).ratio())


def _unknown(flag: str, name: str, known: Iterable[str]) -> PreampError:
    return PreampError(f"--{flag} {name} is unknown. Write one of {', '.join(nearest_first(name, known))}.")


def _key(name: str) -> str:
    """Return a name in one spelling: "Head-room" and "headroom" are the same."""
    return re.sub("[-_]", "", name).lower()


def _flag(setting: str, of: str = "policy") -> str:
    return f"--{of}.{setting.replace('_', '-')}"


def _made(kind: Callable[..., T], settings: Given, of: str, names: Iterable[str]) -> T:
    """Call a policy's or a guard's class; its errors are reworded to name flags, not Python arguments.

    Args:
        kind: the class, or a dialect.
        settings: its arguments.
        of: "policy" or "guard", with which the flags begin.
        names: of all its settings.
    """
    try:
        return kind(**settings)
    except PolicyError as error:
        said = re.sub(r"\b[A-Z]\w*\((\w+=[^()]*)\)", r"\1", str(error))  # SpikeGuard(sigmas=6.0)
        said = re.sub(
            r"(\d+\.\d+)\*\*(-?\d+)", lambda power: f"{float(power[1]) ** int(power[2]):.17g}", said
        )
        settings_in_python = rf"\b({'|'.join(names)})="
        said = re.sub(settings_in_python, lambda name: f"{_flag(name[1], of)} ", said)
        raise PolicyError(said) from None


def precisions_and_rule(
    given: Sequence[str], name: str | None, policy: Given | None, dialect: str | None, config: Path | None
) -> tuple[list[Precision], Policy[Any]]:
    """Return what the flags of `train` ask for: the precisions to train in, and the policy for float16."""
    ours = {f"--policy {name}": name} if name else {"--policy.*": policy}
    flags = {**ours, f"--dialect {dialect}": dialect, f"--config {config}": config}
    both = [flag for flag, value in flags.items() if value]
    if len(both) > 1:
        raise PreampError(f"{' and '.join(both)} are both given. Write one of them.")
    if config is None:
        chosen = find_dialect(dialect) if dialect else policy_of(name, policy, short=True)
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
    """Return the policies that the flags of `simulate` ask for, by name."""
    asked = [find_dialect(name) for name in names if name != "all"]
    chosen = ALL.values() if "all" in names else asked
    read = {str(path): _scaling(path, load(path, skip_blanks=True)) for path in configs}
    return {
        **_own(ours, policy, is_alone=not (chosen or read)),
        **read,
        **{rule.name.lower(): rule for rule in chosen},
    }


def _own(names: Sequence[str], policy: Given | None, is_alone: bool) -> dict[str, Policy[Any]]:
    chosen = list(RULES) if "all" in names else names
    if policy is not None and len(chosen) > 1:
        raise PreampError(
            "--policy.* with several policies does not say whose settings these are. Write one --policy."
        )
    if chosen:
        kinds = {name: find_policy(name) for name in chosen}
        return {
            kind.name.lower() if isinstance(kind, Dialect) else kebab(kind.__name__): policy_of(name, policy)
            for name, kind in kinds.items()
        }
    return {"preamp": policy_of(None, policy)} if policy is not None or is_alone else {}


def guard_flags() -> dict[str, SettingFlag]:
    """Return the settings of all guards; those of other systems have no heading, and help leaves them out."""
    flags: dict[str, SettingFlag] = {}
    for kind in GUARDS.values():
        if isinstance(kind, GuardDialect):
            types = get_type_hints(kind._make)
            for name, parameter in inspect.signature(kind._make).parameters.items():
                help = f"As in {kind.system}. [{_shown(parameter.default)}]"
                flags.setdefault(name, SettingFlag(types[name], help, ""))
        else:
            for name, field in _guard_settings(kind).items():
                flags[name] = SettingFlag(get_type_hints(kind)[name], _help({"": field}), "Guard")
    return flags


def guards_of(names: Sequence[str], given: Given | None) -> dict[str, Guard[Any]]:
    """Return the guards that `--guard NAME` and `--guard.*` ask for, by name.

    Args:
        names: of guards, or "all" for those that can skip a step; without one, the first that has the
            settings.
        given: the settings. Each goes to all of these guards that have it.
    """
    settings = {**(given or {})}
    known = {_key(name): name for name in GUARDS}
    for name in names:
        if name != "all" and _key(name) not in known:
            raise _unknown("guard", name, GUARDS)
    chosen = list(GUARDS) if "all" in names else [known[_key(name)] for name in dict.fromkeys(names)]
    if not chosen:
        chosen = [name for name in GUARDS if settings.keys() <= set(_names_of_settings(GUARDS[name]))][:1]
    for setting in settings:
        owners = [name for name, kind in GUARDS.items() if setting in _names_of_settings(kind)]
        if not set(owners) & set(chosen):
            raise PreampError(
                f"{_flag(setting, 'guard')} is not a setting of {', '.join(chosen) or 'one guard'}. "
                f"Leave it out, or write --guard {owners[0]}."
            )
    made = {name: _guard(GUARDS[name], settings) for name in chosen}
    asked = {known[_key(name)] for name in names if name != "all"}
    return {name: guard for name, guard in made.items() if name in asked or guard.idle is None}


def without_limits(names: Sequence[str], made: Mapping[str, Guard[Any]]) -> list[str]:
    """Say which guards skip nothing, and which "all" leaves out for that reason.

    Args:
        names: what `guards_of` was given.
        made: what it returned.
    """
    flags = {name: _flag(_names_of_settings(kind)[0], "guard") for name, kind in GUARDS.items()}
    said = [
        f"Without a limit {name} skips nothing. Write {flags[name]} 5."
        for name, guard in made.items()
        if guard.idle
    ]
    if left_out := [f"{name} ({flags[name]})" for name in GUARDS if name not in made and "all" in names]:
        said.append(f"Left out, because without a limit they skip nothing: {', '.join(left_out)}.")
    return said


def _guard(kind: type[Guard[Any]] | GuardDialect[...], settings: Given) -> Guard[Any]:
    names = _names_of_settings(kind)
    own = {name: value for name, value in settings.items() if name in names}
    if isinstance(kind, GuardDialect) and not own:
        return kind
    return _made(kind, own, "guard", names)


def _guard_settings(kind: type[Guard[Any]]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(kind)}


def _names_of_settings(kind: type[Guard[Any]] | GuardDialect[...]) -> list[str]:
    if isinstance(kind, GuardDialect):
        return list(inspect.signature(kind._make).parameters)
    return list(_guard_settings(kind))
