"""Two levels, by whether the gradient's norm is changing (Accordion, arXiv 2010.16248)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgc_ddp.controllers.options import (
    bad_option,
    check_count,
    iterations,
    pack,
    sampling_over,
    unpack,
)
from edgc_ddp.decisions import Layout, Observation, Plan, State


@dataclass(frozen=True)
class Accordion:
    """Rank ``high`` while a matrix's gradient norm changes fast, else ``low``; starts ``high``.

    A matrix is in a critical regime when ``|old - new| / old >= threshold``, old and new the root
    mean square norms of its gradient in the last two windows (``window``: iterations, or a share
    of ``total_steps``). A window without a finite norm above 0 changes nothing.

    Raises ValueError for ranks below 1, ``low`` above ``high``, a threshold that is no number >= 0,
    or a window out of range.

    >>> from edgc_ddp.decisions import MatrixSpec
    >>> controller = Accordion(high=16, low=4, window=100)
    >>> state = controller.init(Layout((MatrixSpec("w", 64, 64),)))
    >>> ranks = []
    >>> for step, energy in enumerate((None, 9.0, 8.0, 1.0)):
    ...     seen = None if energy is None else Observation(100, gradient_energy={"w": energy})
    ...     state, plan = controller.decide(state, seen, 100 * step)
    ...     ranks.append(plan.ranks["w"])
    >>> ranks
    [16, 16, 4, 16]
    """

    high: int
    low: int
    threshold: float = 0.5
    window: int | float = 1000
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_count("high", self.high, remedy="use Dense() to send everything uncompressed")
        check_count("low", self.low, remedy="1 is the strongest compression")
        if self.low > self.high:
            raise bad_option("low", self.low, f"at most high={self.high}", "exchange the two")
        known = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not known or not 0 <= self.threshold < math.inf:
            expected = "a finite number >= 0"
            raise bad_option("threshold", self.threshold, expected, "0.5 is the paper's")
        iterations("window", self.window, self.total_steps)

    def init(self, layout: Layout) -> State:
        high = {matrix.name: min(self.high, matrix.rows) for matrix in layout.matrices}
        return {"matrices": pack(layout), "ranks": high, "norms": {}}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        seen = {} if observation is None else observation.gradient_energy
        ranks, norms, critical = dict(state["ranks"]), dict(state["norms"]), 0
        compared = 0
        for matrix in unpack(state["matrices"]).matrices:
            energy = seen.get(matrix.name, math.nan)
            # Without any gradient there is nothing to compare, now or later.
            if not (math.isfinite(energy) and energy > 0):
                continue
            new, old = math.sqrt(energy), norms.get(matrix.name)
            norms[matrix.name] = new
            if old is None:
                continue
            compared += 1
            is_critical = abs(old - new) >= self.threshold * old
            critical += is_critical
            ranks[matrix.name] = min(self.high if is_critical else self.low, matrix.rows)
        window = iterations("window", self.window, self.total_steps)
        reason = f"{critical} of {compared} norms changed by {self.threshold:.0%} or more"
        if not compared:
            kept = "ranks kept" if observation is not None else f"start at rank {self.high}"
            reason = f"no two norms to compare: {kept}"
        return {**state, "ranks": ranks, "norms": norms}, Plan(
            ranks=ranks,
            phase="compress",
            until=step + window,
            sampling=sampling_over(window),
            reason=reason,
        )
