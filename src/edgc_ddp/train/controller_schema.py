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
    saving: float = 0.9


@dataclass
class AccordionSchema:
    """See :class:`edgc_ddp.controllers.Accordion`."""

    _target_: str = f"{_HOME}.Accordion"
    high: int = 32
    low: int = 8
    threshold: float = 0.5
    window: int | float = 1000
    total_steps: int | None = None


@dataclass
class LGrecoSchema:
    """See :class:`edgc_ddp.controllers.LGreco`."""

    _target_: str = f"{_HOME}.LGreco"
    rank: int = 16
    window: int | float = 1000
    r_min: int | None = None
    r_max: int | None = None
    step_limit: int | None = None
    relative: bool = False
    total_steps: int | None = None


@dataclass
class AdaptiveSchema:
    """See :class:`edgc_ddp.controllers.AdaptiveController`."""

    _target_: str = f"{_HOME}.AdaptiveController"
    window: int | float = 1000
    warmup: int | float | None = 0
    total_steps: int | None = None
    budget: float | None = None
    target: float | None = None
    step_limit: int = 4
    r_min: int = 1
    r_max: int | None = None
    # A function of the user's as Hydra writes one.
    cost: Any = None


@dataclass
class SelectiveSchema:
    """See :class:`edgc_ddp.controllers.Selective`."""

    _target_: str = f"{_HOME}.Selective"
    # Any controller, as its own YAML writes it.
    inner: Any = None
    compress: list[str] = field(default_factory=lambda: ["*"])
    dense: list[str] = field(default_factory=list)


CONTROLLERS: dict[str, type] = {
    "dense": DenseSchema,
    "fixed": FixedSchema,
    "scheduled": ScheduledSchema,
    "entropy": EntropySchema,
    "accordion": AccordionSchema,
    "lgreco": LGrecoSchema,
    "adaptive": AdaptiveSchema,
    "selective": SelectiveSchema,
}
"""Schemas by the name they are stored under, ``schema/controller/<name>``."""
