"""Which attributes of an optimizer inside can be read and set on the wrapper.

tf.keras's legacy optimizers tell hyperparameters, such as `beta_1`, from what is set once, such as `epsilon`.
Newer ones do not: the same line is drawn for them here.
"""

from __future__ import annotations

from typing import Any

from preamp.systems.arguments import UNUSED


def is_hyperparameter(inner: object, name: str) -> bool:
    """Return whether a name is a hyperparameter of an optimizer.

    It is one if it is a public number, or what every newer optimizer has: None or a bool where not used.
    Not one is what legacy optimizers keep to themselves: an `epsilon`, and what slots start from.
    """
    value = vars(inner).get(name, "")
    if name in UNUSED:
        return name in vars(inner)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and not name.startswith(("_", "epsilon", "initial_"))


class Hyperparameters:
    """Reads and sets hyperparameters of `_optimizer`."""

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("_optimizer")
        if inner is not None and is_hyperparameter(inner, name):
            return getattr(inner, name)
        if hasattr(type(self), name):  # a property that raised AttributeError: say what it said
            return object.__getattribute__(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        inner = vars(self).get("_optimizer")
        if inner is not None and name not in vars(self) and is_hyperparameter(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)
