"""Faults planted in long trainings: none gets through, and the record tells each of them exactly."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import PolicyError, Trace
from preamp.torch import GradScaler

from .pairs import INF, NAN, contents, make, ours, state_of

OPTIMIZERS = {"SGD": {"momentum": 0.9}, "AdamW": {}, "AdamW fused": {}, "Adagrad fused": {}}
SCALE = 2.0**10


class Training:
    """A small network, registered in another order than it runs, whose gradients can be poisoned."""

    def __init__(self, kind="SGD", scaler=None, *, named=True):
        torch.manual_seed(0)
        last, middle, first = torch.nn.Linear(6, 2), torch.nn.Linear(8, 6), torch.nn.Linear(4, 8)
        self.model = torch.nn.ModuleDict({"last": last, "middle": middle, "first": first})
        self.optimizer = make(
            kind,
            self.model.named_parameters() if named else self.model.parameters(),
            lr=0.01,
            **OPTIMIZERS[kind],
        )
        self.scaler = scaler or GradScaler("cpu", init_scale=SCALE, growth_interval=40)
        self.poison, self.reached = {}, []
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self.poisoned(gradient, name))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.reached.append(name))

    def poisoned(self, gradient, name):
        if name not in self.poison:
            return gradient
        changed = gradient.clone()
        changed.view(-1)[len(name) % gradient.numel()] = self.poison[name]
        return changed

    def step(self, number, poison=(), **limits):
        self.poison, self.reached = dict(poison), []
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 4, generator=generator)
        self.optimizer.zero_grad()
        hidden = torch.tanh(self.model["middle"](torch.tanh(self.model["first"](x))))
        loss = (self.model["last"](hidden) - x[:, :2].sin()).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, **limits)
        self.scaler.update()

    def numbers(self):
        return [p.detach() for p in self.model.parameters()] + [
            value for state in self.optimizer.state.values() for value in state.values()
        ]

    def everything(self):
        return contents([p.detach() for p in self.model.parameters()]), state_of(self.optimizer)


NAMES = [name for name, _ in Training().model.named_parameters()]


def faults(seed, steps):
    """Return, for some steps, which gradients get what."""
    draw = random.Random(seed)
    planted = draw.sample(range(steps), steps // 20)
    return {
        step: {name: draw.choice([INF, -INF, NAN]) for name in draw.sample(NAMES, draw.choice([1, 1, 2, 4]))}
        for step in planted
    }


some = pytest.mark.parametrize(
    ("kind", "limits"), [("SGD", {}), ("AdamW", {"max_norm": 0.1}), ("AdamW fused", {"max_norm": 0.1})]
)


@some
@pytest.mark.parametrize("steps", [140, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_planted_fault_gets_through_and_each_is_told(kind, limits, steps):
    trace, planted = Trace(), faults(0, steps)
    training = Training(kind, ours(on_step=trace, init_scale=SCALE, growth_interval=40))
    scale, good = SCALE, 0
    for number in range(steps):
        training.step(number, planted.get(number, ()), **limits)
        assert all(value.isfinite().all() for value in training.numbers())
        told = trace[number]
        assert (told.index, told.scale, told.skipped) == (number, scale, number in planted)
        assert list(told.culprits) == [name for name in training.reached if name in training.poison]
        good = 0 if told.skipped else good + 1
        scale *= 0.5 if told.skipped else 2.0 if good == 40 else 1.0
        scale, good = max(scale, training.scaler.policy.min_scale), good % 40
        assert told.new_scale == scale
        assert training.scaler.last_step == told
    assert sum(step.skipped for step in trace) == len(planted) == steps // 20


@some
def test_the_run_is_the_one_without_the_faulty_steps(kind, limits):
    """With a scale that is a power of two, a skipped step leaves no trace in any bit."""
    planted = faults(2, 60)
    a, b = Training(kind), Training(kind)
    for number in range(60):
        a.step(number, planted.get(number, ()), **limits)
        if number not in planted:
            b.scaler.scale(torch.zeros(()))
            b.scaler.update(a.scaler.last_step.scale)
            b.step(number, **limits)
    assert a.everything() == b.everything()


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(list(OPTIMIZERS)),
    seed=st.integers(0, 10**6),
    at=st.integers(0, 40),
    clip=st.booleans(),
)
def test_a_run_that_is_resumed_goes_on_to_the_last_bit(tmp_path_factory, kind, seed, at, clip):
    limits, planted = {"max_norm": 0.1} if clip else {}, faults(seed, 40)
    options = {"init_scale": SCALE, "growth_interval": 7}
    whole = Training(kind, ours(on_step=Trace(), **options))
    resumed = Training(kind, ours(on_step=Trace(), **options))
    for number in range(40):
        if number == at:
            path = tmp_path_factory.mktemp("checkpoint") / "run.pt"
            parts = resumed.model, resumed.optimizer, resumed.scaler
            torch.save([part.state_dict() for part in parts], path)
            resumed = Training(kind, ours(on_step=Trace(), **options))
            for part, state in zip(
                (resumed.model, resumed.optimizer, resumed.scaler), torch.load(path), strict=True
            ):
                part.load_state_dict(state)
        for training in (whole, resumed):
            training.step(number, planted.get(number, ()), **limits)
        assert resumed.scaler.last_step == whole.scaler.last_step
    assert resumed.everything() == whole.everything()
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()


def test_culprits_have_the_names_that_the_optimizer_knows():
    named, plain = Training(), Training(named=False)
    poison = {"last.bias": NAN, "first.weight": INF, "middle.bias": INF}
    for training in (named, plain):
        training.step(0, poison)
    order = [name for name in named.reached if name in poison]
    assert order[0] == "last.bias"
    assert list(named.scaler.last_step.culprits) == order
    expressions = [f"param_groups[0]['params'][{NAMES.index(name)}]" for name in order]
    assert list(plain.scaler.last_step.culprits) == expressions
    groups = plain.optimizer.param_groups
    found = [eval(expression, {"param_groups": groups}) for expression in expressions]
    assert found == [dict(plain.model.named_parameters())[name] for name in order]


class Wired(torch.nn.Module):
    """Parameters that a drawn wiring uses, some of them several times, some not at all."""

    def __init__(self, wiring):
        super().__init__()
        self.wiring = wiring
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.eye(2)) for _ in range(6)])

    def forward(self, x):
        values = [x]
        for weight, left, right, how in self.wiring:
            a, b = values[left % len(values)], values[right % len(values)]
            product = a @ self.weights[weight]
            values.append({"add": product + b, "mul": product * b, "tanh": product.tanh()}[how])
        return sum(value.sum() for value in values[-2:])


wirings = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(0, 9), st.integers(0, 9), st.sampled_from(["add", "mul", "tanh"])
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=40, deadline=None)
@given(wiring=wirings, another=wirings, seed=st.integers(0, 99))
def test_culprits_come_in_the_order_in_which_backward_reaches_them(wiring, another, seed):
    """Also when the graph is another one after an overflow."""
    model, reached = Wired(wiring), []
    order = list(enumerate(model.weights))
    random.Random(seed).shuffle(order)
    optimizer = torch.optim.SGD([(str(index), weight) for index, weight in order], lr=0.1)
    for index, weight in order:
        weight.register_hook(lambda gradient: gradient * INF)
        weight.register_post_accumulate_grad_hook(lambda _, name=str(index): reached.append(name))
    scaler = ours()
    for model.wiring in (wiring, another):
        reached.clear()
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 2))).backward()
        scaler.step(optimizer)
        scaler.update()
        assert list(scaler.last_step.culprits) == reached


def test_of_several_optimizers_each_has_its_own_part_of_the_step():
    a, b, idle = Training(), Training("AdamW fused"), Training()
    b.scaler = a.scaler
    seen = []
    a.scaler.on_step = seen.append
    for number, (poison_a, poison_b) in enumerate(
        [({}, {}), ({"last.bias": NAN}, {}), ({}, {"first.bias": INF})]
    ):
        for training, poison in ((a, poison_a), (b, poison_b)):
            training.poison = poison
            training.optimizer.zero_grad()
            x = torch.ones(1, 4)
            hidden = training.model["middle"](training.model["first"](x))
            a.scaler.scale(training.model["last"](hidden).sum()).backward()
            a.scaler.step(training.optimizer, max_norm=1e3)
            assert a.scaler.last_step_of(training.optimizer).skipped == bool(poison)
        a.scaler.update()
        parts = [a.scaler.last_step_of(training.optimizer) for training in (a, b)]
        together = a.scaler.last_step
        assert seen[-1] == together
        assert len(seen) == number + 1
        assert together.skipped == bool(poison_a or poison_b)
        assert [part.skipped for part in parts] == [bool(poison_a), bool(poison_b)]
        assert parts[0].culprits + parts[1].culprits == (*poison_a, *poison_b)
        whose = [
            *[f"optimizers[0].{name}" for name in poison_a],
            *[f"optimizers[1].{name}" for name in poison_b],
        ]
        assert list(together.culprits) == whose
        if not together.skipped:
            squares = sum(part.grad_norm**2 for part in parts)
            assert together.grad_norm == pytest.approx(squares**0.5)
        assert {part.new_scale for part in parts} == {together.new_scale}
    assert a.scaler.last_step_of(idle.optimizer) is None


@pytest.mark.parametrize("more", [None, "x", NAN, {"steps": NAN}, {"steps": -1}, {"steps": "2"}])
def test_what_we_did_not_save_is_refused_and_changes_nothing(more):
    scaler = ours()
    before = scaler.state_dict()
    with pytest.raises(PolicyError, match=r"preamp_state=.* Leave it out"):
        scaler.load_state_dict({**before, "scale": 8.0, "preamp_state": more})
    assert scaler.state_dict() == before
