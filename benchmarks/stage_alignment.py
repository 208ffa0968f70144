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
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures.drawing import canvas
from benchmarks.links import Link
from benchmarks.network import Network, bridged

WAYS = ("common", "aligned", "selective")
_PORT = 29511
_HOSTS = 4


def train(network: Network, overrides: Sequence[str], limit: float) -> dict[str, Any]:
    """The summary of one run with a rank on each host. Raises RuntimeError when a rank fails."""
    processes = []
    cores = sorted(os.sched_getaffinity(0))
    for host, prefix in enumerate(network.prefixes):
        # Stages in a row of hosts: no stage's averaging may take another's cores, as on real hosts.
        core = cores[host * len(cores) // network.hosts]
        environment = os.environ | {
            "RANK": str(host),
            "WORLD_SIZE": str(network.hosts),
            # The hosts share this machine's cores.
            "LOCAL_RANK": str(host),
            "LOCAL_WORLD_SIZE": str(network.hosts),
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": network.interface,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            *prefix,
            "taskset",
            "-c",
            str(core),
            sys.executable,
            "-m",
            "edgc_ddp.train",
            *overrides,
        ]
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


Times = list[dict[str, float]]
"""A way's stages, in order."""


def middle_of(repeats: Sequence[Times]) -> Times:
    """Each stage's medians over the repeats; a value that no repeat has stays nan.

    >>> middle_of([[{"finish": 1.0}], [{"finish": 9.0}], [{"finish": 2.0}]])
    [{'finish': 2.0}]
    """

    def middle(stage: int, key: str) -> float:
        known = [times[stage][key] for times in repeats if not math.isnan(times[stage][key])]
        return median(known) if known else math.nan

    return [{key: middle(stage, key) for key in times} for stage, times in enumerate(repeats[0])]


def step_end(times: Times) -> float:
    """Seconds until the last stage has averaged.

    >>> step_end([{"finish": 1.0}, {"finish": 2.5}])
    2.5
    """
    return max(stage["finish"] for stage in times)


def table(results: dict[str, list[Times]]) -> str:
    """Markdown: medians for each way and stage; then each way's step against the first one's."""
    lines = [
        "Milliseconds from the step's begin; t_b is the backward of one micro-batch.",
        "",
        "| ranks | stage | rank | t_b | backward ends | averaged | step ends | residual share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, repeats in results.items():
        end = median(step_end(times) for times in repeats)
        for place, stage in enumerate(middle_of(repeats)):
            times = [stage[key] for key in ("backward", "ended", "finish")]
            cells = [f"{1e3 * seconds:.0f}" for seconds in (*times, end)]
            rank = f"{stage['rank']:.0f}" if stage["rank"] else "dense"
            lines.append(
                f"| {' | '.join([way, str(place), rank, *cells, format(stage['residual'], '.3f')])} |"
            )
    lines.append("")
    first, *others = results
    for way in others:
        pairs = zip(results[way], results[first], strict=False)
        ratios = sorted(step_end(times) / step_end(base) for times, base in pairs)
        lines.append(
            f"Step end of {way} / {first}, by repeat: median {median(ratios):.3f}, "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f}."
        )
    return "\n".join(lines)


def draw(results: dict[str, list[Times]], path: Path) -> None:
    """Finish times and residual energy of every stage under each way."""
    figure, (times_axes, energy_axes) = canvas(2)
    width = 0.8 / len(results)
    for place, (way, repeats) in enumerate(results.items()):
        stages = middle_of(repeats)
        at = [stage + (place - (len(results) - 1) / 2) * width for stage in range(len(stages))]
        times_axes.bar(at, [1e3 * stage["finish"] for stage in stages], width, label=way)
        energy_axes.bar(at, [stage["residual"] for stage in stages], width, label=way)
    for axes, title in (
        (times_axes, "averaged, ms from the step's begin"),
        (energy_axes, "residual energy / gradient energy"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(middle_of(next(iter(results.values()))))))
        axes.set_xlabel("stage")
        axes.spines[["top", "right"]].set_visible(False)
    energy_axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def compare(
    out: Path,
    link: str = "100mbit",
    rank: int = 8,
    ways: Sequence[str] = WAYS,
    steps: int = 120,
    repeats: int = 3,
    limit: float = 600,
    overrides: Sequence[str] = (),
) -> dict[str, list[Times]]:
    """Train ``repeats`` times under every way, taking turns; writes all that was measured to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Times]] = {way: [] for way in ways}
    with bridged(_HOSTS, Link.parse(link)) as network, tempfile.TemporaryDirectory() as runs:
        (out / "network.json").write_text(json.dumps(network.describe(), indent=1) + "\n")
        for repeat in range(repeats):
            for way in ways:
                run = Path(runs) / f"{way}-{repeat}"
                options = [
                    *["data=stdlib", "model=small", "model.width=128", "model.heads=4"],
                    *["model.context=128", "train.batch_size=32", f"train.steps={steps}"],
                    *["train.eval_every=0", "train.eval_windows=8", "parallel=pipeline"],
                    *["controller=fixed", f"controller.rank={rank}", "controller.window=15"],
                    *[f"parallel.ranks={way}", f"hydra.run.dir={run}", *overrides],
                ]
                train(network, options, limit)
                results[way].append(settled(run))
                (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, out / "stages.png")
    return results


def main() -> None:
    """Run every way in turn; write results.json, table.md and stages.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="100mbit", help="each host's link (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the first stage")
    parser.add_argument("--ways", default=",".join(WAYS), help="of: %(default)s")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3, help="runs under each way")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a run")
    parser.add_argument("--out", type=Path, default=Path("stages"))
    parser.add_argument("overrides", nargs="*", help="more options of edgc_ddp.train")
    given = vars(parser.parse_args())
    results = compare(**(given | {"ways": given["ways"].split(",")}))
    (given["out"] / "table.md").write_text(table(results) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
