"""How many calls a step makes that reads nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import Dynamic
from preamp.torch import GradScaler

from . import switches

# Operators that reserve memory or give another view of it, and launch nothing.
LAUNCH_NOTHING = {"empty", "empty_like", "unbind", "view", "detach", "alias", "select", "expand"}


class Calls(TorchDispatchMode):
    """Lists the operators that launch something on a device, and the others."""

    def __init__(self):
        super().__init__()
        self.launched, self.others = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        (self.others if name in LAUNCH_NOTHING else self.launched).append(name)
        return func(*args, **(kwargs or {}))


def beyond_the_optimizers(calls, policy, capturable, **limits):
    """List the calls of an iteration with 161 gradients that a bare fused optimizer does not make."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(161)]
    optimizer, loss = torch.optim.AdamW(parameters, fused=True), torch.ones(())
    scaler = GradScaler("cpu", policy=policy, capturable=capturable)
    for parameter in parameters:
        parameter.grad = torch.ones(4)

    def iterate():
        scaler.scale(loss)
        scaler.step(optimizer, **limits)
        scaler.update()

    with switches.reads_are_free(False), switches.largest_as_on_a_device():
        iterate()
        calls.launched.clear()
        with calls:
            iterate()
    with Calls() as own:
        optimizer.step()
    calls.launched = list((Counter(calls.launched) - Counter(own.launched)).elements())
    calls.others = list((Counter(calls.others) - Counter(own.others)).elements())
    return calls


@pytest.mark.parametrize(
    ("limits", "capturable", "launched"),
    [({}, False, 11), ({"max_norm": 1.0}, False, 19), ({}, True, 14), ({"max_norm": 1.0}, True, 22)],
)
def test_a_fused_step_launches_this_many_kernels(limits, capturable, launched):
    seen = beyond_the_optimizers(Calls(), Dynamic(), capturable, **limits)
    assert (len(seen.launched), seen.others) == (launched, [])
