"""The rules of other systems, decision for decision.

What enters their statistics, and when, is what makes them differ: see docs/guards.md. A dialect is a guard
with that system's defaults; calling it takes the system's own arguments:

>>> OLMO(sigma_factor=4).factor
4.0
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec

from preamp.checks import is_number, positive, shown, whole
from preamp.errors import PolicyError
from preamp.guards.base import Guard, Verdict
from preamp.guards.norm_limit import NoState
from preamp.guards.windows import Window, empty, mean_and_std, push
from preamp.policy.base import Reading, Where, choose, setting

P = ParamSpec("P")
SERIES = ("loss", "grad_norm")


class RollingState(NamedTuple):
    """The last values of both series."""

    loss: Window
    grad_norm: Window


@dataclass(frozen=True, kw_only=True, repr=False)
class Rolling(Guard[RollingState]):
    """Skip a step if its loss or norm is above the mean of the last values by so many standard deviations.

    Every value enters, those of skipped steps and NaN included. Once a NaN has entered, no comparison holds,
    and every step is skipped until it has left the window.
    """

    remembers_overflows: ClassVar[bool] = True  # their losses enter

    window: int = setting(128, "how many past values count.")
    factor: float = setting(6.0, "how many standard deviations above the mean a spike is.")
    history: int = setting(64, "how many past values it needs before it skips.")
    unbiased: bool = setting(True, "whether the variance is divided by n - 1, and not by n.")
    least_std: float = setting(0.0, "the least standard deviation that is assumed.")
    two_sided: bool = setting(False, "whether a value that is as far below the mean is a spike, too.")

    def __post_init__(self) -> None:
        whole("window", self.window, least=2, instead="window=128")
        positive("factor", self.factor, "factor=6.0")

    @property
    def idle(self) -> str | None:
        if self.history <= self.window:
            return None
        return f"it needs {self.history} past values, and keeps {self.window}. Write a longer window."

    def start(self) -> RollingState:
        return RollingState(empty(self.window), empty(self.window))

    def judge(self, state: RollingState, reading: Reading, where: Where = choose) -> Verdict:
        self.require(reading)
        verdict = Verdict(True, math.inf, math.inf)
        for name in SERIES:
            window, value = getattr(state, name), getattr(reading, name)
            if value is None:
                continue
            mean, std = mean_and_std(window, where, unbiased=self.unbiased)
            if self.least_std:
                std = where(std < self.least_std, self.least_std, std)
            apart, most = value - mean, self.factor * std
            fits, limit = apart <= most, mean + most
            if self.two_sided:
                fits, limit = fits & (-apart <= most), where(apart < 0.0, mean - most, limit)
            begins = window.known >= self.history
            verdict = verdict.also(name, where(begins, fits, True), where(begins, limit, math.inf))
        return verdict

    def advance(self, state: RollingState, reading: Reading, where: Where = choose) -> RollingState:
        loss, norm = state.loss, state.grad_norm
        if reading.loss is not None:
            loss = push(loss, reading.loss, where)
        if reading.grad_norm is not None:
            norm = push(norm, reading.grad_norm, where)
        return RollingState(loss, norm)


@dataclass(frozen=True, kw_only=True, repr=False)
class NormThreshold(Guard[NoState]):
    """Skip a step whose gradients' norm is above a threshold. NaN is not above it."""

    uses: ClassVar[frozenset[str]] = frozenset(["grad_norm"])

    threshold: float = setting(math.inf, "the largest norm.")

    @property
    def idle(self) -> str | None:
        if math.isfinite(self.threshold):
            return None
        return "it has no threshold. Write guards.MEGATRON_NORM(10.0)."

    def start(self) -> NoState:
        return NoState()

    def judge(self, state: NoState, reading: Reading, where: Where = choose) -> Verdict:
        self.require(reading)
        norm = reading.grad_norm
        if norm is None:
            return Verdict(reading.finite, None, self.threshold)
        return Verdict(where(norm > self.threshold, False, True), None, self.threshold)

    def advance(self, state: NoState, reading: Reading, where: Where = choose) -> NoState:
        return state


class GuardDialect(Guard[Any], Generic[P]):
    """One system's rule, with that system's defaults; calling it takes the system's own arguments.

    Attributes:
        name: the name in `preamp.guards`, such as "OLMO".
        system: the system whose rule this is.
        odd: known pitfalls, in one line.
        guard: the guard with the system's defaults.
    """

    def __init__(self, make: Callable[P, Guard[Any]], system: str, odd: str) -> None:
        values: dict[str, Any] = {"_make": make, "name": make.__name__, "system": system, "odd": odd}
        values["__signature__"] = inspect.signature(make)
        values |= {"__doc__": f"{system}. {odd}", "__module__": make.__module__, "guard": make(*(), **{})}  # type: ignore[call-arg]
        for name, value in values.items():
            object.__setattr__(self, name, value)  # guards are frozen

    name: str
    system: str
    odd: str
    guard: Guard[Any]
    _make: Callable[P, Guard[Any]]

    @property
    def uses(self) -> frozenset[str]:  # type: ignore[override]  # of a class it is a constant
        """As of `guard`."""
        return self.guard.uses

    @property
    def remembers_overflows(self) -> bool:  # type: ignore[override]
        """As of `guard`."""
        return self.guard.remembers_overflows

    @property
    def idle(self) -> str | None:
        """As of `guard`."""
        return self.guard.idle

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Guard[Any]:
        """Return the guard for the system's own arguments."""
        return self._make(*args, **kwargs)

    def __repr__(self) -> str:
        return f"guards.{self.name}"

    def __reduce__(self) -> str:
        return self.name  # pickled as the name it has in its module

    def start(self) -> Any:
        return self.guard.start()

    def judge(self, state: Any, reading: Reading, where: Where = choose) -> Verdict:
        return self.guard.judge(state, reading, where)

    def advance(self, state: Any, reading: Reading, where: Where = choose) -> Any:
        return self.guard.advance(state, reading, where)


def _dialect(system: str, odd: str) -> Callable[[Callable[P, Guard[Any]]], GuardDialect[P]]:
    """Turn a function of a system's own arguments into a `GuardDialect`."""
    return lambda make: GuardDialect(make, system, odd)


@_dialect(
    "OLMo-core's SkipStepOptimizer",
    "Skips a step whose loss is unusually low, too; one NaN makes it skip the next 128 steps.",
)
def OLMO(*, rolling_interval_length: int = 128, sigma_factor: float = 6) -> Guard[Any]:
    whole("rolling_interval_length", rolling_interval_length, least=2, instead="rolling_interval_length=128")
    positive("sigma_factor", sigma_factor, "sigma_factor=6.0")
    history = max(20, rolling_interval_length // 2) - 1  # where the current value is counted, too
    return Rolling(
        window=rolling_interval_length, factor=float(sigma_factor), history=history, two_sided=True
    )


@_dialect(
    "levanter's SkipStepConfig",
    "One NaN makes it skip the next 128 steps; of several spikes in a row it takes the later ones.",
)
def LEVANTER(*, rolling_interval_length: int = 128, sigma_factor: float = 6.0) -> Guard[Any]:
    whole("rolling_interval_length", rolling_interval_length, least=2, instead="rolling_interval_length=128")
    positive("sigma_factor", sigma_factor, "sigma_factor=6.0")
    return Rolling(
        window=rolling_interval_length,
        factor=float(sigma_factor),
        history=max(2, rolling_interval_length // 2),
        unbiased=False,
        least_std=1e-6,
    )


@_dialect(
    "MaxText's skip_step_on_spikes",
    "Lets spikes become the new baseline on purpose; one NaN makes it skip as many steps as the window has.",
)
def MAXTEXT(interval: int = 128, scaling_factor: float = 6.0) -> Guard[Any]:
    whole("interval", interval, least=2, instead="interval=128")
    positive("scaling_factor", scaling_factor, "scaling_factor=6.0")
    return Rolling(window=interval, factor=float(scaling_factor), history=max(2, interval // 2) - 1)


@_dialect(
    "Megatron-LM's grad_norm_skip_threshold",
    "Without a threshold it skips nothing, and it has one norm for all optimizers that are chained.",
)
def MEGATRON_NORM(grad_norm_skip_threshold: float = math.inf) -> Guard[Any]:
    value = grad_norm_skip_threshold
    if not (value == math.inf or (is_number(value) and value > 0.0)):
        raise PolicyError(
            f"grad_norm_skip_threshold={shown(value)} is not a number above 0. "
            "Write grad_norm_skip_threshold=10.0."
        )
    return NormThreshold(threshold=float(value))


ALL: tuple[GuardDialect[Any], ...] = (OLMO, LEVANTER, MAXTEXT, MEGATRON_NORM)
