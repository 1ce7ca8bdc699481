"""What importing `preamp.tensorflow` loads, and the documents' examples in other processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings

import keras
import pytest
import tf_keras

from preamp import UsageError
from preamp.tensorflow import LossScaleOptimizer


def python(code: str, *arguments: str, **environment: str) -> str:
    """Run code in a process of its own; return what it prints, errors last."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env={**os.environ, "KERAS_BACKEND": "tensorflow", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout or run.stderr.strip().splitlines()[-1]


def test_neither_keras_is_imported_for_the_other_and_what_is_missing_is_named() -> None:
    code = """
import sys
sys.modules["tensorflow"] = None
try:
    import preamp.tensorflow
except ImportError as missing:
    print(type(missing).__name__, missing)
del sys.modules["tensorflow"]
import preamp.tensorflow
print("tf_keras" in sys.modules, "preamp.tensorflow.keras_optimizers" in sys.modules)
import keras
preamp.tensorflow.LossScaleOptimizer(keras.optimizers.SGD())
print("tf_keras" in sys.modules)
"""
    said, *loaded = python(code).splitlines()
    assert said.startswith("MissingExtra")
    assert "pip install 'preamp[tensorflow]'" in said
    assert loaded == ["False False", "False"]


# One process for both: importing TensorFlow and tf_keras takes seconds.
WITH_TF_KERAS = """
import sys, tf_keras, preamp.tensorflow
print(float(tf_keras.models.load_model(sys.argv[1]).optimizer.loss_scale))

import doctest, tensorflow as tf
from preamp.tensorflow import optimizer
print(tf.keras.optimizers.Adam.__module__.split(".")[0], *doctest.testmod(optimizer))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the lines that a process prints in which `tf.keras` is tf_keras."""
    file = tmp_path_factory.mktemp("saved") / "model.h5"
    model = tf_keras.Sequential([tf_keras.layers.Input((3,)), tf_keras.layers.Dense(2)])
    model.compile(LossScaleOptimizer(tf_keras.optimizers.SGD(), initial_scale=8.0), "mse")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of the format's age
        model.save(file)
    return python(WITH_TF_KERAS, str(file), TF_USE_LEGACY_KERAS="1").splitlines()


def test_a_file_of_an_older_format_is_read_where_nothing_was_wrapped_yet(printed: list[str]) -> None:
    assert printed[0] == "8.0"


def examples() -> str:
    found = (LossScaleOptimizer.__doc__ or "").count(">>>")
    assert found > 20
    return str(found)


def test_the_examples_of_the_document_print_the_same_with_tf_keras(printed: list[str]) -> None:
    assert printed[1:] == [f"tf_keras 0 {examples()}"]


@pytest.mark.slow
def test_the_examples_of_the_document_print_the_same_with_keras() -> None:
    code = """
import doctest, tensorflow as tf
from preamp.tensorflow import optimizer
print(tf.keras.optimizers.Adam.__module__.split(".")[0], *doctest.testmod(optimizer))
"""
    assert python(code, TF_USE_LEGACY_KERAS="0").split() == ["keras", "0", examples()]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras_has_to_compute_with_tensorflow(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    with pytest.raises(UsageError, match=f"Keras computes with {backend} here") as refused:
        LossScaleOptimizer(keras.optimizers.SGD())
    assert "from preamp.keras import LossScaleOptimizer" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras_that_computes_with_another_backend_is_refused(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed, so that Keras cannot compute with it")
    code = "import keras, preamp.tensorflow as p; p.LossScaleOptimizer(keras.optimizers.SGD())"
    said = python(code, KERAS_BACKEND=backend)
    assert f"UsageError: Keras computes with {backend} here" in said
    assert "from preamp.keras import LossScaleOptimizer" in said
