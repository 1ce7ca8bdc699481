"""What the documentation makes of the code. That it builds without a warning is `make docs`."""

import itertools
import pkgutil
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import preamp
from preamp import casting, dialects

HOME = Path(__file__).parents[2]
DOCS = HOME / "docs"
sys.path.insert(0, str(DOCS))

from extensions import api, drawn, layers, links, tables  # noqa: E402

PAGES = [*links.PAGES, *sorted(DOCS.rglob("*.md"))]
CORE = [
    *(
        "policy",
        "errors",
        "autocasting.tables",
        "systems.dialects",
        "guards",
        "simulation.processes",
        "simulation.simulate",
    ),
    *("scaling", "record.trace", "record.snapshots", "record.exponents", "machine"),
]
LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)")


def test_every_public_module_stands_on_one_page():
    text = "".join(page.read_text() for page in PAGES)
    shown = Counter(re.findall(r"^```\{api\} ([\w.]+)$", text, re.MULTILINE))
    assert set(shown.values()) == {1}
    top = {name.name for name in pkgutil.iter_modules(preamp.__path__) if name.ispkg}
    offered = {name for name in top if hasattr(import_module(f"preamp.{name}"), "__all__")}
    assert offered <= set(shown)


def test_every_public_name_stands_on_the_page_of_the_module_it_is_imported_from():
    found = [api.names_of(import_module(f"preamp.{name}")) for name in CORE]
    paths = Counter(itertools.chain.from_iterable(found))
    assert set(paths.values()) == {1}
    for path, value in itertools.chain.from_iterable(names.items() for names in found):
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name) is value
    modules = {f"preamp.{name}" for name in ("casting", "dialects", "guards", "processes", "__version__")}
    assert {f"preamp.{name}" for name in preamp.__all__} - modules <= set(paths)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_links_hold_where_the_file_is_read_as_it_is(page: Path):
    assert [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()] == []


def test_a_link_out_of_the_documentation_leads_to_the_page_that_includes_the_file():
    written = "[a](../../README.md#tour) [b](../torch.md) [c](https://x.org/y.md) [d](#e)"
    page = DOCS / "start/torch.md"
    assert links.relinked(written, page, page) == written.replace("../../README.md", "../index.md")
    assert links.relinked("[a](docs/torch.md)", HOME / "README.md", DOCS / "index.md") == "[a](torch.md)"


def test_the_diagram_has_each_layer_of_the_contract_below_the_one_that_may_import_it():
    contract = layers.contract((HOME / "pyproject.toml").read_text())
    placed = {box.package: box for box in layers.boxes(contract.layers)}
    assert sorted(placed) == sorted(itertools.chain.from_iterable(contract.layers))
    for upper, lower in itertools.pairwise(contract.layers):
        assert max(placed[r].y for r in upper) + layers.HEIGHT < min(placed[r].y for r in lower)
    for one, other in itertools.combinations(placed.values(), 2):
        assert one.y != other.y or one.x + one.width < other.x or other.x + other.width < one.x
    assert all(box.x > 0 and box.x + box.width <= layers.WIDTH for box in placed.values())


def test_the_diagram_says_what_a_package_imports():
    contract = layers.contract((HOME / "pyproject.toml").read_text())
    drawing = ET.fromstring(layers.diagram(contract))
    kinds = {group.findtext("text"): group.get("class") for group in drawing.iter("g")}
    assert set(kinds) - {None} == set(itertools.chain(*contract.layers))
    assert {kinds[name] for name in ("torch", "jax", "keras", "tensorflow", "deepspeed")} == {"adapter"}
    assert {kinds[name] for name in ("policy", "record", "autocasting", "simulation", "errors")} == {"plain"}
    assert kinds["report"] == "surface"


def test_a_layer_too_wide_for_a_phone_takes_several_lines():
    layer = [f"a_rather_long_name_{number}" for number in range(9)]
    placed = layers.boxes([layer, ["below"]])
    assert [box.package for box in placed] == [*layer, "below"]
    assert len({box.y for box in placed}) > 3
    assert all(box.x + box.width <= layers.WIDTH for box in placed)


def test_the_tables_of_dialects_have_all_of_them():
    for rows in (tables.dialect_rows(), tables.rule_rows()):
        assert [row[0] for row in rows[1:]] == [f"`{name}`" for name in dialects.ALL]
        assert {len(row) for row in rows} == {len(rows[0])}
    torch = dict(zip(tables.rule_rows()[0], tables.rule_rows()[1], strict=True))
    assert (torch["first scale"], torch["clean steps"], torch["lowest"]) == ("2¹⁶", "2,000", "-")


@pytest.mark.parametrize("names", [["CPU", "CUDA"], ["JAX"]])
def test_the_table_of_operators_has_each_once_with_its_rules(names: list[str]):
    has = [getattr(casting, name).rules for name in names]
    read = {
        operator.strip("`"): tuple(rules)
        for *rules, operators in tables.operator_rows(*names)[1:]
        for operator in operators.split()
    }
    named = {operator for table in has for operator in table}
    assert read == {operator: tuple(table.get(operator, "-") for table in has) for operator in named}
    assert sum(len(row[-1].split()) for row in tables.operator_rows(*names)[1:]) == len(read)


def test_a_drawing_is_what_its_code_ends_with():
    namespace: dict[str, object] = {}
    assert drawn.run("a = 1\na + 1", namespace) == 2
    assert drawn.run("a + 2", namespace) == 3
    with pytest.raises(ValueError, match=r"'b = a' draws nothing\. End the block with"):
        drawn.run("b = a", namespace)
