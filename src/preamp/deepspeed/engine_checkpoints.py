"""What an engine leaves on disk, and how it goes on from there.

The files lie where DeepSpeed puts them: `save_dir/latest` names a tag, and
`save_dir/tag/mp_rank_00_model_states.pt` holds everything. Each is written beside its place and moved there
when it is complete, so that a save that was killed leaves the previous one whole. Nothing is executed by
loading. This room refuses to know what a loss scale is.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from preamp.deepspeed.overflow_log import LOGGER
from preamp.deepspeed.ranks import all_agree
from preamp.errors import CheckpointError
from preamp.torch.loss_scale_optimizer import OURS

if TYPE_CHECKING:
    from preamp.deepspeed.engine import Engine

__all__ = ["load", "save"]

LATEST = "latest"
STATES = "mp_rank_00_model_states.pt"
COUNTERS = ("global_steps", "skipped_steps", "micro_steps", "global_samples")


def save(
    engine: Engine,
    save_dir: Any,
    tag: Any,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    """Save the model, the optimizer with its loss scale and master weights, the schedule and the counters.

    Every rank has to call this; rank 0 writes. Random number generators are not saved, and neither are the
    gradients of an unfinished update, of which a warning is logged: training goes on with that update's
    first micro-step.

    Args:
        engine: whose state to save.
        save_dir: a directory; made if it is not there.
        tag: a name for this checkpoint. None: "global_step" and the number of updates.
        client_state: numbers, strings, tensors, lists and dicts to be handed back by `load`.
        save_latest: whether `load` without a tag is to take this one.
        exclude_frozen: leave out parameters that need no gradient; they have to be there when it is loaded.

    Returns:
        True.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write, and for a state that could not be loaded.
    """
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if engine._calls:
        LOGGER.warning(
            "checkpoint %s: the gradients of %d micro-steps are not saved; training goes on before them",
            name,
            engine._calls,
        )
    failure: Exception | None = None
    if engine.global_rank == 0:
        try:
            state = _state(engine, client_state, exclude_frozen)
            _check_loadable(state)
            _write(Path(save_dir), name, state, save_latest)
        except (OSError, RuntimeError, CheckpointError) as error:
            failure = error
    if not all_agree(failure is None, engine.device):
        raise CheckpointError(
            f"checkpoint {name!r} was not written to {str(save_dir)!r}; what was saved before is as it was. "
            f"{failure or 'See what rank 0 says.'}"
        ) from failure
    return True


def load(
    engine: Engine,
    load_dir: Any,
    tag: Any,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    module_only: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Go on from a checkpoint that `save` wrote; of DeepSpeed's own, take the model's weights.

    Args:
        engine: of the same model. It may have another number of ranks or micro-steps.
        load_dir: what was `save_dir`.
        tag: which one; None takes the latest.
        strict: whether the model has to have the saved parameters, all of them and no others.
        optimizer: False: the optimizer begins anew from the saved weights; the loss scale goes on.
        scheduler: whether to load the schedule.
        module_only: load the model's weights and nothing else.

    Returns:
        The path of the file and the `client_state`. (None, None), and a warning in the log, where no tag is
        given and none is the latest.

    Raises:
        CheckpointError: for a file that is not there, cannot be read or does not fit. Nothing was changed.
    """
    name = _latest(Path(load_dir)) if tag is None else str(tag)
    if name is None:
        LOGGER.warning("no checkpoint was loaded: there is no file %s", Path(load_dir) / LATEST)
        return None, None
    path = Path(load_dir) / name / STATES
    state = _read(path)
    _check_model(path, engine.module, state["module"], strict)
    if engine.optimizer is not None and not module_only:
        _load_optimizer(path, engine.optimizer, state.get("optimizer"), whole=optimizer)
    engine.module.load_state_dict(state["module"], strict=strict)
    if not module_only:
        if scheduler and engine.lr_scheduler is not None and state.get("lr_scheduler") is not None:
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        for counter in COUNTERS:
            setattr(engine, counter, state.get(counter, 0))
    engine._begin_update()
    return str(path), state.get("client_state", {})


def _state(engine: Engine, client_state: dict[str, Any], exclude_frozen: bool) -> dict[str, Any]:
    weights = engine.module.state_dict()
    for name, parameter in engine.module.named_parameters():
        if exclude_frozen and not parameter.requires_grad:
            weights.pop(name, None)
    counters = {name: getattr(engine, name) for name in COUNTERS}
    counters["micro_steps"] -= engine._calls
    return {
        "module": weights,
        "optimizer": None if engine.optimizer is None else engine.optimizer.state_dict(),
        "lr_scheduler": _schedule(engine),
        **counters,
        "dp_world_size": engine.world_size,
        "mp_world_size": 1,
        "client_state": client_state,
    }


def _schedule(engine: Engine) -> Any:
    return None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()


def _write(save_dir: Path, tag: str, state: dict[str, Any], save_latest: bool) -> None:
    path = save_dir / tag / STATES
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, lambda file: torch.save(state, file))
    if save_latest:
        _replace(save_dir / LATEST, lambda file: file.write(tag.encode()))


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its place, and move it there when it is on the disk."""
    beside = path.with_name(f"{path.name}.unfinished")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Have the names in a folder written to the disk, where a folder can be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _latest(load_dir: Path) -> str | None:
    path = load_dir / LATEST
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    """Return what a file holds, on the CPU, without executing any of it."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        there = sorted(one.parent.name for one in path.parents[1].glob(f"*/{STATES}"))
        raise CheckpointError(
            f"there is no checkpoint {str(path)!r}. Write tag= with one of {there}."
        ) from None
    except Exception as error:  # a damaged file makes the reader raise anything
        raise CheckpointError(
            f"{str(path)!r} cannot be loaded: {_first_line(error)} Write tag= with another checkpoint."
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("module"), Mapping):
        raise CheckpointError(f"{str(path)!r} holds no engine's state. Write tag= with another checkpoint.")
    return state


def _check_loadable(state: dict[str, Any]) -> None:
    """Refuse what could be saved but not loaded again without executing code. Tensors always can."""
    for name, part in state.items():
        file = io.BytesIO()
        try:
            torch.save(_without_tensors(part), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{name} holds what cannot be loaded again without executing code: {_cause(error)}. "
                "Write numbers, strings, tensors, lists and dicts into it."
            ) from error


def _without_tensors(part: Any) -> Any:
    if type(part) in (dict, OrderedDict):
        return {name: _without_tensors(value) for name, value in part.items()}
    if type(part) in (list, tuple):
        return [_without_tensors(value) for value in part]
    return None if isinstance(part, Tensor) else part


def _cause(error: Exception) -> str:
    named = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line]
    return named[0] if named else _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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


def _load_optimizer(path: Path, optimizer: Any, saved: Any, whole: bool) -> None:
    if not isinstance(saved, dict) or OURS not in saved:
        raise CheckpointError(
            f"the optimizer in {str(path)!r} is not one of preamp's. Write load_module_only=True for the "
            "model's weights; `preamp convert` reads the loss scale."
        )
    try:
        ours = dict(saved[OURS])
        if not (ours["scaler"] and optimizer.scaler.is_enabled()):
            ours["scaler"] = optimizer.scaler.state_dict()  # only one of the two has a scale
        if whole:
            optimizer.load_state_dict({**saved, OURS: ours})
        else:
            optimizer.scaler.load_state_dict(ours["scaler"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the optimizer in {str(path)!r} does not fit: {error}") from error
