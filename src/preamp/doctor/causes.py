"""What can be wrong with a run: one entry for each cause, with the signs that it predicts and its remedy.

To add a cause, add an entry, and a test of a run that has it. A number says how often the sign is present in
runs with this cause, in percent; a sign that is not named is as frequent as usual (`Sign.usual`). Remedies
refer to the pieces of `frameworks.Code`, so that each framework gets its own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that can be wrong.

    Attributes:
        kind: its name.
        weight: how common it is, compared with the others.
        says: what happens, as a sentence; {when} is the steps.
        remedy: what to do, with pieces of `Code`.
        predicts: how often each sign is present in runs that have it.
        settings: whether settings of the policy are advised as well.
        operation: whether there may be one operation behind it, for `preamp blame` to find.
    """

    kind: str
    weight: float = 1.0
    says: str
    remedy: str
    predicts: Mapping[str, float] = field(default_factory=dict)
    settings: bool = False
    operation: bool = False


LOWER: Final = (
    "Lower the learning rate, by a factor of 10 to begin with, warm it up, or clip the gradients ({clip})."
)
CHECK: Final = (
    "Check the batches of these steps before the model: {code.finite_x}, and {code.largest_x}. Fix or drop "
    "such rows."
)
FORWARD: Final = " No loss scale helps, because the loss is scaled after the forward pass."
PARTS: Final = (
    "inputs bad 2, inputs odd 1, weights bad 2, module overflow 2, module NaN 2, outputs finite 2, "
    "gradient overflow 2, gradient NaN 2, pass sound 2"
)
"""Where the first inf or NaN of a step can be. What begins in one of these parts leaves the others sound."""


def rates(text: str) -> dict[str, float]:
    """Return how often signs are present, from words such as "rose 85, fell 50", in percent."""
    pairs = (one.strip().rpartition(" ") for one in text.split(","))
    return {name: float(percent) / 100.0 for name, _, percent in pairs}


def one_part(text: str) -> dict[str, float]:
    """Return the same for a cause that begins in one part of a step."""
    return rates(PARTS) | rates(text)


OF_LOST_STEPS: Final = (
    Cause(
        kind="learning rate",
        weight=3.0,
        says="The training diverged: the updates are too large, so the learning rate is too high.",
        remedy=f"{LOWER} If that does not help, check the optimizer's other settings, such as eps.",
        predicts=one_part(
            "weights bad 30, module overflow 50, module NaN 15, outputs finite 20, gradient overflow 30, "
            "gradient NaN 5, outputs saturate 80, all at once 50, to the end 96, no update before 0.2, few "
            "updates 40, loss lost 85, rose 85, weights grew 90, began otherwise 2, rare 8, in rhythm 2"
        ),
    ),
    Cause(
        kind="optimizer",
        weight=0.5,
        says="An update wrote NaN or inf into the weights {when}, although the gradients were finite.",
        remedy="Go back to a checkpoint before it, and check the optimizer: eps=0, or an eps that is 0 in "
        "float16 (1e-8 is), divides zero by zero where a gradient is zero; so does code that divides by a "
        "norm. `{code.weights_finite}` shows whether weights are finite.",
        predicts=one_part(
            "weights bad 98, all at once 90, to the end 99.8, no update before 0.2, few updates 40, loss "
            "lost 98, inf 15, rose 5, weights grew 20, began otherwise 2"
        ),
    ),
    Cause(
        kind="not skipped",
        weight=1.0,
        says="An update used gradients that were not finite, {when}: no step was skipped, and everything "
        "after it is lost.",
        remedy="Go back to a checkpoint before that step. Use a scaler that skips such steps: "
        "{code.skips_unscaled} does so without scaling.",
        predicts=one_part(
            "weights bad 98, to the end 99.8, no update before 15, skipped 2, loss lost 98, rose 15"
        ),
    ),
    Cause(
        kind="gradients not cleared",
        weight=1.5,
        says="Gradients are not cleared: inf or NaN from one step stays in them, so that all later steps "
        "are skipped ({when}), at any scale.",
        remedy="{code.clear_sentence} If your loop accumulates gradients itself, begin with zeros: inf "
        "times 0 is NaN.",
        predicts=one_part(
            "pass sound 98, all at once 95, to the end 99.8, no update before 5, skipped 98, loss lost "
            "0.2, few updates 10, rose 5, any scale 98, worked before 90, began otherwise 50, named 99.6, "
            "carried 50"
        ),
    ),
    Cause(
        kind="another rank",
        weight=0.2,
        says="The gradients of this rank are finite, and steps are skipped {when}: another rank has the inf "
        "or NaN.",
        remedy="Look at the records of the other ranks. With a single process, see that gradients are "
        "cleared: {code.clear_sums}.",
        predicts=one_part(
            "pass sound 98, to the end 60, all at once 90, any scale 90, skipped 98, loss lost 2, named 2"
        ),
    ),
    Cause(
        kind="poisoned buffers",
        weight=0.6,
        says="One bad step left inf or NaN in what the model keeps (running statistics, an average or a "
        "normalizer), and the steps {when} suffer from it{buffers}.",
        remedy="Go back to a checkpoint before that step, or reset what it keeps: {code.reset_statistics}. "
        "{code.restore}",
        predicts=one_part(
            "module overflow 10, module NaN 90, outputs finite 3, all at once 95, to the end 99.8, no "
            "update before 1, few updates 10, loss lost 98, skipped 85, inf 10, rose 5, weights grew 10, "
            "buffers 90"
        ),
    ),
    Cause(
        kind="poisoned average",
        weight=0.3,
        says="The outputs of the model are finite and the loss is not, {when}: what is kept beside the "
        "model (an average of its weights, a teacher, a queue of features, a normalizer) took in the inf or "
        "NaN of one bad step.",
        remedy="Update what is kept only in steps that were taken: {code.if_taken}. Go back to a checkpoint "
        "before the first of these steps.",
        predicts=one_part(
            "inputs bad 30, inputs odd 31, outputs finite 60, all at once 95, outputs saturate 40, to the "
            "end 99.8, no update before 1, few updates 10, loss lost 98, inf 15, rose 5, weights grew 10"
        ),
    ),
    Cause(
        kind="bad inputs",
        weight=2.0,
        says="The inputs of some batches hold inf, NaN or values far larger than usual, {when}: what is "
        "computed from them is lost at any scale.",
        remedy=CHECK,
        predicts=one_part(
            "inputs bad 60, inputs odd 97, module overflow 3, module NaN 3, gradient overflow 8, "
            "gradient NaN 8, pass sound 15, any scale 90, all at once 90, to the end 35, no update before "
            "10, few updates 5, loss lost 75, rose 5, weights grew 10, began otherwise 2, rare 45, in "
            "rhythm 50"
        ),
    ),
    Cause(
        kind="bad targets",
        says="The targets of some batches hold inf, NaN or extreme values, {when}: the outputs are finite, "
        "and the loss is not.",
        remedy="Check the targets of these steps: {code.finite_y}, and how large they are. A placeholder "
        "for missing values, such as 1e30 or -1, does this too.",
        predicts=one_part(
            "outputs finite 98, pass sound 10, any scale 90, outputs saturate 30, all at once 90, to the "
            "end 35, no update before 10, few updates 5, loss lost 90, rose 5, weights grew 10, began "
            "otherwise 2, rare 40, in rhythm 50"
        ),
    ),
    Cause(
        kind="forward overflow",
        weight=1.5,
        says="Something overflows {band} in the forward pass, {when}." + FORWARD,
        remedy="{float32} The next module casts the output back: run that in float32 too, and so on until "
        "the values are small, or make them smaller where they become large.",
        predicts=one_part(
            "module overflow 98, all at once 60, to the end 60, no update before 40, few updates 10, loss "
            "lost 98, inf 60, rose 20, weights grew 30, rare 8, in rhythm 10"
        ),
        operation=True,
    ),
    Cause(
        kind="forward NaN",
        says="An operation in the forward pass makes NaN or inf of finite values, {when}." + FORWARD,
        remedy="Look {there}for a division by a norm, a deviation or a count that can be zero, the "
        "logarithm or root of a value that may be zero or negative, and a softmax over a row that is "
        "completely masked: add an epsilon, or clamp. If a value there comes close to the largest of "
        "{band}, as the scores of attention can, compute it in float32.",
        predicts=one_part(
            "module NaN 98, all at once 50, to the end 40, no update before 30, few updates 10, loss lost "
            "98, inf 20, rose 5, weights grew 20, rare 12, in rhythm 15"
        ),
        operation=True,
    ),
    Cause(
        kind="loss function",
        says="The loss function makes inf or NaN of finite outputs, {when}." + FORWARD,
        remedy="Look there for the logarithm of 0, a division by zero, or a sum or power that overflows "
        "{band}. Compute the loss in float32: {code.loss_in_float32}. Use {code.from_logits} on the raw "
        "outputs.",
        predicts=one_part(
            "outputs finite 98, pass sound 8, outputs saturate 80, all at once 25, to the end 60, no "
            "update before 30, few updates 10, loss lost 98, rose 5, weights grew 20, rare 20, in rhythm "
            "12"
        ),
        operation=True,
    ),
    Cause(
        kind="NaN in backward",
        weight=1.5,
        says="The derivative of an operation is inf or NaN, {when}: the loss is finite, and the gradients "
        "are not, at any scale.",
        remedy="Look {there}for sqrt, norm, log or a power at 0, a division by zero, or {code.where} over a "
        "branch that is NaN (its gradient is NaN even where it is not chosen). Add an epsilon to the "
        "argument, or clamp it.",
        predicts=one_part(
            "gradient overflow 8, gradient NaN 98, all at once 40, to the end 40, no update before 40, "
            "skipped 90, loss lost 3, any scale 90, rose 5, named 98, carried 2, began otherwise 2, rare "
            "12, in rhythm 15"
        ),
        operation=True,
    ),
    Cause(
        kind="gradient overflow",
        says="The gradients are, or have become, too large for {band} at the scale of the run, {when}.",
        remedy="Make the loss smaller: a mean instead of a sum over the batch, targets and inputs (or "
        "rewards) of about 1. If gradients grow from layer to layer or from time step to time step, they "
        "explode: smaller initial weights, normalization, {clip}.",
        predicts=one_part(
            "gradient overflow 98, all at once 60, no update before 30, to the end 60, skipped 98, loss "
            "lost 5, any scale 20, rose 50, fixed 40, worked before 70, named 98, carried 2"
        ),
        settings=True,
    ),
    Cause(
        kind="scale too high",
        weight=1.5,
        says="The scale is too high for these gradients and cannot fall: steps are skipped {when}.",
        remedy="{lower}",
        predicts=one_part(
            "gradient overflow 98, all at once 30, to the end 85, no update before 70, skipped 98, loss "
            "lost 0.2, any scale 0.2, rose 5, fixed 99.8, worked before 0.8, named 98, carried 2, began "
            "otherwise 2"
        ),
        settings=True,
    ),
    Cause(
        kind="wrong start",
        says="The scale starts far too high for these gradients and is still falling at the end of the "
        "record.",
        remedy="{lower}",
        predicts=one_part(
            "gradient overflow 98, to the end 99.8, no update before 99.8, skipped 98, loss lost 0.2, any "
            "scale 0.2, fixed 2, worked before 2, named 98, carried 2"
        ),
        settings=True,
    ),
)

OF_RISEN_LOSS: Final = (
    Cause(
        kind="learning rate",
        weight=3.0,
        says="The training diverged: {rise}. The learning rate is too high; the loss scale did not cause "
        "this.",
        remedy=LOWER,
        predicts=rates("norm ahead 5, recovers 5, sudden 40, weights grew 95, sums 3"),
    ),
    Cause(
        kind="gradients not cleared",
        weight=0.3,
        says="Gradients of earlier steps are added up, so that updates grow: {rise}.",
        remedy="{code.clear_sentence}",
        predicts=rates("norm ahead 90, recovers 10, sudden 5, weights grew 95, sums 95"),
    ),
    Cause(
        kind="data changed",
        weight=0.4,
        says="The data changed: {rise}.",
        remedy="Look at the inputs, targets or rewards of the steps from there on: {code.largest_x}. Bring "
        "them to the size of the earlier ones.",
        predicts=rates("recovers 5, sudden 75, weights grew 30"),
    ),
    Cause(
        kind="loss spike",
        says="The loss spiked: {rise}, and it recovered.",
        remedy="Check the data and the learning rate of the steps before it; clip the gradients ({clip}).",
        predicts=rates("recovers 98, sudden 70, weights grew 50"),
    ),
)

OF_NO_PROGRESS: Final = (
    Cause(
        kind="vanished",
        weight=2.0,
        says="All gradients are zero: they round to zero in {band}.",
        remedy="Start high: every step that overflows lowers the scale.",
        predicts=rates(
            "gradients zero 99.8, scaled loss large 1, gradients elsewhere 2, dead outputs 2, bound 2, scale "
            "to gain 95, repeats 30, all still 30"
        ),
        settings=True,
    ),
    Cause(
        kind="cut off",
        says="All gradients are zero although the scaled loss is far too large for them to round to zero: "
        "the loss does not depend on the parameters that are trained.",
        remedy="Look for {code.stops_gradients}, an argmax or a softmax of one output between the "
        "parameters and the loss, for frozen parameters, and for an optimizer that was given the parameters "
        "of another model.",
        predicts=rates(
            "gradients zero 99.8, scaled loss large 90, gradients elsewhere 2, repeats 50, dead outputs 4, "
            "bound 2, scale to gain 5, all still 30"
        ),
    ),
    Cause(
        kind="other parameters",
        says="The optimizer does not hold all parameters that get gradients{still}.",
        remedy="{code.make_optimizer} If these are not meant to be trained, they need no gradients: "
        "{code.freeze}.",
        predicts=rates(
            "some still 50, all still 40, gradients zero 60, gradients elsewhere 98, repeats 50, stopped "
            "2, dead outputs 2, bound 2, scale to gain 30, still at last 1"
        ),
    ),
    Cause(
        kind="cleared too early",
        weight=0.2,
        says="Gradients are cleared after backward and before the step, so that the step finds zeros.",
        remedy="{code.clear_sentence}",
        predicts=rates(
            "gradients zero 99.8, gradients elsewhere 98, repeats 50, stopped 2, bound 2, dead outputs 2, "
            "some still 2, all still 90, still at last 1, scale to gain 30"
        ),
    ),
    Cause(
        kind="lost updates",
        weight=0.25,
        says="Updates are too small for the dtype of the weights to hold, and round away{still}.",
        remedy="Raise the learning rate, or keep weights in float32 that are in bfloat16 or float16.",
        predicts=rates(
            "gradients zero 5, repeats 30, stopped 15, bound 2, dead outputs 2, some still 60, all still "
            "50, still at last 15"
        ),
    ),
    Cause(
        kind="learning rate zero",
        weight=1.5,
        says="The weights do not change: the loss takes the same values from beginning to end.",
        remedy="Check that the learning rate is above 0 and that the loss depends on the parameters. "
        "{code.make_optimizer}",
        predicts=rates(
            "some still 1, all still 98, gradients zero 2, repeats 98, stopped 2, dead outputs 2, bound 2, "
            "still at last 1"
        ),
    ),
    Cause(
        kind="stopped learning",
        says="The weights no longer change: {stopped}.",
        remedy="Check whether the learning-rate schedule has reached 0. If the loss is worse than before, "
        "the learning rate was too high, and units have died: lower it, or warm it up.",
        predicts=rates(
            "some still 1, all still 1, gradients zero 30, repeats 2, stopped 98, dead outputs 2, bound 2, "
            "still at last 95"
        ),
    ),
    Cause(
        kind="dead units",
        weight=0.7,
        says="Units are dead: {dead}.",
        remedy="{revive}",
        predicts=rates(
            "some still 5, all still 5, gradients zero 8, repeats 10, stopped 40, dead outputs 98, bound "
            "2, still at last 10"
        ),
    ),
    Cause(
        kind="clipped while scaled",
        says="The gradients were clipped while they were still scaled, so that updates are too small by a "
        "factor of the scale: in nearly all steps the gradient norm times the scale is {bound}.",
        remedy="{code.clip_unscaled}",
        predicts=rates(
            "some still 2, all still 10, gradients zero 2, repeats 15, dead outputs 2, bound 98, still at "
            "last 2"
        ),
    ),
)
