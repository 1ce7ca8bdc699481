"""What SpikeGuard and NormLimit promise, on series that Hypothesis draws."""

from __future__ import annotations

import inspect
import math
import pickle
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Dynamic, PolicyError, Reading, Static, Step, Trace, guards, simulate
from preamp.guards import Guard, NormLimit, SpikeGuard, Verdict
from preamp.scaling import given_guard

many = settings(deadline=None, max_examples=30)
spike_guards = st.builds(
    SpikeGuard,
    sigmas=st.floats(2.0, 10.0),
    warmup=st.integers(2, 20),
    patience=st.integers(1, 12),
)
ordinary = st.floats(1.9, 2.1)
anything = st.one_of(
    ordinary,
    st.floats(-1e6, 1e6),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e38, 1e308, -1e308]),
)
norms = st.one_of(st.floats(0.5, 2.0), anything.map(abs))
readings = st.lists(
    st.builds(
        Reading,
        finite=st.sampled_from([True] * 9 + [False]),
        amax=st.none(),
        loss=anything,
        grad_norm=norms,
    ),
    max_size=120,
)


def states_of(guard: Any, series: list[Reading]) -> list[tuple[Any, bool, Any]]:
    """Return for each step the state before it, whether it is taken, and the state after it."""
    found, state = [], guard.start()
    for reading in series:
        taken = bool(reading.finite) and bool(guard.takes(state, reading))
        after = guard.advance(state, reading)
        found.append((state, taken, after))
        state = after
    return found


@many
@given(guard=spike_guards, series=readings)
def test_what_is_skipped_changes_no_more_than_the_widths(guard: SpikeGuard, series: list[Reading]) -> None:
    for reading, (before, taken, after) in zip(series, states_of(guard, series), strict=True):
        assert all(map(math.isfinite, [*after.loss, *after.grad_norm, after.run, after.near]))
        if taken:
            continue
        for name in ("loss", "grad_norm"):
            old, new = getattr(before, name), getattr(after, name)
            assert new._replace(width=old.width) == old
            grown = old.width * (1.0 + (guard.sigmas - 1.0) / 128.0)
            assert new.width <= max(old.width, grown) * 1.000001
            if not (reading.finite and math.isfinite(getattr(reading, name))) or old.steps < guard.warmup:
                assert new.width == old.width


@many
@given(guard=spike_guards, series=readings)
def test_nan_and_inf_are_never_taken(guard: SpikeGuard, series: list[Reading]) -> None:
    for reading, (_, taken, _) in zip(series, states_of(guard, series), strict=True):
        if not (math.isfinite(reading.loss) and math.isfinite(reading.grad_norm)):
            assert not taken


@many
@given(guard=spike_guards, series=readings, last=st.floats(-1e6, 1e6), norm=st.floats(0.0, 1e6))
def test_it_cannot_skip_for_ever(guard: SpikeGuard, series: list[Reading], last: float, norm: float) -> None:
    state, run = guard.start(), 0
    for reading in [*series, *[Reading(True, loss=last, grad_norm=norm)] * (guard.patience + 1)]:
        taken = guard.takes(state, reading) and reading.finite
        state = guard.advance(state, reading)
        run = 0 if taken else run + reading.finite
    assert run == 0
    for reading in series:
        # Whatever came before, the patience is for steps in a row.
        is_finite = math.isfinite(reading.loss) and math.isfinite(reading.grad_norm)
        if state.run >= guard.patience and reading.finite and is_finite and abs(reading.loss) < 1e30:
            assert guard.takes(state, reading) or reading.grad_norm > 1e30
        state = guard.advance(state, reading)


@many
@given(guard=spike_guards, series=readings, drop=st.floats(0.0, 1e6), share=st.floats(0.0, 1.0))
def test_a_lower_value_is_taken_where_a_higher_one_is(
    guard: SpikeGuard, series: list[Reading], drop: float, share: float
) -> None:
    for reading, (before, taken, _) in zip(series, states_of(guard, series), strict=True):
        if taken:
            lower = reading._replace(loss=reading.loss - drop, grad_norm=share * reading.grad_norm)
            assert guard.takes(before, lower)


@many
@given(series=readings)
def test_no_step_of_the_warmup_is_skipped(series: list[Reading]) -> None:
    sane = [one for one in series if one.finite and abs(one.loss) < 1e30 and one.grad_norm < 1e30]
    taken = [taken for _, taken, _ in states_of(SpikeGuard(warmup=16), sane)]
    assert all(taken[:16])


@many
@given(guard=spike_guards, series=readings)
def test_the_limit_that_is_said_is_the_one_that_decides(guard: SpikeGuard, series: list[Reading]) -> None:
    for reading, (before, taken, _) in zip(series, states_of(guard, series), strict=True):
        verdict = guard.judge(before, reading)
        over = reading.loss > verdict.loss_limit or reading.grad_norm > verdict.grad_norm_limit
        broken = math.isnan(reading.loss) or math.isnan(reading.grad_norm) or reading.loss < -1e30
        if reading.finite and not taken:
            assert over or broken
        if over and taken:
            assert before.run >= guard.patience or before.near


def series(losses: list[float], norms: list[float] | None = None) -> list[Reading]:
    known = norms or [1.0] * len(losses)
    return [Reading(True, loss=a, grad_norm=b) for a, b in zip(losses, known, strict=True)]


def skipped(guard: Any, losses: list[float], norms: list[float] | None = None) -> list[int]:
    trace = simulate(Static(1.0), series(losses, norms), guard=guard)
    return [step.index for step in trace if step.reason == "spike"]


NOISE = [2.0 + 0.01 * math.sin(7.0 * step) for step in range(200)]


@pytest.mark.parametrize(
    ("level", "noise", "most"),
    [(3.0, 0.5, 20), (1.0, 0.5, 30), (1.0, 0.3, 65), (1.0, 0.2, 50), (1.0, 0.1, 20)],
)
def test_noise_that_grows_at_once_is_accepted_soon(level: float, noise: float, most: int) -> None:
    for seed in range(2):
        random = Random(seed)
        quiet, wild = (
            [mean * math.exp(random.gauss(0.0, width)) for _ in range(count)]
            for mean, width, count in ((1.0, 0.01, 300), (level, noise, 1000))
        )
        places = skipped(SpikeGuard(), [*quiet, *wild])
        assert sum(place < 500 for place in places) <= most
        assert sum(place >= 500 for place in places) <= 8


def test_a_loss_that_was_constant_is_watched_again_once_it_is_not() -> None:
    random = Random(0)
    wild = [1e-9 * random.gauss(0.0, 1.0) for _ in range(500)]
    assert len(skipped(SpikeGuard(), [*[0.0] * 300, *wild])) <= 25


@many
@given(guard=spike_guards, series=readings)
def test_a_step_of_zeros_changes_nothing(guard: SpikeGuard, series: list[Reading]) -> None:
    zeros = Reading(True, loss=0.0, grad_norm=0.0)
    for before, _, _ in states_of(guard, series):
        verdict = guard.judge(before, zeros)
        if verdict.loss_limit >= 0.0:  # else a loss of 0 is a spike
            assert verdict.taken
            assert guard.advance(before, zeros) == before


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
def test_a_loss_that_is_often_zero_is_judged_by_the_rest(share: float) -> None:
    random = Random(1)
    losses = [random.uniform(0.5, 1.5) if random.random() < share else 0.0 for _ in range(1500)]
    norms = [4.0 * loss for loss in losses]
    assert len(skipped(SpikeGuard(), losses, norms)) <= 3
    places = [place for place, loss in enumerate(losses) if loss][40:60:5]
    for place in places:
        losses[place] = 50.0
    assert {*places} <= {*skipped(SpikeGuard(), losses, norms)}


def test_a_norm_after_many_of_zero_is_accepted_at_once() -> None:
    assert not skipped(SpikeGuard(watch="grad_norm"), [2.0] * 150, [*[0.0] * 50, *[1.0] * 100])


@pytest.mark.parametrize("sigmas", [1e-3, 0.04, 0.3])
def test_a_small_number_of_sigmas_is_one_too(sigmas: float) -> None:
    assert skipped(SpikeGuard(sigmas=sigmas), [2.0] * 40, [*[1.0] * 39, 1e29]) == [39]


def test_after_patience_it_starts_again_with_its_warmup() -> None:
    places = skipped(SpikeGuard(patience=5), [*NOISE, *[20.0] * 6, *[300.0] * 3, *[20.0] * 30, 300.0])
    assert places == [*range(200, 205), 239]


def test_steps_that_are_taken_between_do_not_start_the_patience_again() -> None:
    shaken = [20.0, 2.0] * 20
    assert len(skipped(SpikeGuard(patience=5), [*NOISE, *shaken])) == 7


def test_a_level_far_above_is_accepted_after_patience() -> None:
    shifted = [3.0 * loss for loss in NOISE]
    assert skipped(SpikeGuard(patience=5), [*NOISE, *shifted]) == list(range(200, 205))
    assert skipped(SpikeGuard(), [*NOISE, *shifted]) == list(range(200, 216))


def test_a_level_a_little_above_the_limit_is_accepted_after_one_step() -> None:
    shifted = [1.2 * loss for loss in NOISE]
    assert skipped(SpikeGuard(), [*NOISE, *shifted]) == [200]


def test_an_ordinary_step_after_a_spike_does_not_start_the_level_again() -> None:
    guard, state = SpikeGuard(), SpikeGuard().start()
    for reading in series([*NOISE, 2.4]):
        state = guard.advance(state, reading)
    assert state.near == 1.0
    after = guard.advance(state, Reading(True, loss=1.99, grad_norm=1.0))
    assert after.loss.averaged == state.loss.averaged
    assert abs(after.loss.level - 2.0) < 0.01
    again = guard.advance(state, Reading(True, loss=2.35, grad_norm=1.0))
    assert again.loss.averaged == 1.0
    assert again.loss.level == pytest.approx(2.35)


def test_a_ramp_of_spikes_is_skipped_although_it_begins_small() -> None:
    ramp = [2.4, 6.0, 9.0, 20.0]
    assert skipped(SpikeGuard(), [*NOISE, *ramp, *NOISE]) == list(range(200, 204))


def test_a_spike_of_the_norm_alone_is_one() -> None:
    norms = [1.0 + 0.1 * math.sin(5.0 * step) for step in range(200)]
    trace = simulate(Static(1.0), series([*NOISE, 2.0], [*norms, 30.0]), guard=SpikeGuard())
    spike = trace[200].spike
    assert spike is not None
    assert spike.of == "grad_norm"
    assert spike.value == 30.0
    assert 1.7 < spike.limit < 5.0


def test_a_spike_right_after_a_quick_fall_is_found() -> None:
    fall = [2.0 + 8.0 * math.exp(-step / 25.0) for step in range(100)]
    assert skipped(SpikeGuard(), [*fall, 6.0, *fall[-1:] * 20]) == [100]


@pytest.mark.parametrize("policy", [Static(1.0), Dynamic(init_scale=8.0, growth_interval=4)])
def test_a_spike_neither_backs_off_nor_counts_as_a_clean_step(policy: Any) -> None:
    steps = series([*NOISE[:19], 50.0, *NOISE[:21]])
    trace = simulate(policy, steps, guard=SpikeGuard())
    plain = simulate(policy, [*steps[:19], *steps[20:]])
    assert [step.index for step in trace if step.skipped] == [19]
    assert trace[19].scale == trace[19].new_scale
    assert [step.scale for step in trace if not step.skipped] == [step.scale for step in plain]


def test_a_recorded_run_is_replayed_with_another_guard() -> None:
    recorded = simulate(Static(1.0), series([*NOISE, 50.0, *NOISE], [1.0] * 200 + [9.0] + [1.0] * 200))
    plain = Trace(policy="")
    plain.extend(Step(n, 1.0, True, False, 1.0, loss=loss) for n, loss in enumerate([*NOISE, 50.0, *NOISE]))
    assert len(recorded) == 401
    assert [step.index for step in simulate(Static(1.0), plain, guard=SpikeGuard()) if step.skipped] == [200]
    assert [step.index for step in simulate(Static(1.0), plain, guard=guards.OLMO) if step.skipped] == [200]


def test_a_guard_says_what_a_reading_lacks() -> None:
    with pytest.raises(PolicyError, match="needs the grad_norm or loss of the step"):
        SpikeGuard().takes(SpikeGuard().start(), Reading(True))
    with pytest.raises(
        PolicyError, match=r"needs the grad_norm of the step.*Write Reading\(finite, grad_norm"
    ):
        NormLimit(2.0).takes(NormLimit(2.0).start(), Reading(True, loss=1.0))
    with pytest.raises(PolicyError, match="guard='olmo' is not a guard"):
        simulate(Static(1.0), series([1.0]), guard="olmo")  # type: ignore[arg-type]
    from preamp import processes

    with pytest.raises(PolicyError, match="this process has neither"):
        simulate(Static(1.0), processes.Stationary(steps=10), guard=SpikeGuard())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SpikeGuard(sigmas=0.0), "sigmas=0.0 is not a finite number above 0"),
        (lambda: SpikeGuard(warmup=1), "warmup=1 must be a whole number from 2 to 1000000"),
        (lambda: SpikeGuard(patience=0), "patience=0"),
        (lambda: NormLimit(-1.0), "threshold=-1.0"),
        (lambda: NormLimit(math.inf), "threshold=inf"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        make()


@pytest.mark.parametrize(
    "saved", [{}, None, 3.0, {"run": 1.0}, {"loss": 1.0, "grad_norm": 1.0, "run": 0.0, "near": 0.0}]
)
def test_a_state_of_another_guard_is_refused(saved: Any) -> None:
    with pytest.raises(PolicyError, match="the saved state is not one of"):
        SpikeGuard().restore(saved)


def test_guards_are_shown_pickled_and_compared_by_their_settings() -> None:
    guard = SpikeGuard(sigmas=4.0)
    assert repr(guard) == "guards.SpikeGuard(sigmas=4.0)"
    assert repr(NormLimit(2.0)) == "guards.NormLimit(threshold=2.0)"
    assert pickle.loads(pickle.dumps(guard)) == guard == replace(SpikeGuard(), sigmas=4.0)
    assert guard != SpikeGuard()
    assert hash(guard) == hash(SpikeGuard(sigmas=4.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", -5.0),
        ("near", math.nan),
        ("width", -1.0),
        ("width", math.inf),
        ("steps", math.inf),
        ("level", math.nan),
    ],
)
def test_a_state_that_cannot_be_is_refused(name: str, value: float) -> None:
    guard = SpikeGuard()
    saved = guard.start()._asdict()
    saved |= {part: saved[part]._asdict() for part in ("loss", "grad_norm")}
    assert guard.restore(saved) == guard.start()
    saved = {**saved, name: value} if name in saved else {**saved, "loss": {**saved["loss"], name: value}}
    with pytest.raises(PolicyError, match=f"{name} is {value!r}"):
        guard.restore(saved)


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        (guards.MEGATRON_NORM, r"Write guards.MEGATRON_NORM\(10.0\)"),
        (guards.OLMO(rolling_interval_length=16), "needs 19 past values, and keeps 16"),
    ],
    ids=repr,
)
def test_adapters_refuse_what_can_skip_no_step(guard: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=f"can never skip a step: .*{said}"):
        given_guard(guard)
    assert not skipped(guard, [*NOISE, 1e6], [*[1.0] * 200, 1e6])


def test_what_can_skip_a_step_is_not_refused() -> None:
    guard = guards.MEGATRON_NORM(2.0)
    assert given_guard(guard) is guard
    assert given_guard(None) is None


class Seen(NamedTuple):
    steps: float


SEEN, OF_A_LOSS = Seen(1.0), Verdict(True, 1.0)


@dataclass(frozen=True, repr=False)
class Mine(Guard[Seen]):
    """A guard whose methods return what they are told to."""

    uses: ClassVar = frozenset(["loss"])
    verdict: Any = OF_A_LOSS
    after: Any = SEEN

    def start(self) -> Seen:
        return Seen(0.0)

    def judge(self, state: Seen, reading: Reading, where: Any = None) -> Verdict:
        return self.verdict

    def advance(self, state: Seen, reading: Reading, where: Any = None) -> Seen:
        return self.after


class OtherUses(Mine):
    uses: ClassVar = frozenset(["norm"])


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        (Mine(verdict=True), "Mine.judge returned True, which is not a Verdict"),
        (Mine(verdict=Verdict(True)), "names no limit of the loss, which it uses"),
        (Mine(verdict=Verdict(True, None, 1.0)), "names no limit of the loss"),
        (Mine(after=None), r"Mine.advance returned None.*Write return Seen\(...\)"),
        (Mine(after=(1.0,)), "Mine.advance returned"),
        (Mine(after=Seen((1.0, 2.0))), "Mine.advance returned"),
        (OtherUses(), "OtherUses.uses is"),
    ],
)
def test_a_class_whose_methods_return_something_else_is_refused(guard: Any, said: str) -> None:
    assert given_guard(Mine()) is not None
    with pytest.raises(PolicyError, match=said):
        given_guard(guard)


def test_a_dialect_shows_the_arguments_of_its_system_and_its_rule_is_code() -> None:
    assert list(inspect.signature(guards.OLMO).parameters) == ["rolling_interval_length", "sigma_factor"]
    for guard in (guards.OLMO(sigma_factor=4), guards.MEGATRON_NORM(3.0)):
        assert eval(repr(guard), {"guards": guards}) == guard
