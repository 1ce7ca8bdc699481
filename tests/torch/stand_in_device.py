"""A device that is not there: PyTorch's "privateuseone", whose numbers lie in the host's memory.

Tensors on it are plain tensors of PyTorch, with storages of their own, as on any accelerator. Operators run
on the CPU, except those that the device is said not to have. For a process of its own: a backend that was
named stays, and PyTorch cannot forget it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["install"]

VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)  # its kernels look at sizes and strides alone


class Module:
    """What PyTorch asks `torch.NAME`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass  # what is drawn is drawn on the CPU

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class _Device:
    def __init__(self, without: Collection[str], double: bool) -> None:
        self.without, self.double = without, double
        self.numbers: dict[int, torch.UntypedStorage] = {}  # by the storage on the device

    def run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Run any operator as the device would."""
        if operator._schema.name.removeprefix("aten::") in self.without:
            raise NotImplementedError(f"{operator} is not implemented for this device")
        self.refuse_double((args, kwargs))
        returns = [returned.alias_info for returned in operator._schema.returns]
        if returns and all(alias is not None and not alias.is_write for alias in returns):
            return self.refuse_double(operator.redispatch(VIEWS, *args, **kwargs))
        target = kwargs.get("device")
        here = target is None or torch.device(target).type == self.name
        if here and target is not None:
            kwargs = {**kwargs, "device": "cpu"}
            if not self.double and kwargs.get("dtype") is torch.float64:
                raise self.no_double()
        on_host: dict[int, tuple[Tensor, Tensor]] = {}

        def lower(value: Any) -> Any:
            if not self.is_mine(value):
                return value
            inner = self.lowered(value)
            on_host[id(inner)] = value, inner
            return inner

        def lift(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in on_host:  # written in place
                return on_host[id(value)][0]
            return self.lifted(value) if here else value

        wanted = operator._schema.arguments
        args = tuple(  # numbers that C++ has made tensors of come as numbers
            torch.tensor(value) if isinstance(value, int | float) and str(one.type) == "Tensor" else value
            for value, one in zip(args, wanted, strict=False)
        )
        lowered = tree_map(lower, (args, kwargs))
        result = operator(*lowered[0], **lowered[1])
        for tensor, inner in on_host.values():
            if tensor.shape != inner.shape:  # an operator with out= has made room
                grown = self.lifted(inner).untyped_storage(), 0, inner.shape, inner.contiguous().stride()
                torch.ops.aten.set_.source_Storage_storage_offset.redispatch(VIEWS, tensor, *grown)
        return tree_map(lift, result)

    def copy_(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy in either direction."""
        self.refuse_double((target, source))
        inner, outer = (self.lowered(t) if self.is_mine(t) else t for t in (target, source))
        inner.copy_(outer)
        return target

    def lowered(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a tensor on the device, in the same memory."""
        numbers = self.numbers[tensor.untyped_storage()._cdata]
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(numbers, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload,no-any-return]

    def lifted(self, numbers: Tensor) -> Tensor:
        """Return a tensor on the device with these numbers."""
        dense = numbers.detach().contiguous()
        tensor: Tensor = torch._C._acc.create_empty_tensor(list(dense.shape), dense.dtype)
        self.numbers[tensor.untyped_storage()._cdata] = dense.clone().untyped_storage()
        return self.refuse_double(tensor)

    def refuse_double(self, values: Any) -> Any:
        """Raise what MPS raises for float64, if the device has none."""
        if not self.double:
            tree_map(self._check, values)
        return values

    def no_double(self) -> TypeError:
        return TypeError(f"Cannot convert a {self.name} Tensor to float64 dtype: the device has no float64.")

    def _check(self, value: Any) -> None:
        if self.is_mine(value) and value.dtype in (torch.float64, torch.complex128):
            raise self.no_double()

    def is_mine(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.name

    @property
    def name(self) -> str:
        return torch._C._get_privateuse1_backend_name()


def install(name: str, *, without: Collection[str] = (), double: bool = True) -> list[torch.library.Library]:
    """Make the device there for the rest of the process.

    Args:
        name: its type, such as "npu".
        without: operators of aten that it does not have.
        double: whether it has float64.

    Returns:
        What has to be kept for as long as it is used.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # since torch 2.10

    _setup_privateuseone_for_python_backend(name, Module())
    device = _Device(without, double)
    everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(device.run, "PrivateUse1")
    some.impl("copy_", device.copy_, "PrivateUse1")
    return [everything, some]
