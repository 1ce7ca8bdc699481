"""What has to work on any device: each of these trains on it and on the CPU, and compares.

`test_devices.py` runs them on devices that stand in for some that are not here. On a device that is
here: `PREAMP_TEST_DEVICE=mps .venv/bin/pytest tests/torch/device_checks.py`, or cuda, or xpu.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preamp import Headroom
from preamp.torch import GradScaler, Lens, MasterWeights

from .stand_in_device import install
from .switches import Gradients, arrays, torch_devices

KERNELS = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")
DEVICE = os.environ.get("PREAMP_TEST_DEVICE", "cpu")
if DEVICE == "stand-in":
    kept = install("npu")
elif DEVICE == "stand-in without float64":
    kept = install("npu", double=False, without=KERNELS)
STANDS_IN = DEVICE.startswith("stand-in")
if STANDS_IN:
    DEVICE = "npu"
WIDE = torch_devices.widest(torch.device(DEVICE))
INF = float("inf")
LOSSES = (1.0, 1.0, INF, 1.0, 1.0, 1.0)  # what the loss of each step is multiplied by

POLICIES = {
    "pytorch's": lambda: {"init_scale": 2.0**12, "growth_interval": 2},
    "headroom": lambda: {"policy": Headroom(init_scale=2.0**10, memory=2, patience=4)},
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
}
CLIPS: dict[str, dict[str, float]] = {
    "unclipped": {},
    "norm": {"max_norm": 0.5},
    "both": {"max_norm": 0.5, "max_value": 0.1},
}
policies = pytest.mark.parametrize("policy", list(POLICIES))


def model_on(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype).to(device)


def inputs(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1.0, 1.0, 24, dtype=dtype).view(4, 6).to(device)


def loss_of(model: nn.Module, device: str, factor: float, dtype: torch.dtype = torch.float32) -> Tensor:
    output: Tensor = model(inputs(device, dtype))
    return output.float().square().mean() * factor


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert all(one.isfinite().all() for one in mine)


def same_steps(mine: list[Any], theirs: list[Any]) -> None:
    """Compare records: what is counted exactly, what is measured up to rounding."""
    for one, other in zip(mine, theirs, strict=True):
        exact = ("index", "finite", "skipped", "scale", "new_scale", "culprits")
        assert [getattr(one, name) for name in exact] == [getattr(other, name) for name in exact]
        for name in ("grad_norm", "loss", "amax"):  # a norm comes for free where nothing is read
            expected = getattr(other, name)
            if expected is not None:
                assert getattr(one, name) == pytest.approx(expected, rel=1e-4)


def trained(device: str, kind: str, options: dict[str, Any], clip: dict[str, float], **how: bool) -> Any:
    """Return the weights, the records and the scaler after some steps of which one overflows."""
    model = model_on(device)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler(device, **options)
    steps = []
    for factor in LOSSES:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, device, factor)).backward()
        if how.get("unscaled"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer, **clip)
        scaler.update()
        steps.append(scaler.last_step)
    return weights(model), steps, scaler


# Each optimizer under each policy, and either with each way to clip.
PAIRS = [
    (kind, policy, list(CLIPS)[(row + column) % len(CLIPS)])
    for row, kind in enumerate(OPTIMIZERS)
    for column, policy in enumerate(POLICIES)
]


@pytest.mark.parametrize(("kind", "policy", "clip"), PAIRS)
def test_a_training_goes_as_on_the_cpu(kind, policy, clip):
    here, there = (trained(where, kind, POLICIES[policy](), CLIPS[clip]) for where in (DEVICE, "cpu"))
    same(here[0], there[0])
    same_steps(here[1], there[1])
    assert here[2].state_dict() == there[2].state_dict()


@policies
@pytest.mark.parametrize("how", ["unscaled", "capturable"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
def test_so_it_does_unscaled_before_and_without_a_read(kind, policy, how):
    more = {"capturable": True} if how == "capturable" else {}
    both = [
        trained(where, kind, {**POLICIES[policy](), **more}, {"max_norm": 0.5}, **{how: True})
        for where in (DEVICE, "cpu")
    ]
    same(both[0][0], both[1][0])
    same_steps(both[0][1], both[1][1])
    assert both[0][2].state_dict() == both[1][2].state_dict()


@policies
@pytest.mark.parametrize("how", ["plain", "unscaled", "capturable"])
def test_ranks_agree_by_a_sum_in_the_widest_dtype_of_the_device(policy, how):
    dtypes = []

    def twice(readings: Tensor) -> None:  # a second rank that sees the same
        dtypes.append((readings.dtype, readings.device.type))
        readings.mul_(2.0)

    more: dict[str, Any] = {"reduce": twice, "capturable": how == "capturable"}
    both = [
        trained(where, "AdamW fused", {**POLICIES[policy](), **more}, {"max_norm": 0.5}, **{how: True})
        for where in (DEVICE, "cpu")
    ]
    same(both[0][0], both[1][0])
    same_steps(both[0][1], both[1][1])
    assert set(dtypes) == {(WIDE, DEVICE), (torch.float64, "cpu")}


def test_float32_copies_train_as_on_the_cpu():
    def train(device: str) -> tuple[list[Tensor], list[Any]]:
        model = model_on(device, torch.float16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        masters, scaler = MasterWeights(optimizer), GradScaler(device, 2.0**10, growth_interval=2)
        steps = []
        for factor in LOSSES:
            scaler.scale(loss_of(model, device, factor, torch.float16)).backward()
            masters.take_gradients()
            scaler.step(optimizer, max_norm=0.5)
            masters.write_back()
            scaler.update()
            steps.append(scaler.last_step)
        return weights(model), steps

    here, there = train(DEVICE), train("cpu")
    torch.testing.assert_close(here[0], there[0], rtol=2e-3, atol=1e-4)  # float16, multiplied elsewhere
    assert [(one.scale, one.skipped) for one in here[1]] == [(one.scale, one.skipped) for one in there[1]]
    assert sum(one.skipped for one in here[1]) == 1


def test_a_lens_sees_what_it_sees_on_the_cpu():
    def snapshot(device: str, capturable: bool) -> Any:
        model = model_on(device)
        scaler = GradScaler(device, init_scale=2.0**12, capturable=capturable)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with Lens(model, every=1, scaler=scaler) as lens:
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, device, 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            return lens.last

    for capturable in (False, True):
        here, there = snapshot(DEVICE, capturable), snapshot("cpu", capturable)
        assert (here.index, here.scale) == (there.index, there.scale)
        if STANDS_IN:  # which computes as the CPU does
            assert (here.rows, here.inputs, here.weights) == (there.rows, there.inputs, there.weights)
        assert [(row.name, row.what) for row in here.rows] == [(row.name, row.what) for row in there.rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_gradients_have_a_norm(dtype):
    largest = {torch.float16: 6e4}.get(dtype, 1e30)
    tensors = [torch.tensor([largest, -largest / 2, 0.0], dtype=dtype).to(DEVICE)]
    gradients = Gradients(tensors, tensors)
    for norm in (gradients.norm(), gradients.total_norm(gradients.norms()).item()):
        assert norm == pytest.approx(1.25**0.5 * largest, rel=1e-2)


@pytest.mark.parametrize("capturable", [False, True])
def test_ranks_add_up_norms_whose_squares_are_beyond_float32(capturable):
    weight = nn.Parameter(torch.ones(2).to(DEVICE))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler(DEVICE, init_scale=1.0, reduce=lambda readings: None, capturable=capturable)
    scaler.scale((weight * 1e25).sum()).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert scaler.last_step.grad_norm == pytest.approx(2**0.5 * 1e25)
    assert weight.tolist() == pytest.approx([1.0 - 0.5**0.5] * 2)


def test_a_checkpoint_goes_from_device_to_device():
    state = trained(DEVICE, "SGD", {"init_scale": 2.0**12, "growth_interval": 5}, {})[2].state_dict()
    for scaler in (GradScaler(DEVICE), GradScaler("cpu"), torch.amp.GradScaler(DEVICE)):
        scaler.load_state_dict(state)
        assert scaler.get_scale() == state["scale"]


@pytest.mark.skipif(WIDE is torch.float32, reason="PyTorch's own scaler needs float64")
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_steps_and_scales_are_those_of_pytorchs_scaler(kind):
    def train(kind_of_scaler: Any) -> tuple[list[float], list[Tensor]]:
        model, scales = model_on(DEVICE), []
        optimizer = OPTIMIZERS[kind](model.parameters())
        scaler = kind_of_scaler(DEVICE, init_scale=2.0**12, growth_interval=2)
        for factor in LOSSES:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, DEVICE, factor)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, weights(model)

    (scales, mine), (expected, theirs) = train(GradScaler), train(torch.amp.GradScaler)
    assert scales == expected
    same(mine, theirs)


def test_keras_reads_and_unscales_there():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras has another backend in this process")
    from preamp.keras import on_torch

    counted = [torch.tensor(7, dtype=torch.int64), torch.tensor(3, dtype=torch.int32), torch.tensor(0.5)]
    assert arrays.read([one.to(DEVICE) for one in counted]) == [7.0, 3.0, 0.5]
    for numbers, finite in (([2.0, -8.0], True), ([1.0, INF], False)):
        weight = nn.Parameter(torch.zeros(2).to(DEVICE))
        weight.grad = torch.tensor(numbers).to(DEVICE)
        gradients, told, norm, *_ = on_torch.unscale([weight.grad], [weight], torch.tensor(4.0).to(DEVICE))
        assert gradients[0].tolist() == [number / 4.0 for number in numbers]
        assert bool(told.item()) == finite
        assert not finite or norm.item() == pytest.approx(0.25 * 68.0**0.5)
        assert arrays.amax(gradients).item() == (2.0 if finite else torch.finfo(torch.float32).max)
