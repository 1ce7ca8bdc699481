"""Where `torch.amp` is wrong, be right: each test shows what the original does and what ours does instead."""

import itertools
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch

from preamp import PolicyError
from preamp.torch import GradScaler
from tests.combinations import in_one_test

from .pairs import INF, NAN, make, ours, state_of, theirs, weights
from .pairs import give as give_gradient

SGDS = ["SGD", "SGD fused"]
kinds = pytest.mark.parametrize("kind", SGDS)
Pair = namedtuple("Pair", "first second")


@kinds
@in_one_test(
    scale=[0.0, 1e-40, INF, NAN],
    limits=[{}, {"max_norm": 1.0}, {"max_value": 1.0}],
    gradient=[0.0, 1e-45, 1.0],
    by_hand=[False, True],
)
def test_a_scale_that_ruins_gradients_reaches_no_parameter(kind, scale, limits, gradient, by_hand):
    (weight,) = weights()
    scaler = ours()
    give_gradient(scaler, weight, gradient)
    scaler._scale.fill_(scale)
    optimizer = make(kind, [weight])
    try:
        if by_hand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer, **limits)
    except PolicyError:
        assert scale != 1e-40
    assert torch.equal(weight, torch.zeros(3))


@pytest.mark.parametrize("scale", [0.0, 1e-40, INF, NAN])
@kinds
def test_nor_does_it_where_nothing_is_read(kind, scale):
    (weight,) = weights()
    scaler = ours(capturable=True)
    give_gradient(scaler, weight, 1.0)
    scaler._scale.fill_(scale)
    scaler.step(make(kind, [weight]))
    assert torch.equal(weight, torch.zeros(3))


WAYS = ["step", "unscale_", "max_norm", "max_value", "capturable"]
LARGEST = [(torch.float32, 3e38), (torch.float16, 6e4)]
UNSEEN = ("SGD fused", "capturable", LARGEST[1])  # the kernel divides in float32: nothing overflows there


@pytest.mark.parametrize(
    ("kind", "way", "largest"), [one for one in itertools.product(SGDS, WAYS, LARGEST) if one != UNSEEN]
)
def test_an_overflow_that_unscaling_makes_is_caught(kind, way, largest):
    dtype, gradient = largest
    (weight,) = weights(dtype=dtype)
    optimizer = make(kind, [weight], lr=1e-3)
    scaler = ours(init_scale=0.25, capturable=way == "capturable")
    give_gradient(scaler, weight, gradient)
    if way == "unscale_":
        scaler.unscale_(optimizer)
    scaler.step(optimizer, **({way: 1.0} if way.startswith("max") else {}))
    scaler.update()
    assert scaler.last_step.skipped
    assert torch.equal(weight, torch.zeros_like(weight))
    assert scaler.get_scale() == 0.125


def test_a_positional_closure_is_not_run_on_scaled_gradients():
    moved = []
    for scaler in (ours(), theirs()):
        (weight,) = weights()
        optimizer = make("SGD", [weight], lr=1.0)
        give_gradient(scaler, weight, 0.0)  # the original wants one before

        def closure(scaler=scaler, weight=weight, optimizer=optimizer):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()

        scaler.step(optimizer, closure)
        moved.append(weight[0].item())
    assert moved == [-1.0, -1024.0]


def test_a_disabled_scaler_answers_what_it_was_told():
    scaler = GradScaler("cpu", 8.0, 4.0, 0.25, 7, enabled=False)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        4.0,
        0.25,
        7,
    )
    scaler.set_growth_factor(2.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(9)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        2.0,
        0.5,
        9,
    )
    assert scaler.get_scale() == 1.0
    with pytest.raises(AttributeError):
        theirs(enabled=False).get_growth_factor()


@kinds
def test_a_skipped_step_leaves_unscaled_gradients_fused_or_not(kind):
    left = []
    for scaler in (ours(), theirs()):
        a, b = weights(2)
        give_gradient(scaler, a, 2048.0)
        give_gradient(scaler, b, INF)
        scaler.step(make(kind, [a, b]))
        left.append(a.grad[0].item())
    assert left == [2.0, 2048.0 if kind == "SGD fused" else 2.0]


def skipped_first_step(scaler, kind: str) -> list[str]:
    """Return which hooks ran in a skipped first step that a schedule follows."""
    (weight,) = weights()
    optimizer, ran = make(kind, [weight]), []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    give_gradient(scaler, weight, INF)
    scaler.step(optimizer)
    schedule.step()
    return ran


def test_a_fused_skip_is_told_to_schedules_and_hooks_as_an_unfused_one():
    for scaler, kind in ((ours(), "SGD"), (ours(), "SGD fused"), (theirs(), "SGD")):
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            assert skipped_first_step(scaler, kind) == []
    assert skipped_first_step(theirs(), "SGD fused") == ["before", "after"]  # a warning is an error here


@pytest.mark.usefixtures("reads_cost")
@pytest.mark.parametrize("capturable", [False, True])
def test_a_first_step_that_is_skipped_leaves_no_unwritten_memory(capturable):
    """PyTorch's fused SGD allocates its first momentum and does not fill it if it skips."""
    torch.use_deterministic_algorithms(True)  # what nobody writes is NaN
    try:
        states = []
        for scaler in (ours(capturable=capturable), theirs()):
            (weight,) = weights()
            optimizer = make("SGD fused", [weight], momentum=0.9)
            for gradient in (INF, 1024.0):
                give_gradient(scaler, weight, gradient)
                scaler.step(optimizer)
                scaler.update()
            states.append(weight.isfinite().all().item())
    finally:
        torch.use_deterministic_algorithms(False)
    assert states == [True, False]


class Outputs(OrderedDict):
    """As Hugging Face's models return."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.loss = self.get("loss")


def test_what_models_return_scales_and_keeps_its_type():
    one = torch.ones(())
    nested = {"a": [one, (one, one)], "b": Pair(one, Outputs(loss=one))}
    scaled = ours().scale(nested)
    assert scaled == {"a": [1024.0, (1024.0, 1024.0)], "b": (1024.0, {"loss": 1024.0})}
    assert isinstance(scaled["b"], Pair)
    assert isinstance(scaled["b"].second, Outputs)
    assert nested["b"].second["loss"] == 1.0  # the outputs themselves stay
    assert list(ours().scale(x for x in (one, one))) == [1024.0, 1024.0]
    assert list(ours().scale({1: one}.values())) == [1024.0]


@pytest.mark.parametrize("wrong", ["loss", b"loss", 3.0, None, [1.0], {"loss": "x"}])
def test_what_holds_no_tensor_is_refused(wrong):
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        ours().scale(wrong)


@pytest.mark.parametrize("kind", ["SGD", "SGD fused", "AdamW"])
@in_one_test(limits=[{}, {"max_norm": 1.0}], capturable=[False, True])
def test_an_optimizer_without_gradients_is_named(kind, limits, capturable):
    first, second, frozen = weights(3)
    frozen.requires_grad_(False)
    messages = []
    for scaler, options in ((theirs(), {}), (ours(capturable=capturable), limits)):
        optimizer = make(kind if options is limits else kind.removesuffix(" fused"), [second, frozen])
        scaler.scale(first.sum()).backward()
        with pytest.raises(AssertionError) as error:
            scaler.step(optimizer, **options)
        messages.append(str(error.value))
    assert messages[1].startswith(messages[0])
    name = kind.split()[0]
    assert f"All 2 parameters of {name} have grad None, 1 of them have requires_grad=False" in messages[1]
    assert "Leave out scaler.step" in messages[1]


@kinds
def test_unscaling_before_backward_is_told(kind):
    (weight,) = weights()
    optimizer, scaler = make(kind, [weight]), ours()
    loss = scaler.scale(weight.sum())
    scaler.unscale_(optimizer)  # silent, as in the original
    loss.backward()
    with pytest.raises(AssertionError, match=r"No inf checks.*unscale_\(\) came before backward"):
        scaler.step(optimizer)
    assert torch.equal(weight, torch.zeros(3))


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


FUSED = [("SGD fused", dtype, "dense") for dtype in DTYPES if not dtype.is_complex]
UNFUSED = list(itertools.product(["SGD"], DTYPES, ["dense", "coalesced", "uncoalesced"]))


@pytest.mark.parametrize(("kind", "dtype", "layout"), FUSED + UNFUSED)
@in_one_test(way=["step", "unscale_", "max_norm", "capturable"])
def test_gradients_of_every_dtype_and_layout_unscale_exactly(dtype, layout, way, kind):
    (weight,) = weights(dtype=dtype)
    numbers = torch.tensor([1.0, 0.0, -3.0], dtype=dtype) * (1 + 2j if dtype.is_complex else 1)
    optimizer, scaler = make(kind, [weight], lr=1.0), ours(capturable=way == "capturable")
    scaled = numbers * 1024
    if layout != "dense":
        indices = [[0, 2, 0, 2]] if layout == "uncoalesced" else [[0, 2]]
        halves = (scaled[[0, 2, 0, 2]] / 2) if layout == "uncoalesced" else scaled[[0, 2]]
        scaled = torch.sparse_coo_tensor(indices, halves, (3,), check_invariants=True)
    give_gradient(scaler, weight, scaled)
    if way == "unscale_":
        scaler.unscale_(optimizer)
    scaler.step(optimizer, **({"max_norm": 1e3} if way == "max_norm" else {}))
    assert torch.equal(weight, -numbers)
    assert torch.equal(weight.grad.to_dense() if layout != "dense" else weight.grad, numbers)


def test_of_two_entries_of_a_sparse_gradient_the_sum_is_checked():
    (weight,) = weights()
    scaler = ours()
    give_gradient(
        scaler, weight, torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (3,), check_invariants=True)
    )
    scaler.step(make("SGD", [weight]))
    assert scaler.last_step.skipped


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_a_scaled_half_loss_does_not_overflow(shape):
    loss = torch.full(shape, 3.0, dtype=torch.float16, requires_grad=True)
    scaled = ours(init_scale=2.0**16).scale(loss)
    assert scaled.dtype is torch.float32
    assert torch.equal(scaled, torch.full(shape, 3.0 * 2**16))
    scaled.sum().backward()
    assert loss.grad.dtype is torch.float16
    assert theirs(init_scale=2.0**16).scale(loss).isfinite().all() == (shape == ())


@kinds
@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}])
def test_default_dtypes_and_devices_of_the_user_are_not_taken(kind, limits):
    (weight,) = weights()
    scaler, optimizer = ours(), make(kind, [weight], lr=1.0)
    give_gradient(scaler, weight, 1024.0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            scaler.step(optimizer, **limits)
            scaler.update()
    finally:
        torch.set_default_dtype(torch.float32)
    assert weight[0].item() == pytest.approx(-1.0 if not limits else -(3**-0.5))


@kinds
@pytest.mark.usefixtures("reads_cost")
@pytest.mark.parametrize("capturable", [False, True])
def test_no_gradient_outlives_zero_grad(kind, capturable):
    (weight,) = weights()
    scaler, optimizer = ours(capturable=capturable), make(kind, [weight])
    scaler.scale(weight.sum() * NAN).backward()
    gradient = weakref.ref(weight.grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert gradient() is None
    assert scaler.last_step.culprits == ("param_groups[0]['params'][0]",)  # although it is gone


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}, {"max_value": 1.0}])
@kinds
def test_a_gradient_that_is_part_of_a_graph_gets_no_further_history(kind, limits):
    """`backward(create_graph=True)`, for penalties on gradients."""
    (weight,) = weights()
    scaler, optimizer = ours(), make(kind, [weight])
    scaler.scale((weight - 1.0).square().sum()).backward(create_graph=True)
    node = weight.grad.grad_fn
    scaler.step(optimizer, **limits)
    assert weight.grad.grad_fn is node
    assert state_of(optimizer) == {}
