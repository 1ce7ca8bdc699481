"""Runs all benchmarks, each in a process of its own, and writes a page of the results.

Run: python benchmarks/run.py [--quick] [--device cuda] [--only torch_scaler] [--page docs/benchmarks.md]

Benchmarks run on the CPU, and on CUDA as well where there is a device; `--device` chooses one of the two. A
benchmark that fails is named on the page, and the exit status is 1. A full run is kept in
benchmarks/recorded, and docs/benchmarks.md shows all runs that are kept: delete those that no longer
describe the code. With `--quick`, `--device` or `--only` nothing is kept, and the page is
build/benchmarks.md. `--render` writes docs/benchmarks.md from the recorded runs and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from page import Run, machine, page, read, record, versions
from rows import Row, saved

HERE = Path(__file__).parent
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
CUDA_DEVICE = {
    "torch": "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')",
    "jax": "import jax; print(next((d.device_kind for d in jax.devices() if d.platform == 'gpu'), ''))",
}


@dataclass(frozen=True)
class Job:
    """A benchmark with its options. `cuda` is the framework whose CUDA device it also runs on."""

    script: str
    choices: tuple[str, ...] = ()
    cuda: str | None = None

    def __str__(self) -> str:
        return " ".join((self.script, *self.choices))


JOBS = (
    Job("core"),
    Job("simulate"),
    Job("policies"),
    Job("torch_scaler", cuda="torch"),
    Job("lens", cuda="torch"),
    Job("torch_autocast", cuda="torch"),
    Job("keras_optimizer", ("--backend", "torch"), cuda="torch"),
    Job("keras_optimizer", ("--backend", "jax"), cuda="jax"),
    Job("keras_optimizer", ("--backend", "tensorflow")),
    Job("jax_step", ("--model", "gpt"), cuda="jax"),
    Job("jax_step", ("--model", "mlp"), cuda="jax"),
    Job("jax_autocast", cuda="jax"),
    Job("deepspeed_overflow", cuda="torch"),
)


def cuda_devices() -> dict[str, str]:
    """Return the name of the CUDA device of each framework that has one."""
    found = {}
    for framework, code in CUDA_DEVICE.items():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if name := done.stdout.strip():
            found[framework] = name
    return found


def run(job: Job, device: str, quick: bool) -> tuple[list[Row], bool]:
    """Run a benchmark, which prints as it goes; return its rows, and whether it ended well."""
    environment = {**os.environ, **(ON_CPU if device == "cpu" else {})}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "rows.jsonl"
        kept.touch()
        words = [sys.executable, str(HERE / f"{job.script}.py"), *job.choices]
        words += ["--device", device, "--rows", str(kept), *(["--quick"] if quick else [])]
        done = subprocess.run(words, env=environment, check=False)
        return saved(kept), done.returncode == 0


def run_all(jobs: Sequence[Job], quick: bool, only: str | None) -> Run:
    """Run benchmarks one after the other, on the CPU and on CUDA, or on one of them only."""
    busy, began, start = os.getloadavg()[0], date.today().isoformat(), time.perf_counter()
    cuda, rows, failed = cuda_devices(), list[Row](), list[str]()
    for job in jobs:
        for device in ("cpu", "cuda") if job.cuda in cuda else ("cpu",):
            if only not in (None, device):
                continue
            minutes = (time.perf_counter() - start) / 60
            print(f"\n{job}, {device}, after {minutes:.1f} minutes", flush=True)
            yielded, well = run(job, device, quick)
            rows += yielded
            failed += [] if well else [f"{job}, {device}"]
    minutes, gpu = (time.perf_counter() - start) / 60, next(iter(cuda.values()), None)
    return Run(rows, failed, began, minutes, busy, machine(gpu), versions(), quick)


def main() -> None:
    """Run what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds and small sizes, to try it")
    parser.add_argument("--only", action="append", choices=list(dict.fromkeys(job.script for job in JOBS)))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="run on this device only")
    parser.add_argument("--page", type=Path, help="the file to write")
    parser.add_argument("--render", action="store_true", help="measure nothing: show the recorded runs")
    given = parser.parse_args()
    if given.device == "cuda" and not cuda_devices():
        parser.error("there is no CUDA device. Leave out --device, or write --device cpu.")
    partial = given.quick or given.only or given.device
    path = given.page or HERE.parent / ("build" if partial else "docs") / "benchmarks.md"
    path.parent.mkdir(exist_ok=True)
    if given.render:
        path.write_text(page(read()))
        return
    jobs = [job for job in JOBS if not given.only or job.script in given.only]
    done = run_all(jobs, given.quick, given.device)
    if not partial and not done.failed:
        record(done)
    path.write_text(page([done] if partial or done.failed else read()))
    print(f"\n{len(done.rows)} rows, {done.minutes:.1f} minutes: {path}")
    raise SystemExit(f"Did not run to the end: {'; '.join(done.failed)}" if done.failed else 0)


if __name__ == "__main__":
    main()
