"""Parameters that no rank uses on some steps: what is owed must outlast them, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import Ranks
from scenes import Given as Always
from scenes import averages, draw, plain_mean, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState
from edgc_ddp.controllers import FixedRank
from edgc_ddp.decisions import Layout, Observation, Plan, State
from edgc_ddp.memory import Slot
from edgc_ddp.reducers.bucket import Item
from edgc_ddp.reducers.used import write_flags

Pools = Callable[[int], Ranks]
SHAPES = [(24, 40), (40, 24), (9,)]
SOMETIMES = 1
"""The parameter that is left out on every third step."""
WIRES = ["fp32", "bf16", "int8"]
PRECISION = {"fp32": 1e-6, "bf16": 2e-2, "int8": 1e-5}
"""Of what was averaged plus what is owed: a sum in bf16 rounds on the way, which nobody owes."""
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2, "int8": 2e-2}
"""Of one average at full rank."""


class Given(nn.Module):
    """Its gradients are what the test says; None leaves a parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(w * g).sum() for w, g in pairs if g is not None]).sum()


@dataclass(frozen=True)
class Planned:
    """For each step from which it holds, the ranks of the first and of the second matrix."""

    plans: Mapping[int, tuple[int, int]]

    def init(self, layout: Layout) -> State:
        return {"names": [matrix.name for matrix in layout.matrices]}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        ranks = self.plans[max(at for at in self.plans if at <= max(step, min(self.plans)))]
        later = [at for at in self.plans if at > step]
        until = min(later) if later else 10**6
        return state, Plan(dict(zip(state["names"], ranks, strict=True)), "planned", until=until)


def state_with(controller: Any, wire: str, model: nn.Module) -> EDGCState:
    return EDGCState(controller=controller, model=model, wire_dtype=wire, min_compression_rate=0)


def slot_of(state: EDGCState) -> Slot:
    return state.engine.memory.slots[f"weights.{SOMETIMES}"]


def owed_by_all(slot: Slot) -> Tensor:
    shape = SHAPES[SOMETIMES]
    rest = torch.zeros(shape) if slot.residual is None else slot.residual.view(shape)
    return plain_mean([rest])[0]


def step_on(
    ddp: DistributedDataParallel, rank: int, step: int, use: bool
) -> tuple[Tensor | None, Tensor]:
    """One backward: the average and the mean gradient of the parameter that is used or not."""
    ddp.zero_grad()
    gradients: list[Tensor | None] = [*draw(SHAPES, seed=100 * step + rank)]
    (mean,) = plain_mean([gradients[SOMETIMES]])  # type: ignore[list-item]
    if not use:
        gradients[SOMETIMES] = None
    ddp(gradients).backward()
    got = ddp.module.weights[SOMETIMES].grad  # type: ignore[union-attr, index]
    return got, mean


# -- compressed --------------------------------------------------------------------------------


def every_third_step_without(rank: int, world: int, wire: str, at_rank: int) -> None:
    model = Given()
    state = state_with(FixedRank(at_rank), wire, model)
    ddp = wrap(model, state, find_unused_parameters=True)
    given, received = torch.zeros(SHAPES[SOMETIMES]), torch.zeros(SHAPES[SOMETIMES])
    for step in range(13):
        slot = state.engine.memory.slots.get(f"weights.{SOMETIMES}")
        before = None if slot is None or slot.residual is None else slot.residual.clone()
        basis = None if slot is None or slot.basis_NR is None else slot.basis_NR.clone()
        use = step % 3 != 2
        got, mean = step_on(ddp, rank, step, use)
        slot = slot_of(state)
        if use:
            assert got is not None
            given += mean
            received += got
            if at_rank == 24:
                assert (got - mean).norm() <= ROUNDING[wire] * mean.norm()
        else:
            assert got is None
            if before is not None and basis is not None:
                assert slot.residual is not None and torch.equal(slot.residual, before)
                assert slot.basis_NR is not None and torch.equal(slot.basis_NR, basis)
    assert slot.residual is not None
    if at_rank == 2:
        assert owed_by_all(slot).norm() > 0.3 * given.norm()
    assert (received + owed_by_all(slot) - given).norm() <= PRECISION[wire] * given.norm()


@pytest.mark.parametrize("at_rank", [1, 2, 24])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world", [2, 3])
def test_nothing_is_lost_where_nobody_uses_a_parameter(
    ranks: Pools, world: int, wire: str, at_rank: int
) -> None:
    ranks(world)(every_third_step_without, wire, at_rank)


def never_used(rank: int, world: int, options: dict[str, bool]) -> None:
    model = Given()
    state = state_with(FixedRank(2), "fp32", model)
    ddp = wrap(model, state, **options)
    basis: list[Tensor] = []
    given, received = torch.zeros(SHAPES[0]), torch.zeros(SHAPES[0])
    for step in range(8):
        got, _ = step_on(ddp, rank, step, use=False)
        assert got is None or not got.any()
        given += plain_mean([draw(SHAPES, seed=100 * step + rank)[0]])[0]
        received += model.weights[0].grad  # type: ignore[operator]
        if slot_of(state).basis_NR is not None:
            basis.append(slot_of(state).basis_NR.clone())  # type: ignore[union-attr]
    residual = slot_of(state).residual
    assert residual is not None and not residual.any()
    assert len(basis) == 6 and all(torch.equal(each, basis[0]) for each in basis)
    rest = state.engine.memory.slots["weights.0"].residual
    assert rest is not None
    (owed,) = plain_mean([rest.view(SHAPES[0])])
    assert (received + owed - given).norm() <= 1e-6 * given.norm()


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_a_parameter_that_is_never_used(ranks: Pools, option: str) -> None:
    ranks(2)(never_used, {option: True})


def one_entry_on_one_rank(rank: int, world: int, wire: str, entry: float) -> None:
    """A gradient that all but one rank lack, and of which that one has a single entry, the last."""
    state = EDGCState(controller=FixedRank(60), wire_dtype=wire, min_compression_rate=0)
    ddp = wrap(Always([(60, 70), (24, 40)]), state)
    for step in range(3):
        averages(ddp, draw([(60, 70), (24, 40)], seed=step))
    (slot, _) = state.engine.registry.slots(list(ddp.module.parameters()))
    assert slot.residual is not None
    slot.residual.zero_()
    gradient = torch.zeros(60, 70)
    if rank == world - 1:
        gradient[-1, -1] = entry
    got, _ = averages(ddp, [gradient, torch.zeros(24, 40)])
    if math.isnan(entry):
        assert not torch.isfinite(got).any()
        return
    assert float(got[-1, -1]) == pytest.approx(entry / world, rel=2e-2)
    assert float(got.abs().sum()) == pytest.approx(entry / world, rel=0.2)


@pytest.mark.parametrize("entry", [1.0, 1e-30, math.nan])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world", [2, 3])
def test_one_entry_on_one_rank_is_a_gradient(
    ranks: Pools, world: int, wire: str, entry: float
) -> None:
    ranks(world)(one_entry_on_one_rank, wire, entry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_flags_see_any_entry(dtype: torch.dtype) -> None:
    def flagged(flat: Tensor) -> float:
        flags_F = torch.full((2,), 7.0)
        sides = (2, len(flat) // 2)
        write_flags([Item(Slot("w", len(flat), sides), flat)] * 2, flags_F)
        assert flags_F[0] == flags_F[1]
        return float(flags_F[0])

    for length in (4, 1024, 1026, 3072, 10_000):
        flat = torch.zeros(length, dtype=dtype)
        assert flagged(flat) == flagged(-flat) == 0
        for place in {0, 1, length - 1, min(1023, length - 1), min(1024, length - 1)}:
            for entry in (1e-30, -3.0, math.nan, math.inf):
                flat[place] = entry
                assert flagged(flat) == 1, (length, place, entry)
            flat[place] = 0


# -- leaving compression -----------------------------------------------------------------------


def pending_until_used(
    rank: int, world: int, wire: str, first: int, unused: tuple[int, ...]
) -> None:
    """Compression ends at step 6, where nobody has a gradient for a while."""
    model = Given()
    state = state_with(Planned({2: (2, 2), 6: (first, 0)}), wire, model)
    ddp = wrap(model, state, find_unused_parameters=True)
    given, received = torch.zeros(SHAPES[SOMETIMES]), torch.zeros(SHAPES[SOMETIMES])
    paid = min(step for step in range(6, 20) if step not in unused)
    for step in range(paid + 2):
        if step == 6:
            before = slot_of(state).residual.clone()  # type: ignore[union-attr]
            assert before.norm() > 0.5
        use = step not in unused
        got, mean = step_on(ddp, rank, step, use)
        if use:
            assert got is not None
            given += mean
            received += got
        residual = slot_of(state).residual
        if 6 <= step < paid:
            assert residual is not None and torch.equal(residual, before)
        error = (received + owed_by_all(slot_of(state)) - given).norm()
        # Beside bf16 and int8 factors a dense tensor travels in bf16.
        precision = PRECISION[wire] if wire != "int8" or step < paid else 2e-2
        assert error <= precision * given.norm(), (step, float(error))
        if step == paid:
            assert residual is not None and not residual.any()
    # Nothing is owed, so nothing is kept: not in memory, and not in a checkpoint.
    assert slot_of(state).residual is None
    assert state.state_dict()["slots"][f"weights.{SOMETIMES}"]["residual"] is None
    first_slot = state.engine.memory.slots["weights.0"]
    assert (first_slot.residual is None) == (first == 0)


@pytest.mark.parametrize("unused", [(), (6,), (6, 7, 8)])
@pytest.mark.parametrize("first", [0, 2], ids=["dense bucket", "beside a compressed matrix"])
@pytest.mark.parametrize("wire", WIRES)
def test_what_is_owed_waits_for_a_gradient(
    ranks: Pools, wire: str, first: int, unused: tuple[int, ...]
) -> None:
    ranks(2)(pending_until_used, wire, first, unused)


def resumed_between(rank: int, world: int, at: int) -> tuple[bytes, int]:
    """A checkpoint just before, at and just after the step that pays what is owed."""
    model = Given()
    controller = Planned({2: (2, 2), 6: (2, 0)})
    state = state_with(controller, "fp32", model)
    ddp = wrap(model, state, find_unused_parameters=True)
    bits = b""
    for step in range(11):
        if step and step == at:
            saved = state.state_dict()
            state = state_with(controller, "fp32", model)
            state.load_state_dict(saved)
            ddp = wrap(model, state, find_unused_parameters=True)
        got, _ = step_on(ddp, rank, step, use=step not in (6, 7))
        bits += b"-" if got is None else got.numpy().tobytes()
    return bits, int(state.metrics()["wire_bytes"])


def test_checkpoints_around_the_payment_change_nothing(ranks: Pools) -> None:
    pool = ranks(2)
    whole = pool(resumed_between, 0)
    for at in (7, 8, 9, 10):
        assert pool(resumed_between, at) == whole


def loading_over_a_payment(rank: int, world: int) -> None:
    """A state that has just paid is given another one's debts: they must not go with its own."""
    model = Given()
    state = state_with(Planned({2: (2, 2), 6: (2, 0)}), "fp32", model)
    ddp = wrap(model, state, find_unused_parameters=True)
    for step in range(7):
        if step == 6:
            saved = state.state_dict()
        step_on(ddp, rank, step, use=True)
    state.load_state_dict(saved)
    owed = owed_by_all(slot_of(state))
    got, mean = step_on(ddp, rank, 7, use=True)
    assert got is not None and owed.norm() > 0.5
    torch.testing.assert_close(got, mean + owed)


def test_a_loaded_debt_is_not_forgotten(ranks: Pools) -> None:
    ranks(2)(loading_over_a_payment)


# -- bytes -------------------------------------------------------------------------------------


def bytes_of_a_step(rank: int, world: int, wire: str) -> int:
    model = Given()
    state = state_with(FixedRank(3), wire, model)
    ddp = wrap(model, state, find_unused_parameters=True)
    for step in range(3):
        step_on(ddp, rank, step, use=True)
    before = int(state.metrics()["wire_bytes"])
    step_on(ddp, rank, 3, use=False)
    return int(state.metrics()["wire_bytes"]) - before


def test_flags_are_counted_on_the_wire(ranks: Pools) -> None:
    entries = 2 * 3 * (24 + 40) + 9 + 2
    assert ranks(2)(bytes_of_a_step, "fp32") == [4 * entries] * 2
    assert ranks(2)(bytes_of_a_step, "bf16") == [2 * entries] * 2
    # One byte an entry of a factor and four a column; flags and the vector in bf16, whole words.
    first, second = 3 * (24 + 24) + 4 * 6 + 2 * (9 + 2), 3 * (40 + 40) + 4 * 6
    assert ranks(2)(bytes_of_a_step, "int8") == [-(-first // 4) * 4 + second] * 2
