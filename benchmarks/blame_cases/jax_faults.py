"""The faults that are planted in the models of JAX, and steps without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from blame_cases import LARGEST_SCALE, SMALLEST_SCALE, Case, Errors, Healthy, jax_models
from blame_cases.jax_models import Params, Plant
from preamp import casting
from preamp.autocasting.tables import Casting
from preamp.blaming.blame import Blame
from preamp.jax import autocast, blame

__all__ = ["CASES", "HEALTHY"]

BOTH, BF16, FP16 = ("float16", "bfloat16"), ("bfloat16",), ("float16",)
OUTSIDE = "outside"

Change = Callable[[Params], Params]
SOUND = Plant()


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        loss_of: makes the loss, a function of parameters and data, whose casts go to a dtype.
        params: the parameters.
        data: what else the loss is given.
        dtype: the low precision.
        casting: an edited table of primitives, if the step has one.
        loss_scale: the loss scale; None for what a dynamic scaler would settle at, at most 2^16.
    """

    loss_of: Callable[[str], Callable[..., Any]]
    params: Params
    data: tuple[Any, ...]
    dtype: str
    casting: Casting | None = None
    loss_scale: float | None = None

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number of the low precision."""
        return float(jnp.finfo(self.dtype).eps)

    def blame(self) -> Blame:
        """Return what blame says of it."""
        return blame(
            self.loss_of(self.dtype),
            self.params,
            *self.data,
            dtype=self.dtype,
            casting=self.casting,
            loss_scale=self.loss_scale,
        )

    def errors(self, seed: int) -> Errors:
        """Return how far it is from float32, measured without blame. Its data have come from the seed."""
        exact, wanted = self._gradients(self.loss_of("float32"), [1.0])
        low = autocast(self.loss_of(self.dtype), self.dtype, casting=self.casting, emulate=True)
        scales = [2.0**power for power in range(LARGEST_SCALE, SMALLEST_SCALE - 1, -1)]
        loss, found = self._gradients(low, [self.loss_scale] if self.loss_scale else scales)
        norm = _norm(wanted)
        gone = [(gradient == 0) & (right != 0) for gradient, right in zip(found, wanted, strict=True)]
        lost_norm = _norm([right * zero for right, zero in zip(wanted, gone, strict=True)]) / norm
        return Errors(
            loss=abs(loss - exact) / abs(exact),
            gradient=_norm([a - b for a, b in zip(found, wanted, strict=True)]) / norm,
            lost=max(lost_norm, *(float(zero.mean()) for zero in gone)),
            finite=math.isfinite(loss) and all(np.isfinite(gradient).all() for gradient in found),
        )

    def _gradients(self, loss_fn: Callable[..., Any], scales: list[float]) -> tuple[float, list[Any]]:
        """Return the loss, and the gradients with the first scale with which they are finite, or the last."""

        @jax.jit
        def scaled(params: Params, scale: float) -> tuple[Any, Params]:
            loss, pull = jax.vjp(lambda params: loss_fn(params, *self.data), params)
            return loss, pull(jnp.asarray(scale, loss.dtype))[0]

        for scale in scales:
            loss, tree = scaled(self.params, scale)
            gradients = [np.asarray(each, np.float64) / scale for each in jax.tree.leaves(tree)]
            if all(np.isfinite(each).all() for each in gradients):
                break
        return float(loss), gradients


def _norm(arrays: list[Any]) -> float:
    return math.hypot(*(float(np.linalg.norm(array)) for array in arrays))


@dataclass(frozen=True)
class Builder:
    """Makes a step from a seed; without a plant, a change, a table and a loss scale it is sound."""

    model: str
    dtype: str
    options: dict[str, Any]
    plant: Plant = SOUND
    change: Change | None = None
    table: Casting | None = None
    loss_scale: float | None = None
    trained: int = 0
    rate: float = 0.1
    over: int = 1

    def __call__(self, seed: int) -> Step:
        """Return the step."""
        model = jax_models.MODELS[self.model](seed, **self.options)
        params = jax_models.trained(model, self.trained, self.rate)

        def loss_of(low: str) -> Callable[..., Any]:
            loss = model.loss_of(self.plant._replace(low=jnp.dtype(low)))
            return lambda params, *data: loss(params, *data) / self.over

        params = self.change(params) if self.change else params
        return Step(loss_of, params, model.data, self.dtype, self.table, self.loss_scale)


def changed(change: Callable[[Any], Any], *paths: str) -> Change:
    """Return what changes parameters, named with dots."""

    def with_changes(params: Params) -> Params:
        def leaf(path: Any, value: Any) -> Any:
            name = ".".join(each.key for each in path[1:])
            return change(value) if name in paths else value

        return jax.tree_util.tree_map_with_path(leaf, params)

    return with_changes


def scaled(**factors: float) -> Change:
    """Return what multiplies parameters, named with `__` for dots."""

    def with_factors(params: Params) -> Params:
        for name, factor in factors.items():
            params = changed(lambda value, factor=factor: value * factor, name.replace("__", "."))(params)
        return params

    return with_factors


def shifted(path: str, term: float) -> Change:
    """Return what adds a number to a parameter."""
    return changed(lambda value: value + term, path)


def planted(
    kind: str,
    model: str,
    what: str,
    at: str | tuple[str, ...],
    operators: str = "",
    *,
    dtypes: tuple[str, ...] = BOTH,
    direction: str | None = None,
    amount: float = 1.0,
    change: Change | None = None,
    table: Casting | None = None,
    loss_scale: float | None = None,
    trained: int = 0,
    rate: float = 0.1,
    over: int = 1,
    also: tuple[tuple[str, str], ...] = (),
    **options: Any,
) -> Iterator[Case]:
    """Return a fault as one case for each precision.

    Args:
        kind: what sort of fault it is.
        model: a key of `jax_models.MODELS`.
        what: the fault. Without `change`, `table` and `loss_scale` it is what the part at `at` calls it.
        at: the paths of what is guilty, the first of which is where the fault is planted.
        operators: which are guilty there, with spaces between; none for all.
        dtypes: the precisions.
        direction: the direction of the rows that name it.
        amount: how strong it is.
        change: changes the parameters.
        table: the edited table.
        loss_scale: the loss scale.
        trained: how many steps the model is trained before.
        rate: the learning rate of these.
        over: what the loss is divided by, as in the sum of the gradients of so many batches.
        also: what else names it, `Case.also`.
        options: of the model, with the fault and without it.
    """
    places = (at,) if isinstance(at, str) else at
    plant = SOUND if change or table or loss_scale else Plant(places[0], what, amount)
    given = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
    for dtype in dtypes:
        where = "" if places[0] in ("", OUTSIDE) else f" in {places[0]}"
        strength = f" {amount:g}" if amount != 1 else ""
        yield Case(
            name=f"{model}({given}) {dtype}: {what}{strength}{where}",
            kind=kind,
            model=model,
            build=Builder(model, dtype, options, plant, change, table, loss_scale, trained, rate, over),
            sound=Builder(model, dtype, options, trained=trained, rate=rate, over=over),
            modules=tuple(_path(model, place) for place in places),
            operators=tuple(operators.split()),
            direction=direction,
            also=tuple((_path(model, place), name) for place, name in also),
            must_show_loss=kind == "loss scale",
        )


CLASSES = {"gpt": "Gpt", "t5": "T5", "resnet": "ResNet", "state_space": "StateSpaces"}


def _path(model: str, place: str) -> str:
    """Return the path of a part as rows have it: it begins with the class of the outermost module."""
    if place == OUTSIDE:
        return "SquaredError" if model in ("recurrent", "summing") else "CrossEntropy"
    return f"{CLASSES.get(model, model.title())}.{place}" if place else ""


DEFAULT = casting.DEFAULT
CAST = "convert_element_type"
SOFTMAX = f"{CAST} sub exp reduce_sum div reduce_max stop_gradient log"
NORM = f"{CAST} mul square integer_pow sub reduce_sum div rsqrt sqrt max add"
CROSS = f"{CAST} sub exp reduce_sum log reduce_max add neg div mul gather"
SQUARE = f"{CAST} sub square integer_pow mul add reduce_sum div"


def _softmaxes() -> Iterator[Case]:
    kind = "softmax"
    gpt: dict[str, Any] = {"upcast": True, "shared": 5.0}
    yield from planted(kind, "gpt", "low softmax", "blocks_1.attention", SOFTMAX, **gpt)
    yield from planted(kind, "gpt", "softmax by hand", "blocks_0.attention", SOFTMAX, **gpt)
    yield from planted(kind, "t5", "low softmax", "blocks_0.attention", SOFTMAX, bias=300.0)
    yield from planted(kind, "t5", "softmax by hand", "blocks_1.attention", SOFTMAX, bias=500.0)
    overflow: dict[str, Any] = {"dtypes": FP16, "bias": 12.0}
    yield from planted(kind, "t5", "softmax without maximum", "blocks_1.attention", SOFTMAX, **overflow)


def _norms() -> Iterator[Case]:
    kind = "norm"
    yield from planted(kind, "gpt", "low norm", "blocks_0.first", NORM, offset=80.0)
    yield from planted(kind, "gpt", "variance of squares", "blocks_1.second", NORM, offset=8.0)
    yield from planted(kind, "gpt", "low norm", "last", NORM, offset=40.0)
    yield from planted(kind, "t5", "low norm", "blocks_0.first", NORM, dtypes=FP16, grown=300.0)
    yield from planted(kind, "t5", "low norm", "last", NORM, dtypes=FP16, grown=400.0)
    yield from planted(kind, "resnet", "variance of squares", "stages_0.norm", NORM, offset=15.0)
    yield from planted(kind, "resnet", "low norm", "stages_1.norm", NORM, offset=50.0)


def _losses() -> Iterator[Case]:
    kind = "loss"
    gpt: dict[str, Any] = {"sharp": 8.0, "trained": 90, "rate": 0.03}
    yield from planted(kind, "gpt", "low log_softmax", "loss", CROSS, **gpt)
    yield from planted(kind, "gpt", "low logsumexp", "loss", CROSS, **gpt)
    yield from planted(kind, "resnet", "low logsumexp", OUTSIDE, CROSS, trained=500)
    yield from planted(kind, "t5", "low log_softmax", OUTSIDE, CROSS, trained=100)
    yield from planted(kind, "autoencoder", "low error", "loss", SQUARE, level=20.0)
    yield from planted(kind, "autoencoder", "expanded", "loss", SQUARE, level=10.0)
    far: dict[str, Any] = {"dtypes": FP16, "level": 20.0, "spread": 10.0}
    yield from planted(kind, "autoencoder", "low sum", "loss", SQUARE, **far)
    yield from planted(kind, "recurrent", "low error", OUTSIDE, SQUARE, level=30.0)
    yield from planted(kind, "clip", "low logsumexp", "loss", CROSS, temperature=0.05, alike=True)


def _logits() -> Iterator[Case]:
    kind, scores = "attention logits", f"dot_general mul div {SOFTMAX}"
    for model, at, factor in (("gpt", "blocks_0.attention", 20.0), ("t5", "blocks_0.attention", 22.0)):
        name = at.replace(".", "__")
        grown = scaled(**{f"{name}__query__kernel": factor, f"{name}__key__kernel": factor})
        # The products before the scores are rounded as coarsely as these, and their errors grow as much.
        before = ((f"{at}.query", "dot_general"), (f"{at}.key", "dot_general"))
        yield from planted(kind, model, f"weights x {factor:g}", at, scores, change=grown, also=before)
    for at, factor in (("blocks_1.attention", 60.0), ("blocks_0.attention", 100.0)):
        before = ((f"{at}.query", "dot_general"), (f"{at}.key", "dot_general"))
        yield from planted(kind, "gpt", "logits", at, scores, amount=factor, also=before)


def _feed_forwards() -> Iterator[Case]:
    kind, product = "feed-forward overflow", f"dot_general mul add max integer_pow tanh {CAST}"
    for model, at, up, down in (
        ("t5", "blocks_1.feed_forward", 500.0, 500.0),
        ("t5", "blocks_0.feed_forward", 2e5, 1e-2),
        ("gpt", "blocks_0.feed_forward", 600.0, 600.0),
        ("gpt", "blocks_1.feed_forward", 1e6, 1e-6),
    ):
        name = at.replace(".", "__")
        grown = scaled(**{f"{name}__up__kernel": up, f"{name}__down__kernel": down})
        yield from planted(kind, model, f"weights x {up:g}, {down:g}", at, product, dtypes=FP16, change=grown)


def _scales() -> Iterator[Case]:
    for model, scale, over in (
        ("gpt", 1.0, 256),
        ("gpt", 2.0**26, 1),
        ("perceptron", 1.0, 512),
        ("perceptron", 2.0**26, 1),
        ("resnet", 2.0**26, 1),
        ("recurrent", 1.0, 1024),
        ("state_space", 2.0**-3, 64),
        ("clip", 2.0**26, 1),
        ("variational", 1.0, 1024),
        ("autoencoder", 2.0**-8, 64),
        ("t5", 2.0**-6, 128),
    ):
        what = "no loss scale" if scale == 1 else f"loss scale 2^{math.log2(scale):g}"
        only: dict[str, Any] = {"dtypes": FP16, "direction": "backward", "loss_scale": scale, "over": over}
        yield from planted("loss scale", model, what, "", **only)


def _flushed() -> Iterator[Case]:
    kind = "flushed gradients"
    only: dict[str, Any] = {"dtypes": FP16, "direction": "backward"}
    for model, scale, around, factor in (
        ("perceptron", "behind_1", ("behind_1", "middle_1"), 1e-11),
        ("perceptron", "behind_3", ("behind_3", "middle_3"), 1e-11),
        ("resnet", "stages_1.scale", "stages_1", 1e-10),
        ("resnet", "stages_0.scale", "stages_0", 1e-10),
    ):
        small = scaled(**{f"{scale.replace('.', '__')}__scale": factor})
        yield from planted(kind, model, f"{scale} x {factor:g}", around, change=small, **only)
    for model, at, layer, bias, over, options in (
        ("perceptron", "middle_1", "linear", -26.0, 1, {"act": nn.sigmoid}),
        ("autoencoder", "decoder", "linear", 16.0, 1024, {"act": nn.sigmoid}),
    ):
        saturated = shifted(f"{at}.{layer}.bias", bias)
        what = f"saturated by {bias:g}"
        # Its derivative is made of its result, so the gradient is lost where that becomes 0 or 1.
        yield from planted(
            kind, model, what, at, "logistic", dtypes=FP16, change=saturated, over=over, **options
        )


def _long_sums() -> Iterator[Case]:
    kind, adds = "long sum", f"add {CAST}"
    yield from planted(kind, "summing", "low total", "total", adds, dtypes=BF16)
    yield from planted(kind, "summing", "low total", "total", adds, dtypes=BF16, width=8)
    yield from planted(kind, "summing", "low sum", "total", f"reduce_sum {CAST}", dtypes=FP16)
    yield from planted(kind, "recurrent", "low total", "cell", adds, dtypes=BF16, length=120, pace=0.02)
    yield from planted(kind, "recurrent", "low total", "cell", adds, dtypes=BF16, length=200, pace=0.008)


def _tables() -> Iterator[Case]:
    kind = "table"
    edits: tuple[tuple[str, str, tuple[str, ...], dict[str, Any]], ...] = (
        ("t5", "sub", BOTH, {"bias": 300.0}),
        ("t5", "add", BOTH, {"bias": 500.0}),
        ("gpt", "sub", BOTH, {"upcast": True, "shared": 4.0}),
        ("gpt", "add", BOTH, {"offset": 40.0}),
        ("state_space", "cumsum", BOTH, {"pace": 2.0}),
        ("state_space", "sub", BOTH, {"pace": 2.0}),
        ("autoencoder", "add", BOTH, {"level": 40.0}),
        ("autoencoder", "sub", BOTH, {"level": 20.0}),
        ("clip", "mul", BOTH, {"temperature": 0.02, "alike": True}),
        ("resnet", "add", BOTH, {"offset": 25.0}),
        ("resnet", "reduce_sum", FP16, {"offset": 300.0}),
        ("t5", "square", FP16, {"grown": 300.0}),
        ("recurrent", "add", BF16, {"length": 120, "pace": 0.02}),
        ("recurrent", "sub", BOTH, {"level": 40.0}),
    )
    for model, names, dtypes, options in edits:
        table = DEFAULT.lower(names)
        yield from planted(kind, model, f"lower({names})", "", names, dtypes=dtypes, table=table, **options)


def _cancellations() -> Iterator[Case]:
    kind, minus = "cancellation", f"{CAST} add sub"
    for model, at, fault, amount, operators in (
        ("perceptron", "middle_1", "low offset", 100.0, minus),
        ("perceptron", "middle_3", "difference of squares", 30.0, f"{minus} mul div"),
        ("perceptron", "middle_2", "one minus cosine", 0.1, f"{minus} mul cos sin"),
        ("autoencoder", "encoder", "low offset", 12.0, minus),
        ("autoencoder", "decoder", "difference of squares", 30.0, f"{minus} mul div"),
        ("variational", "encoder", "one minus cosine", 0.05, f"{minus} mul cos sin"),
        ("summing", "out", "low offset", 200.0, minus),
    ):
        yield from planted(kind, model, fault, at, operators, amount=amount)
    squares = f"{CAST} square integer_pow sub reduce_sum add mul dot_general"
    yield from planted(kind, "clip", "low distances", "loss", squares, temperature=0.03)
    yield from planted(kind, "clip", "low expanded distances", "loss", squares, amount=2.0)
    divergence: dict[str, Any] = {"near": 0.03, "share": 10.0}
    terms = f"{CAST} square integer_pow exp add sub reduce_sum mul"
    yield from planted(kind, "variational", "low divergence", "divergence", terms, **divergence)
    yield from planted(kind, "state_space", "low cumsum", "layers_1", f"{CAST} cumsum sub exp", pace=2.0)
    ratio: dict[str, Any] = {"dtypes": FP16, "pace": 0.5}
    yield from planted(kind, "state_space", "ratio of exponentials", "layers_0", f"{CAST} exp div", **ratio)


CASES: tuple[Case, ...] = (
    *_softmaxes(),
    *_norms(),
    *_losses(),
    *_logits(),
    *_feed_forwards(),
    *_scales(),
    *_flushed(),
    *_long_sums(),
    *_tables(),
    *_cancellations(),
)


def _in_both(model: str, *, trained: int = 0, rate: float = 0.1, **options: Any) -> Iterator[Healthy]:
    given = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
    after = f" after {trained} steps" if trained else ""
    for dtype in BOTH:
        builder = Builder(model, dtype, options, trained=trained, rate=rate)
        yield Healthy(f"{model}({given}) {dtype}{after}", builder)


HEALTHY: tuple[Healthy, ...] = (
    *_in_both("gpt"),
    *_in_both("gpt", offset=4.0),
    *_in_both("gpt", sharp=4.0, trained=10, rate=0.03),
    *_in_both("t5"),
    *_in_both("t5", bias=2.0, trained=5),
    *_in_both("t5", act=nn.gelu, width=64),
    *_in_both("perceptron"),
    *_in_both("perceptron", act=nn.sigmoid, depth=8),
    *_in_both("perceptron", act=nn.relu, width=64, trained=20),
    *_in_both("resnet"),
    *_in_both("resnet", channels=32, trained=10),
    *_in_both("recurrent"),
    *_in_both("recurrent", width=32, level=5.0),
    *_in_both("state_space"),
    *_in_both("state_space", pace=2.0, layers=1),
    *_in_both("autoencoder"),
    *_in_both("autoencoder", level=5.0, trained=20, act=jnp.tanh),
    *_in_both("clip"),
    *_in_both("clip", temperature=0.2, trained=5),
    *_in_both("variational"),
    *_in_both("variational", latent=32, trained=10),
    *_in_both("summing", chunks=20),
)
