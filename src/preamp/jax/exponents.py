"""How many entries of arrays there are of each binary exponent, inside jitted functions, and a look at them.

This room counts, and names what was counted. It refuses to know when to look and what follows.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from preamp.checks import one_of
from preamp.errors import UsageError
from preamp.exponents import BANDS, FIELDS, ExponentHistogram
from preamp.jax.gradients import is_inexact
from preamp.looks import Kind, Look, LookRow

__all__ = ["exponent_histogram", "flow_slot", "look", "watch"]

T = TypeVar("T")


def exponent_histogram(tree: Any) -> Any:
    """Return how many entries of each leaf there are of each binary exponent. Works inside `jit`.

    Bin 0 holds zeros and what is smaller than the smallest normal float32, 2**-126; bin 255 holds inf, NaN
    and what no float32 can hold; between them, bin b is that of the exponent floor(log2(abs(x))) = b - 127.
    Complex entries count as two. Counts of several devices add up: `jax.lax.psum(histograms, axis_name)`.

    Each leaf is read once. The counting itself takes a CPU about ten times as long as a sum of the leaf, and
    8 bytes of memory for each entry of it, so count on some steps only.

    Args:
        tree: any tree; leaves that are neither floating nor complex become None.

    Returns:
        The same tree, with an int32 array of shape [256] for each leaf.

    >>> import jax.numpy as jnp
    >>> counts = exponent_histogram(jnp.array([0.0, 1.0, 1.5, -4.0]))
    >>> int(counts[0]), int(counts[127]), int(counts[129])
    (1, 2, 1)
    """
    return jax.tree.map(lambda leaf: _count(jnp.asarray(leaf)) if is_inexact(leaf) else None, tree)


def look(
    histograms: Any,
    *,
    index: int,
    scale: float = 1.0,
    low_dtype: str = "float16",
    what: Kind = "gradient",
    like: Any = None,
) -> Look:
    """Return what `exponent_histogram` counted as a `Look`, for `Trace.look`. Reads devices, once.

    Args:
        histograms: a tree of counts; rows are named by its paths.
        index: the number of the step.
        scale: the loss scale that was in it.
        low_dtype: what overflows and underflows, such as "float16".
        what: "gradient", "flow", "activation", "weight" or "input".
        like: the tree that was counted, or one of the same dtypes, to name them; None for all float32.

    Raises:
        UsageError: for leaves of another shape than [256], or not as many as `like` has.
        PolicyError: for another `what` or `low_dtype`.

    `print(look(...))` shows a table. How large the values were is known to a power of two.
    """
    one_of("what", what, get_args(Kind))
    one_of("low_dtype", low_dtype, tuple(BANDS))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(histograms)[0]]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    read = map(_histogram, jax.device_get(jax.tree.leaves(histograms)))
    rows = tuple(map(LookRow, names, [what] * len(names), _dtypes(like, len(names)), read))
    computed = () if what in ("input", "weight") else rows
    given = {"inputs": rows} if what == "input" else {"weights": rows} if what == "weight" else {}
    return Look(int(index), float(scale), low_dtype, computed, **given)


def flow_slot() -> jax.Array:
    """Return what `watch` needs to count in: zeros of shape [256], float32."""
    return jnp.zeros(FIELDS, jnp.float32)


def watch(x: T, slot: Any) -> T:
    """Return `x`. The derivative with respect to `slot` is the histogram of that with respect to `x`.

    So the gradients that flow between layers are counted in the same backward pass, without a callback. Where
    a slot is used several times, its counts add up. They are scaled as the loss is, so differentiate with
    `jax.grad` or `scaled_value_and_grad`: dividing by the scale or averaging over devices changes counts too.

    Args:
        x: a floating or complex array.
        slot: a `flow_slot()`, an argument of the loss.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> flows = jax.grad(lambda slot: jnp.sum(watch(jnp.ones(3), slot) * 4.0))(flow_slot())
    >>> float(flows[127 + 2])
    3.0
    """
    watched: T = _watched(x, slot)
    return watched


@jax.custom_vjp
def _watched(x: Any, slot: Any) -> Any:
    return x


def _watch_forward(x: Any, slot: Any) -> tuple[Any, None]:
    return x, None


def _watch_backward(_: None, flow: Any) -> tuple[Any, Any]:
    return flow, _count(flow).astype(jnp.float32)


_watched.defvjp(_watch_forward, _watch_backward)


def _count(array: Any) -> Any:
    if jnp.iscomplexobj(array):
        return _count(array.real) + _count(array.imag)
    return jnp.zeros(FIELDS, jnp.int32).at[_fields(array).ravel()].add(1, mode="promise_in_bounds")


def _fields(array: Any) -> Any:
    """Return the exponent fields of an array as float32; all but float64 go into one exactly."""
    if array.dtype == jnp.float64:
        wide = (lax.bitcast_convert_type(array, jnp.int64) >> 52) & 0x7FF
        return jnp.clip(wide - (1023 - 127), 0, FIELDS - 1).astype(jnp.uint32)
    return (lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32) >> 23) & 0xFF


def _histogram(counts: Any) -> ExponentHistogram:
    if np.shape(counts) != (FIELDS,):
        raise UsageError(
            f"an array of shape {np.shape(counts)} is no histogram. "
            "Write look(exponent_histogram(gradients), index=...)."
        )
    return ExponentHistogram.of_fields(np.rint(counts).astype(np.int64).tolist())


def _dtypes(like: Any, count: int) -> list[str]:
    """Return the names of the dtypes in a tree that was counted."""
    dtypes = [str(jnp.asarray(leaf).dtype) for leaf in jax.tree.leaves(like) if is_inexact(leaf)]
    if like is not None and len(dtypes) != count:
        raise UsageError(
            f"like= has {len(dtypes)} floating leaves, but there are {count} histograms. "
            "Write like= for the tree that was counted."
        )
    return dtypes or ["float32"] * count
