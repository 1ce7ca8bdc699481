"""Record one forward and backward pass with hooks: inputs, weights, outputs, and gradients of both kinds."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from preamp.arrays.torch_compat import is_in_backward, is_in_transform, tree_leaves
from preamp.recipes import Recipe
from preamp.record.exponents import BANDS
from preamp.record.snapshots import Kind, Snapshot, SnapshotRow
from preamp.torch.autocasting.quantized import watching
from preamp.torch.lens import histograms
from preamp.torch.lens.operands import Call, Operands


class _Known(NamedTuple):
    """A tensor that was counted, with its version at that time."""

    tensor: weakref.ref[Tensor]
    version: int | None
    counts: histograms.Counts

    def is_still(self, tensor: Tensor) -> bool:
        return self.tensor() is tensor and self.version == _version(tensor)


class PassRecorder:
    """Records one forward pass and the backward passes through it.

    Args:
        model: whose modules are recorded.
        scaler: a `GradScaler` of preamp or PyTorch; None for a scale of 1.
        index: the number of the step, for a scaler that does not count steps.
        activations: whether inputs, weights, outputs and quantized operands are counted, besides gradients.

    Attributes:
        in_backward: True from the first gradient on.
    """

    def __init__(
        self, model: torch.nn.Module, scaler: torch.amp.GradScaler | None, index: int, *, activations: bool
    ) -> None:
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._model, self._scaler, self._activations = model, scaler, activations
        self._counts: dict[tuple[str, Kind, torch.dtype], histograms.Counts] = {}
        self._known: dict[int, _Known] = {}  # an output is not counted again as the input of the next module
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}
        self._with_weights: tuple[set[str], set[int]] = set(), set()  # modules by name, and parameters by id
        self._operands = Operands()
        self._running = [id(model)]  # the modules that run, outermost first; the model runs already
        self._unwatched = _owned(model)
        self._parameter_handles: list[RemovableHandle] = []
        self._autocast: torch.dtype | None = None
        self._scale: float | Tensor = 1.0
        self._index: int | Tensor = index
        self._open = True
        self.in_backward = False
        self._handles: list[RemovableHandle] = [
            register_module_forward_hook(self._record_output, always_call=True)  # so that `_running` is right
        ]
        if activations:
            self._handles += [
                module.register_forward_pre_hook(self.record_input, with_kwargs=True)
                for module in model.modules()
                if _computes(module)
            ]
            watch = RemovableHandle(watching)
            watching[watch.id] = self._watched
            self._handles += [register_module_forward_pre_hook(self._enter), watch]

    def record_input(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the arguments of a module and its parameters, if it computes something itself."""
        name = self._modules.get(id(module))
        if name is not None and _computes(module):
            for tensor in tensors_in((args, kwargs)):
                self._add(name, "input", tensor)
            self._record_weights(name, module)

    def end_forward(self) -> None:
        """Remove the hooks from the modules."""
        _remove(self._handles)
        for name, module in self._model.named_modules():
            # Parameters can be used without a call of the module that owns them.
            self._watch_parameters(name, module)
            if self._activations:
                self._record_weights(name, module)

    def close(self) -> None:
        """Remove all hooks. Nothing is recorded afterwards."""
        self._open = self._operands.is_open = False
        _remove(self._handles)
        _remove(self._parameter_handles)
        self._known.clear()
        self._outputs.clear()

    def snapshot(self, low_dtype: str | None) -> Snapshot:
        """Read all counts, in one transfer."""
        numbers = self._scale, self._index
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        tensors += self._operands.numbers()
        measured, on_host = histograms.read(list(self._counts.values()), tensors)
        rest = iter(on_host)
        scale, index = (next(rest) if isinstance(number, Tensor) else number for number in numbers)
        rows = [
            SnapshotRow(name, what, dtype_name(dtype), one.histogram, one.smallest, one.largest, one.nans)
            for (name, what, dtype), one in zip(self._counts, measured, strict=True)
        ]
        return Snapshot(
            int(index),
            scale,
            low_dtype or self._low_dtype(),
            rows=tuple(row for row in rows if row.what not in ("input", "weight")),
            inputs=tuple(row for row in rows if row.what == "input"),
            weights=tuple(row for row in rows if row.what == "weight"),
            quantized=tuple(self._operands.rows(list(rest))),
        )

    def _low_dtype(self) -> str:
        computed = (dtype for _, what, dtype in self._counts if what not in ("input", "weight"))
        names = set(map(dtype_name, computed))
        if self._autocast is not None and dtype_name(self._autocast) in BANDS:
            return dtype_name(self._autocast)
        return next((name for name in BANDS if name in names and name != "float32"), "float16")

    def _record_weights(self, name: str, module: torch.nn.Module) -> None:
        """Count the parameters that a module itself owns, each parameter once."""
        modules, parameters = self._with_weights
        if name in modules:  # its parameters may be other objects now, as under FSDP
            return
        modules.add(name)
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in parameters or not _is_numeric(parameter):
                continue
            if not (parameter.is_meta or is_lazy(parameter)):
                parameters.add(id(parameter))
                self._add(name, "weight", parameter)

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        self._running.append(id(module))

    def _watched(self, recipe: Recipe) -> Call | None:
        """Return what counts the operands of a linear layer's call; None outside of the model's modules."""
        name = self._modules.get(self._running[-1])
        return None if name is None or is_inside() else Call(self._operands, name, recipe)

    def _record_output(self, module: torch.nn.Module, _: object, output: object) -> None:
        if self._running[-1] == id(module) and len(self._running) > 1:
            self._running.pop()
        name = self._modules.get(id(module))
        if name is not None:
            self._watch_parameters(name, module)
            for tensor in tensors_in(output):
                if self._is_new(tensor):
                    self._record_tensor(name, tensor)

    def _watch_parameters(self, name: str, module: torch.nn.Module) -> None:
        """Look at the gradients of the parameters that a module owns.

        Under FSDP they have gradients only as the tensors that they are while the module runs.
        """
        for own in self._unwatched.pop(name, ()):
            parameter = module._parameters.get(own)
            if parameter is not None and parameter.requires_grad:
                hook = partial(self._record_gradient, name, "gradient")
                self._parameter_handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def _record_tensor(self, name: str, tensor: Tensor) -> None:
        device = tensor.device.type
        if self._autocast is None and torch.is_autocast_enabled(device):
            self._autocast = torch.get_autocast_dtype(device)
        if self._activations:
            self._add(name, "activation", tensor)
        if tensor.requires_grad and tensor.dim():  # a model's own loss has the loss scale for a gradient
            tensor.register_hook(partial(self._record_gradient, name, "flow"))  # type: ignore[no-untyped-call]

    def _record_gradient(self, name: str, what: Kind, gradient: Tensor) -> None:
        if self._open:
            if not self.in_backward:
                self.in_backward = True
                self._record_scale()
            self._add(name, what, gradient)

    def _add(self, name: str, what: Kind, tensor: Tensor) -> None:
        key = name, what, tensor.dtype
        counts = self._count(tensor) if what in ("input", "activation") else histograms.count(tensor)
        self._counts[key] = histograms.add(self._counts[key], counts) if key in self._counts else counts

    def _count(self, tensor: Tensor) -> histograms.Counts:
        """Count a tensor, unless that was done already: most inputs are outputs of another module."""
        known = self._known.get(id(tensor))
        if known is None or not known.is_still(tensor):
            known = _Known(weakref.ref(tensor), _version(tensor), histograms.count(tensor))
            self._known[id(tensor)] = known
        return known.counts

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether no module inside this one has returned the same tensor with the same values."""
        known, version = self._outputs.get(id(tensor)), _version(tensor)
        if known is not None and known[0]() is tensor and known[1] == version:
            return False
        self._outputs[id(tensor)] = weakref.ref(tensor), version
        return True

    def _record_scale(self) -> None:
        """Keep the scale that is in the loss, before the scaler's next update changes it. Reads nothing."""
        scaler = self._scaler
        if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
            self._scale = scaler._scale.clone()
        index = getattr(scaler, "steps", self._index)
        self._index = index.clone() if isinstance(index, Tensor) else index


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def is_inside() -> bool:
    """Return whether a backward pass recomputes something, or `torch.func` transforms the model."""
    return is_in_backward() or is_in_transform()


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as "float16"."""
    return str(dtype).removeprefix("torch.")


def inner_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's model inside `torch.compile`'s module and those of data parallelism."""
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    inner = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", model)
    return model if inner is model else inner_of(inner)


def _computes(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters of its own or no submodules."""
    owns = any(parameter is not None for parameter in module._parameters.values())
    return owns or next(module.children(), None) is None


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None for tensors of inference mode, which have no counter."""
    return None if tensor.is_inference() else tensor._version


def _is_numeric(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _owned(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each module, each parameter once, for the first that owns it."""
    found = set()
    owned: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter not in found:
                found.add(parameter)
                owned.setdefault(name, []).append(own)
    return owned


def tensors_in(outputs: object) -> Iterator[Tensor]:
    """Yield the floating-point and complex tensors in the outputs of a module."""
    for leaf in [outputs] if isinstance(outputs, Tensor) else tree_leaves(outputs):
        if isinstance(leaf, Tensor) and _is_numeric(leaf):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
