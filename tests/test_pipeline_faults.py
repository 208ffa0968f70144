"""A pipeline that loses a rank: the run ends with an error, no process stays, and it goes on bit-equal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_app_launch import PYTHON, SHORT, summary_of
from test_pipeline_launch import PIPELINE, launch

from edgc_ddp.train import checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

# Aligned ranks follow the clock, so only the common rank can repeat itself.
OPTIONS = [*SHORT, *PIPELINE, "parallel.ranks=common", "train.checkpoint_every=5", "train.steps=60"]
ROOTS = "outputs/*/*/checkpoints"


def workers(folder: Path) -> list[int]:
    """Process ids of the ranks that run in this folder, by rank: they are started in that order."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            here = (entry / "cwd").resolve() == folder.resolve()
            if here and b"spawn_main" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def await_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 200
    while not any(checkpoint.complete(root) for root in folder.glob(ROOTS)):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("rank", [0, 3], ids=["first stage", "last stage"])
def test_a_killed_stage_ends_the_run_which_goes_on_from_its_checkpoint(
    rank: int, tmp_path: Path
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = summary_of(launch(tmp_path / "whole", *OPTIONS))

    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [*PYTHON, *OPTIONS],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        await_checkpoint(folder, process)
        running = workers(folder)
        assert len(running) == 4
        os.kill(running[rank], signal.SIGKILL)
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1 and "a rank failed" in said, said
    assert workers(folder) == []

    (newest,) = (checkpoint.complete(root)[-1] for root in folder.glob(ROOTS))
    assert newest.name < "step-00000060"
    again = summary_of(launch(folder, *OPTIONS, f"train.resume={newest}"))
    for same in ("val_loss", "final_plan_digest"):
        assert again[same] == whole[same]
