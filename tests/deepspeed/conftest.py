"""The installed DeepSpeed, able to run in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """DeepSpeed's module of loss scalers, in a group of one process: it asks for its rank to log."""
    import deepspeed
    from deepspeed.runtime.fp16 import loss_scaler

    meeting: Path = tmp_path_factory.mktemp("deepspeed") / "meeting"
    group: dict[str, Any] = {"rank": 0, "world_size": 1, "init_method": f"file://{meeting}"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deepspeed.ops, "__compatible_ops__", {})  # or it compiles one for its all-reduce
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **group)
    yield loss_scaler
    deepspeed.comm.destroy_process_group()
