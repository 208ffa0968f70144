"""All measurements, on every rank of a started group. The same code on CPU and CUDA.

What is compared is measured in turn, in short blocks, so that whatever else slows the machine hits all
alike; medians are taken per rank and averaged over ranks, so that all ranks hold equal numbers.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.controllers import FixedRank
from edgc_ddp.doctor.advise import Advice, advise, settle
from edgc_ddp.doctor.compressor import Gradients, SilentLane, run_alone
from edgc_ddp.doctor.facts import DEFAULT_CAP_MB, Average, Cost, Facts, Step
from edgc_ddp.doctor.subject import Loss, find
from edgc_ddp.lane import Lane, Task, open_lane
from edgc_ddp.options import DTYPES
from edgc_ddp.reducers.bucket import Settings
from edgc_ddp.train.worker import process_group

_PLAIN = Step(0, "fp32", DEFAULT_CAP_MB)
_RANKS_COSTED = (2, 4, 8, 16, 32, 64, 128)
_WARM_UP_STEPS = 4
_SIZES = tuple(4096 * 8**power for power in range(6))
_LONG_S = 0.25
_REPEATS = 7
_INT8_CHANNELS = 4


@dataclass(frozen=True)
class Job:
    """What to measure; plain values, since it crosses processes."""

    model: str
    batch: int
    ranks: tuple[int, ...]
    """Ranks of the real steps."""
    wire: str
    """Wire type of the real steps."""
    caps_mb: tuple[float, ...]
    steps: int
    """Measured steps of each contestant."""
    block: int


@record
def work(job: Job) -> dict[str, Any] | None:
    """Measure as one rank. Rank 0 returns the facts and the advice as plain values, the others None."""
    with process_group() as device:
        return _measure(job, device)


def _measure(job: Job, device: torch.device) -> dict[str, Any] | None:
    if dist.get_world_size() < 2:
        raise ValueError("a single process has nothing to average: start at least two")
    torch.manual_seed(0)
    model, loss = find(job.model)(device, job.batch)
    bench = Bench(model.to(device), loss, device)
    try:
        facts = _facts(job, bench)
        advice = _advice(job, bench, facts)
    finally:
        bench.lane.close()
    told = {"facts": asdict(facts), "advice": asdict(advice)}
    return told if dist.get_rank() == 0 else None


def _advice(job: Job, bench: Bench, facts: Facts) -> Advice:
    """The first advice that keeps its promise beside plain DDP; lower ranks are tried until one does."""
    advice = advise(facts, job.caps_mb)
    while (setting := advice.setting) is not None:
        chosen = Step(setting.rank, setting.wire, setting.cap_mb)
        measured = bench.steps([_PLAIN, chosen], job.steps, job.block).steps
        settled = settle(advice, *(step.seconds for step in measured))
        if settled.setting is not None:
            return settled
        advice = advise(facts, job.caps_mb, below=setting.rank)
        if advice.setting is None:
            return settled
    return advice


def told(answer: dict[str, Any]) -> tuple[Facts, Advice]:
    """What :func:`work` returned, as objects again."""
    return Facts.of(answer["facts"]), Advice.of(answer["advice"])


def _facts(job: Job, bench: Bench) -> Facts:
    parameters = [p for p in bench.model.parameters() if p.requires_grad]
    highest = Gradients(bench.model, 0, Settings(), DEFAULT_CAP_MB, bench.device).largest_side // 2
    if highest < 1:
        raise ValueError(f"--model={job.model}: no matrix that could be compressed")
    ranks = sorted({rank for rank in (*_RANKS_COSTED, *job.ranks) if rank <= highest} or {1})
    timed = [rank for rank in sorted(set(job.ranks)) if rank <= highest] or ranks[-1:]
    wanted = [_PLAIN, *(Step(rank, job.wire, DEFAULT_CAP_MB) for rank in timed)]
    times = bench.steps(wanted, job.steps, job.block)
    return Facts(
        model=job.model,
        named=":" not in job.model,
        batch=job.batch,
        world_size=dist.get_world_size(),
        device=str(bench.device.type),
        parameters=sum(p.numel() for p in parameters),
        dense_bytes=float(sum(p.numel() * p.element_size() for p in parameters)),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        all_reduces=bench.all_reduces(),
        wire=job.wire,
        costs=tuple(
            bench.cost(ranks[nth], wire)
            for wire in DTYPES
            for nth in _shown(len(ranks), f"compressor, {wire}")
        ),
        averages=bench.averages([0, *ranks], job.wire),
        steps=times.steps,
    )


class Bench:
    """One rank's means of measuring. All methods are collective."""

    def __init__(self, model: nn.Module, loss: Loss, device: torch.device) -> None:
        self.model, self.loss, self.device = model, loss, device
        self.lane: Lane = open_lane(None, device, _INT8_CHANNELS)

    def agreed(self, values: Sequence[float]) -> list[float]:
        """Means over ranks."""
        return [value / self.lane.world_size for value in self.lane.sum_over_ranks(values)]

    def seconds(self, work: Callable[[], object]) -> float:
        """How long ``work`` takes until the device is done."""
        self._settle()
        began = time.perf_counter()
        work()
        self._settle()
        return time.perf_counter() - began

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all_reduces(self) -> tuple[tuple[float, float], ...]:
        """(bytes, seconds) of an all-reduce by itself, from short to as long as is bearable."""
        points = []
        for size in _SIZES:
            payload = torch.zeros(size // 4, device=self.device)

            average = partial(self._all_reduce, payload)
            times = [self.seconds(average) for _ in range(_REPEATS)]
            (mean,) = self.agreed([median(times[1:])])
            points.append((float(size), mean))
            if mean > _LONG_S:
                break
        return tuple(points)

    def _all_reduce(self, payload: torch.Tensor) -> None:
        self.lane.all_reduce(payload, 0).wait()

    def cost(self, rank: int, wire: str) -> Cost:
        """The compressor's own work, all ranks at it at once as in training."""
        settings = Settings(DTYPES[wire])
        gradients = Gradients(self.model, rank, settings, DEFAULT_CAP_MB, self.device)
        lane = SilentLane(self.lane.world_size, self.device)
        self.agreed([0.0])
        times = [self.seconds(lambda: run_alone(gradients.tasks(lane))) for _ in range(_REPEATS)]
        sent = lane.sent_bytes / _REPEATS
        payload, work = self.agreed([sent / lane.traffic(1.0), median(times[1:])])
        return Cost(rank, wire, payload, work)

    def averages(self, ranks: Sequence[int], wire: str) -> tuple[Average, ...]:
        """T(r): the whole average at each rank, link and work together, nothing beside it."""
        settings = Settings(DTYPES[wire])
        times: dict[int, list[float]] = {rank: [] for rank in ranks}
        contestants = {
            rank: Gradients(self.model, rank, settings, DEFAULT_CAP_MB, self.device)
            for rank in ranks
        }
        for turn in range(_REPEATS):
            for rank, gradients in list(contestants.items())[:: 1 if turn % 2 else -1]:
                self.agreed([0.0])
                times[rank].append(self.seconds(partial(self._run, gradients)))
        means = self.agreed([median(own[1:]) for own in times.values()])
        return tuple(Average(rank, mean) for rank, mean in zip(times, means, strict=True))

    def _run(self, gradients: Gradients) -> None:
        futures = [self.lane.submit(partial(_same, task)) for task in gradients.tasks(self.lane)]
        for future in futures:
            future.wait()

    def steps(self, wanted: Sequence[Step], steps: int, block: int) -> Times:
        """Time so many real steps of each, and as many without averaging, in turn; the first of each
        block settles caches."""
        contestants = [Contestant(self.model, step) for step in wanted]
        times: list[list[float]] = [[] for _ in wanted]
        forwards: list[float] = []
        backwards: list[float] = []
        try:
            for contestant in contestants:
                for _ in range(_WARM_UP_STEPS):
                    contestant.step(self.loss)
            for turn in _shown(-(-steps // block), f"steps of {len(wanted)} settings"):
                # Each order is followed by itself backwards, or a drift would favour the first.
                for place in range(len(wanted))[:: 1 if turn % 2 else -1]:
                    step = partial(contestants[place].step, self.loss)
                    times[place] += [self.seconds(step) for _ in range(block + 1)][1:]
                alone = [self._alone(contestants[0], turn) for _ in range(block + 1)][1:]
                forwards += [forward for forward, _ in alone]
                backwards += [backward for _, backward in alone]
        finally:
            for contestant in contestants:
                contestant.close()
        quarters = [_quarters(own) for own in times]
        forward_s, backward_s, *means = self.agreed(
            [median(forwards), median(backwards), *(each for three in quarters for each in three)]
        )
        seen = [
            replace(step, low_s=means[3 * k], seconds=means[3 * k + 1], high_s=means[3 * k + 2])
            for k, step in enumerate(wanted)
        ]
        return Times(forward_s, backward_s, tuple(seen))

    def _alone(self, contestant: Contestant, step: int) -> tuple[float, float]:
        """Seconds of one forward and one backward that averages nothing."""
        contestant.ddp.zero_grad(set_to_none=True)
        with contestant.ddp.no_sync():
            self._settle()
            began = time.perf_counter()
            loss = self.loss(contestant.ddp, step)
            self._settle()
            forward = time.perf_counter() - began
            return forward, self.seconds(loss.backward)


@dataclass(frozen=True)
class Times:
    """What :meth:`Bench.steps` measured, in seconds."""

    forward_s: float
    backward_s: float
    steps: tuple[Step, ...]


def _shown(count: int, what: str) -> Iterable[int]:
    """A bar on rank 0, since minutes may pass."""
    shown = dist.get_rank() == 0
    name = f"edgc_ddp.doctor: {what}"
    bar: Iterable[int] = tqdm(range(count), desc=name, disable=not shown, file=sys.stderr)
    return bar


def _quarters(seconds: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile.

    >>> _quarters([1.0, 2.0, 3.0, 10.0]), _quarters([7.0])
    ([1.75, 2.5, 4.75], [7.0, 7.0, 7.0])
    """
    # One alone has none.
    known = seconds if len(seconds) > 1 else [*seconds, *seconds]
    return quantiles(known, n=4, method="inclusive")


def _same(task: Task) -> Task:
    return task


class Contestant:
    """One way of averaging, with a DDP of its own around a copy that shares the model's weights."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        module = copy.deepcopy(model)
        for mine, theirs in zip(module.parameters(), model.parameters(), strict=True):
            mine.data = theirs.data
        self.ddp = DistributedDataParallel(module, bucket_cap_mb=step.cap_mb)
        self._state: EDGCState | None = None
        self._steps = 0
        if step.rank:
            self._state = EDGCState(FixedRank(step.rank), module, wire_dtype=step.wire)
            self.ddp.register_comm_hook(self._state, edgc_hook)

    def step(self, loss: Loss) -> None:
        """Forward, backward and the average. No optimizer, which costs everyone the same."""
        self.ddp.zero_grad(set_to_none=True)
        loss(self.ddp, self._steps).backward()  # type: ignore[no-untyped-call]
        self._steps += 1

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
