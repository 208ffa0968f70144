"""What is remembered of every parameter between iterations: its residual and its basis.

DDP rebuilds its buckets while it runs, so nothing is keyed by bucket: a :class:`Slot` belongs to a
parameter and is found by the parameter's name.

Shapes: M <= N the sides of a gradient matrix, R its rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgc_ddp.decisions import MatrixSpec
from edgc_ddp.maths.orthogonal import extend_basis, random_basis, shrink_basis


def axes_in_memory(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """A parameter's axes of more than one entry, outermost first, as its gradient lies in DDP's bucket.

    DDP lays a gradient out like its parameter, so a ``.t()`` or channels_last weight is permuted
    there; a parameter with gaps or overlaps is laid out plainly.

    >>> axes_in_memory((3, 5), (1, 3))
    (1, 0)
    >>> axes_in_memory((8, 3, 1, 6), (18, 1, 18, 3))
    (0, 3, 1)
    """
    plain = [axis for axis, size in enumerate(shape) if size != 1]
    order = sorted(plain, key=lambda axis: (-strides[axis], axis))
    expected = 1
    for axis in reversed(order):
        if strides[axis] != expected:
            return tuple(plain)
        expected *= shape[axis]
    return tuple(order)


def matrix_shape(stored: Sequence[int]) -> tuple[int, int] | None:
    """The two sides of the matrix that a parameter folds into, or None when it has none.

    >>> matrix_shape((64, 3, 3, 16)), matrix_shape((10,)), matrix_shape((1, 7))
    ((64, 144), None, None)
    """
    wide = [side for side in stored if side != 1]
    if len(wide) < 2 or 0 in wide:
        return None
    return wide[0], math.prod(wide[1:])


@dataclass
class Slot:
    """One parameter's place. ``sides`` is None for what is always averaged dense."""

    name: str
    numel: int
    sides: tuple[int, int] | None
    index: int = -1
    """Position in the layout; -1 until the layout is known."""
    rank: int = 0
    """Rank in force; 0 = dense."""
    residual: Tensor | None = None
    """What this rank has failed to send so far, flat, in ``residual_dtype``."""
    basis_NR: Tensor | None = None
    """The last averaged factor Q: where the next power iteration starts."""
    axes: tuple[int, ...] | None = None
    """:func:`axes_in_memory` of what is kept; None for what is no matrix."""
    strides: tuple[int, ...] | None = None
    """The gradient's in its bucket, when it last came in that order of axes; None after a load."""
    viewed: int | None = None
    """Where the bucket lies in which a gradient, as its view, had them and the parameter others."""

    @property
    def spec(self) -> MatrixSpec | None:
        if self.sides is None:
            return None
        return MatrixSpec(self.name, min(self.sides), max(self.sides))

    def move_to(self, device: torch.device) -> None:
        """Bring what a checkpoint left elsewhere to where the gradient is."""
        if self.residual is not None:
            self.residual = self.residual.to(device)
        if self.basis_NR is not None:
            self.basis_NR = self.basis_NR.to(device)

    def turn(
        self, shape: Sequence[int], axes: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> None:
        """The parameter, of this shape, has come with its axes in another order: bring to it what is kept.

        >>> slot = Slot("w", 4, (2, 2), residual=torch.arange(4.0), axes=(0, 1))
        >>> slot.turn((2, 2), (1, 0))
        >>> slot.residual
        tensor([0., 2., 1., 3.])
        """
        before, self.axes, self.strides = self.axes, axes, strides
        assert before is not None
        sizes, place = [shape[axis] for axis in before], [before.index(axis) for axis in axes]
        if self.residual is not None:
            self.residual = self.residual.view(sizes).permute(place).flatten()
        assert self.sides is not None
        if self.basis_NR is not None and self.sides[0] <= self.sides[1] and place[0] == 0:
            rank = self.basis_NR.shape[1]
            inner = [*(at - 1 for at in place[1:]), len(sizes) - 1]
            basis = self.basis_NR.reshape(*sizes[1:], rank).permute(inner)
            self.basis_NR = basis.reshape(-1, rank)
        # Else its rows are of an axis that stays, or it is a start like any other.

    def tensors(self) -> list[Tensor]:
        """What is kept now."""
        return [kept for kept in (self.residual, self.basis_NR) if kept is not None]

    def as_matrix(self, flat: Tensor) -> Tensor:
        """View ``numel`` contiguous entries as the matrix, its shorter side first."""
        assert self.sides is not None
        matrix = flat.view(self.sides)
        return matrix if self.sides[0] <= self.sides[1] else matrix.t()


@dataclass
class ParameterMemory:
    """All slots of one model, in the order in which they were first met."""

    seed: int
    residual_dtype: torch.dtype
    slots: dict[str, Slot] = field(default_factory=dict)
    _sent: list[tuple[Slot, Tensor]] = field(default_factory=list)
    """Residuals that were added to a dense average, and whether this has settled them."""

    def set_rank(self, slot: Slot, rank: int, device: torch.device) -> None:
        """Move one parameter to another rank, keeping its residual and what its basis has learnt.

        At rank 0 the basis goes and the residual stays, until it has been added to a dense average.
        """
        slot.rank = rank
        if rank == 0:
            slot.basis_NR = None
            return
        assert slot.spec is not None and rank <= slot.spec.rows
        generator = torch.Generator().manual_seed(self._seed_of(slot, rank))
        if slot.basis_NR is None:
            fresh = random_basis(slot.spec.cols, rank, generator)
            slot.basis_NR = fresh.to(device)
        elif slot.basis_NR.shape[1] > rank:
            # In one order of memory, or a checkpoint that keeps another would change the last bits.
            slot.basis_NR = shrink_basis(slot.basis_NR.contiguous(), rank)
        elif slot.basis_NR.shape[1] < rank:
            # Grown on the host, so that every device type draws the same columns.
            grown = extend_basis(slot.basis_NR.cpu().contiguous(), rank, generator)
            slot.basis_NR = grown.to(device)

    def _seed_of(self, slot: Slot, rank: int) -> int:
        text = f"{self.seed}/{slot.name}/{rank}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1

    def rescale(self, factor: float) -> None:
        """Multiply every residual."""
        for slot in self.slots.values():
            if slot.residual is not None:
                slot.residual.mul_(factor)

    def tensors(self) -> list[Tensor]:
        """What all slots keep now."""
        return [tensor for slot in self.slots.values() for tensor in slot.tensors()]

    def is_idle(self) -> bool:
        """Whether nothing is compressed and nothing waits to be sent."""
        return not any(slot.rank or slot.residual is not None for slot in self.slots.values())

    def ensure_residual(self, slot: Slot, device: torch.device) -> Tensor:
        """The residual of a slot, zero at first."""
        if slot.residual is None:
            slot.residual = torch.zeros(slot.numel, dtype=self.residual_dtype, device=device)
        return slot.residual

    def note_sent(self, slot: Slot, sent: Tensor) -> None:
        """The slot's residual was sent whole, if ``sent``, a bool equal on all ranks, is true."""
        assert slot.residual is not None
        slot.residual.masked_fill_(sent, 0)
        self._sent.append((slot, sent))

    def free_sent(self) -> None:
        """Give back the memory of residuals that were sent whole. Waits for the device if there are."""
        for slot, sent in self._sent:
            # What did not fit the gradient's type is owed again.
            if sent and slot.residual is not None and not slot.residual.any():
                slot.residual = None
        self._sent.clear()
