"""Eight models whose training low precision spoils, each in its own way, written as users write them.

Some start with weights as large as training makes them in the models that they stand for, so that one step
before training shows what is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tune_cases import Batch, Loss, Problem

__all__ = ["PROBLEMS"]

RULE_SEED = 7  # of what is to be learned


def seeded(make: Callable[[], tuple[nn.Module, Loss]]) -> Callable[[int], tuple[nn.Module, Loss]]:
    """Return `Problem.build` for a function that makes the model and the loss function."""

    def build(seed: int) -> tuple[nn.Module, Loss]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return make()

    return build


def fixed(*shape: int, seed: int = RULE_SEED) -> Tensor:
    """Return normal random numbers that are the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def sources(words: int, likely: int) -> Tensor:
    """Return the words that may follow each pair of words, of shape (words, words, likely)."""
    generator = torch.Generator().manual_seed(RULE_SEED)
    return torch.randint(words, (words, words, likely), generator=generator)


def sentences(generator: Generator, rows: int, length: int, words: int, likely: int) -> Tensor:
    """Return sentences of shape (rows, length) in which each word depends on the two before it."""
    following = sources(words, likely)
    said = torch.randint(words, (rows, 2), generator=generator)
    for _ in range(length - 2):
        which = torch.randint(likely, (rows,), generator=generator)
        said = torch.cat([said, following[said[:, -2], said[:, -1], which][:, None]], 1)
    return said


# ---------------------------------------------------------------------------------------------------------
# 1. A feed-forward network like T5's, with one massive activation


class RmsNorm(nn.Module):
    """Root mean square normalization, written by hand as in T5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class GatedFeedForward(nn.Module):
    """T5's feed-forward layer with its norm and residual connection."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = RmsNorm(width)
        self.wi_0 = nn.Linear(width, hidden, bias=False)
        self.wi_1 = nn.Linear(width, hidden, bias=False)
        self.wo = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.wo(F.gelu(self.wi_0(normed)) * self.wi_1(normed))


class T5(nn.Module):
    """Guesses a word from the two before it. One unit of one layer is as large as in T5's checkpoints."""

    def __init__(self, width: int = 64, hidden: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(GatedFeedForward(width, hidden) for _ in range(layers))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, said: Tensor) -> Tensor:
        x = self.embed(said[:, 1:-1]) + self.embed(said[:, :-2]).roll(1, -1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


WORDS, MASSIVE = 24, 2e5


def words(generator: Generator, rows: int) -> Batch:
    return (sentences(generator, rows, 18, WORDS, 2),)


def t5() -> tuple[nn.Module, Loss]:
    model = T5()
    with torch.no_grad():
        for layer in model.layers:
            layer.wo.weight.mul_(0.7)
        # Channel 0 is large and positive after the norm of the middle layer, which makes much more of it.
        at = len(model.layers) // 2
        middle = model.layers[at]
        model.embed.weight[:, 0] = 8.0
        for weight in (middle.wi_0.weight, middle.wi_1.weight):
            weight[0].zero_()
            weight[0, 0] = 6.0
        middle.wo.weight[:, 0].zero_()
        middle.wo.weight[0, 0] = MASSIVE / 800
        # What comes after has learned to see the other channels.
        for layer in (*model.layers[at + 1 :], model):
            layer.norm.weight.fill_(MASSIVE / math.sqrt(64) / 1.5)
            layer.norm.weight[0] = 0.1

    def loss_fn(batch: Batch) -> Tensor:
        (said,) = batch
        return F.cross_entropy(model(said).flatten(0, 1), said[:, 2:].flatten())

    return model, loss_fn


# ---------------------------------------------------------------------------------------------------------
# 2. A deep network of sigmoids, whose first layers have tiny gradients


class Sigmoids(nn.Module):
    """A deep, narrow tower of sigmoids for one half of the input, and a wide network for the other."""

    def __init__(
        self, width: int = 16, depth: int = 6, wide: int = 160, gain: float = 0.3, unit: float = 1e-3
    ) -> None:
        super().__init__()
        self.unit = unit
        tower: list[nn.Module] = []
        for layer in range(depth):
            tower += [nn.Linear(4 if layer == 0 else width, width), nn.Sigmoid()]
        self.tower = nn.Sequential(*tower, nn.Linear(width, 1))
        self.wide = nn.Sequential(
            nn.Linear(4, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 1)
        )
        for module in self.tower:
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, gain=gain)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.unit * (self.tower(x[:, :4]) + self.wide(x[:, 4:]))


def sigmoid() -> tuple[nn.Module, Loss]:
    model = Sigmoids()

    def loss_fn(batch: Batch) -> Tensor:
        x, target = batch
        return F.mse_loss(model(x), model.unit * target)

    return model, loss_fn


def two_halves(generator: Generator, rows: int) -> Batch:
    x = torch.randn(rows, 8, generator=generator)
    first, second = fixed(4), fixed(4, seed=RULE_SEED + 1)
    target = torch.tanh(x[:, :4] @ first) + 0.3 * torch.sin(x[:, 4:] @ second)
    return x, target[:, None]


# ---------------------------------------------------------------------------------------------------------
# 3. Attention whose logits are small differences of large numbers


class Attention(nn.Module):
    """Causal attention by squared distance, with one projection for queries and keys (arXiv 2006.04710)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        key = self.key(x).view(rows, length, self.heads, -1).transpose(1, 2)
        value = self.value(x).view(rows, length, self.heads, -1).transpose(1, 2)
        squares = key.square().sum(-1, keepdim=True)
        scores = 2 * (key @ key.transpose(-1, -2)) - squares - squares.transpose(-1, -2)
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(ahead, -math.inf), -1)
        return self.out((weights @ value).transpose(1, 2).reshape(rows, length, width))


KEYS, TOLD, ASKED = 8, 8, 8


class FeedForward(nn.Module):
    """A feed-forward layer with its norm and residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Recall(nn.Module):
    """A transformer with one layer of attention. It says which value came with a key earlier on."""

    def __init__(self, width: int = 48, heads: int = 4, deeper: int = 2) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(KEYS, width), nn.Embedding(KEYS + 1, width)
        self.norm_0, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.layers = nn.ModuleList(FeedForward(width) for _ in range(1 + deeper))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, KEYS)

    def forward(self, said: Tensor) -> Tensor:
        x = self.keys(said[..., 0]) + self.values(said[..., 1])
        x = x + self.attention(self.norm_0(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def attention(offset: float = 40.0, sharp: float = 2.0) -> tuple[nn.Module, Loss]:
    model = Recall()
    half = model.keys.embedding_dim // 2
    with torch.no_grad():
        # As after some training: keys and values are apart, and attention looks for keys.
        model.keys.weight[:, half:] = model.values.weight[:, :half] = 0.0
        model.attention.key.weight[:, half:] = 0.0
        model.attention.key.weight.mul_(sharp)
        model.attention.key.bias.fill_(offset)

    def loss_fn(batch: Batch) -> Tensor:
        said, answers = batch
        return F.cross_entropy(model(said)[:, -ASKED:].flatten(0, 1), answers.flatten())

    return model, loss_fn


def recalls(generator: Generator, rows: int) -> Batch:
    """Return pairs of keys and values, then keys whose values are asked for."""
    keys = torch.rand(rows, KEYS, generator=generator).argsort(1)[:, :TOLD]
    values = torch.randint(KEYS, (rows, TOLD), generator=generator)
    which = torch.randint(TOLD, (rows, ASKED), generator=generator)
    told, asked = torch.stack([keys, values], -1), keys.gather(1, which)
    said = torch.cat([told, torch.stack([asked, torch.full_like(asked, KEYS)], -1)], 1)
    answers = values.gather(1, which)
    noise = torch.randint(KEYS, answers.shape, generator=generator)
    return said, torch.where(torch.rand(answers.shape, generator=generator) < 0.2, noise, answers)


# ---------------------------------------------------------------------------------------------------------
# 4. A norm written by hand, of activations with a large offset


class HandNorm(nn.Module):
    """Divides by the standard deviation, by the formula that passes over the values once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance.clamp_min(1e-4)) * self.weight + self.bias


class Offset(nn.Module):
    """A residual network whose stream has a large mean."""

    def __init__(self, inputs: int = 16, width: int = 64, layers: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.inputs = nn.Linear(inputs, width)
        self.offset = nn.Parameter(torch.full((width,), 40.0))
        self.norms = nn.ModuleList(HandNorm(width) for _ in range(layers + 1))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x) + self.offset
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + down(F.silu(up(norm(x))))
        return self.head(self.norms[-1](x))


def norm() -> tuple[nn.Module, Loss]:
    model = Offset()

    def loss_fn(batch: Batch) -> Tensor:
        x, labels = batch
        return F.cross_entropy(model(x), labels)

    return model, loss_fn


def classes_of(generator: Generator, rows: int) -> Batch:
    x = torch.randn(rows, 16, generator=generator)
    hidden = torch.tanh(x @ fixed(16, 32) / 2)
    return x, (hidden @ fixed(32, 10, seed=RULE_SEED + 1)).argmax(-1)


# ---------------------------------------------------------------------------------------------------------
# 5. A language model's head over a large vocabulary

VOCABULARY = 8192


class LanguageModel(nn.Module):
    """Guesses a word of a large vocabulary from the two before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix, self.hidden = nn.Linear(2 * width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, said: Tensor) -> Tensor:
        x = self.mix(self.embed(said).flatten(1))
        return self.head(self.norm(self.hidden(F.gelu(x))))


def head() -> tuple[nn.Module, Loss]:
    model = LanguageModel()
    with torch.no_grad():
        model.head.weight.normal_(std=0.5)

    def loss_fn(batch: Batch) -> Tensor:
        said, target = batch
        chances = F.softmax(model(said), -1)
        return -torch.log(chances.gather(1, target[:, None]) + 1e-20).mean()

    return model, loss_fn


@cache
def ranks() -> Tensor:
    """Return how often each word is said, by Zipf's law, added up."""
    return (1.0 / torch.arange(1, 65)).cumsum(0)


def pairs(generator: Generator, rows: int) -> Batch:
    """Return pairs of common words, and words that the first of them decides: one of two."""
    sums = ranks()
    said = torch.searchsorted(sums, torch.rand(rows, 2, generator=generator) * sums[-1])
    coin = torch.randint(2, (rows,), generator=generator)
    return said * 128, (said[:, 0] * 97 + 31 * coin) % VOCABULARY


# ---------------------------------------------------------------------------------------------------------
# 6. A gated recurrent unit over many steps


class Gru(nn.Module):
    """A gated recurrent unit with a slow gate, which adds up what it sees."""

    def __init__(self, inputs: int = 4, units: int = 24, step: float = 1 / 512) -> None:
        super().__init__()
        self.seen = nn.Linear(inputs, 3 * units)
        self.remembered = nn.Linear(units, 3 * units)
        self.start = nn.Parameter(torch.rand(units).sub(0.5).sign())
        self.out = nn.Linear(units, 1)
        self.units, self.step = units, step

    def forward(self, x: Tensor) -> Tensor:
        state = self.start.expand(len(x), -1)
        seen_by_gates, seen_by_new = self.seen(x).split([2 * self.units, self.units], -1)
        for seen, news in zip(seen_by_gates.unbind(1), seen_by_new.unbind(1), strict=True):
            remembered = self.remembered(state)
            gates = torch.sigmoid(seen + remembered[:, : 2 * self.units])
            reset, update = gates.chunk(2, -1)
            new = torch.tanh(news + reset * remembered[:, 2 * self.units :])
            state = state + self.step * update * (new - state)
        return self.out((state - self.start) / (self.step * x.shape[1]))


def gru() -> tuple[nn.Module, Loss]:
    model = Gru()
    with torch.no_grad():
        model.seen.bias[model.units : 2 * model.units] = 0.0

    def loss_fn(batch: Batch) -> Tensor:
        x, target = batch
        return F.mse_loss(model(x), target)

    return model, loss_fn


def sums(generator: Generator, rows: int, length: int = 64) -> Batch:
    """Return sequences, and the sum of their first channel where the second is above 0."""
    x = torch.randn(rows, length, 4, generator=generator)
    return x, (x[..., 0] + 0.5 * (x[..., 1] > 0)).mean(1, keepdim=True) * 4


# ---------------------------------------------------------------------------------------------------------
# 7. A softmax over 10,000 entries

BINS = 10_000


class Depth(nn.Module):
    """Estimates a number as the mean of a distribution over 10,000 bins."""

    def __init__(self, inputs: int = 8, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, width), nn.Tanh())
        self.scores = nn.Linear(width, BINS)
        self.register_buffer("bins", torch.arange(float(BINS)))

    def forward(self, x: Tensor) -> Tensor:
        chances = F.softmax(self.scores(self.body(x)), -1)
        return (chances * self.bins).sum(-1)


def softmax() -> tuple[nn.Module, Loss]:
    model = Depth()

    def loss_fn(batch: Batch) -> Tensor:
        x, target = batch
        return F.mse_loss(model(x), target)

    return model, loss_fn


def depths(generator: Generator, rows: int) -> Batch:
    x = torch.randn(rows, 8, generator=generator)
    return x, BINS / 2 + 100 * torch.tanh(x @ fixed(8) / 2)


# ---------------------------------------------------------------------------------------------------------
# 8. A contrastive loss, whose logarithm of a sum of exponentials is written out


class Encoder(nn.Module):
    """Maps two views of a thing to two unit vectors."""

    def __init__(self, inputs: int = 32, width: int = 128, out: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x), dim=-1)


def contrast() -> tuple[nn.Module, Loss]:
    model = Encoder()

    def loss_fn(batch: Batch, temperature: float = 0.02) -> Tensor:
        one, other = batch
        similar = model(one) @ model(other).T / temperature
        return (torch.log(torch.exp(similar).sum(-1)) - similar.diagonal()).mean()

    return model, loss_fn


def views(generator: Generator, rows: int) -> Batch:
    """Return two views of things of few dimensions, with noise of many."""
    things = torch.randn(rows, 6, generator=generator)
    clean = things @ fixed(6, 32)
    noise = torch.randn(2, rows, 32, generator=generator)
    return clean + 2 * noise[0], clean + 2 * noise[1]


PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem("t5", "one unit of a feed-forward layer overflows", seeded(t5), words, 8, 32, 2e-3, 300),
        Problem(
            "sigmoid", "vanishing gradients", seeded(sigmoid), two_halves, 128, 512, 1e-2, 300, epsilon=1e-20
        ),
        Problem(
            "attention", "large attention logits that cancel", seeded(attention), recalls, 16, 64, 2e-3, 250
        ),
        Problem("norm", "the variance of a large mean", seeded(norm), classes_of, 64, 512, 3e-3, 300),
        Problem("head", "chances of 8,192 words", seeded(head), pairs, 48, 256, 1e-2, 200),
        Problem("gru", "slow gates over 64 steps", seeded(gru), sums, 32, 256, 1e-2, 200),
        Problem("softmax", "a mean over 10,000 bins", seeded(softmax), depths, 24, 256, 3e-3, 200),
        Problem("contrast", "exponentials of similarities", seeded(contrast), views, 48, 192, 2e-3, 300),
    )
}
