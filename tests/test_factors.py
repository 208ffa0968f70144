"""What the engine tells controllers about energies, against the same in float64 by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from scenes import Given, averages, draw, wrap
from torch import Tensor

from edgc_ddp import EDGCState
from edgc_ddp.controllers import AdaptiveController
from edgc_ddp.decisions import Layout, MatrixSpec, Observation, Plan, Sampling, State
from edgc_ddp.factors import FactorSums

Pools = Callable[[int], Ranks]
SHAPES = [(24, 40), (64, 24), (16,)]
RANK = 5
WINDOW = 4


@dataclass
class Listener:
    """Rank 5 for ever, looking at every entry of every iteration, and keeping what it is told."""

    heard: list[Observation] = field(default_factory=list)

    def init(self, layout: Layout) -> State:
        return {"names": [matrix.name for matrix in layout.matrices]}

    def decide(
        self, state: State, observation: Observation | None, step: int
    ) -> tuple[State, Plan]:
        if observation is not None:
            self.heard.append(observation)
        ranks = {name: RANK for name in state["names"]}
        sampling = Sampling(alpha=1.0, beta=1.0)
        return state, Plan(ranks, "fixed", until=step + WINDOW, sampling=sampling)


def energies(rank: int, world: int, broken: bool) -> list[dict[str, Any]]:
    listener = Listener()
    state = EDGCState(controller=listener)
    ddp = wrap(Given(SHAPES), state)
    for step in range(2 + WINDOW):
        averages(ddp, draw(SHAPES, seed=100 + 10 * step + rank))
    gradient = [0.0, 0.0]
    whole, captured, left = ([], []), ([], []), ([], [])
    for step in range(WINDOW):
        gradients = draw(SHAPES, seed=10 * step + rank)
        if broken and step == 1 and rank == 1:
            gradients[0][3, 4] = math.nan
        slots = state.engine.registry.slots(list(ddp.module.parameters())[:2])
        before = [
            _everyone(_matrix(s, g), s.residual, s) for s, g in zip(slots, gradients, strict=False)
        ]
        bases = [s.basis_NR.double() for s in slots]
        averages(ddp, gradients)
        for k in range(len(slots)):
            own = gradients[k].double().square().sum()
            gradient[k] += float(own) if own.isfinite() else 0.0
            whole_N = torch.stack(before[k])
            if not whole_N.isfinite().all():
                whole[k].extend(float(a.square().sum()) for a in before[k] if a.isfinite().all())
                continue
            mean_MN = whole_N.mean(0)
            p_MR = torch.linalg.qr(mean_MN @ bases[k]).Q
            q_NR = mean_MN.t() @ p_MR
            whole[k].extend(float(a.square().sum()) for a in before[k])
            captured[k].append(q_NR.square().sum(0))
            left[k].append(float((mean_MN - p_MR @ q_NR.t()).square().sum()))
    averages(ddp, draw(SHAPES, seed=99))
    heard = listener.heard[-1]
    told = []
    for k, slot in enumerate(slots):
        told.append(
            {
                "gradient": (heard.gradient_energy[slot.name], gradient[k]),
                "energy": (heard.energy[slot.name], sum(whole[k]) / len(whole[k])),
                "captured": (
                    heard.captured[slot.name],
                    torch.stack(captured[k]).mean(0).sort(descending=True).values.tolist(),
                ),
                "left": (heard.left[slot.name], sum(left[k]) / len(left[k])),
            }
        )
    state.close()
    return told


def _matrix(slot: Any, gradient: Tensor) -> Tensor:
    return slot.as_matrix(gradient.flatten()).double()


def _everyone(gradient_MN: Tensor, residual: Tensor | None, slot: Any) -> list[Tensor]:
    a_MN = gradient_MN.contiguous()
    if residual is not None:
        a_MN = a_MN + slot.as_matrix(residual).double()
    gathered = [torch.empty_like(a_MN) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, a_MN)
    return gathered


@pytest.mark.parametrize("broken", [False, True], ids=["finite", "one nan"])
def test_energies_equal_those_of_double_precision(ranks: Pools, broken: bool) -> None:
    first, second = ranks(2)(energies, broken)
    for mine, other in zip(first, second, strict=True):
        for name in ("energy", "captured"):
            assert mine[name][0] == other[name][0]
            assert mine[name][0] == pytest.approx(mine[name][1], rel=1e-4)
        assert mine["left"][0] == other["left"][0]
        # One probe per iteration: the mean of four sums of 24 squares.
        assert mine["left"][0] == pytest.approx(mine["left"][1], rel=0.5)
    for k, lost in enumerate((1 if broken else 0, 0)):
        total = first[k]["gradient"][1] + second[k]["gradient"][1]
        assert first[k]["gradient"][0] == pytest.approx(total / (2 * WINDOW - lost), rel=1e-4)


def test_the_probe_of_what_is_left_is_unbiased() -> None:
    """Sums over iterations of one M-vector: no cross terms remain on average."""
    a_MN = draw([(12, 30)], seed=1)[0]
    p_MR = torch.linalg.qr(a_MN[:, :3]).Q
    q_NR = a_MN.t() @ p_MR
    sums = FactorSums(Layout((MatrixSpec("w", 12, 30),)), torch.device("cpu"))
    told = []
    for window in range(300):
        sums.reset({"w": 3})
        for step in range(5):
            sums.left(0, a_MN, p_MR, q_NR, step=5 * window + step)
            sums.averaged(0, q_NR)
        told.append(sums.fields(sums.vector(), 1)["left"]["w"])
    truth = float((a_MN - p_MR @ q_NR.t()).square().sum())
    mean = sum(told) / len(told)
    error = math.sqrt(sum((x - mean) ** 2 for x in told)) / len(told)
    assert abs(mean - truth) < 4 * error < 0.2 * truth


def test_sums_survive_a_checkpoint_in_the_middle_of_a_window() -> None:
    layout = Layout((MatrixSpec("w", 12, 30), MatrixSpec("dense", 4, 4)))
    plan = {"w": 3, "dense": 0}
    through, resumed = (FactorSums(layout, torch.device("cpu")) for _ in range(2))
    through.reset(plan)
    for step in range(4):
        if step == 2:
            resumed.load_state_dict(through.state_dict())
        for sums in (through, resumed) if step >= 2 else (through,):
            a_MN = draw([(12, 30)], seed=step)[0]
            p_MR = torch.linalg.qr(a_MN[:, :3]).Q
            sums.gradient(0, a_MN, 0.5, step)
            sums.whole(0, a_MN.square().sum())
            sums.left(0, a_MN, p_MR, a_MN.t() @ p_MR, step)
            sums.averaged(0, a_MN.t() @ p_MR)
    assert through.vector() == resumed.vector()
    told = resumed.fields(resumed.vector(), 1)
    assert told["captured"]["dense"] == () and math.isnan(told["left"]["dense"])


def simple_and_noisy(rank: int, world: int) -> dict[str, int]:
    """Gradients of rank one for the first matrix, of full rank for the second."""
    state = EDGCState(controller=AdaptiveController(window=5, warmup=0, budget=0.5))
    ddp = wrap(Given([(24, 40), (24, 40)]), state)
    for step in range(22):
        left, right, noise = draw([(24, 1), (1, 40), (24, 40)], seed=100 * step + rank)
        averages(ddp, [(left if step % 2 else -left) @ right, noise])
    plan = state.plan()
    state.close()
    return plan


def test_the_adaptive_controller_spends_where_the_energy_is(ranks: Pools) -> None:
    first, second = ranks(2)(simple_and_noisy)
    assert first == second
    simple, noisy = first.values()
    # Half of the entries are 15 directions of 64; factors stop saving at the 15th of each.
    assert simple + noisy <= 15 and noisy > simple + 4
