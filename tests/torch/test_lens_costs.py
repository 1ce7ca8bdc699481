"""What a lens costs, that it leaves nothing behind, what else may hold the model, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import PolicyError, Snapshot, UsageError
from preamp.torch import Lens

from .lens_models import X, hooks, mlp, rows_of, scalers, seen, train
from .regions import RELEASE

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
    # The model's input, outputs and flows of three layers, four parameters and their gradients; the other
    # inputs are outputs, and are not counted again.
    tensors = 1 + 6 + 4 + 4
    chain = {
        "bincount.default": 1,
        "__rshift__.Scalar": 2,
        "amin.default": 1,
        "amax.default": 1,
        "_to_copy.default": 2,
    }
    for name, times in chain.items():
        assert added[f"aten.{name}"] - reading.count(f"aten.{name}") == times * tensors
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
    # Mine; the counter; on a sampled pass the root's, two for all modules, one on each of three layers, and
    # those on the parameters of the first layer, which has run.
    assert inside == [10, 2]
    assert after == 2 + 4  # waiting for four gradients
    assert hooks(model) == 2
    lens.close()
    assert hooks(model) == 1


def test_a_pass_without_a_backward_pass_leaves_no_hook_behind() -> None:
    model = mlp()
    lens = Lens(model)
    model(X)
    assert hooks(model) == 1 + 4  # waiting for four gradients
    lens.close()
    assert hooks(model) == 0


@pytest.mark.parametrize("handles_an_error", [False, True])
def test_a_forward_that_fails_leaves_no_hook_and_no_snapshot(handles_an_error: bool) -> None:
    model = mlp()
    with Lens(model, every=2) as lens:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 7))
        assert hooks(model) == 1
        assert not module_hooks._global_forward_hooks
        train(model, 1)
        assert lens.last is None
        try:
            assert not handles_an_error
        except AssertionError:
            train(model, 1)  # one error being handled is not one that the forward pass has raised
        else:
            train(model, 1)
        assert lens.last is not None
    assert hooks(model) == 0


@pytest.mark.parametrize("moment", ["before", "after a forward", "after a backward"])
def test_copies_of_a_model_have_no_lens(moment: str) -> None:
    model, snapshots = mlp(), []
    with Lens(model, every=1, on_snapshot=snapshots.append):
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
    assert len(snapshots) == (moment == "after a backward")


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
# PyTorch 2.12 says so where it was told to compile nothing.
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames:UserWarning")
def test_a_compiled_model_runs_eagerly_when_it_is_sampled_and_is_compiled_once() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = rows_of(seen(model, X))
    snapshots: list[Snapshot] = []
    with Lens(compiled, every=3, on_snapshot=snapshots.append):
        train(compiled, 7)
    assert [rows_of(snapshot) for snapshot in snapshots] == [plain] * 3
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_that_is_compiled_whole_is_not_seen_and_not_broken() -> None:
    model, snapshots = mlp(), []
    with Lens(model, every=1, on_snapshot=snapshots.append):
        step = torch.compile(lambda x: model(x).sum(), backend="aot_eager", fullgraph=True)
        with pytest.warns(
            UserWarning, match=r"records nothing of this call: it is compiled.*Lens\(compiled\)"
        ):
            step(X).backward()
        step(X).backward()  # the compiled step says nothing, and has nothing to run for it
    assert snapshots == []
    assert counters["stats"]["unique_graphs"] == 1


def test_a_model_that_compiles_itself_is_refused() -> None:
    model = mlp()
    model.compile(backend="eager")
    with pytest.raises(UsageError, match=r"Lens\(compiled\)"):
        Lens(model)
    assert hooks(model) == 0


@pytest.mark.usefixtures("one_rank")
def test_under_ddp_names_are_the_models_own() -> None:
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model)
    expected = rows_of(seen(copy.deepcopy(model), X))
    assert rows_of(seen(wrapped, X)) == expected
    assert hooks(wrapped) == 0


def in_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def in_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for part in (*(each for each in model.modules() if isinstance(each, nn.Linear)), model):
        fully_shard(part, mesh=mesh)
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP")
@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("wrapped", [in_fsdp1, in_fsdp2][: 2 if RELEASE >= (2, 9) else 1])
def test_under_fsdp_gradients_are_those_of_the_pass(wrapped: Any, activations: bool) -> None:
    model = mlp()
    expected = rows_of(seen(copy.deepcopy(model), X))
    found = rows_of(seen(wrapped(model), X, activations=activations))
    names = {name.removeprefix("_fsdp_wrapped_module."): name for name, what in found if what == "gradient"}
    assert set(names) == {"0", "2"}
    for name, full in names.items():
        assert found[full, "gradient"] == expected[name, "gradient"]


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
        ({"model": "mlp"}, r"model='mlp' is not a torch.nn.Module\. Write Lens\(model\)"),
        ({"every": 0}, r"every=0 must be a whole number of at least 1\. Write every=100"),
        ({"every": 2.5}, "every=2.5"),
        ({"on_snapshot": []}, r"on_snapshot=\[\] cannot be called\. Write on_snapshot=trace\.add_snapshot"),
        ({"scaler": 3.0}, r"scaler=3\.0 has no loss scale\. Write scaler=GradScaler\(\)"),
        ({"low_dtype": "half"}, r"low_dtype='half' is unknown\. Write one of 'float16'"),
        ({"low_dtype": torch.float64}, "low_dtype=torch.float64 is unknown"),
        ({"low_dtype": ["float16"]}, "is unknown"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], why: str) -> None:
    model = mlp()
    with pytest.raises(PolicyError, match=why):
        Lens(**{"model": model, **arguments})
    assert hooks(model) == 0
