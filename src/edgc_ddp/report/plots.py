"""The pictures of one run, as PNG bytes. Nothing here keeps global plotting state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from edgc_ddp.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    MOST_STAGES,
    STYLE,
    VERMILLION,
    WIDTH,
    Picture,
    byte_unit,
    label_steps,
    legend_below,
    new_figure,
    quotient,
    smooth,
    smoothing_width,
    thin,
    to_png,
)
from edgc_ddp.report.heatmap import MOST_MATRICES, draw_heatmap, rank_table
from edgc_ddp.report.load import Run, Series, compressed_ranks, mean_rank, number
from edgc_ddp.report.phases import BAND_ALPHA, phase_colour, phase_label
from edgc_ddp.report.stages import draw_stages

_LEAST_SHARE = 0.003


def pictures(run: Run) -> tuple[list[Picture], list[str]]:
    """All pictures that the run's numbers allow, and one sentence for each that they do not."""
    drawn: list[Picture] = []
    missing: list[str] = []
    with matplotlib.rc_context(STYLE):
        for draw in (_loss, _entropy, _rank, _heat, _bytes, _residual, _span):
            result = draw(run)
            if isinstance(result, Picture):
                drawn.append(result)
            else:
                missing.append(result)
        for stage in range(1, min(run.stages, MOST_STAGES)):
            result = _heat(run.of_stage(stage))
            if isinstance(result, Picture):
                drawn.append(
                    replace(
                        result, name=f"ranks-stage{stage}", title=f"{result.title}, stage {stage}"
                    )
                )
            else:
                missing.append(f"Stage {stage}: {result}")
        if run.stages > MOST_STAGES:
            missing.append(f"Maps of ranks by parameter: only of the first {MOST_STAGES} stages.")
        # A run without a pipeline misses nothing.
        if (stages := draw_stages(run)) is not None:
            drawn.append(stages)
    return (drawn if run.stages == 1 else list(map(_of_stages, drawn))), missing


_FIRST_STAGE = ("entropy", "ranks", "residual", "span")
_SHADED = ("loss", "entropy", "rank", "bytes", "residual", "span")


def _of_stages(picture: Picture) -> Picture:
    """A pipeline's picture with the stage that it is of in its title."""
    title = f"{picture.title}, stage 0" if picture.name in _FIRST_STAGE else picture.title
    told = picture.told + (" Shaded: the phases of stage 0." if picture.name in _SHADED else "")
    return replace(picture, title=title, told=told)


def window_edges(run: Run) -> Series:
    """Steps of the decisions and the run's last step: n + 1 edges of n windows."""
    steps = [number(row["step"]) for row in run.decisions]
    return np.array([*steps, max(run.last_step, steps[-1] + 1)] if steps else [], dtype=np.float64)


def window_savings(run: Run) -> Series:
    """Dense bytes over bytes sent in each decision's window, nan in trials and where unknown.

    Trials of a few steps at rank 2 are left out: they would set the scale and tell nothing.
    """
    # Row k counts the bytes up to and with iteration k, and a decision rules from its own step on.
    at = np.append(window_edges(run)[:-1] - 1, run.last_step)
    dense, sent = (
        np.diff(np.interp(at, *run.series(key), left=0.0)) for key in ("dense_bytes", "wire_bytes")
    )
    trial = np.array([row.get("phase") == "calibration" for row in run.decisions], dtype=bool)
    savings: Series = np.where(trial, np.nan, quotient(dense, sent))
    return savings


def _finish(figure: Figure, axes: Sequence[Axes], run: Run) -> bytes:
    handles, labels = [], []
    for axis in axes:
        more, names = axis.get_legend_handles_labels()
        handles += more
        labels += names
        for span in run.phases:
            axis.axvspan(
                span.first,
                span.last,
                facecolor=phase_colour(span.phase),
                alpha=BAND_ALPHA,
                linewidth=0,
                zorder=0,
            )
    lengths: dict[str, float] = {}
    for span in run.phases:
        lengths[span.phase] = lengths.get(span.phase, 0.0) + span.last - span.first
    for phase, length in lengths.items():
        # The first two dense iterations of a long run are thinner than a pixel: no legend for them.
        if length < _LEAST_SHARE * (run.last_step - run.first_step):
            continue
        handles.append(Patch(facecolor=phase_colour(phase), alpha=BAND_ALPHA, edgecolor="#555555"))
        labels.append(phase_label(phase))
    label_steps(axes[-1], run.first_step, run.last_step)
    if labels:
        legend_below(figure, handles, labels)
    return to_png(figure)


def _loss(run: Run) -> Picture | str:
    steps, losses = run.series("loss")
    points = [(number(row["step"]), number(row.get("val_loss"))) for row in run.evals]
    points = [point for point in points if math.isfinite(point[1])]
    if not np.isfinite(losses).any() and not points:
        return "The loss was not recorded."
    figure, (axis,) = new_figure()
    if np.isfinite(losses).any():
        width = smoothing_width(losses.size)
        axis.plot(*thin(steps, losses), color=BLUE, alpha=0.35, linewidth=0.7, label="training")
        mean = smooth(losses, width)
        axis.plot(steps, mean, color=BLUE, linewidth=1.8, label=f"training, mean of {width} steps")
    if points:
        axis.plot(
            *zip(*points, strict=True),
            color=VERMILLION,
            marker="D",
            markersize=5,
            linewidth=1.2,
            markeredgecolor="white",
            label="validation",
            clip_on=False,
            zorder=3,
        )
    axis.set_ylabel("loss (nats per byte)")
    told = "Cross-entropy of the training batches and of the held-out text."
    return Picture("loss", "Loss", told, _finish(figure, [axis], run))


def _measured(run: Run, key: str, label: str, unit: float = 1.0) -> tuple[Figure, Axes] | None:
    """The last window's mean of one number, with a dot where a decision was taken on it."""
    steps, values = run.series(key)
    at = np.array([number(row["step"]) for row in run.decisions])
    decided = np.array([number(row.get(key)) for row in run.decisions])
    if not np.isfinite(values).any() and not np.isfinite(decided).any():
        return None
    figure, (axis,) = new_figure()
    if np.isfinite(values).any():
        axis.plot(
            steps,
            values * unit,
            color=BLUE,
            linewidth=1.8,
            drawstyle="steps-post",
            label="last window",
        )
    if np.isfinite(decided).any():
        axis.plot(
            at,
            decided * unit,
            color=VERMILLION,
            linestyle="none",
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label="decision",
            clip_on=False,
            zorder=3,
        )
    axis.set_ylabel(label)
    return figure, axis


def _entropy(run: Run) -> Picture | str:
    drawn = _measured(run, "entropy", "gradient entropy (nats)")
    if drawn is None:
        return "The gradient entropy was not measured."
    told = "Mean entropy of the sampled gradient in each window, and the decisions taken on it."
    return Picture("entropy", "Gradient entropy", told, _finish(drawn[0], [drawn[1]], run))


def _residual(run: Run) -> Picture | str:
    drawn = _measured(run, "residual", "energy left behind (%)", unit=100.0)
    if drawn is None:
        return "The residual energy was not measured."
    drawn[1].set_ylim(bottom=0)
    told = (
        "Energy that one compressed average leaves for later, as a share of the energy of gradient "
        "plus residual: 0 % is an exact average."
    )
    return Picture("residual", "Residual energy", told, _finish(drawn[0], [drawn[1]], run))


def _span(run: Run) -> Picture | str:
    drawn = _measured(run, "span_seconds", "time of one average (ms)", unit=1e3)
    if drawn is None:
        return "The time of an average was not measured."
    drawn[1].set_ylim(bottom=0)
    told = "Median time from a step's first gradient bucket to its last average, in each window."
    return Picture("span", "Averaging time", told, _finish(drawn[0], [drawn[1]], run))


def _rank(run: Run) -> Picture | str:
    steps, means = run.series("mean_rank")
    edges = window_edges(run)
    # Decisions are one stage's; the steps' mean is of all stages.
    rows = run.decisions if run.stages == 1 else ()
    lists = [compressed_ranks(row) for row in rows]
    windows = np.array([mean_rank(row) or math.nan for row in rows])
    means = np.where(means > 0, means, np.nan)
    if not np.isfinite(windows).any() and not np.isfinite(means).any():
        return "Every matrix was averaged dense: there are no ranks to show."
    figure, (axis,) = new_figure()
    if np.isfinite(windows).any():
        low = np.array([min(ranks, default=math.nan) for ranks in lists])
        high = np.array([max(ranks, default=math.nan) for ranks in lists])
        if np.nanmax(high - low) > 0:
            axis.fill_between(
                edges,
                np.append(low, low[-1]),
                np.append(high, high[-1]),
                step="post",
                color=BLUE,
                alpha=0.25,
                linewidth=0,
                label="least to most of the matrices",
            )
        axis.stairs(windows, edges, baseline=None, color=BLUE, linewidth=2, label="mean rank")
        axis.plot(
            edges[:-1],
            windows,
            "o",
            color=BLUE,
            markersize=4,
            markeredgecolor="white",
            clip_on=False,
        )
    else:
        label = "mean rank" if run.stages == 1 else "mean rank of all stages"
        axis.plot(steps, means, color=BLUE, linewidth=2, drawstyle="steps-post", label=label)
    axis.set_ylim(0, 1.12 * axis.dataLim.y1)
    bounds = {name: number(run.setting(f"controller.{name}")) for name in ("r_max", "r_min")}
    for name, bound in bounds.items():
        if math.isfinite(bound):
            axis.axhline(bound, color=BLACK, linewidth=1, linestyle="--", zorder=1.5)
            axis.set_ylim(0, max(axis.get_ylim()[1], 1.12 * bound))
            axis.annotate(
                f"{name} {bound:g}",
                (1.005, bound),
                xycoords=("axes fraction", "data"),
                va="bottom" if name == "r_max" else "top",
                fontsize=9,
            )
    axis.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axis.set_ylabel("rank")
    told = "Rank in force in each window, over the compressed matrices; a gap means all dense."
    return Picture("rank", "Rank", told, _finish(figure, [axis], run))


def _heat(run: Run) -> Picture | str:
    if not any(compressed_ranks(row) for row in run.decisions):
        return "No decision compressed a matrix: there is no map of ranks by parameter."
    figure = draw_heatmap(run, WIDTH)
    told = (
        "Rank of every matrix after each decision. Columns are decisions, so they are not "
        "to scale in time; the strip on top is the phase. Hatched: averaged dense."
    )
    if (of := len(rank_table(run)[0])) > MOST_MATRICES:
        told += (
            f" Drawn are {MOST_MATRICES} of {of:,} matrices, dense ones only where compressed ones "
            "left room."
        )
    return Picture("ranks", "Rank by parameter", told, to_png(figure))


def _bytes(run: Run) -> Picture | str:
    steps, sent = run.series("wire_bytes")
    dense = run.series("dense_bytes")[1]
    if not (np.isfinite(sent).any() and np.isfinite(dense).any()):
        return "The bytes sent were not recorded."
    unit, name = byte_unit(float(np.nanmax(np.fmax(sent, dense))))
    figure, (axis, below) = new_figure(2, height=5.2, height_ratios=[3, 2])
    axis.plot(
        steps,
        dense / unit,
        color=BLACK,
        linestyle="--",
        linewidth=1.6,
        label="dense (plain DDP)",
        zorder=3,
    )
    axis.plot(steps, sent / unit, color=BLUE, linewidth=2, label="sent")
    axis.set_ylim(bottom=0)
    axis.set_ylabel(f"bytes sent so far ({name})")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ratio = quotient(dense, sent)
    below.plot(steps, ratio, color=VERMILLION, linewidth=2, label="dense / sent, so far")
    known = ratio[np.isfinite(ratio)]
    if known.size:
        below.annotate(
            f"{known[-1]:.3g} ×",
            (1.005, known[-1]),
            xycoords=("axes fraction", "data"),
            va="center",
            color=VERMILLION,
        )
    edges = window_edges(run)
    if edges.size > 2:
        below.stairs(
            window_savings(run),
            edges,
            baseline=None,
            color=GREEN,
            linewidth=1.4,
            label="dense / sent, window",
        )
    below.set_ylim(bottom=0)
    below.set_ylabel("times fewer bytes")
    who = "one rank" if run.stages == 1 else "one replica, all its stages together,"
    told = f"Bytes that {who} sent, and what plain DDP would have sent for the same gradients."
    return Picture("bytes", "Bytes on the wire", told, _finish(figure, [axis, below], run))
