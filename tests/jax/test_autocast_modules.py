"""Edits of modules: which equations are in a module, and in which precision they run there."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from preamp import casting
from preamp.autocasting.tables import Casting
from preamp.jax import autocast, casts

from .reading import casts as float_casts
from .reading import traced

EDIT = casting.DEFAULT
KEY = jax.random.key(0)
X, W = np.ones((4, 8), np.float32), np.full((8, 8), 0.1, np.float32)
TOKENS = np.arange(3)
RUNS = {"float32": "float32", "untouched": "float32", "float16": "float16", "default": "bfloat16"}


def products(fn: Callable[..., Any], *args: Any, table: Casting = EDIT, **kwargs: Any) -> dict[str, set[str]]:
    """Return the precisions that the products of each module run in."""
    found: dict[str, set[str]] = {}
    for row in casts(fn, *args, casting=table, **kwargs).rows:
        if row.operator == "dot_general":
            found.setdefault(row.module, set()).add(row.runs)
    return found


# Paths


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4, name="down")(jnp.tanh(nn.Dense(8, name="up")(x)))


class LinenModel(nn.Module):
    def setup(self) -> None:
        self.embed = nn.Embed(10, 4)
        self.layers = [LinenMlp() for _ in range(2)]
        self.norm = nn.LayerNorm()
        self.lm_head = nn.Dense(10)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(self.norm(x))


class NnxMlp(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jnp.tanh(self.up(x)))


class NnxModel(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.embed = nnx.Embed(10, 4, rngs=rngs)
        self.layers_0, self.layers_1 = NnxMlp(rngs), NnxMlp(rngs)
        self.norm, self.lm_head = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 10, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in (self.layers_0, self.layers_1):
            x = x + layer(x)
        return self.lm_head(self.norm(x))

    def tied(self, tokens: Any) -> Any:
        return self.embed.attend(self.embed(tokens))


class EquinoxMlp(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self) -> None:
        self.up, self.down = eqx.nn.Linear(4, 8, key=KEY), eqx.nn.Linear(8, 4, key=KEY)

    def __call__(self, x: Any) -> Any:
        return self.down(jnp.tanh(self.up(x)))


class EquinoxModel(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list[EquinoxMlp]
    norm: eqx.nn.LayerNorm
    lm_head: eqx.nn.Linear

    def __init__(self) -> None:
        self.embed, self.layers = eqx.nn.Embedding(10, 4, key=KEY), [EquinoxMlp(), EquinoxMlp()]
        self.norm, self.lm_head = eqx.nn.LayerNorm(4), eqx.nn.Linear(4, 10, key=KEY)

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.embed)(tokens)
        for layer in self.layers:
            x = x + jax.vmap(layer)(x)
        return jax.vmap(lambda x: self.lm_head(self.norm(x)))(x)


def plain_parameters() -> Any:
    return {
        "embed": jnp.ones((10, 4)),
        "up": jnp.ones((2, 4, 8)),
        "down": jnp.ones((2, 8, 4)),
        "head": jnp.ones((4, 10)),
    }


def plain_model(params: Any, tokens: Any) -> Any:
    x = params["embed"][tokens]
    for place in range(2):
        with jax.named_scope(f"layers_{place}"):
            with jax.named_scope("up"):
                hidden = jnp.tanh(x @ params["up"][place])
            with jax.named_scope("down"):
                x = x + hidden @ params["down"][place]
    with jax.named_scope("lm_head"):
        return x @ params["head"]


@cache
def models() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Return models that have the same modules, each as a function of parameters and tokens."""
    linen, equinox, model = LinenModel(), EquinoxModel(), NnxModel(nnx.Rngs(0))
    graph, state = nnx.split(model)
    arrays, rest = eqx.partition(equinox, eqx.is_array)
    return {
        "linen": (linen.apply, linen.init(KEY, TOKENS)),
        "nnx": (lambda state, tokens: nnx.merge(graph, state)(tokens), state),
        "nnx module": (lambda model, tokens: model(tokens), model),
        "equinox": (lambda arrays, tokens: eqx.combine(arrays, rest)(tokens), arrays),
        "equinox module": (lambda model, tokens: model(tokens), equinox),
        "named_scope": (plain_model, plain_parameters()),
    }


LIBRARIES = ["linen", "nnx", "nnx module", "equinox", "equinox module", "named_scope"]
LAYER = {"linen": "layers_1", "nnx": "layers_1", "nnx module": "layers_1", "named_scope": "layers_1"}


@pytest.mark.parametrize(
    ("library", "rule"), [*(("linen", rule) for rule in RUNS), *((each, "float32") for each in LIBRARIES[1:])]
)
def test_a_module_of_every_library_runs_by_its_rule(library: str, rule: Any) -> None:
    model, params = models()[library]
    layer = LAYER.get(library, "layers.1")
    for pattern, chosen in (("lm_head", "lm_head"), (f"{layer}.down", f"{layer}.down"), (layer, layer)):
        found = products(model, params, TOKENS, table=EDIT.module(pattern, rule))
        inside = {path: runs for path, runs in found.items() if chosen in path}
        assert len(found) == 5
        assert len(inside) == (2 if pattern == layer else 1)
        # Of an input that came low from outside, "untouched" makes no other.
        assert set().union(*inside.values()) == {RUNS[rule]}
        assert set().union(*(runs for path, runs in found.items() if path not in inside)) == {"bfloat16"}


@pytest.mark.parametrize(
    ("library", "rule", "around"),
    [
        ("linen", "float32", False),
        ("linen", "float16", True),
        ("nnx", "untouched", True),
        ("equinox", "default", False),
        ("equinox", "float16", False),
        ("named_scope", "float32", True),
    ],
)
def test_gradients_of_a_module_run_as_it_does(library: str, rule: Any, around: bool) -> None:
    model, params = models()[library]
    table = EDIT.module("lm_head", rule)

    def loss(params: Any, *, cast: Callable[..., Any] = lambda fn: fn) -> Any:
        return jnp.mean(cast(model)(params, TOKENS).astype(jnp.float32) ** 2)

    if around:
        fn = autocast(jax.grad(loss), casting=table)
    else:
        fn = jax.grad(lambda params: loss(params, cast=lambda model: autocast(model, casting=table)))
    ran: dict[bool, set[str]] = {False: set(), True: set()}
    for equation in traced(fn, params):
        if equation.primitive.name == "dot_general":
            inside = "lm_head" in str(equation.source_info.name_stack)
            ran[inside].add(str(equation.invars[0].aval.dtype))
    assert ran == {True: {RUNS[rule]}, False: {"bfloat16"}}
    gradients = jax.jit(fn)(params)
    for new, old in zip(jax.tree.leaves(gradients), jax.tree.leaves(params), strict=True):
        assert around or new.dtype == old.dtype  # the results of a region are not cast back
        assert np.isfinite(new).all()


class RematNnx(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.mlp, self.lm_head = NnxMlp(rngs), nnx.Linear(4, 10, rngs=rngs)

    @nnx.remat
    def __call__(self, x: Any) -> Any:
        return self.lm_head(self.mlp(x))


class JitEquinox(eqx.Module):
    mlp: EquinoxMlp
    lm_head: eqx.nn.Linear

    def __init__(self) -> None:
        self.mlp, self.lm_head = EquinoxMlp(), eqx.nn.Linear(4, 10, key=KEY)

    @eqx.filter_jit
    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.lm_head)(jax.vmap(self.mlp)(x))


@pytest.mark.parametrize("model", [RematNnx(nnx.Rngs(0)), JitEquinox()], ids=["nnx.remat", "eqx.filter_jit"])
def test_a_method_that_is_given_a_copy_has_the_paths_of_the_original(model: Any) -> None:
    table = EDIT.module("mlp.down", "float32").module("lm_head", "float16")
    fn = autocast(lambda model, x: model(x), casting=table)  # a pattern that matches nothing would warn
    assert fn(model, jnp.ones((2, 4))).dtype == np.float16
    found = products(lambda model, x: model(x), model, jnp.ones((2, 4)), table=table)
    runs = {path.removeprefix("RematNnx.").replace(".eqx.nn.Linear", ""): run for path, run in found.items()}
    assert runs == {"mlp.up": {"bfloat16"}, "mlp.down": {"float32"}, "lm_head": {"float16"}}


def holds_in_what_ran_before(run: Callable[..., Any], table: Casting, *args: Any) -> None:
    """Check that an edit holds in a program that ran before, or that the reason is given in an older JAX."""
    fn = autocast(lambda *args: run(*args), casting=table)
    if hasattr(jax, "make_user_context"):  # since 0.7.2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fn(*args).dtype == np.float32
        return
    with pytest.warns(UserWarning, match=r"jax\.clear_caches\(\)"):
        assert fn(*args).dtype == jnp.bfloat16
    jax.clear_caches()
    assert fn(*args).dtype == np.float32


@pytest.mark.parametrize("compiled", [jax.jit, jax.checkpoint, nnx.jit, eqx.filter_jit])
def test_an_edit_holds_in_a_function_that_ran_before(compiled: Any) -> None:
    model = NnxModel(nnx.Rngs(0)) if compiled is not eqx.filter_jit else EquinoxModel()
    table = EDIT.module("lm_head", "float32")
    if compiled in (nnx.jit, eqx.filter_jit):
        run = compiled(lambda model, tokens: model(tokens))
        assert run(model, TOKENS).dtype == np.float32
        holds_in_what_ran_before(run, table, model, TOKENS)
    else:
        run = compiled(lambda tokens: model(tokens))
        assert run(TOKENS).dtype == np.float32
        holds_in_what_ran_before(run, table, TOKENS)


def test_a_pattern_that_matches_nothing_may_be_of_a_trace_that_jax_kept(monkeypatch: Any) -> None:
    monkeypatch.setattr("preamp.jax.autocasting.names.RETRACES", False)
    with pytest.warns(UserWarning, match=r"call jax\.clear_caches\(\) first"):
        autocast(jnp.matmul, casting=EDIT.module("head", "float32"))(X, W)


def _called(module: Any, x: Any) -> Any:
    return module(x)


def _mapped(module: Any, x: Any) -> Any:
    return jax.vmap(module)(x)


def _split(module: Any, x: Any) -> Any:
    graph, state = nnx.split(module)
    return jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x))(state, x)


class JitLinear(eqx.Module):
    lin: eqx.nn.Linear

    def __init__(self) -> None:
        self.lin = eqx.nn.Linear(4, 4, key=KEY)

    @eqx.filter_jit
    def __call__(self, x: Any) -> Any:
        return self.lin(x)


def model_of(layers: list[Any], call: Callable[..., Any], first: Callable[..., Any]) -> Any:
    """Return a model whose second layer is given to a transformation."""
    if isinstance(layers[0], nnx.Module):

        class Model(nnx.Module):
            def __init__(self) -> None:
                self.zero, self.one = layers

            def __call__(self, x: Any) -> Any:
                return call(self.one, first(self.zero, x))

        return Model()

    class Equinox(eqx.Module):
        zero: Any
        one: Any

        def __call__(self, x: Any) -> Any:
            return call(self.one, first(self.zero, x))

    return Equinox(*layers)


def nnx_layers() -> list[Any]:
    return [NnxMlp(nnx.Rngs(0)), NnxMlp(nnx.Rngs(1))]


def equinox_layers() -> list[Any]:
    return [EquinoxMlp(), EquinoxMlp()]


COPIES = {
    "nnx.remat": (nnx_layers, nnx.remat(_called), _called, "NnxMlp"),
    "nnx.jit": (nnx_layers, nnx.jit(_called), _called, "NnxMlp"),
    "nnx.vmap": (nnx_layers, nnx.vmap(_called, in_axes=(None, 0)), _called, "NnxMlp"),
    "nnx.split": (nnx_layers, _split, _called, "NnxMlp"),
    "filter_jit": (
        equinox_layers,
        lambda layer, x: jax.vmap(eqx.filter_jit(layer))(x),
        _mapped,
        "EquinoxMlp",
    ),
    "filter_checkpoint": (equinox_layers, eqx.filter_checkpoint(_mapped), _mapped, "EquinoxMlp"),
    "jax.checkpoint": (equinox_layers, jax.checkpoint(_mapped), _mapped, "EquinoxMlp"),
    "eqx.nn": (
        lambda: [eqx.nn.Linear(4, 4, key=KEY) for _ in range(2)],
        jax.checkpoint(_mapped),
        _mapped,
        "Linear",
    ),
}


@pytest.mark.parametrize("case", ["nnx.remat", "nnx.split", "filter_jit", "eqx.nn"])
def test_an_edit_that_a_copy_of_a_module_may_have_missed_is_a_warning(case: str) -> None:
    layers, call, first, kind = COPIES[case]
    x = jnp.ones((2, 4))
    name = "eqx.nn.Linear" if case == "eqx.nn" else kind
    for table, instead in (
        (EDIT.module("one", "float32"), f".module('{name}', 'float32')"),
        (EDIT.module("one.down", "float16"), f".module('{kind}.down', 'float16')"),
    ):
        if case == "eqx.nn" and "down" in instead:
            continue
        jax.clear_caches()  # before 0.7.2 JAX would reuse the trace of the other table, and see no copy
        model = model_of(layers(), call, first)
        with pytest.warns(UserWarning, match=rf"copy of {kind} .*jax\.checkpoint\(lambda") as caught:
            casts(lambda model, x: model(x), model, x, casting=table)
        (warning,) = caught  # and none that says that no module has the name
        assert instead in str(warning.message)
        assert warning.filename == __file__


@pytest.mark.parametrize("case", COPIES)
def test_a_copy_that_no_edit_is_about_is_no_warning(case: str) -> None:
    layers, call, first, kind = COPIES[case]
    name = "eqx.nn.Linear" if case == "eqx.nn" else kind
    x = jnp.ones((2, 4))
    tables = [EDIT.module(pattern, "float32") for pattern in (name, "**", "zero")]
    for table in tables:
        model = model_of(layers(), call, first)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            casts(lambda model, x: model(x), model, x, casting=table)


def test_a_layer_of_equinox_whose_method_is_compiled_is_a_copy_too() -> None:
    model, x = model_of([JitLinear(), JitLinear()], _mapped, _mapped), jnp.ones((2, 4))
    with pytest.warns(UserWarning, match=r"copy of JitLinear.*\.module\('Equinox\.lin', 'float32'\)"):
        casts(lambda model, x: model(x), model, x, casting=EDIT.module("one", "float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        casts(lambda model, x: model(x), model, x, casting=EDIT.module("lin", "float32"))


def test_a_function_of_a_closure_keeps_the_path() -> None:
    for layers, first in ((nnx_layers(), _called), (equinox_layers(), _mapped)):
        model = model_of(
            layers, lambda layer, x, first=first: jax.checkpoint(lambda x: first(layer, x))(x), first
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = autocast(lambda model, x: model(x), casting=EDIT.module("one", "float32"))(
                model, jnp.ones((2, 4))
            )
        assert result.dtype == np.float32


def test_patterns_may_leave_out_the_classes_that_equinox_adds() -> None:
    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        layers: list[Any]

        def __call__(self, x: Any) -> Any:
            return self.layers[1](self.mlp(x))

    model = Model(eqx.nn.MLP(4, 4, 8, 2, key=KEY), [None, eqx.nn.Linear(4, 4, key=KEY)])

    def in_float32(pattern: str) -> list[str]:
        found = products(lambda model, x: model(x), model, jnp.ones(4), table=EDIT.module(pattern, "float32"))
        return [path.replace(".eqx.nn.Linear", "") for path, runs in found.items() if runs == {"float32"}]

    assert in_float32("mlp.layers.1") == ["Model.mlp.eqx.nn.MLP.layers.1"]
    assert in_float32("Model.layers.1") == ["Model.layers.1"]
    assert in_float32("mlp.eqx.nn.MLP.layers.1.eqx.nn.Linear") == ["Model.mlp.eqx.nn.MLP.layers.1"]
    assert len(in_float32("eqx.nn.Linear")) == 4
    with pytest.warns(UserWarning, match=r"Write 'mlp\.layers\.[012]'"):
        in_float32("mlp.layer.1")


def test_a_copy_that_a_transformation_made_has_the_name_of_its_class() -> None:
    class Deep(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            make = nnx.vmap(lambda key: NnxMlp(nnx.Rngs(key)))
            self.layers = make(jax.random.split(KEY, 3))

        def __call__(self, x: Any) -> Any:
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    found = products(Deep(nnx.Rngs(0)), jnp.ones((2, 4)), table=EDIT.module("NnxMlp.down", "float32"))
    assert found == {"Deep.NnxMlp.up": {"bfloat16"}, "Deep.NnxMlp.down": {"float32"}}


def test_an_operator_outside_of_modules_is_in_the_pattern_for_everything_only() -> None:
    fn = autocast(jnp.matmul, casting=EDIT.module("**", "float32"))
    assert fn(X, W).dtype == jnp.float32
    with pytest.warns(UserWarning, match="No module"):
        assert autocast(jnp.matmul, casting=EDIT.module("*", "float32"))(X, W).dtype == jnp.bfloat16


# Rules


def head(x: Any, w: Any) -> Any:
    with jax.named_scope("head"):
        return x @ w


def test_edits_of_operators_and_of_modules_count_in_their_order() -> None:
    def runs(table: Casting) -> Any:
        return autocast(head, casting=table)(X, W).dtype

    assert runs(EDIT.lower("dot_general").module("head", "float32")) == jnp.float32
    assert runs(EDIT.module("head", "float32").lower("matmul")) == jnp.bfloat16
    assert runs(EDIT.module("head", "float16").float32("matmul")) == jnp.float32
    assert runs(EDIT.float32("matmul").module("head", "float16")) == jnp.float32
    assert runs(EDIT.module("head", "float32").module("he*", "default")) == jnp.bfloat16
    assert runs(EDIT.module("head", "float32").module("he*", "float16")) == jnp.float16


def test_low_weights_and_inputs_are_cast_up_in_a_float32_module() -> None:
    def model(x: Any, w: Any) -> Any:
        x = x @ w
        with jax.named_scope("head"):
            return x + 1, x @ w, lax.sort(x), jnp.argmax(x), jnp.concatenate([x, w])

    low = W.astype(jnp.bfloat16)
    results = autocast(model, casting=EDIT.module("head", "float32"))(X, low)
    assert [str(each.dtype) for each in results] == ["float32", "float32", "float32", "int32", "float32"]
    assert {
        dtype
        for _, dtype in float_casts(traced(autocast(model, casting=EDIT.module("head", "float32")), X, low))
    } == {
        "bfloat16",
        "float32",
    }


def test_an_untouched_module_casts_nothing() -> None:
    def model(x: Any, w: Any) -> Any:
        with jax.named_scope("head"):
            return jnp.exp(x) @ w, jnp.exp(x.astype(jnp.float16)) @ w.astype(jnp.float16)

    table = EDIT.module("head", "untouched")
    assert [str(each.dtype) for each in autocast(model, casting=table)(X, W)] == ["float32", "float16"]
    assert float_casts(traced(autocast(model, casting=table), X, W)) == [("float32", "float16")] * 2


def test_what_a_module_refuses_names_its_line() -> None:
    from preamp.errors import CastingError

    table = EDIT.module("head", "float32").refuse("dot_general")
    with pytest.raises(
        CastingError, match=r"'dot_general' is refused.*test_autocast_modules\.py:\d+ \(head\)"
    ):
        autocast(head, casting=table)(X, W)
    assert (
        autocast(head, casting=EDIT.refuse("dot_general").module("head", "float32"))(X, W).dtype == np.float32
    )


# Structure


def scanned(x: Any, w: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        with jax.named_scope("mlp"):
            return jnp.tanh(head(x, w)), x @ w

    with jax.named_scope("layers"):
        return lax.scan(layer, x, jnp.stack([w, w]))


def repeated(x: Any, w: Any) -> Any:
    with jax.named_scope("layers"):
        return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(head(x, w)), x @ w)


def branched(x: Any, w: Any) -> Any:
    with jax.named_scope("layers"):
        return lax.cond(x.sum() > 0, lambda: head(x, w), lambda: x @ w)


def rematerialized(x: Any, w: Any) -> Any:
    with jax.named_scope("layers"):
        return jax.checkpoint(lambda x: jnp.tanh(head(x, w)))(x) + jax.checkpoint(lambda x: x @ w)(x)


def mapped(x: Any, w: Any) -> Any:
    return jax.vmap(lambda x: head(x, w) + jnp.tanh(x @ w))(x)


def jitted(x: Any, w: Any) -> Any:
    with jax.named_scope("layers"):
        return jax.jit(lambda x, w: jax.jit(head)(x, w) + jax.jit(jnp.matmul)(x, w))(x, w)


@jax.custom_vjp
def with_own_vjp(x: Any, w: Any) -> Any:
    return x @ w


with_own_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@jax.custom_jvp
def with_own_jvp(x: Any, w: Any) -> Any:
    return x @ w


@with_own_jvp.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


def customized_vjp(x: Any, w: Any) -> Any:
    with jax.named_scope("head"):
        inside = with_own_vjp(x, w)
    return jnp.tanh(inside) + with_own_vjp(x, w)


def customized_jvp(x: Any, w: Any) -> Any:
    with jax.named_scope("head"):
        inside = with_own_jvp(x, w)
    return jnp.tanh(inside) + with_own_jvp(x, w)


PROGRAMS = [scanned, repeated, branched, rematerialized, mapped, jitted, customized_vjp, customized_jvp]


def by_scope(jaxpr: Any, around: bool = False) -> Iterator[tuple[bool, str]]:
    """Yield for each product whether it is in the module, and its precision."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inside = around or "head" in str(equation.source_info.name_stack)
        if equation.primitive.name == "dot_general":
            yield inside, str(equation.invars[0].aval.dtype)
        for value in equation.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if hasattr(each, "eqns") or hasattr(each, "jaxpr"):
                    yield from by_scope(each, inside)


@pytest.mark.parametrize(("rule", "jit"), [("float32", False), ("float16", True)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_module_keeps_its_rule_inside_of_what_holds_programs(program: Any, rule: Any, jit: bool) -> None:
    inner = jax.jit(program) if jit else program
    fn = autocast(inner, casting=EDIT.module("head", rule))
    assert set(by_scope(jax.make_jaxpr(fn)(X, W))) == {(True, RUNS[rule]), (False, "bfloat16")}
    if program is repeated:  # JAX cannot differentiate a while loop
        return

    def loss(x: Any, w: Any) -> Any:
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(inner(x, w)))

    around = autocast(jax.grad(loss, (0, 1)), casting=EDIT.module("head", rule))
    assert set(by_scope(jax.make_jaxpr(around)(X, W))) == {(True, RUNS[rule]), (False, "bfloat16")}

    def cast_loss(x: Any, w: Any) -> Any:
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(fn(x, w)))

    backward = set(by_scope(jax.make_jaxpr(jax.grad(cast_loss, (0, 1)))(X, W)))
    if program is not customized_vjp:  # JAX does not show a backward pass of the user's own
        assert backward == {(True, RUNS[rule]), (False, "bfloat16")}
    x, w = jnp.array(X), jnp.array(W)  # JAX 0.8 hands rules of the user's own NumPy arrays without operators
    expected = jax.grad(loss, (0, 1))(x, w)
    for new, old in zip(jax.jit(jax.grad(cast_loss, (0, 1)))(x, w), expected, strict=True):
        assert new.dtype == old.dtype == np.float32
        np.testing.assert_allclose(new, old, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_module_in_float32_computes_what_the_function_computes(program: Any) -> None:
    exact = jax.jit(autocast(program, casting=EDIT.module("**", "float32")))(X, W)
    for new, old in zip(jax.tree.leaves(exact), jax.tree.leaves(jax.jit(program)(X, W)), strict=True):
        np.testing.assert_array_equal(new, old, strict=True)
    if program is not repeated and program is not customized_vjp:
        assert float_casts(traced(autocast(program, casting=EDIT.module("**", "float32")), X, W)) == []


def test_a_function_that_two_modules_share_runs_by_the_rule_of_each() -> None:
    shared, product = jax.jit(lambda x, w: jnp.exp(x + w) @ w), jax.jit(jnp.matmul)

    def model(x: Any, w: Any) -> Any:
        with jax.named_scope("body"):
            first = shared(x, w), product(x, w)
        with jax.named_scope("head"):
            return first, shared(x, w), product(x, w)

    for table, runs in (
        (EDIT.module("head", "float32"), {"body": {"bfloat16"}, "head": {"float32"}}),
        (
            EDIT.module("body", "float32").module("head", "float16"),
            {"body": {"float32"}, "head": {"float16"}},
        ),
    ):
        assert products(model, W, W, table=table) == runs
    # The lookahead is each module's own: a weight is cast before the function to what is needed in it.
    pairs = float_casts(traced(autocast(model, casting=EDIT.module("head", "float16")), W, W))
    assert ("bfloat16", "float16") not in pairs
    assert ("float32", "float16") in pairs
    low = W.astype(jnp.bfloat16)
    rows = casts(model, low, low, casting=EDIT.module("head", "untouched")).rows
    added = {row.module: row.runs for row in rows if row.operator == "add"}
    assert added == {"body": "float32", "head": "bfloat16"}


def test_the_report_names_the_rule_that_holds_in_the_module() -> None:
    for rule in ("float32", "untouched"):
        (row,) = casts(head, X, W, casting=EDIT.module("head", rule)).rows
        assert (row.module, row.rule) == ("head", rule)
    (row,) = casts(head, X, W, casting=EDIT.module("head", "float16").widest("dot_general")).rows
    assert row.rule == "widest"


# The lookahead stays within what a module's settings are about


def test_a_module_in_float32_does_not_widen_what_comes_before_it() -> None:
    def model(x: Any, w: Any) -> Any:
        y = x @ w
        return head(y + y, w)

    for rule in ("float32", "untouched"):
        rows = casts(model, X, W, casting=EDIT.module("head", rule)).rows
        assert [row.runs for row in rows if row.operator == "add"] == ["bfloat16"]


def test_what_follows_a_module_does_not_change_its_rule() -> None:
    def model(x: Any, w: Any, b: Any) -> Any:
        with jax.named_scope("head"):
            wide = jnp.broadcast_to(b, x.shape) + x @ w
        return wide @ w

    rows = casts(model, X, W, W[0], casting=EDIT.module("head", "float32")).rows
    assert {row.runs for row in rows if row.module == "head"} == {"float32"}


# Tied embeddings


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(10, 4, name="embed")
        x = nn.Dense(4)(embed(tokens))
        return embed.attend(x)


def tied_by_hand(params: Any, tokens: Any) -> Any:
    with jax.named_scope("embed"):
        x = params["table"][tokens]
    x = x @ params["kernel"]
    with jax.named_scope("lm_head"):
        return x @ params["table"].T


@pytest.mark.parametrize(
    ("rule", "dtype"), [("float32", "bfloat16"), ("float16", "float32"), ("untouched", "float32")]
)
def test_a_tied_table_is_cast_where_its_module_says(rule: Any, dtype: str) -> None:
    """What the head does to the table changes neither the lookup nor the dtype of the gradient."""
    linen = Tied()
    programs = [
        (linen.apply, linen.init(KEY, TOKENS), "embed.attend"),
        (tied_by_hand, {"table": jax.random.normal(KEY, (10, 4)), "kernel": jnp.ones((4, 4))}, "lm_head"),
    ]
    for model, params, pattern in programs:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        table = EDIT.module(pattern, rule)
        rows = casts(model, params, TOKENS, casting=table).rows
        plain = casts(model, params, TOKENS).rows
        lookups = [row for row in rows if row.operator == "gather"]
        assert lookups == [row for row in plain if row.operator == "gather"]
        assert {row.runs for row in lookups} == {dtype}
        (head_row,) = [row for row in rows if row.operator == "dot_general" and pattern in row.module]
        assert head_row.runs == {"float32": "float32", "float16": "float16"}.get(rule, dtype)

        def loss(params: Any, model: Any = model, table: Any = table) -> Any:
            return jnp.mean(autocast(model, casting=table)(params, TOKENS).astype(jnp.float32) ** 2)

        gradients = jax.jit(jax.grad(loss))(params)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients)} == {dtype}
        exact = jax.grad(lambda p, model=model: jnp.mean(model(p, TOKENS).astype(jnp.float32) ** 2))(params)
        for new, old in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
            np.testing.assert_allclose(new.astype(np.float32), old.astype(np.float32), rtol=0.1, atol=0.1)


# Regions inside of each other, and emulation


def test_a_region_inside_keeps_its_own_table() -> None:
    def model(x: Any, w: Any, inner: Any) -> Any:
        with jax.named_scope("head"):
            return x @ w, inner(jnp.matmul)(x, w)

    def run(outer: Casting, inner: Any) -> list[str]:
        return [str(each.dtype) for each in autocast(lambda x, w: model(x, w, inner), casting=outer)(X, W)]

    table = EDIT.module("head", "float32")
    assert run(table, lambda fn: autocast(fn, "float16")) == ["float32", "float16"]
    assert run(table, lambda fn: autocast(fn, enabled=False)) == ["float32", "float32"]
    assert run(table, autocast) == ["float32", "bfloat16"]
    # A region in a module knows the path around it, and counts with its own edits there.
    assert run(EDIT, lambda fn: autocast(fn, casting=table)) == ["bfloat16", "float32"]
    assert run(table, lambda fn: autocast(fn, casting=table)) == ["float32", "float32"]


def test_tables_with_other_edits_of_modules_are_other_regions() -> None:
    def name(table: Casting) -> str:
        return str(jax.make_jaxpr(autocast(head, casting=table))(X, W).eqns[-1].source_info.name_stack)

    tables = [
        EDIT.module("head", "float32"),
        EDIT.module("head", "untouched"),
        EDIT.module("h*", "float32"),
        EDIT.module("head", "float32").lower("exp"),
        EDIT.lower("exp").module("head", "float32"),
    ]
    assert len({name(table).split("/")[0] for table in tables}) == len(tables)
    assert name(tables[0]) == name(EDIT.module("head", "float32"))


def test_a_module_of_another_precision_is_rehearsed_too() -> None:
    def model(x: Any, w: Any) -> Any:
        return head(x @ w, w)

    table = EDIT.module("head", "float16")
    x, w = jax.random.normal(KEY, (4, 8)), jax.random.normal(KEY, (8, 8))
    real, rehearsed = (autocast(model, casting=table, emulate=emulate)(x, w) for emulate in (False, True))
    assert rehearsed.dtype == np.float16
    np.testing.assert_allclose(rehearsed, real, rtol=2e-3, atol=2e-2)
    runs = products(model, X, W, table=table, emulate=True)
    assert runs == {"-": {"bfloat16"}, "head": {"float16"}}


# Patterns that match nothing


def test_a_pattern_that_matches_nothing_warns_once_with_the_nearest() -> None:
    model, params = models()["linen"]
    table = EDIT.module("lm_haed", "float32").module("layers_1.dwon", "float32").module("lm_head", "float32")
    with pytest.warns(UserWarning, match="No module of this program is named") as caught:
        autocast(model, casting=table)(params, TOKENS)
    (warning,) = caught
    assert "'lm_haed' or 'layers_1.dwon'" in str(warning.message)
    assert "Write 'lm_head'" in str(warning.message)
    assert "'layers_1.down'" in str(warning.message)
    assert warning.filename == __file__
    with pytest.warns(UserWarning, match="'lm_head'") as caught:
        casts(model, params, TOKENS, casting=EDIT.module("lm_haed", "float32"))
    assert caught[0].filename == __file__


def test_a_program_without_modules_says_how_to_name_them() -> None:
    with pytest.warns(UserWarning, match=r"names no modules.*jax\.named_scope\('head'\)"):
        autocast(jnp.matmul, casting=EDIT.module("head", "float32"))(X, W)


def test_a_part_of_a_model_need_not_have_every_module() -> None:
    table = EDIT.module("head", "float32")

    def body(x: Any) -> Any:
        with jax.named_scope("body"):
            return autocast(jnp.tanh, casting=table)(x)

    def region_in_a_region(x: Any, w: Any) -> Any:
        return head(autocast(jnp.tanh, casting=table)(x), w)

    body(X)
    autocast(lambda x, w: head(body(x), w), casting=table)(X, W)
    autocast(region_in_a_region, casting=table)(X, W)
    with pytest.warns(UserWarning, match="named 'head', so"):  # the region around it does not look for it
        autocast(lambda x, w: region_in_a_region(x, w), casting=EDIT.lower("exp"))(X, W)


# What is left behind


def methods() -> dict[tuple[type, str], Any]:
    kinds = [NnxModel, NnxMlp, nnx.Linear, nnx.Embed, EquinoxModel, EquinoxMlp, eqx.nn.Linear, eqx.nn.MLP]
    return {(kind, name): value for kind in kinds for name, value in vars(kind).items()}


@pytest.mark.parametrize("library", ["nnx module", "equinox module"])
def test_classes_are_left_as_they_were(library: str) -> None:
    model, params = models()[library]
    before = methods()
    autocast(model, casting=EDIT.module("lm_head", "float32"))(params, TOKENS)
    casts(model, params, TOKENS)
    assert methods() == before

    def fails(model: Any) -> Any:
        assert methods() != before
        raise RuntimeError("on purpose")

    for run in (
        lambda: autocast(fails, casting=EDIT.module("lm_head", "float32"))(params),
        lambda: casts(fails, params),
    ):
        with pytest.raises(RuntimeError, match="on purpose"):
            run()
        assert methods() == before
    autocast(lambda model: methods() == before or 1 / 0)(
        params
    )  # without edits of modules nothing is replaced


def test_other_threads_notice_nothing() -> None:
    model, entered, leave = NnxModel(nnx.Rngs(0)), threading.Barrier(2), threading.Barrier(2)
    before, found = methods(), list[Any]()

    def slowly(tokens: Any) -> Any:
        entered.wait(60)
        leave.wait(60)
        return model(tokens)

    def trace() -> None:
        found.append(products(slowly, TOKENS, table=EDIT.module("lm_head", "float32")))

    thread = threading.Thread(target=trace)
    thread.start()
    entered.wait(60)
    scopes = {str(each.source_info.name_stack) for each in traced(lambda tokens: model(tokens), TOKENS)}
    here = products(model, TOKENS, table=EDIT.module("layers_0", "float32"))
    assert methods() != before  # the other thread is not done
    leave.wait(60)
    thread.join()
    assert methods() == before
    assert scopes == {""}
    assert found == [
        {
            **here,
            "NnxModel.layers_0.up": {"bfloat16"},
            "NnxModel.layers_0.down": {"bfloat16"},
            "NnxModel.lm_head": {"float32"},
        }
    ]
    assert here["NnxModel.layers_0.up"] == {"float32"}


def test_without_edits_of_modules_nothing_changes() -> None:
    model, params = models()["linen"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once = str(jax.make_jaxpr(autocast(model))(params, TOKENS))
        again = str(
            jax.make_jaxpr(autocast(model, casting=EDIT.module("layers_0", "default")))(params, TOKENS)
        )
    assert once == again
