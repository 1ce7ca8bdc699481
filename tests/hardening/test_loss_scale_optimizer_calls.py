"""`preamp.torch.LossScaleOptimizer` called in any order, with every argument and with unfit checkpoints.

Beside it stand a policy on plain floats, and a count of the micro-steps that make an update.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from preamp import Dynamic, PreampError, Reading, ScaleExhausted
from preamp.errors import UsageError
from preamp.torch import LossScaleOptimizer

from .calling import Calling, drive, drive_long

INF, NAN = math.inf, math.nan
POLICIES = [
    None,
    Dynamic(init_scale=2.0**10, growth_interval=2),
    Dynamic(init_scale=2.0, growth_interval=3, min_scale=0.25, hysteresis=2, hysteresis_reset="growth"),
    Dynamic(init_scale=1.0, min_scale=0.5, at_floor="raise", growth_interval=2),
]
KINDS: list[Any] = [
    lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.Adam(p, lr=0.01),
]
CLIPS: list[dict[str, float]] = [{}, {"clipnorm": 0.5}, {"clipvalue": 0.25}, {"global_clipnorm": 1.0}]
factors = st.sampled_from([1.0, 0.5, -2.0, 3.0, 1e-6, 0.0, 1.0, INF, -INF, NAN])
unfit = st.sampled_from([None, 5, "x", NAN, -1, [1.0], [torch.ones(7)], {}, {"scale": NAN}, {"sums": 3}])
entries = st.sampled_from(["scaler", "iterations", "averages", "accumulation", "masters"])


def frozen(value: Any) -> Any:
    """Return a value with tensors as text, to compare."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: frozen(part) for key, part in value.items()}
    return [frozen(part) for part in value] if isinstance(value, list | tuple) else value


class LossScaleOptimizerCalls(Calling):
    """Every method, with what it takes and what it does not take."""

    @initialize(data=st.data())
    def make(self, data: Any) -> None:
        draw = data.draw
        self.half = draw(st.booleans())
        self.every = draw(st.sampled_from([None, None, 1, 2, 3]))
        self.parameters = [
            torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5])),
            torch.nn.Parameter(torch.ones(2)),
        ]
        if self.half:
            self.parameters = [torch.nn.Parameter(p.detach().half()) for p in self.parameters]
        self.settings = {
            "policy": draw(st.sampled_from(POLICIES[self.half :])),  # the first overflows in float16
            "use_ema": draw(st.booleans()),
            "ema_overwrite_frequency": draw(st.sampled_from([None, 2])),
            "loss_scale_factor": draw(st.sampled_from([None, 4.0])),
            "gradient_accumulation_steps": self.every,
            "master_weights": self.half,
            "weight_decay": draw(st.sampled_from([None, 0.01])),
            **draw(st.sampled_from(CLIPS)),
        }
        self.kind = draw(st.sampled_from(KINDS))
        self.optimizer = self.fresh()
        self.policy = self.optimizer.scaler.policy
        self.state = self.policy.start()
        self.calls = self.kept = self.updates = 0
        self.fails, self.saved = False, None

    def fresh(self) -> LossScaleOptimizer:
        inner = self.kind(self.parameters)
        if self.kind is KINDS[1]:
            for group in inner.param_groups:
                group["weight_decay"] = 0.0
        optimizer = LossScaleOptimizer(inner, **self.settings)
        inner.register_step_pre_hook(self.fail)
        return optimizer

    def fail(self, *_: Any) -> None:
        if self.fails:
            raise InterruptedError("the optimizer failed")

    def everything(self) -> Any:
        gradients = [p.grad for p in self.parameters]
        return repr(frozen([self.optimizer.state_dict(), gradients, self.parameters]))  # NaN is NaN

    def held(self) -> Any:
        return frozen([self.parameters, [s for s in self.optimizer.state.values() if s], self.updates])

    def loss(self, factor: float) -> Any:
        weights = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.25, factor])
        return sum((p.float() * w).sum() for p, w in zip(self.parameters, weights, strict=True))

    # What is legal

    @rule(factor=factors, closure=st.booleans())
    def train(self, factor: float, closure: bool) -> None:
        """One step, with the loss before it or in a closure."""
        finite: list[bool] = []

        def evaluate() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(factor)
            self.optimizer.backward(loss)
            finite.append(all(bool(p.grad.isfinite().all()) for p in self.parameters))
            return loss

        before, exhausted = self.held(), False
        try:
            if closure:
                self.call(self.optimizer.step, evaluate)
            else:
                evaluate()
                self.call(self.optimizer.step)
        except ScaleExhausted:
            exhausted = True
        after = self.after(finite[0])
        assert exhausted is (after is None)
        self.state = self.state if after is None else after
        assert self.optimizer.last_step.finite is finite[0]
        updates = self.note(finite[0], exhausted=exhausted)
        assert (self.held() != before) is updates

    def after(self, finite: bool) -> Any:
        try:
            return self.policy.step(self.state, Reading(finite))
        except ScaleExhausted:
            return None

    def note(self, finite: bool, *, exhausted: bool = False) -> bool:
        """Count a step or a micro-step; return whether it is to update."""
        if not self.every:
            self.updates += finite
            return finite
        self.calls, self.kept = self.calls + 1, self.kept + finite
        if exhausted or self.calls < self.every:
            return False
        updates, self.calls, self.kept = self.kept > 0, 0, 0
        self.updates += updates
        return updates

    @rule(factor=st.sampled_from([1.0, 0.5]))
    def train_with_a_failing_optimizer(self, factor: float) -> None:
        """What failed may be tried again, or thrown away."""
        if self.every or self.settings["weight_decay"]:  # which comes before whatever fails
            return
        before, self.fails = self.held(), True
        self.optimizer.zero_grad()
        self.optimizer.backward(self.loss(factor))
        with pytest.raises(InterruptedError):
            self.call(self.optimizer.step)
        self.fails = False
        assert self.held() == before

    @rule()
    def step_again(self) -> None:
        """A second step needs a second loss: what is unscaled would vanish when it is unscaled again."""
        self.optimizer.zero_grad()
        self.refused((AssertionError, UsageError), self.optimizer.step)

    @rule()
    def evaluate_averages(self) -> None:
        before = self.held()
        if not self.settings["use_ema"]:
            self.refused(PreampError, self.optimizer.averaged().__enter__)
            return
        with self.optimizer.averaged():
            assert all(p.isfinite().all() for p in self.parameters)
        assert self.held() == before

    @rule()
    def save(self) -> None:
        self.saved = (
            copy.deepcopy(self.call(self.optimizer.state_dict)),
            copy.deepcopy(
                (
                    self.state,
                    self.calls,
                    self.kept,
                    self.updates,
                    [p.detach().clone() for p in self.parameters],
                )
            ),
        )

    @precondition(lambda self: self.saved)
    @rule(anew=st.booleans())
    def load(self, anew: bool) -> None:
        """Into the optimizer that saved it, or another one."""
        state_dict, (self.state, self.calls, self.kept, self.updates, weights) = copy.deepcopy(self.saved)
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)
                parameter.grad = None
        if anew:
            self.optimizer = self.fresh()
        self.call(self.optimizer.load_state_dict, state_dict)
        self.optimizer.zero_grad()
        assert frozen(self.optimizer.state_dict()) == frozen(state_dict)

    # What is not

    @rule(entry=entries, value=unfit)
    def load_what_is_unfit(self, entry: str, value: Any) -> None:
        state_dict = copy.deepcopy(self.optimizer.state_dict())
        state_dict["loss_scale_optimizer"][entry] = value
        if entry == "accumulation" and (value is None or not self.every):
            return
        if entry == "masters" and not self.half:
            return
        if (entry, value) in (("averages", {}), ("iterations", 5)):
            return
        self.refused((PreampError, RuntimeError, KeyError), self.optimizer.load_state_dict, state_dict)

    @rule(missing=entries)
    def load_what_is_incomplete(self, missing: str) -> None:
        state_dict = copy.deepcopy(self.optimizer.state_dict())
        del state_dict["loss_scale_optimizer"][missing]
        self.refused(PreampError, self.optimizer.load_state_dict, state_dict)

    @rule()
    def load_other_groups(self) -> None:
        state_dict = copy.deepcopy(self.optimizer.state_dict())
        state_dict["param_groups"] = state_dict["param_groups"] * 2
        self.refused(ValueError, self.optimizer.load_state_dict, state_dict)

    @rule(loss=st.sampled_from([3.0, "loss", None]))
    def scale_what_is_no_tensor(self, loss: Any) -> None:
        self.refused(ValueError, self.optimizer.scale_loss, loss)

    # What always holds

    @invariant()
    def the_counts_are_right(self) -> None:
        assert self.optimizer.loss_scale == self.state.scale
        assert self.optimizer.iterations == self.updates
        if self.optimizer._accumulation is not None:
            assert (self.optimizer._accumulation.calls, self.optimizer._accumulation.summed) == (
                self.calls,
                self.kept,
            )

    @invariant()
    def parameters_are_finite(self) -> None:
        assert all(p.isfinite().all() for p in self.parameters)


def test_no_order_of_calls_harms_parameters_or_counts() -> None:
    drive(LossScaleOptimizerCalls, 8)


@pytest.mark.slow
def test_no_order_of_calls_harms_parameters_or_counts_in_the_long_run() -> None:
    drive_long(LossScaleOptimizerCalls)
