"""Convert a saved loss scale from one system's checkpoint file to another's, without executing any code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from preamp.policy import Policy, Tolerant
from preamp.systems.convert.reading import read
from preamp.systems.convert.searching import find
from preamp.systems.convert.writing import check_name, write
from preamp.systems.definition import IN_WORDS, Dialect, brief, unused_of
from preamp.systems.formats import compat_of

__all__ = ["Conversion", "convert"]


class Conversion(NamedTuple):
    """The result of a conversion.

    Attributes:
        where: the place in the file where the state was found.
        state: the state that was converted.
        policy: the policy that was saved with it, with the origin's defaults for what was not saved.
        lost: what the target's format cannot hold, as text.
        equal: the other places in the file where the same state was found.
        assumed: the settings that the origin's checkpoints do not hold, as "name=default".
        guards: the number of optimizers for which a guard's state was carried.
    """

    where: str
    state: Any
    policy: Policy[Any]
    lost: list[str]
    equal: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    guards: int = 0

    @property
    def counts(self) -> dict[str, float]:
        """The numbers of the state, by names for people. "clean steps" are those that count towards a growth.

        A conversion does not change them, even between a system that counts every clean step and one that
        does not count the first after an overflow, such as DeepSpeed.
        """
        counts: dict[str, float] = self.state._asdict()
        counts["good"] = max(counts["good"] - compat_of(self.policy).growth_delay, 0.0)
        return {IN_WORDS.get(name, name): value for name, value in counts.items()}


def convert(source: Path, origin: Dialect[...], out: Path, target: Dialect[...]) -> Conversion:
    """Read a loss scale as one system saved it and write it as another loads it.

    Args:
        source: a checkpoint file, or the folder of a DeepSpeed checkpoint, or the prefix of a TensorFlow one.
            The state may be anywhere in it.
        origin: the dialect that saved it.
        out: the file to write, `.pt`, `.json` or `.msgpack`, which must not exist.
        target: the dialect that will load it.

    Raises:
        CheckpointError: for a file that cannot be read, or holds no such state, or several that differ.
        PolicyError: for a rule that the target does not have.
        UsageError: for an `out` that exists, or has another suffix.
        MissingExtra: if the library that reads or writes such files is absent.
        OSError: for a file that cannot be opened or written.
    """
    check_name(out)
    found = find(read(source), origin, source)
    entries, lost = target.dump_and_tell(found.state, found.policy)
    carried = None
    if found.remembered and origin.format is target.format:
        carried = target.known_format().with_remembered(entries, found.remembered)
    if carried is None:
        lost += _uncounted(found.state, found.policy) + _left_out(found.remembered)
    guarded = target.known_format().with_guards(carried or entries, found.guards) if found.guards else None
    if found.guards and guarded is None:
        lost.append(_of_guards(found.guards))
    write(out, guarded or carried or entries, target)
    assumed = tuple(f"{name}={brief(value)}" for name, value in origin.unsaved_arguments().items())
    if found.remembered and carried is None:
        assumed += _unsaved_of_policy(origin, found.policy)
    guards = 0 if guarded is None else len(found.guards)
    return Conversion(found.where, found.state, found.policy, lost, found.equal, assumed, guards)


def _uncounted(state: Any, policy: Any) -> list[str]:
    """List what our own adapters counted for a policy that is not in the checkpoint."""
    counts_overflows = getattr(policy, "hysteresis", 1) > 1 or isinstance(policy, Tolerant)
    if counts_overflows or state.bad <= 0:
        return []
    return [f"{IN_WORDS['bad']}={state.bad:g} (counted for a policy that the checkpoint does not hold)"]


def _unsaved_of_policy(origin: Dialect[...], policy: Any) -> tuple[str, ...]:
    """List what our own adapters take from a policy and the origin's checkpoints cannot hold."""
    form, start = origin.known_format(), policy.start()
    others = {"hysteresis": 2, "min_scale": 2.0**-20, "max_scale": 2.0**40}
    others = {name: other for name, other in others.items() if hasattr(policy, name)}
    saved = form.save(start, policy)
    return tuple(
        f"{name}={brief(getattr(policy, name))}"
        for name, other in others.items()
        if form.save(start, replace(policy, **{name: other})) == saved
    )


def _left_out(remembered: Mapping[str, Any]) -> list[str]:
    """List what our own adapter saved and the target cannot hold."""
    steps = [f"steps={remembered['steps']:g}"] if remembered.get("steps") else []
    return [f"{name} (only preamp saves this)" for name in unused_of(remembered) + steps]


def _of_guards(guards: Sequence[object]) -> str:
    """Name the states of a guard that the target cannot hold."""
    whose = f" for {len(guards)} optimizers" if len(guards) > 1 else ""
    return f"the guard's state{whose} (only preamp saves this)"
