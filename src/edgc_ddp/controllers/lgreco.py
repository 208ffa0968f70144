"""The fewest bytes at the error of a uniform rank: L-GreCo's knapsack (arXiv 2210.17357)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgc_ddp.controllers.options import (
    bad_option,
    check_count,
    iterations,
    pack,
    sampling_over,
    unpack,
)
from edgc_ddp.controllers.spectrum import errors, largest_rank, spectrum
from edgc_ddp.decisions import Layout, Observation, Plan, State

_TABLE = 16384
_SLACK = 1e-9
Choice = tuple[int, float]
"""What one rank of one matrix costs (a whole number) and the error that it leaves."""


def cheapest(options: Sequence[Sequence[Choice]], budget: float) -> list[int]:
    """For each matrix the index of its chosen option: least cost with summed error <= ``budget``.

    Where no choice keeps the budget, the least error (then the least cost). Dynamic programming over
    the summed cost; exact while the largest sum, in units of the costs' common divisor, stays below
    16384, else costs are rounded up to coarser units.

    >>> cheapest([[(1, 5.0), (2, 1.0)], [(3, 4.0), (6, 0.5)]], budget=5.0)
    [1, 0]
    """
    if not options:
        return []
    unit = math.gcd(*(cost for row in options for cost, _ in row)) or 1
    largest = sum(max(cost for cost, _ in row) for row in options)
    unit *= max(1, math.ceil(largest / unit / _TABLE))
    size = sum(max(-(-cost // unit) for cost, _ in row) for row in options) + 1
    # best[c]: the least error at a summed cost of exactly c units.
    best = np.full(size, np.inf)
    best[0] = 0.0
    picks = []
    for row in options:
        reached, picked = np.full(size, np.inf), np.zeros(size, dtype=np.int32)
        for index, (cost, error) in enumerate(row):
            shift = -(-cost // unit)
            candidate = np.full(size, np.inf)
            candidate[shift:] = best[: size - shift] + error
            better = candidate < reached
            reached[better], picked[better] = candidate[better], index
        best = reached
        picks.append(picked)
    # The slack lets the uniform choice itself count, whatever the order of the sums.
    kept = np.flatnonzero(best <= budget + _SLACK * abs(budget))
    at = int(kept[0]) if kept.size else int(np.argmin(best))
    chosen = []
    for row, picked in zip(reversed(options), reversed(picks), strict=True):
        index = int(picked[at])
        chosen.append(index)
        at -= -(-row[index][0] // unit)
    return chosen[::-1]


@dataclass(frozen=True)
class LGreco:
    """Per-matrix ranks with the fewest bytes at the error that ``rank`` would leave everywhere.

    Starts at the uniform ``rank``. At every window's end the averaged factors and the probe give
    each matrix's spectrum, continued where it was not measured, and the knapsack is solved among the
    ranks within ``step_limit`` (None = any) of the present one and within ``r_min..r_max`` (None =
    half and twice ``rank``). Matrices not measured in a window keep their rank. ``relative`` takes each
    matrix's error as a share of its energy, times its entries: what an optimizer that rescales the
    gradient (Adam) sees. The paper sums squared errors as they are: ``relative=False``.

    Raises ValueError for counts below 1, bounds that leave ``rank`` out, or a window out of range.

    >>> from edgc_ddp.decisions import MatrixSpec
    >>> controller = LGreco(rank=2, window=100)
    >>> state = controller.init(Layout((MatrixSpec("a", 64, 64), MatrixSpec("b", 64, 64))))
    >>> state, plan = controller.decide(state, None, 0)
    >>> seen = Observation(
    ...     100, captured={"a": (9.0, 0.1), "b": (9.0, 9.0)}, left={"a": 0.1, "b": 9.0}
    ... )
    >>> controller.decide(state, seen, 100)[1].ranks
    {'a': 1, 'b': 3}
    """

    rank: int = 16
    window: int | float = 1000
    r_min: int | None = None
    r_max: int | None = None
    step_limit: int | None = None
    relative: bool = False
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_count("rank", self.rank, remedy="use Dense() to send everything uncompressed")
        for option in ("r_min", "r_max", "step_limit"):
            if getattr(self, option) is not None:
                check_count(option, getattr(self, option), remedy=f"leave {option} out")
        if not isinstance(self.relative, bool):
            raise bad_option("relative", self.relative, "True or False", "True suits Adam")
        low, high = self._bounds()
        if not low <= self.rank <= high:
            option, value = ("r_min", low) if low > self.rank else ("r_max", high)
            expected = f"bounds around rank={self.rank}"
            raise bad_option(option, value, expected, "move the bound or the rank")
        iterations("window", self.window, self.total_steps)

    def _bounds(self) -> tuple[int, int]:
        low = max(1, self.rank // 2) if self.r_min is None else self.r_min
        return low, 2 * self.rank if self.r_max is None else self.r_max

    def init(self, layout: Layout) -> State:
        ranks = {matrix.name: min(self.rank, matrix.rows) for matrix in layout.matrices}
        return {"matrices": pack(layout), "ranks": ranks}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        seen = Observation(steps=0) if observation is None else observation
        ranks, reason = self._solve(state, seen)
        if observation is None:
            reason = f"start at rank {self.rank}"
        window = iterations("window", self.window, self.total_steps)
        return {**state, "ranks": ranks}, Plan(
            ranks=dict(ranks),
            phase="compress",
            until=step + window,
            sampling=sampling_over(window),
            reason=reason,
        )

    def _solve(self, state: State, seen: Observation) -> tuple[dict[str, int], str]:
        ranks, budget = dict(state["ranks"]), 0.0
        names: list[str] = []
        offered: list[list[int]] = []
        options: list[list[Choice]] = []
        for matrix in unpack(state["matrices"]).matrices:
            energies = spectrum(matrix, seen)
            now = ranks[matrix.name]
            if energies is None:
                continue
            scale = matrix.numel / math.fsum(energies) if self.relative else 1.0
            left = [scale * error for error in errors(energies)]
            low, high = self._bounds()
            if self.step_limit is not None:
                low, high = max(low, now - self.step_limit), min(high, now + self.step_limit)
            # No more than saves bytes, unless the present rank is up there already.
            top = min(matrix.rows, max(largest_rank(matrix), now))
            choices = list(range(min(low, top), min(high, top) + 1))
            names.append(matrix.name)
            offered.append(choices)
            options.append([(r * (matrix.rows + matrix.cols), left[r]) for r in choices])
            budget += left[min(self.rank, matrix.rows)]
        if not names:
            return ranks, "no spectrum in the window: ranks kept"
        before = sum(ranks.values())
        for name, choices, index in zip(names, offered, cheapest(options, budget), strict=True):
            ranks[name] = choices[index]
        return ranks, (
            f"error of uniform rank {self.rank} at the fewest bytes: "
            f"ranks sum to {sum(ranks.values())} after {before}"
        )
