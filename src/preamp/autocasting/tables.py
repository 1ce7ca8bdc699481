"""Autocast's operator tables, which set the precision of each operator, and methods to edit them.

A table has names only: each framework's autocast finds the operators that a name stands for and casts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal, get_args

from preamp.errors import CastingError

__all__ = ["CPU", "CUDA", "DEFAULT", "JAX", "RULES", "Casting", "Rule"]

Rule = Literal["lower", "float32", "widest", "untouched", "refuse"]
RULES: tuple[Rule, ...] = get_args(Rule)
_IN_OUR_TABLES: set[str] = set()


class Casting:
    """An operator table: what autocast does to the inputs of the operators it names.

    A table is immutable: each method returns a new one in which the named operators have another rule.
    Operators that a table does not name keep the framework's rule for the device. Where two names stand for
    the same operator, the later edit counts.

    >>> table = DEFAULT.lower("softmax").float32("bmm", "matmul").untouched("layer_norm")
    >>> table
    casting.DEFAULT.lower('softmax').float32('bmm', 'matmul').untouched('layer_norm')
    >>> table["bmm"]
    'float32'

    Names are the framework's operator names. A name without an overload stands for all overloads; a name that
    users write (`norm`, `cross_entropy`, `LSTMCell`) stands for all operators it calls. Names are looked up
    where the table is used, because only the framework knows its operators.

    Attributes:
        optional: the names that are skipped where the installed release has no such operator: those that come
            from the tables of this module. A name that a method edits has to exist.
    """

    def __init__(self, rules: Mapping[str, Rule] | None = None) -> None:
        if rules is not None and not isinstance(rules, Mapping):
            raise CastingError(f"{rules!r} is not a table. Write casting.DEFAULT.float32('softmax').")
        self._rules: dict[str, Rule] = dict(rules or {})
        self.optional: frozenset[str] = frozenset(_IN_OUR_TABLES & self._rules.keys())
        for name, rule in self._rules.items():
            _check_name(name)
            if rule not in RULES:
                raise CastingError(
                    f"{rule!r} is not a rule, for {name!r}. Write one of {', '.join(map(repr, RULES))}."
                )

    def lower(self, *names: str) -> Casting:
        """Run these operators in the region's low precision: float inputs except float64 are cast down."""
        return self._edited("lower", names)

    def float32(self, *names: str) -> Casting:
        """Run these operators in float32: inputs of a lower precision are cast up."""
        return self._edited("float32", names)

    def widest(self, *names: str) -> Casting:
        """Run these operators in the widest precision among their float inputs."""
        return self._edited("widest", names)

    def untouched(self, *names: str) -> Casting:
        """Leave the inputs of these operators, and of the operators they call, as they are."""
        return self._edited("untouched", names)

    def refuse(self, *names: str) -> Casting:
        """Make these operators an error inside the region."""
        return self._edited("refuse", names)

    @property
    def rules(self) -> dict[str, Rule]:
        """A copy of the table: name to rule."""
        return dict(self._rules)

    def __getitem__(self, name: str) -> Rule:
        return self._rules[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rules

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Casting) and list(self._rules.items()) == list(other._rules.items())

    def __hash__(self) -> int:
        return hash(tuple(self._rules.items()))

    def __repr__(self) -> str:
        edits = itertools.groupby(self._rules.items(), key=lambda item: item[1])
        calls = (f".{rule}({', '.join(repr(name) for name, _ in items)})" for rule, items in edits)
        return "casting.DEFAULT" + "".join(calls)

    def _edited(self, rule: Rule, names: tuple[str, ...]) -> Casting:
        for name in names:
            _check_name(name)
        kept = {name: has for name, has in self._rules.items() if name not in names}
        table = Casting({**kept, **dict.fromkeys(names, rule)})
        table.optional = self.optional.difference(names)
        return table


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise CastingError(f"{name!r} is not the name of an operator. Write a string, such as 'softmax'.")


def _table(**rules: str) -> Casting:
    for names in rules.values():
        _IN_OUR_TABLES.update(names.split())
    return Casting({name: rule for rule, names in rules.items() for name in names.split()})  # type: ignore[misc]


DEFAULT = Casting()
"""No edits: every operator keeps the rule that the framework has for the device."""

EXPLICIT_PRECISION = "explicit_precision"
"""The name in `JAX` of all products and convolutions that ask for a precision themselves."""

CPU = _table(
    lower="""
    _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
    conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot linear matmul
    mkldnn_rnn_layer mm prelu scaled_dot_product_attention
    """,
    float32="""
    _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
    binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve
    cosine_embedding_loss cross_entropy_loss ctc_loss fake_quantize_per_tensor_affine fft_fft fft_fft2
    fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft
    fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d
    grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex
    linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
    linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_sqrth linalg_qr linalg_solve linalg_svd
    linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d max_unpool2d
    max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nanquantile
    nll_loss nll_loss2d orgqr ormqr pinverse poisson_nll_loss polar prod qr quantile reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss
    stft svd trace triangular_solve triplet_margin_loss view_as_complex
    """,
    widest="cat index_copy stack",
)
"""PyTorch 2.13's table for CPU tensors, with what 2.14 and 2.15 added."""

CUDA = _table(
    lower="""
    _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm
    addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell
    linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell
    scaled_dot_product_attention
    """,
    float32="""
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss
    huber_loss kl_div l1_loss layer_norm linalg_matrix_norm linalg_matrix_sqrth linalg_vector_norm log log10
    log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    native_layer_norm nll_loss nll_loss2d norm nuclear_norm pdist poisson_nll_loss pow prod reciprocal renorm
    rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum tan triplet_margin_loss
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d
    """,
    widest="""
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """,
    refuse="binary_cross_entropy",
)
"""PyTorch 2.13's table for CUDA tensors, with what 2.14 and 2.15 added."""

JAX = _table(
    lower="conv_general_dilated dot_general ragged_dot ragged_dot_general",
    float32="""
    acos acosh asin asinh atan2 atanh cbrt cosh cumlogsumexp cumprod cumsum digamma erf_inv erfc exp exp2
    expm1 igamma igammac lgamma log log1p log2 polygamma pow psum psum2 psum_invariant psum_scatter
    reduce_prod reduce_scatter reduce_sum reduce_window_sum rsqrt sinh tan unreduced_psum
    """,
    widest="""
    abs add add_any all_gather all_gather_invariant all_to_all approx_top_k argmax argmin atan
    broadcast_in_dim ceil clamp concatenate copy copy_p cos cummax cummin device_put div dynamic_slice
    dynamic_update_slice eq erf expand_dims floor gather ge gt integer_pow is_finite le logistic lt max min
    mul mul_add name ne neg one_minus_square optimization_barrier pad pbroadcast pcast pmax pmin ppermute
    pvary reduce_max reduce_min reduce_window_max reduce_window_min rem reshape reshard rev round select_n
    sharding_constraint sign sin slice sort split sqrt square squeeze stop_gradient sub tanh top_k transpose
    """,
    untouched=EXPLICIT_PRECISION,
)
"""The primitives of JAX 0.6 to 0.12. A primitive that is not named runs in the dtypes of its operands.

`explicit_precision` is not a primitive. It stands for every operator of the rule "lower" whose call asks for
a precision: `precision=` above the default, or a `preferred_element_type=` that its operands do not imply.
Such a call runs as it was written; `casting.DEFAULT.lower("explicit_precision")` casts it like the others.
"""
