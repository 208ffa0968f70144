"""Figures 1, 9 and 10: the gradient's entropy over iterations, and sampled by beta and by alpha."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.figures.gradients import BETAS, Run, mean_entropy, series
from edgc_ddp.decisions import Sampling

ALPHAS = (1.0, 0.5, 0.2, 0.1, 0.05)
WINDOW = 50
_SMOOTH = 15


def correlation(a_S: Tensor, b_S: Tensor) -> float:
    """Pearson's."""
    return float(torch.corrcoef(torch.stack([a_S.double(), b_S.double()]))[0, 1])


def window_means(values_S: Tensor, window: int) -> Tensor:
    """Means of successive whole windows.

    >>> window_means(torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]), 2)
    tensor([2., 6.])
    """
    count = len(values_S) // window
    return values_S[: count * window].view(count, window).mean(1)


def _smooth(values_S: Tensor) -> Tensor:
    return values_S.unfold(0, _SMOOTH, 1).mean(-1)


def over_iterations(folder: Path) -> list[str]:
    kept = series(Run())
    whole = mean_entropy(kept, 1.0)
    entropy = kept["entropy"]["1.0"]
    write_csv(
        folder / "entropy.csv",
        ["iteration", "loss", "mean", *kept["names"]],
        [
            [step, float(kept["loss"][step]), float(whole[step]), *map(float, entropy[step])]
            for step in range(len(whole))
        ],
    )
    figure, (left, right) = canvas(2)
    left.plot(whole, color="tab:blue", alpha=0.25, lw=0.7)
    left.plot(range(_SMOOTH // 2, _SMOOTH // 2 + len(_smooth(whole))), _smooth(whole), "tab:blue")
    left.set_ylabel("entropy, nats (mean over entries)")
    for place, name in enumerate(kept["names"]):
        right.plot(_smooth(entropy[:, place]), lw=0.9, label=name.removesuffix(".weight"))
    right.legend(fontsize=6, ncol=2)
    for axes in (left, right):
        axes.set_xlabel("iteration")
    figure.savefig(folder / "entropy.png", dpi=110)
    means = window_means(whole, WINDOW)
    first, last = float(means[0]), float(means[-1])
    low = int(means.argmin())
    return [
        f"Mean entropy of windows of {WINDOW} iterations: first {first:.3f}, lowest "
        f"{float(means[low]):.3f} (window {low + 1} of {len(means)}), last {last:.3f} nats; within the "
        f"first window from {float(whole[0]):.3f} to {float(whole[:WINDOW].min()):.3f}. Loss "
        f"{float(kept['loss'][0]):.3f} at the first iteration, "
        f"{float(kept['loss'][-WINDOW:].mean()):.3f} in the last window.",
        "",
        *markdown(["window", "entropy"], [[k + 1, float(value)] for k, value in enumerate(means)]),
    ]


def under_beta(folder: Path) -> list[str]:
    kept = series(Run())
    whole = mean_entropy(kept, 1.0)
    sampled = {beta: mean_entropy(kept, beta) for beta in BETAS}
    write_csv(
        folder / "beta.csv",
        ["iteration", *(f"beta {beta}" for beta in BETAS)],
        [[step, *(float(sampled[beta][step]) for beta in BETAS)] for step in range(len(whole))],
    )
    figure, (left, right) = canvas(2)
    for beta in BETAS:
        left.plot(_smooth(sampled[beta]), lw=1, label=f"beta {beta}")
        if beta < 1:
            right.plot(sampled[beta] - whole, lw=0.6, label=f"beta {beta}")
    left.set_ylabel("entropy, nats")
    right.set_ylabel("difference from beta 1, nats")
    for axes in (left, right):
        axes.set_xlabel("iteration")
        axes.legend(fontsize=7)
    figure.savefig(folder / "beta.png", dpi=110)
    rows = [
        [
            beta,
            correlation(sampled[beta], whole),
            float((sampled[beta] - whole).mean()),
            float((sampled[beta] - whole).abs().max()),
        ]
        for beta in BETAS
    ]
    return markdown(["beta", "correlation with beta 1", "mean difference", "largest"], rows)


def under_alpha(folder: Path) -> list[str]:
    kept = series(Run())
    whole = mean_entropy(kept, 1.0)
    full = window_means(whole, WINDOW)
    means: dict[float, Tensor] = {}
    for alpha in ALPHAS:
        due = torch.tensor([Sampling(alpha=alpha).due(step) for step in range(len(whole))])
        windows = [
            whole[k * WINDOW : (k + 1) * WINDOW][due[k * WINDOW : (k + 1) * WINDOW]].mean()
            for k in range(len(full))
        ]
        means[alpha] = torch.stack(windows)
    change = {alpha: series_W.diff() / series_W[:-1].abs() for alpha, series_W in means.items()}
    write_csv(
        folder / "alpha.csv",
        ["window", *(f"change at alpha {alpha}" for alpha in ALPHAS)],
        [[k + 2, *(float(change[alpha][k]) for alpha in ALPHAS)] for k in range(len(full) - 1)],
    )
    figure, (axes,) = canvas(1, width=6)
    for alpha in ALPHAS:
        axes.plot(
            range(2, len(full) + 1), 100 * change[alpha], marker="o", ms=3, label=f"alpha {alpha}"
        )
    axes.set_xlabel(f"window of {WINDOW} iterations")
    axes.set_ylabel("change from the window before, %")
    axes.legend(fontsize=7)
    figure.savefig(folder / "alpha.png", dpi=110)
    typical = float(full.diff().abs().median())
    rows = [
        [
            alpha,
            float((means[alpha] - full).abs().mean()),
            float((means[alpha] - full).abs().max()),
            float((change[alpha] - change[1.0]).abs().max()) * 100,
        ]
        for alpha in ALPHAS
    ]
    head = [
        "alpha",
        "mean error of a window, nats",
        "largest",
        "largest error of the change, points",
    ]
    return [
        *markdown(head, rows),
        "",
        f"The median change between windows is {typical:.4f} nats: an error well below it leaves the "
        "decision as it was.",
    ]
