"""A loss scale as a value: a policy and its state, which JAX transforms, compiles and saves like any tree.

This room moves the scale. It refuses to know gradients of what, and who applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from preamp.arrays.jax import to_host
from preamp.errors import UsageError
from preamp.jax.scaling.gradients import multiplied
from preamp.jax.scaling.states import check_dtype
from preamp.policy import Dynamic, Policy, Reading
from preamp.systems.arguments import check_resumed, given_policy


@dataclass(frozen=True, eq=False)
class LossScale:
    """A policy and where it stands: a tree whose leaves are float32 scalars. The policy is static.

    Args:
        policy: the rule; any policy or dialect of preamp.
        state: the policy's state, to go on from. None: as the policy starts.
        exhausted: at how many overflows the policy gave up, 0 if it has not.

    Raises:
        PolicyError: for what is no policy.
        UsageError: for the state of another kind of policy.

    >>> scale = LossScale(Dynamic(init_scale=8.0, growth_interval=1))
    >>> float(scale.loss_scale), float(scale.advance(True).loss_scale), float(scale.advance(False).loss_scale)
    (8.0, 16.0, 4.0)
    """

    policy: Policy[Any] = field(default_factory=Dynamic)
    state: Any = None
    exhausted: Any = None

    def __post_init__(self) -> None:
        policy = given_policy(self.policy, {})
        state = start_of(policy) if self.state is None else self.state
        if type(state) is not type(policy.start()):
            raise UsageError(
                f"the state, a {type(state).__name__}, is not that of {policy!r}: it comes from another kind "
                "of policy. Write state=None, or optimizer.init(params), to start anew."
            )
        exhausted = jnp.zeros((), jnp.float32) if self.exhausted is None else self.exhausted
        self._set(policy, state, exhausted)

    @property
    def loss_scale(self) -> Any:
        """What the next loss is scaled by, a float32 scalar."""
        return self.state.scale

    def scale(self, tree: Any) -> Any:
        """Return a tree times the scale; float16 and bfloat16 become float32, which can hold it."""
        return multiplied(tree, self.loss_scale)

    def unscale(self, tree: Any) -> Any:
        """Return a tree divided by the scale; float16 and bfloat16 become float32."""
        return multiplied(tree, 1.0 / self.loss_scale)

    def advance(self, reading: Any) -> LossScale:
        """Return the loss scale of the next step.

        A policy that gives up stays where it is: what is compiled cannot raise. `check_exhausted` does.

        Args:
            reading: a `Reading`, as of `value_and_grad`; or whether the gradients were finite, for a policy
                that sees no more.

        Raises:
            PolicyError: for a reading that lacks what the policy needs.
            UsageError: for what is neither a reading nor a boolean: a loss, or NaN, counts as true.
        """
        if not isinstance(reading, Reading):
            reading = Reading(self._flag(reading))
        state, exhausted = self.policy.advance_or_stay(self.state, self.exhausted, reading, jnp.where)
        return replace(self, state=state, exhausted=exhausted)

    def _flag(self, finite: Any) -> Any:
        """Return a boolean as an array; of other numbers NaN would count as true."""
        kind, shape = getattr(finite, "dtype", type(finite)), jnp.shape(self.loss_scale)
        if kind not in (bool, jnp.bool_) or jnp.shape(finite) != shape:
            raise UsageError(
                f"advance({finite!r:.60}): this does not say whether the gradients were finite. Write "
                "advance(reading) with the reading of value_and_grad, or advance(all_finite(gradients))."
            )
        return jnp.asarray(finite)

    def check_exhausted(self) -> None:
        """Raise if the policy has given up, or if the state is one that training cannot resume from.

        Raises:
            ScaleExhausted: if it has given up.
            PolicyError: for a scale that is not a finite number above 0, and for a count below 0, such as a
                damaged checkpoint holds.
            UsageError: for a state that was cast to another dtype, and inside a function that JAX transforms.
            UserWarning: a warning, for a scale outside the policy's bounds.
        """
        names = [*(f"state.{name}" for name in self.state._fields), "exhausted"]
        for name, value in zip(names, [*self.state, self.exhausted], strict=True):
            check_dtype(name, value, jnp.float32, "Write LossScale(policy), and cast the parameters alone")
        *state, overflows = read([*self.state, self.exhausted])
        saved = dict(zip(self.state._fields, state, strict=True))
        check_resumed(self.policy, saved, "opt_state = restart_loss_scale(opt_state, policy)")
        if overflows:
            raise self.policy.exhaustion(saved["scale"], int(overflows))

    def _set(self, policy: Any, state: Any, exhausted: Any) -> None:
        for name, value in (("policy", policy), ("state", state), ("exhausted", exhausted)):
            object.__setattr__(self, name, value)


def start_of(policy: Policy[Any]) -> Any:
    """Return the policy's first state as float32 scalars."""
    return jax.tree.map(lambda number: jnp.asarray(number, jnp.float32), policy.start())


def read(scalars: Sequence[Any]) -> list[float]:
    """Read scalars to the host, all of them at once.

    Raises:
        UsageError: inside a function that JAX transforms, and for the scalars of several trainings at once.
    """
    values = to_host(scalars)
    shape = jnp.shape(values[0])
    if shape:
        raise UsageError(
            f"the loss scale is an array of shape {shape}: that of several devices or trainings. "
            "Write jax.tree.map(lambda x: x[0], state) for the first of them."
        )
    return [float(value) for value in values]


def _flatten(scale: LossScale) -> tuple[list[tuple[Any, Any]], Policy[Any]]:
    names = ("state", "exhausted")
    return [(jax.tree_util.GetAttrKey(name), getattr(scale, name)) for name in names], scale.policy


def _unflatten(policy: Policy[Any], children: Iterable[Any]) -> LossScale:
    """Take what JAX puts in the place of leaves as it is: it need not be numbers."""
    scale = object.__new__(LossScale)
    scale._set(policy, *children)
    return scale


jax.tree_util.register_pytree_with_keys(LossScale, _flatten, _unflatten)
