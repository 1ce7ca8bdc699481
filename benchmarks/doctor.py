"""Whether the doctor names the cause: small runs that are broken on purpose, and healthy ones.

Run: python benchmarks/doctor.py [--json FILE] [--only NAME] [--seeds 3] [--without losses]

Each run trains a small network in PyTorch or JAX for a few hundred steps and takes about a second. The
doctor's first finding is compared with the cause that was built in: it has to name it, alone or among three.
`HELD_OUT` names the runs that were not looked at while the rules of 0.2 were written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor, nn

from preamp import Dynamic, Headroom, Static, Step, Trace
from preamp.doctor import Diagnosis, diagnose
from preamp.jax import (
    apply_gradients,
    exponent_histogram,
    flow_slot,
    last_step,
    loss_scaled,
    snapshot,
    step,
    value_and_grad,
    watch,
)
from preamp.jax import autocast as jax_autocast
from preamp.torch import GradScaler, Lens, autocast

ROWS, WIDTH, EVERY = 32, 16, 40
Build = Callable[[int], Trace]


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: what was done to it.
        cause: the kinds of finding that name its cause; empty for a healthy run.
        run: trains with a seed, and returns the trace.
    """

    name: str
    cause: tuple[str, ...]
    run: Build


CASES: dict[str, Case] = {}
HELD_OUT: set[str] = set()


def case(*cause: str, held_out: bool = False) -> Callable[[Build], Build]:
    """Register a run under its function's name."""

    def register(run: Build) -> Build:
        name = run.__name__.removeprefix("_")
        CASES[name] = Case(name, cause, run)
        if held_out:
            HELD_OUT.add(name)
        return run

    return register


# PyTorch


class Net(nn.Module):
    """Two hidden layers in three parts, `body`, `neck` and `head`, any of which can be made to misbehave."""

    def __init__(self, neck: Callable[[Tensor], Tensor] | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh())
        self.neck = Neck(width, neck)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return answers of shape (rows, 1)."""
        return self.head(self.neck(self.body(x)))


class Neck(nn.Module):
    """A layer, and a function applied to its output."""

    def __init__(self, width: int, after: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(width, width), after

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        hidden = torch.relu(self.linear(x))
        return self.after(hidden) if self.after else hidden


class TorchRun:
    """A training loop as users write it, recorded with a lens.

    The methods are its parts; a broken run replaces one of them.
    """

    def __init__(
        self,
        seed: int,
        *,
        model: Callable[[], nn.Module] = Net,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        lr: float = 0.05,
        steps: int = 240,
        policy: Any = None,
        dtype: torch.dtype | None = torch.float16,
        max_norm: float | None = math.inf,
        data: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
        before: Callable[[TorchRun, int], None] | None = None,
        after_backward: Callable[[TorchRun, int], None] | None = None,
        scaled: bool = True,
        batches: int = 12,
        about: dict[str, Any] | None = None,
        emulate: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.model = model()
        named = list(self.model.named_parameters())
        self.optimizer = optimizer(named) if optimizer else torch.optim.SGD(named, lr=lr, momentum=0.9)
        self.scaler = GradScaler("cpu", policy=policy or Dynamic(), enabled=scaled)
        self.steps, self.dtype, self.max_norm, self.loss = steps, dtype, max_norm, loss
        self.emulate = emulate
        self.data, self.before, self.after_backward = data, before, after_backward
        generator = torch.Generator().manual_seed(seed + 1)
        self.inputs = torch.randn(batches, ROWS, 8, generator=generator)
        self.targets = torch.sin(self.inputs[..., :1] * 2) + 0.1 * torch.randn(
            batches, ROWS, 1, generator=generator
        )
        told = {"precision": str(dtype).removeprefix("torch.") if dtype else "float32"}
        told["policy"] = repr(self.scaler.policy) if scaled else None
        self.trace = Trace(**{**told, **(about or {})})
        self.value = math.nan

    def train(self) -> Trace:
        """Train to the end."""
        torch.set_num_threads(1)
        lens = Lens(self.model, EVERY, scaler=self.scaler, on_snapshot=self.trace.add_snapshot)
        with lens:
            for index in range(self.steps):
                self.step(index)
        return self.trace

    def step(self, index: int) -> None:
        """Train on one batch."""
        if self.before:
            self.before(self, index)
        x, y = self.inputs[index % len(self.inputs)], self.targets[index % len(self.inputs)]
        if self.data:
            x, y = self.data(index, x, y)
        self.optimizer.zero_grad()
        if self.dtype is None:
            loss = self.loss(self.model(x), y)
        else:
            with autocast("cpu", self.dtype, emulate=self.emulate):
                loss = self.loss(self.model(x), y)
        self.value = float(loss.detach())
        self.scaler.scale(loss).backward()
        if self.after_backward:
            self.after_backward(self, index)
        if self.max_norm is None or not self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
        else:
            self.scaler.step(self.optimizer, max_norm=self.max_norm)
        self.scaler.update()
        done = self.scaler.last_step or Step(index, 1.0, finite=True, skipped=False)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not self.scaler.is_enabled() and gradients:
            zeros = sum(int((g == 0).sum()) for g in gradients) / sum(g.numel() for g in gradients)
            norm = float(torch.stack([g.norm() for g in gradients]).norm())
            done = done._replace(index=index, grad_norm=norm, zeros=zeros)
        if done.skipped:
            named = self.model.named_buffers()
            done = done._replace(buffers=tuple(name for name, one in named if not one.isfinite().all()))
        with warnings.catch_warnings():  # one of the runs restarts without its count on purpose
            warnings.filterwarnings("ignore", "the steps begin at 0 again")
            self.trace(done._replace(loss=self.value))


def torch_run(seed: int, **settings: Any) -> Trace:
    """Train a `TorchRun`."""
    return TorchRun(seed, **settings).train()


@case("learning rate")
def torch_sgd_learning_rate_too_high(seed: int) -> Trace:
    return torch_run(seed, lr=3.0)


@case("learning rate")
def torch_sgd_learning_rate_far_too_high(seed: int) -> Trace:
    return torch_run(seed, lr=300.0)


@case("learning rate", "dead units")
def torch_deep_net_diverges_without_norms(seed: int) -> Trace:
    def deep() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    return torch_run(seed, model=deep, lr=1.0, max_norm=None)


@case("learning rate", held_out=True)
def torch_learning_rate_jumps_late(seed: int) -> Trace:
    def jump(run: TorchRun, index: int) -> None:
        if index == 120:
            run.optimizer.param_groups[0]["lr"] = 5.0

    return torch_run(seed, before=jump)


@case("gradients not cleared", held_out=True)
def torch_gradients_are_never_cleared(seed: int) -> Trace:
    def keep(run: TorchRun, index: int) -> None:
        run.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]

    return torch_run(seed, before=keep, lr=0.3)


@case("learning rate")
def torch_bfloat16_diverges(seed: int) -> Trace:
    return torch_run(seed, lr=3.0, dtype=torch.bfloat16, policy=Static(1.0))


@case("learning rate", held_out=True)
def torch_float32_diverges_without_a_scaler(seed: int) -> Trace:
    return torch_run(seed, lr=3.0, dtype=None, scaled=False)


@case("forward overflow")
def torch_neck_overflows_from_step_41(seed: int) -> Trace:
    factor = [1.0]

    def turn(run: TorchRun, index: int) -> None:
        factor[0] = 3e5 if index >= 41 else 1.0

    return torch_run(seed, model=lambda: Net(lambda h: h * factor[0]), before=turn)


@case("forward overflow")
def torch_neck_overflows_from_the_start(seed: int) -> Trace:
    return torch_run(seed, model=lambda: Net(lambda h: h * 3e5))


@case("forward overflow", "forward NaN", held_out=True)
def torch_exponential_overflows_in_a_module(seed: int) -> Trace:
    return torch_run(seed, model=lambda: Net(lambda h: torch.exp(40 * h) / 1e3))


@case("forward overflow")
def torch_activations_drift_up_to_the_limit(seed: int) -> Trace:
    scale = [1.0]

    def grow(run: TorchRun, index: int) -> None:
        scale[0] *= 1.12

    # the next layer divides by what the neck multiplies with, so that the loss does not notice
    class Balanced(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.neck(self.body(x)) / scale[0])

    return torch_run(seed, model=lambda: Balanced(lambda h: h * scale[0]), before=grow)


@case("forward overflow", held_out=True)
def torch_attention_scores_without_a_root(seed: int) -> Trace:
    return torch_run(seed, model=lambda: Attention(sharp=600.0))


class Attention(nn.Module):
    """Attention over the rows of a batch."""

    def __init__(self, *, sharp: float = 0.25, mask: Tensor | None = None) -> None:
        super().__init__()
        self.embed, self.sharp, self.mask = nn.Linear(8, WIDTH), sharp, mask
        self.scores, self.head = Scores(sharp, mask), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return answers of shape (rows, 1)."""
        hidden = self.embed(x)
        return self.head(torch.softmax(self.scores(hidden), -1) @ hidden + hidden)


class Scores(nn.Module):
    """The scores of each row against every row, in the precision of the region."""

    def __init__(self, sharp: float, mask: Tensor | None) -> None:
        super().__init__()
        self.key, self.sharp, self.mask = nn.Linear(WIDTH, WIDTH), sharp, mask

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of shape (rows, rows)."""
        scores = (self.sharp * hidden) @ (self.sharp * self.key(hidden)).T
        return scores if self.mask is None else scores + self.mask


@case("forward NaN", "forward overflow")
def torch_attention_mask_of_minus_1e9(seed: int) -> Trace:
    blocked = torch.full((ROWS, ROWS), -1e9).half().float()  # what float16 makes of it
    blocked[5:, :4] = 0.0

    class Masked(Attention):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            weights = self.weigh(self.scores(hidden))
            return self.head(weights @ hidden + hidden)

    class Softmax(nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return torch.softmax(scores, -1)

    def make() -> nn.Module:
        model = Masked(mask=blocked)
        model.weigh = Softmax()
        return model

    return torch_run(seed, model=make)


@case("forward NaN")
def torch_divides_by_a_deviation_of_zero(seed: int) -> Trace:
    def normalize(h: Tensor) -> Tensor:
        flat = torch.cat([h[:-1], torch.zeros_like(h[-1:])])
        return (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)

    return torch_run(seed, model=lambda: Net(normalize))


@case("bad inputs", "bad targets")
def torch_one_bad_batch_in_each_epoch(seed: int) -> Trace:
    def spoil(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        if index % 24 == 7:
            x[3, 2] = math.nan
        return x, y

    return torch_run(seed, data=spoil)


@case("bad inputs", "bad targets")
def torch_one_bad_batch(seed: int) -> Trace:
    def spoil(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        if index == 77:
            x[3, 2] = math.nan
        return x, y

    return torch_run(seed, data=spoil)


@case("bad inputs", "bad targets")
def torch_nan_in_every_batch(seed: int) -> Trace:
    def spoil(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        x[5, 3] = math.nan
        return x, y

    return torch_run(seed, data=spoil)


@case("bad inputs", "bad targets", held_out=True)
def torch_bad_labels_in_some_batches(seed: int) -> Trace:
    chosen = torch.rand(400, generator=torch.Generator().manual_seed(seed)) < 0.05

    def spoil(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y = y.clone()
        if chosen[index]:
            y[1] = math.nan
        return x, y

    return torch_run(seed, data=spoil)


@case("NaN in backward")
def torch_root_of_zero_in_the_loss(seed: int) -> Trace:
    def rooted(answers: Tensor, y: Tensor) -> Tensor:
        error = (answers - y).square()
        kept = torch.cat([error[1:], 0.0 * error[:1]])
        return kept.sqrt().mean()

    return torch_run(seed, loss=rooted)


@case("NaN in backward", held_out=True)
def torch_norm_of_a_zero_vector_in_a_module(seed: int) -> Trace:
    def safe(h: Tensor) -> Tensor:
        row = torch.cat([h[:-1], 0.0 * h[-1:]])
        return h * row.square().sum(1, keepdim=True).sqrt()

    return torch_run(seed, model=lambda: Net(safe))


@case("NaN in backward")
def torch_where_hides_a_division_by_zero(seed: int) -> Trace:
    def hidden(answers: Tensor, y: Tensor) -> Tensor:
        error = (answers - y).square()
        gate = torch.arange(len(error)).unsqueeze(1) > 0
        return torch.where(gate, error / (error * gate), error).mean() + error.mean()

    return torch_run(seed, loss=hidden)


@case("loss function")
def torch_logarithm_of_zero_in_the_loss(seed: int) -> Trace:
    def crossed(answers: Tensor, y: Tensor) -> Tensor:
        share = torch.sigmoid(answers * 300)
        return -((y > 0) * share.log() + (y <= 0) * (1 - share).log()).mean()

    return torch_run(seed, loss=crossed)


@case("loss function", held_out=True)
def torch_sum_in_float16_overflows_in_the_loss(seed: int) -> Trace:
    return torch_run(seed, loss=lambda answers, y: ((300 * (answers - y)).half().square().sum()).float())


@case("gradient overflow", "NaN in backward")
def torch_one_parameter_has_an_infinite_gradient(seed: int) -> Trace:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * math.inf

    class Spoilt(Net):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + Bad.apply(self.shift)

    return torch_run(seed, model=Spoilt)


@case("gradient overflow", "gradient overflow", "learning rate")
def torch_recurrent_net_explodes(seed: int) -> Trace:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
            self.read = nn.Linear(8, WIDTH)
            nn.init.orthogonal_(self.cell.weight, gain=2.0)

        def forward(self, x: Tensor) -> Tensor:
            hidden = 1e-2 * self.read(x)
            for _ in range(14):
                hidden = torch.relu(self.cell(hidden))
            return self.head(hidden)

    return torch_run(seed, model=Recurrent, lr=0.05, steps=200)


@case("wrong start")
def torch_initial_scale_far_too_high(seed: int) -> Trace:
    return torch_run(seed, policy=Dynamic(init_scale=2.0**40, max_scale=2.0**60))


@case("scale too high", "gradient overflow", "NaN in backward", "scale too high")
def torch_static_scale_far_too_high(seed: int) -> Trace:
    return torch_run(seed, policy=Static(2.0**26))


@case("too high", "scale too high", "gradient overflow", "NaN in backward", held_out=True)
def torch_static_scale_a_little_too_high(seed: int) -> Trace:
    probe = torch_run(seed, policy=Headroom(), steps=120)
    amaxes = sorted(step.amax / step.scale for step in probe if step.amax)
    level = 2.0 ** math.ceil(math.log2(65504 / amaxes[len(amaxes) * 9 // 10]))
    return torch_run(seed, policy=Static(level))


@case("oscillating", "too high")
def torch_growth_interval_too_short(seed: int) -> Trace:
    return torch_run(seed, policy=Dynamic(growth_interval=8))


@case("backs off too far")
def torch_backoff_too_strong(seed: int) -> Trace:
    policy = Dynamic(backoff_factor=2.0**-20, growth_interval=100, init_scale=2.0**22, min_scale=2.0**-24)
    return torch_run(seed, policy=policy)


@case("scale too high", "gradient overflow", "NaN in backward", "scale at its floor")
def torch_scale_at_its_floor(seed: int) -> Trace:
    return torch_run(
        seed, policy=Dynamic(min_scale=1.0), loss=lambda a, y: 1e7 * nn.functional.mse_loss(a, y), lr=1e-9
    )


@case("at the ceiling", "too low")
def torch_scale_pinned_at_its_ceiling(seed: int) -> Trace:
    policy = Dynamic(init_scale=4.0, max_scale=4.0)
    return torch_run(seed, policy=policy, loss=lambda a, y: 1e-6 * nn.functional.mse_loss(a, y), lr=5e4)


@case("not scaled", "too low", "vanished")
def torch_static_scale_too_low(seed: int) -> Trace:
    return torch_run(seed, policy=Static(1.0), loss=lambda a, y: 1e-6 * nn.functional.mse_loss(a, y), lr=5e4)


@case("not scaled")
def torch_no_scaling_in_float16(seed: int) -> Trace:
    return torch_run(seed, scaled=False, loss=lambda a, y: 1e-6 * nn.functional.mse_loss(a, y), lr=5e4)


@case("optimizer")
def torch_adam_without_epsilon(seed: int) -> Trace:
    def half_dead() -> nn.Module:
        net = Net()
        with torch.no_grad():
            net.neck.linear.bias[:3] = -50.0  # dead units: their gradients are exactly 0
        return net

    return torch_run(
        seed,
        model=half_dead,
        optimizer=lambda named: torch.optim.Adam(named, lr=1e-3, eps=0.0, betas=(0.9, 0.0)),
    )


@case("lost scale")
def torch_resumed_without_the_scale(seed: int) -> Trace:
    large = {"loss": lambda a, y: 3e4 * nn.functional.mse_loss(a, y), "lr": 1e-6}
    run = TorchRun(seed, policy=Dynamic(init_scale=4.0), **large)
    for index in range(120):
        run.step(index)
    run.scaler, before = GradScaler("cpu"), run.trace
    run.trace = Trace(**before.about)
    for index in range(120):
        run.step(120 + index)
    again = (step._replace(index=120 + step.index) for step in run.trace)
    return Trace([*before, *again], **before.about)


@case("lost scale", "wrong start", held_out=True)
def torch_resumed_without_scale_and_count(seed: int) -> Trace:
    large = {"loss": lambda a, y: 3e4 * nn.functional.mse_loss(a, y), "lr": 1e-6}
    run = TorchRun(seed, policy=Dynamic(init_scale=4.0), **large)
    for index in range(120):
        run.step(index)
    run.scaler = GradScaler("cpu")
    for index in range(120):
        run.step(120 + index)
    return run.trace


@case("poisoned buffers")
def torch_batch_norm_keeps_an_inf(seed: int) -> Trace:
    def spoil(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 1e6 if index == 60 else x), y

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    return torch_run(seed, model=normed, data=spoil)


@case("learning rate zero", "other parameters", "cut off")
def torch_learning_rate_zero(seed: int) -> Trace:
    return torch_run(seed, lr=0.0)


@case("dead units", "vanished", "learning rate zero", "other parameters", "cut off")
def torch_every_unit_is_dead(seed: int) -> Trace:
    def dead() -> nn.Module:
        net = Net()
        with torch.no_grad():
            net.neck.linear.bias.fill_(-50.0)
            net.head.bias.requires_grad_(False)
            net.head.bias.zero_()
        return net

    return torch_run(
        seed,
        model=dead,
        optimizer=lambda named: torch.optim.SGD([p for p in named if p[1].requires_grad], lr=0.1),
    )


@case("learning rate zero", "other parameters", "cut off", held_out=True)
def torch_optimizer_has_other_parameters(seed: int) -> Trace:
    def swap(run: TorchRun, index: int) -> None:
        if index == 0:
            copy = Net()
            copy.load_state_dict(run.model.state_dict())
            for theirs, ours in zip(copy.parameters(), run.model.parameters(), strict=True):
                theirs.grad = torch.zeros_like(ours)
            run.optimizer = torch.optim.SGD(list(copy.named_parameters()), lr=0.1)
        for group in run.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)

    def clear(run: TorchRun, index: int) -> None:
        for group in run.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)

    return torch_run(seed, before=swap, after_backward=clear)


@case("loss spike")
def torch_loss_spikes_and_recovers(seed: int) -> Trace:
    def spike(run: TorchRun, index: int) -> None:
        if index == 150:
            with torch.no_grad():
                run.model.head.bias.add_(6.0)

    return torch_run(seed, before=spike, lr=0.01)


# JAX


def jax_run(
    seed: int,
    *,
    optimizer: optax.GradientTransformation | None = None,
    lr: float = 0.05,
    policy: Any = None,
    dtype: Any = jnp.float16,
    steps: int = 240,
    change: Callable[[Any, Any], Any] = lambda hidden, index: hidden,
    error: Callable[[Any, Any], Any] = lambda answers, y: jnp.mean((answers - y) ** 2),
    data: Callable[[int, Any, Any], tuple[Any, Any]] = lambda index, x, y: (x, y),
    max_norm: float | None = None,
) -> Trace:
    """Train a small network in a compiled step, and read the state after each."""
    key = jax.random.key(seed)
    shapes = [(8, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    params = [
        (jax.random.normal(k, shape) / shape[0] ** 0.5, jnp.zeros(shape[1]))
        for k, shape in zip(jax.random.split(key, 3), shapes, strict=True)
    ]
    rule = policy or Dynamic()
    scaled = loss_scaled(
        optimizer or optax.sgd(lr, momentum=0.9), rule, **({} if max_norm is None else {"max_norm": max_norm})
    )

    def loss(params: Any, x: Any, y: Any, index: Any) -> Any:
        (w1, b1), (w2, b2), (w3, b3) = params
        hidden = jax.nn.relu(jnp.tanh(x @ w1 + b1) @ w2 + b2)
        return error(change(hidden, index) @ w3 + b3, y)

    lowered = loss if dtype is None else jax_autocast(loss, dtype)
    run, state = jax.jit(step(lowered, scaled)), scaled.init(params)
    trace = Trace(policy=repr(rule), precision=jnp.dtype(dtype or jnp.float32).name)
    xs = jax.random.normal(jax.random.key(seed + 1), (12, ROWS, 8))
    ys = jnp.sin(2 * xs[..., :1])
    batches = [(xs[n], ys[n]) for n in range(12)]
    for index in range(steps):
        x, y = data(index, *batches[index % 12])
        value, params, state = run(params, state, x, y, index)
        trace(last_step(state)._replace(loss=float(value)))
    return trace


@case("learning rate")
def jax_learning_rate_too_high(seed: int) -> Trace:
    return jax_run(seed, lr=2.0, max_norm=math.inf) if False else jax_run(seed, lr=2.0)


@case("learning rate", held_out=True)
def jax_adam_learning_rate_too_high(seed: int) -> Trace:
    return jax_run(seed, optimizer=optax.adam(30.0))


@case("forward overflow")
def jax_hidden_layer_overflows(seed: int) -> Trace:
    return jax_run(seed, change=lambda h, index: h * jnp.where(index > 60, 3e5, 1.0).astype(h.dtype))


@case("forward overflow", "forward NaN", held_out=True)
def jax_exponential_overflows_from_the_start(seed: int) -> Trace:
    return jax_run(seed, change=lambda h, index: jnp.exp((30 * h).astype(jnp.float16)))


@case("bad inputs", "bad targets")
def jax_some_bad_batches(seed: int) -> Trace:
    return jax_run(seed, data=lambda n, x, y: (x.at[0, 0].set(jnp.nan), y) if n % 36 == 20 else (x, y))


@case("NaN in backward")
def jax_root_of_zero(seed: int) -> Trace:
    return jax_run(seed, error=lambda a, y: jnp.mean(jnp.sqrt((a - y).at[0].multiply(0.0) ** 2)))


@case("wrong start", held_out=True)
def jax_initial_scale_far_too_high(seed: int) -> Trace:
    return jax_run(seed, policy=Dynamic(init_scale=2.0**50, max_scale=2.0**60))


@case("oscillating", "too high", held_out=True)
def jax_growth_interval_too_short(seed: int) -> Trace:
    return jax_run(seed, policy=Dynamic(growth_interval=5))


@case("scale at its floor", "scale too high", "gradient overflow", "NaN in backward", held_out=True)
def jax_loss_is_far_too_large(seed: int) -> Trace:
    return jax_run(
        seed, policy=Dynamic(min_scale=1.0), error=lambda a, y: 1e7 * jnp.mean((a - y) ** 2), lr=1e-9
    )


@case("learning rate zero", "other parameters", "cut off", held_out=True)
def jax_constant_loss(seed: int) -> Trace:
    return jax_run(seed, lr=0.0)


# Healthy


@case()
def healthy_torch(seed: int) -> Trace:
    return torch_run(seed)


@case()
def healthy_torch_headroom(seed: int) -> Trace:
    return torch_run(seed, policy=Headroom())


@case()
def healthy_torch_bfloat16(seed: int) -> Trace:
    return torch_run(seed, dtype=torch.bfloat16, policy=Static(1.0))


@case()
def healthy_torch_float32(seed: int) -> Trace:
    return torch_run(seed, dtype=None, scaled=False)


@case()
def healthy_torch_adamw_clipped(seed: int) -> Trace:
    return torch_run(seed, optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3), max_norm=1.0, steps=400)


@case()
def healthy_torch_noisy_loss(seed: int) -> Trace:
    generator = torch.Generator().manual_seed(seed)

    def noise(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.randn(x.shape, generator=generator)
        return x, y + torch.randn(y.shape, generator=generator) * float(
            torch.rand(1, generator=generator)
        ) * 4

    return torch_run(seed, data=noise, lr=0.002)


@case()
def healthy_torch_rare_overflows(seed: int) -> Trace:
    def heavy(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x, y * 40) if index in (90, 210) else (x, y)

    policy = Dynamic(init_scale=2.0**13, growth_interval=200)
    return torch_run(seed, data=heavy, policy=policy, lr=0.005, max_norm=1.0, steps=300)


@case(held_out=True)
def healthy_torch_fine_tuning(seed: int) -> Trace:
    def pretrained() -> nn.Module:
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(seed))
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), torch.sin(2 * x[:, :1])).backward()
            optimizer.step()
        return net

    return torch_run(seed, model=pretrained, optimizer=lambda n: torch.optim.AdamW(n, lr=1e-4), max_norm=1.0)


@case(held_out=True)
def healthy_torch_classification_to_zero_loss(seed: int) -> Trace:
    def loss(answers: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(answers, (y > 0).float())

    return torch_run(seed, loss=loss, optimizer=lambda n: torch.optim.Adam(n, lr=2e-2), batches=2, steps=400)


@case(held_out=True)
def healthy_torch_negative_loss(seed: int) -> Trace:
    return torch_run(seed, loss=lambda a, y: -5.0 - torch.exp(-((a - y) ** 2)).mean(), lr=0.02)


@case(held_out=True)
def healthy_torch_warmup(seed: int) -> Trace:
    def warm(run: TorchRun, index: int) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, index / 80)

    return torch_run(seed, before=warm, policy=Dynamic(growth_interval=150), steps=400)


@case()
def healthy_jax(seed: int) -> Trace:
    return jax_run(seed)


@case()
def healthy_jax_bfloat16(seed: int) -> Trace:
    return jax_run(seed, dtype=jnp.bfloat16, policy=Static(1.0))


@case(held_out=True)
def healthy_jax_adam_headroom(seed: int) -> Trace:
    return jax_run(seed, optimizer=optax.adamw(3e-3), policy=Headroom(), max_norm=1.0)


# Written after the rules, to see what they make of causes that they were not written for


@case("learning rate", held_out=True)
def torch_momentum_above_one(seed: int) -> Trace:
    return torch_run(seed, optimizer=lambda named: torch.optim.SGD(named, lr=0.02, momentum=1.1), steps=400)


@case("forward NaN", "bad inputs", "bad targets", held_out=True)
def jax_nan_in_every_batch(seed: int) -> Trace:
    return jax_run(seed, data=lambda n, x, y: (x.at[3].set(jnp.nan), y))


@case("learning rate", "gradient overflow", "gradient overflow", held_out=True)
def torch_targets_are_not_normalized(seed: int) -> Trace:
    return torch_run(seed, data=lambda n, x, y: (x, 1e5 * y))


@case("forward NaN", "bad inputs", "bad targets", "forward overflow", held_out=True)
def torch_root_of_a_negative_variance_now_and_then(seed: int) -> Trace:
    def spread(h: Tensor) -> Tensor:
        low = (h + 20.0).half()
        variance = (low * low).mean(1, keepdim=True) - low.mean(1, keepdim=True) ** 2
        return h / (variance - 0.2).sqrt()

    return torch_run(seed, model=lambda: Net(spread))


@case("clipped while scaled", "learning rate zero", "other parameters", "cut off", held_out=True)
def torch_clips_scaled_gradients(seed: int) -> Trace:
    def clip(run: TorchRun, index: int) -> None:
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)

    return torch_run(seed, after_backward=clip)


@case("vanished", "too low", "dead units", held_out=True)
def jax_scale_far_below_one(seed: int) -> Trace:
    return jax_run(seed, policy=Static(2.0**-24))


@case("slow to back off", "wrong start", held_out=True)
def torch_hysteresis_far_too_high(seed: int) -> Trace:
    return torch_run(seed, policy=Dynamic(init_scale=2.0**19, hysteresis=12))


@case("forward overflow", held_out=True)
def torch_first_weights_are_far_too_large(seed: int) -> Trace:
    def large() -> nn.Module:
        net = Net()
        with torch.no_grad():
            net.neck.linear.weight.mul_(3e6)
        return net

    return torch_run(seed, model=large)


@case("gradients not cleared", "another rank", held_out=True)
def torch_another_rank_is_not_finite(seed: int) -> Trace:
    def average(run: TorchRun, index: int) -> None:
        if index > 30:
            for parameter in run.model.parameters():
                parameter.grad.add_(math.inf)

    return torch_run(seed, after_backward=average)


@case("NaN in backward", held_out=True)
def jax_norm_of_zeros_after_a_while(seed: int) -> Trace:
    def error(answers: Any, y: Any) -> Any:
        return jnp.mean((answers - y) ** 2) + 1e-3 * jnp.linalg.norm(0.0 * answers)

    return jax_run(seed, error=error)


@case("learning rate", held_out=True)
def jax_weight_growth_in_bfloat16(seed: int) -> Trace:
    return jax_run(
        seed,
        optimizer=optax.chain(optax.add_decayed_weights(-5.0), optax.sgd(0.1)),
        dtype=jnp.bfloat16,
        policy=Static(1.0),
        steps=300,
    )


@case("bad inputs", "bad targets", held_out=True)
def torch_extreme_inputs_now_and_then(seed: int) -> Trace:
    chosen = torch.rand(400, generator=torch.Generator().manual_seed(seed)) < 0.04

    def spoil(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 1e6 if chosen[index] else x), y

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    return torch_run(seed, data=spoil, model=plain)


@case(held_out=True)
def healthy_torch_mask_of_minus_infinity(seed: int) -> Trace:
    mask = torch.zeros(ROWS, ROWS).masked_fill(torch.triu(torch.ones(ROWS, ROWS), 1) > 0, -math.inf)
    return torch_run(seed, model=lambda: Attention(mask=mask), lr=0.02)


@case(held_out=True)
def healthy_torch_restarts_of_the_learning_rate(seed: int) -> Trace:
    def schedule(run: TorchRun, index: int) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * (index % 80) / 80)) / 2 + 1e-4

    return torch_run(seed, before=schedule, steps=400)


@case(held_out=True)
def healthy_torch_adversarial(seed: int) -> Trace:
    sign = [1.0]

    def turn(run: TorchRun, index: int) -> None:
        sign[0] = 1.0 if index % 40 < 30 else -1.0

    return torch_run(
        seed, before=turn, loss=lambda a, y: sign[0] * nn.functional.mse_loss(torch.tanh(a), y), lr=5e-3
    )


@case(held_out=True)
def healthy_torch_dropout_and_new_data(seed: int) -> Trace:
    generator = torch.Generator().manual_seed(seed)

    def fresh(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.randn(x.shape, generator=generator)
        return x, torch.sin(2 * x[:, :1])

    return torch_run(
        seed,
        data=fresh,
        model=lambda: Net(nn.Dropout(0.3)),
        optimizer=lambda n: torch.optim.AdamW(n, lr=1e-2),
        max_norm=1.0,
        steps=400,
    )


@case("dead units", "forward overflow", held_out=True)
def torch_variance_overflows_in_a_norm(seed: int) -> Trace:
    def normalize(h: Tensor) -> Tensor:
        large = 400.0 * (h + 1.0)
        return large / large.square().mean(1, keepdim=True).sqrt()

    return torch_run(seed, model=lambda: Net(normalize))


@case("NaN in backward", held_out=True)
def torch_cosine_of_a_zero_row(seed: int) -> Trace:
    def cosine(answers: Tensor, y: Tensor) -> Tensor:
        rows = torch.cat([answers, 0.0 * answers], 1)
        rows = torch.cat([rows[1:], 0.0 * rows[:1]])
        return (rows / (rows.square().sum(1, keepdim=True).sqrt() + 1e-6)).mean() + (
            answers - y
        ).square().mean()

    return torch_run(seed, loss=cosine)


@case("learning rate", held_out=True)
def torch_no_warmup_in_a_deep_net(seed: int) -> Trace:
    def deep() -> nn.Module:
        layers = [part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1))

    return torch_run(seed, model=deep, lr=8.0)


@case("oscillating", "too high", "backs off too far", held_out=True)
def torch_growth_factor_far_too_large(seed: int) -> Trace:
    return torch_run(seed, policy=Dynamic(growth_factor=2.0**10, backoff_factor=2.0**-10, growth_interval=20))


@case("bad inputs", "bad targets", held_out=True)
def torch_infinite_target_once(seed: int) -> Trace:
    def spoil(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (
            (x, torch.where(torch.arange(len(y)).unsqueeze(1) == 3, math.inf, y)) if index == 130 else (x, y)
        )

    return torch_run(seed, data=spoil)


@case(
    "not scaled",
    "vanished",
    "too low",
    "learning rate zero",
    "other parameters",
    "cut off",
    held_out=True,
)
def torch_saturated_sigmoids(seed: int) -> Trace:
    def deep() -> nn.Module:
        layers = [part for _ in range(12) for part in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid())]
        return nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1))

    return torch_run(seed, model=deep, policy=Static(1.0))


@case("loss function", held_out=True)
def torch_exponential_in_the_loss(seed: int) -> Trace:
    return torch_run(seed, loss=lambda a, y: torch.exp(((a - y) * 40).half().square()).float().mean())


@case("stopped learning", "learning rate", held_out=True)
def jax_adam_without_decay_of_the_second_moment(seed: int) -> Trace:
    return jax_run(seed, optimizer=optax.chain(optax.scale_by_rms(decay=0.0, eps=1e-12), optax.scale(-3.0)))


@case(held_out=True)
def healthy_torch_small_loss(seed: int) -> Trace:
    return torch_run(seed, loss=lambda a, y: 0.01 * nn.functional.mse_loss(a, y), lr=1.0, policy=Headroom())


# Written after runs of other engineers, who did not know the rules


@case("bad inputs", "bad targets")
def torch_placeholder_in_the_targets(seed: int) -> Trace:
    def spoil(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y = y.clone()
        if index >= 120:
            y[::9] = 1e30
        return x, y

    return torch_run(seed, data=spoil)


@case("bad inputs", "bad targets")
def torch_inputs_in_other_units_from_some_step_on(seed: int) -> Trace:
    return torch_run(seed, data=lambda n, x, y: (x * 1e7 if n >= 120 else x, y), model=lambda: Net(torch.exp))


@case("forward NaN")
def torch_unit_length_of_zero_rows_now_and_then(seed: int) -> Trace:
    chosen = torch.rand(400, generator=torch.Generator().manual_seed(seed)) < 0.1
    now = [0]

    def count(run: TorchRun, index: int) -> None:
        now[0] = index

    def unit(h: Tensor) -> Tensor:
        h = torch.cat([h[:-1], 0.0 * h[-1:]]) if chosen[now[0]] else h
        return h / h.square().sum(1, keepdim=True).sqrt()

    return torch_run(seed, model=lambda: Net(lambda h: unit(h + 0.1)), before=count)


@case("NaN in backward")
def jax_distance_of_equal_rows_now_and_then(seed: int) -> Trace:
    def repeat(index: int, x: Any, y: Any) -> tuple[Any, Any]:
        y = y.at[:].add(0.01 * jnp.arange(len(y))[:, None])
        return x, y.at[0].set(99.0 if index % 7 not in (2, 5) or index < 60 else y[1])

    def pair(answers: Any, y: Any) -> Any:
        same = y[0] == y[1]
        distance = jnp.sqrt(jnp.sum(((answers[0] - answers[1]) * (1 - same)) ** 2))
        return jnp.mean((answers[2:] - y[2:]) ** 2) + 1e-3 * distance

    return jax_run(seed, error=pair, data=repeat)


@case("NaN in backward")
def torch_root_of_what_rounds_to_zero(seed: int) -> Trace:
    class Rooted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.root = Root()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.root(self.neck(self.body(x))))

    return torch_run(seed, model=Rooted)


class Root(nn.Module):
    """A root whose derivative at 0 is inf: the square of a small number rounds to 0 in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.square = Squares()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return self.square(torch.relu(x)).sqrt()


class Squares(nn.Module):
    """Squares."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return x.square()


@case("gradient overflow")
def torch_sum_of_squares_of_large_targets(seed: int) -> Trace:
    def summed(answers: Tensor, y: Tensor) -> Tensor:
        return (answers.float() - 1e7 * y).square().sum() * 1e3

    return torch_run(seed, loss=summed, lr=1e-20)


@case("gradients not cleared")
def torch_clears_the_head_alone(seed: int) -> Trace:
    def keep(run: TorchRun, index: int) -> None:
        run.optimizer.zero_grad = run.model.head.zero_grad  # type: ignore[method-assign, union-attr]

    def error(answers: Tensor, y: Tensor) -> Tensor:
        steps[0] += 1
        return nn.functional.mse_loss(answers, y) * (1e12 if steps[0] == 90 else 1.0)

    steps = [0]
    return torch_run(seed, before=keep, loss=error, lr=1e-3)


@case("dead units", "learning rate")
def torch_units_die_in_one_large_step(seed: int) -> Trace:
    def kill(run: TorchRun, index: int) -> None:
        if index == 60:
            with torch.no_grad():
                run.model.neck.linear.bias.sub_(30.0)  # type: ignore[union-attr]

    return torch_run(seed, before=kill)


@case("learning rate", "loss spike")
def torch_rate_jumps_in_bfloat16(seed: int) -> Trace:
    def jump(run: TorchRun, index: int) -> None:
        if index == 100:
            run.optimizer.param_groups[0]["lr"] = 3.0

    return torch_run(
        seed,
        before=jump,
        dtype=torch.bfloat16,
        policy=Static(1.0),
        optimizer=lambda named: torch.optim.Adam(named, lr=1e-2),
    )


@case("stopped learning", "learning rate zero", "other parameters", "cut off")
def torch_schedule_ends_at_half(seed: int) -> Trace:
    def end(run: TorchRun, index: int) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.05 if index < 120 else 0.0

    return torch_run(seed, before=end, optimizer=lambda named: torch.optim.SGD(named, lr=0.05))


@case("loss spike")
def torch_a_shard_of_wrong_labels(seed: int) -> Trace:
    def shift(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, 30.0 + y if 150 <= index < 162 else y

    return torch_run(seed, data=shift, lr=0.005, max_norm=1.0, steps=300)


@case("not scaled")
def torch_no_scaler_and_nothing_told(seed: int) -> Trace:
    known = torch_run(seed, scaled=False, loss=lambda a, y: 1e-6 * nn.functional.mse_loss(a, y), lr=5e4)
    trace = Trace(known)
    trace.snapshots = list(known.snapshots)
    return trace


@case("slow to back off")
def torch_waits_for_twelve_overflows(seed: int) -> Trace:
    return torch_run(seed, policy=Dynamic(init_scale=2.0**19, hysteresis=12), steps=300)


@case("loss function")
def torch_logarithm_of_saturated_answers(seed: int) -> Trace:
    def crossed(answers: Tensor, y: Tensor) -> Tensor:
        share = torch.sigmoid(answers.half())
        return -((y > 0) * share.log() + (y <= 0) * (1 - share).log()).float().mean()

    return torch_run(seed, loss=crossed, optimizer=lambda named: torch.optim.Adam(named, lr=3e-2), batches=4)


@case("optimizer")
def jax_adam_without_epsilon(seed: int) -> Trace:
    def blank(index: int, x: Any, y: Any) -> tuple[Any, Any]:
        return x.at[:, 3].set(0.0 if index >= 50 else x[:, 3]), y

    return jax_run(seed, optimizer=optax.adam(1e-3, b1=0.0, b2=0.0, eps=0.0), data=blank)


@case()
def healthy_torch_hinge_loss_reaches_zero(seed: int) -> Trace:
    return torch_run(
        seed,
        loss=lambda a, y: torch.relu(0.5 - a * y.sign()).float().mean(),
        optimizer=lambda named: torch.optim.Adam(named, lr=2e-2),
        batches=2,
        steps=400,
    )


@case()
def healthy_torch_sparse_outputs(seed: int) -> Trace:
    def sparse() -> nn.Module:
        net = Net(width=64)
        with torch.no_grad():
            net.neck.linear.bias.sub_(0.8)
        return net

    return torch_run(seed, model=sparse, lr=0.01)


@case()
def healthy_torch_head_begins_at_zero(seed: int) -> Trace:
    def zero() -> nn.Module:
        net = Net()
        with torch.no_grad():
            net.head.weight.zero_()
        return net

    return torch_run(seed, model=zero, lr=0.02)


@case()
def healthy_torch_inputs_of_many_sizes(seed: int) -> Trace:
    generator = torch.Generator().manual_seed(seed)

    def vary(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 4.0 ** float(torch.randn(1, generator=generator)), y

    return torch_run(seed, data=vary, lr=0.01, max_norm=1.0)


@case()
def healthy_torch_rare_large_gradients(seed: int) -> Trace:
    def hard(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y + 3.0 if index > 150 and index % 31 == 0 else y

    return torch_run(seed, data=hard, lr=0.005, max_norm=1.0, steps=400)


@case()
def healthy_jax_two_rates(seed: int) -> Trace:
    return jax_run(seed, optimizer=optax.sgd(optax.join_schedules([lambda n: 0.05, lambda n: 0.005], [120])))


# JAX, with snapshots of gradients, flows and activations, each recorded by itself

Loss = Callable[..., Any]
"""A function of the parameters, of a `Tap` and of a batch."""


class Tap:
    """Names the outputs of layers, and watches the gradients that flow back through them."""

    def __init__(self, slots: dict[str, Any] | None = None) -> None:
        self.slots, self.outputs = slots, dict[str, Any]()

    def __call__(self, name: str, x: Any) -> Any:
        """Return `x`."""
        self.outputs[name] = x
        return x if self.slots is None else watch(x, self.slots[name])


def jax_seen(
    seed: int,
    loss: Loss,
    params: Any,
    batch: Callable[[Any, int], Sequence[Any]],
    optimizer: optax.GradientTransformation,
    *,
    steps: int = 200,
    policy: Any = None,
    dtype: Any = jnp.float16,
    lowered: bool = True,
    every: int = EVERY,
    carried: Callable[[Any], Any] | None = None,
) -> Trace:
    """Train in a loop as users write it, with snapshots of every 40th step and when skipping begins.

    Args:
        seed: the seed of the batches.
        loss: the loss function.
        params: a tree of parameters.
        batch: makes a batch from a generator and the number of the step.
        optimizer: the optimizer that `loss_scaled` wraps.
        steps: how many steps to train.
        policy: a rule for the scale.
        dtype: the dtype of autocast.
        lowered: whether to use autocast.
        every: how often to take a snapshot.
        carried: applied to the summed gradients before the next are added; None drops them.
    """
    rule, generator = policy or Dynamic(), np.random.default_rng(seed + 1000)
    scaled, trace = loss_scaled(optimizer, rule), Trace(policy=repr(rule))

    def tapped(params: Any, slots: Any, *batch: Any) -> Any:
        tap = Tap(slots)
        return loss(params, tap, *batch), tap.outputs

    def outputs(*given: Any) -> Any:
        return tapped(given[0], None, *given[1:])[1]

    @jax.jit
    def run(params: Any, state: Any, slots: Any, kept: Any, *batch: Any) -> Any:
        low = jax_autocast(tapped, dtype) if lowered else tapped
        both = value_and_grad(low, argnums=(0, 1), has_aux=True)
        scale = state.policy_state.scale
        (_, seen), (total, flows), state = both(params, state, slots, *batch)
        gradients = jax.tree.map(lambda one: one * scale, total)
        counts = exponent_histogram(gradients), flows, exponent_histogram(seen)
        total = total if kept is None else jax.tree.map(jnp.add, kept, total)
        params, state = apply_gradients(scaled, total, state, params)
        return params, state, counts, total

    state, slots, kept, was_skipped = scaled.init(params), None, None, False
    for index in range(steps):
        given = [jnp.asarray(one) for one in batch(generator, index)]
        slots = slots or {name: flow_slot() for name in jax.eval_shape(outputs, params, *given)}
        params, state, counts, total = run(params, state, slots, kept, *given)
        done = last_step(state)
        if index % every == 0 or (done.skipped and not was_skipped):
            for what, counted in zip(("gradient", "flow", "activation"), counts, strict=True):
                trace.add_snapshot(snapshot(counted, index=index, scale=done.scale, what=what))
        kept, was_skipped = (carried(total) if carried else None), done.skipped
        trace(done)
    return trace


def jax_dense(generator: Any, *sizes: int, gain: float = 1.4) -> dict[str, Any]:
    """Return the parameters of a stack of layers."""
    return {
        f"layer{place}": {
            "w": jnp.asarray(generator.normal(size=shape) * gain / math.sqrt(shape[0]), jnp.float32),
            "b": jnp.zeros(shape[1]),
        }
        for place, shape in enumerate(itertools.pairwise(sizes))
    }


def jax_layers(params: Any, tap: Tap, x: Any, act: Callable[[Any], Any] = jax.nn.relu) -> Any:
    """Return the output of a stack of layers."""
    for place, (name, one) in enumerate(params.items()):
        x = tap(name, (act(x) if place else x) @ one["w"] + one["b"])
    return x


def jax_classes(seed: int, width: int = 16, count: int = 5) -> Callable[[Any, int], Sequence[Any]]:
    """Return a function that makes batches of points and their classes."""
    truth = np.random.default_rng(seed).normal(size=(width, count))

    def batch(generator: Any, index: int) -> Sequence[Any]:
        x = generator.normal(size=(ROWS, width)).astype("float32")
        return x, (x @ truth).argmax(1).astype("int32")

    return batch


def jax_cross_entropy(params: Any, tap: Tap, x: Any, y: Any) -> Any:
    """Return the cross-entropy of a stack of layers."""
    answers = jax_layers(params, tap, x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(answers, y).mean()


@case("forward overflow")
def jax_answers_in_dollars(seed: int) -> Trace:
    generator = np.random.default_rng(seed)

    def batch(generator: Any, index: int) -> Sequence[Any]:
        x = generator.normal(size=(ROWS, 8)).astype("float32")
        return x, (47000 + 12000 * (np.tanh(x[:, 0]) + 0.8 * x[:, 3])).astype("float32")

    def loss(params: Any, tap: Tap, x: Any, y: Any) -> Any:
        hidden = jax.nn.relu(tap("layer0", x @ params["layer0"]["w"] + params["layer0"]["b"]))
        ones = jnp.ones((len(x), 1), hidden.dtype)
        last = params["layer1"]["w"] * 12000, params["layer1"]["b"][None] * 12000 + 47000
        dollars = tap("layer1", jnp.concatenate([hidden, ones], 1) @ jnp.concatenate(last))[:, 0]
        return jnp.mean(((dollars.astype(jnp.float32) - y) / 12000) ** 2)

    return jax_seen(seed, loss, jax_dense(generator, 8, 32, 1, gain=0.3), batch, optax.adam(2e-3), steps=260)


@case("forward NaN")
def jax_unit_length_of_rows_without_a_live_unit(seed: int) -> Trace:
    generator = np.random.default_rng(seed)

    def loss(params: Any, tap: Tap, x: Any, y: Any) -> Any:
        first, second = params["layer0"], params["layer1"]
        hidden = jax.nn.relu(tap("layer0", x @ first["w"] + first["b"])).astype(jnp.float32)
        unit = tap("layer1", hidden / jnp.sqrt(jnp.sum(hidden**2, -1, keepdims=True)))
        answers = tap("layer2", unit @ second["w"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(answers, y).mean()

    params = jax_dense(generator, 8, 5, 3, gain=1.0)
    return jax_seen(seed, loss, params, jax_classes(seed, 8, 3), optax.adam(3e-3), steps=150, every=25)


@case("loss function")
def jax_sum_of_squares_in_float16(seed: int) -> Trace:
    generator = np.random.default_rng(seed)
    basis = generator.normal(size=(4, 32)) * 5

    def loss(params: Any, tap: Tap, x: Any) -> Any:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), (params, x))
        errors = jax_layers(half[0], tap, half[1], jnp.tanh) - half[1]
        return jnp.sum(errors * errors, dtype=jnp.float16)

    def batch(generator: Any, index: int) -> Sequence[Any]:
        return ((generator.normal(size=(64, 4)) @ basis).astype("float32"),)

    params = jax_dense(generator, 32, 16, 16, 32)
    return jax_seen(seed, loss, params, batch, optax.adam(1e-3), steps=120, lowered=False)


@case("too low")
def jax_constant_scale_for_tiny_gradients(seed: int) -> Trace:
    generator = np.random.default_rng(seed)
    basis = generator.normal(size=(3, 24)) * 5e-4

    def loss(params: Any, tap: Tap, x: Any) -> Any:
        return jnp.mean((jax_layers(params, tap, x, jnp.tanh).astype(jnp.float32) - x) ** 2)

    def batch(generator: Any, index: int) -> Sequence[Any]:
        return ((generator.normal(size=(256, 3)) @ basis).astype("float32"),)

    params = jax_dense(generator, 24, 16, 16, 24, gain=0.7)
    return jax_seen(seed, loss, params, batch, optax.adam(1e-3), policy=Static(4.0))


@case("too low")
def jax_small_weight_of_the_loss(seed: int) -> Trace:
    def loss(*given: Any) -> Any:
        return 1e-5 * jax_cross_entropy(*given)

    params = jax_dense(np.random.default_rng(seed), 16, 32, 32, 5)
    policy = Dynamic(init_scale=1.0)
    return jax_seen(seed, loss, params, jax_classes(seed), optax.adam(2e-3), policy=policy)


@case("dead units")
def jax_bias_of_the_head_in_a_hidden_layer(seed: int) -> Trace:
    params = jax_dense(np.random.default_rng(seed), 16, 32, 5)
    params["layer0"]["b"] -= 12.0
    return jax_seen(seed, jax_cross_entropy, params, jax_classes(seed), optax.adam(1e-3))


@case("gradients not cleared")
def jax_sums_are_multiplied_by_zero(seed: int) -> Trace:
    classes = jax_classes(seed)

    def batch(generator: Any, index: int) -> Sequence[Any]:
        x, y = classes(generator, index)
        return (x * 3e4 if index == 70 else x), y

    params = jax_dense(np.random.default_rng(seed), 16, 24, 5)
    policy = Dynamic(init_scale=2.0**13)

    def carried(gradients: Any) -> Any:
        return jax.tree.map(lambda one: one * 0.0, gradients)

    return jax_seen(seed, jax_cross_entropy, params, batch, optax.adam(3e-3), policy=policy, carried=carried)


@case("dragged down")
def jax_rare_wrong_labels(seed: int) -> Trace:
    classes = jax_classes(seed, 8, 3)

    def batch(generator: Any, index: int) -> Sequence[Any]:
        x, y = classes(generator, index)
        if generator.random() < 0.05:
            x[0], y[0] = x[0] * 4, (y[0] + 1) % 3
        return x, y

    def loss(params: Any, tap: Tap, x: Any, y: Any) -> Any:
        wide = jax.nn.softmax(jax_layers(params, tap, x).astype(jnp.float32))
        shares = tap("shares", wide.astype(jnp.float16)).astype(jnp.float32)
        return -jnp.mean(jnp.log(jnp.take_along_axis(shares, y[:, None], 1) + 1e-7))

    params = jax_dense(np.random.default_rng(seed), 8, 32, 3)
    policy = Dynamic(init_scale=2.0**15)
    return jax_seen(seed, loss, params, batch, optax.adam(1e-2), steps=450, policy=policy)


@case("learning rate", "stopped learning", "dead units")
def jax_rate_jumps_when_warmup_ends(seed: int) -> Trace:
    schedule = optax.join_schedules([lambda n: 0.003, lambda n: 0.8], [120])
    params = jax_dense(np.random.default_rng(seed), 16, 32, 32, 5)

    def loss(params: Any, tap: Tap, x: Any, y: Any) -> Any:
        answers = jax_layers(params, tap, x, jnp.tanh).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(answers, y).mean()

    return jax_seen(seed, loss, params, jax_classes(seed), optax.adam(schedule), policy=Dynamic(), steps=300)


@case()
def healthy_jax_loss_falls_to_nothing(seed: int) -> Trace:
    truth = np.random.default_rng(seed).normal(size=(4, 16)) * 1.5

    def batch(generator: Any, index: int) -> Sequence[Any]:
        y = generator.integers(0, 4, ROWS)
        return (truth[y] + generator.normal(size=(ROWS, 16))).astype("float32"), y.astype("int32")

    params = jax_dense(np.random.default_rng(seed), 16, 32, 4)
    policy = Dynamic(init_scale=2.0**11, growth_interval=100)
    return jax_seen(seed, jax_cross_entropy, params, batch, optax.sgd(0.05, momentum=0.9), policy=policy)


# Results


@dataclass(frozen=True)
class Result:
    """What the doctor said about a run."""

    name: str
    seed: int
    cause: tuple[str, ...]
    found: str
    severity: str
    sentence: str
    right: bool
    held_out: bool


def judge(case: Case, seed: int, found: Diagnosis) -> Result:
    """Return whether the first finding names the cause, or that a healthy run has none."""
    first = found.findings[0]
    right = bool({*first.kinds} & {*case.cause}) if case.cause else found.healthy
    words, kinds = " ".join(first.lines()), " or ".join(first.kinds) or first.kind
    return Result(case.name, seed, case.cause, kinds, first.severity, words, right, case.name in HELD_OUT)


def stripped(trace: Trace, without: Sequence[str]) -> Trace:
    """Return a trace as if less had been recorded: without losses, norms, names or snapshots."""
    dropped = {
        "losses": {"loss": None},
        "norms": {"grad_norm": None, "amax": None},
        "names": {"culprits": ()},
        "snapshots": {},
    }
    less: dict[str, Any] = {}
    for name in without:
        less.update(dropped[name])
    shorter = Trace((step._replace(**less) for step in trace), **trace.about)
    if "snapshots" not in without:
        shorter.snapshots = list(trace.snapshots)
    return shorter


def confusion(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table of built-in causes and of what was found first."""
    pairs = Counter((r.cause[0] if r.cause else "healthy", r.found) for r in results)
    width = max(len(cause) for cause, _ in pairs)
    for cause in dict.fromkeys(cause for cause, _ in sorted(pairs)):
        row = {found: count for (c, found), count in sorted(pairs.items()) if c == cause}
        yield f"{cause:{width}}  " + ", ".join(f"{found} {count}" for found, count in row.items())


def share(results: Sequence[Result]) -> str:
    """Return how many causes were named correctly."""
    right = sum(r.right for r in results)
    return f"{right} of {len(results)}" + (f" ({100 * right / len(results):.0f} %)" if results else "")


def main() -> None:
    """Run the cases, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", action="append", default=[], help="runs whose names begin so")
    parser.add_argument("--part", choices=("all", "written for", "held out"), default="all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--without", action="append", default=[], choices=("losses", "norms", "names", "snapshots")
    )
    given = parser.parse_args()
    results = []
    for case in CASES.values():
        if given.only and not any(case.name.startswith(name) for name in given.only):
            continue
        if given.part != "all" and (given.part == "held out") != (case.name in HELD_OUT):
            continue
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            start = time.perf_counter()
            trace = stripped(case.run(seed), given.without)
            taken = time.perf_counter() - start
            results.append(result := judge(case, seed, diagnose(trace)))
            mark = "ok " if result.right else "NOT"
            print(
                f"{mark} {case.name}, {seed} ({taken:.1f} s): {result.found} ({result.severity})", flush=True
            )
            if not result.right:
                print(f"      wanted {' or '.join(case.cause) or 'nothing'}; {result.sentence}")
    print("\ncause, and what was found first:")
    for line in confusion(results):
        print(f"  {line}")
    for held_out in (False, True):
        part = [r for r in results if r.held_out == held_out]
        broken, healthy = ([r for r in part if bool(r.cause) == sick] for sick in (True, False))
        print(
            f"{'held out' if held_out else 'written for'}: broken {share(broken)}, healthy {share(healthy)}"
        )
    if given.json:
        given.json.write_text(json.dumps([vars(result) for result in results], indent=1))
    sys.exit(0)


if __name__ == "__main__":
    main()
