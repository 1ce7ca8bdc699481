"""Agreement of ranks on what they measured, before any of them decides.

One sum over ranks carries two numbers: how many ranks found a gradient that is not finite, and their shares
of the squared norm; for a policy that needs the amax, that as well (`measure.packed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from preamp.checks import callable_or_none, shown
from preamp.errors import PolicyError

WORLD = "world"


def number_of_ranks(group: Any = None) -> int:
    """Return how many processes train together: all, or those of a group."""
    if group is not None:
        return int(group.size())
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Agreement:
    """How ranks agree.

    Args:
        process_group: the ranks that hold different gradients of one model, such as those of a tensor,
            pipeline or fully sharded parallel group; `WORLD` for all. A `ProcessGroup`, or any object with
            its methods `rank()`, `size()` and `allreduce(tensors, options)`. None: gradients are the same on
            all ranks, as with DDP, or they are DTensors, which have their mesh.
        reduce: called with a float64 tensor of shape [2] (ranks that overflowed, squared norm of unscaled
            gradients); sums it over ranks in place, or returns the sum. For a policy that needs the amax the
            shape is [280]: then come 278 bins, one for each binary exponent of float32 from -149 to 128, with
            a one for this rank's amax.
            On a device without float64, such as MPS, it is float32, and the squared norm of the same
            gradients times 2**-80 follows the first two numbers.

    Raises:
        PolicyError: if both are given, or `reduce` cannot be called.
    """

    def __init__(self, process_group: Any = None, reduce: Callable[[Tensor], Tensor | None] | None = None):
        callable_or_none("reduce", reduce, "reduce=torch.distributed.all_reduce")
        if process_group is not None and not _is_world(process_group) and not _is_group(process_group):
            raise PolicyError(
                f"process_group={shown(process_group)} is not a ProcessGroup and has no rank(), size() and "
                "allreduce(). Write process_group=torch.distributed.group.WORLD, or mesh.get_group()."
            )
        if reduce is not None and process_group is not None:
            raise PolicyError("process_group= and reduce= are both given. Write only one of them.")
        self.process_group = process_group
        self.reduce = reduce
        self.always = reduce is not None or process_group is not None  # whatever the gradients are on

    def needed(self, meshes: Sequence[Any]) -> bool:
        """Return whether other ranks are needed, for gradients on these meshes."""
        return self.always or bool(meshes)

    def is_over(self, group: Any, meshes: Sequence[Any]) -> bool:
        """Return whether a sum is over the ranks of a group, None for all. Of a `reduce` it is unknown."""
        if self.reduce is not None:
            return False
        if self.process_group is not None:
            if group is not None:
                return self.process_group is group
            return _is_world(self.process_group) or self.process_group.size() == number_of_ranks()
        if len(meshes) != 1:
            return False
        if group is not None:
            return bool(meshes[0].ndim == 1 and meshes[0].get_group() is group)
        return bool(meshes[0].size() == number_of_ranks())

    def __call__(self, readings: Tensor, meshes: Sequence[Any]) -> Tensor:
        """Return the sum over ranks of a tensor, of one shape and dtype on all. Every rank has to call.

        Raises:
            PolicyError: if `reduce` returns something other than None or such a tensor.
        """
        if self.reduce is not None:
            return _checked_sum(self.reduce(readings), readings)
        if self.process_group is not None:
            dist.all_reduce(readings, group=None if _is_world(self.process_group) else self.process_group)
            return readings
        for mesh in meshes:  # of several, the flag and the amax are right, the norm is not: see `refuse_norm`
            readings = readings.to(mesh.device_type)
            for dimension in range(mesh.ndim):
                dist.all_reduce(readings, group=mesh.get_group(dimension))
        return readings

    def refuse_norm(self, meshes: Sequence[Any]) -> None:
        """Refuse to clip where it is unknown which gradients are copies.

        Raises:
            PolicyError: for gradients on several meshes.
        """
        if len(meshes) > 1:
            raise PolicyError(
                f"max_norm needs one norm, but the gradients are on {len(meshes)} meshes, none of which has "
                "the ranks of all, so which of them are copies is unknown. Write distribute_tensor("
                "parameter, mesh, placements) with one mesh for all, where Replicate() copies, or leave "
                "max_norm out."
            )


def _checked_sum(returned: Any, readings: Tensor) -> Tensor:
    """Return the sum that the caller's `reduce` returned, or left in `readings` if it returned None.

    Raises:
        PolicyError: for anything else, such as the handle of a sum that is still under way.
    """
    if returned is None:
        return readings
    if not isinstance(returned, Tensor):
        found = f"{shown(returned)}, which is not a tensor"
    elif returned.shape != readings.shape or returned.dtype != readings.dtype:
        found = f"a {returned.dtype} tensor of shape {list(returned.shape)}"
    else:
        return returned
    raise PolicyError(
        f"reduce= was given a {readings.dtype} tensor of shape {list(readings.shape)} and returned {found}. "
        "Return a tensor of the same shape and dtype, or sum in place and return None, as "
        "reduce=torch.distributed.all_reduce does; it has to wait until the sum is complete."
    )


def _is_world(group: Any) -> bool:
    return isinstance(group, str) and group == WORLD


def check_loss_group(group: Any, guard: Any) -> None:
    """Check the ranks whose mean loss a guard judges.

    Raises:
        PolicyError: for what is not a group, and without a guard that uses the loss.
    """
    if group is None:
        return
    if guard is None or "loss" not in guard.uses:
        raise PolicyError(
            f"loss_group={shown(group)} is for a guard that uses the loss, not for guard={guard!r}. "
            "Leave it out, or write guard=SpikeGuard()."
        )
    if not _is_group(group):
        raise PolicyError(
            f"loss_group={shown(group)} is not a ProcessGroup. Write loss_group=torch.distributed.new_group("
            "ranks), with the ranks that train, or leave it out for all ranks."
        )


def _is_group(group: Any) -> bool:
    """Return whether `torch.distributed.all_reduce` can use a group: by its methods, not by its class."""
    methods = ("rank", "size", "allreduce")
    callable_ = not isinstance(group, type) and all(callable(getattr(group, name, None)) for name in methods)
    return dist.is_available() and callable_
