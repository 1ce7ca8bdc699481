"""`LossScaleOptimizer` for PyTorch: every argument beside the same thing written out in plain PyTorch."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from preamp import Dynamic, InexactScale, PolicyError, ScaleExhausted, Static, Trace, UsageError, dialects
from preamp.torch import LossScaleOptimizer
from tests.originals import keras_worker

INF = float("inf")
INNER = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
]
inners = pytest.mark.parametrize("inner", INNER)


class Run:
    """A small model, trained by a LossScaleOptimizer or by its inner optimizer alone."""

    def __init__(self, inner=INNER[0], *, wrap: bool = True, dtype=torch.float32, **options) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2).to(dtype)
        self.optimizer = inner(self.model.parameters())
        if wrap:
            self.optimizer = LossScaleOptimizer(self.optimizer, **options)

    def backward(self, number: int, factor: float = 1.0) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(self.model.weight.dtype)
        loss = self.model(x).float().square().mean() * factor
        if isinstance(self.optimizer, LossScaleOptimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def step(self, number: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.backward(number, factor)
        self.optimizer.step()

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.model.parameters()])

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters()]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@inners
def test_clean_steps_are_those_of_the_inner_optimizer(inner):
    ours, plain = Run(inner), Run(inner, wrap=False)
    for number in range(5):
        ours.step(number)
        plain.step(number)
    assert close(ours.values(), plain.values())
    assert ours.optimizer.iterations == 5


@inners
def test_an_overflow_changes_nothing_and_halves_the_scale(inner):
    run = Run(inner, initial_scale=1024.0, dynamic_growth_steps=2)
    run.step(0)
    before, state = run.values(), copy.deepcopy(run.optimizer.inner_optimizer.state_dict())
    run.step(1, INF)
    assert run.optimizer.last_step.skipped
    assert run.optimizer.loss_scale == 512.0
    assert torch.equal(run.values(), before)
    assert str(run.optimizer.inner_optimizer.state_dict()) == str(state)
    run.step(2)
    run.step(3)
    assert run.optimizer.loss_scale == 1024.0
    assert (run.optimizer.iterations, run.optimizer.skipped_steps) == (3, 1)


def clip_each(gradients: list[torch.Tensor], limit: float) -> None:
    for gradient in gradients:
        gradient.mul_(limit / max(limit, gradient.norm().item()))


@inners
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize(
    ("argument", "limit", "clip"),
    [
        ("clipnorm", 0.3, lambda run: clip_each(run.gradients(), 0.3)),
        ("clipvalue", 0.1, lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.1)),
        ("global_clipnorm", 0.3, lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.3)),
    ],
)
def test_each_way_to_clip(inner, steps, argument, limit, clip):
    ours = Run(inner, gradient_accumulation_steps=steps, **{argument: limit})
    plain = Run(inner, wrap=False)
    for number in range(4):
        for _ in range(steps or 1):
            ours.step(number)
        plain.optimizer.zero_grad()
        plain.backward(number)
        clip(plain)
        plain.optimizer.step()
    assert close(ours.values(), plain.values())


@inners
def test_weight_decay_is_decoupled_and_waits_for_a_step_that_is_taken(inner):
    ours, plain = Run(inner, weight_decay=0.1), Run(inner, wrap=False)
    for number, factor in enumerate((1.0, INF, 1.0)):
        ours.step(number, factor)
        if factor == 1.0:
            with torch.no_grad():
                for p in plain.model.parameters():
                    p.mul_(1 - 0.1 * 0.1)
            for p in plain.model.parameters():
                p.grad = None
            gradients = ours.gradients()
            for p, gradient in zip(plain.model.parameters(), gradients, strict=True):
                p.grad = gradient.clone()
            plain.optimizer.step()
    assert close(ours.values(), plain.values())


def test_averages_overwrite_the_weights_every_so_many_updates():
    run = Run(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)
    for number in range(7):
        run.step(number, INF if number == 1 else 1.0)
        average = torch.cat([value.flatten() for value in run.optimizer._averages.values])
        assert torch.equal(run.values(), average) == (run.optimizer.iterations in (1, 3, 6)), number
    assert run.optimizer.iterations == 6


def test_the_average_is_the_one_of_the_formula():
    run, average = Run(use_ema=True, ema_momentum=0.9), None
    for number in range(4):
        run.step(number)
        average = run.values() if average is None else 0.9 * average + 0.1 * run.values()
    weights = run.values()
    with run.optimizer.averaged():
        assert close(run.values(), average)
    assert torch.equal(run.values(), weights)
    run.optimizer.finalize_variable_values()
    assert close(run.values(), average)


ARGUMENTS = [
    {},
    {"weight_decay": 0.05},
    {"clipnorm": 0.5},
    {"clipvalue": 0.3},
    {"global_clipnorm": 0.7},
    {"use_ema": True, "ema_momentum": 0.8},
    {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 2, "global_clipnorm": 0.7, "weight_decay": 0.05},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_argument_does_what_it_does_in_keras(momentum, arguments):
    """There on the optimizer inside: Keras's own LossScaleOptimizer refuses or ignores them.

    Accumulation with averages is left out: Keras averages at every micro-step, and overwrites before the
    update it counts; here both go by updates.
    """
    numbers = torch.randn(8, 5, generator=torch.Generator().manual_seed(3)).tolist()
    gradients = [[row[:2], row[2:]] for row in numbers]
    expected = keras_worker("torch")("trained", "SGD", {"momentum": momentum, **arguments}, gradients)
    weights = [torch.nn.Parameter(torch.ones(n)) for n in (2, 3)]
    optimizer = LossScaleOptimizer(torch.optim.SGD(weights, lr=0.1, momentum=momentum), **arguments)
    for step, after in zip(gradients, expected, strict=False):
        optimizer.zero_grad()
        products = (w @ torch.tensor(g) for w, g in zip(weights, step, strict=True))
        optimizer.backward(sum(products))
        optimizer.step()
        assert torch.cat([w.detach() for w in weights]).tolist() == pytest.approx(after, rel=1e-5)
    optimizer.finalize_variable_values()
    assert torch.cat([w.detach() for w in weights]).tolist() == pytest.approx(expected[-1], rel=1e-5)


def test_an_error_inside_averaged_puts_the_weights_back():
    run = Run(use_ema=True)
    run.step(0)
    run.step(1)
    weights = run.values()
    with pytest.raises(KeyError), run.optimizer.averaged():
        raise KeyError
    assert torch.equal(run.values(), weights)
    with pytest.raises(PolicyError, match="use_ema=True"), Run().optimizer.averaged():
        pass


@inners
@pytest.mark.parametrize("factor", [128.0, 2.0**-6])
def test_a_loss_scale_factor_cancels_out(inner, factor):
    ours, plain = Run(inner, loss_scale_factor=factor, initial_scale=8.0), Run(inner, wrap=False)
    assert ours.optimizer.scale_loss(torch.ones(())).item() == 8.0 * factor
    for number in range(3):
        ours.step(number)
        plain.step(number)
    assert close(ours.values(), plain.values())
    assert ours.optimizer.loss_scale == 8.0


@inners
@pytest.mark.parametrize("dropped", [None, 0, 1, 2])
def test_accumulation_takes_the_mean_of_what_did_not_overflow(inner, dropped):
    ours, plain = Run(inner, gradient_accumulation_steps=3), Run(inner, wrap=False)
    start = ours.values()
    for number in range(3):
        assert torch.equal(ours.values(), start)
        ours.step(number, INF if number == dropped else 1.0)
    plain.optimizer.zero_grad()
    kept = [number for number in range(3) if number != dropped]
    for number in kept:
        plain.backward(number, 1.0 / len(kept))
    plain.optimizer.step()
    assert close(ours.values(), plain.values())
    assert ours.optimizer.iterations == 1


def test_an_accumulation_of_overflows_alone_updates_nothing():
    run = Run(gradient_accumulation_steps=2, initial_scale=8.0)
    before = run.values()
    for number in range(4):
        run.step(number, INF)
    assert torch.equal(run.values(), before)
    assert run.optimizer.loss_scale == 0.5
    run.step(0)
    run.step(1)
    assert run.optimizer.iterations == 1


OPTIONS = [
    {},
    {"use_ema": True, "ema_overwrite_frequency": 3},
    {"gradient_accumulation_steps": 3},
    {"master_weights": True, "dtype": torch.float16},
    {"policy": Dynamic(hysteresis=2, init_scale=64.0), "global_clipnorm": 0.1, "weight_decay": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("inner", INNER[1:])
@pytest.mark.parametrize("pause", [2, 4])
def test_a_run_that_is_resumed_equals_one_that_is_not(inner, options, pause, tmp_path):
    whole, half = Run(inner, **options), Run(inner, **options)
    for number in range(8):
        if number == pause:
            torch.save((half.model.state_dict(), half.optimizer.state_dict()), tmp_path / "c.pt")
            half = Run(inner, **options)
            model, optimizer = torch.load(tmp_path / "c.pt", weights_only=True)
            half.model.load_state_dict(model)
            half.optimizer.load_state_dict(optimizer)
        for run in (whole, half):
            run.step(number, INF if number in (1, 5) else 1.0)
    assert torch.equal(whole.values(), half.values())
    assert whole.optimizer.loss_scale == half.optimizer.loss_scale
    assert whole.optimizer.skipped_steps == half.optimizer.skipped_steps == 2


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_a_copy_is_an_optimizer_of_its_own(options):
    run = Run(**options)
    run.step(0)
    twin = pickle.loads(pickle.dumps(run))
    for number in range(1, 7):
        run.step(number)
        twin.step(number)
    assert torch.equal(run.values(), twin.values())
    assert run.values().data_ptr() != twin.values().data_ptr()


def test_it_is_an_optimizer_to_schedulers_and_hooks():
    run, heard = Run(), []
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    run.optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    run.optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    run.optimizer.register_load_state_dict_pre_hook(lambda *_: heard.append("load"))
    run.optimizer.register_load_state_dict_post_hook(lambda *_: heard.append("loaded"))
    run.step(0)
    scheduler.step()
    assert run.optimizer.inner_optimizer.param_groups[0]["lr"] == 0.05
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert heard == ["before", "after", "load", "loaded"]
    scheduler.step()
    assert run.optimizer.inner_optimizer.param_groups[0]["lr"] == 0.025


def test_a_checkpoint_of_the_inner_optimizer_alone_loads():
    plain, ours = Run(INNER[1], wrap=False), Run(INNER[1])
    plain.step(0)
    ours.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    ours.model.load_state_dict(plain.model.state_dict())
    plain.step(1)
    ours.step(1)
    assert close(ours.values(), plain.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_group_that_is_added_later_is_trained(dtype):
    run = Run(dtype=dtype, master_weights=True, initial_scale=8.0)
    late = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    run.optimizer.add_param_group({"params": [late], "lr": 1.0})
    run.optimizer.zero_grad()
    run.optimizer.backward((late * 2).float().sum())
    run.optimizer.step()
    assert late.tolist() == [-1.0, -1.0, -1.0]
    run.optimizer.zero_grad()
    assert late.grad is None


def test_lbfgs_takes_a_closure():
    ours, plain = (Run(lambda p: torch.optim.LBFGS(p, lr=0.5), wrap=wrap) for wrap in (True, False))

    def closure(run):
        def evaluate():
            run.optimizer.zero_grad()
            run.backward(0)
            return run.model(torch.ones(3, 4)).detach().sum()

        return evaluate

    for run in (ours, plain):
        for _ in range(3):
            run.optimizer.step(closure(run))
    assert torch.allclose(ours.values(), plain.values(), atol=1e-4)


def test_every_call_is_recorded():
    trace = Trace()
    run = Run(gradient_accumulation_steps=2, initial_scale=4.0, on_step=trace)
    for number, factor in enumerate((1.0, INF, 1.0, 1.0)):
        run.step(number, factor)
    assert [(step.scale, step.skipped) for step in trace] == [(4, False), (4, True), (2, False), (2, False)]


def test_any_policy_works_and_may_give_up():
    assert Run(policy=dialects.KERAS).optimizer.loss_scale == 2.0**15
    assert Run(policy=Static(4.0)).optimizer.loss_scale == 4.0
    run = Run(policy=Dynamic(init_scale=1.0, min_scale=1.0, at_floor="raise"))
    before = run.values()
    with pytest.raises(ScaleExhausted):
        run.step(0, INF)
    assert run.optimizer.skipped_steps == 1
    assert run.optimizer.policy.at_floor == "raise"
    assert torch.equal(run.values(), before)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clipnorm": 1.0, "clipvalue": 1.0}, "both given"),
        ({"clipnorm": 0.0}, "clipnorm=0.0"),
        ({"global_clipnorm": -1.0}, "global_clipnorm=-1.0"),
        ({"ema_momentum": 1.5}, "ema_momentum=1.5"),
        ({"ema_overwrite_frequency": 0}, "ema_overwrite_frequency=0"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps=1.5"),
        ({"loss_scale_factor": 0.0}, "loss_scale_factor=0.0"),
        ({"initial_scale": 0.0}, "initial_scale=0.0"),
        ({"dynamic_growth_steps": 0}, "dynamic_growth_steps=0"),
        ({"on_step": 3}, "on_step=3"),
        ({"policy": Static(2.0), "initial_scale": 4.0}, "policy"),
        ({"policy": "keras"}, "not a policy"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options, says):
    with pytest.raises(PolicyError, match=says):
        Run(**options)


@pytest.mark.parametrize("limit", ["global_clipnorm", "clipvalue"])
def test_a_mean_that_overflows_is_told(limit):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = LossScaleOptimizer(
        torch.optim.SGD([weight]), initial_scale=1.0, gradient_accumulation_steps=2, **{limit: 1.0}
    )
    for skipped, factor in ((False, 3e38), (True, 3e38), (False, 3.0), (False, 3.0)):
        optimizer.zero_grad()
        optimizer.backward((weight * factor).sum())
        optimizer.step()
        assert optimizer.last_step.skipped == skipped
    assert optimizer.skipped_steps == 1
    assert optimizer.last_step.grad_norm == (pytest.approx(3.0) if limit == "global_clipnorm" else None)
    assert optimizer.iterations == 1


def test_parameters_with_one_gradient_each_get_its_mean():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = LossScaleOptimizer(torch.optim.SGD(weights, lr=1.0), gradient_accumulation_steps=2)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(weights[0].sum() * 0.5)
        weights[1].grad = weights[0].grad
        optimizer.step()
    assert [w.item() for w in weights] == [0.5, 0.5]


def test_on_step_hears_of_a_step_when_all_of_it_is_done():
    heard = []
    run = Run(dtype=torch.float16, master_weights=True, use_ema=True)
    run.optimizer.on_step = lambda _: heard.append((run.optimizer.iterations, run.values()))
    before = run.values()
    run.step(0)
    assert heard[0][0] == 1
    assert not torch.equal(heard[0][1], before)


def test_nothing_keeps_it_alive():
    run = Run()
    run.step(0)
    gone = weakref.ref(run.optimizer)
    inner = run.optimizer.inner_optimizer
    gc.disable()
    try:
        del run.optimizer
        assert gone() is None
    finally:
        gc.enable()
    inner.step()  # its hook is silent


def test_averages_that_would_be_lost_or_do_not_fit_are_refused():
    run = Run(use_ema=True)
    run.step(0)
    saved = run.optimizer.state_dict()
    plain = Run()
    with pytest.raises(PolicyError, match="use_ema=True"):
        plain.optimizer.load_state_dict(saved)
    wrong = copy.deepcopy(saved)
    wrong["loss_scale_optimizer"]["averages"][0] = torch.ones(7)
    before = run.optimizer.loss_scale
    with pytest.raises(PolicyError, match=r"shapes \[\(7,\)"):
        run.optimizer.load_state_dict(wrong)
    assert run.optimizer.loss_scale == before


def test_inner_optimizers_that_cannot_work_are_refused():
    parameters = [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(PolicyError, match=r"not a torch\.optim\.Optimizer"):
        LossScaleOptimizer(parameters)
    with pytest.raises(PolicyError, match="already"):
        LossScaleOptimizer(LossScaleOptimizer(torch.optim.SGD(parameters)))
    with pytest.raises(PolicyError, match="on top"):
        LossScaleOptimizer(torch.optim.AdamW(parameters), weight_decay=0.1)
    for options in ({"gradient_accumulation_steps": 2}, {"master_weights": True}):
        with pytest.raises(PolicyError, match="LBFGS evaluates its closure itself"):
            LossScaleOptimizer(torch.optim.LBFGS(parameters), **options)


def test_a_loss_is_scaled_once():
    """Its gradients are divided once. Two losses of one step are each scaled, and may be added up."""
    run = Run(initial_scale=64.0)
    loss = run.model.weight.sum()
    scaled = run.optimizer.scale_loss(loss)
    for twice in (run.optimizer.scale_loss, run.optimizer.backward):
        with pytest.raises(UsageError, match=r"scaled already.*Write"):
            twice(scaled)
    (scaled + run.optimizer.scale_loss(loss)).backward()
    before = run.values()
    run.optimizer.step()
    assert close(before - run.values(), torch.tensor([0.2] * 8 + [0.0] * 2))


def test_a_first_scale_is_named_as_it_was_written() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.warns(InexactScale, match=r"^initial_scale=1000 .* Write initial_scale=1024\.0") as told:
        LossScaleOptimizer(inner, initial_scale=1000.0)
    assert len(told) == 1
    with pytest.raises(PolicyError, match=r"initial_scale=1e\+60 is inf in float32"):
        LossScaleOptimizer(inner, initial_scale=1e60)
