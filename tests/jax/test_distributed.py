"""Eight devices, or two processes: what overflows on one is skipped by all, and they train as one would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import preamp
from preamp import Dynamic
from preamp.jax import apply_gradients, last_step, loss_scaled, step, value_and_grad

from .trainings import SCRIPT, batches, handed, identical, loss, off_by, parameters, shard_map

WORKER = Path(__file__).with_name("distributed_worker.py")
POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
OPTIMIZER = loss_scaled(optax.adamw(0.05), POLICY, max_norm=1.0)
BATCHES = [x for x, _ in batches()]
DEVICES = 8
SPLIT, WHOLE = PartitionSpec("d"), PartitionSpec()


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:DEVICES]), ("d",))


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], Any, Any]:
    """Return what one device comes to."""
    return walk(jax.jit(step(loss, OPTIMIZER)))


def walk(
    train: Callable[..., Any], start: Callable[[Any], Any] = lambda tree: tree, *, optimizer: Any = OPTIMIZER
) -> tuple[list[float], Any, Any]:
    """Return the norms seen, the parameters and the state.

    Args:
        train: a step.
        start: puts parameters and state where they belong.
        optimizer: of the step.
    """
    params = parameters()
    params, state = start((params, optimizer.init(params)))
    norms = []
    for x in BATCHES:
        _, params, state = train(params, state, x)
        norms.append(float(np.ravel(state.grad_norm)[0]))
        if state.steps.shape == ():
            last_step(state)  # warnings are errors here: there are none, whatever the placement
    return norms, params, state


def assert_trained_as(seen: tuple[list[float], Any, Any], alone: tuple[list[float], Any, Any]) -> None:
    assert seen[0] == pytest.approx(alone[0], rel=1e-5, nan_ok=True)
    assert ["0" if np.isfinite(norm) else "1" for norm in seen[0]] == list(SCRIPT)
    assert off_by(seen[1], alone[1]) < 1e-5
    assert identical(seen[2].policy_state, alone[2].policy_state)
    assert off_by(seen[2].inner_state, alone[2].inner_state) < 1e-5


def test_data_parallel_in_jit_needs_nothing(mesh: Mesh, alone: Any) -> None:
    placed = (NamedSharding(mesh, WHOLE), NamedSharding(mesh, WHOLE), NamedSharding(mesh, SPLIT))
    seen = walk(jax.jit(step(loss, OPTIMIZER), in_shardings=placed))
    assert_trained_as(seen, alone)


def test_fully_sharded_parameters_in_jit_need_nothing(mesh: Mesh, alone: Any) -> None:
    four = Mesh(mesh.devices[:4], ("d",))
    examples, columns = (NamedSharding(four, spec) for spec in (SPLIT, PartitionSpec(None, "d")))

    def start(trees: Any) -> Any:
        params = {"b": jax.device_put(trees[0]["b"], examples), "w": jax.device_put(trees[0]["w"], columns)}
        return params, jax.jit(OPTIMIZER.init)(params)

    train = jax.jit(step(loss, OPTIMIZER))
    seen = walk(lambda params, state, x: train(params, state, jax.device_put(x, examples)), start)
    assert seen[1]["w"].sharding.is_equivalent_to(columns, 2)
    assert_trained_as(seen, alone)


@pytest.mark.parametrize("checked", [True, False])
def test_shard_map_averages_over_its_axis(mesh: Mesh, alone: Any, checked: bool) -> None:
    train = step(loss, OPTIMIZER, axis_name="d")
    seen = walk(jax.jit(shard_map(train, mesh, (WHOLE, WHOLE, SPLIT), WHOLE, checked)))
    assert_trained_as(seen, alone)


@pytest.mark.parametrize("axis_name", [None, "d"])
def test_shard_map_with_a_loss_that_is_averaged_already(mesh: Mesh, alone: Any, axis_name: Any) -> None:
    def mean(params: Any, x: Any) -> Any:
        return jax.lax.pmean(loss(params, x), "d")

    train = step(mean, OPTIMIZER, axis_name=axis_name)
    seen = walk(jax.jit(shard_map(train, mesh, (WHOLE, WHOLE, SPLIT), WHOLE, True)))
    assert_trained_as(seen, alone)


def test_pmap_averages_over_its_axis_and_keeps_replicas_equal(alone: Any) -> None:
    train = jax.pmap(step(loss, OPTIMIZER, axis_name="d"), axis_name="d")

    def start(trees: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), trees)

    norms, *trees = walk(lambda params, state, x: train(params, state, x.reshape(DEVICES, 1, -1)), start)
    replicas = [jax.tree.map(lambda leaf, i=i: leaf[i], trees) for i in range(DEVICES)]
    assert all(identical(replica, replicas[0]) for replica in replicas)
    assert_trained_as((norms, *replicas[0]), alone)


SHARDED = loss_scaled(optax.adamw(0.05), POLICY, max_norm=1.0, axis_name="d")


def test_shards_of_parameters_are_clipped_by_the_norm_of_all(mesh: Mesh, alone: Any) -> None:
    """Each device has a column of the weight, and all have the bias: known to be equal, it counts once."""
    placement = {"w": PartitionSpec(None, "d"), "b": WHOLE}

    def columns(params: Any, x: Any) -> Any:
        """Return the loss, of which each device has a part; a device without examples of its own."""
        offset = jax.lax.axis_index("d") % 4
        bias = jax.lax.dynamic_slice(params["b"], (offset,), (1,))
        part = jnp.sum(jnp.square(x @ params["w"] + bias - 1.0))
        return jax.lax.psum(part, "d") / (4 * x.shape[0])

    four = Mesh(mesh.devices[:4], ("d",))
    params = parameters()
    state = SHARDED.init(params)
    placed = jax.tree.map(lambda leaf: PartitionSpec(None, "d") if leaf.ndim == 2 else WHOLE, state)
    train = shard_map(
        step(columns, SHARDED), four, (placement, placed, WHOLE), (WHOLE, placement, placed), True
    )
    assert_trained_as(walk(jax.jit(train), optimizer=SHARDED), alone)


def test_unchecked_shards_agree_as_well(mesh: Mesh) -> None:
    """Gradients differ from device to device, and one of them overflows."""
    optimizer = loss_scaled(optax.sgd(1.0), Dynamic(init_scale=4.0), max_norm=1.0, axis_name="d")

    def update(params: Any, state: Any, scaled: Any) -> Any:
        return apply_gradients(optimizer, *handed(scaled, state), params)

    train = jax.jit(shard_map(update, mesh, (SPLIT, WHOLE, SPLIT), (SPLIT, WHOLE), False))
    params = jnp.ones(DEVICES)
    state = optimizer.init(params)
    after, state = train(params, state, jnp.full(DEVICES, 4.0))
    assert np.allclose(after, 1.0 - 8**-0.5)
    assert float(state.grad_norm) == pytest.approx(8**0.5)
    kept, state = train(after, state, jnp.full(DEVICES, 4.0).at[5].set(jnp.nan))
    assert identical(kept, after)
    assert float(state.policy_state.scale) == 2.0


@pytest.mark.parametrize("checked", [True, False])
def test_value_and_grad_measures_what_all_devices_have(mesh: Mesh, checked: bool) -> None:
    params, x = parameters(), BATCHES[0]
    state, differentiate = OPTIMIZER.init(params), value_and_grad(loss, axis_name="d")
    mapped = jax.jit(shard_map(differentiate, mesh, (WHOLE, WHOLE, SPLIT), WHOLE, checked))
    value, gradients, pending = mapped(params, state, x)
    expected, plain = jax.value_and_grad(loss)(params, x)
    assert off_by((value, gradients), (expected, plain)) < 1e-6
    assert pending.finite
    x = x.copy()
    x[6, 0] = np.inf
    assert not mapped(params, state, x)[2].finite


def test_float16_gradients_are_averaged_in_float32(mesh: Mesh) -> None:
    """The sum over eight devices would overflow."""

    def large(w: Any, x: Any) -> Any:
        return jnp.sum(w * x)

    differentiate = value_and_grad(large, axis_name="d")
    mapped = jax.jit(shard_map(differentiate, mesh, (WHOLE, WHOLE, SPLIT), WHOLE, False))
    w, x = jnp.ones((), jnp.float16), jnp.full(DEVICES, 6e4, jnp.float16)
    state = loss_scaled(optax.sgd(1.0), Dynamic(init_scale=1.0)).init(w)
    value, gradient, _ = mapped(w, state, x)
    assert float(value) == float(gradient) == float(jnp.float16(6e4))
    sums = [line for line in str(jax.make_jaxpr(mapped)(w, state, x)).splitlines() if "psum" in line]
    assert sums
    assert not any("f16" in line.split("=")[0] for line in sums)


def test_gradients_of_what_each_device_has_for_itself_are_averaged_too(mesh: Mesh) -> None:
    """In a checked `shard_map` parameters that vary have gradients that nobody has summed yet."""

    def differentiate(params: Any, state: Any, x: Any) -> Any:
        none = 0.0 * jax.lax.axis_index("d").astype(jnp.float32)
        varying = jax.tree.map(lambda leaf: leaf + none, params)
        return value_and_grad(loss, axis_name="d")(varying, state, x)[:2]

    mapped = jax.jit(shard_map(differentiate, mesh, (WHOLE, WHOLE, SPLIT), WHOLE))
    params, x = parameters(), BATCHES[0]
    found = mapped(params, OPTIMIZER.init(params), x)
    assert off_by(found, jax.value_and_grad(loss)(params, x)) < 1e-6


def test_a_loss_that_is_not_averaged_has_the_summed_gradients_that_shard_map_gives(mesh: Mesh) -> None:
    def differentiate(params: Any, state: Any, x: Any) -> Any:
        return value_and_grad(loss, axis_name=())(params, state, x)[1]

    mapped = jax.jit(shard_map(differentiate, mesh, (WHOLE, WHOLE, SPLIT), WHOLE))
    params, x = parameters(), BATCHES[0]
    summed = jax.tree.map(lambda leaf: leaf * DEVICES, jax.grad(loss)(params, x))
    assert off_by(mapped(params, OPTIMIZER.init(params), x), summed) < 1e-6


# Devices that average nothing: JAX reports no error, so this library warns.

AVERAGES_NOTHING = r"averages no gradients.* Write step\(loss_fn, optimizer, axis_name='d'\)"
APART = r"different values of opt_state.grad_norm.* axis_name="


def alone_in(step_of: Callable[[Any, Any, Any], Any], mesh: Mesh, checked: bool = False) -> Any:
    """Return a step of `shard_map` that declares equal on all devices what need not be."""
    return jax.jit(shard_map(step_of, mesh, (WHOLE, WHOLE, SPLIT), (WHOLE, WHOLE), checked))


def whole(optimizer: Any = OPTIMIZER, **settings: Any) -> Callable[[Any, Any, Any], Any]:
    def train(params: Any, state: Any, x: Any) -> Any:
        return step(loss, optimizer, **settings)(params, state, x)[1:]

    return train


def test_devices_that_average_nothing_are_warned_of(mesh: Mesh) -> None:
    params = parameters()
    state = OPTIMIZER.init(params)
    with pytest.warns(UserWarning, match=AVERAGES_NOTHING):
        _, state = alone_in(whole(), mesh)(params, state, BATCHES[0])
    with pytest.warns(UserWarning, match=APART):
        last_step(state)
    norms = {float(shard.data) for shard in state.grad_norm.addressable_shards}
    assert len(norms) == DEVICES


@pytest.mark.parametrize("by", ["axis_name", "hand"])
def test_gradients_that_were_averaged_are_not_warned_of(mesh: Mesh, by: str) -> None:
    def train(params: Any, state: Any, x: Any) -> Any:
        averages = value_and_grad(loss, axis_name="d" if by == "axis_name" else ())
        _, gradients, pending = averages(params, state, x)
        mean = jax.lax.pmean(gradients, "d") if by == "hand" else gradients
        return apply_gradients(OPTIMIZER, mean, pending, params)

    params = parameters()
    params, state = alone_in(train, mesh)(params, OPTIMIZER.init(params), BATCHES[0])
    last_step(state)


def test_axis_name_of_nothing_says_that_each_device_trains_alone(mesh: Mesh) -> None:
    def train(params: Any, state: Any, x: Any) -> Any:
        params, state = whole(axis_name=())(*jax.tree.map(lambda leaf: leaf[0], (params, state)), x)
        return jax.tree.map(lambda leaf: leaf[None], (params, state))

    params = parameters()
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), (params, OPTIMIZER.init(params)))
    run = jax.jit(shard_map(train, mesh, (SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT), False))
    _, state = run(*several, BATCHES[0])
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(DEVICES)]
    norms = [last_step(one).grad_norm for one in each]
    assert norms == pytest.approx([alone_norm(x) for x in BATCHES[0]], rel=1e-5)


def alone_norm(example: np.ndarray) -> float:
    return float(optax.tree.norm(jax.grad(loss)(parameters(), example[None])))


def test_a_pmap_that_averages_nothing_is_warned_of() -> None:
    params = parameters()
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), (params, OPTIMIZER.init(params)))
    train = jax.pmap(whole())
    if jax.__version_info__ >= (0, 8):
        with pytest.warns(UserWarning, match=r'axis_name=\'data\'\) and jax.pmap\(..., axis_name="data"\)'):
            _, state = train(*several, BATCHES[0].reshape(DEVICES, 1, -1))
    else:
        _, state = train(*several, BATCHES[0].reshape(DEVICES, 1, -1))
    with pytest.raises(preamp.UsageError, match=r"Write jax.tree.map.* for the first of them.*axis_name="):
        last_step(state)


def test_gradients_that_shard_map_has_summed_are_warned_of(mesh: Mesh) -> None:
    params = parameters()
    state = OPTIMIZER.init(params)
    with pytest.warns(UserWarning, match=r"n times those of the mean loss.* axis_name='d'\) for the mean"):
        alone_in(whole(), mesh, checked=True)(params, state, BATCHES[0])
    alone_in(whole(axis_name=()), mesh, checked=True)(params, state, BATCHES[0])


def test_one_device_of_a_mesh_is_not_several() -> None:
    params, one = parameters(), Mesh(np.array(jax.devices("cpu")[:1]), ("d",))
    for checked in (True, False):
        _, state = alone_in(whole(), one, checked)(params, OPTIMIZER.init(params), BATCHES[0])
        last_step(state)


def test_two_processes_skip_together(tmp_path: Path, alone: Any) -> None:
    """Each has one half of the examples; what overflows is in one half only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    root = str(Path(preamp.__file__).parents[1])
    variables = {"PYTHONPATH": os.pathsep.join([root, str(WORKER.parent)]), "OMP_NUM_THREADS": "1"}
    files = [tmp_path / f"{rank}.json" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), address, str(file)],
            env={**os.environ, **variables},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second
    for way in ("jit", "shard_map"):
        assert "".join("01"[skipped] for skipped in first[way]["skipped"]) == SCRIPT
        assert first[way]["scale"] == float(alone[2].policy_state.scale)
        assert np.allclose(first[way]["weights"], alone[1]["w"], rtol=1e-5)
