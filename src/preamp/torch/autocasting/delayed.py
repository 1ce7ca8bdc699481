"""The scales of a recipe with delayed scaling: of each module and call, kept with the module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from preamp.arrays.torch_compat import mark_constant, object_of
from preamp.errors import UsageError
from preamp.recipes.arithmetic import first_state
from preamp.recipes.values import KNOWN

# Of attributes of modules, with the number of the call in a region: neither parameters nor buffers, so that
# `state_dict`, optimizers and DDP do not know of them.
NAME = "_preamp_scales_"
OPERANDS = 6  # of the three products of a layer

Scales = list[Tensor]
"""What a call reads and writes: `first_state` and what follows for the operands of fprop, dgrad and wgrad."""


def scales_of(module: nn.Module, call: int) -> Scales:
    """Return the scales of a call of a module, which `make` has made."""
    found: Scales = getattr(module, f"{NAME}{call}")
    return found


@mark_constant  # a compiled function changes what was there before, and makes nothing that stays
def make(module: int, call: int, recipe: str, device: str) -> None:
    """Make the scales of a call of a module, if there are none.

    Args:
        module: its identity.
        call: its number in the region.
        recipe: its key.
        device: where the scales are.
    """
    known: Scales = vars(object_of(module)).setdefault(
        f"{NAME}{call}", [torch.tensor(first_state(quant)) for quant in KNOWN[recipe].quants]
    )
    known[:] = [each.to(device) for each in known]


def recipe_state(model: nn.Module) -> dict[str, dict[str, Scales]]:
    """Return the scales of a delayed recipe, to save beside `model.state_dict()`.

    Args:
        model: the `model=` of the regions.

    Returns:
        The path of each module, with its scales.
    """
    return {path: found for path, module in model.named_modules() if (found := _kept(module))}


def load_recipe_state(model: nn.Module, state: Mapping[str, Mapping[str, Scales]]) -> None:
    """Put back what `recipe_state` returned.

    Raises:
        UsageError: for a path that the model has not; nothing is changed.
    """
    modules = dict(model.named_modules())
    for path in state:
        if path not in modules:
            raise UsageError(f"{path!r} names no module of this {type(model).__name__}.")
        for name, scales in dict(state[path]).items():
            if (
                not name.startswith(NAME)
                or len(scales) != OPERANDS
                or any(each.dim() != 1 for each in scales)
            ):
                raise UsageError(f"{path!r}: {name!r} has not the scales that recipe_state returns.")
    for path, module in modules.items():
        for name in _kept(module):
            delattr(module, name)
        for name, scales in state.get(path, {}).items():
            setattr(module, name, [each.clone() for each in scales])


def _kept(module: nn.Module) -> dict[str, Scales]:
    return {name: value for name, value in vars(module).items() if name.startswith(NAME)}
