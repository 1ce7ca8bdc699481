"""Gradients of a scaled loss, without multiplying the loss.

The scale is the seed of the vector-Jacobian product. So the loss cannot overflow, and its value needs no
unscaling.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from preamp.arrays.jax import multiply_by_inverse, widen
from preamp.errors import UsageError
from preamp.jax import axes, trees
from preamp.jax.scaling.loss_scale import LossScale
from preamp.jax.scaling.measurements import measure
from preamp.jax.scaling.scaled_gradients import ScaledGradients
from preamp.jax.scaling.states import LossScaledState, check_dtypes, find, states_in
from preamp.jax.trees import FlowSlot, is_flow_slot, kind_of

T = TypeVar("T")
NNX = "flax.nnx"


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Hashable = None,
) -> Callable[..., Any]:
    """Return a function like that of `jax.value_and_grad`, with a loss scale as an additional first argument.

    It returns three things: the value, or (value, aux); the unscaled gradients, in float32 where they were
    narrower; and a `Reading` for `LossScale.advance`, with the measurements that the scale's policy needs.

    Args:
        loss_fn: returns a floating scalar, or a pair of it and anything.
        argnums: which arguments to differentiate with respect to. The loss scale is not counted.
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
    differentiate = Differentiated(loss_fn, argnums, has_aux, axis_name)

    def call(loss_scale: object, *args: object, **kwargs: object) -> tuple[Any, ...]:
        scale = scale_in(loss_scale)
        value, scaled = differentiate(scale, *args, **kwargs)
        policy = loss_scale.policy if isinstance(loss_scale, LossScale) else None  # a state has none
        leaves, rebuild = trees.split(scaled)
        measured, _ = measure(policy, leaves, scale)
        return value, rebuild(multiply_by_inverse(leaves, scale)), measured.reading

    return call


def scaled_value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Hashable = None,
) -> Callable[..., Any]:
    """Return a function that returns the value, or (value, aux), and the gradients as `ScaledGradients`.

    `apply_gradients` and the `update` of `loss_scaled` take them. The first argument is the state of
    an optimizer made with `loss_scaled`, or a `LossScale`; the others are those of `loss_fn`. The gradients
    carry the value, which `last_step` reports, unless `shard_map` knows it to differ between devices.

    The arguments and errors are those of `value_and_grad`. In `pmap`, and in `shard_map` with
    ``check_vma=False``, the update warns if gradients were averaged neither by `axis_name` nor by `map`;
    ``axis_name=()`` says that this is intended.

    >>> import jax.numpy as jnp
    >>> from preamp.jax import LossScale
    >>> value, scaled = scaled_value_and_grad(jnp.square)(LossScale(), jnp.float32(3.0))
    >>> float(value), float(scaled.unscale()), float(scaled.scale)
    (9.0, 6.0, 65536.0)
    """
    differentiate = Differentiated(loss_fn, argnums, has_aux, axis_name)

    def call(loss_scale: object, *args: object, **kwargs: object) -> tuple[Any, ...]:
        scale = scale_in(loss_scale)
        result, scaled = differentiate(scale, *args, **kwargs)
        value = result[0] if has_aux else result
        # In shard_map a loss that is not averaged differs between devices, and the gradients need not.
        gradients = ScaledGradients(scaled, scale, None if axes.varying(value) else value)
        gradients._alone_over = axes.unchecked() if axis_name is None else ()
        return result, gradients

    return call


class Differentiated:
    """`scaled_value_and_grad` as a function of the scale itself, which returns a plain tree of gradients.

    The arguments are those of `value_and_grad`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., object],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: Hashable = None,
    ) -> None:
        if not callable(loss_fn):
            raise UsageError(
                f"a {type(loss_fn).__name__} cannot be called as a loss. Write value_and_grad(loss_fn), or "
                "step(loss_fn, optimizer)."
            )
        self._loss_fn, self._has_aux = loss_fn, has_aux
        self._numbers, self._is_single = _numbers(argnums), isinstance(argnums, int)
        self._names = axes.names_of(axis_name)

    def __call__(self, scale: Array, *args: object, **kwargs: object) -> tuple[Any, Any]:
        """Return the value, or (value, aux), and the gradients times the scale."""
        _check_range(self._numbers, len(args))
        axes.check_bound(self._names)
        chosen = [args[number] for number in self._numbers]
        refuse_stateful(chosen)

        def loss_of(*chosen: object) -> tuple[Array, object]:
            filled = list(args)
            for number, argument in zip(self._numbers, chosen, strict=True):
                filled[number] = argument
            loss, aux = _parts(self._loss_fn(*filled, **kwargs), self._has_aux)
            return lax.pmean(loss, self._names) if axes.tracked(self._names) else loss, aux

        value, pull_back, aux = jax.vjp(loss_of, *chosen, has_aux=True)
        scaled = pulled_back(pull_back, value, scale)
        if self._names:
            value = lax.pmean(widen(value), self._names)
            scaled = trees.map_inexact(partial(axes.mean, self._names), trees.widen(scaled))
            scaled = jax.tree.map(self._total_counts, scaled, is_leaf=is_flow_slot)
        return (value, aux) if self._has_aux else value, scaled[0] if self._is_single else scaled

    def _total_counts(self, node: T) -> T | FlowSlot:
        """Return a slot with the counts of all devices; other nodes as they are."""
        return FlowSlot(axes.sum_over(self._names, [node.counts])) if isinstance(node, FlowSlot) else node

    def of_params(
        self, scale: Array, args: Sequence[object], kwargs: dict[str, object]
    ) -> Callable[[Any], Array]:
        """Return the unscaled loss as a function of the parameters alone, which line searches evaluate again.

        Its gradients are computed from the scaled loss and then unscaled, so that they do not underflow
        either.

        Args:
            scale: the loss scale.
            args: the other arguments of the loss function.
            kwargs: its keyword arguments.
        """

        def value_and_gradient(params: object) -> tuple[Array, object]:
            result, scaled = self(scale, params, *args, **kwargs)
            return result[0] if self._has_aux else result, trees.cast_like(
                trees.unscale(scaled, scale), params
            )

        @jax.custom_vjp
        def value_fn(params: object) -> Array:
            loss, _ = _parts(self._loss_fn(params, *args, **kwargs), self._has_aux)
            return lax.pmean(widen(loss), self._names) if self._names else loss

        def backward(gradient: object, seed: Array) -> tuple[object]:
            return (trees.cast_like(trees.multiply(gradient, seed), gradient),)

        value_fn.defvjp(value_and_gradient, backward)
        return value_fn


def refuse_stateful(params: object) -> None:
    """Refuse parameters that are an NNX module with other variables, such as BatchNorm's statistics.

    JAX differentiates a copy of the module: what the loss writes to it is lost, and all of its variables
    would be trained as parameters. Flax is used only if it has been imported.

    Args:
        params: any tree.

    Raises:
        UsageError: with the names of the variables and the lines to write.
    """
    nnx = sys.modules.get(NNX)
    if nnx is None:
        return
    for node in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, nnx.Module)):
        if isinstance(node, nnx.Module) and (others := _other_variables(nnx, node)):
            raise UsageError(
                f"the parameters are an NNX module that has {', '.join(others[:3])} besides parameters: "
                "what the loss writes there would be lost, and the optimizer would train them. Write "
                "graphdef, params, rest = nnx.split(model, nnx.Param, ...), give params and rest to the "
                "step, and in the loss write model = nnx.merge(graphdef, params, rest, copy=True) and "
                "return loss, nnx.state(model, nnx.Not(nnx.Param)), with has_aux=True."
            )


def _other_variables(nnx: Any, module: object) -> list[str]:
    """Return the kinds and paths of the variables of a module that are not parameters."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))
    return [f"{type(variable).__name__} {'.'.join(map(str, path))}" for path, variable in state]


def pulled_back(pull_back: Callable[[Array], T], value: Array, scale: Array) -> T:
    """Return gradients times the scale. The seed carries as much of it as the loss's dtype can hold."""
    limits = jnp.finfo(value.dtype)
    # In shard_map the seed has to vary along the same axes as the value does.
    if limits.bits >= 32:
        seed = scale.astype(value.dtype)
        return pull_back(jnp.where(value == value, seed, seed))
    seed = jnp.clip(scale, float(limits.smallest_normal), 2.0 ** (limits.maxexp - 1)).astype(value.dtype)
    short = pull_back(jnp.where(value == value, seed, seed))
    return trees.multiply(short, scale / seed.astype(scale.dtype))


def scale_in(loss_scale: object) -> Array:
    """Return the scale of the next loss, of a `LossScale` or the state of `loss_scaled`."""
    if isinstance(loss_scale, LossScale):
        return loss_scale.loss_scale
    if loss_scale is None or isinstance(loss_scale, dict) or states_in(loss_scale):
        state = find(loss_scale)
        check_dtypes(state)
        return next_scale(state)
    raise UsageError(
        f"the first argument holds no loss scale: it is {kind_of(loss_scale)}. Write "
        "value_and_grad(loss_fn)(LossScale(), params), or "
        "scaled_value_and_grad(loss_fn)(opt_state, params) with a state made by loss_scaled."
    )


def next_scale(state: LossScaledState) -> Array:
    """Return the scale of the next loss as an array: NNX keeps it in a variable."""
    scale = state.policy_state.scale
    return scale if isinstance(scale, Array) else jnp.asarray(scale)


def _numbers(argnums: object) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, argnums if isinstance(argnums, Sequence) else [argnums]))
    except TypeError:
        raise UsageError(
            f"argnums={argnums!r} is neither an argument number nor a sequence of them. Write argnums=0."
        ) from None


def _check_range(numbers: tuple[int, ...], count: int) -> None:
    for number in numbers:
        if not -count <= number < count:
            raise UsageError(
                f"argnums={number} is out of range: {count} positional arguments follow the loss scale. "
                "Write value_and_grad(loss_fn)(loss_scale, params), with params by position."
            )


def _parts(result: object, has_aux: bool) -> tuple[Array, object]:
    """Return the loss and aux, for what the loss function returned."""
    loss, aux = result, None
    if has_aux:
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise UsageError(
                f"has_aux=True, but the loss function returned {kind_of(result)}. Write return loss, aux."
            )
        loss, aux = result
    if not isinstance(loss, Array | np.ndarray | np.generic | complex | float | int) or jnp.shape(loss):
        is_pair = isinstance(loss, tuple | list)
        advice = "has_aux=True, if it is (loss, aux)" if is_pair else "return jnp.mean(loss)"
        raise UsageError(f"the loss is {kind_of(loss)}, not a scalar. Write {advice}.")
    array = jnp.asarray(loss)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise UsageError(
            f"the loss has dtype {array.dtype}, which has no gradient. Return a floating one: "
            "loss.real, or loss.astype(jnp.float32)."
        )
    return array, aux
