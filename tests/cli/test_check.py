"""`preamp check`: the table, a user's step in each precision, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from preamp.errors import PreampError, UsageError
from preamp.machine import REFERENCE, Advice, MachineReport, PrecisionRow, Product
from tests.cli.inside import PrecisionRun, compared, run_in_process, sentences, table
from tests.compilers import HAS_CXX, NO_CXX

SCRIPT = """
import os
import random
from pathlib import Path

import numpy
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def step():
    print("not shown")
    x = torch.randn(64, 64)
    loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with Path("calls.txt").open("a") as file:
        numbers = random.random(), numpy.random.rand(), float(x[0, 0])
        file.write(" ".join(map(str, [os.getpid(), float(in_region()), *numbers])) + "\\n")
    return loss


def only_float32():
    if torch.is_autocast_enabled("cpu"):
        if torch.get_autocast_dtype("cpu") is torch.bfloat16:
            raise TypeError("no autocast here")
        os._exit(3)
    return 1.5


def several():
    return torch.ones(3)


def fails():
    raise KeyError("data")


def no_file():
    open("absent.txt")


def in_region():
    import preamp.torch

    x = torch.ones(4, 4) + 2.0**-9  # which bfloat16 does not have
    loss = 0.0
    for region in (
        torch.autocast("cpu", torch.bfloat16),
        preamp.torch.autocast("cpu", torch.bfloat16, emulate=True),
    ):
        with region:
            loss += (x @ torch.eye(4))[0, 0].float() - 1.0
    return loss
"""
JAX_REGION = """
import jax.numpy as jnp

from preamp.jax import autocast

x = jnp.ones((4, 4)) + 2.0**-9


@autocast(dtype="bfloat16")
def product(x):
    return x @ jnp.eye(4)


def in_region():
    return product(x)[0, 0].astype("float32") - 1.0
"""
LOST = 2.0**-9  # what bfloat16 loses in each region
HALVES = {
    "native": Product(3.0, claimed=True),
    "same": Product(1.0),
    "slower": Product(0.02),
    "emulated": Product(0.9, claimed=False),
    "missing": Product(0.0, problem="RuntimeError: none"),
}


def machine(verdict="emulated", brain=REFERENCE):
    rows = [
        PrecisionRow("cpu", name, dict.fromkeys(("matmul", "conv"), product), "works")
        for name, product in {"float32": REFERENCE, "bfloat16": brain, "float16": HALVES[verdict]}.items()
    ]
    return MachineReport(rows, [], [Advice("cpu", "float32", "so.", "loss = ...")], {}, 1.0)


@pytest.fixture
def check(here, monkeypatch):
    """Return what runs the command over a script, without measuring the machine."""
    monkeypatch.setattr("preamp.torch.check", lambda devices: machine())
    Path("train.py").write_text(SCRIPT)
    return lambda *arguments: here("check", *arguments)


def rows(text):
    found = text.partition("in each precision")[2]
    return {
        line.split("  ")[0].strip(): line for line in found.splitlines() if re.match(r" ?(b?float)", line)
    }


def test_it_prints_the_table_of_the_machine(here):
    done = here("check", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["device", "precision", "matmul", "conv", "attention", "training"]
    assert {tuple(line.split()[:2]) for line in lines[1:4]} == {
        ("cpu", "float32"),
        ("cpu", "bfloat16"),
        ("cpu", "float16"),
    }
    said = "works." if HAS_CXX else NO_CXX
    assert re.search(rf"^cpu: torch.compile with autocast {re.escape(said)}$", done.stdout, re.MULTILINE)
    assert re.search(r"^Use (float32|bfloat16|float16) on cpu: ", done.stdout, re.MULTILINE)


def test_a_step_runs_in_each_precision_from_the_same_seed_in_a_fresh_process(check):
    done = check("--model", "train.py:step", "--calls", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "train.py:step in each precision, 3 calls:" in done.stdout
    assert "not shown" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = rows(done.stdout)
    assert list(found) == ["float32", "bfloat16", "float16, rehearsed"]
    for line in found.values():
        assert re.search(r" 2\.\d+ +2\.\d+ +(-|0\.\d\d%) +(\d+\.\d\dx|-)", line), line
        assert line.split()[-1].endswith("x") == ("rehearsed" not in line)
    calls = [line.split() for line in Path("calls.txt").read_text().splitlines()]
    assert len({pid for pid, *_ in calls}) == 3
    numbers = [tuple(rest) for _, _, *rest in calls]
    assert numbers[:3] == numbers[3:6] == numbers[6:]
    assert [float(one) for _, one, *_ in calls[::3]] == [2 * LOST, 0.0, 2 * LOST]  # regions follow the row
    assert "train.py:step uses autocast itself: that is off in float32" in " ".join(done.stdout.split())


def test_regions_of_a_function_of_jax_follow_the_row(check, monkeypatch):
    """Each row is of the precision that it names, and not of that in the step."""
    monkeypatch.setattr("preamp.jax.check", lambda devices: machine())
    Path("train_jax.py").write_text(JAX_REGION)
    done = check("--model", "train_jax.py:in_region", "--calls", "1", "--framework", "jax")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^ ?(b?float\d\d(?:, rehearsed)?)  +(\S+)", done.stdout, re.MULTILINE)
    kept = float(f"{LOST:.6g}")  # as it is printed
    losses = {name: float(loss) for name, loss in found}
    assert losses == {"float32": kept, "bfloat16": 0.0, "float16, rehearsed": kept}
    said = "train_jax.py:in_region uses autocast itself: that is off in float32"
    assert said in " ".join(done.stdout.split())


def test_a_precision_that_fails_is_a_row(check):
    done = check("--model", "train.py:only_float32", "--calls", "2")
    assert done.returncode == 0
    assert rows(done.stdout)["bfloat16"].split() == ["bfloat16", "-", "-", "-", "-"]
    assert "bfloat16: TypeError: no autocast here." in done.stdout
    assert "float16, rehearsed: its process ended with status 3 before it was done." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "train.py:several"], "train.py:several returned a Tensor. Write a function that"),
        (
            ["--model", "train.py:fails"],
            "train.py:fails fails in float32, without autocast: KeyError: 'data'.",
        ),
        (
            ["--model", "train.py:no_file"],
            "FileNotFoundError: [Errno 2] No such file or directory: 'absent.txt'. Relative paths start in /",
        ),
        (
            ["--model", "broken.py:step"],
            "broken.py cannot be imported: ModuleNotFoundError: No module named 'absent_module'. Install",
        ),
        (
            ["--model", "train.py:step", "--calls", "1.5"],
            "--calls: 1.5 is not a whole number. Write one, such as 100.",
        ),
        (["--calls", "3"], "--calls 3 has no effect without --model"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_machine_is_measured(arguments, problem, check, monkeypatch):
    monkeypatch.setattr("preamp.torch.check", lambda devices: pytest.fail("measured"))
    Path("broken.py").write_text("import absent_module")
    done = check(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert done.stderr.startswith("preamp: ")
    assert done.stderr.count("\n") == 1


def test_a_device_that_is_not_there_is_refused(here):
    done = here("check", "--device", "gpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "device='gpu' is not a device type of PyTorch" in done.stderr


def test_float16_is_rehearsed_only_where_it_is_slow(monkeypatch):
    monkeypatch.setattr(compared, "run_in_process", lambda run, *_: run)
    reference = PrecisionRun("float32", losses=[1.0], seconds=[1.0], device="cpu")
    emulated = {"native": False, "same": False, "slower": True, "emulated": True, "missing": True}
    for verdict, emulate in emulated.items():
        runs = compared.run_in_low_precision(reference, "a:b", "torch", machine(verdict))
        assert [run.emulate for run in runs] == [False, emulate]


def test_the_table_of_losses():
    reference = PrecisionRun("float32", losses=[2.0, 1.5, 1.0], seconds=[9.0, 1.0, 1.0])
    other = PrecisionRun("float16", losses=[2.0, 1.5, 1.01], seconds=[9.0, 0.5, 0.5])
    bad = PrecisionRun("bfloat16", losses=[2.0, float("inf"), float("inf")], seconds=[90.0, 2.0, 2.0])
    runs = [reference, other, bad]
    assert [list(line.values()) for line in table(runs)] == [
        ["float32", "2", "1", "-", "1.00x"],
        ["float16", "2", "1.01", "1.00%", "2.00x"],
        ["bfloat16", "2", "inf", "not finite", "0.50x"],
    ]
    assert sentences(runs, "a:b", "torch", machine()) == ["bfloat16: the loss is inf in call 2."]


def run_of(precision, losses, seconds=1.0, **settings):
    return PrecisionRun(precision, losses=losses, seconds=[seconds] * len(losses), device="cpu", **settings)


def test_the_first_call_and_emulation_have_no_speed():
    emulated = run_of("float16", [1.0] * 3, emulate=True)
    assert [line["speed"] for line in table([run_of("float32", [1.0] * 3), emulated])] == ["1.00x", "-"]
    runs = [run_of("float32", [2.0, 1.0]), run_of("bfloat16", [2.0, 1.1])]
    assert [line["speed"] for line in table(runs)] == ["-", "-"]
    assert sentences(runs, "a:b", "torch", machine(brain=Product(4.0))) == [
        "Speeds need 3 calls or more: the first one warms up."
    ]


@pytest.mark.parametrize(
    ("seconds", "said"), [(1.5, "takes 1.5 times as long"), (1.0, "takes about as long"), (0.5, None)]
)
def test_a_step_that_is_slower_than_products_is_told(seconds, said):
    runs = [run_of("float32", [1.0] * 3), run_of("bfloat16", [1.01] * 3, seconds)]
    found = sentences(runs, "a:b", "torch", machine(brain=Product(4.0)))
    assert len(found) == (said is not None)
    if said:
        assert f"bfloat16: the step {said} as in float32, though large products are 4 times" in found[0]
    assert sentences(runs, "a:b", "torch", machine(brain=Product(1.0))) == []


def test_a_function_in_which_nothing_is_cast_is_told():
    runs = [run_of(name, [1.0, 0.5, 0.25]) for name in ("float32", "bfloat16", "float16")]
    assert sentences(runs, "a:b", "jax", machine()) == [
        "bfloat16 and float16: every loss is exactly that of float32, so probably nothing was cast. See what "
        "is cast: preamp inspect a:b --framework jax"
    ]


@pytest.mark.parametrize(("loss", "is_told"), [(float("nan"), True), (2.0, True), (1.05, False)])
def test_an_optimizer_inside_of_autocast_of_jax_is_suspected(loss, is_told):
    runs = [run_of("float32", [1.0] * 3), run_of("float16", [loss] * 3, emulate=True)]
    for framework in ("torch", "jax"):
        found = " ".join(sentences(runs, "a:b", framework, machine()))
        assert ("autocast(update, enabled=False)" in found) == (is_told and framework == "jax")


JAX_SCRIPT = """
import jax
import jax.numpy as jnp

weight = jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64)


def loss():
    with open("traces.txt", "a") as file:
        file.write("traced\\n")
    return jnp.mean((weight @ weight) ** 2)


jitted = jax.jit(lambda weight: jnp.mean((weight @ weight) ** 2))


def reads():
    return float(jitted(weight))


def writes():
    global weight
    value, gradient = jax.value_and_grad(jitted)(weight)
    weight = weight - gradient
    return value


"""


def test_it_checks_jax(here, monkeypatch):
    done = here("check", "--framework", "jax")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.search(r"^cpu +bfloat16 .* works$", done.stdout, re.MULTILINE)
    assert re.search(r"^cpu +float16 .* works$", done.stdout, re.MULTILINE)
    done = here("check", "--framework", "jax", "--device", "tpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "JAX has no device type 'tpu' here. Write one that it has: cpu." in done.stderr
    monkeypatch.setattr("preamp.jax.check", lambda devices: machine())
    Path("train.py").write_text(JAX_SCRIPT)
    done = here("check", "--framework", "jax", "--model", "train.py:loss", "--calls", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "train.py:loss in each precision, 4 calls:" in done.stdout
    differences = [line.split()[-2] for line in rows(done.stdout).values()]
    assert differences[0] == "-"
    assert all(float(one.rstrip("%")) < 5 for one in differences[1:])
    assert "probably nothing was cast" not in done.stdout
    assert len(Path("traces.txt").read_text().splitlines()) == 6  # twice in each precision


def test_the_casts_of_a_jax_function_are_named_by_their_lines(tmp_path, monkeypatch):
    text = "import jax.numpy as jnp\ndef loss():\n    return jnp.ones(3).astype(jnp.float16).sum()\n"
    (tmp_path / "lowered.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    reference = run_in_process(PrecisionRun("float32"), "lowered.py:loss", "jax", "", 1)
    assert reference.casts == ["lowered.py:3"]
    assert "at lowered.py:3. In the float32 run they are as in" in " ".join(
        sentences([reference], "lowered.py:loss", "jax", machine())
    )


@pytest.mark.parametrize("name", ["reads", "writes"])
def test_a_function_that_jax_cannot_trace_is_refused_in_plain_words(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(JAX_SCRIPT)
    with pytest.raises(PreampError) as caught:
        compared.run_in_float32(f"train.py:{name}", "jax", 3)
    assert re.fullmatch(
        rf"train\.py:{name} fails in float32, without autocast: \w+Error\. A function of JAX is traced, so "
        r"it must not read values, as float\(loss\) and if loss > 0 do, or write arrays to globals and "
        r"objects\. Return the loss of a pure function\.",
        str(caught.value),
    )
    assert capfd.readouterr().err == ""


def test_a_traceback_begins_in_the_users_code(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    with pytest.raises(PreampError):
        compared.run_in_float32("train.py:fails", "torch", 3)
    shown = capfd.readouterr().err
    assert "KeyError: 'data'" in shown
    assert 'train.py", line' in shown
    assert "preamp" not in shown


def test_a_reader_that_ends_early_is_no_error():
    program = (
        "import sys; from preamp.cli import app; app._check_machine = lambda *_: 'table'; "
        "sys.exit(app.run(['check']))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_a_run_writes_can_be_read_again():
    run = PrecisionRun("float16", True, [1.0, float("nan")], [0.1, 0.1], "cpu")
    read = PrecisionRun(**json.loads(json.dumps(compared.asdict(run))))
    assert read.losses[0] == 1.0
    assert read.name == "float16, rehearsed"


@pytest.mark.parametrize(("package", "arguments"), [("torch", []), ("jax", ["--model", "train.py:loss"])])
def test_a_missing_framework_is_named(package, arguments, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('absent', name={package!r})")
    (tmp_path / "train.py").write_text("def loss(): return 1.0")
    done = subprocess.run(
        [sys.executable, "-m", "preamp", "check", "--framework", package, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"preamp: {package} is missing. Run: pip install 'preamp[{package}]'\n"


def test_devices_of_jax_are_one_or_several_and_not_none():
    from tests.cli.inside import _kinds

    assert _kinds("cpu") == _kinds(["cpu", "cpu"]) == ["cpu"]
    with pytest.raises(UsageError, match=r"devices is empty\. Leave it out to check all, or write"):
        _kinds([])


def test_a_note_of_jax_names_the_model_of_a_device_only_if_there_is_one():
    from tests.cli.inside import _note

    assert _note("cpu", "cpu").startswith("JAX ")
    assert _note("gpu", "NVIDIA H100").startswith("NVIDIA H100; JAX ")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_lines_advised_for_jax_run_and_import_what_they_use(precision):
    import jax.numpy as jnp
    import optax

    from tests.cli.inside import CODE

    names = {"loss": lambda weight, x: (weight @ x).sum(), "optimizer": optax.sgd(0.1)}
    exec(CODE[precision], names)
    weight, x = jnp.ones((4, 4)), jnp.ones(4)
    state = [names["optimizer"].init(weight)] if precision == "float16" else []
    assert names["run"](weight, *state, x)[0] == 16.0
