"""The mode that is in force in regions with a table or rules of modules, and in rehearsals.

PyTorch hands every call of its functions over to it, in one thread, and its compiler traces it, so that the
casts are part of what is compiled. Nothing is registered in the process. Calls that the mode does not see,
those that PyTorch's operators in C++ make among themselves, follow the operator that makes them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from preamp.arrays import torch_compat as compat
from preamp.autocasting.tables import Casting, Edit
from preamp.errors import UsageError
from preamp.recipes.values import KNOWN, Recipe
from preamp.torch.autocasting import delayed, operators, recurrent, rules
from preamp.torch.autocasting.delayed import Scales
from preamp.torch.autocasting.quantized import fits, linear
from preamp.torch.autocasting.rounding import rounded, stored
from preamp.torch.autocasting.rules import LOW, UNCACHED, Action, Edits
from preamp.torch.autocasting.weight_cache import cast_weight

TorchAutocast = torch.autocast  # read once: users may replace torch.autocast by ours
ELIGIBLE = {torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
ELIGIBLE |= {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
IN_FLOAT16 = {torch.float32: torch.float16, torch.complex64: torch.complex32}
IN_BFLOAT16 = {torch.float32: torch.bfloat16}
# These take little more than half the time of Tensor.to, which parses its arguments.
CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
}
DATA = (Tensor, bool, int, float, complex, str, tuple, list, dict, type(None))
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
INSTEAD = {"binary_cross_entropy": "binary_cross_entropy_with_logits on what the sigmoid was applied to"}

NONE = ""
"""The key of no edits."""
MISFIT = "not a multiple of"
"""How the rule of a report begins for a layer whose sizes are not those that a recipe asks for."""


class Counter(Protocol):
    """The interface of `counting.CastCounter`, which counts the calls of operators for a report."""

    def count(
        self,
        name: str,
        rule: str,
        rehearsed: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """Return what the call of an operator returns, and count it."""
        ...


class At(NamedTuple):
    """Which call of a module comes next, by which a delayed recipe finds its scales.

    Attributes:
        module: that is running, with a weight; None without a model.
        path: of it.
        call: how many have been before in the region.
    """

    module: nn.Module | None
    path: str
    call: int


class EditMode(TorchFunctionMode):
    """Runs each function by the rule that its operator has.

    Attributes:
        device_type: whose tensors are cast.
        key: identifies the edits that hold, for `edits_of`; `NONE` while a region inside has its own.
        outside: the keys, modules and paths that held outside of the running modules, outermost first.
        module: what keeps the scales of a delayed recipe: the module that is running; None without a model.
        path: of that module.
        counters: what counts the calls, outermost first.
    """

    counters: tuple[Counter, ...] = ()

    def __init__(self, device_type: str, key: str, at: At | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.outside: tuple[tuple[str, nn.Module | None, str], ...] = ()
        self.module: nn.Module | None = None
        self.path = ""
        self._calls: dict[str, int] = {}
        if at is not None:
            self.module, self.path = at.module, at.path
            self._calls[at.path] = at.call
        self.become(key)

    @property
    def at(self) -> At:
        """Which call of which module is next."""
        return At(self.module, self.path, self._calls.get(self.path, 0))

    def enter(self, key: str, module: nn.Module | None, path: str) -> None:
        """Replace the edits that hold by those inside of a module."""
        self.outside = (*self.outside, (self.key, self.module, self.path))
        self.module, self.path = module, path
        self.become(key)

    def leave(self) -> None:
        """Put back what held outside of the module that is running."""
        if self.outside:
            key, self.module, self.path = self.outside[-1]
            self.outside = self.outside[:-1]
            self.become(key)

    def _scales(self, x: Tensor) -> Scales:
        """Return the scales of the next product, of a delayed recipe."""
        recipe = recipe_in(self.key)
        if self.module is None or not recipe.delayed:
            return []
        call = self._calls.get(self.path, 0)
        self._calls[self.path] = call + 1
        delayed.make(id(self.module), call, recipe.key, str(x.device))
        return delayed.scales_of(self.module, call)

    def become(self, key: str) -> None:
        """Replace the edits that hold."""
        self.key = key
        if not is_dynamo_compiling():
            self._actions = rules.actions(edits_of(key))

    def action_of(self, func: Callable[..., Any]) -> Action | None:
        """Return what is done with a function in eager code."""
        return self._actions.get(func)

    @compat.untraced  # by itself, where the compiler gave up on the function that called
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_compiling() and compat.in_trace():
            action = action_in_graph(self.key, func, is_dynamo_compiling())
        else:
            action = self._actions.get(func)
        if action is None:
            if func is Tensor.unflatten:  # which calls `super`, and the compiler does not trace that
                func = torch.unflatten
            return func(*args, **(kwargs or {}))
        if action == "calls":
            with self:  # the compiler lets what `func` calls enter a mode if that was done outside before
                pass
            return func(*[self._inside(one) for one in args], **_without_region(kwargs or {}))
        if action == "inside":
            with self:
                return _unchecked(func)(*args, **(kwargs or {}))
        return self._run(action, func, args, kwargs or {})

    def _inside(self, argument: Any) -> Any:
        """Return a function that runs with these edits in place of one that does not; others as they are."""
        # `callable` comes last: not all releases trace it.
        is_function = isinstance(argument, (FunctionType, MethodType, functools.partial, nn.Module))
        if not is_function and (isinstance(argument, DATA) or not callable(argument)):
            return argument
        if isinstance(argument, functools.partial):  # which `scan` insists on
            return functools.partial(self._inside(argument.func), *argument.args, **argument.keywords)

        device_type, key = self.device_type, self.key

        def run(*args: Any, **kwargs: Any) -> Any:
            with EditMode(device_type, key):  # a mode from outside must not be changed here
                return argument(*args, **kwargs)

        return run

    def _run(
        self, action: Action, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        device_type = self.device_type
        if action == "backward":
            with self, TorchAutocast(device_type, enabled=False):
                return _unchecked(func)(*args, **kwargs)
        if action == "listed" or not torch.is_autocast_enabled(device_type):
            return func(*args, **kwargs)
        if action == "refuse":
            raise UsageError(_refusal(func))
        if action == "padding":
            called = operators.padding(*args, **kwargs)
            if called is None:
                return func(*args, **kwargs)
            with self:
                return called[0](*called[1])
        low = torch.get_autocast_dtype(device_type)
        if action == "recurrent" or (action == "steps" and torch.is_grad_enabled()):
            name = name_in_graph(func)
            if action == "recurrent":
                # cuDNN's networks run in float16, in regions of bfloat16, too.
                low = low_in(self.key, low if name.endswith("_cell") else torch.float16)
                args = tuple(cast(args, low, device_type))
            with self, TorchAutocast(device_type, low):
                return recurrent.step_by_step(name, *args, **kwargs)
        if action in UNCACHED:
            return _run_uncached(action, device_type, low, func, args, kwargs)
        scales = self._scales(args[0]) if action == "quantized" else []
        if compat.in_trace():  # graphs record regions, and not what `set_autocast_enabled` does
            with TorchAutocast(device_type, enabled=False):
                return _run(action, device_type, low, self.key, func, args, kwargs, scales)
        torch.set_autocast_enabled(device_type, False)
        try:
            return _run(action, device_type, low, self.key, func, args, kwargs, scales)
        finally:
            torch.set_autocast_enabled(device_type, True)


def _run_uncached(
    action: Action,
    device_type: str,
    low: torch.dtype,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call what PyTorch's autocast casts, without its cache: each use of a weight has its own node."""
    if action == "once" and kwargs.get("out") is None:
        values = cast([*args, *kwargs.values()], low, device_type)
        args, kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(cached)


def _without_region(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a checkpoint without a region's `context_fn`: graphs have the casts."""
    context = kwargs.get("context_fn")
    # Not `getattr` with a default: the compiler takes the default for a method of what is in an attribute.
    if isinstance(context, MethodType) and isinstance(context.__self__, TorchAutocast):
        return {name: value for name, value in kwargs.items() if name != "context_fn"}
    return kwargs


def _unchecked(func: Callable[..., Any]) -> Callable[..., Any]:
    run: Callable[..., Any] = (
        compat.unchecked_in_graph(func) if is_dynamo_compiling() else compat.unchecked(func)
    )
    return run


def _run(
    action: Action,
    device_type: str,
    low: torch.dtype,
    key: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    scales: Scales,
) -> Any:
    """Call a function with its inputs cast, while autocast is off; scales are those of a delayed recipe."""
    if action == "untouched" or kwargs.get("out") is not None:
        return func(*args, **kwargs)
    values = [*args, *kwargs.values()] if kwargs else args
    if action == "product":
        return _product(device_type, low_in(key, low), is_counted(key), func, args, kwargs)
    if action == "quantized":
        recipe = recipe_in(key)
        if fits(recipe, *args, **kwargs):
            return linear(*args, **kwargs, recipe=recipe, scales=scales)
        return _product(device_type, low, is_counted(key), func, args, kwargs)
    if action == "in float32" or action == "without kernel":
        return _in_float32(device_type, func, args, kwargs)
    if action == "widest":
        dtype = _widest(values, device_type)
    elif _has_dtype(values):  # the user chose the precision
        return func(*args, **kwargs)
    elif action == "lower":
        dtype = low
    else:
        dtype = DTYPES[action]
    values = cast(values, dtype, device_type)
    if not kwargs:
        return func(*values)
    return func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))


def _product(
    device_type: str,
    low: torch.dtype,
    by_casts: bool,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a product as a tensor core computes it: in float32, of operands in low precision, stored in it."""

    def changed(x: Any, change: Callable[..., Tensor]) -> Any:
        return change(x, low, by_casts) if is_eligible(x, device_type) else x

    values = _each([*args, *kwargs.values()], lambda x: changed(x, rounded))
    found = func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    return _each([found], lambda x: changed(x, stored))[0]


def _in_float32(
    device_type: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call in float32 what a GPU computes in it inside, and store the results in low precision."""
    name, values = name_in_graph(func), [*args, *kwargs.values()]
    lows = operators.WITHOUT_KERNEL[device_type].get(name, operators.LOW)
    given = [value.dtype for value in values if isinstance(value, Tensor) and value.dtype in lows]
    if not given or (name in operators.WITH_BUFFERS and len(given) > 1):  # it must not write to copies
        return func(*args, **kwargs)
    stores = IN_BFLOAT16 if torch.bfloat16 in given else IN_FLOAT16
    raises = {low: wide for wide, low in stores.items()}

    def cast(x: Any, dtypes: dict[torch.dtype, torch.dtype]) -> Any:
        return x.to(dtypes[x.dtype]) if isinstance(x, Tensor) and x.dtype in dtypes else x

    values = [cast(value, raises) for value in values]
    found = func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    return _each([found], lambda x: cast(x, stores))[0]


def _has_dtype(values: Iterable[object]) -> bool:
    return any(isinstance(value, torch.dtype) for value in values)


def cast(values: Iterable[object], dtype: torch.dtype, device_type: str) -> list[Any]:
    """Return values with every eligible tensor cast, those in lists too."""
    to, result = CASTS[dtype], []
    is_traced = is_compiling() and compat.in_trace()
    for value in values:
        if isinstance(value, Tensor):
            has = value.dtype
            if has is not dtype and has in ELIGIBLE and value.device.type == device_type:
                value = to(value) if is_traced or has is not torch.float32 else cast_weight(value, to, dtype)
        elif isinstance(value, (list, tuple)):
            value = cast(value, dtype, device_type)
        result.append(value)
    return result


def is_eligible(value: object, device_type: str) -> TypeGuard[Tensor]:
    """Return whether autocast casts a value: a floating-point tensor of the device type, float64 excepted."""
    return isinstance(value, Tensor) and value.dtype in ELIGIBLE and value.device.type == device_type


def _each(values: Iterable[object], change: Callable[[Any], Any]) -> list[Any]:
    """Return values changed, those in lists and tuples one by one."""
    result: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            inner = _each(value, change)
            result.append(type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner))
        else:
            result.append(change(value))
    return result


def _widest(values: Iterable[object], device_type: str) -> torch.dtype:
    dtypes = set(_dtypes(values, device_type))
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _dtypes(values: Iterable[object], device_type: str) -> list[torch.dtype]:
    found: list[torch.dtype] = []
    for value in values:
        if is_eligible(value, device_type):
            found.append(value.dtype)
        elif isinstance(value, (list, tuple)):
            found += _dtypes(value, device_type)
    return found


def _refusal(func: Callable[..., Any]) -> str:
    name = func.__name__
    instead = INSTEAD.get(
        name, f"`with autocast(device_type, enabled=False)` around {name} of float32 tensors"
    )
    return f"{name} is refused in this autocast region. Write {instead}."


class CountingMode(EditMode):
    """The mode of a region with a report."""

    def __init__(self, device_type: str, key: str, counters: tuple[Counter, ...]) -> None:
        super().__init__(device_type, key)
        self.counters = counters

    def _run(
        self, action: Action, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def run() -> Any:
            return EditMode._run(self, action, func, args, kwargs)

        if action == "backward" or is_dynamo_compiling():
            return run()
        name = operators.name_of(func)
        is_on = torch.is_autocast_enabled(self.device_type)
        rule = rules.rules_of(edits_of(self.key)).get(name, "unlisted") if is_on else "off"
        if is_on and action == "without kernel":
            rule = action
        if is_on and action == "quantized":
            recipe = recipe_in(self.key)
            rule = (
                (recipe.name or "recipe") if fits(recipe, *args, **kwargs) else f"{MISFIT} {recipe.multiple}"
            )
        rehearsed = is_on and action in ("product", "recurrent", "quantized")
        for counter in reversed(self.counters):
            run = functools.partial(counter.count, name, rule, rehearsed, args, kwargs, run)
        return run()


def mode_of(device_type: str, key: str, counters: tuple[Counter, ...]) -> EditMode:
    """Return a mode to put in force."""
    return CountingMode(device_type, key, counters) if counters else EditMode(device_type, key)


def remove(mode: EditMode) -> None:
    """Take a mode away that is in force in this thread, innermost or not."""
    inner: list[Any] = []
    while (top := compat.pop_function_mode()) is not mode:
        inner.append(top)
    for other in reversed(inner):
        compat.push_function_mode(other)


def current(device_type: str) -> EditMode | None:
    """Return the mode that is in force for a device type in this thread."""
    for place in range(compat.count_modes() - 1, -1, -1):
        mode = compat.mode_at(place)
        if isinstance(mode, EditMode) and mode.device_type == device_type and mode.key:
            return mode
    return None


# Edits are identified by strings, because the compiler takes those for constants.
_edits: dict[str, Edits] = {NONE: Edits("cpu")}
_keys: dict[Edits, str] = {}
_lock = threading.Lock()


def edits_of(key: str) -> Edits:
    """Return the edits that a key identifies."""
    return _edits[key]


def key_of(edits: Edits) -> str:
    """Return the key of edits."""
    with _lock:
        key = _keys.setdefault(edits, str(1 + len(_keys)))
        _edits[key] = edits
    compat.hand_over_to_modes(rules.actions(edits, in_graph=True))
    return key


def action_in_graph(key: str, func: Callable[..., Any], in_compiler: bool) -> Action | None:
    """Return what is done with a function in code that is traced.

    Raises:
        UsageError: in `torch.export` with `strict=True`, as `check_export` does.
    """
    if in_compiler:
        check_export()
    if compat.is_higher_order(func):
        return "calls"
    actions = rules.actions(_edits[key], in_graph=True)
    compat.hand_over_to_modes(actions)  # again: the compiler may not have been loaded when the key was made
    return actions.get(func)


def check_export() -> None:
    """Check that this is not `torch.export` with `strict=True`, which loses regions inside of regions.

    It loses those that are written by hand, too.

    Raises:
        UsageError: if it is.
    """
    if compat.is_exporting():
        raise UsageError(
            "torch.export with strict=True loses regions inside of regions, which casting= and emulate= "
            "consist of. Write torch.export.export(..., strict=False)."
        )


compat.mark_constant(check_export)


def name_in_graph(func: Callable[..., Any]) -> str:
    """Return the name of the operator that a function calls."""
    return operators.name_of(func)


def low_in(key: str, low: torch.dtype) -> torch.dtype:
    """Return the low precision of a module in a region of a low precision."""
    scope = _edits[key].scope
    return DTYPES[scope.rule] if scope and scope.rule in LOW else low


def recipe_in(key: str) -> Recipe:
    """Return the recipe of linear layers."""
    recipe = rules.recipe_of(_edits[key])
    assert recipe is not None
    return recipe


def recipe_for(device_type: str, func: Callable[..., Any], tensors: Sequence[Tensor]) -> Recipe | None:
    """Return the recipe that quantizes the products of a call, given its tensors; None if none does."""
    mode = current(device_type)
    if mode is None or not torch.is_autocast_enabled(device_type) or mode.action_of(func) != "quantized":
        return None
    recipe = recipe_in(mode.key)
    return recipe if fits(recipe, *tensors) else None


def is_counted(key: str) -> bool:
    """Return whether calls are counted for a report."""
    return _edits[key].counted


def key_inside(
    around: str,
    device_type: str,
    table: tuple[tuple[Edit, ...], tuple[str, ...]] | None,
    dtype: torch.dtype | None,
    emulate: bool,
    recipe: str,
    counted: bool,
    owner: str,
) -> str:
    """Return the key of a region's edits.

    Args:
        around: the key of the edits that hold where the region is entered.
        device_type: whose tensors are cast.
        table: the edits and optional names of the region's table; None takes the table around it.
        dtype: what the region is asked for.
        emulate: whether the region is a rehearsal; it is one inside of one.
        recipe: the key of its recipe; empty takes that of the region around it.
        counted: whether calls are counted.
        owner: identifies the model that the table's rules of modules are about.

    Raises:
        CastingError: as `rules.validate`.
    """
    outer = edits_of(around)
    edits = outer._replace(
        device_type=device_type,
        emulate=outer.emulate or emulate or bool(recipe),
        counted=counted,
        recipe=KNOWN[recipe] if recipe else outer.recipe,
    )
    made = None if table is None else Casting.of(*table)
    rules.validate(made, dtype, emulate, edits.recipe if recipe else None)
    if made is not None:
        if edits.recipe is None:
            made.check_recipe()
        edits = edits._replace(table=made, optional=made.optional, scope=None, owner=owner)
    return key_of(edits)


compat.mark_constant(key_inside)
compat.mark_constant(action_in_graph)
compat.mark_constant(name_in_graph)
compat.mark_constant(low_in)
compat.mark_constant(is_counted)
compat.mark_constant(recipe_in)


@contextmanager
def in_force(device_type: str, key: str, at: At | None = None) -> Iterator[None]:
    """Put edits in force for a while, in place of those that are; `at` is where, for a delayed recipe."""
    outer = current(device_type)
    if outer is None:
        with EditMode(device_type, key, at):
            yield
        return
    before = outer.key
    if before == key:  # as in the backward pass of a custom function in a graph, where no mode may be changed
        yield
        return
    outer.become(NONE)
    try:
        with EditMode(device_type, key, at):
            yield
    finally:
        outer.become(before)
