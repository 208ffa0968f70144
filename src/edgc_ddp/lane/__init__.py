"""The only place that issues collectives, and issues them in one order on all ranks.

A bucket's average is written as a generator (see ``reducers/``): it starts a collective through
:class:`Lane`, yields the handle, and goes on once the collective is done. The same text then runs

- on CPU tensors (:class:`ThreadLane`) on one worker thread that owns a process group for each of the
  collectives that a bucket needs, two with float factors, four with int8. Each group
  sees its collectives in bucket order whatever the timing, because part k of a bucket runs only after
  part k of the bucket before it, and part k uses channel k alone. So bucket 1's first all-reduce may
  travel beside bucket 0's second one without any rank seeing another order;
- on CUDA tensors (:class:`StreamLane`) straight through on a side stream, on DDP's own process group
  (several NCCL communicators in flight would need one order of their own).
"""

from edgc_ddp.lane.collectives import (
    Handle,
    Lane,
    Mark,
    Task,
    TensorFuture,
    payload_bytes,
)
from edgc_ddp.lane.opening import group_in_force, open_lane
from edgc_ddp.lane.stream import StreamLane
from edgc_ddp.lane.thread import ThreadLane

__all__ = [
    "Handle",
    "Lane",
    "Mark",
    "StreamLane",
    "Task",
    "TensorFuture",
    "ThreadLane",
    "group_in_force",
    "open_lane",
    "payload_bytes",
]
