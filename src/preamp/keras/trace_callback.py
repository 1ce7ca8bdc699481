"""A Keras callback that records what loss scaling did, step by step.

It also keeps track of two things around every batch: the loss, of which Keras logs only the mean over the
epoch so far, and the model's buffers, in which an overflow in the forward pass leaves inf or NaN.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from preamp.checks import callable_or_none, level_of_caller, some_of
from preamp.errors import PolicyError, ScaleExhausted, UsageError
from preamp.keras.inner import BaseLossScaleOptimizer
from preamp.keras.loss_scale_optimizer import LossScaleOptimizer, arrays
from preamp.record.trace import Trace
from preamp.scaling import Step, raise_if_exhausted, to_step, with_rules

EPSILON = 2.0**-23  # of float32, which the sums are kept in
TOLERANCE = 0.01  # how much of a loss may be the rounding of the sum


class TraceCallback(keras.callbacks.Callback):
    """Records a `Step` after every training batch, and adds `loss_scale` and `skipped_steps` to the logs.

    Put it before callbacks that show logs, such as `keras.callbacks.TensorBoard`. Recording reads a few
    scalars to the host after every batch. With `steps_per_execution=n` Keras calls it after every n-th step:
    the trace has only these, `skipped_steps` counts all of them, and there is one warning if a step in
    between was skipped. After a skipped step one more read finds out whether the forward pass has left inf or
    NaN in moving statistics: `Step.buffers` names them.

    Args:
        path: the file to write, which is closed after `fit` and continued by the next; or a `Trace`, which
            stays open; or None to keep the trace in memory.
        mode: what to do if the file exists: "new" refuses, "append" continues it, "replace" overwrites it.
        on_step: called with each `Step` after it is recorded.
        restore_buffers: whether to restore the variables that layers keep besides their weights, such as
            BatchNorm's moving statistics: after every skipped step all of them get their values from before
            it. With `steps_per_execution` above 1, those that are not finite get their values from before
            these steps. This costs a copy of them on their device before every batch. False: one warning
            names those that are not finite.
        on_error: what happens if the file cannot be written, as for a `Trace`.
        only_rank: the number of the only process that writes the file, as for a `Trace`.
        **about: anything JSON can hold that describes the run.

    Attributes:
        trace: the record. A step's `loss` is the loss of its own batch, not the mean over the epoch, which
            Keras logs. In a compiled step, as on JAX and TensorFlow, it is computed from Keras's float32 sum
            over the epoch, before and after the batch. It is None where that is not possible: with
            `steps_per_execution` above 1, for the rest of an epoch in which a loss was inf or NaN, where the
            sum's rounding is more than 1% of the loss, and in a `train_step` of your own that updates no
            `keras.metrics.Mean` named "loss".

    Raises:
        PolicyError: for an `on_step` that is not callable, and a `restore_buffers` that is not a bool.
        TraceError: for a file that cannot be continued.
        UsageError: for settings of a file together with a `Trace`; from `fit`, if the model's optimizer is
            not a `preamp.keras.LossScaleOptimizer`.
        ScaleExhausted: from `fit`, if the policy gives up.
    """

    def __init__(
        self,
        path: str | Path | Trace | None = None,
        *,
        mode: Literal["new", "append", "replace"] = "new",
        on_step: Callable[[Step], object] | None = None,
        restore_buffers: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
        only_rank: int | None = None,
        **about: Any,
    ) -> None:
        super().__init__()
        callable_or_none("on_step", on_step, "on_step=log, or any function")
        if not isinstance(restore_buffers, bool):
            raise PolicyError(
                f"restore_buffers={restore_buffers!r} is neither True nor False. Write restore_buffers=True."
            )
        own = {"mode": mode != "new", "on_error": on_error != "raise", "only_rank": only_rank is not None}
        of_file = [*about, *(name for name, is_given in own.items() if is_given)]
        if isinstance(path, Trace) and of_file:
            raise UsageError(
                f"{', '.join(of_file)}: this applies to a file, but a Trace was given. "
                "Pass them to the Trace: TraceCallback(Trace(path, mode=..., name=...))."
            )
        self.restore_buffers = restore_buffers
        self._has_warned = self._has_warned_of_unrecorded = False
        self.on_step: Callable[[Step], object] | None = on_step
        self._path = None if isinstance(path, Trace) else path
        self._settings: dict[str, Any] = {"on_error": on_error, "only_rank": only_rank}
        self.trace: Trace = path if isinstance(path, Trace) else self._open_trace(mode, **about)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer, and reopen the file that the last `fit` closed."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer):
            because = (
                "Under the policy mixed_float16, compile wraps an optimizer that is not wrapped yet. "
                if isinstance(optimizer, BaseLossScaleOptimizer)
                else ""
            )
            raise UsageError(
                f"the model's optimizer is {optimizer!r} of Keras, which keeps no record. {because}"
                "Write compile(optimizer=preamp.keras.LossScaleOptimizer(keras.optimizers.Adam()))."
            )
        if self._path is not None and not self._close.alive:
            self.trace = self._open_trace("append")
        self._buffers = NonTrainableVariables(self.model)
        self._losses = BatchLosses(self.model)
        self._steps, self._skipped = map(int, arrays.read(self._values()[-2:]))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Copy the buffers, and the sum of the losses before this batch."""
        if self.restore_buffers:
            self._buffers.keep()
        self._losses.begin_batch(self._values()[-2])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the step, and log the scale."""
        optimizer = self.model.optimizer
        values = self._values()
        scalars = self._losses.end_batch(optimizer._loss_of_step)
        numbers = arrays.read([*scalars, *values])
        of_losses, numbers = numbers[: len(scalars)], numbers[len(scalars) :]
        state = optimizer._scaler.state_of(numbers)
        step = with_rules(to_step(state, framework="keras"), optimizer.policy, optimizer.guard)
        if step is None:
            return
        loss = self._losses.loss(of_losses, numbers[-2], (logs or {}).get("loss"))
        steps, skipped = map(int, numbers[-2:])
        self._warn_if_unrecorded(steps - self._steps - 1, skipped - self._skipped - step.skipped)
        if steps > self._steps:
            all_skipped = skipped - self._skipped == steps - self._steps
            optimizer._scaler.note_compiled(taken=not all_skipped, finite=step.finite)
        is_alone = steps == self._steps + 1  # no step was taken since the buffers were copied
        buffers, restored = self._not_finite_buffers(is_alone) if skipped > self._skipped else ((), ())
        self._steps, self._skipped = steps, skipped
        step = step._replace(loss=loss, buffers=buffers, restored=restored)
        self.trace(step)
        if self.on_step is not None:
            self.on_step(step)
        if logs is not None:
            logs["loss_scale"], logs["skipped_steps"] = step.new_scale, skipped
        try:
            raise_if_exhausted(optimizer.policy, state)
        except ScaleExhausted as reason:
            self.trace.stop(str(reason))
            self.on_train_end()
            raise

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the scale, for the history and for callbacks that show logs."""
        if logs is not None:
            logs["loss_scale"] = self.model.optimizer.loss_scale
            logs["skipped_steps"] = self.model.optimizer.skipped_steps

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the file."""
        if self._path is not None:
            self._close()

    def _open_trace(self, mode: Literal["new", "append", "replace"], **about: Any) -> Trace:
        """Return a trace of the file, which is closed with this callback if `fit` breaks off."""
        trace = Trace(path=self._path, mode=mode, **self._settings, **about)
        self._close = weakref.finalize(self, trace.close)
        return trace

    def _values(self) -> list[Any]:
        """Return the values of the variables of the scale."""
        optimizer = self.model.optimizer
        scalars = list(optimizer._scaler.scalars.values())
        return _state_values(self.model, scalars, optimizer.variables, "optimizer")

    def _warn_if_unrecorded(self, between: int, skipped: int) -> None:
        """Warn once of skipped steps after which Keras called no callback."""
        if skipped > 0 and not self._has_warned_of_unrecorded:
            self._has_warned_of_unrecorded = True
            warnings.warn(
                f"{skipped} of {between} steps since the last recorded one were skipped and are not in the "
                "trace: with steps_per_execution Keras calls no callback after them. skipped_steps counts "
                "them. Write compile(steps_per_execution=1) to record every step.",
                stacklevel=level_of_caller("keras", "tensorflow"),
            )

    def _not_finite_buffers(self, restores_all: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the paths of buffers that are not finite after a skipped step, and of those restored.

        One warning names those that stay as they are.

        Args:
            restores_all: whether to restore the finite ones as well, if asked to restore.
        """
        not_finite = self._buffers.not_finite(arrays.read)
        remaining = not_finite
        if self.restore_buffers:
            self._buffers.restore(None if restores_all else not_finite)
            remaining = self._buffers.not_finite(arrays.read) if not_finite else []
        if remaining and not self._has_warned:
            self._has_warned = True
            instead = (
                "They already were before this step. Load earlier weights."
                if self.restore_buffers
                else "Write TraceCallback(restore_buffers=True), which restores them."
            )
            where = some_of([variable.path for variable in remaining])
            warnings.warn(
                f"a step was skipped, and its forward pass left inf or NaN in {where}: "
                f"predictions are NaN, and so are weights that are saved now. {instead}",
                stacklevel=level_of_caller("keras", "tensorflow"),
            )
        names, lost = (tuple(one.path for one in some) for some in (not_finite, remaining))
        return names, tuple(name for name in names if name not in lost)


class BatchLosses:
    """The losses of the batches of one `fit`.

    If the step is not compiled, the optimizer knows its loss. Otherwise the loss is what the batch added to
    the sum from which Keras computes its mean.

    Args:
        model: the model that is trained. A `train_step` of its own may have another mean named "loss".
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._before: list[Any] = []
        self._is_known = False

    def begin_batch(self, steps: object) -> None:
        """Copy the sum and the count on their device, because a batch may write to their memory.

        Args:
            steps: how many steps the optimizer has counted, a scalar of the backend.
        """
        sums = self._sums()
        self._before = [value + 0 for value in [*sums, steps]] if sums else []

    def end_batch(self, known: tuple[Any, Any] | None) -> list[Any]:
        """Return the scalars to read for `loss`.

        Args:
            known: the loss of a step that the optimizer knows, and how many steps there were after it.
        """
        sums = self._sums() if self._before else []
        self._is_known = known is not None
        return [*(known or ()), *(self._before if sums else ()), *sums]

    def loss(self, numbers: Sequence[float], steps: float, mean: float | None) -> float | None:
        """Return the loss of the batch; None if it cannot be known.

        Args:
            numbers: the scalars of `end_batch`, read.
            steps: how many steps the optimizer has counted now.
            mean: the mean loss that Keras logged for this batch. If the sums give another one, another
                callback has called `evaluate` since.
        """
        if self._is_known:
            loss, at, *numbers = numbers
            if at == steps:
                return loss
        if not numbers:
            return None
        total_before, count_before, steps_before, total, count = numbers
        rows, added = _added(count_before, count), _added(total_before, total)
        if steps - steps_before != 1 or added is None or not rows or rows < 0.0:
            return None
        is_moved = mean is not None and not np.isclose(mean, total / count, rtol=1e-4, equal_nan=True)
        return None if is_moved else added / rows

    def _sums(self) -> list[Any]:
        """Return the epoch's sum of losses, each times the rows of its batch, and its rows."""
        among = self._model.metrics_variables
        for metric in self._model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                return _state_values(self._model, [metric.total, metric.count], among, "metrics")
        return []


class NonTrainableVariables:
    """The variables that a model's layers made as not trainable, such as BatchNorm's moving statistics.

    A forward pass writes them, so a step whose gradients are skipped has changed them already. The weights
    of frozen layers, which no forward pass writes, are not among them, nor are the seeds of dropout.

    Args:
        model: the model that is trained.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._kept: dict[int, Any] = {}

    def keep(self) -> None:
        """Copy the values, on their device, for `restore`."""
        variables = self._variables()
        values = zip(variables, self._values_of(variables), strict=True)
        self._kept = {id(variable): _copied(value) for variable, value in values}

    def not_finite(self, read: Callable[[Sequence[Any]], list[float]]) -> list[Any]:
        """Return the variables that hold an inf or NaN: one read to the host.

        Args:
            read: reads scalars of the backend to the host.
        """
        variables = [v for v in self._variables() if keras.backend.is_float_dtype(v.dtype)]
        values = self._values_of(variables)
        flags = read([keras.ops.all(keras.ops.isfinite(value)) for value in values]) if values else []
        return [variable for variable, finite in zip(variables, flags, strict=True) if not finite]

    def restore(self, variables: Sequence[Any] | None = None) -> None:
        """Set variables to the values that were last kept. Variables made since then stay as they are.

        Args:
            variables: the variables to restore. None: all.
        """
        if hasattr(self._model, "jax_state_sync"):
            self._model.jax_state_sync()  # on JAX `fit` keeps the values itself, and reads them again
        for variable in self._variables() if variables is None else variables:
            if id(variable) in self._kept:
                variable.assign(self._kept[id(variable)])

    def _values_of(self, variables: Sequence[Any]) -> list[Any]:
        return _state_values(self._model, variables, self._model.non_trainable_variables, "non_trainable")

    def _variables(self) -> list[Any]:
        """Return the variables. Keras has no public name for those that a layer made as not trainable."""
        found: dict[int, Any] = {}
        for layer in self._model._flatten_layers():
            for variable in getattr(layer, "_non_trainable_variables", ()):
                found.setdefault(id(variable), variable)
        known = {id(variable) for variable in self._model.non_trainable_variables}
        return [variable for key, variable in found.items() if key in known]


def _copied(value: Any) -> Any:
    """Return a copy of a tensor."""
    # Computed, because an assignment may write to the memory of a value that was read before.
    is_bool = keras.backend.standardize_dtype(value.dtype) == "bool"
    return keras.ops.logical_or(value, False) if is_bool else value * 1


def _state_values(model: keras.Model, variables: Sequence[Any], among: Sequence[Any], kind: str) -> list[Any]:
    """Return the values of variables. During `fit` on JAX the trainer holds them.

    Args:
        model: the model that is trained.
        variables: the variables whose values to return.
        among: all variables of their kind, in Keras's order.
        kind: "optimizer", "non_trainable" or "metrics".
    """
    state = getattr(model, "_jax_state", None)
    if state and not model._jax_state_synced:
        by_variable = zip(among, state[f"{kind}_variables"], strict=True)
        values = {id(variable): value for variable, value in by_variable}
        return [values[id(variable)] for variable in variables]
    return [variable.value for variable in variables]


def _added(before: float, after: float) -> float | None:
    """Return the number that was added to a float32 sum; None if rounding hides it."""
    if not math.isfinite(before):
        return None
    added = after - before
    if before and math.isfinite(added) and abs(added) * TOLERANCE < EPSILON * max(abs(before), abs(after)):
        return None
    return added
