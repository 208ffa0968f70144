"""The rank of every matrix after every decision, legible with five parameters or with 150."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from edgc_ddp.report.load import Run, Series, plan_ranks
from edgc_ddp.report.phases import BAND_ALPHA, phase_colour, phase_label

MOST_MATRICES = 200
_LONGEST_LABEL = 44
_MOST_STEP_LABELS = 14
_MOST_CELL_NUMBERS = 500


def shorten(name: str, most: int = _LONGEST_LABEL) -> str:
    """Cut in the middle: parameter names differ at both ends.

    >>> shorten("transformer.blocks.11.attention.weight", 20)
    'transform…ion.weight'
    """
    if len(name) <= most:
        return name
    head = (most - 1) // 2
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


def parameter_labels(names: list[str], shapes: dict[str, Any]) -> list[str]:
    """Names without what all of them start with up to a dot, and their shapes where known.

    >>> parameter_labels(["module.a.w", "module.b.w"], {"module.a.w": [4, 8]})
    ['a.w  4×8', 'b.w']
    """
    start = 0
    if len(names) > 1:
        parts = [name.split(".")[:-1] for name in names]
        for column in zip(*parts, strict=False):
            if len(set(column)) > 1:
                break
            start += len(column[0]) + 1
    labels = []
    for name in names:
        shape = shapes.get(name)
        size = "×".join(map(str, shape)) if isinstance(shape, list) else ""
        labels.append(f"{shorten(name[start:])}  {size}".rstrip())
    return labels


def rank_table(run: Run) -> tuple[list[str], Series]:
    """Names and ranks_MD: M matrices in the model's order, D decisions; 0 = dense.

    A matrix that a decision does not name is averaged dense.
    """
    plans = [plan_ranks(row) for row in run.decisions]
    names = list(dict.fromkeys(name for ranks in plans for name in ranks))
    ranks_MD = np.zeros((len(names), len(plans)))
    for place, ranks in enumerate(plans):
        ranks_MD[:, place] = [ranks.get(name, 0) for name in names]
    return names, ranks_MD


def drawn_part(names: list[str], ranks_MD: Series) -> tuple[list[str], Series]:
    """The first :data:`MOST_MATRICES`, dense ones only where compressed ones leave room.

    >>> names, ranks_MD = drawn_part([f"m{k}" for k in range(300)], np.arange(300)[:, None] // 299)
    >>> len(names), names[0], names[-1], ranks_MD.shape
    (200, 'm0', 'm299', (200, 1))
    """
    dense = ~ranks_MD.any(axis=1)
    kept = np.sort(np.argsort(dense, kind="stable")[:MOST_MATRICES])
    return [names[place] for place in kept], ranks_MD[kept]


def draw_heatmap(run: Run, width: float) -> Figure:
    """The figure, ``width`` inches wide and as tall as its labels need. Some rank must be > 0."""
    names, ranks_MD = drawn_part(*rank_table(run))
    rows, columns = ranks_MD.shape
    font = 8.5 if rows <= 60 else 7.0
    row_inches = 0.24 if rows <= 20 else 0.19 if rows <= 60 else 0.145
    figure = Figure(figsize=(width, max(2.4, rows * row_inches + 1.4)), layout="constrained")
    FigureCanvasAgg(figure)
    strip, axis = figure.subplots(
        2, 1, sharex=True, height_ratios=[0.16, rows * row_inches], gridspec_kw={"hspace": 0.0}
    )
    for each in (strip, axis):
        each.grid(False)
    used = _draw_phases(strip, run)
    axis.add_patch(
        Rectangle(
            (0, 0), 1, 1, transform=axis.transAxes, zorder=0,
            facecolor="#ececec", edgecolor="#bdbdbd", hatch="////", linewidth=0,
        )
    )  # fmt: skip
    highest, lowest = ranks_MD.max(), ranks_MD[ranks_MD > 0].min()
    norm = Normalize(lowest if lowest < highest else 0, highest)
    mesh = axis.pcolormesh(
        np.ma.masked_equal(ranks_MD, 0), cmap="viridis_r", norm=norm, zorder=1, rasterized=True
    )
    axis.set_yticks(np.arange(rows) + 0.5, parameter_labels(names, run.shapes))
    for label in axis.get_yticklabels():
        label.set_parse_math(False)
    axis.tick_params(axis="y", labelsize=font, length=0)
    axis.invert_yaxis()
    # The first label of every stride: the last one would crowd its neighbour.
    shown = np.arange(0, columns, -(-columns // _MOST_STEP_LABELS))
    axis.set_xticks(shown + 0.5, [f"{int(run.decisions[place]['step']):,}" for place in shown])
    axis.set_xlabel("step of the decision")
    # A tall map is read from its top, a screen away from the lower axis.
    axis.tick_params(axis="x", top=rows > 60, labeltop=rows > 60)
    if columns <= 30 and rows * columns <= _MOST_CELL_NUMBERS:
        _write_numbers(axis, ranks_MD, norm)
    bar = figure.colorbar(
        mesh, ax=axis, label="rank", anchor=(0, 1), shrink=min(1.0, 5 / (rows * row_inches))
    )
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    handles = [Patch(facecolor="#ececec", edgecolor="#9a9a9a", hatch="////"), *used.values()]
    labels = ["averaged dense", *used]
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _draw_phases(strip: Axes, run: Run) -> dict[str, Patch]:
    used: dict[str, Patch] = {}
    for place, row in enumerate(run.decisions):
        phase = str(row.get("phase"))
        colour = phase_colour(phase)
        patch = Patch(facecolor=colour, alpha=2 * BAND_ALPHA, edgecolor="#555555")
        used.setdefault(phase_label(phase), patch)
        strip.axvspan(place, place + 1, facecolor=colour, alpha=2 * BAND_ALPHA, linewidth=0)
    strip.set_axis_off()
    return used


def _write_numbers(axis: Axes, ranks_MD: Series, norm: Normalize) -> None:
    colours = colormaps["viridis_r"]
    for (row, column), rank in np.ndenumerate(ranks_MD):
        if rank > 0:
            red, green, blue = to_rgb(colours(norm(rank)))
            dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.45
            axis.text(
                column + 0.5, row + 0.5, f"{rank:g}", ha="center", va="center", fontsize=7.5,
                color="white" if dark else "black",
            )  # fmt: skip
