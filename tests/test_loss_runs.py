"""Loss runs: what is asked of whom, what is kept of a run, and what the figures make of it."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest

from benchmarks import loss_runs, outsider_run, reproduce
from benchmarks.figures import loss_folder, losses
from benchmarks.loss_contestants import CONTESTANTS, Contestant, select
from edgc_ddp.decisions import Layout, MatrixSpec
from edgc_ddp.train import app, validate

BY_NAME = {contestant.name: contestant for contestant in CONTESTANTS}
TINY = [
    *["data=stdlib", "model=tiny", "model.width=32", "model.layers=3", "model.context=32"],
    *["train.batch_size=2", "train.eval_every=3", "train.eval_windows=2"],
]


def write_run(
    out: Path,
    name: str,
    seed: int,
    ends: tuple[float, float | None],
    step_bytes: int,
    behind: float = 0.0,
) -> None:
    """Four steps, the last two ``behind``; held-out losses after two and four."""
    home = out / name / f"seed-{seed}"
    home.mkdir(parents=True)
    rows = [
        {"kind": "step", "step": s, "loss": 5.0 - s + lag, "wire_bytes": step_bytes * (s + 1)}
        for s, lag in enumerate((0.0, 0.0, behind, behind))
    ]
    rows += [{"kind": "eval", "step": s, "val_loss": e} for s, e in zip((1, 3), ends, strict=True)]
    with (home / "steps.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(loss_runs.HEAD)
        writer.writerows(loss_runs.compact(rows))
    about = {
        "seed": seed,
        "steps": 4,
        "also": [],
        "text": {"source": "made up", "sha256": "0" * 64},
        "commit": {"id": "abc", "dirty": False},
        "median_step_seconds": 0.5,
        "summary": {"dense_bytes": 4_000_000},
    }
    (home / "run.json").write_text(json.dumps(about))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """All contestants; losses rise in the table's order, dense sends most."""
    folder = tmp_path / "2001-01-01-loss-runs"
    for place, contestant in enumerate(CONTESTANTS):
        sent = 1_000_000 // (place + 1)
        for seed in (0, 1):
            ends = (3.0 + 0.01 * place, 2.0 + 0.01 * place + 0.1 * seed)
            write_run(folder, contestant.name, seed, ends, sent, 0.01 * place * (1 + seed))
    return folder


def test_all_kinds_are_contestants_and_names_are_theirs_alone() -> None:
    assert len(BY_NAME) == len(CONTESTANTS)
    controllers = {c.overrides[0] for c in CONTESTANTS if not c.kind}
    named = "dense fixed edgc edgc_code accordion lgreco selective scheduled adaptive"
    assert controllers == {f"controller={name}" for name in named.split()}
    assert {c.kind for c in CONTESTANTS if c.kind} == {"bf16", "4bit", "1bit"}
    assert {name for name, _, _ in losses.STRATEGIES.values()} <= set(BY_NAME)
    assert set(losses.TABLE_1.values()) | set(losses.DRAWN) <= set(BY_NAME)
    with pytest.raises(ValueError, match=r"nothing-\*: matches no contestant"):
        select(["dense", "nothing-*"])


def test_an_outsider_differs_from_a_controller_in_its_program_alone() -> None:
    fixed = loss_runs.arguments(BY_NAME["fixed-16-int8"], 3, 200, ["model=tiny"], "F")
    assert fixed[1] == "edgc_ddp.train" and fixed[-1] == "hydra.run.dir=F"
    assert {"seed=3", "train.steps=200", "controller.rank=16", "hook.wire_dtype=int8"} < set(fixed)
    warm = loss_runs.arguments(BY_NAME["1bit-warm"], 3, 200, ["model=tiny"], "F")
    assert warm[1:5] == ["benchmarks.outsider_run", "--start-iter=20", "1bit", "F"]
    common = {"+experiment=default", "train.steps=200", "seed=3", "model=tiny"}
    assert common < set(fixed) and common < set(warm)
    assert BY_NAME["1bit"].start_iter(1000) == 2


@pytest.mark.parametrize("name", [name for name in BY_NAME if not BY_NAME[name].kind])
def test_what_a_controller_is_asked_for_composes(name: str) -> None:
    asked = loss_runs.arguments(BY_NAME[name], 1, 1000, [], "F")[2:-1]
    with hydra.initialize_config_module("edgc_ddp.conf", version_base="1.3"):
        config = app.settings(hydra.compose("config", asked))
    validate.check(config, config.nproc)
    assert (config.seed, config.hook.seed, config.train.checkpoint_every) == (1, 1, 0)
    assert config.hook.wire_dtype in name or name in ("dense", "default")
    if name == "selective-fp32":
        assert config.controller["inner"]["rank"] == 64
        controller = validate.make_controller(config.controller)
        names = ["blocks.0.up", "blocks.2.up", "blocks.3.up", "tokens"]
        matrices = tuple(MatrixSpec(f"{name}.weight", 192, 768) for name in names)
        _, plan = controller.decide(controller.init(Layout(matrices)), None, 0)
        assert list(plan.ranks.values()) == [64, 64, 0, 0]


@pytest.mark.parametrize("name", [name for name in BY_NAME if BY_NAME[name].kind])
def test_what_an_outsider_is_asked_for_composes(name: str) -> None:
    contestant = BY_NAME[name]
    asked = loss_runs.arguments(contestant, 1, 1000, [], "F")[5:]
    told = outsider_run.compose(contestant.kind, 2, Path("F"), asked)
    assert told.job.config.seed == 1 and not told.job.config.hook.register
    assert told.job.config.model.width == 192 and told.job.controller_name == contestant.kind


def test_a_finished_run_is_kept_another_is_refused_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def one(c: Contestant, seed: int, steps: int, also: Any, home: Path, limit: float) -> Any:
        asked.append((c.name, seed))
        if c.name == "1bit":
            raise RuntimeError("ended with 1: no luck")
        about = {
            "command": loss_runs.told_command(c, seed, steps, also),
            "summary": {"val_loss": 2.0, "wire_bytes": 1, "dense_bytes": 4},
        }
        home.mkdir(parents=True)
        (home / "run.json").write_text(json.dumps(about))
        return about

    monkeypatch.setattr(loss_runs, "one", one)
    three = select(["dense", "1bit", "4bit"])
    failed = loss_runs.runs(three, [0, 1], 10, [], tmp_path, 1)
    assert asked == [(name, seed) for seed in (0, 1) for name in ("dense", "4bit", "1bit")]
    assert len(failed) == 2 and "no luck" in failed[0]
    asked.clear()
    loss_runs.runs(three, [0, 1], 10, [], tmp_path, 1)
    assert asked == [("1bit", 0), ("1bit", 1)]
    asked.clear()
    # Another run in its place stops none of the others.
    failed = loss_runs.runs(three, [0], 20, [], tmp_path, 1)
    assert asked == [("1bit", 0)] and len(failed) == 3 and "give another --out" in failed[0]


def test_a_program_that_fails_or_hangs_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3: (?s:.*)because"):
        code = "import sys; print('because', file=sys.stderr); sys.exit(3)"
        loss_runs.train([sys.executable, "-c", code], limit=20)
    with pytest.raises(RuntimeError, match="not done within --limit 0.5"):
        loss_runs.train([sys.executable, "-c", "import time; time.sleep(60)"], limit=0.5)
    assert loss_runs.train([sys.executable, "-c", "print('so'); print('{}')"], limit=20) == {}


def test_a_folder_gives_ends_differences_and_who_beats_whom(out: Path) -> None:
    found = loss_folder.read(out)
    assert list(found.runs) == list(BY_NAME) and found.steps == 4
    assert found.loss("dense").mean == pytest.approx(2.05)
    assert (found.loss("dense").low, found.loss("dense").high) == (2.0, 2.1)
    third = CONTESTANTS[2].name
    behind = found.behind_dense(third)
    assert (behind.low, behind.high) == (pytest.approx(0.02), pytest.approx(0.02))
    late = found.late_behind_dense(third)
    assert (late.mean, late.low, late.high) == pytest.approx((0.03, 0.02, 0.04))
    first = found.runs["dense"][0].points
    assert [p.steps for p in first] == [2, 4] and [p.train_loss for p in first] == [4.5, 3.5]
    assert found.sent("dense") == 4_000_000
    # 4 steps of half a second, and 32 Mbit.
    assert found.hours("dense", 100) == pytest.approx((2 + 0.32) / 3600)
    assert all(found.beaten_by(name) == [] for name in found.runs)
    write_run(out, CONTESTANTS[-1].name, 2, (3.0, 0.5), 1)
    assert CONTESTANTS[-1].name not in loss_folder.read(out).beaten_by("dense"), "no common lead"


def test_fewer_bytes_and_a_lower_end_with_every_seed_beats(tmp_path: Path) -> None:
    for name, ends, sent in (
        ("dense", (2.0, 2.2), 8),
        ("4bit", (1.9, 2.1), 4),
        ("1bit", (1.8, 2.3), 2),
    ):
        for seed, end in enumerate(ends):
            write_run(tmp_path / "runs", name, seed, (3.0, end), sent)
    found = loss_folder.read(tmp_path / "runs")
    assert found.beaten_by("dense") == ["4bit"]
    assert found.beaten_by("4bit") == found.beaten_by("1bit") == []


def test_a_run_that_diverged_is_shown_as_such(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(out, "1bit", 2, (3.0, None), 1)
    found = loss_folder.read(out)
    assert math.isnan(found.loss("1bit").mean) and found.runs["1bit"][2].points[0].val_loss == 3.0
    monkeypatch.setattr(losses, "newest", lambda: out)
    for name in ("figure8", "equal-bytes"):
        record = (reproduce.reproduce(name, tmp_path / "records") / "record.md").read_text()
        assert "| 1bit | " in record and "nan" in record


def test_runs_of_two_kinds_missing_ones_and_no_runs_are_refused(out: Path) -> None:
    path = out / "4bit" / "seed-1" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": 5}))
    with pytest.raises(ValueError, match="4bit/seed-1 differ in steps, text or --also"):
        loss_folder.read(out)
    path.unlink()
    with pytest.raises(ValueError, match=r"--only 'b' --out"):
        loss_folder.read(out).require(["dense", "b"])
    with pytest.raises(ValueError, match="no run of dense"):
        loss_folder.read(out.parent)
    with pytest.raises(ValueError, match="make them by python -m benchmarks.loss_runs"):
        loss_folder.newest(out)


@pytest.mark.parametrize("name", ["figure8", "figure11", "table1", "equal-bytes"])
def test_every_piece_leaves_numbers_a_figure_and_a_record(
    name: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(out.parent / "2000-12-31-older", "dense", 0, (9.0, 9.0), 1)
    monkeypatch.setattr(losses, "newest", lambda: loss_folder.newest(out.parent))
    # A seed that dense lacks says nothing of what compression costs.
    write_run(out, "selective-fp32", 7, (9.0, 9.0), 1)
    folder = reproduce.reproduce(name, out.parent)
    (table,), (image,) = folder.glob("*.csv"), folder.glob("*.png")
    assert image.stat().st_size > 10_000
    record = (folder / "record.md").read_text()
    assert "2001-01-01-loss-runs" in record and "made up" in record and "Paper: " in record
    with table.open(newline="") as file:
        rows = {row.get("contestant") or row["strategy"]: row for row in csv.DictReader(file)}
    if name == "figure11":
        assert float(rows["none"]["ppl"]) == pytest.approx(math.exp(2.05), rel=1e-4)
        assert float(rows["CQM, 8 to 32"]["its h / none"]) == pytest.approx(
            1.875 / 3.0417, rel=1e-4
        )
        assert float(rows["none"]["wire h, 100 Mbit/s"]) == pytest.approx(0.32 / 3600, rel=1e-4)
    elif name == "table1":
        row = rows["selective-fp32"]
        assert row["method"] == "Optimus-CC"
        assert float(row["2.5B days / dense"]) == pytest.approx(18.01 / 18.44, rel=1e-4)
        assert float(row["12.1B ppl / dense"]) == pytest.approx(8.84 / 8.73, rel=1e-4)
        assert rows["fixed-32-fp32"]["12.1B ppl / dense"] == rows["4bit"]["2.5B ppl / dense"] == "-"
        behind = loss_folder.read(out).behind_dense("selective-fp32").mean
        assert float(row["ppl / dense"]) == pytest.approx(math.exp(behind), rel=1e-4) and behind < 1
    else:
        assert set(rows) == set(BY_NAME)


def test_a_piece_without_runs_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "newest", lambda: loss_folder.newest(tmp_path))
    with pytest.raises(ValueError, match="benchmarks.loss_runs"):
        reproduce.reproduce("figure8", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1bit-warm"])
def test_a_real_run_leaves_losses_and_bytes_and_nothing_else(tmp_path: Path, name: str) -> None:
    assert loss_runs.runs([BY_NAME[name]], [1], 6, TINY, tmp_path, 100) == []
    home = tmp_path / name / "seed-1"
    assert {path.name for path in home.iterdir()} == {"run.json", "steps.csv"}
    about = json.loads((home / "run.json").read_text())
    with (home / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(6)]
    assert [bool(row["val_loss"]) for row in rows] == [False, False, True] * 2
    assert float(rows[-1]["val_loss"]) == pytest.approx(about["summary"]["val_loss"], abs=1e-6)
    assert 4 < float(rows[-1]["loss"]) < 7
    sent = [int(row["wire_bytes"]) for row in rows]
    each = [after - before for before, after in zip(sent, sent[1:], strict=False)]
    assert sent[0] == each[0] == about["summary"]["dense_bytes"] // 6, "two dense iterations"
    # The first compressed iteration carries the check that plans agree.
    assert max(each[1:]) - min(each[1:]) <= 8 and 0 < each[1] < each[0]
    assert about["text"]["source"] == "stdlib" and "seed: 1" in about["config"]
