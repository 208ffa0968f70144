"""Do aligned ranks let all pipeline stages finish together, and leave less error?

    python -m benchmarks.stage_alignment --link 100mbit --rank 8 --out benchmarks/results/stages

Two stages on two hosts each (root: network namespaces), one training run for each way to set the stages'
ranks. Each window tells when each stage had averaged, counted from the step's begin; the medians over the
windows of the second half are shown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.links import Link
from benchmarks.network import Network, bridged

WAYS = ("common", "aligned", "selective")
_PORT = 29511
_HOSTS = 4


def train(network: Network, overrides: Sequence[str], limit: float) -> dict[str, Any]:
    """The summary of one run with a rank on each host. Raises RuntimeError when a rank fails."""
    processes = []
    for host, prefix in enumerate(network.prefixes):
        environment = os.environ | {
            "RANK": str(host),
            "WORLD_SIZE": str(network.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": network.interface,
            "OMP_NUM_THREADS": "1",
        }
        command = [*prefix, sys.executable, "-m", "edgc_ddp.train", *overrides]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        end = time.monotonic() + limit
        outputs = [p.communicate(timeout=max(1, end - time.monotonic()))[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in processes]}")
    summary: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return summary


def settled(run: Path) -> list[dict[str, float]]:
    """Each stage's medians over the windows of the run's second half."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    windows = [row["stages"] for row in rows if row["kind"] == "stages"]
    later = windows[len(windows) // 2 :]

    def middle(stage: int, key: str) -> float:
        known = [window[stage][key] for window in later if window[stage][key] is not None]
        return median(known) if known else math.nan

    keys = ("rank", "backward", "ended", "finish", "residual")
    return [{key: middle(stage, key) for key in keys} for stage in range(len(windows[0]))]


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: a row for each way and stage, the step's end being its last stage's finish."""
    lines = [
        "Milliseconds from the step's begin; t_b is the backward of one micro-batch.",
        "",
        "| ranks | stage | rank | t_b | backward ends | averaged | step ends | residual share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, stages in results.items():
        end = max(stage["finish"] for stage in stages)
        for place, stage in enumerate(stages):
            times = [stage[key] for key in ("backward", "ended", "finish")]
            cells = [f"{1e3 * seconds:.0f}" for seconds in (*times, end)]
            rank = f"{stage['rank']:.0f}" if stage["rank"] else "dense"
            lines.append(
                f"| {' | '.join([way, str(place), rank, *cells, format(stage['residual'], '.3f')])} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run every way in turn; write results.json and table.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="100mbit", help="each host's link (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the first stage")
    parser.add_argument("--ways", default=",".join(WAYS), help="of: %(default)s")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--limit", type=float, default=600, help="seconds for a run")
    parser.add_argument("--out", type=Path, default=Path("stages"))
    parser.add_argument("overrides", nargs="*", help="more options of edgc_ddp.train")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, float]]] = {}
    with bridged(_HOSTS, Link.parse(given.link)) as network:
        (given.out / "network.json").write_text(json.dumps(network.describe(), indent=1) + "\n")
        for way in given.ways.split(","):
            overrides = [
                *["data=stdlib", "model=small", "model.width=128", "model.heads=4"],
                *["model.context=128", "train.batch_size=32", f"train.steps={given.steps}"],
                *["train.eval_every=0", "train.eval_windows=8", "parallel=pipeline"],
                *["controller=fixed", f"controller.rank={given.rank}", "controller.window=15"],
                f"parallel.ranks={way}",
                f"hydra.run.dir={given.out.absolute() / way}",
                *given.overrides,
            ]
            summary = train(network, overrides, given.limit)
            (given.out / f"{way}.json").write_text(json.dumps(summary, indent=1) + "\n")
            results[way] = settled(given.out / way)
            (given.out / "table.md").write_text(table(results) + "\n")
            print(table(results), flush=True)


if __name__ == "__main__":
    main()
