"""The figures draw what their numbers say: on series whose answers are known."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import reproduce
from benchmarks.figures import (
    correlations,
    distribution,
    entropy_series,
    error_rank,
    phases,
    window_size,
)
from benchmarks.figures.gradients import BETAS, Run, mean_entropy, series
from edgc_ddp.controllers import EntropyController
from edgc_ddp.decisions import Plan, Sampling
from edgc_ddp.train import data

STEPS = 200


def known(snapshots: tuple[int, ...] = (7,)) -> dict[str, Any]:
    """Two matrices whose entropies rise by 0.01 an iteration, one a nat above the other; beta changes
    nothing. Gradients of rank 4, the same in all snapshots."""
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
        "snapshots": {step: gradients for step in snapshots},
    }


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        correlations, distribution, entropy_series, error_rank, phases, window_size, reproduce,
    ):  # fmt: skip
        monkeypatch.setattr(module, "series", lambda run: known(run.snapshots))


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


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def laws() -> dict[str, tuple[torch.Tensor, float, float, float]]:
    """Quantiles of laws, with their excess kurtosis, share beyond three sigmas, and entropy less
    that of a normal law of their sigma: all have closed forms."""
    u = (torch.arange(400 * 400, dtype=torch.float64) + 0.5) / 400**2
    laplace = -(1 - 2 * (u - 0.5).abs()).log() * (u - 0.5).sign()
    normal = 0.5 * math.log(2 * math.pi * math.e)
    found = {
        "uniform": (u, -1.2, 0.0, 0.5 * math.log(12) - normal),
        "normal": (torch.special.ndtri(u), 0.0, 0.0026998, 0.0),
        "laplace": (laplace, 3.0, math.exp(-3 * 2**0.5), 1 + math.log(2**0.5) - normal),
    }
    return {name: (values.view(400, 400), *rest) for name, (values, *rest) in found.items()}


@pytest.mark.parametrize("law", ["uniform", "normal", "laplace"])
def test_the_shape_of_known_laws_is_told_at_any_scale(law: str) -> None:
    values, kurtosis, beyond, gap = laws()[law]
    shape = distribution.shape_of(1e-4 * (values - values.mean()) + 3e-5)
    assert shape.mean == pytest.approx(3e-5, rel=1e-6)
    assert shape.off_zero == pytest.approx(0.3 / float(values.std()), rel=1e-4)
    assert shape.kurtosis == pytest.approx(kurtosis, abs=0.02)
    assert shape.beyond == pytest.approx(beyond, abs=2e-5)
    assert shape.gap == pytest.approx(gap, abs=0.004)
    assert shape.is_normal(values.numel()) == (law == "normal")


def test_the_density_is_that_of_the_normal_law() -> None:
    middles, density = distribution.density(1e-4 * laws()["normal"][0])
    close = middles.abs() < 3
    expected = (-middles.square() / 2).exp() / math.sqrt(2 * math.pi)
    assert density[close].tolist() == pytest.approx(expected[close].tolist(), rel=0.02)
    assert density[middles.abs() > 6].isnan().all()


def test_normal_gradients_are_called_normal_and_others_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for law, held in (("normal", "holds: 2 of 2"), ("laplace", "does not hold: 0 of 2")):
        kept = {"snapshots": {step: {"w": step * laws()[law][0]} for step in (1, 2)}}
        monkeypatch.setattr(distribution, "series", lambda run, kept=kept: kept)
        told = "\n".join(distribution.make(tmp_path))
        assert f"That entries are normal {held} gradients" in told
        # Twice the size is ln 2 of entropy, and the gap knows no size.
        assert "moves by 0 nats (median; 0 at most) while its ln(sigma) moves by 0.69" in told
    assert len(table(tmp_path / "distribution.csv")) == 3


def test_rows_with_a_common_part_correlate_by_its_share() -> None:
    """Rows c + e with independent c and e correlate by var c / (var c + var e)."""
    common = 3**0.5 * torch.randn(1, 40_000, generator=drawn())
    rows = common + torch.randn(8, 40_000, generator=drawn(1))
    found = correlations.spread(rows)
    assert (found.pairs, found.length, found.beyond) == (28, 40_000, 1.0)
    assert found.mean == pytest.approx(0.75, abs=0.01)
    assert found.rms == pytest.approx(0.75, abs=0.01)
    assert found.times == pytest.approx(0.75 * 39_999**0.5, rel=0.02)


@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
def test_independent_entries_correlate_as_expected(shape: tuple[int, int]) -> None:
    found = correlations.spread(7 + 0.01 * torch.randn(shape, generator=drawn()))
    assert found.times == pytest.approx(1, abs=0.03)
    assert found.mean == pytest.approx(0, abs=0.005)
    assert found.beyond < 0.006


def test_constant_rows_have_no_correlation() -> None:
    rows = torch.randn(4, 32, generator=drawn())
    rows[1] = 0.5
    assert len(correlations.coefficients(rows)) == 3


def test_only_iterations_whose_neighbour_was_kept_are_compared() -> None:
    a, b = torch.randn(2, 16, 16, generator=drawn())
    b -= (a * b).sum() / a.square().sum() * a
    kept = {3: {"w": a}, 4: {"w": b}, 5: {"w": -2 * b}, 9: {"w": a}}
    found = correlations.cosines(kept)
    assert list(found) == [4, 5]
    assert found[4]["w"] == pytest.approx(0, abs=1e-6)
    assert found[5]["w"] == pytest.approx(-1, abs=1e-6)


def test_gradients_that_stay_point_the_same_way(told: None, tmp_path: Path) -> None:
    record = "\n".join(correlations.make(tmp_path))
    assert "Of 12, 12 point the same way and 0 the opposite way" in record
    assert "do not correlate does not hold: 0 of 24" in record
    assert {row["iteration"] for row in table(tmp_path / "cosine.csv")} == {
        "10",
        "100",
        "300",
        "599",
    }
    assert {
        float(row["cosine with the iteration before"]) for row in table(tmp_path / "cosine.csv")
    } == {1}
    for row in table(tmp_path / "correlation.csv"):
        assert (float(row["times"]) > 3) == (row["iteration"] != "noise")


def one_matrix(entropies: list[float], sizes: dict[int, float]) -> dict[str, Any]:
    """A record of a 32 x 64 matrix: its entropy in each iteration, its gradients of white noise times
    ``sizes``."""
    noise = torch.randn(64, 32, generator=drawn())
    return {
        "names": ["w"],
        "loss": torch.zeros(len(entropies)),
        "entropy": {"0.25": torch.tensor(entropies)[:, None]},
        "snapshots": {step: {"w": size * noise} for step, size in sizes.items()},
    }


def test_the_controller_is_shown_what_the_hook_would_have_seen() -> None:
    kept = one_matrix([0.01 * step for step in range(40)], {19: 1.0})
    layout = phases.layout_of(kept)
    assert [(matrix.rows, matrix.cols) for matrix in layout.matrices] == [(32, 64)]
    plan = Plan({"w": 0}, "warmup", until=20, sampling=Sampling(alpha=0.1), probe_rank=40)
    seen = phases.observe(kept, layout, plan, 0)
    # One iteration in ten is due: 9 and 19.
    assert seen.entropy["w"] == pytest.approx(0.14)
    energy = float(kept["snapshots"][19]["w"].square().sum())
    assert seen.error_curve[0] == pytest.approx(energy, rel=1e-5)
    assert seen.error_curve[16] == pytest.approx(energy * (1 - 16 / 32) * (1 - 16 / 64), rel=0.1)
    assert seen.error_curve[32] == pytest.approx(0, abs=1e-3 * energy)


_LOOKS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29)


@pytest.mark.parametrize(
    ("late", "slope", "warmup", "ranks"),
    [
        (0.01, 0.0, 12, [16] * 8),
        (0.01, 0.05, 12, [16] * 8),
        (0.01, -0.05, 12, [16, 12, 8, 4, 4, 4, 4, 4]),
        (1.0, 0.0, 30, [16] * 6),
    ],
)
def test_phases_and_ranks_follow_the_error_and_the_entropy(
    late: float, slope: float, warmup: int, ranks: list[int]
) -> None:
    """A gradient a hundredth of its first size ends the warm-up at its least, one that stays at its
    limit; an entropy that falls lowers the rank by the step limit, to r_min."""
    entropies = [slope * max(0, step - 11) for step in range(88)]
    kept = one_matrix(entropies, {step: 1.0 if step < 6 else late for step in _LOOKS})
    controller = EntropyController(window=10, warmup=12, warmup_limit=30, r_max=16, alpha=0.5)
    decisions = phases.follow(controller, kept)
    windows = [d for d in decisions if d.plan.phase == "compress"]
    assert windows[0].begin == warmup
    assert [d.mean_rank() for d in windows] == ranks
    assert [d.begin for d in decisions[1:]] == [d.end for d in decisions[:-1]]
    assert decisions[-1].end == 88 and math.isnan(decisions[-1].entropy)
    assert all(d.mean_rank() == 0 for d in decisions if d.plan.phase == "warmup")


def test_a_rising_entropy_keeps_the_rank_at_its_bound(told: None, tmp_path: Path) -> None:
    record = "\n".join(phases.make(tmp_path))
    assert "the entropy rose by" in record
    rows = [row for row in table(tmp_path / "decisions.csv") if row["phase"] == "compress"]
    assert {row["policy"] for row in rows} == set(phases.POLICIES)
    assert {float(row["mean rank"]) for row in rows} == {phases.R_MAX}


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
