"""What cannot work is refused by name, with the line to write instead, and nothing has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from preamp import Dynamic, PolicyError, Tolerant, UsageError
from preamp.jax import (
    apply_gradients,
    check_exhausted,
    last_step,
    loss_scaled,
    step,
    value_and_grad,
)

W = jnp.ones(3)
SGD = optax.sgd(0.1)
OURS = loss_scaled(SGD)
STATE = OURS.init(W)
*_, PENDING = value_and_grad(lambda w: w.sum())(W, STATE)
OUTSIDE = optax.MultiSteps(OURS, 2)


def total(w: Any) -> Any:
    return w.sum()


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "policy of an optimizer": (PolicyError, r"policy=2\.0", lambda: loss_scaled(SGD, 2.0)),  # type: ignore[arg-type]
    "inner": (UsageError, r"3 is not a transformation.*Write loss_scaled\(optax", lambda: loss_scaled(3)),
    "class of an optimizer": (UsageError, "not a transformation", lambda: loss_scaled(optax.adam)),
    "two scales around": (UsageError, "already scales losses", lambda: loss_scaled(OURS).init(W)),
    "loss function": (
        UsageError,
        r"a int cannot be called as a loss.*Write value_and_grad",
        lambda: value_and_grad(3),
    ),  # type: ignore[arg-type]
    "argnums": (UsageError, r"argnums='w'.*Write argnums=0", lambda: value_and_grad(total, "w")),  # type: ignore[arg-type]
    "argnums too high": (
        UsageError,
        r"argnums=1 .* 1 positional",
        lambda: value_and_grad(total, 1)(W, STATE),
    ),
    "argnums too low": (UsageError, r"argnums=-2", lambda: value_and_grad(total, -2)(W, STATE)),
    "loss of a number": (UsageError, "dtype int32, which has no gradient", lambda: of(lambda w: 1)),
    "loss not scalar": (
        UsageError,
        r"an array of shape \(3,\).*Write return jnp.mean",
        lambda: of(lambda w: w),
    ),
    "loss of pairs": (
        UsageError,
        "loss is a tuple, not a scalar.*has_aux=True",
        lambda: of(lambda w: (w.sum(), w)),
    ),
    "loss of nothing": (UsageError, "loss is a NoneType", lambda: of(lambda w: None)),
    "aux of nothing": (
        UsageError,
        r"returned an array of shape \(\)\. Write return loss, aux",
        lambda: of(total, has_aux=True),
    ),
    "complex loss": (UsageError, r"dtype complex64.*loss\.real", lambda: of(lambda w: w.sum() * 1j)),
    "integer loss": (UsageError, "dtype int32", lambda: of(lambda w: w.sum().astype(int))),
    "no parameters": (UsageError, "params=None", lambda: apply_gradients(OURS, W, PENDING, None)),
    "state of another": (
        UsageError,
        "made by 'chain', not by loss_scaled",
        lambda: apply_gradients(SGD, W, PENDING, W),
    ),
    "step of another": (
        UsageError,
        r"Write loss_scaled\(optimizer\)",
        lambda: step(total, SGD)(W, SGD.init(W)),
    ),
    "last step of another": (UsageError, "holds no loss scale", lambda: last_step(SGD.init(W))),
    "two scales, one of them hidden": (
        UsageError,
        "unscaled twice",
        lambda: loss_scaled(optax.chain(optax.identity(), OURS)).init(W),
    ),
    "arguments swapped": (UsageError, r"Write step\(params, opt_state", lambda: step(total, OURS)(STATE, W)),
    "integers": (
        UsageError,
        r"params\['n'\] has no gradient: it is int32",
        lambda: step(total, OURS)({"n": jnp.int32(3)}, STATE),
    ),
    "state of another kind of policy": (
        UsageError,
        r"a State, is not that of Tolerant.*Write opt_state = restart_loss_scale\(opt_state, policy\)",
        lambda: loss_scaled(SGD, Tolerant()).update(W, PENDING),
    ),
    "two states": (UsageError, "holds 2 loss scales", lambda: last_step((STATE, STATE))),
    "inside MultiSteps": (
        UsageError,
        r"made by 'MultiSteps'.*loss_scaled\(optax\.MultiSteps",
        lambda: step(total, OUTSIDE),
    ),
    "while tracing": (UsageError, "Ask for it outside", lambda: jax.jit(lambda s: last_step(s) and 0)(STATE)),
    "of several trainings": (
        UsageError,
        r"shape \(2,\).*Write jax\.tree\.map",
        lambda: last_step(jax.tree.map(lambda x: jnp.stack([x, x]), STATE)),
    ),
    "giving up of another": (
        UsageError,
        "holds no loss scale",
        lambda: check_exhausted(SGD.init(W), Dynamic()),
    ),
    **{
        f"max_norm={norm}": (
            PolicyError,
            r"max_norm=.*Write max_norm=1\.0, or None",
            lambda norm=norm: loss_scaled(SGD, max_norm=norm),
        )
        for norm in (0, -1.0, float("nan"), "1", True, [1.0])
    },
}


def of(loss: Callable[..., Any], **how: Any) -> Any:
    return value_and_grad(loss, **how)(W, STATE)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    kind, message, call = REFUSED[case]
    with pytest.raises(kind, match=f"(?s){message}"):
        call()


def test_a_loss_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    train = jax.jit(step(lambda w, bad: w if bad else w.sum(), OURS), static_argnums=2)
    with pytest.raises(UsageError, match="not a scalar"):
        train(W, STATE, True)
    _, after, state = train(W, STATE, False)
    assert (int(state.steps), int(state.skipped_steps)) == (1, 0)
    assert jnp.allclose(after, 0.9)
