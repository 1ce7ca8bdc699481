"""The settings in a configuration of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from preamp.checks import assign, is_number
from preamp.errors import ConfigError
from preamp.policy import Policy, Static
from preamp.systems.dialects import Dialect

Precision: TypeAlias = Literal["float16", "bfloat16", "float32"]
SKIP_ONLY = Static(1.0)  # no scaling, but a step that overflows is skipped

AS_READ = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "zero_optimization",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in a configuration.

    Attributes:
        precision: the dtype of the computation and, without `autocast`, of the parameters.
        policy: the rule for the loss scale. None: no scaling, and no step is skipped.
        max_norm: gradients are clipped to this global norm. None: they are not.
        autocast: float32 parameters under autocast instead of parameters in `precision`.
        cast_inputs: floating-point inputs of the model are cast to `precision`.
        train_batch_size: samples per update, over all ranks, or None.
        train_micro_batch_size_per_gpu: samples per backward pass of one rank, or None.
        gradient_accumulation_steps: backward passes per update, or None.
        optimizer: the section of that name as read, with `type` and `params`.
        zero_optimization: the section of that name as read.
        ignored: the values, as read, of DeepSpeed's keys that have no counterpart in preamp, by name; a key
            in a section by "section.name".
    """

    precision: Precision = "float32"
    policy: Policy[Any] | None = None
    max_norm: float | None = None
    autocast: bool = False
    cast_inputs: bool = False
    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    optimizer: Mapping[str, Any] | None = None
    zero_optimization: Mapping[str, Any] | None = None
    ignored: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            choices = ", ".join(map(repr, get_args(Precision)))
            raise ConfigError(f"precision={self.precision!r} is unknown. Write one of {choices}.")
        if self.autocast and self.precision == "float32":
            raise ConfigError("autocast=True has no low precision. Write precision='bfloat16' as well.")
        if isinstance(self.policy, Dialect):
            assign(self, policy=self.policy.policy)
        if not (self.policy is None or isinstance(self.policy, Policy)):
            raise ConfigError(f"policy={self.policy!r} is not a policy. Write policy=dialects.DEEPSPEED.")
        if self.max_norm is not None and not (is_number(self.max_norm) and self.max_norm > 0.0):
            raise ConfigError(f"max_norm={self.max_norm!r} is not above 0. Write max_norm=None not to clip.")

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, 0 to 3."""
        return int((self.zero_optimization or {}).get("stage", 0))
