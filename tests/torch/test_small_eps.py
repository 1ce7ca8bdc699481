"""float16 weights under Adam and its relatives: an `eps` that is 0 in float16 is told of, and why."""

import warnings

import pytest
import torch

from preamp.torch import GradScaler, MasterWeights

KINDS = [  # each with the eps that it has by itself
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adagrad, {}),
]
kinds = pytest.mark.parametrize(("kind", "options"), KINDS)
SAID = r"eps=1e-(08|10) of \w+\.param_groups\[0\] is 0 in float16.* Write eps=1e-4, or MasterWeights\("


def half_parameters(dtype=torch.float16):
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype))]


def trained(kind, options, gradient=1e-5, copies=False):
    """Return weights after ten steps on a gradient whose square is 0 in float16."""
    weights = half_parameters()
    optimizer, scaler = kind(weights, lr=1e-3, **options), GradScaler("cpu")
    masters = MasterWeights(optimizer) if copies else None
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale((weights[0].float() * gradient).sum()).backward()
        if masters:
            masters.take_gradients()
        scaler.step(optimizer)
        if masters:
            masters.write_back()
        scaler.update()
    return weights[0].detach()


@kinds
def test_what_is_told_of_ends_in_nan_and_what_is_advised_does_not(kind, options):
    gradient = 0.0 if kind is torch.optim.Adamax else 1e-5  # it keeps magnitudes, not squares
    with pytest.warns(UserWarning, match=SAID) as told:
        weights = trained(kind, options, gradient)
    assert [one.filename for one in told] == [__file__]
    assert not weights.isfinite().all()
    assert trained(kind, {**options, "eps": 1e-4}).isfinite().all()
    assert trained(kind, options, copies=True).isfinite().all()


@pytest.mark.parametrize("gradient", [0.0, 1e-5])
def test_a_fused_step_adds_eps_in_float32_and_needs_no_warning(gradient):
    for kind in (torch.optim.Adam, torch.optim.Adagrad):
        assert trained(kind, {"fused": True}, gradient).isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.Adam(half_parameters(torch.bfloat16)),
        lambda: torch.optim.Adam(half_parameters(torch.float32)),
        lambda: torch.optim.Adam(half_parameters(), eps=2.0**-24),
        lambda: torch.optim.Adam(half_parameters(), eps=0.0),  # written by hand
        lambda: torch.optim.SGD(half_parameters(), lr=0.1),
        lambda: torch.optim.Adadelta(half_parameters()),
        lambda: torch.optim.Adafactor(half_parameters()),
    ],
)
def test_what_can_work_is_not_told_of(make):
    stepped(GradScaler("cpu"), make())  # warnings are errors here


def stepped(scaler, optimizer):
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.zero_grad()
    scaler.scale(weight.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_each_group_is_told_of_by_its_number():
    groups = [{"params": half_parameters(dtype)} for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    groups.append({"params": half_parameters(), "eps": 1e-4})
    groups.append({"params": half_parameters(), "eps": 1e-9})
    with pytest.warns(UserWarning, match="is 0 in float16") as told:
        stepped(GradScaler("cpu"), torch.optim.Adam(groups))
    assert ["[1]" in str(told[0].message), "[4]" in str(told[1].message), len(told)] == [True, True, 2]


def test_a_scaler_tells_of_it_once_for_each_optimizer():
    scaler, optimizers = GradScaler("cpu"), [torch.optim.Adam(half_parameters()) for _ in range(2)]
    for optimizer in optimizers:
        with pytest.warns(UserWarning, match=SAID) as told:
            stepped(scaler, optimizer)
        assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings(action="error"):
        for optimizer in optimizers:
            stepped(scaler, optimizer)
    stepped(GradScaler("cpu"), torch.optim.Adam(half_parameters(torch.float32)))
