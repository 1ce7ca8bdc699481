"""Gradients of a scaled loss, as a type of their own that carries the loss scale in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as extend_random

from preamp.errors import UsageError
from preamp.jax import gradients as arithmetic

__all__ = ["ScaledGradients"]


class ScaledGradients:
    """Gradients of a scaled loss, with the scale that was in it.

    `scaled_value_and_grad` returns them, and the `update` of `loss_scaled` takes nothing else. It is a
    pytree, so it passes through `jit`, `scan`, `shard_map`, `jax.tree.map(lambda leaf: leaf, ...)` and
    donation. It is not a tree of plain arrays: one leaf holds the scale in a dtype without arithmetic, and
    clipping or scaling it with optax raises a TypeError at trace time. A chain that is written in the wrong
    order cannot clip scaled gradients.

    Two of them can be added, and `sum` adds many. The second is converted to the scale of the first, so
    gradients accumulate correctly even if the scale has changed between them.

    Args:
        gradients: a tree of arrays, those of a loss times `scale`.
        scale: a floating scalar, stored as float32.

    Attributes:
        gradients: the tree, still scaled.
        scale: a float32 scalar.

    Raises:
        UsageError: for a scale that is not a floating scalar, and for gradients that have a scale already.

    >>> import jax.numpy as jnp
    >>> scaled = ScaledGradients({"w": jnp.array([8.0, 16.0])}, 8.0)
    >>> (scaled + scaled.map(lambda g: 3 * g)).unscale()["w"].tolist()
    [4.0, 8.0]
    """

    gradients: Any

    def __init__(self, gradients: Any, scale: Any) -> None:
        if isinstance(gradients, ScaledGradients):
            raise UsageError(
                "these gradients are ScaledGradients already and carry their own scale. Write "
                "ScaledGradients(scaled.gradients, scale) to replace it."
            )
        self.gradients, self._scale = gradients, _stored(_checked(scale))

    @property
    def scale(self) -> Any:
        """The scale that was in the loss, a float32 scalar."""
        return lax.bitcast_convert_type(jax.random.key_data(self._scale), jnp.float32)[..., 0]

    def map(self, function: Callable[[Any], Any]) -> ScaledGradients:
        """Apply a linear function to each floating or complex array, such as a mean over devices.

        The function must be linear, because the gradients are still scaled: ``scaled.map(lambda g:
        lax.pmean(g, "data"))``. Clipping is not linear: write ``loss_scaled(inner, max_norm=...)`` for it.

        Raises:
            UsageError: for what cannot be called.
        """
        if not callable(function):
            raise UsageError(
                f"map({function!r:.60}) needs a function of one array. Write scaled.map(lambda g: g / 4)."
            )
        return _made(arithmetic.each(function, self.gradients), self._scale)

    def unscale(self) -> Any:
        """Return the gradients divided by the scale: float32 where they were shorter."""
        return arithmetic.multiplied(self.gradients, 1.0 / self.scale)

    def __add__(self, other: Any) -> ScaledGradients:
        """Return the sum, in float32 where the gradients are shorter, scaled as the first of the two."""
        if not isinstance(other, ScaledGradients):
            raise UsageError(
                f"ScaledGradients + {type(other).__name__}: only ScaledGradients can be added, because plain "
                "gradients have no scale. Write ScaledGradients(gradients, scale) for the second."
            )
        converted = arithmetic.multiplied(other.gradients, self.scale / other.scale)
        total = jax.tree.map(_sum, arithmetic.wide(self.gradients), converted)
        return _made(total, self._scale)

    def __radd__(self, other: Any) -> ScaledGradients:
        """Add to the 0 that `sum` starts with."""
        return self if isinstance(other, int) and other == 0 else self.__add__(other)

    def __contains__(self, name: object) -> bool:
        """Return whether the gradients are a mapping with this name: flax's `TrainState` asks."""
        return hasattr(self.gradients, "keys") and name in self.gradients

    def __getitem__(self, name: Any) -> NoReturn:
        """Raise: what is taken out would be scaled, without its scale."""
        raise UsageError(
            f"ScaledGradients cannot be indexed or unpacked, here by {name!r}: the part would have lost its "
            "scale. Write scaled.unscale() for the true gradients, or ScaledGradients(scaled.gradients[...], "
            "scaled.scale)."
        )

    def __repr__(self) -> str:
        return f"ScaledGradients({self.gradients!r})"


def _no_random_numbers(*_: Any, **__: Any) -> NoReturn:
    raise UsageError("the scale of ScaledGradients is not a key for random numbers.")


# The scale is stored in the bits of a JAX key: the one dtype that every transformation passes through and on
# which arithmetic raises. The tag stands in the TypeError that JAX raises then. Nothing is registered.
_IMPLEMENTATION = extend_random.define_prng_impl(
    key_shape=(1,),
    seed=_no_random_numbers,
    split=_no_random_numbers,
    random_bits=_no_random_numbers,
    fold_in=_no_random_numbers,
    name="preamp.jax.ScaledGradients",
    tag="of preamp's ScaledGradients, which only loss_scaled(...) takes. Write loss_scaled around the whole "
    "optimizer, loss_scaled(optax.chain(...)), and scaled.map(fn) for a linear function",
)


def _stored(scale: Any) -> Any:
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    return jax.random.wrap_key_data(bits[..., None], impl=_IMPLEMENTATION)


def _checked(scale: Any) -> Any:
    """Return a scale as a float32 scalar."""
    kind = getattr(scale, "dtype", type(scale))
    number = kind in (int, float) or (kind is not bool and jnp.issubdtype(kind, jnp.floating))
    if not number or jnp.shape(scale):
        what = f"an array of shape {jnp.shape(scale)}" if number else f"{scale!r:.60}"
        raise UsageError(
            f"the scale of ScaledGradients is {what}, not a floating scalar. Write "
            "ScaledGradients(gradients, opt_state.policy_state.scale), with the scale that was in the loss."
        )
    if isinstance(scale, float | int) and not 0.0 < scale < math.inf:  # an array is not read for this
        raise UsageError(
            f"the scale of ScaledGradients is {float(scale)!r}; a loss scale is positive and finite. Write "
            "ScaledGradients(gradients, opt_state.policy_state.scale), with the scale that was in the loss."
        )
    return jnp.asarray(scale).astype(jnp.float32)


def _sum(first: Any, second: Any) -> Any:
    return first + second if arithmetic.is_inexact(first) else first


def _made(gradients: Any, scale: Any) -> ScaledGradients:
    """Return an instance of what is given, unchecked: JAX puts other things than arrays into trees."""
    scaled = object.__new__(ScaledGradients)
    scaled.gradients, scaled._scale = gradients, scale
    return scaled


def _flatten(scaled: ScaledGradients) -> tuple[list[tuple[Any, Any]], None]:
    names = jax.tree_util.GetAttrKey("gradients"), jax.tree_util.GetAttrKey("scale")
    return list(zip(names, (scaled.gradients, scaled._scale), strict=True)), None


def _unflatten(_: None, children: Iterable[Any]) -> ScaledGradients:
    return _made(*children)


jax.tree_util.register_pytree_with_keys(ScaledGradients, _flatten, _unflatten)
