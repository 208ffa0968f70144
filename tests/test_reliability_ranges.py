"""Sums larger than a gradient's type holds, types that torch makes by default, gradients with a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from scenes import Given, averages, wrap
from test_wire import kept
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState
from edgc_ddp.controllers import EntropyController, FixedRank, Scheduled

Pools = Callable[[int], Ranks]
SHAPE = (64, 64)
LARGEST = torch.finfo(torch.float16).max


def steep(scale: float) -> torch.Tensor:
    """A matrix of full rank and equal singular values: low rank leaves nearly all of it."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.linalg.qr(torch.randn(SHAPE, generator=generator))[0]
    return matrix * (scale / matrix.abs().max())


def fp16_sums(rank: int, world: int, scale: float, options: dict[str, Any]) -> None:
    state = EDGCState(min_compression_rate=0, **options)
    ddp = wrap(Given([SHAPE], torch.float16), state)
    gradient = steep(scale).half()
    given = received = torch.zeros(SHAPE, dtype=torch.float64)
    rounding = 0.0
    for _ in range(40):
        (got,) = averages(ddp, [gradient])
        assert torch.isfinite(got).all() and got.abs().max() <= LARGEST
        given, received = given + gradient.double(), received + got.double()
        rounding += got.double().norm().item() * 2**-10
    (rest,) = kept(ddp, state)
    # All ranks were given the same, so what this rank owes is what the average lacks.
    assert (received + rest.double() - given).norm() <= rounding


@pytest.mark.parametrize(
    ("scale", "options"),
    [
        (8000.0, {"controller": Scheduled({0: 1, 22: 0})}),
        (20000.0, {"controller": FixedRank(1)}),
        (20000.0, {"controller": FixedRank(1), "wire_dtype": "int8", "dense_dtype": "int8"}),
        (65000.0, {"controller": Scheduled({0: 0}), "dense_dtype": "int8"}),
    ],
    ids=["leaving compression", "compressed", "int8", "int8 near the largest"],
)
def test_averages_of_fp16_fit_fp16_and_the_rest_stays_owed(
    ranks: Pools, scale: float, options: dict[str, Any]
) -> None:
    ranks(2)(fp16_sums, scale, options)


def one_spike(rank: int, world: int) -> None:
    ddp = wrap(Given([(24, 40)], torch.float64), EDGCState(FixedRank(2), min_compression_rate=0))
    generator = torch.Generator().manual_seed(rank)
    for step in range(12):
        gradient = torch.randn(24, 40, generator=generator, dtype=torch.float64)
        if step == 5:
            gradient *= 1e60
        (got,) = averages(ddp, [gradient])
        assert torch.isfinite(got).all()


def test_a_spike_beyond_fp32_does_not_make_all_later_steps_infinite(ranks: Pools) -> None:
    ranks(2)(one_spike)


def default_type(rank: int, world: int, dtype: torch.dtype, entropy: bool) -> None:
    torch.set_default_dtype(dtype)
    try:
        controller = (
            EntropyController(window=2, warmup=2, warmup_limit=4, r_max=8, r_min=2, alpha=1.0)
            if entropy
            else FixedRank(4, window=2)
        )
        ddp = wrap(Given([(24, 40)], torch.float32), EDGCState(controller))
        for step in range(10):
            generator = torch.Generator().manual_seed(10 * step + rank)
            gradient = torch.randn(24, 40, generator=generator, dtype=torch.float32)
            (got,) = averages(ddp, [gradient])
            assert torch.isfinite(got).all()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("entropy", [False, True], ids=["fixed", "entropy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_default_type_is_the_users_own_business(
    ranks: Pools, dtype: torch.dtype, entropy: bool
) -> None:
    ranks(2)(default_type, dtype, entropy)


def with_graph(rank: int, world: int) -> None:
    torch.manual_seed(0)
    # One matrix: with more, plain DDP itself refuses (its buffer's views have a graph then).
    model = torch.nn.Linear(24, 40, bias=False)
    ddp: DistributedDataParallel = wrap(model, EDGCState(FixedRank(24), min_compression_rate=0))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
    for _ in range(4):
        ddp.zero_grad()
        ddp(x).square().mean().backward(create_graph=True)
        for parameter in ddp.parameters():
            assert parameter.grad is not None and math.isfinite(parameter.grad.norm().item())


def test_gradients_with_a_graph_are_averaged(ranks: Pools) -> None:
    ranks(2)(with_graph)


def empty_beside_double(rank: int, world: int, wire: str) -> None:
    # DDP puts the one empty tensor of another type in a bucket of its own.
    model = Given([(24, 40), (0,)], torch.float64)
    model.weights[1] = torch.nn.Parameter(torch.zeros(0))
    ddp = wrap(model, EDGCState(FixedRank(2), dense_dtype=wire))
    ones = torch.ones(24, 40, dtype=torch.float64)
    for _ in range(4):
        got, nothing = averages(ddp, [ones, torch.zeros(0)])
        assert torch.allclose(got, ones, atol=0.02) and nothing.shape == (0,)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_an_empty_parameter_alone_in_a_bucket_is_averaged(ranks: Pools, wire: str) -> None:
    ranks(2)(empty_beside_double, wire)
