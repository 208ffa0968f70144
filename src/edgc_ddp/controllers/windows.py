"""One window of the entropy controller: from the entropies seen to the next ranks.

Ranks belong to *groups*: one group of all matrices (scope "stage") or one per matrix. A group's
memory is a plain dict: ``rank`` now; ``reference``, the entropies compared with; ``exact``, the
unrounded rank that belongs to them; ``speed``, the reference speed of policy "edgc_code".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgc_ddp.controllers.policies import (
    ROUNDING,
    common_entropy,
    edgc_code_rank,
    edgc_rank,
    reachable,
)
from edgc_ddp.decisions import MatrixSpec

Group = dict[str, Any]


@dataclass(frozen=True)
class Rules:
    """The options of one window, checked by the controller that holds them."""

    policy: str
    reference: str
    step_limit: int
    exponent: int


def finite(entropy: Mapping[str, float], matrices: Sequence[MatrixSpec]) -> dict[str, float]:
    """The finite entropies of these matrices, by name."""
    return {
        matrix.name: value
        for matrix in matrices
        if math.isfinite(value := entropy.get(matrix.name, math.nan))
    }


def new_group(
    matrices: Sequence[MatrixSpec], r_max: int, anchor: Mapping[str, float], policy: str
) -> Group:
    """A group at its first compressed rank, ``r_max`` or what its largest matrix has.

    The authors' code compares compressed windows only, so it starts without a reference.
    """
    rank = min(r_max, max(matrix.rows for matrix in matrices))
    reference = finite(anchor, matrices) if policy == "edgc" else {}
    return {"rank": rank, "exact": float(rank), "reference": reference, "speed": 0.0}


def next_group(
    group: Group,
    matrices: Sequence[MatrixSpec],
    entropy: Mapping[str, float],
    r_min: int,
    r_max: int,
    rules: Rules,
) -> tuple[Group, str]:
    """The group after a window with these mean entropies (nats), and one sentence why.

    The rank moves by at most ``step_limit`` and stays in [r_min, r_max], each no larger than the
    group's largest matrix. Without a finite entropy the group stays as it is.
    """
    rank: int = group["rank"]
    seen = finite(entropy, matrices)
    if not seen:
        return group, f"no finite entropy in the window: rank {rank} kept"
    pair = common_entropy(matrices, group["reference"], seen)
    if pair is None:
        return {**group, "reference": seen}, f"first finite entropy: rank {rank} kept as reference"
    r_max = min(r_max, max(matrix.rows for matrix in matrices))
    r_min = min(r_min, r_max)
    low, high = reachable(rank, rules.step_limit, r_min, r_max)
    before, after = pair
    told = f"entropy {before:.2f} -> {after:.2f}"

    if rules.policy == "edgc":
        asked = edgc_rank(matrices, group["exact"], before, after, exponent=rules.exponent)
        target = math.floor(asked + ROUNDING)
        group = dict(group)
        if rules.reference == "previous":
            # The unrounded rank is carried, or flooring window after window would drift down.
            group.update(reference=seen, exact=max(float(low), min(float(high), asked)))
    else:
        speed = abs(after - before)
        # A still first pair of windows gives no measure of speed: wait for one that moves.
        reference_speed = group["speed"] or speed
        group = {**group, "reference": seen, "speed": reference_speed}
        if reference_speed == 0.0:
            return group, f"{told}, no speed to compare with: rank {rank} kept"
        target = edgc_code_rank(speed, reference_speed, r_min, r_max)
        told = f"entropy speed {speed:.3g} against {reference_speed:.3g}"

    moved = max(low, min(high, target))
    limit = ""
    if moved != target:
        stepped = abs(moved - rank) == rules.step_limit
        limit = f" (step limit {rules.step_limit})" if stepped else f" (bounds {r_min}..{r_max})"
    return {**group, "rank": moved}, f"{told}: rank {rank} -> {moved}{limit}"
