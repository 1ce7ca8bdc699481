"""PyTorch's document of autocast, statement by statement: `preamp.torch.autocast` beside `torch.autocast`.

What the document shows on CUDA runs here on both device types.
"""

import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

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

HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
makes = pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["preamp", "torch"])
devices = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))],
)


def numbers(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def state(device: str = "cpu") -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what a function returns in a new thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


# The examples


def trained(region: Any, device: str, **options: Any) -> list[torch.Tensor]:
    """Return all outputs, losses, gradients and weights of a short training."""
    model, seen = network().to(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for batch in range(2):
            x, target = numbers(5, 2, 6, seed=batch, device=device), torch.arange(5, device=device) % 3
            optimizer.zero_grad()
            with region(device_type=device, **options):
                output = model(x)
                loss = F.cross_entropy(output, target)
            loss.backward()
            optimizer.step()
            assert (output.dtype, loss.dtype) == (
                options.get("dtype", torch.get_autocast_dtype(device)),
                FULL,
            )
            seen += [output, loss, *(p.grad.clone() for p in model.parameters())]
            assert all(p.grad.dtype == FULL for p in model.parameters()), epoch
    return [*seen, *model.parameters()]


@devices
@pytest.mark.parametrize("options", [{}, {"dtype": BRAIN}, {"dtype": HALF}])
def test_training_with_the_loss_inside_and_backward_outside(device, options):
    mine, original = trained(autocast, device, **options), trained(torch.autocast, device, **options)
    assert all(same(a, b) for a, b in zip(mine, original, strict=True))
    assert mine[1 + 5 * 6] < mine[1]  # the loss of the first batch, three epochs later: 2 + 4 tensors a step


@devices
@makes
def test_a_decorated_forward_is_a_region_and_what_is_around_it_is_not(region, device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        @region(device_type=device)
        def forward(self, x):
            """Do it."""
            assert torch.is_autocast_enabled(device)
            return self.inner(x)

    model, x = Net().to(device), numbers(5, 2, 6, device=device)
    for _ in range(2):
        output = model(x)
        assert not torch.is_autocast_enabled(device)
        with torch.autocast(device):
            assert same(output, model.inner(x))
        assert not same(output, model.inner(x))
    assert (Net.forward.__name__, Net.forward.__doc__) == ("forward", "Do it.")


@devices
@makes
def test_mixed_inputs_need_no_casts_inside_and_need_them_outside(region, device):
    a, b, d = (numbers(8, 8, seed=n, device=device) for n in range(3))
    with region(device_type=device):
        e = torch.mm(a, b)
        f = torch.mm(d, e)
    low = torch.get_autocast_dtype(device)
    assert same(e, a.to(low) @ b.to(low))
    assert same(f, d.to(low) @ e)
    with pytest.raises(RuntimeError, match=r"(?i)same dtype|expected .* type"):
        torch.mm(d, f)
    assert same(torch.mm(d, f.float()), d @ f.to(FULL))
    assert d.float() is d


@pytest.mark.parametrize("options", [{"dtype": BRAIN}, {"dtype": HALF}, {}])
def test_inference_with_a_loop_inside(options):
    model, data = network().eval(), [numbers(5, 2, 6, seed=n) for n in range(4)]
    results = []
    for region in (autocast, torch.autocast):
        with region(device_type="cpu", **options), torch.no_grad():
            results.append([model(x) for x in data])
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert {r.dtype for r in results[0]} == {options.get("dtype", BRAIN)}


@pytest.fixture
def no_jit_pass() -> Iterator[None]:
    """Switch off TorchScript's own autocast, as the document advises."""
    before = torch._C._jit_set_autocast_mode(False)
    yield
    torch._C._jit_set_autocast_mode(before)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("no_jit_pass")
@pytest.mark.parametrize("options", [{}, {"dtype": HALF}])
def test_a_model_traced_in_a_region_and_frozen_keeps_its_casts(options):
    class Classifier(nn.Module):
        def __init__(self, inputs, classes):
            super().__init__()
            self.layer = nn.Linear(inputs, classes)

        def forward(self, x):
            return self.layer(x)

    model, frozen = Classifier(2, 3).eval(), []
    low = options.get("dtype", BRAIN)
    for region in (
        preamp.torch.cpu.amp.autocast(cache_enabled=False, **options),
        torch.autocast("cpu", low, cache_enabled=False),
    ):
        with region:
            traced = torch.jit.trace(model, numbers(1, 2))
        frozen.append(torch.jit.freeze(traced))
    casts = [[node.kind() for node in one.graph.nodes()] for one in frozen]
    assert casts[0] == casts[1]
    for seed in range(3):
        x = numbers(4, 2, seed=seed)
        mine, original = (one(x) for one in frozen)
        assert mine.dtype == low
        assert same(mine, original)
    assert model(x).dtype == FULL


@devices
@makes
def test_a_disabled_region_inside_gives_control_and_hands_it_back(region, device):
    a, b, c, d = (numbers(8, 8, seed=n, device=device) for n in range(4))
    low = torch.get_autocast_dtype(device)
    with region(device_type=device):
        e = torch.mm(a, b)
        with region(device_type=device, enabled=False):
            with pytest.raises(RuntimeError, match=r"(?i)same dtype|expected .* type"):
                torch.mm(c, e)
            f = torch.mm(c, e.float())
            assert torch.mm(c.half(), c.half()).dtype == HALF
        g = torch.mm(d, f)
    assert (e.dtype, f.dtype, g.dtype) == (low, FULL, low)
    assert same(f, c @ e.float())
    assert same(g, d.to(low) @ f.to(low))


# State: nesting, threads, what is inherited

OPTIONS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([None, None, HALF, BRAIN]),
        "enabled": st.sampled_from([True, True, False]),
        "cache_enabled": st.sampled_from([None, True, False]),
    }
)


@settings(max_examples=150, deadline=None)
@given(script=st.lists(st.tuples(OPTIONS, st.booleans()), min_size=1, max_size=5))
def test_regions_inherit_nest_and_restore_as_the_originals_do(script):
    """`None` takes what is in force where the region is made, which may be before the others are entered."""
    a, histories = numbers(2, 2), []
    for region in (autocast, torch.autocast):
        history, before = [], state()
        early = [region("cpu", **options) if is_early else None for options, is_early in script]
        with ExitStack() as stack:
            for made, (options, _) in zip(early, script, strict=True):
                history.append(state())
                stack.callback(lambda history=history: history.append((*state(), torch.mm(a, a).dtype)))
                stack.enter_context(made or region("cpu", **options))
                history.append((*state(), torch.mm(a, a).dtype))
        assert state() == before
        histories.append(history)
    assert histories[0] == histories[1]


@makes
def test_a_new_thread_starts_without_autocast_and_has_its_own(region):
    a = numbers(4, 4)

    def work():
        before = state(), torch.mm(a, a).dtype
        with region("cpu", dtype=BRAIN):
            inside = torch.mm(a, a).dtype
        return before, inside, decorated().dtype, torch.mm(a, a).dtype

    @region("cpu", dtype=HALF)
    def decorated():
        return torch.mm(a, a)

    with region("cpu", dtype=HALF, cache_enabled=False):
        here = state()
        assert in_thread(work) == (((False, BRAIN, True), FULL), BRAIN, HALF, FULL)
        assert state() == here
        assert torch.mm(a, a).dtype == HALF


@makes
def test_an_error_inside_leaves_the_region(region):
    before = state()
    with pytest.raises(ZeroDivisionError), region("cpu", dtype=HALF, cache_enabled=False):
        _ = 1 / 0
    assert state() == before


# Names of each device type


def settings_of(made: torch.autocast) -> tuple[Any, ...]:
    return made.device, made.fast_dtype, made._enabled, made._cache_enabled


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("surrounding", [None, HALF, BRAIN])
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {}),
        ((False,), {}),
        ((True, BRAIN), {}),
        ((True, HALF, False), {}),
        ((), {"dtype": HALF}),
        ((True,), {"cache_enabled": False, "dtype": BRAIN}),
        ((), {"enabled": False}),
    ],
)
@pytest.mark.parametrize(("device", "default"), [("cpu", BRAIN), ("cuda", HALF)])
def test_the_names_of_a_device_type_take_their_own_order_of_arguments(
    device, default, arguments, options, surrounding
):
    def values(enabled=True, dtype=default, cache_enabled=True):
        return {"enabled": enabled, "dtype": dtype, "cache_enabled": cache_enabled}

    with autocast("cpu", dtype=surrounding, cache_enabled=False) if surrounding else nullcontext():
        named = getattr(preamp.torch, device).amp.autocast(*arguments, **options)
        with pytest.warns(FutureWarning, match="deprecated"):
            original = getattr(torch, device).amp.autocast(*arguments, **options)
        plain = autocast(device, **values(*arguments, **options))
        assert isinstance(named, autocast)
        assert settings_of(named) == settings_of(plain) == settings_of(original)


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")
@pytest.mark.parametrize("arguments", [(), (8.0, 3.0, 0.25, 7), (8.0, 3.0, 0.25, 7, False)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_scaler_of_a_device_type_takes_the_documented_arguments(device, arguments):
    named = getattr(preamp.torch, device).amp.GradScaler(*arguments)
    original = torch.amp.GradScaler(device, *arguments)
    assert isinstance(named, preamp.torch.GradScaler)
    assert named.is_enabled() == original.is_enabled()
    assert named.state_dict() == original.state_dict()
    assert named._device == original._device


@pytest.mark.parametrize("name", ["autocast", "GradScaler", "custom_fwd", "custom_bwd"])
def test_amp_has_the_same_names_as_the_package(name):
    assert getattr(preamp.torch.amp, name) is getattr(preamp.torch, name)
    assert hasattr(torch.amp, name)


def test_cuda_names_of_the_decorators_are_for_cuda_tensors():
    """Without a GPU autocast of fake CUDA tensors can still be switched on by hand."""
    seen = []
    for decorate in (
        preamp.torch.cuda.amp.custom_fwd,
        lambda **o: torch.amp.custom_fwd(device_type="cuda", **o),
    ):
        with FakeTensorMode(), switched_on("cuda", HALF):
            kept, cast = (
                decorate(**options)(lambda ctx, a, b: (a.dtype, b.dtype, torch.mm(a, a).dtype, ctx.__dict__))
                for options in ({}, {"cast_inputs": BRAIN})
            )
            a, b = torch.empty(4, 4, device="cuda"), torch.empty(4, 4)
            seen.append([f(SimpleNamespace(), a, b)[:3] for f in (kept, cast)])
    assert seen[0] == seen[1] == [(FULL, FULL, HALF), (BRAIN, FULL, BRAIN)]
    backward = preamp.torch.cuda.amp.custom_bwd(lambda ctx, a: torch.is_autocast_enabled("cuda"))
    with switched_on("cuda", HALF):
        assert backward(SimpleNamespace(_dtype=HALF, _fwd_used_autocast=False), None) is False


@contextmanager
def switched_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    yield
    torch.set_autocast_enabled(device, before[0])
    torch.set_autocast_dtype(device, before[1])


# Custom autograd functions


def product(fwd: Any, bwd: Any, cast_inputs: torch.dtype | None, log: list[Any]) -> type[Function]:
    """Return a matrix product as a custom function that logs in which state and dtypes it runs."""

    class Product(Function):
        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, a, b, scale, count):
            ctx.save_for_backward(a, b)
            result = torch.mm(a, b)
            log.append(("forward", *state()[:2], a.dtype, b.dtype, scale.dtype, count.dtype, result.dtype))
            return result

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            results = torch.mm(gradient, b.t()), torch.mm(a.t(), gradient)
            log.append(("backward", *state()[:2], gradient.dtype, *(r.dtype for r in results)))
            return *results, None, None

    return Product


def run_product(
    region: Any, fwd: Any, bwd: Any, cast_inputs: Any, options: dict[str, Any] | None, place: str
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the log, and the result and gradients, with forward in a region and backward in some place."""
    log: list[Any] = []
    a, b = (numbers(4, 4, seed=n).requires_grad_() for n in range(2))
    places = {
        "outside": nullcontext,
        "a region": lambda: region("cpu", dtype=HALF),
        "a disabled region": lambda: region("cpu", enabled=False),
    }

    def backward() -> None:
        with places[place.removeprefix("a thread in ")]():
            result.sum().backward()

    with region("cpu", **options) if options is not None else nullcontext():
        scale, count = torch.ones((), dtype=DOUBLE), torch.ones((), dtype=torch.int64)
        result = product(fwd, bwd, cast_inputs, log).apply(a, b, scale, count)
        if place == "inside":
            result.sum().backward()
    if place != "inside":
        in_thread(backward) if "thread" in place else backward()
    return log, [result, a.grad, b.grad]


PLACES = ["inside", "outside", "a region", "a disabled region"]
PLACES += [f"a thread in {place}" for place in PLACES[1:]]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cast_inputs", [None, FULL, HALF, BRAIN])
@pytest.mark.parametrize("options", [None, {"enabled": False}, {"dtype": BRAIN}, {"dtype": HALF}, {}])
def test_custom_functions_run_in_the_documented_state(options, cast_inputs, place):
    log, values = run_product(autocast, custom_fwd, custom_bwd, cast_inputs, options, place)
    original = torch.autocast, torch.amp.custom_fwd, torch.amp.custom_bwd
    expected_log, expected = run_product(*original, cast_inputs, options, place)
    assert log == expected_log
    assert all(same(a, b) for a, b in zip(values, expected, strict=True))
    inside = options not in (None, {"enabled": False})
    low = options.get("dtype", BRAIN) if inside else BRAIN
    taken = (cast_inputs or FULL) if inside else FULL
    runs_on = inside and cast_inputs is None
    results = low if runs_on else taken
    (_, on, dtype, *kinds), (_, on_in_backward, _, gradient, *gradients) = log
    assert (on, kinds) == (runs_on, [taken, taken, DOUBLE, torch.int64, results])
    assert (on_in_backward, gradient, gradients) == (runs_on, results, [results, results])
    assert dtype == low or not inside
    assert [v.dtype for v in values[1:]] == [FULL, FULL]


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"casting": casting.DEFAULT.float32("mm")}, FULL),
        ({"casting": casting.DEFAULT.float32("mm"), "dtype": HALF}, FULL),
        ({"emulate": True}, FULL),
        ({}, BRAIN),
    ],
)
def test_backward_has_the_edits_of_forward_wherever_it_runs(edit, expected, place):
    log, values = run_product(autocast, custom_fwd, custom_bwd, None, edit, place)
    assert (log[0][-1], log[1][-1], values[0].dtype) == (expected, expected, expected)
    if "emulate" in edit:
        assert all(same(v, v.to(BRAIN).float()) for v in values)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Batch:
    inputs: Any
    rest: Any = None


STRUCTURES: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda a, b: [a, [b, (a,)]],
    "tuple": lambda a, b: (a, [b], ()),
    "dict": lambda a, b: {"a": a, "nested": {"b": [b]}},
    "ordered": lambda a, b: OrderedDict(b=b, a=a),
    "default": lambda a, b: defaultdict(list, a=a, b=[b]),
    "named tuple": lambda a, b: Pair(a, Pair(b, [a])),
    "dataclass": lambda a, b: Batch(a, {"b": Batch(b)}),
}


def leaves(value: Any) -> list[Any]:
    """Return what stands in a structure, with the type of each container before it."""
    if isinstance(value, Batch):
        return [Batch, *leaves(value.inputs), *leaves(value.rest)]
    if isinstance(value, dict):
        return [type(value), *(leaf for key, item in value.items() for leaf in (key, *leaves(item)))]
    if isinstance(value, (list, tuple)):
        return [type(value), *(leaf for item in value for leaf in leaves(item))]
    return [value]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", list(STRUCTURES))
def test_a_structure_of_inputs_is_cast_as_deep_as_it_goes_and_keeps_its_type(name, inside):
    a, b = numbers(2), numbers(3).half()
    kept = [
        torch.ones(2, dtype=DOUBLE),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64),
    ]
    kept += ["text", np.ones(2, np.float32), None, 1.5]
    given_, before = (STRUCTURES[name]([a, *kept], [b, *kept]) for _ in range(2))
    taken = custom_fwd(lambda ctx, value: value, device_type="cpu", cast_inputs=BRAIN)
    with autocast("cpu") if inside else nullcontext():
        result = taken(SimpleNamespace(), given_)
    assert list(map(id, leaves(given_))) == list(map(id, leaves(before)))  # the caller's stays as it was
    assert len(leaves(result)) == len(leaves(before))
    for had, has in zip(leaves(before), leaves(result), strict=True):
        if inside and (had is a or had is b):
            assert same(has, had.to(BRAIN))
        else:
            assert has is had


@pytest.mark.parametrize("decorator", ["custom_fwd", "custom_bwd"])
def test_the_decorators_refuse_a_device_that_is_no_string_as_the_originals_do(decorator):
    errors = [
        heard(getattr(o, decorator), device_type=torch.device("cpu")) for o in (preamp.torch, torch.amp)
    ]
    assert errors[0] == errors[1]
    assert errors[0][0] is ValueError


def test_backward_of_an_undecorated_forward_says_what_is_missing():
    class Half(Function):
        @staticmethod
        def forward(ctx, a):
            return a / 2

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return gradient / 2

    with pytest.raises(UsageError, match=r"@custom_fwd\(device_type='cpu'\)"):
        Half.apply(torch.ones(1, requires_grad=True)).backward()


# What is refused, and what is warned of


def heard(make: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Return the type and message of an error, and the warnings, with the files they point to."""
    error: tuple[Any, ...] = (None, "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make(*arguments, **options)
        except Exception as raised:
            error = type(raised), str(raised)
    return *error, [(w.category, str(w.message), w.filename) for w in caught]


BAD = [(1,), (None,), (torch.device("cpu"),), ("nonsense",), ("",), ("meta",)]
DOUBTFUL = [("cpu", FULL), ("cpu", DOUBLE), ("cpu", torch.int8), ("cpu", torch.float8_e5m2), ("xpu", FULL)]
edits = pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT}, {"report": True}], ids=str)


@edits
@pytest.mark.parametrize("arguments", BAD, ids=str)
def test_the_constructor_raises_what_the_original_raises(arguments, edit):
    mine, original = heard(autocast, *arguments, **edit), heard(torch.autocast, *arguments)
    assert mine == original
    assert mine[0] in (ValueError, RuntimeError)


@edits
@pytest.mark.parametrize("arguments", DOUBTFUL, ids=str)
def test_a_dtype_that_is_not_supported_is_warned_of_and_switches_the_region_off(arguments, edit):
    mine, original = heard(autocast, *arguments, **edit), heard(torch.autocast, *arguments)
    assert mine == original
    assert [w[0] for w in mine[2]] == [UserWarning]
    with pytest.warns(UserWarning, match="Disabling autocast"):
        region = autocast(*arguments, **edit)
    with region:
        assert not torch.is_autocast_enabled(region.device)
        assert torch.mm(numbers(2, 2), numbers(2, 2)).dtype == FULL
    quiet = heard(autocast, *arguments, enabled=False, **edit)
    assert quiet == heard(torch.autocast, *arguments, enabled=False) == (None, "", [])


@edits
@pytest.mark.parametrize("dtype", [None, HALF, BRAIN])
def test_cuda_without_cuda_is_warned_of_and_switches_the_region_off(monkeypatch, dtype, edit):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mine, original = heard(autocast, "cuda", dtype, **edit), heard(torch.autocast, "cuda", dtype)
    assert mine == original
    assert [w[0] for w in mine[2]] == [UserWarning]
    with pytest.warns(UserWarning, match="CUDA is not available"):
        region = autocast("cuda", dtype, **edit)
    with region:
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("edit", [{}, {"casting": casting.DEFAULT.float32("mm")}, {"emulate": True}], ids=str)
@makes
def test_a_device_with_an_index_is_a_device(region, edit):
    """The original takes `str(tensor.device)` for what it means, although it is not documented."""
    a = numbers(2, 2)
    with region("cpu:0", **(edit if region is autocast else {})):
        assert torch.mm(a, a).dtype == (FULL if edit and region is autocast else BRAIN)
    assert torch.mm(a, a).dtype == FULL


@pytest.mark.parametrize("value", [1, "forward", None, torch.ones(1)])
def test_what_cannot_be_called_cannot_be_decorated(value):
    mine, original = heard(autocast("cpu"), value), heard(torch.autocast("cpu"), value)
    assert mine == original
    assert mine[0] is TypeError


# binary_cross_entropy


entropies = pytest.mark.parametrize(
    "entropy", [F.binary_cross_entropy, nn.BCELoss()], ids=["function", "module"]
)


@entropies
@makes
@pytest.mark.parametrize("low", [HALF, BRAIN])
def test_binary_cross_entropy_runs_in_float32_on_cpus(low, region, entropy):
    p, target = torch.rand(9).to(low).requires_grad_(), torch.rand(9).to(low)
    with region("cpu", dtype=low):
        loss = entropy(p, target)
    loss.backward()
    assert same(loss, F.binary_cross_entropy(p.float(), target.float()))
    assert p.grad.dtype == low


@entropies
@pytest.mark.parametrize("dtype", [FULL, BRAIN])
def test_binary_cross_entropy_is_refused_by_cudas_table_with_what_to_write_instead(entropy, dtype):
    p = torch.full((4,), 0.5, dtype=dtype)
    with FakeTensorMode(), switched_on("cuda", HALF):
        fake = torch.empty(4, dtype=dtype, device="cuda")
        _, original, _ = heard(entropy, fake, fake)
        assert F.binary_cross_entropy_with_logits(fake, fake).dtype == FULL
    assert "binary_cross_entropy_with_logits" in original
    with autocast("cpu", casting=casting.CUDA):
        with pytest.raises(UsageError, match=r"^binary_cross_entropy .*binary_cross_entropy_with_logits"):
            entropy(p, p)
        assert F.binary_cross_entropy_with_logits(p, p).dtype == FULL
        with autocast("cpu", enabled=False):
            assert entropy(p, p).dtype == dtype
        with autocast("cpu", casting=casting.DEFAULT):
            assert entropy(p, p).dtype == FULL
    assert entropy(p, p).dtype == dtype
