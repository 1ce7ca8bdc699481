"""Which operators of the dispatcher a name stands for.

The only room that reads the dispatcher's lists and keys.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from preamp.arrays import torch_compat as compat
from preamp.autocasting import tables as casting
from preamp.autocasting.tables import Casting, Rule
from preamp.errors import CastingError

# What users write, where it is not the name of one operator.
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
    "norm": "norm linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm",
    "normalize": "linalg_vector_norm",
    "rms_norm": "rms_norm _fused_rms_norm",
    "softmax": "softmax _softmax",
    "softmin": "softmax _softmax",
    "upsample": "interpolate",
}
TORCH_FUNC = "FuncTorchDynamicLayerFrontMode"  # the dispatch key of torch.func
TABLES = {"cpu": casting.CPU, "cuda": casting.CUDA}
NEAREST = 3


def dispatch_key(device_type: str) -> str:
    """Return the name of the dispatch key of a device type's autocast."""
    names = {"privateuseone": "PrivateUse1", compat.name_of_private_device(): "PrivateUse1"}
    return "Autocast" + names.get(device_type, device_type.upper())


def has_autocast(device_type: str) -> bool:
    """Return whether PyTorch has a dispatch key for a device type's autocast."""
    return hasattr(compat.DispatchKey, dispatch_key(device_type))


@cache
def keys_below(device_type: str) -> Any:
    """Return the set of dispatch keys that come after a device type's autocast."""
    return compat.keys_after(getattr(compat.DispatchKey, dispatch_key(device_type)))


@cache
def _names() -> dict[str, list[str]]:
    """Return the names of aten's operators, overloads by operator."""
    names: dict[str, list[str]] = {}
    for full in sorted(compat.all_operators()):
        namespace, _, name = full.partition("::")
        if namespace == "aten":
            names.setdefault(name.partition(".")[0], []).append(name)
    return names


def empty_library() -> Any:
    """Return what kernels are put into the dispatcher with, and taken out of it."""
    return torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def put(library: Any, name: str, key: str, kernel: Callable[..., Any]) -> None:
    """Put a kernel of an operator in the dispatcher, at a dispatch key.

    `torch.func` makes tensors of its own of numbers, which no kernel in Python can be given: where there is
    an overload for numbers, that is called.
    """
    _silence()
    compat.put_kernel(library, name, kernel, key)
    if with_number(name) and (apart := _numbers_apart(name, TORCH_FUNC)):
        compat.put_kernel(library, name, apart, TORCH_FUNC)


@cache
def with_number(name: str) -> Any:
    """Return the overload for a number of an operator that Python gives numbers as tensors; else None."""
    base, _, overload = name.partition(".")
    packet, sibling = getattr(torch.ops.aten, base), overload.replace("Tensor", "Scalar")
    if not overload.startswith("Tensor") or sibling not in packet.overloads():
        return None
    types = [str(argument.type) for argument in getattr(packet, sibling)._schema.arguments[:2]]
    return getattr(packet, sibling) if types == ["Tensor", "number"] else None


@cache
def _numbers_apart(name: str, key: str) -> Callable[..., Any] | None:
    as_number, as_tensor = with_number(name), compat.kernel_at(f"aten::{name}", key)
    if as_tensor is None:
        return None

    @compat.untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[1], torch.Tensor):
            return as_tensor(keyset, *args, **kwargs)
        return as_number(*args, **kwargs)

    return kernel


@cache
def _silence() -> None:
    """Trigger PyTorch's once-only warning of a kernel that replaces another while warnings are ignored."""
    library = torch.library.Library("preamp", "DEF")  # type: ignore[no-untyped-call]
    library.define("hush() -> ()")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(action="ignore"):
        for _ in range(2):
            compat.put_kernel(library, "hush", lambda _: None, "CPU")


@cache
def find(name: str) -> Any:
    """Return the operator of a name such as "mm" or "softmax.int"."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


@cache
def call(name: str) -> Any:
    """Return what calls an operator: PyTorch's own object in between takes half as long again."""
    operator, sibling = find(name)._op, with_number(name)
    if sibling is None or compat.takes_numbers_as_tensors(name.partition(".")[0]):
        return operator
    of_number = sibling._op

    @compat.untraced
    def either(first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        run = operator if isinstance(second, torch.Tensor) else of_number
        return run(first, second, *args, **kwargs)

    return either


def is_composite(name: str) -> bool:
    """Return whether an operator is made of others, which the dispatcher sees in turn."""
    return compat.has_kernel(f"aten::{name}", "CompositeImplicitAutograd")


@cache
def without_autocast(name: str, device_type: str) -> Callable[..., Any]:
    """Return an operator that runs, with all that it calls, as if autocast were off.

    It is called with the set of dispatch keys before its own arguments, and has no use for them.
    """
    function, switch = call(name), torch.set_autocast_enabled

    @compat.untraced
    def run(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        switch(device_type, False)
        try:
            return function(*args, **kwargs)
        finally:
            switch(device_type, True)

    return run


@cache
def overloads(name: str) -> tuple[str, ...]:
    """Return the operators that a name stands for: those that autocast can be asked about.

    In-place variants, those with `out=` and those that are told their dtype never are.

    Raises:
        CastingError: for a name that stands for none, with the nearest ones.
    """
    known, name = _names(), name.removeprefix("aten::").removeprefix("aten.").removeprefix("torch.")
    if name in USER_NAMES:
        bases = [base for base in USER_NAMES[name].split() if base in known or base in USER_NAMES]
        return tuple(
            dict.fromkeys(
                full for base in bases for full in (_eligible(base) if base in known else overloads(base))
            )
        )
    base = name.partition(".")[0]
    eligible = [full for full in _eligible(base) if name in (base, full)] if base in known else []
    if not eligible:
        raise CastingError(_unknown(name))
    return tuple(eligible)


def _eligible(base: str) -> list[str]:
    return [name for name in _names()[base] if _is_eligible(find(name)._schema)]


def _is_eligible(schema: Any) -> bool:
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    told_dtype = any(str(a.type) == "int" and a.name.endswith("dtype") for a in schema.arguments)
    return takes_tensors and not schema.is_mutable and not told_dtype


def _unknown(name: str) -> str:
    base, _, overload = name.partition(".")
    if overload and base in _names() and name not in _names()[base]:
        others = " or ".join(map(repr, _eligible(base)[:NEAREST])) or repr(base)
        return f"{base!r} has no overload {overload!r} in PyTorch {torch.__version__}. Write {others}."
    if base in _names():
        return (
            f"{name!r} never goes through autocast: it works in place, is told its dtype or takes no "
            "tensors. Write the name of an operator that returns a new tensor."
        )
    everything = {*USER_NAMES, *(base for base in _names() if not base.endswith(("_", "_backward")))}
    near = difflib.get_close_matches(name, sorted(everything), n=NEAREST, cutoff=0.5)
    hint = f"Write {' or '.join(map(repr, near))}" if near else "Write a name that is in dir(torch.ops.aten)"
    return f"{name!r} is no operator of PyTorch {torch.__version__}. {hint}."


def resolve(table: Casting) -> dict[str, Rule]:
    """Return a table by operators: overload to rule.

    Names that `missing` returns are left out.

    Raises:
        CastingError: for a name that stands for no operator, unless it comes from a table of ours: operators
            come and go with PyTorch's releases.
    """
    return _resolved(table, table.optional)[0]  # which equal tables may differ in


def missing(table: Casting) -> tuple[str, ...]:
    """Return the names that a table has from ours, and that stand for no operator of the installed release.

    >>> missing(casting.DEFAULT.lower("softmax"))
    ()

    Raises:
        CastingError: for another name that stands for no operator.
    """
    return _resolved(table, table.optional)[1]


@cache
def _resolved(table: Casting, optional: frozenset[str]) -> tuple[dict[str, Rule], tuple[str, ...]]:
    resolved: dict[str, Rule] = {}
    absent: list[str] = []
    for name, rule in table.rules.items():
        try:
            resolved |= dict.fromkeys(overloads(name), rule)
        except CastingError:
            if name not in optional:
                raise
            absent.append(name)
    return resolved, tuple(absent)


@cache
def registered(device_type: str) -> frozenset[str]:
    """Return the operators that the installed release casts for, whether our tables name them or not."""
    names = compat.operators_with_kernel(dispatch_key(device_type))
    return frozenset(name.removeprefix("aten::") for name in names)


@cache
def listed(device_type: str) -> dict[str, Rule]:
    """Return what the installed release does by itself: overload to rule.

    Rules are those of the tables in `preamp.casting`; on device types without one, None is known of them.
    """
    rules = TABLES.get(device_type, casting.CUDA).rules
    return {
        name: rules.get(name) or rules[name.partition(".")[0]]
        for name in sorted(registered(device_type))
        if name in rules or name.partition(".")[0] in rules
    }
