"""The catalogue of controllers: who decides the ranks."""

from __future__ import annotations

from collections.abc import Callable

from edgc_ddp.controllers.accordion import Accordion
from edgc_ddp.controllers.adaptive import AdaptiveController
from edgc_ddp.controllers.entropy import EntropyController
from edgc_ddp.controllers.lgreco import LGreco
from edgc_ddp.controllers.scheduled import Scheduled
from edgc_ddp.controllers.selective import Selective
from edgc_ddp.controllers.trivial import Dense, FixedRank
from edgc_ddp.decisions import Controller

CONTROLLERS: dict[str, Callable[..., Controller]] = {
    "dense": Dense,
    "fixed": FixedRank,
    "scheduled": Scheduled,
    "entropy": EntropyController,
    "selective": Selective,
    "accordion": Accordion,
    "lgreco": LGreco,
    "adaptive": AdaptiveController,
}
"""Every controller class by the name that configurations use."""

__all__ = [
    "CONTROLLERS",
    "Accordion",
    "AdaptiveController",
    "Dense",
    "EntropyController",
    "FixedRank",
    "LGreco",
    "Scheduled",
    "Selective",
]
