r"""Record what the dynamic loss scalers of other systems do, as plain numbers in `scalers.json`.

The tests replay this recording through `preamp.dialects`, so they need none of these systems. This
file decides which settings meet which overflow scripts; how each original is driven is in
`drivers.py`. It knows no rule of any scaler, and nothing of preamp.
Run it only to extend or renew the recording, on Python 3.11, in an environment of its own; no
accelerator is needed:

    pip install torch==2.13.0 numpy==2.2.6 setuptools wheel ninja packaging psutil
    pip install --no-deps megatron-core==0.16.1
    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed==0.16.5
    python tests/recorded/record.py

It takes a minute or two.

An adapter takes the original's own arguments and a script in which "1" is an overflow step. It
gives the scale before each step and one last value after the last step, and the 0-based step at
which the original raised, or None. If it raised at step k, the list ends with entry k + 1: the
scale it held after raising. The scale is the one that the original stores.

In the JSON, `changes` holds `[step, scale]` where the scale before `step` differs from the one
before it, and infinity is the string "inf".
"""

import contextlib
import io
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from drivers import Arguments, Scales, megatron

HERE = Path(__file__).parent


class Peer(NamedTuple):
    """One original: where it comes from, how it is driven, and the settings it is recorded with.

    `settings` are changes to `defaults`; the defaults themselves are recorded too.
    """

    distribution: str
    adapter: Callable[[Arguments, str], Scales]
    defaults: Arguments
    settings: list[Arguments]


PEERS = {
    "MEGATRON": Peer(
        "megatron-core",
        megatron,
        {
            "initial_scale": 2.0**32,
            "min_scale": 1.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 1000,
            "hysteresis": 2,
        },
        [
            {"growth_interval": 1, "hysteresis": 1},
            {"growth_interval": 2},
            {"growth_interval": 3, "hysteresis": 3, "initial_scale": 2.0**16},
            {"growth_interval": 5, "hysteresis": 4, "initial_scale": 2.0**16},
            {"growth_interval": 7, "hysteresis": 1, "growth_factor": 1.5, "backoff_factor": 0.7},
            {"growth_interval": 3, "growth_factor": 3.0, "backoff_factor": 0.3},
            {"growth_interval": 5, "initial_scale": 1000.0, "min_scale": 100.0},
            {"growth_interval": 2, "initial_scale": 2.0**120, "min_scale": 2.0**110},
        ],
    ),
}


def randomly(density: float, length: int, seed: int) -> str:
    """Give a script whose steps overflow independently with probability `density`."""
    draw = random.Random(seed)
    return "".join("1" if draw.random() < density else "0" for _ in range(length))


SHORT_SCRIPTS = {
    "rare": randomly(0.04, 250, seed=1),
    "some": randomly(0.12, 220, seed=2),
    "many": randomly(0.35, 200, seed=3),
    "most": randomly(0.70, 200, seed=4),
    "overflow": "1" * 200,
    "clean": "0" * 200,
    "alternating": "10" * 100,
    "bursts": "".join("0" * gap + "1" * burst for gap in (3, 8, 21) for burst in range(1, 7)),
}

LONG_SCRIPTS = {
    "defaults": "1".join("0" * gap for gap in (999, 1000, 1024, 1999, 2000)),
    "endless": "1" * 1010,
}

BOUNDARIES = "".join(
    "0" * gap + burst
    for burst in ("1", "11")
    for window in (1, 2, 3, 5, 7)
    for gap in (window - 1, window, window + 1)
)

SCRIPTS = {**LONG_SCRIPTS, **SHORT_SCRIPTS, "boundaries": BOUNDARIES}


def plain(value: Any) -> Any:
    """Make `value` fit for strict JSON: infinity becomes a string."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return "inf" if value == math.inf else value


def dense(value: Any) -> str:
    """Write strict JSON without spaces."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def changes(scales: list[float]) -> list[list[Any]]:
    """Keep the first scale and each one that differs from the one before it."""
    return [
        [step, plain(scale)] for step, scale in enumerate(scales) if step == 0 or scale != scales[step - 1]
    ]


def cases(peer: Peer) -> Iterator[tuple[Arguments, str]]:
    """Pair the defaults with the long scripts, each other setting with three of the rest."""
    for name in LONG_SCRIPTS:
        yield peer.defaults, name
    names = list(SHORT_SCRIPTS)
    for turn, setting in enumerate(peer.settings):
        for name in ["boundaries", *names[turn % 4 :: 4]]:
            yield {**peer.defaults, **setting}, name


def recordings(dialect: str) -> list[dict[str, Any]]:
    """Run one peer through its cases."""
    peer = PEERS[dialect]
    system = f"{peer.distribution} {metadata.version(peer.distribution)}"
    done = []
    for arguments, name in cases(peer):
        with contextlib.redirect_stdout(io.StringIO()):
            scales, raised = peer.adapter(arguments, SCRIPTS[name])
        done.append(
            {
                "dialect": dialect,
                "system": system,
                "arguments": plain(arguments),
                "script": name,
                "changes": changes(scales),
                "raises_at": raised,
            }
        )
    return done


def main() -> None:
    """Write `scalers.json` beside this file, one recording a line.

    Each peer gets a fresh process, because their shared libraries do not load side by side.
    """
    with ProcessPoolExecutor(mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        done = itertools.chain.from_iterable(pool.map(recordings, PEERS))
        lines = ",\n".join(map(dense, done))
    text = f'{{"scripts": {dense(SCRIPTS)},\n"recordings": [\n{lines}\n]}}\n'
    (HERE / "scalers.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
