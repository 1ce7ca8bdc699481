"""The end of a training step, as far as all adapters share it: everything around the policy.

```
measured = Measured(finite, scale, grad_norm, amax, loss)    # by the adapter, in its gradients
judged = judge(guard, state.guard.state, measured, where)     # if there is a guard: whether to take the step
state, gave_up = advance(policy, state, measured, where, judged)
if gave_up: raise policy.exhaustion_from(before)              # where the program can raise
last_step = to_step(state, loss=loss)
raise_if_exhausted(policy, state)                             # after a compiled program, which cannot
```

`advance` is pure: like a policy, it uses Python operators and an injected ``where(condition, yes, no)``.
PyTorch keeps the state as Python floats or as tensors, JAX as a pytree, Keras and tf_keras as variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar

from preamp.checks import shown
from preamp.errors import PolicyError
from preamp.guards import Guard, Verdict
from preamp.guards.base import map_state
from preamp.policy import Policy, Reading, Where, choose

__all__ = [
    "GuardRecord",
    "Measured",
    "ScalerState",
    "Spike",
    "Step",
    "advance",
    "advance_policy",
    "given_guard",
    "judge",
    "raise_if_exhausted",
    "spike_in",
    "spike_of",
    "start",
    "to_step",
    "with_rules",
]

Framework: TypeAlias = Literal["torch", "jax", "keras", "tensorflow"]
S = TypeVar("S", bound=Any)  # the policy's own state, a NamedTuple of T
T = TypeVar("T")  # a scalar: a Python number, or one of a framework
R = TypeVar("R", bound="Step | None")


class Spike(NamedTuple):
    """Why a guard skipped a step.

    Attributes:
        of: the value that was beyond its limit, "loss" or "grad_norm".
        value: the value.
        limit: the limit.
    """

    of: Literal["loss", "grad_norm"]
    value: float
    limit: float


class Step(NamedTuple):
    """One training step.

    Attributes:
        index: 0 for the first step.
        scale: the loss scale that was in this step's loss; 0 or inf where a policy has no floor or ceiling.
        finite: True when every gradient was finite.
        skipped: True when the update was not applied; with several optimizers, if any of them skipped.
        new_scale: the scale of the next step; None until the policy has advanced.
        loss: the loss, not scaled.
        grad_norm: global L2 norm of the unscaled gradients.
        amax: the largest finite magnitude among the scaled gradients.
        zeros: the share of gradient entries that are exactly zero, from 0 to 1.
        culprits: names of the parameters whose gradients were not finite, in backward order where it is
            known. Compiled steps of JAX, Keras and TensorFlow name none.
        seconds: wall time of the step.
        buffers: names of module buffers, such as BatchNorm's running statistics, that were not finite after
            a skipped step.
        spike: why a guard skipped it; None for other steps.
        restored: those of `buffers` that have been restored and are finite again.
        first_culprits: the one of `culprits` that backward reached first; of several ranks, that of each.
            Empty where the order is not known, as of compiled code.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    scale: float
    finite: bool
    skipped: bool
    new_scale: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    amax: float | None = None
    zeros: float | None = None
    culprits: tuple[str, ...] = ()
    seconds: float | None = None
    buffers: tuple[str, ...] = ()
    spike: Spike | None = None
    restored: tuple[str, ...] = ()
    first_culprits: tuple[str, ...] = ()

    @property
    def reason(self) -> Literal["overflow", "spike"] | None:
        """Why it was skipped: "overflow", "spike", or None if it was taken."""
        if not self.skipped:
            return None
        return "spike" if self.finite and self.spike is not None else "overflow"

    @property
    def framework(self) -> Framework | None:
        """The framework whose adapter made this step; None for one that was made by hand or read back."""
        return None

    @property
    def policy(self) -> Policy[Any] | None:
        """The policy of the scaler that made this step; None where the adapter does not know it."""
        return None

    @property
    def guard(self) -> Guard[Any] | None:
        """The guard of the scaler that made this step; None without one."""
        return None


class _AdapterStep(Step):
    """A step that knows its framework and rules, which are the same for a whole run and so are no fields.

    `policy` and `guard` are not pickled, because a class of the user's may not allow it.
    """

    policy: Policy[Any] | None = None
    guard: Guard[Any] | None = None

    def __repr__(self) -> str:
        return repr(Step._make(self))

    def __getstate__(self) -> None:
        return None

    def _replace(self, **fields: Any) -> Self:
        return with_rules(super()._replace(**fields), self.policy, self.guard)


class _TorchStep(_AdapterStep):
    framework = "torch"


class _JaxStep(_AdapterStep):
    framework = "jax"


class _KerasStep(_AdapterStep):
    framework = "keras"


class _TensorFlowStep(_AdapterStep):
    framework = "tensorflow"


STEPS: Final[Mapping[Framework | None, type[Step]]] = {
    None: Step,
    "torch": _TorchStep,
    "jax": _JaxStep,
    "keras": _KerasStep,
    "tensorflow": _TensorFlowStep,
}
"""The type of a step by the framework of the adapter that makes it. All are equal to plain steps."""


def with_rules(step: R, policy: Policy[Any] | None, guard: Guard[Any] | None) -> R:
    """Return a step of an adapter after noting the policy and the guard in it.

    Args:
        step: from `to_step` with a framework; None is returned as it is.
        policy: the scaler's, if it is known.
        guard: the scaler's, if it has one.
    """
    if isinstance(step, _AdapterStep):
        step.policy, step.guard = policy, guard
    return step


class Measured(NamedTuple, Generic[T]):
    """What an adapter measured in the gradients of one step. All ranks have agreed on it.

    Attributes:
        finite: True (or a boolean scalar) when every gradient is finite.
        scale: the loss scale that was in the loss.
        grad_norm: global L2 norm of the unscaled gradients; None where it was not measured. Undefined,
            possibly NaN, after an overflow.
        amax: the largest magnitude among the scaled gradients, as in `Reading`.
        loss: the mean over ranks of the loss, not scaled; None where no guard uses it.
    """

    finite: Any
    scale: T
    grad_norm: T | None = None
    amax: T | None = None
    loss: T | None = None


class GuardRecord(NamedTuple, Generic[T]):
    """What a scaler remembers for its guard, besides the policy's state.

    Attributes:
        state: the guard's state.
        taken: whether the last step was taken.
        loss: the last loss, the mean over ranks; NaN if it is not known.
        loss_fits: whether the loss was within its limit.
        limit: the limit of the loss or, if the loss was within it, that of the norm.
    """

    state: Any
    taken: Any
    loss: T
    loss_fits: Any
    limit: T


class ScalerState(NamedTuple, Generic[S, T]):
    """What a scaler remembers between steps: scalars, all of one framework.

    Attributes:
        policy_state: the policy's state; `policy_state.scale` is what the next loss is multiplied by.
        last_scale: the scale that was in the last loss.
        finite: whether the last gradients were finite.
        grad_norm: global L2 norm of the last unscaled gradients; None where no step measures it. NaN if it is
            not known, and undefined, possibly NaN, after an overflow.
        amax: the largest magnitude among the last scaled gradients; None where the policy does not need it.
            Undefined, possibly NaN, after an overflow.
        exhausted_scale: the scale at which the policy gave up first, 0 if it has not.
        exhausted_overflows: the overflows that were counted by then; 0 if it has not given up.
        steps: steps taken or skipped.
        skipped_steps: steps skipped.
        guard: what belongs to the guard; None without one.
    """

    policy_state: S
    last_scale: T
    finite: Any
    grad_norm: T | None
    amax: T | None
    exhausted_scale: T
    exhausted_overflows: T
    steps: Any
    skipped_steps: Any
    guard: GuardRecord[T] | None = None


def start(
    policy: Policy[S], *, takes_norm: bool = False, guard: Guard[Any] | None = None
) -> ScalerState[S, float]:
    """Return the state before the first step, in Python numbers.

    Args:
        policy: the rule.
        takes_norm: whether each step measures the norm of its gradients.
        guard: the rule that skips spikes, if there is one.
    """
    state = policy.start()
    amax = 0.0 if policy.needs_amax else None
    norm = 0.0 if takes_norm else None
    record = None if guard is None else GuardRecord(guard.start(), True, math.nan, True, math.inf)
    return ScalerState(state, state.scale, True, norm, amax, 0.0, 0.0, 0, 0, record)


def judge(
    guard: Guard[Any], guard_state: Any, measured: Measured[Any], where: Where = choose
) -> GuardRecord[Any]:
    """Return whether a step is taken, and what the guard remembers of it.

    A step is taken if its gradients are finite and the guard does not object.

    Args:
        guard: the rule.
        guard_state: its state before the step.
        measured: what was measured in the step.
        where: the framework's ``where(condition, yes, no)``.
    """
    finite = measured.finite
    loss = measured.loss if "loss" in guard.uses else None
    norm = measured.grad_norm if "grad_norm" in guard.uses and finite is not False else None
    reading = Reading(finite, loss=loss, grad_norm=norm)
    verdict, after = guard.decide(guard_state, reading, where)
    if guard.remembers_overflows and norm is not None and finite is not True:
        # After an overflow the norm is undefined.
        without = guard.advance(guard_state, Reading(finite, loss=loss), where)
        after = map_state(lambda new, old: where(finite, new, old), after, without)
    if isinstance(finite, bool) and isinstance(verdict.taken, bool):
        taken: Any = finite and verdict.taken
    else:
        taken = where(finite, verdict.taken, False)
    limits = [verdict.grad_norm_limit, verdict.loss_limit]
    norm_limit, loss_limit = [math.inf if limit is None else limit for limit in limits]
    fits = verdict.loss_fits
    limit = norm_limit if fits is True else where(fits, norm_limit, loss_limit)
    return GuardRecord(after, taken, math.nan if measured.loss is None else measured.loss, fits, limit)


def advance(
    policy: Policy[S],
    state: ScalerState[S, Any],
    measured: Measured[Any],
    where: Where = choose,
    judged: GuardRecord[Any] | None = None,
) -> tuple[ScalerState[S, Any], Any]:
    """Return the state after a step, and whether the policy gave up on this step.

    A policy that gives up keeps its state. A compiled program cannot raise, so it continues at the same scale
    and skips every step that overflows; `raise_if_exhausted` raises afterwards. A step that the guard skips
    does not reach the policy: the scale does not back off, and no clean step is counted.

    Args:
        policy: the rule.
        state: before the step.
        measured: what was measured in its gradients.
        where: the framework's ``where(condition, yes, no)``.
        judged: what `judge` returned for this step, if there is a guard.
    """
    before = state.policy_state
    taken = measured.finite if judged is None else judged.taken
    after, gave_up = advance_policy(
        policy, before, Reading(measured.finite, measured.amax), where, None if judged is None else taken
    )
    exhausted_scale, exhausted_overflows = state.exhausted_scale, state.exhausted_overflows
    if policy.gives_up:
        # Only the first time is kept: that is where training should have ended.
        gave_up_before = exhausted_overflows > 0.0
        scale, overflows = where(gave_up, before.scale, 0.0), where(gave_up, before.bad + 1.0, 0.0)
        exhausted_scale = where(gave_up_before, exhausted_scale, scale)
        exhausted_overflows = where(gave_up_before, exhausted_overflows, overflows)
    after_step = ScalerState(
        policy_state=after,
        last_scale=measured.scale,
        finite=measured.finite,
        grad_norm=measured.grad_norm,
        amax=measured.amax,
        exhausted_scale=exhausted_scale,
        exhausted_overflows=exhausted_overflows,
        steps=state.steps + 1,
        skipped_steps=state.skipped_steps + where(taken, 0, 1),
        guard=judged,
    )
    return after_step, gave_up


def advance_policy(
    policy: Policy[S], before: S, reading: Reading, where: Where = choose, taken: Any = None
) -> tuple[S, Any]:
    """Return the policy's state after a step, and whether the policy gave up on it: then its state stays.

    Args:
        policy: the rule.
        before: its state before the step.
        reading: what was measured.
        where: the framework's ``where(condition, yes, no)``.
        taken: whether a guard lets the step be taken; None without a guard.
    """
    after, gave_up = policy.advance(before, reading, where), False
    if policy.gives_up:
        gave_up = policy.exhausted(before, reading, where)
        after = _unless(gave_up, before, after, where)
    if taken is not None:
        after = _unless(where(reading.finite, where(taken, False, True), False), before, after, where)
    return after, gave_up


def _unless(condition: Any, before: S, after: S, where: Where) -> S:
    state: S = type(before)(*[where(condition, old, new) for old, new in zip(before, after, strict=True)])
    return state


def given_guard(guard: Any, *, may_be_idle: bool = False) -> Guard[Any] | None:
    """Return the guard that an adapter was given, or None.

    Args:
        guard: what was given.
        may_be_idle: whether to accept a guard that can never skip a step.

    Raises:
        PolicyError: for what is not a guard, for one that can never skip a step, and for a class whose
            methods do not return what they have to.
    """
    if guard is None:
        return None
    if not isinstance(guard, Guard):
        raise PolicyError(
            f"guard={shown(guard)} is not a guard. Write guard=SpikeGuard() with from preamp.guards import "
            "SpikeGuard, or guard=guards.OLMO."
        )
    if guard.idle is not None and not may_be_idle:
        raise PolicyError(f"{guard!r} can never skip a step: {guard.idle}")
    _check_rule(guard)
    return guard


def _check_rule(guard: Guard[Any]) -> None:
    """Have a guard judge one step in Python numbers, and raise for what would fail or be lost in training."""
    name, uses = type(guard).__name__, guard.uses
    if not uses or not set(uses) <= {"loss", "grad_norm"}:
        raise PolicyError(
            f"{name}.uses is {shown(uses)}: a guard uses the loss, the grad_norm or both. "
            'Write uses: ClassVar = frozenset(["loss"]).'
        )
    state = guard.start()
    verdict, after = guard.decide(state, Reading(True, **dict.fromkeys(uses, 1.0)))
    if not isinstance(verdict, Verdict):
        raise PolicyError(
            f"{name}.judge returned {shown(verdict)}, which is not a Verdict. "
            'Write Verdict(True).also("loss", reading.loss <= limit, limit).'
        )
    for of in sorted(uses):
        if getattr(verdict, f"{of}_limit") is None:
            raise PolicyError(
                f"{name}.judge names no limit of the {of}, which it uses. "
                f'Write Verdict(True).also("{of}", reading.{of} <= limit, limit).'
            )
    if _structure(after) != _structure(state):
        raise PolicyError(
            f"{name}.advance returned {shown(after)}, which is not a state like that of start, "
            f"{shown(state)}. Write return {type(state).__name__}(...)."
        )


def _structure(state: object) -> object:
    """Return the types of a state's parts, and the lengths of its vectors."""
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state), *map(_structure, state)
    return ("vector", len(state)) if isinstance(state, tuple) else isinstance(state, float | int)


def raise_if_exhausted(policy: Policy[Any], state: ScalerState[Any, float]) -> None:
    """Raise what a compiled step could not: the policy has given up.

    Args:
        policy: the rule.
        state: in Python numbers.

    Raises:
        ScaleExhausted: naming the scale at which it gave up first, and how many overflows were counted then.
    """
    if policy.gives_up and state.exhausted_overflows:
        raise policy.exhaustion(state.exhausted_scale, int(state.exhausted_overflows))


def to_step(
    state: ScalerState[Any, float],
    *,
    loss: float | None = None,
    framework: Framework | None = None,
    **found: Any,
) -> Step | None:
    """Return the record of the last step; None before the first.

    Args:
        state: after the step, in Python numbers.
        loss: as in `Step`.
        framework: as in `Step`.
        found: further fields of `Step`, such as `buffers`.
    """
    if not state.steps:
        return None
    finite = bool(state.finite)
    spike = spike_of(state)
    norm_is_known = finite and state.grad_norm is not None and not math.isnan(state.grad_norm)
    return STEPS[framework](
        index=int(state.steps) - 1,
        scale=state.last_scale,
        finite=finite,
        skipped=not finite or spike is not None,
        new_scale=state.policy_state.scale,
        loss=loss,
        grad_norm=state.grad_norm if norm_is_known else None,
        amax=state.amax if finite else None,
        spike=spike,
        **found,
    )


def spike_of(state: ScalerState[Any, float]) -> Spike | None:
    """Return why the guard skipped the last step; None if it did not."""
    if state.guard is None or not state.finite:
        return None
    return spike_in(state.guard, state.grad_norm)


def spike_in(record: GuardRecord[float], grad_norm: float | None) -> Spike | None:
    """Return why a guard skipped a step whose gradients were finite; None if it did not.

    Args:
        record: of the step, in Python numbers.
        grad_norm: of the step.
    """
    if record.taken:
        return None
    norm = math.nan if grad_norm is None else float(grad_norm)
    if record.loss_fits:
        return Spike("grad_norm", norm, float(record.limit))
    return Spike("loss", float(record.loss), float(record.limit))
