"""A run's folder: what was asked, every number measured, and what follows from them.

``python -m benchmarks.record FOLDER`` writes the table and the plots again from config.json and raw.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import edgc_ddp
from benchmarks.contestants import MEANING, Contestant
from benchmarks.links import Link
from benchmarks.summary import Row, summarise, table

RESULTS = Path(__file__).parent / "results"
_MIN_STEPS = 30
_MIN_ROUNDS = 3
_MAX_BUSY = 0.05
_LOOK_SECONDS = 3.0
_KEPT = ("results", "trials")
_RUNS = [f":(top){name}" for name in ("src", "conf", "benchmarks")]
_RUNS += [f":(top,exclude)benchmarks/{name}" for name in _KEPT]


def folder_for(parent: Path, name: str, today: datetime.date) -> Path:
    """``<parent>/<date>-<name>``, not made yet.

    Raises:
        ValueError: the name does not suit a folder, or the folder exists: records are not overwritten.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise ValueError(f"name={name!r}: expected lower-case letters, digits, dots and dashes")
    folder = parent / f"{today.isoformat()}-{name}"
    if folder.exists():
        raise ValueError(f"{folder} exists, and records are not overwritten: give another --name")
    return folder


def machine() -> dict[str, Any]:
    """The machine and the software, as far as they bear on speed."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        # Where the system says which of them this process may use.
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "edgc_ddp": edgc_ddp.__version__,
    }


def busy_before() -> float:
    """Share of the processors' time, over three seconds, that something else takes now."""
    before = Path("/proc/stat").read_text()
    time.sleep(_LOOK_SECONDS)
    return busy_share(before, Path("/proc/stat").read_text())


def busy_share(before: str, after: str) -> float:
    """Share of time not idle between two texts of ``/proc/stat``.

    >>> busy_share("cpu 10 0 10 70 10 0 0 0", "cpu 30 0 15 140 15 0 0 0")
    0.25
    """
    first, last = ([int(n) for n in text.split("\n")[0].split()[1:9]] for text in (before, after))
    spent = [b - a for a, b in zip(first, last, strict=True)]
    # The fourth is idle, the fifth idle while a disk works.
    return 1 - (spent[3] + spent[4]) / max(1, sum(spent))


def commit(folder: Path) -> dict[str, Any]:
    """The commit checked out and whether what runs differs from it (the records that runs leave do not
    count); id None outside a repository."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else None

    changed = git("status", "--porcelain", "--", *_RUNS)
    return {"id": git("rev-parse", "--verify", "HEAD"), "dirty": bool(changed)}


def objections(config: Mapping[str, Any]) -> list[str]:
    """Why a run is no record, one reason each; empty when it may be kept (rules: results/README.md)."""
    found = []
    if config["commit"]["id"] is None or config["commit"]["dirty"]:
        found.append("the code measured is not a commit")
    if config["steps"] < _MIN_STEPS:
        found.append(f"{config['steps']} steps, fewer than {_MIN_STEPS}")
    if config["rounds"] < _MIN_ROUNDS:
        found.append(f"{config['rounds']} rounds, fewer than {_MIN_ROUNDS}")
    for link, busy in config["busy_before"].items():
        if busy > _MAX_BUSY:
            found.append(f"the machine was {busy:.0%} busy with something else before {link}")
    return found


def write(folder: Path, config: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """Write config.json, raw.json, table.md and one plot per link; returns the table's text.

    ``raw`` holds, per link name, ``network`` (:meth:`Network.describe`) and ``blocks``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "raw.json").write_text(json.dumps(raw) + "\n")
    return derive(folder)


def derive(folder: Path) -> str:
    """Write table.md and the plots from config.json and raw.json; returns the table's text."""
    config = json.loads((folder / "config.json").read_text())
    raw = json.loads((folder / "raw.json").read_text())
    parts = [_head(config)]
    for name, measured in raw.items():
        rows = summarise(measured["blocks"], Link.parse(name), measured["network"]["shared"])
        network = measured["network"]
        parts.append(
            f"## {name}\n\n{network['form']}: {network['note']}; {network['shaping']}; "
            f"TCP {network['congestion_control']}.\n\n{table(rows)}\n"
        )
        _plot(rows, f"{config['model']}, {config['hosts']} hosts, {name}", folder / f"{name}.png")
    parts.append(_legend(list(config["contestants"])))
    text = "\n".join(parts)
    (folder / "table.md").write_text(text)
    return text


def _head(config: Mapping[str, Any]) -> str:
    machine = config["machine"]
    doubts = objections(config)
    return "\n".join(
        [
            f"# Time of a step: {config['model']} ({config['parameters']:,} parameters), "
            f"{config['hosts']} hosts",
            "",
            f"**Not a record**: {'; '.join(doubts)}." if doubts else "Fulfils results/README.md.",
            "",
            f"    {config['command']}",
            "",
            f"Commit {config['commit']['id'] or 'none'}, {config['started']}. {machine['cpu']}, "
            f"{machine['cores']} cores, torch {machine['torch']}, one thread per host"
            f"{', each host on cores of its own' if config['pin'] else ''}. {config['steps']} steps "
            f"each, in {config['rounds']} interleaved rounds.",
            "",
        ]
    )


def _legend(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(Contestant.parse(name).kind for name in names)
    lines = [f"- `{kind}`: {MEANING[kind]}." for kind in kinds]
    return "\n".join(
        [
            "",
            *lines,
            "- `-r16` is the rank, `-bf16` what factors travel in, `@4` buckets of 4 MiB instead of DDP's",
            "  default (25, the first 1). Each low-rank method decides by its own default which matrices",
            "  are worth compressing, so equal ranks need not mean equal bytes.",
            "- A step is forward and backward with averaging, until the slowest host is done. MB (10^6)",
            "  are per host and step: sent as the interface counts, headers and acknowledgements",
            "  included; of data without these, 66 bytes a packet (? where packets were not counted);",
            "  claimed as the method counts. Floor: max(no communication, MB sent / link speed).",
            "",
        ]
    )


def _plot(rows: Sequence[Row], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = {"edgc": "tab:blue", "powersgd": "tab:orange", "epfml": "tab:green"}
    places = range(len(rows))
    axes.barh(
        places,
        [row.median_ms for row in rows],
        color=[colours.get(Contestant.parse(row.name).kind, "tab:gray") for row in rows],
        xerr=[
            [row.median_ms - row.low_ms for row in rows],
            [row.high_ms - row.median_ms for row in rows],
        ],
        error_kw={"lw": 1, "capsize": 2},
    )
    floors = [row.floor_ms for row in rows]
    axes.plot(floors, places, "|", color="black", markersize=11, label="floor")
    axes.set_yticks(list(places), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("median ms per step, with quartiles")
    axes.set_title(title)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(derive(parser.parse_args().folder))


if __name__ == "__main__":
    main()
