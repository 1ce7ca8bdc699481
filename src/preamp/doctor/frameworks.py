"""Word findings for the framework of a run.

They are written with code of PyTorch, which is replaced here for runs of JAX, Keras and TensorFlow.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from preamp.doctor.evidence import Record

KNOWN: Final = ("torch", "jax", "keras", "tensorflow")


class Phrase(NamedTuple):
    """What to write in each framework.

    Attributes:
        torch: as findings have it, a regular expression.
        jax: instead of it; may use its groups.
        keras: likewise.
        tensorflow: likewise, for tf_keras.
    """

    torch: str
    jax: str
    keras: str
    tensorflow: str


def _for_layers(torch: str, jax: str, keras: str) -> Phrase:
    """Return a phrase that is the same for Keras and for tf_keras."""
    return Phrase(torch, jax, keras, keras)


PHRASES: Final = (
    _for_layers(r"`(\w)\.isfinite\(\)\.all\(\)`", r"`jnp.isfinite(\1).all()`", r"`numpy.isfinite(\1).all()`"),
    _for_layers(r"`(\w)\.abs\(\)\.max\(\)`", r"`jnp.abs(\1).max()`", r"`numpy.abs(\1).max()`"),
    _for_layers(
        r"`all\(p\.isfinite\(\)\.all\(\) for p in model\.parameters\(\)\)`",
        "`all(jnp.isfinite(p).all() for p in jax.tree.leaves(params))`",
        "`all(numpy.isfinite(w).all() for w in model.get_weights())`",
    ),
    Phrase(
        "a preamp.torch.Lens names it",
        "jax_debug_nans and jax_debug_infs stop there",
        "keras.Model(model.inputs, [layer.output for layer in model.layers]) returns the output of each",
        "tf.debugging.enable_check_numerics() stops there",
    ),
    _for_layers(" and snapshots of a Lens", " and snapshots (preamp.jax.snapshot)", ""),
    _for_layers(
        " If they are finite, record the other passes too: give the Lens .* in a step\\.",
        " If they are finite, record snapshots of the other passes too.",
        "",
    ),
    Phrase(r"torch\.where", "jnp.where", "keras.ops.where", "tf.where"),
    _for_layers(
        r"([Cc])all optimizer\.zero_grad\(\) after",
        r"\1lear accumulated gradients after",
        r"\1lear accumulated gradients after",
    ),
    _for_layers(r"\(max_norm=1\.0\)", "(max_norm=1.0)", "(global_clipnorm=1.0)"),
    Phrase(
        r"Let the scaler clip: .* loss_scaled\(optimizer, max_norm=\.\.\.\)\.",
        "Let the transformation clip: loss_scaled(optimizer, max_norm=...).",
        "Let the optimizer clip: LossScaleOptimizer(optimizer, global_clipnorm=...).",
        "Let the inner optimizer clip, with its argument global_clipnorm.",
    ),
    Phrase(
        r"Save and load the scaler with the model: scaler\.state_dict\(\) and scaler\.load_state_dict\(\)\.",
        "Save and load opt_state with the parameters: it contains the scale.",
        "Save and load the whole model with its optimizer: model.save() and keras.saving.load_model().",
        "Save and load the optimizer with the model, as in tf.train.Checkpoint(model=..., optimizer=...).",
    ),
    _for_layers(
        r"module\.reset_running_stats\(\) for BatchNorm",
        "initialize the batch statistics again",
        "assign zeros to moving_mean and ones to moving_variance of BatchNormalization",
    ),
    _for_layers(
        r"GradScaler\(policy=Static\(1\.0\)\)",
        "loss_scaled(optimizer, Static(1.0))",
        "LossScaleOptimizer(optimizer, policy=Static(1.0))",
    ),
    _for_layers(r" \(after \.to\(\) and wrapping\)", "", ""),
    _for_layers(
        r"Create the optimizer last, after model\.to\(\.\.\.\) and anything that copies or wraps the model\.",
        "Call optimizer.init with the parameters that are trained.",
        "Make a new optimizer for this model, and give it the model's trainable variables.",
    ),
    _for_layers(r"detach\(\), stop_gradient, no_grad or", "stop_gradient or", "stop_gradient or"),
    _for_layers(
        r", in a region with autocast\(enabled=False\)",
        ", with autocast(function, enabled=False)",
        ', with dtype="float32"',
    ),
    _for_layers(
        r', in autocast\(enabled=False\), or with casting=casting\.DEFAULT\.float32\("exp"\) for an operator',
        ", with autocast(function, enabled=False), or with "
        'casting=casting.DEFAULT.float32("exp") for a primitive',
        ', with dtype="float32"',
    ),
    _for_layers(
        r", in autocast\(enabled=False\)",
        ", with autocast(function, enabled=False)",
        ', with dtype="float32"',
    ),
    _for_layers(
        r"Run the operator that overflows in float32: autocast\(.*, with the operator's name instead of "
        r"exp\.",
        'Run the primitive that overflows in float32: autocast(..., casting=casting.DEFAULT.float32("exp")), '
        "with the primitive's name instead of exp.",
        'Run the layer that overflows in float32: give it dtype="float32".',
    ),
    _for_layers(
        r"write `with torch\.autocast\([^`]*` where (\S+) is called",
        r"call what computes \1 as autocast(function, enabled=False), with inputs in float32",
        r'give \1 dtype="float32"',
    ),
    _for_layers(
        r"loss_fn\(output\.float\(\), target\)",
        "loss_fn(output.astype(jnp.float32), target)",
        'give the last layer dtype="float32"',
    ),
    _for_layers(
        "use log_softmax, cross_entropy or binary_cross_entropy_with_logits on",
        "use jax.nn.log_softmax, optax.softmax_cross_entropy or optax.sigmoid_binary_cross_entropy on",
        "use a loss with from_logits=True on",
    ),
)


def framework_of(record: Record) -> str | None:
    """Return the framework of a run, as its steps or its description say; None if it is unknown."""
    given = (record.trace.framework, record.trace.about.get("framework"))
    return next((str(name) for name in given if name in KNOWN), None)


def in_framework(text: str, framework: str | None) -> str:
    """Return a text with the code of a framework; as it is for PyTorch, and for one that is unknown."""
    if framework in (None, "torch"):
        return text
    for phrase in PHRASES:
        text = re.sub(phrase.torch, getattr(phrase, str(framework)), text)
    return text
