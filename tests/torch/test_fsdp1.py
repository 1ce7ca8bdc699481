"""A scaler that does not ask other ranks would clip each shard of FSDP's first version by its own norm."""

import pytest
import torch
from torch.distributed.fsdp import FlatParameter

from preamp.torch import GradScaler, ShardedGradScaler

from .pairs import give, make
from .switches import ranks


def flat():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter._is_flat_param = True
    assert isinstance(parameter, FlatParameter)  # as FSDP itself tells
    return parameter


@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}])
def test_a_plain_scaler_warns_of_its_parameters_on_several_ranks_once(limits):
    weight = flat()
    optimizer, plain = make("SGD", [weight]), GradScaler("cpu")
    give(plain, weight, 1.0)
    with ranks(2):
        with pytest.warns(UserWarning, match=r"FSDP's first version.*Write ShardedGradScaler\(\)") as told:
            plain.step(optimizer, **limits)
        assert [warning.filename for warning in told] == [__file__]
        plain.update()
        give(plain, weight, 1.0)
        plain.step(optimizer, **limits)  # warnings are errors here


@pytest.mark.parametrize("asks", [lambda: GradScaler("cpu", reduce=lambda x: x), lambda: GradScaler("cpu")])
def test_a_scaler_that_asks_the_others_and_one_that_is_alone_take_them(asks):
    able = asks()
    weight = flat()
    optimizer = make("SGD", [weight])
    give(able, weight, 1.0)
    with ranks(2 if able._meter.agreement.needed(()) else 1):
        able.step(optimizer, max_norm=1.0)
    able.update()
    assert not able.last_step.skipped
    assert isinstance(ShardedGradScaler("cpu"), GradScaler)
