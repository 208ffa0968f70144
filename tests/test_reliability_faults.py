"""Processes that fail, stall, stop or are told to stop: a clear error in time, and a clean exit.

Each case runs real processes, since what matters is their exit code and what they print on the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults
SCRIPT = Path(__file__).parent / "reliability" / "job.py"
CRASHES = ("terminate called", "Fatal Python error", "Segmentation fault", "core dumped")
SECONDS = 100


class Job:
    """``world`` processes of the job script, all in one way of ending."""

    def __init__(self, tmp_path: Path, way: str, world: int = 2) -> None:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), way, str(rank), str(world), str(tmp_path / "store")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(world)
        ]

    def ready(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]

    def end(self) -> list[tuple[int, str]]:
        """Exit code and everything printed, of each rank; a process that does not end fails the test."""
        ends = []
        try:
            for process in self.processes:
                out, err = process.communicate(timeout=SECONDS)
                ends.append((process.returncode, out + err))
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return ends


@pytest.mark.parametrize(
    "way", ["plain exit", "destroy", "close", "close then destroy", "destroy then close", "drop"]
)
def test_a_finished_run_exits_cleanly(tmp_path: Path, way: str) -> None:
    for code, printed in Job(tmp_path, way).end():
        assert code == 0, printed
        assert not any(crash in printed for crash in CRASHES), printed


@pytest.mark.parametrize("way", ["raise", "raise in backward", "raise then destroy", "sys.exit"])
def test_an_exception_in_the_loop_ends_the_process(tmp_path: Path, way: str) -> None:
    for code, printed in Job(tmp_path, way).end():
        assert code == 3 if way == "sys.exit" else code == 1, printed
        assert way == "sys.exit" or "my own error" in printed
        assert not any(crash in printed for crash in CRASHES), printed


def test_an_error_in_the_controller_reaches_the_trainer(tmp_path: Path) -> None:
    for code, printed in Job(tmp_path, "controller").end():
        assert code == 0 and "caught: " in printed and "controller said no" in printed, printed
        assert not any(crash in printed for crash in CRASHES), printed


def test_ctrl_c_ends_training(tmp_path: Path) -> None:
    job = Job(tmp_path, "for ever")
    job.ready()
    time.sleep(0.3)
    for process in job.processes:
        process.send_signal(signal.SIGINT)
    for code, printed in job.end():
        assert code != 0
        assert not any(crash in printed for crash in CRASHES), printed


def test_a_killed_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path, "for ever", world=3)
    job.ready()
    time.sleep(0.3)
    job.processes[1].kill()
    began = time.monotonic()
    ends = job.end()
    assert time.monotonic() - began < 30
    for code, printed in (ends[0], ends[2]):
        assert code == 1 and "Error" in printed, printed
        assert not any(crash in printed for crash in CRASHES), printed


def test_a_stalled_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    (stalled, _), (code, printed) = Job(tmp_path, "stall").end()
    assert stalled == 0
    assert code == 1 and "imed out" in printed, printed
    assert not any(crash in printed for crash in CRASHES), printed


def elastic(folder: Path, kills: list[tuple[int, int]]) -> list[str]:
    """Train under torchrun; ``kills`` are (rank, step at which it is killed), one for each restart."""
    folder.mkdir()
    script = Path(__file__).parent / "reliability" / "elastic_job.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "4", "--monitor-interval", "0.1"]
    job = subprocess.Popen(
        [*command, str(script), str(folder), "0.03" if kills else "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        for restart, (rank, step) in enumerate(kills):
            pid = folder / f"pid-{restart}-{rank}"
            until(lambda pid=pid: bool(read(pid)))
            until(lambda rank=rank, step=step: int(read(folder / f"step-{rank}") or -1) >= step)
            os.kill(int(read(pid)), signal.SIGKILL)
        _, err = job.communicate(timeout=2 * SECONDS)
        assert job.returncode == 0, err
    finally:
        # As Ctrl-C does: torchrun then ends its workers.
        job.terminate()
        job.wait()
    return [read(folder / f"end-{rank}") for rank in range(2)]


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 2 * SECONDS
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_killed_workers_end_bit_for_bit_where_an_undisturbed_run_does(tmp_path: Path) -> None:
    whole = elastic(tmp_path / "whole", [])
    killed = elastic(tmp_path / "killed", [(1, 3), (0, 24), (1, 47)])
    assert killed == whole and whole[0] == whole[1] != ""


APP = [
    *["-m", "edgc_ddp.train", "data=stdlib", "model=tiny", "model.width=32", "model.context=32"],
    *["train.batch_size=2", "train.steps=120", "train.eval_every=0", "train.eval_windows=4"],
    *["controller.window=10", "controller.warmup=8", "controller.warmup_limit=10"],
    *["controller.r_max=8", "controller.r_min=2"],
    *["train.checkpoint_every=10", "train.resume=auto", "hydra.run.dir=run"],
]
"""The folder has a name, so every attempt finds the checkpoints of those before."""


def application(folder: Path, kills: list[tuple[int, int]]) -> dict[str, Any]:
    """The summary of ``edgc_ddp.train`` under torchrun; ``kills`` are (which worker, step)."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"]
    job = subprocess.Popen(
        [*command, *APP],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        for which, step in kills:
            until(lambda step=step: last_step(folder) >= step)
            os.kill(workers_of(job.pid)[which], signal.SIGKILL)
        out, err = job.communicate(timeout=2 * SECONDS)
        assert job.returncode == 0, err
    finally:
        job.terminate()
        job.wait()
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    return summary


def steps(folder: Path) -> list[int]:
    """The steps on record in their order; those of a later attempt follow those of an earlier one."""
    # The last line may be half written.
    lines = read(folder / "run" / "metrics.jsonl").split("\n")[:-1]
    return [row["step"] for row in map(json.loads, lines) if row["kind"] == "step"]


def last_step(folder: Path) -> int:
    return (steps(folder) or [-1])[-1]


def workers_of(launcher: int) -> list[int]:
    """Processes that this torchrun has started and that are alive, in the order of their numbers."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == launcher and state != "Z":
                found.append(int(status.parent.name))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_application_goes_on_after_each_kill_under_torchrun(tmp_path: Path) -> None:
    kills = [(1, 14), (0, 55), (1, 93)]
    whole, killed = application(tmp_path / "whole", []), application(tmp_path / "killed", kills)
    for key in ("val_loss", "final_plan_digest", "wire_bytes", "dense_bytes", "mean_rank"):
        assert killed[key] == whole[key], key
    assert steps(tmp_path / "whole") == list(range(120))
    told = steps(tmp_path / "killed")
    begins = [now for before, now in zip(told, told[1:], strict=False) if now != before + 1]
    # Each attempt went on from a checkpoint, and lost no more than the steps since then.
    assert len(begins) == 3 and all(begin % 10 == 0 and begin > 0 for begin in begins), begins
    ends = [before for before, now in zip(told, told[1:], strict=False) if now != before + 1]
    assert all(end - begin < 10 for begin, end in zip(begins, ends, strict=True)), told
    facts = json.loads(read(tmp_path / "killed" / "run" / "environment.json"))
    assert Path(facts["resumed_from"]).name == f"step-{begins[-1]:08d}"
