"""How a payload of factors and small dense tensors becomes its sum over all ranks.

Two ways, one interface. :class:`FloatSum` rounds everything to one float type and lets all_reduce add
it. :class:`Int8Sum` sends factors as int8 with one scale per column, which no all_reduce can add (int8
sums wrap, and ranks' scales differ), so the sum is taken here, in full precision:

- on up to two ranks everyone gathers everyone's bytes and adds them up: one collective, the bytes of a
  ring all_reduce;
- on more the columns are dealt out: each rank gets its share of everyone's payload (all_to_all), adds
  it, codes the sum anew and hands it to all (all_gather): the two halves of a ring all_reduce, and its
  2 (W-1)/W bytes per byte of payload, at any world size W.

All ranks decode the same bytes, so they hold the same sum to the last bit. A column with an entry that
is not finite gets a scale that is not, and comes back so everywhere.

Shapes: C columns of length L, W ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from edgc_ddp.lane import Handle, Lane

_LEVELS = 127
SCALE_BYTES = 4
DENSE_BESIDE_INT8 = torch.bfloat16
"""What the small dense tensors beside int8 factors travel in."""


def split(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of consecutive pieces of a flat tensor."""
    return torch.split(flat, list(sizes))


def largest_sizes(columns_XL: Tensor) -> Tensor:
    """The largest absolute value along the last dimension, nan where there is one. The infinity norm,
    but ten times faster than torch's."""
    return torch.maximum(columns_XL.amax(-1), columns_XL.amin(-1).neg())


@dataclass
class Payload:
    """A flat tensor ``[columns of factors | small dense tensors]``, and the columns' shapes (C, L)."""

    flat: Tensor
    blocks: Sequence[tuple[int, int]]

    @property
    def factor_numel(self) -> int:
        return sum(count * length for count, length in self.blocks)


class Sum(Protocol):
    """A payload on its way. ``payload.flat`` holds in turn: this rank's part; after :meth:`start`, this
    part as the sum will count it; after the last collective and :meth:`finish`, the sum."""

    payload: Payload

    def start(self) -> Generator[Handle, None, Handle]:
        """Yields every collective but the last, which it starts and returns."""

    def finish(self) -> None:
        """Read what the last collective brought."""


def begin_sum(
    payload: Payload, lane: Lane, wire: torch.dtype, channel: int, part_is_needed: bool
) -> Sum:
    """The way that suits the type on the wire. ``channel`` is the lane's first that it may use;
    ``part_is_needed`` says that someone will read the rounded part after ``start``."""
    if wire == torch.int8:
        return Int8Sum(payload, lane, channel, part_is_needed)
    return FloatSum(payload, lane, wire, channel, part_is_needed)


def steps(wire: torch.dtype, world_size: int) -> int:
    """Collectives that one sum takes."""
    return 2 if wire == torch.int8 and world_size > 2 else 1


class FloatSum:
    """Rounded to one float type, then all_reduce."""

    def __init__(
        self, payload: Payload, lane: Lane, wire: torch.dtype, channel: int, part_is_needed: bool
    ) -> None:
        self.payload, self.lane, self.channel = payload, lane, channel
        self.part_is_needed = part_is_needed
        self._sent = payload.flat.to(wire, copy=part_is_needed)

    def start(self) -> Generator[Handle, None, Handle]:
        if self.part_is_needed and self._sent.dtype != self.payload.flat.dtype:
            self.payload.flat.copy_(self._sent)
        return self.lane.all_reduce(self._sent, self.channel)
        yield

    def finish(self) -> None:
        if self._sent is not self.payload.flat:
            self.payload.flat.copy_(self._sent)


@dataclass(frozen=True)
class _Share:
    """A stretch of a payload, and its place in bytes: ``[scales | dense | int8 | padding]``."""

    runs: tuple[tuple[int, int, int], ...]
    """Runs of columns of one length: (where the first entry lies in the flat payload, C, L)."""
    dense: tuple[int, int]
    """Where the dense entries lie in the flat payload."""

    @property
    def columns(self) -> int:
        return sum(count for _, count, _ in self.runs)

    @property
    def dense_numel(self) -> int:
        return self.dense[1] - self.dense[0]

    @property
    def nbytes(self) -> int:
        entries = sum(count * length for _, count, length in self.runs)
        used = SCALE_BYTES * self.columns + DENSE_BESIDE_INT8.itemsize * self.dense_numel + entries
        # Whole words, since the scales of the next share must be aligned; never empty.
        return max(4, -(-used // 4) * 4)

    def encode(self, flat: Tensor, out: Tensor) -> None:
        """Write the stretch of ``flat`` as bytes."""
        scale_C, dense, entries = self._fields(out)
        dense.copy_(flat[slice(*self.dense)])
        column = entry = 0
        for at, count, length in self.runs:
            run_CL = flat[at : at + count * length].view(count, length)
            largest_C = largest_sizes(run_CL)
            scale = scale_C[column : column + count]
            scale.copy_((largest_C / _LEVELS).clamp(min=torch.finfo(torch.float32).tiny))
            # Clamped, since float32 scales of float64 columns may have been rounded down.
            levels_CL = (run_CL / scale[:, None]).round_().clamp_(-_LEVELS, _LEVELS)
            entries[entry : entry + count * length].copy_(levels_CL.view(-1))
            column, entry = column + count, entry + count * length

    def decode_sum(self, coded_WX: Tensor, flat: Tensor) -> None:
        """Put the sum of several codings of this stretch where it lies in ``flat``."""
        fields = [self._fields(coded) for coded in coded_WX]
        target = flat[slice(*self.dense)]
        target.zero_()
        for _, dense, _ in fields:
            target.add_(dense)
        column = entry = 0
        for at, count, length in self.runs:
            run_CL = flat[at : at + count * length].view(count, length)
            for which, (scale_C, _, entries) in enumerate(fields):
                levels_CL = entries[entry : entry + count * length].view(count, length)
                scale_C1 = scale_C[column : column + count, None].to(flat.dtype)
                if which == 0:
                    torch.mul(levels_CL, scale_C1, out=run_CL)
                else:
                    run_CL.addcmul_(levels_CL.to(flat.dtype), scale_C1)
            column, entry = column + count, entry + count * length

    def _fields(self, coded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entries = sum(count * length for _, count, length in self.runs)
        sizes = [SCALE_BYTES * self.columns, DENSE_BESIDE_INT8.itemsize * self.dense_numel, entries]
        scale, dense, levels = split(coded[: sum(sizes)], sizes)
        return scale.view(torch.float32), dense.view(DENSE_BESIDE_INT8), levels.view(torch.int8)


class Int8Sum:
    """Coded to bytes, summed by the rank that a column was dealt to."""

    def __init__(self, payload: Payload, lane: Lane, channel: int, part_is_needed: bool) -> None:
        self.payload, self.lane, self.channel = payload, lane, channel
        self.part_is_needed = part_is_needed
        ways = lane.world_size if steps(torch.int8, lane.world_size) > 1 else 1
        self.shares = deal(payload, ways)
        self._gathered_WX: Tensor

    def start(self) -> Generator[Handle, None, Handle]:
        flat, lane, shares = self.payload.flat, self.lane, self.shares
        sizes = [share.nbytes for share in shares]
        coded = torch.empty(sum(sizes), dtype=torch.uint8, device=flat.device)
        for share, place in zip(shares, split(coded, sizes), strict=True):
            share.encode(flat, place)
            if self.part_is_needed:
                share.decode_sum(place[None], flat)
        if len(shares) == 1:
            return self._gather(coded, self.channel)

        mine = shares[lane.rank]
        received_WX = coded.new_empty(lane.world_size, mine.nbytes)
        yield lane.all_to_all(received_WX.view(-1), coded, sizes, self.channel)
        exact = torch.empty_like(flat)
        mine.decode_sum(received_WX, exact)
        # Gathered pieces must be equally long.
        recoded = coded.new_empty(max(sizes))
        mine.encode(exact, recoded)
        if self.part_is_needed:
            self._count_own_rounding(mine, exact, recoded)
        return self._gather(recoded, self.channel + 1)

    def _count_own_rounding(self, mine: _Share, exact: Tensor, recoded: Tensor) -> None:
        """What coding the sum anew has changed is put down to the rank that did it: then the ranks'
        parts still add up to the sum as all will read it."""
        again = torch.empty_like(exact)
        mine.decode_sum(recoded[None], again)
        for at, count, length in mine.runs:
            here = slice(at, at + count * length)
            self.payload.flat[here] += again[here] - exact[here]

    def _gather(self, coded: Tensor, channel: int) -> Handle:
        self._gathered_WX = coded.new_empty(self.lane.world_size, coded.numel())
        return self.lane.all_gather(self._gathered_WX.view(-1), coded, channel)

    def finish(self) -> None:
        if len(self.shares) == 1:
            self.shares[0].decode_sum(self._gathered_WX, self.payload.flat)
            return
        for share, coded in zip(self.shares, self._gathered_WX, strict=True):
            share.decode_sum(coded[None], self.payload.flat)


def deal(payload: Payload, ways: int) -> list[_Share]:
    """Cut a payload into stretches of whole columns, nearly equal in size, and equal dense parts.

    >>> shares = deal(Payload(torch.zeros(2 * 8 + 3), [(2, 8)]), 2)
    >>> [(share.runs, share.dense) for share in shares]
    [(((0, 1, 8),), (16, 17)), (((8, 1, 8),), (17, 19))]
    """
    total = payload.factor_numel
    dense_numel = payload.flat.numel() - total
    shares = []
    for way in range(ways):
        runs, at = [], 0
        for count, length in payload.blocks:
            first, behind = (
                min(count, max(0, -(-(edge * total // ways - at) // length)))
                for edge in (way, way + 1)
            )
            if behind > first:
                runs.append((at + first * length, behind - first, length))
            at += count * length
        dense = (total + way * dense_numel // ways, total + (way + 1) * dense_numel // ways)
        shares.append(_Share(tuple(runs), dense))
    return shares
