"""The class of dialects: a known system's policy, with its own argument names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec

from preamp.errors import InexactScale
from preamp.policy import Policy, Reading, Where, choose

P = ParamSpec("P")


class Dialect(Policy[Any], Generic[P]):
    """A known system's policy, with that system's defaults; calling it takes the system's own arguments.

    Attributes:
        name: the name in `dialects`, such as "TORCH".
        system: the system, and the release whose rule this is.
        odd: known pitfalls, in one line.
        policy: the policy with the system's defaults.
    """

    def __init__(self, make: Callable[P, Policy[Any]], system: str, odd: str) -> None:
        self._make = make
        self.name: str = make.__name__
        self.__module__ = make.__module__  # where a pickle looks for the name
        self.system = system
        self.odd = odd
        self.__doc__ = f"{system}. {odd}"
        self.policy: Policy[Any] = self(*(), **{})  # type: ignore[call-arg]  # every argument has a default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Policy[Any]:
        """Return the policy for the system's own arguments."""
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # the original rounds as well
            return self._make(*args, **kwargs)

    def __repr__(self) -> str:
        return f"dialects.{self.name}"

    def __reduce__(self) -> str:
        return self.name  # pickled as the name it has in its module

    def start(self) -> Any:
        return self.policy.start()

    def advance(self, state: object, reading: Reading, where: Where = choose) -> Any:
        return self.policy.advance(state, reading, where)

    def exhausted(self, state: object, reading: Reading, where: Where = choose) -> Any:
        return self.policy.exhausted(state, reading, where)

    def _remedy(self) -> str:
        return self.policy._remedy()


def dialect(system: str, odd: str) -> Callable[[Callable[P, Policy[Any]]], Dialect[P]]:
    """Turn a function of a system's own arguments into a `Dialect`."""
    return lambda make: Dialect(make, system, odd)
