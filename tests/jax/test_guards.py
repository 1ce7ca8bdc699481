"""A guard in `loss_scaled`: equal decisions with a simulation, and a spike that leaves nothing behind."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import serialization
from jax import export
from jax.sharding import Mesh, PartitionSpec

from preamp import Dynamic, Headroom, PolicyError, Reading, Static, UsageError, guards, simulate
from preamp.guards import Guard, NormLimit, SpikeGuard
from preamp.jax import (
    accumulate,
    apply_gradients,
    check_exhausted,
    last_step,
    loss_scaled,
    restart_guard,
    restart_loss_scale,
    step,
    value_and_grad,
)
from preamp.scaling import Spike
from tests.guarding import LossLimit

from .reading import traced
from .trainings import enable_x64, handed, identical, shard_map

pytestmark = pytest.mark.usefixtures("quick_compiler")

POLICY = Dynamic(init_scale=4.0, growth_interval=5)
# All of them, compiled: tests/guards/test_frameworks.py.
GUARDS: list[Guard[Any]] = [
    SpikeGuard(sigmas=4.0, warmup=4, patience=3),
    NormLimit(5.0),
    guards.LEVANTER(rolling_interval_length=16),
]
each_guard = pytest.mark.parametrize("guard", GUARDS, ids=repr)
PARAMS = {"w": jnp.array([0.5, -0.0, 1.0, -2.0]), "b": jnp.array([-0.0])}
DIRECTION = np.array([0.5, -0.5, 0.5, 0.5], np.float32)  # of length 1


@jax.custom_vjp
def amplified(number: Any, factor: Any) -> Any:
    """Return the number; its gradient is multiplied by the factor."""
    return number


def _backward(factor: Any, seed: Any) -> Any:
    return seed * factor, jnp.zeros_like(seed)


amplified.defvjp(lambda number, factor: (number, factor), _backward)


def loss(params: Any, value: Any, norm: Any) -> Any:
    """Return a loss that is given, with gradients of the norm that is given, both finite or not."""
    value, norm = jnp.asarray(value, jnp.float32), jnp.asarray(norm, jnp.float32)
    nothing = jnp.where(norm == norm, 0.0, 0.0)  # that differs between devices as the norm does
    number = amplified(jnp.sum(params["w"] * DIRECTION) + nothing, norm)
    return value + (number - jax.lax.stop_gradient(number))


def loss_and_statistics(params: Any, old: Any, value: Any, norm: Any) -> Any:
    return loss(params, value, norm), ({"mean": 0.5 * old["mean"] + value}, norm)


def series(seed: int, length: int = 300, *, nans: float = 0.004) -> np.ndarray:
    """Return losses and norms of ordinary steps, spikes of both, alone and in a row, NaN and overflows."""
    draw = np.random.default_rng(seed)
    losses = 2.0 + 2.0 * np.exp(-np.arange(length) / 50) + draw.normal(0.0, 0.05, length)
    norms = np.exp(draw.normal(0.0, 0.1, length))
    kinds = draw.random(length)
    for number in np.flatnonzero(kinds < 0.04):
        losses[number : number + draw.integers(1, 5)] *= 10.0
    norms[(kinds > 0.04) & (kinds < 0.08)] *= 20.0
    norms[(kinds > 0.08) & (kinds < 0.13)] = draw.choice([np.inf, np.nan])
    both = (kinds > 0.13) & (kinds < 0.15)
    losses[both], norms[both] = np.inf, np.nan
    losses[kinds > 1.0 - nans] = np.nan
    return np.stack([losses, norms], axis=1).astype(np.float32)


def on_host(guard: Guard[Any] | None, script: np.ndarray, policy: Any = POLICY) -> Any:
    def reading(value: float, norm: float) -> Reading:
        finite = math.isfinite(norm)
        return Reading(finite, loss=value, grad_norm=norm if finite else None)

    return simulate(policy, [reading(float(value), float(norm)) for value, norm in script], guard=guard)


def scanned(optimizer: Any) -> Any:
    """Return a function that takes the steps of a script, and returns all states."""
    train = step(loss, optimizer)

    def one(carry: Any, row: Any) -> Any:
        _, params, state = train(*carry, row[0], row[1])
        return (params, state), (params, state)

    def run(params: Any, state: Any, script: Any) -> Any:
        return jax.lax.scan(one, (params, state), script)

    return run


def reasons(states: Any) -> list[str | None]:
    taken, finite = np.asarray(states.taken), np.asarray(states.finite)
    return [None if t else "spike" if f else "overflow" for t, f in zip(taken, finite, strict=True)]


@each_guard
def test_decisions_are_those_of_a_simulation(guard: Guard[Any]) -> None:
    optimizer = loss_scaled(optax.adam(0.1), POLICY, guard=guard)
    run, state = jax.jit(scanned(optimizer)), optimizer.init(PARAMS)
    spikes = 0
    for seed in range(3):
        script = series(seed)
        _, (params, states) = run(PARAMS, state, script)
        trace = on_host(guard, script)
        assert reasons(states) == [one.reason for one in trace]
        assert np.asarray(states.last_scale).tolist() == [one.scale for one in trace]
        spikes += reasons(states).count("spike")
        # A step that is not taken changes no bit of parameters and inner state.
        skipped = np.flatnonzero(~np.asarray(states.taken))
        skipped = skipped[skipped > 0]
        for leaf in jax.tree.leaves((params, states.inner_state)):
            after = np.asarray(leaf)
            assert after[skipped].tobytes() == after[skipped - 1].tobytes()
        # A spike is no step to the policy: neither an overflow nor a clean one.
        spiked = np.array([number for number, why in enumerate(reasons(states)) if why == "spike" and number])
        for leaf in states.policy_state if len(spiked) else ():
            assert np.array_equal(np.asarray(leaf)[spiked], np.asarray(leaf)[spiked - 1])
    assert spikes > 5


def test_last_step_says_why() -> None:
    optimizer = loss_scaled(optax.adam(0.1), POLICY, guard=SpikeGuard(warmup=4))
    train = jax.jit(step(loss, optimizer), donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.copy, PARAMS), optimizer.init(PARAMS)
    rows = [(2.0, 1.0), (2.1, 1.1), (1.9, 0.9), (2.0, 1.0), (2.0, 1.0)]
    rows += [(90.0, 1.0), (2.0, 30.0), (math.nan, 1.0), (9.0, math.inf), (2.0, 1.0)]
    steps = []
    for value, norm in rows:
        _, params, state = train(params, state, value, norm)
        steps.append(last_step(state))
    assert [one.reason for one in steps] == [None] * 5 + ["spike"] * 3 + ["overflow", None]
    of_loss, of_norm, nan, overflow = (steps[number].spike for number in (5, 6, 7, 8))
    assert isinstance(of_loss, Spike)
    assert (of_loss.of, of_loss.value) == ("loss", 90.0)
    assert 2.1 < of_loss.limit < 10.0
    assert (of_norm.of, of_norm.value) == ("grad_norm", pytest.approx(30.0))
    assert 1.1 < of_norm.limit < 10.0
    assert nan.of == "loss"
    assert math.isnan(nan.value)
    assert overflow is None
    assert steps[6].grad_norm == pytest.approx(30.0)
    assert all(one.skipped for one in steps[5:9])
    assert all(one.finite for one in steps[5:8])
    assert int(state.skipped_steps) == 4
    assert bool(state.taken)
    assert steps == list(on_host_with_limits(rows, steps))


def on_host_with_limits(rows: list[tuple[float, float]], steps: list[Any]) -> Any:
    """Yield the steps of a simulation, with the float32 numbers of other steps where they are close."""
    trace = on_host(SpikeGuard(warmup=4), np.array(rows, np.float32))
    for ours, theirs in zip(steps, trace, strict=True):
        assert (ours.scale, ours.new_scale, ours.skipped) == (theirs.scale, theirs.new_scale, theirs.skipped)
        if ours.spike is not None:
            assert ours.spike.limit == pytest.approx(theirs.spike.limit, rel=1e-4)
        yield ours


WAYS = ["step", "jitted apply_gradients", "jitted update"]


def trained(way: str, optimizer: Any) -> Any:
    """Return a step: by one function or by several, compiled or not."""

    def by_applying(params: Any, state: Any, value: Any, norm: Any) -> Any:
        value, *found = value_and_grad(loss)(params, state, value, norm)
        return value, *apply_gradients(optimizer, *found, params)

    def by_updating(params: Any, state: Any, value: Any, norm: Any) -> Any:
        value, *found = value_and_grad(loss)(params, state, value, norm)
        updates, state = optimizer.update(*found, params)
        return value, optax.apply_updates(params, updates), state

    ways = {"step": step(loss, optimizer), "apply_gradients": by_applying, "update": by_updating}
    function: Any = ways[way.removeprefix("jitted ")]
    return jax.jit(function) if way.startswith("jitted") else function


@pytest.mark.parametrize("way", WAYS)
def test_a_spike_changes_no_bit(way: str) -> None:
    optimizer = loss_scaled(optax.adamw(0.1), POLICY, max_norm=0.5, guard=SpikeGuard(warmup=2))
    train, params, state = trained(way, optimizer), PARAMS, optimizer.init(PARAMS)
    for value in (2.0, 2.1, 1.9, 2.0):
        _, params, state = train(params, state, value, 1.0)
    for value, norm in ((50.0, 1.0), (2.0, 50.0), (math.nan, 1.0)):
        value, kept, after = train(params, state, value, norm)
        assert not after.taken
        assert after.finite
        assert last_step(after).reason == "spike"
        assert identical((kept, after.inner_state), (params, state.inner_state))
        assert identical(after.policy_state, state.policy_state)
        params, state = kept, after
    _, moved, state = train(params, state, 2.0, 1.0)
    assert state.taken
    assert not identical(moved, params)


def test_the_state_of_a_model_comes_back_unchanged() -> None:
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, guard=NormLimit(5.0))
    train = jax.jit(step(loss_and_statistics, optimizer, has_aux=True, has_state=True))
    old, state = {"mean": jnp.float32(0.75)}, optimizer.init(PARAMS)
    (_, (new, _)), _, state = train(PARAMS, state, old, 2.0, 1.0)
    assert float(new["mean"]) == 2.375
    (_, (new, norm)), _, state = train(PARAMS, state, old, 3.0, 9.0)
    assert last_step(state).reason == "spike"
    assert float(new["mean"]) == 0.75
    assert float(norm) == 9.0


# Where JAX transforms a step


TWO = 2


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:TWO]), ("d",))


SPLIT, WHOLE = PartitionSpec("d"), PartitionSpec()


def parted(seed: int, devices: int, length: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Return a script for each device, and what they are together: mean losses, and norms as of one."""
    each = np.stack([series(seed + 10 * number, length, nans=0.0) for number in range(devices)])
    each[..., 1] = each[0, :, 1]
    mean = each.mean(0, dtype=np.float64).astype(np.float32)
    mean[:, 1] = each[0, :, 1]
    return each, mean


@pytest.mark.parametrize("way", ["shard_map", "unchecked shard_map", "without an axis_name"])
def test_devices_with_other_losses_decide_by_their_mean(way: str, mesh: Mesh) -> None:
    guard = SpikeGuard()
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, guard=guard)
    each, together = parted(1, TWO)
    if way == "without an axis_name":  # JAX has summed the gradients
        each[..., 1] /= TWO
    train = step(loss, optimizer, axis_name=() if way == "without an axis_name" else "d")

    def one(params: Any, state: Any, row: Any) -> Any:
        _, params, state = train(params, state, row[0, 0], row[0, 1])
        return params, state

    params, state = PARAMS, optimizer.init(PARAMS)
    run = jax.jit(shard_map(one, mesh, (WHOLE, WHOLE, SPLIT), (WHOLE, WHOLE), way != "unchecked shard_map"))
    why = []
    for number in range(each.shape[1]):
        params, state = run(params, state, each[:, number])
        why.append(last_step(state).reason)
    assert why == [one.reason for one in on_host(guard, together)]
    assert why.count("spike") > 2


@pytest.mark.parametrize("summed", [False, True])
def test_devices_that_average_gradients_by_hand_decide_by_their_mean_loss(summed: bool, mesh: Mesh) -> None:
    guard = SpikeGuard(warmup=3)
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, guard=guard)
    each, together = parted(1, TWO, 16)
    each[:, 9] = [[2.0, 1.0], [90.0, 1.0]]
    together[9] = [46.0, 1.0]

    def one(params: Any, state: Any, row: Any) -> Any:
        _, *found = value_and_grad(loss, axis_name=())(params, state, row[0, 0], row[0, 1])
        gradients, pending = accumulate(found, found) if summed else found
        mean = jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "d") / (1 + summed), gradients)
        pending = pending._replace(loss=jax.lax.pmean(pending.loss, "d"))
        return apply_gradients(optimizer, mean, pending, params)

    params, state = PARAMS, optimizer.init(PARAMS)
    run = jax.jit(shard_map(one, mesh, (WHOLE, WHOLE, SPLIT), (WHOLE, WHOLE), checked=False))
    why = []
    for number in range(each.shape[1]):
        params, state = run(params, state, each[:, number])
        first, second = (
            jax.tree.map(lambda leaf, i=i: leaf.addressable_shards[i].data, (params, state))
            for i in range(TWO)
        )
        assert identical(first, second)
        why.append(last_step(first[1]).reason)
    assert why == [one.reason for one in on_host(guard, together)]
    assert why[9] == "spike"


def test_averaging_the_loss_is_one_reduction_with_a_guard_and_without(mesh: Mesh) -> None:
    for guard in (None, SpikeGuard()):
        optimizer = loss_scaled(optax.sgd(0.1), POLICY, guard=guard)

        def one(params: Any, state: Any, row: Any, optimizer: Any = optimizer) -> Any:
            _, *found = value_and_grad(loss, axis_name="d")(params, state, row[0], 1.0)
            return apply_gradients(optimizer, *found, params)

        run = shard_map(one, mesh, (WHOLE, WHOLE, SPLIT), (WHOLE, WHOLE), checked=False)
        equations = traced(run, PARAMS, optimizer.init(PARAMS), jnp.ones(TWO))
        count = sum(one.primitive.name.startswith("psum") for one in equations)
        assert count == len(PARAMS) + 1


@pytest.mark.parametrize("checked", [True, False])
def test_devices_with_other_parameters_decide_by_the_mean_of_their_losses(mesh: Mesh, checked: bool) -> None:
    """The norm is that of all; with it the loss is averaged, in one reduction where JAX tracks no axes.

    There is another one for squares that do not fit.
    """
    guard = SpikeGuard(warmup=3)
    steps = {}
    for name, one in (("guarded", guard), ("plain", None)):
        optimizer = loss_scaled(optax.sgd(0.1), Dynamic(init_scale=4.0), axis_name="d", guard=one)

        def update(params: Any, state: Any, gradients: Any, value: Any, optimizer: Any = optimizer) -> Any:
            return apply_gradients(optimizer, *handed(gradients, state, value[0]), params)

        train = shard_map(update, mesh, (SPLIT, WHOLE, SPLIT, SPLIT), (SPLIT, WHOLE), checked)
        steps[name] = jax.jit(train), optimizer
    train, optimizer = steps["guarded"]
    params = jnp.ones(TWO)
    state = optimizer.init(params)
    ordinary = jnp.full(TWO, 4.0)
    for value in (2.0, 2.1, 1.9, 2.0):
        params, state = train(params, state, ordinary, jnp.array([value - 1.0, value + 1.0]))
        assert float(state.loss) == pytest.approx(value)
    kept, after = train(params, state, ordinary, jnp.array([2.0, 90.0]))
    assert identical(kept, params)
    assert last_step(after).spike.value == pytest.approx(46.0)
    moved, _ = train(params, state, ordinary, jnp.array([90.0, -86.0]))  # devices apart, the mean as ever
    assert not identical(moved, params)
    kept, after = train(params, state, ordinary.at[1].set(90.0), jnp.array([2.0, 2.0]))
    assert identical(kept, params)
    assert last_step(after).spike.of == "grad_norm"
    counts = {
        name: sum(one.primitive.name.startswith(("psum", "pmean", "all_reduce")) for one in equations)
        for name, equations in (
            (name, traced(run, params, optimizer.init(params), ordinary, ordinary))
            for name, (run, optimizer) in steps.items()
        )
    }
    assert counts["guarded"] == counts["plain"]
    assert checked or counts["guarded"] == 2


def test_a_guard_works_with_numbers_of_64_bits() -> None:
    with enable_x64(True):
        guard = SpikeGuard()
        optimizer = loss_scaled(optax.sgd(0.1), POLICY, guard=guard)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), PARAMS)
        script = series(3, 100).astype(np.float64)
        one = step(lambda p, value, norm: jnp.sum(p["w"] * DIRECTION) * norm * 0.0 + value, optimizer)
        state = optimizer.init(params)
        assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(state.guard.state)} == {4}
        _, _, after = jax.jit(one)(params, state, script[0, 0], script[0, 1])
        assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [
            leaf.dtype for leaf in jax.tree.leaves(state)
        ]


def test_a_state_keeps_its_types() -> None:
    """Or a `scan` would not take it, and each step would be compiled again."""
    with jax.numpy_dtype_promotion("strict"):
        for guard in GUARDS:
            optimizer = loss_scaled(optax.sgd(0.1), POLICY, guard=guard)
            state = optimizer.init(PARAMS)
            train = jax.eval_shape(step(loss, optimizer), PARAMS, state, jnp.float32(1.0), jnp.float32(1.0))
            kinds = [
                [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]
                for tree in (jax.eval_shape(lambda state=state: state), train[2])
            ]
            assert kinds[0] == kinds[1]


def test_an_eager_state_may_be_donated() -> None:
    for guard in (SpikeGuard(), NormLimit(5.0), guards.OLMO):
        optimizer = loss_scaled(optax.sgd(0.1), POLICY, guard=guard)
        donating = jax.jit(step(loss, optimizer), donate_argnums=(0, 1))
        for state in (
            optimizer.init(PARAMS),
            step(loss, optimizer)(PARAMS, optimizer.init(PARAMS), 2.0, 1.0)[2],
        ):
            pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
            assert len(set(pointers)) == len(pointers)
            donating(jax.tree.map(jnp.copy, PARAMS), state, 2.0, 1.0)


# States: in files, in other programs, of other guards


def grown(guard: Guard[Any], optimizer: Any) -> Any:
    (_, state), _ = jax.jit(scanned(optimizer))(PARAMS, optimizer.init(PARAMS), series(2, 90))
    return state


def test_a_state_comes_back_from_a_file(tmp_path: Path) -> None:
    guard = guards.OLMO(rolling_interval_length=24)
    optimizer = loss_scaled(optax.adam(0.1), POLICY, guard=guard)
    state, fresh = grown(guard, optimizer), optimizer.init(PARAMS)
    by_flax = in_flax(state, fresh, tmp_path)
    by_pickle = pickle.loads(pickle.dumps(state))
    by_orbax = in_orbax(state, fresh, tmp_path)
    train = jax.jit(step(loss, optimizer))
    expected = train(PARAMS, state, 90.0, 1.0)
    for restored in (by_flax, by_pickle, by_orbax):
        assert identical(restored, state)
        check_exhausted(restored, POLICY)
        assert repr(last_step(restored)) == repr(last_step(state))
        assert identical(train(PARAMS, restored, 90.0, 1.0), expected)


def test_a_step_is_exported() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export needs it to serialize")
    inner = optax.GradientTransformation(
        lambda params: (),
        lambda updates, state, params=None: (jax.tree.map(lambda g: -0.1 * g, updates), state),
    )
    optimizer = loss_scaled(inner, POLICY, guard=guards.OLMO(rolling_interval_length=24))
    train, args = jax.jit(step(loss, optimizer)), (PARAMS, optimizer.init(PARAMS), jnp.ones(()), jnp.ones(()))
    saved = export.export(train)(*args).serialize()
    assert identical(export.deserialize(saved).call(*args), train(*args))


def test_a_guard_is_put_on_and_taken_off() -> None:
    inner, guard = optax.adam(0.1), SpikeGuard(warmup=2)
    plain, guarded = loss_scaled(inner, POLICY), loss_scaled(inner, POLICY, guard=guard)
    state = plain.init(PARAMS)
    _, params, state = step(loss, plain)(PARAMS, state, 2.0, 1.0)
    assert state.guard is None
    with pytest.raises(
        UsageError, match=r"has no state of guards\.SpikeGuard.*restart_guard\(opt_state, guard\)"
    ):
        step(loss, guarded)(params, state, 2.0, 1.0)
    put_on = restart_guard(state, guard)
    assert identical(put_on._replace(guard=None), state)
    assert jax.tree.structure(put_on) == jax.tree.structure(guarded.init(PARAMS))
    for value in (2.0, 2.1, 1.9):
        _, params, put_on = step(loss, guarded)(params, put_on, value, 1.0)
    assert not step(loss, guarded)(params, put_on, 90.0, 1.0)[2].taken
    with pytest.raises(UsageError, match=r"the optimizer has none.*restart_guard\(opt_state, None\)"):
        step(loss, plain)(params, put_on, 2.0, 1.0)
    _, _, taken_off = step(loss, plain)(params, restart_guard(put_on, None), 90.0, 1.0)
    assert taken_off.taken
    # Another policy keeps the guard, as the inner optimizer's state.
    resumed = restart_loss_scale(put_on, Headroom())
    assert identical(resumed.guard, put_on.guard)
    assert not step(loss, loss_scaled(inner, Headroom(), guard=guard))(params, resumed, 90.0, 1.0)[2].taken


def in_orbax(state: Any, template: Any, path: Path) -> Any:
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        args = orbax.checkpoint.checkpoint_utils.construct_restore_args(template)
        return checkpointer.restore(path / "state", template, restore_args=args)


def in_flax(state: Any, template: Any, path: Path) -> Any:
    return serialization.from_bytes(template, serialization.to_bytes(state))


FILES = {"pickle": lambda state, template, path: state, "orbax": in_orbax, "flax": in_flax}


@pytest.mark.parametrize(
    ("file", "guard"),
    [
        ("pickle", SpikeGuard()),
        ("orbax", guards.LEVANTER(rolling_interval_length=16)),
        ("flax", SpikeGuard()),
    ],
)
def test_a_file_with_a_guard_does_not_continue_without_or_the_other_way_round(
    file: str, guard: Guard[Any], tmp_path: Path
) -> None:
    """The library that restores may raise itself; otherwise the next step does, and says what to write."""
    inner = optax.adam(0.1)
    plain, guarded = loss_scaled(inner, POLICY), loss_scaled(inner, POLICY, guard=guard)
    for saving, restoring, to in ((guarded, plain, None), (plain, guarded, guard)):
        _, params, state = step(loss, saving)(PARAMS, saving.init(PARAMS), 2.0, 1.0)
        try:
            restored = FILES[file](state, restoring.init(PARAMS), tmp_path / str(to is None))
        except (ValueError, AttributeError):
            assert file != "pickle"
            restored = FILES[file](state, saving.init(PARAMS), tmp_path / f"again {to is None}")
        for run in (step(loss, restoring), jax.jit(step(loss, restoring))):
            with pytest.raises(UsageError, match=r"guard.*restart_guard\(opt_state, (None|guard)\)"):
                run(params, restored, 2.0, 1.0)
        restarted = restart_guard(restored, to)
        assert identical(restarted._replace(guard=None), state._replace(guard=None))
        _, _, after = jax.jit(step(loss, restoring))(params, restarted, 2.0, 1.0)
        assert last_step(after).index == 1
        assert (after.guard is None) is (to is None)


def test_a_guard_that_a_file_left_as_a_dict_is_named() -> None:
    guarded = loss_scaled(optax.adam(0.1), POLICY, guard=SpikeGuard())
    plain = loss_scaled(optax.adam(0.1), POLICY).init(PARAMS)
    restored = in_flax(guarded.init(PARAMS), plain, Path())
    for read in (last_step, lambda state: check_exhausted(state, POLICY)):
        with pytest.raises(UsageError, match=r"opt_state\.guard is a dict.*restart_guard\(opt_state, None\)"):
            read(restored)
    assert identical(restart_guard(restored, None), plain)


@pytest.mark.parametrize(
    ("guard", "other"),
    [
        (SpikeGuard(), NormLimit(5.0)),
        (NormLimit(5.0), LossLimit(30.0)),
        (None, guards.OLMO),
        (guards.OLMO, None),
    ],
)
def test_the_last_step_stays_readable_after_each_change_of_guard(guard: Any, other: Any) -> None:
    inner = optax.adam(0.1)
    before, after = (loss_scaled(inner, POLICY, guard=one) for one in (guard, other))
    _, params, state = step(loss, before)(PARAMS, before.init(PARAMS), 2.0, 1.0)
    changed = restart_guard(state, other)
    assert jax.tree.structure(changed) == jax.tree.structure(after.init(PARAMS))
    assert last_step(changed) == last_step(state)
    _, _, state = step(loss, after)(params, changed, 2.0, 1.0)
    assert (last_step(state).index, last_step(state).loss, last_step(state).skipped) == (1, 2.0, False)


@pytest.mark.parametrize("other", [NormLimit(5.0), guards.OLMO(rolling_interval_length=24)], ids=repr)
def test_the_state_of_another_guard_is_refused(other: Guard[Any]) -> None:
    for guard in (SpikeGuard(), guards.OLMO):
        state = loss_scaled(optax.sgd(0.1), POLICY, guard=guard).init(PARAMS)
        train = step(loss, loss_scaled(optax.sgd(0.1), POLICY, guard=other))
        for run in (train, jax.jit(train)):
            with pytest.raises(
                UsageError, match=r"is not that of guards\..*restart_guard\(opt_state, guard\)"
            ):
                run(PARAMS, state, 2.0, 1.0)


def test_a_state_that_was_cast_or_lost_a_leaf_is_named() -> None:
    optimizer = loss_scaled(optax.sgd(0.1), POLICY, guard=SpikeGuard())
    state = optimizer.init(PARAMS)
    held: Any = state.guard.state
    cast = held._replace(loss=held.loss._replace(level=held.loss.level.astype(jnp.float16)))
    wrong = [
        (state.guard._replace(limit=jnp.int32(1)), r"opt_state\.guard\.limit has dtype int32"),
        (state.guard._replace(taken=None), r"opt_state\.guard\.taken is None"),
        (state.guard._replace(state=cast), r"opt_state\.guard\.state\.loss\.level has dtype float16"),
        (state.guard._replace(state=held._replace(run=None)), r"opt_state\.guard\.state\.run is None"),
    ]
    for record, message in wrong:
        with pytest.raises(UsageError, match=message):
            step(loss, optimizer)(PARAMS, state._replace(guard=record), 2.0, 1.0)
        with pytest.raises(UsageError, match=message):
            check_exhausted(state._replace(guard=record), POLICY)


@pytest.mark.parametrize("guard", ["OLMO", SpikeGuard])
def test_what_is_not_a_guard_is_refused(guard: Any) -> None:
    with pytest.raises(PolicyError, match=r"is not a guard. Write guard=SpikeGuard\(\)"):
        loss_scaled(optax.sgd(0.1), guard=guard)


# With what is inside of loss_scaled, and around it


def test_several_steps_to_one_update_leave_spikes_out() -> None:
    """The mean is over steps that were taken."""
    inner = optax.MultiSteps(optax.sgd(1.0), 2)
    optimizer = loss_scaled(inner, Static(4.0), guard=NormLimit(5.0))
    train, params, state = jax.jit(step(loss, optimizer)), PARAMS, optimizer.init(PARAMS)
    for norm in (1.0, 50.0, 3.0):
        _, params, state = train(params, state, 2.0, norm)
    assert np.allclose(params["w"], PARAMS["w"] - 2.0 * DIRECTION)
    assert int(state.inner_state.gradient_step) == 1
    assert int(state.skipped_steps) == 1


def test_a_guard_alone_guards_a_training_without_scaling() -> None:
    optimizer = loss_scaled(optax.sgd(0.1), Static(1.0), guard=SpikeGuard())
    (_, state), (_, states) = jax.jit(scanned(optimizer))(PARAMS, optimizer.init(PARAMS), series(5))
    assert set(np.asarray(states.last_scale)) == {1.0}
    trace = on_host(SpikeGuard(), series(5), Static(1.0))
    assert reasons(states) == [one.reason for one in trace]
    assert int(state.skipped_steps) == trace.summary().skipped > 5
