"""What a newcomer meets: an empty home, no cache or setting of pip, no program but Python, make and a shell.

For each supported Python that is here: a copy of what a clone holds; the README's two commands as printed;
then each extra alone, installed as its page in docs/start says, in which the page's first program trains and
no other framework can be imported. It downloads everything each time and ends with a table. How to install is
read from README.md, docs/start and pyproject.toml.

    python3.11 tests/fresh_machine.py [3.11] [3.12] [3.13] [train] [test] [extras]
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# bash is for the setup.py of deepspeed.
PROGRAMS = ["make", "sh", "bash", "env", "mkdir", "touch", "rm", "cat", "uname", "sed"]
KEPT = re.compile(r"SSL_CERT_FILE$|PIP_CERT$|(?i:https?|no)_proxy$")  # some networks need them
FRAMEWORKS = {"torch", "jax", "keras", "tensorflow", "deepspeed", "optax", "flax", "tf_keras"}
BROUGHT = {
    "": set(),
    "torch": {"torch"},
    "jax": {"jax", "optax"},
    "keras": {"keras", "jax"},
    "tensorflow": {"tensorflow", "keras"},
}
IMPORTABLE = "import importlib.util as i; print(*(n for n in {names!r} if i.find_spec(n)))"
ALONE = "from preamp import Dynamic, simulate; assert simulate(Dynamic(), [True])[0].skipped"
VERSION = "import ensurepip, venv, sys; print(*sys.version_info[:3], sep='.')"
MOST_FOR_TRAIN = 1000  # MB
STEPS = ["train", "test", "extras"]


class Failed(Exception):
    """A newcomer is stuck."""


class Result(NamedTuple):
    """A line of the table: what one command took, of time and of disk."""

    python: str
    command: str
    seconds: float
    megabytes: int
    outcome: str

    def __str__(self) -> str:
        return f"{self.python:8}{self.command:40}{self.seconds:8,.0f}{self.megabytes:8,}  {self.outcome}"


class Machine:
    """A home, a folder of programs, and a clone, all in one folder that nothing else is seen from."""

    def __init__(self, folder: Path, version: str, python: Path) -> None:
        self.folder, self.clone, self.version = folder, folder / "preamp", version
        self.home, self.programs = folder / "home", folder / "bin"
        self.results: list[Result] = []
        for made in (self.clone, self.home, self.programs):
            made.mkdir()
        self.python = f"python{minor(version)}"
        (self.programs / self.python).symlink_to(python)
        for name in PROGRAMS:
            (self.programs / name).symlink_to(str(shutil.which(name)))
        for name in tracked():
            (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.clone / name)

    def run(self, *words: str, first: Path | None = None, **variables: str) -> str:
        """Run a command in the clone, and return what it printed. It must succeed.

        `first` is a folder of programs that are found before the others, as of an activated environment.
        """
        kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
        path = os.pathsep.join(str(folder) for folder in (first, self.programs) if folder)
        fixed = {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "PIP_CONFIG_FILE": os.devnull}
        print("$", *(word if len(word) < 100 else "..." for word in words), flush=True)
        said = []
        words = (shutil.which(words[0], path=path) or words[0], *words[1:])
        with subprocess.Popen(
            words, cwd=self.clone, env=kept | fixed | variables, text=True, stdout=subprocess.PIPE
        ) as running:
            assert running.stdout
            for line in running.stdout:
                print(line, end="", flush=True)
                said.append(line)
        if running.returncode:
            raise Failed(f"exit {running.returncode}")
        return "".join(said)

    @contextmanager
    def measured(self, command: str, environment: Path) -> Iterator[None]:
        """Add a line to the table, and go on after a failure."""
        print(f"\nPython {self.version}: {command}", flush=True)
        begun, outcome = time.monotonic(), "passed"
        try:
            yield
        except Failed as failed:
            outcome = str(failed)
        took = time.monotonic() - begun
        self.results.append(Result(self.version, command, took, megabytes(environment), outcome))
        print(self.results[-1], flush=True)

    def try_commands(self, steps: list[str]) -> None:
        """Run those of the README's two commands that are asked for."""
        environment = self.clone / ".venv"
        for step, command in zip(STEPS, printed_commands(), strict=False):
            if step not in steps:
                continue
            with self.measured(shlex.join(command), environment):
                said = self.run(*command)
                report = self.clone / "runs/train/report.html"
                if step == "train" and ("float16 + preamp" not in said or not report.exists()):
                    raise Failed("no report")
                if step == "train" and megabytes(environment) > MOST_FOR_TRAIN:
                    raise Failed(f"more than {MOST_FOR_TRAIN} MB")
        shutil.rmtree(environment, ignore_errors=True)

    def try_extra(self, extra: str) -> None:
        """Install preamp with one extra, or none, and train."""
        environment = self.folder / "venv"
        words, exported = installing(extra)
        with self.measured(shlex.join(words), environment):
            self.run(self.python, "-m", "venv", str(environment))
            programs = environment / "bin"
            self.run(*words, "--quiet", "--disable-pip-version-check", first=programs)
            self.run("python", "-c", program(extra) if extra else ALONE, first=programs, **exported)
            brought = self.run("python", "-c", IMPORTABLE.format(names=sorted(FRAMEWORKS)), first=programs)
            if set(brought.split()) != BROUGHT[extra]:
                raise Failed(f"brings {brought.split()}, not {sorted(BROUGHT[extra])}")
        shutil.rmtree(environment, ignore_errors=True)


def minor(version: str) -> str:
    """Return 3.11 of 3.11.2."""
    return version.rpartition(".")[0]


def megabytes(folder: Path) -> int:
    """Return how much of the disk a folder takes."""
    return sum(path.lstat().st_blocks for path in folder.rglob("*")) * 512 // 1_000_000


def supported() -> list[str]:
    """Return the Pythons that pyproject.toml names, such as 3.11."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return re.findall(r"^Programming Language :: Python :: (\d+\.\d+)$", "\n".join(said), re.MULTILINE)


def pythons() -> dict[str, Path]:
    """Return the supported Pythons that are here and can make an environment, by version.

    Of several patch releases the oldest, which packages drop first. pyenv's are looked up where they lie, as
    its shims run the chosen ones only.
    """
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin")
    folders = [*map(Path, os.environ["PATH"].split(os.pathsep)), *of_pyenv]
    oldest: dict[str, tuple[int, str, Path]] = {}
    for name in supported():
        for path in [folder / f"python{name}" for folder in folders]:
            if "shims" in path.parts or not path.exists():
                continue
            asked = subprocess.run([path, "-c", VERSION], text=True, capture_output=True, check=False)
            version = asked.stdout.strip()
            if asked.returncode == 0 and minor(version) == name:
                found = (int(version.rpartition(".")[2]), version, path.resolve())
                oldest[name] = min(found, oldest.get(name, found))
    return {version: path for _, version, path in oldest.values()}


def tracked() -> list[str]:
    """Return the files that a clone holds, and those that are to be added."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def printed_commands() -> list[list[str]]:
    """Return the README's first two commands."""
    block = (ROOT / "README.md").read_text().split("```")[1]
    return [line.partition("#")[0].split() for line in block.strip().splitlines()]


def installing(extra: str) -> tuple[list[str], dict[str, str]]:
    """Return the line that installs an extra, as its page has it, and the variables exported after it."""
    if not extra:
        return ["pip", "install", "."], {}
    page = (ROOT / "docs/start" / f"{extra}.md").read_text()
    command, *others = map(shlex.split, page.split("```\n")[1].splitlines())
    return command, dict(word.split("=", 1) for name, word in others if name == "export")


def program(extra: str) -> str:
    """Return the first program of an extra's page."""
    page = (ROOT / "docs/start" / f"{extra}.md").read_text()
    return page.split("```python\n")[1].partition("```")[0]


def main() -> None:
    asked, found = sys.argv[1:], pythons()
    steps = [step for step in STEPS if step in asked] or STEPS
    wanted = [name for name in supported() if name in asked] or supported()
    if unknown := set(asked) - set(STEPS) - set(supported()):
        sys.exit(f"{' '.join(sorted(unknown))}: write any of {' '.join([*supported(), *STEPS])}")
    results: list[Result] = []
    for name in wanted:
        here = [(version, path) for version, path in found.items() if minor(version) == name]
        if not here:
            results.append(Result(name, "", 0, 0, "not here, or cannot make an environment"))
        for version, path in here:
            with tempfile.TemporaryDirectory() as folder:
                machine = Machine(Path(folder), version, path)
                machine.try_commands(steps)
                for extra in BROUGHT if "extras" in steps else ():
                    machine.try_extra(extra)
                results += machine.results
    print(f"\n{'Python':8}{'command':40}{'seconds':>8}{'MB':>8}  result", *results, sep="\n")
    sys.exit(any(result.outcome != "passed" for result in results))


if __name__ == "__main__":
    main()
