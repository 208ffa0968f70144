"""Figure 6: the time of an average against its rank, measured and by the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.paper_clusters import TABLE_5_DENSE_HOURS, TABLE_5_HOURS
from edgc_ddp.doctor.advise import Model, Setting
from edgc_ddp.doctor.facts import Facts
from edgc_ddp.maths.comm_time import Link, ring_seconds

TITLE = "Figure 6: communication time against rank"
PAPER = (
    "Of the figure only the caption was at hand. Table 5 has its numbers for 30 000 steps: 3.0417 h "
    "uncompressed, 3.0167 / 1.4833 / 0.7417 h at rank 64 / 32 / 16, a line through the origin that "
    "meets the uncompressed time at rank 64.5."
)
LINKS_GBIT = (0.1, 1.0, 10.0)
_MODEL = "small"
_WIRE = "fp32"


def measure(folder: Path) -> Facts:
    """The doctor's measurements of two ranks on this machine, kept beside the figure."""
    options = ["--model", _MODEL, "--wire", _WIRE, "--steps", "10", "--json", "doctor.json"]
    subprocess.run(
        [sys.executable, "-m", "edgc_ddp.doctor", *options, "--out", "."],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return Facts.load(folder / "doctor.json")


def on_link(model: Model, rank: int, gbit: float) -> float:
    """Seconds of an average with this machine's work and latency, on another link."""
    latency, _, work = model.parts(Setting(rank, _WIRE))
    wire = ring_seconds(
        model.payload(Setting(rank, _WIRE)), model.facts.world_size, Link(0.0, gbit * 1e9 / 8)
    )
    return latency + wire + work


def make(folder: Path) -> list[str]:
    facts = measure(folder)
    model = Model(facts)
    rows = []
    for average in facts.averages:
        latency, wire, work = model.parts(Setting(average.rank, _WIRE))
        carried = [on_link(model, average.rank, gbit) for gbit in LINKS_GBIT]
        rows.append(
            [average.rank, average.seconds, latency, wire, work, latency + wire + work, *carried]
        )
    head = ["rank", "measured", "latency", "wire", "work", "model"]
    head += [f"model, {gbit:g} Gbit/s" for gbit in LINKS_GBIT]
    write_csv(folder / "figure6.csv", head, rows)

    ranks = [row[0] for row in rows if row[0]]
    figure, panels = canvas(1 + len(LINKS_GBIT) + 1, width=3.6)
    columns = {
        "this machine, measured": 1,
        **{f"{g:g} Gbit/s, model": 6 + k for k, g in enumerate(LINKS_GBIT)},
    }
    for axes, (name, column) in zip(panels, columns.items(), strict=False):
        compressed = [1000 * row[column] for row in rows if row[0]]
        axes.plot(ranks, compressed, marker="o", ms=3, label="compressed")
        if column == 1:
            axes.plot(ranks, [1000 * row[5] for row in rows if row[0]], "k--", label="model")
        dense = next(1000 * row[column] for row in rows if not row[0])
        axes.axhline(dense, color="tab:orange", label="dense")
        axes.set_title(name, fontsize=9)
    table = sorted(TABLE_5_HOURS.items())
    panels[-1].plot([rank for rank, _ in table], [hours for _, hours in table], marker="o", ms=3)
    panels[-1].axhline(TABLE_5_DENSE_HOURS, color="tab:orange")
    panels[-1].set_title("the paper's Table 5, hours", fontsize=9)
    for axes in panels:
        axes.set_xlabel("rank")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("ms per average")
    panels[0].legend(fontsize=7)
    figure.savefig(folder / "figure6.png", dpi=110)
    return [
        f"One average of {facts.dense_bytes / 1e6:.3g} MB of gradient (model {facts.model}) over "
        f"{facts.world_size} processes of this machine, factors in {_WIRE}, nothing beside it; the last "
        "columns put another link under the same latency and work. ms; rank 0 is dense:",
        "",
        *markdown(head, [[row[0], *(1000 * float(value) for value in row[1:])] for row in rows]),
    ]
