"""A step is skipped if an entry is not finite, or does not stay so when unscaled: by every way alike.

The rows of `extremes.py` say what is right; Keras, JAX and tf_keras are tested with the same ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from preamp import Static, Trace
from preamp.torch import GradScaler
from tests.extremes import EXTREMES, Extreme

MAX_NORM = 2.0
# What a fused kernel divides by is a float32 on the device, and 3.4e38 is too small for these.
BEYOND_A_KERNEL = (
    "norm overflows",
    "norm overflows unscaled",
    "bfloat16, norm overflows",
    "sums overflow",
    "largest scale",
)
WAYS = [
    *["host", "host fused", "host unscale_", "host recorded", "ranks", "ranks unscale_"],
    *["device fused", "device fused unscale_", "device fused recorded"],
    *["capturable", "capturable fused", "capturable unscale_", "capturable ranks"],
]


def stepped(row: Extreme, way: str, max_norm: float | None) -> tuple[Any, list[np.ndarray]]:
    """Return the record of a step with the gradients of a row, and the gradients that it applied."""
    words, dtype = way.split(), getattr(torch, row.dtype)
    parameters = [torch.nn.Parameter(torch.zeros(leaf.shape, dtype=dtype)) for leaf in row.leaves]
    optimizer = torch.optim.SGD(parameters, lr=0.0, fused="fused" in words)
    options: dict[str, Any] = {"capturable": "capturable" in words}
    if "recorded" in words:
        options["on_step"] = Trace()
    if "ranks" in words:
        options["reduce"] = lambda numbers: None  # the sum over one rank
    scaler = GradScaler("cpu", policy=Static(row.scale), **options)
    scaler.scale(torch.zeros(()))
    for parameter, leaf in zip(parameters, row.leaves, strict=True):
        parameter.grad = torch.tensor(leaf, dtype=torch.float64).to(dtype)
    if "unscale_" in words:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, max_norm=max_norm)
    scaler.update()
    return scaler.last_step, [parameter.grad.double().numpy() for parameter in parameters]  # type: ignore[union-attr]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", EXTREMES, ids=lambda row: row.name)
def test_every_way_takes_the_same_steps_and_clips_them_to_the_norm(request, row, way):
    if "device" in way:
        request.getfixturevalue("reads_cost")
    finite = row.finite(row.dtype)
    for max_norm in (None, MAX_NORM):
        if "ranks" in way and row.name == "float64, squares overflow" and (max_norm or "unscale_" in way):
            finite = False  # ranks add up squares, in float64
        step, gradients = stepped(row, way, max_norm)
        assert (step.finite, step.skipped) == (finite, not finite)
        if not finite:
            continue
        if max_norm is not None or "unscale_" in way:
            with np.errstate(over="ignore", under="ignore"):
                tiny = (
                    2e-8 if row.dtype == "float16" and "unscale_" in way else 1e-45
                )  # it unscales in float16
                assert np.float32(step.grad_norm) == pytest.approx(row.norm(), rel=1e-5, abs=tiny)
        if max_norm is not None:
            digits = torch.finfo(getattr(torch, row.dtype))
            loose = {"rtol": 4 * digits.eps, "atol": max(digits.smallest_normal * digits.eps, 1e-45)}
            if "fused" in way and row.dtype == "float64":  # its kernels divide by a float32
                loose["rtol"] = 1e-6
            if "fused" in way and "host" not in way and row.name in BEYOND_A_KERNEL:
                loose["rtol"] = 0.5
            for gradient, expected in zip(gradients, row.clipped(max_norm), strict=True):
                np.testing.assert_allclose(gradient, expected, **loose)
