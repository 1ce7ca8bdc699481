"""State that a function writes: NNX modules, references, Linen's collections, Equinox's state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from preamp.errors import UsageError
from preamp.jax import autocast, casts

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Network(nnx.Module):
    """Writes in every way: running averages, a count of random keys, a product, a number of its own."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.product = nnx.BatchStat(jnp.zeros((4, 3)))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        y = self.linear(x)
        self.product[...] = y
        self.calls[...] = self.calls[...] + 1
        return self.dropout(self.norm(y))

    def loss(self, x: Any) -> Any:
        return self(x).astype(jnp.float32).sum()

    @autocast
    def decorated(self, x: Any) -> Any:
        return self(x)


def state_of(module: Any) -> list[Any]:
    leaves = jax.tree.leaves(nnx.split(module)[1])
    return [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in leaves
    ]


def by_hand(module: Network, x: Any, calls: int = 1) -> Any:
    """Call a function that takes and returns the state, so that no object is traced; write the state back."""
    graph, state = nnx.split(module)

    def apply(state: Any, x: Any) -> Any:
        model = nnx.merge(graph, state)
        y = model(x)
        # What is stored keeps its dtype.
        return y, jax.tree.map(lambda new, old: new.astype(old.dtype), nnx.state(model), nnx.state(module))

    for _ in range(calls):
        y, state = autocast(apply)(state, x)
        y = y[0] if isinstance(y, tuple) else y
    nnx.update(module, state)
    return y


WAYS: dict[str, Callable[[Network, Any], Any]] = {
    "as an argument": lambda m, x: autocast(lambda m, x: m(x))(m, x),
    "in a tree": lambda m, x: autocast(lambda tree: tree["in"][0](tree["x"]))({"in": [m, None], "x": x}),
    "twice": lambda m, x: autocast(lambda m, again, x: again(x))(m, m, x),
    "a part beside the whole": lambda m, x: autocast(lambda part, m, x: m(x))(m.norm, m, x),
    "itself": lambda m, x: autocast(m)(x),
    "a method": lambda m, x: autocast(m.__call__)(x),
    "a partial": lambda m, x: autocast(partial(Network.__call__, m))(x),
    "a decorated method": lambda m, x: m.decorated(x),
    "inside of nnx.jit, itself": lambda m, x: nnx.jit(lambda m, x: autocast(m)(x))(m, x),
    "around nnx.jit": lambda m, x: autocast(nnx.jit(lambda m, x: m(x)))(m, x),
    "in a region of its own": lambda m, x: autocast(lambda m, x: autocast(m)(x))(m, x),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_module_writes_comes_back_to_it(way: str) -> None:
    ours, expected = Network(), Network()
    result = WAYS[way](ours, X)
    assert result.dtype == by_hand(expected, X).dtype
    for new, old, known in zip(state_of(ours), state_of(Network()), state_of(expected), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_allclose(new, known, rtol=0.02, atol=1e-3)
    assert int(ours.calls[...]) == 1
    assert (ours.norm.mean[...] != 0).all()
    assert int(ours.dropout.rngs.count[...]) == int(expected.dropout.rngs.count[...]) == 1


def test_state_is_stored_in_the_dtype_it_was_written_with() -> None:
    model = Network()
    assert autocast(lambda m, x: m.linear(x))(model, X).dtype == jnp.bfloat16
    autocast(model)(X)
    assert model.product[...].dtype == np.float32
    assert (model.product[...] == model.product[...].astype(jnp.bfloat16)).all()  # computed low


@pytest.mark.parametrize(
    "around",
    [
        lambda fn: nnx.value_and_grad(lambda m, x: (fn(m, x), 0), has_aux=True),
        lambda fn: nnx.jit(nnx.grad(fn)),
        lambda fn: autocast(nnx.grad(lambda m, x: m.loss(x))),
    ],
)
def test_state_comes_back_through_gradients(around: Callable[..., Any]) -> None:
    ours, expected = Network(), Network()
    results = around(autocast(lambda m, x: m.loss(x)))(ours, X)
    by_hand(expected, X)
    assert int(ours.calls[...]) == 1
    np.testing.assert_allclose(ours.norm.mean[...], expected.norm.mean[...], rtol=0.02, atol=1e-3)
    assert any((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(results))


def test_new_variables_numbers_of_python_and_returned_modules_come_back() -> None:
    class Remembering(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.uses = 0

        def __call__(self, x: Any) -> Any:
            y = self.linear(x)
            self.y = nnx.Intermediate(y)
            self.uses += 1
            return y

    module = Remembering()
    result, itself = autocast(lambda m, x: (m(x), m))(module, X)
    assert itself is module
    assert module.uses == 1
    np.testing.assert_array_equal(module.y[...], result)
    assert autocast(lambda m: m)(module) is module
    made = autocast(lambda x: nnx.Linear(3, 3, rngs=nnx.Rngs(0)))(X)
    np.testing.assert_allclose(made.kernel[...], module.linear.kernel[...], rtol=1e-5)


@pytest.mark.parametrize("jit", [lambda fn: fn, nnx.jit])
def test_a_module_outside_of_the_arguments_is_read_or_refused(jit: Any) -> None:
    model, frozen = Network(), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    before = state_of(model)
    assert jit(autocast(lambda x: frozen(x)))(X).dtype == jnp.bfloat16
    with pytest.raises(
        UsageError,
        match=r"(?s)BatchStat.*Pass the module: autocast\(lambda model, x: model\(x\)\)\(model, x\)",
    ):
        jit(autocast(lambda x: model(x)))(X)
    for ours, expected in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_call_that_fails_leaves_the_state_as_it_was() -> None:
    def fails(m: Any, x: Any) -> Any:
        m(x)
        raise ValueError("stop")

    model = Network()
    before = state_of(model)
    with pytest.raises(ValueError, match="stop"):
        autocast(fails)(model, X)
    for ours, expected in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(ours, expected)
    autocast(model)(X)
    assert int(model.calls[...]) == 1


def test_a_report_writes_nothing_and_names_what_is_cast() -> None:
    model = Network()
    before = state_of(model)

    def twice(model: Any, x: Any) -> Any:
        return jax.lax.scan(
            lambda x, _: (x + model.linear.kernel[...].astype(jnp.bfloat16).sum(), None), x, None, 2
        )

    (product,) = [row for row in casts(model, X).rows if row.operator == "dot_general"]
    assert (product.inputs, product.runs) == ("float32", "bfloat16")
    texts = casts(twice, model, X).warnings
    assert any(text.startswith("model.linear.kernel is cast 2 times") for text in texts)
    for ours, expected in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(ours, expected)


def new_ref(value: Any) -> Any:
    """Return a mutable array, under any of the names that it has had."""
    for name in ("new_ref", "array_ref", "mutable_array"):
        for room in (jax, jax._src.core):
            if hasattr(room, name):
                return getattr(room, name)(value)
    raise AssertionError


@pytest.mark.parametrize(
    ("jit", "captured", "inside"),
    [(lambda fn: fn, False, False), (lambda fn: fn, True, False), (jax.jit, False, True)],
)
def test_references_are_written_to_in_their_dtype(jit: Any, captured: bool, inside: bool) -> None:
    def write(ref: Any, x: Any) -> Any:
        ref[...] = ref[...] + x @ x.T
        return ref[...] @ x

    ours, expected = new_ref(jnp.zeros((4, 4))), new_ref(jnp.zeros((4, 4)))
    body = jit(write) if inside and not captured else write
    for ref, region in ((ours, autocast), (expected, lambda fn: fn)):
        fn = jit(region(partial(body, ref) if captured else body))
        result = fn(X) if captured else fn(ref, X)
        assert result.dtype == (jnp.bfloat16 if ref is ours else np.float32)
    assert ours[...].dtype == np.float32
    np.testing.assert_allclose(ours[...], expected[...], rtol=0.05, atol=0.05)


def test_flax_is_not_imported_for_those_who_do_not_use_it() -> None:
    program = (
        "import sys, jax.numpy as jnp; from preamp.jax import autocast, casts; x = jnp.ones((2, 2));"
        "autocast(jnp.matmul)(x, x); casts(jnp.matmul, x, x); assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(not hasattr(nnx, "var_defaults"), reason="Flax has no variables over references")
def test_variables_over_references_and_many_layers_keep_their_places() -> None:
    class Layers(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.BatchStat(jnp.full((n + 1,), float(n))) for n in range(12)])
            self.a, self.b2, self.b10 = (nnx.BatchStat(jnp.full((n,), 0.5)) for n in (20, 21, 22))

        def __call__(self, x: Any) -> Any:
            for each in jax.tree.leaves(self, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
                each[...] = each[...] + 1
            return x @ x.T

    with nnx.var_defaults(ref=True):
        ours, expected = Layers(), Layers()
    expected(X)
    nnx.jit(autocast(lambda m, x: m(x)))(ours, X)
    for n, (one, other) in enumerate(zip(ours.layers, expected.layers, strict=True)):
        np.testing.assert_array_equal(one[...], other[...])
        assert one[...].shape == (n + 1,)
    for one, other in zip((ours.a, ours.b2, ours.b10), (expected.a, expected.b2, expected.b10), strict=True):
        np.testing.assert_array_equal(one[...], other[...])
