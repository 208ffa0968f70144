"""What the stages of a pipeline tell each other, between iterations: the board all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from edgc_ddp.controllers.alignment import News, seconds_at
from edgc_ddp.decisions import FOREVER, Plan
from edgc_ddp.lane import Lane


@dataclass(frozen=True)
class StageRow:
    """One stage's last window, means over its replicas. Times in seconds, nan when unknown."""

    rank: float = 0.0
    """Rank from now on (:func:`plan_rank`); 0 = dense."""
    until: float = float(FOREVER)
    """Iteration at whose head it decides again."""
    span: float = math.nan
    """First bucket's arrival to last average, under the plan before."""
    backward: float = math.nan
    """Backward of one micro-batch."""
    ended: float = math.nan
    """End of the last backward, from the begin of the step."""
    finish: float = math.nan
    """End of the last average, from the begin of the step."""
    residual: float = math.nan
    """Share of the gradient's energy that stayed behind, mean over matrices."""


_NAMES = tuple(field.name for field in fields(StageRow))


def plan_rank(plan: Plan) -> int:
    """One rank for a plan: the middle one of the matrices it compresses, 0 when it does not.

    >>> plan_rank(Plan({"a": 4, "b": 16, "c": 16, "d": 0}, phase="compress"))
    16
    """
    ranks = [rank for rank in plan.ranks.values() if rank]
    return round(median(ranks)) if ranks else 0


class StageBoard:
    """The latest row of every stage, equal on all ranks of the pipeline.

    All ranks call :meth:`exchange` after the same iterations, those for which :meth:`due` says so: the
    first after ``start_iter``, then each at whose head the first stage decided. Nothing travels while
    gradients do, so a stage never waits for another one in the middle of its backward.

    >>> board = StageBoard(stages=2, start_iter=2)
    >>> board.due(finished=2), board.due(finished=3)
    (False, True)
    >>> board.post([StageRow(rank=8, until=12, backward=0.5), StageRow()])
    >>> board.due(finished=12), board.news(1).slack_seconds
    (False, 0.5)
    """

    def __init__(self, stages: int, start_iter: int) -> None:
        self.stages = stages
        self.rows: tuple[StageRow, ...] = ()
        self._until = start_iter
        self._first_times: dict[int, float] = {}

    def due(self, finished: int) -> bool:
        """Whether to exchange after so many iterations. Same answer on all ranks."""
        return finished > self._until

    def exchange(self, stage: int, row: StageRow, lane: Lane) -> None:
        """Post every stage's mean row. Collective over ``lane``, which spans all ranks. Blocks."""
        values = [0.0] * (2 * self.stages * len(_NAMES))
        for place, name in enumerate(_NAMES):
            value = getattr(row, name)
            if math.isfinite(value):
                at = 2 * (stage * len(_NAMES) + place)
                values[at : at + 2] = [value, 1.0]
        total = lane.sum_over_ranks(values)
        means = [
            value / count if count else math.nan
            for value, count in zip(total[::2], total[1::2], strict=True)
        ]
        width = len(_NAMES)
        self.post([StageRow(*means[k * width : (k + 1) * width]) for k in range(self.stages)])

    def post(self, rows: Sequence[StageRow]) -> None:
        """Put new rows up. Remembers how long the first stage took at the rank it had until now."""
        if self.rows and math.isfinite(rows[0].span):
            self._first_times[round(self.rows[0].rank)] = rows[0].span
        self.rows = tuple(rows)
        self._until = round(rows[0].until)

    def news(self, stage: int) -> News | None:
        """What ``stage`` must know of those before it; None before the first exchange.

        With ``t_b`` equal everywhere its slack is ``stage * t_b``; else the sum of the backwards that
        the stages before it still have to do.
        """
        if not self.rows:
            return None
        rank = round(self.rows[0].rank)
        table = sorted((tried, time) for tried, time in self._first_times.items() if tried)
        slack = sum(row.backward for row in self.rows[:stage])
        return News(rank, self._until, seconds_at(table, rank), slack)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, equal on all ranks."""
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "until": self._until, "first_times": dict(self._first_times)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`. Raises ValueError when it is of another number of stages."""
        if len(state["rows"]) not in (0, self.stages):
            raise ValueError(
                f"the board is one of {len(state['rows'])} stages, this pipeline has {self.stages}"
            )
        self.rows = tuple(StageRow(**row) for row in state["rows"])
        self._until = state["until"]
        self._first_times = dict(state["first_times"])
