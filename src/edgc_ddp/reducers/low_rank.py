"""The average through rank-R factors with error feedback (PowerSGD's iteration, method section 4).

    A_i = M_i + e_i          gradient of rank i plus what it has failed to send before
    P   = sum_i A_i Q        first sum, with the small dense tensors in the same payload
    P^  = orth(P)
    Q_i = A_i^T P^           second sum: their mean is Q
    e_i = A_i - P^ Q_i^T     overlaps that sum; Q_i as it was rounded for the wire
    average = P^ Q^T

The residual is local: it does not depend on what other ranks sent, stays bounded on skewed data, and
its sum over ranks is what the average lacks.

Shapes: M <= N the sides of a matrix, R its rank, B matrices of one shape and rank in this bucket.
Factors are kept with their columns in one piece (RM, RN): matrix products with few columns run up to
ten times faster so, QR wants it so, and a column's scale is one contiguous maximum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc_ddp.lane import Lane, Task
from edgc_ddp.maths.orthogonal import orthonormalise
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.observer import Observer
from edgc_ddp.reducers.bucket import Bucket, Item, Settings, add_residual, compute_dtype
from edgc_ddp.reducers.dense import forget_pending
from edgc_ddp.reducers.wire import Payload, begin_sum, largest_sizes, split, steps


@dataclass
class _Group:
    """Matrices of one shape and rank: their factors lie side by side, so one call serves all."""

    items: list[Item]
    p_BRM: Tensor
    q_BRN: Tensor

    def __iter__(self) -> Iterator[tuple[Item, Tensor, Tensor, Tensor]]:
        """Item, its A (M x N), its p (R x M), its q (R x N)."""
        for item, p_RM, q_RN in zip(self.items, self.p_BRM, self.q_BRN, strict=True):
            yield item, item.slot.as_matrix(item.flat), p_RM, q_RN


def reduce_low_rank(
    bucket: Bucket,
    lane: Lane,
    settings: Settings,
    memory: ParameterMemory,
    observer: Observer | None,
) -> Task:
    """Average the bucket in place; ``observer`` is given on sampled iterations only."""
    compute = compute_dtype(bucket.buffer)
    wire = settings.wire_for(compute)
    share = 1 / lane.world_size
    # The gradient's own memory serves as A; only half-precision buckets need a wider copy.
    work = bucket.buffer.to(compute)
    items = bucket.items(work)
    dense = [item for item in items if not settings.compresses(item.slot)]
    groups, p, q = _allocate(items, dense, settings, compute)
    dense_parts = split(p.flat[p.factor_numel :], [item.slot.numel for item in dense])

    for group in groups:
        _start_bases(group)
        for item, a_MN, p_RM, q_RN in group:
            if settings.error_feedback and item.slot.residual is not None:
                add_residual(item.flat, item.slot.residual)
            _product(q_RN, a_MN.t(), share, out=p_RM)
    for item, place in zip(dense, dense_parts, strict=True):
        if settings.error_feedback and item.slot.residual is not None:
            add_residual(item.flat, item.slot.residual)
        torch.mul(item.flat, share, out=place)

    first = begin_sum(p, lane, wire, channel=0, part_is_needed=False)
    handle = yield from first.start()
    yield handle
    first.finish()
    # The sum is finite only where every rank's part was: all ranks take the same branch.
    ok = torch.isfinite(largest_sizes(p.flat))

    for group in groups:
        group.p_BRM.copy_(orthonormalise(group.p_BRM.mT).mT)
        for _, a_MN, p_RM, q_RN in group:
            _product(p_RM, a_MN, share, out=q_RN)
    second = begin_sum(q, lane, wire, channel=steps(wire, lane.world_size), part_is_needed=True)
    handle = yield from second.start()
    # A column of finite entries may have a norm that is not: this part overflows where P did not.
    kept = ok & torch.isfinite(largest_sizes(q.flat))
    for group in groups:
        for item, a_MN, p_RM, q_RN in group:
            if observer is not None:
                mine_RN = q_RN * lane.world_size
                observer.energy(item.slot.index, item.flat.square().sum(), mine_RN.square().sum())
                observer.local_factors(item.slot.index, a_MN, p_RM.t(), mine_RN.t())
            if settings.error_feedback:
                # A is not needed any more: its memory will take the average.
                a_MN.addmm_(p_RM.t(), q_RN, alpha=-lane.world_size)
                _keep(memory.ensure_residual(item.slot, item.flat.device), item.flat, kept)
    if settings.error_feedback:
        forget_pending(dense, ok)

    yield handle
    second.finish()
    for group in groups:
        size_BR = largest_sizes(group.q_BRN)
        useful_BR1 = (ok & (size_BR > 0) & torch.isfinite(size_BR))[..., None]
        for (item, a_MN, p_RM, q_RN), useful_R1 in zip(group, useful_BR1, strict=True):
            if observer is not None:
                observer.averaged_factor(item.slot.index, q_RN.t())
            torch.mm(p_RM.t(), q_RN, out=a_MN)
            item.slot.basis_NR = _next_basis(item.slot.basis_NR, q_RN, useful_R1)
    for item, place in zip(dense, dense_parts, strict=True):
        item.flat.copy_(place)
    if work is not bucket.buffer:
        bucket.buffer.copy_(work)
    return bucket.buffer


def _allocate(
    items: list[Item], dense: list[Item], settings: Settings, compute: torch.dtype
) -> tuple[list[_Group], Payload, Payload]:
    """Lay out the first payload [P of all groups | small dense tensors] and the second [Q ...]."""
    by_shape: dict[tuple[int, int, int], list[Item]] = defaultdict(list)
    for item in items:
        if settings.compresses(item.slot):
            assert item.slot.spec is not None
            by_shape[item.slot.spec.rows, item.slot.spec.cols, item.slot.rank].append(item)
    p_blocks = [(len(group) * r, m) for (m, _, r), group in by_shape.items()]
    q_blocks = [(len(group) * r, n) for (_, n, r), group in by_shape.items()]
    dense_size = sum(item.slot.numel for item in dense)
    device = items[0].flat.device
    p_sizes, q_sizes = ([c * length for c, length in blocks] for blocks in (p_blocks, q_blocks))
    p_flat = torch.empty(sum(p_sizes) + dense_size, dtype=compute, device=device)
    q_flat = torch.empty(sum(q_sizes), dtype=compute, device=device)
    p_parts, q_parts = split(p_flat, [*p_sizes, dense_size]), split(q_flat, q_sizes)
    groups = [
        _Group(members, p.view(len(members), r, m), q.view(len(members), r, n))
        for ((m, n, r), members), p, q in zip(by_shape.items(), p_parts[:-1], q_parts, strict=True)
    ]
    return groups, Payload(p_flat, p_blocks), Payload(q_flat, q_blocks)


def _start_bases(group: _Group) -> None:
    """Put the last bases where Q will be, columns scaled to largest entry 1, so that P is as large
    as A: huge gradients do not overflow and tiny ones do not vanish. No squares, for the same reason."""
    for item, q_RN in zip(group.items, group.q_BRN, strict=True):
        assert item.slot.basis_NR is not None
        q_RN.copy_(item.slot.basis_NR.t())
    tiny = torch.finfo(group.q_BRN.dtype).tiny
    group.q_BRN.div_(largest_sizes(group.q_BRN).clamp(min=tiny)[..., None])


def _product(left: Tensor, right: Tensor, scale: float, out: Tensor) -> None:
    """``out = scale * left @ right`` in one pass."""
    torch.addmm(out, left, right, beta=0, alpha=scale, out=out)


def _keep(residual: Tensor, left: Tensor, ok: Tensor) -> None:
    """The new residual, or the old one when this step came out non-finite on any rank."""
    if ok.device.type != "cpu":
        # A choice on the host would make it wait for the device.
        left = torch.where(ok, left, residual.to(left.dtype))
    elif not ok:
        return
    residual.copy_(left)


def _next_basis(before_NR: Tensor | None, q_RN: Tensor, useful_R1: Tensor) -> Tensor:
    """The averaged Q, except columns that a zero or non-finite gradient would make useless."""
    assert before_NR is not None
    if q_RN.device.type == "cpu" and useful_R1.all():
        # No copy: a view of the payload, all of which is bases.
        return q_RN.t()
    return torch.where(useful_R1, q_RN, before_NR.t().to(q_RN.dtype)).t()
