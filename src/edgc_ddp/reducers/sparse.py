"""The plain average of a sparse gradient (``nn.Embedding(sparse=True)``), as DDP does without a hook."""

from __future__ import annotations

from edgc_ddp.lane import Lane, Task
from edgc_ddp.reducers.bucket import Bucket


def reduce_sparse(bucket: Bucket, lane: Lane) -> Task:
    """Average the bucket's one sparse gradient over all ranks, in place."""
    # Ranks touch different rows, so the result has the rows of all of them: nothing to factorise.
    bucket.buffer.div_(lane.world_size)
    yield lane.all_reduce(bucket.buffer, channel=0)
    return bucket.buffer
