"""Rehearsals on a CPU beside what an NVIDIA H200 computed under `torch.autocast`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from preamp.torch import autocast
from tests.recorded.h200 import record

FOLDER = Path(record.__file__).parent
LINES = (FOLDER / "operators.jsonl").read_text().splitlines()
FACTS = {fact.pop("key"): fact for fact in map(json.loads, LINES)}
with np.load(FOLDER / "operators.npz") as file:
    NUMBERS = dict(file)

# Not compared:
ELSEWHERE = (
    "cudnn_",
    "_thnn_",
    "mkldnn_rnn_layer.",
    "_scaled_dot_product_flash",
    "_lu_with_info",
)  # a device's own
COMPLEX = ("fft_", "view_as_complex")  # complex numbers in half precision could not be recorded
CHANGED = ("rms_norm", "THROUGH.48.pow")  # RMSNorm's rule is not the same in all releases
ERRORS = ("norm(p='nuc')", "pinverse")  # errors of a GPU about two dtypes inside
SIGNS = ("svd", "eig")  # of vectors are either one
LOOSE = ("grid_sample", "cell", "Cell", "linear.float16")  # sums, also in half precision, in other orders


def rehearsed(monkeypatch: Any, call: Any, low: torch.dtype, given: str) -> Any:
    monkeypatch.setattr(torch, "autocast", lambda device, dtype: autocast(device, dtype, emulate=True))
    try:
        return record.record(call, low, given, "cpu")
    except Exception as error:
        return {"error": repr(error)}, {}


@pytest.mark.filterwarnings("ignore")  # of PyTorch, of operators that it will remove
def test_operators_have_the_dtypes_and_the_numbers_of_a_gpu(monkeypatch):
    """They overflow where it does, but for the order of sums, and are refused where it refuses them."""
    wrong, compared = [], 0
    for key, call, low, given in record.variants():
        expected = FACTS.get(key)
        if expected is None or any(name in key for name in (*ELSEWHERE, *COMPLEX, *CHANGED, *ERRORS)):
            continue
        fact, values = rehearsed(monkeypatch, call, low, given)
        if "error" in expected or "error" in fact:
            if ("error" in expected) != ("error" in fact):
                wrong.append((key, fact, expected))
            continue
        if (fact["out"], fact.get("grad")) != (expected["out"], expected.get("grad")):
            wrong.append((key, fact, expected))
        elif not any(name in key for name in SIGNS):
            compared += 1
            allowed = torch.finfo(low).eps * (4 if any(name in key for name in LOOSE) else 1)
            wrong += [(key, name) for name, value in values.items() if _differs(key, name, value, allowed)]
    assert not wrong
    assert compared > 1000  # of 1,632


def _differs(key: str, name: str, value: torch.Tensor, allowed: float) -> bool:
    there = torch.from_numpy(NUMBERS[f"{key}.{name}"]).double().ravel()
    here = value.detach().double().ravel()[: len(there)]
    finite = here.isfinite() & there.isfinite()
    # One element in six of small results: of three large products, one sum is just above the largest number.
    if (here.isfinite() != there.isfinite()).sum() > max(1, len(here) // 6):
        return True
    apart = (here - there)[finite].norm()
    return bool(apart > allowed * there[finite].norm())


ROUNDING = {
    "avg_pool1d": lambda x: functional.avg_pool1d(x.view(1, 1, -1), 65, 1),
    "avg_pool2d": lambda x: functional.avg_pool2d(x.view(1, 1, 64, 64), 33, 1),
    "batch_norm": lambda x: functional.batch_norm(x.view(4, 2, -1), None, None, training=True),
    "col2im": lambda x: functional.fold(x.view(1, 64, 64), 15, 8),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "embedding": lambda x: functional.embedding(torch.arange(4096) % 3, x.view(64, 64)),
    "embedding_bag": lambda x: functional.embedding_bag(torch.zeros(1, 999).long(), x.view(64, 64)),
    "im2col": lambda x: functional.unfold(x.view(1, 1, 64, 64), 17),
    "instance_norm": lambda x: functional.instance_norm(x.view(1, 2, -1)),
    "logit": lambda x: torch.logit(x),
    "max_pool2d": lambda x: functional.max_pool2d(x.view(1, 1, 64, 64), 33, 1),
}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ROUNDING)
def test_nothing_is_rounded_inside_of_an_operator(name, low):
    """As in a GPU's kernels, which compute in float32 what is stored in low precision."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        result = ROUNDING[name](x)
        ahead = torch.rand(result.shape).to(low).to(result.dtype)
        (gradient,) = torch.autograd.grad(result, x, ahead)
        return result, gradient

    given = torch.rand(4096).to(low)
    with autocast("cpu", low, emulate=True):
        found = run(given.clone().requires_grad_())
    expected = run(given.float().requires_grad_())
    for low_one, wide in zip(found, expected, strict=True):
        assert torch.equal(low_one, wide.to(low))
