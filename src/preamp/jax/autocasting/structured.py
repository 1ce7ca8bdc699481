"""Primitives that hold programs: control flow, custom derivatives, rematerialisation, maps over devices.

What a loop carries keeps the dtype it was written with; other operands and results keep the precision they
arrive in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from preamp.autocasting.tables import Rule
from preamp.jax.autocasting.delayed import refusal
from preamp.jax.autocasting.lookahead import common
from preamp.jax.autocasting.precision import FLOAT32, Precision, Value, precision_of
from preamp.jax.autocasting.rewriting import Program
from preamp.jax.autocasting.rules import Handler, convert, handler_of
from preamp.jax.jaxprs import (
    CALLS,
    AnyJaxpr,
    Atom,
    ClosedJaxpr,
    Equation,
    evaluated,
    inner,
    root_of,
    root_with,
    scan_layout,
    with_operands,
    wrapped_like,
)


def _call(program: Program, equation: Equation) -> None:
    """Enter a program that runs on the operands as they are."""
    key = CALLS[equation.primitive.name]
    values = _hoisted(program, equation)
    inside = _entered(program, equation, equation.params[key], values)
    new, precisions = inside.finish()
    states = [atom for each in inside.states for atom in program.state(each.name, each.recipe)]
    params = {**with_operands(equation, [0] * len(states)), key: new}
    program.emit(equation, [*values, *(Value(atom, FLOAT32) for atom in states)], precisions, params)
    for atom, result in zip(equation.outvars, inner(equation.params[key]).outvars, strict=True):
        if inside.read(result).weight:
            program.keep_weight(atom)


def _jit(program: Program, equation: Equation) -> None:
    """Enter a jitted program; without a jit around, write its equations here unless it places arrays."""
    params = equation.params
    if program.settings.flat and not _places(equation) and not getattr(params["jaxpr"], "consts", ()):
        program.splice(equation, params["jaxpr"], program.operands(equation))
    else:
        _call(program, equation)


def _scan(program: Program, equation: Equation) -> None:
    """Enter a loop. What it carries keeps its dtype."""
    constants, carried = scan_layout(equation.params)
    values = _hoisted(program, equation)
    for place in range(constants, constants + carried):
        values[place] = _carried(program, values[place], equation.invars[place])
    body = equation.params["jaxpr"]
    inside = _entered(program, equation, body, values)
    kept = [precision_of(atom.aval) for atom in inner(body).outvars[:carried]]
    new, precisions = inside.finish(kept + [None] * (len(equation.outvars) - carried))
    program.emit(equation, values, precisions, {**equation.params, "jaxpr": new})


def _loop(program: Program, equation: Equation) -> None:
    """Enter a while loop. What it carries keeps its dtype."""
    params, values = equation.params, _hoisted(program, equation)
    cond, body = params["cond_nconsts"], params["body_nconsts"]
    carried = [
        _carried(program, value, atom)
        for value, atom in zip(values[cond + body :], equation.invars[cond + body :], strict=True)
    ]
    values[cond + body :] = carried
    given = [value._replace(weight=False) for value in values[:cond]] + carried  # no layer is in a condition
    condition = program.rewriter.program(params["cond_jaxpr"], given, (False,), program.path)
    inside = _entered(program, equation, params["body_jaxpr"], values[cond:])
    new, precisions = inside.finish([precision_of(atom.aval) for atom in equation.outvars])
    program.emit(
        equation, values, precisions, {**params, "cond_jaxpr": condition.finish()[0], "body_jaxpr": new}
    )


def _branch(program: Program, equation: Equation) -> None:
    """Enter branches. A result keeps its dtype if the branches give it different precisions."""
    values = _hoisted(program, equation)
    inside = [_entered(program, equation, it, values[1:]) for it in equation.params["branches"]]
    results = zip(*(it.finish()[1] for it in inside), strict=True)
    joined = [
        each[0] if len(set(each)) == 1 else precision_of(atom.aval)
        for each, atom in zip(results, equation.outvars, strict=True)
    ]
    branches = tuple(it.finish(joined)[0] for it in inside)
    program.emit(equation, values, joined, {**equation.params, "branches": branches})


def _custom_jvp(program: Program, equation: Equation) -> None:
    """Enter a function with its own forward derivative."""
    params, values = equation.params, _hoisted(program, equation)
    inside = _entered(program, equation, params["call_jaxpr"], values)
    new, results = inside.finish()
    rule, primals = params["jvp_jaxpr_fun"], [value.precision for value in values[params["num_consts"] :]]
    path = program.path

    def rewritten(*zeros: bool) -> tuple[Any, Any, Sequence[bool]]:
        jaxpr, constants, zero_results = rule.call_wrapped(*zeros)
        given = [precision for precision, zero in zip(primals, zeros, strict=True) if not zero]
        gives = [precision for precision, zero in zip(results, zero_results, strict=True) if not zero]
        within = _program_on(program, jaxpr, [*primals, *given], path)
        return within.finish([*results, *gives])[0], constants, zero_results

    params = {**params, "call_jaxpr": new, "jvp_jaxpr_fun": wrapped_like(rewritten, rule)}
    program.emit(equation, values, results, params)


def _custom_vjp(program: Program, equation: Equation) -> None:
    """Enter a function with its own backward derivative, which is given the dtypes it was written for."""
    params = dict(equation.params)
    key = "call_jaxpr" if "call_jaxpr" in params else "fun_jaxpr"
    forward, path = params["fwd_jaxpr_thunk"], program.path

    def rewritten(*zeros: bool) -> tuple[Any, ...]:
        jaxpr, *rest = forward.call_wrapped(*zeros) if hasattr(forward, "call_wrapped") else forward(*zeros)
        return _with_signature(program, jaxpr, path), *rest

    params[key] = _with_signature(program, params[key], path)
    params["fwd_jaxpr_thunk"] = wrapped_like(rewritten, forward)
    program.as_written(equation, params)


def _custom_vmap(program: Program, equation: Equation) -> None:
    """Enter a function with its own batching rule, which is given the dtypes it was written for."""
    params = {**equation.params, "call": _with_signature(program, equation.params["call"], program.path)}
    program.as_written(equation, params)


def _object(program: Program, equation: Equation) -> None:
    """Enter the solver of a `custom_root`, in the dtypes it was written for; leave other objects."""
    root, path = root_of(equation), program.path
    if root is None:
        program.as_written(equation)
        return

    def rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            arrays = jax.tree.leaves(args)
            jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*args)
            new = evaluated(_with_signature(program, cast(ClosedJaxpr, jaxpr), path), arrays)
            return jax.tree.unflatten(jax.tree.structure(results), new)

        return run

    program.as_written(equation, {**equation.params, "_prim": root_with(root, rewritten)})


def _entered(program: Program, equation: Equation, jaxpr: AnyJaxpr, values: Sequence[Value]) -> Program:
    """Return a program that an equation holds, rewritten for these operands."""
    wanted = program.ahead.wanted(equation.outvars)
    inside = program.rewriter.program(jaxpr, values, wanted, program.path)
    if inside.states and (equation.primitive.name not in CALLS or _places(equation)):
        raise refusal(equation.primitive.name, equation)
    return inside


def _places(equation: Equation) -> bool:
    """Return whether a program that an equation calls places arrays on devices."""
    params = equation.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    is_placed = any(isinstance(it, jax.sharding.Sharding) for it in shardings)
    return is_placed or equation.primitive.name in ("shard_map", "xla_pmap")


def _hoisted(program: Program, equation: Equation) -> list[Value]:
    """Return the operands; those that every held program only casts down are cast before the equation."""
    values = program.operands(equation)
    for place, uses in program.ahead.uses(equation).items():
        value, low = values[place], common(it.low_of(atom) for it, atom in uses)
        if value.precision == FLOAT32 and value.scalar is None and low:
            values[place] = program.cast(value, low)
    return values


def _carried(program: Program, value: Value, atom: Atom) -> Value:
    """Return a value that a loop carries: in its dtype, and not a known scalar, since it changes."""
    return program.written(value, atom.aval)._replace(scalar=None, weak=False, weight=False)


def _program_on(
    program: Program, jaxpr: AnyJaxpr, precisions: Sequence[Precision | None], path: str
) -> Program:
    values = [Value(None, precision) for precision in precisions]
    return program.rewriter.program(jaxpr, values, (False,) * len(inner(jaxpr).outvars), path)


def _with_signature(program: Program, jaxpr: AnyJaxpr, path: str) -> Any:
    """Return a program rewritten inside, with operands and results in the dtypes it was written with."""
    old = inner(jaxpr)
    inside = _program_on(program, jaxpr, [precision_of(atom.aval) for atom in old.invars], path)
    return inside.finish([precision_of(atom.aval) for atom in old.outvars])[0]


STRUCTURED: dict[str, Handler] = {
    **dict.fromkeys(CALLS, _call),
    "jit": _jit,
    "pjit": _jit,
    "scan": _scan,
    "while": _loop,
    "cond": _branch,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "custom_vjp_call_jaxpr": _custom_vjp,
    "custom_vmap_call": _custom_vmap,
    "call_hi_primitive": _object,
    "convert_element_type": convert,
}
"""The functions for equations that need more than a rule."""


def handlers_of(rules: Mapping[str, Rule]) -> dict[str, Handler]:
    """Return the function for each primitive that has a rule or holds programs."""
    return STRUCTURED | {name: handler_of(name, rule) for name, rule in rules.items()}
