"""Which module is running, as hooks of all modules tell."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from preamp.arrays.torch_compat import in_trace, untraced
from preamp.autocasting.report import OUTSIDE
from preamp.errors import UsageError


class RunningModules:
    """Which module is running, by its path, in one thread.

    Attributes:
        names: the paths of modules and parameters by their identity. Those of `model` are paths in it; those
            of other modules begin with the class of the outermost one.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, seen: Callable[[torch.nn.Module], None] | None = None
    ) -> None:
        self._paths = {id(part): path for path, part in _parts(model)} if model is not None else {}
        self.names = dict(self._paths)
        self._seen = seen  # called with each outermost module before it runs
        self._running: list[str] = []
        self._handles: list[RemovableHandle] = []
        self._depth, self._thread = 0, 0

    @property
    def current(self) -> str:
        return self._running[-1] if self._running else OUTSIDE

    def check_thread(self) -> None:
        if self._depth and threading.get_ident() != self._thread:
            raise UsageError(
                "A region with a report counts in one thread, and another thread is inside. "
                "Write autocast(..., report=True) in each thread."
            )

    def follow(self) -> bool:
        """Register the hooks that keep track of modules; return False if they are registered already."""
        self._depth += 1
        if self._depth > 1:
            return False
        self._thread = threading.get_ident()
        # PyTorch warns that hooks run once more around a compiled module, where these do no harm.
        warnings.filterwarnings(
            "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        self._filter = warnings.filters[0]
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return True

    def leave(self) -> bool:
        """Remove the hooks; return False if there are entries left that need them."""
        self._depth -= 1
        if self._depth:
            return False
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        for handle in self._handles:
            handle.remove()
        self._running.clear()
        return True

    @untraced
    def _begin(self, module: torch.nn.Module, _: object) -> None:
        if in_trace() or threading.get_ident() != self._thread:  # graphs know their modules
            return
        if not self._running:
            root = type(module).__name__
            for path, part in _parts(module):
                self.names[id(part)] = f"{root}.{path}" if path else root
            self.names |= self._paths
            if self._seen:
                self._seen(module)
        self._running.append(self.names.get(id(module), type(module).__name__))

    @untraced
    def _end(self, *_: object) -> None:
        if not in_trace() and self._running and threading.get_ident() == self._thread:
            self._running.pop()


def _parts(module: torch.nn.Module) -> list[tuple[str, object]]:
    return [*module.named_modules(), *module.named_parameters()]
