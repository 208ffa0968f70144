"""The figures draw what their numbers say: on series whose answers are known."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import reproduce
from benchmarks.figures import entropy_series, error_rank, window_size
from benchmarks.figures.gradients import BETAS, Run, mean_entropy, series
from edgc_ddp.train import data

STEPS = 200


def known() -> dict[str, Any]:
    """Two matrices whose entropies rise by 0.01 an iteration, one a nat above the other; beta changes
    nothing. Gradients of rank 4."""
    generator = torch.Generator().manual_seed(0)
    line = 0.01 * torch.arange(float(STEPS))
    entropy = torch.stack([line, line + 1], 1)
    low = torch.randn(64, 4, generator=generator) @ torch.randn(4, 64, generator=generator)
    small = torch.randn(64, 4, generator=generator) @ torch.randn(4, 192, generator=generator)
    names = ["tokens.weight", "blocks.1.attention.qkv.weight"]
    gradients = {**dict(zip(names, (low, small), strict=True)), "blocks.1.up.weight": small}
    return {
        "source": "made up",
        "names": names,
        "loss": torch.linspace(5, 2, STEPS),
        "entropy": {str(beta): entropy for beta in BETAS},
        "snapshots": {7: gradients},
    }


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (entropy_series, error_rank, window_size, reproduce):
        monkeypatch.setattr(module, "series", lambda run: known())


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", [n for n, p in reproduce.PIECES.items() if p.reads_gradients])
def test_every_piece_leaves_numbers_a_figure_and_a_record(
    told: None, tmp_path: Path, name: str
) -> None:
    folder = reproduce.reproduce(name, tmp_path)
    assert list(folder.glob("*.csv")) and list(folder.glob("*.png"))
    record = (folder / "record.md").read_text()
    assert "aper" in record and "made up" in record
    with pytest.raises(ValueError, match="not overwritten"):
        reproduce.reproduce(name, tmp_path)


def test_a_line_in_windows_has_the_variance_of_its_parts(told: None, tmp_path: Path) -> None:
    """The variance of n numbers a step apart is (n^2 - 1) / 12 steps squared, of a window's as well."""
    window_size.make(tmp_path)
    for row in table(tmp_path / "window_size.csv"):
        window = int(row["window"])
        assert float(row["mse"]) == pytest.approx(1e-4 * (window**2 - 1) / 12, rel=1e-4, abs=1e-9)
        held = 1 - (window**2 - 1) / (STEPS**2 - 1)
        assert float(row["cc"]) == pytest.approx(held**0.5, rel=1e-4)


def test_gradients_of_rank_four_leave_nothing_at_rank_four(told: None, tmp_path: Path) -> None:
    error_rank.make(tmp_path)
    for row in table(tmp_path / "error_rank.csv"):
        measured, law, rank = float(row["measured"]), float(row["law"]), int(row["rank"])
        if row["matrix"] == "noise":
            assert measured == pytest.approx(law, abs=0.02)
        else:
            assert (measured > 0.01) == (rank < 4)


def test_the_mean_weighs_matrices_by_their_entries() -> None:
    """64 x 64 and 64 x 192: the second weighs three quarters."""
    assert mean_entropy(known(), 1.0)[0] == pytest.approx(0.75)


def test_a_run_is_recorded_once_and_then_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "_download", lambda cache: (_ for _ in ()).throw(OSError("none")))
    run = Run(width=8, layers=1, heads=2, context=8, batch=2, steps=3, snapshots=(2,))
    first = series(run)
    assert first["entropy"]["0.25"].shape == (3, len(first["names"]))
    assert torch.isfinite(first["loss"]).all()
    monkeypatch.setattr("benchmarks.figures.gradients._record", None)
    again = series(run)
    assert torch.equal(first["loss"], again["loss"])
    assert set(again["snapshots"][2]) == set(first["names"])
