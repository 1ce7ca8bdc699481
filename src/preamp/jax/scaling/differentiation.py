"""Gradients of a scaled loss, though no loss is ever multiplied.

The scale enters as the seed of the vector-Jacobian product. So the loss cannot overflow, and its value needs
no unscaling.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from preamp.errors import UsageError
from preamp.jax import axes
from preamp.jax.scaling import gradients
from preamp.jax.scaling.flow_slots import FlowSlot, is_flow_slot
from preamp.jax.scaling.loss_scale import LossScale
from preamp.jax.scaling.modules import refuse_stateful
from preamp.jax.scaling.readings import reading_of
from preamp.jax.scaling.scaled_gradients import ScaledGradients
from preamp.jax.scaling.states import check_dtypes, find, found_in, kind_of
from preamp.policy import Reading


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Hashable = None,
) -> Callable[..., Any]:
    """Return a function like that of `jax.value_and_grad`, which takes a loss scale before all arguments.

    It returns the value, or (value, aux); the gradients, unscaled, float32 where they were shorter; and a
    `Reading`, for `LossScale.advance`, with what the scale's policy asks to see.

    Args:
        loss_fn: returns a floating scalar, or a pair of it and anything.
        argnums: which arguments to differentiate with respect to.
        has_aux: whether `loss_fn` returns a pair.
        axis_name: the mapped axis, or a tuple of them, over which value and gradients are averaged.

    Raises:
        UsageError: for a function, arguments or a loss that cannot be differentiated.

    >>> import jax.numpy as jnp
    >>> from preamp.jax import LossScale
    >>> value, gradient, reading = value_and_grad(jnp.square)(LossScale(), jnp.float32(3.0))
    >>> float(value), float(gradient), bool(reading.finite)
    (9.0, 6.0, True)
    """
    differentiate = differentiated(loss_fn, argnums, has_aux, axis_name)

    def call(loss_scale: Any, *args: Any, **kwargs: Any) -> Any:
        scale = scale_in(loss_scale)
        value, scaled = differentiate(scale, *args, **kwargs)
        seen = gradients.look(scaled, scale)
        reading = Reading(seen.finite)
        if isinstance(loss_scale, LossScale):  # an optimizer's state does not know its policy
            reading = reading_of(loss_scale.policy, scaled, seen.finite)
        return value, gradients.multiplied(scaled, seen.inverse), reading

    return call


def scaled_value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Hashable = None,
) -> Callable[..., Any]:
    """Return a function that returns the value, or (value, aux), and the gradients as `ScaledGradients`.

    That is what `apply_gradients` and the `update` of `loss_scaled` take. The first argument is the state of
    an optimizer made with `loss_scaled`, or a `LossScale`; the others are those of `loss_fn`. The gradients
    carry the value, which `last_step` reports, unless `shard_map` knows it to differ between devices.

    The arguments and errors are those of `value_and_grad`.

    >>> import jax.numpy as jnp
    >>> from preamp.jax import LossScale
    >>> value, scaled = scaled_value_and_grad(jnp.square)(LossScale(), jnp.float32(3.0))
    >>> float(value), float(scaled.unscale()), float(scaled.scale)
    (9.0, 6.0, 65536.0)
    """
    differentiate = differentiated(loss_fn, argnums, has_aux, axis_name)

    def call(loss_scale: Any, *args: Any, **kwargs: Any) -> Any:
        scale = scale_in(loss_scale)
        result, scaled = differentiate(scale, *args, **kwargs)
        value = result[0] if has_aux else result
        # In shard_map a loss that is not averaged differs between devices, and the gradients need not.
        return result, ScaledGradients(scaled, scale, None if axes.varying(value) else value)

    return call


def differentiated(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Hashable = None,
) -> Callable[..., Any]:
    """Return `scaled_value_and_grad`, but of a function of the scale itself to a plain tree."""
    if not callable(loss_fn):
        raise UsageError(
            f"a {type(loss_fn).__name__} cannot be called as a loss. Write value_and_grad(loss_fn), or "
            "step(loss_fn, optimizer)."
        )
    numbers = _numbers(argnums)
    names = axes.names_of(axis_name)

    def call(scale: Any, *args: Any, **kwargs: Any) -> Any:
        _check_range(numbers, len(args))
        axes.check_bound(names)
        refuse_stateful([args[number] for number in numbers])

        def loss_of(*chosen: Any) -> tuple[Any, Any]:
            filled = list(args)
            for number, argument in zip(numbers, chosen, strict=True):
                filled[number] = argument
            loss, aux = _parts(loss_fn(*filled, **kwargs), has_aux)
            return lax.pmean(loss, names) if axes.tracked(names) else loss, aux

        value, pull_back, aux = jax.vjp(loss_of, *[args[number] for number in numbers], has_aux=True)
        scaled = _pulled_back(pull_back, value, scale)
        if names:
            value = lax.pmean(gradients.wide(value), names)
            scaled = gradients.each(lambda leaf: axes.mean(names, leaf), gradients.wide(scaled))
            scaled = jax.tree.map(lambda node: _of_all(names, node), scaled, is_leaf=is_flow_slot)
        return (value, aux) if has_aux else value, scaled[0] if isinstance(argnums, int) else scaled

    return call


def _of_all(names: Sequence[Hashable], node: Any) -> Any:
    """Return the counts of all devices of a slot; other nodes as they are."""
    return FlowSlot(axes.sum_over(names, [node.counts])) if is_flow_slot(node) else node


def unscaled_loss(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    axis_name: Hashable,
    scale: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Callable[[Any], Any]:
    """Return the loss as a function of the parameters alone, for line searches that evaluate it again.

    Their gradients are computed from the scaled loss and unscaled, so that they do not underflow either.
    """
    names = axes.names_of(axis_name)
    differentiate = differentiated(loss_fn, 0, has_aux, axis_name)

    def value_and_gradient(params: Any) -> tuple[Any, Any]:
        result, scaled = differentiate(scale, params, *args, **kwargs)
        value = result[0] if has_aux else result
        return value, gradients.like(gradients.multiplied(scaled, 1.0 / scale), params)

    @jax.custom_vjp
    def value_fn(params: Any) -> Any:
        loss, _ = _parts(loss_fn(params, *args, **kwargs), has_aux)
        return lax.pmean(gradients.wide(loss), names) if names else loss

    def backward(gradient: Any, seed: Any) -> tuple[Any]:
        return (gradients.like(gradients.multiplied(gradient, jnp.asarray(seed)), gradient),)

    value_fn.defvjp(value_and_gradient, backward)
    return value_fn


def _pulled_back(pull_back: Callable[[Any], Any], value: Any, scale: Any) -> Any:
    """Return gradients times the scale, as much of it through the network as the loss's dtype can hold."""
    dtype = value.dtype
    if jnp.finfo(dtype).bits >= 32:
        return pull_back(_as_seed(scale.astype(dtype), value))
    limits = jnp.finfo(dtype)
    seed = jnp.clip(scale, float(limits.smallest_normal), 2.0 ** (limits.maxexp - 1)).astype(dtype)
    return gradients.multiplied(pull_back(_as_seed(seed, value)), scale / seed.astype(scale.dtype))


def _as_seed(number: Any, value: Any) -> Any:
    """Return the number as what `vjp` takes for a value: varying along the same axes in `shard_map`."""
    return jnp.where(value == value, number, number)


def scale_in(loss_scale: Any) -> Any:
    """Return the scale of the next loss, of a `LossScale` or the state of `loss_scaled`."""
    if isinstance(loss_scale, LossScale):
        return loss_scale.loss_scale
    if loss_scale is None or isinstance(loss_scale, dict) or found_in(loss_scale):
        state = find(loss_scale)
        check_dtypes(state)
        scale = state.policy_state.scale
        return scale if isinstance(scale, jax.Array) else jnp.asarray(scale)  # nnx keeps it in a variable
    raise UsageError(
        f"the first argument holds no loss scale: it is {kind_of(loss_scale)}. Write "
        "value_and_grad(loss_fn)(LossScale(), params), or "
        "scaled_value_and_grad(loss_fn)(opt_state, params) with a state made by loss_scaled."
    )


def _numbers(argnums: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, argnums if isinstance(argnums, Sequence) else [argnums]))
    except TypeError:
        raise UsageError(
            f"argnums={argnums!r} is not a number of an argument, nor a sequence of them. Write argnums=0."
        ) from None


def _check_range(numbers: tuple[int, ...], count: int) -> None:
    for number in numbers:
        if not -count <= number < count:
            raise UsageError(
                f"argnums={number} names no argument: {count} came by position after the loss scale. "
                "Write value_and_grad(loss_fn)(loss_scale, params): what is differentiated has no name."
            )


def _parts(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return the loss and aux, for what the loss function returned."""
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise UsageError(
            f"has_aux=True, but the loss function returned {kind_of(result)}. Write return loss, aux."
        )
    loss, aux = result if has_aux else (result, None)
    if not isinstance(loss, jax.Array | np.ndarray | np.generic | complex | float | int) or jnp.shape(loss):
        raise UsageError(
            f"the loss is {kind_of(loss)}, not a scalar. Write return jnp.mean(loss), or has_aux=True."
        )
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise UsageError(
            f"the loss is of dtype {loss.dtype}, which has no gradient. Write a floating one: "
            "loss.real, or loss.astype(jnp.float32)."
        )
    return loss, aux
