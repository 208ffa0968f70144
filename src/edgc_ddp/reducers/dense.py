"""The plain average, bit for bit what DDP does without a hook."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from edgc_ddp.lane import Lane, Task
from edgc_ddp.reducers.bucket import Bucket, Item, add_residual


def reduce_dense(bucket: Bucket, lane: Lane) -> Task:
    """Average the bucket's buffer over all ranks, in place, in its own dtype."""
    # Divided first, as DDP does: half-precision sums overflow less, and results are bit-equal.
    bucket.buffer.div_(lane.world_size)
    pending = [item for item in bucket.items(bucket.buffer) if item.slot.residual is not None]
    add_pending(pending, scale=1 / lane.world_size)
    yield lane.all_reduce(bucket.buffer, channel=0)
    if pending:
        forget_pending(pending, torch.isfinite(bucket.buffer).all())
    return bucket.buffer


def add_pending(items: Iterable[Item], scale: float) -> None:
    """Leaving compression: what was not sent so far is sent now, whole."""
    for item in items:
        if item.slot.residual is not None:
            add_residual(item.flat, item.slot.residual, scale)


def forget_pending(items: Iterable[Item], ok: Tensor) -> None:
    """A residual that was sent is zero, unless the step came out non-finite and will be skipped."""
    for item in items:
        residual = item.slot.residual
        if residual is not None:
            residual.masked_fill_(ok, 0)
