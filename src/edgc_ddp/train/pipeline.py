"""One rank's place in a pipeline: its stage of the model, its groups, forward and backward.

Rank ``stage * dp + replica``. A step's backward ends with each stage averaging over its own replicas;
what stages share (the tied weight, the gradient's norm) is settled over the pipeline afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState
from edgc_ddp.controllers import Dense
from edgc_ddp.controllers.alignment import FollowingStage
from edgc_ddp.decisions import Controller
from edgc_ddp.lane import Lane
from edgc_ddp.stages import StageBoard, StageCounts, StageRow
from edgc_ddp.train.model import VOCABULARY, build
from edgc_ddp.train.schema import Config
from edgc_ddp.train.stage_clock import StageClock, TimedStage
from edgc_ddp.train.stage_model import Stage

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline:
    """Build it on every rank of an initialised process group, in the same order of calls."""

    def __init__(self, config: Config, device: torch.device) -> None:
        parallel = config.parallel
        self.config = config
        self.device = device
        self.stages = parallel.pp
        self.replicas = dist.get_world_size() // self.stages
        mesh = init_device_mesh(
            device.type, (self.stages, self.replicas), mesh_dim_names=("pp", "dp")
        )
        self.group: dist.ProcessGroup = mesh.get_group("pp")
        self.replica_group: dist.ProcessGroup = mesh.get_group("dp")
        self.stage, self.replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        self._tied_group = self._join_first_and_last()
        whole = build(config.model, config.seed, device)
        self.module = Stage(whole, self.stage, self.stages, config.train.bf16)
        self.ddp = DistributedDataParallel(
            self.module,
            process_group=self.replica_group,
            bucket_cap_mb=config.train.bucket_cap_mb,
        )
        self.clock = StageClock(device)
        self.board = StageBoard(self.stages, config.hook.start_iter)
        world = dist.group.WORLD
        assert world is not None
        self._lane = Lane(world, device)
        self._schedule = self._make_schedule()
        self._told = 0
        self._times: dict[str, float] = {}
        self._counts = torch.zeros(len(astuple(StageCounts())), dtype=torch.float64, device=device)

    def _join_first_and_last(self) -> dist.ProcessGroup | None:
        """The group that shares the tied weight: both ends of this rank's column."""
        mine = None
        last = (self.stages - 1) * self.replicas
        for column in range(self.replicas):
            # All ranks make all groups, as torch.distributed asks.
            group = dist.new_group([column, last + column])
            if column == self.replica and self.stage in (0, self.stages - 1):
                mine = group
        return mine

    def _make_schedule(self) -> PipelineScheduleSingle:
        parallel, model = self.config.parallel, self.config.model
        texts = self.config.train.batch_size // parallel.microbatches

        def stream(width: int) -> Tensor:
            shape = (texts, model.context, width)
            return torch.empty(shape, device="meta", requires_grad=True)

        bytes_BT = torch.empty(texts, model.context, dtype=torch.int64, device="meta")
        # Without these PyTorch would find them out by an extra backward, which the hook would count.
        taken = bytes_BT if self.module.is_first else stream(model.width)
        given = stream(VOCABULARY if self.module.is_last else model.width)
        stage = TimedStage(
            self.ddp,
            self.stage,
            self.stages,
            self.device,
            input_args=taken,
            output_args=given,
            group=self.group,
            clock=self.clock,
        )
        # The loss is divided, not the gradient afterwards: the hook sees what it would see without stages.
        return SCHEDULES[parallel.schedule](
            stage, parallel.microbatches, loss_fn=self._part_of_loss, scale_grads=False
        )

    def _part_of_loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        return loss / self.config.parallel.microbatches

    def controller(self, first: Controller) -> Controller:
        """Who decides on this stage, ``first`` being the controller that the user asked for."""
        parallel = self.config.parallel
        if self.stage == 0 or parallel.ranks == "own":
            return first
        if parallel.ranks == "selective" and self.stage not in parallel.compressed:
            return Dense()
        ranks = "aligned" if parallel.ranks == "aligned" else "common"
        return FollowingStage(self.stage, self.board, ranks, parallel.calibration_steps)

    def backward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Averaged gradients of this replica's texts. Returns the loss on the last stage, else 0."""
        self.clock.begin_step()
        losses: list[Tensor] = []
        arguments = [inputs_BT.to(self.device)] if self.module.is_first else []
        if self.module.is_last:
            self._schedule.step(*arguments, target=targets_BT.to(self.device), losses=losses)
        else:
            self._schedule.step(*arguments)
        if self._tied_group is not None:
            # Each end has averaged its own part; the weight's gradient is the sum of both.
            dist.all_reduce(self.module.tokens.weight.grad, group=self._tied_group)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    def clip(self, most: float, loss: Tensor, counts: StageCounts) -> tuple[Tensor, Tensor]:
        """Clip the whole model's gradient to norm ``most``; its norm, and the last stage's loss.

        The stages' ``counts`` travel along; :meth:`count` reads their sum.
        """
        shared = self.module.tokens.weight if self.module.is_last else None
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        squares = [p.grad.double().square().sum() for p in parameters if p is not shared]  # type: ignore
        own = torch.tensor(astuple(counts), dtype=torch.float64, device=self.device)
        total = torch.cat([torch.stack([torch.stack(squares).sum(), loss.double()]), own])
        dist.all_reduce(total, group=self.group)
        self._counts = total[2:]
        norm = total[0].sqrt().float()
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm, total[1]

    def count(self) -> None:
        """Put the sum of the last :meth:`clip`'s counts on the board. Waits for the device, so call it once
        the whole step has been queued."""
        self.board.count(StageCounts(*self._counts.tolist()))

    @torch.no_grad()
    def held_out_loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Summed loss (nats) of these texts on the last stage, 0 on the others."""
        x = inputs_BT.to(self.device)
        if not self.module.is_first:
            x = torch.empty(*inputs_BT.shape, self.config.model.width, device=self.device)
            dist.recv(x, dist.get_global_rank(self.group, self.stage - 1), group=self.group)
        x = self.module(x)
        if self.module.is_last:
            targets = targets_BT.to(self.device).flatten()
            return F.cross_entropy(x.flatten(0, 1), targets, reduction="sum")
        dist.send(x, dist.get_global_rank(self.group, self.stage + 1), group=self.group)
        return torch.zeros((), device=self.device)

    def exchange(self, state: EDGCState | None) -> None:
        """Tell all stages of this one's plan and times, and learn theirs. Collective."""
        # At a run's end there may have been no step since the last exchange.
        self._times = self.clock.read() or self._times
        self.board.exchange(self.stage, StageRow.of(state, **self._times), self._lane)

    def begin(self, state: EDGCState | None) -> None:
        """Training begins or goes on: what ``state`` has decided so far is on record already."""
        self._told = len(state.history) if state is not None else 0

    def new_decisions(self, state: EDGCState | None) -> list[dict[str, Any]]:
        """Decisions of all stages since the last call, each with its ``stage``. Collective.

        They travel between iterations, so those of later stages are told later than they were taken.
        """
        history = state.history if state is not None else ()
        own = [{"stage": self.stage, **decision} for decision in history[self._told :]]
        self._told = len(history)
        everyone: list[Any] = [None] * self.stages
        dist.all_gather_object(everyone, own, group=self.group)
        return [decision for decisions in everyone for decision in decisions]

    def summaries(
        self, state: EDGCState | None, metrics: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Every stage's metrics, times and reason. Raises RuntimeError unless its replicas agree.
        Collective."""
        self.exchange(state)
        reason = state.history[-1]["reason"] if state is not None and state.history else ""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {**metrics, "reason": reason})
        stages = []
        for stage, row in enumerate(self.board.rows):
            replicas = everyone[stage * self.replicas : (stage + 1) * self.replicas]
            digests = [replica["plan_digest"] for replica in replicas]
            if len(set(digests)) > 1:
                raise RuntimeError(f"the replicas of stage {stage} have different plans: {digests}")
            first = replicas[0]
            stages.append(
                {
                    "stage": stage,
                    "rank": round(row.rank),
                    "phase": first["phase"],
                    "reason": first["reason"],
                    "final_mean_rank": first["mean_rank"],
                    "mean_rank": first["run_mean_rank"],
                    "backward_seconds": row.backward,
                    "backward_end_seconds": row.ended,
                    "finish_seconds": row.finish,
                    "residual": row.residual,
                    "wire_bytes": first["wire_bytes"],
                    "dense_bytes": first["dense_bytes"],
                    "plan_digest": first["plan_digest"],
                }
            )
        return stages

    def whole_metrics(self) -> dict[str, Any]:
        """All stages as one model: bytes of one replica, ranks over what is compressed."""
        whole = self.board.whole
        return {
            "stages": self.stages,
            "wire_bytes": round(whole.wire_bytes),
            "dense_bytes": round(whole.dense_bytes),
            "mean_rank": whole.mean_rank,
            "run_mean_rank": self.board.run_mean_rank,
        }
