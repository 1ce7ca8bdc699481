"""All of optax around an optimizer that scales losses, and inside it: the training of float32, or an error.

Twelve steps, of which two in a row and a later one overflow, are compared with the same optimizer without
loss scaling on the nine others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from preamp import Dynamic, UsageError
from preamp.jax import last_step, loss_scaled, step, value_and_grad

from .agreement import slow
from .trainings import off_by

contrib = optax.contrib
STEPS, OVERFLOWS = 12, (3, 4, 9)
KEYS = jax.random.split(jax.random.key(0), 4)
START = {"w": jax.random.normal(KEYS[0], (4, 8)) / 2, "v": jax.random.normal(KEYS[1], (8,)) / 2}
X, Y = jax.random.normal(KEYS[2], (STEPS, 16, 4)), jax.random.normal(KEYS[3], (STEPS, 16))
W_ALONE = {"w": True, "v": False}
LABELS = {"w": "a", "v": "b"}
POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)


def loss(params: Any, x: Any, y: Any, factor: Any = 1.0) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2) * factor


def without_nan(updates: Any, params: Any) -> Any:
    return jax.tree.map(jnp.nan_to_num, updates)


def halved(t: Any) -> Any:
    """Return a transformation of one's own: a function of the gradients before another's update."""

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        gradients = jax.tree.map(lambda leaf: jnp.nan_to_num(leaf) / 2, gradients)
        return optax.with_extra_args_support(t).update(gradients, state, params, **extra)

    return optax.GradientTransformationExtraArgs(t.init, update)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "MultiSteps": lambda t: optax.MultiSteps(t, 2).gradient_transformation(),
    "MultiSteps, skipping": lambda t: optax.MultiSteps(
        t, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "MultiSteps, of what takes the loss": lambda t: optax.MultiSteps(
        optax.chain(t, contrib.reduce_on_plateau(patience=1, factor=0.5)), 2
    ),
    "apply_if_finite": lambda t: optax.apply_if_finite(t, 5),
    "masked": lambda t: optax.masked(t, W_ALONE),
    "freeze": lambda t: optax.chain(optax.freeze(W_ALONE), t),
    "selective_transform": lambda t: optax.selective_transform(t, freeze_mask=W_ALONE),
    "partition": lambda t: optax.partition({"a": t, "b": optax.sgd(0.1)}, LABELS),
    "multi_transform": lambda t: optax.multi_transform({"a": t, "b": t}, LABELS),
    "conditionally_mask": lambda t: optax.conditionally_mask(t, lambda step, **_: step % 2 == 0),
    "conditionally_transform": lambda t: optax.conditionally_transform(t, lambda step, **_: step % 2 == 0),
    "flatten": optax.flatten,
    "with_extra_args_support": optax.with_extra_args_support,
    "named_chain": lambda t: optax.named_chain(("clip", optax.clip(1.0)), ("t", t)),
    "inject_hyperparams": lambda t: optax.inject_hyperparams(lambda rate: optax.chain(t, optax.scale(rate)))(
        lambda count: 1 / (1.0 + count)
    ),
    "lookahead": lambda t: optax.lookahead(t, 3, 0.5),
    "contrib.galore": lambda t: contrib.galore(0.1, base_optimizer=t),
    "contrib.mechanize": contrib.mechanize,
    "contrib.sam": lambda t: contrib.sam(t, optax.sgd(0.05), sync_period=2),
    "contrib.sam, opaque": lambda t: contrib.sam(
        t, optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2, opaque_mode=True
    ),
    "contrib.schedule_free": lambda t: contrib.schedule_free(t, 0.05),
    "contrib.split_real_and_imaginary": contrib.split_real_and_imaginary,
    "of one's own": halved,
}
NOT_AROUND = {  # take no transformation that is given gradients, but for chain, which has the links below
    "chain",
    "contrib.scale_by_galore",
    "contrib.sophia",
    "inject_stateful_hyperparams",  # a deprecated name of inject_hyperparams
    "lbfgs",
    "monitor",
}
LINKS: dict[str, Any] = {
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
    "add_noise": optax.add_noise(0.1, 0.5, KEYS[0]),
    "apply_every": optax.apply_every(2),
    "centralize": optax.centralize(),
    "clip": optax.clip(0.1),
    "clip_by_block_rms": optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": optax.clip_by_global_norm(0.1),
    "contrib.normalize": contrib.normalize(),
    "contrib.reduce_on_plateau": contrib.reduce_on_plateau(patience=1, factor=0.5),
    "ema": optax.ema(0.9),
    "identity": optax.identity(),
    "keep_params_nonnegative": optax.keep_params_nonnegative(),
    "monitor": optax.monitor({"norm": optax.tree.norm}),
    "monitor with EMA": optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "polyak_sgd": optax.polyak_sgd(0.5),
    "scale": optax.scale(0.5),
    "scale_by_schedule": optax.scale_by_schedule(lambda count: 1 / (1.0 + count)),
    "scale_by_sign": optax.scale_by_sign(),
    "scale_by_trust_ratio": optax.chain(optax.scale_by_trust_ratio(), optax.scale(0.01)),
    "schedule of a clip": optax.inject_hyperparams(optax.clip)(0.1),
    "snapshot": optax.snapshot("norm", optax.tree.norm),
    "stateless": optax.stateless(without_nan),
    "trace": optax.trace(0.9),
    "zero_nans": optax.zero_nans(),
    "zoom_linesearch": optax.scale_by_zoom_linesearch(9),
}
FORMS = {
    **WRAPPERS,
    **{f"chain({name}, t)": lambda t, link=link: optax.chain(link, t) for name, link in LINKS.items()},
    **{f"chain(t, {name})": lambda t, link=link: optax.chain(t, link) for name, link in LINKS.items()},
}
STATELESS = {
    *("adaptive_grad_clip", "add_decayed_weights", "centralize", "clip", "clip_by_block_rms", "identity"),
    *("clip_by_global_norm", "contrib.normalize", "keep_params_nonnegative", "monitor", "scale", "stateless"),
    *("normalize_by_update_norm", "polyak_sgd", "scale_by_sign", "scale_by_trust_ratio"),
}
WORK_OUTSIDE = {
    "flatten",
    "with_extra_args_support",
    "of one's own",
    *(f"chain({name}, t)" for name in STATELESS),
}
QUICK = {
    "MultiSteps",
    "MultiSteps, of what takes the loss",
    "lookahead",
    "contrib.sam",
    "of one's own",
    "chain(monitor, t)",
}
quick = [name if name in QUICK else slow(name)[0] for name in FORMS if name != "chain(zoom_linesearch, t)"]


def takes_a_transformation(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    names = {
        "inner",
        "optimizer",
        "base_optimizer",
        "fast_optimizer",
        "transforms",
        "inner_factory",
        "tx",
        "opt",
    }
    return any("GradientTransformation" in str(p.annotation) or p.name in names for p in parameters)


def test_every_wrapper_of_optax_is_in_the_table() -> None:
    exported = {
        prefix + name
        for prefix, room in (("", optax), ("", optax.transforms), ("contrib.", contrib))
        for name, each in vars(room).items()
        if callable(each) and not name.startswith("_") and not inspect.isclass(each)
        if takes_a_transformation(each)
    }
    assert exported - {name.split(",")[0] for name in WRAPPERS} - NOT_AROUND == set()


def arguments(name: str, x: Any, y: Any, value: Any, gradients: Any) -> dict[str, Any]:
    """Return what an optimizer is given besides gradients, state and parameters; SAM refuses all else."""
    if "sam" in name:
        return {"grad_fn": lambda params, *_: jax.grad(loss)(params, x, y)}
    return {"value": value, "grad": gradients, "value_fn": lambda params: loss(params, x, y)}


def trained(name: str, optimizer: Any, scaled: bool) -> Any:
    """Return parameters after all steps, or without loss scaling after those that do not overflow."""
    if not isinstance(optimizer, optax.MultiSteps):  # its update takes them, but it has another type
        optimizer = optax.with_extra_args_support(optimizer)

    def one(params: Any, state: Any, x: Any, y: Any, factor: Any) -> Any:
        fast = params.fast if isinstance(params, optax.LookaheadParams) else params
        if scaled:
            value, gradients, state = value_and_grad(loss)(fast, state, x, y, factor)
        else:
            value, gradients = jax.value_and_grad(loss)(fast, x, y, factor)
        extra = arguments(name, x, y, value, gradients)
        updates, state = optimizer.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params: Any = optax.LookaheadParams.init_synced(START) if name == "lookahead" else START
    compiled, state = jax.jit(one), optimizer.init(params)
    for number in range(STEPS):
        if scaled or number not in OVERFLOWS:
            factor = jnp.float32(jnp.inf if number in OVERFLOWS else 1.0)
            params, state = compiled(params, state, X[number], Y[number], factor)
    return params


def is_as_in_float32(name: str, optimizer: Any) -> bool:
    expected = trained(name, FORMS[name](optax.adam(0.05)), scaled=False)
    return off_by(expected, trained(name, optimizer, scaled=True)) < 2e-5


@pytest.mark.parametrize("name", quick)  # a line search in front of Adam diverges by itself
def test_inside_everything_trains_as_in_float32(name: str) -> None:
    assert is_as_in_float32(name, loss_scaled(FORMS[name](optax.adam(0.05)), POLICY))


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name)[0] for name in sorted(WORK_OUTSIDE)])
def test_in_front_of_it_what_has_no_state_trains_as_in_float32(name: str) -> None:
    assert is_as_in_float32(name, FORMS[name](loss_scaled(optax.adam(0.05), POLICY)))


@pytest.mark.parametrize("name", sorted({*FORMS} - WORK_OUTSIDE))
def test_everything_else_around_it_is_refused(name: str) -> None:
    optimizer = FORMS[name](loss_scaled(optax.adam(0.05), POLICY))
    params: Any = optax.LookaheadParams.init_synced(START) if name == "lookahead" else START
    state = optimizer.init(params)
    message = r"(is inside a|holds 2 loss scales).*Write loss_scaled around the whole optimizer"
    with pytest.raises(UsageError, match=message):
        jax.jit(value_and_grad(loss))(START, state, X[0], Y[0])
    with pytest.raises(UsageError, match=message):
        last_step(state)
    extra = arguments(name, X[0], Y[0], 1.0, START)
    update = jax.jit(partial(optax.with_extra_args_support(optimizer).update, **extra))
    with pytest.raises(UsageError, match="not from a backward pass"):
        update(jax.grad(loss)(START, X[0], Y[0]), state, params)


@pytest.mark.parametrize("name", FORMS)
def test_no_step_is_made_of_a_wrapper(name: str) -> None:
    if name not in ("with_extra_args_support", "of one's own"):
        with pytest.raises(
            UsageError, match=r"was made by '\w+', not by loss_scaled.*Write loss_scaled\(optim"
        ):
            step(loss, FORMS[name](loss_scaled(optax.adam(0.05))))
