"""Factors of layers change what flows, and never what arrives in `.grad`."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from preamp import PolicyError, Static
from preamp.errors import UsageError
from preamp.torch import GradScaler, LayerwiseScale, autocast

WIDTH = 4
FAINT = 2.0**-30  # what a loss is multiplied by so that its gradients need factors


def gradients(model, *others):
    return {
        name: None if p.grad is None else p.grad.clone()
        for name, p in [*model.named_parameters(), *((f"input {n}", t) for n, t in enumerate(others))]
    }


def backward_of(run, model, loss, *others):
    """Return the gradients that a way to go backward leaves."""
    for parameter in (*model.parameters(), *others):
        parameter.grad = None
    run(loss)
    return gradients(model, *others)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            assert torch.equal(found[name], gradient), name


def deep(depth=8, width=16, gain=1.0, seed=0, activation=nn.Tanh):
    """Return a net of layers whose weights have standard deviation gain / sqrt(width)."""
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width) for _ in range(depth)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=gain / math.sqrt(width))
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*[part for layer in layers for part in (layer, activation())][:-1])


# Any graph, any potentials


class Net(nn.Module):
    """Layers, and a program that says how to put them together."""

    def __init__(self, program, frozen):
        super().__init__()
        torch.manual_seed(len(program))
        self.program = program
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.convolution = nn.Conv1d(2, 2, 3, padding=1)
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))
        for number in frozen:
            self.layers[number].requires_grad_(False)

    def forward(self, x):
        values, shared = [x], self.gain * self.layers[0].weight
        for kind, i, j in self.program:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(self.combine(kind, a, b, j, shared))
        return (values[-1] + 0.5 * self.layers[1](values[len(values) // 2])).square().mean()

    def combine(self, kind, a, b, number, shared):
        layer = self.layers[number % 4]
        match kind:
            case "layer":
                return layer(a)
            case "residual":
                return a + layer(torch.tanh(a))
            case "add":
                return a + b
            case "multiply":
                return a * torch.tanh(b)
            case "inplace":
                return layer(a.reshape(2, 2, WIDTH)).relu_().reshape(WIDTH, WIDTH)
            case "branches":
                left, right = layer(a).chunk(2, dim=1)
                return torch.cat([torch.sigmoid(right), left * 0.5], dim=1)
            case "attention":
                q, k, v = (one(a) for one in list(self.layers)[:3])
                return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
            case "tied":
                return F.linear(a, layer.weight) + self.embedding(torch.arange(WIDTH))
            case "shared":
                return F.linear(layer(a), shared)
            case "convolution":
                return self.convolution(a.reshape(2, 2, WIDTH)).reshape(WIDTH, WIDTH)
            case "normalized":
                return F.layer_norm(a, (WIDTH,), self.gain)
            case "detached":
                return a + layer(b.detach())


KINDS = """
    layer layer layer residual add multiply branches attention tied shared convolution normalized
    detached inplace
    """.split()  # noqa: SIM905  # a list of strings would be fourteen lines
programs = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=8
)


def test_on_any_graph_any_factors_leave_every_gradient_as_it_was():
    different = []

    @settings(max_examples=100, deadline=None, database=None)
    @given(
        program=programs,
        frozen=st.sets(st.sampled_from([0, 2, 3])),
        powers=st.lists(st.integers(-9, 12), min_size=3, max_size=9),
        wants_input=st.booleans(),
    )
    def check(program, frozen, powers, wants_input):
        model = Net(program, frozen)
        x = torch.randn(WIDTH, WIDTH, requires_grad=wants_input)
        layerwise = LayerwiseScale(model)
        layerwise._rule.potential_below = lambda mark, above: powers[
            (7 * mark.use + sum(map(ord, mark.name))) % len(powers)
        ]
        expected = backward_of(torch.Tensor.backward, model, model(x), x)
        assert_same(backward_of(layerwise.backward, model, model(x), x), expected)
        different.append(set(layerwise.factors.values()) != {1.0})

    check()
    assert sum(different) > 0.7 * len(different)


@settings(max_examples=25, deadline=None)
@given(program=programs, frozen=st.sets(st.sampled_from([0, 2, 3])))
def test_so_do_the_rules_own_factors(program, frozen):
    model = Net(program, frozen)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    layerwise = LayerwiseScale(model)
    for _ in range(3):
        expected = backward_of(torch.Tensor.backward, model, model(x) * FAINT, x)
        assert_same(backward_of(layerwise.backward, model, model(x) * FAINT, x), expected)
        assert all(1.0 <= factor <= 1024.0 for factor in layerwise.factors.values())


def test_a_transformer_and_a_convolution_net_get_factors_and_the_same_gradients():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    convolutions = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 3, groups=2),
        nn.Conv2d(2, 1, 3),
    )
    for model, shape in ((encoder, (2, 5, 8)), (convolutions, (2, 1, 9, 9))):
        x = torch.randn(shape, requires_grad=True)
        layerwise = LayerwiseScale(model)
        for _ in range(3):
            expected = backward_of(torch.Tensor.backward, model, model(x).square().mean() * FAINT, x)
            found = backward_of(layerwise.backward, model, model(x).square().mean() * FAINT, x)
            assert_same(found, expected)
        assert max(layerwise.factors.values()) >= 16.0


# What is rescued


def relative_error(found, exact):
    pairs = [(found[name].double(), exact[name]) for name in exact]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_gradients_that_low_precision_flushes_come_close_to_float64s(dtype):
    model = deep(depth=8, activation=nn.Sigmoid)
    x, factor = torch.randn(32, 16), 2.0**-6 if dtype is torch.float16 else 2.0**4
    exact_model = copy.deepcopy(model).double()
    exact = backward_of(torch.Tensor.backward, exact_model, exact_model(x.double()).square().mean() * factor)

    def loss():
        with autocast("cpu", dtype, emulate=True):
            return model(x).float().square().mean() * factor

    flushed = backward_of(torch.Tensor.backward, model, loss())
    layerwise = LayerwiseScale(model, dtype=dtype, bound=2.0**20)
    found = [backward_of(layerwise.backward, model, loss()) for _ in range(5)]
    assert relative_error(flushed, exact) == 1.0  # nothing of some layer's is left
    assert relative_error(found[-1], exact) < (0.004 if dtype is torch.float16 else 0.5)
    assert layerwise.factors["0"] >= 2.0**14


def test_of_layers_that_run_in_a_loop_every_turn_has_its_factor():
    model, x = deep(depth=1), torch.randn(32, 16)
    layerwise, marks = LayerwiseScale(model, bound=2.0**20), []

    def loss(model, x):
        for _ in range(10):
            x = torch.sigmoid(model(x))
        return x.square().mean() * 2.0**-6

    exact_model = copy.deepcopy(model).double()
    x = x.requires_grad_()
    exact = backward_of(torch.Tensor.backward, exact_model, loss(exact_model, x.double()), x)
    with autocast("cpu", torch.float16, emulate=True):
        flushed = backward_of(torch.Tensor.backward, model, loss(model, x), x)
    choose = layerwise._rule.potential_below
    for _ in range(4):
        marks.clear()
        layerwise._rule.potential_below = lambda mark, above: marks.append(mark.use) or choose(mark, above)
        with autocast("cpu", torch.float16, emulate=True):
            found = backward_of(layerwise.backward, model, loss(model, x), x)
    assert sorted(marks) == list(range(10))
    assert not flushed["input 0"].any()
    assert relative_error(found, exact) < 0.01


def test_a_weight_that_many_turns_share_keeps_none_of_them_back():
    model, x = parametrizations.weight_norm(deep(depth=1)[0]), torch.randn(32, 16)

    def loss(x=x):
        with parametrize.cached():  # computed once: the turns meet again above the leaves
            for _ in range(6):
                x = torch.sigmoid(model(x))
        return x.square().mean() * FAINT

    layerwise = LayerwiseScale(model)
    for _ in range(3):
        expected = backward_of(torch.Tensor.backward, model, loss())
        assert_same(backward_of(layerwise.backward, model, loss()), expected)
    assert layerwise.factors == {"": 1024.0}


# When statistics are taken, and what they cost


class Reads(TorchFunctionMode):
    """Counts reads to the host."""

    NAMES = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in self.NAMES
        return function(*args, **(kwargs or {}))


def reads_of(run):
    with Reads() as reads:
        run()
    return reads.count


def test_statistics_cost_one_read_and_other_passes_none():
    model, x = deep(), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, every=10)
    found = [reads_of(lambda: layerwise.backward(model(x).square().mean())) for _ in range(30)]
    assert [n + 1 for n, count in enumerate(found) if count] == [1, 2, 4, 8, 10, 20, 30]
    assert max(found) == 1
    layerwise.measure()
    assert [reads_of(lambda: layerwise.backward(model(x).square().mean())) for _ in range(2)] == [1, 0]


def test_a_pass_that_overflows_lowers_factors_and_the_next_one_measures_again():
    model, x = deep(activation=nn.Sigmoid), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, every=1000)

    def backward(factor):
        return reads_of(lambda: layerwise.backward(model(x).square().mean() * factor)), layerwise.factors["0"]

    assert [backward(2.0**-6) for _ in range(3)] == [(1, 1.0), (1, 1024.0), (0, 1024.0)]
    assert [backward(math.inf) for _ in range(3)] == [(1, 1024.0), (1, 512.0), (1, 256.0)]
    assert [backward(2.0**-6) for _ in range(2)] == [(1, 128.0), (1, 1024.0)]  # the eighth is due anyway
    assert backward(2.0**-6) == (0, 1024.0)


def test_large_gradients_are_not_raised_and_a_limit_lowers_what_was_raised():
    model, x = deep(depth=3, activation=nn.Sigmoid), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, every=1, bound=2.0**30, layer_bound=2.0**30)

    def factors(factor):
        for _ in range(2):
            layerwise.backward(model(x).square().mean() * factor)
        return list(layerwise.factors.values())

    assert factors(2.0**8) == [1.0] * 3
    assert min(factors(2.0**-30)) >= 2.0**10


class OneEntry(nn.Linear):
    """A layer whose weight is zero but for one entry: its standard deviation says little of its peak."""

    def __init__(self):
        super().__init__(64, 64, bias=False)
        nn.init.zeros_(self.weight)
        self.weight.data[0, 0] = 1.0


@pytest.mark.parametrize("emulate", [False, True], ids=["leaves", "casts of leaves"])
@pytest.mark.parametrize(("x", "factor"), [(0.0, 2.0**9), (2.0**10, 2.0**1)])
def test_limits_are_set_by_the_largest_entries(x, factor, emulate):
    """65504 has room for 64 products of 1 raised by 2**9, and for 16 times a weight's 2**10 raised by 2."""
    model = nn.Sequential(OneEntry(), OneEntry())
    layerwise = LayerwiseScale(model, every=1, flushed=1e-9, layer_bound=2.0**40, bound=2.0**40)
    incoming = torch.zeros(4096, 64)
    incoming[0, 0] = 1.0
    for _ in range(4):
        with autocast("cpu", torch.float16, enabled=emulate, emulate=emulate):
            y = model(torch.full((4096, 64), x))
        layerwise.backward(y, incoming.to(y.dtype))
    assert list(layerwise.factors.values()) == [factor, factor]


def test_of_gradients_that_are_all_zero_nothing_is_learned():
    model, x = deep(depth=3), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, every=1)
    for factor in (FAINT, FAINT, 0.0, FAINT):
        layerwise.backward(model(x).square().mean() * factor)
    assert list(layerwise.factors.values()) == [16.0, 256.0, 1024.0]


@pytest.mark.parametrize(
    ("layer_bound", "bound", "largest"), [(4.0, 8.0, [4, 8, 8]), (3.0, 1000.0, [2, 4, 8])]
)
def test_bounds_hold_for_a_layer_and_for_the_product(layer_bound, bound, largest):
    model, x = deep(depth=3), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, layer_bound=layer_bound, bound=bound)
    for _ in range(3):
        layerwise.backward(model(x).square().mean() * FAINT)
    assert list(layerwise.factors.values()) == largest


def test_the_papers_formula():
    """Its sigma is rms(g) rms(W) sqrt(n / 2), its factor u_min / (sqrt(2) erfinv(T) sigma)."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 512, bias=False)
    x = torch.randn(8, 8)
    layerwise = LayerwiseScale(layer, layer_bound=2.0**40, bound=2.0**40, flushed=0.01)
    incoming = torch.randn(8, 512) * 1e-7
    for _ in range(2):
        layerwise.backward(layer(x), incoming)
    sigma = math.sqrt(incoming.square().mean() * layer.weight.detach().square().mean() * 512 / 2)
    erfinv = torch.erfinv(torch.tensor(0.01)).item()
    factor = 2.0**-24 / (math.sqrt(2.0) * erfinv * sigma)
    assert layerwise.factors == {"": 2.0 ** math.floor(math.log2(factor))}
    wide = torch.randn(4096, 512) * 1e-7  # so many rows that the prediction can be compared with what leaves
    out = (wide @ layer.weight.detach()).std()
    assert out == pytest.approx(math.sqrt(2.0) * sigma, rel=0.1)


# In training


def test_beside_a_scaler_steps_are_those_of_a_run_without():
    def train(wrap):
        model = deep(depth=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = GradScaler("cpu", policy=Static(2.0**-20))
        backward = LayerwiseScale(model).backward if wrap else torch.Tensor.backward
        for number in range(6):
            optimizer.zero_grad()
            for part in range(2):  # gradients of two passes are summed
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * number + part))
                backward(scaler.scale((model(x) - 1.0).square().mean() * (math.inf if number == 3 else 1.0)))
            scaler.step(optimizer)
            assert scaler.last_step.skipped == (number == 3)
            scaler.update()
        return dict(model.named_parameters()), getattr(backward, "__self__", None)

    (found, layerwise), (expected, _) = train(True), train(False)
    assert_same(found, expected)
    assert max(layerwise.factors.values()) > 1.0


def test_the_graph_may_be_kept_and_gone_through_without_factors():
    model, x = deep(depth=3), torch.randn(4, 16)
    layerwise = LayerwiseScale(model)
    loss = model(x).square().mean() * FAINT
    expected = backward_of(lambda loss: loss.backward(retain_graph=True), model, loss)
    for _ in range(3):
        assert_same(
            backward_of(lambda loss: layerwise.backward(loss, retain_graph=True), model, loss), expected
        )
    assert max(layerwise.factors.values()) > 1.0
    assert_same(backward_of(torch.Tensor.backward, model, loss), expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_second_derivatives():
    model, x = deep(depth=3), torch.randn(4, 16)
    layerwise = LayerwiseScale(model)

    def penalty(backward):
        for parameter in model.parameters():
            parameter.grad = None
        backward(model(x).square().mean() * 2.0**-12, create_graph=True)
        first = [parameter.grad for parameter in model.parameters()]
        return backward_of(backward, model, sum(one.square().sum() for one in first))

    expected = penalty(torch.Tensor.backward)
    for _ in range(3):
        found = penalty(layerwise.backward)
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-12)
    assert max(layerwise.factors.values()) > 1.0


def test_some_leaves_alone():
    model, x = deep(depth=3), torch.randn(4, 16, requires_grad=True)
    layerwise = LayerwiseScale(model)
    for _ in range(2):
        layerwise.backward(model(x).square().mean() * FAINT)
    leaves = [x, model[0].bias]

    def some(backward):
        return backward_of(
            lambda loss: backward(loss, inputs=leaves), model, model(x).square().mean() * FAINT, x
        )

    assert_same(some(layerwise.backward), some(torch.Tensor.backward))
    assert model[2].weight.grad is None


class Doubled(torch.autograd.Function):
    """A function of the user's, marked as nothing."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Hidden(torch.autograd.Function):
    """A function whose backward goes backward in a graph of its own."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.x, ctx.layer = x.detach().requires_grad_(), layer
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.layer(ctx.x).backward(gradient)
        return ctx.x.grad, None


def test_functions_checkpoints_and_sparse_gradients_keep_their_gradients():
    model = nn.ModuleDict({"words": nn.Embedding(8, 16, sparse=True), "net": deep(depth=4)})
    words = torch.tensor([1, 3, 3, 7])

    def loss():
        x = Doubled.apply(model["net"][:2](model["words"](words)))
        return checkpoint(model["net"][2:], x, use_reentrant=False).square().mean() * FAINT

    layerwise = LayerwiseScale(model)
    for _ in range(3):
        expected = backward_of(torch.Tensor.backward, model, loss())
        found = backward_of(layerwise.backward, model, loss())
        for gradient in (found, expected):
            gradient["words.weight"] = gradient["words.weight"].to_dense()
        assert_same(found, expected)
    assert layerwise.factors["net.0"] == 1024.0


def test_what_hides_its_graph_is_refused():
    model, x = deep(depth=3), torch.randn(4, 16, requires_grad=True)
    layerwise = LayerwiseScale(model)
    loss = checkpoint(model, x, use_reentrant=True).square().mean()
    with pytest.raises(UsageError, match="use_reentrant=False"):
        layerwise.backward(loss)
    assert x.grad is None
    with pytest.raises(UsageError, match=r"gradient of 0\.(weight|bias) comes from a graph"):
        layerwise.backward(model[1:](Hidden.apply(x, model[0])).square().mean())
    assert not model[0].weight._backward_hooks


def test_a_loss_that_no_layer_led_to_is_refused():
    model, x = deep(depth=2), torch.randn(4, 16)
    before = model(x).square().mean()
    layerwise = LayerwiseScale(model)
    with pytest.raises(UsageError, match="No layer of the model led to this loss"):
        layerwise.backward(before)
    hidden = model[0](x)
    with pytest.raises(UsageError, match="computed from others"):
        layerwise.backward(model[1:](hidden).square().mean(), inputs=[hidden])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("one", ["copied", "pickled"])
def test_copies_of_the_model_train_without_factors(one):
    model, x = deep(depth=2), torch.randn(4, 16)
    LayerwiseScale(model)
    other = copy.deepcopy(model) if one == "copied" else pickle.loads(pickle.dumps(model))
    expected = backward_of(torch.Tensor.backward, model, model(x).square().mean())
    assert_same(backward_of(torch.Tensor.backward, other, other(x).square().mean()), expected)


def test_close_takes_every_hook_away():
    model, x = deep(depth=2), torch.randn(4, 16)
    layerwise = LayerwiseScale(model)
    for _ in range(2):
        layerwise.backward(model(x).square().mean() * FAINT)
    layerwise.close()
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    loss = model(x).square().mean() * FAINT
    expected = backward_of(lambda loss: loss.backward(retain_graph=True), model, loss)
    assert_same(backward_of(layerwise.backward, model, loss), expected)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard(model):
    mesh = init_device_mesh("cpu", (1,))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    "distribute", [nn.parallel.DistributedDataParallel, pytest.param(shard, marks=pytest.mark.slow)]
)
def test_what_distributes_gradients_gets_them_without_factors(distribute, one_rank):
    model, x = deep(depth=3), torch.randn(4, 16)
    parallel = distribute(copy.deepcopy(model))
    layerwise = LayerwiseScale(parallel)
    for _ in range(3):
        expected = backward_of(torch.Tensor.backward, model, model(x).square().mean() * FAINT)
        found = backward_of(layerwise.backward, parallel, parallel(x).square().mean() * FAINT)
        whole = [getattr(gradient, "full_tensor", lambda one=gradient: one)() for gradient in found.values()]
        assert_same(dict(zip(expected, whole, strict=True)), expected)
    assert list(layerwise.factors.values()) == [16.0, 256.0, 1024.0]


@pytest.mark.slow
def test_layers_in_compiled_code_are_not_seen():
    model, x = deep(depth=2), torch.randn(4, 16)
    layerwise = LayerwiseScale(model)
    with pytest.raises(UsageError, match="compiled"):
        layerwise.backward(torch.compile(model, backend="aot_eager")(x).square().mean())


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": torch.float32},
        {"dtype": "float16"},
        {"every": 0},
        {"every": 2.5},
        {"flushed": 0.0},
        {"flushed": 1.0},
        {"layer_bound": 0.5},
        {"bound": math.inf},
        {"bound": "large"},
    ],
)
def test_settings_that_cannot_work(wrong):
    model = deep(depth=2)
    (name,) = wrong
    with pytest.raises(PolicyError, match=rf"{name}=.*Write "):
        LayerwiseScale(model, **wrong)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_layers_is_refused():
    with pytest.raises(PolicyError, match="Tanh has no Linear or Conv layer"):
        LayerwiseScale(nn.Tanh())
