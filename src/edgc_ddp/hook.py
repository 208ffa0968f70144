"""The function that DDP calls."""

# No `from __future__ import annotations` here: DDP checks the annotations as objects.
import torch
from torch._C._distributed_c10d import GradBucket

from edgc_ddp.state import EDGCState


def edgc_hook(state: EDGCState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: averages a bucket as the state's controller has planned.

    Use it through ``ddp.register_comm_hook(state, edgc_hook)``, before the first backward.

    Args:
        state: the :class:`edgc_ddp.EDGCState` of this model.
        bucket: DDP's bucket of local gradients, not divided by the world size.

    Returns:
        A future of the bucket's buffer, averaged in place. Errors of the worker thread arrive in it, so
        that ``backward`` raises them.

    Raises:
        ValueError: ``state`` is something else, None for instance, as torch's own hooks take it.
    """
    if not isinstance(state, EDGCState):
        raise ValueError(
            f"edgc_hook was registered with state={state!r}: write "
            "ddp.register_comm_hook(EDGCState(model=ddp.module), edgc_hook)"
        )
    if not isinstance(bucket, GradBucket):
        raise RuntimeError(
            "edgc_hook was given single gradients instead of DDP buckets, as "
            'torch._dynamo.config.optimize_ddp = "python_reducer" does: use the default, "ddp_optimizer"'
        )
    return state.engine.submit(bucket)
