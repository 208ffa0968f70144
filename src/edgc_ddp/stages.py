"""What the stages of a pipeline tell each other, between iterations: the board all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

from edgc_ddp.controllers.alignment import News, seconds_at
from edgc_ddp.decisions import FOREVER, Plan
from edgc_ddp.lane import Lane

if TYPE_CHECKING:
    from edgc_ddp import EDGCState


@dataclass(frozen=True)
class StageCounts:
    """What one stage has sent and compresses. The sum over the stages is that of one replica."""

    wire_bytes: float = 0.0
    """Bytes that one rank of the stage has sent."""
    dense_bytes: float = 0.0
    """Bytes that plain DDP would have sent."""
    rank_sum: float = 0.0
    """Ranks of the matrices that are compressed now, added up."""
    matrices: float = 0.0
    """How many matrices those are."""

    @classmethod
    def of(cls, metrics: Mapping[str, Any], ranks: Iterable[int]) -> StageCounts:
        """From ``EDGCState.metrics()`` and the ranks of ``EDGCState.plan()``, 0 = dense.

        >>> StageCounts.of({"wire_bytes": 25, "dense_bytes": 100}, [16, 0, 8])
        StageCounts(wire_bytes=25.0, dense_bytes=100.0, rank_sum=24.0, matrices=2.0)
        """
        compressed = [rank for rank in ranks if rank]
        sent, dense = float(metrics["wire_bytes"]), float(metrics["dense_bytes"])
        return cls(sent, dense, float(sum(compressed)), float(len(compressed)))

    @property
    def mean_rank(self) -> float:
        """Over the compressed matrices, whose stage does not count; 0 when none is.

        >>> dense_stage = StageCounts(rank_sum=0, matrices=0)
        >>> StageCounts(rank_sum=32, matrices=2).mean_rank, dense_stage.mean_rank
        (16.0, 0.0)
        """
        return self.rank_sum / self.matrices if self.matrices else 0.0


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
    """Share of the gradient's energy that stayed behind, mean over matrices; nan when dense."""

    @classmethod
    def of(cls, state: EDGCState | None, **times: float) -> StageRow:
        """What a stage's state tells, between iterations; ``times`` are the fields that it cannot know:
        ``backward``, ``ended``, ``finish`` (seconds). None is a stage without the hook.

        >>> from edgc_ddp import EDGCState
        >>> StageRow.of(EDGCState(start_iter=2), backward=0.25)
        StageRow(rank=0.0, until=2.0, span=nan, backward=0.25, ended=nan, finish=nan, residual=nan)
        """
        if state is None:
            return cls(**times)
        progress = state.engine.progress
        rank, until = float(plan_rank(progress.plan)), float(progress.plan.until)
        return cls(rank, until, progress.span_seconds, residual=progress.residual, **times)


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
        self.whole = StageCounts()
        """All stages together, since the last :meth:`count`."""
        self._until = start_iter
        self._rank_sum, self._compressed_steps = 0.0, 0
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

    def count(self, whole: StageCounts) -> None:
        """An iteration is over; ``whole`` is the sum over its stages, equal on all ranks."""
        self.whole = whole
        if whole.matrices:
            self._rank_sum += whole.mean_rank
            self._compressed_steps += 1

    @property
    def run_mean_rank(self) -> float:
        """Mean of the mean ranks of all iterations in which any stage compressed; 0 without any."""
        return self._rank_sum / self._compressed_steps if self._compressed_steps else 0.0

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
        return {
            "rows": rows,
            "until": self._until,
            "first_times": dict(self._first_times),
            "whole": asdict(self.whole),
            "rank_sum": self._rank_sum,
            "compressed_steps": self._compressed_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`. Raises ValueError when it is of another number of stages."""
        if len(state["rows"]) not in (0, self.stages):
            raise ValueError(
                f"the board is one of {len(state['rows'])} stages, this pipeline has {self.stages}"
            )
        self.rows = tuple(StageRow(**row) for row in state["rows"])
        self._until = state["until"]
        self._first_times = dict(state["first_times"])
        self.whole = StageCounts(**state["whole"])
        self._rank_sum = state["rank_sum"]
        self._compressed_steps = state["compressed_steps"]
