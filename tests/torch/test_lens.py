"""The lens on real models: what it counts and when, the scale it notes, and what overflowed first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from preamp import Dynamic, ExponentHistogram, Snapshot, Static, Trace
from preamp.torch import GradScaler, Lens, autocast

from .lens_models import X, histogram, hooks, mlp, rows_of, scalers, seen, train

INF = math.inf

# What is counted


def test_activations_flows_and_gradients_are_those_of_the_pass() -> None:
    model = mlp()
    snapshot = seen(model, X)
    hidden = model[0](X)
    clipped = model[1](hidden)
    out = model[2](clipped)
    flows = torch.autograd.grad(out.sum(), [out, clipped, hidden], retain_graph=True)
    gradients = torch.autograd.grad(out.sum(), list(model.parameters()))
    expected = {
        ("0", "activation"): histogram(hidden),
        ("1", "activation"): histogram(clipped),
        ("2", "activation"): histogram(out),
        ("2", "flow"): histogram(flows[0]),
        ("1", "flow"): histogram(flows[1]),
        ("0", "flow"): histogram(flows[2]),
        ("2", "gradient"): histogram(*gradients[2:]),
        ("0", "gradient"): histogram(*gradients[:2]),
    }
    assert rows_of(snapshot) == expected
    order = [(row.name, row.what) for row in snapshot.rows]
    assert [key for key in order if key[1] != "gradient"] == list(expected)[:6]
    assert order.index(("2", "gradient")) < order.index(("0", "flow")) < order.index(("0", "gradient"))
    assert (snapshot.index, snapshot.scale, snapshot.low_dtype) == (0, 1.0, "float16")
    gradients_alone = seen(model, X, activations=False)
    assert rows_of(gradients_alone) == {k: v for k, v in expected.items() if k[1] != "activation"}


def test_the_loss_scale_is_not_the_flow_of_a_model_that_returns_its_loss() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(*X.shape[1:], 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()  # type: ignore[no-any-return]

    rows = rows_of(seen(Returning(), X, loss=lambda loss: 2.0**17 * loss))
    assert ("", "activation") in rows
    assert ("", "flow") not in rows
    assert ("layer", "flow") in rows


class Twice(nn.Module):
    """Calls a layer twice, and owns a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.layer(self.layer(x))


def test_a_layer_that_is_called_twice_has_one_row_of_all_that_went_through() -> None:
    model = Twice()
    rows = rows_of(seen(model, X))
    first = model.layer(X)
    second = model.layer(first)
    assert rows["layer", "activation"] == histogram(first, second)
    assert rows["layer", "flow"] == histogram(*torch.autograd.grad(second.sum() * 0.3, [first, second]))
    assert rows["", "gradient"].total == 1
    assert rows["layer", "gradient"].total == 12


def test_a_parameter_of_two_layers_is_counted_once_for_the_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    rows = rows_of(seen(model, X))
    assert rows["0", "gradient"].total == 9
    assert ("1", "gradient") not in rows


def test_what_is_overwritten_in_place_is_counted_before_and_after() -> None:
    model = nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.0), nn.Linear(5, 1)
    )
    apart = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    apart.load_state_dict({k.replace("4.", "2."): v for k, v in model.state_dict().items()})
    rows, expected = rows_of(seen(model, X)), rows_of(seen(apart, X))
    for place in ("0", "1"):
        for what in ("activation", "flow"):
            assert rows[place, what] == expected[place, what]
    assert ("2", "activation") not in rows  # it puts out what it was given
    assert rows["0", "gradient"] == expected["0", "gradient"]


@dataclass
class Answer:
    scores: Tensor
    note: str = "fine"


class Structured(nn.Module):
    """Puts out tensors in all kinds of things, some of them without gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        scores = torch.tanh(self.layer(x))
        return {
            "tuple": (scores, scores.argmax(), None, 3),
            "dict": {"scores": scores, "more": [scores.detach() * 2.0]},
            "dataclass": Answer(scores),
            "nested": {"a": [(scores,)]},
        }[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "nested"])
def test_outputs_may_be_structured(kind: str) -> None:
    model = Structured(kind)
    out = {
        "tuple": lambda out: out[0],
        "dict": lambda out: out["scores"],
        "dataclass": lambda out: out.scores,
        "nested": lambda out: out["a"][0][0],
    }[kind]
    rows = rows_of(seen(model, X, loss=lambda result: out(result).sum()))
    assert rows["", "flow"] == ExponentHistogram(0, (8,))
    assert rows["", "activation"].total == (16 if kind == "dict" else 8)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_models_of_any_dtype(dtype: torch.dtype) -> None:
    model, name = nn.Linear(3, 2).to(dtype), str(dtype).removeprefix("torch.")
    snapshot = seen(model, X.to(dtype), loss=lambda out: out.abs().sum())
    assert {row.dtype for row in snapshot.rows} == {name}
    assert snapshot.low_dtype == (name if name in ("float16", "bfloat16") else "float16")
    gradients = [parameter.grad for parameter in model.parameters()]
    assert rows_of(snapshot)["", "gradient"] == histogram(*gradients)


REGIONS = {
    "torch": lambda: torch.autocast("cpu", torch.bfloat16),
    "ours": lambda: autocast("cpu", torch.bfloat16),
    "rehearsed": lambda: autocast("cpu", torch.bfloat16, emulate=True),
}


@pytest.mark.parametrize("region", REGIONS)
def test_under_autocast_dtypes_are_those_that_ran(region: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))

    def forward(x: Tensor) -> Tensor:
        with REGIONS[region]():
            return nn.Sequential.forward(model, x)

    model.forward = forward
    snapshot = seen(model, X, loss=lambda out: out.float().sum())
    dtypes = {(row.name, row.what): row.dtype for row in snapshot.rows}
    assert snapshot.low_dtype == "bfloat16"
    assert (dtypes["0", "flow"], dtypes["2", "activation"]) == ("bfloat16", "bfloat16")
    assert dtypes["0", "gradient"] == "float32"
    assert rows_of(snapshot)["0", "gradient"] == histogram(model[0].weight.grad, model[0].bias.grad)
    assert seen(model, X, low_dtype=torch.float8_e5m2, loss=lambda out: out.sum()).low_dtype == "float8_e5m2"


class Saving(nn.Module):
    """Computes its inner part twice."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.inner, self.last, self.how = mlp(), nn.Linear(2, 1), how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, **self.how) if self.how else self.inner(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_counted_again(reentrant: bool) -> None:
    start = X.clone().requires_grad_()
    rows = rows_of(seen(Saving(use_reentrant=reentrant), start))
    expected = rows_of(seen(Saving(), start))
    if reentrant:  # which runs the inner part without gradients first
        for name in ("inner.0", "inner.1", "inner.2"):
            expected.pop((name, "flow"))
    assert rows == expected


def test_modules_that_take_no_part_have_no_rows() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "frozen": nn.Linear(1, 1)})
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: model["frozen"](model["used"](x))
    rows = rows_of(seen(model, X))
    assert {name for name, _ in rows} == {"used", "frozen"}
    assert ("frozen", "gradient") not in rows


def test_gradients_of_a_sparse_embedding_are_the_rows_that_were_used() -> None:
    model = nn.Embedding(100, 4, sparse=True)
    assert rows_of(seen(model, torch.tensor([1, 5, 5])))["", "gradient"] == ExponentHistogram(0, (12,))


# When


def test_the_first_pass_and_every_nth_after_it_are_sampled() -> None:
    model, snapshots = mlp(), []
    with Lens(model, every=3, on_snapshot=snapshots.append):
        train(model, 8)
    assert [snapshot.index for snapshot in snapshots] == [0, 3, 6]


def test_passes_without_gradients_do_not_count() -> None:
    model, snapshots = mlp(), []
    with Lens(model, every=2, on_snapshot=snapshots.append) as lens:
        for _ in range(4):
            with torch.no_grad():
                model(X)
            with torch.inference_mode():
                model(X)
            train(model, 1)
        assert lens.last == snapshots[-1]
    assert [snapshot.index for snapshot in snapshots] == [0, 2]


def test_a_pass_that_no_gradient_comes_back_from_gives_no_snapshot() -> None:
    model = mlp()
    with Lens(model, every=1) as lens:
        model(X)
        assert lens.last is None
        model(X)
        train(model, 1)
        assert lens.last is not None
        assert lens.last.index == 2


def test_two_calls_of_the_model_before_one_backward() -> None:
    model, snapshots = mlp(), []
    with Lens(model, every=10, on_snapshot=snapshots.append):
        (model(X) * model(-X)).sum().backward()
        train(model, 1)
        assert len(snapshots) == 1
    assert rows_of(snapshots[0])["2", "activation"].total == 8  # of the first call
    assert rows_of(snapshots[0])["2", "gradient"].total == 12


def test_a_second_backward_after_the_snapshot_is_not_seen() -> None:
    model = mlp()
    with Lens(model) as lens:
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        first = lens.last
        loss.backward()
        assert lens.last is first


def test_every_can_be_changed_and_a_closed_lens_keeps_its_last_snapshot() -> None:
    model, trace = mlp(), Trace()
    lens = Lens(model, every=2, on_snapshot=trace.add_snapshot)
    train(model, 3)
    lens.every = 1
    train(model, 2)
    lens.close()
    lens.close()
    train(model, 2)
    assert [snapshot.index for snapshot in trace.snapshots] == [0, 2, 3, 4]
    assert lens.last == trace.snapshots[-1]
    assert hooks(model) == 0


# The scale


@pytest.mark.parametrize("kind", scalers())
def test_the_scale_and_the_step_are_those_of_the_loss_that_was_sampled(kind: str) -> None:
    model, snapshots = mlp(), []
    scaler = scalers()[kind](model)
    with Lens(model, every=2, scaler=scaler, on_snapshot=snapshots.append):
        train(model, 5, scaler=scaler)
    assert [(snapshot.index, snapshot.scale) for snapshot in snapshots] == [
        (0, 2.0**10),
        (2, 2.0**12),
        (4, 2.0**14),
    ]
    shifts = {
        row.histogram.amax_exponent for snapshot in snapshots for row in snapshot.rows if row.what == "flow"
    }
    assert max(shifts) - min(shifts) >= 4
    for snapshot in snapshots[1:]:
        powers = int(math.log2(snapshot.scale)) - 10
        flows = [
            (new, old)
            for new, old in zip(snapshot.rows, snapshots[0].rows, strict=True)
            if new.what != "activation"
        ]
        assert all(new.histogram == old.histogram.shifted(powers) for new, old in flows)


def test_a_scaler_that_does_not_scale_has_scale_one() -> None:
    model = mlp()
    for scaler in (GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", enabled=False)):
        with Lens(model, scaler=scaler) as lens:
            train(model, 1, scaler=scaler)
            assert lens.last.scale == 1.0


def test_with_accumulation_a_pass_is_a_micro_batch_of_the_scalers_step() -> None:
    model, snapshots = mlp(), []
    scaler = GradScaler("cpu", policy=Static(4.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Lens(model, every=3, scaler=scaler, on_snapshot=snapshots.append):
        for _ in range(4):
            for _ in range(2):
                scaler.scale(model(X).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [snapshot.index for snapshot in snapshots] == [0, 1, 3]
    first, second, _ = map(rows_of, snapshots)
    assert first == second  # one micro-batch's gradients, not their sum


# Overflow


class Overflowing(nn.Module):
    """The flow out of its third layer overflows float16 at a scale above 2**4."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2, bias=False) for _ in range(3))
        for layer in (self.first, self.second, self.third):
            nn.init.constant_(layer.weight, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(self.second(x) * 2.0**-4).float() * 2.0**9


def overflow(scale: float) -> Snapshot:
    model, scaler = Overflowing().half(), GradScaler("cpu", policy=Static(scale))
    with Lens(model, scaler=scaler) as lens:
        scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
        assert lens.last is not None
        return lens.last


def test_the_first_module_to_overflow_and_the_path_of_the_inf() -> None:
    below, above = overflow(2.0**4), overflow(2.0**5)
    assert below.first_overflow is None
    assert below.path == ()
    assert above.first_overflow is not None
    assert (above.first_overflow.name, above.first_overflow.what) == ("second", "flow")
    flows = [row.name for row in above.path if row.what == "flow"]
    gradients = [row.name for row in above.path if row.what == "gradient"]
    assert flows == gradients == ["second", "first"]
    assert overflow(above.best_scale(margin=1)).first_overflow is None


def test_the_pass_after_a_skipped_step_is_sampled_once_for_all_skips_in_a_row() -> None:
    model, snapshots = mlp(), []
    scaler = GradScaler("cpu", policy=Dynamic(init_scale=2.0**10))
    with Lens(model, every=100, scaler=scaler, on_snapshot=snapshots.append):
        for factor in (1.0, 1.0, INF, INF, INF, 1.0, 1.0, INF, 1.0, 1.0):
            train(model, 1, scaler=scaler, factor=factor)
    assert [snapshot.index for snapshot in snapshots] == [0, 3, 8]
    assert [snapshot.first_overflow is None for snapshot in snapshots] == [True, False, True]


def test_after_a_skip_that_does_not_repeat_the_next_pass_that_is_not_finite_is_kept() -> None:
    model, snapshots = mlp(), []
    scaler = GradScaler("cpu", policy=Dynamic(init_scale=2.0**10))
    with Lens(model, every=1000, scaler=scaler, on_snapshot=snapshots.append):
        for n in range(250):
            train(model, 1, scaler=scaler, factor=INF if n in (3, 9, 200, 240) else 1.0)
    # After 9 it searches again, until it has recorded about 100 passes.
    assert [snapshot.index for snapshot in snapshots] == [0, 4, 9, 10, 201, 241]
    assert [snapshot.index for snapshot in snapshots if snapshot.first_overflow] == [9]


def test_skips_that_only_a_device_knows_of_are_not_asked_for() -> None:
    model, snapshots = mlp(), []
    scaler = GradScaler("cpu", capturable=True)
    with Lens(model, scaler=scaler, on_snapshot=snapshots.append):
        train(model, 1, scaler=scaler)
        train(model, 3, scaler=scaler, factor=INF)
    assert len(snapshots) == 1
