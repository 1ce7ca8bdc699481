"""The class of dialects: a known system's policy, with its own argument names, and its saved state.

The systems' policies are in `dialects`, their checkpoint formats in `formats`.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Generic, ParamSpec

from preamp.checks import FLOAT32_MAX, FLOAT32_TINY, ROUND, level_of_caller
from preamp.errors import CheckpointError, InexactScale, LossyConversion, PolicyError
from preamp.policy import Bounded, Dynamic, Moving, Policy, Reading, Static, Tolerant, Where, choose
from preamp.systems.formats import Format, backoff_factor, compat_of, hysteresis

__all__ = ["IN_WORDS", "Dialect", "brief", "dialect", "unused_of"]

SHARED = ("scale", "good", "bad", "steps")  # steps: of the run, not part of a policy's state
# The counts of a state, for messages.
IN_WORDS = {"good": "clean steps", "bad": "overflows", "age": "steps"}

P = ParamSpec("P")


class Dialect(Policy[Any], Generic[P]):
    """A known system's policy, with that system's defaults; calling it takes the system's own arguments.

    Attributes:
        name: the name in `dialects`, such as "TORCH".
        system: the system, and the release whose rule this is.
        odd: known pitfalls, in one line.
        format: how the system saves its loss scale; None if that is not supported.
        policy: the policy with the system's defaults.
    """

    def __init__(
        self, make: Callable[P, Policy[Any]], system: str, odd: str, format: Format | None = None
    ) -> None:
        self._make = make
        self.name: str = make.__name__
        self.__module__ = make.__module__  # where a pickle looks for the name
        self.system = system
        self.odd = odd
        self.format = format
        self.__doc__ = f"{system}. {odd}"
        self.policy: Policy[Any] = self(*(), **{})  # type: ignore[call-arg]  # every argument has a default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Policy[Any]:
        """Return the policy for the system's own arguments."""
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # the original rounds as well
            return self._make(*args, **kwargs)

    def __repr__(self) -> str:
        return f"dialects.{self.name}"

    def __reduce__(self) -> str:
        return self.name  # pickled as the name it has in its module

    def start(self) -> Any:
        return self.policy.start()

    def advance(self, state: object, reading: Reading, where: Where = choose) -> Any:
        return self.policy.advance(state, reading, where)

    def exhausted(self, state: object, after: object, reading: Reading, where: Where = choose) -> Any:
        return self.policy.exhausted(state, after, reading, where)

    def _remedy(self) -> str:
        return self.policy._remedy()

    def load(self, saved: object, policy: Policy[Any] | None = None) -> Any:
        """Return the state from which the system would have resumed.

        Args:
            saved: what the system saves, such as a `state_dict`: a mapping by name, or an object with such
                attributes. Numbers may be scalars of any framework.
            policy: a policy of this dialect, for settings that the system does not save. Default: its own.

        Returns:
            The state, for the policy that `load_policy` returns for the same arguments.

        Raises:
            CheckpointError: for something that the system does not save, or could not resume from.
            PolicyError: for invalid saved settings.

        Warns:
            LossyConversion: for what preamp saved besides the system's entries, if a state of this dialect
                cannot hold it, such as the memory of a `Headroom` or the state of a guard.
        """
        state = self.load_quietly(saved, policy)
        entries = self._entries(saved)
        unused = unused_of(self.known_format().remembered(entries))
        if unused:
            warnings.warn(
                f"this was saved with a policy that {self.system} does not have, and {', '.join(unused)} is "
                "left out. To continue with that policy, load it into the adapter that saved it.",
                LossyConversion,
                stacklevel=level_of_caller(),
            )
        if self.known_format().guards(entries):
            warnings.warn(
                f"this was saved with a guard, and the guard's state is left out: a state of {self!r} has "
                "the loss scale alone. To continue with the guard, load it into the adapter that saved it.",
                LossyConversion,
                stacklevel=level_of_caller(),
            )
        return state

    def load_quietly(self, saved: object, policy: Policy[Any] | None = None) -> Any:
        """Return what `load` returns, without a warning."""
        rule = self.load_policy(saved, policy)
        state = self.known_format().state(self._entries(saved), rule)
        return state._replace(scale=self._usable(state.scale, rule))

    def load_policy(self, saved: object, policy: Policy[Any] | None = None) -> Policy[Any]:
        """Return the policy that was saved, with the first scale of `policy`.

        Arguments and errors are those of `load`.
        """
        with warnings.catch_warnings(action="ignore", category=InexactScale):
            return self.known_format().policy(self._entries(saved), self._or_own(policy))

    def dump(self, state: object, policy: Policy[Any] | None = None) -> dict[str, Any]:
        """Return the entries from which the system resumes at a state, as `load` takes them.

        Args:
            state: a state of `policy`: numbers, or scalars of any framework.
            policy: the settings to write, of this dialect or any other. Default: its own.

        Raises:
            CheckpointError: for a scale that the system cannot store.
            PolicyError: for a rule that the system does not have.

        Warns:
            LossyConversion: for what the system does not save, or does differently.
        """
        saved, lost = self.dump_and_tell(state, policy)
        if lost:
            warnings.warn(
                f"what {self.system} saves has no place for {', '.join(lost)}. "
                "If that system has settings for these, configure them there.",
                LossyConversion,
                stacklevel=level_of_caller(),
            )
        return saved

    def dump_and_tell(
        self, state: Any, policy: Policy[Any] | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return what `dump` returns and, instead of a warning, what is lost."""
        form, original = self.known_format(), self._or_own(policy)
        given = _nearest_rule(original)
        if not isinstance(given, Moving) and not (isinstance(given, Static) and form.has_static):
            raise PolicyError(
                f"policy={policy!r} is not a rule that {self.system} has. Write {self!r} instead."
            )
        state = type(state)(*map(float, state))
        kept = _counted_as(self.policy, state, given)
        kept = kept._replace(scale=self._usable(kept.scale, self.policy))
        saved = form.save(kept, given)
        rule, there = self.load_policy(saved), self.load_quietly(saved)
        lost = _unknown_rule(original) + _unknown_memory(state, given)
        lost += _lost({"scale": state.scale}, {"scale": there.scale})
        lost += _lost_settings(state, given, rule)
        before = _counts(given, kept)
        if hysteresis(given) != hysteresis(rule):  # listed already, and it implies this one
            before.pop("overflows_left", None)
        return saved, lost + _lost(before, _counts(rule, there))

    def unsaved_arguments(self) -> dict[str, Any]:
        """Return the arguments that affect the rule but are not saved by the system, with their defaults.

        >>> from preamp.systems.dialects import APEX
        >>> APEX.unsaved_arguments()
        {'scale_window': 2000, 'min_loss_scale': None, 'max_loss_scale': 16777216.0}
        """
        form, own = self.known_format(), self.policy
        saved = form.save(own.start(), own)
        unsaved = {}
        for name, parameter in inspect.signature(self._make).parameters.items():
            for other in self._with_another(name, parameter.default):
                if form.save(own.start(), other) == saved:
                    unsaved[name] = parameter.default
        return unsaved

    def _with_another(self, name: str, default: Any) -> Iterator[Policy[Any]]:
        """Yield the rule with another value of one argument, if that makes a difference."""
        if isinstance(default, bool):
            values: list[Any] = [not default]
        else:
            values = [2 * default, default / 2] if default else [0.25, 4.0]
        for value in values:
            try:
                other: Policy[Any] = self(*(), **{name: value})  # type: ignore[call-arg]
            except PolicyError:  # a backoff of 1, a fixed scale that is not given
                continue
            if type(other) is type(self.policy) and _settings(other) != _settings(self.policy):
                yield other
                return

    def known_format(self) -> Format:
        """Return `format`.

        Raises:
            CheckpointError: if there is none.
        """
        if self.format is None:
            raise CheckpointError(
                f"how {self.system} saves its loss scale is not known to preamp. "
                "Write State(scale=..., good=0.0, bad=0.0) with the scale that it saved."
            )
        return self.format

    def _entries(self, saved: object) -> Mapping[str, Any]:
        form = self.known_format()
        entries = form.find(saved)
        if entries is None:
            names = ", ".join(form.entries)
            raise CheckpointError(
                f"this is not what {self.system} saves, which has the entries {names}. "
                f"Write {self!r}.load(part) with the part of the checkpoint that has them."
            )
        return entries

    def _or_own(self, policy: Policy[Any] | None) -> Policy[Any]:
        if policy is None:
            return self.policy
        return policy.policy if isinstance(policy, Dialect) else policy

    def _usable(self, scale: float, policy: Policy[Any]) -> float:
        """Return a scale as it is stored, if gradients survive it."""
        stored = ROUND[compat_of(policy).scale_dtype](scale)
        if not 0.0 < stored < math.inf:
            raise CheckpointError(
                f"{self.system} cannot resume from a loss scale of {scale!r}: no gradient would survive. "
                f"Write {self!r}.start() to start again."
            )
        return stored


def dialect(
    system: str, odd: str, format: Format | None = None
) -> Callable[[Callable[P, Policy[Any]]], Dialect[P]]:
    """Turn a function of a system's own arguments into a `Dialect`."""
    return lambda make: Dialect(make, system, odd, format)


def _nearest_rule(policy: Policy[Any]) -> Policy[Any]:
    """Return a `Bounded` rule that no other system has as the `Dynamic` with its factors and bounds."""
    if isinstance(policy, Moving) or not isinstance(policy, Bounded):
        return policy
    shared = {field.name: getattr(policy, field.name) for field in fields(Bounded)}
    with warnings.catch_warnings(action="ignore", category=InexactScale):
        return Dynamic(**shared)


def _counted_as(own: Policy[Any], state: Any, given: Policy[Any]) -> Any:
    """Return a state of `given` with as many clean steps left to a growth as `state` has under `own`.

    Rules differ in how many clean steps they leave uncounted at the start.
    """
    theirs, ours = compat_of(given).growth_delay, compat_of(own).growth_delay
    return state if theirs == ours else state._replace(good=max(state.good - theirs + ours, 0.0))


def _lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """List what differs after a conversion."""
    return [
        f"{name}={brief(value)} (becomes {brief(after[name])}{_consequence(name, value, after[name])})"
        for name, value in before.items()
        if value != after.get(name, value)
    ]


def brief(value: object) -> str:
    """Write a setting, the ends of float32's range with two digits."""
    return f"{value:.2g}" if value in (FLOAT32_MAX, FLOAT32_TINY) else repr(value)


def _consequence(name: str, here: Any, there: Any) -> str:
    """Explain a difference whose name is not enough."""
    if name != "growth_delay":
        return ""
    steps = abs(there - here)
    when = "later" if there > here else "sooner"
    return f": after an overflow the scale grows {steps} clean step{'s' if steps > 1 else ''} {when}"


def unused_of(remembered: Mapping[str, Any]) -> list[str]:
    """List what was remembered for another policy, except numbers that are still 0."""
    left = {name: value for name, value in remembered.items() if name not in SHARED and value}
    return [f"{name}={value!r}" for name, value in left.items()]


def _unknown_rule(policy: Policy[Any]) -> list[str]:
    """List a rule that no other system has, of which only the common settings are converted."""
    known = isinstance(policy, Dynamic | Tolerant | Static)
    return [] if known else [f"policy={policy!r} (becomes Dynamic)"]


def _unknown_memory(state: Any, policy: Policy[Any]) -> list[str]:
    """List what a state holds besides the numbers that every rule has."""
    counted = ("age",) if isinstance(policy, Tolerant) else ()
    named = {name: value for name, value in state._asdict().items() if name not in counted}
    return unused_of({name: float(value) for name, value in named.items()})


def _lost_settings(state: Any, given: Policy[Any], rule: Policy[Any]) -> list[str]:
    """List the settings of `given` that differ in `rule`, if the scale can then move differently."""
    before, after = _settings(given), _settings(rule)
    if isinstance(given, Moving) and isinstance(rule, Moving):
        is_exact = math.frexp(before["backoff_factor"])[0] == 0.5
        if before["backoff_factor"] == after["backoff_factor"] and not is_exact:
            # scale / 3 and scale * (1 / 3) are not the same in the last bit
            before["backoff_divisor"] = given.compat.backoff_divisor
            after["backoff_divisor"] = rule.compat.backoff_divisor
        other_dtype = given.compat.scale_dtype != rule.compat.scale_dtype
        if other_dtype and {given.max_scale, rule.max_scale} == {FLOAT32_MAX, None}:
            del before["max_scale"]  # it follows from scale_dtype, which is listed
        bounds = ((policy.min_scale or 0.0, policy.max_scale or math.inf) for policy in (given, rule))
        if not all(low <= state.scale <= high for low, high in bounds):
            before["bounds"], after["bounds"] = given.compat.bounds, rule.compat.bounds
    return _lost(before, after)


def _settings(policy: Policy[Any]) -> dict[str, Any]:
    """Return the settings that determine how the scale moves, in the same terms for all rules."""
    if not isinstance(policy, Moving):
        return policy.get_config()
    settings = {
        "growth_factor": policy.growth_factor,
        "backoff_factor": backoff_factor(policy),
        "growth_interval": policy.growth_interval,
        "growth_delay": policy.compat.growth_delay,
        "hysteresis": hysteresis(policy),
        "tolerance": getattr(policy, "tolerance", 0.0),
        "max_consecutive_overflows": getattr(policy, "max_consecutive_overflows", None),
        "min_scale": policy.min_scale,
        "max_scale": policy.max_scale,
        "at_floor": policy.at_floor,
        "raise_on_arrival": policy.compat.raise_on_arrival and policy.at_floor == "raise",
        "scale_dtype": policy.compat.scale_dtype,
    }
    if policy.max_scale is not None:
        settings["at_ceiling"] = policy.compat.at_ceiling
    if isinstance(policy, Dynamic) and policy.hysteresis > 1:
        settings["hysteresis_reset"] = policy.hysteresis_reset
    return settings


def _counts(policy: Policy[Any], state: Any) -> dict[str, int]:
    """Return the counts in a state that the next moves depend on."""
    if not isinstance(policy, Moving):
        return {}
    if isinstance(policy, Tolerant):
        return {IN_WORDS[name]: int(getattr(state, name)) for name in ("good", "bad", "age")}
    if isinstance(policy, Dynamic):
        return {IN_WORDS["good"]: int(state.good), "overflows_left": policy.overflows_left(state)}
    return {IN_WORDS["good"]: int(state.good)}
