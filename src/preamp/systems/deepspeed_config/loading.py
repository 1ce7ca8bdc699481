"""Read settings from a configuration."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preamp.errors import ConfigError
from preamp.policy import Policy
from preamp.systems.deepspeed_config import commented_json
from preamp.systems.deepspeed_config.auto_values import without_blanks
from preamp.systems.deepspeed_config.fp16_section import policy_of
from preamp.systems.deepspeed_config.keys import SECTIONS, TOP, read_section
from preamp.systems.deepspeed_config.settings import AS_READ, SKIP_ONLY, Precision, Settings
from preamp.systems.dialects import TORCH


def load(config: str | os.PathLike[str] | Mapping[str, Any], *, skip_blanks: bool = False) -> Settings:
    """Read a DeepSpeed configuration.

    `fp16` gives a policy of `dialects.DEEPSPEED`, or `Static` for a `loss_scale` other than 0. `bf16` skips
    steps that overflow unless `check_grad_overflow` is false. `torch_autocast` in float16 scales as
    `torch.amp.GradScaler` does, or as `fp16` says if that is enabled too. Without `gradient_clipping` the
    norm is clipped to 1.0, as in DeepSpeed 0.19.8 (0.16.5 did not clip).

    Args:
        config: a JSON file, in which comments are allowed, or its content.
        skip_blanks: whether "auto", which Hugging Face's Trainer fills in, counts as not given. For precision
            and loss scale it is always refused.

    Raises:
        ConfigError: for a key that is unknown or given twice, an invalid value, and a file that is not JSON.
        OSError: for a file that cannot be read.
    """
    if isinstance(config, Mapping):
        return _settings(config, skip_blanks)
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config={config!r} is neither a file nor a mapping. Write load('ds_config.json').")
    try:
        return _settings(commented_json.read(Path(config)), skip_blanks)
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(config)}: {error}") from None


def _settings(config: Any, skip_blanks: bool) -> Settings:
    if isinstance(config, Mapping):
        config = without_blanks(config, skip_blanks)
    top = read_section("", config, TOP)
    read = {name: read_section(name, top[name], keys) for name, keys in SECTIONS.items()}
    precision = _precision(read)
    return Settings(
        precision=precision,
        policy=_policy(read, precision),
        max_norm=top["gradient_clipping"] or None,
        autocast=read["torch_autocast"]["enabled"],
        cast_inputs=read["fp16"]["enabled"] and read["fp16"]["auto_cast"],
        **{name: copy.deepcopy(top[name]) for name in AS_READ},
        ignored=copy.deepcopy(_ignored(config, top)),
    )


def _ignored(config: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known keys that have no counterpart in preamp, by name."""
    sections = {"": (config, TOP)} | {f"{name}.": (top[name], keys) for name, keys in SECTIONS.items()}
    return {
        f"{prefix}{name}": value
        for prefix, (given, keys) in sections.items()
        for name, value in given.items()
        if name in keys and keys[name].ignored
    }


def _precision(read: Mapping[str, Mapping[str, Any]]) -> Precision:
    autocast = read["torch_autocast"]["dtype"]
    dtypes: dict[str, Precision] = {"fp16": "float16", "bf16": "bfloat16", "torch_autocast": autocast}
    enabled = [name for name in dtypes if read[name]["enabled"]]
    if "torch_autocast" in enabled and not autocast:
        raise ConfigError('torch_autocast: the dtype is not given. Write "dtype": "bfloat16" in it.')
    if len({dtypes[name] for name in enabled}) > 1:
        both = " and ".join(f"{name} ({dtypes[name]})" for name in enabled)
        raise ConfigError(f'{both} are both enabled. Write "enabled": true in one of them only.')
    return dtypes[enabled[0]] if enabled else "float32"


def _policy(read: Mapping[str, Mapping[str, Any]], precision: Precision) -> Policy[Any] | None:
    if read["fp16"]["enabled"]:
        return policy_of(read["fp16"])
    if read["bf16"]["enabled"]:
        return SKIP_ONLY if read["bf16"]["check_grad_overflow"] else None
    return TORCH() if precision == "float16" else None
