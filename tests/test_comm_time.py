"""The communication-time model finds known constants again, and the live calibration goes by it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from edgc_ddp.controllers import EntropyController
from edgc_ddp.controllers.bounds import measured_r_max
from edgc_ddp.decisions import FOREVER, Layout, MatrixSpec, Observation, Plan
from edgc_ddp.maths.comm_time import (
    MIB,
    Link,
    RankTime,
    SeenStep,
    StepFit,
    bucket_sizes,
    fit_link,
    fit_rank_time,
    fit_steps,
    flat_ring_seconds,
    hierarchical_seconds,
    ring_seconds,
    step_seconds,
)

LATENCIES = st.floats(1e-6, 1e-2)
SPEEDS = st.floats(1e6, 1e11)
SIZES = (1e3, 1e5, 1e7, 1e9)


@given(LATENCIES, SPEEDS, st.integers(2, 64))
def test_latency_and_bandwidth_are_found_again(latency: float, speed: float, members: int) -> None:
    truth = Link(latency, speed)
    found = fit_link([(s, ring_seconds(s, members, truth)) for s in SIZES], members)
    assert found.latency_s == pytest.approx(latency, rel=1e-4)
    assert found.bytes_per_s == pytest.approx(speed, rel=1e-4)


@given(LATENCIES, SPEEDS, st.lists(st.floats(-0.05, 0.05), min_size=4, max_size=4))
def test_noise_of_five_percent_moves_no_time_by_more_than_it(
    latency: float, speed: float, noise: list[float]
) -> None:
    truth = Link(latency, speed)
    points = [(s, ring_seconds(s, 4, truth) * (1 + e)) for s, e in zip(SIZES, noise, strict=True)]
    found = fit_link(points, 4)
    for size in SIZES:
        assert ring_seconds(size, 4, found) == pytest.approx(ring_seconds(size, 4, truth), rel=0.16)


@given(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-2), st.floats(1e-7, 1e-3))
def test_the_work_of_a_rank_is_found_again(fixed: float, linear: float, square: float) -> None:
    ranks = (2, 4, 8, 16, 32, 64)
    for truth in (RankTime(fixed, linear), RankTime(fixed, linear, square)):
        found = fit_rank_time([(rank, truth.seconds(rank)) for rank in ranks])
        for rank in (3, 24, 64):
            assert found.seconds(rank) == pytest.approx(truth.seconds(rank), rel=1e-5)
    straight = RankTime(fixed, linear)
    assert fit_rank_time([(r, straight.seconds(r)) for r in ranks]).per_rank2 * 64**2 < 1e-6


@given(st.floats(0, 10), st.floats(0, 1), st.floats(0, 1), st.floats(0, 100))
def test_the_rank_at_a_time_takes_that_time(a: float, b: float, c: float, rank: float) -> None:
    curve = RankTime(a, b, c)
    found = curve.rank_at(curve.seconds(rank))
    assert curve.seconds(found) == pytest.approx(curve.seconds(rank), rel=1e-6) or found == math.inf


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=8))
def test_the_fit_is_the_non_negative_one_of_least_relative_error(times: list[float]) -> None:
    points = [(2.0**k, time) for k, time in enumerate(times)]
    found = fit_rank_time(points)
    terms = 3 if found.per_rank2 else 2
    rows = np.array([[rank**p / time for p in range(terms)] for rank, time in points])
    _, least = nnls(rows, np.ones(len(points)))
    error = math.sqrt(sum((found.seconds(rank) / time - 1) ** 2 for rank, time in points))
    assert error == pytest.approx(least, rel=1e-6, abs=1e-9)
    assert min(found.fixed, found.per_rank, found.per_rank2) >= 0


@given(
    st.floats(0.01, 10),
    st.lists(st.tuples(st.floats(1, 100), st.floats(0, 10)), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_a_step_is_never_below_its_longest_part_nor_above_the_sum(
    backward: float, buckets: list[tuple[float, float]], overlap: float
) -> None:
    total = sum(seconds for _, seconds in buckets)
    step = step_seconds(1.0, backward, buckets, overlap)
    # The last bucket is ready when backward ends.
    assert step >= 1.0 + backward + buckets[-1][1] - 1e-9
    assert step >= 1.0 + total - 1e-9
    assert step <= 1.0 + backward + total + 1e-9


@given(st.floats(0, 1), st.floats(0, 2), st.floats(0, 2))
def test_overlap_and_what_steps_have_beside_their_parts_are_found_again(
    overlap: float, dense: float, compressed: float
) -> None:
    truth = StepFit(overlap, dense, compressed)
    parts = [(k % 2 == 0, 3.0 + k, 0.3 * k) for k in range(1, 6)]
    found = fit_steps([SeenStep(*part, truth.seconds(*part)) for part in parts])
    for part in parts:
        assert found.seconds(*part) == pytest.approx(truth.seconds(*part), rel=1e-6)
    assert found.overlap == pytest.approx(overlap, abs=1e-5)


def test_a_share_is_never_above_one_nor_a_time_below_nothing() -> None:
    assert fit_steps([SeenStep(False, 9.0, 1.0, 2.0)]).overlap == pytest.approx(1.0)
    quick = SeenStep(False, 9.0, 1.0, 5.0)
    found = fit_steps([quick, SeenStep(True, 9.0, 0.0, 5.0)])
    assert (found.dense_s, found.compressed_s) == (0.0, 0.0)
    slow = fit_steps([SeenStep(False, 2.0, 1.0, 9.0)])
    assert slow.seconds(False, 2.0, 1.0) == pytest.approx(9.0)
    with pytest.raises(ValueError, match="at least one"):
        fit_steps([])


def test_buckets_hold_everything_and_stay_under_the_cap() -> None:
    sizes = bucket_sizes(30.5 * MIB, cap_mb=8)
    assert sum(sizes) == 30.5 * MIB and max(sizes) == 8 * MIB and sizes[0] == MIB
    assert bucket_sizes(100.0, cap_mb=25) == [100.0]


def test_two_levels_beat_one_ring_where_nodes_are_far_apart() -> None:
    inside, outside = Link(1e-6, 1e11), Link(1e-4, 1e9)
    one = flat_ring_seconds(1e9, 16, 8, inside, outside)
    two = hierarchical_seconds(1e9, 16, 8, inside, outside)
    # 254 steps at the far latency and 127/128 of the bytes twice, against 30 steps and 15/16 twice with
    # 14 quick steps inside.
    assert one == pytest.approx(254e-4 + 2 * 127 / 128)
    assert two == pytest.approx(30e-4 + 2 * 15 / 16 + 14e-6 + 2 * 7 / 8 * 0.01)
    assert two < one
    assert flat_ring_seconds(1e6, 1, 8, inside, outside) == ring_seconds(1e6, 8, inside)


@pytest.mark.parametrize("bad", [[], [(1.0, 0.0)], [(1.0, math.nan)], [(1.0, -1.0)]])
def test_what_is_not_measured_cannot_be_fitted(bad: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="expected"):
        fit_rank_time(bad)
    with pytest.raises(ValueError, match="at least two"):
        fit_link(bad, members=2)


# The live calibration.


def test_one_odd_trial_does_not_decide_the_bound() -> None:
    """T(r) = 10 + r ms but for rank 16, timed 1 ms too long; dense takes 30.5 ms."""
    trials = [(rank, 0.010 + rank / 1000) for rank in (2, 4, 8, 16, 32)]
    assert measured_r_max(trials, 0.0305) == 20
    odd = [(rank, seconds + (0.001 if rank == 16 else 0)) for rank, seconds in trials]
    # Drawn straight from this trial to the next one the answer would be 19.7, and so 16.
    assert measured_r_max(odd, 0.0305) == 20
    # Whatever the curve says, a rank that was timed as slower does not pay.
    assert measured_r_max([(2, 0.01), (4, 0.02), (8, 0.04)], 0.039) == 4


LAYOUT = Layout((MatrixSpec("w", 128, 128), MatrixSpec("v", 64, 256)))
DENSE_S = 0.030


def drive(
    seconds: Callable[[int, int], float], decisions: int = 30, **options: object
) -> list[tuple[int, Plan]]:
    """Ask a controller with measured bounds, on a link where an average at a rank, 0 = dense, begun at
    a step takes ``seconds(rank, step)``."""
    controller = EntropyController(saving=0, window=50, **options)  # type: ignore[arg-type]
    state, step, trace = controller.init(LAYOUT), 2, []
    seen: Observation | None = None
    while step < FOREVER and len(trace) < decisions:
        state, plan = controller.decide(state, seen, step)
        trace.append((step, plan))
        rank = max(plan.ranks.values())
        entropy = {m.name: -5.0 for m in LAYOUT.matrices}
        seen = Observation(plan.until - step, entropy, span_seconds=seconds(rank, step))
        step = plan.until
    return trace


@pytest.mark.parametrize("longer", [1.001, 1.1, 3.0])
def test_on_a_link_where_every_rank_takes_longer_than_dense_the_plan_is_dense(
    longer: float,
) -> None:
    trace = drive(lambda rank, step: DENSE_S * longer if rank else DENSE_S)
    _, last = trace[-1]
    assert (last.phase, last.until, set(last.ranks.values())) == ("dense", FOREVER, {0})
    assert "dense 30 ms: compression does not pay" in last.reason
    # One rank was tried, for a few iterations, and against the dense time of this very run.
    assert [plan.ranks["w"] for _, plan in trace if any(plan.ranks.values())] == [2]


def test_trials_that_only_seemed_to_pay_are_found_out_and_the_plan_is_dense() -> None:
    """Short trials are noisy: these say 20 ms, the windows after them 33 ms, dense 30 ms."""
    trace = drive(lambda rank, step: (0.020 if step < 80 else 0.033) if rank else DENSE_S)
    phases = [plan.phase for _, plan in trace]
    first = phases.index("compress")
    assert phases[first:] == ["compress", "calibration", "dense"]
    assert not any(trace[-2][1].ranks.values()) and not any(trace[-1][1].ranks.values())
    assert trace[-2][1].until - trace[-2][0] == 5
    assert "dense takes 30 ms by now, the last window took 33 ms" in trace[-1][1].reason


def test_a_link_that_slows_ranks_down_lowers_the_bound_to_where_they_pay() -> None:
    """T(r) = 10 + r ms pays up to 20; 1.5 times as long it pays up to 10, so 8."""
    trace = drive(
        lambda rank, step: (0.010 + rank / 1000) * (1.5 if step > 150 else 1) if rank else DENSE_S
    )
    found = [plan.ranks["w"] for _, plan in trace if plan.phase == "compress"]
    assert found[:2] == [20, 20] and set(found[3:]) == {8}


def test_a_machine_that_slows_everything_down_changes_no_rank() -> None:
    def seconds(rank: int, step: int) -> float:
        return (0.010 + rank / 1000 if rank else DENSE_S) * (2 if step > 150 else 1)

    trace = drive(seconds)
    assert {plan.ranks["w"] for _, plan in trace if plan.phase == "compress"} == {20}
    rechecks = [plan for step, plan in trace if step > 150 and plan.phase == "calibration"]
    assert len(rechecks) == 1
    assert "dense takes 60 ms by now, the last window took 60 ms: ranks kept" in {
        plan.reason for _, plan in trace
    }


def test_given_bounds_are_not_second_guessed() -> None:
    trace = drive(lambda rank, step: 1.0 if rank else DENSE_S, r_max=16)
    assert {plan.phase for _, plan in trace} == {"warmup", "compress"}


def test_asked_again_without_a_measurement_dense_is_timed_again() -> None:
    controller = EntropyController(window=50)
    state, step, seen = controller.init(LAYOUT), 0, None
    for span in (DENSE_S, 0.010, 0.010, 0.010, 0.010, 0.010, 0.010, 0.040):
        state, plan = controller.decide(state, seen, step)
        seen, step = Observation(5, {"w": -5.0, "v": -5.0}, span_seconds=span), plan.until
    state, timing = controller.decide(state, seen, step)
    assert timing.phase == "calibration" and "timing dense again" in timing.reason
    again, repeated = controller.decide(state, None, step)
    assert (again, repeated) == (state, timing)
    _, kept = controller.decide(state, Observation(5), timing.until)
    assert kept.phase == "compress" and "unmeasured time" in kept.reason
