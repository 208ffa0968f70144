"""The words that engine and controllers share: what can be compressed, what was seen, what to do.

All of it is plain numbers. A controller never sees a tensor, so it can be tested without a process
group, and every number it is given is equal on all ranks, so every rank decides alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

FOREVER = 2**62
"""``Plan.until`` of a controller that never wants to be asked again."""


def is_count(value: Any) -> bool:
    """Whether it is an integer from zero on.

    >>> is_count(3), is_count(True), is_count(-1), is_count(2.0)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class MatrixSpec:
    """One parameter seen as a matrix, the shorter side first (``rows <= cols``)."""

    name: str
    rows: int
    cols: int
    highest: int | None = None
    """The highest rank that is sent as factors under the run's ``min_compression_rate``: above it the
    matrix is averaged dense. None where that is not known."""

    @property
    def numel(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Layout:
    """What a controller may decide about, in an order that is equal on all ranks."""

    matrices: tuple[MatrixSpec, ...]
    world_size: int = 1

    @property
    def numel(self) -> int:
        return sum(matrix.numel for matrix in self.matrices)


@dataclass(frozen=True)
class Sampling:
    """How the gradient is looked at between two decisions (method: GDS).

    ``alpha`` is the share of iterations looked at, ``beta`` the share of entries used; ``estimator``
    is a name of :data:`edgc_ddp.maths.entropy.ESTIMATORS` or a function of the same form.
    """

    alpha: float = 0.1
    beta: float = 0.25
    estimator: str | Callable[..., Any] = "gaussian"

    def has_shares(self) -> bool:
        """Whether ``alpha`` and ``beta`` are shares, and some entry is used."""
        return 0 <= self.alpha <= 1 and 0 < self.beta <= 1

    def due(self, step: int) -> bool:
        """Whether this iteration is one of the ``alpha`` share. Same answer on all ranks.

        >>> [step for step in range(245, 294) if Sampling(alpha=1 / 49).due(step)]
        [293]
        """
        # A share of 1/49 is a little less in floats, and 294 of them would be 5.99, not 6.
        share = self.alpha * (1 + 1e-12)
        return math.floor((step + 1) * share) > math.floor(step * share)


@dataclass(frozen=True)
class Plan:
    """What to do from now until iteration ``until``: a rank for every matrix, 0 meaning dense."""

    ranks: Mapping[str, int]
    phase: str
    until: int = FOREVER
    sampling: Sampling | None = None
    probe_rank: int = 0
    """When > 0: on the last dense iteration of this plan, measure the energy that ranks
    0..probe_rank would leave (``Observation.error_curve``)."""
    reason: str = ""

    @classmethod
    def uniform(cls, layout: Layout, rank: int, phase: str, **options: Any) -> Plan:
        """The same rank for every matrix, never above what the matrix has.

        >>> layout = Layout((MatrixSpec("w", 4, 8), MatrixSpec("v", 64, 64)))
        >>> dict(Plan.uniform(layout, 16, "fixed").ranks)
        {'w': 4, 'v': 16}
        """
        ranks = {matrix.name: min(rank, matrix.rows) for matrix in layout.matrices}
        return cls(ranks=ranks, phase=phase, **options)

    def digest(self) -> str:
        """Sixteen hex digits that differ when two plans do, in more than their reasons or in what function
        the gradient is sampled by."""
        looks = self.sampling
        if looks is not None and callable(looks.estimator):
            looks = replace(looks, estimator="")
        text = repr((sorted(self.ranks.items()), self.phase, self.until, self.probe_rank, looks))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Observation:
    """What was measured under the last plan, averaged over all ranks (so equal on all of them).

    A number that could not be measured is ``nan`` (no finite sample in the window, say).
    """

    steps: int
    """Iterations since the last decision."""
    entropy: Mapping[str, float] = field(default_factory=dict)
    """Per matrix, the window's mean of the sampled entropies, in nats."""
    span_seconds: float = math.nan
    """Median time from the first bucket's arrival to the last bucket's average."""
    residual_share: Mapping[str, float] = field(default_factory=dict)
    """Per matrix, energy that stays behind / energy of gradient plus residual; nan when dense, or when no
    iteration of the window was sampled."""
    error_curve: tuple[float, ...] = ()
    """Energy of the averaged gradient that rank 0, 1, ... leaves, summed over the matrices."""
    gradient_energy: Mapping[str, float] = field(default_factory=dict)
    """Per matrix, the mean of ||gradient||^2 over ranks and sampled iterations."""
    energy: Mapping[str, float] = field(default_factory=dict)
    """Per matrix, the mean of ||gradient + residual||^2 of one rank; nan when dense."""
    captured: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Per matrix, the averaged gradient's energy in each direction that was sent, largest first, by
    the columns of the averaged factor Q; () when dense."""
    left: Mapping[str, float] = field(default_factory=dict)
    """Per matrix, the energy of the averaged gradient plus residual outside those directions,
    estimated by a random probe; nan when dense."""

    def mean_entropy(self, layout: Layout) -> float:
        """Mean over all entries: each matrix weighs as many entries as it has."""
        known = [
            (matrix.numel, value)
            for matrix in layout.matrices
            if math.isfinite(value := self.entropy.get(matrix.name, math.nan))
        ]
        total = sum(numel for numel, _ in known)
        return sum(numel * value for numel, value in known) / total if total else math.nan

    def mean_residual(self) -> float:
        """Plain mean of the matrices' residual shares that were measured; nan when there are none."""
        shares = [share for share in self.residual_share.values() if math.isfinite(share)]
        return sum(shares) / len(shares) if shares else math.nan


State = dict[str, Any]
"""A controller's memory: plain values only, since it travels in checkpoints."""


def is_controller(given: object) -> bool:
    """Whether it has what a :class:`Controller` must; a class of such is none itself."""
    return not isinstance(given, type) and all(
        callable(getattr(given, name, None)) for name in ("init", "decide")
    )


class Controller(Protocol):
    """Who decides the ranks. Pure: equal arguments give equal answers, on every rank, for ever."""

    def init(self, layout: Layout) -> State:
        """The memory before the first decision."""

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        """The plan from iteration ``step`` on. ``observation`` is None on the first call only."""
