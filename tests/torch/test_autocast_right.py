"""Where `torch.autocast` is wrong, be right: what the original does, and what ours does instead."""

import copy
import pickle
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from preamp import casting
from preamp.errors import UsageError
from preamp.torch import autocast

from .regions import (
    BASE,
    BRAIN,
    FULL,
    HALF,
    MANY_STATES,
    RELEASE,
    Casts,
    by_hand,
    compiled,
    in_step,
    in_thread,
    linear_of_every_state,
    numbers,
    same,
    since_2_7,
    state,
    weight,
)

X, ONES = numbers(5, 4), torch.ones(3, 4)
makes = pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["preamp", "torch"])


# What the tests call in regions: eagerly, and compiled.
COMPILED_LINEAR = linear_of_every_state()
linears = pytest.mark.parametrize("linear", [F.linear, COMPILED_LINEAR], ids=["eager", "compiled"])


@pytest.fixture(autouse=True, scope="module")
def _many_states():
    with torch._dynamo.config.patch(MANY_STATES):  # in this thread
        yield


# One instance, entered again


@linears
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("linear")}], ids=str)
def test_an_instance_can_be_entered_inside_itself(times, edit, linear):
    region, states = autocast("cpu", HALF, **edit), []
    inside = (True, HALF, True)
    for _ in range(2):
        with ExitStack() as stack:
            for _ in range(times):
                stack.callback(lambda: states.append(state()))
                stack.enter_context(region)
                assert state() == inside
                assert linear(X, ONES).dtype == (FULL if edit else HALF)
        assert linear(X, ONES).dtype == FULL
    assert states == 2 * ([inside] * (times - 1) + [BASE])


def factorial(region):
    @region
    def run(n, w):
        return F.linear(X, w) if n == 0 else (run(n - 1, w), F.linear(X, w))[1]

    return run


@pytest.mark.parametrize("depth", [1, 5])
def test_a_recursive_function_can_be_decorated(depth):
    w = weight()
    with Casts(w) as casts:
        assert same(factorial(autocast("cpu", HALF))(depth, w), by_hand(X, w, HALF))
    assert (state(), casts.count) == (BASE, 2)  # one by hand


@since_2_7
@pytest.mark.parametrize("rule", ["float32", "lower"])
def test_a_recursive_function_is_compiled_in_a_region_with_edits(rule):
    """In one without, and in PyTorch's, the compiler fails: "multiple exits?"."""
    w, region = weight(), autocast("cpu", HALF, casting=getattr(casting.DEFAULT, rule)("linear"))
    expected = by_hand(X, w, HALF if rule == "lower" else FULL)
    assert same(compiled(factorial(region))(5, w), expected)
    assert state() == BASE


@linears
@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("mm")}], ids=str)
def test_an_instance_can_be_shared_by_threads(edit, linear):
    region, w = autocast("cpu", HALF, **edit), weight()
    torch._dynamo.reset()
    kept = w + 0.0  # noqa: F841  # PyTorch 2.13 hangs where two threads are the first to use a weight

    def work(others):
        seen = [state()]
        for _ in range(5):
            others()
            with region:
                others()
                seen.append(state())
                assert same(linear(X, w), by_hand(X, w, HALF))
                others()
            seen.append(state())
        return seen

    for seen in in_step(*[work] * 4):
        assert [one[:2] for one in seen] == [BASE[:2], *[(True, HALF), BASE[:2]] * 5]


# Threads


def cast_around_a_region_elsewhere(region):
    """Return how often a thread casts a weight while regions of another one begin and end."""

    def here(others):
        w = weight()
        with Casts(w) as casts, region("cpu"):
            for _ in range(3):
                results = F.linear(X, w)
                others()
                others()
        assert same(results, by_hand(X, w))
        return casts.count

    def there(others):
        w = weight(seed=2)
        for _ in range(3):
            others()
            with region("cpu"):
                assert same(F.linear(X, w), by_hand(X, w))
            others()

    return in_step(here, there)[0]


def test_a_region_that_is_left_takes_no_casts_away_from_other_threads():
    assert cast_around_a_region_elsewhere(torch.autocast) == 3
    assert cast_around_a_region_elsewhere(autocast) == 1


def both_precisions_at_once(region, linear=F.linear):
    """Let two threads use one weight in two precisions, taking turns."""
    w = weight()

    def work(low):
        def run(others):
            with region("cpu", low):
                for _ in range(5):
                    others()
                    result = linear(X, w)
                    assert same(result, by_hand(X, w, low))
                    (gradient,) = torch.autograd.grad(result.sum(), w)
                    assert same(gradient, torch.autograd.grad(by_hand(X, w, low).sum(), w)[0])
                others()

        return run

    in_step(work(HALF), work(BRAIN))


def test_threads_use_one_weight_in_two_precisions_at_the_same_time():
    both_precisions_at_once(autocast)
    with pytest.raises(RuntimeError, match="same dtype"):
        both_precisions_at_once(torch.autocast)
    torch._dynamo.reset()
    # 2.6 keeps to one precision, and 2.10 does not compile in two threads at once.
    for region in (autocast, torch.autocast) if RELEASE >= (2, 12) else ():
        both_precisions_at_once(region, COMPILED_LINEAR)


def test_every_thread_keeps_its_casts_once_the_others_have_left():
    def work():
        w = weight()
        with Casts(w) as casts, autocast("cpu"):
            for _ in range(3):
                F.linear(X, w)
        return casts.count

    assert [in_thread(work), work(), in_thread(work)] == [1, 1, 1]


def test_a_thread_that_ends_inside_a_region_takes_nothing_with_it():
    in_thread(autocast("cpu").__enter__)
    test_every_thread_keeps_its_casts_once_the_others_have_left()


# Any order

DEVICES = ["cpu", "xpu", "ipu"]
OPTIONS = [
    ("cpu", {"dtype": HALF}),
    ("cpu", {"dtype": BRAIN, "cache_enabled": False}),
    ("cpu", {"enabled": False}),
    ("xpu", {"dtype": BRAIN}),
    ("ipu", {"cache_enabled": False}),
    ("cpu", {"dtype": HALF, "casting": casting.DEFAULT.float32("mm")}),
    ("cpu", {"dtype": BRAIN, "casting": casting.DEFAULT.lower("add").float32("bmm")}),
    ("cpu", {"casting": casting.DEFAULT}),
    ("xpu", {"casting": casting.DEFAULT.float32("mm").lower("add")}),
]


def operators():
    square = X[:4]
    return torch.mm(square, square), square + square, torch.bmm(square[None], square[None])


def everything(run=operators):
    """Return the whole state, and what three operators do."""
    return [state(device) for device in DEVICES], [one.dtype for one in run()]


def model(entries, regions):
    """Return what is in force when some entries, outermost first, were not left yet."""
    table, cache = casting.DEFAULT, True
    states = {"cpu": (False, BRAIN), "xpu": (False, HALF), "ipu": (False, HALF)}
    for place in entries:
        (device, options), region = OPTIONS[place], regions[place]
        states[device] = (options.get("enabled", True), region.fast_dtype)
        cache = options.get("cache_enabled", True)
        table = options.get("casting", table) if device == "cpu" else table
    enabled, low = states["cpu"]
    rules = {"mm": "lower", "add": "untouched", "bmm": "lower"} | table.rules
    dtypes = [low if enabled and rule == "lower" else FULL for rule in rules.values()]
    return [(*states[device], cache) for device in DEVICES], dtypes


def walk(script, order, steps, run=operators):
    """Enter and leave regions as the script says, then leave what is still open in a given order."""
    regions = [autocast(device, **options) for device, options in OPTIONS]
    before, entries, w = everything(run), [], weight()
    optimizer, w.grad = torch.optim.SGD([w], lr=1.0), torch.ones_like(w)
    try:
        for place, enters in script:
            if enters:
                regions[place].__enter__()
                entries.append(place)
            elif place in entries:
                regions[place].__exit__(None, None, None)
                del entries[len(entries) - 1 - entries[::-1].index(place)]
            else:
                with pytest.raises(UsageError, match="not entered"):
                    regions[place].__exit__(None, None, None)
            assert everything(run) == model(entries, regions)
            enabled, low, _ = state()
            assert same(F.linear(X, w), by_hand(X, w, low if enabled else FULL))
            if steps:
                optimizer.step()
    finally:
        for place in sorted(entries, key=order.index):
            regions[place].__exit__(None, None, None)
    assert everything(run) == before


PLACE = st.integers(0, len(OPTIONS) - 1)


@settings(max_examples=40, deadline=None)
@given(
    script=st.lists(st.tuples(PLACE, st.booleans()), max_size=14),
    order=st.permutations(range(len(OPTIONS))),
    steps=st.booleans(),
)
@example([(0, True), (1, True), (0, True), (3, True), (0, False), (3, False)], range(9), True)
@example([(0, True), (5, True), (8, True), (5, False)], range(9), False)
def test_regions_can_be_entered_and_left_in_any_order(script, order, steps):
    in_thread(lambda: walk(script, order, steps))


COMPILED_OPERATORS = torch.compile(lambda: operators(), backend="eager", fullgraph=True)


@since_2_7  # which compiles a function for more than one precision
@settings(max_examples=4, deadline=None)
@given(
    script=st.lists(st.tuples(PLACE, st.booleans()), max_size=8),
    order=st.permutations(range(len(OPTIONS))),
)
@example([(0, True), (5, True), (8, True), (5, False)], range(9))
def test_what_is_compiled_runs_as_the_regions_say_in_any_order(script, order):
    walk(script, order, False, COMPILED_OPERATORS)


@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("mm")}], ids=str)
def test_an_exception_leaves_the_region(edit):
    region = autocast("cpu", **edit)
    with pytest.raises(KeyError), region, autocast("cpu", HALF), region:
        raise KeyError
    with pytest.raises(KeyError):
        region(dict.__getitem__)({}, "missing")
    assert state() == BASE


@since_2_7
@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("mm")}], ids=str)
def test_an_exception_in_compiled_code_leaves_the_region(edit):
    def fails(x):
        torch.mm(x, x)
        raise KeyError

    def inside(x):
        with autocast("cpu", HALF, **edit):
            fails(x)

    def handled(x):
        try:
            inside(x)
        except KeyError:
            return torch.mm(x, x)

    assert compiled(handled)(X[:4]).dtype == FULL
    with pytest.raises(KeyError):
        torch.compile(inside, backend="aot_eager")(X[:4])
    assert state() == BASE
    assert everything()[1] == [FULL] * 3


@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("mm")}], ids=str)
def test_a_region_that_was_not_entered_in_this_thread_cannot_be_left(edit):
    region, message = autocast("cpu", HALF, **edit), "was not entered in this thread"
    with pytest.raises(UsageError, match=message):
        region.__exit__(None, None, None)
    with region:

        def leave():
            with pytest.raises(UsageError, match=message):
                region.__exit__(None, None, None)
            return state()

        assert in_thread(leave) == BASE
        assert state() == (True, HALF, True)
    assert everything()[1] == [FULL] * 3
    assert state() == BASE


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda region: pickle.loads(pickle.dumps(region)),
    "in a module": lambda region: copy.deepcopy(Holder(region)).region,
}


class Holder(nn.Module):
    def __init__(self, region):
        super().__init__()
        self.region = region


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=list(COPIES))
@pytest.mark.parametrize(("device", "options"), OPTIONS[1::2], ids=str)
def test_a_copy_is_a_region_of_its_own_that_does_the_same(device, options, duplicate):
    region = autocast(device, **options)
    with region:
        expected, twin = everything(), duplicate(region)
    with twin:
        assert everything() == expected
        assert everything(COMPILED_OPERATORS) == expected
        with region:
            pass
        assert everything() == expected
    assert state() == BASE


@makes
def test_a_subclass_may_take_its_own_arguments(region):
    class Half(region):
        def __init__(self, enabled=True):
            super().__init__("cpu", HALF, enabled=enabled)

    with Half():
        assert everything()[1] == [HALF, FULL, HALF]
        assert everything(COMPILED_OPERATORS)[1] == [HALF, FULL, HALF]
        with Half(enabled=False):
            assert everything()[1] == [FULL] * 3
            assert everything(COMPILED_OPERATORS)[1] == [FULL] * 3
    assert isinstance(Half(), region)
    assert copy.deepcopy(Half()).fast_dtype == HALF
