"""The lane of CPU tensors: one worker thread that owns its process groups."""

from __future__ import annotations

import atexit
import contextlib
import queue
import secrets
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from edgc_ddp.lane.collectives import CHANNELS, Handle, Lane, Task, TensorFuture

_JOIN_SECONDS = 60
"""Ending a group joins its threads; a busy machine may take its time over that."""

_INTERRUPTED_JOIN_SECONDS = 10
"""The same with collectives under way, whose other ranks may never come: Gloo cannot abort those."""

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
        self._submitted: deque[TensorFuture] = deque()
        """By the trainer's thread, since it last drained."""
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
        self._submitted.append(running.future)
        return outcome

    def drain(self) -> None:
        while self._submitted:
            # Its error was the trainer's to hear of, where it waited.
            with contextlib.suppress(Exception):
                self._submitted.popleft().wait()

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
            _forget_frames(error)
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


def _forget_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames that an error keeps, the engine among them: a state that is given up
    after an error must end its lane as any other."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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
