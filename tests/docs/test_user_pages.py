"""What the pages for newcomers promise: of each "your line -> our line" both run, yours with the real peer.

The examples of the pages run by themselves (`conftest.py` at the root). Here are the tables of
`docs/coming_from/`: the code spans of a cell run one after the other, among the names that its page takes
for granted.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from preamp import dialects
from preamp.systems import deepspeed_config as config
from tests.deepspeed.conftest import peer  # noqa: F401  # a group of one process

FOLDER = Path(__file__).parents[2] / "docs" / "coming_from"

TORCH = """
import math, torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
model, x = torch.nn.Linear(8, 1), torch.ones(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = GradScaler("cpu")
scaler.scale(model(x).mean()).backward()
loss, history = model(x).mean(), []
half_model = torch.nn.Linear(8, 1).half()
half = half_loss = half_model(x.half()).float().mean()
half_optimizer = torch.optim.SGD(half_model.parameters(), lr=0.1)
lbfgs = torch.optim.LBFGS(model.parameters())
def closure():
    lbfgs.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    return loss
"""
OURS_OF_TORCH = """
from preamp import Dynamic, Static, Trace, casting, dialects
from preamp.torch import GradScaler, MasterWeights, autocast
"""
KERAS = """
import keras
import numpy as np
x, y = np.ones((4, 8), "float32"), np.ones((4, 1), "float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
optimizer = LossScaleOptimizer(keras.optimizers.Adam())
model.compile(optimizer, loss="mse")
weights = model.trainable_variables
optimizer.build(weights)
loss = keras.ops.convert_to_tensor(1.0)
optimizer.scale_loss(loss)
gradients = [keras.ops.ones_like(weight) for weight in weights]
values = [weight.value for weight in weights]
state = [variable.value for variable in optimizer.variables]
"""
TF_KERAS = """
import keras, tf_keras
import tensorflow as tf
inner, keras_inner = tf_keras.optimizers.SGD(0.25), keras.optimizers.SGD(0.25)
optimizer = LossScaleOptimizer(tf_keras.optimizers.SGD(0.25))
weights = [tf.Variable(1.0)]
with tf.GradientTape() as tape:
    loss = weights[0] ** 2
    scaled = optimizer.get_scaled_loss(loss)
scaled_gradients = tape.gradient(scaled, weights)
gradients = optimizer.get_unscaled_gradients(scaled_gradients)
"""
ON_KERAS_3 = """
import keras
import tensorflow as tf
keras_inner = keras.optimizers.SGD(0.25)
optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25))
weights = [tf.Variable(1.0)]
optimizer.build(weights)
with tf.GradientTape() as tape:
    loss = weights[0] ** 2
    scaled = getattr(optimizer, "get_scaled_loss", optimizer.scale_loss)(loss)
gradients = tape.gradient(scaled, weights)
"""
JAX = """
import jax, optax
import jax.numpy as jnp
from flax import linen as nn
from flax import serialization
inner, params, x = optax.sgd(0.1), {"w": jnp.ones((8, 1))}, jnp.ones((4, 8))
def loss_fn(params, x):
    return jnp.mean(x @ params["w"])
gradients = jax.grad(loss_fn)(params, x)
"""
OURS_OF_JAX = """
from preamp import Dynamic, Static, dialects
from preamp.jax import apply_gradients, autocast, last_step, loss_scaled, step, value_and_grad
"""
STATE_OF_OURS = """
tx = optimizer = loss_scaled(inner)
_, _, opt_state = step(loss_fn, optimizer)(params, optimizer.init(params), x)
"""
DEEPSPEED = """
import logging, torch
x, model = torch.ones(4, 8), torch.nn.Linear(8, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
settings = {"train_micro_batch_size_per_gpu": 4}
engine, *_ = initialize(model=model, optimizer=inner, config=settings)
"""


class Page(NamedTuple):
    """What the lines of a page take for granted; `theirs` is None where the peer cannot be installed."""

    theirs: str | None
    ours: str


PAGES = {
    "torch_amp": Page("from torch.amp import GradScaler, autocast" + TORCH, OURS_OF_TORCH + TORCH),
    "apex": Page(None, OURS_OF_TORCH + TORCH),
    "keras": Page(
        "from keras.optimizers import LossScaleOptimizer" + KERAS,
        "from preamp import Dynamic\nfrom preamp.keras import LossScaleOptimizer, TraceCallback" + KERAS,
    ),
    "tf_keras": Page(
        "from tf_keras.mixed_precision import LossScaleOptimizer" + TF_KERAS,
        "from preamp import Dynamic\nfrom preamp.tensorflow import LossScaleOptimizer" + TF_KERAS,
    ),
    "tf_keras on Keras 3": Page(
        "from keras.optimizers import LossScaleOptimizer" + ON_KERAS_3,
        "from preamp.tensorflow import LossScaleOptimizer" + ON_KERAS_3,
    ),
    "jmp": Page(
        JAX + "import jmp\nloss_scale = jmp.DynamicLossScale(jnp.float32(2.0))",
        JAX + OURS_OF_JAX + STATE_OF_OURS,
    ),
    "flax": Page(
        JAX + "from flax.training.dynamic_scale import DynamicScale\ndynamic_scale = DynamicScale()",
        JAX + OURS_OF_JAX + STATE_OF_OURS,
    ),
    "deepspeed": Page(
        "from deepspeed import initialize" + DEEPSPEED,
        "from preamp import Dynamic, ScaleExhausted\nfrom preamp.deepspeed import initialize" + DEEPSPEED,
    ),
}


def cells(page: str, headed: str) -> list[list[str]]:
    """Return the rows of the tables whose header matches, on the page of that name up to a blank."""
    found, header = [], ""
    for line in (FOLDER / f"{page.split()[0]}.md").read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        header = header if row and header else line  # the first line of a table
        if row and line != header and re.search(headed, header) and set(line) - set("|- "):
            found.append(row)
    return found


def code(cell: str) -> str:
    """Return a cell's code; what a link's text shows runs on the page that it leads to."""
    return "\n".join(re.findall(r"`([^`]+)`", re.sub(r"\[.*?\]\(.*?\)", "", cell)))


HEADERS = {
    "tf_keras": r"^\| `tf_keras`[^|]*\| preamp \|$",
    "tf_keras on Keras 3": r"^\| Keras 3[^|]*\| preamp \|$",
}
ROWS = [
    pytest.param(page, *row, id=f"{page}-{number}")
    for page in PAGES
    for number, row in enumerate(cells(page, HEADERS.get(page, r"^\|[^|]*\| preamp \|$")))
]


def test_every_page_has_rows():
    named = {row.values[0] for row in ROWS}
    assert named == set(PAGES)
    assert {path.stem for path in FOLDER.glob("*.md")} == {page.split()[0] for page in PAGES}
    assert all(code(row.values[2]) or row.values[2].startswith("the same") for row in ROWS)


@pytest.mark.parametrize(("page", "theirs", "ours"), ROWS)
def test_both_columns_run(page, theirs, ours, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "deepspeed":
        monkeypatch.setenv("LOCAL_RANK", "0")
        request.getfixturevalue("peer")
    before = PAGES[page].theirs
    if before is None:
        ast.parse(code(theirs))
    else:
        exec(code(theirs), ready(before))
    also = code(theirs) if ours.startswith("the same") else ""
    exec(f"{also}\n{code(ours)}", ready(PAGES[page].ours))


def ready(given: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(given, names)
    return names


@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize(
    ("key", "argument", "ours"),
    [pytest.param(*row, id=code(row[0])) for row in cells("deepspeed", "argument of")],
)
def test_a_key_of_deepspeeds_configuration_is_the_policy_beside_it(key, argument, ours):
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    from preamp import Static
    from preamp.deepspeed import DynamicLossScaler
    from preamp.deepspeed.attributes import policy_of

    policy = eval(code(ours), {"dialects": dialects, "Static": Static})
    section = json.loads(f'{{"enabled": true, {code(key)}}}')
    assert DeepSpeedFP16Config(**section)
    assert config.load({"fp16": section}).policy == policy
    if "none" not in argument:
        usual = {"init_scale": 2.0**16, "scale_window": 1000, "delayed_shift": 2, "min_scale": 1.0}
        given = {"consecutive_hysteresis": False, **usual, **eval(f"dict({code(argument)})")}
        scaler = DynamicLossScaler(**given)
        assert scaler.loss_scale == policy.init_scale
        assert replace(policy_of(vars(scaler)), init_scale=policy.init_scale) == policy
