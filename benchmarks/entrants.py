"""A contestant brought to life on one rank: its own DDP instance, one step at a time."""

# No `from __future__ import annotations` here: DDP checks a hook's annotations as objects.
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants import Contestant, dense_claim, ring_bytes
from benchmarks.workloads import Workload
from edgc_ddp import EDGCState, edgc_hook
from edgc_ddp.controllers import EntropyController, FixedRank

WARM_UP_STEPS = 5
"""Two dense iterations, the bucket rebuild, the first compressed one, and one to settle."""
_ONE_BUCKET_MB = 1 << 20
_SEED = 0
_SHORT = 10
"""Iterations of a warm-up and of a window of a controller; 1000 by default."""


class Entrant:
    """Runs one contestant. ``weights`` is the module whose weights all entrants of a rank share."""

    def __init__(
        self, contestant: Contestant, workload: Workload, weights: nn.Module | None
    ) -> None:
        self.contestant = contestant
        self.module = _build(workload, weights)
        self._steps = 0
        cap = _ONE_BUCKET_MB if contestant.kind == "powersgd" else contestant.cap_mb
        options: dict[str, Any] = {} if cap is None else {"bucket_cap_mb": cap}
        self.ddp = DistributedDataParallel(
            self.module,
            # Equal seeds already gave equal weights.
            init_sync=False,
            gradient_as_bucket_view=workload.bucket_views,
            **options,
        )
        self.state: EDGCState | powerSGD_hook.PowerSGDState | None = None
        self._register()

    def _register(self) -> None:
        kind, rank = self.contestant.kind, self.contestant.rank
        if kind == "none":
            self.ddp.register_comm_hook(None, no_communication)
        elif kind == "fp16":
            self.ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        elif kind == "bf16":
            self.ddp.register_comm_hook(None, to_bf16)
        elif kind == "powersgd":
            self.state = powerSGD_hook.PowerSGDState(
                dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=2
            )
            self.ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
        elif kind == "edgc":
            self.state = EDGCState(
                controller=FixedRank(rank),
                model=self.module,
                wire_dtype=self.contestant.wire,
                residual_dtype=self.contestant.residual,
                start_iter=2,
            )
            self.ddp.register_comm_hook(self.state, edgc_hook)
        elif kind == "auto":
            controller = EntropyController(window=_SHORT, warmup=_SHORT)
            self.state = EDGCState(controller=controller, model=self.module)
            self.ddp.register_comm_hook(self.state, edgc_hook)

    def step(self) -> None:
        """Forward, backward, averages in ``.grad``. No optimizer: it costs everyone the same."""
        self.ddp.zero_grad(set_to_none=True)
        self.ddp(self._steps).backward()
        self._steps += 1

    def settle(self) -> None:
        """Steps until what is to be measured has begun; as many on all ranks."""
        for _ in range(WARM_UP_STEPS):
            self.step()
        while self._is_preparing():
            self.step()

    def _is_preparing(self) -> bool:
        return (
            isinstance(self.state, EDGCState)
            and isinstance(self.state.controller, EntropyController)
            and self.state.metrics()["phase"] in ("start", "warmup", "calibration")
        )

    def claimed_bytes(self) -> float | None:
        """Bytes this rank says it has sent so far; None when the contestant does not say."""
        hosts = dist.get_world_size()
        if isinstance(self.state, EDGCState):
            return float(self.state.metrics()["wire_bytes"])
        numel = sum(parameter.numel() for parameter in self.module.parameters())
        if isinstance(self.state, powerSGD_hook.PowerSGDState):
            sent = self.state.total_numel_after_compression
            # Its count leaves out the steps before compression starts.
            return ring_bytes(4 * sent, hosts)
        return self._steps * dense_claim(self.contestant.kind, numel, hosts)

    def averages(self) -> list[Tensor]:
        """The averaged gradients of the last step, in the model's order."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def close(self) -> None:
        """Stop what runs in the background."""
        if isinstance(self.state, EDGCState):
            self.state.close()


class EpfmlEntrant(Entrant):
    """epfml's code: no DDP; averages after backward, and leaves the error in ``.grad``."""

    def __init__(
        self, contestant: Contestant, workload: Workload, weights: nn.Module | None, checkout: str
    ) -> None:
        # The base class would wrap the module in DDP, whose hooks would average a second time.
        self.contestant = contestant
        self.module = _build(workload, weights)
        self.state = None
        self._steps = 0
        package = _epfml(checkout)
        self._parameters = list(self.module.parameters())
        # Two iterations, left and right, make what the paper and torch call one step; its default of
        # one sends a single factor per step.
        config = package.Config(
            rank=contestant.rank, num_iters_per_step=2, start_compressing_after_num_steps=2
        )
        self._aggregator = package.PowerSGD(self._parameters, config)
        self._averages: list[Tensor] = []

    def step(self) -> None:
        self.module(self._steps).backward()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._averages = self._aggregator.aggregate(gradients)
        self._steps += 1

    def claimed_bytes(self) -> float | None:
        return None

    def averages(self) -> list[Tensor]:
        return self._averages


def enter(
    contestant: Contestant, workload: Workload, weights: nn.Module | None, epfml: str | None
) -> Entrant:
    """The entrant for a contestant. Collective: all ranks call it in the same order.

    Raises:
        ValueError: epfml's code is asked for and ``epfml`` names no checkout of it.
    """
    if contestant.kind != "epfml":
        return Entrant(contestant, workload, weights)
    if epfml is None:
        raise ValueError(f"{contestant.name} needs --epfml PATH, a checkout of epfml/powersgd")
    return EpfmlEntrant(contestant, workload, weights, epfml)


def _build(workload: Workload, weights: nn.Module | None) -> nn.Module:
    module = workload.build(_SEED)
    if weights is not None:
        for mine, shared in zip(module.parameters(), weights.parameters(), strict=True):
            mine.data = shared.data
    return module


def _epfml(checkout: str) -> Any:
    if not (Path(checkout) / "powersgd" / "powersgd.py").is_file():
        raise ValueError(
            f"--epfml={checkout!r}: no powersgd/powersgd.py there; name a checkout's root"
        )
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    return importlib.import_module("powersgd")


def no_communication(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Returns the local gradients: what a step costs when averaging costs nothing."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def to_bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What torch's bf16_compress_hook does, under a name that DDP accepts on CPU."""
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))
