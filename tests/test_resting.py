"""Dense for good: past the communication thread, as without a hook, until a state says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from scenes import SMALL_BUCKETS_MB, Given, averages, draw, plain_mean, wrap
from torch import Tensor

from edgc_ddp import EDGCState
from edgc_ddp.controllers import Dense, EntropyController, FixedRank, Scheduled

Pools = Callable[[int], Ranks]
SHAPES = [(24, 40), (40, 24), (16,), (8, 3, 2, 2)]


def parts_run(state: EDGCState) -> list[int]:
    """Counts, in its one entry, what the lane is given from now on."""
    lane, count = state.engine._lane, [0]
    assert lane is not None
    submit = lane.submit

    def counted(make_task: Any) -> Any:
        count[0] += 1
        return submit(make_task)

    lane.submit = counted  # type: ignore[method-assign]
    return count


def comes_to_rest(rank: int, world: int, wire: str) -> None:
    """Compressed to step 8, then dense for ever: what was owed is sent first."""
    model = Given(SHAPES)
    state = EDGCState(Scheduled({2: 2, 8: 0}), model=model, wire_dtype=wire)
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    plain = wrap(Given(SHAPES), None, SMALL_BUCKETS_MB)
    given = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    received = [total.clone() for total in given]
    for step in range(16):
        if step == 10:
            count = parts_run(state)
            bytes_before = state.metrics()["wire_bytes"]
        gradients = draw(SHAPES, seed=10 * step + rank)
        got, want = averages(ddp, gradients), averages(plain, gradients)
        for total, mean in zip(given, plain_mean(gradients), strict=True):
            total += mean
        for total, part in zip(received, got, strict=True):
            total += part
        if step >= 10:
            # Bit for bit what DDP averages without a hook.
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert count == [0]
    metrics = state.metrics()
    assert metrics["step"] == 16
    numel = sum(gradient.numel() for gradient in gradients)
    assert (
        float(metrics["wire_bytes"]) - float(bytes_before)
        == 6 * 4 * numel * 2 * (world - 1) / world
    )
    if wire == "fp32":
        for total, wanted in zip(received, given, strict=True):
            torch.testing.assert_close(total, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_is_dense_for_good_goes_past_the_thread(ranks: Pools, world: int, wire: str) -> None:
    ranks(world)(comes_to_rest, wire)


def wakes_up(rank: int, world: int) -> None:
    """Rolled back to a time at which it compressed."""
    model = Given(SHAPES)
    state = EDGCState(Scheduled({2: 2, 5: 0}), model=model)
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    saved = {}
    for step in range(8):
        if step == 4:
            saved = state.state_dict()
        averages(ddp, draw(SHAPES, seed=10 * step + rank))
    assert state.engine._resting
    state.load_state_dict(saved)
    # One more iteration passes the thread, which gives the residuals' memory back.
    for resting, matrix_rank in ((False, 2), (False, 24), (False, 24), (True, 24)):
        got = averages(ddp, draw(SHAPES, seed=50 + rank))
        assert state.engine._resting == resting
        assert torch.linalg.matrix_rank(got[0]) == matrix_rank


def test_a_loaded_state_ends_the_rest(ranks: Pools) -> None:
    ranks(2)(wakes_up)


def resumed_at_rest(rank: int, world: int) -> None:
    saved: dict[int, Any] = {}
    for begin in (0, 7, 8, 11):
        model = Given(SHAPES)
        state = EDGCState(Scheduled({2: 2, 6: 0}), model=model)
        if begin:
            state.load_state_dict(saved[begin])
        ddp = wrap(model, state, SMALL_BUCKETS_MB)
        for step in range(begin, 14):
            got = averages(ddp, draw(SHAPES, seed=10 * step + rank))
            if not begin:
                saved[step + 1] = state.state_dict()
        assert state.engine._resting and state.metrics()["step"] == 14
        ends = [*got, torch.tensor(state.metrics()["wire_bytes"])]
        if not begin:
            wanted = ends
        assert all(torch.equal(a, b) for a, b in zip(ends, wanted, strict=True))


def test_a_run_resumed_at_rest_or_just_before_ends_alike(ranks: Pools) -> None:
    ranks(2)(resumed_at_rest)


def goes_dense_by_itself(rank: int, world: int) -> list[str]:
    """On a link where compressing takes ten times as long."""
    model = Given(SHAPES)
    state = EDGCState(EntropyController(window=4, warmup=4, calibration_steps=2), model=model)
    ddp, plain = wrap(model, state, SMALL_BUCKETS_MB), wrap(Given(SHAPES), None, SMALL_BUCKETS_MB)
    for step in range(24):
        gradients = draw(SHAPES, seed=10 * step + rank)
        got = averages(ddp, gradients)
        lane = state.engine._lane
        assert lane is not None
        lane.seconds = lambda *_: 1.0 if state.engine.mean_rank() else 0.1  # type: ignore[method-assign]
    assert state.engine._resting
    want = averages(plain, gradients)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return [entry["phase"] for entry in state.history]


def test_a_controller_that_sees_no_gain_comes_to_rest(ranks: Pools) -> None:
    for phases in ranks(2)(goes_dense_by_itself):
        assert phases[0] == "warmup" and "calibration" in phases and phases[-1] == "dense"


def saved_by_one(rank: int, world: int) -> bool:
    """Rank 0 alone looks at its state after every step, as for a log."""
    model = Given(SHAPES)
    state = EDGCState(Scheduled({2: 2, 6: 0}), model=model)
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    for step in range(12):
        averages(ddp, draw(SHAPES, seed=10 * step + rank))
        if rank == 0:
            state.state_dict()
    return state.engine._resting


def test_a_rank_that_saves_alone_rests_when_the_others_do(ranks: Pools) -> None:
    assert ranks(2)(saved_by_one) == [True, True]


class Lookup(torch.nn.Module):
    """A table with sparse gradients beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = torch.nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))


def rests_sparse(rank: int, world: int) -> None:
    ddps = [wrap(Lookup(), EDGCState(Dense())), wrap(Lookup(), None)]
    for step in range(6):
        words = torch.randint(
            0, 20, (5, 3), generator=torch.Generator().manual_seed(9 * step + rank)
        )
        weights = torch.randn(5, 4, generator=torch.Generator().manual_seed(step + 50 * rank))
        averaged = []
        for ddp in ddps:
            ddp.zero_grad()
            (ddp(words) * weights).sum().backward()
            averaged.append([p.grad.to_dense() for p in ddp.parameters() if p.grad is not None])
        assert len(averaged[0]) == 3
        assert all(torch.equal(a, b) for a, b in zip(*averaged, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_sparse_gradients_at_rest_are_those_of_plain_ddp(ranks: Pools, world: int) -> None:
    ranks(world)(rests_sparse)


def never_rests(rank: int, world: int, options: dict[str, Any]) -> bool:
    state = EDGCState(**options)
    ddp = wrap(Given(SHAPES), state, SMALL_BUCKETS_MB)
    for step in range(6):
        averages(ddp, draw(SHAPES, seed=step + rank))
    return state.engine._resting


@pytest.mark.parametrize(
    ("options", "rests"),
    [
        ({"controller": Dense()}, True),
        ({"controller": Dense(window=3)}, False),
        ({"controller": Dense(), "dense_dtype": "bf16"}, False),
        ({"controller": FixedRank(2)}, False),
    ],
)
def test_only_what_is_dense_for_good_rests(
    ranks: Pools, options: dict[str, Any], rests: bool
) -> None:
    assert ranks(2)(never_rests, options) == [rests] * 2
