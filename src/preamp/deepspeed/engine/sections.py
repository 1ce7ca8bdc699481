"""Make the optimizer of a configuration, by DeepSpeed's names and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from preamp.errors import ConfigError

ITSELF_ONLY = "engine, *_ = deepspeed.initialize(...) of DeepSpeed itself"
DEEPSPEED_ITSELF = f"{ITSELF_ONLY}, and then preamp.deepspeed.attach(engine)"

ADAMS = ("adam", "adamw")
OTHERS = {"adagrad": torch.optim.Adagrad}  # DeepSpeed takes these names in any case
DEEPSPEEDS_OWN = ("lamb", "lion", "muon", "muadam", "muadamw", "musgd")
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")  # which `attach` does not support, either


def optimizer_of(section: Mapping[str, Any], parameters: Iterable[Any]) -> Optimizer:
    """Return the optimizer that the section `optimizer` names.

    "Adam" and "AdamW" are what DeepSpeed makes of them: AdamW without weight decay unless that is given, and
    Adam for `"adam_w_mode": false`. Any other optimizer of `torch.optim` goes by its name there.

    Args:
        section: the keys `type` and `params`.
        parameters: tensors, pairs of name and tensor, or parameter groups.
    """
    name, options = str(section["type"]), dict(section.get("params") or {})
    if "max_grad_norm" in options:
        raise ConfigError(
            'optimizer.params.max_grad_norm clips nothing. Write "gradient_clipping": '
            f"{options['max_grad_norm']!r} at the top level."
        )
    if name.lower() in ADAMS:
        kind, options = _adam(name, options)
    else:
        kind = OTHERS.get(name.lower()) or _found(name)
    try:
        return kind(parameters, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'optimizer.params: {kind.__name__} refuses {options!r}: {error}. Write "params" that it takes.'
        ) from error


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


def _found(name: str) -> Any:
    """Return an optimizer of PyTorch by its name."""
    kinds = {
        one: value
        for one, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name in kinds:
        return kinds[name]
    if name.lower() in (*DEEPSPEEDS_OWN, *ONE_BIT):
        raise ConfigError(
            f'optimizer.type: "{name}" exists in DeepSpeed only. Write optimizer= with one of your own, or '
            f"{ITSELF_ONLY if name.lower() in ONE_BIT else DEEPSPEED_ITSELF}."
        )
    near = difflib.get_close_matches(name, kinds, n=1) or list(kinds)[:1]
    raise ConfigError(f'optimizer.type: "{name}" is unknown. Write "{near[0]}".')
