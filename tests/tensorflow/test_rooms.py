"""What importing `preamp.tensorflow` loads, and the documents' examples in other processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tf_keras

from preamp.tensorflow import LossScaleOptimizer


def python(code: str, **environment: str) -> str:
    """Run code in a process of its own; return what it prints, errors last."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "KERAS_BACKEND": "tensorflow", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout or run.stderr.strip().splitlines()[-1]


def test_neither_keras_is_imported_for_the_other() -> None:
    code = """
import sys
import preamp.tensorflow
print("tf_keras" in sys.modules, "preamp.tensorflow.keras_optimizers" in sys.modules)
import keras
preamp.tensorflow.LossScaleOptimizer(keras.optimizers.SGD())
print("tf_keras" in sys.modules)
"""
    assert python(code).split() == ["False", "False", "False"]


@pytest.mark.parametrize(
    "legacy", [pytest.param("0", id="Keras 3", marks=pytest.mark.slow), pytest.param("1", id="tf_keras")]
)
def test_the_examples_of_the_document_print_the_same_with_either_keras(legacy: str) -> None:
    code = """
import doctest, tensorflow as tf
from preamp.tensorflow import optimizer
print(tf.keras.optimizers.Adam.__module__.split(".")[0], *doctest.testmod(optimizer))
"""
    library = "tf_keras" if legacy == "1" else "keras"
    examples = (LossScaleOptimizer.__doc__ or "").count(">>>")
    assert examples > 20
    assert python(code, TF_USE_LEGACY_KERAS=legacy).split() == [library, "0", str(examples)]


@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_keras_has_to_compute_with_tensorflow(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed, so that Keras cannot compute with it")
    code = "import keras, preamp.tensorflow as p; p.LossScaleOptimizer(keras.optimizers.SGD())"
    said = python(code, KERAS_BACKEND=backend)
    assert f"UsageError: Keras computes with {backend} here" in said
    assert "from preamp.keras import LossScaleOptimizer" in said


def test_the_line_that_installs_what_is_missing() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import preamp.tensorflow"
    assert "MissingExtra" in python(code)
    assert "pip install 'preamp[tensorflow]'" in python(code)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_file_of_an_older_format_is_read_where_nothing_was_wrapped_yet(tmp_path: Path) -> None:
    model = tf_keras.Sequential([tf_keras.layers.Input((3,)), tf_keras.layers.Dense(2)])
    model.compile(LossScaleOptimizer(tf_keras.optimizers.SGD(), initial_scale=8.0), "mse")
    model.save(tmp_path / "model.h5")
    code = f"""
import tf_keras, preamp.tensorflow
print(float(tf_keras.models.load_model("{tmp_path}/model.h5").optimizer.loss_scale))
"""
    assert python(code).split() == ["8.0"]
