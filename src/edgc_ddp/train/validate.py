"""Every check that can be made before a process is started; errors name option, value and remedy."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.torch_version import TorchVersion

from edgc_ddp import EDGCState
from edgc_ddp.checkpoint import plain_options
from edgc_ddp.decisions import Controller, is_controller
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.registry import Registry
from edgc_ddp.train import checkpoint
from edgc_ddp.train.model import shapes, skeleton
from edgc_ddp.train.schema import Config, HookConfig, ParallelConfig
from edgc_ddp.train.trust import check_targets

SOURCES = ("shakespeare", "stdlib")
SCHEDULES = ("cosine", "constant")
PIPELINE_SCHEDULES = ("1f1b", "gpipe")
STAGE_RANKS = ("aligned", "common", "selective", "own")


def make_controller(options: Any, trust: Sequence[str] = ()) -> Controller:
    """The controller that the ``controller`` part describes. Raises ValueError when it cannot be, or is
    neither of edgc_ddp nor of the modules ``trust``."""
    if not isinstance(options, Mapping) or "_target_" not in options:
        raise ValueError(
            f"controller={options!r}: expected a _target_ and its options; choose one with "
            "controller=edgc, or point --config-dir at a folder with controller/<name>.yaml"
        )
    check_targets(options, trust)
    try:
        controller = instantiate(dict(options), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        raise ValueError(f"controller: {cause if cause is not None else error}") from error
    if not is_controller(controller):
        raise ValueError(
            f"controller._target_={options['_target_']}: gives {type(controller).__name__}, which has "
            "no init(layout) and decide(state, observation, step)"
        )
    return controller  # type: ignore[no-any-return]


def hook_options(hook: HookConfig) -> dict[str, Any]:
    """The keyword arguments of EDGCState among the ``hook`` part."""
    return {name: value for name, value in vars(hook).items() if name != "register"}


def identity(config: Config, controller: Controller, world_size: int) -> dict[str, Any]:
    """What a checkpoint and a run that goes on from it must have in common."""
    registered = config.hook.register
    return {
        "world_size": world_size,
        "controller": type(controller).__name__ if registered else None,
        "options": plain_options(controller) if registered else {},
        "parameters": shapes(skeleton(config.model)),
        "stages": config.parallel.pp,
        "pipeline": _pipeline_identity(config.parallel) if registered else {},
    }


def _pipeline_identity(parallel: ParallelConfig) -> dict[str, Any]:
    """The options that the stages' controllers and the times they have measured depend on."""
    if parallel.pp == 1:
        return {}
    names = ["ranks", "schedule", "microbatches"]
    if parallel.ranks == "selective":
        names.append("compressed")
    if parallel.ranks != "own":
        names.append("calibration_steps")
    return {name: getattr(parallel, name) for name in names}


def check(config: Config, world_size: int) -> None:
    """Raises ValueError for the first thing that cannot work."""
    _check_run(config, world_size)
    _check_model(config)
    _check_learning(config)
    _check_parallel(config, world_size)
    controller = make_controller(config.controller, config.trust)
    if config.hook.register and config.parallel.pp == 1:
        _check_names(config, controller, world_size)
    try:
        EDGCState(controller=controller, **hook_options(config.hook)).close()
    except ValueError as error:
        raise ValueError(f"hook.{error}") from error
    if config.train.resume == checkpoint.AUTO:
        _check_auto_resume(config)
        if (newest := _own_newest()) is not None:
            checkpoint.check(newest, identity(config, controller, world_size))
    elif config.train.resume is not None:
        folder = checkpoint.find(config.train.resume)
        step = checkpoint.check(folder, identity(config, controller, world_size))
        if step >= config.train.steps:
            raise ValueError(
                f"train.resume={folder}: has finished step {step} of train.steps={config.train.steps}; "
                "raise train.steps"
            )


def _check_names(config: Config, controller: Controller, world_size: int) -> None:
    """What a controller says of the model's matrices (patterns of names, say), before a process starts."""
    model = skeleton(config.model)
    registry = Registry(model, ParameterMemory(0, torch.float32))
    registry.slots(list(model.parameters()))
    try:
        controller.init(registry.layout(world_size))
    except ValueError as error:
        raise ValueError(f"controller.{error}") from error


def _check_auto_resume(config: Config) -> None:
    if not config.train.checkpoint_every:
        raise ValueError(
            f"train.resume={checkpoint.AUTO}: there is nothing to go on from, since "
            "train.checkpoint_every=0; set it to a number of steps"
        )
    if HydraConfig.initialized() and "${now:" in _folder_pattern():
        raise ValueError(
            f"train.resume={checkpoint.AUTO}: the run's folder is named by the time, so another attempt "
            "would look for its checkpoints elsewhere; name the folder, as hydra.run.dir=outputs/mine"
        )


def _own_newest() -> Path | None:
    """The checkpoint that this run will go on from, as far as this process knows its folder."""
    if not HydraConfig.initialized() or os.environ.get("RANK", "0") != "0":
        return None
    root = Path(HydraConfig.get().runtime.output_dir) / "checkpoints"
    return checkpoint.newest_whole(root)[0]


def _folder_pattern() -> str:
    """The run's folder as it was written, before the time was filled in."""
    hydra = HydraConfig.get()
    part = hydra.sweep if hydra.mode == RunMode.MULTIRUN else hydra.run
    return " ".join(OmegaConf.to_container(part, resolve=False).values())  # type: ignore[union-attr]


def _check_run(config: Config, world_size: int) -> None:
    train = config.train
    _at_least("nproc", config.nproc, 1, "one process per core or GPU")
    _at_least("seed", config.seed, 0, "any whole number from 0 on")
    if config.seed >= 2**63:
        raise ValueError(f"seed={config.seed}: expected less than 2^63; choose a smaller one")
    _at_least("train.steps", train.steps, 1, "the number of optimizer steps")
    _at_least("train.batch_size", train.batch_size, 1, "texts per rank and micro-batch")
    _at_least("train.accumulate", train.accumulate, 1, "1 = a step after every micro-batch")
    _at_least("train.eval_every", train.eval_every, 0, "0 = only at the end")
    _at_least("train.eval_windows", train.eval_windows, world_size, "at least one for each rank")
    _at_least("train.checkpoint_every", train.checkpoint_every, 0, "0 = never")
    _at_least("train.clip", train.clip, 0, "0 = no clipping")
    _above("train.bucket_cap_mb", train.bucket_cap_mb, 0, "DDP's default is 25")
    _one_of("data.source", config.data.source, SOURCES)


def _check_model(config: Config) -> None:
    model = config.model
    for name in ("width", "layers", "heads", "context"):
        _at_least(f"model.{name}", getattr(model, name), 1, "model=small is a start")
    if model.width % model.heads:
        raise ValueError(
            f"model.width={model.width}: not a multiple of model.heads={model.heads}; change one"
        )


def _check_parallel(config: Config, world_size: int) -> None:
    parallel, train, layers = config.parallel, config.train, config.model.layers
    pp, parts = parallel.pp, parallel.microbatches
    _at_least("parallel.pp", pp, 1, "1 = no pipeline")
    _at_least("parallel.microbatches", parts, 1, "4 is a start")
    _at_least("parallel.calibration_steps", parallel.calibration_steps, 1, "5 is usual")
    _one_of("parallel.schedule", parallel.schedule, PIPELINE_SCHEDULES)
    _one_of("parallel.ranks", parallel.ranks, STAGE_RANKS)
    dp = max(1, world_size // pp) if parallel.dp is None else parallel.dp
    _at_least("parallel.dp", dp, 1, "null = nproc / parallel.pp")
    if pp * dp != world_size:
        raise ValueError(
            f"nproc={world_size}: parallel.pp={pp} times parallel.dp={dp} is {pp * dp}; set nproc to that, "
            "or leave parallel.dp=null and make nproc a multiple of parallel.pp"
        )
    if pp == 1:
        return
    if TorchVersion(torch.__version__) < "2.7":
        raise ValueError(
            f"parallel.pp={pp}: torch {torch.__version__} has no pipelines that run here; install a newer "
            "one (2.13 is tested), or set parallel.pp=1"
        )
    if pp > layers:
        raise ValueError(
            f"parallel.pp={pp}: model.layers={layers} blocks cannot fill so many stages; lower "
            "parallel.pp or raise model.layers"
        )
    if train.batch_size % parts:
        raise ValueError(
            f"parallel.microbatches={parts}: does not divide train.batch_size={train.batch_size}; change "
            "one"
        )
    if parallel.schedule == "1f1b" and parts < pp:
        raise ValueError(
            f"parallel.microbatches={parts}: 1f1b needs one for each of parallel.pp={pp} stages; raise it "
            "or set parallel.schedule=gpipe"
        )
    if train.accumulate != 1:
        raise ValueError(
            f"train.accumulate={train.accumulate}: a pipeline accumulates over parallel.microbatches; set "
            "train.accumulate=1 and raise train.batch_size"
        )
    odd = [stage for stage in parallel.compressed if not 0 <= stage < pp]
    if odd or (parallel.ranks == "selective" and 0 not in parallel.compressed):
        raise ValueError(
            f"parallel.compressed={list(parallel.compressed)}: expected numbers of stages, 0 (the last to "
            f"finish) among them and all below parallel.pp={pp}, as [0]"
        )


def _check_learning(config: Config) -> None:
    optimizer, schedule = config.optimizer, config.schedule
    _above("optimizer.lr", optimizer.lr, 0, "1e-3 is a start")
    _above("optimizer.eps", optimizer.eps, 0, "1e-8 is usual")
    _at_least("optimizer.weight_decay", optimizer.weight_decay, 0, "0 = none")
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ValueError(
            f"optimizer.betas={list(optimizer.betas)}: expected two numbers in [0, 1), as [0.9, 0.95]"
        )
    _one_of("schedule.kind", schedule.kind, SCHEDULES)
    for name in ("warmup", "floor"):
        value = getattr(schedule, name)
        if not 0 <= value <= 1:
            raise ValueError(f"schedule.{name}={value}: expected a share in [0, 1]; 0.1 is usual")


def _at_least(option: str, value: float, least: int, remedy: str) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{option}={value}: expected at least {least}; {remedy}")


def _above(option: str, value: float, bound: int, remedy: str) -> None:
    if not (math.isfinite(value) and value > bound):
        raise ValueError(f"{option}={value}: expected a number above {bound}; {remedy}")


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option}={value}: expected one of {', '.join(choices)}")
