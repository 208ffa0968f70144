"""The average through rank-R factors with error feedback (PowerSGD's iteration, method section 4).

    A_i = M_i + e_i          gradient of rank i plus what it has failed to send before
    P   = sum_i A_i Q        first collective, with the small dense tensors in the same payload
    P^  = orth(P)
    Q_i = A_i^T P^           second collective: their mean is Q
    e_i = A_i - P^ Q_i^T     overlaps that collective; Q_i as it was rounded for the wire
    average = P^ Q^T

The residual is local: it does not depend on what other ranks sent, stays bounded on skewed data, and
its sum over ranks is what the average lacks.

Shapes: M <= N the sides of a matrix, R its rank, B matrices of one shape and rank in this bucket.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc_ddp.lane import Lane, Task
from edgc_ddp.maths.orthogonal import orthonormalise
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.observer import Observer
from edgc_ddp.reducers.bucket import Bucket, Item, Settings, compute_dtype, split
from edgc_ddp.reducers.dense import forget_pending


@dataclass
class _Group:
    """Matrices of one shape and rank: their factors lie side by side, so one call serves all."""

    items: list[Item]
    p_BMR: Tensor
    q_BNR: Tensor


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
    # The gradient's own memory serves as A; only half-precision buckets need a wider copy.
    work = bucket.buffer.to(compute)
    items = bucket.items(work)
    dense = [item for item in items if not settings.compresses(item.slot)]
    groups, p_flat, q_flat, dense_flat = _allocate(items, dense, settings, compute)

    dense_parts = split(dense_flat, [item.slot.numel for item in dense])

    if settings.error_feedback:
        for item in items:
            if item.slot.residual is not None:
                item.flat.add_(item.slot.residual)
    for group in groups:
        for item, p_MR in zip(group.items, group.p_BMR, strict=True):
            basis_NR = _unit_columns(item.slot.basis_NR).to(compute)
            torch.mm(item.slot.as_matrix(item.flat), basis_NR / lane.world_size, out=p_MR)
    for item, place in zip(dense, dense_parts, strict=True):
        torch.div(item.flat, lane.world_size, out=place)

    p_wire = p_flat.to(wire)
    yield lane.all_reduce(p_wire, channel=0)
    p_flat.copy_(p_wire)
    # The sum is finite only where every rank's part was: all ranks take the same branch.
    ok = torch.isfinite(p_flat).all()

    for group in groups:
        group.p_BMR.copy_(orthonormalise(group.p_BMR))
        for item, p_MR, q_NR in zip(group.items, group.p_BMR, group.q_BNR, strict=True):
            torch.mm(item.slot.as_matrix(item.flat).t(), p_MR / lane.world_size, out=q_NR)
    q_wire = q_flat.to(wire, copy=True)
    q_flat.copy_(q_wire).mul_(lane.world_size)
    second = lane.all_reduce(q_wire, channel=1)
    for group in groups:
        for item, p_MR, q_NR in zip(group.items, group.p_BMR, group.q_BNR, strict=True):
            if observer is not None:
                observer.energy(item.slot.index, item.flat.square().sum(), q_NR.square().sum())
            if settings.error_feedback:
                _store_residual(item, p_MR, q_NR, memory, ok)
    forget_pending(dense, ok)

    yield second
    q_flat.copy_(q_wire)
    for group in groups:
        for item, p_MR, q_NR in zip(group.items, group.p_BMR, group.q_BNR, strict=True):
            torch.mm(p_MR, q_NR.t(), out=item.slot.as_matrix(item.flat))
            item.slot.basis_NR = _next_basis(item.slot.basis_NR, q_NR, ok)
    for item, place in zip(dense, dense_parts, strict=True):
        item.flat.copy_(place)
    if work is not bucket.buffer:
        bucket.buffer.copy_(work)
    return bucket.buffer


def _allocate(
    items: list[Item], dense: list[Item], settings: Settings, compute: torch.dtype
) -> tuple[list[_Group], Tensor, Tensor, Tensor]:
    """Lay out the first payload [P of all groups | small dense tensors] and the second [Q ...]."""
    by_shape: dict[tuple[int, int, int], list[Item]] = defaultdict(list)
    for item in items:
        if settings.compresses(item.slot):
            assert item.slot.spec is not None
            by_shape[item.slot.spec.rows, item.slot.spec.cols, item.slot.rank].append(item)
    p_sizes = [len(group) * m * r for (m, _, r), group in by_shape.items()]
    q_sizes = [len(group) * n * r for (_, n, r), group in by_shape.items()]
    dense_size = sum(item.slot.numel for item in dense)
    device = items[0].flat.device
    p_flat = torch.empty(sum(p_sizes) + dense_size, dtype=compute, device=device)
    q_flat = torch.empty(sum(q_sizes), dtype=compute, device=device)
    p_parts = split(p_flat, [*p_sizes, dense_size])
    q_parts = split(q_flat, q_sizes)
    groups = [
        _Group(members, p.view(len(members), m, r), q.view(len(members), n, r))
        for ((m, n, r), members), p, q in zip(by_shape.items(), p_parts[:-1], q_parts, strict=True)
    ]
    return groups, p_flat, q_flat, p_parts[-1]


def _unit_columns(basis_NR: Tensor | None) -> Tensor:
    """Columns scaled to largest entry 1, so that P is as large as A: huge gradients do not overflow
    and tiny ones do not vanish. No squares, for the same reason."""
    assert basis_NR is not None
    tiny = torch.finfo(basis_NR.dtype).tiny
    return basis_NR / basis_NR.abs().amax(0).clamp(min=tiny)


def _store_residual(
    item: Item, p_MR: Tensor, q_NR: Tensor, memory: ParameterMemory, ok: Tensor
) -> None:
    """e = A - P Q^T, kept as it was when this step came out non-finite on any rank."""
    residual = memory.ensure_residual(item.slot, item.flat.device)
    a_MN, e_MN = item.slot.as_matrix(item.flat), item.slot.as_matrix(residual)
    if ok.device.type == "cpu":
        if not ok:
            return
        if e_MN.dtype == a_MN.dtype:
            torch.addmm(a_MN, p_MR, q_NR.t(), alpha=-1, out=e_MN)
            return
    left_MN = torch.addmm(a_MN, p_MR, q_NR.t(), alpha=-1)
    e_MN.copy_(torch.where(ok, left_MN, e_MN))


def _next_basis(before_NR: Tensor | None, q_NR: Tensor, ok: Tensor) -> Tensor:
    """The averaged Q, except columns that a zero or non-finite gradient would make useless."""
    assert before_NR is not None
    useful_R = ok & (q_NR.abs().amax(0) > 0)
    return torch.where(useful_R, q_NR, before_NR.to(q_NR.dtype))
