"""Several runs on one page: curves over each other, numbers side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from edgc_ddp.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SKY,
    STYLE,
    VERMILLION,
    Picture,
    byte_unit,
    label_steps,
    legend_below,
    new_figure,
    smooth,
    smoothing_width,
    to_png,
)
from edgc_ddp.report.load import Run, number
from edgc_ddp.report.page import document, figure, note, save, wide_table
from edgc_ddp.report.words import UNKNOWN, flat, key_figures, sentence

_COLOURS = (BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY)
_DASHES = ("-", (0, (5, 3)), (0, (2, 2)), "-.", (0, (7, 3, 1, 3, 1, 3)))
_MARKERS = ("o", "s", "D", "^", "v", "P")
_Curve = tuple[Any, Any]


def labels(runs: Sequence[Run]) -> list[str]:
    """Controller and folder of each run, with as many parents as tell them apart.

    >>> runs = [Run(Path("a/0")), Run(Path("b/0")), Run(Path("c"), summary={"controller": "dense"})]
    >>> labels(runs)
    ['run: a/0', 'run: b/0', 'dense: c']
    """
    names = [_label(run, 1) for run in runs]
    deepest = max(len(run.folder.resolve().parts) for run in runs)
    for depth in range(2, deepest):
        doubled = [name for name in names if names.count(name) > 1]
        names = [
            _label(run, depth) if name in doubled else name
            for run, name in zip(runs, names, strict=True)
        ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:place].count(name) + 1})"
        for place, name in enumerate(names)
    ]


def _label(run: Run, depth: int) -> str:
    folder = "/".join(run.folder.resolve().parts[-depth:])
    controller = run.controller or "run"
    return folder if folder == controller else f"{controller}: {folder}"


def comparison_pictures(runs: Sequence[Run]) -> tuple[list[Picture], list[str]]:
    """The pictures that these runs' numbers allow, and one sentence for each that they do not."""
    results: list[Picture | str] = []
    with matplotlib.rc_context(STYLE):
        for draw in (_loss, _loss_by_bytes, _rank, _bytes):
            results.append(draw(runs))
    drawn = [result for result in results if isinstance(result, Picture)]
    return drawn, [result for result in results if isinstance(result, str)]


def render_comparison(
    runs: Sequence[Run], drawn: Sequence[Picture], missing: Sequence[str] = ()
) -> str:
    """The page that lays these runs over each other."""
    names = labels(runs)
    body = ["<h1>Comparison of runs</h1>", "<ul>"]
    body += [
        f"<li><strong>{escape(name)}</strong>: {escape(sentence(run))}</li>"
        for name, run in zip(names, runs, strict=True)
    ]
    body.append("</ul>")
    body += [
        note(f"{name}: {text}") for name, run in zip(names, runs, strict=True) for text in run.notes
    ]
    figures = [key_figures(run) for run in runs]
    body += ["<h2>Results</h2>", _side_by_side(names, figures, only_different=False)]
    body += map(figure, drawn)
    body += [f'<p class="soft">{escape(text)}</p>' for text in missing]
    body += [
        "<h2>Settings that differ</h2>",
        _side_by_side(names, [flat(run.config or {}) for run in runs], only_different=True),
    ]
    return document("Comparison of EDGC runs", body)


def write_comparison(runs: Sequence[Run], out: Path | str = "compare") -> Path:
    """Write ``index.html`` and its pictures into ``out``; return the page's path.

    Raises OSError when the folder cannot be written.
    """
    drawn, missing = comparison_pictures(runs)
    return save(Path(out), render_comparison(runs, drawn, missing), drawn)


def _side_by_side(
    names: Sequence[str], columns: Sequence[dict[str, str]], *, only_different: bool
) -> str:
    keys = list(dict.fromkeys(key for column in columns for key in column if key))
    rows = [[key, *(column.get(key, UNKNOWN) for column in columns)] for key in keys]
    if only_different:
        rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return '<p class="soft">None.</p>'
    cells = [
        [f'<th scope="row">{escape(row[0])}</th>', *(f"<td>{escape(t)}</td>" for t in row[1:])]
        for row in rows
    ]
    return wide_table(["", *names], cells, "runs side by side")


def _look(place: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        # Runs may lie on each other for long: a dashed line lets the one below show.
        "linestyle": _DASHES[place % len(_DASHES)],
        "linewidth": 1.8,
    }


def _smoothed(run: Run) -> _Curve:
    steps, losses = run.series("loss")
    return steps, smooth(losses, smoothing_width(losses.size))


def _evaluated(run: Run) -> _Curve:
    steps = np.array([number(row["step"]) for row in run.evals])
    return steps, np.array([number(row.get("val_loss")) for row in run.evals])


def _finish(figure: Figure, axes: Sequence[Axes]) -> bytes:
    handles, names = axes[0].get_legend_handles_labels()
    legend_below(figure, handles, names, columns=2 if max(map(len, names)) > 24 else 4)
    return to_png(figure)


def _label_all_steps(axis: Axes, runs: Sequence[Run]) -> None:
    label_steps(axis, min(run.first_step for run in runs), max(run.last_step for run in runs))


def _sender(runs: Sequence[Run]) -> str:
    """Whose bytes all of these runs count: where stages share a model, a rank's are not comparable."""
    return "rank" if all(run.stages == 1 for run in runs) else "replica"


def _known(curve: _Curve) -> bool:
    return bool(np.isfinite(curve[1]).any())


def _loss(runs: Sequence[Run]) -> Picture | str:
    curves = [(_smoothed(run), _evaluated(run)) for run in runs]
    if not any(_known(curve) for pair in curves for curve in pair):
        return "No loss was recorded."
    drawing, (above, below) = new_figure(2, height=6.6)
    for place, ((trained, evaluated), name) in enumerate(zip(curves, labels(runs), strict=True)):
        marker = _MARKERS[place % len(_MARKERS)]
        above.plot(*trained, label=name, **_look(place))
        below.plot(*evaluated, marker=marker, markersize=5, clip_on=False, **_look(place))
    above.set_ylabel("training loss, smoothed\n(nats per byte)")
    below.set_ylabel("validation loss\n(nats per byte)")
    _label_all_steps(below, runs)
    told = "Training loss, smoothed over a fiftieth of the run, and loss on the held-out text."
    return Picture("loss", "Loss", told, _finish(drawing, [above]))


def _loss_by_bytes(runs: Sequence[Run]) -> Picture | str:
    curves = []
    most = 0.0
    for run in runs:
        steps, losses = _smoothed(run)
        sent = run.series("wire_bytes")[1]
        finite = np.isfinite(sent) & (sent > 0)
        at, values = _evaluated(run)
        inside = np.isfinite(values) & (at >= (steps[finite][0] if finite.any() else math.inf))
        points = np.interp(at[inside], steps[finite], sent[finite]) if inside.any() else at[:0]
        curves.append((sent[finite], losses[finite], points, values[inside]))
        most = max(most, float(sent[finite].max(initial=0.0)))
    if most == 0.0:
        return "No run recorded its bytes: there is no loss against bytes."
    unit, name = byte_unit(most)
    drawing, (axis,) = new_figure(height=4.4)
    for place, (curve, label) in enumerate(zip(curves, labels(runs), strict=True)):
        sent, losses, points, values = curve
        look = _look(place)
        axis.plot(sent / unit, losses, label=label, **look)
        axis.plot(
            points / unit,
            values,
            linestyle="none",
            marker=_MARKERS[place % len(_MARKERS)],
            color=look["color"],
            markeredgecolor="black",
            markersize=6,
            zorder=3,
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_xlabel(f"bytes sent per {_sender(runs)} so far ({name}, logarithmic)")
    axis.set_ylabel("loss (nats per byte)")
    told = (
        "What each byte on the wire bought: lower and further left is better. Lines are the "
        "smoothed training loss, markers the validation loss."
    )
    return Picture("loss_by_bytes", "Loss against bytes sent", told, _finish(drawing, [axis]))


def _rank(runs: Sequence[Run]) -> Picture | str:
    curves = []
    for run in runs:
        steps, ranks = run.series("mean_rank")
        curves.append((steps, np.where(ranks > 0, ranks, np.nan)))
    if not any(map(_known, curves)):
        return "No run compressed anything: there are no ranks to compare."
    drawing, (axis,) = new_figure()
    for place, (curve, name) in enumerate(zip(curves, labels(runs), strict=True)):
        # A dense run draws nothing here, but stays in the legend: the colours are the page's.
        axis.plot(*curve, drawstyle="steps-post", label=name, **_look(place))
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axis.set_ylabel("mean rank")
    _label_all_steps(axis, runs)
    told = "Mean rank of the compressed matrices; a gap means all dense."
    return Picture("rank", "Rank", told, _finish(drawing, [axis]))


def _bytes(runs: Sequence[Run]) -> Picture | str:
    sent = [run.series("wire_bytes") for run in runs]
    dense = [run.series("dense_bytes") for run in runs]
    if not any(map(_known, sent)):
        return "No run recorded its bytes."
    most = max(float(np.nanmax(values)) for _, values in sent + dense if np.isfinite(values).any())
    unit, name = byte_unit(most)
    drawing, (axis,) = new_figure()
    # One reference line: the longest, since runs that are worth comparing share it.
    steps, values = max(dense, key=lambda curve: float(np.nan_to_num(curve[1]).max(initial=0.0)))
    axis.plot(
        steps, values / unit, color=BLACK, linewidth=1, linestyle=":", label="plain DDP", zorder=3
    )
    for place, ((steps, values), label) in enumerate(zip(sent, labels(runs), strict=True)):
        axis.plot(steps, values / unit, label=label, **_look(place))
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    who = _sender(runs)
    axis.set_ylabel(f"bytes sent per {who} so far ({name})")
    _label_all_steps(axis, runs)
    told = f"Bytes that one {who} sent, with what plain DDP sends for the largest of these runs."
    if who == "replica":
        told += " A replica is one rank, or all stages of a pipeline together."
    return Picture("bytes", "Bytes on the wire", told, _finish(drawing, [axis]))
