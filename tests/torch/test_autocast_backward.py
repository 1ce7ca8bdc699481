"""Gradients through regions: of every rule, of custom functions, and of what backward computes again."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointError, checkpoint

from preamp import casting
from preamp.torch import autocast, custom_bwd, custom_fwd
from tests.combinations import in_one_test

from .regions import (
    BASE,
    BRAIN,
    COMPILED,
    FULL,
    HALF,
    RELEASE,
    all_same,
    compiled,
    in_thread,
    numbers,
    run_in,
    state,
)

EDIT = casting.DEFAULT
A, X = numbers(4, 4), numbers(5, 4)

# The rules

DIFFERENTIABLE = [
    ("mm", torch.mm),
    ("matmul", torch.matmul),
    ("linear", F.linear),
    ("mul", torch.mul),
    ("add", torch.add),
    ("softmax", lambda a, b: F.softmax(a, -1) * b),
    ("layer_norm", lambda a, b: F.layer_norm(a, (4,), b[0], b[1])),
    ("stack", lambda a, b: torch.stack([a, b])),
    ("einsum", lambda a, b: torch.einsum("ij,jk", a, b)),
]
LEAVES = {"float32": (FULL, FULL), "float16": (HALF, HALF), "mixed": (FULL, HALF)}


def derivatives(compute, leaves):
    """Return a result with its first and second derivatives."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    result = compute(*leaves)
    first = torch.autograd.grad(result.float().square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(one.float().square().sum() for one in first), leaves)
    return [result, *first, *second]


@in_one_test(backward=["inside", "outside"], dtypes=LEAVES.values(), rule=["lower", "float32", "widest"])
@pytest.mark.parametrize(("name", "call"), DIFFERENTIABLE, ids=[name for name, _ in DIFFERENTIABLE])
def test_derivatives_are_those_of_casts_by_hand(name, call, rule, dtypes, backward):
    to = {"lower": HALF, "float32": FULL, "widest": dtypes[0]}[rule]
    leaves = [leaf.to(dtype) for leaf, dtype in zip((A, A.t().exp()), dtypes, strict=True)]
    if name == "softmax":
        expected = derivatives(lambda a, b: F.softmax(a if rule == "widest" else a.to(to), -1) * b, leaves)
    else:
        expected = derivatives(lambda a, b: call(a.to(to), b.to(to)), leaves)
    region = autocast("cpu", HALF, casting=getattr(EDIT, rule)(name))
    if backward == "outside":
        assert all_same(derivatives(region(call), leaves), expected)
    else:
        with region:
            first = derivatives(call, leaves)
        assert all_same(first[:1], expected[:1])
        assert [one.dtype for one in first] == [one.dtype for one in expected]


@pytest.mark.parametrize("rule", ["lower", "widest"])
def test_derivatives_of_what_is_compiled_are_those_of_what_is_not(rule):
    """By the backend "eager": with others PyTorch has no second derivatives of compiled functions."""
    leaves = [leaf.to(dtype) for leaf, dtype in zip((A, A.t().exp()), LEAVES["mixed"], strict=True)]

    def each(a, b):
        return [call(a, b).float() for name, call in DIFFERENTIABLE if name != "softmax"]

    make = partial(autocast, "cpu", HALF, casting=getattr(EDIT, rule)(*(name for name, _ in DIFFERENTIABLE)))
    run, eager = (run_in(one, make, each, "eager") for one in (COMPILED, "eager"))
    for place in range(len(DIFFERENTIABLE) - 1):
        outcomes = [derivatives(lambda *ab: function(*ab)[place], leaves) for function in (run, eager)]  # noqa: B023
        assert all_same(*outcomes)


@pytest.mark.parametrize("rule", ["lower", "float32", "widest", "untouched"])
def test_float64_goes_through_every_rule_with_its_gradients(rule):
    leaves = [leaf.double().requires_grad_() for leaf in (A, A.t())]
    for name, call in DIFFERENTIABLE:
        assert torch.autograd.gradcheck(autocast("cpu", casting=getattr(EDIT, rule)(name))(call), leaves)


# What backward computes again

KINDS_OF_REGIONS = {
    "float16": {"dtype": HALF},
    "table": {
        "dtype": HALF,
        "casting": casting.DEFAULT.float32("mm", "addmm", "linear").lower("softmax", "mul"),
    },
    "emulated": {"dtype": BRAIN, "emulate": True},
}


def block(x):
    return MODEL(x).softmax(-1) * x


class Squares(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.mm(x, x.t()).mul(x.sum())

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.mm(gradient, x).mul(x.sum()).float()


torch.manual_seed(0)
MODEL, SQUARES = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), Squares.apply


def plainly(function, x, region):
    return function(x)


def reentrant(function, x, region):
    return checkpoint(function, x, use_reentrant=True)


def restored(function, x, region):
    return checkpoint(function, x, use_reentrant=False, context_fn=region.context_fn)


def by_itself(function, x, region):
    return checkpoint(function, x, use_reentrant=False)


def gradients(function, how, options, backward, run=None):
    x, region = X.clone().requires_grad_(), autocast("cpu", **options)
    MODEL.zero_grad()
    with region:
        loss = (run(x) if run else how(function, x, region)).float().square().sum()
        if backward == "inside":
            loss.backward()
    if backward == "outside":
        loss.backward()
    elif backward == "thread":
        in_thread(loss.backward)
    assert state() == BASE
    return [x.grad, *(p.grad for p in MODEL.parameters() if p.grad is not None)]


@pytest.mark.parametrize("function", [block, MODEL, SQUARES], ids=["function", "module", "custom"])
@pytest.mark.parametrize("options", KINDS_OF_REGIONS.values(), ids=list(KINDS_OF_REGIONS))
@pytest.mark.parametrize("backward", ["inside", "outside", "thread"])
def test_what_is_recomputed_in_backward_runs_in_its_region(function, options, backward):
    expected = gradients(function, plainly, options, backward)
    edited = set(options) - {"dtype"}
    ways = [restored] if edited else [restored, by_itself]
    # PyTorch before 2.11 loses gradients of weights whose casts are kept from the forward without gradients.
    loses = torch.__version__ < (2, 11) and function is not SQUARES and backward == "inside" and not edited
    if (not edited or backward == "inside") and not loses:
        ways.append(reentrant)
    for way in ways:
        assert all_same(gradients(function, way, options, backward), expected)
    if function is SQUARES:
        assert all_same(gradients(function, plainly, options, "inside"), expected)


FUNCTIONS = {"function": block, "module": MODEL, "custom": SQUARES}
HOWS = {"plainly": plainly, "restored": restored, "by itself": by_itself}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch, of itself
@pytest.mark.parametrize(
    ("kind", "function", "how"),
    [
        ("float16", "function", "by itself"),
        ("table", "module", "restored"),
        ("table", "custom", "plainly"),
        ("emulated", "custom", "restored"),
    ],
)
def test_what_a_graph_computes_again_in_backward_runs_in_its_region(kind, function, how):
    """Also without `context_fn`, as the casts are part of the graph."""
    options, function, how = KINDS_OF_REGIONS[kind], FUNCTIONS[function], HOWS[how]
    if how is restored and set(options) == {"dtype"}:
        pytest.skip(
            "PyTorch's compiler takes no method for context_fn: the graph restores its regions itself"
        )
    edited = set(options) != {"dtype"}
    if (RELEASE == (2, 6) and (function is SQUARES or edited)) or (RELEASE < (2, 12) and how is restored):
        pytest.skip(
            "PyTorch 2.6 compiles no code that makes a region, and 2.10 none that takes a method of one"
        )
    region = autocast("cpu", **options)
    run = compiled(lambda x: how(function, x, region))
    for backward in ("inside", "outside", "thread"):
        expected = gradients(function, plainly, options, backward)
        found = gradients(function, how, options, backward, run)
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        for one, other in zip(found, expected, strict=True):
            # Not bit by bit: a graph's backward pass casts what it adds up in another order.
            assert (one - other).abs().max() <= 2e-2 * other.abs().max()


def test_without_its_context_an_edited_region_is_not_restored():
    with pytest.raises(CheckpointError):
        gradients(block, by_itself, KINDS_OF_REGIONS["table"], "outside")


# A region in a graph

INSIDE = {
    "off": {"enabled": False},
    "another precision": {"dtype": HALF},
    "a table": {"casting": EDIT.float32("matmul")},
    "emulated": {"emulate": True},
}
OFF_BY_DECORATION = autocast("cpu", enabled=False)(lambda x, w: x @ w)
HAS_SETTING = RELEASE >= (2, 10)  # for compiled backward passes


@pytest.mark.skipif(
    not HAS_SETTING, reason="before 2.10 compiled backward passes run in the region around them"
)
@pytest.mark.parametrize("inside", [*INSIDE, "decorated"])
def test_a_region_in_a_graph_holds_in_its_backward_pass_inside_of_another_too(inside):
    def call(x, w):
        if inside == "decorated":
            return OFF_BY_DECORATION(x, w)
        with autocast("cpu", **{"dtype": BRAIN, **INSIDE[inside]}):
            return x @ w

    def gradients(function):
        leaves = [numbers(8, 8, seed=seed).requires_grad_() for seed in (1, 2)]
        with autocast("cpu", BRAIN):
            result = function(*leaves)
        return torch.autograd.grad(result.float().square().sum(), leaves)

    made = compiled(call)
    setting = torch._functorch.config.backward_pass_autocast
    got, expected = gradients(made), gradients(call)
    assert all(map(torch.equal, got, expected))
    assert torch._functorch.config.backward_pass_autocast == setting
