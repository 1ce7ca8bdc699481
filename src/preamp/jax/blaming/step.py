"""`blame(loss_fn, params, ...)`: trace one training step, run it, and say what each operation lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from preamp.arrays.jax import is_inexact, widen
from preamp.autocasting.tables import Casting
from preamp.blaming.blame import (
    ALLOWED_LOST,
    FIRST_SCALES,
    Blame,
    BlameRow,
    beside,
    ranked,
    roundoff_in,
    with_parameters,
)
from preamp.checks import positive, shown
from preamp.errors import UsageError
from preamp.jax import jaxprs
from preamp.jax.autocasting.counting import LAYOUT
from preamp.jax.autocasting.flax_objects import attribute_name, pure
from preamp.jax.autocasting.gradients import with_float32_gradients
from preamp.jax.autocasting.module_scopes import module_scopes, scoped_method
from preamp.jax.autocasting.settings import Settings
from preamp.jax.autocasting.transform import are_weights_of, region, rewritten
from preamp.jax.blaming.effects import GRADIENTS, LOSS, measure, seed
from preamp.jax.blaming.operations import Operation
from preamp.jax.blaming.rows import errors_of, layers_of, low_flops, owners_of, rows_of
from preamp.jax.blaming.tape import BackwardOverflow, Node, Tape, Variable, what_is_in
from preamp.jax.jaxprs import ClosedJaxpr
from preamp.jax.scaling.differentiation import pulled_back, refuse_stateful
from preamp.jax.trees import kind_of
from preamp.recipes.values import PRODUCTS, Recipe

FIRST_SCALE = 2.0**16
LEAST_SCALE = 2.0**-14
MISLEADING = 0.1  # relative error of the gradients from which on their norm may be wrong itself
EXAMPLE = "blame(loss_fn, params, batch)"


def blame(
    loss_fn: Callable[..., object],
    params: Any,
    *args: Any,
    dtype: Any = jnp.bfloat16,
    recipe: Recipe | None = None,
    casting: Casting | None = None,
    loss_scale: float | None = None,
    **kwargs: Any,
) -> Blame:
    """Run one training step in low precision, and say what each operation of it loses against float32.

    Loss and gradients are computed once, one operation after the other, as
    `jax.value_and_grad(autocast(loss_fn, ..., emulate=True))` computes them. Every operation is compared with
    float32 on the very same inputs, and the derivative of the step tells how much its error changes the
    gradients and the loss. So the sum of many errors is told apart, and the one that matters is named.

    For the first three rows that are accused, the step runs again in float32 with the errors of that row
    alone, which tells the parameter whose gradient they change most.

    It costs four steps in float32 in products and convolutions. If a row is accused, or 30 % of a gradient
    are zero, one more step is run, and one for each row that is measured; where inf or NaN appears, up to
    three more. Operators run one by one, and loops are unrolled. The peak of memory is about four times
    that of a compiled step. Products in float32 have `precision="highest"`. Nothing is written to the
    parameters or to modules of Flax NNX.

    >>> import jax, jax.numpy as jnp
    >>> def loss(params, x):
    ...     hidden = x @ params["up"]
    ...     hidden = hidden + 1000.0  # the neighbors of 1000 in bfloat16 are 996 and 1004
    ...     return jnp.mean(((hidden - 1000.0) @ params["down"]) ** 2)
    >>> up, down, x = (jax.random.normal(jax.random.key(seed), (16, 16)) for seed in range(3))
    >>> found = blame(loss, {"up": up, "down": down}, x)
    >>> [(row.operator, row.direction) for row in found.guilty]
    [('add', 'forward')]

    Args:
        loss_fn: returns the loss, a floating scalar, for `params`, `args` and `kwargs`; any function that
            `jax.jit` could take.
        params: what the gradients are with respect to: the floating arrays of this tree, or module.
        args: the other arguments of `loss_fn`.
        dtype: the low precision, float16 or bfloat16.
        recipe: how products with an array of `params` are quantized; its high precision takes the place of
            `dtype`. Each layer has a row for each of its products, and beside it what the same product loses
            in the high precision alone, for which the step is run once more.
        casting: an edited table of primitives, as `autocast` takes.
        loss_scale: the scale of the gradients of the backward pass. None: for float16 the largest power of
            two up to 65536 with which nothing overflows there, otherwise 1.
        kwargs: the keyword arguments of `loss_fn`; those with the names above need a `functools.partial`.

    Returns:
        One row for each primitive, module, line and direction, worst first. Modules and lines are those in
        the report of `casts`. Casts are charged to the operator that they are for, such as a product.

    Raises:
        CastingError: as `autocast` does.
        UsageError: for a loss that is not a floating scalar, for parameters without floating arrays, for a
            function that JAX cannot trace, and inside of `jit`, `grad` or `vmap`.
        PolicyError: for a loss scale that is not a finite number above 0.
    """
    run = partial(rehearsed, loss_fn, params, args, kwargs, dtype=dtype, loss_scale=loss_scale)
    found, differences = run(casting=casting, recipe=recipe)
    if recipe is not None:
        table = None if casting is None else casting.without_recipes()
        found = beside(found, run(casting=table, recipe=recipe.without(*PRODUCTS))[0])
    return with_parameters(found, differences)


def rehearsed(
    loss_fn: Callable[..., object],
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dtype: Any,
    casting: Casting | None,
    loss_scale: float | None,
    recipe: Recipe | None = None,
) -> tuple[Blame, Callable[[BlameRow], Iterable[tuple[float, str]]]]:
    """Return what `blame` does without parameters, and what measures those of a row.

    The latter returns for each parameter how much its gradient changes through the row alone, and its name.
    """
    settings = region(dtype, casting, True, recipe.current if isinstance(recipe, Recipe) else recipe)
    if not callable(loss_fn):
        raise UsageError(f"{kind_of(loss_fn)} cannot be called as a loss. Write {EXAMPLE}.")
    if loss_scale is not None:
        positive("loss_scale", loss_scale, "loss_scale=None")
    step = traced(loss_fn, params, args, kwargs, settings)
    tape, results, scale = run(step, settings, loss_scale)
    in_float32 = Tape(in_float32=True, traces=True)
    exact_loss = step.float32_loss(in_float32)
    loss, float32_loss, not_finite = float(results[0].value), float(exact_loss.value), ""
    if any(what_is_in(each.value) for each in (exact_loss, *results)):
        forward = in_float32.operations
        not_finite = _not_finite_in_float32(step, in_float32, exact_loss)
        broken = {} if not_finite else _broken(step, scale, forward)
        if math.isnan(loss) and not not_finite:
            tape = Tape(without_nan=True)
            results = tape.run(step.program, step.operands(tape, scale))
        for call in tape.calls:
            call.breaks = broken.get(call.index, "")
            call.overflowed = 0 if not_finite else call.overflowed
    overflowed = [call for call in tape.calls if call.overflowed and not call.is_backward]
    if overflowed and _are_equal(results, Tape(repairs=False).run(step.program, step.operands(tape, scale))):
        for call in overflowed:  # nothing depends on it, as behind a mask
            call.overflowed = 0
    lowered = loss_scale is None and settings.dtype == jnp.float16 and scale != FIRST_SCALE and not not_finite
    notes = [f"The loss scale is {scale:g}: gradients overflow with {FIRST_SCALE:g}."] if lowered else []
    notes += [FIRST_SCALES] if recipe and recipe.delayed else []
    if any(call.overflowed for call in tape.calls):
        notes.append("What overflowed was replaced by the largest number of its precision, to go on.")
    size = abs(float32_loss) if float32_loss and math.isfinite(float32_loss) else 1.0
    weights = list(map(weight_of, step.params))
    exact = cache(partial(step.gradients, tape, scale))
    norm = _seed(results, weights, scale, exact)
    tape.join_backward(results[0].node)
    del results  # which the derivative does not need
    owners = owners_of(tape.calls, settings)
    rows = rows_of(tape, owners, measure(tape), size)
    if not_finite:
        rows = [replace(row, effect=math.nan) for row in rows]
    if math.hypot(*(row.effect for row in rows)) > MISLEADING:
        exact_norm = _norm(exact(), weights, scale)
        rows = [replace(row, effect=row.effect * norm / exact_norm) for row in rows]

    def differences(row: BlameRow) -> Iterable[tuple[float, str]]:
        changed = step.gradients(tape, scale, errors_of(row, tape.calls, owners))
        return zip(map(_difference, changed, exact()), step.names, strict=True)

    roundoff = roundoff_in(recipe) if recipe else float(jnp.finfo(settings.dtype).eps) / 2
    found = Blame(
        rows=rows if not_finite else ranked(rows, roundoff),
        dtype=settings.dtype.name,
        loss=loss,
        float32_loss=float32_loss,
        predicted_loss=float32_loss + size * sum(row.loss_effect for row in rows),
        loss_scale=scale,
        notes=(*notes, *tape.notes),
        flops=tape.flops,
        low_flops=low_flops(tape.calls),
        not_finite=not_finite,
        recipe=recipe.name or "a recipe" if recipe else "",
        layers=layers_of(tape.calls),
    )
    return found, differences


class StepProgram(NamedTuple):
    """A training step as a program of all arrays and of the loss scale, which the backward pass begins with.

    Attributes:
        program: returns the loss, and the scaled gradients of the parameters.
        arrays: all arrays of its call.
        params: those of them that the gradients are with respect to.
        names: of these, such as "params['w']".
    """

    program: ClosedJaxpr
    arrays: Sequence[Any]
    params: Sequence[Any]
    names: Sequence[str]

    def operands(self, tape: Tape, scale: float) -> list[Variable]:
        """Return the operands of the program."""
        seed = Variable(jnp.float32(scale), Node(is_backward=True))
        return [*map(tape.constant, self.arrays), seed]

    def float32_loss(self, tape: Tape) -> Variable:
        """Return the loss in float32, on a tape for it."""
        wanted = [True] + [False] * len(self.params)
        return tape.run(self.program, self.operands(tape, 1.0), wanted=wanted)[0]

    def gradients(
        self, followed: Tape, scale: float, errors: Mapping[int, Sequence[Any]] | None = None
    ) -> list[Any]:
        """Return the scaled gradients in float32.

        Args:
            followed: the step in low precision, whose branches and numbers of turns are taken.
            scale: the loss scale.
            errors: what is added to results, by the index of the call in low precision.
        """
        tape = Tape(in_float32=True, follows=followed, errors=errors)
        return [each.value for each in tape.run(self.program, self.operands(tape, scale))[1:]]


def traced(
    loss_fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
) -> StepProgram:
    """Trace the loss, rewrite it, and trace its gradients.

    Raises:
        UsageError: as `blame` does.
    """
    refuse_stateful(params)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf) if type(leaf) is float else leaf, params)
    with module_scopes() as calls, pure(scoped_method(loss_fn), (params, *args), kwargs) as program:
        before, first = program.args[: -len(args) - 1], program.args[-len(args) - 1]
        start = len(jaxprs.split(before)[0])
        leaves = [pair for pair in jax.tree_util.tree_leaves_with_path(first) if jaxprs.is_traced(pair[1])]
        floating = [(start + place, path) for place, (path, leaf) in enumerate(leaves) if _is_floating(leaf)]
        chosen = [number for number, _ in floating]
        if not chosen:
            raise UsageError(
                f"params is {kind_of(params)} without floating arrays, which have no gradients. Write "
                f"{EXAMPLE}, with the parameters first."
            )
        try:
            are_weights = are_weights_of(program, 1 + len(args), [0])
            call = rewritten(program, settings, calls, are_weights, stacklevel=6)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise UsageError(
                f"JAX cannot trace this loss ({type(error).__name__}: {_first_line(error)}). blame takes "
                "what jax.jit takes: write jnp.where or lax.cond for what depends on values."
            ) from error
    _check_known(call)
    call = call._replace(jaxpr=with_float32_gradients(call.jaxpr))
    place = _place_of_loss(call)

    def loss_of(arrays: Sequence[Any], *chosen_arrays: Any) -> Any:
        filled = list(arrays)
        for number, array in zip(chosen, chosen_arrays, strict=True):
            filled[number] = array
        return jaxprs.run(call.jaxpr, filled)[place]

    def step(arrays: Sequence[Any], scale: Any) -> tuple[Any, ...]:
        loss, pull_back = jax.vjp(partial(loss_of, arrays), *(arrays[number] for number in chosen))
        return loss, *pulled_back(pull_back, loss, scale)

    arrays = [jnp.asarray(array) for array in call.arrays]
    traced: Any = jax.make_jaxpr(step)(arrays, jnp.float32(1))
    names = [attribute_name(f"params{jax.tree_util.keystr(path)}") for _, path in floating]
    return StepProgram(traced, arrays, [arrays[number] for number in chosen], names)


def _check_known(call: jaxprs.TracedCall) -> None:
    """Raise unless the numbers of all arrays are known."""
    abstract = [array for array in call.arrays if isinstance(array, jax.ShapeDtypeStruct)]
    if abstract:
        raise UsageError(
            f"{abstract[0]} has no values, and blame runs the step. Write {EXAMPLE} with arrays."
        )
    arrays = [*call.arrays, *call.jaxpr.consts, jnp.zeros(()) + 1]
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise UsageError(
            "blame runs the step to look at its values, which jit, grad and vmap hide. Write "
            f"{EXAMPLE} outside of them; loss_fn itself may use them."
        )


def _place_of_loss(call: jaxprs.TracedCall) -> int:
    """Return which of a call's results is the loss.

    Raises:
        UsageError: for one that is not a floating scalar.
    """
    results = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in call.jaxpr.jaxpr.outvars]
    loss = call.returned(results)[1]
    place = next((place for place, each in enumerate(results) if each is loss), None)
    if place is None:
        advice = "lambda *args: loss_fn(*args)[0]" if isinstance(loss, tuple) else "return jnp.mean(loss)"
        raise UsageError(f"the loss is {shown(loss)}, not a scalar array. Write {advice}.")
    if loss.shape:
        raise UsageError(f"the loss has the shape {loss.shape}, not (). Write return jnp.mean(loss).")
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise UsageError(
            f"the loss is of dtype {loss.dtype}, which has no gradient. Write a floating one: loss.real, or "
            "loss.astype(jnp.float32)."
        )
    return place


def run(
    step: StepProgram, settings: Settings, loss_scale: float | None
) -> tuple[Tape, list[Variable], float]:
    """Run the step; return what ran, its results, and the loss scale.

    What the scale multiplies is proportional to it, so one overflow tells how far it has to go down.
    """
    scaled = loss_scale is None and settings.dtype == jnp.float16
    scale = FIRST_SCALE if scaled else float(loss_scale or 1.0)
    while True:
        tape = Tape(stops=scaled)
        try:
            return tape, tape.run(step.program, step.operands(tape, scale)), scale
        except BackwardOverflow as overflow:
            scale *= 2.0 ** min(-1, -math.ceil(math.log2(overflow.excess)))
            if scale < LEAST_SCALE:  # it is not the scale
                scaled, scale = False, 1.0


def _seed(
    results: Sequence[Variable], weights: Sequence[float], scale: float, exact: Callable[[], Sequence[Any]]
) -> float:
    """Seed the sensitivities of the loss, and of the gradients in units of their norm, which is returned.

    The gradients are weighted by random signs times a weight for each parameter: the expected square of
    their sensitivity is the sum of the squares of all gradients' sensitivities. Where much of a parameter's
    gradient became zero, what did is in units of its own norm: no other parameter makes up for it.

    Args:
        results: the loss and the scaled gradients in low precision.
        weights: of the parameters.
        scale: the loss scale.
        exact: returns the scaled gradients in float32.
    """
    loss, nodes = results[0], [each.node for each in results[1:]]
    gradients = [np.asarray(widen(each.value)) for each in results[1:]]
    seed(loss.node, LOSS, jnp.ones((), widen(loss.value).dtype))
    right = gradients
    if any(node.maker and _is_much(each == 0) for node, each in zip(nodes, gradients, strict=True)):
        right = [np.asarray(each) for each in exact()]
    norm = _norm(right, weights, scale)
    random = np.random.default_rng(0)
    for node, weight, low, wide in zip(nodes, weights, gradients, right, strict=True):
        units, gone = np.full(low.shape, norm / weight * scale), (low == 0) & (wide != 0)
        if _is_much(gone):
            units[gone] = np.linalg.norm(wide[gone].astype(np.float64))
        signs = random.choice([-1.0, 1.0], low.shape)
        seed(node, GRADIENTS, jnp.asarray(signs / units, low.dtype))
    return norm


def _is_much(lost: Any) -> bool:
    """Return whether the entries of a gradient that are lost are more than may be."""
    return bool(np.size(lost)) and bool(np.mean(lost) >= ALLOWED_LOST)


def _are_equal(one: Sequence[Variable], other: Sequence[Variable]) -> bool:
    return all(np.array_equal(a.value, b.value) for a, b in zip(one, other, strict=True))


def _not_finite_in_float32(step: StepProgram, tape: Tape, loss: Variable) -> str:
    """Return what is inf or NaN in float32 and what makes it first, as a sentence; "" if nothing is.

    Args:
        step: any.
        tape: what ran the loss in float32, and nothing else.
        loss: what it returned.
    """
    forward = tape.operations
    if what_is_in(loss.value):
        return _as_well(f"The loss is {float(loss.value)}", loss, forward)
    gradients = tape.run(step.program, step.operands(tape, 1.0))[1:]
    pairs = zip(step.names, gradients, strict=True)
    bad = [(name, each, what) for name, each in pairs if (what := what_is_in(each.value))]
    if not bad:
        return ""
    name, gradient, what = bad[0]
    more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
    return _as_well(f"The gradient of {name}{more} has {what}", gradient, forward)


def _as_well(says: str, result: Variable, forward: Sequence[Operation]) -> str:
    """Return the sentence on a result that is not finite in float32; `says` is what it has."""
    says = f"{says} in float32 as well, so precision is not the cause"
    if result.origin is None:
        return f"{says}."
    what, who = result.origin.what, _in_words(result.origin.operation, forward)
    if result.origin.is_given:
        return f"{says}: what {who} is given has {what}."
    return f"{says}: {who} makes {what} first."


def _broken(step: StepProgram, scale: float, forward: Sequence[Operation]) -> dict[int, str]:
    """Return the calls whose values became zero, by index, and what makes inf or NaN of these."""
    tape = Tape(traces=True)
    results = tape.run(step.program, step.operands(tape, scale))
    origins = [each.origin for each in reversed(results) if each.origin]  # the loss has the last word
    return {index: _in_words(each.operation, forward) for each in origins for index in each.losers}


def _in_words(operation: Operation, forward: Sequence[Operation]) -> str:
    """Return an operation and its line.

    Args:
        operation: any.
        forward: the operations that the loss needs; the derivative of one has its traceback.
    """
    within, results = operation.equation.source_info.traceback, operation.equation.outvars
    if any(each.equation.outvars[0] is results[0] for each in forward):
        return f"{operation.name} at {operation.source}"
    named = (each for each in forward if not each.is_cast and each.name not in LAYOUT)
    first = next((each for each in named if each.equation.source_info.traceback == within), operation)
    return f"the backward pass of {first.name} at {operation.source}"


def _norm(gradients: Sequence[Any], weights: Sequence[float], scale: float) -> float:
    """Return the norm of gradients with a weight for each parameter; 1 if it is 0 or not finite."""
    norms = [float(np.linalg.norm(np.asarray(widen(each), np.float64))) / scale for each in gradients]
    norm = math.hypot(*(weight * each for weight, each in zip(weights, norms, strict=True)))
    return norm if norm and math.isfinite(norm) else 1.0


def _difference(changed: Any, exact: Any) -> float:
    """Return the relative error of a gradient; 0 where the gradient is 0, inf for one that is not finite."""
    norms = [float(np.linalg.norm(np.asarray(widen(each), np.float64))) for each in (changed - exact, exact)]
    if not all(map(math.isfinite, norms)):
        return math.inf
    return norms[0] / norms[1] if norms[1] else 0.0


def weight_of(param: Any) -> float:
    """Return the root mean square of a parameter; where that is 0, that of an initialisation."""
    values = np.asarray(widen(param), np.float64)
    found = math.sqrt(float(np.mean(values * values))) if values.size else 0.0
    return found or 1 / math.sqrt(max(param.shape, default=1) or 1)


def _is_floating(array: Any) -> bool:
    return is_inexact(array) and not jnp.issubdtype(array.dtype, jnp.complexfloating)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
