"""The training loop: what one rank does between the first step and the last."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState
from edgc_ddp.stages import StageCounts
from edgc_ddp.train import checkpoint, data
from edgc_ddp.train.record import Recorder, headline
from edgc_ddp.train.schema import Config, ScheduleConfig, TrainConfig

if TYPE_CHECKING:
    from edgc_ddp.train.pipeline import Pipeline


@dataclass(frozen=True)
class Run:
    """Everything one rank trains with. ``state`` is None without the hook."""

    config: Config
    folder: Path
    rank: int
    world_size: int
    device: torch.device
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    corpus: data.Corpus
    state: EDGCState | None
    identity: dict[str, Any]
    pipeline: Pipeline | None = None
    """This rank's place in the pipeline, when the model is cut into stages."""

    @property
    def replica(self) -> int:
        """Which share of the texts is this rank's."""
        return self.rank if self.pipeline is None else self.pipeline.replica

    @property
    def replicas(self) -> int:
        """How many ranks the gradient is averaged over."""
        return self.world_size if self.pipeline is None else self.pipeline.replicas


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of step 0, 1, ...: a linear rise, then constant or half a cosine down to the floor.

    >>> schedule = ScheduleConfig(kind="cosine", warmup=0.1, floor=0.1)
    >>> [round(learning_rate(step, 100, 1.0, schedule), 3) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    rise = round(schedule.warmup * steps)
    if step < rise:
        return peak * (step + 1) / rise
    if schedule.kind == "constant":
        return peak
    done = (step - rise) / max(1, steps - rise)
    return peak * (schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * done)) / 2)


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW that decays matrices only, as GPT-2 was trained."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options = config.optimizer
    return torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def _loss(run: Run, model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    bf16 = run.config.train.bf16
    with torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = model(inputs.to(run.device))
    flat = targets.to(run.device).flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), flat, reduction=reduction)


def train_step(run: Run, step: int) -> dict[str, float]:
    """One optimizer step on this rank's texts: loss (this rank's), lr, grad_norm, seconds."""
    begin = time.perf_counter()
    train = run.config.train
    rate = learning_rate(step, train.steps, run.config.optimizer.lr, run.config.schedule)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad(set_to_none=True)
    if run.pipeline is not None:
        total = run.pipeline.backward(*_texts(run, step, 0))
        ranks = run.state.plan().values() if run.state is not None else ()
        counts = StageCounts.of(hook_metrics(run, step + 1), ranks)
        norm, total = run.pipeline.clip(train.clip or math.inf, total, counts)
    else:
        total = _accumulate(run, step)
        norm = nn.utils.clip_grad_norm_(run.ddp.parameters(), train.clip or math.inf)
    run.optimizer.step()
    if run.pipeline is not None:
        run.pipeline.count()
    values = {"loss": total.item(), "lr": rate, "grad_norm": norm.item()}
    return values | {"seconds": time.perf_counter() - begin}


def _texts(run: Run, step: int, micro: int) -> tuple[Tensor, Tensor]:
    return data.batch(
        run.corpus.train,
        run.config.train.batch_size,
        run.config.model.context,
        seed=run.config.seed,
        rank=run.replica,
        step=step,
        micro=micro,
    )


def _accumulate(run: Run, step: int) -> Tensor:
    """Averaged gradients of a step's micro-batches; returns this rank's mean loss."""
    train = run.config.train
    total = torch.zeros((), device=run.device)
    for micro in range(train.accumulate):
        inputs, targets = _texts(run, step, micro)
        last = micro == train.accumulate - 1
        # Only the last backward of a step may average: DDP adds the others up locally.
        with contextlib.nullcontext() if last else run.ddp.no_sync():
            loss = _loss(run, run.ddp, inputs, targets, "mean") / train.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss (nats per byte) on the held-out windows, over all ranks. Collective."""
    train = run.config.train
    inputs, targets = data.held_out_windows(
        run.corpus.valid,
        train.eval_windows,
        run.config.model.context,
        rank=run.replica,
        world_size=run.replicas,
    )
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)
    model = run.ddp.module
    for some_inputs, some_targets in zip(
        torch.split(inputs, train.batch_size), torch.split(targets, train.batch_size), strict=True
    ):
        if run.pipeline is not None:
            loss = run.pipeline.held_out_loss(some_inputs, some_targets)
        else:
            loss = _loss(run, model, some_inputs, some_targets, "sum")
        sums[0] += loss.double()
        sums[1] += some_targets.numel()
    dist.all_reduce(sums)
    # Every stage has counted the same bytes, the last one alone their loss.
    stages = 1 if run.pipeline is None else run.pipeline.stages
    return float(sums[0] / (sums[1] / stages))


def hook_metrics(run: Run, finished_steps: int) -> dict[str, Any]:
    """The hook's metrics; without a hook, what plain DDP sends for as many steps."""
    if run.state is not None:
        return dict(run.state.metrics())
    size = sum(p.numel() * p.element_size() for p in run.ddp.parameters())
    sent = round(finished_steps * size * 2 * (run.replicas - 1) / run.replicas)
    return {
        "phase": "no hook",
        "mean_rank": 0.0,
        "run_mean_rank": 0.0,
        "entropy": math.nan,
        "residual": math.nan,
        "span_seconds": math.nan,
        "wire_bytes": sent,
        "dense_bytes": sent,
        "plan_digest": "",
    }


def whole_metrics(run: Run, finished_steps: int) -> dict[str, Any]:
    """:func:`hook_metrics`, of a pipeline's rank with bytes and ranks of all stages instead of its own."""
    whole = {} if run.pipeline is None else run.pipeline.whole_metrics()
    return {**hook_metrics(run, finished_steps), **whole}


def train(run: Run, first_step: int, recorder: Recorder) -> float:
    """Steps ``first_step`` to the last. Returns the last held-out loss. Collective."""
    settings = run.config.train
    told = len(run.state.history) if run.state is not None else 0
    if run.pipeline is not None:
        run.pipeline.begin(run.state)
    # A run that was ended after its last step has only this to tell.
    val_loss = evaluate(run) if first_step == settings.steps else math.nan
    for step in range(first_step, settings.steps):
        values = train_step(run, step)
        # The hook counts steps too, but from 1; the loop's own count is the one on record.
        row: dict[str, Any] = {**whole_metrics(run, step + 1), **values, "step": step}
        recorder.write("step", **row)
        recorder.advance(row)
        saves = bool(settings.checkpoint_every) and _is_due(
            step, settings.checkpoint_every, settings
        )
        if run.pipeline is not None:
            _record_stages(run, run.pipeline, step, recorder, saves)
        elif run.state is not None:
            history = run.state.history
            for decision in history[told:]:
                recorder.write("decision", **decision)
            told = len(history)
        if _is_due(step, settings.eval_every, settings):
            val_loss = evaluate(run)
            recorder.write("eval", step=step, val_loss=val_loss)
            progress = f"step {step + 1}/{settings.steps} {headline(row)}"
            recorder.say(f"{progress} held-out loss {val_loss:.4f}")
        if saves:
            save(run, step + 1)
    return val_loss


def _record_stages(
    run: Run, pipeline: Pipeline, step: int, recorder: Recorder, saves: bool
) -> None:
    """The stages' news, exchanged when they are due. Collective.

    Decisions are told before a checkpoint too: a run that goes on from it does not repeat them.
    """
    due = pipeline.board.due(step + 1)
    if due:
        pipeline.exchange(run.state)
        rows = [asdict(row) for row in pipeline.board.rows]
        recorder.write("stages", step=step, stages=rows)
    if due or saves or step + 1 == run.config.train.steps:
        for decision in pipeline.new_decisions(run.state):
            recorder.write("decision", **decision)


def _is_due(step: int, period: int, settings: TrainConfig) -> bool:
    finished = step + 1
    return finished == settings.steps or (period > 0 and finished % period == 0)


def save(run: Run, finished_steps: int) -> None:
    """Write a checkpoint. Collective."""
    training = {"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    part = checkpoint.part_file(0) if run.rank == 0 else None
    if run.pipeline is not None:
        training["board"] = run.pipeline.board.state_dict()
        part = checkpoint.part_file(run.pipeline.stage) if run.replica == 0 else None
    hook = None if run.state is None else run.state.state_dict()
    root = run.folder / "checkpoints"
    checkpoint.save(root, finished_steps, training, hook, run.identity, part=part)


def resume(run: Run, folder: Path) -> int:
    """Load a checkpoint; returns the step to go on with. Raises ValueError when it does not fit."""
    step = checkpoint.check(folder, run.identity)
    stage = 0 if run.pipeline is None else run.pipeline.stage
    content = checkpoint.read(folder / checkpoint.part_file(stage))
    run.ddp.module.load_state_dict(content["model"])
    options = [{**group} for group in run.optimizer.param_groups]
    run.optimizer.load_state_dict(content["optimizer"])
    for group, own in zip(run.optimizer.param_groups, options, strict=True):
        # This run's options, as its configuration says; the averages are the earlier run's.
        group.update({name: value for name, value in own.items() if name != "params"})
    if run.pipeline is not None:
        run.pipeline.board.load_state_dict(content["board"])
    if run.state is not None:
        run.state.load_state_dict(checkpoint.read(folder / checkpoint.hook_file(run.rank)))
    return step
