"""A byte-level GPT-2: pre-norm blocks, learned positions, output weights tied to the embedding.

Shape suffixes: B batch, T context, C width, H heads, D = C / H, V = 256 bytes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgc_ddp.train.schema import ModelConfig

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention over ``heads`` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        batch, time, width = x_BTC.shape
        split = self.qkv(x_BTC).view(batch, time, 3, self.heads, width // self.heads)
        q_BHTD, k_BHTD, v_BHTD = split.permute(2, 0, 3, 1, 4)
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        mixed_BTC = mixed_BHTD.transpose(1, 2).reshape(batch, time, width)
        return self.out(mixed_BTC)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a 4x wide GELU layer, each added to the stream after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC))
        wide_BT4C = F.gelu(self.up(self.norm2(x_BTC)), approximate="tanh")
        return x_BTC + self.down(wide_BT4C)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Build it with :func:`build`, which sets the weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Logits (B, T, V) from int64 bytes (B, T), T at most the context."""
        time = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTC = self.tokens(bytes_BT) + self.positions(time)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return F.linear(self.norm(x_BTC), self.tokens.weight)


def skeleton(config: ModelConfig) -> GPT:
    """The model without memory behind its weights (meta device): names and shapes only."""
    with torch.device("meta"):
        return GPT(config)


def build(config: ModelConfig, seed: int, device: torch.device) -> GPT:
    """The model with GPT-2's initial weights: equal for equal seeds, on every rank.

    Weights are N(0, 0.02^2); those that write into the residual stream are smaller by
    sqrt(2 layers), since the stream sums that many of them. Drawn on the CPU from a generator of
    its own, so the device does not matter and torch's global random state is left alone.

    >>> model = build(ModelConfig(width=8, layers=1, heads=2, context=4), 0, torch.device("cpu"))
    >>> model(torch.zeros(1, 4, dtype=torch.int64)).shape
    torch.Size([1, 4, 256])
    """
    model = skeleton(config).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    small = 0.02 / math.sqrt(2 * config.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                std = small if name.endswith(("out.weight", "down.weight")) else 0.02
                parameter.normal_(0.0, std, generator=generator)
            else:
                is_norm_scale = "norm" in name and name.endswith("weight")
                parameter.fill_(1.0 if is_norm_scale else 0.0)
    return model.to(device)


def shapes(model: nn.Module) -> dict[str, list[int]]:
    """Every parameter's shape by name.

    >>> shapes(nn.Linear(2, 3))
    {'weight': [3, 2], 'bias': [3]}
    """
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}
