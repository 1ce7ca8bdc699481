"""The report: one file that needs nothing else and draws whatever a trace holds."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Step, Trace
from preamp.report import Curve, Strip, loss_figure, scale_figure, write_report, zeros_figure

numbers = st.one_of(st.none(), st.floats())
scales = st.floats(min_value=0.0, allow_nan=False)
traces = st.lists(
    st.builds(Step, st.integers(0, 99), scales, st.booleans(), st.booleans(), loss=numbers, zeros=numbers),
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


def test_of_very_many_skipped_steps_some_are_marked_and_the_title_says_so():
    few, many = ([Curve("a", Trace([Step(i, 8.0, False, True) for i in range(n)]))] for n in (200, 2000))
    assert "some of the skipped steps" not in scale_figure(few)
    assert "some of the skipped steps" in scale_figure(many)
    assert scale_figure(many).count("<use") < 300


@pytest.mark.parametrize("figure", [loss_figure, zeros_figure, scale_figure])
@settings(max_examples=12, deadline=None)
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
