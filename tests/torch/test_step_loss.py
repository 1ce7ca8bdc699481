"""`Step.loss`: the loss that was scaled, kept without an operation and read when somebody asks."""

import math
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import Dynamic, Trace
from preamp.deepspeed import initialize
from preamp.torch import GradScaler

INF = float("inf")


class Calls(TorchDispatchMode):
    """Lists what is called, and counts what is read to the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def reads(self):
        return sum("_local_scalar_dense" in name for name in self.names)


class Run:
    """One weight of ones; the loss is its sum times a factor."""

    def __init__(self, fused=False, **options):
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5, fused=fused)
        self.scaler = GradScaler("cpu", init_scale=8.0, **options)

    def loss(self, factor=1.0):
        return (self.weight * factor).sum()

    def finish(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def step(self, *factors):
        losses = [self.loss(factor) for factor in factors]
        for loss in losses:
            self.scaler.scale(loss).backward()
        self.finish()
        return sum(loss.item() for loss in losses)


ways = pytest.mark.parametrize(
    "way", [{}, {"fused": True}, {"capturable": True}, {"enabled": False}, {"on_step": Trace()}], ids=str
)


@ways
def test_the_loss_of_a_step_is_in_its_record(way):
    run = Run(**way)
    for factors in ([1.0], [0.25, 0.5], [1.0, 2.0, 3.0], [1.0]):
        assert run.step(*factors) == run.scaler.last_step.loss


def test_it_is_there_before_update_and_of_each_optimizer():
    run = Run()
    loss = run.loss(3.0)
    run.scaler.scale(loss).backward()
    run.scaler.step(run.optimizer)
    assert run.scaler.last_step.loss == run.scaler.last_step_of(run.optimizer).loss == 12.0
    run.scaler.update()
    assert run.scaler.last_step.loss == run.scaler.last_step_of(run.optimizer).loss == 12.0


@pytest.mark.parametrize("factor", [INF, math.nan])
def test_a_skipped_step_has_the_loss_that_it_had(factor):
    run = Run()
    run.step(factor)
    assert run.scaler.last_step.skipped
    assert str(run.scaler.last_step.loss) == str(factor)
    assert run.step(1.0) == run.scaler.last_step.loss == 4.0


@pytest.mark.parametrize(
    "outputs",
    [
        lambda run: run.weight * 2,
        lambda run: [run.loss(), run.weight],
        lambda run: torch.nn.Parameter(torch.ones(())) * run.loss() * 1j,
    ],
)
def test_what_is_not_a_number_has_no_loss(outputs):
    run = Run()
    scaled = run.scaler.scale(outputs(run))
    first = scaled[0] if isinstance(scaled, list) else scaled
    torch.view_as_real(first).sum().backward() if first.is_complex() else first.sum().backward()
    run.finish()
    assert run.scaler.last_step.loss is None
    assert run.step(1.0) == run.scaler.last_step.loss  # the next one has


def test_losses_in_a_structure_are_added_up_in_float32():
    run = Run()
    losses = {"a": run.loss(15000.0).half(), "b": (run.loss(15000.0).half(), run.loss().view(1))}
    scaled = run.scaler.scale(losses)
    (scaled["a"] + sum(scaled["b"])).backward()
    run.finish()
    assert run.scaler.last_step.loss == 60000.0 * 2 + 4.0


@pytest.mark.parametrize("when", ["backward", "step", "update"])
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("way", [{}, {"capturable": True}, {"enabled": False}, {"on_step": id}], ids=str)
def test_a_loss_that_is_changed_in_place_before_it_is_read_is_not_recorded(way, losses, when):
    """Neither is a wrong one: what was read before the change is right."""
    run = Run(**way)
    loss, *others = [run.loss() for _ in range(losses)]
    run.scaler.scale(loss).backward()
    if when == "backward":
        loss.mul_(0.0)
    for other in others:
        run.scaler.scale(other).backward()
    run.scaler.step(run.optimizer)
    if when == "step":
        loss.mul_(0.0)
    run.scaler.update()
    if when == "update":
        loss.mul_(0.0)
    is_read_or_copied = bool(others or "on_step" in way) and when != "backward"
    assert run.scaler.last_step.loss == (4.0 * losses if is_read_or_copied else None)
    assert run.step(1.0) == run.scaler.last_step.loss


def test_a_loss_may_be_changed_once_it_was_read():
    run = Run()
    loss = run.loss()
    run.scaler.scale(loss).backward()
    run.finish()
    assert run.scaler.last_step.loss == 4.0
    loss.mul_(0.0)
    assert run.scaler.last_step.loss == 4.0


def test_a_loss_of_inference_mode_has_no_count_of_changes():
    run = Run()
    run.step(1.0)
    with torch.inference_mode():
        one = torch.ones(())
    run.scaler.scale(one)
    run.scaler.scale(run.loss()).backward()
    run.finish()
    assert run.scaler.last_step.loss == 1.0 + 2.0  # the weight is 0.5 now


def test_a_closure_counts_as_its_last_evaluation():
    run, losses = Run(), []
    lbfgs = torch.optim.LBFGS([run.weight], lr=0.1, max_iter=3)

    def closure():
        lbfgs.zero_grad()
        losses.append(run.weight.square().sum())
        run.scaler.scale(losses[-1]).backward()
        return losses[-1]

    run.scaler.step(lbfgs, closure)
    run.scaler.update()
    assert len(losses) > 1
    assert run.scaler.last_step.loss == losses[-1].item()


@pytest.mark.usefixtures("reads_cost")
@pytest.mark.parametrize("fused", [False, True])
def test_one_loss_is_detached_and_no_more(fused):
    run = Run(fused=fused)
    counted = []
    for known in (False, True):
        run.step(1.0)
        loss = run.loss()
        if not known:
            run.scaler._scaled.losses.add = lambda loss: None
        with Calls() as calls:
            run.scaler.scale(loss)
        with Calls() as backward:
            torch.autograd.backward(loss)
        with Calls() as finish:
            run.finish()
        counted.append((calls.names, backward.names, finish.names))
        vars(run.scaler._scaled.losses).pop("add", None)
    with Calls() as detaching:
        loss.detach()
    assert counted[1] == ([*detaching.names, *counted[0][0]], *counted[0][1:])
    assert fused == (finish.reads == 0)
    assert run.scaler.last_step.loss == loss.item()


@pytest.mark.usefixtures("reads_cost")
def test_who_is_told_of_steps_has_the_loss_read_beside_the_flag_before_the_optimizer_works():
    """Later the host would wait for the update."""
    counted = []
    for on_step in (None, Trace()):
        run = Run(on_step=on_step)
        run.step(1.0)
        run.scaler.scale(run.loss()).backward()
        before, after = Calls(), Calls()
        run.optimizer.register_step_pre_hook(lambda *_, before=before: before.__exit__(None, None, None))
        run.optimizer.register_step_post_hook(lambda *_, after=after: after.__enter__())
        before.__enter__()
        run.finish()
        after.__exit__(None, None, None)
        counted.append((before.reads, after.reads))
    assert counted[1] == (counted[0][0] + 1, counted[0][1])


def test_nothing_of_the_graph_or_of_a_large_tensor_is_kept():
    run = Run()
    run.step(1.0)
    large = torch.ones(1000, requires_grad=True) * 1.0
    for losses in ([run.loss()], [large[0]], [run.loss(), large[0]]):
        run.scaler.scale(losses)
        kept = run.scaler._scaled.losses.take()
        assert kept.tensor.untyped_storage().nbytes() < 100
        assert kept.tensor.grad_fn is None


def test_function_transforms_and_copies_are_left_alone():
    run = Run()
    torch.func.grad(lambda weight: run.scaler.scale(weight.sum()))(run.weight.detach())
    run.scaler.scale(run.loss()).backward()
    twin = pickle.loads(pickle.dumps(run.scaler))
    assert twin._scaled.losses.sum is None
    run.finish()
    assert run.scaler.last_step.loss is None


def test_a_scale_set_by_hand_ends_the_iteration():
    run = Run()
    run.scaler.scale(run.loss(100.0))
    run.scaler.update(4.0)
    assert run.step(1.0) == run.scaler.last_step.loss


@pytest.mark.parametrize("config", [{"fp16": {"enabled": True, "auto_cast": True}}, {}], ids=str)
def test_an_engine_records_the_loss_of_an_update(config):
    trace, model = Trace(), torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={**config, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
        on_step=trace,
    )
    for number in range(4):
        engine.backward(engine(torch.ones(1, 2)).float().mean() * number)
        engine.step()
    assert [step.loss for step in trace] == [1.0, 5.0]  # the mean over micro-steps, of 2 * number


def test_an_engine_that_scales_nothing_reads_no_loss():
    model = torch.nn.Linear(2, 1)
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"bf16": {"enabled": False}},
    )
    engine.backward(engine(torch.ones(1, 2)).mean())
    with Calls() as calls:
        engine.step()
    assert calls.reads == 0


def test_giving_up_keeps_the_loss():
    trace = Trace()
    run = Run(policy=None, on_step=trace)
    run.scaler = GradScaler(
        "cpu", policy=Dynamic(init_scale=1.0, min_scale=1.0, at_floor="raise"), on_step=trace
    )
    with pytest.raises(RuntimeError):
        run.step(INF)
    assert trace[-1].loss == INF
