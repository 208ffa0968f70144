"""The options of the controllers that ship with the library; the classes themselves check ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_HOME = "edgc_ddp.controllers"


@dataclass
class DenseSchema:
    """See :class:`edgc_ddp.controllers.Dense`."""

    _target_: str = f"{_HOME}.Dense"
    window: int | None = None


@dataclass
class FixedSchema:
    """See :class:`edgc_ddp.controllers.FixedRank`."""

    _target_: str = f"{_HOME}.FixedRank"
    rank: int = 16
    window: int | None = None


@dataclass
class ScheduledSchema:
    """See :class:`edgc_ddp.controllers.Scheduled`."""

    _target_: str = f"{_HOME}.Scheduled"
    milestones: dict[int, int] = field(default_factory=dict)
    window: int | None = None


@dataclass
class EntropySchema:
    """See :class:`edgc_ddp.controllers.EntropyController`."""

    _target_: str = f"{_HOME}.EntropyController"
    window: int | float = 1000
    warmup: int | float | None = None
    r_max: int | None = None
    r_min: int | None = None
    step_limit: int = 4
    alpha: float = 0.1
    beta: float = 0.25
    # A name, or a function of the user's as Hydra writes one.
    estimator: Any = "gaussian"
    exponent: int = 2
    reference: str = "anchor"
    policy: str = "edgc"
    scope: str = "stage"
    total_steps: int | None = None
    calibration_steps: int = 5
    warmup_limit: int | float | None = None


CONTROLLERS: dict[str, type] = {
    "dense": DenseSchema,
    "fixed": FixedSchema,
    "scheduled": ScheduledSchema,
    "entropy": EntropySchema,
}
"""Schemas by the name they are stored under, ``schema/controller/<name>``."""
