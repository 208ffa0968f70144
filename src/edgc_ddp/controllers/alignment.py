"""Ranks aligned over the stages of a pipeline, so that all of them finish together.

Stage i ends its backward while the stages before it still have one micro-batch to go, so its averaging
may take that much longer (method section 3, "Stage alignment").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgc_ddp.controllers.bounds import break_even, is_slower, measured_r_max, next_trial
from edgc_ddp.controllers.options import check_choice, check_count, pack, sampling_over, unpack
from edgc_ddp.decisions import FOREVER, Layout, Observation, Plan, State

RANKS = ("aligned", "common")
_LONGEST_SAMPLED = 1000


def aligned_rank(
    first_seconds: float,
    slack_seconds: float,
    dense_seconds: float,
    trials: Sequence[tuple[int, float]],
) -> int:
    """A stage's rank when the first stage averages in ``first_seconds``; 0 = dense.

    ``T_i = first_seconds + slack_seconds``: dense when ``T_i > T0``, else
    ``4 (floor(T^-1(T_i) / 4) + 1)``, dense if that is above ``r_max = 4 floor(T^-1(T0) / 4)``. ``T``
    is this stage's own time by rank, piecewise linear through ``trials`` of ascending rank, ``T0``
    its dense time; all in seconds.

    The times of the paper's Table 5, a slack of 0.2 for each stage before this one:

    >>> table = [(16, 0.7417), (32, 1.4833), (64, 3.0167)]
    >>> [aligned_rank(1.4833, stage * 0.2, 3.0417, table) for stage in (1, 2, 7, 8)]
    [40, 44, 64, 0]
    """
    allowed = first_seconds + slack_seconds
    if not allowed <= dense_seconds:
        return 0
    # The slack undoes rounding in the interpolation: 19.9999999 is 20, not 16.
    rank = 4 * (math.floor((break_even(trials, allowed) + 1e-6) / 4) + 1)
    return rank if rank <= measured_r_max(trials, dense_seconds) else 0


def seconds_at(trials: Sequence[tuple[int, float]], rank: int) -> float:
    """The time a rank takes: linear between trials and beyond them; nan without any.

    >>> seconds_at([(2, 1.0), (4, 2.0), (8, 6.0)], 6), seconds_at([(2, 1.0), (4, 2.0)], 6)
    (4.0, 3.0)
    >>> seconds_at([(8, 0.5)], 16)
    0.5
    """
    if len(trials) < 2:
        return trials[0][1] if trials else math.nan
    above = next((k for k, (tried, _) in enumerate(trials) if tried >= rank), len(trials) - 1)
    (low, before), (high, after) = trials[max(1, above) - 1], trials[max(1, above)]
    return max(0.0, before + (after - before) * (rank - low) / (high - low))


@dataclass(frozen=True)
class News:
    """What a stage is told of the first one: equal numbers on all replicas of the stage."""

    rank: int
    """Rank of the first stage; 0 = dense."""
    until: int
    """Iteration at whose head the first stage decides again."""
    first_seconds: float
    """Time the first stage takes to average at that rank; nan when unknown."""
    slack_seconds: float
    """How much earlier than the first stage this one ends its backward; nan when unknown."""


class NewsBoard(Protocol):
    """Where the news come from (:class:`edgc_ddp.stages.StageBoard`)."""

    def news(self, stage: int) -> News | None:
        """The latest, None before there are any."""


@dataclass(frozen=True)
class FollowingStage:
    """Decides for stage 1, 2, ... of a pipeline from the first stage's rank and its own times.

    - ``board``: tells the news. It must say the same on all data-parallel replicas.
    - ``ranks``: "aligned" (:func:`aligned_rank`) or "common" (the first stage's rank).
    - ``calibration_steps``: iterations for which each of the ranks 2, 4, 8, ... is timed once the
      first stage compresses; dense is timed while it does not. Every later window tells how long
      its rank takes by then, and the table follows, over a few windows.

    It decides one iteration after the first stage, since the news travel between iterations.

    Raises ValueError naming the option for any value out of range.
    """

    stage: int
    board: NewsBoard
    ranks: str = "aligned"
    calibration_steps: int = 5

    def __post_init__(self) -> None:
        check_count("stage", self.stage, remedy="the first stage has a controller of its own")
        check_choice("ranks", self.ranks, RANKS)
        check_count("calibration_steps", self.calibration_steps, remedy="5 is the default")

    def init(self, layout: Layout) -> State:
        return {"matrices": pack(layout), "rank": None, "dense": None, "trials": [], "timed": False}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        state = _learn(state, observation)
        news = self.board.news(self.stage)
        if news is None:
            return _plan(state, 0, "start", step, step + 1, "no word from the first stage yet")
        until = max(news.until, step) + 1
        if news.rank == 0:
            phase = "dense" if news.until >= FOREVER else "warmup"
            return _plan(
                state, 0, phase, step, until, "the first stage is dense, and so is this one"
            )
        told = f"first stage at rank {news.rank}"
        if self.ranks == "common":
            return _plan(state, news.rank, "compress", step, until, told)
        if not state["timed"]:
            rank = _next_to_time(state)
            if rank is not None:
                end = step + self.calibration_steps
                return _plan(state, rank, "calibration", step, end, f"timing rank {rank}")
            state = {**state, "timed": True}
        return self._align(state, news, step, until, told)

    def _align(
        self, state: State, news: News, step: int, until: int, told: str
    ) -> tuple[State, Plan]:
        allowed = news.first_seconds + news.slack_seconds
        if not math.isfinite(allowed) or state["dense"] is None or not state["trials"]:
            told = f"{told}, times unknown: the same rank"
            return _plan(state, news.rank, "compress", step, until, told)
        trials = [(rank, seconds) for rank, seconds in state["trials"]]
        rank = aligned_rank(news.first_seconds, news.slack_seconds, state["dense"], trials)
        told = (
            f"{told} in {news.first_seconds:.3g} s, {news.slack_seconds:.3g} s to spare, dense takes "
            f"{state['dense']:.3g} s: {_verdict(rank, allowed, state['dense'])}"
        )
        return _plan(state, rank, "compress" if rank else "dense", step, until, told)


def _verdict(rank: int, allowed: float, dense_seconds: float) -> str:
    """A rank of :func:`aligned_rank` in words, a dense stage with what made it so.

    >>> _verdict(24, 0.5, 0.9), _verdict(0, 0.5, 0.4)
    ('rank 24', 'dense, which is done in that time: compressing would win nothing')
    >>> _verdict(0, 0.5, 0.5)
    'dense, since the rank that fits is above the highest that pays on this link'
    """
    if rank:
        return f"rank {rank}"
    if dense_seconds < allowed:
        return "dense, which is done in that time: compressing would win nothing"
    return "dense, since the rank that fits is above the highest that pays on this link"


def _next_to_time(state: State) -> int | None:
    """The next rank whose time is wanted; None when the table is complete."""
    if state["dense"] is None:
        return 0 if state["rank"] is None or state["rank"] > 0 else None
    last, seconds = state["trials"][-1] if state["trials"] else (0, 0.0)
    # A trial that gave no time would be repeated for ever.
    if is_slower(seconds, state["dense"]) or state["rank"] not in (0, None, last):
        return None
    rows = max((matrix.rows for matrix in unpack(state["matrices"]).matrices), default=0)
    return next_trial(last, rows // 2) or None


def _learn(state: State, observation: Observation | None) -> State:
    """The times after a window: a new entry, and the table at its new speed."""
    rank = state["rank"]
    seconds = math.nan if observation is None else observation.span_seconds
    if rank is None or not math.isfinite(seconds) or seconds <= 0:
        return state
    if not state["timed"]:
        if rank == 0:
            return {**state, "dense": seconds}
        known = {tried: time for tried, time in state["trials"]} | {rank: seconds}
        return {**state, "trials": [[tried, known[tried]] for tried in sorted(known)]}
    if state["dense"] is None or not state["trials"]:
        return state
    trials = [(tried, time) for tried, time in state["trials"]]
    expected = state["dense"] if rank == 0 else seconds_at(trials, rank)
    # A surprise is half the link's, which moves all times, and half this rank's, whose time is now
    # known. All of it the link's, and one wrong time in the table would send the rank to and fro.
    factor = math.sqrt(seconds / expected) if expected > 0 else 1.0
    known = {tried: time * factor for tried, time in trials}
    dense = state["dense"] * factor
    if rank == 0:
        dense = seconds
    else:
        known[rank] = seconds
    return {**state, "dense": dense, "trials": [[tried, known[tried]] for tried in sorted(known)]}


def _plan(
    state: State, rank: int, phase: str, step: int, until: int, reason: str
) -> tuple[State, Plan]:
    layout = unpack(state["matrices"])
    sampling = sampling_over(min(max(1, until - step), _LONGEST_SAMPLED))
    plan = Plan.uniform(layout, rank, phase, until=until, sampling=sampling, reason=reason)
    return {**state, "rank": rank}, plan
