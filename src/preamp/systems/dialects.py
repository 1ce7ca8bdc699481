"""The loss scaling of each known system as a policy, oddities included.

A dialect is a policy with that system's defaults; calling it takes that system's own arguments:

>>> TORCH.start().scale
65536.0
>>> DEEPSPEED(hysteresis=4, min_scale=0.5).hysteresis
4

The rules were read in the releases named with each dialect. The tests compare them with these releases,
except for APEX, whose original could not be run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec

from preamp.checks import FLOAT32_MAX, FLOAT32_TINY
from preamp.errors import InexactScale, PolicyError
from preamp.policy import Compat, Dynamic, Policy, Reading, Static, Where, choose

__all__ = [
    "ALL",
    "APEX",
    "DEEPSPEED",
    "DEEPSPEED_FUSED",
    "FLAX",
    "JMP",
    "KERAS",
    "MEGATRON",
    "TF_KERAS",
    "TORCH",
    "Dialect",
]

P = ParamSpec("P")


class Dialect(Policy[Any], Generic[P]):
    """A known system's policy, with that system's defaults; calling it takes the system's own arguments.

    Attributes:
        name: the name in `dialects`, such as "TORCH".
        system: the system, and the release whose rule this is.
        odd: known pitfalls, in one line.
        policy: the policy with the system's defaults.
    """

    def __init__(self, make: Callable[P, Policy[Any]], system: str, odd: str) -> None:
        self._make = make
        self.name: str = make.__name__
        self.__module__ = make.__module__  # where a pickle looks for the name
        self.system = system
        self.odd = odd
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

    def exhausted(self, state: object, reading: Reading, where: Where = choose) -> Any:
        return self.policy.exhausted(state, reading, where)

    def _remedy(self) -> str:
        return self.policy._remedy()


def _dialect(system: str, odd: str) -> Callable[[Callable[P, Policy[Any]]], Dialect[P]]:
    """Turn a function of a system's own arguments into a `Dialect`."""
    return lambda make: Dialect(make, system, odd)


@_dialect("torch.amp.GradScaler, torch 2.13", "No floor: enough overflows in a row take the scale to 0.")
def TORCH(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Policy[Any]:
    return Dynamic(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=None,
        max_scale=FLOAT32_MAX,
        compat=Compat(at_ceiling="refuse", bounds="moves", factor_dtype="float64"),
    )


@_dialect("Keras LossScaleOptimizer, keras 3.15", "Neither floor nor ceiling: reaches 0 and inf.")
def KERAS(*, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000) -> Policy[Any]:
    return Dynamic(
        init_scale=initial_scale, growth_interval=dynamic_growth_steps, min_scale=None, max_scale=None
    )


@_dialect("tf.keras LossScaleOptimizer, tf_keras 2.21", "An initial scale below 1 jumps up to 1 on overflow.")
def TF_KERAS(
    *, dynamic: bool = True, initial_scale: float | None = None, dynamic_growth_steps: int | None = None
) -> Policy[Any]:
    if not dynamic:
        if initial_scale is None:
            raise PolicyError("dynamic=False needs the fixed scale. Write initial_scale=2.0**15 as well.")
        return Static(initial_scale)
    return Dynamic(
        init_scale=2.0**15 if initial_scale is None else initial_scale,
        growth_interval=2000 if dynamic_growth_steps is None else dynamic_growth_steps,
        min_scale=1.0,
        max_scale=FLOAT32_MAX,
        compat=Compat(at_ceiling="refuse", bounds="moves"),
    )


@_dialect(
    "DeepSpeed ZeRO 1-3, deepspeed 0.19.8",
    "The first clean step is not counted; once used up, hysteresis is not restored until the scale grows.",
)
def DEEPSPEED(
    *,
    init_scale: float = 2.0**16,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> Policy[Any]:
    return Dynamic(
        init_scale=init_scale,
        growth_interval=scale_window,
        hysteresis=hysteresis,
        hysteresis_reset="clean" if consecutive_hysteresis else "growth",
        min_scale=min_scale,
        max_scale=None,
        at_floor="raise" if raise_error_at_min_scale else "hold",
        compat=Compat(growth_delay=1, bounds="moves", scale_dtype="float64"),
    )


@_dialect(
    "DeepSpeed stage 0 fp16, deepspeed 0.16.5 and 0.19.8", "Ignores hysteresis, whatever is configured."
)
def DEEPSPEED_FUSED(
    *, init_scale: float = 2.0**16, scale_window: int = 1000, min_scale: float = 1.0
) -> Policy[Any]:
    return DEEPSPEED(
        init_scale=init_scale,
        scale_window=scale_window,
        min_scale=min_scale,
        hysteresis=1,
        raise_error_at_min_scale=False,
    )


@_dialect(
    "Megatron DynamicGradScaler, megatron-core 0.16",
    "Overflows add up until the scale grows, in a row or not; no ceiling, so it can reach inf.",
)
def MEGATRON(
    *,
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> Policy[Any]:
    return Dynamic(
        init_scale=initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        hysteresis_reset="growth",
        min_scale=min_scale,
        max_scale=None,
        compat=Compat(bounds="moves"),
    )


@_dialect("apex.amp, its last release", "Always moves by 2: its scale_factor argument is not used.")
def APEX(
    *,
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Policy[Any]:
    return Dynamic(
        init_scale=min(max_loss_scale, init_scale),
        growth_interval=scale_window,
        min_scale=min_loss_scale or None,
        max_scale=max_loss_scale,
        compat=Compat(bounds="moves", scale_dtype="float64"),
    )


@_dialect("flax DynamicScale, flax 0.12", "Grows after growth_interval + 1 clean steps, not growth_interval.")
def FLAX(
    *,
    scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    minimum_scale: float | None = FLOAT32_TINY,
) -> Policy[Any]:
    return Dynamic(
        init_scale=scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval + 1,
        min_scale=minimum_scale,
        max_scale=FLOAT32_MAX,
        compat=Compat(bounds="moves"),
    )


@_dialect(
    "jmp DynamicLossScale, jmp 0.0.4", "Forgets min_loss_scale in every jit or tree_map: the floor is then 1."
)
def JMP(
    *, loss_scale: float = 2.0**15, period: int = 2000, factor: float = 2.0, min_loss_scale: float = 1.0
) -> Policy[Any]:
    return Dynamic(
        init_scale=loss_scale,
        growth_factor=factor,
        growth_interval=period,
        min_scale=min_loss_scale,
        max_scale=FLOAT32_MAX,
        compat=Compat(backoff_divisor=factor, at_ceiling="refuse", bounds="moves"),
    )


ALL: dict[str, Dialect[...]] = {
    name: value for name, value in globals().items() if isinstance(value, Dialect)
}
