"""Devices, losses, models and checkpoints that cannot work are refused by name, or warned of."""

import re
import subprocess
import sys

import pytest
import torch

from preamp import Dynamic, Headroom, PolicyError, Static, dialects
from preamp.deepspeed import initialize
from preamp.errors import UsageError
from preamp.torch import GradScaler, ShardedGradScaler, blame
from tests.combinations import in_one_test

from .test_scaler import Training, ours, theirs

NEVER = ["gpu", "meta", "GPU", "", "cuda:x", "opengl", "cpu ", torch.device("meta"), torch.float16, None, 0]


@in_one_test(kind=[GradScaler, ShardedGradScaler], device=NEVER, enabled=[True, False])
def test_a_device_that_never_computes_is_refused_by_name(kind, device, enabled):
    with pytest.raises(PolicyError, match=r'device=.* Write device="cuda" or device="cpu"') as error:
        kind(device, enabled=enabled)
    name = repr(device) if isinstance(device, str) else str(device)
    assert name in str(error.value)


@in_one_test(device=["cpu", "cpu:0", "cuda", "cuda:1", "mps", "xpu", "xla", "hpu", "mtia", "maia"])
def test_a_device_that_computes_somewhere_is_taken_everywhere(device):
    for one in (device, torch.device(device)):
        if torch.cuda.is_available() or one != "cuda":
            assert GradScaler(one).is_enabled()


def test_a_renamed_backend_counts_under_its_new_name():
    program = (
        "import torch; from preamp.torch import GradScaler\n"
        "try: GradScaler('npu')\n"
        "except ValueError as error: assert 'import its package first' in str(error)\n"
        "else: raise AssertionError\n"
        "torch.utils.rename_privateuse1_backend('npu')\n"
        "assert GradScaler('npu').is_enabled()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("made", "part"),
    [
        (lambda loss: (loss, 3), "loss[0]"),
        (lambda loss: [3.0, loss], "loss[1]"),
        (lambda loss: {"logits": loss, "loss": loss}, "loss['loss']"),
        (lambda loss: {"total": loss}, "loss['total']"),
        (lambda loss: loss.item(), "loss"),
    ],
)
def test_a_loss_inside_of_something_else_is_refused_with_the_line_that_takes_it_out(made, part):
    model = torch.nn.Linear(2, 1)
    engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config={})
    loss = model(torch.ones(1, 2)).mean()
    refused = {
        f"Write engine.backward({part}) ": lambda: engine.backward(made(loss)),
        f"Write return {part} ": lambda: blame(lambda: made(model(torch.ones(1, 2)).mean()), model=model),
    }
    for remedy, call in refused.items():
        with pytest.raises(UsageError, match=re.escape(remedy)):
            call()


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [
        (1024.0, r"policy=Static\(1024\.0\) .* policy=Dynamic\(init_scale=1024\.0\)"),
        (1024, r"policy=Static\(1024\.0\) .* policy=Dynamic\(init_scale=1024\.0\)"),
        (0, r"policy=Dynamic\(\)"),
        (True, r"policy=Dynamic\(\)"),
        ("dynamic", r"policy=Dynamic\(\)"),
        (Headroom, r"policy=Headroom\(\)"),
    ],
)
def test_what_is_not_a_policy_is_refused_with_the_one_that_was_meant(policy, remedy):
    with pytest.raises(PolicyError, match=rf"is not a policy\. Write {remedy}"):
        GradScaler("cpu", policy=policy)


@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_what_is_not_an_optimizer_is_refused(method):
    training = Training(ours())
    training.scaler.scale(training.model(torch.ones(1, 3)).sum()).backward()
    for wrong in (training.model, [training.optimizer], 3):
        with pytest.raises(UsageError, match=r"is not an optimizer.* Write scaler\.step\(optimizer\)"):
            getattr(training.scaler, method)(wrong)
    training.scaler.step(training.optimizer)
    training.scaler.update()


BOUNDS = [
    (Dynamic(), 2.0**40, r"above max_scale=4294967296\.0 of Dynamic"),
    (
        Dynamic(),
        2.0**-20,
        r"below min_scale=6\.103515625e-05 of Dynamic",
    ),
    (Headroom(max_scale=2.0**20), 2.0**21, r"above max_scale=1048576\.0 of Headroom"),
    (dialects.DEEPSPEED, 0.5, r"below min_scale=1\.0 of Dynamic"),
]


@pytest.mark.parametrize(("policy", "scale", "said"), BOUNDS)
def test_a_checkpoint_outside_the_bounds_is_told_of_and_loaded(policy, scale, said):
    saved = {**theirs().state_dict(), "scale": scale}
    training = Training(GradScaler("cpu", policy=policy))
    with pytest.warns(UserWarning, match=said) as told:
        training.scaler.load_state_dict(saved)
    assert [one.filename for one in told] == [__file__]
    assert training.scaler.get_scale() == scale
    assert f"={scale!r}) to allow it" in str(told[0].message)


def test_the_default_rule_tells_of_it_once():
    saved = {**theirs().state_dict(), "scale": 2.0**-20}
    with pytest.warns(UserWarning, match="below min_scale") as told:
        ours().load_state_dict(saved)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize(
    ("policy", "scale"),
    [(None, 2.0**-14), (None, 2.0**32), (dialects.TORCH, 2.0**100), (Static(8.0), 2.0**40)],
)
def test_a_checkpoint_within_the_bounds_or_without_them_says_nothing(policy, scale):
    GradScaler("cpu", policy=policy).load_state_dict({**theirs().state_dict(), "scale": scale})
