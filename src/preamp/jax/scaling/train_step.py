"""A training step whose whole update is one conditional, so that loss scaling costs almost nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from preamp.arrays.jax import is_inexact
from preamp.checks import shown
from preamp.errors import UsageError
from preamp.jax.scaling.deferred_casts import defer_casts
from preamp.jax.scaling.differentiation import Differentiated, next_scale, refuse_stateful
from preamp.jax.scaling.model_state import kept_on_skip, warn_of_statistics
from preamp.jax.scaling.states import LossScaledState, PendingState, states_in
from preamp.jax.scaling.transformation import Backward, Scaling
from preamp.jax.scaling.unreduced_gradients import warn_of_devices

Params = TypeVar("Params")


def apply_gradients(
    optimizer: optax.GradientTransformation,
    gradients: Params,
    opt_state: PendingState,
    params: Params,
    **extra: object,
) -> tuple[Params, LossScaledState]:
    """Return the parameters and the optimizer's state after a step, both unchanged if it is skipped.

    Under `jit` the whole update, `optax.apply_updates` included, is one branch of one conditional.

    Args:
        optimizer: what `loss_scaled` returned, not a transformation that contains it.
        gradients: from `value_and_grad`, with the tree structure of `params`.
        opt_state: from the same call of `value_and_grad`, or from `accumulate`.
        params: a tree of arrays.
        extra: further arguments of the inner optimizer's `update`, such as `value_fn`. `value` and `grad` are
            those of this step by default.

    Raises:
        UsageError: for an optimizer or a state that is not from `loss_scaled`, and gradients whose tree
            differs from that of the parameters.
    """
    if params is None:
        raise UsageError("params=None: there is nothing to apply gradients to. Write params=params.")
    scaling = _scaling(optimizer)
    backward, state = scaling.backward(gradients, opt_state, params)
    return scaling.apply(backward, state, params, extra)


def step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    has_aux: bool = False,
    axis_name: Hashable = None,
    has_state: bool = False,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a training step: ``step(params, opt_state, *args) -> value, params, opt_state``.

    With `has_aux` the first is (value, aux). Compile it: ``jax.jit(step, donate_argnums=(0, 1))``. If
    parameters are sharded over explicit axes, make the state with ``jax.jit(optimizer.init)(params)``.

    The state of a model, such as the running statistics of a batch norm, needs `has_state`: after an overflow
    in the forward pass inf or NaN would stay in it for good, although the step is skipped. With `has_state`
    the step is ``step(params, opt_state, state, *args) -> (value, state), params, opt_state``; and
    ``(value, (state, aux)), ...`` with `has_aux` as well.

    Args:
        loss_fn: takes the parameters and the other arguments of the step, by position or by name, and returns
            a floating scalar, or a pair of it and anything. Of `optax.LookaheadParams` it is given the fast
            ones.
        optimizer: what `loss_scaled` returned, not a transformation that contains it. Inner optimizers that
            take `value`, `grad` and `value_fn` are given them.
        has_aux: whether `loss_fn` returns a pair.
        axis_name: the axis of `pmap` or `shard_map` along which devices have different examples, or a tuple
            of them. Value and gradients are averaged over it. ``()`` says that nothing is to be averaged:
            each device trains a model of its own, or the loss function averages the gradients.
        has_state: whether `loss_fn` takes the model's state after the parameters, and returns
            ``loss, state``, or ``loss, (state, aux)`` with `has_aux`. On a skipped step the state comes back
            as it was.

    Raises:
        UsageError: as `value_and_grad` and `apply_gradients` do; for parameters without a gradient; and for a
            new state that has another structure or other shapes than the old one.

    Warns:
        UserWarning: when it is traced without `axis_name` in `pmap` or in `shard_map` with
            ``check_vma=False``, where each device then trains alone, and in `shard_map` with its checks if
            it has summed the gradients of different losses. Before JAX 0.8 `pmap` is not noticed. For what
            looks like running statistics of a batch norm in aux.

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
    scaling = _scaling(optimizer)
    differentiate = Differentiated(loss_fn, 0, has_aux or has_state, axis_name)

    def train(
        params: Params, opt_state: LossScaledState, *args: object, **kwargs: object
    ) -> tuple[Any, Params, LossScaledState]:
        fast = params.fast if isinstance(params, optax.LookaheadParams) else params
        refuse_stateful(fast)
        _check_params(fast)
        scaling.check_state(opt_state)
        scale, finish = next_scale(opt_state), None
        if isinstance(scale, jax.core.Tracer):
            result, scaled, finish = defer_casts(lambda: differentiate(scale, fast, *args, **kwargs))
        else:
            result, scaled = differentiate(scale, fast, *args, **kwargs)
        aux: Any = None
        value, aux = result if has_aux or has_state else (result, aux)
        if axis_name is None:
            warn_of_devices(value, scaled, "step(loss_fn, optimizer", scaling.names)
        extra = {"value": value, "value_fn": differentiate.of_params(scale, args, kwargs)}
        backward = Backward(scaled, scale, jnp.asarray(value, jnp.float32), finish)
        params, opt_state = scaling.apply(backward, opt_state, params, extra)
        if has_state and has_aux:
            state, aux = aux
            result = value, (kept_on_skip(opt_state.taken, state, args), aux)
        elif has_state:
            result = value, kept_on_skip(opt_state.taken, aux, args)
        if has_aux:
            warn_of_statistics(aux, (args, kwargs))
        return result, params, opt_state

    return train


def _scaling(optimizer: object) -> Scaling:
    """Return what `loss_scaled` made.

    Raises:
        UsageError: for any other optimizer, and for one that has `loss_scaled` inside.
    """
    scaling = getattr(getattr(optimizer, "update", None), "__self__", None)
    if not isinstance(scaling, Scaling):
        maker = getattr(getattr(optimizer, "init", optimizer), "__qualname__", repr(optimizer)).split(".")[0]
        raise UsageError(
            f"the optimizer was made by {shown(maker)}, not by loss_scaled, which has to be the outermost: "
            "a transformation around it would run on skipped steps too. "
            "Write loss_scaled(optimizer) around the whole optimizer, such as loss_scaled(optax.chain(...)) "
            "or loss_scaled(optax.MultiSteps(inner, k))."
        )
    return scaling


def _check_params(params: object) -> None:
    """Refuse parameters that would fail deep inside an optimizer."""
    for leaf in jax.tree.leaves(params):
        if is_inexact(leaf):
            continue
        if states_in(params):
            raise UsageError("params and opt_state are swapped. Write step(params, opt_state, ...).")
        path = next(path for path, other in jax.tree_util.tree_leaves_with_path(params) if other is leaf)
        raise UsageError(
            f"params{jax.tree_util.keystr(path)} has no gradient: it is {getattr(leaf, 'dtype', leaf)}. "
            "Write step(loss_fn, optimizer)(params, ...) with floating parameters alone, and give the "
            "rest as another argument."
        )
