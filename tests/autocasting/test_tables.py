"""Tables as such: edits of operators and modules, what holds in a module, and dictionaries of them."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import translate
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preamp import casting
from preamp.autocasting.tables import MODULE_RULES, RULES, Casting
from preamp.errors import CastingError

EDIT = casting.DEFAULT
few = settings(deadline=None, max_examples=40)
BASES = st.sampled_from([casting.DEFAULT, casting.CPU, casting.CUDA, casting.JAX])
NAMES = st.sampled_from(["a", "b", "layers", "0", "1", "lm_head"])
PARTS = st.one_of(NAMES, st.sampled_from(["*", "**", "?", "[01]", "l*"]))
PATHS = st.lists(NAMES, max_size=5).map(".".join)
PATTERNS = st.lists(PARTS, min_size=1, max_size=3).map(".".join)
OPERATORS = st.sampled_from(["mm", "softmax", "exp", "dot_general"])
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("operators"), OPERATORS, st.sampled_from(RULES)),
        st.tuples(st.just("modules"), PATTERNS, st.sampled_from(MODULE_RULES)),
    ),
    max_size=6,
)


def edited(table: Casting, edits: list[Any]) -> Casting:
    for of, name, rule in edits:
        table = table.module(name, rule) if of == "modules" else getattr(table, rule)(name)
    return table


def names(path: str, pattern: str) -> bool:
    """Say in another way than the table whether a pattern names a module or one that it is in."""
    parts = [
        "(?:[^.]+[.])*" if part == "**" else f"(?={translate(part)[:-2]}[.])[^.]+[.]"
        for part in pattern.split(".")
    ]
    return re.search("[.]" + "".join(parts), f".{path}." if path else ".") is not None


def rule_of(operator: str, path: str, base: Casting, edits: list[Any]) -> tuple[str | None, str | None]:
    """Return the rule of an operator in a module, and the module's, by going through all edits in order."""
    matching = [place for place, (of, name, _) in enumerate(edits) if of == "modules" and names(path, name)]
    rule, module = base.rules.get(operator), None
    for place, (of, name, new) in enumerate(edits):
        if of == "operators" and name == operator:
            rule = new
        if matching and place == matching[-1]:
            module = new
            rule = new if new in ("float32", "untouched") else rule
    return rule, module


@few
@given(BASES, EDITS, OPERATORS, PATHS)
@example(
    EDIT,
    [("modules", "a", "float32"), ("modules", "a.b", "default"), ("modules", "a", "untouched")],
    "mm",
    "a.b",
)
@example(EDIT, [("modules", "**", "float32")], "mm", "")
@example(EDIT, [("modules", "*", "float32")], "mm", "")
def test_later_edits_count(base: Casting, edits: list[Any], operator: str, path: str) -> None:
    expected, module = rule_of(operator, path, base, edits)
    table = edited(base, edits)
    scope = table.scope(path)
    if scope is None:
        assert (table.rules.get(operator), None) == (expected, module)
        return
    rule = scope.before.rules.get(operator)
    rule = scope.rule if scope.rule in ("float32", "untouched") else rule
    assert (scope.after.rules.get(operator, rule), scope.rule) == (expected, module)
    assert not scope.before.modules
    assert not scope.after.modules


@few
@given(BASES, EDITS)
@example(EDIT, [("operators", "mm", "lower"), ("modules", "a", "float32"), ("operators", "exp", "lower")])
def test_a_table_comes_back_from_a_file(base: Casting, edits: list[Any]) -> None:
    table = edited(base, edits)
    values = table.to_dict()
    for read in (json.loads(json.dumps(values)), yaml.safe_load(yaml.safe_dump(values))):
        again = Casting.from_dict(read)
        assert (again, hash(again), repr(again)) == (table, hash(table), repr(table))
        assert (again.optional, again.rules, again.modules) == (table.optional, table.rules, table.modules)
        assert again.to_dict() == values
    assert eval(repr(table), {"casting": casting}) == table


def test_a_table_is_written_as_people_write_it() -> None:
    text = """
    table: CPU
    edits:
      - modules: lm_head
        rule: float32
      - modules: [layers.*.mlp, "layers.?.attention"]
        rule: float16
      - {operators: softmax, rule: lower}
    """
    table = casting.CPU.module("lm_head", "float32").module("layers.*.mlp", "float16")
    table = table.module("layers.?.attention", "float16").lower("softmax")
    assert Casting.from_dict(yaml.safe_load(text)) == table
    toml = 'edits = [{modules = ["lm_head"], rule = "float32"}]'
    assert Casting.from_dict(tomllib.loads(toml)) == EDIT.module("lm_head", "float32")
    assert Casting.from_dict({}) == EDIT


def test_edits_leave_the_table_as_it_was() -> None:
    table = EDIT.module("a", "float32")
    table.module("a", "untouched").lower("mm")
    table.modules["a"] = "untouched"
    assert table == EDIT.module("a", "float32")
    assert table.scope("a") == (EDIT, "float32", EDIT)


def test_the_same_edit_again_takes_the_later_place() -> None:
    table = EDIT.module("a", "float32").module("a.b", "untouched").module("a", "bfloat16")
    assert table.modules == {"a.b": "untouched", "a": "bfloat16"}
    scope = table.scope("a.b")
    assert scope is not None
    assert scope.rule == "bfloat16"


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("lm_head", ["lm_head", "model.lm_head", "lm_head.linear"], ["", "lm_head2", "head"]),
        (
            "layers.*.mlp",
            ["layers.0.mlp", "net.layers.1.mlp.up"],
            ["layers.mlp", "layers.0.1.mlp", "layers.0"],
        ),
        ("layers.**.up", ["layers.up", "layers.0.mlp.up.x"], ["layers", "up"]),
        ("layers_?.mlp", ["layers_0.mlp"], ["layers_10.mlp"]),
        ("*", ["a", "a.b"], [""]),
        ("**", ["a", ""], []),
        ("embed.attend", ["Net.embed.attend"], ["Net.embed"]),
    ],
)
def test_what_a_pattern_names(pattern: str, inside: list[str], outside: list[str]) -> None:
    table = EDIT.module(pattern, "float32")
    assert [path for path in inside + outside if table.scope(path)] == inside


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "is not a table"),
        ({"edit": []}, "'edit' is not part of a table. Write edits or table"),
        ({"table": "GPU"}, "'GPU' is not a table. Write table: DEFAULT or CPU or CUDA or JAX"),
        ({"table": ["CPU"]}, "is not a table"),
        ({"edits": {"operators": "mm", "rule": "lower"}}, "is not a list. Write edits:"),
        ({"edits": None}, "is not a list"),
        ({"edits": ["mm"]}, "'mm' is not an edit"),
        ({"edits": [{"operators": "mm"}]}, "has to name operators or modules, and a rule"),
        ({"edits": [{"rule": "lower"}]}, "has to name operators or modules, and a rule"),
        (
            {"edits": [{"operators": "mm", "modules": "a", "rule": "lower"}]},
            "has to name operators or modules",
        ),
        ({"edits": [{"operator": "mm", "rule": "lower"}]}, "'operator' is not part of an edit"),
        ({"edits": [{"operators": 3, "rule": "lower"}]}, "operators: 3 is not a list of names"),
        ({"edits": [{"operators": [3], "rule": "lower"}]}, "3 is not the name of an operator"),
        (
            {"edits": [{"operators": "mm", "rule": "low"}]},
            "'low' is not a rule, for 'mm'. Write one of 'lower'",
        ),
        (
            {"edits": [{"modules": "a", "rule": "lower"}]},
            "'lower' is not a rule, for 'a'. Write one of 'float32'",
        ),
        ({"edits": [{"modules": [], "rule": "fp32"}]}, "'fp32' is not a rule"),
        ({"edits": [{"modules": [], "rule": "float32"}]}, "edits[0]: modules: [] names nothing"),
        ({"edits": [{"operators": [], "rule": "float32"}]}, "edits[0]: operators: [] names nothing"),
        ({"edits": [{"modules": "a..b", "rule": "float32"}]}, "'a..b' is not a pattern of module paths"),
        ({"edits": [{"modules": "a", "rule": ["float32"]}]}, "is not a rule"),
    ],
)
def test_a_dictionary_that_is_no_table_says_what_to_write(values: Any, said: str) -> None:
    with pytest.raises(CastingError, match=re.escape(said)) as error:
        Casting.from_dict(values)
    assert "Write " in str(error.value)


@pytest.mark.parametrize("values", [[], {"edits": "mm"}])
def test_the_example_of_a_table_is_one(values: Any) -> None:
    with pytest.raises(CastingError, match=r"is not a (table|list)") as error:
        Casting.from_dict(values)
    example = str(error.value).partition("Write ")[2].removesuffix(".")
    assert len(Casting.from_dict(yaml.safe_load(example)).edits) == 2


def test_a_module_in_place_of_a_pattern_is_not_printed() -> None:
    class Linear:
        def __repr__(self) -> str:
            return "long" * 1000

    with pytest.raises(CastingError, match=r"^An object of class Linear is not a pattern"):
        EDIT.module(Linear(), "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["", ".a", "a.", "a..b", None, 3])
def test_a_pattern_has_names(pattern: Any) -> None:
    with pytest.raises(CastingError, match=r"is not a pattern.*'lm_head'"):
        EDIT.module(pattern, "float32")


@pytest.mark.parametrize("rule", ["lower", "float64", None, "half"])
def test_a_module_has_a_rule(rule: Any) -> None:
    with pytest.raises(CastingError, match=r"is not a rule, for 'a'.*'untouched'"):
        EDIT.module("a", rule)


def test_names_in_a_list_are_refused_with_the_call_to_write() -> None:
    for rule in RULES:
        edit = getattr(EDIT, rule)
        for given_, write in (
            (["mm", "bmm"], f".{rule}('mm', 'bmm')"),
            (("mm",), f".{rule}('mm')"),
            ("mm, bmm", f".{rule}('mm', 'bmm')"),
            ("mm bmm", f".{rule}('mm', 'bmm')"),
            ([*"abcde"], f".{rule}(*names)"),
            ([], f".{rule}(*names)"),
            (re.sub, f".{rule}('sub')"),
            (dict, f".{rule}('softmax') or .module('encoder.0', 'float32')"),
            (1, f".{rule}('softmax')"),
        ):
            with pytest.raises(CastingError, match=f"^{re.escape(repr(given_))} is .*{re.escape(write)}.$"):
                edit(given_)
        assert edit(*["mm", "bmm"]).rules == {"mm": rule, "bmm": rule}


def test_patterns_in_a_list_are_refused_with_the_calls_to_write() -> None:
    write = ".module('a', 'float32').module('b', 'float32')"
    with pytest.raises(
        CastingError,
        match=re.escape(f"['a', 'b'] is a list, and each pattern needs its own call. Write {write}."),
    ):
        EDIT.module(["a", "b"], "float32")  # type: ignore[arg-type]
    assert eval(f"EDIT{write}") == EDIT.module("a", "float32").module("b", "float32")


def test_a_dtype_in_place_of_a_rule_is_refused_with_its_name() -> None:
    class float16:
        """As jax.numpy's, a class, and as PyTorch's, `torch.float16` as text."""

    for dtype in (float16, "torch.float16"):
        with pytest.raises(CastingError, match=r"is not a rule, for 'a'\. Write 'float16'\."):
            EDIT.module("a", dtype)  # type: ignore[arg-type]
