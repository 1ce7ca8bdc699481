"""The names of PyTorch that are private, or newer than the oldest release that preamp works with.

The rest of `preamp.torch` takes them from here. Beside each one stands since which release it is there, of
2.6 and newer, and what happens where it is not. Nothing here decides anything, and nothing loads the compiler
or Triton.

Private attributes of objects are read where they are needed. These have been the same since before 2.6:
`_version`, `_values`, `_is_view` of a tensor; `_is_flat_param` of a parameter that FSDP made;
`_parameters`, `_buffers`, `_compiled_call_impl` of a module; `_sequence_nr` of a node of autograd's graph;
`_step_supports_amp_scaling` and `_optimizer_step_pre_hooks` of an optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, _guards
from torch.amp import autocast_mode
from torch.utils import _foreach_utils, _pytree

__all__ = [
    "BatchNormBase",
    "amp_unscale_",
    "amp_update_scale_",
    "by_device_and_dtype",
    "foreach_copy_",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "is_compiler_off",
    "is_exporting",
    "is_in_backward",
    "is_in_transform",
    "is_of_transform",
    "local_part",
    "mark_constant",
    "tree_leaves",
]


# ---- Scaling -----------------------------------------------------------------------------------------------

# PyTorch's optimizers are made of these. Since before 2.6; nothing works without.
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# PyTorch's scaler is made of these. Since before 2.6; nothing works without.
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_


# What batch and instance normalization have in common. Since before 2.6; each could be named instead.
BatchNormBase = torch.nn.modules.batchnorm._NormBase


def by_device_and_dtype(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Return the positions of the tensors of each device and dtype, sorted in C++.

    Since before 2.6. Without, a loop in Python would do, as it does in compiled code.
    """
    grouped = _foreach_utils._group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    return {key: indices for key, (_, indices) in grouped.items()}


def tree_leaves(tree: Any) -> list[Any]:
    """Return what is in nested containers, those included that were registered with PyTorch.

    Since before 2.6. Without, the lens could not find the tensors that a module puts out.
    """
    return _pytree.tree_leaves(tree)


def is_in_backward() -> bool:
    """Return whether a node of autograd's graph is running.

    Since before 2.6. Without, the lens would count again what a checkpoint computes again.
    """
    return torch._C._current_autograd_node() is not None


def is_in_transform() -> bool:
    """Return whether `torch.func` transforms what is running.

    Since before 2.6. Without, the lens would read tensors that have no values.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_of_transform(tensor: Tensor) -> bool:
    """Return whether a tensor is one of `torch.func`.

    Since before 2.6. Without, a loss would be kept for longer than the function it belongs to.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's part on this rank, without a node in autograd's graph; any other tensor as it is.

    Since before 2.6. Without, buffers that are DTensors could not be kept.
    """
    return getattr(tensor, "_local_tensor", tensor)


def is_exporting() -> bool:
    """Return whether `torch.export` traces what is running.

    Not in 2.6. Without, the lens's warning of compiled calls is given for an exported model too.
    """
    exporting: Callable[[], bool] | None = getattr(torch.compiler, "is_exporting", None)
    return exporting is not None and exporting()


def mark_constant(function: Any) -> None:
    """Have the compiler run a function while it traces, and leave it out of what it compiles.

    It is what `torch.compiler.assume_constant_result` does, which loads the compiler: that takes seconds.
    Since before 2.6. Without, the function would be traced.
    """
    function._dynamo_marked_constant = True


def is_compiler_off() -> bool:
    """Return whether nothing that is compiled runs compiled, so that this need not be asked for.

    Since 2.6, with `torch.compiler.set_stance`. Without, the compiler would be loaded to ask it.
    """
    compiler = sys.modules.get("torch._dynamo")  # which takes long to load
    return compiler is None or compiler.eval_frame._stance.stance == "force_eager"


# ---- Autocast ----------------------------------------------------------------------------------------------


class _SecretSettings:
    """An autocast region that the compiler cannot read, so that what enters it runs eagerly."""

    _fast_dtype: torch.dtype

    @property
    def fast_dtype(self) -> torch.dtype:
        if _guards.TracingContext.try_get() is not None and not torch.compiler.is_compiling():
            from torch._dynamo.exc import Unsupported

            raise Unsupported("An autocast region with casting=, report= or emulate= is not compiled.")
        return self._fast_dtype

    @fast_dtype.setter
    def fast_dtype(self, dtype: torch.dtype) -> None:
        self._fast_dtype = dtype


# An autocast that the compiler does not take for PyTorch's own, whose settings it writes into its graph.
# Since 2.12. Without, the compiler is stopped where it reads them.
UnmanagedAutocast: Any = getattr(autocast_mode, "_UnmanagedAutocast", _SecretSettings)


@contextmanager
def _region(*settings: Any) -> Iterator[None]:
    with torch.autocast(*settings):
        yield


# Makes a region in code that the compiler traces, in place of a subclass of PyTorch's autocast. Until 2.11 the
# compiler did not allow a class to make PyTorch's region, only a function.
traced_autocast: Callable[..., Any] = torch.autocast if hasattr(autocast_mode, "_UnmanagedAutocast") else _region
