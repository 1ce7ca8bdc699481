"""What a region counts, and how it is shown: by `report()`, by `preamp inspect`, in the HTML file."""

import copy
import pickle
import re
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from inspect import getsourcelines

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from preamp import UsageError, casting
from preamp.autocasting.report import CastReport, CastRow, format_bytes, format_flops
from preamp.torch import autocast

GRAPHS_ARE_SEEN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
LOWS = [torch.float16, torch.bfloat16]


class Net(torch.nn.Module):
    """One of each: a weight used twice, a frozen one, a normalisation, a loss."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        self.frozen = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)

    def forward(self, x):
        for _ in range(2):
            x = self.frozen(self.inner(x))
        return functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.long))


def compiled(work):
    torch._dynamo.reset()
    return torch.compile(lambda *args: work(*args), backend="aot_eager", fullgraph=True)


# Eagerly and compiled. A graph has PyTorch's inner operators, with other names and without rules.
ways = pytest.mark.parametrize("way", [lambda work: work, compiled], ids=["eager", "compiled"])


def counted(work, dtype=torch.bfloat16, **arguments) -> CastReport:
    with autocast("cpu", dtype, report=True, **arguments) as region:
        work()
    return region.report()


def rows_of(report: CastReport, operator: str) -> list[CastRow]:
    return [row for row in report.rows if row.operator == operator]


@pytest.mark.parametrize("dtype", LOWS)
def test_rows_tell_operator_module_count_dtypes_and_bytes(dtype):
    low = str(dtype).removeprefix("torch.")
    net, x = Net(), torch.randn(4, 8)
    report = counted(lambda: net(x), dtype)
    first, second = rows_of(report, "linear")[:2], rows_of(report, "linear")[2:]
    by_module = {(row.module, row.inputs): row for row in [*first, *second]}
    weight, bias, activation = 8 * 8 * 4, 8 * 4, 4 * 8
    # the first call casts activation, weight and bias; their casts are kept for the second
    inner = [row for (module, _), row in by_module.items() if module == "Net.inner.0"]
    assert sum(row.calls for row in inner) == 2
    assert sum(row.bytes_cast for row in inner) == activation * 4 + weight + bias
    frozen = [row for (module, _), row in by_module.items() if module == "Net.frozen"]
    assert sum(row.bytes_cast for row in frozen) == 2 * weight  # normalisation keeps bfloat16 on a CPU
    assert {row.runs for row in [*inner, *frozen]} == {low}
    assert {row.rule for row in [*inner, *frozen]} == {"lower"}
    assert sum(row.flops for row in inner) == 2 * (2 * 4 * 8 * 8)
    (loss,) = rows_of(report, "cross_entropy_loss")
    assert (loss.module, loss.inputs, loss.runs, loss.rule) == ("Net", low, "float32", "float32")
    assert report.bytes_cast == sum(row.bytes_cast for row in report.rows)


@ways
def test_what_runs_is_what_runs_without_a_report(way):
    if way is compiled and not GRAPHS_ARE_SEEN:
        pytest.skip(
            "compiled functions run eagerly in a report before 2.10, and sums are taken in another order"
        )
    net, x = Net(), torch.randn(4, 8)
    run = way(net)
    with autocast("cpu"):
        expected = run(x)
    with autocast("cpu", report=True):
        seen = run(x)
    assert torch.equal(expected, seen)
    expected.backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.requires_grad]
    net.zero_grad()
    seen.backward()
    assert all(map(torch.equal, gradients, [p.grad for p in net.parameters() if p.requires_grad]))


@ways
def test_nothing_is_left_behind_and_nothing_is_counted_afterwards(way):
    def registered():
        return set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))

    with autocast("cpu"):  # puts the kernels that guard the weight cache in place
        pass
    before, net, x = registered(), way(Net()), torch.randn(4, 8)
    with autocast("cpu", report=True) as region:
        net(x)
    calls = region.report().calls
    net(x)
    with autocast("cpu"):
        net(x)
    assert region.report().calls == calls
    assert registered() == before
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_region_that_is_entered_again_adds_up_and_backward_is_not_counted():
    net, x = Net(), torch.randn(4, 8)
    region = autocast("cpu", report=True)
    with region:
        net(x)
    once = region.report().calls
    with region:
        net(x).backward()
    assert region.report().calls == 2 * once


def test_a_region_without_a_report_says_how_to_get_one():
    for region in (autocast("cpu"), autocast("cpu", emulate=True)):
        with pytest.raises(UsageError, match="report=True"):
            region.report()


WEIGHT = torch.nn.Parameter(torch.randn(8, 8))
REASONS = {
    "the cache is off": (WEIGHT, {"cache_enabled": False}),
    "it does not require gradients": (torch.nn.Parameter(torch.randn(8, 8), requires_grad=False), {}),
    "it is not a leaf": (WEIGHT * 2, {}),
    "it is not a weight": (torch.randn(8, 8), {}),
}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # the compiler, of what is no leaf
@pytest.mark.parametrize(
    ("reason", "way"), [*((reason, lambda work: work) for reason in REASONS), ("the cache is off", compiled)]
)
def test_a_cast_that_is_repeated_is_reported_with_its_reason(reason, way):
    tensor, arguments = REASONS[reason]
    x = torch.randn(8, 8).bfloat16()
    report = counted(way(lambda: [x @ tensor for _ in range(3)]), **arguments)
    (warning,) = [text for text in report.warnings if "cast 3 times" in text]
    assert reason in warning
    assert "256 B each" in warning
    assert not [text for text in counted(lambda: x @ tensor, **arguments).warnings if "times" in text]


def uses(count):
    return sum((torch.ones(2, 8) @ WEIGHT).float().square().mean() for _ in range(count))


def accumulated():
    for _ in range(3):
        uses(1).backward()


@pytest.mark.parametrize(
    ("work", "arguments", "times"),
    [
        (lambda: uses(5), {}, 5),
        (lambda: torch.nn.GRU(8, 8)(torch.ones(7, 2, 8)), {}, 7),
        (lambda: [uses(2).backward(), uses(4).backward(), uses(3)], {}, 4),
        (lambda: uses(1), {}, None),
        (accumulated, {}, None),
        (lambda: torch.no_grad()(uses)(5), {}, None),
        (lambda: uses(5), {"cache_enabled": False}, None),
        (lambda: uses(5), {"enabled": False}, None),
        (lambda: uses(5), {"casting": casting.DEFAULT.float32("softmax")}, None),
        (lambda: uses(5), {"emulate": True}, None),
    ],
    ids=["often", "steps", "most", "once", "accumulated", "no_grad", "cache", "off", "table", "emulated"],
)
def test_a_weight_whose_gradients_add_up_in_low_precision_is_reported(work, arguments, times):
    found = [text for text in counted(work, **arguments).warnings if "add up" in text]
    assert len(found) == (times is not None)
    assert all(f"with {times} uses in one region" in text and "cache_enabled=False" in text for text in found)


@pytest.mark.skipif(not GRAPHS_ARE_SEEN, reason="compiled functions run eagerly in a report before 2.10")
def test_a_graph_casts_a_weight_each_time():
    x = torch.randn(8, 8).bfloat16()
    report = counted(compiled(lambda: [x @ WEIGHT for _ in range(3)]))
    (warning,) = [text for text in report.warnings if "cast 3 times" in text]
    assert "compiled code keeps no casts" in warning


def test_a_weight_that_an_optimizer_writes_in_between_is_reported():
    weight, x = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8).bfloat16()
    optimizer, weight.grad = torch.optim.SGD([weight], lr=1.0), torch.ones(8, 8)

    def use():
        for _ in range(2):
            x @ weight
            optimizer.step()

    assert any("written to" in text for text in counted(use).warnings)


def test_one_cast_at_every_entry_is_no_warning():
    region, x = autocast("cpu", report=True), torch.randn(8, 8).bfloat16()
    for _ in range(3):
        with region:
            x @ WEIGHT
    assert not [text for text in region.report().warnings if "times" in text]
    for _ in range(2):
        with region:
            x @ WEIGHT.detach()
            x @ WEIGHT.detach()
    assert not [text for text in region.report().warnings if "4 times" in text]


def test_a_region_counts_one_thread():
    region, problems = autocast("cpu", report=True), []

    def enter():
        with pytest.raises(UsageError, match="in each thread") as problem, region:
            pass
        problems.append(problem)

    with region:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert torch.is_autocast_enabled("cpu")
    assert len(problems) == 1


def test_what_stayed_in_float32_is_reported_costliest_first():
    images, kernel = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)

    def use():
        return functional.conv2d(images, kernel), torch.softmax(images, -1)

    table = casting.DEFAULT.float32("conv2d")
    stayed = [text for text in counted(use, casting=table).warnings if "stayed in float32" in text]
    assert stayed[0].startswith("conv2d outside of modules stayed in float32 (10.4 KFLOP")
    assert "the table says so" in stayed[0]
    assert "softmax" in stayed[1]
    assert "does not name it" in stayed[1]
    assert not any("conv2d" in text for text in counted(use).warnings)
    stayed = [text for text in counted(compiled(use), casting=table).warnings if "stayed in float32" in text]
    assert "conv" in stayed[0]
    assert "(10.4 KFLOP" in stayed[0]
    assert "softmax" in stayed[1]


@ways
def test_low_precision_that_overflowed_is_reported(way):
    dtype = torch.float16
    large = torch.full((4, 4), float(torch.finfo(dtype).max) ** 0.75)
    is_graph = way is compiled and GRAPHS_ARE_SEEN
    # A graph has the product in float32 and the cast of its result apart.
    names = ("mm ", "to ") if is_graph else "matmul "
    for emulate in (False, True):
        report = counted(way(lambda: large @ large), dtype, emulate=emulate)
        assert any("overflowed" in text and text.startswith(names) for text in report.warnings)
    infinite = torch.full((4, 4), float("inf"))
    report = counted(way(lambda: infinite @ infinite), dtype)
    assert not any("overflowed" in text for text in report.warnings)


@ways
def test_infinities_that_were_asked_for_are_no_overflow(way):
    scores, mask = torch.ones(4, 4).half(), torch.eye(4).bool()

    def use():
        masked = torch.softmax(scores.masked_fill(mask, float("-inf")), -1)
        return masked, torch.log(torch.zeros(4).half()), scores / torch.zeros(4, 4).half()

    assert not any("overflowed" in text for text in counted(way(use), torch.float16).warnings)


@ways
def test_a_cast_that_overflows_is_reported(way):
    report = counted(way(lambda: torch.full((4,), 1e6).half()), torch.float16)
    place = (
        r"at test_autocast_report\.py:\d+" if way is compiled and GRAPHS_ARE_SEEN else "outside of modules"
    )
    assert any(re.match(f"to {place} overflowed float16", text) for text in report.warnings)


def test_programs_that_run_run_with_a_report():
    x = torch.randn(4, 4)

    def use():
        torch.sparse.mm(x.to_sparse(), x)
        torch.func.grad(lambda x: torch.nn.functional.dropout(x @ x).sum())(x)
        torch.vmap(lambda x: x @ x)(x[None])
        torch.fft.rfft(x.bfloat16())
        torch.empty(4, 4, device="meta") @ torch.empty(4, 4, device="meta")
        with FakeTensorMode():
            torch.empty(4, 4) @ torch.empty(4, 4)

    report = counted(use)
    assert rows_of(report, "fft_rfft")[0].runs == "complex64"


def test_inference_mode_casts_are_counted():
    linear, x = torch.nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    with torch.inference_mode():
        (row,) = rows_of(counted(lambda: linear(x)), "linear")
    assert row.bytes_cast == (8 * 8 + 4 * 8) * 4


def test_a_region_that_is_entered_inside_itself_counts_once():
    x, weight = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4, 4))
    reports = []
    for inside in (False, True):
        with autocast("cpu", report=True) as region, region if inside else nullcontext():
            torch.exp(x @ weight)
        reports.append(region.report())
    assert reports[0] == reports[1]


def test_regions_with_and_without_reports_nest():
    x = torch.randn(4, 4)
    with autocast("cpu", report=True) as outer:
        x @ x
        with (
            outer,
            autocast("cpu", report=True) as inner,
            autocast("cpu", casting=casting.DEFAULT.lower("exp")),
        ):
            x @ x
            torch.exp(x)
    for region, products in ((outer, 2), (inner, 1)):
        rows = {row.operator: row for row in region.report().rows}
        assert rows["matmul"].calls == products
        assert (rows["exp"].rule, rows["exp"].runs) == ("lower", "bfloat16")
        assert rows.keys() == {"matmul", "exp"}
    assert not torch.nn.modules.module._global_forward_hooks


def test_modules_of_other_threads_are_left_alone():
    net, x, results = torch.nn.Linear(4, 4), torch.randn(4, 4), []
    with autocast("cpu", report=True) as region:
        thread = threading.Thread(target=lambda: results.append(net(x)))
        thread.start()
        thread.join()
        x @ x
    assert len(results) == 1
    assert [row.module for row in region.report().rows] == ["-"]


def test_where_autocast_is_off_the_report_says_so():
    x = torch.randn(4, 4)
    (warning,) = counted(lambda: x @ x, enabled=False).warnings
    assert warning.endswith("stayed in float32 (128 FLOP, 192 B): autocast is off there.")


@ways
def test_attention_has_its_work_counted(way):
    q = torch.randn(1, 2, 16, 8)
    report = counted(way(lambda: functional.scaled_dot_product_attention(q, q, q)))
    assert {row.flops for row in report.rows} - {0} == {2 * 2 * 2 * 16 * 16 * 8}


def test_a_rehearsal_is_reported_as_the_real_region():
    x, w = torch.randn(4, 4), torch.randn(4, 4).half()
    reports = [counted(lambda: x @ w, torch.float16, emulate=emulate) for emulate in (False, True)]
    native, rehearsed = (replace(row, bytes_moved=0) for each in reports for row in rows_of(each, "matmul"))
    assert native == rehearsed


def test_what_has_no_kernel_here_is_named():
    x = torch.randn(1, 2, 4, 4, 4)
    for given in (x, x.half()):
        report = counted(lambda given=given: functional.avg_pool3d(given, 2), torch.float16, emulate=True)
        (row,) = rows_of(report, "avg_pool3d")
        assert (row.rule, row.runs) == ("without kernel", str(given.dtype)[6:])
        assert any("no kernel" in text for text in report.warnings) == (given is not x)


def test_the_text_fits_80_columns_whatever_the_names():
    rows = [
        CastRow(
            "scaled_dot_product_attention",
            f"Model.{'block.' * n}attention",
            "lower",
            calls=10**n,
            inputs="float32",
            runs="float16",
            bytes_cast=2**n,
            bytes_moved=0,
            flops=0,
            overflows=0,
        )
        for n in range(1, 9)
    ]
    report = CastReport(
        rows * 4, ["A warning that is a good deal longer than the eighty columns of a terminal. " * 2]
    )
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("12 more rows" in line for line in lines)
    assert str(CastReport([], [])) == "No operator ran."


def row_of(operator="linear", module="Net", rule="lower", source=""):
    return CastRow(operator, module, rule, "float32", "float16", 1, 2048, 4096, 0, 0, source)


def shown(report):
    """Return the rows of a printed report, each with all of its lines, without padding."""
    lines = str(report).partition("\n\n")[0].splitlines()[1:]
    firsts = [n for n, line in enumerate(lines) if re.search(r" 1  .*KiB$", line)]
    blocks = [lines[at:to] for at, to in zip(firsts, [*firsts[1:], None], strict=True)]
    return ["\n".join(block) for block in blocks]


ALIKE = {
    "modules": [
        row_of(module=f"Transformer.encoder.layers.{n}.self_attention.out_projection") for n in range(12)
    ],
    "sources": [
        row_of(source=f"a_long_folder_{n}/with_a_long_name_of_a_file_of_a_model.py:41") for n in range(3)
    ],
    "operators": [
        row_of(operator=f"operator_{n}_scaled_dot_product_attention", module="M" * 50) for n in range(3)
    ],
    "rules": [row_of(rule=rule) for rule in ("lower", "off")],
    "long": [row_of(module=f"{n}" + "m" * 300, operator="o" * 200, source="s" * 90) for n in range(3)],
}


@pytest.mark.parametrize("rows", ALIKE.values(), ids=list(ALIKE))
def test_rows_that_differ_are_shown_to_differ(rows):
    report = CastReport(rows, [])
    assert max(map(len, str(report).splitlines())) <= 80
    assert len(set(shown(report))) == len(rows)


def test_sizes_and_work_are_rounded_to_units():
    assert [format_bytes(n) for n in (0, 1023, 1024, 2**20, 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "1.0 TiB",
    ]
    assert [format_flops(n) for n in (0, 999, 1000, 10**12)] == [
        "0 FLOP",
        "999 FLOP",
        "1.0 KFLOP",
        "1.0 TFLOP",
    ]


SCRIPT = """
import torch

model = torch.nn.Linear(4, 4)

def step():
    model(torch.ones(2, 4)).sum().backward()

limit = 3
"""


@pytest.mark.parametrize("place", ["train:step", "train.py:step"])
def test_inspect_shows_what_a_function_cast_and_writes_a_page(here, place, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    done = here("inspect", place, "--dtype", "float16", "--out", "o/inspect.html")
    sys.modules.pop("train", None)
    assert done.returncode == 0, done.stderr
    assert re.search("linear +Linear +1 +f32 → f16", done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80
    page = (tmp_path / "o/inspect.html").read_text()
    assert '<td data-label="operator">linear</td>' in page
    assert "f32 → f16" in page


RETURNS = """
import torch

model = torch.nn.Linear(4, 4)

def pair():
    return model, (torch.ones(2, 4),)

def function():
    return model.forward

def nothing():
    pass
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pair", "it returns a function and its arguments, .*Write .*fn, args = pair\\(\\); fn\\(\\*args\\)"),
        ("function", "it returns a function, .*Write .*function\\(\\)\\(\\)"),
        ("nothing", "Write a function that runs the model"),
    ],
)
def test_inspect_says_why_no_operator_ran(here, name, problem, tmp_path):
    (tmp_path / "train.py").write_text(RETURNS)
    done = here("inspect", f"train.py:{name}")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(rf"train\.py:{name} ran no operator.*{problem}", done.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("train.py", "does not name a function"),
        ("other.py:step", "no file other.py"),
        ("other:step", "no module 'other'"),
        ("train.py:stop", "Write one of those that it has: step"),
        ("train.py:limit", "has no function 'limit'"),
        ("train.py::step", "'train.py::step' has two colons. Write train.py:step."),
        ("package/relative.py:step", "as part of its package. Write package.relative:step."),
    ],
)
def test_inspect_says_what_is_wrong_with_a_target(here, target, problem, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/relative.py").write_text("from . import other\ndef step(): pass")
    done = here("inspect", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert done.stderr.startswith("preamp: ")
    assert done.stderr.count("\n") == 1


# Compiled functions


class Compiled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleDict({"proj": torch.nn.Linear(8, 8)})
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        return torch.softmax(self.head(self.inner["proj"](x)), -1)  # the line of the softmax


def test_a_compiled_function_is_reported_as_it_is_in_the_graph():
    net, x = Compiled(), torch.randn(3, 8)
    table = casting.DEFAULT.lower("softmax").module("head", "float32")
    options = {"casting": table, "model": net, "report": True}
    with autocast("cpu", **options) as eager:
        net(x).float().sum().backward()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    region = autocast("cpu", **options)
    for _ in range(2):
        with region:
            compiled(x).float().sum().backward()
    rows = region.report().rows
    assert counter.frame_count == 0
    if not GRAPHS_ARE_SEEN:  # before 2.10 it runs eagerly
        assert region.report().bytes_cast == 2 * eager.report().bytes_cast
        assert all(row.source == "" for row in rows)
        return
    assert {row.rule for row in rows} == {"compiled", "unlisted"}  # the sum is not compiled
    assert all(row.calls % 2 == 0 for row in rows)
    assert region.report().bytes_cast == 2 * eager.report().bytes_cast
    products = {(row.module, row.runs) for row in rows if row.operator == "addmm"}
    assert products == {("inner.proj", "bfloat16"), ("head", "float32")}
    (softmax,) = (row for row in rows if row.operator == "_softmax")
    lines, start = getsourcelines(Compiled.forward)
    line = start + next(n for n, text in enumerate(lines) if "the line of the softmax" in text)
    assert softmax.source == f"test_autocast_report.py:{line}"
    assert (softmax.inputs, softmax.runs) == ("bfloat16", "bfloat16")
    compiled(x)
    assert counter.frame_count == 1  # afterwards it is compiled as the user says


DUPLICATES = [copy.copy, copy.deepcopy, lambda region: pickle.loads(pickle.dumps(region))]


@pytest.mark.parametrize("duplicate", DUPLICATES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_of_a_region_has_a_report_of_its_own_that_starts_empty(duplicate):
    x = torch.ones(4, 4)

    def calls():
        return region.report().calls, other.report().calls

    with autocast("cpu", LOWS[0], report=True) as region:
        x @ x
        other = duplicate(region)
        assert calls() == (1, 0)
        x @ x
    assert calls() == (2, 0)
    with other:
        x @ x
    assert calls() == (2, 1)
    with region, other:  # as any region with a report inside of another one
        x @ x
    assert calls() == (3, 2)
