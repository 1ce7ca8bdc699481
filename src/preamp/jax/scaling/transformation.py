"""Loss scaling as an optax transformation: one step of it skips overflows and spikes, and keeps a record."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from preamp.arrays.jax import is_inexact, multiply
from preamp.checks import is_number, shown
from preamp.errors import PolicyError, UsageError
from preamp.guards import Guard, Verdict
from preamp.guards.base import leaves_of, map_state
from preamp.jax import axes, trees
from preamp.jax.scaling.differentiation import refuse_stateful
from preamp.jax.scaling.lone_devices import warn_if_alone
from preamp.jax.scaling.loss_scale import start
from preamp.jax.scaling.measurements import measure
from preamp.jax.scaling.scaled_gradients import ScaledGradients, as_loss, optax_caller, single
from preamp.jax.scaling.states import UNKNOWN_LOSS, LossScaledState, check, states_in
from preamp.jax.trees import is_flow_slot, kind_of
from preamp.policy import Dynamic, Policy, Reading
from preamp.policy.base import Where, choose
from preamp.scaling import advance, given_guard, judge
from preamp.systems.arguments import given_policy

OFFERED = frozenset(["value", "value_fn", "grad"])  # what line searches ask for
Params = TypeVar("Params")
Result = TypeVar("Result")


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy[Any] | None = None,
    max_norm: float | None = None,
    axis_name: Hashable = None,
    guard: Guard[Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of `ScaledGradients` that unscales, checks and clips, and skips overflows.

    On a skipped step the inner state does not change in any bit, and the updates are negative zeros, which
    change no bit of a parameter. The inner transformation is given gradients and parameters in float32 where
    they are narrower; float64 and complex stay as they are.

    The loss to differentiate is scaled by `policy_state.scale`: `step` and `scaled_value_and_grad` do that.
    `update` takes what `scaled_value_and_grad` returns, and unscales it with the scale that it carries. Plain
    gradients are refused, because it is not known whether they are scaled: write
    `ScaledGradients(gradients, scale)`. A trainer that takes gradients apart (`nnx.Optimizer`) passes the
    scale separately: ``update(scaled.gradients, state, params, loss_scale=scaled.scale)``.

    `loss_scaled` has to be the outermost transformation. Everything else belongs inside, as in
    ``loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))``. In a chain, a
    transformation before `loss_scaled` would be given scaled gradients, and one after it would run on skipped
    steps. `step`, `apply_gradients`, `scaled_value_and_grad` and `last_step` refuse the state of such a
    chain.

    Args:
        inner: any optax transformation or optimizer.
        policy: any policy or dialect of preamp. None: `Dynamic()`.
        max_norm: clip the unscaled gradients to this global L2 norm, as `optax.clip_by_global_norm` does.
            None and inf do not clip.
        axis_name: the mapped axis, or a tuple of them, along which devices hold shards of the parameters, and
            so different gradients. They then skip together, and the norm is taken over all of them. Leave it
            out where gradients have been averaged over devices, and under `jit` with sharded arrays.
        guard: any guard or dialect of `preamp.guards`. It also skips steps whose gradients are finite, judged
            by their loss and by their norm before clipping. A guard that uses the loss gets it from `step`,
            and from the gradients of `scaled_value_and_grad`; elsewhere write ``update(..., value=loss)``.
            Devices that take the same step have to be given the same loss: where gradients are averaged by
            hand, in `pmap` or in `shard_map` with ``check_vma=False``, write ``value=lax.pmean(loss, axis)``.

    Raises:
        PolicyError: for a policy, norm or guard that cannot work.
        UsageError: for an `inner` that is not a transformation, or that already scales losses.

    >>> import jax.numpy as jnp, optax
    >>> from preamp import Dynamic
    >>> optimizer = loss_scaled(optax.sgd(0.5), Dynamic(init_scale=4.0), max_norm=1.0)
    >>> params = jnp.zeros(2)
    >>> state = optimizer.init(params)
    >>> scaled = ScaledGradients(4.0 * jnp.array([3.0, 4.0]), 4.0)  # of a loss that was multiplied by 4
    >>> optimizer.update(scaled, state, params)[0].tolist()
    [-0.30000001192092896, -0.4000000059604645]
    >>> updates, state = optimizer.update(scaled.map(lambda g: g / 0.0), state, params)
    >>> float(state.policy_state.scale), int(state.skipped_steps)
    (2.0, 1)
    """
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise UsageError(
            f"{inner!r} is not a transformation: it has no init and update. Write "
            "loss_scaled(optax.adam(1e-3))."
        )
    scaling = Scaling(
        optax.with_extra_args_support(inner),
        given_policy(Dynamic() if policy is None else policy, {}),
        _checked_norm(max_norm),
        axes.names_of(axis_name),
        given_guard(guard),
    )
    return optax.GradientTransformationExtraArgs(scaling.init, scaling.update)


def _checked_norm(max_norm: object) -> float | None:
    """Return `max_norm` as a float; None if it never clips.

    Raises:
        PolicyError: if it is not a number above 0, or if JAX is tracing it.
    """
    if max_norm is None:
        return None
    if isinstance(max_norm, jax.core.Tracer):
        raise PolicyError(
            "max_norm is a value that JAX is tracing, and it has to be known before. Write max_norm=1.0, or "
            "put optax.clip_by_global_norm(max_norm) into the inner optimizer."
        )
    limit: Any = max_norm
    if isinstance(max_norm, np.ndarray | np.generic | Array) and max_norm.shape == ():
        limit = max_norm.item()
    if limit == float("inf"):
        return None
    if not (is_number(limit) and limit > 0.0):
        raise PolicyError(f"max_norm={shown(max_norm)} is not a number above 0. Write max_norm=1.0, or None.")
    return float(limit)


class Backward(NamedTuple):
    """The results of the backward pass of one step.

    Attributes:
        gradients: a tree of scaled gradients; with a `finish`, the same entries in another order or a
            narrower dtype.
        scale: the scale that the loss was multiplied by.
        loss: the unscaled loss.
        finish: turns the leaves into those of the gradients; called where the step is not skipped.
        loss_is_known: whether the loss is certain not to be `UNKNOWN_LOSS`.
        loss_names: axes over which the gradients were summed, and the loss may not have been.
    """

    gradients: object
    scale: Array
    loss: object
    finish: Callable[[list[Array]], list[Array]] | None = None
    loss_is_known: bool = False
    loss_names: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Scaling:
    """One optimizer with loss scaling: the arguments of `loss_scaled`, checked."""

    inner: optax.GradientTransformationExtraArgs
    policy: Policy[Any]
    max_norm: float | None
    names: tuple[Hashable, ...]
    guard: Guard[Any] | None = None

    def init(self, params: object) -> LossScaledState:
        """Return the state before the first step."""
        refuse_stateful(params)
        if any(map(is_flow_slot, jax.tree.leaves(params, is_leaf=is_flow_slot))):
            raise UsageError(
                "params hold a flow_slot(), which the optimizer would update. Write the slots as another "
                "argument of the loss, and scaled_value_and_grad(loss_fn, argnums=(0, 1))."
            )
        first, inner = start(self.policy, self.guard), self.inner.init(trees.widen(params))
        if states_in(inner):
            raise UsageError(
                "the optimizer inside already scales losses: gradients would be unscaled twice. "
                "Write loss_scaled around the whole optimizer, once."
            )
        return LossScaledState(**first._asdict(), inner_state=inner, loss=as_loss(None))

    def update(
        self, scaled: object, state: LossScaledState, params: object = None, **extra: object
    ) -> tuple[Any, LossScaledState]:
        """Return updates, in the dtypes of the unscaled gradients, and the state after the step.

        A `value` among the further arguments is recorded as the step's loss, and judged by the guard. Where
        gradients were averaged over devices by hand, average it too.
        """
        self.check_state(state)
        gradients, extra = with_scale(scaled, extra, self.guard)
        if caller := optax_caller():
            raise UsageError(
                f"the update of loss_scaled was called by {caller}: a transformation around loss_scaled "
                "is given gradients that are still scaled, or runs on skipped steps too. Write loss_scaled "
                "around the whole optimizer, such as loss_scaled(optax.chain(...)) or "
                "loss_scaled(optax.lookahead(...))."
            )
        self.warn_if_alone(gradients)
        check_gradients(gradients.gradients, params)
        skipped = self._skipped_updates(gradients.gradients, state, params, extra)
        backward = backward_of(gradients, extra)
        return self._step(backward, state, params, extra, lambda updates, _: updates, skipped)

    def warn_if_alone(self, scaled: ScaledGradients) -> None:
        """Warn if devices that train one model have not averaged these gradients."""
        names = [name for name in scaled._alone_over if name not in self.names]
        warn_if_alone(names, "scaled_value_and_grad(loss_fn")

    def _skipped_updates(
        self, gradients: object, state: LossScaledState, params: object, extra: dict[str, object]
    ) -> object:
        """Return the updates of a skipped step: negative zeros, which change no bit."""
        wide = trees.widen(gradients)
        structure: object = jax.tree.structure(wide)
        if params is None or structure == jax.tree.structure(params):
            return trees.map_inexact(_negative_zeros, wide)
        # Updates need not be a tree like the gradients: those of optax.lookahead have fast and slow parts.
        offered = self._accepted({"grad": wide, **extra})
        updates = jax.eval_shape(
            lambda: self.inner.update(wide, state.inner_state, trees.widen(params), **offered)[0]
        )
        return trees.map_inexact(_negative_zeros, updates)

    def apply(
        self, backward: Backward, state: LossScaledState, params: Params, extra: dict[str, object]
    ) -> tuple[Params, LossScaledState]:
        """Return the parameters and the state after the step.

        Args:
            backward: its gradients have the tree structure of `params`.
            state: the state before the step, checked.
            params: the parameters before the step.
            extra: arguments for the inner optimizer.
        """

        def applied(updates: object, params: object) -> object:
            return optax.apply_updates(params, jax.tree.map(_without_float0, updates))

        return self._step(backward, state, params, extra, applied, params)

    def _step(
        self,
        backward: Backward,
        state: LossScaledState,
        params: object,
        extra: dict[str, object],
        applied: Callable[[object, object], object],
        skipped: Result,
    ) -> tuple[Result, LossScaledState]:
        """Return what `applied` makes of updates and float32 parameters, or `skipped`, in one conditional."""
        if self.names:
            axes.check_bound(self.names)
        leaves, rebuild = trees.split(backward.gradients)
        loss = as_loss(backward.loss, "value")
        guard = self._guard_told(backward, loss)
        measured, size = measure(self.policy, leaves, backward.scale, self.names, loss, backward.loss_names)
        assert measured.loss is not None
        inverse = 1.0 / backward.scale.astype(size.norm.dtype)
        # The state's scalars are copies, since donated buffers must not alias.
        stored = measured._replace(scale=measured.scale + 0.0, grad_norm=size.norm.astype(jnp.float32))
        judged, taken = None, measured.finite
        if guard is not None and state.guard is not None:
            judged = judge(guard, state.guard.state, stored, jnp.where)
            taken = judged.taken
        scaler_state, _ = advance(self.policy, state.scaler_state, stored, jnp.where, judged)

        def take() -> tuple[Any, object]:
            whole = backward.finish(leaves) if backward.finish else leaves
            plain = clipped = rebuild(multiply(whole, inverse))
            if self.max_norm is not None:
                first, second = size.clip(self.max_norm, inverse)
                clipped = rebuild(multiply(multiply(whole, first), second))
            # Line searches ask for the gradient of the loss, before clipping. If unused, the compiler
            # drops it.
            offered = {"grad": plain, **extra}
            wide = trees.widen(params)
            updates, inner = self._inner_update(clipped, state.inner_state, wide, offered)
            return trees.cast_like(applied(updates, wide), skipped), inner

        def skip() -> tuple[Any, object]:
            return skipped, state.inner_state

        if isinstance(taken, jax.core.Tracer):
            result, inner = jax.lax.cond(taken, take, skip)
        else:
            result, inner = take() if taken else skip()  # known now: nothing is compiled
        if guard is not None and scaler_state.guard is not None:
            used, record = jnp.float32(jnp.nan), scaler_state.guard
            if "loss" in guard.uses:
                is_known = measured.loss != UNKNOWN_LOSS
                used = jnp.where(is_known, measured.loss, jnp.nan)
                # The only trace of a loss that was missing, which `last_step` warns of.
                record = record._replace(loss_fits=record.loss_fits & is_known)
            # Python numbers, such as the limit of a guard that always has the same, become arrays that vary
            # along the same axes as the others.
            record = jax.tree.map(
                lambda new, old: jnp.where(taken, new, new).astype(old.dtype),
                record._replace(loss=used),
                state.guard,
            )
            scaler_state = scaler_state._replace(guard=record)
        return result, LossScaledState(**scaler_state._asdict(), inner_state=inner, loss=measured.loss)

    def _guard_told(self, backward: Backward, loss: Array) -> Guard[Any] | None:
        """Return the guard, or one that tolerates a missing loss if it is not known yet whether there is one.

        Raises:
            UsageError: if the guard uses the loss and the loss is known to be missing.
        """
        if self.guard is None or "loss" not in self.guard.uses or backward.loss_is_known:
            return self.guard
        is_missing = backward.loss is None
        if not isinstance(loss, jax.core.Tracer):  # an eager step, which reads whether it is taken as well
            is_missing = float(loss) == UNKNOWN_LOSS
        if is_missing:
            raise UsageError(
                f"{self.guard!r} uses the loss, and these gradients come without it: they were made by hand, "
                "mapped, or differ between the devices of a shard_map. Write update(scaled, opt_state, "
                "params, value=loss), or apply_gradients(optimizer, scaled, opt_state, params, value=loss); "
                "for flax.nnx.Optimizer optimizer.update(model, scaled.gradients, loss_scale=scaled.scale, "
                "value=loss). step(loss_fn, optimizer) does it for you."
            )
        return _WhereKnown(self.guard)

    def _inner_update(
        self, gradients: object, inner_state: object, params: object, extra: dict[str, object]
    ) -> tuple[object, object]:
        """Return the inner optimizer's updates and its state, in the dtypes that the state had.

        Raises:
            UsageError: for a state that does not belong to these parameters.
        """
        like = params if params is not None else gradients
        try:
            updates, after = self.inner.update(gradients, inner_state, params, **self._accepted(extra))
            after = trees.cast_like(after, inner_state)
        except UsageError:
            raise
        except Exception as error:
            if isinstance(error, TypeError) and "required keyword-only" in str(error):
                raise UsageError(
                    f"the optimizer inside loss_scaled needs more arguments: {error}. Write "
                    "step(loss_fn, optimizer), which passes them, or apply_gradients(optimizer, scaled, "
                    "opt_state, params, value=value, value_fn=lambda params: loss_fn(params, ...))."
                ) from error
            _check_inner_state(error, self.inner.init, like, inner_state)
            raise
        if list(map(jnp.shape, jax.tree.leaves(after))) != list(map(jnp.shape, jax.tree.leaves(inner_state))):
            _check_inner_state(
                None, self.inner.init, like, inner_state
            )  # a leaf of another shape was broadcast
        return updates, after

    def _accepted(self, extra: dict[str, object]) -> dict[str, object]:
        """Return arguments without those that we offer to every optimizer but that this one does not take."""
        taken = inspect.signature(self.inner.update).parameters
        if inspect.Parameter.VAR_KEYWORD in [parameter.kind for parameter in taken.values()]:
            return extra
        return {name: value for name, value in extra.items() if name not in OFFERED or name in taken}

    def check_state(self, state: object) -> LossScaledState:
        """Return a state after checking that optimizer, policy and dtypes are those of this object."""
        state = check(state)
        self._check_guard(state)
        if (state.peak is not None) != self.policy.needs_peak or type(state.policy_state) is not type(
            self.policy.start()
        ):
            raise UsageError(
                f"the loss scale in opt_state, {kind_of(state.policy_state)}, is not that of "
                f"{self.policy!r}: it was made by another policy. Write opt_state = "
                "restart_loss_scale(opt_state, policy), which keeps the optimizer's state and starts the "
                "policy's again; or restore with optimizer.init(params) as the template, if a file has lost "
                "the types."
            )
        return state

    def _check_guard(self, state: LossScaledState) -> None:
        """Raise for the state of another guard, and if only one of optimizer and state has a guard."""
        record, guard = state.guard, self.guard
        if record is None and guard is None:
            return
        if guard is None:
            raise UsageError(
                "opt_state has the state of a guard and the optimizer has none: spikes would not be skipped. "
                "Write loss_scaled(..., guard=guard) with the guard that it was made with, or opt_state = "
                "restart_guard(opt_state, None)."
            )
        if record is None:
            raise UsageError(
                f"opt_state has no state of {guard!r}: it was made without a guard. Write opt_state = "
                "restart_guard(opt_state, guard), which keeps everything else."
            )
        first = guard.start()
        if type(record.state) is not type(first) or _guard_shapes(record.state) != _guard_shapes(first):
            raise UsageError(
                f"the guard's state in opt_state, {kind_of(record.state)}, is not that of {guard!r}: it was "
                "made by another guard, or by the same guard with another window. Write opt_state = "
                "restart_guard(opt_state, guard), which keeps everything else; or restore with "
                "optimizer.init(params) as the template, if a file has lost the types."
            )


@dataclass(frozen=True, repr=False)
class _WhereKnown(Guard[Any]):
    """A guard whose loss may be `UNKNOWN_LOSS`: then the norm alone decides, and no loss is remembered."""

    guard: Guard[Any]

    @property
    def uses(self) -> frozenset[str]:  # type: ignore[override]  # of a class it is a constant
        return self.guard.uses

    @property
    def remembers_overflows(self) -> bool:  # type: ignore[override]
        return self.guard.remembers_overflows

    def start(self) -> Any:
        return self.guard.start()

    def judge(self, state: Any, reading: Reading, where: Where = choose) -> Verdict:
        known = self.guard.judge(state, reading, where)
        unknown = known._replace(taken=True, loss_fits=True)
        if "grad_norm" in self.uses and reading.grad_norm is not None:
            unknown = self.guard.judge(state, reading._replace(loss=None), where)
        is_known = reading.loss != UNKNOWN_LOSS
        return known._replace(
            taken=where(is_known, known.taken, unknown.taken),
            loss_fits=where(is_known, known.loss_fits, unknown.loss_fits),
        )

    def advance(self, state: Any, reading: Reading, where: Where = choose) -> Any:
        known, unknown = self.guard.advance(state, reading, where), state
        if "grad_norm" in self.uses and reading.grad_norm is not None:
            unknown = self.guard.advance(state, reading._replace(loss=None), where)
        is_known = reading.loss != UNKNOWN_LOSS
        return map_state(lambda new, old: where(is_known, new, old), known, unknown)


def backward_of(scaled: ScaledGradients, extra: dict[str, object]) -> Backward:
    """Return gradients with the loss that is recorded: the `value` that an update is given, or their own."""
    loss: object = None if scaled._lacks_loss else scaled.loss
    if extra.get("value") is not None:
        loss = extra["value"]
    names = () if loss is None else scaled._reduced_over
    return Backward(scaled.gradients, scaled.scale, loss, loss_names=names)


def with_scale(
    scaled: object, extra: dict[str, object], guard: Guard[Any] | None
) -> tuple[ScaledGradients, dict[str, object]]:
    """Return gradients with their scale, and the other arguments of the inner optimizer.

    Args:
        scaled: what an update was given as gradients.
        extra: its other arguments.
        guard: the guard of the optimizer.

    Raises:
        UsageError: for gradients without a scale, which may be scaled or not; for two scales; for
            a `value` that is not a real scalar.
    """
    others = {name: _plain(value) for name, value in extra.items() if name != "loss_scale"}
    needs_loss = guard is not None and "loss" in guard.uses
    otherwise = f"; {guard!r} uses it" if needs_loss else ", or leave it out"
    as_loss(extra.get("value"), "value", otherwise)  # before anything is computed with it
    if isinstance(scaled, ScaledGradients):
        if extra.get("loss_scale") is not None:
            raise UsageError(
                "loss_scale= was given with ScaledGradients, which carry their scale. Write update(scaled, "
                "state, params), or update(scaled.gradients, state, params, loss_scale=scale) to replace it."
            )
        return single(scaled), others
    if extra.get("loss_scale") is not None:
        return ScaledGradients(scaled, extra["loss_scale"]), others
    raise UsageError(
        f"the gradients given to loss_scaled, {kind_of(scaled)}, carry no loss scale: those "
        "of jax.grad are not scaled at all, and would be divided by the loss scale. Write value, scaled = "
        "scaled_value_and_grad(loss_fn)(opt_state, params, ...) and update(scaled, opt_state, params), or "
        "step(loss_fn, optimizer) for all of it. For a loss that was scaled by hand: "
        "ScaledGradients(gradients, scale). For flax.nnx.Optimizer: "
        "optimizer.update(model, scaled.gradients, loss_scale=scaled.scale)."
    )


def _plain(value: object) -> object:
    """Return an argument of the inner optimizer, unscaled if it is scaled gradients, such as `grad`."""
    return value.unscale() if isinstance(value, ScaledGradients) else value


def _guard_shapes(state: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, np.shape(value)) for name, value in leaves_of(state)]  # of tuples and arrays


def _negative_zeros(like: Array) -> Array:
    zero = complex(-0.0, -0.0) if jnp.issubdtype(like.dtype, jnp.complexfloating) else -0.0
    return jnp.full(like.shape, zero, like.dtype)


def _without_float0(update: Array) -> Array | np.ndarray:
    """Return an update that can be added: integers have a derivative of a dtype without arithmetic."""
    return np.zeros(update.shape, bool) if update.dtype == jax.dtypes.float0 else update


def check_gradients(gradients: object, params: object) -> None:
    """Raise unless there is a gradient of the same shape for each parameter that has one.

    Args:
        gradients: a tree.
        params: a tree; None, where an optimizer is not given any, is not checked. In `LookaheadParams` the
            fast ones have gradients.

    Raises:
        UsageError: with the first leaf that is missing, None, of another shape, or too many.
    """
    if params is None:
        return
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    if _shapes(gradients) == _shapes(params):
        return
    have, need = _leaves(gradients), _leaves(params)
    for name, parameter in need.items():
        if not is_inexact(parameter):
            continue
        where = f"params{name} has shape {jnp.shape(parameter)}"
        if have.get(name) is None:
            what = f"the gradients{name} are None" if name in have else f"the gradients have no leaf {name}"
            raise UsageError(
                f"{what}, but {where}. Write gradients and parameters as the same tree: loss_fn(params, "
                "...) has to be differentiated with respect to all that is updated."
            )
        if jnp.shape(have[name]) != jnp.shape(parameter):
            raise UsageError(
                f"the gradients{name} have shape {jnp.shape(have[name])}, but {where}. Write gradients and "
                "parameters of the same shapes."
            )
    for name in have:
        if name not in need and have[name] is not None:
            raise UsageError(
                f"the gradients have a leaf {name}, and the parameters have none there. Write gradients and "
                "parameters as the same tree."
            )


def _check_inner_state(
    error: Exception | None, init: Callable[..., object], params: object, state: object
) -> None:
    """Explain what is wrong with an inner optimizer's state, if it does not belong to these parameters.

    Args:
        error: what the inner optimizer raised.
        init: the `init` of the inner optimizer.
        params: the parameters, in float32 where they were narrower.
        state: the state of the inner optimizer.

    Raises:
        UsageError: with the first leaf that is missing, or not as `init` makes it.
    """
    try:
        expected = _leaves(jax.eval_shape(init, params))
    except Exception:  # an optimizer that cannot say; the error that was raised stands
        return
    given = _leaves(state)
    for name in [*expected, *given]:
        ours, theirs = expected.get(name), given.get(name)
        if _what(ours) != _what(theirs):
            raise UsageError(
                f"opt_state.inner_state{name} is {_what(theirs)}, but for these parameters it must be "
                f"{_what(ours)}: the state belongs to other parameters or to another optimizer, or lost its "
                "types in a file. Write optimizer.init(params), or restore with it as the template."
            ) from error


def _leaves(tree: object) -> dict[str, Any]:
    """Return the leaves of a tree by their paths; None is one."""
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def _shapes(tree: object) -> tuple[Any, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(leaf) for leaf in leaves if hasattr(leaf, "shape")]


def _what(leaf: object) -> str:
    return "missing" if leaf is None else f"of shape {getattr(leaf, 'shape', ())}"
