"""Few bits with error feedback: nothing is lost, all ranks agree, and every byte is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from scenes import Given, averages, draw, plain_mean
from torch.nn.parallel import DistributedDataParallel

from benchmarks.outsiders import BLOCK, FewBits, decode, encode, outsider, outsider_hook

SHAPES = ((40, 30), (7,), (64, 64), (33, 5))
STEPS, START = 6, 2
ALL = sum(torch.Size(shape).numel() for shape in SHAPES)


@pytest.mark.parametrize("bits", [1, 4])
def test_a_code_keeps_its_width_and_its_levels(bits: int) -> None:
    x_E = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0))
    coded = encode(x_E, bits)
    assert coded.dtype == torch.uint8 and len(coded) == 3 * (4 + BLOCK * bits // 8)
    y_E = decode(coded, bits)
    blocks_NB, decoded_NB = x_E.view(3, BLOCK), y_E.view(3, BLOCK)
    if bits == 1:
        assert torch.equal(y_E.sign(), x_E.sign())
        assert torch.allclose(decoded_NB.abs(), blocks_NB.abs().mean(1, keepdim=True))
    else:
        step_N1 = blocks_NB.abs().amax(1, keepdim=True) / 7
        assert ((decoded_NB - blocks_NB).abs() <= 0.5001 * step_N1).all()
    # Coding what was coded changes nothing: every level is one of its own.
    assert torch.allclose(decode(encode(y_E, bits), bits), y_E, rtol=1e-5)


@pytest.mark.parametrize("bits", [1, 4])
def test_zero_stays_zero_and_bad_numbers_show(bits: int) -> None:
    x_E = torch.zeros(2 * BLOCK)
    assert torch.equal(decode(encode(x_E, bits), bits), x_E)
    x_E[0] = torch.nan
    decoded_E = decode(encode(x_E, bits), bits)
    assert decoded_E[:BLOCK].isnan().all() and torch.equal(decoded_E[BLOCK:], x_E[BLOCK:])


def job(rank: int, world: int, kind: str, bucket_cap_mb: float) -> dict[str, Any]:
    state: Any = outsider(kind, START)
    ddp = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=bucket_cap_mb)
    ddp.register_comm_hook(state, outsider_hook)
    given = [torch.zeros(shape) for shape in SHAPES]
    got = [torch.zeros(shape) for shape in SHAPES]
    steps = []
    for step in range(STEPS):
        gradients = draw(SHAPES, seed=10 * step + rank)
        average = averages(ddp, gradients)
        mean = plain_mean(gradients)
        for total, part in zip([*given, *got], [*mean, *average], strict=True):
            total += part
        steps.append((mean, average))
    owed = [(o.first_E, o.second_K) for _, o in sorted(getattr(state, "owed", {}).items())]
    return {"given": given, "got": got, "steps": steps, "owed": owed, "metrics": state.metrics()}


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["4bit", "1bit"])
def test_what_was_averaged_and_what_is_owed_is_what_was_given(
    ranks: Callable[[int], Ranks], kind: str, world: int
) -> None:
    told = ranks(world)(job, kind, 25.0)
    first = told[0]
    for other in told[1:]:
        assert torch.equal(flat(first["got"]), flat(other["got"]))
    for mean, average in first["steps"][:START]:
        assert torch.allclose(flat(mean), flat(average), atol=1e-6)
    mean, average = first["steps"][-1]
    assert torch.allclose(average[1], mean[1], atol=1e-6), "a vector is averaged as it is"
    assert not torch.allclose(average[2], mean[2], atol=1e-2), "a matrix is coded"

    # One bucket; each matrix begins a block of its own, in the bucket's order (the model's reversed).
    owed_E = torch.stack([rank["owed"][0][0] for rank in told]).mean(0)
    owed_E = owed_E + torch.cat([rank["owed"][0][1] for rank in told])
    assert float(owed_E.abs().max()) > 0.01
    at = 0
    for place in reversed(range(len(SHAPES))):
        if len(SHAPES[place]) < 2:
            continue
        size = torch.Size(SHAPES[place]).numel()
        lacking = (first["given"][place] - first["got"][place]).flatten()
        assert torch.allclose(lacking, owed_E[at : at + size], atol=1e-4)
        at += size + -size % BLOCK


@pytest.mark.parametrize("kind", ["4bit", "1bit", "bf16"])
def test_bytes_are_those_of_rings_and_of_both_phases(
    ranks: Callable[[int], Ranks], kind: str
) -> None:
    told = ranks(2)(job, kind, 25.0)[0]
    metrics = told["metrics"]
    assert metrics["dense_bytes"] == STEPS * 4 * ALL
    if kind == "bf16":
        assert metrics["wire_bytes"] == STEPS * 2 * ALL
        mean, average = told["steps"][-1]
        assert torch.allclose(flat(mean), flat(average), atol=0.03)
        assert not torch.equal(flat(mean), flat(average))
        return
    blocks = sum(-(-torch.Size(s).numel() // BLOCK) for s in SHAPES if len(s) > 1)
    blocks += blocks % 2
    coded = blocks * (4 + BLOCK * int(kind[0]) // 8)
    assert metrics["wire_bytes"] == START * 4 * ALL + (STEPS - START) * (4 * 7 + coded)


def test_several_buckets_keep_their_own_debts(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2)(job, "4bit", 0.004)
    assert len(first["owed"]) > 1
    assert torch.equal(flat(first["got"]), flat(second["got"]))
    error = flat(first["given"]) - flat(first["got"])
    # With the debts kept, errors do not add up: no more than about one step's is ever missing.
    assert float(error.abs().max()) < 1.0


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="bits=3: expected 1 or 4"):
        FewBits(3)
    with pytest.raises(ValueError, match="start_iter=1: expected at least 2"):
        FewBits(4, start_iter=1)
    with pytest.raises(ValueError, match="kind='8bit'"):
        outsider("8bit", 2)
