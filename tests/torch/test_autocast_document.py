"""PyTorch's document of autocast, statement by statement: `preamp.torch.autocast` beside `torch.autocast`.

What the document shows on CUDA runs here on both device types.
"""

import functools
import inspect
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function

import preamp.torch
from preamp import casting
from preamp.errors import UsageError
from preamp.torch import autocast, custom_bwd, custom_fwd
from tests.combinations import in_one_test

from .regions import COMPILED, RELEASE, compiled, run_in, since_2_7, ways

HALF, BRAIN, FULL, DOUBLE, LONG = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64
no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_cuda)])
# Eagerly, and compiled with the regions that it makes.
compiles = pytest.mark.parametrize(
    "compiles",
    [False, *([True] if RELEASE > (2, 6) else [])],
    ids=["eager", "compiled"][: 1 + (RELEASE > (2, 6))],
)
makes = pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["preamp", "torch"])
edits = pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT}, {"report": True}], ids=str)
mismatch = pytest.raises(RuntimeError, match=r"(?i)same dtype|expected .* type")


def numbers(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def state() -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what a function returns in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def all_same(a: list[Any], b: list[Any]) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def heard(make: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Return the type and message of an error, and the warnings with the files they point to."""
    error: tuple[Any, ...] = (None, "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make(*arguments, **options)
        except Exception as raised:
            error = type(raised), str(raised)
    return *error, [(w.category, str(w.message), w.filename) for w in caught]


def without_files(told: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what was heard without the files, which are PyTorch's own in releases as late as 2.8."""
    return *told[:2], [warning[:2] for warning in told[2]]


@contextmanager
def switched_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Switch autocast on by hand: the original's region refuses to for CUDA where there is none."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    yield
    torch.set_autocast_enabled(device, before[0])
    torch.set_autocast_dtype(device, before[1])


# The examples


def trained(region: Any, device: str, way: str = "eager", **options: Any) -> list[torch.Tensor]:
    """Return the losses of a short training, then its outputs, gradients and weights."""
    model, losses, seen = network().to(device), [], []

    def forward(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(x)
        return output, F.cross_entropy(output, target)

    run = run_in(way, partial(region, device_type=device, **options), forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for batch in range(2):
            x, target = numbers(5, 2, 6, seed=batch, device=device), torch.arange(5, device=device) % 3
            optimizer.zero_grad()
            output, loss = run(x, target)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            seen += [output, *(p.grad.clone() for p in model.parameters())]
            assert (output.dtype, loss.dtype) == (
                options.get("dtype", torch.get_autocast_dtype(device)),
                FULL,
            )
            assert all(p.grad.dtype == FULL for p in model.parameters())
    return [*losses, *seen, *model.parameters()]


TRAINED = [{}, {"dtype": BRAIN}, {"dtype": HALF}]


@devices
@pytest.mark.parametrize(
    ("place", "way"), [*((place, "eager") for place in range(3)), (0, COMPILED), (2, "around")]
)
def test_training_with_the_loss_inside_and_backward_outside(device, place, way):
    options = TRAINED[place]
    mine, original = (trained(region, device, way, **options) for region in (autocast, torch.autocast))
    assert all_same(mine, original)
    assert mine[4] < mine[2] < mine[0]  # the same batch, epoch by epoch


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@devices
@makes
def test_a_decorated_forward_is_a_region_and_what_is_around_it_is_not(region, device, compiles):
    class Net(nn.Linear):
        @region(device_type=device)
        def forward(self, x):
            """Do it."""
            return super().forward(x)

    model, x = Net(6, 3).to(device), numbers(5, 6, device=device)

    def both(x):
        return model(x), F.linear(x, model.weight, model.bias)

    run = compiled(both) if compiles else both
    for _ in range(2):
        output, plain = run(x)
        assert (plain.dtype, torch.is_autocast_enabled(device)) == (FULL, False)
        with torch.autocast(device):
            assert same(output, F.linear(x, model.weight, model.bias))
    assert (Net.forward.__name__, Net.forward.__doc__) == ("forward", "Do it.")


@ways
@devices
@makes
def test_mixed_inputs_need_no_casts_inside_and_need_them_outside(region, device, way):
    a, b, d = (numbers(8, 8, seed=n, device=device) for n in range(3))

    def inside(a, b, d):
        e = torch.mm(a, b)
        return e, torch.mm(d, e)

    e, f = run_in(way, partial(region, device_type=device), inside)(a, b, d)
    low = torch.get_autocast_dtype(device)
    assert same(e, a.to(low) @ b.to(low))
    assert same(f, d.to(low) @ e)
    with mismatch:
        torch.mm(d, f)
    assert same(torch.mm(d, f.float()), d @ f.to(FULL))


@compiles
@devices
@makes
def test_a_disabled_region_inside_gives_control_and_hands_it_back(region, device, compiles):
    a, b, c, d = (numbers(8, 8, seed=n, device=device) for n in range(4))
    low = torch.get_autocast_dtype(device)

    def nested(a, b, c, d):
        with region(device_type=device):
            e = torch.mm(a, b)
            with region(device_type=device, enabled=False):
                if not compiles:  # a graph does not go on after an error
                    with mismatch:
                        torch.mm(c, e)
                f = torch.mm(c, e.float())
                double = torch.mm(c.double(), c.double())
            return e, f, torch.mm(d, f), double

    e, f, g, double = (compiled(nested) if compiles else nested)(a, b, c, d)
    assert (e.dtype, f.dtype, g.dtype, double.dtype) == (low, FULL, low, DOUBLE)
    assert same(f, c @ e.float())
    assert same(g, d.to(low) @ f.to(low))


@pytest.mark.parametrize("way", ["eager", "around"])
@pytest.mark.parametrize("options", [{"dtype": BRAIN}, {"dtype": HALF}, {}])
def test_inference_with_the_loop_inside(options, way):
    model, data, results = network().eval(), [numbers(5, 2, 6, seed=n) for n in range(4)], []
    for region in (autocast, torch.autocast):
        run = compiled(model) if way == "around" else model
        with region(device_type="cpu", **options), torch.no_grad():
            results.append([run(x) for x in data])
    assert all_same(*results)
    assert {r.dtype for r in results[0]} == {options.get("dtype", BRAIN)}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("low", [HALF, BRAIN])
def test_a_model_traced_in_a_region_and_frozen_keeps_its_casts(request, low):
    before = torch._C._jit_set_autocast_mode(False)  # TorchScript's own autocast, as the document advises
    request.addfinalizer(lambda: torch._C._jit_set_autocast_mode(before))
    model, frozen = nn.Sequential(nn.Linear(2, 3)).eval(), []
    with pytest.warns(FutureWarning, match="deprecated"):
        mine = preamp.torch.cpu.amp.autocast(cache_enabled=False, **({} if low == BRAIN else {"dtype": low}))
    for region in (mine, torch.autocast("cpu", low, cache_enabled=False)):
        with region:
            traced = torch.jit.trace(model, numbers(1, 2))
        frozen.append(torch.jit.freeze(traced))
    casts = [[node.kind() for node in one.graph.nodes()] for one in frozen]
    assert casts[0] == casts[1]
    for seed in range(3):
        x = numbers(4, 2, seed=seed)
        assert all_same(*[[one(x)] for one in frozen])
        assert (frozen[0](x).dtype, model(x).dtype) == (low, FULL)


# State: nesting, threads, what is inherited

DTYPES, ENABLED = st.sampled_from([None, None, HALF, BRAIN]), st.sampled_from([True, True, False])
LEVEL = st.tuples(DTYPES, ENABLED, st.sampled_from([None, True, False]), st.booleans())


@settings(max_examples=50, deadline=None)
@given(script=st.lists(LEVEL, min_size=1, max_size=5))
def test_regions_inherit_nest_and_restore_as_the_originals_do(script):
    """`None` takes what is in force where the region is made, which may be before the others are entered."""
    a, histories = numbers(2, 2), []
    for region in (autocast, torch.autocast):
        history, before = [], state()
        early = [region("cpu", *options) if is_early else None for *options, is_early in script]
        with ExitStack() as stack:
            for made, (*options, _) in zip(early, script, strict=True):
                stack.callback(lambda history=history: history.append((*state(), torch.mm(a, a).dtype)))
                stack.enter_context(made or region("cpu", *options))
                history.append((*state(), torch.mm(a, a).dtype))
        assert state() == before
        histories.append(history)
    assert histories[0] == histories[1]


@since_2_7
@settings(max_examples=3, deadline=None)
@given(script=st.lists(LEVEL, min_size=1, max_size=4))
def test_regions_inherit_nest_and_restore_in_a_graph_as_they_do_outside(script):
    a, before = numbers(2, 2), state()

    def nested(region, early, script):
        results = [torch.mm(a, a)]
        if script:
            *options, is_early = script[0]
            with early[0] if is_early else region("cpu", *options):
                results += nested(region, early[1:], script[1:])
        return [*results, torch.mm(a, a)]

    histories = []
    for region in (autocast, torch.autocast):
        early = [region("cpu", *options) if is_early else None for *options, is_early in script]
        for run in (compiled(nested), nested):
            histories.append([one.dtype for one in run(region, early, script)])
            assert state() == before
    assert histories == [histories[0]] * 4


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@makes
def test_a_new_thread_starts_without_autocast_and_has_its_own(region, compiles):
    a, mm, decorated = numbers(4, 4), torch.mm, region("cpu", dtype=HALF)(torch.mm)
    if compiles and RELEASE == (2, 6):
        pytest.skip("PyTorch 2.6 does not compile again for a region of another precision")
    if compiles:
        torch._dynamo.reset()
        # One function with the region, and one around which are regions.
        mm, decorated = (
            torch.compile(lambda *args, f=f: f(*args), backend="aot_eager") for f in (mm, decorated)
        )

    def work():
        before = state(), mm(a, a).dtype
        with region("cpu", dtype=BRAIN):
            inside = mm(a, a).dtype
        return before, inside, decorated(a, a).dtype, mm(a, a).dtype

    with region("cpu", dtype=HALF, cache_enabled=False):
        here = state()
        assert in_thread(work) == (((False, BRAIN, True), FULL), BRAIN, HALF, FULL)
        assert state() == here
        assert mm(a, a).dtype == HALF


# Names of each device type

settings_of = attrgetter("device", "fast_dtype", "_enabled", "_cache_enabled")
ARGUMENTS = [(), (False,), (True, BRAIN), (True, HALF), (True, HALF, False), (False, BRAIN, True)]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.parametrize("surrounding", [None, HALF])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize(("device", "default"), [("cpu", BRAIN), ("cuda", HALF)])
def test_the_names_of_a_device_type_take_their_own_order(device, default, arguments, surrounding):
    enabled, dtype, cache_enabled = (*arguments, *(True, default, True)[len(arguments) :])
    keywords = dict(zip(("enabled", "dtype", "cache_enabled"), arguments, strict=False))
    named = getattr(preamp.torch, device).amp.autocast
    with autocast("cpu", dtype=surrounding, cache_enabled=False) if surrounding else nullcontext():
        plain = autocast(device, dtype, enabled, cache_enabled)
        original = getattr(torch, device).amp.autocast
        makers = [partial(original, *arguments), partial(named, *arguments), partial(named, **keywords)]
        with pytest.warns(FutureWarning, match="deprecated"):
            regions = [make() for make in makers]
        assert {settings_of(region) for region in regions} == {settings_of(plain)}


A = numbers(2, 2)
NAMED = [
    (getattr(package, device).amp.autocast, device)
    for package in (preamp.torch, torch)
    for device in ("cpu", "cuda")
]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.parametrize(("named", "device"), NAMED)
def test_the_names_of_a_device_type_are_deprecated_classes(named, device):
    def made(*arguments, **keywords):
        with pytest.warns(FutureWarning, match=rf"torch\.{device}\.amp\.autocast.*is deprecated") as caught:
            region = named(*arguments, **keywords)
        assert {warning.filename for warning in caught if warning.category is FutureWarning} == {__file__}
        return region

    region = made()
    assert isinstance(region, named)
    assert isinstance(region, torch.autocast)
    made_by = (
        named if issubclass(named, autocast) else named.__init__
    )  # Python 3.13 shows only this of PyTorch's
    parameters = {name: one for name, one in inspect.signature(made_by).parameters.items() if name != "self"}
    assert list(parameters)[:3] == ["enabled", "dtype", "cache_enabled"]
    default = parameters["dtype"].default
    assert default is region.fast_dtype is {"cpu": BRAIN, "cuda": HALF}[device]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        class Tagged(named):
            def __new__(cls, tag):
                return super().__new__(cls)

            def __init__(self, tag):
                super().__init__(dtype=HALF)
                self.tag = tag

        of_class = len(caught)
        tagged = Tagged("x")
    # PyTorch warns of the subclass since 2.9, and of its objects before.
    of_class_alone = issubclass(named, autocast) or "__deprecated__" in vars(named)
    assert of_class == of_class_alone
    deprecated = [warning for warning in caught if warning.category is FutureWarning]
    assert [warning.filename for warning in deprecated] == [__file__]
    assert "deprecated" in str(deprecated[0].message)
    assert isinstance(tagged, named)
    assert (tagged.tag, tagged.fast_dtype, tagged.device) == ("x", HALF, device)
    if device == "cpu":
        with tagged:
            assert torch.mm(A, A).dtype == HALF
        assert made(True, HALF)(torch.mm)(A, A).dtype == HALF


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_the_names_of_a_device_type_take_what_pytorch_does_not_have():
    named = preamp.torch.cpu.amp.autocast
    assert isinstance(named(), autocast)
    with named(casting=casting.DEFAULT.float32("mm")) as region:
        assert torch.mm(A, A).dtype == FULL
    assert isinstance(region, autocast)

    class Mine(named):
        pass

    with pytest.raises(
        UsageError, match=r"Mine is a subclass .*Write preamp\.torch\.autocast\('cpu', \.\.\.\)"
    ):
        Mine(report=True)


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available:UserWarning")
@pytest.mark.parametrize("arguments", [(), (8.0, 4.0, 0.25, 7), (8.0, 4.0, 0.25, 7, False)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_scaler_of_a_device_type_takes_the_documented_arguments(device, arguments):
    named = getattr(preamp.torch, device).amp.GradScaler(*arguments)
    original = torch.amp.GradScaler(device, *arguments)
    assert isinstance(named, preamp.torch.GradScaler)
    assert (named.is_enabled(), named._device) == (original.is_enabled(), original._device)
    assert named.state_dict() == original.state_dict()


@pytest.mark.parametrize("name", ["autocast", "GradScaler", "custom_fwd", "custom_bwd"])
def test_amp_has_the_names_of_the_original(name):
    assert getattr(preamp.torch.amp, name) is getattr(preamp.torch, name) is not getattr(torch.amp, name)


def test_cudas_decorators_are_for_cuda_tensors():
    seen, original = [], functools.partial(torch.amp.custom_fwd, device_type="cuda")
    for decorate in (preamp.torch.cuda.amp.custom_fwd, original):
        with FakeTensorMode(), switched_on("cuda", HALF):
            a, b = torch.empty(4, 4, device="cuda"), torch.empty(4, 4)
            for options in ({}, {"cast_inputs": BRAIN}):
                forward = decorate(**options)(lambda ctx, a, b: (a.dtype, b.dtype, torch.mm(a, a).dtype))
                seen.append(forward(SimpleNamespace(), a, b))
    assert seen == [(FULL, FULL, HALF), (BRAIN, FULL, BRAIN)] * 2
    backward = preamp.torch.cuda.amp.custom_bwd(lambda ctx: torch.is_autocast_enabled("cuda"))
    with switched_on("cuda", HALF):
        assert backward(SimpleNamespace(_dtype=HALF, _fwd_used_autocast=False)) is False


# Custom autograd functions

STATES = {"outside": {"enabled": False}, "a bfloat16 region": {"dtype": BRAIN}}
STATES["a float16 region"] = {"dtype": HALF}
PLACES = ["inside", *STATES, *(f"another thread, {place}" for place in STATES)]


def product(fwd: Any, bwd: Any, cast_inputs: torch.dtype | None, log: list[Any] | None) -> type[Function]:
    """Return a matrix product as a custom function that logs its states and dtypes if it has a log."""

    class Product(Function):
        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, a, b, double, count):
            ctx.save_for_backward(a, b)
            result = torch.mm(a, b)
            if log is not None:
                log.append((*state()[:2], [x.dtype for x in (a, b, double, count, result)]))
            return result

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            results = torch.mm(gradient, b.t()), torch.mm(a.t(), gradient)
            if log is not None:
                log.append((*state()[:2], [x.dtype for x in (gradient, *results)]))
            return *results, None, None

    return Product


def used(
    region: Any, fwd: Any, bwd: Any, cast_inputs: Any, options: Any, place: str, run: Any = None
) -> tuple[Any, Any]:
    """Return the log, and result and gradients, of forward in a region and backward in some place.

    With `run` it is this that calls the function.
    """
    log: list[Any] = []
    a, b = (numbers(4, 4, seed=n).requires_grad_() for n in range(2))

    def backward() -> None:
        with nullcontext() if "outside" in place else region("cpu", **STATES[place.rpartition(", ")[2]]):
            result.sum().backward()

    with region("cpu", **options):
        double, count = torch.ones((), dtype=DOUBLE), torch.ones((), dtype=LONG)
        result = (run or product(fwd, bwd, cast_inputs, log).apply)(a, b, double, count)
        if place == "inside":
            result.sum().backward()
    if place != "inside":
        in_thread(backward) if "thread" in place else backward()
    return log, [result, a.grad, b.grad]


@pytest.mark.parametrize("place", PLACES)
@in_one_test(
    cast_inputs=[None, FULL, HALF, BRAIN],
    options=[{"enabled": False}, {"dtype": BRAIN}, {"dtype": HALF}, {}],
)
def test_custom_functions_run_in_the_documented_state(options, cast_inputs, place):
    log, values = used(autocast, custom_fwd, custom_bwd, cast_inputs, options, place)
    original = used(torch.autocast, torch.amp.custom_fwd, torch.amp.custom_bwd, cast_inputs, options, place)
    assert log == original[0]
    assert all_same(values, original[1])
    inside = options.get("enabled", True)
    taken = (inside and cast_inputs) or FULL
    is_on = inside and cast_inputs is None
    gives = options.get("dtype", BRAIN) if is_on else taken
    assert [log[0][0], log[1][0]] == [is_on, is_on]
    assert [log[0][2], log[1][2]] == [[taken, taken, DOUBLE, LONG, gives], [gives] * 3]
    assert [v.dtype for v in values] == [gives, FULL, FULL]


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("edit", [{"casting": casting.DEFAULT.float32("mm")}, {"emulate": True}], ids=str)
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_backward_has_the_edits_of_forward_wherever_it_runs(dtype, edit, place):
    log, values = used(autocast, custom_fwd, custom_bwd, None, {**edit, "dtype": dtype}, place)
    low = dtype if "emulate" in edit else FULL
    assert log == [(True, dtype, [FULL, FULL, DOUBLE, LONG, low]), (True, dtype, [low] * 3)]
    assert [same(v, v.to(dtype).to(v.dtype)) for v in values] == ["emulate" in edit] * 3


@since_2_7
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch, of itself
@pytest.mark.parametrize(
    ("cast_inputs", "options"),
    [
        (HALF, {"dtype": BRAIN}),
        (None, {"dtype": BRAIN, "casting": casting.DEFAULT.float32("mm")}),
        (None, {"emulate": True}),
    ],
)
def test_a_compiled_custom_function_gives_what_it_gives_eagerly(cast_inputs, options):
    ours = autocast, custom_fwd, custom_bwd, cast_inputs, options
    run = compiled(product(*ours[1:4], None).apply)
    for place in PLACES:
        assert all_same(used(*ours, place, run)[1], used(*ours, place)[1])


@since_2_7
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("place", ["a float16 region", "another thread, a bfloat16 region"])
def test_backward_of_a_graph_that_was_not_in_a_region_is_cast_by_the_one_it_runs_in_as_in_pytorch(place):
    options, results = {"enabled": False}, []
    for names in (
        (autocast, custom_fwd, custom_bwd),
        (torch.autocast, torch.amp.custom_fwd, torch.amp.custom_bwd),
    ):
        run = compiled(product(*names[1:], None, None).apply)
        results.append(used(*names, None, options, place, run)[1])
    assert all_same(*results)
    assert not all_same(results[0], used(*names, None, options, place)[1])


Pair = namedtuple("Pair", ["first", "second"])


STRUCTURES: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda a, b: [a, [b, (a,)]],
    "tuple": lambda a, b: (a, [b], ()),
    "dict": lambda a, b: {"a": a, "nested": {"b": [b]}},
    "ordered": lambda a, b: OrderedDict(b=b, a=a),
    "default": lambda a, b: defaultdict(list, a=a, b=[b]),
    "named tuple": lambda a, b: Pair(a, Pair(b, [a])),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", list(STRUCTURES))
def test_a_structure_of_inputs_is_cast_as_deep_as_it_goes_and_keeps_its_type(name, inside):
    a, b = numbers(2), numbers(3).half()
    kept = [torch.ones(2, dtype=dtype) for dtype in (DOUBLE, LONG, torch.complex64)]
    kept += ["text", np.ones(2, np.float32), None, 1.5]
    given_, untouched = (STRUCTURES[name]([a, *kept], [b, *kept]) for _ in range(2))
    forward = custom_fwd(lambda ctx, value: value, device_type="cpu", cast_inputs=BRAIN)
    with autocast("cpu", enabled=inside):
        result = forward(SimpleNamespace(), given_)
    expected = STRUCTURES[name]([a.to(BRAIN), *kept], [b.to(BRAIN), *kept]) if inside else untouched
    assert (repr(result), repr(given_)) == (repr(expected), repr(untouched))  # types, dtypes and values
    assert (result is given_) == (not inside)


def test_backward_of_an_undecorated_forward_says_what_is_missing():
    with pytest.raises(UsageError, match=r"@custom_fwd\(device_type='cpu'\)"):
        custom_bwd(lambda ctx: None, device_type="cpu")(SimpleNamespace())


# What is refused, and what is warned of

ERRORS: dict[Callable[[Any], Any], type[Exception]] = {
    lambda amp: amp.autocast(1): ValueError,
    lambda amp: amp.autocast(torch.device("cpu")): ValueError,
    lambda amp: amp.autocast("nonsense"): RuntimeError,
    lambda amp: amp.autocast(""): RuntimeError,
    lambda amp: amp.autocast("meta"): RuntimeError,
    lambda amp: amp.autocast("cpu")(torch.ones(1)): TypeError,
    lambda amp: amp.autocast("cpu")("forward"): TypeError,
    lambda amp: amp.custom_fwd(device_type=torch.device("cpu")): ValueError,
    lambda amp: amp.custom_bwd(device_type=None): ValueError,
}


@pytest.mark.parametrize(("misuse", "error"), ERRORS.items())
def test_what_cannot_work_raises_what_the_original_raises(misuse, error):
    mine, original = heard(misuse, preamp.torch.amp), heard(misuse, torch.amp)
    assert mine[0] is error
    assert mine == original or (original[0], error) == (None, TypeError)  # as in PyTorch 2.10


DOUBTFUL = [("cpu", FULL), ("cpu", DOUBLE), ("cpu", torch.int8), ("cpu", torch.float8_e5m2), ("xpu", FULL)]


@edits
@pytest.mark.parametrize("arguments", [*DOUBTFUL, ("cuda",), ("cuda", HALF), ("cuda", BRAIN)], ids=str)
def test_what_is_not_supported_is_warned_of_and_switched_off(monkeypatch, arguments, edit):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made: list[Any] = []
    mine = heard(lambda: made.append(autocast(*arguments, **edit)))
    assert without_files(mine) == without_files(heard(lambda: torch.autocast(*arguments)))
    assert [(category, place) for category, _, place in mine[2]] == [(UserWarning, __file__)]
    with made[0]:
        assert not torch.is_autocast_enabled(made[0].device)
        assert torch.mm(numbers(2, 2), numbers(2, 2)).dtype == FULL
    off = heard(autocast, *arguments, enabled=False, **edit)
    assert without_files(off) == without_files(heard(torch.autocast, *arguments, enabled=False))


@ways
@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("mm")}, {"emulate": True}], ids=str)
@makes
def test_a_device_with_an_index_is_a_device(region, edit, way):
    """The original takes `str(tensor.device)` for what it means, although that is not documented."""
    edit, a = edit if region is autocast else {}, numbers(2, 2)
    expected = FULL if "casting" in edit else BRAIN
    assert run_in(way, partial(region, "cpu:0", **edit), torch.mm)(a, a).dtype == expected
    assert torch.mm(a, a).dtype == FULL


entropies = pytest.mark.parametrize("entropy", [F.binary_cross_entropy, nn.BCELoss()])


@ways
@entropies
@makes
def test_binary_cross_entropy_runs_in_float32_on_cpus(region, entropy, way):
    low = HALF
    p, target = torch.rand(9).to(low).requires_grad_(), torch.rand(9).to(low)
    loss = run_in(way, partial(region, "cpu", dtype=low), entropy)(p, target)
    loss.backward()
    assert same(loss, F.binary_cross_entropy(p.float(), target.float()))
    assert p.grad.dtype == low


@entropies
@pytest.mark.parametrize("dtype", [FULL, BRAIN])
def test_binary_cross_entropy_is_refused_by_cudas_table_with_what_to_write_instead(entropy, dtype):
    p, instead = torch.full((4,), 0.5, dtype=dtype), "binary_cross_entropy_with_logits"
    with FakeTensorMode(), switched_on("cuda", HALF):
        fake = torch.empty(4, dtype=dtype, device="cuda")
        with pytest.raises(RuntimeError, match=instead):
            entropy(fake, fake)
        assert F.binary_cross_entropy_with_logits(fake, fake).dtype == FULL
    with autocast("cpu", casting=casting.CUDA):
        with pytest.raises(UsageError, match=rf"^binary_cross_entropy .*{instead}"):
            entropy(p, p)
        assert F.binary_cross_entropy_with_logits(p, p).dtype == FULL
        with autocast("cpu", enabled=False):
            assert entropy(p, p).dtype == dtype
        with autocast("cpu", casting=casting.DEFAULT):
            assert entropy(p, p).dtype == FULL
    assert entropy(p, p).dtype == dtype
