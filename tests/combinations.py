"""All combinations of some values, of which few run each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def combinations(quick: Collection[tuple[Any, ...]], **values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of `values`; all but `quick` wait for `make test-slow`."""
    every = list(product(*values.values()))
    unknown = [one for one in quick if one not in every]
    assert not unknown, unknown
    rows = [
        pytest.param(*one, id="-".join(map(str, one)), marks=[pytest.mark.slow] * (one not in quick))
        for one in every
    ]
    return pytest.mark.parametrize(tuple(values), rows)
