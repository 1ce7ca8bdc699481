"""Blame against what really happens in steps of all kinds of programs, and what it leaves behind."""

from __future__ import annotations

import gc
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from preamp import casting
from preamp.errors import CastingError, UsageError
from preamp.torch import GradScaler, autocast, blame, tune

from .regions import RELEASE
from .switches import FlopCounter

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
Loss = Callable[[], Tensor]


class Block(nn.Module):
    """A transformer's block with its softmax in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(width // 4)).float().softmax(-1)
        x = x + self.out((weights.to(v.dtype) @ v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))


def transformer(width: int = 32, layers: int = 2) -> tuple[nn.Module, Loss]:
    model = nn.Sequential(
        nn.Embedding(50, width), *[Block(width) for _ in range(layers)], nn.Linear(width, 50)
    )
    ids = torch.randint(50, (4, 17))
    return model, lambda: F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def perceptron() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 4))
    x, y = torch.randn(64, 16), torch.randn(64, 4)
    return model, lambda: F.mse_loss(model(x).float(), y)


def convolutions() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(288, 4),
    )
    x, y = torch.randn(64, 3, 8, 8), torch.randint(4, (64,))
    return model, lambda: F.cross_entropy(model(x).float(), y)


def encoder() -> tuple[nn.Module, Loss]:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    x = torch.randn(4, 8, 32)
    return model, lambda: (model(x).float() * x).mean()


def recurrent() -> tuple[nn.Module, Loss]:
    model = nn.LSTM(16, 16, batch_first=True)
    x = torch.randn(4, 8, 16)
    return model, lambda: model(x)[0].float().square().mean()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Everything(nn.Module):
    """Calls of the kinds that are easily got wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tied = nn.Linear(32, 32), nn.Linear(32, 32)
        self.tied.weight = self.linear.weight
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.mean.mul_(0.9).add_(x.mean((0, 1)).detach(), alpha=0.1)
        y = self.linear(x)
        together = torch.zeros_like(y)
        together[:, :4] = y[:, :4]
        together[:, 4:] += 2 * y[:, 4:]
        first = together[:, 0]
        first += 1  # through a view
        with torch.no_grad():
            target = self.tied(x)
        turned = torch.view_as_real(
            torch.view_as_complex(together.float().reshape(*x.shape[:-1], 16, 2))
            * torch.polar(torch.ones(16), torch.arange(16.0))
        )
        halves = turned.flatten(-2).chunk(2, -1)
        z = torch.cat([halves[0] * halves[1].sigmoid(), halves[1].clamp(min=-1)], -1)
        z = checkpoint(lambda z: Square.apply(self.tied(z).tanh()), z, use_reentrant=False)
        kept = z.mean(-1)[z.argmax(-1) > 3]
        return (z - target - self.mean).square().mean() + kept.float().sum() / 100


def everything() -> tuple[nn.Module, Loss]:
    model, x = Everything(), torch.randn(4, 8, 32)
    return model, lambda: model(x).float()


PROGRAMS = [transformer, perceptron, convolutions, encoder, recurrent, everything]


def runs(program: Callable[[], tuple[nn.Module, Loss]]) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    return program()


def size_of(weight: Tensor) -> Tensor:
    """Return the magnitudes of a weight's values: what errors are measured by."""
    return weight.detach().abs()


def states(model: nn.Module) -> list[Tensor]:
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.clone() for each in (*model.state_dict().values(), *gradients, torch.get_rng_state())]


@pytest.mark.parametrize("program", PROGRAMS)
@BOTH
def test_losses_are_those_of_the_steps_and_the_rows_add_up_to_what_they_differ_in(
    program: Any, dtype: torch.dtype
) -> None:
    model, loss = runs(program)
    before = states(model)
    found = blame(loss, model=model, dtype=dtype)
    for now, then in zip(states(model), before, strict=True):  # random states among them
        assert torch.equal(now, then)
    with torch.no_grad():
        exact = loss().item()
        torch.set_rng_state(before[-1])
        for buffer, value in zip(model.state_dict().values(), before, strict=False):
            buffer.copy_(value)
    assert found.float32_loss == pytest.approx(exact, rel=1e-5)
    has_dropout = any(isinstance(each, nn.Dropout) for each in model.modules())
    if not has_dropout:  # masks that are drawn in another dtype differ
        with autocast("cpu", dtype, emulate=True, cache_enabled=False):
            assert found.loss == pytest.approx(loss().item(), rel=1e-6)
    change = found.loss - found.float32_loss
    floor = 0.02 * torch.finfo(dtype).eps * abs(found.float32_loss)
    assert abs(found.predicted_loss - found.loss) <= 0.2 * abs(change) + floor
    assert not found.guilty
    assert 0 < found.gradient_error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("path", ["1.qkv", "2.down", "3"])
@BOTH
def test_effects_are_those_of_a_step_in_which_one_module_alone_is_low(path: str, dtype: torch.dtype) -> None:
    """The peer is autocast itself, in a region whose table keeps everything else in float32."""
    model, loss = runs(transformer)
    name = str(dtype).removeprefix("torch.")
    table = casting.DEFAULT.module("**", "float32").module(path, name)  # type: ignore[arg-type]
    found = blame(loss, model=model, dtype=dtype, casting=table, loss_scale=1024.0)
    assert max(found.rows, key=lambda row: row.effect).module == path
    parameters = list(model.parameters())
    exact = torch.autograd.grad(loss(), parameters)
    with autocast("cpu", dtype, casting=table, model=model, emulate=True):
        low = torch.autograd.grad(1024.0 * loss(), parameters)
    sizes = [size_of(each) for each in parameters]
    errors = [
        (size * (ours / 1024 - theirs)).norm().item()
        for size, ours, theirs in zip(sizes, low, exact, strict=True)
    ]
    norm = math.hypot(*((size * theirs).norm().item() for size, theirs in zip(sizes, exact, strict=True)))
    assert found.gradient_error == pytest.approx(math.hypot(*errors) / norm, rel=0.6)


def scaled(amount: float) -> tuple[nn.Module, Loss]:
    """A perceptron whose second product overflows float16: it is scaled up, and in float32 down again."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4, bias=False))
    x, y = torch.randn(64, 16), torch.randn(64, 4)
    return model, lambda: F.mse_loss(model[2](amount * model[1](model[0](x)).float()).float() / amount, y)


def test_an_overflow_is_worst_and_what_comes_after_it_can_still_be_judged() -> None:
    model, loss = runs(lambda: scaled(1e6))
    found = blame(loss, model=model, dtype=torch.float16)
    worst = found.rows[0]
    assert (worst.operator, worst.module, worst.direction) == ("linear", "2", "forward")
    assert worst.overflowed
    assert worst.guilty
    assert worst.effect == math.inf
    assert worst.amax > worst.limit == torch.finfo(torch.float16).max
    assert all(math.isfinite(row.effect) for row in found.rows[1:])
    assert math.isfinite(found.loss)
    assert not blame(loss, model=model, dtype=torch.bfloat16).guilty


def test_gradients_that_are_flushed_are_found_and_a_loss_scale_acquits() -> None:
    model, loss = runs(perceptron)
    small: Loss = lambda: 1e-7 * loss()  # noqa: E731
    found = blame(small, model=model, dtype=torch.float16, loss_scale=1.0)
    assert found.guilty
    assert all(row.direction == "backward" for row in found.guilty)
    assert found.rows[0].lost
    assert "became zero" in found.rows[0].reason
    assert not blame(small, model=model, dtype=torch.float16, loss_scale=2.0**24).guilty
    assert not blame(small, model=model, dtype=torch.bfloat16).guilty


def test_the_default_loss_scale_is_what_dynamic_scaling_comes_to() -> None:
    model, loss = runs(perceptron)
    assert blame(loss, model=model, dtype=torch.float16).loss_scale == 2.0**16
    assert blame(loss, model=model, dtype=torch.bfloat16).loss_scale == 1.0
    large: Loss = lambda: 4096.0 * loss()  # noqa: E731
    found = blame(large, model=model, dtype=torch.float16)
    assert found.loss_scale < 2.0**16
    assert not found.guilty
    assert f"The loss scale is {found.loss_scale:g}" in found.notes[0]
    twice = blame(large, model=model, dtype=torch.float16, loss_scale=2 * found.loss_scale)
    assert any(row.overflowed and row.direction == "backward" for row in twice.guilty)


def test_a_row_names_the_parameter_that_it_harms_and_by_how_much() -> None:
    model, loss = runs(transformer)
    table = casting.DEFAULT.lower("gelu")
    found = blame(
        lambda: loss() + 0 * model[3].weight.sum(), model=model, casting=table, dtype=torch.bfloat16
    )
    assert all(row.parameter == "" for row in found.rows)  # nobody is accused

    def harmful() -> Tensor:
        with autocast("cpu", enabled=False):
            return (
                ((model[3].weight + 100).bfloat16().float() - 100 - model[3].weight.detach() / 2)
                .square()
                .mean()
            )

    found = blame(harmful, model=model, dtype=torch.bfloat16)
    first = found.rows[0]
    assert (first.operator, first.parameter) == ("bfloat16", "3.weight")
    assert first.guilty
    exact = torch.autograd.grad(
        ((model[3].weight + 100) - 100 - model[3].weight.detach() / 2).square().mean(), model[3].weight
    )[0]
    low = torch.autograd.grad(harmful(), model[3].weight)[0]
    measured = ((low - exact).norm() / exact.norm()).item()
    assert first.parameter_error == pytest.approx(measured, rel=0.1)


def test_what_data_loses_before_it_meets_a_weight_is_found() -> None:
    model, x = nn.Linear(16, 4), torch.randn(64, 16)
    far = x + 100
    found = blame(
        lambda: model(far - 100.0).float().square().mean(),
        model=model,
        casting=casting.DEFAULT.lower("sub"),
        dtype=torch.bfloat16,
    )
    assert found.guilty[0].operator == "sub"


def test_what_is_lost_where_gradients_stop_is_found() -> None:
    model, x = runs(perceptron)[0], torch.randn(64, 16)

    def wrong_target(low: torch.dtype) -> Tensor:
        with torch.no_grad():
            target = (model(x).float() + 300).to(low).float() - 300
        return (model(x).float() - target - 1).square().mean()

    found = blame(lambda: wrong_target(torch.bfloat16), model=model, dtype=torch.bfloat16)
    first = found.rows[0]
    assert (first.operator, first.guilty) == ("to", True)
    exact = torch.autograd.grad(wrong_target(torch.float32), [*model.parameters()])
    low = torch.autograd.grad(wrong_target(torch.bfloat16), [*model.parameters()])
    sizes = [size_of(each) for each in model.parameters()]
    errors = [(size * (a - b)).norm().item() for size, a, b in zip(sizes, low, exact, strict=True)]
    norm = math.hypot(*((size * each).norm().item() for size, each in zip(sizes, exact, strict=True)))
    assert first.effect == pytest.approx(math.hypot(*errors) / norm, rel=0.7)
    assert found.predicted_loss == pytest.approx(found.loss, rel=0.1)


@BOTH
def test_what_cancels_behind_detach_is_not_accused(dtype: torch.dtype) -> None:
    """The loss of GRPO with one update per batch: its value is that of the advantages, whatever is lost."""
    model, x, advantages = nn.Linear(16, 8), torch.randn(64, 16), torch.randn(64)

    def loss() -> Tensor:
        chosen = 20 * model(x).float().log_softmax(-1)[:, 0]
        return -((chosen - chosen.detach()).exp() * advantages).mean()

    found = blame(loss, model=model, dtype=dtype)
    assert not found.guilty
    assert found.loss == found.float32_loss
    assert found.predicted_loss == pytest.approx(found.loss, abs=1e-4)


@pytest.mark.parametrize(
    "product",
    [
        lambda model, x: model(x),
        lambda model, x: torch.einsum("abc,dc->abd", x, model.weight),
        lambda model, x: x @ model.weight.T,
    ],
)
def test_the_backward_pass_of_every_product_is_compared(product: Any) -> None:
    """Some return views of what they compute."""
    model, x = nn.Linear(4, 3), torch.ones(2, 24, 4, requires_grad=True)
    rows = blame(lambda: 3e4 * product(model, x).sum(), dtype=torch.float16, loss_scale=1.0).rows
    assert any(row.direction == "backward" and row.overflowed for row in rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(600).to(torch.bfloat16),
        lambda: torch.arange(600).bfloat16(),
        lambda: torch.arange(600, dtype=torch.bfloat16),
        lambda: torch.linspace(0, 599, 600, dtype=torch.bfloat16),
    ],
)
def test_integers_that_low_precision_rounds_are_compared(make: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 4)
    found = blame(lambda: model((make().float() * 0.9).sin()[:, None]).square().mean(), model=model)
    assert found.rows[0].guilty
    assert found.rows[0].operator in ("to", "bfloat16", "arange", "linspace")


def test_no_tensor_of_a_blamed_step_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def blamed() -> int:
        blame(lambda: (1e6 * model(torch.ones(4, 8))).mean(), model=model, dtype=torch.float16)
        gc.collect()
        return sum(type(each) is Tensor for each in gc.get_objects())

    blamed()
    assert blamed() == blamed()


def test_hooks_on_gradients_are_left_out_and_what_requires_gradients_is_told() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def loss() -> Tensor:
        y = model(x)
        assert y.requires_grad
        assert not y.detach().requires_grad
        assert not (x + 1).requires_grad
        with torch.no_grad():
            assert not model(x).requires_grad
        y.register_hook(lambda gradient: pytest.fail("not here")).remove()
        y.retain_grad()
        return y.sum()

    assert blame(loss, model=model).rows


def test_it_works_under_no_grad_and_refuses_inference_mode_and_float8() -> None:
    model, loss = runs(perceptron)
    with torch.no_grad():
        assert blame(loss, model=model).rows
    with torch.inference_mode(), pytest.raises(UsageError, match="Inference mode"):
        blame(loss, model=model)
    with pytest.raises(CastingError, match="float8"):
        blame(loss, model=model, dtype=torch.float8_e5m2)


@pytest.mark.parametrize(
    ("breaks", "part"),
    [
        ("log", lambda p: p.log()[:, 0]),
        ("div", lambda p: p[:, 0] / (p[:, 0] + p[:, 2])),  # 0 / 0
        ("the backward pass of sqrt", lambda p: p.sqrt()[:, 0]),
    ],
)
def test_what_loses_values_to_zero_is_accused_of_the_inf_and_nan_made_of_them(breaks: str, part: Any) -> None:
    model, x = nn.Linear(16, 4), torch.zeros(64, 16)
    model.bias.data = torch.tensor([0.0, 20.0, 0.0, 0.0])

    def loss(low: torch.dtype = torch.float16) -> Tensor:
        return part(model(x).float().softmax(-1).to(low).float()).mean()  # type: ignore[no-any-return]

    found = blame(loss, model=model, dtype=torch.float16)
    (worst,) = found.guilty
    assert (worst.operator, worst.lost, worst.overflowed) == ("to", 256 * 3 // 4, 0)
    assert worst.breaks.startswith(breaks)
    assert "became zero" in found.summary()
    assert found.float32_loss == pytest.approx(loss(torch.float32).item())


def test_inf_and_nan_of_values_that_were_rounded_are_found_where_nothing_became_zero() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    loss: Loss = lambda: (1 - (1 - 1e-4 * model(x).softmax(-1)).half().float()).log().mean()  # noqa: E731
    worst = blame(loss, model=model, dtype=torch.float16).rows[0]
    assert (worst.operator, worst.severity, worst.overflowed) == ("log", math.inf, 0)
    assert "rounded before" in worst.reason


def written(scores: Tensor, seen: Tensor, huge: float) -> Tensor:
    scores = scores.clone()
    scores.view(-1)[~seen.view(-1)] = huge
    return scores


MASKS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "where": lambda scores, seen, huge: torch.where(seen, scores, huge),
    "filled": lambda scores, seen, huge: scores.float().masked_fill(~seen, huge).half(),
    "added": lambda scores, seen, huge: scores.half() + (huge * ~seen).half(),
    "written": written,
}


def masked(mask: str, seen: Tensor, huge: float) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16), torch.randn(8, 16)

    def loss() -> Tensor:
        return (MASKS[mask](model(x) @ x.T / 4, seen, huge).softmax(-1).float() @ x).square().mean()

    try:
        with torch.autocast("cpu", torch.float16):
            loss()
    except RuntimeError as error:  # some releases, for some of the masks
        pytest.skip(f"PyTorch refuses the constant: {error}")
    return model, loss


@pytest.mark.parametrize(
    ("dtype", "huge"),
    [
        (torch.float16, torch.finfo(torch.float32).min),
        (torch.float16, -1e9),
        (torch.bfloat16, -1e9),
    ],
)
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_beyond_the_range_loses_what_one_within_it_does(
    mask: str, dtype: torch.dtype, huge: float
) -> None:
    accused = []
    for constant in (-3e4, huge):
        model, loss = masked(mask, torch.ones(8, 8).tril().bool(), constant)
        found = blame(loss, model=model, dtype=dtype)
        accused.append([(row.operator, row.direction) for row in found.guilty])
        assert not found.notes
    assert accused[1] == accused[0]


def test_a_mask_beyond_the_range_that_leaves_nothing_of_a_row_is_accused() -> None:
    seen = torch.ones(8, 8).tril().bool() & (torch.arange(8) != 3)[:, None]
    model, loss = masked("where", seen, -1e9)
    found = blame(loss, model=model, dtype=torch.float16)
    assert (found.rows[0].operator, found.rows[0].overflowed) == ("where", 28 + 4)


@pytest.mark.parametrize(
    ("through", "guilty"),
    [
        (lambda y: y.clamp(-1, 1), False),
        (lambda y: 1e4 / y, True),  # 0, and no NaN
        (lambda y: torch.sigmoid(y * torch.ones(4, requires_grad=True)), True),  # its gradient: 0 * inf
    ],
)
def test_an_overflow_is_accused_if_the_loss_or_a_gradient_changes_with_it(through: Any, guilty: bool) -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    loss: Loss = lambda: through((1e9 * model(x)).half()).float().square().mean()  # noqa: E731
    found = blame(loss, model=model, dtype=torch.float16)
    assert bool(found.guilty) is guilty
    assert all((row.operator, row.reason.split()[-1]) == ("mul", "overflowed") for row in found.guilty[:1])


@pytest.mark.parametrize("scale", [1.0, 2.0**-3])
def test_what_was_lost_to_zero_is_accused_whatever_the_loss_scale(scale: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    loss: Loss = lambda: -(10 * model(x)).softmax(-1).half().float().log().mean()  # noqa: E731
    found = blame(loss, model=model, dtype=torch.float16, loss_scale=scale)
    assert "became zero: log" in found.rows[0].reason


TRIANGLE = torch.ones(4).masked_fill(torch.arange(4) < 2, 0.0)


def with_data(value: float) -> Tensor:
    x = torch.randn(8, 4)
    x[3] = value
    return x


@pytest.mark.parametrize(
    ("value", "part", "said"),
    [
        (0.0, lambda y: y.square().sum(-1).sqrt(), "gradient of weight has NaN .* pass of sqrt .* makes inf"),
        (0.0, lambda y: y.abs().pow(0.5), "gradient of weight has NaN .* pass of pow .* makes inf"),
        (
            0.0,
            lambda y: torch.where(y == 0, 0.0, y / y),
            "gradient of weight has NaN .* pass of div .* makes NaN",
        ),
        (0.0, lambda y: y / y, "loss is nan .*: div .* makes NaN first"),
        (0.0, lambda y: y.square().log().abs(), "loss is inf .*: log .* makes inf first"),
        (math.nan, lambda y: y, "loss is nan .*: what linear .* is given has NaN\\."),
        (0.0, lambda y: (y + TRIANGLE[1] - 0.5) / torch.zeros(4), "loss is nan .*: div .* makes inf first"),
        (0.0, lambda y: y.relu() * y.relu().log(), "loss is nan .*: log .* makes inf first"),
        (0.0, lambda y: y.masked_fill(y == 0, -math.inf).softmax(-1), "loss is nan .*: softmax .* makes NaN"),
        (math.inf, lambda y: y, "loss is nan .*: what linear .* is given has inf\\."),
        (
            1.0,
            lambda y: F.cross_entropy(y / TRIANGLE, torch.full((8,), -100)),
            "loss is nan .*: cross_entropy_loss .* makes NaN first",  # of no targets, whatever the mask
        ),
    ],
)
def test_what_is_not_finite_in_float32_as_well_is_said_and_nobody_is_accused(
    value: float, part: Any, said: str
) -> None:
    dtype = torch.float16
    model, x = nn.Linear(4, 4, bias=False), with_data(value)
    loss: Loss = lambda: part(model(x)).mean()  # noqa: E731
    found = blame(loss, model=model, dtype=dtype)
    assert re.search(f"The {said}", found.not_finite)
    assert "in float32 as well" in found.summary()
    assert "+nan" not in found.summary()
    assert not found.guilty
    assert all(math.isnan(row.effect) for row in found.rows)
    with pytest.raises(UsageError, match="No table can help"):
        tune(loss, model=model, dtype=dtype)


def test_an_overflow_beside_what_is_not_finite_in_float32_is_not_accused() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    loss: Loss = lambda: (1e4 * model(x)).half().float().mean() + (0 * model(x)).norm(dim=-1).mean()  # noqa: E731
    nan: Loss = lambda: loss() + (0 * model(x)).square().sum(-1).sqrt().mean()  # noqa: E731
    assert blame(loss, model=model, dtype=torch.float16, loss_scale=1e6).guilty
    assert not blame(nan, model=model, dtype=torch.float16, loss_scale=1e6).guilty


def test_a_table_and_rules_of_modules_are_those_of_the_region() -> None:
    model, loss = runs(transformer)
    rows = blame(loss, model=model, casting=casting.DEFAULT.float32("linear")).rows
    assert rows
    assert not any(row.operator == "linear" and row.direction == "forward" for row in rows)
    rows = blame(loss, model=model, casting=casting.DEFAULT.module("1", "float32")).rows
    assert rows
    assert not any(row.module.startswith("1.") for row in rows)
    with pytest.raises(CastingError, match="softmaxx"):
        blame(loss, model=model, casting=casting.DEFAULT.lower("softmaxx"))


def test_rows_name_modules_operators_and_lines() -> None:
    model, loss = runs(transformer)
    found = blame(loss, model=model)
    assert {row.source.partition(":")[0] for row in found.rows} == {"test_blame.py"}
    assert {"1.qkv", "1.out", "1.up", "1.down", "1", "3"} <= {row.module for row in found.rows}
    assert {"linear", "matmul", "gelu", "add"} <= {row.operator for row in found.rows}
    unnamed = blame(loss)
    assert "Sequential.1.qkv" in {row.module for row in unnamed.rows}
    assert [row.effect for row in unnamed.rows] == [row.effect for row in found.rows]


def test_it_costs_eleven_thirds_of_a_step_in_products() -> None:
    model, loss = runs(transformer)
    with FlopCounter() as step:
        loss().backward()
    model.zero_grad()
    with FlopCounter() as blaming:
        found = blame(loss, model=model)
    ratio = blaming.flops / step.flops
    assert found.flops == found.low_flops == step.flops / 3
    # The products' operands that need no gradient, of which the embedding has none, are computed once.
    assert ratio == pytest.approx(11 / 3, rel=0.01)


def test_a_training_step_is_run_up_to_its_backward() -> None:
    model, loss = runs(perceptron)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = states(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        try:
            value = loss()
            value.backward()
        except Exception:
            pytest.fail("it is no error")
        optimizer.step()
        return value

    assert [row.effect for row in blame(step, model=model).rows] == [
        row.effect for row in blame(loss, model=model).rows
    ]
    for kind in (torch.amp.GradScaler, GradScaler):
        scaler, method = kind("cpu", init_scale=2.0**10), kind.scale
        scaled = blame(
            lambda scaler: scaler.scale(loss()).backward(), scaler, model=model, dtype=torch.float16
        )
        assert not scaled.guilty
        assert (scaled.loss_scale, scaled.loss) == (
            2.0**10,
            blame(loss, model=model, dtype=torch.float16).loss,
        )
        assert kind.scale is method
    for now, then in zip(states(model), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_seen_through(reentrant: bool) -> None:
    model, _loss = runs(perceptron)
    x = torch.randn(64, 16, requires_grad=True)
    plain = blame(lambda: model(x).float().square().mean(), model=model)
    kept = blame(
        lambda: checkpoint(model, x, use_reentrant=reentrant).float().square().mean(),
        model=model,  # type: ignore[no-any-return]
    )
    assert [row.effect for row in kept.rows] == [row.effect for row in plain.rows]


def test_compiled_functions_run_eagerly_and_it_says_so() -> None:
    model, _ = runs(perceptron)
    x = torch.randn(64, 16)
    compiled = torch.compile(model, backend="eager")
    found = blame(lambda: compiled(x).float().square().mean(), model=compiled)  # type: ignore[arg-type]
    assert "What is compiled was run eagerly." in found.notes
    assert {row.operator for row in found.rows} == {"linear", "tanh", "sigmoid"}


def in_region(step, *arguments, **settings):
    def run(*args):
        with autocast("cpu", *arguments, **settings):
            return step(*args)

    return run


def in_a_stage(step):
    """A training step with a region that `backward()` ends, and a scaler."""
    scaler = GradScaler("cpu", init_scale=2.0**4)

    def run(*args):
        with autocast("cpu", torch.float16, emulate=True):
            scaler.scale(step(*args)).backward()

    return run


@pytest.mark.parametrize(
    "around",
    [
        lambda step: in_region(step, torch.float16, emulate=True),
        lambda step: autocast("cpu", torch.float16, emulate=True)(step),
        lambda step: in_region(in_region(step, torch.float16, emulate=True), torch.float16, emulate=True),
        lambda step: in_region(step, torch.float16, emulate=True, report=True),
        lambda step: in_region(step, torch.float16, casting=casting.DEFAULT, emulate=True),
        in_a_stage,
    ],
    ids=["region", "decorated", "twice", "report", "table", "step"],
)
def test_a_rehearsal_of_the_program_is_compared_as_blames_own(around: Any) -> None:
    """Its roundings would be accused if they were taken for casts of the program."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    x, y = torch.randn(64, 16), torch.randn(64, 1)

    def step() -> Tensor:
        return (model(x) - y).square().mean()

    def numbers(found: Any) -> Any:
        return [(row.operator, row.module, row.direction, row.effect) for row in found.rows]

    scale = {"loss_scale": 2.0**4, "dtype": torch.float16, "model": model}
    expected = blame(step, **scale)
    found = blame(around(step), **scale)
    assert not found.guilty
    assert numbers(found) == numbers(expected)
    assert (found.low_flops, found.flops) == (expected.low_flops, expected.flops)


def test_a_regions_of_the_program_are_part_of_the_step() -> None:
    model, _ = runs(perceptron)
    x = torch.randn(64, 16)

    def loss() -> Tensor:
        with autocast("cpu", enabled=False):
            y = model[:2](x)
        with autocast("cpu", torch.bfloat16, casting=casting.DEFAULT.float32("linear")):
            y = model[2:4](y)
        return model[4](y).float().square().mean()  # type: ignore[no-any-return]

    assert {row.module for row in blame(loss, model=model).rows} == {"4"}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x: torch.autograd.grad(model(x).sum(), model.weight), "without it"),
        (lambda model, x: model(x), "with one element"),
        (lambda model, x: model(x).sum().item(), "instead of a loss"),
        (lambda model, x: x.sum(), "does not depend"),
        (lambda model, x: torch.tensor(model(x).sum().item()), "does not depend"),
        (lambda model, x: torch.func.vmap(model)(x).sum(), "torch.func"),
        (lambda model, x: (model(x).sum(), torch.no_grad()(model.weight.mul_)(2))[0], "writes into weight"),
    ],
)
def test_a_function_that_cannot_be_compared_is_refused_and_nothing_changes(loss: Any, message: str) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    before, apply = states(model), torch.autograd.Function.__dict__["apply"]
    with pytest.raises(UsageError, match=message):
        blame(loss, model, x, model=model)
    for now, then in zip(states(model), before, strict=True):
        assert torch.equal(now, then)
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
    assert not torch.is_autocast_enabled("cpu")
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert not list(model.weight._backward_hooks or ())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_scale": -1.0}, Exception, "loss_scale"),
        ({"model": 3}, UsageError, "not a module"),
        ({"dtype": torch.float32}, Exception, "float32"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(error, match=message):
        blame(lambda: model(torch.ones(2, 4)).sum(), **arguments)
    with pytest.raises(UsageError, match="is not a function"):
        blame(3)  # type: ignore[arg-type]


def test_modules_that_are_made_inside_and_weights_that_are_set_before_they_are_used() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    before = states(model)

    def loss() -> Tensor:
        with torch.no_grad():
            nn.init.normal_(tensor=model.weight)
        return nn.Linear(4, 2)(model(x)).square().mean()  # type: ignore[no-any-return]

    assert blame(loss, model=model).rows
    for now, then in zip(states(model), before, strict=True):
        assert torch.equal(now, then)


def test_weights_in_low_precision_are_compared_and_a_model_of_something_else_is_refused() -> None:
    model, x = nn.Linear(4, 4).half(), torch.randn(2, 4).half()
    found = blame(lambda: model(x).float().sum(), model=model, dtype=torch.float16)
    assert (found.rows[0].operator, found.rows[0].inputs) == ("linear", "float16")
    with pytest.raises(UsageError, match="no parameter of the model"):
        blame(lambda: model(x).float().sum(), model=nn.Linear(2, 2), dtype=torch.float16)
    with pytest.raises(UsageError, match=r"is not a torch\.dtype"):
        blame(lambda: model(x).float().sum(), dtype="float16")  # type: ignore[arg-type]


def test_gradients_that_were_there_stay_and_no_warning_of_unscaled_gradients_comes() -> None:
    model, loss = runs(perceptron)
    loss().backward()
    before = states(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blame(lambda: 1e-7 * loss(), model=model, dtype=torch.float16)
        torch.optim.SGD(model.parameters(), 0.0).step()
    for now, then in zip(states(model), before, strict=True):
        assert torch.equal(now, then)


def fsdp2() -> Any:
    mesh, model = init_device_mesh("cpu", (1,)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP")
@pytest.mark.parametrize("names_the_model", [True, False])
@pytest.mark.parametrize(
    ("distributed", "said"),
    [
        (fsdp2, "FSDP shards .* this FSDPSequential"),
        (lambda: nn.Sequential(fsdp2(), nn.Tanh()), "FSDP shards .* this Sequential"),
        (lambda: FullyShardedDataParallel(nn.Linear(4, 1), device_id=torch.device("cpu")), "FSDP shards"),
        (
            lambda: parallelize_module(nn.Linear(4, 2), init_device_mesh("cpu", (1,)), ColwiseParallel()),
            "^weight is a DTensor",
        ),
    ][0 if RELEASE >= (2, 9) else 2 :],  # FSDP2 does not train on CPUs before
)
def test_what_is_sharded_is_refused_and_trains_as_if_it_had_not_been_blamed(
    distributed: Any, said: str, names_the_model: bool
) -> None:
    x = torch.randn(8, 4)
    gradients = []
    for is_blamed in (True, False):
        torch.manual_seed(0)
        model = distributed()
        for function in (blame, tune) if is_blamed else ():
            with pytest.raises(UsageError, match=rf"{said}.*before fully_shard\(model\)"):
                function(lambda: model(x).sum(), model=model if names_the_model else None)  # noqa: B023
        model(x).square().sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(*(getattr(each, "_local_tensor", each) for each in (one, other)))


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_is_refused_where_it_is_used() -> None:
    weight = distribute_tensor(
        torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Replicate()]
    ).requires_grad_()
    with pytest.raises(UsageError, match=r"matmul at test_blame\.py:\d+ is given a DTensor"):
        blame(lambda: (weight @ weight).sum().full_tensor())


TABLE = casting.DEFAULT.float32("softmax")


@pytest.mark.parametrize(
    ("times", "region", "options", "is_said"),
    [
        (9, None, {}, True),
        (9, {}, {}, True),
        (1, None, {}, False),
        (9, None, {"casting": TABLE}, False),
        (9, {"casting": TABLE}, {}, False),
        (9, {"cache_enabled": False}, {}, False),
    ],
)
def test_gradients_that_the_cache_adds_up_in_low_precision_are_said(times, region, options, is_said):
    model, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)

    def loss() -> Tensor:
        return sum(model(x).float().square().mean() for _ in range(times))  # type: ignore[return-value]

    def step() -> Tensor:
        if region is None:
            return loss()
        with autocast("cpu", dtype=torch.bfloat16, **region):
            return loss()

    notes = [note for note in blame(step, model=model, **options).notes if "cache_enabled=False" in note]
    said = rf"^In one plain region, .* gradients of weight, with {times} uses in the step,"
    assert [bool(re.search(said, note)) for note in notes] == [True] * is_said
