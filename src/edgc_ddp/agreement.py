"""What ranks must agree on before anything is averaged, and what a rank must not be given."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from edgc_ddp.decisions import FOREVER, Controller, Layout, Plan, Sampling, is_count
from edgc_ddp.lane import Lane
from edgc_ddp.maths.entropy import resolve_estimator
from edgc_ddp.maths.orthogonal import orthonormalise
from edgc_ddp.memory import ParameterMemory
from edgc_ddp.progress import Progress
from edgc_ddp.reducers.bucket import Settings

_ROWS, _RANK = 768, 32
"""Of the matrix that shows how a rank computes: large enough to be cut among threads."""


def require_equal_starts(
    lane: Lane,
    progress: Progress,
    settings: Settings,
    memory: ParameterMemory,
    controller: Controller,
) -> None:
    """Raise RuntimeError on all ranks unless they begin alike. Ranks that differ in what decides when
    they send, and what, would wait for each other for ever."""
    text = (
        f"<iteration {progress.step}, next decision at {progress.plan.until}, {settings}, "
        f"residual_dtype={memory.residual_dtype}, seed={memory.seed}, "
        f"controller {type(controller).__name__}, plan {progress.plan.digest()}>"
    )
    lane.require_equal(
        hashlib.sha256(text.encode()).hexdigest(),
        lambda: text,
        "the ranks start from different states",
        "Give EDGCState the same options on all ranks, and load a state on all or on none.",
    )


def require_equal_arithmetic(lane: Lane) -> None:
    """Raise RuntimeError on all ranks unless equal numbers give them equal results to the last bit.

    Each rank orthogonalises P and forms P Q^T for itself. Where these differ, so do the averages, and the
    ranks' weights drift apart, a little in each step, and nothing brings them together again.
    """
    # How a product is cut among threads shows in its last bits for some shapes only.
    threads = torch.get_num_threads() if lane.device.type == "cpu" else 0
    text = f"<{threads} threads, results {arithmetic_digest(lane.device)}>"
    lane.require_equal(
        hashlib.sha256(text.encode()).hexdigest(),
        lambda: text,
        "the ranks compute differently, which would make their weights drift apart",
        "Give torch.set_num_threads the same number on all ranks (OMP_NUM_THREADS, which torchrun sets, "
        "does it too), and use one kind of processor and one PyTorch. 0 threads stand for a GPU.",
    )


def arithmetic_digest(device: torch.device) -> str:
    """Sixteen hex digits of what this device makes of fixed numbers. Waits for it.

    >>> arithmetic_digest(torch.device("cpu")) == arithmetic_digest(torch.device("cpu"))
    True
    """
    generator = torch.Generator().manual_seed(0)
    drawn_MR = torch.randn(_ROWS, _RANK, generator=generator, device="cpu", dtype=torch.float32)
    # With a column that depends on another, rounding alone decides where the last direction points.
    drawn_MR[:, -1] = drawn_MR[:, 0]
    # The trainer's autocast does not reach the lane.
    with torch.autocast(device.type, enabled=False):
        p_MR = orthonormalise(drawn_MR.to(device))
        average_MM = torch.mm(p_MR, p_MR.t())
    results = torch.cat([p_MR.flatten(), average_MM.flatten()]).cpu()
    return hashlib.sha256(results.numpy().tobytes()).hexdigest()[:16]


def require_equal_plans(lane: Lane, plan: Plan) -> None:
    """Raise RuntimeError on all ranks unless they decided alike."""
    lane.require_equal(
        plan.digest(),
        lambda: _described(plan),
        "the ranks decided on different plans",
        "Give the controller the same options on all ranks. One of your own must decide from its arguments "
        "alone: no random numbers, clocks, or values that differ between ranks.",
    )


def check_world_size(loaded: int, world_size: int) -> None:
    """Raise ValueError where the loaded state is one of another number of ranks; 0 is not known."""
    if loaded and world_size and loaded != world_size:
        raise ValueError(
            f"the state is one of {loaded} ranks, this run has {world_size}: join the states of all ranks "
            "first, edgc_ddp.checkpoint.merge([...], world_size)"
        )


def check_origin(origin: int | None, rank: int) -> None:
    """Raise ValueError where a rank was given another one's state: residuals would be counted twice or
    never."""
    if origin is not None and origin != rank:
        raise ValueError(
            f"rank {rank} was given the state of rank {origin}: save and load one state for each rank, "
            "since what is still to be sent differs, or load on all ranks what "
            "edgc_ddp.checkpoint.merge(states of all ranks, world_size) gives"
        )


def checked_plan(plan: Plan, layout: Layout, step: int) -> Plan:
    """A controller is a stranger's code: refuse what would break the average, name what it gave."""
    names = {matrix.name for matrix in layout.matrices}
    if set(plan.ranks) != names:
        odd = sorted(set(plan.ranks) ^ names)[0]
        raise ValueError(
            f"the controller's plan and the model differ in matrix {odd!r}: a plan names every matrix "
            "of the layout and nothing else (0 = dense)"
        )
    for name, rank in plan.ranks.items():
        if not is_count(rank):
            raise ValueError(
                f"the controller gave rank {rank!r} for {name!r}: expected an int >= 0"
            )
    if not is_count(plan.until) or plan.until <= step:
        raise ValueError(
            f"the controller's plan ends at iteration {plan.until!r}, but it is {step} now: give a later "
            "`until`, an int, or edgc_ddp.decisions.FOREVER"
        )
    if not is_count(plan.probe_rank):
        raise ValueError(
            f"the controller's plan has probe_rank={plan.probe_rank!r}: expected an int >= 0"
        )
    if not isinstance(plan.phase, str) or not isinstance(plan.reason, str):
        raise ValueError(
            f"the controller's plan has phase={plan.phase!r} and reason={plan.reason!r}: expected texts"
        )
    if plan.sampling is not None:
        _check_sampling(plan.sampling)
    return replace(plan, ranks={m.name: min(plan.ranks[m.name], m.rows) for m in layout.matrices})


def _check_sampling(sampling: Sampling) -> None:
    if not sampling.has_shares():
        raise ValueError(
            f"the controller's plan samples with alpha={sampling.alpha!r} and beta={sampling.beta!r}: "
            "expected shares, alpha in [0, 1] and beta in (0, 1]"
        )
    resolve_estimator(sampling.estimator)


def _described(plan: Plan) -> str:
    ranks = ", ".join(f"{name}: {rank}" for name, rank in plan.ranks.items())
    until = "for good" if plan.until >= FOREVER else f"until {plan.until}"
    return f"<{plan.phase} {until}, ranks {{{ranks}}}>"
