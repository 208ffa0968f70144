"""The fitted communication-time model carried to clusters: ``python -m benchmarks.scale [--fit FILE]``.

Fits the step-time records under benchmarks/results (or takes what ``python -m edgc_ddp.doctor --json FILE``
measured), tells how far off the model is on records that it was not fitted to, and works out the
step of plain DDP and of edgc on 8 to 1024 GPUs over links of 1 to 400 Gbit/s, by one ring and by rings
between nodes, and on the paper's two clusters. Writes a dated folder: scale.csv, scale.png, record.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import paper_clusters as paper
from benchmarks.figures.drawing import canvas, markdown, write_csv
from benchmarks.record import RESULTS, commit, folder_for, machine
from benchmarks.scale_fit import (
    Error,
    Fitted,
    Load,
    Way,
    facts_errors,
    fit_facts,
    read_all,
    validate,
)
from edgc_ddp.doctor.facts import Facts
from edgc_ddp.maths.comm_time import Link, flat_ring_seconds, hierarchical_seconds

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
LINKS_GBIT = (1.0, 3.0, 10.0, 32.0, 100.0, 400.0)
SHAPES = {"ring": flat_ring_seconds, "hierarchical": hierarchical_seconds}


@dataclass(frozen=True)
class Ground:
    """What is carried: the constants, what is trained, and how it can be averaged."""

    fitted: Fitted
    load: Load
    ways: list[Way]
    errors: list[Error]
    source: str

    def way(self, wire: str, rank: int) -> Way:
        """Raises ValueError when this was not measured."""
        for way in self.ways:
            if (way.wire, way.rank) == (wire, rank):
                return way
        known = sorted({f"{way.wire} at rank {way.rank}" for way in self.ways if way.wire})
        raise ValueError(f"--wire={wire} --rank={rank}: measured were {', '.join(known)}")


def ground(file: Path | None, parent: Path) -> Ground:
    """From a doctor's file, or from all records under a folder; the largest load measured is carried.

    Raises ValueError when there is nothing to fit.
    """
    if file is not None:
        facts = Facts.load(file)
        fitted, load, ways = fit_facts(facts)
        off = facts_errors(facts, fitted, load, ways)
        errors = [Error(facts.world_size, True, len(off), median(off), max(off))]
        return Ground(fitted, load, ways, errors, f"{file.name}, {facts.model}")
    points = read_all(parent)
    if not points:
        raise ValueError(
            f"no step-time record under {parent}: make one with python -m benchmarks.step_time, or give "
            "--fit a file of python -m edgc_ddp.doctor --json"
        )
    fitted, errors = validate(points)
    fewest = min(point.hosts for point in points)
    own = [point for point in points if point.hosts == fewest]
    # Gradients that were replayed have no computation beside them.
    trained = [point.load for point in own if point.trained] or [point.load for point in own]
    load = max(trained, key=lambda load: load.dense_bytes)
    ways = {
        (point.way.wire, point.way.rank): point.way
        for point in reversed(own)
        if point.load.dense_bytes == load.dense_bytes
    }
    names = ", ".join(dict.fromkeys(point.record for point in points))
    return Ground(fitted, load, list(ways.values()), errors, names)


@dataclass(frozen=True)
class Cluster:
    """The machines that the model is carried to."""

    per_node: int
    inside_gbit: float
    latency_s: float
    speed: float
    """How many times as fast as a measured host a GPU computes and compresses."""


@dataclass(frozen=True)
class Cell:
    """One number of GPUs on one link. Times in seconds."""

    speed: float
    shape: str
    gpus: int
    gbit: float
    plain_s: float
    edgc_s: float

    @property
    def speed_up(self) -> float:
        return self.plain_s / self.edgc_s


def step_on(
    ground: Ground, cluster: Cluster, way: Way, shape: str, gpus: int, gbit: float
) -> float:
    """Seconds of a step. Each GPU's load is that of the host measured: scaling is weak."""
    fitted, load, faster = ground.fitted, ground.load, 1 / cluster.speed
    per_node = min(cluster.per_node, gpus)
    outside = Link(cluster.latency_s, fitted.efficiency * gbit * 1e9 / 8)
    inside = Link(0.0, fitted.efficiency * cluster.inside_gbit * 1e9 / 8)
    collective = SHAPES[shape]
    latency = collective(0.0, gpus // per_node, per_node, inside, outside)
    whole = collective(way.payload_bytes, gpus // per_node, per_node, inside, outside)
    quick = Load(load.dense_bytes, load.compute_s * faster)
    return fitted.step_s(quick, way, (latency, whole - latency), faster)


def carry(ground: Ground, cluster: Cluster, way: Way) -> list[Cell]:
    """All numbers of GPUs on all links by both shapes."""
    plain = next(each for each in ground.ways if not each.wire)
    return [
        Cell(
            cluster.speed, shape, gpus, gbit,
            step_on(ground, cluster, plain, shape, gpus, gbit),
            step_on(ground, cluster, way, shape, gpus, gbit),
        )
        for shape in SHAPES
        for gpus in GPUS
        for gbit in LINKS_GBIT
    ]  # fmt: skip


def tables(ground: Ground, cells: Sequence[Cell], way: Way) -> list[str]:
    """Speed-up of edgc over plain DDP, one table for each speed and shape."""
    lines = []
    for speed, shape in dict.fromkeys((cell.speed, cell.shape) for cell in cells):
        lines += [
            f"Plain DDP's step / edgc's (rank {way.rank}, {way.wire}) by {shape}; a GPU is {speed:g} "
            "times as fast as a measured host, below 1 plain DDP is faster:",
            "",
            *markdown(
                ["GPUs", *(f"{gbit:g} Gbit/s" for gbit in LINKS_GBIT)],
                [
                    [
                        gpus,
                        *(
                            f"{cell.speed_up:.2f}"
                            for cell in cells
                            if (cell.speed, cell.shape, cell.gpus) == (speed, shape, gpus)
                        ),
                    ]
                    for gpus in GPUS
                ],
            ),
            "",
        ]
    return lines


def foundations(ground: Ground) -> list[str]:
    """The constants and how far the model is off."""
    fitted = ground.fitted
    work = [[wire, 1e9 * fixed, 1e9 * per_rank] for wire, (fixed, per_rank) in fitted.work.items()]
    errors = [
        [
            e.hosts,
            "fitted" if e.fitted else "predicted",
            e.points,
            f"{e.median:.1%}",
            f"{e.worst:.1%}",
        ]
        for e in ground.errors
    ]
    lines = [
        f"From {ground.source}. Latency {1e6 * fitted.latency_s:.3g} us per message, "
        f"{fitted.efficiency:.0%} of the nominal rate, {1e9 * fitted.byte_s:.3g} ns of processor per "
        f"payload byte, {1e3 * fitted.dense_s:.3g} ms beside a dense step's parts and "
        f"{1e3 * fitted.compressed_s:.3g} ms beside a compressed one's, "
        f"{fitted.overlap:.0%} of what could hide under backward hides. Carried: "
        f"{ground.load.dense_bytes / 1e6:.4g} MB of gradient, {1e3 * ground.load.compute_s:.4g} ms of "
        "computation per step on a measured host.",
        "",
        *markdown(["wire", "work, ns per entry", "and per rank"], work),
        "",
        "Error of the expected step:",
        "",
        *markdown(["hosts", "records were", "points", "median", "worst"], errors),
        "",
    ]
    if len(ground.errors) == 1:
        lines += [
            "There is no record of more hosts: nothing here was tested on a larger number.",
            "",
        ]
    return lines


def paper_lines() -> list[str]:
    """The paper's clusters beside the model's answer."""
    rows = []
    for answer in paper.answers():
        cluster = answer.cluster
        known = "" if len(cluster.links_gbit) == 1 else " (link not known)"
        rows.append(
            [
                f"{cluster.name}{known}",
                f"{answer.gbit:g}",
                f"{cluster.step_s:.2f}",
                f"{answer.dense_s:.3f}",
                f"{answer.edgc_s:.3f}",
                f"{answer.exposed:.1%}",
                f"{cluster.claimed:.1%}",
                f"{answer.needed_s:.2f}",
            ]  # fmt: skip
        )
    head = [
        "cluster", "Gbit/s", "step, s", "dense average, s", f"at rank {paper.MEAN_RANK}, s",
        "model: at most", "paper", "s to save for that",
    ]  # fmt: skip
    first = paper.CLUSTERS[0]
    return [
        "The paper's clusters. Model: no average hides under backward and compressing costs nothing, so "
        "this is the most that sending less between data-parallel replicas can bring; gradients of two "
        "bytes (four double it).",
        "",
        *markdown(head, rows),
        "",
        f"With the averages of the paper's own Table 5 ({3600 * paper.TABLE_5_DENSE_HOURS / 30000:.3f} s "
        f"dense, {3600 * paper.TABLE_5_EDGC_HOURS / 30000:.3f} s with EDGC, work included), all exposed, "
        f"{first.name} changes by {paper.table_5_change():.1%}, against {first.claimed:.1%} reported: its "
        "averages are too small a part of the step to explain that.",
        "",
    ]


def draw(path: Path, cells: Sequence[Cell]) -> None:
    """Speed-up against the link, a panel for each speed and shape."""
    kinds = list(dict.fromkeys((cell.speed, cell.shape) for cell in cells))
    figure, panels = canvas(len(kinds), width=4.4)
    for axes, kind in zip(panels, kinds, strict=True):
        for gpus in GPUS[::2] + GPUS[-1:]:
            own = [c for c in cells if (c.speed, c.shape) == kind and c.gpus == gpus]
            ups = [c.speed_up for c in own]
            axes.plot([c.gbit for c in own], ups, marker="o", ms=3, label=f"{gpus} GPUs")
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("link between nodes, Gbit/s")
        axes.set_title(f"{kind[1]}, a GPU = {kind[0]:g} hosts", fontsize=9)
    panels[0].set_ylabel("step of plain DDP / of edgc")
    panels[-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--fit", type=Path, default=None, metavar="FILE", help="a doctor's --json")
    p.add_argument("--records", type=Path, default=RESULTS, help="folder of step-time records")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--wire", default="bf16")
    p.add_argument("--per-node", type=int, default=8, help="GPUs of a node")
    p.add_argument("--inside-gbit", type=float, default=300.0, help="between GPUs of a node")
    p.add_argument(
        "--latency-us", type=float, default=None, help="between nodes; default: as fitted"
    )
    p.add_argument("--speeds", default="1,100", help="a GPU's speed, in measured hosts")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of records")
    p.add_argument("--name", default="scale", help="of the result's folder")
    return p


def run(arguments: argparse.Namespace, command: str) -> Path:
    """Fit, carry, write; returns the folder. Raises ValueError for what cannot be."""
    based = ground(arguments.fit, arguments.records)
    way = based.way(arguments.wire, arguments.rank)
    latency = based.fitted.latency_s
    if arguments.latency_us is not None:
        latency = arguments.latency_us / 1e6
    cells: list[Cell] = []
    for speed in arguments.speeds.split(","):
        cluster = Cluster(arguments.per_node, arguments.inside_gbit, latency, float(speed))
        cells += carry(based, cluster, way)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    folder = folder_for(arguments.out, arguments.name, today)
    folder.mkdir(parents=True)
    head = ["speed", "shape", "gpus", "gbit", "plain_s", "edgc_s", "speed_up"]
    rows = [[*asdict(cell).values(), cell.speed_up] for cell in cells]
    write_csv(folder / "scale.csv", head, rows)
    draw(folder / "scale.png", cells)
    about = {
        "command": command,
        "machine": machine(),
        "commit": commit(Path(__file__).parent),
        "fitted": asdict(based.fitted),
        "errors": [asdict(error) for error in based.errors],
    }
    (folder / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    text = [
        "# Scale: the communication-time model carried to clusters", "", f"    {command}", "",
        *foundations(based), *tables(based, cells, way),
        f"Nodes of {arguments.per_node} GPUs joined at {arguments.inside_gbit:g} Gbit/s; "
        f"{1e6 * latency:.3g} us between nodes. These are a model's answers, not measurements.",
        "", *paper_lines(),
        "![Speed-up against the link](scale.png)",
    ]  # fmt: skip
    (folder / "record.md").write_text("\n".join(text) + "\n")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        folder = run(
            parser().parse_args(argv), shlex.join(["python", "-m", "benchmarks.scale", *argv])
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{(folder / 'record.md').read_text()}\nwritten to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
