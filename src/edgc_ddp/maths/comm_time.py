"""The communication-time model: time = latency + bytes / bandwidth + work(rank). Pure numbers.

Collectives follow the usual latency-bandwidth model (Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005); the ring is that of Patarasuk and Yuan (2009). That
the time of a compressed average is linear in the rank is what the paper's Figure 6 and Table 5 show; a
square term is for orthogonalisation, whose work grows with the rank squared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import scipy

MIB = 2**20
_FIRST_BUCKET = MIB
_FEWEST_FOR_SQUARE = 4


@dataclass(frozen=True)
class Link:
    """One way from a process (or a node) to the next."""

    latency_s: float
    """Seconds of one message, however short."""
    bytes_per_s: float
    """inf where size does not matter."""


def ring_seconds(payload_bytes: float, members: int, link: Link) -> float:
    """All-reduce over a ring: 2 (W-1) messages of 1/W of the payload each.

    >>> ring_seconds(1000.0, 2, Link(latency_s=0.5, bytes_per_s=1000.0))
    2.0
    >>> ring_seconds(1000.0, 1, Link(0.5, 1000.0))
    0.0
    """
    hops = 2 * (members - 1)
    return hops * (link.latency_s + payload_bytes / members / link.bytes_per_s)


def hierarchical_seconds(
    payload_bytes: float, nodes: int, per_node: int, inside: Link, outside: Link
) -> float:
    """All-reduce in three steps: reduce-scatter inside each node, one ring between nodes for each
    share, all-gather inside. A node's rings share its one ``outside`` link, so together they carry
    the whole payload once; the two steps inside are the two halves of a ring.

    >>> slow, fast = Link(0.5, 1000.0), Link(0.0, math.inf)
    >>> hierarchical_seconds(1000.0, 2, 8, fast, slow) == ring_seconds(1000.0, 2, slow)
    True
    """
    return ring_seconds(payload_bytes, per_node, inside) + ring_seconds(
        payload_bytes, nodes, outside
    )


def flat_ring_seconds(
    payload_bytes: float, nodes: int, per_node: int, inside: Link, outside: Link
) -> float:
    """All-reduce over one ring through all members, node by node: every one of its 2 (W-1) steps waits
    for the slowest link.

    >>> flat_ring_seconds(1000.0, 2, 2, Link(0.0, math.inf), Link(0.5, 1000.0))
    4.5
    """
    slowest = Link(
        max(inside.latency_s, outside.latency_s), min(inside.bytes_per_s, outside.bytes_per_s)
    )
    return ring_seconds(payload_bytes, nodes * per_node, slowest if nodes > 1 else inside)


def fit_link(points: Sequence[tuple[float, float]], members: int) -> Link:
    """The link behind measured all-reduces over a ring of ``members``: (payload bytes, seconds).

    Non-negative least squares of relative errors, so short messages tell the latency although long
    ones take a thousand times as long.

    Raises ValueError for fewer than two sizes, fewer than two members, or times that are not positive.

    >>> truth = Link(latency_s=1e-4, bytes_per_s=1e8)
    >>> sizes = (1e3, 1e5, 1e7)
    >>> found = fit_link([(size, ring_seconds(size, 4, truth)) for size in sizes], members=4)
    >>> round(found.latency_s, 9), round(found.bytes_per_s)
    (0.0001, 100000000)
    """
    if members < 2 or len({size for size, _ in points}) < 2:
        raise ValueError(
            f"points={list(points)!r}, members={members}: expected all-reduces of at least two sizes "
            "over at least two members"
        )
    hops = 2 * (members - 1)
    seconds = [time for _, time in points]
    fixed, per_byte = _least_squares([[1.0, size] for size, _ in points], seconds)
    return Link(fixed / hops, hops / members / per_byte if per_byte else math.inf)


@dataclass(frozen=True)
class RankTime:
    """Seconds at a rank: ``fixed + per_rank r + per_rank2 r^2``, none of them negative.

    Bytes are linear in the rank, so this is the form of latency + bytes / bandwidth + work(rank) as
    well as that of work(rank) alone.
    """

    fixed: float
    per_rank: float
    per_rank2: float = 0.0

    def seconds(self, rank: float) -> float:
        return self.fixed + rank * (self.per_rank + rank * self.per_rank2)

    def rank_at(self, seconds: float) -> float:
        """The largest rank that takes no longer: 0 when none does, inf when all do.

        >>> RankTime(1.0, 2.0).rank_at(5.0), RankTime(1.0, 0.0, 1.0).rank_at(10.0)
        (2.0, 3.0)
        >>> RankTime(1.0, 0.0).rank_at(2.0), RankTime(1.0, 1.0).rank_at(0.5)
        (inf, 0.0)
        """
        spare = seconds - self.fixed
        if spare < 0:
            return 0.0
        root = math.sqrt(self.per_rank**2 + 4 * self.per_rank2 * spare)
        # This form of the quadratic's root has no difference of near equals, and none for b = c = 0.
        return 2 * spare / (self.per_rank + root) if self.per_rank + root else math.inf


def fit_rank_time(points: Sequence[tuple[float, float]]) -> RankTime:
    """The curve through measured (rank, seconds): least squares of relative errors.

    The square term is taken only when the data ask for it: when each of four or more points is
    predicted better from the others with it than without.

    Raises ValueError for no point or for a time that is not positive.

    The paper's Table 5 (hours), whose uncompressed 3.0417 is met a little above rank 64:

    >>> table = fit_rank_time([(16, 0.7417), (32, 1.4833), (64, 3.0167)])
    >>> round(table.rank_at(3.0417), 1), table.per_rank2
    (65.3, 0.0)
    """
    if not points:
        raise ValueError("points=[]: expected at least one (rank, seconds)")
    straight, square = (_rank_fit(points, terms) for terms in (2, 3))
    if len(points) < _FEWEST_FOR_SQUARE:
        return straight
    return square if _left_out_error(points, 3) < _left_out_error(points, 2) else straight


def _rank_fit(points: Sequence[tuple[float, float]], terms: int) -> RankTime:
    rows = [[float(rank) ** power for power in range(terms)] for rank, _ in points]
    return RankTime(*_least_squares(rows, [seconds for _, seconds in points]))


def _left_out_error(points: Sequence[tuple[float, float]], terms: int) -> float:
    """Mean squared relative error of each point as the others predict it."""
    errors = []
    for place, (rank, seconds) in enumerate(points):
        others = [*points[:place], *points[place + 1 :]]
        errors.append((_rank_fit(others, terms).seconds(rank) / seconds - 1) ** 2)
    return fmean(errors)


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients >= 0 of the columns, errors relative to each time."""
    if not all(math.isfinite(time) and time > 0 for time in seconds):
        raise ValueError(f"seconds={list(seconds)!r}: expected measured times, all above 0")
    matrix = np.asarray(rows) / np.asarray(seconds)[:, None]
    # Columns differ by ten powers of ten (1 against bytes); the solver's tolerance is one number.
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(float).tiny)
    solution, _ = scipy.optimize.nnls(matrix / scale, np.ones(len(matrix)))
    return [float(value) for value in solution / scale]


def fit_lane(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """What a lane makes of a compressor's work: (seconds it adds, times the work takes longer).

    ``points`` are (seconds of the average, of which not for work, work measured alone). Non-negative
    least squares of errors relative to the average. Raises ValueError without any point.

    >>> seconds, factor = fit_lane([(1.7, 0.5, 0.5), (2.2, 0.6, 1.0), (4.0, 0.8, 3.0)])
    >>> round(seconds, 9), round(factor, 9)
    (0.8, 0.8)
    """
    if not points:
        raise ValueError("points=[]: expected at least one average")
    rows = np.asarray([[1.0, work] for _, _, work in points])
    whole = np.asarray([seconds for seconds, _, _ in points])
    rest = whole - np.asarray([other for _, other, _ in points])
    found, _ = scipy.optimize.nnls(rows / whole[:, None], rest / whole)
    return float(found[0]), float(found[1])


def bucket_sizes(total_bytes: float, cap_mb: float) -> list[float]:
    """Bytes of DDP's buckets in the order in which they become ready: 1 MiB first, then the cap.

    Whole parameters make real buckets somewhat uneven; their number is about this.

    >>> [size / MIB for size in bucket_sizes(11 * MIB, cap_mb=4)]
    [1.0, 4.0, 4.0, 2.0]
    """
    left, sizes, size = float(total_bytes), [], min(float(_FIRST_BUCKET), cap_mb * MIB)
    while left > 0:
        sizes.append(min(left, size))
        left -= sizes[-1]
        size = cap_mb * MIB
    return sizes


def step_seconds(
    forward_s: float,
    backward_s: float,
    buckets: Sequence[tuple[float, float]],
    overlap: float = 1.0,
) -> float:
    """A step of forward, backward and averaging, given each bucket's (bytes, seconds) in order.

    A bucket is ready when backward has made its bytes, in proportion, and buckets are averaged one
    after the other. So all but the last can hide under backward, and the last one, which is ready when
    backward ends, never does. ``overlap`` is the share of what could hide that really does: 1 where
    communication costs the processor nothing.

    >>> step_seconds(1.0, 4.0, [(10.0, 1.0), (10.0, 1.0)])
    6.0
    >>> step_seconds(1.0, 4.0, [(10.0, 1.0), (10.0, 1.0)], overlap=0.0)
    7.0
    >>> step_seconds(1.0, 4.0, [(10.0, 9.0), (10.0, 9.0)])
    21.0
    """
    serial = forward_s + backward_s + sum(seconds for _, seconds in buckets)
    return serial - overlap * hidden_seconds(backward_s, buckets)


def hidden_seconds(backward_s: float, buckets: Sequence[tuple[float, float]]) -> float:
    """What of the buckets' (bytes, seconds) fits under backward."""
    whole = sum(size for size, _ in buckets)
    ready = end = spent = 0.0
    for size, seconds in buckets:
        ready += backward_s * size / whole
        end = max(end, ready) + seconds
        spent += seconds
    return max(0.0, backward_s + spent - end) if buckets else 0.0


@dataclass(frozen=True)
class SeenStep:
    """A real step beside what the model says of it, all in seconds."""

    compressed: bool
    serial_s: float
    """Without any overlap."""
    hidden_s: float
    """What could hide under backward (:func:`hidden_seconds`)."""
    seconds: float


@dataclass(frozen=True)
class StepFit:
    """How real steps differ from their parts."""

    overlap: float
    """Share, in [0, 1], of what could hide under backward that does."""
    dense_s: float
    """What a dense step has beside its parts: gradients copied into buckets, say."""
    compressed_s: float
    """The same of a compressed step: hand-over between threads, cores shared with backward."""

    def seconds(self, compressed: bool, serial_s: float, hidden_s: float) -> float:
        extra = self.compressed_s if compressed else self.dense_s
        return serial_s + extra - self.overlap * hidden_s


def fit_steps(seen: Sequence[SeenStep]) -> StepFit:
    """Bounded least squares of relative errors over real steps.

    Raises ValueError without any step.

    >>> dense = [SeenStep(False, serial, hidden, serial + 0.5 - 0.25 * hidden)
    ...          for serial, hidden in ((7.0, 1.0), (10.0, 4.0))]
    >>> found = fit_steps([*dense, SeenStep(True, 5.0, 1.0, 5.75)])
    >>> [round(value, 6) for value in (found.overlap, found.dense_s, found.compressed_s)]
    [0.25, 0.5, 1.0]
    """
    if not seen:
        raise ValueError("seen=[]: expected at least one step")
    rows = np.asarray([[-s.hidden_s, float(not s.compressed), float(s.compressed)] for s in seen])
    seconds = np.asarray([s.seconds for s in seen])
    beyond = seconds - np.asarray([s.serial_s for s in seen])
    bounds = (0.0, np.asarray([1.0, math.inf, math.inf]))
    overlap, dense, compressed = scipy.optimize.lsq_linear(
        rows / seconds[:, None], beyond / seconds, bounds, method="bvls"
    ).x
    return StepFit(float(overlap), float(dense), float(compressed))
