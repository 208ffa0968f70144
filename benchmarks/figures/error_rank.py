"""Figure 7: the error of a low-rank approximation against its rank, law and measurement."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.figures.gradients import Run, series
from edgc_ddp.maths.marchenko_pastur import residual_share

TITLE = "Figure 7: error against rank, law and measurement"
PAPER = (
    "Of the paper's figure only the caption was at hand, \"Changes in compression error vs. rank "
    'values", so there are no numbers to compare with.'
)
RANKS = (1, 2, 4, 8, 16, 32, 48)
_SHOWN = ("tokens.weight", "blocks.1.attention.qkv.weight", "blocks.1.up.weight")


def shares(matrix_MN: Tensor) -> list[float]:
    """The share of the energy that the best approximation of each of ``RANKS`` leaves."""
    energies_M = torch.linalg.svdvals(matrix_MN.double()).square()
    left = energies_M.flip(0).cumsum(0).flip(0) / energies_M.sum()
    return [float(left[rank]) if rank < len(left) else 0.0 for rank in RANKS]


def make(folder: Path) -> list[str]:
    kept = series(Run())
    snapshots = kept["snapshots"]
    rows: list[list[object]] = []
    for step, gradients in snapshots.items():
        for name, grad_MN in gradients.items():
            law = [residual_share(rank, *grad_MN.shape) for rank in RANKS]
            for rank, measured, expected in zip(RANKS, shares(grad_MN), law, strict=True):
                rows.append([step, name, *grad_MN.shape, rank, measured, expected])
    generator = torch.Generator().manual_seed(0)
    # The law's own ground: the same shapes with independent normal entries.
    off = 0.0
    for grad_MN in next(iter(snapshots.values())).values():
        noise_MN = torch.randn(grad_MN.shape, generator=generator)
        for rank, measured in zip(RANKS, shares(noise_MN), strict=True):
            expected = residual_share(rank, *noise_MN.shape)
            off = max(off, abs(measured - expected))
            rows.append(["noise", "noise", *noise_MN.shape, rank, measured, expected])
    head = ["iteration", "matrix", "rows", "cols", "rank", "measured", "law"]
    write_csv(folder / "error_rank.csv", head, rows)

    figure, panels = canvas(len(_SHOWN))
    for axes, name in zip(panels, _SHOWN, strict=True):
        for step, gradients in snapshots.items():
            axes.plot(RANKS, shares(gradients[name]), marker="o", ms=3, label=f"iteration {step}")
        shape = gradients[name].shape
        law = [residual_share(rank, *shape) for rank in RANKS]
        axes.plot(RANKS, law, "k--", label="law (independent normal entries)")
        axes.set_title(f"{name}, {shape[0]} x {shape[1]}", fontsize=9)
        axes.set_xlabel("rank")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.02)
    panels[0].set_ylabel("share of the energy left")
    panels[-1].legend(fontsize=7)
    figure.savefig(folder / "error_rank.png", dpi=110)

    table = []
    for step in snapshots:
        mine = [row for row in rows if row[0] == step and row[4] == 8]
        measured = median(float(str(row[5])) for row in mine)
        table.append([step, measured, median(float(str(row[6])) for row in mine)])
    return [
        "Share of the energy left at rank 8, median over the matrices:",
        "",
        *markdown(["iteration", "measured", "law"], table),
        "",
        f"On matrices of the same shapes with independent normal entries, law and measurement differ by "
        f"{off:.3f} at most: the law is right about noise, and these gradients are not noise.",
    ]
