"""`preamp.torch.GradScaler` beside `torch.amp.GradScaler`: the same calls, the same numbers."""

import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import (
    Dynamic,
    InexactScale,
    PolicyError,
    ScaleExhausted,
    Static,
    Tolerant,
    Trace,
    dialects,
    simulate,
)
from preamp.errors import UsageError
from preamp.torch import GradScaler, ShardedGradScaler

INF, NAN = float("inf"), float("nan")
SETTINGS = {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
AnyScaler = torch.amp.GradScaler


def ours(**changes) -> GradScaler:
    return GradScaler("cpu", **{**SETTINGS, **changes})


def theirs(**changes) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{**SETTINGS, **changes})


class Training:
    """A small training whose gradients can be made to overflow."""

    def __init__(self, scaler: AnyScaler, optimizer: str = "SGD", **options) -> None:
        torch.manual_seed(0)
        self.scaler = scaler
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.1, **options)

    def step(self, factor: float = 1.0, *, unscale: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(4, 3)).square().mean() * factor
        self.scaler.scale(loss).backward()
        if unscale:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def values(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


optimizers = st.sampled_from([("SGD", {}), ("AdamW", {}), ("AdamW", {"fused": True})])
factors = st.sampled_from([1.0, 1.0, 1.0, INF, NAN])


@settings(max_examples=20, deadline=None)
@given(
    script=st.lists(st.tuples(factors, st.booleans()), max_size=11),  # our bounds are 4**11 away
    growth=st.sampled_from([2.0, 1.5, 4.0]),
    backoff=st.sampled_from([0.5, 0.25, 0.7]),
    interval=st.integers(1, 5),
    optimizer=optimizers,
)
@pytest.mark.filterwarnings("ignore::preamp.InexactScale")
def test_every_scale_parameter_and_checkpoint_equals_the_original(
    script, growth, backoff, interval, optimizer
):
    name, options = optimizer
    changes = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    a, b = Training(ours(**changes), name, **options), Training(theirs(**changes), name, **options)
    for factor, unscale in script:
        for training in (a, b):
            training.step(factor, unscale=unscale)
        assert a.scaler.get_scale() == b.scaler.get_scale()
        assert a.values() == b.values()
        ours_of, theirs_of = a.scaler.state_dict(), b.scaler.state_dict()
        assert list(ours_of.pop("preamp_state")) == ["steps"]
        assert ours_of == theirs_of


def loss() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(2)).sum()


def backward(scaler: AnyScaler) -> torch.optim.Optimizer:
    training = Training(scaler)
    scaler.scale(training.model(torch.ones(1, 3)).sum()).backward()
    return training.optimizer


def stepped_twice(scaler: AnyScaler) -> None:
    optimizer = backward(scaler)
    scaler.step(optimizer)
    scaler.step(optimizer)


def unscaled_twice(scaler: AnyScaler) -> None:
    optimizer = backward(scaler)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscaled_after_step(scaler: AnyScaler) -> None:
    optimizer = backward(scaler)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def updated_without_a_check(scaler: AnyScaler) -> None:
    scaler.scale(loss())
    scaler.update()


def updated_with_two_numbers(scaler: AnyScaler) -> None:
    scaler.scale(loss())
    scaler.update(torch.tensor([4.0, 4.0]))


def updated_with_a_parameter(scaler: AnyScaler) -> None:
    scaler.scale(loss())
    scaler.update(torch.nn.Parameter(torch.tensor(4.0)))


def pickled_between_step_and_update(scaler: AnyScaler) -> None:
    scaler.step(backward(scaler))
    pickle.dumps(scaler)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda scaler: scaler.step(Training(scaler).optimizer),
        lambda scaler: scaler.unscale_(Training(scaler).optimizer),
        lambda scaler: scaler.update(),
        lambda scaler: scaler.update(4.0),
        updated_with_two_numbers,
        updated_with_a_parameter,
        lambda scaler: scaler.scale(3.0),
        lambda scaler: scaler.load_state_dict({}),
        lambda scaler: scaler.load_state_dict({"scale": 1.0}),
        stepped_twice,
        unscaled_twice,
        unscaled_after_step,
        updated_without_a_check,
        pickled_between_step_and_update,
    ],
)
def test_misuse_raises_what_the_original_raises(misuse: Callable[[AnyScaler], None]):
    with pytest.raises(Exception) as their_error:  # noqa: PT011  # whichever it is
        misuse(theirs())
    with pytest.raises(type(their_error.value)) as our_error:
        misuse(ours())
    ours_said, theirs_said = (" ".join(str(error.value).split()) for error in (our_error, their_error))
    assert ours_said.startswith(theirs_said)  # but for a line that torch 2.6 broke


@pytest.mark.parametrize("changes", [{"growth_factor": 1.0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}])
def test_a_constructor_refuses_what_the_original_refuses(changes):
    with pytest.raises(AssertionError) as their_error:
        theirs(**changes)
    with pytest.raises(AssertionError, match=str(their_error.value)):
        ours(**changes)
    assert ours(enabled=False, **changes).get_scale() == theirs(enabled=False, **changes).get_scale()


@pytest.mark.parametrize(
    "changes",
    [
        {"init_scale": 0.0},
        {"init_scale": NAN},
        {"init_scale": INF},
        {"growth_interval": 0},
        {"backoff_factor": -1.0},
    ],
)
def test_a_constructor_refuses_what_cannot_work(changes):
    theirs(**changes)
    with pytest.raises(PolicyError, match=next(iter(changes))):
        ours(**changes)


@pytest.mark.parametrize("scale", [0.0, INF, NAN, -1.0, 1e-46, 1e39])
def test_a_bad_scale_is_refused_and_changes_nothing(scale):
    training = Training(ours())
    training.step()
    before = training.scaler.state_dict()
    with pytest.raises(PolicyError, match=r"scale=.* Write scale="):
        training.scaler.update(scale)
    with pytest.raises(PolicyError, match=r"scale=.* Write scale="):
        training.scaler.load_state_dict({**before, "scale": scale, "growth_interval": 7})
    assert training.scaler.state_dict() == before


@pytest.mark.parametrize("scale", [4.0, 4, torch.tensor(4.0), torch.tensor([4.0])])
def test_update_accepts_a_new_scale(scale):
    scaler = ours()
    scaler.scale(loss())
    scaler.update(scale)
    assert scaler.get_scale() == scaler.scale(torch.ones(())).item() == 4.0


def test_setters_change_the_rule():
    training = Training(ours())
    training.scaler.set_growth_interval(1)
    training.scaler.set_growth_factor(4.0)
    training.scaler.set_backoff_factor(0.25)
    training.step()
    assert training.scaler.get_scale() == 2.0**12
    training.step(INF)
    assert training.scaler.get_scale() == 2.0**10
    with pytest.raises(PolicyError, match=r"growth_factor=0\.5"):
        training.scaler.set_growth_factor(0.5)
    with pytest.raises(PolicyError, match="Static"):
        GradScaler("cpu", policy=Static(8.0)).set_growth_factor(4.0)


def test_a_lowered_interval_still_grows():
    """The original compares with ==: past a lowered interval it never grows again."""
    scalers = [ours(growth_interval=10), theirs(growth_interval=10)]
    for scaler in scalers:
        training = Training(scaler)
        for _ in range(5):
            training.step()
        scaler.set_growth_interval(3)
        for _ in range(4):
            training.step()
    assert scalers[0].get_scale() > 2.0**10
    assert scalers[1].get_scale() == 2.0**10


def test_the_scale_never_reaches_zero():
    """The original's does, and its next clean step writes inf into the parameters."""
    for make, survives in ((ours, True), (theirs, False)):
        training = Training(make(init_scale=2.0**-10))
        for _ in range(150):
            training.step(INF)
        training.step()
        assert torch.tensor(training.values()).isfinite().all() == survives


def test_a_disabled_scaler_stays_out_of_the_way():
    scaler = GradScaler("cpu", enabled=False)
    value = torch.ones(())
    assert scaler.scale(value) is value
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    training = Training(scaler)
    before = training.values()
    training.step()
    assert training.values() != before
    assert not scaler.last_step.skipped  # the same loop runs with and without scaling


def unscaled_nothing(scaler: AnyScaler) -> None:
    training = Training(scaler)
    scaler.scale(loss())
    scaler.unscale_(training.optimizer)
    scaler.update()


def stepped_without_the_scaler(scaler: AnyScaler) -> None:
    backward(scaler).step()
    scaler.update()


def updated_twice(scaler: AnyScaler) -> None:
    scaler.step(backward(scaler))
    scaler.update()
    scaler.update()


@pytest.mark.parametrize(
    ("misuse", "remedy"),
    [
        (stepped_twice, "Call scaler.update() once per iteration"),
        (unscaled_twice, "Call it once for each optimizer and iteration"),
        (unscaled_after_step, "scaler.unscale_(optimizer) between backward() and scaler.step(optimizer)"),
        (unscaled_nothing, "All gradients of SGD were None. Write scaler.step(optimizer)"),
        (stepped_without_the_scaler, "Write scaler.step(optimizer) instead of optimizer.step()"),
        (updated_twice, "call update() once per iteration"),
        (lambda scaler: scaler.scale(3.0), "3.0 is not one. Write scaler.scale(loss)"),
    ],
)
def test_misuse_is_told_what_to_write_after_the_originals_sentence(misuse, remedy):
    with pytest.raises(Exception) as their_error:  # noqa: PT011  # whichever it is
        misuse(theirs())
    with pytest.raises(type(their_error.value)) as our_error:
        misuse(ours())
    said = str(our_error.value).removeprefix(str(their_error.value))
    assert said != str(our_error.value)
    assert remedy in said


def test_a_step_that_was_refused_is_not_called_one_without_gradients():
    scaler = ours()
    optimizer = backward(scaler)
    scaler.update(4.0)
    scaler.scale(loss())
    scaler.update(8.0)
    with pytest.raises(UsageError, match="changed the scale"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match=r"No optimizer was stepped or unscaled through the scaler"):
        scaler.update()


def test_without_cuda_the_default_device_disables_as_the_original_does():
    if torch.cuda.is_available():
        assert GradScaler().is_enabled()
        return
    for kind in (GradScaler, ShardedGradScaler):
        with pytest.warns(UserWarning, match="CUDA is not available") as told:
            assert not kind().is_enabled()
        with pytest.warns(UserWarning, match="CUDA is not available") as told_by_theirs:
            torch.amp.GradScaler()
        ours_said, theirs_said = (str(said[0].message) for said in (told, told_by_theirs))
        assert ours_said.startswith(theirs_said)
        assert f'Write {kind.__name__}("cpu")' in ours_said


@pytest.mark.parametrize(
    "policy", [Static(2.0**8), Tolerant(init_scale=2.0**8), dialects.MEGATRON, dialects.FLAX]
)
def test_any_policy_trains(policy):
    training = Training(GradScaler("cpu", policy=policy))
    reference = Training(torch.amp.GradScaler("cpu", enabled=False))
    script = [1.0, 1.0, INF, INF, 1.0]
    for factor in script:
        training.step(factor)
        if factor == 1.0:
            reference.step()
    assert training.values() == reference.values()
    assert training.scaler.get_scale() == simulate(policy, [factor == INF for factor in script])[-1].new_scale


def test_a_static_scale_cannot_be_set_to_another():
    training = Training(GradScaler("cpu", policy=Static(8.0)))
    training.step()
    training.scaler.scale(torch.ones(1))
    with pytest.raises(PolicyError, match=r"set to 64\.0: Static\(scale=8\.0\) has only 8\.0\. Write"):
        training.scaler.update(64.0)
    assert training.scaler.get_scale() == 8.0
    training.scaler.update(8.0)


def test_a_policy_and_settings_exclude_each_other():
    with pytest.raises(PolicyError, match="both given"):
        GradScaler("cpu", init_scale=8.0, policy=Static(8.0))


def test_the_last_step_says_what_happened():
    trace = Trace()
    training = Training(ours(on_step=trace))
    assert training.scaler.last_step is None
    for factor in (1.0, NAN, 1.0):
        before = training.values()
        training.step(factor)
        assert repr(training.scaler.last_step) == repr(trace[-1])  # NaN is not equal to itself
        assert (training.values() == before) == training.scaler.last_step.skipped
    assert [(s.index, s.scale, s.skipped, s.new_scale) for s in trace] == [
        (0, 1024.0, False, 1024.0),
        (1, 1024.0, True, 512.0),
        (2, 512.0, False, 512.0),
    ]


def test_giving_up_leaves_a_record_and_the_parameters():
    trace = Trace()
    policy = Dynamic(init_scale=2.0, min_scale=1.0, at_floor="raise")
    training = Training(GradScaler("cpu", policy=policy, on_step=trace))
    before = training.values()
    training.step(INF)
    with pytest.raises(ScaleExhausted, match="2 overflows"):
        training.step(INF)
    assert [step.skipped for step in trace] == [True, True]
    assert training.values() == before
    training.step()  # the caller may go on
    assert training.values() != before


def test_a_scale_set_by_hand_outside_the_bounds_moves_as_the_original_does():
    for scale, factor in ((2.0**-20, INF), (2.0**40, 1.0)):
        scales = []
        for make in (ours, theirs):
            training = Training(make(growth_interval=1))
            training.step()
            training.scaler.update(scale)
            training.step(factor)
            scales.append(training.scaler.get_scale())
        mine, original = scales
        assert (mine - scale) * (original - scale) >= 0, (mine, original)


@pytest.mark.parametrize(
    "write", [lambda s: s._scale.fill_(128.0), lambda s: setattr(s, "_scale", torch.tensor(128.0))]
)
def test_what_other_code_writes_into_the_scale_is_in_force(write):
    """Training scripts raise a floor in this way."""
    scalers = [ours(), theirs()]
    for scaler in scalers:
        training = Training(scaler)
        training.step()
        write(scaler)
        training.step(INF)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 64.0
    assert scalers[0].last_step.scale == 128.0


def test_a_step_that_ends_with_a_scale_set_by_hand_is_recorded():
    trace = Trace()
    training = Training(ours(on_step=trace))
    training.step()
    training.scaler.scale(training.model(torch.ones(1, 3)).sum() * INF).backward()
    training.scaler.step(training.optimizer)
    training.scaler.update(8.0)
    training.scaler.update(4.0)  # no step in between, none recorded
    assert [(step.index, step.skipped, step.new_scale) for step in trace] == [
        (0, False, 1024.0),
        (1, True, 8.0),
    ]
    assert training.scaler.get_scale() == 4.0


def test_a_backoff_factor_that_is_set_is_used_by_every_dialect():
    training = Training(GradScaler("cpu", policy=dialects.JMP))
    training.scaler.set_backoff_factor(0.25)
    training.step(INF)
    assert training.scaler.get_scale() == 2.0**13


@pytest.mark.parametrize(
    "wrong", [{"policy": Dynamic}, {"policy": "torch"}, {"policy": {}}, {"on_step": "t.jsonl"}]
)
def test_what_is_no_policy_and_no_callable_is_refused(wrong):
    with pytest.raises(PolicyError, match=rf"{next(iter(wrong))}=.* Write {next(iter(wrong))}="):
        GradScaler("cpu", **wrong)


def test_a_factor_that_rounds_is_told_once():
    with pytest.warns(InexactScale) as told:
        scaler = GradScaler("cpu", growth_factor=1.5)
    assert [warning.filename for warning in told] == [__file__]
    scaler.load_state_dict(scaler.state_dict())  # warnings are errors here
    GradScaler("cpu", policy=dialects.FLAX).set_growth_interval(3)


@pytest.mark.parametrize("scale", [0.0, INF, NAN])
def test_a_ruinous_scale_written_by_other_code_reaches_no_parameter(scale):
    training = Training(ours())
    training.step()
    before = training.values()
    training.scaler._scale.fill_(scale)
    with pytest.raises(PolicyError, match="scale="):
        training.step()
    assert training.values() == before


def test_an_optimizer_that_nobody_keeps_is_not_taken_for_the_next_one():
    """Until `update` an `id` must not come twice."""
    scaler, seen = ours(), set()
    for _ in range(5):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        seen.add(id(optimizer))
        del optimizer
        gc.collect()
    assert len(seen) == 5


@pytest.mark.parametrize("capturable", [False, True])
def test_a_scale_by_hand_is_rounded_to_float32(capturable):
    scaler, weight = GradScaler("cpu", capturable=capturable), torch.ones(1, requires_grad=True)
    scaler.scale(weight.sum())
    scaler.update(1000.1)
    assert scaler.get_scale() == torch.tensor(1000.1).item()
