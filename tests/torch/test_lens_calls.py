"""A lens that cannot record anything says so: only parts of its model are called, or nothing can be."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from preamp import UsageError
from preamp.torch import Lens

from .lens_models import X, hooks, mlp, train


class Pair(nn.Module):
    """An encoder and a head, which people call one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def by_parts(model: Pair) -> Tensor:
    return model.head(model.encoder(X))


def by_forward(model: Pair) -> Tensor:
    return model.forward(X)


CALLS: dict[str, tuple[Callable[[Any], Tensor], str]] = {
    "parts": (
        by_parts,
        r"the Pair itself is not called, but parts of it are: encoder, head\. .*Lens\(model\.encoder\)",
    ),
    "forward": (by_forward, r"parts of it are: encoder, head\. Call model\(\.\.\.\), not its forward"),
    "one part": (lambda model: model.encoder(X), r"parts of it are: encoder\. "),
    "deep inside": (
        lambda model: model.encoder[0](X),
        r"encoder\.0\. .*Lens\(model\.get_submodule\('encoder\.0'\)\)",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_whose_parts_are_trained_but_that_is_not_called_is_warned_of_once(name: str) -> None:
    call, why = CALLS[name]
    model = Pair()
    lens = Lens(model)
    call(model).sum().backward()
    with pytest.warns(UserWarning, match=why) as told:
        call(model).sum().backward()
    assert [one.filename for one in told] == [__file__]
    call(model).sum().backward()
    assert hooks(model) == 1
    assert lens.last is None
    lens.close()
    assert hooks(model) == 0


@pytest.mark.parametrize("ending", ["last", "close"])
def test_one_pass_is_enough_where_the_lens_is_asked(ending: str) -> None:
    model = Pair()
    lens = Lens(model)
    by_parts(model).sum().backward()
    with pytest.warns(UserWarning, match="encoder, head"):
        _ = lens.close() if ending == "close" else lens.last
    lens.close()
    assert hooks(model) == 0


def test_the_module_inside_a_wrapper_is_named_as_such() -> None:
    model = mlp()
    with Lens(torch.compile(model, backend="eager")):
        model(X).sum().backward()
        with pytest.warns(
            UserWarning, match="model is a OptimizedModule, which is not called, but the module inside"
        ):
            model(X)


def test_what_is_not_training_is_not_warned_of() -> None:
    model = Pair()
    with warnings.catch_warnings(), Lens(model, every=1) as lens:
        warnings.simplefilter("error")
        for _ in range(3):
            by_parts(model)  # without a backward pass
            with torch.no_grad():
                by_parts(model)
        assert lens.last is None
        train(model, 2)  # its parts are called by itself
        by_parts(model).sum().backward()
        by_parts(model).sum().backward()
        assert lens.last is not None


def test_the_first_call_of_the_model_takes_the_hooks_off_its_parts() -> None:
    model = Pair()
    with Lens(model, every=2):
        assert hooks(model) == 1 + 4
        with torch.no_grad():
            model(X)
        assert hooks(model) == 1
        train(model, 2)
        assert hooks(model) == 1


def test_copies_of_a_model_that_waits_for_its_first_call_have_no_lens() -> None:
    model = Pair()
    file = io.BytesIO()
    with Lens(model):
        torch.save(model, file)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert b"preamp" not in file.getvalue()
    file.seek(0)
    for twin in (*twins, torch.load(file, weights_only=False)):
        for _ in range(3):
            by_parts(twin).sum().backward()
        assert torch.equal(twin(X), model(X))


@pytest.mark.parametrize("kind", [nn.ModuleDict, nn.ModuleList, nn.ParameterList, nn.Module])
def test_what_has_no_forward_is_refused(kind: Any) -> None:
    model = (
        kind({"body": mlp()}) if kind is nn.ModuleDict else kind([mlp()]) if kind is nn.ModuleList else kind()
    )
    with pytest.raises(
        UsageError, match=f"model is a {kind.__name__}, which has no forward and cannot be called"
    ):
        Lens(model)
    if len(list(model.children())):
        with pytest.raises(UsageError, match=r"Write Lens\(model\.get_submodule\('(body|0)'\)\)"):
            Lens(model)
    assert hooks(model) == 0


MOVES = ["model", "parts", "forward", "no_grad", "no backward", "last"]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from(MOVES), max_size=7))
def test_a_warning_comes_exactly_when_parts_were_trained_before_the_first_call(moves: list[str]) -> None:
    model, trained, called, due = Pair(), False, False, False
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lens = Lens(model)
        for move in [*moves, "last"]:
            if move in ("parts", "forward", "no backward", "last"):
                due = due or (trained and not called)
            if move == "model":
                model(X).sum().backward()
                called = True
            elif move == "no_grad":
                with torch.no_grad():
                    by_parts(model)
            elif move == "last":
                assert (lens.last is not None) == called
            else:
                out = by_forward(model) if move == "forward" else by_parts(model)
                if move != "no backward":
                    out.sum().backward()
                    trained = trained or not called
        lens.close()
    assert len(told) == due
    assert hooks(model) == 0
