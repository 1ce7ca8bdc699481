"""What a step costs, counted in the compiled program: bytes accessed, temporaries, conditionals.

Of the two conditionals one measures gradients whose squares do not fit, and the other updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from preamp import Dynamic, Headroom
from preamp.guards import SpikeGuard
from preamp.jax import apply_gradients, loss_scaled, step, value_and_grad
from tests.seeing import Remembering

from .inside import arrays
from .trainings import handed

ADAM = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)

# An update alone returns fewer numbers than it is given.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable:UserWarning")
counts_of_xla = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="XLA of jaxlib 0.6 and 0.8 counts more passes over the same step"
)


class Costs(NamedTuple):
    """Of a compiled program: memory traffic and temporaries in copies of the parameters, and conditionals."""

    passes: float
    temporaries: float
    conditionals: int


def costs(function: Callable[..., Any], params: Any, *others: Any) -> Costs:
    compiled = jax.jit(function, donate_argnums=(0, 1)).lower(params, *others).compile()
    analysis: Any = compiled.cost_analysis()
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    return Costs(
        analysis["bytes accessed"] / size,
        compiled.memory_analysis().temp_size_in_bytes / size,
        compiled.as_text().count(" conditional("),
    )


@pytest.fixture
def whole() -> None:
    """Count the dearer branch."""


@pytest.fixture(autouse=True)
def squares_fit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a step whose squares fit: of a conditional XLA counts the branch that accesses most."""
    if "whole" not in request.fixturenames:
        monkeypatch.setattr("preamp.arrays.jax._size_by_largest", squares_that_fit)


def squares_that_fit(given: Any, scale: Any, norm: Any, *_: Any) -> arrays.Size:
    return arrays.Size(jnp.isnan(scale), norm, jnp.zeros(len(given)), norm, norm)


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def update_alone(optimizer: Any, ours: bool) -> Costs:
    """Return what an update of a million parameters costs, the gradients given."""

    def stock(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def whole(params: Any, state: Any, gradients: Any) -> Any:
        return apply_gradients(optimizer, gradients, state, params)

    params = floats(1 << 20)
    state = jax.eval_shape(optimizer.init, params)
    if hasattr(state, "policy_state"):
        _, state = jax.eval_shape(handed, params, state)
    return costs(whole if ours else stock, params, state, params)


def both(policy: Any) -> Costs:
    """Return what measuring a million gradients and updating with them costs."""
    optimizer, params = loss_scaled(ADAM, policy), floats(1 << 20)

    def whole(params: Any, state: Any, scaled: Any) -> Any:
        return apply_gradients(optimizer, *handed(scaled, state), params)

    return costs(whole, params, jax.eval_shape(optimizer.init, params), params)


@counts_of_xla
def test_scaling_reads_the_gradients_once_more_and_nothing_else() -> None:
    plain, scaled = update_alone(ADAM, False), update_alone(loss_scaled(ADAM), True)
    assert scaled.passes - plain.passes == pytest.approx(1.0, abs=0.01)
    assert plain.temporaries < 0.001 > scaled.temporaries
    assert (plain.conditionals, scaled.conditionals) == (0, 1)


@counts_of_xla
def test_scaling_and_clipping_cost_less_than_clipping_alone() -> None:
    plain, scaled = update_alone(CLIPPED, False), update_alone(loss_scaled(ADAM, max_norm=1.0), True)
    assert scaled.passes - plain.passes == pytest.approx(-4.0, abs=0.01)
    assert plain.temporaries == pytest.approx(1.0, abs=0.001)
    assert scaled.temporaries < 0.001
    assert scaled.conditionals == 1


@counts_of_xla
def test_squares_that_do_not_fit_cost_one_more_pass_and_no_memory(
    whole: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dearer = both(None)
    monkeypatch.setattr("preamp.arrays.jax._size_by_largest", squares_that_fit)
    assert dearer.passes - both(None).passes == pytest.approx(1.0, abs=0.01)
    assert dearer.temporaries == both(None).temporaries
    assert dearer.conditionals == 2


def test_clipping_costs_nothing_where_losses_are_scaled() -> None:
    passes = [update_alone(loss_scaled(ADAM, max_norm=limit), True).passes for limit in (None, 1.0)]
    assert passes[0] == pytest.approx(passes[1], abs=0.001)


@counts_of_xla
def test_a_policy_that_sees_reads_the_gradients_once_more() -> None:
    """XLA on a CPU fuses no reduction with another."""
    blind, seeing = both(None), both(Remembering())
    assert seeing.passes - blind.passes == pytest.approx(1.0, abs=0.01)
    assert seeing.temporaries - blind.temporaries < 0.001
    assert seeing.conditionals == blind.conditionals


def test_a_guard_costs_no_pass_and_no_conditional() -> None:
    """It uses the norm that is measured anyway."""
    clipped, guarded = (
        update_alone(loss_scaled(ADAM, max_norm=1.0, guard=one), True) for one in (None, SpikeGuard())
    )
    assert guarded.passes == pytest.approx(clipped.passes, rel=0.001)
    assert guarded.temporaries - clipped.temporaries < 0.001
    assert guarded.conditionals == clipped.conditionals == 1


def test_the_update_of_the_transformation_hands_out_updates_which_apply_gradients_need_not() -> None:
    whole, handed = (update_alone(loss_scaled(ADAM), ours) for ours in (True, False))
    assert handed.passes - whole.passes == pytest.approx(3.0, abs=0.01)
    assert handed.conditionals == 1


def perceptron(params: Any, x: Any, y: Any) -> Any:
    for weight, bias in params:
        x = jnp.tanh(x @ weight + bias)
    return jnp.mean(jnp.square(x - y))


def training(optimizer: Any, ours: bool) -> Costs:
    """Return what a step of a perceptron costs, whose parameters are larger than its batch."""
    params = [(floats(256, 256), floats(256))] * 4

    def stock(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(perceptron)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    example = floats(16, 256)
    return costs(step(perceptron, optimizer) if ours else stock, params, state, example, example)


@counts_of_xla
def test_a_whole_step_accesses_fewer_bytes_than_one_without_scaling() -> None:
    plain, scaled = training(ADAM, False), training(loss_scaled(ADAM), True)
    assert scaled.passes / plain.passes < 0.97
    assert scaled.temporaries < 1.1  # the gradients, all of which are there before the first is used
    assert scaled.conditionals == 2


@counts_of_xla
def test_a_whole_step_with_clipping_accesses_far_fewer_bytes_than_optax() -> None:
    plain, scaled = training(CLIPPED, False), training(loss_scaled(ADAM, max_norm=1.0), True)
    assert scaled.passes / plain.passes < 0.79
    assert scaled.temporaries < plain.temporaries
    assert scaled.conditionals == 2


def test_the_loss_is_not_multiplied() -> None:
    """Backward begins with the scale; nothing else is made of it but what unscales."""
    optimizer = loss_scaled(optax.sgd(0.1))
    state = optimizer.init(jnp.ones(()))
    program = jax.make_jaxpr(value_and_grad(lambda w: w * 3.0))(jnp.ones(()), state)
    products = [equation for equation in program.eqns if equation.primitive.name == "mul"]
    # w * 3.0, and 3.0 times the seed; the square of the gradient, and what unscales its norm and itself.
    assert len(products) == 5


def test_gradients_of_float16_products_cross_the_conditional_short() -> None:
    """A weight that is cast has a gradient that is cast back: it waits for the update that reads it."""

    def low(params: Any, x: Any, y: Any) -> Any:
        for weight, bias in params:
            x = jnp.tanh(x @ weight.astype(x.dtype) + bias.astype(x.dtype))
        return jnp.mean(jnp.square((x - y).astype(jnp.float32)))

    optimizer = loss_scaled(ADAM, max_norm=1.0)
    params = [(floats(128, 128), floats(128))] * 2
    state, x = jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((8, 128), jnp.float16)

    def apart(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, *found = value_and_grad(low)(params, state, x, y)
        return value, *apply_gradients(optimizer, *found, params)

    whole, written = (costs(f, params, state, x, x) for f in (step(low, optimizer), apart))
    assert whole.passes < written.passes - 0.5
    assert whole.conditionals == 2


@pytest.mark.parametrize(("policy", "more"), [(Dynamic(), 1), (Headroom(), 2)])
def test_ranks_agree_in_as_many_collectives_as_docs_distributed_says(policy: Any, more: int) -> None:
    """Beyond those of the same step without a loss scale."""
    inner, params, x = optax.sgd(1e-2), {"w": jnp.ones((8, 1))}, jnp.ones((16, 8))

    def bare(loss: Any) -> Any:
        def train(params: Any, state: Any, x: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, x)
            updates, state = inner.update(gradients, state, params)
            return value, optax.apply_updates(params, updates), state

        return train

    def mean(params: Any, x: Any) -> Any:
        return jnp.mean((x @ params["w"]) ** 2)

    def split(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.psum(x @ params["w"], "d") ** 2)

    def all_reduces(train: Any, optimizer: Any, of_params: P, of_x: P) -> int:
        mesh = Mesh(jax.devices()[:1], ("d",))
        specs = {"in_specs": (of_params, P(), of_x), "out_specs": (P(), of_params, P())}
        parallel = jax.jit(jax.shard_map(train, mesh=mesh, **specs))
        return parallel.lower(params, optimizer.init(params), x).as_text().count("stablehlo.all_reduce")

    ours = loss_scaled(inner, policy, max_norm=1.0)
    averaged = all_reduces(bare(lambda params, x: jax.lax.pmean(mean(params, x), "d")), inner, P(), P("d"))
    assert all_reduces(step(mean, ours, axis_name="d"), ours, P(), P("d")) == averaged + 1

    ours = loss_scaled(inner, policy, max_norm=1.0, axis_name="d")
    shards = P("d"), P(None, "d")
    assert all_reduces(step(split, ours), ours, *shards) == all_reduces(bare(split), inner, *shards) + more
