"""Every controller keeps one contract; the entropy policies follow traces worked out by hand.

A new controller joins by adding a row to ``CASES``.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edgc_ddp.controllers import (
    CONTROLLERS,
    Accordion,
    AdaptiveController,
    Dense,
    EntropyController,
    FixedRank,
    LGreco,
    Scheduled,
    Selective,
)
from edgc_ddp.decisions import FOREVER, Controller, Layout, MatrixSpec, Observation, Plan, State

LAYOUT = Layout(
    (
        MatrixSpec("wte", 256, 1024),
        MatrixSpec("h.0.attn.w", 256, 256),
        MatrixSpec("h.0.mlp.w", 128, 512),
        MatrixSpec("small", 16, 256),
    )
)
SQUARE = Layout((MatrixSpec("w", 1920, 1920),))
DENSE_SECONDS = 0.030


# -- A stand-in for the engine ---------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    step: int
    plan: Plan


def seconds_at(rank: int) -> float:
    return 0.010 + 0.001 * rank


@functools.cache
def spectrum_at(entropy: float, matrix: MatrixSpec, place: int) -> tuple[float, ...]:
    """Energies that grow with the entropy and fall more slowly the higher it is, by a ratio that is
    another for every matrix."""
    total = matrix.numel * math.exp(min(2 * entropy, 700.0))
    ratio = min(0.97, max(0.5, 0.95 - 0.04 * place + 0.02 * (entropy + 5.0)))
    ratio = ratio if math.isfinite(entropy) else math.nan
    shares = [ratio**k for k in range(matrix.rows)]
    whole = sum(shares)
    return tuple(total * share / whole for share in shares)


@dataclass(frozen=True)
class World:
    """What the engine would measure: ``entropies[k]`` in compressed window k (the last goes on),
    ``dense_entropy`` before, a time per rank and the energy that each rank leaves. Gradients have as
    much energy as their entropy says (:func:`spectrum_at`)."""

    entropies: tuple[float, ...] = (-5.0,)
    dense_entropy: float = -5.0
    seconds: Callable[[int], float] = seconds_at
    dense_seconds: float = DENSE_SECONDS
    energy: Callable[[int], float] = lambda step: 1.0
    curve: Callable[[float, int], tuple[float, ...]] = lambda energy, rank: tuple(
        energy * (1 - k / (2 * rank)) for k in range(rank + 1)
    )

    def observe(self, layout: Layout, plan: Plan, step: int, window: int) -> Observation:
        dense = not any(plan.ranks.values())
        rank = max(plan.ranks.values(), default=0)
        nth = min(window, len(self.entropies) - 1)
        entropy = self.dense_entropy if window < 0 else self.entropies[nth]
        entropy = entropy if plan.sampling else math.nan
        spectra = {
            m.name: spectrum_at(entropy, m, place) for place, m in enumerate(layout.matrices)
        }
        ranks = {m.name: min(plan.ranks[m.name], m.rows) for m in layout.matrices}
        return Observation(
            steps=plan.until - step,
            entropy={m.name: entropy for m in layout.matrices},
            gradient_energy={name: sum(energies) for name, energies in spectra.items()},
            captured={name: spectra[name][:rank] for name, rank in ranks.items()},
            left={
                name: sum(spectra[name][rank:]) if rank else math.nan
                for name, rank in ranks.items()
            },
            span_seconds=self.dense_seconds if dense else self.seconds(rank),
            error_curve=self.curve(self.energy(plan.until), plan.probe_rank)
            if plan.probe_rank
            else (),
        )


def drive(
    controller: Controller,
    world: World,
    layout: Layout = LAYOUT,
    *,
    start: int = 2,
    decisions: int = 40,
    travel: Callable[[State], State] = lambda state: state,
) -> list[Decision]:
    """Ask the controller as the engine does: first with nothing seen, then at each plan's end."""
    state, step, observation, window = controller.init(layout), start, None, -1
    trace: list[Decision] = []
    while step < FOREVER and len(trace) < decisions:
        state, plan = controller.decide(travel(state), observation, step)
        trace.append(Decision(step, plan))
        if plan.phase in ("compress", "scheduled", "fixed"):
            window += 1
        observation = world.observe(layout, plan, step, window)
        step = plan.until
    return trace


def checkpoint(state: State) -> State:
    loaded: State = json.loads(json.dumps(state, allow_nan=False))
    assert loaded == state
    return loaded


def compressed(trace: list[Decision]) -> list[dict[str, int]]:
    return [dict(each.plan.ranks) for each in trace if each.plan.phase == "compress"]


def ranks_of(trace: list[Decision], name: str = "w") -> list[int]:
    return [ranks[name] for ranks in compressed(trace)]


# -- The contract ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    controller: Controller
    low: int
    high: int
    adaptive: bool = True
    step_limit: int = 4
    reads_entropy: bool = True
    """Else the energies: then the first windows look for ranks, and later ones keep them."""
    trades: bool = False
    """A spike makes it move ranks from one matrix to another, not raise them."""


def entropy_controller(**options: Any) -> EntropyController:
    return EntropyController(**{"window": 50, "warmup": 40, "r_max": 32, **options})


CASES = {
    "dense": Case(Dense(), 0, 0, adaptive=False),
    "fixed": Case(FixedRank(8, window=50), 8, 8, adaptive=False),
    "scheduled": Case(Scheduled({60: 8, 200: 24, 400: 0}, window=50), 0, 24, adaptive=False),
    "entropy": Case(entropy_controller(), 8, 32),
    "entropy measured": Case(entropy_controller(r_max=None, saving=0), 5, 20),
    "entropy previous": Case(entropy_controller(reference="previous"), 8, 32),
    "entropy exponent 1": Case(
        entropy_controller(exponent=1, r_min=9, step_limit=5), 9, 32, True, 5
    ),
    "entropy matrix": Case(entropy_controller(scope="matrix"), 8, 32),
    "entropy code": Case(entropy_controller(policy="edgc_code", r_min=7), 7, 32),
    "entropy code matrix": Case(entropy_controller(policy="edgc_code", scope="matrix"), 8, 32),
    "entropy shares": Case(entropy_controller(window=0.05, warmup=0.1, total_steps=1000), 8, 32),
    "accordion": Case(Accordion(16, 4, window=50), 4, 16, step_limit=12, reads_entropy=False),
    "accordion shares": Case(
        Accordion(16, 1, threshold=0.3, window=0.05, total_steps=1000), 1, 16, True, 15, False
    ),
    "lgreco": Case(LGreco(8, window=50, step_limit=4), 4, 16, reads_entropy=False, trades=True),
    "lgreco relative": Case(
        LGreco(8, window=50, r_max=12, relative=True), 4, 12, True, 8, False, trades=True
    ),
    "adaptive": Case(
        AdaptiveController(window=50, warmup=40), 1, 60, reads_entropy=False, trades=True
    ),
    "adaptive target": Case(
        AdaptiveController(window=50, warmup=None, target=0.3, r_min=2, r_max=40, step_limit=5),
        2,
        40,
        step_limit=5,
        reads_entropy=False,
    ),
    "adaptive target from the start": Case(
        AdaptiveController(window=50, target=0.3), 1, 60, reads_entropy=False
    ),
    "adaptive both": Case(
        AdaptiveController(window=0.05, total_steps=1000, target=0.01, budget=0.05),
        1,
        60,
        reads_entropy=False,
        trades=True,
    ),
    "adaptive cost": Case(
        AdaptiveController(window=50, warmup=0, cost=lambda matrix: 100.0 + matrix.cols),
        1,
        60,
        reads_entropy=False,
        trades=True,
    ),
    "selective": Case(Selective(entropy_controller(), compress=("h.*",), dense=("*mlp*",)), 8, 32),
}

WORLDS = {
    "silence": World(),
    "falling": World(tuple(-5 - 0.02 * k for k in range(30))),
    "rising": World(tuple(-5 + 0.02 * k for k in range(30))),
    "spikes": World((-5.0, -5.1, 30.0, -5.1, -900.0, 900.0, -5.0)),
    "nan": World((math.nan,), dense_entropy=math.nan),
    "inf": World((math.inf, -math.inf), dense_entropy=-math.inf),
    "gaps": World((-5.0, math.nan, -5.1, math.inf, -5.2, math.nan, -4.0)),
    "unmeasured": World(
        dense_seconds=math.nan, seconds=lambda rank: math.nan, curve=lambda energy, rank: ()
    ),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
each_world = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())


def test_every_controller_of_the_catalogue_is_under_contract() -> None:
    assert {name.split()[0] for name in CASES} == set(CONTROLLERS)
    for name, case in CASES.items():
        assert type(case.controller) is CONTROLLERS[name.split()[0]]


@each_world
@each_case
def test_plans_are_well_formed_and_keep_bounds_and_step_limit(case: Case, world: World) -> None:
    trace = drive(case.controller, world)
    for step, plan in ((each.step, each.plan) for each in trace):
        assert list(plan.ranks) == [matrix.name for matrix in LAYOUT.matrices]
        assert plan.until > step
        assert plan.reason
        for matrix in LAYOUT.matrices:
            rank = plan.ranks[matrix.name]
            assert type(rank) is int and 0 <= rank <= matrix.rows
            assert plan.phase != "warmup" or rank == 0
            assert plan.phase == "calibration" or rank <= case.high
            if plan.phase == "compress" and rank:
                assert rank >= min(case.low, matrix.rows)
    windows = compressed(trace)
    for before, after in zip(windows, windows[1:], strict=False):
        assert all(abs(after[name] - before[name]) <= case.step_limit for name in before)


@each_world
@each_case
def test_equal_questions_get_equal_answers_and_leave_the_memory_alone(
    case: Case, world: World
) -> None:
    handed: list[tuple[State, State]] = []

    def note(state: State) -> State:
        handed.append((state, copy.deepcopy(state)))
        return state

    assert drive(case.controller, world, travel=note) == drive(case.controller, world)
    assert all(state == copied for state, copied in handed)


@each_world
@each_case
def test_memory_survives_a_checkpoint_at_every_decision(case: Case, world: World) -> None:
    assert drive(case.controller, world, travel=checkpoint) == drive(case.controller, world)


@each_case
def test_silence_changes_nothing(case: Case) -> None:
    trace = drive(case.controller, WORLDS["silence"])
    if case.adaptive:
        windows = compressed(trace)
        assert len(windows) > 20
        settled = windows[0] if case.reads_entropy else windows[15]
        assert all(ranks == settled for ranks in windows[0 if case.reads_entropy else 15 :])
        if case.reads_entropy:
            assert max(windows[0].values()) == case.high
    else:
        assert trace == drive(case.controller, WORLDS["spikes"])


@each_case
def test_a_spike_raises_ranks_by_no_more_than_the_limit(case: Case) -> None:
    before_it = (-5.0,) + (-5.1,) * 15
    quiet, spiked = (drive(case.controller, World((*before_it, last))) for last in (-5.1, -4.0))
    if not case.adaptive:
        assert quiet == spiked
        return
    before, after = compressed(spiked)[16:18]
    assert compressed(quiet)[16] == before
    rises = [after[name] - before[name] for name in before]
    assert 0 < max(rises) <= case.step_limit
    if case.trades:
        return
    assert min(rises) >= 0


@pytest.mark.parametrize("world", [WORLDS["nan"], WORLDS["inf"]], ids=["nan", "inf"])
@each_case
def test_without_a_finite_entropy_ranks_stay(case: Case, world: World) -> None:
    trace = drive(case.controller, world)
    if case.reads_entropy:
        silence = drive(case.controller, WORLDS["silence"])
        assert [each.plan.ranks for each in trace] == [each.plan.ranks for each in silence]
    else:
        windows = compressed(trace)
        assert len(windows) > 20
        assert all(ranks == windows[0] for ranks in windows)


@each_case
def test_a_model_without_matrices_gets_an_empty_plan(case: Case) -> None:
    trace = drive(case.controller, World(), Layout(()), decisions=3)
    assert all(each.plan.ranks == {} and each.plan.until > each.step for each in trace)


# -- Golden traces: the paper's policy -------------------------------------------------------------


def windows(controller: EntropyController, *entropies: float, layout: Layout = SQUARE) -> list[int]:
    trace = drive(controller, World(entropies), layout)
    return ranks_of(trace)[: len(entropies) + 1]


def test_edgc_reproduces_the_table_of_the_marchenko_pastur_law() -> None:
    """On 1920 x 1920 the table has G(64) = .8809, G(32) = .9379, G(16) = .9681, G(4) = .9918."""
    controller = entropy_controller(r_max=64, r_min=1, step_limit=100)
    for share, rank in ((0.9379, 32), (0.9681, 16), (0.9918, 4)):
        entropy = -5.0 - 0.5 * math.log(share / 0.8809)
        assert windows(controller, entropy)[1] == pytest.approx(rank, abs=1)


def test_the_exponent_halves_the_change_of_entropy_needed() -> None:
    squared = entropy_controller(r_max=64, r_min=1, step_limit=100)
    root = entropy_controller(r_max=64, r_min=1, step_limit=100, exponent=1)
    assert windows(squared, -5.01, -5.02, -5.03) == windows(root, -5.02, -5.04, -5.06)


def test_edgc_trace_from_the_anchor() -> None:
    controller = entropy_controller(r_max=64)
    trace = windows(controller, -5.0, -5.005, -5.02, -5.02, -5.02, -5.02, -5.5, -5.01, -4.0)
    assert trace == [64, 64, 60, 56, 52, 48, 44, 40, 44, 48]


def test_edgc_moves_freely_without_a_step_limit_in_the_way() -> None:
    controller = entropy_controller(r_max=64, step_limit=64)
    assert windows(controller, -5.005, -5.01, -5.02, -5.03, -6.0, -4.0) == [
        64, 58, 53, 43, 33, 16, 64,
    ]  # fmt: skip


def test_the_previous_window_as_reference_answers_changes_only() -> None:
    controller = entropy_controller(r_max=64, reference="previous")
    assert windows(controller, -5.02, -5.02, -5.02, -5.5, -5.5) == [64, 60, 60, 60, 56, 56]


def test_small_noise_against_the_previous_window_does_not_wear_the_rank_down() -> None:
    controller = entropy_controller(r_max=64, reference="previous")
    noise = [-5.02 + (1e-5 if k % 2 else 0.0) for k in range(36)]
    assert min(windows(controller, *noise)) >= 59


def test_scope_matrix_decides_by_each_matrix_and_stage_by_all() -> None:
    class OnlyMlpFalls(World):
        def observe(self, layout: Layout, plan: Plan, step: int, window: int) -> Observation:
            seen = super().observe(layout, plan, step, window)
            fallen = {"h.0.mlp.w": -5.3} if window >= 0 else {}
            return Observation(seen.steps, {**seen.entropy, **fallen}, seen.span_seconds)

    first, second = compressed(drive(entropy_controller(scope="matrix"), OnlyMlpFalls()))[:2]
    assert first == {"wte": 32, "h.0.attn.w": 32, "h.0.mlp.w": 32, "small": 16}
    assert second == {**first, "h.0.mlp.w": 28}
    stage = compressed(drive(entropy_controller(step_limit=30), OnlyMlpFalls()))[1]
    assert stage["wte"] == stage["h.0.attn.w"] == stage["h.0.mlp.w"] < 32


def test_a_matrix_without_samples_is_left_out_of_both_sides_of_the_comparison() -> None:
    class Uneven(World):
        def observe(self, layout: Layout, plan: Plan, step: int, window: int) -> Observation:
            last = math.nan if window >= 0 else -9.0
            return Observation(
                plan.until - step,
                {m.name: last if m.name == "wte" else -5.0 for m in layout.matrices},
            )

    trace = compressed(drive(entropy_controller(), Uneven()))
    assert all(ranks == trace[0] for ranks in trace)


def test_reasons_say_what_happened() -> None:
    controller = entropy_controller(r_max=64)
    trace = drive(controller, World((-5.02, math.nan, -5.001)), SQUARE)
    reasons = [each.plan.reason for each in trace if each.plan.phase == "compress"]
    assert reasons[1] == "entropy -5.00 -> -5.02: rank 64 -> 60 (step limit 4)"
    assert reasons[2] == "no finite entropy in the window: rank 60 kept"
    assert reasons[3] == "entropy -5.00 -> -5.00: rank 60 -> 62"


# -- Golden traces: the authors' code --------------------------------------------------------------


def test_edgc_code_trace() -> None:
    """Speeds .4 (the reference), .1, .2, 0, 1, .25 (23, floored to even) between 8 and 32."""
    controller = entropy_controller(policy="edgc_code", step_limit=24)
    trace = windows(controller, 0.0, -0.4, -0.5, -0.7, -0.7, -1.7, -1.95)
    assert trace == [32, 32, 32, 14, 20, 8, 32, 22]
    limited = entropy_controller(policy="edgc_code")
    assert windows(limited, 0.0, -0.4, -0.5, -0.7, -0.7, -1.7) == [32, 32, 32, 28, 24, 20, 24]


def test_edgc_code_waits_for_a_speed_to_compare_with() -> None:
    controller = entropy_controller(policy="edgc_code", step_limit=24)
    assert windows(controller, -5.0, -5.0, -5.0, -5.4, -5.5) == [32, 32, 32, 32, 32, 14]


# -- Golden traces: warm-up and measured bounds ----------------------------------------------------


def test_calibration_trace() -> None:
    """Dense takes 30 ms, rank r 10 ms + r ms: break-even is rank 20, found between 16 and 32."""
    controller = EntropyController(window=50, warmup=100, calibration_steps=3, saving=0)
    trace = drive(controller, World(), decisions=9)
    told = [(each.step, each.plan.phase, each.plan.ranks["wte"], each.plan.until) for each in trace]
    assert told == [
        (2, "warmup", 0, 52),
        (52, "warmup", 0, 102),
        (102, "calibration", 2, 105),
        (105, "calibration", 4, 108),
        (108, "calibration", 8, 111),
        (111, "calibration", 16, 114),
        (114, "calibration", 32, 117),
        (117, "compress", 20, 167),
        (167, "compress", 20, 217),
    ]
    assert trace[7].plan.reason == (
        "averaging breaks even with dense (30 ms) at rank 20: start at rank 20"
    )


@pytest.mark.parametrize(
    ("saving", "tried", "r_max"),
    # Rank 2 takes 12 ms and saves 18; rank 8 saves 12, rank 16 saves 4.
    [(0.5, [2, 4, 8, 16], 8), (0.75, [2, 4, 8], 4), (0.9, [2, 4], 4), (1.0, [2, 4], 4)],
)
def test_calibration_keeps_most_of_the_time_saved(
    saving: float, tried: list[int], r_max: int
) -> None:
    """At break-even all of it would be given away."""
    controller = EntropyController(window=50, warmup=100, saving=saving)
    trace = drive(controller, World(), decisions=9)
    trials = [each.plan.ranks["wte"] for each in trace if each.plan.phase == "calibration"]
    first = next(each.plan for each in trace if each.plan.phase == "compress")
    assert trials == tried and first.ranks["wte"] == r_max
    assert f"rank {r_max} keeps {saving:.0%} of what" in first.reason
    assert "(12 ms) saves against dense (30 ms)" in first.reason


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-300, math.inf])
@pytest.mark.parametrize("saving", [0, 0.9])
def test_times_that_no_average_takes_count_as_unmeasured(seconds: float, saving: float) -> None:
    def at(odd: int) -> list[Decision]:
        times = World(seconds=lambda rank: seconds if rank == odd else seconds_at(rank))
        return drive(EntropyController(window=50, saving=saving), times)

    assert at(2)[-1].plan.phase == "dense"
    assert "an unmeasured time" in at(2)[-1].plan.reason
    assert {ranks["wte"] for ranks in compressed(at(8))} == {4}


def test_a_saving_within_the_noise_is_none() -> None:
    trace = drive(EntropyController(window=50), World(seconds=lambda rank: 0.0295))
    assert trace[-1].plan.phase == "dense" and "does not pay" in trace[-1].plan.reason


def test_calibration_stops_at_the_largest_useful_rank() -> None:
    controller = EntropyController(window=50)
    layout = Layout((MatrixSpec("w", 100, 100),))
    trace = drive(controller, World(seconds=lambda rank: 0.001), layout)
    tried = [each.plan.ranks["w"] for each in trace if each.plan.phase == "calibration"]
    assert tried == [2, 4, 8, 16, 32, 50]
    assert ranks_of(trace)[0] == 48


def test_calibration_clips_r_min_and_says_so() -> None:
    trace = drive(EntropyController(window=50, r_min=24, saving=0), World((-5.0, -9.0)))
    first = next(each.plan for each in trace if each.plan.phase == "compress")
    assert "r_min=24 becomes 20" in first.reason
    assert all(ranks["wte"] == 20 for ranks in compressed(trace))


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (
            World(seconds=lambda rank: 0.031),
            "averaging at rank 2 takes 31 ms, dense 30 ms: compression does not pay on this link",
        ),
        (
            World(seconds=lambda rank: 0.015 * rank),
            "averaging at rank 4 takes 60 ms, dense 30 ms: compression does not pay on this link",
        ),
        (
            World(seconds=lambda rank: math.nan),
            "averaging at rank 2 takes an unmeasured time, dense 30 ms: "
            "compression does not pay on this link",
        ),
        (
            World(dense_seconds=math.inf),
            "the time of a dense average was not measured: give r_max",
        ),
    ],
    ids=["slow", "slow from rank 2 on", "nan", "dense unmeasured"],
)
def test_never_slower_where_compression_does_not_pay(world: World, reason: str) -> None:
    last = drive(EntropyController(window=50), world)[-1].plan
    assert (last.phase, last.until, last.reason) == ("dense", FOREVER, reason)
    assert not any(last.ranks.values())


def test_an_unmeasured_trial_falls_back_on_the_last_rank_that_paid() -> None:
    world = World(seconds=lambda rank: math.nan if rank > 8 else 0.001)
    trace = drive(EntropyController(window=50), world, travel=checkpoint)
    assert compressed(trace)[0]["wte"] == 8


def test_asked_again_without_a_measurement_calibration_repeats_its_trial() -> None:
    controller = EntropyController(window=50, warmup=50)
    state, _ = controller.decide(controller.init(LAYOUT), None, 0)
    state, plan = controller.decide(state, Observation(50, span_seconds=0.03), 50)
    again, repeated = controller.decide(state, None, 50)
    assert (again, repeated) == (state, plan)
    assert plan.phase == "calibration"


def warmup_end(world: World, **options: Any) -> tuple[int, str]:
    trace = drive(entropy_controller(**options), world, start=0)
    first = next(each for each in trace if each.plan.phase == "compress")
    return first.step, first.plan.reason


def test_warm_up_ends_when_the_low_rank_leaves_less_than_the_high_rank_left_early() -> None:
    """The curve is energy (1 - k / 64): rank 8 leaves .875 of it, rank 32 left .5 of the first."""
    step, reason = warmup_end(World(energy=lambda step: 1.0 if step < 60 else 0.5))
    assert step == 60
    assert reason == (
        "warm-up over, rank 8 would leave 0.438, rank 32 left 0.5 early: start at rank 32"
    )


def test_warm_up_never_ends_before_its_share() -> None:
    step, _ = warmup_end(World(energy=lambda step: 1.0 if step < 20 else 0.1))
    assert step == 40


def test_warm_up_ends_at_its_limit_at_the_latest() -> None:
    for options, expected in (({}, 120), ({"warmup_limit": 73}, 73), ({"warmup_limit": 40}, 40)):
        step, reason = warmup_end(World(), **options)
        assert step == expected
        assert reason.startswith("warm-up limit reached, rank 8 would leave 0.875")


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_warm_up_goes_by_time_alone_without_a_curve(value: float) -> None:
    world = World(curve=lambda energy, rank: (value,) * (rank + 1))
    assert warmup_end(world) == (40, "warm-up over: start at rank 32")


@pytest.mark.parametrize(
    ("options", "warmup", "window"),
    [
        ({"window": 100}, 100, 100),
        ({"window": 100, "total_steps": 4000}, 400, 100),
        ({"window": 0.05, "warmup": 0.2, "total_steps": 1000}, 200, 50),
        ({"window": 100, "warmup": 30}, 30, 100),
    ],
)
def test_durations(options: dict[str, Any], warmup: int, window: int) -> None:
    trace = drive(EntropyController(**options), World(), start=0)
    assert next(each.step for each in trace if each.plan.phase == "calibration") == warmup
    first = next(each for each in trace if each.plan.phase == "compress")
    assert first.plan.until - first.step == window


def test_warm_up_looks_four_times_and_asks_for_the_curve_up_to_r_max() -> None:
    trace = drive(entropy_controller(window=1000, r_max=24), World(), start=0)
    assert [each.step for each in trace[:5]] == [0, 10, 20, 30, 40]
    assert trace[0].plan.probe_rank == 24
    # With bounds to be measured nobody reads it, and its work would be taken for the average's.
    assert all(each.plan.probe_rank == 0 for each in drive(EntropyController(), World(), SQUARE))


@pytest.mark.parametrize("window", [3, 7, 10, 33])
def test_every_window_has_a_sampled_iteration(window: int) -> None:
    trace = drive(entropy_controller(window=window, warmup=window, alpha=0.01), World(), start=0)
    for each in trace:
        assert each.plan.sampling is not None
        assert any(each.plan.sampling.due(step) for step in range(each.step, each.plan.until))


def test_sampling_options_reach_the_plan() -> None:
    controller = entropy_controller(alpha=0.5, beta=0.05, estimator="histogram")
    for each in drive(controller, World(), decisions=10):
        assert each.plan.sampling is not None
        seen = (each.plan.sampling.alpha, each.plan.sampling.beta, each.plan.sampling.estimator)
        assert seen == (0.5, 0.05, "histogram")


# -- The simple controllers ------------------------------------------------------------------------


def test_fixed_rank_asks_to_be_called_only_for_metrics() -> None:
    once = drive(FixedRank(8), World())
    assert len(once) == 1 and once[0].plan.sampling is None
    assert once[0].plan.ranks == {"wte": 8, "h.0.attn.w": 8, "h.0.mlp.w": 8, "small": 8}
    trace = drive(FixedRank(20, window=100), World(), decisions=3)
    assert [each.step for each in trace] == [2, 102, 202]
    assert all(each.plan.sampling and each.plan.ranks["small"] == 16 for each in trace)


def test_dense_can_be_watched() -> None:
    assert [each.step for each in drive(Dense(window=10), World(), decisions=3)] == [2, 12, 22]


def test_scheduled_goes_both_ways_and_back_to_dense() -> None:
    trace = drive(Scheduled({"300": 8, 100: 4, 400: 0, 350: 6}), World())
    assert [(each.step, each.plan.ranks["wte"]) for each in trace] == [
        (2, 0), (100, 4), (300, 8), (350, 6), (400, 0),
    ]  # fmt: skip


def test_selective_hides_the_dense_matrices_from_the_inner_controller() -> None:
    controller = Selective(FixedRank(8), compress=("h.*", "wte"), dense=("*mlp*",))
    plan = drive(controller, World())[0].plan
    assert plan.ranks == {"wte": 8, "h.0.attn.w": 8, "h.0.mlp.w": 0, "small": 0}
    inner = drive(entropy_controller(), World((-5.1,)), Layout(LAYOUT.matrices[1:2]))
    outer = drive(Selective(entropy_controller(), compress=["*attn*"]), World((-5.1,)))
    assert ranks_of(outer, "h.0.attn.w") == ranks_of(inner, "h.0.attn.w")


# -- Complaints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: FixedRank(0), "rank=0: expected a whole number >= 1; use Dense()"),
        (lambda: FixedRank(True), "rank=True: expected a whole number"),
        (
            lambda: FixedRank(8, window=0),
            "window=0: expected a whole number >= 1; leave window out",
        ),
        (lambda: Dense(window=1.5), "window=1.5: expected a whole number"),
        (lambda: Scheduled({}), "milestones={}: expected a mapping of iteration to rank; write"),
        (lambda: Scheduled({10: -1}), "milestones[10]=-1: expected a whole number >= 0; use 0"),
        (lambda: Scheduled({-3: 1}), "milestones key=-3: expected a whole number >= 0; count"),
        (lambda: Scheduled({"x": 1}), "milestones key='x': expected a whole number"),
        (lambda: Scheduled({"5": 1, 5: 2}), "expected every step once; drop one 5"),
        (lambda: EntropyController(window=0), "window=0: expected a whole number of iterations"),
        (
            lambda: EntropyController(window=1.0),
            "window=1.0: expected a whole number of iterations",
        ),
        (lambda: EntropyController(window=0.1), "window=0.1: expected total_steps beside a share"),
        (lambda: EntropyController(warmup=0.1), "warmup=0.1: expected total_steps beside a share"),
        (
            lambda: EntropyController(warmup_limit=2),
            "warmup_limit=2: expected at least the warm-up",
        ),
        (lambda: EntropyController(total_steps=0), "total_steps=0: expected a whole number >= 1"),
        (lambda: EntropyController(r_max=0), "r_max=0: expected a whole number >= 1; leave r_max"),
        (lambda: EntropyController(r_min=2.5), "r_min=2.5: expected a whole number >= 1; leave"),
        (lambda: EntropyController(r_max=8, r_min=9), "r_min=9: expected at most r_max=8; lower"),
        (
            lambda: EntropyController(step_limit=0),
            "step_limit=0: expected a whole number >= 1; use",
        ),
        (lambda: EntropyController(calibration_steps=0), "calibration_steps=0: expected a whole"),
        (lambda: EntropyController(alpha=0), "alpha=0: expected a number in (0, 1]; 0.1 looks"),
        (lambda: EntropyController(beta=1.5), "beta=1.5: expected a number in (0, 1]; 0.25 uses"),
        (lambda: EntropyController(beta=math.nan), "beta=nan: expected a number in (0, 1]"),
        (lambda: EntropyController(estimator="gauss"), "estimator='gauss': expected one of"),
        (lambda: EntropyController(exponent=3), "exponent=3: expected one of 2, 1; choose"),
        (lambda: EntropyController(exponent=True), "exponent=True: expected one of 2, 1"),
        (
            lambda: FixedRank(np.int64(8)),
            "rank=np.int64(8): expected a whole number >= 1; write int(rank)",
        ),
        (
            lambda: EntropyController(reference="first"),
            "reference='first': expected one of 'anchor'",
        ),
        (lambda: EntropyController(policy="paper"), "policy='paper': expected one of 'edgc'"),
        (lambda: EntropyController(scope="layer"), "scope='layer': expected one of 'stage'"),
        (lambda: Accordion(8, 0), "low=0: expected a whole number >= 1; 1 is the strongest"),
        (lambda: Accordion(8, 9), "low=9: expected at most high=8; exchange the two"),
        (lambda: Accordion(8, 4, math.nan), "threshold=nan: expected a finite number >= 0; 0.5"),
        (lambda: Accordion(8, 4, window=0.1), "window=0.1: expected total_steps beside a share"),
        (lambda: LGreco(0), "rank=0: expected a whole number >= 1; use Dense()"),
        (lambda: LGreco(8, r_min=9), "r_min=9: expected bounds around rank=8; move the bound"),
        (lambda: LGreco(8, r_max=7), "r_max=7: expected bounds around rank=8; move the bound"),
        (lambda: LGreco(8, step_limit=0), "step_limit=0: expected a whole number >= 1; leave"),
        (lambda: LGreco(8, relative=1), "relative=1: expected True or False; True suits Adam"),  # type: ignore
        (lambda: AdaptiveController(budget=0), "budget=0: expected a number in (0, 1]; 0.25 sends"),
        (lambda: AdaptiveController(target=1), "target=1: expected a number below 1; 0.5 leaves"),
        (lambda: AdaptiveController(r_min=5, r_max=4), "r_min=5: expected at most r_max=4; lower"),
        (lambda: AdaptiveController(step_limit=0), "step_limit=0: expected a whole number >= 1"),
        (lambda: AdaptiveController(warmup=-1), "warmup=-1: expected a whole number of iterations"),
        (lambda: AdaptiveController(cost=3), "cost=3: expected a function of a MatrixSpec; leave"),  # type: ignore
        (
            lambda: LGreco(8, window=0.5, total_steps=0),
            "total_steps=0: expected a whole number >= 1",
        ),
        (lambda: Accordion(8, 4, total_steps="x"), "total_steps='x': expected a whole number"),  # type: ignore
        (lambda: Selective(8), "inner=8: expected a controller; give one"),
        (lambda: Selective(Dense(), compress="*"), "compress='*': expected a sequence of name"),
        (
            lambda: Selective(Dense(), dense=(1,)),
            "dense=(1,): expected a sequence of name patterns",
        ),
        (
            lambda: Selective(Dense(), compress=()),
            "compress=(): expected at least one pattern; use",
        ),
        (
            lambda: Selective(Dense(), dense=("*wpe*",)).init(LAYOUT),
            "dense='*wpe*': expected a pattern that matches a matrix; correct or drop it; "
            "the names are: wte, h.0.attn.w, h.0.mlp.w, small",
        ),
    ],
)
def test_bad_options_are_refused_with_option_value_and_remedy(
    build: Callable[[], object], says: str
) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert says in str(caught.value)
    assert "; " in str(caught.value)


def test_the_public_one_liner_needs_nothing_else() -> None:
    trace = drive(EntropyController(window=1000), World())
    assert trace[-1].plan.phase == "compress"
