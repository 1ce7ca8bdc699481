"""A policy inside a real DeepSpeed engine.

DeepSpeed 0.19.8 moves the scale before it divides the gradients by it: with ZeRO every step on which the
scale grows is half as long as it should be. Without ZeRO it divides by a scale that it never multiplied the
loss with, and does not count hysteresis. Here a step ends before the scale moves, and the loss is scaled in
all stages.

This module defines the order of a step; `access` reads and writes DeepSpeed's scale and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from preamp.checks import callable_or_none
from preamp.deepspeed.attaching.access import (
    TESTED,
    DeepSpeedEngine,
    EngineAccess,
    Stage0,
    access_to,
    device_of_ranks,
    require,
)
from preamp.deepspeed.attaching.method_patches import MethodPatches
from preamp.deepspeed.attaching.scaler_attributes import ScalerAttributes
from preamp.deepspeed.attributes import GUARD
from preamp.deepspeed.overflow_log import OverflowLog, not_finite
from preamp.errors import PolicyError, ScaleExhausted, UsageError
from preamp.guards import Guard
from preamp.guards.base import dump_state
from preamp.guards.skips import SkipsInARow
from preamp.policy import Policy, Static
from preamp.scaling import (
    Measured,
    ScalerState,
    Step,
    advance,
    given_guard,
    judge,
    spike_of,
    start,
    to_step,
    with_rules,
)
from preamp.systems import deepspeed_config as config
from preamp.systems.arguments import given_policy, warn_if_out_of_bounds
from preamp.torch.scaling.scaled import ScaledLosses, UnreadLoss, loss_of, mean_over_ranks

Original: TypeAlias = Callable[..., Any]  # the method of DeepSpeed that was replaced


def attach(
    engine: object,
    policy: Policy[Any] | None = None,
    *,
    on_step: Callable[[Step], object] | None = None,
    guard: Guard[Any] | None = None,
) -> Attached:
    """Put a policy into a DeepSpeed engine that trains in float16, at any ZeRO stage.

    The training loop does not change: `engine(...)`, `engine.backward(loss)`, `engine.step()`. Gradients are
    divided by the scale that was in their loss, hysteresis counts in every stage, and a skipped step is one
    record of the logger "preamp.deepspeed". Every rank has to attach, at the same step.

    Checkpoints are DeepSpeed's, and DeepSpeed without preamp can load them. The scale, the hysteresis used
    and the position in the window are saved and loaded with them. `load_checkpoint` may come before or after;
    at stage 0 it comes after, because DeepSpeed does not load the hysteresis there.

    Args:
        engine: the first of what `deepspeed.initialize` returns. One that has trained keeps its scale.
        policy: the rule. None: what the engine's configuration says under "fp16", at every stage with
            hysteresis and an error at the floor. For one that needs the amax, each clean step takes one more
            all-reduce of a number.
        on_step: called with a `Step` after every update; a `Trace` is such a callable. The step's `loss` is
            this rank's: the sum over the micro-steps of what `engine.backward` or `engine.scale` was given,
            divided by `gradient_accumulation_steps` as DeepSpeed divides the gradients.
        guard: any guard of `preamp.guards`, to skip steps whose loss or gradient norm is a spike, also of an
            engine that trains in bfloat16 with ZeRO 1 to 3. It decides by the norm that DeepSpeed computes
            for clipping, after Muon if that is used, and by the mean of the `loss` above over all ranks,
            which costs one all-reduce of two numbers per step. A spike is skipped as DeepSpeed skips an
            overflow, but the scale and the hysteresis stay. The guard's state is saved and loaded with the
            scale; a checkpoint without it starts the guard again.

    Returns:
        A handle with the latest step and `detach()`.

    Raises:
        UsageError: for an engine that a policy, or the guard, cannot be attached to. It is unchanged.
        PolicyError: for something that is not a policy or a guard, and for an `on_step` that cannot be
            called.
        ConfigError: for a section "fp16" that DeepSpeed accepts and that cannot work.
    """
    callable_or_none("on_step", on_step, "on_step=Trace(), or any function")
    access = access_to(engine, guarded=given_guard(guard) is not None)
    if guard is not None:
        access.require_guardable("grad_norm" in guard.uses)
    rule = _configured(access.engine) if policy is None else given_policy(policy, {})
    if not (access.engine.fp16_enabled() or (isinstance(rule, Static) and rule.scale == 1.0)):
        raise UsageError(
            f"this engine trains in bfloat16, which needs no loss scale, so policy={rule!r} cannot be "
            f"attached. Write attach(engine, guard={guard!r})."
        )
    if access.saved().get("cur_iter"):
        warn_if_out_of_bounds(
            rule, access.scale, "cur_scale={bound!r} into the engine's loss scaler", of="engine"
        )
    if rule.needs_amax and access.hides_gradients():
        raise UsageError(
            f"{rule!r} needs the amax of the gradients, and these are offloaded to a disk. "
            'Write "offload_optimizer": {"device": "cpu"}, or policy=Dynamic(), which needs none.'
        )
    return Attached(access, rule, on_step, guard)


class _Decision(NamedTuple):
    """The policy's decision during DeepSpeed's own step, to be written after it.

    Attributes:
        state: after the step, without the norm, which DeepSpeed takes later.
        attributes: of DeepSpeed's loss scaler after the step; None if the policy gave up and nothing moves.
        culprits: names of the parameters whose gradients were not finite or, after a spike, were largest.
    """

    state: ScalerState[Any, float]
    attributes: dict[str, Any] | None
    culprits: tuple[str, ...]


class Attached:
    """A policy that is attached to an engine. Made by `attach`.

    Attributes:
        policy: the rule in force.
        guard: the rule that skips spikes; None without one.
        last_step: the record of the latest update. None before the first.
        on_step: called with every `Step`.
        overflow_log: called with every `Step`, too.
    """

    def __init__(
        self,
        access: EngineAccess,
        policy: Policy[Any],
        on_step: Callable[[Step], object] | None,
        guard: Guard[Any] | None = None,
    ) -> None:
        self.policy: Policy[Any] = policy
        self.guard: Guard[Any] | None = guard
        self.on_step: Callable[[Step], object] | None = on_step
        self.last_step: Step | None = None
        self.overflow_log: OverflowLog = OverflowLog()
        self._access, self._attributes, self._patches = access, ScalerAttributes(policy), MethodPatches()
        self._decision: _Decision | None = None
        self._norm: float | None = None
        self._amax: float | None = None
        self._guard_state: Any = None  # before the step
        self._skips = None if guard is None else SkipsInARow(guard)
        self._until_stepped = ExitStack()  # what is undone after DeepSpeed's step
        self._seed_is_known = False
        self._losses = ScaledLosses()
        self._patch_methods()
        if not access.saved().get("cur_iter"):
            access.save(self._attributes.first())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r}, last_step={self.last_step!r})"

    def detach(self) -> None:
        """Return the engine to DeepSpeed's own rule, at the present scale.

        Raises:
            UsageError: if a method of the engine or its optimizer has been replaced since.
        """
        self._patches.remove()

    def _patch_methods(self) -> None:
        access, place = self._access, self._patches.place
        place(access.optimizer, "step", self._step)
        place(access.optimizer, "_update_scale", self._decide)
        place(access.optimizer, "unscale_and_clip_grads", self._note_norm)
        place(access.optimizer, "override_loss_scale", self._refuse_override)
        place(access.engine, "backward", self._backward)
        if self.guard is not None and access.norm_from is not None:
            place(access.optimizer, access.norm_from, self._note_norm_early)
        if isinstance(access, Stage0):
            place(access.optimizer, "state_dict", access.state_dict)
            place(access.optimizer, "load_state_dict", access.load_state_dict)
        else:
            place(access.engine, "scale", self._scale)
            place(access.optimizer, "needs_scaler", self._needs_scaler)

    def _backward(self, original: Original, loss: object, *rest: Any, **named: Any) -> Any:
        """Record the loss; scale its gradient, which DeepSpeed does not do without ZeRO.

        DeepSpeed gets a view of the loss: it divides the tensor that the model returned by the accumulation
        steps, unless the gradient of another tensor came first, as with ZeRO.
        """
        seed = self._seed(*rest, **named)
        with self._scaled_gradient(loss, seed) as scaled:
            result = original(scaled, *rest, **named)
        if isinstance(loss, Tensor):
            self._note_loss(loss, seed)
        return result

    @contextmanager
    def _scaled_gradient(self, loss: object, seed: float) -> Iterator[object]:
        """Yield a view of the loss whose gradient is scaled, at stage 0; at other stages the loss itself."""
        if not (isinstance(self._access, Stage0) and isinstance(loss, Tensor) and loss.grad_fn):
            yield loss
            return
        scale, view = self._access.scale, loss.view_as(loss)

        def scaled(gradient: Tensor) -> Tensor:
            self._check_seed(gradient, seed)
            return gradient * scale

        hook = view.register_hook(scaled)  # type: ignore[no-untyped-call]
        try:
            yield view
        finally:
            hook.remove()

    def _scale(self, original: Original, loss: Tensor) -> Any:
        """Record the loss of `engine.scale(loss).backward()`, which DeepSpeed allows with ZeRO."""
        scaled = original(loss)
        self._note_loss(loss, self._seed())
        return scaled

    def _note_loss(self, loss: Tensor, seed: float) -> None:
        """Keep a loss, unread, for the record of the step."""
        number = loss.detach()
        self._losses.add(number if seed == 1.0 else number.float() * seed)

    def _needs_scaler(self, original: Original) -> bool:
        """Let DeepSpeed refuse `loss.backward()` with a static scale, as it does with a dynamic one."""
        return bool(original() or self._access.scale != 1.0)

    def _seed(self, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: object) -> float:
        """Return the gradient of the loss where nothing is scaled."""
        return 1.0 / self._access.engine.gradient_accumulation_steps() if scale_wrt_gas else 1.0

    def _check_seed(self, gradient: Tensor, seed: float) -> None:
        """Check once that this release of DeepSpeed does not scale the loss itself."""
        if not self._seed_is_known and not math.isclose(gradient.item(), seed, rel_tol=1e-2):
            raise UsageError(
                f"the gradient of the loss is {gradient.item():g} where {seed:g} was expected: this release "
                "of DeepSpeed scales the loss itself. "
                f"Write pip install deepspeed=={TESTED}, or do not call attach."
            )
        self._seed_is_known = True

    def _step(self, original: Original, *arguments: object, **named: object) -> Any:
        """Let DeepSpeed step with the scale that was in the loss; then move the scale."""
        scale, index = self._access.scale, self._access.engine.global_steps
        if not 0.0 < scale < math.inf:
            self.policy.restore({"scale": scale})  # refuses it, and says why
        self._decision = self._norm = None
        if self.guard is not None:
            self._guard_state = self._saved_guard_state(self.guard)
            if "loss" in self.guard.uses:
                loss_of(self._losses, "engine.backward(loss)", self.guard, may_lack=False)  # or this raises
        self._amax = self._measure() if self._access.measures_first else None
        with ExitStack() as self._until_stepped:
            result = original(*arguments, **named)
        decision = self._decision
        if decision is None:
            raise UsageError(
                "DeepSpeed has stepped without calling _update_scale, so attach cannot tell what it divided "
                f"by. Write pip install deepspeed=={TESTED}."
            )
        self._publish(decision)
        self._record(index, scale, decision)
        if decision.attributes is None:
            raise self._exhaustion(decision)
        return result

    def _decide(self, original: Original, overflow: bool | Tensor = False) -> None:
        """Apply the policy instead of DeepSpeed's rule. The scale does not change until the step is done."""
        if self.guard is None or overflow or self._access.norm_from is not None:
            self._decision = self._decided(not overflow)
        # Otherwise the norm is not known yet: `_note_norm` decides.

    def _decided(self, finite: bool) -> _Decision:
        """Return the decision about a step; have DeepSpeed skip it if it is a spike."""
        saved, guard = self._access.saved(), self.guard
        self._losses.read()  # the CPU has just waited for the gradients; later it would for the update
        before = start(self.policy, guard=guard)._replace(policy_state=self._attributes.read(saved))
        loss = norm = judged = None
        if guard is not None:
            norm = self._norm
            finite = finite and (norm is None or math.isfinite(norm))  # in bfloat16 DeepSpeed does not check
            loss = self._mean_loss(guard) if "loss" in guard.uses else None
        amax = None
        if finite:
            amax = self._measure() if self._amax is None else self._amax
        measured = Measured(finite, self._access.scale, norm, amax, loss)
        if guard is not None:
            judged = judge(guard, self._guard_state, measured)
        after, gave_up = advance(self.policy, before, measured, judged=judged)
        spike = spike_of(after._replace(grad_norm=norm))
        if spike is not None:  # the policy's state is as before
            attributes = saved
        else:
            attributes = self._attributes.written(saved, after.policy_state, finite)
        if after.guard is not None:
            attributes[GUARD] = dump_state(after.guard.state)
            if not after.guard.taken:
                self._access.optimizer.overflow = True  # DeepSpeed reads it next, and skips the step
        culprits = () if finite else self._access.culprits()
        if spike is not None:
            culprits = self._access.largest()
        return _Decision(after, None if gave_up else attributes, culprits)

    def _saved_guard_state(self, guard: Guard[Any]) -> Any:
        """Return the guard's state in the attributes of DeepSpeed's loss scaler."""
        saved = self._access.saved().get(GUARD)
        try:
            return guard.start() if saved is None else guard.restore(saved)
        except PolicyError as error:
            holder = "loss_scale_config" if isinstance(self._access, Stage0) else "loss_scaler"
            error.add_note(f"To start the guard again, write del engine.optimizer.{holder}.{GUARD}.")
            raise

    def _mean_loss(self, guard: Guard[Any]) -> float:
        """Return the mean loss over all ranks."""
        loss = loss_of(self._losses, "engine.backward(loss)", guard, may_lack=False)
        return float(mean_over_ranks(loss, device_of_ranks()))

    def _measure(self) -> float | None:
        """Return the amax of the scaled gradients of all ranks, for a policy that uses it."""
        return self._access.amax() if self.policy.needs_amax else None

    def _note_norm_early(self, original: Original, *arguments: object, **named: object) -> Any:
        """Record the norm of the scaled gradients for the guard."""
        norm = original(*arguments, **named)
        self._norm = self._access.norm_of(norm) / self._access.scale
        return norm

    def _note_norm(self, original: Original, *arguments: Any, **named: object) -> Any:
        """Record the norm of the scaled gradients, read here, before the update is launched."""
        if self._norm is None and len(arguments) > self._access.norm_at:
            norm = arguments[self._access.norm_at]
            self._norm = None if norm is None else float(norm) / self._access.scale
        if self._decision is None and self.guard is not None and isinstance(self._access, Stage0):
            self._decision = self._decided(finite=True)
            if self._decision.state.guard is not None and not self._decision.state.guard.taken:
                self._until_stepped.callback(self._access.hold())
        return original(*arguments, **named)

    def _publish(self, decision: _Decision) -> None:
        if decision.attributes is not None:
            self._access.save(decision.attributes)
        is_spike = spike_of(decision.state) is not None  # DeepSpeed writes inf, as after an overflow
        if (isinstance(self._access, Stage0) or is_spike) and self._norm is not None:
            self._access.optimizer._global_grad_norm = self._norm  # unfused: DeepSpeed leaves it scaled

    def _record(self, index: int, scale: float, decision: _Decision) -> None:
        loss = self._losses.take()
        number = loss.read() if isinstance(loss, UnreadLoss) else loss
        state = decision.state._replace(last_scale=scale, grad_norm=self._norm, steps=index + 1)
        step = to_step(state, loss=number, culprits=decision.culprits, framework="torch")
        assert step is not None  # index + 1 steps were taken
        self.last_step = with_rules(step, self.policy, self.guard)
        self.overflow_log(step, self._attributes.overflows_left(state.policy_state))
        if self._skips is not None and state.guard is not None:
            self._skips.note(bool(state.guard.taken), bool(state.finite), "deepspeed", "torch")
        if self.on_step is not None:
            self.on_step(step)

    def _exhaustion(self, decision: _Decision) -> ScaleExhausted:
        """Return the error for a policy that gave up, with the parameters concerned."""
        state = decision.state
        error = self.policy.exhaustion(state.exhausted_scale, int(state.exhausted_overflows))
        message = f"{str(error).removesuffix('.')}{not_finite(decision.culprits)}."
        return ScaleExhausted(message, scale=error.scale, overflows=error.overflows)

    def _refuse_override(self, original: Original, loss_scale: float) -> None:
        raise UsageError(
            f"override_loss_scale({loss_scale!r}) would override the policy. "
            f"Write attach(engine, policy=Static({loss_scale!r})) instead, after detach()."
        )


def _configured(engine: DeepSpeedEngine) -> Policy[Any]:
    """Return the rule of the engine's configuration."""
    if not engine.fp16_enabled():
        return Static(1.0)
    require(engine._config, ("float16_config",))
    policy = config.load({"fp16": engine._config.float16_config.model_dump()}).policy
    assert policy is not None  # fp16 is enabled, or the engine was refused
    return policy
