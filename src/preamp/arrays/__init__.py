"""Arithmetic on many arrays at once: one module for each framework, with the functions of `Arrays`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import tensorflow as tf
    from jax import Array
    from torch import Tensor

    from preamp.arrays import jax, tensorflow, torch

A = TypeVar("A")  # an array, dense or sparse
T = TypeVar("T")  # a scalar of the framework

# The norms of which a sum of squares in float32 tells: above, squares overflow; below, some may be lost to
# underflow. Elsewhere entries are divided by the largest one before they are squared.
LEAST_NORM, LARGEST_NORM = 2.0**-40, 2.0**63


class Unscaled(NamedTuple, Generic[A, T]):
    """Gradients divided by the loss scale, and what was measured on the way.

    Attributes:
        gradients: in the order in which they were given.
        finite: a boolean scalar: whether all of them are finite, before and after the division.
        norm: their global L2 norm. It is inf above 3.4e38 in float32, NaN where it is not known, undefined
            after an overflow. On PyTorch, which would have to read it, it is inf where squares overflow, and
            `finite` is from before the division: `ScaledStep.take_on_host` reads both and looks again.
        amaxes: the largest magnitude of each gradient, where the norm is not between `LEAST_NORM` and
            `LARGEST_NORM`; else zeros. None where that is left to whoever reads the norm.
    """

    gradients: list[A]
    finite: T
    norm: T
    amaxes: T | None = None


class Arrays(Protocol[A, T]):
    """What `preamp.arrays.jax`, `preamp.arrays.tensorflow` and `preamp.arrays.torch` provide.

    Arrays are floating. Those of a half type are computed with in float32: squares of float16 overflow above
    256, and 1 / 2**25 is 0. Of a sparse array the stored entries count, and it stays sparse. Scalars that
    are returned are float32, or float64 where an array is, and unread: they are on the arrays' device.
    """

    def unscale(self, arrays: Sequence[A], scale: T, /) -> Unscaled[A, T]:
        """Return arrays / scale, whether they are finite, and their norm, in as few passes as there can be.

        Args:
            arrays: the gradients of a scaled loss. They are not written to.
            scale: a float32 scalar.
        """

    def all_finite(self, arrays: Sequence[A], /) -> T:
        """Return whether all entries are finite: a boolean scalar."""

    def global_norm(self, arrays: Sequence[A], /) -> T:
        """Return the L2 norm of all entries together; inf where the squares overflow."""

    def amax(self, arrays: Sequence[A], /) -> T:
        """Return the largest magnitude: 0 without entries, at most the largest finite float32.

        It is undefined, possibly NaN, where an entry is not finite.
        """

    def read(self, scalars: Sequence[T], /) -> list[float]:
        """Copy scalars of any dtype to the host, all of them at once.

        Raises:
            UsageError: in code that is being traced or compiled, where scalars have no values yet.
        """


if TYPE_CHECKING:  # each module provides what is declared
    _jax: Arrays[jax.Gradient, Array] = jax
    _tensorflow: Arrays[tensorflow.Gradient | None, tf.Tensor] = tensorflow
    _torch: Arrays[Tensor, Tensor] = torch
