"""A run's numbers in a reader's words: text for the page, plain and unescaped."""

from __future__ import annotations

import math
from typing import Any

from edgc_ddp.report.drawing import byte_unit
from edgc_ddp.report.load import Run, compressed_ranks, mean_rank, number
from edgc_ddp.report.records import Row

UNKNOWN = "–"


def in_bytes(count: float) -> str:
    """Bytes with a decimal unit.

    >>> in_bytes(812.4e6), in_bytes(2.7e10), in_bytes(math.nan)
    ('812 MB', '27.0 GB', '–')
    """
    if not math.isfinite(count):
        return UNKNOWN
    unit, name = byte_unit(count)
    return f"{digits(count / unit)} {name}"


def digits(value: float) -> str:
    """Three significant digits, never an exponent for everyday sizes.

    >>> digits(3.14159), digits(27.0), digits(812.4), digits(12345.6), digits(0.0001234)
    ('3.14', '27.0', '812', '12,346', '0.000123')
    """
    if not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:.3g}"


def loss_words(value: float) -> str:
    """Losses are compared in their fourth digit, so that one is shown.

    >>> loss_words(1.53219)
    '1.5322'
    """
    return f"{value:.4f}" if math.isfinite(value) else UNKNOWN


def duration(seconds: float) -> str:
    """Wall time in the two largest units.

    >>> duration(7.25), duration(252), duration(8040), duration(math.nan)
    ('7.2 s', '4 min 12 s', '2 h 14 min', '–')
    """
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def rank_words(row: Row) -> str:
    """Ranks of one decision.

    >>> rank_words({"ranks": {"a": 8, "b": 8}}), rank_words({"ranks": {"a": 0}})
    ('8', 'dense')
    >>> rank_words({"ranks": {"a": 8, "b": 4, "c": 0}})
    '4 to 8, mean 6 (2 of 3 matrices)'
    """
    ranks = compressed_ranks(row)
    if not ranks:
        return "dense"
    text = f"{ranks[0]}"
    if min(ranks) < max(ranks):
        text = f"{min(ranks)} to {max(ranks)}, mean {_short(mean_rank(row))}"
    of = len(row["ranks"])
    return text if len(ranks) == of else f"{text} ({len(ranks)} of {of} matrices)"


def path_words(run: Run) -> str:
    """The turning points of the mean rank, trials left out, and whether it ended dense.

    >>> from pathlib import Path
    >>> rows = tuple({"step": r, "phase": "compress", "ranks": {"a": r}} for r in (32, 8))
    >>> path_words(Run(Path("r"), decisions=rows))
    '32 → 8'
    >>> path_words(Run(Path("r"), decisions=(*rows, {"step": 40, "phase": "dense", "ranks": {"a": 0}})))
    '32 → 8 → dense'
    """
    path = [_short(rank) for rank in run.rank_path]
    if path and run.decisions and not compressed_ranks(run.decisions[-1]):
        path.append("dense")
    return " → ".join(path) or UNKNOWN


def _paths(run: Run) -> str:
    """:func:`path_words`, of a pipeline for each stage."""
    if run.stages == 1:
        return path_words(run)
    stages = range(run.stages)
    return "; ".join(f"stage {stage}: {path_words(run.of_stage(stage))}" for stage in stages)


def _short(rank: float) -> str:
    return f"{round(rank, 1):g}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def sentence(run: Run) -> str:
    """The whole run in one sentence."""
    planned = number(run.setting("train.steps"))
    took = _took(run)
    if run.summary is not None:
        text = f"The run finished {_count(run.steps_done, 'step')}{took}"
    else:
        made = _count(run.steps_done, "step")
        of = f" of {int(planned):,}" if math.isfinite(planned) else ""
        text = f"The run has not finished: it made {made}{of}{took}"
    if math.isfinite(run.val_loss):
        end = "a validation loss" if run.summary is not None else "a validation loss so far"
        text += f", with {end} of {loss_words(run.val_loss)}"
    elif run.evals or "val_loss" in (run.summary or {}):
        text += ", and its validation loss is not a finite number"
    else:
        text += ", without a validation loss"
    return f"{text}; {_traffic(run)}; {_ranks(run)}."


def _took(run: Run) -> str:
    if time_words(run) == UNKNOWN:
        return ""
    timed = run.steps_timed
    which = f", the last {timed:,} of them" if timed < run.steps_done else ""
    return f"{which} in {duration(run.seconds)}"


def time_words(run: Run) -> str:
    """Wall time, and which steps it is of when a resumed run knows no other.

    >>> from pathlib import Path
    >>> summary = {"steps": 9000, "seconds": 252, "first_step": 6000}
    >>> time_words(Run(Path("r"), summary=summary))
    '4 min 12 s (last 3,000 steps)'
    >>> time_words(Run(Path("r"), summary={**summary, "first_step": 9000}))
    '–'
    """
    timed = run.steps_timed
    # An attempt that went on from the last step has trained nothing.
    if not (timed and math.isfinite(run.seconds)):
        return UNKNOWN
    which = f" (last {_count(timed, 'step')})" if timed < run.steps_done else ""
    return f"{duration(run.seconds)}{which}"


def sender(run: Run) -> str:
    """Whose bytes are counted.

    >>> from pathlib import Path
    >>> sender(Run(Path("r"))), sender(Run(Path("r"), steps=({"step": 1, "stages": 2},)))
    ('each rank', 'one replica (2 stages)')
    """
    return "each rank" if run.stages == 1 else f"one replica ({run.stages} stages)"


def _traffic(run: Run) -> str:
    sent, dense, who = run.total("wire_bytes"), run.total("dense_bytes"), sender(run)
    if not math.isfinite(run.saving):
        return "the bytes it sent were not recorded"
    if abs(run.saving - 1) < 0.005:
        text = f"{who} sent {in_bytes(sent)}, as much as plain DDP"
    elif run.saving < 1:
        text = (
            f"{who} sent {in_bytes(sent)}, {digits(1 / run.saving)} times as many bytes as "
            f"plain DDP ({in_bytes(dense)})"
        )
    else:
        text = (
            f"{who} sent {in_bytes(sent)} instead of {in_bytes(dense)}, {digits(run.saving)} times "
            "fewer bytes than plain DDP"
        )
    parts = [in_bytes(number(stage.get("wire_bytes"))) for stage in run.stage_summaries]
    shares = [f"{'a rank ' if not k else ''}of stage {k} {part}" for k, part in enumerate(parts)]
    return f"{text} ({', '.join(shares)})" if shares else text


def _ranks(run: Run) -> str:
    if run.stages == 1:
        return _path_sentence(run) or "nothing was compressed"
    paths = [_path_sentence(run.of_stage(stage)) for stage in range(run.stages)]
    if not any(paths):
        return "no stage compressed anything"
    if len(set(paths)) == 1:
        return f"on all stages {paths[0]}"
    return "; ".join(
        f"on stage {stage} {path or 'nothing was compressed'}" for stage, path in enumerate(paths)
    )


def _path_sentence(run: Run) -> str:
    """ "" where nothing was compressed but in trials."""
    if not run.rank_path:
        return ""
    path = path_words(run)
    tried = any(row.get("phase") == "calibration" for row in run.decisions)
    rest = ", trials left out" if tried else ""
    if "→" in path:
        return f"the mean rank went {path}{rest}"
    return f"the mean rank stayed at {path} while compressing{rest}"


def key_figures(run: Run) -> dict[str, str]:
    """What one run is compared by, in order."""
    planned = number(run.setting("train.steps"))
    of = f" of {int(planned):,}" if math.isfinite(planned) and run.summary is None else ""
    losses = run.series("loss")[1]
    last = float(losses[-1]) if losses.size else math.nan
    per = "rank" if run.stages == 1 else "replica (all its stages)"
    return {
        "controller": run.controller or UNKNOWN,
        "finished": "yes" if run.summary is not None else "no",
        "steps": f"{run.steps_done:,}{of}",
        "validation loss (nats per byte)": loss_words(run.val_loss),
        "last training loss (nats per byte)": loss_words(last),
        "time": time_words(run),
        f"bytes sent per {per}": in_bytes(run.total("wire_bytes")),
        "bytes of plain DDP": in_bytes(run.total("dense_bytes")),
        "times fewer bytes": digits(run.saving),
        "mean rank while compressing, trials included": digits(run.mean_rank)
        if run.mean_rank
        else "dense",
        "rank path": _paths(run),
        "decisions": f"{sum(map(len, (run.decisions, *run.later_stages))):,}",
        "final plan": str((run.summary or {}).get("final_plan_digest") or UNKNOWN),
    }


def flat(mapping: Any, prefix: str = "") -> dict[str, str]:
    """Settings by dotted name.

    >>> flat({"train": {"steps": 10}, "seed": 0})
    {'train.steps': '10', 'seed': '0'}
    """
    if isinstance(mapping, dict) and mapping:
        return {
            name: text
            for key, value in mapping.items()
            for name, text in flat(value, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: UNKNOWN if mapping is None else str(mapping)}
