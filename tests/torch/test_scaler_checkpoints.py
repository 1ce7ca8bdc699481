"""What of a `GradScaler` is saved, loaded, pickled and copied."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch

from preamp import Dynamic, Static, Tolerant, Trace
from preamp.errors import TraceError
from preamp.guards import SpikeGuard
from preamp.torch import GradScaler, MasterWeights
from tests.strategies import RULES

from .test_scaler import INF, Training, ours, theirs


@pytest.mark.parametrize(("first", "second"), [(ours, theirs), (theirs, ours), (ours, ours)])
def test_checkpoints_travel_between_the_two(first, second):
    """A run that changes scalers half-way equals one that does not."""
    whole, half = Training(theirs()), Training(first())
    script = [1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0]
    for number, factor in enumerate(script):
        if number == 6:
            saved = half.scaler.state_dict()
            half.scaler = second(init_scale=4.0, growth_interval=7)
            half.scaler.load_state_dict(saved)
        whole.step(factor)
        half.step(factor)
    saved, expected = half.scaler.state_dict(), whole.scaler.state_dict()
    saved.pop("preamp_state", None)
    assert saved == expected
    assert half.values() == whole.values()


def test_a_checkpoint_of_another_policy_gives_what_both_know():
    training = Training(GradScaler("cpu", policy=Tolerant(init_scale=16.0, growth_interval=7)))
    for factor in (1.0, INF, 1.0, 1.0):
        training.step(factor)
    other = GradScaler("cpu", policy=Dynamic(hysteresis=2))
    other.load_state_dict(training.scaler.state_dict())
    assert other.get_scale() == training.scaler.get_scale() == 8.0
    assert other.state_dict()["_growth_tracker"] == 2


def test_a_checkpoint_keeps_what_the_policy_remembers():
    """Hysteresis half used up survives: the next overflow backs off."""
    policy = Dynamic(init_scale=16.0, hysteresis=2, hysteresis_reset="growth")
    training = Training(GradScaler("cpu", policy=policy))
    training.step(INF)
    assert training.scaler.get_scale() == 16.0
    resumed = Training(GradScaler("cpu", policy=policy))
    resumed.scaler.load_state_dict(training.scaler.state_dict())
    resumed.step(INF)
    assert resumed.scaler.get_scale() == 8.0


class GrowsAfterClean(Dynamic):
    """A rule of a user's that gives a meaning to a count which `Dynamic` does not need."""

    def _after_clean_step(self, state, where):
        return super()._after_clean_step(state, where)._replace(bad=state.bad + 1.0, scale=8.0 + state.bad)


@pytest.mark.parametrize(
    "policy",
    [
        GrowsAfterClean(),
        *[kind() for kind in RULES.values() if kind is not Dynamic],
    ],
    ids=repr,
)
def test_a_run_resumed_with_what_was_seen_is_the_uninterrupted_run(policy):
    whole, half = (Training(GradScaler("cpu", policy=policy)) for _ in range(2))
    for number, factor in enumerate([1.0, 2.0, INF, 0.5, 0.0, 1.0, 1.0, 4.0]):
        if number == 5:
            saved = half.scaler.state_dict()
            half.scaler = GradScaler("cpu", policy=policy)
            half.scaler.load_state_dict(saved)
        whole.step(factor)
        half.step(factor)
    assert half.scaler.state_dict() == whole.scaler.state_dict()
    assert half.values() == whole.values()


def test_pickling_and_copying_keep_the_state():
    training = Training(ours(policy=None))
    for factor in (1.0, INF, 1.0):
        training.step(factor)
    expected = training.scaler.state_dict()
    for scaler in (pickle.loads(pickle.dumps(training.scaler)), copy.deepcopy(training.scaler)):
        assert scaler.state_dict() == expected
        twin = Training(scaler)
        twin.step(INF)
        assert scaler.get_scale() == training.scaler.get_scale() / 2


def test_a_given_policy_stays_as_it_is_when_a_checkpoint_is_loaded():
    saved = theirs(growth_interval=9).state_dict()
    dynamic = GradScaler("cpu", policy=Dynamic(growth_interval=500))
    dynamic.load_state_dict(saved)
    assert (dynamic.get_growth_interval(), dynamic.get_scale()) == (500, 2.0**10)
    static = GradScaler("cpu", policy=Static(128.0))
    static.load_state_dict(saved)
    assert static.get_scale() == 128.0


@pytest.mark.parametrize(
    "options", [{}, {"capturable": True}, {"on_step": [].append}, {"policy": Static(8.0)}]
)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_steps_are_counted_across_a_restart(options, steps):
    """Without `on_step` as well: a trace that comes later has to go on where the run was."""
    make = ours if "policy" not in options else partial(GradScaler, "cpu")
    first, second = Training(make(**options)), Training(make(**options))
    for _ in range(steps):
        first.step()
    second.scaler.load_state_dict(first.scaler.state_dict())
    second.step()
    assert second.scaler.last_step.index == steps


def test_a_fresh_scaler_saves_what_the_original_saves():
    assert ours().state_dict() == theirs().state_dict()


def test_a_scaler_with_a_recording_trace_can_be_copied(tmp_path):
    with Trace(path=tmp_path / "trace.jsonl") as trace:
        training = Training(ours(on_step=trace))
        training.step()
        twin = Training(copy.deepcopy(training.scaler))
        training.step(INF)
        with pytest.raises(TraceError, match="copy of the trace"):
            twin.step(INF)
    assert twin.scaler.state_dict() == training.scaler.state_dict()
    assert len(Trace.read(tmp_path / "trace.jsonl")) == 2


class Parts:
    """A model with BatchNorm, its optimizer and its scaler, which resume from checkpoints of their own."""

    def __init__(self, half):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        options = {"guard": SpikeGuard(), "model": self.model, "restore_buffers": True}
        self.scaler = GradScaler("cpu", **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        self.masters = None
        if half:
            self.model[0].half()
            self.masters = self.parts["masters"] = MasterWeights(self.optimizer)

    def step(self, number):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        x[0] = INF if number % 4 == 3 else x[0]
        self.optimizer.zero_grad()
        loss = self.model[1](self.model[0](x.to(self.model[0].weight.dtype)).float()).square().sum() + 0.0
        loss = loss + self.model[0].weight.float().square().sum()
        self.scaler.scale(loss).backward()
        if self.masters:
            self.masters.take_gradients()
        self.scaler.step(self.optimizer, max_norm=1.0)
        if self.masters:
            self.masters.write_back()
        self.scaler.update()

    def saved(self):
        return copy.deepcopy({name: part.state_dict() for name, part in self.parts.items()})


@pytest.mark.parametrize(
    ("half", "order"),
    [
        *[(False, order) for order in [*itertools.permutations(["model", "optimizer", "scaler"])][::2]],
        *[(True, (*o, "scaler")) for o in [*itertools.permutations(["model", "optimizer", "masters"])][1::2]],
    ],
)
def test_parts_may_be_loaded_in_any_order(half, order):
    """Also where the first step after that overflows, and buffers are put back."""
    whole, resumed = Parts(half), Parts(half)
    for number in range(7):
        whole.step(number)
    saved = whole.saved()
    for name in order:
        resumed.parts[name].load_state_dict(copy.deepcopy(saved[name]))
    for number in range(7, 12):
        whole.step(number)
        resumed.step(number)
    for name, part in whole.saved().items():
        torch.testing.assert_close(resumed.saved()[name], part, rtol=0.0, atol=0.0)
