"""The GPT cut into pipeline stages, parameters under the names they have in the whole model.

Shape suffixes: B batch, T context, C width, V = 256 bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgc_ddp.train.model import GPT

TIED = "tokens.weight"
"""The weight that the first stage embeds with and the last one reads out with: one on each."""


def blocks_of(stage: int, stages: int, layers: int) -> range:
    """The blocks of one stage: contiguous, as equal in number as they can be.

    >>> [list(blocks_of(stage, 3, 7)) for stage in range(3)]
    [[0, 1], [2, 3], [4, 5, 6]]
    """
    return range(stage * layers // stages, (stage + 1) * layers // stages)


class Stage(nn.Module):
    """Part ``stage`` of ``stages`` of a whole model, whose modules it takes over.

    The first takes bytes (B, T), the others the stream (B, T, C); the last gives logits (B, T, V), the
    others the stream in float32, whatever autocast does inside.
    """

    def __init__(self, whole: GPT, stage: int, stages: int, bf16: bool = False) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.bf16 = bf16
        if self.is_first or self.is_last:
            self.tokens = whole.tokens
        if self.is_first:
            self.positions = whole.positions
        places = blocks_of(stage, stages, len(whole.blocks))
        self.blocks = nn.ModuleDict({str(place): whole.blocks[place] for place in places})
        if self.is_last:
            self.norm = whole.norm

    def forward(self, x: Tensor) -> Tensor:
        """From what the stage before gives to what the stage after takes."""
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            if self.is_first:
                time = torch.arange(x.shape[1], device=x.device)
                x = self.tokens(x) + self.positions(time)
            for block in self.blocks.values():
                x = block(x)
            if self.is_last:
                return F.linear(self.norm(x), self.tokens.weight).float()
        return x.float()
