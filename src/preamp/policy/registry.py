"""Which rules are ours, and a policy as JSON and back, for a model's file.

This room finds the rules that stand in files of this folder: a new file is all that a new rule takes. It
refuses to load other code: a policy of your own has to be known to the framework that reads the file.
"""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from preamp.checks import shown
from preamp.errors import InexactScale, PolicyError
from preamp.policy.base import Policy
from preamp.policy.dynamic import Dynamic


def _found() -> Iterator[type[Policy[Any]]]:
    """Yield the usual rule, then the policies that the files of this folder define, file by file."""
    yield Dynamic
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = import_module(f"{__package__}.{file.name}")
        for value in vars(module).values():
            is_rule = inspect.isclass(value) and issubclass(value, Policy) and not inspect.isabstract(value)
            if is_rule and value.__module__ == module.__name__:
                yield value


OURS = {kind.__name__: kind for kind in _found()}
REGISTER = '@keras.saving.register_keras_serializable(package="mine")'


def to_json(
    policy: Policy[Any], name_of: Callable[[type], str], find: Callable[[str], Any]
) -> dict[str, Any]:
    """Return a policy's class and settings.

    Args:
        policy: a policy whose fields JSON can hold.
        name_of: the framework's name for a class that is registered with it.
        find: the class of such a name, or None.

    Raises:
        PolicyError: for a class that nobody could find again.
    """
    kind = type(policy)
    name = kind.__name__ if OURS.get(kind.__name__) is kind else name_of(kind)
    if OURS.get(name, find(name)) is not kind:
        raise PolicyError(
            f"policy={policy!r} cannot be saved: {kind.__name__} could not be found again. "
            f"Write {REGISTER} above the class."
        )
    return {"class": name, "settings": policy.get_config()}


def from_json(saved: Mapping[str, Any], find: Callable[[str], Any]) -> Policy[Any]:
    """Return the policy that was saved.

    Raises:
        PolicyError: for a class that is not known here, and for what `to_json` did not write.
    """
    name, settings = _parts(saved)
    kind = OURS.get(name) or find(name)
    if not (inspect.isclass(kind) and issubclass(kind, Policy)):
        raise PolicyError(
            f"the policy {shown(name)} of a saved optimizer is not known. Import its module, where "
            f"{REGISTER} stands above the class."
        )
    try:
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # said when it was made
            policy: Policy[Any] = kind(**{key: _tuples(value) for key, value in settings.items()})
    except TypeError as error:  # another release's settings, or nobody's
        raise PolicyError(
            f"the saved settings of {name} cannot work: {error}. Make the policy anew."
        ) from None
    return policy


def _parts(saved: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the class and the settings."""
    name, settings = (
        (saved.get("class"), saved.get("settings")) if isinstance(saved, Mapping) else (None, None)
    )
    if not (isinstance(name, str) and isinstance(settings, Mapping)):
        raise PolicyError(
            f"{shown(saved)} is no saved policy: that has a class and settings. "
            'Write {"class": "Dynamic", "settings": {}}.'
        )
    return name, settings


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
