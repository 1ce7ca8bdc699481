"""Find PyTorch's operators: by the names that users write, by their rules, and by the functions of theirs."""

from __future__ import annotations

import difflib
import dis
import re
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch

from preamp.arrays import torch_compat as compat
from preamp.autocasting import tables as casting
from preamp.autocasting.tables import Casting, Rule
from preamp.errors import CastingError

# Names that users write for something other than one operator of that name.
USER_NAMES: dict[str, str] = {
    "GRU": "gru",
    "GRUCell": "gru_cell _thnn_fused_gru_cell",
    "LSTM": "lstm mkldnn_rnn_layer",
    "LSTMCell": "lstm_cell _thnn_fused_lstm_cell",
    "RNN": "rnn_tanh rnn_relu",
    "RNNCell": "rnn_tanh_cell rnn_relu_cell",
    "__matmul__": "matmul",
    "__pow__": "pow",
    "__rdiv__": "reciprocal",
    "__rpow__": "pow",
    "__rtruediv__": "reciprocal",
    "cross_entropy": "cross_entropy_loss",
    "grid_sample": "grid_sampler grid_sampler_2d grid_sampler_3d",
    "group_norm": "group_norm native_group_norm",
    "interpolate": """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    """,
    "layer_norm": "layer_norm native_layer_norm",
    "log_softmax": "log_softmax _log_softmax",
    "multi_dot": "linalg_multi_dot",
    "nll_loss": "nll_loss nll_loss2d nll_loss_nd",
    "norm": "norm linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm",
    "normalize": "linalg_vector_norm",
    "rms_norm": "rms_norm _fused_rms_norm",
    "softmax": "softmax _softmax",
    "softmin": "softmax _softmax",
    "upsample": "interpolate",
}

# Operators that are composed of others in C++, where a mode sees nothing, and that autocast does not list:
# they follow the rule of the first operator here that has one of its own.
COMPOSED: dict[str, str] = {
    **dict.fromkeys(("gru", "rnn_tanh", "rnn_relu"), "linear"),
    **dict.fromkeys(("affine_grid_generator", "bilinear"), "bmm"),
    **dict.fromkeys(
        ("_weight_norm", "cosine_similarity", "dist", "linalg_matrix_norm", "renorm"), "linalg_vector_norm"
    ),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), "linear"),
    **dict.fromkeys(("column_stack", "dstack", "hstack", "row_stack", "vstack", "_chunk_cat"), "cat"),
    **dict.fromkeys(("concat", "concatenate", "repeat", "roll", "tile"), "cat"),
    **dict.fromkeys(("corrcoef", "cov"), "mm"),
    **dict.fromkeys(("cumulative_trapezoid", "trapezoid", "trapz"), "sum"),
    **dict.fromkeys(("float_power", "ldexp", "square"), "pow"),
    **dict.fromkeys(("linalg_matrix_power", "linalg_pinv", "matrix_power", "pinverse"), "matmul"),
    **dict.fromkeys(("nanmean", "sum_to_size"), "sum"),
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "chain_matmul": "linalg_multi_dot mm",
    "clip": "clamp",
    "cross_entropy_loss": "log_softmax nll_loss_nd nll_loss",
    "det": "linalg_det",
    "divide": "div",
    "einsum": "bmm",
    "inner": "tensordot mm",
    "frobenius_norm": "linalg_matrix_norm",
    "group_norm": "native_group_norm",
    "instance_norm": "batch_norm",
    "inverse": "linalg_inv",
    "layer_norm": "native_layer_norm",
    "linalg_matmul": "matmul",
    "linalg_multi_dot": "mm",
    "linalg_norm": "linalg_vector_norm linalg_matrix_norm",
    "log_softmax": "_log_softmax",
    "lstm": "linear mkldnn_rnn_layer",
    "lu": "_lu_with_info",
    "matrix_exp": "matmul",
    "multiply": "mul",
    "negative": "neg",
    "nll_loss_nd": "nll_loss nll_loss2d",
    "norm": "linalg_vector_norm",
    "nuclear_norm": "linalg_matrix_norm linalg_svdvals",
    "orgqr": "linalg_householder_product",
    "pairwise_distance": "norm",
    "rdiv": "reciprocal div",
    "rms_norm": "_fused_rms_norm pow rsqrt",
    "rsub": "sub",
    "special_ndtr": "erf",
    "softmax": "_softmax",
    "subtract": "sub",
    "tensordot": "mm",
    "trace": "sum",
    "true_divide": "div",
    "vdot": "dot",
}
# Those that `pad` calls, depending on its arguments.
PADDING = frozenset(
    ["constant_pad_nd", "_pad_circular"]
    + [f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3)]
)
# Pointwise to PyTorch, but nothing is computed.
MOVES = frozenset(["_to_copy", "alias", "clone", "copy", "detach", "to", "type_as"])
# Neither pointwise to PyTorch, in some of its releases, nor in its tables, but something is computed.
COMPUTING = """
    adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d baddbmm diff floor_divide ger glu hardswish
    index_add kron leaky_relu linalg_cross log_sigmoid logcumsumexp logsumexp max_pool1d max_pool2d mean
    nansum outer scatter_reduce segment_reduce std std_mean sum var var_mean
"""
# The methods behind Python's operators. PyTorch's functions in Python apply these operators to tensors, and
# the others to sizes and strings, too.
METHODS = {"**": "__pow__", "@": "__matmul__", "/": "__truediv__"}
DUNDER = {"floordiv": "floor_divide", "mod": "remainder", "rtruediv": "rdiv", "truediv": "div"}
# The operators that functions of `torch.special` call under another name than their own.
SPECIAL = {
    "expit": "sigmoid",
    "gammainc": "igamma",
    "gammaincc": "igammac",
    "gammaln": "lgamma",
    "multigammaln": "mvlgamma",
    "psi": "digamma",
}
# Operators that a GPU has kernels for, and a device has none, by the dtypes of their inputs.
FOURIER = [name for name in casting.CPU.rules if name.startswith("fft_")]
LOW = frozenset([torch.float16, torch.bfloat16])
WITHOUT_KERNEL: dict[str, dict[str, frozenset[torch.dtype]]] = {
    "cpu": dict.fromkeys(
        [*FOURIER, "polygamma", "round", "rrelu"], frozenset([torch.float16, torch.complex32])
    )
    | dict.fromkeys(["avg_pool3d", "multilabel_margin_loss_forward"], LOW)
}
# Operators whose kernels round or sum in low precision, forward or backward, where a GPU's use float32.
ROUND_INSIDE = {
    "cpu": """
        avg_pool1d avg_pool2d batch_norm col2im dropout embedding embedding_bag feature_dropout im2col
        instance_norm logit max_pool1d max_pool2d max_pool1d_with_indices max_pool2d_with_indices
    """
}
# These write to the buffers that they are given.
WITH_BUFFERS = ("batch_norm", "instance_norm")
TABLES = {"cpu": casting.CPU, "cuda": casting.CUDA}
NEAREST = 3
PATH = re.compile(r"(?!__)[\w.*?\[\]-]*\w[\w.*?\[\]-]*")
# What names are written with that are those of functions, and where Python then finds the function.
PREFIXES = ("aten::", "torch.ops.aten.", "aten.", "torch.")
PLACES = {"F": torch.nn.functional, "nn": torch.nn, "Tensor": torch.Tensor}
# Many modules call these besides what they are about.
SHORT = {
    "sdpa": "scaled_dot_product_attention",
    "flash_attention": "scaled_dot_product_attention",
}


def dispatch_key(device_type: str) -> str:
    """Return the name of the dispatch key of a device type's autocast."""
    names = {"privateuseone": "PrivateUse1", compat.name_of_private_device(): "PrivateUse1"}
    return "Autocast" + names.get(device_type, device_type.upper())


def has_autocast(device_type: str) -> bool:
    """Return whether PyTorch has a dispatch key for a device type's autocast."""
    return hasattr(compat.DispatchKey, dispatch_key(device_type))


@cache
def _names() -> dict[str, list[str]]:
    """Return the overloads of each of aten's operators."""
    names: dict[str, list[str]] = {}
    for full in sorted(compat.all_operators()):
        namespace, _, name = full.partition("::")
        if namespace == "aten":
            names.setdefault(name.partition(".")[0], []).append(name)
    return names


@cache
def functions() -> dict[Callable[..., Any], str]:
    """Return the name of the operator that each function and method of PyTorch's calls."""
    places = (
        torch,
        torch.Tensor,
        torch.nn.functional,
        compat.functions_of_modules,
        torch.special,
        torch.linalg,
        torch.fft,
    )
    values = (getattr(place, name, None) for place in places for name in dir(place))
    called = [value for value in values if callable(value) and not isinstance(value, type)]
    named = [(value, _operator_of(value.__name__)) for value in called if hasattr(value, "__name__")]
    # Some functions equal others: `torch.dsmm == torch.mm`. The name of an operator comes last, and counts.
    return dict(sorted(named, key=lambda pair: pair[1] in _names()))


def _operator_of(name: str) -> str:
    if name.startswith("special_"):
        inner = name.removeprefix("special_")
        inner = SPECIAL.get(inner, inner)
        return inner if inner in _names() else name
    if name.startswith("__") and name.endswith("__"):
        if name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"):  # such as "__iadd__"
            return f"{_operator_of(f'__{name[3:]}')}_"
        inner = DUNDER.get(name.strip("_"), name.strip("_"))
        return inner if inner in _names() or inner in COMPOSED else inner.removeprefix("r")
    return name


@cache
def checked_functions() -> dict[FunctionType, frozenset[str]]:
    """Return PyTorch's functions in Python that no mode sees into, each with the names that it uses.

    They ask at their beginning whether a mode is in force, and hand themselves over to it; those of
    `compat.UPSAMPLE` do so in compiled code only.
    """
    functions_in_python = (function for function in functions() if isinstance(function, FunctionType))
    return {
        function: _names_in(compat.unchecked(function))
        for function in functions_in_python
        if function in compat.UPSAMPLE
        or any("has_torch_function" in name for name in function.__code__.co_names)
    }


def calls(function: Callable[..., Any], names: frozenset[str]) -> bool:
    """Return whether a function in Python calls one of some operators, itself or through others."""
    return not _called(function).isdisjoint(names)


@cache
def _called(function: Callable[..., Any]) -> frozenset[str]:
    """Return the operators that a function in Python calls, itself or through others."""
    seen: set[str] = set()
    new = set(checked_functions().get(function, ()))  # type: ignore[call-overload]
    by_name = _by_name()
    while new:
        seen |= new
        new = {inner for name in new for inner in by_name.get(name, ())} - seen
    return frozenset(map(_operator_of, seen))


def called_by_name(name: str) -> list[Callable[..., Any]]:
    """Return the functions of `torch.ops.aten` for an operator."""
    base, _, overload = name.partition(".")
    if base not in _names():
        return []
    packet = getattr(torch.ops.aten, base)
    overloads = [overload] if overload else packet.overloads()
    return [*([] if overload else [packet]), *(getattr(packet, name) for name in overloads)]


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of the operator that a function calls."""
    return functions().get(function) or str(function).split(".")[1]  # of `torch.ops.aten`: "aten.mm.default"


@cache
def _by_name() -> dict[str, frozenset[str]]:
    """Return the names that PyTorch's functions in Python use, by their own names."""
    found: dict[str, frozenset[str]] = {}
    for namespace in (torch.nn.functional, torch.functional, torch.Tensor):
        for name, value in vars(namespace).items():
            if isinstance(value, FunctionType):
                found[name] = found.get(name, frozenset()) | _names_in(compat.unchecked(value))
    return found


def _names_in(function: Any) -> frozenset[str]:
    """Return the names that a function in Python uses, and those of the methods behind its operators."""
    if not isinstance(function, FunctionType):
        return frozenset([function.__name__])
    written = {
        step.argrepr.rstrip("=") for step in dis.get_instructions(function) if step.opname == "BINARY_OP"
    }
    return frozenset([*function.__code__.co_names, *(METHODS[sign] for sign in written & METHODS.keys())])


@cache
def arithmetic() -> frozenset[str]:
    """Return the operators that compute something, whether a device type's autocast lists them or not."""
    pointwise = {
        base
        for base, names in _names().items()
        if base not in MOVES and any(torch.Tag.pointwise in _overload(name).tags for name in names)
    }
    tables = {name for table in TABLES.values() for name in table.rules}
    return frozenset(
        base for base in {*pointwise, *tables, *COMPUTING.split()} if base in _names() and _is_eligible(base)
    )


@cache
def overloads(name: str) -> tuple[str, ...]:
    """Return the operators that a name stands for.

    Raises:
        CastingError: for a name that stands for none, and for one of an operator that autocast never casts:
            one that works in place, or takes a dtype or no tensors.
    """
    known, written = _names(), name
    name = _without_prefix(name)
    if name in USER_NAMES:
        bases = [base for base in USER_NAMES[name].split() if base in known or base in USER_NAMES]
        return tuple(
            dict.fromkeys(full for base in bases for full in ((base,) if base in known else overloads(base)))
        )
    if name not in known or not _is_eligible(name):
        raise CastingError(_unknown(written))
    return (name,)


def _without_prefix(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    return _operator_of(name) if name.startswith("special_") else name


def _is_name(name: str) -> bool:
    """Return whether a table can name an operator by a name."""
    return name in USER_NAMES or (name in _names() and _is_eligible(name))


def _is_eligible(base: str) -> bool:
    return any(_takes_tensors(_overload(name)._schema) for name in _names()[base])


def _takes_tensors(schema: torch.FunctionSchema) -> bool:
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    takes_dtype = any(str(a.type) == "int" and a.name.endswith("dtype") for a in schema.arguments)
    return takes_tensors and not schema.is_mutable and not takes_dtype


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def padding(
    input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]] | None:
    """Return the operator of `PADDING` that `torch.nn.functional.pad` calls in C++, and its arguments.

    It returns None for arguments of which PyTorch makes an error. They are those of `pad`.
    """
    dims = len(pad) // 2
    if len(pad) != 2 * dims or dims > input.ndim:
        return None
    if mode == "constant":
        return torch.constant_pad_nd, (input, pad, 0 if value is None else value)
    if value or dims not in (1, 2, 3) or input.ndim not in (dims + 1, dims + 2):
        return None
    if mode == "circular":
        return compat.pad_circular, (input, pad)
    kind = {"reflect": "reflection", "replicate": "replication"}.get(mode)
    return (getattr(torch.ops.aten, f"{kind}_pad{dims}d"), (input, pad)) if kind else None


def _unknown(written: str) -> str:
    """Return what to say of a name that stands for no operator."""
    name = _without_prefix(written)
    base, _, overload = name.partition(".")
    if overload and base in _names():
        return (
            f"{written!r} is one overload of an operator, and tables are about all of them. Write {base!r}."
        )
    found = _found_in_python(name)
    operator = functions().get(found, "") if callable(found) else ""
    called = _operator_of(base)
    if base in _names() or (called.endswith("_") and not called.endswith("__")):
        called = called.removesuffix("_")
        instead = repr(called) if _is_name(called) else "the name of an operator that returns a new tensor"
        return (
            f"{written!r} never goes through autocast: it works in place, takes a dtype or takes no tensors. "
            f"Write {instead}."
        )
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        return (
            f"{written!r} is a class of modules, and tables name operators and paths of modules. Write the "
            "name of the function that it calls, or .module('encoder.0', 'float32') for the module of that "
            "path."
        )
    if _is_name(operator):
        kind = "method" if name.startswith(("__", "Tensor.")) else "function"
        return f"{written!r} is a {kind}, and tables name operators. Write {operator!r}."
    return f"{written!r} is not an operator of PyTorch {torch.__version__}. {_suggestion(name)}."


def _found_in_python(name: str) -> Any:
    """Return the function, method or class that users mean by a name, None if there is none."""
    first, *others = name.split(".")
    places = (torch, torch.nn, torch.nn.functional, torch.Tensor)
    roots = [PLACES[first]] if first in PLACES else [getattr(place, first, None) for place in places]
    for root in roots:
        found: Any = root
        for other in others:
            found = getattr(found, other, None)
        if found is not None:
            return found
    return None


def _suggestion(name: str) -> str:
    """Return what to write instead of a name: operators like it, or an edit of modules."""
    known = [*USER_NAMES, *(base for base in _names() if not base.endswith(("_", "_backward")))]
    usable = sorted(
        {each for each in known if _is_name(each) and each.startswith("_") <= name.startswith("_")}
    )
    low = name.lower()
    same = [each for each in usable if each.lower() == low or each == SHORT.get(low)]
    longer = sorted((each for each in usable if len(low) > 2 and low in each), key=len)
    near = difflib.get_close_matches(name, usable, n=NEAREST, cutoff=0.75)
    far = difflib.get_close_matches(name, usable, n=NEAREST, cutoff=0.5)
    likely = list(dict.fromkeys([*same, *longer, *near]))
    operators = " or ".join(map(repr, likely[:NEAREST] or far)) or "a name that is in dir(torch.ops.aten)"
    if likely or not PATH.fullmatch(name):
        return f"Write {operators}"
    if name.rpartition(".")[2][:1].isupper():
        return f"Write {operators}; or, for a class of modules, .module('encoder.0', 'float32') with a path"
    return f"Write {operators}; or, for the module of that path, .module({name!r}, 'float32')"


def resolve(table: Casting) -> dict[str, Rule]:
    """Return the rule of each operator that a table names.

    Names that `missing` returns are left out.

    Raises:
        CastingError: for a name that stands for no operator, unless it comes from a table of ours: operators
            come and go with PyTorch's releases.
    """
    return _resolved(table, table.optional)[0]  # `optional` is not part of a table's equality


def missing(table: Casting) -> tuple[str, ...]:
    """Return the names in a table that come from ours and stand for no operator of the installed release.

    >>> missing(casting.DEFAULT.lower("softmax"))
    ()
    """
    return _resolved(table, table.optional)[1]


@cache
def _resolved(table: Casting, optional: tuple[str, ...]) -> tuple[dict[str, Rule], tuple[str, ...]]:
    resolved: dict[str, Rule] = {}
    absent: list[str] = []
    for name, rule in table.rules.items():
        if name in optional and name in _names().get(name.partition(".")[0], ()):
            resolved[name] = rule  # ours may be one overload of an operator
            continue
        try:
            for base in overloads(name):
                resolved.pop(base, None)  # the order is that of the edits
                resolved[base] = rule
        except CastingError:
            if name not in optional:
                raise
            absent.append(name)
    return resolved, tuple(absent)


@cache
def registered(device_type: str) -> frozenset[str]:
    """Return the overloads that the installed release casts, whether our tables name them or not."""
    names = compat.operators_with_kernel(dispatch_key(device_type))
    return frozenset(name.removeprefix("aten::") for name in names)


@cache
def listed(device_type: str) -> dict[str, Rule]:
    """Return the rule by which the installed release casts each operator.

    The rules are those of the tables in `preamp.casting`; device types without one have CUDA's.
    """
    rules = TABLES.get(device_type, casting.CUDA).rules
    names = {*registered(device_type), *(name.partition(".")[0] for name in registered(device_type))}
    return {name: rule for name, rule in rules.items() if name in names}
