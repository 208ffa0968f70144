"""Starts one torchrun per host inside a network, waits with a limit, and ends what it started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.network import Network
from benchmarks.worker import Job

_PORT = 29500
_ROOT = Path(__file__).parent.parent
_LAST_LINES = 60
_GRACE_SECONDS = 10


class WorkerError(RuntimeError):
    """A host's process failed or was late; the text holds the end of its log."""


def run_job(job: Job, network: Network) -> list[dict[str, Any]]:
    """Run a job on all hosts of a network and return its blocks, all ranks side by side.

    Raises:
        WorkerError: a host failed, or all were not done in time. Everything started has ended.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        job.save(folder / "job.json")
        with ExitStack() as stack:
            logs = [
                stack.enter_context((folder / f"host{host}.log").open("w"))
                for host in range(network.hosts)
            ]
            started = [
                subprocess.Popen(
                    _command(network, host, folder),
                    cwd=_ROOT,
                    env=_environment(network),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                for host, log in enumerate(logs)
            ]
            try:
                _wait(started, folder, job.deadline_seconds + 60, job.rounds)
            finally:
                _stop(started)
        blocks: list[dict[str, Any]] = json.loads((folder / "blocks.json").read_text())
        return blocks


def _command(network: Network, host: int, folder: Path) -> list[str]:
    return [
        *network.prefixes[host],
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(network.hosts), "--node-rank", str(host), "--nproc-per-node", "1"),
        *("--master-addr", network.addresses[0], "--master-port", str(_PORT)),
        *("--local-addr", network.addresses[host], "--max-restarts", "0"),
        *("-m", "benchmarks.worker"),
        *("--job", str(folder / "job.json"), "--out", str(folder / "blocks.json")),
    ]


def _environment(network: Network) -> dict[str, str]:
    paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    # A path that the caller put first stays first: it may name another build to measure.
    paths = [paths[2], *paths[:2]] if paths[2] else paths[:2]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "GLOO_SOCKET_IFNAME": network.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _wait(
    started: list[subprocess.Popen[bytes]], folder: Path, seconds: float, rounds: int
) -> None:
    deadline = time.monotonic() + seconds
    shown = 0
    while any(process.poll() is None for process in started):
        failed = [host for host, process in enumerate(started) if process.poll()]
        if failed:
            raise WorkerError(f"host {failed[0]} failed:\n{_end_of(folder, failed[0])}")
        if time.monotonic() > deadline:
            raise WorkerError(f"not done after {seconds:.0f} s; host 0 said:\n{_end_of(folder, 0)}")
        done = (folder / "host0.log").read_text().count("\nround ")
        if done > shown:
            shown = done
            print(f"  round {shown} of {rounds}", file=sys.stderr, flush=True)
        time.sleep(0.5)
    failed = [host for host, process in enumerate(started) if process.returncode]
    if failed:
        raise WorkerError(f"host {failed[0]} failed:\n{_end_of(folder, failed[0])}")


def _end_of(folder: Path, host: int) -> str:
    lines = (folder / f"host{host}.log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-_LAST_LINES:])


def _stop(started: list[subprocess.Popen[bytes]]) -> None:
    """End the agents by id; each hands the signal on to its worker. The network ends the rest."""
    for process in started:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in started:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=_GRACE_SECONDS)
