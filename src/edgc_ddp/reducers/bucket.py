"""One DDP bucket as the reducers see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc_ddp.memory import Slot


@dataclass(frozen=True)
class Item:
    """A parameter in a bucket: its slot and its entries there, flat."""

    slot: Slot
    flat: Tensor


@dataclass(frozen=True)
class Bucket:
    """The flat buffer and the parameters in it, in order."""

    buffer: Tensor
    slots: tuple[Slot, ...]

    def items(self, buffer: Tensor) -> list[Item]:
        """The parameters' entries within a buffer that is laid out like this bucket."""
        pieces = split(buffer, [slot.numel for slot in self.slots])
        return [Item(slot, flat) for slot, flat in zip(self.slots, pieces, strict=True)]


def split(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of consecutive pieces of a flat tensor."""
    return torch.split(flat, list(sizes))


@dataclass(frozen=True)
class Settings:
    """What a user chose about the wire, the same for all buckets."""

    wire_dtype: torch.dtype = torch.float32
    error_feedback: bool = True
    min_compression_rate: float = 1.0

    def compresses(self, slot: Slot) -> bool:
        """Whether factors at the slot's rank are smaller than the matrix by the asked rate."""
        if slot.rank == 0 or slot.spec is None:
            return False
        rows, cols = slot.spec.rows, slot.spec.cols
        return slot.rank * (rows + cols) * self.min_compression_rate < rows * cols

    def wire_for(self, compute: torch.dtype) -> torch.dtype:
        """Double-precision gradients keep their precision unless a narrow wire was asked for."""
        return compute if self.wire_dtype == torch.float32 else self.wire_dtype


def compute_dtype(buffer: Tensor) -> torch.dtype:
    """The precision that factors and residuals are computed in."""
    return torch.float64 if buffer.dtype == torch.float64 else torch.float32
