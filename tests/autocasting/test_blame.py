"""What blame makes of its rows: their order, who is accused, and how they are shown."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.autocasting.tables import Casting
from preamp.blaming.blame import ALLOWED, ALLOWED_LOSS, ALLOWED_LOST, Blame, BlameRow, ranked
from preamp.blaming.tuning import Tuning

U = 2.0**-9
few = settings(deadline=None, max_examples=30)
ROW = BlameRow(
    index=0,
    module="layers.0.mlp",
    operator="linear",
    direction="forward",
    source="train.py:41",
    inputs="float32",
    runs="bfloat16",
    part="product",
    calls=1,
    local_error=1e-3,
    effect=1e-4,
    loss_effect=0.0,
    values=100,
    lost=0,
    lost_share=0.0,
    overflowed=0,
    amax=1.0,
    limit=65504.0,
)


def blame(*rows: BlameRow) -> Blame:
    return Blame(ranked(rows, U), "bfloat16", 1.01, 1.0, 1.009, 1.0)


rows = st.builds(
    replace,
    st.just(ROW),
    index=st.integers(0, 50),
    direction=st.sampled_from(["forward", "backward"]),
    part=st.sampled_from(["product", "sensitive", "other"]),
    effect=st.floats(0, 1),
    loss_effect=st.floats(-1, 1),
    lost_share=st.floats(0, 1),
    overflowed=st.sampled_from([0, 0, 3]),
    module=st.sampled_from(["-", "a", "encoder.layers.11.self_attention.output.dense", "b" * 70]),
    source=st.sampled_from(["-", "train.py:1", "a_very_long_name_of_a_file_of_models.py:1234"]),
    operator=st.sampled_from(["linear", "scaled_dot_product_attention"]),
)


@few
@given(st.lists(rows, max_size=20))
def test_rows_are_worst_first_and_overflows_in_the_order_in_which_they_happen(
    given_rows: list[BlameRow],
) -> None:
    found = blame(*given_rows)
    severities = [row.severity for row in found.rows]
    assert severities == sorted(severities, reverse=True)
    assert found.guilty == [row for row in found.rows if row.severity >= 1]
    overflows = [row for row in found.rows if row.overflowed]
    assert overflows == list(found.rows[: len(overflows)])
    assert all(row.guilty for row in overflows)
    for first, then in itertools.pairwise(overflows):
        if first.direction == then.direction == "forward":
            assert first.index <= then.index
        elif first.direction == then.direction:
            assert first.index >= then.index  # the backward pass begins at the last call
        else:
            assert first.direction == "forward"


@pytest.mark.parametrize(("part", "factor"), ALLOWED.items())
def test_a_row_is_accused_from_a_number_of_roundoffs_on(part: str, factor: float) -> None:
    row = replace(ROW, part=part)  # type: ignore[arg-type]
    assert blame(replace(row, effect=1.01 * factor * U)).guilty
    assert not blame(replace(row, effect=0.99 * factor * U)).guilty


def test_a_row_is_accused_for_what_it_does_to_the_loss_and_for_gradients_lost_to_zero() -> None:
    assert blame(replace(ROW, loss_effect=-1.01 * ALLOWED_LOSS * U)).guilty
    assert not blame(replace(ROW, loss_effect=-0.99 * ALLOWED_LOSS * U)).guilty
    lost = replace(ROW, direction="backward", lost=40, lost_share=1.01 * ALLOWED_LOST)
    assert blame(lost).guilty
    assert "of the gradient became zero" in lost.reason
    assert blame(replace(lost, lost_share=0.0)).guilty  # of the values, if not of the norm
    assert not blame(replace(lost, lost_share=0.0, part="other")).guilty
    assert not blame(replace(lost, lost=1, lost_share=0.0)).guilty
    assert not blame(replace(lost, direction="forward")).guilty  # ReLU does that


def test_what_lost_few_values_to_zero_comes_after_what_lost_many() -> None:
    few = replace(ROW, lost=1, lost_share=0.01, breaks="div")
    many = replace(ROW, index=1, lost=90, lost_share=0.9, breaks="div")
    assert [row.lost for row in blame(few, many).rows] == [90, 1]


@few
@given(st.lists(rows, min_size=1, max_size=30))
def test_the_table_is_80_columns_wide_and_every_row_says_where(given_rows: list[BlameRow]) -> None:
    text = str(blame(*given_rows))
    assert max(map(len, text.splitlines())) <= 80
    assert "bfloat16" in text


def test_the_summary_names_the_worst_row_or_nobody() -> None:
    healthy = blame(ROW)
    assert "No operator loses more than is expected in bfloat16." in str(healthy)
    assert "relative difference +1.0e-02, predicted +9.0e-03" in healthy.summary()
    found = blame(ROW, replace(ROW, operator="exp", effect=math.inf, overflowed=7))
    assert "exp in layers.0.mlp at train.py:41 loses most" in found.summary()
    assert "7 of 100 values overflowed" in found.summary()
    assert "overflow" in str(found).splitlines()[1]
    assert "No operator differed from float32." in str(blame())


def test_rows_fold_by_module_and_direction() -> None:
    others = replace(ROW, operator="gelu", effect=3e-4, index=4), replace(ROW, direction="backward")
    found = blame(ROW, *others, replace(ROW, module="head")).by_module()
    assert [(row.module, row.direction) for row in found.rows].count(("layers.0.mlp", "forward")) == 1
    assert len(found.rows) == 3
    folded = found.rows[0]
    assert folded.operator == "gelu +1"
    assert folded.calls == 2
    assert folded.index == 0
    assert folded.effect == pytest.approx(math.hypot(1e-4, 3e-4))
    assert found.gradient_error == pytest.approx(
        blame(ROW, *others, replace(ROW, module="head")).gradient_error
    )


@few
@given(st.lists(rows, min_size=1, max_size=3), st.lists(rows, min_size=1, max_size=3), st.floats(1e-3, 1.0))
def test_what_tune_says_is_too_large_is_so_in_the_numbers_beside_it(
    before: list[BlameRow], after: list[BlameRow], target: float
) -> None:
    found = Tuning(Casting(), [], blame(*before), blame(*after), 2, target)
    said = found.summary()
    errors = {
        "gradients": found.after.gradient_error,
        "loss": abs(math.fsum(row.loss_effect for row in found.after.rows)),
    }
    for name, error in errors.items():
        assert f" the {name}: " in said
        assert f"{error:.1e} after" in said
        if f"the error of the {name} below" in said:
            assert error > target
    assert found.solved == ("No rule is needed" in said)
    assert not found.solved or max(errors.values()) <= target


@few
@given(st.lists(rows, max_size=5))
def test_json_has_everything_and_no_number_that_json_has_not(given_rows: list[BlameRow]) -> None:
    found = blame(*given_rows)
    read = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert len(read["rows"]) == len(found.rows)
    assert read["dtype"] == "bfloat16"
    for row, values in zip(found.rows, read["rows"], strict=True):
        assert values["guilty"] == row.guilty
        assert values["operator"] == row.operator
        assert float(values["severity"]) == row.severity


@pytest.mark.parametrize(
    ("accused", "expected"),
    [
        ([ROW], True),
        ([ROW, replace(ROW, direction="backward")], True),
        ([ROW, replace(ROW, part="sensitive")], False),
        ([replace(ROW, overflowed=3)], False),
    ],
)
def test_where_only_products_are_accused_the_summary_says_what_amplifies_them(accused, expected):
    found = blame(*(replace(row, effect=1.0) for row in accused), replace(ROW, part="other"))
    assert ("Only products are accused" in found.summary()) is expected
