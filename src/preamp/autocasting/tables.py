"""Autocast's operator tables, which set the precision of each operator, and methods to edit them.

A table holds names only. Each framework's autocast finds the operators and modules that they stand for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from preamp.errors import CastingError
from preamp.recipes.values import KNOWN, Recipe, named

__all__ = [
    "CPU",
    "CUDA",
    "DEFAULT",
    "JAX",
    "MODULE_RULES",
    "RULES",
    "Casting",
    "Edit",
    "ModuleRule",
    "Rule",
    "Scope",
]

Rule = Literal["lower", "float32", "widest", "untouched", "refuse"]
RULES: tuple[Rule, ...] = get_args(Rule)
ModuleRule = Literal["float32", "bfloat16", "float16", "untouched", "default", "high"]
MODULE_RULES: tuple[ModuleRule, ...] = get_args(ModuleRule)
NAME = re.compile(r"[^\s,]+")
SHOWN = 4  # names that an error repeats
_IN_OUR_TABLES: set[str] = set()
_BASES: dict[str, tuple[Edit, ...]] = {}


class Edit(NamedTuple):
    """One edit of a table: the rule of an operator, or of a module.

    Attributes:
        of: what `name` is the name of.
        name: an operator's name, or a pattern of module paths.
        rule: one of `RULES` for an operator, of `MODULE_RULES` for a module.
    """

    of: Literal["operators", "modules"]
    name: str
    rule: Any


class Scope(NamedTuple):
    """What a table says of operators that run inside a module.

    The rules of operators are those of `before`, then `rule` changes them, then come those of `after`.

    Attributes:
        before: the edits of operators that came before the module's.
        rule: the rule of the module.
        after: the edits of operators that came after it, which hold in the module too.
    """

    before: Casting
    rule: ModuleRule
    after: Casting


class Casting:
    """An operator table: what autocast does to the inputs of the operators it names.

    A table is immutable: each method returns a new one in which the named operators have another rule.
    Operators that a table does not name keep the framework's rule for the device. If two edits apply to a
    call, the later one counts, whether they are edits of operators or of modules.

    >>> table = DEFAULT.lower("softmax").float32("bmm", "matmul").module("lm_head", "float32")
    >>> table
    casting.DEFAULT.lower('softmax').float32('bmm', 'matmul').module('lm_head', 'float32')
    >>> table["bmm"]
    'float32'

    Names are the framework's operator names. Some names that users write (`norm`, `cross_entropy`,
    `LSTMCell`) stand for all operators that they call. Names are looked up when the table is used, because
    only the framework knows its operators; a name that it does not have is an error then.

    Attributes:
        edits: the edits, in order.
        optional: the names that are skipped if the installed release has no such operator. They come from the
            tables of this module; names that a method edits have to exist.
    """

    def __init__(self, rules: Mapping[str, Rule] | None = None) -> None:
        if rules is not None and not isinstance(rules, Mapping):
            raise CastingError(f"{rules!r} is not a table. Write casting.DEFAULT.float32('softmax').")
        self.edits: tuple[Edit, ...] = ()
        for name, rule in (rules or {}).items():
            _check_name(name)
            _check_rule(rule, RULES, name)
            self.edits += (Edit("operators", name, rule),)
        self._base = "DEFAULT"  # the table of this module that this one began with
        self.optional: tuple[str, ...] = tuple(name for name in self.rules if name in _IN_OUR_TABLES)

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

    def module(self, pattern: str, rule: ModuleRule | Recipe) -> Casting:
        """Set how a module runs, and everything inside it.

        >>> table = DEFAULT.module("layers.*.mlp", "float32").module("layers.0", "default")
        >>> table.scope("model.layers.3.mlp.up_proj").rule, table.scope("model.layers.0.mlp").rule
        ('float32', 'default')

        Args:
            pattern: a path of names with dots between them, such as "lm_head" or "layers.*.mlp.down_proj".
                `*`, `?` and `[...]` stand for characters of one name, `**` for any number of names, or
                none. It may begin anywhere in a module's path: "lm_head" matches "model.lm_head" too.
            rule: "float32" runs every operator that does arithmetic in float32; "bfloat16" or "float16" runs
                the module as in a region of that precision; "untouched" casts nothing; "default" undoes
                earlier edits of modules. In a region with a recipe, "high" runs the module's products in the
                recipe's high precision, and another recipe quantizes them in its way.

        Raises:
            CastingError: for a pattern that is not a string or has empty names, and for another rule.
        """
        _check_pattern(pattern, rule)
        if isinstance(rule, Recipe):
            return self._with([Edit("modules", pattern, rule.key)])
        _check_rule(rule, MODULE_RULES, pattern)
        return self._with([Edit("modules", pattern, rule)])

    @property
    def rules(self) -> dict[str, Rule]:
        """A copy of the operators' rules: name to rule."""
        rules: dict[str, Rule] = {}
        for edit in self.edits:
            if edit.of == "operators":
                rules.pop(edit.name, None)  # the order is that of the edits that count
                rules[edit.name] = edit.rule
        return rules

    @property
    def modules(self) -> dict[str, ModuleRule]:
        """A copy of the modules' rules: pattern to rule."""
        return {edit.name: edit.rule for edit in self.edits if edit.of == "modules"}

    def without_recipes(self) -> Casting:
        """Return the table without the rules of modules that only a region with a recipe may have."""
        return Casting.of([edit for edit in self.edits if not _needs_recipe(edit)], self.optional)

    def check_recipe(self) -> None:
        """Check that no rule needs a recipe, for a region without one.

        Raises:
            CastingError: if one does.
        """
        for edit in filter(_needs_recipe, self.edits):
            raise CastingError(
                f"{edit.name!r} has the rule {_shown(edit.rule)}, and the region has no recipe. Write "
                "autocast(..., recipe=recipes.MXFP8)."
            )

    def scope(self, path: str) -> Scope | None:
        """Return what holds inside a module, given its path; None if no pattern matches.

        A pattern matches if it names the module or one around it. Of several that match, the last one counts.
        """
        for place in reversed(range(len(self.edits))):
            edit = self.edits[place]
            if edit.of == "modules" and is_inside(path, edit.name):
                before, after = self.edits[:place], self.edits[place:]
                return Scope(self._operators(before), edit.rule, self._operators(after))
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the table as a dictionary of strings and lists, for JSON, YAML or TOML.

        >>> DEFAULT.lower("softmax").module("lm_head", "float32").to_dict()["edits"]
        [{'operators': ['softmax'], 'rule': 'lower'}, {'modules': ['lm_head'], 'rule': 'float32'}]
        """
        alike = itertools.groupby(self._own_edits(), key=lambda edit: (edit.of, edit.rule))
        for edit in self._own_edits():
            if edit.rule in KNOWN and not KNOWN[edit.rule].name:
                raise CastingError(
                    f"The recipe of {edit.name!r} is not one of preamp.recipes, so it has no name to write. "
                    "Keep the table in Python."
                )
        edits = [{of: [edit.name for edit in same], "rule": rule} for (of, rule), same in alike]
        return {"table": self._base, "edits": edits}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Casting:
        """Return the table that `to_dict` wrote, or a configuration file has.

        >>> Casting.from_dict({"edits": [{"modules": ["lm_head"], "rule": "float32"}]})
        casting.DEFAULT.module('lm_head', 'float32')

        Args:
            values: "table", the name of a table in this module, "DEFAULT" if it is left out; and "edits", a
                list in which each entry has "operators" or "modules", one name or a list of names, and their
                "rule".

        Raises:
            CastingError: for anything else.
        """
        _check_keys(values, {"table", "edits"}, "a table")
        name, edits = values.get("table", "DEFAULT"), values.get("edits", ())
        if not isinstance(name, str) or name not in _BASES:
            raise CastingError(f"{name!r} is not a table. Write table: {' or '.join(_BASES)}.")
        if isinstance(edits, (str, Mapping)) or not isinstance(edits, Sequence):
            raise CastingError(f"edits={edits!r} is not a list. Write {_EXAMPLE}.")
        table = Casting({edit.name: edit.rule for edit in _BASES[name]})
        table._base = name
        for place, edit in enumerate(edits):
            try:
                table = table._with_entry(edit)
            except CastingError as error:
                raise CastingError(f"edits[{place}]: {error}") from error
        return table

    @classmethod
    def of(cls, edits: Iterable[Edit], optional: Iterable[str]) -> Casting:
        """Return a table with these edits."""
        table = cls()
        table.edits, table.optional = tuple(edits), tuple(optional)
        return table

    def __getitem__(self, name: str) -> Rule:
        return self.rules[name]

    def __contains__(self, name: object) -> bool:
        return name in self.rules

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Casting) and self.edits == other.edits

    def __hash__(self) -> int:
        return hash(self.edits)

    def __repr__(self) -> str:
        calls: list[str] = []
        for (of, rule), same in itertools.groupby(self._own_edits(), key=lambda edit: (edit.of, edit.rule)):
            names = [repr(edit.name) for edit in same]
            if of == "operators":
                calls.append(f".{rule}({', '.join(names)})")
            else:
                shown = _shown(rule)
                calls.extend(f".module({name}, {shown})" for name in names)
        return f"casting.{self._base}" + "".join(calls)

    def _with_entry(self, edit: Any) -> Casting:
        """Return a table with an entry of `to_dict`'s "edits"."""
        _check_keys(edit, {"operators", "modules", "rule"}, "an edit")
        if len(edit) != 2 or "rule" not in edit:
            raise CastingError(
                f"{dict(edit)!r} has to name operators or modules, and a rule. Write {_ENTRY}."
            )
        of, names = next((key, value) for key, value in edit.items() if key != "rule")
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, Sequence):
            raise CastingError(f"{of}: {names!r} is not a list of names. Write {_ENTRY}.")
        rule = edit["rule"]
        if of == "modules" and isinstance(rule, str) and rule not in MODULE_RULES and rule[:1].isupper():
            rule = named(rule)
        else:
            _check_rule(rule, RULES if of == "operators" else MODULE_RULES, ", ".join(map(str, names)))
        if not names:
            raise CastingError(f"{of}: [] names nothing. Write {_ENTRY}.")
        if of == "operators":
            for name in names:
                if not _is_name(name):
                    raise CastingError(f"{name!r} is not the name of an operator. Write {_EXAMPLE}.")
            return self._edited(rule, tuple(names))
        table = self
        for pattern in names:
            table = table.module(pattern, rule)
        return table

    def _edited(self, rule: Rule, names: Sequence[str]) -> Casting:
        for name in names:
            _check_name(name, rule)
        table = self._with([Edit("operators", name, rule) for name in dict.fromkeys(names)])
        table.optional = tuple(name for name in self.optional if name not in names)
        return table

    def _with(self, edits: Sequence[Edit]) -> Casting:
        """Return a table with more edits, which take the place of earlier ones of the same names."""
        changed = {edit[:2] for edit in edits}
        return self._copy([*(edit for edit in self._own_edits() if edit[:2] not in changed), *edits])

    def _operators(self, edits: Sequence[Edit]) -> Casting:
        """Return a table with those of some edits that are about operators."""
        return Casting.of([edit for edit in edits if edit.of == "operators"], self.optional)

    def _copy(self, own_edits: Sequence[Edit]) -> Casting:
        table = Casting()
        table.edits, table.optional, table._base = (
            (*_BASES[self._base], *own_edits),
            self.optional,
            self._base,
        )
        return table

    def _own_edits(self) -> tuple[Edit, ...]:
        """Return the edits that were added to the table of this module that this one began with."""
        return self.edits[len(_BASES[self._base]) :]


def _needs_recipe(edit: Edit) -> bool:
    return edit.rule == "high" or edit.rule in KNOWN


def _shown(rule: str) -> str:
    """Return a rule of modules as Python."""
    recipe = KNOWN.get(rule)
    if recipe is None:
        return repr(rule)
    base, _, high = recipe.name.partition(" without ")
    products = "".join(f", {each}=None" for each in high.split(", ") if each)
    return f"replace(recipes.{base}{products})" if high else f"recipes.{base}" if base else rule


_ENTRY = "{modules: [lm_head], rule: float32} or {operators: [softmax], rule: lower}"
_EXAMPLE = f"edits: [{_ENTRY.replace(' or ', ', ')}]"


@cache
def is_inside(path: str, pattern: str) -> bool:
    """Return whether a pattern names a module or one around it. Outside of modules the path is ""."""
    names, wanted = path.split(".") if path else [], pattern.split(".")
    return any(_begins_with(names[start:], wanted) for start in range(len(names) + 1))


def _begins_with(names: Sequence[str], wanted: Sequence[str]) -> bool:
    if not wanted:
        return True
    if wanted[0] == "**":
        return any(_begins_with(names[skipped:], wanted[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], wanted[0]) and _begins_with(names[1:], wanted[1:])


def _check_name(name: object, method: str = "lower") -> None:
    """Check the name of an operator that is given to a method of a table."""
    if _is_name(name):
        return
    if isinstance(name, str) and (several := name.replace(",", " ").split()):
        what, instead = (
            ("several names" if len(several) > 1 else "a name with spaces"),
            _call(method, several),
        )
    elif _is_collection(name):
        several = [each for each in name if isinstance(each, str)]
        what, instead = (
            f"a {type(name).__name__}, and each name is an argument of its own",
            _call(method, several),
        )
    elif isinstance(name, type):
        what = "a class, and tables name operators and paths of modules"
        instead = f"{_call(method, ['softmax'])} or .module('encoder.0', 'float32')"
    elif callable(name) and isinstance(called := getattr(name, "__name__", None), str):
        what, instead = "a function, and tables name operators", _call(method, [called])
    else:
        what, instead = "not the name of an operator", _call(method, ["softmax"])
    raise CastingError(f"{name!r} is {what}. Write {instead}.")


def _check_pattern(pattern: object, rule: object = "float32") -> None:
    """Check the pattern of an edit of modules."""
    if isinstance(pattern, str) and all(pattern.split(".")):
        return
    if _is_collection(pattern) and (several := [each for each in pattern if isinstance(each, str)]):
        calls = "".join(f".module({each!r}, {rule!r})" for each in several[:SHOWN])
        calls += " and so on" if len(several) > SHOWN else ""
        raise CastingError(
            f"{pattern!r} is a {type(pattern).__name__}, and each pattern needs its own call. Write {calls}."
        )
    # The repr of a module is long.
    given = repr(pattern) if isinstance(pattern, str) else f"An object of class {type(pattern).__name__}"
    raise CastingError(
        f"{given} is not a pattern of module paths. Write names with dots between them, such as "
        "'lm_head' or 'layers.*.mlp'."
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _is_collection(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, type))


def _call(method: str, names: Sequence[str]) -> str:
    """Return the call of a method with names, as users write it."""
    return f".{method}({', '.join(map(repr, names)) if 0 < len(names) <= SHOWN else '*names'})"


def _check_rule(rule: object, rules: Sequence[str], name: str) -> None:
    if rule in rules:
        return
    # Users write torch.float32 or jnp.float32, too.
    meant = getattr(rule, "__name__", str(rule)).rpartition(".")[2]
    instead = repr(meant) if meant in rules else f"one of {', '.join(map(repr, rules))}"
    raise CastingError(f"{rule!r} is not a rule, for {name!r}. Write {instead}.")


def _check_keys(values: object, known: set[str], what: str) -> None:
    if not isinstance(values, Mapping):
        raise CastingError(f"{values!r} is not {what}. Write {{{_EXAMPLE}}}.")
    for key in values:
        if key not in known:
            raise CastingError(f"{key!r} is not part of {what}. Write {' or '.join(sorted(known))}.")


def _table(base: str = "DEFAULT", **rules: str) -> Casting:
    """Return a table of this module, and have tables that begin with it refer to it by its name."""
    for names in rules.values():
        _IN_OUR_TABLES.update(names.split())
    table = Casting({name: rule for rule, names in rules.items() for name in names.split()})  # type: ignore[misc]
    table._base, _BASES[base] = base, table.edits
    return table


DEFAULT = _table()
"""No edits: every operator keeps the rule that the framework has for the device."""

EXPLICIT_PRECISION = "explicit_precision"
"""The name in `JAX` of all products and convolutions that ask for a precision themselves."""

CPU = _table(
    "CPU",
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
    "CUDA",
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
    "JAX",
    lower="conv_general_dilated dot_general ragged_dot ragged_dot_general",
    float32="""
    acos acosh add_any asin asinh atan2 atanh cbrt cosh cumlogsumexp cumprod cumsum digamma erf_inv erfc
    exp exp2 expm1 igamma igammac lgamma log log1p log2 polygamma pow psum psum2 psum_invariant
    psum_scatter reduce_prod reduce_scatter reduce_sum reduce_window_sum rsqrt sinh tan unreduced_psum
    """,
    widest="""
    abs add all_gather all_gather_invariant all_to_all approx_top_k argmax argmin atan
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
