"""`mismatch` of PyTorch and of JAX, beside numbers that NumPy computes in float64 from the definitions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import hypothesis.strategies as some
import numpy as np
import pytest
from hypothesis import given, settings

from preamp import UsageError
from preamp.record.mismatch import Mismatch

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

from preamp.jax import mismatch as in_jax  # noqa: E402
from preamp.torch import mismatch as in_torch  # noqa: E402
from tests.jax.trainings import enable_x64  # noqa: E402
from tests.torch.test_step_loss import Calls  # noqa: E402

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])
INF, NAN = math.inf, math.nan
SHAPES = [(), (1,), (7,), (0,), (2, 0), (4, 5), (2, 3, 4)]  # few, because JAX compiles for each


def measure(framework: str, trainer: Any, sampler: Any, mask: Any = None, **limits: float) -> Mismatch[Any]:
    if framework == "jax":
        found = in_jax(
            *(None if one is None else jnp.asarray(one) for one in (trainer, sampler, mask)), **limits
        )
        return Mismatch(*map(np.asarray, found))
    found = in_torch(
        *(None if one is None else torch.tensor(one) for one in (trainer, sampler, mask)), **limits
    )
    return Mismatch(*(one.numpy() for one in found))


def oracle(trainer: Any, sampler: Any, mask: Any, low: float, high: float) -> dict[str, float]:
    """Compute everything token by token, from what the docstring of `Mismatch` says."""
    chosen = [
        (float(a), float(b)) for a, b, m in zip(trainer.flat, sampler.flat, mask.flat, strict=True) if m
    ]
    tokens = [(a, b) for a, b in chosen if math.isfinite(a) and math.isfinite(b) and max(a, b) <= 0.01]
    logs = [Fraction(a) - Fraction(b) for a, b in tokens]
    ratios = [math.exp(x) for x in logs]
    count = len(tokens)
    found: dict[str, float] = {"tokens": count, "invalid": len(chosen) - count}
    if not count:
        return found | dict.fromkeys(Mismatch._fields[2:], NAN)
    gaps = [abs(math.exp(a) - math.exp(b)) for a, b in tokens]
    # In exact arithmetic, of the series that defines exp: nothing cancels.
    k3 = [float(sum(x**n / math.factorial(n) for n in range(2, 60))) for x in logs]
    sizes = [float(abs(x)) for x in logs]
    return found | {
        "k1": float(-sum(logs) / count),
        "k3": math.fsum(k3) / count,
        "mean_ratio": math.fsum(ratios) / count,
        "min_ratio": min(ratios),
        "max_ratio": max(ratios),
        "clipped": sum(not 1.0 - low <= ratio <= 1.0 + high for ratio in ratios) / count,
        "effective_share": math.fsum(ratios) ** 2 / math.fsum(r * r for r in ratios) / count,
        "mean_abs_diff": math.fsum(sizes) / count,
        "max_abs_diff": max(sizes),
        "mean_prob_diff": math.fsum(gaps) / count,
        "max_prob_diff": max(gaps),
    }


def assert_as_defined(found: Mismatch[Any], wanted: dict[str, float], relative: float = 2e-5) -> None:
    for name, value in wanted.items():
        # A difference of probabilities has the rounding of exp, and k1 that of terms which cancel.
        absolute = {"mean_prob_diff": 3e-7, "max_prob_diff": 3e-7}.get(name, 0.0)
        absolute += 1e-6 * wanted["mean_abs_diff"] if name == "k1" else 0.0
        assert float(getattr(found, name)) == pytest.approx(value, rel=relative, abs=absolute, nan_ok=True), (
            name
        )


@some.composite
def tokens(draw: Any) -> tuple[Any, Any, Any]:
    """Draw log-probabilities of two models that are near or far apart, some not finite, and a mask."""
    shape = draw(some.sampled_from(SHAPES))
    near = draw(some.sampled_from([1e-7, 1e-4, 0.1, 3.0]))
    seed = draw(some.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    sampler = -random.exponential(3.0, shape).astype(np.float32)
    trainer = (sampler + near * random.normal(size=shape)).astype(np.float32)
    trainer, sampler = np.array(trainer), np.array(sampler)
    for one in (trainer, sampler):
        odd = random.random(shape) < draw(some.sampled_from([0.0, 0.0, 0.2]))
        one[odd] = random.choice([NAN, -INF, INF], int(odd.sum()))
    mask = random.random(shape) < draw(some.sampled_from([0.0, 0.5, 1.0]))
    return trainer, sampler, np.array(mask)


@given(tokens(), some.sampled_from([0.2, 0.003]), some.sampled_from([0.28, 0.004]))
@settings(max_examples=30, deadline=None)
def test_every_number_is_as_defined_in_both_frameworks(drawn: Any, low: float, high: float) -> None:
    wanted = oracle(*drawn, low, high)
    found = measure("torch", *drawn, clip_low=low, clip_high=high)
    assert_as_defined(found, wanted)
    for name, one, other in zip(
        found._fields, found, measure("jax", *drawn, clip_low=low, clip_high=high), strict=True
    ):
        assert one.dtype == (np.float32 if name not in ("tokens", "invalid") else one.dtype)
        assert float(other) == pytest.approx(
            float(one), rel=1e-5, abs=3e-7 if "prob" in name or name == "k1" else 0, nan_ok=True
        ), name


@BOTH
def test_no_mask_counts_every_token(framework: str) -> None:
    trainer, sampler = np.array([[-1.0, -2.0], [-3.0, NAN]]), np.array([[-1.5, -2.0], [-2.5, -1.0]])
    found = measure(framework, np.float32(trainer), np.float32(sampler))
    assert_as_defined(found, oracle(trainer, sampler, np.ones((2, 2)), 0.2, 0.2))
    assert (found.tokens, found.invalid) == (3, 1)


@BOTH
@pytest.mark.parametrize("dtype", ["bool", "int64"])
def test_a_mask_may_have_any_dtype(framework: str, dtype: str) -> None:
    trainer, sampler = np.float32([-1.0, NAN, -2.0]), np.float32([-1.5, -1.0, -2.0])
    with enable_x64(True):
        found = measure(framework, trainer, sampler, np.array([1, 0, 1], dtype))
    assert (found.tokens, found.invalid, found.max_abs_diff) == (2, 0, 0.5)


@BOTH
@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_only_mask_entries_above_0_count(framework: str, dtype: str) -> None:
    """Neither NaN nor a negative entry is a token."""
    mask = np.array([1.0, -1.0, 0.0, 2.0, 0.0 if dtype == "int32" else NAN]).astype(dtype)
    found = measure(framework, np.float32([-1.0] * 5), np.float32([-1.5] * 5), mask)
    assert (found.tokens, found.invalid) == (2, 0)


@BOTH
def test_logits_and_probabilities_are_invalid(framework: str) -> None:
    """Only rounding brings a log-probability above 0, and never far."""
    logits, sampler = np.float32([5.0, 3.0, 0.004, 0.0, -1.0]), np.float32([-1.0, -1.0, -1.0, 0.004, -1.0])
    for one, other in ((logits, sampler), (sampler, logits)):
        found = measure(framework, one, other)
        assert (found.tokens, found.invalid) == (3, 2)
        assert found.max_prob_diff < 1.0
    probabilities = np.float32([0.9, 0.2, 0.05])
    found = measure(framework, probabilities, probabilities)
    assert (found.tokens, found.invalid) == (0, 3)


@BOTH
def test_what_is_masked_changes_no_bit(framework: str) -> None:
    random = np.random.default_rng(0)
    trainer, sampler = -random.exponential(size=(2, 4, 50)).astype(np.float32)
    mask = random.random((4, 50)) < 0.5
    want = measure(framework, trainer, sampler, mask)
    for junk in (NAN, INF, -INF, 1e38, 0.0):
        for one in (trainer, sampler):
            one[~mask] = junk
            found = measure(framework, trainer, sampler, mask)
            assert [value.tobytes() for value in found] == [value.tobytes() for value in want]


@BOTH
def test_models_that_agree_have_no_mismatch(framework: str) -> None:
    logp = np.float32([[-0.5, -20.0, -1e4]])
    found = measure(framework, logp, logp)
    assert found == (3, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0)


@BOTH
@pytest.mark.parametrize("gap", [1e-9, 1e-3, 0.24999, 0.25001, 1.0, -1e-7, -0.2501, -20.0])
def test_k3_keeps_its_digits(framework: str, gap: float) -> None:
    """The naive formula is off by a factor at 1e-7, and 0 or negative at 1e-9."""
    found = measure(framework, np.float32([min(gap, 0.0)]), np.float32([min(-gap, 0.0)]))
    x = Fraction(float(np.float32(gap)))
    assert float(found.k3) == pytest.approx(
        float(sum(x**n / math.factorial(n) for n in range(2, 120))), rel=2e-6
    )


@BOTH
def test_a_ratio_that_overflows_is_inf_where_it_has_to_be(framework: str) -> None:
    found = measure(framework, np.float32([-1.0, -200.0, -1.0]), np.float32([-200.0, -1.0, -1.0]))
    assert (found.max_ratio, found.mean_ratio, found.k3) == (INF, INF, INF)
    assert (found.min_ratio, found.invalid, found.k1, found.max_abs_diff) == (0.0, 0, 0.0, 199.0)
    assert found.effective_share == pytest.approx(1 / 3)
    assert found.clipped == pytest.approx(2 / 3)


@BOTH
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_compared_in_float32(framework: str, dtype: str) -> None:
    """As float16 the difference of -8 and -8.0078125 would be right, and the ratio would not."""
    values = [-8.0, -0.5], [-8.0625, -0.50390625]
    if framework == "torch":
        found = in_torch(*(torch.tensor(one, dtype=getattr(torch, dtype)) for one in values))
    else:
        found = in_jax(*(jnp.array(one, dtype) for one in values))
    assert {str(one.dtype).removeprefix("torch.") for one in found[2:]} == {"float32"}
    wanted = oracle(*map(np.array, values), np.ones(2), 0.2, 0.2)
    assert_as_defined(Mismatch(*map(np.float64, found)), wanted)


@BOTH
@pytest.mark.parametrize("other", ["float32", "float64"])
def test_float64_stays(framework: str, other: str) -> None:
    """Also beside float32, to which it would be rounded."""
    with enable_x64(True):
        found = measure(framework, np.array([-1.0 + 2.0**-40]), np.array([-1.0], other))
    assert {value.dtype for value in found[2:]} == {np.dtype("float64")}
    assert found.k1 == -(2.0**-40)
    assert found.k3 == pytest.approx(2.0**-81, rel=1e-9)


def test_the_divergence_is_that_of_the_sampler_from_the_trainer() -> None:
    """Drawn often enough, both estimators come to the sum over the vocabulary; not to that of the reverse."""
    sampler, trainer = np.log([0.7, 0.2, 0.1]), np.log([0.3, 0.3, 0.4])
    exact = float(np.sum(np.exp(sampler) * (sampler - trainer)))
    reverse = float(np.sum(np.exp(trainer) * (trainer - sampler)))
    drawn = np.random.default_rng(0).choice(3, 200_000, p=[0.7, 0.2, 0.1])
    found = in_torch(torch.tensor(trainer[drawn]), torch.tensor(sampler[drawn]))
    assert abs(exact - reverse) > 0.04
    assert float(found.k1) == pytest.approx(exact, abs=0.01)
    assert float(found.k3) == pytest.approx(exact, abs=0.01)
    assert float(found.mean_ratio) == pytest.approx(1.0, abs=0.02)


# In programs


def drawn_tokens() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(1)
    sampler = -random.exponential(2.0, (3, 4, 5)).astype(np.float32)
    trainer = (sampler + 0.1 * random.normal(size=sampler.shape)).astype(np.float32)
    trainer[0, 0, 0] = NAN
    return trainer, sampler, random.random(sampler.shape) < 0.6


def close(one: Any, other: Any) -> None:
    for name, first, second in zip(Mismatch._fields, one, other, strict=True):
        np.testing.assert_allclose(np.asarray(first), np.asarray(second), rtol=1e-5, atol=1e-7, err_msg=name)


def test_jax_compiles_it_and_a_step_can_return_it() -> None:
    compiled = jax.jit(in_jax, static_argnames=("clip_low", "clip_high"))
    found = compiled(*drawn_tokens(), clip_low=0.1)
    assert isinstance(found, Mismatch)
    assert all(isinstance(value, jax.Array) for value in found)
    close(found, in_jax(*drawn_tokens(), clip_low=0.1))


def test_no_gradient_flows_in_jax() -> None:
    trainer, sampler, mask = map(jnp.asarray, drawn_tokens())

    def loss(logp: Any) -> tuple[Any, Any]:
        found = in_jax(logp, sampler, mask)
        return jnp.nansum(logp) + found.k3 + found.mean_ratio + found.max_ratio, found

    gradient, found = jax.grad(loss, has_aux=True)(trainer)
    np.testing.assert_array_equal(gradient, np.where(np.isnan(trainer), 0.0, 1.0))
    close(found, in_jax(trainer, sampler, mask))


def test_no_gradient_flows_in_torch() -> None:
    trainer, sampler, mask = map(torch.from_numpy, drawn_tokens())
    found = in_torch(trainer.requires_grad_(), sampler.requires_grad_(), mask)
    assert not any(value.requires_grad for value in found)


def test_torch_compiles_it_in_one_graph() -> None:
    tensors = [torch.from_numpy(one) for one in drawn_tokens()]
    found = torch.compile(in_torch, fullgraph=True, backend="aot_eager")(*tensors, clip_low=0.1)
    assert isinstance(found, Mismatch)
    close(found, in_torch(*tensors, clip_low=0.1))


def test_torch_reads_nothing() -> None:
    tensors = [torch.from_numpy(one) for one in drawn_tokens()]
    with Calls() as calls:
        found = in_torch(*tensors)
        assert (calls.reads, len(calls.names) > 10) == (0, True)
        found.k1.item()
        assert calls.reads == 1
    assert all(value.ndim == 0 for value in found)


# Refused


@BOTH
@pytest.mark.parametrize(
    ("trainer", "sampler", "mask", "said"),
    [
        (
            [[-1.0], [-2.0]],
            [-1.0, -2.0],
            None,
            r"logp_sampler has the shape \[2\] and logp_trainer \[2, 1\], but .*",
        ),
        (
            [-1.0, -2.0],
            [-1.0, -2.0],
            [True],
            r"mask has the shape \[1\] .* write mask\.reshape\(logp_trainer\.shape\)",
        ),
        (
            [3, 4],
            [-1.0, -2.0],
            None,
            r"logp_trainer has the dtype (torch\.)?int64: .* tokens\? Write logp_trainer=",
        ),
        (
            [-1.0, -2.0],
            [True, False],
            None,
            r"logp_sampler has the dtype (torch\.)?bool: .* Write logp_sampler=",
        ),
    ],
)
def test_arrays_that_are_not_of_the_same_tokens_are_refused(framework, trainer, sampler, mask, said) -> None:
    with enable_x64(True), pytest.raises(UsageError, match=said):
        measure(framework, np.array(trainer), np.array(sampler), None if mask is None else np.array(mask))


def test_tensors_on_two_devices_are_refused_with_the_line_that_moves_one() -> None:
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    said = (
        r"^logp_sampler is on meta and logp_trainer on cpu\. Write logp_sampler\.to\(logp_trainer\.device\)\."
    )
    with pytest.raises(UsageError, match=said):
        in_torch(here, there)
    said = r"^mask is on meta and logp_trainer on cpu\. Write mask\.to\(logp_trainer\.device\)\.$"
    with pytest.raises(UsageError, match=said):
        in_torch(here, here, there > 0)


@BOTH
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"clip_low": 1.5}, r"clip_low=1\.5 must be a number above 0 and at most 1\. Write clip_low=0\.2"),
        ({"clip_low": 0.0}, r"clip_low=0\.0 must be"),
        ({"clip_high": -0.2}, r"clip_high=-0\.2 must be a number above 0\. Write clip_high=0\.2"),
        ({"clip_high": NAN}, r"clip_high=nan must be"),
        ({"clip_high": "0.2"}, r"clip_high='0\.2' must be"),
    ],
)
def test_limits_out_of_range_are_refused(framework: str, limit: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        measure(framework, np.float32([-1.0]), np.float32([-1.0]), **limit)


@pytest.mark.parametrize(
    ("call", "convert"), [(in_torch, r"torch\.as_tensor"), (in_jax, r"jnp\.asarray")], ids=["torch", "jax"]
)
def test_lists_are_refused_with_the_line_that_converts_them(call: Any, convert: str) -> None:
    one = torch.zeros(1) if call is in_torch else jnp.zeros(1)
    with pytest.raises(
        UsageError, match=rf"logp_sampler=\[-1\.0\] is not an? \w+\. Write logp_sampler={convert}"
    ):
        call(one, [-1.0])
    with pytest.raises(UsageError, match=rf"logp_trainer=None is not an? \w+\. Write logp_trainer={convert}"):
        call(None, one)
    with pytest.raises(UsageError, match=rf"mask=\[True\] is not an? \w+\. Write mask={convert}"):
        call(one, one, [True])
