"""Whether any rank has a gradient of a parameter at all.

DDP gives the hook zeros for a parameter that this rank has not used. Where no rank has used it, DDP
throws the average away (``find_unused_parameters``), and with it would go what was sent of the
residual. So every rank sends a one for each parameter that it has a gradient of; where the sum is zero,
nothing of the residual is sent.

Shapes: F flags.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc_ddp.reducers.bucket import Item
from edgc_ddp.reducers.wire import largest_sizes

_FIRST = 256
"""Entries that are looked at first, and nearly always tell."""


def write_flags(items: Sequence[Item], flags_F: Tensor) -> None:
    """One for each item whose entries are not all zero, else zero; nan counts as an entry."""
    if flags_F.device.type == "cpu":
        flags_F.copy_(torch.tensor([_has_entries(item.flat) for item in items]))
    elif items:
        # A choice on the host would make it wait for the device.
        flags_F.copy_(torch.stack([item.flat.any() for item in items]))


def _has_entries(flat: Tensor) -> bool:
    if flat[:_FIRST].any():
        return True
    begin, length = _FIRST, 4 * _FIRST
    while begin < flat.numel():
        # Ten times as fast as `any`, but slower to start.
        if largest_sizes(flat[begin : begin + length]) != 0:
            return True
        begin, length = begin + length, 4 * length
    return False


def erase_unused(values: Tensor, used: Tensor) -> None:
    """Zero where ``used``, which can be broadcast to ``values``, is false."""
    if used.device.type != "cpu" or not used.all():
        values.masked_fill_(~used, 0)
