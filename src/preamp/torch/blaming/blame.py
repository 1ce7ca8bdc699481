"""`blame`: one step in low precision against float32, operator call by operator call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from preamp.arrays import torch_compat as compat
from preamp.autocasting.blame import Blame, BlameRow, ranked
from preamp.autocasting.tables import Casting
from preamp.checks import positive, shown
from preamp.errors import UsageError
from preamp.torch.autocasting.region import autocast
from preamp.torch.blaming.recorder import Recorder, size_of
from preamp.torch.blaming.tallies import Place, norm_of
from preamp.torch.running_modules import RunningModules
from preamp.torch.scaling.unscaled import watch

FIRST_SCALE = 2.0**16  # with which dynamic loss scaling starts
MEASURED = 3  # rows that are measured by themselves
ATTEMPTS = 4  # to find a loss scale with which nothing overflows


def blame(
    loss_fn: Callable[..., Tensor],
    *args: Any,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.bfloat16,
    casting: Casting | None = None,
    emulate: bool = True,
    loss_scale: float | None = None,
    seed: int = 0,
) -> Blame:
    """Run one step in low precision and in float32, and say which operator call loses what.

    Args:
        loss_fn: returns the loss, a floating-point tensor with one element, and does not call `backward()`.
            It is called once, once more for each of the worst accused rows (at most three), and again with a
            smaller loss scale where one is looked for. So it has to do the same in each call.
        args: what it is called with.
        model: the model, whose paths the rows and the rules of modules in `casting` name. Without, paths
            begin with the class of the outermost module.
        dtype: the low precision: torch.bfloat16, torch.float16, or, with `emulate`, a float8.
        casting: the edits of autocast's table; None for none.
        emulate: whether products round to the low precision in float32, as a tensor core does, and everything
            else stays in float32 unless the program itself casts; as `autocast(emulate=True)`. False computes
            as autocast does on this device.
        loss_scale: what the loss is multiplied by before its backward pass. None takes what dynamic loss
            scaling would come to: for float16 the largest power of two up to 2**16 with which no gradient
            overflows; 1 for other formats.
        seed: of the noise on the weights with which effects are estimated.

    Returns:
        The rows, worst first, and which of them are accused. `print` shows them as a table.

    Raises:
        UsageError: for a function that cannot be compared, with the reason.
        CastingError: for a table or dtype that autocast refuses.

    What is compared: each call's result with what float32 gives for the very same inputs, and the gradients
    of its inputs in the same way. Its effect is what this difference changes the gradients by, to first
    order, estimated for all calls together from the gradients at weights with 2**-7 noise. The order of
    summation inside of an operator is not varied. Integers, comparisons and random numbers are those of the
    step in low precision. All weights, buffers, gradients and random states are left as they were. Compiled
    functions run eagerly.

    It costs 3.7 steps in float32, and 2.3 more for each row that is measured by itself; memory is that of two
    steps in float32. Numbers of forward and backward products; docs/eyes.md has times.

    >>> model = nn.Linear(8, 1)
    >>> found = blame(lambda x: model(x).square().mean(), torch.ones(4, 8), model=model, dtype=torch.float16)
    >>> found.guilty
    []
    """
    _check(loss_fn, model, loss_scale)
    step = _Step(loss_fn, args, model, dtype, casting, emulate, seed)
    scale = FIRST_SCALE if loss_scale is None and dtype is torch.float16 else float(loss_scale or 1.0)
    notes = step.notes()
    found = step.run(scale)
    for _ in range(ATTEMPTS):
        high = [row for row in found.rows if row.direction == "backward" and row.overflowed]
        if loss_scale is not None or not high:
            break
        peak = max(row.peak / row.limit for row in high)
        scale *= min(0.5, 2.0 ** -math.ceil(math.log2(peak)))
        found = step.run(scale)
    if loss_scale is None and dtype is torch.float16 and scale != FIRST_SCALE:
        notes.append(f"The loss scale is {scale:g}: gradients overflow with {FIRST_SCALE:g}.")
    rows = list(found.rows)
    for at, row in enumerate(rows[:MEASURED]):
        if row.guilty:
            rows[at] = step.measured(row, scale)
    return replace(found, rows=rows, notes=(*notes, *found.notes))


class _Step:
    """The step to run, in any number of runs."""

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        args: tuple[Any, ...],
        model: nn.Module | None,
        dtype: torch.dtype,
        casting: Casting | None,
        emulate: bool,
        seed: int,
    ) -> None:
        self._loss_fn, self._args, self._model = loss_fn, args, model
        self._dtype, self._casting, self._emulate, self._seed = dtype, casting, emulate, seed
        tensors = [leaf for leaf in compat.tree_leaves(args) if isinstance(leaf, Tensor)]
        if model is not None:
            tensors = [*model.parameters(), *tensors]
        self._device_type = next((tensor.device.type for tensor in tensors), "cpu")

    def notes(self) -> list[str]:
        """Return sentences about how the step is run."""
        modules = [] if self._model is None else list(self._model.modules())
        is_compiled = compat.is_compiled(self._loss_fn) or any(map(compat.is_compiled, modules))
        return ["What is compiled was run eagerly."] if is_compiled else []

    def run(self, loss_scale: float) -> Blame:
        """Return the rows of all calls."""
        recorder, losses = self._recorded(loss_scale, None)
        norm = math.sqrt(sum(size**2 * squares for size, squares in self._backward(recorder, losses)))
        exact, loss = losses["exact"].item(), losses["low"].item()
        size = next((abs(value) for value in (exact, loss) if math.isfinite(value)), 1.0)
        rows = [tally.row(place, norm, size) for place, tally in recorder.tallies.items()]
        changes = sum(tally.loss_change for tally in recorder.tallies.values())
        return Blame(
            ranked(rows, torch.finfo(self._dtype).eps / 2, emulated=self._emulate),
            str(self._dtype).removeprefix("torch."),
            loss,
            exact,
            exact + changes,
            loss_scale,
            tuple(recorder.failures),
        )

    def measured(self, row: BlameRow, loss_scale: float) -> BlameRow:
        """Return a row with the parameter whose gradient it changes most."""
        place = Place(row.module, row.operator, row.source, row.direction)
        recorder, losses = self._recorded(loss_scale, place)
        worst = max(self._differences(recorder, losses), default=(0.0, ""))
        return replace(row, parameter=worst[1], parameter_error=worst[0]) if worst[0] else row

    def _recorded(self, loss_scale: float, alone: Place | None) -> tuple[Recorder, dict[str, Tensor]]:
        """Run the step's forward pass; return the loss in each world."""
        modules = RunningModules(self._model, lambda module: recorder.keep(list(module.buffers())))
        recorder = Recorder(self._device_type, loss_scale, modules, self._seed, alone)
        recorder.keep([] if self._model is None else list(self._model.buffers()))
        with ExitStack() as stack:
            stack.callback(recorder.put_back)
            stack.enter_context(_prepared(recorder))
            stack.enter_context(
                autocast(
                    self._device_type,
                    self._dtype,
                    cache_enabled=False,
                    casting=self._casting,
                    model=self._model,
                    emulate=self._emulate,
                )
            )
            modules.follow()
            stack.callback(modules.leave)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recorder)
            loss = self._loss_fn(*self._args)
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
            raise UsageError(
                f"The function to blame returned {shown(loss)}, and not a loss. Return a floating-point "
                "tensor with one element."
            )
        if loss not in recorder.here or not recorder.here.of(loss).requires_grad:
            raise UsageError(
                "The loss does not depend on a tensor that requires gradients, through calls of PyTorch's. "
                "Compute it inside of the function to blame, from the parameters themselves."
            )
        return recorder, {
            "low": loss.detach(),
            **{name: world.of(loss) for name, world in recorder.worlds.items()},
        }

    def _backward(self, recorder: Recorder, losses: dict[str, Tensor]) -> list[tuple[float, float]]:
        """Run the backward passes; return each parameter's size and the square of its gradient's norm."""
        found: list[tuple[float, float]] = []

        def arrived(leaf: Tensor) -> None:
            gradient = _taken(leaf)
            found.append((size_of(leaf), norm_of(gradient) ** 2))

        for _, leaf in recorder.here.leaves:
            leaf.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        for _, leaf in recorder.there.leaves:
            leaf.register_post_accumulate_grad_hook(_freed)  # type: ignore[no-untyped-call]
        _run_backward(losses)
        return found

    def _differences(self, recorder: Recorder, losses: dict[str, Tensor]) -> list[tuple[float, str]]:
        """Run the backward passes; return how much each parameter's gradient differs, and its name."""
        found: list[tuple[float, str]] = []
        waiting: dict[int, Tensor] = {}

        def arrived(at: int, name: str, is_here: bool, leaf: Tensor) -> None:
            gradient, other = _taken(leaf), waiting.pop(at, None)
            if other is None:
                waiting[at] = gradient
                return
            here = gradient if is_here else other
            size = here.double().norm().item()
            found.append(((gradient - other).double().norm().item() / size if size else 0.0, name))

        for world, leaves in (("here", recorder.here.leaves), ("there", recorder.there.leaves)):
            for at, (tensor, leaf) in enumerate(leaves):
                hook = _Arrived(arrived, at, self._name(tensor), world == "here")
                leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        _run_backward(losses)
        return found

    def _name(self, parameter: Tensor) -> str:
        named = [] if self._model is None else self._model.named_parameters()
        shape = tuple(parameter.shape)
        return next((name for name, each in named if each is parameter), f"a tensor of shape {shape}")


class _Arrived:
    """Calls a function with what it is about and a leaf."""

    def __init__(self, function: Callable[..., None], *about: Any) -> None:
        self._function, self._about = function, about

    def __call__(self, leaf: Tensor) -> None:
        self._function(*self._about, leaf)


def _check(loss_fn: object, model: object, loss_scale: object) -> None:
    if not callable(loss_fn):
        raise UsageError(f"{shown(loss_fn)} is not a function. Write blame(loss_fn, *args, model=model).")
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"model={shown(model)} is not a module. Write model=model, or leave it out.")
    if loss_scale is not None:
        positive("loss_scale", loss_scale, "loss_scale=scaler.get_scale()")


def _run_backward(losses: dict[str, Tensor]) -> None:
    roots = [losses[name].sum() for name in ("here", "there") if losses[name].requires_grad]
    torch.autograd.backward(roots)


def _freed(leaf: Tensor) -> None:
    leaf.grad = None


def _taken(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf, which then has none."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


@contextmanager
def _prepared(recorder: Recorder) -> Iterator[None]:
    """See what function modes do not see, run what is compiled eagerly, and put random states back."""
    original, was_on = torch.autograd.Function.__dict__["apply"], watch.is_on
    devices = range(torch.cuda.device_count()) if recorder.device_type == "cuda" else []

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # which would run what it is given without its gradients
            run, _, *given = args
            return run(*given)

        def call(*inner: Any, **named: Any) -> Any:
            return original.__func__(cls, *inner, **named)

        call.__name__ = cls.__name__
        return recorder.apply(call, args, kwargs)

    watch.is_on = False  # no scaler is at work here, and no optimizer
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        with torch.random.fork_rng(devices), compat.run_eagerly():
            yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
        watch.is_on = was_on
