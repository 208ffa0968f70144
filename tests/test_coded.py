"""Gradients that are not compressed, in bf16 or int8 on the wire: nothing lost, bytes as claimed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from scenes import (
    SMALL_BUCKETS_MB,
    Given,
    Mlp,
    averages,
    draw,
    fingerprint,
    plain_mean,
    train_step,
    wrap,
)
from test_wire import SHAPES, kept
from torch import nn

from edgc_ddp import EDGCState
from edgc_ddp.controllers import Dense, Scheduled

Pools = Callable[[int], Ranks]
WIRES = ["bf16", "int8"]


def state_of(wire: str, ranks: dict[int, int] | None = None, **options: Any) -> EDGCState:
    controller = Dense() if ranks is None else Scheduled(ranks)
    return EDGCState(controller=controller, dense_dtype=wire, min_compression_rate=0, **options)


def average_plus_residual(rank: int, world: int, wire: str, skew: float) -> None:
    # Dense, compressed at two ranks, dense again: what is owed goes with the matrix through all of it.
    state = state_of(wire, {0: 0, 4: 2, 6: 5, 8: 0})
    ddp = wrap(Given(SHAPES), state)
    rests = [torch.zeros(s) for s in SHAPES]
    for step in range(11):
        gradients = draw(SHAPES, seed=10 * step + rank, scale=1 + skew * rank)
        wanted = plain_mean([g + e for g, e in zip(gradients, rests, strict=True)])
        got = averages(ddp, gradients)
        rests = kept(ddp, state)
        for shape, average, rest, want in zip(SHAPES, got, plain_mean(rests), wanted, strict=True):
            # The sum inside a bf16 all_reduce is rounded once more, which nobody can feed back.
            exact = len(shape) > 1 and (wire == "int8" or 4 <= step < 8)
            tolerance = 2e-5 if exact else 1e-2
            torch.testing.assert_close(average + rest, want, rtol=tolerance, atol=tolerance * 10)
        assert (step >= 4) or all(rest.any() for rest in rests if rest.dim() > 1)


@pytest.mark.parametrize("skew", [0.0, 20.0])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world", [2, 3])
def test_average_plus_residual_is_the_input(
    ranks: Pools, world: int, wire: str, skew: float
) -> None:
    ranks(world)(average_plus_residual, wire, skew)


def bytes_sent(rank: int, world: int, wire: str) -> float:
    state = state_of(wire)
    ddp = wrap(Given([(96, 160)]), state)
    for step in range(3):
        averages(ddp, draw([(96, 160)], seed=step + rank))
    metrics = state.metrics()
    return float(metrics["dense_bytes"]) / float(metrics["wire_bytes"])


@pytest.mark.parametrize("world", [2, 3])
def test_the_wire_carries_a_half_or_a_quarter(ranks: Pools, world: int) -> None:
    for wire, fewer in (("bf16", 2.0), ("int8", 4.0)):
        for ratio in ranks(world)(bytes_sent, wire):
            # A scale per 160 entries, a flag, whole words and columns.
            assert 0.93 * fewer <= ratio <= fewer


def one_bad_step(rank: int, world: int, wire: str, bad: float) -> None:
    state = state_of(wire)
    ddp = wrap(Given(SHAPES), state)
    for step in range(3):
        averages(ddp, draw(SHAPES, seed=step + rank))
    before = kept(ddp, state)
    gradients = draw(SHAPES, seed=rank)
    if rank == 1:
        gradients[0][3, 4] = bad
    poisoned = averages(ddp, gradients)
    assert not torch.isfinite(poisoned[0]).all()
    for old, new in zip(before, kept(ddp, state), strict=True):
        assert torch.equal(old, new)
    gradients = draw(SHAPES, seed=50 + rank)
    wanted = plain_mean([g + e for g, e in zip(gradients, before, strict=True)])
    for got, want in zip(averages(ddp, gradients), wanted, strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("wire", WIRES)
def test_a_bad_step_is_bad_everywhere_and_leaves_no_trace(
    ranks: Pools, wire: str, bad: float
) -> None:
    ranks(2)(one_bad_step, wire, bad)


def nobody_has_a_gradient(rank: int, world: int, wire: str) -> None:
    state = state_of(wire)
    ddp = wrap(Given(SHAPES), state)
    for step in range(3):
        averages(ddp, draw(SHAPES, seed=step + rank))
    before = kept(ddp, state)
    assert before[0].any()
    gradients = draw(SHAPES, seed=rank)
    gradients[0] = torch.zeros_like(gradients[0])
    got = averages(ddp, gradients)
    # DDP may throw this average away, so it must not carry anything that is owed.
    assert not got[0].any() and torch.equal(kept(ddp, state)[0], before[0])
    assert got[1].any()


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_owed_waits_for_a_gradient(ranks: Pools, wire: str) -> None:
    ranks(2)(nobody_has_a_gradient, wire)


def train(rank: int, world: int, wire: str) -> bytes:
    state = EDGCState(controller=Scheduled({0: 0, 10: 8, 20: 0, 25: 2}), dense_dtype=wire)
    ddp = wrap(Mlp(depth=6), state, SMALL_BUCKETS_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(40):
        seeded = torch.Generator().manual_seed(1000 * step + rank)
        train_step(ddp, optimizer, torch.randn(4, 32, generator=seeded))
    return fingerprint(ddp)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_stay_bit_equal_with_many_buckets(ranks: Pools, world: int, wire: str) -> None:
    assert len(set(ranks(world)(train, wire))) == 1


def other_types(rank: int, world: int, dtype: torch.dtype) -> None:
    ddp = wrap(Given([(24, 40), (16,)], dtype), state_of("bf16"))
    for step in range(3):
        gradients = [g.to(dtype) for g in draw([(24, 40), (16,)], seed=step + rank)]
        for got, want in zip(averages(ddp, gradients), plain_mean(gradients), strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_as_narrow_as_the_wire_go_as_they_are(ranks: Pools, dtype: torch.dtype) -> None:
    ranks(2)(other_types, dtype)


def near_the_end_of_half_precision(rank: int, world: int) -> float:
    ddp = wrap(nn.Linear(8, 8).half(), EDGCState(Dense(), dense_dtype="int8"))
    ddp(torch.ones(1, 8, dtype=torch.float16)).backward(torch.full((1, 8), 65472.0).half())
    bias = ddp.module.bias
    return float(bias.grad.max())  # type: ignore[union-attr, operator]


def test_what_rounding_makes_too_large_for_half_precision_is_cut(ranks: Pools) -> None:
    """As bf16 the bias's gradient of 65472 is 65536, which fp16 cannot hold."""
    assert ranks(2)(near_the_end_of_half_precision) == [65504.0] * 2


def test_rounding_without_feedback_is_refused() -> None:
    with pytest.raises(ValueError, match="dense_dtype='int8' with error_feedback=False"):
        EDGCState(dense_dtype="int8", error_feedback=False)
