"""Objects of Flax NNX that are given as parameters."""

from __future__ import annotations

import sys
from typing import Any

import jax

from preamp.errors import UsageError

NNX = "flax.nnx"


def refuse_stateful(params: Any) -> None:
    """Refuse parameters that are an NNX module with other variables, such as BatchNorm's statistics.

    JAX differentiates a copy of the module: what the loss writes to it is lost, and all of its variables
    would be trained as parameters. Flax is looked up, never imported.

    Args:
        params: any tree.

    Raises:
        UsageError: naming the variables, with the lines to write.
    """
    nnx = sys.modules.get(NNX)
    if nnx is None:
        return
    for node in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, nnx.Module)):
        if isinstance(node, nnx.Module) and (others := _variables(nnx, node)):
            raise UsageError(
                f"the parameters are an NNX module that has {', '.join(others[:3])} besides parameters: "
                "what the loss writes there would be lost, and the optimizer would train them. Write "
                "graphdef, params, rest = nnx.split(model, nnx.Param, ...), give params and rest to the "
                "step, and in the loss write model = nnx.merge(graphdef, params, rest, copy=True) and "
                "return loss, nnx.state(model, nnx.Not(nnx.Param)), with has_aux=True."
            )


def _variables(nnx: Any, module: Any) -> list[str]:
    """Return the kinds and paths of the variables of a module that are not parameters."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))
    return [f"{type(variable).__name__} {'.'.join(map(str, path))}" for path, variable in state]
