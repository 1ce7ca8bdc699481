"""docs/versions.md: how it reads. What was run is in docs/versions.json, which `make matrix` writes too."""

from __future__ import annotations

import json
import os
import platform
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["machine", "page", "remember", "results", "write"]

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs/versions.json", ROOT / "docs/versions.md"
HEAD = """\
# Versions

`make matrix` writes this page; do not edit it.

The required releases are those in `pyproject.toml`. The oldest release, the newest, and some in between are
tested; those in bold passed all tests of their package. A Python version is in bold if a row that uses it
passed. `python tests/matrix.py --list` shows what is installed for each row.
"""
NEEDS = """\
`src/preamp/arrays/torch_compat.py` lists the private and recent names of PyTorch that `preamp.torch` uses,
the release that introduced each, and what happens without it."""
ROOMS = {
    "torch": "`preamp.torch`",
    "jax": "`preamp.jax`",
    "keras": "`preamp.keras`",
    "tensorflow": "`preamp.tensorflow`",
}


class Row(Protocol):
    """What the page needs to know of a row."""

    @property
    def name(self) -> str: ...
    @property
    def extra(self) -> str: ...


def results() -> dict[str, dict[str, Any]]:
    """Return what came of each row when it was last run."""
    saved: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return saved


def remember(name: str, result: Mapping[str, Any]) -> None:
    """Write down what came of a row, and leave the others as they are."""
    RESULTS.write_text(json.dumps(results() | {name: dict(result)}, indent=2, sort_keys=True) + "\n")


def write(rows: Sequence[Row]) -> None:
    """Write the page."""
    PAGE.write_text(page(rows, results()))


def page(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        rows: all, in their order.
        found: what came of those that were run.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [HEAD.rstrip(), "\n".join(_supported(project, rows, found)), NEEDS, "## Rows"]
    parts += ["\n".join(_ran(rows, found)), *_not_run(rows, found)]
    return "\n\n".join(parts) + "\n"


def machine() -> str:
    """Return what the tests run on: system, processor, cores."""
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        system = platform.system()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{system}, {next(names, platform.machine())}, {os.cpu_count()} cores"


def _supported(
    project: Mapping[str, Any], rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Yield what is supported: the bounds, and the releases that were tried."""
    yield "| what | required | tested |"
    yield "| --- | --- | --- |"
    pythons = {_numbers(row["python"])[:2]: False for row in found.values()}
    for row in found.values():
        pythons[_numbers(row["python"])[:2]] |= not row["failed"]
    tried = ", ".join(_shown(".".join(map(str, release)), well) for release, well in sorted(pythons.items()))
    yield f"| Python | {project['requires-python']} | {tried or '-'} |"
    for extra, room in ROOMS.items():
        bounds = {re.split(r"[<>=]", line)[0]: line for line in project["optional-dependencies"][extra]}
        mine = [found[row.name] for row in rows if row.extra == extra and row.name in found]
        yield f"| {room} | {bounds[extra].removeprefix(extra)} | {_tried(extra, mine)} |"


def _tried(package: str, found: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(_shown(row["versions"][package], not row["failed"]) for row in found) or "-"


def _shown(release: str, well: bool) -> str:
    return f"**{release}**" if well else release


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release))


def _ran(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what came of each row."""
    yield "| row | Python | with | passed | failed | skipped | seconds | date | commit | machine |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | --- | --- |"
    for name, row in ((row.name, found[row.name]) for row in rows if row.name in found):
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        counts = " | ".join(f"{row[count]:,}" for count in ("passed", "failed", "skipped", "seconds"))
        said = " | ".join((row["date"], row["commit"], row["machine"]))
        yield f"| {name} | {row['python']} | {versions} | {counts} | {said} |"


def _not_run(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    missing = [row.name for row in rows if row.name not in found]
    if missing:
        yield f"Not run yet: {', '.join(missing)}."
