"""A run folder as plain numbers. Whatever a killed or still going run has left out is tolerated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray
from omegaconf import OmegaConf

from edgc_ddp.report.records import STAGE_LIMIT, STEP_LIMIT, Row, read_rows, standing, whole

METRICS, CONFIG, ENVIRONMENT = "metrics.jsonl", "config.yaml", "environment.json"

Series = NDArray[np.float64]


_LARGEST = 1e60
"""Of what a run may have counted or measured; larger numbers cannot be drawn."""


def number(value: object) -> float:
    """A JSON value as a float; nan for whatever is no number that a run may have written.

    >>> number(3), number(None), number("x"), number(True), number(10**400)
    (3.0, nan, nan, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if abs(value) <= _LARGEST else math.nan


def first_finite(values: Iterable[float]) -> float:
    """The first finite one, nan without any.

    >>> first_finite([math.nan, 2.0, 3.0])
    2.0
    """
    return next((value for value in values if math.isfinite(value)), math.nan)


@dataclass(frozen=True)
class Span:
    """Iterations ``first`` to ``last``, both in run steps, spent in one phase."""

    phase: str
    first: float
    last: float


@dataclass(frozen=True)
class Run:
    """One run. Rows are in order of their step, one per step, stage and kind, those of the attempt that
    made the step last.

    Of a pipeline, a step's bytes are those of one replica, the sum over its stages, and its mean rank is
    over what any stage compresses; its phase, entropy, residual and time of an average are stage 0's.
    """

    folder: Path
    steps: tuple[Row, ...] = ()
    decisions: tuple[Row, ...] = ()
    evals: tuple[Row, ...] = ()
    summary: Row | None = None
    """None while the run is still going, or when it was killed."""
    config: Row | None = None
    environment: Row | None = None
    notes: tuple[str, ...] = ()
    """What was missing or unreadable, one sentence each."""
    later_stages: tuple[tuple[Row, ...], ...] = ()
    """Decisions of stages 1, 2, ... of a pipeline; ``decisions`` are those of stage 0."""

    @cached_property
    def stage_summaries(self) -> tuple[Row, ...]:
        """What the summary tells of each stage of a pipeline; empty without one."""
        told = (self.summary or {}).get("stages")
        if not isinstance(told, list) or len(told) >= STAGE_LIMIT:
            return ()
        return tuple(row for row in told if isinstance(row, dict))

    @cached_property
    def stages(self) -> int:
        """Into how many stages the model was cut; 1 without a pipeline.

        >>> Run(Path("r"), steps=({"step": 1, "stages": 2},)).stages, Run(Path("r")).stages
        (2, 1)
        """
        told = whole(self.steps[-1].get("stages"), STAGE_LIMIT) if self.steps else None
        return max(told or 1, len(self.stage_summaries), 1 + len(self.later_stages))

    def of_stage(self, stage: int) -> Run:
        """The run as one stage of its pipeline decided it, without the steps, which are of all stages."""
        everyone = (self.decisions, *self.later_stages)
        own = everyone[stage] if stage < len(everyone) else ()
        return replace(self, steps=(), decisions=own, later_stages=())

    def series(self, key: str) -> tuple[Series, Series]:
        """Steps and values of one key of the step rows, nan where it was not measured.

        >>> run = Run(Path("r"), steps=({"step": 1, "loss": 2.5}, {"step": 2, "loss": None}))
        >>> run.series("loss")
        (array([1., 2.]), array([2.5, nan]))
        """
        return column(self.steps, "step"), column(self.steps, key)

    def setting(self, dotted: str) -> Any:
        """One value of the configuration by its dotted name, None when it has none.

        >>> Run(Path("r"), config={"controller": {"r_max": 32}}).setting("controller.r_max")
        32
        """
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @cached_property
    def first_step(self) -> int:
        return min((int(row["step"]) for row in self._timed), default=0)

    @cached_property
    def last_step(self) -> int:
        return max((int(row["step"]) for row in self._timed), default=0)

    @property
    def _timed(self) -> tuple[Row, ...]:
        return self.steps or self.decisions or self.evals

    @cached_property
    def phases(self) -> tuple[Span, ...]:
        """The run cut where its phase changes, without gaps; nothing when no row tells its phase."""
        rows = [row for row in self.steps or self.decisions if isinstance(row.get("phase"), str)]
        if not rows:
            return ()
        starts = [
            (row["phase"], row["step"])
            for before, row in zip([None, *rows], rows, strict=False)
            if before is None or before["phase"] != row["phase"]
        ]
        ends = [step for _, step in starts[1:]] + [self.last_step]
        return tuple(
            Span(phase, first, last) for (phase, first), last in zip(starts, ends, strict=True)
        )

    @property
    def controller(self) -> str:
        """The controller's name, "" when nothing tells."""
        for source in (self.summary, self.environment):
            if isinstance(told := (source or {}).get("controller"), str):
                return told
        return str(self.setting("controller._target_") or "").rsplit(".", 1)[-1]

    @property
    def shapes(self) -> dict[str, Any]:
        """Shape of every parameter by name, as the run wrote it down; empty when it did not."""
        environment = self.environment or {}
        shapes = environment.get("shapes", environment.get("parameters"))
        return shapes if isinstance(shapes, dict) else {}

    @property
    def steps_done(self) -> int:
        """Iterations made. Rows count from 0, so this is one more than the last row's step."""
        told = whole((self.summary or {}).get("steps"), STEP_LIMIT)
        return self.last_step + 1 if told is None else told

    def total(self, key: str) -> float:
        """A number of the summary, or of the last step that has it; nan without any."""
        rows = [self.summary or {}, *reversed(self.steps)]
        return first_finite(number(row.get(key)) for row in rows)

    @property
    def val_loss(self) -> float:
        """Nats per byte at the end, or at the last evaluation; nan when unknown or diverged."""
        rows = [self.summary or {}, *reversed(self.evals)]
        return next((number(row["val_loss"]) for row in rows if "val_loss" in row), math.nan)

    @property
    def seconds(self) -> float:
        """Wall time: the summary's, else the sum of the steps' own, evaluations left out."""
        told = number((self.summary or {}).get("seconds"))
        if math.isfinite(told):
            return told
        values = self.series("seconds")[1]
        return float(np.nansum(values)) if np.isfinite(values).any() else math.nan

    @property
    def steps_timed(self) -> int:
        """How many steps, the last ones, :attr:`seconds` are of: a summary times its own attempt alone.

        >>> Run(Path("r"), summary={"steps": 9, "seconds": 2.5, "first_step": 6}).steps_timed
        3
        """
        summary = self.summary or {}
        if math.isfinite(number(summary.get("seconds"))):
            first = whole(summary.get("first_step"), STEP_LIMIT) or 0
        else:
            first = self.steps[0]["step"] if self.steps else 0
        return max(0, self.steps_done - first)

    @property
    def saving(self) -> float:
        """Bytes of plain DDP over bytes sent: 4.0 is a quarter of the traffic."""
        sent, dense = self.total("wire_bytes"), self.total("dense_bytes")
        return dense / sent if sent > 0 else math.nan

    @property
    def mean_rank(self) -> float:
        """Mean over the compressed iterations; 0 when all were dense, nan when unknown."""
        told = number((self.summary or {}).get("mean_rank"))
        if math.isfinite(told):
            return told
        ranks = self.series("mean_rank")[1]
        ranks = ranks[np.isfinite(ranks)]
        compressed = ranks[ranks > 0]
        if compressed.size:
            return float(compressed.mean())
        return 0.0 if ranks.size else math.nan

    @property
    def rank_path(self) -> list[float]:
        """Mean ranks of the compressed windows, trials left out, reduced by :func:`turning`."""
        rows = self.decisions or self.steps
        ranks = [mean_rank(row) for row in rows if row.get("phase") != "calibration"]
        return turning([rank for rank in ranks if rank > 0])


def column(rows: Sequence[Row], key: str) -> Series:
    """The values of one key, nan where it is missing or no number.

    >>> column([{"a": 1}, {}], "a")
    array([ 1., nan])
    """
    return np.array([number(row.get(key)) for row in rows], dtype=np.float64)


def plan_ranks(row: Row) -> dict[str, int]:
    """Rank of every matrix that a decision names; 0 where it is dense or no rank was told.

    >>> plan_ranks({"ranks": {"a": 8, "b": None, "c": 10**59}}), plan_ranks({"ranks": [8]})
    ({'a': 8, 'b': 0, 'c': 0}, {})
    """
    ranks = row.get("ranks")
    told = {name: number(rank) for name, rank in ranks.items()} if isinstance(ranks, dict) else {}
    return {name: int(rank) if 0 < rank < STEP_LIMIT else 0 for name, rank in told.items()}


def compressed_ranks(row: Row) -> list[int]:
    """Ranks above 0 of a decision, one per compressed matrix.

    >>> compressed_ranks({"ranks": {"a": 8, "b": 0, "c": 4}})
    [8, 4]
    """
    return [rank for rank in plan_ranks(row).values() if rank]


def mean_rank(row: Row) -> float:
    """Mean rank of the compressed matrices of a decision or step row, 0 when all are dense.

    >>> mean_rank({"ranks": {"a": 8, "b": 0, "c": 4}}), mean_rank({"mean_rank": 3.5})
    (6.0, 3.5)
    """
    ranks = compressed_ranks(row)
    if ranks:
        return sum(ranks) / len(ranks)
    told = number(row.get("mean_rank"))
    return told if math.isfinite(told) else 0.0


def turning(values: Sequence[float]) -> list[float]:
    """First, last, and what lies beyond both, in order of appearance.

    >>> turning([32, 28, 8, 8, 12]), turning([32, 20, 8]), turning([16, 16])
    ([32, 8, 12], [32, 8], [16])
    """
    if not values:
        return []
    ends = (values[0], values[-1])
    lowest, highest = min(values), max(values)
    beyond = [extreme for extreme in (lowest, highest) if not min(ends) <= extreme <= max(ends)]
    path = [values[0], *sorted(beyond, key=values.index), values[-1]]
    return [value for place, value in enumerate(path) if place == 0 or path[place - 1] != value]


def load_run(folder: Path | str) -> Run:
    """Read ``metrics.jsonl``, and where they exist ``config.yaml`` and ``environment.json``.

    Lines that are no JSON (the last one of a killed run) are left out and counted in ``notes``. What a
    resumed run has left behind by going on from an earlier step does not count (:func:`standing`).

    Raises:
        ValueError: the folder is no run, or its metrics have no readable row yet.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> text = json.dumps({"kind": "step", "step": 1, "loss": 5.5, "phase": "warmup"})
    >>> _ = (folder / "metrics.jsonl").write_text(text + chr(10) + text[:9])
    >>> run = load_run(folder)
    >>> run.last_step, run.summary, run.notes[0]
    (1, None, 'The last line of metrics.jsonl is incomplete and was left out.')
    """
    folder = Path(folder)
    path = folder / METRICS
    if not path.is_file():
        raise ValueError(f"{folder} is no run folder: looked for {path}{_hint(folder)}")
    rows, notes = read_rows(path)
    kinds: dict[str, dict[int, Row]] = {"step": {}, "eval": {}}
    decisions: dict[int, dict[int, Row]] = {0: {}}
    summary: Row | None = None
    for row in standing(rows):
        kind = str(row.get("kind"))
        if kind == "summary":
            summary = row
        elif kind == "decision":
            # Later stages are told of late: only the step orders them.
            if (stage := whole(row.get("stage", 0), STAGE_LIMIT)) is not None:
                decisions.setdefault(stage, {})[int(row["step"])] = row
        elif kind in kinds:
            kinds[kind][int(row["step"])] = row
    if summary is None and not any([*kinds.values(), *decisions.values()]):
        raise ValueError(f"{path} has no complete row yet: try again when the run has made a step")
    config, config_notes = _read_mapping(folder / CONFIG)
    environment, environment_notes = _read_mapping(folder / ENVIRONMENT)
    first, *later = (_ordered(decisions.get(k, {})) for k in range(1 + max(decisions)))
    return Run(
        folder=folder,
        steps=_ordered(kinds["step"]),
        decisions=first,
        evals=_ordered(kinds["eval"]),
        summary=summary,
        config=config,
        environment=environment,
        notes=(*notes, *config_notes, *environment_notes),
        later_stages=tuple(later),
    )


def _ordered(by_step: dict[int, Row]) -> tuple[Row, ...]:
    return tuple(by_step[step] for step in sorted(by_step))


def _hint(folder: Path) -> str:
    """A sweep's folder is an easy mistake: name the runs in it."""
    if not folder.is_dir():
        return "; there is no such folder"
    inner = sorted(
        path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{METRICS}")
    )
    return f"; there are runs in {', '.join(map(str, inner[:3]))}" if inner else ""


def _read_mapping(path: Path) -> tuple[Row | None, list[str]]:
    """A YAML or JSON file that holds one mapping, or None and why."""
    if not path.is_file():
        return None, [f"There is no {path.name}."]
    try:
        text = path.read_text("utf-8")
        data = json.loads(text) if path.suffix == ".json" else _plain_yaml(text)
    except Exception:  # Parsers fail in many ways, and the page is worth more than its settings.
        data = None
    return (data, []) if isinstance(data, dict) else (None, [f"{path.name} is unreadable."])


def _plain_yaml(text: str) -> Any:
    """Without interpolations, which could read the environment of whoever looks at the page, and without
    aliases, a few of which make millions of entries. The application writes neither."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError("aliases")
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
