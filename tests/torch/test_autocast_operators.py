"""Every operator that autocast's document lists and every one that the release registers, beside our tables.

CUDA's operators run on fake tensors: dispatcher and casts are the real ones, only the numbers are missing.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import count, cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from preamp import UsageError, casting
from preamp.autocasting.tables import RULES, Casting
from preamp.errors import CastingError
from preamp.torch import autocast

from . import operators as data
from .operators import CALLS, DIFFERENCES, NOT_ON, Call, Input, aten
from .switches import operators, rules

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*(deprecated|Mismatch dtype|ComplexHalf):UserWarning")
TABLES = {
    device: Casting({name: rule for name, rule in table.rules.items() if name not in data.NEWER})
    for device, table in (("cpu", casting.CPU), ("cuda", casting.CUDA))
}
MAKERS: dict[str, Callable[..., Any]] = {
    "theirs": torch.autocast,
    "ours": autocast,
    "by table": lambda device, low: autocast(device, low, casting=TABLES[device]),
}
FLOAT, HALVES = torch.float32, [torch.float16, torch.bfloat16]
CASTS = ["lower", "float32", "untouched", "widest"]
NO_FAKE = ("_thnn_fused_gru_cell", "cudnn_convolution", "cudnn_convolution_transpose", "grid_sampler_2d")
KERNELS = {getattr(aten, name).default for name in NO_FAKE}
devices = pytest.mark.parametrize("device", TABLES)
reference = pytest.mark.skipif(
    not torch.__version__.startswith(f"{data.RELEASE}."),
    reason=f"a fact of PyTorch {data.RELEASE}, the release of the operator reference",
)


# Of these not every low precision has kernels, so that one alone does not tell the rules apart.
TOLD_BY_BOTH = ("fft_", "index_put", "linalg_eig", "polar", "stft")  # how their names begin

Check = Callable[[str, Call], None]
CHECKS: list[tuple[Callable[[str, Call], bool], Check]] = []


def each(wanted: Callable[[str, Call], bool]) -> Callable[[Check], Check]:
    """Have `test_an_operator` make a check on the devices and calls that it is for."""

    def add(check: Check) -> Check:
        CHECKS.append((wanted, check))
        return check

    return add


@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_an_operator(subtests, device, call):
    made = [check for wanted, check in CHECKS if wanted(device, call)]
    for check in made:
        with subtests.test(check.__name__):
            check(device, call)
    assert made or call.name in NOT_ON[device]


def low_of(call: Call) -> torch.dtype:
    """Return the low precision that a call is tried in: each operator's in turn."""
    return HALVES[CALLS.index(call) % 2]


def mixes(call: Call, low: torch.dtype) -> list[tuple[torch.dtype, ...]]:
    """Return the precisions that inputs are tried in: alike, and in turns where there are several."""
    several = sum(isinstance(value, Input) for value in tree_leaves((call.arguments, call.options))) > 1
    turns = (low, FLOAT) if low is torch.float16 else (FLOAT, low)
    return [(FLOAT,), (low,), turns] if several else [(FLOAT,), (low,)]


class Kernels(TorchDispatchMode):
    """Stands in for kernels that have no fake: tensors like the first, where all have the same dtype."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in KERNELS:
            return function(*args, **(kwargs or {}))
        if len({value.dtype for value in args if isinstance(value, Tensor)}) > 1:
            raise RuntimeError("The kernel takes one dtype.")
        results = [torch.empty_like(args[0]) for _ in function._schema.returns]
        return tuple(results) if len(results) > 1 else results[0]


@contextmanager
def machine(device: str) -> Iterator[None]:
    """Be a machine with a device: for CUDA, one of fake tensors."""
    with ExitStack() as stack:
        if device == "cuda":
            amp, log = torch.cuda.amp.common, logging.getLogger("torch._subclasses.fake_tensor")
            stack.enter_context(patch.object(amp, "amp_definitely_not_available", lambda: False))
            stack.enter_context(patch.object(torch.cuda, "is_bf16_supported", lambda: True))
            stack.enter_context(patch("preamp.torch.autocasting.region._working", set()))
            stack.enter_context(patch.object(log, "disabled", True))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(FakeTensorMode())
            stack.enter_context(Kernels())
        yield


def given(call: Call, device: str, *dtypes: torch.dtype, requires_grad: bool = False) -> Any:
    """Return the arguments of a call; its floating-point tensors have these dtypes, in turns."""
    seeds, turns = count(), cycle(dtypes)

    def tensor(value: Any) -> Any:
        if not isinstance(value, (Input, Tensor)):
            return value
        dtype = next(turns) if isinstance(value, Input) else value.dtype
        if device == "cuda":
            return torch.empty(value.shape, dtype=dtype, device=device)
        if isinstance(value, Tensor):
            return value
        made = value.make(next(seeds))
        return (made if dtype is not torch.int64 else 4 * made).to(dtype).requires_grad_(requires_grad)

    return tree_map(tensor, (call.arguments, call.options), is_leaf=lambda value: isinstance(value, Input))


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def contents(tensor: Tensor) -> Any:
    """Return a tensor's dtype, shape and bits; a fake one has no bits."""
    flat = tensor if tensor.is_cuda else tensor.detach().resolve_conj().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.is_cuda or flat.view(torch.uint8).tolist()


def outcome(function: Callable[..., Any], values: Any) -> Any:
    """Return what a call gives, as plain data: its tensors, or its error."""
    try:
        result = function(*values[0], **values[1])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return list(map(contents, tensors(result)))


def cast(values: Any, rule: str, low: torch.dtype) -> Any:
    """Return values as a rule has them."""
    widest = FLOAT if FLOAT in [value.dtype for value in tensors(values)] else low
    to = {"lower": low, "float32": FLOAT, "widest": widest}.get(rule)
    floats = [FLOAT, *HALVES] if to else []
    return tree_map(lambda value: value.to(to) if getattr(value, "dtype", None) in floats else value, values)


def predictions(function: Callable[..., Any], values: Any, low: torch.dtype) -> dict[str, Any]:
    """Return what each rule says of a call: what it gives without autocast on inputs cast by hand."""
    by_hand = {rule: cast(values, rule, low) for rule in CASTS}
    dtypes = {rule: tuple(value.dtype for value in tensors(by_hand[rule])) for rule in CASTS}
    first = {dtypes[rule]: rule for rule in CASTS}
    results = {rule: outcome(function, by_hand[rule]) for rule in first.values()}
    return {rule: results[first[dtypes[rule]]] for rule in CASTS}


@cache
def fitting(device: str, call: Call) -> dict[str, set[str]]:
    """Return for each autocast the rules that tell what it does with a call in all precisions."""
    rules = {name: set(RULES) for name in MAKERS}
    with machine(device):
        for low in HALVES if call.name.startswith(TOLD_BY_BOTH) else [low_of(call)]:
            values = [given(call, device, *dtypes) for dtypes in mixes(call, low)]
            said = [predictions(call.function, one, low) for one in values]
            for name, make in MAKERS.items():
                with make(device, low):
                    found = [outcome(call.function, one) for one in values]
                fits = {rule for rule in CASTS if [one[rule] for one in said] == found}
                failed = all(isinstance(got, str) and "Error: " in got for got in found)
                rules[name] &= fits or ({"refuse"} if failed else set())  # kernels may fail, too
    return rules


# The tables and the release.


def registered_as(name: str) -> str:
    return data.REGISTERED_AS.get(name, name)


def base(name: str) -> str:
    """Return a name without the overload, and without the parentheses that tell which calls are meant."""
    return name.partition(".")[0].partition("(")[0]


def rule_of(device: str, name: str) -> str:
    """Return the rule of a call in the device's table."""
    rules = TABLES[device].rules
    return rules.get(name) or rules.get(registered_as(name), "untouched")


@cache
def registered(device: str) -> frozenset[str]:
    """Return what PyTorch registers by itself: read in a new process, because our regions register more."""
    read = "torch._C._dispatch_get_registrations_for_dispatch_key('Autocast' + sys.argv[1])"
    command = [sys.executable, "-c", f"import sys, torch; print(*{read})", device.upper()]
    names = subprocess.check_output(command, text=True).replace("aten::", "").split()
    return frozenset(names) - {"_cudnn_rnn"}  # which builds for CUDA alone register


def is_cast(device: str, name: str) -> bool:
    """Return whether PyTorch registers what a call goes through."""
    return base(registered_as(name)) in map(base, registered(device))


def need_no_gpu(device: str, call: Call) -> None:
    """Skip a call that the release cannot make of fake tensors where there is no GPU."""
    with machine(device):
        got = outcome(call.function, given(call, device, FLOAT))
    if isinstance(got, str) and re.search("NVIDIA driver|CUDA driver", got):
        pytest.skip(f"PyTorch {torch.__version__.partition('+')[0]} asks for a GPU, with fake tensors too")


def mistakes(table: Casting, names: frozenset[str]) -> set[str]:
    """Return the operators that a table lacks, and what it names though no operator is called so."""
    lacks = {name for name in names if name not in table and base(name) not in table}
    return lacks | {name for name in table.rules if name not in names and name not in map(base, names)}


@reference
@devices
def test_a_table_names_exactly_the_operators_that_the_release_registers(device):
    assert mistakes(TABLES[device], registered(device)) == set()


@cache
def reached(device: str) -> dict[Call, set[str]]:
    """Return the operators that each call goes through, those inside others too."""
    if "capture_overload_names" not in str(_ExperimentalConfig.__init__.__doc__):
        pytest.skip("the profiler of PyTorch 2.6 does not tell overloads")
    overloads = _ExperimentalConfig(capture_overload_names=True)
    with machine(device), profile(experimental_config=overloads, acc_events=True) as seen:
        for number, call in enumerate(CALLS):
            values = given(call, device, FLOAT)
            with record_function(f"call {number}"):
                outcome(call.function, values)
    found: dict[Call, set[str]] = {call: set() for call in CALLS}
    names: set[str] = set()
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith("call "):
            names = found[CALLS[int(event.name().split()[1])]]
        names.add(f"{event.name()}.{event.overload_name()}".removeprefix("aten::").removesuffix("."))
    return found


@reference
@devices
def test_every_registered_operator_is_called_here_by_its_name(device):
    found = reached(device).items()
    own = {call: registered_as(call.name) for call in CALLS}
    named = {name for call, names in found for name in names if own[call] in (name, base(name))}
    assert registered(device) - named == set()


@reference
@devices
def test_every_call_runs_on_the_device_but_for_operators_of_the_other_one(device):
    with machine(device):
        found = {call.name: outcome(call.function, given(call, device, FLOAT)) for call in CALLS}
    assert {name for name, got in found.items() if isinstance(got, str)} == NOT_ON[device]


# On every release.


@devices
@pytest.mark.parametrize("table", [casting.CPU, casting.CUDA], ids=["CPU", "CUDA"])
def test_a_table_says_what_the_release_lacks_and_works_without_it(device, table):
    absent = [name for name in table.rules if not hasattr(aten, base(name))]
    assert list(operators.missing(table)) == absent
    rules = operators.resolve(table)
    assert {name for name in table.rules if not any(name in (one, base(one)) for one in rules)} == set(absent)
    for name in absent:
        with pytest.raises(
            CastingError, match=re.escape(f"{name!r} is not an operator of PyTorch {torch.__version__}")
        ):
            autocast(device, casting=table.lower(name))


@devices
def test_what_a_release_casts_is_in_the_tables_until_the_newest_that_is_known(device):
    known = tuple(map(int, torch.__version__.split(".")[:2])) <= data.NEWEST
    unknown = {*map(base, operators.registered(device))} - {*map(base, operators.listed(device))}
    unknown -= {"_cudnn_rnn"}
    assert not unknown or not known


def test_what_no_table_of_ours_names_keeps_the_cast_of_pytorch(monkeypatch):
    rest = {name: rule for name, rule in casting.CPU.rules.items() if name != "mm"}
    monkeypatch.setitem(operators.TABLES, "cpu", Casting(rest))
    monkeypatch.setattr(operators, "listed", operators.listed.__wrapped__)
    for cached in (rules.actions, rules._rules):
        monkeypatch.setattr(rules, cached.__name__, cached.__wrapped__)
    assert "mm" not in operators.listed("cpu")
    with autocast("cpu", casting=casting.DEFAULT.lower("exp")):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


# What the operators do.


@each(lambda device, call: rule_of(device, call.name) != "untouched")
def its_rule_tells_what_an_operator_does_and_no_other_rule_does(device, call):
    need_no_gpu(device, call)
    rule = rule_of(device, call.name)
    as_well = {"untouched"} if rule == "widest" and call.name in data.PROMOTE_BY_THEMSELVES else set()
    found = fitting(device, call)
    assert found.pop("by table") == {rule} | as_well
    if not is_cast(device, call.name):  # older releases cast less
        rule, as_well = "untouched", found["theirs"] & {"widest"}
    assert found == dict.fromkeys(found, {rule} | as_well)


@each(lambda device, call: rule_of(device, call.name) == "untouched" and call.name not in NOT_ON[device])
def an_operator_that_reaches_no_listed_one_runs_in_what_it_is_given(device, call):
    need_no_gpu(device, call)
    for found in fitting(device, call).values():
        assert "untouched" in found <= {"untouched", "widest"} or reached(device)[call] & registered(device)


# What the document says.


def document(device: str) -> dict[str, str]:
    return {name: rule for rule, names in data.DOCUMENT[device].items() for name in names.split()}


def differences(device: str) -> list[tuple[str, str, str]]:
    """Return what differs: names, each with the document's and the release's rule."""
    rows = [one for one in DIFFERENCES if one.device == device]
    return sorted((name, one.document, one.release) for one in rows for name in one.names.split())


def release_of(device: str, name: str) -> str:
    exists = hasattr(aten, base(registered_as(name)))
    return rule_of(device, name).replace("untouched", "unlisted") if exists else "gone"


def fits(device: str, name: str) -> list[set[str]]:
    return [rules for call in CALLS if call.name == name for rules in fitting(device, call).values()]


@reference
@devices
def test_the_differences_are_those_between_the_document_and_the_release(device):
    said = document(device)
    listed = {base(registered_as(name)) for name in said}
    some_calls = [call.name for call in CALLS if "(" in call.name and base(call.name) in said]
    said |= {name: said[base(name)] for name in some_calls}
    said |= dict.fromkeys(set(map(base, registered(device))) - listed, "unlisted")
    found = {(name, rule, release_of(device, name)) for name, rule in said.items()}
    assert sorted(row for row in found if row[1] != row[2]) == differences(device)


@reference
@pytest.mark.parametrize(("device", "name"), [(one, name) for one in TABLES for name in document(one)])
def test_what_the_document_lists_runs_as_it_says_but_for_the_differences(device, name):
    rule = document(device)[name]
    if (name, rule, "gone") in differences(device):
        with pytest.raises(RuntimeError, match="removed"):
            getattr(torch, name)(torch.eye(2), torch.eye(2))
    else:
        same = name not in [row[0] for row in differences(device)]
        assert [rule in rules for rules in fits(device, name)] == [same] * len(fits(device, name)) != []


EVERY_DIFFERENCE = [(device, *row) for device in TABLES for row in differences(device)]


@reference
@pytest.mark.parametrize(("device", "name", "said", "release"), EVERY_DIFFERENCE)
def test_a_difference_is_one_of_behaviour(device, name, said, release):
    said, release = (rule.replace("unlisted", "untouched") for rule in (said, release))
    assert all(release in rules and said not in rules for rules in fits(device, name))
    assert fits(device, name) or release == "gone"


@devices
@pytest.mark.parametrize("name", data.SPELLINGS)
def test_functions_methods_modules_and_other_namespaces_are_cast_alike(device, name):
    inputs, functions = data.SPELLINGS[name]
    for low, function in zip(cycle(HALVES), functions):
        with machine(device):
            call = Call(name, function, *inputs)
            values = [given(call, device, *dtypes) for dtypes in mixes(call, low)]
            said = [predictions(function, one, low)[rule_of(device, name)] for one in values]
            for make in MAKERS.values():
                with make(device, low):
                    assert [outcome(function, one) for one in values] == said


# What never goes through autocast, by the framework's table or an edited one.


def edited(device: str, low: torch.dtype, rule: str, name: str) -> autocast:
    """Return a region in which an operator has another rule."""
    return autocast(device, low, casting=getattr(casting.DEFAULT, rule)(base(name)))


REGIONS: dict[str, Callable[..., Any]] = {
    **{name: lambda device, low, _, make=make: make(device, low) for name, make in MAKERS.items()},
    **{rule: lambda device, low, name, rule=rule: edited(device, low, rule, name) for rule in CASTS},
}
TRIED = {"cpu": REGIONS.keys() - {"untouched"}, "cuda": {"theirs", "ours", "lower"}}  # fake tensors are slow


def casts(device: str, call: Call, function: Any, low: torch.dtype, *tried: Any) -> tuple[Any, set[str]]:
    """Return what a function gives outside of regions, and the regions in which it gives something else."""
    inside = {}
    with machine(device):
        for name in [None, *TRIED[device]]:
            if device == "cpu" or name is None:
                values = [given(call, device, *dtypes) for dtypes in tried]
            with REGIONS[name](device, low, call.name) if name else nullcontext():
                inside[name] = [outcome(function, one) for one in values]
    outside = inside.pop(None)
    return outside, {name for name, got in inside.items() if got != outside}


def test_no_registered_operator_writes_to_its_arguments():
    for name in registered("cpu") | registered("cuda"):
        operator = getattr(getattr(aten, base(name)), name.partition(".")[2] or "default")
        assert not operator._schema.is_mutable


@each(lambda _, call: hasattr(Tensor, f"{call.name}_") and isinstance(call.arguments[0], Input))
def an_operator_that_works_in_place_is_not_cast(device, call):
    low = low_of(call)
    outside, cast_in = casts(device, call, getattr(Tensor, f"{call.name}_"), low, *mixes(call, low))
    assert cast_in == set()
    assert isinstance(outside[0], list)


def into(call: Call, device: str, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Return a call's function with `out=` tensors of the right precisions, or None where it takes none."""

    def out_like(result: Any) -> Any:
        return tree_map(lambda value: torch.empty(value.shape, dtype=value.dtype, device=device), result)

    with warnings.catch_warnings(action="ignore"), machine(device):
        arguments, options = given(call, device, dtype)
        try:
            result = call.function(*arguments, **options)
            call.function(*arguments, **options, out=out_like(result))
        except Exception:
            return None
    return lambda *args, **kwargs: call.function(*args, **kwargs, out=out_like(result))


TAKES_OUT = {(device, call) for device in TABLES for call in CALLS if into(call, device, FLOAT)}


def test_half_of_the_operators_take_out():
    assert len(TAKES_OUT) > len(CALLS)


@each(lambda device, call: (device, call) in TAKES_OUT)
def an_operator_that_is_given_out_is_not_cast(device, call):
    cast_in: set[str] = set()
    low = low_of(call)
    for dtypes in mixes(call, low)[:2]:
        if function := into(call, device, *dtypes):
            outside, more = casts(device, call, function, low, dtypes)
            assert isinstance(outside[0], list)
            cast_in |= more
    in_all = call.name in data.CAST_INSIDE_OUT[device]
    assert cast_in & MAKERS.keys() == (TRIED[device] & MAKERS.keys() if in_all else set())
    assert in_all or not cast_in or call.name in data.CALL_THEMSELVES


TELL = {"cumprod", "cumsum", "linalg_vector_norm", "log_softmax", "prod", "softmax", "softmin", "sum"}


@each(lambda _, call: call.name in TELL)
def an_operator_that_is_told_its_dtype_gives_it(device, call):
    low = low_of(call)
    for told in (*HALVES, FLOAT, torch.float64):
        outside, cast_in = casts(device, call, partial(call.function, dtype=told), low, *mixes(call, low))
        assert cast_in == set()
        narrowing = call.name == "linalg_vector_norm"  # which it refuses
        assert all(got[0][0] == str(told) or (narrowing and "narrowing" in got) for got in outside)


@each(lambda device, call: call.name not in NOT_ON[device] and rule_of(device, call.name) != "refuse")
def other_numbers_are_left_alone(device, call):
    others = [(torch.float64,), (torch.int64,), (torch.complex64,)]
    has_fakes = others[:2] if device == "cuda" and call.name.startswith("conv") else others
    assert casts(device, call, call.function, torch.bfloat16, *has_fakes)[1] == set()


# Edited tables.

on_cpu = each(lambda device, call: device == "cpu" and call.name not in NOT_ON["cpu"])


def with_gradients(function: Callable[..., Any], leaves: list[Tensor], region: Any) -> Callable[..., Any]:
    """Return a function that gives results, made in a region, and gradients, made outside of it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with region:
            result = function(*args, **kwargs)
        ends = [end.abs().float().sum() for end in tensors(result) if end.requires_grad]
        gradients = torch.autograd.grad(sum(ends), leaves, allow_unused=True) if ends else leaves
        assert all(
            one is None or one.dtype is leaf.dtype for one, leaf in zip(gradients, leaves, strict=True)
        )
        return result, gradients

    return run


@on_cpu
def an_edited_rule_casts_results_and_gradients_as_one_would_by_hand(device, call):
    low = low_of(call)
    for dtypes in mixes(call, low):
        values = given(call, device, *dtypes, requires_grad=True)
        leaves = [leaf for leaf in tensors(values) if leaf.requires_grad]
        said = predictions(with_gradients(call.function, leaves, nullcontext()), values, low)
        for rule in CASTS:
            region = edited(device, low, rule, call.name)
            got = outcome(with_gradients(call.function, leaves, region), values)
            assert got == said[rule] or call.name == "normalize"  # whose division is Python's


@each(lambda device, call: device == "cpu" and call in data.MATRICES)
def gradients_of_a_weight_that_a_table_leaves_to_it_add_up_in_float32(device, call):
    arguments, options = given(call, device, FLOAT, requires_grad=True)
    weights = [tensor for tensor in tensors((arguments, options)) if tensor.requires_grad]

    def gradients(region: Any) -> Any:
        with region:
            results = [tensors(call.function(*arguments, **options)) for _ in range(8)]
        uses = [
            factor * result.float().square().sum() for factor, one in enumerate(results) for result in one
        ]
        return torch.autograd.grad(sum(uses), weights, allow_unused=True, materialize_grads=True)

    ours = outcome(gradients, ([autocast(device, casting=casting.DEFAULT.float32("softmax"))], {}))
    assert ours == outcome(gradients, ([torch.autocast(device, cache_enabled=False)], {}))


@each(lambda device, call: device == "cpu" and call.name not in NOT_ON["cpu"] and CALLS.index(call) % 5 == 0)
def an_edited_operator_is_compiled_as_it_runs(device, call):
    """By a rule that is not its own, and some only: the compiler takes most of the time of this file."""
    is_compiled_as_it_runs(call, "lower" if rule_of(device, call.name) == "float32" else "float32")


def as_it_stands(graph: Any, _: Any) -> Callable[..., Any]:
    """Compile to what runs a graph past the region around it, which would cast in it as in eager code."""

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return graph(*args)

    return run


def is_compiled_as_it_runs(call: Call, rule: str) -> None:
    low = torch.bfloat16
    values = given(call, "cpu", *mixes(call, low)[-1])
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args, **kwargs: call.function(*args, **kwargs), backend=as_it_stands)
    with edited("cpu", low, rule, call.name):
        eager, graph = kind(outcome(call.function, values)), kind(outcome(compiled, values))
    no_fake = call.name == "_grid_sampler_2d_cpu_fallback" and graph != eager  # before 2.15
    if isinstance(eager, str) or no_fake:
        assert isinstance(graph, str)
        # Where an operator raises, PyTorch's backend "eager" leaves regions of the graph open.
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting():
            pass
    else:
        assert graph == eager


def ways(call: Call) -> Iterator[Callable[..., Any]]:
    """Yield the functions and methods of PyTorch's by the name of a call's operator."""
    name = base(call.name)
    homes = {"linalg_": [torch.linalg], "fft_": [torch.fft]}
    prefix = next((prefix for prefix in homes if name.startswith(prefix)), "")
    for home in homes.get(prefix, (torch, Tensor, torch.nn.functional, torch.special)):
        if callable(way := getattr(home, name.removeprefix(prefix), None)):
            yield way


@on_cpu
def a_refused_operator_raises_by_whatever_function_or_method_it_is_called(device, call):
    values = given(call, device, FLOAT)
    for way in (call.function, *ways(call)):
        if not isinstance(outcome(way, values), str):  # it takes the same arguments
            with (
                edited(device, torch.bfloat16, "refuse", call.name),
                pytest.raises(UsageError, match="is refused"),
            ):
                way(*values[0], **values[1])


@pytest.mark.parametrize("call", data.THROUGH, ids=str)
def test_a_refused_operator_raises_in_what_calls_it_and_nowhere_else(call):
    values = given(call, "cpu", FLOAT)
    with (
        autocast("cpu", casting=casting.DEFAULT.refuse(call.name)),
        pytest.raises(UsageError, match="is refused"),
    ):
        call.function(*values[0], **values[1])
    others = {other.name for other in data.THROUGH if "pad" in other.name} - {call.name}
    with torch.autocast("cpu"):
        expected = outcome(call.function, values)
    with autocast("cpu", casting=casting.DEFAULT.refuse(*others)):
        assert outcome(call.function, values) == expected


@pytest.mark.parametrize("pad", [(1,), (1, 1, 1), (1, 1) * 4, (9, 9)])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant", "other"])
def test_padding_that_is_edited_has_the_errors_of_the_original(mode, pad):
    tensor = torch.ones(1, 2, 6)
    edits = casting.DEFAULT.untouched("reflection_pad1d", "constant_pad_nd", "_pad_circular")
    for value in (None, 0.0, 2.0):
        call = partial(torch.nn.functional.pad, tensor, pad, mode, value)
        with autocast("cpu", casting=edits):
            assert outcome(call, ((), {})) == outcome(torch.autocast("cpu", enabled=False)(call), ((), {}))


def test_the_recipe_for_cudas_table_alone_runs_cross_entropy_as_cuda_does():
    table = casting.Casting({**dict.fromkeys(casting.CPU.rules, "untouched"), **casting.CUDA.rules})
    scores, labels = torch.randn(3, 4).half(), torch.tensor([0, 1, 2])
    with autocast("cpu", dtype=torch.float16, casting=table):
        assert torch.nn.functional.cross_entropy(scores, labels).dtype is FLOAT
    with autocast("cpu", dtype=torch.float16, casting=table.untouched("cross_entropy")):  # later
        assert torch.nn.functional.cross_entropy(scores, labels).dtype is torch.float16


def kind(got: Any) -> Any:
    """Return the dtypes of an outcome, or the type of its error."""
    return got.partition(":")[0] if isinstance(got, str) else [dtype for dtype, *_ in got]


@each(lambda device, call: device == "cuda" and rule_of(device, call.name) != "untouched")
def a_device_can_be_rehearsed_on_cpu_tensors(device, call):
    need_no_gpu(device, call)
    if not is_cast(device, call.name):
        pytest.skip(f"PyTorch {torch.__version__.partition('+')[0]} does not cast {call.name}, as 2.13 does")
    low = low_of(call)
    with machine(device):
        values = [given(call, device, *dtypes) for dtypes in mixes(call, low)]
        with torch.autocast(device, low):
            theirs = [kind(outcome(call.function, one)) for one in values]
    values = [given(call, "cpu", *dtypes) for dtypes in mixes(call, low)]
    with autocast("cpu", low, casting=TABLES[device]):
        ours = [kind(outcome(call.function, one)) for one in values]
    refused = rule_of(device, call.name) == "refuse"
    raises = "UsageError" if refused else "NotImplementedError" if call.name in NOT_ON["cpu"] else None
    assert ours == ([raises] * len(ours) if raises else theirs)
