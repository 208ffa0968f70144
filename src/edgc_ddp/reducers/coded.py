"""The plain average, rounded for the wire; what that takes from a matrix is sent with its next gradient.

Warm-up is most of what a short run sends, and bf16 or int8 carry it in a half or a quarter of the bytes.
Per matrix and rank, e being its residual and C() what the wire makes of it:

    A = grad + e
    e = A - C(A)
    average = mean C(A)

int8 has a scale for every stretch of the matrix's longer side. Other tensors have no residual and travel
as bf16, as they do beside factors.
"""

from __future__ import annotations

import torch

from edgc_ddp.lane import Lane, Task
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.reducers.bucket import (
    Bucket,
    add_residual,
    compute_dtype,
    hand_back,
    keep_residual,
)
from edgc_ddp.reducers.used import erase_unused, write_flags
from edgc_ddp.reducers.wire import Payload, begin_sum, largest_sizes, split


def codes(bucket: Bucket, wire: torch.dtype) -> bool:
    """Whether the bucket gets smaller on a wire of this type."""
    buffer = bucket.buffer
    return buffer.is_floating_point() and wire.itemsize < buffer.itemsize and buffer.numel() > 0


def reduce_coded(bucket: Bucket, lane: Lane, memory: ParameterMemory, wire: torch.dtype) -> Task:
    """Average the bucket's buffer over all ranks, in place, through a wire of this type."""
    compute = compute_dtype(bucket.buffer)
    work = bucket.buffer.to(compute)
    items = bucket.items(work)
    owing = [item for item in items if item.slot.spec is not None]
    others = [item for item in items if item.slot.spec is None]
    blocks = [(spec.rows, spec.cols) for item in owing if (spec := item.slot.spec) is not None]
    payload = Payload(work.new_empty(work.numel() + len(owing)), blocks)
    sizes = [item.slot.numel for item in (*owing, *others)]
    *places, flags_F = split(payload.flat, [*sizes, len(owing)])

    write_flags(owing, flags_F)
    for item in owing:
        if item.slot.residual is not None:
            add_residual(item.flat, item.slot.residual)
    for item, place in zip((*owing, *others), places, strict=True):
        torch.mul(item.flat, 1 / lane.world_size, out=place)
    total = begin_sum(payload, lane, wire, channel=0, part_is_needed=True)
    handle = yield from total.start()
    for item, place in zip(owing, places, strict=False):
        item.flat.sub_(place, alpha=lane.world_size)

    yield handle
    total.finish()
    ok = torch.isfinite(largest_sizes(payload.flat))
    for item, place, used in zip(owing, places, flags_F > 0, strict=False):
        # Where nobody has a gradient, DDP throws away what was sent.
        residual = memory.ensure_residual(item.slot, item.flat.device)
        keep_residual(residual, item.flat, ok & used)
        erase_unused(place, used)
    for item, place in zip((*owing, *others), places, strict=True):
        item.flat.copy_(place)
    hand_back(bucket, work, items, ok)
    return bucket.buffer
