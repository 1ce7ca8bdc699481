"""The loss scaling of each known system as a policy, oddities included.

A dialect is a policy with that system's defaults; calling it takes that system's own arguments:

>>> TORCH.start().scale
65536.0
>>> DEEPSPEED(hysteresis=4, min_scale=0.5).hysteresis
4

The rules were read in the releases named with each dialect. The tests compare them with these releases,
except for APEX, ONEFLOW and TF1, whose originals could not be run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from preamp.checks import FLOAT32_MAX, FLOAT32_TINY
from preamp.errors import PolicyError
from preamp.policy import Compat, Dynamic, Policy, Static, Tolerant
from preamp.systems.definition import Dialect, dialect

__all__ = [
    "ALL",
    "APEX",
    "COLOSSALAI",
    "DEEPSPEED",
    "DEEPSPEED_016",
    "DEEPSPEED_FUSED",
    "FAIRSEQ",
    "FLAX",
    "JMP",
    "KERAS",
    "MEGATRON",
    "MINDSPORE",
    "MINDSPORE_AMP",
    "MPX",
    "NEMO",
    "ONEFLOW",
    "PADDLE",
    "PADDLE_STATIC",
    "TF1",
    "TF_KERAS",
    "TORCH",
]


def _rule(init: float, growth: float, backoff: float, interval: int, **settings: Any) -> Dynamic:
    """Return a `Dynamic` from its first scale, its two factors and its interval, in this order."""
    return Dynamic(
        init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval, **settings
    )


# What PyTorch's scaler and those that follow it share.
AS_TORCH: dict[str, Any] = {
    "min_scale": None,
    "max_scale": FLOAT32_MAX,
    "compat": Compat(at_ceiling="refuse", bounds="moves", factor_dtype="float64"),
}


def _but(policy: Any, **settings: Any) -> Policy[Any]:
    """Return another system's policy with some settings replaced."""
    return replace(policy, **settings)


@dialect("torch.amp.GradScaler, torch 2.13", "No floor: enough overflows in a row take the scale to 0.")
def TORCH(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Policy[Any]:
    settings = init_scale, growth_factor, backoff_factor, growth_interval
    return _rule(*settings, **AS_TORCH)


@dialect("Keras LossScaleOptimizer, keras 3.15", "Neither floor nor ceiling: reaches 0 and inf.")
def KERAS(*, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000) -> Policy[Any]:
    return Dynamic(
        init_scale=initial_scale, growth_interval=dynamic_growth_steps, min_scale=None, max_scale=None
    )


@dialect("tf.keras LossScaleOptimizer, tf_keras 2.21", "An initial scale below 1 jumps up to 1 on overflow.")
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


@dialect(
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
        hysteresis_reset=("clean",) if consecutive_hysteresis else ("growth",),
        min_scale=min_scale,
        max_scale=None,
        at_floor="raise" if raise_error_at_min_scale else "hold",
        compat=Compat(growth_delay=1, bounds="moves", scale_dtype="float64"),
    )


@dialect(
    "DeepSpeed ZeRO 1-3, deepspeed 0.16.5",
    "Starts at 2**32 unless configured; the configuration's own default is 2**16.",
)
def DEEPSPEED_016(
    *,
    init_scale: float = 2.0**32,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    hysteresis: int = 1,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> Policy[Any]:
    return _but(
        DEEPSPEED(
            init_scale=init_scale,
            scale_window=scale_window,
            min_scale=min_scale,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive_hysteresis,
            raise_error_at_min_scale=raise_error_at_min_scale,
        ),
        growth_factor=scale_factor,
        compat=Compat(
            backoff_divisor=scale_factor, bounds="moves", scale_dtype="float64", factor_dtype="float64"
        ),
    )


@dialect("DeepSpeed stage 0 fp16, deepspeed 0.16.5 and 0.19.8", "Ignores hysteresis, whatever is configured.")
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


@dialect(
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
    return _rule(
        *(initial_scale, growth_factor, backoff_factor, growth_interval),
        hysteresis=hysteresis,
        hysteresis_reset=("growth",),
        min_scale=min_scale,
        max_scale=None,
        compat=Compat(bounds="moves"),
    )


@dialect("apex.amp, its last release", "Always moves by 2: its scale_factor argument is not used.")
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


@dialect(
    "NeMo GradScaler, nemo_toolkit 2.7",
    "After hysteresis is used up, every further overflow in a row backs off.",
)
def NEMO(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> Policy[Any]:
    settings = init_scale, growth_factor, backoff_factor, growth_interval
    return _rule(*settings, hysteresis=hysteresis, **AS_TORCH)


@dialect(
    "fairseq DynamicLossScaler, fairseq 0.12.2",
    "Backs off on the rate of overflows since the scale last moved; growing does not clear their count.",
)
def FAIRSEQ(
    *,
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> Policy[Any]:
    holds = threshold is not None and threshold > min_loss_scale
    return Tolerant(
        init_scale=init_scale,
        growth_factor=scale_factor,
        growth_interval=scale_window,
        tolerance=tolerance,
        min_scale=threshold if holds else min_loss_scale,
        max_scale=None,
        at_floor="hold" if holds else "raise",
        compat=Compat(
            raise_on_arrival=not holds,
            backoff_divisor=scale_factor,
            bounds="moves",
            scale_dtype="float64",
            factor_dtype="float64",
        ),
    )


@dialect(
    "ColossalAI DynamicGradScaler, colossalai 0.5",
    "Overflows add up until the scale grows; no floor unless asked.",
)
def COLOSSALAI(
    *,
    initial_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 2,
) -> Policy[Any]:
    return _rule(
        *(initial_scale, growth_factor, backoff_factor, growth_interval),
        hysteresis=hysteresis,
        hysteresis_reset=("growth",),
        min_scale=min_scale or None,
        max_scale=max_scale or None,
    )


@dialect("flax DynamicScale, flax 0.12", "Grows after growth_interval + 1 clean steps, not growth_interval.")
def FLAX(
    *,
    scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    minimum_scale: float | None = FLOAT32_TINY,
) -> Policy[Any]:
    settings = scale, growth_factor, backoff_factor, growth_interval + 1
    return _rule(*settings, min_scale=minimum_scale, max_scale=FLOAT32_MAX, compat=Compat(bounds="moves"))


@dialect(
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


@dialect(
    "mpx DynamicLossScaling, mixed_precision_for_JAX 0.1.8",
    "Its ceiling of 65504 is not a power of two: later scales round.",
)
def MPX(
    *, loss_scaling: float = 2.0**15, min_loss_scaling: float = 1.0, factor: float = 2.0, period: int = 2000
) -> Policy[Any]:
    rule = JMP(loss_scale=loss_scaling, period=period, factor=factor, min_loss_scale=min_loss_scaling)
    compat = Compat(backoff_divisor=factor, bounds="always")
    return _but(rule, max_scale=65504.0, compat=compat)


@dialect("Paddle amp.GradScaler, paddlepaddle 3.3", "Takes n overflows for each backoff; no floor.")
def PADDLE(
    *,
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> Policy[Any]:
    return _rule(
        *(init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps),
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_reset=("clean", "backoff"),
        min_scale=None,
        max_scale=None,
        compat=Compat(bounds="moves"),
    )


@dialect(
    "Paddle update_loss_scaling operator, paddlepaddle 3.3", "Its two wrappers disagree on the defaults."
)
def PADDLE_STATIC(
    *,
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> Policy[Any]:
    return _rule(
        *(init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps),
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_reset=("clean", "backoff"),
        min_scale=1.0,
        max_scale=FLOAT32_MAX,
        compat=Compat(at_ceiling="refuse", bounds="moves"),
    )


@dialect(
    "MindSpore DynamicLossScaleManager, mindspore 2.10", "Raises after more than 1000 overflows in a row."
)
def MINDSPORE(
    *, init_loss_scale: float = 2.0**24, scale_factor: int = 2, scale_window: int = 2000
) -> Policy[Any]:
    return _rule(
        *(init_loss_scale, scale_factor, 1.0 / scale_factor, scale_window),
        min_scale=1.0,
        max_scale=None,
        max_consecutive_overflows=1000,
        compat=Compat(bounds="moves", scale_dtype="float64", factor_dtype="float64"),
    )


@dialect("MindSpore amp.DynamicLossScaler, mindspore 2.10", "Accepts only integer factors.")
def MINDSPORE_AMP(
    *, scale_value: float = 2.0**24, scale_factor: int = 2, scale_window: int = 2000
) -> Policy[Any]:
    return JMP(loss_scale=scale_value, period=scale_window, factor=scale_factor)


@dialect("OneFlow GradScaler", "Floor 1; clamps at float32's maximum instead of refusing to grow.")
def ONEFLOW(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Policy[Any]:
    settings = init_scale, growth_factor, backoff_factor, growth_interval
    compat = Compat(bounds="moves", factor_dtype="float64")
    return _rule(*settings, min_scale=1.0, max_scale=FLOAT32_MAX, compat=compat)


@dialect(
    "tf.contrib exponential update, TensorFlow 1.15",
    "Backs off by 0.8 and only on every second overflow, even with clean steps between them.",
)
def TF1(
    *,
    init_loss_scale: float = 2.0**15,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> Policy[Any]:
    return _rule(
        *(init_loss_scale, incr_ratio, decr_ratio, incr_every_n_steps),
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_reset=("growth", "backoff"),
        min_scale=1.0,
        max_scale=FLOAT32_MAX,
        compat=Compat(at_ceiling="refuse", bounds="moves"),
    )


ALL: dict[str, Dialect[...]] = {
    name: value for name, value in globals().items() if isinstance(value, Dialect)
}
