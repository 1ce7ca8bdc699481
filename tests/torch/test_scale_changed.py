"""A scale that changes between the loss and the step: gradients are never divided by another than theirs."""

import pytest
import torch

from preamp.errors import UsageError
from preamp.torch import GradScaler

from .pairs import make, ours, theirs, weights

CHANGES = {
    "update": lambda scaler: scaler.update(4.0),
    "load_state_dict": lambda scaler: scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0}),
}
changes = pytest.mark.parametrize("change", list(CHANGES))
modes = pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=str)


class Run:
    def __init__(self, scaler):
        self.scaler, (self.weight,) = scaler, weights()
        self.optimizer = make("SGD", [self.weight], lr=1.0)

    def backward(self):
        self.optimizer.zero_grad()
        self.scaler.scale(self.weight.sum()).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


@changes
@modes
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_a_scale_that_changed_after_the_loss_was_scaled_is_refused(change, options, call):
    run = Run(ours(**options))
    run.backward()
    CHANGES[change](run.scaler)
    with pytest.raises(UsageError, match=rf"{change}\(.* changed the scale after.*Write scaler.{change}"):
        getattr(run.scaler, call)(run.optimizer)
    assert (run.weight == 0.0).all()
    assert (run.weight.grad == 2.0**10).all()
    run.backward()  # the way on that the error names
    run.step()
    assert (run.weight == -1.0).all()


@changes
@modes
def test_it_is_refused_to_the_second_of_two_optimizers(change, options):
    first, second = Run(ours(**options)), Run(None)
    second.scaler = first.scaler
    for run in (first, second):
        run.backward()
    first.scaler.step(first.optimizer)
    CHANGES[change](first.scaler)
    with pytest.raises(UsageError, match="changed the scale"):
        second.scaler.step(second.optimizer)


def same(scaler):
    scaler.update(scaler.get_scale())


def thrown_away(run, change):
    """A loss is scaled and thrown away, such as after a spike; then the run goes on from a checkpoint."""
    run.backward()
    change(run.scaler)
    run.backward()
    run.step()


def unscaled_before(run, change):
    run.backward()
    run.scaler.unscale_(run.optimizer)
    if change is not CHANGES["update"]:  # which ends the iteration
        change(run.scaler)
    run.step()


def between_steps(run, change):
    run.backward()
    run.step()
    change(run.scaler)
    run.backward()
    run.step()


def by_closure(run, change):
    run.backward()
    change(run.scaler)

    def closure():
        run.backward()
        return torch.zeros(())

    run.scaler.step(run.optimizer, closure)
    run.scaler.update()


def left_as_it_is(run, change):
    run.backward()
    same(run.scaler)
    run.backward()
    same(run.scaler)
    run.step()


@changes
@pytest.mark.parametrize("loop", [thrown_away, unscaled_before, between_steps, by_closure, left_as_it_is])
def test_what_works_with_the_original_works(change, loop):
    a, b = Run(ours()), Run(theirs())
    if loop is by_closure:  # which the original does not have
        b.optimizer.step = lambda closure, step=b.optimizer.step: (
            closure(),
            b.scaler.unscale_(b.optimizer),
            step(),
        )
        b.scaler.step = lambda optimizer, closure: optimizer.step(closure)
    for run in (a, b):
        loop(run, CHANGES[change])
    assert torch.equal(a.weight, b.weight)
    assert a.scaler.get_scale() == b.scaler.get_scale()


def test_a_step_without_gradients_has_pytorchs_error_after_a_scale_was_set() -> None:
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight])
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update(4.0)
        optimizer.zero_grad()
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)
