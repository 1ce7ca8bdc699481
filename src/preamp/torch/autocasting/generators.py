"""Wrap functions to run in a region, and generators and coroutines to be in it only while they run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

F = TypeVar("F", bound=Callable[..., Any])


def wrap(region: AbstractContextManager[Any], function: F, in_graph: Callable[[], None]) -> F:
    """Return a function of the same kind that enters the region whenever the given one runs.

    Args:
        region: to enter.
        function: to run in it.
        in_graph: is called before the region is entered in code that is traced; not for generators.
    """
    if inspect.isgeneratorfunction(function):
        wrapped: Any = _generator
    elif inspect.iscoroutinefunction(function):
        wrapped = _coroutine
    elif inspect.isasyncgenfunction(function):
        wrapped = _async_generator
    else:
        wrapped = functools.partial(_function, in_graph)
    return cast(F, functools.wraps(function)(wrapped(region, function)))


def is_stepwise(function: Callable[..., Any]) -> bool:
    """Return whether a call returns a generator or coroutine, whose code runs later."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in kinds)


def _function(
    in_graph: Callable[[], None], region: AbstractContextManager[Any], function: F
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            in_graph()
        with region:
            return function(*args, **kwargs)

    return run


def _generator(region: AbstractContextManager[Any], function: F) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _Steps(region, function(*args, **kwargs)))

    return run


def _coroutine(region: AbstractContextManager[Any], function: F) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await _Steps(region, function(*args, **kwargs))

    return run


# A generator's `async for` and `yield` cannot be delegated to as with `yield from`: each step is forwarded.
def _async_generator(region: AbstractContextManager[Any], function: F) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = function(*args, **kwargs)
        step: Awaitable[Any] = inner.asend(None)
        while True:
            try:
                value = await _Steps(region, step)
            except StopAsyncIteration:
                return
            try:
                step = inner.asend((yield value))
            except GeneratorExit:
                await _Steps(region, inner.aclose())
                raise
            except BaseException as error:
                step = inner.athrow(error)

    return run


class _Steps:
    """A generator or coroutine that is resumed inside the region, one step at a time."""

    def __init__(self, region: AbstractContextManager[Any], inner: Any) -> None:
        self.region, self.inner = region, inner

    def __iter__(self) -> Generator[Any, Any, Any]:
        step, value = self.inner.send, None
        while True:
            try:
                with self.region:
                    result = step(value)
            except StopIteration as end:
                return end.value
            try:
                step, value = self.inner.send, (yield result)
            except GeneratorExit:
                with self.region:
                    self.inner.close()
                raise
            except BaseException as error:
                step, value = self.inner.throw, error

    __await__ = __iter__
