"""Recurrent networks in Python, so that a mode sees their products. PyTorch's own call them in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

# The hidden state; of an LSTM, the hidden state and the cell state.
State: TypeAlias = tuple[Tensor, ...]


def _lstm(x: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    h, c = state
    input_gate, forget_gate, new, output_gate = (F.linear(h, w_hh, b_hh) + x).chunk(4, -1)
    c = forget_gate.sigmoid() * c + input_gate.sigmoid() * new.tanh()
    return output_gate.sigmoid() * c.tanh(), c


def _gru(x: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    (h,) = state
    x_reset, x_update, x_new = x.chunk(3, -1)
    h_reset, h_update, h_new = F.linear(h, w_hh, b_hh).chunk(3, -1)
    new = (x_new + h_new * (h_reset + x_reset).sigmoid()).tanh()
    return ((h - new) * (h_update + x_update).sigmoid() + new,)


def _rnn_tanh(x: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    return ((F.linear(state[0], w_hh, b_hh) + x).tanh(),)


def _rnn_relu(x: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    return ((F.linear(state[0], w_hh, b_hh) + x).relu(),)


# One step each, given the product of the input and its weight.
STEPS: dict[str, Callable[..., State]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn_tanh,
    "rnn_relu": _rnn_relu,
}
NAMES = frozenset([*STEPS, *(f"{name}_cell" for name in STEPS)])
# PyTorch's own go step by step on CPUs, too, and give the same numbers.
STEPWISE_ON_CPU = frozenset(["gru", "rnn_tanh", "rnn_relu"])


def step_by_step(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return what an operator of `NAMES` returns."""
    if name.endswith("_cell"):
        return _cell(name.removesuffix("_cell"), *args, **kwargs)
    is_packed = isinstance(args[1 if name == "lstm" else 2], Tensor)
    return (_packed if is_packed else _padded)(name, *args, **kwargs)


def _cell(
    name: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Return what a cell returns: its new state."""
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    state = STEPS[name](F.linear(input, w_ih, b_ih), state, w_hh, b_hh)
    return state if name == "lstm" else state[0]


def _padded(
    name: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return the output for sequences of one length, and the last states of all layers."""
    x = input.transpose(0, 1) if batch_first else input
    length, rows = x.shape[:2]
    if not length:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")  # as PyTorch's own
    dropout = dropout if train else 0.0
    data, sizes = x.flatten(0, 1), [rows] * length
    output, *states = _layers(name, data, sizes, hx, params, has_biases, num_layers, dropout, bidirectional)
    output = torch.unflatten(output, 0, (length, rows))
    return output.transpose(0, 1) if batch_first else output, *states


def _packed(
    name: str,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Return the output for packed sequences, and the last states of all layers."""
    dropout, sizes = dropout if train else 0.0, batch_sizes.tolist()
    return _layers(name, data, sizes, hx, params, has_biases, num_layers, dropout, bidirectional)


def _layers(
    name: str,
    data: Tensor,
    sizes: list[int],
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Return the output of a network, and the last states of all layers.

    Args:
        name: its kind.
        data: the inputs of all steps, one step after the other: (sum of `sizes`, features).
        sizes: the number of sequences that have each step, which never rises.
        hx: the first states, each of shape (layers * directions, sequences, features).
        params: the weights, then the biases, then the projection, of each layer and direction.
        has_biases: whether there are biases.
        num_layers: the number of layers.
        dropout: the probability that the next layer gets a zero for an output.
        bidirectional: whether each layer has a second direction.
    """
    firsts = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    directions = 2 if bidirectional else 1
    count = len(params) // (num_layers * directions)
    lasts: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = params[place * count : (place + 1) * count]
            first = tuple(each[place] for each in firsts)
            output, last = _layer(STEPS[name], data, sizes, first, weights, has_biases, direction == 1)
            outputs.append(output)
            lasts.append(last)
        data = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and layer < num_layers - 1:
            data = F.dropout(data, dropout)
    return data, *(torch.stack(states) for states in zip(*lasts, strict=True))


def _layer(
    step: Callable[..., State],
    data: Tensor,
    sizes: list[int],
    first: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    backwards: bool,
) -> tuple[Tensor, State]:
    """Return the output and the last state of one layer in one direction."""
    w_ih, w_hh, *others = weights
    b_ih, b_hh = others[:2] if has_biases else (None, None)
    projection = others[2 if has_biases else 0 :]
    inputs = torch.split(F.linear(data, w_ih, b_ih), sizes)
    outputs: list[Tensor] = []
    ended: list[State] = []
    state = tuple(each[: sizes[-1 if backwards else 0]] for each in first)
    for x in reversed(inputs) if backwards else inputs:
        rows, before = len(x), len(state[0])
        if rows < before:  # the shortest sequences have ended
            ended.append(tuple(each[rows:] for each in state))
            state = tuple(each[:rows] for each in state)
        elif rows > before:  # from the end, the shortest sequences begin last
            new = tuple(each[before:rows] for each in first)
            state = tuple(torch.cat(parts) for parts in zip(state, new, strict=True))
        h, *c = step(x, state, w_hh, b_hh)
        state = (F.linear(h, projection[0]) if projection else h, *c)
        outputs.append(state[0])
    if ended:
        state = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(outputs[::-1] if backwards else outputs), state
