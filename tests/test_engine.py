"""The engine against its readable twin, its bytes, its way with odd parameters and failures."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from powersgd_reference import Reference
from ranks import Ranks
from scenes import SMALL_BUCKETS_MB, Given, averages, draw, plain_mean, wrap
from torch import Tensor, nn

from edgc_ddp import EDGCState
from edgc_ddp.controllers import FixedRank, Scheduled

Pools = Callable[[int], Ranks]
SHAPES = [(24, 40), (64, 24), (24, 40), (16,)]


def against_twin(rank: int, world: int, bucket_cap_mb: float) -> None:
    state = EDGCState(controller=FixedRank(5))
    ddp = wrap(Given(SHAPES), state, bucket_cap_mb)
    for _ in range(2):
        averages(ddp, [torch.zeros(s) for s in SHAPES])
    twins: dict[int, Reference] = {}
    for step in range(6):
        everyone = [draw(SHAPES, seed=10 * step + r) for r in range(world)]
        got = averages(ddp, everyone[rank])
        for index, parameter in enumerate(list(ddp.module.parameters())[:3]):
            flip = parameter.shape[0] > parameter.shape[1]
            if index not in twins:
                (slot,) = state.engine.registry.slots([parameter])
                # Both started from this basis; the engine has moved on from it by now.
                generator = torch.Generator().manual_seed(state.engine.memory._seed_of(slot, 5))
                from edgc_ddp.maths.orthogonal import random_basis

                twins[index] = Reference(world, random_basis(max(parameter.shape), 5, generator))
            gradients = [g[index].t() if flip else g[index] for g in everyone]
            want = twins[index].step(gradients)
            want = (want.t() if flip else want).float()
            torch.testing.assert_close(got[index], want, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(got[3], plain_mean([everyone[rank][3]])[0])


@pytest.mark.parametrize("bucket_cap_mb", [25, SMALL_BUCKETS_MB])
def test_engine_equals_its_twin(ranks: Pools, bucket_cap_mb: float) -> None:
    ranks(2)(against_twin, bucket_cap_mb)


def rank_changes(rank: int, world: int) -> None:
    """What was not sent at one rank is sent later, whatever the ranks in between."""
    state = EDGCState(controller=Scheduled({0: 4, 6: 2, 9: 7, 12: 0}))
    ddp = wrap(Given(SHAPES), state)
    given = [torch.zeros(s) for s in SHAPES]
    received = [torch.zeros(s) for s in SHAPES]
    for step in range(14):
        gradients = draw(SHAPES, seed=10 * step + rank)
        for total, mean in zip(given, plain_mean(gradients), strict=True):
            total += mean
        for total, got in zip(received, averages(ddp, gradients), strict=True):
            total += got
        if step == 10:
            assert max(state.plan().values()) == 7
    assert set(state.plan().values()) == {0}
    for got, want in zip(received, given, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_nothing_is_lost_when_ranks_change_and_compression_ends(ranks: Pools) -> None:
    ranks(2)(rank_changes)


def bytes_sent(rank: int, world: int, wire: str) -> tuple[int, int]:
    state = EDGCState(controller=FixedRank(4, window=None), wire_dtype=wire)
    ddp = wrap(Given(SHAPES), state)
    for _ in range(3):
        averages(ddp, draw(SHAPES, seed=rank))
    before = state.metrics()
    averages(ddp, draw(SHAPES, seed=rank))
    after = state.metrics()
    wire_bytes = int(after["wire_bytes"]) - int(before["wire_bytes"])
    return wire_bytes, int(after["dense_bytes"]) - int(before["dense_bytes"])


@pytest.mark.parametrize(("wire", "width"), [("fp32", 4), ("bf16", 2)])
def test_bytes_are_counted_as_sent(ranks: Pools, wire: str, width: int) -> None:
    # Beside the factors travel the vector and a flag for each of the three matrices.
    factors = 4 * ((24 + 40) + (64 + 24) + (24 + 40))
    for world, share in ((2, 1.0), (3, 4 / 3)):
        for wire_bytes, dense_bytes in ranks(world)(bytes_sent, wire):
            assert wire_bytes == pytest.approx((factors + 16 + 3) * width * share, abs=1)
            assert dense_bytes == pytest.approx((2 * 24 * 40 + 24 * 64 + 16) * 4 * share, abs=1)


class Strided(nn.Module):
    """Weights stored otherwise than their shape says."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(40, 24).t())
        self.conv = nn.Parameter(torch.zeros(8, 6, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        turned, conv = gradients
        return (self.turned * turned).sum() + (self.conv * conv).sum()


def strided(rank: int, world: int) -> None:
    ddp = wrap(Strided(), EDGCState(controller=FixedRank(1)))
    shapes = [(24, 40), (8, 6, 3, 3)]
    for _ in range(2):
        averages(ddp, [torch.zeros(s) for s in shapes])
    rows, cols, out, rest = draw([(24, 1), (1, 40), (8, 1), (1, 54)], seed=1)
    # Rank one in the order in which the weight is stored: output channel by everything else.
    turned, conv = rows @ cols, (out @ rest).view(8, 6, 3, 3)
    for got, want in zip(averages(ddp, [turned, conv]), (turned, conv), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_strided_weights_keep_their_matrix(ranks: Pools) -> None:
    ranks(2)(strided)


def scales(rank: int, world: int, scale: float) -> None:
    ddp = wrap(Given([(24, 40)]), EDGCState(controller=FixedRank(3)))
    left, right = draw([(24, 2), (2, 40)], seed=1)
    for _ in range(4):
        (got,) = averages(ddp, [scale * (left @ right)])
    want = scale * (left @ right)
    assert (got / scale - want / scale).norm() <= 1e-4 * (want / scale).norm()


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_tiny_and_huge_gradients(ranks: Pools, scale: float) -> None:
    ranks(2)(scales, scale)


def stalled(rank: int, world: int) -> tuple[str, float]:
    ddp = wrap(Given(SHAPES), EDGCState(controller=FixedRank(3)))
    for _ in range(3):
        averages(ddp, draw(SHAPES, seed=rank))
    if rank == 1:
        time.sleep(10)
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        averages(ddp, draw(SHAPES, seed=rank))
    return str(caught.value), time.monotonic() - began


def test_a_stalled_rank_is_a_timeout_error_on_the_others(ranks: Pools) -> None:
    pool = Ranks(2)
    try:
        (message, seconds), _ = pool(stalled, timeout=5)
    finally:
        pool.stop()
    assert "imed out" in message and seconds < 10


def global_random_state(rank: int, world: int) -> None:
    ddp = wrap(Given(SHAPES), EDGCState(controller=Scheduled({0: 2, 4: 5})))
    gradients = draw(SHAPES, seed=1)
    before = torch.random.get_rng_state()
    for _ in range(6):
        averages(ddp, gradients)
    assert torch.equal(before, torch.random.get_rng_state())


def test_global_random_state_is_not_touched(ranks: Pools) -> None:
    ranks(2)(global_random_state)


def beside_other_collectives(rank: int, world: int) -> bytes:
    """The user's own collectives on the default group, in flight while gradients are averaged."""
    ddp = wrap(Given(SHAPES), EDGCState(controller=FixedRank(3)), SMALL_BUCKETS_MB)
    out = b""
    for step in range(30):
        metric = torch.full((2000,), float(rank))
        work = dist.all_reduce(metric, async_op=True)
        got = averages(ddp, draw(SHAPES, seed=10 * step + rank))
        assert work is not None
        work.wait()
        assert metric[0] == sum(range(world))
        out += b"".join(g.numpy().tobytes() for g in got)
    return out


def test_the_users_own_collectives_may_be_in_flight(ranks: Pools) -> None:
    assert len(set(ranks(3)(beside_other_collectives))) == 1
