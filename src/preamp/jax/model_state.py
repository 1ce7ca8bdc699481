"""A model's state in what a loss function returns: on a skipped step it comes back as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from preamp.errors import UsageError

__all__ = ["keep_on_skip"]


def keep_on_skip(
    aux: Any, finite: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, required: bool
) -> Any:
    """Return aux; on a skipped step the state in it as it was in the arguments.

    State is a tree with names, such as a dictionary or a module, that has the structure and the shapes of one
    argument, or of a part of one. A bare array, list or tuple is not taken for state: logits and labels may
    well have the same shape.

    Args:
        aux: any tree.
        finite: whether the step was taken, a boolean scalar.
        args: the arguments that aux was computed from, by position.
        kwargs: by name.
        required: whether there has to be state.

    Raises:
        UsageError: for state that could be that of several arguments; for none where it is required.
    """
    states: dict[Any, list[tuple[str, Any]]] = {}
    for name, argument in [*((f"args[{i}]", arg) for i, arg in enumerate(args)), *kwargs.items()]:
        _collect(name, argument, states)
    found = []

    def keep(path: Any, node: Any) -> Any:
        signature = _signature(node)
        if signature not in states:
            return node
        (name, old), *others = states[signature]
        found.append(path)
        if others:
            raise UsageError(
                f"aux{jax.tree_util.keystr(path)} could be the new state of {name} and of {others[0][0]}: "
                "both have its names and shapes, and a skipped step has to return one of them. Write both "
                "as one "
                'argument and one entry of aux, {"a": ..., "b": ...}, or step(..., keep_state=False).'
            )
        return jax.tree.map(lambda new, old: jnp.where(finite, new, _in_dtype(old, new.dtype)), node, old)

    kept = jax.tree_util.tree_map_with_path(keep, aux, is_leaf=lambda node: _signature(node) in states)
    if required and not found:
        raise UsageError(
            "keep_state=True, but nothing in aux has the names and shapes of an argument. Write "
            'step(params, opt_state, {"batch_stats": old}, ...) and return loss, {"batch_stats": new}.'
        )
    return kept


def _collect(name: str, node: Any, states: dict[Any, list[tuple[str, Any]]]) -> None:
    """Add a tree and its parts, by what they look like."""
    if jax.tree_util.all_leaves([node]):
        return
    signature = _signature(node)
    if signature is not None:
        states.setdefault(signature, []).append((name, node))
    for path, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]:
        _collect(name + jax.tree_util.keystr(path), child, states)


def _signature(node: Any) -> Any:
    """Return structure and shapes of a tree of arrays with names; None for anything else."""
    if node is None or type(node) in (tuple, list) or jax.tree_util.all_leaves([node]):
        return None
    leaves, structure = jax.tree.flatten(node)
    if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        return None
    return structure, tuple(jnp.shape(leaf) for leaf in leaves)


def _in_dtype(array: Any, dtype: Any) -> Any:
    return array if array.dtype == dtype else jnp.asarray(array).astype(dtype)
