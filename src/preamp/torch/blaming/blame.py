"""`blame`: one step in low precision against float32, operator call by operator call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from preamp.arrays import torch_compat as compat
from preamp.autocasting.report import OUTSIDE
from preamp.autocasting.tables import Casting
from preamp.blaming.blame import (
    FIRST_SCALES,
    Blame,
    BlameRow,
    beside,
    ranked,
    roundoff_in,
    with_parameters,
)
from preamp.checks import positive, shown, whole
from preamp.errors import CastingError, UsageError
from preamp.recipes import Recipe
from preamp.torch.autocasting import rules
from preamp.torch.autocasting.delayed import load_recipe_state, recipe_state
from preamp.torch.autocasting.modes import DTYPES
from preamp.torch.autocasting.region import autocast
from preamp.torch.autocasting.unscaled import watch
from preamp.torch.autocasting.weight_cache import summed_low
from preamp.torch.blaming.nonfinite import Search, what_is_in
from preamp.torch.blaming.recorder import (
    SHARDED,
    STEP,
    Finished,
    Recorder,
    is_sharded,
    maker_in_words,
    size_of,
)
from preamp.torch.blaming.tallies import TINY, Place, Tally, norm_of
from preamp.torch.nested import how_to_write
from preamp.torch.running_modules import RunningModules
from preamp.torch.scaling.grad_scaler import GradScaler

FIRST_SCALE = 2.0**16  # with which dynamic loss scaling starts
REPAIRED = (
    "What is not finite in low precision alone was replaced by what float32 has, at most the largest number "
    "of the format, and the loss is computed from that."
)
ATTEMPTS = 4  # to find a loss scale with which nothing overflows


def blame(
    loss_fn: Callable[..., Tensor],
    *args: Any,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    recipe: Recipe | None = None,
    casting: Casting | None = None,
    loss_scale: float | None = None,
    seed: int = 0,
) -> Blame:
    """Run one training step in low precision and in float32, and say which operator loses the accuracy.

    The step in low precision is a rehearsal of a GPU, `autocast(emulate=True)`, on any device.

    Args:
        loss_fn: returns the loss, a floating-point tensor with one element. A function that calls
            `backward()`, such as a whole training step, is run up to there. It is called several times and
            has to do the same each time: once to compare, once for each of the first three rows that are
            accused, and again where a smaller loss scale has to be tried.
        args: what it is called with.
        model: the model. Rows, and the rules of modules in `casting`, name modules by their paths in it.
            Without it, paths begin with the class of the outermost module.
        dtype: the low precision: torch.bfloat16, also if None, or torch.float16.
        recipe: how the products of linear layers are quantized; the low precision is then the recipe's high
            one. Each layer has a row for each of its products, and beside it what the same product loses in
            the high precision alone, for which the step is run once more.
        casting: edits of CUDA's table, as of `autocast(casting=...)`.
        loss_scale: what the loss is multiplied by before its backward pass. None takes the scale of the
            step's `GradScaler`; without a scaler it is 2**16 for float16 and 1 for other formats. If
            gradients overflow at that scale, it is lowered until they do not, as dynamic loss scaling does.
        seed: of the noise on the weights by which effects are estimated.

    Returns:
        The rows, worst first, and which of them are accused. `print` shows them as a table.

    Raises:
        UsageError: for a function or a model that cannot be compared, such as a sharded one, with the reason.
        CastingError: for a table or dtype that autocast refuses.

    Every call's result is compared with what float32 returns for the very same inputs, and so are the
    gradients of its inputs. The effect of a difference is how much it changes the gradients of the
    parameters, to first order. It is estimated for all calls at once, from a second backward pass at weights
    that are moved by 2**-7 of their size. What is lost under `no_grad`, behind `detach()` and where integers
    are cast to low precision is found as well.

    Not seen: the order of sums inside an operator; decisions, such as an argmax, which are taken as they are
    in low precision; the sign of a ReLU's input where it flips; casts in the backward pass of a
    `torch.autograd.Function`; modules of `torch.jit`. Calls that draw random numbers are compared in the
    forward pass only. Compiled functions run eagerly. Weights, buffers, gradients and random states are left
    as they were.

    It takes 3.7 times the products of a step in float32, up to 5 times with `no_grad` or `detach` in it, and
    2.3 times more for each accused row that is measured. Where inf or NaN appears, the step is run again to
    follow it. docs/eyes.md has times and memory.

    >>> model = nn.Linear(8, 1)
    >>> found = blame(lambda x: model(x).square().mean(), torch.ones(4, 8), model=model, dtype=torch.float16)
    >>> found.guilty
    []
    """
    step = BlamedStep(loss_fn, args, model, dtype, recipe, loss_scale, seed)
    found = step.run(casting)
    if recipe is not None:
        found = beside(found, step.in_high().run(casting))
    return with_parameters(found, lambda row: step.differences(row, casting, found.loss_scale))


class BlamedStep:
    """The step to run, with any table; the arguments are those of `blame`."""

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        args: tuple[Any, ...],
        model: nn.Module | None,
        dtype: torch.dtype | None,
        recipe: Recipe | None,
        loss_scale: float | None,
        seed: int,
    ) -> None:
        rules.validate(None, dtype, False, recipe)
        self.recipe = recipe
        self.dtype = dtype or (DTYPES[recipe.high] if recipe else torch.bfloat16)
        _check(loss_fn, model, self.dtype, loss_scale)
        whole("seed", seed, least=0, instead="seed=0")
        self._loss_fn, self._args, self._model = loss_fn, args, model
        self._loss_scale, self._seed = loss_scale, seed
        # Before the first step, the scales are those that this step would have if it were repeated.
        self._is_first = bool(recipe and recipe.delayed and model is not None and not recipe_state(model))
        self._runs = recipe.current if recipe and self._is_first else recipe
        tensors = [leaf for leaf in compat.tree_leaves(args) if isinstance(leaf, Tensor)]
        if model is not None:
            _refuse_sharded(model)
            tensors = [*model.parameters(), *tensors]
        self._device_type = next((tensor.device.type for tensor in tensors), "cpu")

    def in_high(self) -> BlamedStep:
        """Return the same step in the recipe's high precision alone."""
        high = copy.copy(self)
        high._runs, high._is_first = None, False
        return high

    @contextmanager
    def _scales_kept(self) -> Iterator[None]:
        """Put the scales of a delayed recipe back."""
        state = recipe_state(self._model) if self._model is not None else {}
        kept = copy.deepcopy(state)
        try:
            yield
        finally:
            if self._model is not None and kept:
                load_recipe_state(self._model, kept)

    def run(self, casting: Casting | None) -> Blame:
        """Return the rows of all calls, with the loss scale that was asked for, or looking for one."""
        looks = self._loss_scale is None
        first = self._loss_scale or (FIRST_SCALE if self.dtype is torch.float16 else 1.0)
        with self._scales_kept():
            found = self._run_with(casting, first, takes_scale=looks)
        first = scale = found.loss_scale
        for _ in range(ATTEMPTS):
            high = [row for row in found.rows if row.direction == "backward" and row.overflowed]
            if not looks or not high:
                break
            scale *= min(0.5, 2.0 ** -math.ceil(math.log2(max(row.amax / row.limit for row in high))))
            with self._scales_kept():
                found = self._run_with(casting, scale)
        lowered = f"The loss scale is {scale:g}: gradients overflow with {first:g}."
        return replace(found, notes=(*self._notes(), *([lowered] if scale != first else []), *found.notes))

    def noise(self) -> float:
        """Return what the gradients in float32 of two random seeds differ in, relative to their norm."""
        found = []
        for seed in (self._seed, self._seed + 1):
            recorder, losses = self._recorded(None, 1.0, random_seed=seed)
            leaves = [leaf for _, leaf in recorder.here.leaves]
            with torch.enable_grad():
                loss = losses["here"].sum()
            gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
            pairs = zip(leaves, gradients, strict=True)
            found.append([size_of(leaf) * gradient.to_dense() for leaf, gradient in pairs])
        differences = [norm_of(one - other) for one, other in zip(*found, strict=True)]
        noise = math.hypot(*differences) / max(math.hypot(*map(norm_of, found[0])), TINY)
        if not noise:
            raise UsageError(
                'The function draws no random numbers, so target="seeds" has nothing to measure. Write a '
                "number, such as target=0.01."
            )
        return noise

    def _notes(self) -> list[str]:
        modules = [] if self._model is None else list(self._model.modules())
        is_compiled = compat.is_compiled(self._loss_fn) or any(map(compat.is_compiled, modules))
        return [
            *(["What is compiled was run eagerly."] if is_compiled else []),
            *([FIRST_SCALES] if self._is_first else []),
        ]

    def _exported(self, layers: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Return the layers that other libraries quantize, which are modules of the class `nn.Linear`."""
        if self._model is None:
            return {}
        known = {path for path, module in self._model.named_modules() if isinstance(module, nn.Linear)}
        return {path: shape for path, shape in layers.items() if path in known}

    def _notes_of(self, recorder: Recorder) -> list[str]:
        """Return sentences about what the run has shown."""
        weights = [weight for weight, _ in recorder.here.leaves]
        if self._model is not None and not any(
            weight is each for weight in weights for each in self._model.parameters()
        ):
            raise UsageError(
                "The loss depends on no parameter of the model that requires gradients. Pass the model that "
                "the function calls."
            )
        return [
            *([REPAIRED] if recorder.repaired else []),
            *summed_low(recorder.uses, self.dtype, "the step"),
            *recorder.failures,
            *self._notes_of_layers(recorder),
        ]

    def _notes_of_layers(self, recorder: Recorder) -> list[str]:
        """Return a sentence about layers that no library would quantize."""
        others = recorder.layers.keys() - self._exported(recorder.layers).keys() - {OUTSIDE}
        if self._runs is None or self._model is None or not others:
            return []
        names = ", ".join(sorted(others))
        return [f"Quantized here, but not by libraries that convert only nn.Linear: {names}."]

    def _run_with(
        self,
        casting: Casting | None,
        loss_scale: float,
        search: Search | None = None,
        *,
        takes_scale: bool = False,
    ) -> Blame:
        """Return the rows; where something is not finite, run again to see what that does."""
        recorder, losses = self._recorded(casting, loss_scale, search=search, takes_scale=takes_scale)
        norm = self._backward(recorder, losses)
        exact, loss = losses["exact"].item(), losses["low"].item()
        are_finite = math.isfinite(exact) and math.isfinite(norm)
        if search is None and not (are_finite and math.isfinite(loss) and not recorder.repaired):
            return self._run_with(casting, loss_scale, Search(), takes_scale=takes_scale)
        cause, maker = ("", None) if are_finite else self._not_finite_in_float32(exact)
        if maker is not None:
            recorder.tallies.setdefault(maker, Tally(0, "float32", "float32", torch.finfo(torch.float32).max))
        recorder.judge(in_low_precision=not cause)
        # Of losses around 0, what the loss changes by where the weights change by their size.
        size = max(
            norm if math.isfinite(norm) else 0.0,
            next((abs(value) for value in (exact, loss) if math.isfinite(value)), 1.0),
        )
        if cause:  # then nothing is known of effects
            norm = size = math.nan
        rows = [tally.row(place, norm, size) for place, tally in recorder.tallies.items()]
        changes = sum(tally.loss_change for tally in recorder.tallies.values())
        roundoff = roundoff_in(self._runs) if self._runs else torch.finfo(self.dtype).eps / 2
        in_order = rows if cause else ranked(rows, roundoff)
        return Blame(
            sorted(in_order, key=lambda row: _place_of(row) != maker),
            str(self.dtype).removeprefix("torch."),
            loss,
            exact,
            exact + changes,
            recorder.loss_scale,
            self._notes_of(recorder),
            recorder.flops,
            recorder.low_flops,
            cause,
            self.recipe.name or "a recipe" if self.recipe and self._runs else "",
            self._exported(recorder.layers),
        )

    def _not_finite_in_float32(self, loss: float) -> tuple[str, Place | None]:
        """Return which operator makes inf or NaN in float32 as well, as a sentence; "" if none does."""
        search = Search()
        recorder, losses = self._recorded(None, 1.0, search=search, in_float32=True)
        as_well = "in float32 as well, so precision is not the cause"
        if not math.isfinite(loss) and search.origin is not None:
            what, maker, inputs, _ = search.origin
            who = maker_in_words(maker)
            does = f"{who} makes {what} first" if inputs else f"what {who} is given has {what}"
            return f"The loss is {loss} {as_well}: {does}.", maker
        bad: dict[str, str] = {}

        def arrived(name: str, leaf: Tensor) -> None:
            if what := what_is_in(_taken(leaf)):
                bad[name] = what

        for tensor, leaf in recorder.here.leaves:
            hook = partial(arrived, recorder.name_of(tensor))
            recorder.watch(leaf, hook)
        _run_backward(losses["here"])
        recorder.release()
        search.end()
        if not bad or search.first is None:
            return "", None
        name, what = next(iter(bad.items()))
        more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
        maker, made = search.first
        does = f"the backward pass of {maker_in_words(maker)} makes {made} first"
        return f"The gradient of {name}{more} has {what} {as_well}: {does}.", maker._replace(
            direction="backward"
        )

    def differences(
        self, row: BlameRow, casting: Casting | None, loss_scale: float
    ) -> list[tuple[float, str]]:
        """Return how much a row alone changes each parameter's gradient, and the parameter's name."""
        with self._scales_kept():
            return self._differences(*self._recorded(casting, loss_scale, _place_of(row)))

    def _recorded(
        self,
        casting: Casting | None,
        loss_scale: float,
        alone: Place | None = None,
        random_seed: int | None = None,
        search: Search | None = None,
        *,
        takes_scale: bool = False,
        in_float32: bool = False,
    ) -> tuple[Recorder, dict[str, Tensor]]:
        """Run the step's forward pass; return the loss in each world."""

        def seen(module: nn.Module) -> None:
            _refuse_sharded(module)
            recorder.keep(list(module.buffers()))

        modules = RunningModules(self._model, seen)
        recorder = Recorder(
            self._device_type,
            loss_scale,
            modules,
            self._seed,
            alone,
            search,
            in_float32=in_float32,
            recipe=self.recipe,
            step=roundoff_in(self._runs) / 2 if self._runs else STEP,
        )
        recorder.takes_scale = takes_scale
        recorder.keep([] if self._model is None else list(self._model.buffers()))
        with ExitStack() as stack:
            stack.callback(recorder.put_back)
            stack.enter_context(_prepared(recorder))
            if random_seed is not None:
                torch.manual_seed(random_seed)
            stack.enter_context(
                autocast(
                    self._device_type,
                    self.dtype,
                    casting=casting if self._runs or casting is None else casting.without_recipes(),
                    model=self._model,
                    emulate=True,
                    recipe=self._runs,
                )
            )
            modules.follow()
            stack.callback(modules.leave)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recorder)
            try:
                loss = self._loss_fn(*self._args)
            except Finished as finished:
                loss = finished.loss
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
            of_jax = isinstance(loss, tuple) and bool(loss) and callable(loss[0])
            raise UsageError(
                f"The function to blame returned {shown(loss)} instead of a loss, a floating-point tensor "
                f"with one element. {how_to_write(loss, 'return {}')}"
                + (" If it is a function of JAX, write preamp blame --framework jax." if of_jax else "")
            )
        if loss not in recorder.here or not recorder.here.of(loss).requires_grad:
            raise UsageError(
                "The loss does not depend on a tensor that requires gradients, through PyTorch's operators. "
                "Compute it inside of the function to blame, from the parameters themselves."
            )
        if search is not None:
            search.arrive(loss)
        return recorder, {
            "low": loss.detach(),
            **{name: world.of(loss) for name, world in recorder.worlds.items()},
        }

    def _backward(self, recorder: Recorder, losses: dict[str, Tensor]) -> float:
        """Run the backward passes; return the norm of the gradients, weighted by the parameters' sizes.

        It is NaN if a gradient is not finite.
        """
        squares: list[float] = []  # NaN where a gradient is not finite

        def arrived(leaf: Tensor) -> None:
            gradient = _taken(leaf)
            if gradient is not None and recorder.counts_backward:
                is_finite = not what_is_in(gradient)
                squares.append(norm_of(size_of(leaf) * gradient) ** 2 if is_finite else math.nan)

        for _, leaf in recorder.here.leaves:
            recorder.watch(leaf, arrived)
        for _, leaf in recorder.there.leaves:
            recorder.watch(leaf, _freed)
        if recorder.gate.is_used:
            # First the gradients of the step, then what also passes where the gate stops them.
            recorder.counts_forward = False
            _run_backward(losses["here"], retain_graph=True)
            recorder.counts_forward, recorder.counts_backward, recorder.gate.is_open = True, False, True
        _run_backward(losses["here"], losses["there"])
        recorder.release()
        if recorder.search is not None:
            recorder.search.end()
        return math.sqrt(math.fsum(squares))

    def _differences(self, recorder: Recorder, losses: dict[str, Tensor]) -> list[tuple[float, str]]:
        """Run the backward passes; return how much each parameter's gradient differs, and its name."""
        found: list[tuple[float, str]] = []
        waiting: dict[int, Tensor] = {}

        def arrived(at: int, name: str, is_here: bool, leaf: Tensor) -> None:
            gradient, other = _taken(leaf), waiting.pop(at, None)
            if gradient is None:
                return
            if other is None:
                waiting[at] = gradient
                return
            here = gradient if is_here else other
            size = here.double().norm().item()
            found.append(((gradient - other).double().norm().item() / size if size else 0.0, name))

        for world, leaves in (("here", recorder.here.leaves), ("there", recorder.there.leaves)):
            for at, (tensor, leaf) in enumerate(leaves):
                hook = _Arrived(arrived, at, recorder.name_of(tensor), world == "here")
                recorder.watch(leaf, hook)
        _run_backward(losses["here"], losses["there"])
        recorder.release()
        return found


class _Arrived:
    """Calls a function with what it is about and a leaf."""

    def __init__(self, function: Callable[..., None], *about: Any) -> None:
        self._function, self._about = function, about

    def __call__(self, leaf: Tensor) -> None:
        self._function(*self._about, leaf)


def _check(loss_fn: object, model: object, dtype: object, loss_scale: object) -> None:
    if torch.is_inference_mode_enabled():
        raise UsageError("Inference mode computes no gradients to compare. Call blame outside of it.")
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype={dtype!r} is not a torch.dtype. Write dtype=torch.float16.")
    if dtype not in (torch.float16, torch.bfloat16):
        raise CastingError(
            f"dtype={dtype} cannot be compared with float32. Write torch.float16 or torch.bfloat16."
        )
    if not callable(loss_fn):
        raise UsageError(f"{shown(loss_fn)} is not a function. Write blame(loss_fn, *args, model=model).")
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"model={shown(model)} is not a module. Write model=model, or leave it out.")
    if loss_scale is not None:
        positive("loss_scale", loss_scale, "loss_scale=scaler.get_scale()")


def _refuse_sharded(model: nn.Module) -> None:
    """Refuse a model whose ranks communicate in the forward pass."""
    kinds = {kind.__name__ for part in model.modules() for kind in type(part).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise UsageError(f"FSDP shards parameters of this {type(model).__name__}. {SHARDED}")
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise UsageError(f"{name} is a DTensor. {SHARDED}")
    for part in model.modules():
        if not isinstance(part, nn.parallel.DistributedDataParallel) or part.process_group.size() == 1:
            continue
        if part.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            raise UsageError(
                "DDP broadcasts the buffers of this model whenever it is called, and each rank may call it "
                "another number of times. Write a function that calls the module inside: model.module(x)."
            )


def _place_of(row: BlameRow) -> Place:
    return Place(row.module, row.operator, row.source, row.direction, row.product)


def _run_backward(*losses: Tensor, retain_graph: bool = False) -> None:
    with torch.enable_grad():
        roots = [loss.sum() for loss in losses if loss.requires_grad]
    torch.autograd.backward(roots, retain_graph=retain_graph)


def _freed(leaf: Tensor) -> None:
    leaf.grad = None


def _taken(leaf: Tensor) -> Tensor | None:
    """Return the gradient of a leaf, which then has none; None where it ended on its way."""
    gradient, leaf.grad = leaf.grad, None
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


@contextmanager
def _prepared(recorder: Recorder) -> Iterator[None]:
    """See what function modes do not see, run what is compiled eagerly, and put random states back."""
    original, was_on = torch.autograd.Function.__dict__["apply"], watch.is_on
    push = compat.push_function_mode
    devices = range(torch.cuda.device_count()) if recorder.device_type == "cuda" else []

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # which would run what it is given without its gradients
            run, _, *given = args
            return run(*given)

        def call(*inner: Any, **named: Any) -> Any:
            return original.__get__(None, cls)(*inner, **named)

        call.__name__ = cls.__name__
        return recorder.apply(call, args, kwargs)

    def push_below(mode: Any) -> None:
        """Enter a region of the program below the recorder, which sees each call before the region casts."""
        is_below = compat.count_modes() > 0 and compat.mode_at(compat.count_modes() - 1) is recorder
        if is_below:
            compat.pop_function_mode()
        push(mode)
        if is_below:
            push(recorder)

    watch.is_on = False  # no scaler is at work here, and no optimizer
    compat.push_function_mode = push_below
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    scales = {kind: kind.scale for kind in (torch.amp.GradScaler, GradScaler)}
    for kind, scale in scales.items():
        kind.scale = _unscaled(recorder, scale)  # type: ignore[method-assign]
    try:
        with torch.random.fork_rng(devices), compat.run_eagerly():
            yield
    finally:
        for kind, scale in scales.items():
            kind.scale = scale  # type: ignore[method-assign]
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
        compat.push_function_mode = push
        watch.is_on = was_on


def _unscaled(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(scaler: Any, outputs: Any) -> Any:
        return recorder.scale(original, scaler, outputs)

    return scale
