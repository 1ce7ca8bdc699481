"""What is kept for the backward passes of two runs that differ little: one of them, and the differences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

BLOCK = 128  # values that share a scale
PARTS = {"cpu": 2**9 * BLOCK}  # values that are packed at a time, in a CPU's cache
PART = 2**17 * BLOCK  # the same elsewhere
CODES = torch.float8_e4m3fn
LARGEST = torch.finfo(CODES).max
WITHOUT_FLOAT8 = ("mps",)  # devices


class Packed:
    """Finite float32 values in a quarter of their memory.

    Each block of values has a scale with which the largest becomes the largest float8, so values that are
    equal stay as they are. Others change by at most 2**-4 of their magnitude, in either direction, unless
    they are 2**-15 of the largest or less.
    """

    def __init__(self, count: int, part: Callable[[int, int], Tensor], device: torch.device) -> None:
        """Pack values.

        Args:
            count: how many.
            part: returns those of a range.
            device: where they are.
        """
        blocks = -(-count // BLOCK)
        codes = torch.bfloat16 if device.type in WITHOUT_FLOAT8 else CODES
        self._codes = torch.empty(blocks, BLOCK, dtype=codes, device=device)
        self._scales = torch.empty(blocks, 1, device=device)
        self.is_finite, self.is_zero = True, True
        step = PARTS.get(device.type, PART)
        for start in range(0, count, step):
            values = part(start, min(count, start + step))
            if len(values) % BLOCK:
                values = torch.nn.functional.pad(values, (0, -len(values) % BLOCK))
            rows = values.view(-1, BLOCK)
            largest = rows.abs().amax(1, keepdim=True)
            highest = largest.max().item()
            self.is_finite &= highest < float("inf")
            self.is_zero &= highest == 0
            scales = (largest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
            self._scales[start // BLOCK :][: len(rows)] = scales
            self._codes[start // BLOCK :][: len(rows)] = rows / scales

    def values(self, start: int, end: int) -> Tensor:
        """Return those of a range, as one dimension."""
        first, last = start // BLOCK, -(-end // BLOCK)
        values = _raised(self._codes[first:last]) * self._scales[first:last]
        return values.view(-1)[start - first * BLOCK : end - first * BLOCK]


class Difference(NamedTuple):
    """A tensor, kept as another one and its difference from that.

    Attributes:
        base: the other, of the same shape and strides.
        packed: what the whole memory of the two differs in, of which both may be views.
    """

    base: Tensor
    packed: Packed

    def values(self) -> Tensor:
        """Return the tensor minus the other."""
        base = self.base
        start = int(base.storage_offset())
        span = sum((size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True)) + 1
        return self.packed.values(start, start + span).as_strided(base.shape, base.stride())


Kept: TypeAlias = Tensor | Difference


class Saved:
    """Keeps what autograd saves in the runs `here` and `there`, with less memory for `there`.

    Both make the same calls on tensors of the same shapes, so autograd saves the same tensors in the same
    order. Inputs of calls `there` are kept as what they differ in from those of `here`, in a quarter of their
    memory. Results are kept whole: the derivative of a softmax relies on its values adding up to 1, and where
    it is saturated, even differences in float16 changed effects by 40 %.
    """

    def __init__(self, leaves: Collection[int]) -> None:
        """Make a store.

        Args:
            leaves: the addresses of the leaves of `there`, which are alive until the end anyway.
        """
        self._leaves = leaves
        self._bases: list[Tensor] = []
        self._known: WeakValueDictionary[tuple[int, ...], Packed] = WeakValueDictionary()
        self._whole: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make a call `here`."""
        self._bases = []

        def keep(x: Tensor) -> tuple[Tensor, int]:
            base = x.detach()
            self._bases.append(base)
            return base, base._version

        with torch.autograd.graph.saved_tensors_hooks(keep, _unchanged):
            yield

    @contextmanager
    def there(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Make the same call `there`, on these inputs, right after `here`."""
        bases = iter(self._bases)
        given = {each.untyped_storage().data_ptr() for each in inputs}

        def keep(x: Tensor) -> Kept:
            x, base = x.detach(), next(bases)
            if x.untyped_storage().data_ptr() in given:
                return self.kept(x, base)
            self._whole[x.untyped_storage().data_ptr(), x._version] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, value_of):
            yield
        self._bases = []

    def kept(self, x: Tensor, base: Tensor) -> Kept:
        """Return what to keep of a tensor `there`, of which `base` is the one `here`."""
        address = x.untyped_storage().data_ptr()
        if address in self._leaves or (address, x._version) in self._whole:
            return x
        if x.dtype is not torch.float32 or not x.numel() or not _have_one_layout(x, base):
            return base if torch.equal(x, base) else x
        # While an entry is there, nothing else gets the address of the base: `Difference` keeps it.
        key = (address, x._version, base.untyped_storage().data_ptr(), base._version)
        packed = self._known.get(key)
        if packed is None:
            memory, other = memory_of(x), memory_of(base)
            packed = Packed(len(other), lambda start, end: memory[start:end] - other[start:end], x.device)
            if packed.is_zero:
                return base
            if not packed.is_finite:
                return x
            self._known[key] = packed
        return Difference(base, packed)


def packed(x: Tensor) -> Tensor | Packed:
    """Return what to keep of finite values."""
    if x.dtype is not torch.float32:
        return x
    flat = x.reshape(-1)
    return Packed(len(flat), lambda start, end: flat[start:end], x.device)


def unpacked(kept: Tensor | Packed, like: Tensor) -> Tensor:
    """Return values that were kept, in the shape of a tensor."""
    return kept.values(0, like.numel()).view(like.shape) if isinstance(kept, Packed) else kept


def value_of(kept: Kept) -> Tensor:
    """Return a tensor that was kept."""
    return kept.base + kept.values() if isinstance(kept, Difference) else kept


def difference_of(kept: Kept, base: Tensor) -> Tensor:
    """Return the difference between a tensor that was kept and the one `here`."""
    return kept.values() if isinstance(kept, Difference) else kept - base


def _raised(codes: Tensor) -> Tensor:
    """Return codes in float32."""
    if codes.dtype is not CODES:
        return codes.float()
    # PyTorch converts one after the other on a CPU, which takes eight times as long. float16 has the same
    # order of bits, one more for the exponent and seven more for the fraction, and a bias larger by 8.
    halves = (codes.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~0x4000)
    return halves.view(torch.float16).float().mul_(2.0**8)


def _unchanged(kept: tuple[Tensor, int]) -> Tensor:
    """Return what was saved. With hooks, PyTorch does not check this itself."""
    x, version = kept
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(x.shape)} is at version {x._version}; expected version {version} "
            "instead."
        )
    return x


def _have_one_layout(x: Tensor, other: Tensor) -> bool:
    return (
        x.dtype is other.dtype
        and x.shape == other.shape
        and x.stride() == other.stride()
        and x.storage_offset() == other.storage_offset()
        and x.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    )


def memory_of(x: Tensor) -> Tensor:
    """Return all values of a tensor's memory, of which a view may have some."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
