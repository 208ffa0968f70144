"""The paper's two clusters as the communication-time model sees them.

Tensor parallelism fills a node, so the data-parallel average of a stage is a ring over ``dp`` nodes for
each of the node's GPUs, and all of them share the node's link: a node averages 1 / ``pp`` of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgc_ddp.maths.comm_time import Link, RankTime, fit_rank_time, ring_seconds

ITERATIONS = 230_000
_HALF = 2
"""Bytes of a gradient entry; with four the averages take twice as long."""
TABLE_5_HOURS = {64: 3.0167, 32: 1.4833, 16: 0.7417}
TABLE_5_DENSE_HOURS, TABLE_5_EDGC_HOURS = 3.0417, 1.8750
_TABLE_5_STEPS = 30_000
MEAN_RANK = 40
"""At which Table 5's line takes EDGC's time."""


@dataclass(frozen=True)
class Cluster:
    """One of Table 3 with the run of Table 1 on it."""

    name: str
    nodes: int
    gpus_per_node: int
    tp: int
    pp: int
    dp: int
    width: int
    layers: int
    parameters: float
    dense_days: float
    edgc_days: float
    links_gbit: tuple[float, ...]
    """Between nodes; several where the paper's was not at hand."""

    @property
    def step_s(self) -> float:
        """A step of Megatron-LM."""
        return 86400 * self.dense_days / ITERATIONS

    @property
    def claimed(self) -> float:
        """The change of the run's time that the paper reports."""
        return self.edgc_days / self.dense_days - 1

    def payload(self, rank: int) -> float:
        """Bytes a node averages per step; rank 0 is dense.

        A layer's four matrices are cut by tensor parallelism as Megatron-LM does: query-key-value and
        the first of the wide pair by rows, the others by columns.
        """
        if rank == 0:
            return _HALF * self.parameters / self.pp
        w, cut = self.width, self.tp
        shapes = ((3 * w // cut, w), (w, w // cut), (4 * w // cut, w), (w, 4 * w // cut))
        factors = sum(rank * (m + n) for m, n in shapes)
        return float(_HALF * factors * self.layers / self.pp * self.gpus_per_node)

    def wire_s(self, rank: int, gbit: float) -> float:
        """Seconds of one average on the wire, none of it hidden and no work."""
        return ring_seconds(self.payload(rank), self.dp, Link(0.0, gbit * 1e9 / 8))


CLUSTERS = (
    Cluster("GPT2-2.5B, 32 V100", 8, 4, 4, 4, 2, 1920, 52, 2.5e9, 18.44, 15.74, (32.0,)),
    # Table 3 was at hand up to this cluster's number of nodes: its link is not known here.
    Cluster(
        "GPT2-12.1B, 64 H100",
        16,
        4,
        4,
        4,
        4,
        3584,
        76,
        12.1e9,
        6.88,
        5.77,
        (32.0, 100.0, 200.0, 400.0),
    ),
)


def table_5() -> RankTime:
    """Seconds of one average by rank, as the paper's Table 5 has them."""
    hours = sorted(TABLE_5_HOURS.items())
    return fit_rank_time([(rank, 3600 * each / _TABLE_5_STEPS) for rank, each in hours])


@dataclass(frozen=True)
class Answer:
    """What the model says of a cluster at one link. Times in seconds, changes as shares of a step."""

    cluster: Cluster
    gbit: float
    dense_s: float
    """The dense average on the wire."""
    edgc_s: float
    """The same at EDGC's mean rank."""
    exposed: float
    """The step's change when no average hides under backward and work costs nothing: the most that
    sending less can bring."""

    @property
    def needed_s(self) -> float:
        """What an average would have to save for the paper's change."""
        return -self.cluster.claimed * self.cluster.step_s


def answers() -> list[Answer]:
    """One for each cluster and link."""
    found = []
    for cluster in CLUSTERS:
        for gbit in cluster.links_gbit:
            dense, edgc = cluster.wire_s(0, gbit), cluster.wire_s(MEAN_RANK, gbit)
            found.append(Answer(cluster, gbit, dense, edgc, -(dense - edgc) / cluster.step_s))
    return found


def table_5_change() -> float:
    """The change of cluster 1's step when its averages take the times of Table 5, all exposed."""
    saved = TABLE_5_DENSE_HOURS - TABLE_5_EDGC_HOURS
    return -3600 * saved / _TABLE_5_STEPS / CLUSTERS[0].step_s
