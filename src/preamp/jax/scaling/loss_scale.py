"""A loss scale as a value: a policy and its state, a pytree that JAX can transform, compile and save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from preamp import scaling
from preamp.arrays import jax as arrays
from preamp.errors import UsageError
from preamp.guards import Guard
from preamp.guards.base import map_state
from preamp.jax import trees
from preamp.policy import Dynamic, Policy, Reading
from preamp.scaling import GuardRecord, Measured, ScalerState, raise_if_exhausted
from preamp.systems.arguments import check_resumed, given_policy

FIELDS = ("state", "exhausted_scale", "exhausted_overflows")
Leaves: TypeAlias = list[tuple[jax.tree_util.GetAttrKey, object]]


@dataclass(frozen=True, eq=False)
class LossScale:
    """A policy and its state: a pytree whose leaves are float32 scalars. The policy is static.

    Args:
        policy: the rule; any policy or dialect of preamp.
        state: the policy's state, to resume from. None starts the policy anew.
        exhausted_scale: the scale at which the policy first gave up, 0 if it has not.
        exhausted_overflows: the overflows that were counted by then, 0 if it has not given up.

    Raises:
        PolicyError: if `policy` is not a policy.
        UsageError: if `state` is the state of another kind of policy.

    >>> scale = LossScale(Dynamic(init_scale=8.0, growth_interval=1))
    >>> float(scale.loss_scale), float(scale.advance(True).loss_scale), float(scale.advance(False).loss_scale)
    (8.0, 16.0, 4.0)
    """

    policy: Policy[Any] = field(default_factory=Dynamic)
    state: Any = None
    exhausted_scale: Any = None
    exhausted_overflows: Any = None

    def __post_init__(self) -> None:
        policy = given_policy(self.policy, {})
        state = start(policy).policy_state if self.state is None else self.state
        if type(state) is not type(policy.start()):
            raise UsageError(
                f"the state, a {type(state).__name__}, is not that of {policy!r}: it comes from another kind "
                "of policy. Write state=None, or optimizer.init(params), to start again."
            )
        exhausted = [self.exhausted_scale, self.exhausted_overflows]
        self._set(policy, state, *[jnp.zeros((), jnp.float32) if it is None else it for it in exhausted])

    @property
    def loss_scale(self) -> Array:
        """What the next loss is multiplied by, a float32 scalar."""
        scale: Array = self.state.scale
        return scale

    def scale(self, tree: trees.Tree) -> trees.Tree:
        """Return a tree times the scale; float16 and bfloat16 become float32, which can hold it."""
        return trees.multiply(tree, self.loss_scale)

    def unscale(self, tree: trees.Tree) -> trees.Tree:
        """Return a tree divided by the scale; float16 and bfloat16 become float32."""
        return trees.unscale(tree, self.loss_scale)

    def advance(self, reading: Reading | Array | bool) -> LossScale:
        """Return the loss scale of the next step.

        A policy that gives up keeps its state, because a compiled program cannot raise. `check_exhausted`
        does.

        Args:
            reading: a `Reading`, as `value_and_grad` returns it; or whether the gradients were finite, for a
                policy that needs no more.

        Raises:
            PolicyError: for a reading that lacks what the policy needs.
            UsageError: for anything but a reading or a boolean, because a loss, or NaN, would count as true.
        """
        if not isinstance(reading, Reading):
            reading = Reading(self._flag(reading))
        measured = Measured(reading.finite, self.loss_scale, None, reading.peak)
        after, _ = scaling.advance(self.policy, self._scaler_state(), measured, jnp.where)
        return replace(
            self,
            state=after.policy_state,
            exhausted_scale=after.exhausted_scale,
            exhausted_overflows=after.exhausted_overflows,
        )

    def _flag(self, finite: object) -> Array:
        """Return a boolean as an array. Other numbers are refused: NaN would count as true."""
        kind, shape = getattr(finite, "dtype", type(finite)), jnp.shape(self.loss_scale)
        if kind not in (bool, jnp.bool_) or jnp.shape(finite) != shape:  # type: ignore[arg-type]
            raise UsageError(
                f"advance({finite!r:.60}): this does not say whether the gradients were finite. Write "
                "advance(reading) with the reading of value_and_grad, or advance(all_finite(gradients))."
            )
        return jnp.asarray(finite)

    def _scaler_state(self) -> ScalerState[Any, Any]:
        """Return the state of a scaler that keeps no record of its steps."""
        record = (self.loss_scale, True, None, None, self.exhausted_scale, self.exhausted_overflows, 0, 0)
        return ScalerState(self.state, *record)

    def check_exhausted(self) -> None:
        """Raise if the policy has given up, or if the state is one that training cannot resume from.

        Raises:
            ScaleExhausted: if it has given up, with the scale at which it first did.
            PolicyError: for a scale that is not a finite number above 0, and for a count below 0, as from a
                damaged checkpoint.
            UsageError: for a state that was cast to another dtype, and inside a function that JAX transforms.

        Warns:
            UserWarning: for a scale outside the policy's bounds.
        """
        exhausted = [self.exhausted_scale, self.exhausted_overflows]
        names = [*(f"state.{name}" for name in self.state._fields), *FIELDS[1:]]
        for name, value in zip(names, [*self.state, *exhausted], strict=True):
            check_dtype(name, value, jnp.float32, "Write LossScale(policy), and cast the parameters alone")
        *state, scale, overflows = read([*self.state, *exhausted])
        saved = dict(zip(self.state._fields, state, strict=True))
        check_resumed(self.policy, saved, "opt_state = restart_loss_scale(opt_state, policy)")
        record = self._scaler_state()._replace(exhausted_scale=scale, exhausted_overflows=overflows)
        raise_if_exhausted(self.policy, record)

    def _set(self, policy: Policy[Any], *values: object) -> None:
        for name, value in zip(("policy", *FIELDS), (policy, *values), strict=True):
            object.__setattr__(self, name, value)


def start(policy: Policy[Any], guard: Guard[Any] | None = None) -> ScalerState[Any, Array]:
    """Return the state before the first step: float32 scalars and vectors, int32 counts and booleans.

    No two fields share memory: donated buffers must not alias.
    """
    first = scaling.start(policy, takes_norm=True, guard=guard)
    record = None if first.guard is None else _guard_arrays(first.guard)
    dtypes = {"finite": jnp.bool_, "steps": jnp.int32, "skipped_steps": jnp.int32}
    values = []
    for name, value in first._replace(guard=None)._asdict().items():
        dtype = dtypes.get(name, jnp.float32)
        values.append(jax.tree.map(lambda number, dtype=dtype: jnp.asarray(number, dtype), value))
    return ScalerState(*values)._replace(guard=record)


def _guard_arrays(record: GuardRecord[float]) -> GuardRecord[Array]:
    """Return the record of a guard with arrays for numbers; a tuple of numbers becomes a vector."""
    return GuardRecord(
        state=map_state(lambda numbers: jnp.asarray(numbers, jnp.float32), record.state),
        taken=jnp.asarray(record.taken, jnp.bool_),
        loss=jnp.asarray(record.loss, jnp.float32),
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
            f"the loss scale is an array of shape {shape}: that of several devices or trainings. "
            "Write jax.tree.map(lambda x: x[0], state) for the first of them."
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


def _flatten(scale: LossScale) -> tuple[Leaves, Policy[Any]]:
    return [(jax.tree_util.GetAttrKey(name), getattr(scale, name)) for name in FIELDS], scale.policy


def _unflatten(policy: Policy[Any], children: Iterable[object]) -> LossScale:
    """Rebuild without checks: what JAX puts in the place of leaves need not be numbers."""
    scale = object.__new__(LossScale)
    scale._set(policy, *children)
    return scale


jax.tree_util.register_pytree_with_keys(LossScale, _flatten, _unflatten)
