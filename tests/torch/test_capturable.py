"""`capturable=True` reads nothing and does what the scaler does that reads; inside `torch.compile` too."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import Dynamic, Headroom, PolicyError, Static, Tolerant, Trace, dialects
from preamp.errors import UsageError
from preamp.torch import GradScaler

from .pairs import INF, NAN, contents, give, make, ours, state_of, weights

OPTIMIZERS = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "SGD fused momentum": {"momentum": 0.9},
    "Adam amsgrad": {"amsgrad": True},
    "AdamW": {},
    "AdamW fused": {},
    "NAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "Adagrad fused": {},
    "ASGD": {},
    "Adafactor": {},
    **({"Muon": {}} if hasattr(torch.optim, "Muon") else {}),  # new in 2.9
}
POLICIES = {
    "torch's": {"init_scale": 2.0**10, "growth_interval": 3},
    "without bounds": {"policy": dialects.TORCH(init_scale=2.0**10, growth_interval=3)},
    "hysteresis": {"policy": Dynamic(init_scale=2.0**10, hysteresis=2, growth_interval=2)},
    "megatron": {"policy": dialects.MEGATRON(initial_scale=2.0**10, hysteresis=2, growth_interval=2)},
    "tolerant": {"policy": Tolerant(init_scale=2.0**10, tolerance=0.3, growth_interval=3)},
    "static": {"policy": Static(2.0**10)},
    "headroom": {"policy": Headroom(init_scale=2.0**10, memory=2, patience=4)},
}
kinds = pytest.mark.parametrize("kind", list(OPTIMIZERS))
EXAMPLES = 40
scripts = st.lists(st.sampled_from([1.0, 1.0, 1.0, INF, NAN]), min_size=1, max_size=10)


class Training:
    """Two weights; the second gets no gradient at first."""

    def __init__(self, kind, scaler):
        name, *words = kind.split()
        self.scaler = scaler
        self.matrix = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).reshape(4, 3))
        self.late = torch.nn.Parameter(torch.ones(2, 2))
        fused = " fused" if "fused" in words else ""
        self.optimizer = make(name + fused, [self.matrix, self.late], lr=0.1, **OPTIMIZERS[kind])

    def step(self, number, factor=1.0, *, late=False, **limits):
        self.optimizer.zero_grad()
        loss = (self.matrix - number).square().mean() + (self.late.square().sum() if late else 0.0)
        self.scaler.scale(loss * factor).backward()
        self.scaler.step(self.optimizer, **limits)
        self.scaler.update()

    def values(self):
        return contents([self.matrix.detach(), self.late.detach()])


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    script=scripts,
    kind=st.sampled_from(list(OPTIMIZERS)),
    options=st.sampled_from(list(POLICIES.values())),
    limits=st.sampled_from([{}, {"max_norm": 2.0**-4}, {"max_value": 0.25}]),
    late_from=st.integers(1, 5),
)
def test_every_step_is_that_of_a_scaler_that_reads(script, kind, options, limits, late_from):
    if kind == "SGD fused momentum":
        late_from = 99  # PyTorch's own takes no late gradient
    a = Training(kind, GradScaler("cpu", capturable=True, **options))
    b = Training(kind, GradScaler("cpu", **options))
    for number, factor in enumerate(script):
        for training in (a, b):
            training.step(number, factor, late=number >= late_from, **limits)
        mine, other = a.scaler.last_step, b.scaler.last_step
        assert mine._replace(grad_norm=None, loss=None) == other._replace(grad_norm=None, loss=None)
        assert str(mine.loss) == str(other.loss)  # NaN too
        assert (mine.grad_norm is None) == bool(mine.skipped or "max_norm" not in limits)
        assert a.scaler.get_scale() == b.scaler.get_scale()
        rounds = {"rel": 1e-4, "abs": 1e-6} if "max_norm" in limits else {"rel": 0.0, "abs": 0.0}
        for x, y in zip(a.values(), b.values(), strict=True):
            assert torch.allclose(*map(torch.tensor, (x, y)), rtol=rounds["rel"], atol=rounds["abs"])
        with torch.no_grad():  # so that what clipping rounds another way does not add up
            torch._foreach_copy_([b.matrix, b.late], [a.matrix, a.late])
    assert a.scaler.state_dict() == b.scaler.state_dict()


CHANGES = {
    "nothing": lambda scaler: None,
    "scale by hand": lambda scaler: scaler.update(64.0),
    "scale beyond the bounds": lambda scaler: scaler.update(2.0**40),
    "scale by other code": lambda scaler: scaler._scale.fill_(2.0**7),
    "scale beyond the bounds by other code": lambda scaler: scaler._scale.fill_(2.0**40),
    "another scale tensor": lambda scaler: setattr(scaler, "_scale", torch.tensor(2.0**9)),
    "tracker by other code": lambda scaler: scaler._growth_tracker.fill_(5),
    "interval": lambda scaler: scaler.set_growth_interval(1 + scaler.get_growth_interval() % 3),
    "growth": lambda scaler: scaler.set_growth_factor(4.0),
    "backoff": lambda scaler: scaler.set_backoff_factor(0.25),
    "checkpoint": lambda scaler: scaler.load_state_dict(scaler.state_dict()),
}


@pytest.mark.filterwarnings("ignore:the checkpoint:UserWarning")  # which the scale by hand is beyond
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    script=st.lists(
        st.tuples(st.sampled_from([1.0, 1.0, INF]), st.sampled_from(list(CHANGES))), min_size=1, max_size=12
    ),
    options=st.sampled_from([POLICIES["torch's"], POLICIES["without bounds"], POLICIES["hysteresis"]]),
)
def test_what_is_changed_midway_is_in_force(script, options):
    a = Training("SGD", GradScaler("cpu", capturable=True, **options))
    b = Training("SGD", GradScaler("cpu", **options))
    for training in (a, b):
        training.step(0)
    for number, (factor, change) in enumerate(script):
        for training in (a, b):
            CHANGES[change](training.scaler)
            training.step(number, factor)
        assert a.scaler.state_dict() == b.scaler.state_dict()
        assert a.scaler.last_step[:5] == b.scaler.last_step[:5]


@pytest.mark.parametrize(("start", "factor"), [(2.0**-13, INF), (2.0**31, 1.0)])
def test_the_scale_stays_within_bounds(start, factor):
    training = Training("SGD", GradScaler("cpu", init_scale=start, growth_interval=1, capturable=True))
    for _ in range(4):
        training.step(0, factor)
    assert training.scaler.get_scale() == (2.0**-14 if factor == INF else 2.0**32)


def test_a_count_that_was_restored_beyond_its_interval_still_grows():
    training = Training("SGD", ours(capturable=True))
    training.scaler.load_state_dict({**training.scaler.state_dict(), "_growth_tracker": 7})
    training.step(0)
    assert training.scaler.get_scale() == 2048.0


@kinds
def test_an_overflow_on_the_very_first_step_leaves_the_state_of_a_beginner(kind):
    """Also of a parameter whose first gradient comes late, and overflows."""
    factor = INF
    late = kind != "SGD fused momentum"
    a, b = Training(kind, ours(capturable=True)), Training(kind, ours(policy=Static(2.0**10)))
    before = a.values()
    a.step(0, factor)
    a.step(0, factor)
    assert a.values() == before
    for training, numbers in ((a, (0, 1)), (b, (0, 1))):
        for number in numbers:
            training.step(number)
            if late and training is a:
                training.step(number, factor, late=True)
        training.step(2, late=late)
    assert a.values() == b.values()
    assert state_of(a.optimizer) == state_of(b.optimizer)


def test_groups_may_differ_in_whether_they_have_a_state():
    states = []
    for capturable in (True, False):
        early, late, other = weights(3)
        groups = [{"params": [early, late], "momentum": 0.9}, {"params": [other]}]
        optimizer, scaler = torch.optim.SGD(groups, lr=0.5), ours(capturable=capturable)
        for factor, loss in ((1.0, early + other), (INF, late), (1.0, early + late + other)):
            optimizer.zero_grad()
            scaler.scale(loss.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        states.append((contents([early.detach(), late.detach(), other.detach()]), state_of(optimizer)))
    assert states[0] == states[1]


def test_priming_runs_no_hook_and_keeps_gradients_and_parameters():
    training, ran = Training("AdamW", ours(capturable=True)), []
    training.optimizer.register_step_post_hook(lambda *_: ran.append(training.matrix.detach().clone()))
    gradient = torch.ones(4, 3)
    give(training.scaler, training.matrix, gradient)
    training.scaler.step(training.optimizer)
    assert len(ran) == 1
    assert training.matrix.grad is gradient


def test_what_cannot_be_told_apart_later_is_refused():
    (weight,) = weights()
    optimizer, scaler = make("SGD", [weight], momentum=0.9, dampening=0.5), ours(capturable=True)
    give(scaler, weight, 1024.0)
    with pytest.raises(UsageError, match=r"dampening.* Write dampening=0"):
        scaler.step(optimizer)
    assert torch.equal(weight, torch.zeros(3))

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                self.state[weight]["calls"] = self.state[weight].get("calls", 0) + 1

    scaler = ours(capturable=True)
    give(scaler, weight, 1024.0)
    with pytest.raises(UsageError, match="the initial state of Counting is not known"):
        scaler.step(Counting([weight]))

    table = torch.nn.Embedding(3, 2, sparse=True)
    scaler.scale(table(torch.tensor([0, 2])).sum()).backward()
    with pytest.raises(UsageError, match="SparseAdam keeps 'step' as a Python number"):
        scaler.step(torch.optim.SparseAdam(table.parameters()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_step": Trace()},
        {"policy": Dynamic(at_floor="raise", min_scale=1.0)},
        {"policy": dialects.DEEPSPEED},
    ],
)
def test_what_needs_a_read_is_refused(wrong):
    with pytest.raises(PolicyError, match=rf"capturable=True reads nothing, but {next(iter(wrong))}="):
        GradScaler("cpu", capturable=True, **wrong)


def test_a_closure_is_refused():
    training = Training("SGD", ours(capturable=True))
    training.scaler.scale(torch.zeros(()))
    for call in (lambda: None,), ():
        with pytest.raises(UsageError, match=r"closure.* Write GradScaler\(\.\.\.\) without capturable"):
            training.scaler.step(training.optimizer, *call, **({} if call else {"closure": lambda: None}))


@settings(max_examples=15, deadline=None)
@given(
    script=scripts,
    at=st.integers(0, 9),
    options=st.sampled_from(list(POLICIES.values())),
    first=st.booleans(),
)
def test_checkpoints_travel_between_capturable_and_not(script, at, options, first):
    whole = Training("AdamW", GradScaler("cpu", **options))
    half = Training("AdamW", GradScaler("cpu", capturable=first, **options))
    for number, factor in enumerate(script):
        if number == at:
            saved = half.scaler.state_dict()
            half.scaler = GradScaler("cpu", capturable=not first, **options)
            if number % 2:  # loaded after it was used, too
                half.scaler.scale(torch.zeros(()))
            half.scaler.load_state_dict(saved)
        for training in (whole, half):
            training.step(number, factor)
    assert half.scaler.state_dict() == whole.scaler.state_dict()
    assert half.values() == whole.values()


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_go_on_where_the_original_was(twin_of):
    training = Training("SGD", ours(capturable=True))
    for number, factor in enumerate([1.0, INF, 1.0, 1.0]):
        training.step(number, factor)
    twin = copy.deepcopy(training)
    twin.scaler = twin_of(training.scaler)
    assert twin.scaler.last_step == training.scaler.last_step
    for one in (training, twin):
        one.step(9)
    assert twin.scaler.state_dict() == training.scaler.state_dict()
    assert twin.scaler.last_step == training.scaler.last_step
    assert twin.scaler.get_scale() == 1024.0  # grown by the third clean step in a row


class Reads(TorchDispatchMode):
    """Counts reads to the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_the_last_step_is_read_when_it_is_asked_for_and_is_of_its_time():
    training = Training("SGD", ours(capturable=True))
    with Reads() as reads:
        training.step(0)
        training.step(1, NAN)
    assert reads.count == 0
    with Reads() as reads:
        told = training.scaler.last_step
    assert reads.count
    assert told[:5] == (1, 1024.0, False, True, 512.0)
    assert told.culprits == ("param_groups[0]['params'][0]",)
    training.step(2)
    training.scaler.update(4.0)
    training.scaler.scale(torch.ones(())).item()
    assert training.scaler.last_step[:5] == (2, 512.0, True, False, 512.0)
    assert training.scaler.get_scale() == 4.0
    training.step(3)
    assert training.scaler.last_step.index == 3
    assert training.scaler.last_step_of(training.optimizer) == training.scaler.last_step


def test_it_is_there_between_step_and_update_and_of_each_optimizer():
    scaler = ours(capturable=True)
    good, bad = Training("SGD", scaler), Training("AdamW fused", scaler)
    for training, factor in ((good, 1.0), (bad, INF)):
        scaler.scale(training.matrix.square().sum() * factor).backward()
        scaler.step(training.optimizer)
        assert scaler.last_step.skipped == (factor == INF)
        assert scaler.last_step.new_scale is None
    scaler.update()
    assert scaler.last_step.skipped
    assert not scaler.last_step_of(good.optimizer).skipped
    assert scaler.last_step_of(bad.optimizer).skipped
    assert scaler.get_scale() == 512.0


@pytest.fixture
def dynamo():
    """Every graph is compiled once; a second compilation is an error."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield counters
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "backend", "limits", "rule"),
    [
        ("SGD momentum", "eager", {}, "hysteresis"),
        ("SGD", "eager", {}, "tolerant"),
        ("AdamW", "eager", {"max_norm": 0.5}, "headroom"),
        ("SGD", "aot_eager", {"max_norm": 0.5, "max_value": 0.3}, "torch's"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_step_and_update_compile_to_one_graph(dynamo, kind, backend, limits, rule):
    a, b = (Training(kind, GradScaler("cpu", capturable=one, **POLICIES[rule])) for one in (True, False))

    def finish():
        a.scaler.step(a.optimizer, **limits)
        a.scaler.update()

    compiled = torch.compile(finish, fullgraph=True, backend=backend)
    for number, factor in enumerate([1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0, 1.0, 1.0]):
        a.optimizer.zero_grad()
        a.scaler.scale((a.matrix - number).square().mean() * factor).backward()
        (finish if number == 0 else compiled)()
        b.step(number, factor, **limits)
        assert a.scaler.get_scale() == b.scaler.get_scale()
        assert a.scaler.last_step[:5] == b.scaler.last_step[:5]
        for x, y in zip(a.values(), b.values(), strict=True):
            assert torch.allclose(*map(torch.tensor, (x, y)), rtol=1e-5, atol=1e-5)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]


def test_the_first_step_is_not_to_be_compiled(dynamo):
    training = Training("AdamW", ours(capturable=True))
    training.scaler.scale(training.matrix.sum()).backward()
    before = training.values()
    # The compiler of torch 2.8 shows which error it met, and not what that says.
    with pytest.raises(Exception, match=r"Take one step before torch.compile|\(UsageError\)"):
        torch.compile(training.scaler.step, fullgraph=True, backend="eager")(training.optimizer)
    assert training.values() == before
    training.scaler.step(training.optimizer)
    assert training.values() != before


def test_a_checkpoint_is_loaded_into_the_tensors_that_a_captured_graph_writes_to():
    training = Training("SGD", GradScaler("cpu", capturable=True))
    training.step(1.0)
    tensors = {name: getattr(training.scaler._loss_scale, name) for name in ("steps", "tensor", "state")}
    saved = training.scaler.state_dict()
    training.step(2.0)
    training.scaler.load_state_dict(saved)
    for name, tensor in tensors.items():
        assert getattr(training.scaler._loss_scale, name) is tensor
    assert int(tensors["steps"]) == 1
