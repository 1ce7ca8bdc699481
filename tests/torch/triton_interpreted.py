"""The kernels of `preamp.torch.scaling.triton_kernels` on a CPU, in Triton's interpreter.

Not collected: `test_launches.py` runs this file in a process of its own, without TensorFlow.
"""

import struct
import warnings
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from preamp import Dynamic, InexactScale, PolicyError, Reading, State
from preamp.torch import GradScaler
from preamp.torch.scaling import grad_scaler, launches
from tests.strategies import quietly

from .pairs import INF, NAN, contents, weights
from .test_launches import Calls, beyond_the_optimizers

FLOAT32_MAX = torch.finfo(torch.float32).max
launches.DEVICE_TYPES = ("cpu",)
# Every float32 above 0, the smallest and the largest as often as the usual ones.
positive = st.one_of(
    st.integers(-149, 127).map(lambda exponent: 2.0**exponent),
    st.floats(2.0**-149, FLOAT32_MAX, width=32),
    st.floats(0.125, 8.0, width=32),
)
bounds = st.one_of(st.none(), st.integers(-140, 120).map(lambda exponent: 2.0**exponent))


def bits(*numbers):
    """Return float32 numbers as bytes, of which no two that differ are equal."""
    return struct.pack(f"{len(numbers)}f", *numbers)


@st.composite
def policies(draw, **fixed):
    """Return any rule of the usual kind."""
    settings = {
        "init_scale": draw(positive),
        "growth_factor": draw(st.sampled_from([2.0, 4.0, 1.5, 1.1, 1e3])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.25, 0.3, 0.999])),
        "growth_interval": draw(st.integers(1, 4)),
        "min_scale": draw(bounds),
        "max_scale": draw(bounds),
        "at_ceiling": draw(st.sampled_from(["clamp", "refuse"])),
        "bounds": draw(st.sampled_from(["strict", "moves", "always"])),
        "backoff_divisor": draw(st.sampled_from([None, None, 2.0, 3.0, 1.1])),
        "growth_delay": draw(st.integers(0, 2)),
        "factor_dtype": draw(st.sampled_from(["float32", "float64"])),
        "hysteresis": draw(st.integers(1, 3)),
        "hysteresis_reset": tuple(draw(st.sets(st.sampled_from(["clean", "growth", "backoff"])))),
        **fixed,
    }
    with warnings.catch_warnings(action="ignore", category=InexactScale):
        try:
            return quietly(Dynamic, **settings)
        except PolicyError:  # bounds that exclude each other, or the scale
            return quietly(Dynamic, **{**settings, "min_scale": None, "max_scale": None})


def on_device(state):
    return State(*(torch.full((), number) for number in state))


def advanced(policy, state, finite):
    """Return the state after a step, in float32 numbers."""
    copy = launches.advance(policy, state, torch.tensor(finite))
    numbers = [one.item() for one in state]
    assert bits(copy.item()) == bits(numbers[0])
    return numbers


@settings(max_examples=60, deadline=None)
@given(
    policy=policies(),
    start=st.one_of(st.none(), positive),
    script=st.lists(st.sampled_from([True, True, True, False]), min_size=10, max_size=40),
)
def test_a_state_moves_as_the_policy_does_on_floats_and_by_operators(policy, start, script):
    state = policy.start()
    if start is not None:  # a scale that was set by hand may lie beyond the bounds
        state = state._replace(scale=start)
    here, by_operators = on_device(state), on_device(state)
    for finite in script:
        state = policy.advance(state, Reading(finite))
        numbers = advanced(policy, here, finite)
        assert bits(*numbers) == bits(*state)
        if (
            policy.compat.factor_dtype == "float32"
        ):  # operators round the factors; floats and the kernel do not
            by_operators = policy.advance(by_operators, Reading(torch.tensor(finite)), torch.where)
            by_operators = State(*(torch.as_tensor(one, dtype=torch.float32) for one in by_operators))
            assert bits(*numbers) == bits(*(one.item() for one in by_operators))


@settings(max_examples=40, deadline=None)
@given(
    policy=policies(scale_dtype="float64", factor_dtype="float32"),
    script=st.lists(st.sampled_from([True, True, False]), min_size=5, max_size=30),
)
def test_a_state_that_is_float64_on_the_host_moves_as_by_operators(policy, script):
    here, by_operators = on_device(policy.start()), on_device(policy.start())
    for finite in script:
        by_operators = policy.advance(by_operators, Reading(torch.tensor(finite)), torch.where)
        by_operators = State(*(torch.as_tensor(one, dtype=torch.float32) for one in by_operators))
        assert bits(*advanced(policy, here, finite)) == bits(*(one.item() for one in by_operators))


@settings(max_examples=300, deadline=None)
@given(
    total=st.one_of(positive, st.sampled_from([0.0, INF, NAN])),
    scale=positive,
    constant=st.one_of(st.just(1.0), positive),
    max_norm=st.one_of(st.none(), st.just(INF), positive),
)
def test_an_optimizer_is_told_what_operators_compute(total, scale, constant, max_norm):
    numbers = torch.tensor(total), torch.tensor(scale)
    made = launches.prepare(*numbers, constant, max_norm)
    total, scale = numbers
    divisor = scale * constant
    finite = total / divisor <= FLOAT32_MAX
    clipped = divisor if max_norm is None else torch.maximum(divisor, total / max_norm)
    multiplier = torch.where(finite, clipped, divisor)
    expected = bits(*(one.item() for one in (scale, divisor, multiplier, 1.0 - finite.float())))
    assert bits(*(one.item() for one in made[:4])) == expected
    assert made.finite.dtype is torch.bool
    assert made.finite.item() == finite.item()


def test_only_what_there_is_a_kernel_for_is_covered():
    scale, finite = torch.tensor(1024.0), torch.tensor(True)
    assert launches.can_prepare(scale)
    assert launches.prepare(torch.tensor(1.0, dtype=torch.float64), scale, 1.0, None) is None
    for other in (scale.double(), scale.view(1), torch.nn.Parameter(scale)):
        assert not launches.can_prepare(other)

    class Own(Dynamic):
        """May advance in another way."""

    state = on_device(Own().start())
    assert launches.advance(Own(), state, finite) is None
    assert contents(list(state)) == list(Own().start())


def test_a_graph_that_is_captured_gets_no_kernel_that_was_not_launched_before(monkeypatch):
    """Compiling it there would fail."""
    policy, finite = Dynamic(growth_interval=77), torch.tensor(True)
    state = on_device(policy.start())
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    assert launches.advance(policy, state, finite) is None
    assert contents(list(state)) == list(policy.start())
    monkeypatch.undo()
    assert launches.advance(policy, state, finite) is not None
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    assert launches.advance(policy, state, finite) is not None


def test_a_state_that_moved_is_a_tensor_that_was_written_to():
    """Or a backward pass through an earlier loss would take the new scale for the old one."""
    weight = torch.ones((), requires_grad=True)
    scaler, optimizer = GradScaler("cpu", capturable=True), torch.optim.SGD([weight], lr=0.0)
    loss = scaler.scale(weight * 1.0)
    weight.grad = torch.ones(())
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("capturable", "launched"), [(False, 7), (True, 9)])
@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}], ids=str)
@pytest.mark.parametrize("policy", [Dynamic(), Dynamic(hysteresis=2, max_scale=None)], ids=str)
def test_a_fused_step_makes_few_calls(monkeypatch, capturable, launched, limits, policy):
    calls, launch = Calls(), launches._launch

    def counted(*arguments):
        with _disable_current_modes():  # the interpreter copies arguments, a device does not
            assert launch(*arguments)
        calls.launched.append("triton")
        return True

    monkeypatch.setattr(launches, "_launch", counted)
    seen = beyond_the_optimizers(calls, policy, capturable, **limits)
    assert seen.launched.count("triton") == 2
    assert len(seen.launched) == launched
    assert len(seen.others) == 4  # memory, and views of it


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(st.tuples(positive, st.sampled_from([1.0, 1.0, 1.0, INF, NAN])), min_size=1, max_size=8),
    policy=policies(scale_dtype="float32", factor_dtype="float32"),
    limits=st.sampled_from([{}, {"max_norm": 1.0}, {"max_norm": 1e-3}]),
    capturable=st.booleans(),
)
def test_steps_are_those_of_operators(script, policy, limits, capturable):
    with patch.object(grad_scaler, "_reads_are_free", lambda device: False):
        mine = list(trained(script, policy, limits, capturable))
        with patch.object(launches, "DEVICE_TYPES", ()):
            assert mine == list(trained(script, policy, limits, capturable))


def trained(script, policy, limits, capturable):
    """Yield all that a training can see."""
    (weight,) = weights(size=5)
    optimizer, told = torch.optim.SGD([weight], lr=0.5, fused=True), []

    @optimizer.register_step_pre_hook
    def listen(optimizer, args, kwargs):
        found_inf = optimizer.found_inf.item()  # if set, the optimizer does not look at the other
        told[:] = found_inf, 0.0 if found_inf else optimizer.grad_scale.item()

    scaler = GradScaler("cpu", policy=policy, capturable=capturable)
    for strength, factor in script:
        scaler.scale(torch.zeros(()))
        weight.grad = torch.tensor([1.0, -2.0, 0.0, 3.0, factor]) * min(strength, 2.0**60)
        scaler.step(optimizer, **limits)
        scaler.update()
        yield bits(*told, *weight.tolist(), *weight.grad.tolist())
        yield str(scaler.last_step), scaler.state_dict()
