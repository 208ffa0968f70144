"""Takes back what an iteration has sent when the trainer will skip it.

A step is skipped when any of its gradients is not finite. The bucket that is at fault has kept its
residual; the others have sent a part of theirs by then, which would be lost with the step. Per matrix and
rank, A being gradient plus residual:

    e = A - sent          what the bucket left behind
    e + average           has the sum of A over ranks, as mean sent = average

So nothing is lost and no copy is kept: where it was finite, a skipped step's gradient arrives with the next
one. Not so in coded dense averages: their residual is a rounding error, a hundredth of the gradient that
would have to be carried over with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgc_ddp.reducers.bucket import Bucket, Item, keep_residual


@dataclass
class Ledger:
    """The averages of one iteration's buckets, until all of them are there."""

    owing: bool = False
    """Whether residuals may be sent in this iteration."""
    _finite: list[Tensor] = field(default_factory=list)
    _sent: list[tuple[Item, Tensor]] = field(default_factory=list)

    def begin(self, owing: bool) -> None:
        """Whatever became of the last iteration, this is the next."""
        self.owing = owing
        self._finite.clear()
        self._sent.clear()

    def note_plain(self, average: Tensor) -> None:
        """A bucket is averaged, dense or sparse, that had nothing to do with residuals."""
        if self.owing:
            entries = average._values() if average.is_sparse else average
            self._finite.append(torch.isfinite(entries).all())

    def note(self, finite: Tensor, bucket: Bucket | None = None) -> None:
        """A bucket is averaged; ``finite`` (a bool equal on all ranks) says whether it can be used.

        It is given where what its residuals sent is to be taken back if another one cannot.
        """
        self._finite.append(finite)
        if bucket is not None:
            items = bucket.items(bucket.buffer)
            self._sent += [(item, finite) for item in items if item.slot.residual is not None]

    def close(self) -> None:
        """The iteration's last bucket is averaged, and DDP does not know yet."""
        if self._sent:
            usable = torch.stack(self._finite).all()
            for item, finite in self._sent:
                _take_back(item, finite & ~usable)
        self.begin(owing=False)


def _take_back(item: Item, back: Tensor) -> None:
    residual = item.slot.residual
    assert residual is not None
    # The device is not asked: there the sum is taken in any case, and chosen or not.
    if back.device.type != "cpu" or back:
        keep_residual(residual, item.flat + residual.to(item.flat.dtype), back)
