"""`LossScaleOptimizer.step` without `optimizer.backward`: gradients that nobody scaled are never divided."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Dynamic, ScaleExhausted, Static
from preamp.errors import UsageError
from preamp.torch import GradScaler, LossScaleOptimizer
from preamp.torch.scaling import loss_scale_optimizer

from .test_process_groups import Alone

INF = float("inf")
PLAIN = r"no loss was scaled.* Write optimizer\.backward\(loss\)"
kinds = pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": Static(1.0)},
        {"gradient_accumulation_steps": 2},
        {"master_weights": True},
        {"clipnorm": 1.0},
        {"weight_decay": 0.1},
        {"use_ema": True},
        {"loss_scale_factor": 4.0},
    ],
    ids=str,
)


class Run:
    """One weight with a gradient of 1."""

    def __init__(self, dtype=torch.float32, **options):
        self.weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        self.optimizer = LossScaleOptimizer(torch.optim.SGD([self.weight], lr=0.125), **options)

    def loss(self, factor=1.0):
        return (self.weight * factor).float().sum()

    def right(self, factor=1.0):
        self.optimizer.zero_grad()
        self.optimizer.backward(self.loss(factor))
        self.optimizer.step()

    def refuses(self, closure=None):
        """Return whether a step is refused, with everything left as it was."""
        before = copy.deepcopy((self.weight.data, self.weight.grad, self.optimizer.state_dict()))
        try:
            self.optimizer.step(*([closure] if closure else []))
        except UsageError:
            after = self.weight.data, self.weight.grad, self.optimizer.state_dict()
            assert str(before) == str(after)
            return True
        return False


@kinds
@pytest.mark.parametrize("rights", [[], [1.0], [1.0, 1.0, 1.0], [1.0, INF], [INF]], ids=str)
def test_a_plain_backward_is_refused_on_every_step(options, rights):
    run = Run(**options)
    for factor in rights:
        run.right(factor)
    for _ in range(2):
        run.optimizer.zero_grad()
        run.loss().backward()
        with pytest.raises(UsageError, match=PLAIN):
            run.optimizer.step()
        assert run.refuses()
    run.right()  # and the run can go on
    assert not run.optimizer.last_step.skipped


def test_a_step_with_nothing_before_it_names_backward():
    """Not `_scale is None`."""
    with pytest.raises(UsageError, match=PLAIN):
        Run().optimizer.step()


def test_a_second_step_on_the_same_gradients_is_refused():
    run = Run()
    run.right()
    assert run.refuses()


def test_gradients_that_were_cleared_do_not_count():
    run = Run()
    run.optimizer.backward(run.loss())
    run.optimizer.zero_grad()
    run.loss().backward()
    assert run.refuses()


def test_a_loss_may_be_scaled_before_its_gradients_are_cleared():
    run = Run()
    run.right()
    scaled = run.optimizer.scale_loss(run.loss())
    run.optimizer.zero_grad()
    scaled.backward()
    run.optimizer.step()
    assert run.weight.tolist() == [-0.25, -0.25]


@kinds
@pytest.mark.parametrize("clears", [False, True])
def test_a_scaled_loss_that_is_thrown_away_does_not_count(options, clears):
    """Gradients of the loss itself would be divided by the scale."""
    run = Run(**options)
    for _ in range(2):
        run.optimizer.zero_grad()
        if clears:  # these gradients are gone
            run.optimizer.scale_loss(run.loss()).backward()
            run.optimizer.zero_grad()
        run.optimizer.scale_loss(run.loss())
        run.loss().backward()
        with pytest.raises(UsageError, match=r"Write optimizer\.scale_loss\(loss\)\.backward\(\)"):
            run.optimizer.step()
        assert run.refuses()
        run.right()


@kinds
def test_a_closure_that_throws_its_scaled_loss_away_is_refused(options):
    run = Run(**options)
    run.right()

    def closure():
        run.optimizer.zero_grad()
        run.optimizer.scale_loss(run.loss())
        loss = run.loss()
        loss.backward()
        return loss

    before = run.weight.tolist()
    with pytest.raises(UsageError, match=r"Write optimizer\.scale_loss\(loss\)\.backward\(\)"):
        run.optimizer.step(closure)
    assert run.weight.tolist() == before


def test_a_scaled_loss_whose_gradients_come_after_its_step_does_not_count():
    """The scale may have moved in between."""
    run = Run()
    scaled = run.optimizer.scale_loss(run.loss())
    run.right()
    run.optimizer.zero_grad()
    scaled.backward()
    assert run.refuses()


def test_a_scaled_loss_may_be_part_of_another():
    run = Run()
    for _ in range(2):
        run.optimizer.zero_grad()
        (run.optimizer.scale_loss(run.loss()) / 2 + run.optimizer.scale_loss(run.loss()) / 2).backward()
        run.optimizer.step()
    assert run.weight.tolist() == [-0.25, -0.25]


def test_a_function_transform_may_scale():
    run = Run()
    gradient = torch.func.grad(lambda weight: run.optimizer.scale_loss(weight.sum()))
    run.weight.grad = gradient(run.weight.detach()).clone()
    run.optimizer.step()
    assert run.weight.tolist() == [-0.125, -0.125]


def test_several_losses_are_added_up():
    run = Run()
    for _ in range(3):
        run.optimizer.backward(run.loss() / 3)
    run.optimizer.step()
    assert run.weight.tolist() == pytest.approx([-0.125] * 2)


def test_gradients_made_by_hand_take_the_factor():
    run = Run(loss_scale_factor=4.0)
    for _ in range(2):
        run.weight.grad = torch.ones(2) * run.optimizer.scale_loss(torch.ones(()))
        run.optimizer.step()
        run.weight.grad = torch.autograd.grad(run.optimizer.scale_loss(run.loss()), [run.weight])[0]
        run.optimizer.step()
    assert run.weight.tolist() == [-0.5, -0.5]


def test_the_scaler_inside_may_scale():
    run = Run()
    for _ in range(2):
        run.optimizer.zero_grad()
        run.optimizer.scaler.scale(run.loss()).backward()
        run.optimizer.step()
    assert run.weight.tolist() == [-0.25, -0.25]
    assert run.refuses()


@kinds
def test_a_closure_has_to_scale_its_own_loss(options):
    run = Run(**options)
    run.right()

    def closure(backward):
        def evaluate():
            run.optimizer.zero_grad()
            loss = run.loss()
            backward(loss)
            return loss

        return evaluate

    run.optimizer.backward(run.loss())  # of no use to the closure, which clears it
    with pytest.raises(UsageError, match=r"Write optimizer\.backward\(loss\)"):
        run.optimizer.step(closure(torch.Tensor.backward))
    run.optimizer.step(closure(run.optimizer.backward))
    assert not run.optimizer.last_step.skipped


def test_gradients_from_before_a_checkpoint_was_loaded_are_refused():
    """They have the scale of before in them."""
    run = Run()
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.backward(run.loss())
    run.optimizer.load_state_dict(saved)
    assert run.refuses()
    run.right()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_refuses_as_well(copied):
    run = Run()
    run.right()
    twin = copied(run)
    twin.weight.grad = torch.ones(2)
    assert twin.refuses()
    twin.right()
    assert twin.weight.tolist() == [-0.25, -0.25]


def test_a_step_that_failed_can_be_tried_again():
    run, attempts = Run(), []

    def fails_once(*_):
        attempts.append(1)
        if len(attempts) == 1:
            raise KeyError

    run.optimizer.inner_optimizer.register_step_pre_hook(fails_once)
    run.optimizer.backward(run.loss())
    with pytest.raises(KeyError):
        run.optimizer.step()
    run.optimizer.step()
    assert run.weight.tolist() == [-0.125, -0.125]


def test_a_step_at_which_the_policy_gave_up_is_over():
    run = Run(policy=Dynamic(init_scale=1.0, min_scale=1.0, at_floor="raise"))
    run.optimizer.backward(run.loss(INF))
    with pytest.raises(ScaleExhausted):
        run.optimizer.step()
    assert run.refuses()


def test_a_stage_of_a_pipeline_has_no_loss_until_it_has_one():
    run = Run(process_group=Alone())
    run.weight.grad = torch.full((2,), 2.0**15)  # as a later stage's backward leaves it
    run.optimizer.step()
    assert run.weight.tolist() == [-0.125, -0.125]
    run.right()
    run.weight.grad = None
    run.loss().backward()
    assert run.refuses()


def test_without_scaling_a_plain_backward_is_right():
    run = Run()
    run.optimizer.scaler = GradScaler("cpu", enabled=False)
    run.loss().backward()
    assert not run.refuses()


def test_what_a_cuda_graph_replays_is_taken_to_be_scaled(monkeypatch):
    run = Run()
    with monkeypatch.context() as capturing:
        capturing.setattr(loss_scale_optimizer, "_is_captured", lambda loss: True)
        run.optimizer.backward(run.loss())
    gradient = run.weight.grad.clone()
    for _ in range(2):
        run.weight.grad = gradient.clone()  # a replay, of which Python hears nothing
        run.optimizer.step()
    assert run.weight.tolist() == [-0.25, -0.25]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_backward_counts():
    run = Run()
    scaled = torch.compile(lambda: run.optimizer.scale_loss(run.loss()), backend="eager")
    for _ in range(2):
        run.optimizer.zero_grad()
        scaled().backward()
        run.optimizer.step()
    assert run.weight.tolist() == [-0.25, -0.25]


CALLS = ["backward", "scaled backward", "thrown away", "plain", "zero_grad", "step"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(CALLS), max_size=12))
def test_the_weight_is_that_of_plain_training_or_the_step_is_refused(calls):
    """Against the bare optimizer, for all orders in which no plain gradient is added to a scaled one."""
    ours, bare = Run(), Run()
    mixed = plain = scaled = False
    for call in calls:
        if call == "zero_grad":
            ours.optimizer.zero_grad()
            mixed = plain = scaled = False
            bare.optimizer.inner_optimizer.zero_grad()
        elif call == "step":
            if ours.weight.grad is None:
                with pytest.raises((UsageError, AssertionError)):
                    ours.optimizer.step()
            elif mixed:
                return  # nothing tells these apart
            elif scaled:
                assert not ours.refuses()
                bare.optimizer.inner_optimizer.step()
                assert torch.equal(ours.weight, bare.weight)
                plain, scaled = True, False  # gradients are unscaled now
            else:
                assert ours.refuses()
        else:
            if call == "backward":
                ours.optimizer.backward(ours.loss())
            elif call == "scaled backward":
                ours.optimizer.scale_loss(ours.loss()).backward()
            else:
                if call == "thrown away":
                    ours.optimizer.scale_loss(ours.loss())
                ours.loss().backward()
            bare.loss().backward()
            is_plain = call in ("plain", "thrown away")
            plain, scaled = plain or is_plain, scaled or not is_plain
            mixed = plain and scaled


def stepped(scaler, weight, optimizer, scales):
    optimizer.zero_grad()
    loss = weight.sum()
    (scaler.scale(loss) if scales else loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_step_of_the_scaler_without_a_scaled_loss_is_warned_of_once() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        stepped(scaler, weight, optimizer, scales=True)
    with pytest.warns(UserWarning, match=r"no loss was scaled .*Write scaler\.scale\(loss\)\.backward\(\)"):
        stepped(scaler, weight, optimizer, scales=False)
    stepped(scaler, weight, optimizer, scales=False)  # once


@pytest.mark.parametrize(
    "settings", [{"reduce": lambda flags: None}, {"capturable": True}, {"enabled": False}]
)
def test_where_others_may_scale_the_loss_it_is_not(settings) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=8.0, **settings)
    stepped(scaler, weight, optimizer, scales=True)
    stepped(scaler, weight, optimizer, scales=False)


def test_one_loss_for_two_optimizers_and_accumulation_are_scaled() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        for _ in range(2):
            scaler.scale((weights[0] * weights[1]).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def test_an_update_between_losses_that_are_scaled_and_the_step_is_warned_of() -> None:
    """The second optimizer's gradients have the scale of before the update."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale((weights[0] * weights[1]).sum()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    scaler.step(optimizers[1])
    with pytest.warns(UserWarning, match="With several optimizers, call update"):
        scaler.update()
