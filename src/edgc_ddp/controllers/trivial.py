"""The null objects: everything dense, or one rank for ever. Every comparison starts from these."""

from __future__ import annotations

from dataclasses import dataclass

from edgc_ddp.controllers.options import check_count, pack, sampling_over, unpack
from edgc_ddp.decisions import FOREVER, Layout, Observation, Plan, State

_WINDOW_REMEDY = "leave window out to measure nothing"


def _constant(state: State, rank: int, phase: str, window: int | None, step: int) -> Plan:
    return Plan.uniform(
        unpack(state["matrices"]),
        rank,
        phase,
        until=FOREVER if window is None else step + window,
        sampling=None if window is None else sampling_over(window),
        reason="always dense" if rank == 0 else f"always rank {rank}",
    )


@dataclass(frozen=True)
class Dense:
    """Never compresses. With ``window`` the entropy is sampled and reported every so many steps.

    Raises ValueError when ``window`` is neither None nor a whole number >= 1.

    >>> from edgc_ddp.decisions import MatrixSpec
    >>> controller = Dense()
    >>> state = controller.init(Layout((MatrixSpec("w", 64, 64),)))
    >>> controller.decide(state, None, step=0)[1].ranks
    {'w': 0}
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check_count("window", self.window, remedy=_WINDOW_REMEDY)

    def init(self, layout: Layout) -> State:
        return {"matrices": pack(layout)}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        return dict(state), _constant(state, 0, "dense", self.window, step)


@dataclass(frozen=True)
class FixedRank:
    """One rank for every matrix, for ever: plain PowerSGD.

    With ``window`` entropy and residual are sampled and reported every so many iterations; the
    ranks stay. Raises ValueError when ``rank`` or ``window`` is not a whole number >= 1.

    >>> from edgc_ddp.decisions import MatrixSpec
    >>> controller = FixedRank(8, window=100)
    >>> state = controller.init(Layout((MatrixSpec("w", 4, 64), MatrixSpec("v", 64, 64))))
    >>> plan = controller.decide(state, None, step=20)[1]
    >>> plan.ranks, plan.until
    ({'w': 4, 'v': 8}, 120)
    """

    rank: int
    window: int | None = None

    def __post_init__(self) -> None:
        check_count("rank", self.rank, remedy="use Dense() to send everything uncompressed")
        if self.window is not None:
            check_count("window", self.window, remedy=_WINDOW_REMEDY)

    def init(self, layout: Layout) -> State:
        return {"matrices": pack(layout)}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        return dict(state), _constant(state, self.rank, "fixed", self.window, step)
