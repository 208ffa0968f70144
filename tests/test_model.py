"""The model: causal, tied, equal for equal seeds, and able to learn."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from edgc_ddp.train.loop import learning_rate, make_optimizer
from edgc_ddp.train.model import build, shapes, skeleton
from edgc_ddp.train.schema import Config, ModelConfig, ScheduleConfig

CPU = torch.device("cpu")
SMALL = ModelConfig(width=32, layers=2, heads=4, context=16)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def some_bytes(batch: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (batch, 16), generator=torch.Generator().manual_seed(0))


def test_a_byte_cannot_see_the_bytes_after_it() -> None:
    model, first = build(SMALL, 0, CPU), some_bytes()
    second = first.clone()
    second[:, 9:] = (second[:, 9:] + 1) % 256
    before, after = model(first), model(second)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_the_first_loss_is_that_of_a_guess() -> None:
    data, targets = some_bytes(64).split(32)
    loss = F.cross_entropy(build(SMALL, 0, CPU)(data).flatten(0, 1), targets.flatten())
    assert abs(loss.item() - math.log(256)) < 0.1


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = build(SMALL, 1, CPU), build(SMALL, 1, CPU), build(SMALL, 2, CPU)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.tokens.weight, other.tokens.weight)


def test_initial_scales_are_those_of_gpt2() -> None:
    model = build(ModelConfig(width=256, layers=8, heads=4, context=64), 0, CPU)
    weights = dict(model.named_parameters())
    assert weights["blocks.0.up.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    residual = weights["blocks.3.down.weight"].std().item()
    assert residual == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert torch.all(weights["blocks.0.norm1.weight"] == 1)
    assert torch.all(weights["blocks.0.attention.qkv.bias"] == 0)


def test_the_skeleton_has_the_shapes_of_the_model() -> None:
    assert shapes(skeleton(SMALL)) == shapes(build(SMALL, 0, CPU))
    names = shapes(skeleton(SMALL))
    assert names["tokens.weight"] == [256, 32]
    assert not any("head" in name for name in names), "the output weights are the embedding"


def test_it_learns_a_repeating_text() -> None:
    config = Config(model=SMALL)
    config.optimizer.lr = 3e-3
    model = build(SMALL, 0, CPU)
    optimizer = make_optimizer(model, config)
    text = torch.tensor(list(b"to be or not to be, ")).repeat(4)
    data = torch.stack([text[start : start + 17] for start in range(20)])
    for _ in range(120):
        loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def test_only_matrices_decay() -> None:
    optimizer = make_optimizer(build(SMALL, 0, CPU), Config(model=SMALL))
    matrices, vectors = optimizer.param_groups
    assert matrices["weight_decay"] == 0.1 and vectors["weight_decay"] == 0.0
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}


def test_the_rate_rises_once_and_falls_to_its_floor() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup=0.1, floor=0.1)
    rates = [learning_rate(step, 200, 1.0, schedule) for step in range(200)]
    peak = rates.index(max(rates))
    assert 19 <= peak <= 20
    assert all(a < b for a, b in zip(rates[:peak], rates[1 : peak + 1], strict=True))
    assert all(a > b for a, b in zip(rates[20:-1], rates[21:], strict=True))
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    constant = ScheduleConfig(kind="constant", warmup=0.0)
    assert {learning_rate(step, 50, 0.3, constant) for step in range(50)} == {0.3}
