"""``python -m edgc_ddp.report RUN_FOLDER`` and ``... compare RUN RUN ...``.

Exit status 0 with the page's path as the last line, or 2 with one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from edgc_ddp.report.compare import write_comparison
from edgc_ddp.report.load import Run, load_run
from edgc_ddp.report.page import write_report

_PROGRAM = "python -m edgc_ddp.report"


def _single(argv: Sequence[str]) -> tuple[list[Path], Path | None]:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Write RUN_FOLDER/report/index.html: what the run did, in pictures and tables.",
        epilog=f"Several runs side by side: {_PROGRAM} compare RUN RUN ... [--out FOLDER]",
    )
    parser.add_argument(
        "run", metavar="RUN_FOLDER", type=Path, help="folder with the metrics.jsonl of one run"
    )
    return [parser.parse_args(argv).run], None


def _several(argv: Sequence[str]) -> tuple[list[Path], Path | None]:
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} compare",
        description="Write one page that lays several runs over each other.",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="two or more folders with a metrics.jsonl"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("compare"),
        help="folder for the page (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        parser.error(f"one run given, two or more expected; for one: {_PROGRAM} RUN_FOLDER")
    return arguments.runs, arguments.out


def _refuse(message: object) -> int:
    print(f"{_PROGRAM}: {message}", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (``sys.argv`` when None) and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    comparing = argv[:1] == ["compare"]
    folders, out = _several(argv[1:]) if comparing else _single(argv)
    try:
        runs: list[Run] = [load_run(folder) for folder in folders]
    except (ValueError, OSError) as error:
        return _refuse(error)
    try:
        page = write_report(runs[0]) if out is None else write_comparison(runs, out)
    except OSError as error:
        return _refuse(f"the page cannot be written: {error}")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
