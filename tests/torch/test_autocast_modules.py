"""Modules in a region beside PyTorch's own autocast, and rehearsals beside real low precision."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from preamp import casting
from preamp.torch import autocast
from tests.combinations import in_one_test

from .operators import CALLS, Call, Input, ints, p, sign, x
from .regions import COMPILED, all_same, attempt, run_in, without_onednn

FULL, HALVES = torch.float32, [torch.float16, torch.bfloat16]
(ONEDNN_LSTM,) = (call for call in CALLS if call.name == "mkldnn_rnn_layer")
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)


class Case:
    """A module, what it is called with, and what it returns in a region.

    `results` has a word for each tensor: "lower" comes from an operator that runs in low precision, "low" was
    made of such by other operators, "float32" always is, and "as given" has the precision of the inputs.
    """

    def __init__(self, name: str, results: str, make: Callable[[], Any], *inputs: Any) -> None:
        self.name, self.results, self.make, self.inputs = name, results.split(", "), make, inputs

    def __repr__(self) -> str:
        return self.name


def each(results: str, inputs: list[Any], **makers: Callable[[], Any]) -> list[Case]:
    return [Case(name, results, make, *inputs) for name, make in makers.items()]


def positive(module: nn.Module) -> nn.Module:
    """Return a module with positive weights, so that no relu is so near its bend that rounding decides."""
    for parameter in module.parameters():
        parameter.data.abs_()
    return module


class NativeLSTM(nn.LSTM):
    """An LSTM that every CPU runs in low precision; oneDNN's runs on those with instructions for it only."""

    def forward(self, *args: Any) -> Any:
        with without_onednn():
            return super().forward(*args)


WIDE, TOKENS, SEQUENCE, TABLE, LABELS = x(4, 6), x(2, 4, 8), x(3, 2, 5), x(4, 3), ints(0, 2, 1, 1)
with warnings.catch_warnings(
    action="ignore"
):  # of the low precision beside float32, which PyTorch 2.6 gives out
    RMS_NORM = "as given" if nn.RMSNorm(2)(torch.ones(2).half()).dtype is torch.float16 else "float32"
NETWORKS = [
    *each("lower", [WIDE], Linear=lambda: nn.Linear(6, 5), PReLU=nn.PReLU),
    Case("Conv1d", "lower", lambda: nn.Conv1d(2, 4, 3, padding="same"), x(2, 2, 7)),
    Case("Conv2d", "lower", lambda: nn.Conv2d(2, 4, 3, stride=2, groups=2), x(2, 2, 7, 7)),
    Case("Conv3d", "lower", lambda: nn.Conv3d(2, 3, 2, padding=1, padding_mode="circular"), x(1, 2, 4, 4, 4)),
    Case("ConvTranspose1d", "lower", lambda: nn.ConvTranspose1d(2, 3, 3), x(2, 2, 5)),
    Case("ConvTranspose2d", "lower", lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), x(2, 2, 4, 4)),
    Case("ConvTranspose3d", "lower", lambda: nn.ConvTranspose3d(2, 3, 2), x(1, 2, 3, 3, 3)),
    Case("LSTM", "lower, lower, lower", lambda: nn.LSTM(5, 4, 2, bidirectional=True), SEQUENCE),
    Case("NativeLSTM", "as given, as given, as given", lambda: NativeLSTM(5, 4, 2), SEQUENCE),
    Case("GRU", "as given, as given", lambda: nn.GRU(5, 4, 2), SEQUENCE),
    Case("RNN", "low, low", lambda: nn.RNN(5, 4, 2), SEQUENCE),
    Case("RNN of relu", "low, low", lambda: positive(nn.RNN(5, 4, 2, nonlinearity="relu")), p(3, 2, 5)),
    Case("LSTMCell", "as given, as given", lambda: nn.LSTMCell(6, 4), WIDE),
    Case("GRUCell", "as given", lambda: nn.GRUCell(6, 4), WIDE),
    Case("RNNCell", "low", lambda: nn.RNNCell(6, 4), WIDE),
    Case("scaled_dot_product_attention", "lower", lambda: F.scaled_dot_product_attention, *[TOKENS] * 3),
    Case("MultiheadAttention", "lower, low", lambda: nn.MultiheadAttention(8, 2), *[TOKENS] * 3),
    *each(
        "as given",
        [TOKENS],
        TransformerEncoderLayer=lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        LayerNorm=lambda: nn.LayerNorm(8),
        GroupNorm=lambda: nn.GroupNorm(2, 4),
        InstanceNorm1d=lambda: nn.InstanceNorm1d(4, affine=True),
        BatchNorm1d=lambda: nn.BatchNorm1d(4),
    ),
    Case("RMSNorm", RMS_NORM, lambda: nn.RMSNorm(8), TOKENS),
    Case(
        "TransformerDecoderLayer",
        "as given",
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0),
        *[TOKENS] * 2,
    ),
    Case("BatchNorm2d", "lower", lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 2)), x(3, 2, 4, 4)),
    Case("Embedding", "lower", lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)), ints(0, 4, 2)),
]
LOSSES = [
    *each(
        "float32",
        [TABLE] * 2,
        L1Loss=nn.L1Loss,
        MSELoss=nn.MSELoss,
        SmoothL1=nn.SmoothL1Loss,
        Huber=nn.HuberLoss,
    ),
    *each("float32", [TABLE, sign(4, 3)], SoftMargin=nn.SoftMarginLoss, HingeEmbedding=nn.HingeEmbeddingLoss),
    *each("float32", [TABLE, p(4, 3)], PoissonNLL=nn.PoissonNLLLoss, BCEWithLogits=nn.BCEWithLogitsLoss),
    Case("KLDiv", "float32", lambda: nn.KLDivLoss(reduction="batchmean"), TABLE, p(4, 3)),
    Case("BCE", "float32", nn.BCELoss, p(4, 3), p(4, 3)),
    *each(
        "float32",
        [TABLE, LABELS],
        CrossEntropy=nn.CrossEntropyLoss,
        label_smoothing=lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
        NLL=nn.NLLLoss,
        MultiMargin=nn.MultiMarginLoss,
    ),
    Case("CrossEntropy of probabilities", "float32", nn.CrossEntropyLoss, TABLE, p(4, 3)),
    Case("MultiLabelMargin", "float32", nn.MultiLabelMarginLoss, x(2, 3), ints([0, 2, -1], [1, -1, -1])),
    Case("CosineEmbedding", "float32", nn.CosineEmbeddingLoss, TABLE, TABLE, ints(1, -1, 1, -1)),
    Case("MarginRanking", "float32", lambda: nn.MarginRankingLoss(1.0), x(4), x(4), sign(4)),
    Case("TripletMargin", "float32", nn.TripletMarginLoss, TABLE, TABLE, TABLE),
    Case("CTC", "float32", nn.CTCLoss, x(5, 2, 4), ints([1, 2], [2, 3]), (5, 5), (2, 2)),
    Case("GaussianNLL", "as given", nn.GaussianNLLLoss, TABLE, TABLE, p(4, 3)),
    Case("MultiLabelSoftMargin", "as given", nn.MultiLabelSoftMarginLoss, TABLE, p(4, 3)),
    Case("TripletMarginWithDistance", "as given", nn.TripletMarginWithDistanceLoss, TABLE, TABLE, TABLE),
]
cases = pytest.mark.parametrize("case", [*NETWORKS, *LOSSES], ids=repr)


def numbers(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def used(
    case: Case, region: Any, inputs_in: torch.dtype = FULL, way: str = "eager", backend: str = "aot_eager"
) -> tuple[list[Tensor], ...]:
    """Return results, gradients of inputs, gradients of weights, and buffers. Backward runs outside.

    Args:
        case: what runs.
        region: what it runs in, or for other ways than "eager" what makes that.
        inputs_in: the dtype of the inputs.
        way: as in `run_in`.
        backend: the compiler's.
    """
    torch.manual_seed(0)
    module: Any = case.make()
    parts = module if isinstance(module, nn.Module) else nn.Module()
    inputs = [
        one.make(n).to(inputs_in) if isinstance(one, Input) else one for n, one in enumerate(case.inputs)
    ]
    leaves = [
        tensor
        for tensor, one in zip(inputs, case.inputs, strict=True)
        if getattr(one, "kind", "") in ("x", "p")
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    make = region if way != "eager" else lambda: region
    results = tree_leaves(run_in(way, make, module, backend)(*inputs))
    sum((one.float() * numbers(one.shape, 9)).sum() for one in results).backward()
    gradients = (
        [leaf.grad for leaf in those if leaf.grad is not None] for those in (leaves, parts.parameters())
    )
    return results, *gradients, [one for one in parts.buffers() if one.is_floating_point()]


def real(run: Callable[..., Any], case: Any, dtype: torch.dtype, *others: Any) -> Any:
    """Return what PyTorch's autocast gives; with its own kernels where oneDNN has none for this CPU."""
    results = attempt(run, case, torch.autocast("cpu", dtype=dtype), *others)
    if isinstance(results, str):
        with without_onednn():
            return run(natively(case), torch.autocast("cpu", dtype=dtype), *others)
    return results


def natively(case: Any) -> Any:
    """Return a call that oneDNN alone has as a call of what PyTorch has; what has a choice stays."""
    if case is not ONEDNN_LSTM:
        return case

    def lstm(x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor, h: Tensor, s: Tensor, *_: Any) -> Any:
        return torch.lstm(x, (h, s), [w, u, b, c], True, 1, 0.0, False, False, False)

    return Call(case.name, lstm, *case.arguments)


def distance(a: list[Tensor], b: list[Tensor], dtype: torch.dtype) -> float:
    """Return the largest difference, in units in the last place of each tensor's largest number."""
    pairs = ((x.float(), y.float()) for x, y in zip(a, b, strict=True))
    apart = [((x - y).abs().max() / y.abs().max()).item() for x, y in pairs]
    return max(apart, default=0.0) / torch.finfo(dtype).eps


@cases
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # of RMSNorm
@in_one_test(dtype=HALVES, low_inputs=[False, True])
def test_a_module_is_what_it_is_in_the_original_bit_by_bit(case, dtype, low_inputs):
    given_in = dtype if low_inputs else FULL
    mine = attempt(used, case, autocast("cpu", dtype=dtype), given_in)
    original = attempt(used, case, torch.autocast("cpu", dtype=dtype), given_in)
    assert all_same(mine, original)
    if isinstance(original, str):  # this CPU has no kernel: there is nothing else to be like
        assert case.name == "LSTM"
        return
    reference = used(case, nullcontext())
    for ours, exact in zip(mine, reference, strict=True):
        assert distance(ours, exact, dtype) < 5
    kinds = {"lower": dtype, "low": dtype, "float32": FULL, "as given": given_in}
    assert [one.dtype for one in mine[0]] == [kinds[result] for result in case.results]
    assert {one.dtype for one in mine[1]} <= {given_in}
    assert {one.dtype for one in mine[2]} <= {FULL}


# PyTorch compiles neither the CTC nor the Gaussian loss, whose shapes depend on numbers, and a graph does not
# switch oneDNN off and on.
COMPILABLE = [one for one in [*NETWORKS, *LOSSES] if one.name not in ("CTC", "GaussianNLL", "NativeLSTM")]
QUICK = [("TransformerEncoderLayer", False)] + [
    (name, True) for name in ("Conv2d", "GRUCell", "MultiheadAttention", "Embedding", "CrossEntropy")
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # of RMSNorm
@pytest.mark.parametrize(
    ("case", "emulate"),
    [
        pytest.param(case, emulate, marks=[pytest.mark.slow] * ((case.name, emulate) not in QUICK))
        for case in COMPILABLE
        for emulate in (False, True)
    ],
)
def test_a_module_is_compiled_as_it_runs(case, emulate):
    """Bit by bit: the graph has the functions that run eagerly."""
    make = partial(autocast, "cpu", dtype=torch.bfloat16, emulate=emulate)
    with torch._dynamo.config.patch(
        allow_rnn=True
    ):  # without, PyTorch leaves recurrent networks to eager code
        mine = used(case, make, way=COMPILED, backend="eager")
    assert all_same(mine, used(case, make()))


INFERENCE = ["MultiheadAttention", "TransformerEncoderLayer", "BatchNorm1d", "LSTM", "NativeLSTM", "Conv2d"]


@halves
@pytest.mark.parametrize("kind", INFERENCE)
def test_inference_is_what_it_is_in_the_original(kind, dtype):
    """Some modules take a faster way when nothing has to be differentiated."""
    (case,) = (case for case in NETWORKS if case.name == kind)
    results = []
    for region in (torch.autocast, autocast, lambda *a, **k: autocast(*a, emulate=True, **k), None):
        torch.manual_seed(0)
        module = case.make().eval()
        inputs = [one.make(n) for n, one in enumerate(case.inputs)]
        with torch.no_grad(), region("cpu", dtype=dtype) if region else nullcontext():
            results.append(tree_leaves(attempt(module, *inputs)))
    assert all_same(*results[:2])
    assert distance(results[2], results[3], dtype) < 5


# Rehearsals: modules

# CUDA's table alone, without what this device's autocast casts besides. A cross entropy consists of what is
# in it.
UNTOUCHED = dict.fromkeys(casting.CPU.rules.keys() - {"cross_entropy_loss"}, "untouched")
ON_GPU = casting.Casting({**UNTOUCHED, **casting.CUDA.rules})
CUDNN = ("LSTM", "NativeLSTM", "GRU", "RNN", "RNN of relu")  # compared with a GPU's in test_rehearsal.py


@pytest.mark.parametrize("case", [one for one in (*NETWORKS, *LOSSES) if one.name not in CUDNN], ids=repr)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # of RMSNorm
@in_one_test(dtype=HALVES, low_inputs=[False, True])
def test_a_rehearsed_module_is_what_it_is_in_a_native_region(case, dtype, low_inputs):
    """Its dtypes are the same, and its numbers but for the order of sums."""
    given_in = dtype if low_inputs else FULL
    outcomes = []
    for region in (autocast("cpu", dtype, emulate=True), autocast("cpu", dtype, casting=ON_GPU)):
        with without_onednn():  # which has LSTMs as one operator
            try:
                outcomes.append(used(case, region, given_in))
            except RuntimeError as error:  # what CUDA's table refuses, and what has no kernel
                outcomes.append(type(error))
    mine, native = outcomes
    if isinstance(native, type) or isinstance(mine, type):
        assert mine == native
        return
    for ours, theirs in zip(mine, native, strict=True):
        assert [one.dtype for one in ours] == [one.dtype for one in theirs]
        assert distance(ours, theirs, dtype) < 5


# Rehearsals: operators

LOWER = [
    call for call in CALLS if casting.CPU.rules.get(call.name) == casting.CUDA.rules.get(call.name) == "lower"
]


def called(
    call: Call, region: Any, make: Any, dtype: torch.dtype | None = None, way: str = "eager"
) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and gradients of a call; with a dtype, arguments and results are rounded by hand.

    For other ways than "eager", those of `run_in`, `region` is what makes a region.
    """
    seeds, leaves = itertools.count(), []

    def argument(value: Any) -> Any:
        if not isinstance(value, Input):
            return value
        leaves.append(make(value.shape, next(seeds)).requires_grad_())
        return rounded(leaves[-1])

    def rounded(value: Any) -> Any:
        return value.to(dtype).float() if dtype and isinstance(value, Tensor) else value

    arguments = tree_map(argument, list(call.arguments))
    function = run_in(way, (lambda: region) if way == "eager" else region, call.function, "eager")
    results = [rounded(r).float() for r in tree_leaves(function(*arguments, **call.options)) if r.numel()]
    wanted = [(r * make(r.shape, 9)).sum() for r in results if r.requires_grad]
    gradients = torch.autograd.grad(sum(wanted), leaves, allow_unused=True) if wanted else []
    return results, [one for one in gradients if one is not None]


@pytest.mark.parametrize("call", LOWER, ids=repr)
@in_one_test(dtype=HALVES)
def test_a_rehearsed_product_rounds_its_inputs_and_result_and_their_gradients_and_nothing_else(call, dtype):
    mine = called(call, autocast("cpu", dtype=dtype, emulate=True), numbers)
    by_hand = called(call, nullcontext(), numbers, dtype)
    assert all_same(mine, by_hand)
    assert not all_same(mine[0], called(call, nullcontext(), numbers)[0])


# What the tests after this one show of rehearsed products holds for compiled ones as well.
@pytest.mark.parametrize(
    "call",
    [pytest.param(call, marks=[pytest.mark.slow] * (n % 5 > 0)) for n, call in enumerate(LOWER)],
    ids=repr,
)
def test_a_rehearsed_product_is_compiled_as_it_runs(call):
    make = partial(autocast, "cpu", dtype=HALVES[LOWER.index(call) % 2], emulate=True)
    assert all_same(called(call, make, numbers, way=COMPILED), called(call, make(), numbers))


def normal(seed: int) -> Callable[[Any, int], Tensor]:
    return lambda shape, n: numbers(shape, 100 * seed + n)


@pytest.mark.parametrize("call", LOWER, ids=repr)
@in_one_test(dtype=HALVES)
def test_a_rehearsed_product_is_the_exact_one_rounded_once(call, dtype):
    """Half a unit in the last place from float64, results and gradients: the nearest number there is."""
    for seed in range(2):
        make = normal(seed)
        mine = called(call, autocast("cpu", dtype=dtype, emulate=True), make)
        exact = called(
            natively(call), nullcontext(), lambda shape, n, make=make: make(shape, n).to(dtype).double()
        )
        for a, b in zip(mine[0] + mine[1], exact[0] + exact[1], strict=True):
            noise = 1e-6 * b.abs().max()  # of sums in float32
            unit = torch.finfo(dtype).eps * b.abs().clamp(min=torch.finfo(dtype).smallest_normal)
            assert bool(((a - b).abs() <= unit / 2 + noise).all())


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
EDGES = st.sampled_from(
    [0.0, 1.0, 6e-8, 2.9e-8, 6.1e-5, 255.9, 256.0, 65504.0, 65519.0, 65520.0, 2e-38, 3.4e38]
)
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": torch.bmm,
    "conv1d": lambda a, b: F.conv1d(a.mT.reshape(1, -1, 1), b, groups=len(a)),
    "linear": lambda a, b: torch.stack([F.linear(*pair) for pair in zip(a, b, strict=True)]),
}


MOST = 10


@cache
def in_graph(name: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a rehearsed product, compiled."""
    product: Callable[[Tensor, Tensor], Tensor]
    make = partial(autocast, "cpu", dtype=dtype, emulate=True)
    product = run_in(COMPILED, make, PRODUCTS[name], "eager")
    return product


@settings(max_examples=25, deadline=None)
@given(
    factors=st.lists(st.tuples(*[FLOATS | EDGES] * 3), min_size=1, max_size=MOST),
    dtype=st.sampled_from(HALVES),
    name=st.sampled_from(sorted(PRODUCTS)),
)
def test_overflow_and_underflow_are_where_they_are_in_real_low_precision(factors, dtype, name):
    """Each result and each gradient is one product, so no sum hides how it is rounded.

    Some processors take bfloat16's subnormal numbers for 0; those of float16 count.
    """
    tiny, outcomes = torch.finfo(torch.bfloat16).tiny, []
    factors += [(0.0, 0.0, 0.0)] * (MOST - len(factors))  # for a graph of one shape
    rehearsal, real = autocast("cpu", dtype=dtype, emulate=True), torch.autocast("cpu", dtype=dtype)
    for run in (rehearsal(PRODUCTS[name]), real(PRODUCTS[name]), in_graph(name, dtype)):
        a, b, cotangent = F.hardshrink(torch.tensor(factors), tiny).T.reshape(3, -1, 1, 1)
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        result = run(*leaves).float()
        outcomes.append([result, *torch.autograd.grad(result, leaves, cotangent.reshape(result.shape))])
    for ones in zip(*outcomes, strict=True):
        mine, *others = (torch.where(one.abs() < tiny, 0.0, one) for one in ones)
        for other in others:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@cache
def network(way: str, emulate: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a network, and what calls it in a region of float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    return model, run_in(way, partial(autocast, "cpu", dtype=torch.float16, emulate=emulate), model)


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**-24, 2.0**-16, 1.0, 2.0**12, 2.0**16, 2.0**20])
def test_a_networks_gradients_overflow_and_vanish_where_they_do_in_real_float16(scale):
    masks = []
    for emulate, way in ((True, "eager"), (False, "eager"), (True, COMPILED)):
        model, run = network(way, emulate)
        model.zero_grad()
        (run(numbers((5, 8), 0) * 10).float().square().sum() * scale).backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        masks.append([gradients.isinf(), gradients.isnan(), gradients == 0.0])
    for others in masks[1:]:
        assert all(a.equal(b) for a, b in zip(masks[0], others, strict=True))
    is_infinite, _, is_zero = masks[0]
    assert bool(is_infinite.any()) == (scale > 2.0**10)
    assert bool(is_zero.all()) == (scale < 2.0**-29)


# Rehearsals: recurrent networks, whose steps run in Python


def recurrent(kind: type[nn.RNNBase], packed: bool, region: Any, needs: bool = True, **options: Any) -> Any:
    """Return the results of a network, and the gradients of its weights."""
    torch.manual_seed(1)
    network = kind(6, 4, **options)
    x: Any = numbers((5, 3, 6), 0).requires_grad_(needs)
    if packed:
        x = nn.utils.rnn.pack_sequence([numbers((n, 6), n).requires_grad_(needs) for n in (5, 3, 3, 1)])
    torch.manual_seed(2)
    with region:
        output, state = network(x)
    results = tree_leaves([output.data if packed else output, state])
    total = sum((each * numbers(each.shape, 3)).sum() for each in results)
    return results, torch.autograd.grad(total, [*network.parameters()])


LAYERS = in_one_test(
    kind=[nn.LSTM, nn.GRU, nn.RNN],
    packed=[False, True],
    bias=[False, True],
    dropout=[0.5, 1.0],
)


# Each option with either value of the others.
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@LAYERS
def test_a_rehearsed_recurrent_network_is_the_one_in_float32_but_for_rounding(kind, packed, **options):
    for more in ({}, {"proj_size": 2}) if kind is nn.LSTM else ({},):
        options = {
            "num_layers": 3,
            "bidirectional": packed,
            "batch_first": options["bias"],
            **options,
            **more,
        }
        mine = recurrent(kind, packed, autocast("cpu", torch.float16, emulate=True), **options)
        exact = recurrent(kind, packed, nullcontext(), **options)
        assert not all_same(mine[0], exact[0])
        for ours, theirs in zip([*mine[0], *mine[1]], [*exact[0], *exact[1]], strict=True):
            assert ours.shape == theirs.shape
            if theirs.any():  # a dropout of 1 leaves nothing
                assert distance([ours], [theirs], torch.float16) < 20
            else:
                assert not ours.any()


@in_one_test(kind=[nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell], dtype=HALVES)
def test_a_rehearsal_rounds_the_same_whether_or_not_the_input_needs_gradients(kind, dtype):
    """PyTorch's own LSTM in Python calls oneDNN for inputs that need none."""
    network, x = kind(6, 4), numbers((3, 6), 0)
    with autocast("cpu", dtype, emulate=True):
        needs, does_not = network(x.clone().requires_grad_()), network(x)
    assert all_same(tree_leaves(needs), tree_leaves(does_not))


def test_a_rehearsed_network_refuses_a_sequence_without_steps_as_pytorch_does():
    for region in (nullcontext(), autocast("cpu", emulate=True)):
        with region, pytest.raises(RuntimeError, match="Expected sequence length"):
            nn.GRU(6, 4)(numbers((0, 2, 6), 0))
