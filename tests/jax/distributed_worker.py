"""One of two processes that train together over `jax.distributed`.

    python distributed_worker.py RANK ADDRESS FILE

trains twice through the script, compiled over both processes' devices and with `shard_map`, and writes to
FILE what this process has seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from trainings import batches, loss, parameters, shard_map

from preamp import Dynamic
from preamp.jax import last_step, loss_scaled, step

OPTIMIZER = loss_scaled(optax.adamw(0.05), Dynamic(init_scale=2.0**10, growth_interval=2), max_norm=1.0)
SPLIT, WHOLE = PartitionSpec("d"), PartitionSpec()


def train(step: Any, mesh: Mesh) -> dict[str, Any]:
    """Walk the script, this process with its half of the examples."""
    params = parameters()
    params, state = jax.device_put((params, OPTIMIZER.init(params)), NamedSharding(mesh, WHOLE))
    skipped = []
    for x, _ in batches():
        half = np.split(x, 2)[jax.process_index()]
        examples = jax.make_array_from_process_local_data(NamedSharding(mesh, SPLIT), half)
        _, params, state = step(params, state, examples)
        seen = last_step(state)
        assert seen is not None
        skipped.append(seen.skipped)
    return {"skipped": skipped, "scale": seen.new_scale, "weights": np.asarray(params["w"]).tolist()}


def main(rank: int, address: str, file: Path) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    mapped = shard_map(step(loss, OPTIMIZER, axis_name="d"), mesh, (WHOLE, WHOLE, SPLIT), WHOLE)
    seen = {
        "jit": train(jax.jit(step(loss, OPTIMIZER)), mesh),
        "shard_map": train(jax.jit(mapped), mesh),
    }
    file.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
