"""Which lane serves a device, over which group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from edgc_ddp.lane.collectives import CHANNELS, Lane
from edgc_ddp.lane.stream import StreamLane
from edgc_ddp.lane.thread import ThreadLane


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
    number of them would wait for each other for ever. Raises RuntimeError for a kind of device that has no
    lane.
    """
    group = group_in_force(group)
    if device.type not in ("cpu", "cuda"):
        raise RuntimeError(
            f"edgc_hook met gradients on {device}: it serves those on CPUs and on CUDA devices only. Train "
            "without the hook there"
        )
    kind = StreamLane if device.type == "cuda" else ThreadLane
    meet(Lane(group, device))
    return kind(group, device, channels)
