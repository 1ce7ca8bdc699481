"""The keys of DeepSpeed's configuration, and their valid values.

The keys and defaults are those of deepspeed 0.19.8 (`runtime/config.py`, `runtime/precision_config.py`), the
aliases those of `DynamicLossScaler`'s arguments.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from preamp.checks import FLOAT32_MAX, FLOAT32_TINY, is_number, shown
from preamp.errors import ConfigError


class Key(NamedTuple):
    """A key and its valid values.

    Attributes:
        kind: converts a value; raises a ValueError that says what is wrong with it.
        default: the value of an absent key.
        example: what to write instead of an invalid value. None: the default.
        aliases: other names of the key.
        ignored: whether it has no counterpart in preamp.
    """

    kind: Callable[[Any], Any]
    default: Any
    example: Any = None
    aliases: tuple[str, ...] = ()
    ignored: bool = False


def by_name(keys: Mapping[str, Key]) -> dict[str, str]:
    """Return the key for every name and alias."""
    return {name: key for key in keys for name in (key, *keys[key].aliases)}


def line_for(name: str, key: Key) -> str:
    """Return a line to write for a key, with the name that was used for it."""
    return _line(name, key.default if key.example is None else key.example)


def read_section(section: str, given: object, keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return a value for each key of a section."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{section or 'a configuration'} is {_json(given)}, not a section. Write {{ }}.")
    prefix = section and f"{section}."
    known = by_name(keys)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            remedy = _remedy(section, name, keys)
            raise ConfigError(f"{prefix}{name} is not a key of DeepSpeed 0.19.8. {remedy}")
        key = known[name]
        read = _read(prefix, name, value, keys[key])
        if key in values and values[key] != read:
            others = " and ".join(other for other in given if known.get(other) == key)
            raise ConfigError(
                f"{prefix}{others} are the same key and differ. Write {_line(key, read)} alone."
            )
        values[key] = read
    return {name: values.get(name, key.default) for name, key in keys.items()}


def _read(prefix: str, name: str, value: object, key: Key) -> Any:
    try:
        return key.kind(value)
    except ValueError as error:
        raise ConfigError(f"{prefix}{name}: {_json(value)} {error}. Write {line_for(name, key)}.") from None


def _remedy(section: str, name: object, keys: Mapping[str, Key]) -> str:
    """Say in which section an unknown key should be, or which key it resembles."""
    if not section and name in REMOVED:
        return REMOVED[name]
    homes = [home for home, others in HOMES.items() if home != section and name in others]
    if homes:
        return f"Write it in {homes[0]}." if homes[0] else "Write it at the top level."
    near = difflib.get_close_matches(str(name), by_name(keys), n=1)
    if near:
        return f'Write "{near[0]}".'
    return f"Write one of {', '.join(key for key in keys if not keys[key].ignored)}, or take it out."


def _line(name: str, value: object) -> str:
    return f'"{name}": {_json(value)}'


def _json(value: object) -> str:
    try:
        return json.dumps(value, default=repr)
    except (TypeError, ValueError, RecursionError):  # no JSON at all
        return shown(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")
    return value


def _whole(low: int, high: float, what: str) -> Callable[[Any], int]:
    def kind(value: object) -> int:
        if not (is_number(value) and value == int(value) and low <= value <= high):
            raise ValueError(f"is not {what}")
        return int(value)

    return kind


def _scale(value: object) -> float:
    if not (is_number(value) and FLOAT32_TINY <= value <= FLOAT32_MAX):
        raise ValueError("is not a scale: a number above 0 in float32's range")
    return float(value)


def _scale_or_dynamic(value: object) -> float:
    if is_number(value) and value == 0:
        return 0.0
    return _scale(value)


def _norm(value: object) -> float:
    if not (is_number(value) and value >= 0):
        raise ValueError("is not a norm: a number above 0, or 0 not to clip")
    return float(value)


def _section(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("is not a section")
    return value


def _typed_section(value: Any) -> Mapping[str, Any]:
    """Return the section of an optimizer."""
    if not isinstance(_section(value).get("type"), str):
        raise ValueError('has no "type"')
    _section(value.get("params", {}))
    return value  # type: ignore[no-any-return]


def _zero(value: object) -> Mapping[str, Any]:
    section = {"stage": int(value)} if isinstance(value, bool) else _section(value)
    _whole(0, 3, "a section with a stage of 0 to 3")(section.get("stage", 0))
    return section


def _dtype(value: object) -> str:
    names = {"float16": ("fp16", "float16", "half"), "bfloat16": ("bf16", "bfloat16")}
    for dtype, aliases in names.items():
        if not is_number(value) and str(value).removeprefix("torch.") in aliases:
            return dtype
    raise ValueError("is not a low precision")


def _anything(value: object) -> Any:
    return value


NOT_USED = """
activation_checkpointing aio autotuning checkpoint comet comms_logger communication_data_type compile
csv_monitor data_efficiency data_parallel_size data_types dataloader_drop_last datastates_ckpt
disable_allgather disable_python_gc dump_state expert_parallel flops_profiler gradient_allreduce_op
gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown pipeline
prescale_gradients scheduler seq_parallel_communication_data_type sequence_parallel_size steps_per_print
tensor_parallel tensorboard timers use_data_before_expert_parallelism vocabulary_size
wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
"""
REMOVED_NAMES = """
compression_training eigenvalue elasticity graph_harvesting nebula progressive_layer_drop quantize_training
sparse_attention sparse_gradients
"""

_COUNT = _whole(1, 2**63, "a whole number of at least 1")
_POWER = _whole(-126, 127, "a power of two in float32's range, -126 to 127")

FP16 = {
    "enabled": Key(_flag, False, example=True),
    "auto_cast": Key(_flag, False),
    "loss_scale": Key(_scale_or_dynamic, 0.0),
    "initial_scale_power": Key(_POWER, None, example=16),
    "init_scale": Key(_scale, None, example=65536),
    "loss_scale_window": Key(_COUNT, 1000, aliases=("scale_window",)),
    "hysteresis": Key(_COUNT, 2, aliases=("delayed_shift",)),
    "consecutive_hysteresis": Key(_flag, False),
    "min_loss_scale": Key(_scale, 1.0, example=1, aliases=("min_scale",)),
    "raise_error_at_min_scale": Key(_flag, True),
    "fp16_master_weights_and_grads": Key(_flag, False, ignored=True),
}

BF16 = {
    "enabled": Key(_flag, False, example=True),
    "check_grad_overflow": Key(_flag, True),
    "immediate_grad_update": Key(_flag, False, ignored=True),
    "bf16_master_weights_and_grads": Key(_flag, False, ignored=True),
    "bf16_optimizer_states": Key(_flag, False, ignored=True),
}

AUTOCAST = {
    "enabled": Key(_flag, False, example=True),
    "dtype": Key(_dtype, None, example="bfloat16"),
    "lower_precision_safe_modules": Key(_anything, None, ignored=True),
}

TOP = {
    "fp16": Key(_section, {}, example={"enabled": True}),
    "bf16": Key(_section, {}, example={"enabled": True}, aliases=("bfloat16",)),
    "torch_autocast": Key(_section, {}, example={"enabled": True, "dtype": "bfloat16"}),
    "gradient_clipping": Key(_norm, 1.0),
    "train_batch_size": Key(_COUNT, None, example=32),
    "train_micro_batch_size_per_gpu": Key(_COUNT, None, example=8),
    "gradient_accumulation_steps": Key(_COUNT, None, example=1),
    "optimizer": Key(_typed_section, None, example={"type": "AdamW", "params": {"lr": 0.001}}),
    "zero_optimization": Key(_zero, None, example={"stage": 0}),
} | dict.fromkeys(NOT_USED.split(), Key(_anything, None, ignored=True))

# Keys of older releases, which 0.19.8 refuses too, with what to do about each.
REMOVED = dict.fromkeys(REMOVED_NAMES.split(), "It belonged to an older release. Take it out.") | {
    "amp": 'Write "torch_autocast": {"enabled": true, "dtype": "float16"} instead, or nothing if it is off.',
    "curriculum_learning": 'Write it in "data_efficiency".',
}

SECTIONS = {"fp16": FP16, "bf16": BF16, "torch_autocast": AUTOCAST}
HOMES = SECTIONS | {"": TOP}
