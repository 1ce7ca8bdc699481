"""The trainings the command line runs: the tables they take, and that float16 honestly fails in them."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from preamp import DataError, Dynamic, MissingExtra, Trace, dialects
from tests.cli.inside import (
    Plan,
    TorchLoop,
    autoencoder,
    choose_framework,
    classify,
    digits,
    plans,
    read_csv,
    runs,
    train,
)

ROWS = [f"{number},{number % 7},{'odd' if number % 2 else 'even'}" for number in range(30)]


def run(problem, precision, policy, seed=0):
    plan = Plan(precision, policy, seed)
    return train(problem, plan, make_loop=TorchLoop, trace=Trace(), on_step=lambda step: None)


def test_float16_fails_without_scaling_and_not_with_it():
    """A quarter of the main job: enough for float32 to leave the average blot."""
    problem = autoencoder(digits(), epochs=60)
    float32, unscaled, scaled = (
        run(problem, precision, policy)
        for precision, policy in [
            ("float32", None),
            ("float16", None),
            ("float16", Dynamic(growth_interval=100)),
        ]
    )
    blot = float(np.mean((problem.table.train.mean(axis=0) - problem.table.test) ** 2))
    assert unscaled.test_error > 0.95 * blot
    assert float32.test_error < 0.8 * blot
    assert scaled.test_error == pytest.approx(float32.test_error, rel=0.1)
    assert scaled.trace.summary().final_scale > 2.0**16


@pytest.mark.slow
def test_the_classifier_fails_the_same_way():
    problem = classify(digits(), epochs=60)
    assert run(problem, "float16", None).test_accuracy < 0.2
    assert run(problem, "float16", Dynamic(growth_interval=100)).test_accuracy > 0.4


def test_looking_changes_nothing_and_reaches_the_trace():
    problem = autoencoder(digits(), epochs=2)
    traces, outputs = [], []
    for every in (1, 10**9):

        def make(*args, every=every):
            loop = TorchLoop(*args)
            loop.lens.every = every
            return loop

        plan = Plan("float16", Dynamic(growth_interval=5), 0)
        done = train(problem, plan, make_loop=make, trace=Trace(), on_step=lambda step: None)
        traces.append(done.trace)
        outputs.append(done.outputs)
    looked, seldom = ([step._replace(seconds=None) for step in trace] for trace in traces)
    assert looked == seldom
    assert (outputs[0] == outputs[1]).all()
    assert [snapshot.index for snapshot in traces[0].snapshots] == list(range(24))
    assert [snapshot.scale for snapshot in traces[0].snapshots] == [step.scale for step in traces[0]]
    names = {row.name for row in traces[0].snapshots[-1].rows if row.what == "flow"}
    assert names == {f"layer{number}" for number in range(1, 9)}
    assert "layer8" in {row.name for row in traces[1].snapshots[0].rows}


def test_float16_is_planned_twice_and_the_others_once():
    names = [plan.name for plan in plans(["float32", "float16"], dialects.TORCH, seeds=2, first_seed=5)]
    assert names == ["float32", "float16, no scaling", "float16 + preamp"] * 2
    assert len({plan.file_name for plan in plans(["bfloat16", "float16"], Dynamic(), 3, 0)}) == 9


PACKAGES = ("torch", "jax", "optax")


def installed(monkeypatch, packages):
    """Play a machine with these packages."""
    monkeypatch.setattr(runs, "find_spec", lambda name: object() if name in packages else None)


def test_the_framework_chosen_is_the_first_that_is_there_whole(monkeypatch):
    for size in range(1, len(PACKAGES) + 1):
        for packages in map(set, itertools.combinations(PACKAGES, size)):
            installed(monkeypatch, packages)
            if packages == {"optax"}:
                with pytest.raises(MissingExtra, match=r"No framework.*pip install 'preamp\[jax\]'"):
                    choose_framework()
            else:
                assert choose_framework() == ("torch" if "torch" in packages else "jax"), packages


def test_a_finder_that_raises_has_no_framework(monkeypatch):
    def find(name):
        raise ModuleNotFoundError(name) if name == "torch" else ValueError(f"{name}.__spec__ is None")

    monkeypatch.setattr(runs, "find_spec", find)
    with pytest.raises(MissingExtra):
        choose_framework()


def test_choosing_imports_no_framework():
    code = "import sys; import preamp.cli.lab.runs as runs; print(runs.choose_framework(), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    chosen, *modules = done.stdout.split()
    assert chosen == "torch"
    assert not {*PACKAGES} & {*modules}


def test_every_epoch_sees_every_row_once():
    problem = autoencoder(digits(), epochs=3)
    batches = list(problem.batches(seed=1))
    assert len(batches) == problem.steps == 3 * 12
    epoch = np.sort(np.concatenate(batches[12:24]))
    assert (epoch == np.arange(1437)).all()


@pytest.mark.parametrize("header", ["", "a,b,label\n"])
def test_a_table_is_scaled_and_split(tmp_path, header):
    path = tmp_path / "table.csv"
    path.write_text(header + "\n".join(ROWS) + "\n\n")
    table = read_csv(path)
    assert (len(table.train), len(table.test), table.classes) == (24, 6, 2)
    rows = np.concatenate([table.train, table.test])
    assert rows.dtype == np.float32
    assert rows.min(axis=0).tolist() == [0.0, 0.0]
    assert rows.max(axis=0).tolist() == [1.0, 1.0]
    assert set(table.train_labels) == {0, 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 rows"),
        ("\n".join(ROWS[:5]), "5 rows"),
        ("\n".join([*ROWS, "1,2"]), "line 31: 2 columns where the first row has 3"),
        ("\n".join([*ROWS, "1,x,odd"]), "line 31, column 2: 'x'"),
        ("\n".join([*ROWS, "1,nan,odd"]), "line 31, column 2: 'nan'"),
        ("\n".join([*ROWS, "1,,odd"]), "line 31, column 2: ''"),
        ("\n".join(["odd"] * 30), "line 1: one column"),
        ("\n".join(f"{i},same" for i in range(30)), "'same'"),
        ("\n".join(f"{i},{i}" for i in range(30)), "30 different labels"),
        ("\n".join(f"x{i},{i},{i % 2}" for i in range(30)), "line 2, column 1: 'x1'"),
        ("\n".join(["id,n,label", *(f"x{i},{i},{i % 2}" for i in range(30))]), "line 2, column 1: 'x0'"),
        (
            "\n".join(row.replace(",", ";") for row in ROWS),
            "line 1: one column. At least one number and, last, a label are needed. It has ';'",
        ),
        ("\n".join([*ROWS, "1,2, "]), "line 31: the label, in the last column, is empty"),
        (
            "\n".join([*ROWS, "1e308,1,odd", "-1e308,1,odd"]),
            "column 1: -1e+308 to 1e+308 is too wide a range",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_line(tmp_path, text, words):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        read_csv(path)
    assert words in str(error.value)
    assert "table.csv" in str(error.value)


def test_a_table_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe\x00\x80" * 50)
    with pytest.raises(DataError, match="not text in UTF-8"):
        read_csv(path)
