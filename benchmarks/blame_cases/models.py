"""Fourteen small models with a training step each, and the places where faults are planted in them.

A `Part` whose `fault` is empty computes as good practice has it: norms, softmax and loss in float32. Casts to
the low precision are written with the attribute `low`, so that the same program runs in float32 when `low` is
float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blame_cases import LARGEST_SCALE, OUTSIDE, SMALLEST_SCALE, Errors
from preamp.autocasting.tables import Casting
from preamp.blaming.blame import Blame
from preamp.torch import autocast, blame

WORDS, LENGTH, BATCH = 64, 24, 4
LARGE_VOCABULARY = 4000
TERMS, CHUNKS = 256, 400  # of the long sums: 1e5 terms in all


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step, as blame gets it.

    Attributes:
        loss_fn: returns the loss, a scalar, from `args`; it calls `model`.
        args: what it is given.
        model: whose modules and weights the step is about.
        dtype: the low precision.
        casting: an edited table of operators, if the step has one.
        loss_scale: the loss scale; None for what a dynamic scaler would settle at, at most 2^16.
    """

    loss_fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    model: nn.Module
    dtype: torch.dtype
    casting: Casting | None = None
    loss_scale: float | None = None

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number of the low precision."""
        return torch.finfo(self.dtype).eps

    def blame(self) -> Blame:
        """Return what blame says of it."""
        return blame(
            self.loss_fn,
            *self.args,
            model=self.model,
            dtype=self.dtype,
            casting=self.casting,
            loss_scale=self.loss_scale,
        )

    def errors(self, seed: int) -> Errors:
        """Return how far a run in low precision is from one in float32, without blame."""
        set_low(self.model, torch.float32)
        torch.manual_seed(seed)
        exact = self.loss_fn(*self.args)
        wanted = _gradients(exact, self.model)
        set_low(self.model, self.dtype)
        torch.manual_seed(seed)
        with autocast("cpu", self.dtype, casting=self.casting, model=self.model, emulate=True):
            loss = self.loss_fn(*self.args)
        gradients = _scaled_gradients(loss, self)
        finite = bool(loss.isfinite()) and all(bool(gradient.isfinite().all()) for gradient in gradients)
        pairs = list(zip(gradients, wanted, strict=True))
        norm = _norm(wanted)
        gone = [(gradient == 0) & (right != 0) for gradient, right in pairs]
        lost_norm = _norm([right * zero for right, zero in zip(wanted, gone, strict=True)]) / norm
        return Errors(
            loss=float((loss.detach() - exact.detach()).abs() / exact.detach().abs()),
            gradient=_norm([gradient - right for gradient, right in pairs]) / norm,
            lost=max(lost_norm, max(float(zero.float().mean()) for zero in gone)),
            finite=finite,
        )


def _scaled_gradients(loss: Tensor, step: Step) -> list[Tensor]:
    """Return the unscaled gradients with the step's loss scale, or the largest that does not overflow."""
    if step.loss_scale is not None:
        return _gradients(loss, step.model, step.loss_scale)
    for power in range(LARGEST_SCALE, SMALLEST_SCALE - 1, -1):
        gradients = _gradients(loss, step.model, 2.0**power)
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            break
    return gradients


def _gradients(loss: Tensor, model: nn.Module, scale: float = 1.0) -> list[Tensor]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss * scale, weights, retain_graph=True, materialize_grads=True)
    return [gradient.double() / scale for gradient in gradients]


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


class Part(nn.Module):
    """A module in which a fault can be planted.

    Attributes:
        fault: which one; empty for none.
        amount: how strong it is.
        low: the dtype of the casts that a fault writes.
    """

    fault: str = ""
    amount: float = 1.0
    low: torch.dtype = torch.float32


LOSSES: WeakKeyDictionary[nn.Module, Part] = WeakKeyDictionary()
"""The losses that are outside of their models, whose `forward` is called as a function."""


def part_at(model: nn.Module, path: str) -> Part:
    """Return the part of a model at a path, or for `OUTSIDE` the loss outside of it."""
    part = LOSSES[model] if path == OUTSIDE else model.get_submodule(path)
    assert isinstance(part, Part), path
    return part


def set_low(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype to which the faults of a model and of its loss cast."""
    for module in (*model.modules(), LOSSES.get(model)):
        if isinstance(module, Part):
            module.low = dtype


def without_autocast() -> torch.autocast:
    """Return a region in which nothing is cast but by hand."""
    return torch.autocast("cpu", enabled=False)


class LayerNorm(Part):
    """Layer normalization, in float32 unless at fault."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if self.fault == "low norm":
            with without_autocast():
                low, weight, bias = x.to(self.low), self.weight.to(self.low), self.bias.to(self.low)
                return F.layer_norm(low, shape, weight, bias).float()
        if self.fault == "variance of squares":
            low = x.to(self.low)
            mean = low.mean(-1, keepdim=True)
            variance = ((low * low).mean(-1, keepdim=True) - mean * mean).clamp_min(0)
            return ((low - mean) * torch.rsqrt(variance + 1e-5)).float() * self.weight + self.bias
        if self.fault == "low deviations":
            low = x.to(self.low)
            deviations = low - low.mean(-1, keepdim=True)
            return (
                deviations * torch.rsqrt(deviations.square().mean(-1, keepdim=True) + 1e-5)
            ).float() * self.weight + self.bias
        return F.layer_norm(x.float(), shape, self.weight, self.bias)


class RmsNorm(Part):
    """Root mean square normalization, written by hand as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "low norm":
            low = x.to(self.low)
            return (low * torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + 1e-6)).float() * self.weight
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(Part):
    """Attention of several heads.

    Args:
        width: of the tokens.
        heads: how many.
        scaled: whether the scores are divided by the root of a head's width; T5's are not.
        upcast: whether the scores are computed in float32, as GPT-2's are with `upcast_attn`.
        causal: whether tokens see earlier ones only.
        rotary: whether queries and keys are turned by their places.
    """

    def __init__(
        self,
        width: int,
        heads: int = 2,
        *,
        scaled: bool = True,
        upcast: bool = False,
        causal: bool = True,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.upcast, self.causal, self.rotary = heads, upcast, causal, rotary
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = (width // heads) ** -0.5 if scaled else 1.0

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (self._split(project(x)) for project in (self.query, self.key, self.value))
        if self.rotary:
            q, k = self._turned(q), self._turned(k)
        if self.upcast:
            with without_autocast():
                scores = q.float() @ k.float().transpose(-1, -2) * self.scale
        else:
            scores = q @ k.transpose(-1, -2) * self.scale
        if bias is not None:
            scores = scores + bias
        if self.fault == "logits":
            scores = scores * self.amount
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        return self.out((self._softmax(scores) @ v).transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        with without_autocast():
            places = torch.arange(x.shape[-2], dtype=torch.float32)
            angles = places[:, None] * 100.0 ** -(torch.arange(half) / half)
            cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def _softmax(self, scores: Tensor) -> Tensor:
        if self.fault == "low softmax":
            with without_autocast():
                return F.softmax(scores.to(self.low), -1).float()
        if self.fault == "softmax by hand":
            low = scores.to(self.low)
            weights = (low - low.amax(-1, keepdim=True)).exp()
            return (weights / weights.sum(-1, keepdim=True)).float()
        if self.fault == "softmax without maximum":
            weights = scores.to(self.low).exp()
            return (weights / weights.sum(-1, keepdim=True)).float()
        return F.softmax(scores, -1, dtype=torch.float32)


class FeedForward(Part):
    """The dense half of a transformer's block: GELU, ReLU, or SwiGLU with a gate."""

    def __init__(self, width: int, activation: str = "gelu") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width) if activation == "swiglu" else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        hidden = self.up(x)
        return self.down(F.relu(hidden) if self.activation == "relu" else F.gelu(hidden))


class Block(nn.Module):
    """Attention and a dense net, each with a norm before it and a sum behind it."""

    def __init__(
        self,
        norm: Callable[[int], nn.Module],
        width: int,
        attention: Attention,
        feed_forward: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.attention, self.feed_forward, self.drop = attention, feed_forward, nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.first(x), bias))
        return x + self.drop(self.feed_forward(self.second(x)))


class Head(Part):
    """The product with the vocabulary, in float32 if `upcast`."""

    def __init__(self, width: int, words: int, upcast: bool = False) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.randn(words, width) / math.sqrt(width))
        self.upcast = upcast

    def forward(self, x: Tensor) -> Tensor:
        if not self.upcast:
            return F.linear(x, self.weight)
        with without_autocast():
            return F.linear(x.float(), self.weight)


class CrossEntropy(Part):
    """The mean cross entropy of logits, in float32 unless at fault."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.flatten(0, -2), targets.flatten()
        if self.fault == "low log_softmax":
            with without_autocast():
                return F.nll_loss(F.log_softmax(logits.to(self.low), -1), targets).float()
        if self.fault == "logsumexp by hand":
            low = logits.to(self.low)
            return (low.exp().sum(-1).log() - low.gather(-1, targets[:, None])[:, 0]).mean().float()
        if self.fault == "low logsumexp":
            low = logits.to(self.low)
            return (low.logsumexp(-1) - low.gather(-1, targets[:, None])[:, 0]).float().mean()
        if self.fault == "log of softmax":
            chances = F.softmax(logits, -1).to(self.low)
            return -chances.gather(-1, targets[:, None])[:, 0].log().float().mean()
        return F.cross_entropy(logits.float(), targets)


class Language(Part):
    """A language model: embeddings, blocks, a norm and a head.

    Args:
        words: of the vocabulary.
        width: of the tokens.
        blocks: what is between.
        norm: makes the last norm.
        head: the head.
        places: whether places are embedded, too.
        offset: a number in all channels of the embedded words, as trained models have it in a few.
    """

    def __init__(
        self,
        words: int,
        width: int,
        blocks: list[Block],
        norm: Callable[[int], nn.Module],
        head: Head,
        places: bool,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.words, self.offset = nn.Embedding(words, width), offset
        self.places = nn.Embedding(LENGTH, width) if places else None
        self.blocks, self.last, self.head = nn.ModuleList(blocks), norm(width), head
        self.loss = CrossEntropy()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) + self.offset
        if self.places is not None:
            x = x + self.places.weight[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.last(x)), targets)


def _tokens(length: int = LENGTH, batch: int = BATCH, words: int = WORDS) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(words, (batch, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def gpt(
    dtype: torch.dtype,
    *,
    width: int = 64,
    layers: int = 2,
    upcast: bool = False,
    upcast_head: bool = False,
    offset: float = 0.0,
    dropout: float = 0.0,
    sharp: float = 1.0,
    tied: bool = False,
    activation: str = "gelu",
    shared: float = 0.0,
) -> Step:
    """Return a step of a GPT: LayerNorm, learned places, GELU.

    `sharp` scales the logits, as those of a trained model; `tied` shares the weights of words and head;
    `shared` is in all queries and keys, which adds to all scores of a token alike.
    """
    blocks = [
        Block(LayerNorm, width, Attention(width, upcast=upcast), FeedForward(width, activation), dropout)
        for _ in range(layers)
    ]
    model = Language(WORDS, width, blocks, LayerNorm, Head(width, WORDS, upcast_head), True, offset)
    model.head.weight.data.mul_(sharp)
    for block in blocks:
        for project in (block.attention.query, block.attention.key):
            project.bias.data.add_(shared)
    if tied:
        nn.init.normal_(model.words.weight, std=0.125)
        model.head.weight = model.words.weight
    return Step(model, _tokens(), model, dtype)


def llama(
    dtype: torch.dtype,
    *,
    width: int = 64,
    layers: int = 2,
    upcast: bool = False,
    upcast_head: bool = True,
    grown: float = 1.0,
    sharp: float = 1.0,
    shared: float = 0.0,
) -> Step:
    """Return a step of a Llama: RMSNorm, rotary places, SwiGLU.

    `grown` scales the embedded words; `sharp` and `shared` are as in `gpt`.
    """
    blocks = [
        Block(RmsNorm, width, Attention(width, upcast=upcast, rotary=True), FeedForward(width, "swiglu"))
        for _ in range(layers)
    ]
    model = Language(WORDS, width, blocks, RmsNorm, Head(width, WORDS, upcast_head), False)
    model.words.weight.data.mul_(grown)
    model.head.weight.data.mul_(sharp)
    for block in blocks:
        for project in (block.attention.query, block.attention.key):
            project.bias.data.add_(shared)
    return Step(model, _tokens(), model, dtype)


class Encoder(Part):
    """T5's encoder: a bias for each distance, scores that are not scaled, ReLU, and a mean of the tokens."""

    def __init__(self, width: int, layers: int, classes: int, bias: float, activation: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.distances = nn.Embedding(2 * LENGTH, 2)
        self.distances.weight.data.add_(bias)
        blocks = [
            Block(
                RmsNorm, width, Attention(width, scaled=False, causal=False), FeedForward(width, activation)
            )
            for _ in range(layers)
        ]
        for block in blocks:
            block.attention.query.weight.data.mul_((width // 2) ** -0.5)  # T5 puts the scale here
        self.blocks, self.last, self.classes = (
            nn.ModuleList(blocks),
            RmsNorm(width),
            nn.Linear(width, classes),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, places = self.words(tokens), torch.arange(tokens.shape[-1])
        bias = self.distances(places[:, None] - places + LENGTH).permute(2, 0, 1)
        for block in self.blocks:
            x = block(x, bias)
        return self.classes(self.last(x).mean(1))


def t5(
    dtype: torch.dtype, *, width: int = 64, layers: int = 2, bias: float = 0.0, activation: str = "relu"
) -> Step:
    """Return a step of T5's encoder with a classifier. `bias` is what all distances have in common."""
    model = Encoder(width, layers, 8, bias, activation)
    loss = LOSSES[model] = CrossEntropy()

    def loss_fn(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss.forward(model(tokens), targets)

    return Step(loss_fn, (torch.randint(WORDS, (8, LENGTH)), torch.randint(8, (8,))), model, dtype)


class Dense(Part):
    """A linear layer with an activation.

    Its faults are what cancels: "low offset" adds a number and takes it away again, and the others compute
    about `x`, `x * x / 2` and `exp(x)` as differences of numbers that are nearly the same.
    """

    def __init__(self, before: int, after: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(before, after), activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.fault == "low offset":
            x = ((x.to(self.low) + self.amount) - self.amount).float()
        if self.fault == "one minus cosine":
            return ((1 - torch.cos((x * self.amount).to(self.low))).float()) / self.amount**2
        if self.fault == "difference of squares":
            low = x.to(self.low)
            up, down = self.amount + low / 2, self.amount - low / 2
            return self.activation((up * up - down * down).float() / (2 * self.amount))
        return self.activation(x)


class Scaled(Part):
    """A number times its input, learned, as a layer scale is."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Perceptron(Part):
    """A deep net of dense layers, with a sum behind each but the first and the last."""

    def __init__(self, width: int, depth: int, activation: Callable[[Tensor], Tensor], classes: int) -> None:
        super().__init__()
        self.first = Dense(32, width, activation)
        self.middle = nn.ModuleList(Dense(width, width, activation) for _ in range(depth))
        self.before = nn.ModuleList(Scaled(1.0) for _ in range(depth))
        self.behind = nn.ModuleList(Scaled(1.0) for _ in range(depth))
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for before, layer, behind in zip(self.before, self.middle, self.behind, strict=True):
            x = x + behind(layer(before(x)))
        return self.last(x)


def perceptron(
    dtype: torch.dtype,
    *,
    width: int = 64,
    depth: int = 5,
    activation: Callable[[Tensor], Tensor] = torch.tanh,
    batch: int = 32,
) -> Step:
    """Return a step of a deep dense net that classifies."""
    model = Perceptron(width, depth, activation, 10)

    def loss_fn(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(x), targets)

    return Step(loss_fn, (torch.randn(batch, 32), torch.randint(10, (batch,))), model, dtype)


class Convolutions(Part):
    """Convolutions with batch normalization, and the mean over the image."""

    def __init__(self, channels: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        for before, after in ((3, channels), (channels, channels), (channels, 2 * channels)):
            self.convolutions.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.norms.append(BatchNorm(after))
        self.activation, self.classes = activation, nn.Linear(2 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.activation(norm(convolution(x)))
        return self.classes(x.mean((2, 3)))


class BatchNorm(Part):
    """Batch normalization, PyTorch's unless at fault."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "variance of squares":
            low, axes = x.to(self.low), (0, 2, 3)
            mean = low.mean(axes, keepdim=True)
            variance = (low.square().mean(axes, keepdim=True) - mean.square()).clamp_min(0)
            normed = ((low - mean) * torch.rsqrt(variance + 1e-5)).float()
            return normed * self.norm.weight[:, None, None] + self.norm.bias[:, None, None]
        if self.fault == "low offset":
            x = ((x + self.amount).to(self.low) - self.amount).float()
        return self.norm(x)


def cnn(
    dtype: torch.dtype,
    *,
    channels: int = 16,
    activation: Callable[[Tensor], Tensor] = F.relu,
    size: int = 12,
    contrast: float = 1.0,
) -> Step:
    """Return a step of a convolutional net with BatchNorm. `contrast` scales the images."""
    model = Convolutions(channels, activation)

    def loss_fn(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float(), targets)

    images = contrast * torch.randn(8, 3, size, size)
    return Step(loss_fn, (images, torch.randint(10, (8,))), model, dtype)


class Residual(Part):
    """Two convolutions with group normalization, and a sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.scale = GroupNorm(4, channels), Scaled(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(self.second(F.silu(self.first(self.norm(x)))))


class GroupNorm(Part):
    """Group normalization, in float32 unless at fault."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "low norm":
            with without_autocast():
                weight, bias = self.weight.to(self.low), self.bias.to(self.low)
                return F.group_norm(x.to(self.low), self.groups, weight, bias).float()
        if self.fault == "variance of squares":
            low = x.to(self.low).unflatten(1, (self.groups, -1))
            axes = (2, 3, 4)
            mean = low.mean(axes, keepdim=True)
            variance = (low.pow(2).mean(axes, keepdim=True) - mean.pow(2)).clamp_min(0)
            normed = ((low - mean) / torch.sqrt(variance + 1e-5)).flatten(1, 2).float()
            return normed * self.weight[:, None, None] + self.bias[:, None, None]
        return F.group_norm(x.float(), self.groups, self.weight, self.bias)


class ResNet(Part):
    """A stem, residual blocks, and a classifier."""

    def __init__(self, channels: int, depth: int, offset: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.stages = nn.ModuleList(Residual(channels) for _ in range(depth))
        self.norm, self.classes, self.offset = GroupNorm(4, channels), nn.Linear(channels, 10), offset

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.offset
        for stage in self.stages:
            x = stage(x)
        return self.classes(F.silu(self.norm(x)).mean((2, 3)))


def resnet(dtype: torch.dtype, *, channels: int = 16, depth: int = 2, offset: float = 0.0) -> Step:
    """Return a step of a residual net. `offset` is what all channels have in common behind the stem."""
    model = ResNet(channels, depth, offset)
    loss = LOSSES[model] = CrossEntropy()

    def loss_fn(x: Tensor, targets: Tensor) -> Tensor:
        return loss.forward(model(x), targets)

    return Step(loss_fn, (torch.randn(8, 3, 16, 16), torch.randint(10, (8,))), model, dtype)


class Cell(Part):
    """A gated recurrent cell that also adds up what it has seen, in small steps."""

    def __init__(self, inputs: int, width: int, pace: float) -> None:
        super().__init__()
        self.gates, self.new = nn.Linear(inputs + width, 2 * width), nn.Linear(inputs + width, width)
        self.pace = pace

    def forward(self, x: Tensor, state: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        keep, reset = torch.sigmoid(self.gates(torch.cat([x, state], -1))).chunk(2, -1)
        new = torch.tanh(self.new(torch.cat([x, reset * state], -1)))
        if self.fault == "low total":
            total = (total.to(self.low) + (self.pace * (1 + new)).to(self.low)).float()
        else:
            total = total + self.pace * (1 + new)
        return keep * state + (1 - keep) * new, total


class Recurrent(Part):
    """A recurrent net over a sequence, with a linear readout of its last state and of its total."""

    def __init__(self, inputs: int, width: int, pace: float, level: float) -> None:
        super().__init__()
        self.level, self.width, self.cell = level, width, Cell(inputs, width, pace)
        self.out, self.summary = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.width)
        total = torch.zeros_like(state)
        for step in x.unbind(1):
            state, total = self.cell(step, state, total)
        return (self.out(state) + self.summary(total)).float() + self.level


def recurrent(
    dtype: torch.dtype, *, width: int = 32, length: int = 32, pace: float = 0.01, level: float = 1.0
) -> Step:
    """Return a step of a recurrent net that predicts how numbers differ from `level`, which it adds."""
    model = Recurrent(8, width, pace, level)
    loss = LOSSES[model] = SquaredError()

    def loss_fn(x: Tensor, targets: Tensor) -> Tensor:
        return loss.forward(model(x), targets)

    return Step(loss_fn, (torch.randn(8, length, 8), level + torch.randn(8, 1)), model, dtype)


class SquaredError(Part):
    """The mean squared error, in float32 unless at fault."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        if self.fault == "low error":
            return (output.to(self.low) - targets.to(self.low)).square().mean().float()
        if self.fault == "expanded":
            low, wanted = output.to(self.low), targets.to(self.low)
            return (low * low - 2 * low * wanted + wanted * wanted).mean().float()
        return F.mse_loss(output.float(), targets)


class StateSpace(Part):
    """A layer of a state-space model as in Mamba 2: attention with weights that decay by a cumulative sum."""

    def __init__(self, width: int, heads: int, pace: float) -> None:
        super().__init__()
        self.heads, self.pace = heads, pace
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.decay, self.out, self.norm = nn.Linear(width, heads), nn.Linear(width, width), RmsNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        decay = self.pace * F.softplus(self.decay(x).float()).transpose(1, 2)
        past = decay.cumsum(-1)
        weights = torch.exp((past[..., None, :] - past[..., None]).tril())
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5) * weights
        return self.out((scores.tril() @ v).transpose(1, 2).flatten(2))


class StateSpaces(Part):
    """A language model of state-space layers."""

    def __init__(self, width: int, layers: int, pace: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(StateSpace(width, 2, pace) for _ in range(layers))
        self.last, self.head = RmsNorm(width), Head(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.last(x))


def state_space(
    dtype: torch.dtype,
    *,
    width: int = 64,
    layers: int = 2,
    length: int = 64,
    pace: float = 0.5,
    grown: float = 1.0,
) -> Step:
    """Return a step of a state-space language model.

    `pace` is how fast it forgets; `grown` scales the embedded words.
    """
    model = StateSpaces(width, layers, pace)
    model.words.weight.data.mul_(grown)

    def loss_fn(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    return Step(loss_fn, _tokens(length, 2), model, dtype)


class Autoencoder(Part):
    """An encoder to few numbers, a decoder, and the shift and scale of the data."""

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor], level: float) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Dense(width, 64, activation), nn.Linear(64, 16)])
        self.decoder = nn.ModuleList([Dense(16, 64, activation), nn.Linear(64, width)])
        self.level, self.loss = level, SquaredError()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x - self.level
        for layer in (*self.encoder, *self.decoder):
            hidden = layer(hidden)
        return self.loss(hidden.float() + self.level, x)


def autoencoder(
    dtype: torch.dtype,
    *,
    width: int = 64,
    level: float = 0.0,
    activation: Callable[[Tensor], Tensor] = F.gelu,
    spread: float = 1.0,
    batch: int = 32,
) -> Step:
    """Return a step of an autoencoder for data around `level`."""
    model = Autoencoder(width, activation, level)
    return Step(model, (level + spread * torch.randn(batch, width),), model, dtype)


class Tower(Part):
    """One half of CLIP: a dense net and a vector of length 1."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(inputs, 2 * width), nn.Linear(2 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](F.gelu(self.layers[0](x)))
        if self.fault == "low norm":
            low = x.to(self.low) * self.amount
            return (low / low.square().sum(-1, keepdim=True).sqrt()).float()
        return F.normalize(x.float(), dim=-1)


class Contrast(Part):
    """CLIP's loss: both cross entropies of the similarities.

    "low distances" computes these from distances between vectors that all have `amount` added.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(math.log(1 / temperature)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with without_autocast():
            if self.fault == "low distances":
                low, other = (a + self.amount).to(self.low), (b + self.amount).to(self.low)
                squares = low.square().sum(-1)[:, None] + other.square().sum(-1) - 2 * (low @ other.T)
                logits = self.scale.exp() * (1 - squares.float() / 2)
            else:
                logits = self.scale.exp() * (a.float() @ b.float().T)
        right = logits.diagonal()
        if self.fault == "low logsumexp":
            low = logits.to(self.low)
            return (low.logsumexp(0) + low.logsumexp(1) - 2 * low.diagonal()).float().mean() / 2
        if self.fault == "exponentials":
            low = logits.to(self.low)
            powers = low.exp()
            return -(low.diagonal() - (powers.sum(0).log() + powers.sum(1).log()) / 2).float().mean()
        return (logits.logsumexp(0) + logits.logsumexp(1) - 2 * right).mean() / 2


class Clip(Part):
    """A contrastive model of two towers."""

    def __init__(self, width: int, temperature: float) -> None:
        super().__init__()
        self.images, self.texts = Tower(48, width), Tower(48, width)
        self.loss = Contrast(temperature)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.loss(self.images(images), self.texts(texts))


def clip(
    dtype: torch.dtype, *, width: int = 64, temperature: float = 0.07, batch: int = 32, alike: bool = False
) -> Step:
    """Return a step of a CLIP. With `alike` the towers start with the same weights, and so near the goal."""
    model = Clip(width, temperature)
    if alike:
        model.texts.load_state_dict(model.images.state_dict())
    images = torch.randn(batch, 48)
    return Step(model, (images, images + 0.3 * torch.randn_like(images)), model, dtype)


class Router(Part):
    """Chooses two experts for each token and weighs them, in float32 unless at fault."""

    def __init__(self, width: int, experts: int, level: float) -> None:
        super().__init__()
        self.level = nn.Buffer(torch.full((experts,), level))  # balances the load, as DeepSeek's does
        self.weight = nn.Parameter(torch.randn(experts, width) / math.sqrt(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with without_autocast():
            logits = F.linear(x.float(), self.weight) + self.level
            if self.fault == "low softmax":
                chances = F.softmax(logits.to(self.low), -1).float()
            elif self.fault == "low offset":
                chances = F.softmax(((logits + self.amount).to(self.low) - self.amount).float(), -1)
            else:
                chances = F.softmax(logits, -1)
        best, which = chances.topk(2, -1)
        return best / best.sum(-1, keepdim=True), which


class Mixture(Part):
    """Dense nets, two of which each token passes through."""

    def __init__(self, width: int, experts: int, level: float) -> None:
        super().__init__()
        self.router = Router(width, experts, level)
        self.experts = nn.ModuleList(FeedForward(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        shares, which = self.router(x)
        result = torch.zeros_like(x, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            share = (shares * (which == number)).sum(-1, keepdim=True)
            result = result + share * expert(x)
        return result


def mixture(
    dtype: torch.dtype, *, width: int = 32, experts: int = 4, layers: int = 2, level: float = 0.0
) -> Step:
    """Return a step of a language model whose dense nets are mixtures of experts.

    `level` is in all logits of the routers.
    """
    blocks = [
        Block(RmsNorm, width, Attention(width, rotary=True), Mixture(width, experts, level))
        for _ in range(layers)
    ]
    model = Language(WORDS, width, blocks, RmsNorm, Head(width, WORDS), False)
    return Step(model, _tokens(), model, dtype)


class Divergence(Part):
    """The divergence of a normal distribution from the standard one, in float32 unless at fault."""

    def forward(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        if self.fault == "low divergence":
            mean, log_variance = mean.to(self.low), log_variance.to(self.low)
        else:
            mean, log_variance = mean.float(), log_variance.float()
        return 0.5 * (mean.pow(2) + torch.exp(log_variance) - 1 - log_variance).sum(-1).mean().float()


class Variational(Part):
    """A variational autoencoder, to which the noise is an argument."""

    def __init__(self, width: int, latent: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder = Dense(width, 64, activation)
        self.mean, self.log_variance = nn.Linear(64, latent), nn.Linear(64, latent)
        self.decoder = nn.ModuleList([Dense(latent, 64, torch.tanh), nn.Linear(64, width)])
        self.divergence, self.loss = Divergence(), SquaredError()

    def forward(self, x: Tensor, noise: Tensor, share: float) -> Tensor:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + noise * torch.exp(0.5 * log_variance.float())
        output = self.decoder[1](self.decoder[0](code))
        return self.loss(output, x) + share * self.divergence(mean, log_variance)


def variational(
    dtype: torch.dtype,
    *,
    width: int = 48,
    latent: int = 16,
    near: float = 1.0,
    share: float = 0.1,
    activation: Callable[[Tensor], Tensor] = torch.tanh,
) -> Step:
    """Return a step of a variational autoencoder. `near` scales how far codes are from the standard ones."""
    model = Variational(width, latent, activation)
    for layer in (model.mean, model.log_variance):
        layer.weight.data.mul_(near)
        layer.bias.data.mul_(near)
    return Step(model, (torch.randn(32, width), torch.randn(32, latent), share), model, dtype)


class Total(Part):
    """The sum over chunks of terms, added up chunk by chunk, in float32 unless at fault."""

    def forward(self, terms: Tensor) -> Tensor:
        if self.fault == "low total":
            low = terms.to(self.low)
            total = torch.zeros_like(low[0])
            for chunk in low.unbind(0):
                total = total + chunk
            return total.float().sum(0)
        return terms.float().sum((0, 1))


class Summing(Part):
    """Predicts a property of a set of 1e5 numbers from the sum of a net over them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.each, self.total = Dense(1, width, F.softplus), Total()
        self.scale, self.out = Scaled(1.0 / (TERMS * CHUNKS)), nn.ModuleList([Dense(width, 32, torch.tanh)])
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.out[0](self.scale(self.total(self.each(x)))))


def summing(dtype: torch.dtype, *, width: int = 4, chunks: int = CHUNKS) -> Step:
    """Return a step of a regression on a set of 1e5 numbers."""
    model = Summing(width)
    model.scale.scale.data.mul_(CHUNKS / chunks)
    loss = LOSSES[model] = SquaredError()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return loss.forward(model(x), target)

    return Step(loss_fn, (torch.randn(chunks, TERMS, 1), torch.full((1,), 3.0)), model, dtype)


class Bags(Part):
    """Classifies bags of words of a large vocabulary by the mean of their embeddings."""

    def __init__(self, width: int, classes: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(LARGE_VOCABULARY, width, mode="mean")
        self.hidden, self.classes = Dense(width, width, activation), nn.Linear(width, classes)
        self.scale, self.loss = Scaled(1.0), CrossEntropy()

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.classes(self.hidden(self.scale(self.words(words)))), targets)


def bags(
    dtype: torch.dtype,
    *,
    width: int = 64,
    classes: int = 100,
    activation: Callable[[Tensor], Tensor] = F.relu,
    batch: int = 64,
) -> Step:
    """Return a step of a classifier of bags of words."""
    model = Bags(width, classes, activation)
    words = torch.randint(LARGE_VOCABULARY, (batch, 20))
    return Step(model, (words, torch.randint(classes, (batch,))), model, dtype)


STEPS: dict[str, Callable[..., Step]] = {
    function.__name__: function
    for function in (
        gpt,
        llama,
        t5,
        perceptron,
        cnn,
        resnet,
        recurrent,
        state_space,
        autoencoder,
        clip,
        mixture,
        variational,
        summing,
        bags,
    )
}


def averaged(step: Step, over: int) -> Step:
    """Return a step whose loss is divided, as where gradients of many batches are added up."""

    def loss_fn(*args: Any) -> Tensor:
        return step.loss_fn(*args) / over

    return dataclasses.replace(step, loss_fn=loss_fn)


def trained(step: Step, steps: int, rate: float = 0.1) -> Step:
    """Return a step after a few of gradient descent in float32 on its data."""
    weights = list(step.model.parameters())
    for _ in range(steps):
        step.model.zero_grad()
        torch.autograd.backward(step.loss_fn(*step.args))
        with torch.no_grad():
            for weight in weights:
                if weight.grad is not None:
                    weight.sub_(rate * weight.grad)
    step.model.zero_grad()
    return step
