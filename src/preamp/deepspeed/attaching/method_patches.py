"""Replace methods of single objects, not of their classes, which other engines use; and put them back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from preamp.errors import UsageError


class Patch(partial[Any]):
    """A replacement of a method, which gets the original as its first argument."""


class MethodPatches:
    """The methods that were replaced, in order."""

    def __init__(self) -> None:
        self._placed: list[tuple[object, str, Patch, dict[str, Any]]] = []

    def place(self, owner: object, name: str, instead: Callable[..., Any]) -> None:
        """Replace a method by `instead(original, *arguments)`.

        Raises:
            UsageError: if it has been replaced already. Nothing is changed.
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
        """Put all originals back, or none if one of the replacements has been wrapped since."""
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
