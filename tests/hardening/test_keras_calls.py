"""`preamp.keras.LossScaleOptimizer` in any order of calls, on the backend of this process.

Beside it stands a policy on plain floats. Keras's own `ValueError` counts as a clear refusal where Keras's
class is what refuses.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from preamp import Dynamic, PolicyError, PreampError, Reading, ScaleExhausted
from preamp.keras import LossScaleOptimizer

from .calling import Calling, drive, drive_long

POLICIES = [
    None,
    Dynamic(init_scale=2.0**10, growth_interval=2),
    Dynamic(init_scale=2.0, growth_interval=3, min_scale=0.25, hysteresis=2, hysteresis_reset="growth"),
    Dynamic(init_scale=1.0, min_scale=0.5, at_floor="raise", growth_interval=2),
]
factors = st.sampled_from([1.0, 0.5, -2.0, 1e-6, 0.0, math.inf, -math.inf, math.nan])


def host(value: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(getattr(value, "value", value)))


class KerasCalls(Calling):
    """Apply and save, with what they take and what they do not take."""

    @initialize(policy=st.sampled_from(POLICIES), clips=st.booleans())
    def make(self, policy: Any, clips: bool) -> None:
        self.settings = {"policy": policy, "global_clipnorm": 1.0 if clips else None}
        self.variables = [
            keras.Variable(np.array([1.0, -2.0], "float32")),
            keras.Variable(np.ones(3, "float32")),
        ]
        self.optimizer = self.fresh()
        self.policy = self.optimizer.policy
        self.state, self.count, self.skipped, self.saved = self.policy.start(), 0, 0, None

    def fresh(self) -> LossScaleOptimizer:
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.125, momentum=0.5), **self.settings)
        optimizer.build(self.variables)
        optimizer.scale_loss(keras.ops.ones(()))  # or it warns that no loss was scaled
        return optimizer

    def everything(self) -> Any:
        return [host(v).tobytes() for v in (*self.variables, *self.optimizer.variables)]

    def trained(self) -> Any:
        return [host(v).tobytes() for v in (*self.variables, *self.optimizer.inner_optimizer.variables)]

    def gradients(self, factor: float) -> list[Any]:
        scaled = self.call(self.optimizer.scale_loss, keras.ops.convert_to_tensor(np.float32(factor)))
        other = self.optimizer.scale_loss(keras.ops.convert_to_tensor(np.float32(0.25)))
        return [keras.ops.ones(2) * other, keras.ops.ones(3) * scaled]

    # What is legal

    @rule(factor=factors, pairs=st.booleans())
    def apply(self, factor: float, pairs: bool) -> None:
        before, finite = self.trained(), math.isfinite(factor)
        gradients = self.gradients(factor)
        try:
            if pairs:
                self.call(self.optimizer.apply_gradients, zip(gradients, self.variables, strict=True))
            else:
                self.call(self.optimizer.apply, gradients, self.variables)
        except ScaleExhausted:
            with pytest.raises(ScaleExhausted):
                self.policy.step(self.state, Reading(finite))
        else:
            self.state = self.policy.step(self.state, Reading(finite))
        self.count, self.skipped = self.count + 1, self.skipped + (not finite)
        assert (self.trained() == before) is not finite
        step = self.optimizer.last_step
        assert step is not None
        assert (step.index, step.skipped) == (self.count - 1, not finite)

    @rule()
    def save(self) -> None:
        weights = [host(v) for v in (*self.variables, *self.optimizer.variables)]
        self.saved = weights, (self.state, self.count, self.skipped)

    @precondition(lambda self: self.saved)
    @rule(anew=st.booleans())
    def load(self, anew: bool) -> None:
        values, (self.state, self.count, self.skipped) = self.saved
        if anew:
            config = copy.deepcopy(self.optimizer.get_config())
            self.optimizer = self.call(LossScaleOptimizer.from_config, config)
            self.optimizer.build(self.variables)
            self.optimizer.scale_loss(keras.ops.ones(()))
        for variable, value in zip(self.variables, values, strict=False):
            variable.assign(value)
        self.call(self.optimizer.set_weights, values[len(self.variables) :])

    @rule(
        scale=st.sampled_from([math.nan, 0.0, -1.0, math.inf, 1e-46]), count=st.sampled_from([0.0, -1.0, 0.5])
    )
    def load_a_broken_file(self, scale: float, count: float) -> None:
        """Keras has no way to refuse half of a file: the scale starts again, and a warning says so."""
        store: dict[str, Any] = {}
        self.optimizer.save_own_variables(store)
        store |= {"dynamic_scale": np.float32(scale), "step_counter": np.float32(count)}
        with warnings.catch_warnings(), pytest.warns(UserWarning, match="starts again"):
            self.call(self.optimizer.load_own_variables, store)
        self.state = self.policy.start()

    # What is not

    @rule(number=st.sampled_from([1, 3]))
    def apply_too_few_or_too_many(self, number: int) -> None:
        gradients = (self.gradients(1.0) * 2)[:number]
        self.refused(PreampError, self.optimizer.apply, gradients, self.variables)
        self.refused(PreampError, self.optimizer.apply, gradients)

    @rule()
    def apply_nothing(self) -> None:
        self.refused(ValueError, self.optimizer.apply, [None, None], self.variables)

    @rule()
    def apply_to_unknown_variables(self) -> None:
        unknown = [keras.Variable(np.ones(2, "float32")), keras.Variable(np.ones(3, "float32"))]
        self.refused(ValueError, self.optimizer.apply, self.gradients(1.0), unknown)

    @rule(scale=st.sampled_from([math.nan, 0.0, -4.0, math.inf]))
    def set_unfit_weights(self, scale: float) -> None:
        values = [host(v) for v in self.optimizer.variables]
        place = [v is self.optimizer.dynamic_scale for v in self.optimizer.variables].index(True)
        values[place] = np.float32(scale)
        self.refused(PreampError, self.optimizer.set_weights, values)
        self.refused(PreampError, self.optimizer.set_weights, values[1:])

    @rule(value=st.sampled_from([0, -1, 0.5, "x", 2**30, math.nan, True]))
    def set_an_unfit_interval(self, value: Any) -> None:
        self.refused(PolicyError, setattr, self.optimizer, "dynamic_growth_steps", value)

    @rule(name=st.sampled_from(["clipnorm", "global_clipnorm", "ema_momentum", "use_ema"]))
    def set_an_unfit_argument(self, name: str) -> None:
        self.refused(PreampError, setattr, self.optimizer, name, "x")

    @rule(other=st.sampled_from([None, 5, "adam"]))
    def set_another_inner_optimizer(self, other: Any) -> None:
        self.refused(PreampError, setattr, self.optimizer, "inner_optimizer", other)
        self.refused(PreampError, LossScaleOptimizer, other)
        self.refused(PreampError, LossScaleOptimizer, self.optimizer.inner_optimizer)

    @rule(
        change=st.sampled_from(
            [
                {"policy": 5},
                {"policy": {"class": "Dynamic"}},
                {"policy": {"class": "os.system", "settings": {}}},
                {"policy": {"class": "Dynamic", "settings": {"init_scale": -1}}},
                {"initial_scale": "x"},
                {"inner_optimizer": None},
                {"inner_optimizer": 5},
                {"global_clipnorm": "x"},
                {"unknown": 1},
            ]
        )
    )
    def read_an_unfit_configuration(self, change: Any) -> None:
        config = {**copy.deepcopy(self.optimizer.get_config()), **change}
        self.refused(PreampError, LossScaleOptimizer.from_config, config)

    @rule(config=st.sampled_from([None, 5, [], {}, "x"]))
    def read_no_configuration(self, config: Any) -> None:
        self.refused(PreampError, LossScaleOptimizer.from_config, config)

    # What always holds

    @invariant()
    def the_state_is_the_policys(self) -> None:
        assert [float(host(v)) for v in self.optimizer._scaler.state.policy_state] == list(self.state)

    @invariant()
    def variables_are_finite(self) -> None:
        assert all(np.isfinite(host(v)).all() for v in self.variables)


def test_no_order_of_calls_harms_variables_or_scale() -> None:
    drive(KerasCalls, 2, 30)


@pytest.mark.slow
def test_no_order_of_calls_harms_variables_or_scale_in_the_long_run() -> None:
    drive_long(KerasCalls, 4000)  # whose calls are slow
