"""The keyword arguments of ``EDGCState``, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

RESIDUAL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DTYPES = {**RESIDUAL_DTYPES, "int8": torch.int8}
"""The types of the wire."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may set; see :class:`edgc_ddp.EDGCState` for the meaning of each.

    >>> Options(wire_dtype="fp8")
    Traceback (most recent call last):
        ...
    ValueError: wire_dtype='fp8': expected one of 'fp32', 'bf16', 'int8'
    """

    start_iter: int = 2
    wire_dtype: str = "fp32"
    dense_dtype: str = "fp32"
    residual_dtype: str = "fp32"
    error_feedback: bool = True
    min_compression_rate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_int(self.start_iter) or self.start_iter < 2:
            raise ValueError(
                f"start_iter={self.start_iter!r}: expected an integer >= 2, since DDP rebuilds its "
                "buckets after the first iteration"
            )
        for name, types in (
            ("wire_dtype", DTYPES),
            ("dense_dtype", DTYPES),
            ("residual_dtype", RESIDUAL_DTYPES),
        ):
            given = getattr(self, name)
            if not isinstance(given, str) or given not in types:
                known = ", ".join(map(repr, types))
                raise ValueError(f"{name}={given!r}: expected one of {known}")
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"error_feedback={self.error_feedback!r}: expected True or False")
        if self.dense_dtype != "fp32" and not self.error_feedback:
            raise ValueError(
                f"dense_dtype={self.dense_dtype!r} with error_feedback=False: rounded gradients need "
                "what rounding took to be sent later; set error_feedback=True or dense_dtype='fp32'"
            )
        rate = self.min_compression_rate
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not 0 <= rate < math.inf:
            raise ValueError(
                f"min_compression_rate={rate!r}: expected a number >= 0 (1 = compress whatever gets "
                "smaller, 0 = compress always)"
            )
        if not _is_int(self.seed) or self.seed < 0:
            raise ValueError(f"seed={self.seed!r}: expected an integer >= 0")

    def torch_dtype(self, name: str) -> torch.dtype:
        """The torch type that the option ``name`` stands for."""
        return DTYPES[getattr(self, name)]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
