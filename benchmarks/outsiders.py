"""Dense gradients in few bits with error feedback, and in bf16: yardsticks for low rank at equal bytes.

Communication hooks without a low-rank part, small and plain: they block in the hook, on Gloo, since what
is compared is loss at counted bytes, never time. ``FewBits`` averages in two phases: each rank codes
its part for every other rank (all_to_all), the owner of a part averages what it got, codes the average
again and hands it to all (all_gather). What either coding leaves out is added to its next input.
Everyone decodes the same bytes, so replicas stay equal to the last bit.

Shapes: E entries of a bucket's matrices with their padding, W ranks, K = E / W a rank's own part,
N blocks of B entries.
"""

# No `from __future__ import annotations` here: DDP checks a hook's annotations as objects.
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contestants import ring_bytes
from edgc_ddp.lane import payload_bytes

BLOCK = 256
"""Entries that share one fp32 scale: an eighth of a bit for each of them."""
_SCALE = 4
# Named so since torch 2.13, which warns of the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def encode(x_E: Tensor, bits: int) -> Tensor:
    """Bytes (uint8, flat) of float32 entries, a multiple of ``BLOCK`` of them, in 1 or 4 bits each.

    One bit is the sign, beside the block's mean size; four are -7 to 7 steps of a seventh of its largest.

    >>> decode(encode(torch.tensor([1.0, -3.0] * 128), 1), 1)[:4].tolist()
    [2.0, -2.0, 2.0, -2.0]
    >>> decode(encode(torch.tensor([7.0, -3.2] * 128), 4), 4)[:4].tolist()
    [7.0, -3.0, 7.0, -3.0]
    """
    x_NB = x_E.view(-1, BLOCK)
    if bits == 1:
        scale_N1 = x_NB.abs().mean(1, keepdim=True)
        levels_NB = x_NB >= 0
    else:
        scale_N1 = x_NB.abs().amax(1, keepdim=True) / 7
        levels_NB = (x_NB / scale_N1.clamp(min=torch.finfo(x_E.dtype).tiny)).round() + 8
    parts = levels_NB.to(torch.uint8).view(len(x_NB), -1, 8 // bits)
    packed = (parts << _shifts(bits)).sum(-1, dtype=torch.uint8)
    return torch.cat([scale_N1.view(torch.uint8), packed], 1).flatten()


def decode(coded: Tensor, bits: int) -> Tensor:
    """The entries (float32, flat) that :func:`encode` wrote."""
    rows = coded.view(-1, _SCALE + BLOCK * bits // 8)
    scale_N1 = rows[:, :_SCALE].contiguous().view(torch.float32)
    levels = (rows[:, _SCALE:, None] >> _shifts(bits)) & (2**bits - 1)
    levels_NB = levels.view(len(rows), BLOCK).float()
    return (scale_N1 * (2 * levels_NB - 1 if bits == 1 else levels_NB - 8)).flatten()


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8)


class Outsider:
    """What the training loop asks of a hook's state: metrics, and a history that stays empty."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.wire_bytes = self.dense_bytes = 0.0

    def average(self, bucket: dist.GradBucket) -> Tensor:
        """The bucket's average, in its own memory. Collective."""
        raise NotImplementedError

    def metrics(self) -> dict[str, Any]:
        return {
            "phase": type(self).__name__,
            "mean_rank": 0.0,
            "run_mean_rank": 0.0,
            "entropy": math.nan,
            "residual": math.nan,
            "span_seconds": math.nan,
            "wire_bytes": round(self.wire_bytes),
            "dense_bytes": round(self.dense_bytes),
            "plan_digest": "",
        }

    def close(self) -> None:
        """Nothing runs in the background."""

    def all_reduce(self, mean: Tensor) -> None:
        """Average in place by a ring all-reduce, counting a ring's bytes."""
        mean.div_(dist.get_world_size())
        dist.all_reduce(mean)
        self.wire_bytes += _traffic(mean)


def _traffic(payload: Tensor) -> float:
    """Bytes a rank sends in a ring all-reduce of the payload."""
    return ring_bytes(payload_bytes(payload), dist.get_world_size())


class Bf16(Outsider):
    """Everything rounded to bf16 and summed as such, like torch's bf16_compress_hook."""

    def average(self, bucket: dist.GradBucket) -> Tensor:
        buffer = bucket.buffer()
        self.dense_bytes += _traffic(buffer)
        narrow = buffer.to(torch.bfloat16)
        self.all_reduce(narrow)
        buffer.copy_(narrow)
        return buffer


@dataclass
class Owed:
    """What one bucket's two codings have left out so far."""

    first_E: Tensor
    """Of this rank's gradients."""
    second_K: Tensor
    """Of the averages of the part that this rank owns."""


class FewBits(Outsider):
    """Matrices in 1 or 4 bits an entry from iteration ``start_iter`` on, vectors in fp32.

    Raises ValueError for other bits, or a start before DDP has settled its buckets.
    """

    def __init__(self, bits: int, start_iter: int = 2) -> None:
        super().__init__()
        if bits not in (1, 4):
            raise ValueError(f"bits={bits}: expected 1 or 4")
        if start_iter < 2:
            raise ValueError(
                f"start_iter={start_iter}: expected at least 2, since DDP rebuilds its buckets after the "
                "first iteration"
            )
        self.bits, self.start_iter = bits, start_iter
        self.owed: dict[int, Owed] = {}
        self._begun = 0

    def average(self, bucket: dist.GradBucket) -> Tensor:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        self._begun += bucket.index() == 0
        self.dense_bytes += _traffic(buffer)
        if self._begun <= self.start_iter:
            self.all_reduce(buffer)
            return buffer
        pieces = torch.split(buffer, [parameter.numel() for parameter in parameters])
        both = list(zip(pieces, parameters, strict=True))
        vectors = [piece for piece, parameter in both if parameter.dim() < 2]
        matrices = [piece for piece, parameter in both if parameter.dim() >= 2]
        if vectors:
            mean = torch.cat(vectors)
            self.all_reduce(mean)
            _put_back(mean, vectors, 1)
        if matrices:
            # Each begins a block of its own: entries of two matrices differ in size.
            padded = [F.pad(piece, (0, -len(piece) % BLOCK)) for piece in matrices]
            flat = torch.cat(padded)
            whole = F.pad(flat, (0, -len(flat) % (BLOCK * dist.get_world_size())))
            _put_back(self._two_phase(bucket.index(), whole), matrices, BLOCK)
        return buffer

    def _two_phase(self, index: int, mine_E: Tensor) -> Tensor:
        world = dist.get_world_size()
        if index not in self.owed:
            own_K = mine_E.new_zeros(len(mine_E) // world)
            self.owed[index] = Owed(torch.zeros_like(mine_E), own_K)
        owed = self.owed[index]
        mine_E = mine_E + owed.first_E
        coded = encode(mine_E, self.bits)
        owed.first_E = mine_E - decode(coded, self.bits)
        received = torch.empty_like(coded)
        dist.all_to_all_single(received, coded)
        self.wire_bytes += coded.numel() * (world - 1) / world

        mean_K = decode(received, self.bits).view(world, -1).mean(0) + owed.second_K
        again = encode(mean_K, self.bits)
        owed.second_K = mean_K - decode(again, self.bits)
        everyone = again.new_empty(world * len(again))
        _all_gather(everyone, again)
        self.wire_bytes += again.numel() * (world - 1)
        return decode(everyone, self.bits)


def _put_back(flat: Tensor, pieces: list[Tensor], multiple: int) -> None:
    """Copy consecutive parts, each padded to a multiple, to where the pieces lie."""
    at = 0
    for piece in pieces:
        piece.copy_(flat[at : at + len(piece)])
        at += len(piece) + -len(piece) % multiple


def outsider(kind: str, start_iter: int) -> Outsider:
    """``bf16``, ``4bit`` or ``1bit``. Raises ValueError for any other kind.

    >>> outsider("1bit", 2).bits
    1
    """
    if kind == "bf16":
        return Bf16()
    if kind in ("4bit", "1bit"):
        return FewBits(int(kind[0]), start_iter)
    raise ValueError(f"kind={kind!r}: expected bf16, 4bit or 1bit")


def outsider_hook(state: Outsider, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook; its state is an :class:`Outsider`."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(state.average(bucket))
    return future
