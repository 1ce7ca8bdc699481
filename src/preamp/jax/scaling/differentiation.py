"""Gradients of a scaled loss, without multiplying the loss.

The scale is the seed of the vector-Jacobian product. So the loss cannot overflow, and its value needs no
unscaling.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from preamp.arrays.jax import global_norm, multiply_by_inverse, widen
from preamp.errors import UsageError
from preamp.jax import axes, trees
from preamp.jax.scaling.measurements import measure
from preamp.jax.scaling.states import LossScaledState, PendingState, check, locate, pending_in
from preamp.jax.scaling.unreduced_gradients import warn_of_devices
from preamp.jax.trees import FlowSlot, RecipeScales, is_no_gradient, kind_of

T = TypeVar("T")
NNX = "flax.nnx"


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Hashable = None,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a function like that of `jax.value_and_grad`, whose loss is scaled while it is differentiated.

    ``value, grads, opt_state = value_and_grad(loss_fn)(params, opt_state, *args)``. The value is (value, aux)
    with `has_aux`. The gradients are true gradients, a plain tree: unscaled by the scale that was in the
    loss, in float32 where they were narrower, and NaN throughout if any entry had overflowed. The state that
    it returns holds what the backward pass measured. The `update` of `loss_scaled`, and `apply_gradients`,
    take this state and no other.

    The optimizer may be a chain, if `loss_scaled` is the last in it and nothing before has a state:
    ``optax.chain(optax.clip(1.0), loss_scaled(optax.adam(1e-3)))``.

    Args:
        loss_fn: takes the parameters and other arguments, and returns a floating scalar, or a pair of it and
            anything.
        argnums: which arguments of `loss_fn` to differentiate with respect to.
        has_aux: whether `loss_fn` returns a pair.
        axis_name: the mapped axis, or a tuple of them, over which value and gradients are averaged. ``()``
            says that nothing is to be averaged, as where each device trains a model of its own.

    Raises:
        UsageError: for a function, arguments or a loss that cannot be differentiated; for an optimizer's
            state without `loss_scaled`, with another transformation around it, or whose update is missing.

    Warns:
        UserWarning: as `step` does, without `axis_name` on several devices.

    >>> import jax.numpy as jnp, optax
    >>> from preamp.jax import loss_scaled
    >>> optimizer = loss_scaled(optax.sgd(0.5))
    >>> w = jnp.float32(3.0)
    >>> value, gradient, state = value_and_grad(jnp.square)(w, optimizer.init(w))
    >>> float(value), float(gradient), bool(state.finite)
    (9.0, 6.0, True)
    >>> update, state = optimizer.update(gradient, state, w)
    >>> float(update)
    -3.0
    """
    differentiate = Differentiated(loss_fn, argnums, has_aux, axis_name)

    def call(params: object, opt_state: object, *args: object, **kwargs: object) -> tuple[Any, Any, Any]:
        state, put = locate(opt_state)
        check(state)
        scale = next_scale(state)
        result, scaled = differentiate(scale, params, *args, **kwargs)
        value = result[0] if has_aux else result
        if axis_name is None:
            warn_of_devices(value, scaled, "value_and_grad(loss_fn")
        leaves, rebuild = trees.split(scaled)
        loss = jnp.asarray(value, jnp.float32)
        # Devices with one scale and different gradients hold shards of one model, and agree on the verdict.
        differ = frozenset[Hashable]().union(*map(axes.varying, leaves)) - axes.varying(scale)
        names = tuple(sorted(differ, key=str))
        measured, size = measure(leaves, scale, loss, names, needs_amax=state.amax is not None)
        # NaN in every entry: what other code makes of the gradients cannot hide an overflow.
        gradients = rebuild(multiply_by_inverse(leaves, jnp.where(measured.finite, scale, jnp.nan)))
        unit = size.unit / scale.astype(size.unit.dtype)
        loss = cast(Array, measured.loss)
        one = jnp.ones_like(loss)
        pending = PendingState(state, measured.finite, unit, size.ratio, measured.amax, loss, one)
        return result, gradients, put(pending)

    return call


def zero_grads(params: T, opt_state: object) -> tuple[T, Any]:
    """Return zeros for gradients and a state for no backward pass: what `accumulate` starts from in a `scan`.

    Args:
        params: what the gradients are with respect to.
        opt_state: the state before the step.
    """
    state, put = locate(opt_state)
    zero, true = jnp.zeros((), jnp.float32), jnp.ones((), bool)
    amax = None if state.amax is None else zero
    zeros = jax.tree.map(jnp.zeros_like, trees.widen(params))
    norm = global_norm(trees.split(zeros)[0])
    pending = PendingState(check(state), true, norm, norm, amax, zero, zero)
    return zeros, put(pending)


def accumulate(total: Sequence[Any], new: Sequence[Any]) -> tuple[Any, Any]:
    """Return the sum of the gradients of two backward passes of one step, with the state for both.

    The step is skipped if either overflowed. Its loss is the mean over the passes.

    Args:
        total: gradients and state, from `value_and_grad`, `zero_grads` or this function.
        new: those of another backward pass. Both have to begin at the same state.

    Raises:
        UsageError: for a state that is not from `value_and_grad`.

    >>> import jax, jax.numpy as jnp, optax
    >>> from preamp.jax import loss_scaled
    >>> optimizer = loss_scaled(optax.sgd(0.5))
    >>> w = jnp.float32(3.0)
    >>> state = optimizer.init(w)
    >>> total = zero_grads(w, state)
    >>> for x in (1.0, 2.0):
    ...     value, *new = value_and_grad(lambda w, x: x * w**2)(w, state, x)
    ...     total = accumulate(total, new)
    >>> gradients, state = total
    >>> update, state = optimizer.update(gradients / 2, state, w)
    >>> float(update), float(state.loss)
    (-4.5, 13.5)
    """
    (gradients, first), (others, second) = total, new
    mine, put = pending_in(first)
    theirs, _ = pending_in(second)
    amax = mine.amax
    if amax is not None and theirs.amax is not None:
        amax = jnp.maximum(amax, theirs.amax)
    unit = jnp.maximum(mine.unit, theirs.unit)
    whole = jnp.where(unit > 0.0, unit, 1.0)
    both = mine._replace(
        finite=mine.finite & theirs.finite,
        unit=unit,
        ratio=mine.ratio * (mine.unit / whole) + theirs.ratio * (theirs.unit / whole),
        amax=amax,
        loss=mine.loss + theirs.loss,
        passes=mine.passes + theirs.passes,
    )
    return jax.tree.map(jnp.add, gradients, others), put(both)


class Differentiated:
    """A loss and its gradients times a scale, as a function of the scale.

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
            scaled = jax.tree.map(self._over_devices, scaled, is_leaf=is_no_gradient)
        return (value, aux) if self._has_aux else value, scaled[0] if self._is_single else scaled

    def _over_devices(self, node: T) -> T | FlowSlot:
        """Return a slot with the counts of all devices; other nodes as they are."""
        if isinstance(node, RecipeScales) and not axes.tracked(self._names):
            raise UsageError(
                "the scales of a delayed recipe are those of all devices, and here JAX does not know what "
                "differs between them. Write jax.shard_map with check_vma=True, or "
                "recipe=preamp.recipes.FLOAT8_CURRENT."
            )
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
                "return loss, nnx.state(model, nnx.Not(nnx.Param)), with has_state=True."
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
                f"argnums={number} is out of range: the loss has {count} positional arguments. "
                "Write value_and_grad(loss_fn)(params, opt_state, ...), with params by position."
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
