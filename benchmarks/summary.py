"""From raw blocks to the rows of a table. Pure: numbers in, numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.links import HEADER_BYTES, Link


@dataclass(frozen=True)
class Row:
    """One contestant on one link. Times are milliseconds, bytes are per host and step."""

    name: str
    steps: int
    median_ms: float
    low_ms: float
    """Lower quartile; ``high_ms`` is the upper one."""
    high_ms: float
    per_ddp: float
    """Median / plain DDP's median: below 1 is faster than not compressing."""
    per_powersgd: float | None
    """Median / median of torch's PowerSGD at the same rank."""
    overhead_ms: float
    """Median less the median without communication."""
    interface_bytes: float
    data_bytes: float | None
    """The same without headers and acknowledgements; None where packets were not counted."""
    claimed_bytes: float | None
    floor_ms: float
    """What cannot be beaten with these bytes: max(no communication, bytes / link speed)."""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile, interpolated between the values given.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    >>> quartiles([7.0])
    (7.0, 7.0, 7.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def step_times(blocks: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of every step but each block's settling one: a step lasts until its slowest rank is done.

    >>> step_times([{"seconds": [[9.0, 1.0, 2.0], [9.0, 3.0, 1.0]]}])
    [3.0, 2.0]
    """
    return [
        max(ranks) for block in blocks for ranks in list(zip(*block["seconds"], strict=True))[1:]
    ]


def sent_per_host(
    blocks: Sequence[Mapping[str, Any]], shared: bool, what: str = "interface_bytes"
) -> float:
    """Mean bytes, or packets, per step that a host's interface sent.

    A ``shared`` interface was read by every rank and counted everyone's.

    >>> sent_per_host([{"interface_bytes": [10.0, 14.0]}], shared=False)
    12.0
    >>> sent_per_host([{"interface_bytes": [24.0, 24.0]}], shared=True)
    12.0
    """
    per_block = [statistics.fmean(block[what]) for block in blocks]
    hosts = len(blocks[0][what])
    return statistics.fmean(per_block) / (hosts if shared else 1)


def data_per_host(blocks: Sequence[Mapping[str, Any]], shared: bool) -> float | None:
    """Mean bytes per step inside the packets; None where these were not counted.

    >>> data_per_host([{"interface_bytes": [1100.0], "interface_packets": [10.0]}], shared=False)
    440.0
    """
    if any("interface_packets" not in block for block in blocks):
        return None
    packets = sent_per_host(blocks, shared, "interface_packets")
    return sent_per_host(blocks, shared) - HEADER_BYTES * packets


def claim_per_host(blocks: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean bytes per step that the contestant says a host sent; None when it does not say.

    >>> claim_per_host([{"claimed_bytes": [4.0, 6.0]}]), claim_per_host([{"claimed_bytes": [None]}])
    (5.0, None)
    """
    claims = [claim for block in blocks for claim in block["claimed_bytes"]]
    return None if None in claims else statistics.fmean(claims)


def summarise(blocks: Sequence[Mapping[str, Any]], link: Link, shared: bool) -> list[Row]:
    """One row per contestant, in the order of the first round.

    Raises:
        ValueError: ``none`` or ``ddp`` was not measured, which the rest is compared with.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for block in blocks:
        by_name.setdefault(block["contestant"], []).append(block)
    for name in ("none", "ddp"):
        if name not in by_name:
            raise ValueError(
                f"no blocks of {name!r}: measure it too, the others are compared with it"
            )
    quarters = {
        name: quartiles([1e3 * seconds for seconds in step_times(own)])
        for name, own in by_name.items()
    }
    medians = {name: middle for name, (_, middle, _) in quarters.items()}
    rows = []
    for name, own in by_name.items():
        rank = Contestant.parse(name).rank
        rival = medians.get(f"powersgd-r{rank}") if rank else None
        sent = sent_per_host(own, shared)
        carried = sent * len(own[0]["interface_bytes"]) if shared else sent
        low, middle, high = quarters[name]
        rows.append(
            Row(
                name=name,
                steps=len(step_times(own)),
                median_ms=middle,
                low_ms=low,
                high_ms=high,
                per_ddp=middle / medians["ddp"],
                per_powersgd=None if rival is None else middle / rival,
                overhead_ms=middle - medians["none"],
                interface_bytes=sent,
                data_bytes=data_per_host(own, shared),
                claimed_bytes=claim_per_host(own),
                floor_ms=max(medians["none"], 1e3 * link.seconds(carried)),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = (
        "contestant",
        "median ms",
        "quartiles ms",
        "/ plain DDP",
        "/ PowerSGD",
        "overhead ms",
        "MB sent",
        "MB of data",
        "MB claimed",
        "floor ms",
    )
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in rows:
        cells = (
            row.name,
            f"{row.median_ms:.1f}",
            f"{row.low_ms:.1f}-{row.high_ms:.1f}",
            f"{row.per_ddp:.3f}",
            "" if row.per_powersgd is None else f"{row.per_powersgd:.3f}",
            f"{row.overhead_ms:.1f}",
            f"{row.interface_bytes / 1e6:.3f}",
            _megabytes(row.data_bytes),
            _megabytes(row.claimed_bytes),
            f"{row.floor_ms:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _megabytes(count: float | None) -> str:
    return "?" if count is None else f"{count / 1e6:.3f}"
