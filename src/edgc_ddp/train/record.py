"""What a run leaves behind: metrics.jsonl, config.yaml, environment.json, TensorBoard, a progress bar."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

_CHARTED = ("loss", "lr", "grad_norm", "mean_rank", "wire_bytes", "entropy", "residual", "val_loss")


def plain(value: Any) -> Any:
    """The value as JSON knows it: no NaN and no infinity, which JSON cannot write.

    >>> plain({"entropy": math.nan, "ranks": {"w": 4}, "loss": 1.5})
    {'entropy': None, 'ranks': {'w': 4}, 'loss': 1.5}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Recorder:
    """Writes one run's records. Rank 0 makes one; ``folder`` None (all other ranks) writes nothing."""

    def __init__(self, folder: Path | None, first_step: int, steps: int) -> None:
        self._rows = None if folder is None else _opened(folder / "metrics.jsonl")
        self._board = None if folder is None else _tensorboard(folder)
        self._bar: tqdm[Any] | None = None
        if folder is not None:
            # None: silent where standard error is no terminal; there `say` reports instead.
            self._bar = tqdm(total=steps, initial=first_step, unit="step", disable=None)

    def write(self, kind: str, **row: Any) -> None:
        """Append one row, and chart its numbers by ``step``."""
        if self._rows is None:
            return
        values = plain(row)
        self._rows.write(json.dumps({"kind": kind, **values}, allow_nan=False) + "\n")
        if self._board is not None and kind in ("step", "eval"):
            for name in _CHARTED:
                if isinstance(values.get(name), int | float):
                    self._board.add_scalar(f"{kind}/{name}", values[name], values["step"])

    def advance(self, row: Mapping[str, Any]) -> None:
        """Move the progress bar on by one step and show where training stands."""
        if self._bar is None:
            return
        self._bar.update()
        self._bar.set_postfix_str(headline(row), refresh=False)

    def say(self, text: str) -> None:
        """One line on standard error, clear of the progress bar."""
        if self._rows is not None:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Flush and close everything."""
        for part in (self._bar, self._board, self._rows):
            if part is not None:
                part.close()
        self._rows = self._board = self._bar = None


def headline(row: Mapping[str, Any]) -> str:
    """Loss, rank, bytes saved and entropy of a step's row. Of a pipeline all is of all its stages, but for
    the entropy, which is the first one's.

    >>> row = {"loss": 2.5, "mean_rank": 8, "wire_bytes": 5, "dense_bytes": 20, "entropy": -3.25}
    >>> headline(row)
    'loss 2.500 rank 8.0 saved 75% entropy -3.25'
    >>> headline({**row, "wire_bytes": 20.01, "stages": 2})
    'loss 2.500 rank 8.0 saved 0% (2 stages) entropy -3.25 (stage 0)'
    """
    saved = round(bytes_saved_ratio(row["wire_bytes"], row["dense_bytes"]), 2)
    # Zero is added since -0.0 would be shown with its sign.
    text = f"loss {row['loss']:.3f} rank {row['mean_rank']:.1f} saved {saved + 0.0:.0%}"
    stages = row.get("stages")
    text += f" ({stages} stages)" if stages else ""
    entropy = row["entropy"]
    if not math.isfinite(entropy):
        return text
    return f"{text} entropy {entropy:.2f}{' (stage 0)' if stages else ''}"


def bytes_saved_ratio(wire_bytes: float, dense_bytes: float) -> float:
    """Share of plain DDP's bytes that were not sent; 0 when there was nothing to send.

    >>> bytes_saved_ratio(25, 100), bytes_saved_ratio(0, 0)
    (0.75, 0.0)
    """
    return 1 - wire_bytes / dense_bytes if dense_bytes else 0.0


def _opened(path: Path) -> TextIO:
    """The file, to append lines to. Where a killed attempt left half of one, that ends here."""
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    rows = path.open("a", buffering=1)
    if torn:
        rows.write("\n")
    return rows


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def environment() -> dict[str, Any]:
    """What a reader needs to judge a run's numbers, as far as this process knows it."""
    return {
        "git": _git_revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def _git_revision() -> str | None:
    """Commit of the checkout this file belongs to, with "-dirty" after changes; None outside one."""

    def git(*arguments: str) -> str:
        here = Path(__file__)
        command = ["git", "-C", str(here.parent), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
        return done.stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def joint_digest(stages: list[dict[str, Any]]) -> str:
    """Sixteen hex digits that differ when any stage's plan does; "" without plans.

    >>> joint_digest([{"plan_digest": ""}, {"plan_digest": ""}])
    ''
    """
    digests = "".join(stage["plan_digest"] for stage in stages)
    return hashlib.sha256(digests.encode()).hexdigest()[:16] if digests else ""
