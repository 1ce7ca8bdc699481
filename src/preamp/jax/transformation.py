"""Loss scaling as an optax transformation: what is not finite is skipped, and the record is in the state.

This room runs the inner optimizer or does not, and moves the policy. It refuses to know losses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from preamp.checks import positive
from preamp.errors import UsageError
from preamp.jax import axes, gradients
from preamp.jax.loss_scale import LossScale, read, start_of
from preamp.jax.readings import reading_of
from preamp.loss_scale_arguments import given_policy
from preamp.policy import Dynamic, Policy, Reading
from preamp.trace import Step

__all__ = ["LossScaledState", "Scaling", "check_starved", "find", "found_in", "last_step", "loss_scaled"]


class LossScaledState(NamedTuple):
    """What `loss_scaled` remembers: arrays only, scalars but for the inner state.

    Attributes:
        policy_state: the policy's state, float32; `policy_state.scale` is what the next loss is scaled by.
        inner_state: the inner transformation's.
        scale: float32; the scale that was in the last loss.
        finite: boolean; whether the last gradients were.
        grad_norm: float32; the global L2 norm of the last unscaled gradients before clipping, inf if not
            finite.
        starved: float32; at how many overflows the policy gave up, 0 if it has not.
        steps: int32; steps taken or skipped.
        skipped_steps: int32; steps skipped.
        peak: float32; the largest magnitude among the last scaled gradients, if finite. None, which is no
            leaf, where the policy does not ask for it.
    """

    policy_state: Any
    inner_state: Any
    scale: Any
    finite: Any
    grad_norm: Any
    starved: Any
    steps: Any
    skipped_steps: Any
    peak: Any = None


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy[Any] | None = None,
    max_norm: float | None = None,
    axis_name: Hashable = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of scaled gradients: it unscales, checks, clips, and skips what is not finite.

    On a skip the inner state keeps every bit and the updates are zeros, negative ones: added to a parameter
    they leave every bit as well. The inner transformation is shown gradients and parameters in float32 where
    they are shorter; float64 and complex stay.

    The loss to differentiate is scaled by what `policy_state.scale` holds: `step` and
    `scaled_value_and_grad` see to that. All else belongs inside, as in ``loss_scaled(MultiSteps(inner, k))``:
    in a chain, what stands before `loss_scaled` would see scaled gradients, and what stands after it would
    run on skipped steps too.

    Args:
        inner: any optax transformation or optimizer.
        policy: any policy or dialect of preamp. None: `Dynamic()`.
        max_norm: clip the unscaled gradients to this global L2 norm, as `optax.clip_by_global_norm` does.
        axis_name: the mapped axis, or a tuple of them, along which devices hold other gradients: shards
            of parameters. They then skip together, and the norm is that of all. Where gradients have been
            averaged over devices, and under `jit` with sharded arrays, nothing is to be given.

    Raises:
        PolicyError: for a policy or norm that cannot work.
        UsageError: for an `inner` that is no transformation, or scales losses already.

    >>> import jax.numpy as jnp, optax
    >>> from preamp import Dynamic
    >>> optimizer = loss_scaled(optax.sgd(0.5), Dynamic(init_scale=4.0), max_norm=1.0)
    >>> params = jnp.zeros(2)
    >>> state = optimizer.init(params)
    >>> optimizer.update(4.0 * jnp.array([3.0, 4.0]), state, params)[0].tolist()
    [-0.30000001192092896, -0.4000000059604645]
    >>> updates, state = optimizer.update(jnp.array([jnp.inf, 0.0]), state, params)
    >>> float(state.policy_state.scale), int(state.skipped_steps)
    (2.0, 1)
    """
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise UsageError(
            f"{inner!r} is no transformation: it has no init and update. Write loss_scaled(optax.adam(1e-3))."
        )
    if max_norm is not None:
        positive("max_norm", max_norm, "max_norm=1.0, or None")
    scaling = Scaling(
        optax.with_extra_args_support(inner),
        given_policy(Dynamic() if policy is None else policy, {}),
        None if max_norm is None else float(max_norm),
        axes.names_of(axis_name),
    )
    return optax.GradientTransformationExtraArgs(scaling.init, scaling.update)


@dataclass(frozen=True)
class Scaling:
    """What `loss_scaled` is made of. Its arguments are those, checked."""

    inner: optax.GradientTransformationExtraArgs
    policy: Policy[Any]
    max_norm: float | None
    names: tuple[Hashable, ...]

    def init(self, params: Any) -> LossScaledState:
        """Return the state before the first step."""
        start, inner = start_of(self.policy), self.inner.init(gradients.wide(params))
        if found_in(inner):
            raise UsageError(
                "the optimizer inside scales losses already: gradients would be unscaled twice. "
                "Write loss_scaled around the whole optimizer, once."
            )
        return LossScaledState(
            policy_state=start,
            inner_state=inner,
            scale=_copy(start.scale),
            finite=jnp.ones((), bool),
            grad_norm=jnp.zeros((), jnp.float32),
            starved=jnp.zeros((), jnp.float32),
            steps=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
            peak=jnp.zeros((), jnp.float32) if "peak" in self.policy.sees else None,
        )

    def update(
        self, scaled: Any, state: LossScaledState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        """Return updates, in the dtypes of the unscaled gradients, and the state after the step."""
        nothing = gradients.each(lambda leaf: jnp.full_like(leaf, -0.0), gradients.wide(scaled))
        return self._step(scaled, state, params, extra, lambda updates: updates, nothing)

    def apply(
        self,
        scaled: Any,
        state: LossScaledState,
        params: Any,
        extra: dict[str, Any],
        complete: Callable[[Any], Any] = lambda scaled: scaled,
    ) -> tuple[Any, LossScaledState]:
        """Return the parameters and the state after the step.

        Args:
            scaled: gradients, or the same entries in another order or a shorter dtype.
            state: before the step.
            params: likewise.
            extra: for the inner optimizer.
            complete: makes the gradients of `scaled`; called where the step is not skipped.
        """
        whole = gradients.wide(params)
        return self._step(
            scaled, state, params, extra, lambda u: optax.apply_updates(whole, u), params, complete
        )

    def _step(
        self,
        scaled: Any,
        state: LossScaledState,
        params: Any,
        extra: dict[str, Any],
        finish: Callable[[Any], Any],
        before: Any,
        complete: Callable[[Any], Any] = lambda scaled: scaled,
    ) -> tuple[Any, LossScaledState]:
        """Return `finish` of the inner updates, or `before` on a skip: all of it in one conditional."""
        if not isinstance(state, LossScaledState):
            raise UsageError(
                f"the state is a {type(state).__name__}, not one of loss_scaled. Write optimizer.init(params)"
                " to make it, and give each step what the last one returned."
            )
        seen = gradients.look(scaled, state.policy_state.scale, self.names)
        reading = reading_of(self.policy, scaled, seen.finite, self.names)

        def take() -> tuple[Any, Any]:
            unscaled = gradients.multiplied(complete(scaled), seen.inverse * self._clip(seen.norm))
            updates, inner = self.inner.update(unscaled, state.inner_state, gradients.wide(params), **extra)
            return gradients.like(finish(updates), before), gradients.like(inner, state.inner_state)

        result, inner = _either(seen.finite, take, lambda: (before, state.inner_state))
        return result, self._after(state, inner, seen.norm, reading)

    def _clip(self, norm: Any) -> Any:
        return 1.0 if self.max_norm is None else self.max_norm / jnp.maximum(norm, self.max_norm)

    def _after(self, state: LossScaledState, inner: Any, norm: Any, reading: Reading) -> LossScaledState:
        after = LossScale(self.policy, state.policy_state, state.starved).advance(reading)
        return LossScaledState(
            policy_state=after.state,
            inner_state=inner,
            scale=_copy(state.policy_state.scale),
            finite=reading.finite,
            grad_norm=jnp.where(reading.finite, norm, jnp.inf).astype(jnp.float32),
            starved=after.starved,
            steps=state.steps + 1,
            skipped_steps=state.skipped_steps + jnp.where(reading.finite, 0, 1).astype(jnp.int32),
            peak=None if reading.peak is None else _copy(reading.peak),
        )


def find(state: Any) -> LossScaledState:
    """Return the state of `loss_scaled` in that of an optimizer made with it.

    Raises:
        UsageError: if there is none, more than one, or one inside `MultiSteps`, which cannot work.
    """
    found = found_in(state)
    sums = jax.tree.leaves(
        state, is_leaf=lambda node: isinstance(node, optax.MultiStepsState | LossScaledState)
    )
    for node in sums:
        if isinstance(node, optax.MultiStepsState) and found_in(node):
            raise UsageError(
                "loss_scaled is inside MultiSteps, whose sum stays NaN for ever after one overflow. "
                "Write loss_scaled(optax.MultiSteps(inner, k)): it is shown finite gradients only."
            )
    if len(found) != 1:
        raise UsageError(
            f"the optimizer's state holds {len(found) or 'no'} loss scale{'s' * (len(found) > 1)}, "
            "and one loss needs one. Write loss_scaled(optimizer) around the whole optimizer."
        )
    return found[0]


def found_in(tree: Any) -> list[LossScaledState]:
    """Return the states of `loss_scaled` in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LossScaledState))
    return [node for node in nodes if isinstance(node, LossScaledState)]


def last_step(opt_state: Any) -> Step | None:
    """Return what the last step came to, read to the host; None before the first.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled`, after the step.

    Raises:
        UsageError: for another state, and inside a function that JAX transforms.
    """
    state = find(opt_state)
    record = state.steps, state.scale, state.finite, state.grad_norm, state.policy_state.scale
    peaks = [] if state.peak is None else [state.peak]
    steps, scale, finite, norm, new_scale, *measured = read([*record, *peaks])
    if not steps:
        return None
    return Step(
        index=int(steps) - 1,
        scale=scale,
        finite=bool(finite),
        skipped=not finite,
        new_scale=new_scale,
        grad_norm=norm if finite else None,
        peak=measured[0] if measured and finite else None,
    )


def check_starved(opt_state: Any, policy: Policy[Any]) -> None:
    """Raise what a compiled step could not, if the policy has given up.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled`.
        policy: that `loss_scaled` was given.

    Raises:
        Starved: if the policy has given up.
        UsageError: for another state, and inside a function that JAX transforms.
    """
    state = find(opt_state)
    LossScale(policy, state.policy_state, state.starved).check_starved()


def _either(finite: Any, take: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Choose in the compiled program, or here and now where the answer is known: nothing is compiled then."""
    if isinstance(finite, jax.core.Tracer):
        return jax.lax.cond(finite, take, skip)
    return take() if finite else skip()


def _copy(scalar: Any) -> Any:
    """Return a scalar in memory of its own: what is given away with `donate_argnums` must be there once."""
    return scalar + 0.0
