"""The state of `loss_scaled`: its fields, its validation, and the functions that read or restart it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from preamp.checks import level_of_caller, shown
from preamp.errors import UsageError
from preamp.guards import Guard
from preamp.guards.base import leaves_of
from preamp.jax.scaling.lone_devices import differing, warn_if_apart
from preamp.jax.scaling.loss_scale import LossScale, check_dtype, read, start
from preamp.jax.trees import kind_of
from preamp.policy import Dynamic, Policy
from preamp.scaling import GuardRecord, ScalerState, Step, given_guard, to_step
from preamp.systems.arguments import check_counts, given_policy

# For a loss that is not known. A diverged loss is inf, -inf or NaN, but never float32's lowest finite number.
UNKNOWN_LOSS = float(np.finfo(np.float32).min)


class LossScaledState(NamedTuple):
    """What `loss_scaled` remembers: arrays only, scalars except for the inner state.

    Attributes:
        policy_state: the policy's state, float32; the next loss is multiplied by `policy_state.scale`.
        inner_state: the state of the inner transformation.
        last_scale: float32; the scale that the last loss was multiplied by.
        finite: boolean; whether the last gradients were finite.
        grad_norm: float32; the global L2 norm of the last unscaled gradients before clipping; undefined,
            possibly NaN, if they were not finite.
        exhausted_scale: float32; the scale at which the policy first gave up, 0 if it has not.
        exhausted_overflows: float32; the overflows that were counted by then, 0 if it has not given up.
        steps: int32; the number of steps, taken or skipped.
        skipped_steps: int32; the number of skipped steps.
        loss: float32; the last unscaled loss, from `step`, from the `ScaledGradients`, or from the `value`
            passed to `update`, averaged over the devices that take the same step. float32's lowest finite
            number if it is not known.
        peak: float32; the largest magnitude among the last scaled gradients; undefined if they were not
            finite. None, which is not a leaf, where the policy does not need it.
        guard: the guard's state, float32 scalars and vectors, and what it decided in the last step. None,
            which is not a leaf, without a guard. `guard.loss` is NaN if the guard does not use it, and
            `guard.loss_fits` is false if it does and the loss was not known.
    """

    policy_state: Any
    inner_state: Any
    last_scale: Array
    finite: Array
    grad_norm: Array
    exhausted_scale: Array
    exhausted_overflows: Array
    steps: Array
    skipped_steps: Array
    loss: Array
    peak: Array | None = None
    guard: GuardRecord[Array] | None = None

    @property
    def taken(self) -> Array:
        """Whether the last step was taken, a boolean scalar: neither an overflow nor a spike."""
        return self.finite if self.guard is None else self.guard.taken

    @property
    def scaler_state(self) -> ScalerState[Any, Any]:
        """The part that every scaler has: everything but the inner state and the loss."""
        return ScalerState(*[getattr(self, name) for name in ScalerState._fields])


DTYPES: dict[str, DTypeLike] = {
    "last_scale": jnp.float32,
    "finite": jnp.bool_,
    "grad_norm": jnp.float32,
    "exhausted_scale": jnp.float32,
    "exhausted_overflows": jnp.float32,
    "steps": jnp.int32,
    "skipped_steps": jnp.int32,
    "loss": jnp.float32,
}
"""The dtype that `init` gives each scalar."""

GUARD_DTYPES: dict[str, DTypeLike] = {
    "taken": jnp.bool_,
    "loss": jnp.float32,
    "loss_fits": jnp.bool_,
    "limit": jnp.float32,
}
"""The same for the fields of a guard's record, except its state."""

RESTARTED = ("policy_state", "exhausted_scale", "exhausted_overflows", "peak")

# The function of optax that makes each type of state.
CONSTRUCTORS: dict[str, str] = {
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


def find(state: object) -> LossScaledState:
    """Return a state of `loss_scaled`, checked.

    Raises:
        UsageError: for anything else: None, a dict that has lost its types, a tree with a state inside.
    """
    if isinstance(state, LossScaledState):
        _check_fields(state)
        return state
    if state is None:
        raise UsageError(
            "opt_state=None: there is no state of loss_scaled. Write opt_state = optimizer.init(params), and "
            "pass each step the state that the last one returned."
        )
    if isinstance(state, dict) and {"policy_state", "inner_state"} <= state.keys():
        raise UsageError(
            f"opt_state is a dict with the keys {shown(sorted(state))}, which is what orbax restores "
            "without a template: the types of the state are lost. Write checkpointer.restore(path, "
            "optimizer.init(params))."
        )
    found = states_in(state)
    if len(found) == 1:
        raise UsageError(_describe_enclosing(state))
    raise UsageError(
        f"the optimizer's state, {kind_of(state)}, holds {len(found) or 'no'} loss scale"
        f"{'s' * (len(found) > 1)}, and one loss needs exactly one. Write loss_scaled(optimizer) around the "
        "whole optimizer."
    )


def states_in(tree: object) -> list[LossScaledState]:
    """Return the states of `loss_scaled` in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LossScaledState))
    return [node for node in nodes if isinstance(node, LossScaledState)]


def check(state: object) -> LossScaledState:
    """Return a state of `loss_scaled` that a step can start from: scalars of the dtypes that `init` makes.

    Raises:
        UsageError: as `find` and `check_dtypes` do, and for scalars that have a shape, because they belong to
            several devices or trainings.
    """
    state = find(state)
    for name, value, _ in _scalars(state):
        shape = getattr(value, "shape", ())
        if shape:
            raise UsageError(
                f"opt_state.{name} has shape {shape} and must be a scalar: the state is that of "
                "several devices or trainings. Write jax.pmap(step, ...) or jax.vmap(step), or "
                "jax.tree.map(lambda x: x[0], opt_state) for the first of them."
            )
    check_dtypes(state)
    return state


def check_dtypes(state: LossScaledState) -> None:
    """Raise for scalars of another dtype than `init` makes, as after a cast of the whole state.

    In float16 or as an integer the scale overflows or stops moving, and every step may be skipped.

    Raises:
        UsageError: with the first of them.
    """
    instead = (
        "Write opt_state = jax.tree.map(lambda old, new: old.astype(new.dtype), opt_state, "
        "optimizer.init(params)), and cast the parameters alone"
    )
    for name, value, dtype in [*_scalars(state), *_guard_leaves(state)]:
        if dtype != jnp.bool_ and getattr(value, "dtype", dtype) != dtype:
            check_dtype(f"opt_state.{name}", value, dtype, instead)


def _check_fields(state: LossScaledState) -> None:
    """Raise for a field that lacks its number or holds something else."""
    if isinstance(state.guard, dict):
        raise UsageError(
            "opt_state.guard is a dict: a file has the state of a guard, and it was restored into the state "
            "of an optimizer without one. Write opt_state = restart_guard(opt_state, None) to continue "
            "without a guard; or restore into loss_scaled(..., guard=guard).init(params)."
        )
    for name, value, _ in [*_scalars(state), *_guard_leaves(state)]:
        # JAX itself puts other things in the places of arrays: shapes, shardings, booleans of a filter.
        if value is None or isinstance(value, str | dict | list):
            raise UsageError(
                f"opt_state.{name} is {shown(value)}, not an array: a leaf of the state is missing. Write "
                "opt_state = optimizer.init(params), or restore everything that was saved."
            )


def _scalars(state: LossScaledState) -> list[tuple[str, object, DTypeLike]]:
    """Return the scalars by name, each with the dtype that `init` gives it."""
    scalars: list[tuple[str, object, DTypeLike]] = []
    policy_state = state.policy_state
    for name in getattr(policy_state, "_fields", ()):
        scalars += [(f"policy_state.{name}", getattr(policy_state, name), jnp.float32)]
    for name, dtype in DTYPES.items():
        scalars += [(name, getattr(state, name), dtype)]
    if state.guard is not None:
        scalars += [
            (f"guard.{name}", getattr(state.guard, name, None), GUARD_DTYPES[name]) for name in GUARD_DTYPES
        ]
    return scalars


def _guard_leaves(state: LossScaledState) -> list[tuple[str, object, DTypeLike]]:
    """Return the numbers and vectors in a guard's state in the same way."""
    held = None if state.guard is None else getattr(state.guard, "state", None)
    leaves = leaves_of(held) if hasattr(held, "_fields") else []
    return [(f"guard.state.{name}", value, jnp.float32) for name, value in leaves]


def _describe_enclosing(state: object) -> str:
    """Return the message for a tree that has a state of `loss_scaled` inside."""
    node, path = state, type(state).__name__.lower()
    while not _is_of_optimizer(node):
        key, node = next(pair for pair in _children(node) if states_in(pair[1]))
        path += jax.tree_util.keystr(key)
        if isinstance(node, LossScaledState):
            return f"{kind_of(state)} holds the state of loss_scaled. Write that alone: {path}."
    kind = type(node).__name__
    written = CONSTRUCTORS.get(kind)
    around = f"{written or 'a transformation'}, whose state is of type {kind}"
    sums = "Its sum would stay NaN after one overflow. " if isinstance(node, optax.MultiStepsState) else ""
    return (
        f"loss_scaled is inside {around}. The outer transformation is given gradients that are still "
        f"scaled, or runs on skipped steps too. {sums}Write loss_scaled around the whole optimizer: "
        f"loss_scaled({written or 'the_transformation'}(...))."
    )


def _is_of_optimizer(node: object) -> bool:
    """Return whether a node is the state of a transformation of optax, or of a chain."""
    return type(node) in (tuple, dict, OrderedDict) or type(node).__module__.split(".")[0] == "optax"


def _children(node: object) -> list[tuple[tuple[object, ...], object]]:
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]


def restart_loss_scale(opt_state: LossScaledState, policy: Policy[Any]) -> LossScaledState:
    """Return the state from which to resume training with another policy.

    The state of the inner optimizer (its moments and counts), the state of the guard and the counts of steps
    stay. The loss scale starts where the policy starts it.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled` and any policy.
        policy: the policy of the `loss_scaled` with which training continues.

    Raises:
        PolicyError: if `policy` is not a policy.
        UsageError: if `opt_state` is not the state of `loss_scaled`.

    >>> import jax.numpy as jnp, optax
    >>> from preamp import Dynamic, Headroom
    >>> from preamp.jax import loss_scaled
    >>> state = loss_scaled(optax.adam(1e-3), Dynamic(init_scale=2.0**20)).init(jnp.zeros(2))
    >>> policy = Headroom(init_scale=2.0**10)
    >>> state = restart_loss_scale(state, policy)
    >>> optimizer = loss_scaled(optax.adam(1e-3), policy)
    >>> float(state.policy_state.scale)
    1024.0
    """
    if isinstance(opt_state, LossScale):
        raise UsageError(
            "restart_loss_scale was given a LossScale. Write LossScale(policy), which starts the policy "
            "again."
        )
    first = start(given_policy(policy, {}))
    return find(opt_state)._replace(**{name: getattr(first, name) for name in RESTARTED})


def restart_guard(opt_state: LossScaledState, guard: Guard[Any] | None) -> LossScaledState:
    """Return the state from which to resume training with another guard, with a first guard, or without one.

    Everything else stays, including the loss scale.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled`, with or without a guard.
        guard: the guard of the `loss_scaled` with which training continues. None if it has none.

    Raises:
        PolicyError: if `guard` is not a guard.
        UsageError: if `opt_state` is not the state of `loss_scaled`.

    >>> import jax.numpy as jnp, optax
    >>> from preamp.guards import SpikeGuard
    >>> from preamp.jax import loss_scaled
    >>> state = loss_scaled(optax.adam(1e-3)).init(jnp.zeros(2))
    >>> guard = SpikeGuard()
    >>> state = restart_guard(state, guard)
    >>> optimizer = loss_scaled(optax.adam(1e-3), guard=guard)
    >>> bool(state.guard.taken)
    True
    """
    if isinstance(opt_state, LossScale):
        raise UsageError(
            "restart_guard was given a LossScale, which has no guard. Write loss_scaled(optimizer, policy, "
            "guard=guard)."
        )
    first = start(Dynamic(), given_guard(guard))
    if isinstance(opt_state, LossScaledState):
        opt_state = opt_state._replace(guard=first.guard)  # whatever a file has left in its place
    return find(opt_state)


def last_step(opt_state: LossScaledState) -> Step | None:
    """Return the record of the last step, read to the host; None before the first.

    The record has the loss if it is known: `step` knows it, and the gradients of `scaled_value_and_grad`
    carry it. For other gradients, such as those that `map` returns, pass it as `update(..., value=loss)`.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled`, after the step.

    Raises:
        UsageError: for another state, and inside a function that JAX transforms.
        PolicyError: for a loss scale that is not a finite number above 0, with which every step is skipped.

    Warns:
        UserWarning: if devices of this process have different values of a state that is declared to be equal
            on all of them, because gradients were not averaged over devices; if a guard that uses the loss
            was not given one in that step, and if devices that took the step together were given different
            ones. A compiled step cannot warn.
    """
    if isinstance(opt_state, LossScale):
        raise UsageError(
            "last_step was given a LossScale, which has no record of steps. Write loss_scale.loss_scale for "
            "the scale, and loss_scale.check_exhausted() after restoring one."
        )
    _refuse_several(find(opt_state))
    record = opt_state.scaler_state._asdict()
    policy_state, guard = record.pop("policy_state"), record.pop("guard")
    known = {name: value for name, value in record.items() if value is not None}
    decided = [] if guard is None else [getattr(guard, name) for name in GUARD_DTYPES]
    loss, *numbers = read([opt_state.loss, *policy_state, *known.values(), *decided])
    warn_if_apart(_compared(opt_state))
    count = len(policy_state)
    record |= zip(known, numbers[count:], strict=False)
    if guard is not None:
        decision = dict(zip(GUARD_DTYPES, numbers[count + len(known) :], strict=True))
        lacked_loss = loss == UNKNOWN_LOSS and not decision["loss_fits"]
        _warn_of_losses(guard, lacked_loss)
        record["guard"] = guard._replace(**decision | {"loss_fits": lacked_loss or decision["loss_fits"]})
    state: ScalerState[Any, float] = ScalerState(type(policy_state)(*numbers[:count]), **record)
    Dynamic().restore({"scale": state.policy_state.scale})  # raises for what no policy can resume from
    return to_step(state, loss=None if loss == UNKNOWN_LOSS else loss, framework="jax")


def _compared(state: LossScaledState) -> dict[str, Any]:
    """Return the scalars that are equal on all devices that train one model, by name."""
    return {
        "opt_state.grad_norm": state.grad_norm,
        "opt_state.policy_state.scale": state.policy_state.scale,
        "opt_state.skipped_steps": state.skipped_steps,
    }


def _refuse_several(state: LossScaledState) -> None:
    """Raise for the state of several devices, and say where they differ."""
    scale = state.policy_state.scale
    shape = jnp.shape(scale)
    if not shape or isinstance(scale, jax.core.Tracer):
        return
    message = (
        f"the loss scale in opt_state is an array of shape {shape}: that of several devices or trainings. "
        "Write last_step(jax.tree.map(lambda x: x[0], opt_state)) for the first of them."
    )
    if found := differing(_compared(state)):
        message += (
            f" They differ in {', '.join(found)}. If they are devices that train one model, each has trained "
            'with its own gradients: write step(loss_fn, optimizer, axis_name="data") and jax.pmap(..., '
            'axis_name="data").'
        )
    raise UsageError(message)


def _warn_of_losses(guard: GuardRecord[Array], lacked_loss: bool) -> None:
    """Warn if the guard was not given the loss that it uses, or was given different ones on the devices."""
    if lacked_loss:
        warnings.warn(
            "the guard in opt_state uses the loss, and the last step had none: its gradients had lost it, "
            "as after map, and no value= was given. The guard does not judge the loss in such steps. Write "
            "apply_gradients(optimizer, scaled, opt_state, params, value=value) or update(scaled, opt_state, "
            "params, value=value), with the value that scaled_value_and_grad returned.",
            UserWarning,
            stacklevel=level_of_caller("jax"),
        )
    losses = [shard.data for shard in getattr(guard.loss, "addressable_shards", ())]
    if len(losses) > 1 and len({np.asarray(loss).tobytes() for loss in jax.device_get(losses)}) > 1:
        warnings.warn(
            "the guard was given different losses on the devices, in a step that they took together. Some "
            "may skip a step that others take, and then their parameters differ. Write "
            'scaled_value_and_grad(loss_fn, axis_name="data"), which averages value and gradients, or pass '
            'value=jax.lax.pmean(value, "data"), with the name of your axis.',
            UserWarning,
            stacklevel=level_of_caller("jax"),
        )


def check_exhausted(opt_state: LossScaledState, policy: Policy[Any]) -> None:
    """Raise the error that a compiled step cannot raise, if the policy has given up or the state is invalid.

    A compiled step cannot check the arrays of a restored state. Call this once after restoring a checkpoint.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled`.
        policy: the one that `loss_scaled` was given.

    Raises:
        ScaleExhausted: if the policy has given up, with the scale at which it first did.
        PolicyError: for a scale that is not a finite number above 0, and for a count below 0.
        UsageError: for another state, one that was cast to another dtype, and inside a function that JAX
            transforms.

    Warns:
        UserWarning: for a scale outside the policy's bounds. Nothing else reports it, because `last_step`
            does not know the policy.
    """
    if isinstance(opt_state, LossScale):
        raise UsageError(
            "check_exhausted was given a LossScale, which knows its policy. Write "
            "loss_scale.check_exhausted()."
        )
    state = find(opt_state)
    check_dtypes(state)
    if type(state.policy_state) is not type(given_policy(policy, {}).start()):
        raise UsageError(
            f"the loss scale in opt_state, {kind_of(state.policy_state)}, is not that of {policy!r}. Write "
            "check_exhausted(opt_state, policy) with the policy that loss_scaled was given, or opt_state = "
            "restart_loss_scale(opt_state, policy) to resume with this one."
        )
    counts = {"steps": state.steps, "skipped_steps": state.skipped_steps}
    check_counts(dict(zip(counts, read(list(counts.values())), strict=True)), counts)
    exhausted = state.exhausted_scale, state.exhausted_overflows
    LossScale(policy, state.policy_state, *exhausted).check_exhausted()
