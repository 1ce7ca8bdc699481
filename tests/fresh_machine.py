"""What a newcomer meets: an empty home, no cache, and no program but Python 3.11, pip, make and a shell.

A copy of what a clone holds; the first of the README's two commands as printed, with `--all` the second too;
then each extra alone, in which the first program of its page in docs/start trains, and no other framework can
be imported. This file says what has to work there. It refuses to know how to install anything: README.md,
docs/start and pyproject.toml do.

    python3.11 tests/fresh_machine.py [--all]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = ["make", "sh", "env", "mkdir", "touch", "rm", "cat", "uname"]
KEPT = re.compile(r"PIP_(?!CACHE)|LANG$|SSL_|(?i:https?|no)_proxy$")  # how pip reaches its index
FRAMEWORKS = {"torch", "jax", "keras", "tensorflow", "deepspeed", "optax", "flax", "tf_keras"}
BROUGHT = {"": set(), "torch": {"torch"}, "jax": {"jax", "optax"}, "keras": {"keras", "jax"}}
IMPORTABLE = "import importlib.util as i; print(*(n for n in {names!r} if i.find_spec(n)))"
ALONE = "from preamp import Dynamic, simulate; assert simulate(Dynamic(), [True])[0].skipped"


class Machine:
    """A home, a folder of programs, and a clone, all in one folder that nothing else is seen from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clone = folder, folder / "preamp"
        self.home, self.programs = folder / "home", folder / "bin"
        for made in (self.clone, self.home, self.programs):
            made.mkdir()
        (self.programs / "python3.11").symlink_to(Path(sys.executable).resolve())
        for name in PROGRAMS:
            (self.programs / name).symlink_to(str(shutil.which(name)))
        for name in tracked():
            (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.clone / name)

    def run(self, *words: str, **variables: str) -> str:
        """Run a command in the clone, and return what it printed. It must succeed."""
        kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
        environment = kept | {"HOME": str(self.home), "PATH": str(self.programs)} | variables
        print("$", " ".join(words).partition("\n")[0], flush=True)
        begun = time.monotonic()
        done = subprocess.run(words, cwd=self.clone, env=environment, text=True, stdout=subprocess.PIPE)
        print(done.stdout, f"({time.monotonic() - begun:.0f} s)", flush=True)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: exit {done.returncode}")
        return done.stdout

    def try_extra(self, extra: str) -> None:
        """Install preamp with one extra, or none, and train."""
        python = str(self.folder / f"venv-{extra}" / "bin" / "python")
        self.run("python3.11", "-m", "venv", str(Path(python).parents[1]))
        pip = f"{python} -m pip install --quiet --no-compile --constraint constraints.txt"
        self.run(*pip.split(), f".[{extra}]" if extra else ".")
        backend = {"KERAS_BACKEND": "jax"} if extra == "keras" else {}
        self.run(python, "-c", program(extra) if extra else ALONE, **backend)
        found = set(self.run(python, "-c", IMPORTABLE.format(names=sorted(FRAMEWORKS))).split())
        if found != BROUGHT[extra]:
            sys.exit(f"preamp[{extra}] brings {sorted(found)}, not {sorted(BROUGHT[extra])}")


def tracked() -> list[str]:
    """Return the files that a clone holds, and those that are to be added."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def printed_commands() -> list[list[str]]:
    """Return the README's first two commands."""
    block = (ROOT / "README.md").read_text().split("```")[1]
    return [line.partition("#")[0].split() for line in block.strip().splitlines()]


def program(extra: str) -> str:
    """Return the first program of an extra's page."""
    page = (ROOT / "docs/start" / f"{extra}.md").read_text()
    return page.split("```python\n")[1].partition("```")[0]


def main() -> None:
    train, test = printed_commands()
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        said = machine.run(*train)
        if "float16 + preamp" not in said or not (machine.clone / "runs/train/report.html").exists():
            sys.exit("make train wrote no report")
        if "--all" in sys.argv:
            machine.run(*test)
        shutil.rmtree(machine.clone / ".venv")
        for extra in BROUGHT:
            machine.try_extra(extra)


if __name__ == "__main__":
    main()
