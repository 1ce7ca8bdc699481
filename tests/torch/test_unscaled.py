"""The warning of float16 autocast without a loss scaler: given where gradients underflow, nowhere else."""

import importlib
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from preamp.errors import UnscaledFloat16
from preamp.torch import GradScaler, autocast

from .switches import unscaled

small_share = unscaled.small_share
optimizers = importlib.import_module("torch.optim.optimizer")
HALF, BRAIN = torch.float16, torch.bfloat16
COMPILED_STEP = unscaled.has_compiled_step
TINY = 1e-4  # what makes the gradients of these models underflow


@pytest.fixture(autouse=True)
def watch(monkeypatch):
    """Return the watch as it is in a new process, in which nothing was compiled."""
    monkeypatch.setattr(unscaled.watch, "is_on", True)
    monkeypatch.setattr(unscaled.watch, "_regions", 0)
    monkeypatch.setattr(unscaled, "has_compiled_step", lambda: False)
    unscaled.watch.stop_looking()  # as a region in another test's training may have it do
    before = optimizers._global_optimizer_pre_hooks
    yield unscaled.watch
    unscaled.watch.stop_looking()
    assert optimizers._global_optimizer_pre_hooks is before


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(64, 100)

    def forward(self, x):
        return self.out(self.layer(self.embedding(x))).transpose(1, 2)


def labeled(x, label):
    return x, label(x)


def mlp():
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    answers = torch.randn(64, 10)
    return nn.Sequential(*layers), lambda: labeled(torch.randn(64, 64), lambda x: (x @ answers).argmax(1))


def conv():
    first = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
    model = nn.Sequential(*first, nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 144, 10))
    answers = torch.randn(3, 10)
    return model, lambda: labeled(torch.randn(32, 3, 16, 16), lambda x: (x.mean((2, 3)) @ answers).argmax(1))


def transformer():
    return Transformer(), lambda: labeled(torch.randint(100, (16, 32)), lambda x: (x * 7 + 3) % 100)


models = pytest.mark.parametrize("make", [mlp, conv, transformer])


def train(make=mlp, factor=TINY, dtype=HALF, scaler=None, steps=3, region=None, zero=True):
    """Train a model; return the warnings of it."""
    torch.manual_seed(0)
    model, batch = make()
    optimizer = torch.optim.Adam(model.parameters())
    region = region or autocast("cpu", dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            x, y = batch()
            optimizer.zero_grad()
            with region:
                loss = F.cross_entropy(model(x), y) * factor
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return [one for one in caught if one.category is UnscaledFloat16]


@models
def test_it_warns_once_where_gradients_underflow(make, watch):
    (said,) = train(make)
    assert not watch.is_on
    assert train(make) == []
    message = str(said.message)
    assert "of the nonzero entries that Adam steps with are below 2.4e-7" in message
    assert "scaler.scale(loss).backward()" in message
    assert said.filename == __file__
    with open(__file__) as file:
        assert file.readlines()[said.lineno - 1].strip() == "optimizer.step()"


@pytest.mark.slow
@models
def test_the_threshold_lies_between_trainings_that_lose_nothing_and_those_that_do(make):
    """The numbers in the module's docstring and in docs/check.md."""

    def losses(factor, dtype):
        torch.manual_seed(0)
        model, batch = make()
        optimizer, shares = torch.optim.Adam(model.parameters()), []
        for _ in range(60):
            x, y = batch()
            optimizer.zero_grad()
            with autocast("cpu", dtype or HALF, enabled=dtype is not None):
                loss = F.cross_entropy(model(x), y)
            (loss * factor).backward()
            shares.append(small_share(gradients(model), 1))
            optimizer.step()
        return loss.item(), max(shares), max(shares[:10])

    unscaled.watch.is_on = False
    for factor in (1.0, 1e-2):
        loss, share, _ = losses(factor, HALF)
        assert share < 0.05
        assert loss == pytest.approx(losses(factor, None)[0], rel=0.02)
    loss, _, early = losses(TINY, HALF)
    assert early > 0.15
    assert loss > losses(TINY, None)[0] * 1.004
    for dtype in (None, BRAIN):
        assert losses(TINY, dtype)[1] == 0.0


@models
@pytest.mark.parametrize("factor", [1e-2])
def test_it_is_silent_where_float16_is_enough(make, factor, watch):
    assert train(make, factor, steps=12) == []
    assert watch.is_on
    assert watch._regions == 12


@pytest.mark.parametrize("factor", [1.0, TINY])
@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler])
def test_it_is_silent_with_a_scaler_and_looks_no_more(factor, scaler, watch):
    assert train(mlp, factor, scaler=scaler("cpu", init_scale=1.0)) == []
    assert not watch.is_on
    assert watch._regions == 1


def test_it_is_silent_in_bfloat16_and_float32(watch):
    assert train(dtype=BRAIN) == []
    assert train(region=autocast("cpu", HALF, enabled=False)) == []
    assert train(region=autocast("cpu", BRAIN, emulate=True)) == []
    assert watch._regions == 0


def test_rehearsed_float16_is_warned_of_as_float16_is(watch):
    """On a CPU that is how float16 is rehearsed."""
    emulated = autocast("cpu", HALF, emulate=True)
    assert train(factor=1.0, region=emulated) == []
    assert train(region=emulated, scaler=GradScaler("cpu", init_scale=1.0)) == []
    watch.is_on, watch._regions = True, 0
    (said,) = train(region=emulated)
    assert "float16 autocast is used without a loss scaler" in str(said.message)
    assert "GradScaler('cpu')" in str(said.message)


def test_a_scaler_that_is_disabled_scales_nothing():
    for scaler in (GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", enabled=False)):
        unscaled.watch.is_on, unscaled.watch._regions = True, 0
        assert len(train(scaler=scaler)) == 1


def test_an_edited_region_counts_like_any_other():
    assert len(train(region=autocast("cpu", HALF, report=True))) == 1


class OwnScaler(torch.amp.GradScaler):
    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)


def test_a_subclass_of_a_scaler_is_one(watch):
    assert train(scaler=OwnScaler("cpu", init_scale=1.0)) == []
    assert not watch.is_on


def test_variables_of_the_program_are_not_kept(watch):
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    large = torch.ones(1)
    still = weakref.ref(large)
    step(model, optimizer, batch, 1.0)
    assert watch._regions == 1
    del large
    assert still() is None


def test_a_user_can_silence_it(watch):
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=UnscaledFloat16)
        step(model, optimizer, batch)
    assert not watch.is_on


def step(model, optimizer, batch, factor=TINY, change=None, **settings):
    """Take one step; `change` is called between backward and step."""
    x, y = batch()
    optimizer.zero_grad()
    with autocast("cpu", HALF, **settings):
        loss = F.cross_entropy(model(x), y) * factor
    loss.backward()
    if change:
        change()
    optimizer.step()


def gradients(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("scale", [3.0, 1024.0])
def test_it_is_silent_where_the_user_scales_by_hand(scale):
    torch.manual_seed(0)
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def unscale():
        for gradient in gradients(model):
            gradient.div_(scale)

    for _ in range(3):
        step(model, optimizer, batch, TINY * scale, unscale)


def test_zeros_are_no_evidence():
    """Gradients of dead units, unused rows and satisfied losses are 0 in any precision."""
    dead = torch.zeros(64, 64)
    dead[0] = torch.randn(64).half().float()
    satisfied = torch.zeros(64, 64)
    assert small_share([dead, satisfied], 1) == 0.0
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    nn.init.constant_(model[0].bias, -100.0)  # no unit is ever on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, lambda: (torch.randn(8, 64), torch.randint(64, (8,))), 1.0)


def test_gradients_of_one_magnitude_are_no_evidence():
    assert small_share([torch.full((64, 64), 2.0**-24)], 1) == 0.0


def test_what_is_no_multiple_of_float16s_smallest_number_is_no_evidence():
    torch.manual_seed(0)
    exact = torch.randn(64, 64) * 1e-7
    rounded = exact.half().float()
    assert small_share([exact], 1) == 0.0
    assert small_share([exact.bfloat16().float()], 1) == 0.0
    assert small_share([rounded], 1) > 0.9
    assert small_share([rounded / 4], 1) == 0.0
    assert small_share([rounded / 4], 4) > 0.9  # the mean over 4 ranks
    assert small_share([rounded, exact], 1) > 0.9  # the norm's weights beside the layers'
    assert small_share([rounded.half()], 1) == 0.0
    assert small_share([rounded.to_sparse(), rounded[0]], 1) == 0.0
    assert small_share([], 1) == 0.0


def test_it_looks_at_a_sample_and_reads_once(monkeypatch):
    reads = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or [[0.0] * 5])
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a read"))
    small_share([torch.randn(100, 100).half().float() for _ in range(50)], 1)
    assert len(reads) == 1
    assert reads[0][0] <= unscaled.TENSORS
    counted = unscaled._counts(torch.full((5000, 5000), 2.0**-24), 2.0**-24)
    assert unscaled.ENTRIES / 2 <= counted[1] <= unscaled.ENTRIES


def test_another_optimizer_in_float32_hides_nothing():
    torch.manual_seed(0)
    model, batch = mlp()
    other = nn.Linear(64, 64)
    first, second = torch.optim.SGD(other.parameters()), torch.optim.SGD(model.parameters())
    with pytest.warns(UnscaledFloat16, match="SGD"):  # noqa: PT031
        for _ in range(2):
            x, y = batch()
            with autocast("cpu", HALF):
                loss = F.cross_entropy(model(x), y) * TINY
            other(x).sum().backward()
            first.step()
            with autocast("cpu", HALF):
                loss = F.cross_entropy(model(x), y) * TINY
            loss.backward()
            second.step()


def test_evaluation_is_not_training(watch):
    model, batch = mlp()
    for _ in range(3):
        with torch.no_grad(), autocast("cpu", HALF):
            model(batch()[0])
    assert watch._regions == 0
    for _ in range(unscaled.LOOKS[-1] + unscaled.PATIENCE * len(unscaled.LOOKS) + 1):
        with autocast("cpu", HALF):
            pass
    assert not watch.is_on


@pytest.mark.parametrize("regions", [2, 16])
def test_it_warns_where_a_step_follows_several_regions(watch, regions):
    torch.manual_seed(0)
    model, batch = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(regions):
        x, y = batch()
        with autocast("cpu", HALF):
            loss = F.cross_entropy(model(x), y) * TINY
        loss.backward()
        with torch.no_grad(), autocast("cpu", HALF):
            model(x)
    with pytest.warns(UnscaledFloat16, match=r"GradScaler\('cpu'\)"):
        optimizer.step()


def test_it_warns_of_a_region_inside_of_one_of_another_precision(watch):
    torch.manual_seed(0)
    model, batch = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = batch()
    with autocast("cpu", BRAIN):
        with autocast("cpu", HALF):
            outputs = model(x)
        loss = F.cross_entropy(outputs, y) * TINY
    loss.backward()
    with pytest.warns(UnscaledFloat16):
        optimizer.step()


def test_the_hook_is_there_until_the_next_step(watch):
    hooks = optimizers._global_optimizer_pre_hooks
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with autocast("cpu", HALF):
        loss = model(batch()[0]).sum()
    assert optimizers._global_optimizer_pre_hooks is not hooks
    with autocast("cpu", BRAIN):
        pass
    assert optimizers._global_optimizer_pre_hooks is not hooks
    loss.backward()
    optimizer.step()
    assert optimizers._global_optimizer_pre_hooks is hooks
    watch._regions = 1
    for _ in range(unscaled.PATIENCE):
        with autocast("cpu", HALF):
            pass
        assert optimizers._global_optimizer_pre_hooks is not hooks
    with autocast("cpu", HALF):
        pass
    assert optimizers._global_optimizer_pre_hooks is hooks


def test_hooks_of_users_run_and_stay():
    called = []
    before = register_optimizer_step_pre_hook(lambda *_: called.append("before"))
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    added = []
    with pytest.warns(UnscaledFloat16):
        step(
            model,
            optimizer,
            batch,
            change=lambda: added.append(
                register_optimizer_step_pre_hook(lambda *_: called.append("in between"))
            ),
        )
    assert called == ["before", "in between"]
    optimizer.step()
    assert called == ["before", "in between"] * 2
    before.remove()
    added[0].remove()
    assert not optimizers._global_optimizer_pre_hooks


def test_a_compiled_step_is_not_looked_at(monkeypatch, watch):
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original, optimizer.step = optimizer.step, torch.compile(optimizer.step, backend="eager")
    step(model, optimizer, batch)
    unscaled.watch.stop_looking()
    optimizer.step = original
    assert watch.is_on
    monkeypatch.undo()
    assert unscaled.has_compiled_step()
    monkeypatch.setattr(watch, "is_on", True)
    monkeypatch.setattr(watch, "_regions", 0)
    step(model, optimizer, batch)
    assert not watch.is_on


def test_it_warns_where_the_model_is_compiled_and_the_step_is_not(monkeypatch, watch):
    torch._dynamo.reset()
    monkeypatch.setattr(unscaled, "has_compiled_step", COMPILED_STEP)
    torch.manual_seed(0)
    model, batch = mlp()
    compiled, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.Adam(model.parameters())
    with pytest.warns(UnscaledFloat16):
        step(compiled, optimizer, batch)


def test_it_warns_where_the_step_is_inside_of_the_region(watch):
    torch.manual_seed(0)
    model, batch = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        with autocast("cpu", HALF):
            x, y = batch()
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * TINY).backward()
            optimizer.step()

    train()
    with pytest.warns(UnscaledFloat16):
        train()
    assert not watch.is_on
    train()


def test_it_is_said_on_stderr_of_a_program_that_does_nothing_about_warnings():
    program = """
import torch
from preamp.torch import autocast
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with autocast("cpu", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 64)), torch.arange(64)) * 1e-4
    loss.backward()
    optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("UnscaledFloat16: float16 autocast is used without a loss scaler") == 1
