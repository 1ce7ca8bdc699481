"""Real models in edited regions: compiled beside eager code, casts by hand, checkpoints, threads, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

import preamp
from preamp import casting
from preamp.torch import autocast
from tests.combinations import combinations, in_one_test

from . import autocast_worker
from .real_models import EXAMPLES, WIDTH, Einsum, Example
from .regions import BASE, BRAIN, FULL, HALF, in_step, numbers, state

STEPS = 3
WORKER = Path(autocast_worker.__file__)
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
TABLES = {
    "float32": {
        "casting": casting.DEFAULT.float32(
            "linear", "matmul", "bmm", "scaled_dot_product_attention", "conv2d"
        )
    },
    "softmax": {"casting": casting.DEFAULT.lower("softmax")},
    "CUDA's": {"casting": casting.CUDA},
    "emulated": {"emulate": True},
}
RULES: dict[str, dict[str, Any]] = {
    "llama": {"lm_head": "float32", "**.mlp": "float16"},
    "resnet": {"fc": "float32", "layer1": "float16"},
    "einsum": {"qkv": "float16", "out": "float32"},
    "attention": {"qkv": "float16", "out": "float32"},
    "encoder layer": {"linear1": "float32", "linear2": "float16"},
    "experts": {"router": "float32", "experts.1": "float16"},
    "tied": {"lm_head": "float32", "body": "float16"},
}
DTYPES = {"float32": FULL, "float16": HALF}
PLACES = ["inside", "around", "made once", "decorated"]
pytestmark = [
    pytest.mark.skipif(
        RELEASE < (2, 10),
        reason="before PyTorch 2.10 compiled backward passes run in the region that is around the function",
    ),
    # What PyTorch and transformers say of themselves.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(is|are) deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    assert state() == BASE
    assert not torch.overrides._get_current_function_mode_stack()
    torch._dynamo.reset()


def edits_of(name: str, edit: str, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of a region; "modules" has the rules of the model's own modules."""
    if edit != "modules":
        return TABLES[edit]
    table = casting.DEFAULT
    for pattern, rule in rules_of(name).items():
        table = table.module(pattern, rule)
    return {"casting": table, "model": model}


def rules_of(name: str) -> dict[str, Any]:
    return RULES.get(name) or RULES[name.split()[0]]


def placed(
    place: str, call: Callable[..., Any], make: Callable[[], Any], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls a model in a region; `compiled` compiles a part or the whole of it."""

    def inside(x: Tensor) -> Any:
        with make():
            return call(x)

    if place == "inside":
        return compiled(inside)
    if place == "decorated":
        return compiled(make()(call))
    part, made = compiled(call), make()

    def around(x: Tensor) -> Any:
        with made if place == "made once" else make():
            return part(x)

    return around


def learned(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return what a model gives, and the gradients."""
    model.zero_grad()
    result = run(x)
    result.float().square().sum().backward()
    return [result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_alike(ones: list[Tensor], others: list[Tensor], results: float = 1e-5) -> None:
    """Check results, and gradients, which low precision makes depend on the order of sums."""
    assert [one.dtype for one in ones] == [one.dtype for one in others]
    for place, (one, other) in enumerate(zip(ones, others, strict=True)):
        apart = (one.float() - other.float()).abs().max()
        assert apart <= (2e-2 if place else results) * other.float().abs().max() + 1e-6


@combinations(
    quick=[
        ("llama sdpa", "modules", "inside"),
        ("resnet", "modules", "around"),
        ("encoder layer", "emulated", "decorated"),
        ("experts", "softmax", "made once"),
    ],
    name=EXAMPLES,
    edit=[*TABLES, "modules"],
    place=PLACES,
)
def test_a_compiled_model_learns_what_an_eager_one_does_and_is_compiled_once(name, edit, place):
    example = EXAMPLES[name]
    model, x = example.make(), example.batch(2)
    counter = CompileCounterWithBackend("aot_eager")
    make = partial(autocast, "cpu", BRAIN, **edits_of(name, edit, model))
    call = partial(example.call, model)
    run = placed(place, lambda x: call(x), make, partial(torch.compile, backend=counter, fullgraph=True))
    first = learned(model, run, x)
    for _ in range(STEPS - 1):
        last = learned(model, run, x)
    assert (counter.frame_count, dict(counters["graph_break"])) == (1, {})
    eager = learned(model, lambda x: make()(call)(x), x)
    assert_alike(first, eager)
    assert_alike(last, eager)
    assert {one.dtype for one in first[1:]} == {FULL}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed:UserWarning")
@in_one_test(name=["llama sdpa", "resnet", "einsum"], edit=["float32", "emulated", "modules"])
def test_inductor_computes_what_eager_code_does(name, edit):
    torch._dynamo.reset()
    example = EXAMPLES[name]
    model, x = example.make(), example.batch(2)
    make = partial(autocast, "cpu", BRAIN, **edits_of(name, edit, model))
    run = placed("inside", lambda x: example.call(model, x), make, partial(torch.compile, fullgraph=True))
    compiled = learned(model, run, x)
    eager = learned(model, make()(partial(example.call, model)), x)
    assert_alike(compiled, eager, results=2e-2)


@in_one_test(case=[(nn.LSTMCell, True, True), (nn.GRUCell, False, True), (nn.RNNCell, True, False)])
def test_an_emulated_cell_compiles_without_breaks(case):
    cell, bias, state = case
    torch._dynamo.reset()
    model, x, h = cell(4, 4, bias), numbers(2, 4), numbers(2, 4, seed=1)
    region = autocast("cpu", BRAIN, emulate=True)
    args = [x, *([(h, h) if cell is nn.LSTMCell else h] if state else [])]
    results, gradients = [], []
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call, around in ((compiled_model, region), (model, region), (model, nullcontext())):
        with around:
            given = call(*args)
        results.append(given if isinstance(given, tuple) else (given,))
        total = sum(each.sum() for each in results[-1])
        gradients.append(torch.autograd.grad(total, [*model.parameters()]))
    for compiled, eager, exact in (*zip(*results, strict=True), *zip(*gradients, strict=True)):
        assert torch.equal(compiled, eager)
        assert not torch.equal(compiled, exact) or not exact.any()


# What runs in which precision: the graphs that the compiler hands over to a backend


class Graphs:
    """Compiles, and keeps the graphs of forward and backward."""

    def __init__(self) -> None:
        self.forward: list[GraphModule] = []
        self.backward: list[GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=partial(self._keep, self.forward),
            bw_compiler=partial(self._keep, self.backward),
            inference_compiler=partial(self._keep, self.forward),
        )

    @staticmethod
    def _keep(kept: list[GraphModule], graph: GraphModule, _: Any) -> Any:
        kept.append(graph)
        return make_boxed_func(graph.forward)

    def compile(self, function: Callable[..., Any]) -> Any:
        return torch.compile(function, backend=self.backend, fullgraph=True)


def calls(graphs: list[GraphModule], *names: str) -> list[Node]:
    """Return the calls of operators in graphs."""
    (graph,) = graphs
    found = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [node for node in found if getattr(node.target, "__name__", "").split(".")[0] in names]


def casts(graphs: list[GraphModule]) -> int:
    return len(calls(graphs, "_to_copy"))


def operands(node: Node) -> set[torch.dtype]:
    tensors = (one.meta["val"] for one in node.args if isinstance(one, Node))
    return {one.dtype for one in tensors if one.is_floating_point()}


def in_dtypes(nodes: list[Node]) -> set[torch.dtype]:
    assert nodes
    return set().union(*map(operands, nodes))


def is_in(node: Node, names: list[str]) -> bool:
    """Return whether a call comes from a module that some patterns of plain names and `**.` name."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    parts = {
        part for path in paths for part in path.replace("[", ".").replace("]", "").replace("'", "").split(".")
    }
    return any(name.split(".")[-1] in parts for name in names)


def graphs_of(name: str, edit: str) -> Graphs:
    example, graphs = EXAMPLES[name], Graphs()
    model = example.make()
    make = partial(autocast, "cpu", BRAIN, **edits_of(name, edit, model))
    run = placed("around", lambda x: example.call(model, x), make, graphs.compile)
    learned(model, run, example.batch(2))
    return graphs


@pytest.mark.parametrize(
    ("name", "edit", "dtype"),
    [("resnet", "float32", FULL), ("einsum", "softmax", BRAIN), ("einsum", "emulated", FULL)],
)
def test_operators_run_in_the_dtypes_of_the_table_forward_and_backward(name, edit, dtype):
    graphs = graphs_of(name, edit)
    assert in_dtypes(calls(graphs.forward, *PRODUCTS)) == {dtype}
    assert in_dtypes(calls(graphs.backward, *PRODUCTS[:-1], "convolution_backward")) == {dtype}
    if name == "einsum":
        assert in_dtypes(calls(graphs.forward, "_softmax")) == {dtype}


@pytest.mark.parametrize(
    "name",
    [
        "experts",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("tied", "encoder layer", "llama sdpa")),
    ],
)
def test_modules_run_in_the_dtypes_of_their_rules(name):
    rules = rules_of(name)
    graphs = graphs_of(name, "modules")
    products = calls(graphs.forward, *PRODUCTS)
    for rule, dtype in DTYPES.items():
        inside = [node for node in products if is_in(node, [p for p, of in rules.items() if of == rule])]
        assert in_dtypes(inside) == {dtype}, rule
    outside = [node for node in products if not is_in(node, list(rules))]
    assert not outside or in_dtypes(outside) == {BRAIN}


def einsum_by_hand(edit: str, model: Einsum, x: Tensor) -> Tensor:
    """Return what attention computes in a region, with all casts written down."""
    low = BRAIN if edit != "float32" else FULL

    def linear(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x.to(low), layer.weight.to(low), layer.bias.to(low))

    parts = linear(model.qkv, model.norm(x)).unflatten(-1, (3, 2, WIDTH // 2))
    q, k, v = parts.unbind(2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = F.softmax(scores if edit == "softmax" else scores.float(), -1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights.to(low), v)
    return x + linear(model.out, mixed.flatten(2))


@pytest.mark.parametrize("edit", ["float32", "softmax"])
def test_a_graph_has_no_more_casts_than_one_with_casts_by_hand(edit):
    region, by_hand = graphs_of("einsum", edit), Graphs()
    torch._dynamo.reset()
    model, x = EXAMPLES["einsum"].make(), EXAMPLES["einsum"].batch(2)
    learned(model, by_hand.compile(partial(einsum_by_hand, edit, model)), x)
    assert casts(region.forward) == casts(by_hand.forward)
    assert casts(region.backward) <= casts(by_hand.backward)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm], ids=["layer_norm", "rms_norm"])
def test_a_norm_that_is_left_untouched_is_not_surrounded_by_casts(norm, request):
    """It is what pytorch#188955 is about."""
    name = "layer_norm" if norm is nn.LayerNorm else "rms_norm"
    counted = {}
    for edit, table in {"CUDA's": casting.CUDA, "untouched": casting.CUDA.untouched(name)}.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), norm(4).bfloat16(), nn.Linear(4, 4, bias=False))
        graphs = Graphs()
        with autocast("cpu", BRAIN, casting=table):
            graphs.compile(model)(numbers(3, 4))
        counted[edit] = casts(graphs.forward)
    # The input and two weights; up and down again around the norm, whose parameters are cast up too.
    parameters = 2 if norm is nn.LayerNorm else 1
    within = 0 if norm is nn.LayerNorm else 2  # PyTorch decomposes rms_norm into a float32 computation
    assert counted == {"CUDA's": 3 + 2 + parameters, "untouched": 3 + within}


# Checkpoints


@in_one_test(
    case=[
        *(("eager", edit, True) for edit in ("float32", "emulated", "modules")),
        *[("inside", "modules", False), ("around", "emulated", False), ("inside", "float32", True)],
    ]
)
def test_a_checkpoint_computes_again_what_it_computed(case):
    place, edit, with_context = case
    torch._dynamo.reset()
    counters.clear()
    model, x = EXAMPLES["einsum"].make(), EXAMPLES["einsum"].batch(2).requires_grad_()
    make = partial(autocast, "cpu", BRAIN, **edits_of("einsum", edit, model))
    expected = learned(model, make()(model), x)
    context = {"context_fn": make().context_fn} if with_context or place == "eager" else {}

    def call(x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False, **context)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = partial(torch.compile, backend=counter, fullgraph=True)
    run = make()(call) if place == "eager" else placed(place, call, make, compiled)
    if with_context and place != "eager" and RELEASE < (2, 12):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="is not compiled"):
            run(x)
        return
    for _ in range(3):
        assert_alike(learned(model, run, x), expected)
    assert counter.frame_count == (place != "eager")


@in_one_test(place=["inside", "eager"])
def test_functions_that_a_graph_calls_run_with_the_edits(place):
    table = casting.DEFAULT.float32("mm")
    x = numbers(4, 4)

    def product(x: Tensor, *_: Any) -> Tensor:
        return torch.mm(x, x).float()

    from torch._higher_order_ops import while_loop

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        _, twice = while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, product(x)), (torch.tensor(0), x))
        return torch.cond(x.sum() > -100, product, lambda x: x.clone(), (x,)), twice

    torch._dynamo.reset()
    make = partial(autocast, "cpu", BRAIN, casting=table)
    # With other backends PyTorch takes no autocast region in the body of while_loop, its own neither.
    compiled = partial(torch.compile, backend="eager", fullgraph=True)
    run = make()(call) if place == "eager" else placed(place, call, make, compiled)
    once, twice = run(x)
    assert torch.allclose(once, x @ x, rtol=1e-5, atol=1e-5)
    assert torch.allclose(twice, (x @ x) @ (x @ x), rtol=1e-5, atol=1e-5)


def test_the_compilers_setting_for_backward_is_restored_when_the_last_edited_region_is_left():
    torch.compile(lambda x: x, backend="eager")(numbers(2))  # loads the compiler
    config = torch._functorch.config
    if not hasattr(config, "backward_pass_autocast"):
        pytest.skip("This release of PyTorch has no such setting")
    before = config.backward_pass_autocast
    first, second = (autocast("cpu", casting=casting.CUDA) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config.backward_pass_autocast == "off"
    second.__exit__(None, None, None)
    assert config.backward_pass_autocast == before
    with autocast("cpu"):
        assert config.backward_pass_autocast == before


# Threads


def test_threads_in_different_regions_run_one_compiled_model():
    example = EXAMPLES["einsum"]
    model, x = example.make(), example.batch(2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    regions = [
        partial(autocast, "cpu", BRAIN, **edits_of("einsum", "modules", model)),
        partial(autocast, "cpu", HALF, casting=casting.DEFAULT.float32("linear").lower("softmax")),
        nullcontext,
    ]
    with torch.compiler.set_stance("force_eager"):
        expected = []
        for region in regions:
            with region():
                expected.append(model(x).detach())
    assert not any(torch.equal(one, expected[-1]) for one in expected[:-1])

    def work(region: Callable[[], Any], others: Callable[[], Any]) -> list[Tensor]:
        results = []
        for _ in range(3):
            with region():
                others()
                results.append(compiled(x).detach())
                others()
        return results

    results = in_step(*(partial(work, region) for region in regions))
    for mine, wanted in zip(results, expected, strict=True):
        assert all(one.dtype == wanted.dtype and torch.allclose(one, wanted, 1e-5, 1e-5) for one in mine)
    assert counter.frame_count <= len(regions)


# Export and dynamic shapes


class InRegion(nn.Module):
    """A model in a region, made at each call or once."""

    def __init__(self, example: Example, edit: str, name: str, made_once: bool) -> None:
        super().__init__()
        self.model, self.call = example.make(), example.call
        self.make = partial(autocast, "cpu", BRAIN, **edits_of(name, edit, self.model))
        self.region = self.make() if made_once else None

    def forward(self, x: Tensor) -> Tensor:
        with self.region or self.make():
            return self.call(self.model, x)


# PyTorch forgets the outer one of two regions in strict exports, and for einsum in decompositions.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@combinations(
    quick=[
        ("einsum", "softmax", "strict"),
        ("einsum", "float32", "made inside"),
        ("experts", "modules", "made once"),
    ],
    name=["einsum", "encoder layer", "tied", "experts", "resnet"],
    edit=[*TABLES, "modules"],
    how=["strict", "made once", "made inside"],
)
def test_an_exported_model_keeps_its_region_and_its_shapes_are_dynamic(name, edit, how):
    example = EXAMPLES[name]
    module, x = InRegion(example, edit, name, how == "made once").eval(), example.batch(3)
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    if how == "strict":
        with pytest.raises(Exception, match=r"loses regions inside of regions.*strict=False"):
            torch.export.export(module, (x,), dynamic_shapes=shapes, strict=True)
        return
    exported = torch.export.export(module, (x,), dynamic_shapes=shapes, strict=False)
    again = exported.module()
    for rows in (2, 3, 5):
        x = example.batch(rows)
        expected = module(x)
        for region in (nullcontext(), autocast("cpu", HALF), autocast("cpu", enabled=False)):
            with region:
                assert_same_output(again(x), expected)
    if name != "einsum":
        assert_same_output(exported.run_decompositions().module()(x), expected)
    assert any("bfloat16" in f"{node.args} {node.kwargs}" for node in nodes_of(exported.graph_module))


def assert_same_output(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert torch.allclose(one, other, rtol=2e-2, atol=2e-2)


def nodes_of(module: GraphModule) -> Iterator[Node]:
    for part in module.modules():
        if isinstance(part, GraphModule):
            yield from part.graph.nodes


@combinations(
    quick=[("einsum", "modules", "mark")],
    name=["einsum", "tied", "llama sdpa", "encoder layer"],
    edit=[*TABLES, "modules"],
    how=["mark", "dynamic"],
)
def test_dynamic_shapes_are_compiled_as_often_as_in_pytorchs_region(name, edit, how):
    example, counts = EXAMPLES[name], []
    for edited in (True, False):
        torch._dynamo.reset()
        counters.clear()
        model = example.make()
        options = edits_of(name, edit, model) if edited else {}
        make = partial(autocast if edited else torch.autocast, "cpu", BRAIN, **options)
        counter = CompileCounterWithBackend("aot_eager")
        call = partial(example.call, model)
        dynamic = {"dynamic": True} if how == "dynamic" else {}
        compiled = torch.compile(call, backend=counter, fullgraph=True, **dynamic)
        for rows in (3, 4, 5, 7):
            x = example.batch(rows)
            if how == "mark":
                torch._dynamo.mark_dynamic(x, 0)
            with make():
                result = compiled(x)
                assert not edited or torch.allclose(result.float(), call(x).float(), rtol=2e-2, atol=2e-2)
        counts.append((counter.frame_count, dict(counters["graph_break"])))
    assert counts[0] == counts[1]
    assert counts[0][0] <= 2


# Several processes


def test_ranks_train_compiled_blocks_as_one_process_trains_eager_ones(tmp_path):
    paths = Path(preamp.__file__).parents[1], WORKER.parents[2]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path / "meeting")],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = []
    for rank in ranks:
        out, error = rank.communicate(timeout=180)
        assert rank.returncode == 0, error
        answers.append(json.loads(out))
    alone = autocast_worker.train("")
    assert alone["ran in"] == {
        "blocks.0.out": str(BRAIN),
        "blocks.1.out": str(FULL),
        "head": str(HALF),
    }
    kinds = ["ddp", "fsdp2"] if RELEASE >= (2, 9) else ["ddp"]  # FSDP2 does not train on CPUs before
    for kind in kinds:
        first, second = (answer[kind] for answer in answers)
        assert first["parameters"] == second["parameters"]
        assert first["parameters"] == pytest.approx(alone["parameters"], rel=1e-2, abs=2e-4)
        losses = [sum(both) / 2 for both in zip(first["losses"], second["losses"], strict=True)]
        assert losses == pytest.approx(alone["losses"], rel=1e-2)
        for one in (first, second):
            assert one["gradients"] == [str(FULL)]
            assert one["ran in"] == alone["ran in"]
            assert one["frames"] == 2  # one for each block
