"""The average through rank-R factors with error feedback (PowerSGD's iteration, method section 4).

    A_i = M_i + e_i          gradient of rank i plus what it has failed to send before
    P   = sum_i A_i Q        first sum, with the small dense tensors in the same payload
    P^  = orth(P)
    Q_i = A_i^T P^           second sum: their mean is Q
    e_i = A_i - P^ Q_i^T     overlaps that sum; Q_i as it was rounded for the wire
    average = P^ Q^T

The residual is local: it does not depend on what other ranks sent, stays bounded on skewed data, and
its sum over ranks is what the average lacks. Beside P travels a flag for each matrix; one that no rank has
a gradient of keeps residual and basis, since its Q is made zero.

Shapes: M <= N the sides of a matrix, R its rank, B matrices of one shape and rank in this bucket.
Factors are kept with their columns in one piece (RM, RN): matrix products with few columns run up to
ten times faster so, QR wants it so, and a column's scale is one contiguous maximum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc_ddp.lane import Handle, Lane, Task
from edgc_ddp.maths.orthogonal import orthonormalise
from edgc_ddp.maths.placed import ENTRIES, aligned, is_aligned
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.observer import Observer
from edgc_ddp.reducers.bucket import (
    Bucket,
    Item,
    Settings,
    add_residual,
    compute_dtype,
    hand_back,
    keep_residual,
)
from edgc_ddp.reducers.dense import add_pending, settle_pending
from edgc_ddp.reducers.used import erase_unused, write_flags
from edgc_ddp.reducers.wire import Payload, begin_sum, largest_sizes, split, steps


@dataclass
class _Group:
    """Matrices of one shape and rank: their factors lie side by side, so one call serves all."""

    items: list[Item]
    p_BRM: Tensor
    q_BRN: Tensor

    def __post_init__(self) -> None:
        parts = zip(self.items, self.p_BRM, self.q_BRN, strict=True)
        self._members = [(item, item.slot.as_matrix(item.flat), p, q) for item, p, q in parts]

    def __iter__(self) -> Iterator[tuple[Item, Tensor, Tensor, Tensor]]:
        """Item, its A (M x N), its p (R x M), its q (R x N)."""
        return iter(self._members)


def reduce_low_rank(
    bucket: Bucket,
    lane: Lane,
    settings: Settings,
    memory: ParameterMemory,
    observer: Observer | None,
) -> Task:
    """Average the bucket in place; ``observer`` is given on sampled iterations only."""
    compute = compute_dtype(bucket.buffer)
    wire = settings.wire_for(bucket.buffer.dtype)
    share = 1 / lane.world_size
    # The gradient's own memory serves as A; half-precision buckets need a wider copy, and those in which
    # matrices lie badly another.
    work = bucket.buffer.to(compute)
    places = bucket.items(work)
    items = _well_placed(places, settings)
    dense = [item for item in items if not settings.compresses(item.slot)]
    pending = [item for item in dense if settings.error_feedback and item.slot.residual is not None]
    groups, p, q, flags_F = _allocate(items, dense, pending, settings, compute)
    dense_sizes = [item.slot.numel for item in dense]
    *dense_parts, _ = split(p.flat[p.factor_numel :], [*dense_sizes, len(flags_F)])

    write_flags([*(item for group in groups for item in group.items), *pending], flags_F)
    for group in groups:
        _start_bases(group)
        for item, a_MN, p_RM, q_RN in group:
            if settings.error_feedback and item.slot.residual is not None:
                add_residual(item.flat, item.slot.residual)
            _product(q_RN, a_MN.t(), share, out=p_RM)
    add_pending(pending, scale=1.0)
    for item, place in zip(dense, dense_parts, strict=True):
        torch.mul(item.flat, share, out=place)

    first = begin_sum(p, lane, wire, channel=0, part_is_needed=False)
    handle = yield from first.start()
    yield handle
    first.finish()
    # The sum is finite only where every rank's part was: all ranks take the same branch.
    ok = torch.isfinite(largest_sizes(p.flat))
    used_F = flags_F > 0
    *used_by_group, used_pending = split(used_F, [*(len(g.items) for g in groups), len(pending)])

    finite = ok
    if groups:
        sums = zip(groups, used_by_group, strict=True)
        finite = yield from _second_sum(list(sums), q, ok, lane, settings, memory, observer, wire)
    for item, place in zip(dense, dense_parts, strict=True):
        item.flat.copy_(place)
    settle_pending(pending, memory, used_pending, finite)
    if items is not places:
        for home, moved in zip(places, items, strict=True):
            home.flat.copy_(moved.flat)
    hand_back(bucket, work, places, finite)
    return bucket.buffer


def _second_sum(
    groups: list[tuple[_Group, Tensor]],
    q: Payload,
    ok: Tensor,
    lane: Lane,
    settings: Settings,
    memory: ParameterMemory,
    observer: Observer | None,
    wire: torch.dtype,
) -> Generator[Handle, None, Tensor]:
    """From the sum of P to the averages of the groups' matrices, each group with its flags; whether all is
    finite."""
    share = 1 / lane.world_size
    for group, used_B in groups:
        group.p_BRM.copy_(orthonormalise(group.p_BRM.mT).mT)
        for _, a_MN, p_RM, q_RN in group:
            _product(p_RM, a_MN, share, out=q_RN)
        # With nothing sent the residual is what it was, and the basis with it.
        erase_unused(group.q_BRN, used_B[:, None, None])
    second = begin_sum(q, lane, wire, channel=steps(wire, lane.world_size), part_is_needed=True)
    handle = yield from second.start()
    # A column of finite entries may have a norm that is not: this part overflows where P did not.
    kept = ok & torch.isfinite(largest_sizes(q.flat))
    for group, used_B in groups:
        if observer is not None:
            _observe(observer, group, used_B, lane.world_size)
        for item, a_MN, p_RM, q_RN in group:
            if settings.error_feedback:
                residual = memory.ensure_residual(item.slot, item.flat.device)
                _keep_left(residual, item, a_MN, p_RM, q_RN, lane.world_size, kept)

    yield handle
    second.finish()
    for group, used_B in groups:
        size_BR = largest_sizes(group.q_BRN)
        useful_BR1 = (ok & (size_BR > 0) & torch.isfinite(size_BR))[..., None]
        if observer is not None:
            seen_BRN = torch.where(used_B[:, None, None], group.q_BRN, math.nan)
            for item, seen_RN in zip(group.items, seen_BRN, strict=True):
                observer.averaged_factor(item.slot.index, seen_RN.t())
        for (item, a_MN, p_RM, q_RN), useful_R1 in zip(group, useful_BR1, strict=True):
            _rebuild(a_MN, p_RM, q_RN)
            item.slot.basis_NR = _next_basis(item.slot.basis_NR, q_RN, useful_R1)
    return ok & torch.isfinite(largest_sizes(q.flat))


def _well_placed(places: list[Item], settings: Settings) -> list[Item]:
    """The items, moved apart where a matrix among them is not aligned."""
    if all(is_aligned(place.flat) for place in places if settings.compresses(place.slot)):
        return places
    sizes = [-(-place.slot.numel // ENTRIES) * ENTRIES for place in places]
    apart = split(places[0].flat.new_empty(sum(sizes)), sizes)
    items = []
    for place, flat in zip(places, apart, strict=True):
        items.append(Item(place.slot, flat[: place.slot.numel]))
        items[-1].flat.copy_(place.flat)
    return items


def _allocate(
    items: list[Item],
    dense: list[Item],
    pending: list[Item],
    settings: Settings,
    compute: torch.dtype,
) -> tuple[list[_Group], Payload, Payload, Tensor]:
    """Lay out the first payload [P of all groups | small dense tensors | flags] and the second
    [Q ...]; the flags are those of all groups' items, then of the pending ones."""
    by_shape: dict[tuple[int, int, int], list[Item]] = defaultdict(list)
    for item in items:
        if settings.compresses(item.slot):
            assert item.slot.spec is not None
            by_shape[item.slot.spec.rows, item.slot.spec.cols, item.slot.rank].append(item)
    p_blocks = [(len(group) * r, m) for (m, _, r), group in by_shape.items()]
    q_blocks = [(len(group) * r, n) for (_, n, r), group in by_shape.items()]
    flags = len(items) - len(dense) + len(pending)
    beside = sum(item.slot.numel for item in dense) + flags
    device = items[0].flat.device
    p_sizes, q_sizes = ([c * length for c, length in blocks] for blocks in (p_blocks, q_blocks))
    p_flat = torch.empty(sum(p_sizes) + beside, dtype=compute, device=device)
    q_flat = torch.empty(sum(q_sizes), dtype=compute, device=device)
    p_parts, q_parts = split(p_flat, [*p_sizes, beside]), split(q_flat, q_sizes)
    groups = [
        _Group(members, p.view(len(members), r, m), q.view(len(members), r, n))
        for ((m, n, r), members), p, q in zip(by_shape.items(), p_parts[:-1], q_parts, strict=True)
    ]
    flags_F = p_flat[p_flat.numel() - flags :]
    return groups, Payload(p_flat, p_blocks), Payload(q_flat, q_blocks), flags_F


def _start_bases(group: _Group) -> None:
    """Put the last bases where Q will be, columns scaled to largest entry 1, so that P is as large
    as A: huge gradients do not overflow and tiny ones do not vanish. No squares, for the same reason."""
    for item, q_RN in zip(group.items, group.q_BRN, strict=True):
        assert item.slot.basis_NR is not None
        q_RN.copy_(item.slot.basis_NR.t())
    tiny = torch.finfo(group.q_BRN.dtype).tiny
    group.q_BRN.div_(largest_sizes(group.q_BRN).clamp(min=tiny)[..., None])


def _product(left: Tensor, right: Tensor, scale: float, out: Tensor) -> None:
    """``out = scale * left @ right`` in one pass. Factors may lie anywhere, ``right`` must be aligned."""
    place = out if is_aligned(out) else torch.empty_like(out)
    torch.addmm(place, aligned(left), right, beta=0, alpha=scale, out=place)
    if place is not out:
        out.copy_(place)


def _keep_left(
    residual: Tensor,
    item: Item,
    a_MN: Tensor,
    p_RM: Tensor,
    q_RN: Tensor,
    world_size: int,
    kept: Tensor,
) -> None:
    """What the factors leave of A becomes the residual. A's memory is free for the average then."""
    p_RM, q_RN = aligned(p_RM), aligned(q_RN)
    if residual.device.type == "cpu" and residual.dtype == a_MN.dtype:
        # Written where it stays: one pass over memory less.
        if kept:
            left_MN = item.slot.as_matrix(residual)
            torch.addmm(a_MN, p_RM.t(), q_RN, alpha=-world_size, out=left_MN)
        return
    a_MN.addmm_(p_RM.t(), q_RN, alpha=-world_size)
    keep_residual(residual, item.flat, kept)


def _rebuild(a_MN: Tensor, p_RM: Tensor, q_RN: Tensor) -> None:
    """A's memory takes the average."""
    p_RM, q_RN = aligned(p_RM), aligned(q_RN)
    if a_MN.device.type == "cpu":
        # With few columns, adding to zeros is up to a quarter faster there than writing anew.
        a_MN.zero_().addmm_(p_RM.t(), q_RN)
    else:
        torch.mm(p_RM.t(), q_RN, out=a_MN)


def _observe(observer: Observer, group: _Group, used_B: Tensor, world_size: int) -> None:
    """Show this rank's A and factors; what nobody has a gradient of is nan, and so not counted."""
    for (item, a_MN, p_RM, q_RN), used in zip(group, used_B, strict=True):
        mine_RN = torch.where(used, q_RN * world_size, math.nan)
        whole = torch.where(used, torch.dot(item.flat, item.flat), math.nan)
        observer.energy(item.slot.index, whole, mine_RN.square().sum())
        observer.local_factors(item.slot.index, a_MN, p_RM.t(), mine_RN.t())


def _next_basis(before_NR: Tensor | None, q_RN: Tensor, useful_R1: Tensor) -> Tensor:
    """The averaged Q, except columns that a zero or non-finite gradient would make useless."""
    assert before_NR is not None
    if q_RN.device.type == "cpu" and useful_R1.all():
        # No copy: a view of the payload, all of which is bases.
        return q_RN.t()
    return torch.where(useful_R1, q_RN, before_NR.t().to(q_RN.dtype)).t()
