"""Checkpoints of the state: resume to the last bit, refusals, another world size."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from scenes import SMALL_BUCKETS_MB, Given, Mlp, averages, draw, train_step, wrap

from edgc_ddp import EDGCState
from edgc_ddp.checkpoint import merge
from edgc_ddp.controllers import EntropyController, FixedRank

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


def test_another_world_size_keeps_what_is_still_to_be_sent(ranks: Pools) -> None:
    answers = ranks(2)(give_state)
    merged = merge([state for state, _ in answers], world_size=3)
    want = [torch.stack(pair).mean(0) for pair in zip(*(r for _, r in answers), strict=True)]
    for residuals in ranks(3)(load_merged, merged):
        for got, expected in zip(residuals, want, strict=True):
            torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="all ranks of one run"):
        merge([answers[0][0]], world_size=3)


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


def spoil_basis(saved: dict[str, Any]) -> None:
    next(s for s in saved["slots"].values() if s["basis"] is not None)["basis"] = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved: saved.pop("slots"), "lacks"),
        (lambda saved: saved.update(version=99), "version 99"),
        (lambda saved: saved.update(controller="Other"), "controller Other"),
        (spoil_basis, "basis of"),
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


def test_a_state_of_another_model_is_refused(saved: dict[str, Any]) -> None:
    state = EDGCState(controller=FixedRank(3), model=Given([(24, 40)]))
    with pytest.raises(ValueError, match="another model"):
        state.load_state_dict(saved)
    with pytest.raises(ValueError, match="no EDGCState.state_dict"):
        state.load_state_dict([1, 2])  # type: ignore[arg-type]
