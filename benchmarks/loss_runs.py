"""What loss does each method reach, at how many bytes? Real training runs, one after the other.

    python -m benchmarks.loss_runs --seeds 0,1,2 --only '*' --steps 1000 --out FOLDER

Every contestant and seed is one run of two ranks over ``+experiment=default``: within a seed all start from
the same weights and read the same text in the same order. All contestants of the first seed come first. A
run that is finished is kept, so the command can be given again after a break. Each writes, under
FOLDER/CONTESTANT/seed-N, run.json (command, configuration, commit, summary) and steps.csv (loss, bytes a
rank has sent so far, held-out loss); ``python -m benchmarks.reproduce figure8`` and others read them.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loss_contestants import Contestant, select
from benchmarks.record import RESULTS, commit, machine

ROOT = Path(__file__).parents[1]
HEAD = ("step", "loss", "wire_bytes", "val_loss")
_KEPT = ("val_loss", "seconds", "wire_bytes", "dense_bytes", "mean_rank", "world_size")


def arguments(
    contestant: Contestant, seed: int, steps: int, also: Sequence[str], folder: Path | str
) -> list[str]:
    """What Python is given to train the contestant and leave its records in the folder."""
    asked = ["+experiment=default", "nproc=2", "train.checkpoint_every=0"]
    asked += [f"train.steps={steps}", f"seed={seed}", *contestant.overrides, *also]
    if contestant.kind:
        start = f"--start-iter={contestant.start_iter(steps)}"
        return ["-m", "benchmarks.outsider_run", start, contestant.kind, str(folder), *asked]
    return ["-m", "edgc_ddp.train", *asked, f"hydra.run.dir={folder}"]


def train(argv: Sequence[str], limit: float) -> dict[str, Any]:
    """Run it to its end; returns the summary it prints.

    Raises RuntimeError with the end of what it said when it fails or takes longer than ``limit`` seconds.
    """
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A session of its own, so that its ranks end with it.
        start_new_session=True,
    )
    try:
        out, said = process.communicate(timeout=limit)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RuntimeError(f"not done within --limit {limit:g} seconds") from None
        raise
    if process.returncode:
        raise RuntimeError(f"ended with {process.returncode}: {said[-2000:]}")
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    return summary


def compact(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Rows of steps.csv from those of metrics.jsonl.

    >>> compact([{"kind": "step", "step": 0, "loss": 5.5, "wire_bytes": 8, "lr": 1},
    ...          {"kind": "eval", "step": 0, "val_loss": 5.25}])
    [[0, '5.500000', 8, '5.250000']]
    """
    held_out = {row["step"]: _loss(row["val_loss"]) for row in rows if row["kind"] == "eval"}
    return [
        [row["step"], _loss(row["loss"]), row["wire_bytes"], held_out.get(row["step"], "")]
        for row in rows
        if row["kind"] == "step"
    ]


def _loss(value: float | None) -> str:
    """As the CSV has it. JSON writes a loss that is not finite as null."""
    return "nan" if value is None else f"{value:.6f}"


def is_kept(home: Path, told: Sequence[str]) -> bool:
    """Whether this run was finished before, by the command ``told``. Raises ValueError when it was
    another."""
    path = home / "run.json"
    if not path.exists():
        return False
    before = json.loads(path.read_text())["command"]
    if before != told:
        raise ValueError(
            f"{home} holds the run of {shlex.join(before)}, but asked is {shlex.join(told)}: give "
            "another --out"
        )
    return True


def told_command(contestant: Contestant, seed: int, steps: int, also: Sequence[str]) -> list[str]:
    """The command on record: whole, but the folder."""
    return ["python", *arguments(contestant, seed, steps, also, "FOLDER")]


def one(
    contestant: Contestant, seed: int, steps: int, also: Sequence[str], home: Path, limit: float
) -> dict[str, Any]:
    """Train one contestant once and keep what is told of it; returns run.json."""
    scratch = home / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    about = {"contestant": contestant.name, "what": contestant.what, "seed": seed, "steps": steps}
    about["also"] = list(also)
    about |= {"command": told_command(contestant, seed, steps, also)}
    about |= {"commit": commit(ROOT), "machine": machine()}
    about["started"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    argv = arguments(contestant, seed, steps, also, scratch.resolve())
    summary = train([sys.executable, *argv], limit)
    rows = [json.loads(line) for line in (scratch / "metrics.jsonl").read_text().splitlines()]
    environment = json.loads((scratch / "environment.json").read_text())
    about |= {
        "config": (scratch / "config.yaml").read_text(),
        "text": environment["data"],
        "median_step_seconds": median(row["seconds"] for row in rows if row["kind"] == "step"),
        "summary": {key: summary[key] for key in _KEPT},
    }
    with (home / "steps.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEAD)
        writer.writerows(compact(rows))
    shutil.rmtree(scratch)
    # Last, and in one step: it is what says that the run is finished.
    text = json.dumps(about, indent=1) + "\n"
    (home / "run.json.tmp").write_text(text)
    os.replace(home / "run.json.tmp", home / "run.json")
    return about


def runs(
    contestants: Sequence[Contestant],
    seeds: Sequence[int],
    steps: int,
    also: Sequence[str],
    out: Path,
    limit: float,
) -> list[str]:
    """All of them, seed by seed. Returns what failed, one text a run: the others go on."""
    failed = []
    for seed in seeds:
        for contestant in contestants:
            home = out / contestant.name / f"seed-{seed}"
            began = time.monotonic()
            try:
                if is_kept(home, told_command(contestant, seed, steps, also)):
                    print(f"{home}: kept", flush=True)
                    continue
                summary = one(contestant, seed, steps, also, home, limit)["summary"]
            except (RuntimeError, ValueError) as error:
                failed.append(f"{home}: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
                continue
            share = summary["wire_bytes"] / summary["dense_bytes"]
            told = f"held-out loss {_loss(summary['val_loss'])} at {share:.1%} of the bytes"
            print(f"{home}: {told}, {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    today = datetime.datetime.now(datetime.timezone.utc).date()
    parser.add_argument("--seeds", default="0,1,2", help="by comma")
    parser.add_argument("--only", default="*", help="contestants, shell-style patterns by comma")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{today.isoformat()}-loss-runs")
    parser.add_argument("--also", nargs="*", default=[], help="more overrides, for all contestants")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that one run may take")
    given = parser.parse_args()
    # Else the ranks of the run under way would be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seeds = [int(seed) for seed in given.seeds.split(",")]
    contestants = select(given.only.split(","))
    failed = runs(contestants, seeds, given.steps, given.also, given.out, given.limit)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
