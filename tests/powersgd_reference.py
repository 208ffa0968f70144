"""The engine's algorithm as a readable twin: one matrix, all ranks in one process, plain QR.

It follows the paper's lines and shares no code with the package.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Reference:
    """PowerSGD with local residuals on one matrix, shorter side first."""

    def __init__(self, world_size: int, basis_NR: Tensor) -> None:
        self.basis_NR = basis_NR.double()
        self.residuals_MN: list[Tensor | float] = [0.0] * world_size

    def step(self, gradients_MN: list[Tensor]) -> Tensor:
        pairs = zip(gradients_MN, self.residuals_MN, strict=True)
        inputs_MN = [gradient.double() + residual for gradient, residual in pairs]
        p_MR = torch.stack([a_MN @ self.basis_NR for a_MN in inputs_MN]).sum(0)
        p_MR = torch.linalg.qr(p_MR).Q
        factors_NR = [a_MN.t() @ p_MR for a_MN in inputs_MN]
        self.residuals_MN = [
            a_MN - p_MR @ q_NR.t() for a_MN, q_NR in zip(inputs_MN, factors_NR, strict=True)
        ]
        self.basis_NR = torch.stack(factors_NR).mean(0)
        return p_MR @ self.basis_NR.t()
