"""`Lens` records how large the weights, activations and gradients of a model are, on some steps.

This module decides when to record; `recorder` records one pass.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from preamp.arrays.torch_compat import is_compiler_off, is_exporting, mark_constant
from preamp.checks import callable_or_none, level_of_caller, whole
from preamp.errors import PolicyError, UsageError
from preamp.record.exponents import BANDS
from preamp.record.snapshots import Snapshot
from preamp.torch.lens.recorder import PassRecorder, dtype_name, inner_of, is_inside, tensors_in
from preamp.torch.scaling.grad_scaler import GradScaler

SEARCH, SEARCH_SHARE = 100, 50
"""How many passes are recorded in search of one that is not finite: so many, and one of so many more."""


class Lens:
    """Records how large values are, module by module, in one of `every` forward and backward passes.

    `print(lens.last)` shows the latest snapshot as a table.

    On a sampled pass it counts the outputs of each module ("activation"), the gradients with respect to them
    ("flow"), and the gradients of the parameters that the module itself owns ("gradient"), as well as the
    inputs of modules ("input") and their parameters ("weight"). Each of these has a histogram of binary
    exponents, the smallest and the largest magnitude, and the number of zeros, inf and NaN. Every tensor is
    read once, an output for the innermost module that returns it, and all counts reach the host in one
    transfer. On other passes the model has only a hook that counts passes, and nothing is read.

    A pass is one call of the model with gradients enabled; with gradient accumulation, a micro-batch.
    Evaluation under `torch.no_grad()` does not count. The counts of a pass are read when the next one begins,
    or earlier by `last` or `close()`. After a skipped step, if that is known without reading the device, the
    next pass is sampled too, once for several skips in a row. If that pass is finite, the passes after it are
    recorded as well until one is not, and only that one gives a snapshot. In a run of n passes, at most
    100 + n / 50 are recorded for this.

    Gradients are those of this rank, before they are averaged or accumulated.

    Values that are float16 when they are counted have already lost what float16 flushes: it is in `zeros`.
    `flushed` is about wider values, such as float32 gradients of parameters.

    In a region with a recipe, `Snapshot.quantized` also has what becomes zero and what saturates in each
    operand of the products of linear layers, and its ratio of signal to noise.

    A model in `torch.compile(model)` runs eagerly on a sampled pass, and nothing is recompiled. Where a whole
    training step is compiled, the lens records nothing, and warns when the step is compiled. It also warns
    where parts of the model are called and trained but the model itself is not, as with `model.encoder(x)`
    and `model.forward(x)`. What a checkpoint recomputes is not counted twice; flows inside a reentrant
    checkpoint are not recorded.

    Args:
        model: the model that the training loop calls: bare, wrapped by DDP, or by `torch.compile`.
        every: passes from one sample to the next; the first one is sampled.
        scaler: what scales the loss: a `GradScaler`, or PyTorch's own. None if the loss is not scaled.
        on_snapshot: called with every `Snapshot`; `trace.add_snapshot` is such a callable.
        low_dtype: the low precision, as a dtype or its name. None: autocast's dtype, or the narrowest among
            the recorded values, or float16.
        activations: False counts only gradients, without weights, inputs, outputs and quantized operands.

    Attributes:
        every: as given. It may be changed at any time.
        on_snapshot: as given.

    Raises:
        PolicyError: for invalid arguments.
        UsageError: for a model that compiles itself, and for one without a `forward`, such as a `ModuleDict`.

    >>> import torch
    >>> from preamp.torch import Lens
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with Lens(model) as lens:
    ...     model(torch.tensor([[1.0, 2.0**-10]])).sum().backward()
    ...     [row.what for row in lens.last.rows], lens.last.rows[-1].histogram.counts
    (['activation', 'flow', 'gradient'], (1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1))
    """

    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 100,
        *,
        scaler: torch.amp.GradScaler | None = None,
        on_snapshot: Callable[[Snapshot], object] | None = None,
        low_dtype: str | torch.dtype | None = None,
        activations: bool = True,
    ) -> None:
        _check_model(model)
        if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
            raise PolicyError(f"scaler={scaler!r} has no loss scale. Write scaler=GradScaler().")
        whole("every", every, least=1, instead="every=100")
        callable_or_none("on_snapshot", on_snapshot, "on_snapshot=trace.add_snapshot, or any function")
        self.every: int = every
        self.on_snapshot = on_snapshot
        self._model, self._activations = model, activations
        self._scaler, self._low_dtype = scaler, _low_dtype(low_dtype)
        self._passes = 0
        self._streak = False  # whether the present row of skipped steps has been sampled
        self._searches = False  # whether it looks for a pass that is not finite
        self._searched = 0  # the passes recorded for that
        self._last: Snapshot | None = None
        self._recorder: PassRecorder | None = None
        self._only_lost = False  # whether what it records is dropped if it is finite
        self._forward = ExitStack()
        self._counter = model.register_forward_pre_hook(_Hook(self._count), with_kwargs=True)
        self._bypass: _Bypass | None = _Bypass(model)

    @property
    def last(self) -> Snapshot | None:
        """The latest snapshot; None before the first. Reads the counts of the latest backward pass."""
        if self._bypass is not None:
            self._bypass.warn_if_trained()
        self._settle()
        return self._last

    def close(self) -> None:
        """Remove all hooks from the model, after reading the counts of the latest backward pass."""
        if self._bypass is not None:
            self._bypass.warn_if_trained()
            self._bypass.remove()
        self._counter.remove()
        self._end_forward()
        self._settle()
        self._forget()

    def __enter__(self) -> Lens:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a pass that begins, and record it if it is due."""
        if torch.compiler.is_compiling():
            _warn_of_compilation()
            return
        if self._bypass is not None:
            self._bypass.remove()
            self._bypass = None
        if not torch.is_grad_enabled() or is_inside():
            return
        self._settle()
        is_due = self._passes % self.every == 0
        self._passes += 1
        after_skip = self._after_skip()
        may_search = self._searched < SEARCH + self._passes // SEARCH_SHARE
        self._searches = (self._searches or after_skip) and may_search
        self._searched += self._searches
        if is_due or after_skip or self._searches:
            self._begin(args, kwargs, only_lost=not (is_due or after_skip))

    def _after_skip(self) -> bool:
        """Return whether the latest step was the first of a row of skipped steps."""
        before, self._streak = self._streak, _has_skipped(self._scaler)
        return self._streak and not before

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, only_lost: bool = False) -> None:
        self._only_lost = only_lost
        self._end_forward()
        self._forget()
        inner = inner_of(self._model)
        self._recorder = PassRecorder(inner, self._scaler, self._passes - 1, activations=self._activations)
        if inner is self._model and self._activations:
            self._recorder.record_input(inner, args, kwargs)  # too late for a hook: this call has begun
        self._forward.enter_context(_eagerly())
        handle = self._model.register_forward_hook(self._end_or_forget(), always_call=True)
        self._forward.callback(handle.remove)
        self._forward.callback(self._recorder.end_forward)

    def _end_or_forget(self) -> Callable[..., None]:
        """Return the hook that ends the forward pass, and drops one that raised: it has no backward pass."""
        before = sys.exception()

        def hook(*_: object) -> None:
            self._end_forward()
            if sys.exception() is not before:
                self._forget()

        return hook

    def _end_forward(self) -> None:
        self._forward.close()

    def _forget(self) -> None:
        """Remove the hooks of a recorded pass without a backward pass, and drop it."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _settle(self) -> None:
        """Read the counts of the recorded pass if its backward pass has begun."""
        recorder = self._recorder
        if recorder is None or not recorder.in_backward:
            return
        self._recorder = None
        recorder.close()
        snapshot = recorder.snapshot(self._low_dtype)
        is_lost = snapshot.first_overflow is not None
        self._searches = self._searches and not is_lost
        if is_lost or not self._only_lost:
            self._last = snapshot
            if self.on_snapshot is not None:
                self.on_snapshot(snapshot)


class _Hook:
    """A hook that stays on a module. A copy of the module, or a pickled one, has a hook that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments and returns None


class _Bypass:
    """Warns if modules inside a model are called and trained while the model itself is not called.

    Its hooks stay until the first call of the model, or its warning.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._inner = model, inner_of(model)
        self._names = {id(part): name for name, part in self._inner.named_modules() if part is not model}
        self._called: dict[str, None] = {}
        self._trained = False
        self._handles = [
            part.register_forward_hook(_Hook(self._note))
            for part in self._inner.modules()
            if part is not model
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def warn_if_trained(self) -> None:
        """Warn once, if a backward pass went through one of the parts."""
        if self._trained and self._handles:
            self.remove()
            warnings.warn(self._warning(), stacklevel=level_of_caller("torch"))

    def _note(self, part: torch.nn.Module, _: object, output: object) -> None:
        """Note a call of a part, and register hooks for its backward pass."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_inside():
            return
        self.warn_if_trained()
        name = self._names.get(id(part))
        if name is not None and self._handles:
            self._called[name] = None
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._note_backward)  # type: ignore[no-untyped-call]

    def _note_backward(self, _: torch.Tensor) -> None:
        self._trained = True

    def _warning(self) -> str:
        kind = type(self._model).__name__
        if "" in self._called:
            return (
                f"Lens(model) records nothing: model is a {kind}, which is not called, but the module inside "
                "it is. Call the model that Lens was given, or give it the one that is called."
            )
        outer = [name for name in self._called if not any(map(self._called.__contains__, _parents(name)))]
        more = f" and {len(outer) - 4} more" if len(outer) > 4 else ""
        return (
            f"Lens(model) records nothing: the {kind} itself is not called, but parts of it are: "
            f"{', '.join(outer[:4])}{more}. Call model(...), not its forward or its parts, or write "
            f"Lens({_access(outer[0])}) for one of them."
        )


def _parents(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:count]) for count in range(1, len(words))]


def _access(name: str) -> str:
    """Return the expression for a module inside a model.

    >>> _access("encoder.layers"), _access("layers.0")
    ('model.encoder.layers', "model.get_submodule('layers.0')")
    """
    is_plain = all(map(str.isidentifier, name.split(".")))
    return f"model.{name}" if is_plain else f"model.get_submodule({name!r})"


def _warn_of_compilation() -> None:
    """Warn that a call of the model is part of a larger function that is being compiled."""
    if not is_exporting():
        warnings.warn(
            "Lens(model) records nothing of this call: it is compiled, alone or in a larger function. Write "
            "compiled = torch.compile(model), train that outside of other compiled functions, and write "
            "Lens(compiled).",
            stacklevel=2,
        )


mark_constant(_warn_of_compilation)  # so the compiler runs it once, when it traces the call


def _eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs eagerly."""
    if is_compiler_off():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _has_skipped(scaler: torch.amp.GradScaler | None) -> bool:
    """Return whether the latest step was skipped; False if that is only known on the device."""
    return isinstance(scaler, GradScaler) and scaler.has_skipped(read=False)


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(
            f"model={model!r} is not a torch.nn.Module. Write Lens(model) with what the training loop calls."
        )
    if getattr(type(model), "forward", None) is torch.nn.Module.forward and "forward" not in vars(model):
        parts = [name for name, _ in model.named_children()]
        part = f"Lens(model.get_submodule({parts[0]!r}))" if parts else "Lens(model)"
        raise UsageError(
            f"model is a {type(model).__name__}, which has no forward and cannot be called: nothing could be "
            f"recorded. Write {part} for a part that is called, or give Lens a module that calls the parts."
        )
    if model._compiled_call_impl is not None:
        raise UsageError(
            "model.compile() hides the calls of the model. Write compiled = torch.compile(model) instead, "
            "train that, and write Lens(compiled)."
        )


def _low_dtype(low_dtype: object) -> str | None:
    name = dtype_name(low_dtype) if isinstance(low_dtype, torch.dtype) else low_dtype
    if name is None or (isinstance(name, str) and name in BANDS):
        return name
    raise PolicyError(f"low_dtype={low_dtype!r} is unknown. Write one of {', '.join(map(repr, BANDS))}.")
