"""The state of a model that its loss function returns, such as the running statistics of a batch norm."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from preamp.checks import level_of_caller, shown
from preamp.errors import UsageError

# What the statistics of a batch norm look like: the name of Flax's collection; types of Flax NNX and Equinox;
# the names in one layer of Flax and of Haiku.
COLLECTION = "batch_stats"
TYPES = {("flax", "BatchStat"), ("equinox", "State")}
LAYERS = ({"mean", "var"}, {"average", "counter", "hidden"})


def kept_on_skip(taken: Array, new: object, args: Sequence[object]) -> Any:
    """Return the new state, or on a skipped step that of the first argument, in the wider of both dtypes.

    Raises:
        UsageError: for no argument, and for a state that has another structure or other shapes than it.
    """
    if not args:
        raise UsageError(
            "has_state=True, and the step was given no state. Write step(params, opt_state, state, ...), "
            "where the loss function takes the state after the parameters."
        )
    old: Any = args[0]
    returned, taken_in = map(str, map(jax.tree.structure, (new, old)))
    if returned != taken_in:
        raise UsageError(
            f"the loss function returned a state of the structure {shown(returned)}, and took one of "
            f"{shown(taken_in)}. Return the new state as it came, as in loss, state. What else is in aux "
            "needs has_aux=True and loss, (state, aux)."
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True)
    for (path, one), other in pairs:
        if jnp.shape(one) != jnp.shape(other):
            raise UsageError(
                f"state{jax.tree_util.keystr(path)} is returned in the shape {jnp.shape(one)}, and was "
                f"{jnp.shape(other)}. Return it in the shape of the argument."
            )
    return jax.tree.map(lambda one, other: _chosen(taken, one, other), new, old)


def warn_of_statistics(aux: object, arguments: object) -> None:
    """Warn of the running statistics of a batch norm in aux, where a skipped step does not keep them.

    Args:
        aux: what the loss function returned besides the loss and the state.
        arguments: of the loss function. An argument that is returned unchanged is not a new state.
    """
    same = {id(leaf) for leaf in jax.tree.leaves(arguments)}
    for name, leaf in _statistics(aux, "aux"):
        if id(leaf) not in same and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            warnings.warn(
                f"{name} looks like the running statistics of a batch norm: after an overflow in the forward "
                "pass, inf or NaN would stay in them for good. Write step(loss_fn, optimizer, "
                "has_state=True)(params, opt_state, batch_stats, ...) with def loss_fn(params, batch_stats, "
                "...), which returns loss, new_batch_stats. If it is not state, give it another name.",
                stacklevel=level_of_caller("jax"),
            )
            return


def _statistics(node: object, name: str, inside: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the leaves that are running statistics, with their names."""
    if jax.tree_util.all_leaves([node]):
        if inside and hasattr(node, "dtype"):
            yield name, node
        return
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    shapes = {_last(path): jnp.shape(child) for path, child in children if hasattr(child, "shape")}
    vectors = {shape for key, shape in shapes.items() if key != "counter"}
    is_layer = set(shapes) in LAYERS and len(vectors) == 1 and () not in vectors
    kind = (type(node).__module__.partition(".")[0], type(node).__name__)
    for path, child in children:
        deeper = inside or is_layer or kind in TYPES or _last(path) == COLLECTION
        yield from _statistics(child, name + jax.tree_util.keystr(path), deeper)


def _last(path: Sequence[Any]) -> object:
    """Return the last key of a path as a name or a number."""
    key = path[-1] if path else None
    return getattr(key, "name", getattr(key, "key", key))


def _chosen(taken: Array, new: ArrayLike, old: ArrayLike) -> Array:
    """Return the new entry or the old one, in the wider of their dtypes."""
    new, old = jnp.asarray(new), jnp.asarray(old)
    if new.dtype != old.dtype:
        inexact = jnp.issubdtype(new.dtype, jnp.inexact)
        dtype = old.dtype if inexact and old.dtype.itemsize > new.dtype.itemsize else new.dtype
        new, old = new.astype(dtype), old.astype(dtype)
    return jnp.where(taken, new, old)
