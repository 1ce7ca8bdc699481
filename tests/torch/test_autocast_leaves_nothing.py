"""A region leaves the process as it found it: the dispatcher, in-place operators, hooks of optimizers."""

import asyncio
import importlib
import queue
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _python_dispatch

from preamp import casting
from preamp.torch import autocast
from preamp.torch.scaling import unscaled

from .regions import BRAIN, HALF, in_step, in_thread, numbers, weight

optimizers = importlib.import_module("torch.optim.optimizer")
EDIT = casting.DEFAULT.float32("mm", "matmul").lower("softmax", "add").untouched("linear").widest("cat")
KINDS = {
    "default": {},
    "disabled": {"enabled": False},
    "no cache": {"cache_enabled": False},
    "edited": {"casting": EDIT},
    "CUDA's table": {"casting": casting.CUDA},
    "report": {"report": True},
    "emulate": {"emulate": True},
    "all": {"casting": EDIT, "report": True, "emulate": True},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=list(KINDS))
FEW = {name: KINDS[name] for name in ("default", "edited", "report", "emulate")}
few = pytest.mark.parametrize("options", FEW.values(), ids=list(FEW))
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
def before(monkeypatch):
    """Return all there is before a test, and fail where it is not the same after it."""
    monkeypatch.setattr(unscaled.watch, "is_on", False)  # its hook stays until the next optimizer step
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
def test_nothing_is_left_of_a_region_in_another_thread(options):
    def run():
        with autocast("cpu", **options):
            work()

    in_thread(run)


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


@pytest.mark.parametrize("wait", [threading.Event().wait, threading.Barrier(2).wait, queue.Queue().get])
@few
def test_other_threads_that_wait_are_no_reason_to_leave_anything(options, wait, before):
    threading.Thread(target=wait, daemon=True).start()
    with autocast("cpu", **options):
        work()
    assert everything() == before  # and not only after the next region


def test_a_thread_that_computes_is_not_disturbed_by_edited_regions_that_come_and_go():
    dtypes, stop = set(), threading.Event()

    def compute():
        with torch.autocast("cpu", HALF):
            while not stop.is_set():
                dtypes.add((torch.mm(A, A).dtype, torch.softmax(A, -1).dtype))

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with autocast("cpu", casting=EDIT):
            assert (torch.mm(A, A).dtype, torch.softmax(A, -1).dtype) == (torch.float32, BRAIN)
    stop.set()
    for thread in threads:
        thread.join()
    assert dtypes == {(HALF, torch.float32)}


# In-place operators, with all that they are given

TARGETS = {
    "float32": lambda: numbers(2, 3),
    "bfloat16": lambda: numbers(2, 3).bfloat16(),
    "float64": lambda: numbers(2, 3).double(),
    "int64": lambda: torch.arange(6).reshape(2, 3) + 1,
    "bool": lambda: torch.tensor([[True, False, True]] * 2),
    "complex64": lambda: numbers(2, 3).to(torch.complex64),
    "Parameter": lambda: torch.nn.Parameter(numbers(2, 3)),
    "view": lambda: numbers(4, 3)[1:3],
}
VALUES = {
    "int": 2,
    "float": 1.5,
    "bool": True,
    "complex": 1 + 2j,
    "NumPy float32": np.float32(1.5),
    "NumPy float64": np.float64(1.5),
    "NumPy int64": np.int64(2),
    "NumPy bool": np.bool_(True),
    "0-dimensional": torch.tensor(2),
    "tensor": torch.full((2, 3), 2.0),
    "bfloat16": torch.full((2, 3), 2.0, dtype=BRAIN),
}
ARITHMETIC = (
    "copy_ add_ sub_ mul_ div_ fill_ pow_ fmod_ remainder_ floor_divide_ eq_ bitwise_and_".split()  # noqa: SIM905
)
WRITES = {
    **{name: lambda target, value, name=name: getattr(target, name)(value) for name in ARITHMETIC},
    "masked_fill_": lambda target, value: target.masked_fill_(torch.ones(2, 3, dtype=torch.bool), value),
    "index_fill_": lambda target, value: target.index_fill_(0, torch.tensor([1]), value),
    "clamp_": lambda target, value: target.clamp_(0, value),
    "addcmul_": lambda target, value: target.addcmul_(torch.ones(2, 3), torch.ones(2, 3), value=value),
    "lerp_": lambda target, value: target.lerp_(torch.ones(2, 3), value),
    "scatter_": lambda target, value: target.scatter_(0, torch.zeros(1, 3, dtype=torch.long), value),
    "[0] =": lambda target, value: target.__setitem__(0, value),
    "[mask] =": lambda target, value: target.__setitem__(target == target, value),
    ".data": lambda target, value: target.data.add_(value),
    "foreach": lambda target, value: torch._foreach_mul_([target], value),
    "zero_": lambda target, _: target.zero_(),
    "normal_": lambda target, _: target.normal_(generator=torch.Generator().manual_seed(0)),
    "uniform_": lambda target, _: target.uniform_(generator=torch.Generator().manual_seed(0)),
}


def written(target, value, write):
    """Return what a write makes of a tensor, or its error."""
    tensor = TARGETS[target]()
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            WRITES[write](tensor, VALUES[value])
    except (RuntimeError, TypeError, NotImplementedError, IndexError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return tensor.dtype, repr(tensor.tolist())  # NaN is not equal to itself


CALLS = [(target, value, write) for write in WRITES for target in TARGETS for value in VALUES]
ALONE = {call: written(*call) for call in CALLS}  # before any test, so before any region
WORKING = [call for call in CALLS if not isinstance(ALONE[call], str)]


@pytest.mark.parametrize("write", list(WRITES))
@pytest.mark.parametrize("options", [{}, {"report": True}, {"emulate": True}], ids=str)
def test_in_place_operators_do_the_same_before_inside_and_after_a_region(write, options):
    calls = [call for call in CALLS if call[2] == write]
    assert any(call in WORKING for call in calls)
    with torch.autocast("cpu", BRAIN):
        theirs = {call: written(*call) for call in calls}
    with autocast("cpu", BRAIN, **options):
        F.linear(A, W)
        inside = {call: written(*call) for call in calls}
    assert inside == theirs
    assert {call: written(*call) for call in calls} == {call: ALONE[call] for call in calls}


def test_the_table_of_writes_has_at_least_80_kinds_that_work():
    assert len({(value, write) for _, value, write in WORKING}) >= 80
    assert ("float32", "float", "copy_") in WORKING


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
