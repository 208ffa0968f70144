"""The picture of a pipeline's stages: how a step passes on each, and what each leaves behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from edgc_ddp.report.drawing import (
    BLUE,
    GREEN,
    MOST_STAGES,
    ORANGE,
    WIDTH,
    Picture,
    legend_below,
    to_png,
)
from edgc_ddp.report.load import Run, number

_IDLE = "#d9d9d9"


def time_line(stage: Mapping[str, Any], end: float) -> tuple[float, float, float]:
    """Seconds of a step until the backward's end, then averaging, then idle until ``end``.

    >>> time_line({"backward_end_seconds": 0.25, "finish_seconds": 0.5}, end=0.75)
    (0.25, 0.25, 0.25)
    """
    finish = number(stage.get("finish_seconds"))
    backward = number(stage.get("backward_end_seconds"))
    # Without the hook nobody notes when the last gradient came.
    backward = min(finish, backward) if math.isfinite(backward) else finish
    return backward, finish - backward, max(0.0, end - finish)


def draw_stages(run: Run) -> Picture | None:
    """Time line and residual of every stage; None when the run had no pipeline or was not timed."""
    stages = run.stage_summaries[:MOST_STAGES]
    timed = [math.isfinite(number(stage.get("finish_seconds"))) for stage in stages]
    if not stages or not all(timed):
        return None
    figure = Figure(figsize=(WIDTH, 1.6 + 0.5 * len(stages)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    _draw_times(left, stages)
    _draw_residuals(right, stages)
    kinds = {"forward and backward": BLUE, "averaging": ORANGE, "idle": _IDLE}
    legend_below(figure, [Patch(facecolor=colour) for colour in kinds.values()], list(kinds))
    told = (
        "How a step passes on each pipeline stage (medians of the last window; rank 0 is dense), and "
        "the share of the gradient's energy that stayed behind there."
    )
    if len(stages) < len(run.stage_summaries):
        told += f" Drawn are the first {len(stages)} of {len(run.stage_summaries)} stages."
    return Picture("stages", "Pipeline stages", told, to_png(figure))


def _draw_times(axis: Axes, stages: Sequence[Mapping[str, Any]]) -> None:
    end = max(number(stage["finish_seconds"]) for stage in stages)
    parts = 1e3 * np.array([time_line(stage, end) for stage in stages])
    places = np.arange(len(stages))
    before = np.zeros(len(stages))
    for part, colour in zip(parts.T, (BLUE, ORANGE, _IDLE), strict=True):
        axis.barh(places, part, left=before, color=colour, height=0.6)
        before = before + part
    ranks = [number(stage.get("rank")) for stage in stages]
    told = [f", rank {rank:g}" if math.isfinite(rank) else "" for rank in ranks]
    axis.set_yticks(places, [f"stage {place}{rank}" for place, rank in enumerate(told)])
    axis.invert_yaxis()
    axis.set_xlabel("time from the step's begin (ms)")


def _draw_residuals(axis: Axes, stages: Sequence[Mapping[str, Any]]) -> None:
    shares = [number(stage.get("residual")) for stage in stages]
    axis.barh(np.arange(len(stages)), np.nan_to_num(shares), color=GREEN, height=0.6)
    axis.set_xlim(left=0)
    axis.set_xlabel("residual energy share")
