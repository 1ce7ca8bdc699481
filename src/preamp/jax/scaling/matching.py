"""Whether gradients, parameters and the inner optimizer's state belong together, and which leaf does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from preamp.errors import UsageError
from preamp.jax.scaling import gradients as arithmetic


def check_gradients(gradients: Any, params: Any) -> None:
    """Raise unless there is a gradient of the same shape for each parameter that has one.

    Args:
        gradients: a tree.
        params: a tree; None, where an optimizer is not given any, is not checked. Of `LookaheadParams` it is
            the fast ones that have gradients.

    Raises:
        UsageError: with the first leaf that is missing, None, of another shape, or too many.
    """
    if params is None:
        return
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    if _shapes(gradients) == _shapes(params):
        return
    have, need = _leaves(gradients), _leaves(params)
    for name, parameter in need.items():
        if not arithmetic.is_inexact(parameter):
            continue
        where = f"params{name} has shape {jnp.shape(parameter)}"
        if have.get(name) is None:
            what = f"the gradients{name} are None" if name in have else f"the gradients have no leaf {name}"
            raise UsageError(
                f"{what}, but {where}. Write gradients and parameters as the same tree: loss_fn(params, "
                "...) has to be differentiated with respect to all that is updated."
            )
        if jnp.shape(have[name]) != jnp.shape(parameter):
            raise UsageError(
                f"the gradients{name} have shape {jnp.shape(have[name])}, but {where}. Write gradients and "
                "parameters of the same shapes."
            )
    for name in have:
        if name not in need and have[name] is not None:
            raise UsageError(
                f"the gradients have a leaf {name}, and the parameters have none there. Write gradients and "
                "parameters as the same tree."
            )


def check_inner_state(error: Exception | None, init: Callable[[Any], Any], params: Any, state: Any) -> None:
    """Raise what is wrong with an inner optimizer's state, if it is not that of these parameters.

    Args:
        error: what the inner optimizer raised.
        init: of the inner optimizer.
        params: float32 where they were shorter.
        state: the inner optimizer's.

    Raises:
        UsageError: with the first leaf that is missing, or not as `init` makes it.
    """
    try:
        expected = _leaves(jax.eval_shape(init, params))
    except Exception:  # an optimizer that cannot say; the error that was raised stands
        return
    given = _leaves(state)
    for name in [*expected, *given]:
        ours, theirs = expected.get(name), given.get(name)
        if _what(ours) != _what(theirs):
            raise UsageError(
                f"opt_state.inner_state{name} is {_what(theirs)}, and for these parameters it has to be "
                f"{_what(ours)}: the state belongs to other parameters or to another optimizer, or lost its "
                "types in a file. Write optimizer.init(params), or restore with it as the template."
            ) from error


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths; None is one."""
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def _shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(leaf) for leaf in leaves if hasattr(leaf, "shape")]


def _what(leaf: Any) -> str:
    return "missing" if leaf is None else f"of shape {jnp.shape(leaf)}"
