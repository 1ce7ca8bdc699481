"""Autocast's operators as data: what its document lists, how a release differs, and calls of all of them.

The document is PyTorch 2.1's "Autocast Op Reference", the release the one that docs/operators.md names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten

RELEASE = "2.13"
NEWEST = (2, 15)  # the latest release whose lists our tables have
# Operators that later releases added to the lists, as our tables did.
NEWER = {"linalg_matrix_sqrth"}  # 2.14

DOCUMENT = {
    "cpu": {
        "lower": "_convolution addbmm addmm baddbmm bmm conv1d conv2d conv3d linear matmul mm",
        "float32": """
            _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
            binary_cross_entropy cdist cholesky cholesky_inverse cholesky_solve conv_transpose1d
            conv_transpose2d conv_transpose3d ctc_loss eig fake_quantize_per_tensor_affine fft_fft fft_fft2
            fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft
            fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d
            grid_sampler_3d inverse kl_div linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig
            linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
            linalg_lstsq linalg_matrix_norm linalg_matrix_rank linalg_qr linalg_solve linalg_svd
            linalg_svdvals linalg_tensorinv linalg_tensorsolve lstsq lu_solve max_pool3d max_unpool2d
            max_unpool3d mse_loss multilabel_margin_loss multilabel_margin_loss_forward nanquantile orgqr
            ormqr pinverse polar prod qr quantile reflection_pad1d reflection_pad2d replication_pad1d
            replication_pad2d replication_pad3d solve stft svd symeig trace triangular_solve view_as_complex
        """,
        "widest": "cat index_copy stack",
    },
    "cuda": {
        "lower": """
            GRUCell LSTMCell RNNCell __matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d
            conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul mm multi_dot mv prelu
        """,
        "float32": """
            __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh
            cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1
            group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax
            margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm normalize
            pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss
            softmax softmin softplus sum tan triplet_margin_loss
        """,
        "widest": "addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot",
        "refuse": "binary_cross_entropy",
    },
}

# What the document and these calls name, where PyTorch registers it under another name.
REGISTERED_AS = {
    "GRUCell": "gru_cell",
    "LSTMCell": "lstm_cell",
    "RNNCell": "rnn_tanh_cell",
    "__matmul__": "matmul",
    "__pow__": "pow",
    "__rdiv__": "reciprocal",
    "__rpow__": "pow",
    "__rtruediv__": "reciprocal",
    "_convolution": "_convolution.deprecated",
    "_convolution(allow_tf32=)": "_convolution",
    "cross_entropy": "nll_loss",
    "grid_sample": "grid_sampler",
    "multi_dot": "linalg_multi_dot",
    "normalize": "norm",
    "softmin": "softmax",
}


@dataclass(frozen=True)
class Difference:
    """Operators that the release treats differently from what the document lists.

    Attributes:
        device: "cpu" or "cuda".
        document: the document's rule, or "unlisted".
        release: the release's rule, "unlisted" where it does nothing, "gone" where the operator is no more.
        reason: why.
        names: of the operators, with spaces in between. Parentheses tell which calls are meant.
    """

    device: str
    document: str
    release: str
    reason: str
    names: str


DIFFERENCES = [
    Difference("cpu", "float32", "lower", "moved", "conv_transpose1d conv_transpose2d conv_transpose3d"),
    Difference("cpu", "float32", "gone", "their linalg_ namesakes remain", "eig lstsq solve symeig"),
    Difference("cpu", "float32", "unlisted", "not registered", "linalg_matrix_norm"),
    Difference(
        "cpu", "lower", "unlisted", "only the older overload is registered", "_convolution(allow_tf32=)"
    ),
    Difference(
        *("cpu", "unlisted", "lower", "new since the documentation"),
        "_addmm_activation _native_multi_head_attention linalg_vecdot scaled_dot_product_attention",
    ),
    Difference("cpu", "unlisted", "lower", "left out", "conv_tbc mkldnn_rnn_layer prelu"),
    Difference(
        *("cpu", "unlisted", "float32", "left out: losses"),
        """
        binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss hinge_embedding_loss
        huber_loss l1_loss margin_ranking_loss multi_margin_loss nll_loss nll_loss2d poisson_nll_loss
        smooth_l1_loss soft_margin_loss triplet_margin_loss
        """,
    ),
    Difference("cuda", "float32", "unlisted", "raises on low precision before the cast", "norm(p='nuc')"),
    Difference("cuda", "unlisted", "lower", "new since the documentation", "linalg_vecdot"),
    Difference("cuda", "unlisted", "widest", "new since the documentation", "vdot"),
    Difference(
        *("cuda", "unlisted", "float32", "new since the documentation"),
        """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d rms_norm upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
        """,
    ),
    Difference("cuda", "unlisted", "lower", "left out", "conv_tbc einsum scaled_dot_product_attention"),
    Difference("cuda", "unlisted", "float32", "left out", "huber_loss logsumexp"),
    Difference(
        *("cuda", "unlisted", "lower", "left out: listed functions call them"),
        """
        _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell
        convolution cudnn_convolution cudnn_convolution_transpose rnn_relu_cell
        """,
    ),
    Difference(
        *("cuda", "unlisted", "float32", "left out: listed functions call them"),
        "frobenius_norm linalg_matrix_norm linalg_vector_norm native_layer_norm nll_loss2d nuclear_norm",
    ),
]

# The document says that calls with `out=` are not cast. These are not, but what they call is, so they raise.
CAST_INSIDE_OUT = {
    "cpu": {"chain_matmul", "multi_dot", "tensordot"},
    "cuda": {"linalg_matrix_norm", "tensordot"},
}


@dataclass(frozen=True)
class Input:
    """A tensor to be made, in the precision that a test asks for.

    Attributes:
        kind: "x" for normal numbers, "p" for probabilities, "sign" for -1 and 1, "spd" for a symmetric
            positive definite matrix.
        shape: of the tensor.
    """

    kind: str
    shape: tuple[int, ...]

    def make(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(self.shape, generator=generator)
        if self.kind == "p":
            return torch.rand(self.shape, generator=generator) * 0.8 + 0.1
        if self.kind == "spd":
            return normal @ normal.mT / len(normal) + torch.diag(torch.arange(1.0, len(normal) + 1))
        return normal.sign() if self.kind == "sign" else normal


def x(*shape: int) -> Input:
    return Input("x", shape)


def p(*shape: int) -> Input:
    return Input("p", shape)


def sign(*shape: int) -> Input:
    return Input("sign", shape)


def spd(size: int) -> Input:
    return Input("spd", (size, size))


def ints(*values: Any) -> Tensor:
    return torch.tensor(values)


class Call:
    """An operator's name, and a function with arguments that calls it."""

    def __init__(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.name, self.function, self.arguments, self.options = name, function, arguments, options

    def __repr__(self) -> str:
        return self.name


def calls(names: str, home: Any, *arguments: Any, prefix: str = "", **options: Any) -> list[Call]:
    """Return calls of several functions of a module with the same arguments."""
    return [Call(prefix + name, getattr(home, name), *arguments, **options) for name in names.split()]


def module(kind: Any, *sizes: Any) -> Callable[..., Any]:
    """Return a function that calls a module with given weights, which are the last arguments."""

    def call(inputs: Tensor, *rest: Any) -> Any:
        made = kind(*sizes, device="meta")
        names = [name for name, _ in made.named_parameters()]
        state, weights = rest[: len(rest) - len(names)], rest[len(rest) - len(names) :]
        return torch.func.functional_call(made, dict(zip(names, weights, strict=True)), (inputs, *state))

    return call


def along(dim: int, *functions: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return functions of a tensor that work along a dimension of it."""
    return [lambda tensor, function=function: function(tensor, dim) for function in functions]


LINE, PLANE, SPACE = x(1, 2, 4), x(1, 2, 4, 4), x(1, 2, 4, 4, 4)
FLAT, SOLID = [PLANE, p(1, 3, 3, 2)], [SPACE, p(1, 3, 3, 3, 3)]
QKV = [x(2, 2, 4, 8)] * 3
HEADS = [*[x(2, 4, 8)] * 3, 8, 2, x(24, 8), x(24), x(8, 8), x(8)]
CONVOLUTION = [x(2, 3, 6), x(4, 3, 3), x(4), [1], [0], [1], False, [0], 1]
CUDNN = [PLANE, x(2, 2, 3, 3), [0, 0]], [[1, 1], [1, 1], 1, False, False, False]
GRU = [x(2, 3), x(2, 4), x(12, 3), x(12, 4), x(12), x(12)]
LSTM = [x(2, 3), [x(2, 4), x(2, 4)], x(16, 3), x(16, 4), x(16), x(16)]
RNN = [x(2, 3), x(2, 4), x(4, 3), x(4, 4), x(4), x(4)]
ONEDNN_RNN = [x(3, 2, 4), x(16, 4), x(16, 4), x(16), x(16), x(1, 2, 4), x(1, 2, 4), False, [], 2, 4, 1]
CLASSES, TABLE, LABELS = ints(0, 1, 2, 1), x(4, 3), ints([0, 2, -1], [1, -1, -1])

MATRICES = [
    Call("mm", torch.mm, x(4, 3), x(3, 4)),
    Call("bmm", torch.bmm, x(2, 4, 3), x(2, 3, 4)),
    Call("mv", torch.mv, x(4, 3), x(3)),
    *calls("dot vdot", torch, x(3), x(3)),
    *calls("addmm _addmm_activation", torch, x(4, 4), x(4, 3), x(3, 4), beta=0.5),
    Call("addmv", torch.addmv, x(4), x(4, 3), x(3)),
    Call("addr", torch.addr, x(4, 3), x(4), x(3)),
    Call("addbmm", torch.addbmm, x(4, 4), x(2, 4, 3), x(2, 3, 4)),
    Call("baddbmm", torch.baddbmm, x(2, 4, 4), x(2, 4, 3), x(2, 3, 4)),
    Call("matmul", torch.matmul, x(4, 3), x(3, 4)),
    Call("__matmul__", lambda a, b: a @ b, x(2, 4, 3), x(3, 4)),
    Call("chain_matmul", aten.chain_matmul, [x(4, 3), x(3, 4), x(4, 2)]),
    Call("multi_dot", torch.linalg.multi_dot, [x(4, 3), x(3, 4), x(4, 2)]),
    Call("linalg_vecdot", torch.linalg.vecdot, x(4, 3), x(4, 3)),
    Call("linear", F.linear, x(4, 3), x(5, 3), x(5)),
    Call("bilinear", F.bilinear, x(4, 3), x(4, 2), x(5, 3, 2), x(5)),
    Call("einsum", torch.einsum, "bij,bjk->bik", x(2, 4, 3), x(2, 3, 4)),
    Call("tensordot", torch.tensordot, x(4, 3), x(3, 4), dims=1),
    Call("cross", torch.cross, x(4, 3), x(4, 3), dim=1),
    Call("prelu", F.prelu, x(4, 3), x(3)),
    *calls("scaled_dot_product_attention _scaled_dot_product_flash_attention", aten, *QKV),
    Call("_native_multi_head_attention", torch._native_multi_head_attention, *HEADS),
    Call("conv1d", F.conv1d, x(2, 3, 6), x(4, 3, 3), x(4)),
    Call("conv1d", F.conv1d, x(2, 3, 6), x(4, 3, 3), x(4), padding="same"),
    Call("conv2d", F.conv2d, x(2, 3, 6, 6), x(4, 3, 3, 3), x(4)),
    Call("conv2d", F.conv2d, x(2, 3, 6, 6), x(4, 3, 3, 3), x(4), padding="same"),
    Call("conv3d", F.conv3d, SPACE, x(3, 2, 3, 3, 3), x(3)),
    Call("conv3d", F.conv3d, SPACE, x(3, 2, 3, 3, 3), x(3), padding="same"),
    Call("conv_transpose1d", F.conv_transpose1d, x(2, 3, 6), x(3, 4, 3), x(4)),
    Call("conv_transpose2d", F.conv_transpose2d, x(2, 3, 6, 6), x(3, 4, 3, 3), x(4)),
    Call("conv_transpose3d", F.conv_transpose3d, SPACE, x(2, 3, 3, 3, 3), x(3)),
    Call("conv_tbc", torch.conv_tbc, x(6, 2, 3), x(3, 3, 4), x(4)),
    Call("convolution", torch.convolution, *CONVOLUTION),
    Call("_convolution", aten._convolution.deprecated, *CONVOLUTION, *[False] * 3),
    Call("_convolution(allow_tf32=)", aten._convolution.default, *CONVOLUTION, *[False] * 4),
    Call("cudnn_convolution", aten.cudnn_convolution, *CUDNN[0], *CUDNN[1]),
    Call(
        "cudnn_convolution_transpose",
        aten.cudnn_convolution_transpose,
        *[*CUDNN[0], [0, 0], *CUDNN[1]],
    ),
    Call("gru_cell", torch.gru_cell, *GRU),
    Call("lstm_cell", torch.lstm_cell, *LSTM),
    *calls("rnn_tanh_cell rnn_relu_cell", torch, *RNN),
    Call("GRUCell", module(nn.GRUCell, 3, 4), *GRU),
    Call("LSTMCell", module(nn.LSTMCell, 3, 4), *LSTM),
    Call("RNNCell", module(nn.RNNCell, 3, 4), *RNN),
    Call("_thnn_fused_gru_cell", aten._thnn_fused_gru_cell, x(2, 12), x(2, 12), x(2, 4), x(12), x(12)),
    Call("_thnn_fused_lstm_cell", aten._thnn_fused_lstm_cell, x(2, 16), x(2, 16), x(2, 4), x(16), x(16)),
    Call(
        "mkldnn_rnn_layer", lambda *args: torch.mkldnn_rnn_layer(*args)[:3], *ONEDNN_RNN, True, *[False] * 3
    ),
]

ELEMENTS = [
    *calls("acos asin erfinv log log10 log1p log2 reciprocal rsqrt", torch, p(4)),
    *calls("cosh exp expm1 sinh", torch, x(4)),
    Call("tan", torch.tan, p(4)),
    Call("softplus", F.softplus, x(4)),
    Call("pow", torch.pow, p(4), 2.5),
    Call("pow", torch.pow, 2.5, p(4)),
    Call("pow", torch.pow, p(4), p(4)),
    Call("__pow__", lambda a: a**2.5, p(4)),
    Call("__rpow__", lambda a: 2.5**a, p(4)),
    Call("__rdiv__", lambda a: a.__rdiv__(2.0), p(4)),
    Call("__rtruediv__", lambda a: 2.0 / a, p(4)),
    *calls("atan2 polar", torch, p(4), x(4)),
    *calls("addcdiv addcmul", torch, x(4), x(4), p(4)),
    Call("view_as_complex", torch.view_as_complex, x(4, 2)),
    Call("fake_quantize_per_tensor_affine", torch.fake_quantize_per_tensor_affine, x(4), 0.25, 0, -8, 7),
    Call("cat", torch.cat, [x(4), x(3)]),
    Call("stack", torch.stack, [x(4), x(4)]),
    Call("index_copy", torch.index_copy, TABLE, 0, ints(0, 2), x(2, 3)),
    Call("index_put", torch.index_put, TABLE, (ints(0, 2),), x(2, 3)),
    Call("scatter_add", torch.scatter_add, x(4), 0, ints(0, 2), x(2)),
]

REDUCTIONS = [
    *calls("softmax log_softmax softmin", F, TABLE, dim=1),
    *calls("logsumexp cumsum sum", torch, TABLE, 1),
    *calls("cumprod prod", torch, p(4, 3), 1),
    Call("sum", torch.sum, TABLE),
    Call("prod", torch.prod, p(2, 2)),
    Call("trace", torch.trace, x(4, 4)),
    *calls("quantile nanquantile", torch, x(9), 0.5),
    *calls("quantile nanquantile", torch, x(9), p(2)),
    Call("norm", aten.norm.Scalar, TABLE, 2),
    Call("norm", aten.norm.ScalarOpt_dim, TABLE, 2, [1]),
    Call("norm", torch.norm, TABLE),
    Call("norm", torch.norm, TABLE, dim=1),
    Call("norm(p='nuc')", torch.norm, TABLE, p="nuc"),
    Call("normalize", F.normalize, TABLE),
    *calls("vector_norm matrix_norm", torch.linalg, TABLE, prefix="linalg_"),
    Call("linalg_matrix_norm", torch.linalg.matrix_norm, TABLE, 1),
    *calls("frobenius_norm nuclear_norm", aten, TABLE, [0, 1]),
    Call("nuclear_norm", aten.nuclear_norm, TABLE),
    Call("renorm", torch.renorm, TABLE, 2, 0, 1.0),
    Call("layer_norm", F.layer_norm, TABLE, [3], x(3), x(3)),
    Call("native_layer_norm", torch.native_layer_norm, TABLE, [3], x(3), x(3), 1e-5),
    Call("group_norm", F.group_norm, x(4, 6), 2, x(6), x(6)),
    Call("rms_norm", F.rms_norm, TABLE, [3], x(3)),
    Call("dist", torch.dist, x(4), x(4)),
    Call("cdist", torch.cdist, TABLE, x(5, 3)),
    Call("pdist", F.pdist, TABLE),
    Call("cosine_similarity", F.cosine_similarity, TABLE, TABLE),
]

LOSSES = [
    *calls("huber_loss l1_loss mse_loss smooth_l1_loss", F, x(4), x(4)),
    *calls("hinge_embedding_loss soft_margin_loss", F, x(4), sign(4)),
    *calls("binary_cross_entropy_with_logits poisson_nll_loss", F, x(4), p(4)),
    *calls("cross_entropy multi_margin_loss nll_loss", F, TABLE, CLASSES),
    Call("binary_cross_entropy", F.binary_cross_entropy, p(4), p(4)),
    Call("cosine_embedding_loss", F.cosine_embedding_loss, TABLE, TABLE, ints(1, -1, 1, -1)),
    Call("cross_entropy_loss", torch._C._nn.cross_entropy_loss, TABLE, CLASSES),
    Call("ctc_loss", F.ctc_loss, x(5, 2, 4), ints([1, 2], [2, 3]), (5, 5), (2, 2)),
    Call("ctc_loss", F.ctc_loss, x(5, 2, 4), ints([1, 2], [2, 3]), ints(5, 5), ints(2, 2)),
    Call("kl_div", F.kl_div, x(4), p(4), reduction="sum"),
    Call("margin_ranking_loss", F.margin_ranking_loss, x(4), x(4), sign(4)),
    *calls("multilabel_margin_loss multilabel_margin_loss_forward", aten, x(2, 3), LABELS, 1),
    Call("nll_loss2d", aten.nll_loss2d, x(2, 3, 1, 1), ints([[1]], [[2]])),
    Call("triplet_margin_loss", F.triplet_margin_loss, TABLE, TABLE, TABLE),
]

IMAGES = [
    *calls("adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d max_pool3d", F, SPACE, 2),
    Call("fractional_max_pool2d", aten.fractional_max_pool2d, x(1, 2, 6, 6), [2, 2], [3, 3], p(1, 2, 2)),
    Call("fractional_max_pool3d", aten.fractional_max_pool3d, x(1, 2, 6, 6, 6), [2] * 3, [3] * 3, p(1, 2, 3)),
    Call("max_unpool2d", F.max_unpool2d, x(1, 1, 2, 2), ints([[[0, 3], [9, 11]]]), 2),
    Call("max_unpool3d", F.max_unpool3d, x(1, 1, 1, 2, 2), ints([[[[0, 3], [9, 11]]]]), 2),
    Call("grid_sample", F.grid_sample, *FLAT, align_corners=False),
    Call("grid_sample", F.grid_sample, *SOLID, align_corners=False),
    *calls("grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback", torch, *FLAT, 0, 0, False),
    Call("grid_sampler_3d", torch.grid_sampler_3d, *SOLID, 0, 0, False),
    *calls("reflection_pad1d replication_pad1d", aten, LINE, [1] * 2),
    *calls("reflection_pad2d replication_pad2d", aten, PLANE, [1] * 4),
    Call("replication_pad3d", aten.replication_pad3d, SPACE, [1] * 6),
    *calls("upsample_nearest1d _upsample_nearest_exact1d", aten, LINE, [8]),
    *calls("upsample_nearest2d _upsample_nearest_exact2d", aten, PLANE, [8] * 2),
    *calls("upsample_nearest3d _upsample_nearest_exact3d", aten, SPACE, [8] * 3),
    Call("upsample_linear1d", aten.upsample_linear1d, LINE, [8], False),
    *calls("upsample_bilinear2d upsample_bicubic2d", aten, PLANE, [8] * 2, False),
    *calls("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", aten, PLANE, [8] * 2, False),
    Call("upsample_trilinear3d", aten.upsample_trilinear3d, SPACE, [8] * 3, False),
    Call("stft", aten.stft, x(16), 8, window=p(8), return_complex=True),
    Call("stft", aten.stft.center, x(16), 8, window=p(8), center=False, return_complex=True),
    *calls("fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn", torch.fft, x(4, 4), prefix="fft_"),
    *calls("ihfft irfft irfft2 irfftn hfft", torch.fft, x(4, 4), prefix="fft_"),
]

DECOMPOSITIONS = [
    *calls("cholesky cholesky_inverse inverse _lu_with_info", torch, spd(4)),
    *calls(
        "cholesky cholesky_ex cond eig eigh eigvals eigvalsh inv inv_ex",
        torch.linalg,
        spd(4),
        prefix="linalg_",
    ),
    *calls("geqrf pinverse qr svd", torch, TABLE),
    *calls("matrix_rank qr svd svdvals", torch.linalg, TABLE, prefix="linalg_"),
    Call("cholesky_solve", torch.cholesky_solve, x(4, 2), spd(4)),
    Call("lu_solve", torch.lu_solve, x(4, 2), spd(4), ints(1, 2, 3, 4).int()),
    Call("orgqr", torch.orgqr, TABLE, x(3)),
    Call("ormqr", torch.ormqr, TABLE, x(3), x(4, 2)),
    Call("triangular_solve", torch.triangular_solve, x(4, 2), spd(4)),
    Call("linalg_cond", torch.linalg.cond, spd(4), "fro"),
    Call("linalg_householder_product", torch.linalg.householder_product, TABLE, x(3)),
    Call("linalg_lstsq", torch.linalg.lstsq, TABLE, x(4, 2), driver="gels"),
    Call("linalg_matrix_rank", torch.linalg.matrix_rank, TABLE, 0.5),
    Call("linalg_matrix_rank", torch.linalg.matrix_rank, TABLE, p()),
    Call("linalg_matrix_rank", torch.linalg.matrix_rank, TABLE, atol=p()),
    Call("linalg_matrix_rank", torch.linalg.matrix_rank, TABLE, rtol=0.5),
    Call("linalg_solve", torch.linalg.solve, spd(4), x(4, 2)),
    Call("linalg_tensorinv", torch.linalg.tensorinv, x(4, 2, 2), ind=1),
    Call("linalg_tensorsolve", torch.linalg.tensorsolve, x(4, 2, 2), x(4)),
]


def is_there(call: Call) -> bool:
    """Return whether the installed release has the operator that is called."""
    name = REGISTERED_AS.get(call.name, call.name)
    return hasattr(aten, name.partition(".")[0].partition("(")[0])


CALLS = [*MATRICES, *ELEMENTS, *REDUCTIONS, *LOSSES, *IMAGES, *DECOMPOSITIONS]
CALLS = [call for call in CALLS if is_there(call)]

# The same operator by other ways: modules, methods, Python's operators and other namespaces.
SPELLINGS: dict[str, tuple[list[Any], list[Callable[..., Any]]]] = {
    "__rpow__": ([p(3)], [lambda a: 2**a, lambda a: a.__rpow__(2), lambda a: torch.pow(2, a)]),
    "addmm": ([x(3, 3)] * 3, [torch.addmm, Tensor.addmm]),
    "bmm": ([x(2, 3, 3)] * 2, [torch.bmm, Tensor.bmm]),
    "cat": ([[x(3), x(2)]], [torch.cat, torch.concat, torch.concatenate]),
    "cholesky": ([spd(3)], [torch.cholesky, Tensor.cholesky, torch.linalg.cholesky]),
    "conv2d": ([PLANE, x(2, 2, 3, 3), x(2)], [torch.conv2d, F.conv2d, module(nn.Conv2d, 2, 2, 3)]),
    "cosine_similarity": ([TABLE] * 2, [F.cosine_similarity, torch.cosine_similarity, nn.CosineSimilarity()]),
    "cross_entropy": ([TABLE, CLASSES], [F.cross_entropy, nn.CrossEntropyLoss()]),
    "cumsum": ([TABLE], along(1, torch.cumsum, Tensor.cumsum)),
    "erfinv": ([p(3)], [torch.erfinv, Tensor.erfinv, torch.special.erfinv]),
    "exp": ([x(3)], [torch.exp, Tensor.exp]),
    "expm1": ([x(3)], [torch.expm1, Tensor.expm1, torch.special.expm1]),
    "inverse": ([spd(3)], [torch.inverse, Tensor.inverse, torch.linalg.inv]),
    "layer_norm": ([TABLE, x(3), x(3)], [lambda a, *w: F.layer_norm(a, [3], *w), module(nn.LayerNorm, 3)]),
    "linear": ([TABLE, x(5, 3), x(5)], [F.linear, module(nn.Linear, 3, 5)]),
    "log1p": ([p(3)], [torch.log1p, Tensor.log1p, torch.special.log1p]),
    "log_softmax": (
        [TABLE],
        [
            nn.LogSoftmax(1),
            *along(1, torch.log_softmax, F.log_softmax, Tensor.log_softmax, torch.special.log_softmax),
        ],
    ),
    "logsumexp": ([TABLE], along(1, torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)),
    "matmul": (
        [x(3, 3)] * 2,
        [
            torch.matmul,
            Tensor.matmul,
            operator.matmul,
            torch.linalg.matmul,
            Tensor.__matmul__,
            Tensor.__rmatmul__,
        ],
    ),
    "mm": ([x(3, 3)] * 2, [torch.mm, Tensor.mm]),
    "mse_loss": ([x(3)] * 2, [F.mse_loss, nn.MSELoss()]),
    "norm": (
        [TABLE],
        [torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm],
    ),
    "pow": ([p(3)], [lambda a: a**2, lambda a: a.__pow__(2), *along(2, torch.pow, Tensor.pow)]),
    "prelu": ([TABLE, x(3)], [torch.prelu, F.prelu, Tensor.prelu, module(nn.PReLU, 3)]),
    "prod": ([p(3, 3)], [torch.prod, Tensor.prod, *along(1, torch.prod, Tensor.prod)]),
    "reciprocal": (
        [p(3)],
        [
            torch.reciprocal,
            Tensor.reciprocal,
            lambda a: 1 / a,
            lambda a: a.__rdiv__(1),
            lambda a: a.__rtruediv__(1),
        ],
    ),
    "softmax": (
        [TABLE],
        [nn.Softmax(1), *along(1, torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)],
    ),
    "sum": ([TABLE], [torch.sum, Tensor.sum, *along(1, torch.sum, Tensor.sum)]),
    "trace": ([x(3, 3)], [torch.trace, Tensor.trace]),
}


def padding(dims: int, mode: str) -> list[Call]:
    """Return calls of what pads in a mode: a function, a module, and a convolution."""
    lines = x(1, 2, *[6] * dims)
    kind = {"reflect": "Reflection", "replicate": "Replication", "circular": "Circular"}.get(mode, "Zero")
    kinds = [getattr(nn, f"{kind}Pad{dims}d")(1)]
    if mode != "constant":
        kinds.append(getattr(nn, f"Conv{dims}d")(2, 2, 3, padding=1, padding_mode=mode))
    functions = [lambda tensor: F.pad(tensor, (1, 1) * dims, mode), *kinds]
    name = {"circular": "_pad_circular", "constant": "constant_pad_nd"}.get(mode)
    return [Call(name or f"{kind.lower()}_pad{dims}d", function, lines) for function in functions]


# Functions and modules through which users call operators of other names.
THROUGH = [
    *[call for dims in (1, 2, 3) for mode in ("reflect", "replicate") for call in padding(dims, mode)],
    *[call for dims in (1, 2, 3) for mode in ("circular", "constant") for call in padding(dims, mode)],
    Call("mkldnn_rnn_layer", nn.LSTM(3, 4), x(3, 2, 3)),
    *[Call("linear", kind(3, 4), x(3, 2, 3)) for kind in (nn.LSTM, nn.GRU, nn.RNN)],
    Call("linear", nn.MultiheadAttention(4, 2), *[x(3, 2, 4)] * 3),
    Call("bmm", nn.Bilinear(3, 3, 2), TABLE, TABLE),
    Call("bmm", F.affine_grid, x(1, 2, 3), (1, 1, 2, 2), align_corners=False),
    Call("native_layer_norm", nn.LayerNorm(3), TABLE),
    Call("native_group_norm", nn.GroupNorm(2, 6), x(4, 6)),
    Call("_softmax", nn.Softmax(1), TABLE),
    Call("_log_softmax", nn.LogSoftmax(1), TABLE),
    Call("linalg_vector_norm", nn.CosineSimilarity(), TABLE, TABLE),
    Call("linalg_svdvals", torch.nuclear_norm, TABLE),
    Call("_lu_with_info", torch.lu, spd(3)),
    Call("pow", nn.GaussianNLLLoss(), x(4), x(4), p(4)),
    Call("pow", nn.RMSNorm(3), TABLE),
]

# Operators that there are no kernels of, or no fake ones for CUDA.
NOT_ON = {
    "cpu": {"_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"}
    | {"cudnn_convolution", "cudnn_convolution_transpose"},
    "cuda": {"_grid_sampler_2d_cpu_fallback", "ctc_loss", "fake_quantize_per_tensor_affine"}
    | {"geqrf", "linalg_lstsq"},
}
# These promote without autocast too.
PROMOTE_BY_THEMSELVES = {"addcdiv", "addcmul", "atan2", "cat", "stack"}
# With `out=`, these call themselves without it, which an edit of their rule reaches.
CALL_THEMSELVES = {f"linalg_{name}" for name in ("cond", "matrix_norm", "tensorinv", "tensorsolve")}
CALL_THEMSELVES |= {"cholesky", "cholesky_solve", "dot", "norm(p='nuc')", "normalize", "vdot"}
