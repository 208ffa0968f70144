"""The entropy controller: warm-up, measured bounds, then one rank decision per window (EDGC)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from edgc_ddp.controllers.bounds import (
    default_r_min,
    error_at,
    is_clearly_slower,
    is_slower,
    kept_r_max,
    kept_seconds,
    measured,
    next_trial,
)
from edgc_ddp.controllers.options import (
    bad_option,
    check_choice,
    check_count,
    check_share,
    iterations,
    pack,
    sampling_over,
    unpack,
)
from edgc_ddp.controllers.windows import Rules, finite, new_group, next_group
from edgc_ddp.decisions import Layout, MatrixSpec, Observation, Plan, State
from edgc_ddp.maths.comm_time import fit_rank_time
from edgc_ddp.maths.entropy import ESTIMATORS

_PERIODS = 4
"""At least so many looks at the gradient in a warm-up whose end depends on its error."""


@dataclass(frozen=True, kw_only=True)
class EntropyController:
    """Ranks that follow the gradient's entropy, decided once per window (method sections 1 to 3).

    Durations are iterations (int) or shares of ``total_steps`` (float in (0, 1)).

    - ``window``: iterations between decisions. ``step_limit``: largest rank change in one.
    - ``warmup``: dense iterations from the first decision on; None = a tenth of ``total_steps``,
      else one window. With ``r_max`` given it goes on, up to ``warmup_limit`` (None = 0.3 of
      ``total_steps``, else three warm-ups), until rank r_min leaves less energy than r_max left of
      the first gradient measured.
    - ``r_max``, ``r_min``: bounds of the rank. ``r_max`` None = the highest rank that keeps the share
      ``saving`` of the time that averaging at the fastest rank saves against dense, timed for
      ``calibration_steps`` iterations each at rank 2, 4, 8, ... after the warm-up; where nothing
      pays, phase "dense" for ever. At ``saving=0`` it is the paper's: the rank at which averaging
      takes as long as dense. ``r_min`` None = r_max // 4. A later window that took longer than
      dense has dense timed once more: if dense still is the faster, ``r_max`` is lowered to where
      it would pay, or the phase becomes "dense".
    - ``alpha``, ``beta``, ``estimator``: share of iterations and of entries sampled, and how
      (:class:`~edgc_ddp.decisions.Sampling`); every window has at least one sampled iteration.
    - ``policy``: "edgc" (the paper: keep the error) or "edgc_code" (the authors' code: follow the
      speed of the entropy between successive windows; ``reference`` and ``exponent`` play no part).
    - ``reference``: compare with the "anchor" (warm-up's last entropy, r_max) or the "previous"
      window. ``exponent``: 2 keeps the squared error, 1 the root, as the paper prints it.
    - ``scope``: one rank per "stage" (all matrices of this model part) or per "matrix".

    Raises ValueError naming the option for any value out of range, for a share without
    ``total_steps``, for ``r_min`` above ``r_max`` and for ``warmup_limit`` below ``warmup``.

    >>> controller = EntropyController(window=100, warmup=50, r_max=32)
    >>> state = controller.init(Layout((MatrixSpec("w", 128, 128),)))
    >>> state, plan = controller.decide(state, None, step=0)
    >>> plan.phase, plan.ranks, plan.until
    ('warmup', {'w': 0}, 10)
    """

    window: int | float = 1000
    warmup: int | float | None = None
    r_max: int | None = None
    r_min: int | None = None
    step_limit: int = 4
    alpha: float = 0.1
    beta: float = 0.25
    estimator: str | Callable[..., Any] = "gaussian"
    exponent: int = 2
    reference: str = "anchor"
    policy: str = "edgc"
    scope: str = "stage"
    total_steps: int | None = None
    calibration_steps: int = 5
    warmup_limit: int | float | None = None
    saving: float = 0.9

    def __post_init__(self) -> None:
        for option in ("r_max", "r_min"):
            if getattr(self, option) is not None:
                remedy = f"leave {option} out to have it measured"
                check_count(option, getattr(self, option), remedy=remedy)
        if self.r_max is not None and self.r_min is not None and self.r_min > self.r_max:
            expected = f"at most r_max={self.r_max}"
            raise bad_option("r_min", self.r_min, expected, "lower r_min or raise r_max")
        check_count("step_limit", self.step_limit, remedy="use FixedRank for a constant rank")
        check_count("calibration_steps", self.calibration_steps, remedy="5 is the default")
        check_share("alpha", self.alpha, remedy="0.1 looks at one iteration in ten")
        check_share("beta", self.beta, remedy="0.25 uses a quarter of the entries")
        if not callable(self.estimator):
            check_choice("estimator", self.estimator, tuple(ESTIMATORS))
        if not isinstance(self.saving, int | float) or self.saving != 0:
            check_share("saving", self.saving, remedy="or 0, the paper's: as slow as dense")
        check_choice("exponent", self.exponent, (2, 1))
        check_choice("reference", self.reference, ("anchor", "previous"))
        check_choice("policy", self.policy, ("edgc", "edgc_code"))
        check_choice("scope", self.scope, ("stage", "matrix"))
        _, warmup, limit = self._durations()
        if limit < warmup:
            expected = f"at least the warm-up of {warmup} iterations"
            remedy = "raise warmup_limit or lower warmup"
            raise bad_option("warmup_limit", self.warmup_limit, expected, remedy)

    def init(self, layout: Layout) -> State:
        largest = max((matrix.rows for matrix in layout.matrices), default=0)
        r_max = None if self.r_max is None else min(self.r_max, largest)
        state: State = {"matrices": pack(layout), "phase": "warmup", "begin": None}
        state |= {"spans": [], "anchor": {}, "early": None, "trials": [], "groups": []}
        return self._bounded(state, r_max) if largest else {**state, "phase": "dense"}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        if not state["matrices"]:
            return self._dense(state, "no matrix to compress")
        phase = state["phase"]
        if phase == "dense":
            return self._dense(state, state["why_dense"])
        # Asked again without a measurement (a restart, say): an empty one, which decides nothing.
        seen = Observation(steps=0) if observation is None else observation
        if phase == "warmup":
            return self._warm_up(state, seen, step)
        if phase == "calibration":
            return self._calibrate(state, seen, step)
        if phase == "recheck":
            return self._after_recheck(state, seen, step)
        return self._next_window(state, seen, step)

    # The phases. Each returns the new memory and the plan; none changes its arguments.

    def _warm_up(self, state: State, seen: Observation, step: int) -> tuple[State, Plan]:
        begin = step if state["begin"] is None else state["begin"]
        _, warmup, limit = self._durations()
        r_max, r_min = state["r_max"], state["r_min"]
        state = {**state, "begin": begin}
        layout = unpack(state["matrices"])
        # The latest finite value of each matrix: a last period without one must not lose it.
        state["anchor"] = {**state["anchor"], **finite(seen.entropy, layout.matrices)}
        if r_max is None and math.isfinite(seconds := measured(seen.span_seconds)):
            state["spans"] = [*state["spans"], seconds]
        if r_max is not None and state["early"] is None:
            state["early"] = error_at(seen.error_curve, r_max)

        if step < begin + warmup:
            return self._stay_dense(state, step, begin + warmup, "warm-up")
        if r_max is None:
            return self._start_calibration(state, step)
        early, now = state["early"], error_at(seen.error_curve, r_min)
        if early is None or now is None:
            return self._start_windows(state, step, "warm-up over")
        told = f"rank {r_min} would leave {now:.3g}, rank {r_max} left {early:.3g} early"
        if now < early:
            return self._start_windows(state, step, f"warm-up over, {told}")
        if step >= begin + limit:
            return self._start_windows(state, step, f"warm-up limit reached, {told}")
        return self._stay_dense(state, step, begin + limit, f"warm-up goes on, {told}")

    def _start_calibration(self, state: State, step: int) -> tuple[State, Plan]:
        largest = self._largest_useful(state)
        if largest < 4:
            return self._dense(
                state, f"half of the largest matrix's rows is {largest}, below rank 4: give r_max"
            )
        if not state["spans"]:
            return self._dense(state, "the time of a dense average was not measured: give r_max")
        return self._trial({**state, "phase": "calibration"}, next_trial(0, largest), step)

    def _calibrate(self, state: State, seen: Observation, step: int) -> tuple[State, Plan]:
        if seen.steps == 0:
            return self._trial(state, state["trial"], step)
        rank, dense_seconds = state["trial"], median(state["spans"])
        trials = [*state["trials"], [rank, measured(seen.span_seconds)]]
        following = next_trial(rank, self._largest_useful(state))
        pairs = [(tried, seconds) for tried, seconds in trials]
        allowed = kept_seconds(pairs, dense_seconds, self.saving)
        if following and not is_slower(pairs[-1][1], allowed):
            return self._trial({**state, "trials": trials}, following, step)
        r_max = kept_r_max(pairs, dense_seconds, self.saving)
        # A nan would make the memory unequal to its own copy.
        timed = [[tried, seconds] for tried, seconds in trials if math.isfinite(seconds)]
        state = {**state, "trials": timed}
        if r_max < 4:
            return self._dense(
                state,
                f"averaging at rank {rank} takes {_milliseconds(pairs[-1][1])}, "
                f"dense {_milliseconds(dense_seconds)}: compression does not pay on this link",
            )
        if self.saving:
            told = f"rank {r_max} keeps {self.saving:.0%} of what averaging at the fastest rank "
            told += (
                f"({_milliseconds(kept_seconds(pairs, dense_seconds, 1.0))}) saves against dense "
            )
            told += f"({_milliseconds(dense_seconds)})"
        else:
            told = (
                f"averaging breaks even with dense ({_milliseconds(dense_seconds)}) at rank {r_max}"
            )
        if self.r_min is not None and self.r_min > r_max:
            told += f", so r_min={self.r_min} becomes {r_max}"
        return self._start_windows(self._bounded(state, r_max), step, told)

    def _start_windows(self, state: State, step: int, told: str) -> tuple[State, Plan]:
        groups = [
            new_group(matrices, state["r_max"], state["anchor"], self.policy)
            for matrices in self._grouped(state)
        ]
        state = {**state, "phase": "compress", "groups": groups}
        return self._window_plan(state, step, f"{told}: start at rank {state['r_max']}")

    def _next_window(self, state: State, seen: Observation, step: int) -> tuple[State, Plan]:
        if state["trials"] and is_clearly_slower(seen.span_seconds, median(state["spans"])):
            return self._recheck({**state, "slow": seen.span_seconds}, step)
        rules = Rules(self.policy, self.reference, self.step_limit, self.exponent)
        moves = [
            next_group(group, matrices, seen.entropy, state["r_min"], state["r_max"], rules)
            for group, matrices in zip(state["groups"], self._grouped(state), strict=True)
        ]
        reason = moves[0][1]
        if len(moves) > 1:
            changes = [
                after["rank"] - before["rank"]
                for (after, _), before in zip(moves, state["groups"], strict=True)
            ]
            kept = sum("no finite entropy" in sentence for _, sentence in moves)
            reason = (
                f"{sum(change > 0 for change in changes)} ranks up, "
                f"{sum(change < 0 for change in changes)} down of {len(moves)} "
                f"({kept} without a finite entropy kept)"
            )
        return self._window_plan({**state, "groups": [group for group, _ in moves]}, step, reason)

    def _recheck(self, state: State, step: int) -> tuple[State, Plan]:
        """Time dense now: the machine may have become slower for both."""
        return {**state, "phase": "recheck"}, Plan.uniform(
            unpack(state["matrices"]),
            0,
            "calibration",
            until=step + self.calibration_steps,
            reason=f"the last window took {_milliseconds(state['slow'])}, dense took "
            f"{_milliseconds(median(state['spans']))}: timing dense again",
        )

    def _after_recheck(self, state: State, seen: Observation, step: int) -> tuple[State, Plan]:
        if seen.steps == 0:
            return self._recheck(state, step)
        slow, dense_seconds = state["slow"], measured(seen.span_seconds)
        told = f"dense takes {_milliseconds(dense_seconds)} by now, the last window took "
        told += _milliseconds(slow)
        state = {**state, "phase": "compress"}
        if not math.isfinite(dense_seconds):
            return self._window_plan(state, step, f"{told}: ranks kept")
        state["spans"] = [dense_seconds]
        if not is_clearly_slower(slow, dense_seconds):
            return self._window_plan(state, step, f"{told}: ranks kept")
        # The model keeps its form, and moves to go through what the window showed.
        rank = fmean(group["rank"] for group in state["groups"])
        trials = [(tried, seconds) for tried, seconds in state["trials"]]
        factor = slow / fit_rank_time(trials).seconds(rank)
        trials = [(tried, seconds * factor) for tried, seconds in trials]
        r_max = kept_r_max(trials, dense_seconds, self.saving)
        if r_max < 4:
            return self._dense(state, f"{told}: compression does not pay on this link")
        state = self._bounded({**state, "trials": [list(trial) for trial in trials]}, r_max)
        return self._start_windows(state, step, f"{told}: rank {r_max} pays by now")

    # Plans.

    def _stay_dense(self, state: State, step: int, end: int, reason: str) -> tuple[State, Plan]:
        window, warmup, _ = self._durations()
        period = max(1, min(window, warmup // _PERIODS)) if self.r_max is not None else window
        # Equal parts: a short last one would give a poor last entropy, the anchor.
        periods = math.ceil((end - step) / period)
        until = step + math.ceil((end - step) / periods)
        return state, Plan.uniform(
            unpack(state["matrices"]),
            0,
            "warmup",
            until=until,
            sampling=sampling_over(until - step, self.alpha, self.beta, self.estimator),
            # Where bounds are measured, nobody asks for the error, and it would be timed with the average.
            probe_rank=state["r_max"] or 0,
            reason=reason,
        )

    def _trial(self, state: State, rank: int, step: int) -> tuple[State, Plan]:
        return {**state, "trial": rank}, Plan.uniform(
            unpack(state["matrices"]),
            rank,
            "calibration",
            until=step + self.calibration_steps,
            reason=f"timing rank {rank}",
        )

    def _window_plan(self, state: State, step: int, reason: str) -> tuple[State, Plan]:
        window, _, _ = self._durations()
        ranks = {
            matrix.name: min(group["rank"], matrix.rows)
            for group, matrices in zip(state["groups"], self._grouped(state), strict=True)
            for matrix in matrices
        }
        return state, Plan(
            ranks=ranks,
            phase="compress",
            until=step + window,
            sampling=sampling_over(window, self.alpha, self.beta, self.estimator),
            reason=reason,
        )

    def _dense(self, state: State, reason: str) -> tuple[State, Plan]:
        layout = unpack(state["matrices"])
        state = {**state, "phase": "dense", "why_dense": reason}
        return state, Plan.uniform(layout, 0, "dense", reason=reason)

    # Small readings of options and memory.

    def _durations(self) -> tuple[int, int, int]:
        """Window, warm-up and warm-up limit in iterations."""
        total = self.total_steps
        window = iterations("window", self.window, total)
        if self.warmup is not None:
            warmup = iterations("warmup", self.warmup, total)
        else:
            warmup = window if total is None else iterations("warmup", 0.1, total)
        if self.warmup_limit is not None:
            return window, warmup, iterations("warmup_limit", self.warmup_limit, total)
        limit = 3 * warmup if total is None else iterations("warmup_limit", 0.3, total)
        return window, warmup, max(warmup, limit)

    def _bounded(self, state: State, r_max: int | None) -> State:
        if r_max is None:
            return {**state, "r_max": None, "r_min": None}
        r_min = default_r_min(r_max) if self.r_min is None else min(self.r_min, r_max)
        return {**state, "r_max": r_max, "r_min": r_min}

    def _grouped(self, state: State) -> list[tuple[MatrixSpec, ...]]:
        matrices = unpack(state["matrices"]).matrices
        return [matrices] if self.scope == "stage" else [(matrix,) for matrix in matrices]

    def _largest_useful(self, state: State) -> int:
        """Half of the largest matrix's shorter side: above it two factors outweigh a square."""
        return max(matrix.rows for matrix in unpack(state["matrices"]).matrices) // 2


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if math.isfinite(seconds) else "an unmeasured time"
