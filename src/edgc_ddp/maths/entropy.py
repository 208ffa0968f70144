"""Entropy of a gradient from a sample of it: the gradient data sampler (GDS; method, section 1).

Every estimator has the form ``estimator(grad_MN, beta, offset) -> Tensor``: a share ``beta`` of the
entries is used, ``offset`` (the iteration, say) moves the sample so that in time every entry is
seen, and a 0-dim float32 tensor in nats comes back on the gradient's device. No estimator copies
more than the sample or waits for a GPU, so none reads a tensor's value: a gradient that has no
entropy gives a non-finite number, ``-inf`` when there is nothing but zeros and ``nan`` when an
entry of the sample is not finite, and the caller drops it.

========================  ==========  ======================================================
name                      scale-free  what it is
========================  ==========  ======================================================
``gaussian``              no          differential entropy of a normal of the sample's variance
``histogram``             no          differential entropy from a histogram of 256 bins
``histogram_code``        yes         entropy of 1000 bins over the sample's own range
``spectral``              yes         entropy of the singular-value energies
========================  ==========  ======================================================

A scale-free estimator gives the same number for ``g`` and ``1e-6 g``: a rank rule that reads an
entropy change as a change of the gradient's size (the paper's) gets nothing from it.

Shape letters: M rows, N columns, S longer side, T shorter side, K sketch columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

Estimator = Callable[[Tensor, float, int], Tensor]

GAUSSIAN_CONSTANT = 0.5 * math.log(2 * math.pi * math.e)

_LARGEST_DENOMINATOR = 32
_BLOCKS_PER_LINE = 16
_SKETCH_COLUMNS = 32
_SKETCH_ROUNDS = 4
_DIAGONAL_ROUNDS = 6
_FEWEST_LINES = 128


def strided_sample(grad_MN: Tensor, beta: float, offset: int) -> Tensor:
    """About ``beta`` of the entries, as a view.

    ``beta`` is read as a fraction ``a/b``: ``a`` neighbours out of every ``b``. A plain stride
    would see the same columns in every row whenever ``b`` divides the row length, so the view walks
    the matrix in lines one entry shorter than a whole number of rows. Each line then starts one
    column further left, and every ``b`` lines see all columns.

    ``offset`` (any integer >= 0) turns the phase; ``0 .. 2 b - 1`` together see every entry. The
    phase is the sum of the digits of ``offset`` in base ``b``, because a sample taken every tenth
    iteration must not meet the same phases again and again.

    Args:
        grad_MN: at least one entry. Contiguous or transposed; of any other layout whole rows are
            taken, one in ``round(1 / beta)``.
        beta: in ``(0, 1]``; rounded to a fraction with a small denominator, or to ``1 / integer``.

    Returns:
        A view of one to three dimensions. A matrix of fewer than ``2 b`` entries is used whole; one
        of fewer than ``b`` rows is walked as one line, where only all phases see all columns.

    Raises:
        ValueError: ``beta`` outside ``(0, 1]`` or ``offset`` negative.

    >>> grad = torch.arange(64 * 64.0).view(64, 64)
    >>> sample = strided_sample(grad, 0.25, offset=7)
    >>> sample.numel() / grad.numel(), sample.remainder(64).unique().numel()
    (0.25, 64)
    """
    _check(grad_MN, beta, offset)
    rows, cols = grad_MN.shape
    if not grad_MN.is_contiguous():
        if not grad_MN.t().is_contiguous():
            step = min(round(1 / beta), rows)
            return grad_MN[_phase(offset, step) :: step]
        grad_MN, rows, cols = grad_MN.t(), cols, rows
    flat = grad_MN.reshape(-1)
    size = flat.numel()
    kept, block = _fraction(beta)
    if block == 1 or size < 2 * block:
        return flat
    room = size - (block - 1)
    joined_rows = min(math.ceil(_BLOCKS_PER_LINE * block / cols), rows // block)
    line = joined_rows * cols - 1
    if cols == 1 or line < block:
        line = room
    blocks = (line - kept) // block + 1
    span = (blocks - 1) * block + kept
    wanted = max(1, round(size * kept / (block * blocks * kept)))
    lines = min(wanted, (room - span) // line + 1)
    slack = size - ((lines - 1) * line + span)
    phase = _phase(offset, block)
    start = phase if offset // block % 2 == 0 else slack - phase
    return flat.as_strided((lines, blocks, kept), (line, block, 1), flat.storage_offset() + start)


def gaussian(grad_MN: Tensor, beta: float, offset: int) -> Tensor:
    """Differential entropy of a normal distribution with the sample's variance.

    ``ln(sigma) + 0.5 ln(2 pi e)``, sigma about the sample's own mean. Sees scale. The default: the
    rank rule (CQM) assumes exactly this. Source: method, section 1.

    >>> grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 1e-3
    >>> round(float(gaussian(grad, 0.25, 0)), 2)
    -5.49
    """
    sample = _float(strided_sample(grad_MN, beta, offset))
    return (sample.std(correction=0).log() + GAUSSIAN_CONSTANT).float()


def histogram(
    grad_MN: Tensor,
    beta: float,
    offset: int,
    *,
    bins: int = 256,
    edges: tuple[float, float] | None = None,
) -> Tensor:
    """Differential entropy of the sample's histogram: ``-sum p ln p + ln(bin width)``.

    Sees scale. Low by about ``(occupied bins - 1) / (2 sample size)``, as every plug-in estimate.
    Source: method, section 1.

    Args:
        bins: number of equal bins.
        edges: lowest and highest edge; entries outside are left out. None: the sample's own range.

    Raises:
        ValueError: ``edges`` that are not increasing, or ``bins`` below 1.

    >>> grad = torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) * 2
    >>> round(float(histogram(grad, 0.25, 0)), 2)
    0.69
    """
    shannon, width = _binned(strided_sample(grad_MN, beta, offset), bins, edges)
    return shannon + (width.log() - math.log(bins)).float()


def histogram_code(grad_MN: Tensor, beta: float, offset: int) -> Tensor:
    """Entropy of 1000 equal bins between the sample's smallest and largest entry.

    Scale-free, for want of a bin-width term. Kept to reproduce the policy of the authors' code;
    source: method, section 1, ``histogram_code``.

    >>> grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    >>> bool((histogram_code(grad, 1.0, 0) - histogram_code(grad * 1e-6, 1.0, 0)).abs() < 1e-3)
    True
    """
    shannon, width = _binned(strided_sample(grad_MN, beta, offset), 1000, None)
    return torch.where(width == 0, -torch.inf, shannon)


def spectral(grad_MN: Tensor, beta: float, offset: int) -> Tensor:
    """Entropy of the normalised singular-value energies; its exp is the effective rank.

    Scale-free. The longer side is sampled (one line in ``round(1 / beta)``, but 128 lines where
    there are as many), so that the shorter side, which bounds the rank, stays whole. A few
    orthogonal iterations of a seeded sketch of at most 32 columns give the leading energies; what
    they leave is spread evenly over the directions that remain. No spectrum has more entropy than
    that, so at ``beta = 1`` this is an upper estimate, within 1 % of the effective rank up to rank
    32. A sample of fewer lines than the shorter side has lowers it: no sample shows more directions
    than it has lines.

    >>> grad = torch.zeros(64, 96)
    >>> grad[:5, :5] = torch.eye(5)
    >>> round(float(spectral(grad, 1.0, 0).exp()), 3)
    5.0
    """
    _check(grad_MN, beta, offset)
    grad_ST = grad_MN if grad_MN.shape[0] >= grad_MN.shape[1] else grad_MN.t()
    step = max(1, min(round(1 / beta), grad_ST.shape[0] // _FEWEST_LINES))
    sample_ST = _float(grad_ST[_phase(offset, step) :: step])
    largest = sample_ST.abs().amax()
    sample_ST = sample_ST / torch.where(largest == 0, 1.0, largest)
    energy = sample_ST.square().sum()

    directions = grad_ST.shape[1]
    columns = min(_SKETCH_COLUMNS, *sample_ST.shape)
    generator = torch.Generator(grad_MN.device).manual_seed(0)
    basis_TK = torch.randn(
        directions, columns, generator=generator, device=grad_MN.device, dtype=sample_ST.dtype
    )
    for _ in range(_SKETCH_ROUNDS):
        basis_TK = torch.linalg.qr(sample_ST.t() @ (sample_ST @ basis_TK))[0]
    shares_K = _eigenvalues(sample_ST @ basis_TK) / energy
    rest = (1 - shares_K.sum()).clamp(min=0)
    remaining = max(1, directions - columns)
    entropy = torch.special.entr(shares_K).sum() + torch.special.entr(rest / remaining) * remaining
    entropy = torch.where(energy == 0, -torch.inf, entropy)
    return torch.where(torch.isfinite(energy), entropy, torch.nan).float()


ESTIMATORS: dict[str, Estimator] = {
    "gaussian": gaussian,
    "histogram": histogram,
    "histogram_code": histogram_code,
    "spectral": spectral,
}
"""All estimators by name."""

_SEE_SCALE = (gaussian, histogram)


def resolve_estimator(name_or_callable: str | Estimator) -> Estimator:
    """The estimator of that name; a function of the same form is returned as it is.

    Raises:
        ValueError: no estimator has that name.

    >>> resolve_estimator("gaussian") is gaussian
    True
    """
    if callable(name_or_callable):
        return name_or_callable
    if name_or_callable not in ESTIMATORS:
        raise ValueError(
            f"estimator={name_or_callable!r} is not known: use one of {', '.join(ESTIMATORS)}, "
            "or pass a function (grad_MN, beta, offset) -> 0-dim tensor"
        )
    return ESTIMATORS[name_or_callable]


def entropy_under(
    loss_scale: float, estimator: Estimator, grad_MN: Tensor, beta: float, offset: int
) -> Tensor:
    """The entropy of ``grad_MN / loss_scale``. A differential entropy moves by the logarithm of the scale;
    only for an estimator that is not known here the gradient is divided.

    >>> grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    >>> bool(entropy_under(1024.0, gaussian, 1024 * grad, 0.25, 0).isclose(gaussian(grad, 0.25, 0)))
    True
    """
    if loss_scale == 1 or estimator in ESTIMATORS.values():
        shift = math.log(loss_scale) if estimator in _SEE_SCALE else 0.0
        return estimator(grad_MN, beta, offset) - shift
    return estimator(_float(grad_MN) / loss_scale, beta, offset)


def _check(grad_MN: Tensor, beta: float, offset: int) -> None:
    assert grad_MN.dim() == 2 and grad_MN.numel() > 0, f"not a matrix: {tuple(grad_MN.shape)}"
    if not 0 < beta <= 1:
        raise ValueError(f"beta={beta} is not a share of the entries: use a number in (0, 1]")
    if offset < 0:
        raise ValueError(f"offset={offset} must not be negative: pass the iteration, say")


def _eigenvalues(factor_SK: Tensor) -> Tensor:
    """Of the Gram matrix, largest first: ``eigvalsh`` would wait for the GPU to say it converged.

    The QR algorithm, eight of its steps at a time: ``gram^8 = V R`` turns ``gram`` as much as eight
    plain steps. Pairs closer than it resolves have nearly the same entropy resolved or not.
    """
    gram_KK = (factor_SK.t() @ factor_SK).double()
    for _ in range(_DIAGONAL_ROUNDS):
        power_KK = gram_KK
        for _ in range(3):
            power_KK = power_KK / torch.where(power_KK.trace() == 0, 1.0, power_KK.trace())
            power_KK = power_KK @ power_KK
        turn_KK = torch.linalg.qr(power_KK)[0]
        gram_KK = turn_KK.t() @ gram_KK @ turn_KK
    return gram_KK.diagonal().clamp(min=0)


def _float(sample: Tensor) -> Tensor:
    """Half-precision samples in single precision, others as they are."""
    return sample if sample.dtype in (torch.float32, torch.float64) else sample.float()


def _fraction(beta: float) -> tuple[int, int]:
    if beta * _LARGEST_DENOMINATOR < 1:
        return 1, round(1 / beta)
    nearest = Fraction(beta).limit_denominator(_LARGEST_DENOMINATOR)
    return nearest.numerator, nearest.denominator


def _phase(offset: int, base: int) -> int:
    """Sum of the digits of ``offset`` in ``base``, modulo ``base``."""
    total = 0
    while offset and base > 1:
        offset, digit = divmod(offset, base)
        total += digit
    return total % base


def _binned(sample: Tensor, bins: int, edges: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    """Shannon entropy of the histogram and the width of its range, ``nan`` if not finite."""
    if bins < 1:
        raise ValueError(f"bins={bins} leaves no bin: use at least 1")
    sample = _float(sample).reshape(-1)
    if edges is None:
        low, high = torch.aminmax(sample)
    else:
        if not edges[0] < edges[1]:
            raise ValueError(f"edges={edges} must be (lowest, highest) and increasing")
        low, high = (torch.full_like(sample[0], edge) for edge in edges)
    width = high - low
    place = (sample - low) / torch.where(width == 0, 1.0, width)
    inside = ((place >= 0) & (place <= 1)).long()
    # histc refuses torch's deterministic mode and bincount waits for the GPU.
    index = (place.nan_to_num_(0.0) * bins).clamp_(0, bins - 1).long()
    counts = torch.zeros(bins, dtype=torch.int64, device=sample.device)
    counts.scatter_add_(0, index, inside)
    shannon = torch.special.entr(counts / counts.sum()).sum()
    finite = torch.isfinite(sample.sum()) & torch.isfinite(width)
    return torch.where(finite, shannon, torch.nan).float(), width
