"""An overflow in forward ruins BatchNorm's statistics, though the step is skipped: named, or put back."""

import copy
import gc
import json
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from preamp import Dynamic, PolicyError, ScaleExhausted, Trace, TraceError
from preamp.deepspeed import initialize
from preamp.errors import UsageError
from preamp.guards import SpikeGuard
from preamp.scaling import Step
from preamp.torch import GradScaler

from . import switches

pytestmark = pytest.mark.filterwarnings("ignore:a skipped step left inf or NaN:UserWarning")
INF, NAN = float("inf"), float("nan")
RUINED = ("1.running_mean", "1.running_var")
FLOAT16 = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8}}


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    model.register_buffer("mask", torch.full((2, 2), -INF).triu(1))  # as attention has it
    model.register_buffer("order", torch.arange(3))
    return model


class Run:
    """A small model with BatchNorm, trained by a scaler."""

    def __init__(self, fused=False, **options):
        self.model = net()
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused)
        options.setdefault("model", self.model)
        self.optimizer, self.scaler = self.sgd, GradScaler("cpu", **options)

    def step(self, number=1, factor=1.0, backward=1.0):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        loss = self.model(x * factor).square().mean() * backward
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def last(self):
        return self.scaler.last_step

    def statistics(self):
        return [self.model[1].running_mean.clone(), self.model[1].running_var.clone()]


def alike(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


ways = pytest.mark.parametrize(
    "way",
    [{}, {"fused": True}, {"capturable": True}, {"on_step": [].append}],
    ids=", ".join,
)


@ways
def test_buffers_that_forward_has_ruined_are_named(way, request):
    if way.get("fused"):
        request.getfixturevalue("reads_cost")
    run = Run(**way)
    run.step()
    assert (run.last.skipped, run.last.buffers) == (False, ())
    run.step(factor=INF)
    assert (run.last.skipped, run.last.buffers) == (True, RUINED)


@ways
def test_an_overflow_in_backward_leaves_them_and_names_none(way):
    run = Run(**way)
    run.step()
    run.step(backward=INF)
    assert (run.last.skipped, run.last.buffers) == (True, ())


restoring = pytest.mark.parametrize("way", [{}, {"fused": True}], ids=str)


@restoring
@pytest.mark.usefixtures("reads_cost")
def test_they_are_put_back_on_request_and_training_is_as_if_nothing_had_been(way):
    ours, clean = Run(**way, restore_buffers=True), Run(**way)
    for number in range(6):
        if number in (1, 3, 4):
            before = ours.statistics()
            ours.step(number, NAN)
            assert (ours.last.skipped, ours.last.buffers) == (True, RUINED)  # told of all the same
            assert ours.last.restored == RUINED
            assert alike(ours.statistics(), before)
        else:
            ours.step(number)
            clean.step(number)
    assert alike(ours.statistics(), clean.statistics())
    assert alike(ours.model.parameters(), clean.model.parameters())


def test_without_a_request_they_stay_as_forward_left_them():
    run = Run()
    run.step()
    run.step(factor=NAN)
    assert run.last.restored == ()
    assert not any(buffer.isfinite().all() for buffer in run.statistics())


def test_what_was_not_finite_to_begin_with_is_no_news_and_never_touched():
    run = Run(restore_buffers=True)
    mask = run.model.mask.clone()
    run.step()
    run.step(factor=INF)
    assert run.last.buffers == RUINED
    assert torch.equal(run.model.mask, mask)


def test_a_model_that_was_saved_ruined_is_told_of():
    run = Run(model=None)
    run.step(factor=NAN)
    scaler = GradScaler("cpu", model=run.model)
    run.scaler = scaler
    run.step(backward=INF)
    assert run.last.buffers == RUINED


def test_a_buffer_that_somebody_set_is_left_alone():
    """Only what is not finite is put back."""
    run = Run(restore_buffers=True)
    run.step()
    run.model.register_buffer("late", torch.ones(1))
    run.model.mask.fill_(7.0)
    run.step(factor=INF)
    assert (run.model.mask == 7.0).all()


@pytest.mark.parametrize("how", ["added", "replaced", "registered"])
def test_modules_that_come_after_the_scaler_are_looked_after(how):
    run = Run(restore_buffers=True)
    run.step()
    if how == "added":
        run.model.append(nn.BatchNorm1d(1))
        run.model[4].register_buffer("mask", torch.full((2,), -INF))
        names = (*RUINED, "4.running_mean", "4.running_var")
    elif how == "replaced":
        run.model[1] = nn.BatchNorm1d(4)
        names = RUINED
    else:
        run.model[3].register_buffer("seen", torch.zeros(1))
        run.model[3].register_forward_hook(lambda one, _, y: one.seen.add_(y.detach().sum()) and None)
        names = (*RUINED, "3.seen")
    run.step()
    before = {name: one.clone() for name, one in run.model.named_buffers()}
    run.step(factor=INF)
    assert run.last.skipped
    assert run.last.buffers == names
    after = dict(run.model.named_buffers())
    assert all(torch.equal(after[name], before[name]) for name in names)


def test_a_module_that_comes_just_before_the_overflow_is_named():
    run = Run()
    run.step()
    run.model.append(nn.BatchNorm1d(1))
    run.step(factor=INF)
    assert run.last.buffers == (*RUINED, "4.running_mean", "4.running_var")


def test_copies_from_before_a_checkpoint_are_not_put_back():
    run = Run(restore_buffers=True)
    run.step()
    saved = copy.deepcopy((run.model.state_dict(), run.scaler.state_dict()))
    run.step()
    run.model.load_state_dict(saved[0])
    run.scaler.load_state_dict(saved[1])
    loaded = [one.clone() for one in run.statistics()]
    run.step(factor=INF)
    assert run.last.buffers == RUINED
    assert all(torch.equal(now, then) for now, then in zip(run.statistics(), loaded, strict=True))


def test_a_first_step_that_is_skipped_leaves_the_values_of_the_beginning():
    run = Run(restore_buffers=True)
    before = [one.clone() for one in run.statistics()]
    run.step(factor=INF)
    assert run.last.skipped
    assert all(torch.equal(now, then) for now, then in zip(run.statistics(), before, strict=True))
    run.step()
    assert all(one.isfinite().all() for one in run.statistics())


def test_clean_steps_look_at_no_buffer(monkeypatch):
    run, looks = Run(), []
    monkeypatch.setattr(switches.buffers.Buffers, "_present", lambda self: looks.append(1) or {})
    for _ in range(3):
        run.step()
        assert run.last.buffers == ()
    assert looks == []


def test_one_optimizer_of_two_skips():
    run = Run()
    other = nn.Parameter(torch.ones(1))
    second = torch.optim.SGD([other], lr=0.1)
    run.scaler.scale(run.model(torch.full((4, 3), INF)).sum()).backward()
    run.scaler.scale(other.sum()).backward()
    run.scaler.step(run.optimizer)
    run.scaler.step(second)
    run.scaler.update()
    assert run.last.buffers == RUINED


def test_a_policy_that_gives_up_names_them_too():
    run = Run(policy=Dynamic(init_scale=1.0, min_scale=1.0, at_floor="raise"))
    with pytest.raises(ScaleExhausted):
        run.step(factor=INF)
    assert run.last.buffers == RUINED


def test_an_engine_names_its_models_buffers():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = initialize(
        model=model, optimizer=inner, config={"fp16": {"enabled": True, "auto_cast": True}}
    )
    engine.backward(engine(torch.full((4, 3), INF)).float().mean())
    engine.step()
    assert engine.last_step.buffers == RUINED


def engine_of(model, config=FLOAT16, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return initialize(model=model, optimizer=inner, config=config, **options)[0]


def trained(engine, *factors):
    for number, factor in enumerate(factors):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x * factor).float().square().mean())
        engine.step()


@pytest.mark.parametrize("steps", [1, 2])
def test_an_engine_puts_them_back_on_request(steps):
    config = {**FLOAT16, "gradient_accumulation_steps": steps}
    engine, clean = (engine_of(net(), config, restore_buffers=restores) for restores in (True, False))
    trained(engine, *[1.0] * steps, *[INF] * steps)
    trained(clean, *[1.0] * steps)
    assert engine.last_step.skipped
    assert engine.last_step.buffers == engine.last_step.restored == RUINED
    assert alike(engine.module.buffers(), clean.module.buffers())
    resumed = engine_of(net(), config, restore_buffers=True)
    resumed.load_state_dict(copy.deepcopy(engine.state_dict()))
    trained(resumed, *[NAN] * steps)
    assert resumed.last_step.restored == RUINED
    assert alike(resumed.module.buffers(), clean.module.buffers())


def test_an_engine_warns_of_what_nothing_restores():
    with pytest.warns(UserWarning, match=r"1\.running_mean.* Write restore_buffers=True beside model=model"):
        trained(engine_of(net()), INF)


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True, "check_grad_overflow": False}}])
def test_an_engine_refuses_to_restore_what_is_never_ruined(config):
    for made in (lambda: engine_of(net(), config, restore_buffers=True), lambda: no_optimizer(FLOAT16)):
        with pytest.raises(UsageError, match="for updates that are skipped, and here none is"):
            made()
    assert engine_of(net(), {}, guard=SpikeGuard(), restore_buffers=True).scaler._buffers.restores


def no_optimizer(config):
    return initialize(model=net(), config=config, restore_buffers=True)


def test_what_cannot_work_is_refused():
    with pytest.raises(PolicyError, match=r"model=3 is not a torch.nn.Module. Write model=model"):
        GradScaler("cpu", model=3)
    with pytest.raises(PolicyError, match=r"restore_buffers=True needs the model.* Write model=model"):
        GradScaler("cpu", restore_buffers=True)
    with pytest.raises(PolicyError, match=r"restore_buffers=True reads.*capturable=True reads nothing"):
        GradScaler("cpu", model=net(), restore_buffers=True, capturable=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_looks_at_the_copied_model(copied):
    run = Run(restore_buffers=True)
    run.step()
    twin = copied(run)
    twin.step(factor=INF)
    assert twin.last.buffers == RUINED
    assert all(buffer.isfinite().all() for one in (run, twin) for buffer in one.statistics())


def test_a_trace_writes_and_reads_them(tmp_path):
    step = Step(0, 2.0, False, True, buffers=RUINED)
    with Trace(path=tmp_path / "t.jsonl") as trace:
        trace(step)
        trace(Step(1, 2.0, True, False))
    assert list(Trace.read(tmp_path / "t.jsonl")) == [step, Step(1, 2.0, True, False)]
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert ["buffers" in json.loads(line) for line in lines] == [False, True, False]
    for wrong in ("1.running_mean", [1], {"a": 1}, None):
        lines[1] = json.dumps({"index": 0, "scale": 2.0, "finite": False, "skipped": True, "buffers": wrong})
        (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
        with pytest.raises(TraceError, match="buffers"):
            Trace.read(tmp_path / "t.jsonl")


def loaded_whole(model, saved):
    model.load_state_dict(saved)


def loaded_in_a_wrapper(model, saved):
    nn.ModuleDict({"net": model}).load_state_dict({f"net.{name}": value for name, value in saved.items()})


def loaded_by_assignment(model, saved):
    model.load_state_dict(copy.deepcopy(saved), assign=True)


def loaded_in_part(model, saved):
    part = {name.removeprefix("1."): value for name, value in saved.items() if name.startswith("1.")}
    model[1].load_state_dict(part)


loading = pytest.mark.parametrize(
    "load", [loaded_whole, loaded_in_a_wrapper, loaded_by_assignment, loaded_in_part]
)


@loading
def test_a_model_may_be_loaded_after_its_scaler(load):
    trained, resumed = Run(restore_buffers=True), Run(restore_buffers=True)
    trained.step()
    saved = copy.deepcopy((trained.model.state_dict(), trained.scaler.state_dict()))
    resumed.scaler.load_state_dict(saved[1])
    load(resumed.model, saved[0])
    before = resumed.statistics()
    assert alike(before, trained.statistics())
    x = torch.full((8, 3), INF)
    with torch.no_grad():
        resumed.model(x)  # as the forward pass of a step that overflows
    scaler = getattr(resumed.scaler, "scaler", resumed.scaler)
    scaler._buffers.ruined()
    assert alike(resumed.statistics(), before)


@pytest.mark.parametrize("load", [loaded_whole, loaded_in_part])
def test_a_copy_of_a_scaler_follows_its_own_model(load):
    run = Run(restore_buffers=True)
    run.step()
    saved, kept = copy.deepcopy(run.model.state_dict()), run.statistics()
    twin = copy.deepcopy(run)
    twin.step(2)
    load(twin.model, saved)
    twin.step(factor=INF)
    assert alike(twin.statistics(), kept)
    run.step(2)
    before = run.statistics()
    load(copy.deepcopy(run.model), saved)  # a copy of a model has no scaler
    run.step(factor=INF)
    assert alike(run.statistics(), before)


def test_a_mask_that_is_loaded_is_left_alone_and_hooks_go_with_the_scaler():
    run = Run(restore_buffers=True)
    run.model[3].register_buffer("late", torch.zeros(2))
    run.step()
    run.model.load_state_dict({**run.model.state_dict(), "3.late": torch.full((2,), -INF)})
    run.step(factor=INF)
    assert run.last.buffers == RUINED
    hooked = [module for module in run.model.modules() if module._load_state_dict_post_hooks]
    assert hooked == [run.model, run.model[1], run.model[3]]
    del run.scaler
    gc.collect()
    assert not any(module._load_state_dict_post_hooks for module in run.model.modules())
    assert not any(module._load_state_dict_post_hooks for module in Run().model.modules())


def averaged(run, when, use_buffers, number=6):
    """Train with an average of the weights, some steps of which overflow."""
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    for index in range(number):
        run.optimizer.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(index))
        run.scaler.scale(run.model(x * (INF if index == 2 else 1.0)).square().mean()).backward()
        run.scaler.step(run.optimizer)
        if when == "between":
            average.update_parameters(run.model)
        run.scaler.update()
        if when == "after":
            average.update_parameters(run.model)
    return average


@pytest.mark.parametrize(
    ("fused", "when", "use_buffers"),
    [(False, "between", False), (True, "between", True), (False, "after", True)],
)
def test_an_average_of_the_model_stays_finite_wherever_it_is_taken(fused, when, use_buffers):
    run = Run(restore_buffers=True, fused=fused)
    average = averaged(run, when, use_buffers)
    statistics = [average.module[1].running_mean, average.module[1].running_var]
    assert all(one.isfinite().all() for one in [*statistics, *run.statistics()])


def test_two_optimizers_with_one_graph_can_step_before_its_second_backward():
    run = Run(restore_buffers=True)
    run.step()
    before = run.statistics()
    head, rest = list(run.model[3].parameters()), list(run.model[:2].parameters())
    first, second = torch.optim.SGD(head, lr=0.1), torch.optim.SGD(rest, lr=0.1)
    for one in run.model.parameters():
        one.grad = None
    out = run.model(torch.full((8, 3), INF))
    run.scaler.scale(out.sum()).backward(retain_graph=True, inputs=head)
    run.scaler.step(first)
    assert alike(run.statistics(), before)
    run.scaler.scale(out.mean()).backward(inputs=rest)  # autograd has kept the statistics
    run.scaler.step(second)
    run.scaler.update()
    assert run.last.buffers == run.last.restored == RUINED
    assert alike(run.statistics(), before)


def said_of_ruin(run, *factors):
    """Train; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in factors:
            run.step(factor=factor)
    return caught


shows_statistics = pytest.mark.skipif(
    not switches.compat.SHOWS_KEPT_TENSORS, reason="this PyTorch does not show what its graph keeps"
)


@pytest.mark.parametrize("named", [pytest.param(False, marks=shows_statistics), True])
def test_what_nothing_restores_is_warned_of_once(named):
    run = Run(**({} if named else {"model": None}))
    (said,) = said_of_ruin(run, 1.0, INF, 1.0, NAN)
    what = "1.running_mean, 1.running_var" if named else "the running statistics of BatchNorm"
    assert f"left inf or NaN in {what}, and nothing restores them" in str(said.message)
    remedy = "restore_buffers=True beside model=model" if named else "GradScaler(..., model=model, restore_"
    assert f"Write {remedy}" in str(said.message)
    assert said.filename == __file__
    assert said_of_ruin(Run(restore_buffers=True), 1.0, INF, 1.0, NAN) == []


@shows_statistics
def test_a_first_step_that_ruins_them_is_warned_of_and_a_copy_learns_them_anew():
    (said,) = said_of_ruin(Run(model=None), INF)
    assert "BatchNorm" in str(said.message)
    run = Run(model=None)
    run.step()
    twin = pickle.loads(pickle.dumps(run))
    assert len(said_of_ruin(twin, 1.0, INF)) == 1


def test_nothing_is_said_where_nothing_is_ruined():
    run = Run(model=None)
    run.model[1].eval()  # frozen
    assert said_of_ruin(run, 1.0, INF) == []
    run = Run(model=None)
    run.step()
    run.step(backward=INF)
    assert run.last.skipped


def test_a_checkpointed_forward_is_not_run_again_to_find_them():
    """The graph of a checkpoint keeps its tensors by running the forward pass again."""
    run = Run(model=None)
    whole = run.model.forward
    run.model.forward = lambda x: checkpoint(whole, x, use_reentrant=False)
    run.step()
    assert run.model[1].num_batches_tracked == 2  # forward, and once more for backward


@shows_statistics
def test_only_skipped_steps_look_for_them():
    run = Run(model=None)
    run.step()
    with switches.looks_for_ruin(False) as looks:
        run.step()
        assert not looks.called
        run.step(factor=INF)
    assert [len(call.args[0]) for call in looks.call_args_list] == [2]
