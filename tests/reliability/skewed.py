"""Skewed data for very long: several ranks in one process, each pulling elsewhere for ever.

    python tests/reliability/skewed.py [--steps 100000]

Prints one line of figures; exits 1 when a residual grows without bound or something was lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgc_ddp.memory import ParameterMemory, Slot
from edgc_ddp.reducers.bucket import Bucket, Settings
from edgc_ddp.reducers.low_rank import reduce_low_rank

WORLD, SIDES, RANK = 3, (8, 12), 1
CPU = torch.device("cpu")
BOUND = 30.0
"""Largest residual, in norms of one rank's gradient; plain sums would reach the number of steps."""


@dataclass
class Together:
    """The lanes of all ranks: a sum is done once every rank has given its part."""

    world_size: int
    device: torch.device = CPU

    def all_reduce(self, tensor: Tensor, channel: int) -> Tensor:
        return tensor


def average(tasks: list[Generator[Tensor, None, Tensor]]) -> list[Tensor]:
    """All ranks' reductions of one bucket, side by side from collective to collective."""
    while True:
        parts, ends = [], []
        for task in tasks:
            try:
                parts.append(next(task))
            except StopIteration as finished:
                ends.append(finished.value)
        if ends:
            return ends
        total = torch.stack(parts).sum(0)
        for part in parts:
            part.copy_(total)


def run(steps: int, wire: torch.dtype = torch.float32) -> dict[str, Any]:
    """Largest residuals of both halves, in gradient norms, and what was lost of all that was given."""
    generator = torch.Generator().manual_seed(0)
    size = SIDES[0] * SIDES[1]
    memories = []
    for _ in range(WORLD):
        memory = ParameterMemory(0, torch.float32)
        memory.slots["w"] = Slot("w", size, SIDES, index=0)
        memory.set_rank(memory.slots["w"], RANK, CPU)
        memories.append(memory)
    lane, settings = Together(WORLD), Settings(wire, True, 0.0)
    own_WX = 10 * torch.randn(WORLD, size, generator=generator)
    given, received = torch.zeros(size).double(), torch.zeros(size).double()
    largest = [0.0, 0.0]
    for step in range(steps):
        gradient_WX = own_WX + torch.randn(WORLD, size, generator=generator)
        given += gradient_WX.double().mean(0)
        buckets = [
            Bucket(gradient.clone(), (memory.slots["w"],))
            for gradient, memory in zip(gradient_WX, memories, strict=True)
        ]
        tasks: list[Any] = [
            reduce_low_rank(bucket, lane, settings, memory, None)  # type: ignore[arg-type]
            for bucket, memory in zip(buckets, memories, strict=True)
        ]
        averages = average(tasks)
        assert all(torch.equal(other, averages[0]) for other in averages), f"ranks differ at {step}"
        received += averages[0].double()
        if step % 50 == 0 or step == steps - 1:
            half = 2 * step // steps
            largest[half] = max(largest[half], *(_residual(m).norm().item() for m in memories))
    owed = torch.stack([_residual(memory) for memory in memories]).double().mean(0)
    norm = own_WX.norm(dim=1).mean().item()
    return {
        "steps": steps,
        "largest": [round(value / norm, 3) for value in largest],
        "lost": (received + owed - given).norm().item() / given.norm().item(),
    }


def _residual(memory: ParameterMemory) -> Tensor:
    residual = memory.slots["w"].residual
    assert residual is not None
    return residual


def holds(figures: dict[str, Any]) -> bool:
    """Whether the residual is bounded, and no larger in the second half; and nothing was lost."""
    early, late = figures["largest"]
    return late < BOUND and late < 1.2 * early and figures["lost"] < 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    torch.set_num_threads(1)
    began = time.monotonic()
    figures = run(parser.parse_args().steps)
    print(json.dumps({**figures, "seconds": round(time.monotonic() - began)}))
    return 0 if holds(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
