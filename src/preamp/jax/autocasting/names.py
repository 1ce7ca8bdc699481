"""Names in tables: which primitives a user's name means, and what to say of unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from preamp.autocasting import tables as casting
from preamp.autocasting.tables import Casting, Rule, Scope, is_inside
from preamp.errors import CastingError
from preamp.jax.jaxprs import PRIMITIVES, AnyJaxpr, inner, module_path, subprograms

USER_NAMES: dict[str, str] = {
    "Conv": "conv_general_dilated",
    "Dense": "dot_general",
    "Linear": "dot_general",
    "checkpoint": "checkpoint remat2",
    "clip": "clamp max min",
    "conv": "conv_general_dilated",
    "conv_transpose": "conv_general_dilated",
    "convolve": "conv_general_dilated",
    "dot": "dot_general",
    "einsum": "dot_general",
    "erfinv": "erf_inv",
    "fori_loop": "scan while",
    "inner": "dot_general",
    "jit": "jit pjit",
    "linear": "dot_general",
    "log10": "log",
    "logsumexp": "exp log reduce_sum",
    "map": "scan",
    "matmul": "dot_general",
    "maximum": "max",
    "mean": "reduce_sum",
    "minimum": "min",
    "norm": "reduce_sum",
    "power": "pow integer_pow",
    "prod": "reduce_prod",
    "remat": "checkpoint remat2",
    "sigmoid": "logistic",
    "softmax": "exp reduce_sum",
    "log_softmax": "exp log reduce_sum",
    "sum": "reduce_sum",
    "switch": "cond",
    "tensordot": "dot_general",
    "vdot": "dot_general",
    "where": "select_n",
    "while_loop": "while",
}
"""Names that users write, where they differ from the primitive's."""

NEAREST = 3


def rules_of(table: Casting) -> dict[str, Rule]:
    """Return the rule of every primitive that autocast's table or an edited one names."""
    return _edited(casting.JAX.rules, table)


def rules_in(scope: Scope) -> dict[str, Rule]:
    """Return the rule of every such primitive in a module."""
    rules = rules_of(scope.before)
    if scope.rule in ("float32", "untouched"):
        rules = dict.fromkeys(rules, scope.rule)
    return _edited(rules, scope.after)


def _edited(rules: dict[str, Rule], table: Casting) -> dict[str, Rule]:
    for name, rule in table.rules.items():
        rules = rules | dict.fromkeys(USER_NAMES.get(name, name).split(), rule)
    return rules


def check_names(rules: Mapping[str, Rule], jaxpr: AnyJaxpr) -> None:
    """Raise unless every name with a rule is known, or a primitive of a program.

    Raises:
        CastingError: with the nearest names.
    """
    unknown = rules.keys() - casting.JAX.rules.keys() - PRIMITIVES
    here = set(_primitives(jaxpr)) if unknown else set()
    known = {*casting.JAX.rules, *PRIMITIVES, *USER_NAMES, *here}
    for name in sorted(unknown - here):
        meant = name.rpartition(".")[2].removesuffix("_p").strip("_")  # of "jnp.exp", "exp_p", "__add__"
        near = [meant] if meant in known else difflib.get_close_matches(name, known, n=NEAREST)
        instead = " or ".join(map(repr, near)) or "'dot_general'"
        if meant[:1].isupper():  # as classes of modules are
            instead = f"{instead}, or .module('layers.0', 'float32') for the module of that path"
        raise CastingError(
            f"{name!r} is not a primitive of JAX, nor one in this program. Write {instead}; "
            "jax.make_jaxpr(fn)(*args) shows a program's primitives."
        )


def _primitives(jaxpr: AnyJaxpr) -> Iterator[str]:
    """Yield the names of a program's primitives, those in nested programs included."""
    for equation in inner(jaxpr).eqns:
        yield equation.primitive.name
        for nested in subprograms(equation):
            yield from _primitives(nested)


def unmatched(patterns: Sequence[str], jaxpr: AnyJaxpr) -> str:
    """Return a sentence about the patterns that match no module of a program, "" if all of them match."""
    paths = dict.fromkeys(path for path in _paths(jaxpr, "") if path) if patterns else {}
    wrong = [each for each in patterns if not any(is_inside(path, each) for path in ("", *paths))]
    if not wrong:
        return ""
    said = f"No module of this program is named {' or '.join(map(repr, wrong))}, so nothing changes there."
    if not paths:
        return (
            f"{said} The program names no modules: those of Flax and Equinox have names, and elsewhere "
            f"write with jax.named_scope({wrong[0]!r}): around what the edit is for."
        )
    # Every end of a path is a pattern for it.
    ends = dict.fromkeys(end for path in paths for end in _ends(path))
    near = [match for each in wrong for match in difflib.get_close_matches(each, ends, n=NEAREST)]
    near = list(dict.fromkeys(near))[:NEAREST] or list(paths)[-NEAREST:]
    return f"{said} Write {' or '.join(map(repr, near))}; print(casts(fn, *args)) shows all modules."


def _ends(path: str) -> Iterator[str]:
    names = path.split(".")
    return (".".join(names[start:]) for start in range(len(names)))


def _paths(jaxpr: AnyJaxpr, within: str) -> Iterator[str]:
    """Yield the path of each equation of a program, and of the programs that it holds."""
    for equation in inner(jaxpr).eqns:
        path = module_path(equation, within)
        yield path
        for nested in subprograms(equation):
            yield from _paths(nested, path)
