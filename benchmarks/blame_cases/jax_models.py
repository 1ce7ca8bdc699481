"""Ten small models of JAX with a training step each, and the places where faults are planted in them.

They are models of Flax. A `Part` that is not at fault computes as good practice has it: norms, softmax and
loss in float32. Casts to the low precision are written with `low`, so that the same program runs in float32
when `low` is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

WORDS, LENGTH, BATCH, EXAMPLES = 64, 16, 4, 32
TERMS, CHUNKS = 256, 400  # of the long sums: 1e5 terms in all

Params = Any


class Plant(NamedTuple):
    """A fault.

    Attributes:
        path: of the part that is at fault; empty for none.
        fault: what is wrong with it.
        amount: how strong it is.
        low: the dtype of the casts that the fault writes.
    """

    path: str = ""
    fault: str = ""
    amount: float = 1.0
    low: Any = jnp.float32


class Model(NamedTuple):
    """A model with its data.

    Attributes:
        loss_of: makes the loss, a function of parameters and data, with a fault.
        params: the parameters.
        data: what else the loss is given.
    """

    loss_of: Callable[[Plant], Callable[..., Array]]
    params: Params
    data: tuple[Array, ...]


class Part(nn.Module):
    """A module in which a fault can be planted."""

    plant: Plant

    @property
    def fault(self) -> str:
        """What is wrong with it; empty if nothing is."""
        return self.plant.fault if ".".join(self.path) == self.plant.path else ""

    def lowered(self, x: Array) -> Array:
        """Return an array in the dtype of the fault."""
        return x.astype(self.plant.low)


class LayerNorm(Part):
    """Layer normalization, in float32 unless at fault."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        mean = partial(jnp.mean, axis=-1, keepdims=True)
        if self.fault:
            low = self.lowered(x)
            deviations = low - mean(low)
            if self.fault == "variance of squares":
                variance = jnp.maximum(mean(low * low) - mean(low) * mean(low), 0)
            else:
                variance = mean(jnp.square(deviations))
            normed = deviations * jax.lax.rsqrt(variance + 1e-5)
            return normed.astype(jnp.float32) * scale + bias
        deviations = x - mean(x)
        return deviations * jax.lax.rsqrt(mean(jnp.square(deviations)) + 1e-5) * scale + bias


class RmsNorm(Part):
    """Root mean square normalization, in float32 unless at fault."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if self.fault == "low norm":
            low = self.lowered(x)
            normed = low * jax.lax.rsqrt(jnp.mean(jnp.square(low), -1, keepdims=True) + 1e-6)
            return normed.astype(jnp.float32) * scale
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


class Attention(Part):
    """Attention of two heads.

    Attributes:
        scaled: whether the scores are divided by the root of a head's width. T5's are not: its queries
            start that much smaller.
        upcast: whether the scores are computed in float32.
        causal: whether tokens see earlier ones only.
        shared: a number in all queries and keys, which adds to all scores of a token alike.
    """

    scaled: bool = True
    upcast: bool = False
    causal: bool = True
    shared: float = 0.0

    @nn.compact
    def __call__(self, x: Array, bias: Array | float = 0.0) -> Array:
        width, heads = x.shape[-1], 2

        def project(name: str, shared: float = 0.0, variance: float = 1.0) -> Array:
            start = nn.initializers.variance_scaling(variance, "fan_in", "truncated_normal")
            layer = nn.Dense(width, name=name, kernel_init=start, bias_init=nn.initializers.constant(shared))
            return jnp.swapaxes(layer(x).reshape(*x.shape[:-1], heads, -1), 1, 2)

        query = project("query", self.shared, 1.0 if self.scaled else heads / width)
        key = project("key", self.shared)
        precision = "highest" if self.upcast else None
        scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2), precision=precision)
        scores = scores * (query.shape[-1] ** -0.5 if self.scaled else 1.0) + bias
        if self.fault == "logits":
            scores = scores * self.plant.amount
        if self.causal:
            seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(seen, scores, -jnp.inf)
        mixed = self._softmax(scores) @ project("value")
        return nn.Dense(width, name="out")(jnp.swapaxes(mixed, 1, 2).reshape(x.shape))

    def _softmax(self, scores: Array) -> Array:
        if self.fault == "low softmax":
            return jax.nn.softmax(self.lowered(scores)).astype(jnp.float32)
        if self.fault == "softmax by hand":
            low = self.lowered(scores)
            weights = jnp.exp(low - jnp.max(low, -1, keepdims=True))
            return (weights / jnp.sum(weights, -1, keepdims=True)).astype(jnp.float32)
        if self.fault == "softmax without maximum":
            weights = jnp.exp(self.lowered(scores))
            return (weights / jnp.sum(weights, -1, keepdims=True)).astype(jnp.float32)
        return jax.nn.softmax(scores)


class FeedForward(Part):
    """The dense half of a transformer's block."""

    act: Callable[[Array], Array] = nn.gelu

    @nn.compact
    def __call__(self, x: Array) -> Array:
        hidden = self.act(nn.Dense(4 * x.shape[-1], name="up")(x))
        return nn.Dense(x.shape[-1], name="down")(hidden)


class Block(Part):
    """Attention and a dense net, each with a norm before it and a sum behind it."""

    norm: type[Part]
    attention: dict[str, Any]
    act: Callable[[Array], Array]

    @nn.compact
    def __call__(self, x: Array, bias: Array | float = 0.0) -> Array:
        attention = Attention(self.plant, **self.attention, name="attention")
        x = x + attention(self.norm(self.plant, name="first")(x), bias)
        feed_forward = FeedForward(self.plant, self.act, name="feed_forward")
        return x + feed_forward(self.norm(self.plant, name="second")(x))


class CrossEntropy(Part):
    """The mean cross entropy of logits, in float32 unless at fault."""

    @nn.compact
    def __call__(self, logits: Array, targets: Array) -> Array:
        def chosen(x: Array) -> Array:
            return jnp.take_along_axis(x, targets[..., None], -1)[..., 0]

        if self.fault == "low log_softmax":
            return -chosen(jax.nn.log_softmax(self.lowered(logits))).mean().astype(jnp.float32)
        if self.fault == "low logsumexp":
            low = self.lowered(logits)
            return (jax.nn.logsumexp(low, -1) - chosen(low)).astype(jnp.float32).mean()
        if self.fault == "logsumexp by hand":
            low = self.lowered(logits)
            return (jnp.log(jnp.sum(jnp.exp(low), -1)) - chosen(low)).mean().astype(jnp.float32)
        return -chosen(jax.nn.log_softmax(logits)).mean()


class SquaredError(Part):
    """The mean squared error, in float32 unless at fault."""

    @nn.compact
    def __call__(self, output: Array, targets: Array) -> Array:
        if self.fault == "low error":
            errors = self.lowered(output) - self.lowered(targets)
            return jnp.mean(jnp.square(errors)).astype(jnp.float32)
        if self.fault == "low sum":
            errors = self.lowered(output - targets)
            return jnp.sum(jnp.square(errors)).astype(jnp.float32) / targets.size
        if self.fault == "expanded":
            low, wanted = self.lowered(output), self.lowered(targets)
            return jnp.mean(low * low - 2 * low * wanted + wanted * wanted).astype(jnp.float32)
        return jnp.mean(jnp.square(output - targets))


class Gpt(Part):
    """A GPT: LayerNorm, learned places, GELU.

    Attributes:
        offset: a number in all channels of the embedded words, as trained models have it in a few.
        sharp: scales the logits, as those of a trained model.
        shared, upcast: of the attention.
    """

    layers: int = 2
    width: int = 32
    offset: float = 0.0
    sharp: float = 1.0
    shared: float = 0.0
    upcast: bool = False

    @nn.compact
    def __call__(self, tokens: Array, targets: Array) -> Array:
        start = nn.initializers.normal(1.0)
        x = nn.Embed(WORDS, self.width, embedding_init=start, name="words")(tokens) + self.offset
        x = x + self.param("places", start, (LENGTH, self.width))
        attention = {"shared": self.shared, "upcast": self.upcast}
        for number in range(self.layers):
            x = Block(self.plant, LayerNorm, attention, nn.gelu, name=f"blocks_{number}")(x)
        x = LayerNorm(self.plant, name="last")(x)
        head = nn.Dense(WORDS, use_bias=False, name="head", precision="highest" if self.sharp > 1 else None)
        return CrossEntropy(self.plant, name="loss")(self.sharp * head(x), targets)


class T5(Part):
    """T5's encoder: a bias for each distance, scores that are not scaled, ReLU, and a mean of the tokens.

    Attributes:
        bias: what all distances have in common.
        grown: scales the embedded words.
    """

    layers: int = 2
    width: int = 32
    bias: float = 0.0
    grown: float = 1.0
    act: Callable[[Array], Array] = nn.relu

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        start = nn.initializers.normal(1.0)
        x = self.grown * nn.Embed(WORDS, self.width, embedding_init=start, name="words")(tokens)
        distances = self.bias + self.param("distances", start, (2, 2 * LENGTH))
        places = jnp.arange(LENGTH)
        bias = distances[:, places[:, None] - places + LENGTH]
        attention = {"scaled": False, "causal": False}
        for number in range(self.layers):
            x = Block(self.plant, RmsNorm, attention, self.act, name=f"blocks_{number}")(x, bias)
        x = RmsNorm(self.plant, name="last")(x)
        return nn.Dense(8, name="classes")(x.mean(1))


class Dense(Part):
    """A linear layer with an activation.

    Its faults are what cancels: "low offset" adds a number and takes it away again, and the others compute
    about `x * x / 2` and `x` as differences of numbers that are nearly the same.
    """

    width: int
    act: Callable[[Array], Array] = jnp.tanh

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x, amount = nn.Dense(self.width, name="linear")(x), self.plant.amount
        if self.fault == "low offset":
            x = ((self.lowered(x) + amount) - amount).astype(jnp.float32)
        if self.fault == "one minus cosine":
            return (1 - jnp.cos(self.lowered(x * amount))).astype(jnp.float32) / amount**2
        if self.fault == "difference of squares":
            low = self.lowered(x)
            up, down = amount + low / 2, amount - low / 2
            x = (up * up - down * down).astype(jnp.float32) / (2 * amount)
        return self.act(x)


class Scaled(Part):
    """A number times its input, learned, as a layer scale is."""

    start: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return x * self.param("scale", nn.initializers.constant(self.start), ())


class Perceptron(Part):
    """A deep net of dense layers, with a sum behind each but the first."""

    width: int = 32
    depth: int = 4
    act: Callable[[Array], Array] = jnp.tanh

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = Dense(self.plant, self.width, self.act, name="first")(x)
        for number in range(self.depth):
            layer = Dense(self.plant, self.width, self.act, name=f"middle_{number}")
            x = x + Scaled(self.plant, name=f"behind_{number}")(layer(x))
        return nn.Dense(8, name="classes")(x)


class GroupNorm(Part):
    """Group normalization of four groups, in float32 unless at fault."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        parts = x.reshape(*x.shape[:-1], 4, -1)
        mean = partial(jnp.mean, axis=(1, 2, 4), keepdims=True)
        if self.fault:
            parts = self.lowered(parts)
        deviations = parts - mean(parts)
        if self.fault == "variance of squares":
            variance = jnp.maximum(mean(jnp.square(parts)) - jnp.square(mean(parts)), 0)
        else:
            variance = mean(jnp.square(deviations))
        normed = deviations * jax.lax.rsqrt(variance + 1e-5)
        return normed.astype(jnp.float32).reshape(x.shape) * scale


class Residual(Part):
    """Two convolutions with group normalization, and a sum."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        y = GroupNorm(self.plant, name="norm")(x)
        y = nn.silu(nn.Conv(x.shape[-1], (3, 3), name="first")(y))
        y = nn.Conv(x.shape[-1], (3, 3), name="second")(y)
        return x + Scaled(self.plant, name="scale")(y)


class ResNet(Part):
    """A stem, residual blocks, and a classifier.

    Attributes:
        offset: what all channels have in common behind the stem.
    """

    depth: int = 2
    channels: int = 16
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(self.channels, (3, 3), name="stem")(x) + self.offset
        for number in range(self.depth):
            x = Residual(self.plant, name=f"stages_{number}")(x)
        x = nn.silu(GroupNorm(self.plant, name="last")(x)).mean((1, 2))
        return nn.Dense(8, name="classes")(x)


class Cell(Part):
    """A gated recurrent cell that also adds up what it has seen, in small steps."""

    width: int
    pace: float

    @nn.compact
    def __call__(self, carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], None]:
        state, total = carry
        both = jnp.concatenate([x, state], -1)
        keep = nn.sigmoid(nn.Dense(self.width, name="gate")(both))
        new = jnp.tanh(nn.Dense(self.width, name="new")(both))
        step = self.pace * (1 + new)
        if self.fault == "low total":
            total = (self.lowered(total) + self.lowered(step)).astype(jnp.float32)
        else:
            total = total + step
        return (keep * state + (1 - keep) * new, total), None


class Recurrent(Part):
    """A recurrent net in a `scan`, with a linear readout of its last state and of its total.

    Attributes:
        pace: how fast the total grows.
        level: what is added to the readout.
    """

    width: int = 16
    pace: float = 0.01
    level: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scanned = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False})
        start = jnp.zeros((x.shape[1], self.width))
        cell = scanned(self.plant, self.width, self.pace, name="cell")
        (state, total), _ = cell((start, start), x)
        return nn.Dense(1, name="out")(state) + nn.Dense(1, name="summary")(total) + self.level


class StateSpace(Part):
    """A layer of a state-space model as in Mamba 2: attention with weights that decay by a cumulative sum."""

    pace: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = RmsNorm(self.plant, name="norm")(x)
        query, key, value = (nn.Dense(x.shape[-1], name=name)(x) for name in ("query", "key", "value"))
        decay = self.pace * nn.softplus(nn.Dense(1, name="decay")(x)[..., 0])
        if self.fault == "low cumsum":
            past = jnp.cumsum(self.lowered(decay), -1)
            weights = jnp.exp(jnp.tril((past[..., None, :] - past[..., None]).astype(jnp.float32)))
        elif self.fault == "ratio of exponentials":
            past = self.lowered(jnp.exp(jnp.cumsum(decay, -1)))
            weights = (past[..., None, :] / past[..., None]).astype(jnp.float32)
        else:
            past = jnp.cumsum(decay, -1)
            weights = jnp.exp(jnp.tril(past[..., None, :] - past[..., None]))
        scores = query @ jnp.swapaxes(key, -1, -2) * x.shape[-1] ** -0.5 * weights
        return nn.Dense(x.shape[-1], name="out")(jnp.tril(scores) @ value)


class StateSpaces(Part):
    """A language model of state-space layers; `pace` is how fast it forgets."""

    layers: int = 2
    width: int = 32
    pace: float = 0.5

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(WORDS, self.width, embedding_init=nn.initializers.normal(1.0), name="words")(tokens)
        for number in range(self.layers):
            x = x + StateSpace(self.plant, self.pace, name=f"layers_{number}")(x)
        return nn.Dense(WORDS, name="head")(RmsNorm(self.plant, name="last")(x))


class Autoencoder(Part):
    """An encoder to few numbers, a decoder, and the shift of the data."""

    level: float = 0.0
    act: Callable[[Array], Array] = nn.gelu

    @nn.compact
    def __call__(self, x: Array) -> Array:
        hidden = Dense(self.plant, 32, self.act, name="encoder")(x - self.level)
        code = nn.Dense(16, name="code")(hidden)
        hidden = Dense(self.plant, 32, self.act, name="decoder")(code)
        output = nn.Dense(x.shape[-1], name="out")(hidden) + self.level
        return SquaredError(self.plant, name="loss")(output, x)


class Tower(Part):
    """One half of CLIP: a dense net and a vector of length 1."""

    width: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Dense(self.width, name="out")(nn.gelu(nn.Dense(2 * self.width, name="hidden")(x)))
        if self.fault == "low norm":
            low = self.lowered(x) * self.plant.amount
            return (low / jnp.sqrt(jnp.sum(jnp.square(low), -1, keepdims=True))).astype(jnp.float32)
        return x / jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True))


class Contrast(Part):
    """CLIP's loss: both cross entropies of the similarities, in float32 unless at fault."""

    temperature: float

    @nn.compact
    def __call__(self, a: Array, b: Array) -> Array:
        start = nn.initializers.constant(math.log(1 / self.temperature))
        scale = jnp.exp(self.param("scale", start, ()))
        if self.fault == "low distances":
            low, other = self.lowered(a), self.lowered(b)
            squares = jnp.square(low[:, None] - other).sum(-1)
            logits = scale * (1 - squares.astype(jnp.float32) / 2)
        elif self.fault == "low expanded distances":
            low, other = self.lowered(a + self.plant.amount), self.lowered(b + self.plant.amount)
            lengths = jnp.square(low).sum(-1)[:, None] + jnp.square(other).sum(-1)
            logits = scale * (1 - (lengths - 2 * (low @ other.T)).astype(jnp.float32) / 2)
        else:
            logits = scale * jnp.matmul(a, b.T, precision="highest")
        if self.fault == "low logsumexp":
            logits = self.lowered(logits)
        sums = jax.nn.logsumexp(logits, 0) + jax.nn.logsumexp(logits, 1)
        return (sums - 2 * jnp.diagonal(logits)).astype(jnp.float32).mean() / 2


class Clip(Part):
    """A contrastive model of two towers."""

    width: int = 32
    temperature: float = 0.07

    @nn.compact
    def __call__(self, images: Array, texts: Array) -> Array:
        a = Tower(self.plant, self.width, name="images")(images)
        b = Tower(self.plant, self.width, name="texts")(texts)
        return Contrast(self.plant, self.temperature, name="loss")(a, b)


class Divergence(Part):
    """The divergence of a normal distribution from the standard one, in float32 unless at fault."""

    @nn.compact
    def __call__(self, mean: Array, log_variance: Array) -> Array:
        if self.fault == "low divergence":
            mean, log_variance = self.lowered(mean), self.lowered(log_variance)
        terms = jnp.square(mean) + jnp.exp(log_variance) - 1 - log_variance
        return 0.5 * terms.sum(-1).mean().astype(jnp.float32)


class Variational(Part):
    """A variational autoencoder, to which the noise is an argument.

    Attributes:
        near: scales how far codes are from the standard ones.
        share: of the divergence in the loss.
    """

    latent: int = 16
    near: float = 1.0
    share: float = 0.1

    @nn.compact
    def __call__(self, x: Array, noise: Array) -> Array:
        hidden = Dense(self.plant, 32, name="encoder")(x)
        mean, log_variance = (
            self.near * nn.Dense(self.latent, name=name)(hidden) for name in ("mean", "log_variance")
        )
        code = mean + noise * jnp.exp(0.5 * log_variance)
        output = nn.Dense(x.shape[-1], name="out")(Dense(self.plant, 32, name="decoder")(code))
        divergence = Divergence(self.plant, name="divergence")(mean, log_variance)
        return SquaredError(self.plant, name="loss")(output, x) + self.share * divergence


class Total(Part):
    """The sum over chunks of terms, added up chunk by chunk, in float32 unless at fault."""

    @nn.compact
    def __call__(self, terms: Array) -> Array:
        low = self.lowered(terms) if self.fault else terms
        if self.fault == "low sum":
            return jnp.sum(low, (0, 1), dtype=low.dtype).astype(jnp.float32)
        start = jnp.zeros_like(low[0])
        return (
            jax.lax.scan(lambda total, chunk: (total + chunk, None), start, low)[0].astype(jnp.float32).sum(0)
        )


class Summing(Part):
    """Predicts a property of a set of 1e5 numbers from the sum of a net over them."""

    width: int = 4

    @nn.compact
    def __call__(self, x: Array) -> Array:
        terms = Dense(self.plant, self.width, nn.softplus, name="each")(x)
        total = Total(self.plant, name="total")(terms)
        mean = Scaled(self.plant, TERMS**-1 / len(x), name="scale")(total)
        return nn.Dense(1, name="last")(Dense(self.plant, 32, name="out")(mean))


def _keys(seed: int) -> tuple[Array, ...]:
    return tuple(jax.random.split(jax.random.key(seed), 3))


def _model(kind: Callable[[Plant], nn.Module], key: Array, data: tuple[Array, ...], given: int) -> Model:
    """Return a model whose module is called with the first of its data and returns the loss.

    If it is not given the last one, it returns what `CrossEntropy` or `SquaredError` compares with that,
    outside of the model.
    """

    def loss_of(plant: Plant) -> Callable[..., Array]:
        module = kind(plant)

        def loss(params: Params, *data: Array) -> Array:
            output = module.apply(params, *data[:given])
            if given == len(data):
                return output
            outer = SquaredError if jnp.issubdtype(data[-1].dtype, jnp.floating) else CrossEntropy
            fault = plant._replace(path="") if plant.path == "outside" else Plant()
            return outer(fault).apply({}, output, data[-1])

        return loss

    return Model(loss_of, jax.jit(kind(Plant()).init)(key, *data[:given]), data)


def _tokens(key: Array, length: int = LENGTH) -> tuple[Array, Array]:
    tokens = jax.random.randint(key, (BATCH, length + 1), 0, WORDS)
    return tokens[:, :-1], tokens[:, 1:]


def gpt(seed: int, **options: Any) -> Model:
    """Return a GPT on random words."""
    first, second, _ = _keys(seed)
    return _model(partial(Gpt, **options), first, _tokens(second), 2)


def t5(seed: int, **options: Any) -> Model:
    """Return T5's encoder with a classifier."""
    first, second, third = _keys(seed)
    data = jax.random.randint(second, (8, LENGTH), 0, WORDS), jax.random.randint(third, (8,), 0, 8)
    return _model(partial(T5, **options), first, data, 1)


def perceptron(seed: int, **options: Any) -> Model:
    """Return a deep dense net that classifies."""
    first, second, third = _keys(seed)
    data = jax.random.normal(second, (EXAMPLES, 32)), jax.random.randint(third, (EXAMPLES,), 0, 8)
    return _model(partial(Perceptron, **options), first, data, 1)


def resnet(seed: int, **options: Any) -> Model:
    """Return a residual net of convolutions."""
    first, second, third = _keys(seed)
    data = jax.random.normal(second, (8, 8, 8, 3)), jax.random.randint(third, (8,), 0, 8)
    return _model(partial(ResNet, **options), first, data, 1)


def recurrent(seed: int, length: int = 16, level: float = 1.0, **options: Any) -> Model:
    """Return a recurrent net that predicts how numbers differ from `level`, which it adds."""
    first, second, third = _keys(seed)
    data = jax.random.normal(second, (length, 8, 8)), level + jax.random.normal(third, (8, 1))
    return _model(partial(Recurrent, level=level, **options), first, data, 1)


def state_space(seed: int, length: int = 48, **options: Any) -> Model:
    """Return a state-space language model."""
    first, second, _ = _keys(seed)
    return _model(partial(StateSpaces, **options), first, _tokens(second, length), 1)


def autoencoder(seed: int, level: float = 0.0, spread: float = 1.0, **options: Any) -> Model:
    """Return an autoencoder for data around `level`."""
    first, second, _ = _keys(seed)
    data = (level + spread * jax.random.normal(second, (EXAMPLES, 32)),)
    return _model(partial(Autoencoder, level=level, **options), first, data, 1)


def clip(seed: int, alike: bool = False, **options: Any) -> Model:
    """Return a CLIP. With `alike` the towers start with the same weights, and so near the goal."""
    first, second, third = _keys(seed)
    images = jax.random.normal(second, (EXAMPLES, 32))
    texts = images + 0.3 * jax.random.normal(third, images.shape)
    model = _model(partial(Clip, **options), first, (images, texts), 2)
    if alike:
        towers = model.params["params"]
        model = model._replace(params={"params": {**towers, "texts": towers["images"]}})
    return model


def variational(seed: int, **options: Any) -> Model:
    """Return a variational autoencoder."""
    first, second, third = _keys(seed)
    noise = jax.random.normal(third, (EXAMPLES, options.get("latent", 16)))
    data = jax.random.normal(second, (EXAMPLES, 32)), noise
    return _model(partial(Variational, **options), first, data, 2)


def summing(seed: int, chunks: int = CHUNKS, **options: Any) -> Model:
    """Return a regression on a set of 1e5 numbers."""
    first, second, _ = _keys(seed)
    data = jax.random.normal(second, (chunks, TERMS, 1)), jnp.full((1,), 3.0)
    return _model(partial(Summing, **options), first, data, 1)


MODELS: dict[str, Callable[..., Model]] = {
    function.__name__: function
    for function in (
        gpt,
        t5,
        perceptron,
        resnet,
        recurrent,
        state_space,
        autoencoder,
        clip,
        variational,
        summing,
    )
}


def trained(model: Model, steps: int, rate: float) -> Params:
    """Return the parameters after a few steps of gradient descent in float32 on the model's data."""
    gradient = jax.grad(model.loss_of(Plant()))

    @jax.jit
    def descended(params: Params) -> Params:
        def step(_: int, params: Params) -> Params:
            return jax.tree.map(lambda p, g: p - rate * g, params, gradient(params, *model.data))

        return jax.lax.fori_loop(0, steps, step, params)

    return descended(model.params) if steps else model.params
