"""What a lens saw: what follows for the scale, and its way through the file of a trace."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import ExponentHistogram, PolicyError, Snapshot, SnapshotRow, Step, Trace, TraceError
from preamp.record.exponents import BANDS
from preamp.record.snapshots import merge_snapshots
from tests.strategies import runs, snapshots

few = settings(deadline=None, max_examples=20)
KINDS = ["activation", "flow", "gradient"]


def row(
    name: str, what: Any, exponent: int | None = 0, *, dtype: str = "float16", bad: int = 0
) -> SnapshotRow:
    counts = () if exponent is None else (1,)
    return SnapshotRow(name, what, dtype, ExponentHistogram(exponent or 0, counts, zeros=1, nonfinite=bad))


def snapshot(*rows: SnapshotRow, scale: float = 2.0**10, low_dtype: str = "float16") -> Snapshot:
    return Snapshot(7, scale, low_dtype, rows)


# What follows


def test_the_path_of_an_inf_begins_where_it_was_computed_first() -> None:
    rows = [
        row("a", "activation"),
        row("b", "activation"),
        row("b", "flow", bad=1),
        row("a", "flow", bad=3),
        row("a", "gradient", bad=2),
    ]
    seen = snapshot(*rows)
    assert seen.path == tuple(rows[2:])
    assert seen.first_overflow == rows[2]
    forward = snapshot(row("mask", "activation", bad=4), *rows)
    assert forward.first_overflow == forward.rows[0]
    masked = snapshot(row("mask", "activation", bad=4), *rows[:2], row("b", "flow"))
    assert masked.first_overflow is None
    assert len(masked.path) == 1


def test_the_limit_is_the_largest_of_what_is_in_the_low_dtype() -> None:
    linear, norm = row("linear", "flow", 3), row("norm", "flow", 9, dtype="float32")
    weights = row("linear", "gradient", 5, dtype="float32")
    of_norm = row("norm", "gradient", 12, dtype="float32")
    activation = row("linear", "activation", 14)
    assert snapshot(activation, norm, of_norm, linear).limit == linear
    assert snapshot(activation, norm, of_norm, linear, weights).limit == weights
    assert snapshot(activation, norm, of_norm).limit == of_norm  # nothing is low: all of it counts
    assert snapshot(activation).limit is None
    assert snapshot(row("linear", "flow", None)).limit is None
    assert snapshot(linear, row("other", "flow", 3)).limit == linear


def test_the_gradient_of_a_parameter_is_limited_as_the_module_that_holds_it() -> None:
    flow, of_norm = row("block", "flow", 3), row("block.norm", "flow", 2, dtype="float32")
    for path in ("block.kernel", "block/kernel", "block[0]"):
        weights = row(path, "gradient", 5, dtype="float32")
        inner = row("block.norm", "gradient", 12, dtype="float32")
        assert snapshot(flow, of_norm, weights, inner).limit == weights


def test_parts_of_a_snapshot_whose_scale_is_nan_are_joined() -> None:
    flow, gradient = row("a", "flow"), row("a", "gradient")
    assert len(merge_snapshots([snapshot(flow, scale=math.nan), snapshot(gradient, scale=float("nan"))])) == 1
    assert len(merge_snapshots([snapshot(flow, scale=math.nan), snapshot(gradient)])) == 2


@few
@given(st.lists(snapshots, max_size=4), st.randoms(use_true_random=False))
def test_snapshots_that_were_taken_apart_can_be_joined(seen: list[Snapshot], random: Any) -> None:
    whole = []
    for index, one in enumerate(seen):
        named = [list({(r.what, r.name): r for r in rows}.values()) for rows in one[3:6]]
        computed = sorted(named[0], key=lambda r: KINDS.index(r.what))
        whole.append(
            Snapshot(index, one.scale, one.low_dtype, *map(tuple, (computed, *named[1:])), one.quantized)
        )
    parts = []
    for one in whole:
        of_one = [one._replace(rows=(), inputs=(), weights=(), quantized=())]
        of_one += [of_one[0]._replace(rows=tuple(r for r in one.rows if r.what == what)) for what in KINDS]
        of_one += [of_one[0]._replace(inputs=one.inputs), of_one[0]._replace(weights=one.weights)]
        of_one += [of_one[0]._replace(quantized=one.quantized)]
        random.shuffle(of_one)
        parts += of_one
    assert merge_snapshots(parts) == whole
    assert merge_snapshots(whole) == whole


def test_two_passes_of_one_step_stay_two_snapshots() -> None:
    forward, backward = snapshot(row("a", "activation")), snapshot(row("a", "gradient"))
    assert [len(one.rows) for one in merge_snapshots([forward, backward, forward, backward])] == [2, 2]
    other = backward._replace(rows=(row("b", "gradient"),), scale=1.0)
    assert merge_snapshots([backward, other]) == [backward, other]
    assert merge_snapshots([forward._replace(scale=1.0), backward])[0].scale == backward.scale
    assert merge_snapshots([backward, forward._replace(scale=1.0)])[0].scale == backward.scale
    narrow = forward._replace(low_dtype="float8_e4m3fn")
    assert merge_snapshots([narrow, backward])[0].low_dtype == "float8_e4m3fn"


@few
@given(
    amaxes=st.lists(st.integers(-40, 15), min_size=1, max_size=4),
    power=st.integers(-20, 30),
    margin=st.integers(0, 6),
    low_dtype=st.sampled_from(list(BANDS)),
)
def test_at_the_best_scale_the_peak_keeps_its_margin_and_at_twice_that_it_does_not(
    amaxes: list[int], power: int, margin: int, low_dtype: str
) -> None:
    rows = [row(str(n), "flow", amax, dtype=low_dtype) for n, amax in enumerate(amaxes)]
    seen = snapshot(*rows, scale=2.0**power, low_dtype=low_dtype)
    best = seen.best_scale(margin)
    assert best is not None
    assert math.log2(best).is_integer()
    rooms = [seen.fit(one, best).headroom for one in rows]
    assert min(room for room in rooms if room is not None) == margin
    assert seen.limit == rows[amaxes.index(max(amaxes))]


def test_an_overflow_lowers_the_best_scale() -> None:
    assert snapshot(row("a", "flow", -3, bad=1)).best_scale(1) == 2.0**8
    assert snapshot(row("a", "flow", 14)).best_scale(1) == 2.0**10


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0, "8"])
def test_a_fit_at_no_scale_is_refused(scale: Any) -> None:
    one = row("a", "flow")
    with pytest.raises(PolicyError, match=r"Write scale=snapshot\.best_scale"):
        snapshot(one).fit(one, scale)


@pytest.mark.parametrize("margin", [-1, 0.5, "2"])
def test_a_margin_that_is_none_is_refused(margin: Any) -> None:
    with pytest.raises(PolicyError, match="Write margin=2"):
        snapshot(row("a", "flow")).best_scale(margin)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0])
def test_a_scale_that_is_lost_gives_no_best_one(scale: float) -> None:
    assert snapshot(row("a", "flow"), scale=scale).best_scale() is None


def test_how_a_row_fits_at_another_scale() -> None:
    small = row("a", "flow", -27, dtype="float32")
    seen = snapshot(small, row("a", "activation", -27, dtype="float32"))
    assert seen.fit(small)._asdict() == {"zeros": 0.5, "flushed": 1.0, "subnormal": 0.0, "headroom": 42}
    assert seen.fit(small, 2.0**12)._asdict() == {
        "zeros": 0.5,
        "flushed": 0.0,
        "subnormal": 1.0,
        "headroom": 40,
    }
    assert seen.fit(seen.rows[1], 2.0**12).flushed == 1.0  # an activation is not scaled
    assert seen.band == BANDS["float16"]


# Files


@pytest.fixture
def path(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("snapshots") / "run.jsonl")


@settings(deadline=None, max_examples=15)
@given(recorded=runs, seen=st.lists(snapshots, max_size=3))
def test_snapshots_are_read_back_as_they_were_written(
    tmp_path_factory: Any, recorded: list[Step], seen: list[Snapshot]
) -> None:
    path = tmp_path_factory.getbasetemp() / "snapshots.jsonl"
    with Trace(path=path, mode="replace") as streamed:
        for step in recorded:
            streamed(step)
        for one in seen:
            streamed.add_snapshot(one)
    assert repr(Trace.read(path).snapshots) == repr(seen)  # NaN is not NaN
    assert Trace.read(path) == streamed
    with Trace(path=path, mode="append") as more:
        assert repr(more.snapshots) == repr(seen)
        more.add_snapshot(snapshot())
    assert len(Trace.read(path).snapshots) == len(seen) + 1
    streamed.write(path)
    assert Trace.read(path) == streamed
    assert len(path.read_text().splitlines()) == 1 + len(recorded) + len(seen)


def test_a_look_after_the_end_leaves_the_reason_for_it(path: Path) -> None:
    with Trace(path=path) as trace:
        trace.stop("out of patience")
        trace.add_snapshot(snapshot())
    assert Trace.read(path).stopped == "out of patience"


@pytest.mark.parametrize(
    "unfit",
    [
        snapshot(low_dtype="float12"),
        snapshot()._replace(index="seven"),
        snapshot(row("a", "flow")._replace(what="weight")),
        snapshot(row("a", "flow")._replace(dtype=3)),
        snapshot()._replace(scale="large"),
    ],
)
def test_a_snapshot_that_could_not_be_read_back_is_not_recorded(path: Path, unfit: Snapshot) -> None:
    with Trace(path=path) as trace:
        with pytest.raises((TraceError, ValueError)):
            trace.add_snapshot(unfit)
        assert trace.snapshots == []
    assert Trace.read(path).snapshots == []


ROW = {
    "name": "a",
    "what": "flow",
    "dtype": "float16",
    "low": -3,
    "counts": [1, 0, 2],
    "zeros": 0,
    "nonfinite": 0,
}
LOOK = {"index": 3, "scale": 8.0, "low_dtype": "float16", "rows": [ROW]}
OPERAND = {"name": "a", "product": "dgrad", "operand": "weight", "format": "e2m1", "values": 4}
OPERAND |= {"flushed": 0.25, "saturated": 0.0, "sqnr": "inf"}
ABSENT = object()


def changed(entry: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {key: kept for key, kept in {**entry, name: value}.items() if kept is not ABSENT}


HOSTILE = [
    *[(value, "a snapshot is") for value in (None, [], 3, "x")],
    *[(changed(LOOK, name, ABSENT), f"without {name}") for name in LOOK],
    *[(changed(LOOK, "rows", [changed(ROW, name, ABSENT)]), f"without {name}") for name in ROW],
    (changed(LOOK, "colour", 1), "'colour'"),
    (changed(LOOK, "rows", [changed(ROW, "colour", 1)]), "'colour'"),
    *[(changed(LOOK, "index", value), "index") for value in (True, 0.5, "1", None, 10**400)],
    *[(changed(LOOK, "scale", value), "scale") for value in (True, "2", None, [], 10**400)],
    *[(changed(LOOK, "low_dtype", value), "low_dtype") for value in (16, None, "float12", "")],
    *[(changed(LOOK, "quantized", value), "quantized") for value in (None, {}, "x", [1], [ROW])],
    *[
        (changed(LOOK, "quantized", [changed(OPERAND, name, value)]), name)
        for name in OPERAND
        for value in (ABSENT, None, True, [], "x", -1)
        if (name, value) not in (("name", "x"), ("sqnr", -1))
    ],
    (changed(LOOK, "quantized", [changed(OPERAND, "flushed", 1.5)]), "flushed"),
    *[(changed(LOOK, "rows", value), "rows") for value in (None, {}, "x")],
    *[(changed(LOOK, "rows", [value]), "a snapshot's row") for value in (None, [], 1)],
    *[(changed(LOOK, "rows", [changed(ROW, "name", value)]), "name") for value in (1, None)],
    *[(changed(LOOK, "rows", [changed(ROW, "what", value)]), "what") for value in (1, None, "weights")],
    *[
        (changed(LOOK, "rows", [changed(ROW, "low", value)]), "low")
        for value in (True, 0.5, None, 10**9, -(10**9), 4095)
    ],
    *[
        (changed(LOOK, "rows", [changed(ROW, "counts", value)]), "count")
        for value in (None, 3, "11", {}, [-1], [True], [0.5], [None], [[1]], [10**400], [2**63])
    ],
    *[
        (changed(LOOK, "rows", [changed(ROW, name, value)]), name)
        for name in ("smallest", "largest", "nans")
        for value in (-1, True, None, "1", [], "inf", 10**400)
    ],
    (changed(LOOK, "rows", [changed(ROW, "largest", math.inf)]), "Infinity is not a number of JSON"),
    (changed(LOOK, "rows", [changed(ROW, "smallest", 0.0)]), "smallest"),
    (changed(LOOK, "rows", [changed(ROW, "nans", 1)]), "nans"),
    *[(changed(LOOK, name, value), name) for name in ("inputs", "weights") for value in (None, {}, 1)],
    *[(changed(LOOK, name, [ROW]), "what is 'flow'") for name in ("inputs", "weights")],
    (changed(LOOK, "rows", [changed(ROW, "what", "input")]), "what is 'input'"),
    *[
        (changed(LOOK, "rows", [changed(ROW, name, value)]), "count" if type(value) is int else name)
        for name in ("zeros", "nonfinite")
        for value in (-1, 2**63, True, 0.5, None, "0")
    ],
]


@pytest.mark.parametrize(("entry", "why"), HOSTILE)
def test_what_is_no_snapshot_is_refused_with_the_line(path: Path, entry: Any, why: str) -> None:
    good = json.dumps({"snapshot": LOOK})
    path.write_text('{"preamp_trace": 1}\n' + good + "\n" + json.dumps({"snapshot": entry}) + "\n")
    with pytest.raises(TraceError) as refused:
        Trace.read(path)
    message = str(refused.value)
    assert message.startswith(f"{path}, line 3: ")
    assert why in message
    assert len(message) < len(str(path)) + 250


def test_a_snapshot_with_endless_counts_is_refused(path: Path) -> None:
    entry = changed(LOOK, "rows", [changed(ROW, "counts", [1] * 5000)])
    path.write_text('{"preamp_trace": 1}\n' + json.dumps({"snapshot": entry}) + "\n")
    with pytest.raises(TraceError, match="line 2: low is"):
        Trace.read(path)


@settings(deadline=None, max_examples=25)
@given(seen=snapshots, data=st.data())
def test_a_file_with_snapshots_that_was_damaged_is_read_or_refused_by_the_line(
    tmp_path_factory: Any, seen: Snapshot, data: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    trace = Trace()
    trace.add_snapshot(seen)
    trace.write(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(20, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.sampled_from(JUNK))
    path.write_bytes(content)
    try:
        read = Trace.read(path)
    except TraceError as error:
        assert str(error).startswith(f"{path}, line ")  # noqa: PT017 - either outcome is right
    else:
        for one in read.snapshots:
            assert one.best_scale() is None or one.best_scale() > 0.0
            assert all(0.0 <= one.fit(row, 2.0).flushed <= 1.0 for row in one.rows)
        read.write(path)
        assert Trace.read(path) == read


JUNK = [b"", b"9", b"-", b'"', b"[", b"}", b",", b"null", b"1e999", b"\xff", b"NaN", b"0" * 30, b"\n"]

# As text


def widths(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_the_table_has_each_module_once_with_its_numbers() -> None:
    seen_there = SnapshotRow(
        "body.0",
        "activation",
        "float16",
        ExponentHistogram(-3, (5, 0, 2), zeros=3, nonfinite=2),
        0.15,
        0.9,
        1,
    )
    given = seen_there._replace(
        what="input", histogram=ExponentHistogram(zeros=4), smallest=None, largest=None, nans=0
    )
    back = seen_there._replace(
        what="flow", histogram=ExponentHistogram(-9, (4,)), smallest=None, largest=None, nans=None
    )
    weight = given._replace(what="weight", histogram=ExponentHistogram(), dtype="float8_e4m3fn")
    text = str(Snapshot(12, 1024.0, "float16", (seen_there, back), (given,), (weight,)))
    assert text.splitlines() == [
        "step 12, loss scale 1024; float16 holds 6e-08 to 65504",
        "min: smallest magnitude other than 0; max: largest finite magnitude",
        "",
        "forward pass                         min       max  zero %  inf, NaN",
        "  body.0",
        "    input        float16               0         0   100.0",
        "    weight       float8_e4m3fn         -         -       -",
        "    output       float16        1.50e-01  9.00e-01    25.0  1 inf, 1 NaN",
        "",
        "backward pass, scaled                min       max  zero %  inf, NaN",
        "  body.0",
        "    output grad  float16            2^-9      2^-9     0.0",
    ]


@settings(deadline=None, max_examples=25)
@given(seen=snapshots, modules=st.none() | st.integers(1, 6))
def test_any_snapshot_is_a_table_of_at_most_80_columns_that_names_what_it_leaves_out(
    seen: Snapshot, modules: int | None
) -> None:
    text = seen.table(modules)
    assert widths(text) <= 80
    assert all(letter.isprintable() for letter in text.replace("\n", ""))
    everything = seen.table(None)
    shown = len(re.findall(r"^    \w", text, re.MULTILINE))
    assert len(re.findall(r"^    \w", everything, re.MULTILINE)) == len(
        seen.rows + seen.inputs + seen.weights + seen.quantized
    )
    hidden = sum(map(int, re.findall(r"^  \.\.\. (\d+) more$", text, re.MULTILINE)))
    assert ("print(snapshot.table(None)) shows all." in text) == (hidden > 0)
    assert (hidden == 0) == (text == everything)
    assert shown or not (seen.rows or seen.quantized)
    assert str(seen) == seen.table()
    copied = Trace()
    copied.add_snapshot(seen)
    assert repr(copied.snapshots) == repr([seen])


def test_of_many_modules_those_next_to_the_overflow_are_shown_or_those_that_lose_most() -> None:
    names = [f"layers.{n}.attention.out" for n in range(300)]
    sound = [row(name, "flow", 3) for name in names]
    bad = [
        one._replace(histogram=ExponentHistogram(nonfinite=1)) if n >= 200 else one
        for n, one in enumerate(sound)
    ]
    around = snapshot(*bad).table(6).splitlines()
    assert [line.strip() for line in around if line.startswith("  ") and line[2] != " "] == [
        "... 197 more",
        *names[197:203],
        "... 97 more",
    ]
    lossy = [
        one._replace(histogram=ExponentHistogram(-40, (1,))) if n in (7, 250) else one
        for n, one in enumerate(sound)
    ]
    worst = str(snapshot(*lossy)).splitlines()
    for n in (7, 250):
        assert f"  {names[n]}" in worst
    assert len(worst) < 100


@pytest.mark.parametrize("modules", [0, -1, 2.5, "all", True])
def test_a_number_of_modules_that_is_none_is_refused(modules: Any) -> None:
    with pytest.raises(PolicyError, match="Write modules=40"):
        snapshot(row("a", "flow")).table(modules)


# Files from before inputs, weights and extremes


def test_a_file_from_before_they_were_recorded_is_read(path: Path) -> None:
    path.write_text('{"preamp_trace": 1}\n' + json.dumps({"snapshot": LOOK}) + "\n")
    (read,) = Trace.read(path).snapshots
    assert read == Snapshot(
        3, 8.0, "float16", (SnapshotRow("a", "flow", "float16", ExponentHistogram(-3, (1, 0, 2))),)
    )
    assert read.inputs == read.weights == ()
    again = Trace.read(path)
    again.write(path)
    assert json.loads(path.read_text().splitlines()[1]) == {"snapshot": LOOK}
    assert "    output grad  float16            2^-3      2^-1     0.0" in str(read).splitlines()
