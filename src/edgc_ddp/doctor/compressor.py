"""Averages of a model's gradients without a backward: what the compressor costs, alone and on the link."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edgc_ddp.lane import Lane, Task, payload_bytes
from edgc_ddp.maths.comm_time import MIB
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.observer import Observer
from edgc_ddp.reducers.bucket import Bucket, Settings
from edgc_ddp.reducers.dense import reduce_dense
from edgc_ddp.reducers.low_rank import reduce_low_rank
from edgc_ddp.registry import Registry


class _Done:
    """The handle of a collective that never was."""

    def wait(self) -> None:
        pass


class SilentLane(Lane):
    """Counts what collectives would send and sends nothing: what remains is the process's own work."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size, self.rank, self.device = world_size, 0, device
        self.sent_bytes = 0.0

    def all_reduce(self, tensor: Tensor, channel: int) -> _Done:
        self.sent_bytes += self.traffic(payload_bytes(tensor))
        return _Done()

    def all_gather(self, everyone: Tensor, mine: Tensor, channel: int) -> _Done:
        self.sent_bytes += payload_bytes(mine) * (self.world_size - 1)
        everyone.view(self.world_size, -1).copy_(mine.view(1, -1))
        return _Done()

    def all_to_all(
        self, received: Tensor, parts: Tensor, sizes: Sequence[int], channel: int
    ) -> _Done:
        self.sent_bytes += (len(parts) - sizes[0]) * parts.element_size()
        received.view(self.world_size, -1).copy_(parts[: sizes[0]].view(1, -1))
        return _Done()


class Gradients:
    """A model's gradients, made up, in buckets as DDP would fill them."""

    def __init__(
        self, model: nn.Module, rank: int, settings: Settings, cap_mb: float, device: torch.device
    ) -> None:
        self.settings = settings
        self.memory = ParameterMemory(0, torch.float32)
        self.registry = registry = Registry(model, self.memory)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.buckets = []
        # Gradients become ready from the last layer to the first.
        for members in _grouped(parameters[::-1], cap_mb):
            slots = registry.slots(members)
            buffer = torch.cat([torch.randn_like(p).flatten() for p in members])
            self.buckets.append(Bucket(buffer.detach(), slots))
            for slot in slots:
                if slot.spec is not None:
                    self.memory.set_rank(slot, min(rank, slot.spec.rows), device)

    @property
    def largest_side(self) -> int:
        """Rows of the largest matrix; 0 when there is none."""
        specs = [slot.spec for slot in self.memory.slots.values()]
        return max((spec.rows for spec in specs if spec is not None), default=0)

    def tasks(self, lane: Lane, observer: Observer | None = None) -> list[Task]:
        """One task per bucket, to be run in this order; with ``observer`` as in a sampled iteration."""
        return [self._task(bucket, lane, observer) for bucket in self.buckets]

    def _task(self, bucket: Bucket, lane: Lane, observer: Observer | None) -> Task:
        if any(self.settings.compresses(slot) for slot in bucket.slots):
            return reduce_low_rank(bucket, lane, self.settings, self.memory, observer)
        return reduce_dense(bucket, lane, self.memory)


def run_alone(tasks: Sequence[Task]) -> None:
    """Run tasks of a :class:`SilentLane` on this thread."""
    for task in tasks:
        for handle in task:
            handle.wait()


def _grouped(parameters: Sequence[Tensor], cap_mb: float) -> list[list[Tensor]]:
    """DDP's buckets: 1 MiB first, then ``cap_mb``; one dtype each."""
    groups: list[list[Tensor]] = []
    size, cap = 0, min(1.0, cap_mb) * MIB
    for parameter in parameters:
        if not groups or size >= cap or groups[-1][0].dtype != parameter.dtype:
            cap = cap_mb * MIB if groups else cap
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += payload_bytes(parameter)
    return groups
