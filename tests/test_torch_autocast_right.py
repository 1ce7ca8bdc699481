"""Where `torch.autocast` is wrong, be right: what the original does, and what ours does instead."""

import asyncio
import copy
import pickle
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from preamp import casting
from preamp.errors import UsageError
from preamp.torch import autocast

from .torch_regions import BRAIN, FULL, HALF, Casts, by_hand, in_step, in_thread, numbers, same, state, weight

BASE = (False, BRAIN, True)
X, ONES = numbers(5, 4), torch.ones(3, 4)
makes = pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["preamp", "torch"])
lows = pytest.mark.parametrize("low", [HALF, BRAIN])


# One instance, entered again


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("linear")}], ids=str)
def test_an_instance_can_be_entered_inside_itself(times, edit):
    region, states = autocast("cpu", HALF, **edit), []
    inside = (True, HALF, True)
    for _ in range(2):
        with ExitStack() as stack:
            for _ in range(times):
                stack.callback(lambda: states.append(state()))
                stack.enter_context(region)
                assert state() == inside
                assert F.linear(X, ONES).dtype == (FULL if edit else HALF)
        assert F.linear(X, ONES).dtype == FULL
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


def test_in_the_original_autocast_stays_on_after_recursion():
    def work():
        factorial(torch.autocast("cpu"))(1, weight())
        return state()

    assert in_thread(work) == (True, BRAIN, True)


@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("mm")}], ids=str)
def test_an_instance_can_be_shared_by_threads(edit):
    region, w = autocast("cpu", HALF, **edit), weight()

    def work(others):
        seen = [state()]
        for _ in range(5):
            others()
            with region:
                others()
                seen.append(state())
                assert same(F.linear(X, w), by_hand(X, w, HALF))
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


def both_precisions_at_once(region):
    """Let two threads use one weight in two precisions, taking turns."""
    w = weight()

    def work(low):
        def run(others):
            with region("cpu", low):
                for _ in range(5):
                    others()
                    result = F.linear(X, w)
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


# Generators and coroutines: in the region while they run, and not while they wait


class Pause:
    def __init__(self, value):
        self.value = value

    def __await__(self):
        return (yield self.value)


def answered(received, log):
    log.append((state()[:2], F.linear(X, ONES).dtype))
    if received == "fail":
        raise KeyError(received)
    return received


def generator(log, region=lambda f: f):
    @region
    def talk(first):
        received = first
        try:
            while received != "return":
                try:
                    received = yield answered(received, log)
                except ValueError as error:
                    received = yield answered(repr(error), log)
        finally:
            answered("end", log)
        return "the end"

    return talk("first")


def coroutine(log, region=lambda f: f):
    @region
    async def talk(first):
        received = first
        try:
            while received != "return":
                try:
                    received = await Pause(answered(received, log))
                except ValueError as error:
                    received = await Pause(answered(repr(error), log))
        finally:
            answered("end", log)
        return "the end"

    return talk("first")


class Driven:
    """An asynchronous generator, driven as a generator is; nothing leaks where it waits for others."""

    def __init__(self, log, region=lambda f: f):
        @region
        async def talk(first):
            received = first
            try:
                while received != "return":
                    await Pause(answered("wait", log))
                    try:
                        received = yield answered(received, log)
                    except ValueError as error:
                        received = yield answered(repr(error), log)
            finally:
                await Pause(answered("end", log))

        self.inner = talk("first")

    def send(self, value):
        return self.finish(self.inner.asend(value))

    def throw(self, error):
        return self.finish(self.inner.athrow(error))

    def close(self):
        return self.finish(self.inner.aclose())

    def finish(self, step):
        steps = step.__await__()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            assert state() == BASE


def drive(made, script):
    """Return what a generator answers, or raises, to each call."""
    answers = []
    for action, value in [("send", None), *script, ("close", None)]:
        try:
            arguments = [] if action == "close" else [value]
            answers.append(getattr(made, action)(*arguments))
        except (Exception, asyncio.CancelledError, GeneratorExit) as error:
            answers.append((type(error), str(error), getattr(error, "value", None)))
        assert state() == BASE
    return answers


ACTION = st.one_of(
    st.tuples(st.just("send"), st.sampled_from([1, 2, None, "fail", "return"])),
    st.tuples(st.just("throw"), st.sampled_from([ValueError("v"), KeyError("k"), asyncio.CancelledError()])),
    st.tuples(st.just("close"), st.none()),
)
KINDS = pytest.mark.parametrize("kind", [generator, coroutine, Driven])


@KINDS
@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.untouched("linear")}], ids=str)
@settings(max_examples=60, deadline=None)
@given(script=st.lists(ACTION, max_size=6))
def test_what_waits_answers_as_without_the_region_and_is_in_it_only_while_it_runs(kind, edit, script):
    log, plain = [], []
    assert drive(kind(log, autocast("cpu", HALF, **edit)), script) == drive(kind(plain), script)
    assert set(plain) <= {(BASE[:2], FULL)}
    assert log == [((True, HALF), FULL if edit else HALF)] * len(plain)


@pytest.mark.parametrize("kind", [generator, coroutine])
def test_in_the_original_they_run_outside_of_the_region(kind):
    log = []
    drive(kind(log, torch.autocast("cpu", HALF)), [])
    assert set(log) == {(BASE[:2], FULL)}


async def at_work(region, inside, outcome):
    """Wait again and again, in the region if there is one."""
    try:
        for _ in range(5):
            assert (state()[:2], F.linear(X, ONES).dtype) == inside
            await asyncio.sleep(0)
        if outcome == "fails":
            raise KeyError(outcome)
        while outcome == "is cancelled":
            await asyncio.sleep(0)
    finally:
        assert (state()[:2], F.linear(X, ONES).dtype) == inside
    return outcome


OUTCOMES = ["returns", "fails", "is cancelled"]


@settings(max_examples=30, deadline=None)
@given(choices=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(OUTCOMES)), min_size=1, max_size=6))
def test_tasks_in_different_regions_do_not_see_each_others(choices):
    regions = [
        (autocast("cpu", HALF), ((True, HALF), HALF)),
        (autocast("cpu", BRAIN), ((True, BRAIN), BRAIN)),
        (autocast("cpu", enabled=False), (BASE[:2], FULL)),
        (autocast("cpu", HALF, casting=casting.DEFAULT.float32("linear")), ((True, HALF), FULL)),
        (lambda function: function, (BASE[:2], FULL)),
    ]

    async def main():
        chosen = [(*regions[number], outcome) for number, outcome in choices]
        tasks = [asyncio.ensure_future(region(at_work)(region, *rest)) for region, *rest in chosen]
        for _ in range(10):
            assert state() == BASE
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    kinds = {"returns": str, "fails": KeyError, "is cancelled": asyncio.CancelledError}
    assert [type(result) for result in results] == [kinds[outcome] for _, outcome in choices]
    assert state() == BASE


def left_in_the_order_of_entry(region):
    """Return the state after two tasks entered a region each and left it in the same order."""

    async def task(low, waits):
        with region("cpu", low):
            for _ in range(waits):
                await asyncio.sleep(0)

    async def main():
        await asyncio.gather(task(HALF, 1), task(HALF, 2))
        return state()

    return in_thread(lambda: asyncio.run(main()))


def test_tasks_leave_the_process_as_it_was():
    assert left_in_the_order_of_entry(autocast) == BASE
    assert left_in_the_order_of_entry(torch.autocast) == (True, HALF, True)


# Any order

DEVICES = ["cpu", "xpu", "mtia"]
OPTIONS = [
    ("cpu", {"dtype": HALF}),
    ("cpu", {"dtype": BRAIN, "cache_enabled": False}),
    ("cpu", {"enabled": False}),
    ("xpu", {"dtype": BRAIN}),
    ("mtia", {"cache_enabled": False}),
    ("cpu", {"dtype": HALF, "casting": casting.DEFAULT.float32("mm")}),
    ("cpu", {"dtype": BRAIN, "casting": casting.DEFAULT.lower("add").float32("bmm")}),
    ("cpu", {"casting": casting.DEFAULT}),
    ("xpu", {"casting": casting.DEFAULT.float32("mm").lower("add")}),
]


def everything():
    """Return the whole state, and what three operators do."""
    square = X[:4]
    dtypes = (torch.mm(square, square), square + square, torch.bmm(square[None], square[None]))
    return [state(device) for device in DEVICES], [one.dtype for one in dtypes]


def model(entries, regions):
    """Return what is in force when some entries, outermost first, were not left yet."""
    table, cache = casting.DEFAULT, True
    states = {"cpu": (False, BRAIN), "xpu": (False, HALF), "mtia": (False, HALF)}
    for place in entries:
        (device, options), region = OPTIONS[place], regions[place]
        states[device] = (options.get("enabled", True), region.fast_dtype)
        cache = options.get("cache_enabled", True)
        table = options.get("casting", table) if device == "cpu" else table
    enabled, low = states["cpu"]
    rules = {"mm": "lower", "add": "untouched", "bmm": "lower"} | table.rules
    dtypes = [low if enabled and rule == "lower" else FULL for rule in rules.values()]
    return [(*states[device], cache) for device in DEVICES], dtypes


def walk(script, order, writes):
    """Enter and leave regions as the script says, then leave what is still open in a given order."""
    regions = [autocast(device, **options) for device, options in OPTIONS]
    before, entries, w = everything(), [], weight()
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
            assert everything() == model(entries, regions)
            enabled, low, _ = state()
            assert same(F.linear(X, w), by_hand(X, w, low if enabled else FULL))
            if writes:
                w.data.add_(1)
    finally:
        for place in sorted(entries, key=order.index):
            regions[place].__exit__(None, None, None)
    assert everything() == before


PLACE = st.integers(0, len(OPTIONS) - 1)


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(st.tuples(PLACE, st.booleans()), max_size=14), order=st.permutations(range(len(OPTIONS)))
)
def test_regions_can_be_entered_and_left_in_any_order(script, order):
    in_thread(lambda: walk(script, order))


@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("mm")}], ids=str)
def test_an_exception_leaves_the_region(edit):
    region = autocast("cpu", **edit)
    with pytest.raises(KeyError), region, autocast("cpu", HALF), region:
        raise KeyError
    with pytest.raises(KeyError):
        region(dict.__getitem__)({}, "missing")
    assert state() == BASE


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
@pytest.mark.parametrize(("device", "options"), OPTIONS, ids=str)
def test_a_copy_is_a_region_of_its_own_that_does_the_same(device, options, duplicate):
    region = autocast(device, **options)
    with region:
        expected, twin = everything(), duplicate(region)
    with twin:
        assert everything() == expected
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
        with Half(enabled=False):
            assert everything()[1] == [FULL] * 3
    assert isinstance(Half(), region)
    assert copy.deepcopy(Half()).fast_dtype == HALF
