"""Fixtures that several files use."""

from __future__ import annotations

import subprocess

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Return what runs the command line in this process, which has loaded everything already."""
    from preamp.cli import run as run_here  # which not every environment of the tests can

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        status = run_here(arguments)
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run
