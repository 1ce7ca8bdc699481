"""Edited tables and emulation in torch.compile and torch.export, beside eager code and casts by hand."""

import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from preamp import casting
from preamp.errors import UsageError
from preamp.torch import autocast
from tests.combinations import in_one_test

from .regions import BASE, BRAIN, COMPILED, FULL, HALF, all_same, in_step, numbers, run_in, same, state
from .switches import compat
from .test_autocast_compiled import (
    RELEASE,
    around,
    decorated,
    decorated_inside,
    inside,
    learned,
    method,
    nested,
)

TABLE = casting.DEFAULT.float32("mm", "matmul", "bmm", "linear").lower("softmax").widest("add")
BOTH = {"casting": TABLE, "emulate": True}
MADE_INSIDE = [inside, nested, decorated, decorated_inside, method]  # which 2.6 does not compile
PLACES = [around, *(MADE_INSIDE if RELEASE > (2, 6) else [])]


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert not torch.overrides._get_current_function_mode_stack()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("place", "edit"), [*((place, BOTH) for place in PLACES), (around, {"casting": casting.CUDA})]
)
def test_an_edited_region_compiles_without_breaks_and_once(place, edit):
    run, counter = place(partial(autocast, **edit), HALF)
    compiled = [learned(run) for _ in range(3)]
    assert (counter.frame_count, dict(counters["graph_break"]), state()) == (1, {}, BASE)
    torch._dynamo.reset()
    with torch.compiler.set_stance("force_eager"):
        eager = learned(place(partial(autocast, **edit), HALF)[0])
    for one in compiled:
        assert [result.dtype for result in one] == [result.dtype for result in eager]
        assert all(map(torch.allclose, one, eager, [2e-2] * 3, [2e-2] * 3))


X, IMAGE = numbers(4, 6), numbers(1, 2, 4, 4)
# What functions in Python call in a private module. The compiler by itself hands those over to no mode.
CALLED_INSIDE = {
    "elu": lambda x, image: F.elu(x),
    "hardsigmoid": lambda x, image: F.hardsigmoid(x),
    "hardswish": lambda x, image: F.hardswish(x),
    "hardtanh": lambda x, image: F.hardtanh(x),
    "leaky_relu": lambda x, image: F.leaky_relu(x),
    "mish": lambda x, image: F.mish(x),
    "relu6": lambda x, image: F.relu6(x),
    "silu": lambda x, image: F.silu(x),
    "cross_entropy": lambda x, image: F.cross_entropy(x, x.softmax(-1)),
    "im2col": lambda x, image: F.unfold(image, 2),
    "col2im": lambda x, image: F.fold(F.unfold(image, 2), 4, 2),
}


@pytest.mark.parametrize(("rule", "given", "gives"), [("lower", FULL, BRAIN), ("float32", BRAIN, FULL)])
def test_a_function_that_calls_a_private_one_has_the_rule_of_that_in_a_graph(rule, given, gives):
    make = partial(autocast, "cpu", BRAIN, casting=getattr(casting.DEFAULT, rule)(*CALLED_INSIDE))

    def call(x, image):
        return [function(x, image) for function in CALLED_INSIDE.values()]

    inputs = X.to(given), IMAGE.to(given)
    results = run_in(COMPILED, make, call)(*inputs)
    assert [one.dtype for one in results] == [gives] * len(CALLED_INSIDE)
    assert all(map(torch.equal, results, run_in("eager", make, call)(*inputs)))


def test_a_region_is_not_taken_for_part_of_an_export_in_another_thread():
    entered, inside, done = (threading.Event() for _ in range(3))

    class Exported(torch.nn.Module):
        def forward(self, x):
            entered.set()
            inside.wait(10)
            return x + 1

    def serve():
        entered.wait(10)
        with autocast("cpu", HALF, casting=casting.DEFAULT.lower("softmax"), report=True) as region:
            inside.set()
            done.wait(10)
            dtypes.append(torch.softmax(torch.ones(2, 2), -1).dtype)
        dtypes.append(len(region.report().rows))

    dtypes = []
    thread = threading.Thread(target=serve)
    thread.start()
    torch.export.export(Exported(), (torch.ones(2),), strict=False)
    done.set()
    thread.join()
    assert dtypes == [HALF, 1]


def test_a_setting_of_the_process_is_restored_after_regions_that_overlap_in_threads(monkeypatch):
    """Before PyTorch 2.13 all threads share the compiler's setting for backward passes."""
    setting = ["same_as_forward"]
    monkeypatch.setattr(compat, "autocast_in_backward", lambda: setting[-1])
    monkeypatch.setattr(compat, "set_autocast_in_backward", setting.append)

    def first(others):
        with autocast("cpu", casting=TABLE):
            others()
            assert setting[-1] == "off"
            others()
        others()
        others()

    def second(others):
        others()
        with autocast("cpu", casting=TABLE):
            others()
            others()
        others()

    in_step(first, second)
    assert setting[-1] == "same_as_forward"


# Functions of PyTorch's that the compiler does not hand over to modes by itself

IMAGES = {
    1: numbers(1, 2, 6).bfloat16(),
    2: numbers(1, 2, 6, 6).bfloat16(),
    3: numbers(1, 2, 6, 6, 6).bfloat16(),
}
X, CLASSES = numbers(4, 3).bfloat16(), torch.tensor([0, 1, 2, 0])
MODES = [
    *(("nearest", dims) for dims in IMAGES),
    *(("nearest-exact", dims) for dims in IMAGES),
    *(("area", dims) for dims in IMAGES),
    *[("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)],
]
ACTIVATIONS = "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu sigmoid silu tanh"


def in_eager_code_and_compiled(function, region):
    """Return the results of a function in a region, in eager code, and compiled with the region around it."""
    torch._dynamo.reset()
    with region:
        return function(), torch.compile(function, backend="aot_eager", fullgraph=True)()


POOLS = [f"adaptive_avg_pool{dims}d" for dims in IMAGES]


@pytest.mark.parametrize("name", ["interpolate", "upsample"])
def test_every_mode_of_interpolate_has_the_rule_of_interpolate_or_of_the_pooling_that_it_is(name):
    calls = []
    for mode, dims in MODES:
        x = IMAGES[dims]
        calls.append((mode, lambda x=x, mode=mode: F.interpolate(x, scale_factor=0.5, mode=mode)))
        calls.append((mode, lambda x=x, mode=mode, dims=dims: nn.Upsample((3,) * dims, mode=mode)(x)))
    for mode, call in calls:
        refused = casting.DEFAULT.refuse(*(POOLS if mode == "area" else [name]))
        with autocast("cpu", BRAIN, casting=refused), pytest.raises(UsageError, match="is refused"):
            call()
    region = autocast("cpu", BRAIN, casting=casting.DEFAULT.float32(name, *POOLS))
    eager, compiled = in_eager_code_and_compiled(lambda: [call() for _, call in calls], region)
    assert all_same(compiled, eager)
    assert {one.dtype for one in eager} == {FULL}


def test_smoothed_images_and_deprecated_functions_have_the_rule_of_interpolate():
    x, region = IMAGES[2], autocast("cpu", BRAIN, casting=casting.DEFAULT.float32("interpolate"))

    def calls():
        return [
            F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
            F.interpolate(x, size=(3, 3), mode="bicubic", antialias=True),
            F.upsample(x, (3, 3), mode="bicubic"),
            F.upsample_nearest(x, scale_factor=2),
            F.upsample_bilinear(x, (3, 3)),
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecation
        eager, compiled = in_eager_code_and_compiled(calls, region)
    assert all_same(compiled, eager)
    assert {one.dtype for one in eager} == {FULL}


@in_one_test(by=["operator", "module"])
def test_an_activation_is_cast_in_compiled_code_too(by):
    functions = [getattr(F, name) for name in ACTIVATIONS.split()]
    model = nn.Module()
    model.forward = lambda x: [function(x) for function in functions]
    if by == "operator":
        region = autocast("cpu", BRAIN, casting=casting.DEFAULT.float32(*ACTIVATIONS.split()))
    else:
        region = autocast("cpu", BRAIN, casting=casting.DEFAULT.module("**", "float32"), model=model)
    eager, compiled = in_eager_code_and_compiled(lambda: model(X), region)
    assert all_same(compiled, eager)
    assert {one.dtype for one in eager} == {FULL}


def test_a_loss_under_another_name_is_cast_in_compiled_code_too():
    region = autocast("cpu", BRAIN, casting=casting.DEFAULT.lower("cross_entropy"))
    eager, compiled = in_eager_code_and_compiled(lambda: F.cross_entropy(X.float(), CLASSES), region)
    assert same(compiled, eager)
    assert eager.dtype == BRAIN
