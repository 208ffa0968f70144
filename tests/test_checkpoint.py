"""Checkpoints: whole or not there, refused when foreign or damaged."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from edgc_ddp.train import checkpoint
from edgc_ddp.train.loop import make_optimizer, resume
from edgc_ddp.train.schema import Config

IDENTITY: dict[str, Any] = {
    "world_size": 1,
    "controller": "FixedRank",
    "parameters": {"a.weight": [4, 3], "a.bias": [4]},
}
TRAINING = {"model": {"a.weight": torch.arange(12.0).view(4, 3)}, "optimizer": {"step": 3}}
HOOK = {"residual": torch.ones(4, 3), "plan": {"a.weight": 2}}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path / "checkpoints", 5, TRAINING, HOOK, IDENTITY)


def test_what_was_saved_is_read_back(saved: Path, tmp_path: Path) -> None:
    assert checkpoint.check(saved, IDENTITY) == 5
    training = checkpoint.read(saved / "model.pt")
    assert torch.equal(training["model"]["a.weight"], TRAINING["model"]["a.weight"])
    assert checkpoint.read(saved / checkpoint.hook_file(0))["plan"] == {"a.weight": 2}
    for given in (saved, tmp_path, tmp_path / "checkpoints"):
        assert checkpoint.find(str(given)) == saved


def test_another_text_is_refused(tmp_path: Path) -> None:
    """Without a network the plays are replaced: a run that goes on must not meet that in silence."""
    folder = checkpoint.save(tmp_path, 5, TRAINING, None, {**IDENTITY, "text": "stdlib 12ab"})
    # Before the text is read nothing is known of it.
    assert checkpoint.check(folder, IDENTITY) == 5
    assert checkpoint.check(folder, {**IDENTITY, "text": "stdlib 12ab"}) == 5
    with pytest.raises(ValueError, match="text stdlib 12ab, this run .*; set data.source=stdlib"):
        checkpoint.check(folder, {**IDENTITY, "text": "shakespeare 34cd"})


def test_a_resumed_optimizer_has_this_runs_options(tmp_path: Path) -> None:
    """And the averages of the run before."""
    made = []
    for betas, decay in (((0.9, 0.95), 0.1), ((0.5, 0.6), 0.0)):
        model = torch.nn.ParameterDict({"w": torch.ones(4, 3), "b": torch.ones(4)})
        config = Config()
        config.optimizer.betas, config.optimizer.weight_decay = list(betas), decay
        made.append((model, make_optimizer(model, config)))
    (model, optimizer), (other, later) = made
    (model["w"].sum() + model["b"].sum()).backward()
    optimizer.step()
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    folder = checkpoint.save(tmp_path, 1, training, None, IDENTITY)
    run: Any = SimpleNamespace(
        identity=IDENTITY, pipeline=None, state=None, ddp=SimpleNamespace(module=other)
    )
    run.optimizer = later
    assert resume(run, folder) == 1
    found = [(group["betas"], group["weight_decay"]) for group in later.param_groups]
    assert found == [((0.5, 0.6), 0.0)] * 2
    assert torch.equal(later.state[other["w"]]["exp_avg"], optimizer.state[model["w"]]["exp_avg"])


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10):
        checkpoint.save(tmp_path, step, TRAINING, None, IDENTITY)
    assert [path.name for path in checkpoint.complete(tmp_path)] == [
        "step-00000009",
        "step-00000010",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]
    assert checkpoint.find(str(tmp_path)).name == "step-00000010"


def test_a_longer_runs_checkpoints_do_not_push_out_the_new_ones(tmp_path: Path) -> None:
    for step in (500, 600, 100, 200, 300):
        saved = checkpoint.save(tmp_path, step, TRAINING, None, IDENTITY)
        assert checkpoint.check(saved, IDENTITY) == step
    left = [int(path.name[5:]) for path in checkpoint.complete(tmp_path)]
    assert left == [200, 300, 500, 600]


def test_a_new_run_in_a_used_folder_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step-00000005 .*train.resume=auto .*hydra.run.dir"):
        checkpoint.check_unused(tmp_path)
    (saved / checkpoint.MANIFEST).unlink()
    checkpoint.check_unused(tmp_path)
    checkpoint.check_unused(tmp_path / "new")


def test_auto_resume_walks_back_to_one_that_is_whole(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint.own_newest(tmp_path / "new") is None
    newest = checkpoint.save(saved.parent, 6, TRAINING, HOOK, IDENTITY)
    assert checkpoint.own_newest(tmp_path) == newest
    assert capsys.readouterr().err == ""
    (newest / "model.pt").write_bytes(b"")
    assert checkpoint.own_newest(tmp_path) == saved
    said = capsys.readouterr().err
    assert "model.pt has 0 bytes" in said and f"going on from {saved}" in said
    (newest / checkpoint.MANIFEST).write_text("{")
    assert checkpoint.own_newest(tmp_path) == saved
    (saved / "hook-rank0.pt").unlink()
    with pytest.raises(ValueError, match="no checkpoint in .* is whole"):
        checkpoint.own_newest(tmp_path)


def test_a_crash_while_writing_leaves_the_earlier_checkpoint(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save

    def crash(content: object, path: Path) -> None:
        real(content, path)
        path.write_bytes(path.read_bytes()[:20])
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(saved.parent, 6, TRAINING, HOOK, IDENTITY)
    assert list((saved.parent / "step-00000006").iterdir()) == []
    assert checkpoint.find(str(tmp_path)) == saved
    # Rewriting a finished step must not pass for finished meanwhile.
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(saved.parent, 5, TRAINING, HOOK, IDENTITY)
    with pytest.raises(ValueError, match="no finished checkpoint"):
        checkpoint.find(str(tmp_path))


def test_an_unfinished_checkpoint_does_not_count(saved: Path, tmp_path: Path) -> None:
    (saved / checkpoint.MANIFEST).unlink()
    with pytest.raises(ValueError, match="no finished checkpoint"):
        checkpoint.find(str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint.find(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"world_size": 4}, "written with world_size 1, this run has 4; set nproc"),
        ({"controller": "Dense"}, "written with controller FixedRank, this run has Dense"),
        ({"controller": None}, "written with controller FixedRank, this run has None"),
        ({"parameters": {"a.weight": [4, 3], "a.bias": [5]}}, r"a.bias has shape \[4\] there"),
        ({"parameters": {"a.weight": [4, 3]}}, r"a.bias has shape \[4\] there and None here"),
        ({"parameters": {**IDENTITY["parameters"], "b": [1]}}, "b has shape None there"),
    ],
)
def test_a_foreign_checkpoint_is_refused(saved: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        checkpoint.check(saved, {**IDENTITY, **change})


@pytest.mark.parametrize("name", ["model.pt", "hook-rank0.pt"])
def test_a_truncated_or_missing_file_is_refused(saved: Path, name: str) -> None:
    whole = (saved / name).read_bytes()
    (saved / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{name} has {len(whole) // 2} bytes"):
        checkpoint.check(saved, IDENTITY)
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.read(saved / name)
    (saved / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        checkpoint.check(saved, IDENTITY)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "step": "x", "files": {}}'])
def test_a_damaged_manifest_is_refused(saved: Path, text: str) -> None:
    (saved / checkpoint.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.check(saved, IDENTITY)


def test_a_manifest_of_another_format_is_refused(saved: Path) -> None:
    manifest = json.loads((saved / checkpoint.MANIFEST).read_text())
    (saved / checkpoint.MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        checkpoint.check(saved, IDENTITY)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code from a checkpoint ran",))


def test_code_in_a_checkpoint_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": Payload()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.read(tmp_path / "evil.pt")
    assert capsys.readouterr().out == ""
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="expected a dictionary, found list"):
        checkpoint.read(tmp_path / "list.pt")
