"""Who is measured, written ``KIND[-rRANK][-WIRE][~RESIDUAL][@BUCKET_MB]``, and what each claims to send."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgc_ddp.options import DTYPES

DENSE = ("none", "ddp", "fp16", "bf16")
CONTROLLED = ("auto",)
LOW_RANK = ("powersgd", "epfml", "edgc")
MEANING = {
    "none": "no communication: a hook that returns the bucket at once (headroom, not a method)",
    "ddp": "DistributedDataParallel without a hook",
    "fp16": "torch's fp16_compress_hook",
    "bf16": "the lines of torch's bf16_compress_hook, which DDP refuses on CPU by its name",
    "powersgd": "torch's powerSGD_hook, one bucket (it aborts with more on Gloo), "
    "start_powerSGD_iter=2, warm start, error feedback",
    "epfml": "epfml/powersgd after backward, from the checkout that --epfml names, "
    "num_iters_per_step=2 as in its README (its default, 1, sends one factor per step)",
    "edgc": "edgc_hook with FixedRank, start_iter=2, error feedback",
    "auto": "edgc_hook as it is by default, bounds measured, but with windows and a warm-up of 10 steps; "
    "measured from its first decision after calibration on",
}
_ELEMENT_BYTES = {"none": 0, "ddp": 4, "fp16": 2, "bf16": 2}
_NAME = re.compile(
    r"([a-z]+\d*)(?:-r(\d+))?(?:-([a-z]+\d*))?(?:~([a-z]+\d*))?(?:@(\d+(?:\.\d+)?))?"
)


@dataclass(frozen=True)
class Contestant:
    """One thing to measure. ``cap_mb`` None is DDP's default: 25 MiB, the first bucket 1 MiB."""

    kind: str
    rank: int = 0
    wire: str = ""
    cap_mb: float | None = None
    residual: str = "fp32"

    @property
    def name(self) -> str:
        """What :meth:`parse` reads back.

        >>> Contestant("edgc", 16, "bf16", 4).name
        'edgc-r16-bf16@4'
        >>> Contestant("edgc", 16, "bf16", residual="bf16").name
        'edgc-r16-bf16~bf16'
        """
        rank = f"-r{self.rank}" if self.rank else ""
        wire = f"-{self.wire}" if self.wire else ""
        cap = f"@{self.cap_mb:g}" if self.cap_mb is not None else ""
        residual = f"~{self.residual}" if self.residual != "fp32" else ""
        return f"{self.kind}{rank}{wire}{residual}{cap}"

    @classmethod
    def parse(cls, text: str) -> Contestant:
        """A contestant from its name.

        Raises:
            ValueError: no such contestant; names the value and what is allowed.

        >>> Contestant.parse("powersgd-r4")
        Contestant(kind='powersgd', rank=4, wire='', cap_mb=None, residual='fp32')
        """
        match = _NAME.fullmatch(text)
        kind, rank, wire, residual, cap = match.groups() if match else ("", None, None, None, None)
        low_rank = kind in LOW_RANK
        # torch's hook has one bucket here and epfml's none, so a cap would be ignored in silence.
        if (
            kind not in (*DENSE, *CONTROLLED, *LOW_RANK)
            or low_rank != bool(int(rank or 0))
            or (kind == "edgc") != (wire in DTYPES)
            or (wire is not None and kind != "edgc")
            or (residual is not None and (kind != "edgc" or residual != "bf16"))
            or (cap is not None and (kind in ("powersgd", "epfml") or not float(cap)))
        ):
            raise ValueError(
                f"contestant={text!r}: expected one of {', '.join((*DENSE, *CONTROLLED))}, "
                f"powersgd-r16, epfml-r16, or edgc-r16-WIRE with WIRE one of {', '.join(DTYPES)}, and "
                "~bf16 behind it for residuals in bf16; @4 after any but powersgd and epfml sets "
                "bucket_cap_mb"
            )
        cap_mb = float(cap) if cap else None
        return cls(kind, int(rank or 0), wire or "", cap_mb, residual or "fp32")


def line_up(
    ranks: Sequence[int], wires: Sequence[str], caps: Sequence[float | None], epfml: bool
) -> list[Contestant]:
    """Everyone that a comparison at these ranks needs.

    >>> [c.name for c in line_up([4], ["bf16"], [None, 4], epfml=False)]
    ['none', 'ddp', 'fp16', 'bf16', 'auto', 'powersgd-r4', 'edgc-r4-bf16', 'edgc-r4-bf16@4']
    """
    everyone = [Contestant(kind) for kind in (*DENSE, *CONTROLLED)]
    for rank in ranks:
        everyone.append(Contestant("powersgd", rank))
        if epfml:
            everyone.append(Contestant("epfml", rank))
        everyone += [Contestant("edgc", rank, wire, cap) for wire in wires for cap in caps]
    return everyone


def select(everyone: Iterable[Contestant], patterns: Sequence[str]) -> list[Contestant]:
    """Those whose name matches a pattern, and any pattern that is itself a contestant's name.

    ``none`` and ``ddp`` are always in: overhead and ratios are taken against them.

    >>> [c.name for c in select(line_up([4], ["fp32"], [None], False), ["power*", "ddp@4"])]
    ['none', 'ddp', 'powersgd-r4', 'ddp@4']
    """
    chosen = {c.name: c for c in (Contestant("none"), Contestant("ddp"))}
    everyone = list(everyone)
    for pattern in patterns:
        found = [c for c in everyone if fnmatch.fnmatchcase(c.name, pattern)]
        for contestant in found or [Contestant.parse(pattern)]:
            chosen[contestant.name] = contestant
    return list(chosen.values())


def ring_bytes(payload_bytes: float, hosts: int) -> float:
    """Bytes one of ``hosts`` sends to all-reduce a payload: 2 (W-1)/W of it, as a ring does.

    >>> ring_bytes(1000, 2), ring_bytes(1000, 4)
    (1000.0, 1500.0)
    """
    return payload_bytes * 2 * (hosts - 1) / hosts


def dense_claim(kind: str, numel: int, hosts: int) -> float:
    """Bytes per step and host that a dense contestant's own arithmetic says it sends.

    >>> dense_claim("fp16", 1000, 2)
    2000.0
    """
    return ring_bytes(numel * _ELEMENT_BYTES[kind], hosts)
