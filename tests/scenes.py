"""Models and training steps that several test files use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState, edgc_hook

SMALL_BUCKETS_MB = 0.004


class Given(nn.Module):
    """A model whose gradients are whatever the test says: loss = sum of parameter * gradient."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(tuple(shape), dtype=dtype)) for shape in shapes
        )

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        terms = [(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]
        return torch.stack(terms).sum()


def wrap(
    model: nn.Module, state: EDGCState | None, bucket_cap_mb: float = 25, **options: object
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)  # type: ignore
    if state is not None:
        ddp.register_comm_hook(state, edgc_hook)
    return ddp


def averages(ddp: DistributedDataParallel, gradients: Sequence[Tensor]) -> list[Tensor]:
    """One backward; what DDP leaves in ``.grad``."""
    ddp.zero_grad()
    ddp(gradients).backward()
    return [p.grad.clone() for p in ddp.module.parameters()]  # type: ignore[union-attr]


def draw(shapes: Sequence[Sequence[int]], seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(tuple(shape), generator=generator) for shape in shapes]


def plain_mean(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every rank's tensors averaged by a plain collective."""
    means = []
    for tensor in tensors:
        mean = tensor.clone()
        dist.all_reduce(mean)
        means.append(mean / dist.get_world_size())
    return means


class Mlp(nn.Module):
    """A real little network: many layers, so many buckets."""

    def __init__(self, width: int = 32, depth: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def train_step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = ddp(x).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def fingerprint(model: nn.Module) -> bytes:
    """All parameters, to the last bit."""
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def seeded(step: int, rank: int) -> torch.Generator:
    """Data that differ between ranks and steps and are the same in every run."""
    return torch.Generator().manual_seed(1000 * step + rank)
