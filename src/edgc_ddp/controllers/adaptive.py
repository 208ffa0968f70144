"""Ranks by measured energy per byte: every matrix stops where its next direction is worth the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from edgc_ddp.controllers.bounds import error_at
from edgc_ddp.controllers.options import (
    bad_option,
    check_count,
    check_share,
    iterations,
    pack,
    sampling_over,
    unpack,
)
from edgc_ddp.controllers.spectrum import largest_rank, spectrum
from edgc_ddp.decisions import Layout, MatrixSpec, Observation, Plan, State

DEFAULT_BUDGET = 0.25
_LARGEST_PROBE = 128


@dataclass(frozen=True)
class Item:
    """A matrix to be given a rank in ``low..high``; ``energies`` per direction, largest first."""

    matrix: MatrixSpec
    energies: Sequence[float]
    low: int
    high: int
    cost: float
    """Of one direction, in any unit."""


@dataclass(frozen=True)
class Allotment:
    """What :func:`allot` decided."""

    ranks: Mapping[str, int]
    error: float
    """Share of the energy left, matrices weighed by their entries."""
    entries: int
    """Entries of all factors, what a payload consists of."""


def allot(items: Sequence[Item], entries: float, target: float) -> Allotment:
    """Give out directions by falling worth per cost, until ``target`` is met or ``entries`` are spent.

    A direction is worth its share of its matrix's energy times the matrix's entries: an optimizer
    that rescales every gradient to unit size (Adam) turns that into the energy of its update. As
    energies fall within each matrix, this is the water-filling solution: no exchange of directions
    between matrices lowers the error at the same cost by more than one direction's worth.

    >>> square, wide = MatrixSpec("square", 64, 64), MatrixSpec("wide", 32, 256)
    >>> items = [Item(square, (8.0, 4.0, 2.0), 1, 3, 128), Item(wide, (8.0, 1.0, 1.0), 1, 3, 288)]
    >>> dict(allot(items, entries=600, target=0.0).ranks)
    {'square': 2, 'wide': 1}
    """
    totals = [math.fsum(item.energies) for item in items]
    weight = sum(item.matrix.numel for item in items)
    ranks = [item.low for item in items]
    left = math.fsum(
        item.matrix.numel * math.fsum(item.energies[item.low :]) / total
        for item, total in zip(items, totals, strict=True)
    )
    spent = sum(rank * _sides(item.matrix) for item, rank in zip(items, ranks, strict=True))
    # Among equals the lower rank comes first, so that equal matrices share alike.
    offers = sorted(
        (-(item.matrix.numel * item.energies[k] / total) / item.cost, k, place)
        for place, (item, total) in enumerate(zip(items, totals, strict=True))
        for k in range(item.low, item.high)
    )
    closed: set[int] = set()
    for worth, k, place in offers:
        if left <= target * weight:
            break
        item = items[place]
        if place in closed or spent + _sides(item.matrix) > entries:
            closed.add(place)
            continue
        ranks[place] = k + 1
        spent += _sides(item.matrix)
        left += worth * item.cost
    chosen = {item.matrix.name: rank for item, rank in zip(items, ranks, strict=True)}
    return Allotment(chosen, max(0.0, left / weight) if weight else 0.0, spent)


def _sides(matrix: MatrixSpec) -> int:
    return matrix.rows + matrix.cols


@dataclass(frozen=True, kw_only=True)
class AdaptiveController:
    """Measures every matrix's spectrum and spends entries where they carry most energy.

    Nothing needs tuning: without options a quarter of the entries is sent (the wire type makes each of
    them smaller still), from the first decision on: a dense warm-up was not worth its bytes.

    - ``budget``: entries of the factors as a share of the matrices' entries, (0, 1].
    - ``target``: share of the gradient's energy that may be left, (0, 1); directions are added until it
      is met. With both, whichever comes first; with neither, ``budget`` is 0.25.
    - ``window``: iterations between decisions; ``warmup``: dense iterations before (0 = none, None = a
      tenth of ``total_steps``, else one window). Int, or a float in (0, 1) as a share of
      ``total_steps``.
    - ``step_limit``: largest change of a rank in one window. ``r_min``, ``r_max``: bounds; None = the
      largest rank at which factors are smaller than the matrix.
    - ``cost``: what one direction of a matrix costs, from a model of the time, say, in any unit;
      None = its entries. Must give equal answers on all ranks.

    Starts at the rank of each matrix that spends the same share of its entries or, with ``target`` and a
    warm-up, at the lowest uniform rank that met it on the warm-up's last iteration. Matrices that a window
    did not show keep their rank.

    Raises ValueError naming the option for any value out of range.

    >>> controller = AdaptiveController(window=100, warmup=0, budget=0.25, step_limit=8)
    >>> a, b = MatrixSpec("a", 64, 64), MatrixSpec("b", 64, 64)
    >>> state, plan = controller.decide(controller.init(Layout((a, b))), None, 0)
    >>> plan.ranks
    {'a': 8, 'b': 8}
    >>> steep, flat = tuple(2.0**-k for k in range(8)), (1.0,) * 8
    >>> seen = Observation(100, captured={"a": steep, "b": flat}, left={"a": 0.01, "b": 50.0})
    >>> state, plan = controller.decide(state, seen, 100)
    >>> plan.ranks
    {'a': 5, 'b': 11}
    """

    window: int | float = 1000
    warmup: int | float | None = 0
    total_steps: int | None = None
    budget: float | None = None
    target: float | None = None
    step_limit: int = 4
    r_min: int = 1
    r_max: int | None = None
    cost: Callable[[MatrixSpec], float] | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_share("budget", self.budget, remedy="0.25 sends a quarter of the entries")
        if self.target is not None:
            check_share("target", self.target, remedy="0.5 leaves half of the energy")
            if self.target == 1:
                raise bad_option("target", self.target, "a number below 1", "0.5 leaves half")
        check_count("step_limit", self.step_limit, remedy="use FixedRank for a constant rank")
        check_count("r_min", self.r_min, remedy="1 is the strongest compression")
        if self.r_max is not None:
            check_count("r_max", self.r_max, remedy="leave r_max out")
            if self.r_min > self.r_max:
                expected = f"at most r_max={self.r_max}"
                raise bad_option("r_min", self.r_min, expected, "lower r_min or raise r_max")
        if self.cost is not None and not callable(self.cost):
            raise bad_option("cost", self.cost, "a function of a MatrixSpec", "leave cost out")
        self._durations()

    def init(self, layout: Layout) -> State:
        return {"matrices": pack(layout), "begin": None, "ranks": {}}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        seen = Observation(steps=0) if observation is None else observation
        window, warmup = self._durations()
        begin = step if state["begin"] is None else state["begin"]
        state = {**state, "begin": begin}
        layout = unpack(state["matrices"])
        if step < begin + warmup:
            end = begin + warmup
            until = min(step + window, end)
            probed = self.target is not None and until == end
            return state, Plan.uniform(
                layout,
                0,
                "warmup",
                until=until,
                sampling=sampling_over(until - step),
                probe_rank=min(_LARGEST_PROBE, self._largest(layout)) if probed else 0,
                reason="warm-up",
            )
        if not state["ranks"]:
            ranks, reason = self._start(layout, seen)
        else:
            ranks, reason = self._next(layout, state["ranks"], seen)
        return {**state, "ranks": ranks}, Plan(
            ranks=dict(ranks),
            phase="compress",
            until=step + window,
            sampling=sampling_over(window),
            reason=reason,
        )

    def _start(self, layout: Layout, seen: Observation) -> tuple[dict[str, int], str]:
        bounds = {matrix.name: self._bounds(matrix) for matrix in layout.matrices}
        if self.target is not None:
            for rank in range(1, len(seen.error_curve)):
                left = error_at(seen.error_curve, rank)
                if left is not None and left <= self.target * seen.error_curve[0]:
                    met = {name: _clip(rank, low, high) for name, (low, high) in bounds.items()}
                    if self._share(layout, met) <= (self.budget or 1.0):
                        told = f"rank {rank} met a target of {self.target:.3g} in the warm-up"
                        return met, told
                    break
        budget = self.budget or DEFAULT_BUDGET
        even = {
            m.name: _clip(math.floor(budget * m.numel / _sides(m)), *bounds[m.name])
            for m in layout.matrices
        }
        return even, f"start at {budget:.3g} of every matrix's entries"

    def _next(
        self, layout: Layout, now: Mapping[str, int], seen: Observation
    ) -> tuple[dict[str, int], str]:
        ranks = dict(now)
        items = []
        for matrix in layout.matrices:
            energies = spectrum(matrix, seen)
            low, high = self._bounds(matrix)
            if energies is None or high == 0:
                continue
            rank = ranks[matrix.name]
            cost = _sides(matrix) if self.cost is None else self._own_cost(matrix)
            near_low, near_high = rank - self.step_limit, rank + self.step_limit
            items.append(Item(matrix, energies, max(low, near_low), min(high, near_high), cost))
        if not items:
            return ranks, "no spectrum in the window: ranks kept"
        shown = {item.matrix.name for item in items}
        kept = sum(ranks[m.name] * _sides(m) for m in layout.matrices if m.name not in shown)
        entries = math.inf
        if self.budget is not None or self.target is None:
            entries = (self.budget or DEFAULT_BUDGET) * layout.numel - kept
        given = allot(items, entries, self.target or 0.0)
        ranks.update(given.ranks)
        return ranks, (
            f"{given.error:.1%} of the energy left at {self._share(layout, ranks):.2%} of the entries"
        )

    def _own_cost(self, matrix: MatrixSpec) -> float:
        assert self.cost is not None
        cost = self.cost(matrix)
        if not isinstance(cost, Real) or isinstance(cost, bool) or not 0 < cost < math.inf:
            expected = "a finite number above 0"
            raise bad_option(f"cost({matrix.name!r})", cost, expected, "leave cost out")
        return float(cost)

    def _share(self, layout: Layout, ranks: Mapping[str, int]) -> float:
        return sum(ranks[m.name] * _sides(m) for m in layout.matrices) / max(1, layout.numel)

    def _bounds(self, matrix: MatrixSpec) -> tuple[int, int]:
        high = largest_rank(matrix)
        high = high if self.r_max is None else min(high, self.r_max)
        return min(self.r_min, high), high

    def _largest(self, layout: Layout) -> int:
        return max((self._bounds(matrix)[1] for matrix in layout.matrices), default=0)

    def _durations(self) -> tuple[int, int]:
        """Window and warm-up in iterations."""
        window = iterations("window", self.window, self.total_steps)
        if self.warmup is None:
            total = self.total_steps
            return window, window if total is None else iterations("warmup", 0.1, total)
        if self.warmup is not False and isinstance(self.warmup, int | float) and self.warmup == 0:
            return window, 0
        return window, iterations("warmup", self.warmup, self.total_steps)


def _clip(rank: int, low: int, high: int) -> int:
    return max(low, min(rank, high))
