"""Make, read and evaluate jaxprs in every JAX from 0.6 to 0.12: the one file that uses JAX's internals."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import jax
import jax.extend.core as extended
import numpy as np
from jax.extend import linear_util, source_info_util
from jax.extend.core import primitives


class Aval(Hashable, Protocol):
    """The shape and dtype of an array; `is_array` is false for tokens and references, which have neither."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def weak_type(self) -> bool: ...
    def update(self, **changes: object) -> Aval: ...


class Atom(Protocol):
    """A variable, or a number in the program's text."""

    @property
    def aval(self) -> Aval: ...


class Equation(Protocol):
    """One operation of a program."""

    @property
    def primitive(self) -> extended.Primitive: ...
    @property
    def invars(self) -> list[Atom]: ...
    @property
    def outvars(self) -> list[Atom]: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def effects(self) -> Collection[object]: ...
    @property
    def source_info(self) -> Any: ...
    def replace(self, **changes: object) -> Equation: ...


class Jaxpr(Protocol):
    """A program without its constants."""

    @property
    def constvars(self) -> list[Atom]: ...
    @property
    def invars(self) -> list[Atom]: ...
    @property
    def outvars(self) -> list[Atom]: ...
    @property
    def eqns(self) -> list[Equation]: ...
    @property
    def effects(self) -> Collection[object]: ...
    @property
    def debug_info(self) -> object: ...
    def replace(self, **changes: object) -> Jaxpr: ...


class ClosedJaxpr(Protocol):
    """A program with its constants."""

    @property
    def jaxpr(self) -> Jaxpr: ...
    @property
    def consts(self) -> list[Any]: ...
    def replace(self, **changes: object) -> ClosedJaxpr: ...


AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
P = TypeVar("P", bound=AnyJaxpr)


def _moved(name: str) -> Any:
    """Return a name that moved from jax.core to jax.extend.core."""
    return getattr(extended, name) if hasattr(extended, name) else getattr(jax.core, name)


_DropVar, _no_effects, _new_equation = _moved("DropVar"), _moved("no_effects"), _moved("new_jaxpr_eqn")
_concrete_or_error = _moved("concrete_or_error")
_suffixed = "suffix" in inspect.signature(extended.Var).parameters  # JAX 0.6.0

_tracing_for: Callable[[str], AbstractContextManager[object]] | None = (
    jax.make_user_context("") if hasattr(jax, "make_user_context") else None  # since JAX 0.7.2
)
RETRACES = _tracing_for is not None
"""Whether JAX can be made to trace a function again inside a region, when it has traced it before."""

PRIMITIVES = frozenset(getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p"))
"""The names of JAX's own primitives."""

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
    "xla_pmap": "call_jaxpr",
}
"""Primitives that run one program on their operands, one to one, and the parameter that holds it."""

REGION = "preamp_autocast_"
_REGION = re.compile(REGION + r"\w+")
# What JAX writes among the names of scopes: "transpose(jvp(Net))" is in Net, "jit(f)" in nothing.
_TRANSFORMATIONS = re.compile(r"\bp?jit\([^()]*\)|\w+\(|\)|\b(?:checkpoint|rematted_computation)\b")

_HELD = CALLS | {"scan": "jaxpr", "custom_jvp_call": "call_jaxpr"}


class TracedCall(NamedTuple):
    """A traced call.

    Attributes:
        jaxpr: the closed jaxpr of the call.
        arrays: the arrays in its arguments.
        returned: rebuilds what the function returned from the arrays in it.
    """

    jaxpr: ClosedJaxpr
    arrays: list[Any]
    returned: Callable[[Sequence[object]], Any]


def traced(
    fn: Callable[..., object], args: Sequence[object] = (), kwargs: dict[str, object] | None = None
) -> TracedCall:
    """Trace a call: arrays in its arguments become variables, everything else stays as it is."""
    arrays, rebuild = split((tuple(args), kwargs or {}))
    returned: list[Callable[[Sequence[object]], Any]] = []

    @functools.wraps(fn, updated=())
    def flat(*arrays: object) -> list[Any]:
        args, kwargs = rebuild(arrays)
        results, back = split(fn(*args, **kwargs))
        returned.append(back)
        return results

    return TracedCall(cast(ClosedJaxpr, jax.make_jaxpr(flat)(*arrays)), arrays, returned[-1])


def tracing_for(region: str) -> AbstractContextManager[object]:
    """Return a context in which JAX reuses no trace made in another region, or outside of regions."""
    return _tracing_for(region) if _tracing_for else nullcontext()


def split(tree: object) -> tuple[list[Any], Callable[[Sequence[object]], Any]]:
    """Return a tree's arrays, and a function that puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    places, arrays, others = [], [], leaves.copy()
    for place, leaf in enumerate(leaves):
        if is_traced(leaf):
            places.append(place)
            arrays.append(
                leaf if isinstance(leaf, jax.Array) or not _converts(leaf) else leaf.__jax_array__()
            )
            others[place] = None  # a tracer that is kept is a leak

    def rebuild(arrays: Sequence[object]) -> Any:
        filled = others.copy()
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.unflatten(structure, filled)

    return arrays, rebuild


def is_traced(leaf: object) -> bool:
    """Return whether a leaf is an array that JAX can trace; `jax.ShapeDtypeStruct`s are."""
    if isinstance(leaf, jax.Array):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype != jax.dtypes.float0 and leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, jax.ShapeDtypeStruct) or _converts(leaf)


def _converts(leaf: object) -> bool:
    """Return whether an object says how it becomes an array; the tracer of a `jax.Ref` has None there."""
    return callable(getattr(leaf, "__jax_array__", None))


def inner(jaxpr: AnyJaxpr) -> Jaxpr:
    """Return the open jaxpr of an open or a closed one."""
    return cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr))


def rebuilt(jaxpr: P, invars: list[Atom], outvars: list[Atom], equations: list[Equation]) -> P:
    """Return a jaxpr, closed if `jaxpr` is, with its constants and effects and other contents."""
    old = inner(jaxpr)
    info: Any = old.debug_info
    if len(invars) != len(old.invars):
        info = info._replace(arg_names=("",) * len(invars))
    new = old.replace(invars=invars, outvars=outvars, eqns=equations, debug_info=info)
    return cast(P, cast(ClosedJaxpr, jaxpr).replace(jaxpr=new) if hasattr(jaxpr, "consts") else new)


def alive(equations: Sequence[Equation], results: Sequence[Atom]) -> list[Equation]:
    """Return the equations that results depend on, and those with effects: others are not compiled."""
    needed = {atom for atom in results if not is_literal(atom)}
    alive = []
    for equation in reversed(equations):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            alive.append(equation)
            needed.update(atom for atom in equation.invars if not is_literal(atom))
    return alive[::-1]


def region_name(equation: Equation) -> str | None:
    """Return the name of the innermost region that an equation is in, None outside of regions."""
    return _region_name(str(equation.source_info.name_stack))


@cache
def _region_name(scopes: str) -> str | None:
    names = _REGION.findall(scopes)
    return names[-1] if names else None


def module_path(equation: Equation, within: str) -> str:
    """Return the path of the module that an equation is in: the names of its scopes, with dots between them.

    Args:
        equation: the equation; its scopes are those inside of the program that it is in.
        within: the path of the equation that holds that program, "" if none does.
    """
    return _joined(within, str(equation.source_info.name_stack))


def current_path() -> str:
    """Return the path of the module that is being traced, as far as the innermost trace knows it."""
    return _joined("", str(source_info_util.current_name_stack()))


def is_transposed(equation: Equation) -> bool:
    """Return whether an equation was made by a reverse-mode derivative, outside of programs that it holds."""
    # With a scope inside, because JAX 0.6 writes down no transformations that have none.
    return "transpose(" in str(equation.source_info.name_stack.extend("scope"))


@cache
def _joined(within: str, scopes: str) -> str:
    names = _TRANSFORMATIONS.sub("", scopes).split("/")
    return ".".join(name for name in (within, *names) if name and not name.startswith(REGION))


def bodies(equation: Equation) -> Iterator[tuple[AnyJaxpr, int]]:
    """Yield the programs of an equation that rewriting enters, each with the place of its first operand."""
    name, params = equation.primitive.name, equation.params
    if name in _HELD:
        yield params[_HELD[name]], 0
    elif name == "while":
        yield params["body_jaxpr"], params["cond_nconsts"]
    elif name == "cond":
        yield from ((branch, 1) for branch in params["branches"])


def numbers_of(equation: Equation) -> list[Atom]:
    """Return the operands that an equation computes with, without what those of a product were cast from."""
    return equation.invars[: len(equation.invars) - len(equation.params.get("paired", ()))]


def hoistable(equation: Equation) -> Sequence[int]:
    """Return the places of the operands that may be cast before an equation instead of inside of it."""
    name, params, places = equation.primitive.name, equation.params, range(len(equation.invars))
    if name == "scan":
        return places[: scan_layout(params)[0]]
    if name == "while":
        return places[params["cond_nconsts"] :][: params["body_nconsts"]]
    if name == "cond":
        return places[1:]
    return places if name in _HELD else ()


def scan_layout(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many are carried."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()  # since JAX 0.11
    return len(constants.vals), len(carried.vals)


_OF_OPERANDS = ("donated_invars", "in_axes", "in_layouts", "in_names", "in_shardings", "in_specs")


def with_operands(equation: Equation, places: Sequence[int]) -> dict[str, Any]:
    """Return the parameters of an equation that is given more operands, like those at some places.

    A scan takes them after its constants, other equations after all.
    """
    params = dict(equation.params)
    if equation.primitive.name == "scan":
        constants, carried = scan_layout(params)
        layout = _scan_of(constants + len(places), carried, len(equation.invars) - constants - carried)
        return params | {key: layout[key] for key in ("num_consts", "linear", "ft_in") if key in layout}
    for key in _OF_OPERANDS:
        if key in params:
            more = (False if key == "donated_invars" else params[key][place] for place in places)
            params[key] = (*params[key], *more)
    return params


@cache
def _scan_of(constants: int, carried: int, scanned: int) -> dict[str, Any]:
    """Return the parameters of any scan with so many operands of each kind."""

    def scan(fixed: list[Any], carry: list[Any], xs: list[Any]) -> object:
        return jax.lax.scan(
            lambda carry, xs: ([it + 1 for it in carry], sum([*fixed, *xs])), carry, xs, length=1
        )

    zeros = [0.0] * constants, [0.0] * carried, [np.zeros(1)] * scanned
    (equation,) = [it for it in jax.make_jaxpr(scan)(*zeros).eqns if it.primitive.name == "scan"]
    return dict(equation.params)


_ROOT = ["f", "solve", "tangent_solve", "solve_traced", "in_avals", "has_aux"]


def root_of(equation: Equation) -> Any | None:
    """Return the object that `lax.custom_root` leaves in a program since JAX 0.12, which holds functions.

    None for other equations, and for an object with other fields than in 0.12.
    """
    root = equation.params.get("_prim")
    known = type(root).__name__ == "CustomRoot" and [*inspect.signature(type(root)).parameters] == _ROOT
    return root if known else None


def root_with(root: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Return such an object with its function and solver changed; both must keep their dtypes."""
    solve = change(root.solve)
    solve_traced = jax.jit(solve).trace(*root.in_avals[:2])
    return type(root)(change(root.f), solve, root.tangent_solve, solve_traced, root.in_avals, root.has_aux)


def variable(aval: Aval) -> Atom:
    """Return a new variable."""
    make = cast(Callable[..., Atom], extended.Var)
    return make("", aval) if _suffixed else make(aval)


def drops(atom: Atom) -> bool:
    """Return whether a variable only takes the place of an unused result."""
    return isinstance(atom, _DropVar)


def dropped(aval: Aval) -> Atom:
    """Return a variable for an unused result."""
    variable: Atom = _DropVar(aval)
    return variable


def is_literal(atom: Atom) -> bool:
    """Return whether an operand is a number in the program's text."""
    return isinstance(atom, extended.Literal)


def number_of(atom: Atom) -> float:
    """Return a number in the program's text."""
    return float(cast(extended.Literal, atom).val)


def array_of(atom: Atom) -> np.ndarray:
    """Return a number in the program's text as an array of its dtype."""
    return np.asarray(cast(extended.Literal, atom).val, atom.aval.dtype)


def literal(number: np.generic | np.ndarray, aval: Aval) -> Atom:
    """Return a number as an operand."""
    return cast(Atom, extended.Literal(number, cast(jax.core.AbstractValue, aval)))


def without_weak_type(aval: Aval) -> Aval:
    """Return an abstract value as that of an array without a weak type; tokens and references as they are."""
    return aval.update(weak_type=False) if is_array(aval) else aval


def is_array(aval: object) -> bool:
    """Return whether an abstract value is an array, and not a token or a reference."""
    return isinstance(aval, jax.core.ShapedArray)


def made_equation(
    operands: list[Atom],
    result: Atom,
    primitive: extended.Primitive,
    params: Mapping[str, object],
    beside: Equation | None,
) -> Equation:
    """Return an equation with one result, and the source line of the equation `beside` it."""
    if beside is None:
        equation: Equation = _new_equation(operands, [result], primitive, params, _no_effects)
        return equation
    return beside.replace(
        invars=operands, outvars=[result], primitive=primitive, params=params, effects=_no_effects
    )


def cast_equation(operand: Atom, result: Atom, dtype: np.dtype[Any], beside: Equation | None) -> Equation:
    """Return the equation of a cast."""
    params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
    return made_equation([operand], result, primitives.convert_element_type_p, params, beside)


def keeps_numbers(equation: Equation) -> bool:
    """Return whether an equation rounds low numbers to their own dtype, as a rehearsal does."""
    if equation.primitive is not primitives.reduce_precision_p:
        return False
    held, asked = jax.numpy.finfo(equation.invars[0].aval.dtype), equation.params
    return bool(held.nexp <= asked["exponent_bits"] and held.nmant <= asked["mantissa_bits"])


def wrapped_like(function: Callable[..., object], original: Any) -> Any:
    """Return a function in the wrapping that a rule of a custom derivative has in a jaxpr, if it has one."""
    if not hasattr(original, "call_wrapped"):
        return function
    return linear_util.wrap_init(function, debug_info=original.debug_info)


def are_known(arrays: Iterable[object]) -> bool:
    """Return whether the numbers of all these arrays are known now: nothing is being compiled or mapped."""
    try:
        for array in arrays:
            _concrete_or_error(None, array)
    except jax.errors.ConcretizationTypeError:
        return False
    return True


def evaluated(jaxpr: ClosedJaxpr, arrays: Sequence[object]) -> list[Any]:
    """Run a closed jaxpr's equations one by one.

    Under differentiation every operator runs as a small `jit`, as `jnp` runs it, because JAX caches the
    derivative of a `jit`. Differentiating the operators themselves takes twice as long.
    """
    program = inner(jaxpr)
    differentiated = [hasattr(array, "tangent") for array in (*arrays, *jaxpr.consts)]
    if any(differentiated):
        mesh = jax.sharding.get_abstract_mesh()
        program = program.replace(eqns=[_as_jit(equation, mesh) for equation in program.eqns])
    results = jax.core.eval_jaxpr(cast(extended.Jaxpr, program), jaxpr.consts, *arrays)
    return [
        jax.numpy.asarray(result, atom.aval.dtype) if is_literal(atom) else result
        for result, atom in zip(results, program.outvars, strict=True)
    ]


def run(jaxpr: ClosedJaxpr, arrays: Sequence[object]) -> list[Any]:
    """Run a closed jaxpr's equations one by one, at the lines and in the scopes that they were traced in."""
    return jax.core.eval_jaxpr(cast(extended.Jaxpr, inner(jaxpr)), jaxpr.consts, *arrays)


def alone(equation: Equation) -> Callable[..., list[Any]]:
    """Return a function of an equation's operands that computes its results."""
    operands, results = ([variable(atom.aval) for atom in it] for it in (equation.invars, equation.outvars))
    template = _program_with(len(operands), len(results))
    program = rebuilt(template, operands, results, [equation.replace(invars=operands, outvars=results)])

    def computed(*arrays: object) -> list[Any]:
        return jax.core.eval_jaxpr(cast(extended.Jaxpr, program), (), *arrays)

    return computed


@cache
def _program_with(operands: int, results: int) -> Jaxpr:
    """Return any open jaxpr with so many operands and results."""
    made = jax.make_jaxpr(lambda *operands: (0.0,) * results)(*[0.0] * operands)
    return inner(cast(ClosedJaxpr, made))


def _as_jit(equation: Equation, mesh: Hashable) -> Equation:
    """Return an equation as the `jit` of its operator; as it is if it has effects or holds a program."""
    if equation.effects or any(subprograms(equation)):
        return equation
    avals = tuple(tuple(atom.aval for atom in atoms) for atoms in (equation.invars, equation.outvars))
    try:
        jit, params = _jit_of(equation.primitive, tuple(equation.params.items()), *avals, mesh)
    except TypeError:  # a parameter that cannot be hashed
        return equation
    return equation.replace(primitive=jit, params=params)


@lru_cache(maxsize=4096)
def _jit_of(
    primitive: extended.Primitive,
    params: Sequence[tuple[str, object]],
    given: Sequence[Aval],
    gives: Sequence[Aval],
    mesh: Hashable,
) -> tuple[extended.Primitive, dict[str, object]]:
    """Return the primitive and parameters of a `jit` of one operator, as it is within a mesh."""
    template_of = jax.make_jaxpr(jax.jit(lambda *operands: (0.0,) * len(gives)))
    (template,) = template_of(*[0.0] * len(given)).eqns
    operands, results = [variable(aval) for aval in given], [variable(aval) for aval in gives]
    operator = _new_equation(operands, results, primitive, dict(params), _no_effects)
    program = rebuilt(template.params["jaxpr"], operands, results, [operator])
    inline = getattr(type(template.params["inline"]), "JAX_EARLY", True)  # an enum since JAX 0.12
    changed = {"jaxpr": program, "name": primitive.name, "inline": inline}
    return template.primitive, template.params | changed


def subprograms(equation: Equation) -> Iterator[AnyJaxpr]:
    """Yield every program that an equation holds, entered or not."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if is_program(each):
                yield cast(AnyJaxpr, each)


def is_program(value: object) -> bool:
    """Return whether a parameter of an equation is a program, open or closed."""
    return isinstance(value, extended.Jaxpr | extended.ClosedJaxpr)


def source_line(equation: Equation) -> str:
    """Return the source line of an equation as `file:line (function)`: the user's line, else a library's.

    "-" if it is not known, as in functions that JAX traced on its own.
    """
    traceback = equation.source_info.traceback
    # JAX keeps what it traced. Until 0.8 the frames of a nested program end in those of its first caller.
    traced = takewhile(lambda frame: frame.function_name != _TRACER, traceback.frames if traceback else ())
    frames = [frame for frame in traced if _is_shown(frame.file_name)]
    for frame in (*(frame for frame in frames if not _is_installed(frame.file_name)), *frames[:1]):
        return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "-"


_TRACER = "trace_to_jaxpr_dynamic"  # JAX's function around a nested program
_OURS = Path(__file__).parents[2]
_NEVER_SHOWN = (*(str(folder) + os.sep for folder in (Path(jax.__file__).parent, _OURS)), "<frozen")
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


def _is_shown(path: str) -> bool:
    return not path.startswith(_NEVER_SHOWN)


def _is_installed(path: str) -> bool:
    return any(part in path for part in _INSTALLED)
