"""What the entropy asks for: the rank policies as pure functions (method sections 2 and 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from edgc_ddp.decisions import MatrixSpec
from edgc_ddp.maths.marchenko_pastur import rank_keeping_error

ROUNDING = 1e-6
"""Slack before a floor: a rank that comes back as 31.9999999 is the 32 that went in."""

_HUGE_CHANGE = 100.0
"""Nats. Any larger change saturates every rank, and its exponential may overflow."""


def edgc_rank(
    matrices: Sequence[MatrixSpec],
    rank: float,
    entropy_before: float,
    entropy_after: float,
    *,
    exponent: int = 2,
) -> float:
    """The rank that keeps the absolute error when the entropy moves (method section 2).

    Solves ``G(r1) = G(r0) exp(c (H0 - H1))`` for each shape and averages, each matrix weighing as
    many entries as it has. A matrix that ``rank`` reproduces exactly has no error to keep and is
    left out. Not rounded; 0.0 is the least answer (all saturated). Entropies in nats, ``exponent``
    is c.

    >>> square = [MatrixSpec("w", 128, 128)]
    >>> round(edgc_rank(square, 32, -5.0, -5.0), 6)
    32.0
    >>> edgc_rank(square, 32, -5.0, -4.9) > 32 > edgc_rank(square, 32, -5.0, -5.1)
    True
    """
    lossy = [matrix for matrix in matrices if matrix.rows > rank]
    if not lossy:
        return float(rank)
    change = max(-_HUGE_CHANGE, min(_HUGE_CHANGE, entropy_after - entropy_before))
    asked = sum(
        matrix.numel
        * rank_keeping_error(
            rank,
            matrix.rows,
            matrix.cols,
            entropy_before,
            entropy_before + change,
            exponent=exponent,
        )
        for matrix in lossy
    )
    return asked / sum(matrix.numel for matrix in lossy)


def edgc_code_rank(speed: float, reference_speed: float, r_min: int, r_max: int) -> int:
    """The authors' code: the rank follows the speed of the entropy (method section 3).

    ``round(r_min + (r_max - r_min) d / d_ref)``, clipped to the bounds, floored to even.
    ``reference_speed`` must be above 0.

    >>> [edgc_code_rank(speed, 0.4, 8, 32) for speed in (0.0, 0.1, 0.25, 0.4, 9.0)]
    [8, 14, 22, 32, 32]
    """
    asked = r_min + (r_max - r_min) * min(speed / reference_speed, 1.0)
    return 2 * (max(r_min, min(r_max, round(asked))) // 2)


def reachable(rank: int, step_limit: int, r_min: int, r_max: int) -> tuple[int, int]:
    """Lowest and highest rank that one window may move to from ``rank``, itself within bounds.

    >>> reachable(30, step_limit=4, r_min=8, r_max=32)
    (26, 32)
    """
    return max(r_min, rank - step_limit), min(r_max, rank + step_limit)


def common_entropy(
    matrices: Sequence[MatrixSpec], before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[float, float] | None:
    """Mean entropies before and after over the matrices known at both times, None without any.

    Both means are over the same entries: a matrix that drops out of one window (no finite sample)
    must not look like a change of entropy.

    >>> pair = [MatrixSpec("a", 2, 2), MatrixSpec("b", 2, 2)]
    >>> common_entropy(pair, {"a": -1.0, "b": -9.0}, {"a": -2.0, "b": math.nan})
    (-1.0, -2.0)
    """
    known = [
        matrix
        for matrix in matrices
        if math.isfinite(before.get(matrix.name, math.nan))
        and math.isfinite(after.get(matrix.name, math.nan))
    ]
    if not known:
        return None
    total = sum(matrix.numel for matrix in known)
    return (
        sum(matrix.numel * before[matrix.name] for matrix in known) / total,
        sum(matrix.numel * after[matrix.name] for matrix in known) / total,
    )
