"""Ranks from measured spectra: the knapsack against brute force, water-filling, traces by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc_ddp.controllers import Accordion, AdaptiveController, LGreco
from edgc_ddp.controllers.adaptive import Item, allot
from edgc_ddp.controllers.lgreco import Choice, cheapest
from edgc_ddp.controllers.options import pack, unpack
from edgc_ddp.controllers.spectrum import errors, largest_rank, spectrum, tail
from edgc_ddp.decisions import Controller, Layout, MatrixSpec, Observation
from edgc_ddp.memory import Slot
from edgc_ddp.reducers.bucket import Settings

A, B = MatrixSpec("a", 64, 64), MatrixSpec("b", 64, 64)


def run(controller: Controller, layout: Layout, *seen: Observation | None) -> list[dict[str, int]]:
    state, trace = controller.init(layout), []
    for step, observation in enumerate(seen):
        state, plan = controller.decide(state, observation, 100 * step)
        trace.append(dict(plan.ranks))
    return trace


# -- The continued spectrum ------------------------------------------------------------------------


@settings(deadline=None)
@given(last=st.floats(1e-9, 1e9), left=st.floats(0, 1e9), count=st.integers(1, 200))
def test_a_tail_sums_to_what_is_left_and_falls(last: float, left: float, count: int) -> None:
    energies = tail(last, left, count)
    assert len(energies) == count
    assert math.fsum(energies) == pytest.approx(left, rel=1e-6)
    assert all(x >= y >= 0 for x, y in itertools.pairwise(energies))
    assert energies[0] <= max(last, left / count) * (1 + 1e-6) or left < 1e-9 * last


def test_a_geometric_spectrum_is_continued_exactly() -> None:
    truth = [0.8**k for k in range(64)]
    seen = Observation(100, captured={"a": tuple(truth[:5])}, left={"a": sum(truth[5:])})
    assert spectrum(A, seen) == pytest.approx(truth, rel=1e-6)


def test_what_was_not_measured_has_no_spectrum() -> None:
    assert spectrum(A, Observation(100)) is None
    for captured, left in (((), 1.0), ((1.0,), math.nan), ((math.inf,), 1.0), ((0.0,), 0.0)):
        assert spectrum(A, Observation(100, captured={"a": captured}, left={"a": left})) is None


@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 9), (2, 2), (3, 6), (16, 256), (64, 64), (100, 300)]
)
def test_the_largest_rank_is_the_last_that_saves(rows: int, cols: int) -> None:
    rank = largest_rank(MatrixSpec("w", rows, cols))
    assert rank * (rows + cols) < rows * cols <= (rank + 1) * (rows + cols)


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0, 7.5])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.int8])
def test_a_layout_knows_what_the_run_compresses(wire: torch.dtype, rate: float) -> None:
    chosen = Settings(wire, min_compression_rate=rate)
    sides = [(2, 2), (3, 6), (64, 177), (32, 32), (16, 256)]
    layout = Layout(tuple(MatrixSpec(f"{m} x {n}", m, n) for m, n in sides))
    for matrix in chosen.bounded(layout).matrices:
        slot = Slot(matrix.name, matrix.numel, (matrix.rows, matrix.cols))
        compressed = [
            rank
            for rank in range(1, matrix.rows + 1)
            if chosen.compresses(replace(slot, rank=rank))
        ]
        assert matrix.highest == max(compressed, default=0)
        assert largest_rank(matrix) <= matrix.highest
        assert unpack(pack(Layout((matrix,)))).matrices == (matrix,)


@pytest.mark.parametrize("cost", [0.0, -1, math.nan, "4"])
def test_a_cost_that_is_none_is_told(cost: object) -> None:
    controller = AdaptiveController(window=10, cost=lambda matrix: cost)  # type: ignore
    state, _ = controller.decide(controller.init(Layout((A,))), None, 0)
    seen = Observation(10, captured={"a": (2.0, 1.0)}, left={"a": 1.0})
    with pytest.raises(ValueError, match=r"cost\('a'\)=.*: expected a finite number above 0"):
        controller.decide(state, seen, 10)


# -- L-GreCo ---------------------------------------------------------------------------------------


def brute_force(options: list[list[Choice]], budget: float) -> tuple[int, float]:
    """The least cost within the budget and the least error at that cost."""
    sums = [
        (sum(cost for cost, _ in picked), math.fsum(error for _, error in picked))
        for picked in itertools.product(*options)
    ]
    return min(pair for pair in sums if pair[1] <= budget)


@pytest.mark.parametrize("seed", range(30))
def test_the_knapsack_equals_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    options = []
    budget = 0.0
    for _ in range(4):
        sides = int(random.integers(8, 400))
        left = errors(np.sort(random.exponential(size=9))[::-1].tolist())
        options.append([(rank * sides, left[rank]) for rank in range(1, 7)])
        budget += left[3]
    chosen = [row[index] for row, index in zip(options, cheapest(options, budget), strict=True)]
    found = (sum(cost for cost, _ in chosen), math.fsum(error for _, error in chosen))
    cost, error = brute_force(options, budget)
    assert found[0] == cost
    assert found[1] == pytest.approx(error)
    assert cost <= sum(row[2][0] for row in options)


def test_a_large_knapsack_keeps_the_budget_and_comes_close() -> None:
    """Costs without a common divisor, summing to far more than the table has room for."""
    random = np.random.default_rng(1)
    options, budget = [], 0.0
    for _ in range(60):
        sides = int(random.integers(1000, 9000))
        left = errors((random.exponential() * 0.8 ** np.arange(40)).tolist())
        options.append([(rank * sides, left[rank]) for rank in range(4, 33)])
        budget += left[16]
    chosen = [row[index] for row, index in zip(options, cheapest(options, budget), strict=True)]
    cost, error = (sum(pair[k] for pair in chosen) for k in (0, 1))
    assert error <= budget * (1 + 1e-6)
    # No choice of ranks, not even fractional ones, is cheaper than the Lagrangian bound.
    bound = max(
        sum(min(c + price * e for c, e in row) for row in options) - price * budget
        for price in np.geomspace(1e2, 1e8, 400)
    )
    assert bound <= cost <= 1.02 * bound
    assert cost < sum(row[12][0] for row in options)


def test_without_a_choice_in_the_budget_the_least_error_is_taken() -> None:
    assert cheapest([[(1, 5.0), (2, 3.0)], [(1, 4.0), (9, 1.0)]], budget=0.5) == [1, 1]


def test_lgreco_trace() -> None:
    """The uniform rank 4 leaves 1 of the steep energies and 60 of the flat ones."""
    steep = tuple(2.0 ** (4 - k) for k in range(4))
    seen = Observation(100, captured={"a": steep, "b": (1.0,) * 4}, left={"a": 1.0, "b": 60.0})
    trace = run(LGreco(4, window=100), Layout((A, B)), None, seen, Observation(100))
    # A direction of b is worth 1: less than the fourth of a (2), more than the fifth.
    assert trace == [{"a": 4, "b": 4}, {"a": 4, "b": 4}, {"a": 4, "b": 4}]
    # Now two directions of a are worth less than the fifth of b: one direction fewer in all.
    weak = tuple(x / 100 for x in steep)
    seen = Observation(100, captured={"a": weak, "b": (1.0,) * 4}, left={"a": 0.01, "b": 60.0})
    trace = run(LGreco(4, window=100), Layout((A, B)), None, seen, Observation(100))
    assert trace == [{"a": 4, "b": 4}, {"a": 2, "b": 5}, {"a": 2, "b": 5}]


def test_scaling_a_matrix_matters_to_squared_errors_and_not_to_relative_ones() -> None:
    steep, flat = (8.0, 4.0, 2.0, 1.0), (1.0, 0.9, 0.8, 0.7)
    chosen = {}
    for relative, scale in itertools.product((False, True), (1.0, 1000.0)):
        seen = Observation(
            100,
            captured={"a": steep, "b": tuple(scale * x for x in flat)},
            left={"a": 1.0, "b": 30.0 * scale},
        )
        controller = LGreco(4, window=100, relative=relative)
        chosen[relative, scale] = run(controller, Layout((A, B)), None, seen)[1]
    assert chosen[True, 1.0] == chosen[True, 1000.0]
    assert chosen[False, 1.0] != chosen[False, 1000.0]


# -- The adaptive controller -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_no_exchange_of_directions_improves_the_allotment(seed: int) -> None:
    random = np.random.default_rng(seed)
    items = []
    for place in range(4):
        rows, cols = (int(x) for x in np.sort(random.integers(8, 200, size=2)))
        energies = np.sort(random.exponential(size=rows))[::-1].tolist()
        items.append(Item(MatrixSpec(str(place), rows, cols), energies, 1, 7, rows + cols))
    budget = 3.5 * sum(item.cost for item in items)
    given_out = allot(items, budget, target=0.0)
    assert given_out.entries <= budget

    def error(ranks: tuple[int, ...]) -> float:
        return sum(
            item.matrix.numel * sum(item.energies[rank:]) / sum(item.energies)
            for item, rank in zip(items, ranks, strict=True)
        )

    mine = tuple(given_out.ranks.values())
    weight = sum(item.matrix.numel for item in items)
    assert given_out.error == pytest.approx(error(mine) / weight)
    best = min(
        error(ranks)
        for ranks in itertools.product(range(1, 8), repeat=4)
        if sum(r * item.cost for r, item in zip(ranks, items, strict=True)) <= given_out.entries
    )
    # Spending what it spent, nothing beats it but by the last direction that did not fit.
    worth = max(
        item.matrix.numel * item.energies[rank] / sum(item.energies)
        for item, rank in zip(items, mine, strict=True)
    )
    assert error(mine) - best <= worth


def test_adaptive_trace_under_a_step_limit_and_a_budget() -> None:
    """128 entries a direction; .25 of 2 x 4096 entries are 16 directions."""
    controller = AdaptiveController(window=100, warmup=0, budget=0.25, step_limit=2)
    steep = tuple(2.0**-k for k in range(8))
    seen = Observation(100, captured={"a": steep, "b": (1.0,) * 8}, left={"a": 0.01, "b": 50.0})
    fewer = Observation(
        100, captured={"a": steep[:6], "b": (1.0,) * 10}, left={"a": 0.04, "b": 48.0}
    )
    unseen = Observation(100)
    trace = run(controller, Layout((A, B)), None, seen, fewer, unseen)
    assert trace == [{"a": 8, "b": 8}, {"a": 6, "b": 10}, {"a": 5, "b": 11}, {"a": 5, "b": 11}]


def test_a_target_is_met_with_the_fewest_directions() -> None:
    """Energies 1/2, 1/4, 1/8 ...: rank 3 leaves an eighth, rank 2 a quarter."""
    controller = AdaptiveController(window=100, warmup=0, target=0.13, step_limit=30)
    energies = tuple(2.0 ** -(k + 1) for k in range(6))
    seen = Observation(100, captured={"a": energies}, left={"a": 2.0**-6})
    assert run(controller, Layout((A,)), None, seen)[1] == {"a": 3}


def test_the_warm_up_shows_the_rank_that_a_target_needs() -> None:
    controller = AdaptiveController(window=100, warmup=100, target=0.5)
    curve = (8.0, 6.0, 5.0, 4.0, 3.0)
    trace = run(controller, Layout((A, B)), None, Observation(100, error_curve=curve))
    assert trace == [{"a": 0, "b": 0}, {"a": 3, "b": 3}]


def test_a_dearer_matrix_gets_fewer_directions() -> None:
    flat = Observation(
        100, captured={"a": (1.0,) * 8, "b": (1.0,) * 8}, left={"a": 56.0, "b": 56.0}
    )
    for cost, expected in (
        (None, {"a": 8, "b": 8}),
        (lambda m: 1 + (m.name == "a"), {"a": 4, "b": 12}),
    ):
        controller = AdaptiveController(window=100, warmup=0, budget=0.25, cost=cost)
        assert run(controller, Layout((A, B)), None, flat)[1] == expected


def test_scaling_a_matrix_does_not_move_the_adaptive_ranks() -> None:
    small, large = (
        Observation(
            100,
            captured={"a": (4.0, 2.0, 1.0), "b": (5.0 * scale, 4.0 * scale, 3.0 * scale)},
            left={"a": 1.0, "b": 20.0 * scale},
        )
        for scale in (1e-6, 1e6)
    )
    controller = AdaptiveController(window=100, warmup=0)
    layout = Layout((A, B))
    assert run(controller, layout, None, small) == run(controller, layout, None, large)


# -- Accordion -------------------------------------------------------------------------------------


def test_accordion_trace() -> None:
    """Norms 4 3 1 1 2: changes of 25, 67, 0 and 100 per cent; windows without one are passed over."""
    energies = (16.0, 9.0, 1.0, math.nan, 1.0, 4.0)
    seen = [Observation(100, gradient_energy={"a": energy}) for energy in energies]
    trace = run(Accordion(16, 4, window=100), Layout((A,)), None, *seen)
    assert [ranks["a"] for ranks in trace] == [16, 16, 4, 16, 16, 4, 16]
