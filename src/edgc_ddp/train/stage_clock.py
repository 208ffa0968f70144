"""A pipeline stage that tells when its backwards and its averaging ended."""

# No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.
import math
import time
from collections import deque
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.pipelining import PipelineStage

from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.lane import Mark

_KEPT = 1000
"""Spans of each kind between two readings: once the first stage decides no more, nobody reads."""


class StageClock:
    """Marks of the latest steps since the last reading. Nothing waits for the device before it is read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._ended = self.mark()
        self._spans: dict[str, deque[tuple[Mark, Mark]]] = {}

    def mark(self) -> Mark:
        """Now, on the host or on the device's current stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin_step(self) -> None:
        """A step begins. All stages do so together: each waits for the last step's gradient norm."""
        self._begin = self.mark()

    def note(self, what: str, since: "Mark | None" = None) -> None:
        """``what`` ends now, having begun at ``since`` (the step's begin when None)."""
        span = (self._begin if since is None else since, self.mark())
        self._spans.setdefault(what, deque(maxlen=_KEPT)).append(span)

    def read(self) -> dict[str, float]:
        """Median seconds of what was noted since the last reading, of each kind the last thousand."""
        spans, self._spans = self._spans, {}
        return {
            what: median(_seconds(*pair) for pair in pairs) if pairs else math.nan
            for what, pairs in spans.items()
        }

    def hook(self, state: EDGCState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """``edgc_hook``, with the last bucket's arrival noted: then the backward is over."""
        if bucket.is_last():
            self.note("ended")
        return edgc_hook(state, bucket)


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert not isinstance(begin, float) and not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


class TimedStage(PipelineStage):
    """Sends its last input gradient as soon as it is there, and notes its times.

    PyTorch's stage sends it when ``backward`` returns, and in the last micro-batch that is after DDP
    has averaged: every stage would wait for the averaging of the stage behind it, and no stage but the
    last would have time to spare.
    """

    def __init__(self, *arguments: Any, clock: StageClock, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clock = clock
        self._early: list[dist.Work] = []
        self._sent_early: int | None = None

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        begin = self._clock.mark()
        if not last_backward or self.is_first:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        else:
            _, (stream,) = self.fwd_cache[bwd_chunk_id]

            def send(stream: Tensor) -> None:
                self.bwd_cache[bwd_chunk_id] = (stream.grad,)
                ops = PipelineStage.get_bwd_send_ops(self, bwd_chunk_id)
                self._early = dist.batch_isend_irecv(ops)
                self._sent_early = bwd_chunk_id

            handle = stream.register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            handle.remove()
        # The last one ends with the average, which is no part of a backward.
        if last_backward:
            self._clock.note("finish")
        else:
            self._clock.note("backward", begin)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self._sent_early != bwd_chunk_id:
            return super().get_bwd_send_ops(bwd_chunk_id)
        self.bwd_cache.pop(bwd_chunk_id)
        self._sent_early = None
        for work in self._early:
            work.wait()
        self._early = []
        return []
