"""What becomes of compiled functions in a region that counts: a backend that runs operator by operator.

Compiled functions of all threads use it while such a region is open in any thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from preamp.arrays.torch_compat import compiled_by, graphs_run_in_modes
from preamp.autocasting.report import OUTSIDE

FRAME = re.compile(r'File "(.*?)", line (\d+), in ')
CONTAINERS = {"_modules", "_parameters", "_buffers"}
OURS = Path(__file__).parents[2]
THEIRS = Path(torch.__file__).parent


class _Counted(fx.Interpreter):
    """Runs a graph, and says of each operator where the user wrote it."""

    def __init__(self, graph: fx.GraphModule, at: Callable[[str, str], None]) -> None:
        super().__init__(graph)
        self._at = at

    def run_node(self, node: fx.Node) -> Any:
        self._at(_module(node), _source(node))
        return super().run_node(node)


def counted_backend(at: Callable[[str, str], None], graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile a graph so that it runs operator by operator, where a dispatch mode sees them.

    Args:
        at: is told, before each operator, the module and the line that it comes from.
        graph: what to compile.
        inputs: examples of its inputs.
    """

    def forward(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        counted = _Counted(graph, at)

        def run(*args: Any) -> Any:
            try:
                return counted.run(*args)
            finally:
                at("", "")

        return run

    return compiled_by(forward)(graph, inputs)


_open = 0
_stance: Any = None  # a context manager whose class PyTorch keeps private
_lock = threading.Lock()


def replace_backend(backend: Callable[..., Any]) -> None:
    """Have compiled functions use a backend until each call has been matched by `restore_backend`."""
    global _open, _stance
    with _lock:
        if _stance is None and graphs_run_in_modes:
            _stance = torch.compiler.set_stance("default", force_backend=backend)
        elif _stance is None:
            _stance = torch.compiler.set_stance("force_eager")
        _open += 1


def restore_backend() -> None:
    """Have compiled functions use their own backends again, once all regions are left."""
    global _open, _stance
    with _lock:
        _open -= 1
        if _stance is not None and not _open:
            _stance.__exit__(None, None, None)
            _stance = None


def _module(node: fx.Node) -> str:
    """Return the path of the module that an operator comes from, from the outermost that is in the graph."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return OUTSIDE
    # Paths are like "L['self'].layers.0" or "L['self']._modules['layers']._modules['0']".
    (_, *outer), (_, *inner) = (
        [name for name in re.findall(r"\w+", path)[1:] if name not in CONTAINERS]
        for path, _ in (stack[0], stack[-1])
    )
    if outer:  # the module that was compiled is not in the graph itself
        return ".".join(inner)
    kind = stack[0][1]
    return ".".join([kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2], *inner])


def _source(node: fx.Node) -> str:
    """Return the innermost line that is the user's."""
    for file, line in reversed(FRAME.findall(node.meta.get("stack_trace") or "")):
        path = Path(file)
        if not path.is_relative_to(OURS) and not path.is_relative_to(THEIRS):
            return f"{path.name}:{line}"
    return OUTSIDE
