"""`loss_scaled` inside another transformation: every one that optax has, and what becomes of a training.

The state of such an optimizer is refused. Where a trainer digs out the inner state by hand, the update of the
wrapper is refused: when it computes with scaled gradients, or when it calls ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from preamp import Dynamic, UsageError
from preamp.jax import (
    LossScaledState,
    apply_gradients,
    check_exhausted,
    last_step,
    loss_scaled,
    restart_loss_scale,
    scaled_value_and_grad,
    step,
    value_and_grad,
)

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
PARAMS = {"w": jnp.ones(3), "b": jnp.ones(2)}
OURS = loss_scaled(optax.sgd(0.1, momentum=0.5), POLICY)
KEEP_B = {"w": True, "b": False}


def loss(params: Any, factor: Any) -> Any:
    return jnp.sum(params["w"]) * factor + jnp.sum(params["b"])


def drop_infinite(updates: Any, params: Any) -> Any:
    return jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, jnp.zeros_like(g)), updates)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "chain(clip_by_global_norm, ours)": lambda t: optax.chain(optax.clip_by_global_norm(1.0), t),
    "chain(clip, ours)": lambda t: optax.chain(optax.clip(1.0), t),
    "chain(clip_by_block_rms, ours)": lambda t: optax.chain(optax.clip_by_block_rms(1.0), t),
    "chain(adaptive_grad_clip, ours)": lambda t: optax.chain(optax.adaptive_grad_clip(0.1), t),
    "chain(add_decayed_weights, ours)": lambda t: optax.chain(optax.add_decayed_weights(0.1), t),
    "chain(add_noise, ours)": lambda t: optax.chain(optax.add_noise(0.1, 0.1, key=0), t),
    "chain(centralize, ours)": lambda t: optax.chain(optax.centralize(), t),
    "chain(ema, ours)": lambda t: optax.chain(optax.ema(0.9), t),
    "chain(identity, ours)": lambda t: optax.chain(optax.identity(), t),
    "chain(monitor, ours)": lambda t: optax.chain(
        optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)}), t
    ),
    "chain(normalize_by_update_norm, ours)": lambda t: optax.chain(optax.normalize_by_update_norm(), t),
    "chain(scale, ours)": lambda t: optax.chain(optax.scale(0.5), t),
    "chain(scale_by_adam, ours)": lambda t: optax.chain(optax.scale_by_adam(), t),
    "chain(scale_by_sign, ours)": lambda t: optax.chain(optax.scale_by_sign(), t),
    "chain(set_to_zero, ours)": lambda t: optax.chain(optax.set_to_zero(), t),
    "chain(stateless(where isfinite), ours)": lambda t: optax.chain(optax.stateless(drop_infinite), t),
    "chain(trace, ours)": lambda t: optax.chain(optax.trace(0.9), t),
    "chain(zero_nans, ours)": lambda t: optax.chain(optax.zero_nans(), t),
    "chain(ours, scale)": lambda t: optax.chain(t, optax.scale(1.0)),
    "chain(ours, trace)": lambda t: optax.chain(t, optax.trace(0.9)),
    "named_chain": lambda t: optax.named_chain(("ours", t), ("last", optax.scale(1.0))),
    "masked": lambda t: optax.masked(t, KEEP_B),
    "apply_if_finite": lambda t: optax.apply_if_finite(t, 3),
    "MultiSteps": lambda t: optax.MultiSteps(t, 2).gradient_transformation(),
    "partition": lambda t: optax.partition({"a": t, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "multi_transform": lambda t: optax.multi_transform({"a": t}, {"w": "a", "b": "a"}),
    "selective_transform": lambda t: optax.selective_transform(t, freeze_mask={"w": False, "b": True}),
    "conditionally_mask": lambda t: optax.conditionally_mask(t, lambda step: step < 100),
    "conditionally_transform": lambda t: optax.conditionally_transform(t, lambda step: step < 100),
    "inject_hyperparams": lambda t: optax.inject_hyperparams(lambda rate: t)(rate=0.1),
    "lookahead": lambda t: optax.lookahead(t, 2, 0.5),
    "flatten": optax.flatten,
    "contrib.galore": lambda t: optax.contrib.galore(0.1, base_optimizer=t),
    "contrib.mechanize": optax.contrib.mechanize,
    "contrib.sam": lambda t: optax.contrib.sam(t, optax.sgd(0.1)),
    "contrib.schedule_free": lambda t: optax.contrib.schedule_free(t, 0.1),
    "contrib.split_real_and_imaginary": optax.contrib.split_real_and_imaginary,
}
NOT_AROUND = {  # take a transformation, but none that is given gradients, or give it back as it is
    "contrib.scale_by_galore",
    "contrib.sophia",
    "inject_stateful_hyperparams",  # a deprecated name of inject_hyperparams
    "lbfgs",
    "monitor",
    "with_extra_args_support",
}


def takes_a_transformation(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    names = {"inner", "optimizer", "base_optimizer", "fast_optimizer", "transforms", "inner_factory"}
    names |= {"tx", "opt"}
    return any("GradientTransformation" in str(p.annotation) or p.name in names for p in parameters)


def test_every_wrapper_of_optax_is_in_the_table() -> None:
    exported = {
        prefix + name
        for prefix, room in (("", optax), ("", optax.transforms), ("contrib.", optax.contrib))
        for name in dir(room)
        if callable(getattr(room, name))
        and not name.startswith("_")
        and not inspect.isclass(getattr(room, name))
        if takes_a_transformation(getattr(room, name))
    }
    named = {name.split("(")[0] for name in WRAPPERS}
    assert exported - named - NOT_AROUND == set()


def wrapped(name: str) -> tuple[Any, Any]:
    """Return an optimizer with ours inside, and its state."""
    optimizer = WRAPPERS[name](OURS)
    params: Any = optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS
    return optimizer, optimizer.init(params)


ASKS: dict[str, Callable[[Any, Any], Any]] = {
    "scaled_value_and_grad": lambda _, state: scaled_value_and_grad(loss)(state, PARAMS, 1.0),
    "value_and_grad": lambda _, state: value_and_grad(loss)(state, PARAMS, 1.0),
    "apply_gradients": lambda optimizer, state: apply_gradients(optimizer, PARAMS, state, PARAMS),
    "last_step": lambda _, state: last_step(state),
    "check_exhausted": lambda _, state: check_exhausted(state, POLICY),
    "restart_loss_scale": lambda _, state: restart_loss_scale(state, POLICY),
}


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "flatten"])
def test_the_state_is_refused_with_the_wrapper_by_name(name: str) -> None:
    optimizer, state = wrapped(name)
    for ask in ASKS.values():
        with pytest.raises(UsageError, match=r"is inside optax.*Write loss_scaled around the whole"):
            ask(optimizer, state)
    # Some wrappers are made of others: the one that is named is the outermost.
    known = {"multi_transform": "partition", "selective_transform": "partition", "contrib.galore": "chain"}
    expected = known.get(name, name.split("(")[0])
    with pytest.raises(UsageError, match=rf"is inside optax\.{expected}.*loss_scaled\(optax\.{expected}\("):
        last_step(state)


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_step_is_made_of_a_wrapper(name: str) -> None:
    with pytest.raises(UsageError, match=r"was made by '\w+', not by loss_scaled.*Write loss_scaled\(optim"):
        step(loss, WRAPPERS[name](OURS))


@pytest.mark.parametrize("name", WRAPPERS)
def test_plain_gradients_of_jax_do_not_reach_ours_through_a_wrapper(name: str) -> None:
    optimizer, state = wrapped(name)
    params: Any = optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS
    if name in ("contrib.sam", "MultiSteps"):  # ours is called on some steps only; traced always
        optimizer = optimizer._replace(update=jax.jit(optimizer.update))
    with pytest.raises(UsageError, match="carry no loss scale"):
        optimizer.update(jax.grad(loss)(PARAMS, 1.0), state, params)


def inner(state: Any) -> Any:
    found = [
        node
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LossScaledState))
        if isinstance(node, LossScaledState)
    ]
    return found[0]


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_state_that_is_dug_out_by_hand_does_not_help(name: str) -> None:
    """The wrapper is refused when it computes with scaled gradients, or else when it calls our update."""
    optimizer, state = wrapped(name)
    params: Any = optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS
    _, scaled = scaled_value_and_grad(loss)(inner(state), PARAMS, 1.0)
    with pytest.raises(UsageError, match="Write loss_scaled around the whole optimizer"):
        jax.jit(optimizer.update)(scaled, state, params)


def test_a_holder_of_the_state_is_told_apart_from_a_wrapper() -> None:
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=OURS)
    with pytest.raises(UsageError, match=r"a TrainState holds.*Write that alone: trainstate\.opt"):
        last_step(train_state)
