"""The only place that issues collectives, and issues them in one order on all ranks.

A bucket's average is written as a generator (see ``reducers/``): it starts a collective through
:class:`Lane`, yields the handle, and goes on once the collective is done. The same text then runs

- on CPU tensors (:class:`ThreadLane`) on one worker thread that owns two process groups. Each group
  sees its collectives in bucket order whatever the timing, because part k of a bucket runs only after
  part k of the bucket before it, and part k uses channel k alone. So bucket 1's first all-reduce may
  travel beside bucket 0's second one without any rank seeing another order;
- on CUDA tensors (:class:`StreamLane`) straight through on a side stream, on DDP's own process group
  (several NCCL communicators in flight would need one order of their own).
"""

from __future__ import annotations

import atexit
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

_JOIN_SECONDS = 60
"""Ending a group joins its threads; a busy machine may take its time over that."""

_INTERRUPTED_JOIN_SECONDS = 10
"""The same with collectives under way, whose other ranks may never come: Gloo cannot abort those."""

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

    def close(self) -> None:
        """Give back what the lane holds. Idempotent."""


class StreamLane(Lane):
    """Runs each task at once on a side stream; waiting blocks that stream and never the host."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, channels: int = CHANNELS
    ) -> None:
        super().__init__(group, device, channels)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, make_task: Callable[[], Task]) -> TensorFuture:
        # The gradients are written by the stream that backward runs on.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        future: TensorFuture = torch.futures.Future(devices=[self.device])
        with torch.cuda.stream(self._stream):
            task = make_task()
            try:
                while True:
                    next(task).wait()
            except StopIteration as finished:
                # Records an event on the side stream, which DDP's stream then waits for.
                future.set_result(finished.value)
        return future

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


_Event: TypeAlias = "Callable[[], None] | tuple[int, BaseException | None] | None"
"""What wakes the worker: something to do, a task (by id) whose collective is done, or the end."""


class _Running:
    """A task on the worker thread, with how far it has come."""

    def __init__(self, make_task: Callable[[], Task]) -> None:
        self.make_task: Callable[[], Task] | None = make_task
        self.task: Task | None = None
        self.parts_run = 0
        self.ready = True
        self.handle: Handle | None = None
        self.error: BaseException | None = None
        self.future: TensorFuture = torch.futures.Future()


class ThreadLane(Lane):
    """Runs tasks on one worker thread that owns its process groups.

    With Gloo, completion callbacks come in a different order on each rank; issuing the next collective
    from them aborts or hangs. Here they only wake the worker, which alone decides what comes next.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, channels: int = CHANNELS
    ) -> None:
        super().__init__(group, device, channels)
        # Not new_group: ranks outside this group never run this line, and a name that torch makes of
        # the groups that a rank is in need not be another rank's. A random one is never used again.
        (name,) = Lane(group, device)._gather_numbers([secrets.randbits(62)], torch.int64)[0]
        store = dist.distributed_c10d._get_default_store()
        self._channels = [
            dist.ProcessGroupGloo(
                dist.PrefixStore(f"edgc_ddp/{name}/{channel}", store),  # type: ignore[attr-defined]
                self.rank,
                self.world_size,
                _timeout_of(group, device),
            )
            for channel in range(channels)
        ]
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._running: deque[_Running] = deque()
        self._broken: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="edgc-lane", daemon=True)
        self._thread.start()
        _OPEN.add(self)
        _THREADS.add(self._thread)

    def submit(self, make_task: Callable[[], Task]) -> TensorFuture:
        running = _Running(make_task)
        # `then` turns a Python exception into an error that DDP's C++ side can rethrow with its text.
        outcome: TensorFuture = running.future.then(lambda future: future.wait())
        self._events.put(lambda: self._running.append(running))
        return outcome

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            limit = _INTERRUPTED_JOIN_SECONDS if self._running else _JOIN_SECONDS
            # The worker drops the channels: the last reference waits for what is under way.
            self._events.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=limit)

    def _serve(self) -> None:
        # Asked for, since a new thread heeds torch.set_num_threads only from then on: until then its
        # products may be rounded otherwise, and a resumed run would not be bit-equal.
        torch.get_num_threads()
        while (event := self._events.get()) is not None:
            if isinstance(event, tuple):
                self._note_completed(*event)
            else:
                event()
            # Kept while the queue is empty, it would keep the engine, which then never closes the lane.
            del event
            while self._advance():
                pass
        # The last references go here, on a thread that may wait for the groups' own ones: such a thread
        # left alive at interpreter exit aborts the process.
        self._channels = []

    def _advance(self) -> bool:
        """Run one part of one task, the oldest that may; False when all must wait."""
        before: _Running | None = None
        for running in self._running:
            if running.ready and (before is None or before.parts_run > running.parts_run):
                self._run_part(running)
                return True
            before = running
        return False

    def _run_part(self, running: _Running) -> None:
        running.ready = False
        running.parts_run += 1
        try:
            if self._broken is not None:
                raise self._broken
            if running.error is not None:
                raise running.error
            if running.make_task is not None:
                running.task, running.make_task = running.make_task(), None
            assert running.task is not None
            running.handle = next(running.task)
            self._wake_after(running)
        except StopIteration as finished:
            self._drop(running)
            running.future.set_result(finished.value)
        except BaseException as error:  # noqa: B036 - it must reach the trainer, whatever it is
            # Later buckets would wait for collectives that this rank will no longer issue.
            self._broken = error
            self._drop(running)
            shown = error if isinstance(error, Exception) else RuntimeError(repr(error))
            running.future.set_exception(shown)  # type: ignore[arg-type]

    def _drop(self, running: _Running) -> None:
        """Forget a task before its future tells: the trainer may drop its state at once, and whoever is the
        engine's last owner closes the lane, which the worker cannot wait for itself."""
        self._running.remove(running)
        running.task = running.make_task = None

    def _wake_after(self, running: _Running) -> None:
        # Gloo runs the callback on a thread of its own. That thread must never be the last to hold the
        # lane, since ending a process group joins its threads: so the callback knows a number only.
        events, key = self._events, id(running)

        def completed(future: torch.futures.Future[Any]) -> None:
            error: BaseException | None = None
            try:
                future.wait()
            except Exception as failure:
                error = failure
            events.put((key, error))

        assert isinstance(running.handle, dist.Work)
        running.handle.get_future().add_done_callback(completed)

    def _note_completed(self, key: int, error: BaseException | None) -> None:
        for running in self._running:
            if id(running) == key:
                running.ready, running.error = True, error


_OPEN: weakref.WeakSet[ThreadLane] = weakref.WeakSet()
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for lane in list(_OPEN):
        lane.close()
    # A lane whose last reference went on its own worker was closed there, and nobody waited for it.
    for thread in list(_THREADS):
        thread.join(timeout=_INTERRUPTED_JOIN_SECONDS)


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    return group._get_backend(device).options._timeout


def group_in_force(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one. Raises RuntimeError where there is none yet."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "edgc_hook ran before torch.distributed.init_process_group: initialise the process group, "
            "wrap the model in DistributedDataParallel, then register the hook"
        )
    return group


def open_lane(
    group: dist.ProcessGroup | None,
    device: torch.device,
    channels: int = CHANNELS,
    meet: Callable[[Lane], None] = lambda first: None,
) -> Lane:
    """The lane for tensors on this device. Collective: all ranks of the group must call it.

    ``meet`` is given a lane over the group itself, before there are channels: ranks that want another
    number of them would wait for each other for ever.
    """
    group = group_in_force(group)
    kind = StreamLane if device.type == "cuda" else ThreadLane
    meet(Lane(group, device))
    return kind(group, device, channels)
