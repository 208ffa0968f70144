"""Checks of controller options, and the layout as plain values for a controller's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from numbers import Integral
from typing import Any

from edgc_ddp.decisions import Layout, MatrixSpec, Sampling


def bad_option(option: str, given: object, expected: str, remedy: str) -> ValueError:
    """The one form of complaint: option and given value, what was expected, what to do.

    >>> print(bad_option("rank", 0, "a whole number >= 1", "use Dense() to send everything"))
    rank=0: expected a whole number >= 1; use Dense() to send everything
    """
    return ValueError(f"{option}={given!r}: expected {expected}; {remedy}")


def check_count(option: str, value: object, *, least: int = 1, remedy: str) -> None:
    """Raises ValueError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        if isinstance(value, Integral) and not isinstance(value, int):
            remedy = f"write int({option}): checkpoints hold Python's own numbers"
        raise bad_option(option, value, f"a whole number >= {least}", remedy)


def check_share(option: str, value: object, *, remedy: str) -> None:
    """Raises ValueError unless ``value`` is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise bad_option(option, value, "a number in (0, 1]", remedy)


def check_choice(option: str, value: object, choices: Collection[object]) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    # A bool is a number to Python: True would pass for 1.
    if isinstance(value, bool) or not isinstance(value, int | float | str) or value not in choices:
        names = ", ".join(repr(choice) for choice in choices)
        raise bad_option(option, value, f"one of {names}", "choose one of them")


def iterations(option: str, value: object, total_steps: int | None) -> int:
    """A duration in iterations: an int as it is, a float in (0, 1) as a share of the run.

    Raises ValueError for anything else, and for a share of a run of unknown length.

    >>> iterations("window", 1000, None), iterations("window", 0.1, 300)
    (1000, 30)
    """
    if total_steps is not None:
        check_count("total_steps", total_steps, remedy="give the run's iterations or None")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if not isinstance(value, float) or not 0 < value < 1:
        raise bad_option(
            option,
            value,
            "a whole number of iterations >= 1 or a share of the run in (0, 1)",
            f"write {option}=1000 or {option}=0.1",
        )
    if total_steps is None:
        raise bad_option(
            option,
            value,
            "total_steps beside a share of the run",
            f"give total_steps, or {option} as a whole number of iterations",
        )
    return max(1, round(value * total_steps))


def sampling_over(
    length: int,
    alpha: float = 0.1,
    beta: float = 0.25,
    estimator: str | Callable[..., Any] = "gaussian",
) -> Sampling:
    """Sampling with at least one iteration in ``length``, so that short windows see something.

    >>> sampling_over(1000).alpha, sampling_over(4).alpha
    (0.1, 0.25)
    """
    return Sampling(alpha=max(alpha, 1 / length), beta=beta, estimator=estimator)


def pack(layout: Layout) -> list[list[Any]]:
    """The layout's matrices as lists, equal to themselves after a trip through JSON."""
    return [[m.name, m.rows, m.cols, m.highest] for m in layout.matrices]


def unpack(packed: list[list[Any]]) -> Layout:
    """Inverse of :func:`pack` (the world size, which no controller here needs, is left out).

    >>> unpack(pack(Layout((MatrixSpec("w", 4, 8),)))).matrices
    (MatrixSpec(name='w', rows=4, cols=8, highest=None),)
    """
    return Layout(tuple(MatrixSpec(*matrix) for matrix in packed))
