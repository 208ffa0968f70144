"""Figure 5: warm-up, windows, bounds and ranks, by the controller itself over recorded gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.figures.gradients import Run, mean_entropy, series
from benchmarks.paper_clusters import MEAN_RANK
from edgc_ddp.controllers import EntropyController
from edgc_ddp.controllers.bounds import default_r_min
from edgc_ddp.decisions import Controller, Layout, MatrixSpec, Observation, Plan
from edgc_ddp.observer import Observer
from edgc_ddp.report.phases import BAND_ALPHA, phase_colour, phase_label

TITLE = "Figure 5: warm-up, entropy, bounds and windows"
CAPTION = (
    "Visualization of warm-up, entropy calculations, rank bounds, and window-based compression "
    "adjustments"
)
PAPERS_R_MAX = 64
RULES = (
    " Its rules: a warm-up of a tenth of the run or more, windows of 1000 of 230 000 iterations, r_min a "
    "quarter of r_max, 4 ranks a window at most; by the hours of Table 5 its mean rank is "
    f"about {MEAN_RANK} of {PAPERS_R_MAX}."
)
WINDOW, R_MAX = 20, 16
_LOOK = 15
"""A quarter of the warm-up: how often the controller looks at the error in it."""
RUN = Run(snapshots=tuple(range(_LOOK - 1, 180, _LOOK)))
"""The run of the other figures, with the gradients kept that the warm-up's looks need: it may last three
tenths of the run."""

POLICIES: dict[str, dict[str, Any]] = {
    "edgc, against warm-up": {},
    "edgc, against the window before": {"reference": "previous"},
    "edgc, a rank for each matrix": {"scope": "matrix"},
    "edgc_code": {"policy": "edgc_code"},
}
"""Options of the controller beside those that all have alike."""


@dataclass(frozen=True)
class Decision:
    """A plan, the iteration it begins at, and what was then seen under it; ``end`` is the record's
    where that is over first, and then nothing was seen."""

    begin: int
    end: int
    plan: Plan
    entropy: float

    def ranks(self) -> list[int]:
        return list(self.plan.ranks.values())

    def mean_rank(self) -> float:
        """Plain mean over the matrices."""
        return sum(self.ranks()) / len(self.ranks())


def layout_of(kept: dict[str, Any]) -> Layout:
    snapshot = next(iter(kept["snapshots"].values()))
    shapes = ((name, *sorted(snapshot[name].shape)) for name in kept["names"])
    return Layout(tuple(MatrixSpec(*shape) for shape in shapes))


def observe(kept: dict[str, Any], layout: Layout, plan: Plan, begin: int) -> Observation:
    """What the hook would have seen under ``plan``: the entropies that its sampling takes and, where it
    asks for that, the energy that ranks leave of the last gradient."""
    assert plan.sampling is not None
    due = [step for step in range(begin, plan.until) if plan.sampling.due(step)]
    entropies = kept["entropy"][str(plan.sampling.beta)][due].mean(0).tolist()
    observer = Observer(layout, torch.device("cpu"))
    observer.reset(plan)
    if plan.probe_rank:
        gradients = kept["snapshots"][plan.until - 1]
        for name in kept["names"]:
            tall = gradients[name].shape[0] > gradients[name].shape[1]
            observer.probe(gradients[name].t() if tall else gradients[name])
    return Observation(
        steps=plan.until - begin,
        entropy=dict(zip(kept["names"], entropies, strict=True)),
        error_curve=tuple(observer.curve.tolist()),
    )


def follow(controller: Controller, kept: dict[str, Any]) -> list[Decision]:
    """All decisions over the record, whose gradients are those of dense training whatever is decided."""
    layout = layout_of(kept)
    total = len(kept["loss"])
    state, plan = controller.decide(controller.init(layout), None, 0)
    begin, decisions = 0, []
    while plan.until <= total:
        seen = observe(kept, layout, plan, begin)
        decisions.append(Decision(begin, plan.until, plan, seen.mean_entropy(layout)))
        begin = plan.until
        state, plan = controller.decide(state, seen, begin)
    if begin < total:
        decisions.append(Decision(begin, total, plan, math.nan))
    return decisions


def make(folder: Path) -> list[str]:
    kept = series(RUN)
    runs = {
        name: follow(
            EntropyController(window=WINDOW, r_max=R_MAX, total_steps=RUN.steps, **options), kept
        )
        for name, options in POLICIES.items()
    }
    write_csv(
        folder / "decisions.csv",
        ["policy", "begin", "end", "phase", "entropy seen", "mean rank", "lowest", "highest", "reason"],
        [
            [name, d.begin, d.end, d.plan.phase, d.entropy, d.mean_rank(), min(d.ranks()),
             max(d.ranks()), d.plan.reason]
            for name, decisions in runs.items()
            for d in decisions
        ],
    )  # fmt: skip
    whole = mean_entropy(kept, 1.0)
    write_csv(
        folder / "entropy.csv",
        ["iteration", "entropy"],
        [[step, float(value)] for step, value in enumerate(whole)],
    )
    _draw(runs, whole, folder / "phases.png")
    return _told(runs, len(whole))


def _draw(runs: dict[str, list[Decision]], whole: Tensor, path: Path) -> None:
    figure, (left, right) = canvas(2, width=6.5, height=4.2)
    # The warm-up is the same under every policy: it depends on the bounds and the gradients.
    shared = next(iter(runs.values()))
    for axes in (left, right):
        for phase in dict.fromkeys(d.plan.phase for d in shared):
            spans = [(d.begin, d.end - d.begin) for d in shared if d.plan.phase == phase]
            axes.broken_barh(
                spans, (0, 1), transform=axes.get_xaxis_transform(), color=phase_colour(phase),
                alpha=BAND_ALPHA, lw=0, label=phase_label(phase),
            )  # fmt: skip
        for d in shared:
            axes.axvline(d.begin, color="white", lw=0.6)
        axes.set_xlim(0, len(whole))
        axes.set_xlabel("iteration; white lines: decisions")
    left.plot(whole, color="0.5", lw=0.6, label="every iteration, all entries")
    seen = [d for d in shared if math.isfinite(d.entropy)]
    left.hlines(
        [d.entropy for d in seen], [d.begin for d in seen], [d.end for d in seen], color="black",
        lw=2, label="seen: window means of the sample",
    )  # fmt: skip
    left.set_ylabel("entropy, nats (mean over entries)")
    lines = []
    for place, (name, decisions) in enumerate(runs.items()):
        ranks = [math.nan if d.plan.phase == "warmup" else d.mean_rank() for d in decisions]
        edges = [*(d.begin for d in decisions), decisions[-1].end]
        # Thinner ones over thicker ones: they often run together at a bound.
        width = 1.2 * (len(runs) - place)
        lines += right.plot(
            edges, [*ranks, ranks[-1]], drawstyle="steps-post", lw=width, label=name
        )
    for bound, name in ((R_MAX, "r_max"), (default_r_min(R_MAX), "r_min")):
        right.axhline(bound, color="black", ls=":", lw=1)
        right.annotate(
            name, (len(whole) * 0.01, bound), xytext=(0, 3), textcoords="offset points", fontsize=8
        )
    right.set_ylim(0, R_MAX * 1.15)
    right.set_ylabel("rank (mean over matrices)")
    left.legend(fontsize=7, loc="lower right")
    right.legend(handles=lines, fontsize=7, loc="lower left")
    figure.savefig(path, dpi=110)


def _told(runs: dict[str, list[Decision]], total: int) -> list[str]:
    shared = next(iter(runs.values()))
    start = next(d for d in shared if d.plan.phase == "compress")
    before = [d for d in shared if d.end <= start.begin]
    last = [d for d in shared if math.isfinite(d.entropy)][-1]
    change = last.entropy - before[-1].entropy
    rows, shares = [], {}
    for name, decisions in runs.items():
        windows = [d for d in decisions if d.plan.phase == "compress"]
        length = sum(d.end - d.begin for d in windows)
        mean = sum(d.mean_rank() * (d.end - d.begin) for d in windows) / length
        shares[name] = mean / R_MAX
        changed = sum(a.ranks() != b.ranks() for a, b in pairwise(windows))
        stopped = sum(min(d.ranks()) == R_MAX for d in windows)
        least, most = min(min(d.ranks()) for d in windows), max(max(d.ranks()) for d in windows)
        rows.append([name, len(windows), mean, mean / R_MAX, least, most, changed, stopped])
    papers = MEAN_RANK / PAPERS_R_MAX
    nearest = min(shares, key=lambda name: abs(shares[name] - papers))
    head = [
        "policy", "windows", "mean rank", "of r_max", "lowest", "highest", "windows with a change",
        "windows at r_max throughout",
    ]  # fmt: skip
    return [
        f"The controller itself, over recorded entropies (alpha .1, beta .25) and gradients: windows of "
        f"{WINDOW} iterations, r_max {R_MAX}. The gradients are those of dense training: what it decides "
        "changes nothing in them.",
        "",
        f"Warm-up: {start.begin} of {total} iterations ({start.begin / total:.0%}), ended by this: "
        f"{start.plan.reason}. From its last period, {before[-1].entropy:.3f} nats, to the last window, "
        f"{last.entropy:.3f}, the entropy {'rose' if change > 0 else 'fell'} by {abs(change):.3f}.",
        "",
        *markdown(head, rows),
        "",
        f"The paper's mean rank is {papers:.2f} of its r_max; nearest here is {nearest}, with "
        f"{shares[nearest]:.2f}.",
    ]
