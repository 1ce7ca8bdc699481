"""How many entries of arrays there are of each binary exponent, inside jitted functions, and a look at them.

This room counts, and names what was counted. It refuses to know when to look and what follows.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from preamp.checks import one_of, shown
from preamp.errors import UsageError
from preamp.jax import axes
from preamp.jax.scaling.flow_slots import FlowSlot, is_flow_slot
from preamp.jax.scaling.gradients import is_inexact
from preamp.jax.scaling.states import kind_of
from preamp.record.exponents import BANDS, FIELDS, ExponentHistogram
from preamp.record.snapshots import Kind, Snapshot, SnapshotRow

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
    return jax.tree.map(
        lambda leaf: _count(jnp.asarray(leaf)) if is_inexact(leaf) else None, tree, is_leaf=is_flow_slot
    )


def look(
    histograms: Any,
    *,
    index: int,
    scale: float = 1.0,
    low_dtype: str = "float16",
    what: Kind = "gradient",
    like: Any = None,
) -> Snapshot:
    """Return what `exponent_histogram` counted as a `Snapshot`, for `Trace.add_snapshot`. Reads once.

    Args:
        histograms: a tree of counts, or of the slots of `watch` after a backward pass; rows are named by its
            paths.
        index: the number of the step.
        scale: the loss scale that was in it.
        low_dtype: what overflows and underflows, such as "float16".
        what: "gradient", "flow", "activation", "weight" or "input".
        like: the tree that was counted, or one of the same dtypes, to name them; None for all float32.

    Raises:
        UsageError: for leaves of another shape than [256] or that are not whole numbers from 0, for not as
            many as `like` has, and for an index or a scale that no step has.
        PolicyError: for another `what` or `low_dtype`.

    `print(look(...))` shows a table. How large the values were is known to a power of two.
    """
    _check_step(index, scale)
    one_of("what", what, get_args(Kind))
    one_of("low_dtype", low_dtype, tuple(BANDS))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(histograms, is_leaf=is_flow_slot)[0]]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    counts = [
        node.counts if is_flow_slot(node) else node
        for node in jax.tree.leaves(histograms, is_leaf=is_flow_slot)
    ]
    read = map(_histogram, names, jax.device_get(counts))
    rows = tuple(map(SnapshotRow, names, [what] * len(names), _dtypes(like, len(names)), read))
    computed = () if what in ("input", "weight") else rows
    given = {"inputs": rows} if what == "input" else {"weights": rows} if what == "weight" else {}
    return Snapshot(int(index), float(scale), low_dtype, computed, **given)


def flow_slot() -> FlowSlot:
    """Return what `watch` needs to count in: a `FlowSlot` of zeros."""
    return FlowSlot(jnp.zeros(FIELDS, jnp.float32))


def watch(x: T, slot: Any) -> T:
    """Return `x`. The derivative with respect to `slot` is the histogram of that with respect to `x`.

    So the gradients that flow between layers are counted in the same backward pass, without a callback. Where
    a slot is used several times, its counts add up. What is counted is scaled as the loss is; the counts
    themselves are not, and `unscale`, `value_and_grad` and clipping leave them as they are. With an
    `axis_name` they are those of all devices.

    Args:
        x: a floating or complex array.
        slot: a `flow_slot()`, an argument of the loss.

    Raises:
        UsageError: for what is not such an array, and what is not such a slot.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> flows = jax.grad(lambda slot: jnp.sum(watch(jnp.ones(3), slot) * 4.0))(flow_slot())
    >>> float(flows.counts[127 + 2])
    3.0
    """
    _check_watched(x, slot)
    watched: T = _watched(x, FlowSlot(_varying_like(x, slot.counts)))
    return watched


def _check_watched(x: Any, slot: Any) -> None:
    if is_flow_slot(x):
        raise UsageError("watch was given the slot first. Write watch(x, slot).")
    if not (hasattr(x, "shape") and is_inexact(x)):
        raise UsageError(
            f"watch was given {kind_of(x)} and needs a floating or complex array, which a gradient flows to. "
            "Write watch(x, slot) for each array of its own, with a slot of its own."
        )
    if not is_flow_slot(slot) or jnp.shape(slot.counts) != (FIELDS,):
        what = f"counts of shape {jnp.shape(slot.counts)}" if is_flow_slot(slot) else kind_of(slot)
        raise UsageError(
            f"the slot of watch is {what}, not a flow_slot(). Write slot = flow_slot(), give it to the loss "
            "as an argument, and differentiate with respect to it."
        )
    if axes.varying(slot.counts) - axes.varying(x):
        raise UsageError(
            "the slot of watch differs between devices, along an axis of shard_map on which the array does "
            "not. Write in_specs=PartitionSpec() for the slot: counts of all devices are added up."
        )


def _varying_like(x: Any, counts: Any) -> Any:
    """Return counts that `shard_map` takes to differ as `x` does: their derivative is then the sum of all."""
    for name in axes.varying(x) - axes.varying(counts):
        counts = jnp.where(lax.axis_index(name) >= 0, counts, counts)
    return counts


@jax.custom_vjp
def _watched(x: Any, slot: Any) -> Any:
    return x


def _watch_forward(x: Any, slot: Any) -> tuple[Any, None]:
    return x, None


def _watch_backward(_: None, flow: Any) -> tuple[Any, Any]:
    return flow, FlowSlot(_count(flow).astype(jnp.float32))


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


def _check_step(index: Any, scale: Any) -> None:
    if not float(index).is_integer() or index < 0:
        raise UsageError(f"index={shown(index)} is not the number of a step. Write index=0 for the first.")
    if not 0.0 < float(scale) < math.inf:
        raise UsageError(
            f"scale={shown(scale)} is not a finite number above 0. Write scale=1.0 if the loss was not "
            "scaled."
        )


def _histogram(name: str, counts: Any) -> ExponentHistogram:
    if np.shape(counts) != (FIELDS,):
        raise UsageError(
            f"an array of shape {np.shape(counts)} is no histogram. "
            "Write look(exponent_histogram(gradients), index=...)."
        )
    if not np.array_equal(counts, np.abs(np.rint(counts))):
        raise UsageError(
            f"the counts of {name or 'the array'} are not whole numbers from 0: they were divided, by a loss "
            "scale or in a mean over devices. Write look(flows, ...) with the slots as differentiating "
            "returns them, and jax.lax.psum over devices."
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
