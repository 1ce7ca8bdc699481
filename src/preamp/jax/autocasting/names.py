"""Names in tables: which primitives a user's name means, and what to say of unknown names."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from preamp.autocasting import tables as casting
from preamp.autocasting.tables import Casting, Rule, Scope, is_inside
from preamp.errors import CastingError
from preamp.jax.autocasting.module_scopes import Calls
from preamp.jax.jaxprs import PRIMITIVES, RETRACES, AnyJaxpr, inner, module_path, subprograms

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

CAST = "convert_element_type"
NEAREST = 3
_EQUINOX_CLASS = re.compile(r"(?:^|\.)eqx\.nn\.\w+")


def rules_of(table: Casting) -> dict[str, Rule]:
    """Return the rule of every primitive that autocast's table or an edited one names."""
    return _edited(casting.JAX.rules, table)


def rules_in(scope: Scope) -> dict[str, Rule]:
    """Return the rule of every such primitive in a module."""
    rules = rules_of(scope.before)
    if scope.rule in ("float32", "untouched"):
        rules = dict.fromkeys(rules, scope.rule)
    return _edited(rules, scope.after)


def scope_of(table: Casting, path: str) -> Scope | None:
    """Return the scope for a module's path; a pattern may omit the classes that Equinox adds to paths."""
    pattern = _pattern_of(table, path)
    return (
        None if pattern is None else table.scope(path if is_inside(path, pattern) else _without_classes(path))
    )


def _without_classes(path: str) -> str:
    return _EQUINOX_CLASS.sub("", path).removeprefix(".")


def _edited(rules: dict[str, Rule], table: Casting) -> dict[str, Rule]:
    for name, rule in table.rules.items():
        rules = rules | dict.fromkeys(USER_NAMES.get(name, name).split(), rule)
    return rules


def check_names(rules: Mapping[str, Rule], jaxpr: AnyJaxpr) -> None:
    """Raise unless every name with a rule is known, or a primitive of a program.

    Raises:
        CastingError: for an unknown name, with the nearest ones, and for the primitive that casts.
    """
    if CAST in rules:
        raise CastingError(
            f"{CAST!r} is the program's own cast, which a table cannot change. Write the operator that "
            "follows it."
        )
    unknown = rules.keys() - casting.JAX.rules.keys() - PRIMITIVES
    here = set(_primitives(jaxpr)) if unknown else set()
    known = {*casting.JAX.rules, *PRIMITIVES, *USER_NAMES, *here}
    for name in sorted(unknown - here):
        meant = name.rpartition(".")[2].removesuffix("_p").strip("_")  # of "jnp.exp", "exp_p", "__add__"
        near = [meant] if meant in known else difflib.get_close_matches(name, known, n=NEAREST)
        instead = " or ".join(map(repr, near)) or "'dot_general'"
        if meant[:1].isupper():  # as classes of modules are
            instead = f"{instead}, or .module('layers.0', 'float32') for the module with that path"
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
    paths = _named_paths(jaxpr) if patterns else {}
    every = ("", *paths, *map(_without_classes, paths))
    wrong = [each for each in patterns if not any(is_inside(path, each) for path in every)]
    if not wrong:
        return ""
    said = f"No module of this program is named {' or '.join(map(repr, wrong))}, so nothing changes there."
    if not RETRACES:
        said += (
            " If a jitted function ran before this region, JAX reuses that trace, which has no module "
            "names: call jax.clear_caches() first."
        )
    if not paths:
        return (
            f"{said} The program names no modules. Flax and Equinox name theirs; elsewhere "
            f"write with jax.named_scope({wrong[0]!r}): around what the edit is for."
        )
    # Every end of a path is a pattern for it.
    ends = dict.fromkeys(end for path in paths for end in _ends(path))
    ends |= dict.fromkeys(end for path in paths for end in _ends(_without_classes(path)) if end)
    near = [match for each in wrong for match in difflib.get_close_matches(each, ends, n=NEAREST)]
    near = list(dict.fromkeys(near))[:NEAREST] or list(paths)[-NEAREST:]
    return f"{said} Write {' or '.join(map(repr, near))}; print(casts(fn, *args)) shows all modules."


class Missed(NamedTuple):
    """An edit that may not apply to a copy of a module.

    Attributes:
        pattern: the pattern of the edit.
        kind: the name of the module's class.
        path: the path that the copy runs as.
        original: the path of the module that it may be a copy of.
        instead: an edit that does apply to the copy, as Python code.
    """

    pattern: str
    kind: str
    path: str
    original: str
    instead: str

    def __str__(self) -> str:
        return (
            f"The edit of {self.pattern!r} does not apply to a copy of {self.kind} run as {self.path!r}."
            " A transformation that is given a module (jax.checkpoint, nnx.remat, eqx.filter_jit, a scan) "
            f"makes a copy of it, and autocast cannot tell whether it is {self.original!r}. Write "
            f"jax.checkpoint(lambda x: module(x))(x), which makes none, or {self.instead} for all copies."
        )


def missed(table: Casting, calls: Calls, jaxpr: AnyJaxpr) -> list[Missed]:
    """Return the edits that may not apply to copies of modules, each once.

    An edit may be missed where it names a module that did not run itself, and a copy of its class did.
    """
    paths = _named_paths(jaxpr) if calls.copies else ()
    found: dict[str, Missed] = {}
    for copy, path in itertools.product(calls.copies, paths):
        _, is_in_copy, inside = f".{path}.".partition(f".{copy.name}.")
        for original in copy.originals if is_in_copy else ():
            place = _joined(original, inside)
            pattern, scope = _pattern_of(table, place), scope_of(table, place)
            if pattern is None or scope is None or original in calls.found or scope == scope_of(table, path):
                continue
            # The edit is about the copy, or else about the outermost module in it that the pattern names.
            names = inside.split(".")
            parts = (".".join(names[:end]) for end in range(len(names)))
            about = next(part for part in parts if _is_named(_joined(original, part), pattern))
            instead = f".module({_joined(copy.name, about)!r}, {scope.rule!r})"
            found.setdefault(pattern, Missed(pattern, copy.kind, path, original, instead))
    return list(found.values())


def _joined(*paths: str) -> str:
    return ".".join(paths).strip(".")


def _pattern_of(table: Casting, path: str) -> str | None:
    """Return the pattern that the rule of a module comes from, None if no pattern names it."""
    return next((pattern for pattern in reversed(table.modules) if _is_named(path, pattern)), None)


def _is_named(path: str, pattern: str) -> bool:
    return is_inside(path, pattern) or is_inside(_without_classes(path), pattern)


def _named_paths(jaxpr: AnyJaxpr) -> Collection[str]:
    return dict.fromkeys(path for path in _paths(jaxpr, "") if path)


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
