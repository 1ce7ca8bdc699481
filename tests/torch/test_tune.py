"""Tune: what it keeps in float32, and that a step with its table loses nothing that it need not lose."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp import casting
from preamp.autocasting.tables import Casting
from preamp.errors import PreampError, UsageError
from preamp.torch import autocast, blame, tune


class Attention(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.qkv, self.out, self.gain = nn.Linear(32, 96), nn.Linear(32, 32), gain

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((self.gain * q @ k.transpose(-1, -2)).softmax(-1) @ v)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, gain: float = 0.2, amount: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Attention(gain if at == 1 else 0.2) for at in range(3)])
        self.up, self.down, self.amount = nn.Linear(32, 128), nn.Linear(128, 8), amount
        self.x, self.y = torch.randn(8, 12, 32), torch.randint(8, (96,))

    def forward(self) -> Tensor:
        x = self.x
        for block in self.blocks:
            x = block(x)
        x = self.down(self.amount * F.relu(self.up(x)).float()).float() / self.amount
        return F.cross_entropy(x.float().flatten(0, 1), self.y)


def test_a_healthy_step_needs_nothing_and_one_rehearsal() -> None:
    model = Model()
    found = tune(model, model=model, dtype=torch.float16)
    assert found.solved
    assert (found.kept, found.rehearsals, found.casting) == ([], 1, casting.DEFAULT)
    assert found.low_share == 1.0


def test_an_overflowing_product_is_kept_in_float32_and_nothing_else() -> None:
    model = Model(amount=1e6)
    found = tune(model, model=model, dtype=torch.float16)
    assert found.solved
    assert found.casting == casting.DEFAULT.module("down", "float32")
    assert 0.8 < found.low_share < 1.0
    assert "overflowed" in str(found)
    assert math.isinf(found.before.gradient_error)
    with autocast("cpu", torch.float16, casting=found.casting, model=model, emulate=True):
        assert model().isfinite()


def test_large_logits_keep_what_makes_them_and_the_table_survives_a_file() -> None:
    dtype = torch.bfloat16
    model = Model(gain=30.0)
    found = tune(model, model=model, dtype=dtype)
    assert found.solved
    names = {edit.name for each in found.kept for edit in each.edits}
    assert names
    assert all(name.startswith(("blocks.0", "blocks.1")) for name in names)  # before the logits, or they
    assert any(name.startswith("blocks.1") for name in names)
    assert found.low_share > 0.6
    assert found.rehearsals <= 20
    read = Casting.from_dict(found.to_dict())
    again = blame(model, model=model, dtype=dtype, casting=read)
    assert found.after.gradient_error == again.gradient_error < found.before.gradient_error / 2


def test_a_wrong_edit_of_an_operator_is_undone_by_a_rule_for_the_operator() -> None:
    model = Model(gain=30.0)
    wrong = casting.DEFAULT.lower("softmax", "cross_entropy")
    found = tune(model, model=model, dtype=torch.bfloat16, casting=wrong.module("blocks.1", "float32"))
    assert found.solved
    assert {each.edits[0].of for each in found.kept} <= {"operators"}
    assert (
        found.low_share
        == blame(model, model=model, casting=casting.DEFAULT.module("blocks.1", "float32")).low_flops
        / found.after.flops
    )


def test_without_a_model_rules_are_of_operators() -> None:
    model = Model(gain=30.0)
    found = tune(model, dtype=torch.bfloat16)
    assert all(edit.of == "operators" for each in found.kept for edit in each.edits)


def test_what_the_program_casts_itself_no_table_helps() -> None:
    model = nn.Linear(8, 4)
    x = torch.randn(16, 8)

    def loss() -> Tensor:
        return ((model(x).float() + 100).bfloat16().float() - 100).square().mean()

    found = tune(loss, model=model, dtype=torch.bfloat16)
    assert not found.solved
    assert found.kept == []  # what does not help is not kept
    text = str(found).replace("\n", " ")
    assert "No table that was tried" in text
    assert "bfloat16 outside of modules" in text or "bfloat16 at test_tune.py" in text
    assert "program itself casts" in text


def test_a_loss_that_is_not_finite_in_float32_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="The loss is nan in float32"):
        tune(lambda: model(torch.full((2, 4), math.nan)).sum(), model=model)


def test_a_target_is_met_with_as_few_products_as_it_takes() -> None:
    model = Model()
    error = blame(model, model=model, dtype=torch.bfloat16).gradient_error
    shares = []
    for part in (1.1, 0.5):
        found = tune(model, model=model, dtype=torch.bfloat16, target=part * error)
        assert found.solved
        assert found.after.gradient_error <= part * error
        shares.append(found.low_share)
    assert shares[0] == 1.0 > shares[1] > 0.0


def test_the_noise_between_seeds_is_a_target() -> None:
    model = Model(gain=30.0)
    with pytest.raises(UsageError, match="draws no random numbers"):
        tune(model, model=model, target="seeds")

    def loss() -> Tensor:
        return model() + 0 * F.dropout(model.x).sum() + F.dropout(model.up.weight).square().sum() / 100

    before = torch.get_rng_state()
    found = tune(loss, model=model, target="seeds")
    assert found.target is not None
    assert 0.01 < found.target < 10
    assert torch.equal(torch.get_rng_state(), before)


def test_the_number_of_rehearsals_is_kept() -> None:
    model = Model(gain=30.0)
    for most in (1, 2):
        assert tune(model, model=model, dtype=torch.float16, rehearsals=most).rehearsals <= most
    for wrong in ({"rehearsals": 0}, {"target": -1.0}, {"target": "seed"}):
        with pytest.raises(PreampError):
            tune(model, model=model, **wrong)  # type: ignore[arg-type]


def test_every_line_is_at_most_80_columns_wide() -> None:
    text = str(tune(Model(gain=30.0, amount=1e6), dtype=torch.float16))
    assert max(map(len, text.splitlines())) <= 80
