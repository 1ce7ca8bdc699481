"""Argument validation, with errors that name the argument and what to write; and rounding to float32."""

from __future__ import annotations

import math
import reprlib
import struct
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

from preamp.errors import InexactScale, PolicyError, UsageError

T = TypeVar("T")

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126

_FLOAT32 = struct.Struct("f")

_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlevel = 3
_BRIEFLY.maxlist = _BRIEFLY.maxtuple = _BRIEFLY.maxdict = 10
_BRIEFLY.maxstring = _BRIEFLY.maxlong = _BRIEFLY.maxother = 80


def to_float32(x: float) -> float:
    """Round to the nearest float32, to inf beyond its range."""
    return float(_FLOAT32.unpack(_FLOAT32.pack(x))[0])


ROUND: dict[str, Callable[[float], float]] = {"float32": to_float32, "float64": float}


def assign(settings: object, **values: object) -> None:
    """Set fields of a frozen dataclass from its `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(settings, name, value)


def some_of(names: Sequence[str]) -> str:
    """Return the first three of some names, and how many more there are.

    >>> some_of(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def shown(value: object) -> str:
    """Return the `repr` of a value for a message: on one line, and shortened.

    >>> shown([2.0, None]), shown(list(range(1000))), shown(10**5000)
    ('[2.0, None]', '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]', 'a very large int')
    """
    try:
        return " ".join(_BRIEFLY.repr(value).split())
    except ValueError:  # more digits than Python prints
        return f"a very large {type(value).__name__}"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number that a float can hold; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer beyond any float
        return False


def positive(name: str, value: object, instead: str) -> None:
    """Refuse anything but a finite number above 0."""
    if not (is_number(value) and value > 0.0):
        raise PolicyError(f"{name}={shown(value)} is not a finite number above 0. Write {instead}.")


def check_limit(name: str, value: Any) -> float:
    """Return a limit for clipping: a number above 0, also in an array of one entry; inf clips nothing."""
    given = value.item() if getattr(value, "shape", None) in ((), (1,)) else value
    if not (is_number(given) or (isinstance(given, Real) and given == math.inf)) or given <= 0.0:
        raise PolicyError(
            f"{name}={shown(value)} is not a number above 0. Write {name}=1.0, or None not to clip."
        )
    return float(given)


def not_subnormal(name: str, value: float | None) -> None:
    """Refuse a scale that is subnormal in float32: its inverse is inf, and compilers flush it to 0."""
    if value is not None and value < FLOAT32_TINY:
        raise PolicyError(
            f"{name}={value!r} is below float32's smallest normal number: dividing by it overflows. "
            f"Write {name}=2.0**-126."
        )


def between(name: str, value: object, low: float, high: float, *, instead: str) -> None:
    """Refuse anything but a number strictly between two bounds."""
    if not (is_number(value) and low < value < high):
        bounds = f"above {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}, both excluded"
        raise PolicyError(f"{name}={shown(value)} must be a number {bounds}. Write {instead}.")


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of some strings."""
    if value not in choices:
        raise PolicyError(f"{name}={shown(value)} is unknown. Write one of {', '.join(map(repr, choices))}.")


def whole(name: str, value: object, *, least: int, most: int | None = None, instead: str) -> None:
    """Refuse anything but a whole number of at least `least`, and at most `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not (is_whole and least <= value and (most is None or value <= most)):  # type: ignore[operator]
        raise PolicyError(f"{name}={shown(value)} must be a whole number {bounds}. Write {instead}.")


def callable_or_none(name: str, value: object, instead: str) -> None:
    """Refuse anything but None and callables."""
    if value is not None and not callable(value):
        raise PolicyError(f"{name}={shown(value)} cannot be called. Write {instead}.")


def listed(name: str, values: object, instead: str) -> list[Any]:
    """Return values as a list. Refuse a number, a string, or a single tensor or variable."""
    if isinstance(values, str | bytes) or hasattr(values, "dtype") or not isinstance(values, Iterable):
        raise UsageError(f"{name}={shown(values)} is not a list. Write {instead}.")
    return list(values)


def listed_variables(name: str, values: object, instead: str) -> list[Any]:
    """Return variables as a list. Refuse anything else, and a list with anything else in it."""
    found = listed(name, values, instead)
    for value in found:
        if not (hasattr(value, "dtype") and hasattr(value, "assign")):
            raise UsageError(f"{shown(value)} among {name} is not a variable. Write {instead}.")
    return found


def loss_or_refused(loss: T) -> T:
    """Return a loss: a number, a tensor or a list of these. Refuse anything else, such as None."""
    parts = loss if isinstance(loss, list | tuple) else [loss]
    if all(hasattr(part, "dtype") or isinstance(part, Real | list | tuple) for part in parts):
        return loss
    raise UsageError(f"loss={shown(loss)} is not a tensor. Write loss_fn(targets, model(inputs)).")


class ScaledLosses:
    """Remembers the last scaled loss, to notice a loss that is scaled twice.

    A copy of an optimizer starts without one.
    """

    def __init__(self) -> None:
        self._last: Callable[[], Any] = _nothing

    def __reduce__(self) -> tuple[type[ScaledLosses], tuple[()]]:
        return ScaledLosses, ()

    def check(self, loss: object, instead: str) -> None:
        """Refuse to scale the loss that `note` returned last: gradients are unscaled only once."""
        if loss is not None and loss is self._last():
            raise UsageError(
                "this loss has been scaled already: its gradients would be too large by a factor of the loss "
                f"scale, because they are divided by it once. Write {instead}."
            )

    def note(self, scaled: T) -> T:
        """Return a scaled loss and remember it, weakly."""
        try:
            self._last = weakref.ref(scaled)
        except TypeError:  # such as a list of losses
            self._last = _nothing
        return scaled


def _nothing() -> None:
    return None


def listed_gradients(name: str, values: object, instead: str) -> list[Any]:
    """Return gradients as a list: tensors, and None for a variable without one."""
    found = listed(name, values, instead)
    for value in found:
        if not (value is None or hasattr(value, "dtype")):
            raise UsageError(f"{shown(value)} among {name} is not a tensor. Write {instead}.")
    return found


def paired(grads_and_vars: object) -> list[tuple[Any, Any]]:
    """Return pairs of gradients and variables. Refuse anything else."""
    instead = "apply_gradients(zip(gradients, model.trainable_variables))"
    pairs = listed("grads_and_vars", grads_and_vars, instead)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise UsageError(f"{shown(pair)} is not a gradient with its variable. Write {instead}.")
    return pairs


def check_store(store: object) -> None:
    """Refuse anything but a mapping of names to arrays, such as a dict or one of Keras's files."""
    if not (hasattr(store, "keys") and hasattr(store, "__getitem__")):
        raise UsageError(f"store={shown(store)} is not a dict. Write store = {{}}.")


def power_of_two(name: str, value: int, *, most: int, instead: str) -> None:
    """Refuse anything but a power of two from 1 to `most`."""
    whole(name, value, least=1, instead=instead)
    if value & (value - 1) or value > most:
        raise PolicyError(f"{name}={shown(value)} is not a power of two up to {most}. Write {instead}.")


def warn_if_inexact(name: str, value: float | None) -> None:
    """Warn of a number that is not a power of two, at the user's line."""
    if value is not None and math.frexp(value)[0] != 0.5 and value != FLOAT32_MAX:
        nearest = min(round(math.log2(value)) or (1 if value > 1.0 else -1), 127)
        warnings.warn(
            f"{name}={value:g} is not a power of two: scaling and unscaling then round every gradient. "
            f"Write {name}={2.0**nearest!r} unless you reproduce another system.",
            InexactScale,
            stacklevel=level_of_caller(),
        )


def level_of_caller(*through: str) -> int:
    """Return the `stacklevel` of the line outside this library that a warning is about.

    Args:
        through: other packages whose lines to skip.
    """
    frame, level = sys._getframe(1), 1
    inside = ("preamp", "dataclasses", *through)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    return level
