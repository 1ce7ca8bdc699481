"""Random models in random trainings under a lens: training is as without one, and the numbers are right."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from preamp import Snapshot, Trace
from preamp.cli.app import run
from preamp.torch import GradScaler, Lens, autocast

some = settings(deadline=None, max_examples=6)
WIDTH = 4


class Residual(nn.Module):
    """Adds to its input what a layer makes of it, given by keyword, times a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.inner(input=x)


class Attention(nn.Module):
    """Owns parameters that are used without a call of the module that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([[0.0, -math.inf], [0.0, 0.0]]).repeat_interleave(len(x) // 2, 0)
        mask = mask.repeat_interleave(len(x) // 2, 1) if len(x) > 1 else None
        return self.inner(x, x, x, need_weights=False, attn_mask=mask)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.5),
    "residual": Residual,
    "attention": Attention,
    "nested": lambda: nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(WIDTH, WIDTH))),
    "huge": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Times(3e5)),
}


class Times(nn.Module):
    """Multiplies its input by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


kinds = st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=5)
moves = st.lists(st.sampled_from(["step", "step", "step", "no_grad", "no backward", "fails"]), max_size=8)


def build(names: list[str], tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in names)]
    if tied:
        layers.append(layers[0])  # one module, called twice
    return nn.Sequential(*layers)


def train(
    model: nn.Module, moves: list[str], low: str, lens: Callable[[nn.Module, GradScaler], Any]
) -> tuple[list[Tensor], list[Any]]:
    """Return the parameters and buffers after a training, and the scaler's steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    trace = Trace()
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2, on_step=trace)
    regions = {
        "float32": nullcontext,
        "float16": lambda: autocast("cpu", torch.float16),
        "emulated": lambda: autocast("cpu", torch.float16, emulate=True),
    }
    with lens(model, scaler):
        for move in moves:
            batch = torch.randn(2, 7 if move == "fails" else WIDTH)
            if move == "fails":
                with pytest.raises(RuntimeError):
                    model(batch)
                continue
            with torch.no_grad() if move == "no_grad" else nullcontext(), regions[low]():
                loss = model(batch).float().square().mean()
            if move == "step":
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())], list(trace)


@pytest.mark.filterwarnings("ignore:a skipped step left inf or NaN:UserWarning")  # as it may in a batch norm
@settings(deadline=None, max_examples=25)
@given(
    names=kinds,
    tied=st.booleans(),
    moves=moves,
    every=st.integers(1, 3),
    activations=st.booleans(),
    low=st.sampled_from(["float32", "float16", "emulated"]),
)
def test_a_lens_changes_nothing_and_its_snapshots_are_whole(
    names: list[str], tied: bool, moves: list[str], every: int, activations: bool, low: str
) -> None:
    snapshots: list[Snapshot] = []

    def lens(model: nn.Module, scaler: GradScaler) -> Lens:
        return Lens(model, every, scaler=scaler, on_snapshot=snapshots.append, activations=activations)

    model = build(names, tied)
    plain, steps = train(build(names, tied), moves, low, lambda *_: nullcontext())
    watched, watched_steps = train(model, moves, low, lens)
    assert all(
        torch.equal(one, other) or one.isnan().any() for one, other in zip(plain, watched, strict=True)
    )
    assert repr(steps) == repr(watched_steps)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    trace = Trace()
    for snapshot in snapshots:
        trace.add_snapshot(snapshot)  # which refuses what a file could not hold
        check(snapshot, model, activations)
        assert max(map(len, str(snapshot).splitlines())) <= 80


def check(snapshot: Snapshot, model: nn.Module, activations: bool) -> None:
    """Check what holds of every snapshot of a model."""
    rows = (*snapshot.rows, *snapshot.inputs, *snapshot.weights)
    assert bool(snapshot.inputs) == bool(snapshot.weights) == activations
    for row in rows:
        seen = row.histogram
        assert 0 <= (row.nans or 0) <= seen.nonfinite
        assert (row.smallest is None) == (row.largest is None) == (seen.nonzero == 0)
        if row.largest is not None and row.smallest is not None:
            assert row.smallest <= row.largest
            assert math.frexp(row.smallest)[1] - 1 == seen.low
            assert math.frexp(row.largest)[1] - 1 == seen.amax_exponent
    if activations:
        counted = sum(row.histogram.total for row in snapshot.weights)
        assert counted == sum(parameter.numel() for parameter in model.parameters())
        callers = {name for name, part in model.named_modules() if next(part.children(), None) is None}
        assert {row.name for row in snapshot.inputs} >= callers - {
            name for name in callers if "out_proj" in name
        }
    if snapshot.first_overflow is not None:
        place = [row.direction for row in snapshot.rows].index("backward")
        assert (snapshot.first_overflow.direction == "forward") == (
            snapshot.rows.index(snapshot.first_overflow) < place
        )


VALUES = {
    "--policy": ["headroom", "torch", "tf-keras", "torhc", "", "all"],
    "--rule": ["static", "nonsense"],
    "--dialect": ["flax", "flx"],
    "--policy.scale": ["8", "0", "x"],
    "--policy.growth-interval": ["3", "-1"],
    "--process": ["stationary", "calm"],
    "--steps": ["7", "0", "many"],
    "--seed": ["1", "-1"],
    "--overflow-rate": ["0.5", "2"],
}


@some
@given(
    st.lists(
        st.sampled_from(list(VALUES)).flatmap(lambda f: st.tuples(st.just(f), st.sampled_from(VALUES[f]))),
        max_size=4,
    )
)
def test_any_flags_of_simulate_give_a_table_or_one_line(
    tmp_path_factory: Any, flags: list[tuple[str, str]]
) -> None:
    arguments = [word for pair in flags for word in pair]
    out = tmp_path_factory.getbasetemp() / "simulated.html"
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = run(["simulate", *arguments, "--out", str(out)])
    assert status == (2 if said.getvalue() else 0)
    assert said.getvalue().count("\n") == (status == 2)
    assert "Traceback" not in said.getvalue()
