"""Figures without a display, and tables as CSV and as Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def canvas(
    columns: int = 1, *, width: float = 5.0, height: float = 3.6
) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side."""
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, columns, place + 1) for place in range(columns)]


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows([_short(value) for value in row] for row in rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table, one line of text a row.

    >>> markdown(["w", "CC"], [[1, 0.98765]])
    ['| w | CC |', '|---|---|', '| 1 | 0.9877 |']
    """
    lines = [" | ".join(head), "|".join("---" for _ in head)]
    lines[1:] = [lines[1]]
    body = [" | ".join(_cell(value) for value in row) for row in rows]
    return [f"| {lines[0]} |", f"|{lines[1]}|", *(f"| {row} |" for row in body)]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
