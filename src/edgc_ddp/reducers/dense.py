"""The plain average, bit for bit what DDP does without a hook."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from edgc_ddp.lane import Lane, Task
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.reducers.bucket import Bucket, Item, add_residual, compute_dtype, hand_back
from edgc_ddp.reducers.used import erase_unused, write_flags
from edgc_ddp.reducers.wire import split


def reduce_dense(bucket: Bucket, lane: Lane, memory: ParameterMemory) -> Task:
    """Average the bucket's buffer over all ranks, in place, in its own dtype."""
    pending = [item for item in bucket.items(bucket.buffer) if item.slot.residual is not None]
    if pending:
        return (yield from _reduce_with_pending(bucket, lane, memory, pending))
    # First, as DDP does, and by the same product: half-precision sums overflow less, and results are
    # bit-equal (where gradients are views of buckets DDP divides, which may differ in the last bit).
    bucket.buffer.mul_(1 / lane.world_size)
    yield lane.all_reduce(bucket.buffer, channel=0)
    return bucket.buffer


def _reduce_with_pending(
    bucket: Bucket, lane: Lane, memory: ParameterMemory, pending: list[Item]
) -> Task:
    """Leaving compression: what was not sent so far is sent now, whole."""
    # A residual may be more than half precision holds, so these few steps are sent as they are computed.
    size, compute = bucket.buffer.numel(), compute_dtype(bucket.buffer)
    payload = bucket.buffer.new_empty(size + len(pending), dtype=compute)
    sums, flags_F = split(payload, [size, len(pending)])
    write_flags(pending, flags_F)
    sums.copy_(bucket.buffer).div_(lane.world_size)
    owing = [item for item in bucket.items(sums) if item.slot.residual is not None]
    add_pending(owing, scale=1 / lane.world_size)
    yield lane.all_reduce(payload, channel=0)
    ok = torch.isfinite(sums).all()
    settle_pending(owing, memory, flags_F > 0, ok)
    hand_back(bucket, sums, owing, ok)
    return bucket.buffer


def add_pending(items: Iterable[Item], scale: float) -> None:
    """Add what was not sent so far to what will be sent."""
    for item in items:
        assert item.slot.residual is not None
        add_residual(item.flat, item.slot.residual, scale)


def settle_pending(items: list[Item], memory: ParameterMemory, used_F: Tensor, ok: Tensor) -> None:
    """After the sum, which lies where the items are: a residual that was sent is no longer owed,
    unless the step came out non-finite and will be skipped; one that nobody would have seen is."""
    for item, used in zip(items, used_F, strict=True):
        erase_unused(item.flat, used)
        memory.note_sent(item.slot, ok & used)
