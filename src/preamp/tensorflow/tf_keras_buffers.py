"""Variables that a tf_keras model's layers keep besides their weights, such as BatchNorm's moving statistics.

The forward pass writes them, so an overflow there leaves inf or NaN in them before the step can be skipped.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras

from preamp.checks import shown
from preamp.errors import PolicyError


class LayerBuffers:
    """The variables that a model's layers made as not trainable, checked after a skipped step.

    Steps that are taken cost nothing unless copies are kept. Integer variables, which are always finite, are
    included only if copies are kept.

    Args:
        model: the model that is trained, a `tf_keras` model or layer.
        restores: whether to keep copies of the variables on their device, to restore them.

    Attributes:
        copies: the copies, one for each variable and replica.

    Raises:
        PolicyError: if it is not a tf_keras model.
    """

    def __init__(self, model: tf_keras.layers.Layer, *, restores: bool) -> None:
        if not isinstance(model, tf_keras.layers.Layer):
            raise PolicyError(
                f"model={shown(model)} is not a tf_keras.Model. Write model=model, or leave it out."
            )
        self._model, self._restores = model, restores
        self._has_begun = False
        self._names: list[str] = []
        self._variables: list[tf.Variable] = []
        self._ruined: tf.Variable | None = None
        self.copies: list[tf.Variable] = []
        if model.built:
            self._build()

    def begin(self) -> None:
        """Find the variables before the first step is applied. Called where variables can be made."""
        if self._has_begun or not tf.executing_eagerly():
            return
        if self._ruined is None:
            self._build()
        self._has_begun = True
        self.keep_finite()

    def keep_finite(self) -> None:
        """Copy the variables that are finite now, as after a checkpoint was loaded into the model."""
        for variable, copy in zip(self._variables, self.copies, strict=False):
            copy.assign(tf.where(_is_finite(variable), variable, copy))

    def end_step(self, taken: bool | tf.Tensor) -> None:
        """Copy the variables after a step that was taken; restore them after one that was skipped.

        Args:
            taken: a bool, or a boolean tensor in a graph.
        """
        if not self._variables:
            return
        if isinstance(taken, bool):
            self._keep() if taken else self._restore()
        else:
            tf.cond(taken, self._keep, self._restore)

    def ruined(self) -> tuple[str, ...]:
        """Return the names of the variables that the last skipped step left not finite. Reads a few flags."""
        if self._ruined is None:
            return ()
        pairs = zip(self._names, self._ruined.numpy().tolist(), strict=True)
        return tuple(dict.fromkeys(name for name, is_ruined in pairs if is_ruined))

    def restored(self) -> tuple[str, ...]:
        """Return those of `ruined` that are finite again, because their copies are."""
        names = self.ruined()
        if not (names and self.copies):
            return ()
        pairs = zip(self._names, self.copies, strict=True)
        lost = {name for name, copy in pairs if name in names and not bool(_is_finite(copy))}
        return tuple(name for name in names if name not in lost)

    def tracked(self) -> dict[str, tf.Variable]:
        """Return the variables of this object by name, which an exported function needs."""
        flags = {} if self._ruined is None else {"ruined": self._ruined}
        return {**flags, **{f"kept_{place}": copy for place, copy in enumerate(self.copies)}}

    def _build(self) -> None:
        for name, variable in _variables_of(self._model):
            if not (self._restores or variable.dtype.is_floating):
                continue
            # Under a strategy each replica has its own, in which it has written.
            parts = variable.values if isinstance(variable, tf.distribute.DistributedValues) else [variable]
            self._names += [name] * len(parts)
            self._variables += parts
        if not self._variables:
            return
        # The class itself, because `tf.Variable` would make one for each replica under a strategy.
        plain = type(self._variables[0])
        self._ruined = plain(tf.zeros(len(self._variables), tf.bool), trainable=False, name="ruined")
        for variable in self._variables if self._restores else ():
            with tf.device(variable.device):
                self.copies.append(plain(tf.identity(variable), trainable=False, name="kept"))

    def _keep(self) -> tf.Tensor:
        for variable, copy in zip(self._variables, self.copies, strict=False):
            copy.assign(tf.identity(variable))
        return tf.constant(True)

    def _restore(self) -> tf.Tensor:
        """Note which variables are not finite. If there are copies, set all variables to them."""
        assert self._ruined is not None  # there are variables
        self._ruined.assign(tf.stack([tf.logical_not(_is_finite(variable)) for variable in self._variables]))
        for variable, copy in zip(self._variables, self.copies, strict=False):
            variable.assign(tf.identity(copy))
        return tf.constant(False)


def _is_finite(variable: tf.Variable) -> tf.Tensor:
    if not variable.dtype.is_floating:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(variable))


def _variables_of(model: tf_keras.layers.Layer) -> list[tuple[str, tf.Variable]]:
    """Return variables by name. tf_keras has no public access to those a layer made as not trainable."""
    found: dict[int, tuple[str, tf.Variable]] = {}
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_weights:
            stored = getattr(variable, "_variable", variable)  # under a policy of mixed precision
            found.setdefault(id(stored), (variable.name.partition(":")[0], stored))
    return list(found.values())
