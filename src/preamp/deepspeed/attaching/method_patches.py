"""Methods replaced on single objects, and put back. Classes stay as they are, for other engines' sake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from preamp.errors import UsageError


class Patch(partial[Any]):
    """A method that knows what it took the place of: its first argument."""


class MethodPatches:
    """What was replaced, in order."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str, Patch, dict[str, Any]]] = []

    def place(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Have `instead(original, *arguments)` called in a method's place.

        Raises:
            UsageError: if that has been done. Nothing was replaced.
        """
        before = {name: vars(owner)[name]} if name in vars(owner) else {}
        if isinstance(before.get(name), Patch):
            raise UsageError(
                f"{type(owner).__name__}.{name} was replaced by an earlier attach. "
                "Write handle.detach() first, with what that attach returned."
            )
        hook = Patch(instead, getattr(owner, name))
        setattr(owner, name, hook)
        self._placed.append((owner, name, hook, before))

    def remove(self) -> None:
        """Put back what was there, all of it or, if somebody has wrapped a hook since, nothing.

        Raises:
            UsageError: for a hook that is wrapped.
        """
        for owner, name, hook, _ in self._placed:
            if vars(owner).get(name) is not hook:
                raise UsageError(
                    f"{type(owner).__name__}.{name} was replaced again after attach, so it cannot be put "
                    "back. Write handle.detach() after that is undone."
                )
        while self._placed:
            owner, name, _, before = self._placed.pop()
            delattr(owner, name)
            for original in before.values():
                setattr(owner, name, original)
