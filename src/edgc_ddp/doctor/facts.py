"""What the doctor measured: plain numbers, equal on all ranks. Times in seconds, sizes in bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

DEFAULT_CAP_MB = 25.0
"""DDP's own ``bucket_cap_mb``, at which everything but the advised setting is measured."""


@dataclass(frozen=True)
class Cost:
    """What the compressor costs at one rank and wire type."""

    rank: int
    wire: str
    payload_bytes: float
    """Bytes that are averaged per step, both factors and what stays dense."""
    work_s: float
    """This process's own work for one step's average, nothing sent."""


@dataclass(frozen=True)
class Average:
    """One average of all gradients, no backward beside it; rank 0 is dense."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class Step:
    """A real training step (forward, backward, average); rank 0 is plain DDP without a hook."""

    rank: int
    wire: str
    cap_mb: float
    seconds: float = math.nan
    """Median; nan while it is only asked for. ``low_s`` and ``high_s`` are the quartiles."""
    low_s: float = math.nan
    high_s: float = math.nan


@dataclass(frozen=True)
class Facts:
    """All measurements of one run: medians over repetitions, means over ranks."""

    model: str
    named: bool
    """Whether ``model`` is a name that train knows too."""
    batch: int
    world_size: int
    device: str
    parameters: int
    dense_bytes: float
    forward_s: float
    backward_s: float
    """Of a step that averages nothing (``no_sync``)."""
    all_reduces: tuple[tuple[float, float], ...]
    """(payload bytes, seconds)."""
    wire: str
    """Wire type of ``averages`` and of the compressed steps among ``steps``."""
    costs: tuple[Cost, ...]
    averages: tuple[Average, ...]
    steps: tuple[Step, ...]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Facts:
        """Raises ValueError when the file holds something else."""
        try:
            return cls.of(json.loads(path.read_text()))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not hold measurements of python -m edgc_ddp.doctor --json: {error!r}"
            ) from error

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Facts:
        """From what ``dataclasses.asdict`` and JSON made of it."""
        kept = {field.name: plain[field.name] for field in fields(cls)}
        kept["all_reduces"] = tuple((size, seconds) for size, seconds in plain["all_reduces"])
        for name, kind in (("costs", Cost), ("averages", Average), ("steps", Step)):
            kept[name] = tuple(kind(**each) for each in plain[name])
        return cls(**kept)
