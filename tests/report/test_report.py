"""The report: one file that needs nothing else and draws whatever a trace holds."""

import base64
import io
import re
import resource
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text

from preamp import ExponentHistogram, QuantizedRow, Snapshot, SnapshotRow, Step, Trace
from preamp.record.exponents import BANDS
from preamp.report import (
    Curve,
    Strip,
    figures,
    heat,
    heat_figure,
    loss_figure,
    scale_figure,
    write_report,
    zeros_figure,
)

numbers = st.one_of(st.none(), st.floats())
scales = st.floats(min_value=0.0, allow_nan=False)
traces = st.lists(
    st.builds(
        Step,
        st.integers(0, 99),
        scales,
        st.booleans(),
        st.booleans(),
        new_scale=st.none() | scales,
        loss=numbers,
        zeros=numbers,
    ),
    max_size=30,
).map(Trace)


class Tags(HTMLParser):
    """Collects what a page asks a browser to fetch, and checks that its elements nest."""

    VOID = frozenset({"meta", "img", "br", "path", "use"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attrs)
        self.fetched += [values[key] for key in ("src", "href") if values.get(key)]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def curves() -> list[Curve]:
    steps = [
        Step(i, 2.0 ** (16 + i // 10), i % 9 != 8, i % 9 == 8, loss=1 / (i + 1), zeros=0.5) for i in range(50)
    ]
    return [Curve("float16 + preamp", Trace(steps)), Curve("<b>", Trace(steps[:10]))]


def page(tmp_path, **changes) -> str:
    arguments = {
        "title": "A & B",
        "lead": ["x < y"],
        "curves": curves(),
        "table": [{"run": "<i>", "steps": "3"}],
    }
    write_report(tmp_path / "report.html", **{**arguments, **changes})
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_fetches_nothing(tmp_path):
    strip = Strip("redrawn", np.random.default_rng(0).random((10, 8, 8)).astype(np.float32))
    text = page(tmp_path, strips=[strip], strips_title="Digits", footer="end")
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert all(address.startswith(("data:image/png", "#")) for address in tags.fetched)
    assert re.search(r"url\((?!#)", text) is None
    assert text.count("<svg") == 3


def test_text_is_escaped(tmp_path):
    text = page(tmp_path)
    assert "A &amp; B" in text
    assert "x &lt; y" in text
    assert "<i>" not in text
    assert "<b>" not in text


def test_a_figure_without_numbers_is_left_out(tmp_path):
    bare = Trace([Step(0, 1.0, True, False), Step(1, 1.0, True, False)])
    assert "<svg" not in page(tmp_path, curves=[Curve("bare", bare)])
    assert "<svg" not in page(tmp_path, curves=[])


def test_every_skipped_step_is_marked():
    marked, unmarked = (Trace([Step(i, 8.0, not skip, skip) for i in range(9)]) for skip in (True, False))
    assert (
        scale_figure([Curve("a", marked)]).count("<use") - scale_figure([Curve("a", unmarked)]).count("<use")
        == 9
    )


def test_of_very_many_skipped_steps_those_that_are_close_share_a_mark_and_the_title_says_so():
    few, many = ([Curve("a", Trace([Step(i, 8.0, False, True) for i in range(n)]))] for n in (200, 2000))
    assert "one mark where they are close" not in scale_figure(few)
    assert "one mark where they are close" in scale_figure(many)
    assert scale_figure(many).count("<use") < 300


@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(0, 20_000), min_size=1), st.integers(0, 20_000))
def test_no_skipped_step_is_far_from_a_mark(alone, start):
    """However many others there are, so that a rare one in a quiet part is not left out."""
    skipped = alone | set(range(start, start + 400))
    trace = Trace(Step(i, 8.0, i not in skipped, i in skipped) for i in range(0, 20_001))
    skipped = {step.index for step in trace if step.skipped}
    marks = [index for index, _ in figures._marks(trace, figures.MOST_MARKS)]
    assert len(marks) <= figures.MOST_MARKS
    assert all(min(abs(mark - index) for mark in marks) <= 20_001 / 150 for index in skipped)
    assert skipped >= set(marks)


def test_a_spike_of_the_loss_is_drawn_beside_the_means():
    """One step in a million, which a mean of 2500 hardly shows."""
    spiky = Trace(Step(i, 1.0, True, False, loss=1.0 + i % 2 if i != 9999 else 50.0) for i in range(20_000))
    means = figures._averaged(spiky, "loss")
    assert len(means.values) <= figures.MOST_POINTS
    assert max(means.values) < 3.0
    assert sorted(set(means.highest)) == [2.0, 50.0]
    assert set(means.lowest) == {1.0}


def test_spikes_do_not_squeeze_the_means():
    wild = Curve(
        "wild", Trace(Step(i, 1.0, True, False, loss=1001.0 - 2000 * (i % 2)) for i in range(20_000))
    )
    mild = Curve("mild", Trace(Step(i, 1.0, True, False, loss=3.0 + i % 2) for i in range(20_000)))
    for curves in ([wild], [wild, mild], [mild, wild]):
        ticks = re.findall(r'id="ytick_\d+".*?<text[^>]*>([^<]*)</text>', loss_figure(curves), re.DOTALL)
        assert len(ticks) >= 3
        assert all(0.0 < float(tick) < 5.0 for tick in ticks)


def test_what_is_there_stays_until_the_new_report_is_whole(tmp_path):
    """A disk that filled up left an empty file in the place of a good one."""
    before = page(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"report\.html"):
            page(tmp_path, lead=["another one"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    assert "another one" in page(tmp_path, lead=["another one"])


@pytest.mark.slow
def test_a_million_steps_are_reported_within_200_mb(tmp_path):
    """Of the whole command: 530 MB before steps were kept in columns. `ru_maxrss` includes this process."""
    step = '{"index": %d, "scale": 1.0, "finite": true, "skipped": false, "new_scale": 1.0, "loss": 0.5}\n'
    with (tmp_path / "long.jsonl").open("w") as file:
        file.write('{"preamp_trace": 1}\n')
        file.writelines(step % index for index in range(1_000_000))
    code = (
        "import sys; from preamp.cli.app import run; assert run(sys.argv[1:]) == 0;"
        "print(*[int(line.split()[1]) // 1024 for line in open('/proc/self/status') if 'VmHWM' in line])"
    )
    command = [sys.executable, "-c", code, "report", "long.jsonl", "--out", "report.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 200
    assert (tmp_path / "report.html").stat().st_size < 300_000


@pytest.mark.filterwarnings("ignore:.*replace:UserWarning")  # indices are drawn in any order
@pytest.mark.parametrize("figure", [loss_figure, zeros_figure, scale_figure])
@settings(max_examples=6, deadline=None)
@given(trace=traces)
def test_any_trace_can_be_drawn(figure, trace):
    assert figure([Curve("any", trace)]).startswith("<svg")


def test_extreme_numbers_can_be_drawn():
    steps = [
        Step(0, 0.0, True, False, loss=1.7e308),
        Step(1, float("inf"), True, False, loss=-1.7e308, new_scale=1.0),
    ]
    for figure in (loss_figure, scale_figure):
        assert figure([Curve("extreme", Trace(steps))]).startswith("<svg")


@pytest.mark.parametrize(
    ("name", "shown"), [("_first", "\u2017first"), ("$2^", "$2^"), ("x" * 300, "x" * 39 + "…"), ("名", "名")]
)
def test_any_name_stands_in_the_legend(name, shown):
    assert shown in loss_figure([Curve(name, Trace([Step(0, 1.0, True, False, loss=1.0)]))])


def test_a_scale_that_stays_has_one_tick_for_each_power():
    svg = scale_figure([Curve("still", Trace([Step(i, 2.0**16, True, False) for i in range(9)]))])
    ticks = re.findall(r"\$2\^\{(-?\d+)\}\$", svg)
    assert len(ticks) == len(set(ticks))


def test_a_long_trace_makes_a_small_figure():
    steps = [Step(i, 2.0 ** (i % 20), i % 3 > 0, i % 3 == 0, loss=float(i)) for i in range(20_000)]
    assert len(loss_figure([Curve("long", Trace(steps))])) < 60_000
    assert len(scale_figure([Curve("long", Trace(steps))])) < 200_000


def snapshot(modules=3, scale=2.0**10, low_dtype="float16", zeros=5, nonfinite=0) -> Snapshot:
    """Return a snapshot whose modules have unscaled gradients from 2**-39 to 2**-19, later ones larger."""
    seen = [
        ExponentHistogram(n - 29, (40, *(0,) * 9, 10, *(0,) * 9, 45), zeros, nonfinite)
        for n in range(modules)
    ]
    rows = [
        SnapshotRow(f"body.{n}", what, "float32", h)
        for n, h in enumerate(seen)
        for what in ("gradient", "flow")
    ]
    activations = [
        SnapshotRow(f"body.{n}", "activation", "float32", ExponentHistogram(0, (9,))) for n in range(modules)
    ]
    return Snapshot(7, scale, low_dtype, (*activations, *reversed(rows)))


def bars(svg, what):
    """Return where the bars of a heat map begin and end, as exponents: of each place the two parts."""
    ticks = re.findall(r'<use xlink:href="#m\w+" x="([\d.]+)" y="[\d.]+" style="stroke', svg)
    exponents = [int(mark) for mark in re.findall(r"<!-- \$2\^\{(-?\d+)\}\$ -->", svg)]
    xs = sorted(map(float, dict.fromkeys(ticks)))[1:-1]
    step = (xs[-1] - xs[0]) / (exponents[-1] - exponents[0])
    found = {}
    for place, part, path in re.findall(rf'<g id="{what}-(\d)-([\w-]+)">\s*<path d="([^"]*)"', svg):
        across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)]
        found[int(place), part] = tuple(
            round((x - xs[0]) / step + exponents[0], 1) for x in (min(across), max(across))
        )
    return found


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**20])
def test_the_bars_stand_where_the_low_dtype_begins_and_ends(scale):
    seen = snapshot(scale=scale)
    seen = seen._replace(
        rows=tuple(r._replace(histogram=r.histogram.shifted(int(np.log2(scale)) - 10)) for r in seen.rows)
    )
    found = bars(heat_figure(seen, "flow"), "flow")
    for place, at in enumerate((scale, seen.best_scale())):
        span = heat.span_of(BANDS["float16"], at)
        assert found[place, "loses-digits"][0] == span.smallest == -25 - np.log2(at)
        assert found[place, "loses-digits"][1] == found[place, "kept"][0] == span.normal == -14 - np.log2(at)
        assert found[place, "kept"][1] <= span.end == 16 - np.log2(at)
    assert seen.best_scale() == 2.0**30


def test_cells_have_the_colour_of_what_becomes_of_their_values():
    svg = heat_figure(snapshot(zeros=300, nonfinite=300), "gradient")
    images = [
        imread(io.BytesIO(base64.b64decode(data)))
        for data in re.findall(r'xlink:href="data:image/png;base64,([^"]*)"', svg)
    ]
    zero, middle, infinite = (image[..., :3] for image in images)
    assert [image.shape[:2] for image in (zero, infinite)] == [(3, 1)] * 2
    for name, cells in (("zero", zero), ("overflows", infinite)):
        assert np.allclose(cells, to_rgb(heat.COLORS[name]), atol=0.01)
    first = next(n for n in range(middle.shape[1]) if middle[0, n].min() < 1)
    drawn = {n - first for n in range(middle.shape[1]) if middle[0, n].min() < 1}
    assert drawn == {0, 10, 20}
    strongest = [middle[0, first + n] for n in (0, 10, 20)]
    for cell, name in zip(strongest, ("zero", "loses digits", "kept"), strict=True):
        paint = 1 - np.array(to_rgb(heat.COLORS[name]))
        assert np.allclose((1 - cell) / (1 - cell).max(), paint / paint.max(), atol=0.03)


def test_the_numbers_of_a_heat_map_are_those_of_the_snapshot():
    seen = snapshot()
    rows = {row.name: seen.fit(row) for row in seen.rows if row.what == "flow"}
    table = heat.heat_table(seen, "flow")
    assert [row["module"] for row in table] == ["body.0", "body.1", "body.2"]
    assert table[0] == {
        "module": "body.0",
        "exactly zero": "5.0 %",
        "rounds to zero": "42 %",
        "loses digits": "11 %",
        "headroom": "24 powers",
    }
    assert heat.zero_share(rows["body.0"]) == pytest.approx(0.45)
    svg = heat_figure(seen, "flow")
    assert svg.count(">45 %</text>") == 3
    assert "45 % is zero or rounds to it" in svg


@pytest.mark.parametrize("what", ["flow", "gradient", "activation"])
def test_no_text_of_a_heat_map_is_cut_off(what, monkeypatch):
    few_zeros = ExponentHistogram(-9, (10**6,), zeros=1)  # "below 0.01 %" is the longest share
    seen = snapshot(low_dtype="float8_e4m3fn")
    seen = seen._replace(rows=tuple(row._replace(histogram=few_zeros) for row in seen.rows))
    drawn = []
    monkeypatch.setattr(heat, "to_svg", lambda figure, _: drawn.append(figure) or "<svg/>")
    heat_figure(seen, what)
    renderer = FigureCanvasAgg(drawn[0]).get_renderer()
    drawn[0].draw(renderer)
    texts = [text for text in drawn[0].findobj(Text) if text.get_text() and text.get_visible()]
    assert any("0.01" in text.get_text() for text in texts)
    for text in texts:
        box = text.get_window_extent(renderer)
        assert 0 <= box.x0 <= box.x1 <= drawn[0].bbox.width, text


def test_of_many_modules_the_worst_are_drawn_and_the_figure_says_so():
    seen = snapshot(modules=2 * heat.MOST_ROWS)
    svg = heat_figure(seen, "gradient")
    assert f"the worst {heat.MOST_ROWS} of {2 * heat.MOST_ROWS}" in svg
    names = [row["module"] for row in heat.heat_table(seen, "gradient")]
    assert names == [f"body.{n}" for n in range(2 * heat.MOST_ROWS) if f"body.{n}" in names]
    assert len(names) == heat.MOST_ROWS
    kept, all_rows = (
        set(names),
        {row.name: heat.zero_share(seen.fit(row)) for row in seen.rows if row.what == "gradient"},
    )
    assert min(all_rows[name] for name in kept) >= max(all_rows[name] for name in all_rows.keys() - kept)


def test_long_names_are_told_apart_by_what_they_do_not_share():
    seen = snapshot()
    rows = [
        row._replace(name=f"a.very.long.road.{row.name}.and_a_long_end_that_is_the_same") for row in seen.rows
    ]
    svg = heat_figure(seen._replace(rows=tuple(rows)), "flow")
    labels = re.findall(r">(….[^<]*)</text>", svg)
    assert len(set(labels)) == 3
    assert max(map(len, labels)) <= 22


def test_an_overflow_is_said_with_the_module_that_was_first():
    seen = snapshot(nonfinite=1)
    assert "step 7: inf or NaN, first in module body.2" in heat_figure(seen, "flow")


@pytest.mark.parametrize(
    ("low_dtype", "what"),
    [("float16", "flow"), ("bfloat16", "gradient"), ("float8_e4m3fn", "activation"), ("float32", "flow")],
)
def test_any_snapshot_can_be_drawn(low_dtype, what):
    for histogram in (
        ExponentHistogram(),
        ExponentHistogram(-1000, (1,)),
        ExponentHistogram(-90, (1, *(0,) * 150, 1), 3, 3),
    ):
        seen = Snapshot(0, 2.0**5, low_dtype, (SnapshotRow("$2^_", what, "float32", histogram),))
        svg = heat_figure(seen, what, "<name> $x")
        assert svg.startswith("<svg")
        assert "<name>" not in svg


def test_the_page_shows_all_parts_of_the_latest_snapshot(tmp_path):
    whole, trace = snapshot(), Trace([Step(0, 2.0**10, True, False)])
    for what in ("gradient", "activation", "flow"):
        trace.add_snapshot(whole._replace(rows=tuple(row for row in whole.rows if row.what == what)))
    text = page(tmp_path, curves=[Curve("seen", trace)])
    for kind in ("flow", "gradient", "activation"):
        for row in heat.heat_table(whole, kind):
            assert f'<td data-label="rounds to zero">{row["rounds to zero"]}</td>' in text
    assert text.count('<td data-label="module">body.2</td>') == 3


def test_the_page_shows_what_a_lens_has_seen_with_its_numbers(tmp_path):
    trace = Trace([Step(0, 2.0**10, True, False)])
    trace.add_snapshot(snapshot(modules=1))
    trace.add_snapshot(snapshot())
    text = page(tmp_path, curves=[Curve("seen", trace), Curve("not seen", Trace())])
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert all(address.startswith(("data:image/png", "#")) for address in tags.fetched)
    assert text.count("<svg") == 4
    assert "<b>seen.</b> At 2¹⁰, 5.0 % of the gradient entries are exactly zero" in text
    for kind in ("flow", "gradient", "activation"):
        for row in heat.heat_table(trace.snapshots[-1], kind):
            assert f'<td data-label="rounds to zero">{row["rounds to zero"]}</td>' in text
    assert text.count('<td data-label="module">body.2</td>') == 3


def test_the_page_has_the_worst_operands_of_a_recipe(tmp_path):
    rows = [QuantizedRow(f"<{n}>", "dgrad", "weight", "e2m1", 64, 0.25, 0.5, 40.0 - n) for n in range(20)]
    trace = Trace()
    trace.add_snapshot(snapshot()._replace(quantized=(*rows, rows[0]._replace(name="", sqnr=float("nan")))))
    text = page(tmp_path, curves=[Curve("seen", trace)])
    assert re.findall(r'"SQNR">(.*?)<', text) == ["nan dB", *(f"{21 + n}.0 dB" for n in range(7))]
    assert "the worst 8 of 21 operands" in text
    assert '<td data-label="module">&lt;19&gt;</td><td data-label="product">dgrad</td>' in text
    trace.add_snapshot(snapshot())
    assert "operands" not in page(tmp_path, curves=[Curve("seen", trace)])
