"""docs/pipeline.md: its example runs, and it names every option and every field there is."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from edgc_ddp.train import validate
from edgc_ddp.train.pipeline import Pipeline
from edgc_ddp.train.schema import ParallelConfig

TEXT = (Path(__file__).parent.parent / "docs" / "pipeline.md").read_text()


def test_every_option_and_field_is_described() -> None:
    described = set(re.findall(r"`([\w.]+)`", TEXT))
    assert {f"parallel.{option.name}" for option in fields(ParallelConfig)} <= described
    assert {*validate.STAGE_RANKS, *validate.PIPELINE_SCHEDULES} <= described
    told = re.findall(r'^ {20}"(\w+)": ', inspect.getsource(Pipeline.summaries), re.MULTILINE)
    assert len(told) == 13 and set(told) <= described


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_for_a_model_of_ones_own_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "stages.py").write_text(example)
    # A file for each rank: in one pipe, a line and its end, written apart, may be torn by another's.
    command = "torch.distributed.run --standalone --nproc-per-node 4 --redirects 1 --log-dir logs stages.py"
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    logs = sorted(tmp_path.glob("logs/*/attempt_0/*/stdout.log"))
    said = [line for log in logs for line in log.read_text().splitlines()]
    assert sum(line.startswith("stage 0: rank 4, ") for line in said) == 2
    assert said.count("stage 1: rank 4, first stage at rank 4") == 2
