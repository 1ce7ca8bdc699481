"""Weights, inputs and extremes: what a lens measures besides histograms, beside NumPy and transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from preamp import Snapshot, SnapshotRow, Static
from preamp.torch import GradScaler, Lens, autocast

from .lens_models import CHUNK, X, add, count, histogram, mlp, read, seen

few = settings(deadline=None, max_examples=25)


def by_name(rows: tuple[SnapshotRow, ...]) -> dict[str, SnapshotRow]:
    named = {row.name: row for row in rows}
    assert len(named) == len(rows)
    return named


def extremes(*tensors: Tensor) -> tuple[float | None, float | None, int]:
    """Return the smallest magnitude above 0, the largest finite one, and how many are NaN, by NumPy."""
    flat = np.concatenate([tensor.detach().double().numpy().ravel() for tensor in tensors])
    finite = np.abs(flat[np.isfinite(flat)])
    above = finite[finite > 0]
    return (
        (float(above.min()), float(above.max()), int(np.isnan(flat).sum()))
        if above.size
        else (None, None, int(np.isnan(flat).sum()))
    )


def exact(row: SnapshotRow) -> tuple[float | None, float | None, int | None]:
    return row.smallest, row.largest, row.nans


@few
@given(
    bits=st.lists(st.integers(0, 2**64 - 1), max_size=40),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]),
    cut=st.integers(0, 40),
)
def test_extremes_and_nans_are_those_of_numpy(bits: list[int], dtype: torch.dtype, cut: int) -> None:
    size = dtype.itemsize
    whole = np.array(bits, np.uint64).astype(f"uint{8 * size}")
    tensor = torch.from_numpy(whole.view(f"int{8 * size}").copy()).view(dtype)
    measured = read([count(tensor), add(count(tensor[:cut]), count(tensor[cut:]))])[0]
    assert measured[0] == measured[1]
    assert (measured[0].smallest, measured[0].largest, measured[0].nans) == extremes(tensor)


BITS = {32: (0x7FFFFFFF, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 1, 0), 64: (2**63 - 1, 0x7FF << 52, 1, 0)}


@pytest.mark.parametrize("size", BITS)
def test_extremes_at_the_ends_of_the_range_alone_and_with_others(size: int) -> None:
    """NaN with any payload, inf, the largest and the smallest number, and 0, of either sign."""
    unsigned = [bits | sign for bits in BITS[size] for sign in (0, 1 << (size - 1))]
    every = torch.from_numpy(np.array(unsigned, f"uint{size}").view(f"float{size}"))
    for one in every:
        for others in (every[:0], torch.ones(1, dtype=every.dtype), every):
            (measured,), _ = read([add(count(one), count(others))])
            assert (measured.smallest, measured.largest, measured.nans) == extremes(one, others)


def test_extremes_of_many_pieces_are_those_of_the_whole() -> None:
    tensor = torch.randn(2 * CHUNK + 5)
    tensor[[3, CHUNK + 7, 2 * CHUNK + 1]] = torch.tensor([1e-30, math.nan, 1e30])
    (measured,), _ = read([count(tensor)])
    assert (measured.smallest, measured.largest, measured.nans) == extremes(tensor)


def test_inputs_and_weights_are_those_of_the_pass() -> None:
    model = mlp()
    snapshot = seen(model, X)
    hidden = model[0](X)
    inputs, weights = by_name(snapshot.inputs), by_name(snapshot.weights)
    for name, tensor in {"0": X, "1": hidden, "2": model[1](hidden)}.items():
        assert inputs[name].histogram == histogram(tensor)
        assert exact(inputs[name]) == extremes(tensor)
    for name in ("0", "2"):
        parameters = list(model[int(name)].parameters())
        assert weights[name].histogram == histogram(*parameters)
        assert exact(weights[name]) == extremes(*parameters)
    assert set(weights) == {"0", "2"}
    assert {row.what for row in snapshot.inputs} == {"input"}
    assert {row.what for row in snapshot.weights} == {"weight"}
    assert {row.direction for row in (*snapshot.inputs, *snapshot.weights)} == {"forward"}
    for row in snapshot.rows:
        assert row.direction == ("forward" if row.what == "activation" else "backward")
        assert row.largest is not None


def test_gradients_alone_have_neither_inputs_nor_weights() -> None:
    snapshot = seen(mlp(), X, activations=False)
    assert snapshot.inputs == snapshot.weights == ()


class Mixed(nn.Module):
    """Changes an input in place, calls with keywords, owns a parameter itself, and has a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.again.weight = self.first.weight
        self.relu, self.factor = nn.ReLU(inplace=True), nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Linear(3, 1).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(2, 2, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.again(input=self.first(x)))
        return self.frozen(out * self.factor)


def test_keywords_overwritten_inputs_and_parameters_of_several_modules() -> None:
    model = Mixed()
    snapshot = seen(model, X)
    inputs, weights = by_name(snapshot.inputs), by_name(snapshot.weights)
    hidden = model.first(X)
    clean = model.again(hidden)
    assert inputs["again"].histogram == histogram(hidden)
    assert inputs["relu"].histogram == histogram(clean)  # as it was before it was overwritten
    assert inputs[""].histogram == histogram(X)
    assert weights["first"].histogram == histogram(*model.first.parameters())
    assert "again" not in weights  # counted for the first that has it
    assert weights[""].histogram.total == 1
    assert weights["frozen"].histogram == histogram(*model.frozen.parameters())
    assert (weights["unused"].dtype, weights["unused"].histogram.total) == ("float16", 6)
    assert snapshot.low_dtype == "float16"


def test_a_weight_or_an_input_in_another_dtype_does_not_decide_what_overflows() -> None:
    model = nn.Linear(3, 1)
    model.extra = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    assert seen(model, X).low_dtype == "float16"


@pytest.mark.parametrize("emulate", [False, True])
def test_extremes_are_exact_in_regions_that_round(emulate: bool) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([1e30, 1e-30, 3.3333333])

    model = nn.Sequential(nn.Linear(3, 3), Wide())
    kept = []
    model[1].register_forward_hook(lambda *call: kept.append(call[2].detach().clone()))
    with autocast("cpu", torch.float16, emulate=emulate), Lens(model) as lens:
        model(X).sum().backward()
        snapshot = lens.last
    assert snapshot is not None
    rows = {row.name: row for row in snapshot.rows if row.what == "activation"}
    assert exact(rows["1"]) == extremes(*kept)


def test_a_tensor_that_nothing_tracks_can_be_an_input() -> None:
    with torch.inference_mode():
        batch = torch.ones(2, 3)
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 1).requires_grad_(requires_grad=False), Shift())
    with Lens(model) as lens:
        try:
            model(batch).sum().backward()
        except RuntimeError as error:  # PyTorch's own refusal to save such a tensor for a backward pass
            assert "Inference tensors" in str(error)  # noqa: PT017
        else:
            assert lens.last is not None


class Shift(nn.Module):
    """Adds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.clone() + self.by


# Forward or backward


class Neck(nn.Module):
    """Three layers, the second of which can be made too large in either pass."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.body, self.neck, self.head = (nn.Linear(4, 4, dtype=torch.float16) for _ in range(3))
        self.times = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        x = self.neck(self.body(x) * self.times[0])
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.times[1])
        return self.head(x)


def look_at(model: nn.Module, batch: Tensor, scale: float = 1.0) -> Snapshot:
    scaler = GradScaler("cpu", policy=Static(scale))
    with Lens(model, scaler=scaler) as lens:
        scaler.scale(model(batch).float().sum()).backward()
        assert lens.last is not None
        return lens.last


@pytest.mark.parametrize("seed", [0])
def test_an_overflow_is_of_the_forward_or_of_the_backward_pass(seed: int) -> None:
    torch.manual_seed(seed)
    batch = torch.randn(8, 4).half()
    sound = look_at(Neck(), batch)
    assert sound.first_overflow is None
    forward = look_at(Neck(forward=3e5), batch)
    assert forward.first_overflow is not None
    assert (forward.first_overflow.name, forward.first_overflow.direction) == ("neck", "forward")
    assert "first inf or NaN: output of neck, whose input had some already, forward pass" in str(forward)
    backward = look_at(Neck(backward=6e4), batch, scale=2.0**10)
    assert backward.first_overflow is not None
    assert backward.first_overflow.direction == "backward"
    assert ", backward pass" in str(backward).splitlines()[1]
    assert not any(row.histogram.nonfinite for row in (*backward.inputs, *backward.weights))


def test_inf_and_nan_are_counted_apart() -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[math.inf, 1.0], [1.0, 0.0]]))
    snapshot = seen(model, torch.tensor([[1.0, math.nan], [1.0, 0.0]]))
    weight, given = by_name(snapshot.weights)[""], by_name(snapshot.inputs)[""]
    assert (weight.histogram.nonfinite, weight.nans) == (1, 0)
    assert (given.histogram.nonfinite, given.nans) == (1, 1)
    assert "1 inf" in str(snapshot)
    assert "1 NaN" in str(snapshot)
