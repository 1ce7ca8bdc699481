"""Where an edited table is in force: in its region and its thread, and nowhere afterwards."""

from contextlib import ExitStack

import pytest
import torch

from preamp import casting
from preamp.autocasting.tables import RULES
from preamp.torch import autocast

from .regions import BRAIN, FULL, HALF, all_same, behaviour, kernels, numbers, same

EDIT = casting.DEFAULT
A = numbers(4, 4)


def test_regions_inherit_a_table_replace_it_or_go_back_to_the_builtin():
    one, other = EDIT.float32("mm").lower("softmax"), EDIT.untouched("matmul")
    with autocast("cpu", HALF, casting=one):
        assert behaviour() == (FULL, HALF, HALF)
        with autocast("cpu", BRAIN):
            assert behaviour() == (FULL, BRAIN, BRAIN)
            with autocast("cpu", casting=other):
                assert behaviour() == (BRAIN, FULL, FULL)
            assert behaviour() == (FULL, BRAIN, BRAIN)
        with torch.autocast("cpu", BRAIN):
            assert behaviour() == (FULL, BRAIN, BRAIN)
        with autocast("cpu", casting=casting.DEFAULT):
            assert behaviour() == (HALF, FULL, HALF)
            with autocast("cpu"):
                assert behaviour() == (HALF, FULL, HALF)
        with autocast("cpu", enabled=False):
            assert behaviour() == (FULL, FULL, FULL)
            with autocast("cpu", BRAIN):
                assert behaviour() == (FULL, BRAIN, BRAIN)
        with torch.autocast("cpu", enabled=False):
            assert behaviour() == (FULL, FULL, FULL)
        with autocast("cpu", enabled=False, casting=other):
            assert behaviour() == (FULL, FULL, FULL)
        assert behaviour() == (FULL, HALF, HALF)
    with torch.autocast("cpu", HALF):
        with autocast("cpu", casting=one):
            assert behaviour() == (FULL, HALF, HALF)
        assert behaviour() == (HALF, FULL, HALF)
    assert behaviour() == (FULL, FULL, FULL)


def rounded(*tensors, low=HALF):
    return [tensor.to(low).float() for tensor in tensors]


def rehearsed(low=HALF):
    """Return a product in float32 of rounded numbers, stored in low precision."""
    return torch.mm(*rounded(A, A, low=low)).to(low)


def test_a_rehearsal_is_inherited_as_tables_are():
    plain, emulated = A @ A, rehearsed()
    with autocast("cpu", HALF, casting=EDIT.float32("matmul")), autocast("cpu", emulate=True):
        assert all_same([torch.mm(A, A), A @ A], [emulated, plain])
        with autocast("cpu"), torch.autocast("cpu"):
            assert all_same([torch.mm(A, A), A @ A], [emulated, plain])
        with autocast("cpu", casting=EDIT.float32("mm")):
            assert all_same([torch.mm(A, A), A @ A], [plain, emulated])
        with autocast("cpu", casting=casting.DEFAULT):
            assert all_same([torch.mm(A, A), A @ A], [emulated, emulated])
        with autocast("cpu", enabled=False):
            assert all_same([torch.mm(A, A), A @ A], [plain, plain])
    assert all_same([torch.mm(A, A), A @ A], [plain, plain])


LOWS = [HALF, BRAIN]


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("around", LOWS)
def test_a_rehearsal_is_in_the_precision_of_the_innermost_region(around, low):
    outer, inner = map(rehearsed, (around, low))
    with autocast("cpu", around, emulate=True):
        with autocast("cpu", low, emulate=True):
            assert same(torch.mm(A, A), inner)
            with autocast("cpu", casting=EDIT.lower("add")), autocast("cpu"):
                assert same(torch.mm(A, A), inner)
        assert same(torch.mm(A, A), outer)
        with autocast("cpu", low):
            assert same(torch.mm(A, A), inner)


def test_a_rehearsal_rounds_what_is_given_by_name():
    with autocast("cpu", HALF, emulate=True):
        assert same(torch.mm(input=A, mat2=A), rehearsed())


def test_a_region_of_another_device_type_is_not_inherited_from():
    with autocast("xpu", casting=EDIT.float32("mm")), autocast("cpu", HALF, emulate=True):
        assert same(torch.mm(A, A), rehearsed())
    with autocast("xpu", emulate=True), autocast("cpu", HALF, casting=EDIT.float32("exp")):
        assert same(torch.mm(A, A), torch.mm(A.half(), A.half()))
        assert torch.softmax(A.half(), -1).dtype == HALF  # which CUDA's table has in float32


def modes():
    return torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("rule", RULES)
def test_no_mode_is_left_after_the_last_region_and_no_kernel_is_ever_registered(rule):
    before = kernels()
    names = ("mm", "softmax", "matmul", "exp", "cat")
    one, other = (autocast("cpu", casting=getattr(EDIT, rule)(*some)) for some in (names[:3], names))
    with one:
        assert len(modes()) == 1
        with pytest.raises(KeyError), other:
            raise KeyError
    assert not modes()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(one)
        second.enter_context(other)
        first.close()
        assert len(modes()) == 1
    assert (modes(), kernels()) == ([], before)
    assert behaviour() == (FULL, FULL, FULL)
    with torch.autocast("cpu", HALF):
        assert behaviour() == (HALF, FULL, HALF)


def test_regions_left_in_any_order_leave_the_modes_of_others_in_place():
    class Theirs(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, theirs, later = [], Theirs(), Theirs()
    one, other = autocast("cpu", casting=EDIT.float32("mm")), autocast("cpu", casting=EDIT.lower("softmax"))
    with theirs:
        one.__enter__()
        with later:
            other.__enter__()
            assert torch.mm(A, A).dtype == torch.bfloat16
            one.__exit__(None, None, None)
            assert torch.mm(A, A).dtype == torch.bfloat16
            other.__exit__(None, None, None)
            seen.clear()
            assert torch.mm(A, A).dtype == FULL
            assert seen.count(torch.mm) == 2
            assert modes() == [theirs, later]
