"""Recurrent networks in Python, so that a mode sees their products. PyTorch's own call them in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from preamp.arrays.torch_compat import decomposition

# PyTorch's own functions: for padded sequences, and for packed ones.
LAYERS = {
    "lstm": ("lstm_impl", "lstm_data_impl"),
    "gru": ("gru_impl", "gru_impl_data"),
    "rnn_tanh": ("rnn_tanh_input", "rnn_tanh_data"),
    "rnn_relu": ("rnn_relu_input", "rnn_relu_data"),
}
NAMES = frozenset([*LAYERS, *(f"{name}_cell" for name in LAYERS)])


def step_by_step(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return what an operator of `NAMES` returns."""
    if name.endswith("_cell"):
        return _cell(name.removesuffix("_cell"), *args, **kwargs)
    is_packed = isinstance(args[1 if name == "lstm" else 2], Tensor)
    return decomposition(LAYERS[name][is_packed])(*args, **kwargs)


def _cell(
    name: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Return what a cell returns: a layer of one step."""
    state: Any = hx[None] if isinstance(hx, Tensor) else [one[None] for one in hx]
    weights = [one for one in (w_ih, w_hh, b_ih, b_hh) if one is not None]
    layer: Callable[..., Any] = decomposition(LAYERS[name][0])
    _, *new = layer(input[None], state, weights, b_ih is not None, 1, 0.0, False, False, False)
    return tuple(one[0] for one in new) if name == "lstm" else new[0][0]
