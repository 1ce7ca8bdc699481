"""The code that advice consists of, in each framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from preamp.doctor.signs import Source
from preamp.record.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Code:
    """The pieces of advice that differ between frameworks, each as it stands within a sentence."""

    finite_x: str  # tests that every entry of the inputs is finite
    finite_y: str  # the same for the targets
    largest_x: str  # the largest magnitude in the inputs
    weights_finite: str  # tests that all weights of the model are finite
    where: str  # the function that chooses between two arrays
    clear_sums: str = "clear accumulated gradients after every step, skipped or not"
    clip: str = "max_norm={norm}"  # the argument that clips gradients to {norm}
    clip_unscaled: str  # how to clip after unscaling; full sentences
    save_scale: str  # a sentence
    reset_statistics: str  # of batch normalization; a clause
    skips_unscaled: str  # makes what skips steps that are not finite without scaling
    make_optimizer: str  # how to give the optimizer the right parameters; a sentence
    freeze: str  # keeps parameters from getting gradients
    stops_gradients: str  # what keeps gradients from flowing, as a list
    operator_in_float32: str  # how to run an operator in float32 whose layer is not known; a sentence
    layer_in_float32: str  # how to do so for the layer {name}, which is at model{path}
    loss_in_float32: str
    from_logits: str  # loss functions that take the logarithm of a softmax or sigmoid safely
    trace: str = "Trace"  # what records a run
    restore: str  # how to keep buffers safe in steps that are skipped; a sentence
    if_taken: str  # tells whether a step was taken
    records: Mapping[Source, str]  # what to write to record more, by what is missing; "" if not possible
    these_steps: str = ""  # how to record snapshots of given steps; "" if not possible
    blame: str | None = None  # what to add to `preamp blame`; None where it does not support the framework

    @property
    def clear_sentence(self) -> str:
        """How to clear gradients in any loop; a sentence."""
        return f"{self.clear_sums[0].upper()}{self.clear_sums[1:]}."

    def run_in_float32(self, name: str) -> str:
        """Return the advice to run a layer in float32; with "" for its name, an operator that overflows."""
        if not name:
            return f"{self.operator_in_float32} Or make its inputs smaller."
        path = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))
        return f"Run {name} in float32: {self.layer_in_float32.format(name=name, path=path)}."


TORCH: Final = Code(
    finite_x="`x.isfinite().all()`",
    finite_y="`y.isfinite().all()`",
    largest_x="`x.abs().max()`",
    weights_finite="all(p.isfinite().all() for p in model.parameters())",
    where="torch.where",
    clear_sums="call optimizer.zero_grad() after every step, skipped or not, also where gradients are "
    "accumulated",
    clip_unscaled="Let the scaler clip: scaler.step(optimizer, max_norm=...). Or call "
    "scaler.unscale_(optimizer) before clip_grad_norm_.",
    save_scale="Save and load the scaler with the model: scaler.state_dict() and scaler.load_state_dict().",
    reset_statistics="module.reset_running_stats() for BatchNorm",
    skips_unscaled="GradScaler(policy=Static(1.0))",
    make_optimizer="Create the optimizer last, after model.to(...) and anything that copies or wraps the "
    "model.",
    freeze="requires_grad_(False)",
    stops_gradients="detach(), no_grad",
    operator_in_float32="Run the operator that overflows in float32: autocast(..., "
    'casting=casting.DEFAULT.float32("exp")), with its name instead of exp.',
    layer_in_float32="write `with torch.autocast(device, enabled=False): y = model{path}(x.float())` where "
    "{name} is called",
    loss_in_float32="loss_fn(output.float(), target)",
    from_logits="log_softmax, cross_entropy or binary_cross_entropy_with_logits",
    restore="GradScaler(model=model, restore_buffers=True) sets buffers back when it skips a step.",
    if_taken="`if not scaler.last_step.skipped:`",
    records={
        "loss": "the loss, by scaler.scale(loss)",
        "norms": "gradient norms, GradScaler(max_norm=math.inf, on_step=trace)",
        "lens": "snapshots, lens = Lens(model, 10, scaler=scaler, on_snapshot=trace.add_snapshot)",
        "names": "the names of parameters and buffers, GradScaler(model=model, on_step=trace)",
    },
    these_steps="snapshots of these very steps, Lens(model, 1, scaler=scaler, "
    "on_snapshot=trace.add_snapshot)",
    blame="",
)

JAX: Final = Code(
    finite_x="`jnp.isfinite(x).all()`",
    finite_y="`jnp.isfinite(y).all()`",
    largest_x="`jnp.abs(x).max()`",
    weights_finite="all(jnp.isfinite(p).all() for p in jax.tree.leaves(params))",
    where="jnp.where",
    clip_unscaled="Let the transformation clip: loss_scaled(optimizer, max_norm=...).",
    save_scale="Save and load opt_state with the parameters: it contains the scale.",
    reset_statistics="initialize the batch statistics again",
    skips_unscaled="loss_scaled(optimizer, Static(1.0))",
    make_optimizer="Call optimizer.init with the parameters that are trained.",
    freeze="jax.lax.stop_gradient",
    stops_gradients="stop_gradient",
    operator_in_float32=TORCH.operator_in_float32,
    layer_in_float32="call what computes {name} as autocast(function, enabled=False), with inputs in float32",
    loss_in_float32="loss_fn(output.astype(jnp.float32), target)",
    from_logits="jax.nn.log_softmax, optax.softmax_cross_entropy or optax.sigmoid_binary_cross_entropy",
    restore="step(..., has_state=True) keeps the old statistics when it skips a step.",
    if_taken="`jnp.where(last_step(state).skipped, old, new)`",
    records={
        "loss": "the loss, trace(last_step(state)._replace(loss=float(value)))",
        "norms": "gradient norms, loss_scaled(optimizer, max_norm=math.inf)",
        "lens": "snapshots of what `watch` marks, trace.add_snapshot(snapshot(...))",
        "names": "",
    },
    these_steps="a snapshot of these very steps",
    blame=" --framework jax",
)

KERAS: Final = Code(
    finite_x="`numpy.isfinite(x).all()`",
    finite_y="`numpy.isfinite(y).all()`",
    largest_x="`numpy.abs(x).max()`",
    weights_finite="all(numpy.isfinite(w).all() for w in model.get_weights())",
    where="keras.ops.where",
    clip="global_clipnorm={norm}",
    clip_unscaled="Let the optimizer clip: LossScaleOptimizer(optimizer, global_clipnorm=...).",
    save_scale="Save and load the whole model with its optimizer: model.save() and "
    "keras.saving.load_model().",
    reset_statistics="assign zeros to moving_mean and ones to moving_variance of BatchNormalization",
    skips_unscaled="LossScaleOptimizer(optimizer, policy=Static(1.0))",
    make_optimizer="Make a new optimizer for this model, and give it the model's trainable variables.",
    freeze="layer.trainable = False",
    stops_gradients="stop_gradient",
    operator_in_float32='Run the layer that overflows in float32: give it dtype="float32".',
    layer_in_float32='give {name} dtype="float32"',
    loss_in_float32='give the last layer dtype="float32"',
    from_logits="a loss with from_logits=True",
    trace="TraceCallback",
    restore="TraceCallback(..., restore_buffers=True) sets them back when it skips a step.",
    if_taken="`if not optimizer.last_step.skipped:`",
    records={
        "loss": "the loss, by TraceCallback",
        "norms": "gradient norms, LossScaleOptimizer(optimizer, global_clipnorm=math.inf)",
        "lens": "the outputs of layers in such a step, keras.Model(model.inputs, [layer.output for layer in "
        "model.layers])",
        "names": "",
    },
)

CODE: Final[Mapping[str | None, Code]] = {
    None: replace(TORCH, stops_gradients="detach(), stop_gradient, no_grad"),
    "torch": TORCH,
    "jax": JAX,
    "keras": KERAS,
    "tensorflow": replace(  # tf_keras, whose layers are like those of Keras 3
        KERAS,
        where="tf.where",
        clip_unscaled="Let the inner optimizer clip, with its argument global_clipnorm.",
        save_scale="Save and load the optimizer with the model, as in tf.train.Checkpoint(model=..., "
        "optimizer=...).",
        trace="Trace",
    ),
}
"""By the name of the framework; None for an unknown one."""


def framework_of(trace: Trace) -> str | None:
    """Return the framework of a run, as its steps or its description say; None if it is unknown."""
    given = (trace.framework, trace.about.get("framework"))
    return next((name for name in given if isinstance(name, str) and name in CODE), None)
