"""A training step whose update is one conditional: what makes loss scaling cost nothing.

This room puts the pieces in order. It refuses to know what each of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import optax

from preamp.errors import UsageError
from preamp.jax import gradients, tails
from preamp.jax.differentiation import scaled_value_and_grad
from preamp.jax.transformation import LossScaledState, Scaling, find, found_in

__all__ = ["apply_gradients", "step"]


def apply_gradients(
    optimizer: optax.GradientTransformation, scaled_gradients: Any, opt_state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """Return the parameters and the optimizer's state after a step, both as they were if it is skipped.

    Under `jit` all of the update, `optax.apply_updates` included, is one branch of one conditional, if the
    optimizer is what `loss_scaled` returned. For one that has it inside (`optax.chain`, `optax.masked`) this
    is `optimizer.update` and `optax.apply_updates`.

    Args:
        optimizer: made with `loss_scaled`.
        scaled_gradients: of `scaled_value_and_grad`, a tree like `params`.
        opt_state: of `optimizer.init(params)`.
        params: a tree of arrays.
        extra: what the inner optimizer's `update` takes besides, such as `value`.

    Raises:
        UsageError: for a state without a loss scale, or without parameters.
    """
    if params is None:
        raise UsageError("params=None: there is nothing to apply gradients to. Write params=params.")
    find(opt_state)
    scaling = _scaling(optimizer, opt_state)
    if scaling:
        return scaling.apply(scaled_gradients, opt_state, params, extra)
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        scaled_gradients, opt_state, params, **extra
    )
    return optax.apply_updates(params, updates), opt_state


def step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    has_aux: bool = False,
    axis_name: Hashable = None,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a training step: ``step(params, opt_state, *args) -> value, params, opt_state``.

    With `has_aux` the first is (value, aux). Compile it: ``jax.jit(step, donate_argnums=(0, 1))``. Where
    parameters are sharded over explicit axes, make the state with ``jax.jit(optimizer.init)(params)``.

    Args:
        loss_fn: a function of the parameters and what else the step is given, by position or by name, to a
            floating scalar; or to a pair of it and anything.
        optimizer: made with `loss_scaled`. Its `update` is given `value` as well, for what takes it.
        has_aux: whether `loss_fn` returns a pair.
        axis_name: the axis of `pmap` or `shard_map` along which devices have other examples, or a tuple of
            them: value and gradients are averaged.

    Raises:
        UsageError: as `value_and_grad` and `apply_gradients` do, and for parameters without a gradient.

    >>> import jax, jax.numpy as jnp, optax
    >>> from preamp.jax import last_step, loss_scaled
    >>> optimizer = loss_scaled(optax.sgd(0.25))
    >>> train = jax.jit(step(lambda w, x: (w * x) ** 2, optimizer))
    >>> w = jnp.float32(1.0)
    >>> value, w, state = train(w, optimizer.init(w), 1.0)
    >>> float(value), float(w), last_step(state).grad_norm
    (1.0, 0.5, 2.0)
    >>> value, w, state = train(w, state, jnp.inf)
    >>> float(value), float(w), last_step(state).new_scale
    (inf, 0.5, 32768.0)
    """
    differentiate = scaled_value_and_grad(loss_fn, has_aux=has_aux, axis_name=axis_name)

    def train(params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        _check_arguments(params, opt_state)
        scaling = _scaling(optimizer, opt_state)
        if scaling and isinstance(opt_state.policy_state.scale, jax.core.Tracer):
            result, scaled, complete = tails.cut(differentiate, opt_state, params, *args, **kwargs)
            extra = {"value": result[0] if has_aux else result}
            return result, *scaling.apply(scaled, opt_state, params, extra, complete)
        result, scaled = differentiate(opt_state, params, *args, **kwargs)
        value = result[0] if has_aux else result
        return result, *apply_gradients(optimizer, scaled, opt_state, params, value=value)

    return train


def _scaling(optimizer: Any, opt_state: Any) -> Scaling | None:
    """Return what `loss_scaled` made, if that is the whole optimizer."""
    scaling = getattr(optimizer.update, "__self__", None)
    return scaling if isinstance(scaling, Scaling) and isinstance(opt_state, LossScaledState) else None


def _check_arguments(params: Any, opt_state: Any) -> None:
    """Refuse what would go wrong deep inside of an optimizer."""
    if found_in(params):
        raise UsageError("params and opt_state are swapped. Write step(params, opt_state, ...).")
    find(opt_state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not gradients.is_inexact(leaf):
            raise UsageError(
                f"params{jax.tree_util.keystr(path)} has no gradient: it is {getattr(leaf, 'dtype', leaf)}. "
                "Write step(loss_fn, optimizer)(params, ...) with floating parameters alone, and give the "
                "rest as another argument."
            )
