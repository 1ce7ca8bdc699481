"""Find operators of PyTorch's dispatcher: by the names that users write, and by the rule that they have."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
def keys_below(device_type: str) -> torch.DispatchKeySet:
    """Return the set of dispatch keys that come after a device type's autocast."""
    return compat.keys_after(getattr(compat.DispatchKey, dispatch_key(device_type)))


@cache
def _names() -> dict[str, list[str]]:
    """Return the overloads of each of aten's operators."""
    names: dict[str, list[str]] = {}
    for full in sorted(compat.all_operators()):
        namespace, _, name = full.partition("::")
        if namespace == "aten":
            names.setdefault(name.partition(".")[0], []).append(name)
    return names


def empty_library() -> torch.library.Library:
    """Return a library, with which kernels are registered and removed."""
    return torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def put(library: torch.library.Library, name: str, key: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel of an operator at a dispatch key.

    `torch.func` wraps numbers in tensors of its own, which cannot be passed to a kernel in Python: where
    there is an overload for numbers, that is called instead.
    """
    _trigger_override_warning()
    compat.put_kernel(library, name, kernel, key)
    if with_number(name) and (by_type := _by_type_of_second(name, TORCH_FUNC)):
        compat.put_kernel(library, name, by_type, TORCH_FUNC)


@cache
def with_number(name: str) -> Any:
    """Return the overload for numbers of an operator to which Python passes numbers as tensors; else None."""
    base, _, overload = name.partition(".")
    packet, sibling = getattr(torch.ops.aten, base), overload.replace("Tensor", "Scalar")
    if not overload.startswith("Tensor") or sibling not in packet.overloads():
        return None
    types = [str(argument.type) for argument in getattr(packet, sibling)._schema.arguments[:2]]
    return getattr(packet, sibling) if types == ["Tensor", "number"] else None


@cache
def _by_type_of_second(name: str, key: str) -> Callable[..., Any] | None:
    as_number, as_tensor = with_number(name), compat.kernel_at(f"aten::{name}", key)
    if as_tensor is None:
        return None

    @compat.untraced
    def kernel(keyset: torch.DispatchKeySet, *args: object, **kwargs: object) -> object:
        if isinstance(args[1], Tensor):
            return as_tensor(keyset, *args, **kwargs)
        return as_number(*args, **kwargs)

    return kernel


@cache
def _trigger_override_warning() -> None:
    """Trigger, with warnings ignored, PyTorch's once-only warning of a kernel that replaces another."""
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
    """Return a function that calls an operator; `find`'s object takes half as long again."""
    operator, sibling = find(name)._op, with_number(name)
    if sibling is None or compat.takes_numbers_as_tensors(name.partition(".")[0]):
        return operator
    of_number = sibling._op

    @compat.untraced
    def either(first: Tensor, second: Tensor | float, *args: object, **kwargs: object) -> object:
        run = operator if isinstance(second, Tensor) else of_number
        return run(first, second, *args, **kwargs)

    return either


def is_composite(name: str) -> bool:
    """Return whether an operator is composed of others, which pass through the dispatcher in turn."""
    return compat.has_kernel(f"aten::{name}", "CompositeImplicitAutograd")


@cache
def without_autocast(name: str, device_type: str) -> Callable[..., Any]:
    """Return a kernel that runs an operator, and all that it calls, as if autocast were off."""
    function, switch = call(name), torch.set_autocast_enabled

    @compat.untraced
    def run(_: object, /, *args: object, **kwargs: object) -> object:
        switch(device_type, False)
        try:
            return function(*args, **kwargs)
        finally:
            switch(device_type, True)

    return run


@cache
def overloads(name: str) -> tuple[str, ...]:
    """Return the operators that a name stands for, apart from those that autocast never casts.

    It never casts in-place variants, those with `out=` and those with a dtype among their arguments.
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


def _is_eligible(schema: torch.FunctionSchema) -> bool:
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    takes_dtype = any(str(a.type) == "int" and a.name.endswith("dtype") for a in schema.arguments)
    return takes_tensors and not schema.is_mutable and not takes_dtype


def _unknown(name: str) -> str:
    base, _, overload = name.partition(".")
    if overload and base in _names() and name not in _names()[base]:
        others = " or ".join(map(repr, _eligible(base)[:NEAREST])) or repr(base)
        return f"{base!r} has no overload {overload!r} in PyTorch {torch.__version__}. Write {others}."
    if base in _names():
        return (
            f"{name!r} never goes through autocast: it works in place, takes a dtype or takes no tensors. "
            "Write the name of an operator that returns a new tensor."
        )
    everything = {*USER_NAMES, *(base for base in _names() if not base.endswith(("_", "_backward")))}
    near = difflib.get_close_matches(name, sorted(everything), n=NEAREST, cutoff=0.5)
    hint = f"Write {' or '.join(map(repr, near))}" if near else "Write a name that is in dir(torch.ops.aten)"
    return f"{name!r} is not an operator of PyTorch {torch.__version__}. {hint}."


def resolve(table: Casting) -> dict[str, Rule]:
    """Return the rule of each overload that a table names.

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
    """Return the operators that the installed release casts, whether our tables name them or not."""
    names = compat.operators_with_kernel(dispatch_key(device_type))
    return frozenset(name.removeprefix("aten::") for name in names)


@cache
def listed(device_type: str) -> dict[str, Rule]:
    """Return the rule by which the installed release casts each overload.

    The rules are those of the tables in `preamp.casting`; device types without one have CUDA's.
    """
    rules = TABLES.get(device_type, casting.CUDA).rules
    return {
        name: rules.get(name) or rules[name.partition(".")[0]]
        for name in sorted(registered(device_type))
        if name in rules or name.partition(".")[0] in rules
    }
