"""How far a sampler's probabilities are from the trainer's in float32, float16 and bfloat16.

Run: python benchmarks/rl_mismatch.py [--seeds 6] [--first-seed 0] [--steps 40]

One tiny transformer is computed by two programs, as in reinforcement learning of language models. The sampler
holds the weights in its precision and decodes token by token with a cache of keys and values, as vLLM does;
it computes norms, attention and activations in float32 and rounds their results. The trainer has float32
weights, which it casts to its precision, as FSDP does, and reads whole sequences at once; it rounds after
every operation. Both take log-probabilities in float32. In exact arithmetic they would be the same.

The policy is trained with GRPO's advantages and one step a batch, with `GradScaler` where the trainer
computes in float16. The reward is the share of tokens that are one to four letters after the one before. All
runs share their seeds: of the weights, and of the draws.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import gelu

from preamp.record.mismatch import Mismatch
from preamp.torch import GradScaler, mismatch

When: TypeAlias = Literal["first", "average"]  # the fields of `Run`


class Pair(NamedTuple):
    """The precisions of a trainer and of the sampler."""

    trainer: torch.dtype
    sampler: torch.dtype


PAIRS = {
    "float32": Pair(torch.float32, torch.float32),
    "float16": Pair(torch.float16, torch.float16),
    "bfloat16": Pair(torch.bfloat16, torch.bfloat16),
    "float16, sampled in bfloat16": Pair(torch.float16, torch.bfloat16),
}
ORDER = ("float32", "float16", "bfloat16")  # from the smallest mismatch to the largest
VOCABULARY, WIDTH, HEADS, LAYERS = 64, 64, 4, 3
LENGTH, GROUPS, GROUP = 24, 4, 8  # tokens drawn after the first, prompts, and sequences drawn for each
LEARNING_RATE, FARTHEST = 6e-3, 4
SHOWN = {"k3": "KL, k3", "mean_abs_diff": "mean difference", "max_abs_diff": "largest difference"}


class Block(nn.Module):
    """One pre-norm layer of a transformer: attention and a dense network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, each of shape [sequences, heads, tokens, width of a head]."""
        parts = self.attend(x).chunk(3, -1)
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]


class Policy(nn.Module):
    """A decoder: tokens in, the logits of the next ones out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of whole sequences, every result rounded: the trainer's way."""
        count = tokens.shape[1]
        x = self.tokens(tokens) + self.places.weight[:count]
        future = torch.full((count, count), -math.inf).triu(1).to(x.dtype)
        for block in self.blocks:
            queries, keys, values = block.heads(block.first(x))
            scores = queries @ keys.transpose(-1, -2) / math.sqrt(WIDTH / HEADS) + future
            attended = (scores.softmax(-1) @ values).transpose(1, 2).flatten(-2)
            x = x + block.join(attended)
            x = x + block.down(gelu(block.up(block.second(x))))
        return self.out(self.last(x))

    def decode(self, token: Tensor, place: int, cache: list[list[Tensor]]) -> Tensor:
        """Return the logits after one more token of each sequence: the sampler's way.

        Args:
            token: one of each sequence.
            place: how many came before.
            cache: of each layer the keys and values of these, to which the new ones are added.
        """
        x = self.tokens(token)[:, None] + self.places.weight[place]
        for block, kept in zip(self.blocks, cache, strict=True):
            queries, *new = block.heads(norm(block.first, x))
            kept[:] = [torch.cat(pair, 2) for pair in zip(kept, new, strict=True)] if kept else new
            keys, values = (one.float() for one in kept)
            scores = (queries.float() / math.sqrt(WIDTH / HEADS) * keys).sum(-1, keepdim=True)
            attended = (scores.softmax(2) * values).sum(2, keepdim=True).to(x.dtype)
            x = x + block.join(attended.transpose(1, 2).flatten(-2))
            x = x + block.down(gelu(block.up(norm(block.second, x)).float()).to(x.dtype))
        return self.out(norm(self.last, x))[:, 0]


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    wide = nn.functional.layer_norm(x.float(), (WIDTH,), layer.weight.float(), layer.bias.float(), layer.eps)
    return wide.to(x.dtype)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@torch.no_grad()
def sample(policy: Policy, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences with their first token, and the log-probabilities of those that were drawn."""
    tokens = [torch.randint(VOCABULARY, (GROUPS,), generator=draw).repeat_interleave(GROUP)]
    cache: list[list[Tensor]] = [[] for _ in policy.blocks]
    drawn = []
    for place in range(LENGTH):
        logits = policy.decode(tokens[-1], place, cache)
        uniform = torch.rand(logits.shape, generator=draw)
        tokens.append(
            (logits.float() - (-uniform.log()).log()).argmax(-1)
        )  # Gumbel's way to draw from a softmax
        drawn.append(log_probabilities(logits, tokens[-1]))
    return torch.stack(tokens, 1), torch.stack(drawn, 1)


def rewards(tokens: Tensor) -> Tensor:
    steps = (tokens[:, 1:] - tokens[:, :-1]) % VOCABULARY
    return ((steps > 0) & (steps <= FARTHEST)).float().mean(1)


class Run(NamedTuple):
    """A training: the mismatch at its first step and on average, the final reward, and the skipped steps."""

    first: Mismatch[float]
    average: Mismatch[float]
    reward: float
    skips: int


def train(pair: Pair, seed: int, steps: int) -> Run:
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    policy, sampler = Policy(), Policy().to(pair.sampler)
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE)
    scaler = GradScaler("cpu", growth_interval=400, enabled=pair.trainer == torch.float16)
    measured, gains, skips = [], [], 0
    for _ in range(steps):
        sampler.load_state_dict(policy.state_dict())  # in the sampler's precision
        tokens, drawn = sample(sampler, draw)
        cast = {name: one.to(pair.trainer) for name, one in policy.named_parameters()}
        logp = log_probabilities(functional_call(policy, cast, tokens[:, :-1]), tokens[:, 1:])
        measured.append([float(value) for value in mismatch(logp, drawn)])
        reward = rewards(tokens)
        gains.append(float(reward.mean()))
        groups = reward.view(GROUPS, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        optimizer.zero_grad()
        scaler.scale(-(advantages.view(-1, 1) * logp).mean()).backward()
        scaler.step(optimizer, max_norm=1.0)
        skips += scaler.last_step.skipped if scaler.last_step else 0
        scaler.update()
    average = Mismatch(*map(float, np.mean(measured, 0)))
    return Run(Mismatch(*measured[0]), average, float(np.mean(gains[-5:])), skips)


def with_error(values: Sequence[float]) -> str:
    """Return the mean of a number over seeds and its standard error, such as "(1.50 ± 0.02)e-3"."""
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    power = math.floor(math.log10(mean)) if mean else 0
    if power >= -1:
        return f"{mean:.2f} ± {error:.2f}"
    return f"({mean / 10.0**power:.2f} ± {error / 10.0**power:.2f})e{power}"


def values_of(runs: Sequence[Run], when: When, field: str) -> list[float]:
    """Return one field of the mismatch for each seed."""
    return [getattr(getattr(run, when), field) for run in runs]


def table(runs: dict[str, list[Run]], when: When) -> Iterator[str]:
    """Yield the lines of a table of means over seeds; rewards only for what was measured in training."""
    trained = when == "average"
    yield f"| | {' | '.join(SHOWN.values())} |" + " reward | skipped |" * trained
    yield "| --- |" + " ---: |" * (len(SHOWN) + 2 * trained)
    for name, found in runs.items():
        cells = [with_error(values_of(found, when, field)) for field in SHOWN]
        if trained:
            cells += [with_error([run.reward for run in found]), str(sum(run.skips for run in found))]
        yield f"| {name} | {' | '.join(cells)} |"


def rounded(value: float) -> str:
    """Return a number with two digits, as 8.3 or 2,100,000."""
    return f"{float(f'{value:.2g}'):,.{0 if value >= 9.95 else 1}f}"


def factors(runs: dict[str, list[Run]], when: When) -> Iterator[str]:
    """Yield a table of ratios of the mismatch: geometric mean over seeds, least and most."""
    yield f"| | {' | '.join(SHOWN.values())} |"
    yield "| --- |" + " ---: |" * len(SHOWN)
    for low, high in pairwise(ORDER):
        cells = []
        for field in SHOWN:
            pairs = zip(values_of(runs[high], when, field), values_of(runs[low], when, field), strict=True)
            ratios = [a / b for a, b in pairs]
            typical, least, most = map(rounded, (statistics.geometric_mean(ratios), min(ratios), max(ratios)))
            cells.append(f"{typical} ({least} to {most})")
        yield f"| {high} / {low} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start, seeds = time.perf_counter(), range(given.first_seed, given.first_seed + given.seeds)
    runs = {name: [train(pair, seed, given.steps) for seed in seeds] for name, pair in PAIRS.items()}
    titles: dict[When, str] = {"first": "Before training", "average": f"Average of {given.steps} steps"}
    for when, title in titles.items():
        print(f"\n{title}, {given.seeds} seeds: mean ± standard error\n")
        print("\n".join((*table(runs, when), "", *factors(runs, when))))
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
