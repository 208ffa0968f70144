"""Figure 2: how a gradient's entries are distributed, matrix by matrix, against the normal law."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.figures.gradients import Run, noise_like, series
from edgc_ddp.maths.entropy import gaussian, histogram

TITLE = "Figure 2: distribution of the gradient's entries by layer"
CAPTION = "Gradient distribution of GPT2-345M across different model layers at different iterations"
ASSUMED = " The method takes a matrix's entries for independent and normal, of mean zero."

_ERRORS = 5
"""So many standard errors from a normal sample's kurtosis, and entries are called not normal."""
_REACH, _BINS = 10.0, 80
"""Sigmas to either side that are drawn, and bins."""


class Shape(NamedTuple):
    """What a matrix's entries look like; all but ``sigma`` and ``mean`` are free of scale."""

    mean: float
    sigma: float
    off_zero: float
    """``|mean| / sigma``."""
    kurtosis: float
    """Excess: 0 of the normal law."""
    beyond: float
    """Share of the entries farther than three sigmas from the mean: .0027 of the normal law."""
    gap: float
    """Nats: the histogram's entropy less that of a normal law of the same sigma, 0 at most but for
    the estimate's own error."""

    def is_normal(self, count: int) -> bool:
        """Whether so many normal entries may have this kurtosis: its standard error is sqrt(24 / count)."""
        return abs(self.kurtosis) <= _ERRORS * math.sqrt(24 / count)


def shape_of(grad_MN: Tensor) -> Shape:
    """Of all entries.

    >>> shape = shape_of(torch.tensor([[1.0, -1.0], [1.0, -1.0]]))
    >>> shape.mean, shape.sigma, shape.kurtosis, shape.beyond
    (0.0, 1.0, -2.0, 0.0)
    """
    entries = grad_MN.double()
    mean, sigma = float(entries.mean()), float(entries.std(correction=0))
    z_MN = (entries - mean) / sigma
    return Shape(
        mean,
        sigma,
        abs(mean) / sigma,
        float(z_MN.pow(4).mean()) - 3,
        float((z_MN.abs() > 3).double().mean()),
        float(histogram(grad_MN, 1.0, 0) - gaussian(grad_MN, 1.0, 0)),
    )


def density(grad_MN: Tensor) -> tuple[Tensor, Tensor]:
    """Middles of the bins, in sigmas from the mean, and the density there; nan in empty bins."""
    z = (grad_MN.double() - grad_MN.double().mean()) / grad_MN.double().std(correction=0)
    width = 2 * _REACH / _BINS
    counts_B = torch.histc(z, _BINS, -_REACH, _REACH)
    middles_B = -_REACH + width * (torch.arange(_BINS) + 0.5)
    return middles_B, torch.where(counts_B > 0, counts_B / (z.numel() * width), math.nan)


def make(folder: Path) -> list[str]:
    snapshots = series(Run())["snapshots"]
    first = next(iter(snapshots.values()))
    noise = noise_like(first)
    shapes = {
        step: {name: shape_of(grad_MN) for name, grad_MN in gradients.items()}
        for step, gradients in {**snapshots, "noise": noise}.items()
    }
    write_csv(
        folder / "distribution.csv",
        ["iteration", "matrix", "rows", "cols", *Shape._fields],
        [
            [step, name, *first[name].shape, *shape]
            for step, named in shapes.items()
            for name, shape in named.items()
        ],
    )
    _draw(snapshots, folder / "distribution.png")
    return [*_table(shapes), "", *_verdict(shapes, {n: g.numel() for n, g in first.items()})]


def _draw(snapshots: dict[int, dict[str, Tensor]], path: Path) -> None:
    steps = list(snapshots)
    shown = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
    figure, (*panels, last) = canvas(len(shown) + 1, width=4.6, height=4.2)
    middles_B = torch.linspace(-_REACH, _REACH, 200)
    normal_B = (-middles_B.square() / 2).exp() / math.sqrt(2 * math.pi)
    for axes, step in zip(panels, shown, strict=True):
        for name, grad_MN in snapshots[step].items():
            axes.plot(*density(grad_MN), lw=0.9, label=name.removesuffix(".weight"))
        axes.plot(middles_B, normal_B, "k--", lw=1.4, label="normal law")
        axes.set_yscale("log")
        axes.set_ylim(3e-5, 3)
        axes.set_title(f"iteration {step}", fontsize=9)
        axes.set_xlabel("entry, in sigmas from the mean")
    panels[0].set_ylabel("density")
    for name in snapshots[steps[0]]:
        sigmas = [float(snapshots[step][name].double().std(correction=0)) for step in steps]
        last.plot(steps, sigmas, marker="o", ms=3, lw=0.9, label=name.removesuffix(".weight"))
    last.set_yscale("log")
    last.set_title("spread", fontsize=9)
    last.set_xlabel("iteration")
    last.set_ylabel("sigma")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=6, fontsize=7)
    figure.savefig(path, dpi=110)


def _table(shapes: dict[int | str, dict[str, Shape]]) -> list[str]:
    rows = []
    for step, named in shapes.items():
        sigmas = [shape.sigma for shape in named.values()]
        rows.append(
            [
                step,
                max(shape.off_zero for shape in named.values()),
                max(sigmas) / min(sigmas),
                median(shape.kurtosis for shape in named.values()),
                max(shape.kurtosis for shape in named.values()),
                median(shape.beyond for shape in named.values()),
                median(shape.gap for shape in named.values()),
                min(shape.gap for shape in named.values()),
            ]
        )
    head = [
        "iteration", "largest mean / sigma", "largest sigma / smallest", "excess kurtosis, median",
        "largest", "beyond 3 sigma, median", "entropy gap, median", "widest",
    ]  # fmt: skip
    told = (
        "Over the matrices; noise is normal entries in the same shapes. The entropy gap, in nats, is the "
        "histogram's entropy less the closed form for normal entries of the same sigma:"
    )
    return [told, "", *markdown(head, rows)]


def _verdict(shapes: dict[int | str, dict[str, Shape]], sizes: dict[str, int]) -> list[str]:
    real = {step: named for step, named in shapes.items() if step != "noise"}
    every = [(name, shape) for named in real.values() for name, shape in named.items()]
    off_zero = max(shape.off_zero for _, shape in every)
    # A mean counts against the variance by its square.
    centred = "zero for every purpose" if off_zero**2 < 0.01 else "not zero everywhere"
    normal = sum(shape.is_normal(sizes[name]) for name, shape in every)
    heavy = sum(shape.kurtosis > 0 and not shape.is_normal(sizes[name]) for name, shape in every)
    held = "holds" if normal == len(every) else "does not hold"
    drifts, moves = [], []
    for name in sizes:
        gaps = [named[name].gap for named in real.values()]
        entropies = [math.log(named[name].sigma) for named in real.values()]
        drifts.append(max(gaps) - min(gaps))
        moves.append(max(entropies) - min(entropies))
    return [
        f"Mean: {centred}, {off_zero:.2g} sigma at most. That entries are normal {held}: {normal} of "
        f"{len(every)} gradients are within {_ERRORS} standard errors of a normal sample's kurtosis, and "
        f"{heavy} have heavier tails than that.",
        "",
        "The method uses changes of entropy only, so a gap that stays does no harm. Over these iterations "
        f"a matrix's gap moves by {median(drifts):.2g} nats (median; {max(drifts):.2g} at most) while "
        f"its ln(sigma) moves by {median(moves):.2g} (median; {max(moves):.2g} at most). The closed form "
        "reads sigma alone and has nothing of the former; an entropy from a histogram has.",
    ]
