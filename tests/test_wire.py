"""int8 on the wire: sums at any world size, bytes as claimed, nothing lost, nothing hidden."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from torch import Tensor, nn

from edgc_ddp import EDGCState
from edgc_ddp.controllers import FixedRank, Scheduled
from edgc_ddp.lane import Lane
from edgc_ddp.memory import Slot
from edgc_ddp.reducers.bucket import Settings
from edgc_ddp.reducers.wire import Payload, begin_sum, deal

Pools = Callable[[int], Ranks]
SHAPES = [(24, 40), (40, 24), (16,), (24, 40), (8, 3, 2, 2), ()]
BLOCKS = [(5, 24), (3, 7), (1, 100)]
DENSE = 9


def state_at(rank: int, **options: Any) -> EDGCState:
    options = {"min_compression_rate": 0, "wire_dtype": "int8", **options}
    return EDGCState(controller=FixedRank(rank), **options)


def kept(ddp: torch.nn.parallel.DistributedDataParallel, state: EDGCState) -> list[Tensor]:
    found = []
    for parameter in ddp.module.parameters():
        (slot,) = state.engine.registry.slots([parameter])
        empty = torch.zeros_like(parameter)
        found.append(empty if slot.residual is None else slot.residual.view_as(empty).clone())
    return found


# -- one sum -----------------------------------------------------------------------------------


def columns_of(flat: Tensor) -> list[Tensor]:
    columns, at = [], 0
    for count, length in BLOCKS:
        columns += list(flat[at : at + count * length].view(count, length))
        at += count * length
    return columns


def one_sum(rank: int, world: int, needed: bool) -> tuple[bytes, float, int]:
    lane = Lane(dist.group.WORLD, torch.device("cpu"), channels=2)
    parts = []
    for each in range(world):
        (part,) = draw([(sum(c * n for c, n in BLOCKS) + DENSE,)], seed=each)
        # Columns of very different sizes: a scale of their own is what keeps the small ones.
        for index, column in enumerate(columns_of(part)):
            column *= 10.0 ** (3 * (index % 4) - 30 * (index == 6))
        parts.append(part)
    payload = Payload(parts[rank].clone(), BLOCKS)
    sending = begin_sum(payload, lane, torch.int8, channel=0, part_is_needed=needed)
    task = sending.start()
    collectives = 1
    try:
        while True:
            next(task).wait()
            collectives += 1
    except StopIteration as started:
        counted = payload.flat.clone()
        started.value.wait()
    sending.finish()
    exact = torch.stack(parts).double().sum(0)
    for got, want, *inputs in zip(*map(columns_of, [payload.flat, exact, *parts]), strict=True):
        step = sum(float(column.abs().max()) for column in [*inputs, want]) / 127
        assert (got - want).abs().max() <= 0.51 * step
    dense = slice(-DENSE, None)
    torch.testing.assert_close(payload.flat[dense], exact[dense].float(), rtol=1e-2, atol=1e-2)
    if needed:
        dist.all_reduce(counted)
        for sums, got in zip(columns_of(counted), columns_of(payload.flat), strict=True):
            assert (sums - got).abs().max() <= 1e-5 * got.abs().max()
    return payload.flat.numpy().tobytes(), lane.sent_bytes, collectives


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_are_right_and_equal_and_parts_add_up_to_them(
    ranks: Pools, world: int, needed: bool
) -> None:
    results = ranks(world)(one_sum, needed)
    assert len({total for total, _, _ in results}) == 1
    assert {count for _, _, count in results} == {1 if world < 3 else 2}
    columns = sum(count for count, _ in BLOCKS)
    payload = sum(count * length for count, length in BLOCKS) + 4 * columns + 2 * DENSE
    mean_sent = sum(sent for _, sent, _ in results) / world
    # Shares end at whole columns and words; here one column is two fifths of everything.
    slack = (world > 2) * (world - 1) * (100 + 8) + 4 * world
    ring = 2 * (world - 1) / world
    assert payload * ring <= mean_sent <= payload * ring + slack


@pytest.mark.parametrize("ways", [1, 2, 3, 8, 40])
def test_shares_cover_everything_once(ways: int) -> None:
    seen = torch.zeros(sum(c * n for c, n in BLOCKS) + DENSE)
    sizes = []
    for share in deal(Payload(seen, BLOCKS), ways):
        for at, count, length in share.runs:
            seen[at : at + count * length] += 1
        seen[slice(*share.dense)] += 1
        sizes.append(share.nbytes)
        assert share.nbytes % 4 == 0 and share.nbytes > 0
    assert torch.equal(seen, torch.ones_like(seen))
    assert max(sizes) <= sum(sizes) / ways + 100 + 8 + 2 + 4


# -- the average -------------------------------------------------------------------------------


def full_rank(rank: int, world: int) -> None:
    ddp = wrap(Given(SHAPES), state_at(64))
    averages(ddp, [torch.zeros(s) for s in SHAPES])
    averages(ddp, [torch.zeros(s) for s in SHAPES])
    gradients = draw(SHAPES, seed=rank)
    for got, want in zip(averages(ddp, gradients), plain_mean(gradients), strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_rank_is_the_plain_average_within_a_step(ranks: Pools, world: int) -> None:
    ranks(world)(full_rank)


def average_plus_residual(rank: int, world: int, skew: float) -> None:
    state = state_at(3)
    ddp = wrap(Given(SHAPES), state)
    for _ in range(2):
        averages(ddp, [torch.zeros(s) for s in SHAPES])
    rests = [torch.zeros(s) for s in SHAPES]
    for step in range(5):
        gradients = draw(SHAPES, seed=10 * step + rank, scale=1 + skew * rank)
        wanted = plain_mean([g + e for g, e in zip(gradients, rests, strict=True)])
        got = averages(ddp, gradients)
        rests = kept(ddp, state)
        for shape, average, rest, want in zip(SHAPES, got, plain_mean(rests), wanted, strict=True):
            # Factors lose nothing: every rank knows what of its part was counted.
            tolerance = 2e-5 if len(shape) > 1 else 1e-2
            torch.testing.assert_close(average + rest, want, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("skew", [0.0, 20.0])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_average_plus_residual_is_the_input(ranks: Pools, world: int, skew: float) -> None:
    ranks(world)(average_plus_residual, skew)


def low_rank_gradients(rank: int, world: int) -> None:
    ddp = wrap(Given([(48, 80)]), state_at(4, min_compression_rate=1))
    left, right = draw([(48, 3), (3, 80)], seed=1)
    for step in range(3):
        (mix,) = draw([(3, 3)], seed=7 + rank + 10 * step)
        gradient = left @ mix @ right
        (got,) = averages(ddp, [gradient])
    (want,) = plain_mean([gradient])
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("world", [2, 3])
def test_low_rank_gradients_come_back_within_two_percent(ranks: Pools, world: int) -> None:
    ranks(world)(low_rank_gradients)


def train(rank: int, world: int) -> bytes:
    state = EDGCState(controller=Scheduled({0: 4, 10: 8, 20: 0, 25: 2}), wire_dtype="int8")
    ddp = wrap(Mlp(depth=6), state, SMALL_BUCKETS_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(40):
        seeded = torch.Generator().manual_seed(1000 * step + rank)
        train_step(ddp, optimizer, torch.randn(4, 32, generator=seeded))
    return fingerprint(ddp)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_stay_bit_equal_with_many_buckets(ranks: Pools, world: int) -> None:
    assert len(set(ranks(world)(train))) == 1


# -- faults ------------------------------------------------------------------------------------


def one_bad_step(rank: int, world: int, bad: float, where: int) -> None:
    state = state_at(4)
    ddp = wrap(Given(SHAPES), state)
    for step in range(3):
        averages(ddp, draw(SHAPES, seed=step + rank))
    before = kept(ddp, state)
    gradients = draw(SHAPES, seed=50 + rank)
    if rank == world - 1:
        gradients[where].view(-1)[5] = bad
    got = averages(ddp, gradients)
    assert not torch.isfinite(got[where]).all()
    for old, now in zip(before, kept(ddp, state), strict=True):
        assert torch.equal(old, now)
    assert all(torch.isfinite(g).all() for g in averages(ddp, draw(SHAPES, seed=90 + rank)))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_step_is_bad_for_all_and_the_next_is_clean(
    ranks: Pools, world: int, where: int, bad: float
) -> None:
    ranks(world)(one_bad_step, bad, where)


def zero_gradients(rank: int, world: int, dtype: torch.dtype) -> None:
    ddp = wrap(Given(SHAPES, dtype), state_at(2))
    for _ in range(5):
        got = averages(ddp, [torch.zeros(s, dtype=dtype) for s in SHAPES])
        assert all(torch.equal(g, torch.zeros_like(g)) for g in got)
    gradients = [g.to(dtype) for g in draw(SHAPES, seed=rank)]
    assert all(g.abs().max() > 0 for g in averages(ddp, gradients))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_zero_gradients_stay_zero(ranks: Pools, world: int, dtype: torch.dtype) -> None:
    ranks(world)(zero_gradients, dtype)


def tiny_and_huge(rank: int, world: int, scale: float) -> None:
    ddp = wrap(Given([(24, 40)]), state_at(3))
    left, right = draw([(24, 2), (2, 40)], seed=1)
    want = scale * (left @ right)
    for _ in range(4):
        (got,) = averages(ddp, [want])
    assert (got / scale - want / scale).norm() <= 0.02 * (want / scale).norm()


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_tiny_and_huge_gradients(ranks: Pools, scale: float) -> None:
    ranks(3)(tiny_and_huge, scale)


# -- bytes -------------------------------------------------------------------------------------


def bytes_sent(rank: int, world: int) -> int:
    shapes = [(64, 128), (128, 64), (32,)]
    state = EDGCState(controller=FixedRank(6, window=None), wire_dtype="int8")
    ddp = wrap(Given(shapes), state)
    for _ in range(3):
        averages(ddp, draw(shapes, seed=rank))
    before = int(state.metrics()["wire_bytes"])
    averages(ddp, draw(shapes, seed=rank))
    return int(state.metrics()["wire_bytes"]) - before


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bytes_are_counted_as_sent(ranks: Pools, world: int) -> None:
    # Twelve columns of each factor, one byte an entry and four a scale; the vector in bf16.
    payload = 12 * (64 + 128) + 2 * 4 * 12 + 2 * 32
    sent = ranks(world)(bytes_sent)
    ring = 2 * (world - 1) / world
    assert sum(sent) / world == pytest.approx(payload * ring, rel=0.02, abs=0)


@pytest.mark.parametrize(
    ("wire", "last"), [(torch.float32, 31), (torch.bfloat16, 31), (torch.int8, 58)]
)
def test_compression_rate_is_one_of_bytes_on_the_wire(wire: torch.dtype, last: int) -> None:
    """A 64 x 64 matrix: int8 factors compete with a bf16 matrix, and bring 8 bytes a column."""
    settings = Settings(wire)
    for rank in range(65):
        slot = Slot("w", 64 * 64, (64, 64), rank=rank)
        assert settings.compresses(slot) == (0 < rank <= (60 if wire == torch.int8 else last))
    half = Settings(wire, min_compression_rate=2)
    assert not half.compresses(Slot("w", 64 * 64, (64, 64), rank=last))


def half_precision(rank: int, world: int, dtype: torch.dtype, asked: int) -> tuple[float, float]:
    state = EDGCState(FixedRank(asked))
    ddp = wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype), state)
    before = 0.0
    for _ in range(4):
        before = float(state.metrics()["wire_bytes"])
        ddp(torch.ones(3, 64, dtype=dtype)).sum().backward()
    found = state.metrics()
    return float(found["wire_bytes"]) - before, float(found["mean_rank"])


@pytest.mark.parametrize("asked", [20, 12])
def test_bf16_gradients_send_bf16_factors(ranks: Pools, asked: int) -> None:
    """As fp32 those of rank 20 would be 21 000 bytes a step, where plain DDP sends 16 640."""
    ((sent, rank), _) = ranks(2)(half_precision, torch.bfloat16, asked)
    beside = 2 * (2 * 64 + 2)  # the biases, and a flag for each matrix
    assert (sent, rank) == (2 * asked * 128 * 2 + beside, asked) and sent < 16640
