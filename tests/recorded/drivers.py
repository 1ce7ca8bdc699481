"""How the originals that `record.py` records are driven through an overflow script.

One function makes and drives each original. Nothing here uses preamp.
"""

import __future__

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Arguments = dict[str, Any]
Scales = tuple[list[float], int | None]


def walk(
    script: str,
    scale: Callable[[], float],
    update: Callable[[bool], object],
    halt: type[Exception] | tuple[()] = (),
) -> Scales:
    """Drive one scaler through `script`; an exception of type `halt` ends the walk."""
    scales = []
    for step, mark in enumerate(script):
        scales.append(scale())
        try:
            update(mark == "1")
        except halt:
            return [*scales, scale()], step
    return [*scales, scale()], None


def original(distribution: str, file: str, *classes: str, **names: object) -> Any:
    """Execute only `classes` of an installed file, unmodified, and return the last one.

    Their modules import accelerator libraries at the top; `names` holds the few globals that the
    classes use, with the accelerator's replaced.
    """
    path = Path(str(metadata.distribution(distribution).locate_file(file)))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in classes]
    scope: dict[str, Any] = {"__name__": path.stem, **names}
    lazy = __future__.annotations.compiler_flag
    exec(compile(tree, path.name, "exec", flags=lazy, dont_inherit=True), scope)
    return scope[classes[-1]]


def megatron(arguments: Arguments, script: str) -> Scales:
    """Megatron's DynamicGradScaler, with its tensors on the CPU."""
    import torch

    def tensor(data: list[float], dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype)

    scaler = original(
        "megatron-core",
        "megatron/core/optimizer/grad_scaler.py",
        "MegatronGradScaler",
        "DynamicGradScaler",
        torch=SimpleNamespace(
            tensor=tensor,
            float=torch.float,
            max=torch.max,
            cuda=SimpleNamespace(current_device=lambda: "cpu"),
        ),
        ABC=ABC,
        abstractmethod=abstractmethod,
    )(**arguments)
    return walk(script, lambda: scaler.scale.item(), scaler.update)
