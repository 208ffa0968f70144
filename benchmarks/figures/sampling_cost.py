"""Table 4: the time of one entropy evaluation under beta."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.figures.gradients import BETAS
from edgc_ddp.maths.entropy import ESTIMATORS

TITLE = "Table 4: sampling cost"
PAPER = (
    "78.14 / 58.7 / 46.85 / 39.93 ms for one evaluation at beta 1 / .5 / .25 / .05: half of it "
    "does not depend on beta. Alpha .1 and beta .25 together save 94 %."
)
_SHAPE = (1920, 1920)
_ROUNDS = 15


def make(folder: Path) -> list[str]:
    torch.set_num_threads(1)
    grad_MN = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0))
    spent: dict[tuple[str, float], list[float]] = {}
    # Interleaved, so that what else runs on the machine hits all of them alike.
    for nth in range(_ROUNDS):
        for name, estimate in ESTIMATORS.items():
            for beta in BETAS:
                began = time.perf_counter()
                estimate(grad_MN, beta, nth)
                spent.setdefault((name, beta), []).append(time.perf_counter() - began)
    times = {key: 1000 * median(seconds[1:]) for key, seconds in spent.items()}
    rows = []
    for name in ESTIMATORS:
        mine = [times[name, beta] for beta in BETAS]
        rows.append([name, *mine, f"{1 - 0.1 * times[name, 0.25] / times[name, 1.0]:.1%}"])
    head = ["estimator", *(f"beta {beta}, ms" for beta in BETAS), "saved at alpha .1, beta .25"]
    write_csv(folder / "sampling_cost.csv", head, rows)
    figure, (axes,) = canvas(1)
    for name in ESTIMATORS:
        axes.plot(BETAS, [times[name, beta] for beta in BETAS], marker="o", ms=3, label=name)
    axes.set_xlabel("beta")
    axes.set_ylabel("ms per evaluation")
    axes.set_yscale("log")
    axes.legend(fontsize=7)
    figure.savefig(folder / "sampling_cost.png", dpi=110)
    shape = " x ".join(map(str, _SHAPE))
    return [
        f"One matrix of {shape}, one thread, median of {_ROUNDS - 1}:",
        "",
        *markdown(head, rows),
    ]
