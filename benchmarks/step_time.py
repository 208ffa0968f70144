"""How long does a training step take, and where does the time go? All contestants in one run.

python -m benchmarks.step_time --hosts 2 --link 100mbit,1gbit --model gpt3m --ranks 4,16,64
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import launch, network, record
from benchmarks.contestants import Contestant, line_up, select
from benchmarks.links import Link
from benchmarks.worker import Job
from benchmarks.workloads import WORKLOADS, Workload
from edgc_ddp.options import DTYPES

_BYTES_PER_PARAMETER = 20
"""Resident memory of one contestant: gradients, buckets, residual, a clone, and factors, in fp32."""
_MEMORY_SHARE = 0.5
FORMS = {"bridged": network.bridged, "rootless": network.rootless}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--hosts", type=int, default=2)
    p.add_argument(
        "--link", default="100mbit,1gbit,unshaped", help="comma-separated, in this order"
    )
    p.add_argument("--network", choices=FORMS, default=None, help="default: bridged for root")
    p.add_argument("--model", choices=WORKLOADS, default="gpt3m")
    p.add_argument("--ranks", default="4,16,64")
    p.add_argument("--wires", default=",".join(DTYPES), help="wire_dtype of edgc")
    p.add_argument("--caps", default="default,4", help="bucket_cap_mb of edgc")
    p.add_argument("--only", default="*", help="comma-separated contestants or patterns of them")
    p.add_argument("--steps", type=int, default=30, help="measured steps per contestant")
    p.add_argument("--block", type=int, default=5, help="steps in a row before another's turn")
    p.add_argument("--keep", choices=("auto", "all", "one"), default="auto", help="alive at a time")
    p.add_argument("--pin", action="store_true", help="give each host cores of its own")
    p.add_argument("--epfml", default=None, metavar="PATH", help="checkout of epfml/powersgd")
    p.add_argument("--limit", type=float, default=3600.0, help="seconds allowed per link")
    p.add_argument("--name", default=None, help="of the result's folder; default: the model")
    p.add_argument("--out", type=Path, default=record.RESULTS)
    return p


def contestants(arguments: argparse.Namespace) -> list[Contestant]:
    """Who takes part.

    Raises:
        ValueError: an option names something that does not exist.
    """
    ranks = [int(text) for text in arguments.ranks.split(",")]
    caps = [None if text == "default" else float(text) for text in arguments.caps.split(",")]
    everyone = line_up(ranks, arguments.wires.split(","), caps, arguments.epfml is not None)
    chosen = select(everyone, arguments.only.split(","))
    if arguments.epfml is None and any(c.kind == "epfml" for c in chosen):
        raise ValueError("epfml is asked for: name a checkout of epfml/powersgd with --epfml PATH")
    # Through the parser, so that a wire that does not exist is refused before anything starts.
    return [Contestant.parse(c.name) for c in chosen]


def keep_all(keep: str, workload: Workload, count: int, hosts: int, available: float) -> bool:
    """Whether all contestants stay alive: ``auto`` asks whether half the available memory holds them.

    >>> keep_all("auto", WORKLOADS["gpt3m"], count=20, hosts=2, available=16e9)
    True
    >>> keep_all("auto", WORKLOADS["gpt2-345m-replay"], count=2, hosts=2, available=16e9)
    False
    """
    if keep != "auto":
        return keep == "all"
    needed = workload.numel * _BYTES_PER_PARAMETER * count * hosts
    return needed < _MEMORY_SHARE * available


def _available_memory() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return 0.0


def run(arguments: argparse.Namespace, command: str) -> str:
    """Measure every link, write the folder, return the table.

    Raises:
        ValueError: an option is out of its range.
        NetworkError: the network cannot be made here.
        WorkerError: a host failed.
    """
    if arguments.steps < 1 or arguments.block < 1 or arguments.hosts < 2:
        raise ValueError("expected --steps >= 1, --block >= 1 and --hosts >= 2")
    links = [Link.parse(text) for text in arguments.link.split(",")]
    everyone = contestants(arguments)
    workload = WORKLOADS[arguments.model]
    form = arguments.network or ("bridged" if os.geteuid() == 0 else "rootless")
    keep = keep_all(arguments.keep, workload, len(everyone), arguments.hosts, _available_memory())
    now = datetime.datetime.now(datetime.timezone.utc)
    config: dict[str, Any] = {
        "command": command,
        "started": now.isoformat(timespec="seconds"),
        "commit": record.commit(Path(__file__).parent),
        "machine": record.machine(),
        "model": arguments.model,
        "parameters": workload.numel,
        "batch": workload.batch,
        "hosts": arguments.hosts,
        "contestants": [c.name for c in everyone],
        "steps": arguments.steps,
        "block": arguments.block,
        "keep": keep,
        "pin": arguments.pin,
        "busy_before": {},
    }
    folder = record.folder_for(arguments.out, arguments.name or arguments.model, now.date())
    raw: dict[str, Any] = {}
    table = ""
    for link in links:
        config["busy_before"][link.name] = record.busy_before()
        print(f"{link.name}: {len(everyone)} contestants", file=sys.stderr, flush=True)
        with FORMS[form](arguments.hosts, link) as made:
            job = Job(
                contestants=tuple(config["contestants"]),
                model=arguments.model,
                steps=arguments.steps,
                block=arguments.block,
                interface=made.interface,
                keep=keep,
                pin=arguments.pin,
                epfml=arguments.epfml,
                deadline_seconds=arguments.limit,
            )
            config["rounds"] = job.rounds
            before = made.interface_bytes()
            blocks = launch.run_job(job, made)
            total = [b - a for a, b in zip(before, made.interface_bytes(), strict=True)]
            raw[link.name] = {
                "network": made.describe(),
                "total_interface_bytes": total,
                "blocks": blocks,
            }
        # After every link, so that a later one's failure costs only itself.
        table = record.write(folder, config, raw)
    return f"{table}\nwritten to {folder}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = parser().parse_args(argv)
    # Asked to end, clean up as at any other end: networks are removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(run(arguments, shlex.join(["python", "-m", "benchmarks.step_time", *argv])))
    except (ValueError, network.NetworkError, launch.WorkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
