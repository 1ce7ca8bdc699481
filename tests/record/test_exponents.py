"""Histograms of binary exponents against `math.frexp`, and what they say of formats against real rounding."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Band, ExponentHistogram, TraceError
from preamp.record.exponents import BANDS, exponent_of
from tests.seeing import counted
from tests.strategies import histograms

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from preamp.torch.lens.histograms import CHUNK, count, read  # noqa: E402

few = settings(deadline=None, max_examples=60)
finite = st.floats(allow_nan=False, allow_infinity=False)


def seen(tensor: torch.Tensor) -> ExponentHistogram:
    return read([count(tensor)])[0][0].histogram


# Counting


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str
)
def test_every_value_of_a_short_dtype_is_counted_where_it_belongs(dtype: torch.dtype) -> None:
    bits = dtype.itemsize * 8
    every = torch.arange(2**bits).to(torch.uint8 if bits == 8 else torch.int16).view(dtype)
    assert seen(every) == counted(every.tolist())
    assert seen(every).total == 2**bits


@few
@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_wide_dtypes_are_counted_as_float32_holds_them(bits: list[int]) -> None:
    wide = np.array(bits, np.uint64).view(np.float64)
    single = np.array(bits, np.uint64).view(np.float32)
    assert seen(torch.from_numpy(wide.copy())) == counted(wide)
    assert seen(torch.from_numpy(single.copy())) == counted(single)
    for numbers, dtype in ((wide, np.complex128), (single, np.complex64)):
        pairs = numbers[: len(numbers) // 2 * 2].view(dtype).copy()
        assert seen(torch.from_numpy(pairs)) == counted(pairs.view(numbers.dtype))


BLOCK = torch.arange(-11.0, 13.0).reshape(2, 3, 4)
LAYOUTS = {
    "one number": lambda: torch.tensor(-3.0),
    "nothing": lambda: torch.empty(0, 3),
    "transposed": lambda: BLOCK.transpose(0, 2),
    "every other": lambda: BLOCK[:, ::2, 1::2],
    "repeated without memory": lambda: torch.tensor([0.3, 5.0]).unsqueeze(1).expand(2, 7),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.complex(BLOCK, BLOCK + 0.1).conj(),
    "negated without memory": lambda: torch.complex(BLOCK, BLOCK + 0.1).conj().imag,
    "requires gradients": lambda: (BLOCK.clone().requires_grad_() * 2.0).half(),
    "more than one piece": lambda: torch.randn(CHUNK + 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_of_any_layout_is_counted(name: str) -> None:
    tensor = LAYOUTS[name]()
    before = tensor.clone()
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    assert seen(tensor) == counted(numbers.reshape(-1).tolist())
    assert torch.equal(tensor, before)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_of_a_sparse_tensor_the_values_it_stores_are_counted() -> None:
    dense = torch.tensor([[0.0, 3.0], [0.25, 0.0]])
    assert seen(dense.to_sparse()) == seen(dense.to_sparse_csr()) == ExponentHistogram(-2, (1, 0, 0, 1))


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        self.to_host += str((kwargs or {}).get("device")) == "cpu"
        return func(*args, **(kwargs or {}))


def test_counting_on_an_accelerator_waits_for_nothing_and_reading_is_one_transfer() -> None:
    with FakeTensorMode(), Operators() as operators:
        counts = [count(torch.empty(size, device="cuda", dtype=torch.half)) for size in (3, 3 * CHUNK)]
        assert all(part.device.type == "cuda" for one in counts for part in one)
        assert not {"bincount", "_local_scalar_dense", "nonzero"} & set(operators.names)
        assert operators.to_host == 0
        with pytest.raises(DataDependentOutputException):  # a fake tensor holds no numbers
            read(counts, [torch.empty((), device="cuda"), torch.empty((), device="cuda")])
        assert operators.to_host == 1


def test_numbers_are_read_along() -> None:
    numbers = [torch.tensor(2.0**-24, dtype=torch.float16), torch.tensor(7), torch.tensor(math.inf)]
    measured, told = read([count(torch.ones(2))], numbers)
    assert measured == [(ExponentHistogram(0, (2,)), 0, 1.0, 1.0)]
    assert told == [2.0**-24, 7.0, math.inf]


# Formats


def dtype_named(name: str) -> Any:
    """Return NumPy's dtype, or that of the package that adds the narrow ones."""
    return getattr(np, name, None) or getattr(pytest.importorskip("ml_dtypes"), name)


def rounded(value: float, name: str) -> float:
    with np.errstate(over="ignore"):
        return float(np.float64(value).astype(dtype_named(name)))


@pytest.mark.parametrize("name", BANDS)
def test_the_numbers_of_a_band_are_those_of_the_dtype(name: str) -> None:
    limits = pytest.importorskip("ml_dtypes").finfo(dtype_named(name))
    assert BANDS[name] == Band(name, *map(float, (limits.max, limits.tiny, limits.smallest_subnormal)))


@pytest.mark.parametrize("name", BANDS)
@few
@given(
    numbers=st.lists(
        st.tuples(st.sampled_from([1.25, -1.5]), st.integers(-160, 140)).map(lambda pair: math.ldexp(*pair)),
        min_size=1,
        max_size=20,
    ),
    shift=st.integers(-30, 30),
)
def test_what_is_flushed_subnormal_and_left_above_is_what_rounding_makes_of_it(
    name: str, numbers: list[float], shift: int
) -> None:
    histogram, band = counted(numbers, least=2.0**-300, most=2.0**300), BANDS[name]
    low = [abs(rounded(math.ldexp(x, shift), name)) for x in numbers]
    flushed = sum(x == 0.0 for x in low) / len(low)
    subnormal = sum(0.0 < x < band.normal for x in low) / len(low)
    assert histogram.flushed(band, shift) == histogram.shifted(shift).flushed(band) == flushed
    assert histogram.subnormal(band, shift) == pytest.approx(subnormal, abs=1e-12)
    room, amax = histogram.headroom(band, shift), max(map(abs, numbers))
    assert math.isfinite(rounded(math.ldexp(amax, shift + room), name))
    assert not math.isfinite(rounded(math.ldexp(amax, shift + room + 1), name))


def test_a_histogram_without_numbers_says_nothing() -> None:
    empty, band = ExponentHistogram(zeros=3, nonfinite=2), BANDS["float16"]
    assert (empty.amax_exponent, empty.headroom(band), empty.flushed(band), empty.subnormal(band)) == (
        None,
        None,
        0.0,
        0.0,
    )
    assert (empty.nonzero, empty.total) == (0, 5)


# Histograms as values


@few
@given(st.lists(finite, max_size=20), st.lists(finite, max_size=20))
def test_the_sum_of_histograms_is_that_of_all_values(some: list[float], others: list[float]) -> None:
    wide = {"least": 2.0**-1074, "most": math.inf}
    assert counted(some, **wide) + counted(others, **wide) == counted(some + others, **wide)


@few
@given(histograms, st.integers(-50, 50))
def test_a_histogram_is_trimmed_and_goes_through_json(histogram: ExponentHistogram, powers: int) -> None:
    assert not histogram.counts or (histogram.counts[0] and histogram.counts[-1])
    assert histogram.counts or histogram.low == 0
    padded = ExponentHistogram(
        histogram.low - 2, (0, 0, *histogram.counts, 0), histogram.zeros, histogram.nonfinite
    )
    assert padded == histogram
    assert ExponentHistogram.from_json(json.loads(json.dumps(histogram.to_json()))) == histogram
    assert histogram.shifted(powers).shifted(-powers) == histogram
    assert histogram.total == histogram.nonzero + histogram.zeros + histogram.nonfinite


@few
@given(histograms, st.integers(-1100, 1100))
def test_shares_are_of_the_values_other_than_zero(histogram: ExponentHistogram, exponent: int) -> None:
    below = sum(n for e, n in enumerate(histogram.counts, histogram.low) if e < exponent)
    assert histogram.share_below(exponent) == (below / histogram.nonzero if histogram.nonzero else 0.0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((0, (1, -1)), "a count is -1"),
        ((0, (1, 0.5)), "a count is 0.5"),
        ((0, (True,)), "a count is True"),
        ((0, (1,), 2**63), "a count is 9223372036854775808"),
        ((0, (1,), 0, None), "a count is None"),
        ((0.0, (1,)), "low is 0.0"),
        ((10**30, (1,)), "low is 1000000"),
        ((4090, (1,) * 10), "low is 4090"),
    ],
)
def test_what_counts_nothing_is_refused(arguments: Any, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        ExponentHistogram(*arguments)


@few
@given(finite.filter(bool))
def test_the_exponent_of_a_number(value: float) -> None:
    assert 1.0 <= math.ldexp(abs(value), -exponent_of(value)) < 2.0
