"""One rank's life: process group, model and hook, training, the run's records, the way out."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Functions in it take the default group of the moment it is imported as a default argument, and would keep
# that group from ending; DDP imports it.
import torch.distributed.nn.functional  # noqa: F401
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.train import checkpoint, data
from edgc_ddp.train.loop import Run, hook_metrics, make_optimizer, resume, train, whole_metrics
from edgc_ddp.train.model import build
from edgc_ddp.train.record import Recorder, bytes_saved_ratio, environment, joint_digest, plain
from edgc_ddp.train.schema import Config, TrainConfig
from edgc_ddp.train.validate import hook_options, identity, make_controller

if TYPE_CHECKING:
    from edgc_ddp.train.pipeline import Pipeline


@dataclass(frozen=True)
class Job:
    """What a launcher hands to every rank: plain values only, since they cross processes."""

    config: Config
    config_text: str
    """The resolved configuration as YAML."""
    controller_name: str
    folder: str
    """Rank 0's is the run's folder."""


@record
def work(job: Job) -> dict[str, Any] | None:
    """Train as one rank of a started group. Rank 0 returns the run's summary, the others None."""
    with process_group() as device:
        return _run(job, device)


def _run(job: Job, device: torch.device) -> dict[str, Any] | None:
    folders: list[Any] = [job.folder]
    dist.broadcast_object_list(folders, src=0)
    run = _set_up(job, Path(folders[0]), device)
    try:
        return _train(job, run)
    finally:
        if run.state is not None:
            run.state.close()


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """The group of torchrun's environment: NCCL with a GPU for each local rank, else Gloo.

    What uses it, DDP above all, should live in a function that is called inside and has returned by then.
    """
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    # One store serves all attempts of torchrun --max-restarts: without names of its own, an attempt
    # would find the addresses of processes that are gone.
    store, rank, world_size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt-{attempt}", store)
    members: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size}
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **members)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **members)
        torch.set_num_threads(_common_threads(local_size))
    try:
        yield device
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        # DDP must be gone before the group is. As the group's last owner it would end the group with
        # Python's lock held, while a thread of Gloo may need that lock to drop a tensor: a deadlock.
        gc.collect()
        dist.destroy_process_group()


def _common_threads(local_size: int) -> int:
    """This rank's share of its machine's cores, or the smallest share of any rank: ranks with other numbers
    of threads would round otherwise."""
    mine = torch.tensor(max(1, (os.cpu_count() or 1) // local_size))
    dist.all_reduce(mine, dist.ReduceOp.MIN)
    return int(mine)


def _pipeline(config: Config, device: torch.device) -> Pipeline | None:
    if config.parallel.pp == 1:
        return None
    # Here, since torch.distributed.pipelining takes seconds, which runs without stages need not pay.
    from edgc_ddp.train.pipeline import Pipeline

    return Pipeline(config, device)


def _set_up(job: Job, folder: Path, device: torch.device) -> Run:
    config, rank, world_size = job.config, dist.get_rank(), dist.get_world_size()
    corpus = _load_text(config, rank)
    controller = make_controller(config.controller, config.trust)
    pipeline = _pipeline(config, device)
    if pipeline is not None:
        ddp = pipeline.ddp
    else:
        model = build(config.model, config.seed, device)
        ddp = DistributedDataParallel(model, bucket_cap_mb=config.train.bucket_cap_mb)
    state = None
    if config.hook.register:
        options = hook_options(config.hook)
        if pipeline is not None:
            own = pipeline.controller(controller)
            group = pipeline.replica_group
            state = EDGCState(controller=own, model=ddp.module, process_group=group, **options)
            ddp.register_comm_hook(state, pipeline.clock.hook)
        else:
            state = EDGCState(controller=controller, model=ddp.module, **options)
            ddp.register_comm_hook(state, edgc_hook)
    return Run(
        config=config,
        folder=folder,
        rank=rank,
        world_size=world_size,
        device=device,
        ddp=ddp,
        optimizer=make_optimizer(ddp.module, config),
        corpus=corpus,
        state=state,
        identity={**identity(config, controller, world_size), "text": _name_of(corpus)},
        pipeline=pipeline,
    )


def _load_text(config: Config, rank: int) -> data.Corpus:
    if int(os.environ["LOCAL_RANK"]) == 0 and (problem := data.prepare(config.data)):
        print(f"edgc_ddp.train: {problem}", file=sys.stderr)
    dist.barrier()
    corpus = data.load(config.data)
    _require_equal("text", _name_of(corpus))
    shortest = min(len(corpus.train), len(corpus.valid))
    if shortest <= config.model.context + 1:
        raise ValueError(f"model.context={config.model.context}: the text has {shortest} bytes")
    return corpus


def _name_of(corpus: data.Corpus) -> str:
    return f"{corpus.source} {corpus.sha256}"


def _require_equal(what: str, value: str) -> None:
    """Raise RuntimeError on all ranks unless all have the same. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    if len(set(everyone)) > 1:
        raise RuntimeError(f"the ranks have different {what}: {everyone}")


def _train(job: Job, run: Run) -> dict[str, Any] | None:
    begin, first_step = time.perf_counter(), 0
    settings = job.config.train
    source = _source(settings, run.folder)
    if source is not None:
        first_step = resume(run, source)
        if first_step > settings.steps:
            raise ValueError(
                f"train.resume={settings.resume}: {source} has finished step {first_step} of "
                f"train.steps={settings.steps}; raise train.steps"
            )
    if run.rank == 0:
        _describe(job, run, source)
    recorder = Recorder(run.folder if run.rank == 0 else None, first_step, settings.steps)
    try:
        val_loss = train(run, first_step, recorder)
        summary = _summary(job, run, val_loss, first_step, time.perf_counter() - begin)
        if run.pipeline is None:
            _require_equal("final plans", summary["final_plan_digest"])
        recorder.write("summary", **summary)
    finally:
        recorder.close()
    return summary if run.rank == 0 else None


def _source(settings: TrainConfig, folder: Path) -> Path | None:
    """The checkpoint to go on from; None at a start. Collective."""
    if settings.resume is None:
        return None
    if settings.resume == checkpoint.AUTO:
        return checkpoint.own_newest(folder)
    return checkpoint.find(settings.resume)


def _describe(job: Job, run: Run, resumed_from: Path | None) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.yaml").write_text(job.config_text)
    facts = environment() | {
        "world_size": run.world_size,
        "backend": dist.get_backend(),
        "device": str(run.device),
        "threads": torch.get_num_threads(),
        "data": {
            "source": run.corpus.source,
            "asked": job.config.data.source,
            "sha256": run.corpus.sha256,
            "train_bytes": len(run.corpus.train),
            "valid_bytes": len(run.corpus.valid),
        },
        "controller": job.controller_name,
        "parameters": run.identity["parameters"],
        "resumed_from": None if resumed_from is None else str(resumed_from),
    }
    (run.folder / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")


def _summary(
    job: Job, run: Run, val_loss: float, first_step: int, seconds: float
) -> dict[str, Any]:
    """``seconds`` are those of this attempt, which began with ``first_step``."""
    metrics = whole_metrics(run, job.config.train.steps)
    digest, pipeline = metrics["plan_digest"], {}
    if run.pipeline is not None:
        own = hook_metrics(run, job.config.train.steps)
        stages = run.pipeline.summaries(run.state, own)
        digest, pipeline = joint_digest(stages), {"stages": stages}
    wire_bytes, dense_bytes = metrics["wire_bytes"], metrics["dense_bytes"]
    summary = {
        "controller": job.controller_name,
        "steps": job.config.train.steps,
        "val_loss": val_loss,
        "first_step": first_step,
        "seconds": round(seconds, 3),
        "wire_bytes": wire_bytes,
        "dense_bytes": dense_bytes,
        "bytes_saved_ratio": bytes_saved_ratio(wire_bytes, dense_bytes),
        "mean_rank": metrics["run_mean_rank"],
        "final_mean_rank": metrics["mean_rank"],
        "final_plan_digest": digest,
        "world_size": run.world_size,
        **pipeline,
        "run": str(run.folder),
        "report": f"python -m edgc_ddp.report {shlex.quote(str(run.folder))}",
    }
    return plain(summary)  # type: ignore[no-any-return]
