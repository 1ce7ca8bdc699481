"""Make the optimizer and the scheduler of a configuration, by DeepSpeed's names and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from preamp.deepspeed.engine.schedules import SCHEDULES
from preamp.errors import ConfigError

ITSELF_ONLY = "engine, *_ = deepspeed.initialize(...) of DeepSpeed itself"
DEEPSPEED_ITSELF = f"{ITSELF_ONLY}, and then preamp.deepspeed.attach(engine)"

ADAMS = ("adam", "adamw")
OTHERS = {"adagrad": torch.optim.Adagrad}  # DeepSpeed takes these names in any case
DEEPSPEEDS_OWN = (
    *("lamb", "lion", "muon", "muadam", "muadamw", "musgd"),
    *("lrrangetest", "onecycle"),
)
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")  # which `attach` does not support, either


def optimizer_of(section: Mapping[str, Any], parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return the optimizer that the section `optimizer` names.

    "Adam" and "AdamW" are what DeepSpeed makes of them: AdamW without weight decay unless that is given, and
    Adam for `"adam_w_mode": false`. Any other optimizer of `torch.optim` goes by its name there.

    Args:
        section: the keys `type` and `params`.
        parameters: tensors, pairs of name and tensor, or parameter groups.
    """
    name, options = _read(section)
    if "max_grad_norm" in options:
        raise ConfigError(
            'optimizer.params.max_grad_norm clips nothing. Write "gradient_clipping": '
            f"{options['max_grad_norm']!r} at the top level."
        )
    if name.lower() in ADAMS:
        kind, options = _adam(name, options)
    else:
        kind = OTHERS.get(name.lower()) or _found(name, torch.optim, torch.optim.Optimizer, "optimizer")
    return _made(kind, parameters, options, "optimizer")  # type: ignore[no-any-return]


def scheduler_of(section: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that the section `scheduler` names: DeepSpeed's warm-ups, or one of PyTorch's."""
    name, options = _read(section)
    where = torch.optim.lr_scheduler
    kind = SCHEDULES.get(name) or _found(name, where, where.LRScheduler, "scheduler")
    return _made(kind, optimizer, options, "scheduler")


def _read(section: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return str(section["type"]), dict(section.get("params") or {})


def _adam(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return PyTorch's class for DeepSpeed's Adam, and its options."""
    decoupled = options.pop("adam_w_mode", True) or name.lower() == "adamw"
    if not options.pop("torch_adam", False):
        options = {"weight_decay": 0.0, **options}
    options.pop("fp32_optimizer_states", None)
    if options.pop("bias_correction", True) is not True:
        raise ConfigError(
            "optimizer.params.bias_correction: false is not in PyTorch's Adam. "
            "Leave it out, or write optimizer= with an optimizer of your own."
        )
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), options


def _found(name: str, module: object, kind: type, section: str) -> Any:
    """Return a class of a module of PyTorch by its name."""
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, kind) and found is not kind:
        return found
    if name.lower() in (*DEEPSPEEDS_OWN, *ONE_BIT):
        argument = "optimizer=" if section == "optimizer" else "lr_scheduler="
        raise ConfigError(
            f'{section}.type: "{name}" exists in DeepSpeed only. Write {argument} with one of your own, or '
            f"{ITSELF_ONLY if name.lower() in ONE_BIT else DEEPSPEED_ITSELF}."
        )
    known = [
        one for one, value in vars(module).items() if isinstance(value, type) and issubclass(value, kind)
    ]
    near = difflib.get_close_matches(name, [*known, *SCHEDULES], n=1) or known[:1]
    raise ConfigError(f'{section}.type: "{name}" is unknown. Write "{near[0]}".')


def _made(kind: Callable[..., Any], over: object, options: dict[str, Any], section: str) -> Any:
    try:
        return kind(over, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{section}.params: {getattr(kind, '__name__', section)} refuses {options!r}: {error}. "
            'Write "params" that it takes.'
        ) from error
