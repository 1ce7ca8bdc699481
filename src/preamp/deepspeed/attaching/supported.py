"""Which engines a policy can be attached to. For others, an error says why not and what to write instead."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from preamp.deepspeed.attaching.hosts import TESTED, Host, kind_of
from preamp.errors import MissingExtra, UsageError

COMPRESSED = "deepspeed.runtime.fp16.onebit"


def host_of(engine: Any) -> Host:
    """Return what has to be known of an engine's optimizer.

    Raises:
        UsageError: for an engine that a policy cannot be attached to. It is as it was.
        MissingExtra: without DeepSpeed.
    """
    _check_engine(engine)
    _check_precision(engine)
    optimizer = engine.optimizer
    kind = kind_of(optimizer)
    if kind is None:
        raise UsageError(
            f"{type(optimizer).__name__} moves its scale in a way that attach does not know: it was tested "
            f"with ZeRO 0 to 3 of deepspeed {TESTED}, offloading included. Write a configuration without "
            "ZenFlow, SuperOffload, MiCS and the like, or do without attach."
        )
    inner = type(getattr(optimizer, "optimizer", None))
    if inner.__module__.startswith(COMPRESSED):
        raise UsageError(
            f"{inner.__name__} exchanges gradients between ranks itself, which attach was not tested with. "
            'Write "type": "Adam" or "Lamb" in the section "optimizer", or do without attach.'
        )
    if getattr(optimizer, "custom_loss_scaler", False):
        raise UsageError(
            f"override_loss_scale({optimizer.external_loss_scale!r}) has overridden the scale. "
            f"Write attach(engine, policy=Static({optimizer.external_loss_scale!r})) in its place."
        )
    return kind(engine)


def _check_engine(engine: Any) -> None:
    try:
        engines = import_module("deepspeed.runtime.engine")
        pipelines = import_module("deepspeed.runtime.pipe.engine")
    except ImportError as error:
        raise MissingExtra.of(error, "deepspeed") from error
    if not isinstance(engine, engines.DeepSpeedEngine):
        raise UsageError(
            f"{type(engine).__name__} is not DeepSpeed's engine. "
            "Write engine, *_ = deepspeed.initialize(...) and then attach(engine)."
        )
    if isinstance(engine, pipelines.PipelineEngine):
        raise UsageError(
            "a PipelineEngine scales the loss of its last stage alone, past engine.backward. "
            "Write model=... without PipelineModule, or do without attach."
        )


def _check_precision(engine: Any) -> None:
    scalers = ((engine, "torch_autocast_z0_gradscaler"), (engine.optimizer, "torch_autocast_gradscaler"))
    if any(getattr(owner, name, None) is not None for owner, name in scalers):
        raise UsageError(
            'the section "torch_autocast" scales with a torch.amp.GradScaler of its own. '
            'Write "fp16": {"enabled": true} instead, or "dtype": "bfloat16", which needs no loss scale.'
        )
    if not engine.fp16_enabled():
        raise UsageError(
            'this engine does not train in float16, and nothing else needs a loss scale. Write "fp16": '
            '{"enabled": true} in the configuration, or do without attach.'
        )
