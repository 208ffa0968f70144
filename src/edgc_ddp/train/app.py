"""The Hydra application: compose, check everything, then run as one rank or start all ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from edgc_ddp.train import checkpoint, validate
from edgc_ddp.train.launch import launch
from edgc_ddp.train.schema import Config, register
from edgc_ddp.train.worker import Job, work

_GRACE_SECONDS = 5
_TORCHRUN = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun gives to every rank, besides RANK."""
USAGE = 2
"""Exit status for a configuration that cannot work."""


def main() -> None:
    """Console entry point. Exits with 2 and one line for a bad configuration, 1 for a failed run."""
    register()
    # Otherwise Hydra prints its own errors and exits before they can be told apart from a crash.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        _task()
    except (HydraException, OmegaConfBaseException) as error:
        _refuse(_one_line(error))


@hydra.main(version_base="1.3", config_path="pkg://edgc_ddp.conf", config_name="config")
def _task(composed: DictConfig) -> None:
    is_rank = "RANK" in os.environ
    if is_rank and (lacking := [name for name in _TORCHRUN if name not in os.environ]):
        _refuse(
            f"RANK={os.environ['RANK']} is set, but {', '.join(lacking)} is not: start it under torchrun, "
            "or unset RANK to start nproc ranks on this machine"
        )
    if is_rank and HydraConfig.get().mode == RunMode.MULTIRUN:
        _refuse(
            "--multirun under torchrun: a second run would meet the rendezvous of the first; start "
            "the sweep as python -m edgc_ddp.train -m ... nproc=N"
        )
    try:
        config = settings(composed)
        validate.check(config, int(os.environ["WORLD_SIZE"]) if is_rank else config.nproc)
        folder = HydraConfig.get().runtime.output_dir
        # The others' folder is where they were started; rank 0's is the run's.
        if config.train.resume is None and os.environ.get("RANK", "0") == "0":
            checkpoint.check_unused(Path(folder))
    except (ValueError, OmegaConfBaseException) as error:
        _refuse(_one_line(error))
    job = Job(
        config=config,
        config_text=OmegaConf.to_yaml(composed, resolve=True),
        controller_name=HydraConfig.get().runtime.choices.get("controller", "controller"),
        folder=folder,
    )
    summary = work(job) if is_rank else _launch(job)
    if summary is not None:
        print(json.dumps(summary, allow_nan=False), flush=True)


def settings(composed: DictConfig) -> Config:
    """The composed configuration with every interpolation resolved, as dataclasses.

    The controller's part stays a dictionary: its class is the user's business.
    """
    resolved = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    # Hydra lets +key=value past the schema; this merge does not.
    typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), resolved))
    assert isinstance(typed, Config)
    return typed


def _launch(job: Job) -> Any:
    """Start ``nproc`` ranks on this machine; returns rank 0's summary."""
    return launch(work, job, job.config.nproc, "edgc_ddp.train")


def _one_line(error: BaseException) -> str:
    """The error without line breaks; a configuration error with its cause, which has the full key."""
    texts = [str(error)]
    if not isinstance(error, ValueError) and error.__cause__ is not None:
        texts.append(str(error.__cause__))
    return "; ".join(" ".join(text.split()) for text in texts)


def _refuse(message: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"edgc_ddp.train: {message}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks when the first one fails: let rank 0 say why before that.
        time.sleep(_GRACE_SECONDS)
    raise SystemExit(USAGE)


register()
