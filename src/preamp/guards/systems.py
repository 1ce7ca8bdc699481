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
from preamp.guards.windows import Window, drop_newest, empty, mean_and_std, push
from preamp.policy.base import Reading, Scalar, Where, choose, setting

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


class ScoredState(NamedTuple):
    """The last values of both series, and how many outliers in a row they had."""

    loss: Window
    grad_norm: Window
    loss_run: Scalar
    grad_norm_run: Scalar


@dataclass(frozen=True, kw_only=True, repr=False)
class Scored(Guard[ScoredState]):
    """Skip a step by the z-score of its loss or norm in a window that holds the new value already.

    A score in a window of n values is at most (n - 1) / sqrt(n), 7.875 of 64: a higher limit never skips. An
    outlier is taken out of the window again, unless it is the third in a row.
    """

    remembers_overflows: ClassVar[bool] = True

    window: int = setting(64, "how many values the window has, the new one included.")
    loss: float = setting(0.0, "the largest score of the loss. 0: no limit.")
    grad_norm: float = setting(0.0, "the largest score of the norm. 0: no limit.")
    patience: int = setting(3, "how many outliers in a row it takes for the last one to stay in the window.")

    def __post_init__(self) -> None:
        whole("window", self.window, least=2, instead="window=64")

    @property
    def idle(self) -> str | None:
        bound = (self.window - 1) / math.sqrt(self.window)
        if any(0.0 < score < bound for score in (self.loss, self.grad_norm)):
            return None
        return f"it has no limit below {bound:.4g}, which no score exceeds. Write guards.LLM_C(5.0, 5.0)."

    def start(self) -> ScoredState:
        return ScoredState(empty(self.window), empty(self.window), 0.0, 0.0)

    def judge(self, state: ScoredState, reading: Reading, where: Where = choose) -> Verdict:
        self.require(reading)
        verdict = Verdict(True, math.inf, math.inf)
        for name in SERIES:
            value, most = getattr(reading, name), getattr(self, name)
            if value is not None and most:
                _, is_outlier, limit = self._scored(getattr(state, name), value, most, where)
                verdict = verdict.also(name, where(is_outlier, False, True), limit)
        return verdict

    def advance(self, state: ScoredState, reading: Reading, where: Where = choose) -> ScoredState:
        loss, loss_run = self._entered(state.loss, state.loss_run, reading.loss, self.loss, where)
        norm, norm_run = self._entered(
            state.grad_norm, state.grad_norm_run, reading.grad_norm, self.grad_norm, where
        )
        return ScoredState(loss, norm, loss_run, norm_run)

    def _entered(
        self, window: Window, run: Scalar, value: Scalar, most: float, where: Where
    ) -> tuple[Window, Scalar]:
        """Return a window after a value, and how many outliers there were in a row."""
        if value is None or not most:
            return window, run
        pushed, is_outlier, _ = self._scored(window, value, most, where)
        run = where(is_outlier, run + 1.0, 0.0)
        return drop_newest(window, pushed, is_outlier & (run < self.patience), where), run

    def _scored(self, window: Window, value: Scalar, most: float, where: Where) -> tuple[Window, Any, Any]:
        """Return the window with the value, whether it is an outlier, and the largest value that is not."""
        pushed = push(window, value, where)
        mean, std = mean_and_std(pushed, where, unbiased=True)
        # The first score is that of the value after those that filled the window.
        begins = window.known >= self.window
        is_outlier = begins & (value - mean > most * std) & (std > 0.0)
        return pushed, is_outlier, where(begins, mean + most * std, math.inf)


class AverageState(NamedTuple):
    """The exponential mean of the loss; 0 steps before the first."""

    mean: Scalar
    steps: Scalar


@dataclass(frozen=True, kw_only=True, repr=False)
class LossRatio(Guard[AverageState]):
    """Skip a step whose loss is above a limit, or above its exponential mean by a factor.

    The losses of skipped steps do not enter the mean.
    """

    uses: ClassVar[frozenset[str]] = frozenset(["loss"])

    limit: float = setting(math.inf, "the largest loss.")
    ratio: float = setting(math.inf, "the largest ratio of the loss to its mean.")
    span: float = setting(9.0, "the span of the mean: the newest loss weighs 2 / (span + 1).")

    @property
    def idle(self) -> str | None:
        if math.isfinite(self.limit) or math.isfinite(self.ratio):
            return None
        return "it has no limit. Write guards.METASEQ(ewm_ratio_to_skip_batch=1.5)."

    def start(self) -> AverageState:
        return AverageState(0.0, 0.0)

    def judge(self, state: AverageState, reading: Reading, where: Where = choose) -> Verdict:
        self.require(reading)
        limit = self.limit
        if math.isfinite(self.ratio):
            most = self.ratio * state.mean
            limit = where((state.steps > 0.0) & (most < self.limit), most, self.limit)
        if reading.loss is None:
            return Verdict(reading.finite, limit)
        return Verdict(True, limit).also("loss", where(reading.loss > limit, False, True), limit)

    def advance(self, state: AverageState, reading: Reading, where: Where = choose) -> AverageState:
        if reading.loss is None:
            return state
        enters = self.takes(state, reading, where) & reading.finite
        weight = where(state.steps > 0.0, 2.0 / (self.span + 1.0), 1.0)
        mean = state.mean + weight * (reading.loss - state.mean)
        return AverageState(where(enters, mean, state.mean), where(enters, state.steps + 1.0, state.steps))


@dataclass(frozen=True, kw_only=True, repr=False)
class NormThreshold(Guard[NoState]):
    """Skip a step whose gradients' norm is above a threshold. NaN is not above it."""

    uses: ClassVar[frozenset[str]] = frozenset(["grad_norm"])

    threshold: float = setting(math.inf, "the largest norm.")
    itself: bool = setting(True, "whether a norm that equals the threshold is taken.")

    @property
    def idle(self) -> str | None:
        if math.isfinite(self.threshold):
            return None
        name = "MEGATRON_NORM" if self.itself else "AXLEARN"
        return f"it has no threshold. Write guards.{name}(10.0)."

    def start(self) -> NoState:
        return NoState()

    def judge(self, state: NoState, reading: Reading, where: Where = choose) -> Verdict:
        self.require(reading)
        norm = reading.grad_norm
        if norm is None:
            return Verdict(reading.finite, None, self.threshold)
        above = norm > self.threshold if self.itself else norm >= self.threshold
        return Verdict(where(above, False, True), None, self.threshold)

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


def _threshold(name: str, value: object) -> float:
    if not (value == math.inf or (is_number(value) and value > 0.0)):
        raise PolicyError(f"{name}={shown(value)} is not a number above 0. Write {name}=10.0.")
    return float(value)


def _score(name: str, value: object) -> float:
    if not (is_number(value) and value >= 0.0):
        raise PolicyError(f"{name}={shown(value)} is not a number of at least 0. Write {name}=5.0.")
    return float(value)


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
    return NormThreshold(threshold=_threshold("grad_norm_skip_threshold", grad_norm_skip_threshold))


@_dialect(
    "axlearn's skip_and_clip_by_global_norm",
    "A norm that equals the threshold is skipped. Its clipping corresponds to an adapter's max_norm.",
)
def AXLEARN(drop_norm: float = math.inf) -> Guard[Any]:
    return NormThreshold(threshold=_threshold("drop_norm", drop_norm), itself=False)


@_dialect(
    "llm.c's -sl and -sg",
    "Its score cannot exceed 7.9, so a higher limit never skips. Without limits it skips nothing.",
)
def LLM_C(skip_update_lossz: float = 0.0, skip_update_gradz: float = 0.0) -> Guard[Any]:
    loss = _score("skip_update_lossz", skip_update_lossz)
    return Scored(loss=loss, grad_norm=_score("skip_update_gradz", skip_update_gradz))


@_dialect(
    "metaseq's limits of the loss",
    "Without limits it skips nothing; a multiple of the mean skips every step whose loss is negative.",
)
def METASEQ(
    max_loss_to_skip_batch: float = math.inf, ewm_ratio_to_skip_batch: float = math.inf, span: float = 9
) -> Guard[Any]:
    positive("span", span, "span=9")
    ratio = _threshold("ewm_ratio_to_skip_batch", ewm_ratio_to_skip_batch)
    if ratio <= 1.0:
        raise PolicyError(
            f"ewm_ratio_to_skip_batch={ewm_ratio_to_skip_batch!r} is not above 1, so every loss would be "
            "skipped. Write ewm_ratio_to_skip_batch=1.5."
        )
    return LossRatio(
        limit=_threshold("max_loss_to_skip_batch", max_loss_to_skip_batch),
        ratio=ratio,
        span=float(span),
    )


ALL: tuple[GuardDialect[Any], ...] = (OLMO, LEVANTER, MAXTEXT, MEGATRON_NORM, AXLEARN, LLM_C, METASEQ)
