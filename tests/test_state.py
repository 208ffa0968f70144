"""Checkpoints of the state: resume to the last bit, refusals, another world size."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks
from scenes import SMALL_BUCKETS_MB, Given, Mlp, averages, draw, train_step, wrap
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState
from edgc_ddp.checkpoint import merge
from edgc_ddp.controllers import (
    AdaptiveController,
    EntropyController,
    FixedRank,
    Scheduled,
    Selective,
)
from edgc_ddp.decisions import Controller
from edgc_ddp.maths.entropy import histogram

Pools = Callable[[int], Ranks]


def controller() -> EntropyController:
    return EntropyController(window=10, warmup=8, r_max=12, r_min=2, alpha=0.5, warmup_limit=10)


def through_disk(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def run(rank: int, steps: range, saved: dict[str, Any] | None, named: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Mlp(width=32, depth=6)
    state = EDGCState(controller=controller(), model=model if named else None)
    if saved is not None:
        model.load_state_dict(saved["model"])
        state.load_state_dict(saved["hook"])
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for step in steps:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + rank))
        train_step(ddp, optimizer, x)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "hook": state.state_dict(),
        "phase": state.metrics()["phase"],
        "bytes": state.metrics()["wire_bytes"],
        "ranks": [entry["ranks"] for entry in state.history],
    }


def resume(rank: int, world: int, stop: int, named: bool) -> str:
    whole = run(rank, range(60), None, named)
    first = run(rank, range(stop), None, named)
    second = run(rank, range(stop, 60), through_disk(first), named)
    assert whole["ranks"] == second["ranks"] and len({str(r) for r in whole["ranks"]}) > 2
    assert whole["bytes"] == second["bytes"]
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    for name, slot in whole["hook"]["slots"].items():
        for part in ("residual", "basis"):
            if slot[part] is not None:
                assert torch.equal(slot[part], second["hook"]["slots"][name][part]), name
    return str(first["phase"])


@pytest.mark.parametrize(
    ("stop", "named", "phase"),
    [(1, True, "start"), (5, True, "warmup"), (25, True, "compress"), (33, False, "compress")],
)
def test_resume_is_bit_equal(ranks: Pools, stop: int, named: bool, phase: str) -> None:
    assert ranks(2)(resume, stop, named) == [phase, phase]


SHAPES = [(24, 40), (40, 24), (16,)]


def give_state(rank: int, world: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    state = EDGCState(controller=FixedRank(3))
    ddp = wrap(Given(SHAPES), state)
    for step in range(5):
        averages(ddp, draw(SHAPES, seed=10 * step + rank))
    slots = state.engine.memory.slots.values()
    return state.state_dict(), [s.residual for s in slots if s.residual is not None]


def load_merged(rank: int, world: int, merged: dict[str, Any]) -> list[torch.Tensor]:
    state = EDGCState(controller=FixedRank(3))
    state.load_state_dict(merged)
    ddp = wrap(Given(SHAPES), state)
    slots = state.engine.memory.slots.values()
    kept = [s.residual.clone() for s in slots if s.residual is not None]
    averages(ddp, draw(SHAPES, seed=rank))
    return kept


class Odd(torch.nn.Module):
    """Its sides fill no vector registers, so a matrix begins wherever DDP has cut its bucket."""

    def __init__(self, inside: int, width: int, outside: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(inside, width)
        self.middle = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.last = torch.nn.Linear(width, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        out: torch.Tensor = self.last(x)
        return out


def wrapped_anew(
    rank: int, world: int, sides: tuple[int, int, int], k: int, wire: str, cap_mb: float
) -> float:
    """The first buckets of a resumed run are cut otherwise: that must change no bit."""
    models = [Odd(*sides), Odd(*sides)]
    models[1].load_state_dict(models[0].state_dict())
    states = [EDGCState(FixedRank(k), model=model, wire_dtype=wire) for model in models]

    def train(ddp: DistributedDataParallel, steps: range) -> torch.Tensor:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + rank)
            train_step(ddp, optimizer, torch.randn(8, sides[0], generator=generator))
        return torch.cat([p.detach().flatten() for p in ddp.parameters()])

    undisturbed = wrap(models[0], states[0], cap_mb)
    train(undisturbed, range(8))
    models[1].load_state_dict(models[0].state_dict())
    states[1].load_state_dict(states[0].state_dict())
    resumed = train(wrap(models[1], states[1], cap_mb), range(8, 14))
    return float((train(undisturbed, range(8, 14)) - resumed).abs().max())


@pytest.mark.parametrize(
    ("sides", "k", "wire", "cap_mb"),
    [
        ((50, 37, 7), 2, "fp32", 25),
        ((33, 65, 65), 3, "fp32", 25),
        ((16, 64, 10), 3, "bf16", 25),
        ((33, 65, 65), 5, "int8", 25),
        ((16, 16, 16), 4, "int8", 1e-6),
        ((16, 16, 16), 4, "bf16", 1e-6),
    ],
)
def test_no_bit_depends_on_how_buckets_are_cut(
    ranks: Pools, sides: tuple[int, int, int], k: int, wire: str, cap_mb: float
) -> None:
    assert ranks(2)(wrapped_anew, sides, k, wire, cap_mb) == [0.0, 0.0]


def test_another_world_size_keeps_what_is_still_to_be_sent(ranks: Pools) -> None:
    answers = ranks(2)(give_state)
    merged = merge([state for state, _ in answers], world_size=3)
    want = [torch.stack(pair).mean(0) for pair in zip(*(r for _, r in answers), strict=True)]
    for residuals in ranks(3)(load_merged, merged):
        for got, expected in zip(residuals, want, strict=True):
            torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="all ranks of one run"):
        merge([answers[0][0]], world_size=3)
    for nothing in ({}, 1):
        with pytest.raises(ValueError, match="this is no EDGCState.state_dict"):
            merge([nothing], world_size=1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the state has version 2, this edgc_ddp reads 3"):
        merge([{**answers[0][0], "version": 2}, answers[1][0]], world_size=1)
    with pytest.raises(ValueError, match=r"one state of each rank, got those of ranks \[0, 0\]"):
        merge([answers[0][0]] * 2, world_size=3)
    for size in (0, -1, 2.5, "3"):
        with pytest.raises(ValueError, match="world_size="):
            merge([state for state, _ in answers], world_size=size)  # type: ignore[arg-type]


def test_a_state_does_not_grow_with_iterations_nobody_will_ask_for(ranks: Pools) -> None:
    for state, _ in ranks(2)(give_state):
        assert state["window"]["steps"] == 3 and state["window"]["spans"] == []


def test_states_of_several_moments_are_not_merged(ranks: Pools) -> None:
    (first, _), (second, _) = ranks(2)(give_state)
    later = copy.deepcopy(second)
    later["progress"]["step"] += 3
    with pytest.raises(
        ValueError, match="state 0 has step 5 and state 1 8: save on all ranks after the"
    ):
        merge([first, later], world_size=2)
    other = copy.deepcopy(second)
    other["progress"]["plan"]["ranks"]["parameter_0000"] = 2
    with pytest.raises(ValueError, match="state 0 has ranks"):
        merge([first, other], world_size=2)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_owes_nothing_counts_as_zero_when_states_are_merged(
    ranks: Pools, lacking: int
) -> None:
    states = [state for state, _ in ranks(2)(give_state)]
    for slot in states[lacking]["slots"].values():
        slot["residual"] = None
    merged = merge(states, world_size=2)
    found = 0
    for name, slot in states[1 - lacking]["slots"].items():
        if slot["residual"] is not None:
            found += 1
            torch.testing.assert_close(merged["slots"][name]["residual"], slot["residual"] / 2)
    assert found


def from_the_very_start(rank: int, world: int, named: bool) -> list[float]:
    """Saved before the first gradient; loaded into a new state, and into the one that went on."""
    ends, saved = [], None
    model = Given(SHAPES)
    state = EDGCState(controller=FixedRank(3), model=model if named else None)
    for again in ("new", "loaded", "gone on"):
        if again == "loaded":
            model = Given(SHAPES)
            state = EDGCState(controller=FixedRank(3), model=model if named else None)
            state.load_state_dict(saved)
        elif again == "gone on":
            state.load_state_dict(saved)
        saved = state.state_dict()
        if again != "gone on":
            ddp = wrap(model, state)
        for step in range(5):
            got = averages(ddp, draw(SHAPES, seed=10 * step + rank))
        assert state.metrics()["step"] == 5
        ends.append(torch.cat([g.flatten() for g in got]).double().norm().item())
    return ends


@pytest.mark.parametrize("named", [True, False])
def test_a_state_saved_before_the_first_gradient(ranks: Pools, named: bool) -> None:
    for new, loaded, gone_on in ranks(2)(from_the_very_start, named):
        assert new == loaded == gone_on


def load_at_wrong_size(rank: int, world: int, saved: dict[str, Any]) -> str:
    state = EDGCState(controller=FixedRank(3))
    with pytest.raises(ValueError) as caught:
        state.load_state_dict(saved)
    return str(caught.value)


def test_a_state_of_another_world_size_is_refused(ranks: Pools) -> None:
    (saved, _), _ = ranks(2)(give_state)
    for message in ranks(3)(load_at_wrong_size, saved):
        assert "2 ranks" in message and "3" in message and "merge" in message


@pytest.fixture(scope="module")
def saved(ranks: Pools) -> dict[str, Any]:
    state: dict[str, Any] = ranks(1)(give_state)[0][0]
    return state


def first(saved: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(s for s in saved["slots"].values() if s["basis"] is not None)
    return entry


NOWHERE = {"alpha": math.nan, "beta": 0.25, "estimator": "gaussian"}


def integers(saved: dict[str, Any]) -> torch.Tensor:
    residual: torch.Tensor = first(saved)["residual"]
    return torch.zeros(residual.shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved: saved.pop("buckets"), "lacks"),
        (lambda saved: saved.pop("slots"), "at step .* it knows no parameter"),
        (lambda saved: saved.update(version=99), "version 99"),
        (lambda saved: saved.update(controller="Other"), "controller Other"),
        (lambda saved: first(saved).update(basis=torch.zeros(2, 2)), "basis of"),
        (lambda saved: first(saved).update(basis=None), "at rank 3 the basis of .* lacks"),
        (lambda saved: first(saved).update(rank=0), "at rank 0 the basis of .* is there"),
        (lambda saved: first(saved).update(rank=3.0), "rank of .* is 3.0"),
        (lambda saved: first(saved).pop("rank"), "in its slots: KeyError, 'rank'"),
        (
            lambda saved: first(saved)["residual"].fill_(math.inf),
            "residual of .* is not made of finite",
        ),
        (
            lambda saved: first(saved)["basis"][0].fill_(math.nan),
            "basis of .* is not made of finite",
        ),
        (lambda saved: first(saved).update(residual=torch.zeros(3)), "residual of .* another size"),
        (lambda saved: saved.update(layout=[]), "in its layout"),
        (lambda saved: saved.update(layout=saved["layout"][:1]), "in its layout"),
        (lambda saved: saved["progress"]["plan"]["ranks"].popitem(), "plan has other ranks"),
        (lambda saved: saved["progress"].pop("plan"), "in its progress: KeyError, 'plan'"),
        (lambda saved: saved["progress"].update(new=1), "in its progress: TypeError"),
        (lambda saved: saved["progress"].update(step=None), r"counts .* are \(None"),
        (lambda saved: saved["window"].pop("factors"), "in its window: KeyError, 'factors'"),
        (lambda saved: saved["window"].update(sums=saved["window"]["sums"][:0]), "sums are not"),
        (lambda saved: saved["window"]["factors"].update(captured=torch.zeros(1)), "in its window"),
        (lambda saved: saved.update(buckets=[1.5]), "buckets are"),
        (lambda saved: saved.update(buckets=None), "buckets are None"),
        (lambda saved: saved.update(options={"rank": "4"}), "rank=4, this run has rank=3: set"),
        (lambda saved: saved.update(options=[1]), r"options are \[1\]"),
        (lambda saved: saved.update(rank=-1), "rank -1 of 1"),
        (lambda saved: saved.update(loss_scale=0.0), r"loss scales are \(None, 0.0\)"),
        (lambda saved: saved["progress"].update(loss_scale="1"), "loss scales are"),
        (lambda saved: saved["progress"].update(sent_bytes=math.nan), "bytes and sums are"),
        (lambda saved: saved["progress"].update(controller_state={}), "in its progress"),
        (lambda saved: saved["progress"]["plan"].update(probe_rank=-1), "counts .* -1"),
        (lambda saved: saved["progress"]["plan"].update(sampling=NOWHERE), "sampled are nan"),
        (lambda saved: saved["window"].update(spans=["1"]), "times are"),
        (lambda saved: first(saved).update(residual=integers(saved)), "residual .* finite numbers"),
    ],
)
def test_damaged_states_are_refused_and_change_nothing(
    saved: dict[str, Any], spoil: Callable[[dict[str, Any]], Any], message: str
) -> None:
    bad = copy.deepcopy(saved)
    spoil(bad)
    state = EDGCState(controller=FixedRank(3))
    state.load_state_dict(saved)
    before = repr(state.state_dict())
    with pytest.raises(ValueError, match=message):
        state.load_state_dict(bad)
    assert repr(state.state_dict()) == before
    with pytest.raises(ValueError, match=message):
        EDGCState(controller=FixedRank(3)).load_state_dict(bad)


@pytest.mark.parametrize(
    "spoil",
    [{"layout": [5]}, {"layout": [["w", 4, 8]]}, {"window": {}}],
    ids=["no matrix", "decided, but no window", "an empty window"],
)
def test_a_damaged_state_from_before_any_decision(spoil: dict[str, Any]) -> None:
    state = EDGCState(controller=FixedRank(3))
    before = repr(state.state_dict())
    with pytest.raises(ValueError, match="the state is damaged, in its (layout|window)"):
        state.load_state_dict({**state.state_dict(), **spoil})
    assert repr(state.state_dict()) == before


def test_what_is_owed_is_not_kept_where_nobody_would_send_it(saved: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="still to be sent of .*: set error_feedback=True"):
        EDGCState(controller=FixedRank(3), error_feedback=False).load_state_dict(saved)


def test_a_residual_is_kept_in_this_runs_type(saved: dict[str, Any]) -> None:
    state = EDGCState(controller=FixedRank(3), residual_dtype="bf16")
    state.load_state_dict(saved)
    owed = first(saved)["residual"]
    assert owed.dtype == torch.float32
    assert torch.equal(first(state.state_dict())["residual"], owed.to(torch.bfloat16))


def frozen_later(rank: int, world: int) -> None:
    """DDP keeps what was frozen after it was wrapped in its buckets, with zeros."""
    model = Given(SHAPES)
    state = EDGCState(controller=FixedRank(3), model=model)
    ddp = wrap(model, state, find_unused_parameters=True)
    for step in range(4):
        averages(ddp, draw(SHAPES, seed=10 * step + rank))
    model.weights[0].requires_grad_(False)
    saved = state.state_dict()
    ends = []
    for _ in range(2):
        state.load_state_dict(saved)
        for step in range(3):
            ddp.zero_grad()
            ddp(draw(SHAPES, seed=10 * step + rank)).backward()
        assert model.weights[1].grad is not None
        ends.append(model.weights[1].grad.clone())
    assert torch.equal(*ends)
    # Frozen before it is wrapped, DDP leaves it out.
    fresh = Given(SHAPES)
    fresh.weights[0].requires_grad_(False)
    again = EDGCState(controller=FixedRank(3), model=fresh)
    again.load_state_dict(saved)
    ddp = wrap(fresh, again)
    for step in range(3):
        ddp.zero_grad()
        ddp(draw(SHAPES, seed=10 * step + rank)).backward()
    assert torch.equal(fresh.weights[1].grad, ends[0])  # type: ignore[arg-type]
    again.load_state_dict(again.state_dict())
    fresh.weights[0].requires_grad_(True)
    again.load_state_dict(again.state_dict())
    for got in averages(wrap(fresh, again), draw(SHAPES, seed=rank)):
        assert got.any()
    other = Given([(24, 41), *SHAPES[1:]])
    other.weights[0].requires_grad_(False)
    with pytest.raises(ValueError, match="parameter 'weights.0' is matrix"):
        EDGCState(controller=FixedRank(3), model=other).load_state_dict(saved)


def test_a_layer_frozen_after_wrapping_does_not_stop_a_rollback(ranks: Pools) -> None:
    ranks(2)(frozen_later)


def test_a_state_of_another_model_is_refused(saved: dict[str, Any]) -> None:
    state = EDGCState(controller=FixedRank(3), model=Given([(24, 40)]))
    with pytest.raises(ValueError, match="another model"):
        state.load_state_dict(saved)
    with pytest.raises(ValueError, match="no EDGCState.state_dict"):
        state.load_state_dict([1, 2])  # type: ignore[arg-type]


def early(rank: int, world: int) -> dict[str, Any]:
    """Before ``start_iter``, where rounding already leaves something to be sent."""
    state = EDGCState(controller=FixedRank(3), dense_dtype="int8", start_iter=100)
    ddp = wrap(Given(SHAPES), state)
    for step in range(3):
        averages(ddp, draw(SHAPES, seed=10 * step + rank))
    return state.state_dict()


def test_a_state_before_any_decision_knows_its_world_size(ranks: Pools) -> None:
    states = ranks(2)(early)
    assert [state["world_size"] for state in states] == [2, 2]
    merged = merge(states, world_size=1)
    state = EDGCState(controller=FixedRank(3), dense_dtype="int8", start_iter=100)
    state.load_state_dict(merged)
    assert state.state_dict()["world_size"] == 1
    owed = {name: slot.residual for name, slot in state.engine.memory.slots.items()}
    assert sum(residual is not None for residual in owed.values()) == 2
    for name, residual in owed.items():
        if residual is not None:
            pair = [state["slots"][name]["residual"] for state in states]
            assert torch.equal(residual, (pair[0] + pair[1]) / 2)
    # Loaded where there is no process group yet, so only the first iteration can tell.
    state.load_state_dict(states[0])
    for engine in (state.engine, copy.deepcopy(state).engine):
        lane = SimpleNamespace(world_size=3, rank=0, device=torch.device("cpu"))
        with pytest.raises(ValueError, match="one of 2 ranks, this run has 3.*merge"):
            engine._check_loaded(lane)
    for message in ranks(3)(load_at_wrong_size, states[0]):
        assert "2 ranks" in message


def loaded_in_inference_mode(rank: int, world: int) -> None:
    averaged = []
    for inference in (False, True):
        state = EDGCState(controller=FixedRank(3, window=4))
        ddp = wrap(Given(SHAPES), state)
        for step in range(12):
            if step == 6:
                with torch.inference_mode(inference):
                    state.load_state_dict(state.state_dict())
            averaged.append(averages(ddp, draw(SHAPES, seed=10 * step + rank)))
    for got, want in zip(averaged[:12], averaged[12:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_state_loaded_in_inference_mode_trains_on(ranks: Pools) -> None:
    ranks(2)(loaded_in_inference_mode)


def test_a_state_loaded_late_goes_to_its_parameters_device(saved: dict[str, Any]) -> None:
    state = EDGCState(controller=FixedRank(3))
    elsewhere = torch.device("meta")
    entries = list(saved["slots"].values())
    shapes = [entry["sides"] or [entry["numel"]] for entry in entries]
    parameters = [torch.nn.Parameter(torch.empty(shape, device=elsewhere)) for shape in shapes]
    slots = state.engine.registry.slots(parameters)
    state.load_state_dict(saved)
    assert [s.basis_NR.device for s in slots if s.basis_NR is not None] == [elsewhere] * 2
    assert {s.residual.device for s in slots if s.residual is not None} == {elsewhere}
    assert state.engine.observer is not None and state.engine.observer.device == elsewhere


def test_a_second_load_forgets_the_first(saved: dict[str, Any]) -> None:
    state = EDGCState(controller=FixedRank(3))
    other = copy.deepcopy(saved)
    for part in (other["slots"], other["progress"]["plan"]["ranks"]):
        for name in list(part):
            part[f"other_{name}"] = part.pop(name)
    for entry in other["layout"]:
        entry[0] = f"other_{entry[0]}"
    state.load_state_dict(other)
    state.load_state_dict(saved)
    assert set(state.state_dict()["slots"]) == set(saved["slots"])


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (FixedRank(4), FixedRank(16), "rank=4, this run has rank=16: set rank=4"),
        (controller(), EntropyController(window=10, scope="matrix"), "this run has"),
        (
            Selective(FixedRank(4)),
            Selective(FixedRank(5)),
            "inner.rank=4, this run has inner.rank=5",
        ),
        (Scheduled({0: 4}), Scheduled({0: 8}), "milestones={0: 4}, this run has milestones={0: 8}"),
    ],
)
def test_other_options_of_the_controller_are_refused(
    before: Controller, after: Controller, named: str
) -> None:
    state = through_disk(EDGCState(controller=before).state_dict())
    with pytest.raises(ValueError, match=named):
        EDGCState(controller=after).load_state_dict(state)
    EDGCState(controller=before).load_state_dict(state)
    # As an earlier version wrote it.
    del state["options"]
    EDGCState(controller=after).load_state_dict(state)


def coarse(grad_MN: torch.Tensor, beta: float, offset: int) -> torch.Tensor:
    return histogram(grad_MN, beta, offset, bins=16)


def by_a_function(rank: int, world: int, resumed: bool) -> list[Any]:
    shapes = [(16, 24)]
    inner = EntropyController(window=8, warmup=4, r_max=4, r_min=1, alpha=0.5, estimator=coarse)
    state = EDGCState(Selective(inner))
    ddp = wrap(Given(shapes), state)
    for step in range(24):
        if resumed and step in (7, 13, 19):
            state.load_state_dict(through_disk(state.state_dict()))
        averages(ddp, draw(shapes, seed=step))
    return [(entry["entropy"], entry["ranks"]) for entry in state.history[1:]]


def test_a_functions_samples_go_on_after_a_resume(ranks: Pools) -> None:
    """No checkpoint holds the function, which may be that of a controller within another."""
    left_alone = ranks(2)(by_a_function, False)
    assert len(left_alone[0]) >= 2 and all(math.isfinite(h) for h, _ in left_alone[0])
    assert ranks(2)(by_a_function, True) == left_alone


def test_a_function_that_is_gone_is_missed(saved: dict[str, Any]) -> None:
    damaged = copy.deepcopy(saved)
    sampling = {"alpha": 0.5, "beta": 0.25, "estimator": None}
    damaged["progress"]["plan"]["sampling"] = sampling
    with pytest.raises(ValueError, match="FixedRank has none: give it .* `estimator`"):
        EDGCState(controller=FixedRank(3)).load_state_dict(damaged)


def in_mid_window(rank: int, world: int, again: dict[str, Any] | None) -> dict[str, Any]:
    state = EDGCState(AdaptiveController(window=8, warmup=2, budget=0.3))
    shapes = [(32, 48)]
    ddp = wrap(Given(shapes), state)
    if again is not None:
        state.load_state_dict(again)
        total = state.engine._lane_for(torch.device("cpu"), True).sum_over_ranks(
            state.engine.observer.vector([])  # type: ignore[union-attr]
        )
        return state.engine.observer.observation(total, world).__dict__  # type: ignore[union-attr]
    for step in range(16):
        averages(ddp, draw(shapes, seed=10 * step + rank))
    return state.state_dict()


def test_a_merged_window_says_what_the_old_ranks_saw(ranks: Pools) -> None:
    """What factors leave of the average is a sum of vectors with signs: rank 0's own, taken for
    everyone's, would say four times as much of noise."""
    states = ranks(4)(in_mid_window, None)
    assert states[0]["progress"]["step"] == 16 and states[0]["window"]["factors"]["probes"].any()
    (before, *_) = ranks(4)(in_mid_window_as_it_is, states)
    (after, _) = ranks(2)(in_mid_window, merge(states, 2))
    for field in ("left", "energy", "gradient_energy", "entropy", "residual_share"):
        assert after[field] == pytest.approx(before[field], rel=1e-5), field
    assert all(math.isfinite(value) and value > 0 for value in before["left"].values())


def in_mid_window_as_it_is(rank: int, world: int, states: list[dict[str, Any]]) -> dict[str, Any]:
    return in_mid_window(rank, world, states[rank])


def test_decisions_that_change_nothing_take_no_room(ranks: Pools) -> None:
    ((live, saved, loaded), _) = ranks(2)(many_decisions)
    assert live == saved == loaded == 1


def many_decisions(rank: int, world: int) -> list[int]:
    shapes = [(16, 24)]
    state = EDGCState(FixedRank(3, window=2))
    ddp = wrap(Given(shapes), state)
    for step in range(12):
        averages(ddp, draw(shapes, seed=step))
    assert len(state.history) == 5 and state.history[-1]["ranks"] == {"parameter_0000": 3}
    saved = through_disk(state.state_dict())
    other = EDGCState(FixedRank(3, window=2))
    other.load_state_dict(saved)
    histories = (state.history, saved["progress"]["history"], other.history)
    return [len({id(entry["ranks"]) for entry in history}) for history in histories]


def test_a_layer_that_is_trained_only_now_is_refused_at_once(ranks: Pools) -> None:
    ranks(2)(thawed)


def thawed(rank: int, world: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    state = EDGCState(FixedRank(2), model=model)
    ddp = wrap(model, state)
    for _ in range(4):
        ddp(torch.ones(2, 8)).sum().backward()
    saved = state.state_dict()
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="only the model has a parameter '0.bias'"):
        EDGCState(FixedRank(2), model=model).load_state_dict(saved)


def test_a_run_may_be_made_longer() -> None:
    state = EDGCState(controller=EntropyController(window=10, total_steps=100)).state_dict()
    EDGCState(controller=EntropyController(window=10, total_steps=200)).load_state_dict(state)
