"""Flax NNX objects: what a traced function writes to its arguments is written back to the caller's objects.

Tracing works on copies, and what is written to a copy (running averages, counts of random keys) would be
lost. So the traced function takes the state of its modules as arrays and returns what it wrote, with Flax's
own `update_context`, as `nnx.jit` does. Flax is never imported here: if nobody has imported it, no argument
can be one of its objects.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from preamp.errors import UsageError

NNX = "flax.nnx"


class Pure(NamedTuple):
    """A call without objects that are written to.

    Attributes:
        fn: the function. It returns a pair: the state that it wrote, and its results.
        args: trees of arrays in place of objects.
        kwargs: the same by keyword.
        written_back: takes such a pair, writes its state to the caller's objects, and returns the results.
    """

    fn: Callable[..., tuple[Any, Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written_back: Callable[[tuple[Any, Any]], Any]


@contextmanager
def pure(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Pure]:
    """Yield a call in which modules are passed as state, including a module that is the function itself.

    Raises:
        UsageError: when the function is traced and writes to a module that is not among its arguments.
    """
    nnx = sys.modules.get(NNX)
    if nnx is None:
        yield _without_objects(fn, args, kwargs)
        return
    objects = functools.partial(_objects, nnx)
    opened = _with_owner(fn, args, kwargs, objects)
    if not objects(opened[1:]):
        yield _without_objects(_explaining_writes(fn), args, kwargs)
        return
    fn, args, kwargs = _explaining_writes(opened[0]), *opened[1:]
    tag = object()

    @functools.wraps(fn, updated=())
    def traced(*args: object, **kwargs: object) -> tuple[Any, Any]:
        args, kwargs = nnx.from_tree((args, kwargs), merge_fn=_merged, is_inner=True, ctxtag=tag)
        given = objects((args, kwargs))
        before = [_contents(nnx, each) for each in given]
        results = fn(*args, **kwargs)
        # Writing needs the trace that an object was made in, so one that was only read is left out: it may be
        # of an outer trace.
        written = [
            each for each, old in zip(given, before, strict=True) if _changed(_contents(nnx, each), old)
        ]
        if not written and not objects(results):
            return (), results
        pair: tuple[Any, Any] = nnx.to_tree((written, results), ctxtag=tag)
        return pair

    def written_back(pair: tuple[Any, Any]) -> Any:
        if not pair[0] and not _has_states(nnx, pair[1]):
            return pair[1]
        return nnx.from_tree(pair, merge_fn=_merged, is_inner=False, ctxtag=tag)[1]

    with nnx.update_context(tag):
        args, kwargs = nnx.to_tree((args, kwargs), ctxtag=tag)
        yield Pure(traced, args, kwargs, written_back)


def attribute_name(name: str) -> str:
    """Return the name of an array in the state of a module as a user writes it.

    >>> attribute_name("model.states[0]['layers'][0]['kernel'].value"), attribute_name("params['w']")
    ('model.layers[0].kernel', "params['w']")
    """
    root, found, path = re.sub(r"\.(_?raw_)?value$", "", name).partition(".states[0]")
    return root + re.sub(r"\['(\w+)'\]", r".\1", path) if found else name


def _without_objects(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pure:
    @functools.wraps(fn, updated=())
    def traced(*args: object, **kwargs: object) -> tuple[Any, Any]:
        return (), fn(*args, **kwargs)

    return Pure(traced, args, kwargs, lambda pair: pair[1])


def _merged(context: Any, path: object, prefix: object, states: Any) -> Any:
    """Return the object of a state. Flax's own default copies the references (`jax.Ref`) that it holds."""
    flat: list[Any] = []
    for state in states.states:
        flat.extend(jax.tree.leaves(state, is_leaf=lambda leaf: hasattr(leaf, "get_raw_value")))
    return context.unflatten(states.graphdef, flat)


def _objects(nnx: Any, tree: object) -> list[Any]:
    """Return the modules and variables in a tree, without what they hold."""
    leaves = jax.tree.leaves(tree, is_leaf=functools.partial(_is_object, nnx))
    return [leaf for leaf in leaves if _is_object(nnx, leaf)]


def _is_object(nnx: Any, leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable) or bool(nnx.graph.is_graph_node(leaf))


def _has_states(nnx: Any, tree: object) -> bool:
    is_state = functools.partial(lambda leaf: isinstance(leaf, nnx.NodeStates))
    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def _contents(nnx: Any, node: object) -> tuple[Any, list[Any]]:
    """Return an object's structure and its arrays."""
    with nnx.split_context() as context:
        structure, state = context.split(node)
    return structure, jax.tree.leaves(state)


def _changed(new: tuple[Any, list[Any]], old: tuple[Any, list[Any]]) -> bool:
    pairs = zip(new[1], old[1], strict=False)
    return len(new[1]) != len(old[1]) or any(a is not b for a, b in pairs) or new[0] != old[0]


def _with_owner(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    objects: Callable[[Any], list[Any]],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call whose arguments include the module that is called, or whose method is called."""
    while isinstance(fn, functools.partial):
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    if objects(fn):
        return type(fn).__call__, (fn, *args), kwargs
    if inspect.ismethod(fn) and objects(fn.__self__):
        return fn.__func__, (fn.__self__, *args), kwargs
    return fn, args, kwargs


def _explaining_writes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises with advice if Flax refuses to write to an object of an outer trace."""
    refusal = sys.modules["flax.errors"].TraceContextError

    @functools.wraps(fn, updated=())
    def explaining(*args: object, **kwargs: object) -> Any:
        try:
            return fn(*args, **kwargs)
        except refusal as error:
            raise UsageError(
                "A function in this region writes to an NNX module or variable that it was not passed"
                f" ({str(error).partition(' (http')[0]}), and the write would be lost. Pass the module: "
                "autocast(lambda model, x: model(x))(model, x)."
            ) from error

    return explaining
