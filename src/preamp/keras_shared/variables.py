"""A scaler's state in variables, as with Keras and tf_keras: their names, one step, and loaded values.

Keras, tf_keras and `tf.train.Checkpoint` save such variables like any other, and may load anything into them.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from preamp import scaling
from preamp.checks import level_of_caller
from preamp.errors import PolicyError
from preamp.guards import Guard
from preamp.guards.base import dump_state, leaves_of, map_state
from preamp.guards.skips import SkipsInARow
from preamp.policy import Policy, Where, choose
from preamp.scaling import GuardRecord, Measured, ScalerState
from preamp.systems.arguments import check_counts, check_resumed, is_out_of_bounds, warn_if_out_of_bounds

COUNTS = ("steps", "skipped_steps")
POLICY, GUARD = "policy_state.", "guard.state."  # begin the paths of their own states in a `ScalerState`

# The names in files, by the path in a `ScalerState`. A policy's and a guard's own numbers keep their names.
NAMES = {
    "finite": "last_finite",
    "grad_norm": "last_grad_norm",
    "amax": "last_peak",
    "guard.taken": "last_taken",
    "guard.loss": "last_loss",
    "guard.loss_fits": "last_loss_fits",
    "guard.limit": "last_limit",
}
TRACKED_GUARD = "guard_"  # begins the name of the object that has a guard's state in a `tf.train.Checkpoint`
OTHER_GUARD = (
    "the saved state belongs to another guard, or to the same guard with another window. To resume from it "
    "write guard= as in the run that saved it."
)
THROUGH = ("keras", "tensorflow", "tf_keras", "torch")  # packages between this one and the user's code

S = TypeVar("S", bound=Any)  # a policy's state, a NamedTuple of floats
V = TypeVar("V", bound=Any)  # a variable
Number = float | tuple[float, ...]  # of the host: a scalar, or the entries of a vector


class StateVariables(Generic[S, V]):
    """A `ScalerState` in variables, one for each number and each vector: saved and traced like any other.

    Not one vector for all: users assign to some by Keras's names, and checkpoints restore each by its own.

    Args:
        policy: the rule in force.
        guard: the rule that skips spikes, if there is one.
        make: makes a variable from a name and the first value. `COUNTS` are integers.
        read: returns a variable's value in a program that is being compiled, in float32.
        write: sets a variable to a value, of the host or of such a program.
        add: adds to an integer variable.
        names: names by path, in addition to `NAMES`.
        remedy: what to write to start inside the policy's bounds, with `{bound}` in place of the number.

    Attributes:
        policy: the rule in force. It may be replaced by one with the same kind of state.
        guard: the rule that skips spikes, if there is one.
        variables: all of them, by their path in a `ScalerState`, such as "policy_state.scale".
        names: their names in files, by path.
        scalars: those that are not vectors. The policy's are the first, `COUNTS` the last.
        state: a `ScalerState` of them.
    """

    def __init__(
        self,
        policy: Policy[S],
        guard: Guard[Any] | None,
        make: Callable[[str, Number], V],
        read: Callable[[V], Any],
        write: Callable[[V, Any], Any],
        add: Callable[[V, Any], Any],
        names: Mapping[str, str],
        remedy: str,
    ) -> None:
        self.policy, self.guard = policy, guard
        self._read, self._write, self._add, self._remedy = read, write, add, remedy
        self._start = scaling.start(policy, takes_norm=True, guard=guard)
        self._known = self._start.policy_state  # the last state that was computed, loaded or checked
        self._is_outside = self._is_compiled = False
        self._skips = None if guard is None else SkipsInARow(guard)
        first = {path: value for path, value in leaves_of(self._start) if value is not None}
        paths = sorted(first, key=lambda path: (path in COUNTS, path.startswith(GUARD)))
        known = {**NAMES, **names}
        self.names = {p: known.get(p, p.removeprefix(POLICY).replace(GUARD, "guard.")) for p in paths}
        self.variables = {path: make(name, first[path]) for path, name in self.names.items()}
        self.scalars = {p: one for p, one in self.variables.items() if not isinstance(first[p], tuple)}
        self.state: ScalerState[Any, V] = self.with_values(self.variables)

    @property
    def guard_leaves(self) -> dict[str, V]:
        """The variables of the guard's own state, by name."""
        return {self.names[path]: one for path, one in self.variables.items() if path.startswith(GUARD)}

    @property
    def used(self) -> dict[str, V]:
        """The variables, by path, that a step starts from: not those of the last step's record."""
        used = (POLICY, GUARD, *(["exhausted"] if self.policy.gives_up else []))
        return {path: variable for path, variable in self.variables.items() if path.startswith(used)}

    def with_values(self, values: Mapping[str, Any]) -> ScalerState[Any, Any]:
        """Return a state with values by path, and None elsewhere."""
        paths = iter([path for path, _ in leaves_of(self._start)])
        state: ScalerState[Any, Any] = map_state(lambda _: values.get(next(paths)), self._start)
        return state

    def before_step(self, values: Mapping[str, Any] | None = None) -> ScalerState[Any, Any]:
        """Return the state that `judge` and `advance` start from. Its counts are 0.

        Args:
            values: on the host those of `used`, the policy's first; with others, what stays is not written.
                None: those of a program that is being compiled.

        Raises:
            PolicyError: as `check`.
        """
        if values is None:
            values = {path: self._read(variable) for path, variable in self.used.items()}
        else:
            self.check(list(values.values()))
        return self.with_values({**values, **dict.fromkeys(COUNTS, 0)})

    def judge(
        self, before: ScalerState[Any, Any], measured: Measured[Any], where: Where = choose
    ) -> GuardRecord[Any] | None:
        """Return what the guard decides; None without a guard."""
        if self.guard is None or before.guard is None:
            return None
        self._is_compiled = where is not choose
        return scaling.judge(self.guard, before.guard.state, measured, where)

    def advance(
        self,
        before: ScalerState[Any, Any],
        measured: Measured[Any],
        judged: GuardRecord[Any] | None,
        where: Where = choose,
    ) -> list[Any]:
        """Write the state after a step, and return what `write` and `add` returned.

        Args:
            before: from `before_step`.
            measured: what was measured in the gradients.
            judged: from `judge`.
            where: the framework's ``where(condition, yes, no)`` in a program that is being compiled.

        Raises:
            ScaleExhausted: on the host, after writing, if the policy gives up on this step.
        """
        after, gave_up = scaling.advance(self.policy, before, measured, where, judged)
        old, written = dict(leaves_of(before)), []
        for path, new in leaves_of(after):
            if new is old[path] or (where is choose and new == old[path]):
                continue
            change = self._add if path in COUNTS else self._write
            written.append(change(self.variables[path], new))
        if where is choose:
            self._known = after.policy_state
            if self._skips is not None and judged is not None:
                self._skips.note(bool(judged.taken), measured.finite, *THROUGH)
            if gave_up:
                raise self.policy.exhaustion_from(before.policy_state)
        return written

    def note_compiled(self, taken: bool, finite: bool) -> None:
        """Note a step of a compiled program that has been read, for the warning of a guard that skips all.

        Steps that are decided on the host have been noted there.
        """
        if self._skips is not None and self._is_compiled:
            self._skips.note(taken, finite, *THROUGH)

    def check(self, numbers: Sequence[float]) -> None:
        """Check a state that was restored past `load`, as `tf.train.Checkpoint` and `Variable.assign` do.

        Args:
            numbers: the policy's, and maybe further ones after them.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.

        Warns:
            UserWarning: once, for a scale outside the policy's bounds.
        """
        state = type(self._known)(*numbers[: len(self._known)])
        if state == self._known:
            return
        scale = self.policy.restore(state._asdict()).scale
        was_outside, self._is_outside = self._is_outside, is_out_of_bounds(self.policy, scale)
        if self._is_outside and not was_outside:
            warn_if_out_of_bounds(self.policy, scale, self._remedy, of="optimizer")
        self._known = state

    def state_of(self, numbers: Sequence[float]) -> ScalerState[S, float]:
        """Return the state for the numbers that `scalars` hold.

        Raises:
            PolicyError: as `check`.
        """
        self.check(numbers)
        state = self.with_values(dict(zip(self.scalars, numbers, strict=True)))
        return state._replace(steps=int(state.steps), skipped_steps=int(state.skipped_steps))

    def resumed(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by path for saved values by name, perhaps of another policy or guard.

        Missing numbers of the policy start fresh, and so does a guard whose state was not saved or, with a
        warning, is that of another guard. That the policy gave up is left out: training that resumes may
        recover.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.

        Warns:
            UserWarning: for a scale outside the policy's bounds, and for a guard's state without a guard.
        """
        check_counts(saved, COUNTS)
        kept = {path: saved[name] for path, name in self.names.items() if name in saved}
        of_policy = {p.removeprefix(POLICY): value for p, value in kept.items() if p.startswith(POLICY)}
        self._known = check_resumed(self.policy, of_policy, self._remedy)
        self._is_outside = is_out_of_bounds(self.policy, self._known.scale)  # the user has been warned
        start = leaves_of(self._start._replace(policy_state=self._known, grad_norm=math.nan))
        again = (POLICY, "guard.", "exhausted", "grad_norm")
        values = {path: value for path, value in start if path.startswith(again)}
        values |= {path: value for path, value in kept.items() if not path.startswith((POLICY, "exhausted"))}
        if self.guard is not None:
            state = leaves_of(_resumed_guard(self.guard, saved))
            values |= {f"{GUARD}{path}": value for path, value in state}
        elif any(name.startswith(("guard.", NAMES["guard.taken"])) for name in saved):
            _warn_of_dropped_guard()
        return values

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set the variables to saved values, as `resumed` returns them."""
        for path, value in self.resumed(saved).items():
            if path in self.variables:
                self._write(self.variables[path], value)


def checkpoint_key(guard: Guard[Any]) -> str:
    """Return the name that the state of a guard has in a `tf.train.Checkpoint`.

    TensorFlow restores variables by name, and fails if the shape differs. So the name depends on the names
    and lengths in the state: no part of the state of another guard is restored into this one's.
    """
    lengths = [(name, len(leaf) if isinstance(leaf, tuple) else 0) for name, leaf in leaves_of(guard.start())]
    return f"{TRACKED_GUARD}{zlib.crc32(repr(lengths).encode()):08x}"


def warn_if_other_guard(guard: Guard[Any] | None, name: str) -> None:
    """Warn if a name in a `tf.train.Checkpoint` is that of a guard's state which is not restored.

    Args:
        guard: the rule, if there is one.
        name: any name in the checkpoint; others are ignored.
    """
    if not name.startswith(TRACKED_GUARD):
        return
    if guard is None:
        _warn_of_dropped_guard()
    elif name != checkpoint_key(guard):
        warnings.warn(
            f"The state of {guard!r} is not restored: {OTHER_GUARD}", stacklevel=level_of_caller(*THROUGH)
        )


def _warn_of_dropped_guard() -> None:
    """Warn that the saved state of a guard is ignored, because this optimizer has no guard."""
    warnings.warn(
        "The checkpoint holds the state of a guard, and this optimizer has none: spikes are not skipped. "
        "Write LossScaleOptimizer(..., guard=SpikeGuard()), with the guard that was saved, and load again.",
        stacklevel=level_of_caller(*THROUGH),
    )


def _resumed_guard(guard: Guard[Any], saved: Mapping[str, Any]) -> Any:
    """Return the guard's state for saved values by name, vectors as lists; other names are ignored.

    The guard starts fresh if no state was saved, and, with a warning, if the state is that of another guard.
    """
    start = guard.start()
    names = [f"guard.{path}" for path, _ in leaves_of(start)]
    given = {name for name in saved if str(name).startswith("guard.")}
    if given == set(names):
        remaining = iter(names)
        state = map_state(lambda _: saved[next(remaining)], start)
        with suppress(PolicyError):  # of another window
            return guard.restore(dump_state(state))
    if given:
        warnings.warn(f"{guard!r} starts again: {OTHER_GUARD}", stacklevel=level_of_caller(*THROUGH))
    return start
