"""The faults that are planted in the models of PyTorch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from blame_cases import OUTSIDE, Case, by_hand, models
from blame_cases.models import Step
from preamp import casting
from preamp.autocasting.tables import Casting

__all__ = ["CASES"]

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
BOTH = (FLOAT16, BFLOAT16)
SHORT = {FLOAT16: "float16", BFLOAT16: "bfloat16"}
STEPS = {**models.STEPS, **by_hand.STEPS}

Plant = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Builder:
    """Makes a step from a seed; without a plant, a table and a loss scale it is sound."""

    model: str
    dtype: torch.dtype
    options: dict[str, Any]
    plant: Plant | None = None
    table: Casting | None = None
    loss_scale: float | None = None
    trained: int = 0
    rate: float = 0.1
    over: int = 1

    def __call__(self, seed: int) -> Step:
        """Return the step."""
        torch.manual_seed(seed)
        step = STEPS[self.model](self.dtype, **self.options)
        step = models.trained(step, self.trained, self.rate)
        if self.over > 1:
            step = models.averaged(step, self.over)
        if self.plant:
            with torch.no_grad():
                self.plant(step.model)
        models.set_low(step.model, self.dtype)
        return dataclasses.replace(step, casting=self.table, loss_scale=self.loss_scale)


def at_fault(path: str, fault: str, amount: float = 1.0) -> Plant:
    """Return what plants a fault in the part at a path."""

    def plant(model: nn.Module) -> None:
        part = models.part_at(model, path)
        part.fault, part.amount = fault, amount

    return plant


def scaled(**factors: float) -> Plant:
    """Return what multiplies weights, named with `__` for dots."""

    def plant(model: nn.Module) -> None:
        for name, factor in factors.items():
            model.get_parameter(name.replace("__", ".")).mul_(factor)

    return plant


def shifted(**terms: float) -> Plant:
    """Return what adds a number to weights, named with `__` for dots."""

    def plant(model: nn.Module) -> None:
        for name, term in terms.items():
            model.get_parameter(name.replace("__", ".")).add_(term)

    return plant


def planted(
    kind: str,
    model: str,
    what: str,
    at: str | tuple[str, ...],
    operators: str = "",
    *,
    dtypes: tuple[torch.dtype, ...] = BOTH,
    direction: str | None = None,
    plant: Plant | None = None,
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
        model: a key of `STEPS`.
        what: the fault. Without `plant`, `table` and `loss_scale` it is what the part at `at` calls it.
        at: the paths of what is guilty, the first of which is where the fault is planted.
        operators: which are guilty there, with spaces between; none for all.
        dtypes: the precisions.
        direction: the direction of the rows that name it.
        plant: changes the model.
        table: the edited table.
        loss_scale: the loss scale.
        trained: how many steps the model is trained before.
        rate: the learning rate of these.
        over: what the loss is divided by, as in the sum of the gradients of so many batches.
        also: what else names it, `Case.also`.
        options: of the model, with the fault and without it.
    """
    places = (at,) if isinstance(at, str) else at
    if plant is None and table is None and loss_scale is None:
        plant = at_fault(places[0], what)
    for dtype in dtypes:
        where = "" if places[0] in ("", OUTSIDE) else f" in {places[0]}"
        given = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
        yield Case(
            name=f"{model}({given}) {SHORT[dtype]}: {what}{where}",
            kind=kind,
            model=model,
            build=Builder(model, dtype, options, plant, table, loss_scale, trained, rate, over),
            sound=Builder(model, dtype, options, trained=trained, rate=rate, over=over),
            modules=places,
            operators=tuple(operators.split()),
            direction=direction,
            also=also,
            must_show_loss=kind == "loss scale",
        )


DEFAULT = casting.DEFAULT
BF16, FP16 = (BFLOAT16,), (FLOAT16,)
SOFTMAX, BY_HAND = "softmax to", "to sub exp sum div amax"
NORM = "layer_norm group_norm to"
SQUARES = "to mul pow mean sub rsqrt sqrt clamp_min div"


def _softmaxes() -> Iterator[Case]:
    kind = "softmax"
    gpt: dict[str, Any] = {"upcast": True, "shared": 5.0}
    yield from planted(kind, "gpt", "low softmax", "blocks.1.attention", SOFTMAX, **gpt)
    yield from planted(kind, "gpt", "softmax by hand", "blocks.0.attention", BY_HAND, **gpt)
    shared: dict[str, Any] = {"upcast": True, "shared": 4.0}
    yield from planted(kind, "llama", "softmax without maximum", "blocks.0.attention", BY_HAND, **shared)
    yield from planted(kind, "mixture", "low softmax", "blocks.0.feed_forward.router", SOFTMAX, level=40.0)
    yield from planted(kind, "mixture", "low softmax", "blocks.1.feed_forward.router", SOFTMAX, level=100.0)
    yield from planted(kind, "t5", "low softmax", "blocks.0.attention", SOFTMAX, bias=300.0)
    yield from planted(kind, "t5", "softmax by hand", "blocks.1.attention", BY_HAND, bias=500.0)


def _norms() -> Iterator[Case]:
    kind = "norm"
    yield from planted(kind, "gpt", "low norm", "blocks.0.first", NORM, offset=80.0)
    yield from planted(kind, "gpt", "variance of squares", "blocks.1.second", SQUARES, offset=5.5)
    yield from planted(kind, "gpt", "low deviations", "last", SQUARES, offset=15.0)
    yield from planted(kind, "llama", "low norm", "last", SQUARES, dtypes=FP16, grown=150.0)
    yield from planted(kind, "resnet", "variance of squares", "stages.0.norm", SQUARES, offset=10.0)


def _losses() -> Iterator[Case]:
    kind = "loss"
    cross = "to log_softmax nll_loss logsumexp exp sum log gather sub mean softmax neg"
    square = "to sub pow mean sum mul add div"
    gpt: dict[str, Any] = {"upcast_head": True, "sharp": 8.0, "trained": 40}
    yield from planted(kind, "gpt", "low log_softmax", "loss", cross, **gpt)
    more: dict[str, Any] = {"dtypes": FP16, "trained": 60}
    yield from planted(kind, "gpt", "logsumexp by hand", "loss", cross, upcast_head=True, sharp=8.0, **more)
    yield from planted(kind, "llama", "low logsumexp", "loss", cross, dtypes=FP16, sharp=6.0, trained=30)
    yield from planted(kind, "llama", "log of softmax", "loss", cross, dtypes=FP16, sharp=8.0)
    yield from planted(kind, "t5", "low log_softmax", OUTSIDE, cross, trained=100)
    bags: dict[str, Any] = {"activation": torch.nn.functional.gelu, "trained": 60, "rate": 2.0}
    yield from planted(kind, "bags", "low logsumexp", "loss", cross, **bags)
    yield from planted(kind, "autoencoder", "low error", "loss", square, level=10.0)
    yield from planted(kind, "recurrent", "low error", OUTSIDE, square, level=30.0)
    yield from planted(kind, "recurrent", "expanded", OUTSIDE, square, level=10.0)
    yield from planted(kind, "clip", "low logsumexp", "loss", cross, temperature=0.05, alike=True)
    yield from planted(kind, "clip", "exponentials", "loss", cross, temperature=0.06, alike=True)


def _logits() -> Iterator[Case]:
    kind, scores = "attention logits", "matmul mul softmax to"

    # The products before the scores are rounded as coarsely as these, and their errors grow as much.
    def before(at: str) -> tuple[tuple[str, str], ...]:
        return ((f"{at}.query", "linear"), (f"{at}.key", "linear"))

    for model, at, factor in (
        ("gpt", "blocks.0.attention", 20.0),
        ("llama", "blocks.1.attention", 40.0),
        ("t5", "blocks.0.attention", 22.0),
        ("mixture", "blocks.1.attention", 14.0),
    ):
        name = at.replace(".", "__")
        grown = scaled(**{f"{name}__query__weight": factor, f"{name}__key__weight": factor})
        yield from planted(kind, model, f"weights x {factor:g}", at, scores, plant=grown, also=before(at))
    for model, at, factor in (("gpt", "blocks.1.attention", 60.0), ("llama", "blocks.0.attention", 100.0)):
        many = at_fault(at, "logits", factor)
        yield from planted(kind, model, f"scores x {factor:g}", at, scores, plant=many, also=before(at))
    huge = scaled(blocks__1__attention__query__weight=600.0, blocks__1__attention__key__weight=600.0)
    yield from planted(kind, "gpt", "weights x 600", "blocks.1.attention", scores, plant=huge, dtypes=FP16)


def _feed_forwards() -> Iterator[Case]:
    kind, product = "feed-forward overflow", "linear mul relu gelu silu to"
    for model, at, up, down in (
        ("t5", "blocks.1.feed_forward", 500.0, 500.0),
        ("t5", "blocks.0.feed_forward", 2e5, 1e-2),
        ("gpt", "blocks.0.feed_forward", 600.0, 600.0),
        ("mixture", "blocks.1.feed_forward.experts.2", 600.0, 800.0),
    ):
        name = at.replace(".", "__")
        grown = scaled(**{f"{name}__up__weight": up, f"{name}__down__weight": down})
        yield from planted(kind, model, f"weights x {up:g}, {down:g}", at, product, dtypes=FP16, plant=grown)
    for layers, at in ((2, "blocks.1.feed_forward"), (3, "blocks.2.feed_forward")):
        name = at.replace(".", "__")
        grown = scaled(**{f"{name}__up__weight": 300.0, f"{name}__gate__weight": 300.0})
        what = "weights x 300"
        yield from planted(kind, "llama", what, at, product, dtypes=FP16, plant=grown, layers=layers)


def _scales() -> Iterator[Case]:
    for model, scale, over in (
        ("gpt", 1.0, 256),
        ("gpt", 2.0**26, 1),
        ("perceptron", 1.0, 512),
        ("perceptron", 2.0**24, 1),
        ("cnn", 2.0**-4, 64),
        ("resnet", 2.0**24, 1),
        ("recurrent", 1.0, 1024),
        ("state_space", 2.0**-3, 64),
        ("clip", 2.0**26, 1),
        ("variational", 1.0, 1024),
        ("bags", 2.0**-8, 64),
        ("mixture", 1.0, 512),
        ("llama", 2.0**28, 1),
        ("t5", 2.0**-6, 128),
    ):
        what = "no loss scale" if scale == 1 else f"loss scale 2^{math.log2(scale):g}"
        yield from planted(
            "loss scale", model, what, "", dtypes=FP16, direction="backward", loss_scale=scale, over=over
        )


def _flushed() -> Iterator[Case]:
    kind = "flushed gradients"
    for model, scale, around, factor in (
        ("perceptron", "behind.2", ("behind.2", "middle.2"), 1e-10),
        ("perceptron", "behind.4", ("behind.4", "middle.4"), 1e-11),
        ("resnet", "stages.1.scale", ("stages.1",), 1e-9),
        ("resnet", "stages.0.scale", ("stages.0",), 1e-10),
    ):
        name = scale.replace(".", "__")
        small = scaled(**{f"{name}__scale": factor})
        what = f"{scale} x {factor:g}"
        yield from planted(kind, model, what, around, dtypes=FP16, direction="backward", plant=small)
    sigmoid: dict[str, Any] = {"activation": torch.sigmoid}
    for model, at, layer, bias, over, options in (
        ("perceptron", "middle.1", "linear", -26.0, 1, sigmoid),
        ("perceptron", "middle.3", "linear", -24.0, 1, {**sigmoid, "width": 96}),
        ("bags", "hidden", "linear", 16.0, 1024, sigmoid),
        ("autoencoder", "decoder.0", "linear", 16.0, 1024, sigmoid),
        ("variational", "encoder", "linear", 16.0, 1024, sigmoid),
        ("recurrent", "cell", "gates", 16.0, 1, {}),
    ):
        saturated = shifted(**{f"{at.replace('.', '__')}__{layer}__bias": bias})
        what = f"saturated by {bias:g}"
        yield from planted(
            kind, model, what, at, dtypes=FP16, direction="backward", plant=saturated, over=over, **options
        )


def _long_sums() -> Iterator[Case]:
    kind, adds = "long sum", "add"
    yield from planted(kind, "summing", "low total", "total", adds, dtypes=BF16, chunks=1000)
    yield from planted(kind, "summing", "low total", "total", adds, dtypes=BF16, width=8, chunks=800)
    yield from planted(kind, "recurrent", "low total", "cell", adds, dtypes=BF16, length=240, pace=0.006)
    yield from planted(kind, "recurrent", "low total", "cell", adds, dtypes=BF16, length=120, pace=0.02)


def _tables() -> Iterator[Case]:
    kind = "table"
    edits: tuple[tuple[str, str, tuple[torch.dtype, ...], dict[str, Any]], ...] = (
        ("gpt", "layer_norm", BOTH, {"offset": 30.0}),
        ("gpt", "add", BOTH, {"offset": 40.0}),
        ("state_space", "sub", BOTH, {"pace": 2.0}),
        ("autoencoder", "mse_loss", BOTH, {"level": 60.0}),
        ("autoencoder", "add", BOTH, {"level": 40.0}),
        ("autoencoder", "sub", BOTH, {"level": 20.0}),
        ("clip", "logsumexp", BOTH, {"temperature": 0.05, "alike": True}),
        ("llama", "pow", FP16, {"grown": 300.0}),
        ("summing", "sum", FP16, {}),
        ("recurrent", "mse_loss", BOTH, {"level": 40.0}),
        ("recurrent", "add", BF16, {"length": 200, "pace": 0.01}),
    )
    for model, names, dtypes, options in edits:
        what, table = f"lower({names})", DEFAULT.lower(names)
        yield from planted(kind, model, what, "", names, dtypes=dtypes, table=table, **options)


def _cancellations() -> Iterator[Case]:
    kind, minus = "cancellation", "to add sub rsub"
    for model, at, fault, amount, operators in (
        ("perceptron", "middle.1", "low offset", 100.0, minus),
        ("perceptron", "middle.3", "difference of squares", 30.0, "to add sub rsub mul div"),
        ("perceptron", "middle.4", "one minus cosine", 0.1, "to mul cos sub rsub"),
        ("autoencoder", "encoder.0", "low offset", 12.0, minus),
        ("bags", "hidden", "difference of squares", 10.0, "to add sub rsub mul div"),
        ("mixture", "blocks.1.feed_forward.router", "low offset", 100.0, minus),
        ("variational", "encoder", "one minus cosine", 0.05, "to mul cos sub rsub"),
        ("summing", "out.0", "low offset", 200.0, minus),
        ("cnn", "norms.1", "low offset", 30.0, minus),
    ):
        plant = at_fault(at, fault, amount)
        yield from planted(kind, model, f"{fault} {amount:g}", at, operators, plant=plant)
    squares, divergence = "to pow sum add sub rsub mul matmul", "to pow exp add sub sum mul"
    yield from planted(kind, "clip", "low distances", "loss", squares, temperature=0.07)
    yield from planted(kind, "variational", "low divergence", "divergence", divergence, near=0.03, share=10.0)
    yield from planted(kind, "autoencoder", "expanded", "loss", "to mul sub add mean", level=10.0)


def _by_hand() -> Iterator[Case]:
    for model, code, dtypes, operators, options in by_hand.CODES:
        options = {"code": code, **options}
        yield from planted("by hand", model, "in half", "hand", operators, dtypes=dtypes, **options)


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
    *_by_hand(),
)
