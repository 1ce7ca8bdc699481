"""Recipes as values: what is refused, what is derived, and that the constants are those of their owners."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preamp import recipes
from preamp.errors import CastingError
from preamp.recipes import Quant, Recipe
from preamp.recipes.values import CONSTANTS, FORMATS, KNOWN, SCALES, named


@pytest.mark.parametrize(
    ("settings", "value", "remedy"),
    [
        ({"format": "e4m4"}, "format='e4m4'", "Write one of 'e4m3', 'e5m2', 'e2m1', 'e3m2', 'e2m3'"),
        (
            {"owner": "nvidia"},
            "owner='nvidia'",
            "Write one of 'transformer_engine', 'torchao', 'deepgemm', 'qwix'",
        ),
        ({"algorithm": "mean"}, "algorithm='mean'", "Write one of 'max', 'most_recent'"),
        ({"scale": "e5m2"}, "scale='e5m2' with exponent=''", "scale='float32', exponent='down'"),
        ({"exponent": "floor"}, "scale='float32' with exponent='floor'", "scale='e8m0', exponent='up'"),
        ({"scale": "e8m0"}, "scale='e8m0' with exponent=''", "scale='e8m0', exponent='up'"),
        ({"owner": "deepgemm", "scale": "e4m3"}, "scale='e4m3'", "scale='float32', exponent=''"),
        ({"block": 32}, "block=32", r"Write block=(1, 32)"),
        ({"block": (1, 32, 1)}, "block=(1, 32, 1)", r"Write block=(1, 32)"),
        ({"block": (1, -32)}, "block=(1, -32)", r"Write block=(1, 32)"),
        ({"block": (1, 32.0)}, "block=(1, 32.0)", r"Write block=(1, 32)"),
        ({"block": (True, 32)}, "block=(True, 32)", r"Write block=(1, 32)"),
        ({"history": 16, "block": (1, 128)}, "history=16", r"block=(1, 128). Write block=(0, 0)"),
        ({"history": -1}, "history=-1", "Write history=1024, or 0"),
    ],
)
def test_a_quant_that_does_not_exist_is_refused(settings: Any, value: str, remedy: str) -> None:
    with pytest.raises(CastingError) as error:
        Quant(**settings)
    assert value in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize("owner", SCALES)
def test_the_scales_that_an_error_lists_exist(owner: Any) -> None:
    with pytest.raises(CastingError) as error:
        Quant(scale="e8m0", exponent="down", owner=owner)
    listed = re.findall(r"scale='(\w*)', exponent='(\w*)'", str(error.value))
    assert set(listed) == SCALES[owner]
    for scale, exponent in listed:
        Quant(scale=scale, exponent=exponent, owner=owner)  # type: ignore[arg-type]


QUANTS = st.builds(
    Quant,
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from([(0, 0), (1, 0), (1, 32), (16, 16), (128, 128), (0, 128)]),
    stochastic=st.booleans(),
    hadamard=st.booleans(),
)
PAIRS = st.none() | st.tuples(QUANTS, QUANTS)


@given(PAIRS, PAIRS, PAIRS)
def test_a_recipe_says_which_arrays_are_quantized_once(fprop: Any, dgrad: Any, wgrad: Any) -> None:
    recipe = Recipe(fprop, dgrad, wgrad)
    x, w, g, w_of_dgrad, g_of_wgrad, x_of_wgrad = recipe.quants
    assert (x, w) == (fprop or (None, None))
    assert (g, w_of_dgrad) == (dgrad or (None, None))
    assert (g_of_wgrad, x_of_wgrad) == (wgrad or (None, None))
    for once, one, other in zip(recipe.once, (x, w, g), (x_of_wgrad, w_of_dgrad, g_of_wgrad), strict=True):
        if one is None or other is None:
            assert once == (one == other)
            continue
        is_square = one.block[0] == one.block[1]
        assert once == (one == other and is_square and not one.stochastic and not one.hadamard)
    assert not recipe.delayed
    assert KNOWN[recipe.key] == recipe


@pytest.mark.parametrize("place", range(6))
def test_one_operand_with_a_history_makes_a_recipe_delayed(place: int) -> None:
    quants = [Quant(history=4) if each == place else Quant() for each in range(6)]
    recipe = Recipe((quants[0], quants[1]), (quants[2], quants[3]), (quants[4], quants[5]))
    assert recipe.delayed
    assert recipe.once == (place not in (0, 5), place not in (1, 3), place not in (2, 4))


def test_a_recipe_is_its_products_and_what_stays_high() -> None:
    same = Recipe(recipes.MXFP8.fprop, recipes.MXFP8.dgrad, recipes.MXFP8.wgrad, multiple=32)
    assert same == recipes.MXFP8
    assert hash(same) == hash(recipes.MXFP8)
    assert same.key == recipes.MXFP8.key
    assert eval(same.key, vars(recipes).copy()) == same
    others = [replace(same, multiple=16), replace(same, high="float16"), replace(same, wgrad=None)]
    assert len({same, *others}) == 4


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("high", [(), ("wgrad",), ("dgrad", "wgrad")])
def test_a_recipe_is_found_by_its_name(name: str, high: tuple[Any, ...]) -> None:
    recipe = CONSTANTS[name].without(*high)
    assert named(recipe.name.lower().replace("_", "-")) == recipe
    assert recipe.name == name or high
    assert recipe.key == recipe.name
    assert not replace(recipe, multiple=recipe.multiple + 1).name


@pytest.mark.parametrize("name", ["MXFP9", "MXFP8 without backward", "", "without wgrad"])
def test_a_name_that_no_recipe_has_is_refused(name: str) -> None:
    with pytest.raises(CastingError, match=r"is not a recipe\. Write one of FLOAT8_DELAYED"):
        named(name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fprop": Quant()}, r"fprop=Quant.*Write fprop=\(Quant\(\), Quant\(\)\)"),
        ({"wgrad": (Quant(), None)}, "or wgrad=None to keep it high"),
        ({"high": "float32"}, "high='float32' is not a dtype of recipes. Write high='bfloat16'"),
        ({"multiple": 0}, "multiple=0 is not a positive integer. Write multiple=16"),
    ],
)
def test_what_is_no_recipe_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CastingError, match=said):
        Recipe(**settings)


HYBRID, E4M3, E2M1 = "e4m3 e5m2", "e4m3 e4m3", "e2m1 e2m1"
TENSOR, ROW = (0, 0), (1, 0)
TABLE: dict[str, tuple[str, str, Any, Any, Any, int]] = {
    # The owner, the formats of x and w and of g, the blocks of fprop, dgrad and wgrad, and the multiple.
    "FLOAT8_DELAYED": ("transformer_engine", HYBRID, (TENSOR,) * 2, (TENSOR,) * 2, (TENSOR,) * 2, 16),
    "FLOAT8_CURRENT": ("transformer_engine", HYBRID, (TENSOR,) * 2, (TENSOR,) * 2, (TENSOR,) * 2, 16),
    "FLOAT8_TENSORWISE": ("torchao", HYBRID, (TENSOR,) * 2, (TENSOR,) * 2, (TENSOR,) * 2, 16),
    "FLOAT8_BLOCK": (
        "transformer_engine",
        E4M3,
        ((1, 128), (128, 128)),
        ((1, 128), (128, 128)),
        ((1, 128), (1, 128)),
        128,
    ),
    "FLOAT8_DEEPSEEK": (
        "deepgemm",
        E4M3,
        ((1, 128), (128, 128)),
        ((1, 128), (128, 128)),
        ((1, 128), (1, 128)),
        128,
    ),
    "MXFP8": ("transformer_engine", E4M3, ((1, 32),) * 2, ((1, 32),) * 2, ((1, 32),) * 2, 32),
    "MXFP8_E5M2_GRADIENTS": (
        "transformer_engine",
        HYBRID,
        ((1, 32),) * 2,
        ((1, 32),) * 2,
        ((1, 32),) * 2,
        32,
    ),
    "NVFP4": ("transformer_engine", E2M1, ((1, 16), (16, 16)), ((1, 16), (16, 16)), ((1, 16),) * 2, 16),
    "NVFP4_PLAIN": ("transformer_engine", E2M1, ((1, 16), (16, 16)), ((1, 16), (16, 16)), ((1, 16),) * 2, 16),
    "NVFP4_TORCHAO": ("torchao", E2M1, ((1, 16), (16, 16)), ((1, 16), (16, 16)), ((1, 16),) * 2, 128),
    "MXFP8_QWIX": ("qwix", E4M3, ((1, 32),) * 2, ((1, 32),) * 2, ((1, 32),) * 2, 32),
    "FLOAT8_ROWWISE": ("torchao", E4M3, (ROW,) * 2, (ROW,) * 2, (ROW,) * 2, 16),
    "FLOAT8_ROWWISE_GW_HP": ("torchao", E4M3, (ROW,) * 2, (ROW, TENSOR), (None,) * 2, 16),
}
SCALED = {
    "FLOAT8_DELAYED": ("float32", ""),
    "FLOAT8_CURRENT": ("float32", ""),
    "FLOAT8_TENSORWISE": ("float32", ""),
    "FLOAT8_DEEPSEEK": ("float32", ""),
    "FLOAT8_BLOCK": ("float32", "down"),
    "FLOAT8_ROWWISE": ("float32", "down"),
    "FLOAT8_ROWWISE_GW_HP": ("float32", "down"),
    "MXFP8": ("e8m0", "up"),
    "MXFP8_E5M2_GRADIENTS": ("e8m0", "up"),
    "NVFP4": ("e4m3", ""),
    "NVFP4_PLAIN": ("e4m3", ""),
    "NVFP4_TORCHAO": ("e4m3", ""),
    "MXFP8_QWIX": ("e8m0", "up"),
}


def test_the_tables_have_each_constant() -> None:
    assert CONSTANTS.keys() == TABLE.keys() == SCALED.keys()
    assert {name: value for name, value in vars(recipes).items() if isinstance(value, Recipe)} == CONSTANTS
    assert set(recipes.__all__) == {*CONSTANTS, "Quant", "Recipe"}


@pytest.mark.parametrize("name", TABLE)
def test_a_constant_is_that_of_its_owner(name: str) -> None:
    recipe = CONSTANTS[name]
    owner, formats, *blocks, multiple = TABLE[name]
    forward, backward = formats.split()
    assert recipe.multiple == multiple
    assert recipe.high == "bfloat16"
    found = [quant and quant.block for quant in recipe.quants]
    assert found == [block for pair in blocks for block in pair]
    expected = [forward, forward, backward, forward, backward, forward]
    for quant, form in zip(recipe.quants, expected, strict=True):
        if quant is not None:
            assert (quant.owner, quant.format) == (owner, form)
            assert (quant.scale, quant.exponent) == SCALED[name]
            assert (quant.history, quant.algorithm, quant.margin) == (
                1024 if name == "FLOAT8_DELAYED" else 0,
                "max",
                0,
            )


@pytest.mark.parametrize("name", TABLE)
def test_only_nvfp4_rounds_at_random_and_rotates(name: str) -> None:
    # x and w of fprop, g and w of dgrad, g and x of wgrad: gradients are rounded at random, and both operands
    # of wgrad are rotated.
    quants = CONSTANTS[name].quants
    stochastic = [bool(quant and quant.stochastic) for quant in quants]
    rotated = [bool(quant and quant.hadamard) for quant in quants]
    does = name in ("NVFP4", "NVFP4_TORCHAO")
    assert stochastic == [does and place in (2, 4) for place in range(6)]
    assert rotated == [does and place in (4, 5) for place in range(6)]


@pytest.mark.parametrize("name", TABLE)
def test_scales_of_tensors_and_squares_serve_both_products(name: str) -> None:
    x, w, g = CONSTANTS[name].once
    owner_does = {
        "FLOAT8_DELAYED": (True, True, True),
        "FLOAT8_CURRENT": (True, True, True),
        "FLOAT8_TENSORWISE": (True, True, True),
        "FLOAT8_BLOCK": (False, True, False),
        "FLOAT8_DEEPSEEK": (False, True, False),
        "NVFP4": (False, True, False),
        "NVFP4_PLAIN": (False, True, False),
        "NVFP4_TORCHAO": (False, True, False),
    }
    assert (x, w, g) == owner_does.get(name, (False, False, False))
