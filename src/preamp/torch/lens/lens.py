"""A lens on a model: how large its weights, activations and gradients are, module by module, on some steps.

What is decided here is when to record; `sample` decides what.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from preamp.arrays.torch_compat import (
    is_compiler_off,
    is_exporting,
    is_in_backward,
    is_in_transform,
    mark_constant,
)
from preamp.checks import callable_or_none, level_of_caller, whole
from preamp.errors import PolicyError, UsageError
from preamp.record.exponents import BANDS
from preamp.record.snapshots import Look
from preamp.torch.lens.sample import Sample, dtype_name, inner_of, tensors_in
from preamp.torch.scaling.grad_scaler import GradScaler
from preamp.torch.scaling.loss_scale_optimizer import LossScaleOptimizer


class Lens:
    """How large values are, module by module, in one forward and backward pass of `every`.

    `print(lens.last)` shows it as a table.

    On a sampled pass it counts what each module puts out ("activation"), the gradient with respect to that
    ("flow"), and the gradients of the parameters that the module itself owns ("gradient"); and what modules
    are called with ("input") and their parameters ("weight"). Each of these has a histogram of binary
    exponents, the smallest and the largest magnitude, and the number of zeros, inf and NaN. Every tensor is
    read once, outputs for the innermost module that puts them out, and all counts reach the host in one
    transfer. On other passes the model has no hook but one that counts passes, and nothing is read.

    A pass is one call of the model with gradients enabled, so with accumulation it is a micro-batch.
    Evaluation under `torch.no_grad()` does not count. What a pass has shown is read when the next one
    begins, or earlier, when `last` or `close()` asks for it. After a skipped step that the scaler knows of
    without a read, the next pass is sampled too, once for all skips in a row.

    Gradients are those of this rank, before they are averaged or accumulated.

    Values that are float16 when they are seen have lost already what float16 flushes: those are `zeros`. What
    `flushed` says is about wider values, such as the float32 gradients of parameters.

    A model in `torch.compile(model)` runs eagerly on a sampled pass, and nothing is compiled again. Where a
    whole training step is compiled, the lens records nothing, and warns when the step is compiled. It warns
    too where parts of the model are called and trained but the model itself is not, as by `model.encoder(x)`
    and `model.forward(x)`. What a checkpoint computes again is not counted again; flows inside of a reentrant
    one are not seen.

    Args:
        model: the model that the training loop calls: as it is, wrapped by DDP, or by `torch.compile`.
        every: passes from one sample to the next; the first one is sampled.
        scaler: what scales the loss: a `GradScaler`, PyTorch's own, or a `LossScaleOptimizer`. None: nothing.
        on_look: called with every `Look`; `trace.look` is such a callable.
        low_dtype: what overflows and underflows, as a dtype or its name. None: autocast's dtype, or the
            narrowest that is seen, or float16.
        activations: False counts gradients alone, without weights, inputs and outputs.

    Attributes:
        every: as given. It may be changed at any time.
        on_look: as given.

    Raises:
        PolicyError: for arguments that cannot work.
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
        scaler: torch.amp.GradScaler | LossScaleOptimizer | None = None,
        on_look: Callable[[Look], object] | None = None,
        low_dtype: str | torch.dtype | None = None,
        activations: bool = True,
    ) -> None:
        _check_model(model)
        whole("every", every, least=1, instead="every=100")
        callable_or_none("on_look", on_look, "on_look=trace.look, or any function")
        self.every: int = every
        self.on_look = on_look
        self._model, self._activations = model, activations
        self._scaler, self._low_dtype = _scaler(scaler), _low_dtype(low_dtype)
        self._tells_skips = scaler if isinstance(scaler, (GradScaler, LossScaleOptimizer)) else None
        self._passes = 0
        self._streak = False  # whether a sample was taken for the skips in a row now
        self._last: Look | None = None
        self._sample: Sample | None = None
        self._forward = ExitStack()
        self._counter = model.register_forward_pre_hook(_Hook(self._count), with_kwargs=True)
        self._bypass: _Bypass | None = _Bypass(model)

    @property
    def last(self) -> Look | None:
        """The latest look; None before there is one. Reads what the latest backward pass has left."""
        if self._bypass is not None:
            self._bypass.warn_if_trained()
        self._settle()
        return self._last

    def close(self) -> None:
        """Leave the model as it was. What a backward pass has left is read first."""
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

    def _count(self, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Count a pass that begins, and sample it if it is time."""
        if torch.compiler.is_compiling():
            _warn_of_compilation()
            return
        if self._bypass is not None:
            self._bypass.remove()
            self._bypass = None
        if not torch.is_grad_enabled() or _is_inside():
            return
        self._settle()
        is_due = self._passes % self.every == 0
        self._passes += 1
        if self._after_skip() or is_due:
            self._begin(args, kwargs)

    def _after_skip(self) -> bool:
        """Return whether the latest step is the first of some that were skipped in a row."""
        before, self._streak = self._streak, _has_skipped(self._tells_skips)
        return self._streak and not before

    def _begin(self, args: Any, kwargs: Any) -> None:
        self._end_forward()
        self._forget()
        inner = inner_of(self._model)
        self._sample = Sample(inner, self._scaler, self._passes - 1, activations=self._activations)
        if inner is self._model and self._activations:
            self._sample.see_input(inner, args, kwargs)  # its call has begun: new hooks on it come too late
        self._forward.enter_context(_eagerly())
        handle = self._model.register_forward_hook(self._end_or_forget(), always_call=True)
        self._forward.callback(handle.remove)
        self._forward.callback(self._sample.end_forward)

    def _end_or_forget(self) -> Callable[..., None]:
        """Return the hook that ends the forward pass. One that raised has no backward pass: forget it."""
        before = sys.exception()

        def hook(*_: Any) -> None:
            self._end_forward()
            if sys.exception() is not before:
                self._forget()

        return hook

    def _end_forward(self) -> None:
        self._forward.close()

    def _forget(self) -> None:
        """Take off the hooks of a sample that no backward pass has come to."""
        if self._sample is not None:
            self._sample.close()
            self._sample = None

    def _settle(self) -> None:
        """Read the sample if its backward pass has come."""
        sample = self._sample
        if sample is None or not sample.in_backward:
            return
        self._sample = None
        sample.close()
        self._last = sample.look(self._low_dtype)
        if self.on_look is not None:
            self.on_look(self._last)


class _Hook:
    """A hook that stays on a module. A copy of the module, or a pickled one, has a hook that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # which takes anything and returns None


class _Bypass:
    """Warns if modules inside a model are called and trained while the model itself is not called.

    It has hooks on them until the first call of the model, or its warning.
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
        """Warn once, if a backward pass has come through one of the parts."""
        if self._trained and self._handles:
            self.remove()
            warnings.warn(self._warning(), stacklevel=level_of_caller("torch"))

    def _note(self, part: torch.nn.Module, _: Any, output: Any) -> None:
        """Note a call of a part, and ask autograd to tell of its backward pass."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _is_inside():
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
    """Return how to write a module inside of a model.

    >>> _access("encoder.layers"), _access("layers.0")
    ('model.encoder.layers', "model.get_submodule('layers.0')")
    """
    is_plain = all(map(str.isidentifier, name.split(".")))
    return f"model.{name}" if is_plain else f"model.get_submodule({name!r})"


def _warn_of_compilation() -> None:
    """Say that a call of the model is part of a larger function that is being compiled."""
    if not is_exporting():
        warnings.warn(
            "Lens(model) records nothing of this call: it is compiled, alone or in a larger function. Write "
            "compiled = torch.compile(model), train that outside of other compiled functions, and write "
            "Lens(compiled).",
            stacklevel=2,
        )


mark_constant(_warn_of_compilation)  # so the compiler runs it once, when it traces the call


def _eagerly() -> AbstractContextManager[Any]:
    """Return a context in which nothing that is compiled runs compiled."""
    if is_compiler_off():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _is_inside() -> bool:
    """Return whether a backward pass computes something again, or `torch.func` transforms the model."""
    return is_in_backward() or is_in_transform()


def _has_skipped(scaler: Any) -> bool:
    """Return whether the latest step was skipped; False where only reading a device would tell."""
    if isinstance(scaler, GradScaler):
        return not scaler._loss_scale.on_device and scaler._has_skipped()
    return scaler is not None and scaler.last_step is not None and scaler.last_step.skipped


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(
            f"model={model!r} is no module. Write Lens(model) for what the training loop calls."
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
            "train that, and look at it: Lens(compiled)."
        )


def _scaler(scaler: Any) -> Any:
    inner = scaler.scaler if isinstance(scaler, LossScaleOptimizer) else scaler
    if inner is None or isinstance(inner, torch.amp.GradScaler):
        return inner
    raise PolicyError(
        f"scaler={scaler!r} has no loss scale. Write scaler=GradScaler(), or a LossScaleOptimizer."
    )


def _low_dtype(low_dtype: Any) -> str | None:
    name = dtype_name(low_dtype) if isinstance(low_dtype, torch.dtype) else low_dtype
    if name is None or (isinstance(name, str) and name in BANDS):
        return name
    raise PolicyError(f"low_dtype={low_dtype!r} is unknown. Write one of {', '.join(map(repr, BANDS))}.")
