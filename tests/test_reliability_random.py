"""Random models driven at random, each against plain DDP and against what each rank was given.

Hypothesis draws a plan on this side; kept processes run it. Few examples here, many in benchmarks/soak.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from scenes import seeded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.controllers import Scheduled

Pools = Callable[[int], Ranks]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
PRECISION = {"fp32": 1e-4, "fp64": 1e-4, "bf16": 8e-2}
EXACT = 512


@dataclass(frozen=True)
class Weight:
    """One parameter to be made."""

    shape: tuple[int, ...]
    dtype: str
    turned: bool
    frozen: bool
    skipped_on: int
    """It takes no part in iterations that this number divides (0: in all it does)."""
    zero: bool
    """Its gradient is zero."""


@dataclass(frozen=True)
class Case:
    """A model and how it is driven."""

    weights: tuple[Weight, ...]
    bucket_cap_mb: float
    bucket_view: bool
    accumulate: int
    ranks: tuple[int, ...]
    """The rank to use from every third iteration on; 0 = dense, EXACT = exact."""
    save_at: int
    """State and model go through a checkpoint before this iteration; 0: never."""
    named: bool
    wire: str


weights = st.builds(
    Weight,
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple)
    | st.tuples(st.integers(8, 30), st.integers(8, 30))
    | st.sampled_from([(0,), (3, 0)]),
    dtype=st.sampled_from(list(DTYPES)),
    turned=st.booleans(),
    frozen=st.integers(0, 5).map(lambda draw: draw == 0),
    skipped_on=st.sampled_from([0, 0, 2, 3]),
    zero=st.integers(0, 7).map(lambda draw: draw == 0),
)
cases = st.builds(
    Case,
    # The first one always takes part, so that there is something to differentiate.
    weights=st.lists(weights, min_size=1, max_size=6).map(
        lambda drawn: (replace(drawn[0], frozen=False, skipped_on=0), *drawn[1:])
    ),
    bucket_cap_mb=st.sampled_from([1e-6, 0.001, 25.0]),
    bucket_view=st.booleans(),
    accumulate=st.integers(1, 2),
    ranks=st.lists(st.sampled_from([0, 1, 3, EXACT]), min_size=3, max_size=3).map(tuple),
    save_at=st.sampled_from([0, 1, 4, 5, 7]),
    named=st.booleans(),
    wire=st.sampled_from(["fp32", "bf16"]),
)


class Drawn(nn.Module):
    """Gradients are drawn anew for each iteration and rank: loss = sum of weight * gradient."""

    def __init__(self, drawn: tuple[Weight, ...]) -> None:
        super().__init__()
        self.drawn = drawn
        self.weights = nn.ParameterList()
        for weight in drawn:
            tensor = torch.zeros(weight.shape, dtype=DTYPES[weight.dtype])
            if weight.turned and len(weight.shape) > 1:
                tensor = torch.zeros(weight.shape[::-1], dtype=tensor.dtype).permute(
                    *reversed(range(len(weight.shape)))
                )
            self.weights.append(nn.Parameter(tensor, requires_grad=not weight.frozen))

    def forward(self, step: int, rank: int) -> Tensor:
        generator, loss = seeded(step, rank), torch.zeros(())
        for weight, parameter in zip(self.drawn, self.weights, strict=True):
            gradient = torch.randn(weight.shape, generator=generator).to(parameter.dtype)
            if not (weight.skipped_on and step // 10 % weight.skipped_on == 0):
                loss = loss + (parameter * gradient * (not weight.zero)).sum().float()
        return loss


def backward(ddp: DistributedDataParallel, case: Case, step: int, rank: int) -> list[Tensor]:
    ddp.zero_grad()
    for part in range(case.accumulate - 1):
        with ddp.no_sync():
            ddp(10 * step + part, rank).backward()
    ddp(10 * step + 9, rank).backward()
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in ddp.module.parameters()  # type: ignore[union-attr]
        if p.requires_grad
    ]


def hooked(case: Case, saved: dict[str, Any] | None) -> tuple[DistributedDataParallel, EDGCState]:
    model = Drawn(case.weights)
    state = EDGCState(
        controller=Scheduled({3 * k: rank for k, rank in enumerate(case.ranks)}),
        model=model if case.named else None,
        min_compression_rate=0,
        wire_dtype=case.wire,
    )
    if saved is not None:
        state.load_state_dict(saved)
    return wrapped(model, case, state), state


def wrapped(model: nn.Module, case: Case, state: EDGCState | None) -> DistributedDataParallel:
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=case.bucket_cap_mb,  # type: ignore[arg-type]
        gradient_as_bucket_view=case.bucket_view,
        find_unused_parameters=any(w.skipped_on for w in case.weights),
    )
    if state is not None:
        ddp.register_comm_hook(state, edgc_hook)
    return ddp


def mean_residuals(state: EDGCState, ddp: DistributedDataParallel) -> list[Tensor]:
    """What the average still lacks, laid out as the parameters are."""
    found = []
    for parameter in ddp.module.parameters():  # type: ignore[union-attr]
        if not parameter.requires_grad:
            continue
        (slot,) = state.engine.registry.slots([parameter])
        total = torch.empty_like(parameter, dtype=torch.float64).zero_()
        if slot.residual is not None:
            flat = slot.residual.double()
            torch.distributed.all_reduce(flat)
            total.as_strided((flat.numel(),), (1,)).copy_(flat / torch.distributed.get_world_size())
        found.append(total.detach())
    return found


def drive(rank: int, world: int, case: Case) -> list[bytes]:
    """Received plus owed must be what plain DDP received; at exact ranks the average must be DDP's."""
    plain = wrapped(Drawn(case.weights), case, None)
    ddp, state = hooked(case, None)
    live = [weight for weight in case.weights if not weight.frozen]
    owed = [torch.zeros(w.shape, dtype=torch.float64) for w in live]
    bits = []
    for step in range(9):
        if step and step == case.save_at:
            saved = state.state_dict()
            state.close()
            ddp, state = hooked(case, saved)
        got, want = backward(ddp, case, step, rank), backward(plain, case, step, rank)
        exact = step < 2 or case.ranks[step // 3] in (0, EXACT)
        left = mean_residuals(state, ddp)
        for weight, average, mean, before, after in zip(live, got, want, owed, left, strict=True):
            narrow = case.wire == "bf16" and not (step < 2 or case.ranks[step // 3] == 0)
            precision = 8e-2 if narrow else PRECISION[weight.dtype]
            given = mean.double() + before
            size = max(float(given.norm()), float(before.norm()))
            error = float((average.double() + after - given).norm())
            assert error <= precision * size + 1e-9, (weight, step, error, size)
            if unused(weight, step):
                assert torch.equal(after, before), (weight, step)
            elif exact:
                assert float(after.norm()) <= precision * size + 1e-9, (weight, step)
        owed = left
        bits.append(
            b"".join(g.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for g in got)
        )
    state.close()
    return bits


def unused(weight: Weight, step: int) -> bool:
    """Whether no rank has a gradient, so that what is owed cannot be paid."""
    return weight.zero or bool(weight.skipped_on and step % weight.skipped_on == 0)


def hold(pool: Ranks, case: Case) -> None:
    """Run a case; the ranks must agree to the last bit."""
    first, *others = pool(drive, case)
    assert all(other == first for other in others)


def test_random_models_driven_at_random(ranks: Pools) -> None:
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Case) -> None:
        hold(ranks(2), case)

    check()


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_case_with_everything_in_it(ranks: Pools, wire: str) -> None:
    case = Case(
        weights=(
            Weight((12, 20), "fp32", False, False, 0, False),
            Weight((20, 12), "fp32", True, False, 2, False),
            Weight((), "bf16", False, False, 0, False),
            Weight((4, 3, 2, 2), "bf16", True, False, 3, False),
            Weight((16, 16), "fp64", False, True, 0, False),
            Weight((16, 16), "fp64", False, False, 0, True),
        ),
        bucket_cap_mb=1e-6,
        bucket_view=True,
        accumulate=2,
        ranks=(1, EXACT, 3),
        save_at=7,
        named=True,
        wire=wire,
    )
    hold(ranks(3), case)
