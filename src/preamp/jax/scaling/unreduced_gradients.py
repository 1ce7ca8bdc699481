"""Warnings for devices that take one step together without averaging their gradients.

Such a step raises no error. Where `step` or `value_and_grad` is traced, the mapped axes are known; after the
step, `last_step` sees whether what is declared to be equal on all devices is.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from typing import Any

import jax
import numpy as np
from jax import Array

from preamp.arrays.jax import is_inexact
from preamp.checks import level_of_caller
from preamp.jax import axes

UNNAMED = ("_internal", "<axis ")  # how the names begin that pmap gives to an axis without one
TOLERANCE = 1e-3  # of norms: a reduction need not have the same bits on all devices


def warn_of_devices(loss: object, gradients: object, written: str, known: Iterable[Hashable] = ()) -> None:
    """Warn of several devices that average nothing, and of gradients that `shard_map` has summed.

    Args:
        loss: the loss of this device.
        gradients: its gradients, a tree.
        written: the call that takes `axis_name`, up to that argument.
        known: the axes along which devices have their own part of the parameters.
    """
    leaves = list(filter(is_inexact, jax.tree.leaves(gradients)))
    known = set(known)
    if found := _shown(name for name in axes.unchecked() if name not in known):
        name, unnamed = found
        pmap = f' and jax.pmap(..., axis_name="{name}")' if unnamed else ""
        _warn(
            f"this step runs on several devices{'' if unnamed else f', along the axis {name!r},'} and "
            "averages no gradients over them: each device trains alone, and its parameters, loss scale and "
            f"skipped steps differ from those of the others. Write {written}, axis_name={name!r}){pmap}. If "
            "each device has its own part of the parameters, write loss_scaled(optimizer, "
            f"axis_name={name!r}) and {written}, axis_name=()). If each device trains a model of its own, or "
            f"the loss function averages the gradients, write {written}, axis_name=())."
        )
    if found := _shown(name for name in axes.summed(loss, leaves) if name not in known):
        name, _ = found
        _warn(
            f"the loss differs between the devices along the axis {name!r}, and shard_map has summed their "
            "gradients: with n devices they are n times those of the mean loss. Write "
            f"{written}, axis_name={name!r}) for the mean. If the sum is what you want, write "
            f"jax.lax.psum(loss, {name!r}) in the loss function, or {written}, axis_name=())."
        )


def warn_if_devices_differ(scalars: dict[str, Any]) -> None:
    """Warn if scalars that are declared to be equal on all devices differ between those of this process.

    Reads one number for each scalar and device of this process; nothing where there is one device.

    Args:
        scalars: arrays by the names that the warning has for them.
    """
    shards = {name: _replicas(value) for name, value in scalars.items()}
    values = jax.device_get([replicas for replicas in shards.values() if replicas])
    names = [name for name, replicas in shards.items() if replicas]
    apart = [name for name, numbers in zip(names, values, strict=True) if _differ(numbers)]
    if apart:
        _warn(
            f"devices have different values of {' and '.join(apart)}, which belong to one training and are "
            "declared to be equal on all devices: each device has trained with its own gradients. Write "
            'step(loss_fn, optimizer, axis_name="data") or value_and_grad(loss_fn, axis_name="data"), '
            "with the name of your axis, which average gradients over devices before the update. If each "
            'device has its own part of the parameters, write loss_scaled(optimizer, axis_name="model").'
        )


def _replicas(value: Any) -> list[Array]:
    """Return the copies of a replicated array on the devices of this process; none if there is only one."""
    if isinstance(value, jax.core.Tracer) or not isinstance(value, Array):
        return []
    sharding = value.sharding
    if len(sharding.device_set) == 1 or not sharding.is_fully_replicated:
        return []
    replicas = [shard.data for shard in value.addressable_shards]
    return replicas if len(replicas) > 1 else []


def _differ(values: Iterable[Any]) -> bool:
    """Return whether numbers differ; what is not finite is not compared."""
    numbers = np.array([float(value) for value in values])
    numbers = numbers[np.isfinite(numbers)]
    return bool(numbers.size) and bool(np.ptp(numbers) > TOLERANCE * np.abs(numbers).max())


def _shown(names: Iterable[Hashable]) -> tuple[Any, bool] | None:
    """Return the name to write for axes, and whether they have none; None if there are no axes."""
    found = tuple(names)
    if any(str(name).startswith(UNNAMED) for name in found):
        return "data", True
    return (found[0] if len(found) == 1 else found, False) if found else None


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=level_of_caller("jax"))
