"""The lens on real models: what it counts, when, what that costs, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from preamp import Dynamic, ExponentHistogram, Look, PolicyError, Static, Trace, UsageError
from preamp.torch import GradScaler, Lens, LossScaleOptimizer, autocast
from preamp.torch.exponents import count, read

X = torch.linspace(-2.0, 3.0, 12).reshape(4, 3)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def histogram(*tensors: Tensor) -> ExponentHistogram:
    return sum(read([count(tensor) for tensor in tensors])[0], ExponentHistogram())


def rows_of(look: Look | None) -> dict[tuple[str, str], ExponentHistogram]:
    """Return the rows by name and kind; no two have the same."""
    assert look is not None
    rows = {(row.name, row.what): row.histogram for row in look.rows}
    assert len(rows) == len(look.rows)
    return rows


def seen(
    model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] = lambda out: out.sum(), **options: Any
) -> Look:
    """Return what a lens sees of one pass."""
    with Lens(model, **options) as lens:
        loss(model(*inputs)).backward()
        assert lens.last is not None
        return lens.last


def hooks(model: nn.Module) -> int:
    """Count the hooks on modules and parameters, and those on all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    on_parameters = sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
    everywhere = [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
    return on_modules + on_parameters + sum(map(len, everywhere))


# What is counted


def test_activations_flows_and_gradients_are_those_of_the_pass() -> None:
    model = mlp()
    look = seen(model, X)
    hidden = model[0](X)
    clipped = model[1](hidden)
    out = model[2](clipped)
    flows = torch.autograd.grad(out.sum(), [out, clipped, hidden], retain_graph=True)
    gradients = torch.autograd.grad(out.sum(), list(model.parameters()))
    expected = {
        ("0", "activation"): histogram(hidden),
        ("1", "activation"): histogram(clipped),
        ("2", "activation"): histogram(out),
        ("2", "flow"): histogram(flows[0]),
        ("1", "flow"): histogram(flows[1]),
        ("0", "flow"): histogram(flows[2]),
        ("2", "gradient"): histogram(*gradients[2:]),
        ("0", "gradient"): histogram(*gradients[:2]),
    }
    assert rows_of(look) == expected
    order = [(row.name, row.what) for row in look.rows]
    assert [key for key in order if key[1] != "gradient"] == list(expected)[:6]
    assert order.index(("2", "gradient")) < order.index(("0", "flow")) < order.index(("0", "gradient"))
    assert (look.index, look.scale, look.low_dtype) == (0, 1.0, "float16")
    gradients_alone = seen(model, X, activations=False)
    assert rows_of(gradients_alone) == {k: v for k, v in expected.items() if k[1] != "activation"}


class Twice(nn.Module):
    """Calls a layer twice, and owns a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.layer(self.layer(x))


def test_a_layer_that_is_called_twice_has_one_row_of_all_that_went_through() -> None:
    model = Twice()
    rows = rows_of(seen(model, X))
    first = model.layer(X)
    second = model.layer(first)
    assert rows["layer", "activation"] == histogram(first, second)
    assert rows["layer", "flow"] == histogram(*torch.autograd.grad(second.sum() * 0.3, [first, second]))
    assert rows["", "gradient"].total == 1
    assert rows["layer", "gradient"].total == 12


def test_a_parameter_of_two_layers_is_counted_once_for_the_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    rows = rows_of(seen(model, X))
    assert rows["0", "gradient"].total == 9
    assert ("1", "gradient") not in rows


def test_what_is_overwritten_in_place_is_counted_before_and_after() -> None:
    model = nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.0), nn.Linear(5, 1)
    )
    apart = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    apart.load_state_dict({k.replace("4.", "2."): v for k, v in model.state_dict().items()})
    rows, expected = rows_of(seen(model, X)), rows_of(seen(apart, X))
    for place in ("0", "1"):
        for what in ("activation", "flow"):
            assert rows[place, what] == expected[place, what]
    assert ("2", "activation") not in rows  # it puts out what it was given
    assert rows["0", "gradient"] == expected["0", "gradient"]


@dataclass
class Answer:
    scores: Tensor
    note: str = "fine"


class Structured(nn.Module):
    """Puts out tensors in all kinds of things, some of them without gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        scores = torch.tanh(self.layer(x))
        return {
            "tuple": (scores, scores.argmax(), None, 3),
            "dict": {"scores": scores, "more": [scores.detach() * 2.0]},
            "dataclass": Answer(scores),
            "nested": {"a": [(scores,)]},
        }[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "nested"])
def test_outputs_may_be_structured(kind: str) -> None:
    model = Structured(kind)
    out = {
        "tuple": lambda out: out[0],
        "dict": lambda out: out["scores"],
        "dataclass": lambda out: out.scores,
        "nested": lambda out: out["a"][0][0],
    }[kind]
    rows = rows_of(seen(model, X, loss=lambda result: out(result).sum()))
    assert rows["", "flow"] == ExponentHistogram(0, (8,))
    assert rows["", "activation"].total == (16 if kind == "dict" else 8)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_models_of_any_dtype(dtype: torch.dtype) -> None:
    model, name = nn.Linear(3, 2).to(dtype), str(dtype).removeprefix("torch.")
    look = seen(model, X.to(dtype), loss=lambda out: out.abs().sum())
    assert {row.dtype for row in look.rows} == {name}
    assert look.low_dtype == (name if name in ("float16", "bfloat16") else "float16")
    gradients = [parameter.grad for parameter in model.parameters()]
    assert rows_of(look)["", "gradient"] == histogram(*gradients)


REGIONS = {
    "torch": lambda: torch.autocast("cpu", torch.bfloat16),
    "ours": lambda: autocast("cpu", torch.bfloat16),
    "emulated": lambda: autocast("cpu", torch.bfloat16, emulate=True),
}


@pytest.mark.parametrize("region", REGIONS)
def test_under_autocast_dtypes_are_those_that_ran(region: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))

    def forward(x: Tensor) -> Tensor:
        with REGIONS[region]():
            return nn.Sequential.forward(model, x)

    model.forward = forward
    look = seen(model, X, loss=lambda out: out.float().sum())
    dtypes = {(row.name, row.what): row.dtype for row in look.rows}
    low = "float32" if region == "emulated" else "bfloat16"
    assert look.low_dtype == "bfloat16"
    assert (dtypes["0", "flow"], dtypes["2", "activation"]) == (low, low)
    assert dtypes["0", "gradient"] == "float32"
    assert rows_of(look)["0", "gradient"] == histogram(model[0].weight.grad, model[0].bias.grad)
    assert seen(model, X, low_dtype=torch.float8_e5m2, loss=lambda out: out.sum()).low_dtype == "float8_e5m2"


class Saving(nn.Module):
    """Computes its inner part twice."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.inner, self.last, self.how = mlp(), nn.Linear(2, 1), how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, **self.how) if self.how else self.inner(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_counted_again(reentrant: bool) -> None:
    start = X.clone().requires_grad_()
    rows = rows_of(seen(Saving(use_reentrant=reentrant), start))
    expected = rows_of(seen(Saving(), start))
    if reentrant:  # which runs the inner part without gradients first
        for name in ("inner.0", "inner.1", "inner.2"):
            expected.pop((name, "flow"))
    assert rows == expected


def test_modules_that_take_no_part_have_no_rows() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "frozen": nn.Linear(1, 1)})
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: model["frozen"](model["used"](x))
    rows = rows_of(seen(model, X))
    assert {name for name, _ in rows} == {"used", "frozen"}
    assert ("frozen", "gradient") not in rows


def test_gradients_of_a_sparse_embedding_are_the_rows_that_were_used() -> None:
    model = nn.Embedding(100, 4, sparse=True)
    assert rows_of(seen(model, torch.tensor([1, 5, 5])))["", "gradient"] == ExponentHistogram(0, (12,))


# When


def train(model: nn.Module, steps: int, *, scaler: Any = None, factor: float = 1.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        loss = model(X).sum() * factor
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def test_the_first_pass_and_every_nth_after_it_are_sampled() -> None:
    model, looks = mlp(), []
    with Lens(model, every=3, on_look=looks.append):
        train(model, 8)
    assert [look.index for look in looks] == [0, 3, 6]


def test_passes_without_gradients_do_not_count() -> None:
    model, looks = mlp(), []
    with Lens(model, every=2, on_look=looks.append) as lens:
        for _ in range(4):
            with torch.no_grad():
                model(X)
            with torch.inference_mode():
                model(X)
            train(model, 1)
        assert lens.last == looks[-1]
    assert [look.index for look in looks] == [0, 2]


def test_a_pass_that_no_gradient_comes_back_from_gives_no_look() -> None:
    model = mlp()
    with Lens(model, every=1) as lens:
        model(X)
        assert lens.last is None
        model(X)
        train(model, 1)
        assert lens.last is not None
        assert lens.last.index == 2


def test_two_calls_of_the_model_before_one_backward() -> None:
    model, looks = mlp(), []
    with Lens(model, every=10, on_look=looks.append):
        (model(X) * model(-X)).sum().backward()
        train(model, 1)
        assert len(looks) == 1
    assert rows_of(looks[0])["2", "activation"].total == 8  # of the first call
    assert rows_of(looks[0])["2", "gradient"].total == 12


def test_a_second_backward_after_the_look_is_not_seen() -> None:
    model = mlp()
    with Lens(model) as lens:
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        first = lens.last
        loss.backward()
        assert lens.last is first


def test_every_can_be_changed_and_a_closed_lens_keeps_its_last_look() -> None:
    model, trace = mlp(), Trace()
    lens = Lens(model, every=2, on_look=trace.look)
    train(model, 3)
    lens.every = 1
    train(model, 2)
    lens.close()
    lens.close()
    train(model, 2)
    assert [look.index for look in trace.looks] == [0, 2, 3, 4]
    assert lens.last == trace.looks[-1]
    assert hooks(model) == 0


# The scale


def scalers() -> dict[str, Callable[[nn.Module], Any]]:
    return {
        "ours": lambda _: GradScaler("cpu", init_scale=2.0**10, growth_interval=1),
        "torch": lambda _: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1),
        "capturable": lambda _: GradScaler("cpu", init_scale=2.0**10, growth_interval=1, capturable=True),
    }


@pytest.mark.parametrize("kind", scalers())
def test_the_scale_and_the_step_are_those_of_the_loss_that_was_sampled(kind: str) -> None:
    model, looks = mlp(), []
    scaler = scalers()[kind](model)
    with Lens(model, every=2, scaler=scaler, on_look=looks.append):
        train(model, 5, scaler=scaler)
    assert [(look.index, look.scale) for look in looks] == [(0, 2.0**10), (2, 2.0**12), (4, 2.0**14)]
    shifts = {row.histogram.peak_exponent for look in looks for row in look.rows if row.what == "flow"}
    assert max(shifts) - min(shifts) >= 4
    for look in looks[1:]:
        powers = int(math.log2(look.scale)) - 10
        flows = [
            (new, old) for new, old in zip(look.rows, looks[0].rows, strict=True) if new.what != "activation"
        ]
        assert all(new.histogram == old.histogram.shifted(powers) for new, old in flows)


def test_with_a_loss_scale_optimizer_the_constant_counts_too() -> None:
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0, loss_scale_factor=4.0)
    with Lens(model, scaler=optimizer, every=1) as lens:
        for _ in range(2):
            optimizer.backward(model(X).sum())
            optimizer.step()
        assert (lens.last.index, lens.last.scale) == (1, 32.0)
        assert rows_of(lens.last)["2", "flow"] == ExponentHistogram(5, (8,))


def test_a_scaler_that_does_not_scale_has_scale_one() -> None:
    model = mlp()
    for scaler in (GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", enabled=False)):
        with Lens(model, scaler=scaler) as lens:
            train(model, 1, scaler=scaler)
            assert lens.last.scale == 1.0


def test_with_accumulation_a_pass_is_a_micro_batch_of_the_scalers_step() -> None:
    model, looks = mlp(), []
    scaler = GradScaler("cpu", policy=Static(4.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Lens(model, every=3, scaler=scaler, on_look=looks.append):
        for _ in range(4):
            for _ in range(2):
                scaler.scale(model(X).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [look.index for look in looks] == [0, 1, 3]
    first, second, _ = map(rows_of, looks)
    assert first == second  # one micro-batch's gradients, not their sum


# Overflow


class Overflowing(nn.Module):
    """The flow out of its third layer overflows float16 at a scale above 2**4."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2, bias=False) for _ in range(3))
        for layer in (self.first, self.second, self.third):
            nn.init.constant_(layer.weight, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(self.second(x) * 2.0**-4).float() * 2.0**9


def overflow(scale: float) -> Look:
    model, scaler = Overflowing().half(), GradScaler("cpu", policy=Static(scale))
    with Lens(model, scaler=scaler) as lens:
        scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
        assert lens.last is not None
        return lens.last


def test_the_first_module_to_overflow_and_the_path_of_the_inf() -> None:
    below, above = overflow(2.0**4), overflow(2.0**5)
    assert below.first_overflow is None
    assert below.path == ()
    assert above.first_overflow is not None
    assert (above.first_overflow.name, above.first_overflow.what) == ("second", "flow")
    flows = [row.name for row in above.path if row.what == "flow"]
    gradients = [row.name for row in above.path if row.what == "gradient"]
    assert flows == gradients == ["second", "first"]
    assert overflow(above.best_scale(margin=1)).first_overflow is None


def test_the_pass_after_a_skipped_step_is_sampled_once_for_all_skips_in_a_row() -> None:
    model, looks = mlp(), []
    scaler = GradScaler("cpu", policy=Dynamic(init_scale=2.0**10))
    with Lens(model, every=100, scaler=scaler, on_look=looks.append):
        for factor in (1.0, 1.0, INF, INF, INF, 1.0, 1.0, INF, 1.0, 1.0):
            train(model, 1, scaler=scaler, factor=factor)
    assert [look.index for look in looks] == [0, 3, 8]
    assert [look.first_overflow is None for look in looks] == [True, False, True]


def test_skips_that_only_a_device_knows_of_are_not_asked_for() -> None:
    model, looks = mlp(), []
    scaler = GradScaler("cpu", capturable=True)
    with Lens(model, scaler=scaler, on_look=looks.append):
        train(model, 1, scaler=scaler)
        train(model, 3, scaler=scaler, factor=INF)
    assert len(looks) == 1


INF = math.inf


# What it costs


class Calls(TorchDispatchMode):
    """Keeps the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def calls_of_a_step(model: nn.Module, scaler: Any) -> list[str]:
    with Calls() as calls:
        train(model, 1, scaler=scaler)
    return calls.names


@pytest.mark.parametrize("kind", scalers())
def test_a_pass_that_is_not_sampled_runs_no_operator_more_and_has_one_hook(kind: str) -> None:
    model = mlp()
    scaler = scalers()[kind](model)
    train(model, 2, scaler=scaler)
    plain = calls_of_a_step(model, scaler)
    with Lens(model, every=3, scaler=scaler):
        train(model, 2, scaler=scaler)  # sampled, and the one that reads it
        assert calls_of_a_step(model, scaler) == plain
        assert hooks(model) == 1
    assert calls_of_a_step(model, scaler) == plain
    assert hooks(model) == 0


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_sample_reads_each_tensor_in_one_chain_and_reads_the_host_once(kind: str) -> None:
    model = mlp()
    scaler = scalers()[kind](model)
    train(model, 2, scaler=scaler)
    plain = calls_of_a_step(model, scaler)
    with Lens(model, scaler=scaler) as lens, Calls() as calls:
        train(model, 1, scaler=scaler)
        before = len(calls.names)
        assert lens.last is not None
        reading = calls.names[before:]
    added = {name: calls.names.count(name) - plain.count(name) for name in {*calls.names, *plain}}
    tensors = 6 + 4  # outputs and flows of three layers, gradients of four parameters
    for name in ("aten.bincount.default", "aten.__rshift__.Scalar", "aten._to_copy.default"):
        assert added[name] - reading.count(name) == tensors
    assert added["aten._local_scalar_dense.default"] == 0
    assert reading.count("aten.cat.default") == 1
    assert not [name for name in reading if "bincount" in name or "rshift" in name]


# What stays behind: nothing


def test_hooks_are_on_the_model_in_the_sampled_forward_alone() -> None:
    model, inside = mlp(), []
    model[1].register_forward_pre_hook(lambda *_: inside.append(hooks(model)))
    lens = Lens(model, every=2)
    out = model(X)
    after = hooks(model)
    out.sum().backward()
    train(model, 1)
    assert inside == [4, 2]  # mine; the counter; on a sampled pass the root's, and one for all modules
    assert after == 2 + 4  # waiting for four gradients
    assert hooks(model) == 2
    lens.close()
    assert hooks(model) == 1


def test_a_forward_that_fails_leaves_no_hook() -> None:
    model = mlp()
    with Lens(model, every=1) as lens:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 7))
        assert hooks(model) <= 1 + 4
        assert not module_hooks._global_forward_hooks
        train(model, 1)
        assert lens.last is not None
    assert hooks(model) == 0


@pytest.mark.parametrize("moment", ["before", "after a forward", "after a backward"])
def test_copies_of_a_model_have_no_lens(moment: str) -> None:
    model, looks = mlp(), []
    with Lens(model, every=1, on_look=looks.append):
        if moment != "before":
            loss = model(X).sum()
            if moment == "after a backward":
                loss.backward()
        file = io.BytesIO()
        torch.save(model, file)
        assert b"preamp" not in file.getvalue()
        file.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
        ]
        for twin in copies:
            assert torch.equal(twin(X), model[2](model[1](model[0](X))))
            train(twin, 2)
        model.load_state_dict(copies[0].state_dict())
    assert len(looks) == (moment == "after a backward")


def test_two_lenses_on_one_model_see_the_same() -> None:
    model = mlp()
    torch._dynamo.reset()  # which loads the compiler
    with Lens(model) as one, Lens(model) as other:
        train(model, 1)
        assert one.last == other.last
        assert one.last is not None
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_training_is_the_same_with_a_lens() -> None:
    def trained(lens: Callable[[nn.Module], Any]) -> list[Any]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lens(model):
            for _ in range(5):
                optimizer.zero_grad()
                model(X).square().mean().backward()
                optimizer.step()
        return [parameter.tolist() for parameter in model.parameters()]

    assert trained(lambda model: Lens(model, every=2)) == trained(lambda _: nullcontext())


# Other things that hold models


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_runs_eagerly_when_it_is_sampled_and_is_compiled_once() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = rows_of(seen(model, X))
    looks: list[Look] = []
    with Lens(compiled, every=3, on_look=looks.append):
        train(compiled, 7)
    assert [rows_of(look) for look in looks] == [plain] * 3
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_that_is_compiled_whole_is_not_seen_and_not_broken() -> None:
    model, looks = mlp(), []
    with Lens(model, every=1, on_look=looks.append):
        step = torch.compile(lambda x: model(x).sum(), backend="aot_eager", fullgraph=True)
        step(X).backward()
        step(X).backward()
    assert looks == []
    assert counters["stats"]["unique_graphs"] == 1


def test_a_model_that_compiles_itself_is_refused() -> None:
    model = mlp()
    model.compile(backend="eager")
    with pytest.raises(UsageError, match=r"Lens\(compiled\)"):
        Lens(model)
    assert hooks(model) == 0


def test_under_ddp_names_are_the_models_own() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = mlp()
        wrapped = nn.parallel.DistributedDataParallel(model)
        expected = rows_of(seen(copy.deepcopy(model), X))
        assert rows_of(seen(wrapped, X)) == expected
        assert hooks(wrapped) == 0
    finally:
        torch.distributed.destroy_process_group()


def test_under_torch_func_nothing_is_seen_and_nothing_breaks() -> None:
    model = mlp()
    with Lens(model, every=1) as lens:
        parameters = dict(model.named_parameters())
        gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(parameters)
        per_sample = torch.func.vmap(model)(X)
        assert lens.last is None
    assert gradients.keys() == parameters.keys()
    assert per_sample.shape == (4, 2)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"model": "mlp"}, r"model='mlp' is no module\. Write Lens\(model\)"),
        ({"every": 0}, r"every=0 must be a whole number of at least 1\. Write every=100"),
        ({"every": 2.5}, "every=2.5"),
        ({"on_look": []}, r"on_look=\[\] cannot be called\. Write on_look=trace\.look"),
        ({"scaler": 3.0}, r"scaler=3\.0 has no loss scale\. Write scaler=GradScaler\(\)"),
        ({"low_dtype": "half"}, r"low_dtype='half' is unknown\. Write one of 'float16'"),
        ({"low_dtype": torch.float64}, "low_dtype=torch.float64 is unknown"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], why: str) -> None:
    model = mlp()
    with pytest.raises(PolicyError, match=why):
        Lens(**{"model": model, **arguments})
    assert hooks(model) == 0
