"""Processes that stay alive over many tests and form a fresh Gloo group for each call.

Starting Python and importing torch costs seconds; joining a process group costs milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 90


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    faulthandler.enable()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        function, args, store, timeout = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            # Else a rank that is done may leave while another still connects to it.
            dist.barrier()
            torch.manual_seed(0)
            answer: tuple[str, Any] = ("result", function(rank, world_size, *args))
        except BaseException:
            answer = ("error", traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)


class Ranks:
    """``world_size`` processes. Calling the object runs a module-level function on all of them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._last = ""
        self._calls = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Kept from call to call: a store whose file goes while it closes ends its process."""

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Results of ``function(rank, world_size, *args)`` in rank order; an error on any rank raises."""
        self._require_alive()
        if not self._processes:
            self._start()
        self._last = function.__name__
        self._calls += 1
        assert self._folder is not None
        for pipe in self._pipes:
            pipe.send((function, args, f"{self._folder.name}/{self._calls}", timeout))
        answers = self._collect()
        errors = [text for kind, text in answers if kind == "error"]
        if errors:
            # Other ranks may be stuck in a collective that the failed one left.
            self.stop()
            raise AssertionError("\n".join(errors))
        return [value for _, value in answers]

    def _require_alive(self) -> None:
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        dead = {rank: code for rank, code in codes.items() if code is not None}
        if dead:
            # New processes for the next test: this one's failure is the fault of the one before.
            self.stop()
            raise AssertionError(f"died after {self._last} had answered: {dead} (rank: exit code)")

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> list[tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        pending = dict(zip(self._pipes, range(self.world_size), strict=True))
        while pending:
            ready = wait(list(pending), timeout=SECONDS)
            if not ready:
                self.stop()
                raise AssertionError(
                    f"ranks {sorted(pending.values())} gave no answer in {SECONDS} s"
                )
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = ("error", f"rank {rank} died")
                if answers[rank][0] == "error" and pending:
                    # The others wait for it in vain; their answers do not matter any more.
                    self.stop()
                    return [*answers.values()]
        return [answers[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the processes, each by its own id."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join(timeout=5)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
