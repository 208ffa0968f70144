"""``python -m edgc_ddp.doctor``, alone or under torchrun.

Exit status 0 with advice, 1 when a rank failed or the advice could not be written, 2 with one line that
says what is wrong with the options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from edgc_ddp.doctor import experiment
from edgc_ddp.doctor.facts import DEFAULT_CAP_MB
from edgc_ddp.doctor.measure import Job, told, work
from edgc_ddp.doctor.subject import find, known
from edgc_ddp.doctor.words import describe
from edgc_ddp.options import DTYPES
from edgc_ddp.train.launch import launch

_PROGRAM = "python -m edgc_ddp.doctor"
Number = TypeVar("Number", int, float)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Measure headroom, link and compressor, and say whether compression pays here.",
        epilog="Under torchrun its ranks are used and --nproc plays no part.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = ", ".join(known())
    p.add_argument("--model", default="small", help=f"{names}, or MODULE:FUNCTION of your own")
    p.add_argument("--nproc", type=int, default=2, help="ranks to start on this machine")
    p.add_argument("--batch", type=int, default=8, help="texts per rank and step")
    p.add_argument("--ranks", default="4,16,64", help="ranks at which real steps are taken")
    p.add_argument("--wire", choices=tuple(DTYPES), default="fp32", help="wire type of those")
    caps = f"{DEFAULT_CAP_MB:g},4"
    p.add_argument("--caps", default=caps, help="bucket_cap_mb to choose from")
    p.add_argument("--steps", type=int, default=30, help="measured steps of each")
    p.add_argument("--block", type=int, default=5, help="steps in a row before another's turn")
    p.add_argument("--out", type=Path, default=Path("doctor"), help="folder for the experiment")
    p.add_argument("--json", type=Path, default=None, metavar="FILE", help="keep all measurements")
    return p


def job(arguments: argparse.Namespace) -> Job:
    """What the options ask for. Raises ValueError naming the option that cannot be."""
    for name in ("batch", "steps", "block"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}={getattr(arguments, name)}: expected at least 1")
    if arguments.nproc < 2:
        raise ValueError(f"--nproc={arguments.nproc}: a single process has nothing to average")
    find(arguments.model)
    return Job(
        model=arguments.model,
        batch=arguments.batch,
        ranks=_numbers("ranks", arguments.ranks, int),
        wire=arguments.wire,
        caps_mb=_numbers("caps", arguments.caps, float),
        steps=arguments.steps,
        block=arguments.block,
    )


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise ValueError(f"--{option}={text}: expected numbers above 0 with commas between them")
    return numbers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (``sys.argv`` when None) and return its exit status."""
    arguments = parser().parse_args(argv)
    try:
        asked = job(arguments)
    except ValueError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    is_rank = "RANK" in os.environ
    answer = work(asked) if is_rank else launch(work, asked, arguments.nproc, "edgc_ddp.doctor")
    if answer is not None:
        facts, advice = told(answer)
        # First: what was measured for minutes is not lost to a folder that cannot be written to.
        print(describe(facts, advice), flush=True)
        try:
            if arguments.json is not None:
                facts.save(arguments.json)
            path = experiment.write(arguments.out, facts, advice)
        except OSError as error:
            print(f"{_PROGRAM}: --out or --json: {error}; give another place", file=sys.stderr)
            return 1
        then = experiment.next_step(arguments.out, facts, advice, under_torchrun=is_rank)
        print(f"\nwritten to {path}; {then}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
