"""One rank of a small training run that ends in the way it is told to."""

from __future__ import annotations

import gc
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from scenes import SMALL_BUCKETS_MB, Mlp, seeded, wrap

from edgc_ddp import EDGCState
from edgc_ddp.controllers import FixedRank
from edgc_ddp.decisions import Layout, Plan


class Refusing:
    """Fails at its second decision, on the lane's own thread."""

    def init(self, layout: Layout) -> dict[str, Any]:
        return {"matrices": {matrix.name: 2 for matrix in layout.matrices}}

    def decide(
        self, state: dict[str, Any], observation: object, step: int
    ) -> tuple[dict[str, Any], Plan]:
        if step > 4:
            raise ArithmeticError("controller said no")
        return state, Plan(state["matrices"], "refusing", until=6)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("my own error")


def main(way: str, rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    # A shell lets its background jobs ignore it, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=4 if way == "stall" else 30),
    )
    torch.manual_seed(0)
    state = EDGCState(controller=Refusing() if way == "controller" else FixedRank(3))
    ddp = wrap(Mlp(width=32, depth=8), state, SMALL_BUCKETS_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    step = 0
    while step < 6 or way == "for ever":
        if step == 4:
            print("ready", flush=True)
        if step == 4 and way == "stall" and rank == 0:
            time.sleep(10)
            return
        optimizer.zero_grad()
        x = torch.randn(4, 32, generator=seeded(step, rank))
        output = ddp(x)
        if way == "raise in backward" and step == 5:
            output = Failing.apply(output)
        output.square().mean().backward()
        optimizer.step()
        step += 1
    ending(way, state, ddp, optimizer, x)


def ending(way: str, state: EDGCState, ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    if way == "controller":
        try:
            ddp(x).square().mean().backward()
        except RuntimeError as error:
            print("caught:", error)
    elif way == "sys.exit":
        sys.exit(3)
    elif way == "drop":
        del state, ddp, optimizer
        gc.collect()
    if way in ("close", "close then destroy"):
        state.close()
    if way in ("destroy", "close then destroy", "destroy then close", "raise then destroy"):
        dist.destroy_process_group()
    if way == "destroy then close":
        state.close()
    if way in ("raise", "raise then destroy"):
        raise ValueError("my own error")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
