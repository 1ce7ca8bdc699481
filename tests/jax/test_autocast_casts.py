"""What `casts` counts and says, and how it is printed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from preamp import CastingError, casting
from preamp.autocasting.report import CastReport
from preamp.jax import autocast, casts

from .agreement import every_fifth
from .programs import PROGRAMS, Program
from .trainings import enable_x64

F32 = 4
PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general"}
x, w = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)


def rows_of(report: CastReport, operator: str) -> list:
    return [row for row in report.rows if row.operator == operator]


def row_of(report: CastReport, operator: str):
    (row,) = rows_of(report, operator)
    return row


@jax.custom_vjp
def product_with_rule(x, w):
    return x @ w


product_with_rule.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def layer(params, x):
    with jax.named_scope("layer"):
        return jnp.tanh(x @ params["w"] + params["b"])


def test_rows_tell_primitive_scope_line_rule_dtypes_bytes_and_work():
    params = {"w": w, "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
    report = casts(layer, params, x)
    product, bias, tanh = (row_of(report, name) for name in ("dot_general", "add", "tanh"))
    line = layer.__code__.co_firstlineno + 2
    assert {row.source for row in report.rows} == {f"test_autocast_casts.py:{line}"}
    assert {row.module for row in report.rows} == {"layer"}
    assert (product.rule, product.inputs, product.runs, product.calls) == ("lower", "float32", "bfloat16", 1)
    assert product.bytes_cast == (4 * 8 + 8 * 8) * F32
    assert product.bytes_moved == (4 * 8 + 8 * 8 + 4 * 8) * 2
    assert product.flops == 2 * 4 * 8 * 8
    assert (bias.inputs, bias.runs, bias.bytes_cast) == ("float32, bfloat16", "bfloat16", 8 * F32)
    assert (tanh.rule, tanh.inputs, tanh.runs, tanh.bytes_cast) == ("widest", "bfloat16", "bfloat16", 0)
    assert report.rows[0] == product
    assert report.bytes_cast == sum(row.bytes_cast for row in report.rows)


def test_nothing_is_computed():
    def fails(x):
        return jax.pure_callback(lambda x: 1 / 0, x, x @ x.T @ x)

    report = casts(fails, x)
    assert sum(row.calls for row in rows_of(report, "dot_general")) == 2


def test_convolutions_and_ragged_products_have_their_work_counted():
    image, kernel = np.ones((2, 6, 6, 4), np.float32), np.ones((3, 3, 2, 8), np.float32)

    def convolve(image, kernel):
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=names, feature_group_count=2
        )

    assert row_of(casts(convolve, image, kernel), "conv_general_dilated").flops == 2 * (2 * 36 * 8) * (9 * 2)
    ragged = casts(jax.lax.ragged_dot, x, jax.ShapeDtypeStruct((3, 8, 5), jnp.float32), np.array([1, 1, 2]))
    assert row_of(ragged, "ragged_dot_general").flops == 2 * 4 * 8 * 5


def test_loops_count_as_often_as_they_run_and_say_so_when_that_is_not_known():
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=7)[0]

    def repeated(x, w):
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: jnp.sin(x @ w), x)

    def chosen(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w @ w, x)

    report = casts(scanned, x, w)
    product = row_of(report, "dot_general")
    assert (product.calls, product.flops) == (7, 7 * 2 * 4 * 8 * 8)
    assert product.bytes_cast == (7 * 4 * 8 + 8 * 8) * F32  # what is carried each time, the weight once
    assert not [text for text in report.warnings if "counted once" in text]
    report = casts(repeated, x, w)
    assert row_of(report, "dot_general").calls == 1
    assert row_of(report, "gt").calls == 1
    assert any(text.startswith("The loop at test_autocast_casts.py:") for text in report.warnings)
    report = casts(chosen, x, w)
    assert sum(row.calls for row in rows_of(report, "dot_general")) == 3
    assert any(text.startswith("Each branch at test_autocast_casts.py:") for text in report.warnings)


def test_a_loop_that_never_runs_counts_nothing():
    report = casts(lambda x, w: jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=0)[0], x, w)
    assert report.calls == 0
    assert row_of(report, "dot_general").bytes_cast == 8 * 8 * F32  # before the loop


def test_a_cast_that_no_operator_takes_has_a_row_of_its_own():
    def carried(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]

    row = row_of(casts(carried, x, w), "convert_element_type")
    assert (row.inputs, row.runs, row.calls) == ("bfloat16", "float32", 3)
    assert row.bytes_cast == 3 * 4 * 8 * 2


def test_a_cast_that_a_loop_repeats_is_reported_by_the_name_of_what_is_cast():
    def scanned(params, x):
        return jax.lax.scan(
            lambda x, _: (x * params["scale"].astype(jnp.bfloat16), None),
            x.astype(jnp.bfloat16),
            None,
            length=5,
        )[0]

    (warning,) = casts(scanned, {"scale": jax.ShapeDtypeStruct((8,), jnp.float32)}, x).warnings
    assert warning.startswith("params['scale'] is cast 5 times (32 B each) at test_autocast_casts.py:")
    assert warning.endswith("cast it before the loop.")


def test_a_cast_that_programs_repeat_is_reported():
    report = casts(lambda x, w: product_with_rule(product_with_rule(x, w), w), x, w=w)
    assert any(text.startswith("w is cast 2 times (256 B each) at test_auto") for text in report.warnings)


def test_sums_in_low_precision_are_reported():
    table = casting.DEFAULT.lower("sum")
    for dtype in ("float16", "bfloat16"):
        report = casts(lambda x: jnp.sum(x), x, dtype=dtype, casting=table)
        (warning,) = report.warnings
        assert warning.startswith("reduce_sum at ")
        assert f"adds up in {dtype}" in warning
        assert "float32('reduce_sum')" in warning
    assert not any("adds up" in text for text in casts(jnp.sum, x).warnings)


def test_a_value_that_goes_up_and_straight_down_again_is_reported():
    def carried(x, w):
        x = jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ w, x)
        return x @ w

    report = casts(carried, x, w)
    assert any("from bfloat16 to float32 and straight back" in text for text in report.warnings)


def test_what_stayed_in_float32_is_reported_costliest_first():
    def use(x, w):
        return jnp.exp(x) @ w

    table = casting.DEFAULT.float32("matmul")
    first, second = casts(use, x, w, casting=table).warnings
    assert first.startswith("dot_general at test_autocast_casts.py:")
    assert first.endswith("stayed in float32 (512 FLOP, 512 B): the table says so.")
    assert second.startswith("exp at ")


def test_regions_inside_are_told_apart():
    def mixed(x, w):
        x = autocast(lambda x: x @ w, enabled=False)(x)
        return autocast(lambda x: x @ w, "float16")(x) @ w

    rows = rows_of(casts(mixed, x, w), "dot_general")
    assert {(row.rule, row.runs) for row in rows} == {
        ("off", "float32"),
        ("lower", "float16"),
        ("lower", "bfloat16"),
    }


def test_arguments_are_named_as_the_function_names_them():
    def scanned(one, *rest, last):
        def turn(total, _):
            return total + sum(each.astype(jnp.bfloat16) for each in (one, *rest, last["deep"])), None

        return jax.lax.scan(turn, jnp.zeros((8,), jnp.bfloat16), None, length=2)[0]

    one = jax.ShapeDtypeStruct((8,), jnp.float32)
    report = casts(scanned, one, one, one, last={"deep": one})
    names = [text.split(" is cast")[0] for text in report.warnings if "cast 2 times" in text]
    assert sorted(names) == ["args[1]", "args[2]", "last['deep']", "one"]


def test_a_table_with_a_name_that_is_none_is_refused():
    with pytest.raises(CastingError, match="dot_general"):
        casts(lambda x: x @ x.T, x, casting=casting.DEFAULT.float32("dot_genral"))
    with pytest.raises(CastingError, match="'exp' is refused"):
        casts(jnp.exp, x, casting=casting.DEFAULT.refuse("exp"))


def test_the_text_fits_80_columns_whatever_the_names():
    def deep(x, w):
        for depth in range(30):
            with jax.named_scope("/".join(["a_module_with_a_long_name"] * (depth % 5))):
                x = jnp.tanh(x @ w * depth)
        return jax.lax.conv_general_dilated(x[None], x[None, :3, :3] @ w[:3, :3], (1,), "SAME")

    report = casts(lambda x: x @ x.T, x)
    lines = str(report).splitlines()
    assert lines[0].split() == ["operator", "module", "source", "calls", "dtypes", "cast"]
    assert lines[1].split()[:2] == ["dot_general", "-"]
    text = str(casts(deep, jnp.ones((3, 8)), jnp.ones((8, 8))))
    assert max(map(len, text.splitlines())) <= 80
    assert "_casts.py:" in text


def test_no_operator_is_said_so():
    assert str(casts(lambda: None)) == "No operator ran."


@pytest.mark.parametrize("name", every_fifth(list(PROGRAMS)))
def test_every_program_of_the_matrix_is_counted(name):
    program = PROGRAMS[name]
    with enable_x64(program.x64):
        real, rehearsed = (counted_anew(program, emulate) for emulate in (False, True))
    low = any(row.runs == "bfloat16" for row in real.rows if row.operator in PRODUCTS)
    assert low == bool(program.products) or program.kept
    assert str(real) == str(rehearsed)
    assert max(map(len, str(real).splitlines())) <= 80
    assert all(":" in row.source for row in real.rows)


MODULES = [name for name in PROGRAMS if name.startswith(("equinox", "linen"))]


@pytest.mark.parametrize("name", MODULES)
def test_products_have_the_line_of_whoever_called_the_module(name):
    products = [row for row in counted_anew(PROGRAMS[name]).rows if row.operator in PRODUCTS]
    assert {row.source.partition(":")[0] for row in products} == {"library_programs.py"}


def counted_anew(program: Program, emulate: bool = False) -> CastReport:
    """Count a program with new arguments: some can be used once only."""
    new = replace(program)
    return casts(new.under(lambda f: f), *new.arguments, **(new.options or {}), emulate=emulate)
