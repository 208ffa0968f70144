"""Where training stands: everything that a checkpoint must bring back besides the slots."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from edgc_ddp.decisions import Plan, State


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
