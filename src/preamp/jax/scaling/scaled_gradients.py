"""Gradients of a scaled loss, in a type that carries the loss scale.

Code that computes with them as if they were plain gradients gets an error that says what to write instead. It
is raised in three places: by operators and conversions of the object, by functions of optax that take it
apart, and by arithmetic on the leaf that holds the scale and the loss.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable
from types import FrameType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import random as extend_random

from preamp.arrays.jax import is_inexact
from preamp.checks import level_of_caller
from preamp.errors import UsageError
from preamp.jax import axes, trees
from preamp.jax.scaling.states import UNKNOWN_LOSS

WHAT = "gradients times the loss scale, which only loss_scaled(...) takes"
INSIDE = "Write loss_scaled around the whole optimizer, loss_scaled(optax.chain(...))"
INSTEAD = (
    "Write scaled.unscale() for the true gradients, as in optax.tree.norm(scaled.unscale()), or "
    "scaled.map(lambda g: g / 2) for a linear function of each"
)


class NoSuchAttribute(UsageError, AttributeError):
    """An attribute of arrays or dictionaries that scaled gradients do not have: `hasattr` is false."""


class ExplainedType(type):
    """The type of `ScaledGradients`. JAX prints it where two trees differ, so it says what to write."""

    def __repr__(cls) -> str:
        return f"<class 'preamp.jax.{cls.__name__}': {WHAT}. {INSIDE}. {INSTEAD}>"


class ScaledGradients(metaclass=ExplainedType):
    """Gradients of a scaled loss, with the scale that the loss was multiplied by.

    `scaled_value_and_grad` returns them, and the `update` of `loss_scaled` takes nothing else. It is a
    pytree, so it passes through `jit`, `scan`, `shard_map`, `jax.tree.map(lambda leaf: leaf, ...)`, donation,
    pickle and copies. It is not a tree of plain arrays: one leaf holds the scale in a dtype without
    arithmetic, so JAX raises when it computes with it, and an optax function that flattens it raises a
    UsageError. A chain that is written in the wrong order therefore cannot clip scaled gradients.

    Two of them can be added, and `sum` adds many. The second is converted to the scale of the first, so
    gradients accumulate correctly even if the scale has changed between them. To start from zeros, as in a
    `scan`, write ``jax.tree.map(jnp.zeros_like, scaled)``.

    Args:
        gradients: a tree of arrays, the gradients of a loss times `scale`.
        scale: a floating scalar, stored as float32.
        loss: the unscaled loss, a real scalar. None if it is not known.

    Attributes:
        gradients: the tree, still scaled.
        scale: a float32 scalar.
        loss: a float32 scalar that `last_step` reports; float32's lowest finite number if it is not known.
            A sum has the sum of the losses; the result of `map` has none.

    Raises:
        UsageError: for a scale that is not a floating scalar, a loss that is not a real scalar, gradients
            that already have a scale, and for arithmetic, comparisons and conversions of the object.

    >>> import jax.numpy as jnp
    >>> scaled = ScaledGradients({"w": jnp.array([8.0, 16.0])}, 8.0)
    >>> (scaled + scaled.map(lambda g: 3 * g)).unscale()["w"].tolist()
    [4.0, 8.0]
    """

    gradients: Any
    # Whether the loss is known to be missing. JAX drops this attribute when it flattens the object; then only
    # the value UNKNOWN_LOSS tells.
    _lacks_loss: bool = False
    # The axes over which `map` has summed or gathered, likewise. Along them devices may have other losses.
    _reduced_over: tuple[Hashable, ...] = ()
    # The axes over which devices were not told to average, likewise, and over which `map` has not.
    _alone_over: tuple[Hashable, ...] = ()

    def __init__(self, gradients: object, scale: object, loss: object = None) -> None:
        if isinstance(gradients, ScaledGradients):
            raise UsageError(
                "these gradients are already ScaledGradients and carry their own scale. Write "
                "ScaledGradients(scaled.gradients, scale) to replace it."
            )
        self.gradients, self._numbers = gradients, _pack(_checked(scale), as_loss(loss))
        self._lacks_loss = loss is None

    @property
    def scale(self) -> Array:
        """The scale that the loss was multiplied by, a float32 scalar."""
        return _unpack(self._numbers)[..., 0]

    @property
    def loss(self) -> Array:
        """The unscaled loss whose gradients these are, a float32 scalar.

        It is float32's lowest finite number if the loss is not known.
        """
        return _unpack(self._numbers)[..., 1]

    def map(self, function: Callable[[Array], Array]) -> ScaledGradients:
        """Apply a linear function, such as a division, to each floating or complex array.

        The function must be linear, because the gradients are still scaled: ``scaled.map(lambda g: g / 2)``.
        Clipping is not linear: write ``loss_scaled(inner, max_norm=...)`` for it.

        For a mean over devices write ``scaled_value_and_grad(loss_fn, axis_name="data")``. A ``map(lambda g:
        lax.pmean(g, "data"))`` is correct in `pmap`, and in `shard_map` with ``check_vma=False``. Average the
        value too, and pass it: ``apply_gradients(..., value=lax.pmean(value, "data"))``. With the checks of
        `shard_map`, the gradients of parameters that all devices share are already the sum over devices. A
        mean of equal numbers does not change them, so they would be n times too large on n devices.

        Raises:
            UsageError: if `function` is not callable, and if it sums, averages or gathers over devices what
                `shard_map` knows to be equal on all of them.

        Warns:
            UserWarning: if `function` is not linear. An added constant is not noticed.
        """
        if not callable(function):
            raise UsageError(
                f"map({function!r:.60}) needs a function of one array. Write scaled.map(lambda g: g / 4)."
            )
        names = self._reduced_over + _checked_reductions(function, self.gradients)
        scale = self.scale
        numbers = _pack(scale, jnp.full_like(scale, UNKNOWN_LOSS))
        mapped = trees.map_inexact(function, self.gradients)
        _warn_if_not_linear(function, self.gradients)
        alone = () if names else self._alone_over
        return _new(mapped, numbers, lacks_loss=True, reduced_over=names, alone_over=alone)

    def unscale(self) -> Any:
        """Return the gradients divided by the scale, in float32 where they were narrower."""
        return trees.unscale(self.gradients, single(self).scale)

    def __add__(self, other: object) -> ScaledGradients:
        """Return the sum, at the scale of the first, in float32 where the gradients are narrower."""
        if not isinstance(other, ScaledGradients):
            raise UsageError(
                f"ScaledGradients + {type(other).__name__}: only ScaledGradients can be added, because plain "
                "gradients have no scale. Write ScaledGradients(gradients, scale) for the second."
            )
        mine, theirs = single(self).scale, single(other).scale
        # A scale of 0 is that of jax.tree.map(jnp.zeros_like, scaled): zeros at any scale.
        common = jnp.where(mine == 0.0, theirs, mine)
        converted = trees.multiply(other.gradients, jnp.where(theirs == 0.0, 1.0, common / theirs))
        total = jax.tree.map(_sum, trees.widen(self.gradients), converted)
        numbers = _pack(common, _sum_of_losses(self.loss, other.loss))
        lacks_loss = self._lacks_loss or other._lacks_loss
        names = self._reduced_over + other._reduced_over
        alone = self._alone_over or other._alone_over
        return _new(total, numbers, lacks_loss=lacks_loss, reduced_over=names, alone_over=alone)

    def __radd__(self, other: object) -> ScaledGradients:
        """Add to the 0 that `sum` starts with."""
        return self if isinstance(other, int) and other == 0 else self.__add__(other)

    def __contains__(self, name: object) -> bool:
        """Return whether the gradients are a mapping with this name: flax's `TrainState` asks."""
        return hasattr(self.gradients, "keys") and name in self.gradients

    def __iter__(self) -> NoReturn:
        """Raise, as indexing does."""
        self.__getitem__(0)

    def __getitem__(self, name: object) -> NoReturn:
        """Raise: the part would be scaled, without its scale."""
        raise UsageError(
            f"ScaledGradients cannot be indexed or unpacked, here by {name!r}: the part would have lost its "
            "scale. Write scaled.unscale() for the true gradients, or ScaledGradients(scaled.gradients[...], "
            "scaled.scale)."
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Raise: this is neither an array nor a dictionary."""
        if name.startswith("_"):  # what pickle, copy, NumPy and JAX ask for
            raise AttributeError(f"'ScaledGradients' object has no attribute {name!r}")
        raise NoSuchAttribute(f"ScaledGradients have no {name!r}: they are {WHAT}. {INSTEAD}.")

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same object; raise for another object of this type."""
        if self is not other and isinstance(other, ScaledGradients):
            raise UsageError(
                "ScaledGradients cannot be compared with ==. Write jax.tree.map(jnp.array_equal, "
                "first.unscale(), second.unscale())."
            )
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"ScaledGradients({self.gradients!r})"


def single(scaled: ScaledGradients) -> ScaledGradients:
    """Return gradients that have one scale.

    Raises:
        UsageError: for those of several examples or devices at once, as `vmap` and `pmap` return them.
    """
    if shape := scaled._numbers.shape:
        raise UsageError(
            f"the scale of these ScaledGradients is an array of shape {shape}: they are those of several "
            "examples or devices, stacked by vmap or pmap. Write jax.vmap(lambda s: s.unscale())(scaled) "
            "for the true gradients of each, or scaled_value_and_grad of the mean loss for their mean."
        )
    return scaled


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: ScaledGradients, *_: object, **__: object) -> NoReturn:
        raise UsageError(f"ScaledGradients have no {name}: they are {WHAT}. {INSTEAD}.")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


_BINARY = ("sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod")
_OTHER = "neg pos abs round len reversed float int complex index array jax_array format setitem delitem"
_ORDER = ("lt", "le", "gt", "ge")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHER.split(), *_ORDER):
    setattr(ScaledGradients, f"__{_name}__", _refusing(f"__{_name}__"))


def _no_random_numbers(*_: object, **__: object) -> NoReturn:
    raise UsageError("the scale of ScaledGradients is not a key for random numbers.")


# Scale and loss are stored in the bits of a JAX key: the one dtype that every transformation passes through
# and on which arithmetic raises. JAX's TypeError then shows the tag. Nothing is registered.
_IMPLEMENTATION = extend_random.define_prng_impl(
    key_shape=(2,),
    seed=_no_random_numbers,
    split=_no_random_numbers,
    random_bits=_no_random_numbers,
    fold_in=_no_random_numbers,
    name="preamp.jax.ScaledGradients",
    tag=f"of preamp's ScaledGradients, {WHAT}. {INSIDE}. {INSTEAD}",
)


def _pack(scale: Array, loss: Array) -> Array:
    bits = lax.bitcast_convert_type(jnp.stack([scale, loss], axis=-1), jnp.uint32)
    key: Array = jax.random.wrap_key_data(bits, impl=_IMPLEMENTATION)
    return key


def _unpack(numbers: Array) -> Array:
    return lax.bitcast_convert_type(jax.random.key_data(numbers), jnp.float32)


def _checked(scale: Any) -> Array:
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


def as_loss(
    value: Any, name: str = "loss", otherwise: str = ", or leave it out if no guard uses it"
) -> Array:
    """Return a loss as a float32 scalar, `UNKNOWN_LOSS` for None.

    Args:
        value: a number or an array.
        name: the name of the argument, for the error.
        otherwise: the end of the error: what else the user can do.

    Raises:
        UsageError: for anything but a real scalar.
    """
    if value is None:
        return jnp.full((), UNKNOWN_LOSS, jnp.float32)
    kind = getattr(value, "dtype", type(value))
    is_real = kind in (int, float) or any(
        hasattr(value, "dtype") and jnp.issubdtype(kind, real) for real in (jnp.floating, jnp.integer)
    )
    if not is_real or jnp.shape(value):
        what = f"{value!r:.60}" if not is_real else f"an array of shape {jnp.shape(value)}"
        mean = ", such as the mean of an array of losses" if is_real else ""
        raise UsageError(
            f"{name}={what} is not a real scalar. Write {name}=value with the loss of the step, one real "
            f"number{mean}{otherwise}."
        )
    return jnp.asarray(float(value) if kind is int else value).astype(jnp.float32)


def _checked_reductions(function: Callable[[Array], object], gradients: object) -> tuple[Hashable, ...]:
    """Return the axes over which a function sums or gathers gradients that may differ along them.

    Raises:
        UsageError: for gradients that do not differ there, which are the sum over devices already.
    """
    leaves = [leaf for leaf in trees.split(gradients)[0] if isinstance(leaf, jax.core.Tracer)]
    one_of_each_kind = {axes.varying(leaf): leaf for leaf in leaves}
    found: tuple[Hashable, ...] = ()
    for leaf in one_of_each_kind.values():
        names = axes.reduced(function, leaf)
        found += names
        for name in names:
            if name in axes.varying(leaf) or not axes.tracked([name]):
                continue
            raise UsageError(
                f"map was given a sum, mean or gather over the axis {name!r}, along which these gradients do "
                "not differ: shard_map has already summed them over devices, since the parameters are the "
                "same on all of them. A mean of equal numbers would not undo the sum. Write "
                f"scaled_value_and_grad(loss_fn, axis_name={name!r}), which averages value and gradients."
            )
    return found


def _warn_if_not_linear(function: Callable[[Array], Array], gradients: object) -> None:
    """Warn if JAX cannot transpose a function, which it can if the function is linear."""
    leaves = [leaf for leaf in trees.split(gradients)[0] if is_inexact(leaf)]
    if not leaves:
        return
    try:
        kind = jax.ShapeDtypeStruct(leaves[0].shape, leaves[0].dtype)
        jax.eval_shape(jax.linear_transpose(function, kind), jax.eval_shape(function, kind))
    except Exception as error:  # JAX raises errors of many types
        reason = str(error).partition("\n")[0] or "it cannot be transposed"
        warnings.warn(
            f"the function that map was given is not linear ({reason}). It is applied to gradients times the "
            "loss scale, so its result depends on the scale. To clip, write loss_scaled(inner, "
            "max_norm=...); for anything else put a transformation into loss_scaled(optax.chain(...)).",
            UserWarning,
            stacklevel=level_of_caller("jax"),
        )


def _sum_of_losses(first: Array, second: Array) -> Array:
    """Return the sum of two losses; `UNKNOWN_LOSS` if one of them is."""
    is_known = (first != UNKNOWN_LOSS) & (second != UNKNOWN_LOSS)
    return jnp.where(is_known, first + second, UNKNOWN_LOSS)


def _sum(first: Array, second: Array) -> Array:
    return first + second if is_inexact(first) else first


def _new(
    gradients: object,
    numbers: Any,
    *,
    lacks_loss: bool = False,
    reduced_over: tuple[Hashable, ...] = (),
    alone_over: tuple[Hashable, ...] = (),
) -> ScaledGradients:
    """Return an instance without checks: JAX puts things other than arrays into trees."""
    scaled = object.__new__(ScaledGradients)
    scaled.gradients, scaled._numbers = gradients, numbers
    scaled._lacks_loss, scaled._reduced_over = lacks_loss, reduced_over
    scaled._alone_over = alone_over
    return scaled


# Packages whose frames stand between a caller and what JAX calls.
BETWEEN = ("jax", "contextlib", "functools")


def optax_caller() -> str | None:
    """Return the name of the optax function that called our caller, also through JAX; None if none did.

    Of several it is the innermost that is not a tree helper: the function that the user wrote, or the part of
    a chain that was about to compute.
    """
    frame: FrameType | None = sys._getframe(2)
    names = []
    while frame is not None and _package(frame) in ("optax", *BETWEEN):
        if _package(frame) == "optax":
            names.append((frame.f_code.co_name, frame.f_globals["__name__"]))
        frame = frame.f_back
    if not names:
        return None
    name, module = next((pair for pair in names if ".tree" not in pair[1]), names[-1])
    return f"optax.{name}" if hasattr(sys.modules["optax"], name) else f"{name} in {module}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _check_caller(caller: str | None) -> None:
    """Raise if an optax function is taking scaled gradients apart.

    It would compute with them, and the leaf of the scale does not stop every function: `zero_nans` would
    pass, and `optax.tree.norm` would end in an unhelpful error of JAX. A function that only passes them on,
    as a chain does, does not take them apart.
    """
    if caller:
        raise UsageError(f"{caller} was given ScaledGradients, {WHAT}. {INSIDE}. {INSTEAD}.")


def _flatten(scaled: ScaledGradients) -> tuple[tuple[object, Array], None]:
    _check_caller(optax_caller())
    return (scaled.gradients, scaled._numbers), None


def _flatten_with_names(
    scaled: ScaledGradients,
) -> tuple[list[tuple[jax.tree_util.GetAttrKey, object]], None]:
    _check_caller(optax_caller())
    names = jax.tree_util.GetAttrKey("gradients"), jax.tree_util.GetAttrKey("scale")
    return list(zip(names, (scaled.gradients, scaled._numbers), strict=True)), None


def _unflatten(_: None, children: Iterable[object]) -> ScaledGradients:
    return _new(*children)


jax.tree_util.register_pytree_with_keys(ScaledGradients, _flatten_with_names, _unflatten, _flatten)
