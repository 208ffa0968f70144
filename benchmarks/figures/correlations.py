"""Figure 3: how a gradient's rows and columns correlate, and one iteration's gradient with the next."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.figures.gradients import Run, noise_like, series

TITLE = "Figure 3: correlation of gradient matrices"
CAPTION = "Gradient matrix correlation of GPT2"
CHOSEN = (
    " What is correlated here is our choice, what the method needs: its error law takes the entries of a "
    "matrix for independent, and a warm start of its factors gains where successive gradients are alike."
)
RUN = Run(snapshots=(9, 10, 99, 100, 299, 300, 598, 599))
"""The run of the other figures, with neighbouring iterations kept."""

_NEAR = 1.1
"""Coefficients that are larger than independent entries' by no more are called independent."""
_SHOWN = ("tokens.weight", "blocks.1.attention.qkv.weight", "blocks.1.up.weight")


class Spread(NamedTuple):
    """The correlation coefficients of all pairs of lines, against those of independent entries."""

    pairs: int
    length: int
    """Entries in a line."""
    mean: float
    rms: float
    times: float
    """``rms`` over ``1 / sqrt(length - 1)``, what independent normal entries have."""
    beyond: float
    """Share of coefficients beyond three times what independent entries have."""


def coefficients(grad_MN: Tensor) -> Tensor:
    """Pearson's coefficients of all pairs of rows, each pair once (M (M - 1) / 2). Rows that are
    constant have none.

    >>> rows_MN = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 9.0], [0.0, 0.0, -3.0]])
    >>> [round(value, 4) for value in coefficients(rows_MN).tolist()]
    [1.0, -0.866, -0.866]
    """
    varied = grad_MN.double()[grad_MN.amax(1) > grad_MN.amin(1)]
    above_MM = torch.ones(len(varied), len(varied), dtype=torch.bool).triu(1)
    return torch.corrcoef(varied)[above_MM]


def spread(grad_MN: Tensor) -> Spread:
    """Of the rows; of the columns when given the transpose."""
    found = coefficients(grad_MN)
    length = grad_MN.shape[1]
    alone = 1 / math.sqrt(length - 1)
    rms = float(found.square().mean().sqrt())
    beyond = float((found.abs() > 3 * alone).double().mean())
    return Spread(len(found), length, float(found.mean()), rms, rms / alone, beyond)


def cosine(a_MN: Tensor, b_MN: Tensor) -> float:
    """Of two matrices as vectors; independent entries give 0, give or take ``1 / sqrt(M N)``.

    >>> round(cosine(torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, -3.0]])), 4)
    -0.4472
    """
    a, b = a_MN.double().flatten(), b_MN.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def cosines(snapshots: dict[int, dict[str, Tensor]]) -> dict[int, dict[str, float]]:
    """Iteration -> matrix -> cosine with the iteration before, where that was kept too."""
    return {
        step: {name: cosine(grad_MN, snapshots[step - 1][name]) for name, grad_MN in named.items()}
        for step, named in snapshots.items()
        if step - 1 in snapshots
    }


def make(folder: Path) -> list[str]:
    snapshots = series(RUN)["snapshots"]
    alike = cosines(snapshots)
    later = {step: snapshots[step] for step in alike}
    first = next(iter(later.values()))
    noise = noise_like(first)
    looked: dict[Any, dict[str, Tensor]] = {**later, "noise": noise}
    sides = {
        step: {name: (spread(grad_MN), spread(grad_MN.t())) for name, grad_MN in gradients.items()}
        for step, gradients in looked.items()
    }
    write_csv(
        folder / "correlation.csv",
        ["iteration", "matrix", "lines", *Spread._fields],
        [
            [step, name, side, *found]
            for step, named in sides.items()
            for name, both in named.items()
            for side, found in zip(("rows", "columns"), both, strict=True)
        ],
    )
    write_csv(
        folder / "cosine.csv",
        ["iteration", "matrix", "cosine with the iteration before", "independent, +-"],
        [
            [step, name, value, 1 / math.sqrt(first[name].numel())]
            for step, named in alike.items()
            for name, value in named.items()
        ],
    )
    _draw_lines(later, noise, folder / "correlation.png")
    _draw_cosines(alike, folder / "cosine.png")
    return [
        *_lines_told(sides),
        "",
        *_cosines_told(alike, {name: grad.numel() for name, grad in first.items()}),
    ]


def _draw_lines(later: dict[int, dict[str, Tensor]], noise: dict[str, Tensor], path: Path) -> None:
    """Heat maps over the shorter side of some matrices in the last iteration."""
    step = max(later)
    maps = {f"{name}\niteration {step}": later[step][name] for name in _SHOWN}
    maps[f"independent entries\nin the shape of {_SHOWN[-1]}"] = noise[_SHOWN[-1]]
    figure, panels = canvas(len(maps), width=3.7, height=4.6)
    for axes, (title, grad_MN) in zip(panels, maps.items(), strict=True):
        short = grad_MN if grad_MN.shape[0] <= grad_MN.shape[1] else grad_MN.t()
        image = axes.imshow(
            torch.corrcoef(short.double()).numpy(),
            cmap="RdBu_r",
            vmin=-1,
            vmax=1,
            interpolation="nearest",
        )
        lines = "rows" if short is grad_MN else "columns"
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(f"{lines}, of {short.shape[1]} entries each", fontsize=8)
    figure.colorbar(image, ax=panels, label="correlation", shrink=0.8)
    figure.savefig(path, dpi=110)


def _draw_cosines(alike: dict[int, dict[str, float]], path: Path) -> None:
    names = list(next(iter(alike.values())))
    values = torch.tensor([[alike[step][name] for step in alike] for name in names])
    figure, (axes,) = canvas(1, width=6.5, height=0.8 + 0.34 * len(names))
    image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    for row, column in torch.cartesian_prod(*map(torch.arange, values.shape)).tolist():
        value = float(values[row, column])
        colour = "white" if abs(value) > 0.6 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_yticks(range(len(names)), [n.removesuffix(".weight") for n in names], fontsize=8)
    axes.set_xticks(range(len(alike)), [f"{step - 1}, {step}" for step in alike])
    axes.set_xlabel("iterations")
    figure.colorbar(image, ax=axes, label="cosine of the two gradients")
    figure.savefig(path, dpi=110)


def _lines_told(sides: dict[int | str, dict[str, tuple[Spread, Spread]]]) -> list[str]:
    rows = []
    for step, named in sides.items():
        row: list[object] = [step]
        for side in (0, 1):
            times = [both[side].times for both in named.values()]
            row += [median(times), min(times), max(times)]
        rows.append([*row, median(spread.beyond for both in named.values() for spread in both)])
    head = ["iteration", "rows, median", "least", "most", "columns, median", "least", "most"]
    real = [
        spread
        for step, named in sides.items()
        if step != "noise"
        for both in named.values()
        for spread in both
    ]
    apart = sum(spread.times <= _NEAR for spread in real)
    held = "holds" if apart == len(real) else "does not hold"
    return [
        "Root mean square of the correlation coefficients between a matrix's rows, and between its "
        "columns, as a multiple of 1 / sqrt(n - 1), which independent entries have (n: entries in a row or "
        "column); over the matrices. The last column is the share of coefficients beyond three times that, "
        "about .0027 for independent entries:",
        "",
        *markdown([*head, "beyond, median"], rows),
        "",
        f"That rows and columns do not correlate {held}: {apart} of {len(real)} have a root mean square "
        f"within {_NEAR - 1:.0%} of independent entries', the largest has "
        f"{max(spread.times for spread in real):.3g} times theirs. Lines that correlate need fewer "
        "directions than the Marchenko-Pastur law has; Figure 7 has what a rank leaves.",
    ]


def _cosines_told(alike: dict[int, dict[str, float]], sizes: dict[str, int]) -> list[str]:
    every = [(name, value) for named in alike.values() for name, value in named.items()]
    same = sum(value > 3 / math.sqrt(sizes[name]) for name, value in every)
    against = sum(value < -3 / math.sqrt(sizes[name]) for name, value in every)
    rows = [
        [f"{step - 1}, {step}", median(named.values()), min(named.values()), max(named.values())]
        for step, named in alike.items()
    ]
    return [
        "Cosine of a matrix's gradients in neighbouring iterations, each on a batch of its own, over the "
        "matrices:",
        "",
        *markdown(["iterations", "median", "least", "most"], rows),
        "",
        f"Of {len(every)}, {same} point the same way and {against} the opposite way by more than three "
        "times what independent entries would by chance.",
    ]
