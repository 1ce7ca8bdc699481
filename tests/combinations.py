"""All combinations of some values: a few of them each time, or all of them in one test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
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


def in_one_test(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have one test try all combinations of `values`; its failure names the one that it was.

    A test of its own for each costs more than most of them do.
    """
    every = [dict(zip(values, one, strict=True)) for one in product(*values.values())]
    assert every

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def try_all(**fixtures: Any) -> None:
            for one in every:
                try:
                    test(**fixtures, **one)
                except BaseException as error:
                    error.add_note(f"with {one}")
                    raise

        taken = inspect.signature(test)
        others = [parameter for name, parameter in taken.parameters.items() if name not in values]
        try_all.__signature__ = taken.replace(parameters=others)  # type: ignore[attr-defined]
        return try_all

    return decorate
