"""The model carried to clusters: constants come back from made-up records, and errors are stated."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_doctor import facts

from benchmarks import paper_clusters as paper
from benchmarks import scale
from benchmarks.contestants import ring_bytes
from benchmarks.figures import figure6
from benchmarks.scale_fit import Fitted, Load, Point, Way, fit, read_all, validate
from benchmarks.workloads import WORKLOADS

TRUTH = Fitted(
    latency_s=2e-4,
    efficiency=0.9,
    byte_s=1e-9,
    overlap=0.3,
    dense_s=2e-3,
    compressed_s=4e-3,
    work={"fp32": (2e-9, 1e-10), "bf16": (3e-9, 2e-10)},
)
DENSE = 4.0 * WORKLOADS["gpt3m"].numel
WAYS = [
    Way("", 0, DENSE),
    *(
        Way(wire, rank, DENSE * rank / 256 * share, cap)
        for wire, share in (("fp32", 1.0), ("bf16", 0.5))
        for rank in (4, 16, 64)
        for cap in (25.0, 4.0)
    ),
]


def points(hosts: int, *, off: float = 1.0) -> list[Point]:
    found = []
    for bits in (1e8, 1e9, 1e10):
        for way in WAYS:
            blank = Point("r", hosts, max(1.0, hosts / 2), bits, Load(DENSE, 0.1), way, 1.0)
            found.append(replace(blank, seconds=off * TRUTH.expected(blank)))
    return found


def test_the_constants_behind_records_are_found_again() -> None:
    made = points(2)
    found = fit(made)
    for point in [*made, *points(8)]:
        assert found.expected(point) == pytest.approx(TRUTH.expected(point), rel=0.02)
    assert found.efficiency == pytest.approx(0.9, rel=0.05)


def test_the_error_is_told_apart_for_records_fitted_and_predicted() -> None:
    _, errors = validate([*points(2), *points(4), *points(8, off=2.0)])
    assert [(e.hosts, e.fitted, e.points) for e in errors] == [
        (2, True, 39), (4, False, 39), (8, False, 39)
    ]  # fmt: skip
    assert errors[0].worst < 0.02 and errors[1].worst < 0.03
    # Twice as long as expected is half of what was measured.
    assert errors[2].median == pytest.approx(0.5, abs=0.02)


def write_record(folder: Path, hosts: int) -> None:
    """A record as benchmarks.record writes it, of steps that take what the truth says."""
    folder.mkdir(parents=True)
    names = {way: f"edgc-r{way.rank}-{way.wire}@{way.cap_mb:g}" for way in WAYS if way.wire}
    names[WAYS[0]] = "ddp"
    raw: dict[str, Any] = {}
    for link, bits in (("100mbit", 1e8), ("1gbit", 1e9), ("unshaped", 1e12)):
        blocks = [_block("none", 0.1, 0.0, hosts)]
        for way, name in names.items():
            point = Point("r", hosts, max(1.0, hosts / 2), bits, Load(DENSE, 0.1), way, 1.0)
            blocks.append(_block(name, TRUTH.expected(point), way.payload_bytes, hosts))
        raw[link] = {"network": {"shared": False}, "blocks": blocks}
    (folder / "raw.json").write_text(json.dumps(raw))
    config = {"hosts": hosts, "model": "gpt3m", "machine": {"cores": 2}}
    (folder / "config.json").write_text(json.dumps(config))


def _block(name: str, seconds: float, payload: float, hosts: int) -> dict[str, Any]:
    sent = ring_bytes(payload, hosts)
    return {
        "contestant": name,
        "seconds": [[9.0, seconds, seconds]] * hosts,
        "interface_bytes": [sent] * hosts,
        "claimed_bytes": [sent] * hosts,
    }


def test_records_are_read_and_carried_to_every_cluster(tmp_path: Path) -> None:
    for hosts in (2, 4):
        write_record(tmp_path / "records" / f"2026-01-01-h{hosts}", hosts)
    made = read_all(tmp_path / "records")
    assert {point.bits_per_s for point in made} == {1e8, 1e9}
    assert {(point.hosts, point.per_core) for point in made} == {(2, 1.0), (4, 2.0)}
    out = tmp_path / "out"
    options = ["--records", str(tmp_path / "records"), "--out", str(out), "--latency-us", "10"]
    assert scale.main(options) == 0
    (folder,) = out.iterdir()
    with (folder / "scale.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(scale.GPUS) * len(scale.LINKS_GBIT)
    assert (folder / "scale.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "record.md").read_text()
    assert "| 2 | fitted | 26 |" in text and "| 4 | predicted | 26 |" in text
    assert "-14.6%" in text and "-16.1%" in text and "never" not in text
    ups = {
        (row["speed"], row["shape"], row["gpus"], row["gbit"]): float(row["speed_up"])
        for row in rows
    }
    # Compression pays where links are slow for the machines on them, and only there.
    assert ups["100.0", "hierarchical", "64", "1.0"] > 2 > ups["1.0", "hierarchical", "64", "400.0"]


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--records", str(tmp_path)]) == 1
    assert "benchmarks.step_time" in capsys.readouterr().err
    write_record(tmp_path / "2026-01-01-h2", 2)
    assert scale.main(["--records", str(tmp_path), "--rank", "5"]) == 1
    assert "--wire=bf16 --rank=5: measured were bf16 at rank 16" in capsys.readouterr().err
    (tmp_path / "odd.json").write_text("[]")
    assert scale.main(["--fit", str(tmp_path / "odd.json")]) == 1
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([point for point in points(2) if not point.way.wire])


def test_the_papers_clusters_are_those_of_its_tables() -> None:
    first, second = paper.CLUSTERS
    assert [c.nodes * c.gpus_per_node for c in paper.CLUSTERS] == [32, 64]
    assert [c.tp * c.pp * c.dp for c in paper.CLUSTERS] == [32, 64]
    assert [round(c.claimed, 3) for c in paper.CLUSTERS] == [-0.146, -0.161]
    # 2.5e9 / 4 entries of two bytes, sent once by each of two replicas at 4 GB/s.
    assert first.wire_s(0, 32.0) == pytest.approx(0.3125)
    # Of the twelve layer-widths squared a layer has, almost all of the parameters.
    assert 12 * second.width**2 * second.layers == pytest.approx(second.parameters, rel=0.05)
    assert paper.table_5().seconds(paper.MEAN_RANK) == pytest.approx(0.225, rel=0.02)
    assert paper.table_5_change() == pytest.approx(-0.14 / 6.927, rel=0.01)
    for answer in paper.answers():
        assert answer.exposed < 0 and answer.edgc_s < 0.06 * answer.dense_s


def test_figure_6_shows_each_part_and_carries_it_to_other_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = facts(1e9)
    monkeypatch.setattr(figure6, "measure", lambda folder: seen)
    lines = figure6.make(tmp_path)
    assert (tmp_path / "figure6.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "figure6.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["rank"]) for row in rows] == [average.rank for average in seen.averages]
    for row in rows:
        parts = sum(float(row[part]) for part in ("latency", "wire", "work"))
        assert float(row["model"]) == pytest.approx(parts, rel=1e-4)
        assert float(row["measured"]) == pytest.approx(parts, rel=1e-3)
        # Measured at 1 Gbit/s: there nothing changes, and at a tenth of it the wire takes ten times.
        assert float(row["model, 1 Gbit/s"]) == pytest.approx(parts, rel=1e-3)
        slow = parts + 9 * float(row["wire"])
        assert float(row["model, 0.1 Gbit/s"]) == pytest.approx(slow, rel=1e-3)
    assert "100 MB of gradient" in lines[0]
