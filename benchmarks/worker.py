"""One host's process: runs every contestant in turn, in blocks, and writes down each step's time.

Started by ``benchmarks.step_time`` under torchrun, inside an emulated network.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contestants import Contestant
from benchmarks.entrants import Entrant, enter
from benchmarks.links import Sent, sent
from benchmarks.workloads import WORKLOADS


@dataclass(frozen=True)
class Job:
    """What the launcher asks of its workers."""

    contestants: tuple[str, ...]
    model: str
    steps: int
    block: int
    interface: str
    keep: bool
    """Keep all contestants alive; else each is built for its block and dropped after it."""
    pin: bool
    epfml: str | None = None
    timeout_seconds: float = 300.0
    deadline_seconds: float = 3600.0

    @property
    def rounds(self) -> int:
        return -(-self.steps // self.block)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        read = json.loads(path.read_text())
        return cls(**{**read, "contestants": tuple(read["contestants"])})


def order(count: int, turn: int) -> list[int]:
    """Who goes when in a round: each order is followed by itself backwards, so that a slow drift of
    the machine's speed hits all alike; then the start moves on by one.

    >>> [order(3, turn) for turn in range(4)]
    [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]]
    """
    turned = [(place + turn // 2) % count for place in range(count)]
    return turned[::-1] if turn % 2 else turned


def run_block(entrant: Entrant, steps: int, interface: str) -> dict[str, Any]:
    """One settling step and ``steps`` more, between two barriers.

    Returns ``seconds`` (the settling step's first), and per step of the whole block
    ``interface_bytes`` and ``interface_packets`` (all the interface sent) and ``claimed_bytes`` (what the
    contestant says).
    The second barrier queues behind the last step's data, so nothing is still under way.
    """
    dist.barrier()
    claimed, before = entrant.claimed_bytes(), _sent(interface)
    seconds = []
    for _ in range(1 + steps):
        began = time.perf_counter()
        entrant.step()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    claimed_after, after = entrant.claimed_bytes(), _sent(interface)
    told = claimed is not None and claimed_after is not None
    return {
        "seconds": seconds,
        "interface_bytes": (after.bytes - before.bytes) / (1 + steps),
        "interface_packets": (after.packets - before.packets) / (1 + steps),
        "claimed_bytes": (claimed_after - claimed) / (1 + steps) if told else None,
    }


def _sent(interface: str) -> Sent:
    return sent(Path("/proc/net/dev").read_text(), interface)


def measure(job: Job) -> list[dict[str, Any]]:
    """All blocks in the order they ran; each holds this rank's numbers."""
    contestants = [Contestant.parse(name) for name in job.contestants]
    workload = WORKLOADS[job.model]
    weights = workload.build(0)
    alive: dict[int, Entrant] = {}
    blocks = []
    deadline = time.monotonic() + job.deadline_seconds
    for turn in range(job.rounds):
        for index in order(len(contestants), turn):
            if _anyone_late(deadline):
                raise TimeoutError(
                    f"{job.deadline_seconds:.0f} s were not enough: fewer steps or more"
                )
            entrant = alive.pop(index, None)
            if entrant is None:
                entrant = enter(contestants[index], workload, weights, job.epfml)
                entrant.settle()
            steps = min(job.block, job.steps - turn * job.block)
            block = run_block(entrant, steps, job.interface)
            blocks.append({"round": turn, "contestant": contestants[index].name, **block})
            if job.keep:
                alive[index] = entrant
            else:
                entrant.close()
                del entrant
                _give_back()
        if dist.get_rank() == 0:
            print(f"round {turn + 1} of {job.rounds}", flush=True)
    for entrant in alive.values():
        entrant.close()
    return blocks


def _give_back() -> None:
    """What the last entrant had goes back to the system, where the C library would keep it in pieces: the
    next one may need it all."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _anyone_late(deadline: float) -> bool:
    """Whether any rank's clock has passed the deadline: all ranks must stop at the same place."""
    late = torch.tensor([float(time.monotonic() > deadline)])
    dist.all_reduce(late, op=dist.ReduceOp.MAX)
    return bool(late.item())


def merge(per_rank: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The ranks' blocks side by side: each number becomes the list of the ranks' numbers.

    >>> one = [{"round": 0, "contestant": "ddp", "seconds": [1.0], "interface_bytes": 8.0,
    ...     "interface_packets": 1.0, "claimed_bytes": None}]
    >>> merge([one, one])[0]["seconds"], merge([one, one])[0]["claimed_bytes"]
    ([[1.0], [1.0]], [None, None])
    """
    merged = []
    for blocks in zip(*per_rank, strict=True):
        names = {(block["round"], block["contestant"]) for block in blocks}
        assert len(names) == 1, f"the ranks ran different blocks side by side: {names}"
        keys = ("seconds", "interface_bytes", "interface_packets", "claimed_bytes")
        first = {key: blocks[0][key] for key in ("round", "contestant")}
        merged.append({**first, **{key: [block[key] for block in blocks] for key in keys}})
    return merged


def _pin(rank: int, hosts: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // hosts)
    first = rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    job = Job.load(arguments.job)
    torch.set_num_threads(1)
    if job.pin:
        _pin(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_seconds))
    blocks = measure(job)
    per_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, blocks)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(merge(per_rank)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
