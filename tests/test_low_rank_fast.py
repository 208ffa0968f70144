"""The fast reducer against its readable twin, on one rank, without processes or a network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from powersgd_reference import Reference
from torch import Tensor

from edgc_ddp.decisions import Layout, MatrixSpec, Plan
from edgc_ddp.memory import ParameterMemory, Slot
from edgc_ddp.observer import Observer
from edgc_ddp.reducers.bucket import Bucket, Settings, add_residual
from edgc_ddp.reducers.low_rank import reduce_low_rank
from edgc_ddp.reducers.wire import largest_sizes

SIDES = [(24, 40), (40, 24), (24, 40), (32, 32), (90, 8)]
VECTOR = 13
CPU = torch.device("cpu")


class Done:
    def wait(self) -> None:
        """Nothing is on its way."""


class Alone:
    """A lane of one rank: every sum is what it is given."""

    world_size, rank, device = 1, 0, CPU

    def all_reduce(self, tensor: Tensor, channel: int) -> Done:
        return Done()

    def all_gather(self, everyone: Tensor, mine: Tensor, channel: int) -> Done:
        everyone.copy_(mine)
        return Done()


def memory_at(rank: int, residual_dtype: torch.dtype = torch.float32) -> ParameterMemory:
    memory = ParameterMemory(0, residual_dtype)
    for index, sides in enumerate(SIDES):
        slot = memory.slots[f"w{index}"] = Slot(f"w{index}", math.prod(sides), sides, index)
        memory.set_rank(slot, min(rank, *sides), CPU)
    memory.slots["b"] = Slot("b", VECTOR, None)
    return memory


def average(
    memory: ParameterMemory,
    gradient: Tensor,
    wire: torch.dtype = torch.float32,
    observer: Observer | None = None,
) -> Tensor:
    bucket = Bucket(gradient.clone(), tuple(memory.slots.values()))
    task = reduce_low_rank(bucket, Alone(), Settings(wire, True, 0.0), memory, observer)  # type: ignore
    try:
        while True:
            next(task).wait()
    except StopIteration as finished:
        result: Tensor = finished.value
        return result


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    size = sum(math.prod(sides) for sides in SIDES) + VECTOR
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrices(memory: ParameterMemory, flat: Tensor) -> Sequence[Tensor]:
    slots = list(memory.slots.values())
    parts = flat.split([slot.numel for slot in slots])
    return [slot.as_matrix(p) for slot, p in zip(slots[:-1], parts[:-1], strict=True)]


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_equals_the_twin_step_by_step(rank: int) -> None:
    memory = memory_at(rank)
    twins = [Reference(1, slot.basis_NR) for slot in memory.slots.values() if slot.sides]  # type: ignore
    for step in range(6):
        gradient = drawn(step)
        got = average(memory, gradient)
        pairs = zip(twins, matrices(memory, gradient), matrices(memory, got), strict=True)
        for twin, grad_MN, got_MN in pairs:
            torch.testing.assert_close(got_MN, twin.step([grad_MN]).float(), rtol=2e-4, atol=2e-4)
        assert torch.equal(got[-VECTOR:], gradient[-VECTOR:])
        for slot, twin in zip(memory.slots.values(), twins, strict=False):
            rest_MN = slot.as_matrix(slot.residual)  # type: ignore[arg-type]
            torch.testing.assert_close(rest_MN.double(), twin.residuals_MN[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_average_and_residual_make_up_the_input(wire: torch.dtype, dtype: torch.dtype) -> None:
    memory = memory_at(3)
    before = torch.zeros_like(drawn(0))
    for step in range(4):
        gradient = drawn(step, dtype)
        got = average(memory, gradient, wire)
        rests = [slot.residual for slot in memory.slots.values() if slot.residual is not None]
        after = torch.cat([*rests, torch.zeros(VECTOR)])
        want = gradient.float() + before
        # A bfloat16 gradient's average is rounded to its own type, which nothing can feed back.
        tolerance = 2e-5 if dtype != torch.bfloat16 else 2e-2
        factors = slice(0, -VECTOR)
        torch.testing.assert_close(
            (got.float() + after)[factors], want[factors], rtol=tolerance, atol=tolerance
        )
        torch.testing.assert_close(got[-VECTOR:].float(), want[-VECTOR:], rtol=1e-2, atol=1e-2)
        before = after


def test_a_narrow_residual_loses_only_its_own_rounding() -> None:
    narrow = memory_at(3, torch.bfloat16)
    given, got = torch.zeros_like(drawn(0)), torch.zeros_like(drawn(0))
    for step in range(30):
        given += drawn(step)
        got += average(narrow, drawn(step))
    slots = [slot for slot in narrow.slots.values() if slot.sides]
    assert all(slot.residual.dtype == torch.bfloat16 for slot in slots)  # type: ignore[union-attr]
    # At most half a unit in the last place (2^-9) of what was left, once a step.
    rest = torch.cat([*(s.residual.float() for s in slots), torch.zeros(VECTOR)])  # type: ignore
    assert (given - got - rest).norm() <= 30 * 2**-9 * rest.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_a_bad_step_leaves_no_trace(
    bad: float, wire: torch.dtype, residual_dtype: torch.dtype
) -> None:
    memory, clean = memory_at(3, residual_dtype), memory_at(3, residual_dtype)
    for each in (memory, clean):
        average(each, drawn(0), wire)
    spoilt = drawn(1)
    spoilt[7] = bad
    assert not torch.isfinite(average(memory, spoilt, wire)[:100]).all()
    assert torch.equal(average(memory, drawn(2), wire), average(clean, drawn(2), wire))


def test_a_matrix_without_a_gradient_is_left_out_of_a_windows_means() -> None:
    """Its residual would count as what compression leaves, though nothing was to be sent."""
    layout = Layout(tuple(MatrixSpec(f"w{k}", min(s), max(s)) for k, s in enumerate(SIDES)))
    told = []
    for unused in (False, True):
        memory, observer = memory_at(3), Observer(layout, CPU)
        observer.reset(Plan({matrix.name: 3 for matrix in layout.matrices}, phase="test"))
        average(memory, drawn(0), observer=observer)
        if unused:
            without = drawn(1)
            without[: math.prod(SIDES[0])] = 0
            got = average(memory, without, observer=observer)
            assert not got[: math.prod(SIDES[0])].any()
        told.append(observer.observation(observer.vector([]), 1))
    once, twice = told
    for name in ("residual_share", "energy", "captured", "left"):
        before, after = getattr(once, name), getattr(twice, name)
        assert after["w0"] == before["w0"] and after["w1"] != before["w1"], name
    assert once.energy["w0"] > 0 and once.left["w0"] > 0


def test_narrow_residuals_are_added_block_by_block() -> None:
    flat = torch.randn(200_001, generator=torch.Generator().manual_seed(0))
    residual = flat.flip(0).bfloat16()
    want = flat + 0.25 * residual.float()
    add_residual(flat, residual, 0.25)
    assert torch.equal(flat, want)


def test_largest_sizes_are_the_infinity_norm() -> None:
    columns = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    columns[0] = 0
    columns[1, 3], columns[2, 3], columns[3, 3] = math.nan, math.inf, -math.inf
    got, want = largest_sizes(columns), torch.linalg.vector_norm(columns, math.inf, dim=-1)
    assert torch.equal(got.isnan(), want.isnan()) and got[1].isnan()
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))
