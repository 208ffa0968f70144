"""From measured factors to the energy in every direction of a matrix, measured or not.

Factors show the directions that were sent and, by a probe, how much energy the others hold together.
How it is spread among those must be guessed: it is taken to fall geometrically from the last measured
direction on. Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgc_ddp.decisions import MatrixSpec, Observation

_BISECTIONS = 60


def tail(last: float, left: float, count: int) -> tuple[float, ...]:
    """``count`` energies that sum to ``left`` and fall geometrically from ``last`` (the one before).

    Flat where even that sums to less than ``left``: then the measured direction was not yet one of
    the strongest.

    >>> [round(x, 3) for x in tail(last=4.0, left=7.0, count=3)]
    [3.015, 2.272, 1.713]
    >>> tail(last=1.0, left=8.0, count=2)
    (4.0, 4.0)
    """
    if count == 0 or left <= 0:
        return (0.0,) * count
    if left >= count * last:
        return (left / count,) * count
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        ratio = (low + high) / 2
        if last * _powers(ratio, count) < left:
            low = ratio
        else:
            high = ratio
    falling = [last * high ** (k + 1) for k in range(count)]
    total = math.fsum(falling)
    # A tail so steep that it vanishes: all that is left is in the next direction.
    return tuple(x * left / total for x in falling) if total > 0 else (left,) + (0.0,) * (count - 1)


def _powers(ratio: float, count: int) -> float:
    """``ratio + ratio^2 + ... + ratio^count``."""
    return count * ratio if ratio == 1 else ratio * (1 - ratio**count) / (1 - ratio)


def spectrum(matrix: MatrixSpec, seen: Observation) -> tuple[float, ...] | None:
    """The averaged gradient's energy in each of ``rows`` directions, largest first; None when the
    window did not show it (dense, nothing sampled, no energy, or not finite).

    >>> from edgc_ddp.decisions import Observation
    >>> seen = Observation(10, captured={"w": (8.0, 4.0)}, left={"w": 3.0})
    >>> [round(x, 2) for x in spectrum(MatrixSpec("w", 4, 9), seen)]
    [8.0, 4.0, 2.0, 1.0]
    """
    captured = seen.captured.get(matrix.name, ())[: matrix.rows]
    left = seen.left.get(matrix.name, math.nan)
    whole = math.fsum(captured) + left
    if not captured or not math.isfinite(whole) or whole <= 0:
        return None
    return tuple(
        sorted((*captured, *tail(min(captured), left, matrix.rows - len(captured))), reverse=True)
    )


def errors(energies: Sequence[float]) -> tuple[float, ...]:
    """What rank 0, 1, ... leaves, given the energy of each direction.

    >>> errors((8.0, 4.0, 2.0))
    (14.0, 6.0, 2.0, 0.0)
    """
    left = [0.0]
    for energy in reversed(energies):
        left.append(left[-1] + energy)
    return tuple(reversed(left))


def largest_rank(matrix: MatrixSpec) -> int:
    """The largest rank at which factors are smaller than the matrix and, where that is known, are sent; 0
    when there is none.

    >>> largest_rank(MatrixSpec("w", 64, 64)), largest_rank(MatrixSpec("v", 2, 2))
    (31, 0)
    >>> largest_rank(MatrixSpec("w", 64, 64, highest=15))
    15
    """
    smaller = (matrix.numel - 1) // (matrix.rows + matrix.cols)
    return smaller if matrix.highest is None else min(smaller, matrix.highest)
