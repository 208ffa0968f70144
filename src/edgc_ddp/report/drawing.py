"""What all pictures share: palette, sizes, curves made lighter, legends that cover nothing."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from edgc_ddp.report.load import Series

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by lightness.
BLUE, VERMILLION, BLACK, SKY, GREEN, ORANGE, PINK = (
    "#0072B2", "#D55E00", "#000000", "#56B4E9", "#009E73", "#E69F00", "#CC79A7"
)  # fmt: skip

STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d0d0d0",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "axes.formatter.useoffset": False,
}
WIDTH, _HEIGHT, _DPI = 9.0, 3.6, 130
_MOST_POINTS = 4000
MOST_STAGES = 32
"""That are drawn. An image of a thousand would be too tall to be made, and a map of each takes a second."""


@dataclass(frozen=True)
class Picture:
    """``name`` is the file's stem, ``told`` what the picture shows: its caption and alt text."""

    name: str
    title: str
    told: str
    png: bytes


def new_figure(rows: int = 1, height: float = _HEIGHT, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot, its axes one under the other."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, squeeze=False, sharex=True, **options)
    return figure, list(axes[:, 0])


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def smooth(values: Series, width: int) -> Series:
    """Centred mean over about ``width`` values, fewer at the ends; only finite ones count.

    >>> smooth(np.array([1.0, 3.0, np.nan, 5.0]), 3)
    array([2., 2., 4., 5.])
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(values.size)
    low = np.maximum(places - width // 2, 0)
    high = np.minimum(places + width // 2 + 1, values.size)
    count = counts[high] - counts[low]
    mean: Series = np.where(count > 0, sums[high] - sums[low], np.nan) / np.maximum(count, 1)
    return mean


def smoothing_width(size: int) -> int:
    """An odd number of steps, about a fiftieth of the run.

    >>> smoothing_width(1000), smoothing_width(10)
    (21, 1)
    """
    return size // 100 * 2 + 1


def thin(steps: Series, values: Series, most: int = _MOST_POINTS) -> tuple[Series, Series]:
    """At most ``most`` points that keep every visible peak: lowest and highest of each stretch.

    >>> steps, values = thin(np.arange(8.0), np.array([0.0, 9, 1, 1, 1, 1, -5, 1]), most=4)
    >>> values
    array([ 0.,  9.,  1., -5.])
    """
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    if values.size <= most:
        return steps, values
    kept: list[int] = []
    for stretch in np.array_split(np.arange(values.size), most // 2):
        low, high = stretch[values[stretch].argmin()], stretch[values[stretch].argmax()]
        kept += sorted({int(low), int(high)})
    return steps[kept], values[kept]


def byte_unit(most: float) -> tuple[float, str]:
    """Divisor and name of the unit to show up to ``most`` bytes in.

    >>> byte_unit(812e6), byte_unit(2.7e10), byte_unit(9e4)
    ((1000000.0, 'MB'), (1000000000.0, 'GB'), (1000.0, 'kB'))
    """
    if most >= 1e10:
        return 1e9, "GB"
    return (1e6, "MB") if most >= 1e6 or not most > 0 else (1e3, "kB")


def label_steps(axis: Axes, first: float, last: float) -> None:
    axis.set_xlabel("step (iterations)")
    axis.set_xlim(first, last if last > first else first + 1)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def legend_below(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int = 5
) -> None:
    """Outside the axes, so that no curve is ever covered. Labels are taken as they are."""
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), fontsize=9
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def quotient(above: Series, below: Series) -> Series:
    """Element by element, nan where ``below`` is not above 0.

    >>> quotient(np.array([6.0, 1.0]), np.array([2.0, 0.0]))
    array([ 3., nan])
    """
    positive = below > 0
    result: Series = np.where(positive, above, np.nan) / np.where(positive, below, 1.0)
    return result
