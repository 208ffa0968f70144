"""Any parameter: each kind in a row, held against plain DistributedDataParallel.

At full rank the factors carry the whole gradient, so the average must be DDP's own whatever the parameter
looks like. At rank one, what was averaged plus what is still to be sent must be what was given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from scenes import SMALL_BUCKETS_MB, seeded, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgc_ddp import EDGCState
from edgc_ddp.controllers import FixedRank
from edgc_ddp.memory import Slot

Pools = Callable[[int], Ranks]
STEPS = 4


class Bag(nn.Module):
    """Parameters of any kind; the loss is smooth in all of them and differs between ranks."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)

    def forward(self, generator: torch.Generator) -> Tensor:
        loss = torch.zeros(())
        for weight in self.weights:
            if weight.requires_grad and weight.numel():
                factor = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                loss = loss + (weight * factor).sum().abs().float() + weight.abs().float().sum() / 9
        return loss


class WithEmpty(Bag):
    """Empty parameters take part in the loss, so that DDP gets their (empty) gradients."""

    def forward(self, generator: torch.Generator) -> Tensor:
        return super().forward(generator) + sum(w.sum() for w in self.weights if not w.numel())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(0, 40, (6,), generator=generator)
        return nn.functional.cross_entropy(self.head(self.embedding(tokens)), tokens.roll(1))


class Sparse(nn.Module):
    def __init__(self, bag: bool = False) -> None:
        super().__init__()
        self.bag = bag
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.embedding = kind(40, 16, sparse=True)
        self.head = nn.Linear(16, 24)

    def forward(self, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(0, 40, (2, 3), generator=generator)
        return self.head(self.embedding(tokens)).square().mean()


class Lora(nn.Module):
    """The second factor starts at zero, so the first one's gradient is exactly zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(4, 32, generator=generator)
        return (self.base(x) + self.up(self.down(x))).square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 8, 3)
        self.two = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.three = nn.Conv3d(2, 5, 2).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.back = nn.ConvTranspose2d(4, 6, 3, groups=2)

    def forward(self, generator: torch.Generator) -> Tensor:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        outputs = [
            self.one(draw(2, 3, 9)),
            self.two(draw(2, 4, 6, 6)),
            self.three(draw(2, 2, 4, 4, 4)),
            self.back(draw(2, 4, 5, 5)),
        ]
        return torch.stack([output.square().mean() for output in outputs]).sum()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


def half_frozen() -> nn.Module:
    bag = Bag(randn(24, 40), randn(24, 40), randn(7))
    bag.weights[0].requires_grad_(False)
    return bag


KINDS: dict[str, Callable[[], nn.Module]] = {
    "0-dim": lambda: Bag(randn(), randn(24, 40), randn()),
    "empty": lambda: WithEmpty(randn(0), randn(24, 40), randn(0, 5), randn(5, 0, 2)),
    "only empty": lambda: WithEmpty(randn(0), randn(4, 0)),
    "one row": lambda: Bag(randn(1, 40), randn(1, 1), randn(1, 5, 1)),
    "one column": lambda: Bag(randn(40, 1), randn(24, 40)),
    "1-D": lambda: Bag(randn(33), randn(1), randn(2)),
    "3-D to 5-D": lambda: Bag(randn(4, 5, 6), randn(8, 3, 2, 2), randn(4, 1, 3, 2, 5)),
    "non-contiguous": lambda: Bag(randn(24, 40).t(), randn(6, 5, 4).transpose(0, 2)),
    "with gaps": lambda: Bag(randn(24, 80)[:, ::2], randn(48, 40)[::2]),
    "expanded": lambda: Bag(randn(24, 40), randn(6, 1).expand(6, 8).clone().t()),
    "convolutions": Convolutions,
    "tied": Tied,
    "frozen": half_frozen,
    "sparse": Sparse,
    "sparse bag": lambda: Sparse(bag=True),
    "complex": lambda: Bag(torch.randn(24, 40, dtype=torch.complex64), randn(24, 40)),
    "several dtypes": lambda: Bag(
        randn(24, 40),
        randn(24, 40, dtype=torch.float64),
        randn(24, 40, dtype=torch.bfloat16),
        randn(24, 40, dtype=torch.float16),
        torch.randn(6, 5, dtype=torch.complex128),
    ),
    "fp16": lambda: Bag(randn(24, 40, dtype=torch.float16), randn(9, dtype=torch.float16)),
    "bf16": lambda: Bag(randn(24, 40, dtype=torch.bfloat16), randn(9, dtype=torch.bfloat16)),
    "fp64": lambda: Bag(randn(24, 40, dtype=torch.float64)),
    "LoRA": Lora,
    "nothing to compress": lambda: Bag(randn(9), randn(), randn(1, 7)),
    "tall and wide": lambda: Bag(randn(300, 2), randn(2, 300), randn(3, 3)),
}
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def backward(ddp: DistributedDataParallel, step: int, rank: int) -> list[Tensor | None]:
    ddp.zero_grad()
    ddp(seeded(step, rank)).backward()
    return [
        None if p.grad is None else p.grad.to_dense().clone()  # type: ignore[misc]
        for p in ddp.module.parameters()  # type: ignore[union-attr]
    ]


def same(got: Tensor | None, want: Tensor | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    tolerance = TOLERANCE.get(want.dtype, 2e-5)
    scale = float(want.abs().max()) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(scale, 1e-6))


def full_rank_is_plain(rank: int, world: int, kind: str, named: bool) -> None:
    torch.manual_seed(3)
    model = KINDS[kind]()
    twin = copy.deepcopy(model)
    state = EDGCState(
        controller=FixedRank(512), model=model if named else None, min_compression_rate=0
    )
    ddp, plain = wrap(model, state, SMALL_BUCKETS_MB), wrap(twin, None, SMALL_BUCKETS_MB)
    for step in range(STEPS):
        pairs = zip(backward(ddp, step, rank), backward(plain, step, rank), strict=True)
        for got, want in pairs:
            same(got, want)
    assert state.metrics()["step"] == STEPS
    metrics = state.metrics()
    assert metrics["dense_bytes"] == 0 or float(metrics["wire_bytes"]) > 0
    reload = EDGCState(controller=FixedRank(512), model=model if named else None)
    reload.load_state_dict(state.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_full_rank_equals_plain_ddp(ranks: Pools, kind: str) -> None:
    ranks(2)(full_rank_is_plain, kind, True)


def nothing_is_lost(rank: int, world: int, kind: str) -> None:
    torch.manual_seed(3)
    model = KINDS[kind]()
    twin = copy.deepcopy(model)
    state = EDGCState(controller=FixedRank(1), min_compression_rate=0)
    ddp, plain = wrap(model, state, SMALL_BUCKETS_MB), wrap(twin, None, SMALL_BUCKETS_MB)
    parameters = [p for p in model.parameters() if p.requires_grad]
    owed: list[Tensor | float] = [0.0] * len(parameters)
    compressed = 0
    for step in range(5):
        got, want = backward(ddp, step, rank), backward(plain, step, rank)
        pairs = [(g, w) for g, w in zip(got, want, strict=True) if g is not None and w is not None]
        for place, (parameter, (average, mean)) in enumerate(zip(parameters, pairs, strict=True)):
            (slot,) = state.engine.registry.slots([parameter])
            if slot.residual is None:
                same(average, mean)
                continue
            compressed += 1
            given = mean.double() + owed[place]
            owed[place] = mean_residual(slot, parameter)
            tolerance = TOLERANCE.get(mean.dtype, 2e-5)
            error = (average.double() + owed[place] - given).norm()
            assert error <= tolerance * given.norm() + 1e-12, (kind, place, float(error))
    expected = [s for s in state.engine.memory.slots.values() if s.sides is not None]
    assert compressed == len(expected) * 3


def mean_residual(slot: Slot, parameter: Tensor) -> Tensor:
    """All ranks' residuals averaged, laid out as the parameter is."""
    assert slot.residual is not None
    mean = slot.residual.double()
    torch.distributed.all_reduce(mean)
    like = torch.empty_like(parameter.detach(), dtype=torch.float64)
    if like.stride() != parameter.stride():
        return mean.view(parameter.shape) / torch.distributed.get_world_size()
    return mean.as_strided(like.shape, like.stride()) / torch.distributed.get_world_size()


@pytest.mark.parametrize("kind", KINDS)
def test_rank_one_loses_nothing(ranks: Pools, kind: str) -> None:
    ranks(2)(nothing_is_lost, kind)


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(x)))


class Wrapping(nn.Module):
    """Its child has the name that DDP gives to what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Backbone()
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(8, 32, generator=generator)
        return (self.head(torch.relu(self.module(x))) - x).square().mean()


def names_of(model: nn.Module) -> list[str]:
    state = EDGCState(controller=FixedRank(2), model=model)
    state.engine.registry.slots(list(model.parameters()))
    return list(state.engine.memory.slots)


def test_a_child_called_module_keeps_its_parameters_apart() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

    model = Wrapping()
    want = ["module.fc.weight", "module.head.weight", "head.weight"]
    assert names_of(model) == names_of(Outer(model)) == names_of(Outer(Outer(model))) == want
    # Where nothing collides, names are what they were in earlier checkpoints.
    assert names_of(Outer(Backbone())) == names_of(Backbone()) == ["fc.weight", "head.weight"]


def wrapped_nothing_is_lost(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = Wrapping()
    twin = copy.deepcopy(model)
    state = EDGCState(controller=FixedRank(32), model=model, min_compression_rate=0)
    ddp, plain = wrap(model, state, SMALL_BUCKETS_MB), wrap(twin, None, SMALL_BUCKETS_MB)
    for step in range(STEPS):
        pairs = zip(backward(ddp, step, rank), backward(plain, step, rank), strict=True)
        for got, want in pairs:
            same(got, want)
    assert len(state.plan()) == 3


def test_a_child_called_module_is_averaged_as_ddp_does(ranks: Pools) -> None:
    ranks(2)(wrapped_nothing_is_lost)
