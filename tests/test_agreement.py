"""What ranks must share is compared before it can hang them; what they are given is checked."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks
from scenes import Given, averages, draw, wrap

from edgc_ddp import EDGCState, agreement, edgc_hook
from edgc_ddp.agreement import checked_plan
from edgc_ddp.checkpoint import merge
from edgc_ddp.controllers import Dense, EntropyController, FixedRank, Scheduled, Selective
from edgc_ddp.decisions import Layout, MatrixSpec, Plan, Sampling

Pools = Callable[[int], Ranks]
SHAPES = [(24, 40), (40, 24), (16,)]


def unlike_options(rank: int, world: int, options: list[dict[str, Any]]) -> str:
    state = EDGCState(controller=FixedRank(4), **options[rank])
    ddp = wrap(Given(SHAPES), state)
    with pytest.raises(RuntimeError) as caught:
        for step in range(6):
            averages(ddp, draw(SHAPES, seed=step))
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        [{"wire_dtype": "fp32"}, {"wire_dtype": "int8"}],
        [{"dense_dtype": "int8"}, {}],
        [{"start_iter": 2}, {"start_iter": 3}],
        [{"error_feedback": False}, {}],
        [{"min_compression_rate": 4.0}, {}],
        [{"seed": 1}, {}],
    ],
)
def test_ranks_with_other_options_are_told(ranks: Pools, options: list[dict[str, Any]]) -> None:
    """They would wait for each other for ever, or average with different bases."""
    for message in ranks(2)(unlike_options, options):
        assert "rank 0 has <iteration 0" in message and "rank 1 has <iteration 0" in message
        assert "the same options on all ranks" in message


def unlike_arithmetic(rank: int, world: int, threads: bool) -> str:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        if threads:
            torch.set_num_threads(1 + rank)
        elif rank == 1:
            # As another library would: the last bit of some results.
            exactly = agreement.orthonormalise
            patch.setattr(agreement, "orthonormalise", lambda p_MR: exactly(p_MR) * (1 + 2**-23))
        ddp = wrap(Given(SHAPES), EDGCState(controller=FixedRank(4)))
        try:
            with pytest.raises(RuntimeError) as caught:
                averages(ddp, draw(SHAPES, seed=0))
        finally:
            torch.set_num_threads(before)
    return str(caught.value)


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "results"])
def test_ranks_that_would_drift_apart_are_told(ranks: Pools, threads: bool) -> None:
    """Plain DDP gives every rank the same average whatever it runs on; here each forms it for itself."""
    for message in ranks(2)(unlike_arithmetic, threads):
        assert "weights drift apart" in message and "torch.set_num_threads" in message
        assert (
            "rank 0 has <1 threads" in message and "rank 1 has <2 threads" in message
        ) == threads


def some_state(rank: int, world: int) -> dict[str, Any]:
    state = EDGCState(controller=FixedRank(3))
    ddp = wrap(Given(SHAPES), state)
    for step in range(5):
        averages(ddp, draw(SHAPES, seed=10 * step + rank))
    return state.state_dict()


def load_everywhere(rank: int, world: int, saved: dict[str, Any]) -> str:
    state = EDGCState(controller=FixedRank(3))
    try:
        state.load_state_dict(saved)
    except ValueError as refused:
        return str(refused)
    return f"loaded, of rank {state.engine.origin}"


def away_from_its_group(rank: int, world: int, saved: list[dict[str, Any]]) -> int | None:
    """A state says whose it is after its group is gone, and goes on where its rank has another number."""
    state = EDGCState(controller=FixedRank(3))
    state.load_state_dict(saved[rank])
    ddp = wrap(Given(SHAPES), state)
    averages(ddp, draw(SHAPES, seed=rank))
    other = SimpleNamespace(world_size=2, rank=1 - rank, device=torch.device("cpu"))
    state.engine._check_loaded(other)  # type: ignore[arg-type]
    averages(ddp, draw(SHAPES, seed=rank))
    state.close()
    averages(ddp, draw(SHAPES, seed=rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EDGCState, "_rank", lambda self: None)
        patch.setattr(EDGCState, "_world_size", lambda self: 0)
        found: int | None = state.state_dict()["rank"]
    return found


def test_a_state_knows_whose_it_is_without_a_group(ranks: Pools) -> None:
    assert ranks(2)(away_from_its_group, ranks(2)(some_state)) == [0, 1]


def test_residuals_under_several_loss_scales_are_merged_under_one(ranks: Pools) -> None:
    """A rank that ran out of data keeps the scale of its last step."""
    states = ranks(2)(some_state)
    for state, scale in zip(states, (2.0, 8.0), strict=True):
        state["progress"]["loss_scale"] = state["loss_scale"] = scale
    merged = merge(states, 2)
    for name, slot in merged["slots"].items():
        owed = [state["slots"][name]["residual"] for state in states]
        if slot["residual"] is not None:
            torch.testing.assert_close(slot["residual"], (owed[0] + owed[1] / 4) / 2)


def test_one_ranks_state_on_all_is_refused(ranks: Pools) -> None:
    states = ranks(2)(some_state)
    assert [state["rank"] for state in states] == [0, 1]
    first, second = ranks(2)(load_everywhere, states[0])
    assert first == "loaded, of rank 0"
    assert "rank 1 was given the state of rank 0" in second and "merge" in second
    assert ranks(2)(load_everywhere, merge(states, 2)) == ["loaded, of rank None"] * 2
    # Loaded and saved where there is no process group, it stays that rank's.
    state = EDGCState(controller=FixedRank(3))
    state.load_state_dict(states[1])
    assert state.state_dict()["rank"] == 1
    for engine in (state.engine, copy.deepcopy(state).engine):
        lane = SimpleNamespace(world_size=2, rank=0, device=torch.device("cpu"))
        with pytest.raises(ValueError, match="rank 0 was given the state of rank 1"):
            engine._check_loaded(lane)
    with pytest.raises(ValueError, match="rank 'first' of 2"):
        state.load_state_dict({**states[1], "rank": "first"})


def load_on_one(rank: int, world: int, saved: dict[str, Any]) -> str:
    state = EDGCState(controller=FixedRank(3))
    if rank == 0:
        state.load_state_dict(saved)
    ddp = wrap(Given(SHAPES), state)
    with pytest.raises(RuntimeError) as caught:
        averages(ddp, draw(SHAPES, seed=rank))
    return str(caught.value)


def test_a_state_loaded_on_one_rank_only_is_told(ranks: Pools) -> None:
    for message in ranks(2)(load_on_one, ranks(2)(some_state)[0]):
        assert "rank 0 has <iteration 5" in message and "rank 1 has <iteration 0" in message
        assert "load a state on all or on none" in message


def without_a_state(rank: int, world: int) -> str:
    ddp = wrap(Given(SHAPES), None)
    ddp.register_comm_hook(None, edgc_hook)
    with pytest.raises(ValueError) as caught:
        averages(ddp, draw(SHAPES, seed=rank))
    return str(caught.value)


def test_a_hook_without_its_state_says_how_to_register_it(ranks: Pools) -> None:
    for message in ranks(2)(without_a_state):
        assert "state=None: write ddp.register_comm_hook(EDGCState(model=ddp.module)" in message


@pytest.mark.parametrize("option", ["model", "process_group"])
def test_what_is_no_module_and_no_group_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}='gloo': expected")):
        EDGCState(**{option: "gloo"})  # type: ignore[arg-type]


class NoInit:
    def decide(self, state: Any, observation: Any, step: int) -> Any: ...


def test_a_controller_without_a_beginning_is_refused() -> None:
    for given in (NoInit(), FixedRank):
        with pytest.raises(ValueError, match=r"expected an object with init\(layout\) and decide"):
            EDGCState(given)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected a controller"):
            Selective(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ranks": {}}, "differ in matrix 'w'"),
        ({"ranks": {"w": 4, "x": 1}}, "differ in matrix 'x'"),
        ({"ranks": {"w": 2.0}}, "gave rank 2.0 for 'w'"),
        ({"ranks": {"w": -1}}, "gave rank -1 for 'w'"),
        ({"until": 7}, "ends at iteration 7, but it is 7 now"),
        ({"until": 8.5}, "ends at iteration 8.5"),
        ({"probe_rank": -3}, "probe_rank=-3: expected an int >= 0"),
        ({"probe_rank": True}, "probe_rank=True"),
        ({"reason": None}, "phase='mine' and reason=None: expected texts"),
        ({"phase": 3}, "phase=3 and reason=''"),
        ({"sampling": Sampling(alpha=2)}, "alpha=2 and beta=0.25: expected shares"),
        ({"sampling": Sampling(beta=0)}, "alpha=0.1 and beta=0: expected shares"),
        ({"sampling": Sampling(estimator="gausian")}, "'gausian' is not known"),
    ],
)
def test_a_strangers_plan_is_looked_at(change: dict[str, Any], told: str) -> None:
    layout = Layout((MatrixSpec("w", 8, 16),))
    plan = Plan({"w": 40}, "mine", until=9, sampling=Sampling())
    assert dict(checked_plan(plan, layout, 7).ranks) == {"w": 8}
    with pytest.raises(ValueError, match=re.escape(told)):
        checked_plan(replace(plan, **change), layout, 7)


def measured(rank: int, world: int, milestones: dict[int, int], window: int | None) -> list[float]:
    state = EDGCState(controller=Scheduled(milestones, window=window))
    ddp = wrap(Given(SHAPES), state)
    for step in range(13):
        averages(ddp, draw(SHAPES, seed=10 * step + rank))
    return [entry["residual"] for entry in state.history]


@pytest.mark.parametrize("window", [None, 5])
def test_a_residual_that_was_not_measured_is_not_zero(ranks: Pools, window: int | None) -> None:
    """Zero would read as lossless."""
    first, *later = ranks(2)(measured, {2: 1, 8: 2}, window)[0]
    assert math.isnan(first) and len(later) >= 1
    if window is None:
        assert all(math.isnan(share) for share in later)
    else:
        # The window before a milestone may be too short to be sampled.
        seen = [share for share in later if not math.isnan(share)]
        assert seen and all(0.5 < share < 1 for share in seen)


def told(rank: int, world: int, controller: Any) -> list[tuple[str, str]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("edgc_ddp")
    logger.addHandler(handler)
    before, level = logger.level, logging.INFO
    logger.setLevel(level)
    try:
        state = EDGCState(controller=controller)
        ddp = wrap(Given(SHAPES), state)
        for step in range(40):
            averages(ddp, draw(SHAPES, seed=10 * step + rank))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return [(record.levelname, record.getMessage()) for record in records]


def test_going_dense_is_said_aloud_by_one_rank(ranks: Pools) -> None:
    """On loopback a matrix this small never pays."""
    first, second = ranks(2)(told, EntropyController(window=5, warmup=5))
    assert second == []
    level, text = first[-1]
    assert level == "WARNING" and "phase dense after calibration: " in text
    assert [level for level, _ in first[:-1]] == ["INFO"] * (len(first) - 1)
    asked, _ = ranks(2)(told, Dense())
    assert [level for level, _ in asked] == ["INFO"]


@pytest.mark.parametrize(
    "option",
    [
        {"wire_dtype": "fp8"},
        {"wire_dtype": ["fp32"]},
        {"wire_dtype": torch.bfloat16},
        {"dense_dtype": None},
        {"residual_dtype": "int8"},
        {"start_iter": 1},
        {"start_iter": 2.0},
        {"error_feedback": "no"},
        {"min_compression_rate": True},
        {"min_compression_rate": math.nan},
        {"min_compression_rate": -1},
        {"seed": -1},
        {"seed": True},
    ],
)
def test_an_option_out_of_range_is_named(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: expected")):
        EDGCState(**option)
