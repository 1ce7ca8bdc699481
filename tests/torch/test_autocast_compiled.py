"""Regions in torch.compile, torch.export and torch.func; `torch.autocast` beside ours."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from preamp import casting
from preamp.torch import autocast

from .regions import BASE, BRAIN, FULL, HALF, RELEASE, all_same, flat, in_step, numbers, same, state, weight

EDITS = {
    "table": {"casting": casting.DEFAULT.float32("mm", "matmul", "bmm", "linear").lower("softmax")},
    "emulated": {"emulate": True},
}
X, W = numbers(5, 4), weight(4, 4)
pytestmark = [  # what PyTorch says of itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    assert torch._dynamo.eval_frame._stance.stance == "default"
    torch._dynamo.reset()


def program(x):
    return F.softmax(F.linear(x, W), -1) @ W + x.sum()


def learned(function):
    """Return what a function gives, and the gradients."""
    x = X.clone().requires_grad_()
    result = function(x)
    return [result.detach(), *torch.autograd.grad(result.float().square().sum(), [x, W])]


def counted(function):
    """Return a function compiled without graph breaks, and what counts its compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True), counter


def around(region, low):
    compiled, counter = counted(program)

    def run(x):
        with region("cpu", low):
            return compiled(x)

    return run, counter


def inside(region, low):
    def run(x):
        with region("cpu", dtype=low):
            result = program(x)
        return result + torch.mm(x.t(), x).sum()

    return counted(run)


def nested(region, low):
    def run(x):
        with region("cpu", HALF):
            result = program(x)
            with region("cpu", enabled=False):
                result = result.float() + program(x)
            with region("cpu", low, cache_enabled=False):
                return result + program(x)

    return counted(run)


def prebuilt(region, low):
    made = region("cpu", low)

    def run(x):
        with made:
            result = program(x)
        with made:
            return result + program(x)

    return counted(run)


def decorated(region, low):
    return counted(region("cpu", low)(program))


def decorated_inside(region, low):
    @region("cpu", low)
    def part(x):
        return F.linear(x, W)

    return counted(lambda x: F.softmax(part(x), -1) + torch.mm(x, W))


class Net(nn.Module):
    """A module that keeps a region, and makes one."""

    def __init__(self, region, low):
        super().__init__()
        self.region, self.linear, self.low, self.make = region("cpu", low), nn.Linear(4, 4), low, region
        self.linear.weight, self.linear.bias = W, nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        with self.region:
            first = self.linear(x)
        with self.make("cpu", dtype=self.low):
            return F.softmax(self.linear(first), -1) + torch.mm(x, x.t()).sum()


def module(region, low):
    return counted(Net(region, low))


def method(region, low):
    class Decorated(nn.Module):
        @region("cpu", low)
        def forward(self, x):
            return program(x)

    return counted(Decorated())


MADE_INSIDE = [inside, nested, module]
PLACES = [around, prebuilt, decorated, decorated_inside, method, *(MADE_INSIDE if RELEASE > (2, 6) else [])]
places = pytest.mark.parametrize("place", PLACES)


@places
def test_a_region_compiles_without_breaks_and_once_and_computes_what_it_does_eagerly(place):
    low, outcomes = HALF, []
    for region in (autocast, torch.autocast):
        torch._dynamo.reset()
        counters.clear()
        run, counter = place(region, low)
        outcomes.append([learned(run) for _ in range(3)])
        assert (counter.frame_count, dict(counters["graph_break"]), state()) == (1, {}, BASE)
    assert all(all_same(a, b) for a, b in zip(*outcomes, strict=True))
    compiled = outcomes[0][0]
    with torch.compiler.set_stance("force_eager"):
        eager = learned(place(autocast, low)[0])
    assert [one.dtype for one in compiled] == [one.dtype for one in eager]
    assert all(map(torch.allclose, compiled, eager, [2e-2] * 3, [2e-2] * 3))


def compiled_in_each_state(*regions):
    """Return in what dtypes a compiled function runs inside regions, and how often it is compiled."""
    torch._dynamo.reset()
    compiled, counter = counted(program)
    for _ in range(3):
        results = [[compiled(X)]]
        for low in (HALF, BRAIN):
            results.append([])
            for region in regions:
                with region("cpu", low):
                    results[-1].append(compiled(X))
        assert all(same(one, results_of[0]) for results_of in results for one in results_of)
    return [one.dtype for one, *_ in results], counter.frame_count


def test_each_state_around_a_compiled_function_is_compiled_once():
    original = compiled_in_each_state(torch.autocast)
    in_26 = ([FULL, HALF, HALF], 2)  # whose compiler does not ask for the precision of a region
    assert original == (in_26 if RELEASE == (2, 6) else ([FULL, HALF, BRAIN], 3))
    assert compiled_in_each_state(autocast) == compiled_in_each_state(autocast, torch.autocast) == original


@pytest.mark.skipif(RELEASE > (2, 6), reason="PyTorch compiles the making of a region since 2.7")
def test_a_region_that_is_made_in_compiled_code_breaks_the_graph():
    def run(x):
        with autocast("cpu", HALF):
            return program(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Make it once, outside"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(X)
    torch._dynamo.reset()
    compiled, eager = learned(torch.compile(run, backend="aot_eager")), learned(run)
    assert [one.dtype for one in compiled] == [one.dtype for one in eager]
    assert all(map(torch.allclose, compiled, eager, [2e-2] * 3, [2e-2] * 3))
    assert state() == BASE


def test_a_graph_break_inside_a_region_resumes_in_it():
    @torch.compile(backend="aot_eager")
    def run(x):
        with autocast("cpu", HALF):
            first = torch.mm(x, W)
            torch._dynamo.graph_break()
            second = torch.mm(x, W)
        return first, second, torch.mm(x, W)

    assert [one.dtype for one in run(X)] == [HALF, HALF, FULL]
    assert state() == BASE


def graphs_of_training(region):
    """Return how many graphs are compiled of steps whose backward and optimizer leave the graph."""
    w, counter = weight(4, 4), CompileCounterWithBackend("aot_eager")
    optimizer = torch.optim.SGD([w], lr=0.1)

    @torch.compile(backend=counter)
    def step(x):
        torch._dynamo.graph_break()
        loss = F.softmax(torch.mm(x, w), -1).float().sum()
        loss.backward()
        optimizer.step()
        return loss

    torch._dynamo.reset()
    for _ in range(4):
        with region:
            step(X)
    return counter.frame_count


def test_what_empties_the_cache_is_in_no_graph():
    assert graphs_of_training(autocast("cpu")) == graphs_of_training(nullcontext()) > 0


@pytest.mark.parametrize("compiled", ["step", "what calls it", "what calls it with a closure"])
def test_a_compiled_step_empties_the_cache_each_time(compiled):
    w = weight(4, 4)
    optimizer = torch.optim.SGD([w], lr=0.1)
    calls = {
        "step": optimizer.step,
        "what calls it": lambda: optimizer.step(),
        "what calls it with a closure": lambda: optimizer.step(lambda: None),
    }
    torch._dynamo.reset()
    step = torch.compile(calls[compiled], backend="aot_eager")
    with autocast("cpu"):
        for _ in range(3):
            w.grad = torch.ones(4, 4)
            F.linear(X, w)
            step()
            assert same(F.linear(X, w), F.linear(X.bfloat16(), w.bfloat16()))


def test_after_reports_in_overlapping_threads_functions_are_compiled():
    """The flags that PyTorch's dispatch modes keep for the process would stay set."""

    def first(others):
        with autocast("cpu", report=True):
            others()  # both are inside
            others()
        others()  # this one has left

    def second(others):
        with autocast("cpu", report=True):
            for _ in range(3):
                others()

    in_step(first, second)
    compiled, counter = counted(program)
    compiled(X)
    assert (counter.frame_count, is_in_torch_dispatch_mode()) == (1, False)


# Export


def decorated_layer(region, low):
    class Layer(nn.Linear):
        @region("cpu", low)
        def forward(self, x):
            return super().forward(x)

    torch.manual_seed(0)
    return Layer(4, 3)


@pytest.mark.parametrize(
    ("make", "strict", "surrounded"), [(Net, True, True), (Net, False, False), (decorated_layer, False, True)]
)
def test_a_module_with_a_region_is_exported_with_it(make, strict, surrounded):
    low = HALF
    if make is Net and strict and RELEASE == (2, 6):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Make it once, outside"):
            torch.export.export(Net(autocast, low), (X,), strict=True)
        return
    results = []
    for region in (autocast, torch.autocast):
        net, around_it = make(region, low), region("cpu", HALF) if surrounded else nullcontext()
        with around_it:
            exported = torch.export.export(net, (X,), strict=strict)
        assert same(exported.module()(X), net(X))
        assert state() == BASE
        code = exported.graph_module.code
        for place, parameter in exported.graph_signature.inputs_to_parameters.items():
            code = code.replace(place, parameter.replace(".", "_"))  # places are named after closures
        results.append(code)
    assert results[0] == results[1]


# Transforms


def tangent(function):
    return lambda x: torch.func.jvp(function, (x,), (x.cos(),))


TRANSFORMS = {
    "vmap": torch.func.vmap,
    "grad": lambda function: torch.func.grad(lambda x: function(x).float().square().sum()),
    "jvp": tangent,
    "vmap of grad": lambda function: torch.func.vmap(torch.func.grad(lambda x: function(x).float().sum())),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "functionalize": torch.func.functionalize,
}
MATRIX = numbers(4, 3)


def rows(x):
    return F.softmax(torch.mm(x.reshape(-1, 4), MATRIX), -1)


def by_hand(edit, low):
    """Return what `rows` computes in a region, written without one."""

    def run(x):
        x, m = x.reshape(-1, 4), MATRIX
        if "emulate" in edit:
            product = torch.mm(x.to(low).float(), m.to(low).float()).to(low).float()
        else:
            product = torch.mm(x, m) if edit else torch.mm(x.to(low), m.to(low))
        return F.softmax(product.to(low) if "casting" in edit else product, -1)

    return run


@pytest.mark.parametrize("edit", [{}, *EDITS.values()], ids=["default", *EDITS])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_transforms_go_through_a_region_that_is_inside(transform, edit):
    low = HALF
    region = autocast("cpu", low, **edit)
    assert all_same(flat(transform(region(rows))(X)), flat(transform(by_hand(edit, low))(X)))


@pytest.mark.parametrize("edit", [{}, *EDITS.values()], ids=["default", *EDITS])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_transforms_run_in_a_region_that_is_around(transform, edit):
    low = HALF
    results = flat(autocast("cpu", low, **edit)(transform(rows))(X))
    expected = flat(transform(by_hand(edit, low))(X))
    assert [one.dtype for one in results] == [one.dtype for one in expected]
    assert all(torch.allclose(a, b, rtol=0.1, atol=0.02) for a, b in zip(results, expected, strict=True))
    if not edit:
        assert all_same(results, flat(torch.autocast("cpu", low)(transform(rows))(X)))


@pytest.mark.parametrize("rule", ["lower", "float32", "widest"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_transforms_of_operators_with_numbers(transform, rule):
    def compute(x):
        return (1 - x * 2) / 3 + 1 + torch.add(x, 1, alpha=2)

    def expected(x):
        x = x.to(HALF if rule == "lower" else x.dtype)
        return compute(x)

    region = autocast("cpu", HALF, casting=getattr(casting.DEFAULT, rule)("add", "mul", "rsub", "div"))
    assert all_same(flat(transform(region(compute))(X)), flat(transform(expected)(X)))
