"""Load triton before TensorFlow.

PyTorch for CUDA comes with triton, and triton with a copy of LLVM. TensorFlow has another one. Loading
triton after TensorFlow 2.21 ends the process with a segmentation fault; the other way round both work.
PyTorch loads triton late, with its compiler: on `torch.compile`, and when the first optimizer is made.
Importing PyTorch before TensorFlow is therefore not enough.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from contextlib import suppress

from preamp.errors import UsageError


def before_tensorflow() -> None:
    """Load triton, if it is installed. To be called right before TensorFlow may be loaded for the first time.

    It takes 0.4 s, of the 5 s that TensorFlow takes. Once TensorFlow is loaded it is too late, and nothing is
    done.
    """
    if "tensorflow" not in sys.modules:
        with suppress(ImportError):
            importlib.import_module("triton")


def before_keras() -> None:
    """Load triton where Keras 3 is about to load TensorFlow.

    Raises:
        UsageError: Keras is about to load PyTorch's compiler, and with it triton, after TensorFlow.
    """
    if "keras" in sys.modules:
        return
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")  # Keras's own file may name another one
    if backend == "tensorflow":
        before_tensorflow()
    elif backend == "torch" and "tensorflow" in sys.modules and _is_yet_to_load("triton"):
        raise UsageError(
            "KERAS_BACKEND='torch', and TensorFlow is loaded already: Keras would load triton with PyTorch, "
            "and triton after TensorFlow can end the process with a segmentation fault. "
            "Write import triton before TensorFlow is imported."
        )


def before_torch() -> None:
    """Warn where PyTorch would load triton after TensorFlow. To be called when `preamp.torch` is imported."""
    if "tensorflow" in sys.modules and _is_yet_to_load("triton"):
        warnings.warn(
            "TensorFlow was imported before triton, which PyTorch loads when the first optimizer is made. "
            "That can end the process with a segmentation fault. Write import triton before TensorFlow is "
            "imported.",
            RuntimeWarning,
            stacklevel=3,
        )


def _is_yet_to_load(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is not None
