"""Collects what controllers decide on (method: GDS), as small tensors until a window ends.

Nothing here reads a value on the host while gradients are in flight; :meth:`Observer.vector` does,
once per window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from edgc_ddp.decisions import Layout, Observation, Plan
from edgc_ddp.factors import FactorSums
from edgc_ddp.lane import Lane, Mark
from edgc_ddp.maths.entropy import entropy_under, resolve_estimator
from edgc_ddp.maths.orthogonal import orthonormalise, random_basis
from edgc_ddp.maths.placed import aligned
from edgc_ddp.reducers.bucket import Bucket

_FIELDS = 4  # entropy sum, entropy count, energy before, energy left
_SPANS = 1000


class Observer:
    """Accumulators of one window."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.spans: list[float | tuple[Mark, Mark]] = []
        """Seconds, or the two marks between which they will be read."""
        self.steps = 0
        self.loss_scale = 1.0
        """What this iteration's gradients and residuals are multiplied by: all sums are without it, since
        a scale that moves is no news of the gradient."""
        self.factors = FactorSums(layout, device)
        self.reset(Plan({}, phase="start"))

    def reset(self, plan: Plan) -> None:
        """Begin a window under this plan."""
        self.factors.reset(plan.ranks)
        probe_rank = plan.probe_rank
        self.steps = 0
        self.spans = []
        count = len(self.layout.matrices)
        # Float32 on the device is enough for means of a window and runs everywhere.
        self.sums = torch.zeros(count, _FIELDS, dtype=torch.float32, device=self.device)
        self.curve = torch.zeros(
            probe_rank + 1 if probe_rank else 0, dtype=torch.float32, device=self.device
        )

    def move_to(self, device: torch.device) -> None:
        """Bring what a checkpoint left elsewhere to where the gradients are."""
        self.device = device
        self.sums, self.curve = self.sums.to(device), self.curve.to(device)
        self.factors.move_to(device)

    def state_dict(self, spans: Sequence[float]) -> dict[str, Any]:
        """The window so far; ``spans`` in seconds."""
        return {
            "steps": self.steps,
            "spans": list(spans),
            "sums": self.sums.clone(),
            "curve": self.curve.clone(),
            "factors": self.factors.state_dict(),
        }

    def load_state_dict(self, window: Mapping[str, Any]) -> None:
        """Go on in the middle of a window."""
        self.steps, self.spans = window["steps"], list(window["spans"])
        self.sums = window["sums"].clone().to(self.device)
        self.curve = window["curve"].clone().to(self.device)
        self.factors.load_state_dict(window["factors"])

    def note_span(self, began: Mark, ended: Mark) -> None:
        """An iteration was averaged between these marks."""
        self.spans.append((began, ended))
        # A plan may last for a hundred thousand iterations.
        del self.spans[:-_SPANS]

    def seconds(self, lane: Lane | None) -> list[float]:
        """What each iteration of the window took. Waits for the device."""
        seconds: list[float] = []
        for span in self.spans:
            if isinstance(span, tuple):
                assert lane is not None
                seconds.append(lane.seconds(*span))
            else:
                seconds.append(span)
        return seconds

    def look(self, bucket: Bucket, plan: Plan, step: int) -> None:
        """Sample each matrix of a bucket."""
        for item in bucket.items(bucket.buffer):
            if item.slot.index >= 0:
                self.sample(item.slot.index, item.slot.as_matrix(item.flat), plan, step)

    def probe_all(self, bucket: Bucket) -> None:
        """Probe each matrix of a bucket."""
        for item in bucket.items(bucket.buffer):
            if item.slot.index >= 0:
                self.probe(item.slot.as_matrix(item.flat))

    def sample(self, index: int, grad_MN: Tensor, plan: Plan, step: int) -> None:
        """Take one matrix's entropy. ``grad_MN`` is this rank's own gradient, before compression:
        what compression leaves would measure the rank, and a falling rank would feed on itself."""
        assert plan.sampling is not None
        estimator = resolve_estimator(plan.sampling.estimator)
        beta, scale = plan.sampling.beta, self.loss_scale
        entropy = entropy_under(scale, estimator, grad_MN, beta, step)
        known = torch.isfinite(entropy)
        self.sums[index, 0] += torch.where(known, entropy, 0.0).to(self.sums.dtype)
        self.sums[index, 1] += known.to(self.sums.dtype)
        self.factors.gradient(index, grad_MN, beta, step, scale)

    def energy(self, index: int, before: Tensor, sent: Tensor) -> None:
        """Note squared norms of gradient plus residual and of what was sent of it.

        With orthonormal P the residual's energy is their difference, so no pass over it is needed.
        """
        # Twice: the square of a large scale is beyond single precision.
        before, sent = (x / self.loss_scale / self.loss_scale for x in (before, sent))
        self.factors.whole(index, before)
        known = torch.isfinite(before) & torch.isfinite(sent)
        self.sums[index, 2] += torch.where(known, before, 0.0)
        self.sums[index, 3] += torch.where(known, (before - sent).clamp(min=0), 0.0)

    def local_factors(self, index: int, a_MN: Tensor, p_MR: Tensor, q_NR: Tensor) -> None:
        """Note what this rank's factors leave of its gradient plus residual A."""
        self.factors.left(index, a_MN, p_MR, q_NR, self.steps, self.loss_scale)

    def averaged_factor(self, index: int, q_NR: Tensor) -> None:
        """Note the energy of each direction of the averaged factor Q."""
        self.factors.averaged(index, q_NR, self.loss_scale)

    def probe(self, average_MN: Tensor) -> None:
        """Add the energy that one pass at rank 0, 1, ... would leave of an averaged gradient.

        One factorisation serves all ranks: the first k columns of P depend on the first k of Q.
        """
        rows, cols = average_MN.shape
        average_MN = aligned(average_MN.to(self.curve.dtype))
        rank = min(len(self.curve) - 1, rows)
        # Drawn on the device: a copy from the host would make it wait.
        generator = torch.Generator(average_MN.device).manual_seed(cols)
        q_NR = random_basis(cols, rank, generator).to(average_MN.dtype)
        p_MR = orthonormalise(average_MN @ q_NR)
        energy_R = (average_MN.t() @ p_MR / self.loss_scale).square().sum(0)
        # A running sum as a product: CUDA has no deterministic one of floats.
        captured_R = energy_R.new_ones(rank, rank).tril() @ energy_R
        total = (torch.linalg.vector_norm(average_MN) / self.loss_scale).square()
        self.curve[0] += total
        self.curve[1 : rank + 1] += (total - captured_R).clamp(min=0)
        self.curve[rank + 1 :] += (total - captured_R[-1]).clamp(min=0)

    def vector(self, spans: Sequence[float]) -> list[float]:
        """This rank's measurements, to be summed over ranks; ``spans`` in seconds."""
        span = median(spans) if spans else math.nan
        sums, curve = self.sums.double().flatten().tolist(), self.curve.double().tolist()
        return [*sums, span, *curve, *self.factors.vector()]

    def observation(self, total: Sequence[float], world_size: int) -> Observation:
        """What the sum of all ranks' vectors says."""
        matrices = self.layout.matrices
        entropy, residual = {}, {}
        rest = total[len(matrices) * _FIELDS :]
        end = 1 + len(self.curve)
        energies = self.factors.fields(rest[end:], world_size)
        for index, matrix in enumerate(matrices):
            h_sum, h_count, before, left = total[index * _FIELDS : (index + 1) * _FIELDS]
            entropy[matrix.name] = h_sum / h_count if h_count else math.nan
            # Of nothing, nothing stays behind; what was not looked at is not known.
            unsent = 0.0 if math.isfinite(energies["energy"][matrix.name]) else math.nan
            residual[matrix.name] = left / before if before > 0 else unsent
        return Observation(
            steps=self.steps,
            entropy=entropy,
            residual_share=residual,
            span_seconds=rest[0] / world_size,
            error_curve=tuple(value / world_size for value in rest[1:end]),
            **energies,
        )
