"""Histograms of binary exponents, counted inside jitted functions and in the backward pass."""

from __future__ import annotations

import math
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from preamp.arrays.jax import is_inexact
from preamp.checks import one_of, shown
from preamp.errors import UsageError
from preamp.jax import axes
from preamp.jax.trees import FlowSlot, is_flow_slot, kind_of
from preamp.record.exponents import BANDS, FIELDS, ExponentHistogram
from preamp.record.snapshots import Kind, Snapshot, SnapshotRow

T = TypeVar("T")


def exponent_histogram(tree: object) -> Any:
    """Return how many entries of each leaf have each binary exponent. Works inside `jit`.

    Bin 0 counts zeros and magnitudes below the smallest normal float32, 2**-126; bin 255 counts inf, NaN
    and magnitudes that exceed float32; any other bin b counts the exponent floor(log2(abs(x))) = b - 127.
    A complex entry counts as two. To add up several devices, write `jax.lax.psum(histograms, axis_name)`.

    Each leaf is read once. On a CPU counting takes about ten times as long as summing the leaf, and 8 bytes
    of memory for each of its entries, so count on some steps only.

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


def snapshot(
    histograms: object,
    *,
    index: int,
    scale: float = 1.0,
    low_dtype: str = "float16",
    what: Kind = "gradient",
    like: object = None,
) -> Snapshot:
    """Return the counts of `exponent_histogram` as a `Snapshot` for `Trace.add_snapshot`. Reads devices once.

    Args:
        histograms: a tree of counts, or of the slots of `watch` after a backward pass; its paths name the
            rows.
        index: the number of the step.
        scale: the loss scale that the loss was multiplied by.
        low_dtype: the dtype whose overflow and underflow is of interest, such as "float16".
        what: "gradient", "flow", "activation", "weight" or "input".
        like: the tree that was counted, or one with the same dtypes, to show them; None if all are float32.

    Raises:
        UsageError: for a leaf that does not have shape [256] or does not hold whole numbers from 0, if `like`
            has another number of leaves, and for an index or a scale that no step can have.
        PolicyError: for another `what` or `low_dtype`.

    `print(snapshot(...))` shows a table. Magnitudes are known to a power of two.
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
    inputs, weights = (rows if what == kind else () for kind in ("input", "weight"))
    return Snapshot(int(index), float(scale), low_dtype, computed, inputs, weights)


def flow_slot() -> FlowSlot:
    """Return a `FlowSlot` of zeros for `watch` to count in."""
    return FlowSlot(jnp.zeros(FIELDS, jnp.float32))


def watch(x: T, slot: FlowSlot) -> T:
    """Return `x`; the derivative with respect to `slot` is the histogram of the gradient of `x`.

    This counts the gradients that flow between layers in the same backward pass, without a callback. Where a
    slot is used several times, its counts add up. The gradients that are counted carry the loss scale. The
    counts do not: `unscale`, `value_and_grad` and clipping leave them unchanged. With an `axis_name` they are
    summed over all devices.

    Args:
        x: a floating or complex array.
        slot: a `flow_slot()`, which has to be an argument of the loss.

    Raises:
        UsageError: if `x` is not such an array, or `slot` is not such a slot.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> flows = jax.grad(lambda slot: jnp.sum(watch(jnp.ones(3), slot) * 4.0))(flow_slot())
    >>> float(flows.counts[127 + 2])
    3.0
    """
    _check_watched(x, slot)
    watched: T = _watched(x, FlowSlot(_varying_like(x, slot.counts)))
    return watched


def _check_watched(x: object, slot: object) -> None:
    if is_flow_slot(x):
        raise UsageError("watch was given the slot first. Write watch(x, slot).")
    if not (hasattr(x, "shape") and is_inexact(x)):
        raise UsageError(
            f"watch was given {kind_of(x)} and needs a floating or complex array, which a gradient flows to. "
            "Write watch(x, slot) for each array separately, each with its own slot."
        )
    if not isinstance(slot, FlowSlot) or jnp.shape(slot.counts) != (FIELDS,):
        what = f"counts of shape {jnp.shape(slot.counts)}" if isinstance(slot, FlowSlot) else kind_of(slot)
        raise UsageError(
            f"the slot of watch is {what}, not a flow_slot(). Write slot = flow_slot(), give it to the loss "
            "as an argument, and differentiate with respect to it."
        )
    if axes.varying(slot.counts) - axes.varying(x):
        raise UsageError(
            "the slot of watch differs between devices along an axis of shard_map, and the array does not. "
            "Write in_specs=PartitionSpec() for the slot: the counts of all devices are added up."
        )


def _varying_like(x: object, counts: Array) -> Array:
    """Make counts vary over devices as `x` does, for `shard_map`: their derivative is then the sum of all."""
    for name in axes.varying(x) - axes.varying(counts):
        counts = jnp.where(lax.axis_index(name) >= 0, counts, counts)
    return counts


@jax.custom_vjp
def _watched(x: T, slot: FlowSlot) -> T:
    return x


def _watch_forward(x: T, slot: FlowSlot) -> tuple[T, None]:
    return x, None


def _watch_backward(_: None, flow: Array) -> tuple[Array, FlowSlot]:
    return flow, FlowSlot(_count(flow).astype(jnp.float32))


_watched.defvjp(_watch_forward, _watch_backward)


def _count(array: Array) -> Array:
    if jnp.iscomplexobj(array):
        return _count(array.real) + _count(array.imag)
    return jnp.zeros(FIELDS, jnp.int32).at[_fields(array).ravel()].add(1, mode="promise_in_bounds")


def _fields(array: Array) -> Array:
    """Return the exponent fields of an array as float32; all but float64 go into one exactly."""
    if array.dtype == jnp.float64:
        wide = (lax.bitcast_convert_type(array, jnp.int64) >> 52) & 0x7FF
        return jnp.clip(wide - (1023 - 127), 0, FIELDS - 1).astype(jnp.uint32)
    return (lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32) >> 23) & 0xFF


def _check_step(index: float, scale: float) -> None:
    if not float(index).is_integer() or index < 0:
        raise UsageError(f"index={shown(index)} is not the number of a step. Write index=0 for the first.")
    if not 0.0 < float(scale) < math.inf:
        raise UsageError(
            f"scale={shown(scale)} is not a finite number above 0. Write scale=1.0 if the loss was not "
            "scaled."
        )


def _histogram(name: str, counts: np.ndarray) -> ExponentHistogram:
    if np.shape(counts) != (FIELDS,):
        raise UsageError(
            f"an array of shape {np.shape(counts)} is not a histogram. "
            "Write snapshot(exponent_histogram(gradients), index=...)."
        )
    if not np.array_equal(counts, np.abs(np.rint(counts))):
        raise UsageError(
            f"the counts of {name or 'the array'} are not whole numbers from 0: they were divided, by a loss "
            "scale or in a mean over devices. Write snapshot(flows, ...) with the slots exactly as "
            "differentiation returns them, and jax.lax.psum over devices."
        )
    return ExponentHistogram.of_fields(np.rint(counts).astype(np.int64).tolist())


def _dtypes(like: object, count: int) -> list[str]:
    """Return the names of the dtypes in a tree that was counted."""
    dtypes = [str(jnp.asarray(leaf).dtype) for leaf in jax.tree.leaves(like) if is_inexact(leaf)]
    if like is not None and len(dtypes) != count:
        raise UsageError(
            f"like= has {len(dtypes)} floating leaves, but there are {count} histograms. "
            "Write like= for the tree that was counted."
        )
    return dtypes or ["float32"] * count
