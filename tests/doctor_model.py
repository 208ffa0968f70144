"""A model of a user's own, as ``python -m edgc_ddp.doctor --model doctor_model:make`` wants it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make(device: torch.device, batch: int) -> tuple[nn.Module, object]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def loss(module: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        mean: Tensor = module(torch.randn(batch, 32, generator=generator).to(device)).mean()
        return mean

    return model, loss


NOT_A_FUNCTION = 3
