"""How far is the hook's own work above what its arithmetic and its memory traffic need?

    python -m benchmarks.floor --model gpt3m,gpt25m --ranks 4,16,64

One thread, no process group: the reducer runs with collectives that send nothing. The floor is
max(6 m n r flops at this machine's matrix rate, 7 entries of 4 bytes read or written for each of m n at
its copy rate): three products of PowerSGD's iteration; gradient, residual and their sum to form A, A for
Q, A and the residual to write the residual, the average. Beside it stand the hook's four products of these
shapes with nothing around them (the fourth is for a residual of each rank's own, which 6 m n r leaves out):
what the work has above them is the hook's own, what they have above the floor is the matrix library's, far
from its rate where few columns meet. Wire types and products take turns; medians. Writes nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.workloads import WORKLOADS
from edgc_ddp.decisions import MatrixSpec
from edgc_ddp.doctor.compressor import Gradients, SilentLane, run_alone
from edgc_ddp.options import DTYPES
from edgc_ddp.reducers.bucket import Settings

_FLOPS = 6
_ENTRIES_MOVED = 7
_SIDE = 1024
_COPIED = 1 << 24
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rates:
    """What one thread of this machine does in a second."""

    flops: float
    moved_bytes: float


@dataclass(frozen=True)
class Work:
    """One model at one rank and wire type, seconds."""

    model: str
    rank: int
    wire: str
    seconds: float
    floor: float
    products: float


def floor_seconds(sides: Sequence[tuple[int, int, int]], rates: Rates) -> float:
    """The least time for matrices of these rows, columns and ranks.

    >>> floor_seconds([(10, 20, 5)], Rates(flops=6000.0, moved_bytes=1e9))
    1.0
    >>> floor_seconds([(10, 20, 5)], Rates(flops=1e12, moved_bytes=2800.0))
    2.0
    """
    flops = sum(_FLOPS * m * n * r for m, n, r in sides)
    moved = sum(4 * _ENTRIES_MOVED * m * n for m, n, _ in sides)
    return max(flops / rates.flops, moved / rates.moved_bytes)


def measure_rates(repeats: int) -> Rates:
    """A large product and a large copy, the best of several: what the machine can do at all."""
    a, b = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
    out = torch.empty(_SIDE, _SIDE)
    source, target = torch.randn(_COPIED), torch.zeros(_COPIED)
    products = [_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(repeats)]
    copies = [_seconds(lambda: target.copy_(source)) for _ in range(repeats)]
    return Rates(2 * _SIDE**3 / min(products), 2 * 4 * _COPIED / min(copies))


def _seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def measure(
    models: Sequence[str], ranks: Sequence[int], wires: Sequence[str], repeats: int
) -> list[Work]:
    """All combinations; the wire types of one rank take turns, as many as memory holds at a time."""
    rates = measure_rates(repeats)
    pairs = [(model, rank) for model in models for rank in ranks]
    return [work for model, rank in pairs for work in _in_turns(model, rank, wires, repeats, rates)]


def _in_turns(
    model: str, rank: int, wires: Sequence[str], repeats: int, rates: Rates
) -> list[Work]:
    module, lane = WORKLOADS[model].build(0), SilentLane(2, _CPU)
    settings = [Settings(DTYPES[wire], min_compression_rate=0) for wire in wires]
    cases = [Gradients(module, rank, chosen, 25.0, _CPU) for chosen in settings]
    slots = cases[0].memory.slots.values()
    sides = [(s.spec.rows, s.spec.cols, s.rank) for s in slots if s.spec is not None]
    works: list[Callable[[], object]] = [partial(_run, case, lane) for case in cases]
    by_bucket = [
        [s.spec for s in bucket.slots if s.spec is not None] for bucket in cases[0].buckets
    ]
    operands = [[_operands(spec, rank) for spec in specs] for specs in by_bucket]
    works.append(partial(_multiply, operands))
    taken: list[list[float]] = [[] for _ in works]
    # The first pass makes residuals and settles caches.
    for turn in range(1 + repeats):
        for work, seconds in zip(works, taken, strict=True):
            took = _seconds(work)
            if turn:
                seconds.append(took)
    least, products = floor_seconds(sides, rates), median(taken.pop())
    return [
        Work(model, rank, wire, median(seconds), least, products)
        for wire, seconds in zip(wires, taken, strict=True)
    ]


def _run(gradients: Gradients, lane: SilentLane) -> None:
    run_alone(gradients.tasks(lane))


def _operands(spec: MatrixSpec, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    rank = min(rank, spec.rows)
    return (
        torch.randn(spec.rows, spec.cols),
        torch.randn(rank, spec.rows),
        torch.randn(rank, spec.cols),
    )


def _multiply(buckets: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]]) -> None:
    """P, Q, what they leave and the average, one after the other for a bucket, as the hook takes them."""
    for operands in buckets:
        for a_MN, _, q_RN in operands:
            torch.mm(q_RN, a_MN.t())
        for a_MN, p_RM, _ in operands:
            torch.mm(p_RM, a_MN)
        for scale in (1e-6, -1e-6):
            for a_MN, p_RM, q_RN in operands:
                # Small, so that A does not grow from turn to turn.
                a_MN.addmm_(p_RM.t(), q_RN, alpha=scale)


def table(works: Sequence[Work]) -> str:
    """As Markdown.

    >>> print(table([Work("gpt3m", 16, "bf16", 0.03, 0.02, 0.025)]))
    | model | rank | wire | work, ms | products, ms | floor, ms | of the floor |
    |---|---:|---|---:|---:|---:|---:|
    | gpt3m | 16 | bf16 | 30.0 | 25.0 | 20.0 | 1.50 |
    """
    lines = [
        "| model | rank | wire | work, ms | products, ms | floor, ms | of the floor |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {w.model} | {w.rank} | {w.wire} | {1e3 * w.seconds:.1f} | {1e3 * w.products:.1f} | "
        f"{1e3 * w.floor:.1f} | {w.seconds / w.floor:.2f} |"
        for w in works
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt3m,gpt25m", help=f"by comma: {', '.join(WORKLOADS)}")
    parser.add_argument("--ranks", default="4,16,64")
    parser.add_argument("--wires", default="fp32,bf16,int8")
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args(argv)
    for name in (models := given.model.split(",")):
        if name not in WORKLOADS:
            parser.error(f"--model {name}: expected some of {', '.join(WORKLOADS)}")
    torch.set_num_threads(1)
    ranks = [int(rank) for rank in given.ranks.split(",")]
    print(table(measure(models, ranks, given.wires.split(","), given.repeats)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
