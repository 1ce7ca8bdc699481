"""Save and load the state of an engine.

All ranks call, rank 0 writes, and a checkpoint that does not fit is refused before anything is changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from preamp.checks import level_of_caller
from preamp.deepspeed.engine.checkpoint_files import (
    LATEST,
    STATES,
    check_loadable,
    first_line,
    latest,
    read,
    write,
)
from preamp.deepspeed.overflow_log import LOGGER
from preamp.deepspeed.ranks import all_agree, unlike
from preamp.errors import CheckpointError, PolicyError, UsageError
from preamp.guards import Guard
from preamp.systems.deepspeed_config import Settings
from preamp.torch import GradScaler, LossScaleOptimizer
from preamp.torch.scaling.loss_scale_optimizer import OURS

COUNTERS = ("global_steps", "skipped_steps", "micro_steps", "global_samples")


class Trainer(Protocol):
    """What is saved and loaded of an `Engine`, which describes the attributes."""

    module: nn.Module
    optimizer: LossScaleOptimizer | None
    lr_scheduler: Any
    settings: Settings
    device: torch.device
    global_rank: int
    world_size: int
    global_steps: int


def save(
    engine: Trainer,
    save_dir: str | os.PathLike[str],
    tag: object,
    client_state: dict[str, Any],
    *,
    save_latest: bool,
    exclude_frozen: bool,
    unfinished: int,
) -> bool:
    """Write a checkpoint; see `Engine.save_checkpoint`."""
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if name in ("", "..", LATEST) or name != Path(name.strip()).name:
        raise UsageError(
            f"tag={tag!r} cannot name a checkpoint's folder beside the file {LATEST!r}. Write tag='best'."
        )
    if unfinished:
        LOGGER.warning(
            "checkpoint %s: the gradients of %d micro-steps are not saved; training resumes before them",
            name,
            unfinished,
        )
    failure: Exception | None = None
    if engine.global_rank == 0:
        try:
            state = _state(engine, client_state, exclude_frozen, unfinished)
            check_loadable(state)
            write(Path(save_dir), name, state, save_latest)
        except Exception as error:  # any error: the other ranks wait for the result
            failure = error
    if not all_agree(failure is None, engine.device):
        raise CheckpointError(
            f"checkpoint {name!r} was not written to {str(save_dir)!r}; earlier checkpoints are unchanged. "
            f"{failure or 'See the error of rank 0.'}"
        ) from failure
    return True


def load(
    engine: Trainer,
    load_dir: str | os.PathLike[str],
    tag: object,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    module_only: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint; see `Engine.load_checkpoint`."""
    path, state = _agreed(engine, Path(load_dir), tag, strict)
    if state is None:
        LOGGER.warning("no checkpoint was loaded: there is no file %s", path)
        return None, None
    if not module_only:
        schedule = engine.lr_scheduler if scheduler else None
        _check_schedule(path, schedule, state.get("lr_scheduler"))
        if engine.optimizer is not None:
            _load_optimizer(path, engine, state, whole=optimizer)
        if schedule is not None:
            schedule.load_state_dict(state["lr_scheduler"])
        for counter in COUNTERS:
            setattr(engine, counter, state[counter])
    engine.module.load_state_dict(state["module"], strict=strict)
    return str(path), state.get("client_state", {})


def _agreed(engine: Trainer, load_dir: Path, tag: object, strict: bool) -> tuple[Path, dict[str, Any] | None]:
    """Return the path and state of a checkpoint that is the same on all ranks and fits the model.

    The state is None where no tag is given and none is the latest.
    """
    path, state, failure = load_dir / LATEST, None, None
    try:
        name = latest(load_dir) if tag is None else str(tag)
        if name is not None:
            path = load_dir / name / STATES
            state = read(path)
            _check_model(path, engine.module, state["module"], strict)
            _check_counters(path, state)
    except CheckpointError as error:
        failure = error
    numbers = state and [state[counter] for counter in COUNTERS]
    alone = unlike((path.parent.name, numbers, failure is None))
    if failure is not None:
        raise failure
    if alone:
        raise CheckpointError(
            f"ranks {alone} have a different checkpoint in {str(load_dir)!r} than rank 0. "
            "Write a directory that all of them share."
        )
    return path, state


def _state(
    engine: Trainer, client_state: dict[str, Any], exclude_frozen: bool, unfinished: int
) -> dict[str, Any]:
    weights = engine.module.state_dict()
    for name, parameter in engine.module.named_parameters():
        if exclude_frozen and not parameter.requires_grad:
            weights.pop(name, None)
    counters = {name: getattr(engine, name) for name in COUNTERS}
    counters["micro_steps"] -= unfinished
    return {
        "module": weights,
        "optimizer": None if engine.optimizer is None else engine.optimizer.state_dict(),
        "optimizer_class": _optimizer_class(engine),
        "precision": engine.settings.precision,
        "lr_scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        **counters,
        "dp_world_size": engine.world_size,
        "mp_world_size": 1,
        "client_state": client_state,
    }


def _optimizer_class(engine: Trainer) -> str | None:
    return None if engine.optimizer is None else type(engine.optimizer.inner_optimizer).__name__


def _check_model(path: Path, module: nn.Module, saved: Mapping[str, Any], strict: bool) -> None:
    """Refuse the weights of another model before anything is changed."""
    here = module.state_dict()
    wrong = [
        name
        for name, value in here.items()
        if isinstance(value, Tensor) and name in saved and getattr(saved[name], "shape", None) != value.shape
    ]
    if strict:
        wrong += [name for name in {**here, **saved} if name not in here or name not in saved]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{str(path)!r} was saved from another model: {', '.join(wrong[:3])}{more} differ. Make the "
            "model as it was then, or write load_module_strict=False for what only one of them has."
        )


def _check_counters(path: Path, state: dict[str, Any]) -> None:
    """Refuse counters that are not counts; those that DeepSpeed does not save are 0."""
    for name in COUNTERS:
        if type(state.setdefault(name, 0)) is not int or state[name] < 0:
            raise CheckpointError(f"{str(path)!r} has {name}: {state[name]!r}. Write tag= with another one.")


def _check_schedule(path: Path, scheduler: Any, saved: object) -> None:
    """Refuse the state of another kind of schedule: PyTorch would mix its attributes with this one's."""
    if scheduler is not None and (
        not isinstance(saved, dict) or saved.keys() != scheduler.state_dict().keys()
    ):
        raise CheckpointError(
            f"{str(path)!r} was saved without a {type(scheduler).__name__}. "
            "Write load_lr_scheduler_states=False to start it from the beginning."
        )


def _with_guard_of(saved: Mapping[str, Any], scaler: GradScaler) -> dict[str, Any]:
    """Return a scaler's state with the guard's that was saved. A scale fits one precision only."""
    own = scaler.state_dict()
    if scaler.guard is not None:
        guard = saved.get("preamp_state", {}).get("guard", [])
        own["preamp_state"] = {**own["preamp_state"], "guard": guard}
    return own


def _without_other_guard(saved: dict[str, Any], guard: Guard[Any] | None) -> dict[str, Any]:
    """Return a scaler's state without that of a guard which is not the engine's, and warn of it.

    `load_checkpoint` has no argument that leaves the guard out, so it starts again, and the rest is loaded.
    """
    states = saved.get("preamp_state", {}).get("guard")
    if guard is None or not isinstance(states, list | tuple):
        return saved
    try:
        for state in states:
            guard.restore(state)
    except PolicyError as error:
        warnings.warn(f"{guard!r} starts again: {error}", stacklevel=level_of_caller("torch"))
        return {**saved, "preamp_state": {**saved["preamp_state"], "guard": ()}}
    return saved


def _load_optimizer(path: Path, engine: Trainer, state: dict[str, Any], whole: bool) -> None:
    """Load the optimizer with its loss scale, or the loss scale alone; all of it or nothing."""
    optimizer: Any = engine.optimizer
    saved, theirs, ours = state.get("optimizer"), state.get("optimizer_class"), _optimizer_class(engine)
    if not isinstance(saved, dict) or OURS not in saved:
        raise CheckpointError(
            f"the optimizer in {str(path)!r} is not one of preamp's. Write load_module_only=True for the "
            "model's weights."
        )
    if whole and theirs != ours:
        raise CheckpointError(
            f"{str(path)!r} was saved with {theirs}, and this is {ours}. "
            "Write load_optimizer_states=False to start it without a state."
        )
    before = optimizer.state_dict()
    try:
        entries = dict(saved[OURS])
        if state.get("precision") != engine.settings.precision or not entries["scaler"]:
            entries["scaler"] = _with_guard_of(entries["scaler"], optimizer.scaler)
        entries["scaler"] = _without_other_guard(entries["scaler"], optimizer.scaler.guard)
        if whole:
            optimizer.load_state_dict({**saved, OURS: entries})
        else:
            optimizer.scaler.load_state_dict(entries["scaler"])
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        optimizer.load_state_dict(before)
        raise CheckpointError(
            f"the optimizer in {str(path)!r} does not fit: {first_line(error)}. "
            "Or write load_optimizer_states=False to start it without a state."
        ) from error
