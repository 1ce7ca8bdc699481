"""Models as users have them, so small that they compile in a second or two, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS = 19, 8, 2


class Block(nn.Module):
    """A block of a ResNet, with a residual."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.act = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.act(out)


class ResNet(nn.Module):
    """A ResNet with the names of timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 8, 2))
        self.global_pool, self.fc = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        return self.fc(self.global_pool(self.layer2(self.layer1(x))))


class Einsum(nn.Module):
    """Attention with a residual, written with einsum or PyTorch's fused operator."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.RMSNorm(WIDTH),
        )
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = parts.unbind(2)
        if self.fused:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            mixed = torch.einsum("bhqk,bkhd->bqhd", F.softmax(scores, -1), v)
        return x + self.out(mixed.flatten(2))


class Experts(nn.Module):
    """A mixture of experts: each token goes to the best two, and the results are added up by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates, chosen = F.softmax(self.router(tokens), -1).topk(2)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            gate = (gates * (chosen == number)).sum(-1, keepdim=True)
            rows = torch.arange(tokens.shape[0], device=x.device)
            result = result.index_add(0, rows, (expert(tokens) * gate).to(result.dtype))
        return x + result.view_as(x)


class Tied(nn.Module):
    """A language model whose embedding is the weight of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), Einsum(fused=True)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.body(self.embed(ids)))


def _llama(attention: str) -> nn.Module:
    hub = pytest.importorskip("transformers")  # which no row of tests/matrix.py has
    config = hub.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=2, use_cache=False,
        num_attention_heads=HEADS, num_key_value_heads=1, max_position_embeddings=16, pad_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    return hub.LlamaForCausalLM(config)


def _ids(rows: int = 2) -> Tensor:
    return torch.randint(1, WORDS, (rows, 6), generator=torch.Generator().manual_seed(3))


def _tokens(rows: int = 2) -> Tensor:
    return torch.randn(rows, 6, WIDTH, generator=torch.Generator().manual_seed(3))


def _images(rows: int = 2) -> Tensor:
    return torch.randn(rows, 3, 12, 12, generator=torch.Generator().manual_seed(3))


def _logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


class Example:
    """A model, what it is called with, and how.

    Attributes:
        make: returns a model.
        batch: returns a batch of so many rows.
        call: calls the model with a batch and returns a tensor.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        batch: Callable[[int], Tensor],
        call: Callable[[Any, Tensor], Tensor],
    ) -> None:
        self._make, self.batch, self.call = make, batch, call

    def make(self) -> nn.Module:
        """Return the model, with the same parameters each time."""
        torch.manual_seed(0)
        return self._make()


def _plain(model: Any, x: Tensor) -> Tensor:
    return model(x)


EXAMPLES = {
    "llama sdpa": Example(lambda: _llama("sdpa"), _ids, _logits),
    "resnet": Example(ResNet, _images, _plain),
    "einsum": Example(Einsum, _tokens, _plain),
    "attention": Example(lambda: Einsum(fused=True), _tokens, _plain),
    "encoder layer": Example(
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True), _tokens, _plain
    ),
    "experts": Example(Experts, _tokens, _plain),
    "tied": Example(Tied, _ids, _plain),
}
