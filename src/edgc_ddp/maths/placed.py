"""Where a tensor lies in memory, since matrix libraries round by it.

A product or a QR decomposition of equal numbers may differ in its last bits when its operands begin
elsewhere: edges are peeled until vector loads are aligned. DDP cuts its first buckets anew in every
process, so what must not depend on the cut is computed on aligned places.
"""

from __future__ import annotations

from torch import Tensor

BYTES = 64
"""What PyTorch aligns every new tensor to, and the widest vector register of today's processors."""

ENTRIES = 16
"""As many entries of four bytes, or of more, fill whole places."""


def is_aligned(tensor: Tensor) -> bool:
    """Whether its first entry lies where a new tensor's could.

    >>> import torch
    >>> row = torch.zeros(64)
    >>> is_aligned(row), is_aligned(row[16:]), is_aligned(row[4:])
    (True, True, False)
    """
    return tensor.data_ptr() % BYTES == 0


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it lies badly."""
    return tensor if is_aligned(tensor) else tensor.clone()
