"""Pipeline stages: the model cut and put together again, gradients, aligned ranks, agreement."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from edgc_ddp import EDGCState
from edgc_ddp.controllers import FixedRank
from edgc_ddp.controllers.alignment import FollowingStage, News, aligned_rank, seconds_at
from edgc_ddp.decisions import FOREVER, Layout, MatrixSpec, Observation, Plan, State
from edgc_ddp.lane import Lane
from edgc_ddp.report.load import Run
from edgc_ddp.report.stages import draw_stages, time_line
from edgc_ddp.stages import StageBoard, StageCounts, StageRow
from edgc_ddp.train import checkpoint
from edgc_ddp.train.model import build, shapes
from edgc_ddp.train.pipeline import Pipeline
from edgc_ddp.train.record import headline
from edgc_ddp.train.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from edgc_ddp.train.stage_clock import StageClock
from edgc_ddp.train.stage_model import Stage
from edgc_ddp.train.validate import identity

CPU = torch.device("cpu")
TABLE_5 = [(16, 0.7417), (32, 1.4833), (64, 3.0167)]
DENSE = 3.0417
LAYOUT = Layout((MatrixSpec("w", 128, 256), MatrixSpec("v", 32, 64)), world_size=2)


# Decisions: method section 3, "Stage alignment".


@pytest.mark.parametrize(
    ("first", "slack", "dense", "table", "rank"),
    [
        # T^-1(16) = 16, on the dot: 4 (16 / 4 + 1).
        (16, 0.0, 20.0, [(8, 8.0), (16, 16.0), (32, 32.0)], 20),
        (16, 3.9, 20.0, [(8, 8.0), (16, 16.0), (32, 32.0)], 20),
        (16, 4.0, 32.0, [(8, 8.0), (16, 16.0), (32, 32.0)], 24),
        # Exactly T0 is not above T0, but 4 (20 / 4 + 1) is above r_max = 20.
        (16, 4.0, 20.0, [(8, 8.0), (16, 16.0), (32, 32.0)], 0),
        (16, 4.1, 20.0, [(8, 8.0), (16, 16.0), (32, 32.0)], 0),
        # A stage slower than the first: less than the first one's rank, never less than 4.
        (16, 0.0, 90.0, [(8, 16.0), (16, 32.0), (32, 64.0)], 12),
        (16, 0.0, 90.0, [(8, 60.0), (16, 80.0)], 4),
        # Where no rank pays, dense.
        (1.0, 0.5, 2.0, [(2, 2.5), (4, 3.0)], 0),
        (0.7417, 0.0, DENSE, TABLE_5, 20),
        (0.7417, 0.7416, DENSE, TABLE_5, 36),
        (0.7417, 2.2750, DENSE, TABLE_5, 0),
        (math.nan, 1.0, DENSE, TABLE_5, 0),
    ],
)
def test_the_aligned_rank_is_that_of_the_equations(
    first: float, slack: float, dense: float, table: list[tuple[int, float]], rank: int
) -> None:
    assert aligned_rank(first, slack, dense, table) == rank


def test_later_stages_of_equal_speed_keep_more_rank() -> None:
    ranks = [aligned_rank(0.7417, stage * 0.3, DENSE, TABLE_5) for stage in range(8)]
    assert ranks == [20, 24, 32, 36, 44, 48, 56, 64]
    assert all(aligned_rank(0.7417, s * 0.3, DENSE, TABLE_5) == 0 for s in range(8, 12))


def test_times_between_and_beyond_trials_are_linear() -> None:
    table = [(2, 1.0), (4, 2.0), (8, 6.0)]
    assert [seconds_at(table, rank) for rank in (1, 2, 3, 4, 6, 8, 10)] == [
        *[0.5, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    ]
    assert math.isnan(seconds_at([], 4))


class Told:
    """A board on which the test writes."""

    def __init__(self) -> None:
        self.now: News | None = None

    def news(self, stage: int) -> News | None:
        return self.now


class Follower:
    """A following stage and its links: answers each plan with the time that its rank takes."""

    def __init__(self, seconds: Callable[[int], float], **options: Any) -> None:
        self.told = Told()
        self.seconds = seconds
        self.controller = FollowingStage(1, self.told, **options)
        self.state: State = self.controller.init(LAYOUT)
        self.plan: Plan | None = None
        self.step = 2

    def decide(self) -> Plan:
        seen = None
        if self.plan is not None:
            self.step = self.plan.until
            rank = self.plan.ranks["w"]
            seen = Observation(steps=5, span_seconds=self.seconds(rank))
        self.state, self.plan = self.controller.decide(self.state, seen, self.step)
        return self.plan

    def news(self, rank: int, until: int, first: float = 16.0, slack: float = 0.0) -> None:
        self.told.now = News(rank, until, first, slack)


def linear(rank: int) -> float:
    return float(rank) if rank else 33.0


def test_a_following_stage_times_its_ranks_once_and_then_aligns() -> None:
    stage = Follower(linear)
    assert (stage.decide().phase, stage.plan.until) == ("start", 3)
    stage.news(0, until=12)
    assert (stage.decide().phase, stage.plan.until) == ("warmup", 13)
    stage.news(16, until=22, first=16.0, slack=6.0)
    trials = [stage.decide() for _ in range(6)]
    assert [plan.ranks["w"] for plan in trials] == [2, 4, 8, 16, 32, 64]
    assert {plan.phase for plan in trials} == {"calibration"}
    assert [plan.until - 13 for plan in trials] == [5, 10, 15, 20, 25, 30]
    plan = stage.decide()
    # Rank 64 took longer than dense: nothing above is timed. T_1 = 22 -> 4 (5 + 1).
    assert (plan.ranks, plan.phase, plan.until) == ({"w": 24, "v": 24}, "compress", 44)
    assert "6 s to spare" in plan.reason
    stage.news(12, until=53, first=12.0, slack=6.0)
    assert stage.decide().ranks["w"] == 20
    assert stage.plan.until == 54


def settle(stage: Follower, windows: int = 12) -> list[int]:
    """The rank of each of so many windows."""
    assert stage.plan is not None and stage.told.now is not None
    found = []
    for _ in range(windows):
        now = stage.told.now
        stage.news(now.rank, stage.plan.until + 9, now.first_seconds, now.slack_seconds)
        found.append(stage.decide().ranks["w"])
    return found


def test_a_stage_that_changes_speed_moves_its_rank() -> None:
    stage = Follower(linear)
    stage.news(0, until=12)
    stage.decide()
    stage.news(16, until=22, first=16.0, slack=6.0)
    while stage.decide().phase == "calibration":
        pass
    assert set(settle(stage)) == {24}
    # Twice as slow: T(r) = 2 r, T^-1(22) = 11 -> 12.
    stage.seconds = lambda rank: 2 * linear(rank)
    slower = settle(stage)
    assert slower[0] < 24 and set(slower[4:]) == {12}
    # So fast that dense takes no longer than the first stage at its rank.
    stage.seconds = lambda rank: linear(rank) / 2
    faster = settle(stage)
    assert faster[0] > 12 and set(faster[4:]) == {0}
    # While dense its dense average is timed, and brings it back.
    stage.seconds = linear
    assert set(settle(stage)[4:]) == {24}


def test_one_wrong_time_does_not_send_the_rank_to_and_fro() -> None:
    wrong = {16: 8.0, 32: 24.0}
    stage = Follower(lambda rank: wrong.get(rank, linear(rank)))
    stage.news(0, until=12)
    stage.decide()
    stage.news(16, until=22, first=10.0, slack=4.0)
    while stage.decide().phase == "calibration":
        pass
    # Timed at 24 s, rank 32 misleads, and so does rank 16 at 8 s: 14 s seem to be worth rank 24.
    assert stage.plan.ranks["w"] == 24
    wrong.clear()
    # True times ask for 16. Steps of 4 stay when both neighbours seem to fit, so one step beside it is
    # as near as a table with a stale entry comes.
    settled = set(settle(stage)[4:])
    assert len(settled) == 1 and settled <= {12, 16, 20}


def test_a_stage_without_times_or_alignment_takes_the_first_stages_rank() -> None:
    common = Follower(linear, ranks="common")
    common.news(16, until=22)
    assert common.decide().ranks == {"w": 16, "v": 16}
    untimed = Follower(lambda rank: math.nan)
    untimed.news(16, until=22)
    plans = [untimed.decide() for _ in range(3)]
    assert [plan.ranks["w"] for plan in plans] == [0, 16, 16]
    assert plans[-1].phase == "compress" and "times unknown" in plans[-1].reason


def test_a_stage_that_goes_dense_says_why() -> None:
    def reason(first: float) -> str:
        stage = Follower(linear)
        stage.news(0, until=12)
        stage.decide()
        stage.news(16, until=22, first=first)
        while stage.decide().phase == "calibration":
            pass
        assert stage.plan is not None and stage.plan.ranks["w"] == 0
        return stage.plan.reason

    assert reason(40.0).endswith("dense, which is done in that time: compressing would win nothing")
    assert reason(32.5).endswith("the rank that fits is above the highest that pays on this link")


def test_the_mean_rank_of_a_run_leaves_dense_stages_and_dense_steps_out() -> None:
    board = StageBoard(stages=2, start_iter=2)
    assert board.run_mean_rank == 0.0
    dense, one, both = (
        StageCounts.of({"wire_bytes": 1, "dense_bytes": 2}, ranks)
        for ranks in ([0, 0, 0], [16, 16, 0], [16, 16, 8])
    )
    for whole in (dense, one, both, dense):
        board.count(whole)
    assert board.run_mean_rank == (16 + 40 / 3) / 2 and board.whole == dense
    again = StageBoard(stages=2, start_iter=2)
    again.load_state_dict(board.state_dict())
    assert (again.run_mean_rank, again.whole) == (board.run_mean_rank, dense)


@pytest.mark.parametrize(
    ("wire", "saved"), [(100, "0%"), (100.1, "0%"), (102, "-2%"), (99.6, "0%"), (40, "60%")]
)
def test_a_headline_knows_no_negative_zero(wire: float, saved: str) -> None:
    row = {"loss": 1.0, "mean_rank": 0.0, "entropy": math.nan, "wire_bytes": wire}
    told = headline({**row, "dense_bytes": 100, "stages": 2})
    assert told == f"loss 1.000 rank 0.0 saved {saved} (2 stages)"


def _resumed(tmp_path: Path, first: ParallelConfig, then: ParallelConfig, **rank: int) -> int:
    """Check a checkpoint of a run with ``first`` for one with ``then`` (and FixedRank's other options)."""
    options = {"model": CONFIG.model, "train": CONFIG.train}
    written = identity(Config(**options, parallel=first), FixedRank(4), 4)
    manifest = {"format": checkpoint.FORMAT, "step": 5, "files": {}, **written}
    (tmp_path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    controller = FixedRank(**{"rank": 4, **rank})
    return checkpoint.check(
        tmp_path, identity(Config(**options, parallel=then), controller, world_size=4)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": "common"},
        {"ranks": "own"},
        {"schedule": "gpipe"},
        {"microbatches": 2},
        {"calibration_steps": 6},
    ],
)
def test_resume_with_other_stages_is_refused_before_any_process(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    first = ParallelConfig(pp=2)
    assert _resumed(tmp_path, first, ParallelConfig(pp=2, compressed=[0, 1])) == 5
    (name, value), *_ = change.items()
    with pytest.raises(ValueError, match=rf"parallel\.{name}=.*, this run has {value}, but .*set"):
        _resumed(tmp_path, first, ParallelConfig(pp=2, **change))
    # Without a pipeline none of them means anything.
    assert _resumed(tmp_path, ParallelConfig(), ParallelConfig(**change)) == 5


def test_resume_with_other_compressed_stages_or_controller_options_is_refused(
    tmp_path: Path,
) -> None:
    first = ParallelConfig(pp=2, ranks="selective")
    with pytest.raises(ValueError, match=r"parallel\.compressed=\[0\], this run has \[0, 1\]"):
        _resumed(tmp_path, first, ParallelConfig(pp=2, ranks="selective", compressed=[0, 1]))
    with pytest.raises(
        ValueError, match=r"controller\.rank=4, this run has 8; set controller\.rank"
    ):
        _resumed(tmp_path, ParallelConfig(), ParallelConfig(), rank=8)
    # A checkpoint that does not say how its stages were set up cannot be known to fit.
    manifest = json.loads((tmp_path / checkpoint.MANIFEST).read_text())
    del manifest["pipeline"], manifest["options"]
    (tmp_path / checkpoint.MANIFEST).write_text(json.dumps({**manifest, "stages": 2}))
    now = identity(Config(model=CONFIG.model, parallel=ParallelConfig(pp=2)), FixedRank(4), 4)
    with pytest.raises(ValueError, match=r"parallel\.ranks=unknown"):
        checkpoint.check(tmp_path, now)


def test_a_first_stage_that_is_dense_for_ever_keeps_all_dense() -> None:
    stage = Follower(linear)
    stage.news(0, until=FOREVER)
    assert (stage.decide().phase, stage.plan.until > FOREVER) == ("dense", True)


@pytest.mark.parametrize("bad", [{"ranks": "other"}, {"calibration_steps": 0}])
def test_bad_options_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FollowingStage(1, Told(), **bad)
    with pytest.raises(ValueError, match="stage=0"):
        FollowingStage(0, Told())


def test_the_report_shows_the_stages_of_a_pipeline_only(tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [
        {"stage": k, "rank": 8 * k, "finish_seconds": 1.0 + k, "residual": None} for k in range(2)
    ]
    stages[0]["backward_end_seconds"] = 0.25
    assert [time_line(stage, 2.0) for stage in stages] == [(0.25, 0.75, 1.0), (2.0, 0.0, 0.0)]
    picture = draw_stages(Run(tmp_path, summary={"stages": stages}))
    assert picture is not None and picture.png.startswith(b"\x89PNG")
    assert draw_stages(Run(tmp_path, summary={"steps": 3})) is None
    stages[1]["finish_seconds"] = None
    assert draw_stages(Run(tmp_path, summary={"stages": stages})) is None


# Agreement.


def _exchange(rank: int, world_size: int) -> tuple[Any, ...]:
    group = dist.group.WORLD
    assert group is not None
    board = StageBoard(stages=2, start_iter=2)
    stage, replica = divmod(rank, 2)
    for until, spans in ((12, (1.0, 2.0)), (22, (3.0, math.nan))):
        first = StageRow(rank=8, until=until, span=spans[replica], backward=0.25 + replica)
        last = StageRow(rank=12, until=99, finish=10.0 * replica)
        board.exchange(stage, (first, last)[stage], Lane(group, CPU))
    again = StageBoard(stages=2, start_iter=2)
    again.load_state_dict(board.state_dict())
    assert again.news(1) == board.news(1) and again.due(23) and not again.due(22)
    with pytest.raises(ValueError, match="2 stages"):
        StageBoard(stages=3, start_iter=2).load_state_dict(board.state_dict())
    return board.news(0), board.news(1), repr(board.rows)


def test_all_ranks_read_the_same_board(ranks: Callable[[int], Ranks]) -> None:
    boards = ranks(4)(_exchange)
    assert len(set(boards)) == 1
    first, second, rows = boards[0]
    # One replica's nan is left out; the time belongs to the rank of the window before.
    assert (second.rank, second.until, second.first_seconds) == (8, 22, 3.0)
    assert (first.slack_seconds, second.slack_seconds) == (0, 0.75)
    assert "finish=5.0" in rows


# The model in pieces.

CONFIG = Config(
    model=ModelConfig(width=16, layers=3, heads=2, context=8),
    parallel=ParallelConfig(pp=2, microbatches=4),
    train=TrainConfig(batch_size=8, bucket_cap_mb=0.004),
)


def some_texts(replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    texts = torch.randint(0, 256, (8, 9), generator=generator)
    return texts[:, :-1], texts[:, 1:]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_stages_in_a_row_are_the_whole_model(stages: int) -> None:
    whole = build(CONFIG.model, 0, CPU)
    x, _ = some_texts(0)
    expected, names = whole(x), shapes(whole)
    found: dict[str, list[int]] = {}
    for stage in range(stages):
        part = Stage(build(CONFIG.model, 0, CPU), stage, stages)
        x = part(x)
        found |= shapes(part)
    assert torch.equal(x, expected) and found == names


def whole_gradients(config: Config, replicas: int) -> tuple[dict[str, Tensor], float]:
    """Mean over the replicas of the whole model's gradients, and the norm of that."""
    model = build(config.model, config.seed, CPU)
    for replica in range(replicas):
        inputs, targets = some_texts(replica)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        (loss / replicas).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    return gradients, norm.item()


def _pipeline_gradients(rank: int, world_size: int, pp: int, schedule: str) -> int:
    parallel = ParallelConfig(pp=pp, schedule=schedule, microbatches=4)
    model = ModelConfig(width=16, layers=5, heads=2, context=8)
    config = Config(model=model, train=CONFIG.train, parallel=parallel)
    pipeline = Pipeline(config, CPU)
    inputs, targets = some_texts(pipeline.replica)
    expected, expected_norm = whole_gradients(config, pipeline.replicas)
    for _ in range(3):
        pipeline.ddp.zero_grad()
        loss = pipeline.backward(inputs, targets)
        for name, p in pipeline.module.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], atol=1e-6, rtol=1e-4)
    own = StageCounts(
        10.0 + pipeline.stage, 100.0, 8.0 * (pipeline.stage == 0), pipeline.stage == 0
    )
    norm, told_loss = pipeline.clip(expected_norm / 2, loss, own)
    pipeline.count()
    whole_metrics = pipeline.whole_metrics()
    assert whole_metrics["wire_bytes"] == 10 * pp + pp * (pp - 1) // 2
    # A dense stage is not one of rank 0.
    assert (whole_metrics["mean_rank"], whole_metrics["dense_bytes"]) == (8.0, 100 * pp)
    assert norm.item() == pytest.approx(expected_norm, rel=1e-4)
    for name, p in pipeline.module.named_parameters():
        torch.testing.assert_close(p.grad, expected[name] / 2, atol=1e-6, rtol=1e-4)
    whole = build(model, config.seed, CPU)
    mean = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten()).item()
    assert told_loss.item() == pytest.approx(mean, rel=1e-5)
    held_out = torch.stack([pipeline.held_out_loss(inputs, targets)])
    dist.all_reduce(held_out, group=pipeline.group)
    assert held_out.item() == pytest.approx(mean * targets.numel(), rel=1e-5)
    return pipeline.stage


@pytest.mark.parametrize(("pp", "schedule"), [(2, "1f1b"), (2, "gpipe"), (4, "1f1b")])
def test_gradients_are_those_of_the_whole_model(
    ranks: Callable[[int], Ranks], pp: int, schedule: str
) -> None:
    stages = ranks(4)(_pipeline_gradients, pp, schedule)
    assert stages == [rank * pp // 4 for rank in range(4)]


def _train_a_little(rank: int, world_size: int) -> tuple[bytes, int, dict[str, int]]:
    pipeline = Pipeline(CONFIG, CPU)
    state = EDGCState(
        FixedRank(4, window=2), pipeline.module, pipeline.replica_group, min_compression_rate=0
    )
    pipeline.ddp.register_comm_hook(state, pipeline.clock.hook)
    optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        loss = pipeline.backward(*some_texts(10 * step + pipeline.replica))
        pipeline.clip(1.0, loss, StageCounts.of(state.metrics(), state.plan().values()))
        pipeline.count()
        optimizer.step()
    # No backward that is not a step's: compression starts when it is told to.
    assert state.metrics()["step"] == 6
    pipeline.exchange(state)
    row = pipeline.board.rows[pipeline.stage]
    assert row.rank == 4 and 0 < row.backward < row.ended < row.finish
    whole, told = pipeline.whole_metrics(), pipeline.summaries(state, state.metrics())
    assert [stage["reason"] for stage in told] == [state.history[-1]["reason"]] * 2
    assert whole["wire_bytes"] == sum(stage["wire_bytes"] for stage in told)
    # No step since the exchange above, so its times stand.
    assert told[pipeline.stage]["finish_seconds"] == row.finish
    assert (whole["mean_rank"], whole["run_mean_rank"]) == (4.0, 4.0)
    decisions = pipeline.new_decisions(state)
    assert [d["stage"] for d in decisions] == [0] * len(state.history) + [1] * len(state.history)
    assert pipeline.new_decisions(state) == []
    state.close()
    return pipeline.module.tokens.weight.detach().numpy().tobytes(), pipeline.stage, state.plan()


def test_the_tied_weight_stays_one_under_compression(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(4)(_train_a_little)
    assert len({weight for weight, _, _ in results}) == 1
    names = [set(plan) for _, _, plan in results]
    assert names[0] == names[1] and names[2] == names[3]
    assert "blocks.0.up.weight" in names[0] and "blocks.2.up.weight" in names[2]
    assert all(set(plan.values()) == {4} for _, _, plan in results)


DELAY = 0.6


def _late(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: Any = torch.futures.Future()
    threading.Timer(DELAY, future.set_result, [bucket.buffer()]).start()
    return future


_late.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}


def _slow_last_stage(rank: int, world_size: int) -> float:
    pipeline = Pipeline(CONFIG, CPU)
    if pipeline.stage == 1:
        pipeline.ddp.register_comm_hook(None, _late)
    texts = some_texts(pipeline.replica)
    for _ in range(2):
        # Both stages at once, as after the norm of a step before.
        dist.barrier()
        begin = time.perf_counter()
        pipeline.ddp.zero_grad()
        pipeline._schedule.step(
            *([texts[0]] if pipeline.stage == 0 else []),
            **({"target": texts[1]} if pipeline.stage == 1 else {}),
        )
        seconds = time.perf_counter() - begin
    return seconds


def test_no_stage_waits_for_the_averaging_of_the_one_behind_it(
    ranks: Callable[[int], Ranks],
) -> None:
    seconds = ranks(4)(_slow_last_stage)
    assert max(seconds[:2]) < DELAY < min(seconds[2:])


def test_a_clock_that_nobody_reads_keeps_the_latest_times() -> None:
    clock = StageClock(torch.device("cpu"))
    for _ in range(3000):
        clock.begin_step()
        clock.note("ended")
    assert len(clock._spans["ended"]) == 1000
    assert clock.read()["ended"] < 1 and clock.read() == {}
