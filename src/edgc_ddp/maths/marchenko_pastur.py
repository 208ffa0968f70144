"""How much of a random gradient matrix a given rank leaves behind, and which rank leaves that much.

The compression quantification model (CQM; method, section 2): entries of an ``m x n`` matrix
(``m <= n``, ``gamma = m / n``) are independent with variance ``sigma^2``, so the eigenvalues of
``A A^T / (n sigma^2)`` follow the Marchenko-Pastur law and rank ``r`` leaves the energy
``sigma^2 m n G(r; m, n)``. ``G`` is called the residual share here. Two models of it:

``optimum``
    The best approximation of that rank (truncated SVD). With ``phi`` in ``[0, pi]`` as parameter,
    ``G(phi)`` does not depend on the shape and ``r/m = rho(phi; gamma)``; no tables are needed.
``one_pass``
    What one pass of power iteration from a random start really leaves: ``(1 - r/m) (1 - r/n)``.

Everything is plain Python floats, a few dozen microseconds a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MODELS = ("optimum", "one_pass")

_BISECTIONS = 80
_SERIES_BELOW = 0.5
_LARGEST_EXPONENT = 700.0


def residual_share(rank: float, rows: int, cols: int, *, model: str = "optimum") -> float:
    """The share ``G(rank; rows, cols)`` of the energy that a rank leaves behind.

    Args:
        rank: any number, fractions too. ``<= 0`` leaves everything (1.0), the shorter side or more
            leaves nothing (0.0), ``nan`` gives ``nan``.
        rows, cols: the shape, in either order.
        model: ``optimum`` or ``one_pass``, see the module.

    Returns:
        A number in ``[0, 1]``, falling in ``rank``.

    Raises:
        ValueError: a side below 1, or an unknown model.

    Source: method, section 2, ``G(phi)`` and ``rho(phi)``.

    >>> round(residual_share(64, 1920, 480), 4)
    0.7486
    >>> round(residual_share(64, 480, 1920, model="one_pass"), 4)
    0.8378
    """
    short, long = _sides(rows, cols, model)
    if math.isnan(rank):
        return math.nan
    if rank <= 0:
        return 1.0
    if rank >= short:
        return 0.0
    if model == "one_pass":
        return (1 - rank / short) * (1 - rank / long)
    gamma = short / long
    # Parameter is psi = pi - phi, which keeps its digits where the residual vanishes.
    return _share_at(_falling_root(lambda psi: _rank_share_at(psi, gamma) - rank / short))


def rank_for_share(share: float, rows: int, cols: int, *, model: str = "optimum") -> float:
    """The (fractional) rank that leaves ``share`` of the energy: inverse of `residual_share`.

    Returns:
        A rank in ``[0, min(rows, cols)]``. A share of 1 or more needs no rank (0.0), a share of 0
        or less needs the whole shorter side; ``nan`` gives ``nan``.

    Raises:
        ValueError: a side below 1, or an unknown model.

    Source: method, section 2: ``phi - sin(phi) cos(phi) = pi (1 - G)``, then ``r = m rho(phi)``.

    >>> round(rank_for_share(residual_share(10.5, 64, 256), 64, 256), 6)
    10.5
    >>> rank_for_share(1.2, 64, 256), rank_for_share(0.0, 64, 256)
    (0.0, 64.0)
    """
    short, long = _sides(rows, cols, model)
    if math.isnan(share):
        return math.nan
    if share >= 1:
        return 0.0
    if share <= 0:
        return float(short)
    if model == "one_pass":
        # The smaller root of r^2 - (m+n) r + m n (1-G), in the form that does not cancel.
        root = math.sqrt((long - short) ** 2 + 4 * short * long * share)
        return 2 * short * long * (1 - share) / (short + long + root)
    psi = _falling_root(lambda psi: share - _share_at(psi))
    return short * _rank_share_at(psi, short / long)


def rank_keeping_error(
    rank: float,
    rows: int,
    cols: int,
    entropy_before: float,
    entropy_after: float,
    *,
    exponent: int = 2,
    model: str = "optimum",
) -> float:
    """The rank that keeps the absolute error when the entropy moves.

    ``G(r1) = G(r0) exp(c (H0 - H1))`` with ``c = exponent``. An entropy that falls means a smaller
    gradient, so the same absolute error is a larger share of it and a lower rank is enough.

    Args:
        rank: ``r0``, the rank that was right at ``entropy_before``.
        rows, cols: the shape, in either order.
        entropy_before, entropy_after: ``H0`` and ``H1`` in nats, of an estimator that sees scale.
        exponent: 2, since ``G`` is a squared error and ``sigma = exp(H)`` up to a constant. 1 is
            the paper's formula as printed, ``r1 = g^-1(exp(H0 - H1) g(r0))``, with ``g = G``; the
            formula keeps the error when ``g`` is the root error, ``sqrt(G)``, which is what 2 does.
        model: ``optimum`` or ``one_pass``.

    Returns:
        A fractional rank. Saturates at 0.0 once the product reaches 1: no rank leaves more than
        everything. The shorter side stays itself (nothing is left behind at any entropy); ``nan``
        gives ``nan``.

    Raises:
        ValueError: ``exponent`` neither 1 nor 2, a side below 1, or an unknown model.

    Source: method, section 2, last display.

    >>> round(rank_keeping_error(64, 1920, 480, entropy_before=-4.0, entropy_after=-4.05), 2)
    42.03
    >>> rank_keeping_error(64, 1920, 480, entropy_before=-4.0, entropy_after=-5.0)
    0.0
    """
    if exponent not in (1, 2):
        raise ValueError(
            f"exponent={exponent!r} is not known: use 2 (error is squared) or 1 (as printed)"
        )
    share = residual_share(rank, rows, cols, model=model)
    if share <= 0:
        return float(min(rows, cols))
    change = exponent * (entropy_before - entropy_after)
    return rank_for_share(share * math.exp(min(change, _LARGEST_EXPONENT)), rows, cols, model=model)


def _sides(rows: int, cols: int, model: str) -> tuple[int, int]:
    if model not in MODELS:
        raise ValueError(f"model={model!r} is not known: use one of {', '.join(MODELS)}")
    if rows < 1 or cols < 1:
        raise ValueError(f"a {rows} x {cols} matrix has no rank: both sides must be at least 1")
    return min(rows, cols), max(rows, cols)


def _share_at(psi: float) -> float:
    """``G`` at ``phi = pi - psi``: ``(psi - sin(psi) cos(psi)) / pi``."""
    return _minus_sine(2 * psi) / (2 * math.pi)


def _minus_sine(x: float) -> float:
    """``x - sin(x)`` to full relative precision, for ``x >= 0``."""
    if x > _SERIES_BELOW:
        return x - math.sin(x)
    term = total = x**3 / 6
    for n in range(4, 18, 2):
        term *= -x * x / (n * (n + 1))
        total += term
    return total


def _rank_share_at(psi: float, gamma: float) -> float:
    """``rho = r/m`` at ``phi = pi - psi``: how many of the ``m`` directions are kept."""
    if psi >= math.pi:
        return 0.0
    if psi <= 0:
        return 1.0
    phi, root = math.pi - psi, math.sqrt(gamma)
    angle = math.atan2((1 - root) * math.cos(psi / 2), (1 + root) * math.sin(psi / 2))
    rho = (2 / math.pi) * (
        -math.sin(psi) / (2 * root)
        + (1 + gamma) * phi / (4 * gamma)
        - (1 - gamma) / (2 * gamma) * angle
    )
    # The terms cancel at both ends, up to an error of 1e-16 / gamma.
    return min(max(rho, 0.0), 1.0)


def _falling_root(function: Callable[[float], float]) -> float:
    """Where a falling function of ``psi`` in ``[0, pi]`` crosses zero.

    Plain bisection: it cannot fail where the derivative vanishes, which it does at both ends.
    """
    low, high = 0.0, math.pi
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
