"""The CUDA path: the same averages as on the CPU, on a side stream, without making the host wait."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scenes import Given, averages, draw, wrap

from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.controllers import EntropyController, FixedRank
from edgc_ddp.lane import StreamLane

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
]
SHAPES = [(24, 40), (64, 24), (24, 40), (16,)]


def start(rank: int, world: int, port: int) -> torch.device:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    return torch.device("cuda", rank)


def strict_hook(state: EDGCState, bucket: dist.GradBucket) -> Any:
    """Any wait of the host inside the hook is an error, except where ranks meet or decide."""
    progress = state.engine.progress
    deciding = state.engine._lane is None or progress.step >= progress.plan.until
    torch.cuda.set_sync_debug_mode("default" if deciding else "error")
    try:
        return edgc_hook(state, bucket)
    finally:
        torch.cuda.set_sync_debug_mode("default")


strict_hook.__annotations__ = dict(edgc_hook.__annotations__)


def against_the_cpu(rank: int, world: int, port: int, wire: str) -> None:
    device = start(rank, world, port)
    outcomes = []
    for where, group in ((device, None), (torch.device("cpu"), dist.new_group(backend="gloo"))):
        state = EDGCState(controller=FixedRank(4), wire_dtype=wire, process_group=group)
        model = Given(SHAPES).to(where)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(state, strict_hook if where == device else edgc_hook)
        for step in range(5):
            gradients = [g.to(where) for g in draw(SHAPES, seed=10 * step + rank)]
            got = [g.cpu() for g in averages(ddp, gradients)]
        outcomes.append(got)
        if where == device:
            assert isinstance(state.engine._lane, StreamLane)
    tolerance = 1e-3 if wire == "fp32" else 5e-2
    for cuda, cpu in zip(*outcomes, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=tolerance, atol=tolerance)
    dist.destroy_process_group()


def whole_controller(rank: int, world: int, port: int) -> None:
    """Warm-up, probes, windows and a bad step, none of which may make the host wait."""
    device = start(rank, world, port)
    controller = EntropyController(window=6, warmup=6, warmup_limit=8, r_max=8, r_min=2, alpha=0.5)
    state = EDGCState(controller=controller)
    ddp = wrap(Given(SHAPES).to(device), None)
    ddp.register_comm_hook(state, strict_hook)
    for step in range(40):
        gradients = [g.to(device) for g in draw(SHAPES, seed=10 * step + rank)]
        if step == 25:
            gradients[0][0, 0] = float("nan")
        got = averages(ddp, gradients)
        assert torch.isfinite(got[0]).all() == (step != 25)
    assert state.metrics()["phase"] == "compress" and state.metrics()["entropy"] < 5
    dist.destroy_process_group()


def moves_to_the_gpu(rank: int, world: int, port: int) -> None:
    """The same parameters, wrapped anew on the device, with the state of the CPU's iterations."""
    device = start(rank, world, port)
    group = dist.new_group(backend="gloo")
    model = Given(SHAPES)
    state = EDGCState(controller=FixedRank(4), model=model, process_group=None)
    state.engine.process_group = group
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(state, edgc_hook)
    for step in range(4):
        averages(ddp, draw(SHAPES, seed=10 * step + rank))
    owed = sum(t.norm().item() for t in state.engine.memory.tensors())
    state.engine.process_group = None
    ddp = wrap(model.to(device), None)
    ddp.register_comm_hook(state, strict_hook)
    averages(ddp, [g.to(device) for g in draw(SHAPES, seed=rank)])
    kept = state.engine.memory.tensors()
    assert owed and {tensor.device for tensor in kept} == {device}
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def worlds() -> list[int]:
    return [world for world in (1, 2) if world <= max(1, torch.cuda.device_count())]


@pytest.mark.parametrize("world", worlds())
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_the_side_stream_gives_the_averages_of_the_cpu(world: int, wire: str) -> None:
    mp.spawn(against_the_cpu, args=(world, free_port(), wire), nprocs=world)


def test_a_state_moves_with_its_model() -> None:
    mp.spawn(moves_to_the_gpu, args=(1, free_port()), nprocs=1)


@pytest.mark.parametrize("world", worlds())
def test_a_whole_run_never_makes_the_host_wait(world: int) -> None:
    mp.spawn(whole_controller, args=(world, free_port()), nprocs=world)
