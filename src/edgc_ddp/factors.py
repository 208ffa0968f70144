"""What the factors tell about a window's gradients, kept as small tensors until the window ends.

Per matrix: the energy of every rank's gradient, of gradient plus residual, of each direction that
the averaged factors caught, and of what they left (method sections 4 and 5, "free measurements").

Shapes: M <= N the sides of a matrix, R its rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edgc_ddp.decisions import Layout
from edgc_ddp.maths.entropy import strided_sample

# Sums over sampled iterations (and, once summed over them, ranks); behind the first two, their counts.
_GRADIENT, _WHOLE, _FACTORS = 0, 2, 4


class FactorSums:
    """Accumulators of one window. Sums that are not finite are left out, on every rank alike where
    the averaged factors are not finite; those of a matrix that no rank has a gradient of come as nan.

    What the factors leave is estimated without a pass over it: with random signs w,
    ``||(A - P Q^T) w||^2`` has the mean ``||A - P Q^T||^2``. Ranks draw equal signs, so their M-vectors
    add up to that of the average; signs are new in each iteration, so iterations add up too, and one
    M-vector per matrix and window is all that travels.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._signs: tuple[int, dict[int, Tensor]] = (-1, {})
        self.reset({})

    def reset(self, ranks: Mapping[str, int]) -> None:
        """Begin a window at these ranks (0 = dense, nothing is kept for it)."""
        matrices = self.layout.matrices
        self.ranks = [ranks.get(matrix.name, 0) for matrix in matrices]
        heights = [
            matrix.rows if rank else 0 for matrix, rank in zip(matrices, self.ranks, strict=True)
        ]
        self.scalars = torch.zeros(len(matrices), 5, dtype=torch.float32, device=self.device)
        self.captured = torch.zeros(sum(self.ranks), dtype=torch.float32, device=self.device)
        self.probes = torch.zeros(sum(heights), dtype=torch.float32, device=self.device)
        self._split(heights)

    def _split(self, heights: Sequence[int]) -> None:
        self.heights = list(heights)
        self._captured = self.captured.split_with_sizes(self.ranks)
        self._probes = self.probes.split_with_sizes(self.heights)

    def move_to(self, device: torch.device) -> None:
        """Bring the sums to where the gradients are."""
        self.device = device
        self.scalars = self.scalars.to(device)
        self.captured, self.probes = self.captured.to(device), self.probes.to(device)
        self._signs = (-1, {})
        self._split(self.heights)

    def state_dict(self) -> dict[str, Any]:
        """The window so far."""
        return {
            "ranks": list(self.ranks),
            "heights": list(self.heights),
            "scalars": self.scalars.clone(),
            "captured": self.captured.clone(),
            "probes": self.probes.clone(),
        }

    def load_state_dict(self, window: Mapping[str, Any]) -> None:
        """Go on in the middle of a window."""
        self.ranks = list(window["ranks"])
        self.scalars = window["scalars"].clone().to(self.device)
        self.captured = window["captured"].clone().to(self.device)
        self.probes = window["probes"].clone().to(self.device)
        self._split(window["heights"])

    def gradient(
        self, index: int, grad_MN: Tensor, beta: float, step: int, loss_scale: float = 1.0
    ) -> None:
        """Note a rank's own gradient's energy, from a share ``beta`` of its entries."""
        sample = strided_sample(grad_MN, beta, step).float()
        share = grad_MN.numel() / sample.numel()
        norm = torch.linalg.vector_norm(sample) / loss_scale
        self._add(index, _GRADIENT, norm.square() * share)

    def whole(self, index: int, energy: Tensor) -> None:
        """Note the energy of a rank's gradient plus residual."""
        self._add(index, _WHOLE, energy)

    def left(
        self,
        index: int,
        a_MN: Tensor,
        p_MR: Tensor,
        q_NR: Tensor,
        step: int,
        loss_scale: float = 1.0,
    ) -> None:
        """Note what this rank's factors leave of its gradient plus residual A."""
        if not self.heights[index]:
            return
        signs_N = self._draw(a_MN.shape[1], step).to(a_MN.dtype)
        left_M = torch.mv(a_MN, signs_N) - torch.mv(p_MR, torch.mv(q_NR.t(), signs_N))
        known = torch.isfinite(left_M).all()
        self._probes[index].add_(torch.where(known, left_M / loss_scale, 0.0).float())

    def averaged(self, index: int, q_NR: Tensor, loss_scale: float = 1.0) -> None:
        """Note the averaged factor Q: with orthonormal P, a column's energy is a direction's."""
        if not self.ranks[index]:
            return
        energy_R = (q_NR.float() / loss_scale).square().sum(0)
        known = torch.isfinite(energy_R).all()
        self._captured[index].add_(torch.where(known, energy_R, 0.0))
        self.scalars[index, _FACTORS] += known

    def vector(self) -> list[float]:
        """This rank's sums, to be summed over ranks."""
        parts = (self.scalars.flatten(), self.captured, self.probes)
        return [value for part in parts for value in part.double().tolist()]

    def fields(self, total: Sequence[float], world_size: int) -> dict[str, Any]:
        """The fields of :class:`edgc_ddp.decisions.Observation` that all ranks' sums give."""
        matrices = self.layout.matrices
        names = [matrix.name for matrix in matrices]
        scalars = [total[5 * k : 5 * k + 5] for k in range(len(matrices))]
        rest = list(total[5 * len(matrices) :])
        captured: dict[str, tuple[float, ...]] = {}
        for name, rank, sums in zip(names, self.ranks, scalars, strict=True):
            mine, rest = rest[:rank], rest[rank:]
            count = sums[_FACTORS]
            captured[name] = tuple(sorted((x / count for x in mine), reverse=True)) if count else ()
        left: dict[str, float] = {}
        for name, height, sums in zip(names, self.heights, scalars, strict=True):
            mine, rest = rest[:height], rest[height:]
            energy = math.fsum(value * value for value in mine) / world_size
            left[name] = energy / sums[_FACTORS] if sums[_FACTORS] else math.nan
        pairs = list(zip(names, scalars, strict=True))
        return {
            "gradient_energy": {n: _mean(s, _GRADIENT) for n, s in pairs},
            "energy": {n: _mean(s, _WHOLE) for n, s in pairs},
            "captured": captured,
            "left": left,
        }

    def _add(self, index: int, place: int, value: Tensor) -> None:
        known = torch.isfinite(value)
        self.scalars[index, place] += torch.where(known, value, 0.0).float()
        self.scalars[index, place + 1] += known

    def _draw(self, length: int, step: int) -> Tensor:
        """Random signs, equal on all ranks and for all matrices of this length."""
        if self._signs[0] != step:
            self._signs = (step, {})
        drawn = self._signs[1]
        if length not in drawn:
            # Below 2^31: the CPU generator drops the upper half of longer seeds.
            # Drawn on the device: a copy from the host would make it wait.
            generator = torch.Generator(self.device)
            generator.manual_seed((step * 1_000_003 + length) % 2**31)
            bits = torch.randint(0, 2, (length,), generator=generator, device=self.device)
            drawn[length] = (2 * bits - 1).float()
        return drawn[length]


def _mean(sums: Sequence[float], place: int) -> float:
    return sums[place] / sums[place + 1] if sums[place + 1] else math.nan
