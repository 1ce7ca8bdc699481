"""Edited tables of operators: what each rule does, under every name, and that nothing is left of it."""

import copy
import re
from collections import namedtuple
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import casting
from preamp.autocasting.tables import RULES, Casting
from preamp.errors import CastingError, UsageError
from preamp.torch import autocast
from tests.combinations import in_one_test

from .regions import (
    BRAIN,
    COMPILED,
    DOUBLE,
    FULL,
    HALF,
    RELEASE,
    all_same,
    behaviour,
    compiled,
    numbers,
    run_in,
    same,
    state,
    ways,
)
from .switches import operators, release_without

EDIT = casting.DEFAULT
A = numbers(4, 4)

# What users write, and what has to be edited for it: functions of what casts their inputs

V, X, X3, W, B = (
    numbers(6),
    numbers(4, 6, seed=1),
    numbers(2, 4, 6, seed=2),
    numbers(5, 6, seed=3),
    numbers(5),
)
IMAGE, KERNEL, Q = numbers(1, 4, 6, 6), numbers(3, 4, 2, 2), numbers(1, 2, 4, 6)
CLASSES, PIXELS = torch.arange(4), torch.zeros(1, 6, 6, dtype=torch.long)
POSITIVE, GRID = X.abs() + 1, numbers(1, 2, 2, 2).tanh()
torch.manual_seed(0)
MODULES = {name: getattr(nn, name)(6, 5) for name in ("LSTMCell", "GRUCell", "RNNCell", "LSTM", "GRU", "RNN")}
DEEP = nn.LSTM(6, 5, 2, bidirectional=True)
RELU_CELL, RELU_RNN = nn.RNNCell(6, 5, nonlinearity="relu"), nn.RNN(6, 5, nonlinearity="relu")


def packed(t):
    return t(MODULES["LSTM"])(nn.utils.rnn.pack_sequence([t(X), t(X[:2])]))[0].data


CALLS = [
    ("linear", lambda t: F.linear(t(V), t(W))),
    ("linear", lambda t: F.linear(t(V), t(W), t(B))),
    ("linear", lambda t: F.linear(t(X), t(W))),
    ("softmax", lambda t: F.softmax(t(X), -1)),
    ("softmax", lambda t: t(X).softmax(0)),
    ("softmin", lambda t: F.softmin(t(X), -1)),
    ("log_softmax", lambda t: F.log_softmax(t(X), -1)),
    ("log_softmax", lambda t: t(X).log_softmax(0)),
    ("norm", lambda t: torch.norm(t(X))),
    ("norm", lambda t: torch.norm(t(X), p=3, dim=0, keepdim=True)),
    ("norm", lambda t: torch.norm(t(X), "fro")),
    ("norm", lambda t: t(X).norm(dim=1)),
    ("norm", lambda t: t(X).norm(1)),
    ("norm", lambda t: torch.linalg.norm(t(X))),
    ("cov", lambda t: torch.cov(t(X), aweights=t(POSITIVE[0]))),
    ("layer_norm", lambda t: F.layer_norm(t(X), (6,))),
    ("layer_norm", lambda t: F.layer_norm(t(X), (6,), t(V), t(V))),
    ("group_norm", lambda t: F.group_norm(t(IMAGE), 2)),
    ("rms_norm", lambda t: F.rms_norm(t(X), (6,), t(V))),
    ("cross_entropy", lambda t: F.cross_entropy(t(X), CLASSES)),
    ("cross_entropy", lambda t: F.cross_entropy(t(X), CLASSES, t(POSITIVE[0]))),
    ("cross_entropy", lambda t: F.cross_entropy(t(X), CLASSES, label_smoothing=0.1)),
    ("nll_loss", lambda t: F.nll_loss(t(X), CLASSES)),
    ("nll_loss", lambda t: F.nll_loss(t(IMAGE), PIXELS)),
    *[(name, lambda t, name=name: t(MODULES[name])(t(X))) for name in MODULES],
    ("RNNCell", lambda t: t(RELU_CELL)(t(X))),
    ("RNN", lambda t: t(RELU_RNN)(t(X))),
    ("LSTM", lambda t: t(DEEP)(t(X3))),
    ("LSTM", packed),
    ("matmul", lambda t: t(X) @ t(W).T),
    ("matmul", lambda t: t(X3) @ t(W).T),
    ("__matmul__", lambda t: t(V) @ t(W).T),
    ("mm", lambda t: torch.mm(t(X), t(W).T)),
    ("bmm", lambda t: torch.bmm(t(X3), t(X3).mT)),
    ("addmm", lambda t: torch.addmm(t(B), t(X), t(W).T)),
    ("einsum", lambda t: torch.einsum("ij,kj->ik", t(X), t(W))),
    ("einsum", lambda t: torch.einsum("bij,bkj->bik", t(X3), t(X3))),
    ("__pow__", lambda t: t(X) ** 2),
    ("__rpow__", lambda t: 2 ** t(X)),
    ("pow", lambda t: t(POSITIVE).pow(t(X))),
    ("__rdiv__", lambda t: 1 / t(X)),
    ("scaled_dot_product_attention", lambda t: F.scaled_dot_product_attention(t(Q), t(Q), t(Q))),
    (
        "scaled_dot_product_attention",
        lambda t: F.scaled_dot_product_attention(t(Q), t(Q), t(Q), is_causal=True),
    ),
    ("interpolate", lambda t: F.interpolate(t(IMAGE), scale_factor=2, mode="bilinear")),
    ("interpolate", lambda t: F.interpolate(t(IMAGE), size=3)),
    ("grid_sample", lambda t: F.grid_sample(t(IMAGE), t(GRID), align_corners=False)),
    ("conv2d", lambda t: F.conv2d(t(IMAGE), t(KERNEL))),
    ("multi_dot", lambda t: torch.linalg.multi_dot([t(X), t(X).T, t(X)])),
    ("cosine_similarity", lambda t: F.cosine_similarity(t(X), t(POSITIVE))),
    ("mse_loss", lambda t: F.mse_loss(t(X), t(POSITIVE))),
    ("prelu", lambda t: F.prelu(t(X), t(B[:1]))),
    ("sum", lambda t: t(X).sum()),
    ("sum", lambda t: t(X).sum(0)),
    ("cat", lambda t: torch.cat([t(X), t(POSITIVE)])),
    ("gelu", lambda t: F.gelu(t(X), approximate="tanh")),
    # numbers as arguments
    ("add", lambda t: t(X) + 1.5),
    ("add", lambda t: torch.add(t(X), 1, alpha=2)),
    ("mul", lambda t: 2 * t(X)),
    ("mul", lambda t: t(X).mul(True)),
    ("sub", lambda t: t(X) - 0.1),
    ("rsub", lambda t: 1 - t(X)),
    ("div", lambda t: t(X) / 3),
    ("clamp", lambda t: t(X).clamp(-0.3, 0.7)),
]


def cast(*dtypes):
    """Return what casts tensors and modules to one dtype after the other."""

    def run(value):
        value = copy.deepcopy(value) if isinstance(value, nn.Module) else value
        for dtype in dtypes:
            value = value.to(dtype)
        return value

    return run


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(CALLS)])
@in_one_test(low=[HALF, BRAIN])
def test_a_name_covers_all_that_it_stands_for_under_every_rule(name, call, low):
    """Beside calls outside of any region, with their inputs cast by hand."""

    def inside(rule, *given_):
        with autocast("cpu", low, casting=getattr(EDIT, rule)(name)):
            return call(cast(*given_))

    lower, full, full_of_lower = (call(cast(*dtypes)) for dtypes in ([low], [FULL], [low, FULL]))
    assert all_same(inside("lower", FULL), lower)
    assert all_same(inside("lower", low), lower)
    assert all_same(inside("float32", FULL), full)
    assert all_same(inside("float32", low), full_of_lower)
    assert all_same(inside("untouched", FULL), full)
    assert all_same(inside("untouched", low), lower)
    assert all_same(inside("widest", FULL), full)
    assert all_same(inside("widest", low), lower)
    with pytest.raises(UsageError, match=r"is refused in this autocast region\. Write"):
        inside("refuse", FULL)


RECURRENT = {"LSTM", "GRU", "RNN"}  # layers, which take seconds to compile
# PyTorch compiles neither pack_sequence nor, as it looks at the weights, cov.
IN_GRAPHS = [one for one in CALLS if one[0] != "cov" and one[1] is not packed]
FIRST = list({name: (name, call) for name, call in reversed(IN_GRAPHS) if name not in RECURRENT}.values())


@pytest.mark.skipif(RELEASE == (2, 6), reason="PyTorch 2.6 compiles no code that makes a region")
@pytest.mark.parametrize(
    "calls", [FIRST, pytest.param(IN_GRAPHS, marks=pytest.mark.slow)], ids=["first", "all"]
)
@in_one_test(edit=[("lower", FULL), ("float32", HALF)])
def test_a_name_covers_all_that_it_stands_for_in_a_graph(calls, edit):
    """Bit by bit what runs eagerly: what that is, the test above says."""
    rule, dtype = edit
    used = set()
    for _, call in calls:
        call(lambda value: (used.add(value), value)[1] if isinstance(value, nn.Module) else value)
    modules = {module: cast(dtype)(module) for module in used}

    def to(value):
        return modules[value] if isinstance(value, nn.Module) else value.to(dtype)

    tables = [getattr(EDIT, rule)(name) for name, _ in calls]

    def each():
        results = []
        for table, (_, call) in zip(tables, calls, strict=True):
            with autocast("cpu", HALF, casting=table):
                results.append(call(to))
        return results

    with torch._dynamo.config.patch(
        allow_rnn=True
    ):  # without, PyTorch leaves recurrent networks to eager code
        assert all_same(compiled(each, "eager")(), each())


@ways
@in_one_test(norm=[torch.norm, torch.linalg.norm, torch.linalg.matrix_norm])
def test_norms_that_half_numbers_do_not_have_can_be_taken_in_float32(norm, way):
    half = X.half()
    with pytest.raises(RuntimeError, match="Half"):
        norm(half, "nuc")
    make = partial(autocast, "cpu", casting=EDIT.float32("norm"))
    assert same(run_in(way, make, lambda: norm(half, "nuc"), "eager")(), norm(half.float(), "nuc"))


MIXED = [
    ("mm", torch.mm),
    ("add", torch.add),
    ("stack", lambda a, b: torch.stack([a, b])),
    ("einsum", lambda a, b: torch.einsum("ij,jk", a, b)),
]


@ways
@pytest.mark.parametrize(("name", "call"), MIXED, ids=[name for name, _ in MIXED])
def test_mixed_inputs_are_brought_together(name, call, way):
    low = HALF
    a, b = A.to(low), A.t()
    expected = [call(a.float(), b), call(a.float(), b), call(a, b.to(low))]
    results = [
        run_in(way, partial(autocast, "cpu", low, casting=getattr(EDIT, rule)(name)), call, "eager")(a, b)
        for rule in ("widest", "float32", "lower")
    ]
    assert all_same(results, expected)


@ways
@in_one_test(rule=["lower", "widest"])
def test_other_numbers_are_left_alone(rule, way):
    given = [(A * 10).to(dtype) for dtype in (DOUBLE, torch.int64, torch.complex64)]

    def compute():
        return [[a + a, a * 2, torch.mm(a, a), a + 1] for a in given]

    make = partial(autocast, "cpu", casting=getattr(EDIT, rule)("mm", "add"))
    assert all_same(run_in(way, make, compute)(), compute())


TOLD = [
    ("softmax", lambda x, dtype: F.softmax(x, -1, dtype=dtype)),
    ("softmax", lambda x, dtype: x.softmax(-1, dtype)),
    ("log_softmax", lambda x, dtype: x.log_softmax(0, dtype=dtype)),
    ("sum", lambda x, dtype: x.sum(0, dtype=dtype)),
    ("cumsum", lambda x, dtype: x.cumsum(0, dtype=dtype)),
    ("prod", lambda x, dtype: x.prod(0, dtype=dtype)),
    ("mean", lambda x, dtype: x.mean(dtype=dtype)),
]


@ways
@in_one_test(rule=["lower", "float32"])
def test_an_operator_that_is_told_its_dtype_is_not_cast(rule, way):
    def compute():
        inputs, dtypes = (A, A.half()), (FULL, HALF, BRAIN, DOUBLE) if way == "eager" else (BRAIN, DOUBLE)
        return [call(x, dtype) for _, call in TOLD for dtype in dtypes for x in inputs]

    make = partial(autocast, "cpu", casting=getattr(EDIT, rule)(*{name for name, _ in TOLD}))
    assert all_same(run_in(way, make, compute)(), compute())


# Names that stand for nothing

WRONG = {
    "sofmax": "softmax",
    "lnear": "linear",
    "layernorm": "layer_norm",
    "crossentropy": "cross_entropy",
    "lstmcell": "lstm_cell",
    "LSTMcell": "LSTMCell",
    "batchnorm": "batch_norm",
    "conv2": "conv2d",
}


@pytest.mark.parametrize(("name", "nearest"), WRONG.items())
def test_an_unknown_name_is_refused_with_the_nearest_ones_and_changes_nothing(name, nearest):
    before = state()
    with pytest.raises(CastingError, match=rf"^'{name}' is not an operator of PyTorch .*'{nearest}'"):
        autocast("cpu", HALF, casting=EDIT.float32("mm", name))
    assert state() == before
    assert behaviour() == (FULL, FULL, FULL)


@pytest.mark.parametrize("name", ["add_", "zeros", "relu_", "mm.out", "softmax.int", "manual_seed"])
def test_an_operator_that_autocast_never_sees_is_refused(name):
    with pytest.raises(CastingError, match=f"^.{name.partition('.')[0]}"):
        autocast("cpu", casting=EDIT.lower(name))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: EDIT.lower(1),
        lambda: EDIT.float32(""),
        lambda: EDIT.refuse(["mm"]),
        lambda: Casting({"mm": "nonsense"}),
        lambda: autocast("cpu", casting="mm"),
        lambda: autocast("cpu", casting={"mm": "lower"}),
        lambda: autocast("cpu", DOUBLE, emulate=True),
    ],
)
def test_what_is_no_table_says_what_to_write(misuse):
    with pytest.raises(CastingError, match="Write "):
        misuse()


GONE = ("cholesky", "qr", "gru_cell", "_convolution.deprecated")


@pytest.fixture
def later_release():
    """Have PyTorch list what it lists without some operators, as 2.15 has neither cholesky nor qr."""
    with release_without(*GONE):
        yield


BOTH = Casting({**dict.fromkeys(casting.CPU.rules, "untouched"), **casting.CUDA.rules})


@pytest.mark.usefixtures("later_release")
@in_one_test(options=[{}, {"emulate": True}], table=[casting.CUDA, casting.CPU.lower("softmax"), BOTH])
def test_tables_of_ours_skip_operators_that_a_release_does_not_have(table, options):
    with autocast("cpu", BRAIN, casting=table, **options):
        assert torch.mm(A, A).dtype == BRAIN


@pytest.mark.usefixtures("later_release")
@in_one_test(table=[EDIT, casting.CPU, BOTH], edit=RULES)
def test_an_edit_of_an_operator_that_a_release_does_not_have_is_an_error(table, edit):
    autocast("cpu", casting=getattr(table, edit)("mm"))
    with pytest.raises(CastingError, match=r"^'cholesky' is not an operator of PyTorch .*'linalg_cholesky'"):
        autocast("cpu", casting=getattr(table, edit)("cholesky"))
    with pytest.raises(CastingError, match=r"^'sofmax' is not an operator"):
        autocast("cpu", casting=Casting({**table.rules, "sofmax": edit}))


# Tables as values

NAMES = ["softmax", "softmin", "_softmax", "norm", "linalg_vector_norm", "mm", "matmul", "__matmul__"]
STEPS = st.lists(st.tuples(st.sampled_from(RULES), st.lists(st.sampled_from(NAMES), max_size=3)), max_size=5)


def made_by(steps):
    table = EDIT
    for rule, names in steps:
        table = getattr(table, rule)(*names)
    return table


@settings(max_examples=50, deadline=None)
@given(steps=STEPS, others=STEPS)
@example([("lower", ["norm"]), ("float32", ["mm"])], [("float32", ["mm"]), ("lower", ["norm"])])
@example(
    [("float32", ["_softmax"]), ("lower", ["softmax"])],
    [("lower", ["softmax"]), ("float32", ["_softmax"])],
)
def test_the_last_edit_of_an_operator_counts_and_equal_tables_do_the_same(steps, others):
    table, replayed = made_by(steps), {}
    before = repr(table)
    for rule, names in steps:
        replayed |= {full: rule for name in names for full in operators.overloads(name)}
    assert operators.resolve(table) == replayed
    again = eval(before, {"casting": casting})
    assert (again, hash(again), repr(again)) == (table, hash(table), before)
    assert table.rules == {name: table[name] for name in table.rules}
    other = made_by(others)
    assert repr(table) == before  # a table never changes
    assert (table == other) == (repr(table) == repr(other))
    if table == other:
        assert (hash(table), operators.resolve(table)) == (
            hash(other),
            operators.resolve(other),
        )


def test_a_copy_of_the_rules_is_no_way_to_change_a_table():
    table = EDIT.float32("mm")
    table.rules["mm"] = "lower"
    assert (table["mm"], "mm" in table, "bmm" in table) == ("float32", True, False)
    assert (table == "mm", Casting() == EDIT, EDIT.rules) == (False, True, {})


# Any table, any program


def applied(rule, call, values, low):
    """Return what a rule makes of a call, with casts by hand, outside of any region."""
    if rule == "refuse":
        raise UsageError
    dtypes = {value.dtype for value in values} - {DOUBLE}
    widest = next(iter(dtypes), None) if len(dtypes) < 2 else FULL
    to = {"lower": low, "emulated": low, "float32": FULL, "widest": widest}.get(rule)
    cast_ = [value.to(to) if to and value.dtype != DOUBLE else value for value in values]
    if rule != "emulated":
        return call(*cast_)
    result = call(*[value.float() if value.dtype == to else value for value in cast_])
    return result if result.dtype == DOUBLE else result.to(to)


OPERATIONS = {
    "mm": (2, torch.mm),
    "matmul": (2, torch.matmul),
    "linear": (2, F.linear),
    "addmm": (3, torch.addmm),
    "einsum": (2, lambda a, b: torch.einsum("ij,jk", a, b)),
    "add": (2, lambda a, b: a + b),
    "mul": (2, lambda a, b: a * b),
    "stack": (2, lambda a, b: torch.stack([a, b])[1]),
    "softmax": (1, lambda a: a.softmax(-1)),
    "tanh": (1, torch.tanh),
}
OPERATION = st.tuples(st.sampled_from(list(OPERATIONS)), st.lists(st.integers(0, 99), min_size=3, max_size=3))
TABLE = st.dictionaries(st.sampled_from(list(OPERATIONS)), st.sampled_from(RULES))
LISTED = {"mm": "lower", "matmul": "lower", "linear": "lower", "addmm": "lower", "stack": "widest"}
ON_GPUS = LISTED | {"stack": "untouched", "softmax": "float32", "einsum": "lower"}


PROGRAMS = given(
    table=TABLE,
    program=st.lists(OPERATION, min_size=1, max_size=8),
    low=st.sampled_from([HALF, BRAIN]),
    emulate=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@PROGRAMS
def test_any_program_under_any_table_computes_what_casts_by_hand_compute(table, program, low, emulate):
    rules = {name: "untouched" for name in OPERATIONS} | (ON_GPUS if emulate else LISTED) | table
    pool = pool_of(low)
    for name, places in program:
        count, call = OPERATIONS[name]
        values = [pool[place % len(pool)] for place in places[:count]]
        is_product = ON_GPUS.get(name) == "lower"
        rule = "emulated" if emulate and is_product and rules[name] == "lower" else rules[name]
        if name == "einsum" and name not in table and not emulate:  # it calls bmm
            rule = "lower"
        results = []
        for compute in (
            autocast("cpu", low, casting=Casting(table), emulate=emulate)(call),
            lambda *values, rule=rule, call=call: applied(rule, call, values, low),
        ):
            try:
                results.append(compute(*values))
            except RuntimeError as error:
                results.append(type(error))
        if isinstance(results[0], torch.Tensor):
            assert same(*results)
            pool.append(results[0])
        else:
            assert results[0] == results[1]


def pool_of(low):
    return [A, A.t().contiguous(), A.to(low), A.double()]


def compiled_as_it_runs(table, program, low, emulate):
    """Compile the part of a program that runs without an error, and compare what it gives."""
    make = partial(autocast, "cpu", low, casting=Casting(table), emulate=emulate)
    runs, pool = [], pool_of(low)
    for name, places in program:
        try:
            with make():
                pool.append(
                    OPERATIONS[name][1](*[pool[n % len(pool)] for n in places[: OPERATIONS[name][0]]])
                )
        except RuntimeError:  # which a graph would not go on after
            continue
        runs.append((OPERATIONS[name][1], [n % (len(pool) - 1) for n in places[: OPERATIONS[name][0]]]))

    def run(*pool):
        pool = [*pool]
        for call, places in runs:
            pool.append(call(*[pool[n] for n in places]))
        return pool

    if runs:
        assert all_same(run_in(COMPILED, make, run, "eager")(*pool_of(low)), pool)


@settings(max_examples=5, deadline=None)
@PROGRAMS
def test_any_program_under_any_table_is_compiled_as_it_runs(table, program, low, emulate):
    compiled_as_it_runs(table, program, low, emulate)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@PROGRAMS
def test_many_programs_are_compiled_as_they_run(table, program, low, emulate):
    compiled_as_it_runs(table, program, low, emulate)


IN_PLACE = ["bitwise_and_", "bitwise_or_", "bitwise_xor_", "remainder_", "fmod_", "add_"]


@ways
@in_one_test(emulate=[False, True])
def test_integers_are_written_to_with_numbers_as_outside(emulate, way):
    def write():
        results = []
        for name in IN_PLACE:
            numbers_ = torch.tensor([5, 6])
            getattr(numbers_, name)(3)
            results.append(getattr(numbers_, name)(torch.tensor(3)))
        return results

    make = partial(autocast, "cpu", torch.bfloat16, emulate=emulate)
    assert all_same(run_in(way, make, write)(), write())


PYTHON = {
    "2 / x": lambda x: 2 / x,
    "1 - x": lambda x: 1 - x,
    "x - 1": lambda x: x - 1,
    "x / 2": lambda x: x / 2,
    "3 * x": lambda x: 3 * x,
    "x * 3": lambda x: x * 3,
}


@ways
def test_python_operators_follow_the_edits_of_what_they_compute(way):
    x = torch.rand(4, 4).bfloat16()

    def compute(x):
        return [operation(x) for operation in PYTHON.values()]

    make = partial(autocast, "cpu", BRAIN, casting=EDIT.float32("div", "mul", "sub"))
    assert {result.dtype for result in run_in(way, make, compute)(x)} == {FULL}


@pytest.mark.parametrize(
    ("way", "operation"), [*(("eager", one) for one in PYTHON.values()), (COMPILED, PYTHON["2 / x"])]
)
def test_python_operators_are_refused_as_what_they_compute(way, operation):
    make = partial(autocast, "cpu", casting=EDIT.refuse("div", "mul", "sub"))
    # The compiler of torch 2.8 shows which error it met, and not what that says.
    said = r"is refused in this autocast region" + ("" if way == "eager" else r"|\(UsageError\)")
    with pytest.raises(UsageError if way == "eager" else Exception, match=said):
        run_in(way, make, operation)(torch.rand(4, 4).bfloat16())


def _add(x):
    x += 1.0


WRITING = {
    "add": [_add, lambda x: x.add_(1.0)],
    "clamp": [lambda x: x.clamp_(0.0), lambda x: x.clip_(0.0)],
    "div": [lambda x: x.__itruediv__(2.0), lambda x: x.divide_(2.0)],
    "dropout": [nn.Dropout(inplace=True)],
    "exp": [torch.exp_],
    "hardtanh": [nn.ReLU6(inplace=True)],
    "leaky_relu": [nn.LeakyReLU(inplace=True)],
    "masked_fill": [lambda x: x.masked_fill_(x > 0.5, 0.0)],
    "relu": [nn.ReLU(inplace=True), torch.ops.aten.relu_],
    "silu": [lambda x: F.silu(x, inplace=True)],
}


@pytest.mark.parametrize(("way", "name"), [*(("eager", one) for one in WRITING), (COMPILED, "add")])
def test_what_is_refused_is_refused_in_place_and_other_rules_leave_that_alone(way, name):
    for write in WRITING[name]:
        with pytest.raises(UsageError if way == "eager" else Exception, match=r"is refused|\(UsageError\)"):
            run_in(way, partial(autocast, "cpu", casting=EDIT.refuse(name)), write)(torch.rand(4, 4))
        x = torch.rand(4, 4)
        run_in(way, partial(autocast, "cpu", BRAIN, casting=EDIT.lower(name)), write)(x)
        assert x.dtype is FULL


@in_one_test(name=torch.special.__all__)
def test_functions_of_special_follow_the_rules_of_what_they_run(name):
    function, x = getattr(torch.special, name), torch.rand(4) + 3.0
    for arguments in ((x,), (x, x), (2, x), (x, 0)):
        with suppress(RuntimeError, TypeError), Ran() as ran:
            function(*arguments)
            break
    with (
        autocast("cpu", casting=EDIT.refuse(*filter(operators._is_name, ran.names))),
        pytest.raises(UsageError, match="is refused"),
    ):
        function(*arguments)


class Ran(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


Pair = namedtuple("Pair", "a b")


@ways
def test_a_rehearsal_takes_named_tuples(way):
    pair = Pair(numbers(4, 4), numbers(4, 4, seed=1))
    make = partial(autocast, "cpu", BRAIN, emulate=True)
    expected = (pair.a.to(BRAIN).float() @ pair.b.to(BRAIN).float()).to(BRAIN)
    assert same(run_in(way, make, torch.linalg.multi_dot)(pair), expected)


@pytest.mark.parametrize(
    "misuse", [{"casting": EDIT.lower("sofmax")}, {"dtype": DOUBLE, "emulate": True}], ids=str
)
def test_a_mistake_in_compiled_code_is_told_as_outside(misuse):
    with pytest.raises(CastingError) as outside:
        autocast("cpu", **misuse)
    with pytest.raises(Exception, match=re.escape(str(outside.value))):
        run_in(COMPILED, partial(autocast, "cpu", **misuse), torch.mm)(A, A)


# Names that people write for something else than an operator

MEANT = {
    "F.softmax": "is a function, and tables name operators. Write 'softmax'.",
    "nn.functional.softmax": "is a function, and tables name operators. Write 'softmax'.",
    "torch.nn.functional.interpolate": "is a function, and tables name operators. Write 'interpolate'.",
    "torch.linalg.norm": "is a function, and tables name operators. Write 'linalg_norm'.",
    "special.expm1": "is a function, and tables name operators. Write 'expm1'.",
    "Tensor.mm": "is a method, and tables name operators. Write 'mm'.",
    "__add__": "is a method, and tables name operators. Write 'add'.",
    "__rmatmul__": "is a method, and tables name operators. Write 'matmul'.",
    "__iadd__": "never goes through autocast: .*Write 'add'.",
    "special.psi": "is a function, and tables name operators. Write 'digamma'.",
    "relu_": "never goes through autocast: .*Write 'relu'.",
    "aten.mm.default": "is one overload of an operator, .*Write 'mm'.",
    "torch.ops.aten.mm.out": "is one overload of an operator, .*Write 'mm'.",
    "LayerNorm": r"is a class of modules, .*, or \.module\(.encoder.0., .float32.\)",
    "nn.Conv2d": "is a class of modules, .* or .module",
    "nn.LSTM": "is a class of modules, .* or .module",
    "torch.nn.GELU": "is a class of modules, .* or .module",
    "MultiheadAttention": "is a class of modules, .* or .module",
    "TransformerEncoder": "is a class of modules, .* or .module",
    "LlamaRMSNorm": "is not an operator of .*or, for a class of modules, .module",
    "attention": "is not an operator of .*Write 'scaled_dot_product_attention'.",
    "sdpa": "is not an operator of .*Write 'scaled_dot_product_attention'.",
    "conv": "is not an operator of .*Write 'conv1d' or 'conv2d' or 'conv3d'.",
    "MM": "is not an operator of .*Write 'mm'.",
    "model.lm_head": r"is not an operator of .*\.module\('model.lm_head', 'float32'\)",
    "layers.*": r"is not an operator of .*\.module\('layers.\*', 'float32'\)",
}


@pytest.mark.parametrize(("name", "said"), MEANT.items())
def test_a_name_that_people_write_is_refused_with_what_they_mean(name, said):
    with pytest.raises(CastingError, match=f"^'{re.escape(name)}' {said}") as error:
        autocast("cpu", casting=EDIT.float32(name))
    for written in re.findall(r"'(\w+)'", str(error.value).partition("Write ")[2].partition(".module")[0]):
        autocast("cpu", casting=EDIT.float32(written))  # what is to be written works


@pytest.mark.parametrize("name", ["torch.mm", "aten::mm", "aten.mm", "torch.ops.aten.mm"])
def test_an_operator_may_be_named_with_where_it_is(name):
    with autocast("cpu", HALF, casting=EDIT.float32(name)):
        assert torch.mm(A, A).dtype == FULL
