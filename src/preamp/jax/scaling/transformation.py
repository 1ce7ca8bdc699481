"""Loss scaling as an optax transformation: one step of it skips overflows and spikes, and keeps a record."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from preamp.arrays.jax import Size, is_inexact, multiply
from preamp.checks import check_limit
from preamp.errors import PolicyError, UsageError
from preamp.guards import Guard
from preamp.guards.base import leaves_of
from preamp.jax import axes, trees
from preamp.jax.scaling.differentiation import refuse_stateful
from preamp.jax.scaling.measurements import measure, measure_again
from preamp.jax.scaling.states import LossScaledState, PendingState, check, pending_in, start, states_in
from preamp.jax.trees import is_no_gradient, kind_of
from preamp.policy import Dynamic, Policy
from preamp.scaling import Measured, advance, given_guard, judge
from preamp.systems.arguments import given_policy

OFFERED = frozenset(["value", "value_fn", "grad"])  # what line searches ask for
Params = TypeVar("Params")
Result = TypeVar("Result")


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy[Any] | None = None,
    max_norm: float | None = None,
    axis_name: Hashable = None,
    guard: Guard[Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that skips overflows, clips, and moves the scale of the loss.

    Its `update` takes the gradients and the state that `value_and_grad` returns, and raises for any other
    state: so gradients of plain `jax.grad`, which were not scaled, cannot be mistaken for these. `step` does
    both.

    On a skipped step the inner state does not change in any bit, and the updates are negative zeros, which
    change no bit of a parameter. The inner transformation is given gradients and parameters in float32 where
    they are narrower; float64 and complex stay as they are.

    Everything belongs inside, as in ``loss_scaled(optax.chain(optax.clip_by_global_norm(1.0),
    optax.adam(1e-3)))``. Then it trains as in float32, on the steps that are taken. Outside, in a chain,
    transformations without a state may come before `loss_scaled`. A function of yours that changes the
    updates after it also runs on skipped steps.

    Args:
        inner: any optax transformation or optimizer.
        policy: any policy or dialect of preamp. None: `Dynamic()`.
        max_norm: clip the unscaled gradients to this global L2 norm, as `optax.clip_by_global_norm` does.
            None and inf do not clip.
        axis_name: the mapped axis, or a tuple of them, along which devices hold shards of the parameters, and
            so different gradients. They then skip together, and the norm is taken over all of them. Leave it
            out where gradients have been averaged over devices, and under `jit` with sharded arrays.
        guard: any guard or dialect of `preamp.guards`. It also skips steps whose gradients are finite, judged
            by their loss and by their norm, of the gradients that `value_and_grad` returned.

    Raises:
        PolicyError: for a policy, norm or guard that cannot work.
        UsageError: for an `inner` that is not a transformation, or that already scales losses.

    >>> import jax.numpy as jnp, optax
    >>> from preamp import Dynamic
    >>> from preamp.jax import value_and_grad
    >>> optimizer = loss_scaled(optax.sgd(0.5), Dynamic(init_scale=4.0), max_norm=1.0)
    >>> params = jnp.array([3.0, 4.0])
    >>> state = optimizer.init(params)
    >>> loss = lambda w, x: x * jnp.sum(w * w) / 2
    >>> value, gradients, state = value_and_grad(loss)(params, state, 1.0)
    >>> updates, state = optimizer.update(gradients, state, params)
    >>> updates.tolist()
    [-0.30000001192092896, -0.4000000059604645]
    >>> value, gradients, state = value_and_grad(loss)(params, state, jnp.inf)
    >>> updates, state = optimizer.update(gradients, state, params)
    >>> float(state.policy_state.scale), int(state.skipped_steps), updates.tolist()
    (2.0, 1, [-0.0, -0.0])
    """
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise UsageError(
            f"{inner!r} is not a transformation: it has no init and update. Write "
            "loss_scaled(optax.adam(1e-3))."
        )
    scaling = Scaling(
        cast(optax.GradientTransformationExtraArgs, inner),
        given_policy(Dynamic() if policy is None else policy, {}),
        _checked_norm(max_norm),
        axes.names_of(axis_name),
        given_guard(guard),
    )
    return optax.GradientTransformationExtraArgs(scaling.init, scaling.update)


def _checked_norm(max_norm: object) -> float | None:
    """Return `max_norm` as a float; None if it never clips.

    Raises:
        PolicyError: if it is not a number above 0, or if JAX is tracing it.
    """
    if max_norm is None:
        return None
    if isinstance(max_norm, jax.core.Tracer):
        raise PolicyError(
            "max_norm is a value that JAX is tracing, and it has to be known before. Write max_norm=1.0, or "
            "put optax.clip_by_global_norm(max_norm) into the inner optimizer."
        )
    limit = check_limit("max_norm", max_norm)
    return None if limit == float("inf") else limit


class Backward(NamedTuple):
    """The results of the backward pass of one step.

    Attributes:
        gradients: a tree; with a `finish`, the same entries in another order or a narrower dtype.
        divisor: what they are still multiplied by.
        loss: the unscaled loss, float32.
        finish: turns the leaves into those of the gradients; called where the step is not skipped.
        pending: what `value_and_grad` measured; None in `step`, where nothing comes between.
    """

    gradients: object
    divisor: Array
    loss: Array
    finish: Callable[[list[Array]], list[Array]] | None = None
    pending: PendingState | None = None


@dataclass(frozen=True)
class Scaling:
    """One optimizer with loss scaling: the arguments of `loss_scaled`, checked."""

    inner: optax.GradientTransformationExtraArgs
    policy: Policy[Any]
    max_norm: float | None
    names: tuple[Hashable, ...]
    guard: Guard[Any] | None = None

    def init(self, params: object) -> LossScaledState:
        """Return the state before the first step."""
        refuse_stateful(params)
        if any(map(is_no_gradient, jax.tree.leaves(params, is_leaf=is_no_gradient))):
            raise UsageError(
                "params hold a flow_slot() or RecipeScales, which the optimizer would update. Write them as "
                "another argument of the loss, and value_and_grad(loss_fn, argnums=(0, 1))."
            )
        first, inner = start(self.policy, self.guard), self.inner.init(trees.widen(params))
        if states_in(inner):
            raise UsageError(
                "the optimizer inside already scales losses: gradients would be unscaled twice. "
                "Write loss_scaled around the whole optimizer, once."
            )
        inner = self._filled(inner, trees.widen(params))
        return LossScaledState(**first._asdict(), inner_state=inner, loss=jnp.zeros((), jnp.float32))

    def _filled(self, inner_state: object, params: object) -> object:
        """Return a state with zeros for what the first update adds, as of `optax.monitor`.

        Both branches of a step's conditional return a state of the same structure.
        """
        nodes = jax.tree.leaves(inner_state, is_leaf=_is_hollow)
        if not any(map(_is_hollow, nodes)):
            return inner_state
        offered = self._accepted({"grad": params, "value": jnp.zeros(())})
        try:
            after = jax.eval_shape(lambda: self.inner.update(params, inner_state, params, **offered)[1])
        except Exception:  # it asks for arguments that only a step has
            return inner_state
        before = dict(jax.tree_util.tree_leaves_with_path(inner_state))

        def entry(path: Any, like: Any) -> object:
            return before[path] if path in before else jnp.zeros(like.shape, like.dtype)

        return jax.tree_util.tree_map_with_path(entry, after)

    def update(
        self,
        gradients: object,
        state: PendingState,
        params: object = None,
        *,
        pending: PendingState | None = None,
        **extra: object,
    ) -> tuple[Any, LossScaledState]:
        """Return updates, in the dtypes of the gradients, and the state after the step.

        A trainer that keeps the state itself, as `nnx.Optimizer` does, is given what `value_and_grad`
        returned as `pending`.
        """
        backward, resting = self.backward(gradients, state if pending is None else pending, params)
        if pending is not None:
            resting = self.check_state(state)
        skipped = self._skipped_updates(gradients, resting, params, extra)
        return self._step(backward, resting, params, extra, lambda updates, _: updates, skipped)

    def backward(
        self, gradients: object, opt_state: object, params: object
    ) -> tuple[Backward, LossScaledState]:
        """Return what an update was given, checked, and the state before the step."""
        pending, _ = pending_in(opt_state)
        state = self.check_state(pending.state)
        check_gradients(gradients, params)
        loss = pending.loss / jnp.maximum(pending.passes, 1.0)  # 0 passes: `zero_grads` alone
        return Backward(gradients, jnp.ones((), jnp.float32), loss, pending=pending), state

    def _skipped_updates(
        self, gradients: object, state: LossScaledState, params: object, extra: dict[str, object]
    ) -> object:
        """Return the updates of a skipped step: negative zeros, which change no bit."""
        wide = trees.widen(gradients)
        structure: object = jax.tree.structure(wide)
        if params is None or structure == jax.tree.structure(params):
            return trees.map_inexact(_negative_zeros, wide)
        # Updates need not be a tree like the gradients: those of optax.lookahead have fast and slow parts.
        offered = self._accepted({"grad": wide, **extra})
        updates = jax.eval_shape(
            lambda: self.inner.update(wide, state.inner_state, trees.widen(params), **offered)[0]
        )
        return trees.map_inexact(_negative_zeros, updates)

    def apply(
        self, backward: Backward, state: LossScaledState, params: Params, extra: dict[str, object]
    ) -> tuple[Params, LossScaledState]:
        """Return the parameters and the state after the step.

        Args:
            backward: its gradients have the tree structure of `params`.
            state: the state before the step, checked.
            params: the parameters before the step.
            extra: arguments for the inner optimizer.
        """

        def applied(updates: object, params: object) -> object:
            return optax.apply_updates(params, jax.tree.map(_without_float0, updates))

        return self._step(backward, state, params, extra, applied, params)

    def _step(
        self,
        backward: Backward,
        state: LossScaledState,
        params: object,
        extra: dict[str, object],
        applied: Callable[[object, object], object],
        skipped: Result,
    ) -> tuple[Result, LossScaledState]:
        """Return what `applied` makes of updates and float32 parameters, or `skipped`, in one conditional."""
        if self.names:
            axes.check_bound(self.names)
        leaves, rebuild = trees.split(backward.gradients)
        measured, size = self._measured(leaves, backward, state)
        inverse = 1.0 / backward.divisor.astype(size.norm.dtype)
        judged, taken = None, measured.finite
        if self.guard is not None and state.guard is not None:
            judged = judge(self.guard, state.guard.state, measured, jnp.where)
            taken = judged.taken
        scaler_state, _ = advance(self.policy, state.scaler_state, measured, jnp.where, judged)

        def take() -> tuple[Any, object]:
            whole = backward.finish(leaves) if backward.finish else leaves
            plain = clipped = rebuild(multiply(whole, inverse))
            if self.max_norm is not None:
                first, second = size.clip(self.max_norm, inverse)
                clipped = rebuild(multiply(multiply(whole, first), second))
            # Line searches ask for the gradient of the loss, before clipping. If unused, the compiler
            # drops it.
            offered = {"grad": plain, "value": measured.loss, **extra}
            wide = trees.widen(params)
            updates, inner = self._inner_update(clipped, state.inner_state, wide, offered)
            return trees.cast_like(applied(updates, wide), skipped), inner

        def skip() -> tuple[Any, object]:
            return skipped, state.inner_state

        if isinstance(taken, jax.core.Tracer):
            result, inner = jax.lax.cond(taken, take, skip)
        else:
            result, inner = take() if taken else skip()  # known now: nothing is compiled
        if scaler_state.guard is not None:
            # Python numbers, such as the limit of a guard that always has the same, become arrays that vary
            # along the same axes as the others.
            record = jax.tree.map(
                lambda new, old: jnp.where(taken, new, new).astype(old.dtype), scaler_state.guard, state.guard
            )
            scaler_state = scaler_state._replace(guard=record)
        loss = cast(Array, measured.loss)
        return result, LossScaledState(**scaler_state._asdict(), inner_state=inner, loss=loss)

    def _measured(
        self, gradients: list[Array], backward: Backward, state: LossScaledState
    ) -> tuple[Measured[Array], Size]:
        """Return what all devices of the step measured, and the size of the gradients that are clipped."""
        pending, names, entries = backward.pending, self.names, gradients
        if pending is not None and not names:
            measured, size = measure_again(gradients, pending, backward.loss)
        else:
            if pending is not None:  # NaN as one more entry: devices with other parameters agree
                entries = [*gradients, jnp.where(pending.finite, 0.0, jnp.nan)]
            needs_amax = self.policy.needs_amax and pending is None
            measured, size = measure(entries, backward.divisor, backward.loss, names, needs_amax=needs_amax)
        norm, amax = size.norm.astype(jnp.float32), measured.amax
        if pending is not None:
            if names and pending.amax is not None:
                amax = axes.max_over(names, [pending.amax])
            # From before other code has clipped. Of a sum only its own norm is known, and where devices may
            # have averaged by hand.
            if not (names or axes.unchecked()):
                norm = jnp.where(pending.passes > 1, norm, pending.grad_norm)
        # The state's scalars are copies, since donated buffers must not alias.
        scale = state.policy_state.scale + 0.0
        return measured._replace(scale=scale, grad_norm=norm, amax=amax), size

    def _inner_update(
        self, gradients: object, inner_state: object, params: object, extra: dict[str, object]
    ) -> tuple[object, object]:
        """Return the inner optimizer's updates and its state, in the dtypes that the state had.

        Raises:
            UsageError: for a state that does not belong to these parameters.
        """
        like = params if params is not None else gradients
        try:
            updates, after = self.inner.update(gradients, inner_state, params, **self._accepted(extra))
            after = trees.cast_like(after, inner_state)
        except UsageError:
            raise
        except Exception as error:
            if isinstance(error, TypeError) and "required keyword-only" in str(error):
                raise UsageError(
                    f"the optimizer inside loss_scaled needs more arguments: {error}. Write "
                    "step(loss_fn, optimizer), which passes them, or apply_gradients(optimizer, gradients, "
                    "opt_state, params, value_fn=lambda params: loss_fn(params, ...))."
                ) from error
            _check_inner_state(error, self.inner.init, like, inner_state)
            raise
        if list(map(jnp.shape, jax.tree.leaves(after))) != list(map(jnp.shape, jax.tree.leaves(inner_state))):
            _check_inner_state(None, self.inner.init, like, inner_state)  # a leaf was broadcast
        return updates, after

    def _accepted(self, extra: dict[str, object]) -> dict[str, object]:
        """Return arguments without those that we offer to every optimizer but that this one does not take."""
        taken = inspect.signature(self.inner.update).parameters  # not by type: optax.MultiSteps takes any
        if inspect.Parameter.VAR_KEYWORD in [parameter.kind for parameter in taken.values()]:
            return extra
        dropped = extra if len(taken) <= len(("updates", "state", "params")) else OFFERED
        return {name: value for name, value in extra.items() if name not in dropped or name in taken}

    def check_state(self, state: object) -> LossScaledState:
        """Return a state after checking that optimizer, policy and dtypes are those of this object."""
        state = check(state)
        self._check_guard(state)
        if (state.amax is not None) != self.policy.needs_amax or type(state.policy_state) is not type(
            self.policy.start()
        ):
            raise UsageError(
                f"the loss scale in opt_state, {kind_of(state.policy_state)}, is not that of "
                f"{self.policy!r}: it was made by another policy. Write opt_state = "
                "restart_loss_scale(opt_state, policy), which keeps the optimizer's state and starts the "
                "policy's again; or restore with optimizer.init(params) as the template, if a file has lost "
                "the types."
            )
        return state

    def _check_guard(self, state: LossScaledState) -> None:
        """Raise for the state of another guard, and if only one of optimizer and state has a guard."""
        record, guard = state.guard, self.guard
        if record is None and guard is None:
            return
        if guard is None:
            raise UsageError(
                "opt_state has the state of a guard and the optimizer has none: spikes would not be skipped. "
                "Write loss_scaled(..., guard=guard) with the guard that it was made with, or opt_state = "
                "restart_guard(opt_state, None)."
            )
        if record is None:
            raise UsageError(
                f"opt_state has no state of {guard!r}: it was made without a guard. Write opt_state = "
                "restart_guard(opt_state, guard), which keeps everything else."
            )
        first = guard.start()
        if type(record.state) is not type(first) or _guard_shapes(record.state) != _guard_shapes(first):
            raise UsageError(
                f"the guard's state in opt_state, {kind_of(record.state)}, is not that of {guard!r}: it was "
                "made by another guard, or by the same guard with another window. Write opt_state = "
                "restart_guard(opt_state, guard), which keeps everything else; or restore with "
                "optimizer.init(params) as the template, if a file has lost the types."
            )


def _is_hollow(node: object) -> bool:
    return node is None or (isinstance(node, dict | list) and not node)


def _guard_shapes(state: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, np.shape(value)) for name, value in leaves_of(state)]  # of tuples and arrays


def _negative_zeros(like: Array) -> Array:
    zero = complex(-0.0, -0.0) if jnp.issubdtype(like.dtype, jnp.complexfloating) else -0.0
    return jnp.full(like.shape, zero, like.dtype)


def _without_float0(update: Array) -> Array | np.ndarray:
    """Return an update that can be added: integers have a derivative of a dtype without arithmetic."""
    return np.zeros(update.shape, bool) if update.dtype == jax.dtypes.float0 else update


def check_gradients(gradients: object, params: object) -> None:
    """Raise unless there is a gradient of the same shape for each parameter that has one.

    Args:
        gradients: a tree.
        params: a tree; None, where an optimizer is not given any, is not checked. In `LookaheadParams` the
            fast ones have gradients.

    Raises:
        UsageError: with the first leaf that is missing, None, of another shape, or too many.
    """
    if params is None:
        return
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    if _shapes(gradients) == _shapes(params):
        return
    have, need = _leaves(gradients), _leaves(params)
    for name, parameter in need.items():
        if not is_inexact(parameter):
            continue
        where = f"params{name} has shape {jnp.shape(parameter)}"
        if have.get(name) is None:
            what = f"the gradients{name} are None" if name in have else f"the gradients have no leaf {name}"
            raise UsageError(
                f"{what}, but {where}. Write gradients and parameters as the same tree: loss_fn(params, "
                "...) has to be differentiated with respect to all that is updated."
            )
        if jnp.shape(have[name]) != jnp.shape(parameter):
            raise UsageError(
                f"the gradients{name} have shape {jnp.shape(have[name])}, but {where}. Write gradients and "
                "parameters of the same shapes."
            )
    for name in have:
        if name not in need and have[name] is not None:
            raise UsageError(
                f"the gradients have a leaf {name}, and the parameters have none there. Write gradients and "
                "parameters as the same tree."
            )


def _check_inner_state(
    error: Exception | None, init: Callable[..., object], params: object, state: object
) -> None:
    """Explain what is wrong with an inner optimizer's state, if it does not belong to these parameters.

    Args:
        error: what the inner optimizer raised.
        init: the `init` of the inner optimizer.
        params: the parameters, in float32 where they were narrower.
        state: the state of the inner optimizer.

    Raises:
        UsageError: with the first leaf that is missing, or not as `init` makes it.
    """
    try:
        expected = _leaves(jax.eval_shape(init, params))
    except Exception:  # an optimizer that cannot say; the error that was raised stands
        return
    given = _leaves(state)
    for name in [*expected, *given]:
        ours, theirs = expected.get(name), given.get(name)
        if _what(ours) != _what(theirs):
            raise UsageError(
                f"opt_state.inner_state{name} is {_what(theirs)}, but for these parameters it must be "
                f"{_what(ours)}: the state belongs to other parameters or to another optimizer, or lost its "
                "types in a file. Write optimizer.init(params), or restore with it as the template."
            ) from error


def _leaves(tree: object) -> dict[str, Any]:
    """Return the leaves of a tree by their paths; None is one."""
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def _shapes(tree: object) -> tuple[Any, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(leaf) for leaf in leaves if hasattr(leaf, "shape")]


def _what(leaf: object) -> str:
    return "missing" if leaf is None else f"of shape {getattr(leaf, 'shape', ())}"
