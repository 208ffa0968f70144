"""What ``python -m benchmarks.loss_runs`` left in a folder, and the arithmetic that figures share."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.loss_contestants import CONTESTANTS
from benchmarks.record import RESULTS

DENSE = "dense"
COMMAND = "python -m benchmarks.loss_runs"
_SMOOTH = 50
"""Steps whose mean stands for the training loss at the last of them."""
_LATE = 0.3
"""Of a run's steps, its last: their training losses are many, each taken on the batch that dense saw
too, so they tell contestants apart that one held-out evaluation cannot."""


@dataclass(frozen=True)
class Point:
    """A held-out evaluation: finished steps, both losses (nats per byte), bytes a rank has sent."""

    steps: int
    val_loss: float
    train_loss: float
    wire_bytes: float


@dataclass(frozen=True)
class LossRun:
    """One contestant with one seed."""

    seed: int
    points: tuple[Point, ...]
    dense_bytes: float
    late_loss: float
    """Mean training loss of the last steps."""
    step_seconds: float
    """Median of a step, loopback communication included."""

    @property
    def last(self) -> Point:
        return self.points[-1]


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest over seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(mean(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True)
class Losses:
    """All finished runs of a folder, by contestant, in the table's order."""

    folder: Path
    runs: dict[str, tuple[LossRun, ...]]
    steps: int
    text: str
    commits: tuple[str, ...]

    def require(self, names: Sequence[str]) -> None:
        """Raises ValueError naming the contestants that are missing and the command that adds them."""
        missing = [name for name in names if name not in self.runs]
        if missing:
            raise ValueError(
                f"{self.folder} has no run of {', '.join(missing)}: add them by {COMMAND} --only "
                f"'{','.join(missing)}' --out {self.folder}"
            )

    def loss(self, name: str) -> Spread:
        """Held-out loss at the end."""
        return Spread.of([run.last.val_loss for run in self.runs[name]])

    def behind_dense(self, name: str) -> Spread:
        """Held-out loss at the end less that of dense with the same seed, over the seeds both have."""
        return self._behind(name, lambda run: run.last.val_loss)

    def late_behind_dense(self, name: str) -> Spread:
        """The same of the mean training loss of the last three tenths of the steps."""
        return self._behind(name, lambda run: run.late_loss)

    def _behind(self, name: str, loss: Callable[[LossRun], float]) -> Spread:
        dense = {run.seed: loss(run) for run in self.runs[DENSE]}
        pairs = [loss(run) - dense[run.seed] for run in self.runs[name] if run.seed in dense]
        return Spread.of(pairs) if pairs else Spread(math.nan, math.nan, math.nan)

    def sent(self, name: str) -> float:
        """Bytes a rank sent over the run, mean over seeds."""
        return mean(run.last.wire_bytes for run in self.runs[name])

    def compute_seconds(self) -> float:
        """The step time that all contestants are given: the median of dense ones on loopback."""
        return median(run.step_seconds for run in self.runs[DENSE])

    def hours(self, name: str, megabit: float) -> float:
        """Modelled length of the run on a link of so many Mbit/s."""
        return seconds(self.steps, self.sent(name), self.compute_seconds(), megabit) / 3600

    def curve(self, name: str) -> list[tuple[Point, Spread]]:
        """The evaluations, means over seeds, and the held-out losses' spread."""
        rows = []
        for points in zip(*(run.points for run in self.runs[name]), strict=True):
            spread = Spread.of([point.val_loss for point in points])
            train = mean(point.train_loss for point in points)
            sent = mean(point.wire_bytes for point in points)
            rows.append((Point(points[0].steps, spread.mean, train, sent), spread))
        return rows

    def beaten_by(self, name: str) -> list[str]:
        """Who sent no more bytes and ended lower with every seed that both have."""
        mine = {run.seed: run.last.val_loss for run in self.runs[name]}
        found = []
        for other, theirs in self.runs.items():
            ends = {run.seed: run.last.val_loss for run in theirs}
            both = mine.keys() & ends.keys()
            fewer = self.sent(other) <= self.sent(name)
            if both and fewer and all(ends[seed] < mine[seed] for seed in both):
                found.append(other)
        return found


def seconds(steps: int, wire_bytes: float, compute: float, megabit: float) -> float:
    """Length of so many steps when nothing hides the wire and a message costs its bytes alone.

    >>> seconds(steps=10, wire_bytes=25e6, compute=0.1, megabit=100)
    3.0
    """
    return steps * compute + 8 * wire_bytes / (megabit * 1e6)


def newest(parent: Path = RESULTS) -> Path:
    """The folder of runs with the latest name. Raises ValueError when there is none."""
    found = {path.parents[2] for path in parent.glob("*/*/seed-*/run.json")}
    if not found:
        raise ValueError(f"no loss runs under {parent}: make them by {COMMAND}")
    return max(found, key=lambda folder: folder.name)


def read(folder: Path) -> Losses:
    """All finished runs. Raises ValueError when they are not of one kind, or dense is not among them."""
    told: dict[str, dict[str, Any]] = {}
    runs: dict[str, tuple[LossRun, ...]] = {}
    for contestant in CONTESTANTS:
        homes = sorted((folder / contestant.name).glob("seed-*/run.json"))
        told |= {str(path.parent): json.loads(path.read_text()) for path in homes}
        if homes:
            runs[contestant.name] = tuple(
                _run(path.parent, told[str(path.parent)]) for path in homes
            )
    kinds = {home: _kind(about) for home, about in told.items()}
    first = next(iter(kinds), "")
    for home, kind in kinds.items():
        if kind != kinds[first]:
            raise ValueError(
                f"{first} and {home} differ in steps, text or --also: {kinds[first]} and {kind}; compare "
                "runs of one kind, each kind in a folder of its own"
            )
    commits = sorted({_commit(about["commit"]) for about in told.values()})
    steps, text, _ = kinds[first] if kinds else (0, "", ())
    losses = Losses(folder, runs, steps, text, tuple(commits))
    losses.require([DENSE])
    return losses


def _kind(about: dict[str, Any]) -> tuple[int, str, tuple[str, ...]]:
    text = about["text"]
    return about["steps"], f"{text['source']} {text['sha256'][:12]}", tuple(about["also"])


def _commit(about: dict[str, Any]) -> str:
    return f"{about['id'] or 'none'}{' with changes' if about['dirty'] else ''}"


def _run(home: Path, about: dict[str, Any]) -> LossRun:
    with (home / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows]
    points = tuple(
        Point(
            int(row["step"]) + 1,
            float(row["val_loss"]),
            mean(losses[max(0, place + 1 - _SMOOTH) : place + 1]),
            float(row["wire_bytes"]),
        )
        for place, row in enumerate(rows)
        if row["val_loss"]
    )
    dense = float(about["summary"]["dense_bytes"])
    late = mean(losses[-math.ceil(_LATE * len(losses)) :])
    return LossRun(about["seed"], points, dense, late, about["median_step_seconds"])
