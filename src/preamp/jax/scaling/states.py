"""The state of `loss_scaled`, and what is said of a tree that is not one, or has one inside."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from preamp.checks import shown
from preamp.errors import UsageError

# Where nobody told the loss. A diverged loss is inf, -inf or NaN, and none is float32's lowest finite number.
UNKNOWN_LOSS = float(np.finfo(np.float32).min)


class LossScaledState(NamedTuple):
    """What `loss_scaled` remembers: arrays only, scalars but for the inner state.

    Attributes:
        policy_state: the policy's state, float32; `policy_state.scale` is what the next loss is scaled by.
        inner_state: the inner transformation's.
        last_scale: float32; the scale that was in the last loss.
        finite: boolean; whether the last gradients were.
        grad_norm: float32; the global L2 norm of the last unscaled gradients before clipping, inf if not
            finite.
        exhausted: float32; at how many overflows the policy gave up, 0 if it has not.
        steps: int32; steps taken or skipped.
        skipped_steps: int32; steps skipped.
        loss: float32; the last loss, not scaled: that of `step`, of the `ScaledGradients`, or the `value`
            that `update` was given. float32's lowest finite number where it is not known.
        peak: float32; the largest magnitude among the last scaled gradients, if finite. None, which is no
            leaf, where the policy does not ask for it.
    """

    policy_state: Any
    inner_state: Any
    last_scale: Any
    finite: Any
    grad_norm: Any
    exhausted: Any
    steps: Any
    skipped_steps: Any
    loss: Any
    peak: Any = None


SCALARS = ("last_scale", "finite", "grad_norm", "exhausted", "steps", "skipped_steps", "loss")

# What a user wrote, by the type of the state it makes.
WRITTEN: dict[str, str] = {
    "ApplyIfFiniteState": "optax.apply_if_finite",
    "ConditionallyMaskState": "optax.conditionally_mask",
    "ConditionallyTransformState": "optax.conditionally_transform",
    "InjectStatefulHyperparamsState": "optax.inject_hyperparams",
    "LookaheadState": "optax.lookahead",
    "MaskedState": "optax.masked",
    "MechanicState": "optax.contrib.mechanize",
    "MultiStepsState": "optax.MultiSteps",
    "OrderedDict": "optax.named_chain",
    "PartitionState": "optax.partition",
    "SAMState": "optax.contrib.sam",
    "ScheduleFreeState": "optax.contrib.schedule_free",
    "SplitRealAndImaginaryState": "optax.contrib.split_real_and_imaginary",
    "dict": "optax.named_chain",
    "tuple": "optax.chain",
}


def find(state: Any) -> LossScaledState:
    """Return a state of `loss_scaled`, checked.

    Raises:
        UsageError: for anything else, which is said: None, a dict without types, a state with one inside.
    """
    if isinstance(state, LossScaledState):
        _check_fields(state)
        return state
    if state is None:
        raise UsageError(
            "opt_state=None: there is no state of loss_scaled. Write opt_state = optimizer.init(params), and "
            "give each step what the last one returned."
        )
    if isinstance(state, dict) and {"policy_state", "inner_state"} <= state.keys():
        raise UsageError(
            f"opt_state is a dict with the keys {shown(sorted(state))}, which is what orbax restores "
            "without a template: the types of the state are lost. Write checkpointer.restore(path, "
            "optimizer.init(params))."
        )
    found = found_in(state)
    if len(found) == 1:
        raise UsageError(_inside(state))
    raise UsageError(
        f"the optimizer's state, {kind_of(state)}, holds {len(found) or 'no'} loss scale"
        f"{'s' * (len(found) > 1)}, and one loss needs one. Write loss_scaled(optimizer) around the whole "
        "optimizer."
    )


def found_in(tree: Any) -> list[LossScaledState]:
    """Return the states of `loss_scaled` in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LossScaledState))
    return [node for node in nodes if isinstance(node, LossScaledState)]


def check_scalars(state: LossScaledState) -> None:
    """Raise for scalars that have a shape, inside a step: those of several devices or trainings.

    Raises:
        UsageError: with the first of them.
    """
    for name, value in _scalars(state):
        if jnp.shape(value):
            raise UsageError(
                f"opt_state.{name} has shape {jnp.shape(value)} and must be a scalar: the state is that of "
                "several devices or trainings. Write jax.pmap(step, ...) or jax.vmap(step), or "
                "jax.tree.map(lambda x: x[0], opt_state) for the first of them."
            )


def check_dtypes(state: LossScaledState) -> None:
    """Raise for scalars of another dtype than `init` makes, such as a cast of the whole state leaves behind.

    In float16 or as an integer the scale overflows or stops to move, and every step may be skipped.

    Raises:
        UsageError: with the first of them.
    """
    integers = ("steps", "skipped_steps")
    instead = (
        "Write opt_state = jax.tree.map(lambda old, new: old.astype(new.dtype), opt_state, "
        "optimizer.init(params)), and cast the parameters alone"
    )
    for name, value in _scalars(state):
        if name != "finite":
            check_dtype(f"opt_state.{name}", value, jnp.int32 if name in integers else jnp.float32, instead)


def check_dtype(name: str, value: Any, expected: Any, instead: str) -> None:
    """Raise for a scalar of another kind of dtype than expected, or of a shorter one.

    Args:
        name: what the message calls it.
        value: an array, or what stands for one: without a dtype it is not checked.
        expected: float32 or int32; a longer one of the same kind will do.
        instead: what to write.
    """
    dtype = jnp.dtype(getattr(value, "dtype", expected))
    kind = jnp.floating if jnp.issubdtype(expected, jnp.floating) else jnp.integer
    if not jnp.issubdtype(dtype, kind) or dtype.itemsize < jnp.dtype(expected).itemsize:
        raise UsageError(
            f"{name} is of dtype {dtype} and has to be {jnp.dtype(expected)}: the state was cast, or a file "
            f"has another dtype. {instead}."
        )


def kind_of(value: Any) -> str:
    """Return what a value is, in words that name no tracers."""
    if hasattr(value, "shape"):
        return f"an array of shape {value.shape}"
    return f"a {type(value).__name__}"


def _check_fields(state: LossScaledState) -> None:
    """Raise for a field that a number was taken out of, or that something else was put into."""
    for name, value in _scalars(state):
        # JAX itself puts other things in the places of arrays: shapes, shardings, booleans of a filter.
        if value is None or isinstance(value, str | dict | list):
            raise UsageError(
                f"opt_state.{name} is {shown(value)}, not an array: a leaf of the state is missing. Write "
                "opt_state = optimizer.init(params), or restore the whole of what was saved."
            )


def _scalars(state: LossScaledState) -> list[tuple[str, Any]]:
    policy_state = state.policy_state
    names = getattr(policy_state, "_fields", ())
    inner = [(f"policy_state.{name}", getattr(policy_state, name)) for name in names]
    return [*inner, *((name, getattr(state, name)) for name in SCALARS)]


def _inside(state: Any) -> str:
    """Return what to say of a tree that has a state of `loss_scaled` inside."""
    node, path = state, type(state).__name__.lower()
    while not _is_of_optimizer(node):
        key, node = next(pair for pair in _children(node) if found_in(pair[1]))
        path += jax.tree_util.keystr(key)
        if isinstance(node, LossScaledState):
            return f"{kind_of(state)} holds the state of loss_scaled. Write that alone: {path}."
    kind = type(node).__name__
    written = WRITTEN.get(kind)
    around = f"{written or 'a transformation'}, whose state is of type {kind}"
    sums = "Its sum would stay NaN after one overflow. " if isinstance(node, optax.MultiStepsState) else ""
    return (
        f"loss_scaled is inside {around}. What is around it is given gradients that are still scaled, or "
        f"runs on skipped steps too. {sums}Write loss_scaled around the whole optimizer: "
        f"loss_scaled({written or 'the_transformation'}(...))."
    )


def _is_of_optimizer(node: Any) -> bool:
    """Return whether a node is the state of a transformation of optax, or of a chain."""
    return type(node) in (tuple, dict, OrderedDict) or type(node).__module__.split(".")[0] == "optax"


def _children(node: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
