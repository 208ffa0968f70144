"""What is trained or replayed. Shapes are known without memory; a build gives a module and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgc_ddp.train.model import VOCABULARY, build, shapes, skeleton
from edgc_ddp.train.schema import ModelConfig


@dataclass(frozen=True)
class Workload:
    """``batch`` sequences of ``config.context`` bytes per host and step; 0 replays gradients only."""

    config: ModelConfig
    batch: int
    bucket_views: bool = False
    """``gradient_as_bucket_view`` of DDP: off, as by default, where memory allows."""

    def shapes(self) -> list[tuple[int, ...]]:
        """Every parameter's shape, in the model's order."""
        if self.batch:
            return [tuple(shape) for shape in shapes(skeleton(self.config)).values()]
        return gpt2_shapes(self.config.width, self.config.layers, self.config.context)

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes())

    def build(self, seed: int) -> nn.Module:
        """The module whose call with a step number gives that step's loss; equal on all ranks."""
        return Training(self, seed) if self.batch else Replay(self.shapes(), seed)


WORKLOADS = {
    "tiny": Workload(ModelConfig(width=32, layers=2, heads=2, context=16), batch=2),
    "gpt3m": Workload(ModelConfig(width=256, layers=4, heads=8, context=128), batch=2),
    "gpt25m": Workload(ModelConfig(width=512, layers=8, heads=8, context=128), batch=2),
    "gpt2-345m-replay": Workload(
        ModelConfig(width=1024, layers=24, heads=16, context=1024), batch=0, bucket_views=True
    ),
}


def gpt2_shapes(
    width: int, layers: int, context: int, vocabulary: int = 50257
) -> list[tuple[int, ...]]:
    """GPT-2's parameters, output weights tied to the embedding.

    >>> sum(math.prod(shape) for shape in gpt2_shapes(1024, 24, 1024))
    354823168
    """
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    attention: list[tuple[int, ...]] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    wide: list[tuple[int, ...]] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [
        (vocabulary, width),
        (context, width),
        *(norm + attention + norm + wide) * layers,
        *norm,
    ]


class Training(nn.Module):
    """The byte-level GPT on random bytes: the time of a step does not depend on the text."""

    def __init__(self, workload: Workload, seed: int) -> None:
        super().__init__()
        self.gpt = build(workload.config, seed, torch.device("cpu"))
        self._shape = (workload.batch, workload.config.context)

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        bytes_BT = torch.randint(VOCABULARY, self._shape, generator=generator)
        logits_BTV = self.gpt(bytes_BT)
        return nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), bytes_BT[:, 1:].flatten()
        )


class Replay(nn.Module):
    """Hands every parameter a prepared gradient, last parameter first, and computes nothing."""

    def __init__(self, all_shapes: list[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in all_shapes)
        generator = torch.Generator().manual_seed(seed)
        # One gradient per shape: the time of a step does not depend on the numbers in it.
        self._gradients = {
            shape: torch.randn(shape, generator=generator) for shape in sorted(set(all_shapes))
        }

    def forward(self, step: int) -> Tensor:
        # A first input that needs no gradient would end the chain at the first parameter.
        passed = torch.zeros((), requires_grad=True)
        for weight in self.weights:
            passed = _hand_over(passed, weight, self._gradients[tuple(weight.shape)])
        return passed


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passed: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.gradient, None


_hand_over: Callable[[Tensor, Tensor, Tensor], Tensor] = _HandOver.apply
