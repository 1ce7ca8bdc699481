"""A guard beside PyTorch's scalers: decisions as in a simulation, and nothing moves when it skips."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import Dynamic, Reading, Static, Trace, guards, simulate
from preamp.errors import PolicyError, UsageError
from preamp.torch import GradScaler

Script = list[tuple[float, float]]  # losses and norms
RULES: dict[str, Callable[[], guards.Guard[Any]]] = {
    "spike": guards.SpikeGuard,
    "spike_quick": lambda: guards.SpikeGuard(warmup=3, patience=2),
    "norm": lambda: guards.NormLimit(5.0),
    "olmo": lambda: guards.OLMO(rolling_interval_length=32),
    "levanter": lambda: guards.LEVANTER(rolling_interval_length=16),
    "maxtext": lambda: guards.MAXTEXT(16, 4.0),
    "megatron": lambda: guards.MEGATRON_NORM(5.0),
}


def script(seed: int, steps: int = 150, nan_losses: bool = False) -> Script:
    """Return losses and norms with spikes of either, runs of spikes and overflows."""
    drawn = random.Random(seed)
    made = []
    for index in range(steps):
        loss, norm = 2.0 + 0.1 * drawn.gauss(0.0, 1.0), math.exp(0.2 * drawn.gauss(0.0, 1.0))
        kind = drawn.random() if index >= 30 else 0.11 + drawn.random()  # at first no spikes
        if kind < 0.04:
            loss *= 10.0
        elif kind < 0.08:
            norm *= 20.0
        elif kind < 0.11 or index == 20:
            norm = math.inf
        elif kind < 0.12 and nan_losses and index > 100:
            loss = math.nan
        made.append((loss, norm))
    return made


class Given(torch.autograd.Function):
    """A loss and a gradient that are given: the gradient may be inf where the loss is not."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, loss: float, norm: float) -> torch.Tensor:
        ctx.norm = norm
        return weight.new_tensor(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient * ctx.norm).view(1), None, None


def loss_of(weight: torch.Tensor, loss: float, norm: float) -> torch.Tensor:
    """Return a loss of this value whose gradient has this norm."""
    made: torch.Tensor = Given.apply(weight, loss, norm)  # type: ignore[no-untyped-call]
    return made


class Run:
    """Weights that are trained step by step by a script."""

    def __init__(self, guard: guards.Guard[Any], make: Callable[..., Any] = torch.optim.SGD, **options: Any):
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = make([self.weight], lr=1e-3)
        self.trace = Trace()
        if not options.get("capturable"):
            options["on_step"] = self.trace
        self.scaler = GradScaler("cpu", policy=Dynamic(growth_interval=10), guard=guard, **options)

    def step(self, loss: float, norm: float, **limits: Any) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(loss_of(self.weight, loss, norm)).backward()
        self.scaler.step(self.optimizer, **limits)
        self.scaler.update()
        if self.scaler.on_step is None:
            assert self.scaler.last_step is not None
            self.trace(self.scaler.last_step)


def unscaled_first(run: Run, loss: float, norm: float) -> None:
    run.optimizer.zero_grad()
    run.scaler.scale(loss_of(run.weight, loss, norm)).backward()
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    run.scaler.update()


def clipped_by_pytorch(run: Run, loss: float, norm: float) -> None:
    run.optimizer.zero_grad()
    run.scaler.scale(loss_of(run.weight, loss, norm)).backward()
    run.scaler.unscale_(run.optimizer)
    torch.nn.utils.clip_grad_norm_([run.weight], 0.5)  # the guard is told the norm from before
    run.scaler.step(run.optimizer)
    run.scaler.update()
    if run.scaler.on_step is None:
        assert run.scaler.last_step is not None
        run.trace(run.scaler.last_step)


def by_closure(run: Run, loss: float, norm: float) -> None:
    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        value = loss_of(run.weight, loss, norm)
        run.scaler.scale(value).backward()
        return value

    run.scaler.step(run.optimizer, closure)
    run.scaler.update()


def fused(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(*args, **kwargs, fused=True)


WAYS: dict[str, tuple[dict[str, Any], Callable[[Run, float, float], object]]] = {
    "host": ({}, Run.step),
    "clipped": ({}, lambda run, *step: run.step(*step, max_norm=0.5)),
    "clipped by value": ({}, lambda run, *step: run.step(*step, max_value=0.5, max_norm=0.5)),
    "unscaled first": ({}, unscaled_first),
    "clipped by PyTorch": ({}, clipped_by_pytorch),
    "clipped by PyTorch, fused": ({"make": fused}, clipped_by_pytorch),
    "clipped by PyTorch, capturable": ({"capturable": True}, clipped_by_pytorch),
    "closure": ({}, by_closure),
    "fused": ({"make": fused}, Run.step),
    "fused and clipped": ({"make": fused}, lambda run, *step: run.step(*step, max_norm=0.5)),
    "capturable": ({"capturable": True}, Run.step),
    "capturable and clipped": ({"capturable": True}, lambda run, *step: run.step(*step, max_norm=0.5)),
    "capturable and fused": ({"capturable": True, "make": fused}, Run.step),
}


def simulated(rule: str, steps: Script) -> Trace:
    readings = [
        Reading(math.isfinite(norm), loss=loss, grad_norm=norm if math.isfinite(norm) else None)
        for loss, norm in steps
    ]
    return simulate(Dynamic(growth_interval=10), readings, guard=RULES[rule]())


def decisions(trace: Trace) -> list[Any]:
    return [(step.reason, step.spike and step.spike.of, step.scale, step.new_scale) for step in trace]


QUICK = [
    *(("spike_quick", way) for way in WAYS),
    *((rule, "host") for rule in RULES if rule != "spike_quick"),
]
QUICK += [("olmo", "capturable"), ("norm", "capturable")]


@pytest.mark.parametrize(("rule", "way"), QUICK)
def test_decisions_are_those_of_a_simulation(rule: str, way: str) -> None:
    options, step = WAYS[way]
    steps = script(seed=len(rule) + 7 * len(way), nan_losses=True)
    run = Run(RULES[rule](), **options)
    for loss, norm in steps:
        step(run, loss, norm)
    expected = simulated(rule, steps)
    assert decisions(run.trace) == decisions(expected)
    assert any(one.reason == "overflow" for one in run.trace)
    assert any(one.reason == "spike" for one in run.trace)
    for ours, theirs in zip(run.trace, expected, strict=True):
        if theirs.spike is not None and math.isfinite(theirs.spike.limit):
            assert ours.spike is not None
            assert ours.spike.value == pytest.approx(theirs.spike.value, rel=1e-5, nan_ok=True)
            assert ours.spike.limit == pytest.approx(theirs.spike.limit, rel=1e-4)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, fused, torch.optim.SGD])
def test_a_spike_changes_nothing(make: Callable[..., Any], capturable: bool) -> None:
    run = Run(guards.NormLimit(5.0), make, capturable=capturable)
    for _ in range(3):
        run.step(2.0, 1.0)
    weight = run.weight.detach().clone()
    state = copy.deepcopy(run.optimizer.state_dict())
    policy_state = run.scaler.policy_state
    run.step(2.0, 50.0)
    assert run.trace[-1].reason == "spike"
    assert run.trace[-1].spike == ("grad_norm", pytest.approx(50.0), 5.0)
    assert run.trace[-1].culprits == ("param_groups[0]['params'][0]",)
    assert torch.equal(run.weight, weight)
    after = run.optimizer.state_dict()
    assert repr(after) == repr(state)
    assert run.scaler.policy_state == policy_state
    run.step(2.0, 1.0)
    assert not torch.equal(run.weight, weight)


def test_without_scaling_a_guard_still_guards() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", policy=Static(1.0), guard=guards.NormLimit(5.0))
    scaler.scale(loss_of(weight, 1.0, 9.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step is not None
    assert scaler.last_step.reason == "spike"
    assert weight.item() == 1.0
    assert weight.grad is not None
    assert weight.grad.item() == 9.0  # unscaled, and not clipped


def test_each_optimizer_has_statistics_of_its_own() -> None:
    small, large = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizers = [torch.optim.SGD([one], lr=1e-3) for one in (small, large)]
    scaler = GradScaler("cpu", guard=guards.SpikeGuard(warmup=3))
    for index in range(6):
        factor = 30.0 if index == 5 else 1.0
        loss = loss_of(small, 1.0, factor * 0.1) + loss_of(large, 1.0, 10.0)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    first, second = [scaler.last_step_of(optimizer) for optimizer in optimizers]
    assert first is not None
    assert second is not None
    assert (first.reason, second.reason) == ("spike", None)
    assert scaler.last_step is not None
    assert scaler.last_step.reason == "spike"


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rule", "max_norm"), [("spike", None), ("olmo", 1.0)])
def test_nothing_is_read_where_nothing_may_be(rule: str, max_norm: float | None) -> None:
    run = Run(RULES[rule](), fused, capturable=True)
    run.step(2.0, 1.0, max_norm=max_norm)
    run.optimizer.zero_grad()
    run.scaler.scale(loss_of(run.weight, 2.0, 1.0)).backward()
    with Reads() as reads:
        run.scaler.step(run.optimizer, max_norm=max_norm)
        run.scaler.update()
    assert reads.count == 0


class Passes(TorchDispatchMode):
    """Counts operators that are given all gradients of a model: sizes of at least 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and (not isinstance(args[0], list) or args[0]):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            if isinstance(first, torch.Tensor) and first.numel() >= 1000:
                self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("capturable", [False, True])
def test_a_guard_costs_no_more_passes_than_max_norm(capturable: bool) -> None:
    def passes(guard: Any, **limits: Any) -> list[str]:
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = GradScaler("cpu", guard=guard, capturable=capturable)
        counted = Passes()
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            counted = Passes()
            with counted:
                scaler.step(optimizer, **limits)
                scaler.update()
        return counted.names

    clipped = passes(None, max_norm=1e9)
    assert clipped
    assert passes(guards.SpikeGuard(), max_norm=1e9) == clipped
    assert passes(guards.SpikeGuard()) == clipped


@pytest.mark.parametrize(("rule", "capturable"), [("spike_quick", True), ("olmo", False)])
def test_a_checkpoint_continues_the_guard(rule: str, capturable: bool) -> None:
    steps = script(3, 60)
    whole, first = (Run(RULES[rule](), capturable=capturable) for _ in range(2))
    for loss, norm in steps:
        whole.step(loss, norm)
    for loss, norm in steps[:30]:
        first.step(loss, norm)
    second = Run(RULES[rule](), capturable=capturable)
    second.scaler.load_state_dict(pickle.loads(pickle.dumps(first.scaler.state_dict())))
    with torch.no_grad():
        second.weight.copy_(first.weight)
    for loss, norm in steps[30:]:
        second.step(loss, norm)
    assert decisions(second.trace) == decisions(whole.trace)[30:]
    assert decisions(first.trace) == decisions(whole.trace)[:30]


def test_a_checkpoint_of_another_guard_is_refused_and_changes_nothing() -> None:
    first, second = Run(guards.OLMO), Run(guards.SpikeGuard())
    first.step(2.0, 1.0)
    before = second.scaler.state_dict()
    with pytest.raises(PolicyError, match=r"del state_dict\['preamp_state'\]\['guard'\]"):
        second.scaler.load_state_dict(first.scaler.state_dict())
    assert second.scaler.state_dict() == before
    torch_one = torch.amp.GradScaler("cpu", init_scale=4.0)
    torch_one.scale(torch.ones(()))
    second.scaler.load_state_dict(torch_one.state_dict())  # without a guard it starts again
    assert second.scaler.get_scale() == 4.0


class Pair:
    """Two optimizers of one scaler, as of a GAN; the losses of the second are a hundred times as large."""

    def __init__(self, sizes: tuple[int, int] = (1, 3)) -> None:
        self.scaler = GradScaler("cpu", policy=Static(1.0), guard=guards.SpikeGuard())
        weights = [[torch.nn.Parameter(torch.ones(1)) for _ in range(size)] for size in sizes]
        self.optimizers = [torch.optim.SGD(some, lr=1e-6) for some in weights]
        self.drawn = random.Random(0)

    def step(self, which: int, factor: float = 1.0) -> bool:
        """Take a step of one of them; return whether it was skipped."""
        optimizer = self.optimizers[which]
        optimizer.zero_grad()
        value = factor * 100.0**which * (1.0 + 0.01 * self.drawn.random())
        loss: torch.Tensor = sum(w.sum() for w in optimizer.param_groups[0]["params"])  # type: ignore[assignment]
        self.scaler.scale(loss * (value / loss.item())).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        assert self.scaler.last_step is not None
        return self.scaler.last_step.skipped

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert not self.step(0)
            assert not self.step(1)


@pytest.mark.parametrize("first", [0, 1])
def test_each_optimizer_gets_its_own_state_from_a_checkpoint_whichever_steps_first(first: int) -> None:
    before, after = Pair(), Pair()
    before.steps(40)
    after.scaler.load_state_dict(pickle.loads(pickle.dumps(before.scaler.state_dict())))
    for which in (first, 1 - first):
        assert not after.step(which)
        assert after.step(which, 5.0)
    assert after.scaler.state_dict()["preamp_state"]["guard_of"] == tuple(
        (size, size) for size in ((1, 3) if first == 0 else (3, 1))
    )


def test_what_a_scaler_remembers_of_optimizers_follows_a_checkpoint_in_the_process() -> None:
    pair = Pair()
    assert not pair.step(0)
    early = copy.deepcopy(pair.scaler.state_dict())
    pair.steps(30)
    pair.scaler.load_state_dict(early)
    assert not pair.step(1, 50.0)  # in its warm-up
    other = Pair((2, 4))
    other.scaler.load_state_dict(early)
    with pytest.warns(UserWarning, match="again for an optimizer of 4 parameters.* for optimizers of 1"):
        other.step(1)
    plain = GradScaler("cpu", policy=Static(1.0))
    plain.scale(torch.ones(()))
    pair.scaler.load_state_dict(plain.state_dict())
    assert not pair.step(1)
    assert not pair.step(0, 50.0)


def test_optimizers_of_one_size_get_their_states_in_order_and_a_warning_says_so() -> None:
    before, after = Pair((2, 2)), Pair((2, 2))
    before.steps(20)
    after.scaler.load_state_dict(before.scaler.state_dict())
    with pytest.warns(UserWarning, match="in the order in which the optimizers take their first steps"):
        after.step(0)
    assert after.step(1, 5.0)


def test_an_optimizer_that_is_gone_is_forgotten() -> None:
    pair = Pair()
    pair.steps(20)
    for _ in range(3):
        pair.optimizers[0] = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-6)
        assert not pair.step(0, 50.0)  # a new one, in its warm-up
    gc.collect()
    assert len(pair.scaler.state_dict()["preamp_state"]["guard"]) == 2


def test_a_scaler_without_a_guard_warns_that_it_drops_the_state_of_one() -> None:
    pair, plain = Pair(), GradScaler("cpu", policy=Static(1.0))
    pair.steps(2)
    with pytest.warns(UserWarning, match="and there is none here: spikes are not skipped. Write guard= as"):
        plain.load_state_dict(pair.scaler.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_checkpoint_is_saved_and_loaded_by_torch_distributed_checkpoint(tmp_path: Path) -> None:
    before, after = Pair(), Pair()
    before.steps(20)
    dcp.save({"scaler": before.scaler}, checkpoint_id=tmp_path)
    dcp.load({"scaler": after.scaler}, checkpoint_id=tmp_path)
    assert after.scaler.state_dict() == before.scaler.state_dict()
    assert after.step(1, 5.0)


def test_a_loss_of_a_validation_is_none_of_the_next_step() -> None:
    run = Run(guards.SpikeGuard())
    for _ in range(20):
        run.step(2.0, 1.0)
    with torch.no_grad():
        run.scaler.scale(loss_of(run.weight, 50.0, 1.0))
    run.step(2.0, 1.0)
    assert run.trace[20].loss == 2.0
    assert not run.trace[20].skipped


def test_a_guard_that_skips_and_skips_is_told_of() -> None:
    run = Run(guards.NormLimit(0.5))
    for _ in range(99):
        run.step(2.0, 1.0)
    said = r"NormLimit\(threshold=0.5\) has skipped 100 steps in a row"
    with pytest.warns(UserWarning, match=said) as found:
        run.step(2.0, 1.0)
    assert [warning.filename for warning in found] == [__file__]
    for _ in range(150):
        run.step(2.0, 1.0)


def test_a_group_of_losses_needs_a_guard_that_uses_them() -> None:
    with pytest.raises(PolicyError, match="is for a guard that uses the loss"):
        GradScaler("cpu", loss_group=object(), guard=guards.NormLimit(1.0))
    with pytest.raises(PolicyError, match=r"loss_group=3 is not a ProcessGroup. Write"):
        GradScaler("cpu", loss_group=3, guard=guards.SpikeGuard())


def test_a_scaler_with_a_guard_can_be_pickled() -> None:
    run = Run(guards.SpikeGuard(warmup=3))
    for loss, norm in script(1, 20):
        run.step(loss, norm)
    run.scaler.on_step = None
    twin = pickle.loads(pickle.dumps(run.scaler))
    assert twin.state_dict() == run.scaler.state_dict()


def test_what_cannot_be_guarded_raises() -> None:
    with pytest.raises(PolicyError, match="policy=Static"):
        GradScaler("cpu", enabled=False, guard=guards.SpikeGuard())
    with pytest.raises(PolicyError, match="not a guard"):
        GradScaler("cpu", guard=5.0)  # type: ignore[arg-type]
    run = Run(guards.SpikeGuard())
    run.scaler.scale(torch.ones(2) * run.weight)[0].backward()
    before = run.weight.detach().clone()
    with pytest.raises(UsageError, match='SpikeGuard\\(watch="grad_norm"\\)'):
        run.scaler.step(run.optimizer)
    assert torch.equal(run.weight, before)


def test_buffers_of_a_model_are_restored_after_a_spike() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = guards.NormLimit(100.0)
    scaler = GradScaler("cpu", guard=guard, model=model, restore_buffers=True)
    before: dict[str, torch.Tensor] = {}
    for index in range(4):
        optimizer.zero_grad()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        factor = 1e4 if index == 3 else 1.0
        scaler.scale(factor * model(torch.randn(8, 4) * factor).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step is not None
    assert scaler.last_step.reason == "spike"
    after = model.state_dict()
    assert not [name for name in before if not torch.equal(before[name], after[name])]


def test_a_policy_that_gives_up_is_not_asked_about_spikes() -> None:
    run = Run(guards.NormLimit(5.0))
    run.scaler = GradScaler(
        "cpu",
        policy=Dynamic(init_scale=1.0, min_scale=1.0, at_floor="raise"),
        guard=guards.NormLimit(5.0),
    )
    for _ in range(5):
        run.step(1.0, 9.0)
    assert run.scaler.get_scale() == 1.0


@pytest.mark.parametrize(("rule", "forward_too"), [("levanter", False), ("spike_quick", True)])
def test_compiled_steps_decide_alike_in_one_graph(rule: str, forward_too: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    scaler = GradScaler("cpu", capturable=True, policy=Dynamic(), guard=RULES[rule]())

    def forward(factor: torch.Tensor) -> torch.Tensor:
        return scaler.scale(factor * weight.square().sum())

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    factors = [1.0 + 0.01 * (index % 3) for index in range(16)]
    factors[12] = 30.0
    trace, losses, norms = Trace(), [], []
    compiled = [torch.compile(one, backend="eager", fullgraph=True) for one in (forward, update)]
    for index, factor in enumerate(factors):
        optimizer.zero_grad()
        losses.append(factor * float(weight.detach().square().sum()))
        norms.append(factor * 2.0 * float(weight.detach().norm()))
        forwards, updates = compiled if index else (forward, update)  # the first step makes the state
        (forwards if forward_too else forward)(torch.tensor(factor)).backward()
        updates()
        assert scaler.last_step is not None
        trace(scaler.last_step)
    readings = [Reading(True, loss=loss, grad_norm=norm) for loss, norm in zip(losses, norms, strict=True)]
    assert decisions(trace) == decisions(simulate(Dynamic(), readings, guard=RULES[rule]()))
    assert [step.index for step in trace if step.skipped] == [12]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + forward_too


def test_a_checkpoint_with_a_guard_can_be_read_as_pytorchs() -> None:
    run = Run(guards.SpikeGuard())
    run.step(2.0, 1.0)
    torch.amp.GradScaler("cpu").load_state_dict(run.scaler.state_dict())
