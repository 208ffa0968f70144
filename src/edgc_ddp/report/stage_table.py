"""The stages of a pipeline in words: how each ended and why, what a rank of it sent."""

from __future__ import annotations

from edgc_ddp.report.load import Run, number
from edgc_ddp.report.phases import phase_label
from edgc_ddp.report.words import digits, in_bytes, path_words

HEADS = (
    "stage",
    "rank at the end",
    "phase",
    "rank path",
    "mean rank while compressing, trials included",
    "sent by a rank",
    "plain DDP",
    "backward of a micro-batch (ms)",
    "backward ends (ms)",
    "average ends (ms)",
    "reason of the last decision",
)
"""Times are medians of the last window; the ends count from the step's begin."""


def stage_rows(run: Run) -> list[list[str]]:
    """The cells under :data:`HEADS`, one row for each stage that the summary tells of.

    >>> from pathlib import Path
    >>> stage = {"stage": 0, "rank": 0, "mean_rank": 0.0, "finish_seconds": 0.25, "reason": "slow link"}
    >>> row, = stage_rows(Run(Path("r"), summary={"stages": [stage]}))
    >>> row[1], row[4], row[9:]
    ('dense', 'dense', ['250', 'slow link'])
    """
    rows = []
    for place, stage in enumerate(run.stage_summaries):
        rank, mean = number(stage.get("rank")), number(stage.get("mean_rank"))
        times = ("backward_seconds", "backward_end_seconds", "finish_seconds")
        rows.append(
            [
                str(place),
                f"{rank:g}" if rank > 0 else "dense",
                phase_label(str(stage.get("phase") or "")),
                path_words(run.of_stage(place)),
                digits(mean) if mean else "dense",
                in_bytes(number(stage.get("wire_bytes"))),
                in_bytes(number(stage.get("dense_bytes"))),
                *(digits(1e3 * number(stage.get(time))) for time in times),
                str(stage.get("reason") or ""),
            ]
        )
    return rows
