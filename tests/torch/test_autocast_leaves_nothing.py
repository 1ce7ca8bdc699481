"""A region leaves the process as it found it: the dispatcher, in-place operators, hooks of optimizers."""

import asyncio
import importlib
import queue
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _python_dispatch

from preamp import casting
from preamp.torch import autocast

from . import switches
from .regions import BRAIN, HALF, in_step, numbers, weight

optimizers = importlib.import_module("torch.optim.optimizer")
EDIT = casting.DEFAULT.float32("mm", "matmul").lower("softmax", "add").untouched("linear").widest("cat")
KINDS = {
    "default": {},
    "no cache": {"cache_enabled": False},
    "edited": {"casting": EDIT},
    "all": {"casting": EDIT, "report": True, "emulate": True},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=list(KINDS))
few = pytest.mark.parametrize("options", [KINDS["default"], KINDS["all"]], ids=["default", "all"])
A, W = numbers(4, 4), weight(4, 4)


def registered():
    """Return all that the dispatcher has of PyTorch's operators, and how many kernels at some keys."""
    dispatcher = torch._C
    names = [name for name in dispatcher._dispatch_get_all_op_names() if name.startswith("aten::")]
    keys = ("AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "FuncTorchDynamicLayerFrontMode")
    counts = {key: len(dispatcher._dispatch_get_registrations_for_dispatch_key(key)) for key in keys}
    return counts, {name: dispatcher._dispatch_dump(name) for name in names}


def everything():
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    flags = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(), flags
    return registered(), [(id(some), list(some.items())) for some in hooks], modes


def work():
    y = F.linear(A, W).softmax(-1) + A @ A
    return torch.cat([y, y.float()]).add_(1).copy_(torch.ones(8, 4))


@pytest.fixture
def before():
    """Return all there is before a test, and fail where it is not the same after it."""
    with switches.unwatched():
        with autocast("cpu"):
            pass
        before = everything()
        yield before
        assert everything() == before


@kinds
def test_after_a_region_nothing_is_left(options, before):
    region = autocast("cpu", BRAIN, **options)
    for _ in range(2):
        with region:
            work()
    assert everything() == before
    with suppress(KeyError), region:
        work()
        raise KeyError
    with region, autocast("cpu", HALF, **options), region:
        work()


@kinds
def test_a_region_registers_nothing_while_it_is_open(options, before):
    with autocast("cpu", **options), autocast("cpu", HALF, **options):
        work()
        assert registered() == before[0]


FIRST_REGION = """
import torch
from preamp.torch import autocast

def registered():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [torch._C._dispatch_dump(name) for name in names]

before = registered()
with autocast("cpu"):
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).add_(1)
    assert registered() == before
assert registered() == before
assert torch.ones(2).copy_(3.0).sum() == 6
"""


def test_the_first_region_of_a_process_registers_nothing():
    done = subprocess.run([sys.executable, "-c", FIRST_REGION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@few
@pytest.mark.usefixtures("before")
def test_nothing_is_left_where_regions_are_left_out_of_order(options):
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(autocast("cpu", **options))
        second.enter_context(autocast("cpu", HALF, **options))
        first.close()


@few
def test_nothing_is_left_while_a_generator_or_a_coroutine_waits(options, before):
    region = autocast("cpu", **options)

    @region
    def generator():
        yield work()
        yield work()

    steps = generator()
    next(steps)
    assert everything() == before
    steps.close()

    @region
    async def coroutine():
        work()
        await asyncio.sleep(0)
        work()

    async def together():
        await asyncio.gather(coroutine(), coroutine())

    asyncio.run(together())


@few
@pytest.mark.usefixtures("before")
def test_nothing_is_left_of_threads_whose_regions_overlap(options):
    def run(together):
        for _ in range(3):
            with autocast("cpu", **options):
                together()
                work()
                together()

    in_step(*[run] * 3)


@few
def test_other_threads_that_wait_are_no_reason_to_leave_anything(options, before):
    for wait in (threading.Event().wait, threading.Barrier(2).wait, queue.Queue().get):
        threading.Thread(target=wait, daemon=True).start()
    with autocast("cpu", **options):
        work()
    assert everything() == before  # and not only after the next region


# In-place operators, with all that they are given


# Hooks of optimizers


def stepped(w):
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.1).step()


def test_hooks_of_users_work_whenever_they_are_added_and_removed():
    calls, w = [], weight()
    early = register_optimizer_step_post_hook(lambda *_: calls.append("early"))
    with autocast("cpu"):
        stepped(w)
        late = register_optimizer_step_post_hook(lambda *_: calls.append("late"))
        first = register_optimizer_step_pre_hook(lambda *_: calls.append("first"))
        stepped(w)
        early.remove()
        stepped(w)
    stepped(w)
    with autocast("cpu"):
        late.remove()
        stepped(w)
    first.remove()
    stepped(w)
    assert calls == ["early", "first", "early", "late", "first", "late", "first", "late", "first"]


def test_threads_that_step_outside_are_not_disturbed_by_regions_that_come_and_go():
    """Adding a hook to PyTorch's dictionary while a thread runs its hooks raises in that thread."""
    handles = [
        register(lambda *_: time.sleep(0))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook) * 3
    ]
    stepping, entries = [True, True], []

    def step(together):
        together()
        try:
            w = weight()
            for _ in range(6):
                stepped(w)
        finally:
            stepping.pop()

    def enter(together):
        together()
        while stepping:
            with autocast("cpu"):
                entries.append(time.sleep(0))

    in_step(step, step, enter, enter)
    for handle in handles:
        handle.remove()
    assert len(entries) > 10
