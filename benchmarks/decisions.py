"""What does deciding on ranks cost? The time of every window's end, beside that of an iteration.

    python -m benchmarks.decisions --model gpt3m,gpt25m

Ends of windows: two ranks over loopback, one thread each; every controller has a DDP instance of its own,
and they take turns, a window each. Timed on rank 0 is an end as a whole: what was seen is summed over
ranks, the controller is asked, ranks compare their answers, factors are made for the new ranks. The first
ends are left out: warm-up and first factors. The share is that of the median end in ``--between``
iterations without communication.

Looks: what a sampled iteration takes above another, rank 16, one process, nothing sent, in turn; the
share is of one in ten. Writes nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from benchmarks.entrants import no_communication
from benchmarks.workloads import WORKLOADS
from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.controllers import Accordion, AdaptiveController, EntropyController, FixedRank, LGreco
from edgc_ddp.decisions import Controller, Plan, Sampling
from edgc_ddp.doctor.compressor import Gradients, SilentLane, run_alone
from edgc_ddp.observer import Observer
from edgc_ddp.reducers.bucket import Settings

_CPU = torch.device("cpu")
_RANK = 16
_RANKS = 2
_WINDOW = 5
_SKIPPED = 3


def _entropy(policy: str) -> Controller:
    return EntropyController(
        policy=policy,
        window=_WINDOW,
        warmup=_WINDOW,
        warmup_limit=_WINDOW,
        r_max=32,
        r_min=8,
        scope="matrix",
    )


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "fixed": lambda: FixedRank(_RANK, window=_WINDOW),
    "edgc": lambda: _entropy("edgc"),
    "edgc_code": lambda: _entropy("edgc_code"),
    "accordion": lambda: Accordion(high=32, low=8, window=_WINDOW),
    "lgreco": lambda: LGreco(rank=_RANK, window=_WINDOW),
    "adaptive": lambda: AdaptiveController(window=_WINDOW),
}


@dataclass(frozen=True)
class Cost:
    """One model under one controller, seconds."""

    model: str
    controller: str
    end: float
    largest: float
    iteration: float


class _Run:
    """One model trained under one controller."""

    def __init__(self, model: str, controller: Controller | None) -> None:
        self.ends: list[float] = []
        self.iterations: list[float] = []
        self._ddp = DistributedDataParallel(WORKLOADS[model].build(0))
        if controller is None:
            self._ddp.register_comm_hook(None, no_communication)
            return
        state = EDGCState(controller=controller, model=self._ddp.module, start_iter=2)
        self._ddp.register_comm_hook(state, edgc_hook)
        decide = state.engine._decide

        def timed(lane: object) -> None:
            began = time.perf_counter()
            decide(lane)  # type: ignore[arg-type]
            self.ends.append(time.perf_counter() - began)

        # No seam of the product's is for this: nobody but a benchmark asks.
        state.engine._decide = timed  # type: ignore[method-assign,assignment]

    def window(self) -> None:
        for _ in range(_WINDOW):
            began = time.perf_counter()
            self._ddp.zero_grad(set_to_none=True)
            self._ddp(len(self.iterations)).backward()
            self.iterations.append(time.perf_counter() - began)


def measure(models: Sequence[str], windows: int) -> list[Cost]:
    """On every rank alike; the numbers are this rank's."""
    costs = []
    for model in models:
        alone = _Run(model, None)
        runs = {name: _Run(model, make()) for name, make in CONTROLLERS.items()}
        for _ in range(windows + _SKIPPED):
            for run in (alone, *runs.values()):
                run.window()
        iteration = median(alone.iterations[_WINDOW * _SKIPPED :])
        for name, run in runs.items():
            ends = run.ends[_SKIPPED:]
            costs.append(Cost(model, name, median(ends), max(ends), iteration))
    return costs


def look_seconds(model: str, repeats: int) -> float:
    """What a look at the gradients adds to an iteration, median of both."""
    gradients = Gradients(
        WORKLOADS[model].build(0), _RANK, Settings(min_compression_rate=0), 25.0, _CPU
    )
    lane = SilentLane(_RANKS, _CPU)
    layout = gradients.registry.layout(_RANKS)
    observer = Observer(layout, _CPU)
    ranks = {matrix.name: gradients.memory.slots[matrix.name].rank for matrix in layout.matrices}
    plan = Plan(ranks, phase="looks", sampling=Sampling())
    observer.reset(plan)
    without, within = [], []
    # The first pass makes residuals and settles caches.
    for turn in range(1 + repeats):
        began = time.perf_counter()
        run_alone(gradients.tasks(lane))
        between = time.perf_counter()
        for bucket in gradients.buckets:
            observer.look(bucket, plan, turn)
        run_alone(gradients.tasks(lane, observer))
        observer.steps += 1
        within.append(time.perf_counter() - between)
        without.append(between - began)
    return median(within[1:]) - median(without[1:])


def _work(rank: int, folder: str, models: Sequence[str], windows: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", _RANKS)
    limit = timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS, timeout=limit)
    costs = measure(models, windows)
    if rank == 0:
        Path(folder, "costs.json").write_text(json.dumps([asdict(cost) for cost in costs]))
    dist.barrier()
    dist.destroy_process_group()


def run(models: Sequence[str], windows: int) -> list[Cost]:
    """Start the ranks and wait for rank 0's answer."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (folder, models, windows), nprocs=_RANKS)
        return [Cost(**cost) for cost in json.loads(Path(folder, "costs.json").read_text())]


def table(costs: Sequence[Cost], between: int) -> str:
    """As Markdown.

    >>> print(table([Cost("gpt3m", "edgc", 0.004, 0.009, 0.08)], 50))
    | model | controller | end of a window, ms | largest | of 50 iterations |
    |---|---|---:|---:|---:|
    | gpt3m | edgc | 4.0 | 9.0 | 0.10 % |
    """
    lines = [
        f"| model | controller | end of a window, ms | largest | of {between} iterations |",
        "|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {c.model} | {c.controller} | {1e3 * c.end:.1f} | {1e3 * c.largest:.1f} | "
        f"{c.end / (between * c.iteration):.2%} |".replace("%", " %")
        for c in costs
    ]
    return "\n".join(lines)


def look_table(looks: Mapping[str, float], iterations: Mapping[str, float]) -> str:
    """As Markdown, of seconds by model.

    >>> print(look_table({"gpt3m": 0.009}, {"gpt3m": 0.09}))
    | model | a look, ms | one in ten |
    |---|---:|---:|
    | gpt3m | 9.0 | 1.00 % |
    """
    lines = ["| model | a look, ms | one in ten |", "|---|---:|---:|"]
    lines += [
        f"| {model} | {1e3 * look:.1f} | {look / iterations[model] / 10:.2%} |".replace("%", " %")
        for model, look in looks.items()
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt3m,gpt25m", help=f"by comma: {', '.join(WORKLOADS)}")
    parser.add_argument("--windows", type=int, default=20, help="timed, of each controller")
    parser.add_argument("--between", type=int, default=50, help="iterations of a window")
    given = parser.parse_args(argv)
    for name in (models := given.model.split(",")):
        if name not in WORKLOADS:
            parser.error(f"--model {name}: expected some of {', '.join(WORKLOADS)}")
    if min(given.windows, given.between) < 1:
        parser.error("--windows and --between: expected numbers of 1 or more")
    torch.set_num_threads(1)
    costs = run(models, given.windows)
    looks = {model: look_seconds(model, given.windows) for model in models}
    print(table(costs, given.between))
    print("\n" + look_table(looks, {cost.model: cost.iteration for cost in costs}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
