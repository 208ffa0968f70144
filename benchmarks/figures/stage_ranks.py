"""Figure 12: what aligned ranks leave unsent, and when every stage has averaged."""

from __future__ import annotations

from pathlib import Path

from benchmarks.stage_alignment import compare, table

PAPER = (
    "Only the rule was at hand, no numbers: a later stage ends its backward one micro-batch earlier per "
    "stage, so a rank that makes its averaging that much longer costs no time and leaves less error."
)


def make(folder: Path) -> list[str]:
    """Train under every way in turn on an emulated network, which takes root."""
    return table(compare(folder)).splitlines()
