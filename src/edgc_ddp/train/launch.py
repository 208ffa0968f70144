"""Starts all ranks of a program on this machine, without torchrun."""

from __future__ import annotations

import sys
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(work: Callable[[Any], Any], job: Any, nproc: int, program: str) -> Any:
    """Run ``work(job)`` as each of ``nproc`` ranks in torchrun's environment; returns rank 0's answer.

    ``work`` is a module-level function and ``job`` can be pickled, since they cross processes. Raises
    SystemExit(1) when a rank failed, after its error was printed under the name of ``program``.
    """
    with tempfile.TemporaryDirectory(prefix="edgc_ddp-") as folder:
        return _launch(work, job, nproc, program, folder)


def _launch(work: Callable[[Any], Any], job: Any, nproc: int, program: str, errors: str) -> Any:
    """``errors`` is where a rank leaves its last words."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr="127.0.0.1",
        # torch would make a folder of its own for them, and leave it.
        logs_specs=DefaultLogsSpecs(log_dir=errors),
    )
    try:
        return elastic_launch(config, work)(job)[0]
    except ChildFailedError as error:
        print(f"{program}: a rank failed\n{error}", file=sys.stderr)
        raise SystemExit(1) from None
    except SignalException as error:
        # Ctrl-C or a scheduler's SIGTERM, already passed on to all ranks: nothing to explain.
        raise SystemExit(128 + error.sigval) from None
