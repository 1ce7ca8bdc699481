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
from torch.utils.checkpoint import checkpoint

from preamp import Static
from preamp.errors import UsageError
from preamp.torch import GradScaler, LayerwiseScale

from .layers import FAINT, assert_same, backward_of, deep

WIDTH = 4

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
    assert sum(different) > 0.5 * len(different)


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
    with pytest.raises(UsageError, match="This loss depends on no layer of the model"):
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
