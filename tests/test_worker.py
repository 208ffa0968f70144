"""One rank's life ends in order, whether its training ends well or not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
import torch.distributed as dist
from omegaconf import OmegaConf
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp.train import app, worker
from edgc_ddp.train.record import Recorder

Pools = Callable[[int], Ranks]
SHORT = [
    *["data=stdlib", "model=tiny", "model.width=32", "model.context=32", "train.batch_size=2"],
    *["train.steps=2", "train.eval_every=2", "train.eval_windows=2", "nproc=1"],
]


def job(folder: Path) -> worker.Job:
    with hydra.initialize_config_module("edgc_ddp.conf", version_base="1.3"):
        composed = hydra.compose("config", SHORT)
    text = OmegaConf.to_yaml(composed, resolve=True)
    return worker.Job(app.settings(composed), text, "edgc", str(folder))


@pytest.mark.parametrize("fails", [False, True], ids=["trained", "failed"])
def test_ddp_is_gone_before_its_group_is(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    alive = []
    destroy = dist.destroy_process_group

    def watched(group: dist.ProcessGroup | None = None) -> None:
        if group is None:
            alive.extend(o for o in gc.get_objects() if type(o) is DistributedDataParallel)
        destroy(group)

    def failing(*arguments: object) -> float:
        raise ArithmeticError("in the middle of a run")

    monkeypatch.setattr(worker.dist, "destroy_process_group", watched)
    if fails:
        monkeypatch.setattr(worker, "train", failing)
        with pytest.raises(ArithmeticError, match="in the middle"):
            worker.work(job(tmp_path))
    else:
        summary = worker.work(job(tmp_path))
        assert summary is not None and summary["steps"] == 2
    assert not dist.is_initialized()
    assert alive == []


def threads_on_unlike_machines(rank: int, world: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.os, "cpu_count", lambda: 8)
        # Two ranks on one machine, the third has the next for itself.
        return worker._common_threads(local_size=2 if rank < 2 else 1)


def test_all_ranks_take_as_many_threads(ranks: Pools) -> None:
    assert ranks(3)(threads_on_unlike_machines) == [4, 4, 4]


def test_a_row_behind_half_a_line_is_a_row(tmp_path: Path) -> None:
    """What a killed attempt left at its end would take the next attempt's first row with it."""
    for _ in range(2):
        recorder = Recorder(tmp_path, 0, 2)
        recorder.write("step", step=0)
        recorder.close()
        with (tmp_path / "metrics.jsonl").open("a") as rows:
            rows.write('{"kind": "st')
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert lines == ['{"kind": "step", "step": 0}', '{"kind": "st'] * 2
