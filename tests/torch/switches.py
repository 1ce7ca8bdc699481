"""What the tests force, or look at, in `preamp.torch` that has no public name: here alone they know it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from preamp.arrays import torch as arrays
from preamp.arrays import torch_compat as compat
from preamp.arrays import torch_devices
from preamp.arrays.torch import Gradients
from preamp.torch.autocasting import operators, rules, unscaled
from preamp.torch.flops import FlopCounter
from preamp.torch.scaling import buffers, grad_scaler, refusals, scaled

__all__ = [
    "FlopCounter",
    "Gradients",
    "arrays",
    "buffers",
    "compat",
    "operators",
    "rules",
    "torch_devices",
    "unscaled",
]


def reads_are_free(answer: bool) -> Any:
    """Have the host read for nothing, as from a CPU, or not, as from accelerators."""
    return patch.object(grad_scaler, "_sync_is_free", lambda device: answer)


def ranks(number: int) -> Any:
    """Have a scaler find so many ranks."""
    return patch.object(refusals, "number_of_ranks", lambda: number)


def looks_for_ruin(answer: bool) -> Any:
    """Replace what looks for running statistics that a skipped step has ruined."""
    return patch.object(scaled, "some_are_ruined", side_effect=lambda found: answer)


def largest_as_on_a_device() -> Any:
    """Take the largest number by a norm, as on an accelerator: on a CPU that is slow."""
    return patch.object(arrays, "largest", lambda many: torch.stack(compat.foreach_norm(many, math.inf)))


def unwatched() -> Any:
    """Have no region look for gradients without a scaler: its hook stays until the next optimizer step."""
    return patch.object(unscaled.watch, "is_on", False)


@contextmanager
def release_without(*gone: str) -> Iterator[None]:
    """Have PyTorch list what it lists without some operators."""

    def without(function: Any) -> Any:
        def listed(*arguments: Any) -> list[str]:
            names = [(full, full.removeprefix("aten::")) for full in function(*arguments)]
            return [full for full, n in names if n not in gone and n.partition(".")[0] not in gone]

        return listed

    caches: list[Any] = [operators._names, operators.overloads, operators._resolved, operators.listed]
    caches += [operators.functions, operators.checked_functions, operators.arithmetic]
    caches += [rules.actions, rules._rules]
    names = ("all_operators", "operators_with_kernel")
    changed = {name: without(getattr(compat, name)) for name in names}
    with patch.multiple(compat, **changed):
        for one in caches:
            one.cache_clear()
        yield
    for one in caches:
        one.cache_clear()
