"""A user's code on Keras 3, whose own names have no types."""

from typing import Any, assert_type

from preamp import Dynamic, Policy, Step, Trace
from preamp.keras import LossScaleOptimizer, TraceCallback


def compile_and_fit(model: Any, inner: Any, x: Any, y: Any) -> Step | None:
    optimizer = LossScaleOptimizer(
        inner, policy=Dynamic(), global_clipnorm=1.0, gradient_accumulation_steps=2
    )
    callback = TraceCallback("fit.jsonl", mode="replace", restore_buffers=True, name="fit")
    model.compile(optimizer, loss="mse")
    model.fit(x, y, callbacks=[callback, TraceCallback(on_step=print), TraceCallback(Trace())])
    assert_type(optimizer.loss_scale, float)
    assert_type(optimizer.skipped_steps, int)
    assert_type(optimizer.policy, Policy[Any])
    assert_type(optimizer.dynamic_growth_steps, int | None)
    assert_type(optimizer.get_config(), dict[str, Any])
    assert_type(LossScaleOptimizer.from_config(optimizer.get_config()), LossScaleOptimizer)
    optimizer.finalize_variable_values()
    optimizer.finalize_variable_values(var_list=None)
    optimizer.finalize_variable_values(var_list=model.trainable_variables)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.check_exhausted()
    optimizer.dynamic_growth_steps = 50
    return optimizer.last_step


class Mine(LossScaleOptimizer):
    """A user's own optimizer."""

    def __init__(self, inner_optimizer: Any, note: str = "", **settings: Any) -> None:
        super().__init__(inner_optimizer, **settings)
        self.note = note

    def scale_loss(self, loss: Any) -> Any:
        return super().scale_loss(loss)


def restored(config: dict[str, Any]) -> Mine:
    return Mine.from_config(config)


def mistakes(inner: Any) -> None:
    LossScaleOptimizer()  # type: ignore[call-arg]
    LossScaleOptimizer(inner, initial_scale="big")  # type: ignore[arg-type]
    LossScaleOptimizer(inner, policy=3)  # type: ignore[arg-type]
    LossScaleOptimizer(inner, policies=3)  # type: ignore[arg-type]
    LossScaleOptimizer(inner).dynamic_growth_steps = "2"  # type: ignore[assignment]
    LossScaleOptimizer(inner).loss_scale = 2.0  # type: ignore[misc]
    TraceCallback("fit.jsonl", mode="overwrite")  # type: ignore[arg-type]
    TraceCallback(restore_buffers="yes")  # type: ignore[arg-type]
    LossScaleOptimizer(inner).finalize_variable_values(3)  # type: ignore[arg-type]
    TraceCallback(3)  # type: ignore[arg-type]
