"""The rank as a given function of the iteration: the open-loop rival of every adaptive policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgc_ddp.controllers.options import bad_option, check_count, pack, sampling_over, unpack
from edgc_ddp.decisions import FOREVER, Layout, Observation, Plan, State


@dataclass(frozen=True)
class Scheduled:
    """Rank ``milestones[k]`` from iteration ``k`` on, up or down, 0 meaning dense.

    Before the first milestone everything is dense. With ``window`` the entropy is sampled and
    reported at least every so many iterations. Keys may be text (YAML and command lines write
    them so). Raises ValueError for no milestones, or a step or rank that is no whole number >= 0.

    >>> from edgc_ddp.decisions import MatrixSpec
    >>> controller = Scheduled({100: 32, 500: 8})
    >>> state = controller.init(Layout((MatrixSpec("w", 64, 64),)))
    >>> [controller.decide(state, None, step)[1].ranks["w"] for step in (0, 100, 499, 500)]
    [0, 32, 32, 8]
    >>> controller.decide(state, None, 100)[1].until
    500
    """

    milestones: Mapping[int, int]
    window: int | None = None

    def __post_init__(self) -> None:
        given = self.milestones
        if not isinstance(given, Mapping) or not given:
            remedy = "write milestones={100: 32, 500: 8}, or use Dense()"
            raise bad_option("milestones", given, "a mapping of iteration to rank", remedy)
        clean: dict[int, int] = {}
        for key, rank in given.items():
            step = int(key) if isinstance(key, str) and key.strip().isdecimal() else key
            check_count(
                "milestones key", step, least=0, remedy="count iterations from 0 in whole numbers"
            )
            check_count(f"milestones[{step}]", rank, least=0, remedy="use 0 for dense")
            if step in clean:
                raise bad_option("milestones", dict(given), "every step once", f"drop one {step}")
            clean[step] = rank
        if self.window is not None:
            check_count("window", self.window, remedy="leave window out to measure nothing")
        # The only way to normalise a field of a frozen dataclass.
        object.__setattr__(self, "milestones", dict(sorted(clean.items())))

    def init(self, layout: Layout) -> State:
        return {"matrices": pack(layout)}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        past = [start for start in self.milestones if start <= step]
        rank = self.milestones[past[-1]] if past else 0
        until = min((start for start in self.milestones if start > step), default=FOREVER)
        if self.window is not None:
            until = min(until, step + self.window)
        origin = f"from iteration {past[-1]} on" if past else "before the first milestone"
        return dict(state), Plan.uniform(
            unpack(state["matrices"]),
            rank,
            "scheduled",
            until=until,
            sampling=None if self.window is None else sampling_over(self.window),
            reason=f"schedule: {f'rank {rank}' if rank else 'dense'} {origin}",
        )
