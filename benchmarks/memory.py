"""How much more memory than plain DDP does each method take? In multiples of the gradients' bytes.

    python -m benchmarks.memory --model gpt2-345m-replay --rank 16

Every contestant is a job of its own: two ranks over loopback. Told is the larger peak of their
resident memory over the steps after it has settled, and how much that is above plain DDP's. Writes nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contestants import Contestant
from benchmarks.entrants import enter
from benchmarks.workloads import WORKLOADS

_RANKS = 2
_ROOT = Path(__file__).parents[1]


def peak_bytes(status: str) -> int:
    """The peak of the resident memory, from the text of ``/proc/self/status``.

    >>> peak_bytes("VmPeak:  9 kB\\nVmHWM:  2048 kB\\nVmRSS:  7 kB")
    2097152
    """
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def measure(contestant: Contestant, model: str, steps: int) -> int:
    """This rank's peak over ``steps`` steps."""
    entrant = enter(contestant, WORKLOADS[model], None, None)
    entrant.settle()
    # Begins the peak anew.
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(steps):
        entrant.step()
    peak = peak_bytes(Path("/proc/self/status").read_text())
    entrant.close()
    return peak


def run(name: str, model: str, steps: int, limit: float) -> int:
    """Start the ranks; returns the larger peak in bytes. Raises RuntimeError when they fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(_RANKS), "-m", "benchmarks.memory", "--worker", name]
    command += ["--model", model, "--steps", str(steps)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return int(done.stdout)


def work(name: str, model: str, steps: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    peak = torch.tensor(measure(Contestant.parse(name), model, steps))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(peak.item(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def table(peaks: dict[str, int], gradient_bytes: int) -> str:
    """What every contestant takes above ``ddp``, as a Markdown table.

    >>> print(table({"ddp": 3_000_000, "powersgd-r4": 5_000_000}, 1_000_000))
    | contestant | peak, MB | above plain DDP, x gradients |
    |---|---:|---:|
    | ddp | 3 | 0.00 |
    | powersgd-r4 | 5 | 2.00 |
    """
    lines = ["| contestant | peak, MB | above plain DDP, x gradients |", "|---|---:|---:|"]
    for name, peak in peaks.items():
        above = (peak - peaks["ddp"]) / gradient_bytes
        lines.append(f"| {name} | {peak / 1e6:.0f} | {above:.2f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=WORKLOADS, default="gpt2-345m-replay")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds for a contestant")
    parser.add_argument("--worker", metavar="CONTESTANT", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        work(given.worker, given.model, given.steps)
        return 0
    rank = f"r{given.rank}"
    names = ["ddp", f"powersgd-{rank}", f"edgc-{rank}-fp32", f"edgc-{rank}-bf16"]
    names += [f"edgc-{rank}-bf16~bf16", f"edgc-{rank}-int8~bf16"]
    peaks = {}
    for name in names:
        peaks[name] = run(name, given.model, given.steps, given.limit)
        print(f"{name}: {peaks[name] / 1e6:.0f} MB", file=sys.stderr, flush=True)
    print(table(peaks, 4 * WORKLOADS[given.model].numel))
    return 0


if __name__ == "__main__":
    sys.exit(main())
