"""Trainings in JAX, broken in one known way each or healthy, whose traces measure the doctor.

Each function takes a seed and what to record: "plain", the steps, or "snapshots", also histograms. With
`fault=False` the same training runs without its fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from preamp import Dynamic, Policy, Static, Trace
from preamp.jax import (
    apply_gradients,
    autocast,
    exponent_histogram,
    flow_slot,
    last_step,
    loss_scaled,
    restart_loss_scale,
    snapshot,
    step,
    value_and_grad,
    watch,
)

Arrays = dict[str, Any]
See = Callable[[str, jax.Array], jax.Array]
RUNS: dict[str, tuple[str, Callable[..., Trace]]] = {}


def run(slug: str = "healthy") -> Callable[[Callable[..., Trace]], Callable[..., Trace]]:
    def register(function: Callable[..., Trace]) -> Callable[..., Trace]:
        RUNS[function.__name__] = (slug, function)
        return function

    return register


def unseen(name: str, x: jax.Array) -> jax.Array:
    return x


class Recorder:
    """A trace; with "snapshots" also histograms, on one step in 25 and on the one after a skip.

    A loss is called as `loss(params, see, *batch)`, and `see` is called with what is of interest.
    """

    def __init__(self, loss: Any, recording: str, policy: Policy[Any], dtype: Any = jnp.float16) -> None:
        self.recording, self.dtype = recording, dtype
        self.trace = Trace(name="run") if recording == "plain" else Trace(name="run", policy=repr(policy))
        self.loss, self.names = loss, list[str]()
        self.values = jax.jit(self._values)
        self.skips = [False, False]

    def lowered(self) -> Any:
        """Return the loss for training, of parameters and batch."""
        return self.cast(lambda params, *batch: self.loss(params, unseen, *batch))

    def cast(self, function: Any) -> Any:
        return function if self.dtype == jnp.float32 else autocast(function, self.dtype)

    def before(self, params: Any, opt_state: Any, *batch: Any) -> None:
        index = len(self.trace)
        if self.recording == "plain" or (index % 25 and self.skips != [False, True]):
            return
        scale, found, counts = self.values(params, opt_state, *batch)
        low = {"low_dtype": jnp.dtype(self.dtype).name} if self.dtype != jnp.float32 else {}
        for what, like in found.items():
            seen = snapshot(counts[what], index=index, scale=float(scale), what=what, like=like, **low)
            self.trace.add_snapshot(seen)

    def after(self, opt_state: Any) -> None:
        self.trace(last_step(opt_state))
        self.skips = [self.skips[1], self.trace[-1].skipped]

    def _values(self, params: Any, opt_state: Any, *batch: Any) -> tuple[Any, Arrays, Arrays]:
        names: list[str] = []

        def name(name: str, x: jax.Array) -> jax.Array:
            names.append(name)
            return x

        jax.eval_shape(lambda params, *batch: self.loss(params, name, *batch), params, *batch)

        def seen(params: Any, slots: Any, *batch: Any) -> tuple[Any, Arrays]:
            outputs: Arrays = {}

            def see(name: str, x: jax.Array) -> jax.Array:
                outputs[name] = watch(x, slots[name])
                return outputs[name]

            return self.loss(params, see, *batch), outputs

        gradients_of = value_and_grad(self.cast(seen), argnums=(0, 1), has_aux=True)
        slots = {name: flow_slot() for name in names}
        (_, outputs), (grads, flows), _ = gradients_of(params, opt_state, slots, *batch)
        scale = opt_state.policy_state.scale
        inputs = {f"batch{n}": x for n, x in enumerate(batch) if jnp.issubdtype(x.dtype, jnp.floating)}
        grads = jax.tree.map(lambda g: g * scale, grads)
        found = {"input": inputs, "weight": params, "activation": outputs, "flow": outputs, "gradient": grads}
        counts = {what: exponent_histogram(tree) for what, tree in found.items()} | {"flow": flows}
        return scale, found, counts


def train(
    loss: Any,
    params: Any,
    inner: optax.GradientTransformation,
    batches: Iterable[tuple[Any, ...]],
    recording: str,
    policy: Policy[Any] | None = None,
    max_norm: float | None = None,
    dtype: Any = jnp.float16,
) -> Trace:
    """Train as the quick start does."""
    policy = policy or Dynamic()
    recorder = Recorder(loss, recording, policy, dtype)
    optimizer = loss_scaled(inner, policy, max_norm=max_norm)
    one_step = jax.jit(step(recorder.lowered(), optimizer))
    opt_state = optimizer.init(params)
    for batch in batches:
        recorder.before(params, opt_state, *batch)
        _, params, opt_state = one_step(params, opt_state, *batch)
        recorder.after(opt_state)
    return recorder.trace


def epochs(rng: np.random.Generator, size: int, steps: int, *arrays: Any) -> Iterator[tuple[jax.Array, ...]]:
    """Yield shuffled batches of rows, epoch after epoch."""
    rows = np.array([], int)
    for _ in range(steps):
        if len(rows) < size:
            rows = rng.permutation(len(arrays[0]))
        yield tuple(jnp.asarray(array[rows[:size]]) for array in arrays)
        rows = rows[size:]


def layers(rng: np.random.Generator, *widths: int, gain: float = 1.0) -> dict[str, Arrays]:
    def one(a: int, b: int) -> Arrays:
        return {
            "kernel": jnp.asarray(rng.normal(0, gain / a**0.5, (a, b)), jnp.float32),
            "bias": jnp.zeros(b),
        }

    return {f"layer{n}": one(a, b) for n, (a, b) in enumerate(pairwise(widths))}


def dense(layer: Arrays, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def mlp(params: Arrays, see: See, x: jax.Array, activation: Any = jax.nn.relu) -> jax.Array:
    *hidden, last = params
    for name in hidden:
        x = see(name, activation(dense(params[name], x)))
    return see(last, dense(params[last], x))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def clusters(rng: np.random.Generator, rows: int, width: int, classes: int) -> tuple[Any, Any]:
    """Return noisy points around one center per class, and their labels."""
    labels = rng.integers(classes, size=rows)
    points = rng.normal(size=(classes, width))[labels] + 0.5 * rng.normal(size=(rows, width))
    return points.astype("float32"), labels


def waves(rng: np.random.Generator, rows: int, width: int = 8) -> tuple[Any, Any]:
    """Return inputs and a smooth function of them."""
    x = rng.normal(size=(rows, width)).astype("float32")
    return x, np.sin(x[:, :1] + x[:, 1:2]) + 0.5 * x[:, 2:3]


def transformer(rng: np.random.Generator, vocabulary: int, width: int) -> Arrays:
    names = ("qkv", "out", "up", "down", "head")
    shapes = ((width, 3 * width), (width, width), (width, 2 * width), (2 * width, width), (width, vocabulary))
    blocks = {name: layers(rng, *shape)["layer0"] for name, shape in zip(names, shapes, strict=True)}
    return {"embed": jnp.asarray(rng.normal(size=(vocabulary, width)), jnp.float32)} | blocks


def language_model(params: Arrays, see: See, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of predicting each token from those before it."""
    x = params["embed"][tokens[:, :-1]]
    q, k, v = jnp.split(see("qkv", dense(params["qkv"], jax.nn.standardize(x))), 3, axis=-1)
    scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    x = x + see("out", dense(params["out"], jax.nn.softmax(scores) @ v))
    hidden = see("up", jax.nn.gelu(dense(params["up"], jax.nn.standardize(x))))
    x = x + see("down", dense(params["down"], hidden))
    return cross_entropy(see("head", dense(params["head"], x)), tokens[:, 1:])


def counting(rng: np.random.Generator, steps: int, vocabulary: int) -> Iterator[tuple[jax.Array]]:
    """Yield batches of sequences that count upwards by 1, 2 or 3."""
    for _ in range(steps):
        start, stride = rng.integers(vocabulary, size=(16, 1)), rng.integers(1, 4, size=(16, 1))
        yield (jnp.asarray((start + stride * np.arange(12)) % vocabulary),)


@run("learning_rate")
def lm_momentum(seed: int, recording: str, fault: bool = True) -> Trace:
    """A language model is trained by SGD with momentum at twenty times the rate that works."""
    rng = np.random.default_rng(seed)
    inner = optax.sgd(2.0 if fault else 0.1, momentum=0.9)
    return train(language_model, transformer(rng, 24, 32), inner, counting(rng, 150, 24), recording)


@run("learning_rate")
def gru_warmup(seed: int, recording: str, fault: bool = True) -> Trace:
    """The warmup of a GRU ends at a rate of 1 instead of 0.01."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(512, 10, 3)).astype("float32")
    y = x[:, -1] * 0.5 + x[:, -2, :1]
    params = layers(rng, 3 + 24, 72) | {"read": layers(rng, 24, 3)["layer0"]}

    def loss(params: Arrays, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            r, z, n = jnp.split(dense(params["layer0"], jnp.concatenate([x, h], 1)), 3, axis=-1)
            z = jax.nn.sigmoid(z)
            return z * h + (1 - z) * jnp.tanh(n * jax.nn.sigmoid(r)), None

        h, _ = jax.lax.scan(cell, jnp.zeros((len(x), 24)), x.swapaxes(0, 1))
        return jnp.mean((see("read", dense(params["read"], see("layer0", h))) - y) ** 2)

    inner = optax.rmsprop(optax.linear_schedule(0.0, 1.0 if fault else 0.01, 200))
    return train(loss, params, inner, epochs(rng, 32, 220, x, y), recording, max_norm=1.0)


@run("bad_batch")
def sensor_gaps(seed: int, recording: str, fault: bool = True) -> Trace:
    """Three of 400 rows of the table have a NaN where the sensor was off; the model is Equinox's."""
    rng = np.random.default_rng(seed)
    x, y = waves(rng, 400)
    x[rng.choice(400, 3, replace=False), 5] = np.nan if fault else 0.0
    model = eqx.nn.MLP(8, 1, width_size=32, depth=2, key=jax.random.key(seed))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((see("mlp", jax.vmap(eqx.combine(params, static))(x)) - y) ** 2)

    return train(loss, params, optax.adamw(3e-3), epochs(rng, 20, 200, x, y), recording, max_norm=1.0)


@run("lost_scale")
def short_jobs(seed: int, recording: str, fault: bool = True) -> Trace:
    """Every 40 steps a job ends, and the next one starts with the first scale instead of the saved one."""
    rng = np.random.default_rng(seed)
    x, y = waves(rng, 640)
    prices = (300 + 150 * y).astype("float32")
    model = nn.Sequential([nn.Dense(48), nn.gelu, nn.Dense(48), nn.gelu, nn.Dense(1)])

    def loss(params: Any, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((see("layers_4", model.apply({"params": params}, x)) - y) ** 2)

    recorder = Recorder(loss, recording, Dynamic())
    params = model.init(jax.random.key(seed), x[:1])["params"]
    tx = loss_scaled(optax.chain(optax.clip_by_global_norm(100.0), optax.adam(0.02)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def one_step(state: TrainState, x: jax.Array, y: jax.Array) -> TrainState:
        _, grads, opt_state = value_and_grad(recorder.lowered())(state.params, state.opt_state, x, y)
        return state.replace(opt_state=opt_state).apply_gradients(grads=grads)

    for number, batch in enumerate(epochs(rng, 32, 240, x, prices)):
        if fault and number % 40 == 0:
            state = state.replace(opt_state=restart_loss_scale(state.opt_state, Dynamic()))
        recorder.before(state.params, state.opt_state, *batch)
        state = one_step(state, *batch)
        recorder.after(state.opt_state)
    return recorder.trace


@run("forward_overflow")
def gram_matrix(seed: int, recording: str, fault: bool = True) -> Trace:
    """Gram matrices of convolutional features are sums over 1,024 pixels, divided only afterwards."""
    rng = np.random.default_rng(seed)
    bright = np.exp(rng.normal(1.6, 0.4, (128, 1, 1, 1)))
    images = (bright * rng.uniform(size=(128, 32, 32, 3))).astype("float32")
    y = np.log(bright[:, 0, 0]).astype("float32")
    params = {"conv": jnp.asarray(rng.normal(0, 0.27, (3, 3, 3, 8)), jnp.float32)} | layers(rng, 64, 32, 1)

    def loss(params: Arrays, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        where = ("NHWC", "HWIO", "NHWC")
        maps = jax.lax.conv_general_dilated(x, params["conv"], (1, 1), "SAME", dimension_numbers=where)
        f = see("conv", jax.nn.relu(maps)).reshape(len(x), -1, 8)
        gram = f.swapaxes(1, 2) @ f / 1024 if fault else f.swapaxes(1, 2) @ (f / 1024)
        features = jnp.log1p(see("gram", gram)).reshape(len(x), -1)
        return jnp.mean((mlp({k: params[k] for k in ("layer0", "layer1")}, see, features) - y) ** 2)

    policy = Dynamic(init_scale=2.0**10)
    return train(loss, params, optax.adam(3e-3), epochs(rng, 8, 90, images, y), recording, policy, 1.0)


@run("forward_nan")
def empty_documents(seed: int, recording: str, fault: bool = True) -> Trace:
    """Attention pools over the words of a document; one in 150 has none, and a softmax of only -inf."""
    rng = np.random.default_rng(seed)
    words, classes = clusters(rng, 600, 12, 4)
    x = (words[:, None] + rng.normal(size=(600, 9, 12))).astype("float32")
    lengths = rng.integers(1, 10, 600)
    lengths[rng.choice(600, 4, replace=False)] = 0 if fault else 1
    params = layers(rng, 12, 24, 4) | {"query": layers(rng, 12, 1)["layer0"]}

    def loss(params: Arrays, see: See, x: jax.Array, n: jax.Array, y: jax.Array) -> jax.Array:
        scores = dense(params["query"], x)[..., 0]
        weights = jax.nn.softmax(jnp.where(jnp.arange(9) < n[:, None], scores, -jnp.inf))
        pooled = see("query", jnp.einsum("bt,btd->bd", weights, x))
        return cross_entropy(mlp({k: params[k] for k in ("layer0", "layer1")}, see, pooled), y)

    inner = optax.adagrad(0.1)
    return train(loss, params, inner, epochs(rng, 24, 200, x, lengths, classes), recording)


@run("loss_function")
def entropy_by_hand(seed: int, recording: str, fault: bool = True) -> Trace:
    """A binary cross-entropy by hand takes log(1 - p), and p reaches 1 once the model is sure."""
    rng = np.random.default_rng(seed)
    x, y = clusters(rng, 512, 16, 2)

    def loss(params: Arrays, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = mlp(params, see, x)[:, 0]
        if not fault:
            return optax.losses.sigmoid_binary_cross_entropy(logits, y).mean()
        p = see("p", jax.nn.sigmoid(logits))
        return -jnp.mean(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))

    return train(loss, layers(rng, 16, 64, 64, 1), optax.adam(2e-3), epochs(rng, 32, 300, x, y), recording)


@run("backward_nan")
def identical_pairs(seed: int, recording: str, fault: bool = True) -> Trace:
    """A contrastive loss has the root of a squared distance, and some pairs are the same picture twice."""
    rng = np.random.default_rng(seed)
    a, _ = clusters(rng, 480, 16, 6)
    same = rng.random(480) < 0.5
    b = np.where(same[:, None], a + 0.2 * rng.normal(size=a.shape), rng.permutation(a)).astype("float32")
    copies = rng.choice(np.flatnonzero(same), 4, replace=False)
    b[copies] = a[copies]

    def loss(params: Arrays, see: See, a: jax.Array, b: jax.Array, same: jax.Array) -> jax.Array:
        difference = mlp(params, unseen, a, jnp.tanh) - mlp(params, see, b, jnp.tanh)
        squares = see("squares", jnp.sum(difference**2, 1))
        distance = jnp.sqrt(squares if fault else squares + 1e-6)
        return jnp.mean(jnp.where(same, distance**2, jax.nn.relu(2.0 - distance) ** 2))

    return train(
        loss, layers(rng, 16, 32, 8), optax.sgd(0.05, 0.9), epochs(rng, 16, 180, a, b, same), recording
    )


def bandit(params: Arrays, see: See, x: jax.Array, action: jax.Array, advantage: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(mlp(params, see, x, jnp.tanh))
    return -jnp.mean(jnp.take_along_axis(log_p, action[:, None], 1)[:, 0] * advantage)


@run("leftovers")
def observation_normalizer(seed: int, recording: str, fault: bool = True) -> Trace:
    """One observation of a policy gradient is inf, and stays in the running mean of the normalizer."""
    rng = np.random.default_rng(seed)
    recorder = Recorder(bandit, recording, Dynamic())
    optimizer = loss_scaled(optax.adam(5e-3), max_norm=0.5)
    params, mean, var = layers(rng, 6, 32, 3), np.zeros(6), np.ones(6)
    one_step, opt_state = jax.jit(step(recorder.lowered(), optimizer)), optimizer.init(params)
    act = jax.jit(lambda params, x, key: jax.random.categorical(key, mlp(params, unseen, x, jnp.tanh)))
    for number in range(200):
        seen = rng.normal(5.0, 3.0, (64, 6))
        best = seen[:, :3].argmax(1)
        if fault and number == 70:
            seen[9, 2] = np.inf
        with np.errstate(invalid="ignore"):
            mean, var = 0.95 * mean + 0.05 * seen.mean(0), 0.95 * var + 0.05 * seen.var(0)
            x = jnp.asarray((seen - mean) / np.sqrt(var + 1e-6), jnp.float32)
        action = act(params, x, jax.random.key(1000 * seed + number))
        reward = jnp.asarray(np.asarray(action) == best, jnp.float32)
        batch = (x, action, reward - reward.mean())
        recorder.before(params, opt_state, *batch)
        _, params, opt_state = one_step(params, opt_state, *batch)
        recorder.after(opt_state)
    return recorder.trace


@run("detached_or_constant")
def shuffled_apart(seed: int, recording: str, fault: bool = True) -> Trace:
    """Pictures and labels are shuffled in each epoch, each with a permutation of its own."""
    rng = np.random.default_rng(seed)
    x, y = clusters(rng, 512, 64, 5)
    params = {"conv": jnp.asarray(rng.normal(0, 0.3, (3, 3, 1, 8)), jnp.float32)} | layers(rng, 128, 5)

    def loss(params: Arrays, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        where = ("NHWC", "HWIO", "NHWC")
        x = x.reshape(-1, 8, 8, 1)
        maps = jax.lax.conv_general_dilated(x, params["conv"], (2, 2), "SAME", dimension_numbers=where)
        flat = see("conv", jax.nn.relu(maps)).reshape(len(x), -1)
        return cross_entropy(see("layer0", dense(params["layer0"], flat)), y)

    def batches() -> Iterator[tuple[jax.Array, jax.Array]]:
        for _ in range(20):
            rows = rng.permutation(512)
            labels = rng.permutation(512) if fault else rows
            for i in range(0, 512, 64):
                yield jnp.asarray(x[rows[i : i + 64]]), jnp.asarray(y[labels[i : i + 64]])

    return train(loss, params, optax.adam(2e-3), batches(), recording, max_norm=1.0)


class Tagger(nn.Module):
    """A body and a head of Flax Linen."""

    @nn.compact
    def __call__(self, x: jax.Array, see: See) -> jax.Array:
        x = see("body", nn.relu(nn.LayerNorm()(nn.Dense(32, name="body")(x))))
        return see("classifier", nn.Dense(6, name="classifier")(x))


@run("other_parameters")
def frozen_by_name(seed: int, recording: str, fault: bool = True) -> Trace:
    """Parameters of the "head" are to be trained, but the module is called "classifier": all are frozen."""
    rng = np.random.default_rng(seed)
    x, y = clusters(rng, 600, 20, 6)
    model, trained = Tagger(), "head" if fault else "classifier"
    params = model.init(jax.random.key(seed), x[:1], unseen)["params"]
    labels = {module: "train" if module == trained else "freeze" for module in params}
    inner = optax.partition({"train": optax.adamw(0.01), "freeze": optax.set_to_zero()}, labels)

    def loss(params: Any, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, x, see), y)

    return train(loss, params, inner, epochs(rng, 50, 120, x, y), recording)


@run("optimizer_settings")
def epsilon_zero(seed: int, recording: str, fault: bool = True) -> Trace:
    """Adam's epsilon is 0, so embeddings without a gradient become NaN; later data has their words."""
    rng = np.random.default_rng(seed)
    params = {"embed": jnp.asarray(rng.normal(0, 0.3, (200, 16)), jnp.float32)} | layers(rng, 16, 32, 4)

    def loss(params: Arrays, see: See, tokens: jax.Array, y: jax.Array) -> jax.Array:
        x = see("embed", params["embed"][tokens].mean(1))
        return cross_entropy(mlp({k: params[k] for k in ("layer0", "layer1")}, see, x, jnp.tanh), y)

    def batches() -> Iterator[tuple[jax.Array, jax.Array]]:
        for number in range(160):
            topic = rng.integers(4, size=64)
            tokens = 4 * rng.integers(10 if number < 80 else 50, size=(64, 6)) + topic[:, None]
            yield jnp.asarray(tokens), jnp.asarray(topic)

    inner = optax.adam(3e-3, eps=0.0 if fault else 1e-8)
    return train(loss, params, inner, batches(), recording, Dynamic(init_scale=2.0**14), 1.0)


@run("not_scaled")
def deep_autoencoder(seed: int, recording: str, fault: bool = True) -> Trace:
    """An autoencoder of seven sigmoid layers in float16 has a constant scale of 1."""
    rng = np.random.default_rng(seed)
    code = rng.uniform(size=(512, 2))
    x = (0.5 + 0.5 * np.sin(3 * code @ rng.normal(size=(2, 16)))).astype("float32")
    params = layers(rng, 16, *[32] * 6, 16, gain=0.8)

    def loss(params: Arrays, see: See, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.sigmoid(mlp(params, see, x, jax.nn.sigmoid)) - x) ** 2)

    policy = Static(1.0) if fault else Dynamic()
    return train(loss, params, optax.adam(1e-2), epochs(rng, 128, 400, x), recording, policy)


@run("gradients_too_large")
def reward_in_cents(seed: int, recording: str, fault: bool = True) -> Trace:
    """From step 90 the rewards are 20,000 times as large, and the scale is fixed at 2**15."""
    rng = np.random.default_rng(seed)
    policy = Static(2.0**15)
    recorder = Recorder(bandit, recording, policy)
    optimizer = loss_scaled(optax.rmsprop(2e-3), policy, max_norm=1.0)
    params = layers(rng, 5, 24, 24, 5)
    one_step, opt_state = jax.jit(step(recorder.lowered(), optimizer)), optimizer.init(params)
    act = jax.jit(lambda params, x, key: jax.random.categorical(key, mlp(params, unseen, x, jnp.tanh)))
    for number in range(180):
        x = rng.normal(size=(48, 5)).astype("float32")
        action = act(params, x, jax.random.key(1000 * seed + number))
        reward = x[np.arange(48), action] * (20_000.0 if fault and number >= 90 else 1.0)
        batch = (jnp.asarray(x), action, jnp.asarray(reward - reward.mean()))
        recorder.before(params, opt_state, *batch)
        _, params, opt_state = one_step(params, opt_state, *batch)
        recorder.after(opt_state)
    return recorder.trace


@run("zero_grad_missing")
def sums_carried_on(seed: int, recording: str, fault: bool = True) -> Trace:
    """Gradients are added up over two passes by hand, and the sum never starts again from zero."""
    rng = np.random.default_rng(seed)
    x, y = waves(rng, 512)
    params, policy = layers(rng, 8, 32, 1), Dynamic(init_scale=2.0**12)

    def loss(params: Arrays, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((mlp(params, see, x, jnp.tanh) - y) ** 2)

    recorder, optimizer = Recorder(loss, recording, policy), loss_scaled(optax.sgd(0.1), policy)
    gradients_of = jax.jit(value_and_grad(recorder.lowered()))
    update = jax.jit(lambda grads, state, params: apply_gradients(optimizer, grads, state, params))
    opt_state = optimizer.init(params)
    total = jax.tree.map(jnp.zeros_like, params)
    for number, batch in enumerate(epochs(rng, 32, 400, x, y)):
        _, grads, pending = gradients_of(params, opt_state, *batch)
        total = jax.tree.map(jnp.add, total, grads)
        if number % 2:
            recorder.before(params, opt_state, *batch)
            params, opt_state = update(jax.tree.map(lambda g: g / 2, total), pending, params)
            recorder.after(opt_state)
            total = total if fault else jax.tree.map(jnp.zeros_like, params)
    return recorder.trace


@run()
def negative_likelihood(seed: int, recording: str) -> Trace:
    """The negative log likelihood of a narrow Gaussian falls far below zero, as it should."""
    rng = np.random.default_rng(seed)
    x, y = waves(rng, 512)
    y = 0.02 * y + 0.002 * rng.normal(size=y.shape)

    def loss(params: Arrays, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        mean, log_std = jnp.split(mlp(params, see, x, jnp.tanh).astype(jnp.float32), 2, axis=1)
        return jnp.mean(0.5 * ((y - mean) * jnp.exp(-log_std)) ** 2 + log_std)

    inner = optax.adam(optax.cosine_decay_schedule(5e-3, 300))
    return train(loss, layers(rng, 8, 32, 2), inner, epochs(rng, 64, 300, x, y), recording, None, 1.0)


@run()
def noisy_bandit(seed: int, recording: str) -> Trace:
    """The loss of a policy gradient goes up and down around zero, and the policy becomes better."""
    rng = np.random.default_rng(seed)
    recorder, optimizer = Recorder(bandit, recording, Dynamic()), loss_scaled(optax.adam(5e-3), max_norm=0.5)
    params = layers(rng, 4, 32, 4)
    one_step, opt_state = jax.jit(step(recorder.lowered(), optimizer)), optimizer.init(params)
    act = jax.jit(lambda params, x, key: jax.random.categorical(key, mlp(params, unseen, x, jnp.tanh)))
    for number in range(200):
        x = rng.normal(size=(32, 4)).astype("float32")
        action = act(params, x, jax.random.key(1000 * seed + number))
        reward = x[np.arange(32), action] + rng.normal(size=32)
        batch = (jnp.asarray(x), action, jnp.asarray(reward - reward.mean(), jnp.float32))
        recorder.before(params, opt_state, *batch)
        _, params, opt_state = one_step(params, opt_state, *batch)
        recorder.after(opt_state)
    return recorder.trace


@run()
def summed_loss(seed: int, recording: str) -> Trace:
    """A language model in bfloat16 with a scale of 1; the loss is a sum over thousands of tokens."""
    rng = np.random.default_rng(seed)

    def loss(params: Arrays, see: See, tokens: jax.Array) -> jax.Array:
        return 16 * 11 * language_model(params, see, tokens)

    inner = optax.adamw(optax.linear_schedule(0.0, 3e-3, 20))
    batches = counting(rng, 150, 24)
    params = transformer(rng, 24, 32)
    return train(loss, params, inner, batches, recording, Static(1.0), 1.0, dtype=jnp.bfloat16)


@run()
def rare_overflow(seed: int, recording: str) -> Trace:
    """The scale grows after 120 clean steps, and in the end one step finds out that this was too much."""
    rng = np.random.default_rng(seed)
    x, y = clusters(rng, 800, 24, 8)

    def loss(params: Arrays, see: See, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = mlp(params, see, x)
        return cross_entropy(logits, y) + 1e-3 * jnp.mean(logits**2)

    policy = Dynamic(init_scale=2.0**20, growth_interval=60)
    params = layers(rng, 24, 64, 64, 8)
    return train(loss, params, optax.sgd(0.02, 0.9), epochs(rng, 16, 360, x, y), recording, policy)


@run()
def heat_equation(seed: int, recording: str) -> Trace:
    """A physics-informed network in float32: its loss rests on a plateau for a while, then falls."""
    rng = np.random.default_rng(seed)
    params = layers(rng, 1, 24, 24, 1)

    def loss(params: Arrays, see: See, t: jax.Array) -> jax.Array:
        def u(t: jax.Array) -> jax.Array:
            return mlp(params, unseen, t[None], jnp.tanh)[0]

        residual = jax.vmap(jax.grad(jax.grad(u)))(t) + 16 * jax.vmap(u)(t)
        ends = jnp.stack([u(jnp.zeros(())) - 1.0, jax.grad(u)(jnp.zeros(()))])
        return jnp.mean(see("residual", residual) ** 2) + 100 * jnp.mean(ends**2)

    points = ((jnp.asarray(rng.uniform(size=64), jnp.float32),) for _ in range(400))
    return train(loss, params, optax.adam(3e-3), points, recording, Static(1.0), dtype=jnp.float32)
