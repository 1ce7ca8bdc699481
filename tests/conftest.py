"""Fixtures that several files use."""

from __future__ import annotations

import subprocess
import time

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Return what runs the command line in this process, which has loaded everything already."""
    from preamp.cli.app import run as run_here  # which not every environment of the tests can

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        status = run_here(arguments)
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


@pytest.fixture
def one_rank():
    """A process group of PyTorch's that has this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    # Gloo's threads let go of what they have summed: PyTorch 2.6 waits for them holding the lock they need.
    time.sleep(0.05)
    dist.destroy_process_group()
