"""The collectives over one process group, and what they send."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

CHANNELS = 2
"""Dependent collectives a bucket needs: factors P and small tensors first, factors Q second."""


def payload_bytes(tensor: Tensor) -> int:
    """Bytes of a dense tensor's entries, or of a sparse one's indices and values.

    >>> payload_bytes(torch.zeros(3, 5)), payload_bytes(torch.eye(4).to_sparse())
    (60, 80)
    """
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
    return sum(part.numel() * part.element_size() for part in parts)


class Handle(Protocol):
    """A collective that was started."""

    def wait(self) -> Any: ...


Task: TypeAlias = Generator[Handle, None, Tensor]
Mark: TypeAlias = "float | torch.cuda.Event"
TensorFuture: TypeAlias = "torch.futures.Future[Tensor]"


class Lane:
    """Collectives over one process group, with the bytes they send counted."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, channels: int = CHANNELS
    ) -> None:
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.device = device
        self.sent_bytes = 0.0
        """Bytes this rank has sent: 2 (W-1)/W of each payload that is all-reduced, as in a ring."""
        self.group = group
        self._channels: list[Any] = [group] * channels

    def all_reduce(self, tensor: Tensor, channel: int) -> Handle:
        """Start summing ``tensor`` over all ranks, in place."""
        self.sent_bytes += self.traffic(payload_bytes(tensor))
        handle: Handle = self._channels[channel].allreduce([tensor])
        return handle

    def average(self, tensor: Tensor) -> TensorFuture:
        """Average ``tensor`` over all ranks, in place, on DDP's own group and the caller's thread."""
        # As DDP does, to the last bit: it divides sparse gradients, and multiplies others unless they are
        # views of buckets.
        if tensor.is_sparse:
            tensor.div_(self.world_size)
        else:
            tensor.mul_(1 / self.world_size)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None

        def averaged(future: torch.futures.Future[Any]) -> Tensor:
            future.value()
            return tensor

        outcome: TensorFuture = work.get_future().then(averaged)
        return outcome

    def all_gather(self, everyone: Tensor, mine: Tensor, channel: int) -> Handle:
        """Start collecting every rank's ``mine`` (equally long, flat) in ``everyone``."""
        self.sent_bytes += payload_bytes(mine) * (self.world_size - 1)
        handle: Handle = self._channels[channel]._allgather_base(everyone, mine)
        return handle

    def all_to_all(
        self, received: Tensor, parts: Tensor, sizes: Sequence[int], channel: int
    ) -> Handle:
        """Start sending part k of ``parts`` to rank k. ``sizes`` are those of the parts, equal on all
        ranks, so ``received`` holds ``world_size`` parts of size ``sizes[rank]``."""
        self.sent_bytes += (len(parts) - sizes[self.rank]) * parts.element_size()
        handle: Handle = self._channels[channel].alltoall_base(
            received, parts, [sizes[self.rank]] * self.world_size, list(sizes)
        )
        return handle

    def traffic(self, payload_bytes: float) -> float:
        """Bytes one rank sends to all-reduce a payload of this size."""
        return payload_bytes * 2 * (self.world_size - 1) / self.world_size

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The element-wise sum over ranks, equal to the last bit on all of them. Blocks."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.all_reduce(total, channel=0).wait()
        result: list[float] = total.tolist()
        return result

    def require_equal(
        self, digest: str, describe: Callable[[], str], trouble: str, remedy: str
    ) -> None:
        """Raise RuntimeError on all ranks unless digests agree: the trouble, two ranks' descriptions, and
        the remedy."""
        values = self._gather_numbers([int(digest[:15], 16)], torch.int64)
        odd = next((r for r, value in enumerate(values) if value != values[0]), None)
        if odd is None:
            return
        texts = self._gather_texts(describe())
        raise RuntimeError(
            f"{trouble}, so their gradients could not be averaged: rank 0 has {texts[0]}, rank {odd} has "
            f"{texts[odd]}. {remedy}"
        )

    def _gather_numbers(self, numbers: Sequence[int], dtype: torch.dtype) -> list[list[int]]:
        """Every rank's numbers, as many on each. Blocks."""
        mine = torch.tensor(numbers, dtype=dtype, device=self.device)
        everyone = mine.new_empty(self.world_size * len(numbers))
        self.all_gather(everyone, mine, channel=0).wait()
        rows: list[list[int]] = everyone.view(self.world_size, len(numbers)).tolist()
        return rows

    def _gather_texts(self, text: str) -> list[str]:
        """Every rank's text. Blocks."""
        mine = text.encode()
        longest = max(size for (size,) in self._gather_numbers([len(mine)], torch.int64))
        padded = mine.ljust(longest, b"\0")
        return [
            bytes(row).rstrip(b"\0").decode()
            for row in self._gather_numbers(list(padded), torch.uint8)
        ]

    def mark(self) -> Mark:
        """A point in time on this lane."""
        return time.perf_counter()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Time between two marks."""
        assert isinstance(begin, float) and isinstance(end, float)
        return end - begin

    def submit(self, make_task: Callable[[], Task]) -> TensorFuture:
        """Run the task behind all earlier ones; the future carries its result or its error."""
        raise AssertionError("a lane is a ThreadLane or a StreamLane")

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Tasks will read these tensors, made outside the lane, and may give them up."""

    def drain(self) -> None:
        """Wait for what was submitted before, which is nothing unless a backward was broken off."""

    def close(self) -> None:
        """Give back what the lane holds. Idempotent."""
