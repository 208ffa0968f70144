"""Figures 8 and 11, Tables 5 and 1, and all contestants at counted bytes, from one folder of loss runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.figures.loss_folder import DENSE, Losses, newest, read, seconds
from benchmarks.paper_clusters import (
    CLUSTERS,
    TABLE_5_DENSE_HOURS,
    TABLE_5_EDGC_HOURS,
    TABLE_5_HOURS,
)

Row = dict[str, Any]

LINKS_MBIT = (100, 1000)
NOBODY = "nobody"
_SMALL: dict[str, Any] = {"fontsize": 6, "textcoords": "offset points"}
_FAR = 0.1
"""So many nats above the lowest loss a contestant is told of at the edge: it would flatten the rest."""
NEAR = 0.003
"""How far above dense's end a loss still counts as dense's."""
DRAWN = (
    DENSE, "fixed-32-fp32", "selective-fp32", "edgc-fp32", "fixed-32-int8", "default", "4bit", "1bit",
)  # fmt: skip
"""Whom Figure 8 draws; its CSV has all."""

STRATEGIES = {
    "none": (DENSE, "none", TABLE_5_DENSE_HOURS),
    "rank 32": ("fixed-32-fp32", "rank 64", TABLE_5_HOURS[64]),
    "rank 16": ("fixed-16-fp32", "rank 32", TABLE_5_HOURS[32]),
    "rank 8": ("fixed-8-fp32", "rank 16", TABLE_5_HOURS[16]),
    "CQM, 8 to 32": ("edgc-fp32", "EDGC", TABLE_5_EDGC_HOURS),
}
"""Ours: contestant, the paper's name of it, its hours of communication in 30 000 iterations."""

BASE = "Megatron-LM"
TABLE_1 = {
    BASE: DENSE,
    "PowerSGD": "fixed-32-fp32",
    "Optimus-CC": "selective-fp32",
    "EDGC": "edgc-fp32",
}
"""The paper's methods, each with the contestant that stands for it."""
SMALL, LARGE = CLUSTERS
PAPER = {
    "2.5B": {
        BASE: (SMALL.dense_days, 17.95),
        "PowerSGD": (18.14, 22.37),
        "Optimus-CC": (18.01, 17.97),
        "EDGC": (SMALL.edgc_days, 17.95),
    },
    "12.1B": {
        BASE: (LARGE.dense_days, 8.73),
        "Optimus-CC": (6.42, 8.84),
        "EDGC": (LARGE.edgc_days, 8.87),
    },
}
"""Table 1: days and perplexity."""

FIGURE_8 = ("Figure 8: loss over time", 'Only the caption was at hand, "loss over time".')
FIGURE_11 = (
    "Figure 11 and Table 5: strategies",
    'of the figure only the caption was at hand, "PPL under strategies". Table 5, hours of '
    "communication in 30 000 iterations: none 3.0417, rank 64 3.0167, 32 1.4833, 16 0.7417, EDGC 1.8750. "
    "Ranks are halved here, for matrices a tenth as wide.",
)
TABLE = (
    "Table 1: time and perplexity",
    "days / perplexity of 2.5B: Megatron-LM 18.44 / 17.95, PowerSGD 18.14 / 22.37, Optimus-CC "
    "18.01 / 17.97, EDGC 15.74 / 17.95; of 12.1B: 6.88 / 8.73, -, 6.42 / 8.84, 5.77 / 8.87. Its perplexity "
    "is one of words, ours of bytes: compare the ratios to dense.",
)
EQUAL_BYTES = (
    "Loss at counted bytes, all contestants",
    "it has no such figure, and no coding of dense gradients in few bits among its rivals.",
)


def figure8(folder: Path) -> list[str]:
    losses = read(newest())
    compute = losses.compute_seconds()
    rows: list[Row] = [
        {
            "contestant": name,
            "steps": point.steps,
            "val_loss": point.val_loss,
            "low": spread.low,
            "high": spread.high,
            "train_loss": point.train_loss,
            "GB": point.wire_bytes / 1e9,
            **{
                f"s at {link} Mbit/s": seconds(point.steps, point.wire_bytes, compute, link)
                for link in LINKS_MBIT
            },
        }
        for name in losses.runs
        for point, spread in losses.curve(name)
    ]
    _write(folder / "figure8.csv", rows)
    axis = [*(f"s at {link} Mbit/s" for link in LINKS_MBIT), "GB"]
    figure, panels = canvas(3, width=4.6)
    for name in (name for name in DRAWN if name in losses.runs):
        mine = [row for row in rows if row["contestant"] == name]
        low, mid, high = ([row[key] for row in mine] for key in ("low", "val_loss", "high"))
        for axes, column in zip(panels, axis, strict=True):
            x = [row[column] for row in mine]
            axes.plot(x, mid, marker=".", lw=1, label=name)
            axes.fill_between(x, low, high, alpha=0.15)
    for axes, column in zip(panels, axis, strict=True):
        axes.set_xlabel("GB a rank has sent" if column == "GB" else f"{column}, modelled")
        axes.set_xscale("log")
    panels[0].set_ylabel("held-out loss, nats per byte")
    panels[0].legend(fontsize=7)
    figure.savefig(folder / "figure8.png", dpi=110)
    goal = (1 + NEAR) * losses.loss(DENSE).mean
    reached = [
        {"contestant": name, **{column: _reached(rows, name, column, goal) for column in axis}}
        for name in losses.runs
    ]
    return [
        *_ground(losses),
        f"Where each first reaches {goal:.4f}, {NEAR:.1%} above dense's end, between evaluations by a "
        "straight line; nan where it does not:",
        "",
        *_table(reached),
    ]


def _reached(rows: Sequence[Row], name: str, column: str, goal: float) -> float:
    """The column's value where the held-out loss first falls to the goal."""
    mine = [row for row in rows if row["contestant"] == name]
    for before, after in zip([mine[0], *mine], mine, strict=False):
        if after["val_loss"] <= goal:
            fall = before["val_loss"] - after["val_loss"]
            part = (before["val_loss"] - goal) / fall if fall > 0 else 1.0
            return float(before[column] + part * (after[column] - before[column]))
    return math.nan


def figure11(folder: Path) -> list[str]:
    losses = read(newest())
    losses.require([ours for ours, _, _ in STRATEGIES.values()])
    rows: list[Row] = []
    for strategy, (name, theirs, hours) in STRATEGIES.items():
        sent = losses.sent(name)
        rows.append(
            {"strategy": strategy}
            | _end(losses, name)
            | {"bytes / none": sent / losses.sent(DENSE)}
            | {f"wire h, {link} Mbit/s": 8 * sent / (link * 1e6) / 3600 for link in LINKS_MBIT}
            | {"the paper's": theirs, "its h": hours, "its h / none": hours / TABLE_5_DENSE_HOURS}
        )
    _write(folder / "figure11.csv", rows)
    figure, panels = canvas(2)
    for strategy, (name, _, _) in STRATEGIES.items():
        curve = losses.curve(name)
        x = [point.steps for point, _ in curve]
        panels[0].plot(x, [math.exp(p.val_loss) for p, _ in curve], marker=".", label=strategy)
    panels[0].set_xlabel("iterations")
    panels[0].set_ylabel("held-out perplexity, bytes")
    panels[0].set_yscale("log")
    panels[0].legend(fontsize=7)
    places = range(len(rows))
    for shift, key in ((-0.2, "bytes / none"), (0.2, "its h / none")):
        label = "bytes here" if key == "bytes / none" else "the paper's hours"
        panels[1].bar([p + shift for p in places], [row[key] for row in rows], 0.4, label=label)
    names = [f"{ours}\n({theirs})" for ours, (_, theirs, _) in STRATEGIES.items()]
    panels[1].set_xticks(list(places), names, fontsize=7)
    panels[1].set_ylabel("share of none's")
    panels[1].legend(fontsize=7)
    figure.savefig(folder / "figure11.png", dpi=110)
    return [*_ground(losses), "Wire hours are those of the bytes alone.", "", *_table(rows)]


def table1(folder: Path) -> list[str]:
    losses = read(newest())
    losses.require(list(TABLE_1.values()))
    labels = {name: label for label, name in TABLE_1.items()}
    rows: list[Row] = []
    for name in [*labels, *(name for name in losses.runs if name not in labels)]:
        label = labels.get(name, "not in the paper")
        row: Row = {"method": label, "contestant": name} | _end(losses, name)
        row["ppl / dense"] = math.exp(losses.behind_dense(name).mean)
        for link in LINKS_MBIT:
            hours = losses.hours(name, link)
            row[f"h, {link} Mbit/s"] = hours
            row[f"h / dense, {link} Mbit/s"] = hours / losses.hours(DENSE, link)
        rows.append(row | _paper(label))
    _write(folder / "table1.csv", rows)
    figure, panels = canvas(2)
    for axes, link in zip(panels, LINKS_MBIT, strict=True):
        for place, row in enumerate(rows):
            x, y = row[f"h / dense, {link} Mbit/s"], row["ppl / dense"]
            if row["contestant"] not in labels:
                axes.plot(x, y, ".", color="tab:gray")
                continue
            # Ours above the points, the paper's below, neighbours apart.
            _point(axes, x, y, row["contestant"], "tab:blue", 4 + 8 * (place % 3))
            if row["contestant"] != DENSE:
                x, y = row["2.5B days / dense"], row["2.5B ppl / dense"]
                _point(axes, x, y, f"paper: {row['method']}", "tab:orange", -10 - 8 * (place % 3))
        axes.margins(x=0.2)
        paper = max(row["2.5B ppl / dense"] for row in rows if row["contestant"] in labels)
        axes.set_ylim(0.97, max(1.1, paper) + 0.03)
        title = f"{link} Mbit/s; orange: the paper's 2.5B, gray: others near"
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("time / dense")
    panels[0].set_ylabel("perplexity / dense")
    figure.savefig(folder / "table1.png", dpi=110)
    return [
        *_ground(losses),
        "PowerSGD is a fixed rank of 32: the paper's rank was not at hand, but it saved 1.6 % of the "
        "time, as Table 5's highest would. Optimus-CC is its data-parallel part alone: three of four "
        "layers at rank 64, half of its 128. `ppl / dense` is of dense with the same seeds.",
        "",
        *_table(rows),
    ]


def _paper(label: str) -> Row:
    """The paper's two models under a method, relative to its Megatron-LM."""
    row: Row = {}
    for size, column in PAPER.items():
        theirs, dense = column.get(label), column[BASE]
        row[f"{size} days / dense"] = theirs[0] / dense[0] if theirs else "-"
        row[f"{size} ppl / dense"] = theirs[1] / dense[1] if theirs else "-"
    return row


def equal_bytes(folder: Path) -> list[str]:
    losses = read(newest())
    rows: list[Row] = []
    for name in sorted(losses.runs, key=losses.sent):
        runs, behind, late = (
            losses.runs[name],
            losses.behind_dense(name),
            losses.late_behind_dense(name),
        )
        rows.append(
            {"contestant": name, "share": losses.sent(name) / runs[0].dense_bytes}
            | _end(losses, name)
            | {"behind dense": behind.mean, "least": behind.low, "most": behind.high}
            | {"late": late.mean, "late least": late.low, "late most": late.high}
            | {"beaten by": ", ".join(losses.beaten_by(name)) or NOBODY}
        )
    _write(folder / "equal_bytes.csv", rows)
    figure, (axes,) = canvas(1, width=8.5, height=5.5)
    lowest = min(row["val_loss"] for row in rows)
    for place, row in enumerate(rows):
        y = row["val_loss"]
        colour = _colour(row["contestant"])
        if not y < lowest + _FAR:
            axes.plot(row["share"], lowest + _FAR, "^", color=colour)
            told = f"{row['contestant']}: {y:.3g}"
            axes.annotate(told, (row["share"], lowest + _FAR), xytext=(6, -3), **_SMALL)
            continue
        axes.errorbar(
            [row["share"]],
            [y],
            yerr=[[y - row["low"]], [row["high"] - y]],
            fmt="o",
            color=colour,
            mfc=colour if row["beaten by"] == NOBODY else "none",
            ms=5,
            lw=1,
            capsize=2,
        )
        # Neighbours in bytes above and below.
        beside = (4, 5 if place % 2 else -9)
        axes.annotate(row["contestant"], (row["share"], y), xytext=beside, **_SMALL)
    axes.set_xscale("log")
    axes.set_xlabel("bytes on the wire / dense fp32, whole run")
    axes.set_ylabel("held-out loss at the end, nats per byte")
    title = "mean of seeds, bars to the least and most; filled: nobody beats it"
    axes.set_title(
        f"{title}\nblue: entropy and adaptive, green: dense coded, orange: rest", fontsize=9
    )
    figure.savefig(folder / "equal_bytes.png", dpi=110)
    return [
        *_ground(losses),
        "Share: of dense fp32's bytes. Behind dense: less dense's loss with the same seed. Late: the same "
        "of the training loss over the last three tenths of the steps, on equal batches. Beaten by: who "
        "sent no more bytes and ended lower with every seed.",
        "",
        *_table(rows),
    ]


def _end(losses: Losses, name: str) -> Row:
    """How a contestant's runs ended."""
    loss = losses.loss(name)
    return {
        "seeds": len(losses.runs[name]),
        "val_loss": loss.mean,
        "low": loss.low,
        "high": loss.high,
        "ppl": math.exp(loss.mean),
        "GB": losses.sent(name) / 1e9,
    }


def _colour(name: str) -> str:
    if name.startswith(("edgc", "adaptive")):
        return "tab:blue"
    return "tab:green" if name.startswith(("4bit", "1bit", "dense")) else "tab:orange"


def _point(axes: Axes, x: float, y: float, name: str, colour: str, above: int) -> None:
    axes.plot(x, y, "o", color=colour, ms=4)
    axes.annotate(name, (x, y), xytext=(4, above), **_SMALL)


def _write(path: Path, rows: Sequence[Row]) -> None:
    write_csv(path, list(rows[0]), [list(row.values()) for row in rows])


def _table(rows: Sequence[Row]) -> list[str]:
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def _ground(losses: Losses) -> list[str]:
    counts = sorted({len(runs) for runs in losses.runs.values()})
    seeds = " or ".join(str(count) for count in counts)
    return [
        f"From `{losses.folder.name}`: {losses.steps} steps of the default run (two ranks, real text: "
        f"{losses.text}), {seeds} seeds a contestant, mean with least and most; "
        f"within a seed equal weights and texts. Commits: {', '.join(losses.commits)}. Time is a model: "
        f"{1000 * losses.compute_seconds():.1f} ms a step for everyone (the dense run's median, its "
        "loopback communication included, whatever a method's own work), then a rank's bytes over the "
        "link, none of it hidden and no latency.",
        "",
    ]
