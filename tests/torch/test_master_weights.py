"""`MasterWeights`: float32 copies of half-precision parameters, and calls that are forgotten."""

import copy
import io
import math

import pytest
import torch

from preamp import PolicyError, UsageError
from preamp.torch import GradScaler, MasterWeights

INF = math.inf


class Run:
    """A small model, with copies or without."""

    def __init__(self, make=torch.optim.SGD, dtype=torch.float16, *, copies=True, lr=0.1, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2).to(dtype)
        self.optimizer = make(self.model.parameters(), lr=lr, **options)
        self.masters = MasterWeights(self.optimizer) if copies else None
        self.scaler = GradScaler("cpu", init_scale=2.0**8, model=self.model)

    def backward(self, number, factor=1.0):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(self.model.weight.dtype)
        self.scaler.scale(self.model(x).float().square().mean() * factor).backward()
        if self.masters:
            self.masters.take_gradients()

    def step(self, number, factor=1.0, micro_steps=1):
        self.optimizer.zero_grad()
        for _ in range(micro_steps):
            self.backward(number, factor / micro_steps)
        self.scaler.step(self.optimizer)
        if self.masters:
            self.masters.write_back()
        self.scaler.update()

    def values(self):
        return torch.cat([p.detach().float().flatten() for p in self.model.parameters()])

    def copies(self):
        return torch.cat([p.detach().flatten() for p in self.optimizer.param_groups[0]["params"]])


@pytest.mark.parametrize(("dtype", "micro_steps"), [(torch.float16, 4), (torch.bfloat16, 1)])
def test_they_keep_updates_that_half_precision_would_lose(dtype, micro_steps):
    wide = Run(dtype=torch.float32, lr=1e-5)
    with torch.no_grad():
        for p in wide.model.parameters():
            p.copy_(p.to(dtype))
    run, lossy = (Run(dtype=dtype, copies=copies, lr=1e-5) for copies in (True, False))
    start = run.values()
    for number in range(60):
        wide.step(number)
        run.step(number, micro_steps=micro_steps)
        lossy.step(number)
    moved = (wide.values() - start).norm()
    assert (run.copies() - wide.values()).norm() < 0.02 * moved
    assert (lossy.values() - wide.values()).norm() > 0.5 * moved
    assert torch.equal(run.values(), run.copies().to(dtype).float())
    assert wide.masters.weights == []


def test_micro_steps_add_up_in_float32():
    run = Run()
    for gradient in (2048.0, *[1.0] * 7):  # each lost beside the first, in float16
        run.model.weight.grad = torch.full_like(run.model.weight, gradient)
        run.masters.take_gradients()
    assert run.model.weight.grad is None
    assert (run.optimizer.param_groups[0]["params"][0].grad == 2048.0 + 7).all()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_changes_nothing_and_has_the_models_names(make, fused):
    run = Run(make, fused=fused)
    run.step(0)
    before = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.masters.state_dict()))
    run.step(1, INF)
    assert run.scaler.last_step.skipped
    assert set(run.scaler.last_step.culprits) == {"weight", "bias"}
    after = run.model.state_dict(), run.optimizer.state_dict(), run.masters.state_dict()
    assert str(after) == str(before)
    run.step(2)  # nothing of the overflow is left
    assert not run.scaler.last_step.skipped


def test_what_an_undone_step_wrote_does_not_reach_the_model():
    run = Run()
    run.scaler = GradScaler("cpu", init_scale=2.0**8, capturable=True)
    run.step(0)
    before = run.values()
    run.step(1, INF)
    assert torch.equal(run.values(), before)


def test_a_closure_takes_them_itself():
    run, other = Run(), Run()
    run.scaler.step(run.optimizer, lambda: run.backward(0))
    run.masters.write_back()
    run.scaler.update()
    other.step(0)
    assert torch.equal(run.values(), other.values())


def test_without_a_scaler_too():
    run, other = Run(dtype=torch.bfloat16), Run(dtype=torch.bfloat16)
    for number in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).bfloat16()
        run.model(x).float().square().mean().backward()
        run.masters.take_gradients()
        run.optimizer.step()
        run.masters.write_back()
        other.step(number)
    torch.testing.assert_close(run.copies(), other.copies())


@pytest.mark.parametrize("scales", [False, True])
def test_gradients_that_were_not_taken_are_told_of(scales):
    """Where the optimizer has float32 parameters too, it would step with those alone."""
    half, wide = (torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float16, torch.float32))
    optimizer, scaler = torch.optim.SGD([half, wide], lr=0.1), GradScaler("cpu", enabled=scales)
    MasterWeights(optimizer)
    scaler.scale((half.float() * wide).sum()).backward()
    with pytest.raises(UsageError, match=r"Write masters\.take_gradients\(\) between backward\(\)"):
        scaler.step(optimizer)
    assert wide.tolist() == [1.0, 1.0]


def test_gradients_that_were_not_taken_are_told_of_where_all_parameters_have_copies():
    run = Run()
    run.scaler.scale(run.model(torch.ones(1, 4).half()).float().sum()).backward()
    with pytest.raises(AssertionError, match=r"Write masters\.take_gradients\(\) after backward"):
        run.scaler.step(run.optimizer)


def test_a_step_that_was_not_written_back_is_told_of():
    run = Run()
    run.backward(0)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    stepped = run.copies()
    assert torch.equal(torch.cat([w.flatten() for w in run.masters.state_dict()["weights"]]), stepped)
    with pytest.raises(UsageError, match=r"Write masters\.write_back\(\) after it"):
        run.backward(1)


@pytest.mark.parametrize("clears", ["optimizer", "model", None])
def test_gradients_need_not_be_cleared(clears):
    run, other = Run(), Run()
    for number in range(3):
        if clears:
            getattr(run, clears).zero_grad()
        run.backward(number)
        run.scaler.step(run.optimizer)
        run.masters.write_back()
        run.scaler.update()
        other.step(number)
    assert torch.equal(run.copies(), other.copies())


def test_they_follow_weights_that_are_loaded_into_the_model():
    run = Run()
    run.step(0)
    loaded = {name: value + 1 for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(loaded)
    saved = run.masters.state_dict()["weights"]
    assert torch.equal(saved[0].half(), loaded["weight"])
    run.step(1)
    assert (run.values() - torch.cat([v.flatten() for v in loaded.values()]).float()).abs().max() < 0.5


def test_an_entry_that_is_written_leaves_the_copies_of_others():
    """Each output has a bias of its own; the updates are smaller than half precision holds."""
    run, other = Run(lr=1e-5), Run(lr=1e-5)
    for number in range(60):
        run.step(number)
        run.model.bias.data[0] = 5.0  # which no version counter tells of
        other.step(number)
    first, second = run.masters.state_dict()["weights"][1].tolist()
    assert first == pytest.approx(5.0, abs=2e-3)  # rounds to 5.0
    assert second == other.copies()[-1].item()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_run_that_is_resumed_equals_one_that_is_not(make):
    whole, resumed = Run(make), Run(make)
    for number in range(3):
        whole.step(number)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (whole.model, whole.optimizer, whole.masters)], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for part, state in zip((resumed.model, resumed.optimizer, resumed.masters), saved, strict=True):
        part.load_state_dict(state)
    for run in (whole, resumed):
        run.step(3)
    assert torch.equal(whole.copies(), resumed.copies())


def test_a_checkpoint_that_does_not_fit_is_refused():
    run = Run()
    before = run.copies()
    for saved, said in (
        ({"weights": [torch.ones(3)]}, "master weights of shapes .* Make the same optimizer"),
        ({"weights": []}, "Make the same optimizer"),
        ({}, r"has no weights\. Load what masters\.state_dict\(\) returned"),
    ):
        with pytest.raises(PolicyError, match=said):
            run.masters.load_state_dict(saved)
    assert torch.equal(run.copies(), before)


@pytest.mark.parametrize("wrong", [3, None, torch.nn.Linear(1, 1), torch.optim.LBFGS([torch.zeros(1)])])
def test_what_is_no_such_optimizer_is_refused(wrong):
    with pytest.raises(UsageError, match=r"Write MasterWeights\(torch\.optim\.AdamW\(model\.parameters"):
        MasterWeights(wrong)


def test_a_group_that_is_added_later_gets_copies():
    run = Run()
    late = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    run.optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.sum().mul(2.0**8).backward()
    run.backward(0)
    run.scaler.step(run.optimizer)
    run.masters.write_back()
    assert run.optimizer.param_groups[1]["params"][0].tolist() == [0.5, 0.5]
    assert late.tolist() == [0.5, 0.5]


def test_state_from_before_goes_over_in_float32():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    masters = MasterWeights(optimizer)
    (state,) = optimizer.state.values()
    assert state["momentum_buffer"].dtype is torch.float32
    weight.grad = torch.ones_like(weight)
    masters.take_gradients()
    optimizer.step()
    masters.write_back()
    assert weight.tolist() == [-0.25, -0.25]
