"""Code as people write it by hand behind a product whose result is in low precision, and where it breaks.

Each function gets what a linear layer or a convolution returns, and the low precision. It is at fault in that
precision. Without the fault the same code runs in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blame_cases.models import Part, Step, without_autocast

__all__ = ["CODES", "STEPS", "Code", "is_healthy"]

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
INPUTS, CLASSES = 16, 32
LEAST = torch.finfo(FLOAT16).min
PADDING = 4  # tokens at the beginning of a sequence

Function = Callable[..., Tensor]


class Hand(Part):
    """A function, which runs in float32 unless it is at fault."""

    def __init__(self, code: Function) -> None:
        super().__init__()
        self.code = code

    def forward(self, *args: Tensor) -> Tensor:
        if self.fault:
            return self.code(*args, self.low)
        wide = [each.float() if each.is_floating_point() else each for each in args]
        with without_autocast():
            return self.code(*wide, torch.float32)


class Net(Part):
    """Two layers, code by hand, and a layer with a cross entropy, unless the code is the loss."""

    def __init__(self, first: nn.Module, hand: Hand, last: nn.Module | None) -> None:
        super().__init__()
        self.first, self.hand, self.last = first, hand, last

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.first(x)
        if self.last is None:
            return self.hand(x, targets).float()
        logits = self.last(self.hand(x)).float()
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _first(
    inner: int,
    width: int,
    *,
    images: bool = False,
    grown: float = 1.0,
    offset: float = 0.0,
    shape: tuple[int, ...] = (4, 32),
) -> tuple[nn.Module, Tensor]:
    """Return two layers and their inputs. `grown` scales the results, and `offset` is added to them."""
    if images:
        layers: list[nn.Module] = [nn.Conv2d(3, inner, 3, padding=1), nn.Conv2d(inner, width, 3, padding=1)]
        x = torch.randn(shape[0], 3, *shape[1:])
    else:
        layers, x = [nn.Linear(INPUTS, inner), nn.Linear(inner, width)], torch.randn(*shape, INPUTS)
    net = nn.Sequential(layers[0], nn.GELU(), layers[1])
    weight, bias = net[2].weight, net[2].bias
    with torch.no_grad():
        results = net(x).transpose(1 if images else -1, -1)
        factor = grown / results.std()
        weight.mul_(factor)  # which makes their deviation `grown`, and the mean of each channel `offset`
        bias.sub_(results.flatten(0, -2).mean(0)).mul_(factor).add_(offset)
    return net, x


def hidden(dtype: torch.dtype, *, code: Function, width: int = 32, parts: int = 1, **options: Any) -> Step:
    """Return a step of a classifier of tokens with code in its middle, which gets `parts` times the width."""
    first, x = _first(64, parts * width, **options)
    hand = Hand(code)
    with torch.no_grad():
        result = hand(first(x))
    last = nn.Linear(result.shape[-1], CLASSES)
    model = Net(first, hand, last)
    return Step(model, (x, torch.randint(CLASSES, result.shape[:-1])), model, dtype)


def objective(
    dtype: torch.dtype,
    *,
    code: Function,
    targets: Callable[[Tensor], Tensor],
    width: int = 32,
    **options: Any,
) -> Step:
    """Return a step whose loss is written by hand. `targets` makes its targets from what the net returns."""
    first, x = _first(16 if options.get("images") else 64, width, **options)
    with torch.no_grad():
        wanted = targets(first(x))
    model = Net(first, Hand(code), None)
    return Step(model, (x, wanted), model, dtype)


STEPS: dict[str, Callable[..., Step]] = {"hidden": hidden, "objective": objective}


# What makes targets from the results of a net.


def classes(x: Tensor) -> Tensor:
    """Return random classes."""
    return torch.randint(x.shape[-1], x.shape[:-1])


def bits(x: Tensor) -> Tensor:
    """Return random zeros and ones."""
    return torch.randint(2, x.shape).float()


def nothing(x: Tensor) -> Tensor:
    """Return zeros, such as the mask of a class that is not in the image."""
    return torch.zeros_like(x)


def noise(x: Tensor) -> Tensor:
    """Return noise of the size of the results."""
    return torch.randn_like(x) * x.std()


def near(x: Tensor) -> Tensor:
    """Return the results with a little noise, such as those of a teacher."""
    return x + 0.2 * x.std() * torch.randn_like(x)


def views(x: Tensor) -> Tensor:
    """Return the results with as much noise, such as those of another view of the same images."""
    return x + torch.randn_like(x)


def around_1000(x: Tensor) -> Tensor:
    """Return numbers around 1000, such as years, prices or pressures."""
    return 1000 + torch.randn_like(x)


def rewards(x: Tensor) -> Tensor:
    """Return rewards of answers, all alike in the first group."""
    marks = torch.randint(2, x.shape[:2]).float()
    marks[0] = 1.0
    return marks


# Norms.


def rms_norm(x: Tensor, low: torch.dtype) -> Tensor:
    """Root mean square normalization: squares overflow, or vanish with the epsilon."""
    return x / (x * x).mean(-1, keepdim=True).add(1e-8).sqrt()


def layer_norm(x: Tensor, low: torch.dtype) -> Tensor:
    """Layer normalization whose variance overflows."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


def unit_length(x: Tensor, low: torch.dtype) -> Tensor:
    """Vectors of length 1, from squares that are flushed to zero."""
    return x / (x * x).sum(-1, keepdim=True).sqrt().clamp_min(1e-12)


def group_norm(x: Tensor, low: torch.dtype) -> Tensor:
    """Group normalization with the variance as a difference of rounded means."""
    groups = x.unflatten(1, (4, -1)).flatten(2)
    mean = groups.mean(-1, keepdim=True)
    variance = (groups * groups).mean(-1, keepdim=True) - mean * mean
    return ((groups - mean) / (variance.clamp_min(0) + 1e-5).sqrt()).view_as(x).mean(-1)


def instance_norm(x: Tensor, low: torch.dtype) -> Tensor:
    """Instance normalization whose squared deviations overflow."""
    deviations = x - x.mean((2, 3), keepdim=True)
    normed = deviations / ((deviations * deviations).mean((2, 3), keepdim=True) + 1e-5).sqrt()
    return F.gelu(normed).mean((2, 3))


def batch_norm(x: Tensor, low: torch.dtype) -> Tensor:
    """Batch normalization with the variance as a difference of rounded means."""
    mean = x.mean((0, 1))
    variance = (x * x).mean((0, 1)) - mean * mean
    return (x - mean) / (variance.clamp_min(0) + 1e-5).sqrt()


# Attention.


def _attended(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v


def _scores(x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = x.chunk(3, -1)
    return (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), v


def _unseen(length: int) -> Tensor:
    """Return a causal mask with padding before the first token, which leaves nothing to the padding."""
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    unseen[:, :PADDING] = True
    return unseen


def bias_on_mask(x: Tensor, low: torch.dtype) -> Tensor:
    """A mask of float16's smallest number, and a bias that makes it infinite."""
    scores, v = _scores(x)
    places = torch.arange(scores.shape[-1])
    bias = -17.0 - 0.1 * (places[:, None] - places).abs()
    return _attended(scores.masked_fill(_unseen(len(places)), LEAST) + bias.to(scores.dtype), v)


def temperature_on_mask(x: Tensor, low: torch.dtype) -> Tensor:
    """A mask of float16's smallest number, which the temperature makes infinite."""
    scores, v = _scores(x)
    return _attended(scores.masked_fill(_unseen(scores.shape[-1]), LEAST) / 0.5, v)


def slopes(x: Tensor, low: torch.dtype) -> Tensor:
    """ALiBi's bias from places above 256 in low precision."""
    scores, v = _scores(x)
    places = torch.arange(scores.shape[-1]).to(scores.dtype)
    return _attended(scores - 0.5 * (places[:, None] - places).abs(), v)


def unscaled_scores(x: Tensor, low: torch.dtype) -> Tensor:
    """Attention with one wide head, whose scores overflow before they are divided."""
    q, k, v = x.chunk(3, -1)
    return _attended(q @ k.transpose(-1, -2) / q.shape[-1], v)


def powers_of_e(x: Tensor, low: torch.dtype) -> Tensor:
    """A softmax without its maximum, whose powers are cast to the low precision."""
    scores, v = _scores(x)
    weights = scores.exp().to(v.dtype)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def powers_of_2(x: Tensor, low: torch.dtype) -> Tensor:
    """A softmax without its maximum with powers of 2, as in kernels."""
    scores, v = _scores(x)
    weights = torch.exp2(scores * 1.4427)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def linear_attention(x: Tensor, low: torch.dtype) -> Tensor:
    """Linear attention: a sum over all tokens in a product that overflows."""
    q, k, v = x.chunk(3, -1)
    q, k = F.relu(q) * F.relu(q), F.relu(k) * F.relu(k)
    return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(1)[..., None])


def _turned(x: Tensor, first: int, low: torch.dtype) -> Tensor:
    q, k, v = x.chunk(3, -1)
    half = q.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    angles = torch.arange(first, first + q.shape[-2]).to(low)[:, None] * frequencies.to(low)
    cos, sin = angles.cos(), angles.sin()
    q, k = (
        torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        for a, b in (each.chunk(2, -1) for each in (q, k))
    )
    return _attended((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), v)


def rotary(x: Tensor, low: torch.dtype) -> Tensor:
    """Rotary angles in low precision."""
    return _turned(x, 0, low)


def late_rotary(x: Tensor, low: torch.dtype) -> Tensor:
    """Rotary angles in low precision, late in a long text."""
    return _turned(x, 4000, low)


# Sums and states over time.


def moving_average(x: Tensor, low: torch.dtype) -> Tensor:
    """An exponential moving average with a decay that low precision rounds to 1."""
    state, states = torch.zeros_like(x[:, 0]), []
    for now in x.unbind(1):
        state = 0.999 * state + 0.001 * now
        states.append(state)
    return 10.0 * torch.stack(states[31::32], 1)


def running_mean(x: Tensor, low: torch.dtype) -> Tensor:
    """The mean of all tokens so far, with a count that stops at 256 and a mean that stops to move."""
    mean, count, means = torch.zeros_like(x[:, 0]), x.new_zeros(1), []
    for now in x.unbind(1):
        count = count + 1
        mean = mean + (now - mean) / count
        means.append(mean)
    return torch.stack(means[31::32], 1)


def exponential_gates(x: Tensor, low: torch.dtype) -> Tensor:
    """An xLSTM's cell whose input gate is cast to the low precision."""
    value, entry, keep = x.chunk(3, -1)
    entry, keep = entry.exp().to(x.dtype), keep.sigmoid()
    cell, norm, results = torch.zeros_like(value[:, 0]), torch.zeros_like(value[:, 0]), []
    for now in range(x.shape[1]):
        cell = keep[:, now] * cell + entry[:, now] * value[:, now]
        norm = keep[:, now] * norm + entry[:, now]
        results.append(cell / norm)
    return torch.stack(results, 1)


def residual_stream(x: Tensor, low: torch.dtype) -> Tensor:
    """Small updates to a large residual stream."""
    stream, update = x.chunk(2, -1)
    for layer in range(80):
        stream = stream + 0.001 * update.roll(layer // 16, -1)
    return F.layer_norm(stream.float(), stream.shape[-1:])


def transmittance(x: Tensor, low: torch.dtype) -> Tensor:
    """A radiance field's rays: 1 - alpha is rounded to 1."""
    density, colors = F.softplus(x[..., :1]), x[..., 1:]
    alpha = (1 - torch.exp(-density * 0.002)).to(x.dtype)
    clear = (1 - alpha).cumprod(1)
    return 10.0 * (clear * colors)[:, ::16]


# Other parts of nets.


def log_gate(x: Tensor, low: torch.dtype) -> Tensor:
    """The logarithm of a gate with an epsilon that is zero in float16."""
    return (x.sigmoid() + 1e-8).log()


def masked_mean(x: Tensor, low: torch.dtype) -> Tensor:
    """The mean over the seen tokens of windows, with an epsilon that is zero in float16."""
    windows = x.unflatten(1, (4, -1))
    seen = torch.ones_like(windows[..., :1])
    seen[0, -1] = 0  # the padding of a short text
    pooled = (windows * seen).mean(2) / (seen.mean(2) + 1e-8)
    return windows[:, :, 0] + pooled


def time_embedding(x: Tensor, low: torch.dtype) -> Tensor:
    """Embedded time steps of a diffusion model in low precision."""
    half = x.shape[-1] // 2
    frequencies = (1e4 ** -(torch.arange(half) / half)).to(low)
    angles = torch.linspace(0, 999, x.shape[0]).round().to(low)[:, None] * frequencies
    return x * (1 + torch.cat([angles.cos(), angles.sin()], -1))[:, None]


def distances(x: Tensor, low: torch.dtype) -> Tensor:
    """Soft codes by squared distances, which are small differences of large numbers."""
    a, codes = x[:, 16:], x[:, :16]
    squares = (a * a).sum(-1)[..., None] + (codes * codes).sum(-1)[:, None]
    values = codes.float() - codes.float().mean(1, keepdim=True)
    return _attended(-(squares - 2 * (a @ codes.transpose(-1, -2))), values)


# Losses.


def bce(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """Binary cross entropy: 1 - p is zero for confident logits."""
    p = x.sigmoid()
    return -(targets * (p + 1e-8).log() + (1 - targets) * (1 - p + 1e-8).log()).mean()


def cast_logits(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """Cross entropy of logits with an offset that are cast to the low precision."""
    logits = (x.float() + 100.0).to(low)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def log_of_chances(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """The logarithm of small probabilities in float16, with an epsilon that is zero there."""
    chances = x.softmax(-1).to(x.dtype).gather(-1, targets[..., None])
    return -(chances + 1e-8).log().mean()


def summed_loss(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """A sum of losses that is cast to float16 before it is divided."""
    return F.cross_entropy(x.flatten(0, -2), targets.flatten(), reduction="sum").to(low) / targets.numel()


def cast_targets(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """The error of numbers around 1000 that are cast to the low precision."""
    return (1000.0 + x.float() - targets.to(low)).square().mean()


def weighted_error(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """A squared error with a large weight before the mean."""
    error = x - targets.to(x.dtype)
    return (1000.0 * (error * error)).mean()


def shares_of_error(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """A squared error that is divided by the number of values before the sum."""
    error = x - targets.to(x.dtype)
    return (error * error / error.numel()).sum()


def contrast(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """A contrastive loss whose similarities are rounded and then multiplied by 100."""
    a, b = F.normalize(x, dim=-1), F.normalize(targets, dim=-1)
    return F.cross_entropy(a @ b.T * 100.0, torch.arange(len(a)))


def sharp_contrast(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """A contrastive loss of vectors that nobody normalized, divided by a temperature."""
    return F.cross_entropy(x @ targets.T / 0.01, torch.arange(len(x)))


def cosine(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """One minus the cosine, from means that overflow or are rounded."""
    other = targets.to(x.dtype)
    norms = (x * x).mean(-1).sqrt() * (other * other).mean(-1).sqrt()
    return (1 - (x * other).mean(-1) / norms).mean()


def dice(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """Dice loss with the sums over all pixels as products."""
    p, t = x.sigmoid().flatten(2), targets.to(x.dtype).flatten(2)
    both, ones = torch.einsum("bcn,bcn->bc", p, t), torch.ones_like(p)
    sums = torch.einsum("bcn,bcn->bc", p, ones) + torch.einsum("bcn,bcn->bc", t, ones)
    return 1 - ((2 * both + 1) / (sums + 1)).mean()


def dice_of_squares(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """V-Net's Dice loss for a class that is not there: squares and epsilon are zero in float16."""
    p, t = x.sigmoid().flatten(2), targets.to(x.dtype).flatten(2)
    sums = (p * p).mean(-1) + (t * t).mean(-1)
    return 1 - ((2 * (p * t).mean(-1) + 1e-8) / (sums + 1e-8)).mean()


def spread(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """VICReg's loss of the variance, which is a difference of rounded means."""
    mean = x.mean(0)
    variance = ((x * x).mean(0) - mean * mean).clamp_min(0)
    return F.relu(1 - (variance + 1e-4).sqrt()).mean() + 0.01 * (x - targets.to(x.dtype)).abs().mean()


def gram(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """A loss of style: the Gram matrix overflows before it is divided."""

    def matrix(features: Tensor) -> Tensor:
        features = features.flatten(2)
        return features @ features.transpose(1, 2) / features.shape[-1]

    return (matrix(x) - matrix(targets)).abs().mean()


def advantages(x: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
    """GRPO's advantages, with an epsilon that is zero in float16, and a group of equal rewards."""
    given = targets.to(low)
    gained = (given - given.mean(1, keepdim=True)) / (given.std(1, keepdim=True) + 1e-8)
    return -(gained * x.log_softmax(-1)[..., 0]).mean()


class Code(NamedTuple):
    """Code with what breaks it.

    Attributes:
        model: a key of `STEPS`.
        code: the function.
        dtypes: the precisions in which it breaks.
        operators: what names the fault in it, with spaces between.
        options: of the model.
    """

    model: str
    code: Function
    dtypes: tuple[torch.dtype, ...]
    operators: str
    options: dict[str, Any]


def _code(model: str, code: Function, dtype: torch.dtype | None, operators: str, **options: Any) -> Code:
    return Code(model, code, (FLOAT16, BFLOAT16) if dtype is None else (dtype,), operators, options)


def is_healthy(code: Function) -> bool:
    """Return whether code without its fault is sound beyond doubt.

    The others amplify the rounding of the products before them: their gradient is further from float32's than
    4 times the distance from 1 to the next number, with one of 6 seeds.
    """
    return code not in (batch_norm, cosine, distances, group_norm, sharp_contrast, unscaled_scores)


CODES: tuple[Code, ...] = (
    _code("hidden", rms_norm, FLOAT16, "mul", grown=400.0),
    _code("hidden", rms_norm, FLOAT16, "mul mean add div", grown=1e-4),
    _code("hidden", layer_norm, FLOAT16, "var", grown=400.0),
    _code("hidden", unit_length, FLOAT16, "mul", grown=1e-4),
    _code(
        "hidden", group_norm, BFLOAT16, "mul mean sub", grown=0.3, offset=4.0, images=True, shape=(4, 16, 16)
    ),
    _code("hidden", instance_norm, FLOAT16, "mul", grown=400.0, images=True, shape=(16, 16, 16)),
    _code("hidden", batch_norm, FLOAT16, "mul mean sub", grown=1.0, offset=20.0),
    _code("hidden", bias_on_mask, FLOAT16, "add", parts=3),
    _code("hidden", temperature_on_mask, FLOAT16, "div", parts=3),
    _code("hidden", slopes, BFLOAT16, "to sub", parts=3, shape=(1, 384)),
    _code("hidden", unscaled_scores, FLOAT16, "matmul", parts=3, grown=30.0, shape=(4, 64), width=512),
    _code("hidden", powers_of_e, FLOAT16, "exp to", parts=3, grown=2.0),
    _code("hidden", powers_of_2, FLOAT16, "exp2", parts=3, grown=2.0),
    _code("hidden", linear_attention, FLOAT16, "matmul", parts=3, grown=6.0, shape=(1, 1024)),
    _code("hidden", rotary, BFLOAT16, "to mul", parts=3, grown=2.0, shape=(1, 512)),
    _code("hidden", late_rotary, FLOAT16, "to mul", parts=3, grown=2.0, shape=(2, 64)),
    _code("hidden", moving_average, BFLOAT16, "mul add", grown=0.5, offset=1.0, shape=(2, 384)),
    _code("hidden", running_mean, BFLOAT16, "add", offset=1.0, shape=(2, 640)),
    _code("hidden", exponential_gates, FLOAT16, "exp to", parts=3, grown=2.0, offset=7.0),
    _code("hidden", residual_stream, BFLOAT16, "add", parts=2, grown=100.0),
    _code("hidden", transmittance, BFLOAT16, "sub to", shape=(4, 128)),
    _code("hidden", log_gate, FLOAT16, "sigmoid add log", offset=-19.0),
    _code("hidden", masked_mean, FLOAT16, "add div"),
    _code("hidden", time_embedding, None, "to mul", shape=(64, 4)),
    _code("hidden", distances, BFLOAT16, "matmul mul sub", grown=0.5, offset=4.0, shape=(4, 48)),
    _code("objective", bce, BFLOAT16, "sigmoid sub", targets=bits, grown=6.0),
    _code("objective", cast_logits, None, "to", targets=classes),
    _code("objective", log_of_chances, FLOAT16, "to add log", targets=classes, grown=8.0),
    _code("objective", summed_loss, FLOAT16, "to", targets=classes, shape=(64, 256), width=96),
    _code("objective", cast_targets, None, "to", targets=around_1000),
    _code("objective", weighted_error, FLOAT16, "mul", targets=noise, grown=6.0),
    _code("objective", shares_of_error, FLOAT16, "div", targets=noise, grown=0.05, shape=(64, 64)),
    _code("objective", contrast, BFLOAT16, "matmul mul", targets=views, offset=3.0, shape=(64,)),
    _code("objective", sharp_contrast, FLOAT16, "div", targets=noise, grown=8.0, shape=(64,)),
    _code("objective", cosine, FLOAT16, "mul", targets=noise, grown=400.0),
    _code("objective", cosine, BFLOAT16, "mul mean sqrt div sub", targets=near, shape=(64,)),
    _code(
        "objective", dice, FLOAT16, "einsum matmul", targets=bits, width=2, images=True, shape=(1, 384, 384)
    ),
    _code(
        "objective",
        dice_of_squares,
        FLOAT16,
        "mul mean add div",
        targets=nothing,
        width=2,
        images=True,
        shape=(2, 32, 32),
        offset=-10.0,
    ),
    _code("objective", spread, BFLOAT16, "mul mean sub", targets=near, grown=0.3, offset=3.0, shape=(128,)),
    _code(
        "objective",
        gram,
        FLOAT16,
        "matmul",
        targets=noise,
        width=8,
        images=True,
        shape=(1, 64, 64),
        grown=6.0,
    ),
    _code("objective", advantages, FLOAT16, "add div", targets=rewards, shape=(4, 8)),
)
