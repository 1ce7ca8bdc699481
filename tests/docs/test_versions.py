"""What `make matrix` remembers and writes. What the releases come to is for `make matrix` to say."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parents[1]
MODULES = ("versions_page", "matrix")


@pytest.fixture(scope="module")
def tool():
    """Return the modules, which import each other as scripts in one folder do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]


def test_the_page_is_what_the_results_make(tool):
    written = (HERE.parent / "docs/versions.md").read_text()
    assert written == tool.versions_page.page(tool.matrix.ROWS, tool.versions_page.results())


def test_each_row_has_tests_and_a_python_that_is_supported(tool):
    assert len({row.name for row in tool.matrix.ROWS}) == len(tool.matrix.ROWS)
    pyproject = (HERE.parent / "pyproject.toml").read_text()
    for row in tool.matrix.ROWS:
        assert row.files()
        for pattern in row.tests:
            assert replace(row, tests=(pattern,)).files(), f"{row.name}: nothing is called {pattern}"
        assert f"\n{row.extra} = [" in pyproject


def test_a_row_is_remembered_beside_the_others(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool.versions_page, "RESULTS", tmp_path / "versions.json")
    tool.versions_page.remember("one", {"passed": 1})
    tool.versions_page.remember("other", {"passed": 2})
    tool.versions_page.remember("one", {"passed": 3})
    assert tool.versions_page.results() == {"one": {"passed": 3}, "other": {"passed": 2}}


def test_a_release_whose_tests_fail_is_not_in_bold(tool):
    row, found = tool.matrix.ROWS[0], SAVED
    page = tool.versions_page.page([row], {row.name: found})
    assert "| **2.6.0+cu124** |" in page
    page = tool.versions_page.page([row], {row.name: found | {"failed": 1}})
    assert "**2.6.0+cu124**" not in page
    assert "| `preamp.torch` | >=2.6 | 2.6.0+cu124 |" in page


SAVED = {
    **{"date": "2026-11-23", "commit": "f16fe17", "machine": "Debian, some processor, 2 cores"},
    **{"python": "3.11.2", "versions": {"torch": "2.6.0+cu124"}},
    **{"passed": 1000, "failed": 0, "skipped": 2, "seconds": 60},
}
TESTS = """
import pytest
def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("not today")
@pytest.fixture
def broken(): raise ValueError
def test_breaks(broken): pass
"""


@pytest.fixture
def reported(tool, tmp_path):
    """Return what runs files of tests and counts them."""

    def run(workers, **files):
        for name, content in files.items():
            (tmp_path / f"{name}.py").write_text(content)
        report = tmp_path / "report.xml"
        words = [sys.executable, "-m", "pytest", "-n", workers, f"--junitxml={report}", "-c", "/dev/null"]
        words += ["--continue-on-collection-errors", *(f"{tmp_path}/{name}.py" for name in files)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
        return tool.matrix.outcome_of(report, done.returncode)

    return run


def test_what_fails_is_counted_and_named(reported):
    outcome = reported("0", test_some=TESTS, test_gone="import not_there")
    assert outcome.passed == 1
    assert {name.rpartition("::")[2] for name in outcome.failed} == {"test_fails", "test_breaks", "test_gone"}
    assert json.loads(json.dumps(outcome.skipped)) == {"not today": 1}


def test_a_process_that_crashes_has_failed(reported):
    outcome = reported("1", test_crash="import os\ndef test_crash(): os._exit(3)\ndef test_other(): pass\n")
    assert [name.rpartition("::")[2] for name in outcome.failed] == ["test_crash"]
    assert outcome.passed == 1


def test_no_report_and_no_tests_are_failures(tool, tmp_path, reported):
    assert tool.matrix.outcome_of(tmp_path / "none.xml", 139).failed == ("pytest ended with status 139",)
    assert reported("0", test_none="").failed == ("pytest ended with status 5",)


def test_rows_are_found_by_their_names(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["matrix.py", "torch-2.8", "--list"])
    tool.matrix.main()
    assert capsys.readouterr().out == "torch-2.8         Python 3.12   torch==2.8.* ml_dtypes gfloat\n"
    monkeypatch.setattr(sys, "argv", ["matrix.py", "torch-2.7"])
    with pytest.raises(SystemExit):
        tool.matrix.main()
    assert "no row is called torch-2.7. There are torch-2.6, " in capsys.readouterr().err


def test_no_setting_of_the_machine_reaches_uv(tool, tmp_path, monkeypatch):
    for name in ("PIP_FIND_LINKS", "UV_INDEX", "PYTHONPATH", "VIRTUAL_ENV", "KERAS_BACKEND"):
        monkeypatch.setenv(name, "something")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    environment = tool.matrix.Matrix(tmp_path, keep=False).environment
    assert set(environment) <= {"HOME", "PATH", "LANG", "TMPDIR", "UV_CACHE_DIR"} | {
        name for name in environment if name.startswith("SSL_CERT_") or name.lower().endswith("_proxy")
    }
    assert environment["HTTPS_PROXY"] == "http://proxy"
    assert environment["HOME"] == str(tmp_path / "home")


def test_a_python_that_is_not_there_is_named(tool):
    with pytest.raises(tool.matrix.NotMade, match=r"^Python 2\.99 is not here$"):
        tool.matrix._interpreter("2.99")
