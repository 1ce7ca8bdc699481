"""`preamp.torch`'s GradScaler and autocast in the place of PyTorch's in Lightning, Accelerate, transformers.

Every library trains the same small net on the same batches, some of which overflow, for two epochs, and
writes a checkpoint of its own after the first. They are imported where they are used: that takes seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from preamp import Trace
from preamp.torch import GradScaler, autocast

LR, CLIP, DECAY = 0.5, 0.01, 0.9
FAINT = 2.0**-10  # such a gradient is clipped only if it was not unscaled
EPOCH = [1.0, FAINT, math.inf, 1.0, FAINT, math.nan, 1.0]  # what each loss is multiplied by
SKIPPED = [not math.isfinite(factor) for factor in EPOCH * 2]
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 2}
# After each step. The last clean step of the first epoch counts in the second, where the first step grows.
SCALES = [2.0**power for power in (10, 11, 10, 10, 11, 10, 10, 11, 11, 10, 10, 11, 10, 10)]
DATA = [
    {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(number)), "factor": torch.tensor(factor)}
    for number, factor in enumerate(EPOCH)
]


def ours(**options: Any) -> GradScaler:
    return GradScaler("cpu", **SETTINGS, **options)


def original() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **SETTINGS)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        assert out.dtype is torch.float16  # the library's own autocast is on
        return {"loss": (out.float() - 3.0).square().mean() * factor.float().mean()}

    def values(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])


class Row(NamedTuple):
    """What is seen after a step. `skipped` is what the library tells, None if it tells nothing."""

    scale: float
    rate: float
    values: list[float]
    skipped: bool | None = None


class Job(NamedTuple):
    """One training: what a library is given."""

    scaler: torch.amp.GradScaler
    folder: Path
    make_optimizer: Callable[..., torch.optim.Optimizer]
    clip: float | None = CLIP
    resume: bool = False  # from the checkpoint in the folder that another job wrote after its first epoch

    def row(self, net: Net, optimizer: Any, skipped: bool | None = None) -> Row:
        rate = optimizer.param_groups[0]["lr"]
        return Row(self.scaler.get_scale(), rate, net.values().tolist(), skipped)


def batches() -> DataLoader:
    return DataLoader(DATA, batch_size=1)


sgd = partial(torch.optim.SGD, lr=LR)
adamw = partial(torch.optim.AdamW, lr=LR / 50)
fused_adamw = partial(adamw, fused=True)


def fabric(job: Job) -> list[Row]:
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=job.scaler)
    host = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    net = Net()
    model, optimizer = host.setup(net, job.make_optimizer(net.parameters()))
    state = {"model": model, "optimizer": optimizer, "scaler": job.scaler}
    if job.resume:
        host.load(job.folder / "fabric.ckpt", state)
    rows = []
    for epoch in range(1 if job.resume else 0, 2):
        for batch in batches():
            optimizer.zero_grad()
            host.backward(model(**batch)["loss"])
            if job.clip:
                host.clip_gradients(model, optimizer, max_norm=job.clip, error_if_nonfinite=False)
            optimizer.step()
            rows.append(job.row(net, optimizer))
        if epoch == 0:
            host.save(job.folder / "fabric.ckpt", state)
    return rows


def lightning(job: Job) -> list[Row]:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.precision import MixedPrecision

    rows = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.make_optimizer(self.net.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            rows.append(job.row(self.net, self.optimizers()))

    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        plugins=MixedPrecision("16-mixed", "cpu", scaler=job.scaler),
        gradient_clip_val=job.clip,
        max_epochs=2,
        callbacks=ModelCheckpoint(job.folder, "{epoch}", save_top_k=-1),
        **silent,
    )
    trainer.fit(Module(), batches(), ckpt_path=job.folder / "epoch=0.ckpt" if job.resume else None)
    return rows


def with_float16(accelerator: Any, scaler: torch.amp.GradScaler) -> Any:
    """Finish an `Accelerator(mixed_precision="fp16")`: on a CPU it leaves float16 and the scaler out."""
    accelerator.native_amp, accelerator.scaler = True, scaler
    return accelerator


def accelerate(job: Job) -> list[Row]:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    host = with_float16(Accelerator(cpu=True, mixed_precision="fp16"), job.scaler)
    net = Net()
    plain = job.make_optimizer(net.parameters())
    model, optimizer, schedule = host.prepare(net, plain, ExponentialLR(plain, DECAY))
    if job.resume:
        host.load_state(str(job.folder / "accelerate"))
    rows = []
    for epoch in range(1 if job.resume else 0, 2):
        for batch in batches():
            host.backward(model(**batch)["loss"])
            if job.clip:
                host.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rows.append(job.row(net, optimizer, optimizer.step_was_skipped))
        if epoch == 0:
            host.save_state(str(job.folder / "accelerate"))
    return rows


def transformers(job: Job) -> list[Row]:
    pytest.importorskip("transformers")
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    rows = []

    class Rows(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows.append(job.row(net, plain, trainer.accelerator.optimizer_step_was_skipped))

    net = Net()
    plain = job.make_optimizer(net.parameters())
    arguments = TrainingArguments(
        str(job.folder),
        use_cpu=True,
        fp16=True,
        per_device_train_batch_size=1,
        num_train_epochs=2,
        max_grad_norm=job.clip or 0.0,
        train_sampling_strategy="sequential",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    schedule = ExponentialLR(plain, DECAY)
    trainer = Trainer(net, arguments, train_dataset=DATA, callbacks=[Rows()], optimizers=(plain, schedule))
    trainer.remove_callback(PrinterCallback)
    with_float16(trainer.accelerator, job.scaler)
    trainer.train(resume_from_checkpoint=str(job.folder / "checkpoint-7") if job.resume else None)
    return rows


LIBRARIES = [fabric, lightning, accelerate, transformers]
# Its Trainer takes ten times as long as the others, and calls the scaler as Accelerate does.
SLOW_TRAINER = pytest.param(transformers, marks=pytest.mark.slow)
QUICK_LIBRARIES = [fabric, lightning, accelerate, SLOW_TRAINER]

pytestmark = [
    pytest.mark.usefixtures("alone"),
    # Lightning says that a training that is resumed finds its own checkpoints.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning:lightning"),
]


@pytest.fixture
def alone(monkeypatch):
    """Nothing is asked of a network, and nothing that Accelerate keeps in globals is left to other tests."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.parametrize("train", LIBRARIES)
def test_training_equals_the_one_with_the_original(train, tmp_path):
    trace = Trace()
    a = train(Job(ours(on_step=trace), tmp_path / "ours", sgd))
    b = train(Job(original(), tmp_path / "original", sgd))
    assert a == b
    assert [row.scale for row in a] == SCALES
    assert [step.skipped for step in trace] == SKIPPED


@pytest.mark.parametrize("train", QUICK_LIBRARIES)
def test_training_equals_the_one_with_the_original_autocast(train, tmp_path, monkeypatch):
    original, entered = train(Job(ours(), tmp_path / "original", sgd)), []

    class Counted(autocast):
        def __enter__(self) -> autocast:
            entered.append(self)
            return super().__enter__()

    for place in (torch, torch.amp, torch.amp.autocast_mode):
        monkeypatch.setattr(place, "autocast", Counted)
    assert train(Job(ours(), tmp_path / "ours", sgd)) == original
    assert len(entered) >= len(original)


@pytest.mark.parametrize("train", QUICK_LIBRARIES)
def test_a_step_is_clipped_after_unscaling_or_skipped(train, tmp_path):
    rows = [Row(0.0, LR, Net().values().tolist()), *train(Job(ours(), tmp_path, sgd))]
    lengths = [math.dist(before.values, after.values) for before, after in pairwise(rows)]
    for row, length, factor in zip(rows, lengths, EPOCH * 2, strict=False):
        if factor == FAINT:
            assert 0.0 < length < 0.9 * row.rate * CLIP
        else:
            assert length == pytest.approx(row.rate * CLIP if math.isfinite(factor) else 0.0, rel=1e-3)


# Lightning refuses to clip for a fused optimizer.
WITH_FUSED = [
    *((train, None) for train in (fabric, lightning, accelerate)),
    (accelerate, CLIP),
    *(pytest.param(transformers, clip, marks=pytest.mark.slow) for clip in (None, CLIP)),
]


@pytest.mark.parametrize(("train", "clip"), WITH_FUSED)
def test_a_fused_optimizer_trains_as_the_one_that_is_not_fused(train, clip, tmp_path):
    a = train(Job(ours(), tmp_path / "fused", fused_adamw, clip))
    b = train(Job(original(), tmp_path / "plain", adamw, clip))
    for one, other in zip(a, b, strict=True):
        assert one.values == pytest.approx(other.values, rel=1e-4, abs=1e-6)
        assert one._replace(values=[]) == other._replace(values=[])


@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw], ids=["SGD", "fused"])
@pytest.mark.parametrize("train", [accelerate, SLOW_TRAINER])
def test_the_library_knows_which_steps_were_skipped_and_its_schedule_waits(train, make_optimizer, tmp_path):
    rows = train(Job(ours(), tmp_path, make_optimizer))
    taken = accumulate(not skipped for skipped in SKIPPED)
    first = make_optimizer(Net().parameters()).param_groups[0]["lr"]
    assert [row.skipped for row in rows] == SKIPPED
    assert [row.rate for row in rows] == pytest.approx([first * DECAY**steps for steps in taken])


@pytest.mark.parametrize(
    ("first", "second"),
    [(ours, GradScaler), (original, GradScaler), (ours, torch.amp.GradScaler)],
    ids=["ours", "from the original", "to the original"],
)
@pytest.mark.parametrize("train", QUICK_LIBRARIES)
def test_the_scaler_goes_on_from_a_checkpoint_of_the_library(train, first, second, tmp_path):
    whole = train(Job(first(), tmp_path, sgd))
    assert train(Job(second("cpu"), tmp_path, sgd, resume=True)) == whole[len(EPOCH) :]


@pytest.mark.parametrize("train", QUICK_LIBRARIES)
def test_steps_are_counted_on_from_a_checkpoint_of_the_library(train, tmp_path):
    trace = Trace()
    train(Job(ours(on_step=Trace()), tmp_path, sgd))
    train(Job(ours(on_step=trace), tmp_path, sgd, resume=True))
    assert [step.index for step in trace] == list(range(len(EPOCH), 2 * len(EPOCH)))
