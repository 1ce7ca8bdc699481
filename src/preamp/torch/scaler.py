"""`torch.amp.GradScaler` on a preamp policy.

This room owns PyTorch's idiom: one object between the loss and the optimizer. Its arithmetic, its checks
and their messages are PyTorch's own; what decides the next scale is the policy. It refuses to know any rule.

The policy advances on the host, on Python floats. PyTorch's two state tensors are kept as mirrors, for
the kernels and for code that reads them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from preamp.checks import to_float32
from preamp.dialects import Dialect
from preamp.errors import InexactScale, PolicyError
from preamp.policy import Dynamic, Policy, Reading
from preamp.trace import Step

__all__ = ["GradScaler"]


def _setting(name: str) -> Any:
    """Return a property that shows a setting of the policy; a policy without it shows the usual value."""
    return property(
        lambda scaler: getattr(scaler.policy, name, getattr(Dynamic, name)),
        lambda scaler, value: scaler._set(name, value),
    )


class GradScaler(torch.amp.GradScaler):
    """Scale the loss, unscale the gradients, skip the steps that overflowed, move the scale.

    A drop-in for `torch.amp.GradScaler`: same arguments, methods, call order, `state_dict` and errors.
    The default rule is PyTorch's, with a floor and a ceiling, and it grows even where its interval was
    lowered below the steps already counted; `policy=dialects.TORCH` has no bounds.

    Args:
        device: the device type the scaler works on, such as "cuda" or "cpu".
        init_scale: the scale of the first step.
        growth_factor: what a growth multiplies the scale by.
        backoff_factor: what an overflow multiplies the scale by.
        growth_interval: clean steps in a row before the scale grows.
        enabled: False makes every method a no-op and `step` a plain `optimizer.step`.
        policy: any preamp policy or dialect, instead of the four settings above.
        on_step: called with a `Step` at the end of every `update` that ends a step. A `Trace` is such
            a callable.

    Attributes:
        policy: the rule in force.
        last_step: the latest `Step`: available after `step`, complete after `update`. None before.

    Raises:
        AssertionError: as PyTorch, for a growth factor <= 1 or a backoff factor >= 1.
        PolicyError: for settings that PyTorch accepts and that cannot work.
        InexactScale: a warning, for a scale or factor that is not a power of two.
        Starved: from `update`, if the policy was told to give up at its floor.

    >>> import torch
    >>> from preamp.torch import GradScaler
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler = GradScaler("cpu", init_scale=8.0)
    >>> scaler.scale(2 * weight.sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.item(), scaler.last_step.skipped, scaler.get_scale()
    (0.0, False, 8.0)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy[Any] | None = None,
        on_step: Callable[[Step], object] | None = None,
    ) -> None:
        if on_step is not None and not callable(on_step):
            raise PolicyError(
                f"on_step={on_step!r} cannot be called. Write on_step=Trace(), or any function."
            )
        settings = (init_scale, growth_factor, backoff_factor, growth_interval)
        self.policy = _policy(policy, dict(zip(_SETTINGS, settings, strict=True))) if enabled else Dynamic()
        self._state = self.policy.start()
        self._owns_rule = policy is None
        self._steps_seen = 0
        self.on_step = on_step
        self.last_step: Step | None = None
        super().__init__(device, **{name: getattr(self, f"_{name}") for name in _SETTINGS}, enabled=enabled)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done yet, and step the optimizer unless a gradient is not finite.

        Returns:
            What `optimizer.step` returns, None when it was skipped. `last_step.skipped` tells them apart.

        Raises:
            PolicyError: if other code wrote a scale of 0, inf or NaN. No parameter was changed.
            AssertionError: as PyTorch, when there is nothing to check.
            RuntimeError: as PyTorch, for a second call before `update`, and for `closure=`.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        self._adopt()
        result = super().step(optimizer, *args, **kwargs)
        finite = _all_finite(self._per_optimizer_states[id(optimizer)])
        self.last_step = Step(self._steps_seen, self._state.scale, finite, skipped=not finite)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Advance the policy by what the optimizers of this iteration saw, or set a scale by hand.

        Args:
            new_scale: the scale to go on with, as a float or a one-element tensor.

        Raises:
            AssertionError: as PyTorch, when no optimizer was unscaled or stepped.
            PolicyError: for a scale that would turn gradients into 0, inf or NaN.
            Starved: if the policy was told to give up at its floor. The scaler can be used further.
        """
        if not self._enabled:
            return
        checked = [state for state in self._per_optimizer_states.values() if state["found_inf_per_device"]]
        if new_scale is not None:
            by_hand = self._by_hand(new_scale)
            self._advance(all(map(_all_finite, checked)), bool(checked), lambda state, _: by_hand)
            return
        self._check_scale_growth_tracker("update")
        if not checked:
            raise AssertionError("No inf checks were recorded prior to update.")
        self._adopt()
        self._advance(all(map(_all_finite, checked)), True, self.policy.step)

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's five entries and, where there is more to remember, one of ours."""
        state = super().state_dict()
        more = {name: value for name, value in self._state._asdict().items() if name not in ("scale", "good")}
        if state and (self.on_step is not None or not self._five_entries_suffice()):
            state["preamp_state"] = {**more, "steps": self._steps_seen}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this scaler or of `torch.amp.GradScaler`.

        As in PyTorch, the checkpoint's growth and backoff settings replace those of the constructor;
        a `policy` that was given stays as it is.

        Raises:
            RuntimeError: for the empty state of a disabled scaler.
            KeyError: for a missing entry.
            PolicyError: for a scale or setting that cannot work. The scaler is left as it was.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        numbers = {"scale": state_dict["scale"]}
        settings = {name: state_dict[name] for name in _SETTINGS[1:]}
        numbers |= {"good": state_dict["_growth_tracker"], **state_dict.get("preamp_state", {})}
        state = self.policy.restore(numbers)
        if self._owns_rule:
            self.policy = _changed(self.policy, **settings)
        self._state, self._steps_seen = state, int(numbers.get("steps", 0))
        self._mirror()

    def _by_hand(self, new_scale: float | torch.Tensor) -> Any:
        """Return the state with a new scale, after PyTorch's own checks of it."""
        if isinstance(new_scale, torch.Tensor):
            scalar = new_scale.reshape(()) if new_scale.numel() == 1 else new_scale
        else:
            scalar = torch.tensor(float(new_scale), device=self._device)
        scale = scalar.detach().item() if scalar.ndim == 0 else self._init_scale
        self.policy.restore({"scale": scale})  # refuses what would ruin gradients
        recorded = dict(self._per_optimizer_states)
        super().update(scalar)  # refuses what is not a scalar of this device, and forgets the iteration
        self._per_optimizer_states.update(recorded)
        return self._state._replace(scale=to_float32(scale))

    def _five_entries_suffice(self) -> bool:
        policy = self.policy
        return (
            isinstance(policy, Dynamic)
            and policy.hysteresis == 1
            and policy.max_consecutive_overflows is None
        )

    def _advance(self, finite: bool, is_step: bool, move: Callable[[Any, Reading], Any]) -> None:
        before = after = self._state
        try:
            after = self._state = move(before, Reading(finite))
        finally:  # a policy that gives up leaves a record too
            self._mirror()
            self._per_optimizer_states.clear()
            if is_step:
                self._record(Step(self._steps_seen, before.scale, finite, not finite, after.scale))

    def _record(self, step: Step) -> None:
        self.last_step = step
        self._steps_seen += 1
        if self.on_step is not None:
            self.on_step(step)

    def _adopt(self) -> None:
        """Take over what other code wrote into PyTorch's tensors: that scale was in the loss."""
        if self._scale is not None and self._growth_tracker is not None:
            scale, good = self._scale.item(), self._growth_tracker.item()
            if (scale, good) != (self._init_scale, self._init_growth_tracker):
                self.policy.restore({"scale": scale, "good": good})  # refuses what would ruin gradients
                self._state = self._state._replace(scale=scale, good=float(good))

    def _mirror(self) -> None:
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(self._init_scale)
            self._growth_tracker.fill_(self._init_growth_tracker)

    # PyTorch's own fields, as views of the policy and its state: the base class works on these.

    @property
    def _init_scale(self) -> float:
        return float(self._state.scale)

    @_init_scale.setter
    def _init_scale(self, scale: float) -> None:
        self._state = self._state._replace(scale=float(scale))

    @property
    def _init_growth_tracker(self) -> int:
        return int(self._state.good)

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, good: int) -> None:
        self._state = self._state._replace(good=float(good))

    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")

    def _set(self, name: str, value: Any) -> None:
        if value == getattr(self, f"_{name}"):
            return
        if not hasattr(self.policy, name):
            raise PolicyError(f"{name}={value!r} cannot be set: {self.policy!r} has no {name}.")
        self.policy = _changed(self.policy, **{name: value})


_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def _policy(policy: Policy[Any] | None, settings: dict[str, Any]) -> Policy[Any]:
    """Return the policy to use, for the arguments of a constructor."""
    if policy is None:
        if settings["growth_factor"] <= 1.0:
            raise AssertionError("The growth factor must be > 1.0.")
        if settings["backoff_factor"] >= 1.0:
            raise AssertionError("The backoff factor must be < 1.0.")
        return _torch_rule_with_bounds(settings)
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"policy={policy!r} is not a policy. Write policy=Dynamic() or policy=dialects.TORCH."
        )
    for name, value in settings.items():
        if value != getattr(Dynamic, name):
            raise PolicyError(
                f"policy={policy!r} and {name}={value!r} are both given. Write {name} in the policy."
            )
    return policy.policy if isinstance(policy, Dialect) else policy


def _torch_rule_with_bounds(settings: dict[str, Any]) -> Dynamic:
    """Return PyTorch's rule between our default bounds, widened to hold the first scale."""
    ours = Dynamic(**settings, bounds="moves", factor_dtype="float64")
    low, high = ours.min_scale or 0.0, ours.max_scale or math.inf
    bounds = {"min_scale": min(low, ours.init_scale), "max_scale": max(high, ours.init_scale)}
    return _changed(ours, bounds="strict", **bounds)  # type: ignore[no-any-return]


def _changed(policy: Any, **settings: Any) -> Any:
    """Return the policy with other settings, without another warning of factors that round."""
    if settings.get("backoff_factor", policy.backoff_factor) != policy.backoff_factor:
        settings["backoff_divisor"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactScale)
        return replace(policy, **settings)


def _all_finite(ledger: dict[str, Any]) -> bool:
    return not any(flag.item() for flag in ledger["found_inf_per_device"].values())
