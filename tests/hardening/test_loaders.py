"""Whatever a file holds, reading it ends in what was saved or in one of our errors that names the file.

Traces, configurations, policies: cut short, with flipped bits, and
forged on purpose. No code of a file runs, and nothing hangs.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import preamp.systems.deepspeed_config as config
from preamp import (
    ConfigError,
    ExponentHistogram,
    Policy,
    PolicyError,
    Snapshot,
    SnapshotRow,
    Step,
    Trace,
    TraceError,
)
from preamp.doctor import diagnose
from preamp.report import Curve, write_report
from tests.strategies import from_json, policies, to_json

from .hostile import damaged, forged, often, seldom


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def fuzzed(few: int, **drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a test a few examples in every push and many with `-m slow`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        both = pytest.mark.parametrize("examples", ["few", pytest.param("many", marks=pytest.mark.slow)])

        def run(folder: Path, examples: str) -> None:
            how = often if examples == "many" else seldom(few)
            how(given(**drawn)(lambda **values: test(folder, **values)))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return both(run)

    return decorate


# Traces

SEEN = ExponentHistogram(-26, (3, 0, 1), zeros=4)
LOOK = Snapshot(
    1,
    2.0**16,
    "float16",
    (SnapshotRow("block.0", "flow", "float16", SEEN), SnapshotRow("block.0", "gradient", "float32", SEEN)),
)
STEPS = [
    Step(
        i,
        2.0**16,
        i % 7 != 3,
        i % 7 == 3,
        2.0**15 if i % 7 == 3 else 2.0**16,
        loss=1.0 / (i + 1),
        amax=3.0,
        zeros=0.1,
        grad_norm=1.0,
        culprits=("a.b",) if i % 7 == 3 else (),
    )
    for i in range(40)
]


def recorded() -> list[Any]:
    """Return the lines of a trace, as what JSON holds."""
    trace = Trace(STEPS, name="run", policy="Dynamic(growth_interval=100)", precision="float16")
    trace.add_snapshot(LOOK)
    trace.stop("enough")
    return [json.loads(line) for line in trace._lines()]


LINES = recorded()


def write_lines(path: Path, lines: Any) -> None:
    listed = lines if isinstance(lines, list) else [lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in listed))


def use(path: Path, page: Path) -> None:
    """Do with a trace's file all that reads one; the file's name is in every refusal."""
    try:
        trace = Trace.read(path)
    except TraceError as error:
        assert str(path) in str(error) and len(str(error)) < 1000  # noqa: PT017, PT018 - either is right
        return
    trace.summary()
    found = diagnose(trace)
    said = [finding.sentence + found.remedy(finding) for finding in found.findings]
    assert all(said)
    found.rehearsal()
    write_report(page, title="t", lead=said, curves=[Curve(str(trace.about.get("name")), trace)], table=[])
    assert "<script" not in page.read_text().lower()


@fuzzed(4, lines=forged(LINES))
def test_a_forged_trace_is_refused_or_can_be_reported_and_diagnosed(folder: Path, lines: Any) -> None:
    path = folder / "forged.jsonl"
    write_lines(path, lines)
    use(path, folder / "page.html")


@fuzzed(6, content=damaged("".join(json.dumps(line) + "\n" for line in LINES).encode()))
def test_a_damaged_trace_is_refused_or_can_be_reported_and_diagnosed(folder: Path, content: bytes) -> None:
    path = folder / "damaged.jsonl"
    path.write_bytes(content)
    use(path, folder / "page.html")


# Configurations

CONFIG = {
    "fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95]}},
    "gradient_clipping": 1.0,
    "train_batch_size": 32,
    "zero_optimization": {"stage": 1},
    "wandb": {"enabled": False},
}


def load_config(source: Any, name: str) -> None:
    try:
        config.load(source)
    except ConfigError as error:
        assert name in str(error)  # noqa: PT017 - either outcome is right


@fuzzed(20, forgery=forged(CONFIG))
def test_a_forged_configuration_is_refused_or_read(folder: Path, forgery: Any) -> None:
    path = folder / "forged.json"
    path.write_text(json.dumps(forgery))
    load_config(path, "")
    if isinstance(forgery, dict):
        load_config(forgery, "")


@fuzzed(20, content=damaged(json.dumps(CONFIG, indent=1).replace("\n", " // c\n").encode()))
def test_a_damaged_configuration_is_refused_or_read(folder: Path, content: bytes) -> None:
    path = folder / "damaged.json"
    path.write_bytes(content)
    load_config(path, "")


# Policies


@fuzzed(20, data=st.data())
def test_a_forged_policy_is_refused_or_a_policy(folder: Path, data: Any) -> None:
    saved = json.loads(
        json.dumps(to_json(data.draw(policies), lambda kind: kind.__name__, lambda name: None))
    )
    try:
        made = from_json(data.draw(forged(saved)), lambda name: None)
    except PolicyError:
        return
    assert isinstance(made, Policy)
    assert 0.0 < made.start().scale < math.inf
