"""Which function of optax is calling: code of optax must not compute with scaled gradients, nor wrap us."""

from __future__ import annotations

import sys
from typing import Any

BETWEEN = ("jax", "contextlib", "functools")  # whose frames stand between a caller and what JAX calls


def optax_caller() -> str | None:
    """Return the name of the function of optax that called our caller, also through JAX; None for others.

    Of several it is the innermost that is not a helper for trees: what the user wrote, or the part of a chain
    that was about to compute.
    """
    frame: Any = sys._getframe(2)
    names = []
    while frame is not None and _package(frame) in ("optax", *BETWEEN):
        if _package(frame) == "optax":
            names.append((frame.f_code.co_name, frame.f_globals["__name__"]))
        frame = frame.f_back
    if not names:
        return None
    name, module = next((pair for pair in names if ".tree" not in pair[1]), names[-1])
    return f"optax.{name}" if hasattr(sys.modules["optax"], name) else f"{name} in {module}"


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
