"""Runs a step in low precision and, call by call, in float32 on the very same inputs, forward and backward.

The program computes with its own tensors, in low precision. Beside each of them there are copies in float32:

- `here`: each call is made on the copies of its inputs, and what the program's result differs in is added to
  the copy of the result. So a copy has the program's value, every call is compared on the same inputs, and
  autograd's graph of the copies has the gradients that float32 would compute here.
- `there`: the same a little aside, at weights with some noise. The same differences are added, so that how
  much a gradient, or a value, changes from here to there says how much the gradients of the weights change
  with what a call differs in. Both are the same second derivative of the loss.
- `exact`: nothing is added, no gradients. It is the step in float32.

The backward pass of a call in low precision is run when its gradient arrives, and compared with float32's.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

import preamp
from preamp.arrays import torch_compat as compat
from preamp.autocasting.report import OUTSIDE
from preamp.autocasting.report import place as in_words
from preamp.autocasting.tables import DEFAULT
from preamp.blaming.blame import ITSELF, MODEL, ProductOf
from preamp.errors import UsageError
from preamp.recipes import Recipe
from preamp.torch.autocasting import modes, operators, rules
from preamp.torch.autocasting.modes import TorchAutocast
from preamp.torch.autocasting.weight_cache import is_cached
from preamp.torch.blaming import calls
from preamp.torch.blaming.calls import LOW, is_tracked, raised
from preamp.torch.blaming.nonfinite import Search, Unrepaired, what_is_in
from preamp.torch.blaming.saved import Kept, Packed, Saved, difference_of, packed, unpacked
from preamp.torch.blaming.tallies import Errors, Place, Tally, sum_of
from preamp.torch.running_modules import RunningModules

STEP = 2.0**-7  # how far aside `there` is in float16 and bfloat16
# Whose lines are not the program's.
HIDDEN = (*torch.__path__, *preamp.__path__, contextlib.__file__, "<")
NEGLIGIBLE = 1e-3  # of the error of a gradient that was inherited
SHARDED = (
    "Each rank may run the step another number of times, and would then wait for the others forever. Write "
    "blame(...) before fully_shard(model) and parallelize_module(model), on one rank, with a smaller batch."
)
REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError)


class Finished(BaseException):
    """Ends the program at its first `backward()`. It is not an `Exception`, so that programs do not catch it.

    Attributes:
        loss: whose backward pass it would be.
    """

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self.loss = loss


class Gate:
    """What the gradients do where the program stops them: at `detach()` and under `no_grad`.

    Closed, they end there, and the gradients are those of the step. Open, they pass, because what a call
    differs in changes the gradients by this road, too.

    Attributes:
        is_open: whether they pass.
        is_used: whether there is such a place.
    """

    def __init__(self) -> None:
        self.is_open = self.is_used = False

    def __call__(self, copy: Tensor) -> Tensor:
        """Return a copy behind the gate."""
        if not copy.requires_grad:
            return copy
        self.is_used = True
        behind: Tensor = _Gated.apply(copy, self)  # type: ignore[no-untyped-call]
        return behind


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copy: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        return copy.clone()  # a view could not be written into

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient if ctx.gate.is_open else None), None


class World:
    """A copy in float32 of each tensor of the program.

    Attributes:
        leaves: the copies of tensors that the program did not compute and that require gradients, each with
            the program's.
        addresses: of the memory of the leaves.
        written: the weights that the program wrote into before it used them. They get their values back
            before the backward pass, so their copies have values of their own.
    """

    def __init__(
        self, noise: torch.Generator | None = None, step: float = STEP, *, gradients: bool = True
    ) -> None:
        self._noise, self._step = noise, step
        self._gradients = gradients
        self._copies: Any = WeakTensorKeyDictionary()
        self.written: Any = WeakTensorKeyDictionary()
        self.leaves: list[tuple[Tensor, Tensor]] = []
        self.addresses: set[int] = set()

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor."""
        if tensor not in self._copies:
            self._copies[tensor] = self._leaf(tensor)
        copy: Tensor = self._copies[tensor]
        return copy

    def __setitem__(self, tensor: Tensor, copy: Tensor) -> None:
        self._copies[tensor] = copy

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._copies

    def forget(self) -> None:
        """Let go of all copies but the leaves."""
        self._copies = WeakTensorKeyDictionary()

    def _leaf(self, tensor: Tensor) -> Tensor:
        value = tensor.detach()
        if not tensor.requires_grad:  # a buffer, which a call may write into
            return raised(value).clone()
        copy = raised(value).clone() if tensor in self.written else raised(value)
        if self._noise is not None:
            noise = torch.randn(copy.shape, generator=self._noise, dtype=torch.float32)
            copy = copy + self._step * size_of(copy) * noise.to(copy)
        if self._gradients:
            copy = copy.detach().requires_grad_()
            self.leaves.append((tensor, copy))
            self.addresses.add(copy.untyped_storage().data_ptr())
        return copy


def size_of(weight: Tensor) -> Tensor:
    """Return the magnitudes of a weight's values; where all are zero, that of a usual weight of its shape."""
    size = weight.detach().abs()
    return size if size.any() else torch.full_like(size, 1 / math.sqrt(max(1, *weight.shape)))


class State(NamedTuple):
    """What decides in which precision a call runs: autocast's state, and the edits that hold."""

    enabled: bool
    dtype: torch.dtype
    key: str
    at: modes.At | None

    @classmethod
    def now(cls, device_type: str) -> State:
        """Return the state of this thread."""
        mode = modes.current(device_type)
        return cls(
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            mode.key if mode else modes.NONE,
            mode.at if mode else None,
        )

    @contextmanager
    def restored(self, device_type: str) -> Iterator[None]:
        """Run in this state."""
        edits = modes.in_force(device_type, self.key, self.at) if self.key else nullcontext()
        with (
            TorchAutocast(device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False),
            edits,
        ):
            yield


class Call:
    """A call in low precision: what its results differ in, and what its backward pass in low precision needs.

    Attributes:
        deltas: what each of its results differs in, None where in nothing; empty if none differs.
        limit: the largest number of its lowest precision.
        is_low: whether it has low precision in it; else it is compared for what is not finite alone.
        unrepaired: the inputs, by place, in which the program has inf or NaN that was replaced here.
        zeros: the rows that lost values of its inputs to zero.
        losers: its own row, if it lost values to zero.
        suspects: the rows that make its results not finite, as in `Unrepaired`.
        recipe: by which its products are quantized; None if they are not.
    """

    def __init__(
        self,
        recorder: Recorder,
        func: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
        inputs: Sequence[int],
        written: int | None,
        low: Sequence[torch.dtype],
    ) -> None:
        self.limit = min(torch.finfo(dtype).max for dtype in (*low, torch.float32))
        self.is_low = bool(low)
        self.unrepaired: dict[int, Unrepaired] = {}
        self.zeros: dict[Place, str] = {}
        self.losers: dict[Place, str] = {}
        self.suspects: dict[Place, str] = {}
        self.place: Place
        self._recorder, self._func, self._spec = recorder, func, spec
        self._written = written
        self._inputs, self._dtypes = inputs, [leaves[at].dtype for at in inputs]
        self._leaves = [None if at in inputs else leaf for at, leaf in enumerate(leaves)]
        self._state = State.now(recorder.device_type)
        self.recipe: Recipe | None = None
        self.deltas: list[Tensor | Packed | None] = []
        self.flops = 0
        self.forward: Callable[[], Tally]
        self.backward: Callable[[Place], Tally]
        self._inputs_kept: dict[int, tuple[Tensor, Kept]] = {}  # here and there
        self._wanted: list[tuple[int, int]] = []  # the place of an input, and the version of its copy
        self._gradients: dict[str, Sequence[Tensor | None]] = {}
        self._low: dict[int, Tensor] = {}
        self._inherited = self._gone = 0.0
        self._counted: set[Place] = set()

    def backward_place(self, place: int | None = None) -> Place:
        """Return the row of its backward pass, or of the product that the gradient of an input is."""
        product: ProductOf = ""
        if self.place.product and place is not None and place < 2:
            product = "wgrad" if place else "dgrad"
        return self.place._replace(direction="backward", product=product)

    def view_of_input(self, place: int, copy: Tensor, *, replace: bool) -> Tensor:
        """Return a view of the copy of an input, through which the gradient of this call alone passes.

        Args:
            place: which input it is.
            copy: its copy.
            replace: pass the gradient in low precision on, and do not count what it differs in.
        """
        view = copy.view_as(copy)
        # Before the call: PyTorch crashes at a hook on a view whose base has been written into.
        view.register_hook(partial(self._at_input, place, replace))  # type: ignore[no-untyped-call]
        self._wanted.append((place, copy._version))
        return view

    def keep_inputs(self, here: Sequence[Tensor], there: Sequence[Tensor]) -> None:
        """Keep the copies of its inputs, here and aside, to compare their gradients."""
        for place, (copy, moved) in enumerate(zip(here, there, strict=True)):
            base = copy.detach()
            self._inputs_kept[place] = base, self._recorder.saved.kept(moved.detach(), base)

    def keep_results(self, world: str, results: Sequence[Tensor]) -> None:
        """Look at the gradients of its results in a world."""
        needed = [place for place, result in enumerate(results) if result.requires_grad]
        arrived = partial(self._at_results, world, len(results), needed)
        if len(needed) == 1:
            results[needed[0]].register_hook(lambda gradient: arrived([gradient]))  # type: ignore[no-untyped-call]
        elif needed:
            torch.autograd.graph.register_multi_grad_hook([results[place] for place in needed], arrived)

    def _at_results(
        self, world: str, count: int, needed: Sequence[int], given: Sequence[Tensor | None]
    ) -> None:
        gradients: list[Tensor | None] = [None] * count
        for place, gradient in zip(needed, given, strict=True):
            gradients[place] = None if gradient is None else gradient.detach()
        if world == "here" and self._recorder.counts_backward:
            self._run_backward(gradients)
        if not self.deltas or not self._recorder.counts_forward:
            return
        if world == "here":
            self._add_to_loss(gradients)
        self._gradients[world] = gradients
        if len(self._gradients) == 2:
            pairs = zip(self.deltas, self._gradients["here"], self._gradients["there"], strict=True)
            for delta, here, there in pairs:
                if delta is not None and here is not None and there is not None:
                    self.forward().add_effect(
                        there - here, unpacked(delta, here), scale=1 / self._recorder.step
                    )
            self._gradients.clear()
            self.deltas = []

    def _add_to_loss(self, gradients: Sequence[Tensor | None]) -> None:
        for delta, gradient in zip(self.deltas, gradients, strict=False):  # there may be none
            if delta is not None and gradient is not None:
                self.forward().loss_change += sum_of(gradient.conj() * unpacked(delta, gradient))

    def _run_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute the gradients of its inputs in low precision."""
        kept, self._inputs_kept = self._inputs_kept, {}
        wanted = [place for place, version in self._wanted if kept and kept[place][0]._version == version]
        if not wanted:
            return
        bases = [kept[place][0] for place in range(len(self._inputs))]
        try:
            found = self._low_gradients(bases, wanted, gradients)
            if self.unrepaired:
                given = [
                    self.unrepaired[place].value if place in self.unrepaired else base
                    for place, base in enumerate(bases)
                ]
                changed = self._low_gradients(given, wanted, gradients)
                if any(what_is_in(changed[place]) and not what_is_in(found[place]) for place in found):
                    self._recorder.confirm(self.unrepaired.values())
        except REFUSALS as error:
            self._recorder.note_failure(self._func, "backward", error)
            return
        self._low |= found
        self._inputs_kept = {place: kept[place] for place in found}

    def _low_gradients(
        self, inputs: Sequence[Tensor], wanted: Sequence[int], gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor]:
        """Return the gradients of the inputs at some places, computed in low precision."""
        leaves = list(self._leaves)
        lows: dict[int, Tensor] = {}
        for place, at in enumerate(self._inputs):
            low = leaves[at] = inputs[place].to(self._dtypes[place], copy=place == self._written).detach()
            if place in wanted:
                lows[place] = low.requires_grad_()
        args, kwargs = compat.tree_unflatten(leaves, self._spec)
        with self._state.restored(self._recorder.device_type), torch.enable_grad():
            value = self._func(*args, **kwargs)
        if self._written is not None:
            value = leaves[self._inputs[self._written]]
        pairs = [
            (low, self._rounded(gradient, low.dtype))
            for low, gradient in zip(_tracked(value), gradients, strict=True)
            if gradient is not None and low.requires_grad
        ]
        if not pairs:
            return {}
        results, rounded = zip(*pairs, strict=True)
        found = torch.autograd.grad(results, list(lows.values()), rounded, allow_unused=True)
        return {place: gradient for place, gradient in zip(lows, found, strict=True) if gradient is not None}

    def _rounded(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a scaled gradient in the dtype of its result.

        The call that computed this gradient rounded it, and is charged for that. Here it is inherited.
        """
        scale = self._recorder.loss_scale
        if dtype not in LOW:
            return (gradient * scale).to(dtype)
        limit = torch.finfo(dtype).max
        rounded = (gradient * scale).clamp(-limit, limit).to(dtype)
        before = Errors.between(rounded.to(gradient) / scale, gradient, math.inf)
        self._inherited = max(self._inherited, before.relative)
        self._gone = max(self._gone, before.lost_share)
        return rounded

    def _at_input(self, place: int, replace: bool, gradient: Tensor | None) -> Tensor | None:
        low = self._low.pop(place, None)
        base, there = self._inputs_kept.pop(place, (None, None))
        if low is None or gradient is None or base is None or there is None:
            return None
        gradient, scale = gradient.detach(), self._recorder.loss_scale
        errors = Errors.between(low.to(gradient, copy=True).div_(scale), gradient, self.limit / scale)
        if errors.delta is None:
            return None
        row = self.backward_place(place)
        if replace:
            return gradient + errors.delta if row == self._recorder.alone else None
        # Two roundings, one after the other, add up in squares.
        own = math.sqrt(max(0.0, errors.relative**2 - self._inherited**2)) / errors.relative
        if own < NEGLIGIBLE and not errors.overflowed:
            return None
        tally = self.backward(row)
        if row not in self._counted:
            tally.calls += 1
            tally.flops += self.flops if row.product else 2 * self.flops
        self._counted.add(row)
        tally.add(errors, own=own, inherited=self._gone, scale=scale)
        moved = difference_of(there, base).to(gradient)
        tally.add_effect(moved, errors.delta, scale=own / self._recorder.step)
        return None


class Recorder(TorchFunctionMode):
    """Runs a program's calls in low precision and in float32, and counts what they differ in.

    Attributes:
        device_type: whose tensors autocast casts.
        loss_scale: what gradients in low precision are multiplied by.
        tallies: the rows so far.
        failures: sentences about calls that could not be compared.
        layers: the modules that call a linear layer in a step with a recipe, and the shapes of their weights.
        flops: the floating-point operations of all products in the forward pass.
        low_flops: those in low precision.
        gate: what gradients do where the program stops them.
        counts_forward: whether what results differ in is counted while a backward pass runs.
        counts_backward: whether what gradients differ in is.
        search: follows inf and NaN through the step, for which all calls are compared; None does not.
        repaired: whether something was not finite, and another number was taken instead.
        takes_scale: whether the scale of a scaler that the program calls becomes the loss scale.
        uses: how often calls use the cast of a weight that PyTorch's autocast would cache, by its name.
    """

    def __init__(
        self,
        device_type: str,
        loss_scale: float,
        modules: RunningModules,
        seed: int,
        alone: Place | None = None,
        search: Search | None = None,
        *,
        in_float32: bool = False,
        recipe: Recipe | None = None,
        step: float = STEP,
    ) -> None:
        """Make a recorder for one run.

        Args:
            device_type: whose tensors autocast casts.
            loss_scale: what gradients in low precision are multiplied by.
            modules: which module is running.
            seed: of the noise on the weights of `there`.
            alone: a row. `there` then has the weights of `here`, and the gradients of its leaves differ from
                those of `here` by what this row does. Nothing else is counted.
            search: what follows inf and NaN.
            in_float32: nothing is compared, so that `here` is the step in float32, with its gradients.
            recipe: that of the step, or whose high precision the step has. Linear layers then have a row for
                each of their products.
            step: how far aside `there` is, relative to each value of a weight: about as far as the step's
                errors go, because where a ReLU's input changes its sign they are not proportional.
        """
        super().__init__()
        self.device_type, self.loss_scale = device_type, loss_scale
        self.tallies: dict[Place, Tally] = {}
        self.failures: dict[str, None] = {}
        self.layers: dict[str, tuple[int, int]] = {}
        self.flops = self.low_flops = 0
        self.alone = alone
        self._modules, self._in_float32, self._recipe = modules, in_float32, recipe
        self.search = search
        self._thread = threading.get_ident()
        noise = torch.Generator().manual_seed(seed) if alone is None else None
        self.step = step
        self.here, self.there, self.exact = World(), World(noise, step), World(gradients=False)
        self.worlds = {"here": self.here, "there": self.there, "exact": self.exact}
        self.saved = Saved(self.there.addresses)
        self._checked = operators.checked_functions()
        self.gate = Gate()
        self.counts_forward = self.counts_backward = True
        self.repaired = self.takes_scale = False
        self.uses: Counter[str] = Counter()
        # By tensor: whether it requires gradients in the program, and whether it is behind the gate.
        self._required: Any = WeakTensorKeyDictionary()
        self._behind: Any = WeakTensorKeyDictionary()
        self._inside: list[Callable[..., Any]] = []
        from preamp.torch.flops import FlopCounter  # imports PyTorch's flop counter, and that Triton

        self._flop_counter = FlopCounter
        self._index = 0
        self._put_back: list[tuple[Tensor, Tensor]] = []
        self._hooks: list[Any] = []

    def watch(self, leaf: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Call a function with a leaf when its gradient has arrived, until `release`."""
        self._hooks.append(leaf.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Let go of the copies. Python does not find the circles through hooks of autograd's graph."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for world in self.worlds.values():
            world.forget()

    def note_failure(self, func: Callable[..., Any], what: str, error: Exception) -> None:
        """Note that a call could not be compared."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.failures[f"{calls.operator_of(func)} could not be compared in the {what} pass: {reason}"] = None

    def confirm(self, found: Iterable[Unrepaired]) -> None:
        """Note rows without whose inf and NaN the loss or a gradient would be another."""
        if self.search is not None:
            for each in found:
                self.search.confirmed |= each.suspects

    def judge(self, *, in_low_precision: bool) -> None:
        """Forget the overflows that change neither the loss nor a gradient, as those of an infinite mask.

        Args:
            in_low_precision: whether the loss and the gradients are finite in float32; else nothing is known.
        """
        if self.search is None:
            return
        confirmed = self.search.confirmed if in_low_precision else {}
        if in_low_precision and self.search.first is not None:
            call, _ = self.search.first
            breaks = f"the backward pass of {maker_in_words(call.place)}"
            if not call.zeros:
                call.backward(call.backward_place())
            own = {call.backward_place(): ITSELF}
            confirmed = {**(dict.fromkeys(call.zeros, breaks) or own), **confirmed}
        self.repaired = bool(confirmed)
        for place, tally in self.tallies.items():
            if place.direction == "forward" and place not in confirmed:
                tally.overflowed = 0
            tally.breaks = confirmed.get(place, "")

    def name_of(self, parameter: Tensor) -> str:
        """Return the path of a parameter of a module that has run."""
        return self._modules.names.get(id(parameter), f"a tensor of shape {tuple(parameter.shape)}")

    def put_back(self) -> None:
        """Give the tensors their values back that the program wrote into."""
        with torch.no_grad():
            for tensor, value in self._put_back:
                if not torch.equal(tensor, value):  # versions do not tell: batch_norm leaves them as they are
                    tensor.copy_(value)
        self._put_back.clear()

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep the values of tensors that the program may write into."""
        self._put_back += [(tensor, tensor.detach().clone()) for tensor in tensors]

    def scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Return a loss that the program scales as it is: blame applies the scale itself."""
        if threading.get_ident() != self._thread or not scaler.is_enabled():
            return original(scaler, outputs)
        if self.takes_scale:
            self.loss_scale = float(scaler.get_scale())
        return outputs

    def apply(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a custom autograd function, which function modes do not see."""
        modes_in_force = [compat.mode_at(place) for place in range(compat.count_modes())]
        if self not in modes_in_force or threading.get_ident() != self._thread:
            return original(*args, **kwargs)
        inner: list[Any] = []
        while (top := compat.pop_function_mode()) is not self:
            inner.append(top)
        try:
            return self.__torch_function__(original, (), args, kwargs)
        finally:
            for mode in (self, *reversed(inner)):
                compat.push_function_mode(mode)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = calls.name_of(func)
        if name in calls.IGNORED:
            return _NoHandle() if name.startswith("register") else None
        if func in calls.BACKWARD:
            if func is torch.autograd.grad:
                raise UsageError(
                    "torch.autograd.grad is called in the function to blame, and one backward pass is "
                    "compared, that of the loss. Write a function that returns the loss without it."
                )
            given = args[0] if args else kwargs["tensors"]
            raise Finished(given if isinstance(given, Tensor) else given[0])
        if func in self._checked and func not in self._inside:  # in Python: what it calls is compared
            self._inside.append(func)  # some call an operator in C++ that goes by the same name
            try:
                with self:
                    return compat.unchecked(func)(*args, **kwargs)
            finally:
                self._inside.pop()
        if name == "__get__":
            if func == calls.REQUIRES_GRAD:
                return self._requires(args[0])
            value = func(*args, **kwargs)
            if not is_tracked(value) or func == calls.GRADIENT:
                return value
            if func == calls.DATA:
                func = Tensor.detach
        leaves, spec = compat.tree_flatten((args, kwargs))
        inputs = [at for at, leaf in enumerate(leaves) if is_tracked(leaf)]
        if name in calls.FACTORIES or name in ("__set__", "requires_grad_"):
            return func(*args, **kwargs)
        if not inputs:
            value = func(*args, **kwargs)
            if not isinstance(value, Tensor) or value.dtype not in LOW or calls.is_random(name):
                return value  # else integers have been rounded
        if compat.is_in_transform():
            raise UsageError(
                "Tensors of torch.func have no values to compare. Write a function to blame without vmap, "
                "grad and jvp."
            )
        target = calls.written(func, args, kwargs)
        if target is not None and not is_tracked(target):
            if isinstance(target, (tuple, list)):
                raise UsageError(f"{name} writes into several tensors at once. Write one call for each.")
            return func(*args, **kwargs)
        if target is not None and target.requires_grad and target.is_leaf:
            if target not in self.here:  # not used yet, as where a module is made
                self.keep([target])
                self.here.written[target] = self.there.written[target] = True
                return func(*args, **kwargs)
            raise UsageError(
                f"{name} writes into {self.name_of(target)}, and a weight has to stay as it is during the "
                "step. Write it outside of the function to blame."
            )
        return self._compared(func, leaves, spec, inputs, target)

    def _requires(self, tensor: Tensor) -> bool:
        """Return whether a tensor requires gradients in the program."""
        return bool(self._required.get(tensor, tensor.requires_grad))

    def _compared(
        self, func: Callable[..., Any], leaves: list[Any], spec: Any, inputs: list[int], target: Any
    ) -> Any:
        """Make a call in low precision and in each world; return what it returns in low precision."""
        tensors: list[Tensor] = [leaves[at] for at in inputs]
        if any(map(is_sharded, tensors)):
            raise UsageError(f"{maker_in_words(self._place(func))} is given a DTensor. {SHARDED}")
        self.keep([tensor for tensor in tensors if tensor not in self.here and not tensor.requires_grad])
        written = next((place for place, tensor in enumerate(tensors) if tensor is target), None)
        lows = [tensor.detach() for tensor in tensors]
        if written is not None:
            lows[written] = lows[written].clone()
        before = _random_states(self.device_type)
        value = _called(func, _filled(leaves, inputs, lows), spec)
        after = _random_states(self.device_type)
        is_random = not all(map(torch.equal, before, after))
        results = _tracked(value) if written is None else [lows[written]]
        if not results:
            return value

        formats = {tensor.dtype for tensor in (*lows, *results)}
        low = [dtype for dtype in formats if dtype in LOW]
        search, call = self.search, None
        if (low or search) and not self._in_float32:
            call = Call(self, func, leaves, spec, inputs, written, low)
            call.recipe = modes.recipe_for(self.device_type, func, tensors)
            if self._recipe is not None and calls.operator_of(func) == "linear":
                self.layers[self._modules.current] = (tensors[1].shape[0], tensors[1].shape[-1])
        otherwise = results
        if search and call:
            call.unrepaired, call.zeros = search.of(tensors)
            otherwise = self._otherwise(call, func, leaves, spec, inputs, results, written, before)
        made: dict[str, _Made] = {}
        products = self._flop_counter()
        for name, world in self.worlds.items():
            if is_random:
                _set_random_states(self.device_type, before)
            is_counted = world is self.exact and calls.part_of(calls.operator_of(func)) == "product"
            with products if is_counted else nullcontext():
                made[name] = self._in_world(world, call, func, leaves, spec, inputs, results, written)
        self.flops += products.flops
        self.low_flops += products.flops if low else 0
        with _plain(self.device_type), torch.no_grad():
            if is_random:  # what is drawn in two dtypes differs: float32's is taken
                for result, copy in zip(results, made["here"].results, strict=True):
                    result.copy_(copy)
            if call is not None:
                self._compare(call, func, lows, results, made, written, is_random, products.flops)
            given = dict(zip(map(id, lows), tensors, strict=True))
            own = [given.get(id(result), result) for result in results]  # the program's
            if search and call:
                search.follow(call, own, results, otherwise, made["exact"].results)
                search.watch(made["here"].results, call)
            elif search:
                maker = self._place(func)
                copies = made["exact"].inputs

                def without_inf() -> list[Tensor]:
                    if written is not None:  # what it was given is gone
                        return []
                    ones = [copy.nan_to_num(posinf=1.0, neginf=-1.0) for copy in copies]
                    _set_random_states(self.device_type, before)
                    return _tracked(_called(func, _raised(leaves, inputs, ones), spec))

                search.note(maker, tensors, copies, own, made["exact"].results, without_inf)
                search.watch(made["here"].results, maker)
            if written is not None:
                target.copy_(lows[written])
        is_cut = self._is_cut(func)
        if not is_cut and self._is_lowered(func):
            self.uses.update(self.name_of(tensor) for tensor in tensors if is_cached(tensor))
        required = not is_cut and any(map(self._requires, tensors))
        for at, result in enumerate(results):
            if any(result is each for each in lows):
                continue
            for name, world in self.worlds.items():
                world[result] = made[name].results[at]
            self._required[result] = required
            if is_cut:
                self._behind[result] = True
        flat, form = compat.tree_flatten(value)
        return compat.tree_unflatten([given.get(id(leaf), leaf) for leaf in flat], form)

    def _otherwise(
        self,
        call: Call,
        func: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        inputs: list[int],
        results: Sequence[Tensor],
        written: int | None,
        states: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return the results of a call as the program has them, without replacing what is not finite."""
        if not call.unrepaired:
            return [result if raised(result).isfinite().all() else result.clone() for result in results]
        lows: list[Tensor] = [leaves[at].detach() for at in inputs]
        for place, each in call.unrepaired.items():
            lows[place] = each.value
        if written is not None:
            lows[written] = lows[written].clone()
        _set_random_states(self.device_type, states)
        value = _called(func, _filled(leaves, inputs, lows), spec)
        found = _tracked(value) if written is None else [lows[written]]
        is_random = not all(map(torch.equal, states, _random_states(self.device_type)))
        pairs = zip(found, results, strict=True)  # what is drawn in two dtypes differs
        return [result if is_random and raised(one).isfinite().all() else one for one, result in pairs]

    def _in_world(
        self,
        world: World,
        call: Call | None,
        func: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        inputs: list[int],
        results: Sequence[Tensor],
        written: int | None,
    ) -> _Made:
        """Make a call on the copies of its inputs."""
        tensors = [leaves[at] for at in inputs]
        gradients, is_cut = world is not self.exact, self._is_cut(func)
        with _plain(self.device_type), torch.set_grad_enabled(gradients):
            copies = [world.of(tensor) for tensor in tensors]
            if gradients and is_cut:
                copies = [
                    copy if place == written or tensor in self._behind else self._cut(world, tensor, copy)
                    for place, (tensor, copy) in enumerate(zip(tensors, copies, strict=True))
                ]
            if func is Tensor.detach or func is torch.detach:
                return _Made(copies, copies if gradients else [copies[0].detach()])
            if call is not None and gradients and world is (self.here if self.alone is None else self.there):
                copies = [
                    call.view_of_input(place, copy, replace=self.alone is not None)
                    if copy.requires_grad and place != written
                    else copy
                    for place, copy in enumerate(copies)
                ]
            if calls.name_of(func) in calls.CASTS and written is None:
                given = copies[0] if copies else leaves[0]  # integers have no copies
                result = results[0]
                return _Made(copies, [given.to(result.device, _raised_dtype(result.dtype), copy=True)])
            filled = _raised(leaves, inputs, copies)
            saved: AbstractContextManager[None] = nullcontext()
            if gradients:
                saved = self.saved.here() if world is self.here else self.saved.there(copies)
            try:
                with saved:
                    value = _called(func, filled, spec)
            except REFUSALS as error:  # a kernel for low precision alone
                self.note_failure(func, "forward", error)
                dtypes = [leaves[at].dtype for at in inputs]
                lows = [copy.to(dtype) for copy, dtype in zip(copies, dtypes, strict=True)]
                found = _tracked(_called(func, _filled(leaves, inputs, lows), spec))
                return _Made(copies, [raised(result) for result in found])
            return _Made(copies, _tracked(value) if written is None else [copies[written]])

    def _is_cut(self, func: Callable[..., Any]) -> bool:
        """Return whether the program stops gradients at a call."""
        return not torch.is_grad_enabled() or func is Tensor.detach or func is torch.detach

    def _cut(self, world: World, tensor: Tensor, copy: Tensor) -> Tensor:
        """Return the copy of a tensor behind the gate. Aside, what is behind it does not move."""
        behind = self.gate(copy)
        if world is self.there and self.alone is None:
            behind = behind + (self.here.of(tensor) - copy).detach()
        return behind

    def _compare(
        self,
        call: Call,
        func: Callable[..., Any],
        lows: Sequence[Tensor],
        results: Sequence[Tensor],
        made: dict[str, _Made],
        written: int | None,
        is_random: bool,
        flops: int,
    ) -> None:
        """Count what a call differs in, and add that to the copies of its results."""
        place, here, there = self._place(func), made["here"], made["there"]
        is_alone = self.alone is not None and self.alone[:3] == place[:3]
        inputs = ", ".join(dict.fromkeys(map(_dtype_name, lows)))
        found = []
        watched = self.alone is None and written is None
        for at, (result, copy) in enumerate(zip(results, here.results, strict=True)):
            limit = torch.finfo(result.dtype).max
            errors = Errors.between(raised(result), copy.detach(), limit, made["exact"].results[at])
            found.append(errors)
        runs = _dtype_name(results[0])
        rounds = next((_dtype_name(each) for each in (*lows, *results) if each.dtype in LOW), runs)
        index = self._next_index()
        call.place = place

        def backward(row: Place) -> Tally:
            return self._tally(row, index, inputs, _formats(call.recipe, row) or rounds, call.limit)

        call.forward = partial(self._tally, place, index, inputs, _formats(call.recipe, place) or runs, limit)
        call.backward = backward
        call.flops = flops
        if not call.is_low and not call.unrepaired and all(errors.bad is None for errors in found):
            return
        for at, (result, errors) in enumerate(zip(results, found, strict=True)):
            if errors.bad is not None:  # so that what comes after it can be compared
                result.copy_(errors.repaired)
                self.repaired = True
            here.correct(at, errors, in_place=written is not None, watched=watched)
            if place != self.alone:
                there.correct(at, errors, in_place=written is not None, watched=watched)
        if any(errors.delta is not None or errors.overflowed for errors in found):
            call.forward().calls += 1
            call.forward().flops += flops
            for errors in found:
                call.forward().add(errors)
            call.deltas = [None if one.delta is None else packed(one.delta) for one in found]
        if any(errors.lost for errors in found):
            call.losers = {place: ""}
        if any(errors.overflowed for errors in found):
            call.suspects = {place: ""}
        elif any(errors.bad is not None for errors in found):  # of what was lost before
            call.suspects = dict.fromkeys(call.zeros, maker_in_words(place)) or {place: ITSELF}
            call.forward()
        storages = {low.untyped_storage().data_ptr() for low in lows}
        is_view = written is None and all(
            result.untyped_storage().data_ptr() in storages for result in results
        )
        if self.alone is None:
            # The gradient of a view is one, and what is random would be drawn again, in another dtype.
            compares_backward = not is_view and not is_random
            if compares_backward:
                call.keep_inputs(here.inputs, there.inputs)
            if compares_backward or call.deltas:
                call.keep_results("here", here.results)
            if call.deltas:
                call.keep_results("there", there.results)
        elif is_alone and self.alone.direction == "backward":
            call.keep_inputs(there.inputs, there.inputs)
            call.deltas = []
            call.keep_results("here", there.results)

    def _next_index(self) -> int:
        self._index += 1
        return self._index - 1

    def _tally(self, place: Place, index: int, inputs: str, runs: str, limit: float) -> Tally:
        return self.tallies.setdefault(place, Tally(index, inputs, runs, limit))

    def _place(self, func: Callable[..., Any]) -> Place:
        operator = calls.operator_of(func)
        product: ProductOf = "fprop" if self._recipe and operator == "linear" else ""
        return Place(self._modules.current, operator, source_line(), "forward", product)

    def _is_lowered(self, func: Callable[..., Any]) -> bool:
        """Return whether PyTorch's autocast casts the inputs of a call to low precision, without edits."""
        mode = modes.current(self.device_type)
        is_edited = mode is not None and modes.edits_of(mode.key).table != DEFAULT
        listed = rules.rules_of(rules.Edits(self.device_type))
        is_listed = listed.get(calls.operator_of(func)) == "lower"
        return torch.is_autocast_enabled(self.device_type) and is_listed and not is_edited


class _Made(NamedTuple):
    """A call in a world: the copies of its inputs and of its results."""

    inputs: Sequence[Tensor]
    results: list[Tensor]

    def correct(self, at: int, errors: Errors, *, in_place: bool, watched: bool) -> None:
        """Add what a call differs in to a result."""
        result = self.results[at]
        with torch.enable_grad():
            if errors.bad is not None:
                # Added to what replaces the result, with its gradient, unless it is not finite either.
                moved = result - errors.reference
                moved = errors.repaired + torch.where(moved.isfinite(), moved, 0.0)
                other = result.clone() if errors.delta is None else result + errors.delta
                changed = torch.where(errors.bad, moved, other)
                result = result.copy_(changed) if in_place else changed
            elif errors.delta is not None:
                result = result.add_(errors.delta) if in_place else result + errors.delta
            if errors.delta is not None and not result.requires_grad and watched:
                result = result.detach().requires_grad_()  # of data: its difference changes gradients, too
        self.results[at] = result


class _NoHandle:
    """Stands for the handle of a hook on a gradient that the program's tensors do not have."""

    def remove(self) -> None:
        """Do nothing."""


@contextmanager
def _plain(device_type: str) -> Iterator[None]:
    """Run without modes, without autocast, and without the hooks of a checkpoint."""
    with (
        compat.without_modes(),
        TorchAutocast(device_type, enabled=False),
        compat.without_saved_tensor_hooks(),
    ):
        yield


def is_sharded(x: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(x, "device_mesh")


def _called(func: Callable[..., Any], leaves: list[Any], spec: Any) -> Any:
    args, kwargs = compat.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _filled(leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    filled = list(leaves)
    for at, value in zip(places, values, strict=True):
        filled[at] = value
    return filled


def _raised(leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return `_filled`, with float32 where the program names a low precision."""
    return [torch.float32 if _is_low(leaf) else leaf for leaf in _filled(leaves, places, values)]


def _tracked(value: object) -> list[Tensor]:
    return [leaf for leaf in compat.tree_leaves(value) if is_tracked(leaf)]


def _raised_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOW else dtype


def _is_low(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in LOW


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _formats(recipe: Recipe | None, row: Place) -> str:
    """Return the formats of a product's operands, "" of a product that stays high, and of none."""
    if recipe is None or not row.product:
        return ""
    return ", ".join(each.format for each in getattr(recipe, row.product) or ())


def maker_in_words(place: Place) -> str:
    """Return an operator and where it was called."""
    return f"{place.operator} {in_words(place.module or MODEL, place.source)}"


def source_line() -> str:
    """Return the innermost line that is neither PyTorch's nor ours, such as "train.py:41"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(HIDDEN):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return OUTSIDE


def _random_states(device_type: str) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device_type == "cuda":
        states += torch.cuda.get_rng_state_all()
    return states


def _set_random_states(device_type: str, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device_type == "cuda":
        torch.cuda.set_rng_state_all(states[1:])
