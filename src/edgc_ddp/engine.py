"""Carries each iteration from local gradients to averages, and asks the controller at window ends.

Everything but :meth:`Engine.submit` runs in the lane, in one order on all ranks: a decision taken at
the head of an iteration is in force before that iteration's first bucket is compressed.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from edgc_ddp.agreement import (
    check_origin,
    check_world_size,
    checked_plan,
    require_equal_arithmetic,
    require_equal_plans,
    require_equal_starts,
)
from edgc_ddp.decisions import FOREVER, Controller, Layout, Observation, Plan
from edgc_ddp.lane import Lane, Mark, Task, TensorFuture, group_in_force, open_lane, payload_bytes
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.observer import Observer
from edgc_ddp.progress import Progress, require_between_steps
from edgc_ddp.reducers.bucket import Bucket, Settings
from edgc_ddp.reducers.coded import codes, reduce_coded
from edgc_ddp.reducers.dense import reduce_dense
from edgc_ddp.reducers.low_rank import reduce_low_rank
from edgc_ddp.reducers.sparse import reduce_sparse
from edgc_ddp.registry import Registry


class Engine:
    """The moving part of one :class:`edgc_ddp.EDGCState`."""

    def __init__(
        self,
        controller: Controller,
        registry: Registry,
        settings: Settings,
        process_group: dist.ProcessGroup | None,
        start_iter: int,
    ) -> None:
        self.controller = controller
        self.registry = registry
        self.memory: ParameterMemory = registry.memory
        self.settings = settings
        self.process_group = process_group
        self.progress = Progress(Plan({}, phase="start", until=start_iter))
        self.layout: Layout | None = None
        self.observer: Observer | None = None
        self.loss_scale: float | None = None
        """What the loss of the coming backward is multiplied by, when the user says so."""
        self.origin: int | None = None
        """The rank whose state was loaded, until ranks meet; None where that is all the same."""
        self.rank: int | None = None
        """This process's rank when ranks last met."""
        self._lane: Lane | None = None
        self._finalizer: weakref.finalize[[], Engine] | None = None
        self._began: Mark | None = None
        self._given = self._started = self._finished = 0
        self._last_started = False
        self._was_last, self._index = True, -1
        """Whether DDP called the bucket before its iteration's last, and its place there."""
        self._is_unended = False
        """Whether DDP called no bucket of the iteration under way its last."""
        self.may_rest = False
        """Whether the next iteration needs nothing that DDP cannot do."""
        self._ranked: Plan | None = None
        self._mean_rank = 0.0
        """Of the plan ``_ranked``. Written by the lane alone: metrics may be asked for at any time."""
        self._resting = False
        """Whether this iteration's buckets are averaged as DDP does."""

    def submit(self, bucket: GradBucket) -> TensorFuture:
        """Start averaging one bucket. Called by DDP, in bucket order, while backward goes on."""
        # Under create_graph a gradient is part of a graph itself; its average is not.
        buffer = bucket.buffer().detach()
        if buffer.is_complex():
            # Only the zeros that stand for a rank which has joined come so.
            buffer = torch.view_as_real(buffer).flatten()
        ended, last = self._was_last, bucket.is_last()
        # DDP may leave out buckets that nobody uses (skip_all_reduce_unused_params), be it the first.
        first, again = ended or bucket.index() <= self._index, bucket.index() == self._index
        if again and not ended and self.registry.goes_on(bucket.parameters()):
            # Of a static graph's first iteration DDP may call all buckets its first, and none its last.
            first, self._is_unended = False, True
        self._was_last, self._index = last, bucket.index()
        lane = self._lane_for(buffer.device, first)
        if first:
            # DDP has waited for the last iteration's buckets, unless its backward raised: behind those of
            # such a one ranks would begin apart, and count what is owed differently.
            lane.drain()
            self.end_gathered()
            self.registry.begin_iteration(ended)
            self._resting = self.may_rest
            self._given = self._started = self._finished = 0
        self._given += 1
        self._is_unended &= not last
        # Slots that a checkpoint brought are met with in the first iteration.
        met, known = bucket.parameters(), self.registry.known
        view = Bucket(buffer, self.registry.slots(met, buffer))
        turns = self.registry.moved(met, view.slots, buffer)
        if self.registry.known > known:
            lane.adopt(tensor for slot in view.slots for tensor in slot.tensors())
        if self._resting:
            for turn in turns:
                turn()
            return self._average_plainly(buffer, lane, last)
        # The scale is read here: on the worker thread it could already be that of the next backward.
        began, scale = (lane.mark(), self.loss_scale) if first else (None, None)
        return lane.submit(lambda: self._average(view, lane, turns, began, last, scale))

    @property
    def is_averaging(self) -> bool:
        """Whether buckets of an iteration have come, and not all of them are averaged."""
        is_whole = self._was_last and self._started == self._finished == self._given
        return not (is_whole or self._resting)

    def forget_iteration(self) -> None:
        """Another state takes this one's place: what was under way says nothing of it."""
        self._is_unended = self.may_rest = False
        self._was_last = True

    def end_gathered(self, wait: bool = True) -> None:
        """Count an iteration of which no bucket was called the last, once all its buckets are done."""
        if not self._is_unended or self._lane is None:
            return
        if wait:
            self._lane.drain()
        self._is_unended = False
        if self._resting:
            self._end_plainly()
        elif self._started == self._finished == self._given:
            self._end_iteration(self._lane, timed=False)

    def _lane_for(self, device: torch.device, first: bool) -> Lane:
        """The lane that is open, or a new one: collective, as ranks come to it at the same bucket."""
        group = group_in_force(self.process_group)
        lane = self._lane
        # The default group may have been ended and made anew, with other ranks; the model may have moved.
        if lane is not None and (lane.group is not group or (first and lane.device != device)):
            self.close()
        if self._lane is None:
            self.registry.settle()
            # Ranks meet first, and a copy its parameters.
            self.may_rest = False
            self._lane = open_lane(group, device, self.settings.channels, self._meet)
            self._lane.adopt(self.memory.tensors())
            self._finalizer = weakref.finalize(self, self._lane.close)
        if device != self._lane.device:
            raise RuntimeError(
                f"edgc_hook met gradients on {device} after gradients on {self._lane.device}: a model "
                "on several devices is not supported. Wrap one device's part in DDP at a time."
            )
        return self._lane

    def _rests(self) -> bool:
        """Whether nothing is left to decide, to measure or to compress, ever.

        Asked at one place of an iteration, behind :meth:`ParameterMemory.free_sent`: elsewhere a rank that
        saves, which frees too, would be ahead of the others.
        """
        for_ever = self.progress.plan.until >= FOREVER
        return for_ever and self.settings.dense_wire is None and self.memory.is_idle()

    def _average_plainly(self, buffer: Tensor, lane: Lane, last: bool) -> TensorFuture:
        """As DDP does without a hook: the thread and its hand-over are what it would cost more."""
        sent = lane.traffic(payload_bytes(buffer))
        self.progress.dense_bytes += sent
        self.progress.sent_bytes += sent
        if last:
            self._end_plainly()
        return lane.average(buffer)

    def _end_plainly(self) -> None:
        if self.loss_scale is not None:
            self.progress.loss_scale = self.loss_scale
        self.progress.step += 1
        self.registry.end_iteration()

    def close(self) -> None:
        """Stop the worker thread. The state stays whole; the next hook call starts another thread."""
        # Without waiting: it may be for a stalled rank that all is given up.
        self.end_gathered(wait=False)
        if self._lane is not None:
            if self.observer is not None:
                self.observer.spans = list(self.spans())
            self._lane.close()
            self._lane = None
        if self._finalizer is not None:
            # It holds the lane, and with it a process group that may be over.
            self._finalizer.detach()
            self._finalizer = None

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "a state with process_group= cannot be pickled, since process groups cannot: save "
                "state.state_dict(), which needs none, and load it into a new EDGCState"
            )
        return self._portable()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        twin = memo[id(self)] = object.__new__(type(self))
        portable = self._portable()
        # A group is a connection to other processes: copies share it.
        memo[id(self.process_group)] = self.process_group
        twin.__dict__.update(copy.deepcopy(portable, memo))
        return twin

    def _portable(self) -> dict[str, Any]:
        """Everything but the lane, which a copy opens for itself."""
        require_between_steps(self.is_averaging)
        self.end_gathered()
        observer = copy.copy(self.observer)
        if observer is not None:
            observer.spans = list(self.spans())
        return {
            **self.__dict__,
            "observer": observer,
            "_lane": None,
            "_finalizer": None,
            "_began": None,
        }

    def _meet(self, lane: Lane) -> None:
        self._check_loaded(lane)
        require_equal_starts(lane, self.progress, self.settings, self.memory, self.controller)
        require_equal_arithmetic(lane)
        # From here on what is owed is this process's own, whatever its rank in another group may be.
        self.origin, self.rank = None, lane.rank

    def _check_loaded(self, lane: Lane) -> None:
        """A state may be loaded before the process group exists; its size and ranks are known only now."""
        if self.observer is not None:
            self.observer.move_to(lane.device)
        known = self.layout.world_size if self.layout else self.registry.world_size
        check_world_size(known, lane.world_size)
        check_origin(self.origin, lane.rank)

    def _average(
        self,
        bucket: Bucket,
        lane: Lane,
        turns: Sequence[Callable[[], None]],
        began: Mark | None,
        last: bool,
        loss_scale: float | None,
    ) -> Task:
        """One bucket's task. ``began`` is given with the first bucket of an iteration."""
        if began is not None:
            self._begin_iteration(lane, began)
        for turn in turns:
            turn()
        if loss_scale is not None:
            self._follow(loss_scale)
        self._started += 1
        self._last_started = last
        progress = self.progress
        progress.dense_bytes += lane.traffic(payload_bytes(bucket.buffer))
        observer = None if bucket.buffer.is_sparse else self._sample(bucket)
        if bucket.buffer.is_sparse:
            average = yield from reduce_sparse(bucket, lane)
        elif self._goes_with_factors(bucket):
            average = yield from reduce_low_rank(bucket, lane, self.settings, self.memory, observer)
        else:
            wire = self.settings.dense_wire
            if wire is not None and codes(bucket, wire):
                average = yield from reduce_coded(bucket, lane, self.memory, wire)
            else:
                average = yield from reduce_dense(bucket, lane, self.memory)
            self._probe(bucket)
        self._finished += 1
        # Buckets may finish out of order, but they start in order: after the last one's start, the
        # iteration is over when as many have finished as have started.
        if self._last_started and self._finished == self._started:
            self._end_iteration(lane)
        return average

    def _goes_with_factors(self, bucket: Bucket) -> bool:
        """Whether a matrix in it is compressed; or nothing in it could be, while others are. What lies
        beside factors travels in their type, and must do so wherever DDP has cut its buckets."""
        if any(self.settings.compresses(slot) for slot in bucket.slots):
            return True
        small = all(slot.rank or slot.spec is None for slot in bucket.slots)
        return self._mean_rank > 0 and small and bucket.buffer.numel() > 0

    def _begin_iteration(self, lane: Lane, began: Mark) -> None:
        self._started = self._finished = 0
        self._last_started = False
        self.memory.free_sent()
        if self.progress.step >= self.progress.plan.until:
            self._decide(lane)
            # Deciding is no part of averaging, whose time it would decide on.
            began = lane.mark()
        self._began = began
        self.may_rest = self._rests()
        if self._ranked is not self.progress.plan:
            self._ranked, self._mean_rank = self.progress.plan, self.mean_rank()

    def _follow(self, loss_scale: float) -> None:
        """Residuals are gradients under the loss scale of their time: bring them to this one."""
        before, self.progress.loss_scale = self.progress.loss_scale, loss_scale
        if self.observer is not None:
            self.observer.loss_scale = loss_scale
        if before is not None and before != loss_scale:
            self.memory.rescale(loss_scale / before)

    def _end_iteration(self, lane: Lane, timed: bool = True) -> None:
        progress = self.progress
        if self.observer is not None:
            if timed and progress.plan.until < FOREVER:
                assert self._began is not None
                # Nobody will ask for the others, and they would pile up.
                self.observer.note_span(self._began, lane.mark())
            self.observer.steps += 1
        if self._mean_rank:
            progress.rank_sum += self._mean_rank
            progress.compressed_steps += 1
        progress.step += 1
        self.registry.end_iteration()
        progress.sent_bytes += lane.sent_bytes
        lane.sent_bytes = 0.0

    def _sample(self, bucket: Bucket) -> Observer | None:
        """On sampled iterations, look at the local gradient; the observer if there is more to see."""
        plan, step = self.progress.plan, self.progress.step
        if self.observer is None or plan.sampling is None or not plan.sampling.due(step):
            return None
        self.observer.look(bucket, plan, step)
        return self.observer

    def _probe(self, bucket: Bucket) -> None:
        """On the last dense iteration of a plan that asks for it, measure the error of each rank."""
        plan = self.progress.plan
        if self.observer is None or not plan.probe_rank or self.progress.step != plan.until - 1:
            return
        self.observer.probe_all(bucket)

    def _decide(self, lane: Lane) -> None:
        """Agree on what was seen, ask the controller, check that all ranks got the same answer."""
        progress = self.progress
        layout = self.layout or self.settings.bounded(self.registry.layout(lane.world_size))
        known = progress.controller_state
        if known is None:
            known = self.controller.init(layout)
        known, plan = self.controller.decide(known, self._observe(lane), progress.step)
        plan = checked_plan(plan, layout, progress.step)
        require_equal_plans(lane, plan)
        self.layout, progress.controller_state = layout, known
        for matrix in layout.matrices:
            slot = self.memory.slots[matrix.name]
            self.memory.set_rank(slot, plan.ranks[matrix.name], lane.device)
        if lane.rank == 0:
            progress.announce(plan)
        progress.plan = plan
        if self.observer is None:
            self.observer = Observer(layout, lane.device)
        self.observer.reset(plan)
        progress.keep_decision(self.effective_ranks())

    def _observe(self, lane: Lane) -> Observation | None:
        observer, progress = self.observer, self.progress
        if observer is None:
            return None
        assert self.layout is not None
        total = lane.sum_over_ranks(observer.vector(self.spans()))
        observation = observer.observation(total, lane.world_size)
        entropy = observation.mean_entropy(self.layout)
        progress.entropy = entropy if math.isfinite(entropy) else progress.entropy
        progress.residual = observation.mean_residual()
        progress.span_seconds = observation.span_seconds
        return observation

    def spans(self) -> list[float]:
        """Seconds that each iteration of this window took to average. Waits for the device."""
        return [] if self.observer is None else self.observer.seconds(self._lane)

    def effective_ranks(self) -> dict[str, int]:
        """The rank in force for every matrix; 0 where it is averaged dense."""
        # Once: a handler or another thread may ask while a state is loaded.
        layout = self.layout
        if layout is None:
            return {}
        slots = (self.memory.slots[matrix.name] for matrix in layout.matrices)
        return {s.name: s.rank if self.settings.compresses(s) else 0 for s in slots}

    def mean_rank(self) -> float:
        """Mean rank of the matrices that are compressed now; 0 when none is."""
        ranks = [rank for rank in self.effective_ranks().values() if rank]
        return sum(ranks) / len(ranks) if ranks else 0.0
