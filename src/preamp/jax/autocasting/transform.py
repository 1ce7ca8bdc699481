"""`autocast(fn)`: trace a call, rewrite its program, and run it under a name that identifies the region."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from preamp.autocasting.tables import DEFAULT, EXPLICIT_PRECISION, Casting
from preamp.errors import CastingError, UsageError
from preamp.jax import jaxprs
from preamp.jax.autocasting.delayed import State, entered, taken
from preamp.jax.autocasting.flax_objects import Pure, pure
from preamp.jax.autocasting.gradients import with_float32_gradients
from preamp.jax.autocasting.module_scopes import Calls, module_scopes, scoped_method
from preamp.jax.autocasting.names import check_names, missed, rules_of, unmatched
from preamp.jax.autocasting.precision import LOWS, Precision, Value, precision_of
from preamp.jax.autocasting.rewriting import Rewriter
from preamp.jax.autocasting.settings import Settings
from preamp.jax.autocasting.structured import handlers_of
from preamp.jax.jaxprs import ClosedJaxpr
from preamp.jax.trees import RecipeScales
from preamp.recipes import Recipe

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

ALIASES = {"half": "float16"}
OFF = jaxprs.REGION + "off"
DEFAULT_PRECISIONS = ("default", "bfloat16")  # two names of one setting
_PATTERNS: ContextVar[frozenset[str]] = ContextVar("patterns of the regions that are being traced")


@overload
def autocast(
    fn: F,
    dtype: Any = ...,
    *,
    casting: Casting | None = ...,
    enabled: bool = ...,
    emulate: bool = ...,
    recipe: None = ...,
    weights: Sequence[int] = ...,
) -> F: ...
@overload
def autocast(
    fn: Callable[..., T],
    dtype: Any = ...,
    *,
    casting: Casting | None = ...,
    enabled: bool = ...,
    emulate: bool = ...,
    recipe: Recipe | None,
    weights: Sequence[int] = ...,
) -> Callable[..., T]: ...
@overload
def autocast(
    fn: None = ...,
    dtype: Any = ...,
    *,
    casting: Casting | None = ...,
    enabled: bool = ...,
    emulate: bool = ...,
    recipe: Recipe | None = ...,
    weights: Sequence[int] = ...,
) -> Callable[[F], F]: ...
def autocast(
    fn: Any = None,
    dtype: Any = jnp.bfloat16,
    *,
    casting: Casting | None = None,
    enabled: bool = True,
    emulate: bool = False,
    recipe: Recipe | None = None,
    weights: Sequence[int] = (),
) -> Any:
    """Return a function that computes what `fn` computes, each operator in the precision of its rule.

    Products and convolutions run in the low precision, exponentials, logarithms, powers and sums in float32,
    everything else in the widest precision of its operands (`casting.JAX`). Results are not cast back.
    Arithmetic that feeds operators in float32 runs in float32 itself. A broadcast bias that is added to a
    product stays in the low precision (so put `vmap` inside). Literals widen nothing unless the low precision
    cannot hold them. A product that asks for its precision, such as `jnp.matmul(x, w, precision="highest")`,
    keeps it (`explicit_precision` in the table).

    It composes with JAX's transformations, inside and outside. Where regions nest, an inner one with other
    settings keeps its own. Every call traces `fn`, so put `jax.jit` around it.

    >>> import jax.numpy as jnp
    >>> @autocast(dtype=jnp.bfloat16)
    ... def layer(x, w):
    ...     return jnp.tanh(x @ w)
    >>> layer(jnp.ones((2, 3)), jnp.ones((3, 2))).dtype
    dtype(bfloat16)

    Args:
        fn: any function that `jax.jit` could take. Arrays in its arguments are traced; everything else,
            Python numbers included, is passed on as it is.
        dtype: the low precision, float16 or bfloat16.
        casting: an edited table of primitives, such as `casting.DEFAULT.float32("dot_general")`.
        enabled: False runs `fn` as it was written, even inside another region.
        emulate: rehearse the region: the same casts, dtypes and overflows, on a device that is slow in
            `dtype` or compiles its roundings away. Products compute in float32, forward and backward, and
            store their results in `dtype`, as tensor cores do.
        recipe: rehearse it: products of an operand that the `weights` hold, moved or cast at most, are
            quantized as it says, but for those in functions with a derivative by `jax.custom_vjp`. All else
            runs in its high precision, which takes the place of `dtype`. With delayed scales, the
            function takes them before all other arguments (`recipe_state`).
        weights: the places of the arguments of `fn` that hold the weights, such as `(0,)`.

    Returns:
        The function; without `fn`, a decorator.

    Raises:
        CastingError: for another dtype, for `enabled` or `emulate` that is not a boolean, and when called,
            for a name in `casting` that is not a primitive (the message suggests the nearest names), and
            for a primitive that the table refuses.
    """
    _check_boolean("enabled", enabled)
    settings = region(dtype, casting, emulate, recipe)
    if weights and recipe is None:
        raise CastingError("weights= says what a recipe quantizes. Write recipe=preamp.recipes.MXFP8, too.")
    if recipe is not None and not weights:
        raise CastingError(
            "recipe= quantizes products with a weight. Write weights=(0,) if the first argument holds the "
            "weights."
        )
    if fn is None:
        return _Decorator(
            dtype, casting=casting, enabled=enabled, emulate=emulate, recipe=recipe, weights=weights
        )
    _check_function(fn)

    @functools.wraps(fn, updated=())
    def cast(*args: object, **kwargs: object) -> Any:
        scales, args = taken(args) if settings.delayed else (RecipeScales({}), args)
        if not enabled:
            with jax.named_scope(OFF):
                return fn(*args, **kwargs)
        _warn_of_ambient_precision(settings)
        scopes = module_scopes() if settings.has_modules else nullcontext(Calls())
        with scopes as calls, pure(scoped_method(fn), args, kwargs) as program:
            # A function that ran before would be inlined as it was traced then, without the names of modules.
            with jaxprs.tracing_for(settings.name) if settings.has_modules else nullcontext():
                call, written = _traced(program, settings)
            are_weights = are_weights_of(program, len(args), weights)
            _warn_of_unmatched(settings, calls, call.jaxpr, stacklevel=3)
            flat = settings.delayed or jaxprs.are_known([*call.arrays, *call.jaxpr.consts])
            jaxpr, states = rewrite(call.jaxpr, replace(settings, flat=flat), written, are_weights)
            jaxpr = with_float32_gradients(jaxpr)
            with jax.named_scope(settings.name):
                results = jaxprs.evaluated(jaxpr, [*call.arrays, *entered(scales, states)])
            return program.written_back(call.returned(results))

    return cast


class _Decorator(functools.partial[Any]):
    """`autocast` with its settings, waiting for the function."""

    def __new__(cls, dtype: Any, **settings: Any) -> _Decorator:
        return super().__new__(cls, autocast, dtype=dtype, **settings)

    def __enter__(self) -> None:
        raise UsageError(
            "autocast is not a context manager in JAX: it needs a function to trace. Write autocast(fn, "
            f"dtype={_name(self.keywords['dtype'])!r})(...), or decorate fn."
        )

    def __exit__(self, *error: object) -> None:
        """Never reached."""


def _check_function(fn: object) -> None:
    """Raise for a dtype or an array in place of the function."""
    if isinstance(fn, str | np.dtype | type(jnp.float16)) or (
        isinstance(fn, type) and issubclass(fn, np.generic)
    ):
        name = _name(fn)
        raise CastingError(
            f"{name} is a dtype where a function is expected. Write autocast(fn, dtype={name!r})."
        )
    if not callable(fn):
        what = "An array" if jaxprs.is_traced(fn) else f"A {type(fn).__name__}"
        raise CastingError(
            f"{what} is not a function. Write autocast(fn)(...) with the function that computes it."
        )


def _warn_of_ambient_precision(settings: Settings) -> None:
    """Warn if JAX's default matmul precision keeps every product above the low precision."""
    ambient = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    lowers = settings.rules["dot_general"] == "lower" and settings.rules[EXPLICIT_PRECISION] == "untouched"
    if lowers and ambient not in (None, *DEFAULT_PRECISIONS):
        warnings.warn(
            f"jax_default_matmul_precision is {ambient!r} around this region, so its products stay in the "
            "precision they were written with. Set it only around what needs it, or write "
            f"autocast(fn, casting=casting.DEFAULT.lower({EXPLICIT_PRECISION!r})) to cast them.",
            stacklevel=3,
        )


def _warn_of_unmatched(settings: Settings, calls: Calls, jaxpr: ClosedJaxpr, *, stacklevel: int) -> None:
    """Warn of edits that do not apply to copies of modules, and of patterns that match no module.

    The latter only if the program is not part of a larger one. A function that is called by a module, or by
    another region with the same pattern, need not have every module of the table.
    """
    if not settings.has_modules:
        return
    in_copies = missed(settings.table, calls, jaxpr)
    for each in in_copies:
        warnings.warn(str(each), stacklevel=stacklevel)
    if not jaxprs.current_path():
        known = _PATTERNS.get(frozenset()).union(each.pattern for each in in_copies)
        advice = unmatched([each for each in settings.table.modules if each not in known], jaxpr)
        if advice:
            warnings.warn(advice, stacklevel=stacklevel)


def _check_boolean(name: str, value: object) -> None:
    if not isinstance(value, bool | np.bool_):
        raise CastingError(f"{name}={value!r:.60} is not a boolean. Write {name}=True or {name}=False.")


def region(dtype: object, table: Casting | None, emulate: bool, recipe: Recipe | None = None) -> Settings:
    """Return the settings of a region.

    Raises:
        CastingError: for a dtype that cannot be the low precision, and for what is not a table.
    """
    _check_boolean("emulate", emulate)
    if not isinstance(table, Casting | None):
        raise CastingError(f"casting={table!r} is not a table. Write casting=casting.DEFAULT.lower('exp').")
    table = DEFAULT if table is None else table
    if recipe is None and isinstance(table, Casting):
        table.check_recipe()
    if recipe is not None and not isinstance(recipe, Recipe):
        raise CastingError(f"recipe={recipe!r} is not a recipe. Write recipe=preamp.recipes.MXFP8.")
    if recipe is not None and _low(dtype).name not in ("bfloat16", recipe.high):  # bfloat16 is the default
        raise CastingError(
            f"dtype={_name(dtype)!r}, and the recipe's high precision is {recipe.high}. Write recipe= "
            f"without dtype=, or dataclasses.replace(recipe, high={_name(dtype)!r})."
        )
    low, rules = _low(recipe.high if recipe else dtype), rules_of(table)
    emulate = emulate or recipe is not None
    # The order of edits counts where there are modules, otherwise only the rules do.
    edited = repr(table.edits if table.modules else sorted(rules.items()))
    edits = f"_{zlib.crc32(edited.encode()):08x}" if table.edits else ""
    quantized = f"_{zlib.crc32(recipe.key.encode()):08x}" if recipe else ""
    name = f"{jaxprs.REGION}{'emulated_' * emulate}{low.name}{edits}{quantized}"
    return Settings(low, rules, emulate, name, table=table, recipe=recipe)


def rewritten(
    program: Pure, settings: Settings, calls: Calls, are_weights: Sequence[bool] = (), *, stacklevel: int = 4
) -> jaxprs.TracedCall:
    """Return a call as it is in a region; `jax.ShapeDtypeStruct`s may take the place of arrays."""
    with jaxprs.tracing_for(settings.name):
        call, written = _traced(program, settings)
    _warn_of_unmatched(settings, calls, call.jaxpr, stacklevel=stacklevel)
    jaxpr, states = rewrite(call.jaxpr, settings, written, are_weights)
    if states:
        raise UsageError(
            f"{states[0].name} has a recipe with scales of earlier steps, and none have run here. Write "
            "recipe.current in the table."
        )
    return call._replace(jaxpr=jaxpr)


def are_weights_of(program: Pure, count: int, weights: Sequence[int]) -> list[bool]:
    """Return for each array of a call whether it is a weight.

    Args:
        program: the call; the module that the function is a method of may come before the arguments.
        count: how many arguments the caller gave.
        weights: the places of those that hold weights.
    """
    first = len(program.args) - count
    if missing := [place for place in weights if not 0 <= place < count]:
        raise UsageError(
            f"weights={tuple(weights)}, and the function was called with {count} positional arguments, so "
            f"there is no argument {missing[0]}. Pass the weights as positional arguments."
        )
    flags: list[bool] = []
    for place, tree in enumerate(program.args):
        is_weight = place - first in weights
        flags += [is_weight] * len(jaxprs.split(tree)[0])
    return flags


def rewrite(
    jaxpr: ClosedJaxpr, settings: Settings, written: int = 0, are_weights: Sequence[bool] = ()
) -> tuple[ClosedJaxpr, list[State]]:
    """Return a closed jaxpr as it is in a region, and the states that it takes after its operands.

    Args:
        jaxpr: the program.
        settings: the region's.
        written: how many results, the first ones, keep the dtypes they were written with.
        are_weights: for each of the first operands, whether it is a weight.

    Raises:
        CastingError: for a rule of a primitive that does not exist, and for one that is refused.
    """
    check_names(settings.rules, jaxpr)
    weights = (*are_weights, *[False] * (len(jaxpr.jaxpr.invars) - len(are_weights)))
    values = [
        Value(atom, precision_of(atom.aval), weight=is_weight)
        for atom, is_weight in zip(jaxpr.jaxpr.invars, weights, strict=True)
    ]
    results = jaxpr.jaxpr.outvars
    kept = [precision_of(atom.aval) for atom in results[:written]]
    path = jaxprs.current_path() if settings.has_modules else ""
    program = Rewriter(settings, handlers_of).program(jaxpr, values, (False,) * len(results), path)
    return program.finish([*kept, *[None] * (len(results) - written)])[0], program.states


def _traced(program: Pure, settings: Settings) -> tuple[jaxprs.TracedCall, int]:
    """Trace a call without objects; return as well how many of its results are state, which come first."""
    counts: list[int] = []

    @functools.wraps(program.fn, updated=())
    def counted(*args: object, **kwargs: object) -> tuple[Any, Any]:
        state, results = program.fn(*args, **kwargs)
        counts.append(len(jaxprs.split(state)[0]))
        return state, results

    token = _PATTERNS.set(_PATTERNS.get(frozenset()).union(settings.table.modules))
    try:
        return jaxprs.traced(counted, program.args, program.kwargs), counts[-1]
    finally:
        _PATTERNS.reset(token)


def _low(dtype: object) -> Precision:
    """Return a region's low precision."""
    name = _name(dtype)
    for low in LOWS:
        if low.name == name:
            return low
    if name.startswith("float8"):
        raise CastingError(
            f"dtype={name!r} needs a scale for each array: without, most numbers are 0 or overflow. Write "
            "recipe=preamp.recipes.FLOAT8_CURRENT, weights=(0,) without dtype=."
        )
    allowed = " or ".join(f"dtype={each.name!r}" for each in LOWS)
    raise CastingError(f"{dtype!r} is not a low precision that autocast knows. Write {allowed}.")


def _name(dtype: Any) -> str:
    """Return a dtype's name, or what was given in its place."""
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    return ALIASES.get(name, name)
