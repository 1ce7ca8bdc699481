"""Tables in files: what `preamp inspect --casting FILE` makes of them."""

from __future__ import annotations

import builtins
import re
import warnings

import pytest

from preamp import casting
from preamp.errors import CastingError, MissingExtra
from tests.cli.inside import read_casting

SCRIPT = """
import jax
import jax.numpy as jnp
import torch

weight = jnp.ones((4, 4))

def in_jax():
    with jax.named_scope("lm_head"):
        return jnp.exp(weight) @ weight

def in_torch():
    return torch.exp(torch.ones(4, 4) @ torch.ones(4, 4))
"""
TABLE = casting.DEFAULT.module("lm_head", "float32").lower("exp")
FILES = {
    "table.json": """
        {"edits": [{"modules": ["lm_head"], "rule": "float32"}, {"operators": "exp", "rule": "lower"}]}
    """,
    "table.toml": """
        table = "DEFAULT"
        [[edits]]
        modules = ["lm_head"]
        rule = "float32"
        [[edits]]
        operators = ["exp"]
        rule = "lower"
    """,
    "table.yaml": "edits:\n- {modules: lm_head, rule: float32}\n- {operators: exp, rule: lower}\n",
    "table.YML": "edits: [{modules: lm_head, rule: float32}, {operators: [exp], rule: lower}]",
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_read(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    assert read_casting(tmp_path / name) == TABLE


def test_inspect_runs_with_the_table_of_a_file(here, tmp_path):
    (tmp_path / "models.py").write_text(SCRIPT)
    (tmp_path / "operators.yaml").write_text("edits: [{operators: matmul, rule: float32}]")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = here("inspect", "models.py:in_jax", "--framework", "jax", "--casting", "table.json")
    assert done.returncode == 0, done.stderr
    assert re.search(r"dot_general +lm_head +models.py:10 +1 +f32, bf16 → f32", done.stdout)
    assert re.search(r"exp +lm_head +models.py:10 +1 +f32 → bf16", done.stdout)
    done = here("inspect", "models.py:in_torch", "--casting", "operators.yaml")
    assert done.returncode == 0, done.stderr
    assert re.search(r"matmul +- +1 +f32 ", done.stdout)
    assert re.search(r"matmul +- +1 +f32 → bf16", here("inspect", "models.py:in_torch").stdout)


WRONG = [
    ("table.txt", "", r"table.txt has none of the endings .json, .toml, .yaml, .yml. Name it table.json"),
    (
        "missing.json",
        None,
        r"missing.json cannot be read: No such file or directory. Write the path of a file",
    ),
    ("table.json", b"\xff\xfe", r"table.json is not text in UTF-8. Save it as UTF-8"),
    ("table.json", "{'edits': []}", r"table.json is not JSON: Expecting property name .* line 1 column 2"),
    ("table.toml", "edits = [", r"table.toml is not TOML: Invalid value"),
    ("table.yaml", "edits: [", r"table.yaml is not YAML: .*line 1"),
    ("table.yaml", "", r"table.yaml: None is not a table. Write {edits: "),
    ("table.yaml", "model: {}", r"table.yaml: 'model' is not part of a table. Write edits or table"),
    (
        "table.yaml",
        "edits: [{operators: exp, rule: lower}, {modules: lm_head, rule: fp32}]",
        r"table.yaml: edits\[1\]: 'fp32' is not a rule, for 'lm_head'. Write one of 'float32', 'bfloat16'",
    ),
    (
        "table.json",
        '{"edits": [{"operator": "exp", "rule": "lower"}]}',
        r"table.json: edits\[0\]: 'operator' is not part of an edit. Write modules or operators or rule",
    ),
    (
        "table.json",
        '{"edits": [{"operators": "exq", "rule": "lower"}]}',
        r"table.json: 'exq' is not a primitive of JAX.* Write .*'exp'",
    ),
]


@pytest.mark.parametrize(("name", "content", "said"), WRONG)
def test_an_error_names_the_file_and_what_to_write(name, content, said, here, tmp_path):
    (tmp_path / "models.py").write_text(SCRIPT)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    done = here("inspect", "models.py:in_jax", "--framework", "jax", "--casting", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("preamp: ")
    assert re.search(said, done.stderr)
    assert done.stderr.count("\n") == 1


def test_an_operator_of_another_framework_is_named_with_the_file(here, tmp_path):
    (tmp_path / "models.py").write_text(SCRIPT)
    (tmp_path / "table.json").write_text('{"edits": [{"operators": "dot_general", "rule": "lower"}]}')
    done = here("inspect", "models.py:in_torch", "--casting", "table.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"preamp: table.json: .*'dot_general'", done.stderr)


def test_a_refused_operator_of_a_region_in_the_function_names_no_file(here, tmp_path):
    (tmp_path / "models.py").write_text(
        SCRIPT + "\nfrom preamp import casting\nfrom preamp.jax import autocast\n\ndef refusing():\n"
        '    return autocast(in_jax, casting=casting.DEFAULT.refuse("exp"))()\n'
    )
    done = here("inspect", "models.py:refusing", "--framework", "jax")
    assert done.returncode == 2
    assert done.stderr.startswith("preamp: 'exp' is refused in this region")


def test_a_module_that_is_not_there_is_a_warning(here, tmp_path):
    (tmp_path / "models.py").write_text(SCRIPT)
    (tmp_path / "table.json").write_text('{"edits": [{"modules": "lm_haed", "rule": "float32"}]}')
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = here("inspect", "models.py:in_jax", "--framework", "jax", "--casting", "table.json")
    assert done.returncode == 0
    assert "'lm_haed', so nothing changes there. Write 'lm_head'" in done.stderr


def test_yaml_without_pyyaml_names_the_pip_line(tmp_path, monkeypatch):
    (tmp_path / "table.yaml").write_text(FILES["table.yaml"])
    found = builtins.__import__

    def missing(name, *rest):
        if name == "yaml":
            raise ModuleNotFoundError("No module named 'yaml'", name="yaml")
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtra, match=r"yaml is missing\. Run: pip install pyyaml"):
        read_casting(tmp_path / "table.yaml")


def test_an_error_of_a_file_is_one_of_castings(tmp_path):
    (tmp_path / "table.json").write_text("[]")
    with pytest.raises(CastingError, match=r"table\.json: \[\] is not a table"):
        read_casting(tmp_path / "table.json")
