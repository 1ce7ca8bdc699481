"""What JAX's training sees of its own steps: each layer and parameter, and what PyTorch's lens sees."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from preamp import Dynamic, Trace
from preamp.record.snapshots import merge_snapshots
from preamp.report import Curve, write_report
from tests.cli.inside import JaxLoop, Plan, TorchLoop, autoencoder, classify, digits, train

SIZES = (64, 32, 16, 32, 64)
LAYERS = [f"layer{number}" for number in range(1, len(SIZES))]
PARAMETERS = [f"{layer}.{name}" for layer in LAYERS for name in ("weight", "bias")]
SCALED = Dynamic(init_scale=2.0**23, growth_interval=3)  # its first growth overflows
KINDS = ("input", "weight", "activation", "flow", "gradient")


def small(epochs=1):
    return replace(autoencoder(digits(), epochs), sizes=SIZES, batch_size=479)


@cache
def looked(make, precision, policy, every=1):
    """Return the trace and the answers of a short training whose steps all have the same shape."""

    def made(*args):
        loop = make(*args)
        loop.lens.every = every
        return loop

    problem = small(epochs=3)
    plan = Plan(precision, policy, seed=0)
    done = train(problem, plan, make_loop=made, trace=Trace(), on_step=lambda step: None)
    return done.trace, done.outputs


def rows(snapshot, what):
    return {
        row.name: row for row in (*snapshot.inputs, *snapshot.weights, *snapshot.rows) if row.what == what
    }


def counted(values):
    """Return how many values there are of each exponent, zeros under None, as NumPy has them."""
    mantissas, exponents = np.frexp(np.abs(np.ravel(values)))
    zero = (mantissas == 0.0) | (exponents - 1 < -126)
    found = dict(zip(*np.unique(exponents[~zero] - 1, return_counts=True), strict=True))
    return {**found, **({None: int(zero.sum())} if zero.any() else {})}


def in_histogram(row):
    seen = row.histogram
    found = {exponent: count for exponent, count in enumerate(seen.counts, start=seen.low) if count}
    return {**found, **({None: seen.zeros} if seen.zeros else {})}


def apart(one, other):
    """Return which part of the values two histograms have in different places."""
    difference = sum(abs(one.get(key, 0) - other.get(key, 0)) for key in {*one, *other})
    return difference / 2 / sum(one.values())


def test_looking_changes_nothing_and_reaches_the_trace():
    (often, answers), (seldom, same) = (looked(JaxLoop, "float16", SCALED, every) for every in (1, 10**9))
    assert [s._replace(seconds=None) for s in often] == [s._replace(seconds=None) for s in seldom]
    assert (answers == same).all()
    assert [snapshot.index for snapshot in merge_snapshots(often.snapshots)] == list(range(9))
    assert [snapshot.scale for snapshot in merge_snapshots(often.snapshots)] == [step.scale for step in often]


def test_the_steps_looked_at_are_those_of_the_lens():
    """The first one, and the one after a skip, or after the first of several in a row."""
    policy = Dynamic(init_scale=2.0**32, growth_interval=4)  # in JAX the gradients of weights are float32
    for make in (JaxLoop, TorchLoop):
        trace = looked(make, "float16", policy, every=10**9)[0]
        skipped = [step.index for step in trace if step.skipped]
        assert skipped
        snapshots = [snapshot.index for snapshot in merge_snapshots(trace.snapshots)]
        assert snapshots == [0, *(index + 1 for index in skipped if index - 1 not in skipped)]


@pytest.mark.parametrize(("precision", "policy"), [("float32", None), ("float16", SCALED)])
def test_each_layer_and_parameter_is_seen_as_the_lens_sees_it(precision, policy):
    mine, theirs = (
        merge_snapshots(looked(make, precision, policy)[0].snapshots)[0] for make in (JaxLoop, TorchLoop)
    )
    assert (mine.index, mine.scale, mine.low_dtype) == (theirs.index, theirs.scale, theirs.low_dtype)
    for what in KINDS:
        of_mine, of_theirs = rows(mine, what), rows(theirs, what)
        if what in ("weight", "gradient"):  # PyTorch's lens counts the parameters of a module together
            assert set(of_mine) == set(PARAMETERS)
        else:
            assert list(of_mine) == list(of_theirs)
        for layer in LAYERS:
            seen: dict = {}
            for name, row in of_mine.items():
                if name.split(".")[0] == layer:
                    for key, count in in_histogram(row).items():
                        seen[key] = seen.get(key, 0) + count
            assert sum(seen.values()) == of_theirs[layer].histogram.total
            assert apart(seen, in_histogram(of_theirs[layer])) < 0.03, (what, layer)


def test_first_in_the_backward_pass_is_the_last_layer():
    snapshot = merge_snapshots(looked(JaxLoop, "float32", None)[0].snapshots)[0]
    assert list(rows(snapshot, "activation")) == list(rows(snapshot, "input")) == LAYERS
    assert list(rows(snapshot, "flow")) == LAYERS[::-1]
    assert [name for name in rows(snapshot, "gradient") if name.endswith("weight")] == [
        f"{layer}.weight" for layer in LAYERS[::-1]
    ]


@pytest.mark.parametrize(("precision", "policy"), [("float32", None), ("float16", SCALED)])
def test_histograms_are_numpys_of_the_same_values(precision, policy):
    """Counts of all trees but the flows', of which only the counts leave the backward pass."""
    problem = small()
    batch = problem.table.train[:64], problem.table.train_labels[:64]
    loop = JaxLoop(problem, precision, policy, seed=0)
    _, values, _ = loop.values(loop.layers, loop.state, *batch)
    snapshots = {snapshot.rows[0].what: snapshot for snapshot in loop._snapshots(0, *batch) if snapshot.rows}
    for what in ("gradient", "activation"):
        tree = {
            (f"{layer}.{name}" if name else layer): array
            for layer, part in values[what].items()
            for name, array in (part.items() if isinstance(part, dict) else [("", part)])
        }
        found = rows(snapshots[what], what)
        assert list(found) == list(tree)
        assert {n: in_histogram(row) for n, row in found.items()} == {n: counted(a) for n, a in tree.items()}
    _, weights, amax, *_ = loop.train_step(loop.layers, loop.state, *batch)
    for gradient, layer in zip(weights, LAYERS, strict=True):
        seen = np.asarray(values["gradient"][layer]["weight"])
        assert np.abs(seen - gradient).max() <= 2.0**-9 * np.abs(gradient).max()
    highest = max(
        rows(snapshots["gradient"], "gradient")[f"{n}.weight"].histogram.amax_exponent for n in LAYERS
    )
    assert 2.0**highest <= float(amax) < 2.0 ** (highest + 1)


def test_flows_are_the_gradients_of_what_a_layer_puts_out():
    """As the chain rule has them in NumPy's float64."""
    problem = small()
    inputs, labels = problem.table.train[:64], problem.table.train_labels[:64]
    loop = JaxLoop(problem, "float32", None, seed=0)
    (snapshot,) = (
        one for one in loop._snapshots(0, inputs, labels) if one.rows and one.rows[0].what == "flow"
    )
    outputs = [inputs.astype(np.float64)]
    for layer in loop.layers.values():
        outputs.append(1.0 / (1.0 + np.exp(-(outputs[-1] @ np.float64(layer["weight"])))))
    flow = 2.0 * (outputs[-1] - inputs) / inputs.size
    for name, output in zip(LAYERS[::-1], outputs[:0:-1], strict=True):
        assert apart(counted(flow), in_histogram(rows(snapshot, "flow")[name])) < 1e-3
        flow = (flow * output * (1.0 - output)) @ np.float64(loop.layers[name]["weight"]).T


def test_a_classifier_ends_without_a_sigmoid():
    problem = replace(classify(digits(), epochs=1), sizes=(64, 8, 10))
    loop = JaxLoop(problem, "float32", None, seed=0)
    _, values, _ = loop.values(
        loop.layers, loop.state, problem.table.train[:8], problem.table.train_labels[:8]
    )
    assert float(np.min(values["activation"]["layer2"])) < 0.0 < float(np.min(values["activation"]["layer1"]))


def test_the_report_has_a_row_for_each_layer_and_parameter(tmp_path):
    trace, _ = looked(JaxLoop, "float16", SCALED)
    write_report(tmp_path / "r.html", title="", lead=[], curves=[Curve("one", trace)], table=[])
    page = (tmp_path / "r.html").read_text()
    for name in (*PARAMETERS, *LAYERS):
        assert f'data-label="module">{name}</td>' in page
    assert (
        page.index(">layer1.weight</td>") < page.index(">layer1.bias</td>") < page.index(">layer4.bias</td>")
    )
