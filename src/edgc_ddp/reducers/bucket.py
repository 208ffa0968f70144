"""One DDP bucket as the reducers see it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgc_ddp.decisions import Layout
from edgc_ddp.memory import Slot
from edgc_ddp.reducers.wire import DENSE_BESIDE_INT8, SCALE_BYTES, split


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


@dataclass(frozen=True)
class Settings:
    """What a user chose about the wire, the same for all buckets."""

    wire_dtype: torch.dtype = torch.float32
    error_feedback: bool = True
    min_compression_rate: float = 1.0
    dense_wire: torch.dtype | None = None
    """What buckets that are not compressed travel in; None is the gradient's own type."""

    def compresses(self, slot: Slot) -> bool:
        """Whether factors at the slot's rank, with their flag, take fewer bytes on the wire than the
        matrix itself would there, by the asked rate."""
        return slot.sides is not None and slot.rank > 0 and self._saves(slot.sides, slot.rank)

    def bounded(self, layout: Layout) -> Layout:
        """With the highest rank at which each matrix is compressed, 0 where none is."""
        known = (replace(m, highest=self._highest((m.rows, m.cols))) for m in layout.matrices)
        return replace(layout, matrices=tuple(known))

    def _highest(self, sides: tuple[int, int]) -> int:
        low, high = 0, min(sides)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._saves(sides, middle) else (low, middle - 1)
        return low

    def _saves(self, sides: tuple[int, int], rank: int) -> bool:
        entry, column, beside = self.wire_dtype.itemsize, 0, self.wire_dtype.itemsize
        if self.wire_dtype == torch.int8:
            column, beside = SCALE_BYTES, DENSE_BESIDE_INT8.itemsize
        factors = rank * (sum(sides) * entry + 2 * column) + beside
        return factors * self.min_compression_rate < math.prod(sides) * beside

    @property
    def channels(self) -> int:
        """Collectives of one bucket, one after the other, that the lane must keep apart."""
        return 4 if self.wire_dtype == torch.int8 else 2

    def wire_for(self, gradient: torch.dtype) -> torch.dtype:
        """A narrow wire is what was asked for. "fp32" is as wide as DDP's: double-precision gradients keep
        their precision, and bf16 ones would only grow. fp16 sums of factors could overflow."""
        if self.wire_dtype != torch.float32:
            return self.wire_dtype
        return gradient if gradient in (torch.float64, torch.bfloat16) else torch.float32


def compute_dtype(buffer: Tensor) -> torch.dtype:
    """The precision that factors and residuals are computed in."""
    return torch.float64 if buffer.dtype == torch.float64 else torch.float32


_CACHED = 1 << 16
"""Entries of a float32 block that stays in the cache between being widened and being added."""


def add_residual(flat: Tensor, residual: Tensor, scale: float = 1.0) -> None:
    """Add a residual of any float type. Wider ones are never made of a whole narrow residual."""
    if flat.dtype == residual.dtype or flat.device.type != "cpu":
        flat.add_(residual, alpha=scale)
        return
    for at in range(0, flat.numel(), _CACHED):
        flat[at : at + _CACHED].add_(residual[at : at + _CACHED].to(flat.dtype), alpha=scale)


def keep_residual(residual: Tensor, left: Tensor, ok: Tensor) -> None:
    """The new residual, or the old one when this step came out non-finite on any rank. ``left`` may be
    changed."""
    if ok.device.type != "cpu":
        # A choice on the host would make it wait for the device.
        left = torch.where(ok, left, residual.to(left.dtype))
    elif not ok:
        return
    limit = torch.finfo(residual.dtype).max
    if limit < torch.finfo(left.dtype).max:
        # An infinite residual would make every later step infinite.
        left.clamp_(-limit, limit)
    residual.copy_(left)


def hand_back(bucket: Bucket, average: Tensor, items: Iterable[Item], ok: Tensor) -> None:
    """Write the average, laid out like the bucket, into DDP's buffer.

    ``items`` are those parts of ``average`` that may be more than their gradients were; ``ok`` says that
    they are finite. What of them does not fit half precision stays owed: it is equal on all ranks, so each
    one's residual takes it.
    """
    if average is bucket.buffer:
        return
    if bucket.buffer.dtype == torch.float16:
        limit = torch.finfo(torch.float16).max
        for item in items:
            # Not finite where the average is not, which is the step's news and goes on to the trainer.
            cut = torch.where(ok, item.flat - item.flat.clamp(-limit, limit), 0)
            item.flat.sub_(cut)
            if item.slot.residual is not None:
                item.slot.residual.add_(cut)
    bucket.buffer.copy_(average)
