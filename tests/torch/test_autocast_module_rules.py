"""Rules of modules: in which precision a module runs, eagerly and compiled."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from preamp import casting
from preamp.errors import CastingError, UsageError
from preamp.torch import autocast

from .regions import (
    BRAIN,
    COMPILED,
    FULL,
    HALF,
    RELEASE,
    WAYS,
    all_same,
    compiled,
    in_step,
    numbers,
    run_in,
    since_2_12,
    state,
    ways,
)

TABLE = casting.DEFAULT
in_ways_that_make_regions = pytest.mark.parametrize("way", WAYS if RELEASE > (2, 6) else ["eager"])
IDS = torch.arange(6) % 4


class Part(nn.Module):
    """Two products, a pointwise operator in between, and one that only CUDA's table names."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, seen=None):
        hidden = F.gelu(self.up(x))
        result = self.down(hidden)
        if seen is not None:
            seen.append((hidden.dtype, result.dtype, torch.softmax(x, -1).dtype, (x + x).dtype))
        return result


class Model(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList([Part() for _ in range(3)])
        self.lm_head = nn.Linear(4, 4, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids, seen=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, seen=seen)
        return self.lm_head(x)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    torch._dynamo.reset()
    yield
    assert not torch.overrides._get_current_function_mode_stack()
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks
    torch._dynamo.reset()


def hooks_of(model):
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    return [dict(getattr(module, kind)) for module in model.modules() for kind in kinds]


def dtypes(way, table, model=None, backend="eager"):
    """Return the dtypes in each layer and of the result. Other backends take twice as long to compile."""
    model, seen = model or Model(), []
    make = partial(autocast, "cpu", BRAIN, casting=table, model=model)
    result = run_in(way, make, model, backend)(IDS, seen)
    assert not any(hooks_of(model))
    return seen, result.dtype


@ways
def test_modules_run_in_the_precision_of_their_rules(way):
    table = TABLE.module("layers.1", "float32").module("layers.2", "float16").module("lm_head", "default")
    seen, result = dtypes(way, table)
    assert seen[0] == (BRAIN, BRAIN, FULL, FULL)  # by none
    assert seen[1] == (FULL, FULL, FULL, FULL)  # also what autocast does not list, on bfloat16 inputs
    assert (seen[2][:2], result) == ((HALF, HALF), BRAIN)


@ways
def test_an_untouched_module_runs_in_what_it_is_given(way):
    seen, result = dtypes(way, TABLE.module("layers.0", "untouched"))
    assert (seen[0], result) == ((FULL, FULL, FULL, FULL), BRAIN)
    with pytest.raises(RuntimeError, match="same dtype"):  # as in a region with enabled=False
        dtypes(way, TABLE.module("layers.1", "untouched"), backend="aot_eager")
    bare = Model().to(BRAIN)
    assert dtypes(way, TABLE.module("layers.1", "untouched"), model=bare)[0][1] == (BRAIN,) * 4


@ways
def test_weights_of_a_low_precision_are_cast_up(way):
    bare = Model().to(BRAIN)
    seen, result = dtypes(way, TABLE.module("layers.*", "float32").module("lm_head", "float32"), model=bare)
    assert (seen, result) == ([(FULL,) * 4] * 3, FULL)


@pytest.mark.parametrize(
    ("table", "products", "scores"),
    [
        (TABLE.module("layers.0", "float32").lower("linear"), BRAIN, FULL),
        (TABLE.lower("linear").module("layers.0", "float32"), FULL, FULL),
        (TABLE.module("layers.0", "float32").lower("softmax"), FULL, BRAIN),
        (TABLE.module("layers.0", "float32").module("**.down", "default").lower("softmax"), BRAIN, BRAIN),
        (TABLE.module("layers.0", "float32").module("layers", "default"), BRAIN, FULL),
        (TABLE.module("layers", "untouched").module("layers.0", "float16"), HALF, FULL),
        (TABLE.float32("linear").module("layers.0", "bfloat16"), FULL, FULL),
        (TABLE.float32("linear").module("layers.0", "bfloat16").lower("linear"), BRAIN, FULL),
    ],
    ids=repr,
)
def test_the_later_edit_counts(table, products, scores):
    seen, _ = dtypes("eager", table.module("layers.1", "float32").module("layers.2", "float32"))
    assert (seen[0][1], seen[0][2]) == (products, scores)


def by_hand(model, ids):
    """Return what a model computes whose head and second layer run in float32."""
    with torch.autocast("cpu", BRAIN):
        x = model.layers[0](model.embed(ids))
        with torch.autocast("cpu", enabled=False):
            x = model.layers[1](x.float())
        x = model.layers[2](x)
        with torch.autocast("cpu", enabled=False):
            return model.lm_head(x.float())


@pytest.mark.parametrize(("way", "tied"), [("eager", True), ("eager", False), (COMPILED, True)])
def test_results_and_gradients_are_those_of_casts_by_hand(way, tied):
    if RELEASE == (2, 6) and way != "eager":
        pytest.skip("PyTorch 2.6 compiles no code that makes a region, as `by_hand` does")
    if RELEASE < (2, 10) and way == "around":
        pytest.skip("before PyTorch 2.10 compiled backward passes run in the region around the function")
    table, model = TABLE.module("lm_head", "float32").module("layers.1", "float32"), Model(tied)
    make = partial(autocast, "cpu", BRAIN, casting=table, model=model)
    outcomes = []
    # Compiled as well: what is compiled differently, as tied weights are, would not be the same bit by bit.
    for run in (by_hand if way == "eager" else compiled(by_hand), run_in(way, make, lambda m, i: m(i))):
        model.zero_grad()
        result = run(model, IDS)
        result.float().square().sum().backward()
        outcomes.append([result.detach(), *(p.grad for p in model.parameters())])
    assert all_same(*outcomes)


@pytest.mark.parametrize(
    ("where", "emulate"), [("around", False), *([("decorated", True)] if RELEASE > (2, 6) else [])]
)
def test_rules_of_modules_compile_without_breaks_and_once(where, emulate):
    model, counter = Model(), CompileCounterWithBackend("aot_eager")
    table = TABLE.module("lm_head", "float32").module("layers.1", "float16").lower("softmax")
    options = {"casting": table, "model": model, "emulate": emulate}

    def inside(ids):
        seen = []
        with autocast("cpu", BRAIN, **options):
            return model(ids, seen), seen

    def plain(ids):
        seen = []
        return model(ids, seen), seen

    function = plain if where == "around" else autocast("cpu", BRAIN, **options)(plain)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    expected, expected_seen = inside(IDS)
    for _ in range(3):
        model.zero_grad()
        with autocast("cpu", BRAIN, **options) if where == "around" else nullcontext():
            result, seen = compiled(IDS)
        assert (seen, result.dtype) == (expected_seen, expected.dtype)
        assert torch.allclose(result, expected, rtol=0.05, atol=0.02)
        result.sum().backward()
    assert counter.frame_count == 1
    assert not any(hooks_of(model))


def test_a_compiled_module_is_found_by_its_own_paths():
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    table = TABLE.module("lm_head", "float32").module("layers.1", "float16")
    for given in (model, compiled):
        seen = []
        with autocast("cpu", BRAIN, casting=table, model=given):
            assert compiled(IDS, seen).dtype == FULL
        assert seen[1][0] == HALF


@ways
def test_a_part_that_is_called_by_itself_has_its_rule(way):
    model = Model()

    def part(x):
        return model.lm_head(x.to(BRAIN)).dtype, F.linear(x, model.lm_head.weight).dtype

    make = partial(autocast, "cpu", BRAIN, casting=TABLE.module("lm_head", "float32"), model=model)
    assert run_in(way, make, part)(torch.ones(1, 4)) == (FULL, BRAIN)


@in_ways_that_make_regions
def test_nested_regions_keep_the_rules_or_have_their_own(way):
    model, by_layer = Model(), TABLE.module("layers", "float32")
    head, layer = model.lm_head, model.layers[0]

    def nested(x):
        with autocast("cpu", HALF):
            results = [head(x), layer(x)]
        with autocast("cpu", casting=TABLE):
            results += [head(x), layer(x)]
        with autocast("cpu", casting=by_layer, model=model):
            results += [head(x), layer(x)]
        with autocast("cpu", enabled=False):
            results += [head(x.double().float()), layer(x)]
        return [*results, head(x), layer(x)]

    make = partial(autocast, "cpu", BRAIN, casting=TABLE.module("lm_head", "float32"), model=model)
    found = [result.dtype for result in run_in(way, make, nested)(torch.ones(1, 4))]
    assert found == [FULL, HALF, BRAIN, BRAIN, BRAIN, FULL, FULL, FULL, FULL, BRAIN]


@in_ways_that_make_regions
def test_a_region_inside_a_module_keeps_its_rule(way):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, x):
            with autocast("cpu", HALF):
                return self.part(x)

    model = nn.Sequential(Inner(), Inner())

    def both(x):
        first = model[0](x)
        return first.dtype, model[1](first).dtype

    make = partial(autocast, "cpu", BRAIN, casting=TABLE.module("0", "float32"), model=model)
    assert run_in(way, make, both)(torch.ones(1, 4)) == (FULL, HALF)


class Fails(nn.Module):
    def forward(self, x):
        raise KeyError


def test_after_an_error_in_a_module_its_rule_is_gone():
    model = nn.Sequential(Fails(), Part())
    with autocast("cpu", BRAIN, casting=TABLE.module("0", "float32"), model=model):
        with pytest.raises(KeyError):
            model(torch.ones(1, 4))
        assert model[1](torch.ones(1, 4)).dtype == BRAIN


class Checkpointed(nn.Module):
    def __init__(self, ran):
        super().__init__()
        self.part, self.region, self.ran = Part(), None, ran

    def forward(self, x):
        def run(x):
            if self.ran is not None:
                self.ran.append(F.linear(x, self.part.up.weight).dtype)
            return self.part(x)

        return checkpoint(run, x, use_reentrant=False, context_fn=self.region.context_fn)


def with_a_checkpoint(ran):
    torch.manual_seed(0)
    model = nn.Sequential(Checkpointed(ran), Checkpointed(ran))
    make = partial(autocast, "cpu", BRAIN, casting=TABLE.module("1", "float32"), model=model)
    for one in model:
        one.region = make()
    return model, make


def test_a_checkpoint_is_computed_again_by_the_rule_of_its_module():
    ran = []
    model, make = with_a_checkpoint(ran)
    with make():
        result = model(torch.ones(1, 4, requires_grad=True))
    result.sum().backward()
    assert ran == [BRAIN, FULL, FULL, BRAIN]


@since_2_12
def test_a_compiled_checkpoint_is_computed_again_by_the_rule_of_its_module():
    outcomes = []
    for which in WAYS:
        model, make = with_a_checkpoint(None)
        x = numbers(2, 4).requires_grad_()
        result = run_in(which, make, model)(x)
        result.sum().backward()
        outcomes.append([result.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all_same(*outcomes)


def test_threads_with_other_rules_do_not_disturb_each_other():
    model = Model()
    kept = [weight + 0.0 for weight in model.parameters()]  # noqa: F841  # as in test_autocast_right.py

    def work(rule, expected):
        def run(others):
            options = {"casting": TABLE.module("lm_head", rule), "model": model} if rule else {}
            with autocast("cpu", BRAIN, **options) if rule else nullcontext():
                for _ in range(5):
                    others()
                    assert model.lm_head(torch.ones(1, 4)).dtype == expected
                others()
            return state()

        return run

    in_step(work("float32", FULL), work("float16", HALF), work("default", BRAIN), work(None, FULL))
    assert not any(hooks_of(model))


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [("lm_hed", "'lm_head'"), ("layers.7.up", "'layers.2.up'"), ("nothing.like.it", "Write")],
)
def test_a_pattern_that_names_no_module_is_refused_with_the_nearest_paths(pattern, nearest):
    table = TABLE.module("layers", "float32").module(pattern, "float32")
    with pytest.raises(CastingError, match=rf"'{pattern}' names no module of this Model\..*{nearest}"):
        autocast("cpu", casting=table, model=Model())

    def made_inside(model, ids):
        with autocast("cpu", casting=table, model=model):
            return model(ids)

    if RELEASE > (2, 6):  # which does not compile code that makes a region
        with pytest.raises(Exception, match=rf"'{pattern}' names no module of this Model"):
            torch.compile(made_inside, backend="eager", fullgraph=True)(Model(), IDS)
    assert not torch.overrides._get_current_function_mode_stack()


def test_one_module_with_two_rules_is_refused():
    part = Part()
    model = nn.ModuleDict({"a": part, "b": part})
    with pytest.raises(CastingError, match="'a' and 'b' are one module with two rules"):
        autocast("cpu", casting=TABLE.module("a", "float32"), model=model)
    autocast("cpu", casting=TABLE.module("a", "float32").module("b", "float32"), model=model)


def test_rules_of_modules_need_a_model():
    with pytest.raises(UsageError, match="model=model"):
        autocast("cpu", casting=TABLE.module("lm_head", "float32"))
    with autocast("cpu", casting=TABLE.float32("mm"), model=Model()):  # which is not needed
        pass


def test_a_region_with_a_model_can_be_copied_and_shown():
    region = autocast("cpu", BRAIN, casting=TABLE.module("lm_head", "float32"), model=Model())
    assert repr(region).endswith("casting=casting.DEFAULT.module('lm_head', 'float32'), model=Model)")
    for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert repr(again) == repr(region)


def test_the_report_shows_modules_by_their_rules():
    model = Model()
    table = TABLE.module("lm_head", "float32").module("layers.1", "float16")
    with autocast("cpu", BRAIN, casting=table, model=model, report=True) as region:
        model(IDS)
    rows = {row.module: (row.rule, row.runs) for row in region.report().rows if row.operator == "linear"}
    assert rows["Model.lm_head"] == ("float32", "float32")
    assert rows["Model.layers.1.up"] == ("lower", "float16")
    assert rows["Model.layers.2.up"] == ("lower", "bfloat16")


@ways
def test_a_rehearsal_is_in_the_precision_of_the_module(way):
    part = Part()
    x = torch.full((1, 4), 1 + 2**-9)  # which float16 holds and bfloat16 does not
    nn.init.eye_(part.up.weight)
    nn.init.zeros_(part.up.bias)
    model = nn.ModuleList([part, Part()])
    make = partial(autocast, "cpu", BRAIN, casting=TABLE.module("0", "float16"), model=model, emulate=True)
    by_module, by_function = run_in(way, make, lambda x: (part.up(x), F.linear(x, part.up.weight)))(x)
    assert by_module[0, 0] == 1 + 2**-9
    assert (by_module.dtype, by_function.dtype) == (HALF, BRAIN)
    assert by_function[0, 0] == 1


def test_regions_of_two_models_do_not_mix_their_rules():
    one, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    x, full, half = torch.ones(1, 4), TABLE.module("1", "float32"), TABLE.module("1", "float16")

    def both(x):
        with autocast("cpu", BRAIN, casting=full, model=one):
            with autocast("cpu", BRAIN, casting=half, model=other):
                inside = one(x), other(x)
            return *inside, one(x), other(x)

    expected = [BRAIN, HALF, FULL, BRAIN]
    assert [result.dtype for result in both(x)] == expected
    if RELEASE > (2, 6):
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        assert [result.dtype for result in compiled(x)] == expected


def test_a_copy_that_is_made_in_the_region_is_not_followed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other, x = copy.deepcopy(model), torch.ones(1, 4)
    with autocast("cpu", BRAIN, casting=TABLE.module("1", "float32"), model=model):
        copied = copy.deepcopy(model)
        assert copied(x).dtype == BRAIN
    with autocast("cpu", BRAIN, casting=TABLE.module("1", "float16"), model=other):
        assert copied(x).dtype == BRAIN
    assert copied(x).dtype == FULL


@ways
def test_what_computes_in_a_float32_module_is_in_float32(way):
    x = torch.rand(2, 4, 8, dtype=BRAIN)
    calls = {
        "avg_pool": lambda: F.avg_pool1d(x, 2),
        "adaptive": lambda: F.adaptive_avg_pool1d(x, 2),
        "glu": lambda: F.glu(x),
        "hardswish": lambda: F.hardswish(x),
        "silu": lambda: F.silu(x),
        "logsigmoid": lambda: F.logsigmoid(x),
        "outer": lambda: torch.outer(x[0, 0], x[0, 0]),
        "floor division": lambda: x // 2,
        "division of a number": lambda: 2 / x,
        "subtraction from a number": lambda: 1 - x,
        "nansum": lambda: x.nansum(),
        "mean": lambda: x.mean(),
    }

    class Runs(nn.Module):
        def forward(self):
            return [call() for call in calls.values()]

    model = nn.ModuleList([Runs()])
    make = partial(autocast, "cpu", BRAIN, casting=TABLE.module("0", "float32"), model=model)
    results = run_in(way, make, lambda: model[0]())()
    found = dict(zip(calls, [result.dtype for result in results], strict=True))
    assert found == dict.fromkeys(calls, FULL)


@ways
def test_a_model_that_is_one_module_has_the_rule_of_all(way):
    layer = nn.Linear(4, 4)
    make = partial(autocast, "cpu", BRAIN, casting=TABLE.module("**", "float32"), model=layer)
    assert run_in(way, make, layer)(torch.ones(1, 4)).dtype == FULL
    with pytest.raises(UsageError, match="model=3 is not a module"):
        autocast("cpu", casting=TABLE.module("**", "float32"), model=3)


class Holder(nn.Module):
    """A model that holds the region that it runs in, whose rules are about the model."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.region = autocast("cpu", BRAIN, casting=TABLE.module("head", "float32"), model=self)

    def forward(self, x):
        with self.region:
            return self.head(self.body(x))


DEEP = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}


@pytest.mark.parametrize("duplicate", DEEP.values(), ids=list(DEEP))
def test_a_region_that_is_copied_with_a_model_has_the_rules_of_the_copy(duplicate):
    x, model = torch.ones(1, 4), Model()
    table = TABLE.module("lm_head", "float32")
    region = autocast("cpu", BRAIN, casting=table, model=model)
    twin, its_region = duplicate([model, region])
    with region:
        assert (model(IDS).dtype, twin(IDS).dtype) == (FULL, BRAIN)
    with its_region:
        assert (model(IDS).dtype, twin(IDS).dtype) == (BRAIN, FULL)
    held = duplicate(Holder())
    assert held(x).dtype == FULL
    assert duplicate(held.region)._arguments[5] is not held


def test_a_shallow_copy_of_a_region_has_the_rules_of_the_same_model():
    model = Model()
    region = autocast("cpu", BRAIN, casting=TABLE.module("lm_head", "float32"), model=model)
    with copy.copy(region):
        assert model(IDS).dtype == FULL
