"""Our loss scalers beside DeepSpeed's own: equal attributes after every step, and an end at the same step."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import pickle
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import preamp.deepspeed
from preamp import PolicyError, ScaleExhausted, UsageError
from preamp.deepspeed import CreateLossScaler, DynamicLossScaler, LossScaler, LossScalerBase, OverflowLog

NAMES = ("LossScalerBase", "LossScaler", "DynamicLossScaler", "CreateLossScaler")
ARGUMENTS: dict[str, Any] = {
    "init_scale": 2.0**16,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}
INF, NAN = math.inf, math.nan

per_module = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def scaler(**arguments: Any) -> DynamicLossScaler:
    return DynamicLossScaler(**{**ARGUMENTS, **arguments})


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "preamp.deepspeed")


# The rule


_scales = st.sampled_from([2**16, 2.0**32, 1000.1, 4.0, 1.0])
_floors = st.sampled_from([1, 1.0, 0.25, 1e-4, 100.0])
_arguments = st.fixed_dictionaries(
    {
        "init_scale": _scales,
        "scale_window": st.integers(1, 5),
        "min_scale": _floors,
        "delayed_shift": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "raise_error_at_min_scale": st.booleans(),
    }
)
_settings = st.one_of(
    st.tuples(st.just("cur_scale"), _scales),
    st.tuples(st.just("min_scale"), _floors),
    st.tuples(st.just("scale_factor"), st.sampled_from([2.0, 3.0, 1.1])),
    st.tuples(st.just("scale_window"), st.integers(1, 5)),
    st.tuples(st.just("cur_hysteresis"), st.integers(1, 4)),
    st.tuples(st.just("cur_iter"), st.integers(0, 20)),
    st.tuples(st.just("last_overflow_iter"), st.integers(-1, 20)),
    st.tuples(st.sampled_from(["consecutive_hysteresis", "raise_error_at_min_scale"]), st.booleans()),
)
_scripts = st.lists(st.booleans(), max_size=60)
_rough_scripts = st.lists(st.booleans() | _settings, max_size=60)


def update(one: Any, overflow: bool, ends: type[Exception]) -> bool:
    """Update a scaler; return whether it raised."""
    try:
        one.update_scale(overflow)
    except ends:
        return True
    return False


def walk_abreast(ours: Any, theirs: Any, script: list[Any]) -> None:
    """Update both, or set an attribute of both; they are equal after every step."""
    for mark in script:
        if isinstance(mark, tuple):
            name, value = mark
            for one in (ours, theirs):
                setattr(one, name, min(value, one.delayed_shift) if name == "cur_hysteresis" else value)
        else:
            before = copy.deepcopy(vars(ours))
            raised = update(ours, mark, ScaleExhausted)
            assert raised == update(theirs, mark, Exception)
            assert not raised or vars(ours) == before
        if ours.dynamic:
            assert vars(ours) == vars(theirs)
        assert ours.loss_scale == theirs.loss_scale


@settings(per_module, max_examples=60)
@given(arguments=_arguments, script=_scripts)
def test_every_sequence_is_deepspeeds(
    peer: ModuleType, arguments: dict[str, Any], script: list[bool]
) -> None:
    walk_abreast(DynamicLossScaler(**arguments), peer.DynamicLossScaler(**arguments), script)


@settings(per_module, max_examples=50)
@given(arguments=_arguments, script=_rough_scripts)
def test_attributes_can_be_set_at_any_time(
    peer: ModuleType, arguments: dict[str, Any], script: list[Any]
) -> None:
    walk_abreast(DynamicLossScaler(**arguments), peer.DynamicLossScaler(**arguments), script)


@settings(per_module, max_examples=20)
@given(arguments=_arguments, head=_scripts, tail=_scripts)
def test_a_pickle_or_the_attributes_of_either_go_on(
    peer: ModuleType, arguments: dict[str, Any], head: list[bool], tail: list[bool]
) -> None:
    ours, theirs = DynamicLossScaler(**arguments), peer.DynamicLossScaler(**arguments)
    walk_abreast(ours, theirs, head)
    from_ours, from_theirs = peer.DynamicLossScaler(**arguments), scaler()
    vars(from_ours).update(vars(ours))
    vars(from_theirs).update(vars(theirs))
    walk_abreast(from_theirs, copy.copy(theirs), tail)
    walk_abreast(pickle.loads(pickle.dumps(ours)), from_ours, tail)


def test_the_attributes_by_name_are_those_of_deepspeed(peer: ModuleType) -> None:
    pairs = [
        (LossScalerBase(4.0), peer.LossScalerBase(4.0)),
        (LossScaler(128.0), peer.LossScaler(128.0)),
        (scaler(), peer.DynamicLossScaler(**ARGUMENTS)),
    ]
    for ours, theirs in pairs:
        assert ours.repr() == theirs.repr()


def test_a_static_scale_stays(peer: ModuleType) -> None:
    ours, theirs = LossScaler(128.0), peer.LossScaler(128.0)
    walk_abreast(ours, theirs, [False, True, True])
    assert (LossScaler().loss_scale, ours.dynamic) == (peer.LossScaler().loss_scale, False)


# The interface


@pytest.mark.parametrize("name", NAMES)
def test_names_arguments_and_defaults_are_deepspeeds(peer: ModuleType, name: str) -> None:
    ours, theirs = getattr(preamp.deepspeed, name), getattr(peer, name)
    methods = [method for method, _ in inspect.getmembers(theirs, inspect.isfunction) if "repr" not in method]
    pairs = [(ours, theirs), *[(getattr(ours, method), getattr(theirs, method)) for method in methods]]
    assert len(pairs) > 5 or inspect.isfunction(ours)
    for mine, original in pairs:
        taken = {p.name: p.default for p in inspect.signature(mine).parameters.values()}
        expected = {p.name: p.default for p in inspect.signature(original).parameters.values()}
        assert taken == expected


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_factory_makes_what_deepspeeds_makes(peer: ModuleType, dtype: torch.dtype, dynamic: bool) -> None:
    ours, theirs = (
        make(dtype, 8.0, dynamic, ARGUMENTS) for make in (CreateLossScaler, peer.CreateLossScaler)
    )
    assert type(ours).__name__ == type(theirs).__name__
    assert vars(ours) == vars(theirs)
    assert isinstance(ours, LossScalerBase)


def test_backward_and_the_hook_scale_as_deepspeeds_do(peer: ModuleType) -> None:
    gradients = []
    for one in (scaler(), peer.DynamicLossScaler(**ARGUMENTS)):
        weight = torch.nn.Parameter(torch.tensor([0.3, -7.0]))
        loss = weight.square().sum()
        assert one.scale_loss(loss) == loss * 2.0**16
        one.backward(loss, retain_graph=True)
        one.backward(loss)
        with pytest.raises(RuntimeError, match="second time"):
            one.backward(loss)
        (hooked,) = one.scale_gradient(None, (weight.detach(),), None)
        gradients.append(torch.stack([weight.grad, hooked]))
    assert gradients[0].equal(gradients[1])
    assert scaler().scale_gradient(None, (None,), None) == (None,)  # what a module's input may have


def test_the_hook_serves_a_module() -> None:
    linear = torch.nn.Linear(2, 1)
    linear.register_full_backward_hook(scaler(init_scale=4.0).scale_gradient)
    x = torch.ones(1, 2, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad.equal(4.0 * linear.weight)


def test_without_pytorch_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import preamp.deepspeed"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("MissingExtra: torch is missing. Run: pip install 'preamp[torch]'\n")


def test_it_says_what_it_is() -> None:
    shown = repr(scaler(min_scale=0.25))
    assert shown.startswith("DynamicLossScaler(cur_scale=65536.0, dynamic=True, cur_iter=0,")
    assert "min_scale=0.25" in shown
    assert repr(LossScaler(8.0)) == "LossScaler(cur_scale=8.0, dynamic=False)"


# What cannot work


def test_deepspeed_never_backs_off_without_hysteresis(peer: ModuleType) -> None:
    """Which is why ours refuses it."""
    theirs = peer.DynamicLossScaler(**{**ARGUMENTS, "delayed_shift": 0})
    for _ in range(100):
        theirs.update_scale(True)
    assert theirs.loss_scale == 2.0**16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_scale", 0.0),
        ("init_scale", INF),
        ("init_scale", "65536"),
        ("scale_window", 0),
        ("scale_window", 2.5),
        ("min_scale", 0),
        ("min_scale", NAN),
        ("delayed_shift", 0),
        ("delayed_shift", -3),
        ("delayed_shift", True),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=f"{name}={value!r}.*Write {name}="):
        scaler(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("delayed_shift", 0, "delayed_shift=0"),
        ("scale_window", 0, "scale_window=0"),
        ("min_scale", -1.0, "min_scale=-1.0"),
        ("scale_factor", 1.0, "growth_factor=1.0"),
    ],
)
def test_attributes_that_cannot_work_are_refused_at_the_step(name: str, value: Any, said: str) -> None:
    ours = scaler()
    setattr(ours, name, value)
    before = copy.copy(vars(ours))
    with pytest.raises(PolicyError, match=rf"{said}.*Write \w+="):
        ours.update_scale(True)
    assert vars(ours) == before


def test_a_static_scale_that_cannot_work_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"cur_scale=0.*Write cur_scale="):
        CreateLossScaler(torch.half, 0, False, None)


def test_a_dynamic_scale_needs_its_arguments() -> None:
    with pytest.raises(PolicyError, match=r"Write dynamic_loss_args=\{'init_scale'"):
        CreateLossScaler(torch.half, 1.0, True, None)


@pytest.mark.parametrize("one", [torch.nn.Parameter(torch.ones(2)), torch.nn.Linear(2, 2)])
def test_what_is_no_list_of_parameters_is_refused(one: Any) -> None:
    """The rows of a tensor have no gradients, so none of them would overflow."""
    with pytest.raises(UsageError, match=rf"{type(one).__name__} is not.*Write has_overflow"):
        scaler().has_overflow(one)


def test_at_the_floor_it_says_what_to_do() -> None:
    ours = scaler(init_scale=1.0, delayed_shift=1)
    overflow = ours.has_overflow(zip("abcde", parameters(*torch.full((5, 2), INF)), strict=True))
    said = r"at a loss scale of 1, which is min_scale.*: e, d, c and 2 more\..*write.*at_min_scale=False"
    with pytest.raises(ScaleExhausted, match=said) as raised:
        ours.update_scale(overflow)
    assert (raised.value.scale, raised.value.overflows) == (1.0, 1)


# The check


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = {
    "dense": lambda x: x,
    "strided": lambda x: torch.stack([x, torch.zeros_like(x)])[0].t(),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "complex": lambda x: torch.complex(torch.zeros_like(x, dtype=torch.float64), x.double()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=10)
@given(st.lists(st.sampled_from([0.0, 1.0, -2.0, INF, -INF, NAN]), min_size=1, max_size=40))
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_it_finds_every_inf_and_nan(dtype: torch.dtype, layout: str, numbers: list[float]) -> None:
    x = LAYOUTS[layout](torch.tensor([numbers], dtype=dtype))
    found = DynamicLossScaler._has_inf_or_nan(x)
    assert (found.shape, found.dtype) == ((), torch.bool)
    assert found.item() == (not all(map(math.isfinite, numbers)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    """Though their float sum is not, which the document's check takes for an overflow."""
    big = torch.finfo(dtype).max
    for x in (torch.full((1000,), big, dtype=dtype), torch.tensor([big, -big], dtype=dtype)):
        assert not scaler()._has_inf_or_nan(x)


@pytest.mark.parametrize(
    "x",
    [
        None,
        torch.empty(0),
        torch.empty(0, 3, dtype=torch.float16),
        torch.tensor([2**62, -(2**62)]),
        torch.tensor([True]),
        torch.tensor([1, 2], dtype=torch.uint16),
        torch.zeros(2, 2).to_sparse(),
        torch.tensor([448.0]).to(torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_what_has_no_inf_has_none(x: torch.Tensor | None) -> None:
    assert not scaler()._has_inf_or_nan(x)


def test_sparse_entries_at_one_place_add_up() -> None:
    twice = torch.sparse_coo_tensor([[0, 0]], torch.tensor([3e38, 3e38]), (2,), check_invariants=True)
    assert DynamicLossScaler._has_inf_or_nan(twice)
    assert DynamicLossScaler._has_inf_or_nan(torch.tensor([NAN]).to(torch.float8_e4m3fn))


def parameters(*gradients: Any) -> list[torch.nn.Parameter]:
    """Return parameters that have these gradients; None has none."""
    made = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=getattr(gradient, "dtype", None)))
        parameter.grad = gradient
        made.append(parameter)
    return made


def test_gradients_of_all_kinds_are_checked_together() -> None:
    fine = [torch.ones(2, dtype=dtype) for dtype in FLOATS]
    fine += [torch.ones(2).to_sparse(), torch.full((2,), 3e38), torch.ones(2, dtype=torch.complex64), None]
    for check in (scaler().has_overflow, scaler().has_overflow_serial):
        assert not check(parameter for parameter in parameters(*fine))
        assert not check([])
        for position, gradient in enumerate(fine[:-1]):
            for bad in (INF, -INF, NAN):
                spoilt = [*fine[:position], gradient * bad, *fine[position + 1 :]]
                assert check(parameters(*spoilt))
    assert not LossScaler().has_overflow(parameters(torch.full((2,), INF)))  # as in DeepSpeed


def test_the_check_leaves_gradients_alone() -> None:
    gradient = torch.tensor([-0.0, 1e-40])
    (parameter,) = parameters(gradient.clone())
    held = parameter.grad
    assert not scaler().has_overflow([parameter])
    assert parameter.grad is held
    assert held.view(torch.int32).equal(gradient.view(torch.int32))


class Told(OverflowLog):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __call__(self, step: Any, hysteresis_left: int | None = None) -> None:
        self.told.append((step.index, step.scale, step.new_scale, hysteresis_left, step.culprits))


def test_every_overflow_is_told_with_its_numbers() -> None:
    ours = scaler(init_scale=8.0, min_scale=4.0)
    ours.overflow_log = log = Told()
    net = torch.nn.Linear(2, 2)
    for x in (1.0, INF, 1.0, INF):
        net.zero_grad()
        ours.backward(net(torch.full((1, 2), x)).sum())
        ours.update_scale(ours.has_overflow(net.named_parameters()))
    ours.cur_scale = 16.0
    ours.update_scale(True)
    weight = ("weight",)
    ours.cur_scale = 4.0
    with pytest.raises(ScaleExhausted):
        ours.update_scale(True)
    assert log.told == [
        (1, 8.0, 8.0, 1, weight),
        (3, 8.0, 4.0, 1, weight),
        (4, 16.0, 8.0, 1, ()),
        (5, 4.0, 4.0, None, ()),
    ]


def test_a_static_scale_is_told_of_too() -> None:
    ours = LossScaler(8.0)
    ours.overflow_log = log = Told()
    for overflow in (False, True, False, True):
        ours.update_scale(overflow)
    assert log.told == [(1, 8.0, 8.0, None, ()), (3, 8.0, 8.0, None, ())]
