"""Orthonormal factors: of a projection (every step), of a new or resized basis (at rank changes).

Shape letters: B matrices of one shape, M rows, N columns of the gradient, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgc_ddp.maths.placed import ENTRIES


def orthonormalise(p_BMR: Tensor) -> Tensor:
    """Orthonormal columns that span what the columns of each matrix span.

    The first ``k`` columns of the result span what the first ``k`` of the input span. Householder
    QR of the columns scaled to a largest entry of 1, so sizes from 1e-30 to 1e+30 side by side do
    no harm. Where the input's columns are dependent or zero, the rest is filled with arbitrary
    orthonormal columns. Equal inputs give equal outputs, and no value is read back, so a CUDA
    stream is not waited for.

    Cholesky QR done twice, unchecked, was measured against it on one thread of a busy CPU (best of
    15 runs): 0.7 to 1.2 times its speed on 256 x 16, 256 x 64 and 1024 x 32 in batches of 1 and 8
    and on single matrices of 1920 x 64 and 1920 x 128. Not worth its weaker guarantee.

    Args:
        p_BMR: ``(batch, rows, rank)`` or ``(rows, rank)``, float32 or float64, ``rank <= rows``.

    Returns:
        A tensor of the same shape and dtype. A matrix with an entry that is not finite comes back
        as ``nan`` throughout, and its batch neighbours unharmed.

    Source: method, section 4, ``orth``.

    >>> p_MR = torch.tensor([[3.0, 1e-30], [4.0, 0.0], [0.0, 1e-30]])
    >>> basis_MR = orthonormalise(p_MR)
    >>> torch.allclose(basis_MR.T @ basis_MR, torch.eye(2), atol=1e-6)
    True
    """
    rows, rank = p_BMR.shape[-2:]
    assert rank <= rows, f"{rank} orthonormal columns do not fit into {rows} rows"
    even_BMR = _even_columns(p_BMR)
    basis_BMR: Tensor
    if p_BMR.dim() == 3 and rows * rank % ENTRIES and p_BMR.device.type == "cpu":
        # Behind one another they would begin anywhere, and be rounded by what is beside them.
        basis_BMR = torch.stack([torch.linalg.qr(even_MR.clone())[0] for even_MR in even_BMR])
    else:
        basis_BMR = torch.linalg.qr(even_BMR)[0]
    # QR itself may not look at the last row of a square matrix and would miss a nan there.
    nan_or_zero_B11 = even_BMR.sum(dim=(-2, -1), keepdim=True) * 0
    return basis_BMR.add_(nan_or_zero_B11)


def _even_columns(p_BMR: Tensor) -> Tensor:
    """Each column divided by its largest entry, so that no square overflows or vanishes."""
    largest_B1R = p_BMR.abs().amax(dim=-2, keepdim=True)
    return p_BMR / torch.where(largest_B1R == 0, 1.0, largest_B1R)


def random_basis(cols: int, rank: int, generator: torch.Generator) -> Tensor:
    """A first basis from nothing: orthonormal columns in random directions.

    Args:
        cols, rank: the shape of the result, ``rank <= cols``.
        generator: drawn from, on its device; the same state gives the same basis.

    Returns:
        ``(cols, rank)`` in float32, on the generator's device.

    >>> random_basis(8, 2, torch.Generator().manual_seed(0)).shape
    torch.Size([8, 2])
    """
    assert rank <= cols, f"{rank} orthonormal columns do not fit into {cols} rows"
    drawn_NR = torch.randn(
        cols, rank, generator=generator, device=generator.device, dtype=torch.float32
    )
    return orthonormalise(drawn_NR)


def extend_basis(q_NR: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """The basis with random columns added, orthogonal to those it has and to one another.

    They get the norm of its weakest column that is not zero (1 when there is none), so that a later
    `shrink_basis` does not prefer them to what was learnt.

    Args:
        q_NR: ``(cols, before)``; it comes back unchanged as the first columns.
        rank: of the result, ``before <= rank <= cols``.
        generator: drawn from; the same state gives the same columns.

    Returns:
        ``(cols, rank)`` in the dtype and on the device of ``q_NR``.

    Source: method, section 4, rank change.

    >>> q_NR = torch.eye(6)[:, :2] * 3
    >>> grown_NR = extend_basis(q_NR, 4, torch.Generator().manual_seed(0))
    >>> torch.allclose(grown_NR.T @ grown_NR, 9 * torch.eye(4), atol=1e-5)
    True
    """
    cols, before = q_NR.shape
    assert before <= rank <= cols, f"a {cols} x {before} basis cannot grow to rank {rank}"
    drawn = torch.randn(
        cols, rank - before, generator=generator, device=generator.device, dtype=torch.float32
    )
    both_NR = orthonormalise(torch.cat([q_NR, drawn.to(q_NR)], dim=1))
    norms_R = torch.linalg.vector_norm(q_NR, dim=0)
    nonzero_R = torch.where(norms_R > 0, norms_R, torch.inf)
    smallest = torch.cat([nonzero_R, nonzero_R.new_full((1,), torch.inf)]).amin()
    scale = torch.where(torch.isinf(smallest), 1.0, smallest)
    return torch.cat([q_NR, both_NR[:, before:] * scale], dim=1)


def shrink_basis(q_NR: Tensor, rank: int) -> Tensor:
    """The basis without its weakest columns (smallest norm), the others in their order.

    Of equal norms the earlier columns stay.

    Args:
        q_NR: ``(cols, before)``.
        rank: of the result, ``0 <= rank <= before``.

    Source: method, section 4, rank change.

    >>> shrink_basis(torch.tensor([[1.0, 5.0, 3.0], [0.0, 0.0, 0.0]]), 2)
    tensor([[5., 3.],
            [0., 0.]])
    """
    assert 0 <= rank <= q_NR.shape[1], f"a rank {q_NR.shape[1]} basis cannot shrink to {rank}"
    norms_R = torch.linalg.vector_norm(q_NR, dim=0)
    strongest_first = torch.argsort(norms_R, descending=True, stable=True)
    return q_NR[:, strongest_first[:rank].sort().values]
