"""The hook under real DistributedDataParallel, on Gloo, with several processes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

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
from torch import Tensor

from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.controllers import Dense, FixedRank, Scheduled
from edgc_ddp.decisions import Layout, Observation, Plan

Pools = Callable[[int], Ranks]
SHAPES = [(24, 40), (40, 24), (16,), (24, 40), (8, 3, 2, 2), ()]


def state_at(rank: int, **options: object) -> EDGCState:
    options.setdefault("min_compression_rate", 0)
    return EDGCState(controller=FixedRank(rank), **options)  # type: ignore[arg-type]


def warm(ddp: torch.nn.parallel.DistributedDataParallel, steps: int = 2) -> None:
    for _ in range(steps):
        averages(ddp, [torch.zeros_like(p) for p in ddp.module.parameters()])


# -- exactness ---------------------------------------------------------------------------------


def full_rank(rank: int, world: int) -> None:
    ddp = wrap(Given(SHAPES), state_at(64))
    warm(ddp)
    for step in range(3):
        gradients = draw(SHAPES, seed=10 * step + rank)
        for got, want in zip(averages(ddp, gradients), plain_mean(gradients), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def low_rank_gradients(rank: int, world: int) -> None:
    """Both ranks' gradients live in one rank-3 space, so their mean has rank 3."""
    ddp = wrap(Given([(48, 80)]), state_at(4, min_compression_rate=1))
    warm(ddp)
    left, right = draw([(48, 3), (3, 80)], seed=1)
    (mix,) = draw([(3, 3)], seed=7 + rank)
    gradient = left @ mix @ right
    (got,) = averages(ddp, [gradient])
    (want,) = plain_mean([gradient])
    assert (got - want).norm() <= 1e-5 * want.norm()


def average_plus_residual(rank: int, world: int, wire: str) -> None:
    state = state_at(3, wire_dtype=wire)
    ddp = wrap(Given(SHAPES), state)
    warm(ddp)
    kept = [torch.zeros(shape) for shape in SHAPES]
    for step in range(4):
        gradients = draw(SHAPES, seed=10 * step + rank)
        (wanted) = plain_mean([g + e for g, e in zip(gradients, kept, strict=True)])
        got = averages(ddp, gradients)
        slots = state.engine.memory.slots.values()
        kept = residuals(ddp, state)
        assert sum(slot.residual is not None for slot in slots) == 4
        for average, rest, want in zip(got, plain_mean(kept), wanted, strict=True):
            # bf16 sums round once per addition; what each rank rounded off is in its residual.
            tolerance = 1e-5 if wire == "fp32" else 2e-2
            torch.testing.assert_close(average + rest, want, rtol=tolerance, atol=tolerance)


def residuals(ddp: torch.nn.parallel.DistributedDataParallel, state: EDGCState) -> list[Tensor]:
    found = []
    for parameter in ddp.module.parameters():
        (slot,) = state.engine.registry.slots([parameter])
        residual = slot.residual
        empty = torch.zeros_like(parameter)
        found.append(empty if residual is None else residual.float().view(parameter.shape).clone())
    return found


def dense_is_plain(rank: int, world: int) -> None:
    results = []
    for state in (None, EDGCState(controller=Dense())):
        torch.manual_seed(5)
        ddp = wrap(Mlp(), state, SMALL_BUCKETS_MB)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(6):
            train_step(ddp, optimizer, torch.randn(4, 32, generator=seeded(step, rank)))
        results.append(fingerprint(ddp))
    assert results[0] == results[1]


def seeded(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_rank_is_the_plain_average(ranks: Pools, world: int) -> None:
    ranks(world)(full_rank)


def test_low_rank_gradients_come_back(ranks: Pools) -> None:
    ranks(2)(low_rank_gradients)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_average_plus_residual_is_the_input(ranks: Pools, wire: str) -> None:
    ranks(2)(average_plus_residual, wire)


def test_dense_controller_equals_no_hook_bit_for_bit(ranks: Pools) -> None:
    ranks(2)(dense_is_plain)


# -- order -------------------------------------------------------------------------------------


def delayed_hook(state: EDGCState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    delays = random.Random(f"{dist.get_rank()}/{bucket.index()}/{state.metrics()['step']}")
    if delays.random() < 0.2:
        time.sleep(delays.random() * 0.004)
    return edgc_hook(state, bucket)


delayed_hook.__annotations__ = edgc_hook.__annotations__


def train_delayed(rank: int, world: int, steps: int) -> tuple[bytes, int]:
    state = EDGCState(controller=Scheduled({0: 4, 25: 8, 50: 0, 60: 2}), start_iter=2)
    ddp = torch.nn.parallel.DistributedDataParallel(Mlp(depth=20), bucket_cap_mb=SMALL_BUCKETS_MB)
    ddp.register_comm_hook(state, delayed_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        train_step(ddp, optimizer, torch.randn(4, 32, generator=seeded(step, rank)))
    return fingerprint(ddp), state.engine._started


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_stay_bit_equal_under_random_delays(ranks: Pools, world: int) -> None:
    results = ranks(world)(train_delayed, 100)
    assert len({parameters for parameters, _ in results}) == 1
    assert all(buckets == 20 for _, buckets in results)


# -- faults ------------------------------------------------------------------------------------


def one_bad_step(rank: int, world: int, bad: float) -> None:
    state = state_at(4, min_compression_rate=1)
    ddp = wrap(Given(SHAPES), state)
    warm(ddp)
    averages(ddp, draw(SHAPES, seed=rank))
    before = [r.clone() for r in residuals(ddp, state)]
    gradients = draw(SHAPES, seed=50 + rank)
    if rank == 1:
        gradients[0][3, 5] = bad
    got = averages(ddp, gradients)
    assert not torch.isfinite(got[0]).all()
    for kept, now in zip(before, residuals(ddp, state), strict=True):
        assert torch.equal(kept, now)
    clean = averages(ddp, draw(SHAPES, seed=90 + rank))
    assert all(torch.isfinite(g).all() for g in clean)


def zero_gradients(rank: int, world: int, dtype: torch.dtype) -> None:
    ddp = wrap(Given(SHAPES, dtype), state_at(2))
    warm(ddp, 6)
    for got in averages(ddp, [torch.zeros(s, dtype=dtype) for s in SHAPES]):
        assert torch.equal(got, torch.zeros_like(got))
    gradients = [g.to(dtype) for g in draw(SHAPES, seed=rank)]
    assert all(g.abs().max() > 0 for g in averages(ddp, gradients))


class Disagreeing:
    def init(self, layout: Layout) -> dict[str, object]:
        return {"layout": layout}

    def decide(
        self, state: dict[str, object], observation: Observation | None, step: int
    ) -> tuple[dict[str, object], Plan]:
        layout = state["layout"]
        assert isinstance(layout, Layout)
        return state, Plan.uniform(layout, 2 + dist.get_rank(), "odd")


def disagree(rank: int, world: int) -> str:
    ddp = wrap(Given(SHAPES), EDGCState(controller=Disagreeing()))
    with pytest.raises(RuntimeError) as caught:
        warm(ddp, 3)
    return str(caught.value)


def two_models(rank: int, world: int) -> str:
    state = EDGCState(controller=FixedRank(2))
    first, second = wrap(Given(SHAPES), state), wrap(Given(SHAPES), state)
    warm(first, 1)
    with pytest.raises(RuntimeError) as caught:
        warm(second, 1)
    return str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_step_is_bad_for_all_and_the_next_is_clean(ranks: Pools, bad: float) -> None:
    ranks(2)(one_bad_step, bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_zero_gradients_stay_zero(ranks: Pools, dtype: torch.dtype) -> None:
    ranks(2)(zero_gradients, dtype)


def test_plans_that_differ_are_an_error_naming_both(ranks: Pools) -> None:
    for message in ranks(2)(disagree):
        assert "rank 0 has <odd" in message and "parameter_0000: 2" in message
        assert "rank 1 has <odd" in message and "parameter_0000: 3" in message


def test_one_state_on_two_models_is_an_error(ranks: Pools) -> None:
    for message in ranks(2)(two_models):
        assert "one EDGCState serves one DistributedDataParallel model" in message
