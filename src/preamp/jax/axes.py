"""Reductions over the mapped axes of `shard_map`, `pmap` and `vmap`, and what JAX tracks about them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from preamp.errors import UsageError


def names_of(axis_name: Hashable) -> tuple[Hashable, ...]:
    """Return the names in an `axis_name` argument: None, one name, or a tuple of them."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def check_bound(names: Sequence[Hashable]) -> None:
    """Raise for an axis that is not mapped here.

    Raises:
        UsageError: with the name of the axis, and what would bind it.
    """
    for name in names:
        try:
            lax.axis_index(name)
        except NameError:
            raise UsageError(
                f"axis_name={name!r} is not the name of an axis here: only jax.pmap, jax.vmap and "
                f"jax.shard_map bind one. Write jax.shard_map(step, mesh=..., ...) over a mesh "
                f"with the axis {name!r}, or jax.pmap(step, axis_name={name!r}). "
                "Under jit alone, with sharded arrays, leave it out."
            ) from None


def varying(value: object) -> frozenset[Hashable]:
    """Return the axes along which `shard_map` knows a value to differ: none with `check_vma=False`."""
    kind: Any = jax.typeof(value)
    axes: Any = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # below and from JAX 0.10
    return frozenset(axes)


def tracked(names: Sequence[Hashable]) -> bool:
    """Return whether JAX tracks along which axes values differ: in `shard_map` with its checks."""
    return bool(names) and bool(varying(lax.axis_index(names[0])))


def unchecked() -> tuple[Hashable, ...]:
    """Return the axes of several devices along which JAX does not track what differs, and computes here.

    They are those of `shard_map` with ``check_vma=False`` and of `pmap`. Before JAX 0.8 `pmap` cannot be
    seen.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.manual_axes if mesh.shape[name] > 1 and not tracked([name]))


def summed(value: object, gradients: Sequence[Array]) -> tuple[Hashable, ...]:
    """Return the axes of several devices along which a loss varies and a gradient does not.

    There `shard_map` has summed the gradients of the devices' losses.
    """
    mine = varying(value)
    if not mine:
        return ()
    over = mine - frozenset.intersection(mine, *map(varying, gradients))
    shape = jax.sharding.get_abstract_mesh().shape
    return tuple(sorted((name for name in over if shape.get(name, 1) > 1), key=str))


def sum_over(names: Sequence[Hashable], totals: Sequence[Array]) -> Any:
    """Return the sum of numbers over all devices. A number that is known to be equal on all counts once."""
    if not names:
        return sum(totals)
    groups = _grouped(names, totals)
    return sum(lax.psum(sum(group), over) if over else sum(group) for over, group in groups.items())


def max_over(names: Sequence[Hashable], amaxes: Sequence[Array]) -> Array:
    """Return the largest of some magnitudes, float32 scalars, over all devices; 0 if there are none."""
    largest = jnp.zeros((), jnp.float32)
    for over, group in _grouped(names, amaxes).items():
        mine = reduce(jnp.maximum, group)
        largest = jnp.maximum(largest, lax.pmax(mine, over) if over else mine)
    return largest


def _grouped(names: Sequence[Hashable], values: Sequence[Array]) -> dict[tuple[Hashable, ...], list[Array]]:
    """Return values by the axes along which they may differ."""
    known, groups = tracked(names), defaultdict(list)
    for value in values:
        mine = tuple(name for name in names if not known or name in varying(value))
        groups[mine].append(value)
    return groups


def mean(names: Sequence[Hashable], gradient: Array) -> Array:
    """Return the gradient of the mean loss over devices, given each device's gradient.

    Where axes are tracked the loss itself has been averaged. JAX has then divided each device's share
    already, and has summed the gradients of parameters that are equal on all devices.
    """
    if not tracked(names):
        averaged: Array = lax.pmean(gradient, tuple(names))
        return averaged
    mine = tuple(name for name in names if name in varying(gradient))
    total: Array = lax.psum(gradient, mine) if mine else gradient
    return total
