"""Generators, coroutines and tasks: in a region while they run, and not while they wait."""

import asyncio

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import casting
from preamp.torch import autocast

from .regions import (
    BASE,
    BRAIN,
    FULL,
    HALF,
    MANY_STATES,
    RELEASE,
    all_same,
    compiled,
    in_thread,
    linear_of_every_state,
    numbers,
    state,
)

X, ONES = numbers(5, 4), torch.ones(3, 4)
# What runs between two waits may be compiled; generators and coroutines themselves are not.
COMPILED_LINEAR = linear_of_every_state()


@pytest.fixture(autouse=True, scope="module")
def _many_states():
    with torch._dynamo.config.patch(MANY_STATES):
        yield


def dtypes():
    """Return in which precision a linear layer runs, eagerly and compiled."""
    (dtype,) = {linear(X, ONES).dtype for linear in (F.linear, COMPILED_LINEAR)}
    return dtype


class Pause:
    def __init__(self, value):
        self.value = value

    def __await__(self):
        return (yield self.value)


def answered(received, log):
    log.append((state()[:2], dtypes()))
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
@settings(max_examples=15, deadline=None)
@given(script=st.lists(ACTION, max_size=6))
def test_what_waits_answers_as_without_the_region_and_is_in_it_only_while_it_runs(kind, edit, script):
    log, plain = [], []
    assert drive(kind(log, autocast("cpu", HALF, **edit)), script) == drive(kind(plain), script)
    assert set(plain) <= {(BASE[:2], FULL)}
    assert log == [((True, HALF), FULL if edit else HALF)] * len(plain)


async def at_work(region, inside, outcome):
    """Wait again and again, in the region if there is one."""
    try:
        for _ in range(5):
            assert (state()[:2], dtypes()) == inside
            await asyncio.sleep(0)
        if outcome == "fails":
            raise KeyError(outcome)
        while outcome == "is cancelled":
            await asyncio.sleep(0)
    finally:
        assert (state()[:2], dtypes()) == inside
    return outcome


OUTCOMES = ["returns", "fails", "is cancelled"]


@settings(max_examples=10, deadline=None)
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


@pytest.mark.skipif(RELEASE < (2, 8), reason="PyTorch compiles no generators before")
@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.untouched("linear")}], ids=str)
def test_a_generator_that_makes_a_region_is_compiled(edit):
    def layers(x):
        with autocast("cpu", HALF, **edit):
            for w in (ONES, torch.ones(3, 3)):
                x = F.linear(x.float(), w)
                yield x

    expected = list(layers(X))
    results = compiled(lambda x: list(layers(x)))(X)
    assert all_same(results, expected)
    assert {one.dtype for one in results} == {FULL if edit else HALF}
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
