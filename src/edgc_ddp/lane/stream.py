"""The lane of CUDA tensors: a side stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from edgc_ddp.lane.collectives import CHANNELS, Lane, Mark, Task, TensorFuture


class StreamLane(Lane):
    """Runs each task at once on a side stream; waiting blocks that stream and never the host."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, channels: int = CHANNELS
    ) -> None:
        super().__init__(group, device, channels)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, make_task: Callable[[], Task]) -> TensorFuture:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "edgc_hook ran while a CUDA graph was being captured: its plan changes between iterations, "
                "and a replay would not. Capture without it, or train without capture"
            )
        # The gradients are written by the stream that backward runs on.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        future: TensorFuture = torch.futures.Future(devices=[self.device])
        # Autograd's threads have the trainer's autocast, which would round factors and refuse their QR.
        with torch.cuda.stream(self._stream), torch.autocast("cuda", enabled=False):
            task = make_task()
            try:
                while True:
                    next(task).wait()
            except StopIteration as finished:
                # Records an event on the side stream, which DDP's stream then waits for.
                future.set_result(finished.value)
        return future

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            # Given up by a task that the host has queued, its memory would go back to the stream that made
            # it, which may write there before the side stream has read.
            if tensor.device == self.device:
                tensor.record_stream(self._stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
