"""The application's own training with an outsider's hook: ``python -m benchmarks.outsider_run --help``.

What differs from ``python -m edgc_ddp.train`` is the hook alone; the last line printed is the summary.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.outsiders import outsider, outsider_hook
from edgc_ddp.train import validate, worker
from edgc_ddp.train.app import settings
from edgc_ddp.train.launch import launch


@dataclass(frozen=True)
class OutsiderJob:
    """What every rank is told."""

    kind: str
    start_iter: int
    job: worker.Job


def compose(kind: str, start_iter: int, folder: Path, overrides: list[str]) -> OutsiderJob:
    """The job, every check made that ``edgc_ddp.train`` makes. Raises ValueError as it does."""
    outsider(kind, start_iter)
    with hydra.initialize_config_module("edgc_ddp.conf", version_base="1.3"):
        composed = hydra.compose("config", [*overrides, "hook.register=false"])
    config = settings(composed)
    validate.check(config, config.nproc)
    text = OmegaConf.to_yaml(composed, resolve=True)
    return OutsiderJob(kind, start_iter, worker.Job(config, text, kind, str(folder)))


@record
def work(told: OutsiderJob) -> dict[str, Any] | None:
    """Train as one rank of a started group; rank 0 returns the run's summary."""
    with worker.process_group() as device:
        return _run(told, device)


def _run(told: OutsiderJob, device: torch.device) -> dict[str, Any] | None:
    run = worker._set_up(told.job, Path(told.job.folder), device)
    state: Any = outsider(told.kind, told.start_iter)
    run.ddp.register_comm_hook(state, outsider_hook)
    return worker._train(told.job, replace(run, state=state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["bf16", "4bit", "1bit"])
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("overrides", nargs="*", help="of edgc_ddp.train, as +experiment=default")
    parser.add_argument("--start-iter", type=int, default=2, help="dense iterations before")
    given = parser.parse_args()
    told = compose(given.kind, given.start_iter, given.folder, given.overrides)
    summary = launch(work, told, told.job.config.nproc, "benchmarks.outsider_run")
    print(json.dumps(summary, allow_nan=False), flush=True)


if __name__ == "__main__":
    main()
