"""Where training stands: everything that a checkpoint must bring back besides the slots."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from edgc_ddp.decisions import Plan, State

_LOG = logging.getLogger("edgc_ddp")


def copied(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows anew; equal ranks are kept once, as they are in what is given.

    >>> ranks = {"w": 3}
    >>> first, second = copied([{"step": 2, "ranks": ranks}, {"step": 4, "ranks": ranks}])
    >>> first["ranks"] is second["ranks"], first["ranks"] is ranks
    (True, False)
    """
    known: dict[int, dict[str, Any]] = {}
    rows = [dict(row) for row in history]
    for row in rows:
        if "ranks" in row:
            if (key := id(row["ranks"])) not in known:
                known[key] = dict(row["ranks"])
            row["ranks"] = known[key]
    return rows


def require_between_steps(is_averaging: bool) -> None:
    """Raise RuntimeError within a backward some of whose buckets are averaged and some are not."""
    if is_averaging and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "the state was to be saved or copied within a backward (by a signal's handler or a hook, "
            "which run in it), when some of its buckets are averaged and some are not: have the handler "
            "set a flag, and save between steps"
        )


@dataclass
class Progress:
    """Counters, the plan in force and the decisions so far."""

    plan: Plan
    step: int = 0
    """Iterations averaged so far: synchronised backwards, as DDP counts them."""
    controller_state: State | None = None
    sent_bytes: float = 0.0
    """Bytes this rank has sent, including those of decisions."""
    dense_bytes: float = 0.0
    """Bytes plain DDP would have sent for the same gradients."""
    rank_sum: float = 0.0
    compressed_steps: int = 0
    entropy: float = math.nan
    residual: float = math.nan
    span_seconds: float = math.nan
    loss_scale: float | None = None
    """The loss scale that the residuals are under; None when nobody has told."""
    history: list[dict[str, Any]] = field(default_factory=list)

    def announce(self, plan: Plan) -> None:
        """One line in the log where the next plan is of another phase."""
        before = self.plan.phase
        if plan.phase != before:
            # Compression was hoped for, or this would have been said from the start.
            given_up = plan.phase == "dense" and before != "start"
            text = "iteration %d: phase %s after %s: %s"
            level = logging.WARNING if given_up else logging.INFO
            _LOG.log(level, text, self.step, plan.phase, before, plan.reason)

    def keep_decision(self, ranks: dict[str, int]) -> None:
        """Add the plan in force, with these ranks, to the history."""
        if self.history and self.history[-1].get("ranks") == ranks:
            # Kept once, here and in checkpoints: a long run decides thousands of times.
            ranks = self.history[-1]["ranks"]
        self.history.append(
            {
                "step": self.step,
                "phase": self.plan.phase,
                "reason": self.plan.reason,
                "entropy": self.entropy,
                "residual": self.residual,
                "span_seconds": self.span_seconds,
                "ranks": ranks,
            }
        )
