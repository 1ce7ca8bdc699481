"""The state of `loss_scaled`: its fields, its validation, and the functions that read or restart it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from preamp import scaling
from preamp.arrays import jax as arrays
from preamp.checks import shown
from preamp.errors import UsageError
from preamp.guards import Guard
from preamp.guards.base import map_state
from preamp.jax.scaling.unreduced_gradients import warn_if_devices_differ
from preamp.jax.trees import kind_of
from preamp.policy import Dynamic, Policy
from preamp.scaling import GuardRecord, ScalerState, Step, given_guard, raise_if_exhausted, to_step
from preamp.systems.arguments import check_counts, check_resumed, given_policy


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
        loss: float32; the last unscaled loss, averaged over the devices that take the same step; of several
            backward passes the mean.
        amax: float32; the largest magnitude among the last scaled gradients; undefined if they were not
            finite. None, which is not a leaf, where the policy does not need it.
        guard: the guard's state, float32 scalars and vectors, and what it decided in the last step. None,
            which is not a leaf, without a guard.
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
    amax: Array | None = None
    guard: GuardRecord[Array] | None = None

    @property
    def taken(self) -> Array:
        """Whether the last step was taken, a boolean scalar: neither an overflow nor a spike."""
        return self.finite if self.guard is None else self.guard.taken

    @property
    def scaler_state(self) -> ScalerState[Any, Any]:
        """The part that every scaler has: everything but the inner state and the loss."""
        return ScalerState(*[getattr(self, name) for name in ScalerState._fields])


class PendingState(NamedTuple):
    """The state between a backward pass and its update, with what `value_and_grad` measured.

    It is of another type than `LossScaledState`, so that an update without a backward pass, or a backward
    pass whose update was forgotten, fails while JAX traces.

    Attributes:
        state: the state before the step.
        finite: boolean; whether all gradients were finite.
        unit: float32, or float64 if a gradient is; with `ratio` the global L2 norm of the unscaled gradients,
            also where that overflows.
        ratio: of the same dtype; the norm divided by `unit`.
        amax: float32; the largest magnitude among the scaled gradients. None where the policy does not need
            it.
        loss: float32; the loss, summed over the passes.
        passes: float32; how many backward passes it stands for: more than one after `accumulate`.
    """

    state: LossScaledState
    finite: Array
    unit: Array
    ratio: Array
    amax: Array | None
    loss: Array
    passes: Array

    @property
    def grad_norm(self) -> Array:
        """The global L2 norm of the unscaled gradients, a float32 scalar."""
        return (self.unit * self.ratio).astype(jnp.float32)


DTYPES: dict[str, DTypeLike] = {
    **dict.fromkeys(("finite", "guard.taken", "guard.loss_fits"), jnp.bool_),
    **dict.fromkeys(("steps", "skipped_steps"), jnp.int32),
}
"""The dtype that `init` gives a field, where it is not float32."""

RESTART = "opt_state = restart_loss_scale(opt_state, policy)"
RESTARTED = ("policy_state", "exhausted_scale", "exhausted_overflows", "amax")

WHOLE = "Write loss_scaled around the whole optimizer: loss_scaled(optax.chain(...))"


def locate(opt_state: object) -> tuple[LossScaledState, Callable[[object], Any]]:
    """Return the state of `loss_scaled` in an optimizer's state, and what puts another one in its place.

    In a chain it has to be last, since what comes after it would run on skipped steps. What comes before it
    must have no state, since that would remember the NaN of an overflow.

    Raises:
        UsageError: for any other state, and for one whose update is missing.
    """
    node, put = _last_of_chain(opt_state)
    return find(node), put


def pending_in(opt_state: object) -> tuple[PendingState, Callable[[object], Any]]:
    """Return the same of a state that `value_and_grad` returned.

    Raises:
        UsageError: for any other state.
    """
    node, put = _last_of_chain(opt_state)
    if not isinstance(node, PendingState):
        find(node)
        raise UsageError(
            "opt_state is not from a backward pass: it does not say whether these gradients overflowed, or "
            "they are not of a scaled loss at all. Write value, gradients, opt_state = "
            "value_and_grad(loss_fn)(params, opt_state, ...) with preamp.jax.value_and_grad, and "
            "optimizer.update(gradients, opt_state, params) with that opt_state, or step(loss_fn, optimizer) "
            "for all of it. In flax.nnx: optimizer.update(model, gradients, pending=opt_state)."
        )
    return node, put


def _last_of_chain(opt_state: object) -> tuple[object, Callable[[object], Any]]:
    if type(opt_state) is tuple and opt_state and all(map(_is_empty, opt_state[:-1])):
        found, put = _last_of_chain(opt_state[-1])
        return found, lambda new: (*opt_state[:-1], put(new))
    return opt_state, lambda new: new


def _is_empty(state: object) -> bool:
    """Return whether a transformation with this state can remember nothing."""
    if isinstance(state, optax.MonitorState):  # measurements are new in each step
        return _is_empty(state.measure_states)
    if type(state) is tuple:
        return all(map(_is_empty, state))
    return isinstance(state, tuple) and not getattr(state, "_fields", ("",))


def find(state: object) -> LossScaledState:
    """Return a state of `loss_scaled`, checked.

    Raises:
        UsageError: for anything else: None, a dict that has lost its types, a tree with a state inside.
    """
    if isinstance(state, LossScaledState):
        _check_fields(state)
        return state
    if isinstance(state, PendingState):
        raise UsageError(
            "opt_state holds a backward pass whose update is missing. Write updates, opt_state = "
            "optimizer.update(gradients, opt_state, params) and go on with that opt_state. To accumulate, "
            "give each pass the state from before the first, and add them up with accumulate."
        )
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
        raise UsageError(
            f"the state of loss_scaled is inside {kind_of(state)}. A transformation with a state around "
            "loss_scaled would remember the NaN of an overflow, and one after it would run on skipped steps. "
            f"{WHOLE}, or loss_scaled(optax.MultiSteps(inner, k)). If {kind_of(state)} of your own holds the "
            "state, pass the state alone."
        )
    raise UsageError(
        f"the optimizer's state, {kind_of(state)}, holds {len(found) or 'no'} loss scale"
        f"{'s' * (len(found) > 1)}, and one loss needs exactly one. {WHOLE}."
    )


def states_in(tree: object) -> list[LossScaledState | PendingState]:
    """Return the states of `loss_scaled` in a tree."""
    ours = LossScaledState | PendingState
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ours)) if isinstance(x, ours)]


def check(state: object) -> LossScaledState:
    """Return a state of `loss_scaled` that a step can start from: scalars of the dtypes that `init` makes.

    Raises:
        UsageError: as `find` and `check_dtypes` do, and for scalars that have a shape, because they belong to
            several devices or trainings.
    """
    state = find(state)
    for name, value, _ in _fields(state):
        shape = getattr(value, "shape", ())
        if shape and ".guard.state" not in name:
            raise UsageError(
                f"{name} has shape {shape} and must be a scalar: the state is that of "
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
    for name, value, dtype in _fields(state):
        if dtype != jnp.bool_ and getattr(value, "dtype", dtype) != dtype:
            check_dtype(name, value, dtype, instead)


def _check_fields(state: LossScaledState) -> None:
    """Raise for a field that lacks its number or holds something else."""
    if isinstance(state.guard, dict):
        raise UsageError(
            "opt_state.guard is a dict: a file has the state of a guard, and it was restored into the state "
            "of an optimizer without one. Write opt_state = restart_guard(opt_state, None) to continue "
            "without a guard; or restore into loss_scaled(..., guard=guard).init(params)."
        )
    for name, value, _ in _fields(state):
        # JAX itself puts other things in the places of arrays: shapes, shardings, booleans of a filter.
        if value is None or isinstance(value, str | dict | list):
            raise UsageError(
                f"{name} is {shown(value)}, not an array: a leaf of the state is missing. Write "
                "opt_state = optimizer.init(params), or restore everything that was saved."
            )


def _fields(state: LossScaledState) -> list[tuple[str, Any, DTypeLike]]:
    """Return the numbers by name, also where other things are in their places, with the dtypes of `init`."""
    ours = state._replace(inner_state=())
    paths = jax.tree_util.tree_leaves_with_path(ours, is_leaf=lambda x: not isinstance(x, tuple))
    found = []
    for path, value in paths:
        name = jax.tree_util.keystr(path)[1:]
        # States without numbers, and states that have lost their types, which others tell.
        if not (
            (value is None and name in ("amax", "guard")) or (isinstance(value, dict) and "state" in name)
        ):
            found.append((f"opt_state.{name}", value, DTYPES.get(name, jnp.float32)))
    return found


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
    first = start(Dynamic(), given_guard(guard))
    if isinstance(opt_state, LossScaledState):
        opt_state = opt_state._replace(guard=first.guard)  # whatever a file has left in its place
    return find(opt_state)


def last_step(opt_state: LossScaledState) -> Step | None:
    """Return the record of the last step, read to the host; None before the first.

    Args:
        opt_state: the state of an optimizer made with `loss_scaled`, after the step.

    Raises:
        UsageError: for another state, and inside a function that JAX transforms.
        PolicyError: for a loss scale that is not a finite number above 0, with which every step is skipped.

    Warns:
        UserWarning: if devices of this process have different values of a state that is declared to be equal
            on all of them, because gradients were not averaged over devices. A compiled step cannot warn.
    """
    find(opt_state)
    record = opt_state.scaler_state._asdict()
    policy_state, guard = record.pop("policy_state"), record.pop("guard")
    known = {name: value for name, value in record.items() if value is not None}
    decided = () if guard is None else guard[1:]
    *numbers, loss = read([*policy_state, *known.values(), *decided, opt_state.loss])
    warn_if_devices_differ(
        {
            "opt_state.grad_norm": opt_state.grad_norm,
            "opt_state.policy_state.scale": policy_state.scale,
            "opt_state.skipped_steps": opt_state.skipped_steps,
        }
    )
    count = len(policy_state)
    record |= zip(known, numbers[count:], strict=False)
    if guard is not None:
        record["guard"] = GuardRecord(guard.state, *numbers[count + len(known) :])
    state: ScalerState[Any, float] = ScalerState(type(policy_state)(*numbers[:count]), **record)
    Dynamic().restore({"scale": state.policy_state.scale})  # raises for what no policy can resume from
    return to_step(state, loss=loss, framework="jax")


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
    state = find(opt_state)
    check_dtypes(state)
    if type(state.policy_state) is not type(given_policy(policy, {}).start()):
        raise UsageError(
            f"the loss scale in opt_state, {kind_of(state.policy_state)}, is not that of {policy!r}. Write "
            "check_exhausted(opt_state, policy) with the policy that loss_scaled was given, or opt_state = "
            "restart_loss_scale(opt_state, policy) to resume with this one."
        )
    fields = state.policy_state._fields
    exhausted = [state.exhausted_scale, state.exhausted_overflows]
    *numbers, scale, overflows, steps, skipped = read(
        [*state.policy_state, *exhausted, state.steps, state.skipped_steps]
    )
    check_counts({"steps": steps, "skipped_steps": skipped}, ("steps", "skipped_steps"))
    check_resumed(policy, dict(zip(fields, numbers, strict=True)), RESTART)
    raise_if_exhausted(
        policy, state.scaler_state._replace(exhausted_scale=scale, exhausted_overflows=overflows)
    )


def start(policy: Policy[Any], guard: Guard[Any] | None = None) -> ScalerState[Any, Array]:
    """Return the state before the first step: float32 scalars and vectors, int32 counts and booleans.

    No two fields share memory: donated buffers must not alias.
    """
    first = scaling.start(policy, takes_norm=True, guard=guard)
    record = None if first.guard is None else _guard_arrays(first.guard)
    values = []
    for name, value in first._replace(guard=None)._asdict().items():
        dtype = DTYPES.get(name, jnp.float32)
        values.append(jax.tree.map(lambda number, dtype=dtype: jnp.asarray(number, dtype), value))
    return ScalerState(*values)._replace(guard=record)


def _guard_arrays(record: GuardRecord[float]) -> GuardRecord[Array]:
    """Return the record of a guard with arrays for numbers; a tuple of numbers becomes a vector."""
    return GuardRecord(
        state=map_state(lambda numbers: jnp.asarray(numbers, jnp.float32), record.state),
        taken=jnp.asarray(record.taken, jnp.bool_),
        loss=jnp.zeros((), jnp.float32),
        loss_fits=jnp.asarray(record.loss_fits, jnp.bool_),
        limit=jnp.asarray(record.limit, jnp.float32),
    )


def read(scalars: Sequence[Array]) -> list[float]:
    """Read scalars to the host, all of them at once.

    Raises:
        UsageError: inside a function that JAX transforms, and for the scalars of several trainings at once.
    """
    shape = jnp.shape(scalars[0])
    if shape and not isinstance(scalars[0], jax.core.Tracer):
        raise UsageError(
            f"the loss scale in opt_state has the shape {shape}: it is that of several devices or trainings. "
            "Write jax.tree.map(lambda x: x[0], opt_state) for the first of them. If they are devices that "
            'train one model, write step(loss_fn, optimizer, axis_name="data") and jax.pmap(..., '
            'axis_name="data"), which average their gradients.'
        )
    return arrays.read(scalars)


def check_dtype(name: str, value: object, expected: DTypeLike, instead: str) -> None:
    """Raise for a scalar whose dtype is of another kind than expected, or narrower.

    Args:
        name: what the message calls it.
        value: an array, or a placeholder for one. Without a dtype it is not checked.
        expected: float32 or int32; a wider dtype of the same kind is accepted.
        instead: what to write instead, for the message.
    """
    dtype = jnp.dtype(getattr(value, "dtype", expected))
    kind = jnp.floating if jnp.issubdtype(expected, jnp.floating) else jnp.integer
    if not jnp.issubdtype(dtype, kind) or dtype.itemsize < jnp.dtype(expected).itemsize:
        raise UsageError(
            f"{name} has dtype {dtype} and must have {jnp.dtype(expected)}: the state was cast, or a file "
            f"has another dtype. {instead}."
        )
