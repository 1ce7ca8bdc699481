"""The settings in a configuration, and their conversion to a configuration for DeepSpeed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from preamp.checks import assign, is_number
from preamp.errors import ConfigError
from preamp.policy import Policy, Static
from preamp.systems.deepspeed_config.fp16_section import section_of
from preamp.systems.dialects import TORCH, Dialect

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

    def to_deepspeed(self) -> dict[str, Any]:
        """Return an equivalent configuration for DeepSpeed 0.19.8.

        DeepSpeed requires a batch size, which is included only if these settings have one. Ignored sections
        are written as they were read.

        Raises:
            ConfigError: for settings that DeepSpeed's configuration cannot express.
        """
        given = {name: getattr(self, name) for name in AS_READ if getattr(self, name) is not None}
        config = {**given, "gradient_clipping": self.max_norm or 0.0, **self._precision_section()}
        for name, value in self.ignored.items():
            section, _, key = name.rpartition(".")
            (config.setdefault(section, {}) if section else config)[key] = value
        return copy.deepcopy(config)

    def _precision_section(self) -> dict[str, Any]:
        """Return the section of the precision and the loss scale."""
        if self.precision == "float16" and not self.autocast:
            return {"fp16": {"enabled": True, "auto_cast": self.cast_inputs, **section_of(self.policy)}}
        if self.cast_inputs:
            raise ConfigError(
                "DeepSpeed's configuration cannot express cast_inputs=True except for parameters in "
                "float16. Write cast_inputs=False and cast the inputs yourself."
            )
        if self.autocast:
            self._refuse_policy_but(TORCH() if self.precision == "float16" else None)
            return {"torch_autocast": {"enabled": True, "dtype": self.precision}}
        if self.precision == "bfloat16":
            self._refuse_policy_but(SKIP_ONLY, None)
            return {"bf16": {"enabled": True, "check_grad_overflow": self.policy is not None}}
        self._refuse_policy_but(None)
        return {}

    def _refuse_policy_but(self, *possible: Policy[Any] | None) -> None:
        if self.policy not in possible:
            where = f"autocast in {self.precision}" if self.autocast else self.precision
            raise ConfigError(
                f"DeepSpeed's configuration cannot express policy={self.policy!r} for {where}. "
                f"Write policy={possible[0]!r}."
            )
