"""A batch norm after an overflow in forward: a skipped step returns its statistics as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from preamp import Dynamic, UsageError
from preamp.jax import (
    autocast,
    loss_scaled,
    step,
    value_and_grad,
)

from .inside import keep_on_skip
from .trainings import identical

OPTIMIZER = loss_scaled(optax.adam(0.05), Dynamic(init_scale=2.0**10))
CLEAN = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
OVERFLOWS = np.where(np.arange(4) == 1, np.float32(3e38), CLEAN)


def of_linen() -> tuple[Any, Any, Callable[..., Any]]:
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x: Any) -> Any:
            return flax.linen.Dense(1)(flax.linen.BatchNorm(use_running_average=False)(x))

    model = Model()
    variables = model.init(jax.random.key(0), CLEAN)

    def loss(params: Any, stats: Any, x: Any) -> Any:
        out, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.mean(out**2), new["batch_stats"]

    return variables["params"], variables["batch_stats"], loss


def of_linen_with_more() -> tuple[Any, Any, Callable[..., Any]]:
    """Return all collections in aux, beside logits and a metric."""
    params, stats, loss = of_linen()

    def with_more(params: Any, stats: Any, x: Any) -> Any:
        value, new = loss(params, stats, x)
        return value, {"logits": x * value, "updates": {"batch_stats": new}, "accuracy": value}

    return params, stats, with_more


def of_nnx() -> tuple[Any, Any, Callable[..., Any]]:
    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.norm, self.layer = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.layer(self.norm(x))

    graph, params, stats = nnx.split(Model(), nnx.Param, nnx.BatchStat)

    def loss(params: Any, stats: Any, x: Any) -> Any:
        model = nnx.merge(graph, params, stats, copy=True)
        return jnp.mean(model(x) ** 2), nnx.state(model, nnx.BatchStat)

    return params, stats, loss


def of_equinox() -> tuple[Any, Any, Callable[..., Any]]:
    class Model(equinox.Module):
        norm: equinox.nn.BatchNorm
        layer: equinox.nn.Linear

        def __init__(self) -> None:
            self.norm = equinox.nn.BatchNorm(4, "batch", mode="batch")
            self.layer = equinox.nn.Linear(4, 1, key=jax.random.key(0))

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm(x, state)
            return self.layer(x), state

    model, state = equinox.nn.make_with_state(Model)()
    arrays, static = equinox.partition(model, equinox.is_inexact_array)

    def loss(arrays: Any, state: Any, x: Any) -> Any:
        model = equinox.combine(arrays, static)
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean(out**2), state

    return arrays, state, loss


MODELS = {"flax": of_linen, "flax, more in aux": of_linen_with_more, "nnx": of_nnx, "equinox": of_equinox}


def stats_in(aux: Any) -> Any:
    return aux["updates"]["batch_stats"] if isinstance(aux, dict) and "updates" in aux else aux


@pytest.mark.parametrize(
    ("model", "compiled"), [("flax", False), ("flax, more in aux", True), ("nnx", True), ("equinox", True)]
)
def test_a_skipped_step_returns_the_statistics_as_they_were(model: str, compiled: bool) -> None:
    params, stats, loss = MODELS[model]()
    plain = jax.jit(step(loss, OPTIMIZER, has_aux=True, keep_state=False))
    train = step(loss, OPTIMIZER, has_aux=True)
    train = jax.jit(train) if compiled else train
    state = OPTIMIZER.init(params)

    (_, aux), params, state = train(params, state, stats, CLEAN)
    moved = stats_in(aux)
    assert jax.tree.structure(moved) == jax.tree.structure(stats)
    assert not identical(moved, stats)  # a step that is taken returns the new ones

    (value, aux), after, state = train(params, state, moved, OVERFLOWS)
    assert not np.isfinite(value)
    assert identical(after, params)
    assert identical(stats_in(aux), moved)
    (_, spoilt), _, _ = plain(params, state, moved, OVERFLOWS)
    assert not all(np.isfinite(leaf).all() for leaf in map(np.asarray, jax.tree.leaves(spoilt)))

    (value, aux), _, state = train(after, state, stats_in(aux), CLEAN)
    assert np.isfinite(value)
    assert int(state.skipped_steps) == 1


def test_what_is_not_state_comes_back_as_it_was_computed() -> None:
    """Logits of the shape of labels, and tuples of arrays, are not taken for new state of an argument."""

    def loss(w: Any, x: Any, batch: Any) -> Any:
        return jnp.sum(w * x), (x * 2.0, (x * 3.0, x * 4.0))

    w, x = jnp.ones(2), jnp.array([1.0, jnp.inf])
    (_, (double, pair)), _, state = step(loss, OPTIMIZER, has_aux=True)(w, OPTIMIZER.init(w), x, (x, x))
    assert not state.finite
    assert (double.tolist(), pair[0].tolist()) == ([2.0, np.inf], [3.0, np.inf])


def test_state_that_could_be_that_of_two_arguments_is_refused() -> None:
    def loss(w: Any, first: Any, second: Any) -> Any:
        return jnp.sum(w), {"mean": first["mean"] + second["mean"]}

    w, stats = jnp.ones(2), {"mean": jnp.ones(3)}
    train = step(loss, OPTIMIZER, has_aux=True)
    with pytest.raises(UsageError, match=r"new state of args\[0\] and of args\[1\].*keep_state=False"):
        train(w, OPTIMIZER.init(w), stats, {"mean": jnp.zeros(3)})
    whole = step(loss, OPTIMIZER, has_aux=True, keep_state=False)
    (_, aux), _, _ = whole(w, OPTIMIZER.init(w), stats, stats)
    assert aux["mean"].tolist() == [2.0, 2.0, 2.0]


# Which entries are state: properties over random trees


class Pair(NamedTuple):
    first: Any
    second: Any


def draw_state(draw: random.Random, depth: int = 3) -> Any:
    """Return a tree with names, whose leaves are arrays of NaN-free numbers, all of them different."""
    if depth == 0 or (depth < 3 and draw.random() < 0.4):
        dtype = draw.choice(["float32", "float32", "bfloat16", "int32"])
        return jnp.full(draw.choice([(), (2,), (2, 1)]), draw.randrange(1, 200), dtype)
    kind = draw.choice(["dict", "dict", "list", "tuple", "pair"]) if depth < 3 else "dict"
    parts = [draw_state(draw, depth - 1) for _ in range(2 if kind == "pair" else draw.randrange(1, 4))]
    if kind == "dict":
        return dict(zip(draw.sample("abcdefgh", len(parts)), parts, strict=True))
    return Pair(*parts) if kind == "pair" else {"list": list, "tuple": tuple}[kind](parts)


def spoilt(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, -1), tree)


def swapped(tree: Any) -> Any:
    """Return a tree with lists for tuples, and the other way round."""
    if isinstance(tree, dict):
        return {name: swapped(part) for name, part in tree.items()}
    if isinstance(tree, Pair):
        return Pair(*map(swapped, tree))
    if isinstance(tree, list | tuple):
        return (tuple if isinstance(tree, list) else list)(map(swapped, tree))
    return tree


def with_more(tree: Any, draw: random.Random) -> Any:
    """Return a tree with more entries in its dictionaries."""
    if isinstance(tree, dict):
        more = {name: jnp.float32(-7.0) for name in draw.sample("xyz", draw.randrange(3))}
        return {name: with_more(part, draw) for name, part in tree.items()} | more
    if isinstance(tree, list | tuple):
        parts = [with_more(part, draw) for part in tree]
        return Pair(*parts) if isinstance(tree, Pair) else type(tree)(parts)
    return tree


def entries(tree: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def kept(aux: Any, *args: Any, **options: Any) -> Any:
    """Return what a skipped step returns."""
    return keep_on_skip(aux, jnp.array(False), args, {}, **({"required": False} | options))


PLACES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda new: new,
    "renamed": lambda new: {"new": new, "logits": jnp.ones(3)},
    "in a pair": lambda new: (new, {"accuracy": jnp.ones(())}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(5))
def test_all_entries_of_an_argument_are_kept_and_others_are_passed_on(place: str, seed: int) -> None:
    draw = random.Random(seed)
    state = draw_state(draw)
    new = with_more(swapped(spoilt(state)), draw)
    aux = PLACES[place](new)
    after = kept(aux, {"x": jnp.ones((4, 4))}, state)
    assert jax.tree.structure(after) == jax.tree.structure(aux)
    old, before = entries(PLACES[place](swapped(state))), entries(aux)
    for path, leaf in entries(after).items():
        expected = old.get(path, before[path])
        assert identical(leaf, expected), path
    taken = keep_on_skip(aux, jnp.array(True), [state], {}, required=False)
    assert identical(taken, aux)


@pytest.mark.parametrize("seed", range(24))
def test_no_entry_of_a_state_is_lost_in_silence(seed: int) -> None:
    """One entry is left out, or has another shape or dtype: the others are kept, or the entry is named."""
    draw = random.Random(seed)
    state = draw_state(draw)
    leaves, structure = jax.tree.flatten(spoilt(state))
    number = draw.randrange(len(leaves))
    fault = draw.choice(["missing", "shape", "kind"])
    changed = {
        "missing": None,
        "shape": leaves[number][None],
        "kind": leaves[number].astype(bool),
    }[fault]
    leaves[number] = changed
    aux = jax.tree.unflatten(structure, leaves)
    if not jax.tree.leaves(aux):
        return
    old, path = entries(state), list(entries(state))[number]
    try:
        after = entries(kept(aux, state))
    except UsageError as error:
        assert ("aux" + path in str(error)) or fault == "missing"  # noqa: PT017
        assert "keep_state=False" in str(error)  # noqa: PT017
        return
    assert fault == "missing"
    assert all(identical(leaf, old[name]) for name, leaf in after.items())


@pytest.mark.parametrize("seed", range(10))
def test_with_keep_state_single_entries_are_kept_by_path(seed: int) -> None:
    draw = random.Random(seed)
    state = draw_state(draw)
    leaves, structure = jax.tree.flatten(spoilt(state))
    left = [leaf if draw.random() < 0.6 else None for leaf in leaves]
    if all(leaf is None for leaf in left):
        return
    old = entries(state)
    after = entries(kept(jax.tree.unflatten(structure, left), state, required=True))
    assert all(identical(leaf, old[name]) for name, leaf in after.items())


OLD = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
NEW = {"mean": jnp.full(3, jnp.inf), "var": jnp.full(3, jnp.nan)}


@pytest.mark.parametrize(
    ("aux", "argument", "message"),
    [
        ({"mean": NEW["mean"]}, OLD, r"aux\['mean'\] has the name and shape of args\[0\]\['mean'\], but aux"),
        ({"mean": NEW["mean"]}, {"stats": OLD}, r"of args\[0\]\['stats'\]\['mean'\]"),
        ({**NEW, "var": jnp.ones(4)}, OLD, r"aux\['var'\] is of shape \(4,\) .*args\[0\]\['var'\].*\(3,\)"),
        ({"mean": jnp.ones((1, 3))}, {"mean": jnp.ones(3)}, r"aux\['mean'\] is of shape \(1, 3\)"),
        ({"n": jnp.ones(())}, {"n": jnp.ones((), int)}, r"dtype float32, and args\[0\]\['n'\].*int32"),
    ],
)
def test_what_agrees_with_an_argument_in_part_is_named(aux: Any, argument: Any, message: str) -> None:
    def loss(w: Any, argument: Any) -> Any:
        return jnp.sum(w), aux

    w, others = jnp.ones(2), {"required": False}
    with pytest.raises(UsageError, match=rf"(?s){message}.*keep_state=False"):
        jax.jit(step(loss, OPTIMIZER, has_aux=True))(w, OPTIMIZER.init(w), argument)
    assert kept(aux, jnp.ones(3), **others) is not None
    (_, after), _, _ = step(loss, OPTIMIZER, has_aux=True, keep_state=False)(w, OPTIMIZER.init(w), argument)
    assert identical(after, aux)


def closed_over(aux_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a step in the manner of Flax's examples, whose loss finds the old statistics outside."""

    def train(w: Any, stats: Any, state: Any, x: Any, **settings: Any) -> Any:
        def loss(w: Any) -> Any:
            new = jax.tree.map(lambda leaf: leaf * 0.9 + jnp.mean(x * w, 0), stats)
            return jnp.mean(x * w), aux_of(new)

        return step(loss, OPTIMIZER, has_aux=True, **settings)(w, state)

    return train


OLD4 = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
VARIABLE = nnx.BatchStat(jnp.zeros(4))
LOST: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "Flax's collection": (
        {"n": {"average": jnp.zeros(4)}},
        lambda new: {"batch_stats": new, "accuracy": 1.0},
    ),
    "a layer of Flax": ({"BatchNorm_0": OLD4}, lambda new: new),
    "a layer of Haiku": (
        {"mean_ema": {"hidden": jnp.zeros(4), "average": jnp.zeros(4), "counter": jnp.zeros((), int)}},
        lambda new: (new, "logits"),
    ),
    "variables of NNX": ({"average": VARIABLE}, lambda new: new),
    "a state of Equinox": (
        equinox.nn.make_with_state(equinox.nn.BatchNorm)(4, "b", mode="ema")[1],
        lambda new: [new],
    ),
}


@pytest.mark.parametrize("where", LOST)
def test_statistics_that_the_loss_finds_outside_are_refused(where: str) -> None:
    stats, aux_of = LOST[where]
    train, w = closed_over(aux_of), jnp.ones(4)
    run = jax.jit(train, static_argnames="keep_state")
    with pytest.raises(
        UsageError, match=r"(?s)running statistics.*Write step\(...\)\(params, opt_state, batch"
    ):
        run(w, stats, OPTIMIZER.init(w), OVERFLOWS)


@pytest.mark.parametrize(
    "aux",
    [{"mean": 1.0, "var": 2.0}, {"mean": CLEAN[0], "var": CLEAN[0, :2]}, {"mean": CLEAN}, {"batch_stats": 3}],
    ids=["scalars", "other shapes", "no variance", "integers"],
)
def test_what_only_resembles_statistics_is_returned(aux: Any) -> None:
    w = jnp.ones(2)
    (_, after), _, _ = step(lambda w: (jnp.sum(w), aux), OPTIMIZER, has_aux=True)(w, OPTIMIZER.init(w))
    assert identical(jax.tree.map(jnp.asarray, after), jax.tree.map(jnp.asarray, aux))


def test_statistics_that_are_kept_by_hand_are_left_alone() -> None:
    stats, aux_of = LOST["Flax's collection"]
    w = jnp.ones(4)
    train = jax.jit(closed_over(aux_of), static_argnames="keep_state")
    (_, aux), _, state = train(w, stats, OPTIMIZER.init(w), OVERFLOWS, keep_state=False)
    assert not state.taken
    assert not jnp.isfinite(aux["batch_stats"]["n"]["average"]).all()


def test_an_argument_that_is_returned_as_it_was_needs_no_decision() -> None:
    """Labels beside logits are what metrics are computed from."""

    def loss(w: Any, batch: Any) -> Any:
        return jnp.sum(w * batch["x"]), {"labels": batch["labels"], "logits": w * 2.0}

    w, batch = jnp.ones(2), {"x": jnp.ones(2), "labels": jnp.arange(2)}
    train = step(autocast(loss), OPTIMIZER, has_aux=True)
    (_, aux), _, _ = jax.jit(train)(w, OPTIMIZER.init(w), batch)
    assert identical(aux["labels"], batch["labels"])


def test_paths_tell_apart_states_of_the_same_names_and_shapes() -> None:
    layers = [{"a": jnp.zeros(2)}, {"a": jnp.ones(2)}]
    assert identical(kept(spoilt(layers), layers), layers)
    assert identical(kept({"second": spoilt(OLD)}, {"first": NEW, "second": OLD}), {"second": OLD})
    both = keep_on_skip(
        {"ema": NEW, "stats": NEW}, jnp.array(False), [], {"stats": OLD, "ema": OLD}, required=True
    )
    assert identical(both, {"ema": OLD, "stats": OLD})
    assert identical(kept({"a": NEW, "b": NEW}, {"a": OLD, "b": OLD}), {"a": OLD, "b": OLD})  # the advice


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    """A node whose keys are plain strings, which JAX allows."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten_with_keys(self) -> Any:
        return [(f"part {number}", part) for number, part in enumerate(self.parts)], None

    @classmethod
    def tree_unflatten(cls, _: Any, parts: Any) -> Any:
        return cls(*parts)


def test_nodes_of_any_registered_class_are_state() -> None:
    old, new = Keyed(jnp.zeros(2), jnp.ones(2)), Keyed(jnp.full(2, jnp.inf), jnp.ones(2))
    assert identical(kept({"state": new, "accuracy": jnp.ones(())}, old)["state"], old)


def test_state_that_comes_back_short_is_kept_as_long_as_it_was() -> None:
    old = {"var": jnp.full(2, 70000.0)}
    assert identical(kept({"var": jnp.ones(2, "float16")}, old), old)


def test_keep_state_is_held_to_its_word() -> None:
    w = jnp.ones(2)
    train = step(lambda w, x: (jnp.sum(w * x), x), OPTIMIZER, has_aux=True, keep_state=True)
    with pytest.raises(UsageError, match="nothing in aux has the names and shapes of an argument"):
        train(w, OPTIMIZER.init(w), 1.0)
    with pytest.raises(UsageError, match="without has_aux=True"):
        step(jnp.sum, OPTIMIZER, keep_state=True)
    with pytest.raises(UsageError, match="keep_state='yes' is not a boolean"):
        step(jnp.sum, OPTIMIZER, has_aux=True, keep_state="yes")  # type: ignore[arg-type]


# Modules of NNX as parameters


class Normalized(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.linear(x))


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.linear(x))


@pytest.mark.parametrize(("kind", "named"), [(Normalized, "BatchStat norm.mean"), (Dropped, "drop.rngs")])
def test_a_module_whose_state_would_be_lost_is_refused_as_parameters(kind: Any, named: str) -> None:
    """JAX differentiates a copy: running statistics would never move, and every dropout mask be the same."""

    def loss_of(model: Any, x: Any) -> Any:
        return jnp.mean((model(x) - 1.0) ** 2)

    module, x = kind(nnx.Rngs(0)), jnp.ones((8, 4))
    optimizer = loss_scaled(optax.sgd(0.1))
    state = optimizer.init(nnx.state(module, nnx.Param))
    before = jax.tree.map(jnp.copy, nnx.state(module, nnx.BatchStat))
    for call in (
        lambda: optimizer.init(module),
        lambda: step(loss_of, optimizer)(module, state, x),
        lambda: nnx.jit(step(loss_of, optimizer))(module, state, x),
        lambda: value_and_grad(loss_of)(module, state, x),
    ):
        with pytest.raises(UsageError, match=rf"{named}.*nnx\.split\(model, nnx\.Param, \.\.\.\)"):
            call()
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.state(module, nnx.BatchStat)))


class Both(Dropped):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(super().__call__(x))


RETURNS: dict[str, Callable[[Any], Any]] = {
    "the module and more": lambda model: {"model": model, "accuracy": jnp.ones(())},
    "its state": lambda model: nnx.state(model, nnx.Not(nnx.Param)),
    "a plain dictionary": lambda model: nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param))),
    "some of its state": lambda model: nnx.state(model, nnx.BatchStat),
}


@pytest.mark.parametrize("what", RETURNS)
def test_a_module_may_be_returned_in_any_form(what: str) -> None:
    """The program that the error of a whole module names, and other forms of what it returns."""
    graphdef, params, rest = nnx.split(Both(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        return jnp.mean((model(x) - 1.0) ** 2), RETURNS[what](model)

    def variables(aux: Any) -> Any:
        aux = aux["model"] if isinstance(aux, dict) and "accuracy" in aux else aux
        state = nnx.state(aux) if isinstance(aux, nnx.Module) else aux
        pure = state if isinstance(state, dict) else nnx.to_pure_dict(state)
        return {"mean": pure["norm"]["mean"], "var": pure["norm"]["var"]} | (
            {"count": pure["drop"]["rngs"]["count"]} if "drop" in pure else {}
        )

    train = jax.jit(step(loss, OPTIMIZER, has_aux=True))
    state = OPTIMIZER.init(params)
    (_, aux), params, state = train(params, state, rest, CLEAN)
    assert not identical(variables(aux)["mean"], variables(rest)["mean"])
    (_, aux), after, state = train(params, state, rest, OVERFLOWS)
    assert int(state.skipped_steps) == 1
    assert identical(after, params)
    old = variables(rest)
    assert all(identical(leaf, old[name]) for name, leaf in variables(aux).items())


def test_a_module_of_parameters_alone_is_trained() -> None:
    module, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
    optimizer = loss_scaled(optax.sgd(0.1))
    train = nnx.jit(step(lambda model, x: jnp.mean((model(x) - 1.0) ** 2), optimizer))
    values, state = [], optimizer.init(module)
    for _ in range(3):
        value, module, state = train(module, state, x)
        values.append(float(value))
    assert values == sorted(values, reverse=True) != [values[0]] * 3
