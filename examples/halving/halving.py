"""A controller of one's own: one class, and one YAML beside it. The package is not touched."""

from __future__ import annotations

from dataclasses import dataclass

from edgc_ddp.decisions import Layout, Observation, Plan, State


@dataclass(frozen=True)
class Halving:
    """Dense until ``start``, then rank ``first``, halved every ``every`` iterations down to ``last``."""

    first: int = 32
    last: int = 4
    every: int = 100
    start: int = 20

    def __post_init__(self) -> None:
        if not 1 <= self.last <= self.first:
            raise ValueError(f"last={self.last}: expected a rank between 1 and first={self.first}")

    def init(self, layout: Layout) -> State:
        # Plain values only: this dictionary travels in checkpoints.
        return {"names": [matrix.name for matrix in layout.matrices]}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        names = state["names"]
        if step < self.start:
            return state, Plan(dict.fromkeys(names, 0), phase="dense", until=self.start)
        halvings = (step - self.start) // self.every
        rank = max(self.last, self.first >> halvings)
        until = self.start + (halvings + 1) * self.every
        return state, Plan(dict.fromkeys(names, rank), phase="compress", until=until)
