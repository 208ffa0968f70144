"""The example that shows how to add a controller, run as its README says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "halving"


@pytest.mark.timeout(200)
def test_the_readme_command_trains_with_the_strangers_controller(tmp_path: Path) -> None:
    (line,) = re.findall(
        r"^PYTHONPATH=\. python -m (.*)$", (EXAMPLE / "README.md").read_text(), re.M
    )
    command = [sys.executable, "-m", *shlex.split(line), "train.steps=60", "data=stdlib"]
    command += ["train.eval_windows=4", f"hydra.run.dir={tmp_path}/run"]
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["controller"] == "halving"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    ranks = [max(row["ranks"].values()) for row in rows if row["kind"] == "decision"]
    assert ranks == [0, 16, 8, 4]
