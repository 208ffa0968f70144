"""Real launches: both commands, several ranks, resume to the last bit, a sweep, crashes that are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from edgc_ddp.train import app, checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PYTHON = [sys.executable, "-m", "edgc_ddp.train"]
TORCHRUN = [
    *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    *["-m", "edgc_ddp.train"],
]
SHORT = [
    *["data=stdlib", "model=tiny", "model.width=32", "model.context=32", "train.batch_size=2"],
    *["train.steps=12", "train.eval_every=6", "train.eval_windows=4"],
    *["controller.window=3", "controller.warmup=3", "controller.warmup_limit=6"],
    *["controller.r_max=8", "controller.r_min=2", "controller.alpha=1.0"],
]


def launch(command: list[str], folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    return subprocess.run(
        [*command, *overrides],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


class Refused:
    """The one line of a launch that was refused in the launching process, which needs no ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd

    def __call__(self, folder: Path, *overrides: str) -> str:
        self.monkeypatch.chdir(folder)
        self.monkeypatch.delenv("RANK", raising=False)
        self.monkeypatch.setattr(sys, "argv", ["edgc_ddp.train", *overrides])
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as status:
            app.main()
        said = self.capfd.readouterr().err
        assert status.value.code == 2 and said.count("\n") == 1, said
        return said


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    return Refused(monkeypatch, capfd)


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize("command", [[*PYTHON, "nproc=2"], TORCHRUN], ids=["python", "torchrun"])
def test_both_commands_train_and_leave_one_complete_folder(
    command: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    summary = summary_of(launch(command, tmp_path, *SHORT))
    run = Path(summary["run"])
    assert [run] == list(tmp_path.glob("outputs/*/*"))
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    # Nor is anything left among temporary files but torch's own cache, which its optimizers make.
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    assert command is TORCHRUN or not left
    assert summary["controller"] == "edgc" and summary["steps"] == 12
    assert summary["world_size"] == 2
    assert 0 < summary["wire_bytes"] < summary["dense_bytes"]
    assert summary["mean_rank"] > 0 and len(summary["final_plan_digest"]) == 16

    steps = rows_of(run, "step")
    assert [row["step"] for row in steps] == list(range(12))
    assert {row["phase"] for row in steps} >= {"warmup", "compress"}
    assert steps[-1]["wire_bytes"] == summary["wire_bytes"]
    assert len(rows_of(run, "decision")) >= 3
    assert rows_of(run, "decision")[-1]["reason"]
    assert [row["step"] for row in rows_of(run, "eval")] == [5, 11]
    assert rows_of(run, "eval")[-1]["val_loss"] == summary["val_loss"]
    told = {key: value for key, value in rows_of(run, "summary")[0].items() if key != "kind"}
    assert told == summary

    environment = json.loads((run / "environment.json").read_text())
    assert environment["world_size"] == 2 and environment["data"]["source"] == "stdlib"
    assert environment["parameters"]["tokens.weight"] == [256, 32]
    assert "total_steps: 12" in (run / "config.yaml").read_text()


def weights(run: Path, step: int) -> dict[str, Any]:
    return checkpoint.read(run / "checkpoints" / f"step-{step:08d}" / "model.pt")


def test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does(
    tmp_path: Path, refused: Refused
) -> None:
    options = [*SHORT, "nproc=2", "train.checkpoint_every=7"]
    whole = Path(summary_of(launch(PYTHON, tmp_path, *options))["run"])
    resume = f"train.resume={whole / 'checkpoints' / 'step-00000007'}"
    summary = summary_of(launch(PYTHON, tmp_path, *options, resume))
    again = Path(summary["run"])
    assert again != whole
    assert [row["step"] for row in rows_of(again, "step")] == list(range(7, 12))
    first, second = weights(whole, 12), weights(again, 12)
    for name, value in first["model"].items():
        assert torch.equal(value, second["model"][name]), name
    for key in ("loss", "wire_bytes", "mean_rank", "plan_digest"):
        expected = [row[key] for row in rows_of(whole, "step")[7:]]
        assert [row[key] for row in rows_of(again, "step")] == expected, key
    assert rows_of(again, "decision") != []

    kept = [option for option in options if not option.startswith("controller.")]
    for change, named in (
        ("model.width=64", "a checkpoint of another model"),
        ("nproc=1", "world_size"),
        ("controller=dense", "controller"),
        ("train.steps=7", "raise train.steps"),
        ("controller.r_min=3", "controller.r_min"),
    ):
        asked = kept if change == "controller=dense" else options
        assert named in refused(tmp_path, *asked, resume, change)


def test_auto_resume_starts_goes_on_and_tells_the_end_again(tmp_path: Path) -> None:
    options = ["nproc=1", "train.checkpoint_every=5", "train.resume=auto", "hydra.run.dir=run"]
    first = summary_of(launch(PYTHON, tmp_path, *SHORT, *options))
    run = tmp_path / "run"
    assert [row["step"] for row in rows_of(run, "step")] == list(range(12))
    environment = json.loads((run / "environment.json").read_text())
    assert environment["resumed_from"] is None and first["first_step"] == 0
    manifest = json.loads((run / "checkpoints/step-00000010/manifest.json").read_text())
    assert manifest["text"] == f"stdlib {environment['data']['sha256']}"
    again = summary_of(launch(PYTHON, tmp_path, *SHORT, *options))
    assert [row["step"] for row in rows_of(run, "step")] == list(range(12))
    for key in ("val_loss", "final_plan_digest", "wire_bytes"):
        assert again[key] == first[key], key
    longer = summary_of(launch(PYTHON, tmp_path, *SHORT, *options, "train.steps=14"))
    assert [row["step"] for row in rows_of(run, "step")] == list(range(14))
    assert (again["first_step"], longer["first_step"]) == (12, 12)
    assert longer["wire_bytes"] == first["wire_bytes"] == 0  # one process sends nothing
    shorter = launch(PYTHON, tmp_path, *SHORT, *options, "train.steps=11")
    assert shorter.returncode == 1 and "step 14 of train.steps=11; raise" in shorter.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["train.checkpoint_every=5"], "hydra.run.dir=outputs/mine"),
        (["hydra.run.dir=run"], "train.checkpoint_every=0"),
    ],
)
def test_auto_resume_that_could_never_resume_is_refused(
    tmp_path: Path, refused: Refused, options: list[str], named: str
) -> None:
    assert named in refused(tmp_path, *SHORT, "train.resume=auto", *options)


def test_what_few_runs_need_is_not_loaded_before_them() -> None:
    asked = "import sys, edgc_ddp.train.app; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=100, check=True
    )
    loaded = set(done.stdout.split())
    assert "edgc_ddp.train.worker" in loaded
    assert not loaded & {"scipy.optimize", "torch.distributed.pipelining", "matplotlib"}


def test_a_sweep_runs_each_controller_in_its_own_folder(tmp_path: Path) -> None:
    common = [option for option in SHORT if not option.startswith("controller.")]
    done = launch(PYTHON, tmp_path, "-m", "nproc=1", "controller=fixed,dense", *common)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["controller"] for line in lines] == ["fixed", "dense"]
    assert len({line["run"] for line in lines}) == 2
    assert all((Path(line["run"]) / "metrics.jsonl").is_file() for line in lines)


def test_accumulation_bf16_and_no_hook_train_too(tmp_path: Path) -> None:
    options = [*SHORT, "nproc=2", "train.accumulate=2", "train.bf16=true"]
    summary = summary_of(launch(PYTHON, tmp_path, *options))
    # The hook must see one backward per step, however many micro-batches that step has.
    assert [row["step"] for row in rows_of(Path(summary["run"]), "step")] == list(range(12))
    plain = summary_of(launch(PYTHON, tmp_path, *options, "hook.register=false"))
    assert plain["wire_bytes"] == plain["dense_bytes"] == summary["dense_bytes"]
    assert plain["mean_rank"] == 0


def test_a_failing_rank_ends_the_run_and_its_reason_is_shown(tmp_path: Path) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "broken.yaml").write_text("_target_: broken.Broken\n")
    (tmp_path / "broken.py").write_text(
        "class Broken:\n"
        "    def init(self, layout): return {}\n"
        "    def decide(self, state, observation, step): raise ValueError('no idea')\n"
    )
    common = [option for option in SHORT if not option.startswith("controller.")]
    arguments = ["--config-dir", str(tmp_path), "controller=broken", "trust=[broken]", "nproc=2"]
    done = launch(PYTHON, tmp_path, *arguments, *common)
    assert done.returncode == 1
    assert "no idea" in done.stderr
    assert not any(line.startswith("{") for line in done.stdout.splitlines())
