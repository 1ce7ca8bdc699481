r"""Record what other systems save of their loss scale, and how they go on, in `checkpoints.json`.

The tests read this recording, so they need none of these systems. Like `record.py`, whose originals it
drives, this file knows no rule of any scaler and nothing of preamp. Run it only to extend or renew the
recording, in an environment of its own:

    pip install torch==2.13.0 numpy==2.2.6
    pip install --no-deps megatron-core==0.16.1 nemo_toolkit==2.7.0 fairseq==0.12.2
    python tests/recorded/record_checkpoints.py

A recording holds, for one setting and one script in which "1" is an overflow step: `changes`, the scales as
in `scalers.json`; `saved`, what the original saved before each step and after the last; `loaded`, the
entries that a fresh original was given otherwise; and `resumed`, the changes of its scale from there on, or
null where it went on like the one that was saved. Loaded otherwise is what cannot be loaded as it was saved:
NeMo reads the overflows left under a misspelt name, and Megatron and NeMo save numbers below 1 for them,
which act like 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import drivers
from drivers import Arguments, original, walk
from record import changes, dense, randomly

Saved = dict[str, Any]

HERE = Path(__file__).parent
SCRIPT = "0000100011000000" + randomly(0.3, 24, seed=5)


class Peer(NamedTuple):
    """One original: how it is made, read, moved, saved and loaded, and the settings it is recorded with."""

    distribution: str
    make: Callable[[Arguments], Any]
    scale: Callable[[Any], float]
    update: Callable[[Any, bool], object]
    save: Callable[[Any], Saved]
    load: Callable[[Any, Saved], object]
    loaded: Callable[[Saved], Saved]
    settings: list[Arguments]


def save_fairseq(scaler: Any) -> Saved:
    """Save by the method of the optimizer that owns the scaler."""
    optimizer = SimpleNamespace(scaler=scaler, fp32_optimizer=SimpleNamespace(state_dict=dict))
    return _fairseq_optimizer().state_dict(optimizer)


def load_fairseq(scaler: Any, saved: Saved) -> None:
    """Load by the method of the optimizer that owns the scaler."""
    inner = SimpleNamespace(load_state_dict=lambda *_: None)
    _fairseq_optimizer().load_state_dict(SimpleNamespace(scaler=scaler, fp32_optimizer=inner), saved)


def _fairseq_optimizer() -> Any:
    return original("fairseq", "fairseq/optim/fp16_optimizer.py", "_FP16OptimizerMixin")


def save_megatron(scaler: Any) -> Saved:
    saved = scaler.state_dict()
    return {**saved, "scale": saved["scale"].item()}


def load_megatron(scaler: Any, saved: Saved) -> None:
    import torch

    with mock.patch.object(torch.Tensor, "cuda", lambda tensor, _: tensor):
        scaler.load_state_dict({**saved, "scale": torch.tensor([saved["scale"]])})


def load_nemo(scaler: Any, saved: Saved) -> None:
    drivers.nemo_scale(scaler)  # it makes its trackers at the first use, whatever was loaded before
    scaler.load_state_dict(saved)


PEERS = {
    "MEGATRON": Peer(
        "megatron-core",
        drivers.megatron_scaler,
        lambda scaler: scaler.scale.item(),
        lambda scaler, overflow: scaler.update(overflow),
        save_megatron,
        load_megatron,
        lambda saved: {"hysteresis_tracker": max(saved["hysteresis_tracker"], 1)},
        [
            {"growth_interval": interval, "hysteresis": hysteresis, "min_scale": floor}
            | {"initial_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5}
            for interval, hysteresis, floor in ((2, 1, 1.0), (3, 2, 2.0**14), (4, 3, 1.0))
        ],
    ),
    "NEMO": Peer(
        "nemo_toolkit",
        drivers.nemo_scaler,
        drivers.nemo_scale,
        drivers.nemo_update,
        lambda scaler: scaler.state_dict(),
        load_nemo,
        lambda saved: dict.fromkeys(
            ("_hysteresis_tracker", "_hysterisis_tracker"), max(saved["_hysteresis_tracker"], 1)
        ),
        [
            {"growth_interval": 2, "hysteresis": 1},
            {"growth_interval": 3, "hysteresis": 2},
            {"growth_interval": 4, "hysteresis": 3, "growth_factor": 1.5, "backoff_factor": 0.7},
        ],
    ),
    "FAIRSEQ": Peer(
        "fairseq",
        drivers.fairseq_scaler,
        lambda scaler: scaler.scale(1.0),
        drivers.fairseq_update,
        save_fairseq,
        load_fairseq,
        lambda saved: {},
        [
            {"scale_window": 2},
            {"scale_window": 3, "tolerance": 0.25},
            {"scale_window": 4, "tolerance": 0.5, "threshold": 2.0**14},
        ],
    ),
}


def resumed(peer: Peer, arguments: Arguments, saved: Saved, script: str) -> list[float]:
    """Give the scales of a fresh original that goes on from `saved`."""
    scaler = peer.make(arguments)
    peer.load(scaler, saved)
    return walk(script, partial(peer.scale, scaler), partial(peer.update, scaler))[0]


def recording(dialect: str, arguments: Arguments) -> dict[str, Any]:
    """Run one original through the script, and a fresh one from each place on."""
    peer = PEERS[dialect]
    scaler = peer.make(arguments)
    scales, saved = [peer.scale(scaler)], [peer.save(scaler)]
    for mark in SCRIPT:
        peer.update(scaler, mark == "1")
        scales.append(peer.scale(scaler))
        saved.append(peer.save(scaler))
    loaded = [peer.loaded(entries) for entries in saved]
    again = [
        resumed(peer, arguments, {**entries, **others}, SCRIPT[place:])
        for place, (entries, others) in enumerate(zip(saved, loaded, strict=True))
    ]
    return {
        "dialect": dialect,
        "system": f"{peer.distribution} {metadata.version(peer.distribution)}",
        "arguments": arguments,
        "changes": changes(scales),
        "saved": saved,
        "loaded": loaded,
        "resumed": [
            None if values == scales[place:] else changes(values) for place, values in enumerate(again)
        ],
    }


def main() -> None:
    """Write `checkpoints.json` beside this file, one recording a line."""
    done = [recording(dialect, arguments) for dialect, peer in PEERS.items() for arguments in peer.settings]
    lines = ",\n".join(map(dense, done))
    text = f'{{"script": {dense(SCRIPT)},\n"recordings": [\n{lines}\n]}}\n'
    (HERE / "checkpoints.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
