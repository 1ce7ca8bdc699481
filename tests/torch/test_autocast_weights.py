"""Casts of weights: used again while they are right, and never longer; `torch.autocast` beside ours."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from preamp import casting
from preamp.torch import GradScaler, autocast

from .regions import (
    BASE,
    BRAIN,
    COMPILED,
    FULL,
    HALF,
    MANY_STATES,
    RELEASE,
    Casts,
    attempt,
    by_hand,
    compiled,
    in_thread,
    linear_of_every_state,
    numbers,
    run_in,
    same,
    state,
    weight,
    without_onednn,
)

X, ONES = numbers(5, 4), torch.ones(3, 4)
TABLE = casting.DEFAULT.float32("softmax")


def edited(*args, **options):
    return autocast(*args, casting=TABLE, **options)


makes = pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["preamp", "torch"])
COMPILED_LINEAR = linear_of_every_state()  # one for all tests


@pytest.fixture(autouse=True, scope="module")
def _many_states():
    with torch._dynamo.config.patch(MANY_STATES):  # in this thread
        yield


# Precisions do not share casts


def test_regions_of_two_precisions_inside_each_other_take_their_own_casts():
    low, other, w, results = HALF, BRAIN, weight(), []
    with autocast("cpu", low):
        results.append(F.linear(X, w))
        with autocast("cpu", other):
            results.append(F.linear(X, w))
        results.append(F.linear(X, w))
    expected = [by_hand(X, w, dtype) for dtype in (low, other, low)]
    assert all(map(same, results, expected))
    gradient, expected = (torch.autograd.grad([r.sum() for r in rs], w)[0] for rs in (results, expected))
    assert same(gradient, expected)


@makes
def test_in_a_graph_regions_of_two_precisions_take_their_own_casts_in_the_original_too(region):
    """A graph casts a weight wherever it is used."""
    if RELEASE == (2, 6) and region is autocast:
        pytest.skip("PyTorch 2.6 compiles no code that makes a region")

    def run(w):
        with region("cpu", HALF):
            results = [F.linear(X, w)]
            with region("cpu", BRAIN):
                results.append(F.linear(X, w))
            return [*results, F.linear(X, w)]

    w = weight()
    results = compiled(run)(w)
    expected = [by_hand(X, w, dtype) for dtype in (HALF, BRAIN, HALF)]
    assert all(map(same, results, expected))
    gradient, expected = (torch.autograd.grad([r.sum() for r in rs], w)[0] for rs in (results, expected))
    assert gradient.dtype == FULL
    assert torch.allclose(gradient, expected, rtol=1e-2)


LEVEL = st.tuples(
    st.sampled_from(["cpu", "cpu", "xpu"]),
    st.sampled_from([HALF, BRAIN]),
    st.booleans(),
    st.sampled_from([None, True, False]),
)
NESTED = st.recursive(LEVEL, lambda inside: st.tuples(LEVEL, st.lists(inside, max_size=3)), max_leaves=8)


def used_everywhere(script, steps, linear=F.linear):
    """Use a weight wherever a region begins or ends; step an optimizer of it after some of the uses."""
    w, pending = weight(), iter(steps)
    optimizer, w.grad = torch.optim.SGD([w], lr=1.0), ONES

    def use():
        enabled, dtype, _ = state()
        assert same(linear(X, w), by_hand(X, w, dtype if enabled else FULL))
        if next(pending, False):
            optimizer.step()

    def walk(level):
        level, inside = level if isinstance(level[0], tuple) else (level, [])
        with autocast(*level):
            use()
            for one in inside:
                walk(one)
                use()

    for level in script:
        walk(level)


OFF, HALVES = (("cpu", HALF, on, None) for on in (False, True))


@settings(max_examples=50, deadline=None)
@given(script=st.lists(NESTED, min_size=1, max_size=3), steps=st.lists(st.booleans(), max_size=20))
@example([(OFF, [HALVES, HALVES])], [False, False, True])
@example([(("xpu", HALF, True, None), [HALVES, HALVES])], [False, False, True])
@example([(("cpu", BRAIN, True, None), [(("cpu", HALF, True, False), [("cpu", HALF, True, True)])])], [])
def test_wherever_a_weight_is_used_its_cast_is_that_of_the_region_and_of_the_moment(script, steps):
    used_everywhere(script, steps)
    assert state() == BASE


@settings(max_examples=5, deadline=None)
@given(script=st.lists(NESTED, min_size=1, max_size=3), steps=st.lists(st.booleans(), max_size=20))
def test_wherever_a_graph_uses_a_weight_its_cast_is_that_of_the_region_and_of_the_moment(script, steps):
    used_everywhere(script, steps, COMPILED_LINEAR)
    assert state() == BASE


# What an optimizer writes is cast again; what is written by hand is not, as in PyTorch


def stepped(name, **options):
    def step(w):
        optimizer = getattr(torch.optim, name)([w], lr=0.1, **options)

        def closure():
            w.grad = ONES.clone()
            return torch.zeros(())

        optimizer.step(closure)

    return step


def under_no_grad(write):
    def run(w):
        with torch.no_grad():
            write(w)

    return run


def assign(w, index, value):
    w[index] = value


def view_taken_with_grad(view, write):
    def run(w):
        taken = view(w)
        with torch.no_grad():
            write(taken)

    return run


def subtract(w):
    w -= 1


def data_add(w):
    w.data += 1


def data_assign(w):
    w.data = ONES


def unfrozen(w):
    w.requires_grad_(False).add_(1)
    w.requires_grad_(True)


def scaled_step(w):
    scaler, optimizer = GradScaler("cpu"), torch.optim.SGD([w], lr=0.1)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)


OPTIMIZERS = [
    *[("SGD", {"foreach": False}), ("Adam", {"foreach": True}), ("AdamW", {"fused": True})],
    *[("LBFGS", {}), ("Adafactor", {})],
]
WRITES = {
    "add_": under_no_grad(lambda w: w.add_(1)),
    "-=": under_no_grad(subtract),
    "copy_": under_no_grad(lambda w: w.copy_(ONES)),
    "[0]": under_no_grad(lambda w: assign(w, 0, 1)),
    "[mask]": under_no_grad(lambda w: assign(w, ONES > 0, 7)),
    "set_": under_no_grad(lambda w: w.set_(ONES)),
    "inference": lambda w: torch.inference_mode()(w.add_)(1),
    ".data": lambda w: w.data.mul_(2),
    ".data +=": data_add,
    "detach": lambda w: w.detach().mul_(2),
    "unfrozen": unfrozen,
    "view": under_no_grad(lambda w: w.view(-1).add_(1)),
    "view taken before": view_taken_with_grad(torch.t, torch.Tensor.zero_),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "load_state_dict": lambda w: nn.ParameterList([w]).load_state_dict({"0": ONES}),
    "embedding max_norm": lambda w: F.embedding(torch.tensor([0, 1]), w, max_norm=0.01),
    "_foreach_add_": under_no_grad(lambda w: torch._foreach_add_([w], 1.0)),
    "NumPy": lambda w: w.detach().numpy().fill(1),
    "out=": under_no_grad(lambda w: torch.add(w, ONES, out=w)),
    ".data =": data_assign,
    "in a disabled region": torch.autocast("cpu", enabled=False)(under_no_grad(lambda w: w.add_(1))),
    "in another thread": lambda w: in_thread(lambda: w.data.add_(1)),
}
SGD = stepped("SGD")
STEPS = {
    **{f"{name} {options}": stepped(name, **options) for name, options in OPTIMIZERS},
    "in a disabled region": torch.autocast("cpu", enabled=False)(SGD),
    "in another thread": lambda w: in_thread(lambda: SGD(w)),
    "by GradScaler": scaled_step,
    "under inference mode": torch.inference_mode()(SGD),
}
IN_REGIONS = {  # which empty the cache in PyTorch too
    "in a disabled region of ours": autocast("cpu", enabled=False)(SGD),
    "in another thread's region of ours": lambda w: in_thread(lambda: autocast("cpu")(SGD)(w)),
    "in another thread's region": lambda w: in_thread(lambda: torch.autocast("cpu")(SGD)(w)),
}


def used_around(write, region, w, linear=F.linear):
    """Return what a linear layer gives in a region before and after its weight is written to."""
    old = w.detach().clone()
    with region("cpu"):
        before = linear(X, w)
        write(w)
        after = linear(X, w)
    assert not torch.equal(old, w)
    return before, after


@pytest.mark.parametrize("step", (STEPS | IN_REGIONS).values(), ids=list(STEPS | IN_REGIONS))
def test_a_weight_that_an_optimizer_writes_inside_is_cast_again(step):
    w = weight()
    _, result = used_around(step, autocast, w)
    assert same(result, by_hand(X, w))
    assert same(*[torch.autograd.grad(y.sum(), w)[0] for y in (result, by_hand(X, w))])


@makes
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_weight_that_is_written_by_hand_inside_needs_the_cache_emptied(write, region):
    with torch.no_grad():
        w = weight()
        before, after = used_around(write, region, w)
        assert same(before, after)

        def write_and_clear(w):
            write(w)
            torch.clear_autocast_cache()

        w = weight()
        assert same(used_around(write_and_clear, region, w)[1], by_hand(X, w))


@pytest.mark.parametrize("write", (STEPS | WRITES).values(), ids=list(STEPS | WRITES))
def test_a_graph_takes_the_weight_of_the_moment_whoever_writes_it(write):
    w = weight()
    _, result = used_around(write, autocast, w, COMPILED_LINEAR)
    assert same(result, by_hand(X, w))


@makes
@pytest.mark.parametrize("name", ["add_", "view"])
def test_a_weight_that_a_graph_writes_to_is_cast_again_without_its_cache_emptied(name, region):
    if RELEASE == (2, 6) and region is autocast:
        pytest.skip("PyTorch 2.6 compiles no code that makes a region")

    def run(w):
        with region("cpu"):
            before = F.linear(X, w)
            WRITES[name](w)
            return before, F.linear(X, w)

    w = weight().requires_grad_(False)
    before, after = compiled(run)(w)
    assert not torch.equal(before, after)
    assert same(after, by_hand(X, w))


@pytest.mark.parametrize(
    ("search", "step"),
    [(None, lambda o, c: o.step(c)), ("strong_wolfe", lambda o, c: o.step(closure=c))],
    ids=["place", "name"],
)
def test_each_call_of_a_closure_takes_the_weight_of_the_moment(search, step):
    def losses(region, linear=F.linear, **options):
        w, seen = weight(), []
        optimizer = torch.optim.LBFGS([w], lr=0.5, max_iter=8, line_search_fn=search)

        def closure():
            optimizer.zero_grad()
            loss = (linear(X, w).float() - 1).square().mean()
            loss.backward()
            seen.append(loss.item())
            return loss

        with region("cpu", **options):
            step(optimizer, closure)
        return seen

    without = losses(torch.autocast, cache_enabled=False)
    assert len(set(without)) > 3
    assert losses(autocast) == without
    assert losses(torch.autocast) != without
    for region in (autocast, torch.autocast):
        assert losses(region, COMPILED_LINEAR) == pytest.approx(without, rel=1e-2)


# What is not written to is cast once. Eagerly: in a graph there is no cache, and casts are part of the graph.
# How many there are, test_autocast_models.py compares with casts by hand.

RNN = nn.LSTM(4, 4)
LOW = nn.Parameter(X.bfloat16())
EVENTS = {
    "nothing": lambda: None,
    "dropout": lambda: F.dropout(X),
    "new tensors": lambda: [
        torch.zeros(3),
        torch.ones(2),
        torch.rand(2),
        torch.full((2,), 1.0),
        torch.eye(2),
    ],
    "normalisation": lambda: [
        F.rms_norm(X, (4,)),
        F.layer_norm(X, (4,)),
        F.batch_norm(X, None, None, training=True),
    ],
    "casts": lambda: [X.half().float(), X.double(), X.clone(), X.t().contiguous()],
    "losses": lambda: [
        F.mse_loss(X, X),
        F.cross_entropy(X, torch.arange(5) % 4),
        F.softmax(X.half(), -1, dtype=FULL),
    ],
    "an LSTM": lambda: attempt(RNN, X),
    "an LSTM without oneDNN": lambda: without_onednn()(RNN)(X),
    "activations": lambda: [F.linear(X, ONES).add_(1), F.relu(X.clone(), inplace=True), X.half().mul_(2)],
    "views of activations": lambda: [(X * 2)[0].add_(1), (X * 2).view(-1).zero_()],
    "other numbers": lambda: [torch.arange(3).add_(1), LOW.data.add_(1), LOW.data[0].zero_()],
    "a nested region": lambda: autocast("cpu")(torch.mm)(X.t(), X),
    "a nested region of PyTorch": lambda: torch.autocast("cpu")(torch.mm)(X.t(), X),
    "a nested region without cache": lambda: autocast("cpu", cache_enabled=False)(torch.mm)(X.t(), X),
    "another thread": lambda: in_thread(lambda: autocast("cpu")(torch.mm)(X.t(), X)),
    "another thread, other precision": lambda: in_thread(lambda: autocast("cpu", HALF)(torch.mm)(X.t(), X)),
}


@pytest.mark.parametrize("event", list(EVENTS))
def test_a_weight_that_is_not_written_to_is_cast_once(event):
    w = weight()
    with Casts(w) as casts, autocast("cpu"):
        for _ in range(3):
            assert same(F.linear(X, w), by_hand(X, w))
            EVENTS[event]()
    assert casts.count == 4  # one, and three by hand


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 1), ({"cache_enabled": False}, 6), ({"enabled": False}, 0)]
)
@makes
def test_casts_are_kept_unless_the_region_says_otherwise_and_regions_inside_take_its_word(
    region, options, expected
):
    w = weight()
    with Casts(w) as casts, region("cpu", **options):
        for _ in range(3):
            F.linear(X, w)
            with region("cpu", enabled=options.get("enabled", True)):
                F.linear(X, w)
    assert casts.count == expected


def used_without_gradients_first(region):
    """Return how often a weight is cast in a region, and what it gives where it needs a gradient."""
    w = weight()
    with Casts(w) as casts, region("cpu"):
        with torch.no_grad():
            F.linear(X, w)
        result = F.linear(X, w)
    return casts.count, w, result


LATER = used_without_gradients_first(torch.autocast)[2].requires_grad


@makes
def test_a_cast_that_was_kept_without_gradients_has_them_later(region):
    count, w, result = used_without_gradients_first(region)
    assert (count, result.requires_grad) == (1, LATER)  # in releases as late as 2.8 it has none
    if LATER:
        (gradient,) = torch.autograd.grad(result.sum(), w)
        assert same(gradient, torch.autograd.grad(by_hand(X, w).sum(), w)[0])


@makes
def test_after_the_outermost_region_nothing_is_kept(region):
    w = weight()
    with Casts(w) as casts:
        for _ in range(3):
            with region("cpu"):
                F.linear(X, w)
    assert casts.count == 3


# Gradients of a weight that is used often: PyTorch's cache adds them up in low precision

MANY = numbers(100, 5, 4).abs()
EDITED = {
    "table": {"casting": TABLE},
    "other precision by module": {"casting": casting.DEFAULT.module("**", "bfloat16")},
    "emulated": {"emulate": True},
}


def often(w, linear=F.linear):
    return sum((linear(x, w).float() - 1).square().mean() for x in MANY)


def first_without_gradients(w):
    with torch.no_grad():
        F.linear(X, w)
    return often(w)


def recomputed(reentrant):
    return lambda w: often(w, lambda x, w: checkpoint(F.linear, x, w, use_reentrant=reentrant))


def gradient(region, work=often):
    w = weight()
    with region:
        result = work(w)
    return torch.autograd.grad(result, w)[0]


def twice(region):
    w = weight()
    with region:
        (first,) = torch.autograd.grad(often(w), w, create_graph=True)
    return torch.autograd.grad(first.square().sum(), w)[0]


def in_transform(region):
    with region:
        return torch.func.grad(often)(weight().detach())


def forward_mode(region):
    with region:
        return torch.func.jvp(often, (weight().detach(),), (ONES,))[1]


def inside_the_region(region):
    w = weight()
    with region:
        often(w).backward()
    return w.grad


WORKS = {
    "forward and backward": gradient,
    "first without gradients": lambda region: gradient(region, first_without_gradients),
    "checkpoints": lambda region: gradient(region, recomputed(False)),
    "a second derivative": twice,
    "torch.func.grad": in_transform,
    "torch.func.jvp": forward_mode,
    "backward inside": inside_the_region,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # of PyTorch's forward mode
@pytest.mark.parametrize("work", WORKS.values(), ids=list(WORKS))
def test_in_a_region_with_a_table_a_weights_gradients_add_up_in_float32(work):
    assert same(work(edited("cpu")), work(torch.autocast("cpu", cache_enabled=False)))


@pytest.mark.parametrize("options", EDITED.values(), ids=list(EDITED))
def test_every_edit_adds_gradients_up_in_float32_where_the_original_loses_them(options):
    model = nn.Linear(4, 3, bias=False)
    given = {"model": model} if "module" in str(options) else {}

    def off(region):
        model.weight.grad = None
        with region:
            loss = sum((model(x).float() - 1).square().mean() for x in MANY)
        loss.backward()
        return model.weight.grad

    full = off(torch.autocast("cpu", enabled=False))
    error, original = (
        ((off(region) - full).norm() / full.norm()).item()
        for region in (autocast("cpu", BRAIN, **options, **given), torch.autocast("cpu"))
    )
    assert error < 0.005 < original


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_in_a_region_with_a_table_adds_them_up_in_float32(backend):
    def work(w):
        return sum((F.linear(x, w).float() - 1).square().mean() for x in MANY[:25])

    w = weight()
    loss = run_in(COMPILED, lambda: edited("cpu"), work, backend)(w)
    expected = gradient(torch.autocast("cpu", cache_enabled=False), work)
    assert torch.allclose(torch.autograd.grad(loss, w)[0], expected, rtol=1e-4)


def test_all_uses_of_a_weight_have_the_same_numbers_in_memory():
    w, kept = weight(), set()

    def pack(tensor):
        kept.add(tensor.untyped_storage().data_ptr() if tensor.shape == w.mT.shape else 0)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with Casts(w) as casts, hooks, edited("cpu"):
        often(w, lambda x, w: F.linear(x.requires_grad_(), w))
    assert (casts.count, len(kept - {0})) == (1, 1)


@pytest.mark.parametrize("network", [nn.GRU, nn.RNN, nn.LSTM])
def test_a_recurrent_network_adds_the_gradients_of_its_steps_up_in_float32(network):
    def gradients(region):
        torch.manual_seed(0)
        made = network(4, 4)
        with region:
            result, _ = made(MANY)
        result.float().square().sum().backward()
        return [p.grad for p in made.parameters()]

    with without_onednn():
        ours, theirs, original = (
            gradients(region)
            for region in (
                edited("cpu"),
                torch.autocast("cpu", cache_enabled=False),
                torch.autocast("cpu"),
            )
        )
    assert all(map(torch.equal, ours, theirs))
    assert not all(map(torch.equal, ours, original))


def test_a_weight_that_is_written_in_place_needs_no_emptied_cache_in_a_region_with_a_table():
    w = weight()
    _, result = used_around(under_no_grad(lambda w: w.add_(1)), edited, w)
    assert same(result, by_hand(X, w))
