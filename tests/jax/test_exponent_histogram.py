"""Exponents counted inside jitted functions, against `math.frexp` and PyTorch's count; looks made of them."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from preamp import ExponentHistogram, Trace, UsageError
from preamp.jax import (
    accumulate,
    apply_gradients,
    exponent_histogram,
    flow_slot,
    last_step,
    loss_scaled,
    snapshot,
    step,
    value_and_grad,
    watch,
    zero_grads,
)
from preamp.policy import Headroom, Policy, Static
from tests.seeing import counted

from .trainings import enable_x64, shard_map

jitted = jax.jit(exponent_histogram)


def seen(array: Any) -> ExponentHistogram:
    return ExponentHistogram.of_fields(np.asarray(jitted(array)).tolist())


# Counting


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2], ids=str)
def test_every_value_of_a_short_dtype_is_counted_where_it_belongs(dtype: Any) -> None:
    bits = np.arange(2 ** (8 * np.dtype(dtype).itemsize))
    every = bits.astype(f"uint{8 * np.dtype(dtype).itemsize}").view(dtype)
    assert seen(jnp.asarray(every)) == counted(every)


def test_wide_dtypes_are_counted_as_float32_holds_them() -> None:
    draw = np.random.default_rng(0)
    single = draw.integers(0, 2**32, 4000, np.uint32).view(np.float32)
    wide = draw.integers(0, 2**64, 4000, np.uint64).view(np.float64)
    wide[:50] = 2.0 ** draw.integers(-200, 200, 50) * 0.999999999999  # which rounding would lift
    assert seen(jnp.asarray(single)) == counted(single)
    assert seen(jnp.asarray(single[: 2 * 1000].view(np.complex64))) == counted(single[:2000])
    with enable_x64(True):
        assert seen(jnp.asarray(wide)) == counted(wide)
        assert seen(jnp.asarray(wide[:2000].view(np.complex128))) == counted(wide[:2000])


def test_a_tree_keeps_its_structure_and_what_is_not_floating_becomes_none() -> None:
    tree = {"w": jnp.ones((2, 3)), "n": jnp.arange(3), "deep": [jnp.zeros(4, jnp.bfloat16), 2.0, True]}
    counts = jitted(tree)
    assert counts["n"] is None
    assert counts["deep"][2] is None
    assert {leaf.shape for leaf in jax.tree.leaves(counts)} == {(256,)}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(counts)} == {"int32"}
    assert (int(counts["w"][127]), int(counts["deep"][0][0]), int(counts["deep"][1][128])) == (6, 4, 1)
    assert seen(jnp.zeros((0, 3))).total == 0


def test_a_leaf_is_read_by_one_fusion_and_one_scatter() -> None:
    # As XLA is by default. `make test` turns it off, and newer releases do not know the option.
    options = {"xla_cpu_use_fusion_emitters": True} if "emitters" in os.environ.get("XLA_FLAGS", "") else {}
    program = jitted.lower(jnp.ones((64, 64), jnp.bfloat16)).compile(options).as_text()
    entry = program[program.index("ENTRY ") :]
    leaf = next(line.split()[0] for line in entry.splitlines() if "parameter(0)" in line)
    readers = [line for line in entry.splitlines() if f"{leaf})" in line or f"{leaf}," in line]
    assert len(readers) == 1
    assert " fusion(" in readers[0]
    assert program.count(" scatter(") == 1


@pytest.mark.parametrize("checked", [True, False])
def test_counts_of_devices_add_up(checked: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    x = jnp.linspace(-3.0, 40.0, 64).at[3].set(jnp.nan)

    def whole(part: Any) -> Any:
        return lax.psum(exponent_histogram(part), "d")

    mapped = jax.jit(shard_map(whole, mesh, PartitionSpec("d"), PartitionSpec(), checked))
    assert np.array_equal(mapped(x), jitted(x))
    by_pmap = jax.vmap(whole, axis_name="d")(x.reshape(4, 16))
    assert np.array_equal(by_pmap[0], jitted(x))


# Looks


def test_a_look_has_a_row_for_each_leaf() -> None:
    gradients = {
        "layers": [{"w": jnp.full((2, 2), 2.0**-20, jnp.bfloat16)}],
        "bias": jnp.array([jnp.inf, 3.0]),
    }
    one = snapshot(
        jitted(gradients), index=np.int64(4), scale=jnp.float32(8.0), low_dtype="bfloat16", like=gradients
    )
    assert (one.index, one.scale, one.low_dtype) == (4, 8.0, "bfloat16")
    assert [(row.name, row.what, row.dtype) for row in one.rows] == [
        ("bias", "gradient", "float32"),
        ("layers.0.w", "gradient", "bfloat16"),
    ]
    assert [row.histogram for row in one.rows] == [
        ExponentHistogram(1, (1,), nonfinite=1),
        ExponentHistogram(-20, (4,)),
    ]
    assert one.first_overflow == one.rows[0]
    trace = Trace()
    trace.add_snapshot(one)
    assert {row.dtype for row in snapshot(jitted(gradients), index=0).rows} == {"float32"}


@pytest.mark.parametrize(
    ("histograms", "options", "why"),
    [
        (
            {"w": jnp.ones((2, 2))},
            {},
            r"shape \(2, 2\) is not a histogram\. Write snapshot\(exp",
        ),
        ({"w": jnp.zeros(256).at[130].set(0.5)}, {}, r"counts of w are not whole numbers.* Write snapshot\("),
        ({"w": jnp.zeros(256).at[130].set(-1.0)}, {}, "counts of w are not whole numbers"),
        ({"w": jnp.zeros(256).at[130].set(jnp.nan)}, {}, "counts of w are not whole numbers"),
        ({"w": flow_slot()}, {"index": -1}, r"index=-1 is not the number of a step\. Write index=0"),
        ({"w": flow_slot()}, {"index": 0.5}, r"index=0\.5 is not the number of a step"),
        ({"w": flow_slot()}, {"scale": 0.0}, r"scale=0\.0 is not a finite number above 0\. Write scale=1"),
        ({"w": flow_slot()}, {"scale": float("nan")}, "scale=nan is not a finite number above 0"),
        ({"w": flow_slot()}, {"like": [1.0, 2.0]}, "like= has 2 floating leaves, but there are 1"),
    ],
)
def test_what_is_no_tree_of_histograms_is_refused(histograms: Any, options: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        snapshot(histograms, **{"index": 0, **options})


@pytest.mark.parametrize("what", ["activation", "flow", "gradient", "input", "weight"])
def test_a_look_prints_and_is_recorded_whatever_was_counted(what: Any) -> None:
    tree = {"params": {"Dense_0": {"kernel": jnp.array([2.0**-17, 0.75, 0.0, jnp.inf])}}}
    one = snapshot(exponent_histogram(tree), index=3, scale=2.0**16, what=what, like=tree)
    labels = {"activation": "output", "flow": "output grad", "gradient": "weight grad"}
    direction = "backward pass, scaled" if what in ("flow", "gradient") else "forward pass"
    assert str(one).splitlines()[-3:] == [
        f"{direction:<30}       min       max  zero %  inf, NaN",
        "  params.Dense_0.kernel",
        f"    {labels.get(what, what):<13}float32           2^-17      2^-1    25.0  1 inf or NaN",
    ]
    trace = Trace()
    trace.add_snapshot(one)
    assert trace.snapshots == [one]


# Flows


def network(parameters: Any, slots: Any, x: Any) -> Any:
    hidden = watch(jnp.tanh(x @ parameters["w"]), slots["hidden"])
    return jnp.sum(watch(hidden.astype(jnp.float16) * 3.0, slots["out"]).astype(jnp.float32))


def state_of(policy: Policy[Any]) -> Any:
    return loss_scaled(optax.sgd(0.1), policy).init(None)


def test_flows_are_counted_in_the_backward_pass_of_the_gradients() -> None:
    parameters, x = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)}, jnp.ones((4, 3))
    slots = {"hidden": flow_slot(), "out": flow_slot()}
    plain = jax.grad(network)(parameters, slots, x)
    differentiate = jax.jit(value_and_grad(network, argnums=(0, 1)))
    _, (gradients, flows), _ = differentiate(parameters, state_of(Static(2.0**6)), slots, x)
    assert np.array_equal(gradients["w"], plain["w"])
    one = snapshot(flows, index=2, scale=2.0**6, what="flow")
    assert [(row.name, row.what, row.histogram) for row in one.rows] == [
        ("hidden", "flow", ExponentHistogram(7, (8,))),  # 64 * 3
        ("out", "flow", ExponentHistogram(6, (8,))),
    ]


def test_a_slot_that_is_used_often_adds_up_and_flows_under_transforms_too() -> None:
    def repeated(slot: Any, x: Any) -> Any:
        return lax.scan(lambda carry, _: (watch(carry * 2.0, slot), None), x, length=5)[0].sum()

    flows = jax.jit(jax.grad(repeated))(flow_slot(), jnp.ones(3))
    assert ExponentHistogram.of_fields(flows.counts.astype(int).tolist()) == ExponentHistogram(0, (3,) * 5)
    batched = jax.grad(lambda slot: jax.vmap(partial(repeated, slot))(jnp.ones((7, 3))).sum())(flow_slot())
    assert np.array_equal(batched.counts, 7 * flows.counts)
    saved = jax.grad(jax.checkpoint(repeated))(flow_slot(), jnp.ones(3))
    assert np.array_equal(saved.counts, flows.counts)


WEIGHTS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)}
INPUT = jnp.ones((4, 3))


def watched(parameters: Any, slots: Any, x: Any) -> Any:
    return jnp.sum(watch(jnp.tanh(x @ parameters["w"]), slots["h"]) * 3.0)


def flow(flows: Any) -> ExponentHistogram:
    (row,) = snapshot(flows, index=0, scale=2.0**6, what="flow").rows
    assert row.name == "h"
    return row.histogram


@pytest.mark.parametrize("scale", [2.0**6, 2.0**-3])
def test_counts_are_not_unscaled(scale: float) -> None:
    state, differentiate = state_of(Static(scale)), value_and_grad(watched, argnums=(0, 1))
    slots = {"h": flow_slot()}
    for run in (differentiate, jax.jit(differentiate)):
        _, *found = run(WEIGHTS, state, slots, INPUT)
        assert flow(found[0][1]) == ExponentHistogram(1 + int(np.log2(scale)), (8,))  # 3 * scale
    total = accumulate(accumulate(zero_grads((WEIGHTS, slots), state), found), found)
    assert flow(total[0][1]).total == 16
    assert exponent_histogram(total[0])[1] == {"h": None}


def test_counts_are_no_part_of_the_norm_the_peak_or_the_step() -> None:
    policy = Headroom(init_scale=1.0)
    x = jnp.ones((4000, 3)) * 2.0**-20
    slots = {"h": flow_slot()}
    optimizer = loss_scaled(optax.sgd(0.1), policy, max_norm=1.0)
    state = optimizer.init(WEIGHTS)
    plain = value_and_grad(watched)(WEIGHTS, state, slots, x)[2]
    _, (gradients, _), both = value_and_grad(watched, argnums=(0, 1))(WEIGHTS, state, slots, x)
    assert both.amax == plain.amax < 1.0
    ours = last_step(apply_gradients(optimizer, gradients, both, WEIGHTS)[1])
    one = last_step(step(lambda p: watched(p, slots, x), optimizer)(WEIGHTS, state)[2])
    assert ours == one
    with pytest.raises(UsageError, match=r"params hold a flow_slot\(\).* Write them as another argument"):
        optimizer.init({**WEIGHTS, **slots})


@pytest.mark.parametrize(("checked", "ours"), [(True, True), (False, True), (True, False)])
def test_flows_of_devices_are_added_up(checked: bool, ours: bool) -> None:
    mesh, whole, split = Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec(), PartitionSpec("d")

    def counted(parameters: Any, slots: Any, x: Any) -> Any:
        if ours:
            axis = {"axis_name": "d", "argnums": (0, 1)}
            state = state_of(Static(2.0**6))
            return value_and_grad(watched, **axis)(parameters, state, slots, x)[1][1]
        flows = jax.grad(watched, argnums=1)(parameters, slots, x)
        return flows if checked else lax.psum(flows, "d")

    mapped = jax.jit(shard_map(counted, mesh, (whole, whole, split), whole, checked))
    assert flow(mapped(WEIGHTS, {"h": flow_slot()}, INPUT)).total == 8


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda x, slot: watch({"a": x}, slot),
            r"was given a dict and needs .* array.* Write watch\(x, slot\)",
        ),
        (lambda x, slot: watch(jnp.arange(3), slot), "needs a floating or complex array"),
        (lambda x, slot: watch(slot, x), r"given the slot first\. Write watch\(x, slot\)"),
        (
            lambda x, slot: watch(x, jnp.zeros(256)),
            r"is an array of shape \(256,\), not a flow_slot\(\)\. Write",
        ),
        (
            lambda x, slot: watch(x, jax.tree.map(lambda a: a[:3], slot)),
            r"counts of shape \(3,\), not a flow_",
        ),
        (lambda x, slot: watch(x, {"h": slot}), "the slot of watch is a dict"),
    ],
)
def test_what_cannot_be_watched_is_refused(call: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        jax.grad(lambda slot: jnp.sum(call(jnp.ones(3), slot)))(flow_slot())


def test_a_slot_that_differs_where_the_array_does_not_is_refused() -> None:
    mesh, whole, split = Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec(), PartitionSpec("d")

    def program(counts: Any, x: Any) -> Any:
        slot = jax.tree.map(lambda _: counts[0], flow_slot())
        return watch(x, slot)

    with pytest.raises(UsageError, match="the slot of watch differs between devices"):
        shard_map(program, mesh, (split, whole), whole)(jnp.zeros((2, 256)), jnp.ones(3))
