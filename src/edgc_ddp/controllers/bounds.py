"""From measured times to the largest rank that pays, and from error curves to the warm-up's end.

Pure functions of numbers (method section 3, "r_max by measurement" and "Warm-up end").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgc_ddp.maths.comm_time import fit_rank_time

_TOLERANCE = 0.02
"""How much longer a window may take than dense before it counts: medians of windows vary by about that."""

_WORTH = 0.03
"""Of the time of a dense average: what compression must save at least."""

_SHORTEST = 1e-6
"""Seconds; no average over several processes is done sooner."""


def next_trial(last: int, largest: int) -> int:
    """The next rank to time: 2, 4, 8, ... and finally ``largest``; 0 when there is none.

    >>> ranks = [0]
    >>> while (rank := next_trial(ranks[-1], largest=24)): ranks.append(rank)
    >>> ranks[1:]
    [2, 4, 8, 16, 24]
    """
    return 0 if last >= largest else min(max(2, 2 * last), largest)


def measured(seconds: float) -> float:
    """A time that an average may have taken, else nan: a clock that was set back tells nothing.

    >>> [measured(seconds) for seconds in (0.2, 0.0, -1.0, math.inf)]
    [0.2, nan, nan, nan]
    """
    return seconds if _SHORTEST < seconds < math.inf else math.nan


def is_slower(seconds: float, dense_seconds: float) -> bool:
    """Whether a rank takes longer than dense; an unmeasured time counts as slower.

    >>> is_slower(0.2, 0.1), is_slower(0.1, 0.1), is_slower(math.nan, 0.1)
    (True, False, True)
    """
    return not (math.isfinite(seconds) and seconds <= dense_seconds)


def is_clearly_slower(seconds: float, dense_seconds: float) -> bool:
    """Whether a window took longer than dense by more than such times vary; False when unmeasured.

    >>> [is_clearly_slower(seconds, 0.1) for seconds in (0.101, 0.103, math.nan)]
    [False, True, False]
    """
    return seconds > dense_seconds * (1 + _TOLERANCE)


def break_even(trials: Sequence[tuple[int, float]], dense_seconds: float) -> float:
    """The rank at which averaging takes as long as dense: T^-1(T0), T piecewise linear.

    ``trials`` are (rank, seconds) with ranks ascending. Without a slower trial the answer is the
    last rank (T is not extrapolated); with an unmeasured one, the last rank known to pay; 0.0 when
    the first trial is slower already.

    >>> break_even([(2, 1.0), (4, 2.0), (8, 6.0)], dense_seconds=3.0)
    5.0
    >>> break_even([(2, 1.0), (4, 2.0)], dense_seconds=3.0)
    4.0
    >>> break_even([(2, 4.0)], dense_seconds=3.0)
    0.0
    """
    rank_paid, seconds_paid = 0, math.nan
    for rank, seconds in trials:
        if is_slower(seconds, dense_seconds):
            if rank_paid == 0 or not math.isfinite(seconds):
                return float(rank_paid)
            part = (dense_seconds - seconds_paid) / (seconds - seconds_paid)
            return rank_paid + part * (rank - rank_paid)
        rank_paid, seconds_paid = rank, seconds
    return float(rank_paid)


def measured_r_max(trials: Sequence[tuple[int, float]], dense_seconds: float) -> int:
    """``4 floor(T^-1(T0) / 4)`` (method section 3); 0 when compression does not pay.

    ``T`` is the communication-time model fitted to the trials with a time
    (:func:`edgc_ddp.maths.comm_time.fit_rank_time`), so one odd trial does not decide alone. It is
    trusted between the last rank that paid and the first that did not, never beyond the trials.

    >>> measured_r_max([(16, 0.7417), (32, 1.4833), (64, 3.0167)], dense_seconds=3.0417)
    64
    >>> measured_r_max([(2, 1.0), (4, 2.0), (8, 6.0)], dense_seconds=5.5)
    4
    """
    paid, slower = 0, math.inf
    for rank, seconds in trials:
        if is_slower(seconds, dense_seconds):
            slower = rank
            break
        paid = rank
    if paid == 0:
        return 0
    measured = [(rank, seconds) for rank, seconds in trials if math.isfinite(seconds)]
    # An unmeasured trial tells nothing of the ranks below it either.
    highest = paid if len(measured) < len(trials) or slower == math.inf else slower - 1
    asked = min(highest, max(paid, fit_rank_time(measured).rank_at(dense_seconds)))
    # The slack undoes rounding in the fit: 19.9999999 is 20, not 16.
    return 4 * math.floor((asked + 1e-6) / 4)


def kept_seconds(trials: Sequence[tuple[int, float]], dense_seconds: float, saving: float) -> float:
    """The longest average that keeps the share ``saving`` of what the fastest trial saves against dense.

    >>> kept_seconds([(2, 1.0), (4, 2.0), (8, 6.0)], dense_seconds=11.0, saving=0.75)
    3.5
    >>> kept_seconds([(2, 12.0)], dense_seconds=11.0, saving=0.75)
    11.0
    """
    fastest = min((s for _, s in trials if math.isfinite(s)), default=dense_seconds)
    return dense_seconds - saving * max(0.0, dense_seconds - fastest)


def kept_r_max(trials: Sequence[tuple[int, float]], dense_seconds: float, saving: float) -> int:
    """The highest rank, in steps of 4, that keeps the share ``saving`` of what the fastest trial saves.

    At ``saving=0`` it is :func:`measured_r_max`. Where even rank 4 keeps less it is 4, if that pays; 0
    where the fastest saves less than 3 % of dense: rank is fidelity, which is worth more than that.

    >>> trials = [(2, 0.012), (4, 0.014), (8, 0.018), (16, 0.026), (32, 0.042)]
    >>> [kept_r_max(trials, 0.030, saving) for saving in (0.0, 0.5, 0.9, 1.0)]
    [20, 8, 4, 4]
    >>> kept_r_max([(2, 0.0295), (4, 0.0296)], 0.030, saving=0.9)
    0
    """
    allowed = kept_seconds(trials, dense_seconds, saving)
    if saving and kept_seconds(trials, dense_seconds, 1.0) > (1 - _WORTH) * dense_seconds:
        return 0
    least = min(4, measured_r_max(trials, dense_seconds))
    return max(least, measured_r_max(trials, allowed))


def default_r_min(r_max: int) -> int:
    """A quarter of ``r_max`` (method section 3), at least 1.

    >>> default_r_min(32), default_r_min(3)
    (8, 1)
    """
    return max(1, r_max // 4)


def error_at(curve: Sequence[float], rank: int) -> float | None:
    """The energy that ``rank`` leaves on a measured curve, None when it was not measured.

    A curve that starts without energy counts as not measured: a zero gradient tells nothing.

    >>> error_at((9.0, 4.0, 1.0), 1), error_at((9.0, math.nan), 1), error_at((), 1)
    (4.0, None, None)
    """
    measured = rank < len(curve) and math.isfinite(curve[rank]) and curve[0] > 0
    return curve[rank] if measured else None
