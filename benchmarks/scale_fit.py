"""The communication-time model fitted to step-time records, and how far off it is where it was not fitted.

A step is the model's ``forward + backward`` (the contestant ``none``) and its average, bucket by bucket
(:mod:`edgc_ddp.maths.comm_time`). Unknown are the link's latency and the share of its nominal rate that
arrives, what a byte costs the processor, the compressor's work per gradient entry (``a + b r``, by wire
type), and how much of the averaging hides under backward. Where hosts share cores, the processor's part
takes as many times longer as there are hosts to a core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from benchmarks import links
from benchmarks.contestants import Contestant, ring_bytes
from benchmarks.record import RESULTS
from benchmarks.summary import Row, summarise
from benchmarks.workloads import WORKLOADS
from edgc_ddp.doctor.advise import Model
from edgc_ddp.doctor.facts import DEFAULT_CAP_MB, Facts
from edgc_ddp.maths.comm_time import Link, bucket_sizes, ring_seconds, step_seconds

BACKWARD_SHARE = 2 / 3
"""Of a step's computation; records tell only the whole, and backward is two products for one."""


@dataclass(frozen=True)
class Load:
    """What is trained: bytes of gradient, fp32, and seconds of computation of a step."""

    dense_bytes: float
    compute_s: float

    @property
    def entries(self) -> float:
        return self.dense_bytes / 4


@dataclass(frozen=True)
class Way:
    """How it is averaged. ``wire`` "" is plain DDP."""

    wire: str
    rank: int
    payload_bytes: float
    cap_mb: float = DEFAULT_CAP_MB


@dataclass(frozen=True)
class Point:
    """One contestant of one record on one link."""

    record: str
    hosts: int
    per_core: float
    """Hosts to a core, at least 1."""
    bits_per_s: float
    load: Load
    way: Way
    seconds: float
    trained: bool = True
    """Whether there was a forward and a backward, not gradients alone."""


@dataclass(frozen=True)
class Fitted:
    """The model's constants."""

    latency_s: float
    """Of one message."""
    efficiency: float
    """Payload bytes that arrive / nominal rate."""
    byte_s: float
    """Processor seconds per payload byte."""
    overlap: float
    dense_s: float = 0.0
    """Processor seconds of a dense step beside its parts; ``compressed_s`` of a compressed one."""
    compressed_s: float = 0.0
    work: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Per wire type, processor seconds per gradient entry: at rank 0, and per rank."""

    def link(self, bits_per_s: float) -> Link:
        return Link(self.latency_s, self.efficiency * bits_per_s / 8)

    def work_s(self, load: Load, way: Way) -> float:
        """The processor's part of one average."""
        fixed, per_rank = self.work[way.wire] if way.wire else (0.0, 0.0)
        return load.entries * (fixed + per_rank * way.rank) + self.byte_s * way.payload_bytes

    def step_s(
        self, load: Load, way: Way, collective_s: tuple[float, float], slower: float
    ) -> float:
        """A step, given one collective's latency and the payload's seconds on the wire.

        ``slower``: times the processor's part takes longer than on a core of its own.
        """
        latency_s, wire_s = collective_s
        sizes = bucket_sizes(load.dense_bytes, way.cap_mb)
        sums = 2 if way.wire else 1
        whole = wire_s + slower * self.work_s(load, way)
        buckets = [(size, sums * latency_s + whole * size / load.dense_bytes) for size in sizes]
        backward = BACKWARD_SHARE * load.compute_s
        beside = slower * (self.compressed_s if way.wire else self.dense_s)
        return beside + step_seconds(load.compute_s - backward, backward, buckets, self.overlap)

    def expected(self, point: Point) -> float:
        """The step of a point, seconds."""
        link = self.link(point.bits_per_s)
        latency = ring_seconds(0.0, point.hosts, link)
        wire = ring_seconds(point.way.payload_bytes, point.hosts, link) - latency
        return self.step_s(point.load, point.way, (latency, wire), point.per_core)


def read(folder: Path) -> list[Point]:
    """The points of a record: plain DDP and every edgc contestant on every shaped link.

    ``unshaped`` is memory, not a network, and tells nothing of one.
    """
    config = json.loads((folder / "config.json").read_text())
    raw = json.loads((folder / "raw.json").read_text())
    hosts, points = config["hosts"], []
    per_core = max(1.0, hosts / config["machine"]["cores"])
    for name, measured in raw.items():
        link = links.Link.parse(name)
        if link.bits_per_second is None:
            continue
        shared = measured["network"]["shared"]
        # One loopback carries what all hosts send.
        bits = link.bits_per_second / (hosts if shared else 1)
        rows = summarise(measured["blocks"], link, shared)
        alone = next(row.median_ms for row in rows if row.name == "none") / 1e3
        workload = WORKLOADS[config["model"]]
        load, trained = Load(4.0 * workload.numel, alone), workload.batch > 0
        for row in rows:
            if (way := _way(row, hosts)) is not None:
                seconds = row.median_ms / 1e3
                points.append(
                    Point(folder.name, hosts, per_core, bits, load, way, seconds, trained)
                )
    return points


def _way(row: Row, hosts: int) -> Way | None:
    contestant = Contestant.parse(row.name)
    if contestant.kind not in ("ddp", "edgc"):
        return None
    assert row.claimed_bytes is not None
    payload = row.claimed_bytes / ring_bytes(1.0, hosts)
    cap = DEFAULT_CAP_MB if contestant.cap_mb is None else contestant.cap_mb
    return Way(contestant.wire, contestant.rank, payload, cap)


def read_all(parent: Path = RESULTS) -> list[Point]:
    """The points of all step-time records under a folder."""
    folders = sorted(path.parent for path in parent.glob("*/raw.json"))
    return [point for folder in folders for point in read(folder)]


def fit(points: Sequence[Point]) -> Fitted:
    """Least squares of relative errors over all points, no constant below zero.

    Raises ValueError when there is no point of plain DDP or none that compresses.
    """
    wires = sorted({point.way.wire for point in points} - {""})
    if not wires or all(point.way.wire for point in points):
        raise ValueError("nothing to fit: expected records with ddp and edgc on a shaped link")
    seconds = np.asarray([point.seconds for point in points])
    # Latency 0.1 ms, bytes at 1 GB/s and entries at 1 ns make every unknown about 1.
    units = np.asarray([1e-4, 1.0, 1e-9, 1.0, 1e-3, 1e-3, *[1e-9, 1e-10] * len(wires)])

    def constants(x: np.ndarray) -> Fitted:
        plain, work = (x * units)[:6].tolist(), (x * units)[6:].tolist()
        pairs = zip(work[::2], work[1::2], strict=True)
        return Fitted(*plain, dict(zip(wires, pairs, strict=True)))

    def errors(x: np.ndarray) -> np.ndarray:
        found = constants(x)
        return np.asarray([found.expected(point) for point in points]) / seconds - 1

    low, high = np.zeros(len(units)), np.full(len(units), np.inf)
    low[1], high[1], high[3] = 0.05, 1.0, 1.0
    start = np.asarray([1.0, 0.9, 1.0, 0.5, 1.0, 1.0, *[1.0] * (2 * len(wires))])
    return constants(least_squares(errors, start, bounds=(low, high)).x)


def fit_facts(facts: Facts) -> tuple[Fitted, Load, list[Way]]:
    """The constants, the load and the ways that the doctor's measurements give (``--json``)."""
    model = Model(facts)
    added, factor = model.lane
    entries = facts.dense_bytes / 4
    work = {
        wire: ((added + factor * curve.fixed) / entries, factor * curve.per_rank / entries)
        for wire, curve in model.work.items()
    }
    steps = model.steps
    fitted = Fitted(
        model.link.latency_s, 1.0, 0.0, steps.overlap, steps.dense_s, steps.compressed_s, work
    )
    ways = [Way("", 0, facts.dense_bytes)]
    ways += [Way(cost.wire, cost.rank, cost.payload_bytes) for cost in facts.costs]
    return fitted, Load(facts.dense_bytes, facts.forward_s + facts.backward_s), ways


def facts_errors(facts: Facts, fitted: Fitted, load: Load, ways: Sequence[Way]) -> list[float]:
    """|expected / measured - 1| of each of the doctor's real steps, on the link that it measured."""
    link = Model(facts).link
    by_kind = {(way.wire, way.rank): way for way in ways}
    latency = ring_seconds(0.0, facts.world_size, link)
    errors = []
    for step in facts.steps:
        way = by_kind[step.wire if step.rank else "", step.rank]
        wire = ring_seconds(way.payload_bytes, facts.world_size, link) - latency
        errors.append(abs(fitted.step_s(load, way, (latency, wire), 1.0) / step.seconds - 1))
    return errors


@dataclass(frozen=True)
class Error:
    """How far off the model is on the records of so many hosts."""

    hosts: int
    fitted: bool
    """Whether these records made the fit."""
    points: int
    median: float
    """Of |expected / measured - 1|."""
    worst: float


def validate(points: Sequence[Point]) -> tuple[Fitted, list[Error]]:
    """Fit the records with fewest hosts; tell the error on them and on all others."""
    fewest = min(point.hosts for point in points)
    fitted = fit([point for point in points if point.hosts == fewest])
    found = []
    for hosts in sorted({point.hosts for point in points}):
        own = [
            abs(fitted.expected(point) / point.seconds - 1)
            for point in points
            if point.hosts == hosts
        ]
        found.append(Error(hosts, hosts == fewest, len(own), median(own), max(own)))
    return fitted, found
