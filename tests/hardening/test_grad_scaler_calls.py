"""`GradScaler` called in any order: what is legal does what the policy says, what is not changes nothing.

Beside it stand a policy on plain floats and, for each optimizer, a twin that is given true gradients and only
those that are finite.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from preamp import Dynamic, PolicyError, PreampError, Reading, ScaleExhausted, Tolerant
from preamp.torch import GradScaler

from .calling import Calling, drive, drive_long

INF, NAN = math.inf, math.nan
POLICIES = [
    None,
    Dynamic(init_scale=2.0**10, growth_interval=2),
    Dynamic(init_scale=2.0, growth_interval=3, min_scale=0.25, hysteresis=2, hysteresis_reset="growth"),
    Dynamic(init_scale=2.0**30, growth_interval=1, max_scale=2.0**100, min_scale=2.0**27, at_floor="raise"),
    Dynamic(init_scale=1.0, min_scale=0.5, at_floor="raise", growth_interval=2),
    Tolerant(init_scale=2.0**12, tolerance=0.3, growth_interval=2),
]
SEEN_ON_DEVICE = [policy for policy in POLICIES if policy is None or not policy.gives_up]
KINDS: list[Any] = [
    lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.Adam(p, lr=0.01),
]
factors = st.sampled_from([1.0, 0.5, -2.0, 3.0, 1e-6, 0.0, 1.0, INF, -INF, NAN, 1e36])
limits = st.sampled_from([None, None, 1.0, 0.01, INF])
unfit_limits = st.sampled_from([0, -1.0, NAN, "1", True, [1.0], torch.ones(2), 10**400])
unfit_scales = st.sampled_from([0.0, -1.0, INF, NAN, 1e39, 1e-60, "8", True, [8.0], 1j, 10**400])
unfit_entries = st.sampled_from(
    [{"scale": v} for v in (0.0, -4.0, INF, NAN, "8", None, [1.0], torch.ones(2))]
    + [{"_growth_tracker": v} for v in (-1, 0.5, NAN, 2**31, 1e30, "1", None)]
    + [{"preamp_state": v} for v in (5, {"steps": -1}, {"steps": 2**63}, {"steps": "x"}, {"bad": -1.0})]
    + [{"growth_factor": 0.5}, {"growth_interval": 0}, {"backoff_factor": "x"}]
)


def bits(tensors: Any) -> list[Any]:
    return [None if t is None else t.detach().clone().view(torch.int32).tolist() for t in tensors]


class Optimized:
    """An optimizer of two parameters, and a twin that sees true gradients."""

    def __init__(self, kind: Any) -> None:
        self.parameters = [
            torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5])),
            torch.nn.Parameter(torch.ones(2)),
        ]
        self.optimizer = kind(self.parameters)
        self.copies = [torch.nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.twin = kind(self.copies)
        self.fails = False
        self.optimizer.register_step_pre_hook(self.fail)
        self.stage, self.finite, self.scaled_with = "ready", True, 1.0
        self.was_checked = False

    def fail(self, *_: Any) -> None:
        if self.fails:
            raise InterruptedError("the optimizer failed")

    def loss(self, factor: float) -> Any:
        weights = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.25, factor])
        return sum((p * w).sum() for p, w in zip(self.parameters, weights, strict=True))

    @property
    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.parameters)

    def true_gradients(self) -> list[torch.Tensor]:
        """Return what the gradients are without the scale."""
        divisor = self.scaled_with if self.stage == "ready" else 1.0
        return [(p.grad.double() / divisor).float() for p in self.parameters]

    def are_finite(self) -> bool:
        given = [p.grad for p in self.parameters]
        return all(t.isfinite().all() for t in (*given, *self.true_gradients()))

    def follow(self, gradients: list[torch.Tensor], max_norm: Any, max_value: Any) -> None:
        for parameter, gradient in zip(self.copies, gradients, strict=True):
            parameter.grad = gradient.clone()
        if max_value is not None:
            torch.nn.utils.clip_grad_value_(self.copies, max_value)
        if max_norm not in (None, INF):
            norm = math.hypot(*[entry for p in self.copies for entry in p.grad.tolist()])
            for parameter in self.copies:
                parameter.grad = (parameter.grad.double() * min(max_norm / (norm + 1e-300), 1.0)).float()
        self.twin.step()

    def kept(self) -> Any:
        """Return what a skipped step leaves as it is."""
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return bits(self.parameters), [numbers for numbers in bits(state) if any(np.ravel(numbers))]


class GradScalerCalls(Calling):
    """Every method, with what it takes and what it does not take."""

    capturable = False

    @initialize(data=st.data())
    def make(self, data: Any) -> None:
        chosen = data.draw(st.sampled_from(SEEN_ON_DEVICE if self.capturable else POLICIES))
        if chosen is None:
            self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=3, capturable=self.capturable)
        else:
            self.scaler = GradScaler("cpu", policy=chosen, capturable=self.capturable)
        self.policy = self.scaler.policy
        self.state = self.policy.start()
        self.all = [
            Optimized(kind) for kind in data.draw(st.permutations(KINDS))[: data.draw(st.integers(1, 3))]
        ]
        self.placed, self.saved = False, None

    def pick(self, number: int) -> Optimized:
        return self.all[number % len(self.all)]

    def everything(self) -> Any:
        gradients = [bits(p.grad for p in one.parameters) for one in self.all]
        stages = [
            self.scaler._per_optimizer_states.get(id(one.optimizer), {}).get("stage") for one in self.all
        ]
        told = [str(stage).replace("None", "OptState.READY") for stage in stages]
        return [one.kept() for one in self.all], gradients, repr(self.scaler.state_dict()), told

    # What is legal

    @rule(number=st.integers(0, 2), factor=factors)
    def backward(self, number: int, factor: float) -> None:
        one = self.pick(number)
        if one.stage != "ready":
            return
        one.optimizer.zero_grad()
        self.call(self.scaler.scale, one.loss(self.moderate(factor))).backward()
        self.placed, one.scaled_with = True, self.state.scale

    def moderate(self, factor: float) -> float:
        return 3.0 if self.capturable and factor == 1e36 else factor  # whose squares overflow, unread

    @rule(number=st.integers(0, 2))
    def unscale(self, number: int) -> None:
        one = self.pick(number)
        if not self.placed:
            self.refused(AssertionError, self.scaler.unscale_, one.optimizer)
        elif one.stage != "ready":
            self.refused(RuntimeError, self.scaler.unscale_, one.optimizer)
        elif one.has_gradients:
            finite = one.are_finite()
            self.call(self.scaler.unscale_, one.optimizer)
            one.stage, one.finite = "unscaled", finite

    @rule(number=st.integers(0, 2), max_norm=limits, max_value=limits)
    def step(self, number: int, max_norm: Any, max_value: Any) -> None:
        one = self.pick(number)
        given = {"max_norm": max_norm, "max_value": None if max_value == INF else max_value}
        if not self.placed:
            self.refused(AssertionError, self.scaler.step, one.optimizer, **given)
        elif one.stage == "stepped":
            self.refused(RuntimeError, self.scaler.step, one.optimizer, **given)
        elif not one.has_gradients:
            self.refused(AssertionError, self.scaler.step, one.optimizer, **given)
        else:
            self.take(one, **given)

    def take(self, one: Optimized, max_norm: Any, max_value: Any) -> None:
        finite = one.are_finite() if one.stage == "ready" else one.finite
        true, before = one.true_gradients(), one.kept()
        self.call(self.scaler.step, one.optimizer, max_norm=max_norm, max_value=max_value)
        one.stage, one.finite = "stepped", finite
        assert self.scaler.last_step_of(one.optimizer).skipped is not finite
        if finite:
            one.follow(true, max_norm, max_value)
        else:
            assert one.kept() == before

    @rule(number=st.integers(0, 2), max_norm=limits, thrown_away=st.booleans())
    def step_that_fails(self, number: int, max_norm: Any, thrown_away: bool) -> None:
        """An optimizer that raises: the gradients can be stepped with again, or thrown away."""
        one = self.pick(number)
        ready = one.stage != "stepped" and self.placed and one.has_gradients
        if not ready or not (one.are_finite() if one.stage == "ready" else one.finite):
            return
        before, one.fails = one.kept(), True
        with pytest.raises(InterruptedError):
            self.call(self.scaler.step, one.optimizer, max_norm=max_norm)
        one.fails, one.was_checked = False, True
        assert one.kept() == before
        if thrown_away and one.stage == "ready":
            one.optimizer.zero_grad()

    @rule(number=st.integers(0, 2), factor=factors, max_norm=limits)
    def step_with_closure(self, number: int, factor: float, max_norm: Any) -> None:
        one = self.pick(number)

        def closure() -> Any:
            one.optimizer.zero_grad()
            loss = one.loss(factor)
            self.scaler.scale(loss).backward()
            self.placed, one.scaled_with = True, self.state.scale
            return loss.detach()

        if self.capturable:
            error: Any = RuntimeError
            self.refused(error, self.scaler.step, one.optimizer, closure)
        elif one.stage == "stepped":
            self.refused(RuntimeError, self.scaler.step, one.optimizer, closure)
        else:
            before, one.stage = one.kept(), "ready"
            closure()
            finite, true = one.are_finite(), one.true_gradients()
            self.call(self.scaler.step, one.optimizer, closure, max_norm=max_norm)
            one.stage, one.finite = "stepped", finite
            if finite:
                one.follow(true, max_norm, None)
            else:
                assert one.kept() == before

    @rule()
    def update(self) -> None:
        taking_part = [one for one in self.all if one.stage != "ready" or one.was_checked]
        if not (self.placed and taking_part):
            self.refused(AssertionError, self.scaler.update)
            return
        reading = Reading(all(one.finite for one in taking_part))
        try:
            after = self.policy.step(self.state, reading)
        except ScaleExhausted:
            with pytest.raises(ScaleExhausted):
                self.call(self.scaler.update)
        else:
            self.call(self.scaler.update)
            self.state = after
        stepped = any(one.stage == "stepped" for one in taking_part)
        self.begin()
        if stepped or not reading.finite:  # else nothing was taken or skipped
            assert self.scaler.last_step.skipped is not reading.finite
            assert self.scaler.last_step.new_scale == self.state.scale

    def begin(self) -> None:
        for one in self.all:
            one.stage, one.finite, one.was_checked = "ready", True, False
            one.optimizer.zero_grad()

    @rule(exponent=st.integers(-6, 20), as_tensor=st.booleans())
    def set_scale(self, exponent: int, as_tensor: bool) -> None:
        scale = 2.0**exponent
        new = torch.tensor(scale) if as_tensor else scale
        if not self.placed:
            self.refused(AssertionError, self.scaler.update, new)
            return
        self.call(self.scaler.update, new)
        self.state = self.state._replace(scale=scale)
        self.begin()

    @rule()
    def save(self) -> None:
        self.saved = copy.deepcopy(self.call(self.scaler.state_dict)), self.state
        assert self.saved[0]["scale"] == self.state.scale
        assert self.saved[0]["_growth_tracker"] == self.state.good

    @precondition(lambda self: self.saved and not any(one.has_gradients for one in self.all))
    @rule()
    def load(self) -> None:
        if any(one.stage != "ready" for one in self.all):
            return
        entries, self.state = self.saved
        with pytest.warns(UserWarning, match="loss scale") if self.is_outside() else nullcontext():
            self.call(self.scaler.load_state_dict, entries)

    def is_outside(self) -> bool:
        """Return whether the scale, which the user has set, lies where the policy never moves it."""
        policy = self.scaler.policy
        lowest = min(policy.min_scale or 0.0, policy.init_scale)
        highest = max(policy.max_scale or math.inf, policy.init_scale)
        return not lowest <= self.state.scale <= highest

    @rule(way=st.sampled_from([copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]))
    def copied(self, way: Any) -> None:
        if self.scaler._per_optimizer_states:
            self.refused(AssertionError, way, self.scaler)
            return
        self.scaler = self.call(way, self.scaler)
        self.placed = False
        self.begin()

    # What is not

    @rule(number=st.integers(0, 2), limit=unfit_limits, name=st.sampled_from(["max_norm", "max_value"]))
    def step_with_an_unfit_limit(self, number: int, limit: Any, name: str) -> None:
        self.refused(PolicyError, self.scaler.step, self.pick(number).optimizer, **{name: limit})

    @rule(scale=unfit_scales)
    def set_an_unfit_scale(self, scale: Any) -> None:
        self.refused((PreampError, AssertionError), self.scaler.update, scale)

    @rule(entries=unfit_entries)
    def load_what_is_unfit(self, entries: Any) -> None:
        whole = {**self.scaler.state_dict(), **entries}
        own = {"growth_factor", "growth_interval", "backoff_factor"} & set(entries)
        if (own and not self.scaler._owns_policy) or (
            "bad" in str(entries) and "bad" not in self.state._fields
        ):
            return
        self.refused(PolicyError, self.scaler.load_state_dict, whole)

    @rule(missing=st.sampled_from(["scale", "growth_interval", "_growth_tracker"]))
    def load_what_is_incomplete(self, missing: str) -> None:
        part = {name: value for name, value in self.scaler.state_dict().items() if name != missing}
        self.refused((KeyError, PreampError), self.scaler.load_state_dict, part)

    @rule(entries=st.sampled_from([{}, None, 5, [1.0], io.BytesIO()]))
    def load_what_is_no_state(self, entries: Any) -> None:
        self.refused((RuntimeError, PreampError), self.scaler.load_state_dict, entries)

    @rule(outputs=st.sampled_from([3.0, "loss", None, [1.0], {"loss": "x"}]))
    def scale_what_is_no_tensor(self, outputs: Any) -> None:
        self.refused(ValueError, self.scaler.scale, outputs)

    # What always holds

    @invariant()
    def the_state_is_the_policys(self) -> None:
        assert self.scaler.get_scale() == self.state.scale
        told = self.scaler.policy_state
        if type(self.policy) is Dynamic and self.policy.hysteresis == 1:  # overflows need not be counted
            told = told._replace(bad=self.state.bad)
        assert told == self.state

    @invariant()
    def parameters_are_finite_and_those_of_the_twin(self) -> None:
        for one in self.all:
            for parameter, twin in zip(one.parameters, one.copies, strict=True):
                assert parameter.isfinite().all()
                assert torch.allclose(parameter, twin, rtol=1e-4, atol=1e-6)


class CapturableCalls(GradScalerCalls):
    """The same where nothing is read."""

    capturable = True


MACHINES = [GradScalerCalls, CapturableCalls]


@pytest.mark.parametrize("machine", MACHINES)
def test_no_order_of_calls_harms_parameters_or_scale(machine: type[Calling]) -> None:
    drive(machine, 5)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_no_order_of_calls_harms_parameters_or_scale_in_the_long_run(machine: type[Calling]) -> None:
    drive_long(machine)
