"""``metrics.jsonl`` as rows: what can be read, and of a resumed run what still stands."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

STEP_LIMIT = 2**53
"""Steps and ranks are below: beyond, floats skip whole numbers and axes cannot be labelled."""
STAGE_LIMIT = 1024


def whole(value: object, below: int) -> int | None:
    """A JSON value as a count from 0 to ``below``; None for whatever no run may have counted.

    >>> whole(3, below=8), whole(8, below=8), whole(3.0, below=8), whole(True, below=8)
    (3, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < below else None


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file in its order, and one sentence for each kind of line that was left out."""
    text = path.read_text("utf-8", errors="replace")
    lines = [line for line in text.split("\n") if line.strip()]
    rows: list[Row] = []
    bad: list[int] = []
    for place, line in enumerate(lines):
        try:
            row = json.loads(line)
            # Half a character can be neither shown nor written.
            json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad.append(place)
    notes = []
    if bad and bad[-1] == len(lines) - 1:
        bad.pop()
        notes.append(f"The last line of {path.name} is incomplete and was left out.")
    if bad:
        notes.append(f"{len(bad)} unreadable lines of {path.name} were left out.")
    return rows, notes


def standing(rows: Sequence[Row]) -> list[Row]:
    """The rows that no later attempt took back, in order; of a summary, only one that nothing follows.

    Every attempt of a run appends to the same file. It writes a step's row first, and only then what was
    decided and evaluated in that step, of later stages even some steps later: so an attempt's first row
    is that of the step it goes on with, and takes back all rows before it of that step and later ones.

    >>> dead = [{"kind": "step", "step": 3}, {"kind": "decision", "step": 3}, {"kind": "step", "step": 4}]
    >>> standing([*dead, {"kind": "step", "step": 4, "loss": 2.5}])[1:]
    [{'kind': 'decision', 'step': 3}, {'kind': 'step', 'step': 4, 'loss': 2.5}]
    """
    begins = _begins(rows)
    least: float = math.inf
    ended = True
    kept: list[Row] = []
    for place in reversed(range(len(rows))):
        row = rows[place]
        step = whole(row.get("step"), STEP_LIMIT)
        if row.get("kind") == "summary":
            if ended:
                kept.append(row)
        elif step is not None:
            if step < least:
                kept.append(row)
            ended = ended and row.get("kind") != "step"
        least = min(least, begins.get(place, math.inf))
    return kept[::-1]


def _begins(rows: Sequence[Row]) -> dict[int, int]:
    """Step from which on the rows before a place no longer stand, where there is such a place."""
    begins: dict[int, int] = {}
    last = -1
    for place, row in enumerate(rows):
        if row.get("kind") == "step" and (step := whole(row.get("step"), STEP_LIMIT)) is not None:
            if step <= last:
                begins[place] = step
            last = step
        # An attempt that went on from a run's last step has nothing but its summary to tell so.
        elif row.get("kind") == "summary" and (end := whole(row.get("steps"), STEP_LIMIT)):
            begins[place] = end
    return begins
