"""Real pipelines of 2 x 2 processes: same loss as without stages, every stage on record, resume."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from test_app_launch import PYTHON, SHORT, Refused, rows_of, summary_of
from test_app_launch import refused as refused

from edgc_ddp.train import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PIPELINE = ["nproc=4", "parallel.pp=2", "parallel.dp=2", "parallel.microbatches=2"]


def launch(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    return subprocess.run(
        [*PYTHON, *overrides],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_pipeline_of_dense_stages_learns_what_plain_data_parallel_does(tmp_path: Path) -> None:
    dense = [option for option in SHORT if not option.startswith("controller.")]
    plain = summary_of(launch(tmp_path, *dense, "nproc=2", "controller=dense"))
    staged = summary_of(launch(tmp_path, *dense, *PIPELINE, "controller=dense"))
    assert staged["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-5)
    assert (staged["world_size"], staged["mean_rank"], staged["final_mean_rank"]) == (4, 0, 0)
    assert [stage["residual"] for stage in staged["stages"]] == [None, None]
    losses = [[row["loss"] for row in rows_of(Path(s["run"]), "step")] for s in (plain, staged)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    # The tied weight is averaged at both ends; all else as in one piece.
    assert staged["dense_bytes"] - plain["dense_bytes"] == 12 * 256 * 32 * 4


def test_every_stage_is_on_record_and_resume_goes_on_to_the_last_bit(
    tmp_path: Path, refused: Refused
) -> None:
    # Aligned ranks follow the clock, so only the common rank can repeat itself.
    options = [*SHORT, *PIPELINE, "parallel.ranks=common", "train.checkpoint_every=7"]
    done = launch(tmp_path, *options)
    whole = summary_of(done)
    first, second = whole["stages"]
    assert (first["stage"], second["stage"]) == (0, 1)
    assert first["rank"] > 0 and first["phase"] == second["phase"] == "compress"
    assert all(0 < s["backward_end_seconds"] < s["finish_seconds"] for s in (first, second))
    assert whole["wire_bytes"] == first["wire_bytes"] + second["wire_bytes"]
    run = Path(whole["run"])
    # The progress line, the last step's row and the summary speak of the same bytes and ranks.
    last = rows_of(run, "step")[-1]
    assert (last["stages"], last["wire_bytes"]) == (2, whole["wire_bytes"])
    assert (
        last["mean_rank"] == whole["final_mean_rank"]
        and last["run_mean_rank"] == whole["mean_rank"]
    )
    progress = next(line for line in done.stderr.splitlines() if line.startswith("step 12/12"))
    saved = f"saved {whole['bytes_saved_ratio']:.0%} (2 stages)"
    assert f"rank {whole['final_mean_rank']:.1f} {saved}" in progress
    decisions = rows_of(run, "decision")
    for stage in (first, second):
        own = [row for row in decisions if row["stage"] == stage["stage"]]
        assert len(own) >= 3 and own[-1]["reason"] == stage["reason"] != ""
        assert [row["step"] for row in own] == sorted({row["step"] for row in own})
    exchanged = rows_of(run, "stages")
    assert exchanged[0]["step"] == 2 and len(exchanged) >= 3
    # The others decide one iteration after the first stage, on its rank.
    assert exchanged[-1]["stages"][1]["rank"] == exchanged[-2]["stages"][0]["rank"]

    folder = run / "checkpoints" / "step-00000007"
    names = {"model.pt", "model-stage1.pt", *[f"hook-rank{rank}.pt" for rank in range(4)]}
    assert {path.name for path in folder.glob("*.pt")} == names
    resume = f"train.resume={folder}"
    again = summary_of(launch(tmp_path, *options, resume))
    assert again["val_loss"] == whole["val_loss"]
    assert again["final_plan_digest"] == whole["final_plan_digest"]
    for name in ("model.pt", "model-stage1.pt"):
        ends = [Path(s["run"]) / "checkpoints" / "step-00000012" / name for s in (whole, again)]
        before, after = [checkpoint.read(path)["model"] for path in ends]
        for parameter, value in before.items():
            assert torch.equal(value, after[parameter]), parameter

    for changed, told in {
        (
            "parallel.pp=1",
            "parallel.dp=4",
        ): "written with stages 2, this run has 1; set parallel.pp",
        ("parallel.ranks=aligned",): "written with parallel.ranks=common, this run has aligned",
    }.items():
        assert told in refused(tmp_path, *options, resume, *changed)


def test_a_dense_stage_does_not_lower_the_mean_rank(tmp_path: Path) -> None:
    summary = summary_of(launch(tmp_path, *SHORT, *PIPELINE, "parallel.ranks=selective"))
    first, second = summary["stages"]
    assert first["final_mean_rank"] > 0 == second["final_mean_rank"] == second["rank"]
    assert summary["final_mean_rank"] == first["final_mean_rank"]
    assert summary["mean_rank"] == pytest.approx(first["mean_rank"])
    assert first["residual"] > 0 and second["residual"] is None
