"""The state through PyTorch's own checkpoints, read where there is no process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from scenes import SMALL_BUCKETS_MB, Mlp, fingerprint, seeded, train_step, wrap
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from edgc_ddp import EDGCState
from edgc_ddp.controllers import Accordion, AdaptiveController, EntropyController, LGreco
from edgc_ddp.memory import ParameterMemory, Slot

Pools = Callable[[int], Ranks]
STEPS = 15


def fresh() -> tuple[torch.nn.Module, EDGCState]:
    torch.manual_seed(3)
    model = Mlp(width=32, depth=4)
    controller = EntropyController(window=10, warmup=8, r_max=12, r_min=2, warmup_limit=10)
    return model, EDGCState(controller=controller, model=model)


def trained(
    model: torch.nn.Module, state: EDGCState, rank: int, first: int, last: int
) -> torch.nn.Module:
    ddp = wrap(model, state, SMALL_BUCKETS_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(first, last):
        train_step(ddp, optimizer, torch.randn(4, 32, generator=seeded(step, rank)))
    return model


def saving(rank: int, world: int, folder: str, saved: int) -> bytes:
    """Trains through, and leaves a checkpoint on the way."""
    model, state = fresh()
    trained(model, state, rank, 0, saved)
    # A name for each rank, since residuals differ; the model is the same on all.
    content = {"model": model.state_dict(), f"hook-{rank}": state.state_dict()}
    dcp.save(content, checkpoint_id=folder)
    torch.save(state.state_dict(), f"{folder}/hook-{rank}.pt")
    return fingerprint(trained(model, state, rank, saved, saved + STEPS))


def going_on(rank: int, world: int, file: str, saved: int) -> bytes:
    content = torch.load(file, weights_only=True)
    model, state = fresh()
    model.load_state_dict(content["model"])
    state.load_state_dict(content[f"hook-{rank}"])
    return fingerprint(trained(model, state, rank, saved, saved + STEPS))


@pytest.mark.parametrize(
    "saved", [0, 1, 25], ids=["before any gradient", "before any decision", "while compressing"]
)
def test_a_distributed_checkpoint_is_read_without_a_process_group(
    ranks: Pools, tmp_path: Path, saved: int
) -> None:
    ends = ranks(2)(saving, str(tmp_path), saved)
    assert not dist.is_initialized()
    file = tmp_path / "joined.pt"
    dcp_to_torch_save(tmp_path, file)
    content = torch.load(file, weights_only=True)
    for rank in range(2):
        plain = torch.load(tmp_path / f"hook-{rank}.pt", weights_only=True)
        _, state = fresh()
        state.load_state_dict(content[f"hook-{rank}"])
        same(state.state_dict(), plain)
    owing = any(entry["residual"] is not None for entry in plain["slots"].values())
    assert owing == (saved == 25)
    assert ranks(2)(going_on, str(file), saved) == ends


CONTROLLERS = {
    # With bounds, since measured ones differ from run to run.
    "edgc": EntropyController(window=10, r_max=8, r_min=2),
    "edgc_code": EntropyController(
        policy="edgc_code", window=4, warmup=4, warmup_limit=4, r_max=8, r_min=2
    ),
    "adaptive": AdaptiveController(window=4, warmup=10),
    "accordion": Accordion(8, 2, window=4),
    "lgreco": LGreco(4, window=4),
}


def passing_through(rank: int, world: int, name: str) -> None:
    """From any step: what a distributed checkpoint makes of the state trains as the state does."""
    ends: set[bytes] = set()
    for saved in (None, 3, 7, 13):
        torch.manual_seed(3)
        model = Mlp(width=32, depth=2)
        state = EDGCState(controller=CONTROLLERS[name], model=model)
        trained(model, state, rank, 0, saved or 0)
        if saved is not None:
            flat, mappings = flatten_state_dict({"hook": state.state_dict()})
            again = unflatten_state_dict(flat, mappings)["hook"]
            state = EDGCState(controller=CONTROLLERS[name], model=model)
            state.load_state_dict(again)
        ends.add(fingerprint(trained(model, state, rank, saved or 0, 24)))
    assert len(ends) == 1


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_controllers_memory_passes_through(ranks: Pools, name: str) -> None:
    """Distributed checkpoints keep no empty dictionary, and a young memory is made of such."""
    ranks(2)(passing_through, name)


def same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor) and got.dtype == want.dtype
        assert torch.equal(got, want)
    elif isinstance(want, Mapping):
        assert set(got) == set(want), set(got) ^ set(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            same(one, other)
    else:
        assert got == want or (got != got and want != want), (got, want)


def test_a_basis_changes_its_rank_alike_however_it_lies_in_memory() -> None:
    """A reduction leaves it with columns in one piece, a distributed checkpoint with rows."""
    for seed in range(20):
        drawn_RN = torch.randn(11, 64, generator=torch.Generator().manual_seed(seed))
        for rank in (7, 15):
            got = []
            for basis_NR in (drawn_RN.t(), drawn_RN.t().contiguous()):
                slot = Slot("w", 32 * 64, (32, 64), rank=11, basis_NR=basis_NR)
                ParameterMemory(0, torch.float32).set_rank(slot, rank, torch.device("cpu"))
                got.append(slot.basis_NR)
            assert torch.equal(*got)  # type: ignore[arg-type]


def a_new_threads_products(rank: int, world: int) -> None:
    """The lane's thread must round as every other does from its first product on."""
    models = []
    for again in (False, True):
        model, state = fresh()
        trained(model, state, rank, 0, 25)
        if again:
            # A thread that is new, and nothing else.
            state.close()
        models.append(fingerprint(trained(model, state, rank, 25, 30)))
    assert models[0] == models[1]


def test_a_new_thread_changes_no_bit(ranks: Pools) -> None:
    ranks(2)(a_new_threads_products)
