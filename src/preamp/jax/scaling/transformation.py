"""Loss scaling as an optax transformation: what is not finite is skipped, and the record is in the state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from preamp.checks import is_number, shown
from preamp.errors import PolicyError, UsageError
from preamp.jax import axes
from preamp.jax.scaling import gradients
from preamp.jax.scaling.flow_slots import is_flow_slot
from preamp.jax.scaling.loss_scale import LossScale, read, start_of
from preamp.jax.scaling.matching import check_gradients, check_inner_state
from preamp.jax.scaling.modules import refuse_stateful
from preamp.jax.scaling.optax_callers import optax_caller
from preamp.jax.scaling.readings import reading_of
from preamp.jax.scaling.scaled_gradients import ScaledGradients, as_loss, single
from preamp.jax.scaling.states import (
    UNKNOWN_LOSS,
    LossScaledState,
    check_dtypes,
    check_scalars,
    find,
    found_in,
    kind_of,
)
from preamp.policy import Dynamic, Policy, Reading
from preamp.scaling import Step
from preamp.systems.arguments import check_counts, given_policy

OFFERED = ("value", "value_fn", "grad")  # what line searches ask for


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy[Any] | None = None,
    max_norm: float | None = None,
    axis_name: Hashable = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of `ScaledGradients`: it unscales, checks, clips, and skips what is not finite.

    On a skip the inner state keeps every bit and the updates are zeros, negative ones: added to a parameter
    they leave every bit as well. The inner transformation is given gradients and parameters in float32 where
    they are shorter; float64 and complex stay.

    The loss to differentiate is scaled by `policy_state.scale`: `step` and `scaled_value_and_grad` do that.
    `update` takes what `scaled_value_and_grad` returns, and unscales it with the scale that it carries. Plain
    gradients are refused, because nothing tells whether they are scaled: `ScaledGradients(gradients, scale)`
    says so. A trainer that takes gradients apart (`nnx.Optimizer`) passes the scale beside them:
    ``update(scaled.gradients, state, params, loss_scale=scaled.scale)``.

    `loss_scaled` has to be the outermost transformation: all else belongs inside, as in
    ``loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))``. In a chain, what stands
    before `loss_scaled` would be given scaled gradients, and what stands after it would run on skipped steps.
    `step`, `apply_gradients`, `scaled_value_and_grad` and `last_step` refuse the state of such a chain.

    Args:
        inner: any optax transformation or optimizer.
        policy: any policy or dialect of preamp. None: `Dynamic()`.
        max_norm: clip the unscaled gradients to this global L2 norm, as `optax.clip_by_global_norm` does.
            None and inf do not clip.
        axis_name: the mapped axis, or a tuple of them, along which devices hold other gradients: shards
            of parameters. They then skip together, and the norm is that of all. Where gradients have been
            averaged over devices, and under `jit` with sharded arrays, nothing is to be given.

    Raises:
        PolicyError: for a policy or norm that cannot work.
        UsageError: for an `inner` that is not a transformation, or scales losses already.

    >>> import jax.numpy as jnp, optax
    >>> from preamp import Dynamic
    >>> optimizer = loss_scaled(optax.sgd(0.5), Dynamic(init_scale=4.0), max_norm=1.0)
    >>> params = jnp.zeros(2)
    >>> state = optimizer.init(params)
    >>> scaled = ScaledGradients(4.0 * jnp.array([3.0, 4.0]), 4.0)  # of a loss that was multiplied by 4
    >>> optimizer.update(scaled, state, params)[0].tolist()
    [-0.30000001192092896, -0.4000000059604645]
    >>> updates, state = optimizer.update(scaled.map(lambda g: g / 0.0), state, params)
    >>> float(state.policy_state.scale), int(state.skipped_steps)
    (2.0, 1)
    """
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise UsageError(
            f"{inner!r} is not a transformation: it has no init and update. Write "
            "loss_scaled(optax.adam(1e-3))."
        )
    scaling = Scaling(
        optax.with_extra_args_support(inner),
        given_policy(Dynamic() if policy is None else policy, {}),
        _norm(max_norm),
        axes.names_of(axis_name),
    )
    return optax.GradientTransformationExtraArgs(scaling.init, scaling.update)


def _norm(max_norm: Any) -> float | None:
    """Return a limit as a float; None for one that is never reached.

    Raises:
        PolicyError: for what is not a number above 0 that is known before the step is compiled.
    """
    if max_norm is None:
        return None
    if isinstance(max_norm, jax.core.Tracer):
        raise PolicyError(
            "max_norm is a value that JAX is tracing, and it has to be known before. Write max_norm=1.0, or "
            "put optax.clip_by_global_norm(max_norm) into the inner optimizer."
        )
    limit = max_norm
    if isinstance(max_norm, np.ndarray | np.generic | jax.Array) and max_norm.shape == ():
        limit = max_norm.item()
    if limit == float("inf"):
        return None
    if not (is_number(limit) and limit > 0.0):
        raise PolicyError(f"max_norm={shown(max_norm)} is not a number above 0. Write max_norm=1.0, or None.")
    return float(limit)


@dataclass(frozen=True)
class Scaling:
    """What `loss_scaled` is made of. Its arguments are those, checked."""

    inner: optax.GradientTransformationExtraArgs
    policy: Policy[Any]
    max_norm: float | None
    names: tuple[Hashable, ...]

    def init(self, params: Any) -> LossScaledState:
        """Return the state before the first step."""
        refuse_stateful(params)
        if any(map(is_flow_slot, jax.tree.leaves(params, is_leaf=is_flow_slot))):
            raise UsageError(
                "params hold a flow_slot(), which the optimizer would update. Write the slots as another "
                "argument of the loss, and scaled_value_and_grad(loss_fn, argnums=(0, 1))."
            )
        start, inner = start_of(self.policy), self.inner.init(gradients.wide(params))
        if found_in(inner):
            raise UsageError(
                "the optimizer inside scales losses already: gradients would be unscaled twice. "
                "Write loss_scaled around the whole optimizer, once."
            )
        return LossScaledState(
            policy_state=start,
            inner_state=inner,
            last_scale=_copy(start.scale),
            finite=jnp.ones((), bool),
            grad_norm=jnp.zeros((), jnp.float32),
            exhausted=jnp.zeros((), jnp.float32),
            steps=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
            loss=jnp.full((), UNKNOWN_LOSS, jnp.float32),
            peak=self.first_peak(),
        )

    def first_peak(self) -> Any:
        """Return the peak before the first step; None where the policy does not ask for it."""
        return jnp.zeros((), jnp.float32) if "peak" in self.policy.needs else None

    def update(
        self, scaled: Any, state: LossScaledState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        """Return updates, in the dtypes of the unscaled gradients, and the state after the step."""
        self._check_state(state)
        scaled, extra = declared(scaled, extra)
        if caller := optax_caller():
            raise UsageError(
                f"the update of loss_scaled was called by {caller}: what is around loss_scaled is given "
                "gradients that are still scaled, or runs on skipped steps too. Write loss_scaled around the "
                "whole optimizer, such as loss_scaled(optax.chain(...)) or loss_scaled(optax.lookahead(...))."
            )
        check_gradients(scaled.gradients, params)

        return self._step(
            scaled, state, params, extra, lambda updates: updates, self._zeros(scaled, state, params, extra)
        )

    def _zeros(self, scaled: ScaledGradients, state: LossScaledState, params: Any, extra: Any) -> Any:
        """Return the updates of a skipped step: negative zeros, which change no bit."""
        wide = gradients.wide(scaled.gradients)
        like: Any = jax.tree.structure(wide)
        if params is None or like == jax.tree.structure(params):
            return gradients.each(lambda leaf: jnp.full_like(leaf, -0.0), wide)
        # Updates need not be a tree like the gradients: those of optax.lookahead have fast and slow parts.
        updates = jax.eval_shape(
            lambda: self.inner.update(
                wide, state.inner_state, gradients.wide(params), **self._accepted({"grad": wide, **extra})
            )[0]
        )
        return gradients.each(lambda leaf: jnp.full(leaf.shape, -0.0, leaf.dtype), updates)

    def apply(
        self,
        scaled: ScaledGradients,
        state: LossScaledState,
        params: Any,
        extra: dict[str, Any],
        complete: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, LossScaledState]:
        """Return the parameters and the state after the step.

        Args:
            scaled: gradients, or the same entries in another order or a shorter dtype.
            state: before the step.
            params: likewise.
            extra: for the inner optimizer.
            complete: makes the gradients of `scaled`; called where the step is not skipped.
        """
        self._check_state(state)
        if complete is None:
            check_gradients(scaled.gradients, params)
        whole = gradients.wide(params)

        def applied(updates: Any) -> Any:
            return optax.apply_updates(whole, jax.tree.map(_without_float0, updates))

        return self._step(scaled, state, params, extra, applied, params, complete)

    def _step(
        self,
        scaled: ScaledGradients,
        state: LossScaledState,
        params: Any,
        extra: dict[str, Any],
        finish: Callable[[Any], Any],
        before: Any,
        complete: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, LossScaledState]:
        """Return `finish` of the inner updates, or `before` on a skip: all of it in one conditional."""
        axes.check_bound(self.names)
        scale = scaled.scale
        seen = gradients.look(scaled.gradients, scale, self.names)
        reading = reading_of(self.policy, scaled.gradients, seen.finite, self.names)

        def take() -> tuple[Any, Any]:
            whole = complete(scaled.gradients) if complete else scaled.gradients
            unscaled = gradients.multiplied(whole, seen.inverse * self._clip(seen.norm))
            # Line searches ask for the gradient of the loss, before clipping. Compiled, it costs nothing
            # else.
            plain = unscaled if self.max_norm is None else gradients.multiplied(whole, seen.inverse)
            others = {"grad": plain, **extra}
            updates, inner = self._inner_update(unscaled, state.inner_state, gradients.wide(params), others)
            return gradients.like(finish(updates), before), inner

        result, inner = _either(seen.finite, take, lambda: (before, state.inner_state))
        loss = scaled.loss if extra.get("value") is None else extra["value"]
        return result, self._after(state, inner, scale, seen.norm, reading, loss)

    def _inner_update(
        self, unscaled: Any, inner_state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the inner optimizer's updates and its state, in the dtypes that the state had.

        Raises:
            UsageError: for a state that is not one of these parameters.
        """
        like = params if params is not None else unscaled
        try:
            updates, after = self.inner.update(unscaled, inner_state, params, **self._accepted(extra))
            after = gradients.like(after, inner_state)
        except UsageError:
            raise
        except Exception as error:
            if isinstance(error, TypeError) and "required keyword-only" in str(error):
                raise UsageError(
                    f"the optimizer inside loss_scaled asks for more arguments: {error}. Write "
                    "step(loss_fn, optimizer), which gives them, or apply_gradients(optimizer, scaled, "
                    "opt_state, params, value=value, value_fn=lambda params: loss_fn(params, ...))."
                ) from error
            check_inner_state(error, self.inner.init, like, inner_state)
            raise
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (after, inner_state)]
        if shapes[0] != shapes[1]:  # a leaf of another shape was broadcast
            check_inner_state(None, self.inner.init, like, inner_state)
        return updates, after

    def _accepted(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return arguments without those that we offer to every optimizer and this one does not take."""
        taken = inspect.signature(self.inner.update).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            return extra
        return {name: value for name, value in extra.items() if name not in OFFERED or name in taken}

    def _check_state(self, state: Any) -> None:
        """Raise for a state of another optimizer, of another policy, or of other dtypes."""
        find(state)
        check_scalars(state)
        check_dtypes(state)
        if (state.peak is None) != (self.first_peak() is None) or type(state.policy_state) is not type(
            self.policy.start()
        ):
            raise UsageError(
                f"the loss scale in opt_state, {kind_of(state.policy_state)}, is not that of "
                f"{self.policy!r}: it was made by another policy. Write opt_state = "
                "restart_loss_scale(opt_state, policy), which keeps the optimizer's state and starts the "
                "policy's again; or restore with optimizer.init(params) as the template, if a file has lost "
                "the types."
            )

    def _clip(self, norm: Any) -> Any:
        return 1.0 if self.max_norm is None else self.max_norm / jnp.maximum(norm, self.max_norm)

    def _after(
        self, state: LossScaledState, inner: Any, scale: Any, norm: Any, reading: Reading, loss: Any
    ) -> LossScaledState:
        after = LossScale(self.policy, state.policy_state, state.exhausted).advance(reading)
        return LossScaledState(
            policy_state=after.state,
            inner_state=inner,
            last_scale=_copy(scale),
            finite=reading.finite,
            grad_norm=jnp.where(reading.finite, norm, jnp.inf).astype(jnp.float32),
            exhausted=after.exhausted,
            steps=state.steps + 1,
            skipped_steps=state.skipped_steps + jnp.where(reading.finite, 0, 1).astype(jnp.int32),
            loss=_recorded(as_loss(loss, "value"), reading.finite),
            peak=None if reading.peak is None else _copy(reading.peak),
        )


def restart_loss_scale(opt_state: LossScaledState, policy: Policy[Any]) -> LossScaledState:
    """Return the state to resume a training from with another policy.

    The inner optimizer's state, its moments and counts, and the counts of steps stay. The loss scale starts
    as the policy starts it.

    Args:
        opt_state: of an optimizer made with `loss_scaled` and any policy.
        policy: that of the `loss_scaled` which goes on.

    Raises:
        PolicyError: for what is not a policy.
        UsageError: for another state.

    >>> import jax.numpy as jnp, optax
    >>> from preamp import Dynamic, Headroom
    >>> state = loss_scaled(optax.adam(1e-3), Dynamic(init_scale=2.0**20)).init(jnp.zeros(2))
    >>> policy = Headroom(init_scale=2.0**10)
    >>> state = restart_loss_scale(state, policy)
    >>> optimizer = loss_scaled(optax.adam(1e-3), policy)
    >>> float(state.policy_state.scale)
    1024.0
    """
    if isinstance(opt_state, LossScale):
        raise UsageError(
            "restart_loss_scale was given a LossScale. Write LossScale(policy), which starts the policy "
            "again."
        )
    state = find(opt_state)
    start = Scaling(optax.with_extra_args_support(optax.identity()), given_policy(policy, {}), None, ()).init(
        ()
    )
    return state._replace(policy_state=start.policy_state, exhausted=start.exhausted, peak=start.peak)


def last_step(opt_state: Any) -> Step | None:
    """Return what the last step came to, read to the host; None before the first.

    The loss is in it where it is known: `step` knows it, the gradients of `scaled_value_and_grad` carry it,
    and for others, such as those that `map` returns, `update(..., value=loss)` tells it.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled`, after the step.

    Raises:
        UsageError: for another state, and inside a function that JAX transforms.
        PolicyError: for a loss scale that is not a finite number above 0, with which every step is skipped.
    """
    if isinstance(opt_state, LossScale):
        raise UsageError(
            "last_step was given a LossScale, which has no record of steps. Write loss_scale.loss_scale for "
            "the scale, and loss_scale.check_exhausted() after restoring one."
        )
    state = find(opt_state)
    record = (
        state.steps,
        state.last_scale,
        state.finite,
        state.grad_norm,
        state.loss,
        state.policy_state.scale,
    )
    peaks = [] if state.peak is None else [state.peak]
    steps, scale, finite, norm, loss, new_scale, *measured = read([*record, *peaks])
    Dynamic().restore({"scale": new_scale})  # raises for what no policy can resume from
    if not steps:
        return None
    return Step(
        index=int(steps) - 1,
        scale=scale,
        finite=bool(finite),
        skipped=not finite,
        new_scale=new_scale,
        loss=None if loss == UNKNOWN_LOSS else loss,
        grad_norm=norm if finite else None,
        peak=measured[0] if measured and finite else None,
    )


def check_exhausted(opt_state: Any, policy: Policy[Any]) -> None:
    """Raise what a compiled step could not: the policy has given up, or cannot resume from the state.

    A restored state is an array like any other, which no compiled step can check. Call this once after
    restoring a checkpoint.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled`.
        policy: that `loss_scaled` was given.

    Raises:
        ScaleExhausted: if the policy has given up.
        PolicyError: for a scale that is not a finite number above 0, and for a count below 0.
        UsageError: for another state, one that was cast to another dtype, and inside a function that JAX
            transforms.
        UserWarning: a warning, for a scale outside the policy's bounds. Nothing else says so: `last_step`
            does not know the policy.
    """
    if isinstance(opt_state, LossScale):
        raise UsageError(
            "check_exhausted was given a LossScale, which has its policy with it. Write "
            "loss_scale.check_exhausted()."
        )
    state = find(opt_state)
    check_dtypes(state)
    if type(state.policy_state) is not type(given_policy(policy, {}).start()):
        raise UsageError(
            f"the loss scale in opt_state, {kind_of(state.policy_state)}, is not that of {policy!r}. Write "
            "check_exhausted(opt_state, policy) with the policy that loss_scaled was given, or opt_state = "
            "restart_loss_scale(opt_state, policy) to resume with this one."
        )
    counts = {name: getattr(state, name) for name in ("steps", "skipped_steps")}
    check_counts(dict(zip(counts, read(list(counts.values())), strict=True)), counts)
    LossScale(policy, state.policy_state, state.exhausted).check_exhausted()


def _either(finite: Any, take: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Choose in the compiled program, or here and now where the answer is known: nothing is compiled then."""
    if isinstance(finite, jax.core.Tracer):
        return jax.lax.cond(finite, take, skip)
    return take() if finite else skip()


def declared(scaled: Any, extra: dict[str, Any]) -> tuple[ScaledGradients, dict[str, Any]]:
    """Return gradients with their scale, and what else there is for the inner optimizer.

    Raises:
        UsageError: for gradients without a scale: nothing tells whether they are scaled; for two scales; for
            a `value` that is not a real scalar.
    """
    others = {name: _plain(value) for name, value in extra.items() if name != "loss_scale"}
    as_loss(extra.get("value"), "value")  # before anything is computed with it
    if isinstance(scaled, ScaledGradients):
        if extra.get("loss_scale") is not None:
            raise UsageError(
                "loss_scale= was given beside ScaledGradients, which carry their scale. Write update(scaled, "
                "state, params), or update(scaled.gradients, state, params, loss_scale=scale) to replace it."
            )
        return single(scaled), others
    if extra.get("loss_scale") is not None:
        return ScaledGradients(scaled, extra["loss_scale"]), others
    raise UsageError(
        f"the gradients given to loss_scaled, {kind_of(scaled)}, do not say what they are scaled by: those "
        "of jax.grad are not scaled at all, and would be divided by the loss scale. Write value, scaled = "
        "scaled_value_and_grad(loss_fn)(opt_state, params, ...) and update(scaled, opt_state, params), or "
        "step(loss_fn, optimizer) for all of it. Of a loss that was scaled by hand: "
        "ScaledGradients(gradients, scale). For flax.nnx.Optimizer: "
        "optimizer.update(model, scaled.gradients, loss_scale=scaled.scale)."
    )


def _plain(value: Any) -> Any:
    """Return an argument of the inner optimizer: it is not to be given scaled gradients, as `grad`."""
    return value.unscale() if isinstance(value, ScaledGradients) else value


def _recorded(loss: Any, finite: Any) -> Any:
    """Return a loss as the state keeps it: averaged over devices that take the same step."""
    apart = tuple(axes.varying(loss) - axes.varying(finite))
    return jax.lax.pmean(loss, apart) if apart else _copy(loss)


def _without_float0(update: Any) -> Any:
    """Return an update that can be added: integers have a derivative of a dtype without arithmetic."""
    return np.zeros(update.shape, bool) if update.dtype == jax.dtypes.float0 else update


def _copy(scalar: Any) -> Any:
    """Return a scalar in memory of its own: what is given away with `donate_argnums` must be there once."""
    return scalar + 0.0
