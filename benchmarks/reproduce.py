"""Make a figure or table of the paper again: ``python -m benchmarks.reproduce NAME``.

Writes a dated folder under benchmarks/results with the numbers (CSV), the figure (PNG) and record.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import (
    correlations,
    distribution,
    entropy_series,
    error_rank,
    figure6,
    losses,
    phases,
    sampling_cost,
    stage_ranks,
    window_size,
)
from benchmarks.figures.gradients import Run, series
from benchmarks.record import RESULTS, commit, folder_for, machine


@dataclass(frozen=True)
class Piece:
    """One figure or table: its title, what the paper says, and what makes it."""

    title: str
    paper: str
    make: Callable[[Path], list[str]]
    reads_gradients: bool = True


_CAPTION = 'Only the caption of the paper\'s figure was at hand, "{}": no numbers to compare with.'

PIECES = {
    "figure1": Piece(
        "Figure 1: entropy over iterations",
        _CAPTION.format("Entropy changes during iteration"),
        entropy_series.over_iterations,
    ),
    "figure2": Piece(
        distribution.TITLE,
        _CAPTION.format(distribution.CAPTION) + distribution.ASSUMED,
        distribution.make,
    ),
    "figure3": Piece(
        correlations.TITLE,
        _CAPTION.format(correlations.CAPTION) + correlations.CHOSEN,
        correlations.make,
    ),
    "figure5": Piece(phases.TITLE, _CAPTION.format(phases.CAPTION) + phases.RULES, phases.make),
    "figure6": Piece(figure6.TITLE, figure6.PAPER, figure6.make, reads_gradients=False),
    "figure7": Piece(error_rank.TITLE, error_rank.PAPER, error_rank.make),
    "figure8": Piece(*losses.FIGURE_8, losses.figure8, reads_gradients=False),
    "figure9": Piece(
        "Figure 9: entropy under beta",
        _CAPTION.format("Gradient entropy under different gradient sampling rates")
        + " The paper takes beta = .25.",
        entropy_series.under_beta,
    ),
    "figure10": Piece(
        "Figure 10: relative change under alpha",
        _CAPTION.format("Relative change rate of entropy under different iteration sampling rates")
        + " The paper takes alpha = .1.",
        entropy_series.under_alpha,
    ),
    "figure11": Piece(*losses.FIGURE_11, losses.figure11, reads_gradients=False),
    "figure12": Piece(
        "Figure 12: stages with common, aligned and selective ranks",
        stage_ranks.PAPER,
        stage_ranks.make,
        reads_gradients=False,
    ),
    "table1": Piece(*losses.TABLE, losses.table1, reads_gradients=False),
    "table4": Piece(
        sampling_cost.TITLE, sampling_cost.PAPER, sampling_cost.make, reads_gradients=False
    ),
    "table6": Piece(window_size.TITLE, window_size.PAPER, window_size.make),
    "equal-bytes": Piece(*losses.EQUAL_BYTES, losses.equal_bytes, reads_gradients=False),
}


def reproduce(name: str, parent: Path) -> Path:
    """Make one piece in a new folder of ``parent``; returns the folder."""
    piece = PIECES[name]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    where = Path(__file__).parent.parent
    about = {"command": f"python -m benchmarks.reproduce {name}", "machine": machine()}
    about["commit"] = commit(where)
    if piece.reads_gradients:
        about |= {"run": asdict(Run()), "text": series(Run())["source"]}
    folder = folder_for(parent, name, today)
    folder.mkdir(parents=True)
    try:
        found = piece.make(folder)
    except ValueError:
        # What came to nothing is no record, and must not stand in the next one's way.
        shutil.rmtree(folder)
        raise
    (folder / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    images = [f"![{piece.title}]({path.name})" for path in sorted(folder.glob("*.png"))]
    ground = []
    if piece.reads_gradients:
        run = Run()
        ground = [
            f"Gradients of a byte-level GPT ({run.layers} layers, {run.width} wide, context "
            f"{run.context}) on {about['text']}, {run.steps} iterations of AdamW at {run.lr:g}, batch "
            f"{run.batch}, one process. The paper's models have 2.5 and 12.1 thousand million parameters "
            "and run 230 000 iterations.",
            "",
        ]
    text = [
        f"# {piece.title}", "", f"    {about['command']}", "", f"Paper: {piece.paper}", "", *ground,
        *found, "", *images,
    ]  # fmt: skip
    (folder / "record.md").write_text("\n".join(text) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*PIECES, "all"], help="all = those without a clock")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of records")
    given = parser.parse_args()
    untimed = [name for name, piece in PIECES.items() if piece.reads_gradients]
    for name in untimed if given.name == "all" else [given.name]:
        try:
            folder = reproduce(name, given.out)
        except ValueError as error:
            raise SystemExit(f"benchmarks.reproduce: {error}") from None
        print(f"{folder}\n{(folder / 'record.md').read_text()}")


if __name__ == "__main__":
    main()
